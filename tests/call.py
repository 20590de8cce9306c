"""Call a function of a module: `python call.py MODULE FUNCTION ARGUMENTS`. conftest.run_on_ranks starts this program."""

import importlib
import pickle
import sys
from collections.abc import Callable
from typing import Any

import ddp_setup

UNPICKLE = """
import pickle, sys
sys.path[:], job = pickle.loads(bytes.fromhex(sys.argv[1]))
function, args = pickle.loads(job)
function(*args)
"""


def spawn(function: Callable[..., None], size: int, *args: Any) -> int:
    """Call function(*args), a function of a module, in ranks that ddp_setup.spawn starts. Return spawn's exit code."""
    job = pickle.dumps((sys.path, pickle.dumps((function, args)))).hex()
    return ddp_setup.spawn([sys.executable, "-c", UNPICKLE, job], size)


if __name__ == "__main__":
    module, name, *arguments = sys.argv[1:]
    getattr(importlib.import_module(module), name)(*arguments)
