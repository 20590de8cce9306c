"""A run is killed, or asked to stop, at random places. The next start continues as if nothing had happened.

The places are function calls, chosen at random in the start, a step, an evaluation, or in the
thread that saves.
"""

import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from conftest import PYTHON, Program, run, signalled, state, torchrun
from signalled import Ended, is_same, run_ranks

pytestmark = pytest.mark.torture
FAULTS = 3  # in one chain of starts
KILL, STOPS = [9], [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]


def logged_steps(text: str) -> list[int]:
    return [int(step) for step in re.findall(r"^step (\d+)/", text, re.M)]


def random_place(chance: random.Random) -> str:
    """Return "STEPS THREAD CALLS" of TEST_SIGNAL."""
    if chance.random() < 0.3:
        return f"0 main {int(10 ** chance.uniform(0, 4.3))}"
    if chance.random() < 0.5:
        return f"0 save {chance.randint(1, 30_000)}"  # in one of the first saves
    return f"{chance.randint(1, 8)} main {chance.randint(1, 5000)}"


def check_kill(ended: Ended, out: Path, rank: int, before: int, every: int) -> None:
    """The other rank ends with one message, and at most the last unfinished save is lost."""
    others = [code for number, code in enumerate(ended.codes) if number != rank]
    assert ended.codes[rank] == -9 and all(code == 1 for code in others), ended
    assert ended.text.count("Traceback") + ended.text.count("lost the store") == len(others), ended
    first = (
        int(re.findall(r"steps (\d+) to 100", ended.text)[0]) if "Training" in ended.text else 101
    )
    assert first > (before // every - 1) * every, (before, ended)


def check_stop(ended: Ended, out: Path, rank: int, before: int, every: int) -> None:
    """All ranks stop after the same step, which is saved."""
    last = max([0, *logged_steps(ended.text)])
    line = f"Stopped as asked after step {last} of 100; start again to continue from there."
    assert {*ended.codes} == {3} and ended.text.splitlines()[-1] == line, ended
    assert last > before and state(out)["step"] == last, ended


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("numbers", [KILL, STOPS], ids=["killed", "stopped"])
def test_a_run_disturbed_at_random_places_ends_as_one_that_was_not(
    ranks, numbers, flags, whole, trials, tmp_path
):
    """Without durable saves and an exact resume, weights or losses differ; a hang fails the test."""
    whole(ranks)

    def trial(number: int) -> None:
        chance, out = random.Random(number), tmp_path / f"{number}"
        every, hits, before = chance.choice([1, 3, 10]), 0, 0
        args = [*flags, "--save-every", every, "--out", out]
        while hits < FAULTS:
            rank, place = chance.randrange(ranks), random_place(chance)
            rank = 0 if "save" in place else rank  # only rank 0 writes
            ended = run_ranks(args, ranks, f"{rank} {place} {chance.choice(numbers):d} self")
            if {*ended.codes} == {0}:  # it has ended before its signal
                assert is_same(out, whole(ranks)), ended
                shutil.rmtree(out)
                before = 0
                continue
            (check_kill if numbers == KILL else check_stop)(ended, out, rank, before, every)
            before, hits = max([before, *logged_steps(ended.text)]), hits + 1
        ended = run_ranks(args, ranks)
        assert {*ended.codes} == {0} and "Warning" not in ended.text, ended
        assert is_same(out, whole(ranks)), ended

    what = "is killed" if numbers == KILL else "is stopped"
    trials(f"a run of {ranks} ranks {what} {FAULTS} times", trial, 2, 100)


LAUNCHED = {  # launcher, flags, [(signal, from which rank, to what, exit code)]
    "spawn": (
        PYTHON,
        ["--spawn", 2],
        [(9, 0, "parent", -9), (15, 1, "parent", 3), (2, 0, "group", 3)],
    ),
    # The agent of torchrun has exit codes of its own. It does not pass on SIGUSR1.
    "torchrun": (torchrun(2), [], [(9, 1, "parent", -9), (1, 0, "parent", 1)]),
}


@pytest.mark.parametrize("name", LAUNCHED)
def test_a_signal_to_a_launcher_ends_all_processes(name, flags, trials, tmp_path):
    """One that is killed leaves no rank. One that is asked to stop lets the ranks save."""
    launcher, more, faults = LAUNCHED[name]

    def trial(number: int) -> None:
        chance, out = random.Random(number), tmp_path / f"{number}"
        for what, rank, target, code in faults:
            place = f"{rank} {chance.randint(2, 9)} main {chance.randint(1, 5000)} {what} {target}"
            how = signalled(launcher, place, tmp_path / "place") | {"seconds": 300}
            ran = run(*flags, *more, "--save-every", 1, "--out", out, **how)
            assert ran.code == code and "set aside" not in ran.err, ran
            assert name == "torchrun" or not ran.err, ran
            if what == 9:
                assert state(out)["step"] >= logged_steps(ran.out)[-1] - 2, ran
            else:
                step = state(out)["step"]
                assert f"\nStopped as asked after step {step} of 100" in ran.out, ran
                assert logged_steps(ran.out)[0] > 1, f"it has not continued: {ran}"

    trials(f"signals to {name}", trial, 1, 10)


@pytest.mark.parametrize("name", LAUNCHED)
def test_a_launcher_that_is_killed_while_its_ranks_start_leaves_none(name, flags, trials, tmp_path):
    """Without end_with_parent, they would train for ever. Before that, they wait for the timeout."""
    launcher, more, _ = LAUNCHED[name]

    def trial(number: int) -> None:
        args = [*flags, *more, "--timeout", 5, "--out", tmp_path / f"{number}"]
        with Program(*args, launcher=launcher) as program:
            time.sleep(random.Random(number).uniform(2, 10))
            program.process.kill()
            program.finish(seconds=30)

    trials(f"{name} is killed while its ranks start", trial, 0, 30)


def test_a_second_ctrl_c_ends_the_program_during_a_step(tmp_path):
    """Otherwise, only SIGKILL would end a step that hangs."""
    data = tmp_path / "data.txt"
    data.write_bytes(bytes(4_000_000))
    # One step of 100,000 sequences takes far longer than this test.
    flags = f"--tokenizer byte --batch-size 100000 --accum 20000 --data {data} --out {tmp_path}/out"
    with Program(*flags.split()) as program:
        program.read_to("Training: ")
        while program.process.poll() is None:
            program.process.send_signal(signal.SIGINT)
            time.sleep(0.1)  # Two at once count as one.
        ran = program.finish()
    assert (ran.code, ran.err) == (130, ""), ran
