"""Promise 5, in counted trials: what happens to checkpoints when the disk fails.

Also: checkpoints that are damaged, replaced or forged. Power cuts are in test_power_cuts.py.
"""

import hashlib
import io
import math
import os
import pickle
import random
import re
import resource
import shutil
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

import ckpt

torch.set_num_threads(1)  # the tensors are tiny, and threads that wait for a shared CPU are slow
pytestmark = pytest.mark.torture


def make_state(step: int, numbers: int = 50) -> dict[str, Any]:
    """Return a small state that depends on the step."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {"w": torch.randn(numbers, generator=generator)},
        "optimizers": [],
        "step": step,
    }


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of each regular file in a folder."""
    files = (path for path in folder.iterdir() if path.is_file() and not path.is_symlink())
    return {path.name: path.read_bytes() for path in files}


def is_traced(pid: int) -> bool:
    """Return whether strace is attached to a process."""
    return not re.search(r"TracerPid:\t0\n", Path(f"/proc/{pid}/status").read_text())


# ------------------------------------------------------------------------------ damaged or replaced


def replace_by(make: Callable[[Path], Any]) -> Callable[[Path, Path], None]:
    """Return a function that deletes a file and calls make(path)."""

    def replace(path: Path, _: Path) -> None:
        path.unlink()
        make(path)

    return replace


def flip(path: Path, bit: int) -> None:
    """Change one bit of a file."""
    raw = bytearray(path.read_bytes())
    raw[bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)


REPLACED: dict[str, Callable[[Path, Path], Any]] = {
    "the content of another run": lambda path, other: shutil.copyfile(other, path),
    "a folder": replace_by(lambda path: (path.mkdir(), (path / "mine").write_text(""))),
    "a dangling link": replace_by(lambda path: path.symlink_to("nowhere")),
    "a link to itself": replace_by(lambda path: path.symlink_to(path.name)),
    "a link to a folder": replace_by(lambda path: path.symlink_to(path.parent)),
    "a file that gives EIO": replace_by(lambda path: path.symlink_to("/proc/self/mem")),
    "a pipe": replace_by(os.mkfifo),  # to open a pipe would take for ever
    "a device": replace_by(lambda path: path.symlink_to("/dev/zero")),  # so would reading this one
}


def damages(size: int) -> list[Callable[[Path, Path], Any]]:
    """Return functions of (checkpoint, other checkpoint) that damage a checkpoint of `size` bytes.

    The kinds alternate, so that a few trials have all kinds.
    """
    chance = random.Random(0)
    lengths = [0, size - 1, *chance.sample(range(1, size - 1), 198)]
    cuts = [lambda path, _, length=length: os.truncate(path, length) for length in lengths]
    bits = chance.sample(range(8 * size), 500)
    flips = [lambda path, _, bit=bit: flip(path, bit) for bit in bits]
    return [*REPLACED.values(), *cuts[:6], *flips[:6], *cuts[6:], *flips[6:]]


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(trials, tmp_path_factory):
    saved, folder = tmp_path_factory.mktemp("saved"), tmp_path_factory.mktemp("other")
    entries = [ckpt.save(f"{saved}", make_state(step, 300), step) for step in (1, 2)]
    other = folder / ckpt.save(f"{folder}", make_state(2, 301), 2).name
    cases = damages((saved / entries[1].name).stat().st_size)

    def trial(number: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(shutil.copy(saved / entry.name, folder)) for entry in entries]
            cases[number](paths[1], other)
            found, rejected = ckpt.newest(folder)
            [(name, reason)] = rejected.items()
            assert found.entry == entries[0] and same(found.state, make_state(1, 300))
            assert name == entries[1].name and "\n" not in reason
            cases[number](paths[0], other)
            with pytest.raises(ValueError, match=f"no checkpoint can be used; {entries[1].name}: "):
                ckpt.newest(folder)
            ckpt.save(folder, make_state(3), 3, None, 1)  # the damage does not disturb
            assert ckpt.newest(folder)[0].state["step"] == 3
            assert len(ckpt.list_checkpoints(folder)) == 1
            if number == list(REPLACED).index("a folder"):  # it is not ours, and so not deleted
                assert len([*Path(folder).glob("*/mine")]) == 2

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
        before = contents(out), sorted(out.iterdir())
        ran = run("--out", out, "--log-every", 1)
        assert ran.err.count("\n") == 1 and damaged[-1].name in ran.err, ran
        if len(damaged) == 1:
            assert ran.code == 0 and "\nstep 96/100 " in ran.out, ran
            assert same_training(out, finished)
        else:
            assert (ran.code, ran.out) == (2, ""), ran
            assert (contents(out), sorted(out.iterdir())) == before, ran

    name = "the same through the program; every second with none left"
    trials(name, trial, few=2, many=60)


# ------------------------------------------------------------------------------------------- forged
# A file in --out whose digest is right, but which this program did not write. The promise for such a
# file is small: no code in it runs, and the program ends with one line or uses the file. Files of
# other people go through extras/reader.py; tests/extras/test_reader.py has the forged files for it.


class Calls:
    """An object that calls function(*args) when it is unpickled."""

    def __init__(self, function: Callable, *args: Any):
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def torch_saved(what: Any, **how: Any) -> bytes:
    """Return the bytes that torch.save writes."""
    file = io.BytesIO()
    torch.save(what, file, **how)
    return file.getvalue()


def put_forged(folder: Path, step: int, raw: bytes) -> str:
    """Write a file under the name of a checkpoint with this content, and return the name."""
    name = f"step-{step:08d}-{hashlib.sha256(raw).hexdigest()[:32]}.pt"
    (folder / name).write_bytes(raw)
    return name


def with_code(path: Path) -> dict[str, Any]:
    """Return a state whose unpickling makes a folder, if it is not prevented."""
    return {"model": {"w": torch.ones(3)}, "x": Calls(os.mkdir, f"{path}")}


FORGED: dict[str, Callable[[Path], bytes]] = {
    "code": lambda path: torch_saved(with_code(path)),
    "code in a bare pickle": lambda path: pickle.dumps(with_code(path)),
    "code in the old format": lambda path: torch_saved(
        with_code(path), _use_new_zipfile_serialization=False
    ),
    "code instead of a state": lambda path: torch_saved(Calls(os.mkdir, f"{path}")),
    "code by its name": lambda path: torch_saved({"model": {}, "x": os.system}),
    "an empty file": lambda path: b"",
    "text": lambda path: b"hello",
    "another object": lambda path: torch_saved([1, 2]),
    "no model": lambda path: torch_saved({"step": 1}),
    "a model that is no dict": lambda path: torch_saved({"model": 3}),
}


def test_the_code_in_the_forged_files_would_run(tmp_path):
    for number, kind in enumerate(list(FORGED)[:4]):
        path = tmp_path / f"{number}"
        raw = FORGED[kind](path)
        if kind == "code in a bare pickle":
            pickle.loads(raw)
        else:
            torch.load(io.BytesIO(raw), weights_only=False)
        assert path.exists(), kind


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_forged_file_is_named_and_its_code_does_not_run(trials, tmp_path):
    old = ckpt.save(f"{tmp_path}", make_state(1), 1)

    def trial(number: int) -> None:
        kind, make = list(FORGED.items())[number]
        bad = put_forged(tmp_path, 2, make(tmp_path / "was run"))
        found, rejected = ckpt.newest(f"{tmp_path}")
        (tmp_path / bad).unlink()
        assert not (tmp_path / "was run").exists(), kind
        assert found.entry == old, kind
        [(name, reason)] = rejected.items()
        assert name == bad and reason.startswith("not a checkpoint: "), (kind, rejected)
        assert "\n" not in reason, (kind, reason)

    trials("forged file", trial, few=len(FORGED), many=len(FORGED), at_once=1)


def forge_state(kind: str, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a checkpoint of the program with one thing changed."""
    model, config = state["model"], state["config"]
    moments = state["optimizers"][0]["state"]["embedding.weight"]
    w = model["embedding.weight"]
    nested: list[Any] = []
    for _ in range(40):
        nested = [nested, nested]
    changes: dict[str, Callable[[], Any]] = {
        "shape": lambda: model.update({"embedding.weight": w.T}),
        "dtype": lambda: model.update({"embedding.weight": w.half()}),
        "missing": lambda: model.pop("embedding.weight"),
        "surplus": lambda: model.update(another=w),
        "not a number": lambda: model.update({"embedding.weight": w * math.nan}),
        # a fused kernel would write behind the end of this one
        "shape of a moment": lambda: moments.update(exp_avg=torch.ones(7)),
        "dtype of a moment": lambda: moments.update(exp_avg=moments["exp_avg"].double()),
        "missing moment": lambda: moments.pop("exp_avg"),
        "unknown moments": lambda: state["optimizers"][0]["state"].update(another=moments),
        "optimizers": lambda: state.update(optimizers=3),
        "scaler": lambda: state.update(scaler=3),
        "step": lambda: state.update(step="1"),
        "layers": lambda: config.update(layers=10**9),
        "width": lambda: config.update(embd=2**24, heads=1),
        "vocabulary": lambda: state["vocabulary"].update(vocab=2**40),
        "type": lambda: config.update(embd={"x": 1}),
        "recursion": lambda: config.update(lr=config),
        "nested lists": lambda: config.update(lr=nested),  # 2^40 lists if they are written as text
        "config": lambda: state.update(config=[1]),
    }
    changes[kind]()
    return state


NAMED = {  # what the line must name, beside the checkpoint
    "shape": "embedding.weight",
    "dtype": "embedding.weight",
    "missing": "embedding.weight",
    "surplus": "another",
    "not a number": "NaN",
}
MOMENTS = ["shape of a moment", "dtype of a moment", "missing moment", "unknown moments"]
UNUSED = ["scaler"]  # training in float32 does not use this value
# The program never writes these values. It ends with an error, but the promise says no more.
ABSURD = ["optimizers", "step", "layers", "width", "type", "recursion", "nested lists", "config"]
KINDS = [*NAMED, *MOMENTS, *UNUSED, "vocabulary", *ABSURD]


def test_a_forged_state_is_an_error_and_nothing_is_written(trials, finished, tmp_path_factory):
    def trial(number: int) -> None:
        kind, out = KINDS[number], shutil.copytree(finished, tmp_path_factory.mktemp("o") / "out")
        last = checkpoints(out)[-1]
        state = forge_state(kind, torch.load(last, weights_only=True))
        last.unlink()
        name, before = put_forged(out, 100, torch_saved(state)), contents(out)
        commands = [["--steps", 101]]
        if kind in [*NAMED, "type", "config"]:
            commands += [["sample", "--max-new-tokens", 1], ["eval"]]
        for command in commands:
            ran = run(*command, "--out", out, seconds=30)
            if kind in UNUSED:
                assert (ran.code, ran.err) == (0, ""), (kind, ran)
                return
            if kind not in ABSURD:
                text = "a vocabulary of 18, not 1099511627776" if kind == "vocabulary" else name
                assert ran.err.count("\n") == 1 and text in ran.err, (kind, ran)
                assert NAMED.get(kind, "") in ran.err, (kind, ran)
            if kind == "not a number":  # newest() rejects the file, and the one before is used
                assert ran.code == 0, (kind, ran)
                return
            assert ran.code == 2 or kind in ABSURD and ran.code == 1, (kind, ran)
            assert ran.err.startswith("Error") and ran.out == "", (kind, ran)
            assert contents(out) == before, (kind, ran)

    trials("forged state, to the program", trial, few=5, many=len(KINDS))


# ------------------------------------------------------------------------------------- broken disks
# What the program promises: if something cannot be written, it prints one line of warning, training
# continues, and the next save tries again. The exit code is 0 if the last save succeeds, else 1. The
# checkpoints that were written before are unchanged.

# run.py with a constant name of its temporary file, because strace needs the paths of its faults.
CONSTANT_NAMES = [
    sys.executable,
    "-c",
    """\
import runpy, sys, uuid
uuid.uuid4 = lambda: uuid.UUID(int=0)
sys.argv[0] = "run.py"
runpy.run_path("run.py", run_name="__main__")
""",
]


@contextmanager
def full(out: Path, _: int) -> Iterator[None]:
    """Fill the disk with a file. (A tmpfs cannot be made smaller than its content.)"""
    ballast = out.parent / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        for size in (1 << 16, 1):
            with suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass
    yield
    ballast.unlink()


@contextmanager
def read_only(out: Path, _: int) -> Iterator[None]:
    """Mount the folder over itself, read only. (The program has files open, so that the first mount
    cannot become read only.)"""
    subprocess.run(["mount", "--bind", out, out], check=True)
    remount = ["mount", "-o", "remount,bind,ro", out]
    succeeded = lambda: not subprocess.run(remount, stderr=subprocess.DEVNULL).returncode  # noqa: E731
    wait_for(succeeded, "a moment without a write")
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


def eio(*calls: str) -> Callable[[Path, int], Any]:
    """Let these system calls on the folder, its metrics and its temporary file fail with EIO."""

    @contextmanager
    def inject(out: Path, pid: int) -> Iterator[None]:
        paths = [out, out / "metrics.jsonl", out / f"{ckpt.TEMPORARY}{0:032x}"]
        options = ["-f", "-qq", "-o", os.devnull]
        options += ["-e", f"trace={','.join(calls)}", "-e", f"inject={','.join(calls)}:error=EIO"]
        for path in paths:
            options += ["-P", f"{path}"]
        strace = subprocess.Popen(["strace", *options, "-p", f"{pid}"], stderr=subprocess.DEVNULL)
        wait_for(lambda: strace.poll() is not None or is_traced(pid), "strace to attach")
        yield
        strace.terminate()
        strace.wait()

    return inject


FAULTS: dict[str, Callable[[Path, int], Any]] = {
    "disk full": full,
    "read-only": read_only,
    "folder deleted": deleted,
    "no handles": no_handles,
    "EIO of write": eio("write"),
    "EIO of fsync": eio("fsync"),
    "EIO of all": eio("openat", "write", "fsync", "rename", "unlink"),
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
    def trial(number: int) -> None:
        name, chance = list(FAULTS)[number % len(FAULTS)], random.Random(number)
        is_temporary = number % 2 == 0 or name == "folder deleted"
        out = disk(number) / "out"
        with Program(*flags, *TRAINING, "--out", out, launcher=CONSTANT_NAMES) as program:
            program.read_to(f"step {chance.randint(8, 12)}/")
            wait_for(lambda: checkpoints(out), "a checkpoint")
            with FAULTS[name](out, program.process.pid):
                program.read_to(f"step {chance.randint(40, 50)}/")  # it is a few lines further
                before = {path.name: path.read_bytes() for path in checkpoints(out)}
                if not is_temporary:
                    ran = program.finish()
            if is_temporary:
                ran = program.finish()
        about = (number, name, ran)
        assert ran.code == (0 if is_temporary else 1), about
        for line in ran.err.splitlines():
            warning = "Warning: (checkpoint|metrics|output) not written: "
            assert re.match(f"{warning}|Error: the checkpoint of step .* was not written", line), (
                about
            )
        if name != "folder deleted":  # a save can make a new folder before anything fails
            assert "checkpoint not written" in ran.err, about
        found, rejected = ckpt.newest(f"{out}")
        assert found and not rejected, about
        for entry in ckpt.list_checkpoints(f"{out}"):
            ckpt.load(f"{out}", entry)
        if is_temporary:
            left = [path.name for path in out.iterdir() if path.name.startswith(ckpt.TEMPORARY)]
            assert not left, about
            names = [path.name for path in checkpoints(out)]
            assert names == [path.name for path in checkpoints(finished)], about
        else:
            assert before and contents(out).items() >= before.items(), about
        ran = run(*flags, *TRAINING, "--out", out)
        assert ran.code == 0 and not ran.err, (number, name, ran)
        ours, expected = (torch.load(checkpoints(folder)[-1]) for folder in (out, finished))
        assert same(ours, expected), (number, name)

    trials(", ".join(FAULTS), trial, few=3, many=105)


# ------------------------------------------------------------------------------------- 10,000 saves


def test_many_saves_take_no_more_resources_and_keep_the_right_checkpoints(
    trials, request, tmp_path
):
    saves = 10_000 if request.config.option.markexpr == "torture" else 150

    def handles_and_threads() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def trial(_: int) -> None:
        kept: list[ckpt.Entry] = []
        chance = random.Random(0)
        for step in range(saves):
            loss = chance.choice([None, round(chance.uniform(1, 9), 2)])
            arguments = f"{tmp_path}", make_state(step), step, loss, 3
            kept.append(ThreadPoolExecutor(1).submit(ckpt.save, *arguments).result())
            best = min(kept, key=lambda e: (e.loss, -e.step))
            kept = [entry for entry in kept if entry in kept[-3:] or entry == best]
            assert sorted(os.listdir(tmp_path)) == sorted(entry.name for entry in kept)
            if step % 50 == 0:
                assert all(ckpt.load(f"{tmp_path}", entry)["step"] == entry.step for entry in kept)
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            memory = pages * resource.getpagesize()
            if step == 100:
                memory_before, before = memory, handles_and_threads()
        assert memory < memory_before + 10_000_000, (memory_before, memory)
        no_more = lambda: all(a <= b for a, b in zip(handles_and_threads(), before))  # noqa: E731
        wait_for(no_more, f"no more handles and threads than {before}", 5)

    name = "saves with keep 3: memory, handles, threads, files"
    trials(name, trial, few=1, many=1, each=saves, at_once=1)
