"""Run run.py, or ranks of it, with a fault at a place that does not depend on time.

    TEST_SIGNAL="1 40 main 500 9 self" python tests/faults/signalled.py ARGUMENTS OF run.py

When rank 1 has done 40 steps since its start, and then makes the 500th function call in the main
thread, it sends signal 9 to itself. 0 steps: count from the start of `train`. Instead of "main":
"save", for the thread that saves checkpoints, always with 0 steps. Instead of the signal: "raise",
for an exception, or a command "ip_...". Instead of "self": "parent", or "group" for all processes of the program.

The children of --spawn import this file as their main module, so the patches are made there too.
"""

import ctypes
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

sys.path.insert(0, f"{Path(__file__).resolve().parents[2]}")

import torch

import loop
import run

# A fork of a process that has imported torch starts in a moment.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["signalled", "torch._dynamo"])
SERVER = threading.Lock()


def install() -> None:
    """Prepare the fault that TEST_SIGNAL describes."""
    rank, after, thread, at, what, target = os.environ["TEST_SIGNAL"].split()
    calls, train, train_ = count(1), run.train, loop.train_

    def count_call(frame: FrameType, event: str, _: object) -> None:
        name = threading.current_thread().name if thread == "save" else "ThreadPool"
        if event not in ("call", "c_call") or not name.startswith("ThreadPool"):
            return
        if next(calls) == int(at):
            if what == "raise":
                raise RuntimeError("the cause")
            if what.startswith("ip_"):  # a command that changes the network
                os.system(what.replace("_", " "))
                return
            # 0 is the process group.
            os.kill({"self": os.getpid(), "parent": os.getppid(), "group": 0}[target], int(what))

    def watch(steps_done: int) -> None:
        if steps_done == int(after) and rank == os.environ.get("RANK", "0"):
            (threading if thread == "save" else sys).setprofile(count_call)

    def watched(*args: Any) -> int:
        watch(0)
        return train(*args)

    def watched_steps(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for number, each in enumerate(train_(*args, **kwargs), 1):
            watch(number)
            yield each

    run.train, loop.train_ = watched, watched_steps


def is_same(out: Path, other: Path) -> bool:
    """Whether the last states are bitwise equal, and all losses that were logged, also repeated ones."""
    from conftest import losses, same, state  # the program itself does not need pytest

    parts = [
        [state(folder)[key] for key in ("model", "optimizers", "step")] for folder in (out, other)
    ]
    return same(*parts) and {*losses(out)} <= {*losses(other)}


class Ended(NamedTuple):
    codes: list[int]  # exit code of each rank
    text: str  # what all ranks have printed


def run_ranks(
    args: Sequence[object],
    size: int = 1,
    fault: str = "",
    lost: int = -1,
    hosts: Sequence[str] = (),
    **more: str,
) -> Ended:
    """Run run.py in forks, with the launch variables of `size` ranks, each with one thread.

    fault: TEST_SIGNAL. lost: a rank that is killed when all others have ended. hosts: a network
    namespace for each rank. more: see be_rank. AssertionError if the others do not end within two minutes.
    """
    output, port = f"{args[-1]}.text", random.SystemRandom().randint(10000, 32767)
    variables = {"WORLD_SIZE": f"{size}", "MASTER_PORT": f"{port}", "MASTER_ADDR": "127.0.0.1"}
    variables |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TEST_SIGNAL": fault}
    variables |= {"LOCAL_WORLD_SIZE": f"{size}", **more}
    if hosts:
        variables |= {
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "10.0.0.1",
            "GLOO_SOCKET_IFNAME": "eth0",
        }
    ranks = []
    for rank in range(size):
        variables |= {"RANK": f"{rank}", "LOCAL_RANK": "0" if hosts else f"{rank}"}
        start = [*map(str, args)], {**variables}, output, hosts[rank] if hosts else ""
        ranks.append(FORKS.Process(target=be_rank, args=start))
        with SERVER:
            ranks[-1].start()
    end = time.monotonic() + 120
    alive = [*range(size)]
    while {*alive} - {lost} and time.monotonic() < end:
        time.sleep(0.02)
        alive = [rank for rank in range(size) if ranks[rank].is_alive()]
    for each in ranks:
        each.kill()
        each.join()
    text = Path(output).read_text(errors="replace")
    os.remove(output)
    assert {*alive} <= {lost}, f"ranks {alive} hang: {text}"
    return Ended([each.exitcode for each in ranks], text)


def be_rank(args: list[str], variables: dict[str, str], output: str, host: str) -> None:
    """Be a rank. limit: largest size of a file. strace: options of strace for this process."""
    limit, strace = (variables.pop(name, "") for name in ("limit", "strace"))
    os.environ.update(variables)
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1), os.dup2(handle, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which the fork server ignores
    torch.set_num_threads(1)
    if host:
        assert not ctypes.CDLL(None).setns(os.open(f"/run/netns/{host}", os.O_RDONLY), 0)
    if variables["TEST_SIGNAL"]:
        install()
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    if strace:
        options = f"-f -o /dev/null -p {os.getpid()} {strace}".replace("PID", f"{os.getpid()}")
        traced = subprocess.Popen(["strace", *options.split()], stderr=subprocess.PIPE, text=True)
        assert "attached" in traced.stderr.readline()
    sys.exit(run.main(args))


if __name__ != "signalled":  # but the program, or a child of its --spawn
    install()

if __name__ == "__main__":
    sys.exit(run.main())
