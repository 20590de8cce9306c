"""The model: build, loss, parameter groups, FLOPs, sample. Plain PyTorch; knows nothing of ranks.

    model = build(Config(vocab=65, block_size=256, layers=6, heads=6, embd=384), seed=0)
    loss_sum, count = loss(model, (x, y))          # x, y (B, T) int64
    for token in islice(sample(model, prompt), 100): ...

`arch="gpt2"` is GPT-2 (Radford et al., 2019) exactly; `arch="modern"` has rotary positions (Su et al., 2021),
RMS norm without weights (Zhang and Sennrich, 2019), normalised queries and keys (Henry et al., 2020), squared
ReLU (So et al., 2021), no biases, a head of its own, and residual branches that begin at zero.

Shapes: B batch, T time, C = embd, H heads, D = C / H, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Config(NamedTuple):
    """What a model's shapes follow from. Saved with its weights."""

    vocab: int
    block_size: int
    layers: int
    heads: int
    embd: int
    dropout: float = 0.0
    arch: str = "modern"


class Arch(NamedTuple):
    """What tells one architecture from another, as data."""

    norm: Callable[[int], Callable[[Tensor], Tensor]]  # width -> the function or module that normalises over it
    activation: Callable[[Tensor], Tensor]
    place: Callable[[Tensor, Tensor], Tensor]  # q and k (2, B, H, T, D), turns (2, T, D / 2) -> (2, B, H, T, D)
    bias: bool
    learned_positions: bool
    tied_head: bool
    branch_std: Callable[[Config], float]  # initial weights of the layers that add to the residual stream


def rms_norm(x: Tensor) -> Tensor:
    """(..., C) -> the same, scaled to a root mean square of 1 over C; in x's own type, which autocast's would not be."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    return x * (norm.square() / x.shape[-1] + 1e-6).rsqrt().to(x.dtype)


def _rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Normalise (..., T, D) over D and turn each pair (i, i + D / 2) by its angle, given as (cos, sin)."""
    cos, sin = turns
    a, b = rms_norm(x).chunk(2, dim=-1)
    return torch.cat((torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)), dim=-1)


def _turns(start: int, count: int, half: int, like: Tensor) -> Tensor:
    """(2, count, half): cosine and sine of the rotary angles, from 1 radian a token down to 1 / 10000."""
    rates = 10000.0 ** (-torch.arange(half, device=like.device) / half)
    angles = torch.outer(torch.arange(start, start + count, device=like.device), rates)
    return torch.stack((angles.cos(), angles.sin())).to(like.dtype)


ARCHS = {
    "gpt2": Arch(
        norm=nn.LayerNorm,
        activation=partial(F.gelu, approximate="tanh"),
        place=lambda x, turns: x,
        bias=True,
        learned_positions=True,
        tied_head=True,
        branch_std=lambda c: 0.02 / math.sqrt(2 * c.layers),
    ),
    "modern": Arch(
        norm=lambda width: rms_norm,
        activation=lambda x: F.relu(x).square(),
        place=_rotate,
        bias=False,
        learned_positions=False,
        tied_head=False,
        branch_std=lambda c: 0.0,
    ),
}


def attention(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """q (B, H, T, D), k and v (B, H, S, D), the queries being the last T of S positions -> (B, H, T, D).

    Written out for short windows in bfloat16 on a CPU, where the fused kernel's backward pass takes up to ten times
    as long (torch 2.13).
    """
    (B, H, T, D), S = q.shape, k.shape[-2]
    slow = q.device.type == "cpu" and q.dtype == torch.bfloat16 and S <= 512
    if T in (1, S) and not slow:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=T == S)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))  # (B * H, T or S, D)
    future = torch.full((T, S), -math.inf, dtype=q.dtype, device=q.device).triu(S - T + 1)
    weights = torch.baddbmm(future, q, k.transpose(1, 2), alpha=D**-0.5).softmax(dim=-1)  # scaled and masked on the way
    weights = F.dropout(weights, dropout) if dropout else weights
    return (weights @ v).view(B, H, T, D)


class Cache(NamedTuple):
    """Keys and values of the tokens seen so far, for one layer."""

    keys: Tensor  # (B, H, block_size, D)
    values: Tensor  # (B, H, block_size, D)


class Block(nn.Module):
    """x (B, T, C) -> (B, T, C): attention, then a feed-forward layer, each added to what came in."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        arch, width = ARCHS[config.arch], config.embd
        self.heads, self.dropout = config.heads, config.dropout
        self.place, self.activation = arch.place, arch.activation
        self.norm1, self.norm2 = arch.norm(width), arch.norm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=arch.bias)
        self.out = nn.Linear(width, width, bias=arch.bias)
        self.up = nn.Linear(width, 4 * width, bias=arch.bias)
        self.down = nn.Linear(4 * width, width, bias=arch.bias)

    def forward(self, x: Tensor, turns: Tensor, cache: Cache | None = None, start: int = 0) -> Tensor:
        x = x + self._drop(self.out(self._attend(self.norm1(x), turns, cache, start)))
        return x + self._drop(self.down(self.activation(self.up(self.norm2(x)))))

    def _attend(self, x: Tensor, turns: Tensor, cache: Cache | None, start: int) -> Tensor:
        B, T, C = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)  # (3, B, H, T, D)
        (q, k), v = self.place(qkv[:2], turns), qkv[2]
        if cache is not None:
            cache.keys[:, :, start : start + T], cache.values[:, :, start : start + T] = k, v
            k, v = cache.keys[:, :, : start + T], cache.values[:, :, : start + T]
        y = attention(q, k, v, self.dropout if self.training else 0.0)
        return y.transpose(1, 2).reshape(B, T, C)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class GPT(nn.Module):
    """tokens (B, T) int64 -> logits (B, T, V); with targets (B, T) int64 -> the sum of the losses, in nats."""

    def __init__(self, config: Config, checkpoint_activations: bool = False) -> None:
        super().__init__()
        arch = ARCHS[config.arch]
        self.config, self.checkpoint_activations = config, checkpoint_activations
        self.embedding = nn.Embedding(config.vocab, config.embd)
        self.positions = nn.Embedding(config.block_size, config.embd) if arch.learned_positions else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = arch.norm(config.embd)
        self.head = nn.Linear(config.embd, config.vocab, bias=False)
        if arch.tied_head:
            self.head.weight = self.embedding.weight

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, caches: list[Cache] | None = None, start: int = 0
    ) -> Tensor:
        T = tokens.shape[1]
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[start : start + T]
        x = F.dropout(x, self.config.dropout, self.training) if self.config.dropout else x
        if torch.is_autocast_enabled(x.device.type) and torch.get_autocast_dtype(x.device.type) == torch.bfloat16:
            x = x.bfloat16()  # the residual stream too: half the traffic
        turns = _turns(start, T, self.config.embd // self.config.heads // 2, x)
        for i, block in enumerate(self.blocks):
            if self.checkpoint_activations and self.training:
                x = checkpoint(block, x, turns, use_reentrant=False)
            else:
                x = block(x, turns, caches[i] if caches else None, start)
        x = self.norm(x)
        if targets is None:
            return cast(Tensor, self.head(x))
        # a GPU's products are worth their weights' traffic from thousands of rows on; a CPU keeps 128 MiB at a time
        return cross_entropy(x.flatten(0, 1), self.head.weight, targets.flatten(), 1 << (28 if x.is_cuda else 25))


def cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, logits: int = 1 << 25) -> Tensor:
    """x (N, C), head (V, C), targets (N,) int64 -> () float32, the sum of the losses in nats.

    No more than about `logits` float32 logits are there at a time: beyond that in parts, and what a part's gradient
    needs is computed again when it is. (F.linear_cross_entropy of torch 2.13 would do, but adds up in bfloat16.)
    """

    def part(x: Tensor, targets: Tensor) -> Tensor:
        # a view, as autocast would keep one bfloat16 copy of the weight for all parts, and add up their gradients in it
        return F.cross_entropy(F.linear(x, weight.view_as(weight)).float(), targets, reduction="sum")

    rows = max(1, logits // len(weight))
    if len(x) <= rows:
        return part(x, targets)
    pairs = zip(x.split(rows), targets.split(rows))
    return torch.stack([checkpoint(part, *pair, use_reentrant=False, preserve_rng_state=False) for pair in pairs]).sum()


def build(config: Config, seed: int, checkpoint_activations: bool = False) -> GPT:
    """A model with weights that depend on `config` and `seed` alone. ValueError for a config that cannot be."""
    _check(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT(config, checkpoint_activations)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                branch = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=ARCHS[config.arch].branch_std(config) if branch else 0.02)
    return model


def _check(config: Config) -> None:
    if config.arch not in ARCHS:
        raise ValueError(f"arch {config.arch!r} is not one of {', '.join(ARCHS)}")
    for name in ("vocab", "block_size", "layers", "heads", "embd"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} is {getattr(config, name)}; must be at least 1")
    if config.embd % config.heads:
        raise ValueError(f"embd {config.embd} is not divisible by heads {config.heads}")
    if config.embd // config.heads % 2 and ARCHS[config.arch].place is _rotate:
        raise ValueError(f"embd / heads is {config.embd // config.heads}; rotary positions need an even number")
    if not 0 <= config.dropout < 1:
        raise ValueError(f"dropout is {config.dropout}; must be at least 0 and below 1")


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """(x, y), each (B, T) int64 -> (sum of the token losses in nats, how many tokens). DDP-wrapped or not."""
    x, y = batch
    return model(x, y), y.numel()


def compile_(model: GPT) -> None:
    """Compile each block in place: one graph for all layers, no change of names, gradients ready block by block.

    For each shape anew: a graph for any shape would come with the second one, and from then on round, and draw dropout,
    otherwise than before, so that a resumed run would not be the unbroken one.
    """
    for block in model.blocks:
        block.compile(dynamic=False)


def groups(model: GPT) -> dict[str, list[nn.Parameter]]:
    """The parameters by kind: "matrices" of the blocks, "embeddings" with the head, "vectors"."""
    kinds: dict[str, list[nn.Parameter]] = {"matrices": [], "embeddings": [], "vectors": []}
    for name, parameter in model.named_parameters():
        kind = "vectors" if parameter.ndim < 2 else "matrices" if name.startswith("blocks.") else "embeddings"
        kinds[kind].append(parameter)
    return kinds


def flops_per_token(config: Config) -> int:
    """Forward and backward of one token of a full window: 6 for each weight of a matrix that it meets, and
    12 T C a layer for attention (Chowdhery et al., "PaLM", 2022, appendix B)."""
    matrices = 12 * config.layers * config.embd**2 + config.vocab * config.embd
    return 6 * matrices + 12 * config.layers * config.block_size * config.embd


@torch.no_grad()
def sample(
    model: GPT,
    prompt: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Iterator[int]:
    """prompt (T,) int64, T >= 1 -> one id after the other, without end.

    Each token costs one position: keys and values are kept. A context that has grown to `block_size` tokens
    is cut to its last half and read anew, so that no token is ever more than block_size - 1 away.
    """
    if not len(prompt):
        raise ValueError("the prompt is empty; at least one token is needed")
    config, weight = model.config, model.embedding.weight
    shape = (1, config.heads, config.block_size, config.embd // config.heads)
    caches = [Cache(weight.new_zeros(shape), weight.new_zeros(shape)) for _ in model.blocks]
    context, start = prompt[-config.block_size :].tolist(), 0
    training = model.training
    model.eval()
    try:
        while True:
            tokens = torch.tensor([context[start:]], device=weight.device)
            logits = model(tokens, caches=caches, start=start)[0, -1]
            context.append(choose(logits, temperature, top_k, top_p, generator))
            yield context[-1]
            start = len(context) - 1
            if len(context) > config.block_size:
                context, start = context[-max(1, config.block_size // 2) :], 0
    finally:
        model.train(training)


def choose(logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator | None) -> int:
    """logits (V,) -> one id, drawn from the `top_k` likeliest (0: all) among the likeliest that together have
    a probability of `top_p` (Holtzman et al., 2020); temperature 0 takes the likeliest."""
    if temperature == 0:
        return int(logits.argmax())
    ranked, ids = logits.float().sort(descending=True)
    ranked = (ranked - ranked[0]) / max(temperature, 1e-30)  # the likeliest is at 0, however cold it is
    probabilities = ranked[: top_k or None].softmax(0)
    likelier = probabilities.cumsum(0) - probabilities
    probabilities[1:][likelier[1:] >= top_p] = 0
    return int(ids[torch.multinomial(probabilities, 1, generator=generator)])
