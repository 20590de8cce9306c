"""Start the process group, agree between ranks, stop cleanly: for any PyTorch model.

    with process_group() as world, stop_signals() as stop_requested:
        model = replicate(build_model(), world)
        for batch in batches_of(world.rank, world.size):
            train_one_step(model, batch)
            if any(gather(stop_requested(), world)):
                if world.rank == 0:
                    save_checkpoint(model)
                break

The same script runs under plain `python` (one process, no process group), under torchrun, and in
the processes that `spawn` starts. If a rank fails, all ranks end, and one error is printed.
"""

import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing import start_processes

T = TypeVar("T")


class World(NamedTuple):
    """What a rank knows of itself and of the group."""

    rank: int = 0  # number of this rank, from 0
    local_rank: int = 0  # number of this rank on its machine, from 0
    size: int = 1  # number of ranks on all machines
    local_size: int = 1  # number of ranks on this machine
    device: torch.device = torch.device("cpu")  # for the model and the batches of this rank


def read_launch_env(env: Mapping[str, str] = os.environ) -> World:
    """Read the variables that torchrun sets for each process.

    Without RANK and WORLD_SIZE, return the world of a single process. ValueError if the variables
    are incomplete or contradict one another, or if srun or multiprocessing started this process
    without setting them: each of its processes would train alone, without a word.
    """
    if env.get("RANK", "0") == "0" and env.get("WORLD_SIZE", "1") == "1":
        several = multiprocessing.parent_process() or env.get("SLURM_STEP_NUM_TASKS", "1") != "1"
        if several and "WORLD_SIZE" not in env:
            raise ValueError(
                "srun or multiprocessing started this process, but RANK is not set: start with "
                "torchrun or ddp_setup.spawn; to train alone, set WORLD_SIZE=1"
            )
        return World()
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE".split()
    found = {name: env.get(name, "") for name in names}
    if all(map(str.isdecimal, found.values())):
        rank, local_rank, size, local_size = map(int, found.values())
        if rank < size and local_rank < local_size <= size:
            return World(rank, local_rank, size, local_size)
    raise ValueError(f"launch variables are missing or do not fit (start with torchrun): {found}")


@contextmanager
def process_group(device: str = "auto", timeout: float = 600.0) -> Iterator[World]:
    """Join the process group of all ranks for the duration of the `with` block.

    All ranks must call this function. A single rank gets no process group: it can use the functions
    of this file, but not torch.distributed.

    device: "auto" (CUDA, else MPS for a single process, else CPU) or a name. Rank i of a machine
        gets GPU i. The ranks of a machine share its CPUs equally.
    timeout: seconds that a rank may wait for other ranks, in each collective and while it joins.

    If exceptions leave the block on several ranks, the first of these ranks raises its own, and the
    others raise SystemExit, which prints nothing: they have only lost the connection to that rank,
    or have the same error (see wait_together). The exit code is the attribute `exit_code` of the
    exception, else 1. With NCCL, a rank does not notice that another one has failed: it waits until
    the launcher ends it, or for the timeout.
    """
    world = read_launch_env()
    if world.size == 1:
        yield use_device(device, world)
        return
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
    store = open_store(world, timeout)
    try:
        world = use_device(device, world)
        cuda = world.device.type == "cuda"
        if world.local_size == world.size and sys.platform == "linux":
            # Let gloo listen where no other machine can connect.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda else "gloo",
                store=store,
                rank=world.rank,
                world_size=world.size,
                timeout=timedelta(seconds=timeout),
                device_id=world.device if cuda else None,
            )
            # Otherwise a rank could leave the block while another one still connects to it.
            gather(None, world)
        except RuntimeError as error:
            raise ConnectionError(
                f"rank {world.rank}: not all {world.size} ranks joined: {error}"
            ) from error
        yield world
        dist.destroy_process_group()
    except Exception as error:
        # After an error, the group is not destroyed, because that could wait for a dead rank.
        if is_first_failure(store):
            raise
        time.sleep(1)  # The launcher must see the rank that failed first as the first to end.
        raise SystemExit(getattr(error, "exit_code", 1)) from None
    finally:
        # After the last collective, a thread of gloo still needs the GIL. Without this pause,
        # Python can abort at its exit (torch 2.13, github.com/pytorch/pytorch/pull/179291).
        time.sleep(0.1)


def open_store(world: World, timeout: float) -> dist.Store:
    """Return the store that the launcher or rank 0 serves. ConnectionError if nobody does."""
    # torch waits for ever for an address that accepts the connection, but does not answer.
    faulthandler.dump_traceback_later(2 * timeout + 6, exit=True)
    try:
        store, *_ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
    except dist.DistError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise ConnectionError(f"rank {world.rank}: no answer from {address}: {error}") from error
    finally:
        faulthandler.cancel_dump_traceback_later()
    # torchrun and spawn keep one store for all groups and all restarts. Without keys of its own, a
    # group would read the addresses of a group before it. On several machines, the count of
    # restarts can differ: there, torchrun needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
    one_machine = world.local_size == world.size
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "") if one_machine else ""
    number = store.add(f"{restart}/groups of rank {world.rank}", 1)
    return dist.PrefixStore(f"{restart}/{number}", store)


def is_first_failure(store: dist.Store) -> bool:
    """Return whether no other rank has failed before this one.

    A rank calls this before its connections close, so before the ranks that lose it.
    """
    faulthandler.dump_traceback_later(10, exit=True)  # A lost machine does not answer.
    try:
        return store.add("failures", 1) == 1
    except dist.DistError as lost:  # The process that served the store has ended.
        print(f"Error: lost the store; own error: {lost.__context__!r}", file=sys.stderr)
        return False
    finally:
        faulthandler.cancel_dump_traceback_later()


def use_device(name: str, world: World) -> World:
    """Return `world` with the device of this rank. Select this GPU, or set torch's threads."""
    mps = torch.backends.mps.is_available() and world.size == 1
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    if name == "mps" and not mps:
        raise ValueError("device mps is not available, or not for several ranks")
    if name == "cuda":
        if world.local_rank >= torch.cuda.device_count():
            raise ValueError(f"local rank {world.local_rank} has no GPU: start one rank per GPU")
        name = f"cuda:{world.local_rank}"
        torch.cuda.set_device(name)
    # For several ranks, torchrun sets OMP_NUM_THREADS to 1. That is not the user's choice.
    elif world.local_size > 1 or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, available_cpus() // world.local_size))
    return world._replace(device=torch.device(name))


def available_cpus() -> int:
    """Return how many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ----------------------------------------------------------- functions that all ranks call together


def replicate(model: nn.Module, world: World, **ddp: Any) -> nn.Module:
    """Move the model to world.device and, for several ranks, wrap it in DistributedDataParallel.

    All ranks must call this function, with the same architecture. All get the weights of rank 0.
    Sparse gradients and complex parameters are not supported.

    ddp: further arguments of DistributedDataParallel.
    """
    model = model.to(world.device)
    if world.size == 1:
        return model
    replica = nn.parallel.DistributedDataParallel(model, **{"gradient_as_bucket_view": True, **ddp})
    # DDP arranges its buckets anew after the first backward pass, which changes the rounding of the
    # sums. Let it do so now: then a run that is resumed later has the same sums.
    if not ddp.get("static_graph"):
        first = nn.Module()
        first.model = model  # for its buffers, which DDP sends
        first.forward = lambda: sum(0 * p.sum() for p in model.parameters() if p.requires_grad)
        replica.module = first
        replica().backward()
        replica.module = model
        model.zero_grad()
    return replica


def gather(value: T, world: World) -> list[T]:
    """Return the values of all ranks, in the order of ranks. All ranks must call this function.

    The values must be picklable. They pass the CPU: for large tensors, use torch.distributed.
    """
    values = [value] * world.size
    if world.size > 1:
        dist.all_gather_object(values, value)
    return values


def wait_together(call: Callable[[], T], world: World) -> T:
    """Run call() on every rank, wait until all calls have ended, and return this rank's result.

    All ranks must call this function. If a call raises an exception, all ranks raise it, and if
    several calls do, that of the lowest rank. (An exception that pickle cannot copy becomes a
    RuntimeError.) The others wait for the timeout of process_group at most.
    """
    if world.size == 1:
        return call()
    error: Any = None
    try:
        result = call()
    except Exception as raised:
        error = raised
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RuntimeError(f"{raised!r}")
        error.add_note(f"On rank {world.rank}: {traceback.format_exc()}")
    for first in filter(None, gather(error, world)):
        raise first
    return result


def from_rank_zero(make: Callable[[], T], world: World) -> T:
    """Run make() on rank 0 only, and return its result on all ranks.

    All ranks must call this function. The result must be picklable. For errors see wait_together.
    """
    results = [wait_together(lambda: make() if world.rank == 0 else None, world)]
    if world.size > 1:
        dist.broadcast_object_list(results)
    return results[0]  # type: ignore[return-value]


@contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Catch SIGTERM, SIGINT (Ctrl-C), SIGUSR1 and SIGHUP. Yield a function that tells if one came.

    In the block, these signals do not interrupt the program. One that was ignored before, such as
    SIGHUP after nohup, stays so. Call the yielded function once per step, together with gather,
    because a signal may reach only some ranks. Once true, it stays true, and then only SIGINT can
    end the process after the block. A second SIGINT in the block ends it with exit code 130,
    without cleanup. In a collective, the signals are only noticed afterwards.

    Only the main thread can use this function or spawn. torchrun and the terminal signal the
    workers of a DataLoader too: give it a worker_init_fn that calls os.setsid().
    """
    received, owner = [], os.getpid()  # type: ignore[var-annotated]

    def handle(number: int, _: object) -> None:
        # A forked child inherits this handler, but Process.terminate() must end the child.
        if number == signal.SIGTERM and os.getpid() != owner:
            os._exit(143)
        if number == signal.SIGINT and number in received:
            os._exit(130)
        received.append(number)

    # Windows has only the first two.
    names = "SIGTERM SIGINT SIGUSR1 SIGHUP".split()
    numbers = {getattr(signal, name, signal.SIGINT) for name in names}
    caught = [n for n in numbers if signal.getsignal(n) != signal.SIG_IGN]
    previous = [signal.signal(number, handle) for number in caught]
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in zip(caught, previous):
            # A launcher may send one more to a rank that is about to end: do not let it kill this.
            signal.signal(number, handle if received and handler == signal.SIG_DFL else handler)


# ----------------------------------------------------------- starting several ranks on this machine


def spawn(fn: Callable[..., object], args: tuple[Any, ...] = (), nprocs: int = 1) -> None:
    """Run fn(rank, *args) in `nprocs` processes on this machine, as torch.multiprocessing.spawn.

        if __name__ == "__main__":  # Each process imports this script.
            spawn(main, nprocs=2)

    In addition, each process is a rank, with the variables that read_launch_env reads; a stop
    signal to this process is sent to all ranks, as SIGTERM; and if this process dies, Linux kills
    its ranks. If all ranks return, spawn returns too: after a stop, let fn end with sys.exit(3).

    The errors are those of torch: ProcessRaisedException has the traceback of the rank that failed
    first, and ProcessExitedException its exit code. The other ranks then get 4 seconds to end, then
    SIGTERM, and after 4 more seconds SIGKILL.
    """
    if nprocs < 1 or os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError("spawn: nprocs is 0, or a launcher has started this process itself")
    # The ranks meet at this store. Given a socket, torch listens on the loopback address only.
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    store = dist.TCPStore(host, port, is_master=True, master_listen_fd=listener.detach())
    others, stopped = multiprocessing.active_children(), False
    with stop_signals() as stop_requested:
        try:
            ranks = start_processes(_run_rank, (fn, args, nprocs, store.port), nprocs, join=False)
            while not ranks.join(0.05, 4):
                if stop_requested() and not stopped:
                    stopped = True
                    for process in ranks.processes:
                        process.terminate()
        finally:  # also if one of them could not be started
            for process in {*multiprocessing.active_children()} - {*others}:
                process.kill()


def _run_rank(rank: int, fn: Callable[..., object], args: Any, size: int, port: int) -> None:
    """Run fn(rank, *args) as a rank, in a new process."""
    end_with_parent()
    os.environ.update(
        RANK=f"{rank}",
        LOCAL_RANK=f"{rank}",
        WORLD_SIZE=f"{size}",
        LOCAL_WORLD_SIZE=f"{size}",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=f"{port}",
        TORCHELASTIC_USE_AGENT_STORE="True",  # The store is in the parent, not in rank 0.
    )
    try:
        fn(rank, *args)
    except KeyboardInterrupt:  # For torch, this would be a success.
        sys.exit(130)


def end_with_parent() -> None:
    """On Linux, let this process be killed when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG.
        parent = multiprocessing.parent_process()
        if parent and not parent.is_alive():
            os._exit(1)
