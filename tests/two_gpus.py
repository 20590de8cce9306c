"""Check on a machine with at least two GPUs what no test can check without them; takes ten minutes.

    pip install -e '.[test]'
    python tests/two_gpus.py                 prints one Markdown table: paste it into a report
    python tests/two_gpus.py --device cpu    two small ranks on CPUs, to test this script

Each row is a real run of run.py on the default text. The exit code is 0 if all rows are as they should be.
"""

import os
import platform
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import click  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from conftest import (  # noqa: E402
    PYTHON,
    Program,
    Ran,
    checkpoints,
    losses,
    metrics,
    same,
    state,
    torchrun,
)
from conftest import run as run_program  # noqa: E402

SPAWN = [*PYTHON, "--spawn", "2"]
# The sizes of the model for the losses, and of that for the speed
SIZES = {
    "cuda": (
        "--layers 4 --heads 4 --embd 256 --block-size 256 --batch-size 32 --timeout 20",
        "--layers 12 --heads 12 --embd 768 --block-size 1024 --batch-size 32 --steps 60",
    ),
    "cpu": (
        "--layers 1 --heads 2 --embd 16 --block-size 32 --batch-size 8 --timeout 8",
        "--layers 1 --heads 2 --embd 32 --block-size 32 --batch-size 8 --steps 20",
    ),
}
COMMON = "--keep 9 --log-every 1 --lr 0.006"
SHORT = f"--steps 20 --save-every 10 --eval-every 20 {COMMON}"
LONG = f"--epochs 1000 --save-every 1000 --eval-every 1000 {COMMON}"


class Setting(NamedTuple):
    """Where the checks run."""

    folder: Path  # for the runs
    device: str
    small: list[str]  # flags of a small model
    large: list[str]  # flags of the model for the speed


def start(setting: Setting, out: str, flags: str, launcher: list[str] = SPAWN) -> Ran:
    """Run run.py to its end in the folder `out`, and check that it succeeds."""
    where = ["--out", setting.folder / out, "--device", setting.device]
    ran = run_program(*where, *flags.split(), launcher=launcher, env=visible_gpus(), seconds=300)
    assert ran.code == 0, f"exit code {ran.code}: {last_line(ran)}"
    return ran


def visible_gpus() -> dict[str, str | None]:
    """Return the user's choice of GPUs. conftest.py hides all GPUs from what it starts."""
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES")}


def last_line(ran: Ran) -> str:
    return (ran.err.strip() or ran.out.strip() or "(no output)").splitlines()[-1]


def small(setting: Setting, more: str) -> str:
    return " ".join([*setting.small, SHORT, "--dtype float32", more])


def distance(setting: Setting, one: str, other: str) -> str:
    """Say by how much the losses of two runs differ, and check that this is rounding."""
    theirs, ours = (dict(losses(setting.folder / out)) for out in (one, other))
    assert len(theirs) == 20 and theirs.keys() == ours.keys(), (theirs, ours)
    most = max(abs(ours[step] / loss - 1) for step, loss in theirs.items())
    # On CUDA, matrix products of other shapes can round differently from step 1 on.
    assert most < 1e-3, f"losses differ by {most:.1e}"
    return f"losses of 20 steps differ by at most {most:.1e}, relative"


# ------------------------------------------------- checks: each one returns its result, or raises


def one_and_two(setting: Setting) -> str:
    results = []
    for optimizer in ("muon", "adamw"):
        one, two = (f"{optimizer} on {n}" for n in (1, 2))
        start(setting, one, small(setting, f"--optimizer {optimizer}"), PYTHON)
        start(setting, two, small(setting, f"--optimizer {optimizer}"))
        results.append(f"{optimizer}: {distance(setting, one, two)}")
    return "; ".join(results)


def with_torchrun(setting: Setting) -> str:
    start(setting, "torchrun", small(setting, ""), torchrun(2))
    return distance(setting, "muon on 2", "torchrun")


def zero(setting: Setting) -> str:
    start(setting, "zero", small(setting, "--strategy zero"))
    return distance(setting, "adamw on 1", "zero")


def fsdp(setting: Setting) -> str:
    start(setting, "fsdp", small(setting, "--strategy fsdp --checkpoint sharded"))
    return distance(setting, "adamw on 1", "fsdp")


def sharded(setting: Setting) -> str:
    """Read the sharded checkpoints of fsdp() in one process."""
    out = setting.folder / "fsdp"
    assert len([*out.glob("part-1/step-*")]) == 2, [*out.iterdir()]
    command = ["eval", "--out", out, "--device", setting.device]
    ran = run_program(*command, launcher=PYTHON, env=visible_gpus())
    (loss,) = re.findall(r"^loss (\S+)", ran.out, re.M) or [last_line(ran)]
    (expected,) = (line["val_loss"] for line in metrics(out) if "val_loss" in line)
    assert abs(float(loss) / expected - 1) < 1e-3, f"loss {loss}, but {expected} in the training"
    return f"2 checkpoints; one process reads the last one, with a loss of {loss}"


def resume(setting: Setting) -> str:
    """Train from step 10 to step 20 of one_and_two() again."""
    whole = setting.folder / "muon on 2"
    again = shutil.copytree(whole, setting.folder / "again")
    checkpoints(again)[-1].unlink()
    ran = start(setting, "again", small(setting, "--optimizer muon"))
    assert "steps 11 to 20" in ran.out, ran.out
    # Without deterministic algorithms, CUDA may add in another order.
    equal = same(state(again)["model"], state(whole)["model"])
    assert equal or setting.device == "cuda", "the weights differ"
    return f"{distance(setting, 'muon on 2', 'again')}; bitwise equal: {equal}"


def disturbed(setting: Setting, out: str, act: Callable[[Program], object]) -> tuple[Ran, float]:
    """Do something to a run on two ranks after its third step. Return how it ended, and when."""
    flags = [*setting.small, *LONG.split(), "--device", setting.device]
    launcher = [*SPAWN, "--out", f"{setting.folder / out}"]
    with Program(*flags, launcher=launcher, env=visible_gpus(), seconds=180) as program:
        program.read_lines(3)
        begun = time.monotonic()
        act(program)
        ran = program.finish(60)
    return ran, time.monotonic() - begun


def stop(setting: Setting) -> str:
    ran, seconds = disturbed(setting, "stopped", lambda p: p.process.send_signal(signal.SIGTERM))
    assert ran.code == 3, f"exit code {ran.code}: {last_line(ran)}"
    (step,) = re.findall(r"Stopped as asked after step (\d+)", ran.out)
    again = start(setting, "stopped", f"--steps {int(step) + 3}")
    assert f"steps {int(step) + 1} to {int(step) + 3}, in" in again.out, again
    return f"SIGTERM: saved and ended after {seconds:.1f} s; started again, it continued"


def kill(setting: Setting) -> str:
    ran, seconds = disturbed(setting, "killed", lambda p: os.kill(p.children()[1], signal.SIGKILL))
    assert ran.code == 1 and ran.err.count("\n") == 1, f"exit code {ran.code}: {ran.err}"
    return f"SIGKILL to rank 1: all ended after {seconds:.1f} s: {last_line(ran)}"


def hang(setting: Setting) -> str:
    ran, seconds = disturbed(setting, "hung", lambda p: os.kill(p.children()[1], signal.SIGSTOP))
    assert ran.code, "it ended as if nothing had happened"
    return f"SIGSTOP to rank 1: all ended after {seconds:.1f} s: {last_line(ran)}"


def speed(setting: Setting) -> str:
    """Compare tokens/s, with the same global batch, and with twice the batch on two ranks."""
    flags = f"{' '.join(setting.large)} --epochs 1000 --log-every 2 --eval-every 100000"
    flags += f" --save-every 100000 --dtype {'bfloat16' if setting.device == 'cuda' else 'float32'}"
    doubled = flags.replace("--batch-size 32", "--batch-size 64").replace("size 8", "size 16")
    runs = [
        ("1 rank", PYTHON, flags),
        ("2 ranks", SPAWN, flags),
        ("2 ranks, batch doubled", SPAWN, doubled),
        ("2 ranks, batch doubled, zero", SPAWN, f"{doubled} --strategy zero"),
        ("2 ranks, batch doubled, fsdp", SPAWN, f"{doubled} --strategy fsdp"),
    ]
    rates = {}
    for name, launcher, given in runs if setting.device == "cuda" else runs[:3]:
        start(setting, "speed", given, launcher)
        found = [m["tokens_per_s"] for m in metrics(setting.folder / "speed") if "loss" in m]
        rates[name] = statistics.median(found[len(found) // 3 :])  # without the first, slow steps
        shutil.rmtree(setting.folder / "speed")
    one = rates["1 rank"]
    return "; ".join(f"{n}: {rate:,.0f} tokens/s (x {rate / one:.2f})" for n, rate in rates.items())


CHECKS = {
    "losses of 1 and 2 ranks": one_and_two,
    "2 ranks with torchrun": with_torchrun,
    "`--strategy zero`": zero,
    "`--strategy fsdp`": fsdp,
    "`--checkpoint sharded`": sharded,
    "resume": resume,
    "stop and continue": stop,
    "a rank is killed": kill,
    "a rank hangs": hang,
    "speed": speed,
}


# ------------------------------------------------------------------------------------ command line


def row(name: str, check: Callable[[Setting], str], setting: Setting) -> tuple[str, bool]:
    """Return a row of the table, and whether the check has succeeded."""
    begun, good = time.monotonic(), True
    try:
        result = check(setting)
    except (Exception, pytest.fail.Exception) as error:  # type: ignore[misc]
        good, result = False, f"FAILED: {error!r:.2000}"
    result = " ".join(result.replace("|", "/").split())
    return f"| {name} | {result} | {time.monotonic() - begun:.0f} s |", good


def describe_machine(device: str) -> str:
    """Return the versions and the names of the GPUs."""
    parts = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    if device == "cuda":
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        parts += [
            f"CUDA {torch.version.cuda}",
            "NCCL " + ".".join(map(str, torch.cuda.nccl.version())),
        ]
        parts += [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    return ", ".join([*parts, platform.platform(), time.strftime("%F")])


@click.command()
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
def main(device: str) -> None:
    """Run all checks on two ranks, and print a Markdown table."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        raise click.UsageError(f"needs two GPUs, here are {torch.cuda.device_count()}")
    click.echo(f"{describe_machine(device)}\n\n| check | result | time |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(Path(folder), device, *(flags.split() for flags in SIZES[device]))
        failed = 0
        for name, check in CHECKS.items():
            line, good = row(name, check, setting)
            failed += not good
            click.echo(line)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
