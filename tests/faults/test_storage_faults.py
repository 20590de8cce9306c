"""Promise 5, in counted trials: what happens to checkpoints when the disk fails.

Also: checkpoints that are damaged or replaced. Power cuts are in test_power_cuts.py.
"""

import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Program, checkpoints, run, same, same_training, wait_for
from test_power_cuts import attach_strace

import ckpt

torch.set_num_threads(1)  # the tensors are tiny, and threads that wait for a shared CPU are slow
pytestmark = pytest.mark.torture


def make_state(step: int, numbers: int = 50) -> dict[str, Any]:
    """Return a small state that depends on the step."""
    generator = torch.Generator().manual_seed(step)
    return {"model": {"w": torch.randn(numbers, generator=generator)}, "step": step}


# ------------------------------------------------------------------------------ damaged or replaced


def replace_by(make: Callable[[Path], Any]) -> Callable[[Path, Path], None]:
    """Return a function that deletes a file and calls make(path)."""
    return lambda path, _: path.unlink() or make(path)


def flip(path: Path, bit: int) -> None:
    """Change one bit of a file."""
    raw = bytearray(path.read_bytes())
    raw[bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)


REPLACED: list[Callable[[Path, Path], Any]] = [
    lambda path, other: shutil.copyfile(other, path),  # the content of another run
    replace_by(os.mkdir),
    replace_by(lambda path: path.symlink_to(path.parent)),
    replace_by(os.mkfifo),  # to open a pipe would take for ever
    replace_by(lambda path: path.symlink_to("/dev/zero")),  # so would reading this device
]


def damages(size: int) -> list[Callable[[Path, Path], Any]]:
    """Return functions of (checkpoint, other checkpoint) that damage a checkpoint of `size` bytes."""
    chance = random.Random(0)
    lengths = [0, size - 1, *chance.sample(range(1, size - 1), 198)]
    cuts = [lambda path, _, length=length: os.truncate(path, length) for length in lengths]
    bits = chance.sample(range(8 * size), 500)
    flips = [lambda path, _, bit=bit: flip(path, bit) for bit in bits]
    return [*REPLACED, *cuts[:6], *flips[:6], *cuts[6:], *flips[6:]]


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(trials, tmp_path_factory):
    saved, folder = tmp_path_factory.mktemp("saved"), tmp_path_factory.mktemp("other")
    entries = [ckpt.save(saved, make_state(step, 300), step) for step in (1, 2)]
    other = folder / ckpt.save(folder, make_state(2, 301), 2).name
    cases = damages((saved / entries[1].name).stat().st_size)

    def trial(number: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(shutil.copy(saved / entry.name, folder)) for entry in entries]
            cases[number](paths[1], other)
            found, rejected = ckpt.newest(folder)
            assert found.entry == entries[0] and same(found.state, make_state(1, 300))
            assert [*rejected] == [entries[1].name] and "\n" not in rejected[entries[1].name]
            cases[number](paths[0], other)
            with pytest.raises(ValueError, match=f"no checkpoint can be used; {entries[1].name}: "):
                ckpt.newest(folder)
            ckpt.save(folder, make_state(3), 3, None, 1)  # the damage does not disturb
            assert [entry.step for entry in ckpt.list_checkpoints(folder)] == [3]

    name = "file cut at 200 lengths, one of 500 bits flipped, replaced"
    trials(name, trial, few=20, many=len(cases), at_once=1)


TRAINING = "--steps 100 --save-every 5 --eval-every 1000 --log-every 1".split()


@pytest.fixture(scope="module")
def finished(flags, tmp_path_factory) -> Path:
    """Return the folder of a run of 100 steps, with checkpoints at 90, 95 and 100. Read only."""
    out = tmp_path_factory.mktemp("finished")
    ran = run(*flags, *TRAINING, "--out", out)
    assert ran.code == 0, ran
    return out


def test_the_program_names_a_damaged_checkpoint_and_continues_from_the_one_before(
    trials, finished, tmp_path_factory
):
    """In every second trial all checkpoints are damaged."""
    cases = damages(min(path.stat().st_size for path in checkpoints(finished)))

    def trial(number: int) -> None:
        number += 1  # without the first kind, which is no damage if the name is that of the content
        out = shutil.copytree(finished, tmp_path_factory.mktemp("out") / "out")
        damaged = checkpoints(out)[-1:] if number % 2 else checkpoints(out)
        for path in damaged:
            cases[number](path, checkpoints(finished)[0])
        before = sorted(out.iterdir())
        ran = run("--out", out, "--log-every", 1, seconds=100)
        assert ran.err.count("\n") == 1 and damaged[-1].name in ran.err, ran
        if len(damaged) == 1:
            assert ran.code == 0 and "\nstep 96/100 " in ran.out, ran
            assert same_training(out, finished)
        else:
            assert (ran.code, ran.out, sorted(out.iterdir())) == (2, "", before), ran

    trials("the same through the program", trial, few=2, many=20)


# ------------------------------------------------------------------------------------- broken disks
# What the program promises: if something cannot be written, it prints one line of warning, training
# continues, and the next save tries again. The exit code is 0 if the last save succeeds, else 1. The
# checkpoints that were written before are unchanged.

# run.py, which stops itself before two steps, so that the test can break the disk. The name of its
# temporary file is constant, because strace needs the paths of its faults.
PAUSING = """\
import os, runpy, signal, sys, uuid
import loop
def train_(*args, real=loop.train_, **more):
    for step, report in real(*args, **more):
        yield step, report
        if f"{step}" in os.environ["TEST_STEPS"].split():
            os.kill(os.getpid(), signal.SIGSTOP)
loop.train_, uuid.uuid4 = train_, lambda: uuid.UUID(int=0)
sys.argv[0] = "run.py"
runpy.run_path("run.py", run_name="__main__")
"""


@contextmanager
def full(out: Path, _: int) -> Iterator[None]:
    """Fill the disk with a file. (A tmpfs cannot be made smaller than its content.)"""
    ballast = out.parent / "ballast"
    with suppress(OSError), open(ballast, "wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 12))
    yield
    ballast.unlink()


@contextmanager
def read_only(out: Path, _: int) -> Iterator[None]:
    """Mount the folder over itself, read only. (The program has files open, so that the first mount
    cannot become read only.)"""
    subprocess.run(["mount", "--bind", out, out], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", out], check=True)
    yield
    subprocess.run(["umount", "-l", out], check=True)


@contextmanager
def deleted(out: Path, _: int) -> Iterator[None]:
    shutil.rmtree(out)
    yield


@contextmanager
def no_handles(out: Path, pid: int) -> Iterator[None]:
    """Let the process open no further files."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
    yield
    with suppress(ProcessLookupError):  # the program has ended
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def eio(calls: str) -> Callable[[Path, int], Any]:
    """Let these system calls on the folder, its metrics and its temporary file fail with EIO."""

    @contextmanager
    def inject(out: Path, pid: int) -> Iterator[None]:
        paths = [out, out / "metrics.jsonl", out / f"{ckpt.TEMPORARY}{0:032x}"]
        options = ["-o", os.devnull, "-e", f"trace={calls}", "-e", f"inject={calls}:error=EIO"]
        strace = attach_strace(pid, *options, *(f"-P{path}" for path in paths))
        yield
        strace.terminate()
        strace.communicate()

    return inject


FAULTS: dict[str, Callable[[Path, int], Any]] = {
    "disk full": full,
    "read-only": read_only,
    "folder deleted": deleted,
    "no handles": no_handles,
    "EIO of write": eio("write"),
    "EIO of fsync": eio("fsync"),
    "EIO of all": eio("openat,write,fsync,rename,unlink"),
}


@pytest.fixture(scope="module")
def disk(tmp_path_factory) -> Iterator[Callable[[int], Path]]:
    """disk(number): the folder of a small disk."""
    mounted = []

    def mount(number: int) -> Path:
        path = tmp_path_factory.mktemp(f"disk{number}")
        tmpfs = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", path]
        done = subprocess.run(tmpfs, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"mounting a small disk needs root: {done.stderr.strip()}")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", "-l", path])


def test_training_continues_without_the_disk_and_the_next_save_tries_again(
    trials, flags, disk, finished
):
    def wait_for_stop(program: Program, step: int) -> None:
        program.read_to(f"step {step}/")
        stat = Path(f"/proc/{program.process.pid}/stat")
        wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] in "Tt", "the stop")

    def trial(number: int) -> None:
        name, chance = list(FAULTS)[number % len(FAULTS)], random.Random(number)
        is_deleted = name == "folder deleted"  # a run does not create the folder of its lock again
        is_temporary = number % 2 == 0 and not is_deleted
        out, steps = disk(number) / "out", (chance.randint(11, 14), chance.randint(40, 50))
        how = {"launcher": [sys.executable, "-c", PAUSING]}
        how["env"] = {"TEST_STEPS": f"{steps[0]} {steps[1]}"}
        with Program(*flags, *TRAINING, "--out", out, **how) as program:
            wait_for_stop(program, steps[0])
            with FAULTS[name](out, program.process.pid):
                program.process.send_signal(signal.SIGCONT)
                wait_for_stop(program, steps[1])
                before = {path: path.read_bytes() for path in checkpoints(out)}
                if not is_temporary:
                    program.process.send_signal(signal.SIGCONT)
                    ran = program.finish()
            if is_temporary:
                program.process.send_signal(signal.SIGCONT)
                ran = program.finish()
        about = (number, name, steps, ran)
        assert ran.code == (0 if is_temporary else 1), about
        for line in ran.err.splitlines():
            warning = "Warning: (checkpoint|metrics|output) not written: "
            error = "Error: the checkpoint of step .* was not written"
            assert re.match(f"{warning}|{error}", line), about
        assert "checkpoint not written" in ran.err, about
        for entry in ckpt.list_checkpoints(out):
            ckpt.load(out, entry)
        if is_temporary:
            assert not [path for path in out.iterdir() if ckpt.TEMPORARY in path.name], about
            assert [entry.step for entry in ckpt.list_checkpoints(out)] == [90, 95, 100], about
        else:
            assert is_deleted or before
            assert before == {path: path.read_bytes() for path in checkpoints(out)}
        ran = run(*flags, *TRAINING, "--out", out, seconds=100)
        assert ran.code == 0 and not ran.err, (number, name, ran)
        ours, expected = (torch.load(checkpoints(folder)[-1]) for folder in (out, finished))
        assert same(ours, expected), (number, name)

    trials(", ".join(FAULTS), trial, few=3, many=105)


# ------------------------------------------------------------------------------------- 10,000 saves


def test_many_saves_take_no_more_resources_and_keep_the_right_checkpoints(
    trials, request, tmp_path
):
    saves = 10_000 if request.config.option.markexpr == "torture" else 150

    def handles_and_threads() -> list[int]:
        return [len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task")]

    def trial(_: int) -> None:
        kept, chance = list[ckpt.Entry](), random.Random(0)
        for step in range(saves):
            loss = chance.choice([None, round(chance.uniform(1, 9), 2)])
            arguments = tmp_path, make_state(step), step, loss, 3
            kept.append(ThreadPoolExecutor(1).submit(ckpt.save, *arguments).result())
            best = min(kept, key=lambda e: (e.loss, -e.step))
            kept = [entry for entry in kept if entry in kept[-3:] or entry == best]
            assert sorted(os.listdir(tmp_path)) == sorted(entry.name for entry in kept)
            memory = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
            if step == 100:
                memory_before, before = memory, handles_and_threads()
        assert memory < memory_before + 10_000_000, (memory_before, memory)
        no_more = lambda: all(a <= b for a, b in zip(handles_and_threads(), before))  # noqa: E731
        wait_for(no_more, f"no more handles and threads than {before}", 5)

    name = "saves with keep 3: memory, handles, threads, files"
    trials(name, trial, few=1, many=1, each=saves, at_once=1)
