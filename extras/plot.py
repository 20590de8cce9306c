"""Training runs as a figure for a paper: loss against steps and tokens, throughput, learning rate.

    runs = [parse("out", open("out/metrics.jsonl").read(), open("out/config.json").read())]
    draw(runs, "loss.svg")

Needs matplotlib, and neither torch nor a GPU: a run is what lies in its out folder.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import cycle
from statistics import fmean, median
from typing import Any, NamedTuple

# Okabe and Ito's (2008), less those with a contrast to white below 3 to 1. The dashes change with every run too, so
# that four runs are told apart in black and white, and 20 in colour.
COLORS = ("#0072B2", "#D55E00", "#000000", "#009E73", "#CC79A7")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (6, 1.5, 1, 1.5)))
MARKERS = ("o", "s", "^", "D", "v")
TOLD = ("arch", "layers", "heads", "embd", "block_size", "batch_size", "optimizer", "lr", "dropout", "dtype", "ranks")
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
    "svg.hashsalt": "",  # the same runs make the same file
    "pdf.fonttype": 42,  # as journals ask
}


class Run(NamedTuple):
    """What an out folder tells."""

    name: str
    records: list[dict[str, Any]]  # the lines of metrics.jsonl, each with its "tokens"
    config: dict[str, Any]


def parse(name: str, metrics: str, config: str) -> Run:
    """The run `name`, from the texts of its metrics.jsonl and config.json.

    Lines that are not JSON objects with a step, as a crash can leave them, are dropped. ValueError if none is left.
    """
    records: list[dict[str, Any]] = []
    for line in metrics.splitlines():
        with suppress(ValueError, TypeError, KeyError):
            record = json.loads(line)
            records += [record] if record["step"] >= 0 else []
    if not records:
        raise ValueError(f"{name}: no line of metrics.jsonl tells of a step")
    tokens = {record["step"]: record["tokens"] for record in records if "tokens" in record}
    records = [{"tokens": tokens.get(record["step"]), **record} for record in records]  # for those of evaluations
    try:
        return Run(name, records, dict(json.loads(config)))
    except (ValueError, TypeError):
        raise ValueError(f"{name}: config.json is not a JSON object") from None


def curve(run: Run, x: str, y: str) -> tuple[list[float], list[float]]:
    """The numbers under `x` and `y` of the lines that have `y`. What was not finite, null in JSON, is NaN: a gap."""
    lines = [line for line in run.records if y in line]
    xs, ys = ([line[key] if isinstance(line[key], (int, float)) else math.nan for line in lines] for key in (x, y))
    return xs, ys


def smooth(values: Sequence[float], average: Callable[[Sequence[float]], float]) -> list[float]:
    """The average of each value and its neighbours, a fortieth of all to either side. A gap, NaN, stays one.

    At the beginning, where a loss falls, no more of those after a value than of those before it.
    """
    reach, out = -(-len(values) // 40), []
    for i, value in enumerate(values):
        near = [v for v in values[i - min(i, reach) : i + min(i, reach) + 1] if math.isfinite(v)]
        out.append(average(near) if math.isfinite(value) else math.nan)
    return out


def labels(runs: Sequence[Run]) -> list[str]:
    """For each run the last part of its name, and those of its flags that the others do not all share."""
    short = [os.path.basename(os.path.normpath(run.name)) for run in runs]
    names = short if len({*short}) == len(runs) else [run.name for run in runs]
    differing = [flag for flag in TOLD if len({str(run.config.get(flag)) for run in runs}) > 1]
    told = [", ".join(f"{flag.replace('_', '-')} {run.config.get(flag)}" for flag in differing) for run in runs]
    return [f"{name} ({flags})" if flags else name for name, flags in zip(names, told)]


def styles() -> Iterator[dict[str, Any]]:
    """How the first, the second, ... run is drawn."""
    for color, dash, marker in zip(cycle(COLORS), cycle(DASHES), cycle(MARKERS)):
        yield {"color": color, "linestyle": dash, "marker": marker, "markerfacecolor": "white"}


def draw(runs: Sequence[Run], path: str) -> None:
    """Write the figure to `path`, in the format of its ending. ImportError and ValueError say what is wanting."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError("pip install matplotlib to plot") from None
    with matplotlib.rc_context(dict[Any, Any](matplotlib.rcParamsDefault) | STYLE):
        drawn = figure(runs)
        known, kind = drawn.canvas.get_supported_filetypes(), os.path.splitext(path)[1][1:].lower()
        if kind not in known:
            raise ValueError(f"{path}: its ending is none of {', '.join(f'.{name}' for name in known)}")
        drawn.savefig(path, metadata={"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind))


def figure(runs: Sequence[Run]) -> Any:
    """A matplotlib Figure of four panels: loss against steps and tokens, tokens per second, learning rate."""
    from matplotlib.figure import Figure  # and not pyplot: no window, no state

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


def _draw_curve(panel: Any, run: Run, x: str, y: str, average: Callable[[Any], float], style: dict[str, Any]) -> None:
    """What was measured faint, its running average in full."""
    xs, ys = curve(run, x, y)
    panel.plot(xs, ys, linewidth=0.6, alpha=0.35, color=style["color"])
    panel.plot(xs, smooth(ys, average), **{**style, "marker": ""})


def _label(figure: Any, panels: Any, names: Sequence[str]) -> None:
    """Axes, and two legends: which run is which, and what lines and markers are."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import EngFormatter

    axes = [("step", "loss (nats per token)"), ("tokens", ""), ("step", "tokens per second"), ("step", "learning rate")]
    for panel, letter, (x, y) in zip(panels, "abcd", axes):
        panel.set_title(letter, loc="left", fontweight="bold")
        panel.set(xlabel=x, ylabel=y)
        panel.set_xlim(left=0)
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
    for panel in panels[2:]:
        panel.set_ylim(bottom=0)
    panels[2].yaxis.set_major_formatter(EngFormatter(sep=""))
    keys = [Line2D([], [], label=name, **style) for name, style in zip(names, styles())]
    figure.legend(handles=keys, loc="outside upper left", handlelength=4)
    line = Line2D([], [], color="0.4", label="training")
    dots = Line2D([], [], color="0.4", label="validation", marker="o", linestyle="")
    panels[0].legend(handles=[line, dots])
