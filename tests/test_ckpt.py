"""Tests of ckpt: what is read is what was saved, bit for bit, and what was damaged is never used."""

import collections
import copy
import errno
import hashlib
import io
import math
import os
import pickle
import re
import resource
import socket
import stat
import subprocess
import sys
import textwrap
import threading
import time
import uuid
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import run_on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map_only

import ckpt

torch.set_num_threads(1)  # the tensors are tiny, and threads that wait for a shared core are slow
ROOT = Path(ckpt.__file__).parent


def build(seed=0, lr=0.1):
    """Return a model with matrices, vectors, float and integer buffers, and its two optimizers."""
    torch.manual_seed(seed)
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4, bias=False)
    model = nn.Sequential(*layers)
    matrices, vectors = ([p for p in model.parameters() if p.ndim == n] for n in (2, 1))
    groups = [
        {"params": vectors[:1], "weight_decay": 0.3},
        {"params": vectors[1:], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=lr, fused=True)
    return model, [adamw, torch.optim.Muon(matrices, lr=lr)]


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


def tensors_in(value):
    """Return the tensors in nested dicts and lists; of a DTensor, the shard of this rank."""
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return [getattr(leaf, "_local_tensor", leaf) for leaf in leaves]


def everything(model, optimizers):
    return [model.state_dict(), [optimizer.state_dict()["state"] for optimizer in optimizers]]


def settings(optimizers):
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [{**group, "params": len(group["params"])} for group in groups]


def same(a, b):
    """Return whether two nests of builtins and tensors have equal types, values and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        equal_kind = a.dtype == b.dtype and a.shape == b.shape
        flat = (tensor.reshape(-1).view(torch.uint8) for tensor in (a, b))
        return equal_kind and torch.equal(*flat)
    return a == b


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


def flip_(path, at, bit=0):
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def put_named(folder, step, data):
    """Write a file whose name has the digest of its content, and return the name."""
    name = f"step-{step:08d}-{hashlib.sha256(data).hexdigest()[:32]}.pt"
    Path(folder, name).write_bytes(data)
    return name


def some_state(step=0):
    return {"model": {"w": torch.full((100,), float(step))}, "step": step}


def torch_saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


# ------------------------------------------------------------------- model and optimizers <-> state


def test_snapshot_has_the_names_of_the_bare_model_and_what_was_added():
    model, optimizers = trained()
    state = ckpt.snapshot(model, optimizers, step=3, config={"lr": 0.1})
    assert list(state) == ["model", "optimizers", "step", "config"]
    assert same(dict(state["model"]), dict(model.state_dict()))
    assert state["step"] == 3 and state["config"] == {"lr": 0.1}
    kept = {name for optimizer in state["optimizers"] for name in optimizer["state"]}
    assert kept == {name for name, _ in model.named_parameters()}


def test_snapshot_does_not_change_when_training_continues():
    model, optimizers = trained()
    state = ckpt.snapshot(model, optimizers)
    before = copy.deepcopy(state)
    train_(model, optimizers, 3, 5)
    assert same(state, before)
    assert not same(ckpt.snapshot(model, optimizers), before)


def test_snapshot_shares_no_memory_with_the_training():
    model, optimizers = trained()
    moments = [optimizer.state for optimizer in optimizers]
    live = {t.untyped_storage().data_ptr() for t in tensors_in([model.state_dict(), *moments])}
    copies = {t.untyped_storage().data_ptr() for t in tensors_in(ckpt.snapshot(model, optimizers))}
    assert len(live) > 10 and len(copies) == len(live) and not live & copies


def test_snapshot_copies_a_learning_rate_that_is_a_tensor():
    model, rate = torch.nn.Linear(2, 2), torch.tensor(0.5)
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = ckpt.snapshot(model, [optimizer])
    rate.zero_()
    assert state["optimizers"][0]["param_groups"][0]["lr"] == 0.5


def test_snapshots_do_not_disturb_the_training():
    plain, watched = trained(6), trained(1)
    for step in range(1, 6):
        ckpt.snapshot(*watched)
        train_(*watched, step, step + 1)
    assert same(everything(*plain), everything(*watched))


def test_snapshot_before_the_first_step_does_not_disturb_the_training():
    plain, watched = trained(3), build()
    assert ckpt.snapshot(*watched)["optimizers"] == [{}, {}]
    train_(*watched, 0, 3)
    assert same(everything(*plain), everything(*watched))


def test_training_from_a_checkpoint_is_bitwise_equal_to_training_without_a_stop(folder):
    straight, stopped, resumed = trained(7), trained(3), build(seed=1)
    ckpt.save(folder, ckpt.snapshot(*stopped), step=3)
    found, rejected = ckpt.newest(folder)
    ckpt.restore_(found.state, *resumed)
    assert rejected == {} and same(everything(*resumed), everything(*stopped))
    train_(*resumed, 3, 7)
    assert same(everything(*resumed), everything(*straight))


def test_restored_optimizers_keep_their_own_settings():
    model, optimizers = build(seed=1, lr=0.7)
    for optimizer in optimizers:
        optimizer.param_groups[0]["weight_decay"] = 0.9
    before = settings(optimizers)
    ckpt.restore_(ckpt.snapshot(*trained(lr=0.1)), model, optimizers)
    assert settings(optimizers) == before
    assert all(optimizer.state for optimizer in optimizers)


def test_settings_in_the_checkpoint_of_another_version_of_torch_do_no_harm():
    stopped, (model, optimizers) = trained(), build(seed=1)
    before = settings(optimizers)
    state = ckpt.snapshot(*stopped)
    for group in state["optimizers"][0]["param_groups"]:
        group["of_the_future"] = group.pop("amsgrad")
    ckpt.restore_(state, model, optimizers)
    assert settings(optimizers) == before
    assert same(everything(model, optimizers), everything(*stopped))


def test_moments_are_restored_by_name_when_the_parameter_groups_differ():
    model, optimizers = trained()
    other = build(seed=1)[0]
    vectors, matrices = ([p for p in other.parameters() if p.ndim == n] for n in (1, 2))
    one_group = torch.optim.AdamW(reversed(vectors), lr=0.7, weight_decay=0.1, fused=True)
    ckpt.restore_(ckpt.snapshot(model, optimizers), other, [one_group, torch.optim.Muon(matrices)])
    for p, q in zip(model.parameters(), other.parameters()):
        if p.ndim == 1:
            assert same(optimizers[0].state[p], one_group.state[q])
    assert len(one_group.state) == 3 and one_group.param_groups[0]["weight_decay"] == 0.1


def test_in_a_group_the_names_have_no_prefix_of_ddp_and_training_resumes(group_of_one):
    straight, stopped, resumed = (build(seed) for seed in (0, 0, 1))
    wrapped = [(DistributedDataParallel(model), o) for model, o in (straight, stopped, resumed)]
    train_(*wrapped[0], 0, 7)
    train_(*wrapped[1], 0, 3)
    state = ckpt.snapshot(*wrapped[1])
    assert list(state["model"]) == list(stopped[0].state_dict())
    ckpt.restore_(state, *wrapped[2])
    train_(*wrapped[2], 3, 7)
    assert same(everything(*resumed), everything(*straight))


def test_a_sharded_model_is_copied_and_restored(group_of_one):
    """With one rank, the whole tensor that torch gathers shares memory with the shard."""
    model = fully_shard(nn.Linear(4, 8), mesh=init_device_mesh("cpu", (1,)))
    optimizers = [torch.optim.AdamW(model.parameters())]
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizers[0].step()
        state = ckpt.snapshot(model, optimizers)
        before = copy.deepcopy(state)
    with torch.no_grad():
        for tensor in tensors_in([dict(model.named_parameters()), optimizers[0].state]):
            tensor.fill_(7.0)
    assert len(before["optimizers"][0]["state"]) == 2 and same(state, before)
    ckpt.restore_(state, model, optimizers)
    assert same(ckpt.snapshot(model, optimizers), before)


def test_a_model_in_torch_compile_is_saved_and_restored_by_its_bare_names():
    model, optimizers = trained()
    state = ckpt.snapshot(torch.compile(model), optimizers)
    assert list(state["model"]) == list(model.state_dict())
    other, others = build(seed=1)
    ckpt.restore_(state, torch.compile(other), others)
    assert same(everything(other, others), everything(model, optimizers))


def test_restoring_a_state_from_before_the_first_step_deletes_the_moments():
    model, optimizers = build()
    start = ckpt.snapshot(model, optimizers)
    train_(model, optimizers, 0, 3)
    ckpt.restore_(start, model, optimizers)
    train_(model, optimizers, 0, 3)
    assert same(everything(model, optimizers), everything(*trained(3)))


def test_a_buffer_with_infinities_such_as_an_attention_mask_is_restored(folder):
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    model.register_buffer("mask", torch.tensor([[0.0, -math.inf], [0.0, 0.0]]))
    other.register_buffer("mask", torch.zeros(2, 2))
    ckpt.save(folder, ckpt.snapshot(model, []), 1)
    ckpt.restore_(ckpt.newest(folder)[0].state, other, [])
    assert same(other.state_dict(), model.state_dict())


def test_tied_weights_stay_tied_and_are_stored_once(folder):
    model = nn.Sequential(nn.Embedding(500, 30), nn.Linear(30, 500, bias=False))
    model[1].weight = model[0].weight
    state = ckpt.snapshot(model, [])
    assert list(state["model"]) == ["0.weight", "1.weight"]
    assert len({weight.data_ptr() for weight in state["model"].values()}) == 1
    assert Path(folder, ckpt.save(folder, state, 1).name).stat().st_size < 1.5 * 500 * 30 * 4
    with torch.no_grad():
        model[0].weight.zero_()
    ckpt.restore_(state, model, [])
    assert model[1].weight is model[0].weight
    assert same(model[0].weight.detach(), state["model"]["0.weight"])


def test_state_does_not_change_when_training_continues_after_a_restore():
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


def test_restore_works_while_there_are_gradients():
    stopped, (model, optimizers) = trained(), build(seed=1)
    model(torch.ones(2, 4)).sum().backward()
    ckpt.restore_(ckpt.snapshot(*stopped), model, optimizers)
    assert same(everything(model, optimizers), everything(*stopped))


def test_a_parameter_that_never_had_a_gradient_has_no_moments_after_a_restore():
    def unused_bias():
        model = nn.Linear(2, 2)
        return model, [torch.optim.AdamW(model.parameters())]

    def step(model, optimizer, *parameters):
        sum(parameter.sum() for parameter in parameters).backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizers = unused_bias()
    step(model, *optimizers, model.weight)
    other, others = unused_bias()
    ckpt.restore_(ckpt.snapshot(model, optimizers), other, others)
    assert same(others[0].state[other.weight], optimizers[0].state[model.weight])
    assert other.bias not in others[0].state
    for resumed, optimizer in ((model, *optimizers), (other, *others)):
        step(resumed, optimizer, resumed.weight, resumed.bias)
    assert same(everything(other, others), everything(model, optimizers))


def test_restore_deletes_the_gradients():
    model, optimizers = trained()
    model(torch.ones(2, 4)).sum().backward()
    ckpt.restore_(ckpt.snapshot(model, optimizers), model, optimizers)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_optimizer_with_moments_of_some_parameters_gets_those_of_all():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizers, others = ([torch.optim.AdamW(m.parameters())] for m in (model, other))
    (model.weight.sum() + model.bias.sum()).backward()
    other.weight.sum().backward()
    optimizers[0].step()
    others[0].step()
    ckpt.restore_(ckpt.snapshot(model, optimizers), other, others)
    assert same(everything(other, others), everything(model, optimizers))


def test_an_optimizer_with_a_parameter_of_another_model_is_an_error():
    state, (model, optimizers) = ckpt.snapshot(*trained()), trained(seed=1)
    optimizers[1].add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
    before = copy.deepcopy(everything(model, optimizers))
    for call in (ckpt.snapshot, partial(ckpt.restore_, state)):
        with pytest.raises(ValueError, match="^an optimizer has a parameter that is not one of"):
            call(model, optimizers)
    assert same(everything(model, optimizers), before)


class WithConstant(torch.nn.Linear):
    """Its extra state is always the same tensor, which overlaps in memory."""

    constant, received = torch.zeros(1).expand(3), None

    def get_extra_state(self):
        return self.constant

    def set_extra_state(self, state):
        self.received = state


def test_restore_does_not_change_the_tensor_that_a_module_returned_as_extra_state():
    model = WithConstant(2, 2)
    saved = {**model.state_dict(), "_extra_state": torch.ones(3)}
    ckpt.restore_({"model": saved}, model, [])
    assert model.received.tolist() == [1.0] * 3 and model.constant.tolist() == [0.0] * 3


@pytest.mark.parametrize("trained_before", [False, True])
def test_an_empty_state_changes_nothing(trained_before):
    model, optimizers = trained() if trained_before else build()
    before = copy.deepcopy(everything(model, optimizers))
    ckpt.restore_({}, model, optimizers)
    assert same(everything(model, optimizers), before)


def state_of_another_model(change):
    """Return a snapshot with something that does not fit; change: a key of MISFITS."""
    state = ckpt.snapshot(*trained())
    if not state:  # not rank 0
        return state
    if change == "missing":
        del state["model"]["3.weight"]
    elif change == "no model":
        del state["model"]
    elif change == "fewer optimizers":
        state["optimizers"].pop()
    elif change == "moment of another shape":
        state["optimizers"][0]["state"]["0.bias"]["exp_avg"] = torch.zeros(5)
    elif change == "moment of another dtype":
        moments = state["optimizers"][0]["state"]["0.bias"]
        moments["exp_avg"] = moments["exp_avg"].double()
    elif change == "moments of another optimizer":
        moments = state["optimizers"][1]["state"]["3.weight"]
        moments["exp_avg"] = moments.pop("momentum_buffer")
    elif change == "moments of another parameter":
        state["optimizers"][0]["state"]["3.weight"] = state["optimizers"][1]["state"]["3.weight"]
    else:
        state["model"]["3.weight" if change == "shape" else "4.weight"] = torch.zeros(5)
    return state


MISFITS = {
    "missing": "3.weight is missing in",
    "no model": "0.weight is missing in",
    "surplus": "4.weight is (5,) torch.float32 in the checkpoint, missing",
    "shape": "3.weight is (5,)",
    "fewer optimizers": "1 optimizers in the checkpoint, 2 here",
    "moment of another shape": "optimizer state of 0.bias: exp_avg is (5,)",
    "moment of another dtype": "optimizer state of 0.bias: exp_avg is (8,) torch.float64",
    "moments of another optimizer": "optimizer state of 3.weight: momentum_buffer is missing",
    "moments of another parameter": "the checkpoint has optimizer state of 3.weight, but the same optimizer here does not",
}


@pytest.mark.parametrize("change", MISFITS)
def test_a_state_that_does_not_fit_is_named_and_the_model_is_unchanged(change):
    model, optimizers = trained(seed=1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=re.escape(MISFITS[change])):
        ckpt.restore_(state_of_another_model(change), model, optimizers)
    assert same(model.state_dict(), before)


class Listed(torch.optim.Optimizer):
    """Has a list of two tensors as a moment, as Shampoo and SOAP have, and a number."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                sums = state.setdefault("sums", [torch.zeros(len(p)), torch.zeros(())])
                sums[0] += p.grad.flatten(1).sum(1) if p.ndim > 1 else p.grad
                sums[1] += p.grad.sum()
                state["count"] = state.get("count", 0) + 1
                p -= group["lr"] * sums[1] / state["count"]


def unusual(case, seed):
    """Return a model and an optimizer that have made two steps."""
    torch.manual_seed(seed)
    model, shape = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), (8, 4)
    optimizer = torch.optim.Adam(model.parameters())
    if case == "a module with two names":
        model = nn.Sequential(model, model)
    elif case == "moments that are wider than the weights":
        optimizer = torch.optim.NAdam(model.bfloat16().parameters())
    elif case == "a step with the learning rate 0 changes the weights":
        optimizer = torch.optim.Adam(model.parameters(), eps=0.0)  # 0 / 0 with zero gradients
    elif case == "moments in lists":
        optimizer = Listed(model.parameters())
    elif case == "moments in another order in memory":
        model, shape = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), (2, 3, 8, 8)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        take_step(model, optimizer, shape)
    return model, [optimizer]


def take_step(model, optimizer, shape):
    model(torch.randn(shape, dtype=next(model.parameters()).dtype)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


UNUSUAL = [
    "a module with two names",
    "moments that are wider than the weights",
    "a step with the learning rate 0 changes the weights",
    "moments in lists",
    "moments in another order in memory",
]


def assert_same_training(one, other, shape):
    """Check that both are equal, and still equal after another step: fused optimizers assume that
    moments and weights have the same strides.
    """
    assert same(everything(*one), everything(*other))
    for model, [optimizer] in (one, other):
        torch.manual_seed(5)
        take_step(model, optimizer, shape)
    assert same(everything(*one), everything(*other))


@pytest.mark.parametrize("case", UNUSUAL)
def test_unusual_models_and_optimizers_are_restored_exactly(case):
    stopped, resumed = unusual(case, 0), unusual(case, 1)
    state = ckpt.snapshot(*stopped)
    before = copy.deepcopy(state)
    ckpt.restore_(state, *resumed)
    assert_same_training(resumed, stopped, (2, 3, 8, 8) if "order" in case else (8, 4))
    assert same(state, before)  # shares no memory
    ckpt.restore_(ckpt.snapshot(*resumed), *unusual(case, 2))  # the dtypes still fit


@pytest.mark.parametrize(
    "sums, text",
    [
        ([torch.ones(4)], "sums is ['(4,) torch.float32'] in the checkpoint, ['(4,)"),
        ([torch.ones(5), torch.ones(())], "sums is ['(5,) torch.float32', '() torch.float32'] in"),
        (torch.ones(4), "sums is (4,) torch.float32 in the checkpoint, ['(4,)"),
    ],
)
def test_a_moment_in_a_list_that_does_not_fit_is_an_error(sums, text):
    model, optimizers = unusual("moments in lists", 0)
    state = ckpt.snapshot(model, optimizers)
    state["optimizers"][0]["state"]["0.bias"]["sums"] = sums
    with pytest.raises(ValueError, match=f"optimizer state of 0.bias: {re.escape(text)}"):
        ckpt.restore_(state, model, optimizers)


class OwnLoading(torch.optim.Adam):
    def load_state_dict(self, state_dict):
        hooks = self._optimizer_load_state_dict_pre_hooks
        self._optimizer_load_state_dict_pre_hooks = {}
        super().load_state_dict(state_dict)
        self._optimizer_load_state_dict_pre_hooks = hooks


def test_an_optimizer_that_loads_its_state_without_torchs_hooks_is_restored():
    model = nn.Linear(2, 2)
    optimizer = OwnLoading(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before = copy.deepcopy(everything(model, [optimizer]))
    ckpt.restore_(ckpt.snapshot(model, [optimizer]), model, [optimizer])
    assert same(everything(model, [optimizer]), before)


def restore_unusual_in_a_group(path):
    dist.init_process_group(
        "gloo", init_method=f"file://{path}/store", rank=int(os.environ["RANK"]), world_size=2
    )
    for case in UNUSUAL:
        stopped, resumed = unusual(case, 0), unusual(case, 1)
        state = ckpt.snapshot(*stopped)
        ckpt.restore_({} if dist.get_rank() else state, *resumed)
        assert_same_training(resumed, stopped, (2, 3, 8, 8) if "order" in case else (8, 4))
    for extra in EXTRA_STATES:
        model = WithExtraState(None)
        ckpt.restore_(ckpt.snapshot(WithExtraState(extra), []), model, [])
        assert same(model.extra, extra), model.extra
    # FSDP in groups of one rank: the first rank of each group is not rank 0.
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards"))["shards"]
    pairs = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = fully_shard(nn.Linear(4, 4), mesh=mesh)
        optimizer = torch.optim.Adam(model.parameters())
        take_step(model, optimizer, (8, 4))
        pairs.append((model, [optimizer]))
    ckpt.restore_({} if dist.get_rank() else ckpt.snapshot(*pairs[0]), *pairs[1])
    stopped, resumed = (
        tree_map_only(DTensor, DTensor.to_local, everything(*pair)) for pair in pairs
    )
    assert same(resumed, stopped)
    # With real shards, no part keeps the memory of the whole tensor.
    model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.Adam(model.parameters())
    take_step(model, optimizer, (8, 4))
    before = copy.deepcopy(everything(model, [optimizer]))
    ckpt.restore_(ckpt.snapshot(model, [optimizer]), model, [optimizer])
    after = everything(model, [optimizer])
    assert same(*(tree_map_only(DTensor, DTensor.to_local, each) for each in (after, before)))
    parts = tensors_in(after)
    assert len(parts) == 8 and all(t.untyped_storage().nbytes() == t.nbytes for t in parts)
    dist.destroy_process_group()
    time.sleep(0.1)  # see restore_in_a_group


def test_unusual_models_and_optimizers_are_restored_exactly_on_all_ranks(tmp_path):
    run_on_ranks(restore_unusual_in_a_group, 2, str(tmp_path))


def restore_in_a_group(path):
    dist.init_process_group(
        "gloo", init_method=f"file://{path}/store", rank=int(os.environ["RANK"]), world_size=2
    )
    rank = dist.get_rank()
    for change in RESTORED_IN_A_GROUP:
        straight, stopped = trained(4), trained(3)
        fits = ckpt.snapshot(*stopped)
        state = state_of_another_model(change) if change in MISFITS else fits
        model, optimizers = trained(2, seed=5)
        before = copy.deepcopy(everything(model, optimizers))
        if rank or change == "nothing":
            state = fits if rank and change == "nothing" else {}
        try:
            ckpt.restore_(state, model, optimizers)
            after = everything(model, optimizers)
            result = "restored" if same(after, everything(*stopped)) else "?"
            result = "unchanged" if same(after, before) else result
            train_(model, optimizers, 3, 4)
            if result == "restored" and not same(after, everything(*straight)):
                result = "restored, but the next step differs"
        except ValueError as error:
            result = f"{error}"
        Path(path, f"{change} {rank}").write_text(result)
    dist.destroy_process_group()
    time.sleep(0.1)  # otherwise the process can abort when it ends: see ddp_setup.process_group


RESTORED_IN_A_GROUP = {
    "all": "restored",
    "nothing": "unchanged",
    "missing": MISFITS["missing"],
    "fewer optimizers": MISFITS["fewer optimizers"],
    "moment of another shape": MISFITS["moment of another shape"],
    "moments of another parameter": MISFITS["moments of another parameter"],
}


def restore_channels_last(path):
    """Both ranks restore the state of rank 0, and write what they have then."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
    torch.manual_seed(rank)
    model = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3, 5, 5)).sum().backward()
    optimizer.step()
    state = ckpt.snapshot(model, [optimizer])
    if rank == 0:
        ckpt.save(path, state, 1)
    ckpt.restore_(state, model, [optimizer])
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    torch.save([model.state_dict(), optimizer.state_dict()["state"]], f"{path}/{rank}")
    dist.destroy_process_group()
    time.sleep(0.1)  # as above


def test_all_ranks_get_the_values_of_tensors_in_channels_last(tmp_path):
    run_on_ranks(restore_channels_last, 2, str(tmp_path))
    first, second = (torch.load(tmp_path / f"{rank}") for rank in (0, 1))
    saved = ckpt.newest(str(tmp_path))[0].state
    assert same(dict(first[0]), dict(saved["model"]))
    assert same([dict(first[0]), first[1]], [dict(second[0]), second[1]])


def test_all_ranks_get_the_state_of_rank_0_or_the_same_error(tmp_path):
    run_on_ranks(restore_in_a_group, 2, str(tmp_path))
    for change, expected in RESTORED_IN_A_GROUP.items():
        results = [(tmp_path / f"{change} {rank}").read_text() for rank in (0, 1)]
        assert results[0] == results[1] and results[0].startswith(expected), (change, results)
        assert "differs" not in results[0]


def test_a_state_fits_the_model_that_it_is_from():
    state = ckpt.snapshot(*trained())
    ckpt.check_same(state["model"], build(seed=1)[0].state_dict())


float32 = "torch.float32"


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("3.weight", None, f"3.weight is missing in the checkpoint, (4, 8) {float32} here"),
        (
            "1.running_mean",
            None,
            f"1.running_mean is missing in the checkpoint, (8,) {float32} here",
        ),
        (
            "4.bias",
            lambda _: torch.ones(1),
            f"4.bias is (1,) {float32} in the checkpoint, missing here",
        ),
        (
            "3.weight",
            torch.t,
            f"3.weight is (8, 4) {float32} in the checkpoint, (4, 8) {float32} here",
        ),
        (
            "0.bias",
            torch.Tensor.half,
            f"0.bias is (8,) torch.float16 in the checkpoint, (8,) {float32} here",
        ),
        (
            "0.bias",
            lambda w: w.tolist(),
            f"0.bias is {['a float'] * 8} in the checkpoint, (8,) {float32} here",
        ),
    ],
)
def test_check_same_names_the_difference(name, change, message):
    model, optimizers = trained()
    state = ckpt.snapshot(model, optimizers)
    value = state["model"].pop(name, None)
    if change:
        state["model"][name] = change(value)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ckpt.check_same(state["model"], model.state_dict())


@pytest.mark.parametrize("extra", [{1, 2}, collections.Counter("ab"), bytearray(b"ab")], ids=repr)
def test_a_snapshot_does_not_change_with_the_extra_state_of_the_model(extra):
    before = copy.deepcopy(extra)
    state = ckpt.snapshot(WithExtraState(extra), [])
    extra.clear()
    assert state["model"]["_extra_state"] == before


class WithExtraState(nn.Module):
    """A module with a value that is no tensor until it is first used."""

    def __init__(self, extra):
        super().__init__()
        self.weight, self.extra = nn.Parameter(torch.ones(2)), extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, extra):
        self.extra = extra


EXTRA_STATES = (
    {"seen": 3},
    torch.arange(5),
    {"seen": [torch.arange(5), 3]},
    torch.ones(2, dtype=torch.int16),
)


@pytest.mark.parametrize("extra", EXTRA_STATES)
def test_extra_state_may_have_another_type_in_a_new_model(extra):
    model = WithExtraState(None)
    ckpt.restore_(ckpt.snapshot(WithExtraState(extra), []), model, [])
    assert same(model.extra, extra)
    with pytest.raises(
        ValueError, match="^_extra_state is missing in the checkpoint, present here"
    ):
        ckpt.check_same({"weight": model.weight}, model.state_dict())


def test_a_model_without_parameters_can_be_restored():
    stopped, resumed = (nn.BatchNorm1d(3, affine=False, dtype=torch.float64) for _ in range(2))
    stopped(torch.randn(4, 3, dtype=torch.float64))
    ckpt.restore_(ckpt.snapshot(stopped, []), resumed, [])
    assert same(stopped.state_dict(), resumed.state_dict())


def test_a_buffer_whose_name_ends_like_that_of_an_extra_state_is_compared():
    name, ours = "my_extra_state", torch.ones(2)
    for theirs in (torch.ones(3), ours.double()):
        with pytest.raises(ValueError, match="^my_extra_state is .* in the checkpoint, "):
            ckpt.check_same({name: theirs}, {name: ours})


# ----------------------------------------------------------------------------------- state <-> file


def test_a_checkpoint_is_one_file_that_torch_reads_without_ckpt(tmp_path):
    model, optimizers = trained()
    state = ckpt.snapshot(model, optimizers, step=3, text="ü")
    entry = ckpt.save(str(tmp_path / "new" / "folder"), state, step=3, loss=1.88118)
    (path,) = (tmp_path / "new" / "folder").iterdir()
    loaded = torch.load(path, weights_only=True)
    assert same(loaded, state) and path.name == entry.name
    bare = build(seed=1)[0]
    bare.load_state_dict(loaded["model"])
    assert same(dict(bare.state_dict()), dict(model.state_dict()))


def test_the_mode_of_a_checkpoint_is_that_of_any_new_file(folder):
    entry = ckpt.save(folder, some_state(), 1)
    Path(folder, "other").touch()
    assert Path(folder, entry.name).stat().st_mode == Path(folder, "other").stat().st_mode


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
def test_the_name_has_step_loss_and_sha256_of_the_content(folder, step, loss, start):
    entry = ckpt.save(folder, some_state(), step, loss)
    assert names(folder) == [entry.name]
    digest = hashlib.sha256(Path(folder, entry.name).read_bytes()).hexdigest()
    assert entry.name == f"{start}{digest[:32]}.pt"
    assert entry.step == step and ckpt.list_checkpoints(folder) == [entry]
    finite = loss is not None and math.isfinite(loss)
    assert entry.loss == (round(loss, 4) if finite else math.inf)


def test_sha256_is_that_of_the_whole_file(tmp_path):
    data = os.urandom(9_000_000)
    (tmp_path / "file").write_bytes(data)
    assert ckpt.sha256(tmp_path / "file") == hashlib.sha256(data).hexdigest()


def test_checkpoints_are_listed_in_the_order_of_steps_and_other_files_are_not(folder):
    assert ckpt.list_checkpoints(folder) == [] and ckpt.newest(folder) == (None, {})
    steps = [100_000_000, 99_999_999, 5, 1_000]
    for step in steps:
        ckpt.save(folder, some_state(step), step)
    good = ckpt.list_checkpoints(folder)[0].name
    others = ["metrics.jsonl", f"{good}.damaged", f"x{good}", f".saving-{good}", ".saving-17"]
    for name in [*others, good[:-4] + ".pt"]:
        Path(folder, name).touch()
    assert [entry.step for entry in ckpt.list_checkpoints(folder)] == sorted(steps)
    assert ckpt.newest(folder)[0].state["step"] == 100_000_000


def test_the_content_is_made_durable_before_the_file_gets_its_name_and_the_name_afterwards(
    folder, monkeypatch
):
    calls, fsync, replace = [], os.fsync, Path.replace

    def watched_fsync(handle):
        status = os.fstat(handle)
        calls.append("folder" if stat.S_ISDIR(status.st_mode) else status.st_size)
        fsync(handle)

    def watched_replace(path, target):
        calls.append("rename")
        return replace(path, target)

    ckpt.make_folder(folder)
    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(Path, "replace", watched_replace)
    entry = ckpt.save(folder, some_state(1), 1)
    assert calls == [Path(folder, entry.name).stat().st_size, "rename", "folder"]
    ckpt.write_text(folder, "a.txt", "text")
    assert calls[3:] == [4, "rename", "folder"]
    ckpt.set_aside(folder, entry.name)
    assert calls[6:] == ["rename", "folder"]


def test_two_checkpoints_of_one_step_with_and_without_a_loss_are_both_listed(folder):
    """A crash in save() can leave both, before the older one is deleted."""
    both = {ckpt.make_entry(4, None, "0" * 32), ckpt.save(folder, some_state(4), 4, 1.5)}
    for entry in both:
        Path(folder, entry.name).touch()
    assert len(both) == 2 and {*ckpt.list_checkpoints(folder)} == both


def test_a_name_whose_loss_is_not_a_number_is_not_listed(folder):
    entry = ckpt.save(folder, some_state(4), 4, 1.5)
    Path(folder, entry.name.replace("1.5", "1..5")).touch()
    assert ckpt.list_checkpoints(folder) == [entry]


def test_saving_the_same_state_twice_gives_one_file(folder):
    assert ckpt.save(folder, some_state(), 4) == ckpt.save(folder, some_state(), 4)
    assert len(names(folder)) == 1


def test_save_does_not_change_the_state(folder):
    state = ckpt.snapshot(*trained())
    before = copy.deepcopy(state)
    ckpt.save(folder, state, 3)
    assert same(state, before)


WITH_NAN = {
    "parameter": {"a": torch.ones(2), "w": torch.tensor([1, math.nan])},
    "buffer": {"w.running_mean": torch.tensor([[math.nan]]), "mask": torch.tensor([0, -math.inf])},
}


@pytest.mark.parametrize("where", WITH_NAN)
def test_save_and_load_refuse_the_same_nan(folder, where):
    old = ckpt.save(folder, some_state(10), 10)
    state = {"model": WITH_NAN[where]}
    with pytest.raises(ValueError, match=r"^worthless: w\S* contains NaN$"):
        ckpt.save(folder, state, 20)
    assert names(folder) == [old.name]
    bad = put_named(folder, 20, torch_saved(state))
    found, rejected = ckpt.newest(folder)
    [(name, reason)] = rejected.items()
    assert found.entry == old and name == bad
    assert re.fullmatch(r"worthless: w\S* contains NaN", reason)


def test_save_refuses_nan_in_the_buffer_of_a_model(folder):
    model, optimizers = trained()
    model[1].running_mean[2] = math.nan
    with pytest.raises(ValueError, match="^worthless: 1.running_mean contains NaN$"):
        ckpt.save(folder, ckpt.snapshot(model, optimizers), 1)
    assert not os.path.exists(folder)


@pytest.mark.parametrize("extra", [Path("x"), {"a": [threading.Event]}], ids=["path", "class"])
def test_save_refuses_what_load_would_refuse(folder, extra):
    old = ckpt.save(folder, some_state(1), 1)
    with pytest.raises(ValueError, match="^not a checkpoint: torch.load"):
        ckpt.save(folder, {**some_state(2), "extra": extra}, 2)
    assert names(folder) == [old.name]


class memory_of_something:
    pass


def test_a_type_with_memory_in_its_name_is_not_taken_for_a_lack_of_memory(folder):
    with pytest.raises(ValueError, match="^not a checkpoint: torch.load"):
        ckpt.save(folder, {**some_state(1), "extra": memory_of_something}, 1)


@pytest.mark.parametrize(
    "state", [{}, {"weights": {}}, {"model": torch.ones(3)}, [], {"model": {}, "optimizers": [{}]}]
)
def test_save_refuses_a_state_without_a_model(folder, state):
    with pytest.raises(ValueError, match="no state dict under 'model'"):
        ckpt.save(folder, state, 2)


def test_a_checkpoint_of_an_earlier_version_is_listed_loaded_and_restored():
    """tests/old_checkpoint has trained(3), saved before ckpt.py was rewritten (commit a857134)."""
    old = str(ROOT / "tests" / "old_checkpoint")
    (entry,) = ckpt.list_checkpoints(old)
    assert (entry.step, entry.loss) == (3, 1.8812)
    state = ckpt.load(old, entry)
    assert list(state) == ["model", "optimizers", "step", "config", "text", "scaler"]
    model, optimizers = build(seed=1)
    ckpt.restore_(state, model, optimizers)
    assert same(dict(model.state_dict()), dict(state["model"]))
    moments = [optimizer["state"] for optimizer in ckpt.snapshot(model, optimizers)["optimizers"]]
    assert same(moments, [optimizer["state"] for optimizer in state["optimizers"]])
    train_(model, optimizers, 3, 5)
    straight = trained(5)[0].state_dict()
    assert list(straight) == list(model.state_dict())
    # The file was made on another processor. BatchNorm removes the mean, so the gradient of the bias
    # before it is only rounding errors, and AdamW makes steps of full size from them.
    for name in straight.keys() - {"0.bias", "1.running_mean"}:
        torch.testing.assert_close(model.state_dict()[name], straight[name])


def test_the_layout_of_a_checkpoint_is_that_of_the_earlier_version():
    old = str(ROOT / "tests" / "old_checkpoint")
    state = ckpt.load(old, ckpt.list_checkpoints(old)[0])
    ours = ckpt.snapshot(
        *trained(), step=3, config={"lr": 0.1, "betas": (0.9, 0.95)}, text="ü", scaler={}
    )

    def layout(value):
        if isinstance(value, dict):
            return {key: layout(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(map(layout, value))
        return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else value

    assert layout(ours) == layout(state)


# ------------------------------------------------------------------------------------------- damage

DAMAGES = {
    "cut to nothing": lambda data: b"",
    "cut to a byte": lambda data: data[:1],
    "cut to half": lambda data: data[: len(data) // 2],
    "cut by a byte": lambda data: data[:-1],
    "a byte too long": lambda data: data + b"\0",
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(folder, damage):
    old, new = (ckpt.save(folder, some_state(step), step) for step in (10, 20))
    assert ckpt.newest(folder)[0].entry == new
    path = Path(folder, new.name)
    path.write_bytes(damage(path.read_bytes()))
    found, rejected = ckpt.newest(folder)
    [(name, reason)] = rejected.items()
    assert found.entry == old and same(found.state, some_state(10))
    assert name == new.name and reason.startswith("damaged")


def test_any_flipped_bit_is_found(folder):
    entry = ckpt.save(folder, some_state(), 1)
    path = Path(folder, entry.name)
    data = path.read_bytes()
    for at in range(
        0, 8 * len(data), 37
    ):  # an odd distance, so that each of the 8 bits has its turn
        path.write_bytes(data)
        flip_(path, at // 8, at % 8)
        with pytest.raises(ValueError, match="damaged"):
            ckpt.load(folder, entry)
    path.write_bytes(data)
    assert same(ckpt.load(folder, entry), some_state())


def test_two_checkpoints_with_exchanged_contents_are_both_damaged(folder):
    first, second, third = (ckpt.save(folder, some_state(step), step) for step in (10, 20, 30))
    os.rename(Path(folder, second.name), Path(folder, "x"))
    os.rename(Path(folder, third.name), Path(folder, second.name))
    os.rename(Path(folder, "x"), Path(folder, third.name))
    found, rejected = ckpt.newest(folder)
    assert found.entry == first
    assert [*rejected] == [third.name, second.name]


def test_a_checkpoint_that_may_not_be_read_is_an_error_because_it_may_be_good(folder):
    for step in (1, 2):
        ckpt.save(folder, some_state(step), step)

    def load(folder, entry):
        if entry.step == 2:
            raise PermissionError(13, "Permission denied", entry.name)
        return ckpt.load(folder, entry)

    with pytest.raises(PermissionError, match="step-00000002"):
        ckpt.newest(folder, load)


def test_newest_raises_if_there_are_checkpoints_but_none_verifies(folder):
    saved = [ckpt.save(folder, some_state(step), step) for step in (10, 20)]
    for entry in saved:
        Path(folder, entry.name).write_bytes(b"")
    with pytest.raises(
        ValueError, match=f"{folder}: no checkpoint can be used; {saved[1].name}: d"
    ):
        ckpt.newest(folder)


@pytest.mark.parametrize(
    "replace",
    [os.mkdir, lambda path: os.symlink("nowhere", path), os.mkfifo],
    ids=["folder", "dangling link", "pipe"],
)
def test_what_is_not_a_file_is_named_and_the_checkpoint_before_it_is_used(folder, replace):
    old, new = (ckpt.save(folder, some_state(step), step) for step in (10, 20))
    Path(folder, new.name).unlink()
    replace(Path(folder, new.name))
    found, rejected = ckpt.newest(folder)
    [(name, reason)] = rejected.items()
    assert found.entry == old and name == new.name and reason


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_not_reported(folder):
    saved = [ckpt.save(folder, some_state(step), step) for step in (10, 20)]

    def load(folder, entry):
        if entry == saved[1] and entry.name in names(folder):  # another process prunes
            Path(folder, entry.name).unlink()
            ckpt.save(folder, some_state(30), 30)
        return ckpt.load(folder, entry)

    found, rejected = ckpt.newest(folder, load)
    assert found.entry.step == 30 and rejected == {}


def test_a_sharded_checkpoint_is_refused_and_no_older_one_is_used(folder):
    ckpt.save(folder, some_state(10), 10)
    sharded = ckpt.make_entry(20, 1.5, "0123456789abcdef" * 2, ending="")
    os.mkdir(Path(folder, sharded.name))
    assert ckpt.list_checkpoints(folder)[-1] == sharded
    with pytest.raises(NotImplementedError, match=f"{sharded.name} is a sharded checkpoint"):
        ckpt.newest(folder)


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
    state = {"model": {"w": code}} if where == "inside" else {**some_state(), "x": code}
    bad = put_named(folder, 20, written(state))
    found, rejected = ckpt.newest(folder)
    [(name, reason)] = rejected.items()
    assert found.entry == old and name == bad and reason.startswith("not a checkpoint: ")
    assert not (tmp_path / "was run").exists()
    pickle.loads(pickle.dumps(code))  # this proves that the code works
    assert (tmp_path / "was run").exists()


def test_a_value_that_could_not_be_loaded_is_named_before_it_is_saved(folder):
    with pytest.raises(ValueError, match=r"UnpicklingError: GLOBAL pathlib\.[\w.]+$"):
        ckpt.save(folder, {**some_state(1), "data": Path("text.txt")}, 1)
    assert not any(Path(folder).iterdir())


@pytest.mark.parametrize(
    "data",
    [
        b"not a checkpoint",
        torch_saved([1, 2]),
        torch_saved({"weights": {}}),
        torch_saved({"model": {}}),
        torch_saved({"model": torch.ones(3)}),
        torch_saved({"model": {"w": torch.ones(1000)}})[:-1000],
        b"",
        b"\x80\x02.",
        b"\x80\x02h\x07.",
        b"\x80\x02J",
    ],
    ids="text,list,no model,empty model,tensor,half a zip,empty,no stack,no memo,half a number".split(
        ","
    ),
)
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_what_is_no_checkpoint_is_named_and_the_one_before_it_is_used(folder, data):
    old = ckpt.save(folder, some_state(10), 10)
    bad = put_named(folder, 20, data)
    found, rejected = ckpt.newest(folder)
    [(name, reason)] = rejected.items()
    assert found.entry == old and name == bad
    # torch.load reports some truncated files as an error of the system.
    assert re.fullmatch(r"not a checkpoint: .+|.+ Invalid argument", reason)


def test_a_checkpoint_that_is_set_aside_is_not_listed_but_still_there(folder):
    old, new = (ckpt.save(folder, some_state(step), step) for step in (10, 20))
    data = Path(folder, new.name).read_bytes()
    ckpt.set_aside(folder, new.name)
    assert ckpt.list_checkpoints(folder) == [old]
    assert Path(folder, f"{new.name}.damaged").read_bytes() == data


# --------------------------------------------------------------------------------- prune and remove


@pytest.mark.parametrize(
    "keep, losses, left",
    [
        (1, [3.0, 2.0, 1.0], [2]),
        (1, [1.0, 2.0, 3.0], [0, 2]),
        (2, [3.0, 1.0, 2.0, 4.0, 5.0], [1, 3, 4]),
        (2, [None, None, None, None], [2, 3]),
        (1, [None, 2.0, None, None], [1, 3]),
        (1, [5.0, 1.0, 1.0, 2.0], [2, 3]),  # the later one of two equal losses
        (1, [-1.0, -2.0, 0.0], [1, 2]),
        (1, [9.5, 10.5, 11.5], [0, 2]),  # compared as numbers, not as text
        (5, [3.0, 2.0, 1.0], [0, 1, 2]),
    ],
)
def test_prune_keeps_the_last_and_the_best(folder, keep, losses, left):
    saved = [ckpt.save(folder, some_state(i), i, loss) for i, loss in enumerate(losses)]
    others = {"metrics.jsonl", f"{saved[0].name}.damaged"}
    for name in others:
        Path(folder, name).touch()
    deleted = [entry for i, entry in enumerate(saved) if i not in left]
    assert ckpt.superseded(saved, keep) == deleted
    ckpt.prune(folder, keep)
    assert ckpt.list_checkpoints(folder) == [saved[i] for i in left]
    assert others < set(names(folder))


@pytest.mark.parametrize("losses", [(None, None), (1.5, None), (None, 1.5), (1.5, 1.5)])
def test_a_checkpoint_of_the_same_step_is_replaced(folder, losses):
    """For example, if the step is the number of an epoch, which a stop and a resume divide."""
    ckpt.save(folder, some_state(1), 1, loss=0.5)
    for seed, loss in enumerate(losses, 10):
        last = ckpt.save(folder, some_state(seed), 2, loss)
        assert ckpt.newest(folder)[0].entry == last
        assert [entry.step for entry in ckpt.list_checkpoints(folder)] == [1, 2]


def test_the_folder_can_be_a_path(tmp_path):
    entry = ckpt.save(tmp_path / "out", some_state(1), 1, keep=1)
    assert ckpt.newest(tmp_path / "out")[0].entry == entry


def test_prune_ignores_a_checkpoint_that_another_process_has_deleted(folder, monkeypatch):
    entries = [ckpt.save(folder, some_state(step), step) for step in (1, 2, 3)]
    Path(folder, entries[0].name).unlink()
    monkeypatch.setattr(ckpt, "list_checkpoints", lambda _: entries)
    ckpt.prune(folder, 1)
    assert names(folder) == [entries[2].name]


def test_a_checkpoint_that_cannot_be_deleted_is_a_warning_and_the_others_are_deleted(
    folder, monkeypatch
):
    """For example, one of another user. The new checkpoint is complete."""
    first, second, third = (ckpt.save(folder, some_state(i), i) for i in range(3))
    unlink = Path.unlink

    def refuse(path, **how):
        if path.name == first.name:
            raise PermissionError(errno.EPERM, "not yours", f"{path}", None, f"{uuid.uuid4()}")
        unlink(path, **how)

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.warns(UserWarning, match=f"^{first.name} not deleted: not yours$"):
        last = ckpt.save(folder, some_state(3), 3, keep=1)
    assert ckpt.list_checkpoints(folder) == [first, last]


@pytest.mark.parametrize("keep", [0, -1])
def test_keep_below_1_is_an_error_and_deletes_nothing(folder, keep):
    saved = [ckpt.save(folder, some_state(i), i, 1.0) for i in range(3)]
    with pytest.raises(ValueError, match=f"keep is {keep}; at least 1 checkpoint must be kept"):
        ckpt.save(folder, some_state(3), 3, keep=keep)
    assert ckpt.list_checkpoints(folder)[:3] == saved


def test_a_save_does_not_change_the_filters_of_warnings_of_other_threads(folder, monkeypatch):
    """warnings.catch_warnings changes them for the whole process."""
    monkeypatch.setattr(warnings, "catch_warnings", None)
    ckpt.save(folder, some_state(), 1)


def test_save_does_both(folder):
    for step in range(4):
        last = ckpt.save(folder, some_state(step), step, None, 2)
    assert [entry.step for entry in ckpt.list_checkpoints(folder)] == [2, 3]
    assert ckpt.list_checkpoints(folder)[-1] == last


def test_two_jobs_on_one_folder_do_not_delete_the_temporary_files_of_each_other(folder):
    """Each of two processes saves and prunes as fast as it can; each save must succeed."""
    code = """if True:
        import sys, torch, ckpt
        for step in range(int(sys.argv[2]), 60, 2):
            state = {"model": {"w": torch.full((300_000,), float(step))}}
            ckpt.save(sys.argv[1], state, step, None, 1000)
    """
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", code, folder, f"{i}"], cwd=ROOT, stderr=subprocess.PIPE
        )
        for i in (0, 1)
    ]
    errors = [job.communicate()[1].decode() for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], errors
    assert [entry.step for entry in ckpt.list_checkpoints(folder)] == list(range(60))


def test_prune_keeps_the_temporary_file_of_another_job(folder):
    ckpt.save(folder, some_state(1), 1)
    with ckpt._temporary_file(folder) as file:
        file.write(b"half")
        file.flush()
        ckpt.save(folder, some_state(2), 2, None, 1)
        assert Path(file.name).read_bytes() == b"half"


# --------------------------------------------------------------------------------- writes that fail


@contextmanager
def largest_file(size):
    """Let writing past `size` bytes be an OSError, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", [0, 0.0001, 0.1, 0.5, 0.9, 0.999])
def test_a_full_disk_is_an_oserror_and_leaves_what_was_there(folder, room):
    state = {"model": {"a": torch.ones(50_000), "b": torch.ones(50_000)}}
    old = ckpt.save(folder, state, 1)
    size = Path(folder, old.name).stat().st_size
    with largest_file(int(room * size)), pytest.raises(OSError):
        ckpt.save(folder, state, 2)
    assert names(folder) == [old.name]
    assert ckpt.newest(folder)[0].entry == old
    assert ckpt.save(folder, state, 2).step == 2  # now there is room again


def test_a_write_that_fails_leaves_no_temporary_file(folder):
    old = ckpt.save(folder, some_state(1), 1)
    with pytest.raises(TypeError, match="lock"):
        ckpt.save(folder, {"model": {"w": threading.Lock()}}, 2)
    assert names(folder) == [old.name]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_an_error_of_the_disk_leaves_what_was_there(folder, monkeypatch, call):
    old = ckpt.save(folder, some_state(1), 1)

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path if call == "replace" else os, call, fail)
    for write in (
        lambda: ckpt.save(folder, some_state(2), 2),
        lambda: ckpt.write_text(folder, "a", "b"),
    ):
        with pytest.raises(OSError, match="Input/output error"):
            write()
    monkeypatch.undo()
    assert names(folder) == [old.name]


def test_a_folder_that_is_a_file_is_an_oserror(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(OSError, match="out"):
        ckpt.save(str(tmp_path / "out"), some_state(), 1)
    assert (tmp_path / "out").read_text() == "mine" and os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("name", ["s3://bucket/out", Path("s3://bucket/out"), ""])
def test_a_url_and_an_empty_name_are_refused_and_nothing_is_made(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"is empty or a URL; for URLs see extras/remote\.py"):
        ckpt.save(name, some_state(), 1)
    assert os.listdir(tmp_path) == []


def test_a_folder_with_the_name_of_a_checkpoint_is_set_aside_by_prune(folder):
    old = ckpt.save(folder, some_state(1), 1)
    Path(folder, old.name).unlink()
    Path(folder, old.name).mkdir()
    new = ckpt.save(folder, some_state(2), 2, keep=1)
    assert names(folder) == sorted([f"{old.name}.damaged", new.name])


def test_the_current_folder_can_be_named_by_a_dot(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    entry = ckpt.save(".", some_state(1), 1)
    ckpt.write_text(".", "a.txt", "text")
    assert ckpt.list_checkpoints(".") == [entry] and names(".") == sorted(["a.txt", entry.name])


def test_a_new_folder_is_made_durable_from_the_top(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(ckpt, "fsync_folder", synced.append)
    ckpt.make_folder(str(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b").is_dir() and synced == [tmp_path, tmp_path / "a"]
    ckpt.make_folder(str(tmp_path / "a" / "b"))
    assert len(synced) == 2


def test_making_a_folder_durable_leaves_no_file_open(tmp_path):
    handles = []
    for _ in range(2):
        handles.append(os.open(tmp_path, os.O_RDONLY))  # the lowest number that is free
        os.close(handles[-1])
        ckpt.fsync_folder(tmp_path)
    assert handles[0] == handles[1]


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


# --------------------------------------------------------------------------------------- text files


def test_text_is_written_appended_and_read(folder):
    ckpt.make_folder(folder)
    assert ckpt.read_text(folder, "a.txt") == ""
    ckpt.append_text(folder, "a.txt", "ä\n")
    ckpt.append_text(folder, "a.txt", "b\n")
    assert ckpt.read_text(folder, "a.txt") == "ä\nb\n" and names(folder) == ["a.txt"]
    ckpt.write_text(folder, "a.txt", "new\n")
    ckpt.append_text(folder, "a.txt", "line\n")
    assert ckpt.read_text(folder, "a.txt") == "new\nline\n" and names(folder) == ["a.txt"]
    Path(folder, "a.txt").write_bytes(b"\xff")
    assert ckpt.read_text(folder, "a.txt") == "\ufffd"


@pytest.mark.parametrize("room", [4, 7, 11])
def test_text_is_whole_or_unchanged_on_a_full_disk(folder, room):
    ckpt.make_folder(folder)
    ckpt.write_text(folder, "a.txt", "old\n")
    with largest_file(room), pytest.raises(OSError, match="File too large"):
        ckpt.write_text(folder, "a.txt", "a longer line\n")
    with largest_file(4), pytest.raises(OSError, match="File too large"):
        ckpt.append_text(folder, "a.txt", "a longer line\n")
    assert ckpt.read_text(folder, "a.txt") == "old\n" and names(folder) == ["a.txt"]


def test_a_reader_never_sees_half_a_text(folder):
    ckpt.make_folder(folder)
    texts = {c * 300_000 for c in "ab"}
    ckpt.write_text(folder, "a.txt", "a" * 300_000)
    seen, end = set(), time.monotonic() + 1
    writing = ThreadPoolExecutor(1).submit(
        lambda: [ckpt.write_text(folder, "a.txt", t) for _ in range(20) for t in sorted(texts)]
    )
    while not writing.done() or time.monotonic() < end:
        seen.add(ckpt.read_text(folder, "a.txt"))
    assert writing.result() and seen <= texts and seen


# --------------------------------------------------------------------------------------------- lock


def holder(folder):
    """Start a process that locks a folder and waits."""
    code = "import ckpt, sys; kept = ckpt.lock(sys.argv[1]); print('locked', flush=True); input()"
    command = [sys.executable, "-c", code, folder]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"locked\n"
    return process


def test_lock_names_the_holder_and_is_free_when_the_holder_is_killed(folder):
    ckpt.make_folder(folder)
    process = holder(folder)
    try:
        expected = f"^in use by another run: {re.escape(socket.gethostname())}, pid {process.pid}, since 20\\d\\d-"
        for _ in range(2):  # the text is still there after the first attempt
            with pytest.raises(ValueError, match=expected):
                ckpt.lock(folder, timeout=0.1)
    finally:
        process.kill()
    lock = ckpt.lock(folder)
    assert f"pid {os.getpid()}," in ckpt.read_text(folder, ".lock")
    assert ckpt.read_text(folder, ".lock").count("pid") == 1
    lock.close()
    process.wait()


def test_the_mode_of_the_lock_is_that_of_any_new_file(folder):
    ckpt.make_folder(folder)
    ckpt.lock(folder).close()
    Path(folder, "other").touch()
    assert Path(folder, ".lock").stat().st_mode == Path(folder, "other").stat().st_mode


def test_lock_waits_for_a_process_that_is_just_ending(folder):
    ckpt.make_folder(folder)
    process = holder(folder)
    timer = threading.Timer(0.5, process.kill)
    timer.start()
    assert ckpt.lock(folder, timeout=30.0)
    process.wait()


def test_lock_deletes_temporary_files_and_folders_and_nothing_else(folder):
    entry = ckpt.save(folder, some_state(1), 1)
    Path(folder, f"{ckpt.TEMPORARY}12345").write_bytes(b"half")
    Path(folder, f"{ckpt.TEMPORARY}400").mkdir()  # of a sharded checkpoint
    Path(folder, f"{ckpt.TEMPORARY}400", "__0_0.distcp").touch()
    Path(folder, "metrics.jsonl").touch()
    assert ckpt.newest(folder)[0].entry == entry
    with ckpt.lock(folder):
        assert names(folder) == sorted([".lock", "metrics.jsonl", entry.name])


def test_lock_that_another_process_holds_deletes_nothing(folder):
    ckpt.make_folder(folder)
    first = ckpt.lock(folder)
    Path(folder, f"{ckpt.TEMPORARY}12345").write_bytes(b"half")
    with pytest.raises(ValueError):
        ckpt.lock(folder, timeout=0.0)
    assert f"{ckpt.TEMPORARY}12345" in names(folder)
    first.close()


def test_lock_is_none_where_the_file_system_has_no_locks(folder, monkeypatch):
    ckpt.make_folder(folder)
    Path(folder, f"{ckpt.TEMPORARY}12345").touch()

    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(ckpt.fcntl, "flock", refuse)
    assert ckpt.lock(folder) is None and f"{ckpt.TEMPORARY}12345" in names(folder)


def test_lock_replaces_a_longer_text_of_an_earlier_holder(folder):
    ckpt.make_folder(folder)
    ckpt.write_text(folder, ".lock", "x" * 500)
    ckpt.lock(folder).close()
    assert "x" * 9 not in ckpt.read_text(folder, ".lock")


# ------------------------------------------------------------------------------------------ Windows


def test_without_fcntl_the_module_works_and_lock_is_none(folder):
    code = """if True:
        import sys, torch
        sys.modules["fcntl"] = None
        import ckpt
        entry = ckpt.save(sys.argv[1], {"model": {"w": torch.ones(3)}}, 1)
        assert ckpt.lock(sys.argv[1]) is None and ckpt.newest(sys.argv[1])[0].entry == entry
    """
    subprocess.run([sys.executable, "-c", code, folder], cwd=ROOT, check=True)
    assert len(names(folder)) == 1


def test_where_a_folder_cannot_be_opened_it_is_not_made_durable(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    ckpt.fsync_folder(str(tmp_path))
    assert len(synced) == 1
    with monkeypatch.context() as patch:
        patch.setattr(os, "name", "nt")
        ckpt.fsync_folder(str(tmp_path))
    assert len(synced) == 1


def test_tensors_that_cannot_be_checked_or_restored_are_refused(tmp_path):
    with warnings.catch_warnings(action="ignore"):  # torch announces another package for these
        quantized = torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8)
    with warnings.catch_warnings(action="ignore"):  # CSR is in beta state
        sparse = [torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr()]
    for tensor in (quantized, torch.ones(2, device="meta"), *sparse):
        with pytest.raises(
            ValueError, match="^not supported: w is on the device meta, quantized or sparse"
        ):
            ckpt.save(f"{tmp_path}", {"model": {"w": tensor}}, 1)
    assert [*tmp_path.iterdir()] == []


def test_a_python_error_about_memory_does_not_mean_that_a_checkpoint_is_damaged(
    folder, monkeypatch
):
    entry = ckpt.save(folder, some_state(1), 1)

    def load(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(MemoryError):
        ckpt.load(folder, entry)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's memory")
def test_a_checkpoint_that_does_not_fit_into_memory_is_not_called_damaged(tmp_path):
    """Otherwise newest() would continue from the checkpoint before it."""
    state = {"model": {"w": torch.zeros(5 * 10**7)}}
    ckpt.save(f"{tmp_path}", {"model": {"w": torch.zeros(1)}}, step=1)
    ckpt.save(f"{tmp_path}", state, step=2)
    script = """
        import resource, sys
        import ckpt
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 10**8, -1))
        try:
            print(ckpt.newest(sys.argv[1])[0].entry.step)
        except Exception as error:
            print(repr(error))
    """
    program = [sys.executable, "-c", textwrap.dedent(script), tmp_path]
    ran = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0 and re.search("(?i)memory", ran.stdout), ran
