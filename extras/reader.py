"""Read files of torch.save that other people made.

    with open("theirs.pt", "rb") as file:
        value = read(file)                      # ValueError says why a file is refused

torch.load(weights_only=True) does not run code from a file. But a file can take far more memory or
time than its size suggests, or crash Python: a compressed record can claim to contain any number of
bytes, a harmless function such as bytearray(10**12) can be called, or one record or one list can be
copied again and again. `read` checks a file for this before it calls torch.load. So a file of N
bytes cannot take much more than N bytes of memory.
"""

import math
import os
import pickle
import pickletools
import re
import struct
import warnings
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor

ALLOWED_GLOBALS = re.compile(  # the names that a pickle of tensors and plain values needs
    r"collections OrderedDict|torch\.storage UntypedStorage|__builtin__ (set|complex)"
    r"|torch (Size|device|\w{1,20}Storage|b?(float|bool|complex|u?int)\w{,20})"
    r"|torch\._utils _rebuild_(tensor_v[23]|parameter)"
)
MOST_NESTED = 100  # tuples inside one another; Python crashes where it hashes some 100,000
MOST_COPIES = 2  # values that calls and keys may use for each opcode; honest files have about 0.7
END = 98  # bytes after the records of a zip from torch.save: three records of fixed size


def read(file: BinaryIO) -> Any:
    """Return what torch.save wrote to an open file, with tensors on the CPU.

    ValueError unless these are tensors and plain values (numbers, strings, dicts, lists, ...).
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _check_records(file)
            file.seek(0)
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
        # torch ignores case. So it would read a record "data/ab" again as "AB", "Ab" and "aB".
        if wrong := [name for name in by_name if re.match(r"data/(?![0-9]+$)", name)]:
            raise ValueError(f"{wrong[0]!r} is not a name that torch.save gives to a record")
        _check_pickle(archive.read(by_name["data.pkl"]))


@dataclass
class _Value:
    """What is known of a value in a pickle that is not executed."""

    size: int = 1  # values in it, counted as often as they occur
    depth: int = 0  # tuples inside one another
    parts: Sequence["_Value"] = ()  # of a tuple
    is_callable: bool = False  # a global, but not a type of storages


def _check_pickle(text: bytes) -> None:
    """ValueError if a pickle would import other names, or copy or hash far more than it contains.

    It can use a value often, by its number in the memo. For example, 40 tuples of which each
    contains the one before twice stand for 2^40 values, and to compute a hash Python counts them
    all. A list of n values that is copied n times takes the memory of n^2 values.
    """
    stack, marks, memo, copies = list[_Value](), list[int](), dict[Any, _Value](), 0
    for number, (opcode, argument, _) in enumerate(pickletools.genops(text), 1000):
        name, below = opcode.name, opcode.stack_before
        allowed = name != "GLOBAL" or ALLOWED_GLOBALS.fullmatch(f"{argument}")
        if not allowed or name in ("INST", "OBJ", "STACK_GLOBAL"):
            raise ValueError(
                f"it needs {argument or name}, so it contains more than tensors and plain values"
            )
        is_callable = name == "GLOBAL" and not f"{argument}".endswith("Storage")
        if name == "MARK":
            marks.append(len(stack))
        elif name.endswith("PUT"):
            memo[argument] = stack[-1]
        elif name.endswith("GET"):
            stack.append(memo[argument])
        elif name != "PROTO":
            # What lies above the mark is one entry of `below`, and the mark another.
            marked = pickletools.markobject in below
            start = (marks.pop() + 2 if marked else len(stack)) - len(below)
            if start < 0:
                raise ValueError("its pickle is damaged")
            taken, result = stack[start:], _Value(is_callable=is_callable)
            del stack[start:]
            if name.startswith("TUPLE"):
                depth = 1 + max((part.depth for part in taken), default=0)
                result = _Value(1 + sum(part.size for part in taken), depth, taken)
            elif name.startswith(("APPEND", "SETITEM")):
                result, *items = taken
                keys = items[::2] if name.startswith("SETITEM") else []
                copies += sum(key.size for key in keys)
                result.size += sum(item.size for item in keys or items)
            elif name in ("REDUCE", "NEWOBJ", "BUILD", "BINPERSID"):
                if name in ("REDUCE", "NEWOBJ") and not taken[0].is_callable:
                    # torch would print the value. A new storage could have any size.
                    raise ValueError("its pickle calls a value, or makes a storage")
                used = taken[-1]
                result = _Value(used.size, used.depth)
                copies += max(used.size, sum(part.size for part in used.parts))
            if copies > MOST_COPIES * number or result.depth > MOST_NESTED:
                raise ValueError("its pickle uses some values too often, or nests them too deeply")
            stack.append(result)


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
