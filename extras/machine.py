"""What this machine can do: its memory, its rate at a matrix product, and so which arithmetic and whether to compile.

    dtype = arithmetic("auto", torch.device("cuda"))                      # "bfloat16" where that is much faster
    peak = matmul_rate(torch.device("cuda"), getattr(torch, dtype))       # FLOP/s

Needs torch.
"""

import os
import shutil
import time

import torch


def memory(device: torch.device) -> int:
    """Bytes that the device has in all."""
    if device.type == "cuda":
        total: int = torch.cuda.get_device_properties(device).total_memory
        return total
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a square matrix product on `device`, the best of five: what mfu is a fraction of."""
    n = 8192 if device.type == "cuda" else 768  # some milliseconds: a call that is waited for takes a twentieth of one
    a, seconds = torch.randn(n, n, device=device, dtype=dtype), []
    for _ in range(5):
        start = time.perf_counter()
        (a @ a)[0, 0].item()
        seconds.append(time.perf_counter() - start)
    return 2 * n**3 / min(seconds)


def arithmetic(asked: str, device: torch.device) -> str:
    """The type that is asked for; "auto" is bfloat16 where this device multiplies much faster in it, else float32."""
    if asked != "auto":
        return asked
    gain = matmul_rate(device, torch.bfloat16) / matmul_rate(device, torch.float32)
    return "bfloat16" if gain > 1.5 else "float32"


def compiling(asked: bool | None, device: torch.device, flops: float) -> bool:
    """Whether to compile; if None asks for neither: on a CPU that takes half a minute and then saves a fifth. What the
    whole run takes is told by its `flops`, not by a clock, so that a stopped run goes on as it began. It needs a
    compiler, on CUDA too.
    """
    if asked is not None:
        return asked
    worth_it = device.type == "cuda" or device.type == "cpu" and flops > 5e13
    return worth_it and shutil.which(os.environ.get("CXX", "g++")) is not None
