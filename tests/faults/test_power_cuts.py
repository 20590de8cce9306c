"""Promise 5, in counted disk states: what is on the disk after a power cut at any moment.

strace records the system calls of real saves, deletions and downloads, in one process or in two
ranks. The test then replays them on a model of a disk that keeps no more than POSIX promises. What
was written to a file is durable after an fsync of the file. A change of the names in a folder is
durable after an fsync of the folder. A power cut keeps any subset of the other changes. Of each
write it keeps nothing, half, all, or zeros in place of the bytes.

Every disk state is made for real and checked, and the next run continues from it. Some of these
next runs are recorded in the same way, for a second power cut.
"""

import copy
import functools
import itertools
import math
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import TABLE, same, wait_for
from test_storage_faults import is_traced
from torch import nn

import ckpt
from extras import reader, remote, sharded

torch.set_num_threads(1)  # the tensors are tiny, and a child of a fork has no other threads
pytestmark = pytest.mark.torture

Tree = bytes | dict[str, Any]  # the content of a file, or the names in a folder with their trees
Check = Callable[[Path, list[str]], None]  # (the disk after a power cut, the marks before it)
MANY = 2000
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None  # an fsync takes no time there


# ------------------------------------------------------------------------ recording of system calls

# The calls that this model knows. It also looks for those in OTHERS, to refuse them.
CALLS = (
    "open,openat,read,write,lseek,ftruncate,fsync,fdatasync,close,fcntl,rename,renameat,renameat2,"
    "unlink,unlinkat,rmdir,mkdir,mkdirat,clone,clone3"
)
OTHERS = (
    "creat,openat2,readv,writev,pwrite64,pwritev,pwritev2,sendfile,copy_file_range,splice,truncate,"
    "fallocate,mmap,link,linkat,symlink,symlinkat,mknod,mknodat,dup,dup2,dup3,sync,syncfs,"
    "sync_file_range,fork,vfork,io_uring_setup"
)


class Trace(NamedTuple):
    """What processes did to a folder. Its files and folders have numbers; the folder itself is 0.

    The operations, in the order in which the calls returned, are
    ("create", folder, name, number): a file was created,
    ("mkdir", folder, name, number): a folder was created,
    ("rename", folder, name, number, old name): within a folder, and maybe over another file,
    ("unlink", folder, name): a file or folder was deleted,
    ("write", file, position, bytes), ("truncate", file, size),
    ("sync", number, count, path): fsync, when `count` operations were complete,
    ("mark", text): what the test wrote with `mark`.
    """

    contents: dict[int, bytes]  # of each file, before the operations
    names: dict[int, dict[str, int]]  # of each folder, before the operations
    operations: list[tuple[Any, ...]]


def mark(text: str) -> None:
    """Put a mark into the recording of the calling process."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.write(null, f"mark {text}".encode())
    os.close(null)


def cannot_test(reason: str) -> NoReturn:
    """Skip the test. In continuous integration (CI is set), fail instead."""
    text = f"power cuts are not tested: {reason}"
    if os.environ.get("CI"):
        pytest.fail(text)
    pytest.skip(text)


def record(folder: Path, *jobs: Callable[[], Any]) -> Trace:
    """Call each job in a process of its own; return what they did to the folder `folder`/disk."""
    if not shutil.which("strace"):
        cannot_test("strace, which records system calls, is missing")
    before, pipes, log = read_tree(folder / "disk"), [], folder / "strace"
    for job in jobs:
        ready, go = os.pipe()
        pid = os.fork()
        if pid == 0:  # this process waits until the parent closes the pipe, when strace is attached
            os.close(go)
            for _, other in pipes:
                os.close(other)
            os.read(ready, 1)
            signal.alarm(300)  # ends a process that hangs
            try:
                job()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        os.close(ready)
        pipes.append((pid, go))
    options = ["-f", "-qq", "-xx", "-s", "9999999", "-e", "signal=none", "-o", log]
    options += ["-e", f"trace={CALLS},{OTHERS}"]
    for pid, _ in pipes:
        options += ["-p", f"{pid}"]
    with tempfile.TemporaryFile("w+") as errors:
        strace = subprocess.Popen(["strace", *options], stderr=errors)
        for pid, _ in pipes:
            wait_for(lambda: is_traced(pid) or strace.poll() is not None, "strace to attach")
        for _, go in pipes:
            os.close(go)
        failed = [os.waitpid(pid, 0)[1] for pid, _ in pipes]
        if strace.wait():
            errors.seek(0)
            cannot_test(f"strace failed: {errors.read()}")
    assert not any(failed), failed
    return parse(log.read_text(), folder / "disk", before)


class Call(NamedTuple):
    """The begin of a system call, or its end."""

    thread: str
    process: str
    name: str
    arguments: list[str]  # a text is replaced by an empty one
    texts: list[bytes]
    result: int | None  # None when the call begins


def read_calls(log: str) -> Iterator[Call]:
    """Yield the begin and the end of each system call in a log of strace."""
    parents: dict[str, str] = {}  # thread -> the thread that started it
    for line in re.findall(r"^\d+ +(?:<\.\.\. )?clone.*", log, re.M):
        assert "flags=" not in line or "CLONE_THREAD" in line, f"a child process: {line}"
        if child := re.search(r"\) += (\d+)$", line):
            parents[child[1]] = line.split()[0]

    def make_call(thread: str, text: str, result: int | None) -> Call:
        process = thread
        while process in parents:
            process = parents[process]
        name, _, arguments = text.partition("(")
        texts = re.findall(r'"([^"]*)"', arguments.replace("\\x", ""))
        arguments = re.sub(r'"[^"]*"', '""', arguments).split(", ")
        return Call(thread, process, name, arguments, [*map(bytes.fromhex, texts)], result)

    begun: dict[str, str] = {}
    for line in log.splitlines():
        assert '"...' not in line, "strace has cut a text"
        thread, text = line.split(maxsplit=1)
        if text.startswith("<... "):
            text = begun.pop(thread) + text.partition(" resumed>")[2]
        else:
            yield make_call(thread, text, None)
        if text.endswith(" <unfinished ...>"):
            begun[thread] = text.removesuffix(" <unfinished ...>")
        elif ended := re.fullmatch(r"(.*)\) += (-?\w+).*", text):  # otherwise the process exited
            yield make_call(thread, ended[1], int(ended[2], 0))


def parse(log: str, disk: Path, before: Tree) -> Trace:
    """Return what the calls in a log of strace did to the folder `disk`.

    AssertionError if there is a call that changed the folder and that this model does not know.
    """
    trace = Trace({}, {}, [])

    def add(tree: Tree) -> int:
        number = len(trace.contents) + len(trace.names)
        if isinstance(tree, bytes):
            trace.contents[number] = tree
        else:
            trace.names[number] = {}
            trace.names[number] |= {name: add(below) for name, below in tree.items()}
        return number

    add(before)
    numbers = itertools.count(len(trace.contents) + len(trace.names))
    operations = trace.operations
    names = copy.deepcopy(trace.names)  # what the processes see now
    sizes = {number: len(content) for number, content in trace.contents.items()}
    paths = {0: ""}  # of each file and folder that was opened: its path at that time
    handles: dict[tuple[str, str], list[int]] = {}  # (process, handle) -> [number, position]
    started: dict[str, int] = {}  # thread -> how many operations were complete when its call began

    def locate(at: tuple[str, str], path: str) -> tuple[int, str, str] | None:
        """Return folder, name and path on the disk. ("" is the name of the disk itself.)"""
        folder, above = 0, ""
        if f"{path}/".startswith(f"{disk}/"):
            path = path.removeprefix(f"{disk}").strip("/")
        elif at in handles and not path.startswith("/"):
            folder = handles[at][0]
            above = f"{paths[folder]}/"
        else:
            return None
        *others, name = path.split("/")
        for other in others:
            folder = names[folder][other]
        return folder, name, f"{above}{path}"

    for thread, process, call, arguments, texts, result in read_calls(log):
        key = process, arguments[0].rstrip(")")
        if result is None:
            started[thread] = len(operations)
            if call == "close":  # another thread may get this handle before the call ends
                handles.pop((process, re.match(r"\d+", arguments[0])[0]), None)
            continue
        if result < 0 or call == "close":  # a call that failed changed nothing
            continue
        if call == "write" and texts[0].startswith(b"mark "):
            operations.append(("mark", texts[0].decode()[5:]))
            continue
        places: list[Any] = []  # on the disk, of each path in the arguments
        if call not in ("read", "write"):
            of_paths = [i for i, argument in enumerate(arguments) if argument == '""']
            for i, text in zip(of_paths, texts):
                places.append(locate((process, arguments[i - 1]), os.fsdecode(text)))
        if call in ("open", "openat"):
            handles.pop((process, f"{result}"), None)
            if places[0]:
                folder, name, path = places[0]
                number = names[folder].get(name, -1) if name else 0
                if number < 0:
                    number = names[folder][name] = next(numbers)
                    sizes[number] = 0
                    operations.append(("create", folder, name, number))
                elif any("O_TRUNC" in argument for argument in arguments) and sizes[number]:
                    sizes[number] = 0
                    operations.append(("truncate", number, 0))
                paths[number] = path
                is_at_end = any("O_APPEND" in argument for argument in arguments)
                handles[process, f"{result}"] = [number, sizes[number] if is_at_end else 0]
        elif key in handles and call in ("read", "write"):
            number, position = handles[key]
            if call == "write":
                operations.append(("write", number, position, texts[0][:result]))
            handles[key][1] += result
            sizes[number] = max(sizes[number], position + result)
        elif key in handles and call == "lseek":
            handles[key][1] = result
        elif key in handles and call == "ftruncate":
            number, size = handles[key][0], int(arguments[1])
            sizes[number] = size
            operations.append(("truncate", number, size))
        elif key in handles and call in ("fsync", "fdatasync"):
            number = handles[key][0]
            operations.append(("sync", number, started[thread], paths[number]))
        elif key in handles and call == "fcntl":
            if "F_DUPFD" in arguments[1]:
                handles[process, f"{result}"] = handles[key]
        elif call in ("rename", "renameat", "renameat2") and any(places):
            (folder, old, _), (there, new, _) = places
            assert folder == there, "the model knows no rename from one folder to another"
            names[folder][new] = names[folder].pop(old)
            operations.append(("rename", folder, new, names[folder][new], old))
        elif call in ("unlink", "unlinkat", "rmdir") and places[0]:
            folder, name, _ = places[0]
            del names[folder][name]
            operations.append(("unlink", folder, name))
        elif call in ("mkdir", "mkdirat") and places[0]:
            folder, name, _ = places[0]
            number = names[folder][name] = next(numbers)
            names[number] = {}
            operations.append(("mkdir", folder, name, number))
        else:  # no call that this model does not know may be ignored
            is_private = call == "mmap" and "MAP_SHARED" not in arguments[3]
            ours = any((process, argument) in handles for argument in arguments)
            assert is_private or not (ours or any(places)), (call, arguments)
    return trace


# ------------------------------------------------------------------------------- model of the disk


def read_tree(path: Path) -> Tree:
    if path.is_dir():
        return {below.name: read_tree(below) for below in sorted(path.iterdir())}
    return path.read_bytes()


def write_tree(tree: Tree, path: Path) -> None:
    if isinstance(tree, bytes):
        path.write_bytes(tree)
    else:
        path.mkdir()
        for name, below in tree.items():
            write_tree(below, path / name)


def freeze(tree: Tree) -> Any:
    """Return a tree in a form that a set can contain."""
    if isinstance(tree, bytes):
        return tree
    return frozenset((name, freeze(below)) for name, below in tree.items())


def choices(options: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    """Yield all ways to choose one of each options.

    If there are more than MANY, yield the first and the last way, those that differ from one of
    them in one place, and random ones. Only if an fsync is missing can there be so many.
    """
    if math.prod(map(len, options)) <= MANY:
        yield from itertools.product(*options)
        return
    for base in ([each[0] for each in options], [each[-1] for each in options]):
        yield tuple(base)
        for i, each in enumerate(options):
            for other in each:
                yield (*base[:i], other, *base[i + 1 :])
    chance = random.Random(0)
    for _ in range(100):
        yield tuple(map(chance.choice, options))


def disk_states(trace: Trace, begin: int, end: int, root: int) -> Iterator[Tree]:
    """Yield each content of the folder `root` that a power cut before operation `end` may leave.

    begin: operations before that one did not change this folder.
    """
    changes: dict[int, list[list[Any]]] = defaultdict(list)  # [number, operation, whether durable]
    for number, operation in enumerate(trace.operations[begin:end], begin):
        what, of, *more = operation
        if what == "sync":
            for change in changes[of]:
                change[2] |= change[0] < more[0]
        elif what != "mark":
            changes[of].append([number, operation, False])
    folders = {*trace.names}
    folders |= {o[3] for o in trace.operations[begin:end] if o[0] == "mkdir"}
    known: dict[tuple[int, bool], list[Tree]] = {}

    def states(number: int, is_read: bool) -> list[Tree]:
        """Return the states of a file or folder, without content if no run reads that."""
        if (number, is_read) not in known:
            if number in folders:
                known[number, is_read] = [*folder_states(number, is_read)]
            else:
                known[number, is_read] = [*file_states(number)] if is_read else [b""]
        return known[number, is_read]

    def folder_states(number: int, is_read: bool) -> Iterator[Tree]:
        options = [[True] if durable else [False, True] for _, _, durable in changes[number]]
        for kept in choices(options):
            names = dict(trace.names.get(number, {}))
            for is_kept, (_, (what, _, name, *more), _) in zip(kept, changes[number]):
                if is_kept and what == "unlink":
                    names.pop(name, None)
                elif is_kept:
                    names.pop(more[1] if what == "rename" else "", None)
                    names[name] = more[0]
            below = [
                states(each, is_read and not name.startswith((ckpt.TEMPORARY, ".lock")))
                for name, each in names.items()
            ]
            for trees in choices(below):
                yield dict(zip(names, trees))

    def file_states(number: int) -> Iterator[bytes]:
        options = [
            ["all"] if durable else ["nothing", "half", "zeros", "all"]
            for _, _, durable in changes[number]
        ]
        for kept in choices(options):
            content = trace.contents.get(number, b"")
            for how, (_, (what, _, position, *more), _) in zip(kept, changes[number]):
                if what == "truncate":
                    if how != "nothing":
                        content = content[:position].ljust(position, b"\0")
                    continue
                raw = bytes(len(more[0])) if how == "zeros" else more[0]
                if kept_length := {"nothing": 0, "half": len(raw) // 2}.get(how, len(raw)):
                    start, end = content[:position], content[position + kept_length :]
                    content = start.ljust(position, b"\0") + raw[:kept_length] + end
            yield content

    yield from states(root, True)


class Case(NamedTuple):
    """A disk state, and the marks before the power cut that left it."""

    tree: Tree
    marks: list[str]


def check_power_cuts(
    trace: Trace, check: Check, begin: int = 0, end: int | None = None, root: int = 0
) -> list[Case]:
    """Check every disk state that a power cut may leave; return the different cases.

    begin, end: the operations that changed the folder `root`.
    """
    cases: dict[Any, Case] = {}
    operations = trace.operations[:end]
    for moment in range(begin, len(operations) + 1):
        # Before any other operation, a power cut leaves no states that it does not leave after it.
        if operations[moment:] and operations[moment][0] not in ("sync", "mark"):
            continue
        marks = [o[1] for o in operations[begin:moment] if o[0] == "mark"]
        for tree in disk_states(trace, begin, moment, root):
            key = freeze(tree), tuple(marks)
            if key not in cases:
                cases[key] = Case(tree, marks)
                with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
                    write_tree(tree, Path(folder, "disk"))
                    try:
                        check(Path(folder, "disk"), marks)
                    except (OSError, ValueError) as error:
                        raise AssertionError(f"after {marks}: {error}") from error
    return [*cases.values()]


def check_second_cuts(folder: Path, cases: Sequence[Case], scenario: "Scenario") -> list[Case]:
    """Continue from each case, with a power cut at any moment. Check and return every case."""
    disks = [folder / "disk" / f"{i}" for i in range(len(cases))]
    write_tree({disk.name: case.tree for disk, case in zip(disks, cases)}, folder / "disk")
    trace = record(folder, *scenario.continuing(folder, disks))
    begins = [i for i, operation in enumerate(trace.operations) if operation == ("mark", "case")]
    found: list[Case] = []
    for disk, begin, end in zip(disks, begins, [*begins[1:], None], strict=True):
        found += check_power_cuts(trace, scenario.check, begin, end, trace.names[0][disk.name])
    return found


def pick(cases: list[Case], count: int) -> list[Case]:
    """Return up to `count` cases with different disk states, evenly distributed, from the end."""
    different = [*{freeze(case.tree): case for case in cases}.values()]
    return different[:: -(len(different) // count or 1)][:count]


@pytest.fixture
def is_torture(request: pytest.FixtureRequest) -> bool:
    return request.config.option.markexpr == "torture"


@pytest.fixture
def count(request: pytest.FixtureRequest) -> Callable[[str, list[Case]], None]:
    """Return a function that puts the number of different disk states into the printed table."""
    begun = time.monotonic()

    def add(fault: str, cases: list[Case]) -> None:
        number = len({freeze(case.tree) for case in cases})
        print(f"{fault}: {len(cases)} cases, {number} different disk states")
        request.config.stash[TABLE].append((fault, number, number, time.monotonic() - begun))

    return add


# -------------------------------------------------------------------------------------- checkpoints

# The functions for a folder with whole and sharded checkpoints, in a process without other ranks.
BOTH = sharded.storage(ckpt, reader.read, write_sharded=False)
TEXTS = {"metrics.jsonl": '{"step": 1}\n', "config.json": "{}"}


def build(step: int, width: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """Return a model and its optimizer. Their numbers depend on the step."""
    torch.manual_seed(step)
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return model, [optimizer]


@functools.lru_cache(100)
def make_state(step: int, width: int) -> dict[str, Any]:
    return ckpt.snapshot(*build(step, width), step=step)


def is_state(state: dict[str, Any], step: int) -> bool:
    """Whether a state that was read is that of the step."""
    expected = make_state(step, len(state["model"]["0.bias"]))
    moments = [[optimizer["state"] for optimizer in s["optimizers"]] for s in (state, expected)]
    models = [dict(s["model"]) for s in (state, expected)]
    return state["step"] == step and same(*models) and same(*moments)


def check_checkpoints(files: Any, out: str, marks: list[str], damaged: Sequence[str] = ()) -> int:
    """Check the checkpoints in a folder, and return the step of the newest.

    The marks say which step was "begun" and which was "saved", and which names are "gone" from the
    list. Every listed checkpoint has to verify, except those in `damaged`.
    """
    steps = {"begun": 0, "saved": 0}
    known = [text.split() for text in marks if text[:5] in steps]
    steps |= {kind: int(step) for kind, step in known}
    found, rejected = files.newest(out)
    step = found.entry.step if found else 0
    assert not known or steps["saved"] <= step <= max(steps.values()), (step, steps)
    assert rejected.keys() <= {*damaged}, rejected
    for entry in files.list_checkpoints(out):
        assert f"gone {entry.name}" not in marks, entry
        if entry.name not in damaged:
            assert is_state(files.load(out, entry), entry.step), entry
    return step


def save(files: Any, out: str, step: int, is_first: bool = True, **settings: Any) -> None:
    """Save a checkpoint in a thread, as run.py does. With shards, every rank must call this."""
    settings = {"loss": None, "keep": 2, "width": 5, **settings}
    state = files.snapshot(*build(step, settings.pop("width")), step=step)
    if is_first:
        mark(f"begun {step}")
    ThreadPoolExecutor(1).submit(files.save, out, state, step, **settings).result()
    if is_first:
        mark(f"saved {step}")


def continue_run(files: Any, out: str, is_first: bool = True) -> None:
    """Do what the next run does in its folder, up to its first save. Every rank must call this."""
    steps, lock = [0], None
    if is_first:
        found, rejected = files.newest(out)
        steps = [found.entry.step if found else 0]
        mark(f"saved {steps[0]}")
        files.make_folder(out)
        lock = files.lock(out)
        for name in rejected:
            files.set_aside(out, name)
            mark(f"gone {name}")
        for name, text in TEXTS.items():
            files.write_text(out, name, text)
    if dist.is_initialized():
        dist.broadcast_object_list(steps)
    save(files, out, steps[0] + 1, is_first)
    del lock


def check_and_continue(files: Any, damaged: Sequence[str], disk: Path, marks: list[str]) -> None:
    """Check the folder of a run after a power cut. Continue the run, and check the folder again."""
    out = f"{disk}/new/out"
    step = check_checkpoints(files, out, marks, damaged)
    continue_run(files, out)
    assert check_checkpoints(files, out, [f"saved {step + 1}"]) == step + 1
    others = {*os.listdir(out)} - {entry.name for entry in files.list_checkpoints(out)}
    assert others - {".lock", *TEXTS} <= {f"{name}.damaged" for name in damaged}, others


def continue_each(files: Any, disks: list[Path]) -> None:
    for disk in disks:
        mark("case")
        continue_run(files, f"{disk}/new/out")


def in_ranks(folder: Path, job: Callable[[Any, bool], Any]) -> list[Callable[[], None]]:
    """Return a function for each of two ranks that calls job(files, whether this is rank 0)."""

    def run(rank: int) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
        job(sharded.storage(ckpt, reader.read, write_sharded=True), rank == 0)

    return [functools.partial(run, rank) for rank in range(2)]


def continue_each_in_ranks(folder: Path, disks: list[Path]) -> list[Callable[[], None]]:
    def job(files: Any, is_first: bool) -> None:
        for disk in disks:
            dist.barrier()
            if is_first:
                mark("case")
            continue_run(files, f"{disk}/new/out", is_first)

    return in_ranks(folder, job)


# ----------------------------------------------------------------------------------------- scenarios


class Scenario(NamedTuple):
    """Operations that were recorded, and what is promised of them."""

    trace: Trace
    check: Check
    # A function of (folder, disks) that returns the jobs for check_second_cuts.
    continuing: Callable[[Path, list[Path]], list[Callable[[], Any]]]
    disk: Path  # its content after the operations


def in_one_process(job: Callable[[list[Path]], Any]) -> Callable[..., list[Callable[[], Any]]]:
    """Return a function of (folder, disks) that returns a list with a call of job(disks)."""
    return lambda folder, disks: [functools.partial(job, disks)]


def random_settings(number: int) -> list[dict[str, Any]]:
    """Return settings for three calls of `save`. Those of number 0 are always the same."""
    if not number:
        return [{"width": 60}] * 3
    chance = random.Random(number)
    keep, width = chance.randint(1, 3), chance.randint(1, 200)
    return [{"keep": keep, "width": width, "loss": chance.random()} for _ in range(3)]


def record_whole_saves(folder: Path, number: int = 0) -> Scenario:
    """Save three times into a new folder. The third save deletes the first checkpoint."""
    (folder / "disk").mkdir(parents=True)

    def job() -> None:
        for step, settings in enumerate(random_settings(number), 1):
            save(ckpt, f"{folder}/disk/new/out", step, **settings)

    check = functools.partial(check_and_continue, ckpt, ())
    continuing = in_one_process(functools.partial(continue_each, ckpt))
    return Scenario(record(folder, job), check, continuing, folder / "disk")


def record_sharded_saves(folder: Path, number: int = 0) -> Scenario:
    """Do the same with shards on two ranks."""
    (folder / "disk").mkdir(parents=True)

    def job(files: Any, is_first: bool) -> None:
        for step, settings in enumerate(random_settings(number), 1):
            save(files, f"{folder}/disk/new/out", step, is_first, **settings)

    check = functools.partial(check_and_continue, BOTH, ())
    trace = record(folder, *in_ranks(folder, job))
    return Scenario(trace, check, continue_each_in_ranks, folder / "disk")


def record_remove(folder: Path, sharded_saves: Scenario) -> Scenario:
    """Delete two sharded checkpoints and a file, which are older than the newest one."""
    shutil.copytree(sharded_saves.disk, folder / "disk")
    out = f"{folder}/disk/new/out"
    for step in (4, 5):
        save(ckpt, out, step, keep=9)
    names = [entry.name for entry in ckpt.list_checkpoints(out)[:-1]]

    def job() -> None:
        mark("saved 5")
        for name in names:
            sharded.remove(ckpt, out, name)
            if not name.endswith(".pt"):  # the deletion of a file may be undone
                mark(f"gone {name}")

    check = functools.partial(check_and_continue, BOTH, ())
    continuing = in_one_process(functools.partial(continue_each, BOTH))
    return Scenario(record(folder, job), check, continuing, folder / "disk")


def damage(path: Path, state: dict[str, Any]) -> None:
    """Change one bit of a weight or a moment in a file. Only a digest shows this."""
    raw = bytearray(path.read_bytes())
    moments = [moments for o in state["optimizers"] for moments in o.get("state", {}).values()]
    tensors = [t for values in (state["model"], *moments) for t in values.values()]
    at = max(raw.find(tensor.numpy().tobytes()) for tensor in tensors)
    assert at > 0
    raw[at] ^= 1
    path.write_bytes(raw)


def record_set_aside(folder: Path, sharded_saves: Scenario) -> Scenario:
    """Continue a run whose newest checkpoints, a folder and a file, are damaged."""
    shutil.copytree(sharded_saves.disk, folder / "disk")
    out = f"{folder}/disk/new/out"
    for step in (4, 5):
        save(ckpt, out, step, keep=9)
    entries = ckpt.list_checkpoints(out)
    names = [entry.name for entry in entries if entry.step in (3, 5)]
    damage(Path(out, names[0], "__0_0.distcp"), make_state(3, 60))
    damage(Path(out, names[1]), make_state(5, 5))
    Path(out, entries[-2].name).unlink()
    check = functools.partial(check_and_continue, BOTH, names)
    continuing = in_one_process(functools.partial(continue_each, BOTH))
    trace = record(folder, functools.partial(continue_run, BOTH, out))
    return Scenario(trace, check, continuing, folder / "disk")


def record_texts(folder: Path) -> Scenario:
    """Replace metrics.jsonl, to which a line was added, and config.json."""
    old, line = {name: text + "old\n" for name, text in TEXTS.items()}, "a line\n"
    (folder / "disk").mkdir(parents=True)
    for name, text in old.items():
        (folder / "disk" / name).write_text(text)

    def write(disk: Path) -> None:
        ckpt.append_text(f"{disk}", "metrics.jsonl", line)
        for name, text in TEXTS.items():
            ckpt.write_text(f"{disk}", name, text)
            mark(f"written {name}")

    def check(disk: Path, marks: list[str]) -> None:
        for name, new in TEXTS.items():
            text = ckpt.read_text(f"{disk}", name)
            if f"written {name}" in marks:
                assert text == new, (name, text)
            elif name == "metrics.jsonl" and text.startswith(old[name]):
                added = text.removeprefix(old[name])
                assert line.startswith(added) or not added.strip("\0"), text
            else:
                assert text in (old[name], new), (name, text)
        with ckpt.lock(f"{disk}"):
            assert {*os.listdir(disk)} == {".lock", *TEXTS}

    def write_each(disks: list[Path]) -> None:
        for disk in disks:
            mark("case")
            for name, text in old.items():  # so that this run, too, has something to replace
                ckpt.write_text(f"{disk}", name, text)
            write(disk)

    trace = record(folder, functools.partial(write, folder / "disk"))
    return Scenario(trace, check, in_one_process(write_each), folder / "disk")


def record_cache(folder: Path, make: Callable[[], str], content: bytes) -> Scenario:
    """Put a file into the cache. make: does this, and returns the path of the file."""
    (folder / "disk").mkdir(parents=True)

    def make_each(disks: list[Path]) -> None:
        for disk in disks:
            mark("case")
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("XDG_CACHE_HOME", f"{disk}/cache")
                patch.setenv("TOKENIZERS_PARALLELISM", "false")
                path = Path(make())
            assert path.read_bytes() == content
            assert {*os.listdir(path.parent)} <= {path.name, ".lock"}

    def check(disk: Path, marks: list[str]) -> None:
        for path in disk.rglob("*.*"):
            if path.suffix in (".bin", ".npy"):
                assert path.read_bytes() == content, path
        make_each([disk])

    trace = record(folder, functools.partial(make_each, [folder / "disk"]))
    return Scenario(trace, check, in_one_process(make_each), folder / "disk")


def record_download(folder: Path) -> Scenario:
    url, content = "memory://power-cuts/x.bin", random.Random(0).randbytes(50_000)
    fsspec.filesystem("memory").pipe(url, content)
    return record_cache(folder, lambda: remote.download(url)[0], content)


def record_tokens(folder: Path) -> Scenario:
    """Encode a text with a tokenizer.json."""
    tokenizers = pytest.importorskip("tokenizers")
    from extras import tokenizer

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "a": 1, "b": 2}, "?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder.mkdir(parents=True)
    text = folder / "text.txt"
    text.write_text(" ".join(random.Random(0).choices("ab", k=10_000)))

    def make() -> str:
        return tokenizer.encode_files([f"{text}"], words.to_str(), os.environ["XDG_CACHE_HOME"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", f"{folder}/expected")
        content = Path(make()).read_bytes()
    ids = [0, 0] + [" ab".index(letter) for letter in text.read_text().split()]
    assert np.load(next(folder.rglob("*.npy"))).tolist() == ids[2:]
    return record_cache(folder, make, content)


RECORDERS: dict[str, Callable[..., Scenario]] = {
    "saves": record_whole_saves,
    "sharded saves": record_sharded_saves,
    "remove": record_remove,
    "set aside": record_set_aside,
    "texts": record_texts,
    "download": record_download,
    "tokens": record_tokens,
}
EACH = pytest.mark.parametrize("name", RECORDERS)


@pytest.fixture(scope="module", autouse=True)
def import_modules() -> None:
    """Import what a save needs. Otherwise the import would be recorded with each save."""
    make_state(1, 1)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Scenario]:
    """Return a function: name of a scenario -> the scenario, which is recorded once."""

    @functools.cache
    def get(name: str) -> Scenario:
        needed = [get("sharded saves")] if name in ("remove", "set aside") else []
        return RECORDERS[name](tmp_path_factory.mktemp("power") / "cut", *needed)

    return get


@pytest.fixture(scope="module")
def first_cuts(recorded: Callable[[str], Scenario]) -> Callable[[str], list[Case]]:
    """Return a function: name of a scenario -> all cases of a power cut, which were checked."""
    return functools.cache(
        lambda name: check_power_cuts(recorded(name).trace, recorded(name).check)
    )


@EACH
def test_a_power_cut_at_any_moment_leaves_the_old_or_the_new_files(name, first_cuts, count):
    cases = first_cuts(name)
    assert len(cases) > 5
    count(f"power cut: {name}", cases)


@EACH
def test_a_second_power_cut_while_the_run_continues(
    name, recorded, first_cuts, count, is_torture, tmp_path
):
    scenario = recorded(name)
    cases = pick(first_cuts(name), 10**9 if is_torture else 5)
    found = check_second_cuts(tmp_path, cases, scenario)
    assert len(found) > 2 * len(cases)
    count(f"second power cut, after {len(cases)} cases: {name}", found)


@pytest.mark.parametrize("kind", ["saves", "sharded saves"])
def test_a_power_cut_at_any_moment_of_random_saves(kind, count, is_torture, tmp_path):
    """The number of kept checkpoints, the size of the model and the losses are random."""
    few, many = {"saves": (3, 200), "sharded saves": (1, 20)}[kind]
    cases: list[Case] = []
    for number in range(1, 1 + (many if is_torture else few)):
        scenario = RECORDERS[kind](tmp_path / f"{number}", number=number)
        cases += check_power_cuts(scenario.trace, scenario.check)
    count(f"power cut: random {kind}", cases)


# A scenario, the path of what is not synced, and how: left out, or done after the rename.
UNSAFE = [
    ("saves", "", "missing"),  # make_folder: the folder above new
    ("saves", "new", "missing"),
    ("saves", "new/out", "missing"),
    ("saves", "new/out/.saving-*", "missing"),
    ("saves", "new/out/.saving-*", "late"),
    ("sharded saves", "", "missing"),
    ("sharded saves", "new", "missing"),
    ("sharded saves", "new/out", "missing"),
    ("sharded saves", "new/out/.saving-?", "missing"),
    ("sharded saves", "new/out/.saving-?/__0_0.distcp", "missing"),
    ("sharded saves", "new/out/.saving-?/__1_0.distcp", "missing"),
    ("sharded saves", "new/out/.saving-?/.saving-*", "missing"),  # becomes manifest.json
    ("remove", "new/out", "missing"),
    ("set aside", "new/out", "missing"),
    ("set aside", "new/out/.saving-*", "missing"),
    ("texts", "", "missing"),
    ("texts", ".saving-*", "missing"),
    ("texts", ".saving-*", "late"),
    ("download", "*.part", "missing"),
    ("download", "*.part", "late"),
    ("tokens", "*.part", "missing"),
    ("tokens", "*.part", "late"),
]


@pytest.mark.parametrize("name, path, how", UNSAFE)
def test_an_fsync_that_is_missing_or_late_would_fail_the_first_test(name, path, how, recorded):
    scenario = recorded(name)
    operations = [*scenario.trace.operations]
    syncs = [i for i, o in enumerate(operations) if o[0] == "sync" and fnmatch(o[3], path)]
    assert syncs
    for i in syncs:
        if how == "late":
            assert operations[i + 1][0] == "rename"
            operations[i : i + 2] = operations[i + 1], ("sync", operations[i][1], i + 1, path)
        else:
            operations[i] = ("mark", "no fsync")
    with pytest.raises(AssertionError):
        check_power_cuts(scenario.trace._replace(operations=operations), scenario.check)
