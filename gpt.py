"""Build a GPT language model and its optimizers, compute its loss, and sample from it.

    model = build(Config(vocab=65, block_size=256, layers=6, heads=6, embd=384), seed=0)
    loss_sum, count = loss(model, (x, y))  # x and y: (B, T) int64
    (loss_sum / count).backward()
    for token in islice(sample(model.eval(), prompt), 100):
        print(int(token))

`arch="gpt2"` computes the same function as GPT-2 (Radford et al., 2019). `arch="modern2"` learns
faster. It has rotary positions (Su et al., 2021), RMS norm without weights (Zhang and Sennrich,
2019), normalised queries and keys (Henry et al., 2020), squared ReLU (So et al., 2021), no biases,
an untied output layer, blocks that start as the identity, and a causal convolution over the
embeddings, like the Canon layers of Allen-Zhu (2025).

Letters in shapes: B sequences, T new tokens in each, C = embd, H = heads, D = C / H, V = vocab, and
S = T + the number of cached keys.
"""

import math
import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

LOOK_BACK = 3  # earlier tokens in the convolution over the embeddings


class Config(NamedTuple):
    """The settings that define a model. Save them with the weights."""

    vocab: int
    block_size: int  # tokens in the longest context. modern2 has this limit only in `sample`
    layers: int
    heads: int
    embd: int  # width of the residual stream
    dropout: float = 0.0  # probability
    arch: str = "modern2"  # or "gpt2"


def rms_norm(x: Tensor) -> Tensor:
    """Divide x by its root mean square over the last dimension, and keep its dtype."""
    # On a CPU, F.rms_norm takes 1.6 times as long.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return x * (norm.square() / x.shape[-1] + 1e-6).rsqrt().to(x.dtype)


def rope(start: int, count: int, half: int, like: Tensor) -> Tensor:
    """Compute cosines and sines of the rotary angles of `count` positions from `start` on.

    Angle i < half = D / 2 grows by 10000 ** (-i / half) radians per position.
    Returns (2, count, 1, half), with the dtype and device of `like`.
    """
    rates = 10000.0 ** (-torch.arange(half, device=like.device) / half)
    angles = torch.outer(torch.arange(count, device=like.device) + start, rates)[:, None]
    return torch.stack((angles.cos(), angles.sin())).to(like.dtype)


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + D / 2) of x (B, T, 2 H, D). cos_sin: see rope."""
    cos, sin = cos_sin
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Block(nn.Module):
    """One transformer layer: x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, C = config, config.embd
        self.gpt2 = gpt2 = config.arch == "gpt2"
        linear = partial(nn.Linear, bias=gpt2)
        self.norm1, self.norm2 = (nn.LayerNorm(C) if gpt2 else rms_norm for _ in range(2))
        self.qkv, self.out = linear(C, 3 * C), linear(C, C)
        self.up, self.down = linear(C, 4 * C), linear(4 * C, C)

    def forward(self, x: Tensor, cos_sin: Tensor, cache: Tensor | None = None) -> Tensor:
        """Map x (B, T, C) to (B, T, C). cache: (2, B, H, S, D), see GPT.forward."""
        T, H = x.shape[1], self.config.heads
        dropout = self.config.dropout * self.training
        # (B, T, 2 H, D) and (B, T, H, D)
        qk, v = self.qkv(self.norm1(x)).unflatten(2, (3 * H, -1)).split((2 * H, H), 2)
        if not self.gpt2:
            qk = rotate(rms_norm(qk), cos_sin)
        q, k = qk.transpose(1, 2).chunk(2, 1)  # (B, H, T, D) each
        v = v.transpose(1, 2)
        if cache is not None:
            cache[..., -T:, :] = torch.stack((k, v))
            k, v = cache
        # T is S, or 1: the last token, which sees all others. torch.export needs a real bool.
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=bool(T > 1))
        x = x + F.dropout(self.out(y.transpose(1, 2).flatten(2)), dropout)
        y = self.up(self.norm2(x))
        if self.gpt2:
            y = F.gelu(y, approximate="tanh")
        else:
            y = F.relu(y)
            y = y * y  # On CUDA, autocast would compute y.square() in float32.
        return x + F.dropout(self.down(y), dropout)


def after_lookup(
    model: "GPT", x: Tensor, targets: Tensor | None, caches: Tensor | None, start: int
) -> Tensor:
    """Do what GPT.forward does after the lookup of the embeddings x (B, S, C) of all tokens."""
    config, S = model.config, x.shape[1]
    if config.arch == "gpt2":
        x = x + model.positions.weight[:S]
    else:
        padded = F.pad(x, (0, 0, LOOK_BACK, 0))  # zeros before the first token
        for i in range(1, LOOK_BACK + 1):
            x = x + padded[:, LOOK_BACK - i :][:, :S] * model.look_back[:, i - 1]
    x = F.dropout(x[:, start:], config.dropout, model.training)
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16:
        x = x.bfloat16()  # Autocast would keep the residual stream in float32.
    cos_sin = rope(start, S - start, config.embd // config.heads // 2, x)
    for i, block in enumerate(model.blocks):
        if model.checkpoint_activations and model.training:
            x = checkpoint(block, x, cos_sin, use_reentrant=False)
        else:
            x = block(x, cos_sin, None if caches is None else caches[i])
    x = model.norm(x)
    if targets is None:
        return model.head(x if caches is None else x[:, -1])
    return F.cross_entropy(model.head(x).flatten(0, 1).float(), targets.flatten(), reduction="sum")


class GPT(nn.Module):
    """A decoder-only transformer. Use `build`: the constructor does not initialise the weights.

    checkpoint_activations: True saves memory. The backward pass then computes each block again.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, C = config, config.embd
        self.checkpoint_activations, gpt2 = False, config.arch == "gpt2"
        # Not a method: in a deep copy, a compiled method would stay bound to the original.
        self.after_lookup = after_lookup
        # On the device "meta", nn.Embedding(V, C) would import 800 modules, for a second.
        embedding = partial(nn.Embedding.from_pretrained, freeze=False)
        self.embedding = embedding(torch.empty(config.vocab, C))
        if gpt2:
            self.positions = embedding(torch.empty(config.block_size, C))
        else:
            self.look_back = nn.Parameter(torch.empty(C, LOOK_BACK))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(C) if gpt2 else rms_norm
        self.head = nn.Linear(C, config.vocab, bias=False)
        if gpt2:
            self.head.weight = self.embedding.weight

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        caches: Tensor | None = None,
        start: int = 0,
    ) -> Tensor:
        """Return the logits (B, T, V). With targets, return the loss sum in nats, a float32 scalar.

        tokens: (B, S) int64, all tokens of the context. For gpt2, S must be at most block_size.
        targets: (B, T) int64.
        caches: (layers, 2, B, H, S, D), for sampling. The first `start` positions hold the keys and
            values of earlier calls. This call adds those of the other T positions, and returns only
            the logits of the last token, (B, V). T must be 1, or S with start = 0.
        """
        # The lookup is not compiled: compiled for a CPU, its gradient depends on the threads.
        return self.after_lookup(self, self.embedding(tokens), targets, caches, start)


def check(config: Config) -> None:
    """Raise ValueError if there is no such model."""
    if config.arch not in ("gpt2", "modern2"):
        raise ValueError(f"arch {config.arch!r} is not gpt2 or modern2")
    if config.embd % (2 * config.heads):
        raise ValueError(f"embd {config.embd} must be a multiple of 2 * heads {config.heads}")


def build(config: Config, seed: int | None) -> GPT:
    """Build a model on the CPU. Its initial weights depend only on `config` and `seed`.

    seed: None leaves the parameters on the device "meta", without values.
    """
    check(config)
    with torch.device("meta"):
        model = GPT(config)
    if seed is not None:
        for name, parameter in model.named_parameters():
            # swap_tensors keeps the parameter object, so a tied head stays tied.
            weight = initial_weight(config, seed, name, parameter.shape)
            torch.utils.swap_tensors(parameter, nn.Parameter(weight))
    return model


def initial_weight(config: Config, seed: int, name: str, shape: torch.Size) -> Tensor:
    """Compute the initial values of a parameter on the CPU, from the arguments alone.

    name: from GPT.named_parameters(). Remove the prefix that the names have in a wrapper.
    shape: of the whole parameter, also if this process holds only a part of it.
    """
    weight = torch.empty(shape, dtype=torch.float32, device="cpu")
    if weight.ndim == 1:  # Norm weights are 1, and biases are 0.
        return weight.fill_(name.endswith("weight"))
    gpt2, std = config.arch == "gpt2", 0.02
    if name.endswith(("out.weight", "down.weight")):
        std *= (2 * config.layers) ** -0.5 if gpt2 else 0
    elif name in ("embedding.weight", "look_back") and not gpt2:
        std = 0.1
    # crc32 is enough, because a CPU generator uses only 32 bits of its seed.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return weight.normal_(0, std, generator=generator)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Compute (sum of the token losses in nats, number of tokens) of a batch.

    model: a GPT or a wrapper of one.
    batch: (x, y), both (B, T) int64. y[b, t] is the token after x[b, t].
    """
    x, y = batch
    return model(x, y), y.numel()


def compile_(model: GPT) -> None:
    """Compile all of the model but the lookup of the embeddings, in place, as one graph.

    The names of the parameters do not change. Do not sample from a compiled model: torch would
    compile it again for each length.
    """
    # By default, torch compiles the first 8 shapes only. Uncompiled code rounds differently, so the
    # result would depend on which shapes occur first.
    torch.compiler.config.recompile_limit = 64
    model.after_lookup = torch.compile(after_lookup, dynamic=False)


# -------------------------------------------------------------------------------------- optimizers


def optimizers(
    model: GPT,
    name: str,
    lr: float,
    weight_decay: float = 0.1,
    dtype: torch.dtype = torch.bfloat16,
    momentum: float = 0.8,
) -> list[torch.optim.Optimizer]:
    """Build the optimizers of a GPT itself, not of a wrapper, that is on its device.

    name: "adamw", or "muon": Muon for the matrices of the blocks, and AdamW for all other
        parameters, with twice the rate.
    lr: Muon's updates have the size of AdamW's (Liu et al., 2025), so rates can be compared.
    weight_decay: is not applied to biases and norm weights.
    dtype, momentum: see Muon.
    """
    groups: dict[str, list[nn.Parameter]] = {}
    for key, parameter in model.named_parameters():
        kind = "matrices" if key.startswith("blocks.") else "embeddings"
        groups.setdefault("vectors" if parameter.ndim < 2 else kind, []).append(parameter)
    muon = list[torch.optim.Optimizer]()
    if name == "muon":
        muon = [Muon(groups.pop("matrices"), lr, weight_decay, momentum, dtype)]
        lr *= 2
    elif name != "adamw":
        raise ValueError(f"optimizer {name!r} is not muon or adamw")
    settings = [
        {"params": parameters, "weight_decay": weight_decay * (kind != "vectors")}
        for kind, parameters in groups.items()
    ]
    return [torch.optim.AdamW(settings, lr, (0.9, 0.95), fused=True), *muon]


class Muon(torch.optim.Optimizer):
    """Optimize matrices, which are not sharded, with Muon (Jordan et al., 2024).

    The updates are those of torch.optim.Muon with adjust_lr_fn="match_rms_adamw", up to rounding.
    They take less time, because the matrices of a shape are one batch.
    dtype: of the Newton-Schulz iterations. In float32, different numbers of ranks agree better.
    """

    # Private: GradScaler then sets `found_inf`. Otherwise the host would wait for the device. If
    # you use a GradScaler, call its unscale_ before its step.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        matrices: Iterable[Tensor],
        lr: float,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        settings = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "dtype": dtype}
        super().__init__(matrices, settings)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update the matrices that have a gradient, unless found_inf is not 0."""
        bad = getattr(self, "found_inf", torch.zeros(())) > 0
        for group in self.param_groups:
            lr = torch.where(bad, 0.0, group["lr"])
            shapes: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append(p)
            for shape, matrices in shapes.items():
                momenta = []
                for p in matrices:
                    state = self.state[p]
                    if not state:
                        state["momentum_buffer"] = torch.zeros_like(p)
                    buffer = state["momentum_buffer"]
                    # If it is bad, this changes nothing.
                    grad = torch.where(bad, buffer, p.grad)  # type: ignore[arg-type]
                    buffer.lerp_(grad, 1 - group["momentum"])
                    momenta.append(grad.lerp(buffer, group["momentum"]))  # Nesterov's
                updates = orthogonalize(torch.stack(momenta), group["dtype"])
                for p, update in zip(matrices, updates * (lr * 0.2 * max(shape) ** 0.5)):
                    p.mul_(1 - lr * group["weight_decay"]).sub_(update)


def orthogonalize(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Move the singular values of each of the matrices x (N, rows, columns) near 1.

    This takes five Newton-Schulz iterations x -> P x, with P = a I + b A + c A A and A = x x^T, in
    `dtype`.
    """
    a, b, c = 3.4445, -4.775, 2.0315  # of Jordan et al. The result is between about 0.7 and 1.2.
    if x.shape[1] > x.shape[2]:
        return orthogonalize(x.mT, dtype).mT
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    y = (x / norm.clamp(min=1e-7)).to(dtype)
    # For wide matrices, the product of two or three P is computed from A alone, which is faster: an
    # iteration replaces A by P A P. With more P, rounding errors could grow without limit.
    wide = y.shape[1] < y.shape[2]
    for count in (3, 2) if wide else (1,) * 5:
        gram = y @ y.mT
        product = torch.diag_embed(torch.ones_like(gram[:, 0])) if wide else y
        for left in reversed(range(count)):
            z = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # P without a I
            product = torch.baddbmm(product, z, product, beta=a)
            for _ in range(2 if left else 0):
                gram = torch.baddbmm(gram, z, gram, beta=a)
        y = product @ y if wide else product
    return y.to(x.dtype)


# ----------------------------------------------------------------------------------------- sampling


@torch.no_grad()
def sample(
    model: GPT,
    prompt: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Iterator[Tensor]:
    """Generate tokens without end. The model must be in evaluation mode, and not sharded.

    prompt: (B, T) int64, or (T,). Only its last block_size tokens are used.
    temperature, top_k, top_p: see sample_token.
    Yields the next token of each prompt, (B,) int64, on the device of the model.
    When the context becomes longer than block_size, it is cut to its last ceil(block_size / 2)
    tokens, and their keys are computed again.
    """
    config, weight = model.config, model.embedding.weight
    context, start = torch.atleast_2d(prompt)[:, -config.block_size :].to(weight.device), 0
    sizes = len(context), config.heads, config.block_size, config.embd // config.heads
    caches = weight.new_zeros(config.layers, 2, *sizes)
    while True:
        end = context.shape[1]
        logits = model(context, caches=caches[..., :end, :], start=start)
        tokens = sample_token(logits, temperature, top_k, top_p)
        yield tokens
        context, start = torch.cat((context, tokens[:, None]), 1), end
        if end == config.block_size:
            context, start = context[:, -math.ceil(end / 2) :], 0


def sample_token(
    logits: Tensor,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Tensor:
    """Draw one token from each row of logits (B, V). Return (B,) int64. torch.manual_seed seeds it.

    temperature: the logits are divided by it. 0 returns the most likely token.
    top_k: draw only from the top_k most likely tokens. 0 means all.
    top_p: draw only from the most likely tokens whose probabilities add up to top_p.
    """
    if temperature == 0:
        return logits.argmax(-1)
    likely, order = logits.float().sort(descending=True)
    # The largest logit becomes 0, so that a low temperature cannot give infinity.
    likely = ((likely - likely[:, :1]) / temperature)[:, : top_k or None].softmax(-1)
    # A token is left out if those before it already have top_p.
    likely[likely.cumsum(-1) - likely >= top_p] = 0
    return order.gather(-1, likely.multinomial(1)).squeeze(-1)
