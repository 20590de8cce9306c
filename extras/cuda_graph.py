"""Run the forward and backward pass of a small model as CUDA graphs.

    model = model.to("cuda")  # model(tokens, targets) returns a loss
    tokens, targets = torch.zeros(2, B, T, dtype=torch.int64, device="cuda")
    graph_(model, (tokens, targets), torch.bfloat16)
    replica = nn.parallel.DistributedDataParallel(model)

The kernels of a small model end before the host has started the next ones, so the GPU waits. With a
CUDA graph, the host starts all kernels with a single call. The docstring of graph_ has the limits.
"""

from typing import Any

import torch
from torch import Tensor, nn


def graph_(
    model: nn.Module, examples: tuple[Tensor, ...], dtype: torch.dtype = torch.float32
) -> None:
    """Record model(*examples) and its backward pass as CUDA graphs, which model.forward replays.

    Call this before DistributedDataParallel wraps the model. DDP then sends gradients only at the
    end of the backward pass.

    model: on the current CUDA device and in training mode. It must return a tensor or nested tuples
        of tensors, and use all parameters. It must not wait for the device or recompute
        activations. Delete the losses of earlier forward passes, because recording can fail while
        they exist. Recording changes BatchNorm statistics.
    examples: inputs on the same device. Do not use them afterwards.
    dtype: the dtype of torch.autocast for the recorded forward pass. float32 switches it off.

    A call of the model replays the graphs if the model is in training mode, gradients are enabled,
    the inputs are positional and have the shapes and dtypes of `examples`, and each p.grad is None.
    So only the first micro-batch of a step replays graphs. All other calls run without graphs, so
    call the model under torch.autocast as if there were no graphs.

    After a replay, run the backward pass before the next call, which overwrites the output. The
    backward pass of the next replay overwrites the gradients. If you keep one of them longer, keep
    a clone.

    Afterwards, parameters may change only in place, and requires_grad must not change. In a replay,
    hooks, train() and eval() of inner modules have no effect. The model cannot be copied or
    pickled: save its state_dict(). The memory that the passes need stays in use.
    """
    # The training uses another stream than the recording. torch synchronises them, but warns.
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    eager, parameters = model.forward, list(model.parameters())

    def with_autocast(*inputs: Any) -> Any:
        # torch cannot record with the cache of autocast.
        with torch.autocast("cuda", dtype, dtype != torch.float32, cache_enabled=False):
            return eager(*inputs)

    def shapes_and_dtypes(inputs: tuple[Any, ...]) -> list[Any]:
        return [isinstance(x, Tensor) and (x.shape, x.dtype) for x in inputs]

    recorded = shapes_and_dtypes(examples)
    model.forward = with_autocast
    torch.cuda.make_graphed_callables(model, examples)  # replaces model.forward
    replay = model.forward

    def forward(*inputs: Any, **options: Any) -> Any:
        fits = shapes_and_dtypes(inputs) == recorded and not options
        no_gradient = all(p.grad is None for p in parameters)  # A replay overwrites gradients.
        if fits and no_gradient and model.training and torch.is_grad_enabled():
            return replay(*inputs)
        return eager(*inputs, **options)

    model.forward = forward
