"""A complete training program, as a user of the five modules would write it, under torchrun.

It is an example as well as a test. Rank 1 is killed once, and torchrun starts the ranks again.
"""

import os
import signal
import subprocess
import sys
from functools import partial

import pytest
import torch
from conftest import ENVIRONMENT, ROOT, same

import chardata
import ckpt
import ddp_setup
import gpt
import loop

TOTAL, SAVE_EVERY, BLOCK = 48, 16, 16


def plans(text: str) -> tuple[chardata.BatchPlan, chardata.BatchPlan]:
    """Return the plans for training and for validation."""
    corpus = chardata.read([text], "char")
    train, val = chardata.split(corpus.tokens, 0.2)
    plan = chardata.BatchPlan(train, BLOCK, batch_size=8, vocab=corpus.vocab)
    return plan, plan._replace(tokens=val)


def train(folder: str, text: str, dies_at: int = 0) -> None:
    with ddp_setup.process_group("cpu") as world:
        plan, val = plans(text)
        share = {"rank": world.rank, "world_size": world.size}
        config = gpt.Config(plan.vocab, BLOCK, layers=2, heads=2, embd=16, dropout=0.1)
        model = ddp_setup.replicate(gpt.build(config, seed=0), world)
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01)]
        found = ckpt.newest(folder)[0] if world.rank == 0 else None
        start = ddp_setup.from_rank_zero(lambda: found.entry.step if found else 0, world)
        if start:
            ckpt.restore_(found.state if found else {}, model, optimizers)
        training = loop.train_(
            model,
            optimizers,
            chardata.steps(plan, accum=2, start=start, **share),
            gpt.loss,
            start=start,
            dtype=torch.bfloat16,
            clip=1.0,
            lr_at=partial(loop.linear, total=TOTAL, warmup_steps=5),
        )
        for step, _ in training:
            if step == dies_at and world.rank == 1 and not start:
                os.kill(os.getpid(), signal.SIGKILL)
            if step % SAVE_EVERY == 0:
                val_loss = loop.evaluate(model, chardata.every_window(val, **share), gpt.loss)
                state = ckpt.snapshot(model, optimizers, step=step, config=tuple(config))
                if world.rank == 0:
                    ckpt.save(folder, state | {"began": start}, step, val_loss)
            if step == TOTAL:
                break


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog; " * 91)
    return str(file)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, text):
    """Return the folders of a run whose rank 1 was killed after step 20, and of one without that."""
    folder = tmp_path_factory.mktemp("torchrun")
    folders = folder / "killed", folder / "undisturbed"
    for each in folders:
        each.mkdir()
    start = "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 1".split()
    ended = subprocess.run(
        [sys.executable, *start, "-m", "test_systems", *map(str, folders), text],
        cwd=ROOT / "tests/faults",
        env={**ENVIRONMENT, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr
    return folders


def test_torchrun_restarts_after_a_rank_is_killed_and_the_weights_are_bitwise_equal(folders):
    killed, undisturbed = (
        [ckpt.load(str(folder), entry) for entry in ckpt.list_checkpoints(str(folder))]
        for folder in folders
    )
    assert [state["step"] for state in killed] == [16, 32, 48]
    assert [state.pop("began") for state in killed] == [0, 16, 16]
    assert [state.pop("began") for state in undisturbed] == [0, 0, 0]
    assert same(killed, undisturbed)  # also the moments


def test_the_validation_loss_of_two_ranks_is_that_of_the_weights_in_the_checkpoint(folders, text):
    *_, entry = ckpt.list_checkpoints(str(folders[1]))
    state = torch.load(folders[1] / entry.name, weights_only=True)
    model = gpt.build(gpt.Config(*state["config"]), seed=2)
    model.load_state_dict(state["model"])
    val_loss = loop.evaluate(model, chardata.every_window(plans(text)[1]), gpt.loss)
    assert entry.loss == pytest.approx(val_loss, abs=1e-4)
    assert val_loss < 3.0  # nats; an untrained model has 3.3


if __name__ == "__main__":
    folder, other, text_file = sys.argv[1:]
    train(folder, text_file, dies_at=20)
    train(other, text_file)
