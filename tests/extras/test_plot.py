"""Tests of extras/plot.py and of the command plot."""

import itertools
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import run

plot = pytest.importorskip("extras.plot")

# Machado, Oliveira and Fernandes, "A physiologically-based model for simulation of color vision deficiency" (2009):
# matrices for linear RGB; one kind of cone is missing
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


def test_twenty_runs_have_twenty_styles():
    ways = [(way["color"], str(way["linestyle"])) for way in itertools.islice(plot.styles(), 20)]
    assert len({*ways}) == 20 and len({dash for _, dash in ways[:4]}) == 4


METRICS = [
    {"step": step, "tokens": 9 * step, "loss": 9 / step, "tokens_per_s": 7.0, "lr": 0.1 * step}
    for step in range(1, 8)
]
VALIDATION = [{"step": 3, "val_loss": 4.0}, {"step": 7, "val_loss": 3.0}]


@pytest.fixture
def out(tmp_path) -> Path:
    """Return a folder with the files of a run."""
    (tmp_path / "run").mkdir()
    lines = "".join(json.dumps(record) + "\n" for record in [*METRICS, *VALIDATION])
    (tmp_path / "run" / "metrics.jsonl").write_text(lines)
    (tmp_path / "run" / "config.json").write_text('{"lr": 0.1}')
    return tmp_path / "run"


def test_the_figure_shows_the_metrics(out):
    texts = ((out / name).read_text() for name in ("metrics.jsonl", "config.json"))
    drawn = plot.figure([plot.parse("do$lar", *texts)])
    for panel, x in zip(drawn.axes, ("step", "tokens")):
        raw, smoothed, dots = panel.get_lines()
        assert [*zip(*raw.get_data())] == [(line[x], line["loss"]) for line in METRICS]
        at = {line["step"]: line[x] for line in METRICS}
        assert [*zip(*dots.get_data())] == [(at[v["step"]], v["val_loss"]) for v in VALIDATION]
        assert [*smoothed.get_xdata()] == [*raw.get_xdata()]
    assert [*drawn.axes[2].get_lines()[0].get_ydata()] == [7.0] * 7
    assert [*drawn.axes[3].get_lines()[0].get_ydata()] == [line["lr"] for line in METRICS]
    # A "$" would begin a formula.
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == [r"do\$lar"]


def test_smoothing_keeps_straight_lines_and_gaps():
    rising = [float(i) for i in range(100)]
    assert plot.smooth(rising, np.mean)[2:-2] == pytest.approx(rising[2:-2])
    gap = plot.smooth([1.0, math.nan, 3.0], np.mean)
    assert math.isnan(gap[1]) and gap[0] == 1 and gap[2] == 3
    assert np.nanmax(plot.smooth([1.0] * 40 + [99.0] + [1.0] * 40, np.median)) == 1


def test_each_point_of_the_line_is_the_mean_of_a_full_window():
    """With smaller windows at the ends, the line falls to the last measured value."""
    values = [1.0] * 199 + [-100.0]
    smoothed = plot.smooth(values, np.mean)
    assert np.isnan(smoothed).tolist() == 5 * [True] + 190 * [False] + 5 * [True]
    assert smoothed[-6] == pytest.approx((10 - 100) / 11) and smoothed[-7] == 1
    assert plot.smooth(values[-39:], np.mean) == values[-39:]  # few values: a window of one


def test_invalid_lines_of_metrics_are_ignored_and_null_is_a_gap():
    lines = ['{"step": 1, "tokens": 9, "loss": null}', "[1]", '{"loss": 1}', '{"step": 2, "lo']
    found = plot.parse("a", "\n".join([*lines, '{"step": 1, "val_loss": 3.0}']), "{}")
    (x,), (y,) = plot.curve(found, "tokens", "loss")
    assert x == 9 and math.isnan(y)
    assert plot.curve(found, "tokens", "val_loss") == ([9], [3.0])


def test_labels_name_the_flags_in_which_runs_differ():
    runs = [plot.Run(f"runs/{i}/", [], {"lr": 0.1 + i, "layers": 2}) for i in range(2)]
    assert plot.labels(runs) == ["0 (lr 0.1)", "1 (lr 1.1)"]
    assert plot.labels(runs[:1]) == ["0"]
    inner = [run._replace(name=f"{run.name}out") for run in runs]
    assert plot.labels(inner)[0] == "runs/0/out (lr 0.1)"


@pytest.mark.parametrize(
    ("flag", "values", "said"),
    [
        ("data", (["/a/one.txt"], ["/b/two.txt", "/b/more.txt"]), ("one.txt", "two.txt more.txt")),
        ("data", (["/a/x.txt"], ["/b/x.txt"]), ("/a/x.txt", "/b/x.txt")),
        ("data", ([], "old.txt"), ("none", "old.txt")),  # version 0.3 had one text
        ("val_data", ([], ["/a/v.txt"]), ("none", "v.txt")),
        ("tokenizer", ("char", "/a/tokenizer.json"), ("char", "tokenizer.json")),
        ("init_from", (None, "/a/out/"), ("none", "out")),
        ("epochs", (1, 3), ("1", "3")),
        ("seed", (0, 7), ("0", "7")),
        ("schedule", ("linear", "cosine"), ("linear", "cosine")),
        ("weight_decay", (0.1, 0.0), ("0.1", "0.0")),
    ],
)
def test_labels_name_each_difference_that_matters(flag, values, said):
    runs = [plot.Run(f"{i}", [], {"lr": 1, flag: value}) for i, value in enumerate(values)]
    name = flag.replace("_", "-")
    assert plot.labels(runs) == [f"{i} ({name} {text})" for i, text in enumerate(said)]


def test_what_changes_no_training_is_not_in_the_labels():
    """In the runs of the picture in README.md, only the number of ranks differs."""
    names = "out spawn vocab eval_every save_every log_every keep threads torch peak_flops".split()
    configs = [{name: i for name in [*names, "ranks"]} for i in range(2)]
    runs = [plot.Run("out-", [], config) for config in configs]
    assert plot.labels(runs) == ["out- (ranks 0)", "out- (ranks 1)"]


def test_a_run_without_a_value_has_no_label_for_it():
    configs = [{"lr": 1, "seed": 1}, {"lr": 2}, {}]  # an older version, and no config.json
    runs = [plot.Run(f"{i}", [], config) for i, config in enumerate(configs)]
    assert plot.labels(runs) == ["0 (lr 1)", "1 (lr 2)", "2"]


def test_a_folder_without_config_json_is_plotted(out, tmp_path):
    (out / "config.json").unlink()
    ran = run("plot", out, "-o", tmp_path / "a.svg")
    assert ran.code == 0 and (tmp_path / "a.svg").exists(), ran
    ran = run("plot", f"file://{out}", "-o", tmp_path / "b.svg")
    assert ran.code == 0 and (tmp_path / "b.svg").exists(), ran


def test_the_command_draws_pictures_without_torch(out, tmp_path):
    file = tmp_path / "a.svg"
    launcher = [sys.executable, "-X", "importtime", "run.py"]
    ran = run("plot", out, out, "-o", file, launcher=launcher)
    imported = {line.split("|")[-1].strip() for line in ran.err.splitlines()}
    assert "matplotlib" in imported and "torch" not in imported
    assert (ran.code, ran.out) == (0, f"wrote {file}\n") and file.read_text().count("<path") > 20


def test_runs_that_cannot_be_plotted_are_an_error_of_one_line(out, tmp_path):
    for folder, file, said in ((tmp_path, "b.png", "metrics.jsonl"), (out, "b.doc", "svg")):
        ran = run("plot", folder, "-o", tmp_path / file)
        assert ran.code == 2 and ran.err.count("\n") == 1 and said in ran.err, ran
    assert not [*tmp_path.glob("b.*")]
