"""Step 3, loop.py: accumulation, clipping, mixed precision and evaluation, with exact means."""

import os
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# The modules are two folders up. If they are beside this script, this line changes nothing.
sys.path.append(os.path.join(os.path.dirname(__file__), "..", ".."))
import chardata
import ddp_setup
import loop


def loss_fn(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets, reduction="sum"), len(targets)


def count_correct(model, batch):
    inputs, targets = batch
    return (model(inputs).argmax(1) == targets).sum(), len(targets)


def main(world):
    torch.manual_seed(0)
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    x = torch.randn(3000, 20)
    y = 2 * (x[:, 0] > x[:, 1]) + (x[:, 2] * x[:, 3] > 0)
    train, test = TensorDataset(x[:2500], y[:2500]), TensorDataset(x[2500:], y[2500:])
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
    replica = ddp_setup.replicate(model, world)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    step, rows = 0, 96 // 2 // world.size  # micro-batch size; each rank takes 2 of them per step
    for epoch in range(3):
        mine = chardata.rank_indices(len(train), world.rank, world.size, epoch, seed=0)
        loader = DataLoader(train, batch_size=rows, sampler=mine)
        steps = loop.group_batches(loader, accum=2, count=lambda batch: len(batch[1]))
        for step, report in loop.train_(
            replica, [opt], steps, loss_fn, start=step, clip=1.0, dtype=dtype
        ):
            pass
        mine = range(world.rank, len(test), world.size)
        loader = DataLoader(test, batch_size=96, sampler=mine)
        accuracy = loop.evaluate(replica, loader, count_correct)
        if world.rank == 0:
            print(f"epoch {epoch}: loss {report.loss:.4f}, accuracy {accuracy:.4f}")
    if world.rank == 0:
        torch.save(model.state_dict(), "model.pt")


with ddp_setup.process_group() as world:
    main(world)
