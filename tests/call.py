"""Call a function of a module: `python call.py MODULE FUNCTION ARGUMENTS`. conftest.run_on_ranks starts this program."""

import importlib
import sys

module, function, *arguments = sys.argv[1:]
getattr(importlib.import_module(module), function)(*arguments)
