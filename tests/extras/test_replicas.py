"""Tests of extras/replicas.py: one wrong bit on one rank is found before a save, and nothing else is."""

import random
import re
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, checkpoints, run

import ddp_setup
from extras import replicas


def trained():
    """Return (model, optimizers) after a step. torch.optim.LBFGS keeps its state in lists."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 1).bfloat16())
    first, second = (torch.nn.ParameterList(layer.parameters()) for layer in model)
    optimizers = [torch.optim.AdamW(second), torch.optim.LBFGS(first, lr=0.1, max_iter=3)]

    def loss():
        model.zero_grad()
        total = model[1](model[0](torch.ones(5)).bfloat16()).square().sum()
        total.backward()
        return total

    for optimizer in optimizers:
        optimizer.step(loss)
    return model, optimizers


def flip_(tensor, element, bit):
    """Change one bit of one element of a tensor."""
    octets = tensor.detach().view(-1).view(torch.uint8).numpy()
    octets[element * tensor.element_size() + bit // 8] ^= np.uint8(1 << bit % 8)


def message(model, optimizers):
    try:
        replicas.verify_replicas(model, optimizers)
    except FloatingPointError as error:
        return str(error)
    return ""


def flip_bits(folder, count):
    """Flip `count` random bits, one at a time, on random ranks. After each, flip it back, and change a
    random bit on all ranks alike. Write (wrong rank, message, message while the ranks were equal).
    """
    with ddp_setup.process_group("cpu", timeout=60) as world:
        model, optimizers = trained()
        tensors = [*model.parameters()]
        for optimizer in optimizers:
            for state in optimizer.state.values():
                for value in state.values():
                    values = value if isinstance(value, list) else [value]
                    tensors += filter(torch.is_tensor, values)
        assert len(tensors) == 4 + 6 + 7, "a state is missing"
        choose, found = random.Random(0), []

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
            flip_(*place())
            found.append((rank, wrong, message(model, optimizers)))
        torch.save(found, f"{folder}/{world.rank}.pt")


@pytest.mark.torture
@pytest.mark.parametrize("size", [2, 3])
def test_each_flipped_bit_is_found_on_all_ranks_and_equal_ranks_cause_no_alarm(
    tmp_path, size, request
):
    count = 10_000 if request.config.option.markexpr == "torture" else 300
    assert ddp_setup.spawn(flip_bits, size, tmp_path, count) == 0
    first, *others = (torch.load(tmp_path / f"{rank}.pt") for rank in range(size))
    assert all(other == first for other in others) and len(first) == count
    for rank, wrong, alarm in first:
        who = "no majority" if size == 2 else rf"rank {rank} differs from the others"
        assert re.search(f"not equal: {who}", wrong) and alarm == "", (rank, wrong, alarm)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.complex128])
def test_the_fingerprint_depends_on_the_order_of_tensors_and_on_each_dtype(dtype):
    tensor, changed = torch.zeros(2, 2, dtype=dtype), torch.tensor([[0, 0], [0, 1]], dtype=dtype)
    if dtype.is_complex:
        changed = changed * 1j
    prints = [replicas.fingerprint(t).item() for t in ([tensor, changed], [changed, tensor])]
    assert len({*prints, replicas.fingerprint([tensor, tensor]).item()}) == 3
    assert replicas.fingerprint([changed.t()]) == replicas.fingerprint([changed])


def test_the_program_saves_nothing_and_names_the_rank(text, tmp_path):
    flags = "--steps 12 --save-every 5 --eval-every 100 --spawn 3 --use replicas".split()
    ran = run(
        *[*TINY, *flags, "--data", text, "--out", tmp_path],
        launcher=[sys.executable, f"{ROOT}/tests/faults/sabotaged.py"],
        env={"TEST_FAULT": "forward flip 2 8"},
    )
    [line] = [line for line in ran.err.splitlines() if line.startswith("Error")]
    assert ran.code == 1 and "rank 2 differs from the others" in line, ran
    assert [path.name[:13] for path in checkpoints(tmp_path)] == ["step-00000005"]
