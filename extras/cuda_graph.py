"""Run the forward and backward pass of a small model as CUDA graphs.

    model = model.to("cuda")
    graph_(model, (x, y), torch.bfloat16)
    replica = nn.parallel.DistributedDataParallel(model)

For each kernel, the host needs about 10 microseconds, and most kernels of a small model take less.
So the GPU waits for the host. A CUDA graph is a recorded sequence of kernels, which the host starts
with a single call. They are the same kernels, so the results are the same.

Needs torch.
"""

from typing import Any

import torch
from torch import Tensor, nn

# About 20 ms on an H100. With more, the kernels of a step take longer than the host.
MAX_FLOPS = 1e13


def graph_small_(
    model: nn.Module, examples: tuple[Tensor, ...], flops: float, dtype: torch.dtype
) -> None:
    """Call graph_ if its forward and backward pass have so few FLOP that it makes them faster."""
    if flops < MAX_FLOPS:
        graph_(model, examples, dtype)


def graph_(
    model: nn.Module, examples: tuple[Tensor, ...], dtype: torch.dtype = torch.float32
) -> None:
    """Record model(*examples) and its backward pass; in training, model.forward replays them.

    Call this before DistributedDataParallel wraps the model, which then gets all gradients at the
    end of the backward pass. The memory for the activations stays in use.

    model: on a CUDA device and in training mode. It returns only tensors. It must not wait for the
        device, read the values of tensors, or recompute activations (torch.utils.checkpoint).
        Later, its parameters may change only in place, and it cannot be pickled: save its
        state_dict().
    examples: inputs on the same device, whose values do not matter. Do not use them afterwards.
    dtype: of torch.autocast. float32 switches autocast off.

    Inputs of other shapes, evaluation, calls with keyword arguments, and all but the first
    micro-batch of a step run without graphs.
    """
    if hasattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch"):
        # The recorded passes belong to another stream than the replayed ones. That is intended.
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    eager, shapes = model.forward, [x.shape for x in examples]
    with torch.autocast("cuda", dtype, dtype != torch.float32, cache_enabled=False):
        torch.cuda.make_graphed_callables(model, examples)
    replay = model.forward

    def forward(*inputs: Any, **options: Any) -> Any:
        if options or not (model.training and torch.is_grad_enabled()):
            return eager(*inputs, **options)
        # A replay writes all gradients to the same places, so it would overwrite earlier ones.
        if any(p.grad is not None for p in model.parameters()):
            return eager(*inputs)
        return (replay if [x.shape for x in inputs] == shapes else eager)(*inputs)

    model.forward = forward
