"""The small text files of an out folder, a path or any URL that fsspec knows: its metrics, and what it ran with.

    lines = metrics("out", step=400)                          # to go on from there
    write("out", "metrics.jsonl", "".join(lines))             # at any moment the old file or the new one is there
    append("out", "metrics.jsonl", line({"step": 401, "loss": 2.5}))

What cannot be read or written is an OSError. Needs Python alone, and fsspec for a URL.
"""

import errno
import io
import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


def read(folder: str, name: str) -> str:
    """The text of a file; what is not UTF-8 in it is replaced."""
    if "://" in folder:
        with _remote(folder) as (fs, path):
            return str(fs.cat_file(f"{path}/{name}").decode(errors="replace"))
    with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
        return file.read()


def write(folder: str, name: str, text: str) -> None:
    """Write a file so that at any moment the old one or the new one is there."""
    if "://" in folder:
        with _remote(folder) as (fs, path):
            fs.pipe_file(f"{path}/{name}", text.encode())
        return
    with open(os.path.join(folder, f".{name}"), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(os.path.join(folder, f".{name}"), os.path.join(folder, name))


def append(folder: str, name: str, line: str) -> None:
    """Add a line to a file, all of it or nothing. Not to one at a URL, as an object store cannot."""
    with open(os.path.join(folder, name), "ab", buffering=0) as file:
        end, raw = file.tell(), line.encode()
        if file.write(raw) < len(raw):  # the disk has just become full
            file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def _remote(url: str) -> Iterator[tuple[Any, str]]:
    """(file system, path) of a URL. What goes wrong with it inside is an OSError that names the folder."""
    from fsspec.core import url_to_fs

    try:
        fs, path = url_to_fs(url)
        yield fs, path.rstrip("/")
    except (FileNotFoundError, IsADirectoryError, ImportError, ValueError):
        raise
    except Exception as error:  # each package has its own
        text = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise OSError(f"{url}: {text}") from error


# ----------------------------------------------------------------------------------------------- what is in them


def line(record: dict[str, Any]) -> str:
    """A record of numbers as a line of JSON, which has no NaN: what is not finite is null."""
    return json.dumps({key: value if math.isfinite(value) else None for key, value in record.items()}) + "\n"


def metrics(folder: str, step: int) -> list[str]:
    """The lines of metrics.jsonl up to a step; what a crash cut off or garbled is no line."""
    lines = []
    with suppress(FileNotFoundError):
        for text in io.StringIO(read(folder, "metrics.jsonl") if step else ""):
            with suppress(ValueError, TypeError, KeyError):
                lines += [text] if text.endswith("\n") and json.loads(text)["step"] <= step else []
    return lines


def without_password(text: str) -> str:
    """The text, with what its URLs have before their host, user and password, left out."""
    return re.sub(r"://[^/@\s]*@", "://", text)


def without_passwords(flags: dict[str, Any]) -> dict[str, Any]:
    """The same of each text among the values."""
    return {key: without_password(value) if isinstance(value, str) else value for key, value in flags.items()}
