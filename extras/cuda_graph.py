"""Run the forward and backward pass of a small model as CUDA graphs.

    model = model.to("cuda")
    graph_(model, (x, y), torch.bfloat16)
    replica = nn.parallel.DistributedDataParallel(model)

The host needs about 10 microseconds to start a kernel, and many kernels of a small model take less.
So the GPU waits for the host. A CUDA graph is a recorded sequence of kernels, which the host starts
with a single call.

Needs torch.
"""

from typing import Any

import torch
from torch import Tensor, nn


def graph_small_(
    model: nn.Module, examples: tuple[Tensor, ...], activations: int, dtype: torch.dtype
) -> bool:
    """Call graph_ if the model is small, and return whether it was called.

    activations: number of elements of the residual stream after all layers, and of the logits. In
        float32, a GPT needs about 80 bytes for each. The model is small if that is less than a
        tenth of the GPU's memory. The kernels of larger models take longer than the host needs to
        start them.
    """
    memory = torch.cuda.get_device_properties(examples[0].device).total_memory
    small = 80 * activations < memory / 10
    if small:
        graph_(model, examples, dtype)
    return small


def graph_(
    model: nn.Module, examples: tuple[Tensor, ...], dtype: torch.dtype = torch.float32
) -> None:
    """Record model(*examples) and its backward pass as CUDA graphs, which model.forward replays.

    Call this before DistributedDataParallel wraps the model. DDP then gets all gradients at the end
    of the backward pass, so it cannot send them during this pass.

    model: on the current CUDA device and in training mode. It returns a tensor or nested tuples of
        tensors, which depend on all parameters. No result of an earlier forward pass may exist.
        The model must not wait for the device, read the values of tensors, or recompute activations
        (torch.utils.checkpoint). It runs a few times here, which changes BatchNorm statistics.
    examples: inputs on the same device. Their values do not matter. Do not use them afterwards.
    dtype: of torch.autocast in the forward pass, without its cache. float32 switches autocast off.

    A call replays the graphs if it is in training mode, its inputs have the shapes and dtypes of
    `examples`, and no parameter has a gradient. So all but the first micro-batch of a step run
    without graphs. Each call must be followed by its backward pass before the next call, which
    overwrites the outputs and the gradients of this one: clone what you keep.

    Afterwards, parameters may change only in place, requires_grad must not change, and hooks and
    modes of inner modules have no effect. The model cannot be copied or pickled: save its
    state_dict(). The memory that the passes need stays in use. The warning of torch about the
    stream of AccumulateGrad is switched off in the whole process.
    """
    if hasattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch"):
        # Gradients are added up on the stream of the recording, while the training uses another
        # stream. torch synchronises the two.
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    eager, parameters = model.forward, list(model.parameters())

    def with_autocast(*inputs: Any) -> Any:
        enabled = dtype != torch.float32
        with torch.autocast("cuda", dtype, enabled, cache_enabled=False):
            return eager(*inputs)

    def kinds(inputs: tuple[Any, ...]) -> list[Any]:
        return [isinstance(x, Tensor) and (x.shape, x.dtype) for x in inputs]

    recorded = kinds(examples)
    model.forward = with_autocast
    torch.cuda.make_graphed_callables(model, examples)
    replay = model.forward

    def forward(*inputs: Any, **options: Any) -> Any:
        fits = kinds(inputs) == recorded and not options
        first = all(p.grad is None for p in parameters)
        if fits and first and model.training and torch.is_grad_enabled():
            return replay(*inputs)
        return eager(*inputs, **options)

    model.forward = forward
