"""Tests of extras/sharded.py and of --checkpoint sharded.

Three ranks write checkpoints of each strategy once, and two ranks restore them. Other tests damage copies of them.
"""

import errno
import hashlib
import io
import json
import math
import os
import random
import resource
import shutil
import signal
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import PYTHON, TINY, Program, losses, metrics, run, same, signalled
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt
import ddp_setup
import gpt
from extras import fsdp, sharded

STRATEGIES = ("ddp", "zero", "fsdp")
ARCHS = ("gpt2", "modern2")  # the head of gpt2 is tied to its embedding
WRITTEN = [*product(STRATEGIES, ARCHS)]
ALONE = sharded.storage(ckpt, write_sharded=False)


def folder_of(path):
    """Return (path of the folder, entry) of the sharded checkpoint in `path`."""
    entries = [e for e in ckpt.list_checkpoints(f"{path}") if not e.name.endswith(".pt")]
    return f"{path}", entries[-1]


def equal(a, b):
    assert a["model"] and a["optimizers"][0]["state"]
    return same(*([dict(s["model"]), s["optimizers"], s["step"]] for s in (a, b)))


# ------------------------------------------------------------------------ jobs that every rank runs


def build(world, strategy, arch):
    """Return (model, optimizers). Three ranks cannot divide the 16 rows evenly."""
    config = gpt.Config(18, 8, layers=1, heads=2, embd=16, arch=arch)
    bare = gpt.build(config, 0 if strategy == "ddp" else None)
    model = ddp_setup.replicate(bare, world) if strategy == "ddp" else bare
    if strategy != "ddp":
        weight = partial(gpt.initial_weight, config, 0)
        fsdp.shard_(bare, world.size, world.device, [*bare.blocks], strategy, weight)
    groups = gpt.parameter_groups(bare)
    muon = torch.optim.Muon(groups.pop("matrices"))
    return model, [torch.optim.AdamW(sum(groups.values(), []), fused=True), muon]


def train_(model, optimizers):
    tokens = torch.arange(16).view(2, 8)
    gpt.loss(model, (tokens, tokens))[0].backward()
    for optimizer in optimizers:
        optimizer.step()


def save(files, folder, model, optimizers):
    files.make_folder(f"{folder}")
    return files.save(f"{folder}", files.snapshot(model, optimizers, step=3), 3)


def message(call, *args):
    """Return the message of the error of call(*args), or ""."""
    try:
        call(*args)
    except (OSError, ValueError) as error:
        return f"{error}"
    return ""


def write(folder):
    """Write a sharded and a whole checkpoint of each strategy, after training has continued."""
    with ddp_setup.process_group("cpu", 60) as world:
        files = sharded.storage(ckpt, write_sharded=True)
        for strategy, arch in WRITTEN:
            model, optimizers = build(world, strategy, arch)
            train_(model, optimizers)
            out = f"{folder}/{strategy} {arch}"
            files.make_folder(out)
            files.check_shared_folder(out)
            state, whole = (s.snapshot(model, optimizers, step=3) for s in (files, ckpt))
            train_(model, optimizers)  # must not change what is saved
            files.save(out, state, 3)
            if world.rank == 0:
                ckpt.save(out, whole, 4)  # with 3, it would replace the sharded checkpoint


def restore(folder):
    """Restore each of these checkpoints under each strategy."""
    with ddp_setup.process_group("cpu", 60) as world:
        files = sharded.storage(ckpt, write_sharded=True)
        for (theirs, arch), strategy in product(WRITTEN, STRATEGIES):
            out = f"{folder}/{theirs} {arch}"
            state = files.load(*folder_of(out)) if world.rank == 0 else {}
            assert world.rank or all(value.is_meta for value in state["model"].values())
            model, optimizers = build(world, strategy, arch)
            train_(model, optimizers)
            train_(model, optimizers)  # another state, which must be replaced
            files.restore_(state, model, optimizers)
            again = ckpt.snapshot(model, optimizers, step=3)
            assert world.rank or equal(again, ckpt.newest(out)[0].state), (theirs, arch, strategy)
        assert files.resume_(out, model, optimizers) == (4, {"step": 3})


def fail(folder):
    """Check what all ranks raise, and that nothing is left."""
    folder = Path(folder)
    with ddp_setup.process_group("cpu", 60) as world:
        files, first = sharded.storage(ckpt, write_sharded=True), world.rank == 0
        model, optimizers = build(world, "fsdp", "gpt2")
        train_(model, optimizers)

        # The disk of rank 1 is full.
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if not first:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        failed = message(save, files, folder / "full", model, optimizers)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        dist.barrier()
        assert failed == ("rank 1: File too large" if first else "")
        assert not os.listdir(folder / "full")
        dist.barrier()
        save(files, folder / "full", model, optimizers)

        # The folder was deleted, and another run has locked a new one. Then the lock is gone, too.
        held = files.lock(f"{folder / 'full'}") if first else None
        dist.barrier()
        if first:
            shutil.move(folder / "full", folder / "moved")
            files.make_folder(folder / "full")
            files.lock(f"{folder / 'full'}").close()
        dist.barrier()
        state = files.snapshot(model, optimizers, step=4)
        failed = message(partial(files.save, f"{folder / 'full'}", state, 4, held=held))
        assert ("someone has deleted or replaced" in failed) == first
        assert os.listdir(folder / "full") == [".lock"]
        dist.barrier()
        if first:
            shutil.rmtree(folder / "full")
        dist.barrier()
        failed = message(partial(files.save, f"{folder / 'full'}", state, 4, held=held))
        assert bool(failed) == first and not (folder / "full").exists()
        assert ("step is -1" in message(files.save, f"{folder}", state, -1)) == first
        dist.barrier()
        if first:
            (folder / "moved").rename(folder / "full")
        dist.barrier()

        # Each rank has a folder of its own.
        own = folder / f"own {world.rank}"
        own.mkdir()
        assert "all ranks share" in message(files.check_shared_folder, f"{own}")
        assert bool(message(save, files, own, model, optimizers)) == first
        assert not (first and os.listdir(own))

        # The checkpoint does not fit.
        dist.barrier()
        state = files.load(*folder_of(folder / "full")) if first else {}
        for theirs, expected in (
            ((model, []), "2 optimizers in the checkpoint, 0 here"),
            (
                (model, [torch.optim.SGD(model.parameters(), momentum=0.9)] * 2),
                "missing in the checkpoint, ",
            ),
            (build(world, "fsdp", "modern2"), " in the checkpoint, "),
        ):
            assert expected in message(files.restore_, state, *theirs), expected

        # Rank 1 cannot read a shard. Then the manifest is gone.
        read = sharded._read_shard

        def broken(*_):
            raise OSError(errno.EIO, "the disk is broken")

        sharded._read_shard = read if first else broken
        with pytest.raises(OSError, match="^rank 1: the disk is broken$") as caught:
            files.restore_(state, *build(world, "fsdp", "gpt2"))
        assert caught.value.errno == errno.EIO  # so that run.py knows that it may pass
        sharded._read_shard = read
        dist.barrier()
        if first:
            os.unlink(f"{state['sharded_path']}/manifest.json")
        dist.barrier()
        assert "rank 0: damaged: there is no" in message(files.restore_, state, model, optimizers)

        # Weights with NaN, and a matrix of which each rank has some columns
        with torch.no_grad():
            model.embedding.weight.mul_(torch.nan)
        failed = message(save, files, folder / "nan", model, optimizers)
        assert failed == ("rank 0: model.embedding.weight contains NaN" if first else "")
        columns = nn.Linear(6, 2, bias=False)
        mesh = init_device_mesh("cpu", (2,))
        part = distribute_tensor(columns.weight.detach(), mesh, [Shard(1)])
        columns.weight = nn.Parameter(part)
        assert "can have only (Shard(0),)" in message(files.snapshot, columns, [])

        # Values that a sharded checkpoint cannot have
        plain, extra = nn.Linear(1, 1), type("", (nn.Linear,), {"get_extra_state": int})(1, 1)
        counting = torch.optim.SGD(plain.parameters())
        counting.state[plain.weight]["step"] = 1
        for theirs, optimizers, more, expected in (
            (plain, [], {"mean": torch.ones(1)}, "cannot represent mean"),
            (plain, [], {"at": {3: 1}}, "cannot represent at"),
            (plain, [counting], {}, "optimizers.0.weight.step is not a"),
            (extra, [], {}, "_extra_state"),
        ):
            assert expected in message(partial(files.snapshot, theirs, optimizers, **more))


def keep_details(folder):
    """Save buffers that differ between ranks, fewer rows than ranks, and a parameter without moments."""
    with ddp_setup.process_group("cpu", 60) as world:
        files = sharded.storage(ckpt, write_sharded=True)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        for buffer in model.buffers():
            buffer.fill_(world.rank + 1)
        replica = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
        save(files, f"{folder}/buffers", torch.compile(replica, backend="eager"), [])
        dist.barrier()
        state = files.load(*folder_of(f"{folder}/buffers")) if world.rank == 0 else {}
        files.restore_(state, replica, [])
        assert all(buffer.unique().tolist() == [1] for buffer in model.buffers())

        bare = nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 1))
        fsdp.shard_(bare, world.size, world.device, [], "fsdp", None)
        optimizers = [torch.optim.AdamW(bare.parameters()), torch.optim.SGD(bare.parameters())]
        for parameter in bare[0].parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizers[0].step()
        before = ckpt.snapshot(bare, optimizers, step=3)
        save(files, f"{folder}/few", bare, optimizers)
        dist.barrier()
        state = files.load(*folder_of(f"{folder}/few")) if world.rank == 0 else {}
        files.restore_(state, bare, optimizers)
        after = ckpt.snapshot(bare, optimizers, step=3)
        assert world.rank or equal(before, after)
        assert world.rank or [*after["optimizers"][0]["state"]] == ["0.weight", "0.bias"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return the folder into which three ranks have written. Tests must not change it."""
    folder = tmp_path_factory.mktemp("written")
    assert ddp_setup.spawn(write, 3, f"{folder}") == 0
    return folder


def test_any_strategy_and_number_of_ranks_restores_what_three_ranks_wrote(written):
    assert ddp_setup.spawn(restore, 2, f"{written}") == 0


@pytest.mark.parametrize("job", [fail, keep_details])
def test_failures_on_one_rank_and_details_of_the_state(tmp_path, job):
    assert ddp_setup.spawn(job, 2, f"{tmp_path}") == 0


@pytest.mark.parametrize("strategy, arch", WRITTEN)
def test_a_sharded_checkpoint_is_bitwise_equal_to_a_checkpoint_file(written, strategy, arch):
    """One process reads it, names are in the same order, and the ranks wrote about equally much."""
    folder, entry = folder_of(written / f"{strategy} {arch}")
    ours, whole = ALONE.load(folder, entry), ckpt.newest(folder)[0].state
    assert equal(ours, whole) and [*ours["model"]] == [*whole["model"]]
    sizes = [os.path.getsize(f"{folder}/{entry.name}/__{rank}_0.distcp") for rank in range(3)]
    assert min(sizes) > 0.5 * sum(sizes) / 3


def test_a_storage_that_writes_no_shards_restores_without_communication():
    """Ranks that do not see the folder take ckpt.py, and those that do must do the same."""
    assert ALONE.restore_ is ckpt.restore_


# ------------------------------------------------------------------------------- forged and damaged


@pytest.fixture
def genuine(written, tmp_path):
    """Return the path of a copy of a checkpoint, which the test may change."""
    folder, entry = folder_of(written / "fsdp gpt2")
    return shutil.copytree(f"{folder}/{entry.name}", tmp_path / entry.name)


def load(path):
    return ALONE.load(*folder_of(path.parent))


@pytest.mark.parametrize("file", ["manifest.json", "__1_0.distcp"])
@pytest.mark.parametrize("how", ["a bit flipped", "cut", "gone", "a pipe"])
def test_a_damaged_checkpoint_does_not_verify(genuine, file, how):
    raw = bytearray((genuine / file).read_bytes())
    raw[len(raw) // 2] ^= how == "a bit flipped"
    (genuine / file).unlink()
    if how == "a pipe":
        os.mkfifo(genuine / file)
    elif how != "gone":
        (genuine / file).write_bytes(raw[:-1] if how == "cut" else raw)
    with pytest.raises(ValueError, match="^damaged: "):
        load(genuine)


@pytest.mark.parametrize("file", ["manifest.json", "__1_0.distcp"])
@pytest.mark.parametrize("place", ["/proc/self/mem", "itself"])
def test_a_checkpoint_that_cannot_be_read_is_an_error_because_it_may_be_good(genuine, file, place):
    (genuine / file).unlink()
    (genuine / file).symlink_to(file if place == "itself" else place)
    with pytest.raises(OSError):
        ALONE.newest(f"{genuine.parent}")


def reseal(path, change):
    """Call change(manifest, path), and make all digests right again."""
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest, path)
    for file in manifest["files"]:
        raw = (path / file).read_bytes()
        manifest["files"][file] = [len(raw), hashlib.sha256(raw).hexdigest()]
    text = json.dumps(manifest)
    (path / "manifest.json").write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    return path.rename(path.parent / f"step-00000003-{digest}")


def shards(manifest):
    """Return the three shards of a tensor: [offsets, shape, file, offset in the file, length]."""
    return manifest["tensors"]["model.embedding.weight"][2]


def put(value):
    """Return a change that replaces the first shard by what torch.save makes of a value."""

    def change(manifest, path):
        file = io.BytesIO()
        torch.save(value, file)
        (path / "__0_0.distcp").open("ab").write(file.getvalue())
        start = (path / "__0_0.distcp").stat().st_size - len(file.getvalue())
        shards(manifest)[0][2:] = ["__0_0.distcp", start, len(file.getvalue())]

    return change


class Code:
    def __reduce__(self):
        return os.system, ("touch was-run",)


FORGED = {
    "a hole": (lambda m, _: shards(m).pop(1), "not the whole tensor"),
    "a shard twice": (
        lambda m, _: shards(m).insert(1, shards(m)[0]) or shards(m).pop(),
        "not the whole tensor",
    ),
    "another order": (lambda m, _: shards(m).reverse(), "not the whole tensor"),
    "no dtype": (
        lambda m, _: m["tensors"]["model.embedding.weight"].__setitem__(0, "x"),
        "not a checkpoint: ",
    ),
    "no keys": (lambda m, _: m.pop("names"), "not a checkpoint: "),
    "a record of another shape": (put(torch.ones(5, 16)), "not as the manifest says"),
    "a record of another dtype": (put(torch.ones(6, 16).half()), "not as the manifest says"),
    "NaN": (put(torch.full((6, 16), torch.nan)), "worthless: model.embedding.weight contains NaN"),
    "no record": (lambda m, _: shards(m)[0].__setitem__(3, 64), "not a checkpoint: "),
    "code": (put(Code()), "not a checkpoint: UnpicklingError"),
}


@pytest.mark.parametrize("kind", FORGED)
def test_a_forged_checkpoint_is_an_error_of_one_line_and_no_code_runs(genuine, kind, monkeypatch):
    monkeypatch.chdir(genuine.parent)
    change, expected = FORGED[kind]
    with pytest.raises(ValueError, match=expected) as caught:
        load(reseal(genuine, change))
    assert "\n" not in f"{caught.value}" and not os.path.exists("was-run")


def test_a_manifest_that_is_sealed_again_is_loaded(genuine):
    before = load(genuine)
    assert equal(load(reseal(genuine, put(before["model"]["embedding.weight"][:6]))), before)


# --------------------------------------------------------------------------------------- the folder


def make_sharded(folder, step=20):
    """Make a folder with the name of a sharded checkpoint, and return its path."""
    path = folder / ckpt.make_entry(step, None, "0123456789abcdef" * 2, ending="").name
    path.mkdir()
    for file in ("manifest.json", "__0_0.distcp"):
        (path / file).write_bytes(b"content")
    return path


def test_a_folder_whose_deletion_breaks_off_is_not_listed_and_goes_with_the_lock(
    tmp_path, monkeypatch
):
    path = make_sharded(tmp_path)
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: os.unlink(path / "manifest.json"))
    sharded.remove(ckpt, f"{tmp_path}", path.name)
    (left,) = os.listdir(tmp_path)
    assert left.startswith(ckpt.TEMPORARY)
    monkeypatch.undo()
    with ALONE.lock(f"{tmp_path}"):
        assert os.listdir(tmp_path) == [".lock"]


def test_a_checkpoint_that_cannot_be_deleted_is_a_warning_and_the_others_are_deleted(
    tmp_path, monkeypatch
):
    first, second, third = (make_sharded(tmp_path, step) for step in (10, 20, 30))
    rename = Path.rename

    def refuse(path, target):
        if path == first:
            raise PermissionError(1, "not yours", f"{path}", None, f"{target}")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.warns(UserWarning, match=f"^{first.name} not deleted: not yours$"):
        ALONE.prune(f"{tmp_path}", 1)
    assert {*tmp_path.iterdir()} == {first, third}


def test_sharded_checkpoints_are_pruned_while_whole_ones_are_saved(tmp_path):
    """What was set aside must stay, and so must an interrupted save of another process."""
    for step in (10, 20, 30):
        make_sharded(tmp_path, step)
    bad = make_sharded(tmp_path, 40).name
    ALONE.set_aside(f"{tmp_path}", bad)
    (tmp_path / f"{ckpt.TEMPORARY}40").mkdir()
    state = {"model": {"w": torch.ones(3)}}
    last = ALONE.save(f"{tmp_path}", state, step=40, loss=None, keep=2)
    left = ckpt.list_checkpoints(f"{tmp_path}")
    assert [entry.step for entry in left] == [30, 40] and left[-1] == last
    assert {f"{bad}.damaged", f"{ckpt.TEMPORARY}40"} <= {*os.listdir(tmp_path)}


# -------------------------------------------------------------------------------------- the program


@pytest.fixture(scope="module")
def job(text):
    often = "--steps 60 --log-every 1 --eval-every 20 --save-every 4 --spawn 2".split()
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
    return ALONE.load(*folder_of(out))


def test_a_run_keeps_the_last_and_the_best_checkpoints_and_all_commands_read_them(
    unbroken, text, tmp_path
):
    rated = [line["val_loss"] for line in metrics(unbroken) if "val_loss" in line]
    kept = ckpt.list_checkpoints(f"{unbroken}")
    assert [entry.step for entry in kept[-3:]] == [52, 56, 60]
    assert min(entry.loss for entry in kept) == pytest.approx(min(rated), abs=1e-4)
    assert run("info", unbroken).out.count("verified") == len(kept)
    assert f"loss {rated[-1]:.4f} nats" in run("eval", "--out", unbroken).out
    assert run("sample", "--out", unbroken, "--max-new-tokens", 5).code == 0
    one = tmp_path / "one"
    for code in (0, 2):  # the second time, it exists already
        assert run("export", unbroken, "--format", "checkpoint", "-o", one).code == code
    assert equal(ckpt.newest(f"{one}")[0].state, end(unbroken))
    new = ["--out", tmp_path / "new", "--data", text, "--steps", 1, "--log-every", 1]
    ran = run("--init-from", unbroken, *new)
    assert ran.code == 0 and losses(tmp_path / "new")[0][1] < 2.5 < math.log(18), ran


def test_a_run_continues_with_other_numbers_of_ranks_and_kinds_of_checkpoint(job, tmp_path):
    """Two ranks write shards, three ranks a file, two ranks shards, and one rank finishes."""
    plain = [*job, "--dropout", 0, "--optimizer", "adamw"]
    alone, out, start = tmp_path / "alone", tmp_path / "out", 0
    one_rank = ["--spawn", 1, "--checkpoint", "whole"]
    assert run(*plain, "--out", alone, *one_rank).code == 0
    three = ["--spawn", 3, "--strategy", "zero", "--checkpoint", "whole"]
    for more in ([], three, ["--strategy", "ddp"]):
        with Program(*plain, "--out", out, *more) as program:
            program.read_to(f"step {start + 10}/")
            program.process.send_signal(signal.SIGTERM)
            ran = program.finish()
        assert ran.code == 3 and ran.err == "", ran
        last = ckpt.list_checkpoints(f"{out}")[-1]
        assert last.name.endswith(".pt") == (more == three)
        start = last.step
    assert run(*plain, "--out", out, *one_rank).code == 0
    torch.testing.assert_close(dict(losses(out)), dict(losses(alone)), rtol=1e-4, atol=1e-7)
    assert [step for step, _ in losses(out)] == [*range(1, 61)]


def test_if_a_shard_is_damaged_all_ranks_use_the_checkpoint_before(job, unbroken, tmp_path):
    out = shutil.copytree(unbroken, tmp_path / "out")
    damaged = ckpt.list_checkpoints(f"{out}")[-1].name
    (out / damaged / "__1_0.distcp").write_bytes(b"")
    ran = run(*job, "--out", out)
    assert ran.code == 0 and ran.err.count("\n") == 1, ran
    assert f"{damaged}: damaged: __1_0.distcp" in ran.err and "from step 56" in ran.err
    assert (out / f"{damaged}.damaged").is_dir()
    assert equal(end(out), end(unbroken)) and losses(out) == losses(unbroken)


@pytest.mark.torture
def test_ranks_that_are_killed_leave_only_complete_checkpoints(trials, job, unbroken, tmp_path):
    """Every second step is saved, so most kills happen during a save."""

    def trial(number):
        out, chance = tmp_path / f"{number}", random.Random(number)
        more = [*job, "--out", out, "--save-every", 2]
        calls = chance.randrange(1, 120_000)  # of 130,000 or more
        where = f"{chance.randrange(2)} 0 save {calls} {signal.SIGKILL:d} group"
        ran = run(*more, **signalled(PYTHON, where, tmp_path / f"place {number}"))
        assert ran.code == -signal.SIGKILL, ran
        for entry in ckpt.list_checkpoints(f"{out}"):
            ALONE.load(f"{out}", entry)
        ran = run(*more)
        assert ran.code == 0 and ran.err == "", ran
        assert equal(end(out), end(unbroken)) and losses(out) == losses(unbroken)
        assert not [*out.glob(".saving-*")]

    trials("SIGKILL of all ranks while they write a sharded checkpoint", trial, 2, 50)
