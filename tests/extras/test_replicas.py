"""Tests of extras/replicas.py: one wrong bit on one rank is found before a save, and nothing else is.

`flip_bits` runs on each rank of a group and writes down what verify_replicas did.
"""

import random
import re
import sys
from itertools import islice

import call
import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, checkpoints, run

import chardata
import ddp_setup
import gpt
import loop
from extras import replicas

SABOTAGED = [sys.executable, f"{ROOT}/tests/faults/sabotaged.py"]
TOKENS = (np.random.default_rng(0).integers(0, 17, 200).astype(np.uint8),)
PLAN = chardata.BatchPlan(TOKENS, block_size=8, batch_size=6)


def train(world):
    """Return (model, optimizers) after two steps with AdamW and Muon, the default of run.py."""
    bare = gpt.build(gpt.Config(18, 8, layers=2, heads=2, embd=16), seed=0)
    groups = gpt.parameter_groups(bare)
    matrices = groups.pop("matrices")
    rest = [parameter for group in groups.values() for parameter in group]
    optimizers = [torch.optim.AdamW(rest, fused=True), torch.optim.Muon(matrices)]
    model = ddp_setup.replicate(bare, world)
    steps = chardata.steps(PLAN, rank=world.rank, world_size=world.size)
    for _ in loop.train_(model, optimizers, islice(steps, 2), gpt.loss):
        pass
    return model, optimizers


def flip_(tensor, element, bit):
    """Change one bit of one element of a tensor."""
    octets = tensor.detach().view(-1).numpy().view(np.uint8)
    octets[element * tensor.element_size() + bit // 8] ^= 1 << bit % 8


def message(model, optimizers):
    try:
        replicas.verify_replicas(model, optimizers)
    except FloatingPointError as error:
        return str(error)
    return ""


def flip_bits(folder, seed, count, healthy):
    """Flip `count` random bits, one at a time, on random ranks. After each, flip it back.

    Then change a random bit on all ranks alike, and compare, `healthy` times. Write (wrong rank, message, all messages
    that came while the ranks were equal) for each.
    """
    with ddp_setup.process_group(timeout=60) as world:
        model, optimizers = train(world)
        tensors = [*replicas.tensors_of(model, optimizers)]
        assert len(tensors) > 3 * len([*model.parameters()]) - 12, "the states are missing"
        choose, found = random.Random(seed), []

        def place():
            tensor = choose.choice(tensors)
            bit = choose.randrange(8 * tensor.element_size())
            return tensor, choose.randrange(tensor.numel()), bit

        for _ in range(count):
            rank, bit = choose.randrange(world.size), place()
            if world.rank == rank:
                flip_(*bit)
            wrong = message(model, optimizers)
            if world.rank == rank:
                flip_(*bit)
            alarms = set()
            for _ in range(healthy):
                alarms.add(message(model, optimizers))
                flip_(*place())
            found.append((rank, wrong, alarms))
        torch.save(found, f"{folder}/{world.rank}.pt")


@pytest.mark.torture
@pytest.mark.parametrize("size", [2, 3])
def test_each_flipped_bit_is_found_on_all_ranks_and_equal_ranks_cause_no_alarm(
    tmp_path, size, request
):
    torture = request.config.option.markexpr == "torture"
    count, healthy = (10_000, 50) if torture else (300, 2)
    assert call.spawn(flip_bits, size, f"{tmp_path}", size, count, healthy) == 0
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(size)]
    assert all(result == results[0] for result in results) and len(results[0]) == count
    for rank, wrong, alarms in results[0]:
        who = "no majority" if size == 2 else rf"rank {rank} differs from the others"
        assert re.search(f"not equal: {who}", wrong), (rank, wrong)
        assert alarms == {""}, alarms


def test_the_fingerprint_depends_on_the_order_of_tensors_and_on_each_dtype():
    tensors = [torch.zeros(3), torch.ones(3)]
    assert replicas.fingerprint(iter(tensors)) != replicas.fingerprint(iter(tensors[::-1]))
    for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
        tensor = torch.zeros(2, 2, dtype=dtype)
        changed = torch.tensor([[0, 0], [0, 1]], dtype=dtype)
        assert replicas.fingerprint(iter([tensor])) != replicas.fingerprint(iter([changed]))
        assert replicas.fingerprint(iter([changed.t()])) == replicas.fingerprint(iter([changed]))


def test_the_fingerprint_of_complex_numbers_depends_on_both_parts():
    values = [torch.tensor([1 + 2j], dtype=torch.complex128) for _ in range(3)]
    values[1].imag += 1
    prints = [replicas.fingerprint(iter([value])).item() for value in values]
    assert prints[0] == prints[2] != prints[1]


def test_tensors_in_lists_are_compared_too():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.LBFGS([weight], max_iter=3)

    def loss():
        optimizer.zero_grad()
        total = (weight**4).sum()
        total.backward()
        return total

    optimizer.step(loss)
    (state,) = optimizer.state.values()
    found = {
        tensor.data_ptr()
        for tensor in replicas.tensors_of(torch.nn.ParameterList([weight]), [optimizer])
    }
    assert state["old_dirs"] and {tensor.data_ptr() for tensor in state["old_dirs"]} <= found


def test_a_single_process_and_a_group_of_one_compare_nothing():
    model = torch.nn.Linear(2, 2)
    replicas.verify_replicas(model, [torch.optim.SGD(model.parameters())])


@pytest.mark.parametrize("size", [2, 3])
def test_the_program_saves_nothing_and_names_the_rank(text, tmp_path, size):
    flags = "--steps 12 --save-every 5 --eval-every 100".split()
    fault = {"TEST_FAULT": f"forward flip {size - 1} 8"}
    ran = run(
        *[*TINY, *flags, "--data", text, "--out", tmp_path, "--spawn", size],
        launcher=SABOTAGED,
        env=fault,
    )
    who = "no majority of ranks agrees" if size == 2 else "rank 2 differs from the others"
    lines = [line for line in ran.err.splitlines() if line.startswith("Error")]
    assert ran.code == 1 and len(lines) == 1 and who in lines[0], ran
    assert [path.name[:13] for path in checkpoints(tmp_path)] == ["step-00000005"]
