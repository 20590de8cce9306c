"""Tests of extras/verify.py and of the command verify."""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import TINY, Ran, checkpoints, run, torchrun

import ckpt
from extras import verify

RUN = [*TINY, "--steps", 30, "--log-every", 1, "--save-every", 10, "--dropout", 0.1]


def files(out: Path) -> dict[Path, tuple[bytes, int]]:
    """Return content and time of each file in a folder."""
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.iterdir()}


def equal(ran: Ran, steps: str) -> bool:
    return (ran.code, ran.err) == (0, "") and f"\nsteps {steps}: bitwise equal, all " in ran.out


def test_a_run_is_reproduced_without_a_change_in_its_folder_while_it_is_in_use(undisturbed):
    out = undisturbed(1)
    lock = ckpt.lock(f"{out}")
    before = files(out)
    ran = run("verify", out)
    assert lock and equal(ran, "80 to 100") and ran.out.count("\n") == 2, ran
    assert equal(run("verify", out, "--from", 40, "--to", 80), "40 to 80")
    assert files(out) == before


@pytest.mark.parametrize("how", ["--spawn", "torchrun"])
def test_two_ranks_are_reproduced_by_two_ranks(undisturbed, how):
    out = undisturbed(2)
    if how == "torchrun":
        ran = run("verify", out, launcher=torchrun(2))
    else:
        ran = run("verify", out, "--spawn", 2)
    assert ran.code == 0 and "steps 80 to 100: bitwise equal" in ran.out, ran


def test_another_number_of_ranks_rounds_differently_and_is_named(undisturbed):
    ran = run("verify", undisturbed(2))
    assert ran.code == 1 and "tensors differ; most " in ran.out, ran
    assert "\nchanged: ranks 2, now 1" in ran.out, ran


def test_one_changed_weight_is_found(undisturbed, tmp_path):
    out = shutil.copytree(undisturbed(1), tmp_path / "out")
    state = torch.load(checkpoints(out)[-1], weights_only=True)
    weight = state["model"]["blocks.0.up.weight"]
    weight[3, 2] = weight[3, 2].nextafter(torch.tensor(1.0))
    ckpt.save(f"{out}", state, 100)
    ran = run("verify", out)
    assert ran.code == 1 and ": 1 of " in ran.out, ran
    assert "tensors differ; most model blocks.0.up.weight, by " in ran.out, ran
    assert "\nunchanged: ranks, " in ran.out, ran


def test_a_sharded_run_in_parts_whose_flags_changed_is_reproduced(text, tmp_path):
    """The steps after a change have the flags that the last checkpoint has, also for the rate."""
    flags = [*RUN, "--data", text, "--out", tmp_path, *"--spawn 2 --strategy fsdp".split()]
    flags += ["--checkpoint", "sharded", "--accum", 2]
    assert run(*flags, "--steps", 10).code == 0
    assert run(*flags, "--lr", 0.001).code == 0
    assert len([*tmp_path.glob("step-*")]) == 3
    ran = run("verify", tmp_path, "--from", 10, "--spawn", 2)
    assert equal(ran, "10 to 30"), ran


@pytest.mark.parametrize("flags", [(), ("--from", 10), ("--from", 20, "--to", 10)])
def test_without_two_checkpoints_there_is_one_line(text, tmp_path, flags):
    run(*RUN, "--data", text, "--steps", 10, "--out", tmp_path)
    ran = run("verify", tmp_path, *flags)
    assert ran.code == 2 and ran.err.count("\n") == 1 and "kept are: 10" in ran.err, ran


def test_data_that_moved_or_changed_is_one_line_that_names_the_folder_of_the_run(text, tmp_path):
    data, out = tmp_path / "a.txt", tmp_path / "out"
    data.write_text(text.read_text())
    assert run(*RUN, "--data", data, "--out", out).code == 0
    data.write_text(text.read_text()[::-1])
    ran = run("verify", out)
    assert ran.code == 2 and ran.err.count("\n") == 1, ran
    assert f"{out} " in ran.err and "data" in ran.err and "verify-" not in ran.err, ran
    assert equal(run("verify", out, "--data", text), "20 to 30")


def test_all_differences_are_found_and_measured():
    one, zero = torch.tensor([3.0, 4.0]), torch.zeros(2)
    theirs = {"a": one, "b": zero, "c": one, "d": one}
    ours = {"a": one.clone(), "b": -zero, "c": torch.tensor([3.0, 3.0]), "e": one}
    assert verify.compare(theirs, ours) == {"b": 0, "c": 0.2, "d": torch.inf, "e": torch.inf}
