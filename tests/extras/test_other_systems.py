"""One process trains, saves, stops, resumes and samples on Windows, on macOS and on MPS, as far as Linux can show it.

    python test_other_systems.py windows SCRIPT ARGUMENT ...

runs a script in which the modules of this project see only what Python has on that system. torch, numpy and the
standard library still see Linux. So this file finds uses of functions that a system lacks, and of open files that
Windows protects; it does not replace a run on that system.
"""

import builtins
import ctypes
import importlib
import mmap
import os
import runpy
import signal
import subprocess
import sys
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from conftest import ENVIRONMENT, ROOT, TINY, Ran, ahead, losses, same, state
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import chardata
import ckpt
import ddp_setup
import gpt
import loop

MODULES = ["ddp_setup", "gpt", "chardata", "loop", "ckpt"]
OURS = {"__main__", *MODULES}  # and extras: these see the other system


# --- another system ---


class View:
    """A module as another system has it: `but` replaces attributes, and what `has` is false for is missing."""

    def __init__(self, module: Any, has: Any = lambda name: True, **but: Any):
        self.module, self.has, self.but = module, has, but

    def __getattr__(self, name: str) -> Any:
        if name in self.but:
            return self.but[name]
        if not self.has(name):
            raise AttributeError(f"module {self.module.__name__!r} has no attribute {name!r}")
        return getattr(self.module, name)


# What the documentation of the module os marks with "Availability: Unix" or "not Windows", of all that could be used.
NOT_IN_OS = set(
    "fork forkpty sched_getaffinity sched_setaffinity O_NOFOLLOW O_DIRECTORY O_CLOEXEC O_NONBLOCK sysconf uname "
    "getuid geteuid getgid getpgid setpgid setsid killpg nice wait WNOHANG pread pwrite posix_fadvise "
    "posix_fallocate sendfile fdatasync sync statvfs fchown chown mkfifo chroot register_at_fork getloadavg".split()
)
SIGNALS = set(
    "SIGABRT SIGFPE SIGILL SIGINT SIGSEGV SIGTERM SIG_DFL SIG_IGN Signals Handlers".split()
)
SIGNALS |= set("signal getsignal raise_signal strsignal valid_signals default_int_handler".split())


class WindowsLibrary:
    def __new__(cls, name: Any, *_: object) -> Any:
        raise TypeError("argument 1 must be str, not None") if name is None else OSError(name)


class MacLibrary(ctypes.CDLL):
    def __getattr__(self, name: str) -> Any:
        if name == "mallopt":
            raise AttributeError(f"dlsym: symbol not found: {name}")
        return super().__getattr__(name)


# For each system: name of a module -> what the modules of this project see in its place; None: there is no such module
SYSTEMS: dict[str, dict[str, Any]] = {
    "windows": {
        "fcntl": None,
        "resource": None,
        "os": View(os, lambda name: name not in NOT_IN_OS, name="nt"),
        "sys": View(sys, platform="win32"),
        "signal": View(signal, lambda name: name in SIGNALS),
        "mmap": View(mmap, lambda name: not name.startswith("MADV_")),
        "ctypes": View(ctypes, CDLL=WindowsLibrary),
    },
    "macos": {
        "os": View(os, lambda name: name not in ("sched_getaffinity", "sched_setaffinity")),
        "sys": View(sys, platform="darwin"),
        "ctypes": View(ctypes, CDLL=MacLibrary),
    },
}


def pretend(system: str) -> None:
    """Show the modules of this project another system, from now on in this process."""
    views, original = SYSTEMS[system], builtins.__import__

    def import_(name: str, globals: Any = None, *args: Any, **more: Any) -> Any:
        its_name = (globals or {}).get("__name__", "")
        if name in views and (its_name in OURS or its_name.startswith("extras")):
            if views[name] is None:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            return views[name]
        return original(name, globals, *args, **more)

    builtins.__import__ = import_
    for name in MODULES:  # this file has imported them on Linux
        del sys.modules[name]
    if system == "windows":
        protect_open_files()


def protect_open_files() -> None:
    """Refuse, as Windows does, to rename, replace or delete an open or mapped file, and to open a folder."""

    def refusing(call: Any, refuse: Any) -> Any:
        def checked(*paths: Any, **more: Any) -> Any:
            for path in paths:
                if isinstance(path, (str, os.PathLike)) and refuse(path):
                    raise PermissionError(13, "The process cannot access the file", os.fspath(path))
            return call(*paths, **more)

        return checked

    def in_use(path: Any) -> bool:
        file = os.path.realpath(path)
        handles = (os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
        return file in handles or f"{file}\n" in Path("/proc/self/maps").read_text()

    os.open = refusing(os.open, os.path.isdir)
    for name in ("rename", "replace", "unlink", "remove"):
        setattr(os, name, refusing(getattr(os, name), in_use))  # pathlib uses them too


def run(system: str, script: Path, *args: object, folder: Path) -> Ran:
    """Run a script in `folder`; "linux" runs it as it is."""
    start = [] if system == "linux" else [__file__, system]
    ended = subprocess.run(
        [sys.executable, *start, str(script), *map(str, args)],
        cwd=folder,
        env={**ENVIRONMENT, "PYTHONPATH": f"{ROOT}:{ROOT}/tests"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    return Ran(ended.returncode, ended.stdout, ended.stderr)


EACH = pytest.mark.parametrize("system", SYSTEMS)

PROBE = """
import ctypes, os, signal, sys
from pathlib import Path
def refused(error, call, *args):
    try:
        call(*args)
    except error:
        return True
missing = [name for name in ("fork", "sched_getaffinity", "O_NOFOLLOW") if not hasattr(os, name)]
print(sys.platform, os.name, *missing)
Path("a").write_bytes(bytes(9))
with open("a") as file:
    print(refused(OSError, os.rename, "a", "b"), refused(OSError, Path("a").replace, "b"))
import numpy
mapped = numpy.memmap(Path("a" if Path("a").exists() else "b"), "u1", "r")
print(refused(OSError, Path(mapped.filename).unlink), refused(OSError, os.open, ".", os.O_RDONLY))
print(refused(AttributeError, lambda: signal.pthread_sigmask), refused(AttributeError, lambda: signal.SIGUSR1))
print(refused(ImportError, __import__, "fcntl", globals()), refused((AttributeError, TypeError), lambda: ctypes.CDLL(None).mallopt))
"""


def test_the_pretended_systems_lack_what_they_should(tmp_path):
    script = tmp_path / "probe.py"
    script.write_text(PROBE)
    windows, macos = (run(system, script, folder=tmp_path) for system in SYSTEMS)
    assert windows.out.splitlines() == [
        "win32 nt fork sched_getaffinity O_NOFOLLOW",
        *["True True"] * 4,
    ], windows
    assert macos.out.splitlines() == [
        "darwin posix sched_getaffinity",
        "None True",
        *["None None"] * 2,
        "None True",
    ], macos


# --- the tutorial's last script, and run.py ---

# Put before the script: Ctrl-C at the 40th step, in the middle of the second of three epochs of 27 steps.
STOP_AT_STEP_40 = """
import itertools, signal
from torch.optim.optimizer import register_optimizer_step_post_hook
count = itertools.count(1)
register_optimizer_step_post_hook(lambda *_: signal.raise_signal(signal.SIGINT) if next(count) == 40 else None)
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return a function: (system, what) -> exit code and output of a run, and its folder; all runs begin at once."""
    root = tmp_path_factory.mktemp("systems")
    tutorial = ROOT / "extras" / "tutorial" / "4_checkpoints.py"
    stopping = root / "stopping.py"
    stopping.write_text(STOP_AT_STEP_40 + tutorial.read_text())
    flags = [*TINY, "--steps", 5, "--log-every", 1]

    def tutorial_twice(system: str) -> tuple[list[Ran], Path]:
        folder = root / f"{system}-tutorial"
        folder.mkdir()
        return [run(system, script, folder=folder) for script in (stopping, tutorial)], folder

    def train_and_sample(system: str) -> tuple[list[Ran], Path]:
        folder = root / f"{system}-run"
        folder.mkdir()
        data = folder / "data.txt"  # above 1 MiB: as bytes it stays mapped into memory
        data.write_text("the quick brown fox jumps over the lazy dog; " * 24_000)
        sample = ["sample", "--seed", 1, "--max-new-tokens", 20]
        commands = [*flags, "--tokenizer", "byte", "--data", data, "--eval-tokens", 500], sample
        return [run(system, ROOT / "run.py", *args, folder=folder) for args in commands], folder

    parts = {"tutorial": tutorial_twice, "run": train_and_sample}
    calls = {f"{s} {p}": partial(parts[p], s) for p in parts for s in ("linux", *SYSTEMS)}
    with ahead(**calls) as begun:
        yield lambda system, part: begun[f"{system} {part}"].result()


@EACH
def test_the_last_script_of_the_tutorial_stops_and_resumes(results, system):
    (stopped, resumed), folder = results(system, "tutorial")
    assert (stopped.code, resumed.code) == (3, 0) and stopped.err == resumed.err == "", (
        stopped,
        resumed,
    )
    (reference, end), linux = results("linux", "tutorial")
    assert stopped.out.count("\n") == 2 and stopped.out == reference.out
    assert resumed.out.count("\n") == 3 and resumed.out == end.out
    assert same(state(folder / "out-tutorial"), state(linux / "out-tutorial"))


@EACH
def test_run_py_trains_and_samples(results, system):
    (trained, sampled), folder = results(system, "run")
    assert trained.code == sampled.code == 0 and trained.err == sampled.err == "", (
        trained,
        sampled,
    )
    assert "Done: 5 steps" in trained.out
    (_, reference), linux = results("linux", "run")
    assert losses(folder / "out") == losses(linux / "out") and len(losses(folder / "out")) == 5
    assert same(state(folder / "out")["model"], state(linux / "out")["model"])
    assert sampled.out == reference.out


# --- MPS ---


class PretendMps(TorchFunctionMode):
    """All tensors say that they are on MPS; in truth they are on the CPU. `copies` are the arguments of Tensor.to."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[Any, dict[str, Any]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == torch.Tensor.device.__get__:
            device = func(*args)
            return torch.device("mps:0") if device.type == "cpu" else device
        if func == torch.Tensor.to:
            self.copies.append((args, kwargs))

        def real(device: torch.device) -> torch.device:
            return torch.device("cpu") if device.type == "mps" else device

        args, kwargs = tree_map_only(torch.device, real, (args, kwargs))
        return func(*args, **kwargs)


class Without64(TorchDispatchMode):
    """Refuse, as MPS does, to compute a tensor of float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype in (torch.float64, torch.complex128):
            raise TypeError(f"{func}: MPS has no {result.dtype}")
        return result


def test_the_copy_of_a_batch_to_mps_is_blocking():
    """A copy that is not can read memory that was freed meanwhile: github.com/pytorch/pytorch/issues/189690."""
    with PretendMps() as mps:
        loop.to_device({"x": torch.ones(3, 4)[:, 1:]}, torch.device("mps"))
    (((_, device), how),) = mps.copies
    assert device.type == "mps" and not how.get("non_blocking")


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("arch", gpt.ARCHS)
def test_training_on_mps_uses_no_float64(monkeypatch, tmp_path, arch, scaled):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    config = gpt.Config(vocab=5, block_size=8, layers=2, heads=2, embd=8, arch=arch)
    plan = chardata.BatchPlan([np.arange(99, dtype=np.uint8) % 5], 8, batch_size=4, seed=0)

    def train(device: str) -> tuple[list[float], dict[str, Any], list[int]]:
        with ddp_setup.stop_signals() as asked, ddp_setup.process_group(device) as world:
            model = gpt.build(config, seed=0)
            model.checkpoint_activations = True
            groups = gpt.parameter_groups(model)
            replica = ddp_setup.replicate(model, world)
            muon = torch.optim.Muon(groups.pop("matrices"), lr=0.01)
            rest = [parameter for group in groups.values() for parameter in group]
            optimizers = [torch.optim.AdamW(rest, lr=0.01, fused=True), muon]
            steps = islice(chardata.steps(plan, accum=2), 4)
            scaler = torch.amp.GradScaler(world.device.type, enabled=scaled)
            training = loop.train_(
                replica, optimizers, steps, gpt.loss, clip=1.0, scaler=scaler, stop=asked
            )
            values = [float(report.loss) for _, report in training]
            values.append(loop.evaluate(replica, chardata.every_window(plan), gpt.loss))
            folder = str(tmp_path / device)
            ckpt.save(folder, ckpt.snapshot(replica, optimizers), step=4)
            found = ckpt.newest(folder)[0].state
            ckpt.restore_(found, replica, optimizers)
            assert {next(model.parameters()).device.type, world.device.type} == {device}
            tokens = gpt.sample(model.eval(), torch.tensor([1]), temperature=0)
            return values, found, [*islice(tokens, 9)]

    expected = train("cpu")
    with PretendMps(), Without64():
        values, found, tokens = train("mps")
    # The sums over batches are float32 on MPS and float64 on the CPU.
    torch.testing.assert_close(values, expected[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(found["model"], expected[1]["model"], rtol=1e-4, atol=1e-6)
    assert tokens == expected[2]


def test_run_py_refuses_recomputed_dropout_on_mps(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    program = importlib.import_module("run")  # not when this file runs as a script
    flags = program.Flags(out=f"{tmp_path}", device="mps", dropout=0.1, checkpoint_activations=True)
    with pytest.raises(click.UsageError, match="only without --dropout"):
        program.train(flags, set())
    assert [*tmp_path.iterdir()] == []


if __name__ == "__main__":
    pretend(sys.argv[1])
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
