"""Read files of torch.save that other people made.

    with open("theirs.pt", "rb") as file:
        value = read(file)                      # ValueError says why a file is refused

torch.load(weights_only=True) does not run code from a file. But it allocates as much memory as a
compressed record claims to contain, and it calls harmless functions such as bytearray(10**12).
`read` checks a file for both before it calls torch.load. So a file of N bytes cannot take much more
than N bytes of memory.
"""

import math
import os
import pickle
import pickletools
import re
import struct
import warnings
import zipfile
from typing import Any, BinaryIO

import torch
from torch import Tensor

ALLOWED_GLOBALS = re.compile(  # the names that a pickle of tensors and plain values needs
    r"collections OrderedDict|torch\.storage UntypedStorage|__builtin__ (set|complex)"
    r"|torch (Size|device|\w+Storage|b?(float|bool|complex|u?int)\w*)"
    r"|torch\._utils _rebuild_(tensor_v[23]|parameter)"
)
END = 98  # bytes after the records of a zip from torch.save: three records of fixed size


def read(file: BinaryIO) -> Any:
    """Return what torch.save wrote to an open file, with tensors on the CPU.

    ValueError unless these are tensors and plain values (numbers, strings, dicts, lists, ...).
    """
    try:
        _check_records(file)
        file.seek(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = torch.load(file, map_location="cpu", weights_only=True)
        _check_tensors(value)
        return value
    except pickle.UnpicklingError:
        raise ValueError("it contains more than tensors and plain values") from None
    except ValueError:
        raise
    except Exception as error:  # a file can make torch, zipfile and pickletools raise anything
        raise ValueError(" ".join(repr(error).split()[:20])) from error


def _check_records(file: BinaryIO) -> None:
    """ValueError unless the file is a zip of uncompressed records, with a pickle of allowed names.

    The last END bytes are compared with those that torch.save writes. Then Python's zipfile, which
    this uses, and torch's reader find the same records.
    """
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - END))
    last = file.read()
    locator = struct.pack("<4sIQI4s", b"PK\6\7", 0, max(0, end - END), 1, b"PK\5\6")
    if last[56:80] != locator or last[96:] != b"\0\0":
        raise ValueError("it is not a zip file that torch.save wrote")
    file.seek(0)
    if file.read(4) != b"PK\3\4" or sum(struct.unpack("<QQ", last[40:56])) != end - END:
        raise ValueError("it has bytes before or after the zip file")
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
        size = sum(math.inf if record.compress_type else record.file_size for record in records)
        by_name = {record.filename.split("/", 1)[-1].lower(): record for record in records}
        if size > end or len(by_name) < len(records):
            raise ValueError("its records are compressed, or they overlap")
        _check_pickle(archive.read(by_name["data.pkl"]))


def _check_pickle(text: bytes) -> None:
    """ValueError if a pickle would import anything but the allowed names."""
    for opcode, argument, _ in pickletools.genops(text):
        allowed = opcode.name != "GLOBAL" or ALLOWED_GLOBALS.fullmatch(f"{argument}")
        if not allowed or opcode.name in ("INST", "OBJ", "STACK_GLOBAL"):
            needed = argument or opcode.name
            raise ValueError(
                f"it needs {needed}, so it contains more than tensors and plain values"
            )


def _check_tensors(value: Any) -> None:
    """ValueError if a tensor claims, by its strides, more numbers than its storage has.

    This is a loop and not a recursion, since a file can nest lists deeply, or put one into itself.
    """
    seen, left = set(), [value]
    while left:
        value = left.pop()
        if isinstance(value, Tensor) and value.nbytes > value.untyped_storage().nbytes():
            there = value.untyped_storage().nbytes()
            raise ValueError(f"a tensor of shape {tuple(value.shape)} has only {there} bytes")
        if isinstance(value, (dict, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            left += value.values() if isinstance(value, dict) else value
