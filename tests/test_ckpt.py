"""Tests of ckpt: what is read is what was saved, bit for bit, and what was damaged is never used."""

import copy
import errno
import hashlib
import importlib.util
import io
import math
import os
import pickle
import re
import resource
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
import uuid
import warnings
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import same
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ckpt

torch.set_num_threads(1)  # the tensors are tiny, and threads that wait for a shared core are slow
ROOT = Path(ckpt.__file__).parent
VERSION_0_2 = ROOT / "tests" / "data" / "version_0_2" / "run"


def build(seed=0, lr=0.1):
    """Return a model with matrices, vectors, float and integer buffers, and its two optimizers."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4, bias=False))
    matrices, vectors = ([p for p in model.parameters() if p.ndim == n] for n in (2, 1))
    groups = [{"params": vectors[:1], "weight_decay": 0.3}, {"params": vectors[1:]}]
    adamw = torch.optim.AdamW(groups, lr=lr, fused=True)
    return model, [adamw, torch.optim.Muon(matrices, lr=lr)]


def train_(model, optimizers, start, stop):
    for step in range(start, stop):
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
        (model(x) - x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def trained(steps=3, seed=0):
    model, optimizers = build(seed)
    train_(model, optimizers, 0, steps)
    return model, optimizers


def everything(model, optimizers):
    """Return the tensors of the training, of a DTensor the shard of this rank."""
    local = lambda v: v.to_local() if isinstance(v, DTensor) else v  # noqa: E731
    states = [
        model.state_dict(),
        [dict(optimizer.state_dict()["state"]) for optimizer in optimizers],
    ]
    return ckpt.map_values(local, states)


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def folder(tmp_path):
    """The path of a folder that does not exist yet."""
    return str(tmp_path / "out")


def names(folder):
    return sorted(os.listdir(folder))


def some_state(step=0):
    return {"model": {"w": torch.full((100,), float(step))}, "step": step}


def save_some(folder, *steps):
    return [ckpt.save(folder, some_state(step), step) for step in steps]


def torch_saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


# ------------------------------------------------------------------- model and optimizers <-> state


def test_snapshot_has_the_names_of_the_model_and_what_was_added():
    model, optimizers = trained()
    state = ckpt.snapshot(model, optimizers, step=3, config={"lr": 0.1})
    assert list(state) == ["model", "optimizers", "step", "config"]
    assert same(state["model"], dict(model.state_dict()))
    assert state["step"] == 3 and state["config"] == {"lr": 0.1}


def test_snapshots_share_no_memory_with_the_training_and_do_not_disturb_it():
    plain, watched = trained(6), build()
    assert ckpt.snapshot(*watched)["optimizers"] == [{}, {}]
    for step in range(6):
        state = ckpt.snapshot(*watched)
        before = copy.deepcopy(state)
        train_(*watched, step, step + 1)
        assert same(state, before) and not same(ckpt.snapshot(*watched), before)
    assert same(everything(*plain), everything(*watched))


def test_training_from_a_checkpoint_is_bitwise_equal_to_training_without_a_stop(folder):
    straight, stopped, resumed = trained(7), trained(3), build(seed=1)
    ckpt.save(folder, ckpt.snapshot(*stopped), step=3)
    found, rejected = ckpt.newest(folder)
    before = copy.deepcopy(found.state)
    ckpt.restore_(found.state, *resumed)
    assert rejected == {} and same(everything(*resumed), everything(*stopped))
    train_(*resumed, 3, 7)
    assert same(everything(*resumed), everything(*straight))
    assert same(found.state, before)  # it shares no memory with the model


@pytest.mark.parametrize("wrap", [DistributedDataParallel, torch.compile])
def test_a_wrapped_model_is_saved_and_restored_by_the_names_of_the_bare_model(wrap, group_of_one):
    (stopped, optimizers), (resumed, others) = trained(), build(seed=1)
    state = ckpt.snapshot(wrap(stopped), optimizers)
    assert list(state["model"]) == list(stopped.state_dict())
    ckpt.restore_(state, wrap(resumed), others)
    assert same(everything(resumed, others), everything(stopped, optimizers))


def test_moments_are_restored_by_name_and_settings_are_kept():
    stopped, (model, _) = trained(), build(seed=1)
    vectors, matrices = ([p for p in model.parameters() if p.ndim == n] for n in (1, 2))
    adamw = torch.optim.AdamW(reversed(vectors), lr=0.7, weight_decay=0.1, fused=True)
    settings = [*adamw.param_groups[0].items()]
    ckpt.restore_(ckpt.snapshot(*stopped), model, [adamw, torch.optim.Muon(matrices)])
    for p, q in zip(stopped[0].parameters(), model.parameters()):
        assert p.ndim == 2 or same(stopped[1][0].state[p], adamw.state[q])
    assert len(adamw.state) == 3 and [*adamw.param_groups[0].items()] == settings


def test_a_sharded_model_is_copied_and_restored(group_of_one):
    """With one rank, the whole tensor that torch gathers shares memory with the shard."""
    model = fully_shard(nn.Linear(4, 8), mesh=init_device_mesh("cpu", (1,)))
    optimizers = [torch.optim.AdamW(model.parameters())]
    take_step(model, optimizers[0], (2, 4))
    state = ckpt.snapshot(model, optimizers)
    before = copy.deepcopy(state)
    take_step(model, optimizers[0], (2, 4))
    assert len(before["optimizers"][0]["state"]) == 2 and same(state, before)
    ckpt.restore_(state, model, optimizers)
    assert same(ckpt.snapshot(model, optimizers), before)


def test_restoring_a_state_from_before_the_first_step_deletes_moments_and_gradients():
    model, optimizers = build()
    start = ckpt.snapshot(model, optimizers)
    train_(model, optimizers, 0, 3)
    model(torch.ones(2, 4)).sum().backward()
    ckpt.restore_(start, model, optimizers)
    assert all(parameter.grad is None for parameter in model.parameters())
    train_(model, optimizers, 0, 3)
    assert same(everything(model, optimizers), everything(*trained(3)))


def test_tied_weights_stay_tied_and_are_stored_once(folder):
    model = nn.Sequential(nn.Embedding(500, 30), nn.Linear(30, 500, bias=False))
    model[1].weight = model[0].weight
    state = ckpt.snapshot(model, [])
    assert list(state["model"]) == ["0.weight", "1.weight"]
    assert Path(folder, ckpt.save(folder, state, 1).name).stat().st_size < 1.5 * 500 * 30 * 4
    with torch.no_grad():
        model[0].weight.zero_()
    ckpt.restore_(state, model, [])
    assert model[1].weight is model[0].weight
    assert same(model[0].weight, state["model"]["0.weight"])


def test_moments_are_restored_exactly_where_only_some_parameters_have_them():
    def step(model, optimizer, *parameters):
        sum(parameter.sum() for parameter in parameters).backward()
        optimizer.step()
        optimizer.zero_grad()

    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer, another = (torch.optim.AdamW(m.parameters()) for m in (model, other))
    step(model, optimizer, model.weight)
    step(other, another, other.bias)
    ckpt.restore_(ckpt.snapshot(model, [optimizer]), other, [another])
    assert other.bias not in another.state and other.weight in another.state
    for resumed, its in ((model, optimizer), (other, another)):
        step(resumed, its, resumed.weight, resumed.bias)
    assert same(everything(other, [another]), everything(model, [optimizer]))


def test_an_optimizer_with_a_parameter_of_another_model_is_an_error():
    state, (model, optimizers) = ckpt.snapshot(*trained()), trained(seed=1)
    optimizers[1].add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
    before = copy.deepcopy(everything(model, optimizers))
    for call in (ckpt.snapshot, partial(ckpt.restore_, state)):
        with pytest.raises(ValueError, match="^an optimizer has a parameter that is not one of"):
            call(model, optimizers)
    assert same(everything(model, optimizers), before)


class WithExtraState(nn.Linear):
    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, extra):
        self.extra = extra


def with_extra(extra):
    model = WithExtraState(1, 1)
    model.extra = extra
    return model


def test_extra_state_is_copied_and_restored_and_its_types_and_shapes_must_fit():
    extra = {"seen": [torch.arange(3), 3], "names": {"a"}}
    model, other = with_extra(extra), with_extra({"seen": [torch.zeros(3).long(), 0], "names": {1}})
    before, state = copy.deepcopy(extra), ckpt.snapshot(model, [])
    extra["names"].clear(), extra["seen"][0].zero_()
    ckpt.restore_(state, other, [])
    assert same(other.extra, before)
    with pytest.raises(ValueError, match=re.escape("_extra_state is {'seen': ['(3,) torch.int64'")):
        ckpt.restore_(state, with_extra(None), [])


# What does not fit: (change of the state, what the error says)
MISFITS = {
    "no model": (
        lambda s, m: s.pop("model"),
        "0.weight is missing in the checkpoint, (8, 4) torch",
    ),
    "missing": (
        lambda s, m: m.pop("2.weight"),
        "2.weight is missing in the checkpoint, (4, 8) torch",
    ),
    "surplus": (
        lambda s, m: m.update(x=torch.ones(1)),
        "x is (1,) torch.float32 in the checkpoint, m",
    ),
    "shape": (
        lambda s, m: m.update({"2.weight": m["2.weight"].T}),
        "2.weight is (8, 4) torch.float32 in the checkpoint, (4, 8) torch.float32 here",
    ),
    "dtype": (
        lambda s, m: m.update({"0.bias": m["0.bias"].half()}),
        "0.bias is (8,) torch.float16 in",
    ),
    "a list": (
        lambda s, m: m.update({"0.bias": [0.5]}),
        "0.bias is ['a float'] in the checkpoint, (8,)",
    ),
    "optimizers": (lambda s, m: s["optimizers"].pop(), "1 optimizers in the checkpoint, 2 here"),
    "shape of a moment": (
        lambda s, m: moments(s, 0, "0.bias").update(exp_avg=torch.zeros(5)),
        "optimizer state of 0.bias: exp_avg is (5,) torch.float32 in the checkpoint, (8,)",
    ),
    "moments of another parameter": (
        lambda s, m: s["optimizers"][0]["state"].update({"2.weight": moments(s, 1, "2.weight")}),
        "the checkpoint has optimizer state of 2.weight (momentum_buffer), but the same optimizer here does not",
    ),
}


def moments(state, number, name):
    return state["optimizers"][number]["state"][name]


def misfit(kind):
    state = ckpt.snapshot(*trained())
    if state:  # rank 0
        MISFITS[kind][0](state, state["model"])
    return state


@pytest.mark.parametrize("kind", MISFITS)
def test_a_state_that_does_not_fit_is_named_and_the_model_is_unchanged(kind):
    model, optimizers = trained(seed=1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=f"^{re.escape(MISFITS[kind][1])}"):
        ckpt.restore_(misfit(kind), model, optimizers)
    assert same(model.state_dict(), before)


def test_the_cause_is_named_if_an_optimizer_keeps_no_state_or_the_file_is_of_another_script():
    model = nn.Linear(2, 2)
    with_momentum, plain = (torch.optim.SGD(model.parameters(), 0.1, m) for m in (0.9, 0))
    take_step(model, with_momentum, (1, 2))
    state = ckpt.snapshot(model, [with_momentum])
    with pytest.raises(
        ValueError, match=r"of bias \(momentum_buffer\), but .* keeps none: .* momentum"
    ):
        ckpt.restore_(state, model, [plain])
    other = {"model": state["model"], "opt": with_momentum.state_dict(), "epoch": 3}
    with pytest.raises(ValueError, match="0 optimizers in .* the keys model, opt, epoch$"):
        ckpt.restore_(other, model, [with_momentum])
    ckpt.restore_(other, model, [])


class Listed(torch.optim.Optimizer):
    """Has a list of two tensors as a moment, as Shampoo and SOAP have, and a number."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            sums = state.setdefault("sums", [torch.zeros_like(p), torch.zeros(())])
            sums[0] += p.grad
            sums[1] += p.grad.sum()
            state["count"] = state.get("count", 0) + 1
            p -= 0.1 * sums[1] / state["count"]


def linear(**settings):
    return nn.Sequential(nn.Linear(4, 4, **settings), nn.Tanh())


def twice(model):
    return nn.Sequential(model, model)


KINDS = {  # (model, optimizer)
    "SGD": (linear, torch.optim.SGD),
    "Adagrad": (linear, torch.optim.Adagrad),
    "a module with two names": (lambda: twice(linear()), torch.optim.Adam),
    "moments wider than the weights": (partial(linear, dtype=torch.bfloat16), torch.optim.NAdam),
    # With zero gradients, it computes 0 / 0.
    "a step with learning rate 0 changes weights": (linear, partial(torch.optim.Adam, eps=0.0)),
    "moments in lists": (linear, Listed),
    "channels last": (
        lambda: nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last),
        partial(torch.optim.AdamW, fused=True),
    ),
}


def take_step(model, optimizer, shape):
    model(torch.randn(shape, dtype=next(model.parameters()).dtype)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def make(kind, seed):
    """Return a model and an optimizer that have made two steps."""
    torch.manual_seed(seed)
    model = KINDS[kind][0]()
    optimizer = KINDS[kind][1](model.parameters())
    for _ in range(2):
        take_step(model, optimizer, (2, 4, 4, 4))
    return model, [optimizer]


def check_restoring(kind):
    stopped, resumed = make(kind, 0), make(kind, 1)
    state = ckpt.snapshot(*stopped)
    before = copy.deepcopy(state)
    ckpt.restore_(state, *resumed)
    for _ in range(2):  # In the next step, fused optimizers assume the strides of the weights.
        assert same(everything(*resumed), everything(*stopped)), kind
        for model, [optimizer] in (stopped, resumed):
            torch.manual_seed(5)
            take_step(model, optimizer, (2, 4, 4, 4))
    assert same(state, before), kind


@pytest.mark.parametrize("kind", KINDS)
def test_models_and_optimizers_of_any_kind_are_restored_exactly(kind):
    check_restoring(kind)


def restore_on_two_ranks(rank, path):
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
    for kind in KINDS:
        check_restoring(kind)

    # Ranks above 0 ignore their own state, and all ranks raise the same error.
    for kind in ("missing", "optimizers", "shape of a moment", "moments of another parameter"):
        model, optimizers = trained(2, seed=5)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ValueError, match=f"^{re.escape(MISFITS[kind][1])}"):
            ckpt.restore_(misfit(kind), model, optimizers)
        assert same(model.state_dict(), before)
    model, optimizers = trained(2, seed=rank)
    before, state = copy.deepcopy(everything(model, optimizers)), ckpt.snapshot(*trained())
    assert bool(state) == (rank == 0)
    ckpt.restore_({} if rank == 0 else {"model": {}}, model, optimizers)
    assert same(everything(model, optimizers), before)
    other = with_extra([torch.zeros(2, dtype=torch.int16), 0])
    ckpt.restore_(ckpt.snapshot(with_extra([torch.ones(2).short(), 3]), []), other, [])
    assert same(other.extra, [torch.ones(2).short(), 3])

    # FSDP, with the parts of a tensor on both ranks, and with a whole copy on each rank. In that
    # case, the first rank of a group is not rank 0.
    copies = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards"))["shards"]
    for mesh in (init_device_mesh("cpu", (2,)), copies):
        pairs = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            model = fully_shard(nn.Linear(4, 4), mesh=mesh)
            optimizer = torch.optim.Adam(model.parameters())
            take_step(model, optimizer, (8, 4))
            pairs.append((model, [optimizer]))
        ckpt.restore_(ckpt.snapshot(*pairs[0]), *pairs[1])
        stopped, resumed = (everything(*pair) for pair in pairs)
        assert same(resumed, stopped)
        parts = [*resumed[0].values(), *resumed[1][0][0].values()]
        # No part keeps the memory of the whole tensor.
        assert all(part.untyped_storage().nbytes() == part.nbytes for part in parts)
    # Rank 1 has no folder of its own.
    run, here = trained(2, seed=5), build(seed=rank)
    state = ckpt.snapshot(*run, best=0.5)
    if rank == 0:
        ckpt.save(f"{path}/out", state, 7)
    assert ckpt.resume_(f"{path}/out" if rank == 0 else "none", *here) == (7, {"best": 0.5})
    assert same(everything(*here), everything(*run))
    dist.barrier()
    dist.destroy_process_group()


def test_all_ranks_get_the_state_of_rank_0_or_the_same_error(tmp_path):
    torch.multiprocessing.spawn(restore_on_two_ranks, (str(tmp_path),), 2)


def test_resume_continues_the_newest_good_checkpoint_and_the_rate_of_a_scheduler(folder):
    """CosineAnnealingLR computes a rate from the one before, so a wrong one would stay wrong."""

    def run(steps):
        model, optimizers = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        start, more = ckpt.resume_(folder, model, [optimizer], scheduler)
        for step in range(start, steps):
            train_(model, [optimizer], step, step + 1)
            scheduler.step()
        state = ckpt.snapshot(model, [optimizer], scheduler=scheduler.state_dict(), best=1.5)
        return start, more, state

    start, more, unbroken = run(6)
    assert (start, more) == (0, {})
    ckpt.save(folder, run(3)[2], 3)
    Path(folder, f"step-00000009-{'0' * 32}.pt").write_bytes(b"cut off")
    with pytest.warns(UserWarning, match="step-00000009.*does not match the digest.*set aside"):
        start, more, resumed = run(6)
    assert (start, more["best"]) == (3, 1.5) and same(resumed, unbroken)
    assert names(folder)[1].endswith(".damaged")


# ----------------------------------------------------------------------------------- state <-> file


def test_a_checkpoint_is_one_file_that_torch_reads_without_ckpt(tmp_path):
    model, optimizers = trained()
    state = ckpt.snapshot(model, optimizers, step=3, text="ü")
    entry = ckpt.save(tmp_path / "new" / "folder", state, step=3, loss=1.88118)
    (path,) = (tmp_path / "new" / "folder").iterdir()
    loaded = torch.load(path, weights_only=True)
    assert same(loaded, state) and path.name == entry.name
    build(seed=1)[0].load_state_dict(loaded["model"])


def test_a_checkpoint_of_version_0_2_is_listed_and_verified():
    """`python run.py` of commit 6c4e786 wrote it; test_run.py continues it."""
    (entry,) = ckpt.list_checkpoints(VERSION_0_2)
    assert entry[::2] == (20, 2.41)
    state = ckpt.load(VERSION_0_2, entry)
    assert {"model", "optimizers", "step", "config", "vocabulary"} <= state.keys()
    assert all({*optimizer["state"]} <= {*state["model"]} for optimizer in state["optimizers"])


def test_files_have_the_mode_of_any_new_file(folder):
    entry = ckpt.save(folder, some_state(), 1)
    ckpt.lock(folder).close()
    Path(folder, "other").touch()
    modes = {Path(folder, name).stat().st_mode for name in (entry.name, ".lock", "other")}
    assert len(modes) == 1


@pytest.mark.parametrize(
    "step, loss, start",
    [
        (400, 1.88118, "step-00000400-loss-1.88118-"),
        (400, 4.84848484848e-05, "step-00000400-loss-4.84848485e-05-"),
        (400, 1e250, "step-00000400-loss-1e+250-"),
        (0, math.nan, "step-00000000-"),
        (7, None, "step-00000007-"),
        (7, math.inf, "step-00000007-"),
        (7, -0.5, "step-00000007-loss--0.5-"),
        (123456789, 12.0, "step-123456789-loss-12-"),
    ],
)
def test_the_name_has_step_loss_and_sha256_of_the_content(folder, step, loss, start):
    entry = ckpt.save(folder, some_state(), step, loss)
    assert names(folder) == [entry.name]
    digest = hashlib.sha256(Path(folder, entry.name).read_bytes()).hexdigest()
    assert entry.name == f"{start}{digest[:32]}.pt"
    assert entry.step == step and ckpt.list_checkpoints(folder) == [entry]
    assert entry.loss == (float(f"{loss:.9g}") if "loss" in start else math.inf)


def test_checkpoints_are_listed_in_the_order_of_steps_and_other_files_are_not(folder):
    assert ckpt.list_checkpoints(folder) == [] and ckpt.newest(folder) == (None, {})
    saved = save_some(folder, 100_000_000, 99_999_999, 5, 1_000)
    # A crash in save() can leave a second checkpoint of a step, before the older one is deleted.
    saved.append(ckpt.make_entry(5, 1.5, "0" * 32))
    good = saved[-1].name
    others = ["metrics.jsonl", f"{good}.damaged", f"x{good}", f".saving-{good}", f"{good[:-4]}.pt"]
    for name in [*others, good, good.replace("1.5", "1..5")]:
        Path(folder, name).touch()
    assert ckpt.list_checkpoints(folder) == sorted(saved)
    assert ckpt.newest(folder)[0].state["step"] == 100_000_000


def test_the_content_is_made_durable_before_the_file_gets_its_name_and_the_name_afterwards(
    folder, monkeypatch
):
    calls, fsync, replace = [], os.fsync, Path.replace

    def watched_fsync(handle):
        status = os.fstat(handle)
        calls.append("folder" if stat.S_ISDIR(status.st_mode) else status.st_size)
        fsync(handle)

    ckpt.make_folder(folder)
    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(Path, "replace", lambda *names: calls.append("rename") or replace(*names))
    entry = ckpt.save(folder, some_state(1), 1)
    assert calls == [Path(folder, entry.name).stat().st_size, "rename", "folder"]
    ckpt.write_text(folder, "a.txt", "text")
    assert calls[3:] == [4, "rename", "folder"]
    ckpt.set_aside(folder, entry.name)
    assert calls[6:] == ["rename", "folder"]


UNSUPPORTED = "^not supported: w is on the device meta, quantized or sparse"
NO_MODEL = "no state dict under 'model'"


class memory_of_something:
    """Its name must not be taken for a lack of memory."""


@pytest.mark.parametrize(
    "state, message",
    [
        ({}, NO_MODEL),
        ([], NO_MODEL),
        ({"model": torch.ones(3)}, NO_MODEL),
        ({"model": {}, "optimizers": [{}]}, NO_MODEL),
        (
            {"model": {"a": torch.ones(2), "w": torch.tensor([1, math.nan])}},
            "^worthless: w contains NaN$",
        ),
        ({"model": {"w": torch.ones(2, device="meta")}}, UNSUPPORTED),
        ({"model": {"w": torch.eye(2).to_sparse()}}, UNSUPPORTED),
        ({**some_state(), "x": Path("x")}, r"UnpicklingError: GLOBAL pathlib\.[\w.]+$"),
        ({**some_state(), "x": [memory_of_something]}, "^not a checkpoint: torch.load"),
        ({"model": {"w": threading.Lock()}}, "cannot pickle"),
    ],
)
def test_save_refuses_what_could_not_be_used_and_leaves_what_was_there(folder, state, message):
    (old,) = save_some(folder, 1)
    with pytest.raises((ValueError, TypeError), match=message):
        ckpt.save(folder, state, 2)
    assert names(folder) == [old.name]


def test_a_step_below_0_is_refused_before_anything_is_written(folder):
    with pytest.raises(ValueError, match="^step is -1; "):
        save_some(folder, -1)
    assert not os.path.exists(folder)


def test_quantized_weights_are_refused_and_infinities_are_not(folder):
    with warnings.catch_warnings(action="ignore"):  # torch announces another package for these
        quantized = torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8)
    with pytest.raises(ValueError, match=UNSUPPORTED):
        ckpt.save(folder, {"model": {"w": quantized}}, 1)
    mask = {"model": {"mask": torch.tensor([0.0, -math.inf]), "n": torch.tensor(3)}}
    assert same(ckpt.load(folder, ckpt.save(folder, mask, 1)), mask)


# ------------------------------------------------------------------------------------------- damage


class Calls:
    """When it is unpickled, it calls function(*args)."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call[0], self.call[1:]


CODE = Calls(os.mkdir, "was run")


def damaged(change):
    """Return a function that changes the content of a checkpoint, but not its name."""
    return lambda path: path.write_bytes(change(path.read_bytes()))


def replaced(make):
    """Return a function that puts something else in place of a checkpoint."""
    return lambda path: path.unlink() or make(path)


def forged(data):
    """Return a function that replaces a checkpoint by a file whose name has the right digest."""

    def put(path):
        path.unlink()
        digest = hashlib.sha256(data).hexdigest()[:32]
        path.with_name(f"step-00000020-{digest}.pt").write_bytes(data)

    return put


FILE, NOT = "^damaged: the content does not match", "^not a checkpoint: "
BAD = {  # what happens to a checkpoint, and how the reason begins
    "cut to nothing": (damaged(lambda data: b""), FILE),
    "cut by a byte": (damaged(lambda data: data[:-1]), FILE),
    "a byte too long": (damaged(lambda data: data + b"\0"), FILE),
    "zeros": (damaged(lambda data: bytes(len(data))), FILE),
    "another checkpoint": (damaged(lambda _: torch_saved(some_state(5))), FILE),
    "folder": (replaced(os.mkdir), "^not a file"),
    "pipe": (replaced(os.mkfifo), "^not a file"),
    "text": (forged(b"not a checkpoint"), NOT),
    "empty": (forged(b""), NOT),
    "half a zip": (forged(torch_saved(some_state())[:-1000]), NOT),
    "list": (forged(torch_saved([1, 2])), NOT + NO_MODEL),
    "no model": (forged(torch_saved({"weights": {}})), NOT + NO_MODEL),
    "nan": (
        forged(torch_saved({"model": {"w": torch.tensor(math.nan)}})),
        "^worthless: w contains NaN",
    ),
    "code": (forged(torch_saved({"model": {"w": CODE}})), NOT + r"torch.load.*GLOBAL posix\.mkdir"),
    "code beside": (forged(torch_saved({**some_state(), "x": CODE})), NOT),
    "code in a pickle": (forged(pickle.dumps({"model": {"w": CODE}})), NOT),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.filterwarnings("error")
def test_a_bad_checkpoint_is_named_and_the_one_before_it_is_used(
    kind, folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    old, new = save_some(folder, 10, 20)
    assert ckpt.newest(folder)[0].entry == new
    BAD[kind][0](Path(folder, new.name))
    found, rejected = ckpt.newest(folder)
    [(name, reason)] = rejected.items()
    assert found.entry == old and same(found.state, some_state(10))
    assert name == ckpt.list_checkpoints(folder)[1].name and re.search(BAD[kind][1], reason), reason
    assert not Path("was run").exists()

    # If no other checkpoint is left, newest() does not say that there is none.
    Path(folder, old.name).unlink()
    with pytest.raises(ValueError, match=f"^{folder}: no checkpoint can be used; {name}: "):
        ckpt.newest(folder)
    ckpt.set_aside(folder, name)
    assert names(folder) == [f"{name}.damaged"]


def test_the_code_in_the_bad_checkpoints_would_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(CODE))
    assert Path("was run").exists()


UNREADABLE = {  # how it becomes impossible to read a file that may be good, and the error
    "a broken disk": (replaced(lambda path: path.symlink_to("/proc/self/mem")), errno.EIO),
    "another disk is not mounted": (
        replaced(lambda path: path.symlink_to("nowhere")),
        errno.ENOENT,
    ),
    "a link to itself": (replaced(lambda path: path.symlink_to(path.name)), errno.ELOOP),
}


@pytest.mark.parametrize("kind", UNREADABLE)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc/self/mem")
def test_a_checkpoint_that_cannot_be_read_is_an_error_because_it_may_be_good(folder, kind):
    """Otherwise it would be set aside, and the run would continue from an older one."""
    _, new = save_some(folder, 1, 2)
    UNREADABLE[kind][0](Path(folder, new.name))
    with pytest.raises(OSError, match=new.name) as caught:
        ckpt.newest(folder)
    assert caught.value.errno == UNREADABLE[kind][1]


def test_a_lack_of_file_handles_is_not_taken_for_damage(folder):
    saved = save_some(folder, 1, 2)
    limits, lowest = resource.getrlimit(resource.RLIMIT_NOFILE), os.open("/", os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            ckpt.newest(folder, list_checkpoints=lambda _: saved)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's memory")
def test_a_checkpoint_that_does_not_fit_into_memory_is_not_called_damaged(folder):
    """Otherwise newest() would continue from the checkpoint before it."""
    save_some(folder, 1)
    ckpt.save(folder, {"model": {"w": torch.zeros(5 * 10**7)}}, step=2)
    code = """if True:
        import resource, sys
        import ckpt
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 10**8, -1))
        try:
            print(ckpt.newest(sys.argv[1])[0].entry.step)
        except Exception as error:
            print(repr(error))
    """
    command = [sys.executable, "-c", code, folder]
    ran = subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert re.search(b"(?i)memory", ran.stdout), ran


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_not_reported(folder):
    saved = save_some(folder, 10, 20)

    def load(folder, entry):
        if entry == saved[1] and entry.name in names(folder):  # another process prunes
            Path(folder, entry.name).unlink()
            save_some(folder, 30)
        return ckpt.load(folder, entry)

    found, rejected = ckpt.newest(folder, load)
    assert found.entry.step == 30 and rejected == {}


def test_a_sharded_checkpoint_is_refused_and_no_older_one_is_used(folder):
    save_some(folder, 10)
    sharded = ckpt.make_entry(20, 1.5, "0123456789abcdef" * 2, ending="")
    os.mkdir(Path(folder, sharded.name))
    assert ckpt.list_checkpoints(folder)[-1] == sharded
    with pytest.raises(NotImplementedError, match=f"{sharded.name} is a sharded checkpoint"):
        ckpt.newest(folder)


# --------------------------------------------------------------------------------- prune and remove


@pytest.mark.parametrize(
    "keep, losses, left",
    [
        (1, [3.0, 2.0, 1.0], [2]),
        (1, [1.0, 2.0, 3.0], [0, 2]),
        (2, [3.0, 1.0, 2.0, 4.0, 5.0], [1, 3, 4]),
        (2, [None, None, None], [1, 2]),
        (1, [None, 2.0, None, None], [1, 3]),
        (1, [5.0, 1.0, 1.0, 2.0], [2, 3]),  # the later one of two equal losses
        (1, [9.5, 10.5, 11.5], [0, 2]),  # compared as numbers, not as text
        (1, [1e-5, 4.9e-5, 4.8e-5], [0, 2]),  # equal with four decimals
        (5, [3.0, 2.0], [0, 1]),
    ],
)
def test_prune_keeps_the_last_and_the_best(tmp_path, keep, losses, left):
    saved = [ckpt.make_entry(i, loss, f"{i}" * 32) for i, loss in enumerate(losses)]
    others = ["metrics.jsonl", f"{saved[0].name}.damaged"]
    for name in [*others, *(entry.name for entry in saved)]:
        (tmp_path / name).touch()
    ckpt.prune(tmp_path, keep)
    assert names(tmp_path) == sorted([*others, *(saved[i].name for i in left)])


@pytest.mark.parametrize("losses", [(None, None), (1.5, None), (None, 1.5), (1.5, 1.5)])
def test_a_checkpoint_of_the_same_step_is_replaced(folder, losses):
    """For example, if the step is the number of an epoch, which a stop and a resume divide."""
    save_some(folder, 1)
    for seed, loss in enumerate(losses):
        last = ckpt.save(folder, some_state(seed), 2, loss)
        assert [entry.step for entry in ckpt.list_checkpoints(folder)] == [1, 2]
        assert ckpt.newest(folder)[0].entry == last


def test_prune_ignores_a_checkpoint_that_another_process_has_deleted(folder, monkeypatch):
    entries = save_some(folder, 1, 2, 3)
    Path(folder, entries[0].name).unlink()
    monkeypatch.setattr(ckpt, "list_checkpoints", lambda _: entries)
    with warnings.catch_warnings(action="error"):
        ckpt.prune(folder, 1)
    assert names(folder) == [entries[2].name]


def test_a_checkpoint_that_cannot_be_deleted_is_a_warning_and_the_others_are_deleted(
    folder, monkeypatch
):
    """For example, one of another user. A folder is set aside. The new checkpoint is complete."""
    first, second, third = save_some(folder, 0, 1, 2)
    Path(folder, second.name).unlink()
    Path(folder, second.name).mkdir()
    unlink = Path.unlink

    def refuse(path, **how):
        if path.name == first.name:
            raise PermissionError(errno.EPERM, "not yours", f"{path}", None, f"{uuid.uuid4()}")
        unlink(path, **how)

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.warns(UserWarning, match=f"^{first.name} not deleted: not yours$"):
        last = ckpt.save(folder, some_state(3), 3, keep=1)
    assert names(folder) == [first.name, f"{second.name}.damaged", last.name]


def test_keep_below_1_is_an_error_and_deletes_nothing(folder):
    saved = save_some(folder, 0, 1, 2)
    with pytest.raises(ValueError, match="keep is 0; at least 1 checkpoint must be kept"):
        ckpt.save(folder, some_state(3), 3, keep=0)
    assert ckpt.list_checkpoints(folder)[:3] == saved


def test_a_save_does_not_change_the_filters_of_warnings_of_other_threads(folder, monkeypatch):
    """warnings.catch_warnings changes them for the whole process."""
    monkeypatch.setattr(warnings, "catch_warnings", None)
    save_some(folder, 1)


def test_two_jobs_on_one_folder_do_not_delete_the_temporary_files_of_each_other(folder):
    """Each of two processes saves and prunes as fast as it can; each save must succeed."""
    code = """if True:
        import sys, torch, ckpt
        for step in range(int(sys.argv[2]), 60, 2):
            ckpt.save(sys.argv[1], {"model": {"w": torch.ones(300_000)}}, step, None, 1000)
    """
    command = [sys.executable, "-c", code, folder]
    jobs = [subprocess.Popen([*command, f"{i}"], cwd=ROOT) for i in (0, 1)]
    assert [job.wait() for job in jobs] == [0, 0]
    assert [entry.step for entry in ckpt.list_checkpoints(folder)] == list(range(60))


# --------------------------------------------------------------------------------- writes that fail


@contextmanager
def largest_file(size):
    """Let writing past `size` bytes be an OSError, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", [0, 0.0001, 0.5, 0.999])
def test_a_full_disk_is_an_oserror_and_leaves_what_was_there(folder, room):
    (old,) = save_some(folder, 1)
    ckpt.write_text(folder, "a.txt", "old\n")
    state = {"model": {"a": torch.ones(50_000), "b": torch.ones(50_000)}}
    with largest_file(room * 400_000), pytest.raises(OSError):
        ckpt.save(folder, state, 2)
    with largest_file(room * 14), pytest.raises(OSError, match="File too large"):
        ckpt.write_text(folder, "a.txt", "a longer line\n")
    with largest_file(4), pytest.raises(OSError, match="File too large"):
        ckpt.append_text(folder, "a.txt", "a longer line\n")
    assert names(folder) == ["a.txt", old.name] and ckpt.read_text(folder, "a.txt") == "old\n"
    assert ckpt.save(folder, state, 2).step == 2  # now there is room again


@pytest.mark.parametrize("owner, call", [(os, "fsync"), (Path, "replace")])
def test_an_error_of_the_disk_leaves_what_was_there(folder, monkeypatch, owner, call):
    (old,) = save_some(folder, 1)

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(owner, call, fail)
    for write in (partial(save_some, folder, 2), partial(ckpt.write_text, folder, "a", "b")):
        with pytest.raises(OSError, match="Input/output error"):
            write()
    assert names(folder) == [old.name]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EBADF])
def test_a_file_system_that_cannot_sync_folders_costs_one_warning(folder, monkeypatch, number):
    """Otherwise no save would count as written, and no old checkpoint would be deleted."""
    fsync = os.fsync

    def refuse(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", refuse)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        for step in (1, 2):
            last = ckpt.save(folder, some_state(step), step, keep=1)
    assert names(folder) == [last.name]
    assert len(warned) == 1 and "a power failure" in f"{warned[0].message}"


@pytest.mark.parametrize("name", ["s3://bucket/out", Path("s3://bucket/out"), "git+ssh:/a", ""])
def test_a_url_and_an_empty_name_are_refused_and_nothing_is_made(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"is empty or a URL; for URLs see extras/remote\.py"):
        save_some(name, 1)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["a:/b", "new/data:/b"])
def test_a_colon_in_a_name_does_not_make_it_a_url(name, tmp_path):
    save_some(f"{tmp_path}/{name}", 1)
    assert len(names(tmp_path / name)) == 1


def test_the_current_folder_can_be_named_by_a_dot(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved = save_some(".", 1)
    assert ckpt.list_checkpoints(".") == saved


def test_a_new_folder_is_made_durable_from_the_top(tmp_path, monkeypatch):
    synced, fsync_folder = [], ckpt.fsync_folder
    monkeypatch.setattr(
        ckpt, "fsync_folder", lambda path: synced.append(path) or fsync_folder(path)
    )
    handles = len(os.listdir("/dev/fd"))
    for _ in range(2):
        ckpt.make_folder(str(tmp_path / "a" / "b"))
        assert (tmp_path / "a" / "b").is_dir() and synced == [tmp_path, tmp_path / "a"]
    assert len(os.listdir("/dev/fd")) == handles


def test_a_folder_that_another_process_makes_at_the_same_time_is_no_error(tmp_path, monkeypatch):
    is_dir = Path.is_dir

    def too_early(path):
        found = is_dir(path)
        with suppress(FileExistsError):  # Another process makes it when this one has just looked.
            os.mkdir(path)
        return found

    monkeypatch.setattr(Path, "is_dir", too_early)
    ckpt.make_folder(str(tmp_path / "a" / "b"))
    assert os.path.isdir(tmp_path / "a" / "b")


def test_text_is_written_appended_and_read(folder):
    ckpt.make_folder(folder)
    assert ckpt.read_text(folder, "a.txt") == ""
    ckpt.append_text(folder, "a.txt", "ä\n")
    ckpt.append_text(folder, "a.txt", "b\n")
    assert ckpt.read_text(folder, "a.txt") == "ä\nb\n"
    ckpt.write_text(folder, "a.txt", "new\n")
    assert ckpt.read_text(folder, "a.txt") == "new\n" and names(folder) == ["a.txt"]
    Path(folder, "a.txt").write_bytes(b"\xff")
    assert ckpt.read_text(folder, "a.txt") == "\ufffd"
    # After a part of a line, as a full disk leaves it, the next line begins at its own beginning.
    ckpt.append_text(folder, "a.txt", "c\n")
    assert ckpt.read_text(folder, "a.txt") == "\ufffd\nc\n"


# --------------------------------------------------------------------------------------------- lock


@pytest.fixture
def holder(folder):
    """Start a process that has locked the folder."""
    code = "import ckpt, sys; kept = ckpt.lock(sys.argv[1]); print('locked', flush=True); input()"
    ckpt.make_folder(folder)
    ckpt.write_text(folder, ".lock", "x" * 500)  # a longer text of an earlier holder
    command, pipe = [sys.executable, "-c", code, folder], subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe) as process:
        assert process.stdout.readline() == b"locked\n"
        yield process
        process.kill()


def test_lock_names_the_holder_and_is_free_when_the_holder_is_killed(folder, holder):
    host, temporary = re.escape(socket.gethostname()), Path(folder, f"{ckpt.TEMPORARY}12345")
    temporary.touch()
    for _ in range(2):  # the text is still there after the first attempt
        expected = (
            f"^in use by another run: {host}, pid {holder.pid}, since 20\\d\\d-[-\\d]+ [:\\d]+$"
        )
        with pytest.raises(BlockingIOError, match=expected):
            ckpt.lock(folder, timeout=0.1)
    assert temporary.exists()
    threading.Timer(0.5, holder.kill).start()
    begun = time.monotonic()
    with ckpt.lock(folder, timeout=30.0):  # it waits for a process that is just ending
        assert time.monotonic() - begun < 25
        text = ckpt.read_text(folder, ".lock")
        assert text.count("pid") == 1 and f"pid {os.getpid()}," in text and not temporary.exists()


def test_lock_deletes_temporary_files_and_folders_and_nothing_else(folder):
    (entry,) = save_some(folder, 1)
    Path(folder, f"{ckpt.TEMPORARY}12345").touch()
    shutil.copytree(folder, Path(folder, f"{ckpt.TEMPORARY}400"))  # of a sharded checkpoint
    Path(folder, "metrics.jsonl").touch()
    assert ckpt.newest(folder)[0].entry == entry
    with ckpt.lock(folder):
        assert names(folder) == sorted([".lock", "metrics.jsonl", entry.name])


@pytest.mark.parametrize("change", ["deleted", "replaced", "locked"])
def test_a_save_writes_nothing_into_a_folder_that_is_no_longer_that_of_its_lock(folder, change):
    """Otherwise a run that was started in the new folder would continue from the weights of this one."""
    ckpt.make_folder(folder)
    with ckpt.lock(folder) as held:
        assert ckpt.save(folder, some_state(1), 1, held=held).step == 1
        shutil.rmtree(folder)
        if change != "deleted":
            save_some(folder, 5)
        if change == "locked":
            ckpt.lock(folder).close()
        before = names(folder) if change != "deleted" else None
        for call in (
            partial(ckpt.save, folder, some_state(2), 2),
            partial(ckpt.check_lock, folder),
        ):
            with pytest.raises(OSError, match=f"^{folder}: .*deleted or replaced"):
                call(held=held)
        assert (names(folder) if os.path.exists(folder) else None) == before


def test_lock_is_none_where_the_file_system_has_no_locks(tmp_path, monkeypatch):
    (tmp_path / f"{ckpt.TEMPORARY}12345").touch()

    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(ckpt.fcntl, "flock", refuse)
    with pytest.warns(
        UserWarning, match="^nothing keeps a second run out of .*: No locks available$"
    ):
        held = ckpt.lock(tmp_path)
    assert held is None and f"{ckpt.TEMPORARY}12345" in names(tmp_path)
    ckpt.check_lock(tmp_path, held)
    assert ckpt.save(tmp_path, some_state(), 1, held=held).step == 1


def test_on_windows_there_are_no_locks_and_folders_are_not_synced(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    spec = importlib.util.spec_from_file_location("ckpt_on_windows", ckpt.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    entry = module.save(folder, some_state(), 1)
    assert module.lock(folder) is None and names(folder) == [entry.name]
    monkeypatch.setattr(os, "open", None)
    with monkeypatch.context() as patch:
        patch.setattr(os, "name", "nt")
        ckpt.fsync_folder(folder)
    with pytest.raises(TypeError):
        ckpt.fsync_folder(folder)
