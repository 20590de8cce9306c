"""run.py from end to end: what a user starts, and what then lies in the out folder. Promises 1, 3 and 4."""

import json
import math
import re
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    MODEL,
    PYTHON,
    TINY,
    Program,
    Ran,
    ahead,
    checkpoints,
    losses,
    metrics,
    run,
    same_training,
    state,
    torchrun,
)  # fmt: skip

import gpt
from extras.folder import without_passwords
from extras.machine import compiling

LAUNCHES = {
    "in parts": (["--accum", 64], PYTHON),  # more than there are rows
    "spawn 2": (["--spawn", 2], PYTHON),
    "spawn 3 in parts": (["--spawn", 3, "--accum", 2], PYTHON),
    "spawn 4": (["--spawn", 4], PYTHON),
    "torchrun 2": ([], torchrun(2)),
}
HALVES = {"bfloat16": "modern", "float16": "gpt2"}
CONTRADICTIONS = {"--embd": 32, "--seed": 1, "--data": "README.md"}


def fifty(text: Path) -> list[object]:
    """50 steps of 10 rows: not divisible by 3 or 4 ranks; step 31 is an epoch's last and has 2 rows, so that of
    3 ranks one has none."""
    return [*TINY, "--data", text, "--batch-size", 10, "--optimizer", "adamw", "--dropout", 0, "--steps", 50,
            "--log-every", 1, "--eval-every", 25]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def done(text, undisturbed, tmp_path_factory):
    """done(name): (what was printed, the out folder) of a run below. They go on in the background from the start."""
    folder = tmp_path_factory.mktemp("done")

    def train(name: str, *args: object, launcher: list[str] = PYTHON) -> None:
        calls[name] = lambda: (run(*args, "--out", folder / name, launcher=launcher), folder / name)

    def ask(name: str, *args: object) -> None:
        calls[name] = lambda: (run(*args, "--out", undisturbed(1)), undisturbed(1))

    def rerun() -> tuple[Ran, Path]:
        shutil.copytree(undisturbed(1), folder / "rerun")
        return run("--out", folder / "rerun"), folder / "rerun"

    calls = {}
    train("alone", *fifty(text))
    for name, (more, launcher) in LAUNCHES.items():
        train(name, *fifty(text), *more, launcher=launcher)
    train("recomputed", *fifty(text), "--checkpoint-activations")
    for dtype, arch in HALVES.items():
        train(dtype, *TINY, "--data", text, "--steps", 30, "--dtype", dtype, "--arch", arch)
    train("no validation", *TINY, "--data", text, "--epochs", 1, "--val-fraction", 0)
    train("diverging", *TINY, "--data", text, "--lr", 1e7, "--clip", 0, "--save-every", 2, "--steps", 20)
    greedy = ["sample", "--prompt", "the ", "--temperature", 0]
    ask("greedy", *greedy, "--tokens", 30)
    ask("greedy again", *greedy, "--tokens", 40)
    ask("eval", "eval")
    for flag, value in CONTRADICTIONS.items():
        ask(flag, flag, value)
    calls["rerun"] = rerun
    with ahead(**calls) as runs:
        yield lambda name: runs[name].result()


def assert_close(ours, theirs):
    """Promise 1's rtol 1e-4; the atol is float32's own step for the few weights that happen to be nearly 0."""
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)


def lying(folder: Path) -> dict[str, bytes]:
    """All that lies in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def evaluations(folder: Path) -> dict[int, float]:
    return {line["step"]: line["val_loss"] for line in metrics(folder) if "val_loss" in line}


# ---------------------------------------------------------------------------------------------------- 3. resume


def stopped(out: Path, step: int, *args: object) -> int:
    """Train, ask to stop after `step`; -> the step that it stopped after."""
    with Program(*args, "--out", out) as program:
        program.read_to(f"step {step}/")
        program.process.send_signal(signal.SIGTERM)
        ran = program.finish()
    assert ran.code == 3 and ran.out.splitlines()[-1].startswith("Stopped as asked"), ran
    last = losses(out)[-1][0]
    assert last < 50 and state(out)["step"] == last
    return last


def test_stopped_and_started_again_it_ends_with_the_very_same_weights(undisturbed, flags, tmp_path):
    stopped(tmp_path, 20, *flags)
    # nothing but the folder: all the rest is taken over from the checkpoint
    ran = run("--out", tmp_path, "--log-every", 1)
    assert ran.code == 0, ran
    assert [step for step, _ in losses(tmp_path)] == list(range(1, 101))
    assert same_training(tmp_path, undisturbed(1))


def test_resumed_by_another_number_of_processes_it_goes_on_with_the_same_order(done, text, tmp_path):
    before = stopped(tmp_path, 10, *fifty(text))
    ran = run("--out", tmp_path, "--log-every", 1, "--accum", 2, "--spawn", 2)
    assert ran.code == 0, ran
    assert ran.out.startswith(f"step {before + 1}/50 ")
    assert [step for step, _ in losses(tmp_path)] == list(range(1, 51))
    _, alone = done("alone")
    assert_close(dict(losses(tmp_path)), dict(losses(alone)))  # other rows would have another loss
    assert_close(state(tmp_path)["model"], state(alone)["model"])


def test_a_finished_run_goes_on_or_starts_over_when_asked(text, tmp_path):
    first = run(*TINY, "--data", text, "--out", tmp_path, "--epochs", 1)
    assert first.code == 0 and "Done: 38 steps" in first.out, first

    on = run("--out", tmp_path, "--epochs", 2)
    assert on.code == 0 and on.out.startswith("step 40/76 "), on
    assert [step for step, _ in losses(tmp_path)] == [10, 20, 30, 38, 40, 50, 60, 70, 76]

    over = run(*TINY, "--data", text, "--out", tmp_path, "--epochs", 1, "--seed", 1, "--fresh")
    assert over.code == 0 and over.out.startswith("step 10/38 "), over
    assert [step for step, _ in losses(tmp_path)] == [10, 20, 30, 38]
    assert [path.name[:13] for path in checkpoints(tmp_path)] == ["step-00000038"]
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 1


def test_a_finished_run_says_that_it_is_and_how_to_go_on(done):
    ran, _ = done("rerun")
    assert ran.code == 0 and ran.err == "" and len(ran.out.splitlines()) == 1, ran
    assert "finished" in ran.out and "higher --steps" in ran.out and "--fresh" in ran.out


def test_a_finished_run_is_left_as_it_is(done, undisturbed):
    assert lying(done("rerun")[1]) == lying(undisturbed(1))


@pytest.mark.parametrize("flag", CONTRADICTIONS)
def test_a_flag_that_contradicts_the_checkpoint_is_one_line(done, flag):
    ran, out = done(flag)
    assert ran.code == 2 and ran.out == "", ran
    assert ran.err.startswith(f"Error: {flag} {CONTRADICTIONS[flag]}") and "--fresh" in ran.err
    assert ran.err.count("\n") == 1
    assert state(out)["step"] == 100


# --------------------------------------------------------------------------------------------- other kinds of data


def test_bytes_can_be_trained_on_sampled_and_evaluated(tmp_path):
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("Straße, café, 東京. " * 200)
    ran = run(*TINY, "--data", text, "--out", out, "--tokens", "byte", "--steps", 30)
    assert ran.code == 0, ran
    assert state(out)["model"]["embedding.weight"].shape == (256, 16)
    ran = run("sample", "--out", out, "--prompt", "東", "--tokens", 20, "--temperature", 0)
    assert ran.code == 0 and ran.out.startswith("東"), ran
    ran = run("eval", "--out", out, "--data", text)
    size = len(text.read_bytes()) - 1
    nats, bits = map(float, re.findall(r"loss ([\d.]+) .*, ([\d.]+) bits per character", ran.out)[0])
    assert ran.code == 0 and f"over {size:,} tokens" in ran.out
    # 5e-3: a few times what one character more or less, and the four printed digits, make up
    assert bits == pytest.approx(nats * size / len(text.read_text()) / math.log(2), abs=5e-3)


@pytest.fixture(scope="module")
def of_ids(tmp_path_factory):
    """A run on token ids 0, 1, 2 ... 6, 0, 1, ..."""
    folder = tmp_path_factory.mktemp("ids")
    np.save(folder / "ids.npy", np.arange(3000, dtype=np.uint16) % 7)
    ran = run(*TINY, "--data", folder / "ids.npy", "--out", folder / "out", "--steps", 60)
    assert ran.code == 0, ran
    return folder / "out"


def test_token_ids_can_be_trained_on_and_evaluated(of_ids):
    ran = run("eval", "--out", of_ids)
    assert ran.code == 0 and "bits per character" not in ran.out and "over 299 tokens" in ran.out, ran
    assert f"loss {evaluations(of_ids)[60]:.4f} " in ran.out


def test_token_ids_can_be_sampled(of_ids):
    ran = run("sample", "--out", of_ids, "--prompt", "1 2 3 ", "--tokens", 4, "--temperature", 0)
    assert ran.code == 0, ran
    assert ran.out == "1 2 3 4 5 6 0 \n"


# -------------------------------------------------------------------------------------------- configuration, help


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(text, tmp_path):
    file, out = tmp_path / "a.toml", tmp_path / "out"
    file.write_text("steps = 1\nseed = 5\nclip = 0.5\nbatch-size = 4\ncheckpoint_activations = true\n")
    env = {"DDPKIT_SEED": "6", "DDPKIT_CLIP": "0.6", "DDPKIT_CONFIG": f"{file}"}
    ran = run(*MODEL, "--data", text, "--out", out, "--clip", 0.7, env=env)
    assert ran.code == 0, ran
    config = json.loads((out / "config.json").read_text())
    told = {"steps": 1, "batch_size": 4, "checkpoint_activations": True, "seed": 6, "clip": 0.7, "layers": 1}
    assert {key: config[key] for key in told} == told


def test_help_shows_every_flag_in_its_group_and_does_without_torch():
    ran = run("--help", launcher=[sys.executable, "-X", "importtime", "run.py"])
    assert ran.code == 0 and " click" in ran.err and "torch" not in ran.err
    groups = re.split(r"\n(\w+):\n", ran.out)
    shown = {title: set(re.findall(r"^  (--[\w-]+)", body, re.M)) for title, body in zip(groups[1::2], groups[2::2])}
    asked = """--data --tokens --val-fraction --out --epochs --steps --batch-size --accum --block-size --layers
        --heads --embd --dropout --arch --optimizer --lr --min-lr --warmup --weight-decay --clip --dtype --device
        --compile --checkpoint-activations --eval-every --save-every --log-every --keep --fresh --seed --timeout
        --spawn --config""".split()
    assert set(asked) <= {flag for group in shown.values() for flag in group}
    assert {"Data", "Model", "Training", "Machine", "Output", "Commands"} <= shown.keys()
    assert "--lr" in shown["Training"] and "--spawn" in shown["Machine"] and "--out" in shown["Output"]


# ---------------------------------------------------------------------- 1. however many processes, one result


@pytest.mark.parametrize("launch", LAUNCHES)
def test_the_result_does_not_tell_how_many_processes_there_were(done, launch):
    (one, alone), (ran, folder) = done("alone"), done(launch)
    assert one.code == ran.code == 0, ran
    assert [step for step, _ in losses(folder)] == list(range(1, 51))
    assert_close(dict(losses(folder)), dict(losses(alone)))
    assert_close(state(folder)["model"], state(alone)["model"])
    assert evaluations(folder) == pytest.approx(evaluations(alone), rel=1e-6)  # promise 4's own


def test_only_rank_0_speaks(done):
    def said(ran: Ran) -> str:
        return re.sub(r"[\d,]+ tokens/s|mfu \d+%|[\d.]+[MG]B|eta [\d:]+|in /.*", "", ran.out)

    alone, two = done("alone")[0], done("spawn 2")[0]
    assert said(two) == said(alone)
    assert said(two).count("step 50/50 ") == said(two).count("Done: 50 steps") == said(two).count("A sample:") == 1
    assert alone.err == two.err == ""


def test_a_checkpoint_opens_for_a_stranger_with_the_models_own_names(done):
    found = torch.load(checkpoints(done("spawn 2")[1])[-1], weights_only=True)
    model = gpt.build(gpt.Config(18, 16, 1, 2, 16), seed=1)
    assert list(found["model"]) == list(model.state_dict())
    model.load_state_dict(found["model"])


# ------------------------------------------------------------------------------------------------ metrics, config


def test_metrics_have_one_line_with_the_documented_keys_for_each_step_and_evaluation(done):
    lines = metrics(done("spawn 2")[1])
    steps = [line for line in lines if "val_loss" not in line]
    keys = "step epoch tokens loss grad_norm lr tokens_per_s mfu seconds".split()
    assert all(list(line) == keys for line in steps)
    assert all(list(line) == ["step", "val_loss", "seconds"] for line in lines if "val_loss" in line)
    assert [line["step"] for line in steps] == list(range(1, 51))
    assert list(evaluations(done("spawn 2")[1])) == [25, 50]
    assert all(math.isfinite(value) for line in lines for value in line.values())
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds) and seconds[0] > 0


def test_an_epoch_ends_with_its_short_batch(done):
    steps = {line["step"]: line for line in metrics(done("spawn 3 in parts")[1]) if "loss" in line}
    assert [steps[step]["tokens"] for step in (30, 31, 32)] == [300 * 16, 302 * 16, 312 * 16]
    assert [steps[step]["epoch"] for step in (31, 50)] == [1.0, round(50 / 31, 4)]


def test_the_learning_rate_warms_up_and_goes_down_to_the_end(done):
    rates = [line["lr"] for line in metrics(done("alone")[1]) if "lr" in line]
    expected = [0.003 * min((step + 1) / 20, 1 - max(0, step - 20) / 30) for step in range(50)]
    assert rates == pytest.approx(expected, rel=1e-12)  # the operations have another order


def test_config_json_says_what_it_ran_with(done, text):
    config = json.loads((done("spawn 2")[1] / "config.json").read_text())
    told = {"data": f"{text}", "batch_size": 10, "optimizer": "adamw", "steps": 50, "lr": 0.003, "seed": 0, "ranks": 2}
    assert {key: config[key] for key in told} == told


# ------------------------------------------------------------------------------------------ the arithmetic's flags


def test_recomputed_activations_give_the_same_losses(done):
    assert done("recomputed")[0].code == 0
    assert losses(done("recomputed")[1]) == losses(done("alone")[1])


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_trains(done, dtype):
    ran, out = done(dtype)
    assert ran.code == 0 and ran.err == "", ran
    first, *_, last = [loss for _, loss in losses(out)]
    assert math.isfinite(last) and last < first
    assert {tensor.dtype for tensor in state(out)["model"].values()} == {torch.float32}
    assert not any("skipped" in line for line in metrics(out))


@pytest.mark.parametrize("dtype, other", [("bfloat16", "float16"), ("float16", "float32")])
def test_resumed_in_another_precision_it_goes_on(done, tmp_path, dtype, other):
    shutil.copytree(done(dtype)[1], tmp_path / "out")
    ran = run("--out", tmp_path / "out", "--dtype", other, "--steps", 34)
    assert ran.code == 0 and ran.err == "", ran
    assert state(tmp_path / "out")["step"] == 34
    assert bool(state(tmp_path / "out")["scaler"]) == (other == "float16")


def test_without_validation_it_trains_on_all_of_the_data(done):
    ran, out = done("no validation")
    assert ran.code == 0 and "no validation" in ran.out, ran
    assert evaluations(out) == {}
    assert metrics(out)[-1]["tokens"] == (5390 // 16 - 1) * 16


def test_a_run_that_diverges_stops_with_one_line_and_names_the_last_checkpoint_from_before(done):
    ran, out = done("diverging")
    said = re.search(r"not finite 5 times in a row, up to step (\d+); the last good checkpoint is (.*)\. Try", ran.err)
    assert ran.code == 1 and said and ran.err.count("\n") == 1, ran
    assert said[2] == str(checkpoints(out)[-1]) and state(out)["step"] <= int(said[1]) - 5
    assert all(tensor.isfinite().all() for tensor in state(out)["model"].values())


# ---------------------------------------------------------------------------------------------------- sample, eval


def test_a_greedy_sample_begins_with_the_prompt_and_is_always_the_same(done):
    greedy, again = done("greedy")[0], done("greedy again")[0]
    assert greedy.code == again.code == 0 and greedy.err == "", greedy
    assert greedy.out.startswith("the ")
    assert len(greedy.out) == len("the ") + 30 + len("\n")
    assert len(again.out) == len("the ") + 40 + len("\n")
    assert again.out.startswith(greedy.out[:-1])


def test_eval_tells_what_training_measured_last(done, undisturbed):
    ran, out = done("eval")
    last = evaluations(out)[100]
    assert ran.code == 0, ran
    assert ran.out.startswith(f"loss {last:.4f} nats per token, perplexity {math.exp(last):.4f}, ")
    assert ran.out.endswith(", over 538 tokens\n")  # of 539, all but the first


def test_a_characters_bits_are_its_nats(done):
    ran, out = done("eval")
    assert f" {evaluations(out)[100] / math.log(2):.4f} bits per character" in ran.out


# ------------------------------------------------------------------------------------------------ what is left there


def test_what_a_crash_garbled_in_the_metrics_is_dropped_and_the_rest_kept(undisturbed, tmp_path):
    out = shutil.copytree(undisturbed(1), tmp_path / "out")
    checkpoints(out)[-1].unlink()
    garbled = b'{"step": 3, "lo\n\x00\x00\xff\n[1]\n{"loss": 1}\n"step"\n{"step": "x"}\n{"step": 4, "loss": 1.0'
    with open(out / "metrics.jsonl", "ab") as file:
        file.write(garbled)
    ran = run("--out", out, "--log-every", 1)
    assert ran.code == 0 and ran.err == "", ran
    assert (out / "metrics.jsonl").read_bytes().count(b"\n") == len(metrics(out))
    assert [step for step, _ in losses(out)] == list(range(1, 101))


def test_on_a_gpu_and_for_long_on_a_cpu_a_run_is_compiled_where_it_can_be(monkeypatch, tmp_path):
    cpu, cuda, long, short = torch.device("cpu"), torch.device("cuda"), 1e14, 1e13
    monkeypatch.setenv("CXX", sys.executable)  # anything that is there
    assert [compiling(None, cpu, flops) for flops in (short, long)] == [False, True]
    assert compiling(None, cuda, short) and compiling(True, cpu, short) and not compiling(False, cuda, long)
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    assert not compiling(None, cpu, long) and not compiling(None, cuda, long)


def test_the_lock_does_not_follow_a_link(text, tmp_path):
    victim, out = tmp_path / "victim", tmp_path / "out"
    victim.write_text("precious")
    out.mkdir()
    (out / ".lock").symlink_to(victim)
    ran = run(*TINY, "--data", text, "--steps", 1, "--out", out)
    assert ran.code == 2 and ".lock" in ran.err and ran.err.count("\n") == 1, ran
    assert victim.read_text() == "precious"


def test_files_are_made_with_the_users_umask(text, tmp_path):
    private = ["sh", "-c", 'umask 077; exec "$@"', "sh", sys.executable, "run.py"]
    ran = run(*TINY, "--data", text, "--steps", 1, "--out", tmp_path / "out", launcher=private)
    assert ran.code == 0 and ran.err == "", ran
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert {*modes.values()} == {0o600}, modes
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o700


def test_what_is_kept_of_a_url_has_no_password():
    kept = without_passwords({"data": "ftp://me:secret@host/a@b.txt", "out": "s3://bucket/run@2", "steps": None})
    assert kept == {"data": "ftp://host/a@b.txt", "out": "s3://bucket/run@2", "steps": None}
