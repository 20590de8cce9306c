"""Tests of extras/batch_norm.py: several ranks on a CPU normalise like one with the whole batch."""

import pytest
import torch
from torch import nn

import ddp_setup
from extras import batch_norm

ROWS = torch.randn(7, 3, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def model(norm):
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Conv2d(3, 5, 3), norm, nn.Flatten(), nn.BatchNorm1d(20))
    return layers.double()


def result(norm, rows, world=None):
    """Return outputs, mean gradients and statistics after two batches, and outputs in evaluation."""
    net = model(norm)
    if world:
        net = ddp_setup.replicate(batch_norm.synchronize_(net, cuda=False), world)
    for batch in (rows, 2 * rows + 1):
        out = net(batch)
        net.zero_grad()
        loss = (out * out.detach().cos()).sum() * (world.size if world else 1)
        loss.backward()
    net = getattr(net, "module", net)
    gradients = [p.grad for p in net.parameters()]
    return out.detach(), gradients, net.state_dict(), net.eval()(rows).detach()


NORMS = {
    "default": lambda: nn.BatchNorm2d(5),
    "cumulative": lambda: nn.BatchNorm2d(5, momentum=None),
    "bare": lambda: nn.BatchNorm2d(5, affine=False, track_running_stats=False),
}


def rank(folder):
    with ddp_setup.process_group("cpu", timeout=60) as world:
        mine = ROWS[:3] if world.rank == 0 else ROWS[3:]  # different numbers of rows
        found = {name: result(norm(), mine, world) for name, norm in NORMS.items()}
        torch.save(found, f"{folder}/{world.rank}")


@pytest.mark.parametrize("name", NORMS)
def test_two_ranks_have_the_statistics_and_gradients_of_the_whole_batch(found, name):
    out, gradients, state, evaluated = result(NORMS[name](), ROWS)
    ours = [ranks[name] for ranks in found]
    torch.testing.assert_close(torch.cat([ours[0][0], ours[1][0]]), out)
    if name != "bare":  # Without statistics, an evaluation uses those of its own rows.
        torch.testing.assert_close(torch.cat([ours[0][3], ours[1][3]]), evaluated)
    for _, rank_gradients, rank_state, _ in ours:
        torch.testing.assert_close(rank_gradients, gradients)
        assert rank_state.keys() == state.keys()
        torch.testing.assert_close(dict(rank_state), dict(state))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    assert ddp_setup.spawn(rank, 2, f"{folder}", timeout=60) == 0
    return [torch.load(folder / f"{i}") for i in range(2)]


def test_one_process_and_cuda_use_torchs_own_functions():
    ours, norm = batch_norm.synchronize_(model(nn.BatchNorm2d(5)), cuda=False), nn.BatchNorm2d(5)
    assert [type(ours[1]), type(ours[3])] == [batch_norm.BatchNorm2d, batch_norm.BatchNorm1d]
    assert torch.equal(ours(ROWS), model(norm)(ROWS))
    assert type(batch_norm.synchronize_(model(norm), cuda=True)[1]) is nn.SyncBatchNorm
