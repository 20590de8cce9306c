"""Tests of extras/board.py and of --tensorboard."""

import shutil
from functools import partial
from pathlib import Path

import pytest
from conftest import TINY, Ran, ahead, checkpoints, metrics, run

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
        "gpt2": ["--arch", "gpt2", "--tensorboard"],
        "spawned": ["--spawn", 2, "--tensorboard", "--steps", 12],
    }

    def train(name: str) -> tuple[Ran, Path]:
        ran = run(*RUNS, "--data", text, "--out", folder / name, *runs[name])
        assert ran.code == 0, ran
        return ran, folder / name

    with ahead(**{name: partial(train, name) for name in runs}) as begun:
        yield lambda name: begun[name].result()


def shown(out: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard shows: tag -> [(step, value), ...]."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = events.EventAccumulator(str(out), size_guidance={"scalars": 0}).Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def logged(out: Path) -> dict[str, list[tuple[int, float]]]:
    keys = {key for line in metrics(out) for key in line if key != "step"}
    return {
        key: [(line["step"], pytest.approx(line[key])) for line in metrics(out) if key in line]
        for key in keys
    }


def test_tensorboard_shows_the_metrics(done):
    assert shown(done("gpt2")[1]) == logged(done("gpt2")[1])


def test_only_rank_0_writes_for_tensorboard(done):
    out = done("spawned")[1]
    assert len([*out.glob("events.*")]) == 1 and shown(out) == logged(out)


def test_tensorboard_shows_repeated_steps_once(done, tmp_path):
    pytest.importorskip("tensorboard")
    out = shutil.copytree(done("gpt2")[1], tmp_path / "out")
    checkpoints(out)[-1].unlink()
    ran = run("--out", out, "--log-every", 1, "--tensorboard")
    assert ran.code == 0 and len([*out.glob("events.*")]) == 2, ran
    assert [step for step, _ in shown(out)["loss"]] == list(range(1, 41))


def test_only_finite_numbers_are_written(tmp_path):
    board = pytest.importorskip("extras.board")
    writer = board.open_board(f"{tmp_path}", start=0)
    board.write(writer, {"step": 3, "loss": 2.5, "val_loss": float("nan"), "lr": float("inf")})
    assert shown(tmp_path) == {"loss": [(3, 2.5)]}
