"""Write the state of a training to a durable file and read it back, for almost any model.

    found = None
    if rank == 0:    # once, before the first save
        make_folder("out")
        held = lock("out")    # keeps other runs out of the folder
        found, rejected = newest("out")
        for name in rejected:    # damaged checkpoints
            set_aside("out", name)
    restore_(found.state if found else {}, model, optimizers)   # on every rank
    step = [found.entry.step if found else 0]
    if torch.distributed.is_initialized():    # restore_ does not tell the other ranks the step
        torch.distributed.broadcast_object_list(step)    # now step[0] is the same on all ranks
    ...
    state = snapshot(model, optimizers, note="anything")        # on every rank
    if rank == 0:
        save("out", state, step=400, loss=1.8812, keep=3)

If newest() or save() raises on rank 0 only, the other ranks wait in their next collective, such as
restore_, until rank 0 ends or the timeout of the process group is over. To avoid that, let every
rank call wait_together() of ddp_setup.py. It raises the error of one rank on all ranks, and returns
to each rank the result of its own call:

    with process_group() as world:    # of ddp_setup.py
        found, rejected = wait_together(
            lambda: newest("out") if world.rank == 0 else (None, {}), world
        )

A checkpoint is one file, for example `step-00000400-loss-1.8812-<digest>.pt`. The digest is the
first 32 hex digits of the SHA-256 of the file, so that an incomplete or changed file is recognized.
`torch.load(path, weights_only=True)` reads the file without this module. The file holds a dict:
"model" is a state dict on the CPU, whose names have no prefixes of DDP or torch.compile,
"optimizers" has one dict per optimizer, and the other entries are those that the caller gave to
snapshot().

A checkpoint name without ".pt" is the name of a folder: a sharded checkpoint, which
extras/sharded.py writes, reads and deletes. This module can only list it and rename it.

Every rank must call snapshot() and restore_(). All other functions can be called on one rank alone,
usually rank 0, and in a thread. To save during training, use one ThreadPoolExecutor(1) for all
saves and call submit(save, ...); result() of the returned future raises the error of the save.
Folders are local paths; for URLs see extras/remote.py. Functions that use files raise OSError if
the file system fails, unless they say something else.
"""

import copy
import errno
import hashlib
import math
import os
import re
import shutil
import socket
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

State = dict[str, Any]
# step, loss (optional), digest, ".pt" (not for a sharded checkpoint)
NAME = re.compile(r"step-(\d{8,})(?:-loss-(-?\d+\.\d+))?-([0-9a-f]{32})(\.pt)?")
# Names of files that are being written start with this. Names of folders that extras/sharded.py is
# writing or deleting start with it too.
TEMPORARY = ".saving-"


class Entry(NamedTuple):
    """What the name of a checkpoint says. Entries are sorted by step, then by name."""

    step: int
    name: str  # of the file, or of the folder of a sharded checkpoint
    loss: float | None  # validation loss with 4 decimals; None if unknown or not finite
    digest: str  # 32 hex digits


class Found(NamedTuple):
    """A checkpoint that was read and verified."""

    entry: Entry
    state: State


# ------------------------------------------------------------------- model and optimizers <-> state


def snapshot(model: nn.Module, optimizers: Sequence[Optimizer], **more: Any) -> State:
    """Return {"model": {...}, "optimizers": [...], **more}, with the states copied to the CPU.

    Every rank must call this. In a process group, ranks other than 0 get empty dicts for the model
    and the optimizers; save() refuses this result. The copies share no memory with the model and
    the optimizers, so training can continue at once. The values of `more` are passed on without a
    copy: do not change them before save() has ended. An optimizer without state becomes {} (before
    its first step, or SGD without momentum).
    """
    dcp = _state_dict_functions()
    options = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = {
        "model": dcp.get_model_state_dict(model, options=options),
        # If an optimizer had no state, get_optimizer_state_dict would create it: see
        # _check_and_reset_.
        "optimizers": [
            dcp.get_optimizer_state_dict(model, optimizer, options=options)
            if optimizer.state
            else {}
            for optimizer in optimizers
        ],
    }
    # `live` has the addresses of all tensors that the training uses. deepcopy must copy the tensors
    # of `state` with these addresses. The others are copies already: torch has gathered them, or
    # moved them from a GPU. deepcopy does not copy what is in its memo, so they go there.
    used = [model.state_dict(), *([o.state, o.param_groups] for o in optimizers)]
    live = {
        getattr(t, "_local_tensor", t).data_ptr()  # of a DTensor, the shard of this rank
        for t in tree_leaves(used)
        if isinstance(t, Tensor)
    }
    already_copied = {
        id(t): t for t in tree_leaves(state) if isinstance(t, Tensor) and t.data_ptr() not in live
    }
    return {**copy.deepcopy(state, memo=already_copied), **more}


def _state_dict_functions() -> Any:
    """Return torch's module for the state of wrapped models. Its import takes 0.5 s or more."""
    from torch.distributed.checkpoint import state_dict

    return state_dict


def restore_(state: State, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Put the state from snapshot() into a model and optimizers.

    Every rank must call this. In a process group all ranks get the state of rank 0, and what the
    other ranks pass is ignored. If rank 0 passes {}, nothing changes on any rank. If the state has
    "optimizers", the optimizers get their saved moments (all that they keep per parameter, such as
    the number of steps). If not, their moments are deleted, so that the optimizers are as they were
    before their first step. In both cases they keep the settings that they have now (learning rate,
    weight decay, ...), and the gradients of their parameters are deleted. `state` is not changed
    and shares no memory with the model and the optimizers.

    Not for SparseAdam and LBFGS, which torch cannot restore in this way, and not for FSDP if a
    module has two names. Of optimizers that also keep state in their groups (schedule-free,
    Prodigy), this state is not restored.

    ValueError on every rank if the state does not fit. The model is then unchanged (if the
    optimizers change nothing in a step with the learning rate 0), but gradients and moments may be
    deleted.
    """
    in_group = dist.is_initialized()
    if in_group:
        # First send everything but the content of the tensors (on the device "meta" they have
        # none), so that all ranks check the same and raise the same errors. set_model_state_dict
        # and set_optimizer_state_dict send the content later.
        outline = [tree_map_only(Tensor, lambda t: t.to("meta"), state)]
        dist.broadcast_object_list(outline)
        if dist.get_rank() > 0:
            state = outline[0]
        else:  # torch would send tensors with other strides, such as channels_last, in wrong order
            state = tree_map_only(Tensor, Tensor.contiguous, state)
    if not state:
        return
    dcp = _state_dict_functions()
    # Without options, get_model_state_dict does not gather the weights of an FSDP model. That is
    # enough here, because a DTensor has the shape of the whole tensor.
    check_same(state.get("model", {}), dcp.get_model_state_dict(model))
    saved = state.get("optimizers", [{}] * len(optimizers))
    if len(saved) != len(optimizers):
        raise ValueError(f"{len(saved)} optimizers in the checkpoint, {len(optimizers)} here")
    # the groups of each optimizer, with names in place of the parameters
    named_groups = [_check_and_reset_(model, *pair) for pair in zip(optimizers, saved)]
    # strict=False, because a parameter that never had a gradient has no moments. For the model it
    # hides nothing, because its names were compared above.
    options = dcp.StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=in_group, strict=False
    )
    for optimizer, theirs, groups in zip(optimizers, saved, named_groups):
        if theirs:
            _load_moments_(model, optimizer, theirs["state"], groups, options)
    # The model comes last, because torch lets the optimizers take a step: see _check_and_reset_.
    # torch changes the dict that it gets. On other ranks than 0 the dict must be empty, because
    # torch would load the second name of a module that has two names from it.
    weights = {} if in_group and dist.get_rank() > 0 else dict(state["model"])
    dcp.set_model_state_dict(model, weights, options=options)


def _load_moments_(
    model: nn.Module, optimizer: Optimizer, saved: State, groups: Any, options: Any
) -> None:
    """Give an optimizer its saved moments: {parameter name: {moment: tensor}}.

    groups: what _check_and_reset_ returned. options: for torch's set_optimizer_state_dict.
    """
    # torch requires "param_groups", and replaces the groups of the optimizer by copies in which
    # tuples, such as betas, have become lists. So put the original ones back afterwards.
    new = {"state": copy.deepcopy(saved), "param_groups": groups}
    own, exact = optimizer.param_groups, State()
    # torch converts moments to the dtype of their parameter. `exact` has them as they were saved.
    hook = optimizer.register_load_state_dict_pre_hook(lambda _, x: exact.update(x["state"]))
    _state_dict_functions().set_optimizer_state_dict(model, optimizer, new, options=options)
    hook.remove()
    optimizer.param_groups = own
    names = chain.from_iterable(group["params"] for group in groups)
    parameters = chain.from_iterable(group["params"] for group in own)
    for parameter, name in zip(parameters, names):
        # Delete moments that torch made for a parameter that has none in the checkpoint.
        if not saved.get(name):
            optimizer.state.pop(parameter, None)
            continue
        moments = optimizer.state[parameter]
        for key, value in exact.get(name, {}).items():
            if _kind(value) != _kind(moments[key]):
                moments[key] = value.to(parameter.device)


def _check_and_reset_(model: nn.Module, optimizer: Optimizer, saved: State) -> Any:
    """Delete gradients and moments; return the optimizer's groups, with names for parameters.

    saved["state"] is {parameter name: {moment: tensor}}. ValueError if moments, shapes or dtypes
    differ from those that this optimizer creates. Fused optimizers do not check this and would
    compute nonsense.
    """
    # If an optimizer has no gradients and no state, get_optimizer_state_dict creates the state: it
    # lets the optimizer take a step with zero gradients and learning rate 0.
    optimizer.zero_grad(set_to_none=True)
    optimizer.state.clear()
    ours = _state_dict_functions().get_optimizer_state_dict(model, optimizer)
    optimizer.state.clear()
    for name, moments in saved.get("state", {}).items():
        if moments:
            check_same(moments, ours["state"].get(name, {}), f"optimizer state of {name}: ")
    return ours["param_groups"]


def check_same(theirs: State, ours: State, where: str = "") -> None:
    """Raise ValueError unless both have the same names, with the same shapes and dtypes.

    theirs: for example state["model"] of a checkpoint. ours: for example the state dict of a model,
    without the prefixes of DDP and torch.compile. where: the beginning of the message.
    """
    for name in [*ours, *theirs]:
        a, b = (_kind(values.get(name)) for values in (theirs, ours))
        if a != b:
            raise ValueError(f"{where}{name} is {a} in the checkpoint, {b} here")


def _kind(value: Any) -> str:
    """Describe a value as text: a tensor by its shape and dtype."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {value.dtype}"
    return "missing" if value is None else f"a {type(value).__name__}"


# ----------------------------------------------------------------------------------- state <-> file


def save(
    folder: str, state: State, step: int, loss: float | None = None, keep: int | None = None
) -> Entry:
    """Write a checkpoint. When this returns, the file is complete and survives a power failure.

    state: what snapshot() returned on rank 0; it is only read. loss: the validation loss (lower is
    better), which becomes part of the name. keep: if given, prune(folder, keep) follows. prune()
    compares steps, not times: if the folder has checkpoints with higher steps, good or damaged, it
    can delete the new one at once. The folder is created if needed. ValueError if load() would
    refuse the file, for example because the model has NaN. After an error in writing, the
    checkpoints that existed before are untouched, and no temporary file is left. An error in
    prune() comes after the new checkpoint is complete.
    """
    _check_state(state)
    handled = sys.exception()  # None, or the error that the caller is handling
    make_folder(folder)
    with _temporary_file(folder) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            # After an OSError, for example of a full disk, torch.save raises RuntimeError when it
            # closes the file, with the OSError as __context__: raise that OSError. But if the
            # caller calls save() while it handles an error, __context__ can be that error.
            context = error.__context__
            raise context if isinstance(context, OSError) and context is not handled else error
        file.flush()
        # Raise ValueError for types that load() would refuse. The device "meta" leaves out the
        # content of the tensors.
        _read_state(file.name, device="meta")
        entry = make_entry(step, loss, sha256(file.name)[:32])
        _publish(file, entry.name)
    if keep is not None:
        prune(folder, keep)
    return entry


def load(folder: str, entry: Entry) -> State:
    """Read and verify one checkpoint; its tensors are on the CPU.

    Code in the file is not run, because torch.load(weights_only=True) reads tensors and plain
    values only. ValueError if the digest does not match, if the file is not a checkpoint, or if the
    model's parameters or buffers contain NaN. NotImplementedError if the checkpoint is sharded.
    """
    if not entry.name.endswith(".pt"):
        raise NotImplementedError(f"{entry.name} is a sharded checkpoint; see extras/sharded.py")
    path = Path(folder, entry.name)
    if not path.is_file():
        raise OSError("not a file")  # reading a pipe or a device might never end
    if sha256(path)[:32] != entry.digest:
        raise ValueError("damaged: the content does not match the digest in the name")
    state: State = _read_state(path, "cpu")
    _check_state(state)
    return state


def _read_state(path: str | Path, device: str) -> Any:
    """Read a file that torch.save wrote. ValueError if it is not such a file."""
    try:
        # torch's warnings only repeat the error, in several lines.
        with warnings.catch_warnings(action="ignore"):
            return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:
        # OSError with EINVAL means a truncated file, not a disk that failed.
        disk_failed = isinstance(error, OSError) and error.errno != errno.EINVAL
        # torch's allocator raises RuntimeError, Python raises MemoryError: "emory" is in both.
        no_memory = isinstance(error, (RuntimeError, MemoryError)) and "emory" in repr(error)
        if disk_failed or no_memory:  # The file may be good, so do not call it "not a checkpoint".
            raise
        reason = f"torch.load(weights_only=True) raised {type(error).__name__}"
        raise ValueError(f"not a checkpoint: {reason}") from error


def _check_state(state: Any) -> None:
    """Raise ValueError unless state["model"] is a dict, not empty, whose tensors are free of NaN.

    ValueError also for tensors that cannot be checked: quantized ones, and those on "meta".
    """
    model = state.get("model") if isinstance(state, dict) else None
    if not isinstance(model, dict) or not model:
        raise ValueError("not a checkpoint: there is no state dict under 'model'")
    for name, value in model.items():
        if isinstance(value, Tensor) and (value.is_meta or value.is_quantized):
            raise ValueError(f"not supported: {name} is on the device meta or quantized")
        if isinstance(value, Tensor) and value.isnan().any():
            raise ValueError(f"worthless: {name} contains NaN")


def make_entry(step: int, loss: float | None, digest: str, ending: str = ".pt") -> Entry:
    """Make the name of a checkpoint; return its Entry. ending: "" for a sharded checkpoint."""
    rating = f"-loss-{loss:.4f}" if loss is not None and math.isfinite(loss) else ""
    return parse_names([f"step-{step:08d}{rating}-{digest}{ending}"])[0]


def parse_names(names: Iterable[str]) -> list[Entry]:
    """Return an entry for each name that is the name of a checkpoint, in the order of steps."""
    entries = [
        Entry(int(match[1]), match[0], float(match[2]) if match[2] else None, match[3])
        for match in map(NAME.fullmatch, names)
        if match
    ]
    return sorted(entries)


def list_checkpoints(folder: str) -> list[Entry]:
    """Return the checkpoints in a folder, lowest step first; [] without a folder. Reads no file."""
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

    "Newer" means a higher step. If load() raises ValueError, or an OSError other than
    PermissionError, the checkpoint cannot be used, and the one with the next lower step is tried.
    Before the next save() with `keep`, call set_aside() for each checkpoint that cannot be used:
    otherwise prune() keeps it in place of a good one.

    PermissionError is passed on, because the file may be good. So are all other exceptions, for
    example NotImplementedError if a sharded checkpoint is newer than all good ones. (None, {})
    means that there are no checkpoints. ValueError if there are some but load() accepts none.

    load, list_checkpoints: by default the functions of this file. extras/remote.py and
        extras/sharded.py pass their own.
    """
    rejected: dict[str, str] = {}
    for entry in reversed(list_checkpoints(folder)):
        try:
            return Found(entry, load(folder, entry)), rejected
        except (OSError, ValueError) as error:
            if entry not in list_checkpoints(folder):  # another process has deleted it meanwhile
                return newest(folder, load, list_checkpoints)
            if isinstance(error, PermissionError):
                raise
            rejected[entry.name] = f"{error}"
    if rejected:
        reasons = "; ".join(map(": ".join, rejected.items()))
        raise ValueError(f"{folder}: no checkpoint can be used; {reasons}")
    return None, rejected


# --------------------------------------------------------------------------------------- the folder


def superseded(entries: list[Entry], keep: int) -> list[Entry]:
    """Return the entries to delete. The last `keep` and the one with the lowest loss are kept.

    entries: in the order of steps. If several have the lowest loss, the one with the highest step
    is kept.
    """
    rated = [entry for entry in entries if entry.loss is not None]
    best = min(rated, key=lambda entry: (entry.loss, -entry.step), default=None)
    older = entries[: -keep or None]  # [:-0] would be empty; [:None] is all entries
    return [entry for entry in older if entry != best]


def prune(folder: str, keep: int) -> None:
    """Delete the files of the superseded checkpoints: see superseded().

    For a sharded checkpoint see remove(). Temporary files stay, because another process may be
    writing them.
    """
    for entry in superseded(list_checkpoints(folder), keep):
        remove(folder, entry.name)


def remove(folder: str, name: str) -> None:
    """Delete the file of a checkpoint. A missing file is no error.

    A folder, such as a sharded checkpoint, is not deleted, because this module does not write
    folders: set_aside() adds ".damaged" to its name, even if the checkpoint is intact.
    extras/sharded.py deletes sharded checkpoints.
    """
    path = Path(folder, name)
    if path.is_dir():
        set_aside(folder, name)
    else:
        path.unlink(missing_ok=True)


def set_aside(folder: str, name: str) -> None:
    """Add ".damaged" to the name of a checkpoint, so that it is no longer listed."""
    _rename(Path(folder, name), f"{name}.damaged")


def lock(folder: str, timeout: float = 2.0) -> IO[str] | None:
    """Take the lock of an existing folder and delete all temporary files and folders in it.

    Killed processes leave them (folders: extras/sharded.py). save() does not take the lock. So call
    make_folder() and lock() before the first save(): otherwise lock() in another process deletes
    the file that save() is writing.

    Keep the result: the lock is released when the result is closed or garbage collected, and when
    the process ends in any way. But a forked child, such as a worker of a DataLoader, keeps the
    lock until it ends. Returns None and deletes nothing if the system (Windows) or the file system
    has no locks. Waits up to `timeout` seconds, because a process that was killed may need a moment
    to end. If another process, or an earlier lock() of this process, still has the lock after that:
    ValueError with the holder's host, pid and time of locking.

    This is flock instead of the package filelock. If the file system refuses locks, old versions of
    filelock wait for ever, and newer versions use a lock that nobody releases when a process on
    another host crashes.
    """
    if not fcntl:
        return None
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    file = os.fdopen(os.open(Path(folder, ".lock"), flags, 0o666), "r+")
    end = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > end:
                raise ValueError(f"in use by another run: {file.read()}") from None
            time.sleep(0.05)
        except OSError:
            return None
    file.truncate(0)
    file.write(f"{socket.gethostname()}, pid {os.getpid()}, since {time.strftime('%F %T')}")
    file.flush()
    for path in Path(folder).glob(f"{TEMPORARY}*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)  # another process may have renamed it meanwhile
    return file


# --------------------------------------------------------------------------------------- text files


def write_text(folder: str, name: str, text: str) -> None:
    """Replace the text of a file. Readers find the old or the new text, also after a crash."""
    with _temporary_file(folder) as file:
        file.write(text.encode())
        _publish(file, name)


def append_text(folder: str, name: str, line: str) -> None:
    """Add a line to a file. `line` must end with a line break.

    If the write raises OSError, no part of the line is in the file. The line is not fsynced: it may
    be lost in a power failure, but not when the process is killed.
    """
    with open(Path(folder, name), "ab", buffering=0) as file:
        end, data = file.tell(), line.encode()
        if file.write(data) < len(data):
            file.truncate(end)
            raise OSError(f"{name}: only a part could be written")


def read_text(folder: str, name: str) -> str:
    """Return the text of a file, or "" if there is no such file. Invalid UTF-8 is replaced."""
    try:
        return Path(folder, name).read_text("utf-8", "replace")
    except FileNotFoundError:
        return ""


# --------------------------------------------------------------------------------------- durability


def make_folder(folder: str) -> None:
    """Create a folder, and the folders above it, so that they survive a power failure.

    ValueError if the name is empty or a URL.
    """
    if not folder or "://" in folder:
        raise ValueError(f"folder {folder!r} is empty or a URL; for URLs see extras/remote.py")
    path = Path(folder).absolute()
    for each in [*reversed(path.parents), path]:
        if not each.is_dir():
            each.mkdir(exist_ok=True)  # another process may have made it meanwhile
            fsync_folder(each.parent)


@contextmanager
def _temporary_file(folder: str) -> Iterator[IO[bytes]]:
    """Open a new file with a unique temporary name. Delete it at the end, unless it was renamed."""
    path = Path(folder, TEMPORARY + uuid.uuid4().hex)
    try:
        with path.open("wb") as file:
            yield file
    finally:
        path.unlink(missing_ok=True)


def _publish(file: IO[bytes], name: str) -> None:
    """Make the content of an open temporary file durable, close it and give it its name."""
    file.flush()
    os.fsync(file.fileno())
    file.close()  # Windows cannot rename an open file
    _rename(Path(file.name), name)


def _rename(path: Path, name: str) -> None:
    """Rename a file or folder durably. A file that already has the new name is replaced."""
    path.replace(path.with_name(name))
    fsync_folder(path.parent)


def fsync_folder(folder: str | Path) -> None:
    """Make the names in a folder durable. A new name may otherwise be lost in a power failure."""
    if os.name == "posix":  # Windows cannot open a folder
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sha256(path: str | Path) -> str:
    """Return the SHA-256 of a file, as 64 hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
