"""Change one operator, constant, condition or call of a core file and see whether its tests notice.

    python tests/faults/mutation.py --seed 0 --count 400              # all six files
    python tests/faults/mutation.py --seed 0 --count 40 loop.py gpt.py
    python tests/faults/mutation.py --seed 0 loop.py:13,21            # these mutants of this seed

A mutant is one such change in a copy of the repository. There the file's own tests (tests/test_X.py
for X.py) run until one fails: then the mutant is killed. If all pass, it survived and is printed as
a diff. A mutant whose tests do not end within 10 seconds plus four times the usual time timed out;
read whether it hangs (then it is killed too) or is only slow.

The mutants of a file are numbered in a random order that depends only on the seed and the file, so a
larger count continues a smaller one. Not changed are docstrings, annotations, imports, f-strings,
strings with a space (they are texts for people), and what is inside `raise` and `print(...)`.

A statement that no process executes while the file's own tests run is counted as "not executed", and
its mutants are not run. To find these statements, the tests run once on a version of the file in
which each statement first sets a byte of a file that all processes map into memory. So child
processes count, also if they are killed. This also tells which tests execute a statement. When it is
changed, these come first, the cheapest of them at the beginning, so most mutants are killed within
two seconds. The other tests follow if some tests share a fixture (which can execute the statement for
all of them), or if the statement is executed by the import of the module.

Each test run is a fork of this process, which has imported torch. (Packages for this do not fit:
mutmut 3.8 draws no sample and does not see child processes; cosmic-ray 8.7 has no seed, and starts a
new Python, which imports torch, for each mutant.) Linux only.
"""

import argparse
import ast
import atexit
import copy
import ctypes
import difflib
import json
import mmap
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = ["loop.py", "gpt.py", "chardata.py", "ckpt.py", "ddp_setup.py", "run.py"]
PAIRS = "Lt LtE, Gt GtE, Eq NotEq, Is IsNot, In NotIn, Add Sub, Mult Div, LShift RShift, And Or"
ONE_WAY = "FloorDiv Mult, Mod Mult, Pow Mult, BitAnd BitOr, BitOr BitAnd, BitXor BitAnd"
OPERATORS = {}
for first, second in (pair.split() for pair in f"{PAIRS}, {ONE_WAY}".split(", ")):
    OPERATORS[getattr(ast, first)] = getattr(ast, second)
    OPERATORS.setdefault(getattr(ast, second), getattr(ast, first))
TIMED_OUT = "the tests did not end"
# The recording version of a file begins with this, and sets _executed[LINE] before each statement.
RECORD = """import mmap as _mmap
with open({lines!r}, "r+b") as _file:
    _executed = _mmap.mmap(_file.fileno(), 0)
"""

# ------------------------------------------------------------------------------------------ mutants


class Mutant(NamedTuple):
    line: int  # first line of the innermost statement that is changed
    source: str  # the whole file with the change


def changes(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield (part to replace, new text) for each change of a node, without the nodes inside it."""
    if isinstance(node, ast.Compare):
        for i, operator in enumerate(node.ops):
            changed = copy.deepcopy(node)
            changed.ops[i] = OPERATORS[type(operator)]()
            yield node, f"({ast.unparse(changed)})"
    elif isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)) and type(node.op) in OPERATORS:
        changed = copy.deepcopy(node)
        changed.op = OPERATORS[type(node.op)]()
        text = ast.unparse(changed)
        yield node, text if isinstance(node, ast.AugAssign) else f"({text})"
    elif isinstance(node, ast.UnaryOp):
        yield node, f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node, f"{not node.value}"
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield node, f"{node.value + 1}"
    elif isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)):
        letter, space = ("X", " ") if isinstance(node.value, str) else (b"X", b" ")
        if space not in node.value:
            yield node, repr(node.value + letter)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield node, "pass"
    conditions = [node.test] if isinstance(node, (ast.If, ast.While, ast.IfExp)) else []
    for condition in [*conditions, *getattr(node, "ifs", [])]:  # ifs: of a comprehension
        if not isinstance(condition, (ast.Constant, ast.UnaryOp)):  # they change by themselves
            yield condition, f"(not ({ast.unparse(condition)}))"


def all_changes(node: ast.AST, line: int = 0) -> Iterator[tuple[int, ast.AST, str]]:
    """Yield (line of the innermost statement, part to replace, new text) in a node and below it."""
    line = node.lineno if isinstance(node, ast.stmt) else line
    docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if docstring or isinstance(node, (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)):
        return
    for part, text in changes(node):
        yield line, part, text
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
        return
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from all_changes(child, line)


def mutants(name: str, seed: int) -> list[Mutant]:
    """Return all mutants of a file, in the order of this seed."""
    source = (ROOT / name).read_bytes()
    begins = [0]  # of each line, in bytes, as ast counts columns
    for text in source.splitlines(keepends=True):
        begins.append(begins[-1] + len(text))
    found = []
    for line, part, text in all_changes(ast.parse(source)):
        before = source[: begins[part.lineno - 1] + part.col_offset]
        after = source[begins[part.end_lineno - 1] + part.end_col_offset :]
        found.append(Mutant(line, (before + text.encode() + after).decode()))
        ast.parse(found[-1].source)
    random.Random(f"{seed} {name}").shuffle(found)
    return found


def recording(source: str, lines: Path) -> str:
    """Return a program in which each statement first sets the byte of its line in a file."""
    tree = ast.parse(source)
    for node in [*ast.walk(tree)]:
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list):  # not the body of a lambda
                setattr(node, field, [*map(with_record, statements)])
    text = ast.unparse(ast.fix_missing_locations(tree))
    start = text.index("_executed[")  # after the docstring and `from __future__`
    return text[:start] + RECORD.format(lines=str(lines)) + text[start:]


def with_record(statement: ast.stmt) -> ast.stmt:
    docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    if docstring or isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
        return statement
    record = ast.parse(f"_executed[{statement.lineno}] = 1").body
    return ast.Module([*record, statement], [])


# -------------------------------------------------------------------------------------------- tests


class Plugin:
    """A plugin of pytest that orders the tests, and measures what each test costs and executes.

    stop: end the process at the first failure, without the end of fixtures, which can wait for
        minutes for ranks that a mutant lets hang.
    """

    def __init__(self, lines: Path, order: Callable[[str], Any], stop: bool):
        self.order, self.report, self.test = order, lines.with_name("report"), ""
        self.stop = stop
        with lines.open("r+b") as file:
            self.executed = mmap.mmap(file.fileno(), 0)
        self.lines: dict[str, list[int]] = {}  # that were executed during a test
        self.seconds: dict[str, float] = {}  # of each fixture and of each test without its fixtures
        self.fixtures: dict[str, list[str]] = {}  # of each test
        self.shared = False  # whether several tests share a fixture

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if self.order(item.nodeid) is not None]
        items[:] = sorted(chosen, key=lambda item: self.order(item.nodeid))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.note_lines()
        self.test = nodeid

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.stop and report.failed:
            print(f"\nFAILED {report.nodeid}", flush=True)
            os._exit(1)

    def note_lines(self) -> None:
        self.lines[self.test] = [i for i, executed in enumerate(self.executed[:]) if executed]
        self.executed[:] = bytes(len(self.executed))

    def timed(self, name: str) -> Iterator[None]:
        begun = time.monotonic()
        try:
            return (yield)
        finally:
            self.seconds[name] = max(time.monotonic() - begun, self.seconds.get(name, 0))

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        if fixturedef.scope != "function" and fixturedef.baseid:  # baseid: not a fixture of pytest
            self.shared = True
        return (yield from self.timed(fixturedef.argname))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Iterator[None]:
        self.fixtures[item.nodeid] = item.fixturenames
        return (yield from self.timed(item.nodeid))

    def pytest_sessionfinish(self) -> None:
        costs = {
            test: self.seconds[test] + sum(self.seconds.get(name, 0) for name in names)
            for test, names in self.fixtures.items()
        }
        self.note_lines()
        self.report.write_text(json.dumps([costs, self.lines, self.shared]))


def run_tests(
    repo: Path, name: str, limit: float, order: Callable[[str], Any], stop: bool = False
) -> tuple[str, float]:
    """Run the tests of a file, which must end within `limit` seconds. Return ("" if all pass, else
    the first failure, seconds). stop: see Plugin.
    """
    lines, output, begun = repo.with_name("lines"), repo.with_name("output"), time.monotonic()
    lines.write_bytes(bytes(1 << 14))
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.chdir(repo)
        resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))  # for a mutant that reads on
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        atexit._clear()  # a mutant of run.py can call them, and they delete the folder
        sys.path[:] = [path for path in sys.path if path != str(Path(__file__).parent)]
        command = f"-q --tb=no --assert=plain -p no:cacheprovider --basetemp {repo}.tmp".split()
        plugin = Plugin(lines, order, stop)
        try:
            code = pytest.main([*command, f"tests/test_{name}"], [plugin])
            sys.stdout.flush()
            os._exit(code)
        finally:
            os._exit(9)
    code = None
    while code is None and time.monotonic() < begun + limit:
        time.sleep(0.05)
        ended, status = os.waitpid(pid, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if ended else None
    seconds = time.monotonic() - begun
    kill_children()
    said = output.read_text(errors="replace").splitlines()
    failure = next((line for line in said if line.startswith(("FAILED", "ERROR"))), f"exit {code}")
    failure = TIMED_OUT if code is None else failure
    return "" if code == 0 else failure, seconds


def kill_children() -> None:
    """Kill all child processes. Their own children then become children of this process."""
    while found := [*children()]:
        for child in found:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def children() -> Iterator[int]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            if stat.read_text().rpartition(")")[2].split()[1] == f"{os.getpid()}":
                yield int(stat.parent.name)


def survey(repo: Path, name: str) -> tuple[dict[str, float], dict[int, set[str]], float]:
    """Run the tests twice without a mutation. Return {test: cost}, {executed line: tests} and the
    seconds of all tests. A set of tests has "" if also the others can execute the line.

    The second time the cheap tests come first, so in another order.
    """
    lines, source = repo.with_name("lines"), (ROOT / name).read_text()
    (repo / name).write_text(source)
    failure, seconds = run_tests(repo, name, 1800, lambda test: 0)
    if failure:
        sys.exit(f"{name} without a change: {failure}")
    costs = json.loads(lines.with_name("report").read_text())[0]
    (repo / name).write_text(recording(source, lines))
    failure, _ = run_tests(repo, name, 1800, lambda test: costs.get(test, 0))
    if failure:  # For the same reason, each mutant may seem to be killed.
        print(f"{name}, recording its lines: {failure}", flush=True)
    _, executed, shared = json.loads(lines.with_name("report").read_text())
    tests_of: dict[int, set[str]] = {}
    for test, numbers in executed.items():
        for number in numbers:
            tests_of.setdefault(number, {""} if shared else set()).add(test)
    return costs, tests_of, seconds


def place_of_test(tests: set[str], costs: dict[str, float], test: str) -> tuple[bool, float] | None:
    """Return the place of a test in the order for a mutant, or None if it cannot notice the mutant.

    tests: those that execute the changed line; with "" if also others can execute it.
    """
    if test not in tests and "" not in tests:
        return None
    return test not in tests, costs.get(test, 0)


# ------------------------------------------------------------------------------------------ program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=400, help="mutants of all files together")
    parser.add_argument("--skip", type=int, default=0, help="mutants of each file to leave out")
    parser.add_argument("files", nargs="*", metavar="FILE[:NUMBERS]", default=FILES)
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True  # Python could take the bytecode of one mutant for the next.
    import torch._dynamo  # noqa: F401
    import torch.distributed.checkpoint.state_dict  # noqa: F401

    ctypes.CDLL(None).prctl(36, 1)  # 36 is PR_SET_CHILD_SUBREAPER.
    results = "killed", "timed out", "survived", "not executed"
    rows = [f"| file | mutants | sampled | {' | '.join(results)} | seconds |", "|---" * 8 + "|"]
    with tempfile.TemporaryDirectory() as folder:
        repo = Path(folder, "repo")
        shutil.copytree(ROOT, repo, ignore=shutil.ignore_patterns(".git", "__pycache__"))
        for argument in args.files:
            name, _, numbers = argument.partition(":")
            numbered, last = [*enumerate(mutants(name, args.seed))], args.count // len(args.files)
            chosen = numbered[args.skip : last]
            if numbers:
                chosen = [numbered[int(number)] for number in numbers.split(",")]
            begun = time.monotonic()
            costs, tests_of, seconds = survey(repo, name)
            counts = dict.fromkeys(results, 0)
            for i, (line, source) in chosen:
                tests, failure, own = tests_of.get(line, set()), "", 0.0
                (repo / name).write_text(source)
                if tests:
                    order = partial(place_of_test, tests, costs)
                    expected = seconds if "" in tests else sum(costs.get(test, 0) for test in tests)
                    failure, own = run_tests(repo, name, 10 + 4 * expected, order, stop=True)
                result = "killed" if failure else "survived" if tests else "not executed"
                result = "timed out" if failure == TIMED_OUT else result
                counts[result] += 1
                print(f"{name}:{i} {result} ({own:.1f} s) {failure}", flush=True)
                if result != "killed":
                    texts = (ROOT / name).read_text().splitlines(), source.splitlines()
                    diff = [*difflib.unified_diff(*texts, lineterm="", n=1)][2:]
                    print("\n".join(f"    {line}" for line in diff), flush=True)
            (repo / name).write_text((ROOT / name).read_text())
            seconds = round(time.monotonic() - begun)
            row = name, len(numbered), len(chosen), *counts.values(), seconds
            rows.append(f"| {' | '.join(map(str, row))} |")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
