"""Tests of extras/fsdp.py: zero and fsdp give the results of one process, and each rank holds its part.

`every_job` runs once for each number of ranks. The tests check what its ranks returned.
"""

import signal
from datetime import timedelta
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
ONE = ddp_setup.World(0, 0, 1, 1, CPU)
STRATEGIES = ("zero", "fsdp")
EACH = pytest.mark.parametrize("strategy", STRATEGIES)
SIZES = pytest.mark.parametrize("size", [2, 3])
TOKENS = (np.random.default_rng(0).integers(0, 17, 200).astype(np.uint8),)
PLAN = chardata.BatchPlan(TOKENS, block_size=8, batch_size=5)  # 24 windows: steps of 5, 5, 5, 5, 4
ROW = (torch.zeros(1, 8).long(), torch.zeros(1, 8).long())


def build(world, strategy, *, arch="modern2", **config):
    """Return (distributed model, optimizers). Three ranks cannot divide its 16 rows evenly."""
    config = gpt.Config(18, 8, layers=2, heads=2, embd=16, arch=arch, **config)
    model = gpt.build(config, None if strategy else 0)
    model.checkpoint_activations = arch == "gpt2"
    if strategy:
        weight = partial(gpt.initial_weight, config, 0)
        fsdp.shard_(model, world.size, world.device, [*model.blocks], strategy, weight)
    # The true gradient of gpt2's key biases is 0, and AdamW would amplify the rounding errors.
    if arch == "gpt2":
        return model, [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]
    return model, [torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)]


def train(strategy, model, optimizers, steps, loss_fn, **settings):
    """Return all reports of loop.train_, called as `strategy` needs it."""
    if strategy == "fsdp":
        steps, loss_fn = fsdp.pad_steps(steps, loss_fn)
    sync_each = strategy == "fsdp"
    training = loop.train_(model, optimizers, steps, loss_fn, sync_each=sync_each, **settings)
    return [report for _, report in training]


def evaluate(model, batches, loss_fn, stop=lambda: False):
    batches, loss_fn, stop = fsdp.pad_batches(model, batches, loss_fn, stop=stop)
    return loop.evaluate(model, batches, loss_fn, stop=stop)


def learn(world, strategy, model, optimizers, start, end, accum=1):
    """Train from step `start` to `end`. The ranks have unequal numbers of rows. Return losses, norms
    and, on rank 0, the weights.
    """
    share = {"rank": world.rank, "world_size": world.size}
    steps = islice(chardata.steps(PLAN, accum=accum, start=start, **share), end - start)
    reports = train(strategy, model, optimizers, steps, gpt.loss, start=start, clip=CLIP)
    return [float(r.loss) for r in reports], [float(r.grad_norm) for r in reports], whole(model)


def whole(model):
    return dict(ckpt.snapshot(model, []).get("model", {}))  # {} on ranks above 0


def local(tensors):
    """Count the bytes of these tensors on this rank."""
    return sum((t.to_local() if hasattr(t, "to_local") else t).nbytes for t in tensors)


# --- jobs that every rank runs ---


def learning(world, strategy, arch, accum=1):
    return learn(world, strategy, *build(world, strategy, arch=arch), 0, 12, accum)


def continued(world, strategy, saved):
    """Continue from a checkpoint of a single process after 4 steps."""
    model = build(world, strategy)
    ckpt.restore_(torch.load(saved) if world.rank == 0 else {}, *model)
    return learn(world, strategy, *model, 4, 12, accum=2)


def resumed(world, strategy):
    """Return the state after 6 steps with dropout, uninterrupted, and after 3 steps, a checkpoint
    and 3 more.
    """
    straight, again = (build(world, strategy, dropout=0.3) for _ in range(2))
    learn(world, strategy, *straight, 0, 3)
    ckpt.restore_(ckpt.snapshot(*straight), *again)
    for model in (straight, again):
        learn(world, strategy, *model, 3, 6)
    return ckpt.snapshot(*straight), ckpt.snapshot(*again)


def held(world, strategy):
    """Measure what this rank holds.

    bytes: of parameters, of gradients at each update, of moments. gathered: number of blocks whose
        parameters were whole in each forward pass of the last block. begun: whether this rank's
        shards had gradients already when each micro-batch began. after: bytes of parameters after an
        evaluation, and after one that the last rank stopped in the second of 3 batches.
    """
    model, [optimizer] = build(world, strategy)
    kept = optimizer.param_groups[0]["params"]
    gradients, gathered, begun, after = [], [], [], []

    def loss_fn(model, batch):
        begun.append(kept[0].grad is not None)
        return gpt.loss(model, batch)

    def look(*_):
        gathered.append(sum(not hasattr(b.qkv.weight, "to_local") for b in model.blocks))

    hook = model.blocks[-1].register_forward_pre_hook(look)
    optimizer.register_step_pre_hook(lambda *_: gradients.append(local(p.grad for p in kept)))
    train(strategy, model, [optimizer], [([ROW] * 2, 16 * world.size)] * 2, loss_fn)
    hook.remove()
    moments = local(t for s in optimizer.state.values() for key, t in s.items() if key != "step")
    steps = begun[:]
    for last_asks in (False, True):
        begun.clear()
        asks = last_asks and world.rank == world.size - 1
        result = evaluate(model, [ROW] * 3, loss_fn, lambda: asks and len(begun) == 1)
        after.append((result is None, len(begun), local(model.parameters())))
    held = [local(model.parameters()), *gradients, moments]
    return {"bytes": held, "gathered": gathered, "begun": steps, "after": after}


def evaluation(world, strategy):
    """Evaluate 3 batches, then 1, so that some ranks have fewer or none, then no batch at all."""
    model, _ = build(world, strategy)
    batches = [(torch.full((1, n), n), torch.full((1, n), 1)) for n in (3, 5, 8)]
    parts = [part[world.rank :: world.size] for part in (batches, batches[:1], [])]
    return [evaluate(model, part, gpt.loss) for part in parts]


def unequal_micro_batches(world, strategy):
    """Rank r has r + 1 micro-batches of one row in each step. Return the losses, counts, and micro-
    batches.
    """
    model, optimizers = build(world, strategy)
    first, computed = world.rank * (world.rank + 1) // 2, []
    rows = [torch.full((1, 9), first + i) for i in range(world.rank + 1)]
    total = 8 * (world.size * (world.size + 1) // 2)

    def loss_fn(model, batch):
        computed.append(int(batch[0][0, 0]))
        return gpt.loss(model, batch)

    steps = [([(row[:, :-1], row[:, 1:]) for row in rows], total)] * 2
    reports = train(strategy, model, optimizers, steps, loss_fn)
    return [float(r.loss) for r in reports], [int(r.count) for r in reports], computed


def own_group(world, strategy):
    """Evaluate and train with the new gloo groups that a default group of NCCL needs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda group=None: "cuda:nccl")
        return evaluation(world, strategy), unequal_micro_batches(world, strategy)


def one_nan(world, strategy):
    """Train in float16, with a NaN on the last rank in the second step.

    Return (skipped, scale, whether weights changed) of each step.
    """
    model, optimizers = build(world, strategy)
    scaler, trail = torch.amp.GradScaler("cpu", init_scale=1024.0), []
    for bad in (False, True, False):
        before, factor = whole(model), torch.nan if bad and world.rank == world.size - 1 else 1.0

        def loss_fn(model, batch):
            loss_sum, count = gpt.loss(model, batch)
            return loss_sum * factor, count

        how = {"dtype": torch.float16, "scaler": scaler}
        [report] = train(strategy, model, optimizers, [([ROW], 8 * world.size)], loss_fn, **how)
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

    fsdp.shard_(model, world.size, CPU, [*model.blocks], strategy, initial_weight)
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

    fsdp.shard_(model, world.size, CPU, [model[0]], strategy, initial_weight)
    return whole(model), [p.requires_grad for p in model.parameters()]


def compressed(world):
    """Return the gradients of a model whose true gradient is 0.1, 0.2, ..., without and with
    compression, and the error for a model that is not in DDP.
    """
    gradients, error = [], ""
    for compress in (False, True):
        bare = nn.Linear(8, 1, bias=False)
        model = ddp_setup.replicate(bare, world)
        if compress:
            fsdp.compress_(model)
        model(torch.linspace(0.1, 1.7, 8) * (world.rank + 1)).sum().backward()
        gradients.append(bare.weight.grad[0].clone())
    try:
        fsdp.compress_(nn.Linear(1, 1))
    except ValueError as caught:
        error = str(caught)
    return *gradients, error


LARGER = gpt.Config(64, 8, layers=6, heads=2, embd=32, arch="gpt2")
JOBS = (held, evaluation, unequal_micro_batches, own_group, one_nan, resumed)
JOBS += (start, partly_meta)


def every_job(world, saved):
    found = {("compressed", ""): compressed(world)}
    for strategy in STRATEGIES:
        found |= {(job.__name__, strategy): job(world, strategy) for job in JOBS}
        found["continued", strategy] = continued(world, strategy, saved)
        found["gpt2", strategy] = learning(world, strategy, "gpt2")
        found["modern2", strategy] = learning(world, strategy, "modern2", accum=3)
    return found


def groups_of_three_and_two_ranks(rank: int, folder: str) -> None:
    """Run every_job with both numbers of ranks in the same processes, because these start slowly."""
    torch.set_num_threads(1)
    for size in range(3, max(rank, 1), -1):
        store = dist.FileStore(f"{folder}/store of {size}", size)
        dist.init_process_group("gloo", None, timedelta(seconds=300), size, rank, store)
        world = ddp_setup.World(rank, rank, size, size, CPU)
        torch.save(every_job(world, f"{folder}/saved.pt"), f"{folder}/{rank} of {size}.pt")
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return a function: (number of ranks, job, strategy) -> list of what each rank returned."""
    folder = tmp_path_factory.mktemp("ranks")
    model = build(ONE, "")
    learn(ONE, "", *model, 0, 4)
    torch.save(ckpt.snapshot(*model), folder / "saved.pt")
    torch.multiprocessing.spawn(groups_of_three_and_two_ranks, (str(folder),), 3)
    load = cache(lambda rank, size: torch.load(folder / f"{rank} of {size}.pt"))
    return lambda size, job, strategy="": [load(i, size)[job, strategy] for i in range(size)]


@pytest.fixture(scope="module")
def alone():
    """Return a function: (job, arguments) -> what it returns in one process without a strategy."""
    torch.set_num_threads(1)
    return cache(lambda job, *args: job(ONE, "", *args))


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
    assert same(partly_meta(ONE, strategy), (weights, trainable))


# --- arithmetic ---


def assert_as_promised(ours, theirs, start=0):
    """Check promise 1: losses from step `start` on, and weights, agree to 1e-4. The norm is less
    exact.
    """
    np.testing.assert_allclose(ours[0], theirs[0][start:], rtol=1e-4)
    np.testing.assert_allclose(ours[1], theirs[1][start:], rtol=1e-3)
    for name, value in theirs[2].items():
        assert (ours[2][name] - value).norm() <= 1e-4 * value.norm(), name


@SIZES
@EACH
@pytest.mark.parametrize("arch", ["gpt2", "modern2"])
def test_losses_norms_and_weights_equal_those_of_one_process(ranks, alone, size, strategy, arch):
    """Cover uneven shares, clipping, tied and untied heads, accumulation, and checkpointed
    activations.
    """
    reference, results = alone(learning, arch), ranks(size, arch, strategy)
    assert max(reference[1]) > CLIP  # Some steps are clipped.
    assert all(result[:2] == results[0][:2] for result in results)
    assert_as_promised(results[0], reference)


@SIZES
@EACH
def test_each_strategy_continues_from_the_checkpoint_of_one_process(ranks, alone, size, strategy):
    result = ranks(size, "continued", strategy)[0]
    assert_as_promised(result, alone(learning, "modern2"), start=4)


@SIZES
@EACH
def test_resume_with_dropout_gives_bitwise_equal_state(ranks, size, strategy):
    assert same(*ranks(size, "resumed", strategy)[0])


@SIZES
@EACH
def test_a_nan_on_one_rank_skips_the_step_on_all_ranks_and_scales_stay_equal(ranks, size, strategy):
    for rank, trail in enumerate(ranks(size, "one_nan", strategy)):
        skipped, scales, moved = zip(*trail)
        assert skipped == (0, 1, 0) and scales == (1024.0, 512.0, 512.0)
        assert moved == (rank == 0, False, rank == 0)  # The others have no whole weights.


@SIZES
@EACH
def test_evaluation_is_exact_with_unequal_numbers_of_batches(ranks, alone, size, strategy):
    """Some ranks have no batch."""
    for result in ranks(size, "evaluation", strategy):
        assert result == pytest.approx(alone(evaluation), rel=1e-6, nan_ok=True)


@SIZES
@EACH
def test_ranks_may_have_unequal_numbers_of_micro_batches(ranks, size, strategy):
    """fsdp computes the same number on each rank: missing ones repeat the first, and nothing is
    counted twice.
    """
    rows = size * (size + 1) // 2
    reference, [optimizer] = build(ONE, "")
    whole = torch.arange(rows)[:, None].expand(rows, 9)
    step = ([(whole[:, :-1], whole[:, 1:])], 8 * rows)
    expected = [float(r.loss) for r in train("", reference, [optimizer], [step] * 2, gpt.loss)]
    for rank, result in enumerate(ranks(size, "unequal_micro_batches", strategy)):
        first = rank * (rank + 1) // 2
        mine = [*range(first, first + rank + 1)]
        added = [first] * (size - len(mine)) if strategy == "fsdp" else []
        curve, counts, computed = result
        assert counts == [8 * rows] * 2 and computed == [*mine, *added] * 2
        assert curve == pytest.approx(expected, rel=1e-4)


@SIZES
@EACH
def test_with_nccl_the_ranks_agree_over_gloo_groups_of_their_own(ranks, size, strategy):
    expected = zip(
        *(ranks(size, job.__name__, strategy) for job in (evaluation, unequal_micro_batches))
    )
    assert same(ranks(size, "own_group", strategy), [*expected])


@SIZES
def test_compress_sends_gradients_as_bfloat16_and_needs_ddp(ranks, size):
    exact = torch.linspace(0.1, 1.7, 8) * (size + 1) / 2
    for plain, compressed, error in ranks(size, "compressed"):
        torch.testing.assert_close(plain, exact, rtol=1e-6, atol=0)
        torch.testing.assert_close(compressed, exact, rtol=2**-6, atol=0)
        assert torch.equal(compressed, compressed.bfloat16().float())
        assert not torch.equal(compressed, plain)
        assert error == "only DistributedDataParallel can compress gradients, not Linear"
    fsdp.compress_(nn.Linear(1, 1))  # a single rank sends nothing


def test_an_unknown_strategy_is_an_error():
    with pytest.raises(ValueError, match="'fdsp' is not one of zero, fsdp"):
        fsdp.shard_(nn.Linear(1, 1), 1, CPU, [], "fdsp")


# --- memory ---


@SIZES
@pytest.mark.parametrize(("strategy", "gathered", "begun"), [("zero", 2, False), ("fsdp", 1, True)])
def test_each_rank_holds_only_its_rows_of_all_tensors(ranks, size, strategy, gathered, begun):
    """Within a step, zero gathers all parameters and fsdp those of one block. zero accumulates the
    gradients of its micro-batches before it sends them; fsdp sends them each time.
    """
    parameters = list(build(ONE, "")[0].parameters())
    for rank, result in enumerate(ranks(size, "held", strategy)):
        # torch.chunk gives this rank these rows of each parameter.
        chunks = [[*p.chunk(size), *[p[:0]] * size] for p in parameters]
        share = local(own[rank] for own in chunks)
        assert result["bytes"] == [share, share, share, 2 * share]
        assert result["gathered"] == [gathered] * 4 and result["begun"] == [False, begun] * 2
        # If a rank left the evaluation alone when it has to stop, the others would hang.
        assert result["after"] == [(False, 3, share), (True, 1, share)]


# --- the program ---


def test_a_run_stopped_under_fsdp_continues_under_zero_to_the_same_result(text, tmp_path):
    """Compare run.py, with its evaluations and its sample, with a single process."""
    job = [*TINY, "--data", text, *"--batch-size 10 --optimizer fast-muon --steps 40".split()]
    job += "--log-every 1 --eval-every 15".split()
    alone, out = tmp_path / "alone", tmp_path / "out"
    assert run(*job, "--out", alone).code == 0
    with Program(*job, "--out", out, "--spawn", 2, "--strategy", "fsdp") as program:
        program.read_to("step 18/")
        program.process.send_signal(signal.SIGTERM)
        ran = program.finish()
    assert ran.code == 3 and ran.err == "", ran
    assert 18 <= state(out)["step"] < 40
    ran = run("--out", out, "--log-every", 1, "--spawn", 3, "--strategy", "zero", "--accum", 2)
    assert ran.code == 0 and ran.err == "" and "Done: 40 steps" in ran.out, ran
    assert [step for step, _ in losses(out)] == list(range(1, 41))
    torch.testing.assert_close(dict(losses(out)), dict(losses(alone)), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(state(out)["model"], state(alone)["model"], rtol=1e-4, atol=1e-7)
