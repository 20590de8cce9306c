"""BatchNorm over the rows of all ranks on a CPU, where torch.nn.SyncBatchNorm raises an error.

    model = synchronize_(model)    # before replicate of ddp_setup.py
    replica = DistributedDataParallel(model.to(device))

Then the statistics are those of the micro-batches of all ranks together, so several ranks train
like one with the whole batch. If a step has several micro-batches, they are not those of the global
batch: use accum=1. All ranks need the same number of micro-batches. The names in the state dict do
not change. On CUDA, the layers become torch.nn.SyncBatchNorm.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class SumOverRanks(torch.autograd.Function):
    """An all-reduce with a backward pass: the gradients of all ranks are added, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the sum of x over all ranks."""
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return the sum of the gradients."""
        return SumOverRanks.apply(grad)  # type: ignore[no-any-return,no-untyped-call]


def all_reduce(x: Tensor) -> Tensor:
    """Return the sum of x over all ranks, for autograd."""
    return SumOverRanks.apply(x)  # type: ignore[no-any-return,no-untyped-call]


class OverRanks:
    """The forward pass of the classes below, which put it before that of torch's BatchNorm."""

    def forward(self: Any, x: Tensor) -> Tensor:
        """Normalise x (N, C, ...) over all dimensions but C."""
        if not (self.training and dist.is_initialized()):
            return super().forward(x)  # type: ignore[misc,no-any-return]
        rest, shape = [0, *range(2, x.ndim)], (-1, *[1] * (x.ndim - 2))
        # The ranks can have different numbers of values.
        total = all_reduce(torch.cat([x.sum(rest), x.new_tensor([x.numel() / x.shape[1]])]))
        count = total[-1].detach()
        mean = total[:-1] / count
        centered = x - mean.view(shape)
        variance = all_reduce(centered.square().sum(rest)) / count
        if self.track_running_stats:
            with torch.no_grad():
                self.num_batches_tracked += 1
                # Without a momentum, torch keeps the mean of all batches.
                new = self.momentum if self.momentum is not None else 1 / self.num_batches_tracked
                self.running_mean.lerp_(mean, float(new))
                self.running_var.lerp_(variance * count / (count - 1), float(new))
        y: Tensor = centered * (variance + self.eps).rsqrt().view(shape)
        return y * self.weight.view(shape) + self.bias.view(shape) if self.affine else y


class BatchNorm1d(OverRanks, nn.BatchNorm1d):
    """nn.BatchNorm1d over the rows of all ranks."""


class BatchNorm2d(OverRanks, nn.BatchNorm2d):
    """nn.BatchNorm2d over the rows of all ranks."""


class BatchNorm3d(OverRanks, nn.BatchNorm3d):
    """nn.BatchNorm3d over the rows of all ranks."""


KINDS: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: BatchNorm1d,
    nn.BatchNorm2d: BatchNorm2d,
    nn.BatchNorm3d: BatchNorm3d,
}


def synchronize_(model: nn.Module, cuda: bool = torch.cuda.is_available()) -> nn.Module:
    """Let the BatchNorm layers of a model use the rows of all ranks, and return the model.

    cuda: whether the model will be trained on CUDA.
    """
    if cuda:
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-any-return]
    for module in model.modules():
        module.__class__ = KINDS.get(type(module), type(module))
    return model
