"""Each script of extras/tutorial gives the weights of the single-process script."""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from conftest import ENVIRONMENT, ROOT
from documents import code_blocks

TUTORIAL = ROOT / "extras" / "tutorial"
SCRIPTS = sorted(TUTORIAL.glob("[0-9]_*.py"))
MODULES = ["ddp_setup", "chardata", "loop", "ckpt"]  # in the order in which the scripts add them
PYTHON = [sys.executable]
TORCHRUN = [*PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

# These lines are put before a script. They send SIGTERM in an optimizer step. train_ has asked for
# signals before that, so the run stops after the next step. An epoch has 27 steps.
STOP = """
import itertools, os, signal
from torch.optim.optimizer import register_optimizer_step_post_hook
steps_done = itertools.count(1)
def hook(*_):
    if next(steps_done) == {}:
        os.kill(os.getpid(), signal.SIGTERM)
register_optimizer_step_post_hook(hook)
"""


class Outcome(NamedTuple):
    lines: list[str]  # standard output
    weights: dict[str, torch.Tensor]


def run_script(script: Path, folder: Path, launcher: list[str], code: int = 0) -> Outcome:
    """Run a script in `folder`; return its output and the newest weights that are in `folder`.

    code: the exit code that is expected.
    """
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        [*launcher, str(script)],
        cwd=folder,
        env=ENVIRONMENT,
        timeout=600,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    saved = [*folder.glob("model.pt"), *sorted(folder.glob("out-*/step-*.pt"))]
    state = torch.load(saved[-1], weights_only=True)
    return Outcome(done.stdout.splitlines(), state.get("model", state))


def copy_with_modules(script: Path, folder: Path, before: str = "") -> Path:
    """Copy a script, after the lines `before`, and the modules that it imports; nothing else."""
    folder.mkdir(exist_ok=True)
    text = before + script.read_text()
    for name in re.findall(r"^import (\w+)$", text, re.MULTILINE):
        if name in MODULES:
            (folder / f"{name}.py").write_text((ROOT / f"{name}.py").read_text())
    copy = folder / "train.py"
    copy.write_text(text)
    return copy


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """outcome(number, ranks) runs a script where it is, once. Number -1 is script 0 with the rows in
    the order in which the scripts from 2 on train on them."""
    root = tmp_path_factory.mktemp("tutorial")

    @cache
    def run(number: int, ranks: int) -> Outcome:
        folder, launcher = root / f"{number}-{ranks}", PYTHON if ranks == 1 else TORCHRUN
        if number >= 0:
            return run_script(SCRIPTS[number], folder, launcher)
        text = (
            SCRIPTS[0].read_text().replace("import torch\n", "import chardata\nimport torch\n", 1)
        )
        sampler = "sampler=chardata.rank_indices(len(train), 0, 1, epoch, 0)"
        assert text.count("shuffle=True") == 1
        script = root / "ordered.py"
        script.write_text(text.replace("shuffle=True", sampler))
        return run_script(copy_with_modules(script, folder), folder, launcher)

    return run


def test_readme_shows_the_last_script_without_its_search_path():
    (shown,) = code_blocks((ROOT / "README.md").read_text(), "python")
    text = SCRIPTS[4].read_text().split('"""\n\n')[1]
    text = text.replace("import os\n", "")
    text = re.sub(r"^# The modules .*\nsys\.path.*\n", "", text, flags=re.MULTILINE)
    assert shown == text


def test_each_script_imports_one_module_more_than_the_one_before():
    assert [script.name[0] for script in SCRIPTS] == list("01234")
    for number, script in enumerate(SCRIPTS):
        imported = re.findall(r"^import (\w+)$", script.read_text(), re.MULTILINE)
        assert {*MODULES} & {*imported} == {*MODULES[:number]}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_each_script_gives_the_weights_and_output_of_the_single_process(outcome, number, ranks):
    single, distributed = outcome(0 if number == 1 else -1, 1), outcome(number, ranks)
    torch.testing.assert_close(distributed.weights, single.weights, rtol=1e-4, atol=1e-5)
    expected, lines = single.lines, distributed.lines
    if (number, ranks) == (2, 2):  # this script prints the loss of rank 0's rows only
        expected, lines = (
            [re.sub(r"loss [0-9.]*", "", line) for line in x] for x in (expected, lines)
        )
    assert lines == expected and len(lines) == 3  # only rank 0 prints


def test_a_script_that_was_copied_beside_its_modules_runs_without_change(outcome, tmp_path):
    copied = run_script(copy_with_modules(SCRIPTS[3], tmp_path), tmp_path, PYTHON)
    assert copied.lines == outcome(3, 1).lines


# 40 is in the middle of the second epoch, 54 is its last step, and 81 is the last step of all.
@pytest.mark.parametrize("step", [40, 54, 81])
def test_the_last_script_stopped_on_one_process_continues_on_two(outcome, tmp_path, step):
    unbroken = outcome(4, 1)
    stopping = copy_with_modules(SCRIPTS[4], tmp_path, STOP.format(step - 1))
    lines = run_script(stopping, tmp_path, PYTHON, code=0 if step == 81 else 3).lines
    if step < 81:  # after the last step, nothing is left to do
        assert lines.pop() == f"stopped after step {step}"
    assert len(lines) == step // 27
    resumed = run_script(SCRIPTS[4], tmp_path, TORCHRUN)
    first, *rest = resumed.lines
    assert first == f"continuing after step {step}; to start again, delete out-tutorial"
    assert lines + rest == unbroken.lines
    torch.testing.assert_close(resumed.weights, unbroken.weights, rtol=1e-4, atol=1e-5)


# spawn gives the other ranks 4 seconds after the first rank has ended with 3.
SLOW_SAVE = """
import time
import ckpt
def slow(*args, save=ckpt.save, **more):
    time.sleep(8)
    return save(*args, **more)
ckpt.save = slow
"""
SPAWN = """
import sys, ddp_setup
sys.exit(ddp_setup.spawn([sys.executable, "train.py"], 2))
"""


def test_after_a_stop_all_ranks_wait_until_rank_0_has_saved(tmp_path):
    copy_with_modules(SCRIPTS[4], tmp_path, SLOW_SAVE + STOP.format(9))
    (tmp_path / "start.py").write_text(SPAWN)
    stopped = run_script(tmp_path / "start.py", tmp_path, PYTHON, code=3)
    assert stopped.lines == ["stopped after step 10"]
    assert [path.name[:13] for path in tmp_path.glob("out-*/step-*.pt")] == ["step-00000010"]


def test_the_last_script_continues_where_a_rank_has_no_row_left_in_the_epoch(tmp_path):
    """With 2,497 rows, the 27th step of an epoch has one row."""
    shorter = SCRIPTS[4].read_text()
    assert shorter.count("[:2500]") == 2
    shorter = shorter.replace("[:2500]", "[:2497]")
    outcomes = []
    for name in ("unbroken", "stopped"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "shorter.py").write_text(shorter)
        if name == "stopped":
            stopping = copy_with_modules(folder / "shorter.py", folder, STOP.format(25))
            assert run_script(stopping, folder, PYTHON, code=3).lines == ["stopped after step 26"]
        script = copy_with_modules(folder / "shorter.py", folder)
        outcomes.append(run_script(script, folder, TORCHRUN))
    unbroken, resumed = outcomes
    assert resumed.lines[1:] == unbroken.lines and len(unbroken.lines) == 3
    torch.testing.assert_close(resumed.weights, unbroken.weights, rtol=1e-4, atol=1e-5)


def test_each_script_has_a_folder_of_its_own():
    """Otherwise one script would continue from the weights of another."""
    texts = {path.name: path.read_text() for path in TUTORIAL.glob("*.py")}
    folders = {
        name: {*re.findall(r'ckpt\.save[(,]\s*"([^"]+)"', text)} for name, text in texts.items()
    }
    used = [folder for found in folders.values() for folder in found]
    assert len(used) == len({*used}) == 6 and "out" not in used  # "out" is run.py's
