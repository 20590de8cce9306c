"""compose.py: each --strategy and --use reaches `train`, together with the others, and computes the same."""

import os
import re
import signal

import pytest
from conftest import TINY, Program, contents, losses, run, same_training

SPAWN = [*TINY, "--spawn", 2, "--steps", 30, "--log-every", 1, "--save-every", 10]


@pytest.fixture(scope="module")
def plain(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("plain")
    assert run(*SPAWN, "--data", text, "--out", out).code == 0
    return out


def test_tools_change_no_bit_of_a_run(plain, text, tmp_path):
    ran = run(*SPAWN, "--data", text, "--out", tmp_path, *"--use slow-ranks --use replicas".split())
    assert ran.code == 0 and ran.err == "", ran
    assert same_training(tmp_path, plain)


def test_a_strategy_and_a_tool_work_together(plain, text, tmp_path):
    more = "--strategy fsdp --use slow-ranks --use hang-report".split()
    ran = run(*SPAWN, "--data", text, "--out", tmp_path, *more)
    assert ran.code == 0 and ran.err == "", ran
    assert dict(losses(tmp_path)) == pytest.approx(dict(losses(plain)), rel=1e-4)


def test_the_hang_report_says_where_each_rank_is(text, tmp_path):
    """One rank is stopped, as by a machine that hangs."""
    flags = [*TINY, "--data", text, "--out", tmp_path, "--epochs", 1000, "--log-every", 1]
    with Program(*flags, *"--spawn 2 --timeout 8 --use hang-report".split()) as program:
        program.read_to("step 5/")
        os.kill(program.children()[1], signal.SIGSTOP)
        ran = program.finish()
    assert ran.code == 1, ran
    lines = re.findall(
        r"Error: no progress for [\d.]+ s: rank 0 at .*\.py:\d+.*, no answer from rank 1\n", ran.err
    )
    assert len(lines) == 1 and ran.err.count("\n") == 1, ran.err


@pytest.mark.parametrize("more", ["", "--accum 2", "--strategy zero"])
def test_cuda_graphs_that_cannot_be_used_are_one_line(text, tmp_path, more):
    ran = run(*TINY, "--data", text, "--out", tmp_path, "--use", "cuda-graphs", *more.split())
    assert (ran.code, ran.out) == (2, "") and not contents(tmp_path)
    assert ran.err == "Error: --use cuda-graphs needs CUDA, --strategy ddp and --accum 1\n"
