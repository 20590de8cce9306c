"""Where am I, who else is there: start, agree, stop. Any model; one process runs the same code as many.

    with stop_signals() as asked, process_group() as world:
        model = replicate(model.to(world.device), world)
        ...
        if any_rank(asked(), world): ...         # save and leave

Started by torchrun, by SLURM's srun, by `spawn` below, or as plain `python`: then there is no group, and
none is needed. A rank that fails says so in the store that all ranks share and leaves at once. Nobody waits
for it, and only the first failure is reported: what it causes on the other ranks is not.
"""

import ctypes
import math
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import chain
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from typing import Any, NamedTuple, TypeVar

PARENT = os.getppid()  # first, as it can end during the second that torch takes

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook  # noqa: E402

T = TypeVar("T")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Place(NamedTuple):
    """This process among all, and where they meet, as the launcher tells."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    local_size: int = 1
    address: str = ""
    port: int = 0
    served: bool = False  # the launcher serves the store; otherwise rank 0 does


class World(NamedTuple):
    """The process group, as this rank sees it."""

    rank: int
    local_rank: int
    size: int
    local_size: int
    device: torch.device


# --------------------------------------------------------------------------------------------------- place


def place(env: Mapping[str, str] = os.environ) -> Place:
    """From torchrun's variables, or srun's, or nobody's. ValueError if they are not whole."""
    if "RANK" in env or "WORLD_SIZE" in env:
        rank, local_rank, size, local_size, port = _whole_numbers(
            env, "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"
        )
        served = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        found = Place(rank, local_rank, size, local_size, _text(env, "MASTER_ADDR"), port, served)
    elif "SLURM_STEP_NUM_TASKS" in env:  # only srun sets this: the batch script itself is not a rank
        rank, local_rank, size, node = _whole_numbers(
            env, "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_NODEID"
        )
        found = Place(rank, local_rank, size, _slurm_tasks(env, node), *_slurm_meeting(env))
    else:
        return Place()
    if not (found.rank < found.size and found.local_rank < found.local_size <= found.size):
        raise ValueError(f"the launcher's variables do not fit together: {found}")
    return found


def _text(env: Mapping[str, str], name: str) -> str:
    if not env.get(name):
        raise ValueError(f"{name} is not set, though others of the launcher's variables are; start with torchrun")
    return env[name]


def _whole_numbers(env: Mapping[str, str], *names: str) -> list[int]:
    for name in names:
        if not _text(env, name).isdecimal():
            raise ValueError(f"{name}={env[name]!r} is not a whole number")
    return [int(env[name]) for name in names]


def _slurm_tasks(env: Mapping[str, str], node: int) -> int:
    """How many tasks node number `node` of the step has: SLURM writes "2(x3),1" for 2, 2, 2, 1."""
    pairs = re.findall(r"(\d+)(?:\(x(\d+)\))?", _text(env, "SLURM_STEP_TASKS_PER_NODE"))
    tasks = [int(count) for count, times in pairs for _ in range(int(times or 1))]
    if node >= len(tasks):
        raise ValueError(f"SLURM_NODEID={node} is not in SLURM_STEP_TASKS_PER_NODE={env['SLURM_STEP_TASKS_PER_NODE']}")
    return tasks[node]


def _slurm_meeting(env: Mapping[str, str]) -> tuple[str, int]:
    """The step's first host, and a port that follows from the job's and the step's number; MASTER_ADDR and
    MASTER_PORT say otherwise. (srun reserves no port for a program and has no way to pass one on.)"""
    host = env.get("MASTER_ADDR")
    if not host:
        host = re.sub(r"([^,\[]*)(\[(\d+))?.*", r"\1\3", _text(env, "SLURM_STEP_NODELIST"))  # "n[07-9],x" -> "n07"
    if env.get("MASTER_PORT"):
        return host, _whole_numbers(env, "MASTER_PORT")[0]
    job, step = _whole_numbers(env, "SLURM_JOB_ID", "SLURM_STEP_ID")
    return host, 20000 + (job * 97 + step) % 10000


# --------------------------------------------------------------------------------------------------- group


@contextmanager
def process_group(device: str = "auto", timeout: float = 600.0) -> Iterator[World]:
    """Join the group that the launcher set up, and leave it; as plain python, be the only one.

    device: "auto" (CUDA, else MPS, else CPU), "cpu", "cuda" or "mps". ValueError if it cannot be had.
    timeout: seconds that any collective may take. Then gloo raises; NCCL ends the process from a thread of its own.

    If the body raises, no teardown is attempted, as it might wait for the dead. The rank that failed first
    goes on with its own exception; the others end with SystemExit(1) and nothing to say.
    """
    here = place()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _die_with(PARENT)  # an agent that is killed leaves its workers behind, if they do not see to it themselves
    if here.size == 1:
        yield World(0, 0, 1, 1, _device(device, here))
        return
    if here.local_size == here.size and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nothing that others could reach
    store = _store(here, timeout)
    failures = dist.PrefixStore("failure", store)
    failures.delete_key(f"left {here.rank}")
    entered = store.add(f"entered by {here.rank}", 1)  # a process can be in one group after the other
    try:
        chosen = _device(device, here)
        dist.init_process_group(
            "nccl" if chosen.type == "cuda" else "gloo",
            store=dist.PrefixStore(f"group {entered}", store),
            rank=here.rank,
            world_size=here.size,
            timeout=timedelta(seconds=timeout),
            device_id=chosen if chosen.type == "cuda" else None,  # bound: the communicator starts at once
        )
        yield World(here.rank, here.local_rank, here.size, here.local_size, chosen)
        dist.destroy_process_group()
    except Exception as error:
        _fail(error, here, failures, timeout)
        raise
    with suppress(dist.DistError):  # whoever serves the store may be gone already
        if here.served:
            failures.set(f"left {here.rank}", "")
    # DDP keeps the group's threads. One that lets go of a Python object while Python shuts down aborts the process
    # ("terminate called without an active exception", torch 2.13), so leave them the GIL for a moment.
    time.sleep(0.1)


def _device(name: str, here: Place) -> torch.device:
    """The device of this rank, made the current one; a CPU's cores are shared out among the machine's ranks."""
    have = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available() and here.size == 1, "cpu": True}
    if name == "auto":
        name = next(kind for kind in have if have[kind])
    if not have.get(name):
        raise ValueError(f"device {name!r} cannot be had here; there is {', '.join(k for k in have if have[k])}")
    if name == "cpu":
        torch.set_num_threads(max(1, cores() // here.local_size))
        _keep_memory()
    if name != "cuda":
        return torch.device(name)
    # srun can show each of its tasks one GPU alone
    index = 0 if torch.cuda.device_count() == 1 and "SLURM_STEP_GPUS" in os.environ else here.local_rank
    if index >= torch.cuda.device_count():
        raise ValueError(f"{here.local_size} ranks on this machine, but {torch.cuda.device_count()} GPUs: start fewer")
    torch.cuda.set_device(index)  # before the group starts: NCCL takes the current device
    return torch.device("cuda", index)


def _keep_memory() -> None:
    """Have glibc keep what is freed: to ask the system for each activation's pages anew takes up to a fifth of a step."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-3, 1 << 27)  # M_MMAP_THRESHOLD: smaller ones come from the heap,
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: which does not shrink


def cores() -> int:
    """How many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _store(here: Place, timeout: float) -> dist.Store:
    """What all ranks share, without what an earlier start of theirs has left in it."""
    serve = here.rank == 0 and not here.served
    outlives = here.served and "TORCHELASTIC_RUN_ID" in os.environ  # torchrun's agent, which restarts its workers
    limit = timedelta(seconds=timeout)
    try:
        store = dist.TCPStore(here.address, here.port, here.size, serve, limit, multi_tenant=True)
        return dist.PrefixStore(_meet(store, here, timeout) if outlives else "0", store)
    except dist.DistError as error:
        where = f"{here.address}:{here.port}"
        raise ConnectionError(f"rank {here.rank}: not all {here.size} ranks met at {where} ({error})") from error


def _meet(store: dist.Store, here: Place, timeout: float) -> str:
    """A name for this start of the ranks, new each time, from rank 0.

    TORCHELASTIC_RESTART_COUNT is none: every agent counts its own (pytorch issues 108158 and 135712). So each rank
    asks under a name that nobody had before, and rank 0 answers whoever asks until all have their answer.
    """
    name, end = uuid.uuid4().hex, time.monotonic() + timeout
    if here.rank:
        store.set(f"asks {here.rank}", name)
        name = store.get(f"answer {name}").decode()
        store.set(f"{name}/met {here.rank}", "")
        return name
    while missing := [rank for rank in range(1, here.size) if not store.check([f"{name}/met {rank}"])]:
        if time.monotonic() > end:
            raise ConnectionError(f"no answer from rank {', '.join(map(str, missing))} (timed out after {timeout:g} s)")
        for rank in missing:
            if store.check([f"asks {rank}"]):  # perhaps long ago
                store.set(f"answer {store.get(f'asks {rank}').decode()}", name)
        time.sleep(0.02)
    return name


def _fail(error: Exception, here: Place, failures: dist.Store, timeout: float) -> None:
    """Return on the rank that failed first; SystemExit on the others; ConnectionError names who is missing."""
    lost = _lost(error, timeout)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename != __file__]
    at = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else "the start"
    first, lines, silent = _within(6, partial(_compare, at, bool(lost), here, failures)) or (True, {}, [0])
    if not first:
        raise SystemExit(getattr(error, "exit_code", 1))  # click's errors have one
    if lost and silent:
        raise ConnectionError(f"no answer from rank {', '.join(map(str, silent))} ({lost})") from error
    if lost and len({*lines.values()}) > 1:
        waiting = ", ".join(f"rank {rank} at {line}" for rank, line in lines.items())
        raise ConnectionError(f"the ranks wait for one another, {waiting} ({lost})") from error


def _compare(at: str, lost: bool, here: Place, failures: dist.Store) -> tuple[bool, dict[int, str], list[int]]:
    """-> (whether nobody has reported yet, where each rank that failed was, who says nothing)."""
    try:
        failures.set_timeout(timedelta(seconds=5))
        failures.set(f"{here.rank}", at)
        if lost:
            time.sleep(1)  # it is a consequence: whoever knows the cause, a rank or the launcher, speaks first
        first = failures.add("reported", 1) == 1
        lines = {r: failures.get(f"{r}").decode() for r in range(here.size) if failures.check([f"{r}"])}
        silent = [rank for rank in range(here.size) if rank not in lines]
        silent = [rank for rank in silent if failures.check([f"left {rank}"])] or silent  # others may still wait for it
        return first, lines, silent
    except dist.DistError:
        return True, {}, [0]  # no store: rank 0, which served it, is gone


def _within(seconds: float, call: Callable[[], T]) -> T | None:
    """What `call` returns, or None if it takes longer: over a link that is cut the store waits without a limit."""
    outcome: list[T] = []
    thread = threading.Thread(target=lambda: outcome.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    return outcome[0] if outcome else None


def _lost(error: Exception, timeout: float) -> str:
    """In what way this error says that another rank was lost; "" if it is about something else."""
    text = str(error)
    gloos = "gloo|Connection (closed|reset)|Application timeout caused pair closure"  # bare RuntimeErrors, all of them
    if not isinstance(error, dist.DistError) and not (isinstance(error, RuntimeError) and re.search(gloos, text)):
        return ""
    if re.search("timed? ?out", text, re.IGNORECASE):
        return f"timed out after {timeout:g} s"
    return "connection closed" if re.search("closed|reset|broken", text, re.IGNORECASE) else text.splitlines()[0]


# --------------------------------------------------------------------------------------------------- agree


def replicate(
    model: nn.Module,
    world: World,
    strategy: str = "ddp",
    *,
    parts: Sequence[nn.Module] = (),
    sync_batchnorm: bool = False,
    compress: bool = False,
    **more: Any,
) -> nn.Module:
    """`model` on this rank's device, to be trained by all ranks, with rank 0's weights; itself for one process.

    strategy: what each of W ranks holds between steps. "ddp": everything (DistributedDataParallel). "zero" and "fsdp":
        1/W of the parameters, the gradients and the optimizer's state (FSDP2). Within a step "zero" gathers the
        parameters once, which together with the gradients is no more traffic than "ddp" has; "fsdp" does so part by
        part in each pass anew, and never holds more than one, but for the copies that autocast makes: autograd keeps
        them. Optimizers are made after this: parameters are replaced.
    parts: the submodules to gather one by one, without a parameter in common; the rest of the model is one more.
    compress: under "ddp", gradients travel, and are added up, as bfloat16: half the bytes for a slow network, of 24 bits
        of a gradient 8.

    `more` goes to DistributedDataParallel or fully_shard: static_graph=True holds for a model that runs the same way at
    every step. Buffers, but for sync_batchnorm's, are each rank's own except under "ddp".
    """
    if strategy not in ("ddp", "zero", "fsdp"):
        raise ValueError(f"strategy {strategy!r} is not one of ddp, zero, fsdp")
    if compress and strategy != "ddp":
        raise ValueError(f"compress is for strategy 'ddp' alone, not {strategy!r}")
    if sync_batchnorm:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if world.size == 1:
        return model.to(world.device)
    if strategy != "ddp":
        return _shard_(model, world, parts, keep=strategy == "zero", **more)
    replica = nn.parallel.DistributedDataParallel(
        model.to(world.device),
        device_ids=[world.device] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,  # they live in the buckets that are sent, so nothing is copied
        **more,
    )
    if compress:
        replica.register_comm_hook(None, _compressed)
    return replica


def _compressed(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's own hook; under its own name DDP refuses it for gloo, which can add up bfloat16 as NCCL does."""
    return bf16_compress_hook(group, bucket)


def _shard_(model: nn.Module, world: World, parts: Sequence[nn.Module], keep: bool, **fsdp: Any) -> nn.Module:
    """FSDP2, moved to its device part by part, so that no more than one part has to be whole there.

    With `keep` in ZeroRedundancyOptimizer's place, which leaves weights and gradients whole on every rank, sends half
    as much again as DDP does, and has its state where torch.distributed.checkpoint does not see it.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard  # half a second to import, so not at the top
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh(world.device.type, (world.size,))
    for part in [*parts, model]:
        part.to(world.device)
        for tensor in chain(part.parameters(), part.buffers()):
            if not isinstance(tensor, DTensor):
                dist.broadcast(tensor.detach(), 0)
        fully_shard(part, mesh=mesh, reshard_after_forward=not keep, **fsdp)
    if keep:
        setattr(model, "no_sync", partial(_no_sync, model))  # as DistributedDataParallel has it
    return model


@contextmanager
def _no_sync(model: Any) -> Iterator[None]:
    """Backward passes add up gradients on this rank alone, and leave the parameters gathered for the next pass."""
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)


def from_rank_zero(make: Callable[[], T], world: World) -> T:
    """On every rank what `make()` returns on rank 0; its ValueError or OSError is raised on every rank too."""
    if world.size == 1:
        return make()
    outcome: list[Any] = [None, None]
    if world.rank == 0:
        try:
            outcome[0] = make()
        except (ValueError, OSError) as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome)
    made, wrong = outcome
    if wrong is not None:
        raise wrong
    return made  # type: ignore[no-any-return]


def any_rank(flag: bool, world: World) -> bool:
    """Whether `flag` is true on any rank. All have to call it."""
    if world.size == 1:
        return flag
    flags = torch.tensor(float(flag), device=world.device)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags)


# ---------------------------------------------------------------------------------------------------- stop


@contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Yields a function: has SIGTERM, SIGINT or SIGUSR1 come? A second SIGINT ends the process at once.

    A thread listens, since Python's own handlers wait for the main thread, which may be in a long call.
    Signals that the caller had blocked until now are not lost. Only for the main thread.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    seen: list[int] = []

    def listen() -> None:
        while got := reader.recv(1):
            seen.extend(number for number in got if number in STOP_SIGNALS)
            if seen.count(signal.SIGINT) > 1:
                os._exit(130)

    threading.Thread(target=listen, daemon=True).start()
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    handlers = [signal.signal(number, lambda *_: None) for number in STOP_SIGNALS]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        yield lambda: bool(seen)
    finally:
        for number, handler in zip(STOP_SIGNALS, handlers):
            signal.signal(number, handler or signal.SIG_DFL)  # None: what is not Python's own
        signal.set_wakeup_fd(wakeup)
        writer.close()


# --------------------------------------------------------------------------------------------------- spawn


def spawn(fn: Callable[..., None], size: int, *args: Any, timeout: float = math.inf) -> int:
    """Run fn(*args) as `size` ranks on this machine, as torchrun would; -> the exit code, 0 if all had 0.

    The parent serves the store, on a port that the system gives and only this machine can reach. It passes
    a stop signal on; when a rank fails the others get 2 seconds and are then killed, and once one has ended well
    those still in the group get `timeout` seconds. Children die with their parent (on Linux, even if it is killed).
    ChildProcessError if a rank was killed by a signal, did not end, or ended with an exit code but no exception.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    with stop_signals() as asked:
        resource_tracker.ensure_running()  # now, as it unblocks signals on its way
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # inherited: a stop is kept until a child can hear it
        try:
            children = mp.spawn(_child, (os.getpid(), port, size, fn, args), size, join=False).processes
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        code, unsaid = _watch(children, asked, timeout, dist.PrefixStore("0/failure", store))
    if unsaid:
        raise ChildProcessError(unsaid)
    return code


def _watch(children: list[Any], asked: Callable[[], bool], timeout: float, failures: dist.Store) -> tuple[int, str]:
    """Until all have ended; -> (exit code of the first that failed, what of it nobody else has said)."""
    code, unsaid, told, deadline = 0, "", False, math.inf
    while True:
        codes = [child.exitcode for child in children]  # one look a round: all is decided on it
        running = [child for child, ended in zip(children, codes) if ended is None]
        if not code and any(codes):
            rank, code = next((rank, ended) for rank, ended in enumerate(codes) if ended)
            deadline = time.monotonic() + (2 if code > 0 else 0)
            in_order = code > 0 and failures.check([f"left {rank}"])  # and has said so itself
            if not in_order and failures.add("reported", 1) == 1:
                how = f"ended with exit code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
                unsaid = f"rank {rank} {how}"
        elif 0 in codes and deadline == math.inf:
            deadline = time.monotonic() + timeout
        if not running:
            agreed = code > 0 and codes.count(code) == len(codes)
            return (1 if code < 0 else code), ("" if agreed else unsaid)
        if asked() and not told:
            told = True
            for child in running:
                child.terminate()
        if not code and time.monotonic() >= deadline:  # one that has left the group may take its time
            late = [r for r, ended in enumerate(codes) if ended is None and not failures.check([f"left {r}"])]
            if late:
                code, unsaid = 1, f"rank {late[0]} did not end, {timeout:g} s after another had"
        if code and time.monotonic() >= deadline:
            for child in running:
                child.kill()
        wait([child.sentinel for child in running], timeout=0.1)


def _child(rank: int, parent: int, port: int, size: int, fn: Callable[..., None], args: tuple[Any, ...]) -> None:
    _die_with(parent)
    os.environ.update(RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE=f"{size}", LOCAL_WORLD_SIZE=f"{size}")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{port}", TORCHELASTIC_USE_AGENT_STORE="True")
    try:
        fn(*args)
    except Exception:  # only the first rank to fail comes here with one
        print(f"rank {rank}: {traceback.format_exc()}", file=sys.stderr, flush=True)
        sys.exit(1)


def _die_with(parent: int) -> None:
    """Be killed when the process that started this one ends, on Linux; end at once if it already has."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
