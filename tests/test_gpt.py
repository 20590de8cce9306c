"""Tests of gpt.py: compare with references that are written out here, and check invariants of any
model.
"""

import copy
import math
import shutil
import zlib
from collections import Counter
from functools import partial
from itertools import combinations, islice

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounter

import gpt

torch.set_num_threads(1)  # The tensors are tiny. Several threads would wait for each other.

EACH_ARCH = pytest.mark.parametrize("arch", gpt.ARCHS)
SMALL = gpt.Config(vocab=13, block_size=12, layers=3, heads=2, embd=16)


def random_model(arch, **changes):
    """Build a model in which no weight is 0 or 1. Initial weights of 0 could hide what a layer
    computes.
    """
    model = gpt.build(SMALL._replace(arch=arch, **changes), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.4, generator=generator)
    return model.eval()


def assert_close(actual, expected, tolerance):
    """Allow errors up to `tolerance` times the largest expected number: float32 sums depend on
    their order.
    """
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


def random_tokens(*shape, seed=0):
    return torch.randint(SMALL.vocab, shape, generator=torch.Generator().manual_seed(seed))


def random_batch(*shape):
    return random_tokens(*shape), random_tokens(*shape, seed=1)


# --------------------------------------------------------------------------------------- references


def gpt2_reference(weights, tokens, config):
    """Compute GPT-2's logits with torch's encoder layers and a causal mask."""
    T, C = tokens.shape[1], config.embd
    gelu = partial(F.gelu, approximate="tanh")
    layer = nn.TransformerEncoderLayer(
        C, config.heads, 4 * C, 0.0, gelu, batch_first=True, norm_first=True
    )
    names = {
        "self_attn.in_proj_": "qkv.",
        "self_attn.out_proj.": "out.",
        "linear1.": "up.",
        "linear2.": "down.",
        "norm1.": "norm1.",
        "norm2.": "norm2.",
    }
    x = weights["embedding.weight"][tokens] + weights["positions.weight"][:T]
    mask = nn.Transformer.generate_square_subsequent_mask(T)
    for i in range(config.layers):
        pairs = [(a, b, end) for a, b in names.items() for end in ("weight", "bias")]
        its_weights = {a + end: weights[f"blocks.{i}.{b}{end}"] for a, b, end in pairs}
        x = torch.func.functional_call(layer, its_weights, (x, mask))
    x = F.layer_norm(x, (C,), weights["norm.weight"], weights["norm.bias"])
    return x @ weights["embedding.weight"].T


def modern_reference(weights, tokens, config):
    """Compute the modern model's logits with one head and one query at a time, and complex
    rotations.
    """
    T, C, D = tokens.shape[1], config.embd, config.embd // config.heads

    def norm(x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def rotated(x):  # (B, T, D)
        angles = torch.arange(T)[:, None] * 10000.0 ** (-2 * torch.arange(D // 2) / D)
        z = torch.complex(*norm(x).chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((z.real, z.imag), -1)

    x = weights["embedding.weight"][tokens]
    if config.arch == "modern2":
        e = x.clone()
        for t in range(T):
            for back in range(1, min(t, 3) + 1):
                x[:, t] += weights["look_back"][:, back - 1] * e[:, t - back]
    for i in range(config.layers):
        w = {name: weights[f"blocks.{i}.{name}.weight"] for name in ("qkv", "out", "up", "down")}
        heads = []
        for h in range(config.heads):
            q, k, v = (norm(x) @ w["qkv"][j * C + h * D : j * C + (h + 1) * D].T for j in range(3))
            q, k = rotated(q), rotated(k)
            rows = [
                (q[:, t : t + 1] @ k[:, : t + 1].mT / D**0.5).softmax(-1) @ v[:, : t + 1]
                for t in range(T)
            ]
            heads.append(torch.cat(rows, 1))
        x = x + torch.cat(heads, -1) @ w["out"].T
        x = x + (norm(x) @ w["up"].T).clamp(min=0) ** 2 @ w["down"].T
    return norm(x) @ weights["head.weight"].T


REFERENCES = {"gpt2": gpt2_reference, "modern": modern_reference, "modern2": modern_reference}


# With T = 600, the float32 error of rotary angles is up to 600 * 2**-24 radians.
@pytest.mark.parametrize("T, layers, tolerance", [(4, 3, 1e-5), (12, 3, 1e-5), (600, 1, 1e-4)])
@EACH_ARCH
def test_logits_loss_and_gradients_equal_the_reference(arch, T, layers, tolerance):
    model, (x, y) = random_model(arch, block_size=T + 1, layers=layers), random_batch(2, T)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    logits = REFERENCES[arch](weights, x, model.config)
    expected = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum")
    expected.backward()
    total, count = gpt.loss(model, (x, y))
    total.backward()
    assert_close(model(x), logits, tolerance)
    assert count == 2 * T
    torch.testing.assert_close(total, expected)
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, weights[name].grad, 1e-4)


@pytest.mark.parametrize("T, S", [(1, 1), (9, 9), (1, 9), (4, 9), (600, 600), (1, 600), (4, 600)])
def test_each_query_attends_to_all_positions_up_to_its_own(T, S):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, length, 8, generator=generator) for length in (T, S, S))
    seen = torch.arange(S) <= S - T + torch.arange(T)[:, None]
    expected = (q @ k.mT / math.sqrt(8)).masked_fill(~seen, -math.inf).softmax(-1) @ v
    assert_close(gpt.attention(q, k, v, 0.0), expected, 1e-5)
    narrow = gpt.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), 0.0)  # by another function
    assert_close(narrow, expected, 0.02)


def test_rms_norm_adds_a_millionth_to_the_mean_square():
    small = torch.full((2, 4), 1e-3)  # Its mean square is a millionth, too.
    torch.testing.assert_close(gpt.rms_norm(small), torch.full((2, 4), 0.5**0.5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_bfloat16_autocast_the_residual_stream_is_bfloat16(dtype):
    """In float32 it would take twice the memory. In float16 it could overflow."""
    model, seen = random_model("modern"), []
    model.blocks[0].register_forward_pre_hook(lambda block, args: seen.append(args[0].dtype))
    with torch.autocast("cpu", dtype):
        model(random_tokens(2, 5))
    assert seen == [torch.bfloat16 if dtype == torch.bfloat16 else torch.float32]


# The kernel of torch has its own dropout, and the implementation for bfloat16 has another.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_in_attention_is_random_and_keeps_the_mean(dtype):
    torch.manual_seed(0)
    q, k = torch.randn(2, 1000, 1, 12, 4, dtype=dtype)
    # sums of each query's remaining weights
    sums = gpt.attention(q, k, torch.ones_like(q), 0.5)[..., 0].float()
    assert sums[:, 0, 0].unique().tolist() == [0, 2]  # the first query has a single weight of 1
    assert abs(sums.mean() - 1) < 6 * sums.std() / sums.numel() ** 0.5


@EACH_ARCH
def test_dropout_is_random_in_training_and_off_in_evaluation(arch):
    model, tokens = random_model(arch, dropout=0.5), random_tokens(2, 12)
    assert torch.equal(model(tokens), random_model(arch)(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))


# -------------------------------------------------------------------------------------- the weights


def test_gpt2_small_has_the_published_number_of_parameters():
    model = gpt.build(gpt.Config(50257, 1024, 12, 12, 768, arch="gpt2"), seed=None)
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808
    assert model.head.weight is model.embedding.weight


@EACH_ARCH
def test_initial_weights_depend_only_on_the_seed_and_the_name(arch):
    """Not on torch's defaults, the global generator, or which other parameters there are."""
    config = SMALL._replace(arch=arch, vocab=12)  # embedding, positions and head have equal shapes
    before = torch.get_rng_state()
    model = gpt.build(config, seed=0)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(gpt.build(config, 1).embedding.weight, model.embedding.weight)
    weights = dict(model.named_parameters())
    drawn = [weight.flatten()[:9].tolist() for weight in weights.values() if weight.std() > 0]
    assert all(a[i] != b[i] for a, b in combinations(drawn, 2) for i in range(9))
    torch.manual_seed(6)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            fewer = gpt.build(config._replace(layers=2), seed=0)
    finally:
        torch.set_default_dtype(torch.float32)
    for name, weight in fewer.named_parameters():
        if not name.endswith(("out.weight", "down.weight")):  # their scale depends on the layers
            assert weight.dtype == torch.float32 and torch.equal(weight, weights[name])


@EACH_ARCH
def test_without_a_seed_the_model_has_no_memory_and_initialize_completes_it(arch):
    config = SMALL._replace(arch=arch)
    model, full = gpt.build(config, seed=None), gpt.build(config, seed=3)
    assert all(p.is_meta and p.requires_grad for p in model.parameters())
    gpt.initialize_(model, 3)
    for parameter, expected in zip(model.parameters(), full.parameters(), strict=True):
        assert torch.equal(parameter, expected)
    assert (model.head.weight is model.embedding.weight) == (arch == "gpt2")


@pytest.mark.parametrize(
    "arch, std, branch_std", [("gpt2", 0.02, 0.005), ("modern", 0.02, 0), ("modern2", 0.1, 0)]
)
def test_the_standard_deviations_of_the_initial_weights(arch, std, branch_std):
    """Those of gpt2 are published: 0.02, and 0.02 / sqrt(2 * layers) where a branch ends."""
    model = gpt.build(SMALL._replace(arch=arch, embd=128, layers=8, vocab=500, block_size=64), 0)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert (parameter == (1 if name.endswith("weight") else 0)).all(), name
            continue
        expected = std if name in ("embedding.weight", "look_back") else 0.02
        if name.endswith(("out.weight", "down.weight")):
            expected = branch_std
        # five standard errors of the estimated standard deviation
        assert abs(parameter.std() - expected) <= 5 * expected / math.sqrt(2 * parameter.numel()), (
            name
        )


@EACH_ARCH
def test_each_parameter_is_in_exactly_one_group(arch):
    """A parameter in no group would never be trained."""
    model = gpt.build(SMALL._replace(arch=arch), seed=0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = gpt.parameter_groups(model)
    found = {kind: {names.pop(id(p)) for p in group} for kind, group in groups.items()}
    assert not names
    assert {kind: len(group) for kind, group in found.items()} == {
        "gpt2": {"embeddings": 2, "matrices": 12, "vectors": 26},
        "modern": {"embeddings": 2, "matrices": 12},
        "modern2": {"embeddings": 3, "matrices": 12},
    }[arch]


@pytest.mark.parametrize(
    "changes, message",
    [
        *[({size: 0}, f"{size}=0, .*: sizes must be at least 1") for size in SMALL._fields[:5]],
        ({"heads": 16}, "embd 16 must be a multiple of heads 16; with rotary positions, a mult"),
        ({"heads": 3, "arch": "gpt2"}, "embd 16 must be a multiple of heads 3"),
        ({"dropout": 1.0}, "dropout=1.0, .* and dropout from 0 to below 1"),
        ({"dropout": -0.1}, "dropout=-0.1, .* and dropout from 0 to below 1"),
        ({"arch": "gpt3"}, "arch 'gpt3' is not one of gpt2, modern, modern2"),
    ],
)
def test_an_impossible_config_is_an_error_that_names_the_values(changes, message):
    with pytest.raises(ValueError, match=message):
        gpt.build(SMALL._replace(**changes), seed=0)


@pytest.mark.parametrize(
    "changes",
    [{"heads": 16, "arch": "gpt2"}, {"vocab": 1, "block_size": 1, "layers": 1, "heads": 1}],
)
def test_the_smallest_sizes_are_possible(changes):
    """gpt2 has no rotary positions, so its heads can have an odd width."""
    model = gpt.build(SMALL._replace(**changes), seed=0)
    assert model(torch.zeros(2, 1).long()).shape == (2, 1, model.config.vocab)


# ---------------------------------------------------------------------------------- loss and FLOPs


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)]
)
def test_a_loss_in_parts_equals_that_of_all_logits(dtype, tolerance, monkeypatch):
    """The errors of 128 parts must not add up, and the logits are not kept."""
    torch.manual_seed(0)
    x, weight = (
        torch.randn(512, 32).to(dtype).requires_grad_(),
        nn.Parameter(torch.randn(64, 32) / 6),
    )
    targets = torch.randint(64, (512,))

    def compute():
        """Return the loss, its scaled gradients, and the size of the largest tensor it keeps."""
        kept = []
        with (
            torch.autocast("cpu", dtype, enabled=dtype != torch.float32),
            torch.autograd.graph.saved_tensors_hooks(
                lambda t: kept.append(t.numel()) or t, lambda t: t
            ),
        ):
            loss = gpt.cross_entropy(x, weight, targets)
        return loss, torch.autograd.grad(loss * 2**8, (x, weight)), max(kept, default=0)

    loss, gradients, most = compute()
    assert most == 512 * 64
    for max_logits in (4 * 64, 1):
        monkeypatch.setitem(gpt.MAX_LOGITS, "cpu", max_logits)
        in_parts, found, most = compute()
        assert in_parts.dtype == torch.float32 and most <= x.numel()
        torch.testing.assert_close(in_parts, loss, rtol=1e-6, atol=0)
        for a, b in zip(found, gradients, strict=True):
            assert (a - b).norm() <= tolerance * b.norm()


def test_the_flops_per_token_are_those_of_palm():
    """mfu is relative to them. The published model of 124 million parameters has 0.86 GFLOP."""
    assert gpt.flops_per_token(gpt.Config(50304, 1024, 12, 12, 768)) == 854_654_976


@EACH_ARCH
def test_checkpointed_activations_give_bitwise_equal_gradients_with_less_memory(arch):
    def gradients(checkpointed):
        model = random_model(arch, dropout=0.3).train()
        assert not model.checkpoint_activations
        model.checkpoint_activations = checkpointed
        torch.manual_seed(3)  # seeds dropout
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.append(t.numel()) or t, lambda t: t
        ):
            total, _ = gpt.loss(model, random_batch(4, 12))
        # Only the kind of checkpoint that is not reentrant works with autograd.grad.
        return torch.autograd.grad(total, [*model.parameters()]), sum(kept)

    (plain, much), (checkpointed, little) = gradients(False), gradients(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, checkpointed, strict=True))
    assert little < much / 3


# ------------------------------------------------------------------------------------------ compile


@pytest.fixture
def graphs(monkeypatch):
    """Let torch.compile only count the graphs that it makes; return the counter."""
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8):
        yield counter
    torch._dynamo.reset()


@pytest.mark.parametrize("whole, parts", [(True, 1), (False, 2)])
def test_each_part_is_one_graph_for_more_than_eight_shapes(graphs, whole, parts):
    """Unless it is told not to, torch runs the code uncompiled from the ninth shape on.

    The parts are the whole model, or the block and the loss.
    """
    model = gpt.build(SMALL, seed=0)
    gpt.compile_(model, whole)
    for length in range(2, 12):
        gpt.loss(model, random_batch(1, length))
    assert graphs.frame_count == parts * 10


def test_compiling_keeps_the_names_and_a_copy_uses_its_own_weights(graphs):
    """Otherwise a checkpoint of a compiled run could not be loaded, and a copy would be wrong."""
    model, tokens = gpt.build(SMALL, seed=0).eval(), random_tokens(2, 8)
    names = list(model.state_dict())
    gpt.compile_(model)
    assert [name for name, _ in model.named_parameters()] == names == list(model.state_dict())
    before, other = model(tokens), copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(other(tokens), before) and not model(tokens).any()


@pytest.mark.filterwarnings("ignore")  # torch raises it on import
@pytest.mark.skipif(not shutil.which("g++"), reason="compiling for a CPU needs g++")
def test_the_gradient_of_a_compiled_model_depends_on_neither_earlier_batches_nor_threads():
    """Otherwise a run that resumes could differ from one that was never stopped."""
    model = gpt.build(SMALL._replace(layers=1, dropout=0.1), seed=0)
    x, y = random_batch(64, 12)

    def gradient(rows):
        model.train().zero_grad()
        torch.manual_seed(3)  # seeds dropout
        gpt.loss(model, (x[:rows], y[:rows]))[0].backward()
        return [parameter.grad for parameter in model.parameters()]

    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    gpt.compile_(model)
    try:
        before = gradient(64)
        with torch.no_grad():
            model.eval()(x[:3]), model(x[:1, :5])  # shapes of the end of an evaluation
        gradient(3)
        for _ in range(50):
            assert all(torch.equal(a, b) for a, b in zip(before, gradient(64), strict=True))
    finally:
        torch.set_num_threads(threads)


# ----------------------------------------------------------------------------------------- sampling


def sample_without_a_cache(model, prompt, temperature):
    """Follow the rule of `sample`: cut a context of more than block_size tokens to its last half."""
    size = model.config.block_size
    context = prompt[-size:].tolist()
    generator = torch.Generator().manual_seed(zlib.crc32(b"0 0"))  # of seed 0 and row 0
    while True:
        logits = model(torch.tensor([context]))[:, -1]
        context.append(int(gpt.sample_token(logits, temperature, 0, 1.0, [generator])))
        yield context[-1]
        if len(context) > size:
            context = context[-((size + 1) // 2) :]


def sampled(model, prompt, count, **settings):
    """Return the next `count` tokens of a single prompt."""
    return [int(token) for token in islice(gpt.sample(model, prompt, **settings), count)]


@pytest.mark.parametrize(
    "block_size, length", [(12, 1), (12, 12), (12, 30), (7, 3), (2, 1), (1, 3)]
)
@EACH_ARCH
def test_sampling_with_and_without_a_cache_gives_the_same_tokens(block_size, length, arch):
    model, prompt = random_model(arch, block_size=block_size), random_tokens(length)
    with_cache = sampled(model, prompt, 40, temperature=2, seed=0)
    without = [*islice(sample_without_a_cache(model, prompt, 2), 40)]
    assert with_cache == without and len(set(without)) > 4


def test_each_row_of_a_batch_continues_its_own_prompt_and_a_model_can_be_trained_on_it():
    """Tensors of torch.inference_mode() could not be saved for the backward pass."""

    def rows(prompts, **settings):
        return torch.stack([*islice(gpt.sample(model, prompts, **settings), 30)], dim=1)

    model, prompts = random_model("modern2", block_size=7), random_tokens(5, 9)
    alone = [sampled(model, prompt, 30, temperature=0) for prompt in prompts]
    assert rows(prompts, temperature=0).tolist() == alone
    drawn = rows(prompts[:1].expand(5, 9))
    assert len({*map(tuple, drawn.tolist())}) == 5
    model(drawn, drawn).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_sampling_computes_one_position_per_token_and_the_logits_of_the_last_token():
    """With V = 50,304, the logits of all positions of a long prompt would take gigabytes."""
    model, widths, shapes = random_model("modern"), [], []
    model.blocks[0].register_forward_hook(lambda _, args, out: widths.append(out.shape[1]))
    model.head.register_forward_hook(lambda _, args, out: shapes.append(out.shape))
    sampled(model, random_tokens(5), 16)
    assert widths == [5] + [1] * 7 + [6] + [1] * 6 + [6]  # computed again when the context is full
    assert shapes == [(1, SMALL.vocab)] * 16


@pytest.mark.parametrize(
    "training, shape, settings, message",
    [
        (True, (3,), {}, "training mode; call model.eval"),
        (False, (3, 0), {}, "the prompt is empty"),
        (False, (3,), {"temperature": -0.5}, "must be finite and at least 0"),
        (False, (3,), {"temperature": math.nan}, "must be finite and at least 0"),
        (False, (3,), {"temperature": math.inf}, "must be finite and at least 0"),
        (False, (3,), {"top_k": -1}, "must be finite and at least 0"),
        (False, (3,), {"top_p": 0.0}, "top_p above 0 and at most 1"),
        (False, (3,), {"top_p": 1.1}, "top_p above 0 and at most 1"),
    ],
)
def test_what_sample_cannot_do_is_an_error_at_the_first_next(training, shape, settings, message):
    tokens = gpt.sample(random_model("modern").train(training), random_tokens(*shape), **settings)
    with pytest.raises(ValueError, match=message):
        next(tokens)


LOGITS = torch.tensor([0.3, 2.0, -1.0, 1.5, 0.0, 1.9])


@pytest.mark.parametrize("temperature, top_k", [(1, 0), (0.5, 0), (1, 1), (1.5, 3), (0.7, 99)])
def test_token_frequencies_follow_temperature_and_top_k(temperature, top_k):
    kept, n = LOGITS.argsort(descending=True)[: top_k or None], 2000
    expected = dict(zip(kept.tolist(), (LOGITS[kept] / temperature).softmax(-1).tolist()))
    torch.manual_seed(0)
    drawn = gpt.sample_token(LOGITS.expand(n, 6), temperature, top_k)
    counts = Counter(drawn.tolist())
    assert counts.keys() == expected.keys()
    statistic = sum((counts[i] - n * p) ** 2 / (n * p) for i, p in expected.items())
    df = len(expected) - 1
    # the mean plus six standard deviations of chi-square
    assert statistic <= df + 6 * math.sqrt(2 * df)


def test_top_p_keeps_the_most_likely_tokens_until_their_sum_reaches_it():
    """LOGITS in falling order: 0.35, 0.31, 0.21, 0.06, 0.05, 0.02 (rounded)."""
    torch.manual_seed(0)
    for top_p, kept in [(0.01, 1), (0.3, 1), (0.4, 2), (0.7, 3), (0.9, 4), (0.95, 5), (1.0, 6)]:
        drawn = gpt.sample_token(LOGITS.expand(500, 6), 1.0, 0, top_p)
        assert {*drawn.tolist()} == {*LOGITS.argsort(descending=True)[:kept].tolist()}


def test_a_row_draws_the_same_tokens_alone_and_in_a_batch():
    """Otherwise `--num-samples 3 --seed 1` would not begin with the text of `--seed 1`."""
    model, prompts = random_model("modern2"), random_tokens(1, 6).expand(3, 6)
    batch = torch.stack([*islice(gpt.sample(model, prompts, seed=1), 20)], dim=1).tolist()
    assert sampled(model, prompts[:1], 20, seed=1) == batch[0]
    assert batch[0] != batch[1] != batch[2] and sampled(model, prompts[:1], 20, seed=2) != batch[1]


def test_each_row_of_logits_has_its_own_largest_ones():
    logits = torch.stack((LOGITS, LOGITS.roll(1), -LOGITS))
    tokens = [gpt.sample_token(logits, 5.0, 2).tolist() for _ in range(100)]
    assert [{*row} for row in zip(*tokens)] == [{1, 5}, {2, 0}, {2, 4}]
    assert gpt.sample_token(logits, 0, 2).tolist() == [1, 2, 2]


def test_sample_passes_its_settings_to_sample_token_and_depends_on_the_seed():
    def draw(seed=0, **settings):
        torch.manual_seed(seed)
        return sampled(random_model("modern"), random_tokens(4), 20, **settings)

    greedy = draw(temperature=0)
    assert draw(top_k=1) == draw(temperature=1e-4) == greedy
    assert draw() == draw(temperature=1.0, top_k=0, top_p=1.0) != draw(seed=1)
    assert draw(top_p=1e-6) == greedy
    assert draw(temperature=3.0) != draw()


def test_a_tiny_temperature_does_not_overflow():
    assert gpt.sample_token(LOGITS[None] * 1e10, 1e-40, 0) == 1
