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
the processes that `spawn` starts. A rank is one of the processes that train together.

If a rank fails, the others fail too, because they lose their connection to it. Only one error is
printed: the first rank that fails notes in the store (torch's TCPStore, which all ranks share) that
it reports the error, and the other ranks end without a message.
"""

import ctypes
import functools
import json
import math
import os
import pickle
import re
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

# The id of the parent, for _die_with_parent. It is read before the import of torch, because this
# takes a second, in which the parent can end. A forked child must not use the entry of its parent.
PARENT_PID = {os.getpid(): os.getppid()}

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from torch import nn  # noqa: E402

T = TypeVar("T")
# Path prefixes of the standard library, of site-packages, and of this file. All other files are
# those of the user's program.
LIBRARY_PATHS = os.path.dirname(os.__file__), str(Path(torch.__file__).parents[1]), __file__
# Windows has no SIGUSR1.
STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGUSR1", signal.SIGINT)}


class World(NamedTuple):
    """What a rank knows of itself and of the group. It stays the same during a run."""

    rank: int  # number of this rank, from 0 to size - 1
    local_rank: int  # number of this rank on its machine, from 0
    size: int  # number of ranks on all machines
    local_size: int  # number of ranks on this machine
    # where the model and the batches of this rank belong
    device: torch.device = torch.device("cpu")


# ------------------------------------------------------------------------------- launch environment


def read_launch_env(env: Mapping[str, str] = os.environ) -> World:
    """Read the variables that torchrun sets for each process.

    If neither RANK nor WORLD_SIZE is set, return the world of a single process. ValueError if only
    some of the variables are set, or if they contradict one another. ValueError also if srun
    started several tasks without these variables, because each task would train alone.
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
    *numbers, address = found.values()  # all but the address must be numbers
    if address and all(map(str.isdecimal, numbers)):
        rank, local_rank, size, local_size, _ = map(int, numbers)
        if rank < size and local_rank < local_size <= size:
            return World(rank, local_rank, size, local_size)
    raise ValueError(f"launch variables are missing or do not fit (start with torchrun): {found}")


# ------------------------------------------------------------------------------------ process group


@contextmanager
def process_group(device: str = "auto", timeout: float = 600.0) -> Iterator[World]:
    """Join the process group of all ranks for the duration of the `with` block.

    All ranks must call this function. If there is only one rank, also under torchrun, no process
    group is made: this rank can use the functions of this file, but not torch.distributed.

    device: "auto" (CUDA if available, else MPS, else CPU), "cpu", "cuda" or "mps". MPS is only for
        a single process. Rank i of a machine gets GPU i. The backend is NCCL for CUDA, else gloo.
    timeout: seconds that all ranks may take to connect, and that a rank may later wait for other
        ranks. A rank that waits longer ends with exit code 1, without an exception, at most 10 %
        after the timeout. One of these ranks prints in which line of the program each rank is.
        The time in which a rank runs torch.compile does not count, but no collective waits longer
        than twice the timeout. For other work that may take longer than the timeout while other
        ranks wait, use wait_together. Waiting in torch.distributed.new_group, recv or
        monitored_barrier is not noticed.

    ValueError if the launch variables are wrong or the device is not available. ConnectionError if
    not all ranks connect.

    If an exception leaves the block on some rank, all ranks end. What the caller sees then depends
    on the rank:
    - The rank that failed first raises its own exception, unchanged.
    - If a rank was lost without an exception, for example because it was killed, one of the other
      ranks raises ConnectionError, which names it. Ranks that are not lost but still wait can be
      named too. Under spawn, the parent process reports the lost rank instead. With NCCL, the
      remaining ranks end as described under `timeout`, or torch's watchdog ends them with SIGABRT.
    - If all ranks failed in torch.distributed, one of them raises torch's own exception.
    - All other ranks raise SystemExit, for which Python prints nothing. The exit code is the
      attribute `exit_code` of the rank's own exception (click's exceptions have one), otherwise 1.
    After an exception, the group is not destroyed, because that could wait for a dead rank.

    sys.exit(0) in the block destroys the group. KeyboardInterrupt and other codes of sys.exit do
    not. After any of these, this rank is lost for ranks that still use the group.

    These side effects stay after the block: the current CUDA device; on a CPU torch's number of
    threads, because the ranks of a machine share its CPUs; the environment variables
    GLOO_SOCKET_IFNAME and TORCH_FR_BUFFER_SIZE. Under torchrun on Linux, the kernel kills this
    process when torchrun ends.
    """
    env = read_launch_env()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # If torchrun is killed, nobody else ends its workers.
        _die_with_parent(PARENT_PID.get(os.getpid(), os.getppid()))
    if env.size == 1:
        yield env._replace(device=_select_device(device, env))
        return
    if env.local_size == env.size and sys.platform == "linux":
        # Let gloo listen where no other machine can connect.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Switch on torch's flight recorder, which _watch_ranks reads.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    address = "{MASTER_ADDR}:{MASTER_PORT}".format_map(os.environ)
    store = _connect_to_store(env, address, timeout)
    exit_request, main = None, threading.get_ident()
    joined, block_ended = threading.Event(), threading.Event()
    try:
        # Each group of a program needs its own keys in the store. Each rank counts its groups, so
        # all ranks get the same number.
        store = dist.PrefixStore(f"group {store.add(f'groups of {env.rank}', 1)}", store)
        chosen = _select_device(device, env)
        cuda = chosen.type == "cuda"
        # The watcher has its own connection, because the main thread may block the first one.
        connection = store.clone()  # type: ignore[attr-defined]
        watcher = _in_thread(
            lambda: _watch_ranks(env, connection, timeout, cuda, main, joined, block_ended)
        )
        try:
            dist.init_process_group(
                "nccl" if cuda else "gloo",
                store=store,
                rank=env.rank,
                world_size=env.size,
                # _watch_ranks ends the process earlier, unless a rank compiles.
                timeout=timedelta(seconds=2 * timeout),
                device_id=chosen if cuda else None,  # With this argument, NCCL connects now.
            )
            joined.set()
            yield env._replace(device=chosen)
        except SystemExit as error:
            if error.code:
                raise
            exit_request = error
        finally:
            block_ended.set()
        # The watcher must no longer read the group when the group is destroyed. After 6 seconds, it
        # waits only for a store that does not answer.
        futures.wait([watcher], 6)
        if dist.is_initialized():  # The program can have destroyed it.
            dist.destroy_process_group()
    except Exception as error:
        _choose_reporter(error, env, store)
        raise
    finally:
        # A thread of gloo needs the GIL to release the objects of the last collective. If Python
        # shuts down meanwhile, the process aborts: "terminate called without an active exception"
        # (torch 2.13; github.com/pytorch/pytorch/pull/179291). So release the GIL for a moment.
        time.sleep(0.1)
    if exit_request:
        raise exit_request


def _select_device(name: str, env: World) -> torch.device:
    """Return the device of this rank. Make a GPU the current device; set the threads for a CPU."""
    mps = torch.backends.mps.is_available() and env.size == 1
    kinds = ["cuda"] * torch.cuda.is_available() + ["mps"] * mps + ["cpu"]  # The best is first.
    if name == "auto":
        name = kinds[0]
    if name not in kinds:
        raise ValueError(f"device {name!r} is not available; available: {', '.join(kinds)}")
    if name == "cpu":
        torch.set_num_threads(max(1, available_cpus() // env.local_size))
    elif name == "cuda":
        if env.local_rank >= torch.cuda.device_count():
            raise ValueError(f"local rank {env.local_rank} has no GPU: start one rank per GPU")
        name = f"cuda:{env.local_rank}"
        torch.cuda.set_device(name)  # NCCL uses the current device when the group starts.
    return torch.device(name)


def available_cpus(cgroup: str = "/sys/fs/cgroup") -> int:
    """Return how many CPUs this process may use, at least 1.

    This is the number of CPUs in its CPU affinity (taskset and SLURM set it), or the CPU quota of
    the container if that is lower, rounded down. cgroup: folder with the files of cgroup version 2
    or 1.
    """
    # macOS and Windows have no CPU affinity.
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for names in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        # Without a quota, there is no file, or version 2 writes "max", or version 1 writes -1.
        with suppress(OSError, ValueError):
            text = " ".join(Path(cgroup, name).read_text() for name in names)
            quota, period = map(int, text.split())
            if quota > 0:
                cpus = min(cpus, max(1, quota // period))
    return cpus


@functools.cache
def _connect_to_store(env: World, address: str, timeout: float) -> dist.Store:
    """Connect to the store of all ranks. All ranks must call this function.

    address: MASTER_ADDR:MASTER_PORT. torchrun or spawn serves the store there, or else rank 0.
    functools.cache keeps the connection until the process ends. Otherwise rank 0 could close the
    store at the end of a process group, while another rank has already connected for the next one.
    ConnectionError if not all ranks connect within `timeout` seconds.
    """
    try:
        # rendezvous reads the address from the environment.
        store, *_ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
        # torchrun keeps its store, with all keys, when it restarts the ranks. So each start needs
        # its own prefix. Without restarts it is "0", which _wait_for_ranks uses too.
        restarts = "TORCHELASTIC_RUN_ID" in os.environ
        return dist.PrefixStore(_agree_on_run_id(store, env, timeout) if restarts else "0", store)
    except dist.DistError as error:
        raise ConnectionError(
            f"rank {env.rank}: not all {env.size} ranks connected to {address} ({error})"
        ) from error


def _agree_on_run_id(store: dist.Store, env: World, timeout: float) -> str:
    """Return an id that is the same on all ranks and new for each start of the ranks.

    All ranks must call this function. Rank 0 chooses the id. Each other rank writes a random word
    under "request RANK" and waits for the reply to this word. Rank 0 can find an old word, from
    before a restart. So it replies again until each rank confirms the id.

    torchrun's TORCHELASTIC_RESTART_COUNT is not such an id, because each machine has its own count
    (PyTorch issues 108158 and 135712).
    """
    end = time.monotonic() + timeout
    if env.rank:
        request = uuid.uuid4().hex
        store.set(f"request {env.rank}", request)
        run_id = store.get(f"reply to {request}").decode()
        store.set(f"{run_id} confirmed {env.rank}", "")
        return run_id
    run_id = uuid.uuid4().hex
    for rank in range(1, env.size):
        while not store.check([f"{run_id} confirmed {rank}"]):
            if time.monotonic() > end:
                raise ConnectionError(f"no answer from rank {rank} (timed out after {timeout:g} s)")
            request = store.get(f"request {rank}").decode()
            store.set(f"reply to {request}", run_id)
            time.sleep(0.002)
    return run_id


# -------------------------------------------------------------------------------- failure of a rank


def _choose_reporter(error: Exception, env: World, store: dist.Store) -> None:
    """Do nothing if this rank must raise `error` itself; otherwise raise another exception.

    store: has only the keys of this process group.
    """
    # torch.distributed raises DistError. gloo raises a bare RuntimeError with one of these texts,
    # of which the first is from the path of its source files.
    texts = "/gloo/|Application timeout caused pair closure"
    from_gloo = type(error) is RuntimeError and re.search(texts, str(error))
    consequence = from_gloo or isinstance(error, dist.DistError)

    def claim_report() -> list[str]:
        """Raise SystemExit if another rank reports, else return the ranks that have not failed."""
        store.set(f"failed {env.rank}", "")
        if consequence:  # Let the rank that failed first report.
            time.sleep(1)
        if store.add("reported", 1) > 1:
            raise SystemExit(getattr(error, "exit_code", 1))
        return [f"{rank}" for rank in range(env.size) if not store.check([f"failed {rank}"])]

    try:
        # If the network is down, a request to the store never returns.
        not_failed = _in_thread(claim_report).result(6)
    except (dist.DistError, futures.TimeoutError):
        not_failed = ["0"]  # The store does not answer, so the machine of rank 0 is lost.
    if consequence and not_failed:  # If all ranks have failed, none was lost.
        how = "timed out" if re.search("(?i)timed? ?out", str(error)) else "connection lost"
        raise ConnectionError(f"no answer from rank {' or '.join(not_failed)} ({how})") from error


def _watch_ranks(
    env: World,
    store: dist.Store,
    timeout: float,
    cuda: bool,
    main: int,
    joined: threading.Event,
    block_ended: threading.Event,
) -> None:
    """End this process with exit code 1 when it has waited for other ranks for `timeout` seconds.

    process_group starts this function in a thread of each rank. cuda: whether the backend is NCCL.
    main: identifier of the thread that trains. No thread can raise an exception in one that waits
    in a collective, so this function ends the process.

    20 times per timeout, each rank adds 1 to a counter of all ranks in the store, and writes its
    state into the store: the value of the counter, which shows how old the state is, and the line
    where its program is. A rank that runs torch.compile adds 1 to a second counter. In an interval,
    a rank is stuck if all of these are true:
    - It waits: the group is still being made, or torch's flight recorder says that a collective has
      not ended. A rank waits too if another one has reported an error.
    - No collective has started or ended since the last interval.
    - No rank compiles.
    A rank that is stuck 20 times in a row ends. The first one reads all states and prints where
    each rank is.
    """
    recorder = "_dump_nccl_trace_json" if cuda else "_dump_fr_trace_json"
    dump = getattr(torch._C._distributed_c10d, recorder)
    keys = [f"state of {rank}" for rank in range(env.size)]
    before = None  # `numbers`, one interval ago
    counts = list[int]()  # the values of the counter in the latest intervals, if all were stuck
    while not block_ended.wait(timeout / 20):
        # traceback.extract_stack would read source files. Their storage can hang.
        stacks = {
            id: [(f.f_code.co_filename, n, f.f_code.co_name) for f, n in traceback.walk_stack(top)]
            for id, top in sys._current_frames().items()
        }
        program = (
            f"{Path(f).name}:{n}" for f, n, _ in stacks[main] if not f.startswith(LIBRARY_PATHS)
        )
        # Search for functions of the compiler: ('FILE', LINE, 'FUNCTION'). "<module>" does not
        # count, because it only means that the file is being imported.
        compiler = "(_dynamo/convert_frame|_inductor/compile_fx).py', [0-9]+, '[^<]"
        compiles = bool(re.search(compiler, f"{stacks}"))
        groups = json.loads(dump(False, True))["pg_status"].values()
        numbers = [(g["last_enqueued_collective"], g["last_completed_collective"]) for g in groups]
        waiting = any(a != b for a, b in numbers)
        if waiting and not cuda:
            # The threads of gloo can write "last completed" in the wrong order, so that it is too
            # low. The list of collectives is right.
            entries = json.loads(dump(True, False)).get("entries", [])
            waiting = not all(entry["retired"] for entry in entries)
        waiting = waiting or not joined.is_set()
        count = 0
        with suppress(dist.DistError):  # The store can end with rank 0.
            count = store.add("counter", 1)
            store.set(keys[env.rank], json.dumps([count, next(program, "a library")]))
            numbers.append((store.add("compiled", compiles), 0))  # changes if a rank compiles
            waiting = waiting or store.add("reported", 0) > 0
        counts = [*counts, count] if waiting and numbers == before else []
        before = numbers
        if len(counts) < 20:
            continue
        ranks = ["no answer from rank 0"]
        with suppress(dist.DistError):
            if store.add("reported", 1) > 1:
                os._exit(1)
            # compare_set returns the value of the key. If there is none, it sets the last argument.
            states = [json.loads(store.compare_set(key, "", '[0, ""]')) for key in keys]
            ranks = [  # A state that is older than three intervals is no answer.
                f"rank {rank} at {line}" if written > counts[-4] else f"no answer from rank {rank}"
                for rank, (written, line) in enumerate(states)
            ]
        print(f"Error: no progress for {timeout:g} s: {', '.join(ranks)}", file=sys.stderr)
        os._exit(1)


def _in_thread(call: Callable[[], T]) -> "futures.Future[T]":
    """Start call() in a new thread that does not delay the end of the process. Return a future."""
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

    All ranks must call this function, with the same architecture; all get the weights of rank 0. A
    single process gets `model` itself, not wrapped. A wrapped model has the original model as its
    attribute `module`. Gradients that the model has are lost. To compute BatchNorm statistics over
    all ranks, first call torch.nn.SyncBatchNorm.convert_sync_batchnorm(model).

    ddp: further arguments of DistributedDataParallel, for example find_unused_parameters=True for a
        model that does not use all parameters in each step. A single process ignores them.
    """
    model = model.to(world.device)
    if world.size == 1:
        return model
    # Gradients are views of what DDP sends: no copies.
    settings = {"gradient_as_bucket_view": True, **ddp}
    replica = nn.parallel.DistributedDataParallel(model, **settings)
    if not (replica.find_unused_parameters or replica.static_graph):
        # After its first backward pass, DDP divides the gradients into new buckets, and with three
        # or more ranks it then adds them in another order. So the first step of a resumed run would
        # round differently. Make that pass here, with gradients of zero. (With
        # find_unused_parameters, DDP keeps its first buckets.)
        # prepare_for_backward replaces the forward pass; []: expect all gradients.
        replica.reducer.prepare_for_backward([])
        with torch.enable_grad():
            zeros = [0.0 * p.sum().real for p in model.parameters() if p.requires_grad]
            torch.stack(zeros).sum().backward()
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

    All ranks must call this function, each with its own `call`. If some calls raise ValueError or
    OSError, all ranks raise the error of the lowest of these ranks. Another exception is raised
    only on its own rank.

    Use this function for work that may take longer than the timeout of process_group, such as
    reading from slow storage: here the timeout does not apply. If a call hangs, all ranks wait for
    it.

    With several ranks, the call runs in a second thread. It must not use torch.distributed. What
    torch sets for a thread must be set in the call: torch.no_grad(), autocast, and the current GPU.
    """
    if world.size == 1:
        return call()
    future = _in_thread(call)
    # Each rank asks every 0.1 seconds whether another one is not ready.
    while any_rank(not future.done(), world):
        futures.wait([future], timeout=0.1)
    own = future.exception()
    errors: list[Any] = [None] * world.size
    dist.all_gather_object(errors, own if isinstance(own, (ValueError, OSError)) else None)
    for error in filter(None, errors):
        raise error
    return future.result()


def from_rank_zero(make: Callable[[], T], world: World) -> T:
    """Run make() on rank 0 only, and return its result on all ranks.

    All ranks must call this function. The result must be picklable. The rules of wait_together for
    calls and their errors apply.
    """
    results: list[Any] = [wait_together(lambda: make() if world.rank == 0 else None, world)]
    if world.size > 1:
        dist.broadcast_object_list(results)
    return results[0]  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------- stop signals


@contextmanager
def stop_signals(notice: str = "") -> Iterator[Callable[[], bool]]:
    """Catch SIGTERM, SIGINT (Ctrl-C) and SIGUSR1; yield a function that tells if one arrived.

    The signals no longer interrupt the program. Call the yielded function once per step, together
    with any_rank, because the signal may reach only some ranks. Once true, it stays true. A second
    SIGINT ends the process with exit code 130, without cleanup. A signal to all processes can also
    end the workers of a DataLoader: see extras/tutorial/stream.py.

    notice: a line for the user, because the end of a step can take a while. Rank 0 prints it on
        stderr when it receives the first SIGINT, if stderr is a terminal.

    Only the main thread can use this function. The signals are unblocked (signal.pthread_sigmask),
    so one that waits is delivered at the beginning of the block. At its end, the previous handlers
    are restored, but the signals stay unblocked. Of two nested blocks, only the inner one notices a
    signal.
    """
    received, owner = list[int](), os.getpid()

    def handle(number: int, _: object) -> None:
        # A forked child has this handler too, but Process.terminate() must end it.
        if number == signal.SIGTERM and os.getpid() != owner:
            os._exit(128 + number)
        received.append(number)
        if received.count(signal.SIGINT) > 1:
            os._exit(130)
        rank0 = os.environ.get("RANK", "0") == "0"
        if notice and rank0 and number == signal.SIGINT and os.isatty(2):
            with suppress(OSError):
                # print() would fail if the signal has interrupted another print().
                os.write(2, f"\n{notice}\n".encode())

    previous = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in previous.items():
            # The handler is None if it was not installed from Python.
            signal.signal(number, handler or signal.SIG_DFL)


# ----------------------------------------------------------- starting several ranks on this machine


def spawn(fn: Callable[..., None], size: int, *args: Any, timeout: float = math.inf) -> int:
    """Run fn(*args) in `size` new processes on this machine, and return the exit code.

    Each process is a rank and must use process_group. `fn` must be a function at the top level of a
    module, and `args` must be picklable. The script needs `if __name__ == "__main__":`, because
    each rank imports it again. Only the main thread can call spawn. In the ranks, the stop signals
    are blocked until they use stop_signals. ValueError on Windows, and for functions and classes of
    a notebook.

    A rank prints the traceback of its exception and ends with 1. When a rank has ended with another
    code than 0, the others get 4 seconds to end and are then killed. When this process gets a stop
    signal, it sends SIGTERM to all ranks and continues to wait; a second SIGINT ends it with exit
    code 130. If this process dies, its ranks are killed (on Linux).

    timeout: seconds that the other ranks may continue after the first rank has ended with 0. Then
        they are killed.

    If all ranks end with the same code, it is returned. Otherwise, if a rank has reported an error
    through process_group, the code of the rank that failed first is returned (1 for a signal), and
    130 if SIGINT ended that rank. Otherwise ChildProcessError is raised. Its message, one line for
    the user, names the rank that was killed, did not end within `timeout`, or failed.
    """
    in_notebook = not hasattr(sys.modules["__main__"], "__file__")
    if in_notebook and b"__main__" in pickle.dumps((fn, args)):
        raise ValueError(
            "a new process cannot import functions and classes of a notebook: write them to a .py "
            "file and import them from there, as extras/tutorial/notebook.ipynb does"
        )
    if sys.platform == "win32":
        raise ValueError("several processes on Windows are not supported: use WSL2")
    # The system chooses a free port. Only this machine can connect to 127.0.0.1.
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, is_master=True, master_listen_fd=listener.detach())
    with stop_signals() as stop_requested:
        # The ranks inherit the blocked signals. So a stop signal waits until the rank, which
        # imports torch first, calls stop_signals. The resource tracker of multiprocessing unblocks
        # signals when it starts, so start it before.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            context = mp.spawn(_run_rank, (os.getpid(), port, size, fn, *args), size, join=False)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        return _wait_for_ranks(context.processes, stop_requested, timeout, store)


def _wait_for_ranks(
    ranks: list[Any], stop_requested: Callable[[], bool], timeout: float, store: dist.Store
) -> int:
    """Wait until all ranks have ended, as the docstring of `spawn` says.

    torch's ProcessContext.join does not notice a rank that hangs after another has ended with 0,
    and returns too late to report a rank that was killed.
    """
    to_stop, deadline, code, problem = list(ranks), math.inf, 0, ""
    while True:
        now = time.monotonic()
        codes = [rank.exitcode for rank in ranks]
        if not code and any(codes):
            code = next(filter(None, codes))
            failed = codes.index(code)
            # If no rank has reported the error yet, this process does, and then no rank will.
            # "0" is the prefix of _connect_to_store.
            group = store.add(f"0/groups of {failed}", 0)
            if store.add(f"0/group {group}/reported", 1) == 1:
                problem = f"rank {failed} ended with exit code {code}"
                if code < 0:
                    problem = f"rank {failed} was killed by {signal.Signals(-code).name}"
            deadline = now + 4
        if None not in codes:
            break
        if 0 in codes:
            deadline = min(deadline, now + timeout)
        if now >= deadline:
            if not code:
                code = 1
                problem = f"rank {codes.index(None)} did not end, {timeout:g} s after another had"
            for rank in ranks:
                rank.kill()
        # A second SIGTERM could come when the rank no longer catches it.
        while to_stop and stop_requested():
            to_stop.pop().terminate()
        time.sleep(0.02)
    # If all ranks end with the same code, the program chose it.
    if problem and code != 130 and (code < 0 or {*codes} != {code}):
        raise ChildProcessError(problem)
    return 1 if code < 0 else code


def _run_rank(
    rank: int, parent: int, port: int, size: int, fn: Callable[..., None], *args: Any
) -> None:
    """Run fn(*args) with the variables that torchrun would set, and print its exception."""
    _die_with_parent(parent)
    os.environ.update(
        RANK=f"{rank}",
        LOCAL_RANK=f"{rank}",
        WORLD_SIZE=f"{size}",
        LOCAL_WORLD_SIZE=f"{size}",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=f"{port}",
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    os.environ.pop("TORCHELASTIC_RUN_ID", None)  # of a torchrun that started the parent
    try:
        fn(*args)
    except KeyboardInterrupt:  # torch would exit with 0.
        sys.exit(130)
    except Exception:
        print(f"rank {rank}: {traceback.format_exc()}", file=sys.stderr)
        sys.exit(1)


def _die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent process ends (Linux only).

    parent: id of the parent process. If it has ended already, this process exits at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG.
    if os.getppid() != parent:
        os._exit(1)
