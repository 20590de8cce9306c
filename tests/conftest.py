"""What the tests share: run or start the program, read what it printed and wrote, compare runs."""

import functools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

# torch reads this when it is imported. Spinning threads take CPU time from other processes.
os.environ["OMP_WAIT_POLICY"] = "passive"

import torch  # noqa: E402

import run as program  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
# Variables of a launcher or of the user must not reach the programs that the tests start.
FOREIGN = "DDPKIT_ SLURM_ TORCHELASTIC_ MASTER_ PYTHONUNBUFFERED RANK LOCAL_RANK WORLD_SIZE "
FOREIGN = tuple((FOREIGN + "LOCAL_WORLD_SIZE").split())
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}
ENVIRONMENT["CUDA_VISIBLE_DEVICES"] = ""  # bitwise equality is a promise for CPUs
PYTHON = [sys.executable, "run.py"]
MODEL = "--layers 1 --heads 2 --embd 16 --block-size 16".split()
TINY = [*MODEL, *"--batch-size 8 --dtype float32 --epochs 3 --lr 0.003 --warmup 0.1".split()]


def torchrun(size: int, *flags: str) -> list[str]:
    start = f"-m torch.distributed.run --standalone --nproc-per-node {size}".split()
    return [sys.executable, *start, *flags, "run.py"]


class Ran(NamedTuple):
    code: int
    out: str
    err: str


class Program:
    """A running program, by default run.py.

    root: the folder with run.py, which is also the working directory. All processes that the program
    started, also orphans, are killed after `seconds` (then it hangs), and when the `with` block ends.
    """

    def __init__(
        self,
        *args: object,
        launcher: list[str] = PYTHON,
        env: dict[str, str | None] = {},
        seconds: float = 900,
        root: Path = ROOT,
    ):
        self.mark = uuid.uuid4().hex  # in the environment of all its processes
        self.heard, self.hung = "", False
        self.errors = tempfile.TemporaryFile("w+", errors="replace")
        variables = {**ENVIRONMENT, **env, "TEST_PROGRAM": self.mark}
        self.process = subprocess.Popen(
            [*launcher, *map(str, args)],
            cwd=root,
            env={name: value for name, value in variables.items() if value is not None},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.watchdog = threading.Timer(seconds, self.give_up)
        self.watchdog.start()

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        self.watchdog.cancel()
        self.kill()
        self.process.communicate()
        self.errors.close()

    def give_up(self) -> None:
        self.hung = True
        self.kill()

    def kill(self) -> None:
        for pid in self.family():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def family(self, having: str = "") -> list[int]:
        """Return the ids of the living processes of the program, in the order of their start.

        having: only processes with this text in their command line or environment.
        """
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or belongs to another user
                text = (folder / "environ").read_bytes() + (folder / "cmdline").read_bytes()
                if self.mark.encode() in text and having.encode() in text:
                    found.append(int(folder.name))
        return sorted(found)

    def children(self) -> list[int]:
        """Return the ids of the ranks that --spawn started, in the order of ranks."""
        old = self.family("SPAWNED_BY=")  # until spawn uses torch.multiprocessing
        return old or self.family(
            "spawn_main"
        )  # the function of multiprocessing in their command line

    def read_to(self, what: str) -> None:
        """Read the output up to a line that begins with `what`."""
        while line := self.process.stdout.readline():
            self.heard += line
            if line.startswith(what):
                return
        pytest.fail(f"no line began with {what!r}: {self.finish()}")

    def read_lines(self, count: int) -> None:
        """Read the output up to `count` lines of steps."""
        for _ in range(count):
            self.read_to("step ")

    def finish(self, seconds: float = 5) -> Ran:
        """Wait for the end of the program. All processes that it started must end in the `seconds` after it."""
        self.heard += self.process.stdout.read()
        code = self.process.wait()
        self.errors.seek(0)
        ran = Ran(code, self.heard, self.errors.read())
        assert not self.hung, f"the program hung and was killed: {ran}"
        wait_for(lambda: not self.family(), "the end of all its processes", seconds)
        return ran


def run(*args: object, **how: Any) -> Ran:
    """Run the program to its end. `how`: further arguments of Program, which start a new process.

    Without them, one rank on a CPU runs in this process, which saves the import of torch.
    """
    in_main = threading.current_thread() is threading.main_thread()  # which gets signals
    if how or "--spawn" in args or not in_main or torch.cuda.is_available():
        with Program(*args, **how) as started:
            return started.finish()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    program.warn_once.cache_clear()
    with (
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
        redirect_stdout(out),
        redirect_stderr(err),
        warnings.catch_warnings(action="ignore"),
        patch.dict(os.environ, ENVIRONMENT, clear=True),
        chdir(ROOT),
    ):
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = lambda message, *_: print(f"Warning: {message}", file=err)
        code = program.main([*map(str, args)])
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        out.seek(0), err.seek(0)
        return Ran(code, out.read(), err.read())


def signalled(launcher: list[str], where: str, place: Path) -> dict[str, Any]:
    """Return arguments of Program: the program sends a signal, as faults/signalled.py describes.

    where: TEST_SIGNAL. place: the file that gets the place.
    """
    program = f"{ROOT}/tests/faults/signalled.py"
    variables = {"TEST_SIGNAL": where, "TEST_PLACE": f"{place}"}
    return {"launcher": [*launcher[:-1], program], "env": variables}


def free_port() -> int:
    """Return a port that the system does not choose for other programs; they get those from 32768 on."""
    return random.SystemRandom().randint(10000, 32767)


def launch_variables(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the variables of one of `size` ranks on this machine."""
    text = f"RANK={rank} LOCAL_RANK={rank} WORLD_SIZE={size} LOCAL_WORLD_SIZE={size}"
    text += f" MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"
    return dict(pair.split("=") for pair in text.split())


@contextmanager
def ahead(at_once: int = 2, /, **calls: Callable[[], Any]) -> Iterator[dict[str, Future]]:
    """Start all calls in `at_once` background threads, and yield their futures by name."""
    pool = ThreadPoolExecutor(at_once)
    try:
        yield {name: pool.submit(call) for name, call in calls.items()}
    finally:
        pool.shutdown(cancel_futures=True)


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 60) -> Any:
    """Wait until condition() is true and return its result. The test fails after about `seconds`."""
    for _ in range(round(seconds / 0.02) + 1):
        if value := condition():
            return value
        time.sleep(0.02)
    pytest.fail(f"waited {seconds} s for {what}")


def metrics(out: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl as dicts."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(out: Path) -> list[tuple[int, float]]:
    """Return (step, loss) of each line of a training step in metrics.jsonl."""
    return [(line["step"], line["loss"]) for line in metrics(out) if "loss" in line]


def checkpoints(out: Path) -> list[Path]:
    """Return the checkpoint files in a folder, oldest first."""
    return sorted(out.glob("step-*.pt"))


def contents(folder: Path) -> dict[str, bytes]:
    """Return the contents of a file, or of all files in a folder, by path; {} if nothing is there."""
    paths = [folder, *folder.rglob("*")]
    return {str(path): path.read_bytes() for path in paths if path.is_file()}


def state(out: Path) -> dict[str, Any]:
    """Return the newest checkpoint, read with torch alone."""
    return torch.load(checkpoints(out)[-1], weights_only=True)


def same(a: Any, b: Any) -> bool:
    """Whether two nested dicts, lists, tensors and numbers are bitwise equal. 0.0 and -0.0 differ; NaN equals itself."""
    if isinstance(a, torch.Tensor):
        raw = [t.detach().contiguous().flatten().view(torch.uint8) for t in (a, b)]
        return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*raw)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


def same_training(out: Path, other: Path) -> bool:
    """Whether two runs have equal losses and bitwise equal weights and optimizer states."""
    parts = [
        [state(folder)[key] for key in ("model", "optimizers", "step")] for folder in (out, other)
    ]
    return same(*parts) and losses(out) == losses(other)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 5,390 characters, 18 of them different, and return the path of the file.

    With a validation fraction of 0.1 and windows of 16 tokens, an epoch has 302 windows: 38 steps of 8 windows, 6 in
    the last step, or 31 steps of 10 windows, 2 in the last step.
    """
    words = "the a model of learns to read and write , .\n".split(" ")
    letters = " ".join(random.Random(0).choices(words, k=2000))[:5390]
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(letters)
    return path


@pytest.fixture(scope="session")
def flags(text: Path) -> list[object]:
    """Return the flags of a small run that takes long enough to be disturbed: 100 steps in 3 epochs, with dropout."""
    steps = ["--steps", 100, "--log-every", 1, "--eval-every", 40, "--save-every", 40]
    return [*TINY, "--data", text, "--dropout", 0.1, *steps]


@pytest.fixture(scope="session")
def undisturbed(
    flags: list[object], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Path]:
    """Return a function: 1 or 2 ranks -> the folder of an undisturbed run with `flags`. Do not write into it."""

    @functools.cache
    def folder(ranks: int) -> Path:
        out = tmp_path_factory.mktemp("undisturbed")
        ran = run(*flags, "--out", out, *(["--spawn", ranks] if ranks > 1 else []))
        assert ran.code == 0, ran
        return out

    return folder


# ---------------------------------------------------------------------------------------- torture

TABLE = pytest.StashKey[list[tuple[str, int, int, float]]]()  # fault, trials, passed, seconds


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "number of the first trial of each random fault; a failed trial prints its number"
    parser.addoption("--seed", type=int, default=0, help=text)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "torture: counted trials; `-m torture` runs all of them")
    config.stash[TABLE] = []


@pytest.fixture
def trials(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return trials(fault, trial, few, many), which calls trial(0), trial(1), ... `few` times, with -m torture `many`.

    The number is the seed of the trial, so that a failed trial can be repeated. `at_once` trials run side by side. A
    trial can consist of `each` faults.
    """
    config = request.config

    def run_all(
        fault: str,
        trial: Callable[[int], Any],
        few: int,
        many: int,
        each: int = 1,
        at_once: int = 2,
    ) -> None:
        def attempt(number: int) -> BaseException | None:
            try:
                trial(number)
            except BaseException as error:  # what pytest.fail raises is not an Exception
                return error

        count, begun = many if config.option.markexpr == "torture" else few, time.monotonic()
        if not count:
            pytest.skip("takes long, so only with -m torture")
        numbers = [(config.option.seed + i) % many for i in range(count)]
        with ThreadPoolExecutor(at_once) as pool:
            # In the main thread, run() needs no process.
            results = [*(map if at_once == 1 else pool.map)(attempt, numbers)]
        errors = {n: error for n, error in zip(numbers, results) if error}
        passed, seconds = count - len(errors), time.monotonic() - begun
        config.stash[TABLE].append((fault, each * count, each * passed, seconds))
        for number, error in errors.items():
            if isinstance(error, pytest.skip.Exception):  # this machine lacks something
                raise error
            text = f"{len(errors)} of {count} trials failed: {[*errors]}; --seed {number}: {error}"
            raise AssertionError(text) from error

    return run_all


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.option.markexpr == "torture":
        terminalreporter.write_line("\n| fault | trials | passed | time |\n|---|---|---|---|")
        for fault, count, passed, seconds in config.stash[TABLE]:
            terminalreporter.write_line(f"| {fault} | {count:,} | {passed:,} | {seconds:.0f} s |")
