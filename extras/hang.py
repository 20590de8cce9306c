"""Report where each rank is when the ranks no longer make progress: `with hang.report(world, 60):`.

    with ddp_setup.process_group("auto", 600) as world, hang.report(world, 300):
        ...

A rank that has waited in one collective for `timeout` seconds prints the current program lines of
all ranks, and the ranks that wait end with exit code 1. Without this file, a rank that has waited
for the timeout of process_group only says that it waited in vain. A thread of each rank does this,
with gloo and with NCCL. It reads torch's flight recorder by private functions, and warns if it
cannot.
"""

import json
import os
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Files whose names begin with one of these do not belong to the program. "<" is code without file.
LIBRARIES = "<", *map(os.path.dirname, (os.__file__, *torch.__path__))


@contextmanager
def report(world: Any, timeout: float) -> Iterator[None]:
    """Watch this rank during the block.

    All ranks must use this function, inside the block of ddp_setup.process_group. wait_together and
    from_rank_zero do not count as waiting, because they are for slow work.

    world: ddp_setup.World.
    timeout: seconds in one collective after which a rank is stuck, less than that of process_group.
    """
    if world.size == 1:
        yield
        return
    # A second connection, because the main thread can block the first one. torchrun's store keeps
    # the keys of former starts, so each start has a random prefix.
    store, *_ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
    prefix = [secrets.token_hex()]
    dist.broadcast_object_list(prefix, group=world.gloo)
    store, ended = dist.PrefixStore(prefix[0], store), threading.Event()
    arguments = world, store, timeout, threading.get_ident(), ended
    thread = threading.Thread(target=_watch, args=arguments, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(5)


def _watch(world: Any, store: Any, timeout: float, main: int, ended: threading.Event) -> None:
    """Store this rank's program lines 20 times per timeout. End the process when it is stuck."""
    before, since = None, time.monotonic()
    try:
        _collectives(world)  # If it fails, say so now.
        while not ended.wait(timeout / 20):
            numbers, waiting = _collectives(world)
            if not waiting or numbers != before:
                before, since = numbers, time.monotonic()
            count = store.add("count", 1)  # all ranks share this counter
            store.set(f"state {world.rank}", json.dumps([count, _program_lines(main)]))
            if time.monotonic() - since >= timeout:
                break
        else:
            return
        lines = []
        for rank in range(world.size):
            # Unlike get, compare_set does not wait for a missing key.
            written, place = json.loads(store.compare_set(f"state {rank}", "", '[0, ""]'))
            # A rank answers if it has written in about the last three intervals.
            answers = written > count - 3 * world.size
            lines.append(f"rank {rank} at {place}" if answers else f"no answer from rank {rank}")
        line = f"Error: no progress for {timeout:g} s: {', '.join(lines)}"
        code = 1
    except dist.DistError:  # The store is lost, and with it other ranks.
        return
    except Exception as error:
        line = f"WARNING: hangs are not reported with torch {torch.__version__}: {error!r}"
        code = 0
    with suppress(dist.DistError):  # The store is lost: its rank has printed the line.
        if store.add(f"line {code}", 1) == 1:
            print(line, file=sys.stderr, flush=True)
    if code:
        # No exception can be raised in the main thread while it is blocked in a collective.
        os._exit(code)


def _program_lines(thread: int) -> str:
    """Return the three innermost program lines of a thread's stack, the innermost first."""
    # traceback.extract_stack would read source files. Their storage can hang.
    lines = [
        f"{Path(name).name}:{number}"
        for frame, number in traceback.walk_stack(sys._current_frames()[thread])
        if not (name := frame.f_code.co_filename).startswith(LIBRARIES)
    ]
    return " < ".join(lines[:3]) or "a library"


def _collectives(world: Any) -> tuple[Any, bool]:
    """Return the numbers of the last collectives, and whether this rank waits in one.

    ValueError if the recorder does not record.
    """
    # Without these private functions of torch, there is no report. Only CUDA builds have the
    # second one.
    c10d: Any = torch._C._distributed_c10d
    gloo = json.loads(c10d._dump_fr_trace_json(True, False))
    numbers = [gloo["pg_status"]]
    if not gloo["pg_status"]:  # process_group has made at least one collective
        raise ValueError("torch's flight recorder is off; is TORCH_FR_BUFFER_SIZE 0?")
    # Slow work in wait_together is not a hang, so its group does not count.
    slow = world.gloo.group_name
    waiting = any(
        not entry["retired"] and entry["process_group"][0] != slow for entry in gloo["entries"]
    )
    if world.device.type == "cuda":
        nccl = json.loads(c10d._dump_nccl_trace_json(False, False))["pg_status"]
        numbers.append(nccl)
        waiting |= any(
            group["last_enqueued_collective"] != group["last_completed_collective"]
            for group in nccl.values()
        )
    return numbers, waiting
