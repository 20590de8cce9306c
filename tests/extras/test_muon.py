"""Tests of extras/muon.py: one step equals torch.optim.Muon's, and the polynomial in float64.

`every_job` runs once for each number of ranks. The tests check what its ranks returned.
"""

from datetime import timedelta
from functools import cache
from itertools import islice

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import same
from torch import nn

import chardata
import ckpt
import ddp_setup
import gpt
import loop
from extras import fsdp
from extras.muon import Muon, newton_schulz

CPU = torch.device("cpu")
ONE = ddp_setup.World(0, 0, 1, 1, CPU)
SHAPES = [(16, 16), (48, 16), (64, 16), (16, 64), (16, 16), (48, 16), (20, 16), (1, 7)]
SETTINGS = pytest.mark.parametrize(
    "settings",
    [
        {},
        {"adjust_lr_fn": "match_rms_adamw"},
        {"nesterov": False, "momentum": 0.8, "weight_decay": 0.3},
        {"ns_steps": 4, "ns_coefficients": (2.0, -1.5, 0.5), "adjust_lr_fn": "original"},
    ],
)


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype) / 10) for s in SHAPES]


def set_gradients(step, *models):
    """Give the parameters of each model the same random gradients, which depend on the step."""
    generator = torch.Generator().manual_seed(step)
    for equal in zip(*models):
        gradient = torch.randn(equal[0].shape, generator=generator)
        for p in equal:
            p.grad = gradient.to(p.dtype)


def trained(steps=3, **attributes):
    """Return parameters and an optimizer with momentum, and gradients for one more step."""
    ours = parameters()
    optimizer = Muon(ours, 0.01)
    for step in range(steps + 1):
        set_gradients(step, ours)
        if step < steps:
            optimizer.step()
    for name, value in attributes.items():
        setattr(optimizer, name, value)
    return ours, optimizer


def polynomial(x, coefficients, steps):
    """Apply the iterations to the singular values of a matrix, divided by its Frobenius norm."""
    a, b, c = coefficients
    u, s, v = torch.linalg.svd(x / x.norm(), full_matrices=False)
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return u * s @ v


def error(ours, theirs, before):
    """Return the difference of two updates, relative to the second."""
    return ((ours - theirs).norm() / (theirs - before).norm()).item()


# --- one process ---


@SETTINGS
def test_each_step_and_state_equals_that_of_torch(settings):
    """torch computes in bfloat16, which rounds by 4e-3, in another order than on Gram matrices."""
    ours, theirs = parameters(), parameters()
    optimizers = [Muon(ours, 0.01, **settings), torch.optim.Muon(theirs, 0.01, **settings)]
    for step in range(6):
        before = [p.detach().clone() for p in theirs]
        set_gradients(step, ours, theirs)
        for optimizer in optimizers:
            optimizer.step()
        for a, b, old in zip(ours, theirs, before):
            assert error(a, b, old) <= 0.04, (step, a.shape)
            a.data.copy_(b.data)
        assert same(*(optimizer.state_dict() for optimizer in optimizers))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@SETTINGS
def test_each_step_equals_the_definition(settings, dtype, tolerance):
    """The reference applies the polynomial to singular values, in float64."""
    ours = parameters(dtype)
    expected, buffers = [p.detach().double().clone() for p in ours], [0.0] * len(ours)
    optimizer = Muon(ours, 0.01, dtype=dtype, **settings)
    group = optimizer.param_groups[0]
    rate, match_rms = group["momentum"], group["adjust_lr_fn"] == "match_rms_adamw"
    for step in range(6):
        set_gradients(step, ours)
        optimizer.step()
        for i, p in enumerate(ours):
            gradient, (rows, columns) = p.grad.double(), p.shape
            buffers[i] = rate * buffers[i] + (1 - rate) * gradient
            x = rate * buffers[i] + (1 - rate) * gradient if group["nesterov"] else buffers[i]
            x = polynomial(x, group["ns_coefficients"], group["ns_steps"])
            factor = 0.04 * max(rows, columns) if match_rms else max(1, rows / columns)
            expected[i] *= 1 - 0.01 * group["weight_decay"]
            expected[i] -= 0.01 * factor**0.5 * x
            torch.testing.assert_close(p.double(), expected[i], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows, columns", [(32, 32), (128, 32), (32, 128)])
def test_in_bfloat16_it_is_as_exact_as_torch_if_singular_values_differ_a_lot(rows, columns):
    """Five iterations on one Gram matrix have an error of 4, and singular values of 20."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(n, 32, generator=generator) for n in (rows, columns))
    x = torch.linalg.qr(left)[0] * torch.logspace(0, -4, 32) @ torch.linalg.qr(right)[0].T
    triple = (3.4445, -4.7750, 2.0315)
    exact = polynomial(x.bfloat16().double(), triple, 5)
    theirs = torch.optim._muon._zeropower_via_newtonschulz(x, triple, 5, 1e-7)
    ours = newton_schulz(x.bfloat16()[None], triple, 5, 1e-7)[0]
    assert (ours - exact).norm() <= 1.2 * (theirs - exact).norm() <= 0.2 * exact.norm()


@pytest.mark.parametrize("first, second", [(Muon, torch.optim.Muon), (torch.optim.Muon, Muon)])
def test_each_continues_from_the_state_of_the_other(first, second):
    """The state is bitwise equal. The updates differ only by the rounding of bfloat16."""
    whole, parts = parameters(), parameters()
    reference, begun = (first(p, lr=0.01, adjust_lr_fn="match_rms_adamw") for p in (whole, parts))
    continued = second(parts)
    for step in range(6):
        if step == 3:
            continued.load_state_dict(begun.state_dict())
        set_gradients(step, whole, parts)
        reference.step()
        (begun if step < 3 else continued).step()
    assert same(continued.state_dict(), reference.state_dict())
    assert all(error(p, q, old) < 0.04 for p, q, old in zip(parts, whole, parameters()))


def test_it_takes_what_an_optimizer_takes():
    """A closure, a parameter without gradient, a learning rate that is a tensor."""
    ours, others = parameters(), parameters()
    optimizer = Muon(ours, lr=torch.tensor(0.5**6))
    optimizer.step()  # no gradient at all

    def closure():
        set_gradients(0, ours, others)
        ours[0].grad = others[0].grad = None
        return torch.is_grad_enabled()

    assert optimizer.step(closure) is True and ours[0] not in optimizer.state
    Muon(others[1:], lr=0.5**6).step()
    assert all(map(torch.equal, ours, others))


@pytest.mark.parametrize(
    "wrong", [torch.ones(2, 2) * 1j, torch.ones(2, 2, 2), torch.ones(2, 2).to_sparse()]
)
def test_what_it_cannot_compute_is_an_error_before_a_parameter_changes(wrong):
    matrix, later = nn.Parameter(torch.ones(2, 2)), nn.Parameter(wrong.to_dense())
    optimizer = Muon([matrix])
    optimizer.param_groups[0]["params"].append(later)
    matrix.grad, later.grad = torch.ones(2, 2), wrong
    with pytest.raises(RuntimeError, match="Muon needs dense, real matrices"):
        optimizer.step()
    assert torch.equal(matrix, torch.ones(2, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weight_decay_is_that_of_torch_for_each_dtype(dtype):
    """With a rounded factor, bfloat16 weights would decay about twice as fast."""
    ours, theirs = ([nn.Parameter(torch.ones(4, 6, dtype=dtype))] for _ in range(2))
    for optimizer in (Muon(ours, 0.02, 0.1), torch.optim.Muon(theirs, 0.02, 0.1)):
        [p] = optimizer.param_groups[0]["params"]
        for _ in range(20):
            p.grad = torch.zeros_like(p)
            optimizer.step()
    assert torch.equal(*ours, *theirs)


# --- steps that are skipped ---


@pytest.mark.parametrize("steps", [0, 3])
def test_found_inf_changes_nothing(steps):
    ours, optimizer = trained(steps, found_inf=torch.ones(()))
    reference, other = trained(steps)
    for p in ours:
        p.grad[0, 0] = torch.nan
    optimizer.step()
    assert all(map(torch.equal, ours, reference))
    for p, q in zip(ours, reference):
        expected = other.state[q]["momentum_buffer"] if steps else torch.zeros_like(p)
        assert torch.equal(optimizer.state[p]["momentum_buffer"], expected)


def test_with_found_inf_the_host_reads_no_tensor():
    """A tensor on the device "meta" has no value, so an attempt to read it raises an error."""
    ours = [nn.Parameter(p.to("meta")) for p in parameters()]
    optimizer = Muon(ours, 0.01)
    optimizer.found_inf = optimizer.grad_scale = torch.ones((), device="meta")
    for _ in range(2):
        for p in ours:
            p.grad = torch.zeros_like(p)
        optimizer.step()


def test_grad_scaler_skips_steps_that_overflow():
    (ours, optimizer), (reference, other) = trained(), trained()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for overflow in (True, False):
        scale = scaler.get_scale()
        for p, q in zip(ours, reference):
            p.grad = scaler.scale(q.grad)
        ours[0].grad[0, 0] = torch.inf if overflow else ours[0].grad[0, 0]
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (scale / 2 if overflow else scale)
        if not overflow:
            other.step()
        assert all(map(torch.equal, ours, reference))
        assert same(optimizer.state_dict(), other.state_dict())


# --- several ranks ---

TOKENS = (np.random.default_rng(0).integers(0, 17, 200).astype(np.uint8),)
PLAN = chardata.BatchPlan(TOKENS, block_size=8, batch_size=6)
KINDS = [("ddp", False), ("ddp", True), ("zero", False), ("fsdp", True)]  # (strategy, distribute)
EACH = pytest.mark.parametrize("kind", KINDS)
SIZES = pytest.mark.parametrize("size", [2, 3])


def build(world, kind, dtype):
    """Return (distributed model, optimizers). Three ranks cannot divide its 16 rows evenly, nor four
    layers.
    """
    strategy, distribute = kind
    bare = gpt.build(gpt.Config(18, 8, layers=4, heads=2, embd=16, arch="gpt2"), seed=0)
    if strategy == "ddp":
        model = ddp_setup.replicate(bare, world)
    else:
        model = fsdp.shard_(bare, world.size, world.device, [*bare.blocks], strategy)
    groups = gpt.parameter_groups(bare)
    settings = {"lr": 3e-3, "adjust_lr_fn": "match_rms_adamw"}
    muon = Muon(groups["matrices"], dtype=dtype, distribute=distribute, **settings)
    return model, [torch.optim.SGD(groups["embeddings"] + groups["vectors"], lr=0.1), muon]


def learn(world, kind, model, optimizers, start, end):
    """Train from step `start` to `end`. Return the state, and the parameters as this rank sees them."""
    share = {"rank": world.rank, "world_size": world.size}
    steps, loss_fn = islice(chardata.steps(PLAN, start=start, **share), end - start), gpt.loss
    if kind[0] == "fsdp":
        steps, loss_fn = fsdp.pad_steps(steps, loss_fn)
    settings = {"start": start, "sync_each": kind[0] == "fsdp"}
    for _ in loop.train_(model, optimizers, steps, loss_fn, **settings):
        pass
    seen = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return ckpt.snapshot(model, optimizers), [p.detach() for p in seen]


def learning(world, kind):
    return learn(world, kind, *build(world, kind, torch.float64), 0, 8)


def resumed(world, kind):
    """Return the states after 6 steps, uninterrupted, and after 3 steps, a checkpoint and 3 more."""
    straight, again = (build(world, kind, torch.bfloat16) for _ in range(2))
    learn(world, kind, *straight, 0, 3)
    ckpt.restore_(ckpt.snapshot(*straight), *again)
    (whole, _), (continued, seen) = (
        learn(world, kind, *model, 3, 6) for model in (straight, again)
    )
    return [whole, continued], seen


def groups_of_three_and_two_ranks(rank: int, folder: str) -> None:
    """Run the jobs with both numbers of ranks in the same processes, because these start slowly."""
    torch.set_num_threads(1)
    for size in range(3, max(rank, 1), -1):
        store = dist.FileStore(f"{folder}/store of {size}", size)
        dist.init_process_group("gloo", None, timedelta(seconds=300), size, rank, store)
        world = ddp_setup.World(rank, rank, size, size, CPU)
        found = {
            (job.__name__, kind): job(world, kind) for job in (learning, resumed) for kind in KINDS
        }
        torch.save(found, f"{folder}/{rank} of {size}.pt")
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return a function: (number of ranks, job, kind) -> list of what each rank returned."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(groups_of_three_and_two_ranks, (str(folder),), 3)
    load = cache(lambda rank, size: torch.load(folder / f"{rank} of {size}.pt"))
    return lambda size, job, kind: [load(rank, size)[job, kind] for rank in range(size)]


@SIZES
@EACH
def test_several_ranks_equal_one(ranks, size, kind):
    expected, _ = learning(ONE, ("ddp", False))
    (state, seen), *others = ranks(size, "learning", kind)
    assert len(expected["optimizers"][1]["state"]) == 16
    for ours, theirs in (
        (state["model"], expected["model"]),
        (state["optimizers"], expected["optimizers"]),
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert all(all(map(torch.equal, seen, other)) for _, other in others)


@SIZES
@EACH
def test_resume_is_bitwise_exact(ranks, size, kind):
    ((whole, continued), seen), *others = ranks(size, "resumed", kind)
    assert same(whole, continued)
    assert all(all(map(torch.equal, seen, other)) for _, other in others)
