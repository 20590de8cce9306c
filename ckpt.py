"""State -> durable file -> state. Any model, any optimizers.

    state = snapshot(model, optimizers, step=step)                   # on every rank; a copy on rank 0
    if rank == 0: save("out", state, step, loss=val_loss); prune("out", keep=3)
    ...
    found, rejected = newest("out")                                  # on rank 0
    restore_(found.state if found else {}, model, optimizers)        # on every rank: rank 0 hands it out

A checkpoint is one file, `step-00000400-loss-1.8812-<digest>.pt`. Its name carries the digest of its content,
so that it is whole or it is not one; anyone opens it with `torch.load(name, weights_only=True)`, and finds
under "model" a plain state dict, on the CPU, with the names that the bare model has. A folder is a path, or
any URL that fsspec knows. A name without .pt is of a checkpoint that is a folder itself, as extras/sharded.py
writes them: it is counted, pruned and set aside here, and read there.
"""

import copy
import dataclasses
import fcntl
import hashlib
import math
import os
import pickle
import pickletools
import re
import shutil
import socket
import struct
import tempfile
import threading
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T")
NAME = re.compile(r"step-(\d{8,})(?:-loss-(-?\d+\.\d+))?-([0-9a-f]{32})(\.pt)?")
TEMPORARY = ".saving-"
PLAIN = re.compile(  # what a pickle of tensors and builtins needs by name
    r"collections OrderedDict|torch (Size|device|\w+Storage|b?(float|bool|complex|u?int)\w*)|torch\.storage UntypedStorage"
    r"|torch\._utils _rebuild_(tensor_v[23]|parameter)|__builtin__ (set|complex)"
)


class Entry(NamedTuple):
    """A checkpoint as its name tells."""

    step: int
    loss: float | None  # validation loss at that step, where it was known
    digest: str
    name: str


class Found(NamedTuple):
    """A checkpoint that was read and verified."""

    entry: Entry
    state: dict[str, Any]


# ------------------------------------------------------------------------------------------ state <-> objects


def snapshot(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], **more: Any) -> dict[str, Any]:
    """A copy of all state on the CPU, with `more` beside it: {"model": ..., "optimizers": [...], **more}.

    Every rank has to call it; ranks other than 0 get empty dicts where rank 0 has the tensors. Training may
    go on at once: nothing in the result is shared with the model. Names are those of the bare model, without
    what DDP, torch.compile or FSDP add.
    """
    from torch.distributed.checkpoint.state_dict import (  # half a second to import, so not at the top
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = {
        "model": get_model_state_dict(model, options=options),
        # torch would make a fresh optimizer take a step, to have something to show
        "optimizers": [get_optimizer_state_dict(model, o, options=options) if o.state else {} for o in optimizers],
    }
    # what came from another device, or was gathered, is a copy already; the rest is the model's own memory
    live = {_storage(t) for t in _tensors([model.state_dict(), *(o.state_dict() for o in optimizers)])}
    return {**copy.deepcopy(state, _copies(state, live)), **more}


def _copies(state: Any, live: set[int]) -> dict[int, Any]:
    """What deepcopy is to put in each tensor's place, by its id: itself, or of `live` memory a clone, which is made
    sooner than deepcopy's own. What is there under two names, as a tied head is, is cloned once."""
    copies: dict[int, Any] = {}
    clones: dict[Any, Tensor] = {}
    for tensor in _tensors(state):
        view = _storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()
        if view not in clones:
            clones[view] = tensor.clone() if _storage(tensor) in live else tensor
        copies[id(tensor)] = clones[view]
    return copies


def _tensors(nest: Any) -> Iterator[Tensor]:
    """Each tensor in dicts, lists and tuples. No recursion: however deep somebody made them, or if one is in itself."""
    seen, left = set(), [nest]
    while left:
        value = left.pop()
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            left += value.values() if isinstance(value, dict) else value


def _storage(tensor: Tensor) -> int:
    """Where its memory begins; of a DTensor this rank's part."""
    return getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr()


def restore_(state: dict[str, Any], model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Put a snapshot back. In a group every rank calls it, and rank 0's `state` is used on all.

    The optimizers keep the settings that they were built with (learning rate, weight decay, ...) and get
    their moments back. ValueError if the state is not one of this model and so many optimizers.
    """
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    if dist.is_initialized() and dist.get_rank():
        state = {}
    fresh: list[Any] = []  # what each one's state is like: torch has a fresh one take a step, of no length, to show it
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)  # torch takes one with gradients for one without state
        optimizer.state.clear()
        fresh.append(get_optimizer_state_dict(model, optimizer)["state"])
    verdict: list[Any] = [None, None]  # what is wrong with the state, and which optimizers it has moments of
    if state:
        try:
            check(state, model)
            if len(state["optimizers"]) != len(optimizers):
                raise ValueError(f"{len(state['optimizers'])} optimizers in the checkpoint, {len(optimizers)} here")
            for saved, ours in zip(state["optimizers"], fresh):
                _check_moments(saved.get("state", {}), ours)
            verdict[1] = [bool(saved) for saved in state["optimizers"]]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            verdict[0] = str(error) if isinstance(error, ValueError) else f"not a snapshot: {error!r}"
    grouped = dist.is_initialized()
    if grouped:
        dist.broadcast_object_list(verdict)
    if verdict[0]:
        raise ValueError(verdict[0])
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=grouped)
    set_model_state_dict(model, dict(state.get("model", {})), options=options)  # a copy: torch renames in it
    options = dataclasses.replace(options, strict=False)  # a parameter that never had a gradient has no moments
    for optimizer, saved, used in zip(optimizers, state.get("optimizers") or [{}] * len(optimizers), verdict[1]):
        if not used:
            optimizer.state.clear()
            continue
        settings = [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
        if saved:  # a copy, since an optimizer makes what it is given its own
            groups = [{**ours, "params": g["params"]} for ours, g in zip(settings, saved["param_groups"], strict=True)]
            saved = {"state": copy.deepcopy(saved["state"]), "param_groups": groups}
        set_optimizer_state_dict(model, optimizer, saved, options=options)
        for group, ours in zip(optimizer.param_groups, settings):
            group.update(ours)


def check(state: dict[str, Any], model: nn.Module) -> None:
    """ValueError unless state["model"] has just the names, shapes and types of `model`, wrapped or bare."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    theirs, ours = state["model"], model.state_dict()
    for name in [*ours, *theirs]:
        if name not in theirs or name not in ours:
            raise ValueError(f"{name} is {'missing from' if name in ours else 'only in'} the checkpoint")
        if not isinstance(theirs[name], Tensor):
            raise ValueError(f"{name} is a {type(theirs[name]).__name__} in the checkpoint, not a tensor")
        a, b = ((tuple(t.shape), t.dtype) for t in (theirs[name], ours[name]))
        if a != b:
            raise ValueError(f"{name} is {a[0]} {a[1]} in the checkpoint, {b[0]} {b[1]} in the model")


def _check_moments(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """ValueError unless each parameter has the moments, shapes and types of `ours`: fused kernels do not look."""

    def shapes(moments: dict[str, Any]) -> dict[str, Any]:
        return {key: (tuple(t.shape), t.dtype) if isinstance(t, Tensor) else type(t) for key, t in moments.items()}

    for name, moments in theirs.items():
        if name not in ours or moments and shapes(moments) != shapes(ours[name]):
            raise ValueError(f"the optimizer's state of {name} is not one of this model and optimizer")


# ------------------------------------------------------------------------------------------- state <-> file


def save(folder: str, state: dict[str, Any], step: int, loss: float | None = None) -> Entry:
    """Write `state` as a checkpoint that is whole and durable when this returns. OSError if it cannot be.

    ValueError if it holds anything but tensors, builtins and what describes tensors, which `load` would refuse.
    For rank 0 alone. Only reads `state`, so it can run in a thread beside the training.
    """
    if "://" in folder:
        return _save_remote(folder, state, step, loss)
    make_folder(folder)
    temporary = os.path.join(folder, f"{TEMPORARY}{os.getpid()}")
    try:
        with open(temporary, "w+b") as file, _digesting(file) as digested:
            _write(state, file)
            os.fsync(file.fileno())
            entry = named(step, loss, digested())
        os.replace(temporary, os.path.join(folder, entry.name))
        _fsync_folder(folder)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise
    return entry


def _save_remote(folder: str, state: dict[str, Any], step: int, loss: float | None) -> Entry:
    """The same through fsspec. Object stores show an upload once it is whole; elsewhere half of one may be left by a
    process that is killed, and cannot pass for a checkpoint: its digest is not its name's."""
    with tempfile.TemporaryDirectory() as here, open(os.path.join(here, "state"), "w+b") as file:
        _write(state, file)
        entry = named(step, loss, digest(file))
        make_folder(folder)
        with remote(folder) as (fs, path):
            try:
                fs.put_file(file.name, f"{path}/{entry.name}")
            except BaseException:
                with suppress(Exception):  # it may not have got there
                    fs.rm_file(f"{path}/{entry.name}")
                raise
    return entry


def _write(state: dict[str, Any], file: BinaryIO) -> None:
    try:
        torch.save(state, file)
    except RuntimeError as error:  # torch's writer, on its way out, hides what stopped it: a full disk
        raise error.__context__ if isinstance(error.__context__, OSError) else error
    file.flush()
    if wrong := _forged(file):  # better known now than when it is needed
        raise ValueError(f"the state could not be loaded again: {wrong}")


@contextmanager
def _digesting(file: BinaryIO) -> Iterator[Callable[[], str]]:
    """The digest of a file that is written inside, from front to back, taken beside that; to be asked for once it is
    whole. It takes as long as the writing does, and as the disk."""
    hashed, whole = hashlib.sha256(), threading.Event()

    def follow() -> str:
        at, last = 0, False
        while not last:
            last = whole.wait(0.001)
            while block := os.pread(file.fileno(), 1 << 22, at):
                hashed.update(block)
                at += len(block)
        return hashed.hexdigest()[:32]

    def finished() -> str:
        whole.set()
        return following.result()

    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(follow)
        try:
            yield finished
        finally:
            whole.set()


def named(step: int, loss: float | None, digest: str, ending: str = ".pt") -> Entry:
    """What a checkpoint is called."""
    if loss is None or not math.isfinite(loss):
        return Entry(step, None, digest, f"step-{step:08d}-{digest}{ending}")
    return Entry(step, round(loss, 4), digest, f"step-{step:08d}-loss-{loss:.4f}-{digest}{ending}")


def make_folder(folder: str) -> None:
    """As os.makedirs, but durable: a checkpoint is lost if the folder that it is in is."""
    if "://" in folder:
        with remote(folder) as (fs, path):
            fs.makedirs(path, exist_ok=True)
        return
    folder = os.path.abspath(folder)
    if not os.path.isdir(folder):
        make_folder(os.path.dirname(folder))
        os.makedirs(folder, exist_ok=True)
        _fsync_folder(os.path.dirname(folder))


def _fsync_folder(folder: str) -> None:
    """A rename is durable once the folder that records it is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest(file: BinaryIO) -> str:
    """The first 32 digits of what `sha256sum` says of an open file."""
    hashed = hashlib.sha256()
    file.seek(0)
    while block := file.read(1 << 22):
        hashed.update(block)
    return hashed.hexdigest()[:32]


def entries(folder: str) -> list[Entry]:
    """What by its name is a checkpoint in `folder`, oldest first. Nothing is opened."""
    if "://" in folder:
        with remote(folder) as (fs, path):
            fs.invalidate_cache()
            paths = fs.ls(path, detail=False) if fs.exists(path) else []
            names = [name.rsplit("/", 1)[-1] for name in paths if name.endswith(".pt")]
    else:
        names = os.listdir(folder) if os.path.isdir(folder) else []
    matches = [match for match in map(NAME.fullmatch, names) if match]
    found = [Entry(int(m[1]), float(m[2]) if m[2] else None, m[3], m[0]) for m in matches]
    return sorted(found, key=lambda entry: (entry.step, entry.name))


def newest(folder: str, read: Callable[[str, Entry], dict[str, Any]] | None = None) -> tuple[Found | None, list[str]]:
    """The newest checkpoint that can be read and verified, and a line for each newer one that cannot.

    read: what reads one, with an OSError or a ValueError if it cannot; `load` if none is given.
    OSError if a URL does not answer: then nothing is known of what is there.
    """
    rejected: list[str] = []
    for entry in reversed(entries(folder)):
        try:
            return Found(entry, (read or load)(folder, entry)), rejected
        except (OSError, ValueError) as error:
            if type(error) is OSError and "://" in folder:  # as remote() has it: the file itself may be sound
                raise
            if entry not in entries(folder):  # pruned while it was read: there are newer ones
                return newest(folder, read)
            rejected.append(f"{entry.name}: {error}")
    return None, rejected


def load(folder: str, entry: Entry) -> dict[str, Any]:
    """Read one checkpoint, tensors on the CPU. ValueError if its content is not what its name says, or NaN.

    Nothing in the file is run: torch.load reads tensors and builtins alone.
    """
    with _open(folder, entry.name) as file:
        if digest(file) != entry.digest:
            raise ValueError("damaged: the content does not have the digest that the name tells")
        try:
            state = read(file)
        except ValueError as error:
            raise ValueError(f"not a checkpoint: {error}") from error
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise ValueError("not a checkpoint: there is no state dict under 'model'")
    for name, value in state["model"].items():
        if isinstance(value, Tensor) and value.isnan().any():
            raise ValueError(f"worthless: {name} has numbers that are not (NaN)")
    return state


def read(file: BinaryIO) -> Any:
    """What torch.save wrote to an open file, tensors on the CPU. ValueError unless it is tensors and builtins alone."""
    state = None
    try:
        wrong = _forged(file)
        file.seek(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = None if wrong else torch.load(file, map_location="cpu", weights_only=True)
        wrong = wrong or _inflated(state)
    except pickle.UnpicklingError:
        wrong = "it is not just tensors and plain values"
    except Exception as error:  # whatever a file can make it raise
        wrong = " ".join(repr(error).split()[:20])
    if wrong:
        raise ValueError(wrong)
    return state


def _forged(file: BinaryIO) -> str:
    """Why a file, which may be anybody's, must not be given to torch.load, or "".

    It would allocate what a compressed record claims to become, and call what is harmless, bytearray(10**12) too. What
    torch.save writes is a zip of uncompressed records that ends in 98 known bytes: then whoever reads it, zipfile here
    and C++ there, finds the same records.
    """
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - 98))
    last = file.read()
    locator = struct.pack("<4sIQI4s", b"PK\6\7", 0, end - 98, 1, b"PK\5\6")
    if len(last) < 98 or last[56:80] != locator or last[96:] != b"\0\0":
        return "not a zip that torch.save wrote"
    file.seek(0)
    if file.read(4) != b"PK\3\4" or sum(struct.unpack("<QQ", last[40:56])) != end - 98:
        return "a zip with something before or after it"
    with zipfile.ZipFile(file) as archive:
        records = {record.filename.split("/", 1)[-1].lower(): record for record in archive.infolist()}
        size = sum(math.inf if record.compress_type else record.file_size for record in archive.infolist())
        if size > end or len(records) < len(archive.infolist()):
            return "its records are compressed, or overlap"
        for op, what, _ in pickletools.genops(archive.read(records["data.pkl"])):
            if op.name in ("INST", "OBJ", "STACK_GLOBAL") or op.name == "GLOBAL" and not PLAIN.fullmatch(f"{what}"):
                return f"it needs {what or op.name}, and is not just tensors and plain values"
    return ""


def _inflated(state: Any) -> str:
    """What is wrong if a tensor anywhere in `state` claims, by its strides, more numbers than it has, or ""."""
    for tensor in _tensors(state):
        if tensor.nbytes > tensor.untyped_storage().nbytes():
            return f"a tensor of shape {tuple(tensor.shape)} is only {tensor.untyped_storage().nbytes()} bytes"
    return ""


def prune(folder: str, keep: int) -> None:
    """Delete all but the last `keep` checkpoints and the one of lowest loss, and what broken-off saves left."""
    found = entries(folder)
    rated = [entry for entry in found if entry.loss is not None]
    best = min(rated, key=lambda entry: (entry.loss, -entry.step), default=None)
    for entry in found[: max(0, len(found) - keep)]:
        if entry != best:
            remove(folder, entry.name)
    if "://" not in folder:
        for name in os.listdir(folder):
            if name.startswith(TEMPORARY):
                remove(folder, name)


def save_and_prune(folder: str, state: dict[str, Any], step: int, loss: float | None, keep: int) -> Entry:
    """save, and then, with the new one durable, prune."""
    entry = save(folder, state, step, loss)
    prune(folder, keep)
    return entry


def in_background(function: Callable[..., T], *args: Any) -> "Future[T]":
    """Start function(*args) in a thread; the future's result() waits for it, and raises what it raised."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function, *args)
    pool.shutdown(wait=False)
    return future


def lock(folder: str, patience: float = 2.0) -> int | None:
    """Keep every other process from locking `folder` until this one ends; -> an open handle, to close if sooner.

    ValueError says who has it: its host, process and start. The system holds the lock and drops it with the process,
    so a dead run's is never in the way; one just killed may take a moment to die, hence `patience`, in seconds. None
    for a URL and where the file system has no locks.
    """
    if "://" in folder:
        return None
    handle = os.open(os.path.join(folder, ".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    end = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() < end:
                time.sleep(0.05)
                continue
            holder = os.read(handle, 200).decode(errors="replace")
            os.close(handle)
            raise ValueError(f"in use by another run: {holder}") from None
        except OSError:
            os.close(handle)
            return None
    os.ftruncate(handle, 0)
    os.write(handle, f"{socket.gethostname()}, pid {os.getpid()}, since {time.strftime('%F %T')}".encode())
    return handle


def set_aside(folder: str, name: str) -> None:
    """Rename what is no checkpoint after all, so that it is neither tried nor counted as one again."""
    if "://" in folder:
        with remote(folder) as (fs, path):
            fs.mv(f"{path}/{name}", f"{path}/{name}.damaged")
    else:
        os.rename(os.path.join(folder, name), os.path.join(folder, f"{name}.damaged"))


def remove(folder: str, name: str) -> None:
    """Delete a checkpoint, or what a save left; no error if somebody did so before.

    A folder under a file's name is not ours to delete: set aside.
    """
    try:
        if "://" in folder:
            with remote(folder) as (fs, path):
                fs.rm_file(f"{path}/{name}")
        else:
            os.unlink(os.path.join(folder, name))
    except FileNotFoundError:
        pass
    except (IsADirectoryError, PermissionError):  # the second is what macOS says
        if name.endswith(".pt"):
            set_aside(folder, name)
        else:
            _remove_folder(folder, name)


def _remove_folder(folder: str, name: str) -> None:
    """If it is broken off, what is left is no checkpoint any more."""
    if not name.startswith(TEMPORARY):
        os.rename(os.path.join(folder, name), os.path.join(folder, TEMPORARY + name))
        name = TEMPORARY + name
    shutil.rmtree(os.path.join(folder, name), ignore_errors=True)  # what a reader on NFS still has open: the next time


def _open(folder: str, name: str) -> Any:
    if "://" not in folder:
        path = os.path.join(folder, name)
        if os.path.exists(path) and not os.path.isfile(path):
            raise OSError("not a file")  # a pipe or a device might never end
        return open(path, "rb")
    with remote(folder) as (fs, path), tempfile.TemporaryDirectory() as here:
        fs.get_file(f"{path}/{name}", os.path.join(here, "state"))  # all of it: it is read twice, out of order
        return open(os.path.join(here, "state"), "rb")  # deleted now, but readable until it is closed


@contextmanager
def remote(folder: str) -> Iterator[tuple[Any, str]]:
    """(file system, path) of a URL. What goes wrong with it inside is an OSError that names the folder.

    Nothing is tried again here: the packages of file systems do so, as often as their own settings say.
    """
    from fsspec.core import url_to_fs  # comes with torch; only needed, and only imported, for a URL

    try:
        fs, path = url_to_fs(folder)
        yield fs, path.rstrip("/")
    except (FileNotFoundError, IsADirectoryError, ImportError, ValueError):
        raise
    except Exception as error:  # each package has its own
        text = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise OSError(f"{folder}: {text}") from error
