"""Log to Weights & Biases from a plain `for` loop, and continue the same run after a resume.

    pip install wandb
    WANDB_MODE=offline python extras/tutorial/wandb_logging.py
    WANDB_MODE=offline torchrun --nproc-per-node 2 extras/tutorial/wandb_logging.py

This is 4_checkpoints.py and eight more lines. Only rank 0 uses wandb, and it keeps the id of the
run in the checkpoint. Any other logger can be called in the same places.

Without WANDB_MODE=offline, run `wandb login` first. With it, each start writes a new folder in
wandb/, and prints that resume is ignored. The folders of a run that was resumed have the same run
id, so `wandb sync` uploads them as one run.
"""

import math
import os
import sys
from functools import partial
from itertools import islice

import torch
import torch.nn.functional as F
import wandb
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


def resume_(model, opt, world):
    found, rejected = ddp_setup.wait_together(
        lambda: ckpt.newest("out-wandb") if world.rank == 0 else (None, {}), world
    )
    for name, reason in rejected.items():
        print(f"{name}: {reason}")
        ckpt.set_aside("out-wandb", name)
    if found:  # on rank 0
        print(f"continuing after step {found.entry.step}; to start again, delete out-wandb")
    ckpt.restore_(found.state if found else {}, model, [opt])
    step = ddp_setup.from_rank_zero(lambda: found.entry.step if found else 0, world)
    return step, found.state.get("run_id") if found else None  # None on ranks other than 0


def main(world, stop):
    torch.manual_seed(0)
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    x = torch.randn(3000, 20)
    y = 2 * (x[:, 0] > x[:, 1]) + (x[:, 2] * x[:, 3] > 0)
    train, test = TensorDataset(x[:2500], y[:2500]), TensorDataset(x[2500:], y[2500:])
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
    replica = ddp_setup.replicate(model, world)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    rows = 96 // 2 // world.size  # micro-batch size; each rank takes 2 of them per step
    steps_per_epoch = math.ceil(len(train) / (2 * rows * world.size))
    step, run_id = resume_(replica, opt, world)
    if world.rank == 0:
        run = wandb.init(project="tutorial", id=run_id, resume="allow")
        run_id = run.id
    for epoch in range(step // steps_per_epoch, 3):
        mine = chardata.rank_indices(len(train), world.rank, world.size, epoch, seed=0)
        loader = DataLoader(train, batch_size=rows, sampler=mine)
        steps = loop.group_batches(loader, accum=2, count=lambda batch: len(batch[1]))
        steps = islice(steps, step % steps_per_epoch, None)  # skip finished steps
        for step, report in loop.train_(
            replica, [opt], steps, loss_fn, start=step, clip=1.0, dtype=dtype, stop=stop
        ):
            if world.rank == 0 and step % 5 == 0:  # float() waits until a GPU has done the step
                run.log({"loss": float(report.loss), "grad_norm": float(report.grad_norm)}, step)
            if report.stop or step % steps_per_epoch == 0:
                state = ckpt.snapshot(replica, [opt], run_id=run_id)
                save = partial(ckpt.save, "out-wandb", state, step, keep=3)
                ddp_setup.from_rank_zero(save, world)
            if report.stop:
                break
        if step % steps_per_epoch == 0:
            mine = range(world.rank, len(test), world.size)
            loader = DataLoader(test, batch_size=96, sampler=mine)
            accuracy = loop.evaluate(replica, loader, count_correct)
            if world.rank == 0:
                print(f"epoch {epoch}: loss {report.loss:.4f}, accuracy {accuracy:.4f}")
                run.log({"accuracy": accuracy, "epoch": epoch}, step)
        if report.stop and step < 3 * steps_per_epoch:
            if world.rank == 0:
                print(f"stopped after step {step}")
            return True
    return False


with ddp_setup.stop_signals() as stop, ddp_setup.process_group() as world:
    stopped = main(world, stop)
if stopped:
    sys.exit(3)  # saved, but not finished
