#!/usr/bin/env python3
"""Train a GPT on text, on one process or on many.

python run.py                                   train on a default text, in about a minute
python run.py --data mine.txt --spawn 4         four processes on this machine
torchrun --nproc-per-node 4 run.py --epochs 3   four processes, started by torchrun
python run.py sample --prompt "The "            print text that the newest checkpoint generates
python run.py eval --data other.txt             print the checkpoint's exact loss on a text

Read `train` first. It uses ddp_setup, chardata, gpt, loop and ckpt, which do not import one
another. A file of extras/ is used only if a flag or a URL asks for it.
"""

import ctypes
import json
import math
import os
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from functools import partial
from itertools import chain, islice
from typing import Any

# Before the import of torch. Idle OpenMP threads spin for a moment only: else training is up to
# seven times slower when another program uses a core. A lost rank costs one line, not pages of C++.
os.environ |= {"GOMP_SPINCOUNT": "10000", "TORCH_CPP_LOG_LEVEL": "FATAL", **os.environ}

import click
import torch
from click import Choice, FloatRange, IntRange
from click.core import ParameterSource
from torch.multiprocessing.spawn import ProcessException

import chardata
import ckpt
import ddp_setup
import gpt
import loop

__version__ = "0.6.0"
Values = dict[str, Any]  # for example a checkpoint
DONE, FAILED, MISTAKE, STOPPED = range(4)  # exit codes; MISTAKE is that of click.UsageError


@contextmanager
def one_line() -> Iterator[None]:
    """Turn an error of what the user gives (flags, data, files) into one of click: one line.

    The exit code is 2, or 1 if another start can help: for example, if a disk has an error (which
    is a plain OSError), or if the folder is in use by another run.
    """
    try:
        yield
    except (ValueError, ImportError, OSError) as error:
        passing = type(error) is OSError or isinstance(error, (BlockingIOError, ConnectionError))
        raise (click.ClickException if passing else click.UsageError)(f"{error}") from error


# ------------------------------------------------------------------------------------------- flags

COUNT, FROM_ZERO = IntRange(1), IntRange(0)
NOT_NEGATIVE, FRACTION = FloatRange(0), FloatRange(0, 1, max_open=True)


def option(default: Any, help: str, type: Any = None, **more: Any) -> Any:
    """Return a dataclass field that says how to make a click option."""
    return field(default=default, metadata={"default": default, "help": help, "type": type, **more})


@dataclass(frozen=True)
class Flags:
    """The flags of a training run."""

    data: Sequence[str] = option(
        (), "Text, or tokens (.bin, .npy): a file, a glob or a URL; can be repeated.", multiple=True
    )
    val_data: Sequence[str] = option(
        (), "Validation data, in place of --val-fraction; can be repeated.", multiple=True
    )
    vocab: int | None = option(None, "Vocabulary size, for token files.", COUNT)
    tokenizer: str = option("char", "How text becomes tokens.", metavar="char|byte|TOKENIZER.json")
    val_fraction: float = option(0.1, "Fraction of the data, at its end, for validation.", FRACTION)
    block_size: int = option(128, "Context length in tokens.", COUNT)
    batch_size: int = option(16, "Sequences per optimizer step, summed over all ranks.", COUNT)
    seed: int = option(0, "Seed for weights, data order and dropout.")
    arch: str = option("modern2", "gpt2 is exactly GPT-2.", Choice("modern2 gpt2".split()))
    layers: int = option(4, "Number of transformer blocks.", COUNT)
    heads: int = option(4, "Attention heads per block.", COUNT)
    embd: int = option(128, "Width of the model.", COUNT)
    dropout: float = option(0.0, "Dropout probability.", FRACTION)
    init_from: str | None = option(None, "Model to start from: OUT/best, nanoGPT's or GPT-2.")
    epochs: int | None = option(None, "Passes over the data.  [default: 1, or as --steps]", COUNT)
    steps: int | None = option(None, "Last step, even if --epochs has more.", COUNT)
    optimizer: str = option(
        "muon",
        "muon: Muon for the blocks' matrices, AdamW for the rest. With zero or fsdp: adamw.",
        Choice("muon adamw".split()),
    )
    lr: float | None = option(
        None,
        "Peak rate.  [default: 5 / (EMBD * min(STEPS, 5000)**.25); adamw: 2; --init-from: 5000]",
        FloatRange(0, min_open=True),
    )
    schedule: str = option(
        "linear",
        "Decay of the learning rate. constant: only in the last fifth of the steps.",
        Choice("linear cosine constant".split()),
    )
    min_lr: float = option(0.0, "Learning rate at the end of the run.", NOT_NEGATIVE)
    warmup: float = option(0.05, "Fraction of the steps before the peak learning rate.", FRACTION)
    weight_decay: float = option(0.1, "Weight decay, except for biases and norms.", NOT_NEGATIVE)
    clip: float = option(1.0, "Largest gradient norm; 0 means no clipping.", NOT_NEGATIVE)
    accum: int = option(1, "Micro-batches per step and rank; more need less memory.", COUNT)
    spawn: int | None = option(
        None,
        "Start N processes on this machine. Without N: one per GPU, or per CPU core.",
        FROM_ZERO,
        is_flag=False,
        flag_value=0,
        metavar="[N]",
    )
    strategy: str = option(
        "ddp", "zero, fsdp: divide the state over the ranks.", Choice("ddp zero fsdp".split())
    )
    device: str = option("auto", "Device to use.", Choice("auto cpu cuda mps".split()))
    dtype: str = option(
        None,
        "Type of the computation.  [default: bfloat16 on hardware that has it, else float32]",
        Choice("float32 bfloat16 float16".split()),
    )
    compile: bool = option(False, "Use torch.compile.", is_flag=True)
    checkpoint_activations: bool = option(
        False, "Compute blocks again in the backward pass: less memory.", is_flag=True
    )
    timeout: int = option(600, "Seconds to wait for another rank.", COUNT)
    out: str = option("out", "Folder or URL. For sample and eval also OUT/best or OUT/step-N.")
    eval_every: int = option(100, "Steps between evaluations.", COUNT)
    eval_tokens: int = option(131072, "Tokens in an evaluation; 0 means all.", FROM_ZERO)
    save_every: int = option(100, "Steps between checkpoints.", COUNT)
    log_every: int = option(10, "Steps between lines of metrics.", COUNT)
    checkpoint: str = option(
        "whole", "sharded: each rank writes its part.", Choice("whole sharded".split())
    )
    keep: int = option(3, "Number of newest checkpoints to keep, besides the best one.", COUNT)


OPTIONS = {
    f.name: click.Option(
        [f"--{f.name.replace('_', '-')}"], envvar=f"DDPKIT_{f.name.upper()}", **f.metadata
    )
    for f in fields(Flags)
}
# A resumed run cannot change these flags. They define the model, the state of the optimizers, the
# order of the data, and the validation loss.
PINNED = set(
    "tokenizer vocab val_fraction block_size batch_size seed arch layers heads embd optimizer "
    "init_from eval_tokens".split()
)
# A resumed run does not get these flags from the checkpoint.
NOT_RESTORED = set(
    "spawn strategy device timeout out accum checkpoint checkpoint_activations".split()
)


# ------------------------------------------------------------------------------------------- train


def train(given: Values, world: ddp_setup.World, stop: Callable[[], bool], pool: Executor) -> int:
    """Train until the last step or a stop signal; return the exit code. Every rank runs this.

    given: the flags that the user set. stop: whether this rank got a stop signal. pool: for saves.
    """
    rank0, place = world.rank == 0, {"rank": world.rank, "world_size": world.size}
    tell = say if rank0 else lambda text: None
    together = partial(ddp_setup.wait_together, world=world)  # raises a rank's error on all ranks
    asked = Flags(**given)
    storage = together(
        lambda: open_storage(asked.out, asked.checkpoint == "sharded" and world.size > 1)
    )
    saved = read_on_rank_zero(
        lambda: find_checkpoint(asked.out, storage) or read_init(given), world
    )
    flags = Flags(
        **ddp_setup.from_rank_zero(lambda: complete_flags(given, saved, world.device), world)
    )
    corpus, plan, val_plan = together(lambda: read_data(flags, saved))
    if len({*ddp_setup.gather(corpus.digest, world)}) > 1:
        raise click.UsageError("--data is not the same on all ranks")
    start = saved.get("step", 0)
    total, lr, lr_at = make_schedule(flags, plan)
    if start >= total:
        tell(f"The run in {flags.out} has done {start} steps: raise --steps and --epochs")
        return DONE
    flags = replace(flags, vocab=corpus.vocab, lr=lr)
    divided = flags.strategy != "ddp"
    model = build(flags, None if divided else flags.seed)
    if flags.compile:
        gpt.compile_(model)
    if divided:
        with one_line():
            from extras import fsdp

        weight = partial(gpt.initial_weight, model.config, flags.seed)
        replica = fsdp.shard_(model, world.device, [*model.blocks], flags.strategy, weight)
    else:
        replica = ddp_setup.replicate(model, world)
    dtype = getattr(torch, flags.dtype)
    optimizers = gpt.optimizers(model, flags.optimizer, lr, flags.weight_decay, dtype)
    scaler = torch.amp.GradScaler(world.device.type, enabled=flags.dtype == "float16")
    if saved:
        with one_line():  # The settings of the optimizers, such as the rate, stay as they are here.
            storage.restore_(saved, replica, optimizers if start else [])
    scaler.load_state_dict(saved.get("scaler") or scaler.state_dict())

    # Nothing is written to --out before this line. The lock is held while its name exists.
    _lock = together(lambda: rank0 and prepare_folder(flags.out, storage, saved))
    saved.clear()  # frees memory
    if rank0:
        append(storage, flags.out, {"config": vars(flags), "ranks": world.size})
    size = sum(map(torch.numel, model.parameters()))
    tell(
        f"Training: {size:,} parameters on {world.size} x {world.device.type} in {flags.dtype} "
        f"with {flags.optimizer}, steps {start + 1} to {total}, in {flags.out}"
    )
    steps: Any = chardata.steps(plan, **place, accum=flags.accum, start=start)
    loss_fn: Any = gpt.loss
    if divided:
        steps, loss_fn = fsdp.pad_steps(steps, gpt.loss)
    training = loop.train_(
        replica,
        optimizers,
        steps,
        loss_fn,
        start=start,
        lr_at=lr_at,
        clip=flags.clip or math.inf,
        dtype=dtype,
        scaler=scaler,
        seed=flags.seed,
        stop=stop,
        sync_each=divided,
    )
    saving: Future[Any] | None = None  # the latest save of this rank, until its result is known
    tokens_at, per_epoch = partial(chardata.tokens_before, plan), chardata.steps_per_epoch(plan)
    logged, logged_at, best = tokens_at(start), time.perf_counter(), math.inf
    for step, report in training:
        ends = report.stop or step == total
        evaluating = len(val_plan.tokens) > 1 and (
            step == total or step % flags.eval_every == 0 and not report.stop
        )
        due = ends or step % flags.save_every == 0
        if not (due or evaluating or step % flags.log_every == 0):
            continue
        tokens = tokens_at(step)
        record: Values = {
            "step": step,
            "epoch": step / per_epoch,
            "tokens": tokens,
            "loss": float(report.loss),  # waits for the device
            "grad_norm": float(report.grad_norm),
            "lr": lr * lr_at(step - 1),
            "skipped": int(report.skipped),
        }
        rate = (tokens - logged) / (time.perf_counter() - logged_at)
        record |= {"tokens_per_s": rate, "tflops": rate * 6 * size / 1e12}  # 6 per weight
        if saving and (due or evaluating or saving.done()):
            best, saving = min(best, finish(saving)), None
        val_loss = math.inf
        if evaluating:
            batches: Any = chardata.every_window(val_plan, **place)
            if divided:
                batches, loss_fn = fsdp.pad_batches(replica, batches, gpt.loss)
            val_loss = record["val_loss"] = loop.evaluate(replica, batches, loss_fn, dtype)
            # A new best one is saved at once. Only rank 0 knows which saves succeeded.
            due |= ddp_setup.from_rank_zero(lambda: val_loss < best, world)
        if rank0:
            append(storage, flags.out, record)
            say(format_record(record, total, (tokens_at(total) - tokens) / rate))
        if due:
            copy = storage.snapshot(
                replica,
                optimizers,
                version=__version__,
                step=step,
                data=corpus.digest,
                chars=corpus.chars,
                config=vars(flags),
                scaler=scaler.state_dict(),
            )
            if copy:  # Ranks that write nothing have {}.
                saving = pool.submit(storage.save, flags.out, copy, step, val_loss, flags.keep)
            del copy  # Now only the save holds it.
        if ends:
            break
        # The rate leaves out evaluations and the copies of saves.
        logged, logged_at = tokens, time.perf_counter()
    if any(ddp_setup.gather(saving and math.isnan(finish(saving)), world)):
        return FAILED
    if step < total:
        tell(f"Stopped as asked after step {step} of {total}; start again to continue from there.")
        return STOPPED
    tell(f"Done: {total} steps. To print text: python run.py sample --out {flags.out}")
    return DONE


# ------------------------------------------------------------------------------ the parts of train


@one_line()
def open_storage(out: str, sharded: bool = False) -> Any:
    """Return ckpt.py, or an extra with the same functions for URLs or sharded checkpoints."""
    if "://" in out:
        from extras import remote

        return remote
    if sharded or os.path.isdir(f"{out}/part-0"):
        from extras import sharded as parts

        return parts
    return ckpt


@one_line()
def find_checkpoint(out: str, storage: Any = None) -> Values:
    """Return the newest checkpoint that is not damaged, or {}. "rejected" says which ones are.

    out: a folder or URL. Without `storage`, it can end with /best or /step-N.
    """
    folder, name = os.path.split(out.rstrip("/"))
    if os.path.isdir(out) or not (
        os.path.isfile(out) or name == "best" or name.startswith("step-")
    ):
        folder, name = out, ""
    elif storage:
        raise ValueError(f"--out {out} names a checkpoint or file; give a folder, or --init-from")
    storage = storage or open_storage(folder)
    entries = storage.list_checkpoints(folder)
    if name == "best":
        # Of equal ones, take the newest.
        entries = sorted((e for e in entries if e.loss < math.inf), key=lambda e: -e.loss)[-1:]
    elif name:
        entries = [
            e for e in entries if e.name.startswith(f"step-{name.removeprefix('step-'):0>8}")
        ]
    entry, state, rejected = storage.newest(folder, entries)
    if not entry:
        return {}
    if "version" not in state:
        raise ValueError(f"{entry.name}: not written by this program since version 0.5")
    if "parts" in state and "folder" not in state:
        raise ValueError(f"{entry.name}: its parts, in the folders part-N, are not beside it")
    for damaged, reason in rejected.items():
        warn(f"{damaged}: {reason}; using step {entry.step}")
    return state | {"name": entry.name, "rejected": rejected}


@one_line()
def read_init(given: Values) -> Values:
    """Return the model of --init-from, with the context of a given --block-size, or {}."""
    if (path := given.get("init_from")) is None:
        return {}
    from extras import convert

    return convert.start_state(path, find_checkpoint(path), given.get("block_size"))


def read_on_rank_zero(read: Callable[[], Values], world: ddp_setup.World) -> Values:
    """Return the checkpoint that read() returns on rank 0; on other ranks, without its tensors.

    All ranks must call this.
    """
    state = ddp_setup.wait_together(lambda: {} if world.rank else read(), world)
    names = state.keys() - {"model", "optimizers"}
    return ddp_setup.from_rank_zero(lambda: {name: state[name] for name in names}, world) | state


@one_line()
def complete_flags(given: Values, saved: Values, device: torch.device) -> Values:
    """Return all flags of a run: defaults, then those of the checkpoint, then the given ones.

    ValueError if flags contradict one another, or the checkpoint.
    """
    config = saved.get("config", {})
    for name in given.keys() & config.keys() & PINNED:
        if given[name] != config[name]:
            raise ValueError(
                f"--{name.replace('_', '-')} {given[name]} contradicts {saved['name']}, made with "
                f"{config[name]}; leave it out, or begin another run"
            )
    divided = given.get("strategy", "ddp") != "ddp"
    defaults = {"dtype": default_dtype(device), "optimizer": "adamw" if divided else "muon"}
    restored = {name: config[name] for name in config.keys() & OPTIONS.keys() - NOT_RESTORED}
    values = defaults | restored | given
    for name in ("data", "val_data"):  # for a start from another working folder
        values[name] = [n if "://" in n else os.path.abspath(n) for n in values.get(name, ())]
    if divided and values["optimizer"] == "muon":
        raise ValueError(f"--strategy {given['strategy']} needs --optimizer adamw")
    return values


def default_dtype(device: torch.device) -> str:
    """Return the default of --dtype."""
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:  # torch 2.12 has no get_capabilities.
        found: Values = getattr(torch.cpu, "get_capabilities", dict)()
        fast = device.type == "cpu" and found.get("avx512_bf16")
    return "bfloat16" if fast else "float32"


def find_files(names: Sequence[str]) -> list[str]:
    """Return the files that paths, globs and URLs name, in their order."""
    files: list[str] = []
    for name in names:
        if "://" in name:
            from extras import remote

            files += remote.download(name)
        else:
            files += chardata.list_files(name)
    return files


@one_line()
def read_data(
    flags: Flags, saved: Values
) -> tuple[chardata.Corpus, chardata.BatchPlan, chardata.BatchPlan]:
    """Return the data, and the plans for training and validation.

    ValueError if it is not the data of the checkpoint.
    """
    files, val_files = find_files(flags.data), find_files(flags.val_data)
    names = files + val_files
    if len({os.stat(name)[1:3] for name in names}) < len(names):  # device and inode
        raise ValueError("--data and --val-data name a file twice, so validation could be training")
    corpus = chardata.read(files, flags.tokenizer, saved.get("chars", ""), flags.vocab, val_files)
    if corpus.digest != saved.get("data", corpus.digest):
        raise ValueError(
            f"{saved['name']} was trained on other data; give the same --data and --val-data, or "
            "name another --out (the default text depends on the version of Python)"
        )
    tokens, val_tokens, *_ = corpus
    if not val_files:
        tokens, val_tokens = chardata.split(tokens, flags.val_fraction)
    if flags.eval_tokens:
        val_tokens = val_tokens[: flags.eval_tokens + 1]
    plan = chardata.BatchPlan(tokens, flags.block_size, flags.batch_size, flags.seed)
    # An evaluation has up to 8192 tokens in a batch.
    return corpus, plan, plan._replace(tokens=val_tokens, batch_size=8192 // flags.block_size or 1)


@one_line()
def make_schedule(
    flags: Flags, plan: chardata.BatchPlan
) -> tuple[int, float, Callable[[int], float]]:
    """Return the number of steps, the peak learning rate, and the factor for it as a function."""
    per_epoch = chardata.steps_per_epoch(plan)
    limits = (flags.epochs or 0) * per_epoch, flags.steps
    total = min(filter(None, limits), default=per_epoch)
    # The best rate falls with the width (Yang et al., 2022) and with the number of steps (Bjorck et
    # al., 2024). The numbers are measured: see tests/README.md.
    factor = 2 if flags.optimizer == "adamw" else 5
    lr = flags.lr or factor / (flags.embd * (5000 if flags.init_from else min(total, 5000)) ** 0.25)
    shapes: Values = {
        "linear": loop.linear,
        "cosine": loop.cosine,
        "constant": partial(loop.linear, decay_steps=math.ceil(total / 5)),
    }
    lr_at = partial(
        shapes[flags.schedule],
        total=total,
        warmup_steps=round(flags.warmup * total),
        floor=flags.min_lr / lr,
    )
    return total, lr, lr_at


def build(flags: Flags, seed: int | None) -> gpt.GPT:
    """Return the model of these flags. Without a seed, it has no weights yet."""
    config = gpt.Config(**{name: getattr(flags, name) for name in gpt.Config._fields})
    with one_line():
        gpt.check(config)
    model = gpt.build(config, seed)
    model.checkpoint_activations = flags.checkpoint_activations
    return model


# ------------------------------------------------------------------------------- files and output


@one_line()
def prepare_folder(out: str, storage: Any, saved: Values) -> object:
    """Lock the folder, set damaged checkpoints aside, and check that `saved` is the newest one."""
    lock = storage.lock(out)
    for name in saved.get("rejected", ()):
        storage.set_aside(out, name)
    for entry in storage.list_checkpoints(out)[-1:]:
        if entry.name != saved.get("name"):
            raise BlockingIOError(f"{out}: another run has just written {entry.name}; start again")
    return lock


def append(storage: Any, out: str, record: Values) -> None:
    """Append a record to metrics.jsonl. After a resume, the last line of a step counts."""
    try:
        storage.append_text(out, "metrics.jsonl", json.dumps(record) + "\n")
    except OSError as error:
        warn(f"metrics not written: {error}")


def format_record(record: Values, total: int, seconds_left: float) -> str:
    """Return the line to print for a record."""
    line = (
        f"step {record['step']}/{total}  epoch {record['epoch']:.2f}  loss {record['loss']:.4f}"
        f"  lr {record['lr']:.1e}  {record['tokens_per_s']:,.0f} tokens/s"
        f"  eta {timedelta(seconds=round(seconds_left))}"
    )
    if "val_loss" in record:
        line += f"  validation loss {record['val_loss']:.4f}"
    return line


def finish(save: Future[Any]) -> float:
    """Wait for a save, and return the loss in its name. After a failure, warn and return NaN."""
    if error := save.exception():
        warn(f"checkpoint not written: {error}")
        return math.nan
    return getattr(save.result(), "loss", math.inf)  # of sharded.py, only rank 0 gets the entry


def say(text: str, err: bool = False) -> None:
    """Print a line. A terminal or pipe that was closed does not end the training."""
    try:
        click.echo(text, err=err)
    except OSError:  # Otherwise Python would try again at its end, and exit with 120.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1 + err)


def warn(text: str) -> None:
    """Print a warning on stderr."""
    say(f"Warning: {text}", err=True)


# ------------------------------------------------------------------------------ sample and evaluate


def load_model(out: str, world: ddp_setup.World) -> tuple[gpt.GPT, Flags, Values]:
    """Return the model of a checkpoint, ready for inference, its flags, and the checkpoint.

    out: on rank 0, which checkpoint; see find_checkpoint. All ranks call this.
    """
    saved = read_on_rank_zero(lambda: find_checkpoint(out), world)
    if not saved:
        raise click.UsageError(
            f"{out}: there is no such checkpoint; train first, or name another --out"
        )
    flags = Flags(**complete_flags({}, saved, world.device))
    model = build(flags, None).to_empty(device=world.device)
    with one_line():
        open_storage("", "parts" in saved).restore_({**saved, "optimizers": []}, model, [])
    return model.eval(), flags, saved


SHARED = [OPTIONS["out"], OPTIONS["device"]]


@click.command(params=[*SHARED])
@click.option("--prompt", default="\n", help="Text to continue.")
@click.option("--max-new-tokens", type=COUNT, default=500, help="Number of tokens to generate.")
@click.option("--num-samples", type=COUNT, default=1, help="Number of texts, one after another.")
@click.option("--temperature", type=NOT_NEGATIVE, default=0.8, help="0: the most probable token.")
@click.option("--top-k", type=FROM_ZERO, default=0, help="Only the K most probable; 0 means all.")
@click.option(
    "--top-p",
    type=FloatRange(0, 1, min_open=True),
    default=1.0,
    help="Only the most probable tokens whose probabilities add up to P.",
)
@click.option("--seed", type=int, help="To get the same texts again.")
def sample(
    out: str,
    device: str,
    prompt: str,
    max_new_tokens: int,
    num_samples: int,
    seed: int | None,
    **settings: Any,
) -> None:
    """Print text that a model generates.

    \b
      python run.py sample --prompt "The " --max-new-tokens 200
    """
    with join_group(device) as world:
        model, flags, saved = load_model(out, world)
        if world.rank:  # Only rank 0 generates.
            return
        codec: Any = chardata
        with one_line():
            if flags.tokenizer not in ("char", "byte"):
                from extras import prepare as codec

            ids = codec.encode(prompt, flags.tokenizer, saved["chars"]).tolist() or [0]
        torch.manual_seed(torch.seed() if seed is None else seed)
        for number in range(num_samples):
            if number:
                click.echo("--------------------")
            new = islice(gpt.sample(model, torch.tensor(ids), **settings), max_new_tokens)
            for piece in codec.decode(chain(ids, map(int, new)), flags.tokenizer, saved["chars"]):
                click.echo(piece, nl=False)
            click.echo()


@click.command("eval", params=[*SHARED])
@click.option("--data", multiple=True, help="As in training.  [default: its validation data]")
def evaluate(out: str, device: str, data: tuple[str, ...]) -> None:
    """Print the exact loss of a model on a text: the mean over all tokens but the first.

    \b
      python run.py eval --data other.txt
    """
    with join_group(device) as world:
        model, flags, saved = load_model(out, world)
        flags = replace(flags, eval_tokens=0)  # 0 means all
        if data:
            flags = replace(flags, data=data, val_data=(), val_fraction=1.0)
            del saved["data"]  # the digest of the run's data
        *_, plan = ddp_setup.wait_together(lambda: read_data(flags, saved), world)
        targets = len(plan.tokens) - 1
        if targets < 1:
            raise click.UsageError("there is no validation data; name other or longer --data")
        batches = chardata.every_window(plan, rank=world.rank, world_size=world.size)
        loss = loop.evaluate(model, batches, gpt.loss, getattr(torch, flags.dtype))
        if world.rank == 0:
            click.echo(
                f"loss {loss:.4f} nats per token, perplexity {math.exp(loss):.4f}, over "
                f"{targets:,} tokens, in {flags.dtype}"
            )


# ------------------------------------------------------------------------------------ command line


@contextmanager
def join_group(device: str, timeout: float = 600.0) -> Iterator[ddp_setup.World]:
    """Enter ddp_setup.process_group. Only an error before the block becomes one line."""
    with ExitStack() as stack:
        with one_line():
            world = stack.enter_context(ddp_setup.process_group(device, timeout))
        yield world


def run_rank(given: Values) -> int:
    """Join the other ranks and train; return the exit code."""
    flags = Flags(**given)
    group = join_group(flags.device, flags.timeout)
    # Before a failed rank leaves the group, its save ends: else its error would not be the first.
    with group as world, ddp_setup.stop_signals() as stop, ThreadPoolExecutor(1) as pool:
        if sys.platform == "linux" and world.device.type == "cpu":
            # Let glibc keep freed memory for the next step, which takes 5 % less time then.
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(-3, 1 << 25), mallopt(-1, 2**31 - 1)  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
        return train(given, world, stop, pool)


def read_config(ctx: click.Context, _: click.Parameter, file: Any) -> None:
    """Take the defaults of the flags from the TOML file of --config."""
    with one_line():
        ctx.default_map = tomllib.load(file) if file else {}
        if unknown := ctx.default_map.keys() - OPTIONS.keys():
            raise ValueError(f"--config: {min(unknown)} is not a flag, such as batch_size")


@click.group(
    commands=[sample, evaluate],
    params=[*OPTIONS.values()],
    invoke_without_command=True,
    context_settings={"show_default": True},
)
@click.option(
    "--config",
    type=click.File("rb"),
    help="A TOML file of flags, with lines such as `batch_size = 64`.",
    callback=read_config,
    is_eager=True,
    expose_value=False,
)
@click.pass_context
def cli(ctx: click.Context, /, **values: Any) -> int:
    """Train a GPT on text, on one process or on many.

    \b
      python run.py                                   a default text, in about a minute
      python run.py --data mine.txt --spawn           one process per GPU, or per CPU core
      torchrun --nproc-per-node 4 run.py --epochs 3   four processes, started by torchrun

    Started again with the same --out, a run continues where it stopped. Every flag can also be an
    environment variable (DDPKIT_BATCH_SIZE), or a line in a --config file.
    """
    if command := ctx.invoked_subcommand:
        if ctx.default_map or ParameterSource.COMMANDLINE in map(ctx.get_parameter_source, values):
            raise click.UsageError(f"give no --config, and flags only after the command {command}")
        return DONE
    given = {
        name: value
        for name, value in values.items()
        if ctx.get_parameter_source(name) != ParameterSource.DEFAULT
    }
    if values["spawn"] is None:
        return run_rank(given)
    gpus = 0 if values["device"] == "cpu" else torch.cuda.device_count()
    size = values["spawn"] or gpus or ddp_setup.available_cpus()
    with one_line():
        ddp_setup.spawn(spawned, (given,), size)
    return DONE


def spawned(rank: int, given: Values) -> None:
    """Train as a rank of --spawn, and end the process."""
    sys.exit(exit_code(lambda: run_rank(given)))


def exit_code(call: Callable[[], int | None]) -> int:
    """Run the program or a rank, and return the exit code. A mistake of the user is one line."""
    try:
        return call() or DONE
    except (click.ClickException, loop.Diverged) as error:
        text = getattr(error, "format_message", error.__str__)()
        if "No such command" in text:
            text += " Flags begin with --, and a pattern needs quotes: --data 'books/*.txt'"
        say(f"Error: {text}", err=True)
        return getattr(error, "exit_code", MISTAKE)
    except click.Abort:  # Ctrl-C
        return 130
    except ProcessException as error:  # of --spawn
        code = getattr(error, "exit_code", -1)
        if code < 0:  # Otherwise, the rank has printed its error.
            say(f"Error: {error}", err=True)
        return max(code, FAILED)


def main(args: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of this process, and return the exit code."""
    return exit_code(lambda: cli.main(args, standalone_mode=False))


if __name__ == "__main__":
    sys.exit(main())
