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
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import pytest
import torch
import torch.distributed as dist

import chardata
import ckpt
import gpt
import run as program
from extras import exchange, export, sharded, tokenizer

BLOCK, SECONDS = 200, 60
Files = dict[str, bytes]  # the name of a file -> its content
REFUSALS = (ValueError, OSError, ImportError, MemoryError, click.ClickException)
FORBIDDEN = (
    "os.system os.exec os.fork os.posix_spawn subprocess.Popen pickle.find_class exec".split()
)
NUMBERS = [0, 1, -1, 7, 255, 65536, 10**9, 2**31, -(2**31), 2**63, 2**64 - 1, 10**30]
VALUES = [None, True, 0.5, float("nan"), 1e300, "", "x", "a" * 5000, "\ud800", "../x", "torch.load"]
VALUES += [[], {}, [[]], {"x": 1}, "torch.uint8", "gpt2", "char", *NUMBERS]
WORDS = [b"[" * 5000, b"NaN", b"\xff", b"(10**9,)", b"(1000000000000,)", b"(-1,)", b"'|O'", b"((u1"]
WORDS += [n.to_bytes(16, "little", signed=True)[:size] for n in NUMBERS for size in (1, 4, 8)]

# ----------------------------------------------------------------------------------------- mutation


def edit(chance: random.Random, what: Any, pieces: Sequence[Any]) -> Any:
    """Return bytes or a list in which some parts are left out, replaced, repeated or reversed."""
    for _ in range(chance.choice([1, 1, 2, 8])):
        i = chance.randrange(len(what) + 1)
        j = i + chance.choice([0, 1, 2, 4, 16, 1000])
        new, old = chance.choice(pieces), what[i:j]
        middle = [what[:0], new, new, old + new, old * chance.choice([2, 40]), old[::-1]]
        what = what[:i] + chance.choice(middle) + what[j:]
    return what


def edit_bytes(chance: random.Random, raw: bytes) -> bytes:
    at = chance.choice([len(raw), 200])  # many changes in the header
    return edit(chance, raw[:at], [*WORDS, chance.randbytes(4), chance.randbytes(1)]) + raw[at:]


def edit_json(chance: random.Random, raw: bytes) -> bytes:
    """Return a JSON text in which values are others, moved, renamed, missing, or nested deeply."""
    whole = [json.loads(raw)]
    for _ in range(chance.choice([1, 1, 2, 6])):
        places, left = [], [whole]
        while left:
            container = left.pop()
            if isinstance(container, (dict, list)):
                keys = container if isinstance(container, dict) else range(len(container))
                places += [(container, key) for key in keys]
                left += [container[key] for key in keys]
        (container, key), (other, where) = chance.choice(places), chance.choice(places)
        kind = chance.randrange(5)
        if kind == 0 and container is not whole:
            del container[key]
        elif kind == 1 and isinstance(container, dict):
            container[f"{where}"] = container.pop(key)
        else:
            values = [*VALUES, pickle.loads(pickle.dumps(other[where]))]
            container[key] = chance.choice(values)
    return json.dumps(whole[0]).encode()


def edit_safetensors(chance: random.Random, raw: bytes) -> bytes:
    size = int.from_bytes(raw[:8], "little")
    header = edit_json(chance, raw[8 : 8 + size])
    return len(header).to_bytes(8, "little") + header + raw[8 + size :]


def operations(text: bytes) -> list[bytes]:
    """Return the opcodes of a pickle, each with its argument."""
    starts = [position for _, _, position in pickletools.genops(text)]
    return [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)])]


def names(text: str) -> list[bytes]:
    """Return the opcodes that look up these functions."""
    return [b"c" + b"\n".join(name.encode().rpartition(b".")[::2]) + b"\n" for name in text.split()]


CALL = b"X\4\0\0\0true\x85R"  # with the argument "true"
HARMFUL = [
    name + CALL for name in names("os.system posix.system builtins.exec torch.load builtins.eval")
]
OPERATIONS = [
    *HARMFUL,
    *names("torch.device collections.OrderedDict torch._utils._rebuild_tensor_v2"),
]
OPERATIONS += [
    b"R",
    b"b",
    b"\x81",
    b"\x85",
    b"\x86",
    b")",
    b"]",
    b"}",
    b"(",
    b"t",
    b"Q",
    b"s",
    b"u",
]
OPERATIONS += [b"e", b"N", b"\x88", b".", b"0", b"2", b"q\0", b"h\0", b"h\1", b"i", b"o", b"\x93"]
OPERATIONS += [b"\x8a\x11" + number.to_bytes(17, "little", signed=True) for number in NUMBERS]


def edit_torch(chance: random.Random, raw: bytes) -> bytes:
    """Return a file of torch.save with other opcodes in its pickle, or other records."""
    copy = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as old, zipfile.ZipFile(copy, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name.endswith("data.pkl"):
                text = operations(content)
                pieces = [[operation] for operation in [*OPERATIONS, *chance.choices(text, k=20)]]
                content = b"".join([*edit(chance, text, pieces), b"."])
            elif chance.random() < 0.02:
                content = edit_bytes(chance, content)
            if chance.random() < 0.99:
                new.writestr(name, content)
    return copy.getvalue()


EDITS = {".json": edit_json, ".pt": edit_torch, ".safetensors": edit_safetensors}


def change(chance: random.Random, files: Files, only: str) -> Files:
    """Return the files with changes in one of them, mostly such that its parser is reached."""
    name = chance.choice(sorted(name for name in files if name.endswith(only)))
    by_kind = EDITS.get(Path(name).suffix, edit_bytes)
    try:
        return {**files, name: chance.choice([by_kind] * 4 + [edit_bytes])(chance, files[name])}
    except RecursionError:  # nested too deeply for json.dumps
        return {**files, name: b"[" * 100_000}


# ------------------------------------------------------------------------------------------ targets


class Target(NamedTuple):
    bases: list[Files]
    read: Callable[[Path], object]  # gets the folder with the files
    only: str = ""  # the end of the names of the files that are changed
    seal: Callable[[Files], Files] = dict  # gives the files the names that have their digests


def torch_saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def checkpoint_name(raw: bytes) -> str:
    return f"step-00000007-{hashlib.sha256(raw).hexdigest()[:32]}"


def checkpoint() -> Target:
    w = torch.randn(3, 4)
    group = {"lr": 0.1, "betas": (0.9, 0.95), "params": ["w"], "fused": True, "big": 10**15}
    moments = {"step": torch.tensor(3.0), "exp_avg": w.clone(), "exp_avg_sq": w.T}
    odd = [{1, "x", (2, ("y", 3))}, 3 + 4j, w.shape, w.bfloat16()[1:], w.bool(), w.dtype]
    more = {"optimizers": [{"state": {"w": moments}, "param_groups": [group]}], "step": 7}
    states = [{"model": {"w": w}}, {"model": OrderedDict(w=w, v=torch.nn.Parameter(w)), **more}]
    bases = [{"x.pt": torch_saved(value)} for value in [*states, {**states[0], (1, 2): odd}]]

    def seal(files: Files) -> Files:
        return {f"{checkpoint_name(raw)}.pt": raw for raw in files.values()}

    return Target(bases, lambda folder: ckpt.newest(f"{folder}"), seal=seal)


def files_below(folder: Path) -> Files:
    return {
        f"{path.relative_to(folder)}": path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }


def manifest() -> Target:
    """The manifest of a sharded checkpoint."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    storage, model = sharded.storage(ckpt, write_sharded=True), torch.nn.Linear(2, 3)
    with tempfile.TemporaryDirectory() as folder:
        storage.save(folder, storage.snapshot(model, [torch.optim.AdamW(model.parameters())]), 7)
        base = files_below(Path(folder))

    def seal(files: Files) -> Files:
        (text,) = (raw for name, raw in files.items() if name.endswith(".json"))
        return {f"{checkpoint_name(text)}/{Path(name).name}": raw for name, raw in files.items()}

    readers = storage.newest, sharded.storage(ckpt, write_sharded=False).newest
    return Target([base], lambda folder: [new(f"{folder}") for new in readers], ".json", seal)


def tokens(ending: str, *bases: bytes) -> Target:
    def read(folder: Path) -> object:
        corpus = chardata.read([f"{folder}/tokens{ending}"], "char")
        plan = chardata.BatchPlan(corpus.tokens, 8, 8, vocab=corpus.vocab)
        return [(x.sum(), y.sum()) for x, y in chardata.every_window(plan)]

    return Target([{f"tokens{ending}": base} for base in bases], read)


def npy() -> Target:
    kinds, files = "u1 <u2 >u4 u8 i4 f4 V9".split(), []
    for array in [*(np.arange(300).astype(kind) for kind in kinds), np.zeros((3, 4), "u2")]:
        np.save(file := io.BytesIO(), array)
        files.append(file.getvalue())
    return tokens(".npy", *files)


def bin_file() -> Target:
    plain = np.arange(300, dtype="<u2").tobytes()
    return tokens(".bin", plain, struct.pack("<256i", 20240520, 1, 300, *[0] * 253) + plain)


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


def tokenizer_json() -> Target:
    kinds = [exchange.make_tokenizer(kind, "\n abcdefg") for kind in ("char", "byte")]

    def read(folder: Path) -> object:
        text = (folder / "tokenizer.json").read_text()
        ids = tokenizer.encode("abcd gfe\n", "tokenizer", text)
        return [*tokenizer.decode([*ids.tolist(), 0, tokenizer.size(text) - 1], "tokenizer", text)]

    return Target([{"tokenizer.json": json.dumps(kind).encode()} for kind in kinds], read)


def toml() -> Target:
    text = b"batch_size = 64\nlr = 1e-3\ncompile = 'yes'\ndata = 'text.txt'\nspawn = 2\nkeep = 3\n"

    def read(folder: Path) -> object:
        return program.cli.make_context("run.py", ["--config", f"{folder}/run.toml"])

    return Target([{"run.toml": text}], read)


TARGETS: dict[str, Callable[[], Target]] = {
    "checkpoint": checkpoint,
    "manifest": manifest,
    "npy": npy,
    "bin": bin_file,
    "safetensors": partial(model_file, "safetensors", "gpt2", "modern", "modern2"),
    "Hugging Face": partial(model_file, "hf", "gpt2"),
    "nanoGPT": partial(model_file, "nanogpt", "gpt2"),
    "tokenizer": tokenizer_json,
    "toml": toml,
    "harmful code": lambda: Target([{"x": b"x"}], lambda folder: pickle.loads(HARMFUL[0] + b".")),
    "a crash": lambda: Target([{"x": b"x"}], lambda folder: os.kill(os.getpid(), signal.SIGSEGV)),
    "a hang": lambda: Target([{"x": b"x"}], lambda folder: signal.alarm(1) or signal.pause()),
}


def write(files: Files, folder: Path) -> Path:
    """Write files into a new folder, and return it."""
    for name, raw in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(raw)
    return folder


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
    target.read(write(target.seal(target.bases[0]), folder / "unchanged"))
    sys.addaudithook(forbid)
    for progress[0] in range(first, first + BLOCK):
        chance = random.Random(f"{name} {progress[0]}")
        files = target.seal(change(chance, chance.choice(target.bases), target.only))
        signal.alarm(SECONDS)
        try:
            target.read(write(files, folder / f"{progress[0]}"))
            progress[1] += 1
        except REFUSALS:
            progress[2] += 1
        shutil.rmtree(folder / f"{progress[0]}")


def read_in_child(name: str, number: int, folder: Path) -> tuple[int, list[int]]:
    """Return the exit code of the process, and its progress. The traceback is on stderr."""
    context = multiprocessing.get_context("fork")
    progress = context.Array("q", 3)
    arguments = name, BLOCK * number, folder / f"{number}", progress
    child = context.Process(target=read_inputs, args=arguments)
    child.start()
    child.join()
    return child.exitcode, [*progress]


@pytest.mark.torture
@pytest.mark.parametrize("name", [*TARGETS][:-3])
def test_a_changed_file_is_loaded_or_refused(name, trials, tmp_path):
    def trial(number: int) -> None:
        code, (at, loaded, refused) = read_in_child(name, number, tmp_path)
        assert code == 0, f"input {at} of {name} ended the process with code {code}; see stderr"
        assert min(loaded, refused) > BLOCK / 100, (loaded, refused)

    trials(f"changed files: {name}", trial, few=1, many=500, each=BLOCK, at_once=1)


@pytest.mark.parametrize("name", [*TARGETS][-3:])
def test_harm_would_be_noticed(name, tmp_path):
    code, progress = read_in_child(name, 0, tmp_path)
    assert code in (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGALRM), (code, progress)
