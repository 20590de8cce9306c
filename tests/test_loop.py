"""Tests of loop.py: compare with plain torch in one process.

`every_job` runs once for each number of ranks. The tests check what its ranks returned.
"""

import math
import warnings
from collections import UserDict
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils._python_dispatch import TorchDispatchMode

import ddp_setup
import loop

SIZES = pytest.mark.parametrize("size", [1, 2, 3])
CPU = torch.device("cpu")
X = torch.randn(64, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = X.sin().sum(1, keepdim=True)
ROW = ([(X[:1], Y[:1])], 1)  # a step of one micro-batch with one row
BAD = ([(X[:1] * math.nan, Y[:1])], 1)
# Rows of each step. No number of ranks divides all of them, and some steps have fewer rows than
# ranks.
BATCHES = [
    list(range(first, first + n)) for first, n in zip(range(0, 60, 7), [7, 2, 5, 1, 7, 3, 6, 4])
]


def mlp(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1)).double()


def bare(weight: list[float], dtype: torch.dtype = torch.float64) -> nn.Module:
    model = nn.Linear(len(weight), 1, bias=False, dtype=dtype)
    model.weight.data[:] = torch.tensor(weight)
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def sgd(model: nn.Module, lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def squares(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y, reduction="sum"), len(x)


def first(model, x):
    """Compute a loss whose gradient is the mean of the rows, if the model is bare(...)."""
    return model(x).sum(), len(x)


def train(model, steps, loss_fn=squares, optimizer=None, **settings):
    """Return all reports."""
    optimizers = [optimizer or sgd(model)]
    return [report for _, report in loop.train_(model, optimizers, steps, loss_fn, **settings)]


def weights(model):
    model = getattr(model, "module", model)
    return {name: value.clone() for name, value in model.state_dict().items()}


def divide_rows(batches, world, accum=1):
    """Give row i of a step to rank i % size. A rank without rows gets row 63 and the count 0."""
    for rows in batches:
        mine = rows[world.rank :: world.size]
        parts = [part for part in (mine[i::accum] for i in range(accum)) if part]
        yield [(X[p], Y[p]) for p in parts or [[63]]], len(rows) if mine else 0


# ------------------------------------------------------------------------ jobs that every rank runs


def whole_batches(world, accum):
    model = ddp_setup.replicate(mlp(), world)
    optimizer, gradients = adamw(model), []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append([p.grad.clone() for p in model.parameters()])
    )
    reports = train(model, divide_rows(BATCHES, world, accum), optimizer=optimizer, clip=2.0)
    return {
        "weights": weights(model),
        "gradients": gradients,
        "losses": [float(r.loss) for r in reports],
        "norms": [float(r.grad_norm) for r in reports],
        "counts": [int(r.count) for r in reports],
    }


def synchronisations(world):
    """Count the gradient all-reduces in 2 steps of 3 micro-batches, without and with sync_each."""
    calls, found = [], []

    def hook(state, bucket):
        calls.append(bucket)
        return allreduce_hook(state, bucket)

    model = ddp_setup.replicate(mlp(), world)  # All gradients are in one bucket.
    if world.size > 1:
        model.register_comm_hook(None, hook)
    for sync_each in (False, True):
        steps = [([(X[:2], Y[:2])] * 3, 6 * world.size)] * 2
        train(model, steps, optimizer=sgd(model, 0.01), sync_each=sync_each)
        found.append(len(calls))
    return found


def one_nan(world):
    """In the second step the row of the last rank is NaN."""
    model = ddp_setup.replicate(mlp(), world)
    optimizer, trail = adamw(model), []
    nan = X[:1] * (math.nan if world.rank == world.size - 1 else 1.0)
    steps = [([(x, Y[:1])], world.size) for x in (X[:1], nan, X[1:2])]
    for _, report in loop.train_(model, [optimizer], steps, squares):
        moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
        trail.append((weights(model), moments, int(report.skipped)))
    return trail


def stopping(world):
    """The last rank asks to stop in the third step. Return also the first random number of each step."""
    model, asked, numbers = ddp_setup.replicate(mlp(), world), [], []

    def stop():
        asked.append(0)
        return world.rank == world.size - 1 and len(asked) == 3

    def loss_fn(model, batch):
        numbers.append(torch.rand(()).item())
        return squares(model, batch)

    reports = train(model, [(ROW[0], world.size)] * 5, loss_fn, sgd(model, 0.01), stop=stop)
    return [report.stop for report in reports], numbers


def randomness(world):
    """Return the weights after 6 steps with dropout: uninterrupted, resumed after 3, and with another
    seed. In each step the caller draws numbers that all ranks must draw alike: return these too.
    """
    drawn = []

    def run(model, optimizer, start, stop, seed):
        def steps():
            for step in divide_rows(BATCHES[start:stop], world, 2):
                drawn.append(torch.rand(()).item())  # like a DataLoader with shuffle=True
                yield step

        train(model, steps(), optimizer=optimizer, start=start, seed=seed)
        return weights(model)

    def fresh():
        model = ddp_setup.replicate(mlp(dropout=0.5), world)
        return model, adamw(model)

    model, optimizer = fresh()
    run(model, optimizer, 0, 3, seed=7)
    again, its_optimizer = fresh()
    again.load_state_dict(model.state_dict())
    its_optimizer.load_state_dict(optimizer.state_dict())
    torch.manual_seed(5)
    return [
        run(again, its_optimizer, 3, 6, seed=7),
        run(*fresh(), 0, 6, seed=7),
        run(*fresh(), 0, 6, seed=8),
        drawn[3:6],
    ]


def evaluation(world, store):
    """Evaluate six batches, of which rank 0 has none, unless it is the only rank.

    Each rank has buffers of its own, one of them a part of a larger tensor. Those of rank 0 count, as
    in a checkpoint. The last rank reads its batches after the others have computed all of theirs.
    """
    model = nn.Sequential(nn.BatchNorm1d(5), mlp()).float()
    whole = torch.arange(6.0).reshape(2, 3)
    model.register_buffer("part", whole[:, 1:])
    norm, model = model[0], ddp_setup.replicate(model, world)
    norm.running_mean.fill_(0.1 * world.rank)
    whole += 10 * world.rank
    compiled = torch.compile(model, backend="eager")
    assert loop._find_ddp(compiled) is (model if world.size > 1 else None)
    mine = range(1, 7)[world.rank - 1 :: world.size - 1] if world.size > 1 else range(1, 7)

    def batches(name):
        if world.rank == world.size - 1 > 0:
            store.wait([f"{name} {rank}" for rank in range(world.rank)])
        for i in mine if world.rank or world.size == 1 else []:
            yield X[: 3 * i].float(), Y[: 3 * i].float()
        store.set(f"{name} {world.rank}", "computed")

    means = [loop.evaluate(m, batches(n), squares) for n, m in (("ddp", model), ("c", compiled))]
    return means, whole.tolist()


class Scaled(nn.Module):
    """Multiplies by two buffers, which differ between ranks. In training, they keep its last result."""

    def __init__(self, rank):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("sent", torch.tensor([rank + 1.0]))
        self.register_buffer("own", torch.tensor([10.0**rank]))

    def forward(self, x):
        out = x * self.weight * self.sent * self.own
        if self.training:
            self.sent.copy_(out.detach().sum())
        return out


def buffers(world):
    """Return results or errors of evaluations with buffers that differ between the ranks."""
    settings = [{}, {"broadcast_buffers": False}, {"ignore": ["own"]}]
    if hasattr(nn.parallel.DistributedDataParallel, "broadcast_buffers"):  # since torch 2.13
        settings[1] = {"forward_sync_buffers": False}
    found = []
    for how in [*settings, {"bare": True}]:
        model = Scaled(world.rank)
        model._ddp_params_and_buffers_to_ignore = how.pop("ignore", [])
        replica = model if how.pop("bare", False) else ddp_setup.replicate(model, world, **how)
        model.sent.fill_(world.rank + 1)
        model.own.fill_(10.0**world.rank)
        found.append(loop.evaluate(replica, [torch.ones(1)], first))
    for name, other in [
        ("sent", torch.ones(2)),
        ("sent", torch.ones(1, dtype=int)),
        ("more", torch.ones(1)),
    ]:
        if world.rank == world.size - 1 > 0:
            model.register_buffer(name, other)
        try:
            found.append(loop.evaluate(model, [torch.ones(1)], first))
        except ValueError as error:
            found.append(str(error))
        if world.rank == world.size - 1 > 0:
            model.register_buffer(name, None)
            model.register_buffer("sent", torch.ones(1))
    return found


def nan_buffers(world):
    """Return the errors of a batch with NaN on one rank, if its buffers are sent by rank 0, and if not."""
    errors = []
    for broken in (0, world.size - 1):
        for settings in ({}, {"broadcast_buffers": False}):
            model = nn.Sequential(nn.BatchNorm1d(5), mlp()).double()
            factor = math.nan if world.rank == broken else 1
            steps = [([(X[:4] * f, Y[:4])], 4 * world.size) for f in (1, factor, 1)]
            replica = ddp_setup.replicate(model, world, **settings)
            errors.append(caught(replica, steps, start=6))
    return errors


def stopped_evaluation(world):
    """The last rank asks to stop at its second of 4 batches. Return (result, batches computed, mode)."""
    model, computed = ddp_setup.replicate(mlp(), world), []

    def loss_fn(model, batch):
        computed.append(batch)
        return squares(model, batch)

    stop = lambda: world.rank == world.size - 1 and len(computed) == 1  # noqa: E731
    result = loop.evaluate(model, ROW[0] * 4, loss_fn, stop=stop)
    return result, len(computed), model.training


def grouping(world):
    """Rank r has r + 1 batches of 1, 2, ... rows. Two of them are one step."""
    batches = [torch.full((i + 1,), float(world.rank)) for i in range(world.rank + 1)]
    return [
        ([len(batch) for batch in window], total)
        for window, total in loop.group_batches(batches, 2, len)
    ]


def caught(model, steps, *args, **settings):
    """Train and return the error."""
    try:
        train(model, steps, *args, **settings)
    except (ValueError, RuntimeError, loop.Diverged) as error:
        return str(error)
    return ""


def mistakes(world):
    """Return the errors for a model that is not wrapped, for a loss function that uses another model
    than the replica (also with a NaN on rank 0), and for a replica that does not use a parameter in the
    second step. Return also whether the last one changed a weight.
    """
    mine, equal = slice(world.rank, world.rank + 1), [(ROW[0], world.size)] * 2
    steps = [([(X[mine], Y[mine])], world.size)] * 2
    errors = [caught(mlp(), equal), caught(mlp(), equal, sync_each=True)]
    for factor in (1, math.nan):
        model = mlp()
        replica = ddp_setup.replicate(model, world)
        if world.rank == 0:
            next(model.parameters()).register_hook(lambda grad: grad * factor)
        errors.append(caught(replica, steps, lambda _, batch: squares(model, batch)))
    layers = nn.Sequential(nn.Linear(5, 1), nn.Linear(1, 1)).double()
    used, seen = [2, 1], []

    def forward(x):
        seen.append(weights(layers))
        return layers[: used.pop(0)](x)

    replica = ddp_setup.replicate(layers, world)
    layers.forward = forward
    errors.append(caught(replica, steps))
    return errors, all(value.equal(seen[-1][name]) for name, value in weights(layers).items())


def every_job(rank, size, store):
    world = ddp_setup.World(rank, rank, size, size, CPU)
    results = {("whole_batches", accum): whole_batches(world, accum) for accum in (1, 2, 3)}
    results["evaluation"] = evaluation(world, store)
    jobs = [synchronisations, one_nan, stopping, randomness, stopped_evaluation, grouping, mistakes]
    jobs += [buffers, nan_buffers]
    return results | {job.__name__: job(world) for job in jobs}


def groups_of_three_and_two_ranks(rank: int, folder: str) -> None:
    """Run every_job with both numbers of ranks in the same processes, because these start slowly."""
    torch.set_num_threads(1)
    for size in range(3, max(rank, 1), -1):
        store = dist.FileStore(f"{folder}/store of {size}", size)
        dist.init_process_group("gloo", None, timedelta(seconds=100), size, rank, store)
        torch.save(every_job(rank, size, store), f"{folder}/{rank} of {size}.pt")
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return a function: number of ranks -> list of what each rank returned."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(groups_of_three_and_two_ranks, (str(folder),), 3)
    torch.save(every_job(0, 1, dist.HashStore()), folder / "0 of 1.pt")
    return lambda size: [torch.load(folder / f"{rank} of {size}.pt") for rank in range(size)]


# --------------------------------------------------------------------------------------- arithmetic


@pytest.fixture(scope="module")
def plain():
    """Train on BATCHES with plain torch: mean loss of each whole batch, clipping, AdamW."""
    model, found = mlp(), {"gradients": [], "losses": [], "norms": [], "counts": []}
    optimizer = adamw(model)
    for rows in BATCHES:
        optimizer.zero_grad()
        loss = F.mse_loss(model(X[rows]), Y[rows])
        loss.backward()
        found["norms"].append(float(nn.utils.clip_grad_norm_(model.parameters(), 2.0)))
        found["losses"].append(loss.item())
        found["gradients"].append([p.grad.clone() for p in model.parameters()])
        found["counts"].append(len(rows))
        optimizer.step()
    return {**found, "weights": weights(model)}


@SIZES
@pytest.mark.parametrize("accum", [1, 2, 3])
def test_gradients_and_weights_equal_plain_torch_on_the_whole_batch(ranks, plain, size, accum):
    assert max(plain["norms"]) > 2.0 > min(plain["norms"])  # some steps are clipped
    for result in ranks(size):
        # Both use float64. Only the order of the sums differs.
        torch.testing.assert_close(result["whole_batches", accum], plain, rtol=1e-9, atol=1e-12)


def test_gradients_are_synchronised_once_per_step_or_with_sync_each_in_each_micro_batch(ranks):
    assert [result["synchronisations"] for result in ranks(3)] == [[2, 2 + 6]] * 3


@SIZES
def test_mistakes_that_would_train_different_models_are_errors(ranks, size):
    for errors, unchanged in (result["mistakes"] for result in ranks(size)):
        if size == 1:
            assert errors == [""] * 5
            continue
        not_wrapped, synchronised_by_caller, other, other_with_nan, unused = errors
        assert f"{size} ranks would train different models: wrap the model" in not_wrapped
        assert synchronised_by_caller == "" and other == other_with_nan
        assert other.startswith("step 1: the ranks had different gradients; loss_fn must use")
        assert "find_unused_parameters=True" in unused and unchanged


@pytest.fixture(params=[False, True], ids=["at once", "late"])
def late(request, monkeypatch):
    """Read the flags of a step at once, or one step late as on CUDA."""
    monkeypatch.setattr(loop, "_reads_late", lambda device: request.param)
    return request.param


@pytest.mark.parametrize(("declared", "counted"), [(20, 2), (2, 20), (3, 2)])
def test_a_declared_count_that_differs_from_the_counted_one_is_an_error(late, declared, counted):
    steps = [([(X[:7], Y[:7])], 7), ([(X[:counted], Y[:counted])], declared)]
    expected = f"step 12: the declared count is {declared}, but loss_fn counted {counted}"
    assert caught(mlp(), steps, start=10) == expected


@pytest.mark.parametrize("sign", [-1, 1])
def test_the_declared_count_may_differ_by_a_millionth(sign):
    """Counts are summed in float32 on MPS, and can be sums of weights."""

    def error(counted):
        loss_fn = lambda model, batch: (squares(model, batch)[0], counted)  # noqa: E731
        return caught(mlp(), [(ROW[0], 2e9)], loss_fn)

    assert error(2e9 + sign * 1000) == ""
    counted = 2e9 + sign * 4000
    assert f"the declared count is 2000000000, but loss_fn counted {counted:.0f}" in error(counted)


def test_a_step_without_micro_batches_is_an_error():
    assert "a step has no micro-batch on this rank" in caught(mlp(), [([], 4)])


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda model, batch: F.mse_loss(model(batch[0]), batch[1], reduction="none"),
        lambda model, batch: ((model(batch[0]) - batch[1]) ** 2, len(batch[0])),
        loop.from_mean(lambda model, batch: F.mse_loss(model(batch[0]), batch[1])),
    ],
    ids=["losses", "losses and count", "mean"],
)
def test_a_loss_function_may_return_losses_or_be_made_from_a_mean(loss_fn):
    """Micro-batches of different sizes, so a mean of means would be another number."""
    batches, found = [(X[:3], Y[:3]), (X[3:4], Y[3:4])], []
    for function in (squares, loss_fn):
        model = mlp()
        [report] = train(model, loop.group_batches(batches, 2), function, adamw(model))
        found.append((float(report.loss), loop.evaluate(model, batches, function), weights(model)))
    torch.testing.assert_close(*found, rtol=1e-12, atol=0)


def test_a_loss_that_may_be_a_mean_is_refused_and_a_count_of_hits_is_not():
    with pytest.raises(ValueError, match="a single number: return the losses of all rows"):
        train(mlp(), [ROW], lambda model, batch: F.mse_loss(model(batch[0]), batch[1]))
    batches = [(torch.arange(4.0), torch.tensor([0.0, 1, 0, 0])), (torch.ones(1), torch.ones(1))]
    right = loop.evaluate(nn.Identity(), batches, lambda model, batch: model(batch[0]) == batch[1])
    assert right == 3 / 5


def test_rows_are_counted_in_the_first_tensor():
    for batch in (X, [X, Y[:1]], {"x": (X, 1)}, UserDict(x=X)):
        assert loop.count_rows(batch) == 64


def test_what_cannot_be_trained_is_refused_before_a_step():
    assert caught(nn.ReLU(), [ROW], optimizer=sgd(mlp())).startswith("the model has no parameter")
    model = mlp()
    error = caught(model, [ROW], optimizer=torch.optim.LBFGS(model.parameters()))
    assert error.startswith("LBFGS cannot be used, because its step() needs a closure")


@pytest.mark.parametrize("clip", [0, -1.0, math.nan])
def test_a_clip_that_would_delete_or_reverse_the_gradient_is_refused(clip):
    assert caught(mlp(), [ROW], clip=clip).startswith(f"clip is {clip}; must be above 0")


def test_without_clip_and_scaler_the_gradient_is_not_changed():
    model, seen = bare([0.0, 0.0], torch.float32), []
    model.weight.register_hook(lambda gradient: seen.append(gradient.tolist()))
    train(model, [([torch.tensor([[3e6, 4e6]])], 1)], first)
    assert seen == [[[3e6, 4e6]]] and model.weight.tolist() == [[-3e6, -4e6]]


def test_a_step_uses_the_training_mode_and_no_gradients_of_another_loss():
    model = bare([0.0]).eval()
    model.weight.grad = torch.ones(1, 1).double()  # as the loss of a generator in a GAN
    train(model, [([torch.ones(1, 1).double()], 1)], first)
    assert model.weight.item() == -1 and model.training and model.weight.grad is None


def test_clipping_uses_one_norm_for_all_optimizers():
    model = nn.ModuleList([bare([0.0]), bare([0.0])])
    optimizers = [sgd(model[0]), sgd(model[1], lr=2.0)]
    loss_fn = lambda model, x: (3 * model[0](x).sum() + 4 * model[1](x).sum(), len(x))  # noqa: E731
    step = ([torch.ones(1, 1).double()], 1)
    [(_, report)] = loop.train_(model, optimizers, [step], loss_fn, clip=1.0)
    assert float(report.grad_norm) == 5.0
    # 3 / 5 and 2 * 4 / 5, except for the 1e-6 that torch adds to the norm.
    assert [layer.weight.item() for layer in model] == pytest.approx([-0.6, -1.6], rel=1e-6)


# ----------------------------------------------------------------------------------- learning rates


@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        (partial(loop.linear, total=100, floor=0.2), {0: 1, 50: 0.6, 100: 0.2, 150: 0.2}),
        (
            partial(loop.linear, total=110, warmup_steps=10),
            {0: 0.1, 4: 0.5, 9: 1, 10: 1, 60: 0.5, 110: 0},
        ),
        (partial(loop.linear, total=10, warmup_steps=10), {0: 0.1, 9: 1, 10: 1, 11: 0}),
        (partial(loop.linear, total=10**9, warmup_steps=4), {0: 0.25, 1: 0.5, 3: 1, 4: 1}),
        (
            partial(loop.linear, total=100, warmup_steps=10, floor=0.2, decay_steps=20),
            {0: 0.1, 9: 1, 80: 1, 90: 0.6, 100: 0.2},
        ),
        (
            partial(loop.linear, total=100, warmup_steps=50, decay_steps=90),
            {0: 0.02, 49: 1, 50: 1, 75: 0.5},
        ),
        (
            partial(loop.cosine, total=110, warmup_steps=10, floor=0.2),
            {0: 0.1, 10: 1, 35: 0.6 + 0.4 * math.sqrt(0.5), 60: 0.6, 110: 0.2, 200: 0.2},
        ),
        (partial(loop.cosine, total=5, warmup_steps=10), {0: 0.1, 4: 0.5, 9: 1, 11: 0}),
    ],
)
def test_schedules_have_the_values_of_their_formulas(factor, expected):
    assert {step: factor(step) for step in expected} == pytest.approx(expected, rel=1e-15)


def test_cosine_is_that_of_torch():
    optimizer = sgd(mlp())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30, eta_min=0.1)
    for step in range(30):
        assert scheduler.get_last_lr()[0] == pytest.approx(loop.cosine(step, 30, floor=0.1))
        optimizer.step()
        scheduler.step()


def test_lr_at_scales_the_initial_rate_of_each_group_also_after_a_resume():
    """It is called once per step, and may return a number of numpy, which a checkpoint could not have."""
    model = mlp()
    # torch's schedulers set "initial_lr" too.
    groups = [{"params": model[0].parameters(), "lr": 9.0, "initial_lr": 0.5}]
    optimizers = [torch.optim.SGD(groups), torch.optim.SGD(model[3].parameters(), lr=2.0)]
    calls, rates = [], []

    def lr_at(step):
        calls.append(step)
        return np.float64([1.0, 0.5, 0.1, 0.0][step])

    for start in (0, 2):
        for _ in loop.train_(model, optimizers, [ROW] * 2, squares, start=start, lr_at=lr_at):
            rates.append([o.param_groups[0]["lr"] for o in optimizers])
    assert rates == [[0.5, 2.0], [0.25, 1.0], [0.05, 0.2], [0.0, 0.0]] and calls == [0, 1, 2, 3]
    assert {type(rate) for pair in rates for rate in pair} == {float}


# ---------------------------------------------------------------------------------- mixed precision


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_model_computes_in_the_given_dtype_and_keeps_float32_weights(dtype):
    seen, model = [], mlp().float()

    def loss_fn(model, batch):
        out = model(batch)
        seen.append(out.dtype)
        return out.float().square().sum(), len(batch)

    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    train(model, [([X[:2].float()], 2)], loss_fn, sgd(model, 0.01), dtype=dtype, scaler=scaler)
    loop.evaluate(model, [X[:2].float()], loss_fn, dtype)
    assert seen == [dtype, dtype]
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_an_overflow_with_a_grad_scaler_skips_the_step_and_lowers_the_scale():
    model = bare([1.0, 1.0], torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)  # overflows in float16
    steps, how = [([torch.tensor([[0.75, 1.0]])], 1)] * 2, {"dtype": torch.float16, "clip": 0.5}
    training = loop.train_(model, [sgd(model)], steps, first, scaler=scaler, **how)
    _, report = next(training)
    assert (int(report.skipped), scaler.get_scale()) == (1, 2.0**15)
    assert model.weight.tolist() == [[1.0, 1.0]]
    _, report = next(training)
    assert (int(report.skipped), scaler.get_scale(), float(report.grad_norm)) == (1, 2.0**15, 1.25)
    # The gradient is unscaled, then clipped from 1.25 to 0.5. Torch adds 1e-6 to the norm.
    torch.testing.assert_close(model.weight.detach(), torch.tensor([[0.7, 0.6]]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler("cpu", enabled=False)])
def test_float16_without_an_enabled_scaler_is_refused(scaler):
    """Small gradients would become 0, without an error."""
    error = caught(mlp().float(), [ROW], dtype=torch.float16, scaler=scaler)
    assert error.startswith("dtype float16 needs an enabled GradScaler as scaler")


@pytest.mark.parametrize("dtype, share", [(torch.bfloat16, "0.39%"), (torch.float16, "0.05%")])
def test_weights_that_round_small_updates_away_give_a_warning(dtype, share):
    model = mlp().to(dtype)
    with pytest.warns(UserWarning, match=f"weights are {dtype}: updates .* {share} of a weight"):
        train(model, [([(X.to(dtype), Y.to(dtype))], 64)] * 2)
    with warnings.catch_warnings(action="error"):  # frozen weights get no updates
        train(model[3].float(), [([(X[:, :1].float().expand(-1, 8), Y.float())], 64)])


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD"])
def test_fused_optimizers_of_torch_skip_a_step_if_found_inf_is_1(kind):
    """loop.py uses these private names on CUDA. Without them, each step would wait for the device."""
    model = mlp()
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, fused=True)
    squares(model, (X, Y))[0].backward()
    optimizer.step()
    before = weights(model)
    assert optimizer._step_supports_amp_scaling is True
    for found, equal in ((1.0, True), (0.0, False)):
        optimizer.found_inf = torch.tensor(found)
        optimizer.step()
        assert all(value.equal(before[name]) for name, value in weights(model).items()) is equal


# ------------------------------------------------------------------------------------- not a number


@SIZES
def test_a_nan_on_one_rank_skips_the_step_on_all_ranks_and_the_next_step_works(ranks, size):
    for result in ranks(size):
        before, during, after = result["one_nan"]
        torch.testing.assert_close(during[:2], before[:2], rtol=0, atol=0)
        assert all((after[0][name] != value).any() for name, value in during[0].items())
        assert [skipped for *_, skipped in (before, during, after)] == [0, 1, 1]
    assert all(value.isfinite().all() for value in after[0].values())


def test_five_bad_steps_in_a_row_raise_an_error_that_names_the_last(late):
    with pytest.raises(loop.Diverged, match=r"5 times in a row, up to step 111; try a lower"):
        train(mlp(), [BAD] * 4 + [ROW] + [BAD] * 5 + [ROW], start=101)


@pytest.mark.parametrize(
    ("step", "advice"),
    [(BAD, "try a lower learning"), (([(X[:0], Y[:0])], 0), "loss_fn counted n")],
)
def test_patience_sets_the_number_of_bad_steps_also_at_the_end(late, step, advice):
    with pytest.raises(loop.Diverged, match=f"2 times in a row, up to step 2; {advice}"):
        train(mlp(), [step] * 2, patience=2)


BAD_BUFFER = "step 8: the loss is not finite, and the buffer 0.running_mean contains NaN for ever; "


@SIZES
def test_a_nan_that_stays_in_a_buffer_is_an_error_on_all_ranks_at_its_step(ranks, size):
    """Otherwise training continues, but no later checkpoint could be saved."""
    for result in ranks(size):
        of_first, of_first_kept, of_last, of_last_kept = result["nan_buffers"]
        assert of_first.startswith(BAD_BUFFER) and of_first.endswith("before this step is good")
        # DDP replaces the buffers of rank 1, so they do no harm.
        assert of_last == ("" if size > 1 else of_first)
        assert of_last_kept == of_first_kept == of_first


def test_a_nan_in_a_buffer_is_noticed_one_step_late_on_cuda_and_only_if_a_checkpoint_has_it(late):
    model = nn.Sequential(nn.BatchNorm1d(5), mlp()).double()
    training = loop.train_(model, [sgd(model, 0.01)], [([(X * math.nan, Y)], 64)] * 2, squares)
    if late:
        next(training)
    with pytest.raises(loop.Diverged, match="step 1: the loss is not finite, and the buffer 0"):
        next(training)
    model = mlp()
    model.register_buffer("scratch", torch.tensor(math.nan), persistent=False)
    assert caught(model, [ROW, BAD, ROW]) == ""


def test_on_mps_sums_are_float32_and_on_cuda_flags_are_read_late():
    cuda, cpu, mps = map(torch.device, ("cuda", "cpu", "mps"))
    assert loop.accumulator_dtype(mps) == torch.float32
    assert [*map(loop._reads_late, (cuda, cpu, mps))] == [True, False, False]


# ---------------------------------------------------------------------------------------- agreement


@SIZES
def test_if_one_rank_asks_to_stop_all_reports_of_this_step_say_so(ranks, size):
    for stops, _ in (result["stopping"] for result in ranks(size)):
        assert stops == [False, False, True, False, False]


def test_a_stop_is_reported_at_once_or_one_step_late_and_never_by_default(late):
    requests, expected = iter([False, True, False, False]), [False, not late, late, False]
    reports = train(mlp(), [ROW] * 4, stop=lambda: next(requests))
    assert [report.stop for report in reports] == expected
    assert not any(report.stop for report in train(mlp(), [ROW] * 3))


@SIZES
def test_resume_with_dropout_gives_bitwise_equal_weights(ranks, size):
    torch.manual_seed(5)
    expected = torch.rand(3).tolist()
    for result in ranks(size):
        resumed, unbroken, other_seed, drawn = result["randomness"]
        torch.testing.assert_close(resumed, unbroken, rtol=0, atol=0)
        assert (unbroken["0.weight"] != other_seed["0.weight"]).any()
        # train_ does not change the generator of the caller, with which all ranks shuffle alike.
        assert drawn == expected


def test_each_rank_and_step_draws_other_random_numbers_whose_values_never_change(ranks):
    """Runs that began with an older version must resume with the same dropout."""
    draws = [result["stopping"][1] for result in ranks(3)]
    assert len({number for numbers in draws for number in numbers}) == 3 * 5
    for known in (draws[0], ranks(1)[0]["stopping"][1]):
        assert known[:3] == pytest.approx([0.5479161, 0.4982828, 0.3455437], abs=1e-6)


def test_a_step_that_fails_does_not_change_the_random_generator_either():
    model, expected = mlp(), torch.get_rng_state()
    assert "shapes cannot be multiplied" in caught(model, [([(X[:, :2], Y)], 1)])
    assert torch.equal(torch.get_rng_state(), expected)


# --------------------------------------------------------------------------------------- evaluation


@SIZES
def test_evaluation_is_exact_without_communication_between_batches(ranks, size):
    """Promise 4. Some ranks have no batch. BatchNorm uses the buffers of rank 0, and of a buffer that
    is a part of a tensor nothing else is sent.
    """
    model = nn.Sequential(nn.BatchNorm1d(5), mlp()).float().eval()
    batches = [(X[: 3 * i].float(), Y[: 3 * i].float()) for i in range(1, 7)]
    expected = sum(squares(model, batch)[0].item() for batch in batches) / (3 * sum(range(1, 7)))
    for rank, result in enumerate(ranks(size)):
        means, whole = result["evaluation"]
        # The losses of the batches are float32.
        assert means == [pytest.approx(expected, rel=1e-6)] * 2
        assert whole == [[0 + 10 * rank, 1, 2], [3 + 10 * rank, 4, 5]]


@SIZES
def test_an_evaluation_takes_from_rank_0_the_buffers_that_ddp_sends(ranks, size):
    """Without the comparison, gloo would abort the process if a buffer has another shape on a rank."""
    sent, own = range(1, size + 1), [10.0**rank for rank in range(size)]
    means = [1, sum(s * o for s, o in zip(sent, own)) / size, sum(own) / size, 1]
    for result in ranks(size):
        assert result["buffers"][:4] == pytest.approx(means)
        if size > 1:
            shape, dtype, missing = result["buffers"][4:]
            found = "sent (1,) torch.float32, sent (2,) torch.float32"
            assert shape.startswith(f"ranks have different buffers: {found}; keep the data of one")
            assert "sent (1,) torch.float32, sent (1,) torch.int64; " in dtype
            assert "buffers: more (1,) torch.float32; " in missing


@SIZES
def test_if_one_rank_stops_the_evaluation_all_ranks_return_none(ranks, size):
    *others, last = (result["stopped_evaluation"] for result in ranks(size))
    assert others == [(None, 4, True)] * (size - 1) and last == (None, 1, True)


@pytest.mark.parametrize("model", [nn.BatchNorm1d(4, eps=1e-12, affine=False), nn.Identity()])
def test_a_model_without_parameters_can_be_evaluated_as_a_baseline(model):
    assert loop.evaluate(model, [torch.ones(2, 4), torch.full((1, 4), 4.0)], first) == 8


def test_an_evaluation_that_counts_nothing_returns_nan():
    assert math.isnan(loop.evaluate(mlp(), [], squares))
    assert math.isnan(loop.evaluate(mlp(), [(X[:0], Y[:0])], squares))


@pytest.mark.parametrize("x", [X, X[:, :2]], ids=["success", "error"])
def test_evaluation_disables_dropout_and_gradients_and_restores_the_mode_of_each_submodule(x):
    model, modes = mlp(dropout=0.9), []
    model[1].eval()
    before = [module.training for module in model.modules()]

    def loss_fn(model, batch):
        modes.append((model.training, model[2].training, torch.is_grad_enabled()))
        return squares(model, batch)

    try:
        assert loop.evaluate(model, [(x, Y)], loss_fn) > 0
    except RuntimeError:
        assert x is not X
    assert modes == [(False, False, False)]
    assert [module.training for module in model.modules()] == before


# --------------------------------------------------------------------------------- batches to steps


@SIZES
def test_group_batches_continues_until_no_rank_has_a_batch_and_counts_all_ranks(ranks, size):
    expected = {
        1: [[([1], 1)]],
        2: [[([1], 4)], [([1, 2], 4)]],
        # Rank 0 and 1 repeat one of their batches with the count 0.
        3: [[([1], 7), ([1], 0)], [([1, 2], 7), ([1], 0)], [([1, 2], 7), ([3], 3)]],
    }[size]
    assert [result["grouping"] for result in ranks(size)] == expected


def test_group_batches_refuses_steps_without_batches():
    with pytest.raises(ValueError, match="accum is 0"):
        next(loop.group_batches([X], 0, len))


def test_group_batches_leaves_out_steps_with_count_0():
    assert list(loop.group_batches([], 2, len)) == []
    # for example, all labels of some batches are padding
    batches = [torch.ones(n) for n in (0, 3, 0, 0, 2)]
    assert [total for _, total in loop.group_batches(batches, 1, len)] == [3, 2]


def test_group_batches_reads_one_step_ahead():
    """Counts are sent while the step before is computed, so that the host need not wait for CUDA."""
    events = []

    def loader():
        for i in range(3):
            events.append(f"read {i}")
            yield torch.ones(i + 1)

    for _, total in loop.group_batches(loader(), 1, len):
        events.append(f"step {total - 1:g}")
    assert events == ["read 0", "read 1", "step 0", "read 2", "step 1", "step 2"]


class DictOfTensors(UserDict):
    """Like the class BatchEncoding of transformers, which is no dict."""

    def to(self, device):
        self.data = {name: tensor.to(device) for name, tensor in self.items()}
        return self


class Edges(NamedTuple):
    """Its field `to` is no method."""

    start: torch.Tensor
    to: torch.Tensor


def test_to_device_keeps_the_structure_of_a_batch():
    one, packed = torch.ones(1), nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    rest = [(one, 3), "text", None, Edges(one, one), {"x": one}, DictOfTensors(x=one), packed]
    moved = loop.to_device({"rest": rest}, torch.device("meta"))["rest"]
    pair, text, none, edges, *dicts, sequence = moved
    tensors = [pair[0], edges.start, edges.to, sequence.data, *(d["x"] for d in dicts)]
    assert all(tensor.is_meta for tensor in tensors) and (pair[1], text, none) == (3, "text", None)
    assert [*map(type, moved)] == [*map(type, rest)]
    assert sequence.batch_sizes.tolist() == [2, 1, 1]  # These stay on the CPU.
    assert all(d["x"] is one for d in rest[4:6])  # The batch itself is not changed.


# --------------------------------------------------------------------------------- no wait for CUDA


class NumbersFromTheHost(TorchDispatchMode):
    """Count the Python numbers that become tensors. On CUDA, to copy one waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.lift_fresh.default
        return func(*args, **(kwargs or {}))


def test_steps_and_evaluations_copy_no_number_from_the_host():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with NumbersFromTheHost() as numbers:
        torch.zeros(3)[2] = 1.0
        assert numbers.count == 1
        train(model, [([(X[:7], Y[:7])], 7)] * 2, optimizer=optimizer, clip=1.0)
        loop.evaluate(model, [(X, Y)], squares)
        assert numbers.count == 1
