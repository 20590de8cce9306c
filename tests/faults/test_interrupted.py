"""Promises 3, 5, 6 and 7: run.py is asked to stop, is killed, and is started again."""

import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from conftest import (
    PYTHON,
    ROOT,
    TINY,
    Program,
    Ran,
    ahead,
    checkpoints,
    losses,
    random_place,
    run,
    same_training,
    signalled,
    state,
    torchrun,
    wait_for,
)

SPAWN, TORCHRUN = (["--spawn", 2], PYTHON), ([], torchrun(2))
TIMEOUT = 15  # seconds: --timeout of the run in which a rank hangs


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
    program.read_to("step 20/")


def while_starting(program: Program) -> None:
    wait_for(lambda: len(program.children()) == 2, "the children to start")


ASKED = {  # the launcher, the moment, the signal, who gets it; test_run.py has SIGTERM to one process
    "SIGINT": (([], PYTHON), in_training, signal.SIGINT, parent),
    "SIGUSR1": (([], PYTHON), in_training, signal.SIGUSR1, parent),
    "SIGINT to all processes": (SPAWN, in_training, signal.SIGINT, process_group),
    "SIGUSR1 to a child": (SPAWN, in_training, signal.SIGUSR1, child),
    "SIGUSR1 to a worker": (TORCHRUN, in_training, signal.SIGUSR1, worker),
    "SIGTERM to the parent at the start": (SPAWN, while_starting, signal.SIGTERM, parent),
}
HANG = ([*SPAWN[0], "--timeout", TIMEOUT], PYTHON), in_training, signal.SIGSTOP, child
Interrupted = Callable[[str], tuple[Ran, Path, float]]


@pytest.fixture(scope="module", autouse=True)
def interrupted(flags, tmp_path_factory) -> Iterator[Interrupted]:
    """interrupted(name): what a run that got a signal printed, its folder, and the seconds from the
    signal to the end of all its processes."""

    def send_and_finish(launch, when: Callable, number: int, send: Callable) -> tuple:
        (more, launcher), out = launch, tmp_path_factory.mktemp("out")
        with Program(*flags, *more, "--out", out, launcher=launcher) as program:
            when(program)
            send(program, number)
            sent = time.monotonic()
            ran = program.finish()
            return ran, out, time.monotonic() - sent

    cases = {"a rank hangs": HANG, **ASKED}
    with ahead(**{name: partial(send_and_finish, *case) for name, case in cases.items()}) as runs:
        yield lambda name: runs[name].result()


# --------------------------------------------------------------------------------------- killed


def test_a_run_that_is_killed_five_times_ends_with_bitwise_equal_weights(
    undisturbed, flags, tmp_path, tmp_path_factory
):
    chance, place = random.Random(0), tmp_path_factory.mktemp("place") / "place"
    command = [*flags, "--save-every", 1, "--keep", 2, "--out", tmp_path]
    for _ in range(5):
        where = f"0 {random_place(chance, start=0)} {signal.SIGKILL:d} self"
        assert run(*command, **signalled(PYTHON, where, place)).code == -signal.SIGKILL
    ran = run(*command)
    assert ran.code == 0 and ran.err == "", ran  # an unfinished write has no checkpoint's name
    assert [step for step, _ in losses(tmp_path)] == list(range(1, 101))
    assert same_training(tmp_path, undisturbed(1))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == [".lock"]


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(undisturbed, tmp_path):
    out = shutil.copytree(undisturbed(1), tmp_path / "out")
    saved = ["step-00000040", "step-00000080", "step-00000100"]
    assert [path.name[:13] for path in checkpoints(out)] == saved
    damaged = checkpoints(out)[-1]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    ran = run("--out", out, "--log-every", 1)
    assert ran.code == 0, ran
    assert ran.err.count("\n") == 1 and damaged.name in ran.err and "damaged" in ran.err, ran.err
    assert f"steps 81 to 100 (set by --steps), continuing the run in {out}\nstep 81/100 " in ran.out
    assert [step for step, _ in losses(out)] == list(range(1, 101))
    assert same_training(out, undisturbed(1))


def test_a_killed_rank_is_named_and_the_other_ranks_end(start, flags, tmp_path):
    program = start(*flags, "--spawn", 2, "--out", tmp_path)
    program.read_to("step 20/")
    child(program, signal.SIGKILL)
    killed = time.monotonic()
    ran = program.finish()  # fails if a process is left
    assert time.monotonic() - killed < 300, ran  # and not after --timeout, 600 s
    assert ran.code == 1, ran
    assert ran.err == "Error: rank 1 was killed by SIGKILL\n", ran.err


def test_a_killed_spawn_parent_leaves_no_child(start, flags, tmp_path):
    program = start(*flags, "--spawn", 2, "--out", tmp_path)
    program.read_to("step 20/")
    assert len(program.children()) == 2
    program.process.kill()
    program.process.wait()
    wait_for(lambda: not program.family(), "the children to end", 5)


def test_torchrun_restarts_a_killed_worker_and_the_weights_are_bitwise_equal(
    undisturbed, flags, start, tmp_path
):
    launcher = torchrun(2, "--max-restarts", "1")
    program = start(*flags, "--save-every", 10, "--out", tmp_path, launcher=launcher)
    program.read_to("step 30/")
    worker(program, signal.SIGKILL)
    ran = program.finish()
    assert ran.code == 0, ran
    assert ran.out.count("step 1/100 ") == 1  # the second start resumed
    assert [step for step, _ in losses(tmp_path)] == list(range(1, 101))
    assert same_training(tmp_path, undisturbed(2))


# -------------------------------------------------------------------- a save that never returns

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
run.main()
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_that_never_returns_does_not_hold_the_run(text, tmp_path, ranks):
    program, out = tmp_path / "program.py", tmp_path / "out"
    program.write_text(SAVE_THAT_HANGS)
    launcher = [sys.executable, str(program)] if ranks == 1 else [*torchrun(2)[:-1], str(program)]
    flags = ["--steps", 30, "--save-every", 5, "--log-every", 1, "--timeout", 4]
    ran = run(*TINY, "--data", text, *flags, "--out", out, launcher=launcher)
    assert ran.code == 1 and "Traceback" not in ran.out, ran
    assert ran.err.count("Warning: a save takes longer than --timeout; until it ends") == 1
    assert [step for step, _ in losses(out)] == list(range(1, 31))  # the training itself ended
    assert state(out)["step"] == 5 and len(checkpoints(out)) == 1


# ------------------------------------------------------- a launcher that starts the ranks again


def test_torchrun_restarts_a_run_from_its_newest_checkpoint(text, tmp_path):
    launcher = torchrun(2, "--max-restarts", "1")
    job = ["--data", text, "--steps", 40, "--save-every", 10, "--log-every", 1]
    with Program(*TINY, *job, "--out", tmp_path, launcher=launcher) as program:
        program.read_to("step 25/")
        worker(program, signal.SIGKILL)
        ran = program.finish()
    assert ran.code == 0 and ran.out.count("step 1/40 ") == 1, ran
    assert [step for step, _ in losses(tmp_path)] == list(range(1, 41))


# ----------------------------------------------------------------------------------- asked to stop


def test_a_second_ctrl_c_ends_the_program_during_a_step(start, tmp_path):
    data, out = tmp_path / "data.txt", tmp_path / "out"
    data.write_bytes(bytes(4_000_000))
    # one step of 100,000 sequences in 20,000 micro-batches takes far longer than this test
    endless = ["--batch-size", 100_000, "--accum", 20_000]
    program = start(*TINY, "--data", data, "--tokenizer", "byte", "--out", out, *endless)
    wait_for(lambda: (out / "config.json").exists(), "training to begin")

    def has_ended() -> bool:
        program.process.send_signal(signal.SIGINT)  # repeated, because two at once count as one
        time.sleep(0.1)
        return program.process.poll() is not None

    wait_for(has_ended, "the program to end", 20)
    ran = program.finish()
    assert ran.code == 130 and ran.err == "", ran
    assert checkpoints(out) == []


@pytest.mark.parametrize("name", ASKED)
def test_a_run_that_is_asked_to_stop_saves_the_last_step_and_says_so(interrupted, name):
    ran, out, took = interrupted(name)
    assert took < 300, (took, ran)  # a start of two ranks on a busy machine; --timeout is 600 s
    assert ran.out.splitlines(), ran
    last = losses(out)[-1][0]
    assert (1 if "start" in name else 20) <= last < 100
    assert state(out)["step"] == last
    assert re.match(f"Stopped as asked,? after step {last} of 100; ", ran.out.splitlines()[-1]), ran
    if "worker" in name:  # torchrun has an exit code and a report of its own
        assert ran.code != 0 and f'File "{ROOT}/run.py' not in ran.err, ran
    else:
        assert ran.code == 3 and ran.err == "", ran


def test_a_rank_that_hangs_is_named_after_the_timeout(interrupted):
    ran, _, took = interrupted("a rank hangs")
    assert TIMEOUT - 1 < took < TIMEOUT + 15, (took, ran)
    assert ran.code == 1, ran
    assert ran.err.count("\n") == 1 and "no answer from rank 1" in ran.err, ran.err
