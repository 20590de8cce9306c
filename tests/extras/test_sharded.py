"""Tests of extras/sharded.py and of --checkpoint sharded.

`every_job` runs once with three ranks and once with two, and leaves its checkpoints behind. The
tests look at these, and at forged and damaged copies of them.
"""

import errno
import functools
import hashlib
import io
import json
import math
import os
import pickle
import random
import resource
import shutil
import signal
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import call
import pytest
import torch
import torch.distributed as dist
from conftest import PYTHON, TINY, Program, losses, metrics, run, same, signalled
from test_fsdp import ONE, STRATEGIES, build, distribute, in_turn, learn
from test_reader import Calls
from torch import nn

import ckpt
from extras import reader, sharded

KINDS = [
    ("adamw", "modern2"),
    ("muon", "modern2"),
    ("sgd", "gpt2"),
]  # gpt2's head is tied to its embedding


def only(folder):
    """Return the path of the only sharded checkpoint in a folder."""
    (path,) = [entry.path for entry in os.scandir(folder) if not entry.name.endswith(".pt")]
    return path


def load(path, read=reader.read):
    """Load a checkpoint as `storage` does. If `read` is None, leave the tensors to restore_."""
    return sharded.load(ckpt, read, *folder_and_entry(path))


def folder_and_entry(path):
    folder, name = os.path.split(path)
    return folder, ckpt.parse_names([name])[0]


def equal(a, b):
    """Whether two states are bitwise equal, with tuples in settings and lists (JSON) as equal."""
    assert a["model"] and same([*a["model"]], [*a["model"]])
    return (
        same(dict(a["model"]), dict(b["model"]))
        and same(a["optimizers"], b["optimizers"])
        and a["step"] == b["step"]
    )


def save(folder, model, optimizers, files, step=3):
    """Start to save a sharded checkpoint and return the function that waits for it."""
    os.makedirs(folder, exist_ok=True)
    state = files.snapshot(model, optimizers, step=step)
    return ThreadPoolExecutor(1).submit(files.save, folder, state, step, None, 9).result


def error_of_save(*args):
    """Return the message of the error with which a save ends on this rank, or ""."""
    try:
        save(*args)()
    except (OSError, ValueError) as error:
        return f"{error}"
    return ""


# ------------------------------------------------------------------------ jobs that every rank runs


def write(world, folder, files):
    """Write both kinds of checkpoint of each strategy and optimizer while training continues."""
    for strategy in STRATEGIES:
        for optimizer, arch in KINDS:
            model, optimizers = build(world, strategy, optimizer=optimizer, arch=arch)
            learn(world, strategy, model, optimizers, 0, 3)
            out = f"{folder}/{strategy} {world.size} {optimizer}"
            wait = save(out, model, optimizers, files)
            whole = ckpt.snapshot(model, optimizers, step=3)
            learn(world, strategy, model, optimizers, 3, 5)  # must not change what is being saved
            wait()
            if world.rank == 0:
                ckpt.save(out, whole, 4)  # With 3, it would replace the sharded checkpoint.


def read(world, folder, files, writer):
    """Return for each strategy that wrote, and each that reads, whether the state is equal."""
    found = {}
    for theirs in STRATEGIES:
        for strategy in STRATEGIES:
            for optimizer, arch in KINDS:
                path = only(f"{folder}/{theirs} {writer} {optimizer}")
                state = files.load(*folder_and_entry(path)) if world.rank == 0 else {}
                assert world.rank or all(value.is_meta for value in state["model"].values())
                model, optimizers = build(world, strategy, optimizer=optimizer, arch=arch)
                learn(
                    world, strategy, model, optimizers, 7, 8
                )  # another state, which must be replaced
                files.restore_(state, model, optimizers)
                again = ckpt.snapshot(model, optimizers, step=3)
                found[theirs, strategy, optimizer] = world.rank != 0 or equal(
                    again, file_state(path)
                )
    return found


def file_state(path):
    """Return the state in the checkpoint file that is beside a sharded checkpoint."""
    folder = os.path.dirname(path)
    (entry,) = [entry for entry in ckpt.list_checkpoints(folder) if entry.name.endswith(".pt")]
    return ckpt.load(folder, entry)


def few_rows(world, folder, files):
    """Save a parameter of 2 rows (a third rank has none), and some without a gradient."""
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model = distribute(bare, world, "fsdp")
    optimizers = [torch.optim.AdamW(bare.parameters()), torch.optim.SGD(bare.parameters())]
    for parameter in bare[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers[0].step()
    save(f"{folder}/few {world.size}", model, optimizers, files)()
    before = ckpt.snapshot(model, optimizers, step=3)
    path = only(f"{folder}/few {world.size}")
    files.restore_(load(path, None), model, optimizers)
    after = ckpt.snapshot(model, optimizers, step=3)
    if world.rank:
        return True
    kept = [*after["optimizers"][0]["state"]]
    saved = load(path)
    return (
        equal(before, after)
        and equal(saved, after)
        and kept == ["0.weight", "0.bias"]
        and not after["optimizers"][1]
    )


def full(world, folder, files):
    """Fill the disk of the last rank; return (message, files after it, files after a next save)."""
    model, optimizers = build(world, "fsdp")
    out = f"{folder}/full {world.size}"
    limits, last = resource.getrlimit(resource.RLIMIT_FSIZE), world.rank == world.size - 1
    if last:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    message = error_of_save(out, model, optimizers, files)
    if last:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()
    between = os.listdir(out)
    dist.barrier()
    save(out, model, optimizers, files, 4)()
    dist.barrier()
    return message, between, len(os.listdir(out))


def nan(world, folder, files):
    """Save a model with NaN. Return the message."""
    model, optimizers = build(world, "fsdp")
    with torch.no_grad():
        model.embedding.weight.mul_(torch.nan)
    return error_of_save(f"{folder}/nan {world.size}", model, optimizers, files)


def columns(world, folder, files):
    """Save a tensor of which each rank has some columns. Return the message."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    model = nn.Linear(6, 2, bias=False)
    mesh = init_device_mesh("cpu", (world.size,))
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(1)]))
    return error_of_save(f"{folder}/columns {world.size}", model, [], files)


def apart(world, folder, files):
    """Give each rank its own folder. Return both error messages, and what is left."""
    own, model = f"{folder}/apart {world.size}/{world.rank}", build(world, "fsdp")
    os.makedirs(own)
    refused = ""
    try:
        files.check_shared_folder(own)
    except ValueError as error:
        refused = f"{error}"
    return refused, error_of_save(own, *model, files), os.listdir(own)


def wrong(world, folder, files):
    """Return the messages for a checkpoint of another model, or of another number of optimizers."""
    path, messages = only(f"{folder}/fsdp {world.size} adamw"), []
    model, optimizers = build(world, "fsdp")
    for theirs in (
        (model, []),
        (model, [torch.optim.SGD(model.parameters(), momentum=0.9)]),
        build(world, "fsdp", arch="gpt2"),
    ):
        with pytest.raises(ValueError) as caught:
            files.restore_(load(path, None), *theirs)
        messages.append(f"{caught.value}")
    return messages


def unreadable(world, folder, files):
    """Return the messages if one rank cannot read a shard, and if the manifest is gone."""
    path, messages = only(f"{folder}/fsdp {world.size} adamw"), []

    def read(record):
        if world.rank == world.size - 1:
            raise OSError("the disk of this rank is broken")
        return reader.read(record)

    copy = f"{folder}/unreadable {world.size}/{os.path.basename(path)}"
    if world.rank == 0:
        shutil.copytree(path, copy)
    state = load(copy, None) if world.rank == 0 else {}
    for name in ("shard", "manifest"):
        with pytest.raises((OSError, ValueError)) as caught:
            sharded.restore_(ckpt, read, state, *build(world, "fsdp"))
        messages.append(f"{caught.value}")
        dist.barrier()
        if world.rank == 0 and name == "shard":
            os.unlink(f"{copy}/manifest.json")
        dist.barrier()
    return messages


def buffers(world, folder, files):
    """Save buffers that differ between ranks; return those of the checkpoint, and of this rank
    after the restore.

    torch.compile wraps DDP here: neither may change the names.
    """
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    names = [*model.state_dict()]
    for buffer in model.buffers():
        buffer.fill_(world.rank + 1)
    replica = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    out = f"{folder}/buffers {world.size}"
    save(out, torch.compile(replica, backend="eager"), [], files)()
    dist.barrier()
    saved = load(only(out))["model"]
    assert [*saved] == names
    files.restore_(load(only(out), None), replica, [])
    return [
        [b.flatten()[0].item() for b in (saved[n], dict(model.named_buffers())[n])]
        for n in dict(model.named_buffers())
    ]


def refused(world, folder, files):
    """Return the messages for values that a sharded checkpoint cannot have."""

    class Extra(nn.Linear):
        def get_extra_state(self):
            return torch.ones(1)

    class PlainNumbers(torch.optim.Optimizer):
        def step(self):
            self.state[self.param_groups[0]["params"][0]]["step"] = 1

    plain, counting = nn.Linear(1, 1), nn.Linear(1, 1)
    number = PlainNumbers(counting.parameters(), {})
    number.step()
    other = PlainNumbers([nn.Parameter(torch.ones(1))], {})
    messages = []
    for model, optimizers, more in (
        (Extra(1, 1), [], {}),
        (plain, [], {"scheduler": {"milestones": {3: 1}}}),
        (plain, [], {"mean": torch.ones(1)}),
        (counting, [number], {}),
        (plain, [other], {}),
    ):
        with pytest.raises(ValueError) as caught:
            files.snapshot(model, optimizers, **more)
        messages.append(f"{caught.value}")
    with pytest.raises(ValueError) as missing:
        files.check_shared_folder(f"{folder}/missing")
    return [*messages, f"{missing.value}"]


def every_job(folder, world):
    if world.size == 1:
        return None
    files = sharded.storage(ckpt, reader.read, write_sharded=True)
    files.check_shared_folder(folder)
    write(world, folder, files)
    found = {"read": read(world, folder, files, 3)}
    for job in (few_rows, full, nan, columns, apart, wrong, unreadable, buffers, refused):
        found[job.__name__] = job(world, folder, files)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return (a function: number of ranks -> what each returned, the folder of checkpoints)."""
    folder = tmp_path_factory.mktemp("ranks")
    assert call.spawn(in_turn, 3, str(folder), functools.partial(every_job, str(folder))) == 0
    return lambda size: [
        torch.load(folder / f"{rank} of {size}.pt") for rank in range(size)
    ], folder


SIZES = pytest.mark.parametrize("size", [2, 3])
WRITERS = pytest.mark.parametrize(
    "writer", [f"{s} {n} {o}" for s in STRATEGIES for n in (2, 3) for o, _ in KINDS]
)


@SIZES
def test_buffers_that_differ_between_ranks_are_those_of_rank_0(ranks, size):
    for result in ranks[0](size):
        assert result["buffers"] == [[1.0, 1.0]] * 6


@SIZES
def test_values_that_json_would_change_and_a_missing_folder_are_errors_on_all_ranks(ranks, size):
    for result in ranks[0](size):
        extra, scheduler, mean, number, other, missing = result["refused"]
        assert "optimizers.0.weight.step is not a parameter" in number
        assert "an optimizer has a parameter that is not one of the model" in other
        assert "model._extra_state is not a parameter" in extra and "scheduler" in scheduler
        assert "mean" in mean and "needs a folder" in missing


def test_a_storage_that_writes_no_shards_restores_without_communication():
    """Ranks that do not see the folder take ckpt.py, and those that do must do the same."""
    assert sharded.storage(ckpt, reader.read, write_sharded=False).restore_ is ckpt.restore_


@WRITERS
def test_a_sharded_checkpoint_is_bitwise_equal_to_a_checkpoint_file_of_the_same_step(ranks, writer):
    """Names, their order, moments and settings are equal. The ranks wrote about equal amounts."""
    path = only(ranks[1] / writer)
    ours, whole = load(path), file_state(path)
    assert equal(ours, whole) and [*ours["model"]] == [*whole["model"]]
    size = int(writer.split()[1])
    written = [os.path.getsize(f"{path}/__{rank}_0.distcp") for rank in range(size)]
    assert min(written) > 0.5 * sum(written) / size
    alone = build(ONE, "ddp", optimizer=writer.split()[2], arch=dict(KINDS)[writer.split()[2]])
    ckpt.restore_(ours, *alone)
    assert same(dict(ckpt.snapshot(*alone)["model"]), dict(whole["model"]))


@WRITERS
def test_the_outline_has_the_names_shapes_and_dtypes_of_the_state(ranks, writer):
    path = only(ranks[1] / writer)
    outline, state = load(path, None), load(path)
    shapes = [
        {name: (t.shape, t.dtype) for name, t in s["model"].items()} for s in (outline, state)
    ]
    assert shapes[0] == shapes[1] and shapes[0] and outline["step"] == 3
    assert all(value.is_meta for value in outline["model"].values())


@SIZES
def test_any_strategy_and_number_of_ranks_restores_what_three_ranks_wrote(ranks, size):
    for result in ranks[0](size):
        assert len(result["read"]) == 27 and all(result["read"].values())


@SIZES
def test_a_rank_without_rows_and_a_parameter_without_moments_are_restored(ranks, size):
    assert all(result["few_rows"] for result in ranks[0](size))


@SIZES
def test_if_the_disk_of_one_rank_is_full_rank_0_reports_it_and_nothing_is_left(ranks, size):
    messages, between, after = zip(*(result["full"] for result in ranks[0](size)))
    assert messages == (f"rank {size - 1}: File too large", *[""] * (size - 1))
    assert not any(between) and set(after) == {1}


@SIZES
def test_weights_with_nan_are_not_written(ranks, size):
    messages = [result["nan"] for result in ranks[0](size)]
    assert messages == ["rank 0: model.embedding.weight contains NaN", *[""] * (size - 1)]
    assert not os.listdir(ranks[1] / f"nan {size}")


@SIZES
def test_a_tensor_that_is_sharded_by_columns_is_refused(ranks, size):
    messages = [result["columns"] for result in ranks[0](size)]
    expected = "rank 0: model.weight is not sharded along its first dimension alone"
    assert messages == [expected, *[""] * (size - 1)]
    assert not os.listdir(ranks[1] / f"columns {size}")


@SIZES
def test_ranks_that_do_not_share_the_folder_are_refused_and_nothing_is_left(ranks, size):
    refused, messages, left = zip(*(result["apart"] for result in ranks[0](size)))
    expected = (
        "a sharded checkpoint needs a folder that all ranks share, and that rank 0 can write to"
    )
    assert set(refused) == {expected}
    assert "all ranks must share the folder" in messages[0] and not any(messages[1:])
    assert not any(left)


@SIZES
def test_a_checkpoint_that_does_not_fit_is_an_error_on_all_ranks(ranks, size):
    for result in ranks[0](size):
        count, moments, model = result["wrong"]
        assert count == "1 optimizers in the checkpoint, 0 here"
        assert moments.startswith(
            "optimizers.0.look_back.momentum_buffer is missing in the checkpoint, (16, 3)"
        )
        assert model.startswith("model.positions.weight is missing in the checkpoint, (8, 16)")


@SIZES
def test_a_checkpoint_that_one_rank_cannot_read_is_an_error_on_all_ranks(ranks, size):
    for result in ranks[0](size):
        shard, manifest = result["unreadable"]
        assert shard == f"rank {size - 1}: the disk of this rank is broken"
        assert manifest.startswith("rank 0: damaged: there is no file")


# ------------------------------------------------------------------------------- forged and damaged


@pytest.fixture
def genuine(ranks, tmp_path):
    """Return the path of a copy of a checkpoint, which the test may change."""
    path = only(ranks[1] / "fsdp 3 adamw")
    return shutil.copytree(path, tmp_path / os.path.basename(path))


def seal(path, manifest):
    """Write the manifest (text), rename the folder to match its digest, return the new path."""
    (path / "manifest.json").write_text(manifest)
    digest = hashlib.sha256(manifest.encode()).hexdigest()[:32]
    return str(path.rename(path.parent / f"step-00000003-{digest}"))


def reseal(path, change=lambda manifest: None):
    """Update the digests in the manifest, call change(manifest), seal; return the new path."""
    manifest = json.loads((path / "manifest.json").read_text())
    for file in manifest["files"]:
        raw = (path / file).read_bytes()
        manifest["files"][file] = [len(raw), hashlib.sha256(raw).hexdigest()]
    before = json.dumps(manifest)
    replaced = change(manifest)
    after = json.dumps(manifest if replaced is None else replaced)
    assert after != before or change.__name__ != "forge"
    return seal(path, after)


def tensor(manifest):
    """Return the entry of a tensor of shape (18, 16) in three shards: [dtype, shape, shards]."""
    return manifest["tensors"]["model.embedding.weight"]


def shards(manifest):
    """Return its shards: [offsets, shape, file, offset in the file, length] of each."""
    return tensor(manifest)[2]


def far_larger_shard(manifest):
    """Let the first shard claim 10^12 rows, and move the others, so that they cover the tensor."""
    added = 10**12 - shards(manifest)[0][1][0]
    tensor(manifest)[1][0] += added
    shards(manifest)[0][1][0] += added
    for shard in shards(manifest)[1:]:
        shard[0][0] += added


def one_row_more(manifest):
    """Let the last shard, which has fewer bytes than its record, claim one row more."""
    tensor(manifest)[1][0] += 1
    shards(manifest)[-1][1][0] += 1


def shard_twice(manifest):
    shards(manifest)[1:] = [shards(manifest)[0]] * (len(shards(manifest)) - 1)


def hole(manifest):
    del shards(manifest)[1]


FORGED = {
    "a tensor far larger than its file": lambda m: tensor(m)[1].__setitem__(0, 10**12),
    "a shard far larger than its record": far_larger_shard,
    "a shard outside its tensor": lambda m: shards(m)[0][0].__setitem__(0, 15),
    "an offset for each dimension but one": lambda m: shards(m)[0][0].pop() or None,
    "a shape of another number of dimensions": lambda m: shards(m)[0][1].append(1),
    "a negative offset": lambda m: shards(m)[0][0].__setitem__(0, -1),
    "a hole": hole,
    "a hole at the end": lambda m: shards(m).pop() and None,
    "shards in another order": lambda m: shards(m).reverse(),
    "a record outside its file": lambda m: shards(m)[0].__setitem__(3, 10**9),
    "a record longer than its file": lambda m: shards(m)[0].__setitem__(4, 10**12),
    "a record at an offset beyond 64 bits": lambda m: shards(m)[0].__setitem__(3, 10**30),
    "a record at half a byte": lambda m: shards(m)[0].__setitem__(3, 0.5),
    "a shape beyond 64 bits": lambda m: tensor(m)[1].__setitem__(1, 10**30),
    "a tensor without shards": lambda m: m["tensors"].__setitem__(
        "model.x", ["torch.float32", [0, 5], []]
    ),
    "no record": lambda m: shards(m)[0].__setitem__(3, 64),
    "a record before its file": lambda m: shards(m)[0].__setitem__(3, -64),
    "a record of another tensor": lambda m: shards(m)[0].__setitem__(
        slice(2, 5), m["tensors"]["model.blocks.0.qkv.weight"][2][0][2:]
    ),
    "a file elsewhere": lambda m: m["files"].__setitem__("../x.distcp", [1, ""]),
    "a file that is not listed": lambda m: shards(m)[0].__setitem__(2, "/etc/passwd"),
    "no dtype": lambda m: tensor(m).__setitem__(0, "torch.load"),
    "another dtype": lambda m: tensor(m).__setitem__(0, "torch.int32"),
    "a shard with more rows than its record": one_row_more,
    "a shape without numbers": lambda m: tensor(m).__setitem__(1, ["18", True]),
    "a name without a tensor": lambda m: m["names"].__setitem__("x", "y"),
    "moments of an optimizer that does not exist": lambda m: m.__setitem__("optimizers", []),
    "a shard twice, and a hole": shard_twice,
    "a negative shape": lambda m: m["tensors"].__setitem__(
        "model.x", ["torch.float32", [0, -5], []]
    ),
    "a size that is not a pair": lambda m: m["files"].__setitem__("__0_0.distcp", 5),
    "no object": lambda m: [1],
    "no keys": lambda m: {"files": {}},
}


def forge(kind):
    """Return the function that makes the forgery; `reseal` checks that it changes something."""

    def forge(manifest):
        return FORGED[kind](manifest)

    return forge


@pytest.mark.parametrize("kind", FORGED)
def test_a_forged_manifest_is_an_error(genuine, kind):
    path = reseal(genuine, forge(kind))
    with pytest.raises(ValueError, match="^not a (manifest|checkpoint): "):
        load(path)


@pytest.mark.parametrize("kind", ["a shard far larger than its record", "a hole"])
def test_a_forgery_is_found_by_the_check_that_is_meant_for_it(genuine, kind):
    """The digests of a forgery are right, so only a look at the shards can find it."""
    path = reseal(genuine, forge(kind))
    listed = json.loads(open(f"{path}/manifest.json").read())["files"]
    there = {
        file: [os.path.getsize(f"{path}/{file}"), ckpt.sha256(f"{path}/{file}")] for file in listed
    }
    assert len(listed) == 3 and listed == there
    expected = "not sharded along its first" if kind == "a hole" else "smaller than the tensor"
    with pytest.raises(ValueError, match=expected):
        load(path)


def test_a_genuine_manifest_that_is_sealed_again_is_loaded(genuine):
    before = load(genuine)
    assert equal(load(reseal(genuine)), before)


@pytest.mark.parametrize("file", ["manifest.json", "__0_0.distcp"])
def test_a_pipe_in_place_of_a_file_is_an_error(genuine, file):
    (genuine / file).unlink()
    os.mkfifo(genuine / file)
    with pytest.raises(ValueError, match="^damaged: "):
        load(genuine)


def test_a_manifest_that_is_nested_too_deeply_is_an_error(genuine):
    path = seal(genuine, "[" * 100_000)
    for read in (reader.read, None):
        with pytest.raises(ValueError, match="^not a manifest: "):
            load(path, read)


CODE = {
    "system": lambda p: Calls(os.system, f"touch {p}/ran"),
    "eval": lambda p: Calls(eval, f"open({str(p / 'ran')!r}, 'w')"),
    "a bomb": lambda p: Calls(bytearray, 10**12),
}


@pytest.mark.parametrize("what", CODE)
def test_an_older_checkpoint_is_loaded_and_its_pickle_of_dcp_is_never_read(genuine, what, tmp_path):
    before = load(genuine)
    (genuine / ".metadata").write_bytes(pickle.dumps(CODE[what](tmp_path)))
    path = reseal(genuine, lambda manifest: manifest["files"].update({".metadata": ["", ""]}))
    path = reseal(Path(path))
    assert equal(load(path), before) and load(path, None)["step"] == 3
    os.unlink(f"{path}/.metadata")  # as after `cp folder/*`
    assert equal(load(path), before)
    model, optimizers = build(ONE, "ddp")
    sharded.restore_(ckpt, reader.read, load(path, None), model, optimizers)
    assert equal(ckpt.snapshot(model, optimizers, step=3), before)
    assert not (tmp_path / "ran").exists()


def put_record(folder, record):
    """Return a change of the manifest that replaces the record of the first shard."""

    def change(manifest):
        _, _, file, start, length = shards(manifest)[0]
        assert len(record) <= length
        raw = bytearray((folder / file).read_bytes())
        raw[start : start + len(record)] = record
        (folder / file).write_bytes(raw)
        shards(manifest)[0][4] = len(record)
        manifest["files"][file][1] = hashlib.sha256(raw).hexdigest()

    return change


def torch_saved(value):
    record = io.BytesIO()
    torch.save(value, record)
    return record.getvalue()


@pytest.mark.parametrize("what", CODE)
def test_code_in_a_record_is_not_run(genuine, what, tmp_path):
    record = torch_saved(CODE[what](tmp_path))
    path = reseal(genuine, put_record(genuine, record))
    with pytest.raises(ValueError, match="^not a checkpoint: "):
        load(path)
    with pytest.raises(ValueError, match="^rank 0: not a checkpoint: .+$"):
        sharded.restore_(ckpt, reader.read, load(path, None), *build(ONE, "ddp"))
    assert not (tmp_path / "ran").exists()


def test_forged_weights_with_nan_are_refused(genuine):
    manifest = json.loads((genuine / "manifest.json").read_text())
    _, _, file, start, length = shards(manifest)[0]
    value = torch.load(io.BytesIO((genuine / file).read_bytes()[start : start + length]))
    value[0, 0] = torch.nan
    record = torch_saved(value)
    assert len(record) == length
    with pytest.raises(ValueError, match="^worthless: model.embedding.weight contains NaN"):
        load(reseal(genuine, put_record(genuine, record)))


@pytest.mark.parametrize("file", ["manifest.json", "__0_0.distcp", "__2_0.distcp"])
@pytest.mark.parametrize("how", ["a bit flipped", "cut", "gone"])
def test_a_damaged_checkpoint_does_not_verify(genuine, file, how):
    raw = bytearray((genuine / file).read_bytes())
    raw[len(raw) // 2] ^= 1
    {
        "a bit flipped": lambda: (genuine / file).write_bytes(raw),
        "cut": lambda: (genuine / file).write_bytes(raw[:-1]),
        "gone": (genuine / file).unlink,
    }[how]()
    with pytest.raises(ValueError, match="^damaged: "):
        load(genuine)


# --------------------------------------------------------------------------------------- the folder


@pytest.fixture
def files():
    """Return the functions for a folder with sharded checkpoints, to which whole ones are saved."""
    return sharded.storage(ckpt, reader.read, write_sharded=False)


def make_sharded(folder, step=20):
    """Make a folder with the name of a sharded checkpoint, and return its path."""
    path = folder / ckpt.make_entry(step, None, "0123456789abcdef" * 2, ending="").name
    path.mkdir()
    for file in ("manifest.json", "__0_0.distcp"):
        (path / file).write_bytes(b"content")
    return path


def test_a_checkpoint_can_be_set_aside_again(files, tmp_path):
    for content in (b"first", b"second"):
        path = make_sharded(tmp_path)
        (path / "manifest.json").write_bytes(content)
        files.set_aside(f"{tmp_path}", path.name)
        [only] = tmp_path.iterdir()
        assert only.name == f"{path.name}.damaged"
        assert (only / "manifest.json").read_bytes() == content
    with pytest.raises(FileNotFoundError):  # and the one that was set aside stays
        files.set_aside(f"{tmp_path}", path.name)
    assert [*tmp_path.iterdir()] == [only]


def test_a_folder_is_renamed_durably_before_its_content_is_deleted(tmp_path, monkeypatch):
    path, calls = make_sharded(tmp_path), []

    def record(module, function):
        def wrapper(*args, **kwargs):
            calls.append(function)
            if function == "rmtree":
                assert not path.exists() and not ckpt.list_checkpoints(f"{tmp_path}")
            return original(*args, **kwargs)

        original = getattr(module, function)
        monkeypatch.setattr(module, function, wrapper)

    for module, function in ((os, "rename"), (os, "fsync"), (shutil, "rmtree")):
        record(module, function)
    sharded.remove(ckpt, f"{tmp_path}", path.name)
    assert calls == ["rename", "fsync", "rmtree"] and not os.listdir(tmp_path)
    sharded.remove(ckpt, f"{tmp_path}", path.name)  # a missing one is no error


@pytest.mark.parametrize("locks", [True, False])
def test_a_folder_whose_deletion_breaks_off_is_not_listed_and_goes_with_the_lock(
    files, tmp_path, monkeypatch, locks
):
    path = make_sharded(tmp_path)
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: os.unlink(path / "manifest.json"))
    sharded.remove(ckpt, f"{tmp_path}", path.name)
    (left,) = os.listdir(tmp_path)
    assert ckpt.list_checkpoints(f"{tmp_path}") == [] and left.startswith(ckpt.TEMPORARY)
    monkeypatch.undo()
    if not locks:  # another process may be writing it
        monkeypatch.setattr(ckpt, "fcntl", None)
        assert files.lock(f"{tmp_path}") is None and os.listdir(tmp_path) == [left]
        return
    with files.lock(f"{tmp_path}"):
        assert os.listdir(tmp_path) == [".lock"]
        with pytest.raises(ValueError, match="in use"):
            files.lock(f"{tmp_path}", timeout=0.0)


def test_a_checkpoint_that_cannot_be_deleted_is_a_warning_and_the_others_are_deleted(
    files, tmp_path, monkeypatch
):
    first, second, third = (make_sharded(tmp_path, step) for step in (10, 20, 30))
    rename = Path.rename

    def refuse(path, target):
        if path == first:
            raise PermissionError(errno.EPERM, "not yours", f"{path}", None, f"{uuid.uuid4()}")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.warns(UserWarning, match=f"^{first.name} not deleted: not yours$"):
        files.prune(f"{tmp_path}", 1)
    assert {*tmp_path.iterdir()} == {first, third}


def test_of_a_checkpoint_that_is_a_link_only_the_link_is_deleted(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    path = make_sharded(tmp_path / "elsewhere")
    (tmp_path / path.name).symlink_to(path)
    sharded.remove(ckpt, f"{tmp_path}", path.name)
    assert path.is_dir() and os.listdir(tmp_path) == ["elsewhere"]


def test_an_error_without_text_is_named():
    def fail():
        raise MemoryError

    with pytest.raises(ValueError, match="^rank 0: MemoryError\\(\\)$"):
        sharded._on_all_ranks(None, fail)


def test_sharded_checkpoints_are_pruned_while_whole_ones_are_saved(files, tmp_path):
    """An interrupted save of another process must stay, and so must what was set aside."""
    for step in (10, 20, 30):
        make_sharded(tmp_path, step)
    bad = make_sharded(tmp_path, 40).name
    files.set_aside(f"{tmp_path}", bad)
    (tmp_path / f"{ckpt.TEMPORARY}40").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    others = {f"{bad}.damaged", f"{ckpt.TEMPORARY}40", "metrics.jsonl"}
    files.prune(f"{tmp_path}", 2)
    assert [entry.step for entry in ckpt.list_checkpoints(f"{tmp_path}")] == [20, 30]
    state = {"model": {"w": torch.ones(3)}}
    last = files.save(f"{tmp_path}", state, step=40, loss=None, keep=2)
    left = ckpt.list_checkpoints(f"{tmp_path}")
    assert [entry.step for entry in left] == [30, 40] and left[-1] == last
    assert others <= {*os.listdir(tmp_path)}
    assert files.newest(f"{tmp_path}")[0].entry == last
    sharded.remove(ckpt, f"{tmp_path}", last.name)
    assert [entry.step for entry in ckpt.list_checkpoints(f"{tmp_path}")] == [30]


def test_a_whole_checkpoint_replaces_a_sharded_one_of_the_same_step(files, tmp_path):
    make_sharded(tmp_path, 40)
    last = files.save(f"{tmp_path}", {"model": {"w": torch.ones(3)}}, step=40)
    assert ckpt.list_checkpoints(f"{tmp_path}") == [last]


# -------------------------------------------------------------------------------------- the program


@pytest.fixture(scope="module")
def job(text):
    return [
        *TINY,
        "--data",
        text,
        "--dropout",
        0.1,
        "--steps",
        60,
        "--log-every",
        1,
        "--eval-every",
        20,
        "--save-every",
        4,
        "--spawn",
        2,
        "--strategy",
        "fsdp",
        "--checkpoint",
        "sharded",
    ]


@pytest.fixture(scope="module")
def unbroken(job, tmp_path_factory):
    """Return the --out folder of a run that nothing disturbed. Tests must not write to it."""
    out = tmp_path_factory.mktemp("unbroken")
    ran = run(*job, "--out", out)
    assert ran.code == 0 and ran.err == "", ran
    return out


def checkpoint_folders(out):
    """Oldest first."""
    return sorted(
        path for path in out.glob("step-*") if not path.name.endswith((".pt", ".damaged"))
    )


def end(out):
    return load(checkpoint_folders(out)[-1])


def test_a_run_keeps_the_last_and_the_best_checkpoints_and_all_commands_read_them(
    unbroken, text, tmp_path
):
    rated = [line["val_loss"] for line in metrics(unbroken) if "val_loss" in line]
    assert [path.name[:13] for path in checkpoint_folders(unbroken)[-3:]] == [
        f"step-{step:08}" for step in (52, 56, 60)
    ]
    assert (
        f"loss-{min(rated):.4f}-" in checkpoint_folders(unbroken)[-1].name
        or len(checkpoint_folders(unbroken)) == 4
    )
    out = shutil.copytree(unbroken, tmp_path / "out")
    assert run("info", out).out.count("verified") == len(checkpoint_folders(out))
    assert f"loss {rated[-1]:.4f} nats" in run("eval", "--out", out).out
    assert run("sample", "--out", out, "--prompt", "the", "--max-new-tokens", 5).code == 0
    for _ in range(2):
        exported = run("export", out, "--format", "checkpoint", "-o", tmp_path / "one")
    assert exported.code == 2 and "exists already" in exported.err
    assert equal(ckpt.newest(f"{tmp_path}/one")[0].state, end(out))
    assert ckpt.newest(f"{tmp_path}/one")[0].entry.step == 60
    began = run(
        "--init-from",
        out,
        "--out",
        tmp_path / "new",
        "--data",
        text,
        "--steps",
        1,
        "--log-every",
        1,
        "--spawn",
        2,
    )
    assert began.code == 0 and losses(tmp_path / "new")[0][1] < 2.5 < math.log(18), began


def test_a_run_continues_with_other_numbers_of_ranks_and_kinds_of_checkpoint(
    job, unbroken, tmp_path
):
    """Two ranks write shards, three ranks a file, two ranks shards, and one rank finishes."""
    plain = [*job, "--dropout", 0, "--optimizer", "adamw"]
    alone = tmp_path / "alone"
    assert run(*plain, "--out", alone, "--spawn", 1, "--checkpoint", "whole").code == 0
    out, start = tmp_path / "out", 0
    for more in (
        [],
        ["--spawn", 3, "--strategy", "zero", "--checkpoint", "whole"],
        ["--strategy", "ddp"],
    ):
        with Program(*plain, "--out", out, *more) as program:
            program.read_to(f"step {start + 10}/")
            program.process.send_signal(signal.SIGTERM)
            ran = program.finish()
        assert ran.code == 3 and ran.err == "", ran
        start = ckpt.list_checkpoints(str(out))[-1].step
        assert ckpt.list_checkpoints(str(out))[-1].name.endswith(".pt") == ("whole" in more)
    assert run(*plain, "--out", out, "--spawn", 1).code == 0
    torch.testing.assert_close(dict(losses(out)), dict(losses(alone)), rtol=1e-4, atol=1e-7)
    assert [step for step, _ in losses(out)] == list(range(1, 61))


def test_if_a_shard_is_damaged_all_ranks_use_the_checkpoint_before(job, unbroken, tmp_path):
    out = shutil.copytree(unbroken, tmp_path / "out")
    damaged = checkpoint_folders(out)[-1]
    (damaged / "__1_0.distcp").write_bytes(b"")
    ran = run(*job, "--out", out)
    assert ran.code == 0 and ran.err.count("\n") == 1, ran
    assert (
        f"{damaged.name}: damaged: __1_0.distcp" in ran.err
        and "set aside, continuing from step 56" in ran.err
    )
    assert (out / f"{damaged.name}.damaged").is_dir()
    assert equal(end(out), end(unbroken)) and losses(out) == losses(unbroken)


def test_a_url_is_refused_for_sharded_checkpoints(job, tmp_path):
    ran = run(*job, "--out", f"file://{tmp_path}/out")
    assert (
        ran.code == 2
        and ran.err.count("\n") == 1
        and "a sharded checkpoint needs a folder, not a URL" in ran.err
    ), ran
    assert not (tmp_path / "out").exists()


@pytest.mark.torture
def test_ranks_that_are_killed_leave_only_complete_checkpoints(trials, job, unbroken, tmp_path):
    """Every second step is saved, so most kills happen during a save."""

    def trial(number):
        out, chance = tmp_path / f"{number}", random.Random(number)
        more = [*job, "--out", out, "--save-every", 2]
        where = (
            f"{chance.randrange(2)} 0 save {chance.randrange(1, 300_000)} {signal.SIGKILL:d} group"
        )
        ran = run(*more, **signalled(PYTHON, where, tmp_path / f"place {number}"))
        assert ran.code == -signal.SIGKILL, ran
        for path in checkpoint_folders(out):
            load(path)
        ran = run(*more)
        assert ran.code == 0 and ran.err == "", ran
        assert equal(end(out), end(unbroken)) and losses(out) == losses(unbroken)
        assert not [*out.glob(".saving-*")]

    trials("SIGKILL of all ranks while they write a sharded checkpoint", trial, 2, 50)
