"""Divide the training state over the ranks with FSDP2.

    bare = build(...)
    model = shard_(bare, device, parts=[*bare.blocks], strategy="fsdp")
    optimizer = AdamW(model.parameters())  # after shard_, because shard_ replaces the parameters

    padded, padded_loss = pad_steps(steps, loss_fn)
    for step, report in train_(model, [optimizer], padded, padded_loss, sync_each=True):
        ...

    padded, padded_loss = pad_batches(model, batches, loss_fn)
    mean = evaluate(model, padded, padded_loss)

`train_` and `evaluate` are those of loop.py. A loss function returns (sum, count).

The process group must be able to send CPU tensors, as that of ddp_setup.py. Passes gather
parameters. So all ranks must run the same number of passes. pad_steps and pad_batches
add passes with weight 0 on ranks that have fewer. Use all their results together, on all ranks.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice, repeat
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

LossFn = Callable[[nn.Module, Any], tuple[Tensor, float | Tensor]]
InitialWeight = Callable[[str, torch.Size], Tensor]


def shard_(
    model: nn.Module,
    device: torch.device,
    parts: Sequence[nn.Module],
    strategy: str,
    initial_weight: InitialWeight | None = None,
    **fsdp: Any,
) -> nn.Module:
    """Move `model` to `device`, divide its parameters over all ranks, and return it.

    All ranks must call this. All start with the weights and buffers of rank 0. A single process
    without a process group keeps the whole model.

    strategy: "zero" gathers all parameters in a forward pass and keeps them until the backward
        pass has ended. "fsdp" gathers one part at a time, again in each
        forward and backward pass. This needs less memory.
    parts: submodules without common parameters. The rest of the model is one more part. The parts
        are divided one by one, so the whole model need not fit on the device.
    initial_weight: computes the values of a parameter on the device "meta" from its name and shape.
        The values must be the same on all ranks.
    fsdp: more arguments for torch's fully_shard.
    """
    # These imports take half a second.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if strategy not in ("zero", "fsdp"):
        raise ValueError(f"strategy {strategy!r} is not zero or fsdp")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if not dist.is_initialized():
        _fill_meta_(model, names, initial_weight)
        return model.to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for part in [*parts, model]:
        filled = _fill_meta_(part, names, initial_weight)
        part.to(device)
        _send_from_rank_0_(part, filled)
        fully_shard(part, mesh=mesh, reshard_after_forward=strategy == "fsdp", **fsdp)
    return model


# Two functions, because a loop variable in shard_ would keep a whole parameter in memory.


def _fill_meta_(
    part: nn.Module, names: dict[int, str], initial_weight: InitialWeight | None
) -> set[int]:
    """Give values on the CPU to the parameters on "meta". Return their ids."""
    filled = set[int]()
    for parameter in part.parameters():
        if parameter.is_meta and initial_weight:
            weight = initial_weight(names[id(parameter)], parameter.shape).to(parameter.dtype)
            # This keeps the object, so a parameter that two modules share stays shared.
            torch.utils.swap_tensors(parameter, nn.Parameter(weight, parameter.requires_grad))
            filled.add(id(parameter))
    return filled


def _send_from_rank_0_(part: nn.Module, filled: set[int]) -> None:
    """Copy parameters and buffers of rank 0 to all ranks, except the filled parameters."""
    from torch.distributed.tensor import DTensor

    for tensor in chain(part.parameters(), part.buffers()):
        # A DTensor was divided before.
        if not isinstance(tensor, DTensor) and id(tensor) not in filled:
            dense = tensor.detach().contiguous()  # dist ignores strides
            dist.broadcast(dense, 0)
            tensor.detach().copy_(dense)


Padded = tuple[Any, bool]  # a batch, and whether it was added


def pad_steps(
    steps: Iterable[tuple[list[Any], float]], loss_fn: LossFn
) -> tuple[Iterator[tuple[list[Padded], float]], LossFn]:
    """Add micro-batches to each step, so that all ranks have the same number of them.

    Returns (steps, loss_fn) for loop.train_ with sync_each=True. Each rank needs at least one
    micro-batch in each step.
    """

    def padded() -> Iterator[tuple[list[Padded], float]]:
        for batches, total in steps:
            (most,) = _largest(len(batches))
            added = repeat((batches[0], True), most - len(batches))
            yield [*((batch, False) for batch in batches), *added], total

    return padded(), partial(_padded_loss, loss_fn)


def pad_batches(
    model: nn.Module, batches: Iterable[Any], loss_fn: LossFn
) -> tuple[Iterator[Padded], LossFn]:
    """Add batches to an evaluation, so that all ranks have the same number of them.

    Returns (batches, loss_fn) for loop.evaluate. A rank without batches gets the first batch of
    another rank, which must be possible to pickle.
    """

    def padded() -> Iterator[Padded]:
        remaining = iter(batches)
        first = list(islice(remaining, 1))
        try:
            spare = _lend_first(first)
            mine = ((batch, False) for batch in chain(first, remaining))
            while True:
                batch = next(mine, None)
                (any_left,) = _largest(batch is not None)
                if not any_left:
                    return
                yield batch or (spare[0], True)
        finally:
            for module in model.modules():
                if hasattr(module, "set_requires_gradient_sync"):  # only FSDP's modules have it
                    cast(Any, module).reshard()

    return padded(), partial(_padded_loss, loss_fn)


def _lend_first(first: list[Any]) -> list[Any]:
    """Return `first`, or if it is empty, that of the lowest rank that has one."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    missing, lender = _largest(not first, size - rank if first else 0)
    lent = [first]
    if missing and lender:
        dist.broadcast_object_list(lent, size - lender)
    return first or lent[0]


def _padded_loss(
    loss_fn: LossFn, model: nn.Module, padded: Padded
) -> tuple[Tensor, float | Tensor]:
    batch, added = padded
    loss_sum, count = loss_fn(model, batch)
    return (loss_sum * 0.0, 0) if added else (loss_sum, count)


def _largest(*numbers: int) -> list[int]:
    """Return the largest of all ranks for each of the numbers. All ranks must call it."""
    largest = torch.tensor(numbers, dtype=torch.int64)
    if dist.is_initialized():
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()
