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
    return F.cross_entropy(model(inputs), targets, reduction="none")  # one loss per row


def hits(model, batch):
    inputs, targets = batch
    return model(inputs).argmax(1) == targets


def main(world):
    torch.manual_seed(0)
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    x = torch.randn(3000, 20)
    y = 2 * (x[:, 0] > x[:, 1]) + (x[:, 2] * x[:, 3] > 0)
    train, test = TensorDataset(x[:2500], y[:2500]), TensorDataset(x[2500:], y[2500:])
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
    replica = ddp_setup.replicate(model, world)
    opt = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=3)
    accum, step = 1, 0  # micro-batches per step and rank; finished steps
    sampler = chardata.RankSampler(len(train), world.rank, world.size)
    loader = DataLoader(train, batch_size=96 // (accum * world.size), sampler=sampler)
    test_rows = range(world.rank, len(test), world.size)
    test_loader = DataLoader(test, batch_size=96, sampler=test_rows)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        steps = loop.group_batches(loader, accum)
        for step, report in loop.train_(
            replica, [opt], steps, loss_fn, start=step, clip=1.0, dtype=dtype
        ):
            pass
        scheduler.step()
        accuracy = loop.evaluate(replica, test_loader, hits)
        if world.rank == 0:
            print(f"epoch {epoch}: loss {report.loss:.4f}, accuracy {accuracy:.4f}")
    if world.rank == 0:
        torch.save(model.state_dict(), "model.pt")


with ddp_setup.process_group() as world:
    main(world)
