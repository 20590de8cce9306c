"""Report where each rank is when the ranks no longer make progress: `with hang.report(world, 60):`.

    with ddp_setup.process_group("auto", 600) as world, hang.report(world, 300):
        ...

A rank that has waited in one collective for 30 s prints a warning with the current program lines of
all ranks. After `timeout` seconds it prints them as an error, and the ranks that wait end with exit
code 1. The lines of a rank are the innermost ones, and the innermost one of your own script.
Without this file, a rank that has waited for the timeout of process_group only says that it waited
in vain. A thread of each rank does this, with gloo and with NCCL. It reads torch's flight recorder
by private functions, and warns if it cannot.
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
# Files of this project that are copied beside a script, and folders of other packages.
COPIED = {
    *"ddp_setup.py loop.py ckpt.py gpt.py chardata.py batch_norm.py cuda_graph.py fsdp.py".split(),
    *"muon.py profiling.py remote.py replicas.py sharded.py slow_ranks.py tokenizer.py".split(),
    *"site-packages dist-packages".split(),
}


@contextmanager
def report(world: Any, timeout: float, warn_after: float = 30) -> Iterator[None]:
    """Watch this rank during the block.

    All ranks must use this function, inside the block of ddp_setup.process_group. wait_together and
    from_rank_zero do not count as waiting, because they are for slow work.

    world: ddp_setup.World.
    timeout: seconds in one collective after which a rank is stuck, less than that of process_group.
    warn_after: seconds in one collective after which a warning is printed, once in each wait. It
        ends nothing. If they are not less than the timeout, there is no warning.
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
    arguments = world, store, timeout, warn_after, threading.get_ident(), ended
    thread = threading.Thread(target=_watch, args=arguments, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(5)


def _watch(
    world: Any,
    store: Any,
    timeout: float,
    warn_after: float,
    main: int,
    ended: threading.Event,
) -> None:
    """Store this rank's lines at intervals. Warn, and end the process, when it is stuck."""
    before, since, warned = None, time.monotonic(), False
    try:
        _waits(world, _collectives(world))  # If it fails, say so now.
        while not ended.wait(min(warn_after, timeout) / 20):
            numbers = _collectives(world)
            waiting = numbers == before and _waits(world, numbers)
            if not waiting:
                before, since, warned = numbers, time.monotonic(), False
            count = store.add("count", 1)  # all ranks share this counter
            store.set(f"state {world.rank}", json.dumps([count, waiting, _program_lines(main)]))
            waited = time.monotonic() - since
            if waited >= timeout:
                break
            if waited >= warn_after and not warned:
                warned = True
                places, others_wait = _places(world, store, count)
                if not others_wait:
                    print(
                        f"WARNING: no progress for {warn_after:g} s (the ranks end after "
                        f"{timeout:g} s): {places}",
                        file=sys.stderr,
                        flush=True,
                    )
        else:
            return
        line = f"Error: no progress for {timeout:g} s: {_places(world, store, count)[0]}"
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


def _places(world: Any, store: Any, count: int) -> tuple[str, bool]:
    """Return where all ranks are, and whether a rank below this one waits, too, and answers."""
    lines, others_wait = [], False
    for rank in range(world.size):
        # Unlike get, compare_set does not wait for a missing key.
        written, waits, place = json.loads(store.compare_set(f"state {rank}", "", '[0, false, ""]'))
        # A rank answers if it has written in about the last three intervals.
        answers = written > count - 3 * world.size
        others_wait |= answers and waits and rank < world.rank
        lines.append(f"rank {rank} at {place}" if answers else f"no answer from rank {rank}")
    return ", ".join(lines), others_wait


def _program_lines(thread: int) -> str:
    """Return the three innermost program lines of a thread's stack, the innermost first.

    If none of them is of the user's script, its innermost line follows.
    """
    # traceback.extract_stack would read source files. Their storage can hang.
    paths = [
        (Path(name), number)
        for frame, number in traceback.walk_stack(sys._current_frames()[thread])
        if not (name := frame.f_code.co_filename).startswith(LIBRARIES)
    ]
    lines = [f"{path.name}:{number}" for path, number in paths]
    script = next((i for i, (path, _) in enumerate(paths) if not COPIED & {*path.parts}), 0)
    return " < ".join(lines[:3] + ["…", lines[script]] * (script > 2)) or "a library"


def _collectives(world: Any) -> list[Any]:
    """Return the numbers of the last collectives of each group, with gloo and with NCCL.

    ValueError if the recorder does not record.
    """
    # Without these private functions of torch, there is no report. Only CUDA builds have the
    # second one.
    c10d: Any = torch._C._distributed_c10d
    numbers = [json.loads(c10d._dump_fr_trace_json(False, False))["pg_status"]]
    if not numbers[0]:  # process_group has made at least one collective
        raise ValueError("torch's flight recorder is off; is TORCH_FR_BUFFER_SIZE 0?")
    if world.device.type == "cuda":
        numbers.append(json.loads(c10d._dump_nccl_trace_json(False, False))["pg_status"])
    return numbers


def _waits(world: Any, numbers: list[Any]) -> bool:
    """Return whether this rank waits in a collective. This takes 50 ms of CPU time."""
    c10d: Any = torch._C._distributed_c10d  # see _collectives
    # Slow work in wait_together is not a hang, so its group does not count.
    slow = world.gloo.group_name
    return any(
        group["last_enqueued_collective"] != group["last_completed_collective"]
        for nccl in numbers[1:]
        for group in nccl.values()
    ) or any(
        not entry["retired"] and entry["process_group"][0] != slow
        for entry in json.loads(c10d._dump_fr_trace_json(True, False))["entries"]
    )
