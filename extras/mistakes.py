"""Errors as one line, for whoever caused them.

    with users_mistakes(), about("--data mine.txt"):
        read("mine.txt")                       # "Error: --data mine.txt: no such file", exit code 2, if main() shows it

Needs click.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import click


@contextmanager
def users_mistakes() -> Iterator[None]:
    """What is wrong with values, files and packages in here is the user's to mend: a click.UsageError, of exit code 2."""
    try:
        yield
    except ImportError as error:  # fsspec's are "Install s3fs to access S3", "Please install gcsfs to ..."
        raise click.UsageError(re.sub(r"^(Please i|I)nstall ", "pip install ", str(error))) from error
    except ConnectionError:  # a rank was lost
        raise
    except (ValueError, OSError) as error:
        raise click.UsageError(said(error)) from error


@contextmanager
def about(what: str) -> Iterator[None]:
    """Say of an error what it is about."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise ValueError(f"{what}: {said(error)}") from error


def said(error: Exception) -> str:
    """An error's message, without the system's number for it."""
    if not isinstance(error, OSError) or not error.strerror:
        return f"{error}"
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


def out_of_memory(error: Exception) -> str:
    """What an error says if it is one for want of memory, be it the GPU's, this machine's or a limit's; else ""."""
    text = f"{error}".splitlines()[0] if f"{error}" else type(error).__name__
    wanting = re.search("out of memory|allocate memory|Cannot allocate|failed to map|can't start new thread", text)
    return text if wanting or isinstance(error, MemoryError) else ""
