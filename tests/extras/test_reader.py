"""Tests of extras/reader.py: forged files are refused, no code runs, and no memory is taken."""

import io
import itertools
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from extras import reader

BOMB = 200_000_000  # bytes that a forged file would take in memory; a refusal takes nearly none


class Calls:
    """An object that calls function(*args) when it is unpickled."""

    def __init__(self, function: Callable, *args: Any):
        self.__reduce__ = lambda: (function, args)

    def __reduce_ex__(self, _: int) -> Any:
        return self.__reduce__()


def torch_saved(what: Any, **how: Any) -> bytes:
    file = io.BytesIO()
    torch.save(what, file, **how)
    return file.getvalue()


def records(what: Any) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(torch_saved(what))) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zipped(parts: dict[str, bytes], how: int = zipfile.ZIP_STORED) -> bytes:
    """Return a zip that ends as those of torch.save, in the form for large files (zip64)."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", how, compresslevel=1) as archive:
        for name, raw in parts.items():
            archive.writestr(name, raw)
    raw = file.getvalue()
    (count, size, start), end = struct.unpack("<HII", raw[-12:-2]), len(raw) - 22
    longer = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, start)
    return raw[:-22] + longer + struct.pack("<4sIQI", b"PK\6\7", 0, end, 1) + raw[-22:]


def edited(old: bytes, new: bytes, how: int = zipfile.ZIP_STORED, **more: bytes) -> bytes:
    parts = records(HONEST)
    assert old in parts["archive/data.pkl"]
    parts["archive/data.pkl"] = parts["archive/data.pkl"].replace(old, new)
    return zipped({**parts, **more}, how)


def behind(something: bytes, raw: bytes) -> bytes:
    """Put bytes before a zip: readers that count from the start or from the end then differ."""
    return something + raw[:-34] + struct.pack("<Q", len(something) + len(raw) - 98) + raw[-26:]


def twice_there(raw: bytes) -> bytes:
    """Return the zip with each record listed nine times, as in bombs with overlapping records."""
    size, start = struct.unpack("<QQ", raw[-58:-42])
    directory, count = raw[start : start + size] * 9, struct.unpack("<Q", raw[-66:-58])[0] * 9
    longer = struct.pack(
        "<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(directory), start
    )
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, count, count, len(directory), start, 0)
    return (
        raw[:start]
        + directory
        + longer
        + struct.pack("<4sIQI", b"PK\6\7", 0, start + len(directory), 1)
        + end
    )


HONEST = {"model": {"w": torch.ones(3)}}
THREE, MANY = b"K\x03", b"J" + struct.pack("<i", BOMB // 4)
W = torch.ones(20_000)
NEST = b"\x80\x02}(X\5\0\0\0model}X\1\0\0\0x" + b"]" * 100_000 + b"a" * 99_999 + b"u."


def forged_pickle(text: bytes) -> bytes:
    return zipped({**records(HONEST), "archive/data.pkl": b"\x80\x02" + text})


def numbers(count: int) -> bytes:
    """Return the opcodes of some numbers."""
    return b"".join(b"J" + struct.pack("<i", i) for i in range(count))


def often(function: bytes, argument: bytes, times: int) -> bytes:
    """Return a pickle that calls a function again and again with the same argument."""
    calls = b"h\0h\1\x85R" * times
    return forged_pickle(b"](" + function + b"q\0" + argument + b"q\1" + calls + b"e.")


def read_again(size: int, times: int) -> bytes:
    """Return a file in which one record is read under many names that differ in upper case only."""
    parts = records({"model": [torch.ones(size)] * 2})
    text, key = parts["archive/data.pkl"], b"X\1\0\0\0" + b"0"
    assert key in text
    names = ["".join(name) for name in itertools.islice(itertools.product("aA", repeat=9), times)]
    rebuilt = text[text.index(b"ctorch._utils") : text.index(b"tq", text.index(b"R")) + 3]
    body = b"".join(rebuilt.replace(key, b"X\x09\0\0\0" + name.encode()) + b"R" for name in names)
    parts |= {"archive/data.pkl": b"\x80\x02](" + body + b"e."}
    parts["archive/data/aaaaaaaaa"] = parts.pop("archive/data/0")
    return zipped(parts)


TOO_OFTEN = "uses some values too often, or nests them too deeply"
FORGED: dict[
    str, tuple[Callable[[Path], bytes], str]
] = {  # kind: (content, reason; "" if it is loaded)
    "code": (
        lambda p: torch_saved({**HONEST, "x": Calls(os.mkdir, f"{p}")}),
        "it needs posix mkdir",
    ),
    "code in a bare pickle": (
        lambda p: pickle.dumps({**HONEST, "x": Calls(os.mkdir, f"{p}")}),
        "not a zip",
    ),
    "code by protocol 4": (
        lambda p: zipped(
            {**records(HONEST), "archive/data.pkl": pickle.dumps(Calls(os.mkdir, f"{p}"), 4)}
        ),
        "STACK_GLOBAL",
    ),
    "code in the old format": (
        lambda p: torch_saved(
            {**HONEST, "x": Calls(os.mkdir, f"{p}")}, _use_new_zipfile_serialization=False
        ),
        "not a zip",
    ),
    "the old format": (
        lambda p: torch_saved(HONEST, _use_new_zipfile_serialization=False),
        "not a zip",
    ),
    "a bytearray": (
        lambda p: torch_saved({**HONEST, "x": Calls(bytearray, BOMB)}),
        "it needs __builtin__ bytearray",
    ),
    "a tensor by its size": (
        lambda p: torch_saved({**HONEST, "x": Calls(torch.FloatTensor, BOMB)}),
        "it needs torch",
    ),
    "a compressed record": (
        lambda p: edited(THREE, MANY, zipfile.ZIP_DEFLATED, **{"archive/data/0": bytes(BOMB)}),
        "compressed",
    ),
    "a compressed pickle": (
        lambda p: zipped(
            {**records(HONEST), "archive/data.pkl": b"\x80\x02" + b"0" * BOMB}, zipfile.ZIP_DEFLATED
        ),
        "compressed",
    ),
    "overlapping records": (
        lambda p: twice_there(zipped({**records(HONEST), "archive/x": bytes(50_000)})),
        "overlap",
    ),
    "something before it": (
        lambda p: behind(b"PK\3\4", zipped(records(HONEST))),
        "before or after",
    ),
    "something behind it": (lambda p: zipped(records(HONEST)) + b"PK\5\6" + bytes(18), "not a zip"),
    "a comment": (lambda p: zipped(records(HONEST))[:-2] + b"\5\0hello", "not a zip"),
    "strides of 0": (
        lambda p: torch_saved({"model": {"w": torch.ones(1).expand(BOMB)}}),
        "has only 4 bytes",
    ),
    "strides of 1": (
        lambda p: torch_saved({"model": {"w": W.as_strided((10_000, 10_000), (1, 1))}}),
        "has only 80000 bytes",
    ),
    "strides of 0, elsewhere": (
        lambda p: torch_saved({**HONEST, "optimizers": [{"m": W[:1].expand(BOMB)}]}),
        "bytes",
    ),
    "more than there is": (lambda p: edited(THREE + b"\x85", MANY + b"\x85"), "Runtime"),
    "a storage larger than its record": (lambda p: edited(THREE, MANY), "record size"),
    "a text that is cut": (
        lambda p: edited(b"X\x05\0\0\0model", b"X\xff\xff\xff\x7fmodel"),
        "expected 2147483647 bytes",
    ),
    "a key of 2^40 values": (
        lambda p: forged_pickle(b"}" + b")" + b"q\0h\0\x86" * 40 + b"K\1s."),
        TOO_OFTEN,
    ),
    "a key in which tuples are nested 200,000 times": (
        lambda p: forged_pickle(b"}" + b")" + b"\x85" * 200_000 + b"K\1s."),
        TOO_OFTEN,
    ),
    "a set of 2^40 values": (
        lambda p: forged_pickle(b"c__builtin__\nset\n](K\1q\0" + b"h\0\x86q\0" * 40 + b"e\x85R."),
        TOO_OFTEN,
    ),
    "a record that is 2^40 values": (
        lambda p: edited(b"X\1\0\0\x000", b")" + b"q\x30h\x30\x86" * 40),
        TOO_OFTEN,
    ),
    "many sets of one list": (
        lambda p: often(b"c__builtin__\nset\n", b"](" + numbers(5000) + b"e", 1000),
        TOO_OFTEN,
    ),
    "many copies of a dict": (
        lambda p: often(b"ccollections\nOrderedDict\n", b"}(" + numbers(6000) + b"u", 1000),
        TOO_OFTEN,
    ),
    "many sizes from one tuple": (
        lambda p: often(b"ctorch\nSize\n", b"(" + numbers(5000) + b"t", 5000),
        TOO_OFTEN,
    ),
    "one record under 500 names": (lambda p: read_again(250_000, 500), "'data/aaaaaaaaa' is not"),
    "a long text that is called": (
        lambda p: forged_pickle(b"X" + struct.pack("<I", 300_000) + b"a" * 300_000 + b")R."),
        "calls a value",
    ),
    "a large value that is called": (
        lambda p: forged_pickle(b"]" + b"q\0](h\0h\0e" * 40 + b")R."),
        "calls a value",
    ),
    "a long name": (
        lambda p: forged_pickle(b"ctorch\n" + b"a" * 300_000 + b"Storage\n."),
        "it needs torch a",
    ),
    "a nest": (lambda p: zipped({**records(HONEST), "archive/data.pkl": NEST}), ""),
    "a storage by its size": (
        lambda p: torch_saved({**HONEST, "x": Calls(torch.UntypedStorage, BOMB)}),
        "makes a storage",
    ),  # the opcode BUILD could give it to a tensor
    "a large number in the memo": (
        lambda p: edited(b"q\x00", b"r\xff\xff\xff\x7f"),
        "",
    ),  # harmless, and so loaded
}


def growth(call: Callable[[], Any]) -> int:
    """Return by how many bytes the memory of this process grew at most while `call` ran."""

    def kilobytes(what: str) -> int:
        return int(re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])

    Path("/proc/self/clear_refs").write_text("5")  # forget the peak until now
    before = kilobytes("VmRSS")
    call()
    return 1000 * (kilobytes("VmHWM") - before)


def result_of_read(raw: bytes) -> tuple[Any, str]:
    """Return (what `read` returns, "") or (None, why it refuses)."""
    try:
        return reader.read(io.BytesIO(raw)), ""
    except ValueError as error:
        return None, f"{error}"


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", FORGED)
def test_a_forged_file_is_refused_with_its_reason_and_takes_no_memory(kind, tmp_path):
    make, reason = FORGED[kind]
    raw = make(tmp_path / "was run")
    outcome: list[tuple[Any, str]] = []
    assert growth(lambda: outcome.append(result_of_read(raw))) < 40_000_000
    value, message = outcome[0]
    assert not (tmp_path / "was run").exists()
    assert bool(message) == bool(reason) and re.search(reason, message), message
    assert "\n" not in message and (reason or isinstance(value, dict))


@pytest.mark.parametrize("kind", ["a bytearray", "a compressed record", "a compressed pickle"])
def test_torch_load_alone_takes_the_memory_that_a_bomb_asks_for(kind, tmp_path):
    raw = FORGED[kind][0](tmp_path)

    def load() -> None:
        try:
            torch.load(io.BytesIO(raw), weights_only=True)
        except Exception:
            pass

    assert len(raw) < 10_000_000 and growth(load) > 150_000_000


def test_the_code_in_the_forged_files_would_run(tmp_path):
    torch.load(io.BytesIO(FORGED["code"][0](tmp_path / "was run")), weights_only=False)
    assert (tmp_path / "was run").exists()


def test_tensors_and_plain_values_are_read_as_torch_load_reads_them():
    half, w = torch.ones(2, dtype=torch.bfloat16), torch.arange(6.0).view(2, 3)
    value = {
        "w": w,
        "view": w.T,
        "half": half,
        "numbers": [1, 2.5, None, True, 3j],
        "t": (1, "x"),
        "s": {1, 2},
    }
    value |= {
        "p": torch.nn.Parameter(w),
        "size": w.shape,
        "f8": torch.ones(2).to(torch.float8_e4m3fn),
    }
    raw = torch_saved(value)
    found = reader.read(io.BytesIO(raw))
    assert (
        str(found) == str(torch.load(io.BytesIO(raw), weights_only=True))
        and found.keys() == value.keys()
    )
    assert torch.equal(found["view"], w.T) and found["numbers"] == value["numbers"]


@pytest.mark.parametrize(
    "raw", [b"", b"PK", bytes(98), bytes(10_000), torch_saved(HONEST)[:-1], torch_saved(HONEST)[1:]]
)
def test_something_else_than_a_file_of_torch_save_is_refused(raw):
    assert result_of_read(raw)[1] in (
        "it is not a zip file that torch.save wrote",
        "it has bytes before or after the zip file",
    )


def test_every_cut_file_is_refused():
    raw = torch_saved(HONEST)
    assert reader.read(io.BytesIO(raw)).keys() == HONEST.keys()
    refused = [result_of_read(raw[:end])[1] for end in range(len(raw))]
    assert len(refused) > 500 and all(refused)
