"""Tests of extras/plot.py."""

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, TINY, losses, metrics, run

plot = pytest.importorskip("extras.plot")

# Machado, Oliveira and Fernandes, "A physiologically-based model for simulation of color vision
# deficiency" (2009): matrices for linear RGB; one kind of cone is missing
BLINDNESS = {
    "none": "1 0 0  0 1 0  0 0 1",
    "protanopia": ".152286 1.052583 -.204868  .114503 .786281 .099216  -.003882 -.048116 1.051998",
    "deuteranopia": ".367322 .860646 -.227968  .280085 .672501 .047413  -.011820 .042940 .968881",
    "tritanopia": "1.255528 -.076749 -.178779  -.078411 .930809 .147602  .004733 .691367 .303900",
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(color: str) -> np.ndarray:
    rgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    xyz = XYZ @ rgb.clip(0, 1) / XYZ.sum(1)
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("blindness", BLINDNESS)
def test_the_colours_differ_for_every_kind_of_colour_vision_and_from_white(blindness):
    """They differ by more than 15 in CIE L*a*b*; a difference of 2.3 can just be seen."""
    matrix = np.array(BLINDNESS[blindness].split(), float).reshape(3, 3)
    seen = [lab(matrix @ linear(color)) for color in plot.COLORS]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 15
    contrasts = [1.05 / (XYZ[1] @ linear(color) + 0.05) for color in plot.COLORS]
    assert min(contrasts) >= 3  # WCAG 2.1, 1.4.11: of graphics


def test_each_point_of_the_line_is_the_average_of_a_full_window():
    """With smaller windows at the ends, the line falls to the last measured value."""
    values = [1.0] * 199 + [-100.0]
    smoothed = plot.smooth(values, np.mean)
    assert np.isnan(smoothed).tolist() == 5 * [True] + 190 * [False] + 5 * [True]
    assert smoothed[-6] == pytest.approx((10 - 100) / 11) and smoothed[-7] == 1
    assert plot.smooth(values[-39:], np.mean) == values[-39:]  # few values: a window of one
    assert plot.smooth([2.0, math.nan] * 20, np.mean)[1:-1] == [2.0] * 38


@pytest.fixture(scope="module")
def out(text, tmp_path_factory) -> Path:
    """Return the folder of a run that was killed after step 6 and continued from step 4."""
    out = tmp_path_factory.mktemp("runs") / "do$lar"
    flags = [*TINY, "--data", text, "--out", out, "--log-every", 1, "--eval-every", 4]
    assert run(*flags, "--steps", 4).code == 0
    lost = [{**line, "step": step, "loss": 99.0} for line, step in zip(metrics(out)[1:], (5, 6))]
    with (out / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lost)
    assert run(*flags, "--steps", 8).code == 0
    return out


def test_the_figure_shows_each_step_once_with_its_last_values(out):
    run = plot.read(f"{out}")
    drawn = plot.draw([run, run._replace(name="x", config=run.config | {"lr": 7.0})])
    for panel, x in zip(drawn.axes, ("step", "tokens")):
        raw, _, dots, *_ = panel.get_lines()
        by_step = {line["step"]: line for line in metrics(out) if "step" in line}
        expected = [(line[x], line["loss"]) for line in by_step.values()]
        assert (
            [*zip(*raw.get_data())]
            == expected
            == [(by_step[s][x], v) for s, v in sorted(dict(losses(out)).items())]
        )
        assert [*zip(*dots.get_data())] == [(by_step[s][x], by_step[s]["val_loss"]) for s in (4, 8)]
    rates = drawn.axes[3].get_lines()[0].get_ydata()
    assert [*rates] == [by_step[step]["lr"] for step in range(1, 9)]
    # The legend names the flags that differ, as they are.
    first, second = (text.get_text() for text in drawn.legends[0].get_texts())
    assert first.endswith(f"do$lar (lr {run.config['lr']})") and second == "x (lr 7.0)"


def test_steps_that_a_resume_has_left_behind_are_not_drawn(tmp_path):
    """A run that was killed after step 9 goes on from step 4, with lines at other steps."""
    start = {"config": {"lr": 1.0}, "ranks": 1}
    steps = [{"step": step, "loss": 1.0} for step in (2, 4, 6, 7, 9)]
    again = [{"step": step, "loss": 2.0} for step in (6, 8)]
    lines = [start, *steps, start, *again]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = plot.read(f"{tmp_path}").records
    assert [(r["step"], r["loss"]) for r in found] == [(2, 1), (4, 1), (6, 2), (8, 2)]


@pytest.mark.parametrize("start", ["", "file://"])
def test_the_script_draws_a_picture_and_mistakes_are_one_line(out, tmp_path, start):
    def drawn(*args: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, ROOT / "extras" / "plot.py", *map(str, args)]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    picture = tmp_path / "a.svg"
    assert drawn(f"{start}{out}", out, "-o", picture).returncode == 0
    assert picture.read_text().count("<path") > 20
    for folder, name, said in (
        (f"{start}{tmp_path}", "b.svg", "metrics.jsonl"),
        (out, "b.doc", "doc"),
    ):
        ended = drawn(folder, "-o", tmp_path / name)
        assert ended.returncode == 2 and said in ended.stderr and "Traceback" not in ended.stderr
    assert not [*tmp_path.glob("b.*")]
