"""Functions with which the tests of README.md and of the documents in extras/ read these documents."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import run

# flags of other programs that the documents mention
FOREIGN_FLAGS = {
    "torchrun": "--nproc-per-node --nnodes --max-restarts --rdzv-backend --rdzv-id --rdzv-endpoint "
    "--local-addr --standalone --shutdown-timeout",
    "srun, sbatch": "--nodes --ntasks-per-node --gpus-per-node --cpu-bind --exclusive --time --signal "
    "--requeue --open-mode",
    "tests/bench.py": "--gpu --nanogpt --seconds",
    "pytest": "--dist",
    "pip": "--index-url",
    "others": "--bpe --logdir --no-index --check --out_dir --init_from --local-rank --momentum",
}


def section(text: str, title: str) -> str:
    """Return the part of a document from a title to the next title of the same level."""
    level = title.split()[0]
    return re.split(rf"^{level} ", text.split(f"\n{title}\n")[1], flags=re.MULTILINE)[0]


def table_rows(text: str) -> list[list[str]]:
    """Return the cells of all table rows, without the lines below the headings."""
    lines = re.findall(r"^\|(.*)\|$", text, re.MULTILINE)
    return [
        [cell.strip() for cell in line.split("|")]
        for line in lines
        if not re.fullmatch(r"[-|]*", line)
    ]


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def message_templates(paths: list[Path]) -> str:
    """Return all string constants of Python files, one per line, with … for the parts that are filled in."""

    def templates(node: ast.AST) -> Iterator[str]:
        for child in ast.walk(node):
            if isinstance(child, ast.Constant) and isinstance(child.value, str):
                yield child.value
            if isinstance(child, ast.JoinedStr):
                yield "".join(p.value if isinstance(p, ast.Constant) else "…" for p in child.values)

    return "\n".join(text for path in paths for text in templates(ast.parse(path.read_text())))


def quoted_messages(text: str) -> list[str]:
    """Return the messages that the first column of a document's tables quotes: spans of code with a space."""
    return [
        span for row in table_rows(text) for span in re.findall(r"`(.*?)`", row[0]) if " " in span
    ]


def unknown_messages(text: str, paths: list[Path]) -> list[str]:
    """Return the quoted messages that are not in the Python files.

    ddp_setup.py puts "rank …: " before each of its messages in one place.
    """
    known = message_templates(paths)
    messages = [message.removeprefix("rank …: ") for message in quoted_messages(text)]
    return [message for message in messages if message.strip("… ") not in known]


def unknown_flags(text: str) -> set[str]:
    """Return the flags that a document mentions, but neither run.py nor another program has."""
    commands = [run.cli, *run.cli.commands.values()]
    known = {flag for c in commands for p in c.params for flag in [*p.opts, *p.secondary_opts]}
    known |= {flag for flags in FOREIGN_FLAGS.values() for flag in flags.split()} | {"--help"}
    return {*re.findall(r"(?<=[ `(])--[a-z][a-z_-]+", text)} - known


def run_commands(text: str) -> list[str]:
    """Return the lines of a document that start run.py."""
    return re.findall(
        r"^(?:    )?((?:python|torchrun|srun)\b.*\brun\.py\b(?!.*--help).*)", text, re.MULTILINE
    )


def parse_command(line: str) -> None:
    """Let run.py's own parser read a command line; a mistake in it raises a click.UsageError."""
    words = shlex.split(line, comments=True)
    ctx = run.cli.make_context("run.py", words[words.index("run.py") + 1 :])
    # click 8.1 has the name without the underscore.
    [name] = {"protected_args", "_protected_args"} & vars(ctx).keys()
    rest = [*vars(ctx)[name], *ctx.args]
    if rest:
        name, command, words = run.cli.resolve_command(ctx, rest)
        assert command is not None, f"no command {name}"
        command.make_context(name, words, parent=ctx)
