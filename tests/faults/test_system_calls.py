"""Promise 5, in counted system calls: each call that an operation makes on its files fails once.

The operations are saves, deletions, the start of a run after a crash, and the text files. strace
shows which system calls an operation makes on its folder. Then the operation is repeated, for each
call and each kind of fault: the Nth call of a kind fails, the Nth and all later calls of the kind
fail, or the process is killed at this call. The same is done with the recovery that follows.

After each trial, the newest checkpoint that verifies is the last one or the one before. Either the
operation has reported the fault, or it has done everything that it does without a fault, in the
same order. The next run continues, and its first save leaves nothing over.

A trial is a number, from which its fault follows. A trial that fails prints its number.
"""

import errno
import functools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from test_power_cuts import (
    BOTH,
    MEMORY,
    TEXTS,
    build,
    cannot_test,
    damage,
    freeze,
    in_ranks,
    is_state,
    make_state,
    read_tree,
    write_tree,
)

import ckpt

torch.set_num_threads(1)  # the tensors are tiny, and a child of a fork has no other threads
pytestmark = pytest.mark.torture

WIDTH = 60  # of the model; its file takes several writes
SECONDS = 60  # a process that takes longer is killed, and its trial fails
LINE = '{"step": 2}\n'
# Calls that change a folder or make it durable, as the log of strace shows them.
CHANGES = re.compile(
    r"openat\(.*O_CREAT|(write|ftruncate|f(data)?sync|rename\w*|unlink\w*|rmdir|mkdir\w*)\("
)
# Python repeats these calls after EINTR. On a local disk the others never fail with it.
REPEATED = "openat read write fsync flock ioctl fcntl".split()
# With these calls, temporary files are deleted, and temporary folders.
CLEANING = "unlink unlinkat rmdir rename".split()
CLEANING_FOLDERS = [*CLEANING, *"openat newfstatat getdents64 fcntl close fsync".split()]
# What happens, and whether all later calls fail too. (EINTR for ever would be an endless loop.)
KINDS = [("EIO", False), ("EIO", True), ("ENOSPC", False), ("ENOSPC", True), ("EINTR", False)]
KILL = ("SIGKILL", False)

Wait = Callable[[], None]  # a process calls this when it is ready for the faults


class Fault(NamedTuple):
    """The Nth call of a kind fails. What: EIO, ENOSPC, EINTR, or SIGKILL."""

    call: str
    what: str
    number: int
    and_later: bool  # whether all later calls of this kind fail too

    def __str__(self) -> str:
        return f"{self.call}:{self.what}:{self.number}{'+' * self.and_later}"


class Operation(NamedTuple):
    """What the faults disturb, in one process or in several.

    fill: makes the folder before the operation.
    run: a function of (folder, wait) that returns a job for each process. A job calls wait() and
        then does the operation. It returns [step, rejected], what `newest` found, or None.
    process: the one that gets the faults. The first one reports errors.
    """

    fill: Callable[[str], Any]
    run: Callable[[str, Wait], list[Callable[[], Any]]]
    process: int = 0


class Outcome(NamedTuple):
    """What a trial left, besides the files."""

    log: list[str]  # the calls on the folder, of the process that got the faults
    errors: list[str | None]  # of each process; "" for a success, None if the process was killed
    result: Any  # of the first process


# ------------------------------------------------------------------------------------- system calls


def run_traced(
    jobs: Callable[[Wait], list[Callable[[], Any]]], traced: int, folder: Path, options: list[str]
) -> Outcome:
    """Call each job in a process of its own, one of them under strace."""
    ready, go = os.pipe(), os.pipe()
    reports: list[Any] = []

    def wait() -> None:
        os.close(go[1])
        os.write(ready[1], b".")
        os.read(go[0], 1)  # ends when all processes have closed the other end

    for job in jobs(wait):
        report, answer = os.pipe()
        pid = os.fork()
        if pid == 0:
            signal.alarm(SECONDS)
            chance = random.Random(folder.name)  # the same names of temporary files in each trial
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
            os.write(answer, json.dumps([error, result]).encode())
            os._exit(0)
        os.close(answer)
        reports.append((pid, report))
    for end in (ready[1], go[0]):
        os.close(end)
    for _ in reports:
        assert os.read(ready[0], 1), "a process ended before the operation"
    strace = ["strace", "-ff", "-y", "-e", "signal=none", "-o", f"{folder}/log", *options]
    pid, said, text = reports[traced][0], [], ""
    with subprocess.Popen([*strace, "-p", f"{pid}"], stderr=subprocess.PIPE, text=True) as tracer:
        for line in tracer.stderr:
            text += line
            if " attached" in line:  # before this line, strace could miss calls
                break
        else:
            cannot_test(f"strace failed: {text}")
        for end in (ready[0], go[1]):
            os.close(end)
        for pid, report in reports:
            with open(report, "rb") as file:
                raw = file.read()
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert code in (0, -signal.SIGKILL), f"the process hung, or crashed with code {code}"
            said.append(json.loads(raw) if code == 0 else [None, None])
        tracer.communicate()
    lines = []
    for path in folder.glob("log.*"):
        lines += re.findall(r"^\w+\(.*", path.read_text(), re.M)
        path.unlink()
    return Outcome(lines, [error for error, _ in said], said[0][1])


def changes(log: list[str]) -> list[tuple[str, int]]:
    """Return the calls that changed the folder or made it durable, with their results.

    Left out are calls that failed, the text of the lock file, and the deletion of a temporary
    folder, which the next run completes. Several writes in a row are one, because Python uses
    another buffer if it cannot ask for the size of a block.
    """
    done: list[tuple[str, int]] = []
    for line in log:
        ended = re.match(r"(.*)\) += (-?\d+)", line)
        if not ended or not CHANGES.match(line) or "/.lock" in line:
            continue
        call, number = re.sub(r"\b\d+<", "<", ended[1]), int(ended[2])  # handles may differ
        is_deletion = re.match(rf"(unlinkat|rmdir)\(.*/{ckpt.TEMPORARY}", call)
        if number < 0 or is_deletion:
            continue
        if call.startswith("write("):
            call = call.partition(",")[0]
            if done and done[-1][0] == call:
                number += done.pop()[1]
        done.append((call, 0 if call.startswith("openat(") else number))
    return done


class Studied(NamedTuple):
    """An operation, and what it does without a fault."""

    operation: Operation
    folder: Path
    out: str  # the folder of the checkpoints
    before: dict[str, Any]  # its content
    intact: list[ckpt.Entry]  # the checkpoints in it that verify
    damaged: set[str]  # the names of those that do not
    paths: list[str]  # options for strace, with the path of each file that the operation uses
    reference: Outcome
    after: dict[str, Any]  # the content of the folder
    last_step: int  # of the newest checkpoint then

    @property
    def calls(self) -> Counter[str]:
        """How many calls of each name the operation makes on the folder."""
        return Counter(get_name(line) for line in self.reference.log)


def get_name(line: str) -> str:
    """Return the name of the system call in a line of the log."""
    return line.partition("(")[0]


def read_folder(path: str) -> dict[str, Any]:
    tree = read_tree(Path(path)) if os.path.isdir(path) else {}
    assert isinstance(tree, dict)
    return tree


def study(folder: Path, operation: Operation) -> Studied:
    """Do the operation without a fault."""
    out = f"{folder}/out"
    folder.mkdir()
    operation.fill(out)
    before, damaged = read_folder(out), {*BOTH.newest(out)[1]}
    intact = [entry for entry in BOTH.list_checkpoints(out) if entry.name not in damaged]
    log = "\n".join(run_again(operation, folder, before, []).log)
    names = sorted({*re.findall(rf'["<]({re.escape(out)}(?:/[^">]*)?)[">]', log)})
    paths = [option for name in names for option in ("-P", name)]
    reference = run_again(operation, folder, before, paths)
    assert not any(reference.errors), reference
    after, last_step = read_folder(out), ckpt.list_checkpoints(out)[-1].step
    return Studied(
        operation, folder, out, before, intact, damaged, paths, reference, after, last_step
    )


def run_again(
    operation: Operation, folder: Path, before: dict[str, Any], options: list[str]
) -> Outcome:
    """Do the operation in a fresh copy of its folder."""
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    if before:
        write_tree(before, out)
    return run_traced(
        functools.partial(operation.run, f"{out}"), operation.process, folder, options
    )


def inject(studied: Studied, fault: Fault) -> Outcome:
    """Do the operation with a fault."""
    kind = "signal" if fault.what.startswith("SIG") else "error"
    when = f"{fault.number}{'+' * fault.and_later}"
    rule = ["-e", f"inject={fault.call}:{kind}={fault.what}:when={when}"]
    operation, folder, _, before, *_ = studied
    return run_again(operation, folder, before, [*studied.paths, *rule])


def list_faults(studied: Studied, kinds: Callable[[str], list[tuple[str, bool]]]) -> list[Fault]:
    """Return faults for each call, and one that comes after the last call of each name.

    kinds: a function of the name of a call.
    """
    each = [
        Fault(call, what, number, and_later)
        for call, count in studied.calls.items()
        for number in range(1, count + 1)
        for what, and_later in kinds(call)
    ]
    return each + [Fault(call, "EIO", count + 1, True) for call, count in studied.calls.items()]


def try_fault(studied: Studied, fault: Fault) -> None:
    """Check what the operation promises when this fault happens."""
    outcome = inject(studied, fault)
    try:
        check_outcome(studied, fault, outcome)
    except (AssertionError, OSError, ValueError) as error:
        raise AssertionError(f"{fault}: {outcome.errors}, {outcome.result}: {error}") from error


def check_outcome(studied: Studied, fault: Fault, outcome: Outcome) -> None:
    injected = [line for line in outcome.log if "(INJECTED)" in line]
    is_killed = outcome.errors[studied.operation.process] is None
    assert (is_killed or bool(injected)) == (fault.number <= studied.calls[fault.call])
    is_listing = any("O_DIRECTORY" in line for line in injected)  # Python does not repeat these
    if fault.what == "EINTR" and fault.call in REPEATED and not is_listing:
        assert outcome.errors[0] == "", "Python repeats this call"
    check_report(studied, fault, outcome)
    now = read_folder(studied.out)
    for name in {*now} - {*studied.before}:
        cleaning = CLEANING if isinstance(now[name], bytes) else CLEANING_FOLDERS
        is_temporary = name.startswith(ckpt.TEMPORARY)
        assert not is_temporary or is_killed or fault.call in cleaning, f"{name} is left"
    for name in TEXTS:
        assert now.get(name) in (studied.before.get(name), studied.after.get(name)), name
    steps = {studied.last_step}
    if outcome.errors[0] != "" or outcome.result != studied.reference.result:
        steps |= {entry.step for entry in studied.intact[-1:]} or {0}
        if any(f"{entry.name}.damaged" in now for entry in studied.intact[-1:]):
            steps.add(studied.intact[-2].step)  # the last one could not be read, and was set aside
    check_checkpoints(studied.out, steps, studied.damaged)
    finish(studied, {*(outcome.result or [0, {}])[1]})


def check_report(studied: Studied, fault: Fault, outcome: Outcome) -> None:
    """The operation reports the fault, or does everything that it does without the fault."""
    error, reference = outcome.errors[0], studied.reference
    if error and fault.what != "SIGKILL":
        text = os.strerror(getattr(errno, fault.what))
        assert text in error or "not seekable" in error, "the text does not name the error"
    elif error == "" and outcome.result == reference.result:
        if fault.call != "flock":  # then lock() returns None, as if there were no locks
            assert changes(outcome.log) == changes(reference.log), "the fault was not reported"
    elif error == "":  # checkpoints could not be read, so that an older one was found
        step, rejected = outcome.result
        usable = [e.step for e in studied.intact if e.name not in rejected]
        assert step == max(usable, default=0), "not the newest that could be read"


def check_checkpoints(out: str, steps: set[int], damaged: set[str]) -> None:
    """Each checkpoint that is not `damaged` verifies; the newest is one of `steps` (0: none)."""
    found, rejected = BOTH.newest(out)
    assert rejected.keys() <= damaged, rejected
    assert (found.entry.step if found else 0) in steps, f"{found and found.entry} is not of {steps}"
    for entry in BOTH.list_checkpoints(out):
        if entry.name not in damaged:
            assert is_state(BOTH.load(out, entry), entry.step), entry


def finish(studied: Studied, rejected: set[str]) -> None:
    """Continue from what the faults have left. The first save must leave nothing over."""
    out = studied.out
    step, damaged = continue_run(out)
    assert damaged.keys() <= studied.damaged, damaged
    check_checkpoints(out, {step + 1}, set())
    kept = {entry.name for entry in BOTH.list_checkpoints(out)}
    assert len(kept) <= 2
    known = {name.removesuffix(".damaged") for name in {*studied.before} | rejected}
    left = {*os.listdir(out)} - kept - {".lock", *TEXTS} - {f"{name}.damaged" for name in known}
    assert not left, f"left over: {left}"


def crash(studied: Studied) -> list[dict[str, Any]]:
    """Return the different contents of the folder when the operation is killed at any moment."""
    seen, found = Counter[str](), {}
    for line in studied.reference.log:
        seen[get_name(line)] += 1
        if CHANGES.match(line):
            inject(studied, Fault(get_name(line), "SIGKILL", seen[get_name(line)], False))
            tree = read_folder(studied.out)
            found[freeze({**tree, ".lock": b""})] = tree
    return [*found.values(), studied.after]


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


def in_one(job: Callable[[str], Any]) -> Callable[[str, Wait], list[Callable[[], Any]]]:
    """Return a function of (folder, wait) that returns a list with a job for one process."""
    return lambda out, wait: [lambda: (wait(), job(out))[1]]


def save_in_ranks(step: int, traced: int) -> Callable[[str, Wait], list[Callable[[], Any]]]:
    """Return a function of (folder, wait) that returns a job for each of two ranks.

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

        store = Path(out).parent / "store"
        store.unlink(missing_ok=True)
        return in_ranks(store.parent, job)

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
    entry = ckpt.list_checkpoints(out)[-1]
    damage(Path(out, entry.name), make_state(2, WIDTH))


def fill_sharded(out: str) -> None:
    os.mkdir(out)
    for name, text in TEXTS.items():
        ckpt.write_text(out, name, text)
    for step in (1, 2):
        jobs = functools.partial(save_in_ranks(step, 0), out)
        assert run_traced(jobs, 0, Path(out).parent, []).errors == ["", ""]


def save_whole(step: int) -> Callable[[str, Wait], list[Callable[[], Any]]]:
    """Return a function of (folder, wait) that returns a list with the job of one process."""

    def job(out: str) -> None:
        ckpt.save(out, make_state(step, WIDTH), step, None, 2)

    return in_one(job)


OPERATIONS = {
    "first save": Operation(lambda out: None, save_whole(1)),
    "save and prune": Operation(fill, save_whole(3)),
    "resume": Operation(fill_after_kill, in_one(resume)),
    "set aside": Operation(fill_damaged, in_one(resume)),
    "append a line": Operation(
        fill, in_one(lambda out: ckpt.append_text(out, "metrics.jsonl", LINE))
    ),
    "replace a text": Operation(
        fill, in_one(lambda out: ckpt.write_text(out, "metrics.jsonl", LINE))
    ),
    "sharded save, rank 0": Operation(fill_sharded, save_in_ranks(3, 0), 0),
    "sharded save, rank 1": Operation(fill_sharded, save_in_ranks(3, 1), 1),
}


@pytest.fixture(scope="module")
def studied() -> Iterator[Callable[[str], Studied]]:
    """Return a function: name of an operation -> what it does without a fault."""
    for step in range(1, 7):
        make_state(step, WIDTH)  # also imports what a save needs
    if not shutil.which("strace"):
        cannot_test("strace, which injects the faults, is missing")
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield functools.cache(lambda name: study(Path(folder, name), OPERATIONS[name]))


def mix(cases: list[tuple[Studied, Fault]]) -> list[tuple[Studied, Fault]]:
    """Shuffle the cases, but so that the first ones are about different calls."""
    random.Random(0).shuffle(cases)
    seen = Counter[str]()
    rounds = []
    for case in cases:
        seen[case[1].call] += 1
        rounds.append((seen[case[1].call], case))
    return [case for _, case in sorted(rounds, key=lambda pair: pair[0])]


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_system_call_of_an_operation_fails(name, studied, trials):
    this = studied(name)
    cases = mix([(this, fault) for fault in list_faults(this, lambda call: [*KINDS, KILL])])
    text = f"{this.calls.total()} system calls of {len(this.calls)} kinds fail: {name}"
    trials(text, lambda number: try_fault(*cases[number]), 16, len(cases), at_once=1)


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_system_call_of_the_recovery_fails(name, studied, trials):
    """What an error does depends little on its kind, so that one kind is chosen at random.

    To kill the process at a call that changes nothing is the same as to kill it at the next one.
    """
    first, chance = studied(name), random.Random(0)
    recoveries, cases = list[Studied](), list[tuple[Studied, Fault]]()
    for number, tree in enumerate(crash(first)):
        fill = lambda out, tree=tree: write_tree(tree, Path(out)) if tree else None  # noqa: E731
        folder = first.folder.parent / f"{name} {number}"
        recoveries.append(study(folder, Operation(fill, in_one(continue_run))))
    for recovery in recoveries:
        changing = {get_name(line) for line in recovery.reference.log if CHANGES.match(line)}
        kinds = lambda call: [chance.choice(KINDS), *[KILL] * (call in changing)]  # noqa: E731
        cases += [(recovery, fault) for fault in list_faults(recovery, kinds)]
    cases = mix(cases)
    text = f"system calls of the next run fail, after {len(recoveries)} crashes: {name}"
    trials(text, lambda number: try_fault(*cases[number]), 6, len(cases), at_once=1)
