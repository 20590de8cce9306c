"""One optimizer step, the loop around it, the evaluation. Any model, any optimizer, any loss.

    def loss_fn(model, batch): x, y = batch; return F.mse_loss(model(x), y, reduction="sum"), len(x)

    for step, report in train_(model, [optimizer], group(loader, accum=2, count=lambda b: len(b[0])), loss_fn):
        if step % 10 == 0: print(step, float(report.loss))
        if report.stop: break

The loss function returns a sum and the count of what was summed, never a mean: means of unequal parts do not
average to the mean of the whole. Each rank back-propagates sum * world_size / count of the whole global batch,
so that the average that DistributedDataParallel takes over the ranks is the exact mean gradient, however the
batch was split. Without a process group everything here does the same for one process.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain, islice, repeat
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

LossFn = Callable[[nn.Module, Any], tuple[Tensor, int]]


class Report(NamedTuple):
    """What one optimizer step has to tell. Its tensors are on the device: float() of one waits for the step."""

    loss: Tensor  # () float64: exact mean over the global batch, before the update
    grad_norm: Tensor  # () float32: global norm of the mean gradient, before clipping
    lr: float  # of the first parameter group
    counted: Tensor  # () float64: what the loss counted in the global batch: tokens, rows
    skipped: Tensor  # () how many steps so far changed nothing, as their loss or gradient was not finite
    stop: bool  # some rank asked to stop: all ranks see it after the same step


class Diverged(RuntimeError):
    """Too many steps in a row had a loss or a gradient that was not finite."""


def train_(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    steps: Iterable[tuple[list[Any], int]],
    loss_fn: LossFn,
    *,
    start: int = 0,
    lr_at: Callable[[int], float] = lambda step: 1.0,
    clip: float = math.inf,
    dtype: torch.dtype = torch.float32,
    scaler: torch.amp.GradScaler | None = None,
    seed: int = 0,
    stop: Callable[[], bool] = lambda: False,
    patience: int = 5,
) -> Iterator[tuple[int, Report]]:
    """Train on each of `steps`; after each, yield (optimizer steps done, its Report).

    steps: (this rank's micro-batches, count of what all ranks' hold together). With a count of 0 this rank has
        nothing to add at this step: its micro-batches are computed, as the others wait for it, and weigh 0.
    lr_at: steps done -> the factor on each parameter group's peak rate (its "initial_lr", else its "lr").
    clip: largest global norm of the mean gradient.
    dtype: autocast to it. For float16 give a GradScaler, to be saved and restored with the rest.
    stop: asked on every rank at every step; when it is true on any, report.stop is true on all.

    Randomness (dropout) follows from (seed, step, rank), so a resumed run draws what an unbroken one would.
    A step whose loss or gradient is not finite changes nothing; `patience` of them in a row raise Diverged.
    On CUDA nothing here waits for the device but for what was queued a step ago: `stop` and Diverged come one
    step late there. An optimizer that cannot skip on the device, as those that are fused can, does wait: Muon.
    """
    device = next(model.parameters()).device
    rank = dist.get_rank() if dist.is_initialized() else 0
    scaler = scaler or torch.amp.GradScaler(device.type, enabled=False)
    skipped = in_a_row = torch.zeros((), device=device)
    late: Callable[[], Sequence[float]] = lambda: (0, 0)  # noqa: E731
    model.train()
    for step, (batches, total) in enumerate(steps, start):
        _seed(_mix(seed, step, rank), device)
        lr = _set_lr_(optimizers, lr_at(step))
        sums = _backward_(model, batches, total, loss_fn, dtype, scaler, stop())
        loss = sums[0] / sums[1]
        norm, finite = _update_(optimizers, scaler, clip, loss)
        skipped, in_a_row = skipped + ~finite, torch.where(finite, 0, in_a_row + 1)
        now = to_host(torch.stack([sums[2], in_a_row]))
        stopping, bad = late() if device.type == "cuda" else now()
        late = now
        yield step + 1, Report(loss, norm, lr, sums[1], skipped, stopping > 0)
        if bad >= patience:
            raise Diverged(f"loss or gradient not finite {patience} times in a row, up to step {step + 1}")


def _seed(number: int, device: torch.device) -> None:
    """What torch.manual_seed does, for the devices in use: for an unused CUDA it would queue a call and a stack trace."""
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(number)
    elif device.type == "mps":
        torch.mps.manual_seed(number)


def _mix(*numbers: int) -> int:
    """A 64-bit seed in which every bit of every number counts (CPU generators use only 32 of them)."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(), "little")


def _set_lr_(optimizers: Sequence[torch.optim.Optimizer], factor: float) -> float:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group in groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
    return float(groups[0]["lr"])


def _backward_(
    model: nn.Module,
    batches: list[Any],
    total: int,
    loss_fn: LossFn,
    dtype: torch.dtype,
    scaler: torch.amp.GradScaler,
    stop: bool,
) -> Tensor:
    """Accumulate the gradient of the global mean; -> (3,) over all ranks: loss sum, count, who asks to stop.

    The ranks synchronise their gradients once, in the last micro-batch's backward pass; under FSDP in each one's, as
    it never holds all of them.
    """
    device = next(model.parameters()).device
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    weight = world_size / total if total else 0.0
    sums = torch.zeros(3, dtype=_widest(device), device=device)
    sums[2] = stop
    reducing = None
    together = world_size > 1 and not hasattr(model, "no_sync")  # FSDP: each of its passes takes all ranks
    weighed = _as_many_as_others(batches, weight, device) if together else zip(batches, repeat(weight))
    for i, (batch, weight) in enumerate(weighed, 1):
        with nullcontext() if i == len(batches) or together or world_size == 1 else cast(Any, model).no_sync():
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                loss_sum, count = loss_fn(model, to_device(batch, device))
            if weight:
                sums[0] += loss_sum.detach()
                sums[1] += count
            if i == len(batches) and dist.is_initialized() and not together:  # while the backward pass computes
                reducing = dist.all_reduce(sums, async_op=True)
            scaler.scale(loss_sum * weight).backward()
    if together:  # last: collectives come in one order on all ranks
        dist.all_reduce(sums)
    if reducing is not None:
        reducing.wait()
    return sums


def _as_many_as_others(batches: list[Any], weight: float, device: torch.device) -> Iterator[tuple[Any, float]]:
    """(micro-batch, its weight), and while another rank has more of them the first again, to weigh nothing.

    How many others have is read once this rank's own are queued, so the device has work while that number travels.
    """
    most = torch.full((1,), float(len(batches)), device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    others = to_host(most)
    yield from zip(batches, repeat(weight))
    yield from repeat((batches[0], 0.0), int(others()[0]) - len(batches))


def _update_(
    optimizers: Sequence[torch.optim.Optimizer], scaler: torch.amp.GradScaler, clip: float, loss: Tensor
) -> tuple[Tensor, Tensor]:
    """Unscale, clip, step, clear; -> (global norm before clipping, whether it and the loss were finite)."""
    parameters = [p for o in optimizers for g in o.param_groups for p in g["params"] if p.grad is not None]
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    norm = get_total_norm([p.grad for p in parameters])
    if hasattr(norm, "full_tensor"):  # a DTensor, as the gradients are under FSDP
        norm = norm.full_tensor()
    finite = norm.isfinite() & loss.isfinite()
    if clip < math.inf:
        clip_grads_with_norm_(parameters, clip, norm)
    for optimizer in optimizers:
        # not its first step: torch's fused SGD, if it skips that one, keeps a momentum that nothing was written to
        if finite.is_cuda and optimizer.state and getattr(optimizer, "_step_supports_amp_scaling", False):
            # a fused optimizer reads found_inf on the device and skips the step itself, as GradScaler has it do
            setattr(optimizer, "found_inf", (~finite).float())
            optimizer.step()
            delattr(optimizer, "found_inf")  # else the caller's own step() would be skipped too
        elif finite:
            optimizer.step()
    scaler.update()
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    return norm, finite


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def to_host(values: Tensor) -> Callable[[], list[float]]:
    """Start to copy a few numbers to the host; the function returned waits until they are there."""
    if not values.is_cuda:
        return values.tolist
    host = torch.empty_like(values, device="cpu", pin_memory=True)
    host.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(values.device))  # which need not be the current device

    def read() -> list[float]:
        arrived.synchronize()
        return host.tolist()

    return read


def to_device(batch: Any, device: torch.device) -> Any:
    """The same tuple, list or dict of tensors on `device`; to CUDA through pinned memory, without waiting."""
    if isinstance(batch, Tensor):
        if device.type == "cuda" and batch.device.type == "cpu":
            batch = batch.contiguous().pin_memory()  # with gaps it would go through other memory, and wait
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if hasattr(batch, "_fields"):  # a NamedTuple
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def group(batches: Iterable[Any], accum: int, count: Callable[[Any], int]) -> Iterator[tuple[list[Any], int]]:
    """This rank's batches, from a DataLoader say, as the steps that train_ takes: `accum` of them a step.

    `count` says of a batch what the loss function will count in it; the ranks add up theirs in one small
    all-reduce a step. A rank that runs out before the others goes along with a batch that weighs nothing.
    """
    batches, spare = iter(batches), list[Any]()
    while True:
        window = list(islice(batches, accum))
        sums = torch.tensor([sum(map(count, window)), len(window)])
        if dist.is_initialized():
            sums = sums.to(_collective_device())
            dist.all_reduce(sums)
        total, left = sums.tolist()
        if not left:
            return
        spare = window[:1] or spare
        if not spare:
            raise ValueError("this rank has no batch at all; use fewer ranks, or smaller batches")
        if total:  # else they are of padding alone: nothing to learn, on any rank
            yield (window, total) if window else (spare, 0)


def _collective_device() -> torch.device:
    cuda = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFn,
    dtype: torch.dtype = torch.float32,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[float, float] | None:
    """(sum, count) of `loss_fn` over the batches of all ranks: divide them for the exact mean.

    Every rank has to call it. Ranks may have unequal numbers of batches, or none. `stop` is asked at every batch;
    when it is true on any rank the evaluation is given up on all, and the result is None.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module  # DDP's own forward pass can wait for all ranks'
    device = next(model.parameters()).device
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    sums = torch.zeros(2, dtype=_widest(device), device=device)
    sharded = [module for module in model.modules() if hasattr(module, "set_requires_gradient_sync")]  # by FSDP
    batches, spare = _with_spare(batches) if sharded else (batches, [])
    none_left, late = object(), cast(Callable[[], Sequence[float]], lambda: (1, 0))
    for batch in chain(batches, repeat(none_left)):
        # (2,) how many ranks still have a batch, and how many ask to stop: on its way while the batch is computed
        flags = torch.zeros_like(sums)
        flags[0], flags[1] = batch is not none_left, stop()  # filled there: a copy from here would wait for the device
        reducing = dist.all_reduce(flags, async_op=True) if dist.is_initialized() else None
        if batch is not none_left or spare:
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                value, count = loss_fn(model, to_device(spare[0] if batch is none_left else batch, device))
            if batch is not none_left:
                sums[0] += value
                sums[1] += count
        if reducing:
            reducing.wait()
        now = to_host(flags)
        left, stopping = late() if device.type == "cuda" else now()
        late = now
        if stopping or not left:
            break
    if dist.is_initialized():
        dist.all_reduce(sums)
    for module, training in modes:
        module.training = training
    for module in sharded:
        cast(Any, module).reshard()  # what a backward pass would have done
    total, count = sums.tolist()
    return None if stopping else (total, count)


def _with_spare(batches: Iterable[Any]) -> tuple[Iterable[Any], list[Any]]:
    """The same batches, and one of them, or of the lowest rank that has one, for when there are none left: FSDP gathers
    weights in the forward pass, which therefore takes all ranks. ([], if no rank has any.)"""
    batches = iter(batches)
    spare = list(islice(batches, 1))
    rank, size = dist.get_rank(), dist.get_world_size()
    least = torch.tensor([len(spare), rank if spare else size], device=_collective_device())
    dist.all_reduce(least, dist.ReduceOp.MIN)
    all_have, lender = least.tolist()
    lent = [spare]
    if not all_have and lender < size:
        dist.broadcast_object_list(lent, lender)
    return chain(spare, batches), spare or lent[0]


def warmup(step: int, steps: int) -> float:
    """The factor of a linear warm-up at step 0, 1, ...: 1 / steps, 2 / steps, ... 1, 1, ..."""
    return min(1.0, (step + 1) / max(1, steps))


def linear(step: int, total: int, warmup_steps: int = 0, floor: float = 0.0) -> float:
    """Learning-rate factor: warm up to 1, then go straight down to `floor` at step `total`."""
    left = 1 - min(1.0, max(0, step - warmup_steps) / max(1, total - warmup_steps))
    return warmup(step, warmup_steps) * (floor + (1 - floor) * left)


def cosine(step: int, total: int, warmup_steps: int = 0, floor: float = 0.0) -> float:
    """Learning-rate factor: warm up to 1, then half a cosine down to `floor` (Loshchilov and Hutter, 2017)."""
    done = min(1.0, max(0, step - warmup_steps) / max(1, total - warmup_steps))
    return warmup(step, warmup_steps) * (floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2)
