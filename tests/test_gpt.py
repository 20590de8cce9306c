"""Tests of gpt.py: compare with references that are written out here, and check invariants of any
model.
"""

import copy
import math
import shutil
import subprocess
import sys
from collections import Counter
from functools import partial
from itertools import combinations, islice
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

import gpt

torch.set_num_threads(1)  # The tensors are tiny. Several threads would wait for each other.

ARCHS = ["gpt2", "modern", "modern2"]
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


def random_tokens(*shape, vocab=SMALL.vocab, seed=0):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


# --------------------------------------------------------------------------------------- references


def gpt2_reference(weights, tokens, config):
    """Compute GPT-2's logits with torch's encoder layers and a causal mask."""
    T, C = tokens.shape[1], config.embd
    layer = nn.TransformerEncoderLayer(
        C,
        config.heads,
        4 * C,
        0.0,
        partial(F.gelu, approximate="tanh"),
        batch_first=True,
        norm_first=True,
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
    for i in range(config.layers):
        pairs = [(a, b, end) for a, b in names.items() for end in ("weight", "bias")]
        its_weights = {a + end: weights[f"blocks.{i}.{b}{end}"] for a, b, end in pairs}
        x = torch.func.functional_call(
            layer, its_weights, (x, nn.Transformer.generate_square_subsequent_mask(T))
        )
    return (
        F.layer_norm(x, (C,), weights["norm.weight"], weights["norm.bias"])
        @ weights["embedding.weight"].T
    )


def modern_reference(weights, tokens, config):
    """Compute the modern model's logits with one head and one query at a time, and complex
    rotations.
    """
    T, C, D = tokens.shape[1], config.embd, config.embd // config.heads

    def norm(x):
        return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()

    def rotated(x):  # (B, T, D)
        angles = torch.arange(T)[:, None] * 10000.0 ** (-2 * torch.arange(D // 2) / D)
        z = torch.complex(*norm(x).chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((z.real, z.imag), -1)

    x = weights["embedding.weight"][tokens]
    if config.arch == "modern2":
        e = x.clone()
        for t in range(T):
            for back in (1, 2, 3):
                if t >= back:
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


@pytest.mark.parametrize("T", [1, 7, 12])
@pytest.mark.parametrize("arch", ARCHS)
def test_logits_equal_the_reference(arch, T):
    model, tokens = random_model(arch), random_tokens(4, T)
    expected = REFERENCES[arch](model.state_dict(), tokens, model.config)
    assert expected.std() > 0.1
    assert_close(model(tokens), expected, 1e-5)


@pytest.mark.parametrize("arch", ARCHS)
def test_logits_of_a_long_window_equal_the_reference(arch):
    model, tokens = random_model(arch, block_size=600, layers=1), random_tokens(1, 600)
    expected = REFERENCES[arch](model.state_dict(), tokens, model.config)
    # The float32 error of rotary angles grows with the position, up to 600 * 2**-24 radians.
    assert_close(model(tokens), expected, 1e-4)


@pytest.mark.parametrize("arch", ARCHS)
def test_gradients_equal_the_reference(arch):
    model, tokens, targets = random_model(arch), random_tokens(2, 9), random_tokens(2, 9, seed=1)
    gpt.loss(model, (tokens, targets))[0].backward()
    weights = {
        name: parameter.detach().clone().requires_grad_()
        for name, parameter in model.named_parameters()
    }
    logits = REFERENCES[arch](weights, tokens, model.config)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, weights[name].grad, 1e-4)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_token_does_not_change_the_logits_before_it(arch):
    model, tokens = random_model(arch), random_tokens(2, 12)
    before = model(tokens)
    for t in range(12):
        changed = tokens.clone()
        changed[:, t] = (changed[:, t] + 1) % SMALL.vocab
        after = model(changed)
        assert torch.equal(after[:, :t], before[:, :t])  # the attention weight is exactly 0
        assert not torch.isclose(after[:, t:], before[:, t:]).all(-1).any()


@pytest.mark.parametrize("arch", ["modern", "modern2"])
def test_the_modern_models_depend_on_distances_and_not_on_positions(arch, monkeypatch):
    model, tokens, rope = random_model(arch), random_tokens(2, 12), gpt.rope
    expected = model(tokens)
    for shift in (1, 5, 100):
        monkeypatch.setattr(gpt, "rope", lambda start, *rest: rope(start + shift, *rest))
        assert_close(model(tokens), expected, 1e-4)  # angles up to 112 radians in float32


@pytest.mark.parametrize("T, S", [(1, 1), (9, 9), (1, 9), (4, 9), (600, 600), (1, 600), (4, 600)])
def test_each_query_attends_to_all_positions_up_to_its_own(T, S):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, length, 8, generator=generator) for length in (T, S, S))
    out = gpt.attention(q, k, v, 0.0)
    for t in range(T):
        seen = S - T + t + 1
        weights = (
            torch.einsum("bhd,bhsd->bhs", q[:, :, t], k[:, :, :seen]) / math.sqrt(8)
        ).softmax(-1)
        assert_close(out[:, :, t], torch.einsum("bhs,bhsd->bhd", weights, v[:, :, :seen]), 1e-5)


def test_attention_is_causal_for_all_small_numbers_of_queries_and_positions():
    q, k, v = torch.randn(3, 1, 1, 6, 4, generator=torch.Generator().manual_seed(0))
    whole = gpt.attention(q, k, v, 0.0)
    for S in range(1, 7):
        for T in range(1, S + 1):
            last = gpt.attention(q[:, :, S - T : S], k[:, :, :S], v[:, :, :S], 0.0)
            assert_close(last, whole[:, :, S - T : S], 1e-5)


def test_rms_norm_adds_a_millionth_to_the_mean_square():
    small = torch.full((2, 4), 1e-3)  # Its mean square is a millionth, too.
    torch.testing.assert_close(gpt.rms_norm(small), torch.full((2, 4), 0.5**0.5))
    assert gpt.rms_norm(torch.zeros(4)).tolist() == [0.0] * 4


@pytest.mark.parametrize("autocast", [True, False])
def test_under_autocast_the_residual_stream_is_bfloat16(autocast):
    model, seen = random_model("modern"), []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda block, args: seen.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(random_tokens(2, 5))
    assert seen == [torch.bfloat16 if autocast else torch.float32] * SMALL.layers


@pytest.mark.parametrize("S, copies", [(12, 1000), (600, 20)])
def test_dropout_in_attention_is_random_and_keeps_the_mean(S, copies):
    torch.manual_seed(0)
    q, k = torch.randn(2, copies, 1, S, 4)
    sums = gpt.attention(q, k, torch.ones_like(q), 0.5)[
        ..., 0
    ]  # sums of each query's remaining weights
    assert sums[:, 0, 0].unique().tolist() == [0, 2]  # the first query has a single weight of 1
    assert abs(sums.mean() - 1) < 6 * sums.std() / sums.numel() ** 0.5


# -------------------------------------------------------------------------------------- the weights


def test_gpt2_small_has_the_published_number_of_parameters():
    model = gpt.build(gpt.Config(50257, 1024, 12, 12, 768, arch="gpt2"), seed=None)
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808
    assert model.head.weight is model.embedding.weight


@pytest.mark.parametrize("arch", ARCHS)
def test_initial_weights_depend_only_on_the_seed_and_global_generators_do_not_change(
    arch, monkeypatch
):
    config = SMALL._replace(arch=arch)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("seeded the GPUs"))
    first = gpt.build(config, seed=0)
    monkeypatch.undo()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    again, other = gpt.build(config, seed=0), gpt.build(config, seed=1)
    pairs = list(zip(first.parameters(), again.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not torch.equal(first.embedding.weight, other.embedding.weight)


@pytest.mark.parametrize("arch", ARCHS)
def test_initial_weights_of_a_parameter_depend_on_its_name(arch):
    config = SMALL._replace(arch=arch, vocab=12)  # embedding, positions and head have equal shapes
    weights = dict(gpt.build(config, seed=0).named_parameters())
    drawn = [weight.flatten()[:9].tolist() for weight in weights.values() if weight.std() > 0]
    assert len(drawn) == {"gpt2": 2 + 4 * 3, "modern": 2 + 2 * 3, "modern2": 3 + 2 * 3}[arch]
    assert all(a[i] != b[i] for a, b in combinations(drawn, 2) for i in range(9))
    # It makes no difference which other parameters there are.
    fewer = gpt.build(config._replace(layers=2), seed=0)
    for name, weight in fewer.named_parameters():
        if not name.endswith(("out.weight", "down.weight")):  # their scale depends on the layers
            assert torch.equal(weight, weights[name])


@pytest.mark.parametrize("arch", ARCHS)
def test_without_a_seed_the_model_has_no_memory_and_initial_weight_completes_it(arch):
    config = SMALL._replace(arch=arch)
    empty, full = gpt.build(config, seed=None), gpt.build(config, seed=3)
    assert all(p.is_meta and p.requires_grad for p in empty.parameters())
    pairs = zip(reversed([*empty.named_parameters()]), reversed([*full.parameters()]), strict=True)
    for (name, parameter), expected in pairs:  # in another order than in build
        weight = gpt.initial_weight(config, 3, name, parameter.shape)
        assert weight.dtype == torch.float32 and torch.equal(weight, expected)
    for model in (empty, full):
        assert (model.head.weight is model.embedding.weight) == (arch == "gpt2")


@pytest.mark.parametrize("arch", gpt.ARCHS)
def test_initial_weights_do_not_depend_on_the_defaults_of_torch(arch):
    config = gpt.Config(vocab=7, block_size=4, layers=1, heads=1, embd=4, arch=arch)
    expected = gpt.build(config, seed=0).state_dict()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            found = gpt.build(config, seed=0).state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=0)


def test_building_a_model_does_not_import_the_slow_modules_of_torch():
    """torch imports them, which takes a second, to draw normal numbers on the device "meta"."""
    code = """
        import sys, torch, gpt
        before = set(sys.modules)
        gpt.build(gpt.Config(5, 4, layers=1, heads=1, embd=4, arch="gpt2"), seed=0)
        assert len(set(sys.modules) - before) < 9, sorted(set(sys.modules) - before)
    """
    code = "\n".join(line.strip() for line in code.splitlines())
    folder = Path(gpt.__file__).parent
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, timeout=600)


def test_gpt2_has_the_initial_weights_of_its_paper():
    model = gpt.build(
        SMALL._replace(arch="gpt2", embd=128, layers=8, vocab=100, block_size=64), seed=0
    )
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert (parameter == (1 if "norm" in name and name.endswith("weight") else 0)).all(), (
                name
            )
        else:
            std = 0.02 / math.sqrt(2 * 8) if name.endswith(("out.weight", "down.weight")) else 0.02
            error = std / math.sqrt(2 * parameter.numel())  # standard error of the estimated std
            assert abs(parameter.std() - std) < 5 * error, name


def test_the_initial_blocks_of_the_modern_model_output_zero_and_all_its_parameters_are_matrices():
    model, tokens = gpt.build(SMALL._replace(arch="modern"), seed=0), random_tokens(2, 12)
    assert all(parameter.ndim == 2 for parameter in model.parameters())
    expected = model.head(model.norm(model.embedding(tokens)))
    assert torch.equal(model(tokens), expected)


@pytest.mark.parametrize("arch, std", [("modern", 0.02), ("modern2", 0.1)])
def test_the_initial_embeddings_of_the_modern_models(arch, std):
    model = gpt.build(SMALL._replace(arch=arch, vocab=999, embd=128), seed=0)
    named = dict(model.named_parameters())
    drawn = [named.pop(name) for name in ("embedding.weight", "look_back") if name in named]
    for weight in drawn:
        assert abs(weight.std() - std) < 5 * std / math.sqrt(2 * weight.numel())
    assert len(drawn) == (1 if arch == "modern" else 2)
    for name, weight in named.items():
        if not name.endswith(("out.weight", "down.weight")):
            assert abs(weight.std() - 0.02) < 5 * 0.02 / math.sqrt(2 * weight.numel()), name


@pytest.mark.parametrize("arch", ARCHS)
def test_each_parameter_is_in_exactly_one_group(arch):
    model = gpt.build(SMALL._replace(arch=arch), seed=0)
    kinds = gpt.parameter_groups(model)
    vectors = kinds.pop("vectors", [])
    assert set(kinds) == {"embeddings", "matrices"}
    ids = [id(parameter) for kind in (*kinds.values(), vectors) for parameter in kind]
    assert len(set(ids)) == len(ids) and set(ids) == {
        id(parameter) for parameter in model.parameters()
    }
    outside = {
        "gpt2": {"embedding.weight", "positions.weight"},
        "modern": {"embedding.weight", "head.weight"},
        "modern2": {"embedding.weight", "head.weight", "look_back"},
    }[arch]
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in kinds["embeddings"]} == outside
    assert len(kinds["matrices"]) == 4 * SMALL.layers and all(
        p.ndim == 2 for p in kinds["matrices"]
    )
    assert len(vectors) == (8 * SMALL.layers + 2 if arch == "gpt2" else 0)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"vocab": 0}, "vocab=0, .*: sizes must be at least 1"),
        ({"block_size": 0}, "block_size=0, .*: sizes must be at least 1"),
        ({"layers": -1}, "layers=-1, .*: sizes must be at least 1"),
        ({"heads": 0}, "heads=0, .*: sizes must be at least 1"),
        ({"embd": 0}, "embd=0, .*: sizes must be at least 1"),
        ({"heads": 3}, "embd 16 must be a multiple of heads 3; with rotary positions, a multiple"),
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


def test_the_heads_of_gpt2_can_have_an_odd_width():
    tokens = random_tokens(2, 8)
    logits = gpt.build(SMALL._replace(heads=16, arch="gpt2"), seed=0)(tokens)
    assert logits.shape == (2, 8, SMALL.vocab)


# ---------------------------------------------------------------------------------- loss and FLOPs


@pytest.mark.parametrize("arch", ARCHS)
def test_the_loss_is_the_sum_of_the_cross_entropies(arch):
    model, x, y = random_model(arch), random_tokens(3, 10), random_tokens(3, 10, seed=1)
    total, count = gpt.loss(model, (x, y))
    probabilities = model(x).double().softmax(-1).gather(-1, y[..., None])
    assert count == 30 and total.shape == ()
    torch.testing.assert_close(total.double(), -probabilities.log().sum(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("arch", ARCHS)
def test_in_bfloat16_the_loss_is_summed_in_float32(arch, autocast):
    model, batch = random_model(arch), (random_tokens(3, 10), random_tokens(3, 10, seed=1))
    exact, _ = gpt.loss(model, batch)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        total, _ = gpt.loss(model if autocast else model.bfloat16(), batch)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, exact, rtol=2**-5, atol=0)  # bfloat16 has 8 significant bits


@pytest.fixture
def compiled(monkeypatch):
    """Let torch.compile only count the graphs that it makes; return the counter."""
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    torch._dynamo.reset()
    yield counter
    torch._dynamo.reset()


def test_more_than_eight_shapes_are_compiled(compiled):
    """torch runs a function uncompiled from its ninth shape on, unless its limit is higher."""
    model = gpt.build(SMALL._replace(layers=1), seed=0)
    with torch._dynamo.config.patch(recompile_limit=8):
        gpt.compile_(model)
        for length in range(2, 12):
            model(random_tokens(1, length))
    assert compiled.frame_count == 2 * 10  # the embedding and the block


def test_each_part_is_one_graph_under_ddp_too(compiled):
    """Unless it is told not to, torch cuts a graph where DDP has gradients of 1 MiB to send."""
    model = gpt.build(SMALL._replace(layers=1, embd=384), seed=0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with torch._dynamo.config.patch(optimize_ddp=True):
            gpt.compile_(model)
            gpt.loss(nn.parallel.DistributedDataParallel(model), [random_tokens(1, 8)] * 2)
    finally:
        dist.destroy_process_group()
    assert compiled.frame_count == 3  # the embedding, the block and the loss


@pytest.mark.parametrize("arch", gpt.ARCHS)
def test_activations_stay_in_bfloat16_under_autocast_on_cuda(arch):
    """Fake tensors have the dtypes that CUDA tensors would have. Autocast computes pow in float32 on CUDA."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        with FakeTensorMode():
            x = torch.empty(2, 3, device="cuda", dtype=torch.bfloat16)
            assert gpt.ARCHS[arch].activation(x).dtype == torch.bfloat16
            assert x.square().dtype == torch.float32  # the reason
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)


def test_activations_are_not_recomputed_by_default():
    assert not gpt.build(SMALL, seed=0).checkpoint_activations


@pytest.mark.parametrize("arch", ARCHS)
def test_checkpointed_activations_give_bitwise_equal_gradients_with_less_memory(arch):
    def run(checkpointed):
        model = gpt.build(SMALL._replace(arch=arch, dropout=0.3), seed=0)
        model.checkpoint_activations = checkpointed
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)
        torch.manual_seed(3)  # seeds dropout
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.append(t.numel()) or t, lambda t: t
        ):
            total, _ = gpt.loss(model, (random_tokens(4, 12), random_tokens(4, 12, seed=1)))
        total.backward()
        return [total, *(parameter.grad for parameter in model.parameters())], sum(kept)

    (plain, much), (checkpointed, little) = run(False), run(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, checkpointed, strict=True))
    assert little < much / 3


def test_with_checkpointed_activations_autograd_grad_works():
    """Only the kind of checkpoint that is not reentrant can do this."""
    model = gpt.build(SMALL, seed=0)
    model.checkpoint_activations = True
    total, _ = gpt.loss(model, (random_tokens(4, 12), random_tokens(4, 12, seed=1)))
    gradients = torch.autograd.grad(total, [*model.parameters()])
    total, _ = gpt.loss(model, (random_tokens(4, 12), random_tokens(4, 12, seed=1)))
    total.backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(gradients, model.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch raises it on import
def test_compiling_does_not_change_parameter_names():
    model = gpt.build(SMALL, seed=0)
    names = [name for name, _ in model.named_parameters()]
    gpt.compile_(model)
    assert [name for name, _ in model.named_parameters()] == names == list(model.state_dict())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch raises it on import
def test_each_block_is_compiled_alone():
    model = gpt.build(SMALL, seed=0)
    gpt.compile_(model)
    compiled = [m for m in model.modules() if m._compiled_call_impl is not None]
    assert compiled == [*model.blocks]


def test_a_copy_of_a_compiled_model_uses_its_own_weights(compiled):
    model = gpt.build(SMALL, seed=0).eval()
    gpt.compile_(model)
    tokens = random_tokens(2, 8)
    before = model(tokens)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(other(tokens), before) and not model(tokens).any()


@pytest.mark.filterwarnings("ignore")  # torch raises it on import
@pytest.mark.skipif(not shutil.which("g++"), reason="compiling for a CPU needs g++")
def test_the_gradient_of_a_compiled_model_does_not_depend_on_earlier_batches():
    """Otherwise a run that resumes after a short batch could differ from a run that was not
    interrupted.
    """
    model = gpt.build(SMALL._replace(layers=1, dropout=0.1), seed=0)
    gpt.compile_(model)
    x, y = random_tokens(8, 12), random_tokens(8, 12, seed=1)

    def gradient(rows):
        model.train().zero_grad()
        torch.manual_seed(3)  # seeds dropout
        gpt.loss(model, (x[:rows], y[:rows]))[0].backward()
        return [parameter.grad for parameter in model.parameters()]

    before = gradient(8)
    with torch.no_grad():
        model.eval()(x[:3]), model(x[:1, :5])  # shapes of the end of an evaluation
    gradient(3)
    assert all(torch.equal(a, b) for a, b in zip(before, gradient(8), strict=True))


@pytest.mark.filterwarnings("ignore")  # torch raises it on import
@pytest.mark.skipif(not shutil.which("g++"), reason="compiling for a CPU needs g++")
def test_the_gradient_of_a_compiled_model_does_not_depend_on_the_threads():
    """Compiled code would add up the gradient of the embedding in an order that is not fixed."""
    model = gpt.build(SMALL._replace(layers=1), seed=0)
    x, y = random_tokens(64, 12), random_tokens(64, 12, seed=1)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    gpt.compile_(model)
    try:
        gradients = []
        for _ in range(50):
            model.zero_grad()
            gpt.loss(model, (x, y))[0].backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
    finally:
        torch.set_num_threads(threads)
    for other in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], other, strict=True))


@pytest.mark.parametrize("arch", ARCHS)
def test_dropout_is_random_in_training_and_off_in_evaluation(arch):
    model, tokens = random_model(arch, dropout=0.5), random_tokens(2, 12)
    plain = random_model(arch)
    assert torch.equal(model(tokens), plain(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))


# ----------------------------------------------------------------------------------------- sampling


def sample_without_a_cache(model, prompt, temperature):
    """Follow the rule of `sample`: cut a context of more than block_size tokens to its last half."""
    size = model.config.block_size
    context = prompt[-size:].tolist()
    while True:
        logits = model(torch.tensor([context]))[0, -1]
        context.append(int(gpt.sample_token(logits, temperature, 0)))
        yield context[-1]
        if len(context) > size:
            context = context[-((size + 1) // 2) :]


def sampled(model, prompt, count, **settings):
    """Return the next `count` tokens of a single prompt."""
    return [int(token) for token in islice(gpt.sample(model, prompt, **settings), count)]


@pytest.mark.parametrize("temperature", [0, 2])
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "block_size, prompt", [(12, 1), (12, 5), (12, 12), (12, 30), (7, 3), (2, 1), (1, 1), (1, 3)]
)
def test_sampling_with_and_without_a_cache_gives_the_same_tokens(
    block_size, prompt, arch, temperature
):
    model, prompt = random_model(arch, block_size=block_size), random_tokens(prompt)
    torch.manual_seed(0)
    with_cache = sampled(model, prompt, 50, temperature=temperature)
    torch.manual_seed(0)
    without = [*islice(sample_without_a_cache(model, prompt, temperature), 50)]
    assert with_cache == without
    assert temperature == 0 or len(set(without)) > 4


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("block_size, length", [(12, 1), (12, 5), (12, 30), (7, 3), (1, 1)])
def test_a_batch_of_prompts_continues_like_each_prompt_alone(block_size, length, arch):
    model = random_model(arch, block_size=block_size)
    prompts = random_tokens(5, length)
    tokens = [*islice(gpt.sample(model, prompts, temperature=0), 50)]
    assert all(token.shape == (5,) and token.dtype == torch.int64 for token in tokens)
    rows = torch.stack(tokens, dim=1).tolist()
    assert rows == [sampled(model, prompt, 50, temperature=0) for prompt in prompts]
    # These prompts lead gpt2 to one token that repeats.
    assert arch == "gpt2" or len({*map(tuple, rows)}) > 1


def test_a_model_can_be_trained_on_sampled_tokens():
    """Tensors of torch.inference_mode() could not be saved for the backward pass."""
    model = random_model("modern2")
    tokens = next(gpt.sample(model, random_tokens(2)))[None]
    model(tokens, tokens).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_each_row_of_a_batch_draws_its_own_tokens():
    tokens = islice(gpt.sample(random_model("modern"), torch.zeros(5, 1, dtype=torch.int64)), 30)
    assert len({*map(tuple, torch.stack([*tokens], dim=1).tolist())}) == 5


@pytest.mark.parametrize("arch", ARCHS)
def test_sampling_computes_one_position_per_token_until_the_context_is_full(arch):
    model, widths = random_model(arch), []
    model.blocks[0].register_forward_hook(lambda _, args, out: widths.append(out.shape[1]))
    list(islice(gpt.sample(model, random_tokens(5)), 16))
    assert widths == [5] + [1] * 7 + [6] + [1] * 6 + [6]


def test_sampling_computes_the_logits_of_the_last_token_only():
    """With V = 50,304, those of all positions of a long prompt would take gigabytes."""
    model, shapes = random_model("modern"), []
    model.head.register_forward_hook(lambda module, args, out: shapes.append(out.shape))
    sampled(model, random_tokens(7), 20)
    assert shapes == [(1, model.config.vocab)] * 20


@pytest.mark.parametrize("arch", ARCHS)
def test_sampling_has_no_dropout_and_does_not_disable_gradients(arch):
    model, prompt = random_model(arch, dropout=0.5), random_tokens(3)
    expected = sampled(random_model(arch), prompt, 20, temperature=0)
    tokens = gpt.sample(model, prompt, temperature=0)
    assert [int(next(tokens)) for _ in range(20)] == expected
    assert torch.is_grad_enabled()


def test_sampling_from_a_model_in_training_mode_is_an_error():
    with pytest.raises(ValueError, match="training mode; call model.eval"):
        next(gpt.sample(random_model("modern").train(), random_tokens(3)))


@pytest.mark.parametrize(
    "setting",
    [{"temperature": -0.5}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_k": -1}],
)
def test_a_negative_or_infinite_temperature_or_top_k_is_an_error(setting):
    with pytest.raises(ValueError, match="must be finite, and at least 0"):
        next(gpt.sample(random_model("modern"), random_tokens(3), **setting))


def test_sampled_tokens_depend_only_on_the_seed():
    def draw(seed):
        torch.manual_seed(seed)
        return sampled(model, random_tokens(3), 30, temperature=2.0)

    model = random_model("gpt2")
    assert draw(0) == draw(0) != draw(1)


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_an_empty_prompt_is_an_error_at_the_first_next(shape):
    tokens = gpt.sample(random_model("modern"), random_tokens(*shape))
    with pytest.raises(ValueError, match="the prompt is empty"):
        next(tokens)


LOGITS = torch.tensor([0.3, 2.0, -1.0, 1.5, 0.0, 1.9])


def distribution(temperature, top_k):
    """Compute the probabilities of the tokens from the definition, one token after another."""
    weights = {i: math.exp(logit / temperature) for i, logit in enumerate(LOGITS.tolist())}
    kept = sorted(weights, key=weights.get, reverse=True)[: top_k or len(weights)]
    return {i: weights[i] / sum(weights[j] for j in kept) for i in kept}


@pytest.mark.parametrize(
    "temperature, top_k",
    [(1, 0), (0.5, 0), (2, 0), (1, 1), (1, 2), (1, 6), (1, 99), (1.5, 3), (0.7, 4)],
)
def test_token_frequencies_follow_temperature_and_top_k(temperature, top_k):
    expected, n = distribution(temperature, top_k), 2000
    torch.manual_seed(0)
    drawn = gpt.sample_token(LOGITS.expand(n, 6), temperature, top_k)
    counts = Counter(drawn.tolist())
    assert counts.keys() == expected.keys()
    statistic = sum((counts[i] - n * p) ** 2 / (n * p) for i, p in expected.items())
    df = len(expected) - 1
    # the mean plus six standard deviations of chi-square
    assert statistic <= df + 6 * math.sqrt(2 * df)


def test_each_row_of_logits_has_its_own_largest_ones():
    logits = torch.stack((LOGITS, LOGITS.roll(1), -LOGITS))
    tokens = [gpt.sample_token(logits, 5.0, 2) for _ in range(100)]
    rows = zip(*(token.tolist() for token in tokens), strict=True)
    assert [{*row} for row in rows] == [{1, 5}, {2, 0}, {2, 4}]
    assert gpt.sample_token(logits, 0, 2).tolist() == [1, 2, 2]


def test_temperature_0_takes_the_most_likely_token_and_draws_nothing():
    before = torch.get_rng_state()
    assert gpt.sample_token(LOGITS, 0, 3) == 1
    assert torch.equal(torch.get_rng_state(), before)


def test_sample_passes_its_settings_to_sample_token():
    draw = partial(sampled, random_model("modern"), random_tokens(4), 20)
    greedy = draw(temperature=0)
    assert draw(top_k=1) == greedy
    assert draw(temperature=1e-4) == greedy
    assert draw(temperature=3.0) != greedy


def test_sample_draws_with_temperature_1_from_all_tokens_by_default():
    model, prompt = random_model("modern"), random_tokens(4)
    torch.manual_seed(0)
    plain = sampled(model, prompt, 30)
    torch.manual_seed(0)
    assert plain == sampled(model, prompt, 30, temperature=1.0, top_k=0)


def test_a_tiny_temperature_does_not_overflow():
    assert gpt.sample_token(LOGITS * 1e10, 1e-40, 0) == 1
