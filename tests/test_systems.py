"""The systems that this toolkit replaces, each as a user of its modules would write it: they double as examples.

Every function of one argument or two is such a system: it is the same under plain python, spawn and torchrun."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import ENVIRONMENT, ROOT, ahead, same
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import chardata
import ckpt
import ddp_setup
import gpt
import loop

AS_PROMISED = {"rtol": 1e-4, "atol": 1e-7}  # promise 1; float32 has 1e-7 where a weight happens to be near 0


def rows(batch: tuple[Tensor, Tensor]) -> int:
    return len(batch[0])


# ------------------------------------------------------- 1. linear regression, a checkpoint after every epoch


def linear_regression(folder: str) -> None:
    with ddp_setup.process_group("cpu") as world:
        torch.manual_seed(0)
        data = TensorDataset(torch.rand(2048, 20), torch.rand(2048, 1))
        model = ddp_setup.replicate(nn.Linear(20, 1), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        step = 0
        for epoch in range(3):
            mine = chardata.shard(len(data), world.rank, world.size, epoch, seed=0)
            loader = DataLoader(data, batch_size=96 // world.size, sampler=mine)
            steps = loop.group(loader, accum=1, count=rows)
            for step, _ in loop.train_(model, [optimizer], steps, squared_error, start=step):
                pass
            state = ckpt.snapshot(model, [optimizer], epoch=epoch)
            if world.rank == 0:
                ckpt.save(folder, state, step)


def squared_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    x, y = batch
    return F.mse_loss(model(x), y, reduction="sum"), y.numel()


def test_linear_regression_on_two_ranks_is_that_of_one(on_two_ranks, tmp_path):
    alone, together = str(tmp_path), str(on_two_ranks / "linear_regression")
    linear_regression(alone)
    assert [entry.step for entry in ckpt.entries(together)] == [22, 44, 66]  # 2048 / 96, the last batch short
    for ours, reference in zip(ckpt.entries(together), ckpt.entries(alone), strict=True):
        weights = ckpt.load(together, ours)["model"]
        assert weights.keys() == nn.Linear(20, 1).state_dict().keys()  # no "module." before them
        torch.testing.assert_close(weights, ckpt.load(alone, reference)["model"], **AS_PROMISED)


def read_by_all(folder: str) -> None:
    """Every rank sees the folder, where the linear regression was, and reads it for itself."""
    with ddp_setup.process_group("cpu") as world:
        model = ddp_setup.replicate(nn.Linear(20, 1), world)
        state, read = (ckpt.newest(folder)[0].state for _ in range(2))
        ckpt.restore_(state, model, [torch.optim.SGD(model.parameters(), lr=0.01)])
        found = [same(dict(model.module.state_dict()), read["model"]), same(state, read)]
        Path(folder, f"read by {world.rank}.json").write_text(json.dumps(found))


def test_a_state_that_every_rank_has_read_is_restored_and_left_as_it_was(on_two_ranks):
    for rank in (0, 1):
        assert json.loads((on_two_ranks / "linear_regression" / f"read by {rank}.json").read_text()) == [True, True]


# ------------------------------------------------------------------------------------- 2. a bare nn.Linear


def bare_linear(folder: str) -> None:
    with ddp_setup.process_group("cpu") as world:
        torch.manual_seed(0)
        x, y, model = torch.randn(20, 10), torch.randn(20, 10), ddp_setup.replicate(nn.Linear(10, 10), world)
        mine = x[world.rank :: world.size], y[world.rank :: world.size]
        steps = [([mine], y.numel())] * 10
        for _ in loop.train_(model, [torch.optim.SGD(model.parameters(), lr=0.1)], steps, squared_error):
            pass
        if world.rank == 0:
            torch.save(model.module.state_dict(), f"{folder}/linear.pt")


def test_a_bare_linear_over_gloo_learns_what_plain_torch_does(on_two_ranks):
    torch.manual_seed(0)
    x, y, model = torch.randn(20, 10), torch.randn(20, 10), nn.Linear(10, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    weights = torch.load(on_two_ranks / "bare_linear" / "linear.pt")
    torch.testing.assert_close(weights, model.state_dict(), **AS_PROMISED)


# --------------------------------------------------------------------------- 3. an MLP, and how often it is right


def classify(folder: str) -> None:
    with ddp_setup.process_group("cpu") as world:
        data, test = two_clouds(200), two_clouds(5)
        torch.manual_seed(0)
        model = ddp_setup.replicate(nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2)), world)
        optimizer, step = torch.optim.Adam(model.parameters(), lr=0.01), 0
        for epoch in range(3):
            mine = chardata.shard(len(data), world.rank, world.size, epoch, seed=0)
            steps = loop.group(DataLoader(data, batch_size=8, sampler=mine), accum=1, count=rows)
            for step, _ in loop.train_(model, [optimizer], steps, cross_entropy, start=step):
                pass
        accuracy = []
        for part in (data, test):
            mine = chardata.shard(len(part), world.rank, world.size, epoch=0, seed=0)
            accuracy.append(loop.evaluate(model, DataLoader(part, batch_size=2, sampler=mine), correct))
        Path(folder, f"{world.rank}.json").write_text(json.dumps(accuracy))
        if world.rank == 0:
            torch.save(model.module, f"{folder}/model.pt")


def two_clouds(n: int) -> TensorDataset:
    y = torch.arange(n) % 2
    return TensorDataset(torch.randn(n, 2, generator=torch.Generator().manual_seed(n)) + 2 * y[:, None], y)


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum"), len(x)


def correct(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    x, y = batch
    return (model(x).argmax(dim=-1) == y).sum(), len(x)


def test_a_classifiers_accuracy_over_two_ranks_is_exact(on_two_ranks):
    model = torch.load(on_two_ranks / "classify" / "model.pt", weights_only=False)
    expected = []
    for n in (200, 5):  # five rows on two ranks are five, not six
        x, y = two_clouds(n).tensors
        expected.append([int((model(x).argmax(dim=-1) == y).sum()), n])
    for rank in (0, 1):
        assert json.loads((on_two_ranks / "classify" / f"{rank}.json").read_text()) == expected
    assert expected[0][0] > 160  # it has learned: the two clouds overlap in one row of six


# ----------------------------------------------------------------------- 4. a GPT, with all that training takes


TOTAL, BLOCK, BATCH = 60, 16, 8


def gpt_trainer(folder: str, text: str) -> None:
    with ddp_setup.process_group("cpu") as world:
        corpus = chardata.read(text, "char")
        train, val = chardata.split(corpus.shards, 0.2)
        share = {"rank": world.rank, "world_size": world.size}
        config = gpt.Config(corpus.vocab, BLOCK, layers=2, heads=2, embd=32)
        model = ddp_setup.replicate(gpt.build(config, seed=0), world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        training = loop.train_(
            model, [optimizer], chardata.steps(train, BLOCK, BATCH, accum=2, **share), gpt.loss,
            dtype=torch.bfloat16, clip=1.0, lr_at=partial(loop.cosine, total=TOTAL, warmup_steps=5),
        )  # fmt: skip
        for step, report in training:
            if step == TOTAL:
                break
        loss_sum, count = loop.evaluate(model, chardata.every_window(val, BLOCK, BATCH, **share), gpt.loss)
        state = ckpt.snapshot(model, [optimizer], step=step, config=tuple(config))
        if world.rank == 0:
            ckpt.save(folder, state, step, loss_sum / count)

        again = ddp_setup.replicate(gpt.build(config, seed=1), world)
        state = ckpt.newest(folder)[0].state if world.rank == 0 else {}
        ckpt.restore_(state, again, [torch.optim.AdamW(again.parameters())])
        reloaded = loop.evaluate(again, chardata.every_window(val, BLOCK, BATCH, **share), gpt.loss)
        Path(folder, f"{world.rank}.json").write_text(json.dumps([[loss_sum, count], reloaded, report.lr]))


def test_a_gpt_trains_under_torchrun_and_its_checkpoint_has_what_it_has_learned(under_torchrun, pangrams):
    folder = under_torchrun("gpt")
    (first, reloaded, lr), others = (json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1))
    assert others == [first, reloaded, lr] and reloaded == first
    assert lr == pytest.approx(0.01 * loop.cosine(TOTAL - 1, TOTAL, 5))  # of the last step
    [entry] = ckpt.entries(str(folder))
    state = torch.load(folder / entry.name, weights_only=True)
    model = gpt.build(gpt.Config(*state["config"]), seed=2)
    model.load_state_dict(state["model"])
    val = chardata.split(chardata.read(pangrams, "char").shards, 0.2)[1]
    loss_sum, count = loop.evaluate(model, chardata.every_window(val, BLOCK, BATCH), gpt.loss)
    assert count == first[1] == chardata.length(val) - 1
    assert loss_sum == pytest.approx(first[0], rel=1e-6)  # promise 4
    assert entry.loss == round(loss_sum / count, 4) < 2.0  # nats; to know nothing of the text is to have 3.3


# ----------------------------------------------------- 5. text by characters: epochs, snapshots, a rank that dies


EPOCHS, SAVE_EVERY = 6, 2  # a snapshot every second epoch


def char_text(folder: str, text: str, dies_at: str = "never") -> None:
    with ddp_setup.process_group("cpu") as world:
        corpus = chardata.read(text, "char")
        per_epoch = chardata.steps_per_epoch(chardata.length(corpus.shards), BLOCK, 4 * BATCH)
        config = gpt.Config(corpus.vocab, BLOCK, layers=1, heads=2, embd=16, dropout=0.1)
        model = ddp_setup.replicate(gpt.build(config, seed=0), world)
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01)]
        found = ckpt.newest(folder)[0] if world.rank == 0 else None
        start = ddp_setup.from_rank_zero(lambda: found.entry.step if found else 0, world)
        if start:
            ckpt.restore_(found.state if found else {}, model, optimizers)
        Path(folder, f"rank {world.rank} began at {start}").touch()
        share = {"rank": world.rank, "world_size": world.size}
        steps = chardata.steps(corpus.shards, BLOCK, 4 * BATCH, start=start, **share)
        for step, _ in loop.train_(model, optimizers, steps, gpt.loss, start=start):
            if f"{step}" == dies_at and world.rank == 1 and not start:
                os.kill(os.getpid(), signal.SIGKILL)
            if step % (SAVE_EVERY * per_epoch) == 0:
                state = ckpt.snapshot(model, optimizers, step=step)
                if world.rank == 0:
                    ckpt.save_and_prune(folder, state, step, loss=None, keep=2)
            if step == EPOCHS * per_epoch:
                break


def test_after_a_rank_is_killed_torchrun_goes_on_from_the_snapshot_to_the_same_weights(under_torchrun, on_two_ranks):
    killed, undisturbed = under_torchrun("killed"), on_two_ranks / "char_text"
    assert sorted(path.name for path in killed.glob("rank*")) == [
        f"rank {rank} began at {step}" for rank in (0, 1) for step in (0, 16)
    ]
    entries, others = ckpt.entries(str(killed)), ckpt.entries(str(undisturbed))
    assert [entry.step for entry in entries] == [entry.step for entry in others] == [32, 48]  # of 8 steps an epoch
    for entry, other in zip(entries, others):
        # promise 3: bitwise, also the moments
        assert same(ckpt.load(str(killed), entry), ckpt.load(str(undisturbed), other))


# ---------------------------------------------------------------------------------- 6. a CNN with BatchNorm


def cnn(folder: str, device: str, sync_batchnorm: bool = True) -> None:
    with ddp_setup.process_group(device) as world:
        torch.manual_seed(0)
        x, y = torch.randn(32, 1, 8, 8), torch.arange(32) % 2
        x += y[:, None, None, None]
        layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)
        model = ddp_setup.replicate(nn.Sequential(*layers).to(world.device), world, sync_batchnorm=sync_batchnorm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        mine = x[world.rank :: world.size], y[world.rank :: world.size]
        losses = [r.loss.item() for _, r in loop.train_(model, [optimizer], [([mine], 32)] * 10, cross_entropy)]
        right = loop.evaluate(model, [mine], correct)
        state = ckpt.snapshot(model, [optimizer], losses=losses, right=right)
        if world.rank == 0:
            ckpt.save(folder, state, 10)


def outcome(folder: Path) -> dict:
    return ckpt.newest(str(folder))[0].state


def test_a_cnn_with_synchronised_batch_norm_is_in_one_process_the_one_without(tmp_path):
    cnn(str(tmp_path / "sync"), "cpu")
    cnn(str(tmp_path / "plain"), "cpu", sync_batchnorm=False)
    state, reference = outcome(tmp_path / "sync"), outcome(tmp_path / "plain")
    assert same(state, reference)
    assert int(state["model"]["1.num_batches_tracked"]) == 10
    assert state["losses"][-1] < 0.5 * state["losses"][0] and state["right"][1] == 32


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="SyncBatchNorm runs on GPUs alone, one for each rank")
def test_a_cnn_with_synchronised_batch_norm_is_on_two_ranks_the_one_on_one(tmp_path):
    cnn(str(tmp_path / "alone"), "cuda")
    assert ddp_setup.spawn(cnn, 2, str(tmp_path / "together"), "cuda") == 0
    state, reference = outcome(tmp_path / "together"), outcome(tmp_path / "alone")
    assert state["right"] == reference["right"]
    torch.testing.assert_close(state["losses"], reference["losses"], **AS_PROMISED)
    torch.testing.assert_close(state["model"], reference["model"], **AS_PROMISED)


# ------------------------------------------------------------------------------------------------ launching


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """For what runs in this process: threads that wait for one another are slow where others use the cores."""
    monkeypatch.setattr(ddp_setup, "cores", lambda: 1)


@pytest.fixture(scope="module")
def pangrams(tmp_path_factory):
    """The name of a file of 4,095 characters."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog; " * 91)
    return str(file)


def in_turn(*jobs: tuple[Any, ...]) -> None:
    """Some systems, each with its arguments, in the same processes, as these take seconds to start."""
    for system, *args in jobs:
        system(*args)


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory, pangrams):
    """The folder to which two ranks that were spawned have written, each system into one of its own."""
    folder = tmp_path_factory.mktemp("spawned")
    jobs = []
    for system, *args in ((linear_regression,), (bare_linear,), (classify,), (char_text, pangrams)):
        own = folder / system.__name__
        own.mkdir()
        jobs.append((system, str(own), *args))
    jobs.append((read_by_all, str(folder / "linear_regression")))
    assert ddp_setup.spawn(in_turn, 2, *jobs) == 0
    return folder


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory, pangrams):
    """The folders to which two ranks of torchrun have written, by name. The runs are begun in the background."""

    def run(system: str, *args: str, flags: tuple[str, ...] = ()) -> Path:
        folder = tmp_path_factory.mktemp(system)
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *flags]
        command = [*start, "-m", "test_systems", system, str(folder), pangrams, *args]
        env = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}
        ended = subprocess.run(command, cwd=ROOT / "tests", env=env, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 0, ended.stderr
        return folder

    killed = partial(run, "char_text", "20", flags=("--max-restarts", "1"))
    with ahead(gpt=partial(run, "gpt_trainer"), killed=killed) as begun:
        yield lambda name: begun[name].result()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
