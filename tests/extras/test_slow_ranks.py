"""Tests of extras/slow_ranks.py: a rank that computes slowly is named, and no other rank is.

The ranks compare times that the test chooses. So no test depends on the speed of the machine, except
for the one that slows a rank of the real program down.
"""

import re
import sys

import pytest
import torch
from conftest import ROOT, TINY, run

import ddp_setup
from extras import slow_ranks

CASES = {  # (rank, step) -> seconds of each forward pass
    "equal": lambda rank, step: 1.0,
    "slightly slower": lambda rank, step: 1.9 if rank == 1 else 1.0,
    "slow from 10": lambda rank, step: 3.0 if rank == 1 and step >= 10 else 1.0,
    "more rows": lambda rank, step: 10.0 if rank == 1 else 1.0,
    "two comparisons": lambda rank, step: 3.0 if rank == 1 and 10 <= step < 20 else 1.0,
    "single steps": lambda rank, step: 50.0 if rank == 1 and step % 5 == 0 else 1.0,
    "all": lambda rank, step: 5.0 if step >= 10 else 1.0,
}


def compare(folder):
    """Iterate over 40 steps for each case; write the reported lines with their steps."""
    with ddp_setup.process_group("cpu", timeout=60) as world:
        found = {}
        for name, seconds in CASES.items():
            times, lines, step = [], [], 0
            report = lambda line: lines.append((line, step))  # noqa: E731
            for step in slow_ranks.compare_ranks(range(40), times, report, 5, 3, 2.0):
                elements = 3 if name == "more rows" and world.rank == 1 else 2
                times += [(0.0, seconds(world.rank, step), elements)] * 2
            found[name] = lines
        steps, timed_loss = slow_ranks.watch(range(3), lambda model, batch: batch["x"], print)
        found["watch"] = [timed_loss(None, {"x": step}) for step in steps]
        torch.save(found, f"{folder}/{world.rank}.pt")


@pytest.mark.parametrize("size", [2, 3])
def test_rank_0_names_a_slow_rank_once_and_no_rank_without_reason(tmp_path, size):
    assert ddp_setup.spawn(compare, size, tmp_path) == 0
    first, *others = (torch.load(tmp_path / f"{rank}.pt") for rank in range(size))
    nothing = {name: [] for name in CASES} | {"watch": [0, 1, 2]}
    [(line, step)] = first["slow from 10"]
    assert "rank 1 takes 3.0 times as long" in line and "the last 15 steps" in line
    # Slow in steps 10 to 24; the all-reduce after step 24 is read after step 29.
    assert step == 29 and {**first, "slow from 10": []} == nothing
    assert others == [nothing] * (size - 1)


def test_without_a_group_nothing_is_added():
    steps, same_loss = slow_ranks.watch(iter([1, 2]), max, print)
    assert [*steps] == [1, 2] and same_loss is max


def test_the_program_warns_of_a_slow_rank(text, tmp_path):
    flags = "--steps 130 --epochs 50 --eval-every 1000 --save-every 1000 --use slow-ranks".split()
    ran = run(
        *[*TINY, *flags, "--data", text, "--out", tmp_path, "--spawn", 2],
        launcher=[sys.executable, f"{ROOT}/tests/faults/sabotaged.py"],
        env={"TEST_FAULT": "forward slow 1 1+"},
    )
    warnings = [line for line in ran.err.splitlines() if "times as long" in line]
    assert ran.code == 0 and len(warnings) == 1, ran
    assert re.match(r"Warning: rank 1 takes \d+\.\d times as long as", warnings[0])
