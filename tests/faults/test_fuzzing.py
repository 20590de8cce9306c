"""Files that are changed at random, with right digests, are loaded or refused: see fuzz.py.

The number of an input is its seed. `pytest ... --seed N` reads input N of each target alone.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ENVIRONMENT, ROOT, TABLE

pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")
FEW = 250  # inputs of each target without -m torture
MANY = {  # inputs with -m torture
    "checkpoint": 1_000_000,
    "file of other people": 300_000,
    "manifest": 300_000,
    "npy": 200_000,
    "bin": 200_000,
    "safetensors": 200_000,
    "Hugging Face": 100_000,
    "nanoGPT": 200_000,
    "tokenizer": 100_000,
    "toml": 100_000,
}
NOTICED = {
    "code": "reported: pickle.find_class",
    "program": "reported: os.system",
    "file": "reported: open",
    "warning": "reported: warning",
    "crash": "SIGSEGV",
    "wait": "SIGALRM",
    "memory": "memory: ",
    "loop": ("SIGPROF", "SIGALRM"),  # the latter if other processes take the CPU
    "error": "KeyError",
}


def start(targets: list[str], first: int, count: int, *more: str) -> subprocess.Popen[str]:
    """Start fuzz.py. It prints a line for each target."""
    command = [sys.executable, Path(__file__).with_name("fuzz.py"), *targets]
    command += ["--first", f"{first}", "--count", f"{count}", *more]
    one_thread = {**ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=one_thread, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> dict[str, dict[str, Any]]:
    """Return {target: what fuzz.py has found}."""
    printed, _ = process.communicate()
    assert process.returncode == 0
    found = map(json.loads, printed.splitlines())
    return {each["target"]: each for each in found}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Callable[[str], list[dict[str, Any]]]:
    """Return a function: target -> what the processes have found that have read its inputs."""
    seed = request.config.getoption("--seed", None)
    first, count = (0, FEW) if seed is None else (int(seed), 1)
    if request.config.option.markexpr == "torture" and seed is None:
        cores = os.cpu_count() or 1

        def read_all(target: str) -> list[dict[str, Any]]:
            ends = [MANY[target] * i // cores for i in range(cores + 1)]
            running = [start([target], a, b - a) for a, b in zip(ends, ends[1:])]
            return [finish(process)[target] for process in running]

        return read_all
    halves = [start(list(MANY)[half::2], first, count) for half in (0, 1)]
    all_found = {name: each for half in halves for name, each in finish(half).items()}
    return lambda target: [all_found[target]]


@pytest.mark.torture
@pytest.mark.parametrize("target", MANY)
def test_every_input_is_loaded_or_refused(target, found, request):
    began, results = time.monotonic(), found(target)
    inputs, loaded, refused, failures = (
        sum(result[key] for result in results)
        for key in ("inputs", "loaded", "refused_inputs", "failures")
    )
    seconds, hours = time.monotonic() - began, sum(result["cpu_s"] for result in results) / 3600
    print(f"{target}: {inputs} inputs, {loaded} loaded, {refused} refused, {hours:.2f} CPU hours")
    name = f"mutated file, digest computed again: {target}"
    request.config.stash[TABLE].append((name, inputs, inputs - failures, seconds))
    failed = [(why, seeds[:3]) for result in results for why, seeds in result["failed"].values()]
    assert not failed, f"{target} (error, its first seeds): {failed}"
    if inputs >= FEW:  # some pass all checks, some do not, and none fails at the digest
        assert loaded > 0.01 * inputs and refused > 0.1 * inputs
        reasons = [why for result in results for why, _ in result["refused"].values()]
        assert reasons and not any("does not match the digest" in why for why in reasons)


@pytest.fixture(scope="module")
def harm_found() -> dict[str, dict[str, Any]]:
    return finish(start(list(NOTICED), 0, 5, "--wait", "2"))


@pytest.mark.parametrize("harm", NOTICED)
def test_harm_is_noticed_with_its_seed_and_the_other_inputs_are_read(harm, harm_found):
    result = harm_found[harm]
    assert (result["inputs"], result["loaded"], result["failures"]) == (5, 3, 2), result
    for why, seeds in result["failed"].values():
        assert why.startswith(NOTICED[harm]) and {*seeds} <= {1, 3}, result
