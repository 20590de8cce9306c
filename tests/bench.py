"""Compare the speed of training steps with the usual loop, with frameworks, and with the machine.

    python tests/bench.py                      two sizes of models on the CPU; takes 15 minutes
    python tests/bench.py small --seconds 5    a quick look
    python tests/bench.py --nanogpt FOLDER     compare with a checkout of nanoGPT, too
    python tests/bench.py --gpu --nanogpt FOLDER                     GPT-2 124M on one GPU

accelerate and Lightning Fabric are compared if they are installed: `pip install -e '.[bench]'`.

Each row compares the tokens/s of two candidates, which take turns, one short call each, so that
other load on the machine affects both alike. The two figures are medians over all rounds. Then come
the median of the ratios within a round, and the range of the middle half of these ratios. If this
range is wider than the distance of the ratio from 1.0, the row ends with "unclear".
"""

import ctypes
import importlib.util
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import chardata  # noqa: E402
import ddp_setup  # noqa: E402
import gpt  # noqa: E402
import loop  # noqa: E402
import run  # noqa: E402

Step = Callable[[], Any]
Times = dict[str, list[float]]  # the seconds of each call of each candidate
Candidate = tuple[
    Any, ...
]  # a function that returns a Step, and its arguments after (world, shape)
World = ddp_setup.World


class Shape(NamedTuple):
    """The sizes of a model, and of its global batch: B windows of T tokens."""

    layers: int
    heads: int
    embd: int
    T: int
    B: int
    vocab: int = 65

    def config(self) -> gpt.Config:
        return gpt.Config(self.vocab, self.T, self.layers, self.heads, self.embd)


SHAPES = {
    "small": Shape(4, 4, 128, 64, 12),
    "large": Shape(6, 6, 384, 256, 16),
    "gpt2": Shape(12, 12, 768, 1024, 32, 50304),
}


# -------------------------------------------------- candidates: each function returns a step to call


def ours(
    world: World,
    shape: Shape,
    dtype: torch.dtype = torch.float32,
    compiled: bool = False,
    with_muon: bool = False,
) -> Step:
    """Train as run.py does."""
    model = gpt.build(shape.config(), 0)
    if compiled:
        gpt.compile_(model)
    replica = ddp_setup.replicate(model, world)
    optimizers = gpt.optimizers(model, "muon" if with_muon else "adamw", 3e-4, dtype=dtype)
    plan = chardata.BatchPlan(random_tokens(shape), shape.T, shape.B)
    steps = chardata.steps(plan, rank=world.rank, world_size=world.size)
    return partial(next, loop.train_(replica, optimizers, steps, gpt.loss, dtype=dtype, clip=1.0))


class GuideGPT(nn.Module):
    """A GPT as guides build it, from torch's own layers."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.embd
        self.tokens = nn.Embedding(shape.vocab, width)
        self.positions = nn.Embedding(shape.T, width)
        block = nn.TransformerEncoderLayer(
            width, shape.heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, shape.layers, nn.LayerNorm(width), False)
        self.head = nn.Linear(width, shape.vocab)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(shape.T))

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.positions.weight
        return self.head(self.blocks(x, self.mask, is_causal=True))


def guide(world: World, shape: Shape) -> Step:
    """Train as guides write it: float32, AdamW that is not fused, .item() in each step."""
    model = GuideGPT(shape).to(world.device)
    ddp = nn.parallel.DistributedDataParallel(model) if world.size > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    data = windows(shape)
    sampler = DistributedSampler(data, world.size, world.rank)
    loader = DataLoader(data, shape.B // world.size, sampler=sampler, drop_last=True)

    def steps() -> Iterator[float]:
        for epoch in count():
            sampler.set_epoch(epoch)
            for x, y in loader:
                x, y = x.to(world.device), y.to(world.device)
                loss = F.cross_entropy(ddp(x).flatten(0, 1), y.flatten())
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                yield loss.item()

    return partial(next, steps())


def accelerate(world: World, shape: Shape, dtype: torch.dtype) -> Step:
    """Train the same model as `ours`, compiled, as the guide of accelerate shows."""
    from accelerate import Accelerator, DistributedDataParallelKwargs

    accelerator = Accelerator(
        cpu=world.device.type == "cpu",
        mixed_precision="bf16" if dtype == torch.bfloat16 else "no",
        dynamo_backend="inductor",
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    model = gpt.build(shape.config(), 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    loader = DataLoader(windows(shape), shape.B // world.size, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def steps() -> Iterator[None]:
        for _ in count():
            for x, y in loader:
                accelerator.backward(model(x, y) / y.numel())
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                yield

    return partial(next, steps())


def fabric(world: World, shape: Shape, dtype: torch.dtype) -> Step:
    """Train the same model as `ours`, compiled, as the guide of Lightning Fabric shows."""
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy

    framework = Fabric(
        accelerator=world.device.type,
        strategy=DDPStrategy(gradient_as_bucket_view=True) if world.size > 1 else "auto",
        devices=world.size,
        precision="bf16-mixed" if dtype == torch.bfloat16 else "32-true",
    )
    framework.launch()
    model = gpt.build(shape.config(), 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    model, optimizer = framework.setup(torch.compile(model), optimizer)
    loader = DataLoader(windows(shape), shape.B // world.size, shuffle=True, drop_last=True)
    loader = framework.setup_dataloaders(loader)

    def steps() -> Iterator[None]:
        for _ in count():
            for x, y in loader:
                framework.backward(model(x, y) / y.numel())
                framework.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
                yield

    return partial(next, steps())


def nanogpt(world: World, shape: Shape, dtype: torch.dtype, folder: str) -> Step:
    """Train nanoGPT's model, compiled, as its train.py does it."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", f"{folder}/model.py")
    assert spec and spec.loader
    module = sys.modules["nanogpt_model"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sizes = shape.T, shape.vocab, shape.layers, shape.heads, shape.embd
    with redirect_stdout(sys.stderr):  # It prints the number of parameters.
        model = module.GPT(module.GPTConfig(*sizes, dropout=0.0, bias=False)).to(world.device)
        optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), world.device.type)
    compiled = torch.compile(model)
    tokens, generator = random_tokens(shape).astype(np.int64), np.random.default_rng(0)

    def step() -> None:
        starts = generator.integers(len(tokens) - shape.T, size=shape.B)
        rows = torch.from_numpy(np.stack([tokens[i : i + shape.T + 1] for i in starts]))
        if world.device.type == "cuda":
            rows = rows.pin_memory().to(world.device, non_blocking=True)
        with torch.autocast(world.device.type, dtype, enabled=dtype != torch.float32):
            _, loss = compiled(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def matrix_product(world: World, shape: Shape, dtype: torch.dtype) -> Step:
    """Compute square matrix products with as many FLOP as a step: the limit of the machine."""
    n = 8192 if world.device.type == "cuda" else 1024
    config = shape.config()
    weights = 12 * config.layers * config.embd**2 + config.vocab * config.embd
    # The formula is from Chowdhery et al., "PaLM", 2022, appendix B.
    flops = 6 * weights + 12 * config.layers * config.block_size * config.embd
    times = flops * shape.T * shape.B / (2 * n**3)
    a = torch.randn(n, n, device=world.device).to(dtype)
    # The last product has fewer columns, so that the number of FLOP is right.
    rest = a[:, : max(1, round(times % 1 * n))]
    return lambda: [a @ b for b in [a] * int(times) + [rest]]


def random_tokens(shape: Shape) -> np.ndarray:
    """Return random token ids, the same in each call.

    Their number is a multiple of the batch, so no batch of an epoch is smaller: it would be compiled
    anew.
    """
    length = 64 * shape.T * shape.B + shape.T + 1
    return np.random.default_rng(0).integers(0, shape.vocab, length).astype(np.uint16)


def windows(shape: Shape) -> TensorDataset:
    """Return the same tokens in windows that do not overlap, with their targets."""
    ids = torch.from_numpy(random_tokens(shape).astype(np.int64))
    x, y = (ids[i : i - shape.T - 1].view(-1, shape.T) for i in (0, 1))
    return TensorDataset(x, y)


# ----------------------------------------------------------------------------------- measurements


def measure(size: int, *job: Any) -> Times:
    """Return what time_steps measures in `size` new processes."""
    with tempfile.TemporaryDirectory() as folder:
        ddp_setup.spawn(time_steps, (f"{folder}/times", *job), size)
        return json.loads(Path(folder, "times").read_text())


def time_steps(
    rank: int,
    path: str,
    device: str,
    seconds: float,
    shape: Shape,
    candidates: dict[str, Candidate],
) -> None:
    """Call the candidates in turn, in at least 9 rounds, and write the seconds of each call as JSON.

    All ranks run this together, and rank 0 writes. With one rank, a candidate that fails is left
    out.
    """
    repeat = 4 if device == "cuda" else 1  # steps in a call: a GPU must not wait for each of them
    if sys.platform == "linux" and device == "cpu":  # as run.py does; it helps all candidates
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 1 << 25), mallopt(-1, 2**31 - 1)
    with ddp_setup.process_group(device) as world:

        def call(step: Step) -> float:
            wait(world)
            start = time.perf_counter()
            for _ in range(repeat):
                step()
            wait(world)
            return (time.perf_counter() - start) / repeat

        steps: dict[str, Step] = {}
        for name, (make, *settings) in candidates.items():
            try:
                steps[name] = make(world, shape, *settings)
                call(steps[name])  # compiles
                call(steps[name])
            except Exception:
                if world.size > 1:  # The other ranks would wait for this one.
                    raise
                traceback.print_exc()
                steps.pop(name, None)
        taken: Times = {name: [] for name in steps}
        end = time.perf_counter() + seconds
        for done in count():
            # All ranks do the same number of rounds.
            if any(ddp_setup.gather(done >= 9 and time.perf_counter() > end, world)):
                break
            for name, step in steps.items():
                taken[name].append(call(step))
        if world.rank == 0:
            Path(path).write_text(json.dumps(taken))


def wait(world: World) -> None:
    """Wait until the device has finished its work, and for the other ranks."""
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    ddp_setup.gather(None, world)


def compare(shape: Shape, times: Times, name: str, other: str) -> None:
    """Print a row, if both candidates have been measured."""
    if not {name, other} <= times.keys():
        return
    rate, other_rate = (shape.T * shape.B / statistics.median(times[n]) for n in (name, other))
    low, ratio, high = statistics.quantiles(
        (theirs / mine for mine, theirs in zip(times[name], times[other])), n=4, method="inclusive"
    )
    unclear = "  unclear" if high - low > abs(ratio - 1) else ""
    click.echo(
        f"{shape.layers}x{shape.embd:<4} {name:27} {rate:10,.0f}  {other:27} {other_rate:10,.0f}"
        f"  x {ratio:.2f} ({low:.2f} to {high:.2f}){unclear}"
    )


def bench(shape: Shape, device: str, seconds: float, nanogpt_folder: str | None) -> None:
    """Print the rows of one shape."""
    name = run.default_dtype(torch.device(device))
    compiled, muon, product = f"{name}, compiled", f"{name}, compiled, Muon", f"product, {name}"
    dtype = getattr(torch, name)
    others: dict[str, Candidate] = {
        package: (function, dtype)
        for package, function in (("accelerate", accelerate), ("lightning_fabric", fabric))
        if importlib.util.find_spec(package)
    }
    candidates: dict[str, Candidate] = {
        name: (ours, dtype),
        compiled: (ours, dtype, True),
        muon: (ours, dtype, True, True),
        product: (matrix_product, dtype),
        **others,
    }
    if device == "cpu":  # On a GPU, these two are slow and need much memory.
        candidates |= {"float32": (ours,), "guide, float32": (guide,)}
    if nanogpt_folder:
        candidates["nanoGPT"] = (nanogpt, dtype, nanogpt_folder)
    times = measure(1, device, seconds, shape, candidates)
    for mine in ("float32", compiled):
        compare(shape, times, mine, "guide, float32")
    compare(shape, times, compiled, name)
    compare(shape, times, muon, compiled)
    for other in (*others, "nanoGPT", product):
        compare(shape, times, compiled, other)

    if device == "cuda" and torch.cuda.device_count() < 2:
        return
    twice = shape._replace(B=2 * shape.B)
    candidates = {f"{compiled}, 2 ranks": candidates[compiled], **others}
    times = measure(2, device, seconds, twice, candidates)
    for other in others:
        compare(twice, times, f"{compiled}, 2 ranks", other)
    # One rank and two ranks cannot take turns in the same processes: take turns in new ones.
    times = {f"{name}, 1 rank": [], f"{name}, 2 ranks": []}
    for _ in range(5):
        for size, found in zip((1, 2), times.values()):
            step = measure(size, device, seconds / 10, shape, {name: (ours, dtype)})[name]
            found.append(statistics.median(step))
    compare(shape, times, f"{name}, 2 ranks", f"{name}, 1 rank")


# ------------------------------------------------------------------------------------ command line


@click.command()
@click.argument("shapes", nargs=-1, type=click.Choice([*SHAPES]))
@click.option("--seconds", default=20.0, show_default=True, help="Seconds of each comparison.")
@click.option("--nanogpt", "folder", type=click.Path(exists=True), help="Folder of nanoGPT.")
@click.option("--gpu", is_flag=True, help="Use one GPU, or two if there are several.")
def main(shapes: tuple[str, ...], seconds: float, folder: str | None, gpu: bool) -> None:
    """Compare training steps of the named SHAPES of models."""
    device = torch.cuda.get_device_name() if gpu else f"{ddp_setup.available_cpus()} CPU cores"
    click.echo(f"torch {torch.__version__}, {device}; figures in tokens/s")
    for name in shapes or (["gpt2"] if gpu else ["small", "large"]):
        bench(SHAPES[name], "cuda" if gpu else "cpu", seconds, folder)


if __name__ == "__main__":
    main()
