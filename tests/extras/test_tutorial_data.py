"""The tutorial's script for a stream, and the changes of the last script for an average and a logger: after a stop and a
resume, the weights are those of an unbroken run."""

import os
import subprocess
from functools import cache
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import same
from scripts import TUTORIAL, Outcome, assert_close, copy, definitions, run, start
from torch import nn
from torch.utils.data import DataLoader


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """unbroken(script, ranks, *args) runs a script in a folder of its own, once."""
    return cache(lambda script, *args: run(script, tmp_path_factory.mktemp("unbroken"), *args))


@pytest.fixture(scope="module")
def stream():
    return definitions("stream.py")


@pytest.mark.parametrize(
    "position, world_size, workers", [(0, 2, 2), (2300, 3, 0), (5000, 3, 2), (5002, 2, 0)]
)
def test_ranks_and_workers_divide_the_rows_of_each_global_batch(
    stream, position, world_size, workers
):
    parts = [
        DataLoader(
            stream["RankBatches"](position, rank, world_size), batch_size=None, num_workers=workers
        )
        for rank in range(world_size)
    ]
    expected = list(islice(stream["read_stream"](), position, None))
    for start_row, of_ranks in zip(
        range(0, len(expected), 100), zip(*parts, strict=True), strict=True
    ):
        rows = expected[start_row : start_row + 100]
        for rank, (inputs, targets) in enumerate(of_ranks):
            mine = rows[rank::world_size]
            assert torch.equal(inputs, torch.tensor([x for x, _ in mine]).reshape(-1, 20))
            assert targets.tolist() == [y for _, y in mine] and targets.dtype == torch.long


# On 3 ranks, the last rank has no row in the last step.
@pytest.mark.parametrize("ranks, workers", [(1, 2), (2, 2), (3, 0)])
def test_the_stream_gives_the_weights_of_a_plain_loop(unbroken, stream, ranks, workers):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    rows = list(stream["read_stream"]())
    for first in range(0, len(rows), 100):
        x, y = map(torch.tensor, zip(*rows[first : first + 100]))
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
    ended = unbroken("stream.py", ranks, workers)
    assert_close(ended, Outcome(ended.lines, model.state_dict()))
    assert (ended.state["position"], len(ended.lines)) == (5002, 5)


@pytest.mark.parametrize(
    "stop, before, after",
    [
        (23, (1, 0), (2, 2)),
        (23, (2, 2), (2, 2)),
        (50, (1, 0), (3, 0)),  # only 2 rows are left
    ],
)
def test_a_stream_that_was_stopped_continues_with_the_next_row(
    unbroken, tmp_path, stop, before, after
):
    stopped = run("stream.py", tmp_path, *before, stop=stop)
    assert stopped.state["position"] == 100 * stop
    resumed = run("stream.py", tmp_path, *after)
    first = resumed.lines.pop(0)
    assert first == f"continuing after step {stop}; to start again, delete out-stream"
    expected = unbroken("stream.py", *after)
    assert_close(resumed._replace(lines=stopped.lines + resumed.lines), expected)
    if before == after:
        assert same(resumed.state, expected.state)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_error_beside_workers_of_a_dataloader_ends_the_program(tmp_path, ranks):
    line = "        position = position + "
    failing = line, f"        raise RuntimeError('mine')\n{line}"
    done = start(copy(TUTORIAL / "stream.py", tmp_path, replace=failing), tmp_path, ranks, 2)
    assert done.returncode == 1 and "RuntimeError: mine" in done.stderr


def test_a_stream_that_was_read_to_its_end_stays_as_it_is(tmp_path):
    first, again = run("stream.py", tmp_path), run("stream.py", tmp_path)
    assert again.lines == ["continuing after step 51; to start again, delete out-stream"]
    assert same(again.state, first.state)


# ----------------------------------------------------------------------- changes of 4_checkpoints.py


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """changed(name) returns 4_checkpoints.py with the changes of a .diff file."""

    @cache
    def apply(name: str) -> Path:
        script = copy(TUTORIAL / "4_checkpoints.py", tmp_path_factory.mktemp("changed"))
        subprocess.run(["git", "apply", TUTORIAL / name], cwd=script.parent, check=True)
        return script

    return apply


# 40 is in the middle of an epoch. After step 54, the last of an epoch, the scheduler has been called.
@pytest.mark.parametrize("ranks, stop", [(1, 54), (2, 40)])
@pytest.mark.parametrize("change", ["", "ema.diff"])
def test_the_schedule_and_the_average_continue_exactly(
    unbroken, changed, tmp_path, ranks, stop, change
):
    script = changed(change) if change else TUTORIAL / "4_checkpoints.py"
    stopped, resumed = run(script, tmp_path, ranks, stop=stop), run(script, tmp_path, ranks)
    expected = unbroken(script, ranks)
    assert stopped.lines + resumed.lines[1:] == expected.lines
    assert same(resumed.state, expected.state)
    rates = [state["scheduler"]["_last_lr"][0] for state in (stopped.state, expected.state)]
    assert rates[0] > rates[1] == 0  # the rate changes, so the test would notice a wrong one
    if change:  # The average is another one than the last weights.
        weights, prefix = expected.state["model"], "ema.module.0."
        assert not torch.equal(weights[f"{prefix}weight"], weights["model.0.weight"])


@pytest.mark.parametrize("before, after", [(1, 2), (2, 1)])
def test_a_resumed_run_continues_the_same_wandb_run(unbroken, changed, tmp_path, before, after):
    pytest.importorskip("wandb")
    script = changed("wandb_logging.diff")
    env = {name: "" for name in os.environ if name.startswith("WANDB_")}
    env |= {f"WANDB_{name}_DIR": f"{tmp_path / name}" for name in ("CONFIG", "CACHE", "DATA")}
    env |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
    stopped = run(script, tmp_path, before, stop=40, env=env)
    resumed = run(script, tmp_path, after, env=env)
    whole = resumed._replace(lines=stopped.lines + resumed.lines[1:])
    assert_close(whole, unbroken("4_checkpoints.py", 1))  # the script without the logger
    # One folder for each start, although one of them had two ranks. Its name ends with the run's id.
    folders = [*(tmp_path / "wandb").glob("offline-run-*")]
    assert [path.name.split("-")[-1] for path in folders] == [resumed.state["run_id"]] * 2
    for path in folders:
        (log,) = path.glob("*.wandb")
        assert b"grad_norm" in log.read_bytes() and b"accuracy" in log.read_bytes()
