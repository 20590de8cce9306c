"""Complete training programs, each as a user of the modules would write it: they are examples as well as tests.

Each function whose first parameter is `folder` is such a program. It is the same under plain python, spawn and torchrun.
One torchrun with two ranks runs most of them, one after the other.
"""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import call
import pytest
import torch
import torch.nn.functional as F
from conftest import ENVIRONMENT, ROOT, same
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import chardata
import ckpt
import ddp_setup
import gpt
import loop

PROMISED = {"rtol": 1e-4, "atol": 1e-7}  # promise 1; near 0, float32 has a resolution of 1e-7


def rows(batch: tuple[Tensor, Tensor]) -> int:
    return len(batch[0])


# --- 1. linear regression, a checkpoint after every epoch ---


def linear_regression(folder: str) -> None:
    with ddp_setup.process_group("cpu") as world:
        torch.manual_seed(0)
        data = TensorDataset(torch.rand(2048, 20), torch.rand(2048, 1))
        model = ddp_setup.replicate(nn.Linear(20, 1), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        step = 0
        for epoch in range(3):
            mine = chardata.rank_indices(len(data), world.rank, world.size, epoch, seed=0)
            loader = DataLoader(data, batch_size=96 // world.size, sampler=mine)
            steps = loop.group_batches(loader, accum=1, count=rows)
            for step, _ in loop.train_(model, [optimizer], steps, squared_error, start=step):
                pass
            state = ckpt.snapshot(model, [optimizer], epoch=epoch)
            if world.rank == 0:
                ckpt.save(folder, state, step)


def squared_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    x, y = batch
    return F.mse_loss(model(x), y, reduction="sum"), y.numel()


def test_linear_regression_under_torchrun_gives_the_weights_of_one_rank(under_torchrun, tmp_path):
    alone, together = str(tmp_path), str(under_torchrun / "linear_regression")
    linear_regression(alone)
    assert [entry.step for entry in ckpt.list_checkpoints(together)] == [
        22,
        44,
        66,
    ]  # 2048 / 96 rows, with a short last batch
    for ours, reference in zip(
        ckpt.list_checkpoints(together), ckpt.list_checkpoints(alone), strict=True
    ):
        weights = ckpt.load(together, ours)["model"]
        assert (
            weights.keys() == nn.Linear(20, 1).state_dict().keys()
        )  # without the prefix "module."
        torch.testing.assert_close(weights, ckpt.load(alone, reference)["model"], **PROMISED)


def read_by_all(folder: str) -> None:
    """Restore a checkpoint on ranks that have all read it, as on machines with a shared folder."""
    with ddp_setup.process_group("cpu") as world:
        model = ddp_setup.replicate(nn.Linear(20, 1), world)
        state, read = (ckpt.newest(folder)[0].state for _ in range(2))
        ckpt.restore_(state, model, [torch.optim.SGD(model.parameters(), lr=0.01)])
        found = [same(dict(model.module.state_dict()), read["model"]), same(state, read)]
        Path(folder, f"read by {world.rank}.json").write_text(json.dumps(found))


def test_a_state_that_every_rank_has_read_is_restored_and_not_changed(under_torchrun):
    for rank in (0, 1):
        assert json.loads(
            (under_torchrun / "linear_regression" / f"read by {rank}.json").read_text()
        ) == [True, True]


# --- 2. a bare nn.Linear ---


def bare_linear(folder: str) -> None:
    with ddp_setup.process_group("cpu") as world:
        torch.manual_seed(0)
        x, y, model = (
            torch.randn(20, 10),
            torch.randn(20, 10),
            ddp_setup.replicate(nn.Linear(10, 10), world),
        )
        mine = x[world.rank :: world.size], y[world.rank :: world.size]
        steps = [([mine], y.numel())] * 10
        for _ in loop.train_(
            model, [torch.optim.SGD(model.parameters(), lr=0.1)], steps, squared_error
        ):
            pass
        if world.rank == 0:
            torch.save(model.module.state_dict(), f"{folder}/linear.pt")


def test_a_linear_layer_under_torchrun_gives_the_weights_of_plain_torch(under_torchrun):
    torch.manual_seed(0)
    x, y, model = torch.randn(20, 10), torch.randn(20, 10), nn.Linear(10, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    weights = torch.load(under_torchrun / "bare_linear" / "linear.pt")
    torch.testing.assert_close(weights, model.state_dict(), **PROMISED)


# --- 3. an MLP, and its accuracy ---


def classify(folder: str) -> None:
    with ddp_setup.process_group("cpu") as world:
        data, test = two_clouds(200), two_clouds(5)
        torch.manual_seed(0)
        model = ddp_setup.replicate(
            nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2)), world
        )
        optimizer, step = torch.optim.Adam(model.parameters(), lr=0.01), 0
        for epoch in range(3):
            mine = chardata.rank_indices(len(data), world.rank, world.size, epoch, seed=0)
            steps = loop.group_batches(
                DataLoader(data, batch_size=8, sampler=mine), accum=1, count=rows
            )
            for step, _ in loop.train_(model, [optimizer], steps, cross_entropy, start=step):
                pass
        accuracy = []
        for part in (data, test):
            mine = chardata.rank_indices(len(part), world.rank, world.size, epoch=0, seed=0)
            accuracy.append(
                loop.evaluate(model, DataLoader(part, batch_size=2, sampler=mine), correct)
            )
        Path(folder, f"{world.rank}.json").write_text(json.dumps(accuracy))
        if world.rank == 0:
            torch.save(model.module, f"{folder}/model.pt")


def two_clouds(n: int) -> TensorDataset:
    y = torch.arange(n) % 2
    return TensorDataset(
        torch.randn(n, 2, generator=torch.Generator().manual_seed(n)) + 2 * y[:, None], y
    )


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum"), len(x)


def correct(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    x, y = batch
    return (model(x).argmax(dim=-1) == y).sum(), len(x)


def test_the_accuracy_of_a_classifier_over_two_ranks_is_exact(under_torchrun):
    model = torch.load(under_torchrun / "classify" / "model.pt", weights_only=False)
    expected = []
    for n in (200, 5):  # no row is counted twice if two ranks share five rows
        x, y = two_clouds(n).tensors
        expected.append(float((model(x).argmax(dim=-1) == y).sum()) / n)
    for rank in (0, 1):
        assert json.loads((under_torchrun / "classify" / f"{rank}.json").read_text()) == expected
    assert expected[0] > 0.8  # the two clouds overlap in one row of six


# --- 4. a GPT with evaluation, schedule, clipping and a checkpoint ---


TOTAL, BLOCK, BATCH = 60, 16, 8


def plans(text: str) -> tuple[chardata.Corpus, chardata.BatchPlan, chardata.BatchPlan]:
    """Return the corpus and the plans for training and for validation."""
    corpus = chardata.read([text], "char")
    train, val = chardata.split(corpus.tokens, 0.2)
    plan = chardata.BatchPlan(train, BLOCK, BATCH, vocab=corpus.vocab)
    return corpus, plan, plan._replace(tokens=val)


def gpt_trainer(folder: str, text: str) -> None:
    with ddp_setup.process_group("cpu") as world:
        corpus, plan, val = plans(text)
        share = {"rank": world.rank, "world_size": world.size}
        config = gpt.Config(corpus.vocab, BLOCK, layers=2, heads=2, embd=32)
        model = ddp_setup.replicate(gpt.build(config, seed=0), world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        training = loop.train_(
            model,
            [optimizer],
            chardata.steps(plan, accum=2, **share),
            gpt.loss,
            dtype=torch.bfloat16,
            clip=1.0,
            lr_at=partial(loop.linear, total=TOTAL, warmup_steps=5),
        )
        for step, report in training:
            if step == TOTAL:
                break
        val_loss = loop.evaluate(model, chardata.every_window(val, **share), gpt.loss)
        state = ckpt.snapshot(model, [optimizer], step=step, config=tuple(config))
        if world.rank == 0:
            ckpt.save(folder, state, step, val_loss)

        again = ddp_setup.replicate(gpt.build(config, seed=1), world)
        state = ckpt.newest(folder)[0].state if world.rank == 0 else {}
        ckpt.restore_(state, again, [torch.optim.AdamW(again.parameters())])
        reloaded = loop.evaluate(again, chardata.every_window(val, **share), gpt.loss)
        Path(folder, f"{world.rank}.json").write_text(
            json.dumps([val_loss, reloaded, optimizer.param_groups[0]["lr"]])
        )


def test_a_gpt_trains_under_torchrun_and_its_checkpoint_has_the_trained_weights(
    under_torchrun, pangrams
):
    folder = under_torchrun / "gpt_trainer"
    (first, reloaded, lr), other = (
        json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)
    )
    assert other == [first, reloaded, lr] and reloaded == first
    assert lr == pytest.approx(0.01 * loop.linear(TOTAL - 1, TOTAL, 5))  # of the last step
    [entry] = ckpt.list_checkpoints(str(folder))
    state = torch.load(folder / entry.name, weights_only=True)
    model = gpt.build(gpt.Config(*state["config"]), seed=2)
    model.load_state_dict(state["model"])
    val_loss = loop.evaluate(model, chardata.every_window(plans(pangrams)[2]), gpt.loss)
    assert val_loss == pytest.approx(first, rel=1e-6)  # promise 4
    assert entry.loss == round(val_loss, 4) < 2.0  # nats; an untrained model has 3.3


# --- 5. characters: a checkpoint after some epochs, and a rank that dies ---


EPOCHS, SAVE_EVERY = 6, 2  # a checkpoint after every second epoch


def char_text(folder: str, text: str, dies_at: str = "never") -> None:
    with ddp_setup.process_group("cpu") as world:
        corpus = chardata.read([text], "char")
        plan = chardata.BatchPlan(corpus.tokens, BLOCK, 4 * BATCH)
        per_epoch = chardata.steps_per_epoch(plan)
        config = gpt.Config(corpus.vocab, BLOCK, layers=1, heads=2, embd=16, dropout=0.1)
        model = ddp_setup.replicate(gpt.build(config, seed=0), world)
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01)]
        found = ckpt.newest(folder)[0] if world.rank == 0 else None
        start = ddp_setup.from_rank_zero(lambda: found.entry.step if found else 0, world)
        if start:
            ckpt.restore_(found.state if found else {}, model, optimizers)
        Path(folder, f"rank {world.rank} began at {start}").touch()
        share = {"rank": world.rank, "world_size": world.size}
        steps = chardata.steps(plan, start=start, **share)
        for step, _ in loop.train_(model, optimizers, steps, gpt.loss, start=start):
            if f"{step}" == dies_at and world.rank == 1 and not start:
                os.kill(os.getpid(), signal.SIGKILL)
            if step % (SAVE_EVERY * per_epoch) == 0:
                state = ckpt.snapshot(model, optimizers, step=step)
                if world.rank == 0:
                    ckpt.save(folder, state, step, loss=None, keep=2)
            if step == EPOCHS * per_epoch:
                break


def test_torchrun_restarts_after_a_rank_is_killed_and_the_weights_are_bitwise_equal(under_torchrun):
    killed, undisturbed = under_torchrun / "killed", under_torchrun / "char_text"
    assert sorted(path.name for path in killed.glob("rank*")) == [
        f"rank {rank} began at {step}" for rank in (0, 1) for step in (0, 16)
    ]
    entries, others = ckpt.list_checkpoints(str(killed)), ckpt.list_checkpoints(str(undisturbed))
    assert [entry.step for entry in entries] == [32, 48]  # an epoch has 8 steps
    assert [entry.step for entry in others] == [32, 48]
    for entry, other in zip(entries, others):  # promise 3, also for the moments
        assert same(ckpt.load(str(killed), entry), ckpt.load(str(undisturbed), other))


# --- 6. a CNN with BatchNorm ---


def cnn(folder: str, device: str, sync_batchnorm: bool = True) -> None:
    with ddp_setup.process_group(device) as world:
        torch.manual_seed(0)
        x, y = torch.randn(32, 1, 8, 8), torch.arange(32) % 2
        x += y[:, None, None, None]
        layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)
        model = nn.Sequential(*layers)
        if sync_batchnorm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        model = ddp_setup.replicate(model, world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        mine = x[world.rank :: world.size], y[world.rank :: world.size]
        losses = [
            r.loss.item()
            for _, r in loop.train_(model, [optimizer], [([mine], 32)] * 10, cross_entropy)
        ]
        right = loop.evaluate(model, [mine], correct)
        state = ckpt.snapshot(model, [optimizer], losses=losses, right=right)
        if world.rank == 0:
            ckpt.save(folder, state, 10)


def outcome(folder: Path) -> dict:
    return ckpt.newest(str(folder))[0].state


def test_in_one_process_synchronised_batch_norm_changes_nothing(tmp_path):
    cnn(str(tmp_path / "sync"), "cpu")
    cnn(str(tmp_path / "plain"), "cpu", sync_batchnorm=False)
    state, reference = outcome(tmp_path / "sync"), outcome(tmp_path / "plain")
    assert same(state, reference)
    assert int(state["model"]["1.num_batches_tracked"]) == 10
    assert state["losses"][-1] < 0.5 * state["losses"][0] and state["right"] > 0.5


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="SyncBatchNorm needs a GPU per rank")
def test_on_two_ranks_synchronised_batch_norm_gives_the_weights_of_one_rank(tmp_path):
    cnn(str(tmp_path / "alone"), "cuda")
    assert call.spawn(cnn, 2, str(tmp_path / "together"), "cuda") == 0
    state, reference = outcome(tmp_path / "together"), outcome(tmp_path / "alone")
    assert state["right"] == reference["right"]
    torch.testing.assert_close(state["losses"], reference["losses"], **PROMISED)
    torch.testing.assert_close(state["model"], reference["model"], **PROMISED)


# --- launching ---


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Use one thread in this process, because other tests use the cores meanwhile."""
    monkeypatch.setattr(ddp_setup, "available_cpus", lambda: 1)


@pytest.fixture(scope="module")
def pangrams(tmp_path_factory):
    """Return the name of a text file of 4,095 characters."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog; " * 91)
    return str(file)


def all_programs(folder: str, text: str) -> None:
    """Run the programs in the same processes, because processes take seconds to start.

    The first one kills rank 1 once, so torchrun starts this function twice.
    """
    jobs = {"killed": partial(char_text, text=text, dies_at="20")}
    jobs |= {job.__name__: job for job in (linear_regression, bare_linear, classify)}
    jobs |= {job.__name__: partial(job, text=text) for job in (gpt_trainer, char_text)}
    for name, job in jobs.items():
        Path(folder, name).mkdir(exist_ok=True)
        job(str(Path(folder, name)))
    read_by_all(str(Path(folder, "linear_regression")))


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory, pangrams):
    """Return the folder in which each program that two ranks of torchrun ran has a folder of its own."""
    folder = tmp_path_factory.mktemp("torchrun")
    start = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    program = ["-m", "test_systems", "all_programs", str(folder), pangrams]
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *start, *program],
        cwd=ROOT / "tests",
        env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr
    return folder


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
