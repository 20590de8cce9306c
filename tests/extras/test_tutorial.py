"""Each step of extras/tutorial gives the weights of the single-process script, and the last one
stops and continues."""

import difflib
import re
from functools import cache

import pytest
import torch
from conftest import ROOT
from documents import code_blocks
from scripts import MODULES, STOP, TUTORIAL, Outcome, assert_close, copy, run, start

import ckpt

SCRIPTS = sorted(TUTORIAL.glob("[0-9]_*.py"))


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """outcome(number, ranks) runs a script where it is, once. Number -1 is script 0 with the rows in
    the order in which the scripts from 2 on train on them."""

    @cache
    def run_once(number: int, ranks: int) -> Outcome:
        folder = tmp_path_factory.mktemp("tutorial")
        if number >= 0:
            return run(SCRIPTS[number], folder, ranks)
        order = "shuffle=True", "sampler=chardata.rank_indices(len(train), 0, 1, epoch, 0)"
        ordered = copy(SCRIPTS[0], folder, "import chardata\n", order)
        return run(ordered, folder, env={"PYTHONPATH": f"{ROOT}"})

    return run_once


def test_readme_shows_what_changes_from_the_first_script_to_the_third():
    """Without their docstrings and search paths."""
    (shown,) = code_blocks((ROOT / "README.md").read_text(), "diff")
    first, third = (
        re.sub(
            r"^(import os\nimport sys\n\n|# The modules .*\nsys\.path.*\n)",
            "",
            SCRIPTS[number].read_text().split('"""\n\n', 1)[1],
            flags=re.MULTILINE,
        )
        for number in (0, 2)
    )
    changes = difflib.unified_diff(first.splitlines(True), third.splitlines(True), n=99)
    assert shown.splitlines() == "".join(changes).splitlines()[3:]


def test_each_script_imports_one_module_more_than_the_one_before():
    assert [script.name[0] for script in SCRIPTS] == list("01234")
    for number, script in enumerate(SCRIPTS):
        imported = re.findall(r"^import (\w+)$", script.read_text(), re.MULTILINE)
        assert {*MODULES} & {*imported} == {*MODULES[:number]}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_each_script_gives_the_weights_and_output_of_the_single_process(outcome, number, ranks):
    single, distributed = outcome(0 if number == 1 else -1, 1), outcome(number, ranks)
    if (number, ranks) == (2, 2):  # this script prints the loss of rank 0's rows only
        single, distributed = (
            ran._replace(lines=[re.sub(r"loss [0-9.]*", "", line) for line in ran.lines])
            for ran in (single, distributed)
        )
    assert_close(distributed, single)
    assert len(distributed.lines) == 3  # only rank 0 prints


# 40 is in the middle of the second epoch, 54 is its last step, and 81 is the last step of all. With
# 2,497 rows, the last step of an epoch has only one row, so one of two ranks has none.
@pytest.mark.parametrize("step, rows", [(40, 2500), (54, 2500), (26, 2497)])
def test_the_last_script_stopped_on_one_process_continues_on_two(outcome, tmp_path, step, rows):
    shorter = "[:2500]", f"[:{rows}]"
    unbroken = outcome(4, 1) if rows == 2500 else run(SCRIPTS[4], tmp_path / "u", replace=shorter)
    stopped = run(SCRIPTS[4], tmp_path, stop=step, replace=shorter)
    resumed = run(SCRIPTS[4], tmp_path, 2, replace=shorter)
    first = resumed.lines.pop(0)
    assert first == f"continuing after step {step}; to start again, delete out-tutorial"
    assert_close(resumed._replace(lines=stopped.lines + resumed.lines), unbroken)


def test_a_signal_in_the_last_step_is_no_stop(outcome, tmp_path):
    script = copy(SCRIPTS[4], tmp_path, STOP.format(step=80, last_rank=0))
    done = start(script, tmp_path, 1)
    assert (done.returncode, done.stdout.splitlines()) == (0, outcome(4, 1).lines)


RESUMING = [path for path in sorted(TUTORIAL.glob("*.py")) if "ckpt.newest" in path.read_text()]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("script", RESUMING, ids=lambda path: path.name)
def test_a_checkpoint_that_cannot_be_read_stays_and_no_older_one_is_used(tmp_path, script, ranks):
    """It may be good."""
    (name,) = {*re.findall('ckpt.newest\\("(.*?)"', script.read_text())}
    old, new = (ckpt.save(tmp_path / name, {"model": {"w": torch.ones(1)}}, n) for n in (1, 2))
    (tmp_path / name / new.name).unlink()
    (tmp_path / name / new.name).symlink_to("/proc/self/mem")  # its first bytes give EIO
    done = start(script, tmp_path, ranks)
    assert done.returncode == 1 and "[Errno 5] Input/output error" in done.stderr, done
    assert sorted(path.name for path in (tmp_path / name).iterdir()) == [old.name, new.name]


SLOW_SAVE = """
import atexit, glob, time
import ckpt
def slow(*args, save=ckpt.save, **more):
    time.sleep(5)
    return save(*args, **more)
ckpt.save = slow
# One write for each line, because two ranks write to the same pipe.
end = "end, saved: {}\\n"
atexit.register(lambda: print(end.format(bool(glob.glob("out-*/step-*.pt"))), end=""))
"""


def test_after_a_stop_all_ranks_wait_until_rank_0_has_saved(tmp_path):
    """Otherwise the launcher could end rank 0 in the middle of the save."""
    stop = STOP.format(step=9, last_rank=1)
    done = start(copy(SCRIPTS[4], tmp_path, SLOW_SAVE + stop), tmp_path, 2)
    lines = ["end, saved: True", "end, saved: True", "stopped after step 10"]
    assert sorted(done.stdout.splitlines()) == lines, done.stderr
