"""How fast the toolkit is, as ratios measured in one run on the machine at hand.

    python tests/bench.py                         all of it, some minutes
    python tests/bench.py training data           parts of it
    python tests/bench.py --json > bench.json

Whatever is compared takes turns, call by call, so that what else the machine does meets all alike. Figures are
medians. The limits of the machine come first: what could be reached at all.
"""

import json
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import chardata  # noqa: E402
import ckpt  # noqa: E402
import ddp_setup  # noqa: E402
import gpt  # noqa: E402
import loop  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Call = Callable[[], Any]


class Shape(NamedTuple):
    layers: int
    embd: int
    T: int
    B: int
    vocab: int = 65

    def __str__(self) -> str:
        return f"{self.layers}x{self.embd} T={self.T} B={self.B}" + (f" V={self.vocab}" if self.vocab != 65 else "")


LARGE, SMALL, GPT2 = Shape(6, 384, 256, 16), Shape(4, 128, 64, 12), Shape(12, 768, 1024, 16, 50304)
SHAPES = [LARGE, SMALL] + [GPT2] * (DEVICE.type == "cuda")


class Row(NamedTuple):
    what: str
    figure: float
    unit: str
    against: str = ""  # what it is compared with
    other: float = math.nan
    ratio: float = math.nan  # figure / other


def row(what: str, figure: float, unit: str, against: str, other: float) -> Row:
    return Row(what, figure, unit, against, other, figure / other)


def medians(contenders: dict[str, Call], seconds: float = 20, least: int = 5) -> dict[str, float]:
    """Median seconds of one call of each; they take turns until the time is up. The first two turns do not count."""
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    turns, end = 0, math.inf
    while turns < least + 2 or time.perf_counter() < end:
        for name, call in contenders.items():
            wait()
            start = time.perf_counter()
            call()
            wait()
            taken[name].append(time.perf_counter() - start)
        turns += 1
        end = time.perf_counter() + seconds if turns == 2 else end
    return {name: statistics.median(times[2:]) for name, times in taken.items()}


def wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def random_tokens(vocab: int, n: int = 1 << 20) -> np.ndarray:
    return np.random.default_rng(0).integers(0, vocab, n).astype(np.uint16)


# ------------------------------------------------------------------------------------- the loop of the guides


class PlainBlock(nn.Module):
    """Attention with a mask, every layer with a bias, as the guides write it."""

    def __init__(self, shape: Shape, heads: int) -> None:
        super().__init__()
        width, self.heads = shape.embd, heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.register_buffer("mask", torch.tril(torch.ones(shape.T, shape.T)))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(C, dim=2))
        scores = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))
        weights = F.softmax(scores.masked_fill(self.mask[:T, :T] == 0, float("-inf")), dim=-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(B, T, C))
        return x + self.feed(self.norm2(x))


class PlainGPT(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(shape.vocab, shape.embd), nn.Embedding(shape.T, shape.embd)
        self.blocks = nn.Sequential(*(PlainBlock(shape, heads_of(shape)) for _ in range(shape.layers)))
        self.norm, self.head = nn.LayerNorm(shape.embd), nn.Linear(shape.embd, shape.vocab)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(x)))


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """One window an item, cut from a tensor of ids."""

    def __init__(self, ids: np.ndarray, T: int) -> None:
        self.ids, self.T = torch.from_numpy(ids.astype(np.int64)), T

    def __len__(self) -> int:
        return len(self.ids) - self.T

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.ids[i : i + self.T], self.ids[i + 1 : i + 1 + self.T]


def plain_step(shape: Shape, accum: int = 1, rank: int = 0, size: int = 1) -> Call:
    """A step of theirs: float32, unfused AdamW, single items, every micro-batch synchronised, .item() every step."""
    model: nn.Module = PlainGPT(shape).to(DEVICE)
    if size > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    data = Windows(random_tokens(shape.vocab), shape.T)
    sampler = DistributedSampler(data, num_replicas=size, rank=rank)
    loader = iter(DataLoader(data, batch_size=shape.B // size // accum, sampler=sampler))

    def step() -> float:
        optimizer.zero_grad()
        for x, y in islice(loader, accum):
            logits = model(x.to(DEVICE))
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.to(DEVICE).view(-1)) / accum
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


# ------------------------------------------------------------------------------------------------------ ours


def heads_of(shape: Shape) -> int:
    return max(4, shape.embd // 64)


def make(shape: Shape, arch: str = "modern", optimizer: str = "adamw", **more: Any) -> tuple[gpt.GPT, list[Any]]:
    config = gpt.Config(shape.vocab, shape.T, shape.layers, heads_of(shape), shape.embd, 0.0, arch)
    model = gpt.build(config, 0, **more).to(DEVICE)
    kinds = gpt.groups(model)
    rest = kinds["embeddings"] + kinds["vectors"] + (kinds["matrices"] if optimizer == "adamw" else [])
    optimizers: list[Any] = [torch.optim.AdamW(rest, lr=3e-4, fused=True)]
    if optimizer == "muon":
        optimizers.append(torch.optim.Muon(kinds["matrices"], lr=3e-4))
    return model, optimizers


def our_step(shape: Shape, dtype: torch.dtype, compiled: bool = False, **how: Any) -> Call:
    """A step of loop.train_ on windows from chardata.steps, as run.py does it."""
    model, optimizers = make(shape, **how)
    if compiled:
        gpt.compile_(model)
    steps = chardata.steps([random_tokens(shape.vocab)], shape.T, shape.B)
    training = loop.train_(model, optimizers, steps, gpt.loss, dtype=dtype, clip=1.0)
    return lambda: next(training)


def bare_step(shape: Shape, dtype: torch.dtype) -> Call:
    """Forward, backward, optimizer of the same model, on one batch: no data, no clipping, no loop."""
    model, (optimizer,) = make(shape)
    (batch,), total = next(chardata.steps([random_tokens(shape.vocab)], shape.T, shape.B))
    x, y = (t.to(DEVICE) for t in batch)

    def step() -> None:
        with torch.autocast(DEVICE.type, dtype, enabled=dtype != torch.float32):
            loss = model(x, y) / total
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def matmul_rate(dtype: torch.dtype) -> float:
    """FLOP/s"""
    n = 4096 if DEVICE.type == "cuda" else 1024
    a = torch.randn(n, n, device=DEVICE).to(dtype)
    return 2 * n**3 / medians({"": lambda: a @ a}, 2)[""]


# ------------------------------------------------------------------------------------------------- the parts


def limits() -> Iterator[Row]:
    """What this machine can do at best."""
    for dtype in (torch.float32, torch.bfloat16):
        yield Row(f"matrix product, {name_of(dtype)}", matmul_rate(dtype) / 1e9, "GFLOP/s")
    a = torch.empty(1 << 26, device=DEVICE)
    b = torch.empty_like(a)
    yield Row("copy, read and written", 2 * a.nbytes / medians({"": lambda: b.copy_(a)}, 2)[""] / 1e9, "GB/s")
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        raw = os.urandom(1 << 26)
        yield Row("write and fsync", len(raw) / medians({"": lambda: write(folder, raw)}, 2)[""] / 1e9, "GB/s")


def write(folder: str, raw: bytes) -> None:
    with open(Path(folder) / "raw", "wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def training() -> Iterator[Row]:
    """One process: our loop against the guides', and against the bare step."""
    for shape in SHAPES:
        tokens = shape.T * shape.B
        flops = tokens * gpt.flops_per_token(make(shape)[0].config)
        for dtype in (torch.float32, torch.bfloat16):
            taken = medians(
                {
                    "the guides' loop": plain_step(shape),
                    "its bare step": bare_step(shape, dtype),
                    "adamw": our_step(shape, dtype),
                    "adamw, compiled": our_step(shape, dtype, compiled=True),
                    "muon": our_step(shape, dtype, optimizer="muon"),
                    "gpt2, adamw": our_step(shape, dtype, arch="gpt2"),
                },
                25,
            )
            plain, bare = taken.pop("the guides' loop"), taken.pop("its bare step")
            for name, seconds in taken.items():
                what = f"{shape} {name_of(dtype)} {name}"
                yield row(what, tokens / seconds, "tokens/s", "guides' loop, float32", tokens / plain)
            yield row(f"{shape} {name_of(dtype)} adamw", taken["adamw"] * 1e3, "ms", "bare step", bare * 1e3)
            reached = flops / taken["adamw"]
            yield row(
                f"{shape} {name_of(dtype)} adamw", reached / 1e9, "GFLOP/s", "matrix product", matmul_rate(dtype) / 1e9
            )


def data() -> Iterator[Row]:
    """Batches alone, from a memory map, and the memory that it takes."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/tokens.bin"
        random_tokens(50257, 1 << 25).tofile(path)
        shards = [np.memmap(path, np.uint16, mode="r")]
        for T, B in ((128, 16), (256, 64), (1024, 64)):
            items = Windows(np.asarray(shards[0][: 1 << 20]), T)
            loader = iter(DataLoader(items, batch_size=B, sampler=DistributedSampler(items, num_replicas=1, rank=0)))
            steps = chardata.steps(shards, T, B)
            taken = medians({"ours": lambda: [next(steps) for _ in range(100)], "theirs": lambda: next(loader)}, 3)
            theirs = T * B / taken["theirs"] / 1e6
            yield row(
                f"windows, T={T} B={B}", 100 * T * B / taken["ours"] / 1e6, "Mtokens/s", "DataLoader of items", theirs
            )
        for name, size in (("small", 1 << 20), ("sparse", 20 << 30)):
            with open(f"{folder}/{name}", "wb") as file:
                file.truncate(size)
        flags = ["--tokens", "byte", "--no-compile"]  # which it would be by default, as a long run
        small, sparse = (first_step(*flags, "--data", f"{folder}/{name}") for name in ("small", "sparse"))
        yield row("20 GB file: process start to first step", sparse[0], "s", "1 MB file", small[0])
        yield row("20 GB file: peak memory then", sparse[1] / 1e6, "MB", "1 MB file", small[1] / 1e6)


def first_step(*flags: str) -> tuple[float, int]:
    """(seconds from the start of a process to its first line of metrics, bytes it had in memory at most)."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, ROOT / "run.py", "--out", out, "--log-every", "1", "--val-fraction", "0", *flags]
        start = time.perf_counter()
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
        ) as process:
            assert process.stdout and process.stdout.readline()
            seconds, peak = time.perf_counter() - start, peak_memory(process.pid)
            process.kill()
    return seconds, peak


def peak_memory(process: int | str = "self") -> int:
    """Bytes; of this process or another, on a GPU of this one."""
    if process == "self" and DEVICE.type == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path(f"/proc/{process}/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def scaling() -> Iterator[Row]:
    """One rank and two; a CPU's with one core each. Weak: the batch grows with the ranks. Strong: it does not."""
    if DEVICE.type == "cuda" and torch.cuda.device_count() < 2:
        return
    for shape in (LARGE, SMALL):
        twice = shape._replace(B=2 * shape.B)
        jobs = {"one": (1, shape, ""), "weak": (2, twice, ""), "strong": (2, shape, ""), "guides": (2, shape, "plain")}
        found: dict[str, list[dict[str, float]]] = {name: [] for name in jobs}
        for _ in range(2):
            for name, (size, *rest) in jobs.items():
                found[name].append(on_ranks(size, *rest))
        step = {name: statistics.median(f["step"] for f in runs) for name, runs in found.items()}
        reduce = statistics.median(f["reduce"] for f in found["weak"])
        rate = {name: job[1].T * job[1].B / step[name] for name, job in jobs.items()}
        yield row(f"{shape} each, 2 ranks", rate["weak"], "tokens/s", "twice 1 rank", 2 * rate["one"])
        yield row(f"{shape} over 2 ranks", rate["strong"], "tokens/s", "twice 1 rank", 2 * rate["one"])
        yield row(f"{shape} over 2 ranks, accum 4", rate["strong"], "tokens/s", "guides' loop", rate["guides"])
        yield row(f"{shape} each: all-reduce alone", reduce * 1e3, "ms", "of a step", step["weak"] * 1e3)


def on_ranks(size: int, *job: Any) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        assert ddp_setup.spawn(time_steps, size, f"{folder}/found", *job) == 0
        return json.loads(Path(f"{folder}/found").read_text())


def time_steps(path: str, shape: Shape, kind: str) -> None:
    """Median seconds of a step on this many ranks, and of an all-reduce of its gradient by itself."""
    with ddp_setup.process_group() as world:
        torch.set_num_threads(1)
        if kind == "plain":
            step = plain_step(shape, 4, world.rank, world.size)
        else:
            model, optimizers = make(shape)
            share = {"rank": world.rank, "world_size": world.size}
            steps = chardata.steps([random_tokens(shape.vocab)], shape.T, shape.B, **share)
            training = loop.train_(ddp_setup.replicate(model, world), optimizers, steps, gpt.loss, clip=1.0)
            step = lambda: next(training)  # noqa: E731
        times = []
        for _ in range(7 if shape == LARGE else 30):  # as many on each rank
            start = time.perf_counter()
            step()
            wait()
            times.append(time.perf_counter() - start)
        found = {"step": statistics.median(times[2:])}
        if world.size > 1 and kind != "plain":
            gradient = torch.zeros(sum(p.numel() for p in model.parameters()), device=world.device)
            times = []
            for _ in range(10):
                start = time.perf_counter()
                dist.all_reduce(gradient)
                wait()
                times.append(time.perf_counter() - start)
            found["reduce"] = statistics.median(times[2:])
        if world.rank == 0:
            Path(path).write_text(json.dumps(found))


def checkpoints() -> Iterator[Row]:
    """What a save costs the loop, and how long it takes until it is durable."""
    for shape in SHAPES:
        model, optimizers = make(shape)
        training = loop.train_(model, optimizers, chardata.steps([random_tokens(shape.vocab)], shape.T, 1), gpt.loss)
        next(training)
        state = ckpt.snapshot(model, optimizers)
        tensors = [t for s in (state["model"], *state["optimizers"][0]["state"].values()) for t in s.values()]
        theirs = [*model.parameters(), *(t for s in optimizers[0].state.values() for t in s.values())]
        assert sum(t.nbytes for t in tensors) == sum(t.nbytes for t in theirs)
        with tempfile.TemporaryDirectory(dir=ROOT) as folder:
            raw = os.urandom(os.path.getsize(f"{folder}/{ckpt.save(folder, state, 0).name}"))
            taken = medians(
                {
                    "snapshot": lambda: ckpt.snapshot(model, optimizers),
                    "copy": lambda: [t.detach().to("cpu", copy=True) for t in theirs],
                    "save": lambda: ckpt.save(folder, state, 0),
                    "write": lambda: write(folder, raw),
                },
                10,
            )
        what = f"{shape}, {len(raw) / 1e6:,.0f} MB"
        yield row(f"{what}: snapshot", taken["snapshot"] * 1e3, "ms", "a copy", taken["copy"] * 1e3)
        yield row(f"{what}: durable", taken["save"] * 1e3, "ms", "write and fsync", taken["write"] * 1e3)


def start_up() -> Iterator[Row]:
    """Whole processes, from their start."""

    def python(*arguments: str) -> Call:
        return lambda: subprocess.run([sys.executable, *arguments], check=True, capture_output=True, cwd=ROOT)

    taken = medians(
        {
            "nothing": python("-c", ""),
            "torch": python("-c", "import torch"),
            "help": python("run.py", "--help"),
            "step": first_step,
        },
        0,
    )
    yield row("run.py --help", taken["help"], "s", "python alone", taken["nothing"])
    yield row("run.py, to its first step", taken["step"], "s", "import torch", taken["torch"])


def sampling() -> Iterator[Row]:
    for shape in (LARGE, SMALL):
        model, _ = make(shape)
        prompt, count = torch.zeros(1, dtype=torch.int64, device=DEVICE), shape.T - 1

        @torch.no_grad()
        def anew(model: gpt.GPT = model, prompt: Tensor = prompt, count: int = count) -> None:
            tokens = prompt
            for _ in range(count):
                token = gpt.choose(model(tokens[None])[0, -1], 1.0, 0, 1.0, None)
                tokens = torch.cat((tokens, tokens.new_tensor([token])))

        cached = lambda model=model, prompt=prompt, count=count: list(islice(gpt.sample(model, prompt), count))  # noqa: E731
        taken = medians({"cached": cached, "anew": anew}, 5)
        yield row(f"{shape}: sampling", count / taken["cached"], "tokens/s", "without a cache", count / taken["anew"])


def memory() -> Iterator[Row]:
    """Peak of a few steps of a fresh process, less what it had before."""
    base = LARGE if DEVICE.type == "cpu" else GPT2._replace(vocab=65)
    wide = base._replace(vocab=50304)
    for shape, name, how in (
        (base, "accum 8", {"accum": 8}),
        (base, "activations recomputed", {"checkpoint_activations": True}),
        (wide, "accum 8", {"accum": 8}),
        (wide, "activations recomputed", {"checkpoint_activations": True}),
    ):
        plain, less = (fresh(steps_memory, shape, **h) / 1e6 for h in ({}, how))
        yield row(f"{shape}: {name}", less, "MB", "without", plain)


def fresh(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """The function's result from a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args, **named).result()


def steps_memory(shape: Shape, accum: int = 1, **how: Any) -> int:
    model, optimizers = make(shape, **how)
    before = peak_memory()
    steps = chardata.steps([random_tokens(shape.vocab)], shape.T, shape.B, accum=accum)
    for _ in islice(loop.train_(model, optimizers, steps, gpt.loss, dtype=torch.bfloat16), 3):
        wait()
    return peak_memory() - before


PARTS = [limits, training, data, scaling, checkpoints, start_up, sampling, memory]


@click.command()
@click.argument("parts", nargs=-1, type=click.Choice([part.__name__ for part in PARTS]))
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def main(parts: tuple[str, ...], as_json: bool) -> None:
    """Measure all PARTS, or those that are named."""
    rows = []
    with ddp_setup.process_group():  # which sees to threads and memory, as in a real run
        for part in PARTS:
            for line in part() if not parts or part.__name__ in parts else ():
                rows.append({"part": part.__name__, **line._asdict()})
                if not as_json:
                    click.echo(text_of(line))
    if as_json:
        machine = {"torch": torch.__version__, "device": str(DEVICE), "cores": ddp_setup.cores()}
        click.echo(json.dumps({**machine, "rows": rows}, indent=1))


def text_of(line: Row) -> str:
    against = f"  {line.against:24} {line.other:12,.4g}  x {line.ratio:.2f}" if line.against else ""
    return f"{line.what:48} {line.figure:12,.4g} {line.unit:10}{against}"


if __name__ == "__main__":
    main()
