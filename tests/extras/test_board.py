"""Tests of extras/board.py and of the command tensorboard."""

import json
import re
from pathlib import Path

import pytest
from conftest import TINY, metrics, run

board = pytest.importorskip("extras.board")


def shown(out: Path, attribute: str = "value") -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard shows: tag -> [(step, value), ...]."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(out), size_guidance={"scalars": 0}).Reload()
    tags = found.Tags()["scalars"]
    return {tag: [(e.step, getattr(e, attribute)) for e in found.Scalars(tag)] for tag in tags}


def test_tensorboard_shows_the_metrics_of_a_run_once(text, tmp_path):
    assert (
        run(*TINY, *"--steps 9 --log-every 3".split(), "--data", text, "--out", tmp_path).code == 0
    )
    for _ in range(2):  # a second time, as during a training
        ran = run("tensorboard", tmp_path)
        assert (ran.code, ran.err) == (0, ""), ran
    assert len([*tmp_path.glob("events.*")]) == 1
    lines = [line for line in metrics(tmp_path) if "loss" in line]
    for key in ("loss", "tokens_per_s"):
        expected = [(line["step"], pytest.approx(line[key])) for line in lines]
        assert len(lines) == 3 and shown(tmp_path)[key] == expected
    times = [(line["step"], pytest.approx(line["time"])) for line in lines]
    assert shown(tmp_path, "wall_time")["loss"] == times and "val_loss" in shown(tmp_path)


def test_what_is_not_a_finite_number_of_a_step_is_left_out_and_files_of_others_stay(tmp_path):
    other = tmp_path / "events.out.tfevents.1.host.1.0"
    other.touch()
    with pytest.raises(ValueError, match="there are no metrics"):
        board.write_events("", f"{tmp_path}")
    line = {"step": 3, "loss": 2.5, "val_loss": float("nan"), "lr": float("inf"), "mfu": None}
    lines = [json.dumps(line), "[1, 2]", "5", '{"loss": 1.0}', '{"step": 2, "loss": "x"}', '{"st']
    for _ in range(2):
        board.write_events("\n".join(lines), f"{tmp_path}")
    assert other.exists() and len([*tmp_path.glob("events.*")]) == 2
    assert shown(tmp_path) == {"loss": [(3, 2.5)]}


@pytest.mark.parametrize("out", ["missing", "memory://bucket/out"])
def test_what_is_not_a_folder_is_one_line(tmp_path, out):
    ran = run("tensorboard", out if "://" in out else tmp_path / out)
    assert ran.code == 2 and re.fullmatch(r"Error: .* is not a local folder\n", ran.err), ran
