"""Run run.py, and send a signal at a place that does not depend on time.

    TEST_SIGNAL="1 40 main 500 9 self" python tests/faults/signalled.py ARGUMENTS OF run.py

When rank 1 has done 40 steps since its start, and then makes the 500th function call in the main
thread, it sends signal 9 to itself. 0 steps: count from the start of the process group. Instead of
"main": "save", for the thread that saves checkpoints, always with 0 steps, because it depends on
time which step the main thread does meanwhile. Instead of "self": "parent", or "group" for all
processes of the program. Calls inside functions that wait for a thread or, in the main thread, for
a rank are not counted, because their number depends on time.

If TEST_PLACE is the name of a file, the place is written to it: the last step, the thread, the file
and the function. For a save, the step depends on time: it is that of the main thread.

The children of --spawn import this file as their main module, so the patches are made there too.
"""

import os
import sys
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, f"{Path(__file__).resolve().parents[2]}")

import ddp_setup
import loop
import run

RANK, STEPS, THREAD, CALLS, SIGNAL, TARGET = os.environ["TEST_SIGNAL"].split()
WAITING = ["/concurrent/futures/", "/threading.py"]
WAITING += ["/ddp_setup.py", "/torch/distributed/"] if THREAD == "main" else []
calls, steps = count(1), [0]  # steps: the numbers of this process's steps; the first is none
process_group, train_ = ddp_setup.process_group, loop.train_


def count_call(frame: FrameType, event: str, _: object) -> None:
    """Count a function call, as sys.setprofile asks for it; send the signal at the right one."""
    if event not in ("call", "c_call") or len(steps) <= int(STEPS):
        return
    file = frame.f_code.co_filename
    if any(name in file for name in WAITING):
        return
    if THREAD == "save" and not threading.current_thread().name.startswith("ThreadPoolExecutor"):
        return
    if next(calls) == int(CALLS):
        if place := os.environ.get("TEST_PLACE"):
            Path(place).write_text(f"{steps[-1]} {THREAD} {Path(file).name} {frame.f_code.co_name}")
        if TARGET == "group":
            os.killpg(0, int(SIGNAL))
        else:
            os.kill(os.getppid() if TARGET == "parent" else os.getpid(), int(SIGNAL))


def watch() -> None:
    """Count the calls of this process from now on, if it is the chosen rank."""
    if os.environ.get("RANK", "0") == RANK:
        (threading if THREAD == "save" else sys).setprofile(count_call)


def watched_group(*args: Any, **kwargs: Any) -> Any:
    if STEPS == "0":
        watch()
    return process_group(*args, **kwargs)


def watched_train_(*args: Any, **kwargs: Any) -> Iterator[Any]:
    for step, report in train_(*args, **kwargs):
        steps.append(step)
        if len(steps) == int(STEPS) + 1 > 1:
            watch()
        yield step, report


ddp_setup.process_group, loop.train_ = watched_group, watched_train_

if __name__ == "__main__":
    run.program()
