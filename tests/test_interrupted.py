"""Promises 6 and 7, and 3 and 5 under fire: run.py asked to stop, killed, and started again."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
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
    run,
    same_training,
    state,
    torchrun,
    wait_for,
)  # fmt: skip

SPAWN, TORCHRUN = (["--spawn", 2], PYTHON), ([], torchrun(2))


def parent(program: Program, number: int) -> None:
    program.process.send_signal(number)


def everyone(program: Program, number: int) -> None:
    """As a terminal does for Ctrl-C."""
    os.killpg(program.process.pid, number)


def child(program: Program, number: int) -> None:
    os.kill(program.children()[1], number)


def worker(program: Program, number: int) -> None:
    """Torchrun's of rank 1."""
    os.kill(program.family("\0RANK=1\0")[0], number)


def in_training(program: Program) -> None:
    program.read_to("step 20/")


def while_starting(program: Program) -> None:
    wait_for(lambda: len(program.children()) == 2, "the children to be born")


ASKED = {  # how it is started, until when we wait, which signal, to whom; SIGTERM to one process: test_run.py
    "SIGINT": (([], PYTHON), in_training, signal.SIGINT, parent),
    "SIGUSR1": (([], PYTHON), in_training, signal.SIGUSR1, parent),
    "SIGINT to everyone": (SPAWN, in_training, signal.SIGINT, everyone),
    "SIGUSR1 to a child": (SPAWN, in_training, signal.SIGUSR1, child),
    "SIGUSR1 to a worker": (TORCHRUN, in_training, signal.SIGUSR1, worker),
    "SIGTERM to the parent while starting": (SPAWN, while_starting, signal.SIGTERM, parent),
}


@pytest.fixture(scope="module", autouse=True)
def interrupted(flags, tmp_path_factory):
    """interrupted(name): what came of a run that was asked to stop, or of which a rank hung; and its folder."""

    def meet(name: str, launch, when: Callable[[Program], None], number: int, send: Callable) -> tuple[Ran, Path]:
        (more, launcher), out = launch, tmp_path_factory.mktemp("out")
        with Program(*flags, *more, "--out", out, launcher=launcher) as program:
            when(program)
            send(program, number)
            return program.finish(), out

    hang = (["--spawn", 2, "--timeout", 15], PYTHON), in_training, signal.SIGSTOP, child
    calls = {name: partial(meet, name, *how) for name, how in {"a rank hangs": hang, **ASKED}.items()}
    with ahead(**calls) as runs:
        yield lambda name: runs[name].result()


# ------------------------------------------------------------------------------------------------------ killed


def test_killed_again_and_again_it_ends_with_the_very_same_weights(undisturbed, flags, start, tmp_path):
    chance = random.Random(0)
    again = [*flags, "--save-every", 1, "--keep", 2, "--out", tmp_path]
    for _ in range(5):
        program = start(*again)
        for _ in range(chance.randint(1, 8)):
            program.read_to("step ")
        time.sleep(chance.uniform(0, 0.02))  # anywhere in a step, an evaluation or a write
        program.process.kill()
        assert program.finish().code == -signal.SIGKILL
    ran = run(*again)
    assert ran.code == 0 and ran.err == "", ran  # a write that was cut off never has the name of a checkpoint
    assert [step for step, _ in losses(tmp_path)] == list(range(1, 101))
    assert same_training(tmp_path, undisturbed(1))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == [".lock"]


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(undisturbed, tmp_path):
    out = shutil.copytree(undisturbed(1), tmp_path / "out")
    assert [path.name[:13] for path in checkpoints(out)] == ["step-00000040", "step-00000080", "step-00000100"]
    damaged = checkpoints(out)[-1]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    ran = run("--out", out, "--log-every", 1)
    assert ran.code == 0, ran
    assert ran.err.count("\n") == 1 and damaged.name in ran.err and "damaged" in ran.err, ran.err
    assert ran.out.startswith("step 81/100 ")
    assert [step for step, _ in losses(out)] == list(range(1, 101))
    assert same_training(out, undisturbed(1))


def test_a_rank_that_is_killed_takes_the_others_with_it_and_is_named(start, flags, tmp_path):
    program = start(*flags, "--spawn", 2, "--out", tmp_path)
    program.read_to("step 20/")
    child(program, signal.SIGKILL)
    ran = program.finish()  # fails if anybody is left
    assert ran.code == 1, ran
    assert ran.err.count("\n") == 1 and "rank 1" in ran.err and "SIGKILL" in ran.err, ran.err


def test_a_spawning_parent_that_is_killed_leaves_no_child(start, flags, tmp_path):
    program = start(*flags, "--spawn", 2, "--out", tmp_path)
    program.read_to("step 20/")
    assert len(program.children()) == 2
    program.process.kill()
    program.process.wait()
    wait_for(lambda: not program.family(), "the children to end", 5)


def test_torchrun_restarts_a_killed_worker_and_ends_with_the_very_same_weights(undisturbed, flags, start, tmp_path):
    program = start(*flags, "--save-every", 10, "--out", tmp_path, launcher=torchrun(2, "--max-restarts", "1"))
    program.read_to("step 30/")
    worker(program, signal.SIGKILL)
    ran = program.finish()
    assert ran.code == 0, ran
    assert ran.out.count("step 1/100 ") == 1  # it did not begin again
    assert [step for step, _ in losses(tmp_path)] == list(range(1, 101))
    assert same_training(tmp_path, undisturbed(2))


# ---------------------------------------------------------------------------------------------- asked to stop


def test_a_second_ctrl_c_ends_it_in_the_middle_of_a_step(start, tmp_path):
    data, out = tmp_path / "data.txt", tmp_path / "out"
    data.write_bytes(bytes(4_000_000))
    # one step of 100,000 rows in 20,000 parts, which takes far longer than the test
    program = start(*TINY, "--data", data, "--tokens", "byte", "--out", out, "--batch-size", 100_000, "--accum", 20_000)
    wait_for(lambda: (out / "config.json").exists(), "training to begin")

    def ended() -> bool:
        program.process.send_signal(signal.SIGINT)  # again and again: two that come too soon are one
        time.sleep(0.1)
        return program.process.poll() is not None

    wait_for(ended, "it to end")
    ran = program.finish()
    assert ran.code == 130 and ran.err == "", ran
    assert checkpoints(out) == []


@pytest.mark.parametrize("name", ASKED)
def test_asked_to_stop_it_saves_the_last_step_and_says_so(interrupted, name):
    ran, out = interrupted(name)
    assert ran.out.splitlines(), ran
    last = losses(out)[-1][0]
    assert (1 if "starting" in name else 20) <= last < 100
    assert state(out)["step"] == last
    said = f"Stopped as asked, after step {last} of 100; the same command goes on from there."
    assert ran.out.splitlines()[-1] == said
    if "worker" in name:  # torchrun has an exit code and a traceback of its own
        assert ran.code != 0 and f'File "{ROOT}/run.py' not in ran.err, ran
    else:
        assert ran.code == 3 and ran.err == "", ran


def test_a_rank_that_hangs_is_named_once_the_timeout_is_over(interrupted):
    ran, _ = interrupted("a rank hangs")
    assert ran.code == 1, ran
    assert ran.err.count("\n") == 1 and "no answer from rank 1" in ran.err, ran.err
