"""Promise 5, in counted disk states: what is on the disk after a power cut at any moment.

strace records the system calls of real saves and of the start of the next run, in one process or in
two ranks. The test then replays them on a model of a disk that keeps no more than POSIX promises.
What was written to a file is durable after an fsync of the file. A change of the names in a folder
is durable after an fsync of the folder. A power cut keeps any subset of the other changes. Of each
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
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest
import torch
import torch.distributed as dist
from conftest import TABLE, same
from torch import nn

import ckpt
from extras import sharded

torch.set_num_threads(1)  # the tensors are tiny, and a child of a fork has no other threads
pytestmark = pytest.mark.torture

Tree = bytes | dict[str, Any]  # the content of a file, or the names in a folder with their trees
Check = Callable[[Path, list[str]], None]  # (the disk after a power cut, the marks before it)
MANY = 2000
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None  # an fsync takes no time there


# ------------------------------------------------------------------------ recording of system calls

# Calls that change nothing on the disk. Any other call that parse() does not know is an error.
HARMLESS = "access chdir close faccessat2 fadvise64 fcntl flock fstat getcwd getdents64 ioctl lstat"
HARMLESS += " mmap newfstatat poll pread64 readlink readlinkat select stat statfs statx"


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
    with open(os.devnull, "w") as null:
        null.write(f"mark {text}")


def cannot_test(reason: str) -> NoReturn:
    """Skip the test. In continuous integration (CI is set), fail instead."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(f"not tested: {reason}")


def attach_strace(pid: int, *options: str) -> subprocess.Popen:
    """Let strace trace a process and its children."""
    if not shutil.which("strace"):
        cannot_test("strace is missing")
    command = ["strace", "-f", "-e", "signal=none", *options, "-p", f"{pid}"]
    strace = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    text = strace.stderr.readline()
    if "attached" not in text:
        cannot_test(f"strace failed: {text}")
    return strace


def record(disk: Path, job: Callable[[], Any]) -> Trace:
    """Call job() in another process; return what it did to a folder."""
    before, log, (ready, go) = read_tree(disk), disk.with_name("strace"), os.pipe()
    pid = os.fork()
    if pid == 0:  # it waits until the parent closes the pipe, when strace is attached
        os.close(go)
        os.read(ready, 1)
        signal.alarm(300)  # ends a process that hangs
        run_and_exit(job)
    options = f"-y -xx -s 9999999 -e trace=%file,%desc -o {log}".split()
    strace = attach_strace(pid, *options)
    os.close(go)
    assert os.waitpid(pid, 0)[1] == 0
    strace.communicate()
    return parse(log.read_text(), disk, before)


def run_and_exit(job: Callable[[], Any]) -> NoReturn:
    """Call job() in a child of a fork, and end the process."""
    try:
        # The threads of OpenMP do not exist here if an earlier test of this process has used them.
        torch.set_num_threads(1)
        job()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def parse(log: str, disk: Path, before: Tree) -> Trace:
    """Return what the calls in a log of strace did to a folder.

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
    operations, names = trace.operations, copy.deepcopy(trace.names)  # what the processes see now
    sizes = {number: len(content) for number, content in trace.contents.items()}
    positions: dict[str, int] = {}  # of each handle with its path, as strace writes both
    begun: dict[str, tuple[str, int]] = {}  # thread -> its call, number of complete operations

    def locate(path: str) -> tuple[int, str]:
        """Return folder and name. The name "" is that of the disk itself."""
        folder, name, *below = 0, *path.removeprefix(f"{disk}").strip("/").split("/")
        for each in below:
            folder, name = names[folder][name], each
        return folder, name

    def number_of(path: str) -> int:
        folder, name = locate(path)
        return names[folder][name] if name else 0

    def decode(text: str) -> bytes:
        return bytes.fromhex(text.replace("\\x", ""))

    encoded = "".join(f"\\x{byte:02x}" for byte in os.fsencode(disk))
    for line in log.splitlines():
        assert '"...' not in line, "strace has cut a text"
        thread, text = line.split(maxsplit=1)
        first, complete = begun.pop(thread, ("", len(operations)))
        text = first + text.partition(" resumed>")[2] if first else text
        if text.endswith(" <unfinished ...>"):
            begun[thread] = text.removesuffix(" <unfinished ...>"), complete
            continue
        ended = re.fullmatch(r"(\w+)\((.*)\) += (\d+)(<.*>)?.*", text)
        if not ended:  # a call that failed changed nothing
            continue
        call, arguments, result = ended[1], ended[2], int(ended[3])
        texts = [decode(each) for each in re.findall(r'"([^"]*)"', arguments)]
        if call == "write" and texts[0].startswith(b"mark "):
            operations.append(("mark", texts[0].decode()[5:]))
        if encoded not in text or call in HARMLESS.split():
            continue
        # Handles are written as 5<path>. A handle of the folder can be before a relative name.
        handle = arguments.partition(",")[0]
        of_handle = decode(handle[handle.find("<") + 1 : -1]).decode() if "<" in handle else ""
        pairs = re.findall(r'(?:<([^>]*)>, )?"([^"]*)"', arguments)
        paths = [os.fsdecode(os.path.join(*map(decode, pair))) for pair in pairs]
        match call:
            case "openat":
                (folder, name), path = locate(paths[0]), paths[0]
                if name and name not in names[folder]:
                    number = names[folder][name] = next(numbers)
                    sizes[number] = 0
                    operations.append(("create", folder, name, number))
                elif "O_TRUNC" in arguments and sizes[number_of(path)]:
                    sizes[number_of(path)] = 0
                    operations.append(("truncate", number_of(path), 0))
                is_at_end = "O_APPEND" in arguments
                positions[f"{result}{ended[4]}"] = sizes[number_of(path)] if is_at_end else 0
            case "read" | "write":
                number, position = number_of(of_handle), positions[handle]
                if call == "write":
                    operations.append(("write", number, position, texts[0][:result]))
                positions[handle] += result
                sizes[number] = max(sizes.get(number, 0), positions[handle])
            case "lseek":
                positions[handle] = result
            case "ftruncate":
                sizes[number_of(of_handle)] = size = int(arguments.split()[1])
                operations.append(("truncate", number_of(of_handle), size))
            case "fsync":
                path = os.path.relpath(of_handle, disk)
                operations.append(("sync", number_of(of_handle), complete, path))
            case "rename":
                (folder, old), (there, new) = map(locate, paths)
                assert folder == there, "the model knows no rename from one folder to another"
                names[folder][new] = names[folder].pop(old)
                operations.append(("rename", folder, new, names[folder][new], old))
            case "unlink" | "unlinkat" | "rmdir":
                folder, name = locate(paths[0])
                del names[folder][name]
                operations.append(("unlink", folder, name))
            case "mkdir":
                folder, name = locate(paths[0])
                number = names[folder][name] = next(numbers)
                names[number] = {}
                operations.append(("mkdir", folder, name, number))
            case _:
                raise AssertionError(f"the model does not know {call}({arguments})")
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

    If there are more than MANY, yield those that differ in up to one place from the first or the
    last way, and random ones. Only if an fsync is missing can there be so many.
    """
    if math.prod(map(len, options)) <= MANY:
        yield from itertools.product(*options)
        return
    for base in ([each[0] for each in options], [each[-1] for each in options]):
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

    @functools.cache
    def states(number: int, is_read: bool) -> list[Tree]:
        """Return the states of a file or folder, without content if no run reads that."""
        if number in folders:
            return [*folder_states(number, is_read)]
        return [*file_states(number)] if is_read else [b""]

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


Case = tuple[Tree, list[str]]  # a disk state, and the marks before the power cut that left it


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
                cases[key] = tree, marks
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
    write_tree({disk.name: tree for disk, (tree, _) in zip(disks, cases)}, folder / "disk")

    def job() -> None:
        for disk in disks:
            mark("case")
            continue_run(scenario.files, f"{disk}/new/out")

    trace = record(folder / "disk", job)
    begins = [i for i, operation in enumerate(trace.operations) if operation == ("mark", "case")]
    found: list[Case] = []
    for disk, begin, end in zip(disks, begins, [*begins[1:], None], strict=True):
        found += check_power_cuts(trace, scenario.check, begin, end, trace.names[0][disk.name])
    return found


# -------------------------------------------------------------------------------------- checkpoints

# The functions for a folder with whole and sharded checkpoints, in a process without other ranks.
BOTH = sharded.storage(ckpt, write_sharded=False)
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
            state = files.load(out, entry)
            assert same(state, make_state(entry.step, len(state["model"]["0.bias"]))), entry
    return step


def save(files: Any, out: str, step: int, is_first: bool = True, width: int = 5) -> None:
    """Save a checkpoint in a thread, as run.py does. With shards, every rank must call this."""
    state = files.snapshot(*build(step, width), step=step)
    if is_first:
        mark(f"begun {step}")
    ThreadPoolExecutor(1).submit(files.save, out, state, step, keep=2).result()
    if is_first:
        mark(f"saved {step}")


def continue_run(files: Any, out: str) -> None:
    """Do what the next run does in its folder, up to its first save."""
    found, rejected = files.newest(out)
    step = found.entry.step if found else 0
    mark(f"saved {step}")
    files.make_folder(out)
    with files.lock(out):
        for name in rejected:
            files.set_aside(out, name)
            mark(f"gone {name}")
        for name, text in TEXTS.items():
            files.write_text(out, name, text)
        save(files, out, step + 1)


def in_ranks(folder: Path, job: Callable[[Any, bool], Any]) -> list[Callable[[], None]]:
    """Return a function for each of two ranks that calls job(files, whether this is rank 0)."""

    def run(rank: int) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
        job(sharded.storage(ckpt, write_sharded=True), rank == 0)

    return [partial(run, rank) for rank in range(2)]


def damage(path: Path) -> None:
    """Change one bit of a file."""
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


# ----------------------------------------------------------------------------------------- scenarios


class Scenario(NamedTuple):
    """What a run did to the folder `disk`/new/out."""

    trace: Trace
    disk: Path
    files: Any  # the functions of ckpt.py
    damaged: Sequence[str]  # names of checkpoints that were damaged before

    def check(self, disk: Path, marks: list[str]) -> None:
        """Check the folder after a power cut. Continue the run, and check the folder again."""
        files, out = self.files, f"{disk}/new/out"
        for name, text in TEXTS.items():
            assert files.read_text(out, name) in ("", "old", text), f"half of {name}"
        step = check_checkpoints(files, out, marks, self.damaged)
        continue_run(files, out)
        assert check_checkpoints(files, out, [f"saved {step + 1}"]) == step + 1
        others = {*os.listdir(out)} - {entry.name for entry in files.list_checkpoints(out)}
        assert others - {".lock", *TEXTS} <= {f"{name}.damaged" for name in self.damaged}, others


def record_whole_saves(disk: Path) -> Scenario:
    """Save three times into a new folder. The third save deletes the first checkpoint."""
    disk.mkdir()

    def job() -> None:
        for step in (1, 2, 3):
            save(ckpt, f"{disk}/new/out", step, width=60)

    return Scenario(record(disk, job), disk, ckpt, ())


def record_sharded_saves(disk: Path) -> Scenario:
    """Do the same with shards on two ranks."""
    disk.mkdir()

    def of_rank(files: Any, is_first: bool) -> None:
        for step in (1, 2, 3):
            save(files, f"{disk}/new/out", step, is_first, width=60)

    def job() -> None:
        for of_one in in_ranks(disk.parent, of_rank):
            if os.fork() == 0:
                run_and_exit(of_one)
        assert [os.wait()[1] for _ in range(2)] == [0, 0]

    return Scenario(record(disk, job), disk, BOTH, ())


def record_set_aside(disk: Path, sharded_saves: Scenario) -> Scenario:
    """Continue a run whose newest checkpoints, a folder and a file, are damaged."""
    shutil.copytree(sharded_saves.disk, disk)
    out = f"{disk}/new/out"
    ckpt.save(out, make_state(4, 5), 4)
    for name in TEXTS:
        ckpt.write_text(out, name, "old")
    third, fourth = (entry.name for entry in ckpt.list_checkpoints(out)[-2:])
    damage(Path(out, third, "__0_0.distcp"))
    damage(Path(out, fourth))
    return Scenario(record(disk, partial(continue_run, BOTH, out)), disk, BOTH, (third, fourth))


RECORDERS: dict[str, Callable[..., Scenario]] = {
    "saves": record_whole_saves,
    "sharded saves": record_sharded_saves,
    "set aside": record_set_aside,
}
EACH = pytest.mark.parametrize("name", RECORDERS)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Scenario]:
    """Return a function: name of a scenario -> the scenario, which is recorded once."""

    @functools.cache
    def get(name: str) -> Scenario:
        needed = [get("sharded saves")] if name == "set aside" else []
        return RECORDERS[name](tmp_path_factory.mktemp("power") / "disk", *needed)

    return get


@pytest.fixture(scope="module")
def first_cuts(recorded: Callable[[str], Scenario]) -> Callable[[str], list[Case]]:
    """Return a function: name of a scenario -> all cases of a power cut, which were checked."""
    return functools.cache(
        lambda name: check_power_cuts(recorded(name).trace, recorded(name).check)
    )


@pytest.fixture
def count(request: pytest.FixtureRequest) -> Callable[[str, list[Case]], None]:
    """Return a function that puts the number of different disk states into the printed table."""
    begun = time.monotonic()

    def add(fault: str, cases: list[Case]) -> None:
        number = len({freeze(tree) for tree, _ in cases})
        request.config.stash[TABLE].append((fault, number, number, time.monotonic() - begun))

    return add


@EACH
def test_a_power_cut_at_any_moment_leaves_the_old_or_the_new_files(name, first_cuts, count):
    cases = first_cuts(name)
    assert len(cases) > 5
    count(f"power cut: {name}", cases)


@EACH
def test_a_second_power_cut_while_the_run_continues(
    name, recorded, first_cuts, count, request, tmp_path
):
    different = [*{freeze(case[0]): case for case in first_cuts(name)}.values()]
    few = 1 if request.config.option.markexpr == "torture" else len(different) // 5
    cases = different[::-few]
    found = check_second_cuts(tmp_path, cases, recorded(name))
    assert len(found) > 2 * len(cases)
    count(f"second power cut, after {len(cases)} cases: {name}", found)


# A scenario, the path of what is not synced, and how: left out, or done after the rename.
UNSAFE = [
    ("saves", ".", "missing"),  # make_folder: the folder above new
    ("saves", "new", "missing"),
    ("saves", "new/out", "missing"),
    ("saves", "new/out/.saving-*", "missing"),
    ("saves", "new/out/.saving-*", "late"),
    ("sharded saves", "new/out", "missing"),
    ("sharded saves", "new/out/.saving-?", "missing"),
    ("sharded saves", "new/out/.saving-?/__0_0.distcp", "missing"),
    ("sharded saves", "new/out/.saving-?/__1_0.distcp", "missing"),
    ("sharded saves", "new/out/.saving-?/.saving-*", "missing"),  # becomes manifest.json
    ("set aside", "new/out", "missing"),
    ("set aside", "new/out/.saving-*", "missing"),
    ("set aside", "new/out/.saving-*", "late"),
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
