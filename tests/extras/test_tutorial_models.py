"""The tutorial's scripts for other models give the same losses and weights on one and two ranks."""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from conftest import ENVIRONMENT, ROOT, same

TUTORIAL = ROOT / "extras" / "tutorial"
PYTHON = [sys.executable]
TORCHRUN = [*PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

# These lines are put before a script. They send SIGTERM at the 30th optimizer step, which is in the second epoch (an
# epoch has 20 or 27 steps).
STOP_AT_STEP_30 = """
import itertools, os, signal
from torch.optim.optimizer import register_optimizer_step_post_hook
count = itertools.count(1)
def hook(*_):
    if next(count) == 30:
        os.kill(os.getpid(), signal.SIGTERM)
register_optimizer_step_post_hook(hook)
"""


class Outcome(NamedTuple):
    folder: Path
    numbers: list[float]  # epoch, loss and test result of each line of the output
    state: dict  # what the script saved last


def start_script(script: Path, folder: Path, ranks: int) -> subprocess.CompletedProcess:
    folder.mkdir(exist_ok=True)
    return subprocess.run(
        [*(PYTHON if ranks == 1 else TORCHRUN), str(script)],
        cwd=folder,
        env=ENVIRONMENT,
        timeout=600,
        capture_output=True,
        text=True,
    )


def run_script(script: Path, folder: Path, ranks: int, code: int = 0) -> Outcome:
    """Run a script in `folder` as a user does; return what it printed and what it saved last.

    code: the exit code that is expected.
    """
    done = start_script(script, folder, ranks)
    assert done.returncode == code, done.stderr
    saved = [*folder.glob("model.pt"), *sorted(folder.glob("out-*/step-*.pt"))]
    numbers = [float(number) for number in re.findall(r"\d+(?:\.\d+)?", done.stdout)]
    return Outcome(folder, numbers, torch.load(saved[-1], weights_only=True))


def copy_script(name: str, folder: Path, old: str = "", new: str = "") -> Path:
    """Copy a script to `folder`, with `new` in place of the text `old`, or at its start. The copy finds the modules."""
    text = (TUTORIAL / name).read_text()
    assert not old or text.count(old) == 1
    copy = folder / name
    copy.write_text(f"import sys\nsys.path.append({str(ROOT)!r})\n" + text.replace(old, new, 1))
    return copy


def definitions(name: str) -> dict:
    """Return the functions and classes of a script, without running it."""
    namespace = {"__file__": str(TUTORIAL / name)}
    exec((TUTORIAL / name).read_text().rpartition("\nwith ")[0], namespace)
    return namespace


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """outcome(name, ranks) runs a script where it is, once, in a folder of its own."""
    root = tmp_path_factory.mktemp("tutorial")

    @cache
    def run(name: str, ranks: int) -> Outcome:
        if name == "hugging_face.py":
            pytest.importorskip("transformers")
        return run_script(TUTORIAL / name, root / f"{name}-{ranks}", ranks)

    return run


@pytest.mark.parametrize("name", ["hugging_face.py", "frozen_and_unused.py", "scheduler.py"])
def test_two_ranks_give_the_losses_and_weights_of_one(outcome, name):
    one, two = outcome(name, 1), outcome(name, 2)
    assert len(one.numbers) == len(two.numbers) == 9  # three lines: only rank 0 prints
    assert two.numbers == pytest.approx(one.numbers, rel=1e-4, abs=1e-4)
    assert one.numbers[-2] < 0.7 * one.numbers[1]  # the model learns
    weights, expected = (ran.state.get("model", ran.state) for ran in (two, one))
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        # Not element by element: AdamW divides a gradient by its size, so an element whose gradient
        # is little more than rounding errors differs by more (2e-5 on one of two processors).
        distance = (weights[name] - weight).double().norm()
        assert distance <= 5e-5 * weight.double().norm(), name


def test_transformers_reads_the_model_and_computes_the_printed_loss(outcome):
    """The reference takes one sequence at a time, without padding, mask and labels."""
    transformers = pytest.importorskip("transformers")
    one = outcome("hugging_face.py", 1)
    model = transformers.AutoModelForCausalLM.from_pretrained(one.folder / "model").eval()
    assert same(dict(model.state_dict()), one.state["model"])
    torch.manual_seed(0)
    make_sequences = definitions("hugging_face.py")["make_sequences"]
    _, test = make_sequences(480), make_sequences(90)
    with torch.no_grad():
        losses = [
            F.cross_entropy(model(s[None]).logits[0, :-1], s[1:], reduction="none") for s in test
        ]
    assert one.numbers[-1] == pytest.approx(torch.cat(losses).mean().item(), abs=1e-4)


@pytest.mark.parametrize("name", ["hugging_face.py", "scheduler.py"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_was_stopped_continues_exactly(outcome, tmp_path, ranks, name):
    unbroken = outcome(name, ranks)
    # torchrun has exit codes of its own.
    code, copy = 3 if ranks == 1 else 1, copy_script(name, tmp_path, new=STOP_AT_STEP_30)
    stopped = run_script(copy, tmp_path, ranks, code)
    (last,) = sorted(tmp_path.glob("out-*/step-*.pt"))[-1:]
    assert 30 <= int(last.name.split("-")[1]) < 40  # in the middle of the second epoch
    assert not (tmp_path / "model").exists()
    resumed = run_script(TUTORIAL / name, tmp_path, ranks)
    step, *numbers = resumed.numbers  # the first line says from where it continues
    *before, stopped_after = stopped.numbers
    assert step == stopped_after == int(last.name.split("-")[1])
    assert before + numbers == unbroken.numbers and len(before) == 3
    assert same(resumed.state, unbroken.state)


@pytest.mark.parametrize("ranks", [1, 2])
def test_frozen_parameters_and_buffers_do_not_change(outcome, ranks):
    script = definitions("frozen_and_unused.py")
    torch.manual_seed(0)
    script["make_batches"](240), script["make_batches"](30)
    before, after = script["TwoTasks"]().state_dict(), outcome("frozen_and_unused.py", ranks).state
    assert before.keys() == after.keys()
    unchanged = {name for name in before if torch.equal(before[name], after[name])}
    assert unchanged == {name for name in before if name.startswith("encoder.")}


def test_without_the_flag_two_ranks_fail_and_the_error_names_it(tmp_path):
    script = copy_script("frozen_and_unused.py", tmp_path, ", find_unused_parameters=True)", ")")
    done = start_script(script, tmp_path, 2)
    assert done.returncode == 1 and "find_unused_parameters=True" in done.stderr
    assert not (tmp_path / "model.pt").exists()
