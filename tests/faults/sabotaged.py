"""Run run.py with a fault at one place, on one rank.

    TEST_FAULT="forward raise 1 5" python tests/faults/sabotaged.py ARGUMENTS OF run.py

This raises an exception on rank 1 in the 5th call of the model's forward pass. "5+" means: in the
5th call and in all later calls. The rank can be "all".

The patch is made whenever this file is imported, and not only when it is the main program, because
the children of --spawn import it as their main module.
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

sys.path.insert(0, f"{Path(__file__).resolve().parents[2]}")

import chardata
import ckpt
import ddp_setup
import gpt
import loop
import run

PLACES: dict[str, tuple[Any, str]] = {  # the function in which the fault happens
    "start": (dist, "init_process_group"),
    "agreement": (ddp_setup, "any_rank"),
    "reading": (chardata, "read"),
    "forward": (gpt.GPT, "forward"),
    "backward": (torch.Tensor, "backward"),
    "collective": (dist, "all_reduce"),  # only the asynchronous ones, which loop.py starts
    "snapshot": (ckpt, "snapshot"),
    "writing": (ckpt, "save"),
    "evaluation": (loop, "evaluate"),
    "teardown": (dist, "destroy_process_group"),
    "loss": (gpt, "loss"),
}


def fail(call: partial) -> Any:
    """Do what TEST_FAULT says before a call of a function, or with its result."""
    begin = time.monotonic()
    match what:
        case "raise":
            raise RuntimeError("sabotaged")
        case "exit":
            os._exit(7)
        case "leave":
            sys.exit(7)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "pause":
            time.sleep(0.15)
        case "flip":  # the lowest bit of one weight of the model, before its forward pass
            next(call.args[0].parameters()).detach().view(torch.int32)[0, 0] ^= 1
    result = call()
    if what == "slow":  # ten times as long
        time.sleep(max(0.02, 9 * (time.monotonic() - begin)))
    if what in ("nan", "inf"):  # the loss sum of gpt.loss
        return result[0] * float(what), result[1]
    return result


place, what, rank, at = os.environ["TEST_FAULT"].split()
calls = count(1)


def is_faulty() -> bool:
    """Count a call; return whether it is one that fails on this rank."""
    number, first = next(calls), int(at.rstrip("+"))
    now = number >= first if at.endswith("+") else number == first
    return now and rank in ("all", os.environ.get("RANK", "0"))


def sabotage(owner: Any, name: str) -> None:
    """Replace a function by one that fails in the calls that TEST_FAULT names."""
    original = getattr(owner, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        call = partial(original, *args, **kwargs)
        counted = place != "collective" or kwargs.get("async_op")
        return fail(call) if counted and is_faulty() else call()

    setattr(owner, name, wrapper)


def with_faulty_gradient(build: Callable[..., Any]) -> Callable[..., Any]:
    """Return gpt.build for models in which the gradient of one parameter is not finite."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        def hook(gradient: torch.Tensor) -> torch.Tensor:
            # ddp_setup.replicate makes a backward pass of its own, in which all gradients are zero.
            faulty = gradient.any() and is_faulty()
            return torch.full_like(gradient, float(what)) if faulty else gradient

        model = build(*args, **kwargs)
        next(model.parameters()).register_hook(hook)
        return model

    return wrapper


if place == "gradient":
    gpt.build = with_faulty_gradient(gpt.build)
else:
    sabotage(*PLACES[place])

if __name__ == "__main__":
    run.program()
