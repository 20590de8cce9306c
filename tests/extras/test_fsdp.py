"""Tests of extras/fsdp.py: ddp, zero and fsdp give the same results and checkpoints, and each rank
holds its part.

`every_job` runs once for each number of ranks. The tests check what its ranks returned.
"""

import os
import signal
from functools import partial
from itertools import islice, product

import call
import numpy as np
import pytest
import torch
from conftest import TINY, Program, checkpoints, losses, run, same, state
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import chardata
import ckpt
import ddp_setup
import gpt
import loop
from extras import fsdp, reader, sharded

CLIP = 0.65
ONE = ddp_setup.World(0, 0, 1, 1, torch.device("cpu"))
STRATEGIES = ("ddp", "zero", "fsdp")
EACH = pytest.mark.parametrize("strategy", STRATEGIES)
SIZES = pytest.mark.parametrize("size", [2, 3])
TOKENS = (np.random.default_rng(0).integers(0, 17, 200).astype(np.uint8),)
PLAN = chardata.BatchPlan(TOKENS, block_size=8, batch_size=5)  # 24 windows: steps of 5, 5, 5, 5, 4
PLACES = list(product(STRATEGIES, (1, 2, 3)))  # (strategy, number of ranks) that writes or reads


def distribute(bare, world, strategy, parts=(), initial_weight=None):
    if strategy == "ddp":
        return ddp_setup.replicate(bare, world)
    return fsdp.shard_(bare, world.size, world.device, parts, strategy, initial_weight)


def build(world, strategy, *, arch="modern2", optimizer="adamw", **config):
    """Return (distributed model, optimizers). Three ranks cannot divide its 16 rows evenly."""
    config = gpt.Config(18, 8, layers=2, heads=2, embd=16, arch=arch, **config)
    bare = gpt.build(config, 0 if strategy == "ddp" else None)
    bare.checkpoint_activations = arch == "gpt2"
    initial_weight = partial(gpt.initial_weight, config, 0)
    model = distribute(bare, world, strategy, [*bare.blocks], initial_weight)
    if optimizer == "adamw":
        return model, [torch.optim.AdamW(bare.parameters(), lr=3e-3, weight_decay=0.1, fused=True)]
    if optimizer == "sgd":
        return model, [torch.optim.SGD(bare.parameters(), lr=0.1, momentum=0.9)]
    groups = gpt.parameter_groups(bare)
    muon = torch.optim.Muon(groups["matrices"], lr=3e-3, adjust_lr_fn="match_rms_adamw")
    return model, [torch.optim.AdamW(groups["embeddings"], lr=3e-3), muon]


def train(strategy, model, optimizers, steps, loss_fn, **settings):
    """Return what loop.train_ yields if it is called as `strategy` needs it."""
    if strategy == "fsdp":
        steps, loss_fn = fsdp.pad_steps(steps, loss_fn)
    return loop.train_(model, optimizers, steps, loss_fn, sync_each=strategy == "fsdp", **settings)


def evaluate(strategy, model, batches, loss_fn, **settings):
    if strategy != "ddp":
        batches, loss_fn = fsdp.pad_batches(model, batches, loss_fn)
    return loop.evaluate(model, batches, loss_fn, **settings)


def learn(world, strategy, model, optimizers, start, stop, accum=1):
    """Train from step `start` to `stop`. The ranks have unequal numbers of rows. Return losses and
    norms.
    """
    share = {"rank": world.rank, "world_size": world.size}
    steps = islice(chardata.steps(PLAN, accum=accum, start=start, **share), stop - start)
    training = train(strategy, model, optimizers, steps, gpt.loss, start=start, clip=CLIP)
    reports = [report for _, report in training]
    return [float(r.loss) for r in reports], [float(r.grad_norm) for r in reports]


def whole(model):
    return ckpt.snapshot(model, []).get("model", {})  # {} on ranks above 0


def local(tensors):
    """Count the bytes of these tensors on this rank."""
    return sum((t.to_local() if hasattr(t, "to_local") else t).nbytes for t in tensors)


# --- jobs that every rank runs ---


def learning(world, strategy, arch, accum, steps=12):
    """Use SGD for gpt2: the true gradient of its key biases is 0, and AdamW would amplify the
    rounding errors.
    """
    model, optimizers = build(
        world, strategy, arch=arch, optimizer="sgd" if arch == "gpt2" else "adamw"
    )
    curves = learn(world, strategy, model, optimizers, 0, steps, accum)
    return {"curves": curves, "weights": whole(model)}


def muon(world, strategy):
    """Return the change of the matrices in one step of Muon."""
    model, optimizers = build(world, strategy, arch="gpt2", optimizer="muon")
    before = whole(model)
    learn(world, strategy, model, optimizers, 0, 1)
    return {
        name: value - before[name]
        for name, value in whole(model).items()
        if name.endswith("qkv.weight")
    }


def held(world, strategy):
    """Measure what this rank holds.

    bytes: of parameters, of gradients at each update, of moments. gathered: number of blocks whose
        parameters were whole in each forward pass of the last block. begun: whether this rank's
        shards had gradients already when each micro-batch began.
    """
    model, [optimizer] = build(world, strategy)
    kept = optimizer.param_groups[0]["params"]
    gradients, gathered, begun = [], [], []

    def loss_fn(model, batch):
        begun.append(kept[0].grad is not None)
        return gpt.loss(model, batch)

    def look(*_):
        blocks = getattr(model, "module", model).blocks
        gathered.append(sum(not hasattr(block.qkv.weight, "to_local") for block in blocks))

    getattr(model, "module", model).blocks[-1].register_forward_pre_hook(look)
    optimizer.register_step_pre_hook(lambda *_: gradients.append(local(p.grad for p in kept)))
    part = (torch.zeros(1, 8).long(), torch.zeros(1, 8).long())
    steps = [([part] * 2, 16 * world.size)] * 2
    for _ in train(strategy, model, [optimizer], steps, loss_fn):
        pass
    moments = local(t for s in optimizer.state.values() for key, t in s.items() if key != "step")
    return {
        "bytes": [local(model.parameters()), *gradients, moments],
        "gathered": gathered,
        "begun": begun,
    }


def evaluation(world, strategy):
    """Evaluate 3 batches, then 1, so that some ranks have fewer or none, then no batch at all."""
    model, _ = build(world, strategy)
    model.train()
    batches = [(torch.full((1, n), n), torch.full((1, n), 1)) for n in (3, 5, 8)]
    parts = [part[world.rank :: world.size] for part in (batches, batches[:1], [])]
    return [evaluate(strategy, model, part, gpt.loss) for part in parts]


def batch_norm(world, strategy):
    """Evaluate with buffers that differ between ranks. Return the means for the same batches,
    divided over the ranks in two ways.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    replica = distribute(model, world, strategy, [model[0]])
    for buffer in model.buffers():
        buffer.fill_(world.rank + 2)
    batches = [torch.full((3, 4), float(n)) for n in range(4)]

    def loss_fn(model, batch):
        return model(batch).square().sum(), len(batch)

    return [
        evaluate(strategy, replica, ordered[world.rank :: world.size], loss_fn)
        for ordered in (batches, batches[::-1])
    ]


def after_evaluation(world, strategy):
    """Return the bytes of parameters on this rank after an evaluation, and after one that was
    stopped.
    """
    model, _ = build(world, strategy)
    batch, found = (torch.zeros(1, 8).long(), torch.zeros(1, 8).long()), []
    for stop in (lambda: False, lambda: world.rank == 0):
        result = evaluate(strategy, model, [batch] * 2, gpt.loss, stop=stop)
        found.append((result is None, local(model.parameters())))
    return found


def unequal_micro_batches(world, strategy):
    """Rank r has r + 1 micro-batches of one row in each step. Return the losses, counts, and micro-
    batches.
    """
    model, optimizers = build(world, strategy)
    rows = [torch.full((1, 9), i) for i in range(6)]
    first = world.rank * (world.rank + 1) // 2
    mine = rows[first : first + world.rank + 1] if world.size > 1 else rows[:3]
    total = 8 * (6 if world.size == 3 else 3)
    computed = []

    def loss_fn(model, batch):
        computed.append(int(batch[0][0, 0]))
        return gpt.loss(model, batch)

    steps = [([(row[:, :-1], row[:, 1:]) for row in mine], total)] * 3
    reports = [report for _, report in train(strategy, model, optimizers, steps, loss_fn)]
    return [float(r.loss) for r in reports], [int(r.count) for r in reports], computed


def own_group(world, strategy):
    """Evaluate and train as if the default group took only CUDA tensors, which makes new gloo
    groups.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "get_backend_config", lambda group=None: "cuda:nccl")
        made, new_group = [], torch.distributed.new_group
        patch.setattr(torch.distributed, "new_group", lambda **k: made.append(k) or new_group(**k))
        results = evaluation(world, strategy), unequal_micro_batches(world, strategy)
    return results, [group["backend"] for group in made]


def one_nan(world, strategy):
    """Train in float16, with a NaN on the last rank in the second step.

    Return (skipped, scale, whether weights changed) of each step.
    """
    model, optimizers = build(world, strategy)
    scaler, trail, before = torch.amp.GradScaler("cpu", init_scale=1024.0), [], whole(model)
    part, bad = (torch.zeros(1, 8).long(), torch.ones(1, 8).long()), iter([False, True, False])

    def loss_fn(model, batch):
        loss_sum, count = gpt.loss(model, batch)
        return loss_sum * (
            float("nan") if next(bad) and world.rank == world.size - 1 else 1.0
        ), count

    how = {"dtype": torch.float16, "scaler": scaler}
    steps = [([part], 8 * world.size)] * 3
    for _, report in train(strategy, model, optimizers, steps, loss_fn, **how):
        now = whole(model)
        trail.append(
            (
                int(report.skipped),
                scaler.get_scale(),
                world.rank == 0 and not same(dict(now), dict(before)),
            )
        )
        before = now
    return trail


def resumed(world, strategy):
    """Return the state after 6 steps with dropout, uninterrupted, and after 3 steps, a checkpoint
    and 3 more.
    """
    straight, again = build(world, strategy, dropout=0.3), build(world, strategy, dropout=0.3)
    learn(world, strategy, *straight, 0, 3)
    ckpt.restore_(ckpt.snapshot(*straight), *again)
    for model, optimizers in (straight, again):
        learn(world, strategy, model, optimizers, 3, 6)
    return ckpt.snapshot(*straight), ckpt.snapshot(*again)


def from_rank_0(world, strategy):
    """Distribute a model that has other initial weights on each rank."""
    torch.manual_seed(world.rank)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    return whole(distribute(model, world, strategy, [model[0]]))


def partly_meta(world, strategy):
    """Distribute a model of which one part has other weights on each rank, and the other has none."""
    torch.manual_seed(world.rank)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, device="meta"), nn.BatchNorm1d(1))
    model[1].bias.requires_grad_(False)
    model[2].running_mean += world.rank

    def initial_weight(name, shape):
        return torch.full(shape, {"1.weight": 5.0, "1.bias": 6.0}[name])

    model = distribute(model, world, strategy, [model[0]], initial_weight)
    return whole(model), [p.requires_grad for p in model.parameters()]


class LiveBytes(TorchDispatchMode):
    """Watch how many bytes the tensors have that are made within this context."""

    def __init__(self):
        super().__init__()
        self.storages, self.largest = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(out):
            if type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        live = sum(nbytes for storage, nbytes in self.storages.values() if not storage.expired())
        self.largest = max(self.largest, live)
        return out


def start(world):
    """Shard models that have no memory yet.

    Return {(arch, strategy): (all weights, on rank 0; most bytes at a time; bytes of shards; whether
    the head is tied)}.
    """
    found = {}
    for arch, strategy in product(("gpt2", "modern2"), ("zero", "fsdp")):
        config = LARGER._replace(arch=arch)
        model = gpt.build(config, seed=None)
        with LiveBytes() as live:
            initial_weight = partial(gpt.initial_weight, config, 5)
            distribute(model, world, strategy, [*model.blocks], initial_weight)
        tied = model.head.weight is model.embedding.weight
        found[arch, strategy] = whole(model), live.largest, local(model.parameters()), tied
    return found


def compressed(world):
    """Return the gradient that rank 0's optimizer sees, with and without compression, of the
    weights 0.1, 0.2, ...
    """
    gradients = []
    for compress in (False, True):
        bare = nn.Linear(8, 1, bias=False)
        model = ddp_setup.replicate(bare, world)
        if compress:
            fsdp.compress_(model)
        row = torch.linspace(0.1, 1.7, 8) * (world.rank + 1)
        model(row).sum().backward()
        gradients.append(bare.weight.grad[0].clone())
    return gradients


def compress_error(world):
    try:
        fsdp.compress_(nn.Linear(1, 1))
    except ValueError as error:
        return str(error)


JOBS = (held, evaluation, one_nan, resumed, muon, from_rank_0)
JOBS += (after_evaluation, batch_norm, unequal_micro_batches, own_group)
LARGER = gpt.Config(64, 8, layers=6, heads=2, embd=32)


def every_job(world):
    found = {"compressed": compressed(world), "compress_error": compress_error(world)}
    for strategy in STRATEGIES:
        for job in JOBS:
            found[job.__name__, strategy] = job(world, strategy)
        if strategy != "ddp":
            found["partly_meta", strategy] = partly_meta(world, strategy)
        for arch, accum in (("gpt2", 1), ("modern2", 3)):
            found["learning", strategy, arch] = learning(world, strategy, arch, accum)
    return found


def write(world, kind, strategy, folder, at, optimizer):
    model, optimizers = build(world, strategy, optimizer=optimizer)
    learn(world, strategy, model, optimizers, 0, at)
    out = f"{folder}/{kind} {strategy} {world.size}"
    os.makedirs(out, exist_ok=True)
    if kind == "sharded" and world.size > 1:  # a single process always writes a file
        files = sharded.storage(ckpt, reader.read, write_sharded=True)
        files.save(out, files.snapshot(model, optimizers), at)
    else:
        written = ckpt.snapshot(model, optimizers)
        if world.rank == 0:
            ckpt.save(out, written, at)


def read(world, kind, strategy, folder, writer, at, end, optimizer):
    """Continue from the checkpoint of `writer`, with other micro-batches."""
    model, optimizers = build(world, strategy, optimizer=optimizer)
    out = "{}/{} {} {}".format(folder, kind, *writer)
    (entry,) = ckpt.list_checkpoints(out)
    write_sharded = kind == "sharded" and world.size > 1
    files = sharded.storage(ckpt, reader.read, write_sharded) if kind == "sharded" else ckpt
    files.restore_(files.load(out, entry) if world.rank == 0 else {}, model, optimizers)
    curves = learn(world, strategy, model, optimizers, at, end, accum=2)
    return {"curves": curves, "weights": whole(model)}


def write_all(world, folder, cells, **how):
    for kind, strategy in sorted(
        {(kind, strategy) for kind, (strategy, size), _ in cells if size == world.size}
    ):
        write(world, kind, strategy, folder, **how)


def read_all(world, folder, cells, **how):
    mine = [cell for cell in cells if cell[2][1] == world.size]
    return {
        (kind, writer, reader): read(world, kind, reader[0], folder, writer, **how)
        for kind, writer, reader in mine
    }


def in_turn(folder: str, job, sizes=(3, 2)) -> None:
    """Run job(world) with these numbers of ranks, and with 1, in the same processes, which start
    slowly.
    """
    rank = int(os.environ["RANK"])
    torch.set_num_threads(
        1
    )  # Several threads would wait for each other while other ranks use the cores.
    for size in sizes:
        if rank < size:
            os.environ.update(WORLD_SIZE=f"{size}", LOCAL_WORLD_SIZE=f"{size}")
            with ddp_setup.process_group("cpu") as world:
                torch.save(job(world), f"{folder}/{rank} of {size}.pt")
    if rank == 0:
        torch.save(job(ONE), f"{folder}/0 of 1.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return a function: number of ranks -> list of what each rank returned."""
    folder = tmp_path_factory.mktemp("ranks")
    assert call.spawn(in_turn, 3, str(folder), every_job) == 0
    return lambda size: [torch.load(folder / f"{rank} of {size}.pt") for rank in range(size)]


@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    """Return a function: number of ranks -> list of what `start` returned on each."""
    folder = tmp_path_factory.mktemp("starts")
    assert call.spawn(in_turn, 4, str(folder), start, (4, 2)) == 0
    return lambda size: [torch.load(folder / f"{rank} of {size}.pt") for rank in range(size)]


# --- initial weights ---

SHARDED = pytest.mark.parametrize("strategy", ["zero", "fsdp"])
ARCHS = pytest.mark.parametrize("arch", ["gpt2", "modern2"])


@pytest.mark.parametrize("size", [1, 2, 4])
@SHARDED
@ARCHS
def test_weights_that_are_made_in_parts_equal_those_of_gpt_build(starts, size, strategy, arch):
    whole, *_ = starts(size)[0][arch, strategy]
    expected = gpt.build(LARGER._replace(arch=arch), seed=5).state_dict()
    assert same(dict(whole), dict(expected))
    for *_, tied in (rank[arch, strategy] for rank in starts(size)):
        assert tied == (arch == "gpt2")


@pytest.mark.parametrize("size", [2, 4])
@SHARDED
@ARCHS
def test_while_a_model_is_made_a_rank_holds_at_most_its_shards_and_one_part(
    starts, size, strategy, arch
):
    model = gpt.build(LARGER._replace(arch=arch), seed=0)
    every, parts = local(model.parameters()), [local(block.parameters()) for block in model.blocks]
    largest = max(*parts, every - sum(parts))
    for _, most, shards, _ in (rank[arch, strategy] for rank in starts(size)):
        assert shards == every / size
        assert largest < most <= shards + largest + 64  # bytes, for numbers that torch makes


@SIZES
@SHARDED
def test_parameters_and_buffers_that_have_values_are_those_of_rank_0(ranks, size, strategy):
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1), nn.BatchNorm1d(1)).state_dict()
    expected["1.weight"], expected["1.bias"] = torch.full((1, 3), 5.0), torch.tensor([6.0])
    for result in ranks(size):
        assert result["partly_meta", strategy][1] == [True] * 3 + [False] + [True] * 2
    assert same(dict(ranks(size)[0]["partly_meta", strategy][0]), dict(expected))
    weights, _ = ranks(1)[0]["partly_meta", strategy]
    assert same(dict(weights), dict(expected))


# --- arithmetic ---


def assert_as_promised(ours, theirs, start=0):
    """Check promise 1: losses from step `start` on, and weights, agree to 1e-4. The norm is less
    exact.
    """
    np.testing.assert_allclose(ours["curves"][0], theirs["curves"][0][start:], rtol=1e-4)
    np.testing.assert_allclose(ours["curves"][1], theirs["curves"][1][start:], rtol=1e-3)
    for name, value in theirs["weights"].items():
        assert (ours["weights"][name] - value).norm() <= 1e-4 * value.norm(), name


@SIZES
@EACH
@pytest.mark.parametrize("arch", ["gpt2", "modern2"])
def test_losses_norms_and_weights_equal_those_of_one_process(ranks, size, strategy, arch):
    """Cover uneven shares, clipping, tied and untied heads, accumulation, and checkpointed
    activations.
    """
    reference = ranks(1)[0]["learning", "ddp", arch]
    assert max(reference["curves"][1]) > CLIP  # Some steps are clipped.
    results = [result["learning", strategy, arch] for result in ranks(size)]
    assert all(result["curves"] == results[0]["curves"] for result in results)
    assert_as_promised(results[0], reference)


@SIZES
@EACH
def test_muon_orthogonalises_whole_matrices(ranks, size, strategy):
    """Muon computes in bfloat16, which rounds by 4e-3. If it saw only shards, the error would be
    about 0.5.
    """
    ours = ranks(size)[0]["muon", strategy]
    for name, value in ranks(1)[0]["muon", "ddp"].items():
        assert (ours[name] - value).norm() <= 0.05 * value.norm(), name


@SIZES
@EACH
def test_all_ranks_start_with_the_weights_of_rank_0(ranks, size, strategy):
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).state_dict()
    assert same(dict(ranks(size)[0]["from_rank_0", strategy]), dict(expected))


@SIZES
@EACH
def test_a_nan_on_one_rank_skips_the_step_on_all_ranks_and_scales_stay_equal(ranks, size, strategy):
    for rank, result in enumerate(ranks(size)):
        skipped, scales, moved = zip(*result["one_nan", strategy])
        assert skipped == (0, 1, 1) and scales == (1024.0, 512.0, 512.0)
        assert rank or moved == (True, False, True)


@SIZES
@EACH
def test_evaluation_is_exact_if_ranks_have_unequal_numbers_of_batches_or_none(
    ranks, size, strategy
):
    expected = ranks(1)[0]["evaluation", "ddp"]
    assert np.isfinite(expected[:2]).all() and np.isnan(expected[2])
    for result in ranks(size):
        ours = result["evaluation", strategy]
        assert ours == pytest.approx(expected, rel=1e-6, nan_ok=True)


@SIZES
@EACH
def test_an_evaluation_uses_the_buffers_of_rank_0(ranks, size, strategy):
    """BatchNorm's statistics differ between ranks, and a checkpoint has those of rank 0."""
    expected = ranks(1)[0]["batch_norm", "ddp"]
    for result in ranks(size):
        assert result["batch_norm", strategy] == pytest.approx(expected, rel=1e-5)


@SIZES
@EACH
def test_ranks_may_have_unequal_numbers_of_micro_batches(ranks, size, strategy):
    """fsdp computes the same number on each rank: missing ones repeat the first, and nothing is
    counted twice.
    """
    rows = {2: 3, 3: 6}[size]
    reference, _ = build(ONE, "ddp")
    batches = [torch.full((1, 9), i) for i in range(rows)]
    with torch.no_grad():
        losses = [float(gpt.loss(reference, (b[:, :-1], b[:, 1:]))[0]) for b in batches]
    for rank, result in enumerate(ranks(size)):
        first = rank * (rank + 1) // 2
        mine = [*range(first, first + rank + 1)]
        added = [first] * (size - len(mine)) if strategy == "fsdp" else []
        curve, counts, computed = result["unequal_micro_batches", strategy]
        assert counts == [8 * rows] * 3 and computed == [*mine, *added] * 3
        assert curve[0] == pytest.approx(sum(losses) / (8 * rows), rel=1e-5)
        assert curve == pytest.approx(ranks(size)[0]["unequal_micro_batches", "ddp"][0], rel=1e-4)


@SIZES
@pytest.mark.parametrize("strategy", ["zero", "fsdp"])
def test_with_nccl_the_ranks_agree_over_gloo_groups_of_their_own(ranks, size, strategy):
    for result in ranks(size):
        (mean, steps), made = result["own_group", strategy]
        assert mean == pytest.approx(result["evaluation", strategy], rel=1e-6, nan_ok=True)
        assert steps == result["unequal_micro_batches", strategy]
        assert made == ["gloo"] * (3 + (strategy == "fsdp"))


@SIZES
def test_compress_sends_gradients_as_bfloat16(ranks, size):
    exact = torch.linspace(0.1, 1.7, 8) * (size + 1) / 2
    for result in ranks(size):
        plain, compressed = result["compressed"]
        torch.testing.assert_close(plain, exact, rtol=1e-6, atol=0)
        torch.testing.assert_close(compressed, exact, rtol=2**-6, atol=0)
        assert torch.equal(compressed, compressed.bfloat16().float())
        assert not torch.equal(compressed, plain)


def test_compress_needs_a_model_in_ddp(ranks):
    expected = "only DistributedDataParallel can compress gradients, not Linear"
    assert [result["compress_error"] for result in ranks(2)] == [expected] * 2
    assert ranks(1)[0]["compress_error"] is None  # a single rank sends nothing


def test_an_unknown_strategy_is_an_error():
    with pytest.raises(ValueError, match="'fdsp' is not one of zero, fsdp"):
        fsdp.shard_(nn.Linear(1, 1), 1, ONE.device, [], "fdsp")


# --- memory ---


@SIZES
@EACH
def test_each_rank_holds_only_its_rows_of_parameters_gradients_and_moments(ranks, size, strategy):
    parameters = list(build(ONE, "ddp")[0].parameters())
    for rank, result in enumerate(ranks(size)):
        # torch.chunk gives this rank these rows of each parameter.
        rows = [
            [*p.split(-(-len(p) // size)), p[:0]][min(rank, len(p.split(-(-len(p) // size))))]
            for p in parameters
        ]
        share = local(parameters if strategy == "ddp" else rows)
        assert result["held", strategy]["bytes"] == [share, share, share, 2 * share]


@SIZES
@pytest.mark.parametrize(("strategy", "gathered", "begun"), [("zero", 2, False), ("fsdp", 1, True)])
def test_within_a_step_zero_gathers_all_parameters_and_fsdp_those_of_one_block(
    ranks, size, strategy, gathered, begun
):
    """zero accumulates the gradients of its micro-batches before it sends them; fsdp sends them
    each time.
    """
    for result in ranks(size):
        assert result["held", strategy]["gathered"] == [gathered] * 4
        assert result["held", strategy]["begun"] == [False, begun] * 2


@SIZES
@EACH
def test_after_an_evaluation_each_rank_holds_only_its_shards_again(ranks, size, strategy):
    for result in ranks(size):
        share = result["held", strategy]["bytes"][0]
        assert result["after_evaluation", strategy] == [(False, share), (True, share)]


# --- checkpoints ---


@SIZES
@pytest.mark.parametrize("strategy", ["zero", "fsdp"])
def test_resume_with_dropout_gives_bitwise_equal_state(ranks, size, strategy):
    straight, again = ranks(size)[0]["resumed", strategy]
    assert same(dict(straight["model"]), dict(again["model"]))
    assert same(straight["optimizers"], again["optimizers"])


def continued(folder, cells, at, end, optimizer="adamw"):
    """Return {(kind, writer, reader): curves from step `at` to `end`, and final weights}."""
    how = {"folder": str(folder), "cells": cells, "at": at, "optimizer": optimizer}
    for job in (partial(write_all, **how), partial(read_all, **how, end=end)):
        assert call.spawn(in_turn, 3, str(folder), job) == 0
    return {
        cell: found
        for size in (1, 2, 3)
        for cell, found in torch.load(folder / f"0 of {size}.pt").items()
    }


def assert_continued(found, cells, at, end):
    assert found.keys() == set(cells)
    reference = learning(ONE, "ddp", "modern2", 1, end)
    for cell in cells:
        assert_as_promised(found[cell], reference, at)


def test_another_strategy_and_number_of_ranks_continues_from_a_checkpoint(tmp_path):
    cells = [
        ("whole", ("fsdp", 2), ("ddp", 3)),
        ("whole", ("zero", 3), ("fsdp", 2)),
        ("whole", ("ddp", 1), ("fsdp", 3)),
        ("whole", ("ddp", 2), ("zero", 3)),
        ("whole", ("fsdp", 3), ("zero", 1)),
        ("sharded", ("fsdp", 3), ("zero", 2)),
        ("sharded", ("zero", 2), ("ddp", 3)),
        ("sharded", ("ddp", 3), ("fsdp", 1)),
    ]
    assert_continued(continued(tmp_path, cells, 4, 8), cells, 4, 8)


@pytest.mark.torture
@pytest.mark.parametrize("kind", ["whole", "sharded"])
def test_each_strategy_and_number_of_ranks_continues_from_each_other(
    request, tmp_path, trials, kind
):
    """Test all pairs of three strategies and three numbers of ranks, over 50 steps."""
    cells, found, reference = list(product([kind], PLACES, PLACES)), {}, None
    if request.config.option.markexpr == "torture":  # not in a trial, because a thread cannot spawn
        found, reference = (
            continued(tmp_path, cells, 25, 50),
            learning(ONE, "ddp", "modern2", 1, 50),
        )

    def trial(number):
        assert_as_promised(found[cells[number]], reference, 25)

    trials(
        f"a {kind} checkpoint of each strategy and world size under each",
        trial,
        few=0,
        many=len(cells),
    )


def test_a_run_stopped_under_fsdp_continues_under_zero_to_the_same_result(text, tmp_path):
    """Compare run.py, with its evaluations and its sample, with a single process."""
    job = [
        *TINY,
        "--data",
        text,
        "--batch-size",
        10,
        "--optimizer",
        "adamw",
        "--steps",
        40,
        "--log-every",
        1,
        "--eval-every",
        15,
    ]
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
    assert [path.name[:13] for path in checkpoints(out)][-1:] == ["step-00000040"]
