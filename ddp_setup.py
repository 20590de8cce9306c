"""Start the process group, agree between ranks, stop cleanly: for any PyTorch model.

    with stop_signals() as stop_requested, process_group() as world:
        model = replicate(build_model(), world)
        for batch in batches_of(world.rank, world.size):
            train_one_step(model, batch)
            if any_rank(stop_requested(), world):
                if world.rank == 0:
                    save_checkpoint(model)
                break

The same script runs under plain `python` (one process, no process group), under torchrun, and in
the processes that `spawn` starts. If a rank fails, all ranks end.
"""

import ctypes
import logging
import math
import multiprocessing.resource_tracker
import os
import pickle
import re
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

# The id of the parent process. It is read before the slow import of torch, during which the parent
# can end. The key is the id of this process, because a forked child, which inherits this dict, has
# another parent.
PARENT_PID = {os.getpid(): os.getppid()}

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.multiprocessing import ProcessExitedException, start_processes  # noqa: E402

T = TypeVar("T")
# Windows has only the first two.
STOP_SIGNALS = {
    getattr(signal, name, signal.SIGINT) for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")
}
# The exit code of a rank of `spawn` that has only lost the others. The caller of `spawn` sees 1.
LOST = 113


class World(NamedTuple):
    """What a rank knows of itself and of the group."""

    rank: int  # number of this rank, from 0
    local_rank: int  # number of this rank on its machine, from 0
    size: int  # number of ranks on all machines
    local_size: int  # number of ranks on this machine
    # where the model and the batches of this rank belong
    device: torch.device = torch.device("cpu")
    # with a timeout of a day, for wait_together and from_rank_zero; None for a single rank
    gloo: dist.ProcessGroup | None = None


# ------------------------------------------------------------------------------- launch environment


def read_launch_env(env: Mapping[str, str] = os.environ) -> World:
    """Read the variables that torchrun sets for each process.

    Without RANK and WORLD_SIZE, or with WORLD_SIZE=1, return the world of a single process.
    ValueError if the variables are incomplete or contradict one another, or if srun or
    multiprocessing started this process without setting them.
    """
    if "RANK" not in env and "WORLD_SIZE" not in env:
        if multiprocessing.parent_process():  # Each child would train alone, without a word.
            raise ValueError(
                "multiprocessing started this process, but RANK is not set: start ranks with "
                "ddp_setup.spawn, or set torchrun's variables; to train alone, set WORLD_SIZE=1"
            )
        if env.get("SLURM_STEP_NUM_TASKS", "1") != "1":
            raise ValueError(
                f"srun started {env['SLURM_STEP_NUM_TASKS']} tasks, but RANK is not set: "
                "start with torchrun, or set torchrun's variables as extras/slurm.py does"
            )
        return World(0, 0, 1, 1)
    if env.get("WORLD_SIZE") == "1":  # Kubernetes, for example, sets only some of the others.
        alone = dict.fromkeys(("RANK", "LOCAL_RANK", "MASTER_PORT", "MASTER_ADDR"), "0")
        env = {**alone, "LOCAL_WORLD_SIZE": "1", **env}
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_PORT MASTER_ADDR"
    found = {name: env.get(name, "") for name in names.split()}
    *numbers, address = found.values()
    if address and all(map(str.isdecimal, numbers)):
        rank, local_rank, size, local_size, _port = map(int, numbers)
        if rank < size and local_rank < local_size <= size:
            return World(rank, local_rank, size, local_size)
    raise ValueError(
        "launch variables are missing or do not fit (start with torchrun; with one process per "
        f"machine, LOCAL_RANK=0 and LOCAL_WORLD_SIZE=1 are right): {found}"
    )


# ------------------------------------------------------------------------------------ process group


@contextmanager
def process_group(device: str = "auto", timeout: float = 600.0) -> Iterator[World]:
    """Join the process group of all ranks for the duration of the `with` block.

    All ranks must call this function. A single rank gets no process group: it can use the functions
    of this file, but not torch.distributed. So your own dist.all_reduce or dist.barrier needs
    `if world.size > 1:`.

    device: "auto" (CUDA, else MPS for a single process, else CPU), "cpu", "cuda" or "mps". Rank i
        of a machine gets GPU i. On a CPU, this sets torch's number of threads to an equal part of
        the CPUs that this process may use, so do not bind each rank to its own CPUs. But with a
        single rank on a machine, OMP_NUM_THREADS takes precedence. The backend is NCCL for CUDA,
        else gloo.
    timeout: seconds that a rank may wait for other ranks, in each collective and while it joins.
        Use wait_together for work that may take longer.

    ValueError if the device is not available, raised by the first rank of each machine; the others
    raise SystemExit(1). ConnectionError if the ranks cannot connect, within about twice the
    timeout. If MASTER_ADDR accepts the connection but does not answer, torch never returns: then
    the rank prints the line of this error, and its process ends with exit code 1. While the ranks
    join, a stop signal ends the process at once: see stop_signals.

    If an exception leaves the block of one rank, this rank raises it. The others then lose the
    connection, and each of them prints one line and raises SystemExit(1). (With NCCL, a rank does
    not notice this, and waits until the launcher ends it, or for the timeout.) A rank that waits
    for the timeout does the same. (With NCCL, torch ends it with SIGABRT.) In a process that
    torch.multiprocessing has started, a rank that has lost the connection prints nothing: see
    spawn.

    An error that all ranks raise together has an attribute `raised_on_rank` (see wait_together).
    Rank 0 raises it, and the others raise SystemExit. The exit code is the attribute `exit_code` of
    the error, else 1.

    sys.exit() and sys.exit(0) destroy the group, as the end of the block does. After such a block,
    a program can call process_group again, if torchrun or spawn has started it.
    """
    world = read_launch_env()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun has started this process
        _end_with_parent(PARENT_PID.get(os.getpid(), os.getppid()))
    if world.size == 1:
        yield _select_device(device, world)
        return
    clean = False
    try:
        # While torch's C++ code waits for other ranks, Python's handlers do not run.
        in_main = threading.current_thread() is threading.main_thread()
        with _stop_handlers(signal.SIG_DFL) if in_main else nullcontext():
            world = _join(_select_device(device, world), timeout)
        yield world
        clean = True
    except SystemExit as error:
        clean = not error.code
        raise
    except Exception as error:
        _leave_to_others(error, world, timeout)
        raise
    finally:
        # After an error, the group is not destroyed, because that could wait for a dead rank.
        if clean and dist.is_initialized():  # The program can have destroyed it.
            dist.destroy_process_group()
        # After the last collective, a thread of gloo still needs the GIL. Without this pause,
        # Python can abort at its exit (torch 2.13, github.com/pytorch/pytorch/pull/179291).
        time.sleep(0.1)


def _select_device(name: str, world: World) -> World:
    """Return `world` with the device of this rank. Select this GPU, or set torch's threads."""
    mps = torch.backends.mps.is_available() and world.size == 1
    kinds = ["cuda"] * torch.cuda.is_available() + ["mps"] * mps + ["cpu"]
    if name == "auto":
        name = kinds[0]
    if name not in kinds:
        if world.local_rank:  # The first rank of the machine reports this.
            time.sleep(1)
            raise SystemExit(1)
        raise ValueError(f"device {name!r} is not available; available: {', '.join(kinds)}")
    if name == "cpu":
        # For several ranks, torchrun sets OMP_NUM_THREADS to 1. That is not the user's choice.
        if world.local_size > 1 or "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, available_cpus() // world.local_size))
    elif name == "cuda":
        if world.local_rank >= torch.cuda.device_count():
            raise ValueError(f"local rank {world.local_rank} has no GPU: start one rank per GPU")
        name = f"cuda:{world.local_rank}"
        torch.cuda.set_device(name)
    return world._replace(device=torch.device(name))


def available_cpus(cgroup: str = "/sys/fs/cgroup") -> int:
    """Return how many CPUs this process may use, at least 1.

    This is the number in its CPU affinity, or the quota of its container (cgroups version 2) if
    that is lower.
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Without a quota, there is no file, or it contains "max".
    with suppress(OSError, ValueError):
        quota, period = map(int, Path(cgroup, "cpu.max").read_text().split())
        cpus = min(cpus, max(1, quota // period))
    return cpus


def _join(world: World, timeout: float) -> World:
    """Join the process group, and return `world` with its gloo group.

    ConnectionError if some ranks do not join.
    """
    limit, cuda = timedelta(seconds=timeout), world.device.type == "cuda"
    one_machine = world.local_size == world.size
    if one_machine and sys.platform == "linux":
        # Let gloo listen where no other machine can connect.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    address = "{MASTER_ADDR}:{MASTER_PORT}".format_map(os.environ)
    problem = f"rank {world.rank}: not all {world.size} ranks connected to {address}"

    def give_up() -> None:
        print(f"Error: {problem} (no answer)", file=sys.stderr, flush=True)
        os._exit(1)

    # torch waits for ever for an address that accepts the connection, but does not answer.
    watchdog = threading.Timer(2 * timeout + 6, give_up)
    watchdog.daemon = True
    watchdog.start()
    try:
        store, *_ = next(dist.rendezvous("env://", timeout=limit))
        # torchrun and spawn keep one store for all groups and all restarts. Without keys of its
        # own, a group would read the addresses of a group before it. On several machines, the
        # count of restarts can differ between ranks: there, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE
        # to 1 for torchrun, which makes a new store for each restart.
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "") if one_machine else ""
        number = store.add(f"{restart}/groups of rank {world.rank}", 1)
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=dist.PrefixStore(f"{restart}/{number}", store),
            rank=world.rank,
            world_size=world.size,
            timeout=limit,
            device_id=world.device if cuda else None,  # With this argument, NCCL connects now.
        )
        gloo = dist.new_group(backend="gloo", timeout=timedelta(days=1))
        # Otherwise a rank could leave the block while another one still connects to it.
        dist.barrier(gloo)
    except RuntimeError as error:
        if reason := _fault_of_others(error):
            raise ConnectionError(f"{problem} ({reason})") from error
        raise
    finally:
        watchdog.cancel()
    return world._replace(gloo=gloo)


def _fault_of_others(error: Exception) -> str:
    """Return the first sentence of an error that only says that another rank is lost or late.

    Return "" for any other error.
    """
    # gloo raises a bare RuntimeError. Its text contains a place in gloo's source, or only the words
    # below. Without this match, each rank that has lost another one, or that has waited for the
    # timeout, would raise an error of its own.
    texts = r"/gloo/\S+:\d+\]|Application timeout caused pair closure"
    others = isinstance(error, (dist.DistNetworkError, dist.DistStoreError))
    if type(error) is RuntimeError:
        others = bool(re.search(texts, str(error)))
    elif isinstance(error, dist.DistBackendError):  # NCCL's own errors are of this type, too.
        others = bool(re.search("(?i)timed? ?out|remote process|connection", str(error)))
    return re.split(r"\n|\. ", str(error))[0] if others else ""


def _leave_to_others(error: Exception, world: World, timeout: float) -> None:
    """Raise SystemExit if another rank reports the cause of this error. Otherwise, return."""
    code, line = getattr(error, "exit_code", 1), ""
    if reason := _fault_of_others(error):
        if re.search("(?i)timed? ?out", reason):
            line = f"waited {timeout:g} s in vain for another rank"
        elif multiprocessing.parent_process():
            code = LOST
        else:
            line = f"lost the connection to the other ranks ({reason})"
    elif not (world.rank and hasattr(error, "raised_on_rank")):
        return
    time.sleep(1)  # The launcher must see the rank that failed first as the first to end.
    if line:
        print(f"Error: rank {world.rank}: {line}", file=sys.stderr, flush=True)
    raise SystemExit(code) from None


def _end_with_parent(parent: int) -> None:
    """On Linux, exit if the parent has ended. When it ends later, Linux kills this process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG.
        if os.getppid() != parent:
            os._exit(1)


# ----------------------------------------------------------- functions that all ranks call together


def replicate(model: nn.Module, world: World, **ddp: Any) -> nn.Module:
    """Move the model to world.device and, for several ranks, wrap it in DistributedDataParallel.

    All ranks must call this function, with the same architecture. All get the weights of rank 0.
    With several ranks, this function usually makes a backward pass with zeros, which deletes
    existing gradients and calls gradient hooks. If a hook takes an optimizer step, register it
    after this call.

    ddp: further arguments of DistributedDataParallel.
    """
    model = model.to(world.device)
    if world.size == 1:
        return model
    ddp.setdefault("gradient_as_bucket_view", True)
    replica = nn.parallel.DistributedDataParallel(model, **ddp)
    sparse = any(getattr(module, "sparse", None) is True for module in model.modules())
    if not (replica.find_unused_parameters or replica.static_graph or sparse):
        # DDP rebuilds its buckets after its first backward pass, which changes rounding. Make that
        # pass now, so that a resumed run rounds like an unbroken one. The condition leaves out
        # find_unused_parameters (which keeps the buckets), static_graph (which would record this
        # pass) and sparse embeddings (which need sparse zeros).
        zeros = nn.Module()
        zeros.model = model  # DDP reads its buffers.
        zeros.forward = lambda: sum(
            0.0 * p.sum().real for p in model.parameters() if p.requires_grad
        )
        replica.module = zeros
        with torch.enable_grad():
            replica().backward()
        replica.module = model
        model.zero_grad()
    return replica


def any_rank(flag: bool, world: World) -> bool:
    """Return whether `flag` is true on at least one rank. All ranks must call this function.

    On CUDA, this waits until the GPU has finished the queued work.
    """
    if world.size == 1:
        return flag
    flags = torch.tensor(float(flag), device=world.device)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags)


def wait_together(call: Callable[[], T], world: World) -> T:
    """Run call() on every rank, wait until all calls have ended, and return this rank's result.

    All ranks must call this function. If a call raises an exception, all ranks raise it, and if
    several calls do, that of the lowest rank. (If pickle cannot copy it, the others raise a plain
    ValueError, OSError or RuntimeError.) If it leaves the block of process_group, rank 0 reports
    it, with the traceback of the other rank as a note.

    Use it for slow work: the timeout of process_group does not apply. If a call hangs, if a rank is
    stopped during it, or if its machine is lost, the others wait for a day.
    """
    if world.size == 1:
        return call()
    own: Exception | None = None
    try:
        result = call()
    except Exception as error:
        own = error
        if world.rank:
            own.add_note(f"On rank {world.rank}: {traceback.format_exc()}")
    shared = own
    try:
        pickle.loads(pickle.dumps(own))
    except Exception:  # for example with urllib's HTTPError
        kinds = (kind for kind in (ValueError, OSError) if isinstance(own, kind))
        shared = next(kinds, RuntimeError)(f"{own}")
    errors: list[Any] = [None] * world.size
    dist.all_gather_object(errors, shared, world.gloo)
    errors[world.rank] = own
    for rank, first in enumerate(errors):
        if first:
            first.raised_on_rank = rank  # for process_group
            raise first
    return result


def from_rank_zero(make: Callable[[], T], world: World) -> T:
    """Run make() on rank 0 only, and return its result on all ranks.

    All ranks must call this function. The result must be picklable. In other respects, it works
    like wait_together.
    """
    results: list[Any] = [wait_together(lambda: make() if world.rank == 0 else None, world)]
    if world.size > 1:
        dist.broadcast_object_list(results, group=world.gloo)
    return results[0]  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------- stop signals


@contextmanager
def stop_signals(notice: str = "") -> Iterator[Callable[[], bool]]:
    """Catch SIGTERM, SIGINT (Ctrl-C), SIGUSR1 and SIGHUP (a closed terminal).

    Yield a function that tells if one arrived.

    In the block, these signals do not interrupt the program. (Blocked ones are unblocked, and stay
    so.) Call the yielded function once per step, together with any_rank, because a signal may reach
    only some ranks. Once true, it stays true. A second SIGINT ends the process with exit code 130,
    without cleanup; in a notebook and at a Python prompt, it raises KeyboardInterrupt. While the
    main thread waits in a collective or in wait_together, these signals have no effect, and are
    noticed afterwards. While process_group joins several ranks, each of them ends the process at
    once, because there is nothing to save. One that is ignored, such as SIGHUP after nohup, stays
    ignored, except SIGINT. For the workers of a DataLoader, see detach_worker.

    notice: a line that rank 0 prints at the first SIGINT, if stderr is a terminal.

    Only the main thread can use this function or spawn. Of two nested blocks, the outer one does
    not notice signals that arrive in the inner one. spawn contains a block of stop_signals.
    """
    received, owner = list[int](), os.getpid()

    def handle(number: int, _: object) -> None:
        # A forked child inherits this handler, but Process.terminate() must end the child.
        forked = os.getpid() != owner
        if forked and number == signal.SIGTERM:
            os._exit(128 + number)
        received.append(number)
        if number != signal.SIGINT:
            return
        if received.count(number) > 1:
            if hasattr(sys, "ps1"):  # Keep a notebook's kernel, or a Python prompt, alive.
                raise KeyboardInterrupt
            os._exit(130)
        rank0 = os.environ.get("RANK", "0") == "0" and not forked
        if notice and rank0 and os.isatty(2):
            with suppress(OSError):
                # A terminal that Ctrl-S has stopped would block this process.
                if select.select([], [2], [], 0)[1]:
                    # print() would fail if the signal has interrupted another print().
                    os.write(2, f"\n{notice}\n".encode())

    with _stop_handlers(handle):
        # The program can have blocked them, to lose none before this block.
        if hasattr(signal, "pthread_sigmask"):  # not on Windows
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        yield lambda: bool(received)


@contextmanager
def _stop_handlers(handler: Any) -> Iterator[None]:
    """Set the handler of the stop signals for the duration of the block.

    Ignored ones stay ignored. But SIGINT does not, because shells ignore it for background jobs.
    """
    previous = {
        number: signal.signal(number, handler)
        for number in STOP_SIGNALS
        if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, before in previous.items():
            # The handler is None if it was not installed from Python.
            signal.signal(number, before or signal.SIG_DFL)


def detach_worker(worker_id: int) -> None:
    """Keep stop signals away from a worker of a DataLoader: pass this as its worker_init_fn.

    torchrun and the terminal send signals to a whole Unix process group, and SLURM can send SIGUSR1
    to all processes. These could end the worker before its rank has saved. So a worker leaves the
    group, and ignores SIGUSR1 and SIGHUP. SIGTERM to the worker still ends it, because this is how
    Python ends workers if the rank fails. On Windows, this function does nothing.
    """
    if hasattr(os, "setsid"):
        os.setsid()
        for number in STOP_SIGNALS - {signal.SIGTERM, signal.SIGINT}:
            signal.signal(number, signal.SIG_IGN)


# ----------------------------------------------------------- starting several ranks on this machine


def spawn(function: Callable[..., object], size: int, *args: Any, timeout: float = 600.0) -> int:
    """Run function(*args) in `size` processes on this machine, and return the exit code.

    Each process is a rank, with the variables that read_launch_env reads. The processes are started
    by torch.multiprocessing with the method "spawn", so `function` must be importable and `args`
    picklable, and a script must guard its main code:

        if __name__ == "__main__":
            sys.exit(spawn(main, 2))

    The result is 0, or the exit code of the rank that failed first (sys.exit(3) gives 3; 128 + N if
    signal N ended it: Ctrl-C, or after a stop signal to this process another one). An exception
    that leaves `function` becomes torch's ProcessRaisedException, with the traceback of the rank.
    ChildProcessError names a rank that another signal has killed, that has lost the others although
    none has failed, or that had to be killed after a stop signal or after the end of another rank.

    timeout: seconds that the others may go on after a rank has ended with 0.

    If a rank fails, the others get 4 seconds to end. Then they get SIGTERM, and after 4 more
    seconds SIGKILL. After a stop signal, this process sends SIGTERM to all ranks, and `timeout`
    applies instead of the 4 seconds, twice. Let all ranks exit with the same code, for example 3,
    after a stop signal. A second SIGINT ends this process as in stop_signals. If this process dies,
    Linux kills its ranks.

    ValueError if size < 1, in a process that is one of several ranks, and if the new processes
    could not import `function`. Nobody has tried this function on macOS and Windows. There, ranks
    do not end with this process.
    """
    if size < 1:
        raise ValueError(f"size is {size}; spawn needs at least 1 process")
    if "RANK" in os.environ and os.environ.get("WORLD_SIZE") != "1":
        raise ValueError("a launcher has started this process; it cannot start ranks of its own")
    # A notebook has no file. Of a program that Python reads from stdin, the file is "<stdin>".
    main = getattr(sys.modules["__main__"], "__file__", None)
    if not os.path.exists(main) if main else function.__module__ == "__main__":
        raise ValueError(
            "new processes cannot import a function of a notebook or of standard input: "
            "write it into a .py file, and import it from there"
        )
    # Without this line, torch would warn about each rank that it ends.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    # The ranks meet at this store. Given a socket, torch listens on the loopback address only.
    store = dist.TCPStore("127.0.0.1", port, is_master=True, master_listen_fd=listener.detach())
    start = function, args, size, store.port, os.getpid()
    stopped, deadline = False, math.inf  # deadline: for the others, once a rank has ended with 0
    posix = hasattr(signal, "pthread_sigmask")  # not on Windows
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ()) if posix else set()
    with stop_signals() as stop_requested:
        if posix:
            # The ranks inherit the caller's signal mask. multiprocessing would start this helper
            # process with the first rank, and unblock SIGTERM and SIGINT then.
            multiprocessing.resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        ranks = start_processes(_run_rank, start, size, join=False)
        if posix:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        try:
            while not ranks.join(0.02, timeout if stopped else 4):
                codes = [process.exitcode for process in ranks.processes]
                if 0 in codes:
                    deadline = min(deadline, time.monotonic() + timeout)
                if None in codes and time.monotonic() > deadline:
                    raise ChildProcessError(
                        f"rank {codes.index(None)} had not ended {timeout:g} s after another rank"
                    )
                if stop_requested() and not stopped:
                    stopped = True
                    for process in ranks.processes:
                        process.terminate()
        except ProcessExitedException as error:
            rank, code, problem = error.error_index, error.exit_code, ""
            killed = [i for i, p in enumerate(ranks.processes) if p.exitcode == -9 and i != rank]
            if stopped and killed:
                problem = f"rank {killed[0]} did not end after a stop signal, and was killed"
            elif code == LOST:
                problem = f"rank {rank} lost the connection to the other ranks"
            elif code < 0 and not (
                code == -signal.SIGINT or stop_requested() and -code in STOP_SIGNALS
            ):
                problem = f"rank {rank} was killed by {error.signal_name}"
            if problem:
                raise ChildProcessError(problem) from None
            return code if code >= 0 else 128 - code
        finally:
            for process in ranks.processes:
                process.kill()
    return 0


def _run_rank(
    rank: int, function: Callable[..., object], args: Any, size: int, port: int, parent: int
) -> None:
    """Run function(*args) as a rank, in a new process."""
    _end_with_parent(parent)
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
        function(*args)
    except KeyboardInterrupt:  # For torch, this would be a success.
        sys.exit(130)
