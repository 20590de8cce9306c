"""Write a trace of a few steps of any training loop, for chrome://tracing or ui.perfetto.dev.

    for step, report in traced(train_(...), 5, "trace.json"):
        ...                                  # the trace includes the time of this block

In `train` of run.py, wrap the call of `loop.train_` in the same way, with the path
f"trace-{world.rank}.json".

Needs torch.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

from torch.profiler import profile, schedule

T = TypeVar("T")
WARMUP = 6  # steps; during the last one the profiler runs already, since its own start takes time


def traced(steps: Iterable[T], count: int, path: str) -> Iterator[T]:
    """Yield the same steps. Write a trace of `count` of them, after the first WARMUP, to `path`.

    If there are fewer than WARMUP + count steps, the trace has fewer steps or is not written.
    """
    steps = iter(steps)
    plan = schedule(wait=0, warmup=1, active=count, repeat=1)

    def write(profiler: profile) -> None:
        profiler.export_chrome_trace(path)

    yield from islice(steps, WARMUP - 1)
    with profile(schedule=plan, on_trace_ready=write, acc_events=True) as profiler:
        for step in islice(steps, 1 + count):
            yield step
            profiler.step()
    yield from steps
