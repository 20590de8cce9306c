"""Write a trace of a few steps of any training loop, for chrome://tracing or ui.perfetto.dev.

    for step, report in traced(train_(...), 5, "trace.json"):
        ...                                  # the trace includes the time of this block

Needs torch.
"""

import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

from torch.profiler import profile, schedule

T = TypeVar("T")
WARMUP = 6  # steps; during the last one the profiler runs already, since its own start takes time


def traced(steps: Iterable[T], count: int, path: str) -> Iterator[T]:
    """Return the same steps. Write a trace of `count` of them, after the first WARMUP, to `path`.

    If the steps end early, a warning says so, and the trace is not complete. With a count of 0, no
    trace is written. ValueError for a URL.
    """
    if "://" in path:
        raise ValueError(f"a trace needs a file, not {path}")
    return _traced(steps, count, path) if count else iter(steps)


def _traced(steps: Iterable[T], count: int, path: str) -> Iterator[T]:
    steps, done = iter(steps), 0
    plan = schedule(wait=0, warmup=1, active=count, repeat=1)

    def write(profiler: profile) -> None:
        profiler.export_chrome_trace(path)

    try:
        for done, step in enumerate(islice(steps, WARMUP - 1), 1):
            yield step
        with profile(schedule=plan, on_trace_ready=write, acc_events=True) as profiler:
            for done, step in enumerate(islice(steps, 1 + count), WARMUP):
                yield step
                profiler.step()
        yield from steps
    finally:
        if done < WARMUP + count:
            needed = f"a trace of {count} steps needs {WARMUP + count} steps"
            print(f"Warning: {needed}, and there were {done}", file=sys.stderr)
