"""Write the state of a training run to a durable file, and read it back.

    held = lock("out") if rank == 0 else None                   # keeps a second run out
    step, more = resume_("out", model, [optimizer])             # on every rank
    ...
    state = snapshot(model, [optimizer], note="anything")       # on every rank
    if rank == 0:
        save("out", state, step=400, loss=1.8812, keep=3)

Every rank must call resume_, snapshot and restore_. The other functions are for one rank. They
raise OSError if the file system fails. save can run in a thread while the training continues.

A checkpoint is one file, for example `step-00000400-loss-1.8812-<digest>.pt`. The digest is the
first half of the SHA-256 of the file. `torch.load(path, weights_only=True)` reads it.
"""

import copy
import hashlib
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

T = TypeVar("T")
State = dict[str, Any]
NAME = re.compile(r"step-(\d{8,})(?:-loss-(-?\d+(?:\.\d+)?(?:e[-+]\d+)?))?-[0-9a-f]{32}\.pt")
TEMPORARY = ".saving-"  # prefix of incomplete files


class Entry(NamedTuple):
    """What the name of a checkpoint says. `step` comes first, so that sorted() sorts by step."""

    step: int
    name: str  # of the file
    loss: float  # math.inf if the name has none


# ------------------------------------------------------------------- model and optimizers <-> state


def snapshot(model: nn.Module, optimizers: Sequence[Optimizer], **more: Any) -> State:
    """Return {"model": {...}, "optimizers": [{"state": {...}}], **more}, copied to the CPU.

    Every rank must call this. Ranks above 0 get {}. The state of an optimizer has the names of the
    parameters as keys. Its settings, such as the learning rate, are not saved.

    model: can be wrapped in DistributedDataParallel and torch.compile, or sharded by FSDP2.
    more: plain values and tensors. They are not copied: do not change them before save() has ended.
    """
    model = unwrap(model)
    names = {p: name for name, p in model.named_parameters()}
    rank0 = not dist.is_initialized() or dist.get_rank() == 0

    @cache  # A tied weight is copied once.
    def copy_tensor(tensor: Tensor) -> Tensor | None:
        if hasattr(tensor, "full_tensor"):  # a DTensor: all ranks send their parts
            tensor = tensor.full_tensor()
        return tensor.detach().to("cpu", copy=True) if rank0 else None

    def copy_all(values: State) -> State:
        return {
            key: copy_tensor(value) if isinstance(value, Tensor) else copy.deepcopy(value)
            for key, value in values.items()
        }

    state = {
        "model": copy_all(model.state_dict(keep_vars=True)),
        "optimizers": [
            {"state": {names[p]: copy_all(values) for p, values in optimizer.state.items()}}  # type: ignore[index]
            for optimizer in optimizers
        ],
    }
    return state | more if rank0 else {}


def restore_(state: State, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Put the state from snapshot() on rank 0 into the model and the optimizers of all ranks.

    Every rank must call this; what ranks above 0 pass as `state` is ignored. The state of each
    optimizer is replaced, and its settings, such as the learning rate, stay as they are here. To
    restore the weights alone, pass {"model": state["model"]} and no optimizers.

    ValueError on every rank, before anything changes, if the state does not fit. The kind of an
    optimizer is not compared. Not supported are optimizers that have more than tensors and plain
    values for each parameter, such as LBFGS, and extra state that changes its type or shape.
    """
    model = unwrap(model)
    names = {p: name for name, p in model.named_parameters()}
    ours = model.state_dict()

    def misfit() -> str:
        saved = state.get("optimizers", [])
        if len(saved) != len(optimizers):
            return f"{len(saved)} optimizers in the checkpoint, {len(optimizers)} here"
        for optimizer, theirs in zip(optimizers, saved):
            trained = {names[p] for group in optimizer.param_groups for p in group["params"]}
            for name in theirs["state"].keys() - trained:
                return f"the checkpoint has optimizer state of {name}, which is not trained here"
        return difference(state.get("model", {}), ours)

    if problem := on_rank_zero(misfit):
        raise ValueError(problem)
    for name, value in ours.items():
        saved = on_rank_zero(lambda: state["model"][name])
        ours[name] = value.copy_(placed(saved, value)) if isinstance(value, Tensor) else saved
    model.load_state_dict(ours)  # for set_extra_state() and hooks
    for i, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            # As in Optimizer.load_state_dict, "step" is otherwise on the CPU.
            step_too = group.get("fused") or group.get("capturable")
            for p in group["params"]:
                saved = on_rank_zero(lambda: state["optimizers"][i]["state"].get(names[p], {}))
                optimizer.state.pop(p, None)
                for key, value in copy.deepcopy(saved).items():
                    optimizer.state[p][key] = (
                        placed(value, p) if key != "step" or step_too else value
                    )


def resume_(
    folder: str, model: nn.Module, optimizers: Sequence[Optimizer], scheduler: Any = None
) -> tuple[int, State]:
    """Continue from the newest good checkpoint of a folder. Return its step and its other values.

    Every rank must call this, and all get the same. Only rank 0 reads the folder. It sets damaged
    checkpoints aside, with a warning. Without a checkpoint, the result is (0, {}).

    scheduler: one of torch, with cycle_momentum=False. Give snapshot() scheduler.state_dict() too.
    ValueError if something does not fit: see restore_. OSError if the folder cannot be read.
    """
    state: State = {}

    def read() -> tuple[int | None, State]:
        nonlocal state
        entry, state, rejected = newest(folder, list_checkpoints(folder))
        for name, reason in rejected.items():
            set_aside(folder, name)
            warnings.warn(f"{name}: {reason}; set aside")
        more = {key: state[key] for key in state.keys() - {"model", "optimizers"}}
        return entry and entry.step, more

    step, more = on_rank_zero(read)
    if step is None:
        return 0, {}
    if bool(scheduler) != ("scheduler" in more):
        raise ValueError(f"{folder}: either the checkpoint or this call has no scheduler")
    restore_(state, model, optimizers)
    if scheduler:
        scheduler.load_state_dict(more["scheduler"])
        # load_state_dict does not set the rates, and the constructor of a scheduler changes them.
        for group, lr in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr()):
            group["lr"] = lr
    return step, more


def on_rank_zero(make: Callable[[], T]) -> T:
    """Return the result of make() on rank 0. Every rank must call this."""
    if not dist.is_initialized():
        return make()
    result = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(result)
    return result[0]  # type: ignore[return-value]


def placed(value: Any, like: Tensor) -> Any:
    """Return a tensor on the device of `like`. If it has its shape, also with its sharding.

    Then it also has its strides, which fused optimizers need. Other values are returned unchanged.
    """
    if not isinstance(value, Tensor):
        return value
    value = value.to(like.device)
    if value.shape != like.shape:
        return value
    new = torch.empty_like(like, dtype=value.dtype)
    if hasattr(like, "placements"):  # a DTensor
        # With None, no rank sends: each one takes its part.
        value = dist.tensor.distribute_tensor(
            value,
            like.device_mesh,  # type: ignore[attr-defined]
            like.placements,
            src_data_rank=None,
        )
    return new.copy_(value)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel and torch.compile."""
    while isinstance(model, nn.parallel.DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = getattr(model, "_orig_mod", None) or model.module  # type: ignore[assignment]
    return model


def difference(theirs: State, ours: State) -> str:
    """Return the first name, shape or dtype that differs between two state dicts, or ""."""
    for name in ours | theirs:
        a, b = (
            f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value)
            for value in (theirs.get(name), ours.get(name))
        )
        if a != b:
            return f"{name} is {a} in the checkpoint, {b} here"
    return ""


# ----------------------------------------------------------------------------------- state <-> file


def save(folder: str, state: State, step: int, loss: float = math.inf, keep: int = 0) -> Entry:
    """Write a checkpoint durably: when this returns, it survives a power failure.

    After an error, the earlier checkpoints are untouched. One of the same step is replaced.
    keep: besides this one, only the `keep` highest steps and the lowest loss stay; 0 keeps all.

    ValueError if the state is empty, as on ranks above 0. UnpicklingError if it has a value that
    torch.load(weights_only=True) refuses.
    """
    if not state:
        raise ValueError("nothing to save: snapshot() gives the state to rank 0 only")
    os.makedirs(folder, exist_ok=True)
    temporary = Path(folder, f"{TEMPORARY}{os.getpid()}-{id(state)}")
    try:
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        torch.load(temporary, map_location="meta", weights_only=True)  # could load() read it?
        rating = f"-loss-{loss:.9g}" if math.isfinite(loss) else ""
        [entry] = parse_names([f"step-{step:08d}{rating}-{sha256(temporary)[:32]}.pt"])
        temporary.replace(Path(folder, entry.name))
        sync_folder(folder)
    except RuntimeError as error:  # torch.save hides an OSError in __context__
        raise error.__context__ or error
    finally:
        temporary.unlink(missing_ok=True)
    for old in superseded(list_checkpoints(folder), entry, keep):
        with suppress(OSError):  # The checkpoint is written, and the next save tries again.
            Path(folder, old.name).unlink()
    return entry


def load(folder: str, entry: Entry) -> State:
    """Read a checkpoint. Its tensors are on the CPU. ValueError if the file is damaged."""
    path = Path(folder, entry.name)
    if sha256(path)[:32] not in entry.name:
        raise ValueError("damaged: the content does not match the digest in the name")
    return torch.load(path, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]


def newest(
    folder: str,
    entries: Sequence[Entry],
    load: Callable[[str, Entry], State] = load,
) -> tuple[Entry | None, State, dict[str, str]]:
    """Return the newest good checkpoint, its state, and {name: reason} of newer, damaged ones.

    entries: the checkpoints to try, from the last to the first; see list_checkpoints.
    (None, {}, {}) if there are none. ValueError if all are damaged. OSError if one cannot be read.
    """
    rejected: dict[str, str] = {}
    for entry in reversed(entries):
        try:
            return entry, load(folder, entry), rejected
        except ValueError as error:
            rejected[entry.name] = f"{error}"
        except OSError as error:  # An error of read() does not name its file.
            error.filename = error.filename or entry.name
            raise
    if rejected:
        raise ValueError(f"{folder}: no checkpoint can be used: {rejected}")
    return None, {}, {}


def list_checkpoints(folder: str) -> list[Entry]:
    """Return the checkpoints in a folder, lowest step first; [] if there is no folder."""
    with suppress(FileNotFoundError):  # Any other error may pass.
        return parse_names(os.listdir(folder))
    return []


def parse_names(names: Iterable[str]) -> list[Entry]:
    """Return an entry for each name of a checkpoint, lowest step first."""
    matches = map(NAME.fullmatch, names)
    return sorted(Entry(int(m[1]), m[0], float(m[2] or "inf")) for m in matches if m)


def superseded(entries: Sequence[Entry], new: Entry, keep: int) -> set[Entry]:
    """Return which entries, lowest step first, save() deletes after `new` is written."""
    current = [each for each in entries if each.step != new.step or each == new]
    best = min(reversed(current), key=lambda entry: entry.loss)  # of equal losses, the newest
    return {*entries} - {*current[-keep:], best, new}


def set_aside(folder: str, name: str) -> None:
    """Add ".damaged" to the name of a file, so that it is no longer listed."""
    Path(folder, name).replace(Path(folder, f"{name}.damaged"))


def lock(folder: str) -> IO[str]:
    """Keep other runs out of a folder until the result is closed or this process ends.

    Forked processes, such as workers of a DataLoader, also hold the lock, until they end.
    Call this before the first save(), and keep the result. Do not move the folder meanwhile. This
    deletes what an interrupted save left. BlockingIOError if another process has the lock. Where
    locks do not work (Windows, some network disks), it warns.
    """
    os.makedirs(folder, exist_ok=True)
    file = open(Path(folder, ".lock"), "a")
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(f"{folder} is in use by another run") from None
    except (ImportError, OSError) as error:
        warnings.warn(f"nothing keeps a second run out of {folder}: {error}")
        return file
    for path in Path(folder).glob(f"{TEMPORARY}*"):
        path.unlink()
    return file


def append_text(folder: str, name: str, text: str) -> None:
    """Append to a text file, in one write, so that a process that is killed leaves no half line."""
    with open(Path(folder, name), "a") as file:
        file.write(text)


def sync_folder(folder: str) -> None:
    """Make new names in a folder survive a power failure, where the file system can do that."""
    with suppress(OSError):  # Windows and some network file systems cannot.
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sha256(path: str | Path) -> str:
    """Return the SHA-256 of a file, as 64 hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
