"""Power cuts, rotten bits, forged files, and disks that are full, broken or gone: what becomes of the checkpoints."""

import collections
import hashlib
import io
import math
import os
import pickle
import random
import re
import resource
import shutil
import struct
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Program, checkpoints, run, same, same_training, wait_for

import ckpt

torch.set_num_threads(1)  # the tensors are tiny, and threads that wait for a shared core are slow
pytestmark = pytest.mark.torture


def some_state(step: int, numbers: int = 50) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {"model": {"w": torch.randn(numbers, generator=generator)}, "optimizers": [], "step": step}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and not path.is_symlink()}


# ------------------------------------------------------------------------------------------------- power cuts
# The system calls of real saves are recorded, and played to a disk that keeps no more than POSIX promises: a write
# to a file is durable once that file is fsynced, a change of a folder once that folder is; until then a power cut
# keeps any subset of the changes, and of each write nothing, half or all.

CALLS = (
    "openat,read,write,pwrite64,lseek,ftruncate,fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat,mkdir,link"
)


def recorded(saves: Callable[[], None], folder: Path) -> list[tuple]:
    """What a process that calls `saves` changes in `folder`, and what it says, as operations; see `happened`."""
    if not shutil.which("strace"):
        pytest.skip("strace records the system calls; there is none here")
    ready, go = os.pipe()
    pid = os.fork()
    if pid == 0:  # reads until the parent closes its end, once it is watched
        os.close(go)
        os.read(ready, 1)
        os._exit(saves() or 0)
    os.close(ready)
    log = folder / "strace"
    options = ["-qq", "-xx", "-s", "1000000", "-e", "signal=none", "-e", f"trace={CALLS}", "-o", log]
    strace = subprocess.Popen(["strace", *options, "-p", f"{pid}"], stderr=subprocess.PIPE, text=True)
    traced = lambda: not re.search(r"TracerPid:\t0\n", Path(f"/proc/{pid}/status").read_text())  # noqa: E731
    wait_for(lambda: traced() or strace.poll() is not None, "strace to attach")
    os.close(go)
    failed = os.waitpid(pid, 0)[1]
    if strace.wait():
        pytest.skip(f"strace may not trace here: {strace.stderr.read()}")
    strace.stderr.close()
    assert not failed
    return [*happened(log.read_text(), f"{folder}")]


def happened(log: str, below: str) -> Iterator[tuple]:
    """(what, path, ...) of each change under a folder: files go by the number of their creation, folders by path."""
    handles: dict[int, list] = {}  # open handle -> [file or folder, position]
    files: dict[str, int] = {}  # path -> file
    created = 0
    for call, arguments, result in re.findall(r"(\w+)\((.*)\) += (\d+)", log):  # what failed changed nothing
        texts = [bytes.fromhex(t.replace("\\x", "")) for t in re.findall(r'"((?:\\x..)*)"', arguments)]
        number = int(arguments.split(",")[0]) if arguments[0].isdigit() else -1
        names = [text.decode("latin1") for text in texts]
        if call == "write" and texts[0].startswith(b"saves "):
            yield "said", names[0]
        elif call == "openat" and names[0].startswith(below):
            if "O_CREAT" in arguments and names[0] not in files:
                files[names[0]] = created
                yield "create", names[0], created
                created += 1
            handles[int(result)] = [files.get(names[0], names[0]), 0]
        elif call == "openat":
            handles.pop(int(result), None)
        elif number in handles and call in ("read", "write"):
            if call == "write":
                yield "write", *handles[number], texts[0]
            handles[number][1] += int(result)
        elif number in handles and call == "lseek":
            handles[number][1] = int(result)
        elif number in handles and call in ("fsync", "fdatasync"):
            yield "sync", handles[number][0]
        elif call == "rename" and names[0] in files:
            files[names[1]] = files.pop(names[0])
            yield "rename", names[1], names[0], files[names[1]]
        elif call in ("unlink", "mkdir") and names[0].startswith(below):
            files.pop(names[0], None)
            yield call, names[0]
        else:  # a call that this model does not know must not pass unseen
            assert number not in handles and not any(name.startswith(below) for name in names), (call, arguments)


def images(operations: list[tuple], out: str) -> Iterator[dict[str, bytes]]:
    """Every content of folder `out` that a power cut after these operations may leave."""
    writes, changes = collections.defaultdict(list), []  # of files and of folders: [..., whether durable]
    for operation in operations:
        what, of = operation[:2]
        if what == "write":
            writes[of].append([*operation[2:], False])
        elif what == "sync":
            for write in writes.get(of, []):
                write[-1] = True
            for change in changes:
                change[-1] |= change[0] == of
        elif what != "said":
            changes.append([os.path.dirname(of), operation, False])
    for kept in product(*[[True] if durable else [False, True] for _, _, durable in changes]):
        names: dict[str, int] = {}
        for there, (_, (what, name, *more), _) in zip(kept, changes):
            if there and what == "unlink":
                names.pop(name, None)
            elif there:
                names.pop(more[0] if what == "rename" else "", None)
                names[name] = more[-1] if more else -1
        made = [change[1] for _, change, _ in changes if change[0] == "mkdir"]
        if all(folder in names for folder in made):
            # whatever has not the name of a checkpoint is never opened, so what is in it makes no difference
            inside = {
                n: f for n, f in names.items() if os.path.dirname(n) == out and ckpt.NAME.fullmatch(n[len(out) + 1 :])
            }
            for content in product(*[left_of(writes[file]) for file in inside.values()]):
                yield {os.path.basename(name): raw for name, raw in zip(inside, content)}
        else:
            yield {}


def left_of(writes: list[list]) -> Iterator[bytes]:
    """Every content of a file that a power cut may leave."""
    for kept in product(*[[1.0] if durable else [0.0, 0.5, 1.0] for _, _, durable in writes]):
        content = b""
        for share, (at, raw, _) in zip(kept, writes):
            if share:
                raw = raw[: int(share * len(raw))]
                content = content[:at].ljust(at, b"\0") + raw + content[at + len(raw) :]
        yield content


def check_every_power_cut(operations: list[tuple], out: str) -> int:
    """-> how many different folders were tried."""
    tried = set()
    for cut in range(len(operations) + 1):
        said = [operation[1] for operation in operations[:cut] if operation[0] == "said"]
        begun, returned = (sum(word in line for line in said) for word in ("begin", "end"))
        for image in images(operations[:cut], out):
            key = hashlib.sha256(repr((begun, returned, sorted(image.items()))).encode()).digest()
            if key in tried:
                continue
            tried.add(key)
            with tempfile.TemporaryDirectory() as folder:
                for name, raw in image.items():
                    Path(folder, name).write_bytes(raw)
                found, rejected = ckpt.newest(folder)
            step = found.state["step"] if found else 0
            assert step in (begun, begun - 1) or begun == 0, (step, begun, cut)
            assert step >= returned and not rejected, (step, returned, rejected, cut)
            assert not found or same(found.state, some_state(step, len(found.state["model"]["w"])))
    return len(tried)


def some_saves(number: int, folder: Path) -> tuple[list[tuple], str]:
    """The record of three saves, and the folder that they are in, which is new, in a new one."""
    chance, out = random.Random(number), f"{folder}/new/out"
    keep, numbers, rated = (2, 2000, False) if number == 0 else (chance.randint(1, 3), chance.randint(1, 4000), True)
    states = [some_state(step, numbers) for step in (1, 2, 3)]

    def saves() -> None:
        marks = os.open(os.devnull, os.O_WRONLY)
        for state in states:
            os.write(marks, b"saves begin")
            ckpt.save_and_prune(out, state, state["step"], chance.random() if rated else None, keep)
            os.write(marks, b"saves end")

    return recorded(saves, folder), out


def test_after_a_power_cut_at_any_moment_the_newest_or_the_one_before_loads(trials, tmp_path_factory):
    def trial(number: int) -> None:
        operations, out = some_saves(number, tmp_path_factory.mktemp("disk"))
        assert check_every_power_cut(operations, out) > 6

    trials("power cut at any of the system calls of 3 saves, every legal outcome", trial, few=1, many=200, at_once=1)


@pytest.mark.parametrize("missing", ["file", "folder", "parent"])
def test_the_model_of_a_power_cut_finds_a_save_without_an_fsync_of_the(missing, tmp_path):
    operations, out = some_saves(0, tmp_path)
    kind = {
        "file": lambda of: isinstance(of, int),
        "folder": lambda of: of == out,
        "parent": lambda of: of == os.path.dirname(out),
    }
    unsafe = [o for o in operations if not (o[0] == "sync" and kind[missing](o[1]))]
    assert len(unsafe) < len(operations)
    with pytest.raises(AssertionError):
        check_every_power_cut(unsafe, out)


# -------------------------------------------------------------------------------------------- rotten and replaced


def replaced(by: Callable[[Path], Any]) -> Callable[[Path, Path], None]:
    def replace(path: Path, _: Path) -> None:
        path.unlink()
        by(path)

    return replace


def flip(path: Path, bit: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)


REPLACED = {
    "another run's": lambda path, other: shutil.copyfile(other, path),
    "a folder": replaced(lambda path: (path.mkdir(), (path / "mine").write_text(""))),
    "a dangling link": replaced(lambda path: path.symlink_to("nowhere")),
    "a link to itself": replaced(lambda path: path.symlink_to(path.name)),
    "a link to a folder": replaced(lambda path: path.symlink_to(path.parent)),
    "a file that gives EIO": replaced(lambda path: path.symlink_to("/proc/self/mem")),
    "a pipe": replaced(os.mkfifo),  # to open it would take for ever
    "a device": replaced(lambda path: path.symlink_to("/dev/zero")),  # and so would reading this
}


def damages(size: int) -> list[Callable[[Path, Path], None]]:
    """Of a checkpoint of so many bytes; they also get another run's. The kinds come in turn, so that a few have all."""
    chance = random.Random(0)
    lengths = [0, size - 1, *chance.sample(range(1, size - 1), 198)]
    cuts = [lambda path, _, length=length: os.truncate(path, length) for length in lengths]
    flips = [lambda path, _, bit=bit: flip(path, bit) for bit in chance.sample(range(8 * size), 500)]
    return [*REPLACED.values(), *cuts[:6], *flips[:6], *cuts[6:], *flips[6:]]


def test_whatever_is_wrong_with_a_file_it_is_named_and_the_one_before_used(trials, tmp_path_factory):
    saved = tmp_path_factory.mktemp("saved")
    entries = [ckpt.save(f"{saved}", some_state(step, 300), step) for step in (1, 2)]
    folder = tmp_path_factory.mktemp("other")
    other = folder / ckpt.save(f"{folder}", some_state(2, 301), 2).name
    cases = damages((saved / entries[1].name).stat().st_size)

    def trial(number: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(shutil.copy(saved / entry.name, folder)) for entry in entries]
            cases[number](paths[1], other)
            found, (line,) = ckpt.newest(folder)
            assert found.entry == entries[0] and same(found.state, some_state(1, 300))
            assert line.startswith(f"{entries[1].name}: ") and "\n" not in line
            cases[number](paths[0], other)
            assert ckpt.newest(folder)[0] is None and len(ckpt.newest(folder)[1]) == 2
            ckpt.save_and_prune(folder, some_state(3), 3, None, 1)  # nothing of it is in the way of the next
            assert ckpt.newest(folder)[0].state["step"] == 3 and len(ckpt.entries(folder)) == 1
            assert number != list(REPLACED).index("a folder") or len([*Path(folder).glob("*/mine")]) == 2

    trials("file cut at 200 lengths, one of 500 bits flipped, replaced", trial, few=20, many=len(cases), at_once=1)


TRAINING = ["--steps", 100, "--save-every", 5, "--eval-every", 1000, "--log-every", 1]


@pytest.fixture(scope="module")
def finished(flags, tmp_path_factory) -> Path:
    """The folder of a run of 100 steps, with checkpoints at 90, 95 and 100. Not to be written to."""
    out = tmp_path_factory.mktemp("finished")
    ran = run(*flags, *TRAINING, "--out", out)
    assert ran.code == 0, ran
    return out


def test_the_program_names_it_and_goes_on_from_the_one_before(trials, finished, tmp_path_factory):
    cases = damages(min(path.stat().st_size for path in checkpoints(finished)))

    def trial(number: int) -> None:
        out = shutil.copytree(finished, tmp_path_factory.mktemp("out") / "out")
        spoilt = checkpoints(out)[-1:] if number % 2 else checkpoints(out)
        for path in spoilt:
            cases[number](path, checkpoints(finished)[0])
        before = contents(out), sorted(out.iterdir())
        ran = run("--out", out, "--log-every", 1)
        assert ran.err.count("\n") == 1 and spoilt[-1].name in ran.err, ran
        if len(spoilt) == 1:
            assert ran.code == 0 and ran.out.startswith("step 96/100 "), ran
            assert same_training(out, finished)
        else:
            assert (ran.code, ran.out) == (2, "") and (contents(out), sorted(out.iterdir())) == before, ran
            ran = run("--out", out, "--fresh", "--steps", 1)  # which the line advised
            assert ran.code == 0 and [path.name[:13] for path in checkpoints(out)] == ["step-00000001"], ran

    # without the first, as another run's content is a damage only where the name is kept
    trials("the same through the program; every second with none left", lambda n: trial(n + 1), few=2, many=60)


# ------------------------------------------------------------------------------------------------------ forged
# Each under the name that its digest gives it, as whoever can forge the one can forge the other.

BOMB = 200_000_000  # bytes that it would take; a refusal takes next to none


class Calls:
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
    """A zip that ends as torch's do, in the long form that is meant for large ones."""
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
    """A reader that takes offsets as they are, and one that counts from the end, see different directories in it."""
    return something + raw[:-34] + struct.pack("<Q", len(something) + len(raw) - 98) + raw[-26:]


def twice_there(raw: bytes) -> bytes:
    """With a directory that has each record many times, as the bombs do whose records overlap."""
    size, start = struct.unpack("<QQ", raw[-58:-42])
    directory, count = raw[start : start + size] * 9, struct.unpack("<Q", raw[-66:-58])[0] * 9
    longer = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(directory), start)
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, count, count, len(directory), start, 0)
    return raw[:start] + directory + longer + struct.pack("<4sIQI", b"PK\6\7", 0, start + len(directory), 1) + end


HONEST = {"model": {"w": torch.ones(3)}}
THREE, MANY = b"K\x03", b"J" + struct.pack("<i", BOMB // 4)
W = torch.ones(20_000)
NEST = b"\x80\x02}(X\5\0\0\0model}X\1\0\0\0x" + b"]" * 100_000 + b"a" * 99_999 + b"u."
FORGED: dict[str, tuple[Callable[[Path], bytes], str]] = {  # -> content, what is said of it
    "code": (lambda p: torch_saved({**HONEST, "x": Calls(os.mkdir, f"{p}")}), "it needs posix mkdir"),
    "code in a bare pickle": (lambda p: pickle.dumps({**HONEST, "x": Calls(os.mkdir, f"{p}")}), "not a zip"),
    "code by protocol 4": (
        lambda p: zipped({**records(HONEST), "archive/data.pkl": pickle.dumps(Calls(os.mkdir, f"{p}"), 4)}), "STACK_GLOBAL",
    ),
    "code in the old format": (
        lambda p: torch_saved({**HONEST, "x": Calls(os.mkdir, f"{p}")}, _use_new_zipfile_serialization=False), "not a zip",
    ),
    "the old format": (lambda p: torch_saved(HONEST, _use_new_zipfile_serialization=False), "not a zip"),
    "a bytearray": (lambda p: torch_saved({**HONEST, "x": Calls(bytearray, BOMB)}), "it needs __builtin__ bytearray"),
    "a tensor by its size": (lambda p: torch_saved({**HONEST, "x": Calls(torch.FloatTensor, BOMB)}), "it needs torch"),
    "a compressed record": (
        lambda p: edited(THREE, MANY, zipfile.ZIP_DEFLATED, **{"archive/data/0": bytes(BOMB)}), "compressed",
    ),
    "a compressed pickle": (
        lambda p: zipped({**records(HONEST), "archive/data.pkl": b"\x80\x02" + b"0" * BOMB}, zipfile.ZIP_DEFLATED),
        "compressed",
    ),
    "overlapping records": (lambda p: twice_there(zipped({**records(HONEST), "archive/x": bytes(50_000)})), "overlap"),
    "something before it": (lambda p: behind(b"PK\3\4", zipped(records(HONEST))), "before or after"),
    "something behind it": (lambda p: zipped(records(HONEST)) + b"PK\5\6" + bytes(18), "not a zip"),
    "a comment": (lambda p: zipped(records(HONEST))[:-2] + b"\5\0hello", "not a zip"),
    "strides of 0": (lambda p: torch_saved({"model": {"w": torch.ones(1).expand(BOMB)}}), "is only 4 bytes"),
    "strides of 1": (lambda p: torch_saved({"model": {"w": W.as_strided((10_000, 10_000), (1, 1))}}), "is only 80000 bytes"),
    "strides of 0, elsewhere": (lambda p: torch_saved({**HONEST, "optimizers": [{"m": W[:1].expand(BOMB)}]}), "bytes"),
    "more than there is": (lambda p: edited(THREE + b"\x85", MANY + b"\x85"), "Runtime"),
    "a storage larger than its record": (lambda p: edited(THREE, MANY), "record size"),
    "a text that is cut": (lambda p: edited(b"X\x05\0\0\0model", b"X\xff\xff\xff\x7fmodel"), "expected 2147483647 bytes"),
    "a nest": (lambda p: zipped({**records(HONEST), "archive/data.pkl": NEST}), ""),
    "a storage by its size": (lambda p: torch_saved({**HONEST, "x": Calls(torch.UntypedStorage, BOMB)}), ""),  # never touched
    "a large number in the memo": (lambda p: edited(b"q\x00", b"r\xff\xff\xff\x7f"), ""),  # harmless, and so loaded
}  # fmt: skip


def put_named(folder: Path, step: int, raw: bytes) -> str:
    name = f"step-{step:08d}-{hashlib.sha256(raw).hexdigest()[:32]}.pt"
    (folder / name).write_bytes(raw)
    return name


def growth(call: Callable[[], Any]) -> int:
    """By how many bytes the memory of this process was larger at most while `call` ran."""

    def kilobytes(what: str) -> int:
        return int(re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])

    Path("/proc/self/clear_refs").write_text("5")  # forget the peak until now
    before = kilobytes("VmRSS")
    call()
    return 1000 * (kilobytes("VmHWM") - before)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_forged_file_is_refused_with_the_reason_no_code_run_and_no_memory_taken(trials, tmp_path):
    old = ckpt.save(f"{tmp_path}", some_state(1), 1)

    def trial(number: int) -> None:
        kind, (make, reason) = list(FORGED.items())[number]
        bad = put_named(tmp_path, 2, make(tmp_path / "was run"))
        outcome: list[Any] = []
        assert growth(lambda: outcome.extend(ckpt.newest(f"{tmp_path}"))) < 40_000_000, kind
        (tmp_path / bad).unlink()
        found, rejected = outcome
        assert not (tmp_path / "was run").exists(), kind
        assert (found.entry == old) == bool(reason), (kind, rejected)
        assert not reason or len(rejected) == 1 and re.match(f"{bad}: not a checkpoint: .*({reason})", rejected[0]), (
            kind,
            rejected,
        )

    trials("forged file", trial, few=len(FORGED), many=len(FORGED), at_once=1)


@pytest.mark.parametrize("kind", ["a bytearray", "a compressed record", "a compressed pickle"])
def test_the_bombs_are_bombs(kind, tmp_path):
    """Without the look at what is in a file, torch.load alone takes what they claim."""

    def load() -> None:
        try:
            torch.load(io.BytesIO(FORGED[kind][0](tmp_path)), weights_only=True)
        except Exception:
            pass

    raw = FORGED[kind][0](tmp_path)
    FORGED[kind] = (lambda p: raw), ""
    assert len(raw) < 10_000_000 and growth(load) > 150_000_000


def forged_state(kind: str, state: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint of the program with something wrong in it."""
    model, config = state["model"], state["config"]
    moments = state["optimizers"][0]["state"]["embedding.weight"]
    w = model["embedding.weight"]
    laughs: list[Any] = []
    for _ in range(40):
        laughs = [laughs, laughs]
    changes: dict[str, Callable[[], Any]] = {
        "shape": lambda: model.update({"embedding.weight": w.T}),
        "dtype": lambda: model.update({"embedding.weight": w.half()}),
        "not a number": lambda: model.update({"embedding.weight": w * math.nan}),
        "missing": lambda: model.pop("embedding.weight"),
        "surplus": lambda: model.update(another=w),
        "shape of a moment": lambda: moments.update(exp_avg=torch.ones(7)),  # a fused kernel would write behind it
        "dtype of a moment": lambda: moments.update(exp_avg=moments["exp_avg"].double()),
        "missing moment": lambda: moments.pop("exp_avg"),
        "moments of nobody": lambda: state["optimizers"][0]["state"].update(another=moments),
        "optimizers": lambda: state.update(optimizers=3),
        "layers": lambda: config.update(layers=10**9),
        "width": lambda: config.update(embd=2**24, heads=1),
        "vocabulary": lambda: state["vocabulary"].update(vocab=2**40),
        "type": lambda: config.update(embd={"x": 1}),
        "recursion": lambda: config.update(lr=config),
        "laughs": lambda: config.update(lr=laughs),  # 2^40 lists once they are written out
        "config": lambda: state.update(config=[1]),
        "step": lambda: state.update(step="1"),
        "scaler": lambda: state.update(scaler=3),
    }
    changes[kind]()
    return state


NAMED = {"shape": "embedding.weight", "dtype": "embedding.weight", "missing": "embedding.weight", "surplus": "another"}
OF_THE_OPTIMIZER = ("shape of a moment", "dtype of a moment", "missing moment", "moments of nobody")
OF_THE_OPTIMIZER += ("optimizers", "scaler", "step")
KINDS = [*NAMED, "not a number", *OF_THE_OPTIMIZER, "layers", "width", "vocabulary", "type", "recursion", "laughs"]
KINDS += ["config"]


def test_a_forged_state_is_refused_by_the_program_with_the_reason(trials, finished, tmp_path_factory):
    def trial(number: int) -> None:
        kind, out = KINDS[number], shutil.copytree(finished, tmp_path_factory.mktemp("out") / "out")
        last = checkpoints(out)[-1]
        state = forged_state(kind, torch.load(last, weights_only=True))
        last.unlink()
        name, before = put_named(out, 100, torch_saved(state)), contents(out)
        for command in [["--steps", 101], ["sample", "--tokens", 1], ["eval"]]:
            if command[0] != "--steps" and (kind in OF_THE_OPTIMIZER or number > len(NAMED) and number % 3):
                continue  # which do not look at these; and a few are enough
            ran = run(*command, "--out", out, seconds=30)
            assert ran.err.count("\n") == 1 and name in ran.err and NAMED.get(kind, "") in ran.err, (kind, ran)
            if kind == "not a number":
                assert ran.code == 0 and "NaN" in ran.err, (kind, ran)
                break
            assert (ran.code, ran.out, contents(out)) == (2, "", before), (kind, ran)

    trials("forged state, to the program", trial, few=5, many=len(KINDS))


# --------------------------------------------------------------------------------------------- broken disks
# The policy: what cannot be written is one line of warning, training goes on, and the next save tries again. The exit
# code is 0 if the last save succeeds, 1 if it does not. What was written before stays as it was.


@contextmanager
def full(out: Path, _: int) -> Iterator[None]:
    """Not a byte more fits. (The size of a tmpfs cannot be set below what is in it, a file can be.)"""
    ballast = out.parent / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        for size in (1 << 16, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                pass
    yield
    ballast.unlink()


@contextmanager
def read_only(out: Path, _: int) -> Iterator[None]:
    """Mounted again over itself: what the program has open for writing forbids to remount the first."""
    subprocess.run(["mount", "--bind", out, out], check=True)
    remount = ["mount", "-o", "remount,bind,ro", out]
    wait_for(lambda: not subprocess.run(remount, stderr=subprocess.DEVNULL).returncode, "a moment without a write")
    yield
    subprocess.run(["umount", "-l", out], check=True)


@contextmanager
def deleted(out: Path, _: int) -> Iterator[None]:
    shutil.rmtree(out)
    yield


@contextmanager
def no_handles(out: Path, pid: int) -> Iterator[None]:
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
    yield
    with suppress(ProcessLookupError):  # it ended so
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def broken(*calls: str) -> Callable[[Path, int], Any]:
    @contextmanager
    def broken(out: Path, pid: int) -> Iterator[None]:
        """Some of the calls that concern the folder are EIO."""
        paths = [out, out / "metrics.jsonl", out / f"{ckpt.TEMPORARY}{pid}"]
        options = ["-f", "-qq", "-o", os.devnull]
        options += ["-e", f"trace={','.join(calls)}", "-e", f"inject={','.join(calls)}:error=EIO"]
        watched = [word for path in paths for word in ("-P", f"{path}")]
        strace = subprocess.Popen(["strace", *options, *watched, "-p", f"{pid}"], stderr=subprocess.DEVNULL)
        wait_for(
            lambda: (
                strace.poll() is not None or not re.search(r"TracerPid:\t0\n", Path(f"/proc/{pid}/status").read_text())
            ),
            "it",
        )
        yield
        strace.terminate()
        strace.wait()

    return broken


FAULTS: dict[str, Callable[[Path, int], Any]] = {
    "disk full": full,
    "read-only": read_only,
    "folder deleted": deleted,
    "no handles": no_handles,
    "EIO of write": broken("write"),
    "EIO of fsync": broken("fsync"),
    "EIO of all": broken("openat", "write", "fsync", "rename", "unlink"),
}


@pytest.fixture(scope="module")
def disk(tmp_path_factory) -> Iterator[Callable[[int], Path]]:
    """disk(number): a small one."""
    mounted = []

    def mount(number: int) -> Path:
        path = tmp_path_factory.mktemp(f"disk{number}")
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", path], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"mounting a disk that can be full takes root: {done.stderr.strip()}")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", "-l", path])


def test_whatever_is_wrong_with_the_disk_training_goes_on_and_the_next_save_tries_again(trials, flags, disk, finished):
    def trial(number: int) -> None:
        name, chance = list(FAULTS)[number % len(FAULTS)], random.Random(number)
        goes_by = number % 2 == 0 or name == "folder deleted"
        out = disk(number) / "out"
        with Program(*flags, *TRAINING, "--out", out) as program:
            program.read_to(f"step {chance.randint(8, 12)}/")
            wait_for(lambda: checkpoints(out), "a checkpoint")
            with FAULTS[name](out, program.process.pid):
                program.read_to(f"step {chance.randint(40, 50)}/")  # the program is some lines further than read
                before = {path.name: path.read_bytes() for path in checkpoints(out)}
                if not goes_by:
                    ran = program.finish()
            if goes_by:
                ran = program.finish()
        said = (name, ran)
        assert ran.code == (0 if goes_by else 1), said
        assert all(
            re.match("Warning: (checkpoint|metrics|output) not written: ", line) for line in ran.err.splitlines()
        ), said
        # a save may make the folder anew before anybody misses it
        assert name == "folder deleted" or "checkpoint not written" in ran.err, said
        found, rejected = ckpt.newest(f"{out}")
        assert not rejected and all(ckpt.load(f"{out}", entry) for entry in ckpt.entries(f"{out}")), said
        if goes_by:
            assert not [path for path in out.iterdir() if path.name.startswith(ckpt.TEMPORARY)], said
            assert [path.name for path in checkpoints(out)] == [path.name for path in checkpoints(finished)], said
        else:
            assert checkpoints(out) and contents(out).items() >= before.items(), said
        ran = run(*flags, *TRAINING, "--out", out)
        assert ran.code == 0 and not ran.err, (name, ran)
        assert same(torch.load(checkpoints(out)[-1]), torch.load(checkpoints(finished)[-1])), name

    trials(", ".join(FAULTS), trial, few=3, many=105)


# ------------------------------------------------------------------------------------------------ 10,000 saves


def test_saves_without_end_take_no_more_and_keep_what_the_policy_says(trials, request, tmp_path):
    saves = 10_000 if request.config.option.markexpr == "torture" else 150

    def takes() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def trial(_: int) -> None:
        kept: list[ckpt.Entry] = []
        chance = random.Random(0)
        for step in range(saves):
            loss = chance.choice([None, round(chance.uniform(1, 9), 2)])
            kept.append(
                ckpt.in_background(ckpt.save_and_prune, f"{tmp_path}", some_state(step), step, loss, 3).result()
            )
            best = min((e for e in kept if e.loss is not None), key=lambda e: (e.loss, -e.step), default=kept[-1])
            kept = [entry for entry in kept if entry in kept[-3:] or entry == best]
            assert sorted(os.listdir(tmp_path)) == sorted(entry.name for entry in kept)
            if step % 50 == 0:
                assert all(ckpt.load(f"{tmp_path}", entry)["step"] == entry.step for entry in kept)
            memory = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
            if step == 100:
                before, taken = memory, takes()
        assert memory < before + 10_000_000, (before, memory)
        wait_for(lambda: all(now <= then for now, then in zip(takes(), taken)), f"no more than {taken}", 5)

    trials("saves with keep 3: memory, handles, threads, files", trial, few=1, many=1, each=saves, at_once=1)
