"""Tests of extras/muon.py: one step equals torch.optim.Muon's, and the polynomial in float64.

`every_job` runs once for each number of ranks. The tests check what its ranks returned.
"""

import copy
import os
import pickle
from functools import partial
from itertools import islice

import call
import numpy as np
import pytest
import torch
from conftest import TINY, losses, run, same, state
from torch import nn

import chardata
import ckpt
import ddp_setup
import gpt
import loop
from extras import fsdp
from extras.muon import Muon, newton_schulz

ONE = ddp_setup.World(0, 0, 1, 1, torch.device("cpu"))
SHAPES = [(16, 16), (48, 16), (64, 16), (16, 64), (16, 16), (48, 16), (20, 16), (1, 7)]
SETTINGS = [
    {},
    {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
    {"nesterov": False, "momentum": 0.8, "weight_decay": 0.3},
    {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "adjust_lr_fn": "original"},
]
TRIPLES = [(4.1, -2.9, 0.5), (3.9, -2.9, 0.6), (2.8, -2.1, 0.5), (1.875, -1.25, 0.375)]


def parameters(dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype) / 10) for s in shapes]


def set_gradients(step, *models):
    """Give the parameters of each model the same random gradients, which depend on the step."""
    generator = torch.Generator().manual_seed(step)
    for equal in zip(*models):
        gradient = torch.randn(equal[0].shape, generator=generator)
        for p in equal:
            p.grad = gradient.to(p.dtype)


def polynomial(x, triples):
    """Apply the iterations to the singular values of a matrix, divided by its Frobenius norm."""
    u, s, v = torch.linalg.svd(x / x.norm(), full_matrices=False)
    for a, b, c in triples:
        s = a * s + b * s**3 + c * s**5
    return u * s @ v


def error(ours, theirs, before):
    """Return the difference of two updates, relative to the second."""
    return ((ours - theirs).norm() / (theirs - before).norm()).item()


# --- one process ---


@pytest.mark.parametrize("settings", SETTINGS)
def test_each_step_equals_that_of_torch(settings):
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
        for a, b in zip(ours, theirs):
            states = [o.state[p] for o, p in zip(optimizers, (a, b))]
            assert same(*map(dict, states))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("settings", SETTINGS)
def test_each_step_equals_the_definition(settings, dtype):
    """The reference applies the polynomial to singular values, in float64."""
    ours = parameters(dtype)
    expected, buffers = [p.detach().double().clone() for p in ours], [0.0] * len(ours)
    optimizer = Muon(ours, 0.01, dtype=dtype, **settings)
    group = optimizer.param_groups[0]
    for step in range(6):
        set_gradients(step, ours)
        optimizer.step()
        for i, p in enumerate(ours):
            gradient, rate, (rows, columns) = p.grad.double(), group["momentum"], p.shape
            buffers[i] = rate * buffers[i] + (1 - rate) * gradient
            x = rate * buffers[i] + (1 - rate) * gradient if group["nesterov"] else buffers[i]
            x = polynomial(x, [group["ns_coefficients"]] * group["ns_steps"])
            rms = 0.2 * max(rows, columns) ** 0.5
            factor = rms if settings.get("adjust_lr_fn") == "match_rms_adamw" else 1
            factor = factor if factor == rms else max(1, rows / columns) ** 0.5
            expected[i] = expected[i] * (1 - 0.01 * group["weight_decay"]) - 0.01 * factor * x
            tolerance = 1e-5 if dtype == torch.float32 else 1e-12
            torch.testing.assert_close(p.double(), expected[i], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_iteration_can_have_its_own_coefficients(shape, count):
    (ours,) = parameters(torch.float64, [shape])
    before = ours.detach().clone()
    set_gradients(0, [ours])
    triples = TRIPLES[-count:]
    settings = {"weight_decay": 0.0, "ns_coefficients": triples, "adjust_lr_fn": "match_rms_adamw"}
    Muon([ours], lr=1.0, dtype=torch.float64, **settings).step()
    expected = 0.2 * max(shape) ** 0.5 * polynomial(ours.grad, triples)
    torch.testing.assert_close(before - ours.detach(), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rows, columns", [(32, 32), (128, 32), (32, 128)])
def test_in_bfloat16_it_is_as_exact_as_torch_if_singular_values_differ_a_lot(rows, columns):
    """Five iterations on one Gram matrix have an error of 4, and singular values of 20."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(n, 32, generator=generator) for n in (rows, columns))
    x = torch.linalg.qr(left)[0] * torch.logspace(0, -4, 32) @ torch.linalg.qr(right)[0].T
    triple = (3.4445, -4.7750, 2.0315)
    exact = polynomial(x.bfloat16().double(), [triple] * 5)
    theirs = torch.optim._muon._zeropower_via_newtonschulz(x, triple, 5, 1e-7)
    ours = newton_schulz(x.bfloat16()[None], [triple] * 5, 1e-7)[0]
    assert (ours - exact).norm() <= 1.2 * (theirs - exact).norm() <= 0.2 * exact.norm()


@pytest.mark.parametrize("first, second", [(Muon, torch.optim.Muon), (torch.optim.Muon, Muon)])
def test_each_continues_from_the_state_of_the_other(first, second):
    """The state is bitwise equal. The updates differ only by the rounding of bfloat16."""
    whole, parts = parameters(), parameters()
    settings = {"lr": 0.01, "adjust_lr_fn": "match_rms_adamw"}
    reference, begun = (first(params, **settings) for params in (whole, parts))
    continued = second(parts)
    for step in range(6):
        if step == 3:
            continued.load_state_dict(begun.state_dict())
            assert same(continued.state_dict(), begun.state_dict())
        set_gradients(step, whole, parts)
        reference.step()
        (begun if step < 3 else continued).step()
    assert same(continued.state_dict(), reference.state_dict())
    assert all(error(p, q, old) < 0.04 for p, q, old in zip(parts, whole, parameters()))


def test_it_takes_what_an_optimizer_takes():
    """A closure, a parameter without gradient, groups with other settings."""
    ours = parameters()
    before = [p.detach().clone() for p in ours]
    groups = [{"params": ours[:2]}, {"params": ours[2:], "lr": torch.tensor(0.5**6)}]
    optimizer = Muon(groups, lr=0.01)
    optimizer.step()  # no gradient at all

    def closure():
        set_gradients(0, ours)
        ours[1].grad = None
        return torch.is_grad_enabled()

    assert optimizer.step(closure) is True
    assert [torch.equal(p, old) for p, old in zip(ours, before)] == [False, True] + [False] * 6
    assert ours[1] not in optimizer.state
    others = parameters()
    set_gradients(0, others)
    Muon(others[2:], lr=0.5**6).step()
    assert all(map(torch.equal, ours[2:], others[2:]))


@pytest.mark.parametrize("wrong", [(3,), (2, 3, 4)])
def test_other_parameters_than_matrices_are_an_error(wrong):
    with pytest.raises(ValueError, match="2D"):
        Muon([nn.Parameter(torch.zeros(wrong))])


def abs_plus_one(step):
    return abs(step) + 1


@pytest.mark.parametrize("how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copy_works_as_the_original(how):
    ours, optimizer = trained()
    optimizer.dtype = torch.float64
    torch.optim.lr_scheduler.LambdaLR(optimizer, abs_plus_one)  # it replaces the method step
    again = how(optimizer)
    theirs = again.param_groups[0]["params"]
    assert again.dtype == torch.float64 and not again.distribute
    for p, q in zip(theirs, ours):
        p.grad = q.grad.clone()  # pickle leaves gradients out
    optimizer.step()
    again.step()
    assert theirs[0] is not ours[0] and all(map(torch.equal, theirs, ours))


def test_what_it_cannot_compute_is_an_error_before_a_parameter_changes():
    matrix = nn.Parameter(torch.ones(2, 2))
    later, imaginary = nn.Parameter(torch.ones(2, 2, 2)), nn.Parameter(torch.ones(2, 2) * 1j)
    for wrong in (imaginary, later):
        optimizer = Muon([matrix])
        optimizer.param_groups[0]["params"].append(wrong)
        matrix.grad, wrong.grad = torch.ones_like(matrix), torch.ones_like(wrong)
        with pytest.raises(RuntimeError, match="real matrices"):
            optimizer.step()
    matrix.grad = torch.ones(2, 2).to_sparse()
    with pytest.raises(RuntimeError, match="dense"):
        Muon([matrix]).step()
    assert torch.equal(matrix, torch.ones(2, 2))


# --- steps that are skipped ---


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weight_decay_is_that_of_torch_for_each_dtype(dtype):
    """With a rounded factor, bfloat16 weights would decay about twice as fast."""
    ours, theirs = ([nn.Parameter(torch.ones(4, 6, dtype=dtype))] for _ in range(2))
    optimizers = [
        make(p, 0.02, weight_decay=0.1) for make, p in zip((Muon, torch.optim.Muon), (ours, theirs))
    ]
    for _ in range(20):
        for optimizer, [p] in zip(optimizers, (ours, theirs)):
            p.grad = torch.zeros_like(p)
            optimizer.step()
    assert torch.equal(*ours, *theirs)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_found_inf_changes_nothing(bad, steps):
    ours, optimizer = trained(steps, found_inf=torch.ones(()))
    reference, other = trained(steps)
    for p in ours:
        p.grad[0, 0] = bad
    optimizer.step()
    assert all(map(torch.equal, ours, reference))
    for p, q in zip(ours, reference):
        expected = other.state[q]["momentum_buffer"] if steps else torch.zeros_like(p)
        assert torch.equal(optimizer.state[p]["momentum_buffer"], expected)


def test_found_inf_of_0_and_grad_scale_give_the_same_step():
    ours, optimizer = trained(found_inf=torch.zeros(()), grad_scale=torch.tensor(8.0))
    reference, other = trained()
    for p in ours:
        p.grad *= 8
    optimizer.step()
    other.step()
    assert all(map(torch.equal, ours, reference))
    assert same(optimizer.state_dict(), other.state_dict())


def test_with_found_inf_the_host_reads_no_tensor():
    """A tensor on the device "meta" has no value, so an attempt to read it raises an error."""
    ours = [nn.Parameter(p.to("meta")) for p in parameters()]
    optimizer = Muon(ours, 0.01)
    optimizer.found_inf = optimizer.grad_scale = torch.ones((), device="meta")
    with pytest.raises((RuntimeError, NotImplementedError)):
        bool(optimizer.found_inf)
    for _ in range(2):
        for p in ours:
            p.grad = torch.zeros_like(p)
        optimizer.step()


def test_grad_scaler_skips_steps_that_overflow():
    ours, optimizer = trained()
    reference, other = trained()
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
KINDS = [("ddp", False), ("ddp", True), ("zero", False), ("fsdp", False), ("fsdp", True)]
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


def learn(world, kind, model, optimizers, start, stop):
    share = {"rank": world.rank, "world_size": world.size}
    steps = islice(chardata.steps(PLAN, start=start, **share), stop - start)
    loss_fn = gpt.loss
    if kind[0] == "fsdp":
        steps, loss_fn = fsdp.pad_steps(steps, loss_fn)
    settings = {"start": start, "sync_each": kind[0] == "fsdp"}
    for _ in loop.train_(model, optimizers, steps, loss_fn, **settings):
        pass
    return ckpt.snapshot(model, optimizers)


def learning(world, kind):
    """Return the state after 8 steps in float64, and this rank's own matrices."""
    model, optimizers = build(world, kind, torch.float64)
    after = learn(world, kind, model, optimizers, 0, 8)
    held = optimizers[1].state
    shards = [getattr(t, "_local_tensor", t).shape for s in held.values() for t in s.values()]
    return {"state": after, "own": own(model), "held": [tuple(shape) for shape in shards]}


def own(model):
    """Return the whole parameters as this rank sees them."""
    return [
        (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for p in model.parameters()
    ]


def resumed(world, kind):
    """Return the state after 6 steps, uninterrupted, and after 3 steps, a checkpoint and 3 more."""
    straight, again = (build(world, kind, torch.bfloat16) for _ in range(2))
    learn(world, kind, *straight, 0, 3)
    ckpt.restore_(ckpt.snapshot(*straight), *again)
    ends = [learn(world, kind, *trained, 3, 6) for trained in (straight, again)]
    return {"ends": ends, "own": own(straight[0])}


def skipped(world, kind):
    """Return whether a step with found_inf, after one that was made, changes anything."""
    model, optimizers = build(world, kind, torch.bfloat16)
    before = learn(world, kind, model, optimizers, 0, 1)
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.nan)
    optimizers[1].found_inf = torch.ones(())
    optimizers[1].step()
    return before, ckpt.snapshot(model, optimizers)


def every_job(world):
    jobs = (learning, resumed, skipped)
    return {(job.__name__, kind): job(world, kind) for job in jobs for kind in KINDS}


def in_turn(folder):
    """Run every_job with 3, 2 and 1 ranks in the same processes, which start slowly."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    for size in (3, 2):
        if rank < size:
            os.environ.update(WORLD_SIZE=f"{size}", LOCAL_WORLD_SIZE=f"{size}")
            with ddp_setup.process_group("cpu") as world:
                torch.save(every_job(world), f"{folder}/{rank} of {size}.pt")
    if rank == 0:
        torch.save(every_job(ONE), f"{folder}/0 of 1.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return a function: number of ranks -> list of what each rank returned."""
    folder = tmp_path_factory.mktemp("ranks")
    assert call.spawn(in_turn, 3, str(folder)) == 0
    return lambda size: [torch.load(folder / f"{rank} of {size}.pt") for rank in range(size)]


@SIZES
@EACH
def test_several_ranks_equal_one(ranks, size, kind):
    expected = ranks(1)[0]["learning", ("ddp", False)]["state"]
    state = ranks(size)[0]["learning", kind]["state"]
    torch.testing.assert_close(dict(state["model"]), dict(expected["model"]), rtol=1e-4, atol=1e-6)
    (_, muon), (_, reference) = state["optimizers"], expected["optimizers"]
    assert len(reference["state"]) == 16
    torch.testing.assert_close(muon["state"], reference["state"], rtol=1e-4, atol=1e-6)


@SIZES
@EACH
@pytest.mark.parametrize("job", ["learning", "resumed"])
def test_all_ranks_have_bitwise_equal_weights(ranks, size, kind, job):
    first, *others = (result[job, kind]["own"] for result in ranks(size))
    assert all(all(map(torch.equal, first, other)) for other in others)


@SIZES
def test_distributing_changes_nothing(ranks, size):
    """In float64, the products of a part of a batch are those of the whole batch up to rounding."""
    alone, shared = (ranks(size)[0]["learning", ("ddp", flag)]["state"] for flag in (False, True))
    torch.testing.assert_close(dict(shared["model"]), dict(alone["model"]), rtol=1e-6, atol=1e-7)


@SIZES
@EACH
def test_resume_is_bitwise_exact(ranks, size, kind):
    straight, again = ranks(size)[0]["resumed", kind]["ends"]
    assert same(dict(straight["model"]), dict(again["model"]))
    assert same(straight["optimizers"], again["optimizers"])


@SIZES
@EACH
def test_found_inf_changes_nothing_on_several_ranks(ranks, size, kind):
    before, after = ranks(size)[0]["skipped", kind]
    assert same(dict(before["model"]), dict(after["model"]))
    assert same(before["optimizers"], after["optimizers"])


@SIZES
@pytest.mark.parametrize("strategy", ["zero", "fsdp"])
def test_the_momentum_stays_divided(ranks, size, strategy):
    whole = sum(a * b for a, b in ranks(1)[0]["learning", ("ddp", False)]["held"])
    parts = [result["learning", (strategy, False)]["held"] for result in ranks(size)]
    assert sum(a * b for part in parts for a, b in part) == whole


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Train 50 steps with Muon on one rank. Return the flags and the folder."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 80)
    # 3 ranks cannot divide 10 rows evenly.
    flags = [*TINY, "--data", folder / "text.txt", "--batch-size", 10, "--steps", 50]
    flags += ["--log-every", 1, "--optimizer", "muon"]
    ran = run(*flags, "--out", folder / "out")
    assert ran.code == 0, ran
    return flags, folder / "out"


@pytest.mark.parametrize(
    "more",
    [["--spawn", 2], ["--spawn", 3, "--accum", 2], ["--spawn", 2, "--strategy", "fsdp"]],
)
def test_in_float32_losses_and_weights_do_not_depend_on_ranks_and_accum(alone, more, tmp_path):
    """This is promise 1, for the default optimizer."""
    flags, one = alone
    ran = run(*flags, *more, "--out", tmp_path)
    assert ran.code == 0, ran
    assert [step for step, _ in losses(tmp_path)] == list(range(1, 51))
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-7)  # as in test_run.py
    close(dict(losses(tmp_path)), dict(losses(one)))
    close(state(tmp_path)["model"], state(one)["model"])
