"""ddp, zero and fsdp: one arithmetic, one checkpoint, and what each rank holds. `every_job` runs once for each number of
ranks; the tests look at what its ranks brought back."""

import os
import signal
from functools import partial
from itertools import islice, product

import numpy as np
import pytest
import torch
from conftest import TINY, Program, checkpoints, losses, run, same, state
from torch import nn

import chardata
import ckpt
import ddp_setup
import gpt
import loop
from extras import sharded

ONE = ddp_setup.World(0, 0, 1, 1, torch.device("cpu"))
STRATEGIES = ("ddp", "zero", "fsdp")
EACH = pytest.mark.parametrize("strategy", STRATEGIES)
SIZES = pytest.mark.parametrize("size", [2, 3])
TOKENS = [np.random.default_rng(0).integers(0, 17, 200).astype(np.uint8)]  # 24 windows: steps of 5, 5, 5, 5, 4
PLACES = list(product(STRATEGIES, (1, 2, 3)))  # where a checkpoint is written and where it is read


def build(world, strategy, *, arch="modern", optimizer="adamw", **how):
    """(the model as the strategy has it, its optimizers). 3 ranks have unequal parts of its 16 rows."""
    config = gpt.Config(18, 8, layers=2, heads=2, embd=16, arch=arch, **how)
    bare = gpt.build(config, seed=0, checkpoint_activations=arch == "gpt2")
    model = ddp_setup.replicate(bare, world, strategy, parts=[*bare.blocks])
    if optimizer == "adamw":
        return model, [torch.optim.AdamW(bare.parameters(), lr=3e-3, weight_decay=0.1, fused=True)]
    if optimizer == "sgd":
        return model, [torch.optim.SGD(bare.parameters(), lr=0.1, momentum=0.9)]
    kinds = gpt.groups(bare)
    muon = torch.optim.Muon(kinds["matrices"], lr=3e-3, adjust_lr_fn="match_rms_adamw")
    return model, [torch.optim.AdamW(kinds["embeddings"], lr=3e-3), muon]


def learn(world, model, optimizers, start, stop, accum=1, **how):
    """Steps `start` to `stop` of 5 rows each, or 4: no number of ranks has as many for each; -> losses, norms."""
    share = {"rank": world.rank, "world_size": world.size}
    steps = islice(chardata.steps(TOKENS, 8, 5, accum=accum, start=start, **share), stop - start)
    reports = [r for _, r in loop.train_(model, optimizers, steps, gpt.loss, start=start, clip=1.0, **how)]
    return [float(r.loss) for r in reports], [float(r.grad_norm) for r in reports]


def whole(model):
    return ckpt.snapshot(model, [])["model"]


def local(tensors):
    """Bytes of these tensors on this rank."""
    return sum((t.to_local() if hasattr(t, "to_local") else t).nbytes for t in tensors)


# -------------------------------------------------------------------------------- jobs that every rank does


def learning(world, strategy, arch, accum, steps=12):
    """By SGD for gpt2: its keys' biases have no gradient, of which AdamW would enlarge the rounding error."""
    model, optimizers = build(world, strategy, arch=arch, optimizer="sgd" if arch == "gpt2" else "adamw")
    curves = learn(world, model, optimizers, 0, steps, accum)
    return {"curves": curves, "weights": whole(model)}


def muon(world, strategy):
    """What one step of Muon adds to the matrices."""
    model, optimizers = build(world, strategy, arch="gpt2", optimizer="muon")
    before = whole(model)
    learn(world, model, optimizers, 0, 1)
    return {name: value - before[name] for name, value in whole(model).items() if name.endswith("qkv.weight")}


def held(world, strategy):
    """Bytes of parameters, of gradients at the update, and of moments; and how many blocks the last block's forward
    pass saw gathered, and which micro-batches began with gradients that had been shared out."""
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
    for _ in loop.train_(model, [optimizer], [([part] * 2, 16 * world.size)] * 2, loss_fn):
        pass
    moments = local(t for s in optimizer.state.values() for key, t in s.items() if key != "step")
    return {"bytes": [local(model.parameters()), *gradients, moments], "gathered": gathered, "begun": begun}


def evaluation(world, strategy):
    """Of 3 batches, then of 1, so that some rank has fewer than others, or none, and then of none at all."""
    model, _ = build(world, strategy)
    model.train()
    batches = [(torch.full((1, n), n), torch.full((1, n), 1)) for n in (3, 5, 8)]
    return [loop.evaluate(model, part[world.rank :: world.size], gpt.loss) for part in (batches, batches[:1], [])]


def one_nan(world, strategy):
    """Float16 with a scaler, a step of which has a NaN on the last rank alone; -> (skipped, scale, moved) of each step."""
    model, optimizers = build(world, strategy)
    scaler, trail, before = torch.amp.GradScaler("cpu", init_scale=1024.0), [], whole(model)
    part, bad = (torch.zeros(1, 8).long(), torch.ones(1, 8).long()), iter([False, True, False])

    def loss_fn(model, batch):
        loss_sum, count = gpt.loss(model, batch)
        return loss_sum * (float("nan") if next(bad) and world.rank == world.size - 1 else 1.0), count

    how = {"dtype": torch.float16, "scaler": scaler}
    for _, report in loop.train_(model, optimizers, [([part], 8 * world.size)] * 3, loss_fn, **how):
        now = whole(model)
        trail.append((int(report.skipped), scaler.get_scale(), world.rank == 0 and not same(dict(now), dict(before))))
        before = now
    return trail


def resumed(world, strategy):
    """Weights and moments after 6 steps with dropout, unbroken, and after 3, a checkpoint, and 3 more."""
    straight, again = build(world, strategy, dropout=0.3), build(world, strategy, dropout=0.3)
    learn(world, *straight, 0, 3)
    ckpt.restore_(ckpt.snapshot(*straight), *again)
    for model, optimizers in (straight, again):
        learn(world, model, optimizers, 3, 6)
    return ckpt.snapshot(*straight), ckpt.snapshot(*again)


def from_rank_0(world, strategy):
    """A model that every rank has begun with weights of its own."""
    torch.manual_seed(world.rank)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    return whole(ddp_setup.replicate(model, world, strategy, parts=[model[0]]))


def every_job(world):
    found = {}
    for strategy in STRATEGIES:
        for job in (held, evaluation, one_nan, resumed, muon, from_rank_0):
            found[job.__name__, strategy] = job(world, strategy)
        for arch, accum in (("gpt2", 1), ("modern", 3)):
            found["learning", strategy, arch] = learning(world, strategy, arch, accum)
    return found


def write(world, kind, strategy, folder, at, optimizer):
    model, optimizers = build(world, strategy, optimizer=optimizer)
    learn(world, model, optimizers, 0, at)
    out = f"{folder}/{kind} {strategy} {world.size}"
    os.makedirs(out, exist_ok=True)
    if kind == "sharded" and world.size > 1:  # one process writes a file in any case
        name = lambda digest: ckpt.named(at, None, digest, "").name  # noqa: E731
        sharded.save(f"{out}/.saving", name, model, optimizers, sharded.group(60))()
    else:
        written = ckpt.snapshot(model, optimizers)
        if world.rank == 0:
            ckpt.save(out, written, at)


def read(world, kind, strategy, folder, writer, at, end, optimizer):
    """Go on from what `writer` has written, with other micro-batches."""
    model, optimizers = build(world, strategy, optimizer=optimizer)
    out = "{}/{} {} {}".format(folder, kind, *writer)
    (entry,) = ckpt.entries(out)
    if entry.name.endswith(".pt"):
        ckpt.restore_(ckpt.load(out, entry) if world.rank == 0 else {}, model, optimizers)
    elif world.size == 1:
        ckpt.restore_(sharded.load(f"{out}/{entry.name}", ckpt.read), model, optimizers)
    else:
        assert not sharded.damage(f"{out}/{entry.name}", world.rank, world.size)
        sharded.restore_(f"{out}/{entry.name}", model, optimizers, ckpt.read)
    return {"curves": learn(world, model, optimizers, at, end, accum=2), "weights": whole(model)}


def write_all(world, folder, cells, **how):
    for kind, strategy in sorted({(kind, strategy) for kind, (strategy, size), _ in cells if size == world.size}):
        write(world, kind, strategy, folder, **how)


def read_all(world, folder, cells, **how):
    mine = [cell for cell in cells if cell[2][1] == world.size]
    return {
        (kind, writer, reader): read(world, kind, reader[0], folder, writer, **how) for kind, writer, reader in mine
    }


def in_turn(folder: str, job) -> None:
    """job(world) in groups of three and two ranks and in one alone, in the same processes, as they are slow to start."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)  # threads that wait for one another are slow where others use the cores too
    for size in (3, 2):
        if rank < size:
            os.environ.update(WORLD_SIZE=f"{size}", LOCAL_WORLD_SIZE=f"{size}")
            with ddp_setup.process_group("cpu") as world:
                torch.save(job(world), f"{folder}/{rank} of {size}.pt")
    if rank == 0:
        torch.save(job(ONE), f"{folder}/0 of 1.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """size -> [what each of so many ranks brought back]"""
    folder = tmp_path_factory.mktemp("ranks")
    assert ddp_setup.spawn(in_turn, 3, str(folder), every_job) == 0
    return lambda size: [torch.load(folder / f"{rank} of {size}.pt") for rank in range(size)]


# ----------------------------------------------------------------------------------------------- arithmetic


def assert_as_promised(ours, theirs, start=0):
    """Promise 1: the losses from step `start` on, and then the weights, to 1e-4. (The norm itself is less exact.)"""
    np.testing.assert_allclose(ours["curves"][0], theirs["curves"][0][start:], rtol=1e-4)
    np.testing.assert_allclose(ours["curves"][1], theirs["curves"][1][start:], rtol=1e-3)
    for name, value in theirs["weights"].items():
        assert (ours["weights"][name] - value).norm() <= 1e-4 * value.norm(), name


@SIZES
@EACH
@pytest.mark.parametrize("arch", ["gpt2", "modern"])
def test_losses_norms_and_weights_are_those_of_one_process(ranks, size, strategy, arch):
    """Uneven shares, clipping, tied and untied heads; modern in parts, gpt2 with recomputed activations."""
    reference = ranks(1)[0]["learning", "ddp", arch]
    assert max(reference["curves"][1]) > 1  # some steps are clipped
    results = [result["learning", strategy, arch] for result in ranks(size)]
    assert all(result["curves"] == results[0]["curves"] for result in results)
    assert_as_promised(results[0], reference)


@SIZES
@EACH
def test_muon_orthogonalises_whole_matrices(ranks, size, strategy):
    """It does so in bfloat16, which rounds by 4e-3. Of its shards alone it would make something else: off by half."""
    ours = ranks(size)[0]["muon", strategy]
    for name, value in ranks(1)[0]["muon", "ddp"].items():
        assert (ours[name] - value).norm() <= 0.05 * value.norm(), name


@SIZES
@EACH
def test_all_ranks_begin_with_rank_0s_weights(ranks, size, strategy):
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).state_dict()
    assert same(dict(ranks(size)[0]["from_rank_0", strategy]), dict(expected))


@SIZES
@EACH
def test_a_step_that_one_rank_cannot_use_is_skipped_by_all_and_their_scales_stay_one(ranks, size, strategy):
    for rank, result in enumerate(ranks(size)):
        skipped, scales, moved = zip(*result["one_nan", strategy])
        assert skipped == (0, 1, 1) and scales == (1024.0, 512.0, 512.0)
        assert rank or moved == (True, False, True)


@SIZES
@EACH
def test_an_evaluation_is_exact_whichever_ranks_have_batches(ranks, size, strategy):
    expected = ranks(1)[0]["evaluation", "ddp"]
    assert [count for _, count in expected] == [16, 3, 0]
    for result in ranks(size):
        for ours, reference in zip(result["evaluation", strategy], expected, strict=True):
            assert ours == pytest.approx(reference, rel=1e-6)


def test_a_strategy_that_there_is_not_is_an_error():
    with pytest.raises(ValueError, match="'fdsp' is not one of ddp, zero, fsdp"):
        ddp_setup.replicate(nn.Linear(1, 1), ONE, "fdsp")


# --------------------------------------------------------------------------------------------------- memory


@SIZES
@EACH
def test_each_rank_holds_its_rows_of_parameters_gradients_and_moments_and_no_more(ranks, size, strategy):
    parameters = list(build(ONE, "ddp")[0].parameters())
    for rank, result in enumerate(ranks(size)):
        # torch.chunk's share of the rows of each parameter
        rows = [[*p.split(-(-len(p) // size)), p[:0]][min(rank, len(p.split(-(-len(p) // size))))] for p in parameters]
        share = local(parameters if strategy == "ddp" else rows)
        assert result["held", strategy]["bytes"] == [share, share, share, 2 * share]


@SIZES
@pytest.mark.parametrize(("strategy", "gathered", "begun"), [("zero", 2, False), ("fsdp", 1, True)])
def test_within_a_step_zero_has_all_parameters_and_fsdp_those_of_one_block(ranks, size, strategy, gathered, begun):
    """And zero adds its micro-batches' gradients up before it sends them; fsdp never has all of them."""
    for result in ranks(size):
        assert result["held", strategy]["gathered"] == [gathered] * 4
        assert result["held", strategy]["begun"] == [False, begun] * 2


# ---------------------------------------------------------------------------------------------- checkpoints


@SIZES
@pytest.mark.parametrize("strategy", ["zero", "fsdp"])
def test_with_dropout_a_resumed_run_is_bitwise_the_unbroken_one(ranks, size, strategy):
    straight, again = ranks(size)[0]["resumed", strategy]
    assert same(dict(straight["model"]), dict(again["model"]))
    assert same(straight["optimizers"], again["optimizers"])


def continued(folder, cells, at, end, optimizer="adamw"):
    """(kind, writer, reader) -> the curves from step `at` to `end` and the weights then."""
    how = {"folder": str(folder), "cells": cells, "at": at, "optimizer": optimizer}
    for job in (partial(write_all, **how), partial(read_all, **how, end=end)):
        assert ddp_setup.spawn(in_turn, 3, str(folder), job) == 0
    return {cell: found for size in (1, 2, 3) for cell, found in torch.load(folder / f"0 of {size}.pt").items()}


def assert_continued(found, cells, at, end):
    assert found.keys() == set(cells)
    reference = learning(ONE, "ddp", "modern", 1, end)
    for cell in cells:
        assert_as_promised(found[cell], reference, at)


def test_what_one_strategy_and_world_size_writes_another_continues(tmp_path):
    cells = [("whole", ("fsdp", 2), ("ddp", 3)), ("whole", ("zero", 3), ("fsdp", 2)), ("whole", ("ddp", 1), ("fsdp", 3)),
             ("whole", ("ddp", 2), ("zero", 3)), ("whole", ("fsdp", 3), ("zero", 1)), ("sharded", ("fsdp", 3), ("zero", 2)),
             ("sharded", ("zero", 2), ("ddp", 3)), ("sharded", ("ddp", 3), ("fsdp", 1))]  # fmt: skip
    assert_continued(continued(tmp_path, cells, 4, 8), cells, 4, 8)


@pytest.mark.torture
@pytest.mark.parametrize("kind", ["whole", "sharded"])
def test_any_continues_any(request, tmp_path, trials, kind):
    """Three strategies by three world sizes, each with each, 50 steps."""
    cells, found, reference = list(product([kind], PLACES, PLACES)), {}, None
    if request.config.option.markexpr == "torture":  # here, as trials have threads, and a thread cannot spawn
        found, reference = continued(tmp_path, cells, 25, 50), learning(ONE, "ddp", "modern", 1, 50)

    def trial(number):
        assert_as_promised(found[cells[number]], reference, 25)

    trials(f"a {kind} checkpoint of each strategy and world size under each", trial, few=0, many=len(cells))


def test_stopped_under_fsdp_it_goes_on_under_zero_to_the_same_end(text, tmp_path):
    """run.py, with its evaluations and its sample, against one process."""
    job = [*TINY, "--data", text, "--batch-size", 10, "--optimizer", "adamw", "--steps", 40, "--log-every", 1,
           "--eval-every", 15]  # fmt: skip
    alone, out = tmp_path / "alone", tmp_path / "out"
    assert run(*job, "--out", alone).code == 0
    with Program(*job, "--out", out, "--spawn", 2, "--strategy", "fsdp") as program:
        program.read_to("step 18/")
        program.process.send_signal(signal.SIGTERM)
        ran = program.finish()
    assert ran.code == 3 and ran.err == "", ran
    assert 18 <= state(out)["step"] < 40
    ran = run("--out", out, "--log-every", 1, "--spawn", 3, "--strategy", "zero", "--accum", 2)
    assert ran.code == 0 and ran.err == "" and ran.out.count("A sample:\n") == 1, ran
    assert [step for step, _ in losses(out)] == list(range(1, 41))
    torch.testing.assert_close(dict(losses(out)), dict(losses(alone)), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(state(out)["model"], state(alone)["model"], rtol=1e-4, atol=1e-7)
    assert [path.name[:13] for path in checkpoints(out)][-1:] == ["step-00000040"]
