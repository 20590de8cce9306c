"""Promise 5: no checkpoint is lost, torn or wrongly rejected, whatever the disk does.

strace records the system calls of real saves and lets them fail. A power cut is simulated on a model
of a disk that keeps no more than POSIX promises: the content of a file is durable after an fsync of
the file, and a change of names after an fsync of the folder. A power cut keeps any of the other
changes, and of a file that was not synced it keeps nothing, half, zeros or all.
"""

import itertools
import os
import random
import re
import select
import shutil
import signal
import subprocess
import traceback
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import checkpoints, contents, same
from signalled import is_same, run_ranks

import ckpt

pytestmark = pytest.mark.torture
STRACE = ["strace", "-f", "-y", "-e", "signal=none"]


@pytest.fixture(autouse=True)
def strace_works() -> None:
    if (
        not shutil.which("strace")
        or subprocess.run([*STRACE, "-o", "/dev/null", "true"]).returncode
    ):
        pytest.skip("strace is missing, or not permitted")


@cache
def make_state(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {"model": {"w": torch.randn(9000, generator=generator)}, "step": step}


def mark(folder: Path, text: str) -> None:
    """Put a mark into the recording of the calling process."""
    os.access(folder / f"mark {text}", os.F_OK)


def trace(job: Callable[[], Any], log: Path, *options: str) -> tuple[int, list[str]]:
    """Call job() in a fork, under strace; return its exit code and its system calls.

    The code is 0, 1 after an OSError, or negative after a signal.
    """
    ready, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(go)
            select.select([ready], [], [])  # ends when strace is attached
            torch.set_num_threads(1)  # a fork has no threads of OpenMP
            signal.alarm(120)
            job()
            os._exit(0)
        except OSError:
            os._exit(1)
        except BaseException:
            traceback.print_exc()
            os._exit(99)
    command = [*STRACE, "-s", "0", "-o", log, *options, "-p", f"{pid}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
        assert "attached" in strace.stderr.readline()
        os.close(ready), os.close(go)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        strace.communicate()
    return code, [line.split(maxsplit=1)[1] for line in log.read_text().splitlines()]


def check(folder: Path, saved: int, begun: int, damaged: frozenset[str] = frozenset()) -> int:
    """Check all checkpoints; return the newest step, which is at least the last that was saved."""
    entry, found, rejected = ckpt.newest(f"{folder}", ckpt.list_checkpoints(f"{folder}"))
    step = entry.step if entry else 0
    assert saved <= step <= begun, (saved, step, begun)
    assert not entry or same(found, make_state(step))
    assert rejected.keys() <= damaged, rejected
    return step


# -------------------------------------------------------------------------------------- power cuts

# System calls that change nothing, or nothing that a checkpoint needs.
HARMLESS = "read lseek fstat newfstatat close access ioctl getdents64 flock mkdir fcntl".split()
Names = dict[str, int]  # of the files in a folder; a file is a number


def save_three(folder: Path) -> None:
    with ckpt.lock(f"{folder}"):
        for step in (1, 2, 3):
            mark(folder, f"begun {step}")
            ckpt.save(f"{folder}", make_state(step), step, keep=1)
            mark(folder, f"saved {step}")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> tuple[list[tuple[str, ...]], dict[str, bytes]]:
    """Return the operations of three saves, of which each deletes the one before, and all files."""
    folder, whole = tmp_path_factory.mktemp("power"), tmp_path_factory.mktemp("whole")
    files = {}
    for step in (1, 2, 3):
        entry = ckpt.save(f"{whole}", make_state(step), step)
        files[entry.name] = (whole / entry.name).read_bytes()
    code, lines = trace(partial(save_three, folder), folder.with_name("log"))
    assert code == 0
    operations = []
    for line in lines:
        paths = re.findall(rf"{folder}/?([^\">]*)[\">]", line)
        call, result = line.partition("(")[0], re.search(r"\) += (-?\d+)", line)
        if "/mark " in line:
            operations.append(("mark", *paths[0].split()[1:]))
        elif paths and result and int(result[1]) >= 0 and call not in HARMLESS:
            if call != "openat" or "O_CREAT" in line:
                operations.append((call, *paths[: 1 + (call == "rename")]))
    return operations, files


def power_cuts(
    operations: list[tuple[str, ...]], files: dict[str, bytes]
) -> Iterator[tuple[dict[str, bytes], int, int]]:
    """Yield (content of the folder, step saved, step begun) for each state that a cut can leave."""
    durable, pending, now = Names(), list[tuple[str, ...]](), Names()
    target, torn, numbers = dict[int, str](), set[int](), itertools.count()
    marks = {"saved": 0, "begun": 0}

    def change(names: Names, call: str, name: str, *more: Any) -> None:
        if call == "openat":
            names[name] = more[0]
        elif call == "rename":
            names.pop(name, None)
            names[more[0]] = more[1]
        else:
            names.pop(name, None)

    for call, *paths in operations:
        if call == "mark":
            marks[paths[0]] = int(paths[1])
        elif call == "write":
            torn.add(now[paths[0]])
        elif call == "fsync" and paths[0]:
            torn.discard(now[paths[0]])
        elif call == "fsync":
            durable, pending = dict(now), []
        else:
            assert call in ("openat", "rename", "unlink"), f"the model does not know {call}"
            file = next(numbers) if call == "openat" else now[paths[0]]
            pending.append((call, *paths, file))
            change(now, *pending[-1])
            if call == "rename":
                target[file] = paths[1]
        for kept in itertools.product([False, True], repeat=len(pending)):
            names = dict(durable)
            for _, operation in filter(lambda pair: pair[0], zip(kept, pending)):
                change(names, *operation)
            variants = []
            for file in names.values():
                whole = files.get(target.get(file, ""), b"")
                half = whole[: len(whole) // 2]
                variants.append([b"", half, bytes(len(whole)), whole] if file in torn else [whole])
            for chosen in itertools.product(*variants):
                yield dict(zip(names, chosen)), marks["saved"], marks["begun"]


def check_power_cuts(operations: Any, files: Any, folder: Path) -> int:
    """Check each state, and that the next run can save. Return the number of different states."""
    states = {(frozenset(names.items()), *steps) for names, *steps in power_cuts(operations, files)}
    for names, saved, begun in states:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, content in names:
            (folder / name).write_bytes(content)
        step = check(folder, saved, begun)
        with ckpt.lock(f"{folder}"):
            ckpt.save(f"{folder}", make_state(step + 1), step + 1, keep=1)
        assert [path.name[:13] for path in folder.glob("[!.]*")] == [f"step-{step + 1:08d}"]
        assert not [*folder.glob(f"{ckpt.TEMPORARY}*")]
    return len(states)


def test_a_power_cut_between_any_two_system_calls_of_a_save_loses_nothing(recorded, tmp_path):
    """At each moment, the newest checkpoint on the disk loads, and is not older than the last save."""
    assert check_power_cuts(*recorded, tmp_path / "disk") > 20


@pytest.mark.parametrize("what", ["the file", "the folder"])
def test_a_save_without_an_fsync_would_fail_the_test_before(what, recorded, tmp_path):
    """Otherwise, the model of the disk would be too kind."""
    operations, files = recorded
    left = [o for o in operations if o[0] != "fsync" or bool(o[1]) == (what == "the folder")]
    assert len(left) == len(operations) - 3
    with pytest.raises((AssertionError, ValueError)):
        check_power_cuts(left, files, tmp_path / "disk")


# ---------------------------------------------------------------------------- failing system calls


def flip(path: Path, chance: random.Random) -> None:
    """Change one bit of a file."""
    raw = bytearray(path.read_bytes())
    raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
    path.write_bytes(raw)


def continue_run(folder: Path) -> None:
    """Do what a run does: find the newest checkpoint, set damaged ones aside, save, append."""
    entry, _, rejected = ckpt.newest(f"{folder}", ckpt.list_checkpoints(f"{folder}"))
    with ckpt.lock(f"{folder}"):
        for name in rejected:
            ckpt.set_aside(f"{folder}", name)
        ckpt.save(f"{folder}", make_state(entry.step + 1), entry.step + 1, keep=1)
        ckpt.append_text(f"{folder}", "metrics.jsonl", "{}\n")


def test_each_system_call_fails_once_or_for_ever(trials, tmp_path):
    """An error is raised or does no harm, and the next start finds the newest checkpoint and saves."""
    folder, log = tmp_path / "out", tmp_path / "log"
    with ckpt.lock(f"{folder}"):
        for step in (1, 2, 3):
            ckpt.save(f"{folder}", make_state(step), step)
    flip(checkpoints(folder)[-1], random.Random(0))
    damaged = frozenset([checkpoints(folder)[-1].name])
    (folder / f"{ckpt.TEMPORARY}1").write_bytes(b"left by a run that was killed")
    before = shutil.copytree(folder, tmp_path / "before")
    make_state(4)
    continue_run(folder)  # imports what it needs

    def attempt(*options: str) -> tuple[int, list[str]]:
        shutil.rmtree(folder)
        shutil.copytree(before, folder)
        return trace(partial(continue_run, folder), log, *options)

    code, lines = attempt()
    assert code == 0
    places, seen = list[tuple[str, int]](), dict[str, int]()
    for line in lines:
        call = line.partition("(")[0]
        seen[call] = seen.get(call, 0) + 1
        if f"{folder}" in line and call not in ("close", "lseek", "fcntl", "ioctl"):
            places.append((call, seen[call]))
    faults = [(place, fault) for place in places for fault in ("EIO", "ENOSPC", "EIO+", "SIGKILL")]
    random.Random(0).shuffle(faults)
    assert len(faults) > 100

    def trial(number: int) -> None:
        (call, at), fault = faults[number % len(faults)]
        how = f"{'signal' if fault == 'SIGKILL' else 'error'}={fault.rstrip('+')}"
        later = "+" * fault.endswith("+")
        code, lines = attempt("-e", f"inject={call}:{how}:when={at}{later}")
        about = call, at, fault, code, sorted(os.listdir(folder))
        assert code in (0, 1, -9) and (code == -9) == (fault == "SIGKILL"), about
        assert any("INJECTED" in line for line in lines) or code == -9, about
        aside = {path.name.removesuffix(".damaged") for path in folder.glob("*.damaged")}
        assert aside <= damaged, about
        step = check(folder, 3 if code == 0 else 2, 3, damaged)
        continue_run(folder)
        assert check(folder, step + 1, step + 1) == step + 1, about
        assert len(checkpoints(folder)) == 1 and not [*folder.glob(f"{ckpt.TEMPORARY}*")], about

    trials("a system call fails", trial, 40, len(faults), at_once=1)


# -------------------------------------------------------------------------------------- the program


def random_fault(chance: random.Random, out: Path) -> dict[str, str]:
    """Return arguments of run_ranks: system calls on the folder that fail, or a limit of file sizes."""
    if chance.random() < 0.2:
        return {"limit": f"{chance.randint(20_000, 39_000)}"}  # also of its output
    call = chance.choice(["openat", "write", "fsync", "fsync", "rename", "unlink"])
    first, errno = chance.randint(2, 9), chance.choice(["EIO", "ENOSPC"])
    when = chance.choice([f"{first}", f"{first}+", f"{first}..{first + 9}"])
    paths = f"-P {out} -P {out}/metrics.jsonl -P {out}/{ckpt.TEMPORARY}PID"
    return {"strace": f"{paths} -e trace={call} -e inject={call}:error={errno}:when={when}"}


def test_a_save_that_fails_is_reported_and_the_next_one_tries_again(flags, whole, trials, tmp_path):
    """The run continues. Its exit code is 1 if the last save failed. The next start repairs all."""
    whole(1)

    def trial(number: int) -> None:
        chance, out = random.Random(number), tmp_path / f"{number}"
        args = [*flags, "--save-every", chance.choice([5, 20]), "--out", out]
        fault = random_fault(chance, out)
        ended = run_ranks(args, **fault)
        about = number, fault, ended
        assert ended.codes in ([0], [1]) and "Traceback" not in ended.text, about
        entries = ckpt.list_checkpoints(f"{out}")
        for entry in entries:
            ckpt.load(f"{out}", entry)
        assert ended.codes == [1] or entries[-1].step == 100, about
        written = "checkpoint not written" not in ended.text
        assert not written or ended.codes == [0] or ended.text.startswith("Error: "), about
        if fault.get("limit"):  # the last line of the metrics is incomplete
            (out / "metrics.jsonl").unlink()
        again = run_ranks(args)
        assert again.codes == [0] and "Warning" not in again.text, (about, again)
        assert not any(".damaged" in name or ckpt.TEMPORARY in name for name in os.listdir(out)), (
            about
        )
        assert is_same(out, whole(1)), (about, again)

    trials("the disk of a run fails", trial, 6, 200)


def test_a_checkpoint_that_cannot_be_read_stops_the_program_and_nothing_changes(flags, tmp_path):
    """It may be good: to set it aside, or to continue from an older one, would lose steps."""
    out = tmp_path / "out"
    assert run_ranks([*flags, "--steps", 50, "--out", out]).codes == [0]
    before, newest = contents(out), checkpoints(out)[-1]
    for call in ("openat", "read"):
        strace = f"-P {newest} -e trace={call} -e inject={call}:error=EIO"
        ended = run_ranks([*flags, "--out", out], strace=strace)
        assert ended.codes == [1] and ended.text.count("\n") == 1, ended
        assert ended.text.startswith("Error: [Errno 5]") and newest.name in ended.text, ended
        assert contents(out) == before


def test_a_flipped_bit_is_noticed_and_the_checkpoint_before_is_used(flags, whole, trials, tmp_path):
    """A damaged checkpoint is named and set aside. If all are damaged, nothing changes."""
    saved = tmp_path / "saved"
    args = [*flags, "--save-every", 20, "--keep", 2, "--eval-every", 1000]
    assert run_ranks([*args, "--out", saved]).codes == [0]
    assert len(checkpoints(saved)) == 2

    def trial(number: int) -> None:
        chance, out = random.Random(number), shutil.copytree(saved, tmp_path / f"{number}")
        damaged = checkpoints(out)[-1:] if number % 3 else checkpoints(out)
        for path in damaged:
            if chance.random() < 0.3:
                os.truncate(path, chance.randrange(path.stat().st_size))
            else:
                flip(path, chance)
        before = contents(out)
        ended = run_ranks([*args, "--out", out])
        assert damaged[-1].name in ended.text and ended.text.count("damaged: ") == len(damaged), (
            ended
        )
        if len(damaged) > 1:
            assert ended.codes == [2] and contents(out) == before, ended
        else:
            assert ended.codes == [0] and "steps 81 to 100" in ended.text, ended
            aside = Path(f"{damaged[0]}.damaged")
            assert aside.read_bytes() == before[f"{damaged[0]}"] and is_same(out, whole(1)), ended

    trials("a damaged checkpoint", trial, 3, 60)
