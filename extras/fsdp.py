"""Divide the training state over the ranks with FSDP2, or send gradients as bfloat16.

    bare = build(...)
    model = shard_(bare, world_size, device, parts=[*bare.blocks], strategy="fsdp")
    optimizer = AdamW(model.parameters())  # after shard_, because shard_ replaces the parameters

    # Only for "fsdp". For "zero", use steps and loss_fn themselves, and sync_each=False.
    padded, padded_loss = pad_steps(steps, loss_fn)
    for step, report in train_(model, [optimizer], padded, padded_loss, sync_each=True):
        ...

    # For "zero" and "fsdp".
    padded, padded_loss, stop = pad_batches(model, batches, loss_fn)
    mean = evaluate(model, padded, padded_loss, stop=stop)

`train_` and `evaluate` are those of loop.py. A loss function returns (sum, count).

In training with "fsdp" and in evaluations, passes gather parameters (with "zero", only the first
pass of an evaluation). So all ranks must run the same number of passes. pad_steps and pad_batches
add passes with weight 0 on ranks that have fewer. Use all their results together, on all ranks.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import chain, islice, repeat
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

LossFn = Callable[[nn.Module, Any], tuple[Tensor, float | Tensor]]
InitialWeight = Callable[[str, torch.Size], Tensor]
STRATEGIES = ("zero", "fsdp")


def shard_(
    model: nn.Module,
    world_size: int,
    device: torch.device,
    parts: Sequence[nn.Module],
    strategy: str,
    initial_weight: InitialWeight | None = None,
    **fsdp: Any,
) -> nn.Module:
    """Move `model` to `device`, divide its parameters over all ranks, and return it.

    All ranks must call this, in a process group of `world_size` ranks. All start with the weights
    and buffers of rank 0. With world_size=1, nothing is divided.

    strategy: "zero" gathers all parameters once per step and keeps them until the last backward
        pass. The model gets a method `no_sync`. "fsdp" gathers one part at a time, again in each
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

    if strategy not in STRATEGIES:
        raise ValueError(f"strategy {strategy!r} is not one of {', '.join(STRATEGIES)}")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if world_size == 1:
        _fill_meta_(model, names, initial_weight)
        return model.to(device)
    mesh = init_device_mesh(device.type, (world_size,))
    for part in [*parts, model]:
        filled = _fill_meta_(part, names, initial_weight)
        part.to(device)
        _send_from_rank_0_(part, filled)
        fully_shard(part, mesh=mesh, reshard_after_forward=strategy == "fsdp", **fsdp)
    if strategy == "zero":
        setattr(model, "no_sync", partial(_no_sync, model))
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
            _broadcast_(tensor.detach())


def _broadcast_(tensor: Tensor) -> None:
    """Replace a tensor by that of rank 0."""
    dense = tensor.contiguous()  # dist ignores strides
    dist.broadcast(dense, 0)
    tensor.copy_(dense)


@contextmanager
def _no_sync(model: Any) -> Iterator[None]:
    """Let backward passes send no gradients and keep the parameters gathered."""
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)


class Padded(NamedTuple):
    """A batch of this rank, or an added one."""

    batch: Any
    added: bool


def pad_steps(
    steps: Iterable[tuple[list[Any], float]], loss_fn: LossFn, timeout: float = 600.0
) -> tuple[Iterator[tuple[list[Padded], float]], LossFn]:
    """Add micro-batches to each step, so that all ranks have the same number of them.

    Returns (steps, loss_fn) for loop.train_ with sync_each=True. Each rank needs at least one
    micro-batch in each step.
    timeout: for how long a rank waits for the others, in seconds. If the default group has gloo,
        its own timeout applies.
    """
    return _padded_steps(steps, timeout), partial(_padded_loss, loss_fn)


def _padded_steps(
    steps: Iterable[tuple[list[Any], float]], timeout: float
) -> Iterator[tuple[list[Padded], float]]:
    with _cpu_group(timeout) as group:
        for batches, total in steps:
            (most,) = _largest(group, len(batches))
            missing = most - len(batches)
            added = repeat(Padded(batches[0], True), missing)
            yield [*(Padded(batch, False) for batch in batches), *added], total


def pad_batches(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFn,
    timeout: float = 600.0,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[Iterator[Padded], LossFn, Callable[[], bool]]:
    """Add batches to an evaluation, so that all ranks have the same number of them.

    Returns (batches, loss_fn, stop) for loop.evaluate. A rank without batches gets the first batch
    of another rank, which must be possible to pickle.
    timeout: see pad_steps.
    stop: is called before each batch. If it returns true on any rank, the returned `stop` is true
        on all ranks before the same batch. If one rank left the evaluation alone, the others would
        wait for its parameters.
    """
    stopping = 0

    def padded() -> Iterator[Padded]:
        nonlocal stopping
        remaining = iter(batches)
        first = list(islice(remaining, 1))
        try:
            with _cpu_group(timeout) as group:
                spare = _lend_first(first, group)
                mine = (Padded(batch, False) for batch in chain(first, remaining))
                while True:
                    batch = next(mine, None)
                    any_left, stopping = _largest(group, batch is not None, stop())
                    if not any_left:
                        return
                    yield batch or Padded(spare[0], True)
        finally:
            for module in model.modules():
                if hasattr(module, "set_requires_gradient_sync"):  # only FSDP's modules have it
                    cast(Any, module).reshard()

    return padded(), partial(_padded_loss, loss_fn), lambda: bool(stopping)


def _lend_first(first: list[Any], group: dist.ProcessGroup | None) -> list[Any]:
    """Return `first`, or if it is empty, that of the lowest rank that has one."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    missing, lender = _largest(group, not first, size - rank if first else 0)
    lent = [first]
    if missing and lender:
        dist.broadcast_object_list(lent, size - lender, group)
    return first or lent[0]


def _padded_loss(
    loss_fn: LossFn, model: nn.Module, padded: Padded
) -> tuple[Tensor, float | Tensor]:
    loss_sum, count = loss_fn(model, padded.batch)
    return (loss_sum * 0.0, 0) if padded.added else (loss_sum, count)


@contextmanager
def _cpu_group(timeout: float) -> Iterator[dist.ProcessGroup | None]:
    """Yield a process group for CPU tensors, or None if the default group can be used.

    All ranks must enter it together.
    """
    if not dist.is_initialized() or "cpu:" in dist.get_backend_config():
        yield None
        return
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    try:
        yield group
    finally:
        if dist.is_initialized():  # otherwise it is destroyed already
            dist.destroy_process_group(group)


def _largest(group: dist.ProcessGroup | None, *numbers: int) -> list[int]:
    """Return the largest of all ranks for each of the numbers. All ranks must call it."""
    largest = torch.tensor(numbers, dtype=torch.int64)
    if dist.is_initialized():
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest.tolist()


def compress_(replica: nn.Module) -> None:
    """Let a DistributedDataParallel model send and add up gradients as bfloat16.

    bfloat16 keeps 8 of the 24 significant bits of float32. ValueError for another model, unless
    there is only one rank.
    """
    if isinstance(replica, nn.parallel.DistributedDataParallel):
        replica.register_comm_hook(None, _bf16_hook)
    elif dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"only DistributedDataParallel can compress gradients, not {type(replica).__name__}"
        )


def _bf16_hook(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Call torch's hook, because DDP refuses the hook itself for gloo."""
    return bf16_compress_hook(group, bucket)
