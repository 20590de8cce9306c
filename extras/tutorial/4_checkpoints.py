"""Step 4, ckpt.py: save, stop when asked, and continue exactly where the last run stopped."""

import math
import os
import sys
from itertools import islice

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# The modules are two folders up. If they are beside this script, this line changes nothing.
sys.path.append(os.path.join(os.path.dirname(__file__), "..", ".."))
import chardata
import ckpt
import ddp_setup
import loop


def loss_fn(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets, reduction="none")  # one loss per row


def hits(model, batch):
    inputs, targets = batch
    return model(inputs).argmax(1) == targets


def main(world, stop):
    torch.manual_seed(0)
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    x = torch.randn(3000, 20)
    y = 2 * (x[:, 0] > x[:, 1]) + (x[:, 2] * x[:, 3] > 0)
    train, test = TensorDataset(x[:2500], y[:2500]), TensorDataset(x[2500:], y[2500:])
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
    replica = ddp_setup.replicate(model, world)
    opt = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=3)
    accum = 2  # micro-batches per step and rank
    rows = 96 // (accum * world.size)  # in a micro-batch
    sampler = chardata.RankSampler(len(train), world.rank, world.size)
    loader = DataLoader(train, batch_size=rows, sampler=sampler)
    test_rows = range(world.rank, len(test), world.size)
    test_loader = DataLoader(test, batch_size=96, sampler=test_rows)
    steps_per_epoch = math.ceil(len(train) / (accum * rows * world.size))
    last = 3 * steps_per_epoch
    step, _ = ckpt.resume_("out-tutorial", replica, [opt], scheduler)
    if world.rank == 0 and step:
        what = "continuing" if step < last else "finished"
        print(f"{what} after step {step}; to start again, delete out-tutorial")
    for epoch in range(step // steps_per_epoch, 3):
        sampler.set_epoch(epoch)
        steps = loop.group_batches(loader, accum)
        steps = islice(steps, step % steps_per_epoch, None)  # skip finished steps
        for step, report in loop.train_(
            replica, [opt], steps, loss_fn, start=step, clip=1.0, dtype=dtype, stop=stop
        ):
            pass
        error_rate = math.inf
        if step % steps_per_epoch == 0:  # the epoch is complete
            scheduler.step()
            accuracy = loop.evaluate(replica, test_loader, hits)
            error_rate = 1 - accuracy
            if world.rank == 0:
                print(f"epoch {epoch}: loss {report.loss:.4f}, accuracy {accuracy:.4f}")
        state = ckpt.snapshot(replica, [opt], scheduler=scheduler.state_dict())
        # The three newest files stay, and the one with the lowest "loss", here the error rate.
        ddp_setup.from_rank_zero(
            lambda: ckpt.save("out-tutorial", state, step, loss=error_rate, keep=3), world
        )
        if report.stop and step < last:
            if world.rank == 0:
                print(f"stopped after step {step}")
            return 3  # saved, but not finished


with ddp_setup.process_group() as world, ddp_setup.stop_signals() as stop:
    code = main(world, stop)
sys.exit(code)
