"""Each diff of extras/tutorial/recipes.md changes 4_checkpoints.py into a script that does what is said."""

import json
import os
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch
from conftest import same
from documents import code_blocks, section
from scripts import TUTORIAL, Outcome, assert_close, copy, numbers, run, start

SCRIPT = TUTORIAL / "4_checkpoints.py"
TEXT = (TUTORIAL / "recipes.md").read_text()
TITLES = re.findall(r"^## (.*)$", TEXT, re.M)
EMA, WANDB = "An average of the weights (EMA)", "Weights & Biases"
WEIGHTS, METRIC = "Class weights", "A metric that is no mean: confusion matrix, F1, AUC"
STOPPING, OWN_GROUP = "Early stopping that stays stopped", "Your own `init_process_group`"
OLD = 'An old checkpoint whose names begin with "module."'
SPAWN, WITHIN, TRACE = (
    "`spawn` in place of torchrun",
    "Save within an epoch",
    "A trace of some steps",
)
# These train as the script itself. The others have tests of their own.
SAME = [WITHIN, STOPPING, TRACE, "DataLoader workers and stop signals", "torch.compile"]
SAME += [METRIC, "Activation checkpointing", "TensorBoard"]


def changed(title: str, folder: Path, replace: tuple[str, str] = ("", "")) -> Path:
    """Apply a recipe to a copy of the script, and then replace a text in it."""
    (diff,) = code_blocks(section(TEXT, f"## {title}"), "diff")
    script = copy(SCRIPT, folder / "changed")
    diff = f"--- a/{SCRIPT.name}\n+++ b/{SCRIPT.name}\n{diff}"
    subprocess.run(["git", "apply", "-"], cwd=script.parent, input=diff, text=True, check=True)
    assert replace[0] in script.read_text()
    script.write_text(script.read_text().replace(*replace))
    return script


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """expected(ranks) returns the outcome of the script itself."""
    return cache(lambda ranks: run(SCRIPT, tmp_path_factory.mktemp("itself"), ranks))


def test_each_recipe_is_short_and_has_a_test():
    tested = {EMA, WANDB, WEIGHTS, OWN_GROUP, OLD, SPAWN, *SAME}
    assert tested == {*TITLES} and len(TITLES) == len(tested)
    for diff in code_blocks(TEXT, "diff"):
        assert len(re.findall(r"^\+", diff, re.M)) <= 12, diff


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("title", SAME)
def test_it_trains_as_before_on_one_and_two_ranks(expected, tmp_path, title, ranks):
    if title == "TensorBoard":
        pytest.importorskip("tensorboard")
    ran = run(changed(title, tmp_path), tmp_path, ranks)
    lines = [line for line in ran.lines if "F1" not in line]
    names = {"0.0.": "0.", "1.": "2."} if title == "Activation checkpointing" else {}
    renamed = {
        re.sub(r"^(0\.0\.|1\.)", lambda m: names.get(m[0], m[0]), n): w
        for n, w in ran.weights().items()
    }
    assert_close(Outcome(lines, renamed), expected(ranks))
    steps = [int(path.name[5:13]) for path in (tmp_path / "out-tutorial").glob("step-*")]
    if title == WITHIN:
        assert {70, 80, 81} <= {*steps}
    if title == TRACE:
        for rank in range(ranks):
            events = json.loads((tmp_path / f"trace-{rank}.json").read_text())["traceEvents"]
            assert sum(e["name"] == "Optimizer.step#AdamW.step" for e in events if "ts" in e) == 3
    if title == METRIC:
        scores = [numbers([line])[1:] for line in ran.lines if "F1" in line]
        accuracy = numbers([ran.lines[-1]])[-1]
        assert len(scores) == 3 and sum(scores[-1]) / 4 == pytest.approx(accuracy, abs=0.05)
    if title == "TensorBoard":
        (log,) = (tmp_path / "out-tutorial" / "board").iterdir()
        assert b"loss" in log.read_bytes()


def test_class_weights_give_the_exact_weighted_mean(expected, tmp_path):
    """With weights of 1, as without. On two ranks, as on one."""
    ones = "torch.tensor([1.0, 1.0, 2.0, 2.0])", "torch.ones(4)"
    assert_close(run(changed(WEIGHTS, tmp_path / "1", ones), tmp_path / "1"), expected(1))
    one, two = (
        run(changed(WEIGHTS, tmp_path / name, ("", "")), tmp_path / name, ranks)
        for name, ranks in (("2", 1), ("3", 2))
    )
    assert_close(one, two)
    assert not same(one.weights(), expected(1).weights())


def test_what_stopped_early_stays_stopped(tmp_path):
    never_better = "error_rate < best else", "False else"
    script = changed(STOPPING, tmp_path, never_better)
    first, second = run(script, tmp_path, 2), run(script, tmp_path)
    assert len(first.lines) == 2 and "continuing after step 54" in second.lines[0]
    assert len(second.lines) == 1 and same(first.state, second.state)


# 40 is in the middle of an epoch. After step 54, the last of an epoch, the scheduler has been called.
@pytest.mark.parametrize("ranks, stop", [(1, 54), (2, 40)])
def test_the_average_of_the_weights_continues_exactly(tmp_path, ranks, stop):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expected = run(changed(EMA, whole), whole, ranks)
    stopped = run(changed(EMA, parts), parts, ranks, stop=stop)
    resumed = run(changed(EMA, parts), parts, ranks)
    assert stopped.lines + resumed.lines[1:] == expected.lines
    assert same(resumed.state, expected.state)
    # It is another one than the last weights.
    weights = expected.state["model"]
    assert not torch.equal(weights["ema.module.0.weight"], weights["model.0.weight"])


def test_a_resumed_run_continues_the_same_wandb_run(expected, tmp_path):
    pytest.importorskip("wandb")
    script = changed(WANDB, tmp_path)
    env = {name: "" for name in os.environ if name.startswith("WANDB_")}
    env |= {f"WANDB_{name}_DIR": f"{tmp_path / name}" for name in ("CONFIG", "CACHE", "DATA")}
    env |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
    stopped = run(script, tmp_path, 1, stop=40, env=env)
    resumed = run(script, tmp_path, 2, env=env)
    whole = resumed._replace(lines=stopped.lines + resumed.lines[1:])
    assert_close(whole, expected(1))
    # One folder for each start, although one had two ranks. Its name ends with the run's id.
    folders = [*(tmp_path / "wandb").glob("offline-run-*")]
    assert [path.name.split("-")[-1] for path in folders] == [resumed.state["run_id"]] * 2
    for path in folders:
        (log,) = path.glob("*.wandb")
        assert b"grad_norm" in log.read_bytes() and b"accuracy" in log.read_bytes()


def test_spawn_starts_two_ranks_with_the_same_result(expected, tmp_path):
    done = start(changed(SPAWN, tmp_path), tmp_path, 1)
    assert done.returncode == 0 and done.stdout.splitlines() == expected(2).lines, done


def test_a_group_of_ones_own_gives_the_same_result(expected, tmp_path):
    assert_close(run(changed(OWN_GROUP, tmp_path), tmp_path, 2), expected(2))


def test_an_old_checkpoint_is_loaded_on_all_ranks(expected, tmp_path):
    old = {f"module.{name}": weight for name, weight in expected(1).weights().items()}
    torch.save(old, tmp_path / "old.pt")
    no_epoch = "range(step // steps_per_epoch, 3)", "range(0)"
    script = changed(OLD, tmp_path, no_epoch)
    script.write_text(
        script.read_text().replace(
            "    for epoch in range(0)",
            '    torch.save(replica.state_dict(), "model.pt")\n    for epoch in range(0)',
        )
    )
    ran = run(script, tmp_path, 2)
    assert same(
        {name.removeprefix("module."): w for name, w in ran.state.items()}, expected(1).weights()
    )
