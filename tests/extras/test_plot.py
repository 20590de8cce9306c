"""Tests of extras/plot.py and of the command plot."""

import itertools
import math
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import TINY, Ran, ahead, metrics, run

from extras import plot

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
        "modern": ["--tokenizer", "byte", "--steps", 12],
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


# Machado, Oliveira and Fernandes, "A physiologically-based model for simulation of color vision deficiency" (2009):
# matrices for linear RGB; one kind of cone is missing
BLINDNESS = {
    "none": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritanopia": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
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
def test_the_colours_of_two_runs_differ_for_every_kind_of_colour_vision(blindness):
    """They differ by more than 15 in CIE L*a*b*; a difference of 2.3 can just be seen."""
    seen = [lab(BLINDNESS[blindness] @ linear(color)) for color in plot.COLORS]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 15


@pytest.mark.parametrize("color", plot.COLORS)
def test_each_colour_has_enough_contrast_to_white(color):
    assert 1.05 / (XYZ[1] @ linear(color) + 0.05) >= 3  # WCAG 2.1, 1.4.11: of graphics


def test_twenty_runs_have_twenty_styles():
    ways = [(way["color"], str(way["linestyle"])) for way in itertools.islice(plot.styles(), 20)]
    assert len({*ways}) == 20 and len({dash for _, dash in ways[:4]}) == 4


def test_the_figure_shows_the_metrics(done):
    out = done("gpt2")[1]
    drawn = plot.figure([parsed(out)])
    training = [line for line in metrics(out) if "loss" in line]
    validation = {line["step"]: line["val_loss"] for line in metrics(out) if "val_loss" in line}
    tokens = {line["step"]: line["tokens"] for line in training}
    for panel, x in zip(drawn.axes, (dict(zip(tokens, tokens)), tokens)):
        raw, smoothed, dots = panel.get_lines()
        assert list(zip(*raw.get_data())) == [(x[line["step"]], line["loss"]) for line in training]
        assert list(zip(*dots.get_data())) == [(x[step], loss) for step, loss in validation.items()]
        assert list(smoothed.get_xdata()) == list(raw.get_xdata())
    assert list(drawn.axes[2].get_lines()[0].get_ydata()) == [
        line["tokens_per_s"] for line in training
    ]
    assert list(drawn.axes[3].get_lines()[0].get_ydata()) == [line["lr"] for line in training]


def test_a_dollar_sign_in_a_name_is_no_formula(tmp_path):
    run = plot.parse("do$lar^$x", '{"step": 1, "tokens": 9, "loss": 2.0}\n', "{}")
    plot.draw([run], f"{tmp_path}/a.svg")
    names = [text.get_text() for text in plot.figure([run]).legends[0].get_texts()]
    assert names == [r"do\$lar^\$x"] and (tmp_path / "a.svg").stat().st_size


def test_a_name_that_is_not_utf_8_can_be_drawn(tmp_path):
    run = plot.parse("o\udcff", '{"step": 1, "tokens": 9, "loss": 2.0}\n', "{}")
    plot.draw([run], f"{tmp_path}/a.svg")
    names = [text.get_text() for text in plot.figure([run]).legends[0].get_texts()]
    assert names == ["o?"] and (tmp_path / "a.svg").stat().st_size


def parsed(out: Path) -> plot.Run:
    return plot.parse(
        str(out), (out / "metrics.jsonl").read_text(), (out / "config.json").read_text()
    )


def test_smoothing_keeps_straight_lines_and_gaps():
    rising = [float(i) for i in range(100)]
    assert plot.smooth(rising, np.mean) == pytest.approx(rising)
    assert plot.smooth([5.0] * 50, np.median) == [5.0] * 50
    gap = plot.smooth([1.0, math.nan, 3.0], np.mean)
    assert math.isnan(gap[1]) and gap[0] == 1 and gap[2] == 3
    assert max(plot.smooth([1.0] * 40 + [99.0] + [1.0] * 40, np.median)) == 1


def test_invalid_lines_of_metrics_are_ignored_and_null_is_a_gap():
    lines = [
        '{"step": 1, "tokens": 9, "loss": null}',
        "[1]",
        '"step"',
        '{"loss": 1}',
        '{"step": 2, "lo',
        "\x00",
        '{"step": 1, "val_loss": 3.0}',
    ]
    found = plot.parse("a", "\n".join(lines), "{}")
    (x,), (y,) = plot.curve(found, "tokens", "loss")
    assert x == 9 and math.isnan(y)
    assert plot.curve(found, "tokens", "val_loss") == ([9], [3.0])


def test_labels_name_the_flags_in_which_runs_differ():
    configs = [{"lr": 0.1, "seed": 0, "layers": 2}, {"lr": 0.2, "seed": 0, "layers": 2}]
    runs = [plot.Run(f"runs/{i}/", [], config) for i, config in enumerate(configs)]
    assert plot.labels(runs) == ["0 (lr 0.1)", "1 (lr 0.2)"]
    assert plot.labels(runs[:1]) == ["0"]
    assert (
        plot.labels([run._replace(name=f"{run.name}out") for run in runs])[0]
        == "runs/0/out (lr 0.1)"
    )


def test_a_plot_of_two_runs_is_the_same_picture_each_time(done, tmp_path):
    outs = [done("gpt2")[1], done("modern")[1]]
    for name in ("a.svg", "b.svg", "a.png"):
        file = tmp_path / name
        assert run("plot", *outs, "-o", file) == Ran(0, f"wrote {file}\n", "")
    picture = (tmp_path / "a.svg").read_text()
    assert picture == (tmp_path / "b.svg").read_text() and "gpt2 (arch gpt2)" in picture
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_does_not_import_torch(done, tmp_path):
    launcher = [sys.executable, "-X", "importtime", "run.py"]
    ran = run("plot", done("gpt2")[1], "-o", tmp_path / "a.svg", launcher=launcher)
    imported = {line.split("|")[-1].strip() for line in ran.err.splitlines()}
    assert ran.code == 0 and "matplotlib" in imported and "torch" not in imported


def test_runs_that_cannot_be_plotted_are_an_error_of_one_line(done, tmp_path):
    out = done("gpt2")[1]
    mistaken(
        run("plot", tmp_path, "-o", tmp_path / "a.png"),
        f"{tmp_path}: is not the folder of a run: ",
        "metrics.jsonl",
        "No such file",
    )
    mistaken(run("plot", out, "-o", tmp_path / "a.doc"), "a.doc", ".png", ".svg")
    (tmp_path / "matplotlib.py").write_text("raise ImportError")
    mistaken(
        run("plot", out, "-o", tmp_path / "a.png", env={"PYTHONPATH": f"{tmp_path}"}),
        "pip install matplotlib",
    )
    assert not [*tmp_path.glob("a.*")]


def test_two_figures_are_drawn_one_after_the_other_and_pgf_is_refused(tmp_path):
    runs = [plot.parse("a", '{"step": 1, "loss": 2.0, "tokens": 9}', "{}")]
    for name in ("one.png", "two.svg"):
        plot.draw(runs, f"{tmp_path}/{name}")
        assert (tmp_path / name).stat().st_size > 1000
    with pytest.raises(ValueError, match="the ending must be one of .*png"):
        plot.draw(runs, f"{tmp_path}/three.pgf")
