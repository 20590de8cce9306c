"""Train and evaluate any model with any loss, in one process or on many ranks.

    def loss_fn(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="none")  # (B,): a loss for each row

    steps = group_batches(loader, accum=2)
    lr_at = partial(linear, total=1000, warmup_steps=50)
    for step, report in train_(model, [optimizer], steps, loss_fn, lr_at=lr_at):
        if step % 10 == 0:
            print(step, float(report.loss))

The loss function returns the losses of a micro-batch as a tensor, one for each row or token. Or it
returns a tuple: their sum, or weighted losses, and their count, or the sum of their weights. If it
returns (mean, count), the result is wrong without an error: see from_mean. The global batch of a
step is all micro-batches of all ranks.
Each rank back-propagates sum * world_size / (count of the global batch). DDP and FSDP2 average over
the ranks, so the result is the exact mean gradient.

Wrap the model in DistributedDataParallel (DDP) or FSDP2 (torch's fully_shard), not in the older
FullyShardedDataParallel.

If only some ranks raise an error, the others wait in a collective until the processes of these
ranks end, or until the timeout of the process group.
"""

import copy
import hashlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

# loss_fn(model, micro-batch on the model's device) -> losses, or (losses or their sum, their count)
LossFn = Callable[[nn.Module, Any], Tensor | tuple[Tensor, float | Tensor]]
# the function that to_host returns
Reader = Callable[[], list[float]]


@dataclass(frozen=True)
class Report:
    """Holds the results of one optimizer step. They are equal on all ranks.

    The tensors are scalars on the model's device.
    """

    loss: Tensor  # exact mean loss over the global batch, before the update
    grad_norm: Tensor  # L2 norm of the mean gradient, before clipping
    count: Tensor  # count of the global batch
    skipped: Tensor  # number of bad steps (see train_) in this call, up to now
    stop: bool  # a rank asked to stop: see train_


class Diverged(FloatingPointError):
    """Too many steps in a row had a loss or gradient that was not finite, or a NaN stays."""


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
    scaler: torch.amp.GradScaler | None = None,
    seed: int = 0,
    stop: Callable[[], bool] = lambda: False,
    patience: int = 5,
    sync_each: bool = False,
) -> Iterator[tuple[int, Report]]:
    """Do one optimizer step for each item of `steps`; after each, yield (steps done, Report).

    All ranks must iterate over train_ together. It calls model.train() once. Before and after each
    step, it deletes the gradients of the optimizers' parameters. Sparse gradients are not
    supported.

    start: number of steps that are done: by an earlier run, or by an earlier call if you call
        train_ for each epoch. (Otherwise each epoch has the same dropout.) `steps` must begin after
        these. If your loop has `if step == last: break`, do not call train_ when start is already
        `last`: its first step would be last + 1, and only the end of `steps` would end it.
    steps: for each step, a list of this rank's micro-batches, and the declared count: the count of
        the global batch, or 0 on a rank that has no data left. Such a rank gives any one
        micro-batch, which gets the weight 0. But it must have a finite loss and gradient, and it
        changes BatchNorm statistics. All ranks need the same number of steps. In a step, they may
        have different numbers of micro-batches, unless layers communicate, as SyncBatchNorm does.
    lr_at: the "lr" of each parameter group becomes lr_at(number of finished steps) times its
        "initial_lr". A missing "initial_lr" is set to "lr". With None, the caller sets "lr". To
        resume a torch scheduler, see resume_ in ckpt.py.
    clip: maximum for the L2 norm of the mean gradient of all optimizers' parameters.
    dtype: for torch.autocast. float32 switches autocast off. float16 also needs `scaler`. Keep the
        weights in float32: there is a warning if those of an optimizer are bfloat16 or float16.
    scaler: the caller saves and restores its state.
    seed: in each step, torch's random generators are seeded from (seed, step, rank), so dropout is
        the same in a resumed run.
    stop: is called once per step. If it returns true on any rank, report.stop is true on all. Your
        loop must then break, because train_ goes on.
    patience: train_ raises Diverged after this number (at least 1) of bad steps in a row. In a bad
        step, the loss or the gradient norm is not finite. A bad step changes no weight and no
        optimizer state. But BatchNorm statistics can become NaN, and stay so. If the loss was not
        finite, and a buffer that a checkpoint has contains NaN, train_ raises Diverged at once.
    sync_each: if true, each backward pass synchronises gradients, not only the last one of a step.
        FSDP2 needs this, and so does DDP with static_graph=True if a step has several
        micro-batches. All ranks then need the same number of micro-batches in a step: see pad_steps
        in extras/fsdp.py.

    ValueError before an update: the model is not wrapped (not checked if sync_each is true) or has
    no parameters, clip is not above 0, dtype is float16 without an enabled scaler, an optimizer is
    LBFGS, or a step has no micro-batch.
    ValueError after a wrong update (discard the model):
    - The declared count is not what loss_fn counted. Ranks that declare 0 do not check this.
    - The gradient norm was not the same on all ranks, because loss_fn does not use the model that
      it is given. The next step notices this, so nothing checks the last step.

    On CUDA, report.stop, Diverged and the ValueError after a wrong update come one step late. A
    request to stop in the last step is not reported. What the last step finds is raised when
    `steps` ends, so a loop that breaks does not get it. On CUDA, use fused optimizers that have a
    state: with others, such as SGD without momentum, the host waits for the device in each step.
    """
    parameter = next(model.parameters(), None)
    if parameter is None:
        raise ValueError("the model has no parameters, so nothing can be trained")
    device = parameter.device
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    replica = _find_ddp(model)
    no_sync = nullcontext if sync_each or world_size == 1 else getattr(model, "no_sync", None)
    if no_sync is None:
        raise ValueError(
            f"{world_size} ranks would train different models: wrap the model in "
            "DistributedDataParallel, as replicate in ddp_setup.py does, or set sync_each for FSDP2"
        )
    if not clip > 0:
        raise ValueError(f"clip is {clip}; must be above 0, and math.inf for no clipping")
    scaler = scaler or torch.amp.GradScaler(device.type, enabled=False)
    if dtype == torch.float16 and not scaler.is_enabled():
        raise ValueError(
            "dtype float16 needs an enabled GradScaler as scaler, because small gradients would "
            "become 0; bfloat16 needs none"
        )
    if torch.optim.LBFGS in map(type, optimizers):
        raise ValueError("LBFGS cannot be used, because its step() needs a closure")
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    for low in dtypes & {torch.bfloat16, torch.float16}:
        warnings.warn(
            f"weights are {low}: updates smaller than about {torch.finfo(low).eps / 2:.2%} of a "
            "weight are rounded away; keep float32 weights, and pass dtype=torch.bfloat16",
            stacklevel=2,
        )
    skipped = in_a_row = previous_norm = torch.zeros((), device=device)
    # A queue: on CUDA, the first check does nothing, so each step calls that of the step before.
    checks: list[Callable[[], bool]] = [lambda: False] if _reads_late(device) else []
    model.train()
    for step, (batches, declared) in enumerate(steps, start):
        for optimizer in optimizers:
            optimizer.zero_grad()  # The loss of another model, as in a GAN, can leave gradients.
        if lr_at:
            # Checkpoints contain "lr", and torch.load(weights_only=True) refuses NumPy numbers.
            factor = float(lr_at(step))
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
        if not batches:  # must be a list, as from group_batches
            raise ValueError(
                "a step has no micro-batch on this rank: pass any micro-batch, with the count 0"
            )
        weight = world_size / declared if declared else 0.0
        # [loss sum, count, whether to stop, norm of the step before]
        sums = torch.zeros(4, dtype=accumulator_dtype(device), device=device)
        # `sums[2] = stop()` would wait for a CUDA device.
        sums[2].fill_(stop())
        sums[3] = previous_norm
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            _seed(device, seed, step, rank)
            for i, batch in enumerate(batches, 1):
                last = i == len(batches)
                with nullcontext() if last else no_sync():
                    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                        loss_sum, count = _add_up(loss_fn(model, to_device(batch, device)))
                    if weight:
                        sums[0] += loss_sum.detach()
                        sums[1] += count
                    if last:  # now, so that the sums are sent during the backward pass
                        wait = _sum_over_ranks_(sums)
                    scaler.scale(loss_sum * weight).backward()
            wait()
            if replica:
                # Private. It raises RuntimeError if DDP has synchronised only some gradients.
                # Without it, DDP raises only in the next step, after a wrong update.
                replica._check_reducer_finalized()
            loss = sums[0] / sums[1]
            norm, finite = _update_(optimizers, scaler, clip, loss)
        # If the ranks had equal gradients in the step before, the norm of each rank was the mean.
        # The check allows 0.1 %, because different hardware rounds differently.
        differ = (sums[3] / world_size - previous_norm).abs() > 1e-3 * previous_norm
        # For the comparison in the next step. NaN and infinity become 0, because comparisons with
        # NaN are false, so one on a single rank would not be noticed.
        previous_norm = norm.nan_to_num(0.0, 0.0)
        skipped = skipped + ~finite
        in_a_row = (in_a_row + 1) * ~finite
        read = to_host(torch.stack([*sums[:3], in_a_row, differ]))
        checks.append(partial(_read_flags, read, step + 1, declared, patience, model))
        # The check returns whether to stop, or raises an error.
        yield step + 1, Report(loss, norm, sums[1], skipped, checks.pop(0)())
    for check in checks:
        check()


def _add_up(result: Tensor | tuple[Tensor, float | Tensor]) -> tuple[Tensor, float | Tensor]:
    """Return (sum, count) of what a loss function returned."""
    if isinstance(result, Tensor):
        if not result.ndim:
            raise ValueError(
                "loss_fn returned a single number: return the losses of all rows "
                "(reduction='none'), or their sum and their count; for a mean see from_mean"
            )
        result = result, result.numel()
    losses, count = result
    return losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32)), count


def count_rows(batch: Any) -> int:
    """Return the length of the first tensor in a batch. Tuples, lists and dicts can be nested."""
    while not isinstance(batch, Tensor):
        batch = next(iter(batch.values() if isinstance(batch, Mapping) else batch))
    return len(batch)


def from_mean(
    mean_fn: Callable[[nn.Module, Any], Tensor], count: Callable[[Any], float] = count_rows
) -> LossFn:
    """Return a loss function for train_ and evaluate, from one that returns the mean of a batch.

    mean_fn: is called with (model, batch). count: returns for a batch the number of terms of its
    mean, by default the number of rows. Give the same function to group_batches.
    """
    return lambda model, batch: (mean_fn(model, batch) * count(batch), count(batch))


def _read_flags(read: Reader, step: int, declared: float, patience: int, model: nn.Module) -> bool:
    """Return whether a rank asked to stop, or raise the errors of train_."""
    loss_sum, counted, stopping, bad, differ = read()
    if differ:
        raise ValueError(
            f"step {step - 1}: the ranks had different gradients; loss_fn must use the model that "
            "is passed to it: only parameters that were part of this model and trainable when it "
            "was wrapped are synchronised"
        )
    # float32 sums on MPS need the tolerance.
    if declared and abs(counted - declared) > 1e-6 * declared:
        raise ValueError(
            f"step {step}: the declared count is {declared:.12g}, "
            f"but loss_fn counted {counted:.12g}"
        )
    # All ranks have the same loss, so they can communicate here.
    if not math.isfinite(loss_sum) and (names := [*chain(*_gather(_find_nan(model)))]):
        raise Diverged(
            f"step {step}: the loss is not finite, and the buffer {names[0]} contains NaN for "
            "ever; the last checkpoint before this step is good"
        )
    if bad >= patience:
        advice = (
            "try a lower learning rate, or with a GradScaler a lower init_scale"
            if counted
            else "loss_fn counted nothing in this step"
        )
        raise Diverged(
            f"loss or gradient not finite {patience} times in a row, up to step {step}; {advice}"
        )
    return stopping > 0


def _find_nan(model: nn.Module) -> list[str]:
    """Return the names of this rank's buffers that contain NaN, stay so, and are saved."""
    replica = _find_ddp(model)
    # DDP replaces these buffers before the next forward pass.
    if getattr(replica, "broadcast_buffers", False) and dist.get_rank():
        return []
    model = getattr(replica, "module", model)
    saved = model.state_dict()
    return [name for name, b in model.named_buffers() if name in saved and b.isnan().any()]


def _reads_late(device: torch.device) -> bool:
    """Return whether the host reads flags one step late, so that it need not wait."""
    return device.type == "cuda"


def _seed(device: torch.device, *numbers: int) -> None:
    """Seed torch's generators with a hash of `numbers`."""
    seed = int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(), "little")
    # torch.manual_seed also seeds other devices, which takes time.
    (torch.default_generator if device.type == "cpu" else torch).manual_seed(seed)


def _update_(
    optimizers: Sequence[Optimizer], scaler: torch.amp.GradScaler, clip: float, loss: Tensor
) -> tuple[Tensor, Tensor]:
    """Unscale and clip gradients, do the step if all is finite, and delete gradients.

    Returns the norm before clipping, and whether norm and loss are finite.
    """
    parameters = [p for o in optimizers for g in o.param_groups for p in g["params"]]
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    norm = clip_grad_norm_(parameters, clip)
    if hasattr(norm, "full_tensor"):  # FSDP's gradients are DTensors
        norm = norm.full_tensor()
    finite = norm.isfinite() & loss.isfinite()
    for optimizer in optimizers:
        # scaler.step() does not look at the loss. A fused optimizer can skip an update on the
        # device, but not its first, when it has no state: fused SGD would leave its momentum buffer
        # uninitialised. Both names are private, and GradScaler uses them, too. Without them, the
        # host would wait for the device in each step.
        fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        if finite.is_cuda and optimizer.state and fused:
            optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
            optimizer.step()
            # A later optimizer.step() of another caller must not skip.
            del optimizer.found_inf  # type: ignore[attr-defined]
        elif finite:
            optimizer.step()
        optimizer.zero_grad()
    scaler.update()
    return norm, finite


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFn,
    dtype: torch.dtype = torch.float32,
    stop: Callable[[], bool] = lambda: False,
) -> float | None:
    """Return the exact mean loss over the batches of all ranks, on every rank.

    The result is NaN if no rank has a batch. All ranks must call this function. Their numbers of
    batches may differ or be 0, because the ranks communicate only at the beginning and at the end.
    FSDP2 communicates in each batch and needs equal numbers: see pad_batches in extras/fsdp.py.

    stop: is called before each batch. If it returns true, this rank leaves out the rest of its
        batches. If it was true on any rank, all ranks return None. If only one rank gets a signal,
        the others first compute all their batches. (With FSDP2 they would wait for this rank: use
        the `stop` of pad_batches.)

    A rank that has finished waits for the slowest rank, and this wait counts against the timeout of
    the process group. So divide the batches evenly.

    evaluate runs the model in evaluation mode, without gradients, and restores the earlier modes.
    With DDP, loss_fn gets the module inside DDP. (A DDP inside another module can hang here: for
    example, give AveragedModel the module inside DDP.) First, all ranks get the buffers of rank 0,
    such as BatchNorm statistics, except those that DDP does not send: all of them if its
    broadcast_buffers or forward_sync_buffers is False. ValueError on all ranks if names, shapes or
    dtypes of these buffers differ between ranks.
    """
    replica = _find_ddp(model)
    # DDP's forward pass may send buffers, and would hang if ranks have different numbers of
    # batches.
    model = getattr(replica, "module", model)
    # Since torch 2.13, this setting of DDP has a second name.
    if dist.is_initialized() and getattr(replica, "broadcast_buffers", True):
        ignored = getattr(replica, "parameters_to_ignore", ())
        buffers = {name: b for name, b in model.named_buffers() if name not in ignored}
        every = _gather({f"{name} {tuple(b.shape)} {b.dtype}" for name, b in buffers.items()})
        if differing := sorted(set.union(*every) - set.intersection(*every)):
            raise ValueError(
                f"ranks have different buffers: {', '.join(differing[:2])}; keep the data of one "
                "rank in an attribute that is no buffer, or set broadcast_buffers=False of DDP"
            )
        for buffer in buffers.values():
            contiguous = buffer.contiguous()  # broadcast ignores strides
            dist.broadcast(contiguous, 0)
            buffer.copy_(contiguous)
    # A model can have buffers only, or nothing.
    device = next(chain(model.parameters(), model.buffers()), torch.zeros(0)).device
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    # [loss sum, count, number of ranks that stopped]. Sums in train_ have 4 numbers, and those in
    # group_batches 2. If a rank is in another function by mistake, gloo then raises an error
    # instead of adding numbers that do not belong together.
    sums = torch.zeros(3, dtype=accumulator_dtype(device), device=device)
    try:
        for batch in batches:
            if stop():
                sums[2].fill_(1)
                break
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                loss_sum, count = _add_up(loss_fn(model, to_device(batch, device)))
            sums[0] += loss_sum
            sums[1] += count
    finally:
        for module, training in modes:
            module.training = training
    _sum_over_ranks_(sums)()
    loss_sum, count, stopped = sums.cpu()
    return None if stopped else float(loss_sum / count)


def _gather(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    every = [value]
    if dist.is_initialized():
        every *= dist.get_world_size()
        dist.all_gather_object(every, value)
    return every


def _find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """Return `model` if it is a DistributedDataParallel, also if torch.compile has wrapped it."""
    # Private. Without it, evaluate() could hang for torch.compile(DistributedDataParallel(...)).
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, DistributedDataParallel) else None


def group_batches(
    batches: Iterable[Any], accum: int = 1, count: Callable[[Any], float] = count_rows
) -> Iterator[tuple[list[Any], float]]:
    """Group this rank's batches into the steps that train_ takes.

    All ranks must iterate over the result together.
    accum: number of micro-batches per step and rank.
    count: returns for a batch the count that the loss function will return or, if it returns a
        tensor of losses, the number of these. The default is the number of rows.

    The steps end when no rank has a batch left. A rank that runs out earlier repeats a micro-batch
    and declares 0: see train_. A step whose count is 0 on all ranks is left out. ValueError if
    accum < 1, or on a rank that has no batch at all while others have some.

    group_batches reads one step ahead, so a saved state of the loader would be one step too far. To
    resume, skip the finished steps of the same batches: islice(group_batches(...), start, None).
    """

    def own_steps() -> Iterator[tuple[list[Any], Reader]]:
        remaining = iter(batches)
        while True:
            micro_batches = list(islice(remaining, accum))
            sums = torch.tensor(
                [sum(map(count, micro_batches)), len(micro_batches)], dtype=torch.float64
            )
            # NCCL cannot sum tensors on the CPU.
            if dist.is_initialized() and "nccl" in dist.get_backend_config():
                sums = to_device(sums, torch.device("cuda"))
            _sum_over_ranks_(sums)()
            yield micro_batches, to_host(sums)

    if accum < 1:
        raise ValueError(f"accum is {accum}; must be at least 1")
    spare: list[Any] = []
    # pairwise reads one item ahead, so on CUDA read() does not wait for the forward and backward
    # pass of the step before. No step gets lost, because own_steps never ends.
    for (micro_batches, read), _ in pairwise(own_steps()):
        total, batches_in_step = read()
        if not batches_in_step:
            return
        spare = micro_batches[:1] or spare
        if not spare:
            raise ValueError("this rank has no batch; use fewer ranks or smaller batches")
        if total:
            yield (micro_batches, total) if micro_batches else (spare, 0)


def _sum_over_ranks_(values: Tensor) -> Callable[[], object]:
    """Start to sum `values` over all ranks, in place; return a function that waits for it."""
    return dist.all_reduce(values, async_op=True).wait if dist.is_initialized() else lambda: None


def accumulator_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for sums over batches. MPS has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def to_host(values: Tensor) -> Reader:
    """Start to copy a tensor (N,) to the host; return a function that waits and returns a list.

    Do not change the tensor in place until that function has returned.
    """
    if not values.is_cuda:
        return values.tolist
    host = values.to("cpu", non_blocking=True)  # torch puts this into pinned memory
    # The tensor's device need not be the current device.
    arrived = torch.cuda.current_stream(values.device).record_event()

    def read() -> list[float]:
        arrived.synchronize()
        return host.tolist()

    return read


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on `device`. Tuples, lists and dicts can be nested.

    A subclass of dict becomes a dict. Other objects with a method to(), such as a PackedSequence,
    move themselves.
    """
    if isinstance(batch, Tensor):
        # On MPS, a non-blocking copy can read memory that was freed (PyTorch issue 189690).
        cuda = device.type == "cuda"
        if cuda and batch.is_cpu:
            # to() would copy a non-contiguous tensor through unpinned memory.
            batch = batch.contiguous().pin_memory()
        return batch.to(device, non_blocking=cuda)
    if callable(getattr(batch, "to", None)):
        return copy.copy(batch).to(device)  # BatchEncoding.to changes the object itself.
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        values = [to_device(value, device) for value in batch]
        # The constructor of a NamedTuple takes one argument per field.
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


def linear(
    step: int,
    total: int,
    warmup_steps: int = 0,
    floor: float = 0.0,
    decay_steps: float = math.inf,
) -> float:
    """Return the factor for the learning rate in a step: linear warm-up, then linear decay.

    step: from 0 to total - 1. The factor at total - 1 is one step of the decay above `floor`.
    decay_steps: the decay takes this number of steps at the end, and before it the factor is 1. It
        takes at most all steps after the warm-up.
    """
    warmup = min(1.0, (step + 1) / max(1, warmup_steps))
    begin = max(warmup_steps, total - decay_steps)
    done = min(1.0, max(0, step - begin) / max(1, total - begin))
    return warmup * (floor + (1 - floor) * (1 - done))


def cosine(step: int, total: int, warmup_steps: int = 0, floor: float = 0.0) -> float:
    """Return the factor for the learning rate in a step: linear warm-up, then cosine decay.

    The decay is half a cosine wave (Loshchilov and Hutter, 2017). For the arguments see linear.
    """
    factor = linear(step, total, warmup_steps)
    if step < warmup_steps:
        return factor
    return floor + (1 - floor) * (1 - math.cos(math.pi * factor)) / 2
