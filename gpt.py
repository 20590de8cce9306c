"""Build a GPT language model, compute its loss, and sample from it.

    model = build(Config(vocab=65, block_size=256, layers=6, heads=6, embd=384), seed=0)
    loss_sum, count = loss(model, (x, y))  # x and y: (B, T) int64
    (loss_sum / count).backward()
    for token in islice(sample(model.eval(), prompt), 100):
        print(int(token))

`arch="gpt2"` computes the same function as GPT-2 (Radford et al., 2019). `arch="modern"` has rotary
positions (Su et al., 2021), RMS norm without weights (Zhang and Sennrich, 2019), normalised queries
and keys (Henry et al., 2020), squared ReLU (So et al., 2021), no biases, an untied output layer,
and blocks that start as the identity. `arch="modern2"` is modern with a larger standard deviation
of the initial embeddings and a causal convolution over them, like the Canon layers of Allen-Zhu
(2025). modern2 reaches the loss of modern in fewer steps.

Letters in shapes: B sequences, T new tokens in each, C = embd, H = heads, D = C / H, V = vocab, and
S = T + the number of cached keys.
"""

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Config(NamedTuple):
    """The settings that define a model. Save them with the weights."""

    vocab: int
    # number of tokens in the longest context. modern and modern2 have this limit only in `sample`.
    block_size: int
    layers: int
    heads: int
    embd: int  # width of the residual stream
    dropout: float = 0.0  # probability
    arch: str = "modern2"  # see ARCHS


def rms_norm(x: Tensor) -> Tensor:
    """Divide x by its root mean square over the last dimension, and keep its dtype."""
    if x.is_cuda:
        # Under autocast, F.rms_norm would make a float32 copy of x.
        with torch.autocast("cuda", enabled=False):
            return F.rms_norm(x, x.shape[-1:], eps=1e-6)
    # On other devices, F.rms_norm always makes a float32 copy. vector_norm only sums in float32.
    wide = torch.promote_types(x.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    return x * (norm.square() / x.shape[-1] + 1e-6).rsqrt().to(x.dtype)


def rope(start: int, count: int, half: int, like: Tensor) -> Tensor:
    """Compute the cosines and sines of the rotary angles for `count` positions from `start` on.

    half: D / 2. Angle i grows by 10000 ** (-i / half) radians per position.
    Returns (2, count, 1, half), first the cosines, with the dtype and device of `like`.
    """
    rates = 10000.0 ** (-torch.arange(half, device=like.device) / half)
    angles = torch.outer(torch.arange(count, device=like.device) + start, rates)[:, None]
    return torch.stack((angles.cos(), angles.sin())).to(like.dtype)


def apply_rope(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + D / 2) of x (B, T, 2 H, D). cos_sin: from rope, (2, T, 1, D / 2)."""
    cos, sin = cos_sin
    a, b = x.chunk(2, -1)
    # (a cos - b sin, b cos + a sin)
    return torch.cat((torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)), -1)


def relu_squared(x: Tensor) -> Tensor:
    """Compute max(x, 0) ** 2 in the dtype of x."""
    y = F.relu(x)
    return y * y  # On CUDA, autocast would compute y.square() in float32.


# The largest number of logits that cross_entropy computes at once, by device type. 2**28 logits are
# 5,000 rows with V = 50,000, enough to keep a GPU busy.
MAX_LOGITS = {"cuda": 1 << 28}


def cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of the logits x @ weight.T, summed over the rows, in nats.

    x: (N, C). weight: (V, C). targets: (N,) int64. Returns a float32 scalar.

    More than MAX_LOGITS logits never exist together. They are computed for some rows at a time.
    """

    def of_rows(x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).float(), targets, reduction="sum")

    kind = x.device.type
    # On a CPU, parts of 2**25 logits, that is 128 MiB, are the fastest.
    rows = max(1, MAX_LOGITS.get(kind, 1 << 25) // len(weight))
    if len(x) <= rows:
        return of_rows(x, targets)
    # torch 2.13 has a function for this. It would sum a bfloat16 loss in bfloat16, with an error of
    # 6 % after 64 parts, and multiply matrices in float32 on a CPU.
    if hasattr(F, "linear_cross_entropy") and F.linear(x[:0], weight).dtype == torch.float32:
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=rows)
        return F.linear_cross_entropy(x, weight, targets, reduction="sum", options=options)
    # The backward pass computes the logits of a part again. Without the cache of autocast, the
    # gradients of the parts are added up in the dtype of `weight`, and not in bfloat16.
    part = partial(checkpoint, of_rows, use_reentrant=False, preserve_rng_state=False)
    with torch.autocast(kind, enabled=torch.is_autocast_enabled(kind), cache_enabled=False):
        return torch.stack([*map(part, x.split(rows), targets.split(rows))]).sum()


class Arch(NamedTuple):
    """The settings in which architectures differ. The defaults are those of "modern"."""

    norm: Callable[[int], Callable[[Tensor], Tensor]] = lambda width: rms_norm
    activation: Callable[[Tensor], Tensor] = relu_squared
    rotary: bool = True  # False: learned positions, and queries and keys are not normalised
    bias: bool = False  # of the linear layers in the blocks
    tied_head: bool = False  # The output layer shares the weights of the embedding.
    zero_branches: bool = True  # Block.out and Block.down start as 0.
    look_back: int = 0  # earlier tokens in the convolution over the embeddings. 0: no convolution


ARCHS = {
    "gpt2": Arch(
        norm=nn.LayerNorm,
        activation=partial(F.gelu, approximate="tanh"),
        rotary=False,
        bias=True,
        tied_head=True,
        zero_branches=False,
    ),
    "modern": Arch(),
    "modern2": Arch(look_back=3),
}


def attention(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Compute causal attention for the last T of S positions.

    q and the result: (B, H, T, D). k and v: (B, H, S, D).
    dropout: Pass 0.0 in evaluation.
    """
    T = q.shape[2]
    S = k.shape[2]
    # On a CPU, the backward pass of torch's kernel is slow for short bfloat16 sequences.
    fused_is_slow = q.is_cpu and q.dtype == torch.bfloat16 and S <= 512
    # With is_causal, query i sees the keys 0 to i, which is right only for T = S. A single query
    # (T = 1) is the last one, so it may see all keys and needs no mask.
    if T in (1, S) and not fused_is_slow:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=T == S)
    # Query i is at position S - T + i.
    mask = q.new_full((T, S), -math.inf).triu(S - T + 1)
    scores = (q * q.shape[-1] ** -0.5) @ k.mT + mask
    return F.dropout(scores.softmax(-1), dropout) @ v


class Block(nn.Module):
    """One transformer layer: x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        arch = ARCHS[config.arch]
        width = config.embd
        self.heads = config.heads
        self.dropout = nn.Dropout(config.dropout)
        self.activation = arch.activation
        self.rotary = arch.rotary
        self.norm1 = arch.norm(width)
        self.norm2 = arch.norm(width)
        linear = partial(nn.Linear, bias=arch.bias)
        self.qkv = linear(width, 3 * width)
        self.out = linear(width, width)
        self.up = linear(width, 4 * width)
        self.down = linear(4 * width, width)

    def forward(self, x: Tensor, cos_sin: Tensor, cache: Tensor | None = None) -> Tensor:
        """Map x (B, T, C) to (B, T, C).

        cos_sin: see rope. cache: (2, B, H, S, D), one layer of `caches` in GPT.forward.
        """
        H = self.heads
        # (B, T, 2 H, D) and (B, T, H, D)
        qk, v = self.qkv(self.norm1(x)).unflatten(2, (3 * H, -1)).split((2 * H, H), 2)
        if self.rotary:
            qk = apply_rope(rms_norm(qk), cos_sin)
        q, k = qk.transpose(1, 2).chunk(2, 1)  # (B, H, T, D) each
        v = v.transpose(1, 2)
        if cache is not None:
            cache[..., -x.shape[1] :, :] = torch.stack((k, v))
            k, v = cache
        y = attention(q, k, v, self.dropout.p * self.training)
        x = x + self.dropout(self.out(y.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(self.activation(self.up(self.norm2(x)))))  # type: ignore[no-any-return]


def embed(model: "GPT", embeddings: Tensor, start: int) -> Tensor:
    """Return the input (B, T, C) of the first block.

    embeddings: (B, S, C), of all tokens. start: see GPT.forward.
    """
    n = ARCHS[model.config.arch].look_back
    # e (B, n + T, C): the embeddings of the last n + T tokens. Before the first token are zeros.
    e = F.pad(embeddings, (0, 0, n, 0))[:, start:]
    x = e[:, n:]
    for i in range(1, n + 1):
        # This slice has the embeddings i positions earlier.
        x = x + e[:, n - i : -i] * model.look_back[:, i - 1]
    if model.positions:
        x = x + model.positions.weight[start : embeddings.shape[1]]
    x = F.dropout(x, model.config.dropout, model.training)
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16:
        # Autocast would keep the residual stream in float32, with twice the memory. (Not for
        # float16, which could overflow.)
        x = x.bfloat16()
    return x


def after_lookup(
    model: "GPT", embeddings: Tensor, targets: Tensor | None, caches: Tensor | None, start: int
) -> Tensor:
    """Do what GPT.forward does after the lookup of the embeddings (B, S, C) of all tokens."""
    x = embed(model, embeddings, start)
    # Blocks of gpt2 ignore cos_sin.
    cos_sin = rope(start, x.shape[1], model.config.embd // model.config.heads // 2, x)
    for i, block in enumerate(model.blocks):
        if model.checkpoint_activations and model.training:
            x = checkpoint(block, x, cos_sin, use_reentrant=False)
        else:
            x = block(x, cos_sin, None if caches is None else caches[i])
    x = model.norm(x)
    if targets is None:
        return model.head(x if caches is None else x[:, -1])  # type: ignore[no-any-return]
    return model.cross_entropy(x.flatten(0, 1), model.head.weight, targets.flatten())


class GPT(nn.Module):
    """A decoder-only transformer. Use `build`: the constructor does not initialise the weights.

    checkpoint_activations: True saves memory. The backward pass then computes each block again. Set
        it before compile_, and before the model is wrapped.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        arch = ARCHS[config.arch]
        width = config.embd
        self.config = config
        # compile_ replaces these attributes. `after_lookup` is not a method, because a compiled
        # method would stay bound to the original model in a deep copy.
        self.after_lookup, self.cross_entropy = after_lookup, cross_entropy
        self.checkpoint_activations = False
        # nn.Embedding(V, C) would call normal_, whose first call on the device "meta" takes 1 s.
        embedding = partial(nn.Embedding.from_pretrained, freeze=False)
        self.embedding = embedding(torch.empty(config.vocab, width))
        self.positions = None if arch.rotary else embedding(torch.empty(config.block_size, width))
        if arch.look_back:
            self.look_back = nn.Parameter(torch.empty(width, arch.look_back))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = arch.norm(width)
        self.head = nn.Linear(width, config.vocab, bias=False)
        if arch.tied_head:
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
        caches: (layers, 2, B, H, S, D), for sampling in evaluation mode. The first `start`
            positions hold the keys and values of earlier calls. This call adds those of the other
            T positions, and returns only the logits of the last token, (B, V).
        start: number of cached positions, S - T. It must be 0 without caches. This and the size of
            caches are not checked.
        """
        # The lookup is not compiled. On a CPU, compiled code would add up its gradient in an order
        # that depends on the threads.
        return self.after_lookup(self, self.embedding(tokens), targets, caches, start)


def build(config: Config, seed: int | None) -> GPT:
    """Build a model on the CPU. Its initial weights depend only on `config` and `seed`.

    ValueError if `config` is not valid.
    seed: None leaves the parameters on the device "meta", without values: see initialize_.
    """
    if config.arch not in ARCHS:
        raise ValueError(f"arch {config.arch!r} is not one of {', '.join(ARCHS)}")
    # The first five fields are the sizes.
    if min(config[:5]) < 1 or not 0 <= config.dropout < 1:
        raise ValueError(f"{config}: sizes must be at least 1, and dropout from 0 to below 1")
    if config.embd % (config.heads * (2 if ARCHS[config.arch].rotary else 1)):
        raise ValueError(
            f"embd {config.embd} must be a multiple of heads {config.heads}; with rotary "
            "positions, a multiple of 2 * heads"
        )
    with torch.device("meta"):
        model = GPT(config)
    if seed is not None:
        initialize_(model, seed)
    return model


def initialize_(model: GPT, seed: int) -> None:
    """Give the parameters of a model from build(config, None) their initial values, on the CPU."""
    for name, parameter in model.named_parameters():
        # swap_tensors keeps the parameter object, so a tied head stays tied.
        weight = initial_weight(model.config, seed, name, parameter.shape)
        torch.utils.swap_tensors(parameter, nn.Parameter(weight))


def initial_weight(config: Config, seed: int, name: str, shape: torch.Size) -> Tensor:
    """Compute the initial values of a parameter, float32 on the CPU, from the arguments alone.

    name: from GPT.named_parameters(). Remove the prefix that the names have in a wrapper.
    shape: of the whole parameter, also if this process holds only a part of it.
    """
    # Vectors keep these values: norm weights are 1, and biases are 0.
    weight = torch.full(shape, float(name.endswith("weight")), dtype=torch.float32, device="cpu")
    if weight.ndim > 1:
        arch = ARCHS[config.arch]
        std = 0.02
        # With 0.02, modern2 needs more steps.
        if arch.look_back and name in ("embedding.weight", "look_back"):
            std = 0.1
        if name.endswith(("out.weight", "down.weight")):
            std *= 0 if arch.zero_branches else (2 * config.layers) ** -0.5
        # crc32 is enough, because a CPU generator uses only 32 bits of its seed.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        weight.normal_(0, std, generator=generator)
    return weight


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Compute (sum of the token losses in nats, number of tokens) of a batch.

    model: a GPT or a wrapper of one.
    batch: (x, y), both (B, T) int64. y[b, t] is the token after x[b, t]. y must not contain -100,
        which F.cross_entropy ignores.
    """
    x, y = batch
    return model(x, y), y.numel()


def flops_per_token(config: Config) -> int:
    """Count the floating-point operations per token of a forward and a backward pass.

    The formula is from Chowdhery et al., "PaLM", 2022, appendix B.
    """
    weights = 12 * config.layers * config.embd**2 + config.vocab * config.embd
    return 6 * weights + 12 * config.layers * config.block_size * config.embd


def compile_(model: GPT, whole: bool = True) -> None:
    """Compile all of the model but the lookup of the embeddings, in place, as one graph.

    The names of the parameters do not change. pickle cannot copy a compiled model. A setting of the
    compiler changes for the whole process. Do not sample from a compiled model: torch would compile
    it again for each length.

    whole: False compiles each block and the loss alone. It is for FSDP2, whose hooks before and
        after each block would cut one graph into pieces.
    """
    # By default, torch compiles only the first 8 shapes that occur. Uncompiled code rounds
    # differently, so the result would depend on which shapes occur first.
    config = torch.compiler.config
    config.recompile_limit = max(64, config.recompile_limit)
    # By default, torch would make a slower graph for dynamic shapes at the second shape.
    static = partial(torch.compile, dynamic=False)
    if whole:
        model.after_lookup = static(after_lookup)
        return
    model.cross_entropy = static(cross_entropy)
    for block in model.blocks:
        block.compile(dynamic=False)


def parameter_groups(model: GPT) -> dict[str, list[nn.Parameter]]:
    """Divide the parameters into three groups for the optimizers.

    "matrices" are the weights of linear layers in the blocks. "vectors" are biases and norm
    weights. "embeddings" are all others, also the output layer. A group without parameters is left
    out. Pass the GPT itself. From a wrapper such as DistributedDataParallel, every matrix would be
    in "embeddings".
    """
    groups: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        kind = "matrices" if name.startswith("blocks.") else "embeddings"
        groups.setdefault("vectors" if parameter.ndim < 2 else kind, []).append(parameter)
    return groups


@torch.no_grad()
def sample(
    model: GPT,
    prompt: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
) -> Iterator[Tensor]:
    """Generate tokens without end, for one prompt or a batch. The model must not be sharded.

    prompt: (B, T) int64, or (T,). Only its last block_size tokens are used.
    temperature, top_k, top_p: see sample_token.
    seed: row b draws from a generator of its own, seeded from (seed, b). So its text does not
        depend on the number of rows. None: torch's global generator gives the seed.
    Yields the next token of each prompt, (B,) int64, on the device of the model. B is 1 for (T,).
    The first next() raises ValueError in training mode, for an empty prompt, if temperature is
    negative or not finite, if top_k is negative, and if top_p is not above 0 and at most 1.
    When the context becomes longer than block_size, it is cut to its last ceil(block_size / 2)
    tokens.
    """
    if model.training:
        raise ValueError("the model is in training mode; call model.eval() before")
    if not prompt.numel():
        raise ValueError("the prompt is empty; at least one token is needed")
    if not 0 <= temperature < math.inf or top_k < 0 or not 0 < top_p <= 1:
        raise ValueError(
            f"temperature {temperature}, top_k {top_k}, top_p {top_p}: must be finite and at least "
            "0, and top_p above 0 and at most 1"
        )
    config = model.config
    weight = model.embedding.weight
    start = 0
    context = torch.atleast_2d(prompt)[:, -config.block_size :].to(weight.device)
    caches = weight.new_zeros(
        config.layers, 2, len(context), config.heads, config.block_size, config.embd // config.heads
    )
    if seed is None:
        seed = int(torch.randint(2**62, ()))
    generators = [
        torch.Generator(weight.device).manual_seed(zlib.crc32(f"{seed} {row}".encode()))
        for row in range(len(context))
    ]
    while True:
        end = context.shape[1]
        with torch.inference_mode():  # saves up to a tenth of the time
            logits = model(context, caches=caches[..., :end, :], start=start)
        tokens = sample_token(logits, temperature, top_k, top_p, generators)
        context, start = torch.cat((context, tokens[:, None]), 1), end
        yield tokens
        if end == config.block_size:
            # The positions begin at 0 again, so all keys are computed again. Cutting to the half
            # makes this rare.
            context, start = context[:, -math.ceil(end / 2) :], 0


def sample_token(
    logits: Tensor,
    temperature: float,
    top_k: int,
    top_p: float = 1.0,
    generators: Sequence[torch.Generator | None] = (),
) -> Tensor:
    """Draw one token from each row of logits (B, V). Return (B,) int64.

    temperature: the logits are divided by it. 0 returns the most likely token.
    top_k: draw only from the top_k most likely tokens and from ties with the last of these. 0 means
        all.
    top_p: draw only from the most likely tokens whose probabilities add up to top_p.
    generators: one for each row. Without them, all rows draw from torch's global generator.
    """
    if temperature == 0:
        return logits.argmax(-1)
    if top_k:
        smallest = logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]
        logits = logits.masked_fill(logits < smallest, -math.inf)
    # The largest logit becomes 0, so the division cannot give +inf. A temperature that float32
    # rounds to 0 would give NaN, so it is at least 1e-30.
    logits = (logits.float() - logits.amax(-1, keepdim=True)) / max(temperature, 1e-30)
    probabilities = logits.softmax(-1)
    if top_p < 1:
        falling, order = probabilities.sort(descending=True)
        # A token is left out if those before it already have top_p.
        falling[falling.cumsum(-1) - falling >= top_p] = 0
        probabilities = probabilities.scatter(-1, order, falling)
    draws = zip(probabilities, generators or [None] * len(logits))
    return torch.cat([torch.multinomial(row, 1, generator=generator) for row, generator in draws])
