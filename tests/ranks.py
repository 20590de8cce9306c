"""What the ranks do in the tests of ddp_setup.py.

`python -m ranks NAME ARGUMENTS` runs one of these functions as one rank, and `python -m ranks spawn NAME ARGUMENTS`
runs it on two ranks that spawn() starts. This file does not import pytest, so that a rank starts sooner.
"""

import builtins
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ddp_setup


def main(name: str, *args: str) -> None:
    """Run one of the functions below. Print its error in one line with the rank, as run.py does."""
    try:
        code = globals()[name](*args)
    except Exception as error:
        print(f"rank {os.environ.get('RANK')}: {error}", file=sys.stderr, flush=True)
        code = 1
    sys.exit(code)


def spawn(name: str, *args: str) -> int:
    timeout = 3 if name == "rank_1_never_ends" else 60
    try:
        return ddp_setup.spawn([sys.executable, "-m", "ranks", name, *args], 2, timeout)
    except ChildProcessError as error:
        print(f"spawn: {error}", file=sys.stderr, flush=True)
        return 1


def spawn_in_a_shell(*args: str) -> int:
    """Start ranks that are not children of this process, but grandchildren."""
    return ddp_setup.spawn(
        ["sh", "-c", '"$@"; true', "sh", sys.executable, "-m", "ranks", *args], 2
    )


class BadRecord(OSError):
    """An error that pickle cannot copy, because it would call BadRecord("FILE, line N")."""

    def __init__(self, file: str, line: int) -> None:
        super().__init__(f"{file}, line {line}")


class BadNumber(ValueError):
    """The same, but a ValueError."""

    def __init__(self, file: str, line: int) -> None:
        super().__init__(f"{file}, line {line}")


def read_on_rank_1(rank: int, error: type[Exception] = BadRecord) -> None:
    if rank == 1:
        raise error("file", 7)


def agree_and_fail(folder: str, failing: str, error: str = "the cause") -> None:
    """Write down what this rank gets from the functions of ddp_setup. Then the ranks in `failing` raise an error."""
    calls = []
    with ddp_setup.process_group("cpu", timeout=60) as world:
        made = ddp_setup.from_rank_zero(lambda: calls.append("made") or {"by": world.rank}, world)
        try:
            ddp_setup.from_rank_zero(lambda: calls.append("failed") or int("no number"), world)
        except ValueError as wrong:
            text = str(wrong)
        try:
            ddp_setup.wait_together(lambda: [1][world.rank] and open("no/such file"), world)
        except (OSError, IndexError) as wrong:
            text += f", {type(wrong).__name__}"
        try:
            ddp_setup.wait_together(partial(read_on_rank_1, world.rank), world)
        except OSError as wrong:
            [*_, last] = traceback.extract_tb(wrong.__traceback__)
            text += f", {type(wrong).__name__}({wrong}) in {last.name}"
        try:
            ddp_setup.wait_together(partial(read_on_rank_1, world.rank, BadNumber), world)
        except ValueError as wrong:
            text += f", {type(wrong).__name__}({wrong})"
        try:
            ddp_setup.wait_together(lambda: int(f"of rank {world.rank}"), world)
        except ValueError as wrong:
            text += f", {wrong}"
        flags = [
            ddp_setup.any_rank(flag, world)
            for flag in (world.rank == 1, world.rank == 0, True, False)
        ]
        torch.manual_seed(world.rank)
        model = ddp_setup.replicate(nn.Linear(2, 1), world)
        weight = model.module.weight.flatten().tolist()
        threads = torch.get_num_threads()
        timeout = dist.group.WORLD._get_backend(world.device).options._timeout.total_seconds()
        seen = [*world[:4], str(world.device), threads, timeout, made, text, flags, calls, weight]
        Path(folder, f"{world.rank}.json").write_text(json.dumps(seen))
        dist.barrier()
        if str(world.rank) in failing:
            raise RuntimeError(error)
        dist.barrier()


def fail_on_rank_1_in_wait_together() -> None:
    """Rank 1 is slow after its error. Rank 0 sleeps longer where it sleeps, so that a busy machine decides nothing."""
    sleep = time.sleep
    with ddp_setup.process_group("cpu", timeout=60) as world:
        try:
            if world.rank == 0:
                time.sleep = lambda seconds: sleep(20 * seconds)
            ddp_setup.wait_together(lambda: world.rank and int("on rank 1"), world)
        finally:
            sleep(world.rank)


def work_longer_than_the_timeout(folder: str) -> None:
    """First only rank 0 works for longer than the timeout, then only rank 1. Both leave with sys.exit()."""
    seen = {}
    try:
        with ddp_setup.process_group("cpu", timeout=5) as world:
            model = ddp_setup.replicate(nn.Linear(2, 1), world)
            model(torch.ones(1, 2)).sum().backward()
            seen["made"] = ddp_setup.from_rank_zero(lambda: time.sleep(7) or world.rank, world)
            begin = time.monotonic()
            try:
                seen["own"] = ddp_setup.wait_together(
                    lambda: time.sleep(7) or "slept" if world.rank else {}["key"], world
                )
            except KeyError as error:
                seen["own"] = repr(error)
            seen["waited"] = time.monotonic() - begin
            sys.exit()
    finally:
        seen["left the group"] = not dist.is_initialized()
        Path(folder, f"{world.rank}.json").write_text(json.dumps(seen))


def interrupt_rank_1_twice_while_rank_0_computes() -> None:
    with ddp_setup.process_group("cpu") as world:
        dist.barrier()
        if world.rank == 1:
            with ddp_setup.stop_signals():
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)


def signal_to_rank_1(number: str) -> None:
    """Rank 1 sends a signal to itself, and rank 0 waits for rank 1."""
    with ddp_setup.process_group("cpu", timeout=8) as world:
        dist.barrier()
        if world.rank == 1:
            os.kill(os.getpid(), int(number))
        dist.barrier()


def kill_rank_1_while_rank_0_computes() -> None:
    with ddp_setup.process_group("cpu") as world:
        dist.barrier()
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(30)
        raise RuntimeError("rank 0 is still running")


def wait_for_one_another(kind: str) -> None:
    """Do what `kind` says; at the end, both ranks meet in a barrier.

    gloo's timeout is an hour, so that only the thread of process_group can end a rank.
    """
    wrong_order = "nobody waits, but the ends of collectives were written in the wrong order"
    if kind in ("the store is lost", wrong_order):
        # gloo would notice a lost store at once. Imitate NCCL, which waits in a collective. In a
        # wrong order, gloo gives the same numbers, but all collectives have ended ("retired").
        pending = {"last_enqueued_collective": 2, "last_completed_collective": 1}
        entries = [{"retired": True}, {"retired": kind == wrong_order}]
        status = json.dumps({"pg_status": {"0": pending}, "entries": entries})
        torch._C._distributed_c10d._dump_fr_trace_json = lambda *_: status
    init = dist.init_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if kind == "rank 1 is stopped while the group is made" and kwargs["rank"] == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        init(*args, **{**kwargs, "timeout": timedelta(hours=1)})  # here the group is made

    dist.init_process_group = init_process_group
    connect = ddp_setup._connect_to_store  # On a busy machine, a rank may start late.
    ddp_setup._connect_to_store = lambda env, address, _: connect(env, address, 60)
    if kind == "rank 1 does not join the second group":
        with ddp_setup.process_group("cpu") as world:
            dist.barrier()
        if world.rank == 1:
            time.sleep(60)
    with ddp_setup.process_group("cpu", timeout=4) as world:
        dist.barrier()
        if world.rank == 1 and kind == "in different lines":
            time.sleep(60)  # here is rank 1
        if world.rank == 0 and kind == "rank 0 is elsewhere":  # It serves the store.
            time.sleep(3600)  # longer than the test waits
        if world.rank == 1 and kind == "rank 1 works":
            while True:
                sum(range(1000))
                sum(range(1001))  # here rank 1 works
        if kind.startswith("nobody waits"):  # Both are in one line for twice the timeout.
            time.sleep(8)
        if kind == "in a group of their own":  # WORLD has no collective for twice the timeout.
            group, end = dist.new_group([0, 1]), time.monotonic() + 8
            more = torch.ones(1)
            while more:
                time.sleep(0.05 * world.rank)  # so that rank 0 is nearly always in a collective
                more.fill_(time.monotonic() < end)
                dist.all_reduce(more, dist.ReduceOp.MIN, group=group)
        if kind == "rank 1 is stopped while rank 0 waits" and world.rank == 1:
            time.sleep(2)  # Half of the timeout, it still stores its line.
            os.kill(os.getpid(), signal.SIGSTOP)
        if kind == "only the later of two collectives is complete":
            earlier = dist.all_reduce(torch.ones(50_000_000), async_op=True)
            dist.all_reduce(torch.ones(1))  # in gloo's other thread
            if world.rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            earlier.wait()  # here rank 0 waits
        if kind == "the program has destroyed the group":
            dist.destroy_process_group()
            time.sleep(9 * (world.rank == 0))
            return
        if kind in ("rank 0 has left", "rank 1 has left"):
            if str(world.rank) not in kind:
                time.sleep(9)
            return
        if kind == "the store is lost":
            if world.rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        dist.barrier()  # here the others are
    if kind == "in a second group with a longer timeout":
        with ddp_setup.process_group("cpu", timeout=60) as world:
            time.sleep(9 * world.rank)
            dist.barrier()


def two_groups_one_after_the_other() -> None:
    """Rank 0 serves the store and leaves the first group a second later than rank 1."""
    sleep = time.sleep
    for _ in range(2):
        with ddp_setup.process_group("cpu", timeout=60) as world:
            assert not ddp_setup.any_rank(False, world)
            if world.rank == 0:
                time.sleep = lambda _: sleep(1)


def rank_1_never_ends() -> None:
    with ddp_setup.process_group("cpu") as world:
        dist.barrier()
        if world.rank == 1:
            time.sleep(60)


def exit_inside_the_block(ranks: str, code: str) -> None:
    """The ranks in `ranks` call sys.exit(code) inside the `with` block; the others wait for them."""
    try:
        with ddp_setup.process_group("cpu", timeout=60) as world:
            dist.barrier()
            if str(world.rank) in ranks:
                sys.exit(int(code))
            dist.barrier()
    finally:
        if str(world.rank) in ranks:  # Only with the code 0 it leaves the group in order.
            assert dist.is_initialized() == (code != "0")


def fail_in_the_second_group(how: str) -> None:
    """All ranks fail in a first process group, and the program goes on. Then rank 1 fails in a second one."""
    with suppress(ValueError, SystemExit), ddp_setup.process_group("no device"):
        pass
    with ddp_setup.process_group("cpu", timeout=60) as world:
        dist.barrier()
        if world.rank == 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("in the second group")
        dist.barrier()


def compute_without_end(folder: str) -> None:
    with ddp_setup.process_group("cpu") as world:
        Path(folder, f"{world.rank} is up").touch()
        time.sleep(60)


def prepare_without_end(folder: str) -> None:
    """A rank can work for long before it calls process_group."""
    Path(folder, f"{os.environ['RANK']} is up").touch()
    time.sleep(60)


def wait_for_stop(folder: str) -> None:
    """Wait until the ranks get a stop signal. Then they exit with 3, inside the `with` block."""
    with ddp_setup.stop_signals() as stop_requested, ddp_setup.process_group("cpu") as world:
        dist.barrier()
        Path(folder, f"{world.rank} is up").touch()
        while not ddp_setup.any_rank(stop_requested(), world):
            time.sleep(0.02)
        # The other rank may have got its signal first.
        end = time.monotonic() + 30
        while not stop_requested() and time.monotonic() < end:
            time.sleep(0.02)
        how = "got the signal" if stop_requested() else "was told by the other rank"
        Path(folder, f"{world.rank} {how}").touch()
        sys.exit(3)


def interrupt_a_process_that_a_rank_has_started() -> None:
    """As Ctrl-C interrupts the workers of a DataLoader, too."""
    with ddp_setup.stop_signals():
        child = torch.multiprocessing.Process(target=lambda: time.sleep(1))
        child.start()
        os.kill(child.pid, signal.SIGINT)
        child.join()
    sys.exit(child.exitcode)


def end_with_a_daemon(method: str) -> None:
    """As a rank ends whose DataLoader still has a worker. It never calls stop_signals."""
    context = torch.multiprocessing.get_context(method)
    context.Process(target=time.sleep, args=(600,), daemon=True).start()
    other = subprocess.Popen(["sleep", "600"])
    other.terminate()
    assert other.wait() == -signal.SIGTERM
    with ddp_setup.process_group("cpu", timeout=60):
        context.Process(target=time.sleep, args=(600,), daemon=True).start()


def raise_keyboard_interrupt() -> None:
    raise KeyboardInterrupt


def raise_without_catching() -> None:
    raise ValueError("nobody catches this")


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
        model[1].register_hook(lambda gradient: zeros.append(gradient.tolist()))
        with torch.no_grad():
            replica = ddp_setup.replicate(model, world, gradient_as_bucket_view=False)
        assert all(parameter.grad is None for parameter in model)
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

        def check(step: int) -> None:
            users = [step % 2] if "find_unused_parameters" in how else [0, 1]
            used = [0, 1] if world.rank in users else [0]
            replica(torch.tensor([[world.rank + 1.0]]), used).backward()
            found = [p.grad if p.grad is None else p.grad.item() for p in replica.parameters()]
            replica.zero_grad()
            # A gradient is the input of a rank, and DDP averages over both ranks.
            assert found == [1.5, sum(rank + 1.0 for rank in users) / 2, None], (how, found)

        for how in ({"find_unused_parameters": True}, {"static_graph": True}):
            replica = ddp_setup.replicate(Branches(), world, **how)
            for step in range(3):
                check(step)


def join_after_rank_0_had_tried_alone() -> None:
    """torchrun starts all ranks again if rank 1 ends before it joins. Its store keeps all keys."""
    os.environ["TORCHELASTIC_RUN_ID"] = "job"
    if os.environ["RANK"] == "0":
        pid = os.fork()
        if not pid:
            with suppress(ConnectionError), ddp_setup.process_group("cpu", timeout=0.5):
                pass
            os._exit(0)
        os.waitpid(pid, 0)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if os.environ["RANK"] == "0":
        store.set("tried", "")
    store.wait(["tried"])
    with ddp_setup.process_group("cpu", timeout=60) as world:
        assert ddp_setup.any_rank(world.rank == 1, world)


def terminate_a_forked_child() -> None:
    """multiprocessing ends its children with SIGTERM, and then waits for them without a limit."""
    with ddp_setup.stop_signals() as stop_requested:
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            os.write(writing, b"1")  # Python loses signals that arrive during a fork
            for _ in range(20):
                time.sleep(1)
            os._exit(0)
        os.read(reading, 1)
        os.kill(pid, signal.SIGINT)  # a child, such as a DataLoader's worker, survives Ctrl-C
        os.kill(pid, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGTERM
        assert not stop_requested()


def destroy_the_group_inside_the_block() -> None:
    with ddp_setup.process_group("cpu", timeout=60) as world:
        assert ddp_setup.any_rank(True, world)
        assert sys.platform != "linux" or os.environ["GLOO_SOCKET_IFNAME"] == "lo"
        dist.destroy_process_group()


def listen_where_the_other_machines_connect() -> None:
    """gloo uses the loopback interface if all ranks are on this machine. Settings of the user stay as they are."""
    names = "GLOO_SOCKET_IFNAME", "TORCH_FR_BUFFER_SIZE"

    def settings(**given: str) -> list[str | None]:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(given)
        with ddp_setup.process_group("cpu", timeout=60) as world:
            assert ddp_setup.any_rank(world.rank == 1, world)
        return [os.environ.get(name) for name in names]

    loopback = "lo" if sys.platform == "linux" else None
    assert settings() == [loopback, "500"]
    if loopback:  # gloo takes a list of interfaces.
        given = {"GLOO_SOCKET_IFNAME": "lo,lo", "TORCH_FR_BUFFER_SIZE": "900"}
        assert settings(**given) == ["lo,lo", "900"]
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")  # each rank on a machine of its own
    assert settings() == [None, "500"]


def fail_to_connect(*ports: str) -> None:
    """Each rank uses a port of its own, as if the other had not started. Rank 0 serves the store, rank 1 finds none."""
    signal.alarm(60)  # It ends a rank that waits longer.
    rank = int(os.environ["RANK"])
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    os.environ["MASTER_PORT"] = ports[rank]
    try:
        with ddp_setup.process_group("cpu", timeout=1):
            raise AssertionError("without the other rank")
    except ConnectionError as error:
        address = f"127.0.0.1:{ports[rank]}"
        assert f"{error}".startswith(f"rank {rank}: not all 2 ranks connected to {address} (")


def fail_while_the_store_does_not_answer() -> None:
    """Rank 1 stops rank 0, which serves the store, and fails. It must end although its requests wait for ever."""
    rank_0 = 0

    def end_rank_0() -> None:
        if rank_0:
            os.kill(rank_0, signal.SIGKILL)

    watchdog = threading.Timer(40, lambda: (end_rank_0(), os._exit(5)))
    try:
        with ddp_setup.process_group("cpu", timeout=60) as world:
            rank_0 = ddp_setup.from_rank_zero(os.getpid, world)
            if world.rank == 1:
                watchdog.start()
                os.kill(rank_0, signal.SIGSTOP)
                raise RuntimeError("the cause")
            time.sleep(60)
    finally:
        watchdog.cancel()
        end_rank_0()
        # If Python shut down while the threads still wait for the store, it could abort.
        time.sleep(1)


def end_with_a_parent_that_ended_during_the_import() -> None:
    """torchrun can be killed while its workers import torch, which takes seconds."""
    signal.alarm(60)  # It ends this process, if the others do not close their end of the pipe.
    reading, writing = os.pipe()
    if os.fork() == 0:  # the parent
        signal.alarm(60)
        if os.fork() == 0:  # a worker
            parent, real_import = os.getppid(), builtins.__import__

            def import_(name: str, *args: Any, **more: Any) -> Any:
                if name == "torch" and os.getppid() == parent:
                    os.kill(parent, signal.SIGKILL)
                    while os.getppid() == parent:
                        time.sleep(0.01)
                return real_import(name, *args, **more)

            builtins.__import__ = import_
            del sys.modules["ddp_setup"]
            os.environ["TORCHELASTIC_RUN_ID"] = "a run"
            again = importlib.import_module("ddp_setup")
            os.write(writing, b"imported")
            with again.process_group("cpu"):
                os.write(writing, b" and alive")
                os._exit(0)
        signal.pause()
    os.close(writing)
    with open(reading, "rb") as pipe:
        assert pipe.read() == b"imported"


def outlive_the_parent() -> None:
    """A program without a launcher, started with nohup for example, continues when its shell has ended."""
    reading, writing = os.pipe()
    if os.fork() == 0:  # the shell
        shell, (entered, enter) = os.getpid(), os.pipe()
        if os.fork() == 0:  # the program
            with ddp_setup.process_group("cpu"):
                os.write(enter, b"1")
                while os.getppid() == shell:
                    time.sleep(0.01)
                os.write(writing, b"alive")
                os._exit(0)
        os.close(enter)
        os.read(entered, 1)
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        assert pipe.read() == b"alive"


def fork_after_the_import() -> None:
    """A launcher can fork its workers after it has imported ddp_setup."""
    os.environ["TORCHELASTIC_RUN_ID"] = "a run"
    pid = os.fork()
    if not pid:
        with ddp_setup.process_group("cpu") as world:
            os._exit(7 * (world.size == 1))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def wait_in_gloo_beside_nccl(folder: str) -> None:
    """Rank 0 writes down whether it waits: before and during a collective of gloo. Afterwards, it does not."""
    seen = Path(folder, "seen")
    # Only the CUDA build of torch has this function.
    torch._C._distributed_c10d._dump_nccl_trace_json = lambda *_: '{"pg_status": {}}'

    def waits() -> bool:
        return ddp_setup._inspect_collectives(True)[1]

    with ddp_setup.process_group("cpu", timeout=60) as world:
        results = [waits()]
        if world.rank:
            while not seen.exists():
                time.sleep(0.01)
        work = dist.all_reduce(torch.ones(1), async_op=True)
        results.append(waits())
        seen.touch()
        work.wait()
        while waits():  # torch records the end a moment later
            time.sleep(0.01)
    if world.rank == 0:
        seen.write_text(f"{results}")


def compare_batch_norm_statistics() -> None:
    with ddp_setup.process_group("cuda") as world:
        converted = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(1))
        model = ddp_setup.replicate(converted, world)
        model(torch.full((4, 1), float(world.rank), device=world.device)).sum().backward()
        # The momentum is 0.1, and the batch of both ranks has the mean 1 / 2.
        torch.testing.assert_close(model.module.running_mean.item(), 0.05)


if __name__ == "__main__":
    main(*sys.argv[1:])
