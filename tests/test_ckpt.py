"""ckpt: what comes back is what was saved, bit for bit, and what was damaged does not come back."""

import copy
import hashlib
import io
import math
import os
import pickle
import re
import resource
import threading
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ckpt

fsspec = pytest.importorskip("fsspec")
torch.set_num_threads(1)  # the tensors are tiny, and threads that wait for a shared core are slow


def build(seed=0, lr=0.1):
    """A model with matrices, vectors and buffers, of floats and of integers; Muon and AdamW share it."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4, bias=False))
    matrices, vectors = ([p for p in model.parameters() if p.ndim == n] for n in (2, 1))
    groups = [{"params": vectors[:1], "weight_decay": 0.3}, {"params": vectors[1:], "weight_decay": 0.0}]
    return model, [torch.optim.AdamW(groups, lr=lr, fused=True), torch.optim.Muon(matrices, lr=lr)]


def train_(model, optimizers, start, stop):
    for step in range(start, stop):
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
        (model(x) - x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def trained(steps=3, **how):
    model, optimizers = build(**how)
    train_(model, optimizers, 0, steps)
    return model, optimizers


def everything(model, optimizers):
    return [model.state_dict(), [optimizer.state_dict()["state"] for optimizer in optimizers]]


def settings(optimizers):
    return [{**group, "params": len(group["params"])} for optimizer in optimizers for group in optimizer.param_groups]


def same(a, b):
    """Bitwise, with types, down to the last tensor of a nest of builtins."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
    return a == b


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=["path", "file", "memory", "s3"])
def folder(request, tmp_path):
    """A folder that is not there yet: a path, and URLs of three kinds."""
    if request.param == "s3":
        request.getfixturevalue("s3")
    yield f"{ {'path': '', 's3': 's3://bucket'}.get(request.param, request.param + '://') }{tmp_path}/out"
    fsspec.filesystem("memory").store.clear()


def place(folder, name):
    fs, path = fsspec.core.url_to_fs(folder)
    return fs, f"{path}/{name}"


def names(folder):
    fs, path = fsspec.core.url_to_fs(folder)
    return sorted(name.rsplit("/", 1)[-1] for name in fs.ls(path, detail=False, refresh=True))


def contents(folder, name):
    fs, path = place(folder, name)
    return fs.cat_file(path)


def put(folder, name, raw):
    fs, path = place(folder, name)
    fs.pipe_file(path, raw)


def put_named(folder, step, raw):
    """A file whose name has its right digest."""
    name = f"step-{step:08d}-{hashlib.sha256(raw).hexdigest()[:32]}.pt"
    put(folder, name, raw)
    return name


def some_state(step=0):
    return {"model": {"w": torch.full((100,), float(step))}, "step": step}


def torch_saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


# ------------------------------------------------------------------------------------------ state <-> objects


def test_a_snapshot_has_the_models_own_names_and_what_was_added():
    model, optimizers = trained()
    state = ckpt.snapshot(model, optimizers, step=3, config={"lr": 0.1})
    assert list(state) == ["model", "optimizers", "step", "config"]
    assert same(dict(state["model"]), dict(model.state_dict()))
    assert state["step"] == 3 and state["config"] == {"lr": 0.1}
    kept = {name for optimizer in state["optimizers"] for name in optimizer["state"]}
    assert kept == {name for name, _ in model.named_parameters()}


def test_training_on_does_not_reach_into_a_snapshot():
    model, optimizers = trained()
    state = ckpt.snapshot(model, optimizers)
    before = copy.deepcopy(state)
    train_(model, optimizers, 3, 5)
    assert same(state, before)
    assert not same(ckpt.snapshot(model, optimizers), before)


def test_snapshots_on_the_way_do_not_disturb_the_training():
    plain, watched = trained(6), trained(1)
    for step in range(1, 6):
        ckpt.snapshot(*watched)
        train_(*watched, step, step + 1)
    assert same(everything(*plain), everything(*watched))


def test_a_snapshot_before_the_first_step_does_not_disturb_the_training():
    plain, watched = trained(3), build()
    ckpt.snapshot(*watched)
    train_(*watched, 0, 3)
    assert same(everything(*plain), everything(*watched))


def test_training_from_a_checkpoint_is_bitwise_the_same_as_never_having_stopped(folder):
    straight, stopped, resumed = trained(7), trained(3), build(seed=1)
    ckpt.save(folder, ckpt.snapshot(*stopped), step=3)
    found, rejected = ckpt.newest(folder)
    ckpt.restore_(found.state, *resumed)
    assert rejected == [] and same(everything(*resumed), everything(*stopped))
    train_(*resumed, 3, 7)
    assert same(everything(*resumed), everything(*straight))


def test_a_restored_optimizer_keeps_the_settings_it_was_built_with():
    model, optimizers = build(seed=1, lr=0.7)
    for optimizer in optimizers:
        optimizer.param_groups[0]["weight_decay"] = 0.9
    before = settings(optimizers)
    ckpt.restore_(ckpt.snapshot(*trained(lr=0.1)), model, optimizers)
    assert settings(optimizers) == before
    assert all(optimizer.state for optimizer in optimizers)


def test_in_a_group_what_ddp_adds_to_names_is_left_out_and_training_resumes(group_of_one):
    straight, stopped, resumed = (build(seed) for seed in (0, 0, 1))
    wrapped = [(DistributedDataParallel(model), optimizers) for model, optimizers in (straight, stopped, resumed)]
    train_(*wrapped[0], 0, 7)
    train_(*wrapped[1], 0, 3)
    state = ckpt.snapshot(*wrapped[1])
    assert list(state["model"]) == list(stopped[0].state_dict())
    ckpt.restore_(state, *wrapped[2])
    train_(*wrapped[2], 3, 7)
    assert same(everything(*resumed), everything(*straight))


def test_going_back_to_before_the_first_step_forgets_the_moments():
    model, optimizers = build()
    start = ckpt.snapshot(model, optimizers)
    train_(model, optimizers, 0, 3)
    ckpt.restore_(start, model, optimizers)
    train_(model, optimizers, 0, 3)
    assert same(everything(model, optimizers), everything(*trained(3)))


def test_a_buffer_of_infinities_such_as_an_attention_mask_is_restored():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    model.register_buffer("mask", torch.tensor([[0.0, -math.inf], [0.0, 0.0]]))
    other.register_buffer("mask", torch.zeros(2, 2))
    ckpt.restore_(ckpt.snapshot(model, []), other, [])
    assert same(other.state_dict(), model.state_dict())


def test_weights_that_are_tied_stay_tied():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    state = ckpt.snapshot(model, [])
    assert list(state["model"]) == ["0.weight", "1.weight"]
    assert len({weight.data_ptr() for weight in state["model"].values()}) == 1  # one copy, also in the file
    with torch.no_grad():
        model[0].weight.zero_()
    ckpt.restore_(state, model, [])
    assert model[1].weight is model[0].weight and same(model[0].weight.detach(), state["model"]["0.weight"])


def test_training_after_a_restore_does_not_reach_into_the_state():
    state, (model, optimizers) = ckpt.snapshot(*trained()), build()
    before = copy.deepcopy(state)
    ckpt.restore_(state, model, optimizers)
    train_(model, optimizers, 3, 5)
    assert same(state, before)


@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        lambda model: torch.optim.Adagrad(model.parameters()),
        lambda model: torch.optim.RMSprop(model.parameters()),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    ],
    ids=["momentum", "Adagrad", "RMSprop", "SGD"],
)
def test_any_optimizer_is_saved_and_restored(make):
    (model, _), (other, _) = build(), build(seed=1)
    optimizers, others = [make(model)], [make(other)]
    train_(model, optimizers, 0, 3)
    ckpt.restore_(ckpt.snapshot(model, optimizers), other, others)
    for m, o in ((model, optimizers), (other, others)):
        train_(m, o, 3, 5)
    assert same(everything(model, optimizers), everything(other, others))


def test_a_restore_while_there_are_gradients_is_a_restore():
    stopped, (model, optimizers) = trained(), build(seed=1)
    model(torch.ones(2, 4)).sum().backward()
    ckpt.restore_(ckpt.snapshot(*stopped), model, optimizers)
    assert same(everything(model, optimizers), everything(*stopped))


def test_a_parameter_that_never_had_a_gradient_is_no_obstacle():
    def unused_bias():
        model = nn.Linear(2, 2)
        return model, [torch.optim.AdamW(model.parameters())]

    model, optimizers = unused_bias()
    model.weight.sum().backward()
    optimizers[0].step()
    ckpt.restore_(ckpt.snapshot(model, optimizers), *unused_bias())


@pytest.mark.parametrize("change", ["missing", "surplus", "shape"])
def test_a_state_of_another_model_is_an_error_with_the_name(change):
    state, other = ckpt.snapshot(*trained()), build(seed=1)
    if change == "missing":
        del state["model"]["3.weight"]
    else:
        state["model"]["3.weight" if change == "shape" else "4.weight"] = torch.zeros(5)
    with pytest.raises(ValueError, match=r"[34]\.weight"):
        ckpt.restore_(state, *other)


def test_a_state_of_other_optimizers_is_an_error():
    state, (model, optimizers) = ckpt.snapshot(*trained()), build()
    with pytest.raises(ValueError):
        ckpt.restore_({**state, "optimizers": state["optimizers"][:1]}, model, optimizers)


# -------------------------------------------------------------------------------------------- state <-> file


def test_a_checkpoint_is_one_file_that_torch_opens_without_ckpt(tmp_path):
    model, optimizers = trained()
    state = ckpt.snapshot(model, optimizers, step=3, text="ü")
    entry = ckpt.save(str(tmp_path / "new" / "folder"), state, step=3, loss=1.88118)
    (path,) = (tmp_path / "new" / "folder").iterdir()
    loaded = torch.load(path, weights_only=True)
    assert same(loaded, state) and path.name == entry.name
    bare = build(seed=1)[0]
    bare.load_state_dict(loaded["model"])
    assert same(dict(bare.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize(
    "step, loss, start",
    [
        (400, 1.88118, "step-00000400-loss-1.8812-"),
        (0, None, "step-00000000-"),
        (7, math.nan, "step-00000007-"),
        (7, math.inf, "step-00000007-"),
        (7, -0.5, "step-00000007-loss--0.5000-"),
        (123456789, 12.0, "step-123456789-loss-12.0000-"),
    ],
)
def test_the_name_tells_step_loss_and_the_sha256_of_the_content(folder, step, loss, start):
    entry = ckpt.save(folder, some_state(), step, loss)
    assert names(folder) == [entry.name]
    assert entry.name == f"{start}{hashlib.sha256(contents(folder, entry.name)).hexdigest()[:32]}.pt"
    assert entry.step == step and ckpt.entries(folder) == [entry]
    assert entry.loss == (round(loss, 4) if loss is not None and math.isfinite(loss) else None)


def test_the_digest_is_of_the_whole_file_wherever_it_was_read_to():
    raw = os.urandom(9_000_000)
    file = io.BytesIO(raw)
    file.seek(1234)
    assert ckpt.digest(file) == hashlib.sha256(raw).hexdigest()[:32]


def test_entries_are_in_the_order_of_steps_and_nothing_else_is_one(folder):
    assert ckpt.entries(folder) == [] and ckpt.newest(folder) == (None, [])
    steps = [100_000_000, 99_999_999, 5, 1_000]
    for step in steps:
        ckpt.save(folder, some_state(step), step)
    good = ckpt.entries(folder)[0].name
    for name in ("metrics.jsonl", f"{good}.damaged", f"x{good}", f".saving-{good}", ".saving-17", good[:-4] + ".pt"):
        put(folder, name, b"")
    assert [entry.step for entry in ckpt.entries(folder)] == sorted(steps)
    assert ckpt.newest(folder)[0].state["step"] == 100_000_000


def test_checkpoints_of_one_step_with_and_without_a_loss_can_be_together(folder):
    saved = {ckpt.save(folder, some_state(4), 4, loss) for loss in (None, 1.5)}
    assert set(ckpt.entries(folder)) == saved


def test_a_name_with_a_loss_that_is_no_number_is_no_checkpoint(folder):
    entry = ckpt.save(folder, some_state(4), 4, 1.5)
    put(folder, entry.name.replace("1.5", "1..5"), b"")
    assert ckpt.entries(folder) == [entry]


def test_saving_the_same_again_is_no_error_and_one_file(folder):
    assert ckpt.save(folder, some_state(), 4) == ckpt.save(folder, some_state(), 4)
    assert len(names(folder)) == 1


def test_saving_only_reads_the_state(folder):
    state = ckpt.snapshot(*trained())
    before = copy.deepcopy(state)
    ckpt.save(folder, state, 3)
    assert same(state, before)


# ---------------------------------------------------------------------------------------------------- damage


def flipped(raw, at):
    raw = bytearray(raw)
    raw[at] ^= 1
    return bytes(raw)


DAMAGES = {
    "cut to nothing": lambda raw: b"",
    "cut to a byte": lambda raw: raw[:1],
    "cut to half": lambda raw: raw[: len(raw) // 2],
    "cut by a byte": lambda raw: raw[:-1],
    "a byte too long": lambda raw: raw + b"\0",
    "zeros": lambda raw: bytes(len(raw)),
    "first byte": lambda raw: flipped(raw, 0),
    "middle byte": lambda raw: flipped(raw, len(raw) // 2),
    "last byte": lambda raw: flipped(raw, -1),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_what_is_damaged_is_named_and_the_one_before_it_used(folder, damage):
    old, new = (ckpt.save(folder, some_state(step), step) for step in (10, 20))
    assert ckpt.newest(folder)[0].entry == new
    put(folder, new.name, damage(contents(folder, new.name)))
    found, (line,) = ckpt.newest(folder)
    assert found.entry == old and same(found.state, some_state(10))
    assert line.startswith(f"{new.name}: damaged")


def test_a_flip_of_any_bit_is_found(tmp_path):
    entry = ckpt.save(str(tmp_path), some_state(), 1)
    raw = contents(str(tmp_path), entry.name)
    for at in range(0, len(raw), 7):
        put(str(tmp_path), entry.name, flipped(raw, at))
        with pytest.raises(ValueError, match="damaged"):
            ckpt.load(str(tmp_path), entry)


def test_two_that_have_each_others_content_are_both_damaged(folder):
    first, second, third = (ckpt.save(folder, some_state(step), step) for step in (10, 20, 30))
    a, b = contents(folder, second.name), contents(folder, third.name)
    put(folder, second.name, b)
    put(folder, third.name, a)
    found, rejected = ckpt.newest(folder)
    assert found.entry == first and [line.split(":")[0] for line in rejected] == [third.name, second.name]


def test_where_all_are_damaged_all_are_named_and_none_is_found(folder):
    saved = [ckpt.save(folder, some_state(step), step) for step in (10, 20)]
    for entry in saved:
        put(folder, entry.name, b"")
    found, rejected = ckpt.newest(folder)
    assert found is None and len(rejected) == 2


@pytest.mark.parametrize(
    "replace", [os.mkdir, lambda path: os.symlink("nowhere", path)], ids=["folder", "dangling link"]
)
def test_what_is_not_a_file_is_named_and_the_one_before_it_used(tmp_path, replace):
    old, new = (ckpt.save(str(tmp_path), some_state(step), step) for step in (10, 20))
    (tmp_path / new.name).unlink()
    replace(tmp_path / new.name)
    found, (line,) = ckpt.newest(str(tmp_path))
    assert found.entry == old and line.startswith(f"{new.name}: ")


class MakesAFolder:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("written", [torch_saved, pickle.dumps], ids=["torch.save", "pickle"])
@pytest.mark.parametrize("where", ["inside", "beside"])
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_code_in_a_checkpoint_is_refused_and_not_run(folder, tmp_path, written, where):
    code = MakesAFolder(str(tmp_path / "was run"))
    old = ckpt.save(folder, some_state(10), 10)
    bad = put_named(folder, 20, written({"model": {"w": code}} if where == "inside" else {"model": {}, "x": code}))
    found, (line,) = ckpt.newest(folder)
    assert found.entry == old and line.startswith(f"{bad}: not a checkpoint: ")
    assert not (tmp_path / "was run").exists()
    pickle.loads(pickle.dumps(code))  # which proves that it would have run
    assert (tmp_path / "was run").exists()


@pytest.mark.parametrize(
    "raw",
    [
        b"not a checkpoint",
        torch_saved([1, 2]),
        torch_saved({"weights": {}}),
        torch_saved({"model": torch.ones(3)}),
        torch_saved({"model": {"w": torch.ones(1000)}})[:-1000],
        b"",
        b"\x80\x02.",
        b"\x80\x02h\x07.",
        b"\x80\x02J",
    ],
    ids=["text", "list", "no model", "a tensor", "half a zip", "empty", "no stack", "no memo", "half a number"],
)
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_what_is_no_checkpoint_under_its_right_digest_is_named_and_the_one_before_it_used(folder, raw):
    old = ckpt.save(folder, some_state(10), 10)
    bad = put_named(folder, 20, raw)
    found, (line,) = ckpt.newest(folder)
    assert found.entry == old and re.fullmatch(f"{bad}: not a checkpoint: .+", line)


def test_what_was_set_aside_is_no_entry_but_still_there(folder):
    old, new = (ckpt.save(folder, some_state(step), step) for step in (10, 20))
    raw = contents(folder, new.name)
    ckpt.set_aside(folder, new.name)
    assert ckpt.entries(folder) == [old] and contents(folder, f"{new.name}.damaged") == raw


# ----------------------------------------------------------------------------------------------------- prune


@pytest.mark.parametrize(
    "keep, losses, left",
    [
        (1, [3.0, 2.0, 1.0], [2]),
        (1, [1.0, 2.0, 3.0], [0, 2]),
        (2, [3.0, 1.0, 2.0, 4.0, 5.0], [1, 3, 4]),
        (2, [None, None, None, None], [2, 3]),
        (1, [None, 2.0, None, None], [1, 3]),
        (1, [5.0, 1.0, 1.0, 2.0], [2, 3]),  # of equals the later
        (1, [-1.0, -2.0, 0.0], [1, 2]),
        (1, [9.5, 10.5, 11.5], [0, 2]),  # as numbers, not as text
        (5, [3.0, 2.0, 1.0], [0, 1, 2]),
        (0, [1.0, 2.0, 3.0], [0]),
    ],
)
def test_prune_leaves_the_last_and_the_best(folder, keep, losses, left):
    saved = [ckpt.save(folder, some_state(step), step, loss) for step, loss in enumerate(losses)]
    put(folder, "metrics.jsonl", b"{}")
    put(folder, f"{saved[0].name}.damaged", b"")
    ckpt.prune(folder, keep)
    assert ckpt.entries(folder) == [saved[i] for i in left]
    assert {"metrics.jsonl", f"{saved[0].name}.damaged"} <= set(names(folder))


def test_prune_sweeps_up_after_a_save_that_was_broken_off(tmp_path):
    entry = ckpt.save(str(tmp_path), some_state(1), 1)
    (tmp_path / f"{ckpt.TEMPORARY}12345").write_bytes(b"half")
    assert ckpt.newest(str(tmp_path))[0].entry == entry
    ckpt.prune(str(tmp_path), keep=1)
    assert names(str(tmp_path)) == [entry.name]


def test_save_and_prune_does_both(folder):
    for step in range(4):
        last = ckpt.save_and_prune(folder, some_state(step), step, None, 2)
    assert [entry.step for entry in ckpt.entries(folder)] == [2, 3] and ckpt.entries(folder)[-1] == last


def test_removing_what_is_gone_is_no_error(folder):
    entry = ckpt.save(folder, some_state(), 1)
    for _ in range(2):
        ckpt.remove(folder, entry.name)
    assert ckpt.entries(folder) == []


# ------------------------------------------------------------------------------------------- writes that fail


@contextmanager
def largest_file(size):
    """Writing past `size` bytes is an OSError, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", [0, 0.0001, 0.1, 0.5, 0.9, 0.999])
def test_a_full_disk_is_an_oserror_and_leaves_what_was_there(tmp_path, room):
    state = {"model": {"a": torch.ones(50_000), "b": torch.ones(50_000)}}
    old = ckpt.save(str(tmp_path), state, 1)
    size = (tmp_path / old.name).stat().st_size
    with largest_file(int(room * size)), pytest.raises(OSError):
        ckpt.save(str(tmp_path), state, 2)
    assert names(str(tmp_path)) == [old.name]
    assert ckpt.newest(str(tmp_path))[0].entry == old
    assert ckpt.save(str(tmp_path), state, 2).step == 2  # with room again


def test_a_write_that_fails_leaves_no_temporary_file_whatever_the_error(tmp_path):
    old = ckpt.save(str(tmp_path), some_state(1), 1)
    with pytest.raises(Exception):
        ckpt.save(str(tmp_path), {"model": {"w": threading.Lock()}}, 2)
    assert names(str(tmp_path)) == [old.name]


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_folder_that_is_a_file_is_an_oserror(tmp_path, scheme):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(OSError, match="out"):
        ckpt.save(f"{scheme}{tmp_path}/out", some_state(), 1)
    assert (tmp_path / "out").read_text() == "mine" and os.listdir(tmp_path) == ["out"]


def test_in_the_background_another_thread_works_and_the_result_waits(folder):
    future = ckpt.in_background(ckpt.save_and_prune, folder, some_state(1), 1, None, 1)
    assert [future.result()] == ckpt.entries(folder)
    assert ckpt.in_background(threading.get_ident).result() != threading.get_ident()


def test_in_the_background_an_error_waits_for_the_result(tmp_path):
    (tmp_path / "out").write_text("")
    future = ckpt.in_background(ckpt.save, str(tmp_path / "out"), some_state(), 1)
    with pytest.raises(OSError):
        future.result()


# ----------------------------------------------------------------------------------------------------- check


def test_the_models_own_state_passes_the_check():
    model, optimizers = trained()
    ckpt.check(ckpt.snapshot(model, optimizers), build(seed=1)[0])


float32 = "torch.float32"


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("3.weight", None, "3.weight is missing from the checkpoint"),
        ("1.running_mean", None, "1.running_mean is missing from the checkpoint"),
        ("4.bias", lambda _: torch.ones(1), "4.bias is only in the checkpoint"),
        ("3.weight", torch.t, f"3.weight is (8, 4) {float32} in the checkpoint, (4, 8) {float32} in the model"),
        ("0.bias", torch.Tensor.half, f"0.bias is (8,) torch.float16 in the checkpoint, (8,) {float32} in the model"),
        ("0.bias", lambda w: w.tolist(), "0.bias is a list in the checkpoint, not a tensor"),
    ],
)
def test_the_check_names_what_is_wrong(name, change, message):
    model, optimizers = trained()
    state = ckpt.snapshot(model, optimizers)
    value = state["model"].pop(name, None)
    if change:
        state["model"][name] = change(value)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ckpt.check(state, model)


def test_a_checkpoint_of_nan_is_named_and_the_one_before_it_used(folder):
    old = ckpt.save(folder, some_state(10), 10)
    bad = ckpt.save(
        folder,
        {"model": {"a": torch.ones(2), "mask": torch.tensor([0, -math.inf]), "w": torch.tensor([1, math.nan])}},
        20,
    )
    assert ckpt.newest(folder)[0].entry == old
    assert ckpt.newest(folder)[1] == [f"{bad.name}: worthless: w has numbers that are not (NaN)"]
