"""Describe the software and the machine, as a bug report needs it: one line per fact.

    python run.py doctor          # or, with this file alone: python doctor.py

Needs only the standard library: if torch cannot be imported, the report says why. Environment
variables whose values could be secret are printed without their values.
"""

import os
import platform
import re
import shutil
import socket
import struct
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import timedelta
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

with suppress(ImportError):  # Windows does not have these.
    import fcntl
    import resource

IMPORT_ERROR: Exception | None = None
try:
    import torch
    import torch.distributed as dist
    from torch.utils import collect_env
except Exception as error:  # A broken installation raises OSError too.
    IMPORT_ERROR = error

T = TypeVar("T")
# The extras of setup.cfg, and the packages that they need.
EXTRAS = {
    "plot": ["matplotlib"],
    "tensorboard": ["tensorboard"],
    "hf": ["safetensors", "tokenizers"],
    "s3": ["s3fs"],
}
PACKAGES = ["click", "numpy", "triton", *sum(EXTRAS.values(), [])]
# Values are printed only of the variables in these two lists.
LAUNCHER = (
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT "
    "TORCHELASTIC_RESTART_COUNT SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURM_STEP_NUM_TASKS "
    "SLURM_STEP_TASKS_PER_NODE"
).split()
SETTINGS = (
    "CUDA_VISIBLE_DEVICES CUDA_LAUNCH_BLOCKING OMP_NUM_THREADS OMP_WAIT_POLICY MKL_NUM_THREADS "
    "GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME NCCL_DEBUG NCCL_IB_DISABLE NCCL_P2P_DISABLE "
    "PYTORCH_CUDA_ALLOC_CONF TORCH_COMPILE_DISABLE TORCH_DISTRIBUTED_DEBUG"
).split()
PREFIXES = "CUDA_", "DDPKIT_", "GLOO_", "NCCL_", "PYTORCH_", "TORCH_"
CGROUP = "/sys/fs/cgroup"  # the limits of a container


def report(seconds: float = 4.0) -> str:
    """Return one line per fact. Facts that are not known after `seconds` are left open.

    The facts are collected in threads, because each can hang: a driver, a name server, a disk. A
    thread that hangs keeps the process alive, so end the process with os._exit, as run.py does.
    """
    pool = ThreadPoolExecutor(len(FACTS))
    found = {name: pool.submit(fact) for name, fact in FACTS.items()}
    wait(found.values(), seconds)
    lines = {name: _line(future, seconds) for name, future in found.items()}
    return "\n".join(f"{name:<15} {line}" for name, line in lines.items() if line)


def _line(future: "Future[str]", seconds: float) -> str:
    """Return the result of a fact, or why there is none. An empty result is left out."""
    if not future.done():
        return f"no answer within {seconds:g} s"
    if isinstance(error := future.exception(), NameError):  # a module that was not imported
        return "not available"
    text = f"not available: {str(error) or repr(error)}" if error else future.result()
    return text.strip().split("\n")[0]


def _output(*command: str) -> str:
    """Return what a command prints, or "" if it fails or does not exist."""
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return ""


def _limits(*files: str) -> list[int]:
    """Return the numbers in files of CGROUP, or nothing if they do not exist or say "max"."""
    with suppress(OSError, ValueError):
        return [int(word) for name in files for word in Path(CGROUP, name).read_text().split()]
    return []


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


# ---------------------------------------------------------------------------------------- software


def commit() -> str:
    here = os.path.dirname(os.path.abspath(__file__))
    return _output("git", "--no-optional-locks", "-C", here, "describe", "--always", "--dirty")


def torch_version() -> str:
    if IMPORT_ERROR:
        raise IMPORT_ERROR
    parts = [f"{torch.__version__}", f"CUDA {torch.version.cuda}"]
    parts += [f"ROCm {torch.version.hip}"] if torch.version.hip else []
    parts += [f"cuDNN {torch.backends.cudnn.version()}"] if torch.version.cuda else []
    if dist.is_nccl_available():
        parts += ["NCCL " + ".".join(map(str, torch.cuda.nccl.version()))]
    return ", ".join(parts)


def torch_build() -> str:
    flags = r"\bUSE_(?:CUDA|ROCM|NCCL|GLOO|MPI|MKL|MKLDNN|OPENMP)=\w+"
    return " ".join(re.findall(flags, torch.__config__.show()))


def version(package: str) -> str:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return "missing"


def extras() -> str:
    missing = {name: [p for p in EXTRAS[name] if version(p) == "missing"] for name in EXTRAS}
    texts = {name: f"no, {' and '.join(p)} missing" if p else "yes" for name, p in missing.items()}
    return "; ".join(f"{name} {text}" for name, text in texts.items())


def compiler() -> str:
    """Return what torch.compile needs: a C++ compiler and Python.h for a CPU, Triton for a GPU."""
    cxx = os.environ.get("CXX", "g++")
    found = _output(cxx, "--version").split("\n")[0] or f"{cxx} not found"
    header = os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))
    return f"{found}, Python.h {'found' if header else 'missing'}, triton {version('triton')}"


# ----------------------------------------------------------------------------------------- machine


def cpu() -> str:
    text = collect_env.get_cpu_info(collect_env.run)
    name = re.search(r"Model name:\s*(.*)", text)  # On macOS, the text is the name.
    bf16 = "yes" if torch.cpu._is_avx512_bf16_supported() else "no"
    unit = torch.backends.cpu.get_cpu_capability()
    return f"{name[1] if name else text}, {unit}, bfloat16 instructions: {bf16}"


def usable_cpus() -> str:
    parts = [f"{os.cpu_count()} in the machine"]
    if hasattr(os, "sched_getaffinity"):  # Linux only
        parts += [f"affinity mask {len(os.sched_getaffinity(0))}"]
    quota = _limits("cpu.max") or _limits("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")
    parts += [f"quota of the container {quota[0] / quota[1]:g}"] if quota and quota[0] > 0 else []
    return ", ".join(parts)


def memory() -> str:
    parts = [_gib(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))]
    with suppress(OSError):  # Linux only
        (free,) = re.findall(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
        parts += [f"available {_gib(int(free) * 1024)}"]
    limit = _limits("memory.max") or _limits("memory/memory.limit_in_bytes")
    # Version 1 of cgroup writes a huge number if there is no limit.
    parts += [f"limit of the container {_gib(limit[0])}"] if limit and limit[0] < 2**60 else []
    return ", ".join(parts)


def gpus() -> str:
    if torch.backends.mps.is_available():
        return "MPS"
    torch.cuda.init()  # If there is no GPU, the error says why.
    bf16 = "yes" if torch.cuda.is_bf16_supported(including_emulation=False) else "no"

    def describe(number: int) -> str:
        gpu = torch.cuda.get_device_properties(number)
        return f"{gpu.name}, {_gib(gpu.total_memory)}, compute capability {gpu.major}.{gpu.minor}"

    counts = Counter(map(describe, range(torch.cuda.device_count())))
    return "; ".join(f"{n} x {text}, fast bfloat16: {bf16}" for text, n in counts.items())


def limits() -> str:
    def limit(name: str) -> str:
        soft, _ = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
        return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft}"

    files, processes, locked = map(limit, ("NOFILE", "NPROC", "MEMLOCK"))
    return f"open files {files}, processes {processes}, locked memory {locked} bytes"


def disk() -> str:
    folders = {"this folder": ".", "/dev/shm": "/dev/shm"}  # Only Linux has the second.
    there = {name: path for name, path in folders.items() if os.path.isdir(path)}
    return ", ".join(
        f"{_gib(shutil.disk_usage(there[name]).free)} free in {name}" for name in there
    )


# ------------------------------------------------------------------------------ network, variables


def interfaces() -> str:
    """Return the network interfaces; on Linux with their IPv4 addresses."""

    def address(name: str) -> str:
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            if sys.platform == "linux":
                request = struct.pack("256s", name.encode())
                answer = fcntl.ioctl(any_socket.fileno(), 0x8915, request)  # SIOCGIFADDR
                return f"{name} {socket.inet_ntoa(answer[20:24])}"
        return name

    found = [address(name) for _, name in socket.if_nameindex()]
    found.sort(key=lambda text: " " not in text)  # first those that have an address
    return ", ".join(found[:12]) + (f" and {len(found) - 12} more" if len(found) > 12 else "")


def connect_gloo() -> str:
    """Connect two ranks, in two threads, through the network interface that gloo chooses."""
    limit, start = timedelta(seconds=2), time.monotonic()
    server = dist.TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)

    def add_ones(rank: int) -> float:
        store = dist.TCPStore("127.0.0.1", server.port, None, False, limit)
        group: Any = dist.ProcessGroupGloo(store, rank, 2, limit)
        tensor = torch.ones(1)
        group.allreduce([tensor]).wait()
        return tensor.item()

    sums = [*ThreadPoolExecutor(2).map(add_ones, (0, 1))]
    if sums != [2.0, 2.0]:
        raise ArithmeticError(f"the sum of two ones is {sums}")
    return f"two ranks connected in {time.monotonic() - start:.2f} s"


def variables(names: list[str], prefixes: tuple[str, ...] = ()) -> str:
    """Return variables that are set: those in `names`, and without values those with a prefix."""
    shown = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    hidden = [name for name in os.environ if name.startswith(prefixes) and name not in names]
    return " ".join([*shown, *sorted(hidden)]) or "none set"


FACTS: dict[str, Callable[[], str]] = {
    "commit": commit,
    "Python": lambda: f"{platform.python_version()}, {platform.python_implementation()}",
    "torch": torch_version,
    "torch build": torch_build,
    "packages": lambda: ", ".join(f"{package} {version(package)}" for package in PACKAGES),
    "extras": extras,
    "torch.compile": compiler,
    "system": platform.platform,
    "distribution": lambda: collect_env.get_os(collect_env.run) or "",
    "CPU": cpu,
    "CPUs": usable_cpus,
    "memory": memory,
    "GPUs": gpus,
    "GPU driver": lambda: collect_env.get_nvidia_driver_version(collect_env.run) or "",
    "limits": limits,
    "disk": disk,
    "interfaces": interfaces,
    # gloo and torchrun use this address if no interface is named.
    "host name": lambda: f"resolves to {socket.gethostbyname(socket.gethostname())}",
    "gloo": connect_gloo,
    "launcher": partial(variables, LAUNCHER),
    "variables": partial(variables, SETTINGS, PREFIXES),
}

if __name__ == "__main__":
    print(report(), flush=True)
    os._exit(0)
