"""Save and load a checkpoint of which each rank writes and reads its own shards.

    files = storage(ckpt, write_sharded=True)                   # ckpt: the module
    files.make_folder("out")
    files.check_shared_folder("out")
    state = files.snapshot(model, optimizers, step=400)
    files.save("out", state, 400, loss, keep)                   # can run in a thread

    step, more = files.resume_("out", model, optimizers)

Every rank must run these lines, and all must share the folder "out". Tensors may be sharded with
Shard(0) over a mesh of one dimension only. The checkpoint is a folder. In it is a file of each
rank, in which each tensor is written by torch.save. The file manifest.json has the SHA-256 of these
files, the places of the tensors in them, and the rest of the state.
"""

import io
import json
import os
import shutil
import stat
import uuid
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

State = dict[str, Any]
Optimizers = Sequence[torch.optim.Optimizer]
MANIFEST = "manifest.json"
STORAGE_TIMEOUT = timedelta(hours=1)  # for the slowest disk


def storage(ckpt: ModuleType, write_sharded: bool) -> SimpleNamespace:
    """Return the functions of ckpt.py, for a folder that can have sharded checkpoints.

    write_sharded: every rank must then call this, `snapshot`, `save` and `restore_`. `load` and
    `newest` give the tensors of a sharded checkpoint on the device "meta", and `restore_` reads the
    values. Call `save` in a thread if it can take longer than the timeout of process_group. In
    `restore_`, the ranks wait within this timeout for the slowest one.
    """
    save_one = ckpt.save
    load_any = partial(load, ckpt, write_sharded)
    functions = vars(ckpt) | {
        "load": load_any,
        "newest": partial(ckpt.newest, load=load_any),
        "prune": partial(prune, ckpt),
        "check_shared_folder": partial(check_shared_folder, ckpt),
    }
    if write_sharded:
        group = dist.new_group(backend="gloo", timeout=STORAGE_TIMEOUT)
        save_one = partial(write, ckpt, group)
        functions["snapshot"] = partial(snapshot, ckpt)
        functions["restore_"] = partial(restore_, ckpt)

    def save(
        folder: str,
        state: State,
        step: int,
        loss: float | None = None,
        keep: int | None = None,
        held: IO[str] | None = None,
    ) -> Any:
        entry = save_one(folder, state, step, loss, held=held)
        if entry:  # with shards, on rank 0 only
            for other in ckpt.list_checkpoints(folder):
                if other.step == step and other != entry:
                    remove(ckpt, folder, other.name)
            if keep is not None:
                prune(ckpt, folder, keep)
        return entry

    files = SimpleNamespace(**functions | {"save": save})
    files.resume_ = partial(ckpt.resume_, files=files)
    return files


# --------------------------------------------------------------------------------------- the folder


def check_shared_folder(ckpt: ModuleType, folder: str) -> None:
    """Raise ValueError unless all ranks see what rank 0 writes. Every rank must call this."""
    name, rank0 = [ckpt.TEMPORARY + uuid.uuid4().hex], dist.get_rank() == 0
    if rank0:
        with suppress(OSError):  # then no rank sees it
            Path(folder, name[0]).touch()
    dist.broadcast_object_list(name)
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, os.path.exists(Path(folder, name[0])))
    if rank0:
        Path(folder, name[0]).unlink(missing_ok=True)
    if not all(seen):
        raise ValueError(
            "a sharded checkpoint needs a folder that all ranks share, and that rank 0 can write to"
        )


def remove(ckpt: ModuleType, folder: str, name: str) -> None:
    """Delete a checkpoint, if it exists. An OSError is only a warning."""
    path = Path(folder, name)
    try:
        if path.is_dir():
            # What an interrupted deletion leaves must not have the name of a checkpoint.
            path = path.rename(Path(folder, ckpt.TEMPORARY + uuid.uuid4().hex))
            ckpt.fsync_folder(folder)
            shutil.rmtree(path, ignore_errors=True)  # ckpt.lock deletes the rest
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        # The text must be the same each time, because Python shows equal warnings once.
        warnings.warn(f"{name} not deleted: {error.strerror or error}", stacklevel=2)


def prune(ckpt: ModuleType, folder: str, keep: int) -> None:
    """Delete superseded checkpoints, as ckpt.prune does."""
    for entry in ckpt.superseded(ckpt.list_checkpoints(folder), keep):
        remove(ckpt, folder, entry.name)


# -------------------------------------------------------------------------------------------- write


def _state_tensors(
    ckpt: ModuleType, model: nn.Module, optimizers: Optimizers
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return {"model.NAME": tensor, "optimizers.INDEX.NAME.MOMENT": tensor}, {name: first name}.

    The tensors are not copied. A tied weight is returned once, under its first name.
    """
    parameters = ckpt.parameter_names(model, optimizers)
    state = model.state_dict(keep_vars=True)  # a tied weight is the same object under each name
    first = {id(value): name for name, value in reversed(state.items())}
    names = {name: first[id(value)] for name, value in state.items()}
    tensors = {f"model.{name}": state[name] for name in names.values()}
    for i, optimizer in enumerate(optimizers):
        for parameter, moments in optimizer.state.items():
            for key, value in moments.items():
                tensors[f"optimizers.{i}.{parameters[parameter]}.{key}"] = value
    for name, value in tensors.items():
        if not isinstance(value, Tensor) or name.endswith("._extra_state"):
            raise ValueError(
                f"{name} is not a parameter, a buffer or a tensor of an optimizer; a sharded "
                "checkpoint has only these"
            )
    return {name: value.detach() for name, value in tensors.items()}, names


def snapshot(ckpt: ModuleType, model: nn.Module, optimizers: Optimizers, **more: Any) -> State:
    """Return, for `write`, a copy on the CPU of what this rank writes. Every rank must call this.

    Buffers are those of rank 0. ValueError for extra state of a module, optimizer state that is not
    a tensor, and values of `more` that JSON changes, such as tuples, NaN and keys that are numbers.
    """
    for name, value in more.items():
        if json.loads(json.dumps(value, default=repr)) != value:
            raise ValueError(f"JSON cannot represent {name}; a sharded checkpoint cannot have it")
    model = ckpt.unwrap(model)
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors, names = _state_tensors(ckpt, model, optimizers)
    buffers = {f"model.{name}" for name, _ in model.named_buffers()}
    parts = {}
    by_size = sorted(tensors, key=lambda name: -tensors[name].nbytes)  # for about equal parts
    for i, name in enumerate(by_size):
        tensor, writer = tensors[name], 0 if name in buffers else i % size
        row, part = _local_part(tensor)
        if len(part) if isinstance(tensor, DTensor) else writer == rank:
            parts[name] = tensor.shape, row, part.to("cpu", copy=True)
    empty: list[State] = [{} for _ in optimizers]
    return {"tensors": parts, "manifest": {"names": names, "optimizers": empty, "state": more}}


def _local_part(tensor: Tensor) -> tuple[int, Tensor]:
    """Return the part of a tensor on this rank: (number of its first row, the rows)."""
    if not isinstance(tensor, DTensor):
        return 0, tensor
    if [*tensor.placements] != [Shard(0)]:
        raise ValueError(f"{tensor.placements}: a sharded checkpoint can have only (Shard(0),)")
    mesh = tensor.device_mesh
    rows = -(-len(tensor) // mesh.size())  # Shard divides like torch.chunk
    return rows * mesh.get_local_rank(), tensor.to_local()


def write(
    ckpt: ModuleType,
    group: dist.ProcessGroup,
    folder: str,
    state: State,
    step: int,
    loss: float | None = None,
    held: IO[str] | None = None,
) -> Any:
    """Write a snapshot as a checkpoint. Every rank must call this. Rank 0 gets the entry.

    held: what lock() returned on rank 0. If it is a lock, the folder must still have it: see
    ckpt.check_lock. Otherwise, rank 0 creates the folder. Other ranks ignore this argument.

    Afterwards, the checkpoint is complete and durable, or absent. If a rank fails, rank 0 alone
    raises OSError or ValueError.
    """
    temporary = Path(folder, f"{ckpt.TEMPORARY}{step}")
    first = dist.get_rank() == 0
    try:
        _call_together(group, partial(_prepare_save, ckpt, folder, step, held))
    except (OSError, ValueError):
        if first:
            raise
        return None
    try:
        part = _call_together(group, partial(_write_shards, ckpt, temporary, state["tensors"]))
        parts = [None] * dist.get_world_size() if first else None
        dist.gather_object(part, parts, group=group)
        if parts:
            _write_manifest(ckpt, temporary, state["manifest"], parts)
            entry = ckpt.make_entry(step, loss, ckpt.sha256(temporary / MANIFEST)[:32], "")
            temporary.rename(Path(folder, entry.name))
            ckpt.fsync_folder(folder)
            return entry
    except (OSError, ValueError):
        if first:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def _prepare_save(ckpt: ModuleType, folder: str, step: int, held: IO[str] | None) -> None:
    """Check the lock of the folder, or create the folder, as ckpt.save does."""
    if step < 0:
        raise ValueError(f"step is {step}; must be at least 0")
    if dist.get_rank() == 0:
        ckpt.check_lock(folder, held) if held else ckpt.make_folder(folder)


def _call_together(group: dist.ProcessGroup | None, function: Callable[[], Any]) -> Any:
    """Return function(). Every rank must call this. If it fails on a rank, all raise its error.

    The error is an OSError, with the same number, or a ValueError. Its text has the rank.
    """
    result, failure = None, None
    try:
        result = function()
    except Exception as error:
        text = getattr(error, "strerror", None) or f"{error}".partition("\n")[0] or repr(error)
        kind = OSError if isinstance(error, OSError) else ValueError
        failure = kind, text, getattr(error, "errno", None)
    failures: list[Any] = [failure]
    if dist.is_initialized():
        failures = [None] * dist.get_world_size()
        dist.all_gather_object(failures, failure, group)
    for rank, failure in enumerate(failures):
        if failure:
            kind, text, number = failure
            shared = kind(f"rank {rank}: {text}")
            setattr(shared, "errno", number)  # as an argument, it would be part of the text
            raise shared
    return result


def _write_shards(ckpt: ModuleType, path: Path, parts: State) -> list[Any]:
    """Write the file of this rank, durably. Return [file, its digest, its shards].

    The shards are {name: [dtype, shape of the tensor, shard]}. A shard is
    [its offsets in the tensor, its shape, file, offset in the file, length in bytes].
    """
    path.mkdir(exist_ok=True)  # without its parents: the folder may have been deleted
    file, shards = f"__{dist.get_rank()}_0.distcp", {}
    with (path / file).open("wb") as opened:
        for name, (shape, row, part) in parts.items():
            if name.startswith("model.") and part.isnan().any():
                raise ValueError(f"{name} contains NaN")  # `_read_values_` would refuse it
            start = opened.tell()
            try:
                torch.save(part, opened)
            except RuntimeError as error:  # torch.save hides an OSError
                raise error.__context__ if isinstance(error.__context__, OSError) else error
            offsets = [row, *[0] * len(shape)][: len(shape)]
            place = [offsets, [*part.shape], file, start, opened.tell() - start]
            shards[name] = [f"{part.dtype}", [*shape], place]
        opened.flush()
        os.fsync(opened.fileno())
    return [file, ckpt.sha256(path / file), shards]


def _write_manifest(ckpt: ModuleType, path: Path, manifest: State, parts: list[Any]) -> None:
    """Write the manifest, on rank 0. parts: what `_write_shards` returned on each rank."""
    files, tensors = State(), State()
    for file, digest, shards in parts:
        # Not all ranks may share the folder.
        files[file] = [(path / file).stat().st_size, digest]
        for name, (dtype, shape, shard) in shards.items():
            tensors.setdefault(name, [dtype, shape, []])[2].append(shard)
    manifest = manifest | {"files": files, "tensors": tensors}
    _outline(manifest)  # raises an error if `read_manifest` would
    ckpt.write_text(path, MANIFEST, json.dumps(manifest))


# --------------------------------------------------------------------------------------------- read


def read_manifest(ckpt: ModuleType, path: Path) -> tuple[State, dict[str, Tensor]]:
    """Return the manifest, and its tensors on the device "meta". ValueError if it is damaged.

    A forged manifest, with the right digest, can raise anything.
    """
    file = path / MANIFEST
    if not _is_file(file):  # opening a pipe might never end
        raise ValueError(
            f"damaged: there is no file {file}; all ranks must share the folder, and no other run "
            "may use it"
        )
    if not path.name.endswith(f"-{ckpt.sha256(file)[:32]}"):
        raise ValueError(f"damaged: {MANIFEST} does not have the digest in the name of the folder")
    manifest: State = json.loads(file.read_bytes())
    return manifest, _outline(manifest)


def _is_file(path: Path) -> bool:
    """Return whether this is a regular file. OSError if that is not known: Path hides some."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _outline(manifest: State) -> dict[str, Tensor]:
    """Return the tensors of a manifest on the device "meta".

    ValueError unless the shards of each tensor have each of its rows once, in order.
    """
    outline = {}
    for name, (dtype, shape, shards) in manifest["tensors"].items():
        rows = 0
        for offsets, sizes, *_ in shards:
            if offsets[:1] == [rows][: len(shape)]:
                rows += sizes[0] if shape else 1
        if rows != (shape[0] if shape else 1):
            raise ValueError(f"the shards of {name} are not the whole tensor")
        kind = getattr(torch, dtype.removeprefix("torch."))
        outline[name] = torch.empty(shape, dtype=kind, device="meta")
    return outline


def _build_state(manifest: State, tensors: dict[str, Tensor]) -> State:
    """Return the state in the layout of ckpt.snapshot."""
    moments: list[State] = [{} for _ in manifest["optimizers"]]
    for key, tensor in tensors.items():
        if key.startswith("optimizers."):
            _, i, rest = key.split(".", 2)
            name, _, moment = rest.rpartition(".")
            moments[int(i)].setdefault(name, {})[moment] = tensor
    optimizers = [{"state": state} if state else {} for state in moments]
    model = {name: tensors[f"model.{first}"] for name, first in manifest["names"].items()}
    return {**manifest["state"], "model": model, "optimizers": optimizers}


def load(ckpt: ModuleType, outline: bool, folder: str, entry: Any) -> State:
    """Read and verify a checkpoint. ValueError if it is damaged.

    outline: if true, the tensors of a sharded checkpoint are on the device "meta".
    """
    if entry.name.endswith(".pt"):
        return dict(ckpt.load(folder, entry))
    try:
        return _load(ckpt, outline, Path(folder, entry.name))
    except (OSError, ValueError, MemoryError):
        raise
    except Exception as error:  # a forged checkpoint can raise anything
        raise ValueError(f"not a checkpoint: {error!r:.200}") from error


def _load(ckpt: ModuleType, outline: bool, path: Path) -> State:
    manifest, tensors = read_manifest(ckpt, path)
    size = 0
    for name, (_, digest) in manifest["files"].items():
        file = path / name
        if not _is_file(file) or ckpt.sha256(file) != digest:
            raise ValueError(f"damaged: {name} does not have the digest in the manifest")
        size += file.stat().st_size
    if sum(tensor.nbytes for tensor in tensors.values()) > size:
        raise ValueError("not a checkpoint: its files are smaller than its tensors")
    if outline:
        return {**_build_state(manifest, tensors), "sharded_path": f"{path}"}
    values = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in tensors.items()}
    _read_values_(values, path, manifest)
    return _build_state(manifest, values)


def _read_values_(tensors: dict[str, Tensor], path: Path, manifest: State) -> None:
    """Read the values of `tensors`; of a DTensor, the part of this rank.

    ValueError if a shard is not as the manifest says, or if the model has NaN.
    """
    for name, tensor in tensors.items():
        row, part = _local_part(tensor)
        ours = torch.atleast_1d(part)
        for offsets, sizes, file, start, length in manifest["tensors"][name][2]:
            # The shard and the part, as slices of each other
            begin = (offsets or [0])[0] - row
            end = begin + (sizes or [1])[0]
            if end <= 0 or begin >= len(ours):
                continue
            value = _read_shard(path / file, start, length)
            if (value.dtype, [*value.shape]) != (tensor.dtype, sizes):
                raise ValueError(f"not a checkpoint: {file}: {name} is not as the manifest says")
            if name.startswith("model.") and value.isnan().any():
                raise ValueError(f"worthless: {name} contains NaN")
            theirs = torch.atleast_1d(value)[max(0, -begin) : len(ours) - begin]
            ours[max(0, begin) : end].copy_(theirs)


def _read_shard(path: Path, start: int, length: int) -> Tensor:
    """Return a tensor that torch.save wrote into the middle of a file."""
    with path.open("rb") as file:
        file.seek(start)
        record = io.BytesIO(file.read(length))
    value: Tensor = torch.load(record, "cpu", weights_only=True)
    return value


def restore_(ckpt: ModuleType, state: State, model: nn.Module, optimizers: Optimizers) -> None:
    """Put the state that `load` returned on rank 0 into a model and optimizers.

    Every rank must call this. Any number of ranks with any strategy may have written the
    checkpoint. The optimizers keep their settings. If the checkpoint does not fit, or if a rank
    cannot read it, all ranks raise ValueError or OSError. Model and optimizers can then be partly
    changed.
    """
    paths = [state.get("sharded_path")]
    if dist.is_initialized():
        dist.broadcast_object_list(paths)
    if not paths[0]:
        ckpt.restore_(state, model, optimizers)
        return
    path = Path(paths[0])
    manifest, saved = _call_together(None, partial(read_manifest, ckpt, path))
    count = len(manifest["optimizers"])
    if count != len(optimizers):
        raise ValueError(f"{count} optimizers in the checkpoint, {len(optimizers)} here")
    model = ckpt.unwrap(model)
    parameters = ckpt.parameter_names(model, optimizers)
    with_moments = {key.rsplit(".", 1)[0] for key in saved}
    for i, optimizer in enumerate(optimizers):
        for parameter, moments in ckpt.reset_optimizer_(model, optimizer).items():
            if f"optimizers.{i}.{parameters[parameter]}" in with_moments:
                optimizer.state[parameter] = moments
    tensors, _ = _state_tensors(ckpt, model, optimizers)
    ckpt.check_same(saved, tensors)
    _call_together(None, partial(_read_values_, tensors, path, manifest))
