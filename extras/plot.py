#!/usr/bin/env python3
"""Draw training runs as one figure: loss against steps and tokens, throughput, learning rate.

python extras/plot.py out other -o loss.png

A run is a folder, or a URL, with the metrics.jsonl of run.py. The legend names the flags in which
the runs differ. Faint lines are measured values. Full lines are running means, or for the
throughput running medians, over full windows of 1/20 of the values. Needs click and matplotlib.
"""

import json
import math
from collections.abc import Callable, Sequence
from itertools import cycle
from statistics import fmean, median
from typing import Any, NamedTuple

import click
import matplotlib
from matplotlib.figure import Figure  # not pyplot, which has global state and opens windows
from matplotlib.ticker import EngFormatter

# The colours of Okabe and Ito (2008), without those with a contrast to white below 3 to 1. Dashes
# change too, so four runs can be told apart in black and white, and 20 in colour.
COLORS = ("#0072B2", "#D55E00", "#000000", "#009E73", "#CC79A7")
DASHES = ("-", "--", ":", "-.")
CURVES = (  # x, y, the label of y, and how y is smoothed
    ("step", "loss", "loss in nats (dots: validation)", fmean),
    ("tokens", "loss", "", fmean),
    ("step", "tokens_per_s", "tokens per second", median),
    ("step", "lr", "learning rate", fmean),
)
# Flags that the legend does not name: they change no result, or follow from the rest.
HIDDEN = (
    "vocab spawn timeout out eval_every eval_tokens save_every log_every keep accum checkpoint "
    "checkpoint_activations"
).split()
STYLE: Any = {
    "font.size": 8,
    "text.parse_math": False,  # A "$" in a name would begin a formula.
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "0.9",
    "legend.frameon": False,
    "savefig.dpi": 300,
    "pdf.fonttype": 42,  # journals require it
}


class Run(NamedTuple):
    """What a metrics.jsonl says."""

    name: str
    records: list[dict[str, Any]]  # of each step the last one, in the order of steps
    config: dict[str, Any]  # flags of the last start, and ranks


def read(folder: str) -> Run:
    """Read the metrics.jsonl in a folder or at a URL. ValueError if it has no step."""
    path, opener = f"{folder}/metrics.jsonl", open
    if "://" in folder:
        from fsspec import open as opener  # type: ignore[no-redef]
    with opener(path, "r") as file:
        lines = json.loads(f"[{','.join(file)}]")  # as a whole: an error then names the line
    records: list[dict[str, Any]] = []
    config: dict[str, Any] = {}
    for line in lines:
        if "step" in line:
            # A resumed run repeats steps, or leaves them out.
            while records and records[-1]["step"] >= line["step"]:
                records.pop()
            records.append(line)
        else:
            config = line["config"] | {"ranks": line["ranks"]}
    if not records:
        raise ValueError(f"{path} has no step")
    return Run(folder, records, config)


def smooth(values: Sequence[float], average: Callable[[Sequence[float]], float]) -> list[float]:
    """Return the average of each value and its neighbours: on each side 1/40 of all, at most 250.

    A value that has fewer neighbours on one side becomes NaN: with smaller windows, the line would
    end at the last value, which is noise. NaN in `values` is left out.
    """
    reach, out = min(250, len(values) // 40), []
    for i in range(len(values)):
        near = [v for v in values[max(0, i - reach) : i + reach + 1] if math.isfinite(v)]
        full = reach <= i < len(values) - reach and near
        out.append(average(near) if full else math.nan)
    return out


def label(run: Run, runs: Sequence[Run]) -> str:
    """Return the name of a run, with the flags in which the runs differ."""
    differing = [
        f"{name.replace('_', '-')} {value}"
        for name, value in run.config.items()
        if name not in HIDDEN and any(other.config.get(name) != value for other in runs)
    ]
    return f"{run.name} ({', '.join(differing)})" if differing else run.name


def draw(runs: Sequence[Run]) -> Figure:
    """Return a figure of four panels."""
    figure = Figure(figsize=(7, 5), layout="constrained")
    panels = figure.subplots(2, 2).flat
    for panel, (x, y, title, average) in zip(panels, CURVES):
        for run, color, dash in zip(runs, cycle(COLORS), cycle(DASHES)):
            xs, ys = [r[x] for r in run.records], [r[y] for r in run.records]
            panel.plot(xs, ys, color=color, linewidth=0.6, alpha=0.35)
            line = smooth(ys, average)  # type: ignore[arg-type]
            panel.plot(xs, line, color=color, linestyle=dash, label=label(run, runs))
            dots = [(r[x], r["val_loss"]) for r in run.records if "val_loss" in r]
            if y == "loss" and dots:
                panel.plot(*zip(*dots), "o", color=color, markerfacecolor="white")
        panel.set(xlabel=x, ylabel=title)
        panel.set_xlim(left=0)
        if y != "loss":
            panel.set_ylim(bottom=0)
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
    panels[2].yaxis.set_major_formatter(EngFormatter(sep=""))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", handlelength=4)
    return figure


@click.command()
@click.argument("out", nargs=-1, required=True)
@click.option("-o", "--output", required=True, help="Picture: .png, .svg or .pdf.")
def main(out: Sequence[str], output: str) -> None:
    """Draw the metrics of runs, of which OUT are the folders or URLs."""
    matplotlib.rcParams.update(STYLE)
    try:
        draw([read(folder) for folder in out]).savefig(output)
    except (OSError, ValueError) as error:
        raise click.UsageError(f"{error}") from error
    click.echo(f"wrote {output}")


if __name__ == "__main__":
    main()
