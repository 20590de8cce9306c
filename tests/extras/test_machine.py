"""Tests of extras/machine.py."""

import subprocess
import sys

import pytest
import torch
from conftest import ENVIRONMENT, ROOT

import gpt
from extras import machine

PAGE_FAULTS = """
import resource, torch, extras.machine
faults = []
extras.machine.keep_freed_memory()
for _ in range(20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(3 << 22)  # 48 MiB, which are 12288 pages
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sorted(faults)[10])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_freed_memory_is_not_requested_from_the_system_again():
    ran = subprocess.run(
        [sys.executable, "-c", PAGE_FAULTS],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=ENVIRONMENT,
    )
    assert ran.returncode == 0 and int(ran.stdout) < 100, ran


def test_dropout_that_would_be_wrong_on_mps_is_refused():
    config = gpt.Config(vocab=65, block_size=8, layers=1, heads=1, embd=8, dropout=0.1)
    with pytest.raises(ValueError, match="on MPS, --checkpoint-activations works only without"):
        machine.check_and_describe(torch.device("mps"), torch.float32, 1, "ddp", config, True)
