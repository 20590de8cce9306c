"""Start several ranks that share one GPU.

    python one_gpu.py 2 run.py --steps 100

NCCL refuses two ranks on one GPU of one machine. With another NCCL_HOSTID for each rank, it takes them for ranks on two
machines, and sends through sockets. Only NCCL does so: LOCAL_WORLD_SIZE says that they are on one machine. Each has the
local rank 0, and so the GPU 0. As under torchrun, this process serves their store.
"""

import os
import signal
import subprocess
import sys

import torch.distributed as dist

size, *command = sys.argv[1:]
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
common = {"WORLD_SIZE": size, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": size}
common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{store.port}"}
common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "NCCL_SOCKET_IFNAME": "lo"}
ranks = []
signal.signal(signal.SIGTERM, lambda number, _: [rank.send_signal(number) for rank in ranks])
for rank in range(int(size)):
    env = {**os.environ, **common, "RANK": f"{rank}", "NCCL_HOSTID": f"{rank}"}
    ranks.append(subprocess.Popen([sys.executable, *command], env=env))
sys.exit(max(abs(rank.wait()) for rank in ranks))
