"""Promise 6, in counted trials: a rank that fails, hangs or is slow, at every place of the program.

Also: a program without a fault ends without an error, and numbers that are not finite.
"""

import itertools
import random
import re
import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from conftest import (
    PYTHON,
    ROOT,
    TINY,
    Program,
    Ran,
    checkpoints,
    free_port,
    launch_variables,
    losses,
    metrics,
    run,
    state,
    torchrun,
    wait_for,
)

pytestmark = pytest.mark.torture
PROGRAM = f"{ROOT}/tests/faults/sabotaged.py"
SABOTAGED = [sys.executable, PROGRAM]
TIMEOUT = 8  # seconds: --timeout of the runs in which a rank hangs


@pytest.fixture(scope="module")
def short(text: Path) -> list[object]:
    """Return the flags of 12 steps with evaluations and saves."""
    flags = "--optimizer adamw --steps 12 --log-every 1 --eval-every 5 --save-every 5".split()
    return [*TINY, *flags, "--data", text]


def error_lines(ran: Ran) -> list[str]:
    """Return the lines of stderr without the warnings of torch's C++ and torchrun's own report."""
    foreign = r"[EWI]\d{4} |\[[EWI]\d{4} .*\[c10d\]"
    return [line for line in ran.err.splitlines() if not re.match(foreign, line)]


def steps(out: Path) -> list[int]:
    """Return the steps in the metrics of a run."""
    return [step for step, _ in losses(out)]


# -------------------------------------------------------------------------- one rank fails or hangs

PLACES = {  # the place of the fault, and in which call there
    "start": 1,
    "agreement": 2,
    "reading": 1,
    "forward": 4,
    "backward": 4,
    "collective": 4,
    "snapshot": 2,
    "writing": 2,
    "evaluation": 2,
    "teardown": 1,
}
FAULTS = ("raise", "exit", "leave", "kill", "stop", "slow")


def all_faults() -> list[tuple[str, str, int, int]]:
    """Return (place, fault, number of ranks, which of them) for all combinations.

    The first are chosen so that an ordinary run, with a few trials, tests the most.
    """
    first = [
        ("teardown", "stop", 2, 1),
        ("start", "exit", 3, 2),
        ("backward", "raise", 2, 1),
        ("writing", "slow", 2, 0),
    ]
    everywhere = itertools.product(PLACES, FAULTS, ((2, 0), (2, 1), (3, 0), (3, 2)))
    faults = [(place, fault, *ranks) for place, fault, ranks in everywhere]
    faults = [f for f in faults if f not in first and (f[0] != "writing" or f[3] == 0)]
    random.Random(0).shuffle(faults)
    return [*first, *faults]


@pytest.mark.parametrize("launch, few, many", [("spawn", 3, 224), ("torchrun", 1, 30)])
def test_a_rank_that_fails_or_hangs_ends_the_run_and_a_slow_rank_does_not(
    launch, few, many, trials, short, tmp_path
):
    """The rank that failed is named, and each other rank says at most one line. torchrun adds its own report."""
    faults = all_faults()
    if launch == "torchrun":
        faults = [fault for fault in faults if fault[2:] == (2, 1)][1:]

    def trial(number: int) -> None:
        place, fault, size, rank = faults[number]
        out, hangs = tmp_path / f"{number}", fault in ("stop", "slow")
        launcher, more = SABOTAGED, ["--spawn", size]
        if launch == "torchrun":
            launcher, more = [*torchrun(size)[:-1], PROGRAM], []
        # Without OMP_NUM_THREADS, torchrun prints that it sets it.
        env = {"OMP_NUM_THREADS": "1"}
        env |= {"TEST_FAULT": f"{place} {fault} {rank} {PLACES[place]}" + "+" * (fault == "slow")}
        more += ["--timeout", TIMEOUT] if hangs else []  # otherwise it is 600 s
        ran = run(*short, *more, "--out", out, launcher=launcher, env=env, seconds=200)
        about = faults[number], ran
        lines = error_lines(ran)
        if fault == "slow":
            assert ran.code == 0 and lines == [] and steps(out) == list(range(1, 13)), about
            return
        if place == "writing" and fault in ("raise", "leave"):  # in a thread that only saves
            assert ran.code == 0 and steps(out) == list(range(1, 13)), about
            message = "Warning: checkpoint not written: .*; the checkpoints before it are untouched"
            assert len(lines) == 1 and re.fullmatch(message, lines[0]), about
            assert state(out)["step"] == 12, about
            return
        lost = r"Error: rank (\d): (lost the connection|waited 8 s in vain)"
        errors = [line for line in lines if line.startswith("Error")]
        others = [match[1] for line in errors if (match := re.match(lost, line))]
        errors = [line for line in errors if not re.match(lost, line)]
        assert len({*others, f"{rank}"}) == len(others) + 1, about  # one line of each other rank
        if fault == "raise":  # which is reported by this rank, or by rank 0 for all of them
            assert len(errors) == 1, about
            assert re.match(r"Error on rank \d: RuntimeError\('sabotaged'\)", errors[0]), about
        if launch == "torchrun":
            report = {"exit": "7", "leave": "7", "kill": "-9"}.get(fault, "")
            assert ran.code == 1 and re.search(rf"exitcode\s*: {report}", ran.err), about
            return
        assert others == [] or fault == "stop", about
        assert ran.code == (7 if fault in ("exit", "leave") else 1), about
        if fault == "kill":
            assert lines == [f"Error: rank {rank} was killed by SIGKILL"], about
        elif fault == "stop":  # If no rank waits for it, it is only named.
            named = [f"Error: rank {rank} had not ended 8 s after another rank"]
            assert errors == [] and others or errors == named, about

    trials(f"a rank fails, hangs or is slow; {launch}", trial, few, many)


def test_a_torchrun_agent_that_is_killed_leaves_no_worker(trials, short, tmp_path):
    def trial(number: int) -> None:
        endless = ["--steps", 10**6, "--epochs", 10**6, "--log-every", 10**6]
        flags = [*short, *endless, "--save-every", 100, "--out", tmp_path / f"{number}"]
        with Program(*flags, launcher=torchrun(2)) as program:
            wait_for(lambda: len(program.family("\0RANK=")) == 2, "the workers to start")
            if number == 0:
                program.read_to("Training: ")
            else:  # they import, connect or train
                time.sleep(random.Random(number).uniform(0, 8))
            program.process.kill()
            program.process.wait()
            wait_for(lambda: not program.family(), "the workers to end", 5)

    trials("torchrun's agent killed: no worker 5 s later", trial, few=1, many=20)


# --------------------------------------------------------- programs without a fault end without one

COPIED = """
import sys
import torch
from ddp_setup import any_rank, from_rank_zero, process_group, replicate, spawn, wait_together

def main():
    with process_group("cpu") as world:
        model = replicate(torch.nn.Linear(8, 8), world)
        for _ in range(3):
            model(torch.ones(4, 8)).sum().backward()
            assert not any_rank(False, world)
        assert from_rank_zero(lambda: "a", world) == "a"
        # one write, because the ranks print at the same time
        wait_together(lambda: print(f"Done: {world.rank}\\n", end="", flush=True), world)

if __name__ == "__main__":
    sys.exit(spawn(main, 2) if "--spawn" in sys.argv else main())
"""


def test_no_kind_of_program_ends_with_an_error_at_its_exit(trials, short, tmp_path):
    """A thread of torch or gloo that lives too long would abort the process: "terminate called"."""
    copied = tmp_path / "copied"
    copied.mkdir()
    (copied / "run.py").write_text(COPIED)
    shutil.copy(ROOT / "ddp_setup.py", copied)
    divided = ["--spawn", 2, "--strategy", "fsdp", "--checkpoint", "sharded"]
    kinds: list[tuple[list[str], list[object], Path]] = [
        (PYTHON, [*short, *divided], ROOT),
        (torchrun(2), [], copied),
        (PYTHON, ["--spawn"], copied),
        ([], short, ROOT),  # started by hand
        (PYTHON, [*short, "--spawn", 2], ROOT),
        (torchrun(2), short, ROOT),
        (PYTHON, short, ROOT),
    ]

    def trial(number: int) -> None:
        launcher, flags, root = kinds[number % len(kinds)]
        if root == ROOT:
            flags = [*flags, "--out", tmp_path / f"{number}"]
        port = free_port()
        # Without OMP_NUM_THREADS, torchrun prints that it sets it.
        variables = [launch_variables(rank, 2, port) for rank in range(2)] if not launcher else [{}]
        with ExitStack() as stack:
            start = [
                Program(
                    *flags,
                    launcher=launcher or PYTHON,
                    env={**env, "OMP_NUM_THREADS": "1"},
                    root=root,
                )
                for env in variables
            ]
            ended = [stack.enter_context(program).finish() for program in start]
        assert all(ran.code == 0 and error_lines(ran) == [] for ran in ended), (number, ended)
        done = "".join(ran.out for ran in ended).count("Done: ")
        assert done == (2 if root == copied else 1), (number, ended)

    trials("200 exits of each of 7 kinds of programs", trial, few=3, many=1400)


# ------------------------------------------------------------------------ numbers that are not finite


def checkpoints_are_finite(out: Path) -> bool:
    """Return whether all weights in all checkpoints are finite."""
    states = (torch.load(path, weights_only=True) for path in checkpoints(out))
    return all(bool(w.isfinite().all()) for state in states for w in state["model"].values())


VALUES = [*itertools.product(("loss", "gradient"), ("nan", "inf"))]
ONCE = [
    (f"{place} {value} {rank} 4", flags)
    for flags, ranks in (
        ([], "0"),
        (["--spawn", 2], "01"),
        (["--accum", 2], "0"),
        (["--dtype", "float16"], "0"),
    )
    for rank, (place, value) in itertools.product(ranks, VALUES)
]
ALWAYS = [
    (f"{place} {value} 0 7+", flags) for (place, value) in VALUES for flags in ([], ["--spawn", 2])
]


def test_a_step_with_a_number_that_is_not_finite_is_skipped_and_counted(trials, short, tmp_path):
    def trial(number: int) -> None:
        (fault, flags), out = ONCE[number], tmp_path / f"{number}"
        saves = ["--save-every", 1, "--keep", 99, "--out", out]
        ran = run(*short, *flags, *saves, launcher=SABOTAGED, env={"TEST_FAULT": fault})
        about = (ONCE[number], ran)
        assert ran.code == 0 and error_lines(ran) == [], about
        assert steps(out) == list(range(1, 13)), about
        skipped = [line["skipped"] for line in metrics(out) if "loss" in line]
        assert skipped[-1] == 1 and sorted(skipped) == skipped, about
        assert checkpoints_are_finite(out) and state(out)["step"] == 12, about

    trials("NaN or inf once, in the loss or one gradient", trial, few=1, many=len(ONCE))


def test_five_such_steps_in_a_row_end_the_run_and_keep_the_last_good_checkpoint(
    trials, short, tmp_path
):
    def trial(number: int) -> None:
        (fault, flags), out = ALWAYS[number], tmp_path / f"{number}"
        flags = [*short, *flags, "--eval-every", 99, "--out", out]
        ran = run(*flags, launcher=SABOTAGED, env={"TEST_FAULT": fault})
        about = (ALWAYS[number], ran)
        [line] = error_lines(ran)
        assert line.startswith("Error: ") and "5 times in a row, up to step 11" in line, about
        # There is no checkpoint of step 10, because its loss or gradient is not finite.
        assert ran.code == 2 and state(out)["step"] == 5 and checkpoints_are_finite(out), about

    trials("NaN or inf at every step", trial, few=1, many=len(ALWAYS))


def test_a_learning_rate_that_is_far_too_high_gives_no_bad_checkpoint(trials, short, tmp_path):
    kinds = ("adamw", "muon"), (1, 0), ("float32", "float16"), (1e6, 1e11), ([], ["--spawn", 2])
    cases = [*itertools.product(*kinds)]

    def trial(number: int) -> None:
        (optimizer, clip, dtype, lr, more), out = cases[number], tmp_path / f"{number}"
        flags = ["--optimizer", optimizer, "--clip", clip, "--dtype", dtype, "--lr", lr, *more]
        ran = run(*short, *flags, "--warmup", 0, "--steps", 40, "--out", out)
        about = (cases[number], ran)
        if ran.code == 0:
            assert error_lines(ran) == [] and steps(out) == list(range(1, 41)), about
            assert state(out)["step"] == 40, about
        else:
            [line] = error_lines(ran)
            assert ran.code == 2 and re.search(r"up to step \d+; try a lower", line), about
        assert checkpoints_are_finite(out), about

    trials("learning rate of 1e6 and 1e11", trial, few=3, many=len(cases), at_once=1)
