"""What the toolkit's speed is, as ratios measured in one run on the machine at hand.

    python tests/bench.py                 a table
    python tests/bench.py --json          the same for machines
    python tests/bench.py --rounds 3 train data

Every row compares things that take turns, step by step, so that what the machine does meanwhile meets them
all alike; figures are medians. Rates of the machine itself come first: what could be reached at all.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import chardata  # noqa: E402
import ckpt  # noqa: E402
import ddp_setup  # noqa: E402
import gpt  # noqa: E402
import loop  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = {  # layers, heads, width, T, batch, vocabulary
    "6x384 T256 B16": (6, 6, 384, 256, 16, 65),
    "4x128 T64 B12": (4, 4, 128, 64, 12, 65),
}
if DEVICE.type == "cuda":
    SHAPES["GPT-2 124M T1024 B16"] = (12, 12, 768, 1024, 16, 50304)


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def medians(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of one call of each, the contenders taking turns; the first two calls do not count."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 2):
        for name, call in contenders.items():
            synchronize()
            start = time.perf_counter()
            call()
            synchronize()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken[2:]) for name, taken in times.items()}


# ------------------------------------------------------------------------------------- the loop of the guides


class PlainBlock(nn.Module):
    """Attention with a mask, written as the guides write it."""

    def __init__(self, width: int, heads: int, block_size: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.register_buffer("mask", torch.tril(torch.ones(block_size, block_size)))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(C, dim=2))
        scores = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))
        weights = F.softmax(scores.masked_fill(self.mask[:T, :T] == 0, float("-inf")), dim=-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.norm2(x))


class PlainGPT(nn.Module):
    def __init__(self, layers: int, heads: int, width: int, block_size: int, vocab: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(block_size, width)
        self.blocks = nn.Sequential(*(PlainBlock(width, heads, block_size) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab)

    def forward(self, x):
        x = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(x)))


class Windows(Dataset):
    """One window an item, cut from a tensor of ids."""

    def __init__(self, ids: np.ndarray, block_size: int) -> None:
        self.ids, self.block_size = torch.from_numpy(ids.astype(np.int64)), block_size

    def __len__(self) -> int:
        return len(self.ids) - self.block_size

    def __getitem__(self, i: int):
        return self.ids[i : i + self.block_size], self.ids[i + 1 : i + 1 + self.block_size]


def plain_step(shape: tuple[int, ...], ids: np.ndarray) -> Callable[[], float]:
    """A step of the guides' loop: float32, unfused AdamW, a DataLoader of single items, .item() every step."""
    layers, heads, width, T, B, vocab = shape
    model = PlainGPT(layers, heads, width, T, vocab).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    data = Windows(ids, T)
    loader = iter(DataLoader(data, batch_size=B, sampler=DistributedSampler(data, num_replicas=1, rank=0)))

    def step() -> float:
        x, y = next(loader)
        logits = model(x.to(DEVICE))
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.to(DEVICE).view(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


# ------------------------------------------------------------------------------------------------ our own


def config_of(shape: tuple[int, ...], arch: str) -> gpt.Config:
    layers, heads, width, T, _, vocab = shape
    return gpt.Config(vocab, T, layers, heads, width, 0.0, arch)


def optimizers_of(model: gpt.GPT, muon: bool) -> list[torch.optim.Optimizer]:
    kinds = gpt.groups(model)
    if not muon:
        return [torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)]
    rest = kinds["embeddings"] + kinds["vectors"]
    return [torch.optim.AdamW(rest, lr=3e-4, fused=True), torch.optim.Muon(kinds["matrices"], lr=3e-4)]


def our_step(shape, ids, dtype, *, arch="modern", muon=False, compiled=False) -> Callable[[], object]:
    """A step of loop.train_ on windows from chardata.steps."""
    model = gpt.build(config_of(shape, arch), 0).to(DEVICE)
    if compiled:
        gpt.compile_(model)
    steps = chardata.steps([ids], shape[3], shape[4])
    training = loop.train_(model, optimizers_of(model, muon), steps, gpt.loss, dtype=dtype, clip=1.0)
    return lambda: next(training)


def bare_step(shape, ids, dtype) -> Callable[[], None]:
    """Forward, backward, clip, step of the same model on one batch that never changes: no loop, no data."""
    model = gpt.build(config_of(shape, "modern"), 0).to(DEVICE)
    (optimizer,) = optimizers_of(model, muon=False)
    (batch,), total = next(chardata.steps([ids], shape[3], shape[4]))
    x, y = (t.to(DEVICE) for t in batch)

    def step() -> None:
        with torch.autocast(DEVICE.type, dtype, enabled=dtype != torch.float32):
            loss = model(x, y) / total
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


# ------------------------------------------------------------------------------------------------ the rows


def limits(rounds: int) -> dict[str, float]:
    """What this machine can do at best."""
    n = 4096 if DEVICE.type == "cuda" else 1024
    a = torch.randn(n, n, device=DEVICE)
    half, big = a.bfloat16(), torch.empty(1 << 26, device=DEVICE)
    other = torch.empty_like(big)
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        block = np.random.default_rng(0).bytes(1 << 26)

        def write() -> None:
            with open(Path(folder) / "block", "wb") as file:
                file.write(block)
                file.flush()
                os.fsync(file.fileno())

        taken = medians(
            {"float32": lambda: a @ a, "bfloat16": lambda: half @ half, "copy": lambda: other.copy_(big), "write": write},
            rounds,
        )  # fmt: skip
    return {
        "matmul float32 GFLOP/s": 2 * n**3 / taken["float32"] / 1e9,
        "matmul bfloat16 GFLOP/s": 2 * n**3 / taken["bfloat16"] / 1e9,
        "copy GB/s (read + written)": 2 * big.nbytes / taken["copy"] / 1e9,
        "write + fsync GB/s": len(block) / taken["write"] / 1e9,
    }


def training(rounds: int) -> dict[str, float]:
    """tokens/s and MFU of one process; the guides' loop and the bare step on the same shapes."""
    ids = np.random.default_rng(0).integers(0, 65, 1 << 20).astype(np.uint16)
    rows = {}
    for name, shape in SHAPES.items():
        contenders = {
            "plain loop": plain_step(shape, ids),
            "bare float32": bare_step(shape, ids, torch.float32),
            "ours float32": our_step(shape, ids, torch.float32),
            "bare bfloat16": bare_step(shape, ids, torch.bfloat16),
            "ours bfloat16": our_step(shape, ids, torch.bfloat16),
            "ours bfloat16 muon": our_step(shape, ids, torch.bfloat16, muon=True),
            "ours bfloat16 gpt2": our_step(shape, ids, torch.bfloat16, arch="gpt2"),
            "ours bfloat16 compiled": our_step(shape, ids, torch.bfloat16, compiled=True),
        }
        taken = medians(contenders, rounds)
        tokens = shape[3] * shape[4]
        for contender, seconds in taken.items():
            rows[f"{name}: {contender}, tokens/s"] = tokens / seconds
        for dtype in ("float32", "bfloat16"):
            rows[f"{name}: {dtype} / plain loop"] = taken["plain loop"] / taken[f"ours {dtype}"]
            rows[f"{name}: {dtype} loop overhead"] = taken[f"ours {dtype}"] / taken[f"bare {dtype}"] - 1
        rows[f"{name}: compiled / eager"] = taken["ours bfloat16"] / taken["ours bfloat16 compiled"]
        rows[f"{name}: model TFLOP/s, bfloat16"] = (
            gpt.flops_per_token(config_of(shape, "modern")) * tokens / taken["ours bfloat16"] / 1e12
        )
    return rows


def data(rounds: int) -> dict[str, float]:
    """Batches alone, from a memory map."""
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        np.random.default_rng(0).integers(0, 50257, 1 << 25).astype(np.uint16).tofile(path)
        shards = [np.memmap(path, np.uint16, mode="r")]
        for T, B in ((256, 16), (256, 64), (1024, 64)):
            ours, items = chardata.steps(shards, T, B), Windows(np.asarray(shards[0][: 1 << 20]), T)
            loader = iter(DataLoader(items, batch_size=B, sampler=DistributedSampler(items, num_replicas=1, rank=0)))
            many = 200
            taken = medians({"ours": lambda o=ours: [next(o) for _ in range(many)], "items": lambda p=loader: next(p)}, rounds)
            rows[f"T{T} B{B}: Mtokens/s"] = many * T * B / taken["ours"] / 1e6
            rows[f"T{T} B{B}: ours / per-item DataLoader"] = taken["items"] * many / taken["ours"]
    return rows


def _scaling_rank(shape: tuple[int, ...], rounds: int, path: str) -> None:
    with ddp_setup.process_group() as world:
        ids = np.random.default_rng(0).integers(0, 65, 1 << 20).astype(np.uint16)
        *rest, batch, vocab = shape
        results = {}
        model = gpt.build(config_of(shape, "modern"), 0).to(world.device)
        for kind, B in (("weak", batch * world.size), ("strong", batch)):
            alone, together = model, ddp_setup.replicate(model, world)
            for name, wrapped in (("alone", alone), ("together", together)):
                size = B if name == "together" else B // world.size
                share = {"rank": world.rank, "world_size": world.size} if name == "together" else {}
                optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
                results[kind, name] = time_steps(wrapped, optimizer, ids, shape, size, share, rounds, world)
        buckets = torch.zeros(sum(p.numel() for p in model.parameters()), device=world.device)
        reduce = medians({"all-reduce": lambda: dist.all_reduce(buckets)}, rounds)["all-reduce"]
        if world.rank == 0:
            rows = {
                "weak scaling": results["weak", "alone"] / results["weak", "together"],
                "strong scaling": results["strong", "alone"] / results["strong", "together"],
                "all-reduce of the gradient, share of a step": reduce / results["weak", "together"],
                "all-reduce GB/s": buckets.nbytes / reduce / 1e9,
            }
            Path(path).write_text(json.dumps(rows))


def time_steps(model, optimizer, ids, shape, batch, share, rounds, world) -> float:
    """Median seconds of a step without the loop's own collectives where the model is not replicated."""
    steps = chardata.steps([ids], shape[3], batch, **share)

    def step() -> None:
        (micro,), total = next(steps)
        weight = world.size / total if share else 1 / total
        loss_sum, _ = gpt.loss(model, loop.to_device(micro, world.device))
        (loss_sum * weight).backward()
        optimizer.step()
        optimizer.zero_grad()

    return medians({"step": step}, rounds)["step"]
