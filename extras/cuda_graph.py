"""Run the forward and backward pass of a small model as CUDA graphs.

    model = model.to("cuda")
    examples = torch.zeros(2, B, T, dtype=torch.int64, device="cuda")
    graph_(model, (*examples,), torch.bfloat16)
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

    activations: B * T * (layers * C + V), for B sequences of T tokens, width C, and V logits for
        each token. In float32, a GPT of gpt.py needs about 80 bytes for each of these numbers. If
        that is more than a tenth of the GPU's memory, the model is not small: its kernels take
        longer than the host needs to start them, and the graphs would keep too much memory.
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
        tensors, which depend on all parameters. Delete the losses of earlier forward passes: they
        keep nodes of the autograd graph alive. The model must not wait for the device, read the
        values of tensors, or recompute activations (torch.utils.checkpoint). It runs a few times
        here, which changes BatchNorm statistics.
    examples: inputs on the same device. Their values do not matter. Do not use them afterwards.
    dtype: the dtype of torch.autocast for the recorded forward pass. float32 switches it off.

    A call of the model replays the graphs if the model is in training mode, gradients are enabled,
    the inputs are positional and have the shapes and dtypes of `examples`, and each p.grad is None.
    So only the first micro-batch of a step replays graphs, and zero_grad must set gradients to None
    (the default). All other calls run as before, so do all calls under torch.autocast as usual.
    Each replay draws new random numbers for dropout.

    After a call that replays graphs, run the backward pass before the next call, which overwrites
    the output. The backward pass of the next replay overwrites the gradients. Clone what you keep
    longer.

    Afterwards, parameters may change only in place, requires_grad must not change, and hooks of
    inner modules and their train() and eval() have no effect. The model cannot be copied or
    pickled: save its state_dict(). The memory that the passes need stays in use. A warning of torch
    about streams is switched off in the whole process.
    """
    if hasattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch"):
        # torch adds up gradients on the stream that was used for the recording. The training uses
        # another stream. torch synchronises the two, but would warn.
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    eager, parameters = model.forward, list(model.parameters())

    def with_autocast(*inputs: Any) -> Any:
        enabled = dtype != torch.float32
        with torch.autocast("cuda", dtype, enabled, cache_enabled=False):
            return eager(*inputs)

    def shapes_and_dtypes(inputs: tuple[Any, ...]) -> list[Any]:
        return [isinstance(x, Tensor) and (x.shape, x.dtype) for x in inputs]

    recorded = shapes_and_dtypes(examples)
    model.forward = with_autocast
    torch.cuda.make_graphed_callables(model, examples)  # replaces model.forward
    replay = model.forward

    def forward(*inputs: Any, **options: Any) -> Any:
        fits = shapes_and_dtypes(inputs) == recorded and not options
        first = all(p.grad is None for p in parameters)
        if fits and first and model.training and torch.is_grad_enabled():
            return replay(*inputs)
        return eager(*inputs, **options)

    model.forward = forward
