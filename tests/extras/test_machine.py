"""Tests of extras/machine.py."""

import subprocess
import sys
from itertools import accumulate, chain, count

import click
import pytest
import torch
from conftest import ENVIRONMENT, ROOT
from torch.utils.flop_counter import FlopCounterMode

import gpt
import run
from extras import machine

PAGE_FAULTS = """
import resource, torch, extras.machine
faults = []
extras.machine.keep_freed_memory()
for _ in range(60):  # The first ones let the heap grow.
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(3 << 22)  # 48 MiB, which are 12288 pages
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sorted(faults)[30])
"""


@pytest.mark.parametrize("arch", gpt.ARCHS)
@pytest.mark.parametrize(
    "config", [gpt.Config(13, 12, layers=3, heads=2, embd=16), gpt.Config(65, 32, 2, 4, 24)]
)
def test_flops_equal_what_torch_counts_in_forward_and_backward(arch, config):
    vocab, block_size, layers, _, embd, *_ = config
    model, tokens = gpt.build(config._replace(arch=arch), seed=0), torch.arange(block_size)[None]
    # In bfloat16, because torch cannot count the operations of the fused attention on a CPU.
    with FlopCounterMode(display=False) as counter, torch.autocast("cpu", torch.bfloat16):
        gpt.loss(model, (tokens % vocab, tokens % vocab))[0].backward()
    flops = machine.flops_per_token(layers, embd, vocab, block_size)
    assert flops * block_size == counter.get_total_flops()


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
    ],
)
def test_the_datasheet_is_that_of_the_whole_name(name, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(machine, "matmul_flops", lambda device, dtype: 1e12)
    found = machine.peak_flops(torch.device("cuda"), torch.bfloat16)
    assert found == ((peak, "datasheet") if peak else (1e12, "measured"))


@pytest.mark.parametrize(
    "instructions, bfloat16, float32, expected",
    [
        (True, 4, 5, True),
        (True, 4.1, 5, False),
        (True, 2, 1, False),
        (True, 0, 0, False),
        (False, 1, 5, False),
    ],
)
def test_bfloat16_is_faster_if_it_saves_a_fifth_of_the_cpu_time(
    instructions, bfloat16, float32, expected, monkeypatch
):
    """One product of each dtype takes this time, and all others ten times as long."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions)
    durations = [10 * bfloat16, 10 * float32] * 10
    durations[6], durations[13] = bfloat16, float32
    clock = accumulate(chain.from_iterable((1, duration) for duration in durations))
    threads, used = torch.get_num_threads(), set()
    monkeypatch.setattr(
        machine.time, "thread_time", lambda: used.add(torch.get_num_threads()) or next(clock)
    )
    assert machine.bfloat16_is_faster() is expected
    assert used == ({1} if instructions else set()) and torch.get_num_threads() == threads


def test_the_rate_of_a_matrix_product_counts_its_operations(monkeypatch):
    clock = count(step=0.5)
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))
    assert machine.matmul_flops(torch.device("cpu"), torch.float32) == 2 * 768**3 / 0.5


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
    config = {"checkpoint_activations": True, "dropout": 0.1}
    with pytest.raises(ValueError, match="on MPS, --checkpoint-activations works only without"):
        machine.check_and_describe(torch.device("mps"), config, steps=1, tokens=10**9)


@pytest.mark.parametrize(
    "device, compiler, steps, flops, expected",
    [
        ("cpu", "CXX", 9999, 1e13, False),
        ("cpu", "CXX", 9, 1e14, True),
        ("cuda", "CC", 4000, 1e15, False),
        ("cuda", "CC", 4001, 1e9, True),
        ("cuda", "CC", 9, 2e16, True),
        ("mps", "CXX", 9999, 1e20, False),
    ],
)
def test_long_runs_are_compiled_if_there_is_a_compiler(
    monkeypatch, tmp_path, device, compiler, steps, flops, expected
):
    def should_compile():
        return machine.should_compile(torch.device(device), steps, flops)

    monkeypatch.setattr("sysconfig.get_path", lambda name: f"{tmp_path}/{name}")
    (tmp_path / "include").mkdir()
    monkeypatch.setenv(compiler, sys.executable)  # any program that exists
    assert not should_compile()  # Python.h is missing
    (tmp_path / "include" / "Python.h").touch()
    assert should_compile() == expected
    monkeypatch.setenv(compiler, str(tmp_path / "none"))
    assert not should_compile()


def test_the_decision_to_compile_counts_the_operations_of_the_whole_run(
    monkeypatch, text, tmp_path
):
    def stop(device, steps, flops):
        raise ValueError(f"{steps} steps, {flops} operations")

    monkeypatch.setattr(machine, "should_compile", stop)
    sizes = {"layers": 1, "heads": 2, "embd": 16, "block_size": 16, "batch_size": 8}
    flags = run.Flags(data=f"{text}", out=f"{tmp_path}", steps=7, **sizes)
    with pytest.raises(click.UsageError) as info:
        run.train(flags, {"steps"})
    vocab = len({*text.read_text()})
    per_token = machine.flops_per_token(layers=1, embd=16, vocab=vocab, block_size=16)
    assert info.value.message == f"7 steps, {7 * 8 * 16 * per_token} operations"


@pytest.mark.parametrize(
    "flag, worth_it, expected",
    [(None, True, True), (None, False, False), (True, False, True), (False, True, False)],
)
def test_the_flag_decides_whether_to_compile_before_the_length_of_the_run(
    monkeypatch, text, tmp_path, flag, worth_it, expected
):
    def compile_(model):
        raise ValueError("the model is compiled")

    monkeypatch.setattr(machine, "should_compile", lambda *of_the_run: worth_it)
    monkeypatch.setattr(gpt, "compile_", compile_)
    sizes = {"layers": 1, "heads": 2, "embd": 16, "block_size": 16, "batch_size": 8}
    flags = run.Flags(data=f"{text}", out=f"{tmp_path}", steps=1, compile=flag, **sizes)
    if expected:
        with pytest.raises(click.UsageError, match="the model is compiled"):
            run.train(flags, {"steps", "compile"})
    else:
        assert run.train(flags, {"steps", "compile"}) == 0
