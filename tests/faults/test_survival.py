"""Faults from outside the program, in counted trials. A few of each here, all with -m torture.

The program is killed, asked to stop, started twice, its data change, its environment is unusual, its
arguments are random; and in the last test all of this at once.
"""

import gc
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from conftest import (
    PYTHON,
    ROOT,
    TABLE,
    TINY,
    Program,
    Ran,
    checkpoints,
    losses,
    random_place,
    run,
    same,
    same_training,
    signalled,
    state,
    torchrun,
    wait_for,
)
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import loop

pytestmark = pytest.mark.torture
STEPS = 100  # of a whole run, see `flags` in conftest.py
FAULTS = 10  # in one chain of starts
LAUNCH: dict[str, tuple[list[object], list[str], int]] = {  # more flags, launcher, number of ranks
    "python": ([], PYTHON, 1),
    "spawn": (["--spawn", 2], PYTHON, 2),
    "torchrun": ([], torchrun(2), 2),
}


# -------------------------------------------------------------------------------- one run, many faults


def chain(
    number: int,
    folder: Path,
    launch: str,
    flags: list[object],
    undisturbed: Callable[[int], Path],
    signal_of: Callable[[random.Random], str],
    check: Callable[[Ran, int, Path, str], bool],
    limit: float = math.inf,
) -> None:
    """Start a run again and again until FAULTS signals have hit it, and then let it end.

    It must then have the same weights, bitwise, as a run that nothing disturbed. If a run ends before
    its signal comes, it is checked and a new run starts; that signal does not count.

    signal_of(chance) returns TEST_SIGNAL, see signalled.py. check(what the program printed, the step
    that was reached before, the folder, the place of the signal) returns whether the signal has hit
    the program. limit: seconds from the signal to the end of the program.
    """
    more, launcher, ranks = LAUNCH[launch]
    place = folder / f"place {number}"
    chance, out, reached, hits = random.Random(number), folder / f"{launch} {number}", 0, 0
    command = [*flags, *more, "--out", out]
    for _ in range(4 * FAULTS):
        is_last = hits == FAULTS
        how = {"launcher": launcher} if is_last else signalled(launcher, signal_of(chance), place)
        place.write_text("none")
        ran = run(*command, **how, seconds=200)
        hit = place.read_text()
        assert "set aside" not in ran.err and f'File "{ROOT}/run.py' not in ran.err, ran
        if ran.code == 0:
            assert [step for step, _ in losses(out)] == list(range(1, STEPS + 1)), ran
            assert same_training(out, undisturbed(ranks)), ran
            shutil.rmtree(out)
            reached = 0
            if is_last:
                return
        else:
            assert not is_last and hit != "none", ran
            assert time.time() - place.stat().st_mtime < limit, ran
            hits += check(ran, reached, out, hit)
            reached = max(reached, *logged_steps(ran))
    pytest.fail(f"only {hits} of {FAULTS} faults hit the program")


def logged_steps(ran: Ran) -> list[int]:
    """Return 0 and the steps that a program has printed."""
    return [0, *map(int, re.findall(r"^step (\d+)/", ran.out, re.MULTILINE))]


def send(pid: int, number: int) -> None:
    """Send a signal to a process. It is no error if it has ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


KILLED = {  # launcher, the target in signalled.py, number of chains: a few, or with -m torture
    "the process of plain python": ("python", "self", 2, 70),
    "a rank of --spawn": ("spawn", "self", 0, 12),
    "the --spawn parent": ("spawn", "parent", 0, 12),
    "all processes of --spawn": ("spawn", "group", 0, 12),
    "the torchrun agent": ("torchrun", "parent", 0, 6),
}


@pytest.mark.parametrize("who", KILLED)
def test_a_killed_run_continues_from_its_last_save(who, trials, flags, undisturbed, tmp_path):
    launch, target, few, many = KILLED[who]

    def kill(chance: random.Random) -> str:
        rank, place = chance.randrange(LAUNCH[launch][2]), random_place(chance)
        if "save" in place:
            rank = 0  # the only one that writes
        return f"{rank} {place} {signal.SIGKILL:d} {target}"

    def trial(number: int) -> None:
        every = random.Random(-number).choice([1, 3, 10])

        def check(ran: Ran, reached: int, out: Path, place: str) -> bool:
            """An unfinished write is lost, but not the checkpoint before it. (finish() has checked
            that no process is left.)"""
            assert ran.code in (-signal.SIGKILL, 1), ran
            first = min(logged_steps(ran)[1:], default=STEPS)
            assert first > ((reached - 1) // every - 1) * every, (reached, every, ran)
            return True

        command = [*flags, "--save-every", every]
        chain(number, tmp_path, launch, command, undisturbed, kill, check)

    trials(f"SIGKILL of {who}, at random places", trial, few, many, each=FAULTS)


@pytest.mark.parametrize("where", ["0 main 9000", "5 main 5000", "0 save 20000"])
def test_a_signal_comes_at_the_same_place_in_every_run(where, flags, tmp_path):
    places = []
    for number in range(2):
        how = signalled(PYTHON, f"0 {where} 9 self", tmp_path / f"place {number}")
        ran = run(*flags, "--save-every", 3, "--out", tmp_path / f"{number}", **how)
        step, *place = (tmp_path / f"place {number}").read_text().split()
        places.append(place if "save" in place else [step, *place])
        assert ran.code == -signal.SIGKILL, ran
    assert places[0] == places[1] and len(places[0]) >= 3, places


ASKED = {  # launcher: possible ranks and targets of the signal, number of chains (two), more flags
    "python": (["0 self"], 2, 20, []),
    "spawn": (["0 parent", "1 group", "1 self"], 0, 8, []),
    "torchrun": (["0 parent", "1 self"], 0, 2, []),
    "python --compile": (["0 self"], 0, 1, ["--compile"]),
}


@pytest.mark.parametrize("how", ASKED)
def test_a_run_that_is_asked_to_stop_saves_its_last_step(how, trials, flags, undisturbed, tmp_path):
    targets, few, many, more = ASKED[how]
    limit = 10 + 30 * ("--compile" in more)

    def stop(chance: random.Random) -> str:
        rank, target = chance.choice(targets).split()
        signals = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
        if (how, target) == ("torchrun", "parent"):  # SIGUSR1 just ends torchrun's agent
            signals.remove(signal.SIGUSR1)
        # A compilation makes some million calls, all in the first step.
        place = f"0 main {chance.randint(1, 3_000_000)}" if more else random_place(chance)
        if rank == "1":  # it has no thread that saves
            place = place.replace("save", "main")
        return f"{rank} {place} {chance.choice(signals):d} {target}"

    def check(ran: Ran, reached: int, out: Path, place: str) -> bool:
        last, (step, thread, *_) = logged_steps(ran)[-1], place.split()
        if how == "python" and thread == "main":  # it asks for signals once per step
            assert last <= max(int(step), reached) + 2, (place, ran)
        assert last > reached and state(out)["step"] == last, ran
        expected = f"Stopped as asked,? after step {last} of {STEPS}; start again to continue"
        assert re.match(expected, ran.out.splitlines()[-1]), ran
        if how != "torchrun":  # which has an exit code and a report of its own
            assert (ran.code, ran.err) == (3, ""), ran
        return True

    def undisturbed_compiled(_: int) -> Path:
        """Return the folder of an undisturbed run that is compiled, because that rounds differently."""
        if not (tmp_path / "whole").exists():
            assert run(*flags, *more, "--out", tmp_path / "whole", seconds=200).code == 0
        return tmp_path / "whole"

    def trial(number: int) -> None:
        command = [*flags, "--save-every", 2, "--eval-every", 3, *more]
        whole = undisturbed_compiled if more else undisturbed
        chain(number, tmp_path, how.split()[0], command, whole, stop, check, limit)

    trials(f"SIGTERM, SIGINT, SIGUSR1 to {how}, at random places", trial, few, many, each=FAULTS)


# ------------------------------------------------------------------------------ two runs, one folder


def complete(out: Path, whole: Path, *command: object, **how: Any) -> Ran:
    """Let a run come to its end; check that it is bitwise equal to `whole`."""
    ran = run(*command, "--out", out, **how)
    assert ran.code == 0 and ran.err == "", ran
    assert same_training(out, whole), ran
    return ran


def test_a_second_run_in_a_folder_is_refused_until_the_first_ends(
    trials, flags, undisturbed, tmp_path
):
    def trial(number: int) -> None:
        chance, out = random.Random(number), tmp_path / f"{number}"
        lock, link = out / ".lock", out.with_suffix(".link")
        link.symlink_to(out)  # another name of the folder
        with Program(*flags, "--out", out) as first:
            first.read_lines(chance.randint(0, 8))
            wait_for(lambda: lock.exists() and lock.read_text(), "the lock")
            second = run(*flags, "--out", chance.choice([out, link]))
            assert second.code == 2 and second.err.count("\n") == 1 and second.out == "", second
            holder = f"{re.escape(socket.gethostname())}, pid {first.process.pid}, since 20"
            assert re.search(f"in use by another run: {holder}", second.err), second
            if chance.random() < 0.5:
                first.process.kill()
            first.finish()
        complete(out, undisturbed(1), *flags)

    trials("two runs on one folder, and the next once the first is dead", trial, 1, 20)


def test_of_two_runs_that_start_together_one_is_refused(trials, flags, tmp_path):
    def trial(number: int) -> None:
        command = [*flags, "--out", tmp_path / f"{number}"]
        with Program(*command) as one, Program(*command) as other:
            ends = sorted([one.finish(), other.finish()])
        assert [ran.code for ran in ends] == [0, 2] and ends[1].err.count("\n") == 1, ends
        refused = "in use by another run|another run has just written to it"
        assert re.search(refused, ends[1].err), ends

    trials("two runs started together on one folder", trial, 1, 20, at_once=1)


# -------------------------------------------------------------------------------------- changed data


def write_data(folder: Path, kind: str, text: Path) -> list[object]:
    """Write the text as a file of this kind; return the flags that read it."""
    raw = np.frombuffer(text.read_bytes(), np.uint8)
    data = folder / {"char": "a.txt", "byte": "b.txt", "bin": "c.bin", "npy": "d.npy"}[kind]
    if kind == "npy":
        np.save(data, raw.astype(np.uint32))
    else:
        data.write_bytes((raw.astype("<u2") if kind == "bin" else raw).tobytes())
    return ["--data", data, "--tokenizer", "byte" if kind == "byte" else "char"]


def cut(data: Path, chance: random.Random) -> None:
    os.truncate(data, chance.choice([0, data.stat().st_size // 4 * 2]))


def grow(data: Path, chance: random.Random) -> None:
    data.write_bytes(data.read_bytes() + b"  ")


def alter(data: Path, chance: random.Random) -> None:
    content = bytearray(data.read_bytes())
    content[chance.randrange(200, len(content)) // 2 * 2] ^= 1
    with open(data, "r+b") as file:
        file.write(content)


def replace(data: Path, chance: random.Random) -> None:
    other = data.with_name(f"other-{data.name}")
    shutil.copy(data, other)
    alter(other, chance)
    os.replace(other, data)


def delete(data: Path, chance: random.Random) -> None:
    data.unlink()


KINDS, CHANGES = ("char", "byte", "bin", "npy"), (cut, grow, alter, replace, delete)


def test_data_that_changed_between_stop_and_resume_is_refused(trials, flags, text, tmp_path):
    cases = [(kind, change) for kind in KINDS for change in CHANGES]

    def trial(number: int) -> None:
        kind, change = cases[number * 7 % len(cases)]
        folder, out = tmp_path / f"{number}", tmp_path / f"{number}" / "out"
        folder.mkdir()
        reads = write_data(folder, kind, text)
        assert run(*flags, *reads, "--steps", 10, "--out", out).code == 0
        before = {path.name: path.read_bytes() for path in out.iterdir()}
        change(reads[1], random.Random(number))
        ran = run(*flags, *reads, "--out", out)
        about = (kind, change.__name__, ran)
        assert ran.code == 2 and ran.err.count("\n") == 1 and reads[1].name in ran.err, about
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before, about

    name = "data cut, grown, altered, replaced or deleted between stop and resume"
    trials(name, trial, 3, 50)


def test_mapped_data_that_changes_during_the_training_is_noticed_at_the_next_save(
    trials, flags, text, tmp_path
):
    """The run then ends, saves nothing of what it computed from the changed data, and, with the old
    data, comes to the same end as a run that nothing disturbed."""
    large, mapped = tmp_path / "large.txt", ("byte", "bin", "npy")
    large.write_bytes(text.read_bytes() * 250)  # chardata.py maps files above 1 MiB
    flags = [*flags, "--eval-tokens", 500]
    cases = [(kind, change) for kind in mapped for change in CHANGES]
    undisturbed_of = {}
    for kind in mapped:
        undisturbed_of[kind] = tmp_path / kind / "out"
        (tmp_path / kind).mkdir()
        reads = write_data(tmp_path / kind, kind, large)
        assert run(*flags, *reads, "--out", undisturbed_of[kind]).code == 0

    def trial(number: int) -> None:
        kind, change = cases[number * 7 % len(cases)]
        chance, folder, out = (
            random.Random(number),
            tmp_path / f"{number}",
            tmp_path / f"{number}/out",
        )
        folder.mkdir()
        reads = write_data(folder, kind, large)
        good = shutil.copy(reads[1], folder / "good")
        command = [*flags, *reads, "--save-every", 3, "--eval-every", 5]
        with Program(*command, "--out", out) as program:
            program.read_lines(chance.randint(5, 40))
            change(reads[1], chance)
            ran = program.finish()
        about = (kind, change.__name__, ran)
        if change is cut and ran.code == -signal.SIGBUS:  # it has read beyond the end of the file
            assert "Bus error" in ran.err and "chardata.py" in ran.err, about
        else:
            assert ran.code == 2 and ran.err.count("\n") == 1, about
            too_high = change is alter and kind == "npy" and "the tokens have the id" in ran.err
            assert reads[1].name in ran.err or too_high, about
        os.replace(good, reads[1])
        complete(out, undisturbed_of[kind], *command)

    name = "mapped data cut, grown, altered, replaced or deleted while training"
    trials(name, trial, 3, 50)


def test_a_text_file_may_change_during_the_training(flags, undisturbed, text, tmp_path):
    """It is in memory."""
    data = Path(shutil.copy(text, tmp_path / "text.txt"))
    with Program(*flags, "--data", data, "--out", tmp_path / "out") as program:
        program.read_lines(5)
        data.write_text("something else")
        ran = program.finish()
    assert ran.code == 0 and ran.err == "", ran
    assert same_training(tmp_path / "out", undisturbed(1)), ran


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
UNICODE = """cd '{folder}' && mkdir 'a ü 📁' && cd 'a ü 📁' && cp {text} 'té xt.txt' &&
    exec "$@" --data 'té xt.txt' --out 'öut 1'"""
READ_ONLY = """mount --bind {root} {root} && mount -o remount,ro,bind {root} &&
    hostname elsewhere && exec "$@" """
ENVIRONMENTS: dict[str, str | dict[str, str | None]] = {  # a shell script, or variables
    "the clock runs backwards": {"LD_PRELOAD": "{folder}/backwards.so"},
    "a path with spaces and Unicode": UNICODE,
    "a read-only code folder, another hostname": READ_ONLY,
    "no TMPDIR": {"TMPDIR": "/no/such"},
    "no HOME": {"HOME": None},
    "a HOME that does not exist": {"HOME": "/no/such"},
    "hash seed 1": {"PYTHONHASHSEED": "1"},
    "hash seed 4294967295": {"PYTHONHASHSEED": "4294967295"},
    "locale C": {"LC_ALL": "C"},
    "only ASCII": {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    "a terminal of one column": {"COLUMNS": "1", "TERM": "dumb", "NO_COLOR": "1"},
    "no PATH": {"PATH": None},
    **{f"ulimit {limit}": f'ulimit {limit} && exec "$@"' for limit in LIMITS.split(",")},
}


def test_in_an_unusual_environment_it_works_or_says_in_one_line_why_not(
    trials, flags, undisturbed, text, tmp_path
):
    """If it does not work, the run continues in the usual environment."""
    environments = dict(ENVIRONMENTS)
    if os.geteuid():
        del environments["a read-only code folder, another hostname"]
    if shutil.which("gcc"):
        source, library = tmp_path / "backwards.c", tmp_path / "backwards.so"
        source.write_text(BACKWARDS)
        gcc = ["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"]
        subprocess.run(gcc, check=True)
    else:
        del environments["the clock runs backwards"]

    def trial(number: int) -> None:
        name, how = list(environments.items())[number]
        folder, out = tmp_path / f"{number}", tmp_path / f"{number}" / "out"
        folder.mkdir()
        launcher, env = [sys.executable, f"{ROOT}/run.py"], dict[str, str | None]()
        if isinstance(how, str):
            script = how.format(folder=folder, text=text, root=ROOT)
            unshare = ["unshare", "--mount", "--uts"] if "mount" in script else []
            launcher = [*unshare, "bash", "-c", script, "bash", *launcher]
        else:
            env = {key: value and value.format(folder=tmp_path) for key, value in how.items()}
        with Program(*flags, "--out", out, launcher=launcher, env=env) as program:
            ran = program.finish()
        lines = ran.err.splitlines()
        if ran.code == 0:
            assert not lines or name == "ulimit -i 0" and "Traceback" not in ran.err, (name, ran)
        elif ran.code != -signal.SIGKILL:  # with SIGKILL the system says that the CPU time is over
            known = "Warning|OpenBLAS|libgomp|Error: the checkpoint of step 100 was not written$"
            known_lines = [re.match(known, line) for line in lines]
            assert len(lines) == 1 or lines and all(known_lines), (name, ran)
            assert sum(line.startswith("Error") for line in lines) <= 1, (name, ran)
        places = (out, folder / "a ü 📁" / "öut 1")
        done = next((place for place in places if checkpoints(place)), out)
        if ran.code:
            complete(done, undisturbed(1), *flags)
        assert same_training(done, undisturbed(1)), (name, ran)

    trials("strange clock, host, paths, environment, limits", trial, 3, len(environments))


# ---------------------------------------------------------------------------------- random arguments

WHOLE = ["0", "1", "2", "-1", "3.5", "1e3", "0x10", "1_0", "٣", "²", "", " ", "nan", "None"]
WHOLE += ["9" * 30, f"{2**63}", f"-{2**64}"]
REAL = [*WHOLE, "0.5", "1e-320", "1e308", "1e309", "-0.0", "inf", "-inf", "1,5", "1e", "٠.٥"]
PATHS = [
    "",
    "/dev/null",
    "/dev/null/x",
    "/dev/zero",
    "/proc/self/mem",
    "/proc/x",
    "/",
    ".",
    "no*such",
]
PATHS += ["[", "~", "\udcff", "://", "s3://", "file://", "http://[", "memory://a", "README.md", "-"]
PATHS += ["--"]
SPECIAL = {
    "config": PATHS,
    "data": PATHS,
    "device": ["", "cpu", "cuda", "cuda:9", "mps", "CPU", "tpu", "meta"],
    "out": ["", "/dev/null", "/dev/null/x", "/proc/x", "/proc/self/fd/1"],
}
QUICK = {"steps": 3, "layers": 3, "embd": 64, "spawn": 0, "max_new_tokens": 9, "num_samples": 9}


def as_argument(text: str) -> str:
    """Return the text without what cannot be in an argument of a process."""
    return text.replace("\0", "").encode("utf-8", "replace").decode()


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
        if param.name == "compile":  # which takes half a minute if it is meant
            return st.tuples(st.just("--no-compile"))
        name = st.just(param.opts[0])
        if param.name == "out":
            return st.tuples(name, st.sampled_from(SPECIAL["out"]))
        values = SPECIAL.get(param.name, [*REAL, *getattr(param.type, "choices", [])])
        numbers = st.integers().map(str) | st.floats().map(str)
        value = (st.sampled_from(values) | numbers | st.text(max_size=4)).map(as_argument)
        return st.tuples(name, value.filter(partial(is_quick, param.name)))

    flags = st.one_of([flag(param) for param in command.params])
    text = st.text(min_size=1, max_size=6).map(lambda text: (as_argument(text),))
    pairs = st.lists(flags | flags | flags | text, max_size=5)
    return pairs.map(lambda pairs: [word for pair in pairs for word in pair])


def test_random_arguments_work_or_give_one_line(request, flags, text, tmp_path):
    """A mistake is an error of one line, and nothing is written."""
    import run as program

    count = 2000 if request.config.option.markexpr == "torture" else 15
    commands = {"": program.cli, **program.cli.commands}
    trained, began, seen = tmp_path / "trained", time.monotonic(), 0
    assert run(*TINY, "--data", text, "--steps", 2, "--out", trained).code == 0
    phases = [Phase.generate, Phase.shrink]

    @settings(max_examples=count, deadline=None, derandomize=True, database=None, phases=phases)
    @given(st.data())
    def trial(data: Any) -> None:
        nonlocal seen
        seen += 1
        name = data.draw(st.sampled_from([*commands, "", "", ""]))
        out = tmp_path / f"{seen}"
        start = [*TINY, "--data", text, "--out", out, "--steps", 2]
        if name:
            start = [name, "--out", trained]
        before = {*ROOT.glob("[!.]*")}
        ran = run(*start, *data.draw(random_arguments(commands[name])))
        assert "Traceback" not in ran.err, ran
        diverged = ran.code == 1 and "not finite" in ran.err
        assert ran.code in (0, 2) or diverged, ran
        if ran.code == 2:
            assert ran.err.startswith("Error: ") and ran.err.count("\n") == 1, ran
            assert ran.out == "" and not out.exists(), ran
        assert {*ROOT.glob("[!.]*")} == before, ran

    trial()
    row = ("nonsense flags, by hypothesis", seen, seen, time.monotonic() - began)
    request.config.stash[TABLE].append(row)


# ---------------------------------------------------------------------------------------- many steps


def squared_error(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Any:
    x, y = batch
    return (model(x) - y).square().sum(), len(x)


def resources() -> tuple[float, int, int, int]:
    """Return of this process: MB resident, memory blocks of Python, open handles, threads."""
    gc.collect()
    resident = (
        int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    )
    handles, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    return resident, sys.getallocatedblocks(), handles, threads


def test_a_million_steps_take_no_more_resources(request):
    """The ordinary test with its 5,000 steps finds a leak of 250 bytes per step, or of one Python
    object in 20 steps."""
    torture = request.config.option.markexpr == "torture"
    steps, began = 1_000_000 if torture else 5_000, time.monotonic()
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    batches = (([(torch.ones(2, 4), torch.zeros(2, 1))], 2) for _ in range(steps))
    taken = []
    for step, report in loop.train_(model, [optimizer], batches, squared_error):
        if step in (steps // 5, steps):
            taken.append(resources())
    assert step == steps and report.loss.isfinite()
    (memory, blocks, *others), (memory_then, blocks_then, *others_then) = taken
    assert others == others_then and blocks_then < blocks + steps // 25, taken
    assert memory_then < memory + (4 if torture else 1), taken
    row = ("steps of a one-layer model, all flat", steps, steps, time.monotonic() - began)
    request.config.stash[TABLE].append(row)


# ---------------------------------------------------------------------------------- all of it at once


def kill_a_rank(program: Program, out: Path) -> None:
    send((program.children() or [program.process.pid])[-1], signal.SIGKILL)


def kill_the_parent(program: Program, out: Path) -> None:
    program.process.kill()


def ask_to_stop(program: Program, out: Path) -> None:
    program.process.terminate()


def stop_a_rank_for_a_while(program: Program, out: Path) -> None:
    for pid in program.children()[:1]:
        send(pid, signal.SIGSTOP)
        time.sleep(3)
        send(pid, signal.SIGCONT)
    ask_to_stop(program, out)


def fill_the_disk_for_a_while(program: Program, out: Path) -> None:
    filler = out.parent / "filler"
    try:
        with open(filler, "wb") as file:
            while file.write(bytes(1 << 20)):
                file.flush()
    except OSError:
        program.read_lines(30)
    filler.unlink()
    ask_to_stop(program, out)


def damage_the_newest_checkpoint(program: Program, out: Path) -> None:
    program.process.kill()
    if program.finish().code == 0:  # it had ended, and its result will be compared
        return
    for path in checkpoints(out)[-1:]:
        with open(path, "r+b") as file:
            file.seek(path.stat().st_size // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))


def start_a_second_run(program: Program, out: Path) -> None:
    assert run("--out", out).code == 2 or program.process.poll() is not None
    ask_to_stop(program, out)


DISTURBANCES = [
    kill_a_rank,
    kill_the_parent,
    ask_to_stop,
    stop_a_rank_for_a_while,
    fill_the_disk_for_a_while,
    damage_the_newest_checkpoint,
    start_a_second_run,
]


def assert_same_end(out: Path, whole: Path) -> None:
    """As same_training, but a full disk may have cost some lines of metrics."""
    ours, theirs = state(out), state(whole)
    assert ours["config"] == theirs["config"]
    assert losses(out) and {*losses(out)} <= {*losses(whole)}
    assert {key for key in ours if not same(ours[key], theirs[key])} <= {"scaler"}


def test_soak(request, tmp_path):
    """Train the default model on two ranks for half an hour, on a small disk, with random faults."""
    if request.config.option.markexpr != "torture" or os.geteuid():
        pytest.skip("takes half an hour, and root to mount a small disk; only with -m torture")
    whole, disk = tmp_path / "whole", tmp_path / "disk"
    out, chance, hits, finished = disk / "out", random.Random(0), 0, 0
    command = ["--spawn", 2, "--epochs", 2, "--save-every", 20, "--log-every", 1]
    assert run(*command, "--out", whole, seconds=900).code == 0
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=120m", "tmpfs", disk], check=True)
    try:
        began = time.monotonic()
        while time.monotonic() < began + 30 * 60 or hits == 0:
            with Program(*command, "--out", out, seconds=300) as program:
                program.read_lines(chance.randint(0, 200))
                chance.choice(DISTURBANCES)(program, out)
                ran = program.finish()
            hits += ran.code != 0  # a run that had already ended was not hit
            assert "Traceback" not in ran.err, ran
            for path in out.glob("*.damaged"):
                path.unlink()
            if ran.code == 0:
                finished += 1
                assert_same_end(out, whole)
                shutil.rmtree(out)
        ran = run(*command, "--out", out, seconds=900)
        assert ran.code == 0, ran
        assert_same_end(out, whole)
    finally:
        subprocess.run(["umount", disk], check=True)
    fault = f"soak: the default run on two ranks, all at random, {finished + 1} runs to their end"
    request.config.stash[TABLE].append((fault, hits, hits, time.monotonic() - began))
