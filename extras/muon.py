"""Train matrices with Muon (Jordan et al., 2024), as torch.optim.Muon does, but many at a time.

    muon = Muon(matrices, lr=0.02, adjust_lr_fn="match_rms_adamw")
    rest = torch.optim.AdamW(embeddings_and_vectors, lr=0.02, fused=True)

Newton-Schulz iterations orthogonalise the momentum x of a gradient:

    x -> (a I + b A + c A A) x,  where A = x x^T is the Gram matrix of x

Matrices of the same shape form a batch. The results differ from torch.optim.Muon only by rounding.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Coefficients = Sequence[float]  # (a, b, c)


class Muon(torch.optim.Muon):
    """Updates matrices as torch.optim.Muon does. Both have the same arguments and state_dict.

    dtype: of the iterations. With float32, runs on different numbers of ranks differ less.
    distribute: If true, each rank of the default process group orthogonalises its part of each
        batch. The gradients must be equal on all ranks, as under DistributedDataParallel.

    Parameters can be DTensors, as under FSDP2. Each rank then gathers all updates in `dtype`. With
    `distribute` or DTensors, all ranks must call step together.

    If the attribute `found_inf`, a scalar tensor, is not 0, step changes nothing. loop.py and
    torch.amp.GradScaler set it. To copy the optimizer, build a new one and load the state_dict.
    """

    def __init__(
        self,
        *args: Any,
        dtype: torch.dtype = torch.bfloat16,
        distribute: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(*args, **settings)
        # load_state_dict would replace settings in the parameter groups.
        self.dtype, self.distribute = dtype, distribute
        # Private. GradScaler and loop.py give found_inf and grad_scale to step only if this is set.
        # Without it, the host would wait for the device in each step.
        self._step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update each parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if any(p.is_complex() or p.grad.is_sparse or p.ndim != 2 for p in found):
            raise RuntimeError("Muon needs dense, real matrices and gradients")
        grad_scale, found_inf = (getattr(self, name, None) for name in ("grad_scale", "found_inf"))
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)
            buffers = [local(self.state[p]["momentum_buffer"]) for p in params]
            grads = [local(p.grad) for p in params]
            if grad_scale is not None:
                grads = [grad / grad_scale for grad in grads]
            if found_inf is not None:
                # The mean of the buffer and itself is the buffer.
                grads = [torch.where(found_inf > 0, b, g) for b, g in zip(buffers, grads)]
            if params:
                updates = momentum_(buffers, grads, group["momentum"], group["nesterov"])
                descend_(params, updates, group, self.dtype, self.distribute, found_inf)
        return loss


def momentum_(
    buffers: list[Tensor], grads: list[Tensor], momentum: float, nesterov: bool
) -> Sequence[Tensor]:
    """Update the momentum buffers, and return what is to be orthogonalised."""
    torch._foreach_lerp_(buffers, grads, 1 - momentum)
    return torch._foreach_lerp(grads, buffers, momentum) if nesterov else buffers


def descend_(
    params: list[Tensor],
    updates: Sequence[Tensor],
    settings: dict[str, Any],
    dtype: torch.dtype,
    distribute: bool,
    found_inf: Tensor | None,
) -> None:
    """Multiply params by 1 - lr * weight_decay and subtract the orthogonalised updates.

    updates: of DTensors, the local parts. settings: a parameter group.
    """
    lr = float(settings["lr"])
    orthogonalize = partial(
        newton_schulz,
        coefficients=settings["ns_coefficients"],
        steps=settings["ns_steps"],
        eps=settings["eps"],
    )
    several = distribute and dist.is_initialized() and dist.get_world_size() > 1
    shapes: dict[torch.Size, list[int]] = {}
    for i, p in enumerate(params):
        shapes.setdefault(p.shape, []).append(i)
    results: list[tuple[Tensor, Callable[[], object]]] = []
    for indices in shapes.values():
        batch = torch.stack([updates[i].to(dtype) for i in indices])
        batch = gather(batch, params[indices[0]])
        if several:  # sends results during the computation of the next shape
            results.append(on_all_ranks(orthogonalize, batch))
        else:
            results.append((orthogonalize(batch), lambda: None))

    # torch rounds other factors to the dtype of the parameters: on a CPU a number, on CUDA a tensor
    # of the device. (So with found_inf, bfloat16 parameters on CUDA get a rounded factor.)
    wide = torch.promote_types(params[0].dtype, torch.float32)
    decay = torch.tensor(1 - lr * settings["weight_decay"], dtype=wide, device="cpu")
    if found_inf is not None:
        decay = torch.where(found_inf > 0, 1.0, decay)
    torch._foreach_mul_([local(p) for p in params], decay)
    for (shape, indices), (batch, wait) in zip(shapes.items(), results):
        wait()
        batch = scatter(batch, params[indices[0]]).to(params[indices[0]].dtype)
        if found_inf is not None:
            batch = batch * (found_inf == 0)
        factor = lr * lr_factor(shape, settings["adjust_lr_fn"])
        torch._foreach_add_([local(params[i]) for i in indices], batch.unbind(), alpha=-factor)


def lr_factor(shape: Sequence[int], adjust_lr_fn: str | None) -> float:
    """Return the factor of the learning rate for a matrix of this shape.

    "match_rms_adamw" gives updates AdamW's usual root mean square, 0.2 (Liu et al., 2025). None
    means "original" (Jordan et al.).
    """
    rows, columns = shape
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def newton_schulz(x: Tensor, coefficients: Coefficients, steps: int, eps: float) -> Tensor:
    """Orthogonalise the matrices of a batch x (N, rows, columns) with `steps` iterations."""
    a, b, c = coefficients
    rows, columns = x.shape[1:]
    tall = rows > columns
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    x = x / norm.clamp(min=eps)
    # With sides n < m, three iterations need 6 n^2 m + 3 n^3 multiplications on x, but 9 n^3 +
    # 2 n^2 m on its Gram matrix. With five in a row, rounding errors let a training diverge.
    at_once = 3 if max(rows, columns) > 1.5 * min(rows, columns) else 1
    for done in range(0, steps, at_once):
        gram = x.mT @ x if tall else x @ x.mT
        if at_once > 1:
            product = gram_iterations(gram, coefficients, min(at_once, steps - done))
            x = x @ product if tall else product @ x
        else:
            z = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.baddbmm(x, x, z, beta=a) if tall else torch.baddbmm(x, z, x, beta=a)
    return x


def gram_iterations(gram: Tensor, coefficients: Coefficients, steps: int) -> Tensor:
    """Return Q (N, n, n), such that Q x is the result of these iterations on x (N, n, m).

    gram: A = x x^T, (N, n, n). With P = a I + b A + c A A, an iteration replaces x by P x, so A by
    P P A and Q by P Q.
    """
    a, b, c = coefficients
    z = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # P without a I
    q = z.clone()
    q.diagonal(dim1=1, dim2=2).add_(a)
    for _ in range(1, steps):
        gram = torch.baddbmm(gram, z, gram, beta=a)
        gram = torch.baddbmm(gram, z, gram, beta=a)
        z = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        q = torch.baddbmm(q, z, q, beta=a)
    return q


def on_all_ranks(
    compute: Callable[[Tensor], Tensor], batch: Tensor
) -> tuple[Tensor, Callable[[], object]]:
    """Compute this rank's part of a batch that is equal on all ranks, and start to gather.

    Returns the whole result, and a function that waits for it.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    share = -(-len(batch) // size)
    mine = batch[rank * share :][:share]
    parts = batch.new_zeros(size, share, *batch.shape[1:])
    parts[rank, : len(mine)] = compute(mine)
    work = dist.all_gather([*parts], parts[rank], async_op=True)
    return parts.flatten(0, 1)[: len(batch)], work.wait


def local(tensor: Any) -> Tensor:
    """Return this rank's part of a DTensor, without a copy, or any other tensor itself."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def gather(batch: Tensor, like: Any) -> Tensor:
    """Return the whole matrices from a batch of their local parts. `like`: one of them."""
    if not hasattr(like, "to_local"):
        return batch
    from torch.distributed.tensor import DTensor

    shape = (len(batch), *like.shape)
    stride = torch.empty(shape, device="meta").stride()
    whole = DTensor.from_local(
        batch, like.device_mesh, batched(like), shape=torch.Size(shape), stride=stride
    )
    return whole.full_tensor()


def scatter(batch: Tensor, like: Any) -> Tensor:
    """Return this rank's parts of a batch of whole matrices."""
    if not hasattr(like, "to_local"):
        return batch
    from torch.distributed.tensor import distribute_tensor

    # None: all ranks have the whole batch, so nothing is sent.
    divided = distribute_tensor(batch, like.device_mesh, batched(like), src_data_rank=None)
    return local(divided)


def batched(like: Any) -> list[Any]:
    """Return the placements of `like`, for a tensor with one more dimension at the front."""
    return [type(p)(p.dim + 1) if p.is_shard() else p for p in like.placements]
