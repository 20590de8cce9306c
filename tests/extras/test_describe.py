"""Tests of extras/describe.py and of the command info."""

import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
import torch
from click.testing import CliRunner
from conftest import ROOT, TINY, Ran, ahead, checkpoints, metrics, run

import ckpt
import gpt
from extras import commands, describe

RUNS = [
    *TINY,
    "--dropout",
    0,
    "--steps",
    40,
    "--log-every",
    1,
    "--eval-every",
    10,
    "--save-every",
    10,
]


@pytest.fixture(scope="module", autouse=True)
def done(text, tmp_path_factory):
    """Start runs in the background. Return a function: name -> (printed text, --out folder)."""
    folder = tmp_path_factory.mktemp("extras")
    runs = {
        "gpt2": ["--arch", "gpt2"],
    }

    def train(name: str) -> tuple[Ran, Path]:
        ran = run(*RUNS, "--data", text, "--out", folder / name, *runs[name])
        assert ran.code == 0, ran
        return ran, folder / name

    with ahead(**{name: partial(train, name) for name in runs}) as begun:
        yield lambda name: begun[name].result()


def mistaken(ran: Ran, *parts: object) -> None:
    """Check that a run ended with exit code 2 and one line on stderr, which contains `parts`."""
    assert ran.code == 2 and ran.out == "" and ran.err.startswith("Error: "), ran
    assert ran.err.count("\n") == 1, ran
    assert parts and [f"{part}" for part in parts if f"{part}" not in ran.err] == [], ran.err


STATE = {
    "model": {"a": (w := torch.ones(3, 4)), "tied": w, "b": torch.ones(5)},
    "optimizers": [{"state": {"a": {"step": torch.ones(()), "m": torch.ones(3, 4)}}}, {}],
    "step": 1200,
    "config": {
        "arch": "gpt2",
        "layers": 2,
        "heads": 1,
        "embd": 4,
        "block_size": 8,
        "data": None,
        "lr": 0.1,
    },
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
        "trained     1,200 steps; at step 2: 128 tokens, unknown epochs",
        "loss        training 3.0000, validation 2.5000",
        "made with   torch 2, ranks 4",
        "flags       --arch gpt2 --layers 2 --heads 1 --embd 4 --block-size 8 --lr 0.1",
    ]


def test_tokens_and_epochs_are_those_of_the_step_of_the_checkpoint():
    metrics = [f'{{"step": {n}, "tokens": {64 * n}, "epoch": {n / 4}}}' for n in (1199, 1200, 1201)]
    text = describe.describe(STATE, "\n".join(metrics), "")
    assert "1,200 steps; 76,800 tokens, 300 epochs\n" in text
    text = describe.describe(STATE, metrics[0], "")
    assert "1,200 steps; at step 1,199: 76,736 tokens, 299.8 epochs" in text


def test_the_state_of_the_last_checkpoint_that_verifies_is_returned_with_a_line_on_each():
    outcomes = {
        "a": {**STATE, "step": 1},
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


def test_info_describes_the_newest_checkpoint_and_lists_which_verify(done, tmp_path):
    out = shutil.copytree(done("gpt2")[1], tmp_path / "out")
    damaged = bytearray(checkpoints(out)[0].read_bytes())
    damaged[len(damaged) // 2] ^= 1
    checkpoints(out)[0].write_bytes(damaged)
    ran = run("info", out)
    assert ran.code == 0 and ran.err == "", ran
    last, model = metrics(out)[-2], gpt.build(gpt.Config(18, 16, 1, 2, 16, arch="gpt2"), 0)
    for part in (
        "gpt2, 1 layers, 2 heads, width 16, block size 16",
        "18 tokens of kind char",
        f"{sum(p.numel() for p in model.parameters()):,} (",
        f"40 steps; {last['tokens']:,} tokens",
        f"training {last['loss']:.4f}, validation {metrics(out)[-1]['val_loss']:.4f}",
        f"torch {torch.__version__}",
        "--batch-size 8",
    ):
        assert part in ran.out
    verdicts = dict(re.findall(r"(step-\S+)  (\w+)", ran.out))
    assert verdicts == {path.name: "verified" for path in checkpoints(out)} | {
        checkpoints(out)[0].name: "damaged"
    }


def test_info_needs_nothing_but_the_checkpoint(done, tmp_path):
    shutil.copy(checkpoints(done("gpt2")[1])[-1], tmp_path)
    ran = run("info", tmp_path)
    assert (
        ran.code == 0 and "40 steps; unknown tokens" in ran.out and "made with   unknown" in ran.out
    ), ran


def test_info_and_export_take_the_folder_of_the_training_from_the_environment(tmp_path):
    for command in (["info"], ["export", "--format", "hf", "-o", tmp_path / "hf"]):
        ran = run(*command, env={"DDPKIT_OUT": f"{tmp_path}/mine"})
        mistaken(ran, f"{tmp_path}/mine: there is no checkpoint; train first")


def test_info_lists_checkpoints_even_if_none_verifies(tmp_path):
    (tmp_path / f"step-00000001-{'0' * 32}.pt").write_bytes(b"damaged")
    ran = run("info", tmp_path)
    assert ran.code == 2 and "damaged" in ran.out, ran
    assert f"{tmp_path}: there is no checkpoint that can be used" in ran.err, ran


def test_info_of_a_checkpoint_of_another_program_is_an_error_of_one_line(tmp_path):
    model = {"w": torch.ones(1), "_extra_state": {"count": 1}}
    optimizer = {"state": {"w": {"step": 1, "exp_avg": torch.ones(1)}}, "param_groups": []}
    ckpt.save(f"{tmp_path}", {"model": model, "optimizers": [optimizer]}, 3)
    mistaken(run("info", tmp_path), "not written by run.py")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="has no /dev/full")
def test_a_description_that_cannot_be_written_is_a_failure_but_not_a_mistake_of_the_user(done):
    command = [sys.executable, "run.py", "info", done("gpt2")[1]]
    with open("/dev/full", "w") as full:
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert ran.returncode == 1 and ran.stderr == "Error: [Errno 28] No space left on device\n"


def test_info_of_an_empty_folder_is_an_error_of_one_line(tmp_path):
    mistaken(run("info", tmp_path), tmp_path, "no checkpoint")


def test_info_and_export_work_while_a_training_deletes_older_checkpoints(tmp_path):
    """Between two listings, the first checkpoint disappears."""
    names = [f"step-0000000{step}-{'0' * 32}.pt" for step in (1, 2)]
    listings = [ckpt.parse_names(names), ckpt.parse_names(names[1:])]

    def load(folder, entry):
        if entry.step == 1:
            raise FileNotFoundError("no such file")
        return {**STATE, "step": 2}

    storage = SimpleNamespace(
        list_checkpoints=lambda _: listings.pop(0), load=load, read_text=lambda *_: ""
    )
    group = click.Group("program")
    commands.add_commands(
        group,
        lambda name: describe,
        nullcontext,
        lambda out: storage if out == "out" else ckpt,
        lambda out: {**load(out, ckpt.parse_names(names)[1]), "name": f"{out}/{names[1]}"},
    )
    ran = CliRunner().invoke(group, ["info", "out"])
    assert ran.exit_code == 0 and f"{names[1]}  verified" in ran.output, ran
    assert names[0] not in ran.output
    copied = f"{tmp_path}/copied"
    ran = CliRunner().invoke(group, ["export", "out", "--format", "checkpoint", "-o", copied])
    assert ran.exit_code == 0, ran
    assert [entry.step for entry in ckpt.list_checkpoints(copied)] == [2]
