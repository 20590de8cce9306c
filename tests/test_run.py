"""Tests of run.py as a user starts it: training, resume, sample, eval, output, bad input. Promises 1, 3, 4, 7 and 8.

Most programs start in the background when the module's first test begins (fixture `done`); a test waits for the program
that it is about.
"""

import hashlib
import json
import math
import os
import pickle
import pty
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from fcntl import ioctl
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import click
import numpy as np
import pytest
import torch
import warm
from conftest import (
    ENVIRONMENT,
    MODEL,
    PYTHON,
    ROOT,
    TINY,
    Program,
    Ran,
    ahead,
    checkpoints,
    contents,
    free_port,
    launch_variables,
    losses,
    metrics,
    run,
    same,
    same_training,
    state,
    torchrun,
    warm_server,
)

import chardata
import ckpt
import ddp_setup
import gpt
import run as program_module

EXTRAS = (ROOT / "extras").is_dir()
LAUNCHES = {
    "in parts": (["--accum", 64], PYTHON),  # more micro-batches than rows
    "spawn 3": (["--spawn", 3, "--accum", 2], PYTHON),
    "torchrun 2": ([], torchrun(2)),
}
HALVES = {"bfloat16": "modern2", "float16": "gpt2"}
OLD = ROOT / "tests" / "data" / "version_0_1"


def fifty(text: Path) -> list[object]:
    """Return the flags of 50 steps of 10 rows, which 3 or 4 ranks cannot divide evenly.

    Step 31 is the last of an epoch and has 2 rows, so one of 3 ranks has none.
    """
    model = ["--batch-size", 10, "--optimizer", "adamw", "--dropout", 0, "--steps", 50]
    model += ["--min-lr", 0.0006]
    return [*TINY, "--data", text, *model, "--log-every", 1, "--eval-every", 25]


@pytest.fixture(scope="module", autouse=True)
def done(text, undisturbed, tmp_path_factory):
    """Return a function: the name of a run below -> (its exit code and output, its --out folder)."""
    folder = tmp_path_factory.mktemp("done")
    calls = {}

    def train(name: str, *args: object, launcher: list[str] = PYTHON) -> None:
        calls[name] = lambda: (run(*args, "--out", folder / name, launcher=launcher), folder / name)

    def ask(name: str, *args: object) -> None:
        calls[name] = lambda: (run(*args, "--out", undisturbed(1)), undisturbed(1))

    def rerun() -> tuple[Ran, Path]:
        shutil.copytree(undisturbed(1), folder / "rerun")
        return run("--out", folder / "rerun", "--spawn", 2), folder / "rerun"

    train("alone", *fifty(text))
    for name, (more, launcher) in LAUNCHES.items():
        train(name, *fifty(text), *more, launcher=launcher)
    dropped = [*fifty(text), "--steps", 10, "--dropout", 0.5]
    train("dropped", *dropped)
    train("recomputed", *dropped, "--checkpoint-activations")
    data = [*TINY, "--data", text]
    for dtype, arch in HALVES.items():
        train(dtype, *data, "--steps", 30, "--dtype", dtype, "--arch", arch)
    largest = ["--seed", 2**63 - 1]
    # One process writes a whole checkpoint.
    largest += ["--val-fraction", 0, "--checkpoint", "sharded"]
    train("no validation", *MODEL, *largest, "--batch-size", 8, "--data", text)
    train("diverging", *data, "--lr", 1e7, "--clip", 0, "--save-every", 2, "--steps", 20)
    greedy = ["sample", "--prompt", "the ", "--temperature", 0]
    ask("greedy", *greedy, "--max-new-tokens", 30)
    ask("greedy again", *greedy, "--max-new-tokens", 40)
    ask("eval", "eval")
    calls["rerun"] = rerun
    with ahead(**calls) as runs:
        yield lambda name: runs[name].result()


def assert_close(ours, theirs):
    """Compare with the rtol of promise 1. Near 0, weights may differ by the resolution of float32."""
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)


def evaluations(folder: Path) -> dict[int, float]:
    return {line["step"]: line["val_loss"] for line in metrics(folder) if "val_loss" in line}


def assert_one_line(ran: Ran, *texts: str) -> None:
    """Check that the program refused its input: exit code 2, and one line on stderr that contains `texts`."""
    assert "Traceback" not in ran.out + ran.err, ran.err
    assert ran.err.startswith("Error: ") and ran.err.count("\n") == 1, ran.err
    assert [text for text in texts if text not in ran.err] == [], ran.err
    assert ran.code == 2 and ran.out == "", ran


# --- promise 1: the result does not depend on the number of ranks ---


@pytest.mark.parametrize("launch", LAUNCHES)
def test_losses_and_weights_do_not_depend_on_launcher_ranks_and_accum(done, launch):
    (one, alone), (ran, folder) = done("alone"), done(launch)
    assert one.code == ran.code == 0, ran
    assert [step for step, _ in losses(folder)] == list(range(1, 51))
    assert_close(dict(losses(folder)), dict(losses(alone)))
    assert_close(state(folder)["model"], state(alone)["model"])
    assert list(evaluations(folder)) == [25, 50]
    assert evaluations(folder) == pytest.approx(evaluations(alone), rel=1e-6)  # promise 4
    assert ckpt.list_checkpoints(f"{folder}")[-1].loss == round(evaluations(folder)[50], 4)


def test_only_rank_0_prints(done):
    def text(ran: Ran) -> str:
        return re.sub(r"[\d,]+ tokens/s|eta [\d:]+|--out .*|. x cpu|in /.*", "", ran.out)

    alone, three = done("alone")[0], done("spawn 3")[0]
    assert text(three) == text(alone)
    for line in ("step 50/50 ", "Done: 50 steps"):
        assert text(three).count(line) == 1
    assert alone.err == three.err == ""


def test_a_checkpoint_of_several_ranks_has_the_names_of_the_bare_model(done):
    found = torch.load(checkpoints(done("spawn 3")[1])[-1], weights_only=True)
    model = gpt.build(gpt.Config(18, 16, 1, 2, 16), seed=1)
    assert list(found["model"]) == list(model.state_dict())
    model.load_state_dict(found["model"])


# --- promise 3: resume ---


def stop_after(out: Path, step: int, *args: object) -> int:
    """Train, send SIGTERM when `step` is printed, and return the last step of the run."""
    with Program(*args, "--out", out) as program:
        program.read_to(f"step {step}/")
        program.process.send_signal(signal.SIGTERM)
        ran = program.finish()
    assert ran.code == 3 and ran.out.splitlines()[-1].startswith("Stopped as asked"), ran
    last = losses(out)[-1][0]
    assert last < 50 and state(out)["step"] == last
    return last


def test_resume_after_a_stop_signal_gives_bitwise_equal_weights(undisturbed, flags, tmp_path):
    stop_after(tmp_path, 20, *flags)
    # All other flags come from the checkpoint.
    ran = run("--out", tmp_path, "--log-every", 1)
    assert ran.code == 0, ran
    assert [step for step, _ in losses(tmp_path)] == list(range(1, 101))
    assert same_training(tmp_path, undisturbed(1))
    times = [line["time"] for line in metrics(tmp_path)]
    assert times == sorted(times)


def test_resume_with_another_number_of_ranks_keeps_the_order_of_the_data(done, text, tmp_path):
    before = stop_after(tmp_path, 10, *fifty(text))
    ran = run("--out", tmp_path, "--log-every", 1, "--accum", 2, "--spawn", 2)
    assert ran.code == 0, ran
    assert ran.out.startswith(
        "Training: 3,696 parameters on 2 x cpu in float32, "
        f"steps {before + 1} to 50 (set by --steps), continuing the run in {tmp_path}\n"
    )
    assert [step for step, _ in losses(tmp_path)] == list(range(1, 51))
    _, alone = done("alone")
    assert_close(dict(losses(tmp_path)), dict(losses(alone)))  # other rows would have other losses
    assert_close(state(tmp_path)["model"], state(alone)["model"])


def test_a_finished_run_continues_with_more_epochs(text, tmp_path):
    flags = [*TINY, "--data", text, "--out", tmp_path, "--eval-every", 15]
    first = run(*flags, "--epochs", 1)
    assert first.code == 0 and "Done: 38 steps" in first.out, first

    on = run("--out", tmp_path, "--epochs", 2)
    assert (
        on.code == 0
        and f"steps 39 to 76 (set by --epochs), continuing the run in {tmp_path}\nstep 40/76 "
        in on.out
    ), on
    # Steps with an evaluation have a line too.
    expected = [10, 15, 20, 30, 38, 40, 45, 50, 60, 70, 75, 76]
    assert [step for step, _ in losses(tmp_path)] == expected


def test_a_finished_run_says_how_to_continue_and_writes_nothing(done, undisturbed):
    ran, out = done("rerun")
    assert ran.code == 0 and ran.err == "" and ran.out.count("The run in") == 1, ran
    text = " ".join(ran.out.split())
    assert re.fullmatch(
        r"The run in .* is finished: 100 steps. .* higher --steps; .* another --out\.",
        text,
    )
    assert [*contents(out).values()] == [*contents(undisturbed(1)).values()]


def test_a_run_that_all_epochs_end_names_epochs(text, tmp_path):
    command = [*TINY, "--data", text, "--out", tmp_path, "--epochs", 1]
    assert run(*command).code == 0
    ran = run(*command, "--steps", 1000)
    assert ran.code == 0 and "give a higher --epochs; for a new run" in " ".join(ran.out.split())


def test_a_text_with_other_characters_than_the_run_in_out_is_told_to_use_another_out(
    text, tmp_path
):
    assert run(*TINY, "--data", text, "--out", tmp_path / "out", "--steps", 1).code == 0
    other = tmp_path / "other.txt"
    other.write_text("\N{GREEK SMALL LETTER ALPHA}" * 1000)
    ran = run(*TINY, "--data", other, "--out", tmp_path / "out")
    assert_one_line(
        ran, "cannot continue the run in", "other.txt: character", "; or name another --out"
    )


@pytest.mark.parametrize(
    "given, expected",
    [({}, "10000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "passive"}, "None")],
)
def test_threads_of_openmp_wait_only_for_a_moment_unless_the_user_says_otherwise(given, expected):
    code = (
        "import os, run\n"
        "def main(**_): print(os.environ.get('GOMP_SPINCOUNT'))\n"
        "run.cli.main = main\nrun.main()"
    )
    env = {name: value for name, value in ENVIRONMENT.items() if "OMP_" not in name} | given
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert ran.stdout.split()[-1] == expected, ran


def test_the_thread_that_saves_starts_no_threads_of_openmp(text, tmp_path):
    """With more threads than CPUs, OpenMP waits in another way, and training is slower.

    Python collects garbage during the training, but not during the imports.
    """
    code = (
        "import atexit, gc, sys, torch, ckpt, run\n"
        "save = ckpt.save\n"
        "def save_and_count(*args):\n"
        "    print('save', torch.get_num_threads(), gc.isenabled(), flush=True)\n"
        "    return save(*args)\n"
        "ckpt.save = save_and_count\n"
        "atexit.register(lambda: print('train', torch.get_num_threads(), flush=True))\n"
        "run.main()"
    )
    flags = [*TINY, "--data", text, "--out", tmp_path / "out", "--steps", 2, "--save-every", 1]
    ran = subprocess.run(
        [sys.executable, "-c", code, *map(str, flags)],
        cwd=ROOT,
        env=ENVIRONMENT | {"OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith(("save ", "train "))]
    assert lines == ["save 1 True", "save 1 True", "train 2"], ran


def test_a_resumed_run_keeps_as_many_checkpoints_as_before(text, tmp_path):
    command = [*TINY, "--data", text, "--out", tmp_path, "--save-every", 1]
    assert run(*command, "--steps", 5, "--keep", 5).code == 0
    assert run("--out", tmp_path, "--steps", 6).code == 0
    assert [entry.step for entry in ckpt.list_checkpoints(str(tmp_path))] == [2, 3, 4, 5, 6]


def test_a_damaged_checkpoint_is_set_aside_and_its_steps_are_trained_again(undisturbed, tmp_path):
    out = shutil.copytree(undisturbed(1), tmp_path / "out")
    good, damaged = checkpoints(out)[-2:]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    ran = run("sample", "--out", out, "--max-new-tokens", 1)
    assert ran.code == 0 and ran.err.startswith(f"Warning: {damaged.name}: damaged"), ran
    assert ran.err.endswith(f"; using {out}/{good.name}\n") and ran.err.count("\n") == 1, ran
    ran = run("--out", out, "--log-every", 1)
    first = int(good.name[5:13]) + 1
    assert ran.code == 0 and f"steps {first} to 100" in ran.out, ran
    assert ran.err.startswith(f"Warning: {damaged.name}: damaged") and ran.err.count("\n") == 1
    assert f"set aside, continuing from step {first - 1}" in ran.err
    assert Path(f"{damaged}.damaged").exists()
    assert same_training(out, undisturbed(1))


FAIL = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import gpt, run

def fail(model, batch):
    raise RuntimeError("a bug")

gpt.loss = fail
run.main()
"""


def test_an_error_that_is_not_expected_is_named_with_its_rank_and_traceback(text, tmp_path):
    (tmp_path / "program.py").write_text(FAIL)
    launcher = [sys.executable, str(tmp_path / "program.py")]
    ran = run(*TINY, "--data", text, "--out", tmp_path / "out", launcher=launcher)
    assert ran.code == 1 and "Error" not in ran.out, ran
    assert ran.err.startswith("Error on rank 0: RuntimeError('a bug')\nTraceback"), ran


def test_a_checkpoint_does_not_say_where_a_resumed_run_writes():
    saved = {"name": "a checkpoint", "config": {"out": "elsewhere", "lr": 0.5}}
    flags = program_module.merge_saved_flags(program_module.Flags(), set(), saved)
    assert (flags.out, flags.lr) == ("out", 0.5)


PINNED = """tokenizer vocab val_fraction block_size batch_size seed arch layers heads embd optimizer
    init_from eval_tokens"""
NOT_SAVED = """spawn strategy device compile timeout out log_every accum checkpoint
    checkpoint_activations"""


@pytest.mark.parametrize("name", vars(program_module.Flags()))
def test_a_resumed_run_keeps_its_flags_unless_others_are_given_and_some_cannot_be_changed(name):
    """Those in PINNED define the model, the optimizers' state, the order of the data and the validation loss."""
    flags, saved = program_module.Flags(), {"name": "x", "step": 1, "config": {name: "saved"}}
    merged = program_module.merge_saved_flags(flags, set(), saved)
    own = name in NOT_SAVED.split()
    assert merged == (flags if own else replace(flags, **{name: "saved"}))
    if name in PINNED.split():
        with pytest.raises(ValueError, match="contradicts x, made with .* saved; leave it out, or"):
            program_module.merge_saved_flags(flags, {name}, saved)
    else:
        assert program_module.merge_saved_flags(flags, {name}, saved) == flags


@pytest.mark.parametrize("dtype, other", [("bfloat16", "float16"), ("float16", "float32")])
def test_a_run_can_be_resumed_in_another_dtype(done, tmp_path, dtype, other):
    shutil.copytree(done(dtype)[1], tmp_path / "out")
    ran = run("--out", tmp_path / "out", "--dtype", other, "--steps", 34)
    assert ran.code == 0 and ran.err == "", ran
    assert state(tmp_path / "out")["step"] == 34
    assert bool(state(tmp_path / "out")["scaler"]) == (other == "float16")


def test_a_resumed_run_continues_with_the_scale_of_float16(done, tmp_path):
    shutil.copytree(done("float16")[1], tmp_path / "out")
    saved = state(tmp_path / "out")
    saved["scaler"]["scale"] = 1024.0
    checkpoints(tmp_path / "out")[-1].unlink()
    ckpt.save(str(tmp_path / "out"), saved, saved["step"])
    ran = run("--out", tmp_path / "out", "--steps", 34)
    assert ran.code == 0 and "steps 31 to 34" in ran.out, ran
    assert state(tmp_path / "out")["scaler"]["scale"] == 1024.0


def test_lines_that_a_crash_garbled_in_the_metrics_are_dropped(undisturbed, tmp_path):
    out = shutil.copytree(undisturbed(1), tmp_path / "out")
    checkpoints(out)[-1].unlink()
    (out / "config.json").unlink()  # It is written again.
    garbled = b'{"step": 3, "lo\n{"step": 5, "lo{"step": 6, "loss": 1.0}\n\x00\x00\xff\n'
    garbled += b'[1]\n{"loss": 1}\n"step"\n{"step": "x"}\n{"step": 4, "loss": 1.0'
    with open(out / "metrics.jsonl", "ab") as file:
        file.write(garbled)
    ran = run("--out", out, "--log-every", 1)
    assert ran.code == 0 and ran.err == "", ran
    assert (out / "metrics.jsonl").read_bytes().count(b"\n") == len(metrics(out))
    assert [step for step, _ in losses(out)] == list(range(1, 101))


def test_a_run_that_crashed_in_its_first_line_of_metrics_starts_again(undisturbed, text, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    shutil.copy(undisturbed(1) / "config.json", out)
    (out / "metrics.jsonl").write_bytes(b'{"st\0\0')
    ran = run(*TINY, "--data", text, "--steps", 1, "--out", out)
    assert ran.code == 0 and ran.err == "", ran
    assert [step for step, _ in losses(out)] == [1]


@pytest.mark.parametrize("optimizer, rtol", [("adamw", 1e-6), ("muon", 1e-2)])
def test_a_run_of_version_0_1_continues_with_the_losses_of_version_0_1(tmp_path, optimizer, rtol):
    """Version 0.1 wrote the folder and was stopped after step 20; another run of it was not stopped.

    On the machine that made the files, the losses are bitwise equal. On others, they differ by rounding errors, which
    Muon amplifies because it orthogonalises in bfloat16.
    """
    out, data = shutil.copytree(OLD / optimizer, tmp_path / "out"), OLD / "text.txt"
    before = losses(out)
    assert [step for step, _ in before] == list(range(1, 21))
    assert_one_line(
        run("--out", out, "--data", data, "--tokenizer", "byte"), "--tokenizer byte contradicts"
    )
    ran = run("eval", "--out", out, "--data", data)
    assert ran.code == 0 and "over 2,999 tokens, in float32" in ran.out, ran

    ran = run("--out", out, "--data", data, "--log-every", 1, "--device", "cpu")
    where = f"steps 21 to 50 (set by --steps), continuing the run in {out}\n"
    assert ran.code == 0 and ran.err == "" and where in ran.out, ran
    unbroken = list(map(json.loads, (OLD / f"{optimizer}-unbroken.jsonl").read_text().splitlines()))
    expected = {line["step"]: line["loss"] for line in unbroken if "loss" in line}
    assert sorted(expected) == list(range(21, 51))
    assert losses(out)[:20] == before
    assert dict(losses(out)[20:]) == pytest.approx(expected, rel=rtol)
    expected = {line["step"]: line["val_loss"] for line in unbroken if "val_loss" in line}
    assert evaluations(out)[50] == pytest.approx(expected[50], rel=rtol)
    config = json.loads((out / "config.json").read_text())
    expected = {"tokenizer": "char", "eval_tokens": 0, "embedding_lr": 1.0, "momentum": 0.95}
    assert {key: config[key] for key in expected} == expected


# --- promise 7: stop ---

STOP_IN_A_BAD_STEP = f"""
import os, signal, sys
from itertools import count
sys.path.insert(0, {str(ROOT)!r})
import gpt, run

loss, calls = gpt.loss, count(1)

def wrapper(model, batch):
    loss_sum, tokens = loss(model, batch)
    if model.training and (call := next(calls)) >= 12:
        if call == 12:
            os.kill(os.getpid(), signal.SIGTERM)
        loss_sum = loss_sum * float("nan")
    return loss_sum, tokens

gpt.loss = wrapper
run.main()
"""


def test_a_stop_signal_in_a_step_with_a_loss_that_is_not_finite_saves_the_good_weights(
    text, tmp_path
):
    (tmp_path / "program.py").write_text(STOP_IN_A_BAD_STEP)
    # The last step has a line, although it is not one of every 100.
    flags = [*TINY, "--data", text, "--save-every", 11, "--log-every", 100]
    launcher = [sys.executable, str(tmp_path / "program.py")]
    ran = run(*flags, "--out", tmp_path / "out", launcher=launcher)
    assert ran.code == 3 and "Traceback" not in ran.err, ran
    before, after = (torch.load(path, weights_only=True) for path in checkpoints(tmp_path / "out"))
    assert before["step"] == 11 and after["step"] > 11
    assert same(before["model"], after["model"])
    assert all(value.isfinite().all() for value in after["model"].values())
    last = metrics(tmp_path / "out")[-1]
    assert (last["loss"], last["skipped"]) == (None, after["step"] - 11)


STOP_IN_AN_EVALUATION = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
import gpt, run

loss = gpt.loss

def wrapper(model, batch):
    if not model.training:
        print("batch", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
    return loss(model, batch)

gpt.loss, run.EVAL_BATCH = wrapper, 64
run.main()
"""


def test_a_stop_signal_in_an_evaluation_ends_it_and_saves(text, tmp_path):
    (tmp_path / "program.py").write_text(STOP_IN_AN_EVALUATION)
    launcher, out = [sys.executable, str(tmp_path / "program.py")], tmp_path / "out"
    ran = run(*TINY, "--data", text, "--eval-every", 3, "--out", out, launcher=launcher)
    assert ran.code == 3 and "Stopped as asked after step 3 of" in ran.out, ran
    assert ran.out.count("batch\n") <= 2, ran  # of 9; after the signal, one more can begin
    assert evaluations(out) == {} and state(out)["step"] == 3


# --- data ---


def test_bytes_can_be_trained_on_sampled_and_evaluated(tmp_path):
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("Straße, café, 東京. " * 200)
    ran = run(*TINY, "--data", text, "--out", out, "--tokenizer", "byte", "--steps", 30)
    assert ran.code == 0, ran
    assert state(out)["model"]["embedding.weight"].shape == (256, 16)
    greedy = ["--max-new-tokens", 20, "--temperature", 0]
    ran = run("sample", "--out", out, "--prompt", "東", *greedy)
    assert ran.code == 0 and ran.out.startswith("東"), ran
    three = run("sample", "--out", out, "--prompt", "東", "--num-samples", 3, *greedy)
    assert three.out == f"{'-' * 20}\n".join([ran.out] * 3), three
    three = run("sample", "--out", out, "--num-samples", 3, "--seed", 1)
    assert three.code == 0 and len(set(three.out.split("-" * 20))) == 3, three
    text.write_text("東京, café. " * 150)  # other data than that of the training
    ran = run("eval", "--out", out, "--data", text)
    assert ran.code == 0 and f"over {len(text.read_bytes()) - 1:,} tokens" in ran.out


def test_token_ids_can_be_trained_on_sampled_and_evaluated(tmp_path):
    out = tmp_path / "out"
    np.save(tmp_path / "ids.npy", np.arange(3000, dtype=np.uint16) % 7)
    ran = run(*TINY, "--data", tmp_path / "ids.npy", "--out", out, "--steps", 60)
    assert ran.code == 0, ran
    ran = run("eval", "--out", out)
    assert ran.code == 0 and "over 299 tokens" in ran.out, ran
    assert f"loss {evaluations(out)[60]:.4f} " in ran.out
    np.save(tmp_path / "ids.npy", np.arange(3000, dtype=np.uint16) % 6)
    assert_one_line(run("eval", "--out", out), "ids.npy: is not the data that the run in")
    greedy = ["--max-new-tokens", 4, "--temperature", 0]
    ran = run("sample", "--out", out, "--prompt", "1 2 3 ", *greedy)
    assert ran.code == 0, ran
    assert ran.out == "1 2 3 4 5 6 0 \n"
    assert run("sample", "--out", out, *greedy).out == "0 1 2 3 4 \n"  # without a prompt
    assert_one_line(run("sample", "--out", out, "--prompt", "64"), "--prompt '64'", "below 64")
    assert_one_line(run("sample", "--out", out, "--prompt", "the"), "'the' is not a token id")


LENGTHS = [700, 0, 1, 2000, 16, 17, 0, 1300, 5]  # tokens per file; a window can lie in four files
TOKENS = np.random.default_rng(0).integers(0, 500, sum(LENGTHS), np.uint16)


def with_header(tokens: np.ndarray) -> bytes:
    """Return tokens in the file format of llm.c."""
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)
    return header.tobytes() + np.asarray(tokens, "<u2").tobytes()


def write_files(folder: Path, kind: str) -> str:
    """Write TOKENS as one file per entry of LENGTHS, and return the glob pattern of the files."""
    folder.mkdir()
    types = [np.uint16, np.uint32, np.uint64, ">u2"]
    for i, tokens in enumerate(np.split(TOKENS, np.cumsum(LENGTHS)[:-1])):
        if kind == "npy":
            np.save(folder / f"{i}.npy", tokens.astype(types[i % 4]))
        else:
            content = with_header(tokens) if i % 2 else tokens.tobytes()
            (folder / f"{i}.bin").write_bytes(content)
    return f"{folder}/*.{kind}"


def test_many_files_give_the_losses_of_one_file_also_after_a_resume(tmp_path):
    (tmp_path / "whole.bin").write_bytes(with_header(TOKENS))
    flags = [*TINY, "--steps", 30, "--log-every", 1]
    whole = run(*flags, "--data", tmp_path / "whole.bin", "--out", tmp_path / "a")
    many = [*flags, "--data", write_files(tmp_path / "files", "npy"), "--out", tmp_path / "b"]
    first = run(*many, "--steps", 10)
    second = run("--out", tmp_path / "b", "--steps", 30, "--log-every", 1)
    assert [ran.code for ran in (whole, first, second)] == [0, 0, 0], (whole, first, second)
    a, b = (losses(tmp_path / name) for name in "ab")
    assert [step for step, _ in b] == list(range(1, 31))
    # The total number of steps has no effect on the learning rate before step 20, the end of the warm-up.
    assert dict(b) == pytest.approx(dict(a), rel=1e-6)


def test_a_file_that_changes_during_training_is_named_at_the_next_save(tmp_path):
    data, file = write_files(tmp_path / "files", "bin"), tmp_path / "files" / "7.bin"
    flags = ["--data", data, "--steps", 200, "--log-every", 1, "--save-every", 20]
    with Program(*TINY, *flags, "--out", tmp_path / "out") as program:
        program.read_lines(5)
        file.write_bytes(file.read_bytes())
        ran = program.finish()
    assert ran.code == 2 and ran.err.count("\n") == 1, ran
    assert f"{file}: was changed" in ran.err
    assert "step 200/" not in ran.out


def test_an_id_that_is_too_high_is_named_and_a_given_vocabulary_size_is_kept(tmp_path):
    data, out = write_files(tmp_path / "files", "bin"), tmp_path / "out"
    flags = [*TINY, "--data", data, "--steps", 3, "--out", out]
    low = run(*flags, "--vocab", 300)
    assert low.code == 2 and low.err.count("\n") == 1, low
    assert "the vocabulary ends at 299" in low.err, low
    shutil.rmtree(out)
    assert run(*flags, "--vocab", 777).code == 0
    assert run(*flags, "--steps", 5).code == 0
    other = run(*flags, "--vocab", 512, "--steps", 7)
    assert_one_line(other, "--vocab 512 contradicts", "--vocab 777")
    (tmp_path / "high.bin").write_bytes(np.full(100, 777, np.uint16).tobytes())
    (tmp_path / "x.txt").write_text("text " * 100)
    for name, message in (("high.bin", "the vocabulary ends at 776"), ("x.txt", "is text")):
        assert_one_line(run("eval", "--data", tmp_path / name, "--out", out), message)


def test_one_validation_token_is_no_validation_data(text, tmp_path):
    ran = run(*TINY, "--data", text, "--val-fraction", 0.0002, "--steps", 2, "--out", tmp_path)
    assert ran.code == 0 and "validation loss" not in ran.out and not evaluations(tmp_path), ran
    (tmp_path / "one").write_text("a")
    assert_one_line(run("eval", "--out", tmp_path, "--data", tmp_path / "one"), "--data")


def test_a_context_that_is_longer_than_a_batch_of_an_evaluation_can_be_evaluated(tmp_path):
    (tmp_path / "long.txt").write_text("a context " * 12_000)
    sizes = {"val_fraction": 0.5, "eval_tokens": 0, "block_size": 2 * program_module.EVAL_BATCH}
    flags = program_module.Flags(data=f"{tmp_path}/long.txt", **sizes)
    plan = program_module.load_data(flags, set(), {}, ddp_setup.World(0, 0, 1, 1))[2]
    batches = [x.shape for x, _ in chardata.every_window(plan)]
    assert batches == [(1, 16384)] * 3 + [(1, 59_999 - 3 * 16384)]


def test_the_line_of_a_step_has_the_values_of_its_record():
    record = dict(step=7, epoch=1.234, loss=2.34567, lr=0.00123, tokens_per_s=12345.6)
    assert program_module.format_record(record, 100, 75.4) == (
        "step 7/100  epoch 1.23  loss 2.3457  lr 1.2e-03  12,346 tokens/s  eta 0:01:15"
    )


def test_the_seconds_that_are_left_follow_from_the_tokens_that_are_left_and_the_rate(done):
    ran, out = done("alone")
    steps = [line for line in metrics(out) if "loss" in line]
    shown = re.findall(r"^step .* eta (\d+):(\d\d):(\d\d)$", ran.out, re.MULTILINE)
    seconds = [3600 * int(hours) + 60 * int(m) + int(s) for hours, m, s in shown]
    left = [(steps[-1]["tokens"] - line["tokens"]) / line["tokens_per_s"] for line in steps]
    assert seconds == pytest.approx(left, abs=0.6)


def test_a_very_long_run_has_a_line_for_each_step():
    record = dict(step=1, epoch=0.0, loss=3.0, lr=0.1, tokens_per_s=1.0)
    assert program_module.format_record(record, 10**17, 1e17).startswith("step 1/1")


def test_without_validation_all_of_the_data_is_trained_on_once_by_default(done):
    ran, out = done("no validation")
    assert ran.code == 0 and "no validation" in ran.out, ran
    assert evaluations(out) == {}
    assert metrics(out)[-1]["tokens"] == (5390 // 16 - 1) * 16


# --- the files in --out ---


def test_metrics_have_a_line_with_the_documented_keys_for_each_step_and_evaluation(done):
    lines = metrics(done("spawn 3")[1])
    steps = [line for line in lines if "val_loss" not in line]
    keys = "step epoch tokens loss grad_norm lr skipped tokens_per_s mfu time".split()
    assert all(sorted(line) == sorted(keys) for line in steps)
    evaluated = [line for line in lines if "val_loss" in line]
    assert [list(line) for line in evaluated] == [["step", "val_loss", "time"]] * 2
    assert [line["step"] for line in steps] == list(range(1, 51))
    assert [line["step"] for line in evaluated] == [25, 50]
    unknown = {key for line in lines for key, value in line.items() if value is None}
    assert unknown == (set() if EXTRAS else {"mfu"})  # extras/machine.py knows the peak rate
    assert all(line["mfu"] is None or 0 <= line["mfu"] < 1 for line in steps)
    assert {line["skipped"] for line in steps} == {0}
    times = [line["time"] for line in lines]
    assert times == sorted(times) and times[-1] <= time.time() < times[0] + 3600
    # The seconds that follow from the rates cannot be more than those since config.json was written.
    counts = [0, *(line["tokens"] for line in steps)]
    seconds = sum((b - a) / line["tokens_per_s"] for a, b, line in zip(counts, counts[1:], steps))
    passed = times[-1] - (done("spawn 3")[1] / "config.json").stat().st_mtime
    assert 0 < seconds <= 1.01 * passed + 0.01


def test_an_epoch_ends_with_its_short_batch(done):
    steps = {line["step"]: line for line in metrics(done("spawn 3")[1]) if "loss" in line}
    assert [steps[step]["tokens"] for step in (30, 31, 32)] == [300 * 16, 302 * 16, 312 * 16]
    assert [steps[step]["epoch"] for step in (31, 50)] == [1.0, round(50 / 31, 4)]


def test_the_learning_rate_warms_up_and_decays_to_the_end(done):
    rates = [line["lr"] for line in metrics(done("alone")[1]) if "lr" in line]
    # The decay goes from 0.003 down to 0.0006.
    factors = [min((step + 1) / 20, 1 - 0.8 * max(0, step - 20) / 30) for step in range(50)]
    expected = [0.003 * factor for factor in factors]
    assert rates == pytest.approx(expected, rel=1e-12)


def test_the_dtype_that_auto_has_chosen_is_written_and_saved(done):
    out = done("no validation")[1]
    chosen = json.loads((out / "config.json").read_text())["dtype"]
    assert chosen in ("bfloat16", "float32")
    assert state(out)["config"]["dtype"] == chosen


def test_config_json_has_the_flags_and_the_number_of_ranks(done, text):
    config = json.loads((done("spawn 3")[1] / "config.json").read_text())
    expected = {"data": f"{text}", "batch_size": 10, "optimizer": "adamw", "tokenizer": "char"}
    expected |= {"steps": 50, "lr": 0.003, "seed": 0, "ranks": 3, "dtype": "float32"}
    assert {key: config[key] for key in expected} == expected


def test_files_are_made_with_the_umask_of_the_user(text, tmp_path):
    private = ["sh", "-c", 'umask 077; exec "$@"', "sh", sys.executable, "run.py"]
    out = tmp_path / "out"
    ran = run(*TINY, "--data", text, "--steps", 1, "--out", out, launcher=private)
    assert ran.code == 0 and ran.err == "", ran
    modes = {path.name: path.stat().st_mode & 0o777 for path in out.iterdir()}
    assert len(modes) == 4 and {*modes.values()} == {0o600}, modes
    assert out.stat().st_mode & 0o777 == 0o700


# --- arithmetic ---


def test_recomputed_activations_give_the_same_losses_also_with_dropout(done):
    assert done("recomputed")[0].code == 0
    assert losses(done("recomputed")[1]) == losses(done("dropped")[1])
    assert losses(done("recomputed")[1]) != losses(done("alone")[1])[:10]


def test_two_ranks_can_run_under_a_profiler(text, tmp_path):
    """There, the module __main__ is that of the profiler, so no class of run.py can be pickled."""
    profiler = ["-m", "cProfile", "-o", "/dev/null", "run.py"]
    flags = [*TINY, "--data", text, "--steps", 2, "--out", tmp_path]
    ran = run(*flags, launcher=[*torchrun(2)[:-1], *profiler])
    assert ran.code == 0 and "Done: 2 steps" in ran.out, ran


@pytest.mark.parametrize("flag", [False, True])
def test_only_checkpoint_activations_computes_the_blocks_again(monkeypatch, text, tmp_path, flag):
    calls, checkpoint = [], gpt.checkpoint
    monkeypatch.setattr(gpt, "checkpoint", lambda *a, **b: calls.append(a) or checkpoint(*a, **b))
    sizes = {"layers": 2, "heads": 2, "embd": 16, "block_size": 16, "batch_size": 8}
    more = {"data": f"{text}", "out": f"{tmp_path}", "steps": 3, "checkpoint_activations": flag}
    assert program_module.train(program_module.Flags(**sizes, **more), {*sizes, *more}) == 0
    assert len(calls) == 3 * 2 * flag


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_trains_with_float32_weights(done, dtype):
    ran, out = done(dtype)
    assert ran.code == 0 and ran.err == "", ran
    first, *_, last = [loss for _, loss in losses(out)]
    assert math.isfinite(last) and last < first
    assert {tensor.dtype for tensor in state(out)["model"].values()} == {torch.float32}
    assert metrics(out)[-2]["skipped"] == 0


def test_a_run_that_diverges_stops_with_one_line_and_keeps_the_last_good_checkpoint(done):
    ran, out = done("diverging")
    message = re.search(r"not finite 5 times in a row, up to step (\d+)", ran.err)
    assert ran.code == 1 and message and ran.err.count("\n") == 1, ran
    assert state(out)["step"] <= int(message[1]) - 5
    assert all(tensor.isfinite().all() for tensor in state(out)["model"].values())


SAVE_SLOWLY_AND_DIVERGE = f"""
import atexit, sys, time
from itertools import count
sys.path.insert(0, {str(ROOT)!r})
import ckpt, gpt, run

loss, save, calls = gpt.loss, ckpt.save, count(1)

def diverging(model, batch):
    loss_sum, tokens = loss(model, batch)
    if (call := next(calls)) > 7:
        print("call", call)  # not flushed
    return loss_sum * (BAD if call > 7 else 1), tokens

def slow(*args, **more):
    time.sleep(2)  # longer than the steps 8 to 12
    return save(*args, **more)

gpt.loss, ckpt.save = diverging, slow
atexit.register(print, "registered with atexit")
run.main()
"""


@pytest.mark.parametrize(
    "bad, last, error",
    [
        ("float('nan')", 12, "not finite 5 times in a row, up to step 12"),
        ("1 / 0", 8, "Error on rank 0: ZeroDivisionError"),
    ],
    ids=["diverges", "fails"],
)
def test_a_run_that_diverges_or_fails_first_completes_the_save_that_is_running(
    text, tmp_path, bad, last, error
):
    (tmp_path / "program.py").write_text(SAVE_SLOWLY_AND_DIVERGE.replace("BAD", bad))
    launcher = [sys.executable, str(tmp_path / "program.py")]
    flags = [*TINY, "--data", text, "--save-every", 7, "--out", tmp_path / "out"]
    ran = run(*flags, launcher=launcher)
    assert ran.code == 1 and error in ran.err, ran
    assert state(tmp_path / "out")["step"] == 7
    assert ran.out.endswith(f"call {last}\nregistered with atexit\n")


FAIL_TO_SAVE = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
import ckpt, run

def fail(*args):
    FAIL

ckpt.save = fail
run.main()
"""


@pytest.mark.parametrize(
    "fail, warning",
    [
        (
            "raise OSError('no space')",
            "checkpoint not written: no space; the checkpoints before it are untouched",
        ),
        (
            "time.sleep(60)",
            "a save takes longer than --timeout; until it ends, nothing else is saved",
        ),
    ],
    ids=["fails", "hangs"],
)
def test_a_run_whose_last_save_fails_or_hangs_says_so_and_has_another_exit_code(
    text, tmp_path, fail, warning
):
    (tmp_path / "program.py").write_text(FAIL_TO_SAVE.replace("FAIL", fail))
    launcher = [sys.executable, str(tmp_path / "program.py")]
    flags = [*TINY, "--data", text, "--steps", 2, "--timeout", 1, "--out", tmp_path / "out"]
    ran = run(*flags, launcher=launcher)
    assert ran.code == 1 and "Done" not in ran.out, ran
    error = "Error: the checkpoint of step 2 was not written"
    assert ran.err == f"Warning: {warning}\n{error}\n", ran


def test_a_last_save_that_fails_is_reported_once_for_two_ranks(text, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(FAIL_TO_SAVE.replace("FAIL", "raise OSError('no space')"))
    flags = [*TINY, "--data", text, "--steps", 2, "--out", tmp_path / "out"]
    ran = run(*flags, launcher=[*torchrun(2)[:-1], str(program)])
    assert ran.code == 1 and "Done" not in ran.out, ran
    assert ran.err.count("not written: no space") == ran.err.count("step 2 was not written") == 1, (
        ran
    )


@pytest.mark.skipif(not EXTRAS, reason="torch's Muon always computes in bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_muon_computes_in_float32_only_in_a_float32_run(dtype):
    model = gpt.build(gpt.Config(5, 4, 2, 2, 8), seed=0)
    flags = program_module.Flags(optimizer="muon", dtype=dtype)
    muon = program_module.make_optimizers(model, flags, one_machine=True)[-1]
    assert muon.dtype == (torch.float32 if dtype == "float32" else torch.bfloat16)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_matrices_and_embeddings_are_decayed_but_not_biases_and_norms(optimizer):
    model = gpt.build(gpt.Config(5, 4, 2, 2, 8, arch="gpt2"), seed=0)
    rates = {"lr": 0.5, "embedding_lr": 3.0, "momentum": 0.7}
    flags = program_module.Flags(optimizer=optimizer, weight_decay=0.3, **rates)
    optimizers = program_module.make_optimizers(model, flags, one_machine=True)
    decays = {
        parameter: group["weight_decay"]
        for each in optimizers
        for group in each.param_groups
        for parameter in group["params"]
    }
    expected = {parameter: 0.3 * (parameter.ndim > 1) for parameter in model.parameters()}
    assert decays == expected
    groups = [group for each in optimizers for group in each.param_groups]
    if optimizer == "adamw":
        assert {group["lr"] for group in groups} == {0.5}
    else:  # The embeddings have another rate than the matrices of the blocks.
        *groups, matrices = groups
        assert {group["lr"] for group in groups} == {1.5}
        settings = {"lr": 0.5, "momentum": 0.7, "adjust_lr_fn": "match_rms_adamw"}
        assert {name: matrices[name] for name in settings} == settings


def test_dtype_auto_is_bfloat16_only_with_hardware_support(monkeypatch):
    def missing(name):
        raise FileNotFoundError(name)

    cpu = torch.device("cpu")
    assert program_module.pick_dtype("float16", cpu) == "float16"
    for supported, expected in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: supported)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **how: supported)
        monkeypatch.setattr(program_module, "extra", missing)
        assert program_module.pick_dtype("auto", cpu) == expected
        assert program_module.pick_dtype("auto", torch.device("cuda")) == expected
        # extras/machine.py measures it.
        measured = SimpleNamespace(bfloat16_is_faster=lambda: not supported)
        monkeypatch.setattr(program_module, "extra", {"machine": measured}.get)
        assert program_module.pick_dtype("auto", cpu) != expected
        assert program_module.pick_dtype("auto", torch.device("cuda")) == expected


# --- sample and eval ---


def test_a_greedy_sample_begins_with_the_prompt_and_is_reproducible(done):
    greedy, again = done("greedy")[0], done("greedy again")[0]
    assert greedy.code == again.code == 0 and greedy.err == "", greedy
    assert greedy.out.startswith("the ")
    assert len(greedy.out) == len("the ") + 30 + len("\n")
    assert len(again.out) == len("the ") + 40 + len("\n")
    assert again.out.startswith(greedy.out[:-1])


def test_sample_and_eval_take_the_folder_and_the_device_from_the_environment(undisturbed, tmp_path):
    missing = "mps" if sys.platform == "linux" else "cuda"
    for command in ("sample", "eval"):
        ran = run(command, env={"DDPKIT_OUT": f"{tmp_path}/mine"})
        assert ran.code == 2 and f"{tmp_path}/mine: there is no checkpoint" in ran.err, ran
        ran = run(command, "--out", undisturbed(1), env={"DDPKIT_DEVICE": missing})
        assert_one_line(ran, f"device '{missing}' is not available")


def test_a_sample_depends_only_on_its_seed(undisturbed):
    ask = ["sample", "--out", undisturbed(1), "--max-new-tokens", 40]
    defaults = ["--prompt", "\n", "--temperature", 0.8, "--top-k", 0]
    choices = [["--seed", 1], ["--seed", 1, *defaults], ["--seed", 2], [], []]
    runs = [run(*ask, *more) for more in choices]
    assert {ran.code for ran in runs} == {0}, runs
    texts = [ran.out for ran in runs]
    assert texts[0] == texts[1] and len({*texts}) == 4


INTERRUPT_AN_IMPORT = f"""
import builtins, os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
import run

real_import = builtins.__import__

def import_(name, *args, **more):
    if name.startswith("torch.jit"):
        os.kill(os.getpid(), signal.SIGINT)
    return real_import(name, *args, **more)

builtins.__import__ = import_
run.main()
"""


@pytest.mark.parametrize("command", ["sample", "eval"])
def test_ctrl_c_while_torch_is_imported_ends_the_command(undisturbed, tmp_path, command):
    (tmp_path / "program.py").write_text(INTERRUPT_AN_IMPORT)
    # Not run(), whose processes have torch already.
    args = [sys.executable, tmp_path / "program.py", command, "--out", undisturbed(1)]
    ran = subprocess.run(args, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", ""), ran


def test_a_training_that_is_stopped_while_torch_is_imported_saves_after_its_first_step(
    text, tmp_path
):
    program = INTERRUPT_AN_IMPORT.replace("SIGINT", "SIGTERM")
    (tmp_path / "program.py").write_text(program)
    flags = [*TINY, "--data", text, "--out", tmp_path / "out"]
    args = [sys.executable, tmp_path / "program.py", *map(str, flags)]
    ran = subprocess.run(args, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 3 and "Stopped as asked after step 1 of" in ran.stdout, ran
    assert state(tmp_path / "out")["step"] == 1


CHANGE_THE_DATA = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
import gpt, run

loss = gpt.loss

def wrapper(model, batch):
    with open(sys.argv[-1], "ab") as file:
        file.write(b"more")
    return loss(model, batch)

gpt.loss = wrapper
run.main()
"""


def test_eval_of_data_that_changes_meanwhile_prints_no_loss(tmp_path):
    data, out = tmp_path / "ids.bin", tmp_path / "out"
    data.write_bytes((np.arange(3000, dtype=np.uint16) % 7).tobytes())
    assert run(*TINY, "--data", data, "--out", out, "--steps", 1).code == 0
    (tmp_path / "program.py").write_text(CHANGE_THE_DATA)
    launcher = [sys.executable, str(tmp_path / "program.py")]
    ran = run("eval", "--out", out, "--data", data, launcher=launcher)
    assert_one_line(ran, "ids.bin: was changed")


def on_two_ranks(*args: object, **how: Any) -> list[Ran]:
    port = free_port()
    with ExitStack() as stack:
        ranks = [Program(*args, env=launch_variables(i, 2, port), **how) for i in range(2)]
        return [stack.enter_context(program).finish() for program in ranks]


@pytest.mark.parametrize("ask", [["sample", "--seed", 1, "--max-new-tokens", 20], ["eval"]])
def test_of_several_ranks_only_rank_0_prints_a_sample_or_a_loss(undisturbed, ask):
    ask = [*ask, "--out", undisturbed(1)]
    ended = on_two_ranks(*ask)
    assert [ran.code for ran in ended] == [0, 0], ended
    assert [ran.out for ran in ended] == [run(*ask).out, ""] and len(ended[0].out) > 20, ended


@pytest.mark.parametrize("command", ["sample", "eval"])
def test_after_a_mistake_all_ranks_exit_with_2_and_one_prints_it(tmp_path, command):
    ended = on_two_ranks(command, "--out", tmp_path)
    assert [ran.code for ran in ended] == [2, 2], ended
    assert "".join(ran.err for ran in ended).count("there is no checkpoint") == 1, ended


def test_eval_prints_a_loss_of_which_the_perplexity_is_too_large_for_a_float(text, tmp_path):
    wild = "--steps 12 --warmup 0 --lr 200 --min-lr 200 --clip 0 --weight-decay 0".split()
    ran = run(*TINY, *wild, "--data", text, "--out", tmp_path)
    assert ran.code == 0 and evaluations(tmp_path)[12] > 710, ran
    ran = run("eval", "--out", tmp_path)
    assert ran.code == 0 and ", perplexity inf, over " in ran.out, ran


def test_eval_prints_the_last_validation_loss_of_the_training(done, undisturbed):
    ran, out = done("eval")
    last = evaluations(out)[100]
    assert ran.code == 0, ran
    assert ran.out.startswith(f"loss {last:.4f} nats per token, ")
    assert f"perplexity {math.exp(last):.4f}," in ran.out
    bits = re.search(r"([\d.]+) bits per token", ran.out)
    assert bits and float(bits[1]) == pytest.approx(last / math.log(2), abs=6e-5)
    assert ran.out.endswith(", over 538 tokens, in float32\n")  # 539 without the first


@pytest.mark.parametrize("command", ["sample", "eval"])
def test_a_result_that_cannot_be_written_is_an_error_of_one_line(undisturbed, command):
    with open("/dev/full", "w") as full:
        program = [sys.executable, "run.py", command, "--out", undisturbed(1)]
        ran = subprocess.run(program, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ran.returncode == 1 and re.fullmatch("Error: .*No space left.*\n", ran.stderr), ran


def test_eval_computes_in_the_dtype_of_the_training(done):
    _, out = done("bfloat16")
    ran = run("eval", "--out", out)
    assert ran.code == 0 and ran.out.endswith(", in bfloat16\n"), ran
    assert ran.out.startswith(f"loss {evaluations(out)[30]:.4f} nats per token")


@pytest.mark.parametrize("launch", [PYTHON, torchrun(3)], ids=["alone", "torchrun 3"])
def test_an_evaluation_of_the_first_tokens_is_exact(text, tmp_path, launch):
    flags = ["--data", text, "--steps", 12, "--eval-every", 6, "--eval-tokens", 100]
    ran = run(*TINY, *flags, "--out", tmp_path, launcher=launch)
    assert ran.code == 0 and ran.out.count(" over 100 tokens\n") == 2, ran

    corpus = chardata.read([str(text)], "char")
    ids = np.concatenate(chardata.split(corpus.tokens, 0.1)[1])[:101].astype("int64")
    saved = state(tmp_path)
    model = gpt.build(program_module.model_config(saved["config"]), seed=0).eval()
    model.load_state_dict(saved["model"])
    total = 0.0
    for start in range(0, 100, 16):  # windows of --block-size, the last one is shorter
        row = torch.from_numpy(ids[start : min(start + 16, 100) + 1])[None]
        total += gpt.loss(model, (row[:, :-1], row[:, 1:]))[0].item()
    assert evaluations(tmp_path)[12] == pytest.approx(total / 100, rel=1e-5)

    changed = run("--out", tmp_path, "--eval-tokens", 200)
    assert_one_line(changed, "--eval-tokens 200 contradicts", "--eval-tokens 100")
    more = run("--out", tmp_path, "--steps", 14, "--log-every", 1)
    assert more.code == 0 and " over 100 tokens\n" in more.out, more
    whole = run("eval", "--out", tmp_path)
    assert whole.code == 0 and ", over 538 tokens" in whole.out, whole


# --- output ---


def test_a_log_has_no_control_characters_and_a_line_every_ten_steps(done):
    ran, _ = done("bfloat16")
    assert ran.err == "" and "\033" not in ran.out and "\r" not in ran.out
    steps = re.findall(r"^step (\d+)/30  epoch .* tokens/s.*  eta ", ran.out, re.MULTILINE)
    assert steps == ["10", "20", "30"]


def test_a_warning_of_a_module_is_one_line():
    code = "import run, warnings; run.cli.main = lambda **_: warnings.warn('a text'); run.main()"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "Warning: a text\n")


def test_a_fatal_signal_prints_where_the_program_is():
    code = "import os, run\ndef main(**_): os.abort()\nrun.cli.main = main; run.main()"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == -signal.SIGABRT and "Fatal Python error: Aborted" in ran.stderr, ran
    assert re.search('File "<string>", line 2 in main\n.*File ".*run.py", line', ran.stderr), ran


@pytest.mark.parametrize("stream", ["1", "2"])
def test_training_works_if_its_output_is_closed_from_the_start(text, tmp_path, stream):
    shell = ["bash", "-c", f'exec "$0" run.py "$@" {stream}>&-', sys.executable]
    steps = ["--steps", 2, "--eval-every", 1, "--out", tmp_path]
    ran = run(*TINY, "--data", text, *steps, launcher=shell)
    assert ran.code == 0 and ran.err == "" and ("Done: 2 steps" in ran.out) == (stream == "2"), ran
    assert state(tmp_path)["step"] == 2


def test_training_continues_without_output_if_the_output_pipe_is_closed(text, tmp_path):
    flags = [*TINY, "--data", text, "--steps", 60, "--log-every", 1, "--out", tmp_path]
    with Program(*flags) as program:
        program.read_lines(3)
        # The output is a socket. If it were closed with unread lines, the program's next write would
        # fail with "connection reset" and the one after it with "broken pipe". A pipe has only the
        # second error. So let no more lines arrive, and read those that have.
        with socket.socket(fileno=os.dup(program.lines.fileno())) as ours:
            ours.shutdown(socket.SHUT_RD)
        program.lines.readall()
        program.lines.close()
        code = program.process.wait()
        program.errors.seek(0)
        errors = program.errors.read().decode()
    assert code == 0, errors
    assert errors.startswith("Warning: output not written: ") and errors.count("\n") == 1, errors
    assert state(tmp_path)["step"] == 60 and len(losses(tmp_path)) == 60


ROWS, COLUMNS = 120, 200


def run_on_terminal(
    flags: list[object], react: Callable[[warm.Process, bytes], object] = lambda *_: None
) -> tuple[int, bytes]:
    """Run the program in a terminal; return its exit code and what it wrote.

    `react` is called, with the process and all of its output so far, for each piece of output.
    """
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    heard, environment = b"", {**ENVIRONMENT, "TERM": "xterm"}
    process = warm.Process(
        warm_server(), ROOT / "run.py", [*map(str, flags)], environment, theirs, theirs
    )
    watchdog = threading.Timer(600, process.kill)
    watchdog.start()
    os.close(theirs)
    while True:
        try:
            piece = os.read(ours, 1 << 16)
        except OSError:  # the program has ended
            break
        heard += piece
        react(process, heard)
    os.close(ours)
    watchdog.cancel()
    return process.wait(), heard


def test_on_a_terminal_all_lines_stay(text, tmp_path):
    """After the first step, the --out folder is renamed, so the metrics cannot be written."""
    pyte, out = pytest.importorskip("pyte"), tmp_path / "out"
    flags = [*TINY, "--data", text, "--steps", 100, "--eval-every", 50, "--log-every", 1]

    def rename(_: warm.Process, heard: bytes) -> None:
        if b"step 1/" in heard and not (tmp_path / "renamed").exists():
            out.rename(tmp_path / "renamed")

    code, heard = run_on_terminal([*flags, "--out", out], rename)
    assert code == 0, heard
    screen = pyte.Screen(COLUMNS, ROWS)
    pyte.ByteStream(screen).feed(heard)
    rows = [row.rstrip() for row in screen.display if row.strip()]
    (warning,) = (row for row in rows if row.startswith("Warning: metrics not written: "))
    rows.remove(warning)
    assert [int(row.split("/")[0].split()[1]) for row in rows if "  eta " in row] == [
        *range(1, 101)
    ]
    first, *others = [row for row in rows if "  eta " not in row]
    assert first == (
        "Training: 3,696 parameters on 1 x cpu in float32, "
        f"steps 1 to 100 (set by --steps), in {out}"
    )
    assert re.fullmatch(r"step 50  validation loss \d\.\d{4} over \d+ tokens", others[0])
    assert re.fullmatch(r"step 100  validation loss \d\.\d{4} over \d+ tokens", others[1])
    assert others[2].startswith("Done: 100 steps") and others[-1].endswith(
        f"run.py sample --out {out}"
    )
    assert len(others) == 3


@pytest.mark.parametrize("spawn", [[], ["--spawn", 2]], ids=["alone", "spawn"])
def test_on_a_terminal_ctrl_c_is_answered_once_before_the_step_ends(tmp_path, spawn):
    """The step would take far longer than this test; a second Ctrl-C ends it."""
    data, sent = tmp_path / "data.txt", list[bytes]()
    data.write_bytes(bytes(4_000_000))

    def press_ctrl_c(process: warm.Process, heard: bytes) -> None:
        if [b"Training: ", b"Stopping after this step. ", b"never"][len(sent)] in heard:
            sent.append(heard)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to the parent and all ranks

    flags = [*TINY, "--data", data, "--tokenizer", "byte", "--out", tmp_path / "out", *spawn]
    endless = ["--batch-size", 100_000, "--accum", 10_000]
    code, heard = run_on_terminal([*flags, *endless], press_ctrl_c)
    assert code == 130 and len(sent) == 2 and heard.count(b"Stopping after this step.") == 1, heard


def test_help_lists_every_flag_and_does_not_import_torch():
    ran = run("--help", launcher=[sys.executable, "-X", "importtime", "run.py"])
    assert ran.code == 0 and " click" in ran.err
    assert not re.search(r"\| +(torch|numpy|gpt|loop|ckpt|chardata)\b", ran.err)
    shown = set(re.findall(r"^  (?:-h, )?(--[\w-]+)", ran.out, re.MULTILINE))
    flags = """--data --tokenizer --vocab --val-fraction --out --epochs --steps --batch-size --accum
        --block-size --layers --heads --embd --dropout --arch --optimizer --lr --embedding-lr --momentum --min-lr
        --warmup
        --weight-decay --clip --dtype --device --compile --checkpoint-activations --eval-every --eval-tokens
        --save-every --log-every --keep --seed --timeout --spawn --config --strategy
        --checkpoint --init-from --help --version"""
    assert {*flags.split()} - shown == (set() if EXTRAS else {"--config"})
    assert "[default: muon]" in " ".join(ran.out.split())
    assert re.search(r"^  eval +Print", ran.out, re.M) and re.search(r"^  sample +", ran.out, re.M)


@pytest.mark.parametrize("device, count", [("cpu", ddp_setup.available_cpus()), ("auto", 77)])
def test_spawn_without_a_number_starts_a_process_per_gpu_or_per_cpu_core(
    device, count, monkeypatch
):
    started = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 77)
    monkeypatch.setattr(ddp_setup, "spawn", lambda *args: started.append(args))
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *_: None)  # not in this process
    flags = ["--spawn", "--timeout", "5", "--device", device]
    program_module.cli.main(flags, standalone_mode=False)
    assert started == [([sys.executable, *sys.orig_argv[1:]], count, 5.0)]


def test_a_module_that_is_missing_is_named_in_one_line(tmp_path):
    shutil.copy(ROOT / "run.py", tmp_path)
    ran = run(launcher=[sys.executable, str(tmp_path / "run.py")], root=tmp_path)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("Error: No module named 'ddp_setup';") and ran.err.count("\n") == 1


# --- promise 8: bad input gives one line, and nothing is written ---


class Place(NamedTuple):
    """The folders of a case."""

    folder: Path  # the case may write here
    trained: Path  # the --out folder of a finished run; a case must not write here


class Case(NamedTuple):
    args: list[Any]  # a function stands for the argument that it returns
    texts: list[str]  # what the error must contain
    command: str | None = None  # instead of training
    env: dict[str, str] = {}
    out: Callable[[Place], Path] | None = None  # makes the --out folder


def file(name: str, content: bytes) -> Callable[[Place], Path]:
    def make(place: Place) -> Path:
        (place.folder / name).write_bytes(content)
        return place.folder / name

    return make


def folder(place: Place) -> Path:
    (place.folder / "texts").mkdir()
    return place.folder / "texts"


def of_another_script(place: Place) -> Path:
    ckpt.save(f"{place.folder / 'out'}", {"model": {"weight": torch.zeros(2)}, "step": 1}, 1)
    return place.folder / "out"


def trained(place: Place) -> Path:
    return Path(shutil.copytree(place.trained, place.folder / "out"))


def with_another_shape(place: Place) -> Path:
    saved = state(place.trained)
    saved["model"]["head.weight"] = torch.zeros(18, 32)
    saved["step"] = 1
    ckpt.save(f"{place.folder / 'out'}", saved, 1)
    return place.folder / "out"


class Intruder:
    """An object whose pickle runs a command."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.target}'",)


def with_code(write: Callable[[Any, Any], None], place: Place) -> Path:
    """Write a checkpoint with the right digest in its name, which runs a command if it is unpickled."""
    out, intruder = place.folder / "out", Intruder()
    out.mkdir()
    intruder.target = place.folder / "the code was run"
    with open(out / "temporary", "w+b") as opened:
        write({"model": {"head.weight": intruder}, "step": 5}, opened)
        opened.seek(0)
        digest = hashlib.sha256(opened.read()).hexdigest()[:32]
    (out / "temporary").rename(out / f"step-00000005-{digest}.pt")
    return out


def all_damaged(place: Place) -> Path:
    out = trained(place)
    for path in checkpoints(out):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    return out


def pipe(place: Place) -> Path:
    os.mkfifo(place.folder / "pipe.bin")
    return place.folder / "pipe.bin"


def of_another_program(name: str, place: Place) -> Path:
    (place.folder / "out").mkdir()
    (place.folder / "out" / name).write_text('{"step": 1, "model_type": "gpt2"}\n')
    return place.folder / "out"


LATIN = file("latin.txt", b"caf\xe9 " * 999)
IDS = file("ids.bin", bytes(range(16)) * 99)
SHAPE = ["step-00000001-", "head.weight", "(18, 32)"]
CUDA = ["'cuda'", "cpu"]
OTHER_DATA = ["/a.txt", "another --out"]
CASES = {
    "missing file": Case(["--data", "no/such.txt"], ["no/such.txt"]),
    "empty file": Case(["--data", file("empty.txt", b"")], ["empty.txt", "empty"]),
    "short file": Case(["--data", file("short.txt", b"only fifteen...")], ["short.txt", "16"]),
    "not utf-8": Case(["--data", LATIN], ["latin.txt", "0xe9 in position 3", "byte"]),
    "pipe as data": Case(["--data", pipe], ["/pipe.bin", "not a regular file"]),
    "config of another program": Case(
        [], ["--out", "config.json"], out=partial(of_another_program, "config.json")
    ),
    "metrics of another program": Case(
        [], ["--out", "metrics.jsonl"], out=partial(of_another_program, "metrics.jsonl")
    ),
    "folder as data": Case(["--data", folder], ["/texts", "folder"]),
    "vocab of a text": Case(["--vocab", 100], ["text.txt", "is text", "100"]),
    "unknown tokenizer": Case(
        ["--tokenizer", "words"],
        ["words: not char, byte, or an existing file" if EXTRAS else "extras/tokenizer.py"],
    ),
    "heads not dividing embd": Case(["--heads", 3], ["embd", "16", "heads", "3"]),
    "empty name of the folder": Case(["--out", ""], ["--out", "'' is empty"]),
    "min-lr above lr": Case(["--min-lr", 0.1], ["--min-lr 0.1", "--lr 0.003"]),
    "seed too large": Case(["--seed", 2**63], ["--seed", f"{2**63}"]),
    "timeout too long": Case(["--timeout", "1e10"], ["--timeout"]),
    "rate not finite": Case(["--lr", "nan"], ["--lr", "nan is not a number"]),
    "unknown device": Case(["--device", "tpu"], ["'tpu'", "cpu"]),
    "no cuda here": Case(["--device", "cuda"], CUDA),
    "no cuda here, sample": Case(["--device", "cuda"], CUDA, command="sample", out=trained),
    "no number": Case(["--lr", "fast"], ["--lr", "'fast'"]),
    "no number in the environment": Case([], ["--clip", "'much'"], env={"DDPKIT_CLIP": "much"}),
    "unknown flag": Case(["--batchsize", 8], ["--batchsize", "--batch-size"]),
    "old flag": Case(["--tokens", "byte"], ["--tokens", "--tokenizer"]),
    "old flag of sample": Case(["--tokens", 9], ["--tokens", "--max-new-tokens"], command="sample"),
    "unknown sub-command": Case(["smaple"], ["smaple"]),
    "flags before a command": Case(
        ["sample"], ["give flags after the command: sample has flags of its own"]
    ),
    "spawn under a launcher": Case(
        ["--spawn", 2], ["--spawn", "launcher"], env={"RANK": "0", "WORLD_SIZE": "2"}
    ),
    "incomplete launcher": Case([], ["LOCAL_RANK"], env={"RANK": "0"}),
    "another model": Case(["--embd", 32], ["--embd 32 contradicts", "--embd 16"], out=trained),
    "another seed": Case(["--seed", 1], ["--seed 1 contradicts", "--seed 0"], out=trained),
    "other data": Case(["--data", file("a.txt", b"the model " * 99)], OTHER_DATA, out=trained),
    "other characters": Case(["--data", "README.md"], ["README.md", "'#'", "18"], out=trained),
    "file for a folder": Case([], ["--out", "/out"], out=file("out", b"")),
    "checkpoint of another shape": Case([], SHAPE, out=with_another_shape),
    "sample of another shape": Case([], SHAPE, command="sample", out=with_another_shape),
    "checkpoint of another script": Case(
        [], ["step-00000001-", "not written by this program"], out=of_another_script
    ),
    "ids for a model of characters": Case(
        ["--data", IDS], ["ids.bin", "of kind ids; the model needs char"], "eval", out=trained
    ),
    "empty prompt": Case(
        ["--prompt", ""], ["--prompt ''", "at least one token"], "sample", out=trained
    ),
    "checkpoint with code": Case([], ["step-00000005-"], out=partial(with_code, torch.save)),
    "pickle with code": Case(
        [], ["step-00000005-"], out=partial(with_code, partial(pickle.dump, protocol=2))
    ),
    "all checkpoints damaged": Case([], ["step-00000002-", "damaged"], out=all_damaged),
    "sample without a checkpoint": Case([], ["/out", "no checkpoint"], command="sample"),
    "too many tokens": Case(
        ["--max-new-tokens", 10**20],
        ["--max-new-tokens", f"{10**20} is not a number below 2**63"],
        command="sample",
        out=trained,
    ),
    "temperature nan": Case(
        ["--temperature", "nan"],
        ["--temperature", "nan is not a number"],
        command="sample",
        out=trained,
    ),
    "infinite rate": Case(["--lr", "inf"], ["--lr", "inf is not a number below"]),
    "unknown character": Case(["--prompt", "the Ü"], ["'Ü'", "18"], command="sample", out=trained),
}
ONE = [*CASES]
SPAWN = ["min-lr above lr", "file for a folder", "checkpoint of another shape"]
STARTS = {"alone": (PYTHON, []), "spawn": (PYTHON, ["--spawn", 2]), "torchrun": (torchrun(2), [])}


class Outcome(NamedTuple):
    ran: Ran
    unchanged: bool  # the --out folder is as it was
    folder: Path


@pytest.fixture(scope="module")
def refused(done, text, tmp_path_factory):
    """Return a function: (launch, name of a case) -> its outcome."""
    base = tmp_path_factory.mktemp("bad")
    first = run(*TINY, "--data", text, "--steps", 2, "--save-every", 1, "--out", base / "trained")
    assert first.code == 0, first

    def refuse(launch: str, name: str) -> Outcome:
        case, place = CASES[name], Place(base / f"{launch}-{name}", base / "trained")
        place.folder.mkdir()
        launcher, more = STARTS[launch]
        out = case.out(place) if case.out else place.folder / "out"
        args = [arg(place) if callable(arg) else arg for arg in case.args]
        start = [case.command] if case.command else [*TINY, "--data", text, "--steps", 2]
        before = contents(out)
        ran = run(*start, "--out", out, *more, *args, launcher=launcher, env=case.env)
        return Outcome(ran, contents(out) == before, place.folder)

    wanted = [("alone", name) for name in ONE] + [("spawn", name) for name in SPAWN]
    wanted.append(("torchrun", "min-lr above lr"))
    calls = {f"{launch} {name}": partial(refuse, launch, name) for launch, name in wanted}
    with ahead(**calls) as runs:
        yield lambda launch, name: runs[f"{launch} {name}"].result()


@pytest.mark.parametrize(
    "launch, name", [("alone", n) for n in ONE] + [("spawn", n) for n in SPAWN]
)
def test_bad_input_gives_one_line_and_writes_nothing(refused, launch, name):
    ran, unchanged, folder = refused(launch, name)
    assert_one_line(ran, *CASES[name].texts)
    # Only a run that is resumed is told how to continue it.
    assert ("cannot continue the run" in ran.err) == (name == "other characters")
    assert unchanged
    assert not (folder / "the code was run").exists()


@pytest.mark.parametrize(
    "flag, value",
    [
        *[(flag, 0) for flag in "--lr --embedding-lr --timeout --steps --accum --keep".split()],
        *[(flag, 1) for flag in "--val-fraction --dropout --momentum".split()],
        *[(flag, -1) for flag in "--min-lr --weight-decay --clip --warmup --eval-tokens".split()],
        ("--seed", -1),
        ("--spawn", 1025),
        ("--timeout", 1e10),
    ],
)
def test_a_number_outside_of_its_range_is_refused(flag, value):
    with pytest.raises(click.BadParameter, match="is not in the range"):
        program_module.cli.make_context("run.py", [flag, f"{value}"])


@pytest.mark.parametrize(
    "error", [ValueError, OSError, FileNotFoundError, ImportError, NotImplementedError]
)
def test_an_error_that_the_user_can_mend_is_named_with_its_subject_and_advice(error):
    with pytest.raises(click.UsageError) as caught, program_module.usage_errors("A: ", "; do B"):
        raise error("no C")
    assert caught.value.message == "A: no C; do B"


@pytest.mark.parametrize("error", [ConnectionError, RuntimeError, FloatingPointError])
def test_a_lost_rank_and_a_bug_are_not_mistakes_of_the_user(error):
    with pytest.raises(error, match="no C"), program_module.usage_errors("A: ", "; do B"):
        raise error("no C")


def test_a_run_does_not_begin_where_another_has_just_written(tmp_path):
    """Between the reading of a checkpoint and the lock, another run can write a newer one."""
    out = f"{tmp_path}"
    ckpt.save(out, {"model": {"weight": torch.zeros(2)}, "step": 5}, 5)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match="another run has just written to it"):
        program_module.prepare_folder(out, ckpt, {"step": 4}, {})
    assert {**contents(tmp_path), **before} == contents(tmp_path)  # nothing is replaced
    [entry] = ckpt.list_checkpoints(out)
    assert program_module.prepare_folder(out, ckpt, {"step": 5}, {}) is not None  # the lock


def test_a_second_run_in_the_same_folder_is_refused(text, tmp_path):
    flags = [*TINY, "--data", text, "--epochs", 1000, "--log-every", 1, "--out", tmp_path / "out"]
    with Program(*flags) as first:
        first.read_to("step 1/")
        assert_one_line(run(*flags, "--steps", 2), "--out", "in use by another run")


@pytest.mark.parametrize("what", ["a checkpoint", "the data"])
def test_two_ranks_that_are_told_different_things_end_with_one_line(text, tmp_path, what):
    """Ranks started by hand on two machines can have different environments and folders."""
    port = free_port()
    if what == "the data":  # The name is relative, and the ranks run in different folders.
        args = [*TINY, "--data", "text.txt", "--steps", 2, "--out", tmp_path / "out"]
        settings = [{}, {}]
        for rank, words in enumerate(("of rank zero", "of rank one ")):
            (tmp_path / f"{rank}").mkdir()
            (tmp_path / f"{rank}" / "text.txt").write_text(words * 99)
        expected = ["Error: --data text.txt: is not the same on all ranks"]
    else:
        args = ["eval", "--data", text]
        settings = [{"DDPKIT_OUT": f"{tmp_path / rank}"} for rank in "01"]
        for rank, setting in enumerate(settings):
            steps = ["--steps", rank + 1, "--out", setting["DDPKIT_OUT"]]
            assert run(*TINY, "--data", text, *steps).code == 0
        expected = ["Error: rank 1 found step-00000002-", ", rank 0 step-00000001-"]
    ranks = [{**launch_variables(i, 2, port), **s} for i, s in enumerate(settings)]
    how = [{"launcher": [sys.executable, f"{ROOT}/run.py"], "root": ROOT}] * 2
    if what == "the data":
        how = [{**how[0], "root": tmp_path / rank} for rank in "01"]
    with ExitStack() as stack:
        programs = [
            stack.enter_context(Program(*args, env=env, **more)) for env, more in zip(ranks, how)
        ]
        ended = [program.finish() for program in programs]
    assert [ran.code for ran in ended] == [1, 2], ended  # rank 1 reports the error
    lines = [line for ran in ended for line in ran.err.splitlines()]
    assert len(lines) == 1 and all(text in lines[0] for text in expected), ended
    assert not (tmp_path / "out").exists()


MIXED = """
import contextlib, os, runpy, sys, torch
init, rank = torch.autocast.__init__, os.environ["RANK"]
torch.cpu._is_avx512_bf16_supported = lambda: rank == "0"

def note_and_init(self, device, dtype, enabled, **more):
    with open(os.path.join({folder!r}, rank), "w") as file:
        file.write(f"{{dtype}} {{enabled}}")
    init(self, device, dtype, enabled, **more)

torch.autocast.__init__ = note_and_init
sys.path.insert(0, {root!r})
with contextlib.suppress(ImportError):  # The tests also run without extras/.
    import extras.machine
    extras.machine.bfloat16_is_faster = torch.cpu._is_avx512_bf16_supported
runpy.run_path({root!r} + "/run.py", run_name="__main__")
"""


def test_ranks_with_different_processors_compute_in_the_dtype_of_rank_0(text, tmp_path):
    script = tmp_path / "mixed.py"
    script.write_text(MIXED.format(folder=f"{tmp_path}", root=f"{ROOT}"))
    args = [*TINY, "--data", text, "--steps", 1, "--dtype", "auto", "--out", tmp_path / "out"]
    ended = on_two_ranks(*args, launcher=[sys.executable, script])
    assert [(ran.code, ran.err) for ran in ended] == [(0, "")] * 2, ended
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["torch.bfloat16 True"] * 2


def test_characters_that_the_terminal_does_not_have_are_replaced(text, tmp_path):
    args = [*TINY, "--data", text, "--steps", 1, "--out", tmp_path / "выход"]
    # Python reads this variable when it starts.
    env, launcher = {"PYTHONIOENCODING": "latin-1"}, [sys.executable, "run.py"]
    ran = run(*args, env=env, launcher=launcher)
    assert ran.code == 0 and ran.err == "" and ran.out.endswith(" --out " + f"{tmp_path}/?????\n")


def test_all_ranks_use_the_flags_that_rank_0_was_given(text, tmp_path):
    """Rank 1 was given others, also one with its default value. With its own flags, it would hang."""
    args = [*TINY, "--data", text, "--out", tmp_path / "out"]
    assert run(*args, "--steps", 2, "--eval-every", 1).code == 0
    port = free_port()
    ranks = [launch_variables(i, 2, port) | {"DDPKIT_STEPS": "4"} for i in range(2)]
    ranks[1] |= {"DDPKIT_EVAL_EVERY": "100", "DDPKIT_STEPS": "9"}
    with ExitStack() as stack:
        programs = [stack.enter_context(Program(*args, env=env)) for env in ranks]
        ended = [program.finish() for program in programs]
    assert [(ran.code, ran.err) for ran in ended] == [(0, "")] * 2, ended
    evaluated = [line["step"] for line in metrics(tmp_path / "out") if "val_loss" in line]
    assert evaluated == [1, 2, 3, 4]


def test_bad_input_gives_one_line_under_torchrun(refused):
    name = "min-lr above lr"
    ran, unchanged, _ = refused("torchrun", name)
    lines = [line for line in ran.err.splitlines() if line.startswith("Error")]
    assert len(lines) == 1 and all(text in lines[0] for text in CASES[name].texts), ran.err
    assert f'File "{ROOT}/run.py' not in ran.err  # the only traceback is torchrun's own
    assert ran.code != 0 and unchanged


def test_the_code_in_these_checkpoints_runs_if_they_are_unpickled(tmp_path):
    """Otherwise the two cases with code could not fail."""
    out = with_code(torch.save, Place(tmp_path, tmp_path))
    torch.load(checkpoints(out)[0], weights_only=False)
    assert (tmp_path / "the code was run").exists()
