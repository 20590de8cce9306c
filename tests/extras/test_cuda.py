"""The CUDA branches. They need a GPU, and are skipped without one.

With a single GPU, the two ranks share it: see one_gpu.py.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import PYTHON, ROOT, Program, ahead, losses, same, state, torchrun
from conftest import run as run_program

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SPAWN = [*PYTHON, "--spawn", "2"]
ONE_GPU = [sys.executable, f"{Path(__file__).parent}/one_gpu.py", "run.py"]
TINY = (
    "--layers 2 --heads 2 --embd 16 --block-size 16 --batch-size 8 --eval-tokens 1000 "
    "--steps 6 --save-every 3 --eval-every 3 --keep 9 --log-every 1 --lr 0.006 --warmup 0"
).split()
# conftest.py hides the GPUs from the programs that the tests start.
CUDA = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES")}


def two_ranks(launcher=SPAWN):
    """Return the launcher, or if there is only one GPU, one whose ranks share it."""
    return launcher if torch.cuda.device_count() > 1 else ONE_GPU


def run(out, *flags, launcher=PYTHON):
    ran = run_program(*TINY, "--out", out, *flags, launcher=launcher, env=CUDA)
    assert ran.code == 0, ran
    assert "x cuda in" in ran.out, ran
    return ran


def trained(out):
    """Return what must be equal in two runs. The names of parts have their digests."""
    found = state(out)
    return [found.get(name) for name in ("model", "optimizers", "step", "scaler", "parts")]


def execute(command, env={}, seconds=300):
    """Run a Python program that can import the modules."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}", **env}
    command = [sys.executable, *command]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=seconds)


def printed(code, env={}):
    """Run a program, and return what it printed."""
    done = execute(["-c", code], env)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "launcher, flags",
    [
        (PYTHON, "--dtype bfloat16"),
        (PYTHON, "--dtype bfloat16 --compile"),
        (PYTHON, "--dtype bfloat16 --optimizer adamw --arch gpt2 --checkpoint-activations"),
        (PYTHON, "--dtype float16 --accum 2"),
        (SPAWN, "--dtype bfloat16 --accum 2"),
        (SPAWN, "--dtype float16"),
        (torchrun(2), "--dtype bfloat16 --strategy zero"),
        (SPAWN, "--dtype float16 --strategy fsdp --accum 2"),
        (SPAWN, "--dtype bfloat16 --strategy fsdp --checkpoint sharded"),
    ],
)
def test_training_gives_the_losses_of_a_cpu_and_continues_exactly(tmp_path, launcher, flags):
    flags = flags.split()
    if launcher is not PYTHON:
        launcher = two_ranks(launcher)
    on_cpu = [flag for flag in flags if flag != "--compile"]
    on_cpu += ["--out", tmp_path / "cpu", "--device", "cpu", "--dtype", "float32"]
    with ahead(
        cuda=lambda: run(tmp_path / "whole", *flags, launcher=launcher),
        cpu=lambda: run_program(*TINY, *on_cpu, launcher=launcher),
    ) as ran:
        assert ran["cuda"].result() and ran["cpu"].result().code == 0
    half = shutil.copytree(tmp_path / "whole", tmp_path / "half")
    for path in half.rglob("step-00000006-*"):  # also parts
        path.unlink()
    resumed = run(half, *flags, launcher=launcher)
    assert "steps 4 to 6" in resumed.out and same(trained(tmp_path / "whole"), trained(half))
    on_cuda, expected = dict(losses(tmp_path / "whole")), dict(losses(tmp_path / "cpu"))
    assert len(expected) == 6 and on_cuda == pytest.approx(expected, rel=0.01)


def test_a_stopped_run_saves_and_its_model_can_be_used_on_both_devices(tmp_path):
    flags = [*TINY, "--dtype", "bfloat16", "--steps", 1000, "--out", tmp_path / "out"]
    with Program(*flags, launcher=two_ranks(), env=CUDA) as program:
        program.read_lines(3)
        program.process.send_signal(signal.SIGTERM)
        ran = program.finish()
    assert ran.code == 3 and "Stopped as asked after step" in ran.out, ran

    def command(name, *flags):
        ran = run_program(name, "--out", tmp_path / "out", *flags, env=CUDA)
        assert ran.code == 0, ran
        return ran.out

    greedy = ["--max-new-tokens", 40, "--temperature", 0, "--prompt", "The "]
    text, on_cpu = (command("sample", *greedy, *more) for more in ([], ["--device", "cpu"]))
    assert text == on_cpu and len(text) > 40
    loss, on_cpu = (
        float(re.search(r"loss (\S+)", command("eval", *flags))[1])
        for flags in ([], ["--device", "cpu"])
    )
    assert loss == pytest.approx(on_cpu, rel=0.01)


@pytest.mark.parametrize("interval", [3, 1000])  # Step 3 evaluates and saves, or only trains.
def test_if_a_rank_is_killed_the_other_ends_with_one_line(tmp_path, interval):
    flags = [*TINY, "--dtype", "bfloat16", "--steps", 1000, "--out", tmp_path / "out"]
    flags += ["--eval-every", interval, "--save-every", interval]
    with Program(*flags, launcher=two_ranks(), env=CUDA) as program:
        program.read_lines(3)
        os.kill(program.children()[-1], 9)
        ran = program.finish()
    assert (ran.code, ran.err) == (1, "Error: process 1 terminated with signal SIGKILL\n"), ran


STEPS = """
import json, warnings
from functools import partial
import torch
import gpt, loop
from extras.cuda_graph import graph_

config = gpt.Config(vocab=13, block_size=8, layers=2, heads=2, embd=16, dropout=0.1)
model = gpt.build(config, seed=0).to("cuda")
x = torch.randint(13, (4, 8), generator=torch.Generator().manual_seed(0))
"""

WAITS = """
def waits(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        call()
        torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in caught)

def train(dtype):
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    training = loop.train_(
        model, gpt.optimizers(model, "muon", 1e-3), [([(x, x)], 32)] * 7, gpt.loss, clip=1.0,
        dtype=dtype, scaler=scaler, lr_at=partial(loop.linear, total=7, warmup_steps=2)
    )
    next(training)  # The optimizers have no state yet, so this step waits.
    print(waits(lambda: [next(training) for _ in range(5)]))

for dtype in (torch.float32, torch.bfloat16, torch.float16):
    train(dtype)
    print(waits(lambda: loop.evaluate(model, [(x, x)] * 5, gpt.loss, dtype)))
graph_(model, (x.to("cuda"), x.to("cuda")), torch.bfloat16)
train(torch.bfloat16)
"""


def test_the_host_waits_only_for_the_result_of_an_evaluation():
    """A step with fused AdamW and Muon does not wait, also with CUDA graphs."""
    assert printed(STEPS + WAITS).split() == [*["0", "1"] * 3, "0"]


LATE = """
def batches(bad):
    for step in range(1, 9):
        yield [(x, step in bad)], 32

def loss_fn(model, batch):
    (x, bad) = batch
    loss, count = gpt.loss(model, (x, x))
    return loss * (torch.nan if bad else 1), count

def optimizers():
    return gpt.optimizers(model, "muon", 1e-3)

asked = iter([False, False, True] + [False] * 9)
stops = [
    report.stop
    for _, report in loop.train_(model, optimizers(), batches([]), loss_fn, stop=lambda: next(asked))
]
weights = []
used = optimizers()
try:
    for step, report in loop.train_(model, used, batches([3, 5, 6]), loss_fn, patience=2):
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        skipped = float(report.skipped)
except loop.Diverged as error:
    message = str(error)
equal = [torch.equal(a, b) for a, b in zip(weights, weights[1:])]
skip_later = [hasattr(optimizer, "found_inf") for optimizer in used]
print(json.dumps([stops, equal, skipped, step, message, skip_later]))
"""


def test_stop_and_divergence_are_noticed_one_step_later_and_a_bad_step_changes_nothing():
    stops, equal, skipped, step, message, skip_later = json.loads(printed(STEPS + LATE))
    assert stops == [False] * 3 + [True]
    # Step 3 is bad, 4 is good, 5 and 6 are bad. Step 7 would be good, but finds out.
    assert equal == [False, True, False, True, True] and skipped == 3 and step == 6
    assert "2 times in a row, up to step 6;" in message
    assert skip_later == [False, False]


GRAPHS = """
from torch.utils._pytree import tree_map_only

replays, make_graphed = [], torch.cuda.make_graphed_callables

def counting(model, examples):
    make_graphed(model, examples)
    replay = model.forward
    model.forward = lambda *inputs: replays.append(len(inputs[0])) or replay(*inputs)

torch.cuda.make_graphed_callables = counting
torch.use_deterministic_algorithms(True)  # as for an exact resume on CUDA
whole, part = (x, x), (x[:3], x[:3])
plan = [[whole], [whole], [whole], [part], [whole, whole], [whole], [part], [whole]]

def train(graph, dtype, compiled, start=0, state=None):
    model = gpt.build(config, seed=0).to("cuda")
    if compiled:
        gpt.compile_(model)
    if graph:
        graph_(model, (x.to("cuda"), x.to("cuda")), dtype)
    used = gpt.optimizers(model, "muon", 0.01)
    if state:
        for part, saved in zip([model, *used], state):
            part.load_state_dict(saved)
    steps = [(step, 8.0 * sum(len(x) for x, _ in step)) for step in plan[start:]]
    found = []
    for done, report in loop.train_(model, used, steps, gpt.loss, start=start, clip=1.0, dtype=dtype):
        found.append(float(report.loss))
        if done == 3:
            found.append(loop.evaluate(model, [whole], gpt.loss, dtype))
        if done == 4 and not start:
            state = [tree_map_only(torch.Tensor, torch.clone, p.state_dict()) for p in (model, *used)]
    return found, [p.detach().clone() for p in model.parameters()], state

for dtype, compiled in [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]:
    losses, weights, _ = train(False, dtype, compiled)
    with_graphs, weights_too, state = train(True, dtype, compiled)
    resumed, last_weights, _ = train(True, dtype, compiled, 4, state)
    equal = all(map(torch.equal, weights * 2, weights_too + last_weights))
    print(losses == with_graphs, losses[5:] == resumed, equal, *replays)
    replays.clear()
"""


def test_a_replayed_graph_gives_the_same_losses_and_weights_bit_by_bit():
    """With dropout, batches of two sizes, several micro-batches, an evaluation, and after a resume.

    The smaller batches and the second micro-batch run without graphs.
    """
    output = printed(STEPS + GRAPHS, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    # Six replays in the whole run, and three after the resume: of the steps 5, 6 and 8.
    expected = " ".join(["True"] * 3 + ["4"] * 9)
    assert output.splitlines() == [expected] * 3


HANG = """
import os, time
import torch, torch.distributed as dist
import ddp_setup
from extras import hang

def main(rank=0):
    with ddp_setup.process_group(timeout=60) as world, hang.report(world, 5):
        assert world.device.type == "cuda" and any(ddp_setup.gather(world.rank == 1, world))
        if world.rank == 1:
            time.sleep(20)  # here one sleeps
        dist.all_reduce(torch.ones(1, device=world.device))
        torch.cuda.synchronize()  # here the other waits

if __name__ == "__main__":
    main() if "RANK" in os.environ else ddp_setup.spawn(main, nprocs=2)
"""


def test_with_nccl_one_line_says_where_each_rank_waits(tmp_path):
    """NCCL lets the host go on until it needs a result."""
    (tmp_path / "stuck.py").write_text(HANG)
    launcher = [] if two_ranks() is SPAWN else ONE_GPU[1:-1]
    done = execute([*launcher, tmp_path / "stuck.py"], seconds=100)
    (line,) = [line for line in done.stderr.splitlines() if "no progress" in line]
    where = ("# here the other waits", "# here one sleeps")
    lines = [HANG.partition(comment)[0].count("\n") + 1 for comment in where]
    expected = ".*".join(f"rank {i} for \\d+ s at stuck.py:{n} " for i, n in enumerate(lines))
    assert re.search(expected, line) and done.returncode == 0, done.stderr
