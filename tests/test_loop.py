"""Tests of loop.py: compare with plain torch in one process.

`every_job` runs once for each number of ranks. The tests check what its ranks returned.
"""

import copy
import math
import os
from collections import UserDict
from dataclasses import FrozenInstanceError
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import run_on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import chardata
import ddp_setup
import gpt
import loop

SIZES = pytest.mark.parametrize("size", [1, 2, 3, 4])
ONE = ddp_setup.World(0, 0, 1, 1, torch.device("cpu"))
X = torch.randn(64, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = X.sin().sum(1, keepdim=True)
# Rows of each step. No number of ranks divides all of them, and some steps have fewer rows than
# ranks.
BATCHES = [
    list(range(first, first + n)) for first, n in zip(range(0, 60, 7), [7, 2, 5, 1, 7, 3, 6, 4])
]


def mlp(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1)).double()


def normed() -> nn.Module:
    """Build a model with buffers, which DistributedDataParallel broadcasts in its forward pass."""
    return nn.Sequential(nn.BatchNorm1d(5), mlp()).float()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def squares(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    x, y = batch
    return F.mse_loss(model(x), y, reduction="sum"), len(x)


def first(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Compute a loss with a known gradient: the mean of the rows, for a Linear layer with one
    output.
    """
    return model(x).sum(), len(x)


def bare(weight: list[float], dtype: torch.dtype = torch.float64) -> nn.Module:
    model = nn.Linear(len(weight), 1, bias=False, dtype=dtype)
    model.weight.data[:] = torch.tensor(weight)
    return model


def sgd(model: nn.Module, lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: value.clone() for name, value in getattr(model, "module", model).state_dict().items()
    }


def divide_rows(batches, world, accum):
    """Give row i of a step to rank i % size. A rank without rows gets row 63 and the count 0."""
    for rows in batches:
        mine = rows[world.rank :: world.size]
        parts = [part for part in (mine[i::accum] for i in range(accum)) if part]
        yield (
            ([(X[part], Y[part]) for part in parts], len(rows)) if mine else ([(X[63:], Y[63:])], 0)
        )


# ------------------------------------------------------------------------ jobs that every rank runs


def whole_batches(world, accum):
    model = ddp_setup.replicate(mlp(), world)
    optimizer, gradients = adamw(model), []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append([p.grad.clone() for p in model.parameters()])
    )
    reports = [
        r
        for _, r in loop.train_(
            model, [optimizer], divide_rows(BATCHES, world, accum), squares, clip=2.0
        )
    ]
    return {
        "weights": weights(model),
        "gradients": gradients,
        "losses": [float(r.loss) for r in reports],
        "norms": [float(r.grad_norm) for r in reports],
        "counts": [int(r.count) for r in reports],
    }


def train_gpt(world, accum):
    tokens = (np.random.default_rng(0).integers(0, 17, 200).astype(np.uint8),)
    plan = chardata.BatchPlan(
        tokens, block_size=8, batch_size=5
    )  # 24 windows, so 5 steps per epoch
    model = ddp_setup.replicate(
        gpt.build(gpt.Config(17, 8, layers=2, heads=2, embd=16), seed=0), world
    )
    steps = chardata.steps(plan, accum=accum, rank=world.rank, world_size=world.size)
    training = loop.train_(model, [adamw(model)], islice(steps, 50), gpt.loss, clip=1.0)
    return {"losses": [float(r.loss) for _, r in training], "weights": weights(model)}


def synchronisations(world, accum, sync_each=False):
    """Count the gradient all-reduces in 3 steps of `accum` micro-batches. All gradients are in one
    bucket.
    """
    calls = []

    def hook(state, bucket):
        calls.append(bucket)
        return allreduce_hook(state, bucket)

    model = ddp_setup.replicate(mlp(), world)
    if world.size > 1:
        model.register_comm_hook(None, hook)
    part = (X[:2], Y[:2])
    steps = [([part] * accum, 2 * accum * world.size)] * 3
    for _ in loop.train_(model, [sgd(model)], steps, squares, sync_each=sync_each):
        pass
    return len(calls)


def clipping(world):
    """Rank r has one row, (r + 1, 0) or (0, r + 1), so the norm of a rank differs from that of the
    mean.
    """
    model = ddp_setup.replicate(bare([0.0, 0.0]), world)
    row = torch.tensor(
        [[1.0 + world.rank, 0.0] if world.rank % 2 else [0.0, 1.0 + world.rank]]
    ).double()
    [(_, report)] = loop.train_(model, [sgd(model)], [([row], world.size)], first, clip=0.1)
    return float(report.grad_norm), weights(model)["weight"][0]


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
    """The last rank asks to stop in the third step."""
    calls = []
    model = ddp_setup.replicate(mlp(), world)

    def asked():
        calls.append(0)
        return world.rank == world.size - 1 and len(calls) == 3

    steps = divide_rows(BATCHES[:5], world, 1)
    return [
        report.stop
        for _, report in loop.train_(model, [sgd(model, 0.01)], steps, squares, stop=asked)
    ]


def evaluation(world):
    """Evaluate six batches, of which rank 0 has none, unless it is the only rank.

    After a training step each rank has BatchNorm statistics of its own. Those of rank 0 count, as in a checkpoint.
    """
    model = ddp_setup.replicate(normed(), world)
    norm = next(module for module in model.modules() if isinstance(module, nn.BatchNorm1d))
    norm.running_mean.fill_(0.1 * world.rank)
    # as the average of the weights (EMA), which is not inside DDP
    ema = copy.deepcopy(getattr(model, "module", model))
    batches = [(X[: 3 * i].float(), Y[: 3 * i].float()) for i in range(1, 7)]
    others = max(1, world.size - 1)
    shares = [batches[i::others] for i in range(others)]
    mine = (shares if world.size == 1 else [[], *shares])[world.rank]
    loss = loop.evaluate(model, mine, squares)
    for other in (torch.compile(model, backend="eager"), ema):
        assert loop.evaluate(other, mine, squares) == loss
    return loss


def stopped_evaluation(world):
    """The last rank asks to stop at its second of 4 batches. Return (result, batches computed,
    mode).
    """
    model, asked, computed = ddp_setup.replicate(normed(), world), [], []

    def loss_fn(model, batch):
        computed.append(batch)
        return squares(model, batch)

    def stop():
        asked.append(0)
        return world.rank == world.size - 1 and len(asked) == 2

    result = loop.evaluate(model, [(X[:2].float(), Y[:2].float())] * 4, loss_fn, stop=stop)
    return result, len(computed), model.training


def grouping(world):
    """Rank r has r + 1 batches of 1, 2, ... rows. Two of them are one step."""
    batches = [torch.full((i + 1,), float(world.rank)) for i in range(world.rank + 1)]
    return [
        ([len(batch) for batch in window], total)
        for window, total in loop.group_batches(batches, 2, len)
    ]


def randomness(world):
    """Return the weights after 6 steps with dropout: uninterrupted, resumed after 3, and with
    another seed.
    """

    def run(model, optimizer, start, stop, seed):
        steps = divide_rows(BATCHES[start:stop], world, 2)
        for _ in loop.train_(model, [optimizer], steps, squares, start=start, seed=seed):
            torch.rand(1)  # numbers that the caller draws must not matter
        return weights(model)

    def fresh():
        model = ddp_setup.replicate(mlp(dropout=0.5), world)
        return model, adamw(model)

    model, optimizer = fresh()
    run(model, optimizer, 0, 3, seed=7)
    again, its_optimizer = fresh()
    again.load_state_dict(model.state_dict())
    its_optimizer.load_state_dict(optimizer.state_dict())
    return (
        run(*fresh(), 0, 6, seed=7),
        run(again, its_optimizer, 3, 6, seed=7),
        run(*fresh(), 0, 6, seed=8),
    )


def first_random_numbers(world):
    """Return the first random number of each of three steps."""
    model, seen = ddp_setup.replicate(mlp(), world), []

    def loss_fn(model, batch):
        seen.append(torch.rand(()).item())
        return squares(model, batch)

    for _ in loop.train_(model, [sgd(model)], [([(X[:1], Y[:1])], world.size)] * 3, loss_fn):
        pass
    return seen


def shuffles(world):
    """Return three permutations that all ranks draw between steps, and those without training."""
    model, drawn = ddp_setup.replicate(mlp(dropout=0.5), world), []

    def steps():
        for _ in range(3):
            drawn.append(torch.randperm(20).tolist())  # like a DataLoader with shuffle=True
            yield [(X[:1], Y[:1])], world.size

    torch.manual_seed(5)
    for _ in loop.train_(model, [sgd(model)], steps(), squares):
        pass
    torch.manual_seed(5)
    return drawn, [torch.randperm(20).tolist() for _ in range(3)]


def buffers_of_a_larger_tensor(world):
    """Evaluate a model whose buffer is a part of a tensor. Return that tensor of this rank."""
    model, tensor = nn.Linear(1, 1), torch.arange(12.0).reshape(3, 4)
    tensor[:, 1:3] += 100 * world.rank
    model.register_buffer("part", tensor[:, 1:3])
    replica = ddp_setup.replicate(model, world)  # this sends rank 0's buffers
    model.part += world.rank
    loop.evaluate(replica, [torch.ones(1, 1)], lambda model, x: (model(x).sum(), 1))
    return tensor.tolist()


def unwrapped_model(world):
    """Train a model without DistributedDataParallel. Return (error, number of steps with
    sync_each=True).
    """
    model, steps = mlp(), [([(X[:1], Y[:1])], world.size)] * 2
    try:
        error = ""
        list(loop.train_(model, [sgd(model)], steps, squares))
    except ValueError as caught:
        error = str(caught)
    return error, len(list(loop.train_(model, [sgd(model)], steps, squares, sync_each=True)))


def loss_of_another_model(world):
    """Train a replica with a loss function that uses the model inside it. Return the errors of two
    trainings. In the second one, the gradient of rank 0 is NaN.
    """
    errors, mine = [], slice(world.rank, world.rank + 1)
    for factor in (1, math.nan):
        model = mlp()
        replica, steps = ddp_setup.replicate(model, world), [([(X[mine], Y[mine])], world.size)] * 2
        if world.rank == 0:
            next(model.parameters()).register_hook(lambda grad: grad * factor)
        try:
            list(loop.train_(replica, [sgd(model)], steps, lambda _, batch: squares(model, batch)))
            errors.append("")
        except ValueError as caught:
            errors.append(str(caught))
    return errors


def unused_parameters(world):
    """Train a model that uses its second layer in the first step only. Return (error, number of
    reports, whether the second step changed a weight).
    """
    model = nn.Sequential(nn.Linear(5, 1), nn.Linear(1, 1))
    replica, used = ddp_setup.replicate(model, world), [2, 1]
    model.forward = lambda x: model[: used.pop(0)](x)
    reports, error = [], ""
    steps = [([(X[:1].float(), Y[:1].float())], world.size)] * 2
    try:
        for _ in loop.train_(replica, [sgd(model)], steps, squares):
            reports.append(weights(model))
    except RuntimeError as caught:
        error = str(caught)
    changed = any(not value.equal(reports[-1][name]) for name, value in weights(model).items())
    return error, len(reports), changed


def every_job(world):
    results = {"gpt": train_gpt(world, accum=1 + world.size % 3)}
    for accum in (1, 2, 3):
        results["whole_batches", accum] = whole_batches(world, accum)
        results["synchronisations", accum] = synchronisations(world, accum)
        results["sync_each", accum] = synchronisations(world, accum, sync_each=True)
    jobs = (
        clipping,
        one_nan,
        stopping,
        randomness,
        first_random_numbers,
        shuffles,
        buffers_of_a_larger_tensor,
        grouping,
        evaluation,
        stopped_evaluation,
        unwrapped_model,
        loss_of_another_model,
        unused_parameters,
    )
    return results | {job.__name__: job(world) for job in jobs}


def jobs_of_four_three_and_two_ranks(folder: str) -> None:
    """Run the jobs in groups of 4, 3 and 2 ranks in the same processes, because processes start
    slowly.
    """
    rank = int(os.environ["RANK"])
    for size in (4, 3, 2):
        if rank < size:
            os.environ.update(WORLD_SIZE=f"{size}", LOCAL_WORLD_SIZE=f"{size}")
            with ddp_setup.process_group("cpu") as world:
                torch.save(every_job(world), f"{folder}/{rank} of {size}.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return a function: number of ranks -> list of what each rank returned."""
    torch.set_num_threads(
        1
    )  # Several threads would wait for each other while other ranks use the cores.
    folder = tmp_path_factory.mktemp("ranks")
    run_on_ranks(jobs_of_four_three_and_two_ranks, 4, str(folder))
    results = {
        size: [torch.load(folder / f"{rank} of {size}.pt") for rank in range(size)]
        for size in (2, 3, 4)
    }
    return {1: [every_job(ONE)], **results}.__getitem__


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
    assert (
        max(plain["norms"]) > 2.0 > min(plain["norms"])
    )  # some steps are clipped and some are not
    for result in ranks(size):
        # Both use float64. Only the order of the sums differs.
        torch.testing.assert_close(result["whole_batches", accum], plain, rtol=1e-9, atol=1e-12)


@SIZES
def test_a_gpt_in_float32_trains_equally_on_any_number_of_ranks(ranks, size):
    reference = train_gpt(ONE, accum=1)
    for result in ranks(size):
        # Promise 1: another order of float32 sums changes losses by at most 1e-4 in 50 steps.
        np.testing.assert_allclose(result["gpt"]["losses"], reference["losses"], rtol=1e-4)
        for name, value in reference["weights"].items():
            assert (result["gpt"]["weights"][name] - value).norm() <= 1e-4 * value.norm(), name


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("accum", [1, 2, 3])
def test_gradients_are_synchronised_once_per_step_for_any_accum(ranks, size, accum):
    assert [result["synchronisations", accum] for result in ranks(size)] == [3] * size


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("accum", [1, 2, 3])
def test_with_sync_each_gradients_are_synchronised_in_each_micro_batch(ranks, size, accum):
    assert [result["sync_each", accum] for result in ranks(size)] == [3 * accum] * size


@SIZES
def test_several_ranks_with_an_unwrapped_model_are_an_error(ranks, size):
    for error, synchronised_by_caller in (result["unwrapped_model"] for result in ranks(size)):
        assert synchronised_by_caller == 2
        if size == 1:
            assert error == ""
        else:
            assert f"{size} ranks would train different models: wrap the model" in error


@SIZES
def test_a_loss_function_that_uses_another_model_than_the_replica_is_an_error(ranks, size):
    for result in ranks(size):
        for error in result["loss_of_another_model"]:
            if size == 1:
                assert error == ""
            else:
                assert error.startswith("step 1: the ranks had different gradients; loss_fn must")


@SIZES
def test_unused_parameters_are_an_error_before_the_update_except_on_one_rank(ranks, size):
    for error, reports, changed in (result["unused_parameters"] for result in ranks(size)):
        if size == 1:
            assert (error, reports) == ("", 2)
        else:
            assert (reports, changed) == (1, False)
            assert "find_unused_parameters=True" in error


@pytest.mark.parametrize(("declared", "counted"), [(20, 2), (2, 20), (3, 2)])
@pytest.mark.parametrize("delay", [0, 1])
def test_a_declared_count_that_differs_from_the_counted_one_is_an_error(
    monkeypatch, declared, counted, delay
):
    monkeypatch.setattr(loop, "_reads_late", lambda device: delay)
    model, seen = mlp(), []
    steps = [([(X[:7], Y[:7])], 7), ([(X[:counted], Y[:counted])], declared)]
    message = f"step 12: the declared count is {declared}, but loss_fn counted {counted}$"
    with pytest.raises(ValueError, match=message):
        for step, _ in loop.train_(model, [sgd(model)], steps, squares, start=10):
            seen.append(step)
    assert seen == [11, 12][: 1 + delay]


def test_the_declared_count_may_differ_by_a_millionth():
    """Counts are summed in float32 on MPS, and can be sums of weights."""
    model = mlp()

    def train(counted):
        loss_fn = lambda model, batch: (squares(model, batch)[0], counted)  # noqa: E731
        list(loop.train_(model, [sgd(model)], [([(X[:7], Y[:7])], 2e9)], loss_fn))

    for counted in (2e9 - 1000, 2e9 + 1000):
        train(counted)
    for counted in (2e9 - 4000, 2e9 + 4000):
        message = f"the declared count is 2000000000, but loss_fn counted {counted:.0f}$"
        with pytest.raises(ValueError, match=message):
            train(counted)


def test_a_step_without_micro_batches_is_an_error():
    model = mlp()
    with pytest.raises(ValueError, match="a step has no micro-batch on this rank"):
        list(loop.train_(model, [sgd(model)], [([], 4)], squares))


@SIZES
def test_clipping_uses_the_norm_of_the_global_mean_gradient(ranks, size):
    across, up = sum(range(2, size + 1, 2)) / size, sum(range(1, size + 1, 2)) / size
    for norm, weight in (result["clipping"] for result in ranks(size)):
        assert norm == pytest.approx(math.hypot(across, up), rel=1e-12)
        # The weights were 0 and the learning rate is 1. Torch divides by norm + 1e-6.
        expected = (
            torch.tensor([across, up], dtype=torch.float64) * -0.1 / (math.hypot(across, up) + 1e-6)
        )
        torch.testing.assert_close(weight, expected, rtol=1e-12, atol=0)


def test_without_clip_the_gradient_is_not_changed():
    model = bare([0.0, 0.0])
    list(loop.train_(model, [sgd(model)], [([torch.tensor([[3e6, 4e6]]).double()], 1)], first))
    assert model.weight.tolist() == [[-3e6, -4e6]]


def test_gradients_that_another_loss_has_made_are_not_part_of_a_step():
    trained = []
    for with_another in (False, True):
        model = mlp()
        steps = loop.train_(model, [sgd(model, 0.01)], divide_rows(BATCHES, ONE, 1), squares)
        for _ in BATCHES:
            if with_another:
                squares(model, (X, Y))[0].backward()  # as the loss of a generator in a GAN
            next(steps)
        trained.append(weights(model))
    torch.testing.assert_close(*trained, rtol=0, atol=0)


def test_clipping_uses_one_norm_for_all_optimizers():
    model = nn.ModuleList([bare([0.0]), bare([0.0])])
    optimizers = [sgd(model[0]), sgd(model[1], lr=2.0)]
    loss_fn = lambda model, x: (3 * model[0](x).sum() + 4 * model[1](x).sum(), len(x))  # noqa: E731
    [(_, report)] = loop.train_(
        model, optimizers, [([torch.ones(1, 1).double()], 1)], loss_fn, clip=1.0
    )
    assert float(report.grad_norm) == 5.0
    # 3 / 5 and 2 * 4 / 5, except for the 1e-6 that torch adds to the norm.
    assert [layer.weight.item() for layer in model] == pytest.approx([-0.6, -1.6], rel=1e-6)


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_model_in_fsdp_is_clipped_as_a_bare_one(group_of_one):
    """The norm of FSDP's gradients is a DTensor, of which each rank has a part."""
    models = bare([0.0, 0.0]), fully_shard(bare([0.0, 0.0]), mesh=init_device_mesh("cpu", (1,)))
    step, norms = ([torch.tensor([[3.0, 4.0]]).double()], 1), []
    for model in models:
        training = loop.train_(model, [sgd(model)], [step], first, clip=1.0, sync_each=True)
        norms += [report.grad_norm.item() for _, report in training]
    assert norms == [5.0, 5.0]
    assert torch.equal(models[1].weight.full_tensor(), models[0].weight)


# ----------------------------------------------------------------------------------- learning rates


@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        (partial(loop.linear, total=100), {0: 1, 25: 0.75, 99: 0.01, 100: 0, 150: 0}),
        (partial(loop.linear, total=100, floor=0.2), {0: 1, 50: 0.6, 100: 0.2, 150: 0.2}),
        (
            partial(loop.linear, total=110, warmup_steps=10),
            {0: 0.1, 4: 0.5, 9: 1, 10: 1, 60: 0.5, 110: 0},
        ),
        (partial(loop.linear, total=10, warmup_steps=10), {0: 0.1, 9: 1, 10: 1, 11: 0}),
        (partial(loop.linear, total=10**9, warmup_steps=4), {0: 0.25, 1: 0.5, 3: 1, 4: 1}),
    ],
)
def test_schedules_have_the_values_of_their_formulas(factor, expected):
    assert {step: factor(step) for step in expected} == pytest.approx(expected, rel=1e-15)


def test_lr_at_scales_the_initial_rate_of_each_group_also_after_a_resume():
    model = mlp()
    # torch's schedulers set "initial_lr" too.
    groups = [{"params": model[0].parameters()}, {"params": model[3].parameters(), "lr": 9.0}]
    groups[1]["initial_lr"] = 0.5
    optimizer = torch.optim.SGD(groups, lr=2.0)
    lr_at = {0: 1.0, 1: 0.5, 2: 0.1, 3: 0.0}.get
    step = ([(X[:1], Y[:1])], 1)
    rates = []
    for start in (0, 2):
        for _ in loop.train_(model, [optimizer], [step] * 2, squares, start=start, lr_at=lr_at):
            rates.append([group["lr"] for group in optimizer.param_groups])
    assert rates == [[2.0, 0.5], [1.0, 0.25], [0.2, 0.05], [0.0, 0.0]]


def test_lr_at_is_called_once_per_step_for_any_number_of_optimizers():
    model, called = mlp(), []
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    steps = loop.train_(
        model,
        optimizers,
        divide_rows(BATCHES, ONE, 1),
        squares,
        lr_at=lambda n: called.append(n) or 1.0,
    )
    assert len(list(steps)) == len(BATCHES) and called == [*range(len(BATCHES))]


def test_lr_at_may_return_a_number_of_numpy():
    """torch.load(weights_only=True) would refuse a checkpoint with it."""
    model = mlp()
    optimizer = sgd(model, 2.0)
    for _ in loop.train_(
        model, [optimizer], [([(X[:1], Y[:1])], 1)], squares, lr_at=lambda step: np.cos(step)
    ):
        assert type(optimizer.param_groups[0]["lr"]) is float


def test_without_lr_at_a_torch_scheduler_sets_the_learning_rate():
    model, rates = mlp(), []
    optimizer = sgd(model, 1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for _ in loop.train_(model, [optimizer], [([(X[:1], Y[:1])], 1)] * 5, squares):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    assert rates == [1.0, 1.0, 0.5, 0.5, 0.25]


# ---------------------------------------------------------------------------------- mixed precision


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_model_computes_in_the_given_dtype_and_keeps_float32_weights(dtype):
    seen, model = [], mlp().float()

    def loss_fn(model, batch):
        out = model(batch)
        seen.append(out.dtype)
        return out.float().square().sum(), len(batch)

    list(loop.train_(model, [sgd(model, 0.01)], [([X[:2].float()], 2)], loss_fn, dtype=dtype))
    loop.evaluate(model, [X[:2].float()], loss_fn, dtype)
    assert seen == [dtype, dtype]
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_without_a_grad_scaler_the_loss_is_not_scaled():
    model, seen = bare([0.0], torch.float32), []
    model.weight.register_hook(lambda gradient: seen.append(gradient.tolist()))
    list(loop.train_(model, [sgd(model)], [([torch.tensor([[3.0]])], 1)], first))
    assert seen == [[[3.0]]]


def test_an_overflow_with_a_grad_scaler_skips_the_step_and_lowers_the_scale():
    model = bare([1.0, 1.0], torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)  # overflows in float16
    step = ([torch.tensor([[0.75, 1.0]])], 1)
    training = loop.train_(
        model, [sgd(model)], [step] * 2, first, dtype=torch.float16, scaler=scaler, clip=0.5
    )
    _, report = next(training)
    assert (model.weight.tolist(), int(report.skipped), scaler.get_scale()) == (
        [[1.0, 1.0]],
        1,
        2.0**15,
    )
    _, report = next(training)
    assert (int(report.skipped), scaler.get_scale(), float(report.grad_norm)) == (1, 2.0**15, 1.25)
    # The gradient is unscaled, then clipped from 1.25 to 0.5. Torch adds 1e-6 to the norm.
    torch.testing.assert_close(model.weight.detach(), torch.tensor([[0.7, 0.6]]), rtol=1e-5, atol=0)


# ------------------------------------------------------------------------------------- not a number


@SIZES
def test_a_nan_on_one_rank_skips_the_step_on_all_ranks_and_the_next_step_works(ranks, size):
    for result in ranks(size):
        before, during, after = result["one_nan"]
        torch.testing.assert_close(during[:2], before[:2], rtol=0, atol=0)
        assert all((after[0][name] != value).any() for name, value in during[0].items())
        assert [skipped for *_, skipped in (before, during, after)] == [0, 1, 1]
    assert all(value.isfinite().all() for value in after[0].values())


def test_five_bad_steps_in_a_row_raise_an_error_that_names_the_last():
    model, seen = mlp(), []
    good, bad = ([([(X[:1] * factor, Y[:1])], 1)] for factor in (1.0, math.nan))
    with pytest.raises(loop.Diverged, match=r"5 times in a row, up to step 111\b"):
        for step, report in loop.train_(
            model, [sgd(model)], bad * 4 + good + bad * 5 + good, squares, start=101
        ):
            seen.append((step, int(report.skipped)))
    assert seen == list(zip(range(102, 111), [1, 2, 3, 4, 4, 5, 6, 7, 8]))


@pytest.mark.parametrize("good_steps_after", [0, 1, 3])
def test_with_delayed_reads_as_on_cuda_the_error_names_the_last_bad_step(
    monkeypatch, good_steps_after
):
    monkeypatch.setattr(loop, "_reads_late", lambda device: 1)
    model, seen = mlp(), []
    good, bad = ([([(X[:1] * factor, Y[:1])], 1)] for factor in (1.0, math.nan))
    steps = good * 2 + bad * 3 + good * good_steps_after
    with pytest.raises(loop.Diverged, match=r"3 times in a row, up to step 5;"):
        for step, _ in loop.train_(model, [sgd(model)], steps, squares, patience=3):
            seen.append(step)
    assert seen == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("clip", [0, -1.0, math.nan])
def test_a_clip_that_would_delete_or_reverse_the_gradient_is_refused(clip):
    model = mlp()
    training = loop.train_(model, [sgd(model)], [([(X, Y)], len(X))], squares, clip=clip)
    with pytest.raises(ValueError, match=f"^clip is {clip}; must be above 0"):
        next(training)


def test_sums_are_float64_except_on_mps():
    kinds = [loop.accumulator_dtype(torch.device(kind)) for kind in ("cuda", "cpu", "mps")]
    assert kinds == [torch.float64, torch.float64, torch.float32]


def test_flags_are_read_one_step_late_on_cuda_and_at_once_elsewhere():
    delays = [loop._reads_late(torch.device(kind)) for kind in ("cuda", "cpu", "mps")]
    assert delays == [1, 0, 0]


def test_with_delayed_reads_as_on_cuda_stop_is_reported_one_step_later(monkeypatch):
    monkeypatch.setattr(loop, "_reads_late", lambda device: 1)
    model, requests = mlp(), iter([False, True, False, False])
    training = loop.train_(
        model, [sgd(model)], [([(X[:1], Y[:1])], 1)] * 4, squares, stop=lambda: next(requests)
    )
    assert [report.stop for _, report in training] == [False, False, True, False]


@pytest.mark.parametrize(("stop_at", "computed"), [(None, 5), (2, 3)])
def test_with_delayed_reads_as_on_cuda_an_evaluation_gives_the_same_result(
    monkeypatch, stop_at, computed
):
    model, calls, stops = mlp(), [], []
    batches = [(X[:i], Y[:i]) for i in range(1, 6)]

    def loss_fn(model, batch):
        calls.append(batch)
        return squares(model, batch)

    expected = loop.evaluate(model, batches, squares)
    monkeypatch.setattr(loop, "_reads_late", lambda device: 1)
    stop = lambda: stops.append(0) or len(stops) == stop_at  # noqa: E731
    result = loop.evaluate(model, batches, loss_fn, stop=stop)
    assert result == (None if stop_at else expected) and len(calls) == computed


def test_patience_sets_the_number_of_bad_steps():
    model = mlp()
    with pytest.raises(loop.Diverged, match="2 times in a row, up to step 2"):
        list(
            loop.train_(
                model, [sgd(model)], [([(X[:1] * math.inf, Y[:1])], 1)] * 3, squares, patience=2
            )
        )


# ---------------------------------------------------------------------------------------- agreement


@SIZES
def test_if_one_rank_asks_to_stop_all_reports_of_this_step_say_so(ranks, size):
    assert [result["stopping"] for result in ranks(size)] == [
        [False, False, True, False, False]
    ] * size


def test_nobody_asks_to_stop_by_default():
    model = mlp()
    training = loop.train_(model, [sgd(model)], [([(X[:1], Y[:1])], 1)] * 2, squares)
    assert [report.stop for _, report in training] == [False, False]


@SIZES
def test_resume_with_dropout_gives_bitwise_equal_weights(ranks, size):
    for result in ranks(size):
        unbroken, resumed, other_seed = result["randomness"]
        torch.testing.assert_close(resumed, unbroken, rtol=0, atol=0)
        assert (unbroken["0.weight"] != other_seed["0.weight"]).any()


def test_each_rank_and_each_step_draws_different_random_numbers(ranks):
    draws = [number for result in ranks(4) for number in result["first_random_numbers"]]
    assert len(set(draws)) == 4 * 3


def test_random_numbers_have_known_values_so_that_old_runs_resume_with_the_same_dropout(ranks):
    """These are the numbers of rank 0 with seed 0. They must never change."""
    for size in (1, 2):
        seen = ranks(size)[0]["first_random_numbers"]
        assert seen == pytest.approx([0.5479161, 0.4982828, 0.3455437], abs=1e-6)


@SIZES
def test_the_random_generator_of_the_caller_is_not_changed(ranks, size):
    """Otherwise each epoch would be shuffled alike, or each rank would shuffle differently."""
    for result in ranks(size):
        drawn, expected = result["shuffles"]
        assert drawn == expected and drawn == ranks(1)[0]["shuffles"][0]


def test_a_step_that_fails_does_not_change_the_random_generator_either():
    model, expected = mlp(), torch.get_rng_state()
    with pytest.raises(RuntimeError):
        list(loop.train_(model, [], [([(X[:, :2], Y)], 1)], squares))
    assert torch.equal(torch.get_rng_state(), expected)


def test_training_puts_the_model_into_training_mode():
    model = mlp().eval()
    list(loop.train_(model, [sgd(model)], [([(X[:1], Y[:1])], 1)], squares))
    assert all(module.training for module in model.modules())


def test_a_report_cannot_be_changed():
    model = mlp()
    [(_, report)] = loop.train_(model, [sgd(model)], [([(X[:1], Y[:1])], 1)], squares)
    with pytest.raises(FrozenInstanceError):
        report.stop = True


@SIZES
def test_evaluation_is_exact_if_ranks_have_unequal_numbers_of_batches_or_none(ranks, size):
    model = normed().eval()
    with torch.no_grad():
        expected = sum(
            float((model(X[: 3 * i].float()) - Y[: 3 * i]).square().sum()) for i in range(1, 7)
        )
    means = [result["evaluation"] for result in ranks(size)]
    # Promise 4. The losses of the batches are float32.
    assert means == [pytest.approx(expected / (3 + 6 + 9 + 12 + 15 + 18), rel=1e-6)] * size


@pytest.mark.parametrize("size", [1, 2])
def test_if_one_rank_asks_to_stop_all_ranks_end_the_evaluation_at_this_batch(ranks, size):
    assert [result["stopped_evaluation"] for result in ranks(size)] == [(None, 2, True)] * size


@SIZES
def test_an_evaluation_sends_a_buffer_that_is_not_contiguous_and_nothing_else(ranks, size):
    for result in ranks(size):
        assert result["buffers_of_a_larger_tensor"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize("model", [nn.BatchNorm1d(4, eps=1e-12, affine=False), nn.Identity()])
def test_a_model_without_parameters_can_be_evaluated_as_a_baseline(model):
    batches = [torch.ones(2, 4), torch.full((1, 4), 4.0)]
    assert loop.evaluate(model, batches, lambda model, x: (model(x).sum(), len(x))) == 8


def test_an_evaluation_that_counts_nothing_returns_nan():
    assert math.isnan(loop.evaluate(mlp(), [], squares))
    assert math.isnan(loop.evaluate(mlp(), [(X[:0], Y[:0])], squares))


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_disables_dropout_and_gradients_and_restores_the_mode(training):
    model, modes = mlp(dropout=0.9).train(training), []

    def loss_fn(model, batch):
        modes.append((model.training, torch.is_grad_enabled()))
        return squares(model, batch)

    assert loop.evaluate(model, [(X, Y)], loss_fn) == loop.evaluate(model, [(X, Y)], loss_fn)
    assert modes == [(False, False)] * 2
    assert [module.training for module in model.modules()] == [training] * 5


def test_evaluation_restores_the_mode_of_each_submodule():
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)).double()
    model[1].eval()
    loop.evaluate(model, [X], lambda model, x: (model(x).sum(), len(x)))
    assert (model.training, model[1].training) == (True, False)


def test_an_evaluation_that_fails_restores_the_mode():
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)).double()
    model[1].eval()
    with pytest.raises(RuntimeError):
        loop.evaluate(model, [X[:, :2]], lambda model, x: (model(x).sum(), len(x)))
    assert (model.training, model[1].training) == (True, False)


def test_evaluation_uses_the_whole_model_if_a_submodule_is_named_module():
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = bare([0.0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x) + 10

    assert loop.evaluate(Shifted(), [torch.ones(1, 1).double()], first) == 10.0


# --------------------------------------------------------------------------------- batches to steps


@SIZES
def test_group_batches_continues_until_no_rank_has_a_batch_and_counts_the_rows_of_all_ranks(
    ranks, size
):
    own = [
        [i + 1 for i in range(rank + 1)] for rank in range(size)
    ]  # rows of each batch of each rank
    windows = [[[rows[i : i + 2] for rows in own]] for i in range(0, size, 2)]
    totals = [sum(sum(window) for window in step[0]) for step in windows]
    for rank, result in enumerate(ranks(size)):
        mine = [own[rank][i : i + 2] for i in range(0, size, 2)]
        steps = result["grouping"]
        assert len(steps) == len(totals)
        for (rows, total), expected, all_ranks in zip(steps, mine, totals):
            if expected:
                assert (rows, total) == (expected, all_ranks)
            else:  # it repeats one of its batches with the count 0
                assert rows[0] in own[rank] and len(rows) == 1 and total == 0


@pytest.mark.parametrize("accum", [0, -1])
def test_group_batches_refuses_steps_without_batches(accum):
    with pytest.raises(ValueError, match=f"accum is {accum}"):
        next(loop.group_batches([X], accum, len))


def test_five_steps_that_count_nothing_are_named_as_such():
    model, steps = mlp(), [([(X[:0], Y[:0])], 0)] * 5
    with pytest.raises(loop.Diverged, match="5 times in a row, up to step 5; .*counted nothing"):
        list(loop.train_(model, [sgd(model)], steps, squares))


def test_group_batches_of_no_batches_has_no_steps():
    assert list(loop.group_batches([], 2, len)) == []


def test_group_batches_leaves_out_steps_with_count_0():
    batches = [
        torch.ones(n) for n in (0, 3, 0, 0, 2)
    ]  # for example, all labels of some are padding
    assert [total for _, total in loop.group_batches(batches, 1, len)] == [3, 2]


def test_group_batches_reads_one_step_ahead():
    """The counts of a step are sent while the step before is computed, so that the host need not
    wait for CUDA.
    """
    events = []

    def loader():
        for i in range(4):
            events.append(f"read {i}")
            yield torch.ones(i + 1)

    for _, total in loop.group_batches(loader(), 1, len):
        events.append(f"step {total - 1:g}")
    assert events == [
        "read 0",
        "read 1",
        "step 0",
        "read 2",
        "step 1",
        "read 3",
        "step 2",
        "step 3",
    ]


def test_to_device_keeps_the_structure_of_a_batch():
    batch = {"x": torch.ones(2), "rest": [(torch.zeros(1), 3), "text", None]}
    moved = loop.to_device(batch, torch.device("meta"))
    assert moved["x"].is_meta and moved["rest"][0][0].is_meta
    assert (
        type(moved["rest"]) is list
        and moved["rest"][0][1:] == (3,)
        and moved["rest"][1:] == ["text", None]
    )


def test_to_device_keeps_a_named_tuple():
    moved = loop.to_device(ddp_setup.World(0, 0, 1, 1, torch.ones(1)), torch.device("meta"))
    assert type(moved) is ddp_setup.World and moved.device.is_meta


class DictOfTensors(UserDict):
    """Like the class BatchEncoding of transformers, which is no dict."""

    def to(self, device):
        self.data = {name: tensor.to(device) for name, tensor in self.items()}
        return self


class Edges(NamedTuple):
    """Its field `to` is no method."""

    start: torch.Tensor
    to: torch.Tensor


def test_to_device_lets_other_objects_move_themselves():
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    batch = [DictOfTensors(ids=torch.ones(2)), (packed, 4)]
    (encoding, (moved, four)) = loop.to_device(batch, torch.device("meta"))
    assert type(encoding) is DictOfTensors and encoding["ids"].is_meta
    assert moved.data.is_meta and four == 4
    assert moved.batch_sizes.tolist() == [2, 1, 1]  # These stay on the CPU.
    assert not batch[0]["ids"].is_meta  # The batch itself is not changed.
    edges = loop.to_device(Edges(torch.ones(2), torch.ones(2)), torch.device("meta"))
    assert type(edges) is Edges and edges.start.is_meta and edges.to.is_meta


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
        list(loop.train_(model, [optimizer], [([(X[:7], Y[:7])], 7)] * 2, squares, clip=1.0))
        loop.evaluate(model, [(X, Y)], squares)
        assert numbers.count == 1
