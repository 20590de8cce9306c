"""Train and evaluate any model with any loss, in one process or on many ranks.

    def loss_fn(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="none")  # (B,): a loss for each row

    steps = group_batches(loader, accum=2)  # or the DataLoader itself, without accumulation
    lr_at = partial(linear, total=1000, warmup_steps=50)
    for step, report in train_(model, [optimizer], steps, loss_fn, lr_at=lr_at):
        print(step, float(report.loss))

The loss function returns the losses of a micro-batch as a tensor, or a tuple: (their sum, their
count). If your model returns the mean of n losses (n > 0), return (mean * n, n).
The global batch of a step is all micro-batches of all ranks. Each rank back-propagates
sum * world_size / (count of the global batch). DistributedDataParallel (DDP) and FSDP2 average over
the ranks, so the result is the exact mean gradient.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.utils.data import DataLoader

# loss_fn(model, micro-batch on the model's device) -> losses, or (their sum, their count)
LossFn = Callable[[nn.Module, Any], Tensor | tuple[Tensor, float | Tensor]]


class Report(NamedTuple):
    """The results of one optimizer step, equal on all ranks. Tensors are scalars on the device."""

    loss: Tensor  # exact mean loss over the global batch, before the update
    grad_norm: Tensor  # L2 norm of the mean gradient, before clipping
    count: Tensor  # type: ignore[assignment]  # of losses, or sum of weights, in the global batch
    skipped: Tensor  # number of bad steps (see train_) in this call, up to now
    stop: bool  # a rank asked to stop: this was the last step


class Diverged(FloatingPointError):
    """Too many steps in a row had a loss or gradient that was not finite."""


def train_(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    steps: Iterable[tuple[list[Any], float]],
    loss_fn: LossFn,
    *,
    start: int = 0,
    lr_at: Callable[[int], float] | None = None,
    clip: float = math.inf,
    dtype: torch.dtype = torch.float32,
    scaler: GradScaler | None = None,
    seed: int = 0,
    stop: Callable[[], bool] = lambda: False,
    patience: int = 5,
    sync_each: bool = False,
) -> Iterator[tuple[int, Report]]:
    """Do one optimizer step for each item of `steps`; after each, yield (steps done, Report).

    All ranks must iterate over train_ together, with the same number of steps.
    model: is set to training mode. On several ranks, wrap it in DDP or FSDP2. loss_fn must use it.
    start: number of steps that are already done; `steps` begins after these.
    steps: for each step, a list of this rank's micro-batches, and the count of the global batch, or
        0 if this rank has no data left. Such a rank gives any one micro-batch, with the weight 0.
        A DataLoader of (x, y) is the same as group_batches(loader): one loss for each row.
    lr_at: sets "lr" of each parameter group to "initial_lr" (by default the first "lr") times
        lr_at(number of finished steps). None: "lr" is up to the caller.
    clip: maximum for the L2 norm of the mean gradient of all optimizers' parameters.
    dtype: for torch.autocast; float32 switches it off. Keep the weights in float32.
    scaler: for float16 only, which needs it. The caller saves and restores its state.
    seed: each step seeds torch's generators with (seed, step, rank): a resume has the same dropout.
    stop: is called in each step. If it is true on any rank, this step is the last one on all.
    patience: Diverged is raised after this number of bad steps in a row in this call. In a bad
        step, loss or gradient norm is not finite; no weight and no optimizer state changes.
    sync_each: synchronise gradients after each micro-batch, not only after the last: for FSDP2, and
        DDP with static_graph=True. All ranks then need equally many micro-batches in a step.

    ValueError if an argument is wrong, and after a wrong update if loss_fn does not count what
    `steps` declares.
    On CUDA, the host never waits for the device if the optimizers are fused: report.stop and the
    errors come one step late, and those of the last step when `steps` ends.
    """
    device = next(model.parameters()).device
    cuda, float16 = device.type == "cuda", dtype == torch.float16
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    no_sync = nullcontext if sync_each or world_size == 1 else getattr(model, "no_sync", None)
    if not no_sync:
        raise ValueError("each rank would train alone: wrap the model in DistributedDataParallel")
    if isinstance(steps, DataLoader):
        steps = group_batches(steps)
    if not float16:
        scaler = GradScaler(device.type, init_scale=1.0)  # It only skips bad steps: see _update_.
    elif not (scaler and scaler.is_enabled()):
        raise ValueError("float16 needs an enabled GradScaler: small gradients would become 0")
    if {p for o in optimizers for g in o.param_groups for p in g["params"]} - {*model.parameters()}:
        raise ValueError("an optimizer has a parameter that is not one of the model")
    check_later: Callable[[], bool] = bool  # returns False
    skipped = in_a_row = torch.zeros((), device=device)
    model.train()
    for step, (batches, declared) in enumerate(steps, start):
        model.zero_grad()
        if lr_at:
            factor = float(lr_at(step))  # A checkpoint cannot contain numbers of NumPy.
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
        weight = world_size / declared if declared else 0.0
        sums = _zeros(3, device)  # loss, count, number of ranks that ask to stop
        sums[2].fill_(stop())
        with torch.random.fork_rng([device] if cuda else []):
            hashed = hashlib.blake2b(repr((seed, step, rank)).encode(), digest_size=8)
            torch.manual_seed(int.from_bytes(hashed.digest(), "little"))
            for i, batch in enumerate(batches, 1):
                with nullcontext() if i == len(batches) else no_sync():
                    loss_sum, count = _add_up(model, batch, loss_fn, device, dtype)
                    scaler.scale(loss_sum * weight).backward()
                if declared:
                    sums[0] += loss_sum.detach()
                    sums[1] += count
        _all_reduce_(sums)
        loss = sums[0] / sums[1]
        norm = _update_(optimizers, scaler, clip, loss)
        scaler.update(None if float16 else 1.0)
        bad = ~(norm + loss).isfinite()
        skipped, in_a_row = skipped + bad, (in_a_row + 1) * bad
        flags = torch.stack([sums[1], sums[2], in_a_row]).to("cpu", non_blocking=cuda)
        check = partial(_check, flags, step + 1, declared, patience)
        if cuda:
            copied = torch.cuda.current_stream(device).record_event()
            check, check_later = check_later, partial(check, copied)  # type: ignore[assignment]
        stopping = check()
        yield step + 1, Report(loss, norm, sums[1], skipped, stopping)
        if stopping:
            break
    check_later()


def _add_up(
    model: nn.Module, batch: Any, loss_fn: LossFn, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, float | Tensor]:
    """Return the sum and the count of the losses of a micro-batch."""
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        result = loss_fn(model, to_device(batch, device))
        if not isinstance(result, tuple):
            if not result.ndim:
                raise ValueError("loss_fn returned one number: return all losses, or (mean * n, n)")
            result = result, result.numel()
        losses, count = result
        return losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32)), count


def _update_(
    optimizers: Sequence[Optimizer], scaler: GradScaler, clip: float, loss: Tensor
) -> Tensor:
    """Clip the gradients and do the steps, if all is finite. Return the norm before clipping."""
    parameters = [p for o in optimizers for g in o.param_groups for p in g["params"]]
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
    if hasattr(norm, "full_tensor"):  # The gradients of FSDP2 are DTensors.
        norm = norm.full_tensor()
    norm = norm / scaler.scale(torch.ones_like(norm))
    # If norm or loss is not finite, 0 * it is NaN, so all gradients become NaN. Then scaler.step()
    # does nothing. Fused optimizers find this out on the device, so the host need not wait.
    clip_grads_with_norm_(parameters, clip, norm + 0 * (norm + loss.to(norm)))
    for optimizer in optimizers:
        # Without a gradient, as of frozen weights, GradScaler would raise an error.
        if any(p.grad is not None for g in optimizer.param_groups for p in g["params"]):
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
    return norm


def _check(flags: Tensor, step: int, declared: float, patience: int, copied: Any = None) -> bool:
    """Return whether a rank asked to stop, or raise the errors of train_."""
    if copied:
        copied.synchronize()
    counted, stopping, in_a_row = flags.tolist()
    if declared and abs(counted - declared) > 1e-6 * declared:
        raise ValueError(
            f"step {step}: the declared count is {declared:.12g}, but loss_fn counted "
            f"{counted:.12g}; let `count` of group_batches count what loss_fn counts"
        )
    if in_a_row >= patience:
        raise Diverged(
            f"loss or gradient not finite {patience} times in a row, up to step {step}; "
            "try a lower learning rate"
        )
    return stopping > 0


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFn,
    dtype: torch.dtype = torch.float32,
) -> float:
    """Return the exact mean loss over the batches of all ranks, on every rank.

    All ranks must call this. Their numbers of batches may differ or be 0, because ranks communicate
    only at the beginning and at the end. (FSDP2 communicates in each batch.) loss_fn gets the
    module inside DDP, with the buffers of rank 0. NaN if there are no batches.
    """
    if hasattr(model, "no_sync"):  # DDP, whose forward pass would communicate
        model = model.module  # type: ignore[assignment]
        for buffer in model.buffers():
            contiguous = buffer.contiguous()  # broadcast ignores strides.
            dist.broadcast(contiguous, 0)
            buffer.copy_(contiguous)
    device = next(model.parameters()).device
    sums = _zeros(2, device)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    for batch in batches:
        loss_sum, count = _add_up(model, batch, loss_fn, device, dtype)
        sums[0] += loss_sum
        sums[1] += count
    for module, training in modes:
        module.training = training
    _all_reduce_(sums)
    return float(sums[0] / sums[1])


def group_batches(
    batches: Iterable[Any],
    accum: int = 1,
    count: Callable[[Any], float] = lambda batch: len(batch[0]),
) -> Iterator[tuple[list[Any], float]]:
    """Group this rank's batches, as from a DataLoader, into the steps that train_ takes.

    All ranks must iterate over the result together. The steps end when no rank has a batch left. A
    rank that runs out earlier repeats a micro-batch and declares 0.
    accum: number of micro-batches per step and rank.
    count: returns the number of losses of a batch, by default the rows of (x, y).
    The process group must be able to sum CPU tensors: NCCL alone cannot, "cpu:gloo,cuda:nccl" can.
    """
    remaining, spare = iter(batches), []  # type: ignore[var-annotated]
    while True:
        own = list(islice(remaining, accum))
        sums = torch.tensor([sum(map(count, own)), len(own)], dtype=torch.float64)
        _all_reduce_(sums)
        total, batches_left = sums.tolist()
        if not batches_left:
            return
        spare = own[:1] or spare
        if not spare:
            raise ValueError("this rank has no batch; use fewer ranks or smaller batches")
        if total:
            yield (own, total) if own else (spare, 0)


def _zeros(size: int, device: torch.device) -> Tensor:
    """Return zeros for sums over many batches. MPS has no float64."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return torch.zeros(size, dtype=dtype, device=device)


def _all_reduce_(values: Tensor) -> None:
    """Sum `values` over all ranks."""
    if dist.is_initialized():
        dist.all_reduce(values)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on `device`. Tuples, lists and dicts can be nested.

    Tuples, also named ones, become lists.
    """
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [to_device(value, device) for value in batch]
    if not hasattr(batch, "to"):
        return batch
    cuda = device.type == "cuda"
    if cuda and isinstance(batch, Tensor) and batch.is_cpu:
        # Only from contiguous, pinned memory, the copy does not wait for the device.
        batch = batch.contiguous().pin_memory()
    return batch.to(device, non_blocking=cuda)


def linear(
    step: int,
    total: int,
    warmup_steps: int = 0,
    floor: float = 0.0,
    decay_steps: float = math.inf,
) -> float:
    """Return the factor for the learning rate in a step: linear warm-up, then linear decay.

    step: from 0 to total - 1. The factor at total - 1 is one step of the decay above `floor`.
    decay_steps: the decay takes this number of steps at the end, or all steps after the warm-up.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    begin = max(warmup_steps, total - decay_steps)
    done = max(0, step - begin) / max(1, total - begin)
    return 1 - (1 - floor) * min(1.0, done)


def cosine(step: int, total: int, warmup_steps: int = 0, floor: float = 0.0) -> float:
    """Return the factor for the learning rate in a step: linear warm-up, then cosine decay.

    The decay is half a cosine wave (Loshchilov and Hutter, 2017). For the arguments see linear.
    """
    factor = linear(step, total, warmup_steps)
    return factor if step < warmup_steps else 1 - (1 - floor) * (1 + math.cos(math.pi * factor)) / 2
