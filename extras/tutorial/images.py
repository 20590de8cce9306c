"""Train an image classifier with random augmentation and normalisation on any number of ranks.

    python extras/tutorial/images.py
    torchrun --nproc-per-node 2 extras/tutorial/images.py

The weights are the same for both. This needs two things:

- The random crop and flip of an image depend only on the seed, the epoch and the image's index, and
  not on the rank, the batch or the DataLoader worker that happens to load it.
- GroupNorm normalises each image alone. BatchNorm would compute mean and variance over the rows of
  one rank, which are fewer on more ranks. On GPUs, torch's SyncBatchNorm computes them over all
  ranks: model = nn.SyncBatchNorm.convert_sync_batchnorm(model) before replicate. They are those of
  the global batch only with accum=1. torch has nothing like it for CPUs: use GroupNorm there.
"""

import os
import random
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

# The modules are two folders up. If they are beside this script, this line changes nothing.
sys.path.append(os.path.join(os.path.dirname(__file__), "..", ".."))
import chardata
import ddp_setup
import loop

SEED = 0


def make_images(n):
    """Return images (n, 1, 16, 16) and labels (n,): stripes in two directions and two widths."""
    labels = torch.randint(4, (n,))
    across, width = torch.arange(16.0), 1.0 + labels // 2
    angles = across / width[:, None] + 6.3 * torch.rand(n, 1)
    # On Intel processors, torch.sin in float32 can round differently from run to run (torch 2.13).
    stripes = torch.sin(angles.double()).float()[:, None, None, :]
    images = stripes.expand(n, 1, 16, 16)
    images = torch.where((labels % 2 == 0)[:, None, None, None], images, images.mT)
    return images + torch.randn(n, 1, 16, 16), labels


@dataclass
class Augmented:
    """The images of one epoch, each cropped and flipped at random."""

    images: torch.Tensor
    labels: torch.Tensor
    epoch: int

    def __getitem__(self, index):
        rng = random.Random(f"{SEED} {self.epoch} {index}")
        top, left, flip = rng.randrange(5), rng.randrange(5), rng.random() < 0.5
        image = F.pad(self.images[index], (2, 2, 2, 2))[:, top : top + 16, left : left + 16]
        return (image.flip(2) if flip else image), self.labels[index]


def loss_fn(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets, reduction="none")


def main(world):
    torch.manual_seed(SEED)
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    images, labels = make_images(2000)
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, stride=2), nn.GroupNorm(2, 8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, stride=2), nn.GroupNorm(4, 16), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)),
    )
    replica = ddp_setup.replicate(model, world)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = chardata.RankSampler(len(labels), world.rank, world.size, SEED)
    step = 0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        train = Augmented(images, labels, epoch)
        loader = DataLoader(train, batch_size=96 // world.size, sampler=sampler)
        for step, report in loop.train_(replica, [opt], loader, loss_fn, start=step, dtype=dtype):
            pass
        if world.rank == 0:
            print(f"epoch {epoch}: loss {report.loss:.6f}")
    if world.rank == 0:
        torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":  # with num_workers, macOS imports this file in each DataLoader worker
    with ddp_setup.process_group() as world:
        main(world)
