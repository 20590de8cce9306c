"""Write the state of a training run to a durable file and read it back.

    step, more = resume_("out", model, [optimizer])             # on every rank
    ...
    state = snapshot(model, [optimizer], note="anything")       # on every rank
    if rank == 0:
        save("out", state, step=400, loss=1.8812, keep=3)

Every rank must call resume_(), snapshot() and restore_(). One rank alone may call the functions for
files, and save() may run in a thread. These functions raise OSError if the file system fails.

If only rank 0 raises an error in this example, the other ranks wait in their next collective until
rank 0 ends. extras/tutorial/4_checkpoints.py calls save() through a function of ddp_setup.py, which
raises its errors on all ranks. To keep other runs out of the folder, rank 0 can hold a lock:

    make_folder("out")
    held = lock("out")                                          # before the first save
    save("out", state, step=400, held=held)

To save while the training continues, use one executor for all saves, and call result() of each
future: it raises the error of the save. On a CPU, its thread should use one OpenMP thread, so that
it does not slow the training down:

    torch.get_num_threads()    # keeps the number of the training thread: it could become 1 as well
    executor = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))

A checkpoint is one file, for example `step-00000400-loss-1.8812-<digest>.pt`. The loss has up to
nine significant digits. The digest is the first 32 hex digits of the SHA-256 of the file.
`torch.load(path, weights_only=True)` can read the file. A sharded checkpoint is a folder, and its
name has no ".pt": see extras/sharded.py. For URLs see extras/remote.py.
"""

import copy
import errno
import hashlib
import math
import os
import re
import shutil
import socket
import stat
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

State = dict[str, Any]
# step, loss (optional), digest, ".pt" (not if sharded)
NAME = re.compile(r"step-(\d{8,})(?:-loss-(-?\d+(?:\.\d+)?(?:e[-+]\d+)?))?-[0-9a-f]{32}(\.pt)?")
TEMPORARY = ".saving-"  # prefix of incomplete files and folders


class Entry(NamedTuple):
    """What the name of a checkpoint says. `step` comes first, so that sorted() sorts by step."""

    step: int
    name: str  # of the file or folder
    loss: float  # validation loss; math.inf if unknown or not finite


class Found(NamedTuple):
    """A verified checkpoint."""

    entry: Entry
    state: State


# ------------------------------------------------------------------- model and optimizers <-> state


def snapshot(model: nn.Module, optimizers: Sequence[Optimizer], **more: Any) -> State:
    """Return {"model": {...}, "optimizers": [{"state": {...}}], **more}, copied to the CPU.

    Every rank must call this. Ranks above 0 get {}. The training can continue at once, because the
    copies share no memory with the model. An optimizer without a state becomes {}. Otherwise its
    "state" has the names of the parameters as keys, which are those of unwrap(model). Its settings,
    such as the learning rate, are not saved.

    model: for several models, pass nn.ModuleDict({"g": unwrap(g), "d": unwrap(d)}).
    optimizers: ValueError if one has a parameter that the model does not have. more: tensors and
    plain Python values, for example the state of a scheduler. They are not copied: do not change
    them before save() has ended. restore_ ignores them: take them from the state that newest()
    returns.
    """
    model = unwrap(model)
    names = parameter_names(model, optimizers)
    state = {
        # With keep_vars, a tied weight is one tensor, which @cache below copies once.
        "model": model.state_dict(keep_vars=True),
        "optimizers": [
            {"state": {names[p]: values for p, values in optimizer.state.items()}}
            if optimizer.state
            else {}
            for optimizer in optimizers
        ],
    }
    rank0 = not dist.is_initialized() or dist.get_rank() == 0

    @cache
    def to_cpu(tensor: Tensor) -> Tensor | None:
        if hasattr(tensor, "full_tensor"):  # a DTensor: all ranks send their parts
            tensor = tensor.full_tensor()
        return tensor.detach().to("cpu", copy=True) if rank0 else None

    copies = map_values(lambda v: to_cpu(v) if isinstance(v, Tensor) else copy.deepcopy(v), state)
    return {**copies, **more} if rank0 else {}


def restore_(state: State, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Put the state from snapshot() into a model and optimizers.

    Every rank must call this. All ranks get the state of rank 0. If rank 0 has {}, nothing changes.

    The present state of the optimizers and the gradients of their parameters are deleted, even if
    the checkpoint has no optimizer state. Settings, such as the learning rate, stay as they are
    now. For a scheduler of torch, see resume_.
    To restore the weights alone, pass {"model": state["model"]} and no optimizers.

    If a parameter has no optimizer state yet, restore_ first creates it by a step() with zero
    gradients and learning rate 0. This calls the hooks of step().

    ValueError on every rank if the state, the model and the optimizers do not fit together, for
    example because a parameter that was trained before is now not in the optimizer, or is frozen
    (so freeze it after this call). The model is then unchanged (unless that step() with learning
    rate 0 has changed it, as with Adam(eps=0)), but optimizers may have lost their state.

    Not supported are SparseAdam, LBFGS, optimizers that wrap another one (pass the inner one),
    optimizers whose step() has no argument `closure`, those with a state in param_groups (Prodigy)
    or under a key that is not a parameter, and those whose state changes its names or shapes during
    training. The same holds for extra state of a module: its types and shapes must be the same here
    as in the checkpoint. In torch 2.11, Adagrad cannot continue from a checkpoint without a state
    of it.
    """
    if dist.is_initialized():
        # The other ranks check this outline, so all ranks raise the same errors.
        outline = [map_values(lambda v: v.to("meta") if isinstance(v, Tensor) else v, state)]
        dist.broadcast_object_list(outline)
        if dist.get_rank() > 0:
            state = outline[0]
    if not state:
        return
    model = unwrap(model)
    ours: State = model.state_dict()
    check_same(state.get("model", {}), ours)
    names = parameter_names(model, optimizers)
    saved = state.get("optimizers", [])
    if len(saved) != len(optimizers):
        raise ValueError(
            f"{len(saved)} optimizers in the checkpoint, {len(optimizers)} here; "
            f"the checkpoint has the keys {', '.join(map(str, state))}"
        )
    for optimizer, theirs in zip(optimizers, saved):
        templates = reset_optimizer_(model, optimizer)
        unused = dict(theirs.get("state", {}))
        for parameter, template in templates.items():
            if values := unused.pop(names[parameter], {}):
                where = f"optimizer state of {names[parameter]}: "
                # With wrong shapes, a fused optimizer computes nonsense.
                check_same(values, template, where)
                optimizer.state[parameter] = map_values(_receive, values, template)
        if unused:
            name = min(unused)
            cause = (
                "does not train it: is it frozen, or in another optimizer?"
                if templates
                else "keeps none: has it other settings, such as no momentum, or is it frozen?"
            )
            raise ValueError(
                f"the checkpoint has optimizer state of {name} ({', '.join(unused[name])}), but "
                f"the same optimizer here {cause}"
            )
    # The tensors in `ours` are those of the model, and receive the saved values.
    ours |= map_values(_receive, state["model"], ours)
    model.load_state_dict(ours)  # for set_extra_state() and hooks


def resume_(
    folder: str,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    scheduler: Any = None,
    files: Any = None,
) -> tuple[int, State]:
    """Continue from the newest checkpoint of a folder. Return its step and its other values.

    Every rank must call this, and all get the same. Without a checkpoint, nothing changes, and the
    result is (0, {}). The other values are those that snapshot() got as **more.

    scheduler: one of torch. snapshot() must have got scheduler=scheduler.state_dict(). Its learning
        rates are restored too, but no other setting of an optimizer that it changes, such as the
        momentum with OneCycleLR.
    files: has the functions to use: this module, by default, or storage() of extras/remote.py or
        extras/sharded.py.

    Only rank 0 reads the folder. It sets damaged checkpoints aside, with a warning, and raises the
    errors of newest(). The other ranks wait until it has read, or until its process ends. Then all
    raise the errors of restore_().
    """
    files = files or sys.modules[__name__]
    values: list[Any] = [(0, {})]
    state: State = {}
    if not dist.is_initialized() or dist.get_rank() == 0:
        found, rejected = files.newest(folder)
        for name, reason in rejected.items():
            files.set_aside(folder, name)
            warnings.warn(f"{name}: {reason}; set aside", stacklevel=2)
        if found:
            state = found.state
            more = {k: v for k, v in state.items() if k not in ("model", "optimizers")}
            values = [(found.entry.step, more)]
    files.restore_(state, model, optimizers)
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    step, more = values[0]
    if scheduler and "scheduler" in more:
        scheduler.load_state_dict(more["scheduler"])
        # load_state_dict does not set these, and the constructor of a scheduler changes them.
        for group, lr in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr()):
            group["lr"] = lr
    return step, more


def parameter_names(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[Any, str]:
    """Return {parameter: its name}. ValueError if an optimizer has a parameter of another model."""
    names: dict[Any, str] = {p: name for name, p in model.named_parameters()}
    if any(p not in names for o in optimizers for g in o.param_groups for p in g["params"]):
        raise ValueError("an optimizer has a parameter that is not one of the model")
    return names


def reset_optimizer_(model: nn.Module, optimizer: Optimizer) -> dict[Any, State]:
    """Delete an optimizer's state and gradients. Return a template of its state.

    Every rank must call this.
    """
    # This import takes 0.5 s.
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    # If an optimizer has no gradients and no state, get_optimizer_state_dict creates its state, by
    # the step that restore_ describes. If each parameter already has a state, that is the template,
    # because torch 2.11 cannot create the state of Adagrad a second time.
    optimizer.zero_grad()
    if not all(p in optimizer.state for group in optimizer.param_groups for p in group["params"]):
        optimizer.state.clear()
        get_optimizer_state_dict(model, optimizer)
    templates = dict(optimizer.state)
    optimizer.state.clear()
    return templates


def map_values(function: Callable[..., Any], tree: Any, *more: Any) -> Any:
    """Call function(value, ...) for each value in nested dicts, lists and tuples.

    Return the results in the same nest. more: nests with the same keys and lengths, whose values
    are the other arguments of the function.
    """
    # torch.utils._pytree does the same, but is private.
    if isinstance(tree, dict):
        return {key: map_values(function, tree[key], *(m[key] for m in more)) for key in tree}
    if type(tree) in (list, tuple):
        return type(tree)(map_values(function, *values) for values in zip(tree, *more))
    return function(tree, *more)


def _receive(value: Any, like: Any) -> Any:
    """Copy a value of rank 0 into the tensor `like` on each rank, and return `like`.

    Every rank must call this. value: a tensor is on "meta" on ranks above 0. A value that is not a
    tensor is the same on all ranks, and a copy of it is returned. like: keeps its device, strides
    and sharding.
    """
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    new = value
    if dist.is_initialized():
        device = "cuda" if "nccl" in dist.get_backend_config() else "cpu"
        new = value.new_empty(value.shape, device=device)
        if not value.is_meta:
            new.copy_(value)
        # Send bytes, because gloo and NCCL cannot send all dtypes.
        dist.broadcast(new.flatten().view(torch.uint8), 0)
    if hasattr(like, "placements"):
        # With None, no rank sends: each one takes its part of `new`.
        new = dist.tensor.distribute_tensor(
            new, like.device_mesh, like.placements, src_data_rank=None
        )
    return like.copy_(new)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel and torch.compile.

    Wrappers of parts of the model stay. So compile a part with part.compile(), which adds none.
    """
    # _orig_mod, of torch.compile, is private. Without it, restore_ raises ValueError, because the
    # names in a snapshot of a compiled model have a prefix.
    while isinstance(model, nn.parallel.DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = getattr(model, "_orig_mod", None) or model.module  # type: ignore[assignment]
    return model


def check_same(theirs: State, ours: State, where: str = "") -> None:
    """Raise ValueError unless both state dicts have the same names, shapes and dtypes.

    theirs: from a checkpoint. where: the beginning of the message.
    """
    for name in ours | theirs:
        a, b = (f"{map_values(_describe, values.get(name))}" for values in (theirs, ours))
        if a != b:
            raise ValueError(f"{where}{name} is {a:.1000} in the checkpoint, {b:.1000} here")


def _describe(value: Any) -> str:
    """Describe a value, to compare it and for an error."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {value.dtype}"
    return "missing" if value is None else f"a {type(value).__name__}"


# ----------------------------------------------------------------------------------- state <-> file


def save(
    folder: str,
    state: State,
    step: int,
    loss: float | None = None,
    keep: int | None = None,
    held: IO[str] | None = None,
) -> Entry:
    """Write a checkpoint durably: when this returns, it survives a power failure.

    state: what snapshot() returned on rank 0. step: number of finished steps. Another checkpoint of
    this step is deleted. loss: the validation loss. keep: if given, prune(folder, keep) follows,
    which can delete the new checkpoint at once if the folder has higher steps. held: what lock()
    returned. If it is a lock, the folder must still have it: see check_lock(). Otherwise, the
    folder is created.

    ValueError if step < 0, or if load() would refuse the file, for example because of NaN. After an
    error in writing, the earlier checkpoints are untouched. An older one that cannot be deleted is
    only a warning. ValueError also if keep < 1, after the file was written.
    """
    if step < 0:
        raise ValueError(f"step is {step}; must be at least 0")
    _check_state(state)
    check_lock(folder, held) if held else make_folder(folder)
    with _temporary_file(folder) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # torch.save hides an OSError in __context__.
            raise error.__context__ if isinstance(error.__context__, OSError) else error
        # Raise ValueError now if load() would refuse a class. "meta" tensors take no memory. The
        # file is still open, but torch.save has flushed it.
        _read_state(file.name, device="meta")
        entry = make_entry(step, loss, sha256(file.name)[:32])
        _publish(file, entry.name)
    for other in list_checkpoints(folder):
        if other.step == step and other != entry:
            _remove(folder, other.name)
    if keep is not None:
        prune(folder, keep)
    return entry


def load(folder: str, entry: Entry) -> State:
    """Read and verify a checkpoint. Its tensors are on the CPU.

    ValueError if the file is damaged or not a checkpoint, or if the model contains NaN. OSError if
    it cannot be read, and may be good. NotImplementedError if the checkpoint is sharded.
    """
    if not entry.name.endswith(".pt"):
        raise NotImplementedError(f"{entry.name} is a sharded checkpoint; see extras/sharded.py")
    path = Path(folder, entry.name)
    if not stat.S_ISREG(path.stat().st_mode):  # is_file() can hide an OSError
        raise ValueError("not a file")  # reading a pipe might never end
    if sha256(path)[:32] not in entry.name:
        raise ValueError("damaged: the content does not match the digest in the name")
    # Hide torch's warnings about the content of a forged file. (save() must not use catch_warnings,
    # which changes the filters of all threads.)
    with warnings.catch_warnings(action="ignore"):
        state: State = _read_state(path, "cpu")
    _check_state(state)
    return state


def _read_state(path: str | Path, device: str) -> Any:
    """Read a file that torch.save wrote. ValueError if it did not."""
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except MemoryError:  # The file may be good.
        raise
    except Exception as error:
        # After an OSError too. But if a file was cut, torch can seek a place before its beginning,
        # which is EINVAL.
        failed = getattr(error, "errno", errno.EINVAL) != errno.EINVAL
        if failed or isinstance(error, RuntimeError) and "memory" in f"{error}":
            raise
        # torch names a refused class, for example "GLOBAL argparse.Namespace".
        what = ": ".join([type(error).__name__, *re.findall(r"GLOBAL \S+", f"{error}")])
        raise ValueError(
            f"not a checkpoint: torch.load(weights_only=True) raised {what}"
        ) from error


def _check_state(state: Any) -> None:
    """Raise ValueError if state["model"] is missing, empty, cannot be checked, or contains NaN."""
    match state:
        case {"model": dict(model)} if model:
            pass
        case _:
            raise ValueError(
                "not a checkpoint: no state dict under 'model' (snapshot gives it to rank 0 only)"
            )
    for name, value in model.items():
        if not isinstance(value, Tensor):
            continue
        if value.is_meta or value.is_quantized or value.layout != torch.strided:
            raise ValueError(f"not supported: {name} is on the device meta, quantized or sparse")
        if value.isnan().any():
            raise ValueError(f"worthless: {name} contains NaN")


def make_entry(step: int, loss: float | None, digest: str, ending: str = ".pt") -> Entry:
    """Return the entry of a new checkpoint. ending: "" if it is sharded."""
    rating = f"-loss-{loss:.9g}" if loss is not None and math.isfinite(loss) else ""
    return parse_names([f"step-{step:08d}{rating}-{digest}{ending}"])[0]


def parse_names(names: Iterable[str]) -> list[Entry]:
    """Return an entry for each name of a checkpoint, lowest step first."""
    return sorted(
        Entry(int(match[1]), match[0], float(match[2] or "inf"))
        for match in map(NAME.fullmatch, names)
        if match
    )


def list_checkpoints(folder: str) -> list[Entry]:
    """Return the checkpoints in a folder, lowest step first; [] if there is no folder."""
    try:
        return parse_names(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def newest(
    folder: str,
    load: Callable[[str, Entry], State] = load,
    list_checkpoints: Callable[[str], list[Entry]] = list_checkpoints,
) -> tuple[Found | None, dict[str, str]]:
    """Return the newest checkpoint that load() accepts, and {name: reason} of each newer one.

    A checkpoint is rejected if load() raises ValueError, because its content is wrong. Other errors
    are passed on, such as an OSError, because the file may be good. Call set_aside() for each
    rejected checkpoint: otherwise prune() keeps it and deletes a good one in its place.

    (None, {}) if there are no checkpoints. ValueError if all are rejected. extras/ pass their own
    functions as `load` and `list_checkpoints`.
    """
    rejected: dict[str, str] = {}
    for entry in reversed(list_checkpoints(folder)):
        try:
            return Found(entry, load(folder, entry)), rejected
        except (OSError, ValueError) as error:
            if entry not in list_checkpoints(folder):
                # Another process has deleted it: start again.
                return newest(folder, load, list_checkpoints)
            if isinstance(error, OSError):
                if error.errno:  # An error of read() does not name its file.
                    error.filename = error.filename or entry.name
                raise
            rejected[entry.name] = f"{error}"
    if rejected:
        reasons = "; ".join(map(": ".join, rejected.items()))
        raise ValueError(f"{folder}: no checkpoint can be used; {reasons}")
    return None, {}


# --------------------------------------------------------------------------------------- the folder


def superseded(entries: list[Entry], keep: int) -> list[Entry]:
    """Return the entries to delete: all but the `keep` highest steps and the one of lowest loss.

    entries: lowest step first. ValueError if keep < 1.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least 1 checkpoint must be kept")
    # Of equal losses, the newest counts. If no entry has a loss, `best` is the newest entry, which
    # stays anyway.
    best = min(reversed(entries), key=lambda e: e.loss, default=None)
    return [entry for entry in entries[:-keep] if entry != best]


def prune(folder: str, keep: int) -> None:
    """Delete the checkpoints that superseded() returns. If one cannot be deleted, it only warns.

    A sharded checkpoint is only set aside, because no single operation deletes a folder.
    extras/sharded.py can delete it.
    """
    for entry in superseded(list_checkpoints(folder), keep):
        _remove(folder, entry.name)


def _remove(folder: str, name: str) -> None:
    """Delete a checkpoint, or set it aside if it is a folder."""
    path = Path(folder, name)
    try:
        if path.is_dir():
            set_aside(folder, name)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        warnings.warn(f"{name} not deleted: {error.strerror or error}", stacklevel=2)


def set_aside(folder: str, name: str) -> None:
    """Add ".damaged" to a name, so that it is no longer listed."""
    _rename(Path(folder, name), f"{name}.damaged")


def lock(folder: str, timeout: float = 2.0) -> IO[str] | None:
    """Take the lock of an existing folder, and delete all temporary files in it.

    Call this before the first save(). Otherwise lock() in another process deletes the file that
    save() is writing. Keep the result: when it is garbage collected, the lock is released. A forked
    child, such as a worker of a DataLoader, also keeps the lock until it ends.

    BlockingIOError if another process or this one still has the lock after `timeout` seconds. Where
    locks do not work (on Windows, and with a warning on some file systems), the result is None.
    Then nothing keeps other runs out, and no file is deleted.
    """
    # Not the package filelock: without flock(), it waits for ever or leaves locks behind.
    if not fcntl:
        return None
    file = open(Path(folder, ".lock"), "a+")
    end = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > end:
                file.seek(0)
                raise BlockingIOError(f"in use by another run: {file.read()}") from None
            time.sleep(0.05)
        except OSError as error:
            text = f"nothing keeps a second run out of {folder}: {error.strerror}"
            warnings.warn(text, stacklevel=2)
            return None
    file.truncate(0)
    file.write(f"{socket.gethostname()}, pid {os.getpid()}, since {time.strftime('%F %T')}")
    file.flush()
    for path in Path(folder).glob(f"{TEMPORARY}*"):
        if path.is_dir():  # of a sharded save
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return file


def check_lock(folder: str, held: IO[str] | None) -> None:
    """Raise OSError if the folder no longer has the lock `held`, which lock() returned.

    Then someone has deleted the folder or its lock, and another run may have begun there. Call this
    before writing to the folder; save() does so. None is accepted.
    """
    with suppress(FileNotFoundError):
        path = Path(folder, ".lock")
        if not held or os.path.samestat(path.stat(), os.fstat(held.fileno())):
            return
    raise OSError(f"{folder}: someone has deleted or replaced this folder or its file .lock")


# --------------------------------------------------------------------------------------- text files


def write_text(folder: str, name: str, text: str) -> None:
    """Replace the text of a file atomically and durably."""
    with _temporary_file(folder) as file:
        file.write(text.encode())
        _publish(file, name)


def append_text(folder: str, name: str, line: str) -> None:
    """Add a line, which must end with a line break.

    After an OSError, a part of it can be in the file. The next line then begins with a line break.
    A power failure can lose a line.
    """
    path = Path(folder, name)
    with path.open("ab") as file:
        if path.stat().st_size:  # 0 for a pipe, too
            with path.open("rb") as old:
                old.seek(-1, os.SEEK_END)
                line = "\n" * (old.read() != b"\n") + line
        file.write(line.encode())


def read_text(folder: str, name: str) -> str:
    """Return the text of a file, or "" if there is no file."""
    try:
        return Path(folder, name).read_text("utf-8", "replace")
    except FileNotFoundError:
        return ""


# --------------------------------------------------------------------------------------- durability


def make_folder(folder: str) -> None:
    """Create a folder and its parents durably."""
    if not folder or re.match(r"\w[\w+.-]+:/", f"{folder}"):  # Path turns "s3://" into "s3:/".
        raise ValueError(f"{folder!r} is empty or a URL; for URLs see extras/remote.py")
    path = Path(folder)
    for each in [*reversed(path.parents), path]:
        if not each.is_dir():
            each.mkdir(exist_ok=True)
            fsync_folder(each.parent)


@contextmanager
def _temporary_file(folder: str) -> Iterator[IO[bytes]]:
    """Open a temporary file. Delete it at the end, unless it was renamed."""
    path = Path(folder, TEMPORARY + uuid.uuid4().hex)
    try:
        with path.open("wb") as file:
            yield file
    finally:
        path.unlink(missing_ok=True)


def _publish(file: IO[bytes], name: str) -> None:
    """Make a temporary file durable, close it and give it its name."""
    file.flush()
    os.fsync(file.fileno())
    file.close()  # Windows cannot rename an open file
    _rename(Path(file.name), name)


def _rename(path: Path, name: str) -> None:
    """Rename durably. A file of that name is replaced."""
    path.replace(path.with_name(name))
    fsync_folder(path.parent)


def fsync_folder(folder: str | Path) -> None:
    """Make new names in a folder survive a power failure. Warn if the file system cannot do it."""
    if os.name == "posix":  # Windows cannot open a folder
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in (errno.EBADF, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
                raise
            # Python shows the same text of the same line once.
            text = f"{error.strerror}: this file system cannot make a new name durable; "
            warnings.warn(text + "a power failure can lose the newest checkpoints", stacklevel=1)
        finally:
            os.close(handle)


def sha256(path: str | Path) -> str:
    """Return the SHA-256 of a file, as 64 hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
