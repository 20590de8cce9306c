"""A cross-entropy for large vocabularies: the logits are computed in parts and never all exist.

    model = gpt.build(config, seed=0)
    model.cross_entropy = partial(cross_entropy, gpt.cross_entropy)

This needs less memory, and is faster on a CPU if the logits do not fit into its caches. Any model
can use it that has the input and the weight of its output layer at hand. Needs torch.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Function = Callable[[Tensor, Tensor, Tensor], Tensor]


def cross_entropy(
    at_once: Function, x: Tensor, weight: Tensor, targets: Tensor, max_logits: int | None = None
) -> Tensor:
    """Compute at_once(x, weight, targets) for some of the N rows at a time, and return the sum.

    at_once: returns the sum of the cross-entropies of the rows of x @ weight.T, a float32 scalar,
        as cross_entropy of gpt.py does.
    x: (N, C). weight: (V, C). targets: (N,) int64.
    max_logits: number of logits that are computed at a time. If N * V is more, the rows are
        processed in parts: see CrossEntropyInParts. The memory is three to four times that of these
        logits in float32, because the softmax and the gradients have the same size. By default
        2**28 on CUDA, that is 1 GiB, and 2**25 on other devices.

    If the logits are float16, those of a part are computed again in the backward pass, because its
    gradients need the loss that a GradScaler has scaled.
    """
    # 2**28 logits are 5,000 rows with V = 50,000, enough to keep a GPU busy. On a CPU, parts of
    # 128 MiB were the fastest (V = 50,304, C = 128 and 384).
    rows = max(1, (max_logits or 1 << (28 if x.is_cuda else 25)) // len(weight))
    caching: Any = nullcontext()
    if len(x) > rows and torch.is_grad_enabled():
        if (x[:0] @ weight.T).dtype != torch.float16:  # the dtype of the logits, with autocast too
            return CrossEntropyInParts.apply(at_once, x, weight, targets, rows)  # type: ignore
        at_once = partial(checkpoint, at_once, use_reentrant=False, preserve_rng_state=False)
        # Without its cache, autocast makes a float16 copy of `weight` for each part. So the
        # gradients of the parts are added up in the dtype of `weight`, and not in float16.
        kind = x.device.type
        on, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        caching = torch.autocast(kind, dtype, on, cache_enabled=False)
    parts = zip(x.split(rows), targets.split(rows))
    with caching:
        return torch.stack([at_once(part, weight, y) for part, y in parts]).sum()


class CrossEntropyInParts(torch.autograd.Function):
    """Compute cross_entropy for `rows` rows of x at a time.

    The forward pass also computes the gradients of each part, while the logits of the part are in
    memory. The backward pass only scales them. Second derivatives raise an error. The gradient of
    `weight` is added up in float32 or wider. (F.linear_cross_entropy of torch 2.13 saves memory
    too, but adds up a bfloat16 loss in bfloat16.)

    It is not for float16, because the gradients are computed before a GradScaler scales the loss:
    values below 3e-8 would become 0. bfloat16 and float32 have a far larger range.
    """

    @staticmethod
    def forward(
        ctx: Any, at_once: Function, x: Tensor, weight: Tensor, targets: Tensor, rows: int
    ) -> Tensor:
        gradients_and_loss = torch.func.grad_and_value(at_once, argnums=(0, 1))
        loss, x_grads = torch.zeros((), dtype=torch.float32, device=x.device), []
        wide = torch.promote_types(weight.dtype, torch.float32)
        weight_grad = torch.zeros_like(weight, dtype=wide)
        for part, y in zip(x.split(rows), targets.split(rows)):
            (x_grad, part_grad), value = gradients_and_loss(part, weight, y)
            x_grads.append(x_grad)
            weight_grad += part_grad
            del part_grad  # It is as large as the weight, and would stay during the next part.
            # Not in place: torch.compile of torch 2.11 would then compute wrong gradients.
            loss = loss + value
        ctx.save_for_backward(torch.cat(x_grads), weight_grad)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():  # with create_graph=True
            raise RuntimeError("cross_entropy in parts has no second derivatives")
        x_grad, weight_grad = ctx.saved_tensors
        # PyTorch would round a scalar to the dtype of x_grad. With the shape (1,), the product is
        # computed in float32.
        factor = grad[None]
        return None, x_grad * factor, weight_grad * factor, None, None
