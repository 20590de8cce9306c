"""Tests of extras/fsdp.py: zero and fsdp give the results of one process, and each rank holds its part.

`every_job` runs once for each number of ranks. The tests check what its ranks returned.
"""

import signal
from functools import cache, partial
from itertools import islice

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import TINY, Program, losses, run, same, state
from torch import nn

import chardata
import ckpt
import ddp_setup
import gpt
import loop
from extras import fsdp

CLIP = 0.65
CPU = torch.device("cpu")
STRATEGIES = ("zero", "fsdp")
EACH = pytest.mark.parametrize("strategy", STRATEGIES)
SIZES = pytest.mark.parametrize("size", [2, 3])
TOKENS = np.random.default_rng(0).integers(0, 17, 200).astype(np.uint8)
PLAN = chardata.BatchPlan(TOKENS, block_size=8, batch_size=5)  # 24 windows: steps of 5, 5, 5, 5, 4
ROW = (torch.zeros(1, 8).long(), torch.zeros(1, 8).long())
LARGER = gpt.Config(64, 8, layers=6, heads=2, embd=32, arch="gpt2")


def build(strategy, *, arch="modern2", **config):
    """Return (distributed model, optimizers). Three ranks cannot divide its 16 rows evenly."""
    config = gpt.Config(18, 8, layers=2, heads=2, embd=16, arch=arch, **config)
    model = gpt.build(config, None if strategy else 0)
    model.checkpoint_activations = arch == "gpt2"
    if strategy:
        weight = partial(gpt.initial_weight, config, 0)
        fsdp.shard_(model, CPU, [*model.blocks], strategy, weight)
    # The true gradient of gpt2's key biases is 0, and AdamW would amplify the rounding errors.
    if arch == "gpt2":
        return model, [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]
    return model, [torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)]


def train(model, optimizers, steps, loss_fn, **settings):
    """Return all reports of loop.train_."""
    steps, loss_fn = fsdp.pad_steps(steps, loss_fn)
    return [
        r for _, r in loop.train_(model, optimizers, steps, loss_fn, sync_each=True, **settings)
    ]


def learn(world, model, optimizers, start, end, accum=1):
    """Train from step `start` to `end`. The ranks have unequal numbers of rows. Return losses, norms
    and, on rank 0, the weights.
    """
    share = {"rank": world.rank, "world_size": world.size}
    steps = islice(chardata.steps(PLAN, accum=accum, start=start, **share), end - start)
    reports = train(model, optimizers, steps, gpt.loss, start=start, clip=CLIP)
    return [float(r.loss) for r in reports], [float(r.grad_norm) for r in reports], whole(model)


def whole(model):
    return dict(ckpt.snapshot(model, []).get("model", {}))  # {} on ranks above 0


def local(tensors):
    """Count the bytes of these tensors on this rank."""
    return sum((t.to_local() if hasattr(t, "to_local") else t).nbytes for t in tensors)


# --- jobs that every rank runs ---


def learning(world, strategy, arch, accum=1):
    return learn(world, *build(strategy, arch=arch), 0, 12, accum)


def resumed(world, strategy):
    """Return the state after 6 steps with dropout, uninterrupted, and after 3 steps, a checkpoint
    and 3 more.
    """
    straight, again = (build(strategy, dropout=0.3) for _ in range(2))
    learn(world, *straight, 0, 3)
    ckpt.restore_(ckpt.snapshot(*straight), *again)
    for model in (straight, again):
        learn(world, *model, 3, 6)
    return ckpt.snapshot(*straight), ckpt.snapshot(*again)


def held(world, strategy):
    """Measure what this rank holds.

    bytes: of parameters, of gradients at each update, of moments. gathered: number of blocks whose
        parameters were whole in each forward pass of the last block. after: number of batches and
        bytes of parameters after an evaluation.
    """
    model, [optimizer] = build(strategy)
    kept = optimizer.param_groups[0]["params"]
    gradients, gathered, batches = [], [], []

    def look(*_):
        gathered.append(sum(not hasattr(b.qkv.weight, "to_local") for b in model.blocks))

    hook = model.blocks[-1].register_forward_pre_hook(look)
    optimizer.register_step_pre_hook(lambda *_: gradients.append(local(p.grad for p in kept)))
    train(model, [optimizer], [([ROW] * 2, 16 * world.size)] * 2, gpt.loss)
    hook.remove()
    moments = local(t for s in optimizer.state.values() for key, t in s.items() if key != "step")

    def loss_fn(model, batch):
        batches.append(batch)
        return gpt.loss(model, batch)

    loop.evaluate(model, *fsdp.pad_batches(model, [ROW] * 3, loss_fn))
    bytes = [local(model.parameters()), *gradients, moments]
    return {
        "bytes": bytes,
        "gathered": gathered,
        "after": [len(batches), local(model.parameters())],
    }


def evaluation(world, strategy):
    """Evaluate 3 batches, then 1, so that some ranks have fewer or none, then no batch at all."""
    model, _ = build(strategy)
    batches = [(torch.full((1, n), n), torch.full((1, n), 1)) for n in (3, 5, 8)]
    parts = [part[world.rank :: world.size] for part in (batches, batches[:1], [])]
    return [loop.evaluate(model, *fsdp.pad_batches(model, part, gpt.loss)) for part in parts]


def one_nan(world, strategy):
    """Train in float16, with a NaN on the last rank in the second step.

    Return (skipped, scale, whether weights changed) of each step.
    """
    model, optimizers = build(strategy)
    scaler, trail = torch.amp.GradScaler("cpu", init_scale=1024.0), []
    for bad in (False, True, False):
        before, factor = whole(model), torch.nan if bad and world.rank == world.size - 1 else 1.0

        def loss_fn(model, batch):
            loss_sum, count = gpt.loss(model, batch)
            return loss_sum * factor, count

        how = {"dtype": torch.float16, "scaler": scaler}
        [report] = train(model, optimizers, [([ROW], 8 * world.size)], loss_fn, **how)
        trail.append((int(report.skipped), scaler.get_scale(), not same(whole(model), before)))
    return trail


def start(world, strategy):
    """Shard a model that has no memory yet. Return (weights, the most bytes of whole parameters at a
    time, bytes of shards, whether the head is tied).
    """
    model, whole_bytes = gpt.build(LARGER, seed=None), []

    def initial_weight(name, shape):
        here = (p for p in model.parameters() if not (p.is_meta or hasattr(p, "to_local")))
        weight = gpt.initial_weight(LARGER, 5, name, shape)
        whole_bytes.append(local([weight, *here]))
        return weight

    fsdp.shard_(model, CPU, [*model.blocks], strategy, initial_weight)
    tied = model.head.weight is model.embedding.weight
    return whole(model), max(whole_bytes), local(model.parameters()), tied


def partly_meta(world, strategy):
    """Shard a model of which one part has other values on each rank, and the other has none."""
    torch.manual_seed(world.rank)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, device="meta"), nn.BatchNorm1d(1))
    model[1].bias.requires_grad_(False)
    model[2].running_mean += world.rank

    def initial_weight(name, shape):
        return torch.full(shape, {"1.weight": 5.0, "1.bias": 6.0}[name])

    fsdp.shard_(model, CPU, [model[0]], strategy, initial_weight)
    return whole(model), [p.requires_grad for p in model.parameters()]


def every_job(world):
    found = {}
    for strategy in STRATEGIES:
        for job in (held, evaluation, one_nan, resumed, start, partly_meta):
            found[job.__name__, strategy] = job(world, strategy)
        found["gpt2", strategy] = learning(world, strategy, "gpt2")
        found["modern2", strategy] = learning(world, strategy, "modern2", accum=3)
    return found


def groups_of_three_and_two_ranks(rank: int, folder: str) -> None:
    """Run every_job with both numbers of ranks in the same processes, because these start slowly."""
    torch.set_num_threads(1)
    for size in range(3, max(rank, 1), -1):
        store = dist.FileStore(f"{folder}/store of {size}", size)
        dist.init_process_group("gloo", store=store, world_size=size, rank=rank)
        world = ddp_setup.World(rank, rank, size, size, CPU)
        torch.save(every_job(world), f"{folder}/{rank} of {size}.pt")
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return a function: (number of ranks, job, strategy) -> list of what each rank returned."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(groups_of_three_and_two_ranks, (str(folder),), 3)
    load = cache(lambda rank, size: torch.load(folder / f"{rank} of {size}.pt"))
    return lambda size, job, strategy: [load(i, size)[job, strategy] for i in range(size)]


@pytest.fixture(scope="module")
def alone():
    """Return a function: (job, arguments) -> what it returns in one process without a strategy."""
    torch.set_num_threads(1)
    return cache(lambda job, *args: job(ddp_setup.World(), "", *args))


# --- initial weights ---


@SIZES
@EACH
def test_a_model_is_made_in_parts_with_the_weights_of_gpt_build(ranks, size, strategy):
    """While it is made, a rank holds its shards and at most one whole part."""
    model = gpt.build(LARGER, seed=5)
    results = ranks(size, "start", strategy)
    assert same(results[0][0], dict(model.state_dict()))
    every, parts = local(model.parameters()), [local(block.parameters()) for block in model.blocks]
    for _, most, shards, tied in results:
        assert tied and shards <= 1.05 * every / size
        assert most == max(*parts, every - sum(parts))


@SIZES
@EACH
def test_parameters_and_buffers_that_have_values_are_those_of_rank_0(ranks, size, strategy):
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1), nn.BatchNorm1d(1)).state_dict()
    expected["1.weight"], expected["1.bias"] = torch.full((1, 3), 5.0), torch.tensor([6.0])
    (weights, trainable), *_ = results = ranks(size, "partly_meta", strategy)
    assert same(weights, dict(expected))
    assert [flags for _, flags in results] == [[True] * 3 + [False] + [True] * 2] * size
    assert same(partly_meta(ddp_setup.World(), strategy), (weights, trainable))


# --- arithmetic ---


@SIZES
@EACH
@pytest.mark.parametrize("arch", ["gpt2", "modern2"])
def test_losses_norms_and_weights_equal_those_of_one_process(ranks, alone, size, strategy, arch):
    """Promise 1, with uneven shares, clipping, tied and untied heads, accumulation, and checkpointed
    activations. The norm is less exact.
    """
    theirs, results = alone(learning, arch), ranks(size, arch, strategy)
    assert max(theirs[1]) > CLIP  # Some steps are clipped.
    assert all(result[:2] == results[0][:2] for result in results)
    ours = results[0]
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-4)
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-3)
    for name, value in theirs[2].items():
        assert (ours[2][name] - value).norm() <= 1e-4 * value.norm(), name


@SIZES
@EACH
def test_resume_with_dropout_gives_bitwise_equal_state(ranks, size, strategy):
    straight, again = ranks(size, "resumed", strategy)[0]
    assert same(straight, again) and straight["optimizers"][0]["state"]


@SIZES
@EACH
def test_a_nan_on_one_rank_skips_the_step_on_all_ranks_and_scales_stay_equal(ranks, size, strategy):
    for rank, trail in enumerate(ranks(size, "one_nan", strategy)):
        skipped, scales, moved = zip(*trail)
        assert skipped == (0, 1, 0) and scales == (1024.0, 512.0, 512.0)
        assert moved == (rank == 0, False, rank == 0)  # The others have no whole weights.


@SIZES
@EACH
def test_ranks_with_fewer_or_no_batches_take_part_in_an_evaluation(ranks, alone, size, strategy):
    """Otherwise the others would wait for them."""
    for found in ranks(size, "evaluation", strategy):
        np.testing.assert_allclose(found, alone(evaluation), rtol=1e-6)
    assert np.isnan(found[-1]) and found[0] > 0


@SIZES
@EACH
def test_each_rank_holds_its_part(ranks, alone, size, strategy):
    """Weights, gradients and moments; fsdp gathers one block at a time, and zero keeps all."""
    complete = alone(held)["bytes"]
    for rank in ranks(size, "held", strategy):
        for part, all_of_it in zip(rank["bytes"], complete, strict=True):
            assert part <= 1.3 * all_of_it / size  # small tensors cannot be divided evenly
        assert {*rank["gathered"]} == {2 if strategy == "zero" else 1}
        assert rank["after"] == [3, rank["bytes"][0]]


# --- the program ---


@EACH
def test_the_program_gives_the_losses_of_ddp_and_continues_after_a_stop(strategy, text, tmp_path):
    """The resume is bitwise exact. The checkpoint is the ordinary one."""
    flags = [*TINY, "--data", text, "--optimizer", "adamw", "--accum", 2, "--log-every", 1]
    flags += ["--spawn", 2, "--steps", 40, "--save-every", 20]
    divided = [*flags, "--strategy", strategy]
    assert run(*flags, "--out", tmp_path / "ddp").code == 0
    assert run(*divided, "--out", tmp_path / "whole").code == 0
    with Program(*divided, "--out", tmp_path / "stopped") as program:
        program.read_to("step 10/")
        program.process.send_signal(signal.SIGTERM)
        ran = program.finish()
    assert ran.code == 3 and ran.err == "", ran
    assert run(*divided, "--out", tmp_path / "stopped").code == 0
    whole, stopped, ddp = (state(tmp_path / name) for name in ("whole", "stopped", "ddp"))
    assert all(same(whole[name], stopped[name]) for name in ("model", "optimizers", "step"))
    assert losses(tmp_path / "whole") == losses(tmp_path / "stopped")
    expected = dict(losses(tmp_path / "ddp"))
    assert dict(losses(tmp_path / "whole")) == pytest.approx(expected, rel=1e-4)
    assert whole["model"].keys() == ddp["model"].keys() and len(expected) == 40


def test_the_default_optimizer_is_adamw_and_muon_is_refused_in_one_line(text, tmp_path):
    flags = [*TINY, "--data", text, "--strategy", "fsdp", "--steps", 1, "--out", tmp_path / "a"]
    ran = run(*flags, "--optimizer", "muon")
    assert ran.code == 2 and "needs --optimizer adamw" in ran.err and not (tmp_path / "a").exists()
    ran = run(*flags)
    assert ran.code == 0 and "with adamw" in ran.out, ran
