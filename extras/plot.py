"""Draw training runs as one figure: loss against steps and tokens, throughput, learning rate.

    runs = [parse("out", open("out/metrics.jsonl").read(), open("out/config.json").read())]
    draw(runs, "loss.svg")

Needs matplotlib, but not torch: a run is described by two files in its --out folder. Without
config.json, the legend has only its name.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import cycle
from statistics import fmean, median
from typing import Any, NamedTuple

try:
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot, which has global state and opens windows
    from matplotlib.lines import Line2D
    from matplotlib.ticker import EngFormatter
except ImportError as error:
    raise ImportError("pip install matplotlib to plot") from error

# The colours of Okabe and Ito (2008), without those with a contrast to white below 3 to 1. Dashes
# change too, so four runs can be told apart in black and white, and 20 in colour.
COLORS = ("#0072B2", "#D55E00", "#000000", "#009E73", "#CC79A7")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (6, 1.5, 1, 1.5)))
MARKERS = ("o", "s", "^", "D", "v")
# What config.json contains but the legend does not: it changes no result, or follows from the rest.
HIDDEN = {
    *"vocab eval_tokens spawn use timeout out eval_every save_every log_every keep accum".split(),
    *"checkpoint checkpoint_activations torch threads peak_flops peak_flops_source".split(),
}
STYLE: dict[str, Any] = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "0.9",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.3,
    "lines.markersize": 4,
    "legend.frameon": False,
    "savefig.dpi": 300,
    "pdf.fonttype": 42,  # journals require it
}


class Run(NamedTuple):
    """A run, as described by the files in its --out folder."""

    name: str
    records: list[dict[str, Any]]  # the lines of metrics.jsonl, all with "tokens"
    config: dict[str, Any]


def parse(name: str, metrics: str, config: str) -> Run:
    """Return the run `name`, from the texts of its metrics.jsonl and config.json ("": none).

    Lines that are not JSON objects with a step are ignored, since a crash can leave one. ValueError
    if no line is left.
    """
    records: list[dict[str, Any]] = []
    for line in metrics.splitlines():
        with suppress(ValueError, TypeError, KeyError):
            record = json.loads(line)
            records += [record] if record["step"] >= 0 else []
    if not records:
        raise ValueError(f"{name}: metrics.jsonl has no line with a step")
    tokens = {record["step"]: record["tokens"] for record in records if "tokens" in record}
    # the lines of evaluations have no "tokens" of their own
    records = [{"tokens": tokens.get(record["step"]), **record} for record in records]
    try:
        return Run(name, records, dict(json.loads(config or "{}")))
    except (ValueError, TypeError):
        raise ValueError(f"{name}: config.json is not a JSON object") from None


def curve(run: Run, x: str, y: str) -> tuple[list[float], list[float]]:
    """Return the numbers under `x` and `y` of the records that have `y`; NaN, a gap, for null."""

    def numbers(key: str) -> list[float]:
        values = [record[key] for record in run.records if y in record]
        return [value if isinstance(value, (int, float)) else math.nan for value in values]

    return numbers(x), numbers(y)


def smooth(values: Sequence[float], average: Callable[[Sequence[float]], float]) -> list[float]:
    """Return the average of each value and its neighbours: on each side 1/40 of all, at most 250.

    NaN stays NaN. A value with fewer neighbours on one side, at the beginning and at the end,
    becomes NaN, because smaller windows would end the line at the last value, which is noise.
    """
    reach, out = min(250, len(values) // 40), []
    for i, value in enumerate(values):
        full = reach <= i < len(values) - reach and math.isfinite(value)
        near = [v for v in values[max(0, i - reach) : i + reach + 1] if math.isfinite(v)]
        out.append(average(near) if full else math.nan)
    return out


def labels(runs: Sequence[Run]) -> list[str]:
    """Return for each run the last part of its name, and the settings in which the runs differ.

    A setting is named only for the runs that have it: config.json can be missing, or be older.
    """
    short = [_last(run.name) for run in runs]
    names = short if len({*short}) == len(runs) else [run.name for run in runs]
    settings: list[list[str]] = [[] for _ in runs]
    for key in dict.fromkeys(key for run in runs for key in run.config if key not in HIDDEN):
        having = [i for i, run in enumerate(runs) if key in run.config]
        values = [_paths(runs[i].config[key]) for i in having]
        if len({*map(str, values)}) > 1:
            said = [" ".join(map(_last, paths)) for paths in values]
            if len({*said}) < len({*map(str, values)}):
                said = [" ".join(paths) for paths in values]
            for i, text in zip(having, said):
                settings[i].append(f"{key.replace('_', '-')} {text or 'none'}")
    return [f"{name} ({', '.join(s)})" if s else name for name, s in zip(names, settings)]


def _last(path: str) -> str:
    """Return the last part of a path."""
    return os.path.basename(os.path.normpath(path))


def _paths(value: Any) -> list[str]:
    """Return the value of a flag as a list of texts, of which some are paths."""
    if isinstance(value, list):
        return [f"{path}" for path in value]
    return [] if value is None else [f"{value}"]


def styles() -> Iterator[dict[str, Any]]:
    """Yield the style of the first run, of the second run, and so on."""
    for color, dash, marker in zip(cycle(COLORS), cycle(DASHES), cycle(MARKERS)):
        yield {"color": color, "linestyle": dash, "marker": marker, "markerfacecolor": "white"}


def draw(runs: Sequence[Run], path: str) -> None:
    """Write the figure to `path`. Its ending says the format; ValueError if it is unknown."""
    with matplotlib.rc_context(dict[Any, Any](matplotlib.rcParamsDefault) | STYLE):
        figure(runs).savefig(path)


def figure(runs: Sequence[Run]) -> Any:
    """Return a Figure of four panels: loss by step and by tokens, throughput, learning rate."""
    drawn = Figure(figsize=(7, 5), layout="constrained")
    panels = list(drawn.subplots(2, 2).flat)
    for run, style in zip(runs, styles()):
        _draw_curve(panels[0], run, "step", "loss", fmean, style)
        _draw_curve(panels[1], run, "tokens", "loss", fmean, style)
        _draw_curve(panels[2], run, "step", "tokens_per_s", median, style)
        panels[3].plot(*curve(run, "step", "lr"), **{**style, "marker": ""})
        for panel, x in zip(panels, ("step", "tokens")):
            panel.plot(*curve(run, x, "val_loss"), **{**style, "linestyle": ""})
    _label(drawn, panels, labels(runs))
    return drawn


def _draw_curve(
    panel: Any,
    run: Run,
    x: str,
    y: str,
    average: Callable[[Sequence[float]], float],
    style: dict[str, Any],
) -> None:
    """Draw the values as a faint line and their running average as a full line."""
    xs, ys = curve(run, x, y)
    panel.plot(xs, ys, linewidth=0.6, alpha=0.35, color=style["color"])
    panel.plot(xs, smooth(ys, average), **{**style, "marker": ""})


def _label(figure: Any, panels: Any, names: Sequence[str]) -> None:
    """Add labels to the axes, a legend of the runs, and a legend of lines and markers."""
    xs = ("step", "tokens", "step", "step")
    ys = ("loss (nats per token)", "", "tokens per second", "learning rate")
    for panel, letter, x, y in zip(panels, "abcd", xs, ys):
        panel.set_title(letter, loc="left", fontweight="bold")
        panel.set(xlabel=x, ylabel=y)
        panel.set_xlim(left=0)
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
    for panel in panels[2:]:
        panel.set_ylim(bottom=0)
    panels[2].yaxis.set_major_formatter(EngFormatter(sep=""))
    plain = [name.replace("$", r"\$") for name in names]  # a "$" would begin a formula
    keys = [Line2D([], [], label=name, **style) for name, style in zip(plain, styles())]
    figure.legend(handles=keys, loc="outside upper left", handlelength=4)
    line = Line2D([], [], color="0.4", label="training")
    dots = Line2D([], [], color="0.4", label="validation", marker="o", linestyle="")
    panels[0].legend(handles=[line, dots])
