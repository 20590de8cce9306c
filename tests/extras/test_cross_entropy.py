"""Tests of extras/cross_entropy.py: the loss and the gradients are those of all logits at once."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import gpt
import run
from extras import cross_entropy as extra

torch.set_num_threads(1)  # The tensors are tiny. Several threads would wait for each other.

cross_entropy = partial(extra.cross_entropy, gpt.cross_entropy)
ARCHS = ["gpt2", "modern2"]
SMALL = gpt.Config(vocab=13, block_size=12, layers=3, heads=2, embd=16)


def random_tokens(*shape):
    return torch.randint(SMALL.vocab, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("parts", [1, 2, 3, 100])
def test_cross_entropy_in_parts_gives_the_same_loss_and_gradients(parts):
    torch.manual_seed(0)
    x, weight = torch.randn(100, 8, dtype=torch.float64), torch.randn(31, 8, dtype=torch.float64)
    targets = torch.randint(31, (100,))
    inputs = x.requires_grad_(), weight.requires_grad_()
    theirs = F.cross_entropy((x @ weight.T).float(), targets, reduction="sum")
    ours = cross_entropy(x, weight, targets, max_logits=31 * 100 // parts)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        torch.autograd.grad(ours, inputs), torch.autograd.grad(theirs, inputs)
    )


@pytest.mark.filterwarnings("ignore")  # torch raises it on import
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_compiled_parts_give_the_gradients_of_parts_that_are_not_compiled(dtype):
    """With torch 2.11, the gradients were wrong while the loss was summed in place. torch 2.13 has no such error."""
    in_parts = partial(cross_entropy, max_logits=31 * 30)  # 30, 30, 30 and 10 rows
    torch.manual_seed(0)
    x, weight = torch.randn(100, 8).to(dtype).requires_grad_(), torch.randn(31, 8).requires_grad_()
    targets = torch.randint(31, (100,))
    results = []
    for function in (in_parts, torch.compile(in_parts, backend="aot_eager", dynamic=False)):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = function(x, weight, targets)
        results.append((loss, *torch.autograd.grad(loss, (x, weight))))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.fixture
def rows(monkeypatch):
    """Return a list to which each call of F.cross_entropy appends its number of rows."""
    rows, original = [], F.cross_entropy

    def watched(logits, targets, **options):
        rows.append(len(logits))
        return original(logits, targets, **options)

    monkeypatch.setattr(F, "cross_entropy", watched)
    return rows


def test_cross_entropy_is_computed_in_as_few_parts_as_allowed(rows):
    x, weight = torch.randn(5, 4), torch.randn(50, 4)
    for max_logits, expected in ((30, [1] * 5), (200, [4, 1]), (249, [4, 1]), (250, [5])):
        for grad in (True, False):
            rows.clear()
            with torch.set_grad_enabled(grad):
                cross_entropy(x, weight, torch.zeros(5, dtype=torch.int64), max_logits)
            assert rows == expected


@pytest.mark.parametrize("trained", ["x", "weight"])
def test_cross_entropy_in_parts_with_one_frozen_input_gives_the_gradient_of_the_other(trained):
    torch.manual_seed(0)
    inputs = {"x": torch.randn(9, 4), "weight": torch.randn(50, 4)}
    inputs[trained].requires_grad_()
    y = torch.randint(50, (9,))
    grads = [
        torch.autograd.grad(cross_entropy(**inputs, targets=y, max_logits=n), inputs[trained])
        for n in (100, 1000)
    ]
    torch.testing.assert_close(*grads)


def test_a_second_derivative_of_cross_entropy_in_parts_is_an_error():
    layer, weight, y = nn.Linear(4, 4), torch.randn(50, 4), torch.arange(5)
    loss = cross_entropy(layer(torch.randn(5, 4)).tanh(), weight, y, max_logits=50)
    with pytest.raises(RuntimeError, match="cross_entropy in parts has no second derivatives"):
        torch.autograd.grad(loss, layer.weight, create_graph=True)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_a_model_whose_loss_is_computed_in_parts_has_the_same_gradients(arch, dtype, tolerance):
    """With the architecture gpt2, the weights of the output layer are those of the embedding."""
    config, tokens, grads = SMALL._replace(arch=arch), random_tokens(4, SMALL.block_size), []
    in_parts = partial(cross_entropy, max_logits=5 * SMALL.vocab)
    for function in (in_parts, gpt.cross_entropy):
        model = gpt.build(config, 0)
        model.cross_entropy = function
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            gpt.loss(model, (tokens, tokens))[0].backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    for name, parts in grads[0].items():
        assert (parts - grads[1][name]).norm() <= tolerance * grads[1][name].norm(), name


def test_gradients_of_bfloat16_weights_are_added_up_in_float32():
    torch.manual_seed(0)
    x, y = torch.randn(4096, 8, dtype=torch.bfloat16), torch.randint(50, (4096,))
    weight = torch.randn(50, 8, dtype=torch.bfloat16, requires_grad=True)
    whole, parts = (
        torch.autograd.grad(cross_entropy(x, weight, y, 50 * rows), weight)[0].float()
        for rows in (4096, 8)
    )
    assert (parts - whole).norm() < 1e-2 * whole.norm()


def test_the_loss_of_parts_is_finite_if_a_gradient_is_not():
    x = torch.full((3000, 2), 60.0, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(50, 2, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        loss = cross_entropy(x, weight, torch.zeros(3000, dtype=torch.int64), 50 * 1500)
    loss.backward()
    torch.testing.assert_close(loss.item(), 3000 * math.log(50), rtol=1e-6, atol=0)
    assert not weight.grad.isfinite().all()  # 60 * 1500 is more than float16 can be


def test_small_gradients_in_float16_are_not_lost_before_the_loss_is_scaled():
    torch.manual_seed(0)
    x, y = 4 * torch.randn(8, 8), torch.randint(500, (8,))
    weight = torch.randn(500, 8, requires_grad=True)

    def gradient(rows):
        with torch.autocast("cpu", torch.float16):
            loss = cross_entropy(x, weight, y, 500 * rows)
        return torch.autograd.grad(loss * 2**12, weight)[0]

    whole, parts = gradient(8), gradient(2)
    assert (parts == 0).sum() == (whole == 0).sum()
    assert (parts - whole).norm() < 4e-3 * whole.norm()


def test_gradients_of_many_parts_are_not_accumulated_in_float16():
    torch.manual_seed(0)
    x, y = torch.randn(2048, 32, dtype=torch.float16), torch.randint(64, (2048,))
    weight = torch.randn(64, 32, requires_grad=True)
    exact = weight.detach().half().double().requires_grad_()
    gpt.cross_entropy(x.double(), exact, y).backward()
    errors = []
    for rows in (2048, 4):
        weight.grad = None
        with torch.autocast("cpu", torch.float16):
            loss = cross_entropy(x, weight, y, max_logits=64 * rows)
        (256.0 * loss).backward()
        errors.append((weight.grad / 256 - exact.grad).norm() / exact.grad.norm())
    assert errors[1] <= errors[0] < 1e-3, errors


def test_the_logits_of_parts_are_computed_once():
    x, weight, y = torch.randn(64, 4, requires_grad=True), torch.randn(50, 4), torch.arange(64) % 50
    with FlopCounterMode(display=False) as counter:
        cross_entropy(x, weight.requires_grad_(), y, max_logits=500).backward()
    assert counter.get_total_flops() == 3 * 2 * 64 * 4 * 50


def test_cross_entropy_never_holds_more_logits_than_allowed():
    x, weight, targets = (
        torch.randn(64, 4, requires_grad=True),
        torch.randn(50, 4),
        torch.zeros(64, dtype=torch.int64),
    )
    largest = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            largest.extend(
                t.numel() for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)
            )
            return out

    with Watch():
        cross_entropy(x, weight, targets, max_logits=500).backward()
    assert max(largest) == 500


def test_on_a_cpu_33_million_logits_are_computed_at_a_time(rows):
    """Tensors on the device "meta" have no content, so they take no memory."""
    x, weight = torch.empty(3, 1, device="meta"), torch.empty(2**24, 1, device="meta")
    cross_entropy(x, weight, torch.zeros(3, dtype=torch.int64, device="meta"))
    assert rows == [2, 1]


def test_gradients_of_many_parts_are_not_accumulated_in_bfloat16():
    torch.manual_seed(0)
    x, targets = torch.randn(2048, 32), torch.randint(256, (2048,))

    def gradient(max_logits):
        weight = nn.Parameter(torch.linspace(-0.1, 0.1, 256 * 32).view(256, 32).clone())
        with torch.autocast("cpu", torch.bfloat16):
            cross_entropy(x, weight, targets, max_logits).backward()
        return weight.grad

    whole, parts = gradient(2048 * 256), gradient(16 * 256)
    assert (parts - whole).norm() < 4e-3 * whole.norm()


def test_the_model_of_a_training_has_this_cross_entropy(monkeypatch):
    """Without the extra, it has that of gpt.py: test_without_extras.py trains with it."""

    def missing(name):
        raise FileNotFoundError(name)

    model = run.build_model(gpt.Config(5, 4, 1, 1, 8), 0)
    assert model.cross_entropy.func is extra.cross_entropy
    monkeypatch.setattr(run, "extra", missing)
    assert run.build_model(model.config, 0).cross_entropy is gpt.cross_entropy
