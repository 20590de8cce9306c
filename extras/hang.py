"""Print in which line each rank is, when a rank no longer makes progress.

    from extras import hang

    with ddp_setup.process_group() as world, hang.report(world):
        train(world)

If a rank has been in the same call for 30 s, one rank prints the lines of all ranks, for example of
a collective that only rank 0 calls. This ends nothing: the wait goes on until the timeout of
process_group.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

# Files whose names begin with one of these do not belong to the program. "<" is code without file.
LIBRARIES = "<", *map(os.path.dirname, (os.__file__, *torch.__path__))


@contextmanager
def report(world: Any, seconds: float = 30.0) -> Iterator[None]:
    """Watch the thread that calls this function, for the duration of the `with` block.

    All ranks must use this function, inside the block of process_group.

    world: ddp_setup.World, of which this uses rank and size.
    seconds: the line is printed if the stack of a rank has not changed for this time, once per
        wait. That can also be slow work in one call, for example of a compiler. The clocks of
        several machines may differ by less than half of it.
    """
    if world.size == 1:
        yield
        return
    ended = threading.Event()
    # A connection of its own: the main thread can block the other one.
    store, *_ = next(dist.rendezvous("env://"))
    # torchrun keeps the keys of the ranks that it started before.
    store = dist.PrefixStore(f"hang {os.environ.get('TORCHELASTIC_RESTART_COUNT')}", store)
    arguments = world, store, seconds, threading.get_ident(), ended
    watcher = threading.Thread(target=_watch, args=arguments, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join(5)


def _watch(
    world: Any, store: dist.Store, seconds: float, thread: int, ended: threading.Event
) -> None:
    """Compare the stack of a thread with the one before, 50 times a second.

    A rank that works must not have the same stack in all samples by chance.
    """
    before, since, written, printed = None, 0.0, 0.0, False
    with suppress(dist.DistError):  # The process that served the store has ended.
        while not ended.wait(0.02):
            frames = [*traceback.walk_stack(sys._current_frames()[thread])]
            stack, now = [(frame.f_code, frame.f_lasti) for frame, _ in frames], time.time()
            if stack != before:
                before, since, printed = stack, now, False
            if now < written + seconds / 30:
                continue
            if now > since + seconds and not printed:
                printed = _print(world, store, now, now - seconds / 2)
            lines = [
                f"{os.path.basename(frame.f_code.co_filename)}:{line}"
                for frame, line in frames
                if not frame.f_code.co_filename.startswith(LIBRARIES)
            ]
            written = now
            store.set(f"{world.rank}", json.dumps([now, since, printed, " < ".join(lines)]))


def _print(world: Any, store: dist.Store, now: float, half: float) -> bool:
    """Print the lines of all ranks, unless a lower rank that waits, too, does it.

    Return whether they are printed. If not, that rank may have been stopped, so ask again.
    """
    places = []
    for rank in range(world.size):
        # Unlike get, this does not wait for a missing key.
        unknown = json.dumps([now, now, False, "a line before hang.report"])
        written, since, printed, lines = json.loads(store.compare_set(f"{rank}", "", unknown))
        if rank < world.rank and since < half and (printed or written > half):
            return printed  # type: ignore[no-any-return]
        places.append(f"rank {rank} for {now - since:.0f} s at {lines}")
    print("WARNING: no progress:", ", ".join(places), file=sys.stderr, flush=True)
    return True
