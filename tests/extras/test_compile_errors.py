"""If torch.compile fails, on one rank or on all, one line names --no-compile, and all ranks end.

Needs a C++ compiler. Each compilation starts with an empty cache and takes up to a minute on two cores.
"""

import os
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import PYTHON, Program, Ran, ahead, losses, run, torchrun

CXX = shutil.which(os.environ.get("CXX", "g++"))
pytestmark = pytest.mark.skipif(CXX is None, reason="needs a C++ compiler")

MODEL = "--layers 2 --heads 2 --embd 32 --block-size 16 --batch-size 8 --dtype float32".split()
SHORT = [*MODEL, *"--optimizer adamw --steps 3 --log-every 1 --eval-every 9 --save-every 9".split()]

# Shell scripts that stand for a compiler.
MISSING = "exit 1"
CANNOT_LINK = (
    f'case "$*" in *--version*) exec {CXX} "$@";; esac; echo cannot find -lcuda >&2; exit 1'
)
FAILS_ON_RANK_1 = f'[ "$RANK" = 1 ] && exit 1; exec {CXX} "$@"'

LAUNCHES: dict[str, tuple[str, list[str], list[object]]] = {
    "one rank, no compiler": (MISSING, PYTHON, []),
    "one rank, linking fails": (CANNOT_LINK, PYTHON, []),
    "spawn, no compiler": (MISSING, PYTHON, ["--spawn", 2]),
    "spawn, fails on rank 1": (FAILS_ON_RANK_1, PYTHON, ["--spawn", 2]),
    "torchrun, no compiler": (MISSING, torchrun(2), []),
}


def compiled(folder: Path, text: Path, compiler: str, *args: object, **how: Any) -> Ran:
    """Train with --compile in a new folder, with an empty cache and the compiler that a script stands for."""
    folder.mkdir()
    script = folder / "c++"
    script.write_text(f"#!/bin/sh\n{compiler}\n")
    script.chmod(0o755)
    env = {"CXX": str(script), "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    flags = [*SHORT, "--data", text, "--out", folder / "out", "--compile", *args]
    with Program(*flags, env=env, seconds=1800, **how) as program:
        return program.finish(60)  # A compiler that another rank has started may still run.


@pytest.fixture(scope="module")
def failed(text, tmp_path_factory):
    """Return a function: a name from LAUNCHES -> exit code and output."""
    folder = tmp_path_factory.mktemp("failed")

    def start(name: str) -> Ran:
        compiler, launcher, args = LAUNCHES[name]
        return compiled(folder / name.replace(" ", "-"), text, compiler, *args, launcher=launcher)

    with ahead(**{name: partial(start, name) for name in LAUNCHES}) as runs:
        yield lambda name: runs[name].result()


@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_failed_compilation_is_one_line_that_names_no_compile_and_all_ranks_end(failed, launch):
    ran = failed(launch)  # fails if a process of the program is left
    (line,) = (line for line in ran.err.splitlines() if line.startswith("Error"))
    assert ran.code == 1 and "step " not in ran.out, ran  # no rank continues without compiling
    assert re.match(r"Error on rank \d: \w+: ", line) and len(line) < 300
    assert line.endswith("; --no-compile trains without torch.compile")
    # If spawn kills a rank that compiles, Python's resource tracker warns of a semaphore. torchrun has its own summary.
    others = [x for x in ran.err.splitlines() if x != line and "resource_tracker" not in x]
    assert not others or launch.startswith("torchrun"), ran
    assert ("rank 1" in line) >= launch.endswith("rank 1")
    assert ("CppCompileError" in line) == launch.endswith("linking fails")


def test_compiling_and_recomputed_activations_together_give_the_same_losses(text, tmp_path):
    more = ["--checkpoint-activations", "--spawn", 2]
    ran = compiled(tmp_path / "both", text, f'exec {CXX} "$@"', *more)
    assert ran.code == 0 and ran.err == "", ran
    assert [*(tmp_path / "both" / "cache").rglob("*.so")]  # it was compiled
    plain = [*SHORT, "--data", text, "--no-compile", "--spawn", 2, "--out", tmp_path / "plain"]
    assert run(*plain).code == 0
    expected = losses(tmp_path / "plain")
    assert [step for step, _ in expected] == [1, 2, 3]
    assert dict(losses(tmp_path / "both" / "out")) == pytest.approx(dict(expected), rel=1e-4)
