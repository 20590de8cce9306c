"""A trace of a few steps of any training loop, for chrome://tracing or ui.perfetto.dev.

for step, report in traced(train_(...), 5, "trace.json"):
    ...                                  # its time is in the trace too
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

T = TypeVar("T")
WARMUP = 6  # steps; the last of them with the profiler on, as its own start takes time too


def traced(steps: Iterable[T], count: int, path: str) -> Iterator[T]:
    """The same steps. Of `count` of them, after WARMUP, a trace is written to `path`; of fewer if they end sooner."""
    from torch.profiler import profile, schedule

    steps = iter(steps)
    yield from islice(steps, WARMUP - 1)
    plan = schedule(wait=0, warmup=1, active=count, repeat=1)
    with profile(schedule=plan, on_trace_ready=lambda p: p.export_chrome_trace(path), acc_events=True) as profiler:
        for step in islice(steps, 1 + count):
            yield step
            profiler.step()
    yield from steps
