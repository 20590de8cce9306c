"""Start ranks of which one does not reach a collective in which the others wait.

    PYTHONPATH=. python tests/faults/missing_rank.py KIND MISSING SIZE

KIND says what rank MISSING of SIZE ranks does instead. The test finds lines by their comments.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

import ddp_setup


def main(kind: str, missing: int) -> None:
    """Run one rank. A ConnectionError is printed as one line, and the exit code is then 1."""
    try:
        with ddp_setup.process_group("cpu", timeout=3) as world:
            dist.all_reduce(torch.ones(4))
            if world.rank != missing:
                dist.all_reduce(torch.ones(4))  # the line of the others
            elif kind == "is in another":
                ddp_setup.from_rank_zero(lambda: 0, world)  # is in another
            elif kind == "computes":
                time.sleep(60)  # computes
            # a rank that "has left" ends here
            if kind == "is one behind":
                dist.all_reduce(torch.ones(4))
    except ConnectionError as error:
        print(error, file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    kind, missing, size = sys.argv[1:]
    if "RANK" in os.environ:
        sys.exit(main(kind, int(missing)))
    try:
        code = ddp_setup.spawn([sys.executable, *sys.orig_argv[1:]], int(size), timeout=10)
    except ChildProcessError as error:
        print(error, file=sys.stderr)
        code = 1
    sys.exit(code)
