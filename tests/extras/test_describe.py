"""Tests of extras/describe.py and of the command info."""

import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TINY, Ran, checkpoints, metrics, run

import ckpt
import gpt
from extras import describe


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """Return the --out folder of a run. Tests must not change it."""
    out = tmp_path_factory.mktemp("trained") / "out"
    flags = "--arch gpt2 --steps 12 --log-every 1 --save-every 6".split()
    assert run(*TINY, *flags, "--data", text, "--out", out).code == 0
    return out


def mistaken(ran: Ran, *parts: object) -> None:
    """Check that a run ended with exit code 2 and one line on stderr, which contains `parts`."""
    assert ran.code == 2 and ran.err.startswith("Error: ") and ran.err.count("\n") == 1, ran
    assert [f"{part}" for part in parts if f"{part}" not in ran.err] == [], ran.err


SIZES = {"arch": "gpt2", "layers": 2, "heads": 1, "embd": 4, "block_size": 8}
STATE = {
    "model": {"a": (w := torch.ones(3, 4)), "tied": w, "b": torch.ones(5)},
    "optimizers": [{"state": {"a": {"step": torch.ones(()), "m": torch.ones(3, 4)}}}, {}],
    "step": 1200,
    "config": {**SIZES, "data": ("a", "b"), "val_data": (), "steps": None, "lr": 0.1},
    "vocabulary": {"vocab": 3, "kind": "char", "chars": "abc"},
}


def test_a_description_counts_tied_weights_once_and_takes_the_last_metrics():
    metrics = [
        '{"step": 1, "tokens": 64, "loss": 3.0}',
        '{"step": 2, "tokens": 128, "loss": null, "val_loss": 2.5}',
    ]
    metrics += ['{"step": 1201, "tokens": 9, "loss": 1.0}', '{"step": 3, "tok', "[1]", "5"]
    lines = describe.describe(STATE, "\n".join(metrics), '{"torch": "2", "ranks": 4}').splitlines()
    assert lines == [
        "model       gpt2, 2 layers, 1 heads, width 4, block size 8",
        "vocabulary  3 tokens of kind char",
        "parameters  17 (0.0 MB; optimizers 0.0 MB)",
        "trained     1,200 steps; 128 tokens, unknown epochs",
        "loss        training 3.0000, validation 2.5000",
        "made with   torch 2, ranks 4",
        "flags       --arch gpt2 --layers 2 --heads 1 --embd 4 --block-size 8 "
        "--data a --data b --lr 0.1",
    ]


def test_the_state_of_the_last_checkpoint_that_verifies_is_returned_with_a_line_on_each():
    outcomes = {
        "a": STATE,
        "b": {**STATE, "step": 2},
        "c": ValueError("damaged"),
        "d": OSError("gone"),
    }

    def load(entry):
        if isinstance(outcomes[entry.name], Exception):
            raise outcomes[entry.name]
        return outcomes[entry.name]

    state, lines = describe.verify_all([SimpleNamespace(name=name) for name in outcomes], load)
    assert state["step"] == 2
    assert lines == ["a  verified, 0.0 MB", "b  verified, 0.0 MB", "c  damaged", "d  gone"]


def test_info_describes_the_newest_checkpoint_and_lists_which_verify(trained, tmp_path):
    out = shutil.copytree(trained, tmp_path / "out")
    first, last = checkpoints(out)
    first.write_bytes(b"damaged")
    ran = run("info", out)
    assert ran.code == 0 and ran.err == "", ran
    record, model = metrics(out)[-2], gpt.build(gpt.Config(18, 16, 1, 2, 16, arch="gpt2"), 0)
    for part in (
        "gpt2, 1 layers, 2 heads, width 16, block size 16",
        "18 tokens of kind char",
        f"{sum(p.numel() for p in model.parameters()):,} (",
        f"12 steps; {record['tokens']:,} tokens",
        f"training {record['loss']:.4f}, validation {metrics(out)[-1]['val_loss']:.4f}",
        "--batch-size 8",
    ):
        assert part in ran.out, part
    verdicts = dict(re.findall(r"(step-\S+)  (\w+)", ran.out))
    assert verdicts == {first.name: "damaged", last.name: "verified"}


def test_info_needs_nothing_but_the_checkpoint(trained, tmp_path):
    shutil.copy(checkpoints(trained)[-1], tmp_path)
    ran = run("info", tmp_path)
    assert "12 steps; unknown tokens" in ran.out and "made with   unknown" in ran.out, ran


def test_info_without_a_checkpoint_of_this_program_is_an_error_of_one_line(tmp_path):
    ran = run("info", env={"DDPKIT_OUT": f"{tmp_path}/mine"})
    mistaken(ran, f"{tmp_path}/mine: there is no checkpoint; train first")
    model = {"w": torch.ones(1), "_extra_state": {"count": 1}}
    entry = ckpt.save(f"{tmp_path}", {"model": model, "optimizers": [{}]}, 3)
    mistaken(run("info", tmp_path), "not written by run.py")
    (tmp_path / entry.name).write_bytes(b"damaged")
    ran = run("info", tmp_path)
    mistaken(ran, f"{tmp_path}: there is no checkpoint that can be used")
    assert f"{entry.name}  damaged" in ran.out


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="has no /dev/full")
def test_a_description_that_cannot_be_written_is_a_failure_but_not_a_mistake_of_the_user(trained):
    command = [sys.executable, "run.py", "info", trained]
    with open("/dev/full", "w") as full:
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert ran.returncode == 1 and ran.stderr == "Error: [Errno 28] No space left on device\n"
