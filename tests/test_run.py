"""run.py as its users see it: training, resume, stop, sample, eval, output, bad input. Promises 1, 3, 4, 7 and 8.

run() of conftest.py runs one rank in this process. A program is started only for several ranks, for signals from
outside, and for terminals and pipes, because each start takes two seconds.
"""

import fcntl
import json
import math
import os
import pty
import re
import select
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from conftest import (
    ENVIRONMENT,
    PYTHON,
    ROOT,
    TINY,
    Program,
    Ran,
    checkpoints,
    contents,
    free_port,
    launch_variables,
    losses,
    metrics,
    run,
    same,
    same_training,
    signalled,
    state,
    torchrun,
    wait_for,
)

import chardata
import ckpt
import ddp_setup
import gpt
import run as program

EXTRAS = (ROOT / "extras").is_dir()
# 50 steps of 10 rows, which 3 ranks cannot divide evenly. Step 31 is the last of an epoch and has 2 rows, so one of 3
# ranks has none.
FIFTY = [*TINY, *"--batch-size 10 --steps 50 --warmup 0.4 --min-lr 0.0006 --log-every 1".split()]
FIFTY += ["--eval-every", 25]
ENDLESS = "--no-compile --epochs 99999 --log-every 1 --eval-every 99999 --save-every 99999".split()
OLD = ROOT / "tests" / "data" / "version_0_2"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def fifty(text, tmp_path_factory) -> Callable[..., tuple[Ran, Path]]:
    """Return a function: more flags -> what a run of FIFTY printed, and its folder. Do not write into it."""

    @cache
    def train(more: str, *launcher: str) -> tuple[Ran, Path]:
        out, how = tmp_path_factory.mktemp("fifty"), {"launcher": [*launcher]} if launcher else {}
        ran = run(*FIFTY, "--data", text, "--out", out, *more.split(), **how)
        assert ran.code == 0, ran
        return ran, out

    return train


def at_loss(monkeypatch: Any, change: Callable[[int, Any], Any]) -> None:
    """Call change(call, model) before each gpt.loss, and multiply the loss by its result, if that is a number."""
    calls, loss = count(1), gpt.loss

    def changed(model: Any, batch: Any) -> Any:
        factor = change(next(calls), model) or 1
        loss_sum, tokens = loss(model, batch)
        return loss_sum * factor, tokens

    monkeypatch.setattr(gpt, "loss", changed)


def stop_at(step: int, call: int, model: object) -> None:
    if call == step:
        signal.raise_signal(signal.SIGTERM)


def evaluations(folder: Path) -> dict[int, float]:
    return {line["step"]: line["val_loss"] for line in metrics(folder) if "val_loss" in line}


def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def assert_close(out: Path, other: Path, exact: bool = True) -> None:
    """Compare all losses and weights. Near 0, weights may differ by the resolution of float32.

    exact: False for torch's Muon, which computes in bfloat16.
    """
    assert [step for step, _ in losses(out)] == [*range(1, 51)]
    ours, theirs = ((dict(losses(o)), evaluations(o), state(o)["model"]) for o in (out, other))
    rtol, atol = (1e-4, 1e-7) if exact else (1e-2, 1e-3)
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


def assert_one_line(ran: Ran, *texts: str, code: int = 2) -> None:
    """Check that the program refused its input: exit code 2, and one line on stderr that matches `texts`."""
    assert ran.code == code and ran.out == "", ran
    assert ran.err.startswith("Error: ") and ran.err.count("\n") == 1, ran.err
    assert [text for text in texts if not re.search(text, ran.err)] == [], ran.err


def on_two_ranks(
    *args: object, env: Any = ({}, {}), roots: Any = (ROOT, ROOT), **how: Any
) -> list[Ran]:
    """Start two ranks by hand, as on two machines with other environments and other files."""
    port = free_port()
    with ExitStack() as stack:
        ranks = [
            Program(*args, env=launch_variables(i, 2, port) | env[i], root=roots[i], **how)
            for i in (0, 1)
        ]
        return [stack.enter_context(rank).finish() for rank in ranks]


# --- promise 1: the result does not depend on the number of ranks ---


@pytest.mark.parametrize(
    "flags, more, launcher",
    [
        ("--optimizer adamw", "--accum 64", ()),  # more micro-batches than rows
        ("--optimizer adamw", "--spawn 3 --accum 2", ()),
        ("--optimizer adamw", "", torchrun(2)),
        ("--optimizer auto", "--spawn 2", ()),
    ],
    ids=["accum", "spawn 3", "torchrun 2", "auto, spawn 2"],
)
def test_losses_and_weights_do_not_depend_on_launcher_ranks_and_accum(fifty, flags, more, launcher):
    def printed(ran: Ran) -> str:
        return re.sub(r"[\d,]+ tokens/s|eta [\d:]+|--out .*|. x cpu|in /.*", "", ran.out)

    (one, alone), (ran, out) = fifty(flags), fifty(f"{flags} {more}".strip(), *launcher)
    exact = EXTRAS or "adamw" in flags
    assert_close(out, alone, exact)
    assert [*evaluations(out)] == [25, 50]
    if exact:
        assert printed(ran) == printed(one)  # only rank 0 prints
    assert launcher or one.err == ran.err == ""


# --- promise 3: resume ---


def test_resume_after_a_stop_signal_is_bitwise_exact(monkeypatch, undisturbed, flags, tmp_path):
    at_loss(monkeypatch, partial(stop_at, 20))
    ran = run(*flags, "--out", tmp_path)
    step = state(tmp_path)["step"]
    assert ran.code == 3 and f"\nStopped as asked after step {step} of 100" in ran.out, ran
    assert step in (20, 21)
    ran = run("--out", tmp_path, "--log-every", 1)  # All other flags come from the checkpoint.
    assert ran.code == 0 and ran.err == "", ran
    assert [line for line in ran.out.splitlines() if "rate" in line or "threads" in line] == []
    assert same_training(tmp_path, undisturbed(1))
    times = [line["time"] for line in metrics(tmp_path)]
    assert times == sorted(times)


def test_two_ranks_resume_exactly_and_one_rank_goes_on_with_their_run(fifty, text, tmp_path):
    """Only rank 1 gets the signal. Without the order of the data, the losses would be others."""
    out, flags = tmp_path / "out", [*FIFTY, "--data", text, "--out", tmp_path / "out"]
    ran = run(*flags, "--spawn", 2, **signalled(PYTHON, "1 20 main 9 15 self", tmp_path / "place"))
    assert ran.code == 3 and ran.err == "" and ran.out.count("Stopped as asked") == 1, ran
    assert state(out)["step"] in (20, 21)
    alone = shutil.copytree(out, tmp_path / "alone")
    assert run("--out", out, "--log-every", 1, "--spawn", 2).code == 0
    assert same_training(out, fifty("--optimizer auto --spawn 2")[1])
    assert run("--out", alone, "--log-every", 1, "--accum", 2).code == 0
    assert_close(alone, fifty("--optimizer auto")[1], EXTRAS)


def test_a_finished_run_says_how_to_continue_and_continues(text, tmp_path):
    first = run(*TINY, "--data", text, "--epochs", 1, "--eval-every", 15, "--out", tmp_path)
    assert first.code == 0 and "\nDone: 38 steps." in first.out, first
    before = contents(tmp_path)
    again = run("--out", tmp_path, "--steps", 1000)
    assert again.code == 0 and contents(tmp_path) == before, again
    assert again.out.startswith(
        f"The run in {tmp_path} is finished: 38 steps. To continue, give a higher --epochs"
    )
    on = run("--out", tmp_path, "--epochs", 2, "--keep", 9)
    assert on.code == 0 and f"steps 39 to 76, continuing the run in {tmp_path}\n" in on.out, on
    assert (
        "\nThe learning rate was 8.8e-05 in step 38, and is 1.7e-03 in step 39, because" in on.out
    )
    # Steps with an evaluation have a line too.
    expected = [10, 15, 20, 30, 38, 40, 45, 50, 60, 70, 75, 76]
    assert [step for step, _ in losses(tmp_path)] == expected
    assert run("--out", tmp_path, "--epochs", 3, "--save-every", 4).code == 0
    assert len(checkpoints(tmp_path)) >= 9  # --keep comes from the checkpoint


PINNED = """tokenizer vocab val_fraction block_size batch_size seed arch layers heads embd optimizer init_from
    eval_tokens""".split()
NOT_RESTORED = """spawn strategy device use timeout out log_every accum checkpoint
    checkpoint_activations""".split()


@pytest.mark.parametrize("name", vars(program.Flags()))
def test_a_resumed_run_keeps_its_flags_unless_others_are_given_and_some_cannot_be_changed(name):
    flags = program.Flags(optimizer="adamw", dtype="float32", lr=0.01)
    saved = {"name": "x", "step": 1, "config": {name: 0.001, "unknown": 1}}
    complete = partial(program.complete_flags, flags, saved=saved, device=CPU)
    restored = flags if name in NOT_RESTORED else replace(flags, **{name: 0.001})
    assert complete(set()) == restored
    if name in PINNED:
        with pytest.raises(ValueError, match="contradicts x, made with .* 0.001; leave it out, or"):
            complete({name})
    else:
        assert complete({name}) == flags


@pytest.mark.parametrize(
    "changed, rates",
    [
        ({}, ""),
        ({"steps": 120}, "1.5e-04 in step 60, and is 3.6e-03 in step 61"),
        ({"epochs": 9, "steps": None}, "1.5e-04 in step 60, and is 5.7e-03 in step 61"),
        ({"lr": 1.0, "steps": 120}, "1.5e-04 in step 60, and is 6.0e-01 in step 61"),
        ({"step": 50, "min_lr": 5e-3}, "1.7e-03 in step 50, and is 5.3e-03 in step 51"),
        ({"step": 9, "steps": 70}, ""),  # still warming up, as before
        ({"ranks": 2, "threads": 3}, "CPU threads of each rank: now 3, before 2. The weights may"),
        ({"threads": 3}, ""),  # with another number of ranks, rounding differs anyway
        ({"ranks": 2, "threads": 0}, ""),  # on a GPU
    ],
)
def test_a_start_says_if_rates_or_rounding_are_not_those_of_an_unbroken_run(changed, rates):
    """Otherwise a run that is extended suddenly learns at 20 times the rate, without a word."""
    step = changed.pop("step", 60)
    machine = {"ranks": changed.pop("ranks", 1), "threads": changed.pop("threads", 2)}
    # A warm-up of 20 steps, as in version 0.3.
    flags = program.Flags(steps=60, optimizer="adamw", dtype="float32", lr=6e-3, warmup=20)
    saved = {"step": step, "config": vars(flags), "ranks": 2, "threads": 2}
    lines = [*program.describe_changes(replace(flags, **changed), saved, machine, 100)]
    assert len(lines) == bool(rates) and re.search(rates, "".join(lines)), lines


@pytest.mark.parametrize(
    "given, total",
    [({}, 100), ({"steps": 250}, 250), ({"epochs": 3}, 300), ({"epochs": 2, "steps": 250}, 200)],
    ids=str,
)
def test_steps_need_no_epochs_and_of_both_the_lower_limit_counts(given, total):
    """Otherwise `--steps 400` would end after the first epoch, without a word."""
    assert program.make_schedule(vars(program.Flags(**given)), 100)[0] == total


def test_a_resume_with_another_number_of_threads_says_so(undisturbed, monkeypatch, tmp_path):
    out, threads = shutil.copytree(undisturbed(1), tmp_path / "out"), torch.get_num_threads()
    assert config(out)["threads"] == state(out)["threads"] == ddp_setup.available_cpus()
    monkeypatch.setitem(ENVIRONMENT, "OMP_NUM_THREADS", "1")  # so that run.py keeps the next line
    torch.set_num_threads(threads + 1)
    ran = run("--out", out, "--steps", 101)
    torch.set_num_threads(threads)
    assert ran.code == 0, ran
    assert f"\nCPU threads of each rank: now {threads + 1}, before {threads}. The" in ran.out, ran


@pytest.mark.parametrize("more", ["", "Ω"], ids=["same characters", "other characters"])
def test_a_default_text_of_another_python_is_named_as_the_cause(monkeypatch, tmp_path, more):
    """The advice to give the data that the run had would be useless."""
    small = [*TINY, "--steps", 1, "--out", tmp_path]
    assert run(*small).code == 0
    monkeypatch.setitem(chardata.topics, "assert", f"changed {more}")
    ran = run("--out", tmp_path, "--steps", 2)
    assert_one_line(ran, "default text", "continue with the Python that began the run, or name an")
    assert "give" not in ran.err


@pytest.mark.parametrize("strategy", ["ddp", "zero", "fsdp"])
def test_only_for_ddp_the_whole_model_is_one_graph(monkeypatch, strategy):
    """The hooks of FSDP2 would cut one graph into pieces that are as slow as no graph."""
    compile_ = []
    monkeypatch.setattr(gpt, "compile_", lambda model, whole: compile_.append(whole))
    flags = program.Flags(strategy=strategy)
    program.build_without_weights(gpt.Config(5, 4, 2, 2, 8), flags, True, {})
    assert compile_ == [strategy == "ddp"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "fast-muon"][: 2 + EXTRAS])
@pytest.mark.parametrize("compiled", [True, False])
def test_what_auto_means_is_chosen_once_printed_and_saved(
    text, tmp_path, monkeypatch, dtype, optimizer, compiled
):
    """The values that a run has are kept, also if this machine would choose others."""
    compile_ = []
    monkeypatch.setattr(gpt, "compile_", lambda model, whole: compile_.append(whole))
    chosen = {"dtype": dtype, "optimizer": optimizer, "compile": compiled}
    auto = [*TINY, "--data", text, "--out", tmp_path, "--dtype", "auto", "--optimizer", "auto"]
    given = [
        "--dtype",
        dtype,
        "--optimizer",
        optimizer,
        "--compile" if compiled else "--no-compile",
    ]
    for step, more in enumerate((given, []), 1):
        ran = run(*auto, "--steps", step, *more)
        assert f" x cpu in {dtype} with {optimizer}{', compiled' * compiled}, steps" in ran.out, ran
        for saved in (config(tmp_path), state(tmp_path)["config"]):
            assert {name: saved[name] for name in chosen} == chosen
    assert compile_ == [True, True] * compiled


def test_auto_chooses_by_speed_files_and_the_length_of_the_run(text, tmp_path):
    threads = torch.get_num_threads()
    ran = run(*TINY, "--data", text, "--out", tmp_path, "--steps", 1, "--dtype", "auto")
    faster, muon = program.bfloat16_is_faster(CPU), "fast-muon" if EXTRAS else "muon"
    dtype = "bfloat16" if faster else "float32"
    assert f" in {dtype} with {muon}, steps 1 to 1, in " in ran.out, ran
    assert torch.get_num_threads() == threads
    assert state(tmp_path)["config"]["compile"] is config(tmp_path)["compile"] is False
    compiler = shutil.which("g++") is not None and not os.environ.get("CXX")
    decide = partial(program.should_compile, device=CPU, steps=10)
    long, short = ([decide(asked, flops=f) for asked in (None, True, False)] for f in (1e15, 1e12))
    assert short == [False, True, False] and (long == [True, True, False] or not compiler)


def test_float16_keeps_its_scale_at_a_resume_and_the_dtype_can_be_changed(text, tmp_path):
    flags = [*TINY, "--data", text, "--out", tmp_path, "--arch", "gpt2", "--dtype", "float16"]
    ran = run(*flags, "--steps", 12, "--log-every", 1)
    assert ran.code == 0 and ran.err == "", ran
    first, *_, last = [loss for _, loss in losses(tmp_path)]
    assert last < first and metrics(tmp_path)[-2]["skipped"] == 0
    saved = state(tmp_path)
    assert {tensor.dtype for tensor in saved["model"].values()} == {torch.float32}
    saved["scaler"]["scale"] = 1024.0
    checkpoints(tmp_path)[-1].unlink()
    ckpt.save(f"{tmp_path}", saved, 12)
    assert run("--out", tmp_path, "--steps", 14).code == 0
    assert state(tmp_path)["scaler"]["scale"] == 1024.0
    assert run("--out", tmp_path, "--steps", 16, "--dtype", "bfloat16").code == 0
    assert state(tmp_path)["scaler"] == {}
    assert run("eval", "--out", tmp_path).out.endswith(", in bfloat16\n")


def test_a_damaged_checkpoint_is_set_aside_and_its_steps_are_trained_again(undisturbed, tmp_path):
    out = shutil.copytree(undisturbed(1), tmp_path / "out")
    good, damaged = checkpoints(out)[-2:]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    first = f"Warning: {damaged.name}: damaged"
    ran = run("sample", "--out", out, "--max-new-tokens", 1)
    assert ran.code == 0 and ran.err.startswith(first) and ran.err.count("\n") == 1, ran
    assert ran.err.endswith(f"; using {out}/{good.name}\n"), ran
    ran = run("--out", out, "--log-every", 1)
    assert ran.code == 0 and ran.err.startswith(first) and ran.err.count("\n") == 1, ran
    assert ran.err.endswith("; set aside, continuing from step 80\n"), ran
    assert Path(f"{damaged}.damaged").exists() and same_training(out, undisturbed(1))


@pytest.mark.parametrize("command", ["", "--spawn 2", "sample", "eval"])
def test_a_checkpoint_that_cannot_be_read_is_one_line_and_stays(undisturbed, tmp_path, command):
    """It may be good. Otherwise the run would continue from the one before it."""
    out = shutil.copytree(undisturbed(1), tmp_path / "out")
    newest = checkpoints(out)[-1]
    newest.unlink()
    newest.symlink_to("/proc/self/mem")  # its first bytes give EIO
    before = sorted(out.iterdir())
    ran = run(*command.split(), "--out", out)
    assert_one_line(ran, f"Input/output error: '.*{newest.name}'", code=1)
    assert sorted(out.iterdir()) == before


def test_lines_that_a_crash_garbled_in_the_metrics_are_dropped(undisturbed, text, tmp_path):
    out = shutil.copytree(undisturbed(1), tmp_path / "out")
    checkpoints(out)[-1].unlink()
    (out / "config.json").unlink()  # It is written again.
    garbled = b'{"step": 3, "lo\n{"step": 5, "lo{"step": 6, "loss": 1.0}\n\x00\x00\xff\n'
    garbled += b'[1]\n{"loss": 1}\n"step"\n{"step": "x"}\n{"step": 4, "loss": 1.0'
    with open(out / "metrics.jsonl", "ab") as file:
        file.write(garbled)
    ran = run("--out", out, "--log-every", 1)
    assert ran.code == 0 and ran.err == "", ran
    assert [step for step, _ in losses(out)] == [*range(1, 101)]

    checkpoints(out) and [path.unlink() for path in checkpoints(out)]
    (out / "metrics.jsonl").write_bytes(b'{"st\0\0')  # a crash in the first line
    ran = run(*TINY, "--data", text, "--steps", 1, "--out", out)
    assert ran.code == 0 and [step for step, _ in losses(out)] == [1], ran


def test_a_run_of_version_0_2_continues_with_the_losses_of_version_0_2(tmp_path):
    """Version 0.2 wrote the folder and was stopped after step 20; another run of it was not stopped.

    Rounding errors differ between machines, and Muon amplifies them.
    """
    out, data = shutil.copytree(OLD / "run", tmp_path / "out"), OLD / "text.txt"
    before = losses(out)
    ran = run("--out", out, "--data", data, "--log-every", 1, "--device", "cpu")
    assert ran.code == 0 and ran.err == "" and "steps 21 to 50, continuing" in ran.out, ran
    unbroken = [json.loads(line) for line in (OLD / "unbroken.jsonl").read_text().splitlines()]
    expected = {line["step"]: line["loss"] for line in unbroken if "loss" in line}
    assert losses(out)[:20] == before and len(losses(out)) == len(expected) == 50
    assert dict(losses(out)) == pytest.approx(expected, rel=1e-2)
    (*_, last) = (line["val_loss"] for line in unbroken if "val_loss" in line)
    assert evaluations(out)[50] == pytest.approx(last, rel=1e-2)
    # That version had a single name for both kinds of Muon, and used the faster one if it was there.
    assert config(out)["optimizer"] == ("fast-muon" if EXTRAS else "muon")


# --- promise 7: stop ---


def test_a_stop_signal_in_a_step_that_is_skipped_saves_the_good_weights(
    monkeypatch, text, tmp_path
):
    at_loss(
        monkeypatch, lambda call, model: stop_at(12, call, model) or (math.nan if call >= 12 else 1)
    )
    # The last step has a line, although it is not one of every 100.
    flags = ["--data", text, "--save-every", 11, "--log-every", 100, "--out", tmp_path]
    ran = run(*TINY, *flags)
    assert ran.code == 3, ran
    before, after = (torch.load(path, weights_only=True) for path in checkpoints(tmp_path))
    assert before["step"] == 11 < after["step"] and same(before["model"], after["model"])
    last = metrics(tmp_path)[-1]
    assert (last["loss"], last["skipped"]) == (None, after["step"] - 11)


def steps(out: Path) -> list[int]:
    return [entry.step for entry in ckpt.list_checkpoints(f"{out}")]


def test_a_save_that_is_due_in_a_skipped_step_is_made_after_the_next_good_one(
    monkeypatch, text, tmp_path
):
    at_loss(monkeypatch, lambda call, _: math.nan if call in (4, 5) else 1)
    flags = ["--save-every", 4, "--steps", 7, "--eval-every", 99]
    assert run(*TINY, "--data", text, *flags, "--out", tmp_path).code == 0
    assert steps(tmp_path) == [6, 7]


def test_the_best_evaluation_is_saved_between_saves_and_no_worse_one_after_a_resume(
    monkeypatch, text, tmp_path
):
    trained = []

    def rate(call: int, model: Any) -> int | None:
        if not model.training:
            return 1 + abs(len(trained) - 6)  # best in step 6
        trained.append(stop_at(13, len(trained) + 1, model))

    at_loss(monkeypatch, rate)
    flags = ["--eval-every", 3, "--save-every", 10, "--steps", 20]
    assert [run(*TINY, "--data", text, *flags, "--out", tmp_path).code for _ in "ab"] == [3, 0]
    assert steps(tmp_path) == [6, 10, 14, 20]  # and not 15 or 18, after the resume
    best = min(evaluations(tmp_path).values())
    assert ckpt.list_checkpoints(f"{tmp_path}")[0].loss == pytest.approx(best, rel=1e-8)


def test_a_stop_signal_in_an_evaluation_ends_it_and_saves(monkeypatch, text, tmp_path):
    calls = []

    def stop(call: int, model: gpt.GPT) -> None:
        if not model.training:
            calls.append(call)
            signal.raise_signal(signal.SIGTERM)

    at_loss(monkeypatch, stop)
    monkeypatch.setattr(program, "EVAL_BATCH", 8)  # less than a window: batches of one window
    ran = run(*TINY, "--data", text, "--eval-every", 3, "--out", tmp_path)
    assert ran.code == 3 and "Stopped as asked after step 3 of" in ran.out, ran
    assert len(calls) <= 2, ran  # of 34; after the signal, one more can begin
    assert evaluations(tmp_path) == {} and state(tmp_path)["step"] == 3


@pytest.mark.parametrize("more", [[], ["--spawn", 2, "--timeout", 5]], ids=["python", "spawn"])
def test_a_full_pipe_holds_up_neither_the_training_nor_the_save_after_a_stop_signal(
    text, tmp_path, more
):
    """As with `| less`. Ranks that wait for longer than --timeout would end."""
    launcher = ["bash", "-c", 'exec "$0" run.py "$@" 2>&1', sys.executable]  # stderr is full, too
    flags = ["--data", text, *ENDLESS]
    with Program(*TINY, *flags, *more, "--out", tmp_path, launcher=launcher) as started:
        fcntl.fcntl(started.process.stdout, fcntl.F_SETPIPE_SZ, 4096)  # about 45 lines
        wait_for(lambda: (tmp_path / "metrics.jsonl").exists(), "the training")
        wait_for(lambda: len(losses(tmp_path)) > 200, "200 steps", 120)
        started.process.terminate()
        assert started.process.wait() == 3
        assert state(tmp_path)["step"] == losses(tmp_path)[-1][0] > 200


def test_metrics_that_block_hold_up_neither_the_training_nor_the_save(text, tmp_path):
    flags = ["--data", text, *ENDLESS]
    with Program(*TINY, *flags, "--out", tmp_path) as started:
        started.read_lines(3)
        os.mkfifo(tmp_path / "fifo")
        (tmp_path / "fifo").rename(tmp_path / "metrics.jsonl")  # opening it would take for ever
        started.read_lines(20)
        started.process.terminate()
        ran = started.finish()
    assert ran.code == 3 and ran.err == "" and state(tmp_path)["step"] > 20, ran


def test_a_closed_terminal_stops_all_ranks_after_a_save(text, tmp_path):
    flags = [*TINY, "--data", text, *ENDLESS, "--spawn", 2]
    code, _ = on_a_terminal([*flags, "--out", tmp_path], [("step 5/", None)])
    assert code == 3 and state(tmp_path)["step"] >= 5


IMPORTING = f"""
import builtins, os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
import run

import_, number = builtins.__import__, getattr(signal, sys.argv.pop(1))

def interrupted(name, *args, **more):
    if name.startswith("torch.jit"):
        os.kill(os.getpid(), number)
        builtins.__import__ = import_
    return import_(name, *args, **more)

builtins.__import__ = interrupted
run.program()
"""


@pytest.mark.parametrize("number, command, code", [("SIGINT", "sample", 130), ("SIGTERM", "", 3)])
def test_a_signal_in_the_import_of_torch_ends_a_command_or_a_training_after_one_step(
    text, tmp_path, number, command, code
):
    """A KeyboardInterrupt could get lost there, or leave torch incomplete."""
    args = [command] if command else [*TINY, "--data", text]
    launcher = [sys.executable, "-c", IMPORTING, number]
    ran = run(*args, "--out", tmp_path / "out", launcher=launcher)
    assert ran.code == code and ran.err == "" and (code == 3) == ("after step 1 of" in ran.out), ran


def on_a_terminal(args: list[object], answers: list[tuple[str, bytes | None]]) -> tuple[int, str]:
    """Run the program in a terminal, and type each answer when its text appears. Return its exit code and output.

    An answer None closes the terminal.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execve(sys.executable, [*PYTHON, *map(str, args)], {**ENVIRONMENT, "TERM": "xterm"})
    watchdog = threading.Timer(600, os.kill, (pid, signal.SIGKILL))
    watchdog.start()
    heard = ""
    with suppress(OSError):  # at the end of the program
        while piece := os.read(terminal, 1 << 16):
            heard += piece.decode()
            if answers and answers[0][0] in heard:
                if (answer := answers.pop(0)[1]) is None:
                    break
                os.write(terminal, answer)
    os.close(terminal)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    watchdog.cancel()
    return code, heard


def test_ctrl_c_in_a_terminal_is_answered_once_and_a_second_one_ends_the_step(tmp_path):
    """The step would take far longer than this test. The terminal sends the signal to all three processes."""
    data = tmp_path / "data.txt"
    data.write_bytes(bytes(4_000_000))
    endless = "--batch-size 100000 --accum 10000 --tokenizer byte --spawn 2".split()
    answers = [("Training: ", b"\x03"), (program.STOPPING, b"\x03")]
    code, heard = on_a_terminal([*TINY, "--data", data, "--out", tmp_path, *endless], answers)
    assert code == 130 and not answers and heard.count(program.STOPPING) == 1, heard
    assert "Traceback" not in heard, heard


# --- data ---


def test_bytes_can_be_trained_on_sampled_and_evaluated(tmp_path):
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("Straße, café, 東京. " * 200)
    ran = run(*TINY, "--data", text, "--out", out, "--tokenizer", "byte", "--steps", 30)
    assert ran.code == 0 and state(out)["model"]["embedding.weight"].shape == (256, 16), ran
    ask = ["sample", "--out", out, "--max-new-tokens", 20]
    greedy = run(*ask, "--prompt", "東", "--temperature", 0)
    assert greedy.code == 0 and greedy.out.startswith("東"), greedy
    three = run(*ask, "--prompt", "東", "--num-samples", 3, "--temperature", 0)
    assert three.out == f"{'-' * 20}\n".join([greedy.out] * 3), three
    three = run(*ask, "--num-samples", 3, "--seed", 1)
    assert three.code == 0 and len(set(three.out.split("-" * 20))) == 3, three
    text.write_text("東京, café. " * 150)  # other data than that of the training
    ran = run("eval", "--out", out, "--data", text)
    assert ran.code == 0 and f"over {len(text.read_bytes()) - 1:,} tokens" in ran.out
    bits = re.search(r"(\S+) bits per token, (\S+) bits per byte", ran.out)
    assert bits and bits[1] == bits[2], ran


def test_bits_per_byte_compare_tokenizers(tmp_path):
    """The characters have 3, 3, 1, 1, 1, 1, 1, 2 and 1 bytes. The first of all is not predicted."""
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("東京, café." * 150)
    assert run(*TINY, "--data", text, "--out", out, "--steps", 5).code == 0
    ran = run("eval", "--out", out, "--data", text)
    numbers = re.search(r"(\S+) nats per token, \S+ bits per token, (\S+) bits per byte", ran.out)
    tokens, size = len(text.read_text()) - 1, len(text.read_bytes()) - 3
    assert numbers, ran
    expected = float(numbers[1]) / math.log(2) * tokens / size
    assert float(numbers[2]) == pytest.approx(expected, abs=2e-4)


def test_token_ids_can_be_trained_on_sampled_and_evaluated(tmp_path):
    out, ids = tmp_path / "out", tmp_path / "ids.npy"
    np.save(ids, np.arange(3000, dtype=np.uint16) % 7)
    assert run(*TINY, "--data", ids, "--out", out, "--steps", 60, "--vocab", 77).code == 0
    ran = run("eval", "--out", out)
    assert ran.code == 0 and f"loss {evaluations(out)[60]:.4f} " in ran.out, ran
    assert "over 299 tokens" in ran.out and "per byte" not in ran.out
    greedy = ["sample", "--out", out, "--max-new-tokens", 4, "--temperature", 0]
    assert run(*greedy, "--prompt", "1 2 3 ").out == "1 2 3 4 5 6 0 \n"
    assert run(*greedy).out == "0 1 2 3 4 \n"  # without a prompt
    assert_one_line(run(*greedy, "--prompt", "77"), "--prompt '77'", "below 77")
    assert_one_line(run(*greedy, "--prompt", "the"), "'the' is not a token id")
    assert_one_line(run("--out", out, "--vocab", 64), "--vocab 64 contradicts .*--vocab 77")
    np.save(ids, np.full(100, 77, dtype=np.uint16))
    assert_one_line(run("eval", "--out", out), "--out .* has a run with other data: .*ids.npy")
    assert_one_line(run("eval", "--out", out, "--data", ids), "the vocabulary ends at 76")


@pytest.mark.parametrize(
    "change, reason", [("changed", "was changed"), ("renamed", "No such file")]
)
def test_data_that_changes_is_a_warning_in_a_training_and_an_error_in_an_evaluation(
    monkeypatch, tmp_path, change, reason
):
    """A training has the data in its memory, or mapped, and must not end without a save."""
    data, out = tmp_path / "ids.bin", tmp_path / "out"
    data.write_bytes((np.arange(3000, dtype=np.uint16) % 7).tobytes())
    flags = [*TINY, "--data", data, "--out", out, "--save-every", 3]
    assert run(*flags, "--steps", 1).code == 0

    def do(call: int, model: object) -> None:
        if change == "changed":
            data.write_bytes(data.read_bytes())
        elif data.exists():
            data.rename(tmp_path / "other.bin")

    at_loss(monkeypatch, do)
    assert_one_line(run("eval", "--out", out), f"{reason}.*")
    if change == "renamed":
        (tmp_path / "other.bin").rename(data)
    ran = run(*flags, "--steps", 9)
    assert ran.code == 0 and [int(path.name[5:13]) for path in checkpoints(out)] == [3, 6, 9], ran
    assert re.fullmatch(
        f"Warning: .*{reason}.*ids.bin.*\n|Warning: .*ids.bin.*{reason}.*\n", ran.err
    ), ran


def two_texts(folder: Path) -> list[Path]:
    """Write two texts of other characters into files with a space and a colon in their names."""
    paths = [folder / "a b:1.txt", folder / "a b:2.txt"]
    for path, words in zip(paths, ("one and two ", "three and four ")):
        path.write_text(words * 99)
    return paths


GIVEN = {  # more of the command line, of the environment, and of a TOML file, for the text {0} or both
    "twice": ("--data '{1}' --data '{0}'", "", ""),
    "a list in the file": ("", "", "data = ['{1}', '{0}']"),
    "a text in the file": ("", "", "data = '{0}'"),
    "a variable": ("", "{0}", ""),
    "the command line wins": ("--data '{1}' --data '{0}'", "no/such", "data = 'no/such'"),
}


@pytest.mark.parametrize("how", GIVEN)
def test_all_data_that_is_given_is_read_in_this_order(how, tmp_path, monkeypatch):
    """A second --data replaced the first without a word."""
    paths = two_texts(tmp_path)
    line, variable, file = (part.format(*paths) for part in GIVEN[how])
    (tmp_path / "a.toml").write_text(file)
    if variable:
        monkeypatch.setitem(ENVIRONMENT, "DDPKIT_DATA", variable)
    flags = ["--config", tmp_path / "a.toml", *TINY, "--steps", 1, "--out", tmp_path / "out"]
    ran = run(*flags, *shlex.split(line))
    assert ran.code == 0, ran
    expected = [f"{path}" for path in (paths[::-1] if "{1}" in "".join(GIVEN[how]) else paths[:1])]
    assert (
        config(tmp_path / "out")["data"] == [*state(tmp_path / "out")["config"]["data"]] == expected
    )
    assert state(tmp_path / "out")["data"] == chardata.read(expected, "char").digest


def test_a_run_continues_in_another_working_folder(tmp_path):
    flags = ["--data", "a.txt", "--val-data", "*.md", "--steps", 2, "--out", tmp_path / "out"]
    (tmp_path / "a.txt").write_text("one and two " * 99)
    (tmp_path / "a.md").write_text("one and three " * 9)
    script = [sys.executable, f"{ROOT}/run.py"]
    assert run(*TINY, *flags, launcher=script, root=tmp_path).code == 0
    ran = run("--out", tmp_path / "out", "--steps", 3)
    assert ran.code == 0 and state(tmp_path / "out")["step"] == 3, ran
    assert config(tmp_path / "out")["val_data"] == [f"{tmp_path}/*.md"]
    assert run("eval", "--out", tmp_path / "out").code == 0


@pytest.mark.parametrize("data", ["one", "none"])
def test_a_checkpoint_of_version_0_3_has_one_text_or_none(data, text, tmp_path):
    given = ["--data", text] if data == "one" else []
    assert run(*TINY, *given, "--steps", 1, "--out", tmp_path).code == 0
    saved = state(tmp_path)
    saved["config"]["data"] = f"{text}" if given else None
    del saved["config"]["val_data"]
    ckpt.save(f"{tmp_path}", saved | {"step": 2}, 2)
    for more in (["--steps", 3], ["--steps", 4, *given]):
        ran = run("--out", tmp_path, *more)
        assert ran.code == 0 and state(tmp_path)["step"] == more[1], ran


def test_data_of_which_version_0_3_hashed_a_part_is_still_known(tmp_path):
    ids = np.arange(17 << 20, dtype=np.uint32).astype(np.uint8)
    np.save(tmp_path / "ids.npy", ids)
    flags = ["--data", tmp_path / "ids.npy", "--eval-tokens", 99, "--out", tmp_path / "out"]
    assert run(*TINY, *flags, "--steps", 1).code == 0
    old = chardata.digest([ids], whole=0)
    assert state(tmp_path / "out")["data"] != old
    ckpt.save(f"{tmp_path}/out", state(tmp_path / "out") | {"data": old, "step": 2}, 2)
    assert run(*TINY, *flags, "--steps", 3).code == 0
    assert state(tmp_path / "out")["data"] == chardata.digest([ids])
    ids[(1 << 20) + 99] ^= 1  # not in the part
    np.save(tmp_path / "ids.npy", ids)
    assert_one_line(
        run(*TINY, *flags, "--steps", 4), "^Error: --out .*/out has a run with other data"
    )


@pytest.mark.parametrize("spawn", [[], ["--spawn", 2]], ids=str)
def test_validation_data_of_its_own_is_all_and_only_that_is_evaluated(spawn, tmp_path):
    """Otherwise the end of the last file is used, and a test.txt beside train.txt is trained on."""
    train, val = two_texts(tmp_path)
    out, flags = tmp_path / "out", [*TINY, "--data", train, "--eval-tokens", 100, "--steps", 2]
    ran = run(*flags, "--val-data", val, "--out", out, *spawn)
    assert ran.code == 0 and " over 100 tokens\n" in ran.out, ran
    saved, length = state(out), len(train.read_text())
    assert saved["vocabulary"]["chars"] == "".join(
        sorted({*train.read_text(), *val.read_text()} | {"\n"})
    )
    assert metrics(out)[-1]["step"] == 2 and run("--out", out, "--steps", 3).code == 0
    windows = length // 16 - 1  # of all training data
    assert metrics(out)[-2]["epoch"] == round(3 / math.ceil(windows / 8), 4)
    evaluated = run("eval", "--out", out).out
    assert f", over {len(val.read_text()) - 1:,} tokens" in evaluated
    assert run("eval", "--out", out, "--data", val).out == evaluated
    val.write_text(val.read_text()[:-1])
    for more in ([], ["--steps", 9, "--data", train, "--val-data", val]):
        ran = run(*(more or ["eval"]), "--out", out)
        assert_one_line(
            ran, "^Error: --out .*/out has a run with other data: .*val-data .*is not the"
        )
    none = run(*flags, "--out", tmp_path / "none")
    assert none.code == 0
    ran = run(*flags, "--val-data", train, "--out", tmp_path / "none")
    assert_one_line(
        ran, "--out .*/none has a run with other data: ", "is in --data and in --val-data"
    )


def test_one_validation_token_is_no_validation_data(text, tmp_path):
    ran = run(*TINY, "--data", text, "--val-fraction", 0.0002, "--steps", 2, "--out", tmp_path)
    assert ran.code == 0 and "validation loss" not in ran.out and not evaluations(tmp_path), ran
    assert_one_line(run("eval", "--out", tmp_path), "there is no validation data")


# --- the output and the files in --out ---


def test_metrics_and_printed_lines_have_the_documented_values(fifty, text):
    ran, out = fifty("--optimizer adamw --spawn 3 --accum 2")
    lines = metrics(out)
    steps = [line for line in lines if "val_loss" not in line]
    keys = "step epoch tokens loss grad_norm lr tokens_per_s mfu skipped time".split()
    assert all({*line} == {*keys} and None not in line.values() for line in steps)
    assert [line.keys() for line in lines if line not in steps] == [
        {"step", "val_loss", "time"}
    ] * 2
    assert {line["skipped"] for line in steps} == {0}
    assert [line["tokens"] for line in steps[29:32]] == [300 * 16, 302 * 16, 312 * 16]
    assert [steps[i]["epoch"] for i in (30, 49)] == [1.0, round(50 / 31, 4)]
    # The learning rate goes up for 20 steps, and from there down to 0.0006.
    rates = [0.003 * min((i + 1) / 20, 1 - 0.8 * max(0, i - 20) / 30) for i in range(50)]
    assert [line["lr"] for line in steps] == pytest.approx(rates, rel=1e-12)
    # The seconds that follow from the rates cannot be more than those since config.json was written.
    counts = [0, *(line["tokens"] for line in steps)]
    seconds = sum((b - a) / line["tokens_per_s"] for a, b, line in zip(counts, counts[1:], steps))
    passed = lines[-1]["time"] - (out / "config.json").stat().st_mtime
    assert 0 < seconds <= 1.01 * passed + 0.01
    shown = [line for line in ran.out.splitlines() if " eta " in line]
    for line, record in zip(shown, steps, strict=True):
        form = (
            "step {step}/50  epoch {epoch:.2f}  loss {loss:.4f}  lr {lr:.1e}  {tokens_per_s:,.0f} "
        )
        start, eta = line.split("tokens/s  eta ")
        assert start == form.format(**record)
        hours, minutes, left = map(int, eta.split(":"))
        expected = (counts[-1] - record["tokens"]) / record["tokens_per_s"]
        assert 3600 * hours + 60 * minutes + left == pytest.approx(expected, abs=0.6)
    expected = {
        "data": [f"{text}"],
        "val_data": [],
        "batch_size": 10,
        "tokenizer": "char",
        "ranks": 3,
        "steps": 50,
    }
    expected |= {"device": "cpu", "peak_flops_source": "measured", "torch": torch.__version__}
    expected |= {"float32_precision": "highest"}
    assert expected.items() <= config(out).items() and config(out)["peak_flops"] > 1e6
    very_long = dict(step=1, epoch=0.0, loss=3.0, lr=0.1, tokens_per_s=1.0)
    assert program.format_record(very_long, 10**17, 1e17).startswith("step 1/1")


def test_the_default_rate_falls_with_the_width_and_the_steps_and_stays_at_a_resume(text, tmp_path):
    """The measured best rate falls with both. A run that is extended must not jump to another one."""
    flags = [*TINY, "--data", text, "--out", tmp_path, "--log-every", 1, "--warmup", 0.25]
    at = flags.index("--lr")
    del flags[at : at + 2]
    rate = 5 / (16 * 16**0.25)
    for steps in (16, 20):
        assert run(*flags, "--steps", steps).code == 0
        assert config(tmp_path)["lr"] == pytest.approx(rate)
    rates = [line["lr"] for line in metrics(tmp_path) if "lr" in line]
    rising, falling = (
        [rate * n / 4 for n in (1, 2, 3, 4)],
        [rate * n / 12 for n in range(12, 0, -1)],
    )
    assert rates[:16] == pytest.approx(rising + falling)
    assert rates[16:] == pytest.approx([rate * n / 15 for n in (4, 3, 2, 1)])


def test_cosine_and_constant_schedules_decay_to_min_lr_and_constant_does_so_in_the_last_fifth(
    text, tmp_path
):
    flags = [*TINY, "--data", text, "--steps", 20, "--warmup", 0, "--lr", 0.004, "--min-lr", 0.001]
    rates = {}
    for name in ("cosine", "constant"):
        ran = run(*flags, "--out", tmp_path / name, "--schedule", name, "--log-every", 1)
        assert ran.code == 0, ran
        rates[name] = [line["lr"] for line in metrics(tmp_path / name) if "lr" in line]
    wave = [0.001 + 0.003 * (1 + math.cos(math.pi * step / 20)) / 2 for step in range(20)]
    assert rates["cosine"] == pytest.approx(wave, rel=1e-9)
    line = [0.004] * 16 + [0.004, 0.00325, 0.0025, 0.00175]
    assert rates["constant"] == pytest.approx(line, rel=1e-9)


def test_files_are_made_with_the_umask_of_the_user(text, tmp_path):
    before = os.umask(0o077)
    run(*TINY, "--data", text, "--steps", 1, "--out", tmp_path / "out")
    os.umask(before)
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()]
    assert modes == [0o600] * 4 and (tmp_path / "out").stat().st_mode & 0o777 == 0o700


def test_checkpoint_activations_computes_the_blocks_again_with_the_same_dropout(
    monkeypatch, text, tmp_path
):
    calls, checkpoint = [], gpt.checkpoint
    monkeypatch.setattr(gpt, "checkpoint", lambda *a, **b: calls.append(a) or checkpoint(*a, **b))
    flags = [*TINY, "--data", text, "--steps", 9, "--dropout", 0.5, "--log-every", 1]
    for name, more in {"a": [], "b": ["--checkpoint-activations"]}.items():
        assert calls == [] and run(*flags, "--out", tmp_path / name, *more).code == 0
    assert len(calls) == 9 and same_training(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "fast-muon"][: 2 + EXTRAS])
def test_matrices_and_embeddings_are_decayed_but_not_biases_and_norms(optimizer):
    model = gpt.build(gpt.Config(5, 4, 2, 2, 8, arch="gpt2"), seed=0)
    flags = program.Flags(optimizer=optimizer, weight_decay=0.3, embedding_lr=3, momentum=0.7)
    for dtype in ("float32", "float16"):
        flags = replace(flags, dtype=dtype)
        optimizers = program.make_optimizers(model, flags, 0.5, ddp_setup.World(0, 0, 1, 1))
        groups = [group for each in optimizers for group in each.param_groups]
        decays = {p: group["weight_decay"] for group in groups for p in group["params"]}
        assert decays == {p: 0.3 * (p.ndim > 1) for p in model.parameters()}
        rates = {group["lr"] for group in groups}
        if optimizer == "adamw":
            assert rates == {0.5}
            continue
        assert rates == {0.5, 1.5} and (groups[-1]["lr"], groups[-1]["momentum"]) == (0.5, 0.7)
        assert groups[-1]["adjust_lr_fn"] == "match_rms_adamw"
        if optimizer == "fast-muon":  # It computes in float32 only in a float32 run.
            assert optimizers[-1].dtype == getattr(torch, dtype.replace("float16", "bfloat16"))


# --- what goes wrong ---


def test_a_run_that_diverges_stops_with_one_line_and_keeps_the_last_good_checkpoint(text, tmp_path):
    wild = "--lr 1e7 --clip 0 --save-every 2 --steps 20".split()
    ran = run(*TINY, "--data", text, *wild, "--out", tmp_path)
    message = re.search(r"not finite 5 times in a row, up to step (\d+)", ran.err)
    # It would diverge again.
    assert ran.code == 2 and message and ran.err.count("\n") == 1, ran
    assert state(tmp_path)["step"] <= int(message[1]) - 5
    assert all(tensor.isfinite().all() for tensor in state(tmp_path)["model"].values())


@pytest.mark.parametrize(
    "error, expected",
    [
        ("a bug", r"Error on rank 0: RuntimeError\('a bug'\)\nTraceback(.*\n)+"),
        (
            "CUDA out of memory. T\n\nx",
            r"Error on rank 0: out of memory: a higher .*memory\. T\)\n",
        ),
    ],
)
def test_an_unexpected_error_has_its_rank_and_a_hint_or_a_traceback(
    monkeypatch, text, tmp_path, error, expected
):
    def fail(call: int, model: object) -> None:
        raise RuntimeError(error)

    at_loss(monkeypatch, fail)
    ran = run(*TINY, "--data", text, "--out", tmp_path)
    assert ran.code == 1 and re.fullmatch(expected, ran.err), ran


def test_saves_and_metrics_that_fail_are_warnings_but_the_last_save_must_succeed(
    monkeypatch, text, tmp_path
):
    def fail(*_: object) -> None:
        raise OSError("no space")

    program.warn_once.cache_clear()
    monkeypatch.setattr(ckpt, "save", fail)
    monkeypatch.setattr(ckpt, "append_text", fail)
    ran = run(*TINY, "--data", text, "--steps", 2, "--log-every", 1, "--out", tmp_path)
    assert ran.code == 1 and "step 2/2" in ran.out and "Done" not in ran.out, ran
    assert ran.err == (
        "Warning: metrics not written: no space; training continues\n"
        "Warning: checkpoint not written: no space; the checkpoints before it are untouched\n"
        "Error: the checkpoint of step 2 was not written\n"
    )


def test_a_run_whose_folder_was_deleted_writes_nothing_into_that_of_the_next_run(
    monkeypatch, text, tmp_path
):
    """Otherwise the next run, started again, would continue from the weights of this one."""
    out = tmp_path / "out"

    def start_another(call: int, model: object) -> None:
        if call == 5:
            shutil.rmtree(out)
            ckpt.make_folder(f"{out}")
            ckpt.lock(f"{out}").close()
            ckpt.write_text(f"{out}", "metrics.jsonl", "")

    at_loss(monkeypatch, start_another)
    flags = ["--steps", 8, "--save-every", 9, "--log-every", 1]
    ran = run(*TINY, "--data", text, *flags, "--out", out)
    assert ran.code == 1 and "step 8/8" in ran.out, ran
    reason = f"{re.escape(f'{out}')}: someone has deleted or replaced .*"
    lines = f"metrics not written: {reason}", f"checkpoint not written: {reason}"
    lines = *(f"Warning: {line}" for line in lines), "Error: the checkpoint of step 8 was not .*"
    assert re.fullmatch("".join(f"{line}\n" for line in lines), ran.err), ran
    assert {path.name: path.stat().st_size > 0 for path in out.iterdir()} == {
        ".lock": True,
        "metrics.jsonl": False,
    }


@pytest.mark.parametrize("ends_at", [20, None], ids=["slow", "hangs"])
def test_a_save_that_takes_longer_than_the_timeout_costs_a_warning(
    monkeypatch, text, tmp_path, ends_at
):
    """The save of step 2 ends in step 20 of 30, or only after the run."""
    program.warn_once.cache_clear()
    may_end, ended, save = threading.Event(), threading.Event(), ckpt.save

    def slow_save(*args: Any) -> Any:
        may_end.wait()
        result = save(*args)
        ended.set()
        return result

    def let_it_end(call: int, model: object) -> None:
        if call == ends_at:
            may_end.set()
            ended.wait()

    monkeypatch.setattr(ckpt, "save", slow_save)
    at_loss(monkeypatch, let_it_end)
    flags = ["--steps", 30, "--save-every", 2, "--timeout", 0.3, "--eval-every", 99]
    ran = run(*TINY, "--data", text, *flags, "--out", tmp_path)
    may_end.set()
    warning = (
        "Warning: a save takes longer than 0.7 of --timeout; until it ends, nothing else is saved\n"
    )
    if ends_at:
        assert (ran.code, ran.err) == (0, warning) and state(tmp_path)["step"] == 30, ran
    else:
        error = "Error: the checkpoint of step 30 was not written\n"
        assert (ran.code, ran.err) == (1, warning + error) and "Done" not in ran.out, ran


def test_all_lines_of_metrics_are_written_before_an_error_ends_the_run(monkeypatch, text, tmp_path):
    append = ckpt.append_text

    def append_slowly(*args: str) -> None:
        time.sleep(0.1)
        append(*args)

    monkeypatch.setattr(ckpt, "append_text", append_slowly)
    at_loss(monkeypatch, lambda call, model: 1 / (call < 5))
    ran = run(*TINY, "--data", text, "--log-every", 1, "--out", tmp_path)
    assert ran.code == 1 and "ZeroDivisionError" in ran.err, ran
    assert [step for step, _ in losses(tmp_path)] == [1, 2, 3, 4]


SAVE_SLOWLY_AND_FAIL = f"""
import atexit, sys, time, torch
sys.path.insert(0, {str(ROOT)!r})
import ckpt, gpt, run

save, loss, steps = ckpt.save, gpt.loss, []

def slow(*args):
    time.sleep(1)
    print("saved with", torch.get_num_threads(), flush=True)
    return save(*args)

def fail(model, batch):
    steps.append(1 / (len(steps) < 8))
    return loss(model, batch)

ckpt.save, gpt.loss = slow, fail
atexit.register(lambda: print("trained with", torch.get_num_threads()))
run.program()
"""


def test_a_run_that_fails_first_completes_the_save_that_is_running(text, tmp_path):
    """The thread that saves has one OpenMP thread: more threads than CPUs make the training slower."""
    how = {
        "launcher": [sys.executable, "-c", SAVE_SLOWLY_AND_FAIL],
        "env": {"OMP_NUM_THREADS": "2"},
    }
    ran = run(*TINY, "--data", text, "--save-every", 7, "--out", tmp_path / "out", **how)
    assert ran.code == 1 and "Error on rank 0: ZeroDivisionError" in ran.err, ran
    assert (
        ran.out.endswith("saved with 1\ntrained with 2\n") and state(tmp_path / "out")["step"] == 7
    )


# --- sample and eval ---


def test_a_sample_depends_only_on_its_seed_and_the_loss_is_that_of_the_training(undisturbed):
    ask = ["sample", "--out", undisturbed(1), "--prompt", "the "]
    greedy, longer = (run(*ask, "--temperature", 0, "--max-new-tokens", n) for n in (30, 40))
    assert greedy.code == 0 and greedy.err == "" and greedy.out.startswith("the "), greedy
    assert (len(greedy.out), len(longer.out)) == (35, 45) and longer.out.startswith(greedy.out[:-1])
    ask = [*ask[:3], "--max-new-tokens", 40]
    defaults = ["--prompt", "\n", "--temperature", 0.8, "--top-k", 0]
    choices = [["--seed", 1], ["--seed", 1, *defaults], ["--seed", 2], [], []]
    texts = [run(*ask, *more).out for more in choices]
    assert texts[0] == texts[1] and len({*texts}) == 4
    ran, last = run("eval", "--out", undisturbed(1)), evaluations(undisturbed(1))[100]
    bits = f"{last / math.log(2):.4f}"  # The text is ASCII, with one byte per token.
    assert ran.out == (  # 538: all but the first of 539
        f"loss {last:.4f} nats per token, {bits} bits per token, {bits} bits per byte, "
        f"perplexity {math.exp(last):.4f}, over 538 tokens, in float32\n"
    )


def test_sample_and_eval_take_the_newest_the_best_or_a_named_checkpoint(undisturbed, tmp_path):
    """The folder's own name may be that of a choice, too."""
    out = Path(shutil.copytree(undisturbed(1), tmp_path / "step-7"))
    entries = ckpt.list_checkpoints(f"{out}")
    best = min(entries, key=lambda entry: entry.loss)
    old, new = entries[0], entries[-1]
    assert len({old, new}) == 2
    words = ["--max-new-tokens", 30, "--seed", 1]

    def loss(chosen: object) -> str:
        ran = run("eval", "--out", chosen)
        assert ran.code == 0, ran
        return ran.out.split()[1]

    def text(chosen: object) -> str:
        return run("sample", "--out", chosen, *words).out

    assert loss(out / "best") == f"{best.loss:.4f}" and text(out) == text(out / new.name)
    assert text(out / f"step-{old.step}") == text(out / old.name) != text(out)
    for wrong in ("step-9999", f"step-{old.step}-other.pt"):
        assert_one_line(run("sample", "--out", out / wrong), f"{wrong}: there is no checkpoint")
    (out / old.name).write_bytes(b"damaged")
    assert_one_line(run("eval", "--out", out / old.name), "damaged: the content does not match")


def test_a_sample_ends_before_the_stop_text_and_the_first_of_three_is_the_single_one(undisturbed):
    ask = ["sample", "--out", undisturbed(1), "--prompt", "the ", "--max-new-tokens", 60]
    whole = run(*ask, "--seed", 1).out
    assert run(*ask, "--seed", 1, "--num-samples", 3).out.startswith(f"{whole}{'-' * 20}\n")
    new = whole[len("the ") : -1]
    for stop in {new[0], new[7:9], new[-3:], "the " + new[:2]}:
        cut = new[: new.index(stop)] if stop in new else new
        assert run(*ask, "--seed", 1, "--stop", stop).out == f"the {cut}\n", stop
    assert run(*ask, "--top-p", 1e-9).out == run(*ask, "--temperature", 0).out


def test_eval_prints_a_loss_of_which_the_perplexity_is_too_large_for_a_float(text, tmp_path):
    wild = "--steps 12 --warmup 0 --lr 200 --min-lr 200 --clip 0 --weight-decay 0".split()
    ran = run(*TINY, *wild, "--data", text, "--out", tmp_path)
    assert ran.code == 0 and evaluations(tmp_path)[12] > 710, ran
    assert ", perplexity inf, over " in run("eval", "--out", tmp_path).out


def test_an_evaluation_of_the_first_tokens_is_exact(text, tmp_path):
    flags = ["--data", text, "--steps", 12, "--eval-every", 6, "--eval-tokens", 100]
    ran = run(*TINY, *flags, "--out", tmp_path)
    assert ran.code == 0 and ran.out.count(" over 100 tokens\n") == 2, ran
    corpus = chardata.read([f"{text}"], "char")
    ids = np.concatenate(chardata.split(corpus.tokens, 0.1)[1])[:101].astype("int64")
    saved = state(tmp_path)
    model = gpt.build(program.model_config(saved["config"]), seed=0).eval()
    model.load_state_dict(saved["model"])
    total = 0.0
    for start in range(0, 100, 16):  # windows of --block-size, the last one is shorter
        row = torch.from_numpy(ids[start : min(start + 16, 100) + 1])[None]
        total += gpt.loss(model, (row[:, :-1], row[:, 1:]))[0].item()
    assert evaluations(tmp_path)[12] == pytest.approx(total / 100, rel=1e-5)
    named = ckpt.list_checkpoints(f"{tmp_path}")[-1].loss
    assert named == float(f"{evaluations(tmp_path)[12]:.9g}")
    assert " over 100 tokens\n" in run("--out", tmp_path, "--steps", 14).out
    assert ", over 538 tokens" in run("eval", "--out", tmp_path).out


def test_of_two_ranks_one_prints_a_loss_or_the_mistake(undisturbed, fifty, tmp_path):
    def evaluate(*outs: Path) -> list[Ran]:
        return on_two_ranks("eval", env=[{"DDPKIT_OUT": f"{out}"} for out in outs])

    ours, other = undisturbed(1), fifty("--optimizer auto")[1]
    # Rank 1 gets the model from rank 0.
    assert evaluate(ours, other) == [Ran(0, run("eval", "--out", ours).out, ""), Ran(0, "", "")]
    codes, printed, errors = zip(*evaluate(tmp_path, ours))
    assert codes == (2, 2) and printed == ("", ""), errors
    assert re.fullmatch("Error: .* there is no checkpoint.*\n", "".join(errors)), errors


# --- settings, terminals and pipes ---


def test_help_lists_every_flag_and_does_not_import_torch():
    ran = run("--help", launcher=[sys.executable, "-X", "importtime", "run.py"])
    assert ran.code == 0 and " click" in ran.err
    assert not re.search(r"\| +(torch|numpy|gpt|loop|ckpt|chardata)\b", ran.err)
    shown = {*re.findall(r"^  (?:-h, )?(--[\w-]+)", ran.out, re.MULTILINE)}
    flags = {f"--{name.replace('_', '-')}" for name in vars(program.Flags())}
    assert shown == {*flags, "--config", "--help", "--version"}
    assert re.search(r"^  eval +Print", ran.out, re.M) and re.search(r"^  sample +", ran.out, re.M)


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(
    text, tmp_path, monkeypatch
):
    file = tmp_path / "a.toml"
    file.write_text(f"steps = 9\nlr = 0.1\nclip = 0.5\nmin-lr = 0.01\ndata = '{text}'\nseed = 1\n")
    for name, value in {"STEPS": 8, "LR": 0.2, "EMBD": 32, "OUT": tmp_path / "out"}.items():
        monkeypatch.setitem(ENVIRONMENT, f"DDPKIT_{name}", f"{value}")
    assert run("--config", file, *TINY, "--steps", 2, "--lr", 0.3).code == 0
    expected = {"steps": 2, "lr": 0.3, "clip": 0.5, "min_lr": 0.01, "embd": 16, "seed": 1}
    assert expected.items() <= config(tmp_path / "out").items()
    assert run("eval").code == 0  # with DDPKIT_OUT
    monkeypatch.delitem(ENVIRONMENT, "DDPKIT_OUT")
    # The commands share only these two flags. The run's data is not the data to evaluate on.
    file.write_text(f"out = '{tmp_path}/out'\ndata = '{tmp_path}'\nsteps = 'not for eval'\n")
    assert run("--config", file, "eval").out == run("eval", "--out", tmp_path / "out").out != ""


def test_spawn_without_a_number_starts_a_process_per_cpu_core(monkeypatch):
    started = []
    monkeypatch.setattr(ddp_setup, "spawn", lambda *args, **more: started.append((args, more)) or 7)
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *_: None)  # not in this process
    assert program.main(["--spawn", "--timeout", "5", "--device", "cpu"]) == 7
    assert started == [((program.program, ddp_setup.available_cpus()), {"timeout": 5.0})]


def test_ranks_with_different_data_end_with_one_line(tmp_path):
    """Under torchrun on two machines, the same name can be another file."""
    roots = [tmp_path / rank for rank in "01"]
    for root in roots:
        shutil.copytree(ROOT, root, ignore=lambda _, names: [n for n in names if n[-3:] != ".py"])
        (root / "text.txt").write_text(f"of rank {root.name} " * 99)
    ended = on_two_ranks(*TINY, "--data", "text.txt", "--out", tmp_path / "out", roots=roots)
    assert {ran.code for ran in ended} <= {1, 2}, ended
    errors = "".join(ran.err for ran in ended)
    assert errors == "Error: rank 1: --data text.txt: is not the same as on rank 0\n", ended
    assert not (tmp_path / "out").exists()


ABORT = """
import os, run, warnings
def main():
    print(os.environ.get("GOMP_SPINCOUNT"), flush=True)
    warnings.warn("a text")
    os.abort()
run.main = main
run.program()
"""


@pytest.mark.parametrize("policy, count", [(None, "10000"), ("passive", "None")])
def test_warnings_are_one_line_a_fatal_signal_has_a_traceback_and_openmp_waits_only_a_moment(
    policy, count
):
    env, launcher = {"OMP_WAIT_POLICY": policy}, [sys.executable, "-c", ABORT]
    ran = run(env=env, launcher=launcher)
    assert (ran.code, ran.out) == (-signal.SIGABRT, f"{count}\n"), ran
    assert ran.err.startswith("Warning: a text\nFatal Python error: Aborted\n"), ran
    assert re.search('File "<string>", line 6 in main\n.*File ".*run.py", line', ran.err), ran


@pytest.mark.parametrize("error", [False, True], ids=["stdout", "stderr"])
def test_lines_that_a_stopped_terminal_does_not_take_are_left_out_and_counted(error):
    controller, number = os.openpty()
    redirect = redirect_stderr if error else redirect_stdout
    watchdog = threading.Timer(20, os.write, (controller, b"\x11"))  # ends a test that hangs
    watchdog.start()
    with open(number, "w") as terminal, redirect(terminal):
        os.write(controller, b"\x13")  # Ctrl-S
        wait_for(lambda: not select.select([], [terminal], [], 0)[1], "Ctrl-S")
        program.say("one", error)
        program.say("two", error)
        os.write(controller, b"\x11")  # Ctrl-Q
        wait_for(lambda: select.select([], [terminal], [], 0)[1], "Ctrl-Q")
        program.say("three", error)
        program.say("four", error)
        watchdog.cancel()
        printed = b""
        while b"four\r\n" not in printed:
            printed += os.read(controller, 1000)
    os.close(controller)
    message = "(2 lines were left out, because the output was blocked)"
    assert printed.decode().splitlines() == [message, "three", "four"]


def test_training_continues_without_output_if_the_pipe_is_closed(text, tmp_path):
    """Characters that the terminal does not have are replaced."""
    out, env = tmp_path / "выход", {"PYTHONIOENCODING": "latin-1"}
    flags = ["--data", text, "--steps", 60, "--log-every", 1, "--out", out]
    with Program(*TINY, *flags, env=env) as started:
        started.read_lines(3)
        assert f"steps 1 to 60, in {tmp_path}/?????\n" in started.heard
        started.process.stdout.close()
        code = started.process.wait()
        started.errors.seek(0)
        errors = started.errors.read()
        started.process.stdout = None
    assert code == 0 and re.fullmatch("Warning: output not written: .*\n", errors), errors
    assert state(out)["step"] == 60 and len(losses(out)) == 60


@pytest.mark.parametrize("command, to, code", [("", ">&- 2>&-", 0), ("eval", ">/dev/full", 1)])
def test_a_training_needs_no_output_but_a_result_that_cannot_be_written_is_an_error(
    text, undisturbed, tmp_path, command, to, code
):
    args = [command, "--out", undisturbed(1)] if command else [*TINY, "--data", text, "--steps", 2]
    shell = ["bash", "-c", f'exec "$0" run.py "$@" {to}', sys.executable]
    ran = run(*args, *([] if command else ["--out", tmp_path]), launcher=shell)
    assert ran.code == code, ran
    assert (
        re.fullmatch("Error: .*No space left.*\n", ran.err)
        if code
        else state(tmp_path)["step"] == 2
    )


def test_a_module_that_is_missing_is_named_in_one_line(monkeypatch, tmp_path):
    shutil.copy(ROOT / "run.py", tmp_path)
    for start, root in ((PYTHON, tmp_path), ([sys.executable, "-P", "run.py"], ROOT)):
        ran = run(launcher=start, root=root)
        assert (ran.code, ran.out) == (1, "")
        line = "Error: No module named 'ddp_setup'; keep it in the folder of run.py, and .* without -P\n"
        assert re.fullmatch(line, ran.err), ran
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed
    with pytest.raises(click.ClickException, match="torch.*; install torch$"):
        program.LazyModule("torch").Tensor


# --- promise 8: bad input gives one line, and nothing is written ---


@pytest.mark.parametrize("spawn", [[], ["--spawn", 2]], ids=str)
def test_as_many_files_as_the_hard_limit_allows_are_read(spawn, tmp_path):
    """The soft limit is 1,024 on most systems, and a mapped file counts as open."""
    for i in range(200):
        np.save(tmp_path / f"{i}.npy", np.arange(9, dtype=np.uint8))
    limits = ["bash", "-c", 'ulimit -Sn 150; ulimit -Hn {}; exec "$0" run.py "$@"', sys.executable]
    flags = [*TINY, "--data", tmp_path / "*.npy", "--steps", 1, *spawn, "--out", tmp_path / "out"]
    for hard, code, error in (
        (190, 2, "200 files are too many to open.*`ulimit -n`\n"),
        (400, 0, ""),
    ):
        ran = run(*flags, launcher=[*limits[:2], limits[2].format(hard), limits[3]])
        assert ran.code == code and re.search(f"^(Error: .*{error})?$", ran.err), ran


def test_a_run_does_not_begin_where_another_runs_or_has_just_written(text, tmp_path):
    """Between the reading of a checkpoint and the lock, another run can write a newer one."""
    out = f"{tmp_path}"
    ckpt.save(out, {"model": {"weight": torch.zeros(2)}, "step": 5}, 5)
    before = contents(tmp_path)
    with pytest.raises(BlockingIOError, match="another run has just written to it"):
        program.prepare_folder(out, ckpt, {"step": 4}, {})
    assert {**contents(tmp_path), **before} == contents(tmp_path)  # nothing is replaced
    with program.prepare_folder(out, ckpt, {"step": 5}, {}):  # the lock
        checkpoints(tmp_path)[0].unlink()
        (tmp_path / "config.json").write_text('{"val_fraction": 0}')
        ran = run(*TINY, "--data", text, "--out", out)
        assert_one_line(ran, "--out .* in use by another run", code=1)  # the other run will end


CASES = {
    "--data no/such.txt": "no/such.txt",
    "--data 'no/a  b'": "'no/a  b'",
    "--data {bad}/empty.txt": "empty.txt.*empty",
    "--data {bad}/short.txt": "short.txt.*16",
    "--data {bad}/latin.txt": "latin.txt.*0xe9 in position 3.*iconv",
    "--data {bad}/gzip.txt --tokenizer byte": "gzip.txt: is a gzip file",
    "--data {bad}/ids.bin --vocab 65537": "ids.bin: .*uint32.* .npy",
    "--val-data no/such.txt": "no/such.txt",
    "--val-data {bad}/empty.txt": "empty.txt.*empty",
    "--val-data {bad}/ids.bin": "cannot be mixed",
    "--data {bad}/pipe.bin": "/pipe.bin.*not a regular file",
    "--data {bad}/texts": "/texts.*folder",
    "--vocab 100": "text.txt.*is text.*100",
    "--heads 3": "embd.*16.*heads.*3",
    "--out ''": "--out.*'' is empty",
    "--out {bad}/short.txt": "--out .*/short.txt",
    "--out {bad}/config": "--out.*config.json",
    "--out {bad}/metrics": "--out.*metrics.jsonl",
    "--out {bad}/script": "step-00000001-.*not written by this program",
    "--out {bad}/shape": "step-00000001-.*head.weight.*\\(18, 32\\)",
    "--out {bad}/damaged": "step-00000002-.*damaged",
    "--min-lr 0.1": "--min-lr 0.1 .* --lr than 0.003",
    f"--seed {2**63}": f"--seed.*{2**63}",
    "--lr nan": "--lr.*nan is not a number",
    "--lr inf": "--lr.*inf is not a number below",
    "--lr fast": "--lr.*'fast'",
    "--device tpu": "'tpu'.*cpu",
    "--device cuda": "'cuda'.*cpu",
    "--use magic": "'magic'.*'replicas'",
    "--batchsize 8": "--batchsize.*--batch-size",
    "smaple": "smaple",
    "sample": "give flags after the command: sample has flags of its own",
    "DDPKIT_CLIP=much": "--clip.*'much'",
    "DDPKIT_BATCHSIZE=8": "'DDPKIT_BATCHSIZE' is not a flag.*DDPKIT_BATCH_SIZE",
    "RANK=0 WORLD_SIZE=2": "LOCAL_RANK",
    "RANK=0 WORLD_SIZE=2 --spawn 2": "spawn: a launcher",
    "--config {bad}/none.toml": "--config .*none.toml: .*No such file",
    "--config {bad}/latin.txt": "latin.txt: ",
    "--config {bad}/name.toml": "name.toml: key 'batchsize' is not a flag.*batch_size",
    "--config {bad}/value.toml": "--keep.*'many'",
    "--out {trained} --embd 32": "--embd 32 contradicts.*--embd 16",
    "--out {trained} --seed 1": "--seed 1 contradicts.*--seed 0",
    "--out {trained} --data {bad}/other.txt": "^Error: --out .* has a run with other data.*other.txt"
    ".*another --out",
    "--out {trained} --data README.md": "^Error: --out .* has a run with other data: .*README.md.*'#'"
    ".*18.*another --out",
    "--out {trained} --data {bad}/ids.bin": "^Error: --out .* has a run with other data: .*kind ids"
    ".*another --out",
    "--out {trained} --data no/such.txt": "^Error: 'no/such.txt': no such file.*another --out",
    "eval --out {trained} --data README.md": "^Error: .*README.md: character '#'",
    "sample --out {bad}/new": "/new.*no checkpoint",
    "sample --tokens 9": "--tokens.*--max-new-tokens",
    "sample --out {bad}/shape": "step-00000001-.*head.weight.*\\(18, 32\\)",
    "sample --out {trained} --device cuda": "'cuda'.*cpu",
    "sample --out {trained} --prompt ''": "--prompt ''.*at least one token",
    "sample --out {trained} --prompt 'the Ü'": "'Ü'.*18",
    "sample --out {trained} --temperature nan": "--temperature.*nan is not a number",
    f"sample --out {{trained}} --max-new-tokens {10**20}": "tokens.*is not a number below 2..63",
    "eval --out {trained} --data {bad}/ids.bin": "ids.bin.*of kind ids; the model needs char",
    "--spawn 2 --min-lr 0.1": "--min-lr 0.1",
    "--spawn 2 --out {bad}/shape": "head.weight",
}


@pytest.fixture(scope="module")
def bad(undisturbed, tmp_path_factory) -> Path:
    """Return a folder with the files that CASES name."""
    folder = tmp_path_factory.mktemp("bad")
    trained = state(undisturbed(1))
    for name, content in {
        "empty.txt": b"",
        "short.txt": b"only fifteen...",
        "latin.txt": b"caf\xe9 " * 999,
        "other.txt": b"the model " * 99,
        "ids.bin": bytes(range(16)) * 99,
        "gzip.txt": b"\x1f\x8b\x08",
        "name.toml": b"batchsize = 8",
        "value.toml": b"keep = 'many'",
    }.items():
        (folder / name).write_bytes(content)
    os.mkfifo(folder / "pipe.bin")
    for name in ("texts", "config", "metrics", "damaged"):
        (folder / name).mkdir()
    (folder / "config" / "config.json").write_text('{"model_type": "gpt2"}')
    (folder / "metrics" / "metrics.jsonl").write_text('{"step": 1}\n')
    (folder / "damaged" / f"step-00000002-{'0' * 32}.pt").write_text("x")
    ckpt.save(f"{folder}/script", {"model": {"weight": torch.zeros(2)}, "step": 1}, 1)
    trained["model"]["head.weight"] = torch.zeros(18, 32)
    ckpt.save(f"{folder}/shape", trained | {"step": 1}, 1)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_bad_input_gives_one_line_and_writes_nothing(bad, undisturbed, text, monkeypatch, case):
    trained = undisturbed(1)
    words = shlex.split(case.format(bad=bad, trained=trained))
    while words and "=" in words[0]:
        monkeypatch.setitem(ENVIRONMENT, *words.pop(0).split("="))
    command = len(words) > 1 and words[0] in ("sample", "eval")
    data = [] if "--data" in words else ["--data", text]
    start = [] if command else [*TINY, *data, "--steps", 2, "--out", bad / "new"]
    before = contents(bad), contents(trained)
    ran = run(*start, *words)
    assert_one_line(ran, CASES[case])
    # Only a run that is resumed is told how to continue it.
    assert ("give the --data that the run had" in ran.err) == ("another --out" in CASES[case])
    assert (contents(bad), contents(trained)) == before and not (bad / "new").exists()


def test_a_launcher_that_starts_a_single_process_does_not_keep_it_from_starting_ranks(
    text, tmp_path
):
    """As in a PyTorchJob with one worker."""
    flags = [*TINY, "--data", text, "--steps", 1, "--spawn", 2, "--out", tmp_path]
    ran = run(*flags, env={"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "no-such-host"})
    assert ran.code == 0 and " on 2 x cpu " in ran.out and ran.err == "", ran


@pytest.mark.parametrize(
    "case",
    """--lr 0,--embedding-lr 0,--timeout 0,--timeout 1e10,--steps 0,--accum 0,--keep 0,--val-fraction 1,--dropout 1,
    --momentum 1,--min-lr -1,--weight-decay -1,--clip -1,--warmup -1,--eval-tokens -1,--seed -1,--spawn 1025""".split(
        ","
    ),
)
def test_a_number_outside_of_its_range_is_refused(case):
    with pytest.raises(click.BadParameter, match="is not in the range"):
        program.cli.make_context("run.py", case.split())
