"""Train a part of a run again, from one kept checkpoint to another one, and compare the results.

    code = verify("out", first=100, last=200, device="auto", data=None)

The command `verify` of run.py calls this. Needs run.py and the modules of the core. It reads the
folder of the run, takes no lock, and writes only to a temporary folder (TMPDIR).
"""

import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import fields
from itertools import count
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor

import ckpt
import ddp_setup
import run

Values = dict[str, Any]
# What can change the last bits of a result, in config.json or in a checkpoint.
FACTS = ("ranks", "threads", "torch", "device", "strategy", "accum")


class Part(NamedTuple):
    """The part of a run to train again."""

    start: int  # step of the first checkpoint
    end: int  # step of the last one
    flags: Values  # of the run
    given: set[str]  # names of the flags that must not come from the first checkpoint


def verify(out: str, first: int | None, last: int | None, device: str, data: Any) -> int:
    """Print whether the steps from `first` to `last` give the same result again: see choose.

    data: as in Flags, if the data has moved.
    All ranks call this. Return 0 if all tensors are bitwise equal, 1 if not, 3 after a stop signal.
    """
    with (
        ddp_setup.stop_signals() as asked,
        run.join_group(device) as world,
        tempfile.TemporaryDirectory(prefix="verify-") as own,
    ):
        rank0 = world.rank == 0
        folder = ddp_setup.from_rank_zero(lambda: own, world)
        # Rank 0 keeps the last checkpoint now, because a run can delete it during the training.
        state, config = ddp_setup.wait_together(
            lambda: copy_first(out, first, last, folder) if rank0 else ({}, {}), world
        )
        part = ddp_setup.from_rank_zero(lambda: plan_part(state, config, folder), world)
        more: Values = {"out": folder, "device": device}
        if data:
            more["data"] = data
        flags = run.Flags(**part.flags | more)
        if rank0:
            run.say(
                f"training steps {part.start + 1} to {part.end} again, "
                f"on {world.size} x {world.device.type}"
            )
        calls = count(1)
        arguments: Values = {}
        if flags.strategy != "ddp":
            arguments, _ = run.extra("compose").compose(flags, world)
        if world.device.type == "cpu":
            run.keep_freed_memory()
        try:
            with open(os.devnull, "w") as null, redirect_stdout(null):
                # The stop that this asks for is one step late on CUDA. save_every has already
                # saved the right step then.
                run.train(
                    flags,
                    part.given | more.keys(),
                    world,
                    lambda: asked() or next(calls) >= part.end - part.start,
                    ckpt,
                    **arguments,
                )
        except click.UsageError as error:
            # Name the folder that the user knows.
            setattr(error, "message", error.message.replace(folder, out))
            raise
        return ddp_setup.from_rank_zero(lambda: judge(part, folder, state, config), world)


def choose(entries: Sequence[ckpt.Entry], first: int | None, last: int | None) -> list[ckpt.Entry]:
    """Return the checkpoints of two steps: by default the newest, and the one before.

    ValueError if there are no such checkpoints.
    """
    kept = {entry.step: entry for entry in entries}
    end = max(kept, default=0) if last is None else last
    start = max((s for s in kept if s < end), default=0) if first is None else first
    if not {start, end} <= kept.keys() or start >= end:
        have = ", ".join(map(str, kept)) or "none"
        raise ValueError(
            f"verify needs checkpoints of two steps, and not of {start} and {end}; kept are: {have}"
        )
    return [kept[start], kept[end]]


def copy_first(out: str, first: int | None, last: int | None, folder: str) -> tuple[Values, Values]:
    """Copy the first checkpoint into `folder`. Return the last one, and what config.json says.

    ValueError if a checkpoint is damaged, or if run.py did not write it.
    """
    storage = run.open_storage(out)
    start, end = choose(storage.list_checkpoints(out), first, last)
    state: Values = storage.load(out, end)
    if not {"config", "vocabulary", "step"} <= state.keys():
        raise ValueError(f"{end.name} was not written by run.py")
    ckpt.save(folder, storage.load(out, start), start.step)
    return state, read_json(storage.read_text(out, "config.json"))


def read_json(text: str) -> Values:
    """Return what config.json says, or {} if it is missing or damaged."""
    with suppress(ValueError, TypeError):
        return dict(json.loads(text))
    return {}


def plan_part(state: Values, config: Values, folder: str) -> Part:
    """Return the part to train again, with the flags with which the run came to its last step."""
    (start,) = ckpt.list_checkpoints(folder)
    names = {field.name for field in fields(run.Flags)}
    saved = {name: value for name, value in state["config"].items() if name in names}
    # These are not in a checkpoint, but in config.json.
    grouping = ("strategy", "accum", "checkpoint_activations")
    flags = {name: config[name] for name in grouping if name in config} | saved
    end = state["step"]
    flags |= {"save_every": end, "eval_every": sys.maxsize, "log_every": sys.maxsize, "keep": 9}
    # The flags of PINNED cannot have changed since the first checkpoint.
    return Part(start.step, end, flags, flags.keys() - run.PINNED)


def judge(part: Part, folder: str, state: Values, config: Values) -> int:
    """Print how the new checkpoint differs from that of the run, and return the exit code."""
    found = [entry for entry in ckpt.list_checkpoints(folder) if entry.step == part.end]
    if not found:
        run.say(f"stopped before step {part.end}: nothing was compared", error=True)
        return run.STOPPED
    new = ckpt.load(folder, found[0])
    theirs, ours = (
        {key: value for part in ("model", "optimizers") for key, value in tensors(s[part], part)}
        for s in (state, new)
    )
    differences = compare(theirs, ours)
    steps = f"steps {part.start} to {part.end}"
    if not differences:
        run.say(f"{steps}: bitwise equal, all {len(theirs)} tensors")
        return run.DONE
    name = max(differences, key=lambda name: differences[name])
    run.say(
        f"{steps}: {len(differences)} of {len(theirs)} tensors differ; most {name}, "
        f"by {differences[name]:.1e} of its norm"
    )
    then = {**config, **state}
    now = {**read_json(ckpt.read_text(folder, "config.json")), **new}
    changed = [
        f"{fact} {then[fact]}, now {now[fact]}"
        for fact in FACTS
        if fact in then.keys() & now.keys() and then[fact] != now[fact]
    ]
    known = ", ".join(fact for fact in FACTS if fact in then.keys() & now.keys())
    run.say(f"changed: {'; '.join(changed)}" if changed else f"unchanged: {known}")
    return run.FAILED


def tensors(tree: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for the tensors in nested dicts and lists."""
    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, (dict, list)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from tensors(value, f"{name} {key}")


def compare(theirs: dict[str, Tensor], ours: dict[str, Tensor]) -> dict[str, float]:
    """Return {name: norm of the difference / norm of theirs} for all that is not bitwise equal."""
    differences = {}
    for name in theirs | ours:
        a, b = theirs.get(name), ours.get(name)
        if a is None or b is None or (a.shape, a.dtype) != (b.shape, b.dtype):
            differences[name] = math.inf
        elif not torch.equal(*(t.contiguous().flatten().view(torch.uint8) for t in (a, b))):
            distance = float((a.double() - b.double()).norm())
            differences[name] = distance / (float(a.double().norm()) or 1.0)
    return differences
