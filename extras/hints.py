"""One line in place of a traceback, for errors whose remedy is a flag of run.py.

    except Exception as error:
        print(one_line(error) or traceback.format_exc())

Needs Python only.
"""

import re
import traceback

# Pattern in the traceback of an error -> what helps (the last one, if several match). The name
# OutOfMemoryError must not match ("(?<!OutOf)"), because Triton has an error of this name that is
# not about the memory of the device. torch's OutOfMemoryError matches by its text, "out of memory".
# Python raises SystemError if memory runs out during an import.
HINTS = {
    r"torch/cuda/graphs\.py": "--accum 2 trains without CUDA graphs",
    r"torch\._(inductor|dynamo)\.exc|/triton/(compiler|backends|runtime/build)": (
        "--no-compile trains without torch.compile"
    ),
    "out of memory|allocate memory|CUBLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)|CUDA calloc"
    "|failed to map|new thread|(?<!OutOf)MemoryError"
    r"|frozen importlib.*\nSystemError": (
        "a higher --accum or --checkpoint-activations needs less memory"
    ),
}


def one_line(error: Exception) -> str:
    """Return the type and the first paragraph of an error, with a hint; "" if no hint is known."""
    trace = "".join(traceback.format_exception(error))
    first_paragraph = " ".join(f"{error}".split("\n\n")[0].split())
    text = ""
    for pattern, hint in HINTS.items():
        if re.search(pattern, trace):
            text = f"{type(error).__name__}: {first_paragraph}; {hint}"
    return text
