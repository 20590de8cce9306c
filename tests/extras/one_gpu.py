"""Start a program in two ranks that share one GPU.

    python one_gpu.py run.py --steps 100

NCCL refuses two ranks on one GPU of one machine. With another NCCL_HOSTID for each rank, it takes
them for ranks on two machines, and sends through sockets. Only NCCL does so: LOCAL_WORLD_SIZE says
that they are on one machine. Each has the local rank 0, and so the GPU 0.
"""

import os
import runpy
import sys
from pathlib import Path

sys.path.insert(0, f"{Path(__file__).resolve().parents[2]}")

import ddp_setup
import run


def run_rank(rank: int, command: list[str]) -> None:
    os.environ.update(LOCAL_RANK="0", NCCL_HOSTID=f"{rank}", NCCL_SOCKET_IFNAME="lo")
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    # As run.py --spawn does
    sys.exit(run.exit_code(lambda: ddp_setup.spawn(run_rank, (sys.argv[1:],), 2)))
