"""Tests of extras/slow_ranks.py: a rank that computes slowly is named, and no other rank is.

The ranks report times that the test chooses, through a clock that it controls. So no test depends
on the speed of the machine, except for the one that slows a rank of the real program down.
"""

import re
import sys

import call
import pytest
import torch
from conftest import ROOT, TINY, run

import ddp_setup
from extras import slow_ranks

SABOTAGED = [sys.executable, f"{ROOT}/tests/faults/sabotaged.py"]


def compare(folder, seconds_at):
    """Iterate over 40 steps of two micro-batches; write the reported lines with their steps.

    seconds_at: name of a function below: (rank, step) -> seconds of each forward pass.
    """
    with ddp_setup.process_group(timeout=60) as world, pytest.MonkeyPatch.context() as patch:
        clock, lines = [0.0], []
        patch.setattr(slow_ranks, "now", lambda cuda: clock[0])

        def loss_fn(model, batch):
            clock[0] += globals()[seconds_at](world.rank, batch["step"])
            return batch["step"]

        watched, timed_loss = slow_ranks.watch(
            iter(range(40)), loss_fn, lambda line: lines.append(line), every=5, in_a_row=3
        )
        seen = []
        for step in watched:
            clock[0] += 100  # the time between the forward passes does not count
            more_rows = seconds_at == "slow_with_more_rows" and world.rank == 1
            batch = {"step": step, "rows": torch.ones(2 + more_rows)}
            seen.append(timed_loss(None, batch))
            timed_loss(None, batch)
            lines.extend([step] * bool(lines and isinstance(lines[-1], str)))
        assert seen == [*range(40)], "a step or a result of the loss is missing"
        torch.save(lines, f"{folder}/{world.rank}.pt")


def equal(rank, step):
    return 1.0


def slightly_slower(rank, step):
    return 1.9 if rank == 1 else 1.0


def slow_from_10(rank, step):
    return 3.0 if rank == 1 and step >= 10 else 1.0


def slow_with_more_rows(rank, step):
    return 10.0 if rank == 1 else 1.0


def slow_for_two_comparisons(rank, step):
    return 3.0 if rank == 1 and 10 <= step < 20 else 1.0


def slow_in_single_steps(rank, step):
    return 50.0 if rank == 1 and step % 5 == 0 else 1.0


def all_slow_from_10(rank, step):
    return 5.0 if step >= 10 else 1.0


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "case",
    [
        equal,
        slightly_slower,
        slow_with_more_rows,
        slow_for_two_comparisons,
        slow_in_single_steps,
        all_slow_from_10,
    ],
)
def test_no_rank_is_named_without_reason(tmp_path, size, case):
    assert call.spawn(compare, size, f"{tmp_path}", case.__name__) == 0
    assert [torch.load(tmp_path / f"{rank}.pt") for rank in range(size)] == [[]] * size


@pytest.mark.parametrize("size", [2, 3])
def test_rank_0_names_a_slow_rank_once(tmp_path, size):
    assert call.spawn(compare, size, f"{tmp_path}", "slow_from_10") == 0
    (line, step), *others = (torch.load(tmp_path / f"{rank}.pt") for rank in range(size))
    assert "rank 1 takes 3.0 times as long" in line and "the last 15 steps" in line
    # Slow in steps 10 to 24; the all-reduce after step 24 is read after step 29.
    assert step == 30 and others == [[]] * (size - 1)


def test_without_a_group_nothing_is_added():
    def loss_fn(model, batch):
        return batch

    steps, same_loss = slow_ranks.watch(iter([1, 2]), loss_fn, print)
    assert [*steps] == [1, 2] and same_loss is loss_fn


@pytest.mark.parametrize("rank", [0, 1])
def test_the_program_warns_of_a_slow_rank(text, tmp_path, rank):
    flags = "--steps 130 --epochs 50 --eval-every 1000 --save-every 1000".split()
    ran = run(
        *[*TINY, *flags, "--data", text, "--out", tmp_path, "--spawn", 2],
        launcher=SABOTAGED,
        env={"TEST_FAULT": f"forward slow {rank} 1+"},
    )
    warnings = [line for line in ran.err.splitlines() if "times as long" in line]
    assert ran.code == 0 and len(warnings) == 1, ran
    assert re.match(rf"Warning: rank {rank} takes \d+\.\d times as long as", warnings[0])
