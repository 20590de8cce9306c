"""What the tests of the program share: start run.py, read its output, wait for it, find its processes."""

import atexit
import functools
import json
import logging
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import warm

ROOT = Path(__file__).resolve().parent.parent
# Settings of a launcher or of the user must not reach the programs that the tests start.
FOREIGN = (
    "DDPKIT_",
    "SLURM_",
    "TORCHELASTIC_",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_",
    "PYTHONUNBUFFERED",
)
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}
ENVIRONMENT["OMP_WAIT_POLICY"] = "passive"  # spinning threads take CPU time from other processes
ENVIRONMENT["CUDA_VISIBLE_DEVICES"] = (
    ""  # bitwise equality, and any number of ranks, are promises for CPUs
)
PYTHON = [sys.executable, "run.py"]
# The names of variables that change nothing while torch is imported.
WARM = re.compile("DDPKIT_|TEST_SIGNAL|TEST_PLACE").match
MODEL = "--layers 1 --heads 2 --embd 16 --block-size 16".split()
CHANCE = random.SystemRandom()  # not seeded by hypothesis
TINY = [*MODEL, *"--batch-size 8 --dtype float32 --epochs 3 --lr 0.003 --warmup 20".split()]


def torchrun(size: int, *flags: str) -> list[str]:
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        f"{size}",
    ]
    return [*start, *flags, "run.py"]


class Ran(NamedTuple):
    code: int
    out: str
    err: str


class Program:
    """A running run.py.

    The output comes through a socket that holds a few lines. So when a test has read a line, the program is at most
    a few lines further, however fast it is. The program and all processes that it started are killed after `seconds`
    (then it hangs), and when the `with` block ends.

    root: the folder with run.py, which is also the working directory.
    Plain python is started by the server of warm.py, which has imported torch already, unless the environment has
    other variables than flags of the program and those that send it a signal.
    """

    def __init__(
        self,
        *args: object,
        launcher: list[str] = PYTHON,
        env: dict[str, str | None] = {},
        seconds: float = 900,
        root: Path = ROOT,
    ):
        self.mark = f"TEST_PROGRAM={uuid.uuid4().hex}"  # all descendants inherit it, also orphans
        self.heard, self.hung = b"", False
        self.errors = tempfile.TemporaryFile()
        ours, theirs = socket.socketpair()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel uses its minimum
        environment = {**ENVIRONMENT, **env, **dict([self.mark.split("=")])}
        environment = {key: value for key, value in environment.items() if value is not None}
        with ours, theirs:
            if launcher[:-1] == PYTHON[:-1] and all(map(WARM, env)):
                self.process = warm.Process(
                    warm_server(),
                    root / launcher[-1],
                    [*map(str, args)],
                    environment,
                    theirs.fileno(),
                    self.errors.fileno(),
                )
            else:
                self.process = subprocess.Popen(
                    [*launcher, *map(str, args)],
                    cwd=root,
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
        # faulthandler, which run.py enables, writes where all threads are. The ranks of --spawn die with their parent,
        # so it is the last.
        for pid in sorted(self.family(), key=lambda pid: (pid == self.process.pid, -pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)
            time.sleep(1)
        self.kill()

    def kill(self) -> None:
        for pid in self.family():
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                pass

    def family(self, having: str = "") -> list[int]:
        """Return the ids of the living processes of the program, in the order of their start.

        having: only processes with this text in their command line or environment.
        """
        found = [] if having or self.process.poll() is not None else [self.process.pid]
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                text = (folder / "environ").read_bytes() + b"\0" + (folder / "cmdline").read_bytes()
            except (
                FileNotFoundError,
                ProcessLookupError,
                PermissionError,
            ):  # it has ended, or belongs to another user
                continue
            if self.mark.encode() in text and having.encode() in text:  # a zombie has neither
                found.append(int(folder.name))
        return sorted({*found})

    def children(self) -> list[int]:
        """Return the ids of the ranks that --spawn started, in the order of ranks."""
        return self.family("\0SPAWNED_BY=")

    def read_to(self, what: str) -> None:
        """Read the output up to a line that begins with `what`."""
        while line := self.lines.readline():
            self.heard += line
            if line.startswith(what.encode()):
                return
        pytest.fail(f"no line began with {what!r}: {self.finish()}")

    def read_lines(self, count: int) -> None:
        """Read the output up to `count` lines of training steps, or to its end."""
        while count and (line := self.lines.readline()):
            self.heard += line
            count -= line.startswith(b"step ")

    def finish(self, seconds: float = 5) -> Ran:
        """Wait for the end of the program. All processes that it started must end in the `seconds` after it."""
        self.heard += self.lines.read()
        code = self.process.wait()
        self.errors.seek(0)
        ran = Ran(code, self.heard.decode(), self.errors.read().decode())
        assert not self.hung, f"the program hung and was killed: {ran}"
        wait_for(lambda: not self.family(), "the end of all its processes", seconds)
        return ran


def signalled(launcher: list[str], where: str, place: Path) -> dict[str, Any]:
    """Return arguments of Program: the program sends a signal, as signalled.py describes.

    where: TEST_SIGNAL. place: the file that gets the place.
    """
    return {
        "launcher": [*launcher[:-1], f"{ROOT}/tests/faults/signalled.py"],
        "env": {"TEST_SIGNAL": where, "TEST_PLACE": f"{place}"},
    }


def random_place(chance: random.Random, start: float = 0.3) -> str:
    """Return "STEPS THREAD CALLS" of TEST_SIGNAL: a place in the start, a step, an evaluation or a save.

    start: the probability of the start. A run of the TINY model makes 22,000 calls in its start, if torch has been
    imported, 1,200 in a step, and 7,400 in the thread of a save and 5,900 in the main thread meanwhile.
    """
    if chance.random() < start:
        return f"0 main {int(10 ** chance.uniform(0, 4.3))}"
    if chance.random() < 0.5:
        return f"0 save {chance.randint(1, 30_000)}"  # in one of the first four saves
    return f"{chance.randint(1, 8)} main {chance.randint(1, 7500)}"


def run(*args: object, **how: Any) -> Ran:
    """Run the program to its end. The arguments are those of Program."""
    with Program(*args, **how) as program:
        return program.finish()


@functools.cache
def warm_server() -> str:
    """Start the server of warm.py, which runs as long as the tests, and return the path of its socket."""
    path = f"{tempfile.mkdtemp()}/warm"
    server = warm.start(path, ENVIRONMENT)
    atexit.register(
        lambda: (
            server.stdin.close(),
            server.wait(),
            os.unlink(path),
            os.rmdir(os.path.dirname(path)),
        )
    )
    wait_for(lambda: os.path.exists(path), "the warm server")
    return path


def run_on_ranks(function: Callable[..., None], size: int, *args: str) -> None:
    """Call function(*args), a function of a test module, in `size` ranks, and check that all of them end with 0.

    They start in a tenth of the time that ddp_setup.spawn needs, because they are forks of a process with torch. As
    under torchrun, this process serves their store.
    """
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = []
    with tempfile.TemporaryFile() as errors:
        for rank in range(size):
            launcher = launch_variables(rank, size, store.port)
            launcher |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "PYTHONPATH": f"{ROOT}"}
            processes.append(
                warm.Process(
                    warm_server(),
                    ROOT / "tests" / "call.py",
                    [function.__module__, function.__name__, *args],
                    {**ENVIRONMENT, **launcher},
                    errors.fileno(),
                    errors.fileno(),
                )
            )
        codes = [process.wait() for process in processes]
        errors.seek(0)
        assert codes == [0] * size, errors.read().decode()


def free_port() -> int:
    """Return a free port of 127.0.0.1 that the system does not choose for other programs (from 32768 on)."""
    while True:
        with (
            suppress(OSError),
            socket.create_server(("127.0.0.1", CHANCE.randint(10000, 32767))) as server,
        ):
            return server.getsockname()[1]


def launch_variables(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the variables of one of `size` ranks on this machine."""
    numbers = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    return {name: f"{number}" for name, number in numbers.items()} | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{port}",
    }


@contextmanager
def ahead(at_once: int | None = None, /, **calls: Callable[[], Any]) -> Iterator[dict[str, Future]]:
    """Start all calls in background threads, and yield their futures by name.

    at_once: the number of threads; by default one per core. Most of a run is `import torch` on one core, so several
        runs at once use the machine better. For runs that mostly sleep it can be higher.
    """
    pool = ThreadPoolExecutor(at_once or len(os.sched_getaffinity(0)))
    try:
        yield {name: pool.submit(call) for name, call in calls.items()}
    finally:
        pool.shutdown(cancel_futures=True)


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 60) -> Any:
    """Wait until condition() is true and return its result. The test fails after about `seconds`.

    It counts attempts: on a clock, a machine that stands still for a while would miss the end of the wait.
    """
    for _ in range(round(seconds / 0.02)):
        if value := condition():
            return value
        time.sleep(0.02)
    if value := condition():
        return value
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


def contents(folder: Path) -> Any:
    """Return the files in a folder with their contents; of a file the content, and None if nothing is there."""
    if folder.is_dir():
        return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return folder.read_bytes() if folder.exists() else None


def state(out: Path) -> dict[str, Any]:
    """Return the newest checkpoint, read with torch alone."""
    import torch

    return torch.load(checkpoints(out)[-1], weights_only=True)


def same(a: Any, b: Any) -> bool:
    """Whether two nested dicts, lists, tensors and numbers are bitwise equal. 0.0 and -0.0 differ; NaN equals itself."""
    import torch

    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return torch.equal(*(t.detach().contiguous().flatten().view(torch.uint8) for t in (a, b)))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return isinstance(b, float) and a.hex() == b.hex()
    return bool(a == b)


def same_training(out: Path, other: Path) -> bool:
    """Whether two runs have equal losses and bitwise equal weights and optimizer states."""
    a, b = state(out), state(other)
    return all(same(a[key], b[key]) for key in ("model", "optimizers", "step")) and losses(
        out
    ) == losses(other)


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

    lock = threading.Lock()  # calls from several threads must not start the same run twice

    def undisturbed(ranks: int) -> Path:
        with lock:
            return folder(ranks)

    return undisturbed


@pytest.fixture
def start() -> Iterator[Callable[..., Program]]:
    """Return a function that starts the program; all its processes are killed when the test ends."""
    started: list[Program] = []

    def begin(*args: object, **how: Any) -> Program:
        started.append(Program(*args, **how))
        return started[-1]

    yield begin
    for program in started:
        program.__exit__()


# ----------------------------------------------------------------------------------------------------------- S3

SECRET = (
    "AKIAdoNotSayThis",
    "wJalrXUtnFEMI/K7MDENG/doNotSayThis",
)  # key and secret; tests check that no output has them


class Storage:
    """An S3 server on the loopback interface that injects faults.

    fault(method, path) decides what happens to a request: "500" or "503" (this answer), "cut" (the connection is closed
    in the middle of the request), "half" (it is closed in the middle of the answer), "slow", or "" (no fault).
    """

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.application = DomainDispatcherApplication(create_backend_app)
        self.server = make_server("127.0.0.1", 0, self, threaded=True)
        self.server.daemon_threads, self.server.block_on_close = (
            True,
            False,
        )  # because clients keep their connections open
        self.url = f"http://127.0.0.1:{self.server.port}"
        self.requests: list[tuple[str, str]] = []
        self.mend()
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def mend(self) -> None:
        self.fault: Callable[[str, str], str] = lambda method, path: ""

    def fail(self, fault: str, times: int = 10**9, method: str = "", path: str = "") -> None:
        """Inject `fault` into the next `times` requests with this method and with `path` in their path."""
        left = iter(range(times))

        def choose(its_method: str, its_path: str) -> str:
            meant = its_method.startswith(method) and path in its_path
            return fault if meant and next(left, None) is not None else ""

        self.requests.clear()
        self.fault = choose

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterator[bytes]:
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
    """Start an S3 server with a bucket named "bucket". This process and the programs that tests start use it for s3://."""
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
        patch.setenv("AWS_MAX_ATTEMPTS", "2")  # of botocore, for each of the 5 attempts of s3fs
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


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "number of the first trial of each random fault; a failed trial prints its number"
    parser.addoption("--seed", type=int, help=text)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "torture: counted trials of one fault; `-m torture` runs all of them"
    )
    config.stash[TABLE] = []


@pytest.fixture
def trials(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return trials(fault, trial, few, many), which calls trial(0), trial(1), ... `few` times, with -m torture `many`.

    The number is the seed of the trial, so that a failed trial can be repeated. `at_once` trials run side by side. A
    trial can consist of `each` faults. The test is skipped if some trials were skipped and all others passed.
    """
    torture = request.config.option.markexpr == "torture"

    def run_all(
        fault: str,
        trial: Callable[[int], Any],
        few: int,
        many: int,
        *,
        each: int = 1,
        at_once: int = 2,
    ) -> None:
        count, begun = many if torture else few, time.monotonic()
        failed, skipped = dict[int, BaseException](), list[BaseException]()
        if not count:
            pytest.skip("takes long, so only with -m torture")

        def one(number: int) -> bool:
            """Return whether this trial was run."""
            if len(failed) >= 10:  # more failures would not tell more
                return False
            try:
                trial(number)
            except (
                pytest.skip.Exception
            ) as reason:  # this machine lacks something that the trial needs
                skipped.append(reason)
                return False
            except BaseException as error:  # what pytest.fail raises is not an Exception
                failed[number] = error
            return True

        first = request.config.option.seed or 0
        with ThreadPoolExecutor(at_once) as pool:
            tried = sum(pool.map(one, [(first + i) % many for i in range(count)]))
        passed = each * (tried - len(failed))
        request.config.stash[TABLE].append((fault, each * tried, passed, time.monotonic() - begun))
        if failed:
            number, error = min(failed.items(), key=lambda item: item[0])
            numbers = ", ".join(map(str, sorted(failed)))
            text = (
                f"{len(failed)} of {tried} trials failed ({numbers}), --seed {number} with: {error}"
            )
            raise AssertionError(text) from error
        if skipped:
            raise skipped[0]

    return run_all


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.option.markexpr == "torture":
        rows = [
            f"| {fault} | {count:,} | {passed:,} | {s:.0f} s |"
            for fault, count, passed, s in config.stash[TABLE]
        ]
        terminalreporter.write_line(
            "\n".join(["", "| fault | trials | passed | time |", "|---|---|---|---|", *rows])
        )
