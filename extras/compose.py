"""Say which extra each --strategy and --use of run.py needs, and build the arguments of `train`.

    arguments, watch = compose(flags, world)
    with watch:
        train(flags, ..., **arguments)

run.py imports this file only if one of these flags is given. Needs the modules of the core.
"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

import ddp_setup
import gpt
from run import Flags, extra


def compose(
    flags: Flags, world: ddp_setup.World
) -> tuple[dict[str, Any], AbstractContextManager[object]]:
    """Return the arguments of `train` for --strategy and --use, and a context for its call.

    FileNotFoundError if a file of extras/ is missing. ValueError if the flags do not fit together.
    """
    arguments: dict[str, Any] = {}
    watch: AbstractContextManager[object] = nullcontext()
    wrappers: list[Callable[..., Any]] = []  # each maps (steps, loss_fn) to (steps, loss_fn)
    if flags.strategy != "ddp":
        fsdp = extra("fsdp")
        arguments["parallelize"] = shard
        # In an evaluation, zero gathers the weights in the first batch, fsdp in each one.
        arguments["wrap_batches"] = partial(fsdp.pad_batches, timeout=flags.timeout)
        if flags.strategy == "fsdp":
            arguments["sync_each"] = True
            wrappers.append(partial(fsdp.pad_steps, timeout=flags.timeout))
    if "slow-ranks" in flags.use:
        wrappers.append(partial(extra("slow_ranks").watch, report=warnings.warn))
    if "replicas" in flags.use:
        arguments["before_save"] = extra("replicas").verify_replicas
    if "cuda-graphs" in flags.use:
        if flags.strategy != "ddp" or flags.accum > 1 or world.device.type != "cuda":
            raise ValueError("--use cuda-graphs needs CUDA, --strategy ddp and --accum 1")
        arguments["parallelize"] = partial(replicate_with_graphs, extra("cuda_graph").graph_small_)
    if "hang-report" in flags.use:
        watch = extra("hang").report(world, 0.8 * flags.timeout)  # before torch raises its error
    if wrappers:
        arguments["wrap_steps"] = partial(wrap_all, wrappers)
    return arguments, watch


def wrap_all(wrappers: list[Callable[..., Any]], steps: Any, loss_fn: Any) -> Any:
    """Apply the wrappers one after the other to (steps, loss_fn)."""
    for wrap in wrappers:
        steps, loss_fn = wrap(steps, loss_fn)
    return steps, loss_fn


def shard(model: gpt.GPT, flags: Flags, world: ddp_setup.World) -> nn.Module:
    """Divide a model without weights over the ranks. Each computes only its part of the weights."""
    weight = partial(gpt.initial_weight, model.config, flags.seed)
    divided: nn.Module = extra("fsdp").shard_(
        model, world.size, world.device, [*model.blocks], flags.strategy, weight
    )
    return divided


def replicate_with_graphs(
    graph_small_: Callable[..., object], model: gpt.GPT, flags: Flags, world: ddp_setup.World
) -> nn.Module:
    """Do what `replicate` of run.py does, and record a small model as CUDA graphs before."""
    gpt.initialize_(model, flags.seed)
    model.to(world.device)
    # Most batches of this rank have this shape.
    rows = -(-flags.batch_size // world.size)
    batch = torch.zeros(2, rows, flags.block_size, dtype=torch.int64)
    small = graph_small_(model, [*batch], getattr(torch, flags.dtype))
    if not small and world.rank == 0:
        warnings.warn("--use cuda-graphs has no effect: the model is not small", stacklevel=2)
    return ddp_setup.replicate(model, world)
