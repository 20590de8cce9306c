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
the processes that `spawn` starts. If a rank fails, all ranks end, and as a rule, one of them
reports the cause.
"""

import json
import math
import os
import pickle
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

# The id of the parent process, for _die_with_parent. It is read before the slow import of torch,
# during which the parent can end. The key is the id of this process, because a forked child, which
# inherits this dict, has another parent.
PARENT_PID = {os.getpid(): os.getppid()}

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

T = TypeVar("T")
# _program_lines leaves out files whose names begin with one of these. "<" is code without a file.
LIBRARIES = __file__, "<", *map(os.path.dirname, (os.__file__, *torch.__path__))
# Windows has no SIGUSR1.
STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGUSR1", signal.SIGINT)}


class World(NamedTuple):
    """What a rank knows of itself and of the group."""

    rank: int  # number of this rank, from 0
    local_rank: int  # number of this rank on its machine, from 0
    size: int  # number of ranks on all machines
    local_size: int  # number of ranks on this machine
    # where the model and the batches of this rank belong
    device: torch.device = torch.device("cpu")


# ------------------------------------------------------------------------------- launch environment


def read_launch_env(env: Mapping[str, str] = os.environ) -> World:
    """Read the variables that torchrun sets for each process.

    Without RANK and WORLD_SIZE, return the world of a single process. ValueError if the variables
    are incomplete or contradict one another, or if srun started several tasks without setting them.
    """
    if "RANK" not in env and "WORLD_SIZE" not in env:
        if env.get("SLURM_STEP_NUM_TASKS", "1") != "1":
            raise ValueError(
                f"srun started {env['SLURM_STEP_NUM_TASKS']} tasks, but RANK is not set: "
                "start with torchrun, or set torchrun's variables as extras/slurm.py does"
            )
        return World(0, 0, 1, 1)
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_PORT MASTER_ADDR"
    found = {name: env.get(name, "") for name in names.split()}
    *numbers, address = found.values()
    if address and all(map(str.isdecimal, numbers)):
        rank, local_rank, size, local_size, _port = map(int, numbers)
        if rank < size and local_rank < local_size <= size:
            return World(rank, local_rank, size, local_size)
    raise ValueError(f"launch variables are missing or do not fit (start with torchrun): {found}")


# ------------------------------------------------------------------------------------ process group


@contextmanager
def process_group(device: str = "auto", timeout: float = 600.0) -> Iterator[World]:
    """Join the process group of all ranks for the duration of the `with` block.

    All ranks must call this function. A single rank gets no process group: it can use the functions
    of this file, but not torch.distributed.

    device: "auto" (CUDA, else MPS for a single process, else CPU), "cpu", "cuda" or "mps". Rank i
        of a machine gets GPU i. On a CPU, this sets torch's number of threads to an equal part of
        the CPUs that this process may use, so do not bind each rank to its own CPUs. But with a
        single rank on a machine, OMP_NUM_THREADS takes precedence. The backend is NCCL for CUDA,
        else gloo.
    timeout: seconds that a rank may wait for other ranks. A rank that waits longer ends, and one
        such rank prints the current program lines of every rank. Use wait_together for work that
        may take longer. The timeout does not apply to calls of torch.distributed.new_group
        and monitored_barrier. With gloo, send and recv wait for twice the timeout, and then raise
        an exception.

    If a rank fails, all ranks end, and one of them reports the cause:
    - If an exception leaves the block, or if the device of a rank is not available (ValueError),
      the rank that failed first raises its exception. Every other rank that still uses the group
      raises SystemExit in place of its own exception. The exit code is the attribute `exit_code` of
      its own exception, else 1.
    - If a rank was killed or lost, one of the others raises ConnectionError, which names the ranks
      in which no exception has occurred. But under spawn, the process that called spawn reports
      this. torchrun reports it too, and often ends the ranks before one of them can. With NCCL,
      ranks do not notice that another one is lost, and wait for the timeout.
    - A rank that leaves the block by sys.exit (with any code) or KeyboardInterrupt counts as lost
      for ranks that still use the group.
    - A rank that has waited for the timeout gets no exception, and ends with exit code 1. After
      another rank has reported an error, a rank ends in the same way if it starts no collective for
      about the timeout, or if it waits for NCCL for a tenth of it. (torch can also end such a rank
      with SIGABRT.)

    Several ranks report
    - if their launch variables are wrong (ValueError), or if they cannot connect to the others in
      time (ConnectionError);
    - if torch's store is lost, through which the ranks agree on who reports. This store is in the
      process that called spawn, or in torchrun's agent. With other launchers, it is in the process
      of rank 0, so each rank that fails after the end of rank 0 reports.
    No rank reports the cause if the rank that failed first needs seconds for its clean-up after the
    block, because the launcher kills it soon after another rank has ended.

    sys.exit() and sys.exit(0) destroy the group, as the end of the block does. Only after a block
    that destroyed its group can a program call process_group again.
    """
    world = read_launch_env()
    # End with the parent: torchrun or the process that called spawn.
    if {"SPAWNED_BY", "TORCHELASTIC_RUN_ID"} & os.environ.keys():
        _die_with_parent(PARENT_PID.get(os.getpid(), os.getppid()))
    if world.size == 1:
        yield _select_device(device, world)
        return
    if world.local_size == world.size and sys.platform == "linux":
        # Let gloo listen where no other machine can connect.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # _watch_ranks reads torch's flight recorder, and 0 would switch it off.
    if os.environ.get("TORCH_FR_BUFFER_SIZE", "0") == "0":
        os.environ["TORCH_FR_BUFFER_SIZE"] = "500"
    store = _connect_to_store(world, "{MASTER_ADDR}:{MASTER_PORT}".format_map(os.environ), timeout)
    main, clean = threading.get_ident(), False
    joined, block_ended = threading.Event(), threading.Event()
    try:
        # Each group needs its own keys. Each rank counts its groups. All ranks make the same ones,
        # so the numbers are equal. _wait_for_ranks reads this number.
        number = store.add(f"groups of {world.rank}", 1)
        store = dist.PrefixStore(f"group {number}", store)
        world = _select_device(device, world)
        cuda = world.device.type == "cuda"
        # A second connection, because the main thread may block the first one.
        connection = store.clone()  # type: ignore[attr-defined]
        watcher = _in_thread(
            lambda: _watch_ranks(world, connection, timeout, main, joined, block_ended)
        )
        try:
            dist.init_process_group(
                "nccl" if cuda else "gloo",
                store=store,
                rank=world.rank,
                world_size=world.size,
                # _watch_ranks ends the process earlier, unless the store does not answer.
                timeout=timedelta(seconds=2 * timeout),
                device_id=world.device if cuda else None,  # With this argument, NCCL connects now.
            )
            joined.set()
            yield world
            clean = True
        except SystemExit as error:
            clean = not error.code
            raise
        finally:
            block_ended.set()
            if clean:
                # The watcher must not read a destroyed group. It ends soon, if the store answers.
                futures.wait([watcher], 6)
                if dist.is_initialized():  # The program can have destroyed it.
                    dist.destroy_process_group()
    except Exception as error:
        # The group is not destroyed, because that could wait for a dead rank.
        _choose_reporter(error, world, store)
        raise
    finally:
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


@cache
def _connect_to_store(world: World, address: str, timeout: float) -> dist.Store:
    """Connect to the store, a TCPStore of torch that all ranks share.

    torch itself reads the address from the environment: `address` is only for the error message and
    for @cache. Without @cache, rank 0 could close the store while another rank connects for the
    next process group.
    """

    def connect() -> dist.Store:
        store, *_ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
        torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        return dist.PrefixStore(_agree_on_run_id(store, world) if torchrun else "0", store)

    try:
        # In a thread, because torch can wait for ever, and the main thread must handle signals.
        return _in_thread(connect).result(2 * timeout + 6)
    except (dist.DistError, TimeoutError) as error:
        raise ConnectionError(
            f"rank {world.rank}: not all {world.size} ranks connected to {address} "
            f"({str(error) or 'no answer'})"
        ) from error


def _agree_on_run_id(store: dist.Store, world: World) -> str:
    """Return an id that is the same on all ranks and new for each start of the ranks.

    The id is a random word of rank 0. All keys get it as a prefix, because torchrun's store keeps
    old keys, such as "reported", when torchrun restarts the ranks. It also keeps old messages. So
    each rank above 0 sends a new random word to rank 0, waits for the reply to this word, and sends
    the reply, which is the id, back to rank 0. Until then, rank 0 replies to every message. Queues
    need a store with libuv, torch's default on Linux and macOS.
    TORCHELASTIC_RESTART_COUNT cannot be the id, because it can differ between machines (PyTorch
    issues 108158 and 135712).
    """
    word = secrets.token_hex()
    if world.rank:
        store.queue_push(f"message of rank {world.rank}", word)
        run_id = store.get(f"reply to {word}").decode()
        store.queue_push(f"message of rank {world.rank}", run_id)
        return run_id
    for rank in range(1, world.size):
        message = ""
        while message != word:
            message = store.queue_pop(f"message of rank {rank}").decode()
            store.set(f"reply to {message}", word)
    return word


# -------------------------------------------------------------------------------- failure of a rank


def _choose_reporter(error: Exception, world: World, store: dist.Store) -> None:
    """Return normally if the caller must raise `error`. Otherwise, raise its replacement."""
    # `consequence`: whether the error only shows that another rank has failed. torch then raises
    # DistError, or for gloo, a bare RuntimeError with one of these texts.
    texts = r"\[\S*/gloo/\S+\]|Application timeout caused pair closure"
    from_gloo = type(error) is RuntimeError and re.search(texts, str(error))
    consequence = from_gloo or isinstance(error, dist.DistError)

    def claim_report() -> list[str]:
        """Raise SystemExit if another rank reports. Otherwise, return the ranks without an error.

        If a failure of another rank has caused this error, these ranks are lost or still compute.
        """
        store.set(f"failed {world.rank}", "")
        if consequence:  # Let the rank that failed first report.
            time.sleep(1)
        if store.add("reported", 1) > 1:
            raise SystemExit(getattr(error, "exit_code", 1))
        store.set(f"reporter {world.rank}", "")  # for _wait_for_ranks
        return [f"{rank}" for rank in range(world.size) if not store.check([f"failed {rank}"])]

    try:
        # If the network is down, a request to the store never returns.
        missing = _in_thread(claim_report).result(6)
    except (dist.DistError, TimeoutError):
        # The store is lost, most likely with rank 0 or its machine.
        missing = ["0"]
    if consequence and missing:
        how = "timed out" if re.search("(?i)timed? ?out", str(error)) else "connection lost"
        raise ConnectionError(f"no answer from rank {' or '.join(missing)} ({how})") from error


def _watch_ranks(
    world: World,
    store: dist.Store,
    timeout: float,
    main: int,
    joined: threading.Event,
    block_ended: threading.Event,
) -> None:
    """End this process with exit code 1 when it has waited for other ranks for `timeout` seconds.

    This runs in a thread of each rank, because no exception can be raised in the thread `main`,
    which called process_group, while it is blocked in a collective.

    In each interval of 1/20 of the timeout, each rank adds 1 to one counter that all ranks share,
    and stores the new count with its program lines. A rank with an old count no longer answers.

    A rank is stuck in an interval if none of its collectives starts or ends, and either it waits in
    one, or another rank has reported an error. It ends after 20 such intervals in a row. If no rank
    has reported an error, the first rank to end prints where each rank is.

    NCCL does not notice that another rank has failed. So a rank that waits for NCCL ends after 2
    such intervals, if a rank has reported an error or the store is lost.
    """
    cuda = world.device.type == "cuda"
    numbers: Any = None
    count = 0
    counts = list[int]()  # values of the counter while this rank was stuck
    while not block_ended.wait(timeout / 20):
        before = numbers  # one interval ago
        numbers, waiting = _inspect_collectives(cuda)
        waiting |= not joined.is_set()
        waiting_for_nccl = cuda and waiting
        # `failed` stays True if the store is lost.
        failed = True
        with suppress(dist.DistError):
            count = store.add("counter", 1)
            store.set(f"state of {world.rank}", json.dumps([count, _program_lines(main)]))
            # A rank that waits for gloo need not read this: gloo raises an error there.
            failed = (cuda or not waiting) and store.add("reported", 0) > 0
            waiting |= failed  # A rank that computes goes on if the store is lost.
        counts = [*counts, count] if waiting and numbers == before else []
        if len(counts) < (2 if failed and waiting_for_nccl else 20):
            continue
        ranks = ["no answer from rank 0"]  # if the store is lost
        with suppress(dist.DistError):
            if store.add("reported", 1) > 1:
                os._exit(1)
            # Unlike get, compare_set does not wait for a missing key.
            states = [
                json.loads(store.compare_set(f"state of {rank}", "", '[0, ""]'))
                for rank in range(world.size)
            ]
            # A rank answers if it has stored a state in the last three intervals. So its count is
            # higher than the count of this rank three intervals ago.
            oldest = counts[-4:][0]
            ranks = [
                f"rank {rank} at {place}" if written > oldest else f"no answer from rank {rank}"
                for rank, (written, place) in enumerate(states)
            ]
        seconds = len(counts) * timeout / 20
        with suppress(OSError):  # of a closed pipe
            print(
                f"Error: no progress for {seconds:g} s: {', '.join(ranks)}",
                file=sys.stderr,
                flush=True,
            )
        os._exit(1)


def _program_lines(thread: int) -> str:
    """Return the three innermost program lines of a thread's stack, the innermost first."""
    # traceback.extract_stack would read source files. Their storage can hang.
    stack = traceback.walk_stack(sys._current_frames()[thread])
    lines = [
        f"{Path(name).name}:{number}"
        for frame, number in stack
        if not (name := frame.f_code.co_filename).startswith(LIBRARIES)
    ]
    return " < ".join(lines[:3]) or "a library"


def _inspect_collectives(cuda: bool) -> tuple[Any, bool]:
    """Read torch's flight recorder, which numbers the collectives of each process group.

    Returns the numbers of the last enqueued, started and completed collective of each group, and
    whether this rank waits in one. With NCCL, the program can have groups of gloo too.
    """
    c10d: Any = torch._C._distributed_c10d
    # gloo completes collectives in any order, so look at each of them. The arguments are
    # include_collectives and only_active.
    gloo = json.loads(c10d._dump_fr_trace_json(True, False))
    waiting = not all(entry["retired"] for entry in gloo.get("entries", []))  # retired: completed
    if not cuda:
        return gloo["pg_status"], waiting
    nccl = json.loads(c10d._dump_nccl_trace_json(False, False))["pg_status"]
    waiting |= any(
        group["last_enqueued_collective"] != group["last_completed_collective"]
        for group in nccl.values()
    )
    return (gloo["pg_status"], nccl), waiting


def _in_thread(call: Callable[[], T]) -> "futures.Future[T]":
    """Start call() in a daemon thread, and return a future."""
    future = futures.Future[T]()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


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
        # pass) and sparse embeddings (which need sparse zeros). The argument [] means that each
        # parameter gets a gradient.
        replica.reducer.prepare_for_backward([])
        with torch.enable_grad():
            torch.autograd.backward(
                [0.0 * p.sum().real for p in model.parameters() if p.requires_grad]
            )
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

    All ranks must call this function. If a call raises ValueError or OSError, all ranks raise it,
    and if several calls do, that of the lowest rank. (If pickle cannot copy it, the others raise a
    plain ValueError or OSError.) If none does, an exception of another type is raised only on its
    own rank. Do not catch it, because the other ranks go on.

    Use it for slow work: the timeout of process_group does not apply. If a call hangs, all ranks
    wait for ever.

    With several ranks, the call runs in a second thread. It must not use torch.distributed. It must
    itself set torch.no_grad(), autocast and the current GPU, which torch keeps per thread. And it
    must not hold Python's GIL for as long as the timeout, as json.loads of a huge text does.
    """
    if world.size == 1:
        return call()
    future = _in_thread(call)
    # These collectives show _watch_ranks that the rank is not stuck.
    while any_rank(not future.done(), world):
        futures.wait([future], 0.1)
    own = future.exception()
    shared = own if isinstance(own, (ValueError, OSError)) else None
    try:
        pickle.loads(pickle.dumps(shared))
    except Exception:  # for example with urllib's HTTPError
        shared = (ValueError if isinstance(own, ValueError) else OSError)(f"{own}")
    errors: list[Any] = [None] * world.size
    dist.all_gather_object(errors, shared)
    if shared:
        errors[world.rank] = own
    for error in filter(None, errors):
        if error is not own:
            time.sleep(0.5)  # Let the rank with the traceback report it.
        raise error
    return future.result()


def from_rank_zero(make: Callable[[], T], world: World) -> T:
    """Run make() on rank 0 only, and return its result on all ranks.

    All ranks must call this function. The result must be picklable. In other respects, it works
    like wait_together, but after an exception other than ValueError and OSError, the other ranks
    wait in a collective until the process of rank 0 ends, or for the timeout.
    """
    results: list[Any] = [wait_together(lambda: make() if world.rank == 0 else None, world)]
    if world.size > 1:
        dist.broadcast_object_list(results)
    return results[0]  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------- stop signals


@contextmanager
def stop_signals(notice: str = "") -> Iterator[Callable[[], bool]]:
    """Catch SIGTERM, SIGINT (Ctrl-C) and SIGUSR1; yield a function that tells if one arrived.

    In the block, these signals do not interrupt the program. (Blocked ones are unblocked, and stay
    so.) Call the yielded function once per step, together with any_rank, because a signal may reach
    only some ranks. Once true, it stays true. A second SIGINT ends the process with exit code 130,
    without cleanup; in a notebook and at a Python prompt, it raises KeyboardInterrupt. These
    signals have no effect while the main thread waits in a collective, so a rank whose collective
    hangs ends only at the timeout. For the workers of a DataLoader, see detach_worker.

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
                # print() would fail if the signal has interrupted another print().
                os.write(2, f"\n{notice}\n".encode())

    previous = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    # The program can have blocked them, to lose none before this block.
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in previous.items():
            # The handler is None if it was not installed from Python.
            signal.signal(number, handler or signal.SIG_DFL)


def detach_worker(worker_id: int) -> None:
    """Keep stop signals away from a worker of a DataLoader: pass this as its worker_init_fn.

    torchrun and the terminal send signals to a whole Unix process group, and SLURM can send SIGUSR1
    to all processes. These could end the worker before its rank has saved. SIGTERM to the worker
    still ends it, because this is how Python ends workers if the rank fails. On Windows, this
    function does nothing.
    """
    if hasattr(os, "setsid"):
        os.setsid()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


# ----------------------------------------------------------- starting several ranks on this machine


def spawn(command: Sequence[str], size: int, timeout: float = math.inf) -> int:
    """Run a command in `size` processes on this machine, and return the exit code.

    Each process is a rank, with the variables that read_launch_env reads, and must use
    process_group. A script in a file can start itself:

        if __name__ == "__main__":
            if "RANK" in os.environ:
                main()
            else:
                sys.exit(spawn([sys.executable, *sys.orig_argv[1:]], 2))

    If a rank fails, the others get at most 4 seconds to end and are then killed. After a stop
    signal, this process sends SIGTERM to all ranks. If a rank fails later than that, `timeout`
    applies instead of the 4 seconds. SIGTERM ends a rank that is not in a block of stop_signals.
    Such a rank has failed. Let all ranks exit with the same code, for example 3, after a stop
    signal: nothing else tells the caller that they have stopped early. A second SIGINT ends this
    process as in stop_signals. If this process dies, Linux kills its ranks.

    command: its process must be the rank. So a shell, for example, must start the rank by `exec`.
        The ranks inherit the signal mask, but they do not ignore stop signals that this process
        ignores.
    timeout: seconds that the other ranks may continue after the first one has ended with 0, or,
        once this process has received a stop signal, with any code. Then they are killed.

    The result is 0, or the exit code of the rank that was the first to end with an error (128 + N
    if signal N ended it). But spawn raises ChildProcessError, which names
    - a rank that was killed after `timeout`, or before it could print the error that it reports;
    - otherwise a rank that has failed, if no rank has reported an error through process_group. But
      spawn returns normally if all ranks have exited with the same code, or if a SIGTERM of this
      process has ended that rank.
    spawn also returns normally if Ctrl-C has ended the rank that failed first.

    ValueError if size < 1, in a process that is a rank, and on Windows.
    """
    if size < 1:
        raise ValueError(f"size is {size}; spawn needs at least 1 process")
    if "RANK" in os.environ:
        raise ValueError("a launcher has started this process; it cannot start ranks of its own")
    if sys.platform == "win32":
        raise ValueError("several processes on Windows are not supported: use WSL2")
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, is_master=True, master_listen_fd=listener.detach())
    # With TORCHELASTIC_USE_AGENT_STORE, rank 0 does not serve the store, because this process does.
    env = {
        **os.environ,
        "WORLD_SIZE": f"{size}",
        "LOCAL_WORLD_SIZE": f"{size}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{port}",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "SPAWNED_BY": f"{os.getpid()}",
    }
    parent, mask = os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, ())

    def prepare() -> None:
        """Runs in the process of each rank before the command."""
        _die_with_parent(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # stop_signals has changed it

    ranks = list[subprocess.Popen[bytes]]()
    with stop_signals() as stop_requested:
        try:
            for rank in range(size):
                own = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}
                ranks.append(subprocess.Popen(command, env=env | own, preexec_fn=prepare))
            return _wait_for_ranks(ranks, stop_requested, timeout, store)
        finally:
            # Ranks are left after a timeout, after KeyboardInterrupt, and if not all could start.
            for process in ranks:
                process.kill()
            for process in ranks:
                process.wait()


def _wait_for_ranks(
    ranks: list[subprocess.Popen[bytes]],
    stop_requested: Callable[[], bool],
    timeout: float,
    store: dist.Store,
) -> int:
    """Wait until all ranks have ended, or until `spawn` must kill the others."""
    to_stop, deadline, grace, late = list(ranks), math.inf, math.inf, False
    code, problem = 0, ""
    while True:
        now = time.monotonic()
        codes = [rank.poll() for rank in ranks]
        if not code and (code := next(filter(None, codes), 0)):
            failed = codes.index(code)
            # Whoever adds the first 1 to the key "reported" reports the error. The prefix "0" is
            # that of _connect_to_store, "group N" that of process_group. Adding 0 reads the number
            # of the last group of the failed rank.
            group = store.add(f"0/groups of {failed}", 0)
            if store.add(f"0/group {group}/reported", 1) == 1:
                problem = f"rank {failed} ended with exit code {code}"
                if code < 0:
                    problem = f"rank {failed} was killed by {signal.Signals(-code).name}"
        if set(codes) != {None}:
            failed_alone = code != 0 and not stop_requested()
            wait = 4 if failed_alone else timeout
            if now + wait < deadline:
                deadline, grace, late = now + wait, wait, not failed_alone
        if None not in codes or now >= deadline:
            break
        # Only one SIGTERM for each rank: a second could come when the rank no longer catches it.
        while to_stop and stop_requested():
            to_stop.pop().terminate()
        time.sleep(0.02)
    if stop_requested() and code == -signal.SIGTERM:  # This process has sent it.
        problem = ""
    for number, ended in enumerate(codes):
        # Name a rank that is killed 4 s after a failure only if it has not printed its error yet.
        if ended is None and (late or store.check([f"0/group {group}/reporter {number}"])):
            problem = f"rank {number} had not ended {grace:g} s after another rank"
            code = code or 1
            break
    # `problem` is empty, too, if no rank failed, or if one has reported its error first.
    if problem and code not in (130, -signal.SIGINT) and (code < 0 or set(codes) != {code}):
        raise ChildProcessError(problem)
    return 128 - code if code < 0 else code


def _die_with_parent(parent: int) -> None:
    """Exit if the parent has ended. When it ends later, Linux kills this process."""
    # 9 is SIGKILL, which has no name on Windows.
    torch.multiprocessing._prctl_pr_set_pdeathsig(9)  # type: ignore[attr-defined]
    if os.getppid() != parent:
        os._exit(1)
