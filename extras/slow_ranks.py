"""Name a rank that computes much slower than the other ranks.

    steps, timed_loss = watch(steps, loss_fn, print)
    for step, report in train_(model, [optimizer], steps, timed_loss):
        ...

`train_` is that of loop.py, or any loop that iterates over the steps on all ranks together and
calls timed_loss(model, micro-batch). Under DistributedDataParallel all steps take equally long on
all ranks, because the ranks wait for the slowest one in the all-reduce. So this file measures the
loss function alone: the forward pass, in which no rank waits for another. (A model with buffers
needs broadcast_buffers=False for this.) Each rank's time is a median over many calls, and a rank
must be slow for several of these medians, so that other short work on a machine is not reported.

Needs torch.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

LossFn = Callable[[nn.Module, Any], Any]
# start and end of each call (seconds, or CUDA events), and the number of elements in the batch
Times = list[tuple[Any, Any, int]]


def watch(
    steps: Iterable[Any],
    loss_fn: LossFn,
    report: Callable[[str], object],
    every: int = 25,
    in_a_row: int = 4,
    factor: float = 2.0,
) -> tuple[Iterator[Any], LossFn]:
    """Return (steps, loss_fn) that do the same and compare the ranks in every `every`-th step.

    All ranks must iterate over the steps together. `report` gets one line, on rank 0, if a rank
    takes more than `factor` times the median of all ranks in `in_a_row` comparisons in a row. A
    rank with larger micro-batches than the median is not reported: it has more work. A comparison
    is an all-reduce of two numbers per rank, whose result is read at the next comparison: on CUDA,
    the host does not wait for the device.
    """
    if not dist.is_initialized():
        return iter(steps), loss_fn
    times: Times = []
    cuda = "nccl" in dist.get_backend_config()

    def timed_loss(model: nn.Module, batch: Any) -> Any:
        start = now(cuda)
        result = loss_fn(model, batch)
        # tree_leaves is private. Without it, a rank with larger micro-batches would be reported.
        elements = sum(x.numel() for x in tree_leaves(batch) if isinstance(x, torch.Tensor))
        times.append((start, now(cuda), elements))
        return result

    return compare_ranks(steps, times, report, every, in_a_row, factor), timed_loss


def compare_ranks(
    steps: Iterable[Any],
    times: Times,
    report: Callable[[str], object],
    every: int,
    in_a_row: int,
    factor: float,
) -> Iterator[Any]:
    """Yield the steps; before every `every`-th one, compare the times and delete them."""
    size, cuda = dist.get_world_size(), "nccl" in dist.get_backend_config()
    arriving, slow = torch.ones(2, size), [0] * size
    for number, step in zip(count(1), steps):
        yield step
        if number % every:
            continue
        seconds, elements = arriving.tolist()  # those of the comparison before
        usual, most = statistics.median_low(seconds), statistics.median_low(elements)
        # On CUDA the times are 0 if the device has finished no call since the last comparison.
        slow = [
            n + 1 if own > factor * usual > 0 and work <= most else 0
            for n, own, work in zip(slow, seconds, elements)
        ]
        for rank, n in enumerate(slow):
            if n == in_a_row and dist.get_rank() == 0:
                report(
                    f"rank {rank} takes {seconds[rank] / usual:.1f} times as long as the median of "
                    f"the ranks for a forward pass, for the last {in_a_row * every} steps"
                )
        values = torch.zeros(2, size, device="cuda" if cuda else "cpu")
        # An assignment would copy a number from the host, which waits for the device.
        values[0, dist.get_rank()].fill_(median_seconds(times, cuda))
        values[1, dist.get_rank()].fill_(statistics.median([work for _, _, work in times] or [0]))
        times.clear()
        dist.all_reduce(values)
        arriving = values.to("cpu", non_blocking=True)


def now(cuda: bool) -> Any:
    """Return the present time in seconds, or on CUDA an event that the device will record."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def median_seconds(times: Times, cuda: bool) -> float:
    """Return the median time of the calls, on CUDA of those that the device has finished."""
    if cuda:
        seconds = [float(start.elapsed_time(end)) / 1000 for start, end, _ in times if end.query()]
    else:
        seconds = [float(end - start) for start, end, _ in times]
    return statistics.median(seconds or [0.0])
