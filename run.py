#!/usr/bin/env python3
"""Train a GPT on text, on one process or on many.

python run.py                                   train on a default text, in less than a minute
python run.py --data mine.txt --spawn 4         four processes on this machine
torchrun --nproc-per-node 4 run.py --epochs 3   four processes, started by torchrun
python run.py sample --prompt "The "            print text that the newest checkpoint generates
python run.py eval --data other.txt             print the checkpoint's exact loss on a text

Read `train` first. It uses ddp_setup, chardata, gpt, loop and ckpt, which do not import one
another. A file of extras/ is used only if a flag, a URL or a variable of SLURM asks for it.
"""

from __future__ import annotations

import atexit
import ctypes
import difflib
import errno
import faulthandler
import gc
import importlib
import json
import logging
import math
import multiprocessing
import os
import re
import select
import shutil
import signal
import sys
import sysconfig
import time
import timeit
import tomllib
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import cache, partial
from itertools import chain, islice, takewhile, tee
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import click

T = TypeVar("T")
Values = dict[str, Any]  # for example a checkpoint


class LazyModule(ModuleType):
    """Stands for a module and imports it at its first use, so that --help is fast.

    The standard library's LazyLoader cannot load torch in Python 3.12.3.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(importlib.import_module(self.__name__), name)
        except ModuleNotFoundError as error:
            advice = f"install {error.name}"
            if error.name == self.__name__ != "torch":
                advice = "keep it in the folder of run.py, and start Python without -P"
            raise click.ClickException(f"{error}; {advice}")


def extra(name: str) -> ModuleType:
    """Import extras/NAME.py. FileNotFoundError if it or a module that it imports is missing."""
    try:
        return importlib.import_module(f"extras.{name}")
    except ModuleNotFoundError as error:
        raise FileNotFoundError(f"this needs extras/{name}.py: {error}") from error


if TYPE_CHECKING:
    import torch

    import chardata
    import ckpt
    import ddp_setup
    import gpt
    import loop
else:
    ddp_setup, torch, chardata, gpt, loop, ckpt = map(
        LazyModule, "ddp_setup torch chardata gpt loop ckpt".split()
    )

__version__ = "0.4.0"
# Exit codes. 2 is that of click.UsageError: another start would end in the same way. 130 is a
# Ctrl-C without saving.
DONE, FAILED, STOPPED = 0, 1, 3
EVAL_BATCH = 8192  # tokens in a batch of an evaluation
# A line of output is left out if it must wait for longer, because the ranks wait meanwhile.
OUTPUT_SECONDS = 1.0
# A rank waits for its save for this part of --timeout, because the others wait for the rank.
SAVE_PART = 0.7
STOPPING = "Stopping after this step. Press Ctrl-C again to end without saving."


# ------------------------------------------------------------------------------------------- flags

COUNT, FROM_ZERO = click.IntRange(1), click.IntRange(0)
POSITIVE, NOT_NEGATIVE = click.FloatRange(0, min_open=True), click.FloatRange(0)
SECONDS = click.FloatRange(0, 1e9, min_open=True)  # Python cannot wait much longer
FRACTION, SEED = click.FloatRange(0, 1, max_open=True), click.IntRange(0, 2**63 - 1)
PATH = click.Path()
# An environment variable has one path, even if it contains colons, as a URL does.
setattr(PATH, "envvar_list_splitter", "\0")


def check_number(_: click.Context, __: click.Parameter, value: T) -> T:
    """Return the value of a flag. Refuse nan and infinity, which the ranges of click accept."""
    if isinstance(value, (int, float)) and not value < 2**63:  # this also finds nan
        raise click.BadParameter(f"{value} is not a number below 2**63")
    return value


def option(default: T, help: str, type: object = None, **more: object) -> T:
    """Return a dataclass field for a click option. type: a click type, or a list of choices."""
    if isinstance(type, list):
        type = click.Choice(type)
    more |= {"default": default, "help": help, "type": type, "callback": check_number}
    return field(default=default, metadata=more)


@dataclass(frozen=True)
class Flags:
    """The flags of a training run."""

    data: tuple[str, ...] = option(
        (),
        "Text, or tokens (.bin, .npy): a file, a glob or a URL; can be given several times. Texts "
        "are joined with a line break. With a tokenizer.json, its end-of-text token ends each, and "
        'each line of a .jsonl is a text, its field "text".',
        PATH,
        multiple=True,
    )
    val_data: tuple[str, ...] = option(
        (),
        "Validation data, given like --data. Then --val-fraction has no effect.",
        PATH,
        multiple=True,
    )
    vocab: int | None = option(
        None, "Vocabulary size for token files.  [default: from the highest id]", COUNT
    )
    tokenizer: str = option("char", "How text becomes tokens.", metavar="char|byte|TOKENIZER.json")
    val_fraction: float = option(0.1, "Fraction of the data, at its end, for validation.", FRACTION)
    block_size: int = option(
        128, "Context length in tokens; with --init-from, at most that of the model.", COUNT
    )
    batch_size: int = option(16, "Sequences per optimizer step, summed over all ranks.", COUNT)
    seed: int = option(0, "Seed for weights, data order and dropout.", SEED)
    arch: str = option(
        "modern2",
        "Architecture; gpt2 is exactly GPT-2, and modern2 learns faster than modern.",
        ["gpt2", "modern", "modern2"],
    )
    layers: int = option(4, "Number of transformer blocks.", COUNT)
    heads: int = option(4, "Attention heads per block.", COUNT)
    embd: int = option(128, "Width of the model.", COUNT)
    dropout: float = option(0.0, "Dropout probability.", FRACTION)
    init_from: str | None = option(
        None,
        "Model to start a new run from: OUT, OUT/best or OUT/step-N of another run, a nanoGPT "
        "checkpoint, or a Hugging Face GPT-2.",
        PATH,
    )
    epochs: int | None = option(
        None,
        "Passes over the training data.  [default: 1; with --steps, as many as these need]",
        COUNT,
    )
    steps: int | None = option(
        None,
        "Last step, even if --epochs has more. --schedule ends there.",
        COUNT,
    )
    optimizer: str = option(
        "auto",
        "muon uses Muon for the blocks' matrices, AdamW for the rest. fast-muon computes the same "
        "updates faster, with extras/muon.py. auto: fast-muon if that file is there, else muon.",
        ["auto", "adamw", "muon", "fast-muon"],
    )
    lr: float | None = option(
        None,
        "Peak learning rate.  [default: 5 / (EMBD * STEPS ** 0.25); with adamw, 2 instead of 5]",
        POSITIVE,
    )
    embedding_lr: float = option(
        2.0, "With muon, AdamW's learning rate is --lr times this factor.", POSITIVE
    )
    momentum: float = option(0.8, "Momentum of Muon.", FRACTION)
    schedule: str = option(
        "linear",
        "How the learning rate falls after the warm-up. constant: it stays at --lr, and falls "
        "linearly in the last fifth of the steps.",
        ["linear", "cosine", "constant"],
    )
    min_lr: float = option(0.0, "Learning rate at the end of the run.", NOT_NEGATIVE)
    warmup: float = option(
        0.05, "Fraction of the steps before the peak learning rate is reached.", FRACTION
    )
    weight_decay: float = option(0.1, "Weight decay, except for biases and norms.", NOT_NEGATIVE)
    clip: float = option(1.0, "Largest gradient norm; 0 means no clipping.", NOT_NEGATIVE)
    accum: int = option(1, "Micro-batches per step and rank; a higher number saves memory.", COUNT)
    spawn: int | None = option(
        None,
        "Start N processes on this machine. Without N: one per GPU, or one per CPU core.",
        click.IntRange(0, 1024),
        is_flag=False,
        flag_value=0,  # for --spawn without N
        metavar="[N]",
    )
    strategy: str = option(
        "ddp",
        "zero and fsdp divide weights and optimizer state over the ranks. fsdp uses least memory.",
        ["ddp", "zero", "fsdp"],
    )
    device: str = option("auto", "Device to use.", ["auto", "cpu", "cuda", "mps"])
    dtype: str = option(
        "auto",
        "Type of the computation; weights stay float32. auto: bfloat16 where it is faster. "
        "On CUDA, float32 uses TF32 only if the variable TORCH_ALLOW_TF32_CUBLAS_OVERRIDE is 1.",
        ["auto", "float32", "bfloat16", "float16"],
    )
    compile: bool | None = option(
        None,
        "Use torch.compile.  [default: for runs that are so long that it saves time]",
        param_decls=["--compile/--no-compile"],
    )
    use: tuple[str, ...] = option(
        (),
        "Add a tool of extras/; can be given several times. slow-ranks: warn if a rank is slower "
        "than the others. replicas: compare the weights of all ranks before each save. "
        "hang-report: if a rank waits for 30 s, print where each rank is. "
        "cuda-graphs: make steps of small models faster.",
        ["slow-ranks", "replicas", "hang-report", "cuda-graphs"],
        multiple=True,
    )
    checkpoint_activations: bool = option(
        False, "Compute blocks again in the backward pass: less memory.", is_flag=True
    )
    timeout: float = option(
        600.0, "Seconds to wait for another rank; 0.7 of it, to wait for a save.", SECONDS
    )
    out: str = option("out", "Folder or URL for checkpoints and metrics.", PATH)
    eval_every: int = option(100, "Steps between evaluations.", COUNT)
    eval_tokens: int = option(131072, "Validation tokens in an evaluation; 0 means all.", FROM_ZERO)
    save_every: int = option(100, "Steps between checkpoints.", COUNT)
    log_every: int = option(10, "Steps between lines of metrics.", COUNT)
    checkpoint: str = option(
        "whole", "sharded: each rank writes its part of a checkpoint.", ["whole", "sharded"]
    )
    keep: int = option(3, "Number of newest checkpoints to keep, besides the best one.", COUNT)


OPTIONS = {
    f.name: click.Option(
        **{
            "param_decls": ["--" + f.name.replace("_", "-")],  # --compile has its own
            "envvar": f"DDPKIT_{f.name.upper()}",
            **f.metadata,
        }
    )
    for f in fields(Flags)
}

# A resumed run cannot change these flags. They define the model, the state of the optimizers, the
# order of the data, and the validation loss.
PINNED = set(
    "tokenizer vocab val_fraction block_size batch_size seed arch layers heads embd optimizer "
    "init_from eval_tokens".split()
)
# Checkpoints do not contain these flags.
NOT_RESTORED = set(
    "spawn strategy device use timeout out log_every accum checkpoint "
    "checkpoint_activations".split()
)


# ------------------------------------------------------------------------------------------- train


def replicate(model: gpt.GPT, flags: Flags, world: ddp_setup.World) -> torch.nn.Module:
    """Give a model its first weights, and wrap it in DistributedDataParallel."""
    gpt.initialize_(model, flags.seed)
    return ddp_setup.replicate(model, world)


def same_batches(
    model: torch.nn.Module, batches: Iterable[Any], loss_fn: Any, stop: Callable[[], bool]
) -> tuple[Iterable[Any], Any, Callable[[], bool]]:
    """Change nothing in an evaluation."""
    return batches, loss_fn, stop


def train(
    asked: Flags,
    given: set[str],
    world: ddp_setup.World,
    stop: Callable[[], bool],
    storage: ModuleType,
    parallelize: Callable[[gpt.GPT, Flags, ddp_setup.World], torch.nn.Module] = replicate,
    wrap_steps: Callable[..., Any] = lambda steps, loss_fn: (steps, loss_fn),
    wrap_batches: Callable[..., Any] = same_batches,
    check_folder: Callable[[str], object] = lambda out: None,
    before_save: Callable[..., object] = lambda model, optimizers: None,
    sync_each: bool = False,
) -> int:
    """Train until the last step or a stop signal; return the exit code. Every rank runs this.

    asked: the flags of rank 0. given: the names of those that the user set.
    stop: tells whether this rank has got a stop signal.
    storage: ckpt, or an extra with its functions. The other arguments are for extras: see
        extras/compose.py.
    """
    rank0 = world.rank == 0
    tell: Callable[..., object] = say if rank0 else lambda *_: None
    state, saved = read_on_rank_zero(
        lambda: find_checkpoint(asked.out, storage) or read_init(asked, given), world
    )
    flags = agree_on_flags(asked, given, saved, world)
    start_step = saved.get("step", 0)
    corpus, plan, val_plan = load_data(flags, given, saved, world)
    with usage_errors(name_data(flags), together=True):
        steps_per_epoch = chardata.steps_per_epoch(plan)
    total, lr, lr_factor = make_schedule(vars(flags), steps_per_epoch)
    tokens_at = partial(chardata.tokens_before, plan)
    if start_step >= total:
        limit = "--steps" if total == flags.steps else "--epochs"
        advice = f"To continue, give a higher {limit}; for a new run, name another --out."
        tell(f"The run in {flags.out} is finished: {start_step} steps. {advice}")
        return DONE

    config = model_config(vars(flags) | {"vocab": corpus.vocab})
    flops = gpt.flops_per_token(config)
    compiled = ddp_setup.from_rank_zero(
        lambda: should_compile(flags.compile, world.device, total, flops * tokens_at(total)), world
    )
    dtype = getattr(torch, flags.dtype)
    model = ddp_setup.wait_together(
        lambda: build_without_weights(config, flags, compiled, state), world
    )
    replica = parallelize(model, flags, world)
    optimizers = ddp_setup.wait_together(lambda: make_optimizers(model, flags, lr, world), world)
    scaler = torch.amp.GradScaler(world.device.type, enabled=dtype == torch.float16)
    if saved:
        with usage_errors(f"{saved['name']}: ", together=True):
            # All ranks get the state of rank 0. The settings of the optimizers, such as the
            # learning rate, stay those of the flags.
            storage.restore_(state, replica, optimizers if start_step else [])
    scaler.load_state_dict(saved.get("scaler") or scaler.state_dict())
    state = {}  # frees its memory

    # Nothing is written to --out before this line.
    settings = vars(flags) | {"compile": compiled, "vocab": corpus.vocab, "lr": lr}
    for name in ("data", "val_data"):  # for a start in another working folder
        settings[name] = [p if "://" in p else os.path.abspath(p) for p in settings[name]]
    machine = ddp_setup.from_rank_zero(lambda: describe_machine(world, dtype), world)
    constants = {
        "data": corpus.digest,
        "ranks": world.size,
        "threads": machine["threads"],
        "config": {key: settings[key] for key in settings if key not in NOT_RESTORED},
        "vocabulary": {"vocab": corpus.vocab, "kind": corpus.kind, "chars": corpus.chars},
    }
    peak_rate = machine["peak_flops"] / flops  # tokens/s
    with usage_errors(f"--out {flags.out}: ", together=True):
        lock = ddp_setup.wait_together(  # is held while this name exists
            lambda: rank0 and prepare_folder(flags.out, storage, saved, settings | machine), world
        )
        check_folder(flags.out)
    tell(describe_run(model, world, settings, start_step + 1, total))
    for line in describe_changes(flags, saved, machine, steps_per_epoch):
        tell(line)
    pool = start_save_thread()
    # A thread of its own: a file that blocks must hold up neither the training nor a save.
    metrics = ThreadPoolExecutor(1, "metrics")
    # The latest save of this rank and its deadline. The first save does nothing.
    writing = pool.submit(bool), time.monotonic() + SAVE_PART * flags.timeout

    def wait_for_saves() -> bool:
        """Wait for the saves of all ranks. Return whether all ended in time."""
        return not ddp_setup.any_rank(not wait_for_save(metrics, *writing), world)

    batches = chardata.steps(
        plan, rank=world.rank, world_size=world.size, accum=flags.accum, start=start_step
    )
    steps, loss_fn = wrap_steps(batches, gpt.loss)
    training = loop.train_(
        replica,
        optimizers,
        steps,
        loss_fn,
        start=start_step,
        lr_at=lr_factor,
        clip=flags.clip or math.inf,
        dtype=dtype,
        scaler=scaler,
        seed=flags.seed,
        stop=stop,
        sync_each=sync_each,
    )
    targets = chardata.num_tokens(val_plan.tokens) - 1  # all tokens but the first
    gc.freeze()  # Never collect what exists now.
    gc.enable()  # program() disabled it.
    # tokens_per_s leaves out evaluations and saves: their duration is added to logged_at.
    logged_tokens, logged_at = tokens_at(start_step), time.perf_counter()
    best, save_due = saved.get("best", math.inf), False  # best: the lowest validation loss
    try:
        for step, report in training:
            stopped, last, val_loss = report.stop, step == total, None
            evaluating = targets > 0 and (last or step % flags.eval_every == 0)
            if rank0 and (stopped or last or evaluating or step % flags.log_every == 0):
                measured = read_report(report)  # waits for the device
                now, tokens = time.perf_counter(), tokens_at(step)
                rate = (tokens - logged_tokens) / (now - logged_at)
                logged_tokens, logged_at = tokens, now
                record = {"step": step, "epoch": round(step / steps_per_epoch, 4), "tokens": tokens}
                record |= measured
                record["lr"] = lr * lr_factor(step - 1)  # of this step; with muon: Muon's
                record |= {"tokens_per_s": round(rate, 1), "mfu": round(rate / peak_rate, 4)}
                metrics.submit(append_metrics, storage, flags.out, lock, record)
                say(format_record(record, total, (tokens_at(total) - tokens) / rate))
            # A step whose loss or gradient is not finite changes no weight. So its checkpoint would
            # be a copy, and --keep would delete an older, different one. The next good step saves.
            save_due = save_due or step % flags.save_every == 0
            due = save_due and math.isfinite(report.loss + report.grad_norm)
            # Before an evaluation or a save, rank 0 has waited for its device above, in float() or
            # isfinite(). So the time from here on contains no training.
            paused_at = time.perf_counter()
            if evaluating and not stopped:
                val_loss = validate(replica, val_plan, world, dtype, wrap_batches, stop)
                stopped = val_loss is None
                if val_loss is not None and val_loss < best:
                    best, due = val_loss, True
                if rank0 and not stopped:
                    values = {"step": step, "val_loss": val_loss}
                    metrics.submit(append_metrics, storage, flags.out, lock, values)
                    say(f"step {step}  validation loss {val_loss:.4f} over {targets:,} tokens")
            if stopped or last or due:
                save_due = False
                if rank0:
                    warn_if_changed(corpus)
                before_save(replica, optimizers)
                if may_save := wait_for_saves():  # otherwise, skip this save
                    progress = {"step": step, "best": best, "scaler": scaler.state_dict()}
                    copy = storage.snapshot(replica, optimizers, **constants, **progress)
                    if copy:  # Ranks that write nothing have {}.
                        save = pool.submit(
                            storage.save, flags.out, copy, step, val_loss, flags.keep, lock
                        )
                        writing = save, time.monotonic() + SAVE_PART * flags.timeout
                    del copy  # Now only the save holds it.
            logged_at += time.perf_counter() - paused_at
            if stopped or last:
                break
    except Exception as error:
        # Complete the save before the error ends the process. (If only this rank has an error, the
        # launcher ends it some seconds after another rank has noticed that.)
        together = isinstance(error, FloatingPointError) or hasattr(error, "raised_on_rank")
        wait_for_saves() if together else wait_for_save(metrics, *writing)
        raise
    written = may_save and wait_for_saves() and not writing[0].exception()
    if ddp_setup.any_rank(not written, world):
        tell(f"Error: the checkpoint of step {step} was not written", True)
        return FAILED
    if step < total:
        tell(f"Stopped as asked after step {step} of {total}; start again to continue from there.")
        return STOPPED
    tell(f"Done: {total} steps. To print text: python run.py sample --out {flags.out}")
    return DONE


# ------------------------------------------------------------------------------ the parts of train


def open_storage(out: str, write_sharded: bool = False) -> Any:
    """Return ckpt.py, or an extra with the same functions for URLs and sharded checkpoints."""
    core = importlib.import_module("ckpt")  # not the LazyModule: the extras call vars(core)
    if "://" in out:
        return extra("remote").storage(core, write_sharded)
    if write_sharded or any(not e.name.endswith(".pt") for e in core.list_checkpoints(out)):
        return extra("sharded").storage(core, write_sharded)
    return core


def split_out(out: str) -> tuple[str, str]:
    """Return a folder, and "best", "step-N" or the name of a checkpoint; "" means the newest one.

    out: FOLDER, or FOLDER/best and so on.
    """
    folder, name = os.path.split(out)
    if not re.fullmatch(r"best|step-\d+\S*", name) or ckpt.list_checkpoints(out):
        return out, ""
    return folder or ".", name


def choose(entries: Sequence[ckpt.Entry], name: str) -> list[ckpt.Entry]:
    """Return the entries that `name` means: see split_out."""
    if name == "best":
        return [min(reversed(entries), key=lambda entry: entry.loss)] if entries else []
    return [entry for entry in entries if name in ("", entry.name, f"step-{entry.step}")]


def find_checkpoint(out: str, storage: ModuleType, name: str = "") -> Values:
    """Return the newest checkpoint that is not damaged, or that of `name`; {} if there is none.

    Its value "rejected" is {name: reason} for newer, damaged checkpoints. ValueError if all are
    damaged, or if another program wrote the newest one.
    """
    found, rejected = storage.newest(
        out, list_checkpoints=lambda out: choose(storage.list_checkpoints(out), name)
    )
    if not found:
        return {}
    state = {**found.state, "name": f"{out}/{found.entry.name}", "rejected": rejected}
    if not {"config", "vocabulary"} <= state.keys():
        raise ValueError(f"{state['name']}: not written by this program; name another --out")
    config = state["config"]
    data = config.get("data") or ()  # Version 0.3 had one string or None.
    config["data"] = [data] if isinstance(data, str) else data
    if "compile" not in config and config.get("optimizer") == "muon":
        config["optimizer"] = "auto"  # Version 0.2 called both kinds of Muon "muon".
    return state


def read_on_rank_zero(read: Callable[[], Values], world: ddp_setup.World) -> tuple[Values, Values]:
    """Return the checkpoint that read() returns on rank 0, and the same without its tensors.

    All ranks call this. The first result is {} on the other ranks, the second is the same on all.
    """
    state = ddp_setup.wait_together(lambda: read() if world.rank == 0 else {}, world)
    names = state.keys() - {"model", "optimizers"}
    return state, ddp_setup.from_rank_zero(lambda: {name: state[name] for name in names}, world)


def read_init(flags: Flags, given: set[str]) -> Values:
    """Return the model of --init-from, with the context of a given --block-size, or {}."""
    if flags.init_from is None:
        return {}
    folder, _ = split_out(flags.init_from)
    ours = open_storage(folder).list_checkpoints(folder)  # [] for files of other programs
    old = read_checkpoint(flags.init_from) if ours else {}
    size = flags.block_size if "block_size" in given else None
    return extra("exchange").start_state(flags.init_from, old, size)  # type: ignore[no-any-return]


def agree_on_flags(asked: Flags, given: set[str], saved: Values, world: ddp_setup.World) -> Flags:
    """Return what complete_flags returns on rank 0. All ranks call this."""
    # A dict, because pickle does not find the class Flags under a profiler.
    return Flags(
        **ddp_setup.from_rank_zero(
            lambda: vars(complete_flags(asked, given, saved, world.device)), world
        )
    )


def complete_flags(asked: Flags, given: set[str], saved: Values, device: torch.device) -> Flags:
    """Return the flags of a run, with a dtype and an optimizer in place of "auto".

    Flags that are not in `given` come from the checkpoint, except NOT_RESTORED.
    ValueError if a given flag of PINNED contradicts the checkpoint, or if flags do not fit
    together.
    """
    values = merge_saved(vars(asked), given, saved)
    if values["dtype"] == "auto":
        values["dtype"] = "bfloat16" if bfloat16_is_faster(device) else "float32"
    if values["optimizer"] == "auto":
        fast = Path(__file__).with_name("extras").joinpath("muon.py").is_file()
        values["optimizer"] = "fast-muon" if fast else "muon"
    flags = Flags(**values)
    if flags.min_lr > (flags.lr or 0):
        other = flags.lr or "the default"
        raise ValueError(f"--min-lr {flags.min_lr} needs a higher --lr than {other}")
    if device.type == "mps" and flags.checkpoint_activations and flags.dropout:
        # Dropout would differ in the second forward pass: PyTorch issue 127676.
        raise ValueError("on MPS, --checkpoint-activations works only without --dropout")
    return flags


def merge_saved(values: Values, given: set[str], saved: Values) -> Values:
    """Return the flags `values`. Those that are not in `given` come from the checkpoint."""
    config = saved.get("config", {})
    for name in sorted(given & config.keys() & PINNED):
        ours, theirs, flag = values[name], config[name], f"--{name.replace('_', '-')}"
        # extras/tokenizer.py compares two tokenizer.json files later.
        both_json = f"{ours}".endswith(".json") and f"{theirs}".endswith(".json")
        if ours != theirs and theirs != "auto" and not both_json:
            # A state from --init-from has no step.
            other = "name another --out" if "step" in saved else "start without --init-from"
            made = f"with {flag} {theirs}" if theirs is not None else f"without {flag}"
            raise ValueError(
                f"{flag} {ours} contradicts {saved['name']}, made {made}; leave it out, or {other}"
            )
    # Other versions can have other flags.
    names = (config.keys() & values.keys()) - given - NOT_RESTORED
    return values | {name: config[name] for name in names}


def read_corpus(flags: Flags, given: set[str], chars: str) -> chardata.Corpus:
    """Read the data that the flags name, as tokens.

    chars: the characters or the text of tokenizer.json in the checkpoint; "" if there is none.
    """
    tokenizer = flags.tokenizer
    files, val_files = find_files(flags.data), find_files(flags.val_data)
    if both := {*files} & {*val_files}:
        raise ValueError(f"{min(both)}: is in --data and in --val-data")
    read = chardata.read
    if tokenizer not in ("char", "byte"):
        read = partial(extra("tokenizer").read_corpus, chardata)
        if chars and "tokenizer" not in given:
            tokenizer = ""  # that of the checkpoint, in `chars`
    return read(files, tokenizer, chars, flags.vocab, val_files)


def find_files(data: Sequence[str]) -> list[str]:
    """Return the files that paths, globs and URLs name, in their order."""
    found = (
        extra("remote").download(name) if "://" in name else chardata.list_files(name)
        for name in data
    )
    return [*chain.from_iterable(found)]


def name_data(flags: Flags) -> str:
    """Return the subject of an error about the data."""
    val_data = f" --val-data {' '.join(flags.val_data)}" if flags.val_data else ""
    return f"--data {' '.join(flags.data) or '(default text)'}{val_data}: "


def data_advice(flags: Flags) -> str:
    """Return what to do if the data is not that of the checkpoint. flags: completed by it."""
    if not flags.data:
        return (
            "; the default text is Python's own help, which differs between versions of Python: "
            "continue with the Python that began the run, or name another --out"
        )
    return "; give the --data that the run had, or none if it had none; or name another --out"


def load_data(
    flags: Flags, given: set[str], saved: Values, world: ddp_setup.World
) -> tuple[chardata.Corpus, chardata.BatchPlan, chardata.BatchPlan]:
    """Return the data, and the plans for training and validation. All ranks call this.

    UsageError if the data differs between ranks or from that of the checkpoint.
    """
    chars = saved["vocabulary"]["chars"] if saved else ""
    # Neither a model from --init-from nor `eval` on other data has the digest "data".
    other = f"--out {flags.out} has a run with other data: " if "data" in saved else ""

    def read() -> chardata.Corpus:
        try:
            return read_corpus(flags, given, chars)
        except ValueError as error:  # The run could read its data.
            raise ValueError(f"{other}{error}") from error

    def check() -> None:
        if corpus.digest != digest:
            raise ValueError(f"{name_data(flags)}is not the same as on rank 0")
        kind = saved["vocabulary"]["kind"] if saved else corpus.kind
        # The ids in a token file can come from a tokenizer.json.
        if kind != corpus.kind and {kind, corpus.kind} != {"ids", "tokenizer"}:
            raise ValueError(
                f"{other}{name_data(flags)}its tokens are of kind {corpus.kind}; "
                f"the model needs {kind}"
            )
        # Version 0.3 did not hash all, and had no validation files.
        theirs = saved.get("data", digest)  # A model from --init-from has no digest.
        if theirs != digest and (
            corpus.val_tokens or theirs != chardata.digest(corpus.tokens, corpus.chars, whole=0)
        ):
            raise ValueError(
                f"{other}{name_data(flags)}is not the data or validation data that the run had "
                "(an older version joined texts without line breaks and end-of-text tokens)"
            )

    with usage_errors(advice=data_advice(flags) if other else ""):
        corpus = ddp_setup.wait_together(read, world)
        digest = ddp_setup.from_rank_zero(lambda: corpus.digest, world)
        ddp_setup.wait_together(check, world)
    tokens, val_tokens = chardata.split(corpus.tokens, flags.val_fraction, flags.eval_tokens)
    if corpus.val_tokens:
        tokens = corpus.tokens
        _, val_tokens = chardata.split(corpus.val_tokens, 1, flags.eval_tokens)
    block_size = flags.block_size
    plan = chardata.BatchPlan(tokens, block_size, flags.batch_size, flags.seed, corpus.vocab)
    val_plan = plan._replace(tokens=val_tokens, batch_size=EVAL_BATCH // block_size or 1)
    return corpus, plan, val_plan


def validate(
    model: torch.nn.Module,
    plan: chardata.BatchPlan,
    world: ddp_setup.World,
    dtype: torch.dtype,
    wrap: Callable[..., Any] = same_batches,
    stop: Callable[[], bool] = lambda: False,
) -> float | None:
    """Return the mean loss over the plan, or None if `stop` has interrupted it."""
    batches = chardata.every_window(plan, rank=world.rank, world_size=world.size)
    batches, loss_fn, stop = wrap(model, batches, gpt.loss, stop=stop)
    return loop.evaluate(model, batches, loss_fn, dtype, stop)


def make_schedule(
    values: Values, steps_per_epoch: int
) -> tuple[int, float, Callable[[int], float]]:
    """Return the number of steps, the peak learning rate, and the factor for it as a function.

    values: the flags.
    """
    limits = (values["epochs"] or 0) * steps_per_epoch, values["steps"]
    total = min(filter(None, limits), default=steps_per_epoch)
    shape: Callable[..., float] = loop.cosine if values["schedule"] == "cosine" else loop.linear
    if values["schedule"] == "constant":
        shape = partial(loop.linear, decay_steps=math.ceil(total / 5))
    # The best rate falls with the width (Yang et al., 2022) and with the number of steps (Bjorck et
    # al., 2024). The constants are measured: see tests/README.md.
    factor = 2 if values["optimizer"] == "adamw" else 5
    lr = values["lr"] or factor / (values["embd"] * total**0.25)
    # Version 0.3 had a number of steps.
    warmup = values["warmup"] if values["warmup"] >= 1 else round(values["warmup"] * total)
    return total, lr, partial(shape, total=total, warmup_steps=warmup, floor=values["min_lr"] / lr)


def model_config(values: Values) -> gpt.Config:
    """Return the values that define the model."""
    return gpt.Config(**{name: values[name] for name in gpt.Config._fields})


def build_without_weights(
    config: gpt.Config, flags: Flags, compiled: bool, state: Values
) -> gpt.GPT:
    """Return a model that has no weights yet. ValueError if those of the checkpoint do not fit."""
    model = gpt.build(config, None)
    if state:
        ckpt.check_same(state["model"], model.state_dict(), f"{state['name']}: ")
    model.checkpoint_activations = flags.checkpoint_activations
    if compiled:
        gpt.compile_(model, whole=flags.strategy == "ddp")
    return model


def make_optimizers(
    model: gpt.GPT, flags: Flags, lr: float, world: ddp_setup.World
) -> list[torch.optim.Optimizer]:
    """Return the optimizers that the flags name, with the peak learning rate `lr`."""
    groups, decay = gpt.parameter_groups(model), flags.weight_decay
    muon: list[torch.optim.Optimizer] = []
    if flags.optimizer != "adamw":
        make_muon: Callable[..., torch.optim.Optimizer] = torch.optim.Muon
        if flags.optimizer == "fast-muon":
            make_muon = partial(
                extra("muon").Muon,
                dtype=torch.float32 if flags.dtype == "float32" else torch.bfloat16,
                distribute=world.local_size == world.size,  # slower between machines
            )
        # match_rms_adamw scales Muon's updates to the size of AdamW's (Liu et al., 2025).
        matrices = groups.pop("matrices")
        muon = [make_muon(matrices, lr, decay, flags.momentum, adjust_lr_fn="match_rms_adamw")]
        lr *= flags.embedding_lr
    settings = [
        {"params": parameters, "weight_decay": 0.0 if name == "vectors" else decay}
        for name, parameters in groups.items()
    ]
    return [torch.optim.AdamW(settings, lr, (0.9, 0.95), fused=True), *muon]


def start_save_thread() -> ThreadPoolExecutor:
    """Return a pool of one thread for saves, in which torch uses one CPU."""
    # This call fixes the number of this thread, before the pool sets its own to 1: see ckpt.py.
    torch.get_num_threads()
    return ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))


def prepare_folder(out: str, storage: ModuleType, saved: Values, config: Values) -> object:
    """Lock the folder `out` and return the lock.

    Set damaged checkpoints aside, remove metrics after the saved step, and write config.json.
    """
    step, rejected = saved.get("step", 0), saved.get("rejected", {})
    metrics, old = (storage.read_text(out, name) for name in ("metrics.jsonl", "config.json"))
    # A new run must not overwrite another program's files. Ours contain "val_fraction".
    if (old or metrics) and '"val_fraction"' not in old and not step:
        raise ValueError(
            "this program did not write its metrics.jsonl or config.json; name another --out"
        )
    storage.make_folder(out)
    lock = storage.lock(out)
    # Another run may have written before this one had the lock.
    if any(e.step > step and e.name not in rejected for e in storage.list_checkpoints(out)):
        raise BlockingIOError("another run has just written to it; start again to continue it")
    for name, reason in rejected.items():
        storage.set_aside(out, name)
        warn(f"{name}: {reason}; set aside, continuing from step {step}")
    # Keep the records up to this step, but no line that a crash has cut off. A record begins with
    # its step, and has no inner braces.
    pattern = r'(?m)^{"step": (\d+), [^{}\n]*}\n'
    kept = (line[0] for line in re.finditer(pattern, metrics) if int(line[1]) <= step)
    storage.write_text(out, "metrics.jsonl", "".join(kept))
    storage.write_text(out, "config.json", json.dumps(config, indent=1))
    return lock


def warn_if_changed(corpus: chardata.Corpus) -> None:
    """Warn once if chardata.verify_unchanged raises an error."""
    try:
        chardata.verify_unchanged(corpus)
    except OSError as error:
        warn_once(f"--data: {error}; training continues")


def wait_for_save(metrics: ThreadPoolExecutor, save: Future[Any], deadline: float) -> bool:
    """Wait for a save until time.monotonic() reaches `deadline`. Return whether it has ended.

    Warn if it has not ended, or if it failed. Before, wait for the lines of metrics that are being
    written, up to OUTPUT_SECONDS: extras/remote.py uploads them with the next save.
    """
    wait([metrics.submit(bool)], OUTPUT_SECONDS)
    try:
        error = save.exception(deadline - time.monotonic())
    except TimeoutError:
        warn_once("a save takes longer than 0.7 of --timeout; until it ends, nothing else is saved")
        return False
    if error:
        warn(f"checkpoint not written: {error}; the checkpoints before it are untouched")
    return True


# ------------------------------------------------------------------------------------- the machine

# Dense bfloat16 FLOP/s of one GPU, from NVIDIA's datasheets, by a part of its name. The first entry
# that fits counts.
DATASHEET = {
    "B200": 2250e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
}


def describe_machine(world: ddp_setup.World, dtype: torch.dtype) -> Values:
    """Return what config.json says of the machine: the peak FLOP/s are those of all ranks."""
    peak, source = peak_flops(world.device, dtype)
    return {
        "ranks": world.size,
        "device": f"{world.device}",
        "torch": f"{torch.__version__}",
        "float32_precision": torch.get_float32_matmul_precision(),  # "highest" is without TF32
        "threads": torch.get_num_threads() if world.device.type == "cpu" else 0,
        "peak_flops": peak * world.size,
        "peak_flops_source": source,
    }


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Return the peak FLOP/s of the device, and "datasheet" or "measured".

    Where no datasheet value is known, it is the rate of a matrix product.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    if dtype != torch.float32 and "MIG" not in name:  # A MIG device is a part of a GPU.
        for part, peak in DATASHEET.items():
            if re.search(rf"{part}(?!\d)", name):  # An RTX A1000 is not an A100.
                return peak, "datasheet"
    n = 8192 if device.type == "cuda" else 512  # takes milliseconds, much longer than its start
    return 2 * n**3 / matmul_seconds(n, device, dtype, time.perf_counter), "measured"


def matmul_seconds(
    n: int, device: torch.device, dtype: torch.dtype, clock: Callable[[], float]
) -> float:
    """Return the time of the product of two matrices (n, n), by `clock`: the best of ten."""
    matrix = torch.ones(n, n, device=device, dtype=dtype)
    # item() waits for the device.
    times = timeit.repeat(lambda: (matrix @ matrix)[0, 0].item(), timer=clock, number=1, repeat=10)
    return min(times)


def bfloat16_is_faster(device: torch.device) -> bool:
    """Return whether the device multiplies bfloat16 matrices clearly faster than float32 ones.

    On a CPU, this is measured, because some have instructions for bfloat16 that are slower than
    those for float32.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return False
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # Other load hardly changes the CPU time of a single thread.
    bfloat16, float32 = (
        matmul_seconds(256, device, dtype, time.thread_time)
        for dtype in (torch.bfloat16, torch.float32)
    )
    torch.set_num_threads(threads)
    return 0 < 1.25 * bfloat16 <= float32  # A coarse clock gives 0.


def should_compile(asked: bool | None, device: torch.device, steps: int, flops: float) -> bool:
    """Return --compile. Without it, whether compiling is possible and saves time in this run.

    steps, flops: of the whole run.
    """
    # On an H100, it saves time after about 3,000 steps of a small model, or 350 of GPT-2.
    long = {"cpu": flops > 5e13, "cuda": steps > 4000 or flops > 1e16}.get(device.type, False)
    # Triton needs a C compiler, Inductor on a CPU a C++ compiler. Both need Python.h.
    name, usual = ("CC", "gcc") if device.type == "cuda" else ("CXX", "g++")
    compiler = shutil.which(os.environ.get(name, usual))
    header = os.path.exists(f"{sysconfig.get_path('include')}/Python.h")
    return bool(long and compiler and header) if asked is None else asked


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory for the next step, which saves up to 20 % of a step."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        # M_MMAP_THRESHOLD: blocks below 128 MiB come from the heap. Old versions of glibc refuse
        # more than 32 MiB.
        libc.mallopt(-3, 1 << 27) or libc.mallopt(-3, 1 << 25)
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: the heap does not shrink.


# ------------------------------------------------------------------------------ output and errors


left_out = Counter[bool]()  # whether it is stderr -> number of lines that it did not take


def say(text: str, error: bool = False) -> None:
    """Print a line on stdout or stderr.

    It is left out if the stream does not take it within OUTPUT_SECONDS: a full pipe, or a terminal
    that Ctrl-S has stopped. The lines after it then do not wait, until the stream takes one again.
    """
    stream: Any = sys.stderr if error else sys.stdout
    with suppress(OSError, ValueError, TypeError):  # on Windows; without a file, as in a notebook
        if not select.select([], [stream], [], 0 if left_out[error] else OUTPUT_SECONDS)[1]:
            left_out[error] += 1
            return
    if count := left_out.pop(error, 0):
        text = f"({count} lines were left out, because the output was blocked)\n{text}"
    try:
        click.echo(text, err=error)
    except OSError as reason:  # A closed pipe must not end the training.
        if not error:
            warn_once(f"output not written: {reason}")


def warn(text: str) -> None:
    """Print a warning on stderr."""
    say(f"Warning: {text}", error=True)


warn_once = cache(warn)


def read_report(report: loop.Report) -> Values:
    """Return the numbers of a report, for a record of metrics. This waits for the device."""
    return {
        "loss": float(report.loss),
        "grad_norm": float(report.grad_norm),
        "skipped": int(report.skipped),
    }


def append_metrics(storage: ModuleType, out: str, lock: Any, record: Values) -> None:
    """Append a record of numbers, and the time, to metrics.jsonl. NaN and infinity become null.

    lock: what storage.lock() returned.
    """
    record["time"] = round(time.time(), 3)
    finite = {key: value if math.isfinite(value) else None for key, value in record.items()}
    try:
        storage.check_lock(out, lock)
        storage.append_text(out, "metrics.jsonl", json.dumps(finite) + "\n")
    except OSError as error:
        warn_once(f"metrics not written: {error}; training continues")


def describe_run(
    model: torch.nn.Module, world: ddp_setup.World, settings: Values, first: int, total: int
) -> str:
    """Return the line to print before the first step. settings: the flags, without "auto"."""
    size = sum(map(torch.numel, model.parameters()))
    return (
        f"Training: {size:,} parameters on {world.size} x {world.device.type} in "
        f"{settings['dtype']} with {settings['optimizer']}{', compiled' * settings['compile']}, "
        f"steps {first} to {total}, {'continuing the run in' if first > 1 else 'in'} "
        f"{settings['out']}"
    )


def describe_changes(
    flags: Flags, saved: Values, machine: Values, steps_per_epoch: int
) -> Iterator[str]:
    """Yield the lines to print if rates or rounding are not what the user may expect.

    saved: the checkpoint, or {}. machine: what describe_machine returned.
    """
    _, lr, factor = make_schedule(vars(flags), steps_per_epoch)
    if step := saved.get("step"):
        old = vars(Flags()) | saved["config"]  # Version 0.3 had no "schedule".
        _, old_lr, old_factor = make_schedule(old, steps_per_epoch)
        last, rate = old_lr * old_factor(step - 1), lr * factor(step)
        if rate != old_lr * old_factor(step):
            yield (
                f"The learning rate was {last:.1e} in step {step}, and is {rate:.1e} in step "
                f"{step + 1}, because --steps or another flag of its schedule was changed."
            )
    threads = machine["threads"]
    if saved.get("ranks") == machine["ranks"] and 0 < threads != saved["threads"] > 0:
        yield (
            f"CPU threads of each rank: now {threads}, before {saved['threads']}. The weights may "
            "differ by rounding from those of an unbroken run."
        )


def format_record(record: Values, total: int, seconds_left: float) -> str:
    """Return the line to print for a step."""
    return (
        f"step {record['step']}/{total}  epoch {record['epoch']:.2f}  loss {record['loss']:.4f}"
        f"  lr {record['lr']:.1e}  {record['tokens_per_s']:,.0f} tokens/s"
        f"  eta {timedelta(seconds=round(min(seconds_left, 1e9)))}"
    )


# A pattern in the traceback of an error -> what helps. The last one that matches counts. Triton has
# an OutOfMemoryError that is not about the device's memory; that of torch matches by its text.
HINTS = {
    r"torch/cuda/graphs\.py": "CUDA graphs failed: leave out --use cuda-graphs",
    r"torch\._(inductor|dynamo)\.exc|/triton/(compiler|backends|runtime/build)": (
        "the compiler failed: --no-compile trains without torch.compile"
    ),
    "out of memory|allocate memory|CUBLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)|CUDA calloc"
    "|failed to map|new thread|(?<!OutOf)MemoryError": (
        "out of memory: a higher --accum or --checkpoint-activations needs less memory"
    ),
}


def describe_error(error: Exception) -> str:
    """Return a hint and an error's first paragraph, or its traceback if no hint is known."""
    trace = traceback.format_exc()
    hints = [hint for pattern, hint in HINTS.items() if re.search(pattern, trace)]
    if not hints:
        return f"{error!r}\n{trace}"
    paragraph = " ".join(map(str.strip, f"{error}".split("\n\n")[0].splitlines()))
    return f"{hints[-1]} ({type(error).__name__}: {paragraph})"


@contextmanager
def join_group(device: str, timeout: float = 600.0) -> Iterator[ddp_setup.World]:
    """Enter ddp_setup.process_group. After a mistake of the user, all ranks get the exit code 2.

    process_group takes the exit code from the UsageError.
    """
    with ddp_setup.process_group(device, timeout) as world, usage_errors():
        yield world


@contextmanager
def usage_errors(subject: str = "", advice: str = "", together: bool = False) -> Iterator[None]:
    """Raise click.UsageError for an error that needs no traceback: SUBJECT ERROR ADVICE.

    If may_pass(error), raise click.ClickException, whose exit code is 1, without ADVICE.
    together: All ranks raise the same error here, as they do with a FloatingPointError. Then, as
    after wait_together, one prints it.
    An error that wait_together has got from another rank than 0 is printed with this rank.
    To see the traceback of a ValueError, replace this function's body by `yield`.
    """
    try:
        yield
    except (ValueError, OSError, ImportError, NotImplementedError, FloatingPointError) as error:
        together = together or isinstance(error, FloatingPointError)
        rank = getattr(error, "raised_on_rank", 0 if together else None)
        where = f"rank {rank}: " if rank else ""
        usage_error: click.ClickException = click.UsageError(f"{where}{subject}{error}{advice}")
        if may_pass(error):
            usage_error = click.ClickException(f"{where}{subject}{error}")
        if rank is not None:
            setattr(usage_error, "raised_on_rank", rank)  # for ddp_setup.process_group
        raise usage_error from error


def may_pass(error: Exception) -> bool:
    """Return whether another start may not have this error, such as a lost disk or a held lock."""
    # The last one is of --use replicas: a wrong bit. A loop.Diverged would come again.
    passing = isinstance(error, (BlockingIOError, ConnectionError, ChildProcessError))
    if passing or type(error) is FloatingPointError:
        return True
    # An error of the system has a number. These stay until the user changes a path or a permission.
    names = "ENOENT EACCES EPERM EEXIST EISDIR ENOTDIR EROFS EINVAL ELOOP ENAMETOOLONG"
    lasting = [None, *(getattr(errno, name) for name in names.split())]
    return getattr(error, "errno", None) not in lasting


# ------------------------------------------------------------------------------ sample and evaluate


def read_checkpoint(out: str) -> Values:
    """Return the checkpoint that `out` means (see split_out). ValueError if there is none."""
    folder, name = split_out(out)
    state = find_checkpoint(folder, open_storage(folder), name)
    if not state:
        raise ValueError(f"{out}: there is no checkpoint; train first, or name another folder")
    for name, reason in state.pop("rejected").items():
        warn(f"{name}: {reason}; using {state['name']}")
    return state


def load_model(out: str, world: ddp_setup.World) -> tuple[gpt.GPT, Values]:
    """Return the model of a checkpoint, ready for inference, and the rest of the checkpoint.

    out: on rank 0, which checkpoint; see split_out. All ranks call this.
    """
    state, saved = read_on_rank_zero(lambda: read_checkpoint(out), world)
    config = model_config(saved["config"])
    model = ddp_setup.wait_together(
        lambda: build_without_weights(config, Flags(), False, state), world
    )
    model.to_empty(device=world.device).eval()
    ckpt.restore_({**state, "optimizers": []}, model, [])
    return model, saved


# The --out of `sample` and `eval`.
CHOSEN = click.Option(
    ["--out"],
    type=PATH,
    envvar="DDPKIT_OUT",
    default="out",
    help="Folder or URL of a run: its newest checkpoint. OUT/best, OUT/step-N: another one.",
)


@click.command(params=[CHOSEN, OPTIONS["device"]])
@click.option("--prompt", help="Text to continue; ids, if the model was trained on token files.")
@click.option("--max-new-tokens", type=COUNT, default=500, help="Number of tokens to generate.")
@click.option("--num-samples", type=COUNT, default=1, help="Number of texts, made in one batch.")
@click.option(
    "--temperature", type=NOT_NEGATIVE, default=0.8, help="0: always the most probable token."
)
@click.option("--top-k", type=FROM_ZERO, default=0, help="Only the K most probable; 0 means all.")
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    help="Only the most probable tokens whose probabilities add up to P.",
)
@click.option("--stop", default="", help="End a text before the first TEXT after the prompt.")
@click.option("--seed", type=SEED, help="To get the same texts again.  [default: a new seed]")
def sample(
    out: str,
    device: str,
    prompt: str | None,
    max_new_tokens: int,
    num_samples: int,
    stop: str,
    seed: int | None,
    **settings: Any,  # temperature, top_k and top_p
) -> None:
    """Print text that a model generates.

    The end-of-text token of a tokenizer.json ends a text.

    \b
      python run.py sample --prompt "The " --max-new-tokens 200
    """
    with join_group(device) as world:
        model, state = load_model(out, world)
        if world.rank:  # Only rank 0 generates.
            return
        kind, vocab, chars = (state["vocabulary"][key] for key in ("kind", "vocab", "chars"))
        codec = find_codec(kind)
        if prompt is None:  # chars[0] is nearly always a new line.
            prompt = {"char": chars[:1], "ids": "0"}.get(kind, "\n")
        ids = codec.encode(prompt, kind, chars).tolist()
        if not ids or max(ids) >= vocab:
            raise ValueError(f"--prompt {prompt!r} needs at least one token, and ids below {vocab}")
        seed = torch.seed() if seed is None else seed
        generated = gpt.sample(model, torch.tensor([ids] * num_samples), seed=seed, **settings)
        generated = islice(generated, max_new_tokens)
    end = codec.end_id(chars) if kind == "tokenizer" else None
    print_texts(
        ids, generated, num_samples, lambda tokens: codec.decode(tokens, kind, chars), stop, end
    )


def find_codec(kind: str) -> ModuleType:
    """Return the module that encodes and decodes text of this kind of tokens."""
    return extra("tokenizer") if kind == "tokenizer" else chardata


def print_texts(
    ids: list[int],
    generated: Iterable[torch.Tensor],
    count: int,
    decode: Callable[[Iterable[int]], Iterator[str]],
    stop: str,
    end: int | None,
) -> None:
    """Print `count` texts that begin with `ids`. generated: yields the next tokens of all texts.

    A text ends before the token `end`, and before the text `stop`. `generated` is lazy, so without
    `stop` the first text is printed while it grows.
    """
    prompt = len("".join(decode(ids)))
    for row, batches in enumerate(tee(generated, count)):
        if row:
            click.echo("-" * 20)
        tokens = takewhile(lambda token: token != end, (int(batch[row]) for batch in batches))
        pieces = decode(chain(ids, tokens))
        for piece in [cut_at(stop, prompt, pieces)] if stop else pieces:
            click.echo(piece, nl=False)
        click.echo()


def cut_at(stop: str, start: int, pieces: Iterable[str]) -> str:
    """Join the pieces of a text up to the first `stop` from index `start` on, without it."""
    text = ""
    for piece in pieces:
        text += piece
        if (end := text.find(stop, start)) >= 0:
            return text[:end]
    return text


for parameter in sample.params:
    parameter.callback = check_number  # as in the flags of training


@click.command("eval", params=[CHOSEN, OPTIONS["device"]])
@click.option(
    "--data",
    type=PATH,
    multiple=True,
    help="As in training.  [default: the validation data of the run]",
)
def evaluate(out: str, device: str, data: tuple[str, ...]) -> None:
    """Print the exact loss of a model on a text.

    This is the mean over all tokens but the first.

    \b
      python run.py eval --data other.txt
    """
    with join_group(device) as world:
        model, state = load_model(out, world)
        config = state["config"]
        config["eval_tokens"] = 0  # 0 means all; complete_flags reads config
        if data:
            config |= {"data": data, "val_data": (), "val_fraction": 1.0}
            del state["data"]  # the digest of the run's data
        flags = agree_on_flags(Flags(out=out), set(), state, world)
        corpus, _, plan = load_data(flags, set(), state, world)
        targets = chardata.num_tokens(plan.tokens) - 1
        with usage_errors(together=True):
            if targets < 1:
                raise ValueError("there is no validation data; name other or longer --data")
        loss = validate(model, plan, world, getattr(torch, flags.dtype))
        assert loss is not None  # None only after a stop
        ddp_setup.wait_together(partial(chardata.verify_unchanged, corpus), world)
    if world.rank == 0:
        size = target_bytes(plan.tokens, state["vocabulary"])
        perplexity, bits = math.inf if loss > 709 else math.exp(loss), loss / math.log(2)
        per_byte = f"{bits * targets / size:.4f} bits per byte, " if size else ""
        click.echo(  # not say(), because the command must fail if it cannot write
            f"loss {loss:.4f} nats per token, {bits:.4f} bits per token, {per_byte}"
            f"perplexity {perplexity:.4f}, over {targets:,} tokens, in {flags.dtype}"
        )


def target_bytes(tokens: chardata.Tokens, vocabulary: Values) -> int:
    """Return the number of bytes of the text of all tokens but the first, or 0 for bare ids."""
    kind, chars = vocabulary["kind"], vocabulary["chars"]
    parts = tokens[0][1:], *tokens[1:]
    return sum(find_codec(kind).num_bytes(part, kind, chars) for part in parts)


# ------------------------------------------------------------------------------------ command line


def run_rank(asked: Flags, given: set[str]) -> int:
    """Join the other ranks and train; return the exit code. All ranks use the flags of rank 0.

    asked: the flags of this process. given: the names of those that the user set.
    """
    with (
        ddp_setup.stop_signals(STOPPING) as stop,
        join_group(asked.device, asked.timeout) as world,
    ):
        # Each rank has already used its own --device and --timeout. This sends a dict, because
        # pickle does not find the class Flags under a profiler.
        values, given = ddp_setup.from_rank_zero(lambda: (vars(asked), given), world)
        asked = Flags(**values)
        arguments: Values = {}
        watch: AbstractContextManager[object] = nullcontext()
        if asked.use or asked.strategy != "ddp":
            arguments, watch = ddp_setup.wait_together(
                lambda: extra("compose").compose(asked, world), world
            )
        if asked.checkpoint == "sharded" and world.size > 1:
            ddp_setup.wait_together(lambda: extra("sharded"), world)
            storage = open_storage(asked.out, write_sharded=True)  # makes a process group
            arguments["check_folder"] = storage.check_shared_folder
        else:
            storage = ddp_setup.wait_together(lambda: open_storage(asked.out), world)
        if world.device.type == "cpu":
            keep_freed_memory()
        with watch:
            return train(asked, given, world, stop, storage, **arguments)


def launch(flags: Flags, given: set[str]) -> int:
    """Train as this rank, or start the ranks that --spawn asks for; return the exit code."""
    # Triton would log its whole program before it raises an error.
    logging.getLogger("torch._inductor.runtime.triton_heuristics").disabled = True
    # Block the stop signals until stop_signals() can take them. But they end one of several ranks,
    # which would wait in vain for a rank that they have ended.
    alone = flags.spawn is None and os.environ.get("WORLD_SIZE", "1") == "1"
    if alone and hasattr(signal, "pthread_sigmask"):  # not on Windows
        stops = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP}
        signal.pthread_sigmask(signal.SIG_BLOCK, stops)
    if flags.spawn is None or multiprocessing.parent_process():  # This process is a rank.
        return run_rank(flags, given)
    gpus = 0 if flags.device == "cpu" else torch.cuda.device_count()
    size = flags.spawn or gpus or ddp_setup.available_cpus()
    if flags.device == "cuda" and size > gpus:
        raise click.UsageError(f"--device cuda: {size} ranks need as many GPUs, here are {gpus}")
    return ddp_setup.spawn(program, size, timeout=flags.timeout)


def read_config(ctx: click.Context, _: click.Parameter, path: str | None) -> None:
    """Take the defaults of the flags from the TOML file of --config."""
    if path is None:
        return
    with usage_errors(f"--config {path}: "):
        table = tomllib.loads(Path(path).read_text())
    values = {key.replace("-", "_"): value for key, value in table.items()}
    for name, value in values.items():
        check_name(name, OPTIONS, f"--config {path}: key")
        # Text, as on the command line, so that click refuses 2.9 steps.
        several = map(str, value if isinstance(value, list) else [value])
        values[name] = [*several] if OPTIONS[name].multiple else f"{value}"
    # The commands share these flags with the training.
    shared = {name: values[name] for name in ("out", "device") if name in values}
    ctx.default_map = values | {name: shared for name in cli.commands}


def check_environment() -> None:
    """Raise UsageError if a variable that begins with DDPKIT_ names no flag."""
    known = [f"{option.envvar}" for option in OPTIONS.values()]
    for name in os.environ:
        if name.startswith("DDPKIT_"):
            check_name(name, known, "environment variable")


def check_name(name: str, known: Iterable[str], what: str) -> None:
    """Raise UsageError, with the most similar names, if `name` is not one of `known`."""
    if name not in known:
        similar = " or ".join(difflib.get_close_matches(name, known, n=2, cutoff=0))
        raise click.UsageError(f"{what} {name!r} is not a flag; did you mean {similar}?")


@click.version_option(__version__, prog_name="ddpkit")
@click.option(
    "--config",
    metavar="FILE",
    help="A TOML file of flags, with lines such as `batch-size = 64`.",
    callback=read_config,
    is_eager=True,
    expose_value=False,
)
@click.group(
    "run.py",
    commands=[sample, evaluate],
    params=[*OPTIONS.values()],
    invoke_without_command=True,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "show_default": True,
        "max_content_width": 100,
    },
)
def cli(**values: Any) -> int:
    """Train a GPT on text, on one process or on many.

    \b
      python run.py                                   a default text, in less than a minute
      python run.py --data mine.txt --spawn           one process per GPU, or per CPU core
      torchrun --nproc-per-node 4 run.py --epochs 3   four processes, started by torchrun

    Started again with the same --out, a run continues where it stopped. Every flag can also be an
    environment variable (DDPKIT_BATCH_SIZE), or a line in a --config file. The command line wins.
    """
    ctx = click.get_current_context()
    source = click.core.ParameterSource
    check_environment()
    if command := ctx.invoked_subcommand:
        if source.COMMANDLINE in map(ctx.get_parameter_source, values):
            raise click.UsageError(f"give flags after the command: {command} has flags of its own")
        return DONE
    flags = Flags(**values)
    # "auto" is as if the flag were not given: a resumed run keeps what it had.
    given = {
        name
        for name in values
        if ctx.get_parameter_source(name) is not source.DEFAULT and values[name] != "auto"
    }
    return launch(flags, given)


def add_commands() -> None:
    """Add the commands of extras/commands.py, if that file is there."""
    with suppress(FileNotFoundError):
        for command in extra("commands").COMMANDS:
            cli.add_command(command)


def main(args: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of this process, and return its exit code.

    Expected errors become one line. With --spawn, the ranks run the command line of this process.
    """
    try:
        with usage_errors():
            if os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1" and "RANK" not in os.environ:
                extra("slurm").set_launch_env_(os.environ)
            add_commands()
            return cli.main(args, prog_name="run.py", standalone_mode=False) or DONE
    except SystemExit as error:  # process_group raises it if another rank reports the error
        return error.code if isinstance(error.code, int) else FAILED
    except click.ClickException as error:
        lines = map(str.strip, error.format_message().splitlines())
        say("Error: " + " ".join(lines), error=True)
        return error.exit_code
    except Exception as error:
        text = describe_error(error)
        say(f"Error on rank {os.environ.get('RANK', '0')}: {text}", error=True)
        return FAILED


def program() -> None:
    """Run the command line of this process, and end the process."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")  # Python sets a closed stream to None.
        stream.reconfigure(errors="replace")  # for characters that a terminal does not have
        setattr(sys, name, stream)
    warnings.showwarning = lambda message, *_: warn(f"{message}")
    if "OMP_WAIT_POLICY" not in os.environ:
        # By default, idle OpenMP threads wait so long in a busy loop that training is up to seven
        # times slower if another program uses a core.
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    # When a rank is lost, torch's C++ code would log pages before our one line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    gc.disable()  # saves half a second in the imports; train enables it
    faulthandler.enable()  # prints the traceback of a fatal signal
    with suppress(ImportError, ValueError, OSError):  # Windows has no `resource`.
        import resource

        # A mapped file counts as open. The usual soft limit is 1,024, the hard one much higher.
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # In an import of torch, KeyboardInterrupt can get lost or leave torch incomplete. train and
    # spawn replace this handler.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    code = main()
    # os._exit ends the process even if a save hangs, but it skips atexit and the flush.
    atexit._run_exitfuncs()
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    program()
