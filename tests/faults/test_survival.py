"""Faults from outside the program, in counted trials. A few of each here, all with -m torture.

The program is killed, asked to stop, started twice, its data change, its environment is unusual, its
arguments are random.
"""

import gc
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from conftest import (
    PYTHON,
    ROOT,
    TINY,
    Program,
    Ran,
    contents,
    run,
    same_training,
    signalled,
    state,
    torchrun,
    wait_for,
)
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import loop
import run as program

pytestmark = pytest.mark.torture
STEPS = 100  # of a whole run, see `flags` in conftest.py
FAULTS = 5  # in one chain of starts
LAUNCH: dict[str, tuple[list[object], list[str], int]] = {  # more flags, launcher, number of ranks
    "python": ([], PYTHON, 1),
    "spawn": (["--spawn", 2], PYTHON, 2),
    "torchrun": ([], torchrun(2), 2),
}


# -------------------------------------------------------------------------- one run, many signals


def random_place(chance: random.Random) -> str:
    """Return "STEPS THREAD CALLS" of TEST_SIGNAL: a place in the start, a step, an evaluation or a save.

    A run of the TINY model makes 20,000 calls in its start, 1,200 in a step, and 7,400 in the thread of a save and
    5,900 in the main thread meanwhile.
    """
    if chance.random() < 0.3:
        return f"0 main {int(10 ** chance.uniform(0, 4.3))}"
    if chance.random() < 0.5:
        return f"0 save {chance.randint(1, 30_000)}"  # in one of the first four saves
    return f"{chance.randint(1, 8)} main {chance.randint(1, 7500)}"


def logged_steps(ran: Ran) -> list[int]:
    """Return 0 and the steps that a program has printed."""
    return [0, *map(int, re.findall(r"^step (\d+)/", ran.out, re.MULTILINE))]


def check_kill(ran: Ran, reached: int, every: int, out: Path) -> None:
    """An unfinished write is lost, but not the checkpoint before it. (finish() has checked that no process is left.)"""
    assert ran.code in (-signal.SIGKILL, 1), ran
    first = min(logged_steps(ran)[1:], default=STEPS)
    assert first > ((reached - 1) // every - 1) * every, (reached, every, ran)


def check_stop(ran: Ran, reached: int, every: int, out: Path) -> None:
    """The last step is saved, and the program says so."""
    last = logged_steps(ran)[-1]
    assert last > reached and state(out)["step"] == last, ran
    expected = f"Stopped as asked,? after step {last} of {STEPS}; start again to continue"
    assert re.match(expected, ran.out.splitlines()[-1]), ran
    if "torchrun" not in out.name:  # which has an exit code and a report of its own
        assert (ran.code, ran.err) == (3, ""), ran


STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
CHAINS = {  # launcher, (rank and target) in signalled.py, signals, chains: a few, or with -m torture
    "python is killed": ("python", ["0 self"], [signal.SIGKILL], 1, 140),
    "a rank of --spawn is killed": ("spawn", ["0 self", "1 self"], [signal.SIGKILL], 0, 24),
    "the --spawn parent is killed": ("spawn", ["0 parent", "1 parent"], [signal.SIGKILL], 0, 24),
    "all of --spawn are killed": ("spawn", ["0 group", "1 group"], [signal.SIGKILL], 0, 24),
    "torchrun's agent is killed": ("torchrun", ["0 parent", "1 parent"], [signal.SIGKILL], 0, 12),
    "python is asked to stop": ("python", ["0 self"], STOPS, 1, 40),
    "--spawn is asked to stop": ("spawn", ["0 parent", "1 group", "1 self"], STOPS, 0, 16),
    # SIGUSR1 just ends torchrun's agent.
    "torchrun is asked to stop": ("torchrun", ["0 parent", "1 self"], STOPS[:2], 0, 4),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_run_that_is_killed_or_stopped_at_random_places_ends_with_the_same_weights(
    name, trials, flags, undisturbed, tmp_path
):
    """The weights are bitwise those of a run that nothing disturbed. A run that ends before its signal comes is checked
    too; then a new run starts, and that signal does not count."""
    launch, targets, numbers, few, many = CHAINS[name]
    more, launcher, ranks = LAUNCH[launch]
    kills = numbers == [signal.SIGKILL]

    def trial(number: int) -> None:
        chance, reached, hits = random.Random(number), 0, 0
        out, place = tmp_path / f"{launch} {number}", tmp_path / f"place {number}"
        every = chance.choice([1, 3, 10]) if kills else 2
        command = [*flags, *more, "--save-every", every, "--out", out]
        while hits < FAULTS:
            rank, target = chance.choice(targets).split()
            where = random_place(chance)
            if "save" in where:  # only rank 0 writes
                rank, target = "0", target if kills else targets[0].split()[1]
            how = signalled(launcher, f"{rank} {where} {chance.choice(numbers):d} {target}", place)
            place.write_text("none")
            ran = run(*command, **how, seconds=200)
            assert "set aside" not in ran.err and f'File "{ROOT}/run.py' not in ran.err, ran
            if ran.code == 0:
                assert same_training(out, undisturbed(ranks)), ran
                shutil.rmtree(out)
                reached = 0
                continue
            assert place.read_text() != "none", ran
            (check_kill if kills else check_stop)(ran, reached, every, out)
            reached, hits = max(reached, *logged_steps(ran)), hits + 1
        complete(out, undisturbed(ranks), *command, launcher=launcher)

    trials(f"{name}, at random places", trial, few, many, each=FAULTS)


def test_a_signal_comes_at_the_same_place_in_every_run(flags, tmp_path):
    """Otherwise, --seed could not repeat a failed trial."""
    places = []
    for number in range(2):
        how = signalled(PYTHON, "0 5 main 5000 9 self", tmp_path / f"place {number}")
        ran = run(*flags, "--save-every", 3, "--out", tmp_path / f"{number}", **how)
        assert ran.code == -signal.SIGKILL, ran
        places.append((tmp_path / f"place {number}").read_text())
    assert places[0] == places[1] and len(places[0].split()) == 4, places


# ------------------------------------------------------------------------------ two runs, one folder


def without_data(flags: list[object]) -> list[object]:
    """Return the flags without --data."""
    at = flags.index("--data")
    return [*flags[:at], *flags[at + 2 :]]


def complete(out: Path, whole: Path, *command: object, **how: Any) -> None:
    """Let a run come to its end; check that it is bitwise equal to `whole`."""
    ran = run(*command, "--out", out, **how)
    assert ran.code == 0, ran
    assert "torch.distributed.run" in how.get("launcher", []) or ran.err == "", ran
    assert same_training(out, whole), ran


def test_a_second_run_in_a_folder_is_refused_until_the_first_ends(
    trials, flags, undisturbed, tmp_path
):
    def trial(number: int) -> None:
        chance, out = random.Random(number), tmp_path / f"{number}"
        lock, link = out / ".lock", out.with_suffix(".link")
        link.symlink_to(out)  # another name of the folder
        endless = ["--steps", 10**6, "--epochs", 10**6] if chance.random() < 0.5 else []
        with Program(*flags, *endless, "--out", out) as first:
            wait_for(lambda: lock.exists() and lock.read_text(), "the lock")
            second = run(*flags, "--out", chance.choice([out, link]))
            if first.process.poll() is None:
                assert second.code == 1 and second.err.count("\n") == 1 and not second.out, second
                holder = f"{re.escape(socket.gethostname())}, pid {first.process.pid}, since 20"
                assert re.search(f"in use by another run: {holder}", second.err), second
            if endless:
                first.process.kill()
            first.finish()
        complete(out, undisturbed(1), *flags)

    trials("two runs on one folder, and the next once the first is dead", trial, 1, 20, at_once=1)


def test_of_two_runs_that_start_together_one_is_refused(trials, flags, tmp_path):
    def trial(number: int) -> None:
        command = [*flags, "--out", tmp_path / f"{number}"]
        with Program(*command) as one, Program(*command) as other:
            ends = sorted([one.finish(), other.finish()])
        assert [ran.code for ran in ends] == [0, 1] and ends[1].err.count("\n") == 1, ends
        refused = "in use by another run|another run has just written to it"
        assert re.search(refused, ends[1].err), ends

    trials("two runs started together on one folder", trial, 1, 20, at_once=1)


# -------------------------------------------------------------------------------------- changed data


def write_data(folder: Path, kind: str, text: Path) -> list[object]:
    """Write the text as a file of this kind; return the flags that read it."""
    folder.mkdir()
    data, raw = folder / f"data.{kind}", np.frombuffer(text.read_bytes(), np.uint8)
    if kind == "npy":
        np.save(data, raw.astype(np.uint32))
    else:
        data.write_bytes((raw.astype("<u2") if kind == "bin" else raw).tobytes())
    return ["--data", data, "--tokenizer", "byte" if kind == "byte" else "char"]


def alter(data: Path, chance: random.Random) -> None:
    content = bytearray(data.read_bytes())
    content[chance.randrange(200, len(content)) // 2 * 2] ^= 1
    with open(data, "r+b") as file:
        file.write(content)


def replace(data: Path, chance: random.Random) -> None:
    other = Path(shutil.copy(data, f"{data}.other"))
    alter(other, chance)
    os.replace(other, data)


CHANGES: dict[str, Callable[[Path, random.Random], object]] = {
    "cut": lambda data, chance: os.truncate(data, data.stat().st_size // 4 * 2),
    "emptied": lambda data, chance: os.truncate(data, 0),
    "grown": lambda data, chance: data.write_bytes(data.read_bytes() + b"  "),
    "altered": alter,
    "replaced": replace,
    "deleted": lambda data, chance: data.unlink(),
}
CASES = [(kind, change) for change in CHANGES for kind in ("char", "byte", "bin", "npy")]


def test_data_that_changed_between_stop_and_resume_is_refused(trials, flags, text, tmp_path):
    def trial(number: int) -> None:
        kind, change = CASES[number]
        folder, out = tmp_path / f"{number}", tmp_path / f"{number}" / "out"
        reads = write_data(folder, kind, text)
        command = [*without_data(flags), *reads, "--out", out]
        assert run(*command, "--steps", 10).code == 0
        before = contents(out)
        CHANGES[change](reads[1], random.Random(number))
        ran = run(*command)
        about = kind, change, ran
        assert ran.code == 2 and ran.err.count("\n") == 1 and reads[1].name in ran.err, about
        assert contents(out) == before, about

    name = "data changed between stop and resume"
    trials(name, trial, len(CASES), len(CASES), at_once=1)


def test_mapped_data_that_changes_during_the_training_is_noticed_at_the_next_save(
    trials, flags, text, tmp_path
):
    """This is one warning. A file that was replaced or deleted stays mapped, so the run comes to the same end as one
    that nothing disturbed."""
    large = tmp_path / "large.txt"
    large.write_bytes(text.read_bytes() * 250)  # chardata.py maps files above 1 MiB
    cases = [(kind, change) for kind, change in CASES if kind != "char"]

    def trial(number: int) -> None:
        kind, change = cases[number * 4 % len(cases)]
        chance, folder = random.Random(number), tmp_path / f"{number}"
        reads = write_data(folder, kind, large)
        good = shutil.copy(reads[1], folder / "good")
        command = [
            *without_data(flags),
            *reads,
            "--eval-tokens",
            500,
            "--save-every",
            3,
            "--eval-every",
            5,
        ]
        with Program(*command, "--out", folder / "out") as started:
            started.read_lines(chance.randint(5, 10))
            CHANGES[change](reads[1], chance)
            ran = started.finish()
        about = kind, change, ran
        if ran.code == -signal.SIGBUS:  # it has read beyond the end of the file
            assert change in ("cut", "emptied") and "chardata.py" in ran.err, about
        else:
            too_high = change == "altered" and kind == "npy" and "the tokens have the id" in ran.err
            assert reads[1].name in ran.err or too_high, about
            assert ran.code == (2 if too_high else 0) and ran.err.count("\n") == 1, about
        if change == "altered":  # it has trained on what was written into the file
            return
        os.replace(good, reads[1])
        assert run(*command, "--out", folder / "whole").code == 0
        complete(folder / "out", folder / "whole", *command)

    trials("mapped data changed while training", trial, 2, len(cases), at_once=1)


# ------------------------------------------------------------------------------ unusual environments

BACKWARDS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *t) {  /* each call goes back by one more hour */
    static int calls;
    static int (*next)(clockid_t, struct timespec *);
    if (!next) next = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = next(id, t);
    if (id == CLOCK_REALTIME) t->tv_sec -= 3600 * ++calls;
    return failed;
}
"""
LIMITS = "-n 24,-n 64,-f 4,-s 200,-c 0,-l 0,-m 1000,-q 0,-i 0,-x 0,-u 1,-d 300000,-v 700000"
LIMITS += ",-v 4000000,-t 1"
UNICODE = """mkdir '{folder}/a ü 📁' && cd '{folder}/a ü 📁' && cp {text} 'té xt.txt' &&
    exec "$@" --data 'té xt.txt' --out 'öut 1'"""
READ_ONLY = """mount --bind {root} {root} && mount -o remount,ro,bind {root} &&
    hostname elsewhere && exec "$@" """
ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
ENVIRONMENTS: list[str | dict[str, str | None]] = [  # shell scripts and variables
    UNICODE,
    READ_ONLY,
    {"TMPDIR": "/no/such"},
    {"HOME": None, "PATH": None},
    {"HOME": "/no/such", "PYTHONHASHSEED": "4294967295"},
    {"LC_ALL": "C"},
    ASCII,
    {"COLUMNS": "1", "TERM": "dumb", "NO_COLOR": "1"},
    {"LD_PRELOAD": "{folder}/backwards.so"},  # the clock runs backwards
    *(f'ulimit {limit} && exec "$@"' for limit in LIMITS.split(",")),
]


def test_in_an_unusual_environment_it_works_or_says_in_one_line_why_not(
    trials, flags, undisturbed, text, tmp_path
):
    """If it does not work, the run continues in the usual environment."""

    def trial(number: int) -> None:
        how, folder = ENVIRONMENTS[number], tmp_path / f"{number}"
        out, launcher, env = folder / "out", [sys.executable, f"{ROOT}/run.py"], {}
        folder.mkdir()
        if isinstance(how, str):
            script = how.format(folder=folder, text=text, root=ROOT)
            unshare = ["unshare", "--mount", "--uts"] if "mount" in script else []
            if unshare and os.geteuid():
                pytest.skip("needs root")
            launcher = [*unshare, "bash", "-c", script, "bash", *launcher]
        else:
            env = {key: value and value.format(folder=folder) for key, value in how.items()}
        if "LD_PRELOAD" in env:
            command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", env["LD_PRELOAD"], "-ldl"]
            subprocess.run(command, input=BACKWARDS.encode(), check=True)
        own = how is UNICODE  # names its own data
        ran = run(
            *(without_data(flags) if own else flags), "--out", out, launcher=launcher, env=env
        )
        lines = ran.err.splitlines()
        if ran.code == 0:
            assert not lines or "-i 0" in how and "Traceback" not in ran.err, (how, ran)
        elif ran.code != -signal.SIGKILL:  # with SIGKILL the system says that the CPU time is over
            known = "Warning|OpenBLAS|libgomp|Error: the checkpoint of step 100 was not written$"
            known_lines = [re.match(known, line) for line in lines]
            assert len(lines) == 1 or lines and all(known_lines), (how, ran)
            assert sum(line.startswith("Error") for line in lines) <= 1, (how, ran)
        done = folder / "a ü 📁" / "öut 1" if how is UNICODE else out
        if ran.code:
            complete(done, undisturbed(1), *flags)
        assert same_training(done, undisturbed(1)), (how, ran)

    trials("strange clock, host, paths, environment, limits", trial, 2, len(ENVIRONMENTS))


# ---------------------------------------------------------------------------------- random arguments

VALUES = "0|1|2|-1|3.5|1e3|0x10|1_0|٣|²|| |nan|None|0.5|1e-320|1e308|1e309|-0.0|inf|-inf|1,5|1e|٠.٥"
VALUES += f"|{2**63}|{-(2**64)}|{'9' * 30}"
PATHS = "|/dev/null|/dev/null/x|/dev/zero|/proc/self/mem|/proc/x|/|.|no*such|[|~|\udcff|://|s3://|"
PATHS += "file://|http://[|memory://a|README.md|-|--"
SPECIAL = {
    "config": PATHS,
    "data": PATHS,
    "device": "|cpu|cuda|cuda:9|mps|CPU|tpu|meta",
    "out": "|/dev/null|/dev/null/x|/proc/x|/proc/self/fd/1",
    "compile": "no",
    "spawn": "0|-1|1.5||x",
}
QUICK = {"steps": 3, "layers": 3, "embd": 64, "max_new_tokens": 9, "num_samples": 9}


def is_quick(name: str, text: str) -> bool:
    """Return whether a run with this value of a flag is short: the value is low, or an error."""
    try:
        highest = 2**63 if name in ("max_new_tokens", "num_samples") else 10**9
        return name not in QUICK or not QUICK[name] < float(text) < highest
    except ValueError:
        return True


def random_arguments(command: click.Command) -> Any:
    """Return a strategy for arguments: flags of a command with right and wrong values, and text."""

    def flag(param: click.Parameter) -> Any:
        known = [*VALUES.split("|"), *getattr(param.type, "choices", [])]
        if param.name in SPECIAL:
            value = st.sampled_from(SPECIAL[param.name].split("|"))
        else:
            value = st.sampled_from(known) | st.integers().map(str) | st.floats().map(str)
            value = (value | text).filter(lambda text: is_quick(param.name, text))
        return st.tuples(st.just(param.opts[0]), value)

    # An argument of a process has no null character.
    text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=4)
    flags = st.one_of([flag(param) for param in command.params])
    pairs = st.lists(flags | flags | flags | st.tuples(text), max_size=5)
    return pairs.map(lambda pairs: [word for pair in pairs for word in pair])


def test_random_arguments_work_or_give_one_line(request, text, tmp_path):
    """A mistake is an error of one line, and nothing is written."""
    count = 2000 if request.config.option.markexpr == "torture" else 40
    commands = {"": program.cli, **program.cli.commands}
    trained, seen = tmp_path / "trained", 0
    assert run(*TINY, "--data", text, "--steps", 2, "--out", trained).code == 0

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=HealthCheck,
    )
    @given(st.data())
    def trial(data: Any) -> None:
        nonlocal seen
        seen += 1
        name, out = data.draw(st.sampled_from([*commands, "", "", ""])), tmp_path / f"{seen}"
        start = [*TINY, "--data", text, "--out", out, "--steps", 2]
        if name:
            start = [name, "--out", trained]
        before = {*ROOT.glob("[!.]*")}
        ran = run(*start, *data.draw(random_arguments(commands[name])))
        assert "Traceback" not in ran.err, ran
        assert ran.code in (0, 2), ran
        if ran.code == 2 and "not finite" not in ran.err:
            assert ran.err.startswith("Error: ") and ran.err.count("\n") == 1, ran
            assert ran.out == "" and not out.exists(), ran
        assert {*ROOT.glob("[!.]*")} == before, ran

    trial()


# ---------------------------------------------------------------------------------------- many steps


def resources() -> tuple[float, int, int, int]:
    """Return of this process: MB resident, memory blocks of Python, open handles, threads."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    handles, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6, sys.getallocatedblocks(), handles, threads


def test_a_million_steps_take_no_more_resources(request):
    """The ordinary test with its 5,000 steps finds a leak of 250 bytes per step, or of one Python object in 20 steps."""
    torture = request.config.option.markexpr == "torture"
    steps, taken = 1_000_000 if torture else 5_000, []
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    batches = (([torch.ones(2, 4)], 2) for _ in range(steps))

    def loss_fn(model: nn.Module, x: torch.Tensor) -> Any:
        return model(x).square().sum(), len(x)

    for step, _ in loop.train_(model, [optimizer], batches, loss_fn):
        if step in (steps // 5, steps):
            taken.append(resources())
    (memory, blocks, *others), (memory_then, blocks_then, *others_then) = taken
    assert others == others_then and blocks_then < blocks + steps // 25, taken
    assert memory_then < memory + (4 if torture else 1), taken
