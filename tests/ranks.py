"""What the ranks do in the tests of ddp_setup.py and extras/hang.py.

The tests start these functions with ddp_setup.spawn, with torchrun (`python -m ranks NAME ARGUMENTS`), and in forks of
a process that has imported torch, which start sooner. This file does not import pytest.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ddp_setup


def run(stderr: str, variables: dict[str, str], name: str, *args: Any) -> None:
    """Be a rank with the launcher's variables, and write to the file `stderr`."""
    os.environ.update(variables)
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a fork server ignores it
    main(name, *args)


def main(name: str, *args: Any) -> None:
    """Call one of the functions below. Print its error in one line, as run.py does."""
    try:
        globals()[name](*args)
    except Exception as error:
        print(f"Error: {error}", file=sys.stderr, flush=True)
        sys.exit(getattr(error, "exit_code", 1))


def spawn(name: str, *args: str) -> None:
    sys.exit(ddp_setup.spawn(main, 2, name, *args, timeout=3))


def up(folder: str) -> None:
    """Tell the test that this rank has started."""
    path = Path(folder, f"{os.environ['RANK']}.new")
    path.write_text(f"{os.getpid()}")
    path.rename(path.with_suffix(".up"))


# ---------------------------------------------------------------------------------------- agreement


class BadRecord(OSError):
    """An error that pickle cannot copy, because it would call BadRecord("FILE, line N")."""

    def __init__(self, file: str, line: int) -> None:
        super().__init__(f"{file}, line {line}")


def raise_(error: BaseException | None) -> None:
    if error:
        raise error


def agree() -> None:
    """All ranks get the same results, errors, flags and weights."""
    calls = []
    with ddp_setup.process_group("cpu", timeout=60) as world:
        rank = world.rank
        assert world[:5] == (rank, rank, 2, 2, torch.device("cpu"))
        assert torch.get_num_threads() == max(1, ddp_setup.available_cpus() // 2)
        made = ddp_setup.from_rank_zero(lambda: calls.append("made") or {"by": rank}, world)
        assert made == {"by": 0} and calls == ([] if rank else ["made"])
        assert ddp_setup.wait_together(lambda: rank, world) == rank
        for own, raised in (  # the errors of both ranks, and what they raise
            ((None, KeyError("of 1")), (KeyError("of 1"), None)),
            ((ValueError("of 0"), OSError("of 1")), (None, ValueError("of 0"))),
            ((None, BadRecord("file", 7)), (OSError("file, line 7"), None)),
            ((None, dist.DistError("of 1")), (dist.DistError("of 1"), None)),
        ):
            expected = raised[rank] or own[rank]
            try:
                ddp_setup.wait_together(partial(raise_, own[rank]), world)
            except Exception as error:
                assert (type(error), str(error)) == (type(expected), str(expected))
            else:
                raise AssertionError(f"no error instead of {expected!r}")
        flags = [rank == 1, rank == 0, True, False]
        assert [ddp_setup.any_rank(flag, world) for flag in flags] == [True, True, True, False]
        torch.manual_seed(rank)
        weight = ddp_setup.replicate(nn.Linear(2, 1), world).module.weight
        torch.manual_seed(0)
        assert torch.equal(weight, nn.Linear(2, 1).weight)  # that of rank 0


def work_longer_than_the_timeout(folder: str) -> None:
    """Rank 0 works longer than the timeout. The test sends a stop signal to both ranks meanwhile."""
    with ddp_setup.stop_signals() as stop_requested, ddp_setup.process_group("cpu", 5) as world:
        dist.barrier()
        up(folder)
        ddp_setup.from_rank_zero(lambda: [time.sleep(0.1) for _ in range(70)], world)
        assert stop_requested()
        sys.exit(3)


def join_and_leave() -> None:
    """Leave each group at once. Each is a new one, although the launcher keeps the store."""
    for _ in range(20):
        with ddp_setup.process_group("cpu", timeout=60):
            pass
    try:
        with ddp_setup.process_group("cpu", timeout=60):
            sys.exit()
    finally:
        assert not dist.is_initialized()
        with ddp_setup.process_group("cpu", timeout=60):
            dist.destroy_process_group()  # A program may do this.


def join(timeout: float) -> None:
    with ddp_setup.process_group("cpu", timeout):
        pass


def wait_for_others(folder: str) -> None:
    """Wait for a rank that never comes. The stop signals have handlers, as in a training."""
    with ddp_setup.stop_signals():
        up(folder)
        join(600)


def listen(interface: str | None) -> None:
    """gloo uses the loopback interface if all ranks are on this machine. The user can choose others."""
    with ddp_setup.process_group("cpu", timeout=60):
        assert os.environ.get("GLOO_SOCKET_IFNAME") == interface


# ----------------------------------------------------------------------------------------- failures


def fail(how: str, timeout: float = 60) -> None:
    """The last rank does what `how` says, and the others wait for it."""
    with ddp_setup.process_group("cpu", timeout) as world:
        dist.barrier()
        if world.rank == world.size - 1:
            {
                "raise": lambda: int("the cause"),
                "raise an error like gloo's": lambda: raise_(RuntimeError("no file /gloo/rows.pt")),
                "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
                "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
                "exit 3": lambda: sys.exit(3),
                "exit 0": sys.exit,
                "Ctrl-C": lambda: os.kill(os.getpid(), signal.SIGINT),
            }[how]()
        ddp_setup.wait_together(int, world) if how == "kill" else dist.barrier()


def fail_together() -> None:
    """All ranks raise an error of rank 1, which the program wraps."""
    with ddp_setup.process_group("cpu", timeout=60) as world:
        try:
            ddp_setup.wait_together(lambda: world.rank and int("on rank 1"), world)
        except ValueError as error:
            wrapped = RuntimeError(f"wrapped: {error}")
            wrapped.exit_code = 2
            wrapped.raised_on_rank = error.raised_on_rank  # as usage_errors of run.py does
            raise wrapped from error


def choose_a_device_that_is_not_there() -> None:
    with ddp_setup.process_group("tpu"):
        pass


def fail_in_two_starts(folder: str) -> None:
    """torchrun starts the ranks three times: rank 1 fails before it joins, then it is killed."""
    start, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"]
    if (start, rank) == (0, "1"):
        time.sleep(1)  # Rank 0 meanwhile tries to join.
        sys.exit(1)
    with ddp_setup.process_group("cpu", timeout=60):
        dist.barrier()
        if (start, rank) == (1, "1"):
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        Path(folder, f"rank {rank} in start {start}").touch()


def use_hang_report(how: str) -> None:
    """The ranks do what `how` says, for longer than the timeout of hang.report."""
    from extras import hang  # The core's tests run without extras.

    if how == "no function":
        del torch._C._distributed_c10d._dump_fr_trace_json
    with ddp_setup.process_group("cpu", timeout=60) as world, hang.report(world, 3):
        if world.rank == world.size - 1:
            if how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if how == "sleep":
                time.sleep(20)  # here
        if how == "compute":
            time.sleep(5)
        if how == "wait together":
            ddp_setup.from_rank_zero(lambda: time.sleep(5), world)
        dist.barrier()  # here the others wait


def wait_slowly_with_hang_report() -> None:
    """One rank works for 4 s, two times. The others wait for it, deep in a copied module."""
    from extras import hang

    with ddp_setup.process_group("cpu", timeout=60) as world, hang.report(world, 30, warn_after=1):
        for _ in range(2):
            if world.rank == world.size - 1:
                time.sleep(4)  # here it is slow
            wait_in_copied_modules(world)


def wait_in_copied_modules(world: ddp_setup.World) -> None:
    """Wait in ddp_setup.py, called by a function of a file loop.py that calls itself."""
    code = "def deep(n, f):\n    deep(n - 1, f) if n else f()\n"
    found: dict[str, Callable[..., None]] = {}
    exec(compile(code, "/somewhere/loop.py", "exec"), found)
    found["deep"](5, partial(ddp_setup.any_rank, False, world))  # here the script waits


# ------------------------------------------------------------------------------------ ends and signals


def wait_for_stop(folder: str) -> None:
    """Wait until all ranks have got a stop signal. Then exit with 3, inside the block."""
    with ddp_setup.stop_signals() as stop_requested, ddp_setup.process_group("cpu") as world:
        dist.barrier()
        up(folder)
        while not ddp_setup.any_rank(stop_requested(), world):
            time.sleep(0.02)
        while not stop_requested():  # The other rank can have got its signal first.
            time.sleep(0.02)
        sys.exit(3)


def never_stop(folder: str) -> None:
    """Rank 0 stops after a stop signal. Rank 1 does not."""
    with ddp_setup.stop_signals() as stop_requested:
        up(folder)
        while os.environ["RANK"] == "1" or not stop_requested():
            time.sleep(0.02)
        sys.exit(3)


def prepare_without_end(folder: str) -> None:
    """A rank can work for long before it calls process_group."""
    up(folder)
    time.sleep(100)


def end_with_a_daemon(blocked: list[int]) -> None:
    """End as a rank ends whose DataLoader still has a worker. The signal mask is that of the caller."""
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set(blocked)
    context = torch.multiprocessing.get_context("fork")
    with ddp_setup.process_group("cpu", timeout=60):
        context.Process(target=time.sleep, args=(600,), daemon=True).start()


# ----------------------------------------------------------------------------------------- replicas


def train_in_two_parts_on_four_three_and_two_ranks() -> None:
    """Use the same processes for all, because processes take seconds to start."""
    for size in (4, 3, 2):
        if int(os.environ["RANK"]) < size:
            os.environ.update(WORLD_SIZE=f"{size}", LOCAL_WORLD_SIZE=f"{size}")
            train_in_two_parts()


def train_in_two_parts() -> None:
    """Make 4 updates, and 2 and 2 with a new replica in between; compare the weights bit by bit."""
    with ddp_setup.process_group("cpu", timeout=60) as world:

        def train(state: dict[str, torch.Tensor], steps: range) -> dict[str, torch.Tensor]:
            model = nn.Sequential(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 9))
            model.load_state_dict(state)
            replica = ddp_setup.replicate(model, world)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            assert all(parameter.grad is None for parameter in model.parameters())
            for step in steps:
                seeded = torch.Generator().manual_seed(100 * step + world.rank)
                replica(torch.randn(8, 40, generator=seeded)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return model.state_dict()

        torch.manual_seed(0)
        start = nn.Sequential(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 9)).state_dict()
        whole, parts = train(start, range(4)), train(train(start, range(2)), range(2, 4))
        assert all(torch.equal(whole[name], parts[name]) for name in start)


def replicate_complex_parameters_without_grad() -> None:
    with ddp_setup.process_group("cpu", timeout=60) as world:
        frozen, zeros = nn.Parameter(torch.ones(1), requires_grad=False), list[list[float]]()
        model = nn.ParameterList([torch.ones(2, dtype=torch.complex64), torch.ones(3), frozen])
        model.register_buffer("buffer", torch.ones(1))
        model[1].register_hook(lambda gradient: zeros.append(gradient.tolist()))
        with torch.no_grad():
            replica = ddp_setup.replicate(model, world, gradient_as_bucket_view=False)
        assert replica.module is model and all(parameter.grad is None for parameter in model)
        assert zeros == [[0.0] * 3]  # The hooks are called once.
        assert not replica.gradient_as_bucket_view
        # By default, gradients are views of DDP's buckets, which saves the memory of a copy.
        assert ddp_setup.replicate(nn.Linear(1, 1), world).gradient_as_bucket_view


def average_sparse_gradients() -> None:
    with ddp_setup.process_group("cpu", timeout=60) as world:
        model = nn.Sequential(nn.Embedding(9, 2, sparse=True), nn.Linear(2, 1))
        replica = ddp_setup.replicate(model, world)
        replica(torch.tensor([world.rank])).sum().backward()
        gradient, weight = model[0].weight.grad.to_dense(), model[1].weight.detach()
        # Each rank has used one row, and DDP averages over both ranks.
        assert torch.equal(gradient[:2], weight.expand(2, 2) / 2)
        assert not gradient[2:].any()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        return torch.stack([self.layers[i](x) for i in used]).sum()


def average_gradients_of_branches_that_are_not_used() -> None:
    """All ranks use layer 0, and none uses layer 2. Layer 1 is used by one rank in turn, or by all."""
    with ddp_setup.process_group("cpu", timeout=60) as world:
        for how in ("find_unused_parameters", "static_graph"):
            replica = ddp_setup.replicate(Branches(), world, **{how: True})
            for step in range(3):
                users = [step % 2] if how == "find_unused_parameters" else [0, 1]
                used = [0, 1] if world.rank in users else [0]
                replica(torch.tensor([[world.rank + 1.0]]), used).backward()
                found = [p.grad if p.grad is None else p.grad.item() for p in replica.parameters()]
                replica.zero_grad()
                # A gradient is the input of a rank, and DDP averages over both ranks.
                assert found == [1.5, sum(rank + 1.0 for rank in users) / 2, None], (how, found)


def compare_batch_norm_statistics() -> None:
    with ddp_setup.process_group("cuda") as world:
        converted = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(1))
        model = ddp_setup.replicate(converted, world)
        model(torch.full((4, 1), float(world.rank), device=world.device)).sum().backward()
        # The momentum is 0.1, and the batch of both ranks has the mean 1 / 2.
        torch.testing.assert_close(model.module.running_mean.item(), 0.05)


if __name__ == "__main__":
    main(*sys.argv[1:])
