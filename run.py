#!/usr/bin/env python3
"""Train a GPT on text, with as many processes as you like.

python run.py                                   one process, a default text, under a minute
python run.py --data mine.txt --spawn 4         four processes on this machine
torchrun --nproc-per-node 4 run.py --epochs 3   the same under torchrun
srun python run.py --epochs 3                   the same under SLURM
python run.py sample --prompt "The "            what the newest checkpoint has to say
python run.py eval --data other.txt             its exact loss on another text
python run.py info, plot, export                what it is; how it came about; for other programs
"""

import codecs
import faulthandler
import functools
import gc
import importlib.util
import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import click

from extras import flags, folder, progress
from extras.mistakes import about, out_of_memory, said, users_mistakes
from extras.progress import Live

# torch, and the modules that import it, are imported where they are used: --help answers at once.

__version__ = "0.1.0"
T = TypeVar("T")
STARTED = time.perf_counter()
PREFIX = "DDPKIT"
DONE, FAILED, STOPPED = 0, 1, 3  # exit codes; 2 is click's, of a user's mistake
AT_ONCE = 8192  # tokens in an evaluation's batch: a CPU is fastest so, and --batch-size need not fit into one rank

_count, _from_zero, _seed = click.IntRange(1), click.IntRange(0), click.IntRange(0, 2**63 - 1)
_positive, _factor = click.FloatRange(0, min_open=True), click.FloatRange(0)
OPTIONS = {
    "Data": [
        click.option("--data", metavar="PATH", help="A file, a glob or an fsspec URL of text, .bin (uint16) or .npy tokens.  [default: a text that comes with Python]"),
        click.option("--vocab", type=click.IntRange(1, 2**32), help="Of .bin, .npy and a tokenizer.json: a number above every id. Above 1 GiB it has to be given.  [default: as the highest id needs]"),
        click.option("--tokens", default="char", metavar="char|byte|FILE.json", help="What one token of a text is; a tokenizer.json of Hugging Face's has its own."),
        click.option("--val-fraction", type=click.FloatRange(0, 1, max_open=True), default=0.1, help="How much of the end of the data is for validation."),
        click.option("--block-size", type=_count, default=128, help="Context length, in tokens."),
        click.option("--batch-size", type=_count, default=16, help="Sequences per optimizer step, over all ranks."),
        click.option("--seed", type=_seed, default=0, help="Of weights, order and dropout."),
    ],
    "Model": [
        click.option("--arch", type=click.Choice(["gpt2", "modern"]), default="modern", help="gpt2 is GPT-2 exactly."),
        click.option("--layers", type=_count, default=4),
        click.option("--heads", type=_count, default=4),
        click.option("--embd", type=_count, default=128, help="Width."),
        click.option("--dropout", type=click.FloatRange(0, 1, max_open=True), default=0.0),
        click.option("--init-from", metavar="PATH", help="Begin with the weights, sizes and vocabulary of an --out folder, of what `export` wrote, or of a GPT-2 of Hugging Face or nanoGPT."),
    ],
    "Training": [
        click.option("--epochs", type=_count, default=1, help="Passes over the data."),
        click.option("--steps", type=_count, help="Optimizer steps, if that ends first.  [default: no limit]"),
        click.option("--optimizer", type=click.Choice(["adamw", "muon"]), default="muon", help="muon: the blocks' matrices by Muon, the rest by AdamW."),
        click.option("--lr", type=_positive, default=6e-3, help="Peak learning rate."),
        click.option("--min-lr", type=_factor, default=0.0, help="Where its decay ends."),
        click.option("--warmup", type=_from_zero, default=20, help="Steps to the peak."),
        click.option("--weight-decay", type=_factor, default=0.1, help="Of matrices."),
        click.option("--clip", type=_factor, default=1.0, help="Largest gradient norm; 0: any."),
        click.option("--accum", type=_count, default=1, help="Parts that each rank's share of a batch is computed in, to fit memory."),
    ],
    "Machine": [
        click.option("--spawn", type=click.IntRange(0, 1024), is_flag=False, flag_value=0, metavar="[N]", help="Start N processes here; without N one per GPU, or per core."),
        click.option("--strategy", type=click.Choice(["ddp", "zero", "fsdp"]), default="ddp", help="ddp: every process holds all. zero, fsdp: a share of weights, gradients and moments; within a step zero has all weights, fsdp one block's. One process: the same."),
        click.option("--device", default="auto", metavar="auto|cpu|cuda|mps"),
        click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto", help="Of the arithmetic; weights stay float32."),
        click.option("--compile/--no-compile", default=None, help="torch.compile the blocks.  [default: on CUDA; on a CPU for long runs]"),
        click.option("--checkpoint-activations", is_flag=True, help="Recompute blocks in the backward pass, to save memory."),
        click.option("--compress", type=click.Choice(["none", "bf16"]), default="none", help="How gradients travel between ranks; bf16: half the bytes."),
        click.option("--timeout", type=_positive, default=600.0, help="Seconds that the ranks wait for one another."),
    ],
    "Output": [
        click.option("--out", default="out", metavar="FOLDER", help="Where checkpoints and metrics go: a folder or an fsspec URL."),
        click.option("--fresh", is_flag=True, help="Start over: discard the run that is in --out."),
        click.option("--eval-every", type=_count, default=100, help="Steps between evaluations."),
        click.option("--save-every", type=_count, default=100, help="Steps between checkpoints."),
        click.option("--log-every", type=_count, default=10, help="Steps between lines of metrics."),
        click.option("--checkpoint", type=click.Choice(["whole", "sharded"]), default="whole", help="whole: one file, gathered and written by rank 0. sharded: a folder, of which every rank writes its share, for a model that is too large for that. One process: the same."),
        click.option("--keep", type=_count, default=3, help="Checkpoints to keep: the last so many, and the best."),
        click.option("--tensorboard", is_flag=True, help="Write the metrics for TensorBoard too, into --out."),
        click.option("--profile", type=_from_zero, default=0, metavar="N", help="Trace N steps, after a few, into trace.json of --out."),
    ],
    "Other": [
        click.option("--config", type=str, callback=flags.from_toml, is_eager=True, expose_value=False, metavar="FILE.toml", help="Any of these flags, as `batch-size = 64`."),
        click.version_option(__version__, prog_name="ddpkit", allow_from_autoenv=False),
    ],
}  # fmt: skip
# what a checkpoint was made with and cannot go on without: the model, and the order of the data
PINNED = (
    "tokens", "vocab", "val_fraction", "block_size", "batch_size", "seed", "arch", "layers", "heads", "embd", "optimizer",
)  # fmt: skip
METRICS = "step epoch tokens loss grad_norm lr tokens_per_s mfu seconds skipped".split()
# what a resumed run takes from its command line alone
OWN = ("spawn", "strategy", "device", "compile", "timeout", "out", "fresh", "log_every", "keep", "accum",
       "checkpoint", "checkpoint_activations", "tensorboard", "profile")  # fmt: skip


# -------------------------------------------------------------------------------------------- command line


@click.group(
    invoke_without_command=True,
    context_settings={"auto_envvar_prefix": PREFIX, "show_default": True, "max_content_width": 100},
)
@flags.all_of(OPTIONS)
@click.pass_context
def cli(ctx: click.Context, /, **options: Any) -> None:
    """Train a GPT on text, on one process or many.

    \b
      python run.py                                   a default text, under a minute
      python run.py --data mine.txt --spawn           one process per GPU, or per core
      torchrun --nproc-per-node 4 run.py --epochs 3   the same under torchrun
      srun python run.py --epochs 3                   the same under SLURM

    Started again with the same --out it goes on where it stopped. Every flag can also be an environment
    variable (DDPKIT_BATCH_SIZE) or a line in a --config file; the command line wins.
    """
    flags.check_numbers(ctx.command, options)
    if ctx.invoked_subcommand is None:
        default = click.core.ParameterSource.DEFAULT
        given = [name for name in options if ctx.get_parameter_source(name) is not default]
        ctx.exit(launch(SimpleNamespace(**options), given))


flags.in_groups(cli, OPTIONS)


def launch(o: SimpleNamespace, given: list[str]) -> int:
    """Train here, or in as many processes as --spawn says; -> the exit code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1})  # kept until heard
    if o.spawn is None:
        return train(o, given)
    import torch

    import ddp_setup

    size = o.spawn or torch.cuda.device_count() or ddp_setup.cores()
    o.spawn = None
    return ddp_setup.spawn(main, size, train, o, given, timeout=o.timeout)


def main(command: Callable[..., int], *args: Any) -> None:
    """Run a command and exit with its code. Every error ends here: one line for a mistake, a traceback for a bug."""
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    gc.disable()  # until all is imported: there is no garbage then, and looking for it takes half a second
    faulthandler.enable()  # where it was when the system kills it, as when a file is cut while a batch is read from it
    code = FAILED
    try:
        code = command(*args)
    except SystemExit as error:  # of a rank that has nothing to say
        code = error.code if isinstance(error.code, int) else FAILED
    except click.ClickException as error:
        tell("Error: " + " ".join(error.format_message().split()))  # click's own have several lines
        code = error.exit_code
    except BrokenPipeError:  # whoever read the output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ConnectionError, ChildProcessError) as error:  # a rank was lost, or killed
        tell(f"Error: {error}")
    except Exception as error:
        wanting = out_of_memory(error)
        less = f"{wanting}; a higher --accum or --checkpoint-activations needs less"
        text = less if wanting else f"{error}\n{traceback.format_exc()}"
        tell(f"Error on rank {rank}: {text}")
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(code)  # everything is written; taking torch down would take half a second


def collect_again() -> None:
    """Let Python look for garbage from now on, in what is made from now on."""
    gc.freeze()
    gc.enable()


def reading(batches: Iterable[T], corpus: Any) -> Iterator[T]:
    """The same batches; if their files change meanwhile, that is the user's mistake."""
    import chardata

    with users_mistakes():
        yield from chardata.unchanged(batches, corpus)


@contextmanager
def a_last_line(diverged: type[Exception], out: str, world: Any, finish: Callable[[], Any]) -> Iterator[None]:
    """An end that is no bug is one line, said once `finish` has seen to what is still being written here. (What waits
    for other ranks would wait for the dead: rank 0's write may be cut short when they have left.)"""
    import ckpt
    import ddp_setup

    try:
        yield
    except click.ClickException:
        finish()
        raise
    except diverged as error:  # on all ranks
        last = ddp_setup.from_rank_zero(lambda: (finish(), ckpt.entries(out)[-1:])[1], world)
        saved = f"the last good checkpoint is {out}/{last[0].name}" if last else "there is no checkpoint yet"
        raise click.ClickException(f"{error}; {saved}. Try a lower --lr") from error


# ----------------------------------------------------------------------------------------------------- train


class Job(NamedTuple):
    """All that training takes."""

    config: Any  # gpt.Config
    model: Any  # on its device, replicated over the ranks
    optimizers: list[Any]
    scaler: Any
    dtype: Any
    corpus: Any  # chardata.Corpus
    train: Any  # its two parts, each chardata.Shards
    val: Any
    start: int  # steps that earlier runs have done
    total: int
    tokens: Callable[[int], int]  # steps done -> tokens trained on
    epoch: Callable[[int], float]  # steps done -> epochs
    flops: int  # for one token, forward and backward
    peak: float  # FLOP/s of all ranks' devices together, measured
    lines: list[str]  # of metrics.jsonl, if --out is a URL: there is no appending there, so it goes with each save
    board: Any = None  # a SummaryWriter, on rank 0 with --tensorboard
    sharing: Any = None  # with --checkpoint sharded, the group in which the ranks agree on what they write


def train(o: SimpleNamespace, given: list[str]) -> int:
    """The whole job, on one rank; -> the exit code."""
    import ddp_setup  # first, as it notes who the parent is: that can end in the second that torch takes

    with ExitStack() as stack:
        with users_mistakes():
            asked = stack.enter_context(ddp_setup.stop_signals())
            world = stack.enter_context(ddp_setup.process_group(o.device, o.timeout))
            job = prepare(o, given, world)
        if job.start >= job.total:
            return say_finished(o, job, world)
        stopped, written = go(o, job, world, asked)
        weights = {} if stopped or job.sharing else whole(job.model)
    if weights:
        say_sample(job, weights, world.device)
    return FAILED if not written else STOPPED if stopped else DONE


def whole(model: Any) -> dict[str, Any]:
    """The weights, from all ranks to rank 0; {} on the others."""
    import ckpt

    weights: dict[str, Any] = ckpt.snapshot(model, [])["model"]
    return weights


def go(o: SimpleNamespace, job: Job, world: Any, asked: Callable[[], bool]) -> tuple[bool, bool]:
    """Train, evaluate, save, log, up to the end or a stop; -> (whether it was stopped, whether the end is saved)."""
    import chardata
    import ddp_setup
    import gpt
    import loop

    share = {"rank": world.rank, "world_size": world.size, "vocab": job.corpus.vocab}
    steps = chardata.steps(job.train, o.block_size, o.batch_size, accum=o.accum, seed=o.seed, start=job.start, **share)
    training = loop.train_(
        job.model, job.optimizers, reading(steps, job.corpus), gpt.loss,
        start=job.start, dtype=job.dtype, scaler=job.scaler, seed=o.seed, stop=asked, clip=o.clip or math.inf,
        lr_at=partial(loop.linear, total=job.total, warmup_steps=o.warmup, floor=o.min_lr / o.lr),
    )  # fmt: skip
    if world.rank == 0 and (o.tensorboard or o.profile):
        job, training = watched(o, job, training)
    writing, live = None, Live(world.rank == 0 and progress.terminal(sys.stdout), job.start)
    collect_again()
    idle = time.perf_counter()  # the training's clock begins here, and again after each evaluation and save

    def finish() -> None:
        complain(writing)
        upload_metrics(o.out, job.lines)

    with a_last_line(loop.Diverged, o.out, world, finish):
        for step, report in training:
            stopped, last = report.stop, step == job.total
            evaluating = bool(job.val) and not stopped and (last or step % o.eval_every == 0)
            seconds = time.perf_counter() - idle
            live = live._replace(first=live.first or seconds)
            if stopped or last or evaluating or step % o.log_every == 0:
                live = log_step(o, job, world, step, report, seconds, live)
            live = draw(job, world, step, report, seconds, live, "evaluating" if evaluating else None)
            paused = time.perf_counter()
            if evaluating:
                windows = chardata.every_window(job.val, o.block_size, max(1, AT_ONCE // o.block_size), **share)
                sums = loop.evaluate(job.model, reading(windows, job.corpus), gpt.loss, job.dtype, stop=asked)
                stopped = sums is None
                live = log_evaluation(o, job, world, step, sums, live) if sums else live
            if writing and writing.done():
                complain(writing)
                writing = None
            ending = stopped or last
            saving = ending or (step % o.save_every == 0 and math.isfinite(report.grad_norm))
            if saving and math.isfinite(report.loss):
                live = draw(job, world, step, report, seconds, live, "saving")
                writing = save(o, job, world, step, live.val_loss if evaluating and not stopped else None, writing)
            elif ending:  # with weights that are not worth keeping
                raise loop.Diverged(f"the loss is {float(report.loss)} at step {step}")
            idle += time.perf_counter() - paused
            if ending:
                break
    saved = complain(writing)  # on every rank, as each may have something to write
    written = ddp_setup.from_rank_zero(lambda: saved, world)
    draw(job, world, step, report, seconds, live, "")
    if world.rank == 0:
        say_end(o, job, live, stopped)
    return stopped, written


def watched(o: SimpleNamespace, job: Job, training: Iterator[T]) -> tuple[Job, Iterator[T]]:
    """The same, with what --tensorboard and --profile add."""
    from extras import board, profiling

    if o.tensorboard:
        job = job._replace(board=board.open_board(o.out, job.start))
    if o.profile:
        if job.total - job.start < profiling.WARMUP + o.profile:
            warn(f"--profile {o.profile}: {job.total - job.start} steps are left")
        training = profiling.traced(training, o.profile, os.path.join(o.out, "trace.json"))
    return job, training


def prepare(o: SimpleNamespace, given: list[str], world: Any) -> Job:
    """Everything up to the first step. Writes nothing before all of it has been found right."""
    import torch

    import chardata
    import ddp_setup
    import gpt
    from extras import machine

    saved, state, rejected = begun(o, world)
    if saved:
        take_over_(o, given, saved)
    corpus = read_alike(o, given, saved, world)
    shards, val = chardata.split(corpus.shards, o.val_fraction)
    n = chardata.length(shards)
    with about(f"--data {o.data}"):
        per_epoch = chardata.steps_per_epoch(n, o.block_size, o.batch_size)
    check(o, world, corpus.vocab, chardata.length(val))

    config = gpt.Config(corpus.vocab, o.block_size, o.layers, o.heads, o.embd, o.dropout, o.arch)
    bare = gpt.build(config, o.seed, o.checkpoint_activations)
    total = min(o.epochs * per_epoch, o.steps or math.inf)
    flops = gpt.flops_per_token(config)
    if machine.compiling(o.compile, world.device, total * o.batch_size * o.block_size * flops):
        gpt.compile_(bare)
    model = ddp_setup.replicate(bare, world, o.strategy, parts=[*bare.blocks], compress=o.compress == "bf16")
    o.dtype = ddp_setup.from_rank_zero(lambda: machine.arithmetic(o.dtype, world.device), world)
    dtype = getattr(torch, o.dtype)
    optimizers = make_optimizers(bare, o)
    scaler = torch.amp.GradScaler(world.device.type, enabled=dtype == torch.float16)
    if saved:
        with about(saved["name"]):
            restore_(saved, state, model, optimizers)
        scaler.load_state_dict(saved.get("scaler") or scaler.state_dict())  # a run in another dtype had none
    job = Job(
        config, model, optimizers, scaler, dtype, corpus, shards, val,
        start=saved.get("step", 0),
        total=total,
        tokens=partial(chardata.tokens_before, n=n, block_size=o.block_size, batch_size=o.batch_size),
        epoch=lambda step: step / per_epoch,
        flops=flops,
        peak=world.size * machine.matmul_rate(world.device, dtype),
        lines=[],
    )  # fmt: skip
    if job.start < job.total:
        with about(f"--out {o.out}"):
            ddp_setup.from_rank_zero(lambda: open_folder(o, job, world, rejected), world)
            job = job._replace(sharing=sharing(o, world))
    return job


def begun(o: SimpleNamespace, world: Any) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """(what all ranks are to know of the checkpoint, or the import, to go on from; its state on rank 0; what was wrong
    with newer ones, on rank 0). Empty if there is none."""
    import ddp_setup

    state, rejected, unsound = dict[str, Any](), [], dict[str, str]()

    def look() -> dict[str, Any]:
        nonlocal state, rejected
        found, rejected = (None, []) if o.fresh else find(o.out, partial(load_state, ranks=world.size, unsound=unsound))
        state = found.state if found else imported(o.init_from) if o.init_from else {}
        name = f"{o.out}/{found.entry.name}" if found else o.init_from
        small = ("config", "vocabulary", "data", "step", "scaler")  # the weights stay on rank 0, or where they are
        shared = found is not None and world.size > 1 and not name.endswith(".pt")
        return {"name": name, "shared": shared, **{k: state[k] for k in small if k in state}} if state else {}

    saved = ddp_setup.from_rank_zero(look, world)
    while wrong := damage(saved, world):
        unsound[saved["name"]] = wrong
        saved = ddp_setup.from_rank_zero(look, world)
    return saved, state, rejected


def read_alike(o: SimpleNamespace, given: list[str], saved: dict[str, Any], world: Any) -> Any:
    """The data, on all ranks the same, and those that the run or the model began with."""
    import ckpt
    import ddp_setup

    known: dict[str, Any] = saved["vocabulary"] if o.init_from else {"vocab": None, "chars": ""}
    words = tokenizer_of(o, given, saved) if f"{o.tokens}".endswith(".json") else known["chars"]
    there = ckpt.in_background(read, o, words)
    while ddp_setup.any_rank(not there.done(), world):  # one node may have to fetch it, or to encode, for an hour
        time.sleep(0.02)
    corpus = there.result()
    if corpus.digest != ddp_setup.from_rank_zero(lambda: corpus.digest, world):
        raise ValueError(f"--data {o.data}: rank {world.rank} does not see the same data as rank 0")
    if corpus.vocab != (known["vocab"] or corpus.vocab):
        raise ValueError(f"--data {o.data}: {corpus.vocab} tokens; the model in {o.init_from} has {known['vocab']}")
    if "data" in saved and corpus.digest != saved["data"]:
        raise ValueError(f"--data {o.data}: not what the run in {o.out} was trained on; --fresh starts a new one")
    return corpus


def restore_(saved: dict[str, Any], state: dict[str, Any], model: Any, optimizers: list[Any]) -> None:
    """Put the state back, be it rank 0's or shares that each rank reads of."""
    import ckpt

    if saved["shared"]:
        from extras import sharded

        sharded.restore_(saved["name"], model, optimizers, ckpt.read)
    else:
        ckpt.restore_({"optimizers": [{} for _ in optimizers], **state} if state else {}, model, optimizers)


def tokenizer_of(o: SimpleNamespace, given: list[str], saved: dict[str, Any]) -> str:
    """The text of the tokenizer.json that --tokens names; a checkpoint, or what training begins with, has its own."""
    vocabulary = saved.get("vocabulary", {})
    words: str = vocabulary["chars"] if vocabulary.get("kind") == "tokenizer" else ""
    if not words or "tokens" in given and os.path.exists(o.tokens):
        with about(f"--tokens {o.tokens}"), open(o.tokens, encoding="utf-8") as file:
            named = file.read()
            if words and json.loads(named) != json.loads(words):
                raise ValueError(f"not the tokenizer of {saved['name']}; leave it out, or start over with --fresh")
        words = words or named
    return words


def read(o: SimpleNamespace, chars: str) -> Any:
    """The data that the flags name, in `chars` if given. What a text is read as is a flag: an error of it says which."""
    if o.tokens not in ("char", "byte") and not f"{o.tokens}".endswith(".json"):
        raise ValueError(f"--tokens {o.tokens}: is not char, byte or the path of a tokenizer.json")
    try:
        corpus = tokenized(o.data, "tokenizer" if o.tokens.endswith(".json") else o.tokens, chars, o.vocab)
    except UnicodeError as error:
        raise ValueError(f"{error}: --tokens byte") from error
    if corpus.kind in ("ids", "tokenizer"):
        o.vocab = corpus.vocab  # to be the same when it goes on
    return corpus


def tokenized(data: str | None, kind: str, chars: str, vocab: int | None) -> Any:
    """The data as a chardata.Corpus of that kind: of "tokenizer", `chars` being a tokenizer.json, encoded once."""
    import chardata

    if kind != "tokenizer":
        return chardata.read(data, kind, chars, vocab)
    from extras import tokenizer

    with about("the tokenizer"):
        size = tokenizer.size(chars)
        vocab = vocab or -(-size // 64) * 64
        if size > vocab:
            raise ValueError(f"has the id {size - 1}, and the vocabulary ends at {vocab - 1}")
    corpus = chardata.read(data, "text", "", vocab)
    if corpus.kind == "text":
        version = f"{corpus.digest} {[stamp[1:] for stamp in corpus.stamps]}"  # with the time of the last change
        corpus = chardata.read(tokenizer.encoded(corpus.shards, version, chars), "ids", "", vocab)
    return corpus._replace(kind=kind, chars=chars, digest=chardata.digest(corpus.shards, chars))


def sharing(o: SimpleNamespace, world: Any) -> Any:
    """A group for what the ranks write together into --out, or None if rank 0 writes alone."""
    if o.checkpoint == "whole" or world.size == 1:
        return None
    from extras import sharded

    if not sharded.in_common(o.out):
        raise ValueError("is not one folder for all ranks, as --checkpoint sharded needs it")
    return sharded.group(max(o.timeout, 3600.0))  # in it the ranks wait for one another's disks


def load_state(out: str, entry: Any, ranks: int = 1, unsound: Mapping[str, str] = {}) -> dict[str, Any]:
    """A checkpoint, be it a file or a folder of shares. Of shares that each of several ranks will read some of, only
    names, types and shapes, unless they were found to be `unsound`."""
    import ckpt

    if entry.name.endswith(".pt"):
        return ckpt.load(out, entry)
    from extras import sharded

    path = f"{out}/{entry.name}"
    if path in unsound:
        raise ValueError(unsound[path])
    return sharded.load(path, ckpt.read) if ranks == 1 else sharded.outline(path)


def damage(saved: dict[str, Any], world: Any) -> str:
    """What is wrong with the shares of a checkpoint, the same on all ranks, or "". Each rank looks at some."""
    if not saved.get("shared"):
        return ""
    from extras import sharded

    return sharded.damage(saved["name"], world.rank, world.size)


def find(out: str, read: Callable[[str, Any], dict[str, Any]] = load_state) -> tuple[Any, list[str]]:
    """(the newest checkpoint that verifies or None, what was wrong with newer ones). ValueError if none does."""
    import ckpt

    found, rejected = ckpt.newest(out, read)
    if rejected and not found:
        raise ValueError(f"{out}: no checkpoint can be used; {rejected[0]}; --fresh discards all and starts over")
    if found:
        with about(f"{out}/{found.entry.name}"):
            check_saved(found.state, found.entry.step)
    return found, rejected


def check_saved(state: dict[str, Any], step: int) -> None:
    """ValueError unless a checkpoint holds what `save` puts there, and flags that could have been given."""
    try:
        config, vocabulary = state["config"], state["vocabulary"]
        sound = (
            (state["step"], type(state["step"]), type(state["scaler"]), type(state["data"])) == (step, int, dict, str)
            and config.keys() >= {*PINNED, "data"}
            and flags.could_be_given(cli, config)
            and vocabulary["kind"] in ("char", "byte", "ids", "tokenizer")
            and (type(vocabulary["vocab"]), type(vocabulary["chars"])) == (int, str)
        )
        weights = sum(tensor.numel() for tensor in state["model"].values())
    except (KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise ValueError("not written by this program; --fresh discards it")
    if 12 * config["layers"] * config["embd"] ** 2 + vocabulary["vocab"] * config["embd"] > weights:
        raise ValueError(f"has only {weights:,} weights, fewer than its flags tell of; --fresh discards it")


def imported(path: str) -> dict[str, Any]:
    """A model from elsewhere, as what a checkpoint begins with: weights, the flags that they tell of, the vocabulary."""
    import ckpt
    from extras import exchange

    if ckpt.entries(path):
        found, _ = find(path)
        sizes, vocabulary, weights = (found.state[key] for key in ("config", "vocabulary", "model"))
    else:
        sizes, words, weights = exchange.read(path, ckpt.read)
        vocabulary = {**words, "vocab": sizes["vocab"]}
    config = {name: sizes[name] for name in ("arch", "layers", "heads", "embd", "block_size")}
    kind = vocabulary["kind"]
    config |= {"vocab": vocabulary["vocab"]} if kind in ("ids", "tokenizer") else {"tokens": kind}
    config |= {"tokens": f"{path}/tokenizer.json"} if kind == "tokenizer" else {}
    return {"model": weights, "config": config, "vocabulary": vocabulary}


def take_over_(o: SimpleNamespace, given: list[str], saved: dict[str, Any]) -> None:
    """What the command line does not say is as in the checkpoint, ours or imported; what it contradicts is an error."""
    or_else = ", or start over with --fresh" if "step" in saved else ""
    for name in vars(o).keys() & saved["config"].keys() - set(OWN):
        ours, theirs = getattr(o, name), saved["config"][name]
        alike = name == "tokens" and all(f"{v}".endswith(".json") for v in (ours, theirs))  # see tokenizer_of
        if name not in given:
            setattr(o, name, theirs)
        elif name in (*PINNED, "init_from") and ours != theirs and not alike:
            flag = f"--{name.replace('_', '-')}"
            made = f"{saved['name']}, made with {flag} {theirs}"
            raise ValueError(f"{flag} {ours} contradicts {made}; leave it out{or_else}")


def check(o: SimpleNamespace, world: Any, vocab: int, val_tokens: int) -> None:
    """What no single flag can know of the others."""
    from extras import machine

    if not o.out:
        raise ValueError("--out is empty; name a folder or a URL")
    if o.batch_size < world.size:
        raise ValueError(f"--batch-size {o.batch_size} is smaller than the {world.size} ranks that share it")
    if o.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ImportError("pip install tensorboard to write for it")
    if o.init_from and os.path.realpath(o.init_from) == os.path.realpath(o.out):
        raise ValueError(f"--init-from {o.init_from} is --out itself; name another --out")
    if o.checkpoint == "sharded" and "://" in o.out:
        raise ValueError(f"--checkpoint sharded needs a folder that all ranks share; --out is {o.out}")
    if o.profile and "://" in o.out:
        raise ValueError(f"--profile {o.profile}: its trace needs a folder; --out is {o.out}")
    if o.compress != "none" and o.strategy != "ddp":
        raise ValueError(f"--compress {o.compress} is for --strategy ddp alone, not {o.strategy}")
    if o.min_lr > o.lr:
        raise ValueError(f"--min-lr {o.min_lr} is higher than --lr {o.lr}")
    parameters = o.layers * 12 * o.embd**2 + 2 * vocab * o.embd
    each = {"ddp": 12, "zero": 4 + 8 / world.size, "fsdp": 12 / world.size}  # bytes: weight, gradient, one moment
    needed, there = 1e-9 * each[o.strategy] * parameters, machine.memory(world.device) / 1e9
    if needed > there:
        raise ValueError(
            f"--layers {o.layers} --embd {o.embd}: {parameters:,} parameters need {needed:,.0f} GB to be trained; "
            f"{world.device} has {there:,.0f} GB"
        )
    if o.val_fraction and val_tokens < 2:
        raise ValueError(f"--val-fraction {o.val_fraction} leaves {val_tokens} tokens; 2 are needed, or none")


def make_optimizers(model: Any, o: SimpleNamespace) -> list[Any]:
    """Muon for the blocks' matrices if so asked, AdamW for what remains; one learning rate for both."""
    import torch

    import gpt

    kinds = gpt.groups(model)
    decayed = kinds["embeddings"] + (kinds["matrices"] if o.optimizer == "adamw" else [])
    groups = [{"params": decayed, "weight_decay": o.weight_decay}]
    if kinds["vectors"]:
        groups.append({"params": kinds["vectors"], "weight_decay": 0.0})
    made: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=o.lr, betas=(0.9, 0.95), fused=True)]
    if o.optimizer == "muon":  # scaled so that its updates are as large as AdamW's (Liu et al., 2025)
        muon = torch.optim.Muon(kinds["matrices"], lr=o.lr, weight_decay=o.weight_decay, adjust_lr_fn="match_rms_adamw")
        made.append(muon)
    return made


# ---------------------------------------------------------------------------------------------- the out folder


def open_folder(o: SimpleNamespace, job: Job, world: Any, rejected: list[str]) -> None:
    """First writes: the lock; config.json; metrics without the steps that will be done again; damaged files set aside."""
    import torch

    import ckpt

    ckpt.make_folder(o.out)
    ckpt.lock(o.out)  # and never let go
    damaged = [line.split(":")[0] for line in rejected]
    if not o.fresh and any(e.step > job.start and e.name not in damaged for e in ckpt.entries(o.out)):
        raise ValueError("another run has written to it just now; start again to go on from there")
    if o.fresh:
        for entry in ckpt.entries(o.out):
            ckpt.remove(o.out, entry.name)
    for name, line in zip(damaged, rejected):
        ckpt.set_aside(o.out, name)
        warn(f"{line}; set aside, going on from step {job.start}")
    lines = folder.metrics(o.out, job.start)
    job.lines.extend(lines if "://" in o.out else [])
    folder.write(o.out, "metrics.jsonl", "".join(lines))
    ran_on = {"ranks": world.size, "device": str(world.device), "torch": torch.__version__, "peak_flops": job.peak}
    folder.write(o.out, "config.json", json.dumps({**folder.without_passwords(vars(o)), **ran_on}, indent=1))


def save(o: SimpleNamespace, job: Job, world: Any, step: int, loss: float | None, writing: Any) -> Any:
    """Copy the state, on every rank, and start to write it, once the write before has ended."""
    import ckpt

    config = {name: value for name, value in folder.without_passwords(vars(o)).items() if name not in OWN}
    vocabulary = {"vocab": job.corpus.vocab, "kind": job.corpus.kind, "chars": job.corpus.chars}
    scaler = job.scaler.state_dict()
    small = {"step": step, "config": config, "vocabulary": vocabulary, "data": job.corpus.digest, "scaler": scaler}
    complain(writing)
    if job.sharing:
        from extras import sharded

        temporary, name = os.path.join(o.out, f"{ckpt.TEMPORARY}{step}"), partial(ckpt.named, step, loss, ending="")
        write: Callable[[], Any] = sharded.save(
            temporary, lambda d: name(d).name, job.model, job.optimizers, job.sharing, **small
        )
    else:
        state = ckpt.snapshot(job.model, job.optimizers, **small)
        if world.rank:
            return None
        write = partial(ckpt.save, o.out, state, step, loss)
    return ckpt.in_background(write_all, o, world, write, list(job.lines))


def write_all(o: SimpleNamespace, world: Any, write: Callable[[], Any], lines: list[str]) -> None:
    """What a save writes, beside the training: a URL's metrics, the checkpoint; then what is too many goes."""
    import ckpt

    upload_metrics(o.out, lines)
    write()
    if world.rank == 0:
        ckpt.prune(o.out, o.keep)


def complain(writing: Future[Any] | None) -> bool:
    """Wait for a write; -> whether it went well. If not, training goes on and the next save tries again."""
    try:
        if writing:
            writing.result()
        return True
    except OSError as error:
        warn(f"checkpoint not written: {said(error)}; those before it are untouched")
        return False


# ---------------------------------------------------------------------------------------------------- output


def log_step(o: SimpleNamespace, job: Job, world: Any, step: int, report: Any, seconds: float, live: Live) -> Live:
    """One line of metrics.jsonl and, unless that is a terminal, of the output, from rank 0."""
    if world.rank == 0:
        rate = (job.tokens(step) - job.tokens(live.step)) / (seconds - live.logged)
        record = figures(job, world, step, report, seconds, live, rate)
        record |= {"loss": float(report.loss), "grad_norm": float(report.grad_norm)}
        record |= {"seconds": round(time.perf_counter() - STARTED, 3), "skipped": int(report.skipped)}
        write_metrics(o, job, {key: record[key] for key in METRICS if key != "skipped" or record[key]})
        if not live.shown:
            say(progress.plain(record))
    return live._replace(step=step, logged=seconds)


def draw(job: Job, world: Any, step: int, report: Any, seconds: float, live: Live, doing: str | None) -> Live:
    """Renew the line at the terminal's foot, if it is time or if this is `doing` something else from now on."""
    if not progress.due(live, seconds, doing):
        return live
    import torch

    import loop

    read = loop.to_host(torch.stack([report.loss, report.skipped]))
    live = progress.follow(live, job.tokens(step), seconds, read, late=report.loss.is_cuda)
    record = figures(job, world, step, report, seconds, live, live.rate)
    record |= {"loss": progress.mean(live), "skipped": sum(live.latest[1:]), "doing": doing}
    say(progress.drawn(record, sys.stdout), nl=False)
    return live


def figures(job: Job, world: Any, step: int, report: Any, seconds: float, live: Live, rate: Any) -> dict[str, Any]:
    """What a line tells of a step that is known without waiting for the device."""
    return {
        "step": step, "total": job.total, "epoch": round(job.epoch(step), 4), "tokens": job.tokens(step),
        "val_loss": live.val_loss, "lr": report.lr, "tokens_per_s": rate and round(rate, 1),
        "mfu": rate and round(rate * job.flops / job.peak, 4), "memory": progress.memory(world.device.type),
        "eta": progress.eta(step - job.start, seconds, live.first, job.total - step),
    }  # fmt: skip


def log_evaluation(o: SimpleNamespace, job: Job, world: Any, step: int, sums: tuple[float, float], live: Live) -> Live:
    """One line of metrics.jsonl and one of the output, from rank 0."""
    live = live._replace(val_loss=sums[0] / sums[1])
    if world.rank == 0:
        seconds = round(time.perf_counter() - STARTED, 3)
        write_metrics(o, job, {"step": step, "val_loss": live.val_loss, "seconds": seconds})
        say(progress.over(f"step {step}  validation loss {live.val_loss:.4f}", sys.stdout))
    return live


def write_metrics(o: SimpleNamespace, job: Job, record: dict[str, Any]) -> None:
    """A line of metrics.jsonl, and of TensorBoard if asked; for a URL it is kept until the next save."""
    if job.board:
        from extras import board

        with aside("metrics"):
            board.write(job.board, record)
    if "://" in o.out:
        job.lines.append(folder.line(record))
        return
    with aside("metrics"):
        folder.append(o.out, "metrics.jsonl", folder.line(record))


def upload_metrics(out: str, lines: list[str]) -> None:
    """All lines of metrics to a URL, which cannot append."""
    if lines:
        with aside("metrics"):
            folder.write(out, "metrics.jsonl", "".join(lines))


@contextmanager
def aside(what: str) -> Iterator[None]:
    """What cannot be written in here is no reason to end a training."""
    try:
        yield
    except BrokenPipeError:  # whoever read the output has enough
        raise
    except OSError as error:
        warn_once(f"{what} not written: {said(error)}; training goes on")


def warn(text: str) -> None:
    """One line on stderr."""
    tell(f"Warning: {text}")


def tell(text: str) -> None:
    """On stderr, where the line of a training's progress may be."""
    click.echo(progress.over(folder.without_password(text), sys.stderr), err=True)


warn_once = functools.cache(warn)


def say(text: str, nl: bool = True) -> None:
    """Print; training does not end because its log is on a full disk."""
    with aside("output"):
        click.echo(text, nl=nl)


def say_finished(o: SimpleNamespace, job: Job, world: Any) -> int:
    """That there is nothing left to do, and how to go on; -> the exit code."""
    if world.rank == 0:
        limit = f"--steps {o.steps}" if o.steps and job.total == o.steps else f"--epochs {o.epochs}"
        click.echo(
            f"The run in {folder.without_password(o.out)} is finished: {job.start} steps, {limit}. "
            f"To go on give a higher {limit.split()[0]}; to start over, --fresh."
        )
    return DONE


def say_end(o: SimpleNamespace, job: Job, live: Live, stopped: bool) -> None:
    """How the training ended, from rank 0."""
    if live.shown:
        click.echo()
    rate = (job.tokens(live.step) - job.tokens(job.start)) / max(live.logged, 1e-9)
    if stopped:
        click.echo(f"Stopped as asked, after step {live.step} of {job.total}; the same command goes on from there.")
    else:
        text = f"validation loss {live.val_loss:.4f}" if live.val_loss is not None else "no validation"
        out = folder.without_password(o.out)
        click.echo(f"Done: {live.step} steps, {text}, {rate:,.0f} tokens/s. Checkpoints and metrics are in {out}.")


def say_sample(job: Job, weights: dict[str, Any], device: Any, count: int = 400) -> None:
    """Print `count` tokens that the trained weights go on with."""
    import torch

    import gpt

    model = gpt.build(job.config, 0)  # never compiled, as each length of the context would be
    model.load_state_dict(weights)
    first = torch.from_numpy(job.train[0][:1].astype("int64"))
    click.echo("A sample:")
    stream(model.to(device), job.corpus, first, count, temperature=0.8)


def stream(model: Any, vocabulary: Any, prompt: Any, count: int, **how: Any) -> None:
    """Print `count` sampled tokens as they come, each character once it is whole."""
    import chardata
    import gpt

    ids = islice(gpt.sample(model, prompt, **how), count)
    if vocabulary.kind == "tokenizer":
        from extras import tokenizer

        texts = tokenizer.decoded(prompt.tolist(), ids, vocabulary.chars)
    else:
        parts = (chardata.decode([token], vocabulary.kind, vocabulary.chars) for token in ids)
        texts = codecs.iterdecode(parts, "utf-8", "replace")  # one token may be half a character
    for text in texts:
        click.echo(text, nl=False)
    click.echo()


def encode(text: str, vocabulary: Any) -> Any:
    """(n,) ids of a text."""
    import chardata

    if vocabulary.kind == "tokenizer":
        from extras import tokenizer

        return tokenizer.encode(text, vocabulary.chars)
    return chardata.encode(text, vocabulary.kind, vocabulary.chars)


# ------------------------------------------------------------------------------------------------ sub-commands


def newest(out: str) -> Any:
    """The newest checkpoint that verifies; ValueError if there is none."""
    found, rejected = find(out)
    if not found:
        raise ValueError(f"{out}: there is no checkpoint; train first, or name another folder with --out")
    for line in rejected:
        warn(f"{line}; using {found.entry.name}")
    return found


def load(out: str, device: Any) -> tuple[Any, SimpleNamespace, SimpleNamespace]:
    """(model, its vocabulary, its training's flags) of the newest checkpoint that verifies."""
    import ckpt
    import gpt

    found = newest(out)
    o, vocabulary = SimpleNamespace(**found.state["config"]), SimpleNamespace(**found.state["vocabulary"])
    with about(f"{out}/{found.entry.name}"):
        model = gpt.build(gpt.Config(vocabulary.vocab, o.block_size, o.layers, o.heads, o.embd, 0.0, o.arch), 0)
        ckpt.check(found.state, model)
    model.load_state_dict(found.state["model"])
    return model.to(device).eval(), vocabulary, o


out_option = click.option("--out", default="out", metavar="FOLDER", help="Where the checkpoints are.")
device_option = click.option("--device", default="auto", metavar="auto|cpu|cuda|mps")


@cli.command("sample")
@out_option
@device_option
@click.option("--prompt", help="Text to go on from; bare ids as numbers.  [default: a new line]")
@click.option("--tokens", type=_count, default=500, help="How many to make.")
@click.option("--temperature", type=click.FloatRange(0), default=0.8, help="0: always the likeliest.")
@click.option("--top-k", type=_from_zero, default=0, help="Among the K likeliest; 0: all.")
@click.option(
    "--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, help="Among the likeliest that make up P."
)
@click.option("--seed", type=_seed, help="To get the same again.  [default: another each time]")
def sample(**options: Any) -> None:
    """Print what the newest checkpoint goes on with.

    \b
      python run.py sample --prompt "The " --tokens 200
    """
    flags.check_numbers(sample, options)
    import torch

    import ddp_setup

    o = SimpleNamespace(**options)
    with users_mistakes(), ddp_setup.process_group(o.device) as world:
        model, vocabulary, _ = load(o.out, world.device)
        any_text = vocabulary.kind in ("byte", "tokenizer")
        newline = "\n" if any_text or "\n" in vocabulary.chars else vocabulary.chars[:1] or "0"
        prompt = newline if o.prompt is None else o.prompt
        ids = encode(prompt, vocabulary)
        if not len(ids) or ids.max() >= vocabulary.vocab:
            raise ValueError(f"--prompt {prompt!r}: needs one token at least, and ids below {vocabulary.vocab}")
        generator = torch.Generator(world.device)
        generator.seed() if o.seed is None else generator.manual_seed(o.seed)
    collect_again()
    click.echo(prompt, nl=False)
    how = {"temperature": o.temperature, "top_k": o.top_k, "top_p": o.top_p, "generator": generator}
    stream(model, vocabulary, torch.from_numpy(ids.astype("int64")), o.tokens, **how)


@cli.command("eval")
@out_option
@device_option
@click.option("--data", metavar="PATH", help="A file, a glob or an fsspec URL.  [default: what validated the training]")
def evaluate(out: str, device: str, data: str | None) -> None:
    """Print the newest checkpoint's exact loss: every token of a text predicted once.

    \b
      python run.py eval --data other.txt
    """
    import chardata
    import ddp_setup
    import gpt
    import loop

    with ExitStack() as stack:
        with users_mistakes():
            world = stack.enter_context(ddp_setup.process_group(device))
            model, vocabulary, trained = load(out, world.device)
            vocab = vocabulary.vocab if vocabulary.kind in ("ids", "tokenizer") else None
            corpus = tokenized(data or trained.data, vocabulary.kind, vocabulary.chars, vocab)
            if corpus.kind != vocabulary.kind:
                raise ValueError(f"--data {data}: is {corpus.kind}; the model in {out} knows {vocabulary.kind}")
            shards = corpus.shards if data else chardata.split(corpus.shards, trained.val_fraction)[1]
            if chardata.length(shards) < 2:
                raise ValueError(f"{data or 'the validation part'}: too short to evaluate; 2 tokens are needed")
        share = {"rank": world.rank, "world_size": world.size, "vocab": vocabulary.vocab}
        windows = chardata.every_window(shards, trained.block_size, max(1, AT_ONCE // trained.block_size), **share)
        collect_again()
        sums = loop.evaluate(model, reading(windows, corpus), gpt.loss)
        assert sums  # as nobody asks it to stop
        loss_sum, count = sums
    if world.rank == 0:
        nats = loss_sum / count
        characters = chardata.count_characters(shards, vocabulary.kind)
        if vocabulary.kind == "tokenizer":
            from extras import tokenizer

            characters = tokenizer.count_characters(shards, vocabulary.chars)
        per_character = f", {loss_sum / characters / math.log(2):.4f} bits per character" if characters else ""
        click.echo(
            f"loss {nats:.4f} nats per token, perplexity {math.exp(nats):.4f}{per_character}, over {count:,.0f} tokens"
        )


@cli.command("info")
@click.argument("out", default="out")
def info(out: str) -> None:
    """Print what the newest checkpoint in OUT is, and which of those there verify.

    \b
      python run.py info out
    """
    import ckpt
    from extras import describe

    def verified(entry: Any) -> dict[str, Any]:
        state = load_state(out, entry)
        check_saved(state, entry.step)
        return state

    with users_mistakes():
        state, verdicts = describe.newest(ckpt.entries(out), verified)
        config = ""
        with suppress(OSError):
            config = folder.read(out, "config.json")
        if state:
            click.echo(describe.describe(state, folder.metrics(out, state["step"]), config))
        click.echo("".join(f"{line}\n" for line in verdicts), nl=False)
        if not state:
            raise ValueError(f"{out}: there is no checkpoint that can be used")


@cli.command("plot")
@click.argument("outs", nargs=-1, required=True, metavar="OUT...")
@click.option("-o", "--output", default="loss.png", metavar="FILE", help="A .png, .svg or .pdf.")
def plot(outs: tuple[str, ...], output: str) -> None:
    """Draw loss, throughput and learning rate of the runs in the folders OUT, in one figure.

    \b
      python run.py plot out out-wider -o loss.svg
    """
    from extras import plot

    with users_mistakes():
        runs = [plot.parse(out, *(folder.read(out, name) for name in ("metrics.jsonl", "config.json"))) for out in outs]
        plot.draw(runs, output)


@cli.command("export")
@click.argument("out", default="out")
@click.option(
    "--format",
    type=click.Choice(["hf", "safetensors", "nanogpt", "checkpoint"]),
    required=True,
    help="safetensors is a file, the others are folders; checkpoint: all of it in a single file, to go on from.",
)
@click.option("-o", "--output", required=True, metavar="PATH", help="What to write; must not exist.")
def export(out: str, format: str, output: str) -> None:
    """Write the newest checkpoint in OUT for other programs. --init-from reads it again.

    \b
      python run.py export out --format hf -o gpt2-mine
    """
    import ckpt
    from extras import exchange

    with users_mistakes():
        if format == "checkpoint":
            found = newest(out)
            if os.path.lexists(output) and not (os.path.isdir(output) and not os.listdir(output)):
                raise ValueError(f"{output}: exists already; name another")
            ckpt.save(output, found.state, found.entry.step, found.entry.loss)
            return
        model, vocabulary, trained = load(out, "cpu")
        config = {**model.config._asdict(), "dropout": trained.dropout}
        words = {"kind": vocabulary.kind, "chars": vocabulary.chars}
        exchange.write(exchange.Model(config, words, model.state_dict()), format, output)


def command_line() -> int:
    """-> the exit code of what the command line asks for."""
    flags.check_environment(cli, PREFIX)
    return cli.main(standalone_mode=False) or DONE


if __name__ == "__main__":
    main(command_line)
