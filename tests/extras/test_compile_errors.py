"""If torch.compile fails, on one rank or on all, one line names --no-compile, and all ranks end.

Needs a C++ compiler. Each compilation starts with an empty cache and takes up to a minute on two cores.
"""

import os
import re
import shutil

import pytest
from conftest import TINY, Program, losses, run

CXX = shutil.which(os.environ.get("CXX", "g++"))
pytestmark = pytest.mark.skipif(CXX is None, reason="needs a C++ compiler")
SHORT = [*TINY, *"--optimizer adamw --steps 3 --log-every 1 --eval-every 9 --save-every 9".split()]


def compiled(folder, text, compiler, *args):
    """Train with --compile, with an empty cache and the compiler that a shell script stands for."""
    script = folder / "c++"
    script.write_text(f"#!/bin/sh\n{compiler}\n")
    script.chmod(0o755)
    env = {"CXX": str(script), "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    flags = [*SHORT, "--data", text, "--out", folder / "out", "--compile", *args]
    with Program(*flags, env=env, seconds=1800) as program:
        return program.finish(60)  # A compiler that another rank has started may still run.


@pytest.mark.parametrize(
    "compiler, rank, more",
    [
        ("exit 1", 0, []),
        ('case "$*" in *--version*) exec CXX "$@";; esac; exit 1', 0, []),
        ('[ "$RANK" = 1 ] && exit 1; exec CXX "$@"', 1, ["--spawn", 2]),
    ],
    ids=["no compiler", "linking fails", "rank 1 fails"],
)
def test_a_failed_compilation_is_one_line_that_names_no_compile(
    text, tmp_path, compiler, rank, more
):
    ran = compiled(tmp_path, text, compiler.replace("CXX", f"{CXX}"), *more)
    assert ran.code == 1 and "step " not in ran.out, ran  # no rank continues without compiling
    (line,) = (line for line in ran.err.splitlines() if line.startswith("Error"))
    advice = "the compiler failed: --no-compile trains without torch.compile"
    assert re.match(rf"Error on rank {rank}: {advice} \(\w+: .{{1,250}}\)$", line), ran
    # If spawn kills a rank that compiles, Python's resource tracker warns of a semaphore.
    assert not [x for x in ran.err.splitlines() if x != line and "resource_tracker" not in x], ran


@pytest.mark.torture
def test_compiling_and_recomputed_activations_together_give_the_same_losses(text, tmp_path, trials):
    def trial(_):
        more = ["--checkpoint-activations", "--spawn", 2]
        ran = compiled(tmp_path, text, f'exec {CXX} "$@"', *more)
        assert ran.code == 0 and ran.err == "", ran
        assert [*(tmp_path / "cache").rglob("*.so")]  # it was compiled
        plain = [*SHORT, "--data", text, "--no-compile", "--out", tmp_path / "plain"]
        assert run(*plain).code == 0
        expected = losses(tmp_path / "plain")
        assert [step for step, _ in expected] == [1, 2, 3]
        assert dict(losses(tmp_path / "out")) == pytest.approx(dict(expected), rel=1e-4)

    trials("compiled, with recomputed activations", trial, few=0, many=1, at_once=1)
