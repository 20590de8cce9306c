"""Tests of extras/sharded.py: what several ranks write in parts, any number of ranks restores."""

import random
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import TINY, Program, losses, metrics, run, same
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ckpt
import ddp_setup
import gpt
from extras import fsdp, sharded

CONFIG = gpt.Config(18, 8, layers=2, heads=2, embd=16, arch="gpt2")
WRITTEN = [("fsdp", 3), ("zero", 3), ("ddp", 3)]


def build(world, strategy):
    """Return (model, optimizers). Three ranks cannot divide its 16 rows evenly."""
    if strategy == "ddp":
        bare = gpt.build(CONFIG, 0)
        model = ddp_setup.replicate(bare, world)
    else:
        weight = partial(gpt.initial_weight, CONFIG, 0)
        bare = gpt.build(CONFIG, None)
        model = fsdp.shard_(bare, world.device, [*bare.blocks], strategy, weight)
    return model, [torch.optim.AdamW(bare.parameters(), lr=0.01, fused=True)]


def update(model, optimizers):
    """Make an update with other gradients in each element, the same on all numbers of ranks."""
    tokens = torch.arange(16).view(2, 8)
    loss_sum, count = gpt.loss(model, (tokens, tokens + 1))
    (loss_sum / count).backward()
    optimizers[0].step()
    optimizers[0].zero_grad()


def write(rank, folder):
    """Save each strategy in parts, and beside it what ckpt.snapshot collects."""
    with ddp_setup.process_group("cpu", 60) as world:
        for strategy, _ in WRITTEN:
            model, optimizers = build(world, strategy)
            update(model, optimizers)
            state = sharded.snapshot(model, optimizers, note="kept")
            assert (strategy == "ddp") == ("part" not in state)
            whole = ckpt.snapshot(model, optimizers, note="kept")
            update(model, optimizers)  # changes nothing in the state
            if state:
                sharded.save(f"{folder}/{strategy}", state, 7, 1.5)
            if rank == 0:
                torch.save(whole, f"{folder}/{strategy}.pt")
        ddp_setup.gather(None, world)


def restore(rank, folder):
    """Restore what three ranks wrote with each strategy here, on two ranks."""
    with ddp_setup.process_group("cpu", 60) as world:
        for strategy, _ in WRITTEN:
            for other, _ in WRITTEN:
                model, optimizers = build(world, other)
                path, state = f"{folder}/{strategy}", {}
                if rank == 0:
                    _, state, rejected = sharded.newest(path, sharded.list_checkpoints(path))
                    assert rejected == {} and state["note"] == "kept"
                sharded.restore_(state, model, optimizers)
                found = ckpt.snapshot(model, optimizers)
                if rank == 0:
                    expected = torch.load(f"{path}.pt", weights_only=True)
                    assert same(found, {name: expected[name] for name in found}), (strategy, other)


def shard_columns(rank, folder):
    """Save and restore a matrix that is divided by columns, and one of fewer rows than ranks."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with ddp_setup.process_group("cpu", 60):
        mesh = init_device_mesh("cpu", (2,))
        values = [torch.arange(15.0).view(3, 5), torch.arange(3.0).view(1, 3), torch.arange(4.0)]
        layouts = [Shard(1), Shard(0), Replicate()]

        def make(factor):
            parts = (distribute_tensor(factor * v, mesh, [p]) for v, p in zip(values, layouts))
            return nn.ParameterList(nn.Parameter(part) for part in parts)

        sharded.save(folder, sharded.snapshot(make(1), []), 1)
        found, state = make(0), {}
        if rank == 0:
            _, state, _ = sharded.newest(folder, sharded.list_checkpoints(folder))
        sharded.restore_(state, found, [])
        assert all(torch.equal(p.full_tensor(), v) for p, v in zip(found, values))


def fail(rank, folder):
    """The last rank cannot write its part."""
    with ddp_setup.process_group("cpu", 60) as world:
        model, optimizers = build(world, "fsdp")
        sharded.save(folder, sharded.snapshot(model, optimizers), 1)
        ddp_setup.gather(None, world)  # rank 0 looks for the part of rank 1 before it has saved
        if rank == 1:
            shutil.rmtree(f"{folder}/part-1")
            Path(folder, "part-1").touch()
        try:
            sharded.save(folder, sharded.snapshot(model, optimizers), 2, keep=1)
        except OSError:
            pass
        else:
            raise AssertionError("no error")
        if rank == 0:
            assert [entry.step for entry in sharded.list_checkpoints(folder)] == [1]
            assert [*Path(folder, "part-0").glob("step-00000001-*")]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return the folder into which three ranks have written. Tests must not change it."""
    folder = tmp_path_factory.mktemp("written")
    ddp_setup.spawn(write, (f"{folder}",), 3)
    return folder


def test_any_strategy_and_number_of_ranks_restores_what_three_ranks_wrote(written):
    ddp_setup.spawn(restore, (f"{written}",), 2)


@pytest.mark.parametrize("job", [shard_columns, fail])
def test_other_layouts_and_a_rank_that_cannot_write(tmp_path, job):
    ddp_setup.spawn(job, (f"{tmp_path}",), 2)


@pytest.mark.parametrize("strategy", ["fsdp", "zero"])
def test_the_ranks_write_about_equally_much_and_one_process_reads_all(written, strategy):
    sizes = [p.stat().st_size for p in (written / strategy).glob("part-*/step-*")]
    assert len(sizes) == 3 and min(sizes) > 0.5 * sum(sizes) / 3
    [entry] = sharded.list_checkpoints(f"{written}/{strategy}")
    weights = sharded.read_model(sharded.load(f"{written}/{strategy}", entry))
    expected = torch.load(written / f"{strategy}.pt", weights_only=True)["model"]
    assert same(weights, dict(expected))


@pytest.mark.parametrize("how", ["a bit flipped", "cut", "gone"])
@pytest.mark.parametrize("place", ["", "part-1"])
def test_a_damaged_checkpoint_or_part_does_not_verify(written, tmp_path, place, how):
    folder = shutil.copytree(written / "fsdp", tmp_path / "copy")
    [file] = (folder / place).glob("step-*")
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= how == "a bit flipped"
    file.unlink()
    if how != "gone":
        file.write_bytes(raw[:-1] if how == "cut" else raw)
    entries = sharded.list_checkpoints(f"{folder}")
    if how == "gone" and not place:
        assert entries == []
    else:
        with pytest.raises(ValueError, match="no checkpoint can be used: .*damaged"):
            sharded.newest(f"{folder}", entries)


def test_parts_are_deleted_with_their_checkpoint_but_not_those_of_a_save_in_progress(tmp_path):
    """Another rank can be ahead of rank 0, which deletes."""
    parts = [tmp_path / "part-0", tmp_path / "part-1"]
    for step in (10, 20, 30):
        for part in parts:
            ckpt.save(f"{part}", {"a": 1}, step)
    for step in (10, 20):
        sharded.save(f"{tmp_path}", {"model": {}}, step, keep=1)
    for part in parts:
        assert [entry.step for entry in ckpt.list_checkpoints(f"{part}")] == [20, 30]


# -------------------------------------------------------------------------------------- the program


@pytest.fixture(scope="module")
def job(text):
    often = "--steps 40 --log-every 1 --eval-every 20 --save-every 4 --spawn 2".split()
    kind = "--strategy fsdp --checkpoint sharded --dropout 0.1".split()
    return [*TINY, "--data", text, *often, *kind]


@pytest.fixture(scope="module")
def unbroken(job, tmp_path_factory):
    """Return the --out folder of a run that nothing disturbed. Tests must not write to it."""
    out = tmp_path_factory.mktemp("unbroken")
    ran = run(*job, "--out", out)
    assert ran.code == 0 and ran.err == "", ran
    return out


def end(out):
    """Return all weights of the newest checkpoint, and the rest of it."""
    entry = sharded.list_checkpoints(f"{out}")[-1]
    state = sharded.load(f"{out}", entry)
    return entry.step, sharded.read_model(state), [name.split("-")[-1] for name in state["parts"]]


def test_a_run_keeps_the_last_and_the_best_checkpoints_and_all_commands_read_them(unbroken):
    rated = [line["val_loss"] for line in metrics(unbroken) if "val_loss" in line]
    kept = sharded.list_checkpoints(f"{unbroken}")
    assert [entry.step for entry in kept[-3:]] == [32, 36, 40]
    assert min(entry.loss for entry in kept) == pytest.approx(min(rated), abs=1e-4)
    for part in unbroken.glob("part-*"):
        assert {e.step for e in ckpt.list_checkpoints(f"{part}")} == {e.step for e in kept}
    assert f"loss {rated[-1]:.4f} nats" in run("eval", "--out", unbroken).out
    assert run("sample", "--out", unbroken, "--max-new-tokens", 5).code == 0


def test_a_run_continues_with_other_numbers_of_ranks_and_kinds_of_checkpoint(job, tmp_path):
    """Two and three ranks write parts, two ranks one file, and one rank finishes."""
    plain = [*job, "--dropout", 0, "--optimizer", "adamw"]
    alone, out = tmp_path / "alone", tmp_path / "out"
    one_rank = ["--spawn", 1, "--checkpoint", "whole"]
    assert run(*plain, "--out", alone, *one_rank).code == 0
    three = ["--spawn", 3, "--strategy", "zero"]
    for step, more in ((4, []), (12, three), (20, ["--strategy", "ddp"])):
        with Program(*plain, "--out", out, *more) as program:
            program.read_to(f"step {step}/")
            program.process.send_signal(signal.SIGTERM)
            ran = program.finish()
        assert ran.code == 3 and ran.err == "", ran
    assert run(*plain, "--out", out, *one_rank).code == 0
    torch.testing.assert_close(dict(losses(out)), dict(losses(alone)), rtol=1e-4, atol=1e-7)


def test_if_a_part_is_damaged_all_ranks_use_the_checkpoint_before(job, unbroken, tmp_path):
    out = shutil.copytree(unbroken, tmp_path / "out")
    damaged = sharded.list_checkpoints(f"{out}")[-1].name
    [part] = (out / "part-1").glob("step-00000040-*")
    part.write_bytes(b"")
    ran = run(*job, "--out", out)
    assert ran.code == 0 and ran.err.count("\n") == 1, ran
    assert f"{damaged}: damaged: part-1/" in ran.err and "using step 36" in ran.err
    assert (out / f"{damaged}.damaged").exists()
    assert same(end(out), end(unbroken)) and dict(losses(out)) == dict(losses(unbroken))


def test_a_checkpoint_without_its_parts_is_refused(unbroken, tmp_path):
    """Otherwise a run would go on from the values that stand for the parts."""
    entry = sharded.list_checkpoints(f"{unbroken}")[-1]
    shutil.copy(unbroken / entry.name, tmp_path)
    before = [*tmp_path.iterdir()]
    for args in ([], ["eval"], ["--init-from", tmp_path, "--data", "README.md"]):
        ran = run(*args, "--out", tmp_path / "new" if "--init-from" in args else tmp_path)
        assert ran.code == 2 and ran.err.count("\n") == 1 and "its parts, in the" in ran.err, ran
    assert [*tmp_path.iterdir()] == before
    state = ckpt.load(f"{tmp_path}", entry)
    assert state["model"]["head.weight"].isnan().all()  # for programs that do not look at "parts"


@pytest.mark.torture
def test_ranks_that_are_killed_leave_only_complete_checkpoints(trials, job, unbroken, tmp_path):
    """Each step is saved, so most kills happen during a save."""

    def trial(number):
        out, chance = tmp_path / f"{number}", random.Random(number)
        more = [*job, "--out", out, "--save-every", 1]
        with Program(*more) as program:
            program.read_lines(chance.randrange(1, 35))
            time.sleep(chance.random() / 20)
            program.kill()
        for entry in sharded.list_checkpoints(f"{out}"):
            sharded.load(f"{out}", entry)
        ran = run(*more)
        assert ran.code == 0 and ran.err == "", ran
        assert same(end(out)[:2], end(unbroken)[:2]) and dict(losses(out)) == dict(losses(unbroken))

    trials("SIGKILL of all ranks while they write a sharded checkpoint", trial, 1, 50)
