"""Additions to a click group: a TOML file of flags, a check of names, sections on the help page.

    extend(cli, "MYPROGRAM")

    [in run.toml]   batch-size = 64
    $ MYPROGRAM_SEED=1 python myprogram.py --config run.toml --layers 2

A user's mistake is a click.UsageError. Needs click.
"""

import difflib
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import click

# The name of the first flag of each section of the help page of run.py -> the section's title.
SECTIONS = {
    "data": "Data",
    "arch": "Model",
    "epochs": "Training",
    "spawn": "Machine",
    "out": "Output",
}


# Follows the error about an unknown command of run.py.
ADVICE = "To train, give no command. A pattern needs quotes: 'books/*.txt'."


def extend(
    group: click.Group,
    prefix: str,
    sections: Mapping[str, str] = SECTIONS,
    advice: str = ADVICE,
) -> None:
    """Add the flag --config, a check of the environment, and sections on the help page.

    --config names a TOML file with defaults of the group's flags. The environment and the command
    line win over it. Before a command, it holds for the flags that the command shares with the
    group.
    prefix: environment variables that begin with PREFIX_ set flags, and must name flags of the
    group or of its commands.
    sections: maps the name of the first flag of each section to the title of the section.
    advice: is added to the error about an unknown command.
    """
    known = [f"{param.name}" for param in group.params if param.expose_value]
    group.context_settings["auto_envvar_prefix"] = prefix

    def read_config(ctx: click.Context, param: click.Parameter, path: str | None) -> None:
        if path is not None:
            values = read_toml(path, known)
            ctx.default_map = values | {
                name: {key: values[key] for key in values if key in shared_flags(command, prefix)}
                for name, command in group.commands.items()
            }

    text = "A TOML file of flags, with lines such as `batch-size = 64`."
    config = click.Option(["--config"], metavar="FILE", help=text, callback=read_config)
    config.is_eager, config.expose_value = True, False
    group.params.append(config)
    setattr(group, "format_options", _format_options(group, sections))
    invoke = group.invoke

    def check_and_invoke(ctx: click.Context) -> Any:
        check_environment(group, prefix)
        return invoke(ctx)

    setattr(group, "invoke", check_and_invoke)
    resolve_command = group.resolve_command

    def resolve_or_explain(ctx: click.Context, args: list[str]) -> Any:
        name = args[0]
        try:
            return resolve_command(ctx, args)
        except click.UsageError as error:
            if name.startswith("-"):  # an unknown flag
                raise
            raise click.UsageError(f"{error.format_message()} {advice}", ctx) from None

    setattr(group, "resolve_command", resolve_or_explain)


def _format_options(
    group: click.Group, sections: Mapping[str, str]
) -> Callable[[click.Context, click.HelpFormatter], None]:
    def format_options(ctx: click.Context, formatter: click.HelpFormatter) -> None:
        title, rows = "Options", dict[str, list[tuple[str, str]]]()
        for param in group.get_params(ctx):
            title = sections.get(f"{param.name}", title)
            if record := param.get_help_record(ctx):
                rows.setdefault(title, []).append(record)
        for title, records in rows.items():
            with formatter.section(title):
                formatter.write_dl(records)
        group.format_commands(ctx, formatter)

    return format_options


def shared_flags(command: click.Command, prefix: str) -> list[str]:
    """Return the flags of a command that read the environment variables of the group's flags."""
    params = command.params
    return [f"{p.name}" for p in params if p.envvar == f"{prefix}_{p.name}".upper()]


def read_toml(path: str, known: Iterable[str]) -> dict[str, Any]:
    """Return the flags in a TOML file, with underscores in their names.

    Every key must be one of `known`.
    """
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            raise ValueError("is not a regular file, which every process can read")
        with open(path, "rb") as file:
            values = tomllib.load(file).items()
            config = {key.replace("-", "_"): f"{value}" for key, value in values}
            if len(config) < len(values):
                raise ValueError("a flag is given twice, once with - and once with _")
    except (OSError, ValueError, RecursionError) as error:
        what = error.strerror if isinstance(error, OSError) else error
        raise click.UsageError(f"--config {path}: {what}") from None
    for key in config:
        _check_name(key, known, f"--config {path}: key")
    return config


def check_environment(group: click.Group, prefix: str) -> None:
    """Raise UsageError for an environment variable that begins with PREFIX_ and is not a flag."""
    commands: dict[str, click.Command] = {prefix: group}
    commands |= {f"{prefix}_{name}": command for name, command in group.commands.items()}
    known = {
        f"{param.envvar or f'{start}_{param.name}'.upper()}"
        for start, command in commands.items()
        for param in command.params
        if getattr(param, "allow_from_autoenv", True)
    }
    for name in os.environ:
        if name.startswith(f"{prefix}_"):
            _check_name(name, known, "environment variable")


def _check_name(name: str, known: Iterable[str], what: str) -> None:
    if name not in (names := list(known)):
        similar = " or ".join(difflib.get_close_matches(name, names, n=2, cutoff=0))
        raise click.UsageError(f"{what} {name!r} is not a flag; did you mean {similar}?")
