"""run.py with a fault at one place, on one rank:

    TEST_FAULT="forward raise 1 5" python tests/sabotaged.py ARGUMENTS OF run.py

raises on rank 1 when it comes to the model's forward pass for the 5th time; 5+ is every time from then on, rank "all"
is every rank. With TEST_FAULT_TIME=FILE the time of the first fault is written there. The patch is made whenever this
file is imported, and not only when it is run, as the children of --spawn import it as their main module.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, f"{Path(__file__).resolve().parent.parent}")

import chardata
import ckpt
import gpt
import loop
import run

PLACES = {
    "start": (dist, "init_process_group"),
    "reading": (chardata, "read"),
    "forward": (gpt.GPT, "forward"),
    "backward": (torch.Tensor, "backward"),
    "collective": (dist, "all_reduce"),
    "snapshot": (ckpt, "snapshot"),
    "writing": (ckpt, "save"),
    "evaluation": (loop, "evaluate"),
    "teardown": (dist, "destroy_process_group"),
    "loss": (gpt, "loss"),
}


def slowly(call: Callable[[], Any]) -> Any:
    begun = time.monotonic()
    outcome = call()
    time.sleep(max(0.02, 9 * (time.monotonic() - begun)))
    return outcome


def fail(call: Callable[[], Any]) -> Any:
    raise RuntimeError("sabotaged")


def spoilt(call: Callable[[], Any], value: float) -> Any:
    total, count = call()
    return total * value, count


FAULTS = {
    "raise": fail,
    "exit": lambda call: os._exit(7),
    "leave": lambda call: sys.exit(7),
    "kill": lambda call: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda call: (os.kill(os.getpid(), signal.SIGSTOP), call())[1],
    "slow": slowly,
    "pause": lambda call: (time.sleep(0.15), call())[1],
    "nan": lambda call: spoilt(call, float("nan")),
    "inf": lambda call: spoilt(call, float("inf")),
}
place, what, rank, at = os.environ["TEST_FAULT"].split()
calls = count(1)


def strikes() -> bool:
    """Whether this call is one that fails."""
    number = next(calls)
    now = number == int(at.rstrip("+")) or at.endswith("+") and number > int(at[:-1])
    if now := now and rank in ("all", os.environ.get("RANK", "0")):
        told = os.environ.get("TEST_FAULT_TIME")
        if told and not os.path.exists(told):
            Path(told).write_text(f"{time.monotonic()}")
    return now


def sabotage(owner: Any, name: str) -> None:
    original = getattr(owner, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        call = partial(original, *args, **kwargs)
        return FAULTS[what](call) if strikes() else call()

    setattr(owner, name, wrapper)


def spoil_gradient(build: Callable[..., Any]) -> Callable[..., Any]:
    """Models of which one parameter's gradient is not finite."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        model = build(*args, **kwargs)
        spoilt = lambda gradient: torch.full_like(gradient, float(what)) if strikes() else gradient  # noqa: E731
        next(model.parameters()).register_hook(spoilt)
        return model

    return wrapper


if place == "gradient":
    gpt.build = spoil_gradient(gpt.build)
else:
    sabotage(*PLACES[place])

if __name__ == "__main__":
    run.main(run.command_line)
