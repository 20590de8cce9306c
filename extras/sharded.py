"""Save and load a checkpoint of which each rank writes and reads its own shards.

    files = storage(ckpt, reader.read, write_sharded=True)      # every rank; ckpt: the module
    files.make_folder("out")
    files.check_shared_folder("out")                            # every rank
    state = files.snapshot(model, optimizers, step=400)         # every rank
    files.save("out", state, 400, loss, keep)                   # every rank, also in a thread

    found = files.newest("out")[0] if rank == 0 else None
    files.restore_(found.state if found else {}, model, optimizers)     # every rank

The checkpoint is a folder with one file of torch.distributed.checkpoint (DCP) per rank, and
manifest.json, which has the SHA-256 of the files, the places of the shards and the rest of the
state. The folder gets its name, with the digest of the manifest, when everything in it is durable.
There is no .metadata, because that is a pickle, which can run code. So other programs cannot open
the folder with DCP.
"""

import io
import json
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.tensor import DTensor

State = dict[str, Any]
Optimizers = Sequence[torch.optim.Optimizer]
Read = Callable[[BinaryIO], Any]  # reads what torch.save wrote, or raises ValueError
Group = dist.ProcessGroup
MANIFEST = "manifest.json"
STORAGE_TIMEOUT = timedelta(hours=1)  # for the slowest disk


def storage(ckpt: ModuleType, read: Read, write_sharded: bool) -> SimpleNamespace:
    """Return the functions of the module ckpt.py, for a folder that can have sharded checkpoints.

    read: that of extras/reader.py, which is safe for files of other people. Call `save` in a thread
    if it can take longer than the timeout of process_group.
    write_sharded: every rank must then call this, `snapshot` and `save`. `load` and `newest` verify
        a sharded checkpoint, but give tensors on the device "meta". `restore_` reads the values.
    """
    save_one = ckpt.save
    load_any = partial(load, ckpt, None if write_sharded else read)
    functions = vars(ckpt) | {
        "load": load_any,
        "newest": partial(ckpt.newest, load=load_any),
        "prune": partial(prune, ckpt),
        "set_aside": partial(set_aside, ckpt),
        "check_shared_folder": check_shared_folder,
    }
    if write_sharded:
        group = dist.new_group(backend="gloo", timeout=STORAGE_TIMEOUT)
        save_one = partial(write, ckpt, group)
        functions |= {"snapshot": partial(snapshot, ckpt), "restore_": partial(restore_, ckpt)}

    def save(
        folder: str, state: State, step: int, loss: float | None = None, keep: int | None = None
    ) -> Any:
        entry = save_one(folder, state, step, loss)
        if entry:  # with shards, only rank 0 has the entry
            for other in ckpt.list_checkpoints(folder):
                if other.step == step and other != entry:
                    remove(ckpt, folder, other.name)
            if keep is not None:
                prune(ckpt, folder, keep)
        return entry

    return SimpleNamespace(**functions | {"save": save})


# --------------------------------------------------------------------------------------- the folder


def check_shared_folder(folder: str) -> None:
    """Raise ValueError if the ranks do not all see the same folder. Every rank must call this.

    OSError on all ranks if rank 0 cannot write to it.
    """
    file: Any = nullcontext()
    sent: list[Any] = [None]  # a file name or an error
    if dist.get_rank() == 0:
        try:
            file = tempfile.NamedTemporaryFile(dir=folder)
            sent = [os.path.basename(file.name)]
        except OSError as error:
            sent = [error]
    with file:
        dist.broadcast_object_list(sent)
        if isinstance(sent[0], OSError):
            raise sent[0]
        seen: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(seen, os.path.exists(os.path.join(folder, sent[0])))
    if not all(seen):
        raise ValueError("a sharded checkpoint needs a folder that all ranks share")


def remove(ckpt: ModuleType, folder: str, name: str) -> None:
    """Delete a checkpoint, or a temporary file or folder, if it exists."""
    with suppress(FileNotFoundError):  # another process may have deleted it
        if not Path(folder, name).is_dir():
            Path(folder, name).unlink()
        else:
            # What an interrupted deletion leaves must not have the name of a checkpoint.
            hidden = Path(folder, name).rename(Path(folder, ckpt.TEMPORARY + uuid.uuid4().hex))
            ckpt.fsync_folder(folder)
            # ckpt.lock deletes the rest, such as open files on NFS.
            shutil.rmtree(hidden, ignore_errors=True)


def prune(ckpt: ModuleType, folder: str, keep: int) -> None:
    """Delete the superseded checkpoints, as ckpt.prune does."""
    for entry in ckpt.superseded(ckpt.list_checkpoints(folder), keep):
        remove(ckpt, folder, entry.name)


def set_aside(ckpt: ModuleType, folder: str, name: str) -> None:
    """Add ".damaged" to the name of a checkpoint. An earlier one with that name is deleted."""
    if Path(folder, name).is_dir():  # no folder can replace another one
        remove(ckpt, folder, f"{name}.damaged")
    ckpt.set_aside(folder, name)


# -------------------------------------------------------------------------------------------- write


def _names(model: nn.Module) -> tuple[dict[str, str], dict[Tensor, str]]:
    """Return {name: first name} and {tensor: first name}: a tied head has two names."""
    tensors = model.state_dict(keep_vars=True)
    for name, value in tensors.items():
        if not isinstance(value, Tensor) or name.rpartition(".")[2] == "_extra_state":
            raise ValueError(
                f"{name} is not a parameter or buffer; a sharded checkpoint has only these"
            )
    first = {value: name for name, value in reversed(tensors.items())}
    return {name: first[value] for name, value in tensors.items()}, first


def _state_tensors(model: nn.Module, optimizers: Optimizers) -> dict[str, Tensor]:
    """Return {"model.NAME": tensor, "optimizers.INDEX.NAME.MOMENT": tensor}, not copied."""
    _, names = _names(model)
    tensors = {f"model.{name}": value.detach() for value, name in names.items()}
    for i, optimizer in enumerate(optimizers):
        if any(p not in names for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(f"optimizer {i} has a parameter that is not one of the model")
        for parameter, moments in optimizer.state.items():
            for key, value in moments.items():
                name = f"optimizers.{i}.{names[parameter]}.{key}"
                if not isinstance(value, Tensor):
                    raise ValueError(f"{name} is not a tensor; a sharded checkpoint cannot have it")
                tensors[name] = value.detach()
    return tensors


def snapshot(ckpt: ModuleType, model: nn.Module, optimizers: Optimizers, **more: Any) -> State:
    """Return, for `write`, a copy on the CPU of what this rank writes. Every rank must call this.

    Rank 0 writes all buffers, because they can differ between ranks.
    more: only dicts with text as keys, lists, text, numbers, bool and None. Otherwise ValueError.
    """
    for name, value in more.items():
        if not _is_json(value):
            raise ValueError(
                f"JSON cannot represent {name}, so a sharded checkpoint cannot have it"
            )
    model = ckpt.unwrap(model)
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = _state_tensors(model, optimizers)
    names, first = _names(model)
    buffers = {f"model.{first[buffer]}" for buffer in model.buffers() if buffer in first}
    by_size = sorted(tensors.items(), key=lambda item: -item[1].nbytes)  # for about equal parts
    writers = {name: 0 if name in buffers else i % size for i, (name, _) in enumerate(by_size)}
    mine = (x for x in by_size if writers[x[0]] == rank or isinstance(x[1], DTensor))
    copies = {name: tensor.to("cpu", copy=True) for name, tensor in mine}
    groups = [
        [{**group, "params": [first[p] for p in group["params"]]} for group in o.param_groups]
        for o in optimizers
    ]
    return {"tensors": copies, "manifest": {"names": names, "optimizers": groups, "state": more}}


def _is_json(value: Any) -> bool:
    """Return whether JSON keeps a value as it is."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(part) for key, part in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or isinstance(value, (str, int, float))


def write(
    ckpt: ModuleType, group: Group, folder: str, state: State, step: int, loss: float | None = None
) -> Any:
    """Write a snapshot as a checkpoint. Every rank must call this. Rank 0 gets the entry.

    It can run in a thread during training. Afterwards, the checkpoint is complete and durable, or
    absent. If a rank fails, rank 0 raises OSError, or ValueError, for example because of NaN.
    """
    temporary = Path(folder, f"{ckpt.TEMPORARY}{step}")
    first = dist.get_rank() == 0
    try:
        # dcp.save would send many Python objects: for a minute with 1,024 ranks.
        _DistWrapper(group, True, 0).all_reduce(
            "write",
            partial(_write_shards, ckpt, temporary, state["tensors"]),
            partial(_write_manifest, ckpt, temporary, state["manifest"]),
        )
        if first:
            entry = ckpt.make_entry(step, loss, ckpt.sha256(temporary / MANIFEST)[:32], "")
            temporary.rename(Path(folder, entry.name))
            ckpt.fsync_folder(folder)
            return entry
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)  # on each rank, as they may not share it
        if not isinstance(error, dcp.CheckpointException):
            raise
        if first:
            raise _first_error(error) from None


def _first_error(error: dcp.CheckpointException) -> OSError | ValueError:
    """Return a one-line error of the first rank that failed."""
    rank, (cause, _) = min(error.failures.items())
    text = getattr(cause, "strerror", None) or f"{cause}".partition("\n")[0]
    return (OSError if isinstance(cause, OSError) else ValueError)(f"rank {rank}: {text}")


def _write_shards(ckpt: ModuleType, path: Path, tensors: dict[str, Tensor]) -> str:
    """Write the file of this rank with DCP. Return [file, [size, digest], its shards] as JSON."""
    rank = dist.get_rank()
    ckpt.make_folder(f"{path}")  # DCP would not make new folders durable
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(State(tensors), is_coordinator=rank == 0)
    plan = replace(planner.create_local_plan(), storage_data=_StoragePrefix(f"__{rank}_"))
    for item in plan.items:
        tensor = torch.as_tensor(planner.resolve_data(item))
        if item.index.fqn.startswith("model.") and tensor.isnan().any():
            raise ValueError(f"{item.index.fqn} contains NaN")  # `load` would refuse it
    try:
        results = dcp.FileSystemWriter(path, per_thread_copy_ahead=0).write_data(plan, planner)
    except RuntimeError as error:  # torch hides an OSError
        raise error.__context__ if isinstance(error.__context__, OSError) else error
    file = f"__{rank}_0.distcp"
    described = (path / file).stat().st_size, ckpt.sha256(path / file)
    return json.dumps([file, described, _list_shards(plan, results.wait())])


def _list_shards(plan: dcp.SavePlan, results: list[WriteResult]) -> State:
    """Return {name: [dtype, shape of the tensor, shard]} of one rank.

    A shard is [its offsets in the tensor, its shape, file, offset in the file, length in bytes].
    """
    places, table = {result.index: result.storage_data for result in results}, {}
    for item in plan.items:
        data, at = item.tensor_data, places[item.index]
        assert data is not None
        place = [at.relative_path, at.offset, at.length]
        shard = [[*data.chunk.offsets], [*data.chunk.sizes], *place]
        table[item.index.fqn] = [f"{data.properties.dtype}", [*data.size], shard]
    return table


def _write_manifest(ckpt: ModuleType, path: Path, manifest: State, parts: list[str]) -> None:
    """Write the manifest, on rank 0. parts: what `_write_shards` returned."""
    sizes = {entry.name: entry.stat().st_size for entry in os.scandir(path)}
    files, tensors = State(), State()
    for part in parts:
        file, described, table = json.loads(part)
        if sizes.get(file) != described[0]:
            raise OSError(f"rank 0 does not see {file}; all ranks must share the folder")
        files[file] = described
        for name, (dtype, shape, shard) in table.items():
            tensors.setdefault(name, [dtype, shape, []])[2].append(shard)
    for name, (_, shape, shards) in tensors.items():
        shards.sort()
        _check_shards(name, shape, shards, files)
    text = json.dumps(manifest | {"files": files, "tensors": tensors}, default=float)
    ckpt.write_text(path, MANIFEST, text)


def _meta_tensor(dtype: str, shape: list[int]) -> Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device="meta")


# --------------------------------------------------------------------------------------------- read


def read_manifest(ckpt: ModuleType, path: Path) -> tuple[State, dict[str, Tensor]]:
    """Return the manifest, and the tensors that it lists, on the device "meta".

    ValueError if `write` cannot have written the manifest.
    """
    file = path / MANIFEST  # is_file: opening a pipe might never end
    if not file.is_file() or not path.name.endswith(f"-{ckpt.sha256(file)[:32]}"):
        raise ValueError(f"damaged: {MANIFEST} does not have the digest in the name of the folder")
    try:
        manifest: State = json.loads(file.read_bytes())
        files, shapes = manifest["files"], {}
        for name, kind in files.items():
            valid = re.fullmatch(r"[\w.]+", name)
            if not valid or [type(value) for value in kind] != [int, str]:
                raise ValueError(f"{name} is not a file in the folder, with size and digest")
        for name, (dtype, shape, shards) in manifest["tensors"].items():
            _check_shards(name, shape, shards, files)
            shapes[name] = _meta_tensor(dtype, shape)
        _build_state(manifest, shapes)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise ValueError(f"not a manifest: {error!r}") from error
    return manifest, shapes


def _check_shards(name: str, shape: list[int], shards: list[Any], files: State) -> None:
    """Raise ValueError unless the shards are in `files`, and have each row once, in order."""
    row = 0
    for offsets, sizes, file, start, length in shards:
        natural = all(type(n) is int and n >= 0 for n in (*offsets, *sizes, start, length))
        if not natural or start + length > files[file][0]:
            raise ValueError(f"a shard of {name} is not inside its file")
        if offsets[:1] != [row][: len(shape)] or sizes[1:] != shape[1:]:
            break
        row += sizes[0] if shape else 1
    if not shards or row != (shape[0] if shape else 1):
        raise ValueError(f"{name} is not sharded along its first dimension alone")


def _build_state(manifest: State, tensors: dict[str, Tensor]) -> State:
    """Return the state in the layout of ckpt.snapshot."""
    moments: list[State] = [{} for _ in manifest["optimizers"]]
    for key, tensor in tensors.items():
        if match := re.fullmatch(r"optimizers\.(\d+)\.(.+)\.([^.]+)", key):
            moments[int(match[1])].setdefault(match[2], {})[match[3]] = tensor
    pairs = zip(moments, manifest["optimizers"])
    optimizers = [{"state": state, "param_groups": g} if state else {} for state, g in pairs]
    model = {name: tensors[f"model.{first}"] for name, first in manifest["names"].items()}
    return {**manifest["state"], "model": model, "optimizers": optimizers}


def load(ckpt: ModuleType, read: Read | None, folder: str, entry: Any) -> State:
    """Read and verify a checkpoint, as ckpt.load does. ValueError if it is damaged.

    If `read` is None, the tensors of a sharded checkpoint are on the device "meta".
    """
    if entry.name.endswith(".pt"):
        return dict(ckpt.load(folder, entry))
    path = Path(folder, entry.name)
    manifest, tensors = read_manifest(ckpt, path)
    for name, (size, digest) in manifest["files"].items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size or ckpt.sha256(file) != digest:
            raise ValueError(f"damaged: {name} does not have the size and digest in the manifest")
    if not read:
        return {**_build_state(manifest, tensors), "sharded_path": f"{path}"}
    for name, (_, _, shards) in manifest["tensors"].items():
        parts = [_read_shard(read, path, name, tensors[name].dtype, shard) for shard in shards]
        tensors[name] = torch.cat(parts) if len(parts) > 1 else parts[0]
    return _build_state(manifest, tensors)


def _read_shard(read: Read, path: Path, name: str, dtype: torch.dtype, shard: list[Any]) -> Tensor:
    """Return a shard. ValueError unless it is as the manifest says, and the model without NaN."""
    _, sizes, file, start, length = shard
    with (path / file).open("rb") as opened:
        opened.seek(start)
        record = io.BytesIO(opened.read(length))
    try:
        value = read(record)
    except ValueError as error:
        raise ValueError(f"not a checkpoint: {file}: {error}") from None
    if not isinstance(value, Tensor) or (value.dtype, [*value.shape]) != (dtype, sizes):
        raise ValueError(f"not a checkpoint: {file} does not contain {name} as the manifest says")
    if name.startswith("model.") and value.isnan().any():
        raise ValueError(f"worthless: {name} contains NaN")
    return value


def restore_(ckpt: ModuleType, state: State, model: nn.Module, optimizers: Optimizers) -> None:
    """Put the state that `load` returned on rank 0 into a model and optimizers.

    Every rank must call this. Any number of ranks with any strategy may have written the
    checkpoint. The optimizers keep their settings. ValueError if the checkpoint does not fit.
    """
    paths = [state.get("sharded_path")]
    if dist.is_initialized():
        dist.broadcast_object_list(paths)
    if not paths[0]:
        ckpt.restore_(state, model, optimizers)
        return
    seen: list[Any] = [os.path.isdir(paths[0])]
    if dist.is_initialized():
        seen = [None] * dist.get_world_size()
        dist.all_gather_object(seen, os.path.isdir(paths[0]))
    if not all(seen):
        rank = seen.index(False)
        raise ValueError(f"rank {rank} does not see {paths[0]}; all ranks must share the folder")
    manifest, saved = read_manifest(ckpt, Path(paths[0]))
    count = len(manifest["optimizers"])
    if count != len(optimizers):
        raise ValueError(f"{count} optimizers in the checkpoint, {len(optimizers)} here")
    model = ckpt.unwrap(model)
    _create_moments_(model, optimizers, {key.rsplit(".", 1)[0] for key in saved})
    ours = _state_tensors(model, optimizers)
    ckpt.check_same(saved, ours)
    try:
        dcp.load(State(ours), storage_reader=_Reader(paths[0], manifest["tensors"], saved))
    except dcp.CheckpointException as error:
        raise _first_error(error) from None


def _create_moments_(model: nn.Module, optimizers: Optimizers, saved: set[str]) -> None:
    """Create the moments of the parameters in `saved` ("optimizers.INDEX.NAME")."""
    _, names = _names(model)
    for i, optimizer in enumerate(optimizers):
        optimizer.zero_grad(set_to_none=True)
        optimizer.state.clear()
        get_optimizer_state_dict(model, optimizer)  # creates all moments, by a step of length 0
        for parameter in [*optimizer.state]:
            if f"optimizers.{i}.{names[parameter]}" not in saved:  # it never had a gradient
                del optimizer.state[parameter]


class _Reader(dcp.FileSystemReader):
    """DCP's reader, which takes the list of tensors from the manifest and not from a pickle."""

    def __init__(self, path: str, table: State, shapes: dict[str, Tensor]):
        super().__init__(path)
        self.table, self.shapes = table, shapes

    def read_metadata(self, *_: Any, **__: Any) -> dcp.Metadata:
        """Return what .metadata would contain."""
        tensors, places = State(), dict[MetadataIndex, Any]()
        for name, (_, _, shards) in self.table.items():
            chunks = [dcp.ChunkStorageMetadata(torch.Size(s[0]), torch.Size(s[1])) for s in shards]
            properties = TensorProperties(self.shapes[name].dtype)
            tensors[name] = dcp.TensorStorageMetadata(properties, self.shapes[name].shape, chunks)
            places |= {MetadataIndex(name, s[0]): _StorageInfo(*s[2:]) for s in shards}
        return dcp.Metadata(tensors, storage_data=places)
