"""Find a rank whose weights or optimizer state are not those of the other ranks.

    verify_replicas(model, [optimizer])  # before each save, on all ranks

Under DistributedDataParallel, all ranks have bitwise equal parameters and optimizer states. If a
processor or a memory makes an error on one rank, the ranks drift apart without a message. A wrong
gradient is not found, because the all-reduce spreads it to all ranks.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

# The integer type with the size of an element, in bytes
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def verify_replicas(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raise FloatingPointError on all ranks if their parameters or optimizer states differ.

    All ranks must call this function between two optimizer steps. The message names the ranks that
    differ from the majority, if there is one. Buffers are not compared: BatchNorm's statistics
    differ between ranks by design. On CUDA, the host waits for the device. Without a process group
    of several ranks, and with FSDP2, this function does nothing.

    Ranks on different kinds of processors may round differently, which also raises the error.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    if any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):  # DTensors
        return
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    own = fingerprint(tensors_in([*model.parameters(), *states]))
    everyone = own.new_zeros(dist.get_world_size())
    everyone[dist.get_rank()] = own
    dist.all_reduce(everyone)
    fingerprints = everyone.tolist()
    common, count = Counter(fingerprints).most_common(1)[0]
    if count == len(fingerprints):
        return
    different = [f"{rank}" for rank, value in enumerate(fingerprints) if value != common]
    who = f"rank {' and '.join(different)} differs from the others"
    if 2 * count <= len(fingerprints):
        who = "no majority of ranks agrees, so the wrong rank is not known"
    raise FloatingPointError(
        f"the weights or optimizer states of the ranks are not equal: {who}; nothing was saved. "
        "Check the memory and the processor, and start again from the last checkpoint"
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested dicts, lists and tuples, in the same order on all ranks."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from tensors_in(value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def fingerprint(tensors: Iterable[Tensor]) -> Tensor:
    """Return an int64 scalar, on the first tensor's device, that changes if any one bit changes.

    It is the sum of the bit patterns of all elements, modulo 2^64. The sum of the i-th tensor is
    multiplied by 2 * i + 1, so that exchanged tensors are found too. An odd factor never turns a
    change by a power of two into zero.
    """
    real = (torch.view_as_real(t.detach()) if t.is_complex() else t.detach() for t in tensors)
    sums = [t.view(INTEGERS[t.element_size()]).sum(dtype=torch.int64) for t in real]
    factors = torch.arange(1, 2 * len(sums), 2, device=sums[0].device)
    return (torch.stack([s.to(sums[0].device) for s in sums]) * factors).sum()
