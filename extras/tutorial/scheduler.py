"""Use a scheduler of torch, such as OneCycleLR, and continue its schedule after a resume.

    python extras/tutorial/scheduler.py
    torchrun --nproc-per-node 2 extras/tutorial/scheduler.py

This is 4_checkpoints.py with a scheduler. Its state is in the checkpoint, and goes from rank 0 to
all ranks. If the learning rate is a function of the step, the argument lr_at of loop.train_ is
simpler: it has no state.
"""

import math
import os
import sys
from functools import partial
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
    return F.cross_entropy(model(inputs), targets, reduction="sum"), len(targets)


def count_correct(model, batch):
    inputs, targets = batch
    return (model(inputs).argmax(1) == targets).sum(), len(targets)


def resume_(model, opt, scheduler, world):
    found, rejected = ddp_setup.wait_together(
        lambda: ckpt.newest("out-scheduler") if world.rank == 0 else (None, {}), world
    )
    for name, reason in rejected.items():
        print(f"{name}: {reason}")
        ckpt.set_aside("out-scheduler", name)
    if found:  # on rank 0
        print(f"continuing after step {found.entry.step}; to start again, delete out-scheduler")
    ckpt.restore_(found.state if found else {}, model, [opt])
    step, state = ddp_setup.from_rank_zero(
        lambda: (found.entry.step, found.state["scheduler"]) if found else (0, None), world
    )
    if state:
        scheduler.load_state_dict(state)
        # The constructor of the scheduler has changed "lr", and load_state_dict does not.
        for group, lr in zip(opt.param_groups, scheduler.get_last_lr()):
            group["lr"] = lr
    return step


def main(world, stop):
    torch.manual_seed(0)
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    x = torch.randn(3000, 20)
    y = 2 * (x[:, 0] > x[:, 1]) + (x[:, 2] * x[:, 3] > 0)
    train, test = TensorDataset(x[:2500], y[:2500]), TensorDataset(x[2500:], y[2500:])
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
    replica = ddp_setup.replicate(model, world)
    opt = torch.optim.AdamW(model.parameters(), lr=0.02)
    rows = 96 // 2 // world.size  # micro-batch size; each rank takes 2 of them per step
    steps_per_epoch = math.ceil(len(train) / (2 * rows * world.size))
    # Optimizer steps, not micro-batches. get_last_lr() does not return the momentum, so leave it.
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        opt, max_lr=0.02, total_steps=3 * steps_per_epoch, cycle_momentum=False
    )
    step = resume_(replica, opt, scheduler, world)
    for epoch in range(step // steps_per_epoch, 3):
        mine = chardata.rank_indices(len(train), world.rank, world.size, epoch, seed=0)
        loader = DataLoader(train, batch_size=rows, sampler=mine)
        steps = loop.group_batches(loader, accum=2, count=lambda batch: len(batch[1]))
        steps = islice(steps, step % steps_per_epoch, None)  # skip finished steps
        for step, report in loop.train_(
            replica, [opt], steps, loss_fn, start=step, clip=1.0, dtype=dtype, stop=stop
        ):
            scheduler.step()  # before the snapshot, which then has the state for the next step
            if report.stop or step % steps_per_epoch == 0:
                state = ckpt.snapshot(replica, [opt], scheduler=scheduler.state_dict())
                save = partial(ckpt.save, "out-scheduler", state, step, keep=3)
                ddp_setup.from_rank_zero(save, world)
            if report.stop:
                break
        if step % steps_per_epoch == 0:
            mine = range(world.rank, len(test), world.size)
            loader = DataLoader(test, batch_size=96, sampler=mine)
            accuracy = loop.evaluate(replica, loader, count_correct)
            if world.rank == 0:
                print(f"epoch {epoch}: loss {report.loss:.4f}, accuracy {accuracy:.4f}")
        if report.stop and step < 3 * steps_per_epoch:
            if world.rank == 0:
                print(f"stopped after step {step}")
            return True
    return False


with ddp_setup.stop_signals() as stop, ddp_setup.process_group() as world:
    stopped = main(world, stop)
if stopped:
    sys.exit(3)  # saved, but not finished
