"""Read mutated files, in child processes with limits on memory and time.

    python tests/faults/fuzz.py checkpoint --count 100000    # the inputs 0 to 99,999
    python tests/faults/fuzz.py checkpoint --seed 123        # input 123 alone, with its traceback

An input is a valid small file that is changed at random: its bytes, its pickle opcodes, its JSON
values, its header fields. Then its digests and checksums are computed again, so that the changes
reach the parser. Everything about an input follows from the name of the target and its number,
which is the seed.

The process that imports torch forks a child that reads thousands of inputs. The memory that they
share says which input the child reads. So when a signal ends the child, this input is the failure,
and the next child continues behind it. An input passes if the file is loaded, or if one of the
exceptions is raised that the target lists. It fails if

- another exception is raised, or a warning is printed;
- a signal ends the child: a crash (SIGSEGV, ...), or a limit of time (SIGPROF: CPU time, SIGALRM);
- code runs: sys.addaudithook reports each program that is started, each file that is opened to be
  written, and each class that pickle (not torch's unpickler) looks up;
- memory grows by more than GROWTH bytes, and some more for a large input, if the file is one that
  can come from other people.
"""

import argparse
import copy
import gc
import hashlib
import io
import json
import math
import mmap
import os
import pickle
import pickletools
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, f"{ROOT}")

import chardata  # noqa: E402
import ckpt  # noqa: E402
import gpt  # noqa: E402
from extras import exchange, export, flags, reader, sharded  # noqa: E402

Files = dict[str, bytes]  # the name of a file -> its content
# Memory that a file of other people may take, in bytes: an empty list is one byte of a pickle.
GROWTH, GROWTH_PER_BYTE = 40_000_000, 64
# CPU time that a file may take: torch reads a pickle with some 300,000 opcodes per second.
SECONDS, SECONDS_PER_BYTE = 1.0, 5e-6
HEADROOM = 1 << 30  # bytes of memory that a child can allocate for any file, before MemoryError
CODE_RUNS = (  # the audit events that a file must not cause
    "os.system os.exec os.fork os.forkpty os.posix_spawn os.spawn os.kill os.mkdir os.remove "
    "os.rename os.rmdir os.symlink os.truncate os.chmod subprocess.Popen pickle.find_class "
    "socket.connect socket.bind shutil.rmtree"
).split()


class Target(NamedTuple):
    """What is tested: a function that reads files, and a function that makes them."""

    make: Callable[[random.Random], Files]
    read: Callable[[Path], Any]  # gets the folder with the files
    refusals: tuple[type[Exception], ...]  # what `read` may raise
    from_others: bool  # the limits of time and memory for files of other people hold


# ----------------------------------------------------------------------------------------- mutation

NUMBERS = [0, 1, 2, 3, 7, 64, 255, 256, 32768, 65535, 10**6, 10**9, 10**12, 2**53, 10**30]
NUMBERS += [
    sign * 2**bits + one for bits in (31, 32, 63, 64) for sign in (1, -1) for one in (0, -1)
]
VALUES: list[Any] = [None, True, False, -1, 0.5, math.nan, math.inf, -math.inf, 1e300, "", "x", "0"]
VALUES += [[], {}, [1], [[]], {"x": 1}, "a" * 5000, "\ud800", "\0", "1\n2", "../x", "/etc/passwd"]
VALUES += ["torch.float32", "torch.uint8", "torch.load", "torch.nn", "char", "byte", "ids", "gpt2"]
VALUES += ["tokenizer", "modern2", "muon", "out", "é", "\U0001f600", *NUMBERS]


def edit(chance: random.Random, what: Any, piece: Callable[[], Any]) -> Any:
    """Return bytes or a list with some edits. piece: returns something of the same type."""
    for _ in range(chance.choice([1, 1, 1, 2, 3, 8])):
        i, j = sorted(chance.randrange(len(what) + 1) for _ in range(2))
        if chance.random() < 0.8:
            j = min(len(what), i + chance.choice([1, 1, 2, 3, 4, 8, 16]))
        block, new = what[i:j], piece()
        times = chance.choice([2, 2, 3, 40, 1000]) if len(what) < 10_000 else 2
        replaced = [
            lambda: what[:i] + what[j:],  # left out
            lambda: what[:i] + new + what[i + len(new) :],  # overwritten
            lambda: what[:i] + new + what[i:],  # inserted
            lambda: what[:i] + new + what[j:],  # replaced
            lambda: what[:i] + block * times + what[j:],  # repeated
            lambda: what[:j] + block[::-1] + what[j:],  # reversed
            lambda: (at := chance.randrange(len(what) + 1), what[:at] + block + what[at:])[1],
            lambda: what[:i],  # cut
        ]
        what = chance.choices(replaced, [3, 6, 4, 4, 1, 1, 2, 0.5])[0]()
    return what


def edit_bytes(chance: random.Random, raw: bytes, others: list[bytes] = []) -> bytes:
    """Return bytes with some edits: random bytes, numbers of all sizes, blocks of other files."""

    def piece() -> bytes:
        kind = chance.randrange(4)
        if kind == 0 and others:
            other = chance.choice(others)
            at = chance.randrange(len(other) + 1)
            return other[at : at + chance.choice([1, 4, 16, 100])]
        if kind == 1:
            size = chance.choice([1, 2, 4, 8])
            number = chance.choice(NUMBERS) % 256**size
            return number.to_bytes(size, chance.choice(["little", "big"]))
        if kind == 2 and raw:  # a bit flipped; it matters only where it overwrites its origin
            return bytes([raw[chance.randrange(len(raw))] ^ 1 << chance.randrange(8)])
        return chance.randbytes(chance.choice([1, 1, 1, 2, 4, 9]))

    return edit(chance, raw, piece)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of everything in nested dicts and lists."""
    left = [value]
    while left:
        container = left.pop()
        if isinstance(container, (dict, list)):
            for key in list(container) if isinstance(container, dict) else range(len(container)):
                yield container, key
                left.append(container[key])


def edit_value(chance: random.Random, value: Any) -> Any:
    """Return a copy of nested dicts and lists in which some values or keys are others."""
    value = copy.deepcopy(value)
    for _ in range(chance.choice([1, 1, 1, 2, 3, 6])):
        found = list(places(value))
        if not found or chance.random() < 0.01:
            return chance.choice(VALUES)
        container, key = chance.choice(found)
        old = container[key]
        kind = chance.choices(range(6), [4, 2, 2, 1, 1, 1])[0]
        if kind == 0:
            container[key] = copy.deepcopy(chance.choice(VALUES))
        elif kind == 1:  # what is elsewhere
            other, where = chance.choice(found)
            container[key] = copy.deepcopy(other[where])
        elif kind == 2 and isinstance(old, (int, float)):
            container[key] = chance.choice([old + 1, old - 1, -old, old * 2, float(old), f"{old}"])
        elif kind == 3 and isinstance(container, dict):  # another name
            other, where = chance.choice(found)
            name = where if isinstance(where, str) else chance.choice(["x", "", 0])
            container[name] = container.pop(key)
        elif kind == 4:
            del container[key]
        elif isinstance(container, list):
            container.insert(key, copy.deepcopy(old))
        elif kind == 5:  # nested deeply, or often
            for _ in range(chance.choice([1, 3, 900, 5000])):
                container[key] = [container[key]]
            break  # another edit could not copy it
    return value


def json_of(chance: random.Random, value: Any) -> bytes:
    """Return the JSON text of an edited value, and sometimes edit the text too."""
    try:
        raw = json.dumps(edit_value(chance, value)).encode()
    except (RecursionError, TypeError, ValueError):  # nested too deeply, or keys of several types
        raw = b"[" * 100_000
    if chance.random() < 0.2:
        raw = edit_bytes(chance, raw, [b'{"a":[', b"NaN", b"1e999", b"\\ud800", b"[" * 5000])
    return raw


# ------------------------------------------------------------------------------------------- pickle


def operations(text: bytes) -> list[bytes]:
    """Return the opcodes of a pickle, each with its argument."""
    starts = [position for _, _, position in pickletools.genops(text)]
    return [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)])]


def text_operation(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def number_operation(chance: random.Random, number: int) -> bytes:
    long = number.to_bytes(17, "little", signed=True)
    ways = [b"\x8a\x11" + long]
    ways += [b"J" + struct.pack("<i", number)] if -(2**31) <= number < 2**31 else []
    ways += [b"K" + bytes([number])] if 0 <= number < 256 else []
    return chance.choice(ways)


HARMFUL = ["posix system", "os system", "builtins exec", "__builtin__ eval", "subprocess Popen"]
HARMFUL += ["builtins getattr", "torch load", "torch.hub load", "__builtin__ bytearray", "io open"]
HARMLESS = ["collections OrderedDict", "collections Counter", "__builtin__ set", "torch Size"]
HARMLESS += ["__builtin__ complex", "torch device", "torch float32", "torch FloatStorage"]
HARMLESS += [f"torch._utils _rebuild_{kind}" for kind in ("tensor_v2", "tensor_v3", "parameter")]
GLOBALS = [f"c{name}\n".replace(" ", "\n").encode() for name in HARMFUL]
GLOBALS += [f"c{name}\n".replace(" ", "\n").encode() for name in HARMLESS]
OTHER_OPERATIONS = [b"(", b")", b"]", b"}", b"t", b"\x85", b"\x86", b"\x87", b"R", b"b", b"\x81"]
OTHER_OPERATIONS += [b"Q", b"s", b"u", b"a", b"e", b"N", b"\x88", b"\x89", b".", b"0", b"2", b"1"]
OTHER_OPERATIONS += [
    b"\x8f",
    b"\x93",
    b"i",
    b"o",
    b"P0\n",
    b"q\0h\0\x86",
    b"h\0h\0\x86",
    b"h\0h\0R",
]
CANARIES = [  # these would make a file if they were executed
    f"c{name}\n".replace(" ", "\n").encode() + text_operation("touch canary") + b"\x85R"
    for name in HARMFUL[:2]
]
CANARIES += [b"cbuiltins\nexec\n" + text_operation("open('canary', 'w')") + b"\x85R"]


def allowed_by_torch() -> list[bytes]:
    """Return the opcodes for all names that torch's unpickler allows."""
    names = torch._weights_only_unpickler._get_allowed_globals()
    return [b"c" + b"\n".join(name.encode().rpartition(b".")[::2]) + b"\n" for name in names]


def edit_pickle(chance: random.Random, text: bytes, pool: list[bytes]) -> bytes:
    """Return a pickle with edited opcodes. pool: opcodes to insert, besides numbers and texts."""

    def piece() -> list[bytes]:
        kind = chance.randrange(8)
        if kind == 0:
            return [number_operation(chance, chance.choice(NUMBERS))]
        if kind == 1:
            return [chance.choice([b"q", b"h"]) + bytes([chance.randrange(40)])]
        if kind == 2:
            return [chance.choice(OTHER_OPERATIONS)]
        if kind == 3:
            value = chance.choice(VALUES)
            return [text_operation(f"{value}"[:100])]
        if kind == 4:
            return [chance.choice(GLOBALS), *chance.choice([[b")", b"R"], [b"h\0", b"\x85", b"R"]])]
        if kind == 5 and chance.random() < 0.5:
            return [chance.choice(CANARIES)]
        return [chance.choice(pool)]

    edited = edit(chance, operations(text), piece)
    if chance.random() < 0.9 and edited[-1:] != [b"."]:
        edited.append(b".")
    return b"".join(edited)


def nested_or_repeated(chance: random.Random) -> bytes:
    """Return a pickle that is small, and asks for much: memory, time, or stack."""
    size = chance.choice([1, 10, 40, 1000, 5000])
    numbers = b"".join(b"J" + struct.pack("<i", i) for i in range(size))
    pairs = b"".join(b"J" + struct.pack("<i", i) + b"N\x86" for i in range(size))
    some = [b"](" + numbers + b"e", b"(" + numbers + b"t", b"](" + pairs + b"e", b"K\x05"]
    some += [b"}(" + pairs.replace(b"N\x86", b"N") + b"u", text_operation("a" * 30 * size)]
    function = chance.choice(GLOBALS[len(HARMFUL) :] + allowed_by_torch())
    argument = chance.choice(some) + b"q\1"
    if chance.random() < 0.4:  # called often with the same argument
        call = chance.choice([b"h\0h\1\x85R", b"h\0h\1R", b"h\0h\1\x85\x81", b"h\0)Rh\1b"])
        body = function + b"q\0" + argument + call * chance.choice([1, 100, 3000])
        return b"\x80\2](" + body + b"e."
    inner = chance.choice([b")", b"]", b"}", b"K\1", argument])
    wrap = [b"\x85", b"q\2h\2\x86", b"q\2h\2\x86", b"q\2](h\2e", b"q\2}K\1h\2s", b"\x85q\2h\2\x86"]
    inner += chance.choice(wrap) * chance.choice([30, 30, 1000, 1000, 200_000])
    use = [b"}" + inner + b"K\1s", b"](" + inner + b"e", function + inner + b"\x85R"]
    use += [inner + b")R", inner + b")\x81"]
    use += [b"c__builtin__\nset\n](" + inner + b"e\x85R", b"}K\1" + inner + b"s"]
    use += [b"(" + text_operation("storage") + function + inner + b"NK\1tQ"]
    return b"\x80\2}" + text_operation("model") + chance.choice(use) + b"s."


# ---------------------------------------------------------------------------------------------- zip

WIDTHS = {"H": 2, "I": 4, "Q": 8}
Records = list[tuple[str, bytes]]


def zip_of(records: Records, chance: random.Random | None = None) -> bytes:
    """Return a zip as torch.save writes it. chance: sets some fields of the headers to others."""
    chance, is_edited = chance or random.Random(0), chance is not None
    headers: list[tuple[str, list[int], bytes]] = []  # types of the fields, fields, what follows
    directory, place = [], 0
    for name, raw in records:
        encoded, stored, method = name.encode("utf-8", "replace"), raw, 0
        if is_edited and chance.random() < 0.03:
            stored, method = zlib.compress(raw, 1, wbits=-15), 8
        common = [0, method, 0, 0, zlib.crc32(raw), len(stored), len(raw), len(encoded), 0]
        headers.append(("IHHHHHIIIHH", [0x04034B50, 20, *common], encoded + stored))
        fields = [0x02014B50, 20, 20, *common, 0, 0, 0, 0, place]
        directory.append(("IHHHHHHIIIHHHHHII", fields, encoded))
        place += 30 + len(encoded) + len(stored)
    count, size = len(records), sum(46 + len(name) for _, _, name in directory)
    ends = [
        ("IQHHIIQQQQ", [0x06064B50, 44, 45, 45, 0, 0, count, count, size, place], b""),
        ("IIQI", [0x07064B50, 0, place + size, 1], b""),
        ("IHHHHIIH", [0x06054B50, 0, 0, count, count, size, place, 0], b""),
    ]
    headers += directory + ends
    if is_edited and chance.random() < 0.5:
        for _ in range(chance.choice([1, 1, 2, 4])):
            _, fields, _ = chance.choice(headers)
            at = chance.randrange(len(fields))
            near = [fields[at] + 1, fields[at] - 1, fields[at] ^ 1 << chance.randrange(16)]
            fields[at] = chance.choice([*NUMBERS, *near, *near, *chance.choice(headers)[1]])
    return b"".join(
        b"".join(
            (number % 256 ** WIDTHS[kind]).to_bytes(WIDTHS[kind], "little")
            for kind, number in zip(kinds, fields)
        )
        + raw
        for kinds, fields, raw in headers
    )


def records_of(raw: bytes) -> Records:
    """Return the records of a file of torch.save."""
    import zipfile

    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        return [(name, archive.read(name)) for name in archive.namelist()]


def torch_saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def edit_records(chance: random.Random, records: Records) -> Records:
    """Return records of which some are missing, twice there, renamed or changed."""
    records = list(records)
    for _ in range(chance.choice([1, 1, 2])):
        if not records:
            break
        at = chance.randrange(len(records))
        (name, raw), (other, _) = records[at], chance.choice(records)
        names = [name.upper(), f"x/{name}", name + "\0x", other, name.partition("/")[2], "../../x"]
        names += ["archive/constants.pkl", "archive/data/1", "archive/data/00", "é" * 300, ""]
        changed = [(chance.choice(names), raw), (name, edit_bytes(chance, raw)), (other, raw)]
        changed += [(name, b"big"), (name, b""), (name, bytes(chance.choice([1, 1000, 10**5])))]
        kind = chance.randrange(4)
        records[at : at + (kind > 0)] = [] if kind == 1 else [chance.choice(changed)]
        if kind == 3:
            chance.shuffle(records)
    return records


def edit_torch_file(
    chance: random.Random,
    bases: list[Records],
    pool: list[bytes],
    others: list[bytes],
    nested: bool = True,
) -> bytes:
    """Return a file of torch.save in which one layer is edited: pickle, records, zip, or bytes.

    nested: some files are built to take much memory, time or stack.
    """
    records = chance.choice(bases)
    kind = chance.choices("prbzn", [60, 10, 8, 21, nested])[0]
    at = next(i for i, (name, _) in enumerate(records) if name.endswith("data.pkl"))
    text = records[at][1]
    if kind == "p":
        text = edit_pickle(chance, text, pool)
    elif kind == "n":
        text = nested_or_repeated(chance)
    elif chance.random() < 0.5:
        text = edit_bytes(chance, text, others)
    records = [*records[:at], (records[at][0], text), *records[at + 1 :]]
    if kind == "r":
        records = edit_records(chance, records)
    raw = zip_of(records, chance if kind in "rz" else None)
    return edit_bytes(chance, raw, others) if kind == "b" else raw


# ------------------------------------------------------------------------------------------ targets


def plain_values() -> list[Any]:
    """Return values that torch.save writes with different opcodes."""
    torch.manual_seed(0)
    w, parameter = torch.randn(3, 4), torch.nn.Parameter(torch.ones(2))
    moments = {"step": torch.tensor(3.0), "exp_avg": w.clone(), "exp_avg_sq": w.abs()}
    group = {"lr": 0.1, "betas": (0.9, 0.95), "params": ["w", "v"], "fused": True, "big": 10**15}
    config = {"lr": 1e-3, "arch": "gpt2", "steps": None, "compile": True, "chars": "aé\n\u2028"}
    optimizer = {"state": {"w": moments}, "param_groups": [group]}
    odd = (
        {1, 2.5, "x", (1, ("y", 2))},
        3 + 4j,
        w.shape,
        w.half(),
        w.bfloat16()[1:],
        w.to(torch.int8),
    )
    more = w.to(torch.float8_e4m3fn), w.bool(), w.to(torch.complex64), torch.device("cpu"), w.dtype
    return [
        {"model": {"w": w}},
        {"model": OrderedDict(w=w, v=w.T), "optimizers": [optimizer, {}], "step": 7, **config},
        {"model": {"p": parameter, "q": w[0]}, "config": {**config}, (1, (2, 3)): [odd], "m": more},
    ]


def torch_files(nested: bool = True) -> Callable[[random.Random], bytes]:
    """Return a function that makes a mutated file of torch.save. nested: see edit_torch_file."""
    raws = [torch_saved(value) for value in plain_values()]
    bases = [records_of(raw) for raw in raws]
    texts = [raw for base in bases for name, raw in base if name.endswith("data.pkl")]
    pool = sorted({op for text in texts for op in operations(text)}) + allowed_by_torch()
    return lambda chance: edit_torch_file(chance, bases, pool, raws, nested)


def checkpoint_name(raw: bytes, ending: str = ".pt") -> str:
    return f"step-00000007-{hashlib.sha256(raw).hexdigest()[:32]}{ending}"


def checkpoint(nested: bool = False) -> Target:
    """The newest checkpoint in --out. Only the user can write files there.

    So files are not built to do harm: torch.load can be made to hang, or to crash, by tuples that
    are nested deeply, or contain one another often, and are keys. UNSAFE has such files.
    """
    make = torch_files(nested)

    def sealed(chance: random.Random) -> Files:
        raw = make(chance)
        return {checkpoint_name(raw): raw}

    return Target(sealed, lambda folder: ckpt.newest(f"{folder}"), (ValueError,), False)


def file_of_others() -> Target:
    make = torch_files()

    def read(folder: Path) -> Any:
        with open(folder / "theirs.pt", "rb") as file:
            return reader.read(file)

    return Target(lambda chance: {"theirs.pt": make(chance)}, read, (ValueError,), True)


def manifest() -> Target:
    """The manifest, and the records in the files of the ranks, of a sharded checkpoint."""
    weights = [torch.arange(12.0).view(4, 3), torch.ones(2)]
    pieces = {
        "__0_0.distcp": [weights[0][:2], weights[1]],
        "__1_0.distcp": [weights[0][2:].clone()],
    }
    raws = {name: [torch_saved(t.clone()) for t in tensors] for name, tensors in pieces.items()}
    bases = [records_of(raw) for raws_of_file in raws.values() for raw in raws_of_file]
    pool = sorted({op for base in bases for op in operations(dict(base)["archive/data.pkl"])})
    pool += allowed_by_torch()
    others = [raw for raws_of_file in raws.values() for raw in raws_of_file]

    def make(chance: random.Random) -> Files:
        records = {name: list(raws_of_file) for name, raws_of_file in raws.items()}
        if chance.random() < 0.3:
            some = records[chance.choice(sorted(records))]
            some[chance.randrange(len(some))] = edit_torch_file(chance, bases, pool, others)
        a, b, c = len(records["__0_0.distcp"][0]), *(len(raw) for raw in records["__0_0.distcp"])
        files = {name: b"".join(of_file) for name, of_file in records.items()}
        listed = {name: [len(raw), ckpt_digest(raw)] for name, raw in files.items()}
        shards = [[[0, 0], [2, 3], "__0_0.distcp", 0, b]]
        shards += [[[2, 0], [2, 3], "__1_0.distcp", 0, len(files["__1_0.distcp"])]]
        small = [["torch.float32", [2], [[[0], [2], "__0_0.distcp", a, c]]]]
        table = {"model.w": ["torch.float32", [4, 3], shards], "model.b": small[0]}
        table |= {"optimizers.0.w.momentum_buffer": table["model.w"]}
        names = {"w": "w", "b": "b", "head": "w"}
        group = {"lr": 0.1, "params": ["w", "b"]}
        value = {"names": names, "optimizers": [[group]], "state": {"step": 7, "config": {}}}
        value |= {"files": listed, "tensors": table}
        text = json_of(chance, value) if chance.random() < 0.8 else json.dumps(value).encode()
        place = f"out/{checkpoint_name(text, '')}"
        return {f"{place}/{name}": raw for name, raw in {sharded.MANIFEST: text, **files}.items()}

    storage = sharded.storage(ckpt, reader.read, write_sharded=False)
    lazy = partial(
        sharded.load, ckpt, None
    )  # as with --checkpoint sharded; restore_ reads it later

    def read(folder: Path) -> Any:
        return ckpt.newest(f"{folder}/out", lazy), storage.newest(f"{folder}/out")

    return Target(make, read, (ValueError,), True)


def ckpt_digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def npy_of(array: np.ndarray, version: tuple[int, int]) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version)
    return file.getvalue()


def data_file(ending: str, bases: list[bytes], header: int, words: list[bytes]) -> Target:
    """A token file. header: the bytes at its beginning where most of the changes are."""

    def make(chance: random.Random) -> Files:
        raw = chance.choice(bases)
        at = min(header, len(raw)) if chance.random() < 0.8 else len(raw)
        return {f"tokens{ending}": edit_bytes(chance, raw[:at], [*bases, *words]) + raw[at:]}

    def read(folder: Path) -> Any:
        corpus = chardata.read([f"{folder}/tokens{ending}"], "char")
        batches = chardata.every_window(chardata.BatchPlan(corpus.tokens, 8, 8, vocab=corpus.vocab))
        return [(x.sum(), y.sum()) for x, y in batches]

    return Target(make, read, (ValueError, OSError), True)


def npy() -> Target:
    arrays = [np.arange(300, dtype=kind) for kind in ("u1", "<u2", ">u4", "u8", "i4", "f4")]
    arrays += [np.zeros((3, 4), "u2"), np.array([None, "x"], object), np.zeros(0, "u2")]
    raws = [npy_of(array, version) for array in arrays for version in ((1, 0), (2, 0), (3, 0))]
    words = [
        b"(300,)",
        b"(10**9,)",
        b"(-1,)",
        b"()",
        b"True",
        b"'|O'",
        b"'<u2'",
        b"'|V9'",
        b"[" * 99,
    ]
    words += [b"('u1', (2, 3))", b"[('a', 'u2')]", b"(1000000000000,)", b"((", b"lambda: 0", b"1e9"]
    return data_file(".npy", raws, 128, words)


def bin_file() -> Target:
    tokens = np.arange(300, dtype="<u2").tobytes()
    llm_c = struct.pack("<256i", 20240520, 1, 300, *[0] * 253) + tokens
    return data_file(".bin", [tokens, llm_c, llm_c], 12, [struct.pack("<i", 20240520)])


CHARS = "\n abcdefg"


def small_model(arch: str) -> exchange.Model:
    """Return the smallest model, in the form that extras/export.py writes."""
    model = gpt.build(gpt.Config(len(CHARS), 8, 2, 2, 4, arch=arch), seed=0)
    settings = {key: value for key, value in model.config._asdict().items() if key != "dropout"}
    return exchange.Model(settings, {"kind": "char", "chars": CHARS}, model.state_dict())


def exported(format: str, arch: str = "gpt2") -> Files:
    """Return the files that extras/export.py writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model")
        export.write(
            small_model(arch), format, f"{path}", exchange.to_gpt2, exchange.make_tokenizer
        )
        paths = [path] if path.is_file() else [*path.iterdir()]
        return {path.name: path.read_bytes() for path in paths}


def import_model(folder: Path) -> Any:
    """Read the model in a folder, build it and give it its weights, as run.py does."""
    path = folder / "model" if (folder / "model").exists() else folder
    found = exchange.read(f"{path}", reader.read)
    model = gpt.build(gpt.Config(**found.config), seed=0)
    ckpt.check_same(found.weights, model.state_dict())
    return model.load_state_dict(found.weights)


def edit_safetensors(chance: random.Random, raw: bytes) -> bytes:
    """Return a safetensors file with an edited header, whose length is right in most cases."""
    size = int.from_bytes(raw[:8], "little")
    header, body = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    about = header.get("__metadata__", {})
    if "ddpkit" in about and chance.random() < 0.5:
        about["ddpkit"] = json_of(chance, json.loads(about["ddpkit"])).decode("utf-8", "replace")
        text = json.dumps(header).encode()
    else:
        text = json_of(chance, header)
    if chance.random() < 0.1:
        text, body = text, edit_bytes(chance, body)
    size = len(text) if chance.random() < 0.95 else chance.choice(NUMBERS) % 2**64
    return size.to_bytes(8, "little") + text + body


IMPORT_ERRORS = (ValueError, OSError)


def safetensors() -> Target:
    bases = [exported("safetensors", arch)["model"] for arch in ("gpt2", "modern", "modern2")]

    def make(chance: random.Random) -> Files:
        raw = chance.choice(bases)
        if chance.random() < 0.15:
            return {"model": edit_bytes(chance, raw, bases)}
        return {"model": edit_safetensors(chance, raw)}

    return Target(make, import_model, IMPORT_ERRORS, True)


def hugging_face() -> Target:
    base = exported("hf")

    def make(chance: random.Random) -> Files:
        files = dict(base)
        for name in chance.sample(sorted(files), chance.choice([1, 1, 2])):
            if name.endswith(".json"):
                files[name] = json_of(chance, json.loads(files[name]))
            else:
                files[name] = edit_safetensors(chance, files[name])
        return files

    return Target(make, import_model, IMPORT_ERRORS, True)


def nanogpt() -> Target:
    raw = exported("nanogpt")["ckpt.pt"]
    value = torch.load(io.BytesIO(raw), weights_only=True)
    bases = [records_of(raw)]
    (text,) = (raw for name, raw in bases[0] if name.endswith("data.pkl"))
    pool = sorted(set(operations(text))) + allowed_by_torch()

    def make(chance: random.Random) -> Files:
        if chance.random() < 0.5:
            return {"ckpt.pt": edit_torch_file(chance, bases, pool, [raw])}
        with warnings.catch_warnings(action="ignore"):
            return {"ckpt.pt": saved_or(raw, edit_tensors(chance, edit_value(chance, value)))}

    return Target(make, import_model, IMPORT_ERRORS, True)


def saved_or(otherwise: bytes, value: Any) -> bytes:
    """Return torch_saved(value), or `otherwise` if the value is nested too deeply for pickle."""
    try:
        return torch_saved(value)
    except (RecursionError, UnicodeError):
        return otherwise


def edit_tensors(chance: random.Random, value: Any) -> Any:
    """Give some tensors in nested dicts another shape, dtype or content."""
    found = [(c, k) for c, k in places(value) if isinstance(c[k], torch.Tensor)]
    for container, key in chance.sample(found, min(len(found), chance.choice([0, 1, 1, 3]))):
        tensor = container[key]
        kinds = [torch.float16, torch.int64, torch.bool, torch.complex64, torch.float8_e5m2]
        changes = [
            lambda: tensor.flatten(),
            lambda: tensor[:0],
            lambda: tensor[..., :0],
            lambda: tensor.reshape(-1)[:1].squeeze(),
            lambda: tensor * math.nan,
            lambda: tensor.to(chance.choice(kinds)),
            lambda: tensor.T if tensor.ndim == 2 else tensor[None],
            lambda: tensor.to_sparse(),
            lambda: tensor.to("meta"),
            lambda: tensor[:1].expand(100_000, *tensor.shape[1:]),
            lambda: torch.zeros(0, chance.choice([10**4, 10**6, 10**12])),
            lambda: torch.nn.Parameter(tensor),
        ]
        with suppress(RuntimeError, IndexError, TypeError):  # not possible for this tensor
            container[key] = chance.choice(changes)()
    return value


def tokenizer() -> Target:
    """A tokenizer.json of the package tokenizers."""
    from extras import tokenizer

    base = [exchange.make_tokenizer(kind, CHARS) for kind in ("char", "byte")]
    merged = exchange.make_tokenizer("byte", "")
    merged["model"]["vocab"] |= {"ab": 256, "cd": 257, "abcd": 258, "<s>": 259}
    merged["model"]["merges"] = [["a", "b"], ["c", "d"], ["ab", "cd"]]
    token = {"id": 259, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False}
    merged["added_tokens"] = [{**token, "normalized": False, "special": True}]
    merged["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFC"}]}
    base.append(merged)

    def make(chance: random.Random) -> Files:
        return {"tokenizer.json": json_of(chance, chance.choice(base))}

    def read(folder: Path) -> Any:
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        vocab = tokenizer.size(text)
        ids = tokenizer.encode("abcd <s> gfe\n", "tokenizer", text)
        return vocab, list(tokenizer.decode([*ids.tolist(), 0, 1, vocab - 1], "tokenizer", text))

    return Target(make, read, (ValueError,), True)


def toml() -> Target:
    import click

    import run

    lines = (
        "batch-size = 64\nlr = 1e-3\ncompile = true\ndata = 'text.txt'\nout = \"o\"\nsteps = 5\n"
    )
    lines += "val_fraction = 0.1\narch = 'gpt2'\nspawn = 2\ndtype = 'auto'\nkeep = 3\n"
    words = [
        b"[a]",
        b"[[a]]",
        b"{a=1}",
        b"nan",
        b"inf",
        b"1979-05-27",
        b"0x10",
        b"''",
        b"= [",
        b".",
    ]
    words += [
        b"[" * 2000,
        b"a." * 2000,
        b"\xff",
        b"\\uD800",
        b'"""',
        b"lr",
        b"-1",
        b"1e999",
        b"data",
    ]
    words += [f"{name} = 1\n".encode() for name in vars(run.Flags())]

    def make(chance: random.Random) -> Files:
        raw = "".join(chance.sample(lines.splitlines(True), chance.choice([1, 3, 11]))).encode()
        if chance.random() < 0.5:
            key, value = chance.choice(lines.splitlines()).split(" = ")[0], chance.choice(VALUES)
            raw += f"{key} = {json.dumps(value)}\n".encode()
        return {"run.toml": edit_bytes(chance, raw, words)}

    def read(folder: Path) -> Any:
        # make_context is all that click does before it calls a command
        known = [*vars(run.Flags())]
        flags.read_toml(f"{folder}/run.toml", known)
        context = run.cli.make_context("run.py", ["--config", f"{folder}/run.toml"])
        return run.Flags(**context.params)

    return Target(make, read, (click.ClickException,), True)


def harm(what: str) -> Any:
    """Do what must not happen while a file is read."""
    if what == "code":
        return pickle.loads(b"\x80\2" + CANARIES[0] + b".")
    if what == "program":
        return os.system("true")
    if what == "file":
        return Path("canary").write_text("")
    if what == "warning":
        return warnings.warn("careful", stacklevel=1)
    if what == "crash":
        return os.kill(os.getpid(), signal.SIGSEGV)
    if what == "wait":
        return signal.pause()
    if what == "memory":
        return len(b"x" * (GROWTH + 5_000_000))
    while what == "loop":
        pass
    raise KeyError("this is not in the docstring")


def harmful(what: str) -> Target:
    """Return a target of which inputs 1 and 3 do harm."""

    def make(chance: random.Random) -> Files:
        return {"x": chance.randbytes(4)}

    inputs = [make(random.Random(f"{what} {seed}"))["x"] for seed in (1, 3)]

    def read(folder: Path) -> Any:
        return harm(what) if (folder / "x").read_bytes() in inputs else None

    return Target(make, read, (ValueError,), True)


HARMFUL_TARGETS = "code program file warning crash wait memory loop error".split()
UNSAFE = {what: partial(harmful, what) for what in HARMFUL_TARGETS}
UNSAFE["checkpoint, nested"] = partial(checkpoint, True)
TARGETS: dict[str, Callable[[], Target]] = {
    "checkpoint": checkpoint,
    "file of other people": file_of_others,
    "manifest": manifest,
    "npy": npy,
    "bin": bin_file,
    "safetensors": safetensors,
    "Hugging Face": hugging_face,
    "nanoGPT": nanogpt,
    "tokenizer": tokenizer,
    "toml": toml,
}


# --------------------------------------------------------------------------------------- the limits

seen: list[str] = []  # what the audit hook and warnings report while an input is read
watching = False


def report(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook."""
    if watching and (event in CODE_RUNS or (event == "open" and is_writing(*arguments[1:3]))):
        seen.append(f"{event} {arguments[0] if arguments else ''}")


def is_writing(mode: Any, flags: Any) -> bool:
    bits = os.O_WRONLY | os.O_RDWR | os.O_CREAT
    return bool(set("wax+") & set(mode)) if isinstance(mode, str) else bool((flags or 0) & bits)


def memory(what: str) -> int:
    """Return VmRSS, VmHWM (the highest VmRSS) or VmData of this process in bytes."""
    with open("/proc/self/status", "rb") as file:
        return 1024 * int(re.search(rb"%s:\s+(\d+)" % what.encode(), file.read())[1])


def outcome(target: Target, files: Files, folder: Path) -> tuple[str, str]:
    """Read an input. Return "loaded", "refused" or "failed", and why."""
    global watching
    for name, raw in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(raw)
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest VmRSS until now
    before = memory("VmRSS")
    seen.clear()
    watching, failure, refused = True, "", ""
    try:
        target.read(folder)
    except target.refusals as error:
        refused = f"{type(error).__name__}: {error}"
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [f for f in frames if f.filename.startswith(f"{ROOT}") and f.filename != __file__]
        where = f"{Path(ours[-1].filename).name}, {ours[-1].name}" if ours else "?"
        failure = f"{type(error).__name__} in {where}: {error}"
    except BaseException as error:  # the panic of a package in Rust
        failure = f"{type(error).__name__}: {error}"
    finally:
        watching = False
    growth = memory("VmHWM") - before
    size = sum(map(len, files.values()))
    if seen:
        failure = f"reported: {seen[0]}"
    elif target.from_others and growth > GROWTH + GROWTH_PER_BYTE * size and not failure:
        failure = f"memory: {growth // 1_000_000} MB for {size} bytes"
    clear(folder)
    return ("failed", failure) if failure else ("refused", refused) if refused else ("loaded", "")


def clear(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def kind_of(text: str) -> str:
    """Return a message without the numbers and names that differ from input to input."""
    return re.sub(r"[0-9a-f]{32}|0x\w+|\d+|'[^']*'|\"[^\"]*\"|/\S+", "_", text.split("\n")[0])[:90]


def read_inputs(
    target: Target,
    name: str,
    first: int,
    end: int,
    folder: Path,
    shared: mmap.mmap,
    log: Any,
    wait: float,
) -> None:
    """Read the inputs from `first` to `end` in this process, which a limit may end."""
    data, known = memory("VmData"), set()
    resource.setrlimit(resource.RLIMIT_DATA, (data + HEADROOM, data + HEADROOM))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for seed in range(first, end):
        struct.pack_into("<Q", shared, 0, seed)
        files = target.make(random.Random(f"{name} {seed}"))
        limit = SECONDS + SECONDS_PER_BYTE * sum(map(len, files.values()))
        signal.setitimer(signal.ITIMER_PROF, limit if target.from_others else 30 * limit)
        signal.setitimer(signal.ITIMER_REAL, wait)
        result, why = outcome(target, files, folder)
        signal.setitimer(signal.ITIMER_PROF, 0)
        at = 8 * (1 + ["loaded", "refused", "failed"].index(result))
        struct.pack_into("<Q", shared, at, struct.unpack_from("<Q", shared, at)[0] + 1)
        if result == "failed" or (why and kind_of(why) not in known):
            known.add(kind_of(why))
            line = {"seed": seed, "result": result, "kind": kind_of(why), "why": why[:300]}
            log.write(json.dumps(line) + "\n")
            log.flush()


def cpu_time_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def fuzz(name: str, first: int, count: int, wait: float) -> dict[str, Any]:
    """Read `count` inputs. Return counts, and the failures and refusals: {kind: [why, seeds]}."""
    torch.set_num_threads(1)
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
    sys.dont_write_bytecode = True
    target = {**TARGETS, **UNSAFE}[name]()
    memory_folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    shared, seed = mmap.mmap(-1, 64), first
    began, cpu_time = time.monotonic(), cpu_time_of_children()
    with (
        tempfile.TemporaryDirectory(dir=memory_folder) as folder,
        tempfile.TemporaryFile("w+") as log,
    ):
        inputs = Path(folder, "inputs")
        inputs.mkdir()
        os.chdir(inputs)
        for seed in range(
            5 if name in TARGETS else 0
        ):  # the first use of a function imports modules
            with suppress(Exception):
                outcome(target, target.make(random.Random(seed)), inputs)
        seed = first
        gc.freeze()
        while seed < first + count:
            pid = os.fork()
            if not pid:
                errors = os.fdopen(os.dup(2), "w")
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, 1)
                os.dup2(nowhere, 2)
                try:
                    warnings.simplefilter("always")
                    warnings.showwarning = lambda text, *_, **__: seen.append(f"warning: {text}")
                    sys.addaudithook(report)
                    read_inputs(target, name, seed, first + count, inputs, shared, log, wait)
                    os._exit(0)
                except BaseException:
                    traceback.print_exc(file=errors)
                    errors.flush()
                    os._exit(1)
            _, status = os.waitpid(pid, 0)
            if os.WIFEXITED(status):
                assert status == 0, "the fuzzer itself has failed; see above"
                break
            (seed,) = struct.unpack_from("<Q", shared)
            why = f"{signal.Signals(os.WTERMSIG(status)).name}"
            log.write(
                json.dumps({"seed": seed, "result": "failed", "kind": why, "why": why}) + "\n"
            )
            struct.pack_into("<Q", shared, 24, struct.unpack_from("<Q", shared, 24)[0] + 1)
            log.flush()  # the next child must not write it again
            clear(inputs)
            seed += 1
        os.chdir(ROOT)
        log.seek(0)
        lines = [json.loads(line) for line in log]
    found: dict[str, Any] = {"failed": {}, "refused": {}}
    for line in lines:
        kinds = found[line["result"]]
        kinds.setdefault(line["kind"], [line["why"], []])[1].append(line["seed"])
    loaded, refused, failed = struct.unpack_from("<3Q", shared, 8)
    counts = {"inputs": loaded + refused + failed, "loaded": loaded, "refused_inputs": refused}
    times = {
        "cpu_s": round(cpu_time_of_children() - cpu_time, 1),
        "s": round(time.monotonic() - began),
    }
    return {"target": name, **counts, "failures": failed, **times, **found}


def repeat(name: str, seed: int, keep: str | None) -> None:
    """Read one input in this process, without limits, and print its traceback."""
    target = {**TARGETS, **UNSAFE}[name]()
    files = target.make(random.Random(f"{name} {seed}"))
    with tempfile.TemporaryDirectory() as folder:
        for where in filter(None, (folder, keep)):
            for file, raw in files.items():
                Path(where, file).parent.mkdir(parents=True, exist_ok=True)
                Path(where, file).write_bytes(raw)
        print({file: len(raw) for file, raw in files.items()})
        print(repr(target.read(Path(folder)))[:1000])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", nargs="+", choices=[*TARGETS, *UNSAFE])
    parser.add_argument("--seed", type=int, help="read this input alone, and print its traceback")
    parser.add_argument("--keep", help="an existing folder for the files of this input")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--wait", type=float, default=60, help="seconds of time for one input")
    chosen = parser.parse_args()
    if chosen.seed is not None:
        repeat(chosen.target[0], chosen.seed, chosen.keep)
    else:
        for name in chosen.target:
            print(json.dumps(fuzz(name, chosen.first, chosen.count, chosen.wait)), flush=True)
