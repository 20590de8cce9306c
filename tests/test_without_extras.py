"""A copy of the core without extras/ does what the first page of README.md promises; what needs an extra is one line.

`copy` has the six files of the core and nothing else.
"""

import json
import shutil
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
from conftest import (
    PYTHON,
    ROOT,
    TINY,
    Program,
    Ran,
    ahead,
    checkpoints,
    contents,
    losses,
    run,
    same_training,
    state,
    torchrun,
)

CORE = [f"{name}.py" for name in "ddp_setup gpt chardata loop ckpt run".split()]


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("copy")
    for name in CORE:
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def short(text) -> list[object]:
    """Return the flags of 12 steps of AdamW, whose losses do not depend on the number of ranks."""
    steps = ["--steps", 12, "--log-every", 1, "--save-every", 5, "--dropout", 0.0]
    return [*TINY, "--optimizer", "adamw", "--data", text, *steps]


LAUNCHES = {
    "python": (PYTHON, []),
    "spawn": (PYTHON, ["--spawn", 2]),
    "torchrun": (torchrun(2), []),
}


@pytest.fixture(scope="module")
def trained(copy, short, tmp_path_factory):
    """Return a function: name of a launch -> (exit code and output, the --out folder)."""
    folder = tmp_path_factory.mktemp("trained")

    def train(name: str) -> tuple[Ran, Path]:
        launcher, more = LAUNCHES[name]
        ran = run(*short, *more, "--out", folder / name, launcher=launcher, root=copy)
        return ran, folder / name

    with ahead(**{name: partial(train, name) for name in LAUNCHES}) as runs:
        yield lambda name: runs[name].result()


@pytest.mark.parametrize("launch", LAUNCHES)
def test_each_launcher_trains(trained, launch):
    (ran, out), (_, alone) = trained(launch), trained("python")
    assert ran.code == 0 and "Done: 12 steps" in ran.out, ran
    assert launch == "torchrun" or ran.err == "", ran
    assert [step for step, _ in losses(out)] == list(range(1, 13))
    assert dict(losses(out)) == pytest.approx(dict(losses(alone)), rel=1e-4)
    assert state(out)["step"] == 12


def test_a_stop_signal_saves_and_a_resume_gives_bitwise_equal_weights(
    copy, short, trained, tmp_path
):
    with Program(*short, "--out", tmp_path, root=copy) as program:
        program.read_to("step 3/")
        program.process.send_signal(signal.SIGTERM)
        ran = program.finish()
    assert ran.code == 3 and "Stopped as asked" in ran.out and ran.err == "", ran
    assert 3 <= state(tmp_path)["step"] < 12
    ran = run("--out", tmp_path, "--log-every", 1, root=copy)
    assert ran.code == 0 and ran.err == "", ran
    assert same_training(tmp_path, trained("python")[1])


def test_sample_and_eval_work(copy, trained):
    _, out = trained("python")
    ran = run("sample", "--out", out, "--prompt", "the ", "--max-new-tokens", 9, root=copy)
    assert ran.code == 0 and ran.err == "" and len(ran.out) == len("the ") + 9 + len("\n"), ran
    assert ran.out.startswith("the ")
    ran = run("eval", "--out", out, root=copy)
    (val_loss,) = (
        line["val_loss"]
        for line in map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        if "val_loss" in line
    )
    assert ran.code == 0 and ran.err == "", ran
    assert ran.out.startswith(f"loss {val_loss:.4f} nats per token")


FAIL = """
import sys
sys.path.insert(0, {root!r})
import gpt, run

def fail(model, batch):
    raise RuntimeError("a bug")

gpt.loss = fail
run.main()
"""


def test_an_error_that_is_not_expected_is_named_with_its_rank_and_traceback(copy, short, tmp_path):
    (tmp_path / "program.py").write_text(FAIL.format(root=f"{copy}"))
    launcher = [sys.executable, str(tmp_path / "program.py")]
    ran = run(*short, "--out", tmp_path / "out", launcher=launcher)
    assert ran.code == 1 and ran.err.startswith("Error on rank 0: RuntimeError('a bug')\n"), ran
    assert ran.err.count("Traceback") == 1, ran


TASKS = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
TASKS |= {"SLURM_STEP_NODELIST": "host1", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_JOB_ID": "1"}
NEED = {
    "data": (["--data", "s3://bucket/a.txt"], {}, ["extras/remote.py"]),
    "out": (["--out", "s3://bucket/run"], {}, ["extras/remote.py"]),
    "tokenizer": (["--tokenizer", "x.json"], {}, ["extras/tokenizer.py"]),
    "strategy": (["--strategy", "fsdp", "--spawn", 2], {}, ["extras/fsdp.py"]),
    "checkpoint": (["--checkpoint", "sharded", "--spawn", 2], {}, ["extras/sharded.py"]),
    "init-from": (["--init-from", "x"], {}, ["needs extras/"]),
    "config": (["--config", "x"], {}, ["No such option", "--config"]),
    "several tasks of SLURM": ([], TASKS, ["4 tasks", "RANK", "extras/slurm.py"]),
    "info": (["info"], {}, ["info"]),
}


@pytest.fixture(scope="module")
def refused(copy, short, trained, tmp_path_factory):
    """Return a function: a name from NEED -> (exit code and output, the --out folder)."""
    folder = tmp_path_factory.mktemp("refused")

    def refuse(name: str) -> tuple[Ran, Path]:
        args, env, _ = NEED[name]
        start = [] if args == ["info"] else [*short, "--out", folder / name]
        # SLURM's variables must be those of the process, because ddp_setup reads them early.
        launcher = [sys.executable, "run.py"] if env else PYTHON
        return run(*start, *args, env=env, launcher=launcher, root=copy), folder / name

    with ahead(**{name: partial(refuse, name) for name in NEED}) as runs:
        yield lambda name: runs[name].result()


@pytest.mark.parametrize("name", NEED)
def test_what_needs_an_extra_gives_one_line_and_exit_code_2(refused, name):
    ran, out = refused(name)
    assert ran.code == 2 and ran.out == "", ran
    assert ran.err.startswith("Error: ") and ran.err.count("\n") == 1, ran.err
    assert [text for text in NEED[name][2] if text not in ran.err] == [], ran.err
    assert not out.exists()


@pytest.mark.parametrize("command", [[], ["sample"], ["eval"]])
def test_a_sharded_checkpoint_is_refused_and_no_older_file_is_used(
    copy, trained, tmp_path, command
):
    out = shutil.copytree(trained("python")[1], tmp_path / "out")
    for path in checkpoints(out)[1:]:
        path.unlink()
    assert state(out)["step"] == 5
    sharded = out / f"step-00000009-{'0123456789abcdef' * 2}"
    sharded.mkdir()
    (sharded / "rank-0.pt").write_bytes(b"a shard")
    before = contents(out)
    ran = run(*command, "--out", out, root=copy)
    assert ran.code == 2 and ran.out == "", ran
    assert ran.err.startswith("Error: ") and ran.err.count("\n") == 1, ran.err
    assert "extras/sharded.py" in ran.err
    assert contents(out) == before
