"""Run the scripts of extras/tutorial, in forks or, with `start`, as a user does."""

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import forks
import pytest
import torch
from conftest import ENVIRONMENT, ROOT

TUTORIAL = ROOT / "extras" / "tutorial"
MODULES = ["ddp_setup", "chardata", "loop", "ckpt"]  # in the order in which the steps add them

# These lines are put before a script. While the optimizer does the given step, the last rank sends
# SIGTERM to itself and to its DataLoader workers, as torchrun does. train_ has asked for signals
# before that, so the run stops after the next step.
STOP = """
import itertools, os, signal
from torch.optim.optimizer import register_optimizer_step_post_hook
steps_done = itertools.count(1)
def hook(*_):
    if next(steps_done) == {step} and os.environ.get("RANK", "0") == "{last_rank}":
        os.killpg(0, signal.SIGTERM)
register_optimizer_step_post_hook(hook)
"""


class Outcome(NamedTuple):
    lines: list[str]  # standard output
    state: dict  # the weights that the script wrote at its end, or the newest checkpoint

    def weights(self) -> dict[str, torch.Tensor]:
        return self.state.get("model", self.state)


def start(
    script: Path, folder: Path, ranks: int, *args: object, env: dict = {}
) -> subprocess.CompletedProcess:
    """Run a script in `folder`: with one rank as plain python, with more under torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", f"{ranks}"]
    folder.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, *(launcher if ranks > 1 else []), f"{script}", *map(str, args)],
        cwd=folder,
        env={**ENVIRONMENT, **env},
        timeout=600,
        capture_output=True,
        text=True,
        start_new_session=True,  # so that a signal to the process group reaches only the script
    )


def copy(script: Path, folder: Path, before: str = "", replace: tuple[str, str] = ("", "")) -> Path:
    """Copy a script, and the modules that it imports, into a folder that has nothing else.

    before: lines to put before it. replace: a text in it, and what takes its place.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = script.read_text()
    assert replace[0] in text
    for name in {*MODULES} & {*re.findall(r"^import (\w+)$", text, re.MULTILINE)}:
        (folder / f"{name}.py").write_text((ROOT / f"{name}.py").read_text())
    copied = folder / script.name
    copied.write_text(before + text.replace(*replace))
    return copied


def run(
    script: Path | str,
    folder: Path,
    ranks: int = 1,
    *args: object,
    stop: int = 0,
    replace: tuple[str, str] = ("", ""),
    env: dict = {},
) -> Outcome:
    """Run a script to its end, or stop it after this number of steps, at least 2. It must succeed.

    The line "stopped after step" is not in the outcome.
    """
    path = TUTORIAL / script
    folder.mkdir(exist_ok=True)
    if stop or replace[0]:
        before = STOP.format(step=stop - 1, last_rank=ranks - 1) if stop else ""
        path = copy(path, folder / "copied", before, replace)
    done = forks.start(path, folder, ranks, [*map(str, args)], env)
    lines = done.stdout.splitlines()
    assert done.returncode == (3 if stop else 0), done.stderr
    assert not stop or lines.pop() == f"stopped after step {stop}"
    if written := [*folder.glob("model/*.safetensors")]:  # by transformers
        return Outcome(lines, importlib.import_module("safetensors.torch").load_file(*written))
    saved = [*folder.glob("model.pt"), *sorted(folder.glob("out-*/step-*.pt"))]
    return Outcome(lines, torch.load(saved[-1], weights_only=True))


def numbers(lines: list[str]) -> list[float]:
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", "\n".join(lines))]


def assert_close(ran: Outcome, expected: Outcome) -> None:
    """Compare the weights and the printed numbers of two runs."""
    weights, wanted = ran.weights(), expected.weights()
    assert weights.keys() == wanted.keys()
    for name, weight in wanted.items():
        # Not element by element: AdamW divides a gradient by its size, so an element whose gradient
        # is little more than a rounding error differs by more.
        distance = (weights[name] - weight).double().norm()
        assert distance <= 1e-4 * weight.double().norm(), name
    assert len(ran.lines) == len(expected.lines)
    assert numbers(ran.lines) == pytest.approx(numbers(expected.lines), rel=1e-4, abs=1e-4)


def definitions(name: str) -> dict:
    """Return the functions and classes of a script, without running it."""
    namespace = {"__file__": f"{TUTORIAL / name}"}
    exec(re.split(r"\n(?:with|if __name__)", (TUTORIAL / name).read_text())[0], namespace)
    return namespace
