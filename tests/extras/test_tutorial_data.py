"""The tutorial's scripts for a stream, for images and for a logger: the weights are the same on one
and two ranks, and after a stop and a resume."""

import difflib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import ENVIRONMENT, ROOT, same
from torch import nn
from torch.utils.data import DataLoader

TUTORIAL = ROOT / "extras" / "tutorial"
MODULES = ["chardata", "ckpt", "ddp_setup", "loop"]

# These lines are put before a script. While the optimizer does the given step, the last rank sends
# SIGTERM to itself and to its DataLoader workers, as torchrun does. train_ has asked for signals
# before that, so the run stops after the next step.
STOP = """
import itertools, os, signal
from torch.optim.optimizer import register_optimizer_step_post_hook
steps_done = itertools.count(1)
def hook(*_):
    if next(steps_done) == {step} and os.environ.get("RANK", "0") == "{last_rank}":
        os.killpg(0, signal.SIGTERM)
register_optimizer_step_post_hook(hook)
"""


class Outcome(NamedTuple):
    lines: list[str]  # standard output
    state: dict  # the newest checkpoint
    step: int  # that its name says


def write_stacks_and_kill(process: subprocess.Popen, folder: Path) -> None:
    """Let a script that runs in `folder` and its processes write where they are, and end them."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.readlink(entry / "cwd") == f"{folder}" and int(entry.name) != process.pid:
                os.kill(int(entry.name), signal.SIGABRT)
    time.sleep(5)
    process.send_signal(signal.SIGABRT)  # last, because its ranks die with it
    time.sleep(1)
    process.kill()


def launch(
    script: Path, folder: Path, ranks: int, *args: object, code: int = 0, env: dict = {}
) -> str:
    """Run a script in `folder`, as plain python or with torchrun; return its standard output.

    Ranks other than 0 must print nothing. code: the exit code that is expected.
    """
    launcher, logs = [sys.executable], Path(tempfile.mkdtemp(dir=folder))
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", f"{ranks}"]
        launcher += ["--redirects", "3", "--log-dir", f"{logs}"]  # output to files, one per rank
    process = subprocess.Popen(
        [*launcher, str(script), *map(str, args)],
        cwd=folder,
        env={**ENVIRONMENT, "PYTHONFAULTHANDLER": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that a signal to the process group reaches only the script
    )
    hangs = threading.Timer(900, write_stacks_and_kill, [process, folder])
    hangs.daemon = True
    hangs.start()
    output, errors = process.communicate()
    hangs.cancel()
    written = {
        f"{path.parent.name}/{path.stem}": path.read_text() for path in logs.glob("*/*/*/std*.log")
    }
    assert process.returncode == code, f"{errors}\n{written}"
    if ranks == 1:
        return output
    assert len(written) == 2 * ranks
    for rank in range(1, ranks):
        assert written[f"{rank}/stdout"] == "" and "wandb" not in written[f"{rank}/stderr"]
    return written["0/stdout"]


def run(
    name: str,
    folder: Path,
    ranks: int = 1,
    *args: object,
    stop: int = 0,
    replace: tuple[str, str] = ("", ""),
    env: dict = {},
) -> Outcome:
    """Run a script of the tutorial in `folder`. stop: a signal to the last rank stops the run after
    this many steps, at least 2. Its line "stopped after step" is not in the result.

    replace: run a copy in which the first text is replaced by the second.
    """
    script = TUTORIAL / name
    if stop or replace[0]:
        text = script.read_text()
        assert replace[0] in text
        copied = folder / "copied"
        copied.mkdir()
        for module in MODULES:
            (copied / f"{module}.py").write_text((ROOT / f"{module}.py").read_text())
        script = copied / name
        before = STOP.format(step=stop - 1, last_rank=ranks - 1) if stop else ""
        script.write_text(before + text.replace(*replace))
    code = 0 if not stop else 3 if ranks == 1 else 1  # torchrun has exit codes of its own
    lines = launch(script, folder, ranks, *args, code=code, env=env).splitlines()
    if stop:
        assert lines.pop() == f"stopped after step {stop}"
    newest = sorted(folder.glob("out-*/step-*.pt"))[-1]
    state = torch.load(newest, weights_only=True)
    return Outcome(lines, state, int(newest.name.split("-")[1]))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """unbroken(script, ranks, *args) runs a script in a folder of its own, once."""

    @cache
    def run_once(name: str, ranks: int, *args: object) -> Outcome:
        return run(name, tmp_path_factory.mktemp(Path(name).stem), ranks, *args)

    return run_once


def load_script(name: str):
    """Import a script without running its main()."""
    spec = importlib.util.spec_from_file_location(name, TUTORIAL / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_close(a: Outcome, b: Outcome) -> None:
    """Compare weights, buffers, the optimizer's state and the printed lines of two runs."""
    tensors = [
        [run.state["model"], [optimizer["state"] for optimizer in run.state["optimizers"]]]
        for run in (a, b)
    ]
    torch.testing.assert_close(*tensors, rtol=1e-4, atol=1e-5)
    assert_same_lines(a.lines, b.lines)


def assert_same_lines(lines: list[str], expected: list[str]) -> None:
    """Compare words, and the numbers in them with the tolerance of promise 1."""
    assert len(lines) == len(expected)
    for line, other in zip(lines, expected):
        for word, expected_word in zip(line.split(), other.split(), strict=True):
            if "." in word:
                number = float(word.rstrip(","))
                assert number == pytest.approx(float(expected_word.rstrip(",")), rel=1e-4)
            else:
                assert word == expected_word


# -------------------------------------------------------------------------------------- a stream


@pytest.fixture(scope="module")
def stream():
    return load_script("stream")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("position", [0, 2300, 5000, 5002])
def test_ranks_and_workers_divide_the_rows_of_each_global_batch(
    stream, position, world_size, workers
):
    parts = [
        list(
            DataLoader(
                stream.RankBatches(position, rank, world_size),
                batch_size=None,
                num_workers=workers,
            )
        )
        for rank in range(world_size)
    ]
    expected = list(islice(stream.read_stream(), position, None))
    assert len(expected) == 5002 - position
    for start, of_ranks in zip(range(0, len(expected), 100), zip(*parts, strict=True), strict=True):
        rows = [None] * len(expected[start : start + 100])
        for rank, (inputs, targets) in enumerate(of_ranks):
            assert inputs.shape == (len(targets), 20) and targets.dtype == torch.long
            rows[rank::world_size] = zip(inputs, targets.tolist(), strict=True)
        for (inputs, target), (x, y) in zip(rows, expected[start : start + 100], strict=True):
            assert torch.equal(inputs, torch.tensor(x)) and target == y


@pytest.fixture(scope="module")
def plain_loop(stream) -> dict[str, torch.Tensor]:
    """Return the weights of an ordinary loop over the same rows: one process, and only torch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    rows = list(stream.read_stream())
    for start in range(0, len(rows), 100):
        x, y = map(torch.tensor, zip(*rows[start : start + 100]))
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
    return model.state_dict()


# On 3 ranks, the last rank has no row in the last step.
@pytest.mark.parametrize("ranks, workers", [(1, 0), (1, 2), (2, 0), (2, 2), (3, 0)])
def test_the_stream_gives_the_weights_of_a_plain_loop(unbroken, plain_loop, ranks, workers):
    ended = unbroken("stream.py", ranks, workers)
    torch.testing.assert_close(ended.state["model"], plain_loop, rtol=1e-4, atol=1e-5)
    assert_close(ended, unbroken("stream.py", 1, 0))
    assert same(ended.state, unbroken("stream.py", ranks, 0).state)  # workers change no bit
    assert (ended.step, ended.state["position"], len(ended.lines)) == (51, 5002, 5)


@pytest.mark.parametrize(
    "stop, before, after",
    [
        (23, (1, 0), (2, 2)),
        (23, (2, 2), (1, 0)),
        (23, (2, 0), (2, 2)),
        (50, (1, 0), (3, 0)),  # only 2 rows are left
    ],
)
def test_a_stream_that_was_stopped_continues_with_the_next_row(
    unbroken, tmp_path, stop, before, after
):
    stopped = run("stream.py", tmp_path, *before, stop=stop)
    assert (stopped.step, stopped.state["position"]) == (stop, 100 * stop)
    resumed = run("stream.py", tmp_path, *after)
    first, *lines = resumed.lines
    assert first == f"continuing after step {stop}; to start again, delete out-stream"
    whole = Outcome(stopped.lines + lines, resumed.state, resumed.step)
    assert_close(whole, unbroken("stream.py", 1, 0))
    if before[0] == after[0]:
        assert same(resumed.state, unbroken("stream.py", after[0], 0).state)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_error_beside_workers_of_a_dataloader_ends_the_program(tmp_path, ranks):
    script = tmp_path / "stream.py"
    text, line = (TUTORIAL / "stream.py").read_text(), "        position = position + "
    assert text.count(line) == 1
    script.write_text(text.replace(line, f"        raise RuntimeError('mine')\n{line}"))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *(launcher if ranks > 1 else []), script, "2"],
        cwd=tmp_path,
        env={**ENVIRONMENT, "PYTHONPATH": f"{ROOT}"},
        timeout=600,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "RuntimeError: mine" in done.stderr


def test_a_stream_that_was_read_to_its_end_stays_as_it_is(tmp_path):
    first = run("stream.py", tmp_path)
    again = run("stream.py", tmp_path)
    assert again.lines == ["continuing after step 51; to start again, delete out-stream"]
    assert same(again.state, first.state) and again.step == first.step == 51


# ---------------------------------------------------------------------------------------- images


def test_images_on_one_and_two_ranks_give_the_same_weights_and_statistics(unbroken):
    one, two = unbroken("images.py", 1), unbroken("images.py", 2)
    assert {"1.running_mean", "1.running_var", "1.num_batches_tracked"} <= one.state["model"].keys()
    assert_close(two, one)
    assert one.step == 60 and len(one.lines) == 3


def test_images_need_batchnorm_over_all_ranks(unbroken, tmp_path):
    """This shows that the test above would notice ordinary BatchNorm."""
    replace = "else SyncBatchNormForCpu", "else nn.BatchNorm2d"
    other = run("images.py", tmp_path, 2, replace=replace).state["model"]
    weights = unbroken("images.py", 1).state["model"]
    assert (other["0.weight"] - weights["0.weight"]).abs().max() > 1e-3


@pytest.mark.parametrize("before, after", [(1, 2), (2, 2)])
def test_images_continue_in_the_middle_of_an_epoch(unbroken, tmp_path, before, after):
    stopped = run("images.py", tmp_path, before, stop=31)
    assert stopped.step == 31 and len(stopped.lines) == 1
    resumed = run("images.py", tmp_path, after)
    first, *lines = resumed.lines
    assert first == "continuing after step 31; to start again, delete out-images"
    whole = Outcome(stopped.lines + lines, resumed.state, resumed.step)
    assert_close(whole, unbroken("images.py", 1))
    if before == after:
        assert same(resumed.state, unbroken("images.py", after).state)


def test_augmentation_depends_on_epoch_and_index_only():
    script = load_script("images")
    torch.manual_seed(0)
    images, labels = script.make_images(40)
    first = [script.Augmented(images, labels, 0)[i][0] for i in range(40)]
    again = [script.Augmented(images, labels, 0)[i][0] for i in reversed(range(40))]
    assert all(map(torch.equal, first, reversed(again)))
    other_epoch = [script.Augmented(images, labels, 1)[i][0] for i in range(40)]
    assert sum(map(torch.equal, first, other_epoch)) < 5  # one of 50 is the same by chance
    same_image = [
        script.Augmented(images[:1].expand(40, -1, -1, -1), labels, 0)[i][0] for i in range(40)
    ]
    assert len({image.numpy().tobytes() for image in same_image}) > 10  # indices differ
    assert all(image.shape == (1, 16, 16) for image in first)


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_batchnorm_for_cpu_computes_what_torch_computes(group_of_one):
    script = load_script("images")
    torch.manual_seed(0)
    x, weight = torch.randn(2, 6, 3, 5, 5, dtype=torch.float64)
    results = []
    for norm in (
        nn.BatchNorm2d(3, dtype=torch.float64),
        script.SyncBatchNormForCpu(3, dtype=torch.float64),
    ):
        nn.init.uniform_(norm.weight)
        nn.init.zeros_(norm.bias)
        norm.weight.data.copy_(torch.tensor([0.5, 1.0, 2.0]))
        inputs = x.clone().requires_grad_()
        for _ in range(2):
            (norm(inputs).exp() * weight).sum().backward()
        results.append(
            [inputs.grad, norm.weight.grad, norm.bias.grad, norm.eval()(x), norm.state_dict()]
        )
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


def test_the_class_for_cpu_is_needed_and_fits_checkpoints_from_cuda(group_of_one):
    norm = load_script("images").SyncBatchNormForCpu(3)
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm2d(3))
    assert same({**norm.state_dict()}, {**converted.state_dict()})
    with pytest.raises(ValueError, match="expected input tensor to be on"):
        converted(torch.randn(2, 3, 4, 4))


# ---------------------------------------------------------------------------------------- wandb


def test_the_logger_adds_few_lines():
    scripts = [TUTORIAL / "4_checkpoints.py", TUTORIAL / "wandb_logging.py"]
    texts = [script.read_text().split('"""\n\n')[1].splitlines() for script in scripts]
    changes = [line[0] for line in difflib.ndiff(*texts)]
    assert len(texts[1]) - len(texts[0]) == changes.count("+") - changes.count("-") == 8


def read_wandb(folder: Path) -> tuple[str, dict[int, dict[str, float]]]:
    """Return the run's id and {step: {name: value}} from the file of an offline run.

    The file is a log of LevelDB: 7 bytes, then blocks of 32 KiB. Each part of a record has a header
    of 7 bytes: checksum (4), length (2), type (1 whole, 2 first, 3 middle, 4 last).
    """
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("run-*.wandb")
    data, at, whole, run_id = path.read_bytes(), 7, b"", ""
    history: dict[int, dict[str, float]] = {}
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the end of a block has no room for a header
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):
            record, whole = Record.FromString(whole), b""
            run_id = record.run.run_id or run_id
            row = {
                item.key or item.nested_key[0]: float(item.value_json)
                for item in record.history.item
            }
            if row:
                step = record.history.step.num
                assert step not in history, f"step {step} was logged twice"
                history[step] = {k: v for k, v in row.items() if not k.startswith("_")}
    return run_id, history


@pytest.fixture
def offline(tmp_path) -> dict[str, str]:
    pytest.importorskip("wandb")
    names = ["WANDB_DIR", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"]
    return {
        **{name: "" for name in os.environ if name.startswith("WANDB_")},
        **{name: str(tmp_path / name.lower()) for name in names[1:]},
        **{"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"},
    }


@pytest.mark.parametrize("before, after", [(1, 2), (2, 1)])
def test_a_resumed_run_continues_the_same_wandb_run(unbroken, offline, tmp_path, before, after):
    stopped = run("wandb_logging.py", tmp_path, before, stop=40, env=offline)
    resumed = run("wandb_logging.py", tmp_path, after, env=offline)
    assert (stopped.step, resumed.step) == (40, 81)
    # 4_checkpoints.py is the script without the logger
    without = unbroken("4_checkpoints.py", 1)
    torch.testing.assert_close(resumed.state["model"], without.state["model"], rtol=1e-4, atol=1e-5)
    assert resumed.lines[0] == "continuing after step 40; to start again, delete out-wandb"
    assert_same_lines(stopped.lines + resumed.lines[1:], without.lines)

    # A run in wandb/ for each start, although one of them had two ranks.
    first, second = sorted((tmp_path / "wandb").glob("offline-run-*"))
    (first_id, begin), (second_id, end) = read_wandb(first), read_wandb(second)
    assert first_id == second_id == stopped.state["run_id"] == resumed.state["run_id"] != ""
    assert sorted([*begin, *end]) == sorted({*range(5, 81, 5), 27, 54, 81})  # each step once
    assert max(begin) == 40 and min(end) == 45
    history = {**begin, **end}
    assert {step for step in history if "loss" in history[step]} == {*range(5, 81, 5)}
    assert [f"{history[step]['accuracy']:.4f}" for step in (27, 54, 81)] == [
        line.split()[-1] for line in without.lines
    ]


def test_two_runs_have_different_ids(offline, tmp_path):
    ids = set()
    for name in "ab":
        (tmp_path / name).mkdir()
        ids.add(run("wandb_logging.py", tmp_path / name, stop=2, env=offline).state["run_id"])
    assert len(ids) == 2
