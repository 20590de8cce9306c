"""Train and evaluate any model with any loss and any optimizers, in one process or on many ranks.

    def loss_fn(model, batch):
        x, y = batch
        return F.mse_loss(model(x), y, reduction="sum"), len(x)

    steps = group_batches(loader, accum=2, count=lambda batch: len(batch[0]))
    for step, report in train_(model, [optimizer], steps, loss_fn):
        if step % 10 == 0:
            print(step, float(report.loss))
        if report.stop:
            break

The loss function returns a sum over a micro-batch, not a mean, and the count of the terms of this
sum (rows, tokens): if micro-batches have different sizes, the mean of their means is not the mean
of the whole. Each rank back-propagates sum * world_size / (count of the global batch, that is, of
all micro-batches of all ranks in this step). DDP and FSDP average over the ranks, so the result is
the exact mean gradient of the global batch, no matter how the batch was divided.

Everything here also works without a process group. In a process group, all ranks must call the same
functions in the same order, and the model must be wrapped in DistributedDataParallel (DDP) or
FSDP2 (torch's fully_shard; FullyShardedDataParallel is not supported). With FSDP2, call train_ with
sync_each=True. A trailing underscore in the name of a function
(train_) means, as in torch, that it changes its arguments.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, pairwise, repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

# loss_fn(model, micro-batch on the model's device) -> (scalar sum, count of its terms)
LossFn = Callable[[nn.Module, Any], tuple[Tensor, float | Tensor]]
# waits until the numbers of a tensor are on the host, and returns them
Reader = Callable[[], list[float]]


@dataclass(frozen=True)
class Report:
    """Holds the results of one optimizer step. They are equal on all ranks.

    The tensors are scalars on the model's device. float(tensor) waits until the device has finished
    the step, so convert them only in steps that you log.
    """

    loss: Tensor  # exact mean loss over the global batch, before the update
    grad_norm: Tensor  # L2 norm of the mean gradient of the global batch, before clipping
    count: Tensor  # sum of what loss_fn counted on all ranks that did not declare 0: see train_
    # number of steps since the start of train_ that were skipped, because the loss or the gradient
    # was not finite
    skipped: Tensor
    stop: bool  # some rank's stop() was true in this step (on CUDA: in the step before)


class Diverged(FloatingPointError):
    """Is raised if too many steps in a row had a loss or a gradient that was not finite."""


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

    Gradients must be dense, and optimizers need a step() without arguments (so not LBFGS).

    All ranks must iterate over train_ together; like any generator, it does nothing before the
    first next(). The first yielded number is start + 1. train_ calls model.train() once, at the
    start. Gradients must be None at the start. After each step, the gradients of all parameters of
    the optimizers are deleted (set to None); those of other parameters accumulate.

    start: number of steps that were done before, in an earlier run. `steps` begins after these.
    steps: for each step, a list of at least one micro-batch of this rank, and the declared count:
        what loss_fn counts in the micro-batches of all ranks together. All ranks need the same
        number of steps; their numbers of micro-batches may differ, unless the model communicates
        in its forward pass, as SyncBatchNorm does. A rank without data in a step
        passes any micro-batch and declares 0. Its micro-batches then have the weight 0: they are
        computed, but have no influence on gradients, losses and counts, and the other ranks do not
        include them in the declared count. Their loss and its gradient must be finite, because
        0 * NaN is NaN. (BatchNorm statistics do change. A parameter that only such micro-batches
        use gets the gradient 0 instead of None.)
    loss_fn: see above. With class weights, the sum of the weights can take the place of the count.
    lr_at: lr_at(step), with step = number of finished steps (`start` in the first step), returns a
        factor. The learning rate of each parameter group is set to this factor times the group's
        "initial_lr", which is set to the group's "lr" if it does not exist. With None, learning
        rates are not changed, so a scheduler from torch.optim.lr_scheduler can set them. To resume
        such a run, make the scheduler, load its state, and then set the "lr" of each group to its
        value in get_last_lr(): making a scheduler changes "lr", and loading its state does not
        restore it. (OneCycleLR and CyclicLR change "momentum" or "betas" in the same way.)
    clip: maximum for the mean gradient's L2 norm, over the parameters of all optimizers together.
    dtype: torch.autocast uses this dtype, unless it is float32. float16 also needs `scaler`.
    scaler: the caller saves and restores its state.
    seed: for each step, torch's random generators are seeded with a hash of (seed, step, rank). So
        a resumed run draws the same numbers, for example for dropout, as a run that was not
        interrupted. Between two steps the generators of the CPU and of the model's GPU are as
        train_ found them. So what a caller draws there, such as a DataLoader with shuffle=True,
        does not follow from `seed`, and is the same on all ranks if they began with the same
        torch.manual_seed.
    stop: is called once per step on each rank. If it returns true on any rank, report.stop is true
        on all.
    patience: if the loss or the gradient norm is not finite, a step changes no weight and no
        optimizer state on any rank, and training continues. (Buffers such as BatchNorm statistics
        do change.) The patience-th such step in a row raises Diverged and yields no Report (on CUDA
        later, see below). With float16, an overflow that GradScaler finds is such a step too.
    sync_each: False: only the backward pass of the last micro-batch synchronises gradients; the
        others use model.no_sync(), which DistributedDataParallel has. True: each backward pass
        synchronises, as FSDP2 needs it, and train_ does not check that the model is wrapped. All
        ranks then need the same number of micro-batches per step. To get it, add dummy
        micro-batches that loss_fn recognises. For these, loss_fn must return 0 * (the loss sum) and
        the count 0. It must run the model on them too, because both passes communicate. See
        pad_steps in extras/fsdp.py.

    ValueError: there are several ranks, sync_each is False, and the model has no method no_sync.
    ValueError: the declared count of a step is not what loss_fn counted. The gradients of this step
        were scaled wrongly, and this update has been made (on CUDA also that of the next step):
        discard the model. A rank that declared 0 does not raise.
    ValueError: the list of micro-batches of a step is empty. It is raised on that rank only.
    RuntimeError, from torch: the last micro-batch of a step did not use all parameters, and
        find_unused_parameters=True was not given to DistributedDataParallel, so that gradients are
        not the mean over the ranks. It is raised before the update, on the ranks where this
        happened.
    If only some ranks raise, the others wait for them in a collective until it times out. So a rank
    that raised should end.

    On CUDA the host does not wait for the step that it has just queued. It reads the flags of the
    step before: its count, the requests to stop, and the number of bad steps in a row. So
    report.stop is true one step later than on a CPU, and Diverged and the ValueError for the count
    are raised one step later, after the Report of the step that was wrong. Errors of the last step
    are raised when `steps` ends: a caller that leaves the loop with break never gets them. A
    request to stop in the last step is not reported.
    With an optimizer that is not fused, or whose state is empty (SGD without momentum), the host
    does wait for the device in each step, to decide whether to skip the update. The flags are still
    read one step later.
    """
    device = next(model.parameters()).device
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    no_sync = nullcontext if sync_each or world_size == 1 else getattr(model, "no_sync", None)
    if no_sync is None:
        raise ValueError(
            f"{world_size} ranks would train different models: wrap the model in "
            "DistributedDataParallel, for example with replicate in ddp_setup.py"
        )
    scaler = scaler or torch.amp.GradScaler(device.type, enabled=False)
    skipped = in_a_row = torch.zeros((), device=device)
    # Functions that read the flags of a step, oldest first. Each step appends its own and calls the
    # oldest. On CUDA the list starts with a function that returns False, so the oldest is that of
    # the step before. Elsewhere it is the step's own.
    unread: list[Callable[[], bool]] = [lambda: False] * _read_delay(device)
    model.train()
    for step, (batches, total) in enumerate(steps, start):
        if lr_at is not None:
            for group in chain.from_iterable(optimizer.param_groups for optimizer in optimizers):
                # A number of numpy could not be saved: torch.load(weights_only=True) refuses it.
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * float(lr_at(step))
        weight = world_size / total if total else 0.0
        # Restore the generators afterwards: a caller may shuffle data with them between two steps.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            _seed(device, seed, step, rank)
            # (loss sum, count, number of ranks that asked to stop)
            sums = _backward_(model, batches, weight, loss_fn, dtype, scaler, stop(), no_sync)
            loss = sums[0] / sums[1]
            norm, finite = _update_(optimizers, scaler, clip, loss)
        skipped = skipped + ~finite
        in_a_row = (in_a_row + 1) * ~finite
        read = to_host(torch.stack([*sums[1:], in_a_row]))
        unread.append(partial(_read_flags, read, step + 1, total, patience))
        stopping = unread.pop(0)()
        yield step + 1, Report(loss, norm, sums[1], skipped, stopping)
    for read_flags in unread:
        read_flags()


def _read_flags(read: Reader, step: int, declared: float, patience: int) -> bool:
    """Return whether a rank asked to stop in this step, or raise the errors of train_."""
    counted, stopping, bad = read()
    # A rank that declares 0 does not know the count. float32 sums on MPS need the tolerance.
    if declared and abs(counted - declared) > 1e-6 * declared:
        raise ValueError(
            f"step {step}: the declared count is {declared:g}, but loss_fn counted {counted:g}"
        )
    if bad >= patience:
        advice = "try a lower learning rate" if counted else "loss_fn counted nothing there"
        raise Diverged(
            f"loss or gradient not finite {patience} times in a row, up to step {step}; {advice}"
        )
    return stopping > 0


def _read_delay(device: torch.device) -> int:
    """Return how many steps late the host reads the flags of a step: 1 on CUDA, otherwise 0."""
    return int(device.type == "cuda")


def _seed(device: torch.device, *numbers: int) -> None:
    """Seed torch's generators with a hash of `numbers`; for a CPU, only that of the CPU."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8)
    seed = int.from_bytes(digest.digest(), "little")
    # torch.manual_seed seeds the generators of all devices, which takes 0.2 ms on a CPU.
    (torch.default_generator if device.type == "cpu" else torch).manual_seed(seed)


def _backward_(
    model: nn.Module,
    batches: list[Any],
    weight: float,
    loss_fn: LossFn,
    dtype: torch.dtype,
    scaler: torch.amp.GradScaler,
    stop: bool,
    no_sync: Callable[[], AbstractContextManager[Any]],
) -> Tensor:
    """Back-propagate weight * (loss sum) of each micro-batch.

    Returns a tensor (3,), summed over all ranks: loss sum and count, both without micro-batches of
    weight 0, and number of ranks that asked to stop.
    """
    device = next(model.parameters()).device
    if not batches:
        raise ValueError(
            "a step has no micro-batch on this rank: pass any micro-batch, with the count 0"
        )
    sums = torch.zeros(3, dtype=accumulator_dtype(device), device=device)
    # `sums[2] = stop` would copy a number from the host, which waits for a CUDA device.
    sums[2].fill_(stop)
    for i, batch in enumerate(batches, 1):
        last = i == len(batches)
        with nullcontext() if last else no_sync():
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                loss_sum, count = loss_fn(model, to_device(batch, device))
            if weight:
                sums[0] += loss_sum.detach()
                sums[1] += count
            if last:  # start now, so that the sums are sent while the backward pass computes
                wait = _sum_over_ranks_(sums)
            scaler.scale(loss_sum * weight).backward()
    wait()
    # This method of DistributedDataParallel raises RuntimeError if some gradients were not
    # synchronised. torch calls it only in the next forward pass, after the update. A model without
    # this method is not checked: bool() does nothing.
    getattr(model, "_check_reducer_finalized", bool)()
    return sums


def _update_(
    optimizers: Sequence[Optimizer], scaler: torch.amp.GradScaler, clip: float, loss: Tensor
) -> tuple[Tensor, Tensor]:
    """Unscale and clip the gradients; if they and the loss are finite, let each optimizer do its
    step; delete the gradients.

    Returns two scalars: the gradients' L2 norm before clipping, and whether norm and loss are
    finite (bool).
    """
    parameters = [
        p for o in optimizers for g in o.param_groups for p in g["params"] if p.grad is not None
    ]
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    norm = get_total_norm([p.grad for p in parameters])
    if hasattr(norm, "full_tensor"):  # FSDP's gradients are DTensors: add up the parts of all ranks
        norm = norm.full_tensor()
    finite = norm.isfinite() & loss.isfinite()
    if clip < math.inf:
        clip_grads_with_norm_(parameters, clip, norm)
    for optimizer in optimizers:
        # An optimizer that is fused reads its attribute found_inf on the device and skips the
        # update itself, so the host need not wait. While optimizer.state is empty, as in the first
        # step, the host waits and decides: if torch's fused SGD skipped its first step, it would
        # keep a momentum buffer that was never written.
        fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        if finite.is_cuda and optimizer.state and fused:
            setattr(optimizer, "found_inf", (~finite).float())
            optimizer.step()
            # Otherwise optimizer.step() would skip for other callers too.
            delattr(optimizer, "found_inf")
        elif finite:  # on CUDA, this waits for the device
            optimizer.step()
    scaler.update()
    for optimizer in optimizers:
        optimizer.zero_grad()
    return norm, finite


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFn,
    dtype: torch.dtype = torch.float32,
    stop: Callable[[], bool] = lambda: False,
) -> float | None:
    """Compute the exact mean loss over the batches of all ranks; return it on every rank.

    All ranks must call it. Their numbers of batches may differ, and may be 0. (With FSDP2 they must
    be equal: add batches for which the loss function returns 0 and 0, as pad_batches in
    extras/fsdp.py does.) Returns NaN if the loss function counted nothing.
    stop: is called once per round. A round is one batch on each rank that still has one, so `stop`
        is also called in rounds without a batch on this rank. If it returns true on any rank, all
        ranks return None. On CUDA they notice one round later.
    For other metrics, loss_fn can add its numbers to a tensor of the caller. After evaluate, sum
    this tensor over the ranks with dist.all_reduce.

    The model is in evaluation mode during the call. Afterwards each submodule is in the mode that
    it had before, also if an exception is raised. With DistributedDataParallel, all ranks first get
    the buffers of rank 0, such as BatchNorm statistics, unless broadcast_buffers is False.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        # DDP's forward pass may send buffers, such as BatchNorm statistics, from rank 0 to the
        # other ranks. It would hang if the ranks have different numbers of batches. So send here.
        model._assign_modules_buffers()  # updates the list modules_buffers
        if model.broadcast_buffers and model.modules_buffers:
            model._sync_buffers()
        model = model.module
    device = next(model.parameters()).device
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    sums = torch.zeros(2, dtype=accumulator_dtype(device), device=device)
    no_batch = object()
    # As in train_. On CUDA the list starts with flags that mean: a rank has a batch, none stops.
    unread = [lambda: [1.0, 0.0]] * _read_delay(device)
    try:
        for batch in chain(batches, repeat(no_batch)):
            # [number of ranks that have a batch, number of ranks that ask to stop, 0, 0]. The zeros
            # make the size different from that of train_ (3) and group_batches (2). So if some
            # ranks evaluate while others train, gloo raises an error instead of adding up numbers
            # of different meaning. NCCL does not compare the sizes.
            flags = sums.new_zeros(4)
            flags[0].fill_(batch is not no_batch)
            flags[1].fill_(stop())
            wait = _sum_over_ranks_(flags)
            if batch is not no_batch:
                with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                    loss_sum, count = loss_fn(model, to_device(batch, device))
                sums[0] += loss_sum
                sums[1] += count
            wait()
            unread.append(to_host(flags))
            busy, stopping, *_ = unread.pop(0)()
            if stopping or not busy:
                break
        _sum_over_ranks_(sums)()
    finally:
        for module, training in modes:
            module.training = training
    return None if stopping else float(sums[0] / sums[1])


def group_batches(
    batches: Iterable[Any], accum: int, count: Callable[[Any], float]
) -> Iterator[tuple[list[Any], float]]:
    """Group this rank's batches, for example from a DataLoader, into the steps that train_ takes.

    All ranks must iterate over the result together: each step needs one all-reduce of two numbers.
    accum: number of micro-batches per step; the last step of a rank may have fewer.
    count: count(batch) must return the count that the loss function will return for this batch.

    The steps end when no rank has a batch left. A rank that runs out of batches earlier repeats, in
    each remaining step, the first micro-batch of its last own step, and declares 0 (see train_).
    ValueError if accum is below 1, and on a rank that never had a batch if another rank has one. A
    step in which all ranks together count 0 is left out.

    Batches are read one step ahead, so the position of a loader is not the number of finished
    steps. On CUDA the all-reduce for step s + 1 is queued before the forward and backward passes of
    step s, so the host can read its result without waiting for these passes.
    """

    def own_steps() -> Iterator[tuple[list[Any], Reader]]:
        remaining = iter(batches)
        while True:
            micro_batches = list(islice(remaining, accum))
            numbers = [sum(map(count, micro_batches)), len(micro_batches)]
            sums = torch.tensor(numbers, dtype=torch.float64)
            if dist.is_initialized() and dist.get_backend() == "nccl":
                sums = to_device(sums, torch.device("cuda"))  # NCCL takes only CUDA tensors
            _sum_over_ranks_(sums)()
            yield micro_batches, to_host(sums)

    if accum < 1:
        raise ValueError(f"accum is {accum}; must be at least 1")
    spare: list[Any] = []
    # own_steps never ends. pairwise reads the batches of step s + 1 before it yields step s.
    for (micro_batches, read), _ in pairwise(own_steps()):
        total, batches_in_step = read()
        if not batches_in_step:
            return
        spare = micro_batches[:1] or spare
        if not spare:
            raise ValueError("this rank has no batch; use fewer ranks or smaller batches")
        if total and micro_batches:
            yield micro_batches, total
        elif total:
            yield spare, 0


def _sum_over_ranks_(values: Tensor) -> Callable[[], object]:
    """Start to replace `values` by their sum over all ranks; return a function that waits for it.

    On CUDA that function makes only the current stream wait, not the host.
    """
    work = dist.all_reduce(values, async_op=True) if dist.is_initialized() else None
    return work.wait if work else lambda: None


def accumulator_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for sums over batches: float64, but float32 on MPS, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def to_host(values: Tensor) -> Reader:
    """Start to copy a tensor (N,) to the host; return a function that waits and returns a list.

    The copy starts at once only on CUDA. On other devices the copy is made by the function.
    """
    if not values.is_cuda:
        return values.tolist
    host = values.to("cpu", non_blocking=True)  # torch puts this result into pinned memory
    # The stream is that of the tensor's device, which need not be the current device.
    arrived = torch.cuda.current_stream(values.device).record_event()

    def read() -> list[float]:
        arrived.synchronize()
        return host.tolist()

    return read


def to_device(batch: Any, device: torch.device) -> Any:
    """Move the tensors in a batch to `device` and return a batch with the same structure.

    A batch is a tensor, or a tuple, NamedTuple, list or dict of batches. Other values stay as they
    are. Copies to CUDA go through pinned memory, so that the host does not wait for the device.
    """

    def move(tensor: Tensor) -> Tensor:
        if device.type == "cuda" and tensor.device.type == "cpu":
            # Without contiguous(), to() would first copy a tensor that is not contiguous into
            # memory that is not pinned, and the host would wait.
            tensor = tensor.contiguous().pin_memory()
        # On MPS, a non-blocking copy can read a source that was already freed (PyTorch issue
        # 189690).
        return tensor.to(device, non_blocking=device.type == "cuda")

    return tree_map_only(Tensor, move, batch)


def linear(step: int, total: int, warmup_steps: int = 0, floor: float = 0.0) -> float:
    """Return a factor for the learning rate in step 0, 1, ...: linear warm-up, then linear decay.

    The warm-up is 1 / warmup_steps, 2 / warmup_steps, ..., 1. The decay would reach `floor` at
    step `total`, one after the last. For other schedules write such a function, or use
    torch.optim.lr_scheduler.
    """
    warmup = min(1.0, (step + 1) / max(1, warmup_steps))
    done = min(1.0, max(0, step - warmup_steps) / max(1, total - warmup_steps))
    return warmup * (floor + (1 - floor) * (1 - done))
