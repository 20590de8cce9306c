"""plan.py and the command plan: what they say before a run is what the run then has."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from conftest import TINY, checkpoints, metrics, run, state
from torch.profiler import ProfilerActivity, profile

import chardata
import ddp_setup
import gpt
import loop
import run as program
from extras import commands, plan

VOCAB = 97


def job(layers: int, embd: int, T: int, rows: int, flags: program.Flags, ranks=1) -> plan.Job:
    """Return the job of ranks on CPUs that have `rows` windows each."""
    config = gpt.Config(VOCAB, T, layers, 4, embd, 0.0, flags.arch)
    flags = replace(flags, batch_size=rows * ranks, device="cpu")
    return commands.make_job(flags, config, gpt.build(config, None), ranks)


def kept_per_token(arch: str, dtype: torch.dtype, recompute: bool, layers: int) -> float:
    """Return how many bytes a forward pass keeps for the backward pass, per token and width."""
    width, length = 256, 520
    model = gpt.build(gpt.Config(8, length, layers, 4, width, 0.0, arch), 0)
    model.checkpoint_activations = recompute
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}
    x = torch.zeros(1, length, dtype=torch.long)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            model(x, x)
    # autocast keeps a bfloat16 copy of each matrix: 12 width^2 numbers of 2 bytes per layer
    copies = 0 if recompute or dtype == torch.float32 else 2 * 12 * layers * width**2
    size = sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) - copies
    return size / length / width


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", ["gpt2", "modern", "modern2"])
def test_a_layer_keeps_as_many_bytes_per_token_as_the_formula_says(arch, dtype, recompute):
    setting = arch, getattr(torch, dtype), recompute
    measured = kept_per_token(*setting, 2) - kept_per_token(*setting, 1)
    flags = program.Flags(arch=arch, dtype=dtype, checkpoint_activations=recompute)
    one, two = (plan.activations(job(n, 256, 520, 1, flags)) for n in (1, 2))
    assert (two - one) / 520 / 256 == pytest.approx(measured, abs=0.5)


def peak_of_step(layers: int, embd: int, T: int, rows: int, flags: program.Flags) -> int:
    """Return the most bytes that exist during a step of one rank, counted by torch's profiler."""
    model = gpt.build(gpt.Config(VOCAB, T, layers, 4, embd, 0.0, flags.arch), 0)
    model.checkpoint_activations = flags.checkpoint_activations
    optimizers = program.make_optimizers(model, flags, 0.01, ddp_setup.World(0, 0, 1, 1))
    tokens = torch.randint(VOCAB, (T * rows * 4,)).numpy().astype("uint16")
    steps = chardata.steps(chardata.BatchPlan([tokens], T, rows))
    dtype = getattr(torch, flags.dtype)
    training = loop.train_(model, optimizers, steps, gpt.loss, dtype=dtype)
    next(training)  # makes the moments
    held = [*model.parameters()]
    held += [t for o in optimizers for values in o.state.values() for t in values.values()]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        next(training)
    # The events of the allocator are not in the public part of the profiler.
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = sum(tensor.nbytes for tensor in held)
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize(
    "sizes, settings",
    [
        ((4, 128, 256, 8), {}),
        ((6, 384, 256, 2), {}),  # Muon's update needs more than the activations
        ((6, 384, 256, 4), {"optimizer": "adamw", "arch": "gpt2"}),
        ((4, 128, 256, 8), {"dtype": "bfloat16"}),
        ((4, 128, 256, 8), {"checkpoint_activations": True}),
    ],
)
def test_the_memory_of_a_step_is_within_15_percent(sizes, settings):
    flags = program.Flags(**{"optimizer": "fast-muon", "dtype": "float32", **settings})
    expected = plan.memory(job(*sizes, flags), "ddp")["during a step"]
    assert expected == pytest.approx(peak_of_step(*sizes, flags), rel=0.15)


@pytest.mark.parametrize("more", ["", "--optimizer adamw --arch gpt2", "--optimizer muon"])
def test_steps_tokens_parameters_and_checkpoint_are_those_of_the_run(text, tmp_path, more):
    flags = [*TINY, "--data", text, *more.split()]
    said = run("plan", *flags, "--device", "cpu")
    assert said.code == 0 and said.err == "", said
    ran = run(*flags, "--out", tmp_path, "--keep", 1)
    saved, last = state(tmp_path), metrics(tmp_path)[-2]
    (parameters,) = re.findall(r"Training: ([\d,]+) parameters", ran.out)
    assert f"parameters   {parameters}: " in said.out
    assert (
        f", {saved['step']} in all\ntokens       128 in a step, {last['tokens']:,} in" in said.out
    )
    assert "; vocabulary 18\n" in said.out

    tensors = [
        t
        for values in saved["optimizers"]
        for s in values.get("state", {}).values()
        for t in s.values()
    ]
    tensors += {t.data_ptr(): t for t in saved["model"].values()}.values()
    config = program.model_config(saved["config"])
    used = program.Flags(optimizer=saved["config"]["optimizer"])
    planned = commands.make_job(used, config, gpt.build(config, None), 1)
    assert plan.checkpoint(planned) == sum(tensor.nbytes for tensor in tensors)
    overhead = checkpoints(tmp_path)[-1].stat().st_size - plan.checkpoint(planned)
    assert 0 < overhead < 1000 * len(tensors)


def test_more_ranks_need_less_memory_each_and_send_what_the_strategy_says():
    flags = program.Flags(optimizer="adamw", dtype="float32")
    jobs = [job(6, 384, 256, 2, flags, ranks=ranks) for ranks in (1, 2, 8)]
    P = plan.parameters(jobs[0])
    assert len({str(plan.memory(jobs[0], strategy)) for strategy in plan.STRATEGIES}) == 1
    for strategy in ("zero", "fsdp"):
        sums = [plan.memory(each, strategy)["between steps"] for each in jobs[1:]]
        assert sums[0] == pytest.approx(4 * sums[1], rel=1e-6)
    during = [plan.memory(jobs[2], strategy)["during a step"] for strategy in plan.STRATEGIES]
    assert all(a > b for a, b in pairwise(during)), during
    sends = [[plan.sent(each, strategy) / P for strategy in plan.STRATEGIES] for each in jobs]
    assert sends == [[0, 0, 0], [4, 4, 6], pytest.approx([7, 7, 10.5])]


def test_plan_takes_all_flags_says_hours_and_writes_nothing(text, tmp_path):
    (tmp_path / "run.toml").write_text(f'layers = 2\ndata = "{text}"\nout = "{tmp_path}/out"\n')
    flags = ["--config", tmp_path / "run.toml", "--batch-size", 6, "--accum", 2, "--ranks", 4]
    ran = run("plan", *flags, *"--gpu A100 --mfu 0.5 --epochs 9 --steps 7".split())
    assert ran.code == 0 and ran.err == "", ran
    assert "each rank    2 windows in a step; micro-batches: 2, of 1\n" in ran.out
    assert ", 7 in all\n" in ran.out and " hours on 4 x A100 at 50% MFU\n" in ran.out
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]
    ran = run("plan", *flags[:2], *"--ranks 17 --batch-size 16".split())
    assert ran.err == "Warning: 1 ranks have no window; give a higher --batch-size\n", ran


def test_flags_that_do_not_fit_are_one_line_as_in_training(text):
    for flags in (["--embd", 30], ["--data", "missing.txt"], ["--min-lr", 1]):
        ran = run("plan", *flags)
        assert ran.code == 2 and ran.err.startswith("Error: ") and ran.err.count("\n") == 1, ran
