"""The scripts of extras/tutorial give the same weights on one rank and on several, and after a stop."""

import re
from functools import cache
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, same
from scripts import (
    MODULES,
    STOP,
    TUTORIAL,
    Outcome,
    assert_close,
    copy,
    definitions,
    numbers,
    run,
    start,
)
from torch import nn
from torch.utils.data import DataLoader

SCRIPTS = sorted(TUTORIAL.glob("[0-9]_*.py"))


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """outcome(script, ranks, *args) runs a script in a new folder, once. Returns (Outcome, folder)."""

    @cache
    def run_once(script: str | Path, ranks: int = 1, *args: object) -> tuple[Outcome, Path]:
        if script == "hugging_face.py":
            pytest.importorskip("transformers")
        folder = tmp_path_factory.mktemp("tutorial")
        return run(script, folder, ranks, *args), folder

    return run_once


@pytest.fixture(scope="module")
def ordered(tmp_path_factory) -> Outcome:
    """Run script 0 with the rows in the order in which the scripts from 2 on train on them."""
    folder = tmp_path_factory.mktemp("ordered")
    sampler = "(lambda s: s.set_epoch(epoch) or s)(chardata.RankSampler(len(train), 0, 1))"
    order = "shuffle=True", f"sampler={sampler}"
    script = copy(SCRIPTS[0], folder, "import chardata\n", order)
    return run(script, folder, env={"PYTHONPATH": f"{ROOT}"})


# ------------------------------------------------------------------------------------- the four steps


def test_each_script_imports_one_module_more_than_the_one_before():
    assert [script.name[0] for script in SCRIPTS] == list("01234")
    for number, script in enumerate(SCRIPTS):
        imported = re.findall(r"^import (\w+)$", script.read_text(), re.MULTILINE)
        assert {*MODULES} & {*imported} == {*MODULES[:number]}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_each_script_gives_the_weights_and_output_of_the_single_process(
    outcome, ordered, number, ranks
):
    single = outcome(SCRIPTS[0])[0] if number == 1 else ordered
    distributed = outcome(SCRIPTS[number], ranks)[0]
    if (number, ranks) == (2, 2):  # this script prints the loss of rank 0's rows only
        single, distributed = (
            ran._replace(lines=[re.sub(r"loss [0-9.]*", "", line) for line in ran.lines])
            for ran in (single, distributed)
        )
    assert_close(distributed, single)
    assert len(distributed.lines) == 3  # only rank 0 prints


# 40 is in the middle of the second epoch, 54 is its last step, and 81 is the last step of all. With
# 2,497 rows, the last step of an epoch has only one row, so one of two ranks has none.
@pytest.mark.parametrize("step, rows", [(40, 2500), (54, 2500), (26, 2497)])
def test_the_last_script_stopped_on_one_process_continues_on_two(outcome, tmp_path, step, rows):
    shorter = "[:2500]", f"[:{rows}]"
    whole = rows == 2500
    unbroken = outcome(SCRIPTS[4])[0] if whole else run(SCRIPTS[4], tmp_path / "u", replace=shorter)
    stopped = run(SCRIPTS[4], tmp_path, stop=step, replace=shorter)
    resumed = run(SCRIPTS[4], tmp_path, 2, replace=shorter)
    first = resumed.lines.pop(0)
    assert first == f"continuing after step {step}; to start again, delete out-tutorial"
    assert_close(resumed._replace(lines=stopped.lines + resumed.lines), unbroken)


def test_a_signal_in_the_last_step_is_no_stop(outcome, tmp_path):
    script = copy(SCRIPTS[4], tmp_path, STOP.format(step=80, last_rank=0))
    done = start(script, tmp_path, 1)
    assert (done.returncode, done.stdout.splitlines()) == (0, outcome(SCRIPTS[4])[0].lines)


SLOW_SAVE = """
import atexit, glob, time
import ckpt
def slow(*args, save=ckpt.save, **more):
    time.sleep(5)
    return save(*args, **more)
ckpt.save = slow
# One write for each line, because two ranks write to the same pipe.
end = "end, saved: {}\\n"
atexit.register(lambda: print(end.format(bool(glob.glob("out-*/step-*.pt"))), end=""))
"""


def test_after_a_stop_all_ranks_wait_until_rank_0_has_saved(tmp_path):
    """Otherwise the launcher could end rank 0 in the middle of the save."""
    stop = STOP.format(step=9, last_rank=1)
    done = start(copy(SCRIPTS[4], tmp_path, SLOW_SAVE + stop), tmp_path, 2)
    lines = ["end, saved: True", "end, saved: True", "stopped after step 10"]
    assert sorted(done.stdout.splitlines()) == lines, done.stderr


# 40 is in the middle of an epoch. After step 54, the last of an epoch, the scheduler has been called.
@pytest.mark.parametrize("ranks, stop", [(1, 54), (2, 40)])
def test_the_schedule_continues_exactly(outcome, tmp_path, ranks, stop):
    stopped, resumed = run(SCRIPTS[4], tmp_path, ranks, stop=stop), run(SCRIPTS[4], tmp_path, ranks)
    expected = outcome(SCRIPTS[4], ranks)[0]
    assert stopped.lines + resumed.lines[1:] == expected.lines
    assert same(resumed.state, expected.state)
    rates = [state["scheduler"]["_last_lr"][0] for state in (stopped.state, expected.state)]
    assert rates[0] > rates[1] == 0  # the rate changes, so the test would notice a wrong one


# --------------------------------------------------------------------------------- stream, own data


@pytest.fixture(scope="module")
def stream():
    return definitions("stream.py")


@pytest.mark.parametrize("position, size, workers", [(0, 2, 2), (2300, 3, 0), (5000, 3, 2)])
def test_ranks_and_workers_divide_the_rows_of_each_global_batch(stream, position, size, workers):
    parts = [
        DataLoader(stream["RankBatches"](position, rank, size), None, num_workers=workers)
        for rank in range(size)
    ]
    rows = list(islice(stream["read_stream"](), position, None))
    batches = [rows[first : first + 100] for first in range(0, len(rows), 100)]
    for batch, of_ranks in zip(batches, zip(*parts, strict=True), strict=True):
        for rank, (inputs, targets) in enumerate(of_ranks):
            mine = batch[rank::size]
            assert torch.equal(inputs, torch.tensor([x for x, _ in mine]).reshape(-1, 20))
            assert targets.tolist() == [y for _, y in mine] and targets.dtype == torch.long


# On 3 ranks, the last rank has no row in the last step.
@pytest.mark.parametrize("ranks, workers", [(1, 2), (2, 2), (3, 0)])
def test_the_stream_gives_the_weights_of_a_plain_loop(outcome, stream, ranks, workers):
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
    ended, _ = outcome("stream.py", ranks, workers)
    assert_close(ended, Outcome(ended.lines, model.state_dict()))
    assert (ended.state["position"], len(ended.lines)) == (5002, 5)


# After step 50, only 2 rows are left.
@pytest.mark.parametrize("stop, before, after", [(23, (2, 2), (2, 2)), (50, (1, 0), (3, 0))])
def test_a_stream_that_was_stopped_continues_with_the_next_row(
    outcome, tmp_path, stop, before, after
):
    stopped = run("stream.py", tmp_path, *before, stop=stop)
    assert stopped.state["position"] == 100 * stop
    resumed = run("stream.py", tmp_path, *after)
    first = resumed.lines.pop(0)
    assert first == f"continuing after step {stop}; to start again, delete out-stream"
    expected, _ = outcome("stream.py", *after)
    assert_close(resumed._replace(lines=stopped.lines + resumed.lines), expected)
    if before == after:
        assert same(resumed.state, expected.state)


def test_an_error_beside_workers_of_a_dataloader_ends_the_program(tmp_path):
    line = "        position = position + "
    failing = line, f"        raise RuntimeError('mine')\n{line}"
    done = start(copy(TUTORIAL / "stream.py", tmp_path, replace=failing), tmp_path, 2, 2)
    assert done.returncode == 1 and "RuntimeError: mine" in done.stderr


def test_augmentation_depends_on_epoch_and_index_only():
    script = definitions("images.py")
    images, labels = script["make_images"](40)

    def augmented(images: torch.Tensor, epoch: int, order=range(40)) -> dict[int, bytes]:
        data = script["Augmented"](images, labels, epoch)
        return {i: data[i][0].numpy().tobytes() for i in order}

    first, other_epoch = augmented(images, 0), augmented(images, 1)
    assert augmented(images, 0, reversed(range(40))) == first
    assert sum(first[i] == other_epoch[i] for i in first) < 5  # one of 50 is the same by chance
    same_image = augmented(images[:1].expand(40, -1, -1, -1), 0)
    assert len({*same_image.values()}) > 10  # the index matters


# --------------------------------------------------------------------------------------- own models


@pytest.mark.parametrize("name", ["hugging_face.py", "images.py"])
def test_two_ranks_give_the_losses_and_weights_of_one(outcome, name):
    one, two = (outcome(name, ranks)[0] for ranks in (1, 2))
    assert_close(two, one)
    losses = [numbers([line])[1] for line in one.lines]
    assert len(losses) == 3 and losses[-1] < 0.7 * losses[0]  # the model learns


def test_transformers_reads_the_model_and_computes_the_printed_loss(outcome):
    """The reference takes one sequence at a time, without padding, mask and labels."""
    transformers = pytest.importorskip("transformers")
    one, folder = outcome("hugging_face.py", 1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    torch.manual_seed(0)
    make_sequences = definitions("hugging_face.py")["make_sequences"]
    _, test = make_sequences(480), make_sequences(90)
    with torch.no_grad():
        losses = [
            F.cross_entropy(model(s[None]).logits[0, :-1], s[1:], reduction="none") for s in test
        ]
    assert numbers(one.lines)[-1] == pytest.approx(torch.cat(losses).mean().item(), abs=1e-4)
