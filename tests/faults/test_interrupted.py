"""Promises 3, 5, 6 and 7: processes of a run are killed, stopped, or asked to stop, and the run is started again."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import (
    PYTHON,
    ROOT,
    TINY,
    Program,
    Ran,
    checkpoints,
    losses,
    run,
    same_training,
    signalled,
    state,
    torchrun,
    wait_for,
)

SPAWN, TORCHRUN = (["--spawn", 2], PYTHON), ([], torchrun(2))
TIMEOUT = 15  # seconds: --timeout of the run in which a rank hangs
# An epoch has 38 steps, so a run with these flags lasts until a signal ends it.
ENDLESS = ["--steps", 10**6, "--epochs", 10**6, "--log-every", 1]


# Each of these sends a signal to some processes of a program.


def parent(program: Program, number: int) -> None:
    program.process.send_signal(number)


def process_group(program: Program, number: int) -> None:
    """Send it to all processes, as a terminal does for Ctrl-C."""
    os.killpg(program.process.pid, number)


def child(program: Program, number: int) -> None:
    """Send it to rank 1 of --spawn."""
    os.kill(program.children()[1], number)


def worker(program: Program, number: int) -> None:
    """Send it to rank 1 of torchrun."""
    os.kill(program.family("\0RANK=1\0")[0], number)


# Each of these waits for the moment of the signal.


def in_training(program: Program) -> None:
    program.read_to("step 5/")


def while_starting(program: Program) -> None:
    wait_for(lambda: len(program.children()) == 2, "the children to start")


def interrupted(
    text: Path, out: Path, launch: tuple, when: Callable, number: int, send: Callable
) -> Ran:
    """Start a run, send it a signal, and return what it printed. The test fails if a process is left."""
    (more, launcher), flags = launch, [*TINY, "--data", text, *ENDLESS]
    with Program(*flags, *more, "--out", out, launcher=launcher, seconds=200) as program:
        when(program)
        send(program, number)
        return program.finish()


ASKED = {  # test_survival.py has the signals to plain python
    "SIGINT to all processes": (SPAWN, in_training, signal.SIGINT, process_group),
    "SIGUSR1 to a child": (SPAWN, in_training, signal.SIGUSR1, child),
    "SIGUSR1 to a worker": (TORCHRUN, in_training, signal.SIGUSR1, worker),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_run_that_is_asked_to_stop_saves_the_last_step_and_says_so(text, tmp_path, name):
    ran = interrupted(text, tmp_path, *ASKED[name])
    last = losses(tmp_path)[-1][0]
    assert state(tmp_path)["step"] == last >= 5
    assert re.match(f"Stopped as asked,? after step {last} of ", ran.out.splitlines()[-1]), ran
    if "worker" in name:  # torchrun has an exit code and a report of its own
        assert ran.code != 0 and f'File "{ROOT}/run.py' not in ran.err, ran
    else:
        assert ran.code == 3 and ran.err == "", ran


def test_a_stop_signal_before_the_ranks_have_joined_ends_them(text, tmp_path):
    """One of them could not stop, while it waits for another one that the signal has ended."""
    ran = interrupted(text, tmp_path / "out", SPAWN, while_starting, signal.SIGTERM, parent)
    assert ran == Ran(128 + signal.SIGTERM, "", "") and not (tmp_path / "out").exists(), ran


def test_a_killed_rank_is_named_and_the_other_ranks_end(text, tmp_path):
    ran = interrupted(text, tmp_path, SPAWN, in_training, signal.SIGKILL, child)
    assert (ran.code, ran.err) == (1, "Error: rank 1 was killed by SIGKILL\n"), ran


def test_a_killed_spawn_parent_leaves_no_child(text, tmp_path):
    """Program.finish() checks this."""
    ran = interrupted(text, tmp_path, SPAWN, in_training, signal.SIGKILL, parent)
    assert (ran.code, ran.err) == (-signal.SIGKILL, ""), ran


def test_a_rank_that_hangs_ends_the_run_after_the_timeout(text, tmp_path):
    launch = [*SPAWN[0], "--timeout", TIMEOUT], PYTHON
    ran = interrupted(text, tmp_path, launch, in_training, signal.SIGSTOP, child)
    assert ran.code == 1 and ran.err.count("\n") == 1, ran
    assert f"rank 0: waited {TIMEOUT} s in vain" in ran.err, ran


def test_torchrun_restarts_a_killed_worker_and_the_weights_are_bitwise_equal(
    undisturbed, flags, tmp_path
):
    # It is killed in step 61 of the first start. The second one continues from step 60, and ends before its 61st step.
    how = signalled(torchrun(2, "--max-restarts", "1"), "1 60 main 50 9 self", tmp_path / "place")
    ran = run(*flags, "--save-every", 10, "--out", tmp_path / "out", **how)
    assert ran.code == 0 and ran.out.count("step 1/100 ") == 1, ran
    assert (tmp_path / "place").read_text().startswith("60 main"), ran
    assert [step for step, _ in losses(tmp_path / "out")] == list(range(1, 101))
    assert same_training(tmp_path / "out", undisturbed(2))


SAVE_THAT_HANGS = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
import ckpt, run

save = ckpt.save

def hang(folder, state, step, *more):
    if step > 5:
        time.sleep(1000)
    return save(folder, state, step, *more)

ckpt.save = hang
run.program()
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_that_never_returns_does_not_hold_the_run(text, tmp_path, ranks):
    program, out = tmp_path / "program.py", tmp_path / "out"
    program.write_text(SAVE_THAT_HANGS)
    launcher = [sys.executable, str(program)] if ranks == 1 else [*torchrun(2)[:-1], str(program)]
    flags = ["--steps", 30, "--save-every", 5, "--log-every", 1, "--timeout", 4]
    ran = run(*TINY, "--data", text, *flags, "--out", out, launcher=launcher)
    assert ran.code == 1 and "Traceback" not in ran.out, ran
    assert ran.err.count("Warning: a save takes longer than 0.7 of --timeout; until it ends") == 1
    assert [step for step, _ in losses(out)] == list(range(1, 31))  # the training itself ended
    assert state(out)["step"] == 5 and len(checkpoints(out)) == 1


def test_a_second_ctrl_c_ends_the_program_during_a_step(tmp_path):
    data, out = tmp_path / "data.txt", tmp_path / "out"
    data.write_bytes(bytes(4_000_000))
    # one step of 100,000 sequences in 20,000 micro-batches takes far longer than this test
    long = ["--tokenizer", "byte", "--batch-size", 100_000, "--accum", 20_000]
    with Program(*TINY, *long, "--data", data, "--out", out) as program:
        program.read_to("Training: ")
        while program.process.poll() is None:
            program.process.send_signal(signal.SIGINT)  # repeated, because two at once count as one
            time.sleep(0.1)
        ran = program.finish()
    assert ran.code == 130 and ran.err == "", ran
    assert checkpoints(out) == []
