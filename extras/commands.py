"""The commands info, plot, tensorboard, export, plan and verify, which run.py adds to its own.

Importing this file takes no time: what the commands need is imported when one of them is used.
"""

import multiprocessing
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

import run

FORMATS = click.Choice(["hf", "safetensors", "checkpoint"])
OUTS = click.argument("outs", nargs=-1, required=True, metavar="OUT...")
OUT = click.argument("out", envvar="DDPKIT_OUT", default="out")


@click.command()
@OUT
def info(out: str) -> None:
    """Describe a checkpoint, and verify all of a run.

    OUT: the folder of a run, for its newest checkpoint, or OUT/best or OUT/step-N.

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
        path = Path(out, name)
        if name == "config.json" and not path.exists():
            return ""
        return path.read_text(encoding="utf-8", errors="replace")

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


@click.command(params=[*run.OPTIONS.values()])
@click.option("--ranks", type=run.COUNT, help="Number of processes.  [default: that of --spawn]")
@click.option("--gpu", type=click.Choice([*run.DATASHEET]), default="H100", help="For the hours.")
@click.option(
    "--mfu",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.4,
    help="Part of the GPU's bfloat16 rate that the training reaches.",
)
@click.option(
    "--config",
    metavar="FILE",
    help="A TOML file of flags, as in training.",
    callback=run.read_config,
    is_eager=True,
    expose_value=False,
)
def plan(ranks: int | None, gpu: str, mfu: float, **values: Any) -> None:
    """Print what a training will need, before it runs.

    It takes the flags of the training. It reads the data, and prints steps, memory, what is sent,
    FLOP and hours. It plans for GPUs and without torch.compile, which needs less memory.
    --device cpu plans for CPUs.

    \b
      python run.py plan --data mine.txt --layers 12 --heads 12 --embd 768 --ranks 8 --gpu A100
    """
    source, ctx = click.core.ParameterSource, click.get_current_context()
    given = {n for n in values if ctx.get_parameter_source(n) is not source.DEFAULT}
    flags = run.Flags(**values)
    ranks = ranks or flags.spawn or 1
    if flags.dtype == "auto" and flags.device != "cpu":
        flags = replace(flags, dtype="bfloat16")
    with run.usage_errors():
        import chardata
        import ddp_setup
        import gpt
        from extras import plan

        world = ddp_setup.World(0, 0, 1, 1)  # reads the data alone
        saved = run.read_init(flags, given)
        flags = run.complete_flags(flags, given, saved, world.device)
        corpus, batches, validation = run.load_data(flags, given, saved, world)
        per_epoch = chardata.steps_per_epoch(batches)
        config = run.model_config(vars(flags) | {"vocab": corpus.vocab})
        job = make_job(flags, config, gpt.build(config, None), ranks)
    total, *_ = run.make_schedule(vars(flags), per_epoch)
    tokens = chardata.tokens_before(batches, total)
    flop = gpt.flops_per_token(config) * tokens
    hours = flop / (run.DATASHEET[gpu] * mfu * ranks) / 3600
    time = f"; {hours:,.3g} hours on {ranks} x {gpu} at {mfu:.0%} MFU" * (job.device != "cpu")
    parts = ", ".join(f"{sum(group):,} in {kind}" for kind, group in job.sizes.items())
    sizes = [f"{chardata.num_tokens(each.tokens):,}" for each in (batches, validation)]
    for line in (
        f"parameters   {plan.parameters(job):,}: {parts}",
        f"data         {sizes[0]} tokens, {sizes[1]} in an evaluation; vocabulary {corpus.vocab:,}",
        f"steps        {per_epoch:,} in an epoch, {total:,} in all",
        f"tokens       {flags.batch_size * flags.block_size:,} in a step, {tokens:,} in all",
        f"each rank    {-(-flags.batch_size // ranks)} windows in a step; micro-batches: "
        f"{job.micro_batches}, of {job.rows}",
        f"checkpoint   {plan.size(plan.checkpoint(job))}; --keep {flags.keep} keeps "
        f"{plan.size(plan.checkpoint(job) * (flags.keep + 1))}, with the best one",
        f"computation  {flop:.3g} FLOP in {flags.dtype}{time}",
        "",
        *plan.table(job),
    ):
        click.echo(line)
    if flags.batch_size < ranks:
        run.warn(f"{ranks - flags.batch_size} ranks have no window; give a higher --batch-size")


def make_job(flags: run.Flags, config: Any, model: Any, ranks: int) -> Any:
    """Return what the formulas of plan.py take. config, model: those of gpt.py."""
    import gpt
    from extras import plan

    windows = -(-flags.batch_size // ranks)  # of a rank that has the most
    micro_batches = min(flags.accum, windows)
    return plan.Job(
        config.arch,
        config.vocab,
        config.layers,
        config.embd,
        config.block_size,
        {kind: [p.numel() for p in group] for kind, group in gpt.parameter_groups(model).items()},
        flags.optimizer,
        flags.dtype,
        rows=-(-windows // micro_batches),
        micro_batches=micro_batches,
        ranks=ranks,
        heads=config.heads,
        checkpoint_activations=flags.checkpoint_activations,
        device="cpu" if flags.device == "cpu" else "cuda",
    )


@click.command(params=[run.OPTIONS[name] for name in ("device", "data")])
@OUT
@click.option(
    "--from", "first", type=run.COUNT, help="First step.  [default: the one kept before --to]"
)
@click.option("--to", "last", type=run.COUNT, help="Last step.  [default: the newest one kept]")
@click.option("--spawn", type=run.COUNT, metavar="N", help="Start N processes, as in training.")
def verify(
    out: str,
    first: int | None,
    last: int | None,
    device: str,
    data: Any,
    spawn: int | None,
) -> int:
    """Train a part of a run again, and compare.

    It goes from one kept checkpoint in OUT to the next one. With the same number of ranks and CPU
    threads, torch and kind of CPU, all weights and moments must be equal, bit for bit. If they are
    not, a device has made a mistake, or the settings do not give the same result twice. (On CUDA,
    they do only with deterministic algorithms.) Exit code 0: equal. It writes only to a temporary
    folder, so OUT may be in use. Give --data only if the data has moved.

    \b
      python run.py verify out --from 100 --to 200
      torchrun --nproc-per-node 4 run.py verify out
    """
    with run.usage_errors():
        import ddp_setup
        from extras import verify

    if spawn and not multiprocessing.parent_process():
        return ddp_setup.spawn(run.program, spawn)
    return verify.verify(out, first, last, device, data)


COMMANDS = [info, plot, tensorboard, export, plan, verify]
