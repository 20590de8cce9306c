"""What the end-to-end tests share: start run.py, follow what it says, wait for it, see who is still alive."""

import atexit
import functools
import json
import logging
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import warm

ROOT = Path(__file__).resolve().parent.parent
# a launcher's or a user's own settings are not the test's
FOREIGN = ("DDPKIT_", "SLURM_", "TORCHELASTIC_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_")
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}
ENVIRONMENT["OMP_WAIT_POLICY"] = "passive"  # threads that spin would take the cores from the other processes
ENVIRONMENT["CUDA_VISIBLE_DEVICES"] = ""  # bitwise, and as many ranks as we like, is a promise for CPUs
PYTHON = [sys.executable, "run.py"]
MODEL = "--layers 1 --heads 2 --embd 16 --block-size 16".split()
TINY = [*MODEL, *"--batch-size 8 --dtype float32 --epochs 3 --lr 0.003 --warmup 20".split()]


def torchrun(size: int, *flags: str) -> list[str]:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", f"{size}"]
    return [*start, *flags, "run.py"]


class Ran(NamedTuple):
    code: int
    out: str
    err: str


class Program:
    """A run of run.py.

    Its output comes through a socket that holds a few lines: whoever reads up to a line knows that the program
    is at most a few lines further, however fast it is. It, and all that it started, is killed after `seconds`
    (a hang), and when its `with` block ends. Plain python is started warm (see warm.py), unless it has an
    environment of its own.
    """

    def __init__(
        self, *args: object, launcher: list[str] = PYTHON, env: dict[str, str | None] = {}, seconds: float = 90
    ):
        self.mark = f"TEST_PROGRAM={uuid.uuid4().hex}"  # every descendant inherits it, orphans too
        self.heard, self.hung = b"", False
        self.errors = tempfile.TemporaryFile()
        ours, theirs = socket.socketpair()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel takes its own minimum
        environment = {**ENVIRONMENT, **env, **dict([self.mark.split("=")])}
        environment = {key: value for key, value in environment.items() if value is not None}
        with ours, theirs:
            if launcher is PYTHON and not env:
                own = [*map(str, args)]
                self.process = warm.Process(warm_server(), own, environment, theirs.fileno(), self.errors.fileno())
            else:
                self.process = subprocess.Popen(
                    [*launcher, *map(str, args)],
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=theirs,
                    stderr=self.errors,
                    start_new_session=True,
                )
            self.lines = ours.makefile("rb", buffering=0)
        self.watchdog = threading.Timer(seconds, self.give_up)
        self.watchdog.start()

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        self.watchdog.cancel()
        self.kill()
        self.process.wait()
        self.lines.close()
        self.errors.close()

    def give_up(self) -> None:
        self.hung = True
        self.kill()

    def kill(self) -> None:
        for pid in self.family():
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                pass

    def family(self, having: str = "") -> list[int]:
        """Who is alive of the program and all that it started, in the order of their start; `having` is looked
        for in their command lines and environments."""
        found = [] if having or self.process.poll() is not None else [self.process.pid]
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                text = (folder / "environ").read_bytes() + b"\0" + (folder / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError, PermissionError):  # gone, or another user's
                continue
            if self.mark.encode() in text and having.encode() in text:  # a zombie has neither
                found.append(int(folder.name))
        return sorted({*found})

    def children(self) -> list[int]:
        """The ranks that --spawn started, in order."""
        return self.family("spawn_main")

    def read_to(self, what: str) -> None:
        """Read until a line begins with `what`."""
        while line := self.lines.readline():
            self.heard += line
            if line.startswith(what.encode()):
                return
        pytest.fail(f"no line began with {what!r}: {self.finish()}")

    def read_lines(self, count: int) -> None:
        """Read that many lines, or what there is."""
        while count and (line := self.lines.readline()):
            self.heard += line
            count -= line.startswith(b"step ")

    def finish(self) -> Ran:
        """Read on to the end of the program and of all that it started."""
        self.heard += self.lines.read()
        code = self.process.wait()
        self.errors.seek(0)
        ran = Ran(code, self.heard.decode(), self.errors.read().decode())
        assert not self.hung, f"hung, and was killed: {ran}"
        wait_for(lambda: not self.family(), "all that it started to end", 5)
        return ran


def run(*args: object, **how: Any) -> Ran:
    """Run the program to its end."""
    with Program(*args, **how) as program:
        return program.finish()


@functools.cache
def warm_server() -> str:
    """The socket at which programs start without importing torch first; served as long as the tests run."""
    path = f"{tempfile.mkdtemp()}/warm"
    server = warm.start(path, ENVIRONMENT)
    atexit.register(lambda: (server.stdin.close(), server.wait(), os.unlink(path), os.rmdir(os.path.dirname(path))))
    wait_for(lambda: os.path.exists(path), "the warm server")
    return path


@contextmanager
def ahead(**calls: Callable[[], Any]) -> Iterator[dict[str, Future]]:
    """Begin all calls in the background, a few at a time, since most of a run is one core's `import torch`; a
    test then waits for the one that it is about."""
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        yield {name: pool.submit(call) for name, call in calls.items()}
    finally:
        pool.shutdown(cancel_futures=True)


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 60) -> Any:
    """Whatever `condition` returns once it is true; the test fails if it never is."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.02)
    pytest.fail(f"waited {seconds} s for {what}")


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(out: Path) -> list[tuple[int, float]]:
    """(step, loss) of each training line, in the file's order."""
    return [(line["step"], line["loss"]) for line in metrics(out) if "loss" in line]


def checkpoints(out: Path) -> list[Path]:
    """Oldest first."""
    return sorted(out.glob("step-*.pt"))


def state(out: Path) -> dict[str, Any]:
    """The newest checkpoint, read as a stranger would."""
    import torch

    return torch.load(checkpoints(out)[-1], weights_only=True)


def same(a: Any, b: Any) -> bool:
    """Whether two nests of dicts, lists, tensors and numbers are equal to the last bit."""
    import torch

    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def same_training(out: Path, other: Path) -> bool:
    """Whether both ended with the same weights and moments, bitwise, and took the same losses to them."""
    a, b = state(out), state(other)
    return all(same(a[key], b[key]) for key in ("model", "optimizers", "step")) and losses(out) == losses(other)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """5,390 characters, 18 different ones. With val-fraction 0.1 and windows of 16 an epoch has 302 windows:
    38 steps of 8, the last with 6, or 31 steps of 10, the last with 2."""
    words = "the a model of learns to read and write , .\n".split(" ")
    letters = " ".join(random.Random(0).choices(words, k=2000))[:5390]
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(letters)
    return path


@pytest.fixture(scope="session")
def flags(text: Path) -> list[object]:
    """A small run that takes long enough to be disturbed: 100 steps in 3 epochs, with dropout."""
    return [*TINY, "--data", text, "--dropout", 0.1, "--steps", 100, "--log-every", 1, "--eval-every", 40,
            "--save-every", 40]  # fmt: skip


@pytest.fixture(scope="session")
def undisturbed(flags: list[object], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Path]]:
    """undisturbed(ranks): the folder of a run that nobody disturbed. Not to be written to."""

    def outcome(*args: object) -> Path:
        out = tmp_path_factory.mktemp("undisturbed")
        ran = run(*flags, "--out", out, *args)
        assert ran.code == 0, ran
        return out

    with ahead(one=partial(outcome), two=partial(outcome, "--spawn", 2)) as runs:
        yield lambda ranks: runs[{1: "one", 2: "two"}[ranks]].result()


@pytest.fixture
def start() -> Iterator[Callable[..., Program]]:
    """Start the program in the background; what is left of it when the test ends is killed."""
    started: list[Program] = []

    def begin(*args: object, **how: Any) -> Program:
        started.append(Program(*args, **how))
        return started[-1]

    yield begin
    for program in started:
        program.__exit__()


# ----------------------------------------------------------------------------------------------------------- S3

SECRET = "AKIAdoNotSayThis", "wJalrXUtnFEMI/K7MDENG/doNotSayThis"  # key and secret: looked for where they must not be


class Storage:
    """An S3 server on loopback, which does to a request what `fault` says: fault(method, path) -> "500", "503" (an answer),
    "cut" (the connection closed in the middle of the request), "half" (in the middle of the answer), "slow", or ""."""

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.application = DomainDispatcherApplication(create_backend_app)
        self.server = make_server("127.0.0.1", 0, self, threaded=True)
        self.server.daemon_threads, self.server.block_on_close = True, False  # clients keep their connections open
        self.url = f"http://127.0.0.1:{self.server.port}"
        self.requests: list[tuple[str, str]] = []
        self.mend()
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def mend(self) -> None:
        self.fault: Callable[[str, str], str] = lambda method, path: ""

    def fail(self, fault: str, times: int = 10**9, method: str = "", path: str = "") -> None:
        """From now on, and `times` times, for requests of that method to what has `path` in it."""
        left = iter(range(times))

        def choose(its_method: str, its_path: str) -> str:
            meant = its_method.startswith(method) and path in its_path
            return fault if meant and next(left, None) is not None else ""

        self.requests.clear()
        self.fault = choose

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterator[bytes]:
        request = environ["REQUEST_METHOD"], f"{environ['PATH_INFO']}?{environ['QUERY_STRING']}"
        self.requests.append(request)
        fault = self.fault(*request)
        if fault == "slow":
            time.sleep(0.3)
        if fault in ("500", "503"):
            code = {"500": "InternalError", "503": "SlowDown"}[fault]
            start_response(f"{fault} {code}", [("Content-Type", "application/xml")])
            text = f"<Error><Code>{code}</Code><Message>{code}, injected</Message></Error>"
            yield text.encode() if request[0] != "HEAD" else b""
        elif fault == "cut":
            environ["wsgi.input"].read(min(100, int(environ.get("CONTENT_LENGTH") or 0)))
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            start_response("200 OK", [])
        else:
            answer = b"".join(self.application(environ, start_response))
            yield answer[: len(answer) // 2] if fault == "half" else answer
            if fault == "half":
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Storage]:
    """An S3 server with a bucket named "bucket", that this process and the programs that tests start use as s3://."""
    for package in ("moto", "flask", "s3fs"):
        pytest.importorskip(package, reason="needs moto[server] and s3fs")
    import s3fs

    storage = Storage()
    settings = {
        "AWS_ENDPOINT_URL": storage.url,
        "AWS_ACCESS_KEY_ID": SECRET[0],
        "AWS_SECRET_ACCESS_KEY": SECRET[1],
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
            patch.setitem(ENVIRONMENT, name, value)
        patch.setenv("AWS_MAX_ATTEMPTS", "2")  # botocore's, for each of the 5 of s3fs; it waits seconds in between
        patch.setitem(ENVIRONMENT, "AWS_MAX_ATTEMPTS", "1")
        patch.setitem(ENVIRONMENT, "XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        s3fs.S3FileSystem().mkdir("bucket")
        yield storage
    storage.server.shutdown()


@pytest.fixture
def s3(s3_server: Storage) -> Iterator[Storage]:
    s3_server.mend()
    yield s3_server
    s3_server.mend()


# ------------------------------------------------------------------------------------------------------ torture

TABLE = pytest.StashKey[list[tuple[str, int, int, float]]]()  # fault, trials, passed, seconds


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "torture: counted trials of one fault; `-m torture` runs them in full number")
    config.stash[TABLE] = []


@pytest.fixture
def trials(request: pytest.FixtureRequest) -> Callable[..., None]:
    """trials(fault, trial, few, many): call trial(0), trial(1), ... `few` times, or, with -m torture, `many`.

    The number is the trial's seed, so that one that failed can be had again. `at_once` of them run side by side.
    A trial can be `each` faults in a row.
    """
    torture = request.config.option.markexpr == "torture"

    def run_all(
        fault: str, trial: Callable[[int], Any], few: int, many: int, *, each: int = 1, at_once: int = 2
    ) -> None:
        count, failed, begun = many if torture else few, dict[int, BaseException](), time.monotonic()
        if not count:
            pytest.skip("takes long, so only with -m torture")

        def one(number: int) -> int:
            if len(failed) >= 10:  # it is broken, and more would not tell more
                return 0
            try:
                trial(number)
            except BaseException as error:  # pytest.fail is no Exception
                failed[number] = error
            return 1

        with ThreadPoolExecutor(at_once) as pool:
            tried = sum(pool.map(one, range(count)))
        for error in failed.values():
            if isinstance(error, pytest.skip.Exception):  # this machine lacks what the trial needs
                raise error
        request.config.stash[TABLE].append(
            (fault, each * tried, each * (tried - len(failed)), time.monotonic() - begun)
        )
        if failed:
            number, error = min(failed.items(), key=lambda item: item[0])
            which = f"{len(failed)} of {tried} trials failed ({', '.join(map(str, sorted(failed)))})"
            raise AssertionError(f"{which}, number {number} with: {error}") from error

    return run_all


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.option.markexpr == "torture":
        rows = [f"| {fault} | {count:,} | {passed:,} | {s:.0f} s |" for fault, count, passed, s in config.stash[TABLE]]
        terminalreporter.write_line("\n".join(["", "| fault | trials | passed | time |", "|---|---|---|---|", *rows]))
