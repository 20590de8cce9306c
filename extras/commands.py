"""The commands info, plot, tensorboard and export of run.py, which adds COMMANDS to its own.

Importing this file takes no time: what the commands need is imported when one of them is used.
"""

import os
from functools import partial
from pathlib import Path

import click

import run

FORMATS = click.Choice(["hf", "safetensors", "checkpoint"])
OUTS = click.argument("outs", nargs=-1, required=True, metavar="OUT...")
OUT = click.argument("out", envvar="DDPKIT_OUT", default="out")


@click.command()
@OUT
def info(out: str) -> None:
    """Describe the newest checkpoint in the folder OUT, or OUT/best or OUT/step-N.

    Then print for each checkpoint whether it verifies.

    \b
      python run.py info out
    """
    with run.usage_errors():
        from extras import describe

        folder, name = run.split_out(out)
        storage = run.open_storage(folder)
        entries = run.choose(storage.list_checkpoints(folder), name)
        state, lines = describe.verify_all(entries, partial(storage.load, folder))
        if state:
            texts = (storage.read_text(folder, file) for file in ("metrics.jsonl", "config.json"))
            lines.insert(0, describe.describe(state, *texts))
    for line in lines:
        click.echo(line)
    if not state:
        advice = " that can be used" if lines else "; train first, or name another folder"
        raise click.UsageError(f"{out}: there is no checkpoint{advice}")


@click.command()
@OUTS
@click.option("-o", "--output", default="loss.png", metavar="FILE", help="A .png, .svg or .pdf.")
def plot(outs: tuple[str, ...], output: str) -> None:
    """Draw the metrics of the runs in the folders OUT.

    One figure shows loss, tokens/s and learning rate of all runs.

    \b
      python run.py plot out out-wider -o loss.svg
    """

    def text(out: str, name: str) -> str:
        if "://" in out:
            return str(run.open_storage(out).read_text(out, name))
        # not with ckpt.read_text, since importing ckpt would import torch
        return Path(out, name).read_text(encoding="utf-8", errors="replace")

    with run.usage_errors():
        from extras import plot

        names = ("metrics.jsonl", "config.json")
        plot.draw([plot.parse(out, *(text(out, name) for name in names)) for out in outs], output)
    click.echo(f"wrote {output}")


@click.command()
@OUTS
def tensorboard(outs: tuple[str, ...]) -> None:
    """Write the metrics in the folders OUT for TensorBoard.

    Call it again during a training, to get the newer metrics.

    \b
      python run.py tensorboard out && tensorboard --logdir out
    """
    with run.usage_errors():
        from extras import board

        for out in outs:
            board.write_events(run.open_storage(out).read_text(out, "metrics.jsonl"), out)
            click.echo(f"wrote events: see them with tensorboard --logdir {out}")


@click.command()
@OUT
@click.option(
    "--format",
    type=FORMATS,
    required=True,
    help="safetensors writes a file, the others a folder. hf is only for models with --arch gpt2. "
    "checkpoint is one complete checkpoint, from which training can continue.",
)
@click.option("-o", "--output", required=True, metavar="PATH", help="Must not exist.")
def export(out: str, format: str, output: str) -> None:
    """Write a model for other programs. --init-from reads it again.

    OUT: the folder of a run, for its newest checkpoint, or OUT/best or OUT/step-N.

    \b
      python run.py export out --format safetensors -o mine.safetensors
    """
    with run.usage_errors():
        from extras import exchange, export

        state = run.read_checkpoint(out)
        if format == "checkpoint":
            storage = run.open_storage(output)
            if os.path.lexists(output) or storage.list_checkpoints(output):
                raise ValueError(f"{output} exists already; choose another path")
            [entry] = storage.parse_names([os.path.basename(state.pop("name"))])
            storage.save(output, state, entry.step, entry.loss)
        else:
            shape = ("arch", "block_size", "layers", "heads", "embd")
            config = {name: state["config"][name] for name in shape}
            config["vocab"] = state["vocabulary"]["vocab"]
            words = {name: state["vocabulary"][name] for name in ("kind", "chars")}
            model = exchange.Model(config, words, state["model"])
            export.write(model, format, output, exchange.to_gpt2, exchange.make_tokenizer)
    click.echo(f"wrote {output}")


COMMANDS = [info, plot, tensorboard, export]
