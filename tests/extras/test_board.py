"""Tests of extras/board.py and of the command tensorboard."""

import json
import re
from pathlib import Path

import pytest
from conftest import TINY, metrics, run


def shown(out: Path, attribute: str = "value") -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard shows: tag -> [(step, value), ...]."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = events.EventAccumulator(str(out), size_guidance={"scalars": 0}).Reload()
    tags = found.Tags()["scalars"]
    return {tag: [(e.step, getattr(e, attribute)) for e in found.Scalars(tag)] for tag in tags}


def logged(out: Path, attribute: str = "value") -> dict[str, list[tuple[int, float]]]:
    keys = {key for line in metrics(out) for key in line} - {"step", "time"}
    return {
        key: [
            (line["step"], pytest.approx(line[key if attribute == "value" else "time"]))
            for line in metrics(out)
            if key in line
        ]
        for key in keys
    }


def test_tensorboard_shows_the_metrics_of_each_run_once(text, tmp_path):
    pytest.importorskip("tensorboard")
    outs = tmp_path / "one", tmp_path / "two"
    for out in outs:
        ran = run(*TINY, "--data", text, "--out", out, "--steps", 9, "--log-every", 3)
        assert ran.code == 0, ran
    for out in (*outs, *outs):  # a second time, as during a training
        ran = run("tensorboard", out)
        assert (ran.code, ran.err) == (0, ""), ran
    for out in outs:
        assert len([*out.glob("events.*")]) == 1
        assert [step for step, _ in shown(out)["loss"]] == [3, 6, 9]
        assert shown(out) == logged(out)
        assert shown(out, "wall_time") == logged(out, "time")


def test_only_finite_numbers_are_written(tmp_path):
    board = pytest.importorskip("extras.board")
    line = {"step": 3, "loss": 2.5, "val_loss": float("nan"), "lr": float("inf"), "mfu": None}
    board.write_events(json.dumps(line), f"{tmp_path}")
    assert shown(tmp_path) == {"loss": [(3, 2.5)]}


def test_a_line_that_was_cut_off_is_left_out_and_files_of_others_stay(tmp_path):
    board = pytest.importorskip("extras.board")
    other = tmp_path / "events.out.tfevents.1.host.1.0"
    other.touch()
    with pytest.raises(ValueError, match="there are no metrics"):
        board.write_events("", f"{tmp_path}")
    for _ in range(2):
        board.write_events('{"step": 1, "loss": 2.5}\n{"step": 2, "lo', f"{tmp_path}")
    assert other.exists() and len([*tmp_path.glob("events.*")]) == 2
    assert shown(tmp_path) == {"loss": [(1, 2.5)]}


def test_the_events_before_are_deleted_only_when_the_new_ones_are_written(tmp_path, monkeypatch):
    board = pytest.importorskip("extras.board")
    board.write_events('{"step": 1, "loss": 2.5}', f"{tmp_path}")
    before = {*tmp_path.iterdir()}

    def fail(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(board.SummaryWriter, "add_scalar", fail)
    with pytest.raises(OSError, match="disk is full"):
        board.write_events('{"step": 1, "loss": 2.5}', f"{tmp_path}")
    assert len(before) == 1 and before == {*tmp_path.iterdir()}


def test_lines_that_are_not_metrics_are_left_out(tmp_path):
    board = pytest.importorskip("extras.board")
    lines = ["[1, 2]", "5", "null", '{"loss": 1.0}', '{"step": 2, "loss": "x", "lr": 0.5}']
    board.write_events("\n".join(lines), f"{tmp_path}")
    assert shown(tmp_path) == {"lr": [(2, 0.5)]}


@pytest.mark.parametrize("out", ["missing", "memory://bucket/out"])
def test_what_is_not_a_folder_is_one_line(tmp_path, out):
    pytest.importorskip("tensorboard")
    ran = run("tensorboard", out if "://" in out else tmp_path / out)
    assert ran.code == 2 and re.fullmatch(r"Error: .* is not a local folder\n", ran.err), ran
