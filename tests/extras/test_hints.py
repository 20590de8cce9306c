"""Tests of extras/hints.py: errors about memory and compilers get one line, and others get none."""

import pytest
import torch

from extras.hints import one_line

MEMORY = "; a higher --accum or --checkpoint-activations needs less memory"
COMPILER = "; --no-compile trains without torch.compile"


def caught(action):
    with pytest.raises(Exception) as info:
        action()
    return info.value


def fail(error):
    raise error


class OutOfMemoryError(Exception):
    """Has the name of an error of Triton, which is about the shared memory of a GPU."""


@pytest.mark.parametrize(
    "action",
    [
        lambda: torch.empty(1 << 60, dtype=torch.uint8),
        lambda: bytearray(1 << 62),
        lambda: fail(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")),
        lambda: fail(RuntimeError("can't start new thread")),
        lambda: fail(OSError("[Errno 12] Cannot allocate memory")),
        lambda: fail(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")),
    ],
)
def test_an_error_about_memory_names_the_flags_that_save_memory(action):
    error = caught(action)
    line = one_line(error)
    assert line.startswith(f"{type(error).__name__}: ") and line.endswith(MEMORY)
    assert "\n" not in line


def test_an_error_of_the_compiler_names_no_compile():
    from torch._inductor.exc import InductorError

    line = one_line(
        caught(lambda: fail(InductorError(ValueError("no\n  c++\n\nA long text"), None)))
    )
    assert line.startswith("InductorError: ") and line.endswith(COMPILER)
    assert "\n" not in line and "long text" not in line


def test_an_error_while_cuda_graphs_are_recorded_names_a_run_without_them():
    class WaitsForTheDevice(torch.nn.Module):
        def forward(self, x):
            return x * float(x.sum())

    # Without a GPU, the recording fails too.
    x = torch.ones(3, device="cuda" if torch.cuda.is_available() else "cpu")
    error = caught(lambda: torch.cuda.make_graphed_callables(WaitsForTheDevice(), (x,)))
    assert one_line(error).endswith("; --accum 2 trains without CUDA graphs")


def test_memory_is_named_if_the_compiler_had_too_little():
    from torch._inductor.exc import InductorError

    line = one_line(caught(lambda: fail(InductorError(RuntimeError("CUDA out of memory"), None))))
    assert line.endswith(MEMORY)


@pytest.mark.parametrize("error", [OutOfMemoryError("out of resource"), KeyError("x"), OSError(5)])
def test_other_errors_have_no_hint(error):
    assert one_line(caught(lambda: fail(error))) == ""
