"""What this machine can compute: the peak rate that model FLOPs utilisation (mfu) is relative to.

keep_freed_memory() makes training on a CPU faster. bfloat16_is_faster() and should_compile() choose
the dtype on a CPU, and whether a run is long enough for torch.compile.

peak, source = peak_flops(torch.device("cuda"), torch.bfloat16)  # H100: (989e12, "datasheet")
mfu = tokens_per_second * flops_per_token / peak

Needs torch.
"""

import ctypes
import logging
import math
import os
import re
import shutil
import sys
import sysconfig
import time
from typing import Any

import torch

# Dense bfloat16 and float16 FLOP/s of one device without sparsity, from NVIDIA's datasheets, by a
# part of the name that torch.cuda.get_device_name returns. The first entry that fits counts.
DATASHEET = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Return the peak FLOP/s of one device, and "datasheet" or "measured".

    The rate of a square matrix product is measured where no datasheet value is known: on a CPU, on
    MPS, on other GPUs, and in float32, whose rate depends on whether TF32 is allowed.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    # A MIG device is a part of a GPU, with the name of the whole.
    if dtype in (torch.bfloat16, torch.float16) and "MIG" not in name:
        for part, peak in DATASHEET.items():
            if re.search(rf"{part}(?!\d)", name):  # An RTX A1000 is not an A100.
                return peak, "datasheet"
    return matmul_flops(device, dtype), "measured"


def flops_per_token(layers: int, embd: int, vocab: int, block_size: int) -> int:
    """Count the floating-point operations per token of a GPT's forward and backward pass.

    The formula is from Chowdhery et al., "PaLM", 2022, appendix B.
    """
    return 6 * count_weights(layers, embd, vocab) + 12 * layers * block_size * embd


def count_weights(layers: int, embd: int, vocab: int) -> int:
    """Count the weights of a GPT's linear layers, which are nearly all of its parameters."""
    return 12 * layers * embd**2 + vocab * embd


def check_and_describe(
    device: torch.device, config: dict[str, Any], steps: int, tokens: int
) -> dict[str, Any]:
    """Return what config.json says of the machine: torch, device, and the peak FLOP/s of all ranks.

    Also return the tokens per second at that peak, and as "compile" whether to compile, if `config`
    leaves that open with None. On a CPU, also call keep_freed_memory(). Switch off a log of Triton.
    config: the flags of run.py, with the vocabulary size and the number of ranks. steps, tokens: of
    the whole run. ValueError if a GPT of these sizes cannot be trained in the memory of a device: a
    weight, its gradient and one moment take 12 bytes. Under "ddp" each rank holds all weights.
    ValueError also if dropout would be wrong, on MPS.
    """
    if device.type == "mps" and config["checkpoint_activations"] and config["dropout"]:
        # Dropout would differ in the second forward pass: PyTorch issue 127676.
        raise ValueError("on MPS, --checkpoint-activations works only without --dropout")
    if device.type == "cpu":
        keep_freed_memory()
    ranks, sizes = config["ranks"], {name: config[name] for name in ("layers", "embd", "vocab")}
    parameters = count_weights(**sizes)
    needed = 12 * parameters / (1 if config["strategy"] == "ddp" else ranks)
    memory = device_memory(device)
    if needed > memory:
        raise ValueError(
            f"training {parameters:,} parameters needs {needed / 1e9:,.0f} GB; {device} has "
            f"{memory / 1e9:,.0f} GB: make --layers or --embd smaller, or see --strategy"
        )
    peak, source = peak_flops(device, getattr(torch, config["dtype"]))
    flops = flops_per_token(**sizes, block_size=config["block_size"])
    # Triton would log its whole program before it raises an error.
    logging.getLogger("torch._inductor.runtime.triton_heuristics").disabled = True
    compiled = config["compile"]
    return {
        "device": f"{device}",
        "torch": f"{torch.__version__}",
        "peak_flops": peak * ranks,
        "peak_flops_source": source,
        "peak_tokens_per_s": peak * ranks / flops,
        "compile": should_compile(device, steps, tokens * flops) if compiled is None else compiled,
    }


def should_compile(device: torch.device, steps: int, flops: float) -> bool:
    """Return whether torch.compile is possible and saves time in a run of so many steps and FLOP.

    Pass those of the whole run. Otherwise, resuming a run could change the decision.
    """
    # On an H100, it pays off after about 3,000 steps of a small model, with extras/cuda_graph.py
    # after 6,000, or after 350 of GPT-2 with batch 32.
    worth_it = {"cpu": flops > 5e13, "cuda": steps > 4000 or flops > 1e16}.get(device.type, False)
    # On CUDA, Triton needs a C compiler. On a CPU, Inductor needs a C++ compiler. Both need
    # Python.h, which is in a separate package on Debian and Ubuntu, python3-dev.
    name, usual = ("CC", "gcc") if device.type == "cuda" else ("CXX", "g++")
    header = os.path.exists(f"{sysconfig.get_path('include')}/Python.h")
    return worth_it and header and shutil.which(os.environ.get(name, usual)) is not None


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory for the next allocation.

    Otherwise glibc returns the memory of activations to the system and requests it again in the
    next step, which takes up to 20 % of a step on a CPU.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        # M_MMAP_THRESHOLD: blocks below 128 MiB come from the heap. Old versions of glibc refuse
        # more than 32 MiB.
        libc.mallopt(-3, 1 << 27) or libc.mallopt(-3, 1 << 25)
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: the heap does not shrink.


def bfloat16_is_faster() -> bool:
    """Return whether the CPU multiplies bfloat16 matrices at least 1.25 times as fast as float32.

    This is measured, because Intel's CPUs without AMX have instructions for bfloat16 that are
    slower than those for float32. A CPU without avx512_bf16 is not measured: the result is False.
    """
    if not torch.cpu._is_avx512_bf16_supported():
        return False
    matrices = [torch.ones(256, 256, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    seconds = [math.inf, math.inf]
    threads = torch.get_num_threads()
    # Other load on the machine hardly changes the CPU time of a single thread.
    torch.set_num_threads(1)
    for _ in range(10):
        for i, matrix in enumerate(matrices):
            start = time.thread_time()
            matrix @ matrix
            seconds[i] = min(seconds[i], time.thread_time() - start)
    torch.set_num_threads(threads)
    bfloat16, float32 = seconds
    return 0 < bfloat16 <= float32 / 1.25  # The clock of Windows is too coarse: 0.


def device_memory(device: torch.device) -> int:
    """Return the bytes of memory of the device; for a CPU and MPS, those of the machine."""
    if device.type == "cuda":
        total: int = torch.cuda.get_device_properties(device).total_memory
        return total
    if not hasattr(os, "sysconf"):  # on Windows: no check
        return 1 << 62
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a square matrix product on the device: the best of five."""
    n = 8192 if device.type == "cuda" else 768  # takes milliseconds, much longer than starting it
    matrix, seconds = torch.randn(n, n, device=device, dtype=dtype), math.inf
    for _ in range(5):
        start = time.perf_counter()
        (matrix @ matrix)[0, 0].item()  # item() waits for the device
        seconds = min(seconds, time.perf_counter() - start)
    return 2 * n**3 / seconds
