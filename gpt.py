"""Build a GPT language model, compute its loss, and sample from it.

    model = build(Config(vocab=65, block_size=256, layers=6, heads=6, embd=384), seed=0)
    loss_sum, count = loss(model, (x, y))  # x and y: (B, T) int64
    for token in islice(sample(model.eval(), prompt), 100):
        print(int(token))

There are two architectures. `arch="gpt2"` is exactly GPT-2 (Radford et al., 2019). `arch="modern"`
has rotary positions (Su et al., 2021), RMS norm without weights (Zhang and Sennrich, 2019),
normalised queries and keys (Henry et al., 2020), squared ReLU (So et al., 2021), no biases, and an
output layer that does not share its weights with the embedding. At initialisation its residual
branches output zero.

Nothing here communicates with other ranks.

Letters in shapes: B sequences in a batch, T tokens in a sequence, C = embd, H heads, D = C / H,
V tokens in the vocabulary, S keys and values: in sampling, also those of earlier tokens; otherwise
S = T.
"""

import math
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Config(NamedTuple):
    """The settings that define a model. The caller must save them with the weights."""

    vocab: int  # number of different tokens
    block_size: int  # maximum context length in tokens; see GPT.forward for longer sequences
    layers: int
    heads: int
    embd: int  # width of the residual stream. gpt2: a multiple of heads; modern: of 2 * heads
    dropout: float = 0.0  # probability, at least 0 and below 1
    arch: str = "modern"  # a key of ARCHS


class Arch(NamedTuple):
    """The settings in which architectures differ."""

    norm: Callable[[int], Callable[[Tensor], Tensor]]  # width -> function or module
    activation: Callable[[Tensor], Tensor]  # of the feed-forward layer
    rotary: bool  # True: rotary positions, normalised queries and keys. False: learned positions
    bias: bool  # linear layers in the blocks have a bias
    tied_head: bool  # the output layer uses the weights of the embedding
    zero_branches: bool  # the last layer of each branch (out, down) starts with weights of zero


def rms_norm(x: Tensor) -> Tensor:
    """Divide x by its root mean square over the last dimension. The result has the dtype of x, also
    under autocast.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    return x * (norm.square() / x.shape[-1] + 1e-6).rsqrt().to(x.dtype)


def rope(start: int, count: int, half: int, like: Tensor) -> Tensor:
    """Compute the cosines and sines of the rotary angles for the positions start, ..., start +
    count - 1.

    half: D / 2, the number of rotated pairs. Pair i turns by 10000 ** (-i / half) radians per
        position.
    Returns (2, count, half) with the dtype and device of `like`: index 0 is the cosine, index 1 the
    sine.
    """
    rates = 10000.0 ** (-torch.arange(half, device=like.device) / half)
    angles = torch.outer(torch.arange(start, start + count, device=like.device), rates)
    return torch.stack((angles.cos(), angles.sin())).to(like.dtype)


def apply_rope(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + D / 2) of x (..., T, D) by the angles of cos_sin (2, T, D / 2), see
    `rope`.
    """
    cos, sin = cos_sin
    a, b = x.chunk(2, -1)
    return torch.cat((torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)), -1)


def relu_squared(x: Tensor) -> Tensor:
    """Compute max(x, 0) ** 2 in the dtype of x, also under autocast."""
    y = F.relu(x)
    # On CUDA, autocast computes square() in float32. On a CPU, y * y is slower in bfloat16.
    return y * y if y.is_cuda else y.square()


ARCHS = {
    "gpt2": Arch(
        norm=nn.LayerNorm,
        activation=partial(F.gelu, approximate="tanh"),
        rotary=False,
        bias=True,
        tied_head=True,
        zero_branches=False,
    ),
    "modern": Arch(
        norm=lambda width: rms_norm,
        activation=relu_squared,
        rotary=True,
        bias=False,
        tied_head=False,
        zero_branches=True,
    ),
}


def attention(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Compute causal attention for the last T of S positions (T <= S).

    q: (B, H, T, D). k and v: (B, H, S, D). Returns (B, H, T, D).
    dropout: probability for the attention weights. It is always applied: pass 0.0 in evaluation.
    """
    (B, H, T, D), S = q.shape, k.shape[2]
    # For short sequences in bfloat16 on a CPU, the backward pass of the fused kernel takes up to
    # ten times as long as that of the matrix products below (torch 2.13).
    fused_is_slow = q.is_cpu and q.dtype == torch.bfloat16 and S <= 512
    # is_causal would treat the queries as the first T positions, not the last, so it is right only
    # for T = S. T = 1 needs no mask.
    if T in (1, S) and not fused_is_slow:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=T == S)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))  # (B * H, T or S, D)
    mask = q.new_full((T, S), -math.inf).triu(S - T + 1)
    scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=D**-0.5)  # mask + q @ k.T / sqrt(D)
    return (F.dropout(scores.softmax(-1), dropout) @ v).view(B, H, T, D)


class Block(nn.Module):
    """One transformer layer: x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        arch, width = ARCHS[config.arch], config.embd
        self.heads, self.dropout = config.heads, config.dropout
        self.activation, self.rotary = arch.activation, arch.rotary
        self.norm1, self.norm2 = arch.norm(width), arch.norm(width)
        linear = partial(nn.Linear, bias=arch.bias)
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

    def forward(self, x: Tensor, cos_sin: Tensor, cache: Tensor | None = None) -> Tensor:
        """Map x (B, T, C) to (B, T, C).

        cos_sin: see rope; not used with learned positions. cache: (2, B, H, S, D), see GPT.forward.
        """
        B, T, C = x.shape
        qkv = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, C // self.heads)
        qkv = qkv.permute(2, 0, 3, 1, 4)  # (3, B, H, T, D)
        qk, v = qkv[:2], qkv[2]
        q, k = apply_rope(rms_norm(qk), cos_sin) if self.rotary else qk  # (B, H, T, D) each
        if cache is not None:
            cache[..., -T:, :] = torch.stack((k, v))
            k, v = cache
        y = attention(q, k, v, self.dropout * self.training)
        y = self.out(y.transpose(1, 2).flatten(2))
        x = x + F.dropout(y, self.dropout, self.training)
        y = self.down(self.activation(self.up(self.norm2(x))))
        return x + F.dropout(y, self.dropout, self.training)


class GPT(nn.Module):
    """A decoder-only transformer. Use `build`: the constructor does not initialise embeddings."""

    def __init__(self, config: Config, checkpoint_activations: bool = False) -> None:
        super().__init__()
        arch, width = ARCHS[config.arch], config.embd
        self.config, self.checkpoint_activations = config, checkpoint_activations
        # nn.Embedding(V, C) would call normal_. On the device "meta", which build uses, the first
        # call of normal_ imports modules, which takes one second. from_pretrained does not call it.
        embedding = partial(nn.Embedding.from_pretrained, freeze=False)
        self.embedding = embedding(torch.empty(config.vocab, width))
        self.positions = None if arch.rotary else embedding(torch.empty(config.block_size, width))
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
        """Compute the logits (B, T, V), or, if targets are given, the sum of the token losses. With
        caches and no targets, compute only the logits of the last token, (B, 1, V).

        tokens, targets: (B, T) int64. The sum is a float32 scalar in nats. A token attends to
            itself and to the tokens before it, also to those in the caches.
        caches: for sampling, (layers, 2, B, H, S, D). The first S - T entries of dimension S must
            be the keys and values of earlier tokens. This call writes the keys and values of
            `tokens` into the last T. Pass caches only in evaluation mode: in training with
            checkpoint_activations they are ignored, without an error.
        start: position of the first token; with caches it must be S - T. With learned positions,
            start + T must be at most block_size; if it is larger, the result can be wrong without
            an error. With rotary positions, sequences may be longer.
        """
        T, kind = tokens.shape[1], tokens.device.type
        x = self.embedding(tokens)
        if self.positions:
            x = x + self.positions.weight[start : start + T]
        x = F.dropout(x, self.config.dropout, self.training)
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16:
            # Autocast would keep the residual stream in float32, with twice the memory traffic. (In
            # float16, the residual stream could overflow.)
            x = x.bfloat16()
        cos_sin = rope(start, T, self.config.embd // self.config.heads // 2, x)
        for i, block in enumerate(self.blocks):
            if self.checkpoint_activations and self.training:
                x = checkpoint(block, x, cos_sin, use_reentrant=False)
            else:
                x = block(x, cos_sin, None if caches is None else caches[i])
        x = self.norm(x)
        if targets is None:
            logits: Tensor = self.head(x if caches is None else x[:, -1:])
            return logits
        # 2**28 float32 logits are 1 GiB: 5,000 tokens with V = 50,000, enough to keep a GPU busy.
        # On a CPU, parts of 128 MiB were the fastest (V = 50,304, C = 128 and 384).
        max_logits = 1 << (28 if x.is_cuda else 25)
        return cross_entropy(x.flatten(0, 1), self.head.weight, targets.flatten(), max_logits)


def cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, max_logits: int) -> Tensor:
    """Compute logits = x @ weight.T and return the sum of the cross-entropies of its N rows, in
    nats.

    x: (N, C). weight: (V, C). targets: (N,) int64. Returns a float32 scalar.
    max_logits: number of logits that are computed at a time. If N * V is more, the rows are
        processed in parts: see CrossEntropyInParts. The memory is three to four times that of these
        logits in float32, because the softmax and the gradients have the same size.
    (F.linear_cross_entropy of torch 2.13 saves memory too, but adds up a bfloat16 loss in
    bfloat16.)
    """
    rows = max(1, max_logits // len(weight))
    if len(x) > rows and torch.is_grad_enabled():
        return CrossEntropyInParts.apply(x, weight, targets, rows)  # type: ignore
    parts = zip(x.split(rows), targets.split(rows))  # only one part, unless gradients are disabled
    return torch.stack([cross_entropy_at_once(part, weight, y) for part, y in parts]).sum()


def cross_entropy_at_once(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Compute cross_entropy with all logits in memory."""
    return F.cross_entropy(F.linear(x, weight).float(), targets, reduction="sum")


class CrossEntropyInParts(torch.autograd.Function):
    """Compute cross_entropy for `rows` rows of x at a time.

    The forward pass also computes the gradients of each part, while the logits of the part are in
    memory. The backward pass only scales them. Second derivatives raise an error. The gradient of
    `weight` is added up in float32 or wider.

    Do not use float16, for autocast or weights: the gradients are computed before a GradScaler
    scales the loss. So values below 3e-8 become 0, and those above 65,504 become infinite. bfloat16
    and float32 have a far larger range.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
        gradients_and_loss = torch.func.grad_and_value(cross_entropy_at_once, argnums=(0, 1))
        loss, x_grads = torch.zeros((), dtype=torch.float32, device=x.device), []
        wide = torch.promote_types(weight.dtype, torch.float32)
        weight_grad = torch.zeros_like(weight, dtype=wide)
        for part, y in zip(x.split(rows), targets.split(rows)):
            (x_grad, part_grad), value = gradients_and_loss(part, weight, y)
            x_grads.append(x_grad)
            weight_grad += part_grad
            del part_grad  # It is as large as the weight, and would stay during the next part.
            loss += value
        ctx.save_for_backward(torch.cat(x_grads), weight_grad)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():  # with create_graph=True
            raise RuntimeError("cross_entropy in parts has no second derivatives")
        x_grad, weight_grad = ctx.saved_tensors
        # PyTorch would round a scalar to the dtype of x_grad. With the shape (1,), the product is
        # computed in float32.
        factor = grad[None]
        return x_grad * factor, weight_grad * factor, None, None


def build(config: Config, seed: int | None, checkpoint_activations: bool = False) -> GPT:
    """Build a model on the CPU. Its initial weights depend only on `config` and `seed`.

    The state of torch's global random generators does not change, on any device. ValueError if
    `config` is not valid.
    seed: None leaves the parameters on the device "meta", without memory and values. Their values
        can be computed later with initial_weight, for example one block at a time.
    checkpoint_activations: keep only the input of each block in the forward pass and compute the
        rest again in the backward pass. This saves memory and gives the same gradients.
    """
    if config.arch not in ARCHS:
        raise ValueError(f"arch {config.arch!r} is not one of {', '.join(ARCHS)}")
    if min(config[:5]) < 1 or not 0 <= config.dropout < 1:  # [:5]: from vocab to embd
        raise ValueError(f"{config}: sizes must be at least 1, and dropout from 0 to below 1")
    if config.embd % config.heads:
        raise ValueError(f"embd {config.embd} is not divisible by heads {config.heads}")
    if config.embd // config.heads % 2 and ARCHS[config.arch].rotary:
        raise ValueError(
            f"embd / heads is {config.embd // config.heads}; rotary positions need an even number"
        )
    with torch.device("meta"):
        model = GPT(config, checkpoint_activations)
    if seed is not None:
        for name, parameter in model.named_parameters():
            weight = initial_weight(config, seed, name, parameter.shape)
            # This keeps the parameter object, so a tied head stays tied.
            torch.utils.swap_tensors(parameter, nn.Parameter(weight))
    return model


def initial_weight(config: Config, seed: int, name: str, shape: torch.Size) -> Tensor:
    """Compute the initial values of the parameter `name`, float32, on the CPU.

    They depend only on the arguments. So each rank can compute any of them, in any order.
    shape: that of the whole parameter, also if a rank keeps only a part of it.
    """
    # dtype and device are those of the docstring, also if the program has set other defaults.
    # The weight of a norm is 1 (True) and a bias is 0. Matrices are overwritten below.
    weight = torch.full(shape, name.endswith("weight"), dtype=torch.float32, device="cpu")
    if weight.ndim > 1:
        std = 0.02
        if name.endswith(("out.weight", "down.weight")):
            std *= 0 if ARCHS[config.arch].zero_branches else (2 * config.layers) ** -0.5
        # crc32 makes 32 bits. A generator of the CPU would ignore further bits of its seed.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        weight.normal_(0, std, generator=generator)
    return weight


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Compute (sum of the token losses in nats, number of tokens) of a batch (x, y).

    x: (B, T) int64 tokens. y: (B, T) int64, the token that follows each of x. It must not contain
        -100, which F.cross_entropy ignores, because the number of tokens would include it.
    model: a GPT, or a wrapper of one, for example DistributedDataParallel.
    """
    x, y = batch
    return model(x, y), y.numel()


def compile_(model: GPT) -> None:
    """Compile each block in place with torch.compile. The names of the parameters do not change.

    Each block is compiled by itself, so that in the backward pass DistributedDataParallel can send
    the gradients of one block while those of the block before it are computed. As all blocks have
    the same code and shapes, the graph of the first block is used for all of them. cross_entropy is
    not compiled, because that would take seconds for each new number of rows.

    torch compiles the blocks for the first eight shapes that they get, and runs them uncompiled for
    all others. A resumed run can meet other shapes first, and its result could differ. Therefore
    this function raises the limit to 64 shapes. It also switches off torch's optimize_ddp. Both
    settings hold for the whole process. Sampling has another shape for each length, so sample from
    a model that is not compiled.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(64, config.recompile_limit)
    # Under DistributedDataParallel, torch would cut the graph of a large block into pieces.
    config.optimize_ddp = False
    for block in model.blocks:
        # With dynamic shapes, torch would compile a general graph when it sees a second shape. This
        # graph rounds differently and draws other dropout masks. So the result of a step would
        # depend on the shapes before it.
        block.compile(dynamic=False)


def parameter_groups(model: GPT) -> dict[str, list[nn.Parameter]]:
    """Divide the parameters into three groups, so that each can have its own optimizer or weight
    decay.

    "matrices": the two-dimensional weights of the blocks. "embeddings": token and position
    embeddings and the output layer. "vectors": biases and norm weights. A group can be empty. Each
    parameter is in one group. Pass the GPT itself, also after DistributedDataParallel has wrapped
    it. The wrapper's parameter names begin with "module.", so all its matrices would be in
    "embeddings".
    """
    kinds: dict[str, list[nn.Parameter]] = {"embeddings": [], "matrices": [], "vectors": []}
    for name, parameter in model.named_parameters():
        kind = "matrices" if name.startswith("blocks.") else "embeddings"
        kinds["vectors" if parameter.ndim < 2 else kind].append(parameter)
    return kinds


def flops_per_token(config: Config) -> int:
    """Count the floating-point operations of forward and backward pass for one token of a full
    sequence.

    The formula counts 6 operations per weight of the blocks' matrices and of the output layer, and
    12 * block_size * embd for the attention of each layer (Chowdhery et al., "PaLM", 2022, appendix
    B). Recomputed activations do not count.
    """
    matrices = 12 * config.layers * config.embd**2 + config.vocab * config.embd
    return 6 * matrices + 12 * config.layers * config.block_size * config.embd


@torch.no_grad()
def sample(
    model: GPT, prompt: Tensor, *, temperature: float = 1.0, top_k: int = 0
) -> Iterator[Tensor]:
    """Generate one token after another, without end, for one prompt or for a batch of prompts.

    prompt: (B, T) int64, or (T,) for a single one, on any device. Only the last block_size tokens
        are used.
    temperature, top_k: see sample_token.
    Yields the next token of each prompt: (B,) int64 on the device of the model; (1,) for a single
    prompt. ValueError, at the first next() and not at the call, if the prompt is empty or the model
    is not in evaluation mode: call model.eval() before.

    After the prompt, each token costs the computation of one position, because keys and values are
    cached. But when the context has more than block_size tokens, only its last ceil(block_size / 2)
    tokens are kept, and these are processed again from position 0. Tokens are drawn from torch's
    global generator for the model's device, which torch.manual_seed seeds.
    """
    if model.training:  # then there would be dropout, and no caches with checkpoint_activations
        raise ValueError("the model is in training mode; call model.eval() before")
    if not prompt.numel():
        raise ValueError("the prompt is empty; at least one token is needed")
    config, weight, start = model.config, model.embedding.weight, 0
    context = torch.atleast_2d(prompt)[:, -config.block_size :].to(weight.device)
    caches = weight.new_zeros(
        config.layers,
        2,
        len(context),
        config.heads,
        config.block_size,
        config.embd // config.heads,
    )
    while True:
        end = context.shape[1]
        logits = model(context[:, start:], caches=caches[..., :end, :], start=start)[:, -1]
        tokens = sample_token(logits, temperature, top_k)
        context, start = torch.cat((context, tokens[:, None]), 1), end
        yield tokens
        if end == config.block_size:
            context, start = context[:, end // -2 :], 0  # the last ceil(block_size / 2) tokens


def sample_token(logits: Tensor, temperature: float, top_k: int) -> Tensor:
    """Draw one token from each row of logits (B, V). Return (B,) int64.

    temperature: the logits are divided by it. 0 returns the most likely token and draws nothing.
    top_k: keep only the top_k most likely tokens, and those as likely as the last of them; 0 keeps
        all.
    """
    if temperature == 0:
        return logits.argmax(-1)
    if top_k:
        smallest = logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]
        logits = logits.masked_fill(logits < smallest, -math.inf)
    # The largest logit becomes 0, so that a very small temperature cannot cause an overflow.
    logits = (logits.float() - logits.amax(-1, keepdim=True)) / max(temperature, 1e-30)
    return torch.multinomial(logits.softmax(-1), 1).flatten()
