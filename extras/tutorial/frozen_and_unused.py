"""Train with frozen parameters, and with parameters that some steps or ranks do not use.

    python extras/tutorial/frozen_and_unused.py
    torchrun --nproc-per-node 2 extras/tutorial/frozen_and_unused.py

Frozen parameters (requires_grad=False) need no flag. A parameter that is trained, but does not
influence the loss of each step on each rank, needs find_unused_parameters=True: otherwise DDP waits
for its gradient, and does not average the gradients. With the flag, losses and weights are the same
on 1 and 2 ranks.

Cost of the flag: in each step, DDP searches the graph for unused parameters and sends one more
small message. On two CPU cores, two ranks trained a Transformer of 12 layers, with 146 parameter
tensors that are all used: 49.2 ms per step without the flag, 51.2 ms with it. (These are medians of
130 steps each, alternating in one run, while other programs ran too.)

To do without the flag, let each parameter take part in each step, for example by adding
0 * sum(p.sum() for p in self.heads.parameters()) to the logits. This is not quite the same. With
the flag, a parameter that no rank uses has no gradient, and the optimizer skips it. Here its
gradient is 0, and AdamW still decays it and moves it by its momentum.
"""

import os
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

# The modules are two folders up. If they are beside this script, this line changes nothing.
sys.path.append(os.path.join(os.path.dirname(__file__), "..", ".."))
import chardata
import ddp_setup
import loop


class TwoTasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU())
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.heads = nn.ModuleList([nn.Linear(64, 2), nn.Linear(64, 3)])
        # Load the weights of a pretrained encoder here. Freeze it before replicate: DDP leaves out
        # the parameters that are frozen at that moment.
        self.encoder.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        self.encoder.eval()  # requires_grad does not freeze BatchNorm's statistics
        return self

    def forward(self, x, task):
        return self.heads[task](self.body(self.encoder(x)))


def make_batches(number):
    """Return micro-batches of 16 rows: (x, targets, task). Every fifth one is for task 1."""
    tasks = [int(i % 5 == 4) for i in range(number)]
    x = torch.randn(number, 16, 20)
    targets = x[..., 0] > x[..., 1], 1 * (x[..., 2] > 0.5) + (x[..., 2] > -0.5)
    return [(x[i], targets[task][i].long(), task) for i, task in enumerate(tasks)]


def loss_fn(model, batch):
    x, targets, task = batch
    return F.cross_entropy(model(x, task), targets, reduction="none")


def hits(model, batch):
    x, targets, task = batch
    return model(x, task).argmax(1) == targets


def main(world):
    torch.manual_seed(0)
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    train, test = make_batches(240), make_batches(30)
    model = TwoTasks()
    replica = ddp_setup.replicate(model, world, find_unused_parameters=True)
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.003)
    # All ranks together have 4 micro-batches per step. 4 divides len(train), so all ranks have the
    # same number. A rank that had fewer would repeat one with weight 0. Then a head that is used
    # only in that one would get the gradient 0, although it should have none.
    if 4 % world.size:
        raise ValueError(f"{world.size} ranks cannot share 4 micro-batches: use 1, 2 or 4")
    step, accum = 0, 4 // world.size
    sampler = chardata.RankSampler(len(train), world.rank, world.size)
    # batch_size=None: the items of `train` are batches already
    loader = DataLoader(train, batch_size=None, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        steps = loop.group_batches(loader, accum)
        for step, report in loop.train_(
            replica, [opt], steps, loss_fn, start=step, clip=1.0, dtype=dtype
        ):
            pass
        mine = test[world.rank :: world.size]
        accuracy = loop.evaluate(replica, mine, hits)
        if world.rank == 0:
            print(f"epoch {epoch}: loss {report.loss:.4f}, accuracy {accuracy:.4f}")
    if world.rank == 0:
        torch.save(model.state_dict(), "model.pt")


with ddp_setup.process_group() as world:
    main(world)
