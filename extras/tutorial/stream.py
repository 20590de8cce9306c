"""Train on a stream of rows, which has no random access, such as the lines of a file.

    python extras/tutorial/stream.py      # the data is read in the training process
    python extras/tutorial/stream.py 2    # by two DataLoader workers
    torchrun --nproc-per-node 2 extras/tutorial/stream.py 2

The weights are the same for all of these. Global batch number b (from 0) is the rows from 100 * b
to 100 * b + 99 of the stream, and each rank trains on its own part of these rows. The last batch
has only 2 rows. A checkpoint holds the number of rows that all ranks together have trained on. A
resumed run, on any number of ranks, skips these rows and continues with the next one.
"""

import os
import random
import sys
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

# The modules are two folders up. If they are beside this script, this line changes nothing.
sys.path.append(os.path.join(os.path.dirname(__file__), "..", ".."))
import ckpt
import ddp_setup
import loop

BATCH = 100  # rows in a global batch


def read_stream():
    """Yield all rows in order; each call yields the same. It could yield the lines of a file."""
    rng = random.Random(0)
    for _ in range(5002):
        x = [rng.gauss(0, 1) for _ in range(20)]
        yield x, 2 * (x[0] > x[1]) + (x[2] * x[3] > 0)


@dataclass
class RankBatches(IterableDataset):
    """Yields this rank's rows of each global batch, as tensors (B, 20) and (B,)."""

    position: int  # number of rows at the start of the stream to skip
    rank: int
    world_size: int

    def __iter__(self):
        # Each worker of each rank reads the whole stream, but converts only its own rows to
        # tensors. With 2 workers, worker 0 makes the batches 0, 2, 4, ... and worker 1 the batches
        # 1, 3, 5, ... DataLoader takes a batch from each worker in turn, so they stay in order.
        worker = get_worker_info()
        first, every = (worker.id, worker.num_workers) if worker else (0, 1)
        rows = islice(read_stream(), self.position, None)
        global_batches = iter(lambda: list(islice(rows, BATCH)), [])
        for batch in islice(global_batches, first, None, every):
            # The last batch may have no row for this rank. Then the tensors are empty, and the
            # rank still takes part in the step.
            mine = batch[self.rank :: self.world_size]
            inputs, targets = [x for x, _ in mine], [y for _, y in mine]
            yield torch.tensor(inputs).reshape(-1, 20), torch.tensor(targets, dtype=torch.long)


def detach(worker):
    os.setsid()  # Otherwise a stop signal from torchrun or the terminal also ends the workers.


def loss_fn(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets, reduction="none")


def main(world, stop, workers):
    torch.manual_seed(0)
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
    replica = ddp_setup.replicate(model, world)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    step, more = ckpt.resume_("out-stream", replica, [opt])
    position = more.get("position", 0)
    if world.rank == 0 and step:
        print(f"continuing after step {step}; to start again, delete out-stream")

    def save():
        state = ckpt.snapshot(replica, [opt], position=int(position))
        ddp_setup.from_rank_zero(lambda: ckpt.save("out-stream", state, step, keep=3), world)

    dataset = RankBatches(position, world.rank, world.size)
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, worker_init_fn=detach)
    for step, report in loop.train_(
        replica, [opt], loader, loss_fn, start=step, clip=1.0, dtype=dtype, stop=stop
    ):
        # Count the rows of finished steps, not those that were read: the loader reads ahead.
        position = position + report.count.long()
        if world.rank == 0 and step % 10 == 0:
            print(f"step {step}, {position} rows: loss {report.loss:.6f}")
        if report.stop or step % 20 == 0:
            save()
        if report.stop:
            if world.rank == 0:
                print(f"stopped after step {step}")
            return 3  # saved, but not finished
    save()


if __name__ == "__main__":  # on macOS, each DataLoader worker imports this file
    with ddp_setup.process_group() as world, ddp_setup.stop_signals() as stop:
        code = main(world, stop, workers=int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    sys.exit(code)
