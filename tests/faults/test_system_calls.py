"""Promise 5, in counted system calls: each call that an operation makes on its files fails once.

The operations are saves, deletions, the start of a run after a crash, and the text files. strace
shows which system calls an operation makes on its folder. Then the operation is repeated, for each
call and each kind of fault: the Nth call of a kind fails, the Nth and all later calls of the kind
fail, or the process is killed at this call.

After each trial, the newest checkpoint that verifies is the last one or the one before. Either the
operation has reported the fault, or the folder is the same as without a fault. The next run
continues, and its first save leaves nothing over.

A trial is a number, from which its fault follows. A trial that fails prints its number.
"""

import functools
import json
import os
import random
import re
import shutil
import signal
import tempfile
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from test_power_cuts import (
    BOTH,
    MEMORY,
    TEXTS,
    attach_strace,
    build,
    check_checkpoints,
    damage,
    in_ranks,
    make_state,
    read_tree,
    run_and_exit,
    write_tree,
)

import ckpt

torch.set_num_threads(1)  # the tensors are tiny, and a child of a fork has no other threads
pytestmark = pytest.mark.torture

WIDTH = 60  # of the model; its file takes several writes
SECONDS = 60  # a process that takes longer is killed, and its trial fails
LINE = '{"step": 2}\n'
# With these calls, temporary files are deleted, and temporary folders.
CLEANING = "unlink unlinkat rmdir rename openat newfstatat getdents64 fcntl close fsync".split()
KINDS = [("EIO", ""), ("EIO", "+"), ("ENOSPC", ""), ("SIGKILL", "")]

Wait = Callable[[], None]  # a process calls this when it is ready for the faults
Jobs = Callable[[str, Wait], list[Callable[[], Any]]]  # of (folder, wait): a job for each process


class Fault(NamedTuple):
    """Call number `number` of the calls of a name fails."""

    call: str
    what: str  # an errno, or SIGKILL
    number: int
    later: str  # "+" if all later calls of this name fail too


class Operation(NamedTuple):
    """What the faults disturb.

    fill: makes the folder before the operation.
    jobs: each calls wait() and then does the operation. It returns [step, rejected], what `newest`
        found, or None.
    process: the one that gets the faults. The first one reports errors.
    """

    fill: Callable[[str], Any]
    jobs: Jobs
    process: int = 0


class Outcome(NamedTuple):
    """What a trial left, besides the files."""

    log: list[str]  # the calls on the folder, of the process that got the faults
    errors: list[str | None]  # of each process; "" for a success, None if the process was killed
    result: Any  # of the first process


def run_traced(jobs: Jobs, traced: int, out: Path, *options: str) -> Outcome:
    """Call each job in a process of its own, one of them under strace."""
    ready, go, log, pids = os.pipe(), os.pipe(), out.with_name("log"), []
    reports = [out.with_name(f"report {number}") for number in range(2)]

    def wait() -> None:
        os.close(go[1])
        os.write(ready[1], b".")
        os.read(go[0], 1)  # ends when all processes have closed the other end

    for job, report in zip(jobs(f"{out}", wait), reports):
        pids.append(os.fork())
        if pids[-1] == 0:
            signal.alarm(SECONDS)
            run_and_exit(partial(run_and_report, job, report))
    for end in (ready[1], go[0]):
        os.close(end)
    for _ in pids:
        assert os.read(ready[0], 1), "a process ended before the operation"
    strace = attach_strace(pids[traced], "-y", "-o", f"{log}", *options)
    for end in (ready[0], go[1]):
        os.close(end)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    strace.communicate()
    assert {*codes} <= {0, -signal.SIGKILL}, f"a process hung, or crashed: {codes}"
    pairs = zip(codes, reports)
    said = [[None, None] if code else json.loads(report.read_text()) for code, report in pairs]
    calls = re.findall(r"^\d+ +(\w+\(.*)", log.read_text(), re.M)
    return Outcome(calls, [error for error, _ in said], said[0][1])


def run_and_report(job: Callable[[], Any], report: Path) -> None:
    """Call job() and write [error, result] to a file."""
    chance = random.Random(0)  # the same names of temporary files in each trial
    uuid.uuid4 = lambda: uuid.UUID(int=chance.getrandbits(128))
    error, result = "", None
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            result = job()
        # An old checkpoint that cannot be deleted is reported so.
        error = " ".join(f"{w.message}" for w in warned if "not deleted" in f"{w.message}")
    except BaseException as caught:
        error = f"{type(caught).__name__}: {caught}"
    report.write_text(json.dumps([error, result]))


class Studied(NamedTuple):
    """An operation, and what it does without a fault."""

    operation: Operation
    out: Path  # the folder of the checkpoints
    before: dict[str, Any]  # its content
    intact: list[ckpt.Entry]  # the checkpoints in it that verify
    damaged: set[str]  # the names of those that do not
    paths: list[str]  # options for strace, with the path of each file that the operation uses
    reference: Outcome
    after: dict[str, Any]  # the content of the folder

    @property
    def calls(self) -> Counter[str]:
        """How many calls of each name the operation makes on the folder."""
        return Counter(line.partition("(")[0] for line in self.reference.log)


def read_folder(path: Path) -> dict[str, Any]:
    """Return the content of a folder, without the text of the lock, which has the time."""
    return {n: tree for n, tree in read_tree(path).items() if n != ".lock"} if path.exists() else {}


def published(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a folder without the temporary files, which the next run deletes."""
    return {name: each for name, each in tree.items() if not name.startswith(ckpt.TEMPORARY)}


def run_again(operation: Operation, out: Path, before: dict[str, Any], *options: str) -> Outcome:
    """Do the operation in a fresh copy of its folder."""
    shutil.rmtree(out, ignore_errors=True)
    if before:
        write_tree(before, out)
    return run_traced(operation.jobs, operation.process, out, *options)


def study(folder: Path, operation: Operation) -> Studied:
    """Do the operation without a fault."""
    out = folder / "out"
    folder.mkdir()
    operation.fill(f"{out}")
    before, damaged = read_folder(out), {*BOTH.newest(f"{out}")[1]}
    intact = [entry for entry in BOTH.list_checkpoints(f"{out}") if entry.name not in damaged]
    log = "\n".join(run_again(operation, out, before).log)
    names = sorted({*re.findall(rf'["<]({re.escape(f"{out}")}(?:/[^">]*)?)[">]', log)})
    paths = [option for name in names for option in ("-P", name)]
    reference = run_again(operation, out, before, *paths)
    assert not any(reference.errors), reference
    return Studied(operation, out, before, intact, damaged, paths, reference, read_folder(out))


def list_faults(studied: Studied) -> list[Fault]:
    """Return the faults of each call, so mixed that the first ones are about different calls.

    One fault of each name comes after its last call.
    """
    chance, calls = random.Random(0), studied.calls
    faults = [
        Fault(call, what, number, later)
        for call, count in calls.items()
        for number in range(1, count + 1)
        for what, later in KINDS
    ]
    faults += [Fault(call, "EIO", count + 1, "+") for call, count in calls.items()]
    chance.shuffle(faults)
    seen = Counter[str]()
    order = {fault: seen.update([fault.call]) or seen[fault.call] for fault in faults}
    return sorted(faults, key=order.get)


def try_fault(studied: Studied, fault: Fault) -> None:
    """Check what the operation promises when this fault happens."""
    operation, out, before, intact, damaged, paths, reference, after = studied
    kind = "signal" if fault.what == "SIGKILL" else "error"
    rule = f"inject={fault.call}:{kind}={fault.what}:when={fault.number}{fault.later}"
    outcome = run_again(operation, out, before, *paths, "-e", rule)
    error, now = outcome.errors[0], read_folder(out)
    about = f"{fault}: {outcome.errors}, {outcome.result}, {sorted(now)}"

    is_killed = outcome.errors[operation.process] is None
    is_injected = any("(INJECTED)" in line for line in outcome.log)
    assert (is_killed or is_injected) == (fault.number <= studied.calls[fault.call]), about
    if error and not is_killed:
        assert re.search("Input/output error|No space left|not seekable", error), about
    elif error == "" and outcome.result == reference.result and fault.call != "flock":
        # After flock has failed, lock() returns None, as if there were no locks.
        assert not is_injected or fault.call != "fsync", f"not reported: {about}"
        assert published(now) == published(after), f"not reported: {about}"
    for name in {*now} - {*before}:
        is_left = name.startswith(ckpt.TEMPORARY) and not is_killed
        assert not is_left or fault.call in CLEANING, f"{name} is left, {about}"
    for name in TEXTS:
        assert now.get(name) in (before.get(name), after.get(name)), f"{name}, {about}"

    last = max((e.step for e in ckpt.parse_names(after)), default=0)
    # A checkpoint that could not be read may be good.
    assert not any(f"{entry.name}.damaged" in now for entry in intact), about
    usable = [entry.step for entry in intact]
    step = check_checkpoints(BOTH, f"{out}", [], damaged)
    assert step == last or error != "" or outcome.result != reference.result, about
    assert step in (last, *usable[-1:], *([] if usable else [0])), about

    # The next run continues, and its first save leaves nothing over.
    resumed, rejected = continue_run(f"{out}")
    assert resumed == step and {*rejected} <= damaged, about
    assert check_checkpoints(BOTH, f"{out}", []) == step + 1, about
    kept = {entry.name for entry in BOTH.list_checkpoints(f"{out}")}
    ours = {*before, *TEXTS, ".lock"} | {*(outcome.result or [0, {}])[1]}
    left = {name.removesuffix(".damaged") for name in {*os.listdir(out)} - kept}
    assert len(kept) <= 2 and left <= ours and not any(ckpt.TEMPORARY in n for n in left), about


# --------------------------------------------------------------------------------------- operations


def resume(out: str) -> list[Any]:
    """Do what a run does before its first step. Return [step, rejected]."""
    found, rejected = BOTH.newest(out)
    BOTH.make_folder(out)
    lock = BOTH.lock(out)
    for name in rejected:
        BOTH.set_aside(out, name)
    for name, text in TEXTS.items():
        BOTH.read_text(out, name)
        BOTH.write_text(out, name, text)
    if lock:
        lock.close()
    return [found.entry.step if found else 0, rejected]


def continue_run(out: str) -> list[Any]:
    """Resume, and save the next step."""
    step, rejected = resume(out)
    BOTH.save(out, make_state(step + 1, WIDTH), step + 1, None, 2)
    return [step, rejected]


def in_one(job: Callable[[str], Any]) -> Jobs:
    return lambda out, wait: [lambda: (wait(), job(out))[1]]


def save_whole(step: int) -> Jobs:
    return in_one(lambda out: ckpt.save(out, make_state(step, WIDTH), step, None, 2) and None)


def save_in_ranks(step: int, traced: int) -> Jobs:
    """Save on two ranks.

    traced: the rank that gets the faults. It is always the one that creates the temporary folder,
    so that it makes the same calls each time.
    """

    def make_jobs(out: str, wait: Wait) -> list[Callable[[], Any]]:
        def job(files: Any, is_first: bool) -> None:
            state = files.snapshot(*build(step, WIDTH), step=step)
            torch.distributed.barrier()
            wait()
            end = time.monotonic() + (is_first != (traced == 0))  # a second for the other rank
            while time.monotonic() < end and not Path(out, f"{ckpt.TEMPORARY}{step}").exists():
                time.sleep(0.001)
            files.save(out, state, step, None, 2)

        Path(out).with_name("store").unlink(missing_ok=True)
        return in_ranks(Path(out).parent, job)

    return make_jobs


def fill(out: str) -> None:
    """Save the steps 1 and 2, and write the text files."""
    for step in (1, 2):
        ckpt.save(out, make_state(step, WIDTH), step)
    for name, text in TEXTS.items():
        ckpt.write_text(out, name, text)


def fill_after_kill(out: str) -> None:
    """Do the same, with temporary files, which a killed process has left."""
    fill(out)
    Path(out, f"{ckpt.TEMPORARY}file").write_bytes(b"x")
    Path(out, f"{ckpt.TEMPORARY}3").mkdir()
    Path(out, f"{ckpt.TEMPORARY}3", "__0_0.distcp").write_bytes(b"x")


def fill_damaged(out: str) -> None:
    """Do the same, with a damaged checkpoint of step 2."""
    fill(out)
    damage(Path(out, ckpt.list_checkpoints(out)[-1].name))


def fill_sharded(out: str) -> None:
    os.mkdir(out)
    for step in (1, 2):
        assert run_traced(save_in_ranks(step, 0), 0, Path(out)).errors == ["", ""]


APPEND = in_one(lambda out: ckpt.append_text(out, "metrics.jsonl", LINE))
REPLACE = in_one(lambda out: ckpt.write_text(out, "metrics.jsonl", LINE))
OPERATIONS = {
    "first save": Operation(lambda out: None, save_whole(1)),
    "save and prune": Operation(fill, save_whole(3)),
    "resume": Operation(fill_after_kill, in_one(resume)),
    "set aside": Operation(fill_damaged, in_one(resume)),
    "append a line": Operation(fill, APPEND),
    "replace a text": Operation(fill, REPLACE),
    "sharded save, rank 0": Operation(fill_sharded, save_in_ranks(3, 0), 0),
    "sharded save, rank 1": Operation(fill_sharded, save_in_ranks(3, 1), 1),
}


@pytest.fixture(scope="module")
def studied() -> Iterator[Callable[[str], Studied]]:
    """Return a function: name of an operation -> what it does without a fault."""
    for step in range(1, 7):
        make_state(step, WIDTH)  # also imports what a save needs
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield functools.cache(lambda name: study(Path(folder, name), OPERATIONS[name]))


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_system_call_of_an_operation_fails(name, studied, trials):
    this = studied(name)
    faults = list_faults(this)
    text = f"{this.calls.total()} system calls of {len(this.calls)} kinds fail: {name}"
    trials(text, lambda number: try_fault(this, faults[number]), 16, len(faults), at_once=1)
