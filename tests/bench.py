"""Measure the speed and the memory of the toolkit, relative to the machine and to a simple loop.

    python tests/bench.py                         all parts; takes a quarter of an hour
    python tests/bench.py training data           only these parts
    python tests/bench.py --json > bench.json
    python tests/bench.py --gpu --data tinyshakespeare.txt --nanogpt FOLDER

With --gpu, other parts are run: a table for one GPU, in less than ten minutes. --nanogpt names a
checkout of nanoGPT to compare with.

Each line shows a figure, the figure that it is compared with, and the ratio of the two. Candidates
that are compared are called in turn, one call each, so that other load on the machine affects all
of them alike. Each figure is a median. The part "limits" comes first: it measures what the machine
can reach at best.
"""

import gc
import hashlib
import importlib
import importlib.util
import json
import math
import multiprocessing
import os
import pickle
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from call import spawn  # noqa: E402

import chardata  # noqa: E402
import ckpt  # noqa: E402
import ddp_setup  # noqa: E402
import gpt  # noqa: E402
import loop  # noqa: E402
from extras import cuda_graph, machine  # noqa: E402
from extras.cross_entropy import cross_entropy  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.bfloat16)
Call = Callable[[], Any]


class Shape(NamedTuple):
    """The sizes of a model and of its global batch: B windows of T tokens."""

    layers: int
    embd: int
    T: int
    B: int
    vocab: int = 65

    def __str__(self) -> str:
        vocab = f" V={self.vocab}" if self.vocab != 65 else ""
        return f"{self.layers}x{self.embd} T={self.T} B={self.B}{vocab}"


LARGE, SMALL = Shape(6, 384, 256, 16), Shape(4, 128, 64, 12)
GPT2 = Shape(12, 768, 1024, 16, 50304)
SHAPES = [LARGE, SMALL] + [GPT2] * (DEVICE.type == "cuda")


class Row(NamedTuple):
    """One line of the output."""

    what: str
    figure: float
    unit: str
    against: str = ""  # what the figure is compared with
    other: float = math.nan  # the figure of that
    ratio: float = math.nan  # figure / other


def row(what: str, figure: float, unit: str, against: str, other: float) -> Row:
    """Return a row with the ratio of the two figures."""
    return Row(what, figure, unit, against, other, figure / other)


def medians(candidates: dict[str, Call], seconds: float = 20, least: int = 5) -> dict[str, float]:
    """Return the median seconds of one call of each candidate.

    The candidates are called in turn: at least `least` rounds, and until `seconds` have passed. The
    first two rounds are a warm-up and do not count.
    """
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    rounds, end = 0, math.inf
    while rounds < least + 2 or time.perf_counter() < end:
        for name, call in candidates.items():
            synchronize()
            start = time.perf_counter()
            call()
            synchronize()
            taken[name].append(time.perf_counter() - start)
        rounds += 1
        end = time.perf_counter() + seconds if rounds == 2 else end
    return {name: statistics.median(times[2:]) for name, times in taken.items()}


def synchronize() -> None:
    """Wait until the device has finished its work."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def random_tokens(vocab: int, n: int = (1 << 20) + 1) -> np.ndarray:
    """Return n random token ids as uint16, the same in each call."""
    return np.random.default_rng(0).integers(0, vocab, n).astype(np.uint16)


# ------------------------------------------------------- the loop of common tutorials, to compare with


class PlainBlock(nn.Module):
    """A transformer block as tutorials write it: attention with a mask, biases in all layers."""

    def __init__(self, shape: Shape, heads: int) -> None:
        super().__init__()
        width, self.heads = shape.embd, heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.register_buffer("mask", torch.tril(torch.ones(shape.T, shape.T)))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        qkv = self.qkv(self.norm1(x)).split(C, dim=2)
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in qkv)
        scores = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))
        weights = F.softmax(scores.masked_fill(self.mask[:T, :T] == 0, float("-inf")), dim=-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(B, T, C))
        return x + self.feed_forward(self.norm2(x))


class PlainGPT(nn.Module):
    """A GPT of such blocks, with learned positions and an untied head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.embd)
        self.positions = nn.Embedding(shape.T, shape.embd)
        blocks = (PlainBlock(shape, num_heads(shape)) for _ in range(shape.layers))
        self.blocks = nn.Sequential(*blocks)
        self.norm, self.head = nn.LayerNorm(shape.embd), nn.Linear(shape.embd, shape.vocab)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(x)))


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """A map-style data set of which each item is one window of T tokens."""

    def __init__(self, ids: np.ndarray, T: int) -> None:
        self.ids, self.T = torch.from_numpy(ids.astype(np.int64)), T

    def __len__(self) -> int:
        return len(self.ids) - self.T

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.ids[i : i + self.T], self.ids[i + 1 : i + 1 + self.T]


def item_loader(data: Windows, batch_size: int, rank: int, size: int) -> Iterator[Any]:
    """Return an iterator over the batches of a DataLoader that reads single items."""
    sampler = DistributedSampler(data, num_replicas=size, rank=rank)
    return iter(DataLoader(data, batch_size=batch_size, sampler=sampler))


def plain_step(shape: Shape, accum: int = 1, rank: int = 0, size: int = 1) -> Call:
    """Return a function that does one training step as tutorials write it.

    It uses float32, AdamW that is not fused, single items, and .item() in each step. Each
    micro-batch synchronises the gradients.
    """
    model: nn.Module = PlainGPT(shape).to(DEVICE)
    if size > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    data = Windows(random_tokens(shape.vocab), shape.T)
    batches = item_loader(data, shape.B // size // accum, rank, size)

    def step() -> float:
        optimizer.zero_grad()
        for x, y in islice(batches, accum):
            logits = model(x.to(DEVICE))
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.to(DEVICE).view(-1)) / accum
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


# ------------------------------------------------------------------------------------- the toolkit


def num_heads(shape: Shape) -> int:
    """Return the number of attention heads: each has 64 dimensions, but there are at least 4."""
    return max(4, shape.embd // 64)


def make_model(
    shape: Shape,
    arch: str = "modern2",
    optimizer: str = "adamw",
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    **attributes: Any,
) -> tuple[gpt.GPT, list[Any]]:
    """Return a model on DEVICE and its optimizers.

    optimizer: "adamw", "muon" (torch's), or "extras/muon", which divides its work over the ranks.
    dtype: of the step. The iterations of extras/muon are in float32 or bfloat16, as in run.py.
    attributes: of the model. By default, the loss is that of extras/cross_entropy.py.
    """
    sizes = shape.vocab, shape.T, shape.layers, num_heads(shape), shape.embd
    model = gpt.build(gpt.Config(*sizes, dropout, arch), 0).to(DEVICE)
    model.cross_entropy = partial(cross_entropy, gpt.cross_entropy)
    for name, value in attributes.items():
        setattr(model, name, value)
    groups = gpt.parameter_groups(model)
    rest = groups["embeddings"] + groups.get("vectors", [])
    rest += groups["matrices"] if optimizer == "adamw" else []
    optimizers: list[Any] = [torch.optim.AdamW(rest, lr=3e-4, fused=True)]
    if optimizer == "muon":
        optimizers.append(torch.optim.Muon(groups["matrices"], lr=3e-4))
    elif optimizer == "extras/muon":
        fast: Any = importlib.import_module("extras.muon")
        dtype = torch.float32 if dtype == torch.float32 else torch.bfloat16
        optimizers.append(fast.Muon(groups["matrices"], lr=3e-4, dtype=dtype, distribute=True))
    return model, optimizers


def make_plan(shape: Shape) -> chardata.BatchPlan:
    """Return a plan of batches of random tokens."""
    # If B and T are powers of two, each epoch then ends with a whole batch. A smaller one would be
    # compiled anew, in the middle of a measurement.
    tokens = random_tokens(shape.vocab, (1 << 20) + shape.T + 1)
    return chardata.BatchPlan([tokens], shape.T, shape.B)


def toolkit_step(
    shape: Shape, dtype: torch.dtype, compiled: bool = False, graph: bool = False, **make: Any
) -> Call:
    """Return a function that does one step of loop.train_ on windows of chardata.steps."""
    model, optimizers = make_model(shape, dtype=dtype, **make)
    if compiled:
        gpt.compile_(model)
    if graph:
        examples = torch.zeros(2, shape.B, shape.T, dtype=torch.int64, device=DEVICE)
        cuda_graph.graph_(model, (*examples,), dtype)
    steps = chardata.steps(make_plan(shape))
    return partial(next, loop.train_(model, optimizers, steps, gpt.loss, dtype=dtype, clip=1.0))


def bare_step(shape: Shape, dtype: torch.dtype) -> Call:
    """Return a function that does one step of the same model on one batch, without the loop.

    The step is forward pass, backward pass and optimizer: no data is read, nothing is clipped.
    """
    model, (optimizer,) = make_model(shape)
    (batch,), total = next(chardata.steps(make_plan(shape)))
    x, y = (t.to(DEVICE) for t in batch)

    def step() -> None:
        with torch.autocast(DEVICE.type, dtype, enabled=dtype != torch.float32):
            loss = model(x, y) / total
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def matmul_rate(dtype: torch.dtype) -> float:
    """Return the FLOP/s of a square matrix product."""
    n = 8192 if DEVICE.type == "cuda" else 1024
    a = torch.randn(n, n, device=DEVICE).to(dtype)
    return 2 * n**3 / medians({"matmul": lambda: a @ a}, 2)["matmul"]


# --------------------------------------------------------------------------------------- the parts


def limits() -> Iterator[Row]:
    """Measure what this machine can reach at best."""
    for dtype in DTYPES:
        yield Row(f"matrix product, {dtype_name(dtype)}", matmul_rate(dtype) / 1e9, "GFLOP/s")
    a = torch.empty(1 << 26, device=DEVICE)
    b = torch.empty_like(a)
    seconds = medians({"copy": lambda: b.copy_(a)}, 2)["copy"]
    yield Row("memory copy, read and write", 2 * a.nbytes / seconds / 1e9, "GB/s")
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        raw = os.urandom(1 << 26)
        seconds = medians({"write": lambda: write(folder, raw)}, 2)["write"]
        yield Row("write and fsync", len(raw) / seconds / 1e9, "GB/s")


def write(folder: str, raw: bytes) -> None:
    """Write bytes to a file and wait until they are durable."""
    with open(Path(folder) / "raw", "wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def training() -> Iterator[Row]:
    """Compare steps in one process with the tutorial loop and with the bare step."""
    for shape in SHAPES:
        tokens = shape.T * shape.B
        flops = tokens * machine.flops_per_token(shape.layers, shape.embd, shape.vocab, shape.T)
        for dtype in DTYPES:
            taken = medians(
                {
                    "tutorial loop": plain_step(shape),
                    "bare step": bare_step(shape, dtype),
                    "adamw": toolkit_step(shape, dtype),
                    "adamw, compiled": toolkit_step(shape, dtype, compiled=True),
                    "muon": toolkit_step(shape, dtype, optimizer="extras/muon"),
                    "muon, compiled": toolkit_step(shape, dtype, True, optimizer="extras/muon"),
                    "torch's muon, compiled": toolkit_step(shape, dtype, True, optimizer="muon"),
                    "gpt2, adamw": toolkit_step(shape, dtype, arch="gpt2"),
                },
                25,
            )
            tutorial, bare = tokens / taken.pop("tutorial loop"), taken.pop("bare step")
            what = f"{shape} {dtype_name(dtype)}"
            for name, seconds in taken.items():
                rate = tokens / seconds
                yield row(f"{what} {name}", rate, "tokens/s", "tutorial loop, float32", tutorial)
            for name in ("muon, compiled", "torch's muon, compiled"):
                rate, adamw = tokens / taken[name], tokens / taken["adamw, compiled"]
                yield row(f"{what} {name}", rate, "tokens/s", "adamw, compiled", adamw)
            what, seconds = f"{what} adamw", taken["adamw"]
            yield row(what, seconds * 1e3, "ms", "bare step", bare * 1e3)
            reached, peak = flops / seconds / 1e9, matmul_rate(dtype) / 1e9
            yield row(what, reached, "GFLOP/s", "matrix product", peak)


def vocabulary() -> Iterator[Row]:
    """Compare steps with a large vocabulary with the tutorial loop, and with all logits at once."""
    shape = LARGE._replace(vocab=GPT2.vocab)
    for dtype in DTYPES:
        taken = medians(
            {
                "tutorial loop, float32": plain_step(shape),
                "all logits at once": toolkit_step(shape, dtype, cross_entropy=gpt.cross_entropy),
                "adamw": toolkit_step(shape, dtype),
            }
        )
        rate = {name: shape.T * shape.B / seconds for name, seconds in taken.items()}
        what, ours = f"{shape} {dtype_name(dtype)} adamw", rate.pop("adamw")
        for name, other in rate.items():
            yield row(what, ours, "tokens/s", name, other)


def data() -> Iterator[Row]:
    """Measure how fast batches are read from a memory map, and how large files affect the start."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/tokens.bin"
        random_tokens(50257, 1 << 25).tofile(path)
        tokens = [np.memmap(path, np.uint16, mode="r")]
        for T, B in ((128, 16), (256, 64), (1024, 64)):
            batches = item_loader(Windows(np.asarray(tokens[0][: 1 << 20]), T), B, 0, 1)
            steps = chardata.steps(chardata.BatchPlan(tokens, T, B))
            taken = medians(
                {
                    "100 steps": lambda: [next(steps) for _ in range(100)],
                    "items": lambda: next(batches),
                },
                3,
            )
            rate, items = (
                n * T * B / taken[name] / 1e6 for n, name in ((100, "100 steps"), (1, "items"))
            )
            yield row(f"windows, T={T} B={B}", rate, "Mtokens/s", "DataLoader of items", items)
        for name, size in (("small", 1 << 20), ("sparse", 20 << 30)):
            with open(f"{folder}/{name}", "wb") as file:
                file.truncate(size)
        # Without --no-compile, the large file would make run.py compile, because its run is long.
        flags = ["--tokenizer", "byte", "--no-compile"]
        small, sparse = (first_step(*flags, "--data", f"{folder}/{n}") for n in ("small", "sparse"))
        yield row("20 GB file: start to first step", sparse[0], "s", "1 MB file", small[0])
        what = "20 GB file: peak memory at first step"
        yield row(what, sparse[1] / 1e6, "MB", "1 MB file", small[1] / 1e6)


def first_step(*flags: str) -> tuple[float, int]:
    """Start run.py and stop it after its first step.

    Return the seconds from the start of the process to its first line of metrics, and its peak
    memory in bytes at that time.
    """
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, ROOT / "run.py", "--out", out, *flags]
        command += ["--log-every", "1", "--val-fraction", "0"]
        env = {**os.environ, "PYTHONUNBUFFERED": "1"}
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
            assert process.stdout and process.stdout.readline()
            seconds, peak = time.perf_counter() - start, peak_memory(process.pid)
            process.kill()
    return seconds, peak


def peak_memory(process: int | str = "self") -> int:
    """Return the peak memory of a process in bytes; for this process on a GPU, that of the GPU."""
    if process == "self" and DEVICE.type == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path(f"/proc/{process}/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def scaling() -> Iterator[Row]:
    """Compare two ranks with one, in float32. On a CPU each rank has one thread.

    Weak scaling: the global batch grows with the number of ranks. Strong scaling: it does not.
    """
    if DEVICE.type == "cuda" and torch.cuda.device_count() < 2:
        return
    for shape in (LARGE, SMALL):
        twice, rounds = shape._replace(B=2 * shape.B), 3 if shape == LARGE else 20
        one = {"adamw": (ddp_step, shape), "muon": (ddp_step, shape, "extras/muon")}
        two = {
            "adamw": (ddp_step, twice),
            "muon": (ddp_step, twice, "extras/muon"),
            "strong": (ddp_step, shape),
            "tutorial": (tutorial_step, shape),
            "reduce": (reduce_step, shape),
        }
        pairs = [[on_ranks(1, one, rounds, 1), on_ranks(2, two, rounds, 1)] for _ in range(2)]
        alone, step = (
            {name: statistics.mean(found[name] for found in runs) for name in runs[0]}
            for runs in zip(*pairs)
        )
        tokens = shape.T * shape.B
        ideal = {name: 2 * tokens / seconds for name, seconds in alone.items()}
        for name in one:
            rate = 2 * tokens / step[name]
            what = f"{shape} per rank, 2 ranks, {name}"
            yield row(what, rate, "tokens/s", "1 rank, doubled", ideal[name])
        what, rate = f"{shape} over 2 ranks, adamw", tokens / step["strong"]
        yield row(what, rate, "tokens/s", "1 rank, doubled", ideal["adamw"])
        yield row(what, rate, "tokens/s", "tutorial loop, accum 4", tokens / step["tutorial"])
        what = f"{shape} per rank: all-reduce alone"
        yield row(what, step["reduce"] * 1e3, "ms", "whole step", step["adamw"] * 1e3)


def on_ranks(size: int, *job: Any) -> dict[str, float]:
    """Return what time_steps measured on `size` ranks."""
    with tempfile.TemporaryDirectory() as folder:
        assert spawn(time_steps, size, f"{folder}/found", *job) == 0
        return json.loads(Path(f"{folder}/found").read_text())


def time_steps(
    path: str, candidates: dict[str, tuple[Any, ...]], rounds: int, threads: int | None = None
) -> None:
    """Write the median seconds of a call of each candidate as JSON. Every rank runs this.

    candidates: {name: (function, *arguments)}. function(world, *arguments) returns the call. All
    ranks make equally many calls, and rank 0 writes. threads: for each rank; None: all CPUs.
    """
    with ddp_setup.process_group() as world:
        machine.keep_freed_memory()
        calls = {name: make(world, *rest) for name, (make, *rest) in candidates.items()}
        torch.set_num_threads(threads or max(1, ddp_setup.available_cpus() // world.size))
        found = medians(calls, 0, rounds)
        if world.rank == 0:
            Path(path).write_text(json.dumps(found))


def ddp_step(
    world: ddp_setup.World,
    shape: Shape,
    optimizer: str = "adamw",
    dtype: torch.dtype = torch.float32,
    compiled: bool = False,
    accum: int = 1,
) -> Call:
    """Return a function that does one step of loop.train_ on all ranks."""
    model, optimizers = make_model(shape, optimizer=optimizer)
    if compiled:
        gpt.compile_(model)
    steps = chardata.steps(make_plan(shape), rank=world.rank, world_size=world.size, accum=accum)
    replica = ddp_setup.replicate(model, world)
    return partial(next, loop.train_(replica, optimizers, steps, gpt.loss, dtype=dtype, clip=1.0))


def tutorial_step(world: ddp_setup.World, shape: Shape) -> Call:
    return plain_step(shape, 4, world.rank, world.size)


def reduce_step(world: ddp_setup.World, shape: Shape) -> Call:
    """Return a function that sums up as many numbers as the model has parameters."""
    count = sum(p.numel() for p in make_model(shape)[0].parameters())
    return partial(dist.all_reduce, torch.zeros(count, device=world.device))


# --------------------------------------------------------- the same steps, with the usual frameworks


def frameworks() -> Iterator[Row]:
    """Compare with Hugging Face accelerate and Lightning Fabric, written as their guides show.

    All train the same model on windows of the same tokens, in bfloat16, with two micro-batches per
    step, a fused AdamW and clipping.
    """
    if not all(map(importlib.util.find_spec, ("accelerate", "lightning_fabric"))):
        note("frameworks: left out; to compare with them, pip install -e '.[bench]'")
        return
    for shape, size, compiled in (
        (SMALL, 1, False),
        (SMALL, 1, True),
        (SMALL, 2, True),
        (LARGE, 1, True),
        (LARGE, 2, True),
    ):
        if DEVICE.type == "cuda" and torch.cuda.device_count() < size:
            continue
        batch = shape._replace(B=size * shape.B)
        candidates = {
            "toolkit": (ddp_step, batch, "adamw", torch.bfloat16, compiled, 2),
            "accelerate": (accelerate_step, batch, compiled),
            "fabric": (fabric_step, batch, compiled),
        }
        taken = on_ranks(size, candidates, 5 if shape == LARGE else 30)
        rate = {name: batch.T * batch.B / seconds for name, seconds in taken.items()}
        what = f"{shape} per rank, {size} rank{'s' * (size > 1)}{', compiled' * compiled}"
        for other in ("accelerate", "fabric"):
            yield row(what, rate["toolkit"], "tokens/s", other, rate[other])


def shuffled_windows(shape: Shape, batch_size: int) -> DataLoader[Any]:
    """Return a DataLoader of windows that do not overlap, as chardata's do."""
    ids = torch.from_numpy(random_tokens(shape.vocab).astype(np.int64))
    data = TensorDataset(ids[:-1].view(-1, shape.T), ids[1:].view(-1, shape.T))
    return DataLoader(data, batch_size, shuffle=True, drop_last=True)


def accelerate_step(world: ddp_setup.World, shape: Shape, compiled: bool) -> Call:
    """Return a function that does one step as the guide of accelerate shows."""
    from accelerate import Accelerator, DistributedDataParallelKwargs

    accelerator = Accelerator(
        cpu=world.device.type == "cpu",
        mixed_precision="bf16",
        gradient_accumulation_steps=2,
        dynamo_backend="inductor" if compiled else "no",
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    model, (optimizer,) = make_model(shape)
    loader = shuffled_windows(shape, shape.B // world.size // 2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def steps() -> Iterator[None]:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = model(x, y) / y.numel()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                yield

    return partial(next, steps())


def fabric_step(world: ddp_setup.World, shape: Shape, compiled: bool) -> Call:
    """Return a function that does one step as the guide of Lightning Fabric shows."""
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy

    strategy = DDPStrategy(gradient_as_bucket_view=True) if world.size > 1 else "auto"
    fabric = Fabric(
        accelerator=world.device.type, strategy=strategy, devices=world.size, precision="bf16-mixed"
    )
    fabric.launch()
    model, (optimizer,) = make_model(shape)
    if compiled:
        model = torch.compile(model)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(shuffled_windows(shape, shape.B // world.size // 2))

    def steps() -> Iterator[None]:
        for number, (x, y) in enumerate(loader, 1):
            accumulating = number % 2 != 0
            with fabric.no_backward_sync(model, enabled=accumulating):
                fabric.backward(model(x, y) / y.numel() / 2)
            if not accumulating:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
                yield

    return partial(next, steps())


def checkpoints() -> Iterator[Row]:
    """Measure how long a save stops the training loop, and how long it takes to be durable."""
    for shape in SHAPES:
        model, optimizers = make_model(shape)
        steps = chardata.steps(make_plan(shape._replace(B=1)))
        next(loop.train_(model, optimizers, steps, gpt.loss))
        state = ckpt.snapshot(model, optimizers)
        moments = state["optimizers"][0]["state"].values()
        saved = [t for tensors in (state["model"], *moments) for t in tensors.values()]
        moments = optimizers[0].state.values()
        live = [*model.parameters(), *(t for tensors in moments for t in tensors.values())]
        assert sum(t.nbytes for t in saved) == sum(t.nbytes for t in live)
        with tempfile.TemporaryDirectory(dir=ROOT) as folder:
            raw = os.urandom(os.path.getsize(f"{folder}/{ckpt.save(folder, state, 0).name}"))
            taken = medians(
                {
                    "snapshot": lambda: ckpt.snapshot(model, optimizers),
                    "copy": lambda: [t.detach().to("cpu", copy=True) for t in live],
                    "save": lambda: ckpt.save(folder, state, 0),
                    "write": lambda: write(folder, raw),
                },
                10,
            )
        ms = {name: seconds * 1e3 for name, seconds in taken.items()}
        what = f"{shape}, {len(raw) / 1e6:,.0f} MB"
        yield row(f"{what}: snapshot", ms["snapshot"], "ms", "plain copy", ms["copy"])
        yield row(f"{what}: durable save", ms["save"], "ms", "write and fsync", ms["write"])


def start_up() -> Iterator[Row]:
    """Measure whole processes from their start."""

    def python(*arguments: str) -> Call:
        command = [sys.executable, *arguments]
        return lambda: subprocess.run(command, check=True, capture_output=True, cwd=ROOT)

    taken = medians(
        {
            "empty": python("-c", ""),
            "torch": python("-c", "import torch"),
            "help": python("run.py", "--help"),
            "step": first_step,
        },
        0,
    )
    yield row("run.py --help", taken["help"], "s", "empty program", taken["empty"])
    yield row("run.py, start to first step", taken["step"], "s", "import torch", taken["torch"])


def sampling() -> Iterator[Row]:
    """Compare sampling with computing the whole context each time, and with its limit.

    A token needs all weights once. So it takes at least as long as to add up as many numbers.
    """
    for shape in (LARGE, SMALL):
        model = make_model(shape)[0].eval()
        weights = torch.ones(sum(p.numel() for p in model.parameters()), device=DEVICE)
        prompt, count = torch.zeros(1, dtype=torch.int64, device=DEVICE), shape.T - 1
        taken = medians(
            {
                "cached": lambda: list(islice(gpt.sample(model, prompt), count)),
                "uncached": lambda: sample_without_cache(model, prompt, count),
                "limit": lambda: [weights.sum() for _ in range(count)],
            },
            5,
        )
        rate = {name: count / seconds for name, seconds in taken.items()}
        what = f"{shape}: sampling"
        yield row(what, rate["cached"], "tokens/s", "without a cache", rate["uncached"])
        yield row(what, rate["cached"], "tokens/s", "reading the weights", rate["limit"])


@torch.no_grad()
def sample_without_cache(model: gpt.GPT, tokens: Tensor, count: int) -> Tensor:
    """Return the tokens (T,) and `count` generated ones, (T + count,) int64."""
    for _ in range(count):
        token = gpt.sample_token(model(tokens[None])[0, -1], 1.0, 0)
        tokens = torch.cat((tokens, tokens.new_tensor([token])))
    return tokens


def memory() -> Iterator[Row]:
    """Measure by how much a few steps raise the peak memory of a new process."""
    base = LARGE if DEVICE.type == "cpu" else GPT2._replace(vocab=65)
    methods = {
        "accum 8": {"accum": 8},
        "activations recomputed": {"checkpoint_activations": True},
    }
    for shape in (base, base._replace(vocab=50304)):
        for name, settings in methods.items():
            without, less = (in_new_process(memory_of_steps, shape, **s) for s in ({}, settings))
            yield row(f"{shape}: {name}", less / 1e6, "MB", "without", without / 1e6)


def in_new_process(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result of a function that runs in a new process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args, **kwargs).result()


def memory_of_steps(shape: Shape, accum: int = 1, **make: Any) -> int:
    """Return by how many bytes three bfloat16 steps raise the peak memory of this process."""
    model, optimizers = make_model(shape, **make)
    before = peak_memory()
    steps = chardata.steps(make_plan(shape), accum=accum)
    for _ in islice(loop.train_(model, optimizers, steps, gpt.loss, dtype=torch.bfloat16), 3):
        synchronize()
    return peak_memory() - before


# ------------------------------------------------------------------------------------------- --gpu

GPT2_LARGE_BATCH = GPT2._replace(B=32)
TARGET = 1.4697  # validation loss that nanoGPT's README reports for its character model


class Gpu(NamedTuple):
    """What the parts of --gpu need."""

    data: str | None  # path of a text for the character model
    nanogpt: str | None  # folder of a checkout of nanoGPT
    tiny: bool  # tiny sizes, to try every line on a CPU
    end: float  # value of time.perf_counter() at which the table must be complete

    def shape(self, full: Shape) -> Shape:
        return Shape(2, 64, 32, 4) if self.tiny else full

    def seconds_left(self) -> float:
        return max(1.0, self.end - time.perf_counter())


def gpu_speed(gpu: Gpu) -> Iterator[Row]:
    """Compare steps of GPT-2 124M in bfloat16 with nanoGPT and with the peak of the device."""
    shape, dtype = gpu.shape(GPT2_LARGE_BATCH), torch.bfloat16
    peak, source = machine.peak_flops(DEVICE, dtype)
    yield row("matrix product", matmul_rate(dtype) / 1e12, "TFLOP/s", source, peak / 1e12)
    step = partial(toolkit_step, shape, dtype)
    ours = {
        "gpt2, adamw": step(arch="gpt2"),
        "gpt2, adamw, compiled": step(True, arch="gpt2"),
        "modern2, adamw, compiled": step(True),
        "modern2, muon, compiled": step(True, optimizer="extras/muon"),
    }
    if gpu.tiny or machine.device_memory(DEVICE) > 6e10:
        ours["gpt2, adamw, compiled, all logits at once"] = step(
            True, arch="gpt2", cross_entropy=gpt.cross_entropy
        )
    theirs: dict[str, Call] = {}
    if gpu.nanogpt:
        theirs["nanoGPT"] = nanogpt_step(shape, gpu.nanogpt, False)
        theirs["nanoGPT, compiled"] = nanogpt_step(shape, gpu.nanogpt, True)
    else:
        note("no comparison with nanoGPT: name a checkout with --nanogpt")
    # Four steps per call: the device must not wait for the host at each step.
    calls = {name: partial(repeat_call, one, 4) for name, one in (ours | theirs).items()}
    seconds = medians(calls, 0.0 if gpu.tiny else 20.0, 1 if gpu.tiny else 5)
    rate = {name: 4 * shape.T * shape.B / taken for name, taken in seconds.items()}
    flops = machine.flops_per_token(shape.layers, shape.embd, shape.vocab, shape.T)
    for name in rate:
        other = "nanoGPT, compiled" if "compiled" in name else "nanoGPT"
        if name in ours and theirs:
            yield row(f"{shape} {name}", rate[name], "tokens/s", other, rate[other])
        else:
            yield Row(f"{shape} {name}", rate[name], "tokens/s")
        reached = rate[name] * flops / 1e12
        yield row(f"{shape} {name}: mfu", reached, "TFLOP/s", source, peak / 1e12)


def gpu_small(gpu: Gpu) -> Iterator[Row]:
    """Compare steps of small models in bfloat16 with nanoGPT, with and without CUDA graphs."""
    for full in (Shape(4, 128, 64, 12), Shape(6, 384, 256, 64)):
        shape = gpu.shape(full)
        step = partial(toolkit_step, shape, torch.bfloat16, optimizer="extras/muon")
        steps = {"muon": step(), "muon, compiled": step(True)}
        if DEVICE.type == "cuda":
            steps["muon, graphs"] = step(graph=True)
            steps["muon, compiled, graphs"] = step(True, graph=True)
            steps["adamw, compiled, graphs"] = step(True, graph=True, optimizer="adamw")
        if gpu.nanogpt:
            steps["nanoGPT, compiled"] = nanogpt_step(shape, gpu.nanogpt, True)
        calls = {name: partial(repeat_call, one, 4) for name, one in steps.items()}
        seconds = medians(calls, 0.0 if gpu.tiny else 5.0, 1 if gpu.tiny else 5)
        rate = {name: 4 * shape.T * shape.B / taken for name, taken in seconds.items()}
        for name in rate:
            other = "nanoGPT, compiled" if gpu.nanogpt else "muon"
            yield row(f"{shape} {name}", rate[name], "tokens/s", other, rate[other])


def repeat_call(call: Call, times: int) -> None:
    for _ in range(times):
        call()


def nanogpt_step(shape: Shape, folder: str, compiled: bool) -> Call:
    """Return a function that does one step of the model of nanoGPT, as its train.py does it."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", f"{folder}/model.py")
    assert spec and spec.loader
    nanogpt = sys.modules["nanogpt_model"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(nanogpt)
    sizes = shape.T, shape.vocab, shape.layers, num_heads(shape), shape.embd
    with redirect_stdout(sys.stderr):  # It prints the number of parameters.
        model = nanogpt.GPT(nanogpt.GPTConfig(*sizes, dropout=0.0, bias=False)).to(DEVICE)
        optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), DEVICE.type)
    model = torch.compile(model) if compiled else model
    tokens, generator = random_tokens(shape.vocab), np.random.default_rng(0)

    def batch() -> list[Tensor]:
        starts = generator.integers(len(tokens) - shape.T, size=shape.B)
        x, y = (np.stack([tokens[i + j :][: shape.T] for i in starts]) for j in (0, 1))
        both = [torch.from_numpy(t.astype(np.int64)) for t in (x, y)]
        return [(t.pin_memory() if DEVICE.type == "cuda" else t).to(DEVICE, non_blocking=True)
                for t in both]  # fmt: skip

    def step() -> None:
        x, y = batch()
        with torch.autocast(DEVICE.type, torch.bfloat16):
            _, loss = model(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def gpu_waits(gpu: Gpu) -> Iterator[Row]:
    """Count how often the host waits for the device in a training step and in an evaluation."""
    shape, dtype = gpu.shape(GPT2_LARGE_BATCH), torch.bfloat16
    calls = {
        f"{optimizer}{', compiled' * compiled}": toolkit_step(
            shape, dtype, compiled, optimizer=optimizer
        )
        for optimizer in ("adamw", "muon", "extras/muon")
        for compiled in (False, True)
    }
    model, _ = make_model(shape)
    plan = make_plan(shape)
    (batch,), _ = next(chardata.steps(plan))
    evaluation = "evaluation of 10 rounds"
    calls[evaluation] = lambda: loop.evaluate(model, [batch] * 10, gpt.loss, dtype)
    for name, call in calls.items():
        repeat_call(call, 3)  # compiles; the first step has to wait
        five = partial(repeat_call, call, 5)
        places = sync_warnings(five)
        wanted = float(name == evaluation)  # for its result
        yield Row(f"{name}: host waits", sum(places.values()) / 5, "each", "wanted", wanted)
        for place, count in places.most_common():
            yield Row(f"    at {place}", count / 5, "each")
        waits, busy, span = traced_waits(five)
        for what, count in waits.items():
            yield Row(f"{name}: {what}", count / 5, "each")
        yield row(f"{name}: device computes", busy * 1e3, "ms", "of", span * 1e3)


def sync_warnings(call: Call) -> Counter[str]:
    """Return how often torch's debug mode sees that the host waits, by file and line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if DEVICE.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            if DEVICE.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    seen = [w for w in caught if "called a synchronizing" in str(w.message)]
    return Counter(f"{Path(w.filename).name}:{w.lineno}" for w in seen)


def traced_waits(call: Call) -> tuple[Counter[str], float, float]:
    """Trace the call: CUDA calls in which the host waits, seconds that the device computed, span.

    torch's debug mode does not see waits for events: loop.py waits for one of the step before.
    """
    with torch.profiler.profile() as profiler:
        call()
        synchronize()
    events = profiler.events()
    on_device = torch.autograd.DeviceType.CUDA
    waits = Counter(e.name for e in events if re.match("cuda(Stream|Event)Synchronize", e.name))
    spans = sorted(
        (e.time_range.start, e.time_range.end)
        for e in events
        if e.device_type == on_device and not getattr(e, "is_user_annotation", False)
    )
    ends = list(accumulate((end for _, end in spans), max))
    gaps = sum(max(0, start - end) for (start, _), end in zip(spans[1:], ends))
    span = ends[-1] - spans[0][0] if spans else math.nan
    return waits, (span - gaps) / 1e6, span / 1e6


def gpu_resume(gpu: Gpu) -> Iterator[Row]:
    """Count the parameters that differ after a resume, with deterministic algorithms."""
    shape = gpu.shape(LARGE)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # the new processes read it
    for compiled in (False, True):
        what = f"{shape} muon, bfloat16, dropout{', compiled' * compiled}"
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
            run = partial(in_new_process, trained_digests, shape, compiled)
            whole, resumed = run(one), run(one)
            different = sum(whole[name] != resumed[name] for name in whole)
            yield Row(f"{what}: differ", different, "tensors", "of", len(whole))
            if different:  # Is it the resume, or are the algorithms not deterministic?
                again = run(two)
                different = sum(whole[name] != again[name] for name in whole)
                yield Row(f"{what}: differ without a resume", different, "tensors")


def trained_digests(shape: Shape, compiled: bool, folder: str) -> dict[str, str]:
    """Return a digest of each parameter after 6 steps with deterministic algorithms.

    Start from the checkpoint in the folder; if there is none, write one after 3 steps.
    """
    torch.use_deterministic_algorithms(True)
    model, optimizers = make_model(shape, optimizer="muon", dropout=0.1)
    if compiled:
        gpt.compile_(model)
    found, _ = ckpt.newest(folder)
    start = found.entry.step if found else 0
    if found:
        ckpt.restore_(found.state, model, optimizers)
    steps = islice(chardata.steps(make_plan(shape), start=start), 6 - start)
    settings: dict[str, Any] = {"start": start, "dtype": torch.bfloat16, "clip": 1.0}
    for step, _ in loop.train_(model, optimizers, steps, gpt.loss, **settings):
        if step == 3:
            ckpt.save(folder, ckpt.snapshot(model, optimizers), step)
    weights = {name: p.detach().cpu().numpy().tobytes() for name, p in model.named_parameters()}
    return {name: hashlib.sha256(raw).hexdigest() for name, raw in weights.items()}


def gpu_messages(gpu: Gpu) -> Iterator[Row]:
    """Show what run.py prints if memory or a compiler is missing. One line is wanted."""
    with tempfile.TemporaryDirectory() as folder:
        ptxas = Path(folder, "ptxas")  # answers triton's first question, and then fails
        version = "Cuda compilation tools, release 13.0, V13.0.88"
        ptxas.write_text(
            f'#!/bin/sh\ncase "$*" in *--version*) echo "{version}";; *) exit 1;; esac'
        )
        ptxas.chmod(0o755)
        limit = "torch.cuda.set_per_process_memory_fraction(7e8 / torch.cuda.mem_get_info()[1])"
        if DEVICE.type == "cpu":
            limit = (
                "import resource as r; used = 4096 * int(open('/proc/self/statm').read().split()[0])"
                "; r.setrlimit(r.RLIMIT_AS, (used + 700_000_000,) * 2)"
            )
        cases = {
            "out of memory": (limit, {}, ["--no-compile", "--embd", "1024", "--batch-size", "64"]),
            "no C compiler": ("", {"CC": "/bin/false", "CXX": "/bin/false"}, ["--compile"]),
            "no assembler": ("", {"TRITON_PTXAS_PATH": f"{ptxas}"}, ["--compile"]),
        }
        if DEVICE.type == "cpu":
            del cases["no assembler"]
        for name, (code, env, flags) in cases.items():
            lines, exit_code = messages(code, env, flags, gpu.seconds_left())
            yield Row(f"{name}: exit code", exit_code, "", "wanted", 1)
            yield Row(f"{name}: lines on stderr", len(lines), "lines", "wanted", 1)
            for line in lines[:5]:
                note(f"    {line}")


def messages(
    code: str, env: dict[str, str], flags: list[str], timeout: float
) -> tuple[list[str], int]:
    """Run Python code and then run.py; return the lines of stderr and the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": folder}
        start = f"import runpy, sys, torch; {code}\nsys.argv = ['run.py', *sys.argv[1:]]\n"
        start += "runpy.run_path('run.py', run_name='__main__')"
        command = [sys.executable, "-c", start, "--out", f"{folder}/out", "--steps", "3", *flags]
        command += ["--device", DEVICE.type, "--val-fraction", "0"]
        env = {**os.environ, **caches, **env}
        done = subprocess.run(
            command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=timeout
        )
    return done.stderr.splitlines(), done.returncode


def gpu_quality(gpu: Gpu) -> Iterator[Row]:
    """Measure the seconds, from the start of the process, to the target loss."""
    if not gpu.data:
        note("no time to a validation loss: name a text with --data")
        return
    theirs, name = math.nan, "nanoGPT"
    if gpu.nanogpt:
        theirs, best = nanogpt_quality(gpu, gpu.nanogpt, gpu.data)
        yield row("nanoGPT: best validation loss seen", best, "nats", "target", TARGET)
        yield Row(f"nanoGPT: time to {TARGET}", theirs, "s")
    sizes = {"layers": 6, "heads": 6, "embd": 384, "block-size": 256, "batch-size": 64}
    if gpu.tiny:
        sizes = {"layers": 2, "heads": 2, "embd": 32, "block-size": 32, "batch-size": 8}
    for steps in (4,) if gpu.tiny else (500, 1000, 2000):
        settings = {**sizes, "steps": steps, "eval-every": max(1, steps // 8), "data": gpu.data}
        settings |= {"dropout": 0.2, "eval-tokens": 0, "epochs": 1000}
        with tempfile.TemporaryDirectory() as out:
            command = [sys.executable, "run.py", "--out", out]
            command += [f"--{flag}={value}" for flag, value in settings.items()]
            start = time.time()
            try:
                subprocess.run(
                    command,
                    cwd=ROOT,
                    check=True,
                    stdout=subprocess.DEVNULL,
                    timeout=gpu.seconds_left(),
                )
            except subprocess.TimeoutExpired:
                note(f"no time for a run of {steps} steps")
                return
            total = time.time() - start
            records = map(json.loads, Path(out, "metrics.jsonl").read_text().splitlines())
            losses = [(r["val_loss"], r["time"] - start) for r in records if "val_loss" in r]
        reached = next((seconds for loss, seconds in losses if loss <= TARGET), math.nan)
        what = f"{sizes['layers']}x{sizes['embd']}, {steps} steps"
        yield row(f"{what}: best validation loss", min(losses)[0], "nats", "target", TARGET)
        yield row(f"{what}: time to {TARGET}", reached, "s", name, theirs)
        yield row(f"{what}: whole run", total, "s", name, theirs)


def nanogpt_quality(gpu: Gpu, folder: str, data: str) -> tuple[float, float]:
    """Run nanoGPT's character example on the text, with its own settings.

    Return the seconds from the start of the process to the target loss (NaN if it was not
    reached in time), and the best validation loss that was seen.
    """
    text = Path(data).read_text()
    chars = sorted(set(text))
    ids = np.array([chars.index(c) for c in text], dtype=np.uint16)
    with tempfile.TemporaryDirectory() as out:
        parts = ids[: int(0.9 * len(ids))], ids[int(0.9 * len(ids)) :]
        for name, part in zip(("train", "val"), parts):
            part.tofile(f"{out}/{name}.bin")
        meta = {"vocab_size": len(chars), "itos": dict(enumerate(chars))}
        Path(out, "meta.pkl").write_bytes(pickle.dumps(meta))
        command = [sys.executable, "-u", "train.py", "config/train_shakespeare_char.py"]
        command += [f"--dataset={out}", f"--out_dir={out}"]
        if gpu.tiny:
            command += "--device=cpu --compile=False --max_iters=4 --eval_interval=2".split()
            command += "--eval_iters=1 --batch_size=4 --block_size=32 --log_interval=1".split()
            command += "--n_layer=2 --n_head=2 --n_embd=32 --dtype=float32".split()
        best, start = math.inf, time.perf_counter()
        end = start + gpu.seconds_left() / 2
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            for line in process.stdout:
                seconds = time.perf_counter() - start
                if found := re.search(r"step \d+: .*val loss ([\d.]+)", line):
                    best = min(best, float(found[1]))
                if best <= TARGET or time.perf_counter() > end:
                    break
            process.kill()
    return (seconds if best <= TARGET else math.nan), best


def note(text: str) -> None:
    """Print a line that is no figure."""
    click.echo(text, err=True)


# ------------------------------------------------------------------------------------ command line

PATH = click.Path(exists=True, resolve_path=True)
GPU_PARTS = [gpu_speed, gpu_small, gpu_waits, gpu_resume, gpu_messages, gpu_quality]
PARTS = [
    limits,
    training,
    vocabulary,
    data,
    scaling,
    frameworks,
    checkpoints,
    start_up,
    sampling,
    memory,
]


@click.command()
@click.argument("parts", nargs=-1, type=click.Choice([p.__name__ for p in PARTS + GPU_PARTS]))
@click.option("--json", "as_json", is_flag=True, help="Print all rows as one JSON object.")
@click.option("--gpu", is_flag=True, help="Print the table for one GPU, in less than ten minutes.")
@click.option("--data", type=PATH, help="With --gpu: a text to train on.")
@click.option("--nanogpt", type=PATH, help="With --gpu: nanoGPT's folder.")
@click.option("--tiny", is_flag=True, hidden=True, help="With --gpu: try every line on a CPU.")
def main(
    parts: tuple[str, ...],
    as_json: bool,
    gpu: bool,
    data: str | None,
    nanogpt: str | None,
    tiny: bool,
) -> None:
    """Measure the named PARTS, or all of them."""
    if gpu and DEVICE.type != "cuda" and not tiny:
        raise click.UsageError("--gpu: there is no GPU")
    settings = Gpu(data, nanogpt, tiny, time.perf_counter() + 570)
    chosen: list[Callable[..., Iterator[Row]]] = [*GPU_PARTS] if gpu else [*PARTS]
    rows, failed = [], False
    machine.keep_freed_memory()  # as in a real run
    with ddp_setup.process_group():  # sets the threads as in a real run
        for part in chosen:
            name = part.__name__
            if parts and name not in parts:
                continue
            if gpu and settings.seconds_left() < 60:
                note(f"{name}: left out, because less than a minute is left; give its name alone")
                continue
            try:
                for line in part(settings) if gpu else part():
                    rows.append({"part": name, **line._asdict()})
                    if not as_json:
                        click.echo(format_row(line))
            except Exception:
                if not gpu:  # The next part can still be measured: a GPU is often there only once.
                    raise
                failed = True
                note(f"{name} failed:\n{traceback.format_exc()}")
            free_memory()
    if as_json:
        about = {"torch": torch.__version__, "device": device_name()}
        about |= {"cores": ddp_setup.available_cpus()}
        click.echo(json.dumps({**about, "rows": rows}, indent=1))
    sys.exit(failed)


def device_name() -> str:
    return torch.cuda.get_device_name() if DEVICE.type == "cuda" else str(DEVICE)


def free_memory() -> None:
    """Give the memory of the device back, so that other processes can use it.

    Also forget compiled graphs: torch keeps eight versions of a function and compiles no more.
    """
    torch.compiler.reset()
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def format_row(line: Row) -> str:
    """Return a row as a line of text."""
    text = f"{line.what:48} {line.figure:12,.4g} {line.unit:10}"
    if not line.against:
        return text
    text += f"  {line.against:24} {line.other:12,.4g}"
    return text if math.isnan(line.ratio) else f"{text}  x {line.ratio:.2f}"


if __name__ == "__main__":
    importlib.import_module("bench").main()  # so that other processes can import the functions
