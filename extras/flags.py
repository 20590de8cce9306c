"""The flags of a click program: from a TOML file too, in groups on the help page, none misspelt.

    OPTIONS = {"Model": [click.option("--layers")], "Other": [click.option("--config", callback=from_toml, is_eager=True)]}

    @click.group(context_settings={"auto_envvar_prefix": "MY"})
    @all_of(OPTIONS)
    def main(**options):
        check_numbers(main, options)

    in_groups(main, OPTIONS)
    check_environment(main, "MY")

What is wrong is a click.UsageError. Needs click, and tomli before Python 3.11.
"""

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import click

Options = Mapping[str, Sequence[Callable[..., Any]]]  # title -> click.option(...), click.version_option(...)


def all_of(options: Options) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: all of them, in their order."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in [option for group in options.values() for option in group][::-1]:
            command = option(command)
        return command

    return add


def in_groups(command: click.Command, options: Options) -> None:
    """Show the command's flags under the titles on its help page."""

    def format_options(ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = (record for param in command.params if (record := param.get_help_record(ctx)))
        for title, group in options.items():
            with formatter.section(title):
                formatter.write_dl(list(islice(records, len(group))))
        if isinstance(command, click.Group):
            command.format_commands(ctx, formatter)

    setattr(command, "format_options", format_options)


def from_toml(ctx: click.Context, param: click.Parameter, path: str | None) -> None:
    """The callback of an eager flag that names a TOML file of flags: they come after the environment's."""
    if path is None:
        return
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        with open(path, "rb") as file:
            config = {key.replace("-", "_"): value for key, value in tomllib.load(file).items()}
    except (OSError, tomllib.TOMLDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else error
        raise click.UsageError(f"--{param.name} {path}: {what}") from None
    known = {other.name for other in ctx.command.params} - {param.name, "version"}
    for key in config:
        if key not in known:
            raise click.UsageError(f"--{param.name} {path}: unknown key {key!r}; known are {', '.join(sorted(known))}")
    ctx.default_map = config


def check_environment(group: click.Group, prefix: str) -> None:
    """A misspelt variable of the environment that begins with `prefix` is an error, as a misspelt flag is."""
    known = {f"{prefix}_{param.name}".upper() for param in group.params}
    for name, command in group.commands.items():
        known |= {f"{prefix}_{name}_{param.name}".upper() for param in command.params}
    for name in os.environ:
        if name.startswith(f"{prefix}_") and name not in known:
            raise click.UsageError(f"environment variable {name}: there is no such flag")


def check_numbers(command: click.Command, values: Mapping[str, Any]) -> None:
    """click's ranges let nan through, and an upper end to each would fill the help page: those without end at 1e12."""
    ends = {param.name: getattr(param.type, "max", None) for param in command.params}
    for name, value in values.items():
        if isinstance(value, (int, float)) and not value < (1e12 if ends[name] is None else math.inf):
            raise click.UsageError(f"--{name.replace('_', '-')} {value}: needs a number, and one below 1e12")


def could_be_given(command: click.Command, values: Mapping[str, Any]) -> bool:
    """Whether each of these values is one that a flag of the command can have."""
    types = {f"{param.name}": param.type for param in command.params}
    try:
        return all(
            value is None or isinstance(value, (str, int, float)) and types[name].convert(value, None, None) == value
            for name, value in values.items()
        )
    except (KeyError, click.BadParameter):
        return False
