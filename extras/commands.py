"""The commands info, plot, tensorboard, export and doctor of run.py. Needs click.

    add_commands(cli, extra, usage_errors, open_storage, newest_checkpoint)    # in run.py

Importing this file takes no time: what the commands need is imported when one of them is used.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import click

FORMATS = click.Choice(["hf", "safetensors", "nanogpt", "checkpoint"])


def add_commands(
    cli: click.Group,
    extra: Callable[[str], ModuleType],
    usage_errors: Callable[[], AbstractContextManager[Any]],
    open_storage: Callable[[str], Any],
    newest_checkpoint: Callable[[str], dict[str, Any]],
) -> None:
    """Add the commands to `cli`.

    extra: imports extras/NAME.py. usage_errors: turns ValueError, OSError and ImportError into
    errors of one line. open_storage(folder or URL): the functions of ckpt.py for that place.
    newest_checkpoint(folder or URL): the state of the newest checkpoint that verifies, with the
    keys that run.py saves and "name", its path; ValueError if there is none.
    """

    @cli.command("info")
    @click.argument("out", envvar="DDPKIT_OUT", default="out")
    def info(out: str) -> None:
        """Describe the newest checkpoint in OUT.

        Then print for each checkpoint whether it verifies.

        \b
          python run.py info out
        """
        with usage_errors():
            storage, describe = open_storage(out), extra("describe")
            entries = storage.list_checkpoints(out)
            state, lines = describe.verify_all(entries, partial(storage.load, out))
            # A training that is going on can have deleted some of them meanwhile.
            left = {entry.name for entry in storage.list_checkpoints(out)}
            lines = [line for entry, line in zip(entries, lines) if entry.name in left]
            if state:
                texts = (storage.read_text(out, name) for name in ("metrics.jsonl", "config.json"))
                lines.insert(0, describe.describe(state, *texts))
        for line in lines:
            click.echo(line)
        if not state:
            advice = " that can be used" if lines else "; train first, or name another folder"
            raise click.UsageError(f"{out}: there is no checkpoint{advice}")

    @cli.command("plot")
    @click.argument("outs", nargs=-1, required=True, metavar="OUT...")
    @click.option(
        "-o", "--output", default="loss.png", metavar="FILE", help="A .png, .svg or .pdf."
    )
    def plot(outs: tuple[str, ...], output: str) -> None:
        """Draw the metrics of the runs in the folders OUT.

        One figure shows loss, tokens/s and learning rate of all runs.

        \b
          python run.py plot out out-wider -o loss.svg
        """

        def text(out: str, name: str) -> str:
            if "://" in out:
                return str(open_storage(out).read_text(out, name))
            # not with ckpt.read_text, since importing ckpt would import torch
            try:
                return Path(out, name).read_text(encoding="utf-8", errors="replace")
            except (FileNotFoundError, NotADirectoryError) as error:
                raise ValueError(f"{out}: is not the folder of a run: {error}") from None

        with usage_errors():
            plot = extra("plot")
            names = ("metrics.jsonl", "config.json")
            plot.draw(
                [plot.parse(out, *(text(out, name) for name in names)) for out in outs], output
            )
        click.echo(f"wrote {output}")

    @cli.command("tensorboard")
    @click.argument("outs", nargs=-1, required=True, metavar="OUT...")
    def tensorboard(outs: tuple[str, ...]) -> None:
        """Write the metrics in the folders OUT for TensorBoard.

        Call it again during a training, to get the newer metrics.

        \b
          python run.py tensorboard out && tensorboard --logdir out
        """
        with usage_errors():
            for out in outs:
                extra("board").write_events(open_storage(out).read_text(out, "metrics.jsonl"), out)
                click.echo(f"wrote events: see them with tensorboard --logdir {out}")

    @cli.command("export")
    @click.argument("out", envvar="DDPKIT_OUT", default="out")
    @click.option(
        "--format",
        type=FORMATS,
        required=True,
        help="safetensors writes a file, the others a folder. hf and nanogpt are only for models "
        "with --arch gpt2. checkpoint is one complete checkpoint, from which training can "
        "continue.",
    )
    @click.option("-o", "--output", required=True, metavar="PATH", help="Must not exist.")
    def export(out: str, format: str, output: str) -> None:
        """Write the newest checkpoint in OUT for other programs. --init-from reads it again.

        \b
          python run.py export out --format safetensors -o mine.safetensors
        """
        with usage_errors():
            if not output:
                raise ValueError("--output '' is empty")
            state = newest_checkpoint(out)
            if format == "checkpoint":
                target = open_storage(output)
                full = os.path.isdir(output) and os.listdir(output)
                if os.path.isfile(output) or full or target.list_checkpoints(output):
                    raise ValueError(f"{output} exists already; choose another path")
                [entry] = target.parse_names([os.path.basename(state["name"])])
                saved = {key: value for key, value in state.items() if key != "name"}
                target.save(output, saved, entry.step, entry.loss)
            else:
                export, exchange = extra("export"), extra("exchange")
                shape = ("arch", "block_size", "layers", "heads", "embd", "dropout")
                config = {name: state["config"][name] for name in shape}
                config["vocab"] = state["vocabulary"]["vocab"]
                words = {name: state["vocabulary"][name] for name in ("kind", "chars")}
                model = exchange.Model(config, words, state["model"])
                export.write(model, format, output, exchange.to_gpt2, exchange.make_tokenizer)
        click.echo(f"wrote {output}")

    @cli.command("doctor")
    def doctor() -> None:
        """Describe the software and the machine, for a bug report.

        \b
          python run.py doctor
        """
        with usage_errors():
            report = extra("doctor").report()
        click.echo(report)
