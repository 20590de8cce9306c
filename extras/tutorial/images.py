"""Train an image classifier with BatchNorm and random augmentation on any number of ranks.

    python extras/tutorial/images.py
    torchrun --nproc-per-node 2 extras/tutorial/images.py

The weights are the same for both, and after a stop and a resume. This needs two things:

- BatchNorm computes mean and variance over the global batch, not over the rows of one rank. On CUDA
  torch.nn.SyncBatchNorm does this. It does not run on a CPU, so there this script uses a class of
  its own that computes the same and has the same names in the state dict.
- The random crop and flip of an image depend only on the seed, the epoch and the image's index, and
  not on the rank, the batch or the DataLoader worker that happens to load it.
"""

import os
import random
import sys
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

# The modules are two folders up. If they are beside this script, this line changes nothing.
sys.path.append(os.path.join(os.path.dirname(__file__), "..", ".."))
import chardata
import ckpt
import ddp_setup
import loop

SEED, BATCH = 0, 96  # images in a global batch


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
class Augmented(Dataset):
    """The images of one epoch, each cropped and flipped at random."""

    images: torch.Tensor
    labels: torch.Tensor
    epoch: int

    def __getitem__(self, index):
        rng = random.Random(f"{SEED} {self.epoch} {index}")
        top, left, flip = rng.randrange(5), rng.randrange(5), rng.random() < 0.5
        image = F.pad(self.images[index], (2, 2, 2, 2))[:, top : top + 16, left : left + 16]
        return (image.flip(2) if flip else image), self.labels[index]


class SumOverRanks(torch.autograd.Function):
    """An all-reduce with a backward pass: the gradients of all ranks are added too."""

    @staticmethod
    def forward(ctx, x):
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, grad):
        return SumOverRanks.apply(grad)


class SyncBatchNormForCpu(nn.BatchNorm2d):
    """nn.SyncBatchNorm without its CUDA kernels."""

    def forward(self, x):
        if not (self.training and dist.is_initialized()):
            return super().forward(x)
        n = SumOverRanks.apply(torch.tensor(x.numel() / x.shape[1]))  # values per channel
        mean = SumOverRanks.apply(x.sum((0, 2, 3))) / n
        centered = x - mean[:, None, None]
        var = SumOverRanks.apply(centered.square().sum((0, 2, 3))) / n
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * n / (n - 1), self.momentum)
            self.num_batches_tracked += 1
        scale = self.weight * (var + self.eps).rsqrt()
        return centered * scale[:, None, None] + self.bias[:, None, None]


def loss_fn(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets, reduction="sum"), len(targets)


def count_correct(model, batch):
    inputs, targets = batch
    return (model(inputs).argmax(1) == targets).sum(), len(targets)


def resume_(model, opt, world):
    found, rejected = ddp_setup.wait_together(
        lambda: ckpt.newest("out-images") if world.rank == 0 else (None, {}), world
    )
    for name, reason in rejected.items():
        print(f"{name}: {reason}")
        ckpt.set_aside("out-images", name)
    if found:  # on rank 0
        print(f"continuing after step {found.entry.step}; to start again, delete out-images")
    ckpt.restore_(found.state if found else {}, model, [opt])
    return ddp_setup.from_rank_zero(lambda: found.entry.step if found else 0, world)


def main(world, stop):
    torch.manual_seed(SEED)
    cuda = world.device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    (images, labels), test = make_images(2000), TensorDataset(*make_images(500))
    norm = nn.BatchNorm2d if cuda else SyncBatchNormForCpu
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, stride=2, bias=False), norm(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, stride=2, bias=False), norm(16), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)),
    )
    if cuda:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    replica = ddp_setup.replicate(model, world)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    steps_per_epoch = len(labels) // BATCH  # as with drop_last: each step has BATCH images
    step = resume_(replica, opt, world)
    for epoch in range(step // steps_per_epoch, 3):
        order = chardata.rank_indices(len(labels), 0, 1, epoch, SEED)  # of all ranks together
        batches = order[: steps_per_epoch * BATCH].reshape(-1, BATCH)  # the global batches
        mine = batches[step % steps_per_epoch :, world.rank :: world.size]
        loader = DataLoader(Augmented(images, labels, epoch), batch_sampler=mine.tolist())
        # accum must be 1, because BatchNorm computes its statistics over one micro-batch.
        steps = loop.group_batches(loader, accum=1, count=lambda batch: len(batch[1]))
        for step, report in loop.train_(
            replica, [opt], steps, loss_fn, start=step, dtype=dtype, stop=stop
        ):
            if report.stop or step % steps_per_epoch == 0:
                state = ckpt.snapshot(replica, [opt])
                save = partial(ckpt.save, "out-images", state, step, keep=3)
                ddp_setup.from_rank_zero(save, world)
            if report.stop:
                break
        if step % steps_per_epoch == 0:
            mine = range(world.rank, len(test), world.size)
            loader = DataLoader(test, batch_size=96, sampler=mine)
            accuracy = loop.evaluate(replica, loader, count_correct)
            if world.rank == 0:
                print(f"epoch {epoch}: loss {report.loss:.6f}, accuracy {accuracy:.4f}")
        if report.stop and step < 3 * steps_per_epoch:
            if world.rank == 0:
                print(f"stopped after step {step}")
            return True
    return False


if __name__ == "__main__":  # on macOS, each DataLoader worker imports this file
    with ddp_setup.stop_signals() as stop, ddp_setup.process_group() as world:
        stopped = main(world, stop)
    if stopped:
        sys.exit(3)  # saved, but not finished
