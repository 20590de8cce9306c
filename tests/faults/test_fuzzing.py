"""Files that are changed at random, with right digests, are loaded or refused, and no code in them runs.

A child process reads BLOCK files for each trial, because a file can crash torch. Everything about a file follows from
its number, which the failed test prints.
"""

import hashlib
import io
import json
import multiprocessing
import os
import pickle
import pickletools
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

import chardata
import ckpt
import gpt
from extras import exchange, export, sharded

pytest.importorskip("safetensors")
BLOCK, SECONDS = 200, 60
Files = dict[str, bytes]  # the name of a file -> its content
REFUSALS = (ValueError, OSError, ImportError, MemoryError)
FORBIDDEN = "os.system os.exec os.fork os.posix_spawn subprocess.Popen pickle.find_class".split()
NUMBERS = [0, 1, -1, 7, 255, 65536, 10**9, 2**31, -(2**31), 2**63, 2**64 - 1, 10**30]
VALUES = [None, True, 0.5, float("nan"), "", "a" * 5000, "../x", "\ud800", [], {}, [[]], *NUMBERS]
VALUES += ["torch.uint8", "torch.load", "gpt2", "char"]
WORDS = [b"[" * 5000, b"NaN", b"\xff", b"(10**9,)", b"(1000000000000,)", b"(-1,)", b"'|O'", b"u1"]
WORDS += [n.to_bytes(16, "little", signed=True)[:size] for n in NUMBERS for size in (1, 4, 8)]

# ----------------------------------------------------------------------------------------- mutation


def edit(chance: random.Random, what: Any, pieces: list[Any]) -> Any:
    """Return bytes or a list in which some parts are left out, replaced, repeated or moved."""
    for _ in range(chance.choice([1, 1, 2, 8])):
        i, size = chance.randrange(len(what) + 1), chance.choice([0, 1, 2, 4, 16, 1000])
        old, new = what[i : i + size], chance.choice(pieces)
        middle = chance.choice([what[:0], new, new, new + old, old * 40, old[::-1]])
        what = what[:i] + middle + what[i + size :]
    return what


def edit_bytes(chance: random.Random, raw: bytes) -> bytes:
    at = chance.choice([len(raw), 200])  # many changes in the header
    return edit(chance, raw[:at], [*WORDS, chance.randbytes(4)]) + raw[at:]


def edit_json(chance: random.Random, raw: bytes) -> bytes:
    """Return a JSON text in which some values are others, moved or missing."""
    value = json.loads(raw)
    for _ in range(chance.choice([1, 1, 2, 6])):
        places, left = [], [value]
        while left:
            container = left.pop()
            if isinstance(container, (dict, list)):
                keys = [*container] if isinstance(container, dict) else [*range(len(container))]
                places += [(container, key) for key in keys]
                left += [container[key] for key in keys]
        (container, key), (other, where) = chance.choice(places), chance.choice(places)
        container[key] = chance.choice([*VALUES, pickle.loads(pickle.dumps(other[where]))])
        if chance.random() < 0.2:
            del container[key]
    return json.dumps(value).encode()


def edit_safetensors(chance: random.Random, raw: bytes) -> bytes:
    size = int.from_bytes(raw[:8], "little")
    header = edit_json(chance, raw[8 : 8 + size])
    return len(header).to_bytes(8, "little") + header + raw[8 + size :]


# Each calls a function with the argument "true".
HARMFUL = [
    b"c%b\nX\4\0\0\0true\x85R" % name
    for name in (b"os\nsystem", b"posix\nsystem", b"builtins\nexec", b"torch\nload")
]
OPERATIONS = [*HARMFUL, b"ccollections\nOrderedDict\n", b"q\0", b"h\0", b"h\1"]
OPERATIONS += [bytes([code]) for code in b"Rb\x81\x85\x86)]}(tQsueN\x88.021io\x93"]
OPERATIONS += [b"\x8a\x11" + number.to_bytes(17, "little", signed=True) for number in NUMBERS]


def edit_torch(chance: random.Random, raw: bytes) -> bytes:
    """Return a file of torch.save with other opcodes in its pickle, or with changed or missing records."""
    copy = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as old, zipfile.ZipFile(copy, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name.endswith("data.pkl"):
                starts = [position for _, _, position in pickletools.genops(content)]
                text = [content[a:b] for a, b in zip(starts, [*starts[1:], len(content)])]
                pieces = [[operation] for operation in [*OPERATIONS, *chance.choices(text, k=20)]]
                content = b"".join([*edit(chance, text, pieces), b"."])
            elif chance.random() < 0.02:
                content = edit_bytes(chance, content)
            if chance.random() < 0.99:
                new.writestr(name, content)
    return copy.getvalue()


def change(chance: random.Random, files: Files, only: str) -> Files:
    """Return the files with changes in one of them, mostly such that its parser is reached."""
    name = chance.choice(sorted(name for name in files if name.endswith(only)))
    edits = {".json": edit_json, ".pt": edit_torch, ".safetensors": edit_safetensors}
    by_kind = edits.get(Path(name).suffix, edit_bytes)
    return {**files, name: chance.choice([by_kind] * 4 + [edit_bytes])(chance, files[name])}


# ------------------------------------------------------------------------------------------ targets


class Target(NamedTuple):
    bases: list[Files]
    read: Callable[[Path], object]  # gets the folder with the files
    only: str = ""  # the end of the names of the files that are changed
    seal: Callable[[Files], Files] = dict  # gives the files the names that have their digests


def sealed_name(raw: bytes) -> str:
    return f"step-00000007-{hashlib.sha256(raw).hexdigest()[:32]}"


def checkpoint() -> Target:
    w, bases = torch.randn(3, 4), []
    moments = {"step": torch.tensor(3.0), "exp_avg": w.clone(), "exp_avg_sq": w.T}
    group = {"lr": 0.1, "betas": (0.9, 0.95), "params": ["w"], "fused": True, "big": 10**15}
    more = {"optimizers": [{"state": {"w": moments}, "param_groups": [group]}], "step": 7}
    odd = [{1, "x", (2, ("y", 3))}, 3 + 4j, w.shape, w.bfloat16()[1:], w.bool(), w.dtype]
    for values in ({}, more, {(1, 2): odd, "p": torch.nn.Parameter(w)}):
        torch.save({"model": {"w": w}, **values}, file := io.BytesIO())
        bases.append({"x.pt": file.getvalue()})

    def seal(files: Files) -> Files:
        return {f"{sealed_name(raw)}.pt": raw for raw in files.values()}

    return Target(bases, lambda folder: ckpt.newest(f"{folder}"), seal=seal)


def files_below(folder: Path) -> Files:
    files = (path for path in folder.rglob("[!.]*") if path.is_file())
    return {f"{path.relative_to(folder)}": path.read_bytes() for path in files}


def manifest() -> Target:
    """The manifest of a sharded checkpoint."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    storage, model = sharded.storage(ckpt, write_sharded=True), torch.nn.Linear(2, 3)
    with tempfile.TemporaryDirectory() as folder:
        storage.save(folder, storage.snapshot(model, [torch.optim.AdamW(model.parameters())]), 7)
        base = files_below(Path(folder))

    def seal(files: Files) -> Files:
        (text,) = (raw for name, raw in files.items() if name.endswith(".json"))
        return {f"{sealed_name(text)}/{Path(name).name}": raw for name, raw in files.items()}

    readers = storage.newest, sharded.storage(ckpt, write_sharded=False).newest
    return Target([base], lambda folder: [new(f"{folder}") for new in readers], ".json", seal)


def tokens(ending: str) -> Target:
    bases = []
    for array in [*(np.arange(300).astype(kind) for kind in "u1 <u2 >u4 i4 f4 V9".split())]:
        np.save(file := io.BytesIO(), array)
        bases.append(file.getvalue())
    if ending == ".bin":
        plain = np.arange(300, dtype="<u2").tobytes()
        bases = [plain, struct.pack("<256i", 20240520, 1, 300, *[0] * 253) + plain]

    def read(folder: Path) -> object:
        corpus = chardata.read([f"{folder}/tokens{ending}"], "char")
        plan = chardata.BatchPlan(corpus.tokens, 8, 8, vocab=corpus.vocab)
        return [(x.sum(), y.sum()) for x, y in chardata.every_window(plan)]

    return Target([{f"tokens{ending}": base} for base in bases], read)


def model_file(format: str, *archs: str) -> Target:
    """A model in a format of extras/export.py, which is read, built and loaded as run.py does."""
    bases, name = [], "ckpt.pt" if format == "nanogpt" else "model.safetensors"
    for arch in archs:
        model = gpt.build(gpt.Config(9, 8, 2, 2, 4, arch=arch), seed=0)
        config = {key: value for key, value in model.config._asdict().items() if key != "dropout"}
        whole = exchange.Model(config, {"kind": "char", "chars": "\n abcdefg"}, model.state_dict())
        with tempfile.TemporaryDirectory() as folder:
            how = exchange.to_gpt2, exchange.make_tokenizer
            if format == "nanogpt":
                theirs = exchange.to_gpt2(whole.weights, 2)
                theirs = {n: w.T if ".h." in n and w.ndim == 2 else w for n, w in theirs.items()}
                torch.save({"model": theirs, "model_args": {"n_head": 2}}, f"{folder}/{name}")
            else:
                export.write(whole, format, f"{folder}/{name}", *how)
            bases.append(files_below(Path(folder)))

    def read(folder: Path) -> object:
        found = exchange.read(f"{folder}/{name}")
        model = gpt.build(gpt.Config(**found.config), seed=0)
        ckpt.check_same(found.weights, model.state_dict())
        return model.load_state_dict(found.weights)

    return Target(bases, read)


TARGETS: dict[str, Callable[[], Target]] = {
    "checkpoint": checkpoint,
    "manifest": manifest,
    "npy": partial(tokens, ".npy"),
    "bin": partial(tokens, ".bin"),
    "safetensors": partial(model_file, "safetensors", "gpt2", "modern", "modern2"),
    "Hugging Face": partial(model_file, "hf", "gpt2"),
    "nanoGPT": partial(model_file, "nanogpt", "gpt2"),
    "harmful code": lambda: Target([{"x": b"x"}], lambda _: pickle.loads(HARMFUL[0] + b".")),
    "a crash": lambda: Target([{"x": b"x"}], lambda _: os.kill(os.getpid(), signal.SIGSEGV)),
}


def forbid(event: str, arguments: tuple[Any, ...]) -> None:
    """End this process if code in a file runs; an audit hook."""
    if event in FORBIDDEN:
        os.abort()


def read_inputs(name: str, first: int, folder: Path, progress: Any) -> None:
    """Read BLOCK inputs. progress: the number of the input, how many were loaded, how many refused."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
    target = TARGETS[name]()
    sys.addaudithook(forbid)
    for progress[0] in range(first, first + BLOCK):
        chance = random.Random(f"{name} {progress[0]}")
        files = target.seal(change(chance, chance.choice(target.bases), target.only))
        for file, raw in files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(raw)
        signal.alarm(SECONDS)
        try:
            target.read(folder)
            progress[1] += 1
        except REFUSALS:
            progress[2] += 1
        shutil.rmtree(folder)


def read_in_child(name: str, number: int, folder: Path) -> tuple[int, list[int]]:
    """Return the exit code of the process, and its progress. The traceback is on stderr."""
    context = multiprocessing.get_context("fork")
    progress = context.Array("q", 3)
    arguments = name, BLOCK * number, folder / "inputs", progress
    child = context.Process(target=read_inputs, args=arguments)
    child.start()
    child.join()
    return child.exitcode, [*progress]


@pytest.mark.torture
@pytest.mark.parametrize("name", [*TARGETS][:-2])
def test_a_changed_file_is_loaded_or_refused(name, trials, tmp_path):
    def trial(number: int) -> None:
        code, (at, loaded, refused) = read_in_child(name, number, tmp_path)
        assert code == 0, f"input {at} of {name} ended the process with code {code}; see stderr"
        assert min(loaded, refused) > BLOCK / 100, (loaded, refused)

    trials(f"changed files: {name}", trial, few=1, many=500, each=BLOCK, at_once=1)


@pytest.mark.parametrize("name", [*TARGETS][-2:])
def test_harm_would_be_noticed(name, tmp_path):
    code, progress = read_in_child(name, 0, tmp_path)
    assert code in (-signal.SIGABRT, -signal.SIGSEGV) and progress == [0, 0, 0]
