"""extras/sharded.py, and --checkpoint sharded. `every_job` runs once for three ranks and once for two, and leaves its
checkpoints behind; the tests look at these, and at what forgers and broken disks make of them."""

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
import time

import pytest
import torch
import torch.distributed as dist
from conftest import TINY, Program, losses, metrics, run, same
from test_storage_faults import Calls
from test_strategies import ONE, STRATEGIES, build, in_turn, learn
from torch import nn

import ckpt
import ddp_setup
from extras import sharded

KINDS = [("adamw", "modern"), ("muon", "modern"), ("sgd", "gpt2")]  # gpt2's head is tied to its embedding


def name(digest):
    return f"step-00000003-{digest}"


def only(folder):
    (path,) = [entry.path for entry in os.scandir(folder) if not entry.name.endswith(".pt")]
    return path


def equal(a, b):
    """Whether two states are equal bitwise, but for the settings of optimizers, whose tuples JSON made lists."""
    return (
        same(dict(a["model"]), dict(b["model"])) and same(a["optimizers"], b["optimizers"]) and a["step"] == b["step"]
    )


# -------------------------------------------------------------------------------- jobs that every rank does


def write(world, folder, group):
    """Both kinds of checkpoint of the same state, of each strategy and optimizer, while the training goes on."""
    for strategy in STRATEGIES:
        for optimizer, arch in KINDS:
            model, optimizers = build(world, strategy, optimizer=optimizer, arch=arch)
            learn(world, model, optimizers, 0, 3)
            out = f"{folder}/{strategy} {world.size} {optimizer}"
            os.makedirs(out, exist_ok=True)
            wait = sharded.save(f"{out}/.saving-3", name, model, optimizers, group, step=3)
            whole = ckpt.snapshot(model, optimizers, step=3)
            learn(world, model, optimizers, 3, 5)  # it holds a copy
            wait()
            if world.rank == 0:
                ckpt.save(out, whole, 3)


def read(world, folder, writer):
    """Whether what `writer` ranks wrote under each strategy is put back under each, bitwise."""
    found = {}
    for theirs in STRATEGIES:
        for strategy in STRATEGIES:
            for optimizer, arch in KINDS:
                path = only(f"{folder}/{theirs} {writer} {optimizer}")
                assert not sharded.damage(path, world.rank, world.size)
                model, optimizers = build(world, strategy, optimizer=optimizer, arch=arch)
                learn(world, model, optimizers, 7, 8)  # what was there before is gone
                sharded.restore_(path, model, optimizers, ckpt.read)
                again = ckpt.snapshot(model, optimizers, step=3)
                expected = ckpt.newest(os.path.dirname(path))[0].state
                found[theirs, strategy, optimizer] = world.rank != 0 or equal(again, expected)
    return found


def few_rows(world, folder, group):
    """A parameter of 2 rows, of which a third rank has none, and one that never had a gradient."""
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model = ddp_setup.replicate(bare, world, "fsdp")
    optimizers = [torch.optim.AdamW(bare.parameters()), torch.optim.SGD(bare.parameters())]
    for parameter in bare[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers[0].step()
    os.makedirs(f"{folder}/few {world.size}", exist_ok=True)
    sharded.save(f"{folder}/few {world.size}/.saving-3", name, model, optimizers, group, step=3)()
    before = ckpt.snapshot(model, optimizers, step=3)
    sharded.restore_(only(f"{folder}/few {world.size}"), model, optimizers)
    after = ckpt.snapshot(model, optimizers, step=3)
    kept = [*after["optimizers"][0]["state"]] if world.rank == 0 else ["0.weight", "0.bias"]
    return equal(before, after) and kept == ["0.weight", "0.bias"] and not after["optimizers"][1]


def full(world, folder, group):
    """The disk of the last rank takes no more; -> (what rank 0 is told, what is there then, and after the next)."""
    model, optimizers = build(world, "fsdp")
    out = f"{folder}/full {world.size}"
    os.makedirs(out, exist_ok=True)
    limits, last = resource.getrlimit(resource.RLIMIT_FSIZE), world.rank == world.size - 1
    if last:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    said = ""
    try:
        sharded.save(f"{out}/.saving-3", name, model, optimizers, group, step=3)()
    except OSError as error:
        said = f"{error}"
    if last:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()
    between = os.listdir(out)
    dist.barrier()
    sharded.save(f"{out}/.saving-4", name, model, optimizers, group, step=4)()
    return said, between, len(os.listdir(out))


def worthless(world, folder, group):
    model, optimizers = build(world, "fsdp")
    with torch.no_grad():
        model.embedding.weight.mul_(torch.nan)
    try:
        sharded.save(f"{folder}/worthless {world.size}/.saving-3", name, model, optimizers, group, step=3)()
    except OSError as error:
        return f"{error}"


def apart(world, folder, group):
    """Each rank has a folder of its own, under one name as it were."""
    own, model = f"{folder}/apart {world.size}/{world.rank}", build(world, "fsdp")
    os.makedirs(own)
    said = ""
    try:
        sharded.save(f"{own}/.saving-3", name, *model, group, step=3)()
    except OSError as error:
        said = f"{error}"
    return sharded.in_common(folder), sharded.in_common(own), said, os.listdir(own)


def wrong(world, folder, group):
    """What is said of a checkpoint that is not one of this model, or of so many optimizers."""
    path, said = only(f"{folder}/fsdp {world.size} adamw"), []
    model, optimizers = build(world, "fsdp")
    for theirs in (
        (model, []),
        (model, [torch.optim.SGD(model.parameters(), momentum=0.9)]),
        build(world, "fsdp", arch="gpt2"),
    ):
        with pytest.raises(ValueError) as caught:
            sharded.restore_(path, *theirs)
        said.append(f"{caught.value}")
    return said


def every_job(folder, world):
    if world.size == 1:
        return None
    group = sharded.group(60)
    write(world, folder, group)
    found = {"read": read(world, folder, 3)}
    for job in (few_rows, full, worthless, apart, wrong):
        found[job.__name__] = job(world, folder, group)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """(size -> [what each of so many ranks brought back], the folder with their checkpoints)"""
    folder = tmp_path_factory.mktemp("ranks")
    assert ddp_setup.spawn(in_turn, 3, str(folder), functools.partial(every_job, str(folder))) == 0
    return lambda size: [torch.load(folder / f"{rank} of {size}.pt") for rank in range(size)], folder


SIZES = pytest.mark.parametrize("size", [2, 3])
WRITERS = pytest.mark.parametrize("writer", [f"{s} {n} {o}" for s in STRATEGIES for n in (2, 3) for o, _ in KINDS])


@WRITERS
def test_it_is_bitwise_the_whole_checkpoint_of_the_same_step(ranks, writer):
    """Names, their order, moments, settings; and each rank has written its share."""
    folder = ranks[1] / writer
    ours, whole = sharded.load(only(folder), ckpt.read), ckpt.newest(str(folder))[0].state
    assert equal(ours, whole) and [*ours["model"]] == [*whole["model"]]
    size = int(writer.split()[1])
    written = [os.path.getsize(f"{only(folder)}/__{rank}_0.distcp") for rank in range(size)]
    assert min(written) > 0.5 * sum(written) / size
    alone = build(ONE, "ddp", optimizer=writer.split()[2], arch=dict(KINDS)[writer.split()[2]])
    ckpt.restore_(ours, *alone)
    assert same(dict(ckpt.snapshot(*alone)["model"]), dict(whole["model"]))


@SIZES
def test_a_share_of_what_three_ranks_wrote_is_put_back_under_any_strategy(ranks, size):
    for result in ranks[0](size):
        assert len(result["read"]) == 27 and all(result["read"].values())


@SIZES
def test_a_rank_without_rows_and_a_parameter_without_moments(ranks, size):
    assert all(result["few_rows"] for result in ranks[0](size))


@SIZES
def test_when_one_ranks_disk_is_full_rank_0_says_so_and_nothing_is_left(ranks, size):
    said, between, after = zip(*(result["full"] for result in ranks[0](size)))
    assert said == (f"rank {size - 1}: File too large", *[""] * (size - 1))
    assert not any(between) and set(after) == {1}


@SIZES
def test_weights_that_are_not_numbers_are_not_written(ranks, size):
    said = [result["worthless"] for result in ranks[0](size)]
    assert said == ["rank 0: model.embedding.weight has numbers that are not (NaN)", *[None] * (size - 1)]
    assert not os.listdir(ranks[1] / f"worthless {size}")


@SIZES
def test_ranks_that_do_not_share_the_folder_are_told_so_and_nothing_is_left(ranks, size):
    common, own, said, left = zip(*(result["apart"] for result in ranks[0](size)))
    assert all(common) and not any(own) and not any(left)
    assert "all ranks have to share the folder" in said[0] and not any(said[1:])


@SIZES
def test_what_does_not_fit_is_said_on_all_ranks(ranks, size):
    for result in ranks[0](size):
        count, moments, model = result["wrong"]
        assert count == "1 optimizers in the checkpoint, 0 here"
        assert moments.startswith(
            "optimizers.0.embedding.weight.momentum_buffer is missing in the checkpoint, (18, 16)"
        )
        assert model == "model.norm.bias is missing in the checkpoint, (16,) torch.float32 here"


def test_others_open_it_with_dcp(ranks, tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    folder = ranks[1] / "fsdp 3 adamw"
    dcp_to_torch_save(only(folder), tmp_path / "one.pt")
    theirs = torch.load(tmp_path / "one.pt", weights_only=True)
    whole = ckpt.newest(str(folder))[0].state["model"]
    assert all(same(theirs[f"model.{key}"], value) for key, value in whole.items())


# -------------------------------------------------------------------------------------------------- forgers


@pytest.fixture
def genuine(ranks, tmp_path):
    """A copy, to be changed."""
    path = only(ranks[1] / "fsdp 3 adamw")
    return shutil.copytree(path, tmp_path / os.path.basename(path))


def resealed(path, change=lambda told: None):
    """The same with another manifest, of which the name tells, as of the files that are there now; -> its path."""
    told = json.loads((path / "manifest.json").read_text())
    for file in told["files"]:
        raw = (path / file).read_bytes()
        told["files"][file] = [len(raw), hashlib.sha256(raw).hexdigest()]
    text = json.dumps(change(told) or told)
    (path / "manifest.json").write_text(text)
    return str(path.rename(path.parent / name(hashlib.sha256(text.encode()).hexdigest()[:32])))


def tensor(told):
    return told["tensors"]["model.embedding.weight"]


FORGED = {
    "a tensor far larger than its file": lambda told: tensor(told)[1].__setitem__(0, 10**12),
    "a part far larger than its record": lambda told: (
        tensor(told)[1].__setitem__(0, 10**12),
        tensor(told)[2][0][1].__setitem__(0, 10**12 - 12),
    ),
    "a part outside its tensor": lambda told: tensor(told)[2][0][0].__setitem__(0, 15),
    "a negative offset": lambda told: tensor(told)[2][0][0].__setitem__(0, -1),
    "a hole": lambda told: tensor(told)[2].pop(),
    "a record outside its file": lambda told: tensor(told)[2][0].__setitem__(3, 10**9),
    "no record": lambda told: tensor(told)[2][0].__setitem__(3, 64),
    "a file elsewhere": lambda told: told["files"].__setitem__("../x.distcp", [1, ""]),
    "a file not told of": lambda told: tensor(told)[2][0].__setitem__(2, "/etc/passwd"),
    "a type that is none": lambda told: tensor(told).__setitem__(0, "torch.load"),
    "a type that it does not have": lambda told: tensor(told).__setitem__(0, "torch.int32"),
    "numbers that are none": lambda told: tensor(told).__setitem__(1, ["18", True]),
    "a name without a tensor": lambda told: told["names"].__setitem__("x", "y"),
    "moments of an optimizer that is not there": lambda told: told.__setitem__("optimizers", []),
    "a part told twice, and a hole": lambda told: (
        tensor(told)[2].__setitem__(slice(1, None), [tensor(told)[2][0]] * (len(tensor(told)[2]) - 1)),
    )[:0],
    "a shape that is none": lambda told: told["tensors"].__setitem__("model.x", ["torch.float32", [0, -5], []]),
    "a size that is none": lambda told: told["files"].__setitem__(".metadata", 5),
    "no object": lambda told: [1],
    "no keys": lambda told: {"files": {}},
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_manifest_is_an_error(genuine, what):
    path = resealed(genuine, FORGED[what])
    with pytest.raises(ValueError, match="^not a (manifest:|checkpoint:|zip) "):
        sharded.load(path, ckpt.read)


@pytest.mark.parametrize("file", ["manifest.json", "__0_0.distcp"])
def test_what_is_not_a_file_is_not_waited_for(genuine, file):
    (genuine / file).unlink()
    os.mkfifo(genuine / file)
    with pytest.raises((OSError, ValueError), match="not a file"):
        sharded.load(str(genuine), ckpt.read)


def test_a_manifest_nested_without_end_is_an_error(genuine):
    text = "[" * 100_000
    (genuine / "manifest.json").write_text(text)
    path = genuine.rename(genuine.parent / name(hashlib.sha256(text.encode()).hexdigest()[:32]))
    for read in (sharded.manifest, sharded.outline, sharded.load):
        with pytest.raises(ValueError, match="^not a manifest: "):
            read(str(path))


CODE = {
    "system": lambda p: Calls(os.system, f"touch {p}/ran"),
    "eval": lambda p: Calls(eval, f"open({str(p / 'ran')!r}, 'w')"),
    "a bomb": lambda p: Calls(bytearray, 10**12),
}


@pytest.mark.parametrize("what", CODE)
def test_dcps_pickle_is_never_read(genuine, what, tmp_path):
    before = sharded.load(str(genuine), ckpt.read)
    (genuine / ".metadata").write_bytes(pickle.dumps(CODE[what](tmp_path)))
    path = resealed(genuine)
    assert equal(sharded.load(path, ckpt.read), before) and sharded.outline(path)["step"] == 3
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("read", [ckpt.read, sharded.plain])
@pytest.mark.parametrize("what", CODE)
def test_nothing_in_a_record_is_run(genuine, what, read, tmp_path):
    if read is sharded.plain and what == "a bomb":
        pytest.skip("torch's own reader calls bytearray, which is why ckpt looks first")
    record = io.BytesIO()
    torch.save(CODE[what](tmp_path), record)

    def put_there(told):
        _, _, file, start, length = tensor(told)[2][0]
        assert len(record.getvalue()) <= length
        tensor(told)[2][0][4] = max(len(record.getvalue()), 6 * 16 * 4)
        raw = bytearray((genuine / file).read_bytes())
        raw[start : start + len(record.getvalue())] = record.getvalue()
        (genuine / file).write_bytes(raw)
        told["files"][file][1] = hashlib.sha256(raw).hexdigest()

    path = resealed(genuine, put_there)
    with pytest.raises(ValueError, match="^not a checkpoint: "):
        sharded.load(path, read)
    assert not (tmp_path / "ran").exists()


def test_forged_weights_that_are_not_numbers_are_worthless(genuine):
    def put_there(told):
        _, _, file, start, length = tensor(told)[2][0]
        raw = bytearray((genuine / file).read_bytes())
        value = torch.load(io.BytesIO(raw[start : start + length]))
        value[0, 0] = torch.nan
        record = io.BytesIO()
        torch.save(value, record)
        assert len(record.getvalue()) == length
        raw[start : start + length] = record.getvalue()
        (genuine / file).write_bytes(raw)
        told["files"][file][1] = hashlib.sha256(raw).hexdigest()

    with pytest.raises(ValueError, match="^worthless: model.embedding.weight has numbers that are not"):
        sharded.load(resealed(genuine, put_there), ckpt.read)


@pytest.mark.parametrize("file", ["manifest.json", ".metadata", "__0_0.distcp", "__2_0.distcp"])
@pytest.mark.parametrize("how", ["a bit flipped", "cut", "gone"])
def test_what_is_damaged_does_not_verify(genuine, file, how):
    raw = bytearray((genuine / file).read_bytes())
    raw[len(raw) // 2] ^= 1
    {
        "a bit flipped": lambda: (genuine / file).write_bytes(raw),
        "cut": lambda: (genuine / file).write_bytes(raw[:-1]),
        "gone": (genuine / file).unlink,
    }[how]()
    with pytest.raises((ValueError, FileNotFoundError), match="damaged|No such file"):
        sharded.load(str(genuine), ckpt.read)


# ------------------------------------------------------------------------------------------------- the program


@pytest.fixture(scope="module")
def job(text):
    return [*TINY, "--data", text, "--dropout", 0.1, "--steps", 60, "--log-every", 1, "--eval-every", 20, "--save-every",
            4, "--spawn", 2, "--strategy", "fsdp", "--checkpoint", "sharded"]  # fmt: skip


@pytest.fixture(scope="module")
def unbroken(job, tmp_path_factory):
    """The out folder of a run that nobody disturbed. Not to be written to."""
    out = tmp_path_factory.mktemp("unbroken")
    ran = run(*job, "--out", out)
    assert ran.code == 0 and ran.err == "" and "A sample" not in ran.out, ran
    return out


def shares(out):
    """Oldest first."""
    return sorted(path for path in out.glob("step-*") if not path.name.endswith((".pt", ".damaged")))


def end(out):
    return sharded.load(str(shares(out)[-1]), ckpt.read)


def test_a_run_keeps_the_last_and_the_best_and_all_commands_read_them(unbroken, text, tmp_path):
    rated = [line["val_loss"] for line in metrics(unbroken) if "val_loss" in line]
    assert [path.name[:13] for path in shares(unbroken)[-3:]] == [f"step-{step:08}" for step in (52, 56, 60)]
    assert f"loss-{min(rated):.4f}-" in shares(unbroken)[-1].name or len(shares(unbroken)) == 4
    out = shutil.copytree(unbroken, tmp_path / "out")
    assert run("info", out).out.count("verified") == len(shares(out))
    assert f"loss {rated[-1]:.4f} nats" in run("eval", "--out", out).out
    assert run("sample", "--out", out, "--prompt", "the", "--tokens", 5).code == 0
    for _ in range(2):
        exported = run("export", out, "--format", "checkpoint", "-o", tmp_path / "one")
    assert exported.code == 2 and "exists already" in exported.err
    assert equal(ckpt.newest(f"{tmp_path}/one")[0].state, end(out))
    assert ckpt.newest(f"{tmp_path}/one")[0].entry.step == 60
    began = run("--init-from", out, "--out", tmp_path / "new", "--data", text, "--steps", 1, "--log-every", 1)
    assert began.code == 0 and losses(tmp_path / "new")[0][1] < 2.5 < math.log(18), began


def test_stopped_it_goes_on_in_a_file_from_three_ranks_and_back(job, unbroken, tmp_path):
    """Every rank reads its share of what others wrote; and the kinds take turns."""
    plain = [*job, "--dropout", 0, "--optimizer", "adamw"]
    alone = tmp_path / "alone"
    assert run(*plain, "--out", alone, "--spawn", 1, "--checkpoint", "whole").code == 0
    out, start = tmp_path / "out", 0
    for more in ([], ["--spawn", 3, "--strategy", "zero", "--checkpoint", "whole"], ["--strategy", "ddp"]):
        with Program(*plain, "--out", out, *more) as program:
            program.read_to(f"step {start + 10}/")
            program.process.send_signal(signal.SIGTERM)
            ran = program.finish()
        assert ran.code == 3 and ran.err == "", ran
        start = ckpt.entries(str(out))[-1].step
        assert ckpt.entries(str(out))[-1].name.endswith(".pt") == ("whole" in more)
    assert run(*plain, "--out", out, "--spawn", 1).code == 0
    torch.testing.assert_close(dict(losses(out)), dict(losses(alone)), rtol=1e-4, atol=1e-7)
    assert [step for step, _ in losses(out)] == list(range(1, 61))


def test_of_a_damaged_share_all_ranks_use_the_one_before(job, unbroken, tmp_path):
    out = shutil.copytree(unbroken, tmp_path / "out")
    damaged = shares(out)[-1]
    (damaged / "__1_0.distcp").write_bytes(b"")  # which rank 1 verifies
    ran = run(*job, "--out", out)
    assert ran.code == 0 and ran.err.count("\n") == 1, ran
    assert f"{damaged.name}: damaged: __1_0.distcp" in ran.err and "set aside, going on from step 56" in ran.err
    assert (out / f"{damaged.name}.damaged").is_dir()
    assert equal(end(out), end(unbroken)) and losses(out) == losses(unbroken)
    ran = run(*job, "--out", out, "--fresh", "--steps", 1)
    assert ran.code == 0 and [path.name[:13] for path in shares(out)] == ["step-00000001"], ran


def test_a_url_is_refused(job, tmp_path):
    ran = run(*job, "--out", f"file://{tmp_path}/out")
    assert ran.code == 2 and ran.err.count("\n") == 1 and "needs a folder that all ranks share" in ran.err, ran
    assert not (tmp_path / "out").exists()


@pytest.mark.torture
def test_all_ranks_killed_at_random_moments_leave_whole_checkpoints_alone(trials, job, unbroken, tmp_path):
    """Most of them while one is written: every second step is saved."""

    def trial(number):
        out, chance = tmp_path / f"{number}", random.Random(number)
        more = [*job, "--out", out, "--save-every", 2]
        with Program(*more) as program:
            program.read_lines(chance.randrange(2, 55))
            time.sleep(0.05 * chance.random())
            program.kill()
        for path in shares(out):
            sharded.load(str(path), ckpt.read)
        ran = run(*more)
        assert ran.code == 0 and ran.err == "", ran
        assert equal(end(out), end(unbroken)) and losses(out) == losses(unbroken)
        assert not [*out.glob(".saving-*")]

    trials("SIGKILL of all ranks while they write a sharded checkpoint", trial, 2, 50)
