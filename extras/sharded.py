"""Save and load a checkpoint of which each rank writes and reads its own shards.

    files = storage(ckpt, reader.read, write_sharded=True)      # ckpt: the module
    files.make_folder("out")
    files.check_shared_folder("out")
    state = files.snapshot(model, optimizers, step=400)
    files.save("out", state, 400, loss, keep)                   # can run in a thread

    found = files.newest("out")[0] if rank == 0 else None
    files.restore_(found.state if found else {}, model, optimizers)

Every rank must run these lines, and all must share the folder "out". Tensors may be sharded along
their first dimension only. The checkpoint is a folder with one file of torch.distributed.checkpoint
(DCP) per rank, and manifest.json, which has the SHA-256 of the files, the places of the shards and
the rest of the state. DCP cannot open it: .metadata is missing, since a pickle can run code.
"""

import io
import json
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
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
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

State = dict[str, Any]
Optimizers = Sequence[torch.optim.Optimizer]
Read = Callable[[BinaryIO], Any]  # reads what torch.save wrote, or raises ValueError
Group = dist.ProcessGroup
MANIFEST = "manifest.json"
STORAGE_TIMEOUT = timedelta(hours=1)  # for the slowest disk


def storage(ckpt: ModuleType, read: Read, write_sharded: bool) -> SimpleNamespace:
    """Return the functions of ckpt.py, for a folder that can have sharded checkpoints.

    write_sharded: every rank must then call this, `snapshot`, `save` and `restore_`. `load` and
    `newest` give the tensors of a sharded checkpoint on the device "meta", and `restore_` reads the
    values. Call `save` in a thread if it can take longer than the timeout of process_group. In
    `restore_`, the ranks wait within this timeout for the slowest one.
    """
    save_one = ckpt.save
    load_any = partial(load, ckpt, None if write_sharded else read)
    functions = vars(ckpt) | {
        "load": load_any,
        "newest": partial(ckpt.newest, load=load_any),
        "prune": partial(prune, ckpt),
        "set_aside": partial(set_aside, ckpt),
        "check_shared_folder": partial(check_shared_folder, ckpt),
    }
    if write_sharded:
        group = dist.new_group(backend="gloo", timeout=STORAGE_TIMEOUT)
        save_one = partial(write, ckpt, group)
        functions["snapshot"] = partial(snapshot, ckpt)
        functions["restore_"] = partial(restore_, ckpt, read)

    def save(
        folder: str, state: State, step: int, loss: float | None = None, keep: int | None = None
    ) -> Any:
        entry = save_one(folder, state, step, loss)
        if entry:  # with shards, on rank 0 only
            for other in ckpt.list_checkpoints(folder):
                if other.step == step and other != entry:
                    remove(ckpt, folder, other.name)
            if keep is not None:
                prune(ckpt, folder, keep)
        return entry

    return SimpleNamespace(**functions | {"save": save})


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
        if path.is_dir() and not path.is_symlink():
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


def set_aside(ckpt: ModuleType, folder: str, name: str) -> None:
    """Add ".damaged" to the name of a checkpoint. An earlier one with that name is deleted."""
    if Path(folder, name).is_dir():  # no folder can replace another one
        remove(ckpt, folder, f"{name}.damaged")
    ckpt.set_aside(folder, name)


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
        try:
            is_kept = json.loads(json.dumps(value)) == value
        except TypeError:  # for example, of a tensor
            is_kept = False
        if not is_kept:
            raise ValueError(f"JSON cannot represent {name}; a sharded checkpoint cannot have it")
    model = ckpt.unwrap(model)
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors, names = _state_tensors(ckpt, model, optimizers)
    buffers = {f"model.{name}" for name, _ in model.named_buffers()}
    by_size = sorted(tensors, key=lambda name: -tensors[name].nbytes)  # for about equal parts
    writers = {name: 0 if name in buffers else i % size for i, name in enumerate(by_size)}
    mine = [n for n in by_size if writers[n] == rank or isinstance(tensors[n], DTensor)]
    copies = {name: tensors[name].to("cpu", copy=True) for name in mine}
    parameters = ckpt.parameter_names(model, optimizers)
    groups = [tree_map_only(nn.Parameter, parameters.get, o.param_groups) for o in optimizers]
    return {"tensors": copies, "manifest": {"names": names, "optimizers": groups, "state": more}}


def write(
    ckpt: ModuleType, group: Group, folder: str, state: State, step: int, loss: float | None = None
) -> Any:
    """Write a snapshot as a checkpoint. Every rank must call this. Rank 0 gets the entry.

    Afterwards, the checkpoint is complete and durable, or absent. If a rank fails, rank 0 alone
    raises OSError or ValueError.
    """
    temporary = Path(folder, f"{ckpt.TEMPORARY}{step}")
    first = dist.get_rank() == 0
    try:
        # dcp.save would send many Python objects: for a minute with 1,024 ranks.
        _on_all_ranks(
            group,
            partial(_write_shards, ckpt, temporary, state["tensors"]),
            partial(_write_manifest, ckpt, temporary, state["manifest"]),
        )
        if first:
            entry = ckpt.make_entry(step, loss, ckpt.sha256(temporary / MANIFEST)[:32], "")
            temporary.rename(Path(folder, entry.name))
            ckpt.fsync_folder(folder)
            return entry
    except (OSError, ValueError):
        shutil.rmtree(temporary, ignore_errors=True)  # on each rank, as they may not share it
        if first:
            raise


def _on_all_ranks(
    group: Group | None, function: Callable[[], Any], finish: Callable[[list[Any]], Any] = len
) -> None:
    """Call function() on every rank, then finish(list of the results) on rank 0.

    Every rank must call this. If a rank fails, all raise its error as OSError or ValueError. The
    default `finish` has no effect.
    """
    try:
        _DistWrapper(group, dist.is_initialized(), 0).all_reduce("", function, finish)
    except dcp.CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        text = getattr(cause, "strerror", None) or f"{cause}".partition("\n")[0] or repr(cause)
        kind = OSError if isinstance(cause, OSError) else ValueError
        raise kind(f"rank {rank}: {text}") from None


def _write_shards(ckpt: ModuleType, path: Path, tensors: dict[str, Tensor]) -> str:
    """Write the file of this rank with DCP. Return [file, [size, digest], its shards] as JSON."""
    ckpt.make_folder(f"{path}")  # DCP would not make new folders durable
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(State(tensors))
    prefix = _StoragePrefix(f"__{dist.get_rank()}_")
    plan = replace(planner.create_local_plan(), storage_data=prefix)
    for item in plan.items:
        tensor = torch.as_tensor(planner.resolve_data(item))
        if item.index.fqn.startswith("model.") and tensor.isnan().any():
            raise ValueError(f"{item.index.fqn} contains NaN")  # `_read_values_` would refuse it
    try:
        results = dcp.FileSystemWriter(path, per_thread_copy_ahead=0).write_data(plan, planner)
    except RuntimeError as error:  # torch hides an OSError
        raise error.__context__ if isinstance(error.__context__, OSError) else error
    file = f"{prefix.prefix}0.distcp"
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
    for _, _, shards in tensors.values():
        shards.sort()
    manifest = manifest | {"files": files, "tensors": tensors}
    _outline(manifest)  # raises an error if `read_manifest` would
    ckpt.write_text(path, MANIFEST, json.dumps(manifest, default=float))


# --------------------------------------------------------------------------------------------- read


def read_manifest(ckpt: ModuleType, path: Path) -> tuple[State, dict[str, Tensor]]:
    """Return the manifest, and its tensors on the device "meta". ValueError if it is damaged."""
    file = path / MANIFEST
    if not file.is_file():  # opening a pipe might never end
        raise ValueError(
            f"damaged: there is no file {file}; all ranks must share the folder, and no other run "
            "may use it"
        )
    if not path.name.endswith(f"-{ckpt.sha256(file)[:32]}"):
        raise ValueError(f"damaged: {MANIFEST} does not have the digest in the name of the folder")
    text = file.read_bytes()
    try:
        manifest: State = json.loads(text)
        outline = _outline(manifest)
        _build_state(manifest, outline)
    except Exception as error:  # a forged manifest can raise anything
        raise ValueError(f"not a manifest: {error!r}") from error
    return manifest, outline


def _outline(manifest: State) -> dict[str, Tensor]:
    """Return the tensors of a manifest on the device "meta".

    Raise an error of any type unless the shards of each tensor are inside the files, are not
    smaller than the tensor, and have each of its rows once, in order.
    """
    outline = {}
    for name, (size, _) in manifest["files"].items():
        if not re.fullmatch(r"[\w.]+", name) or type(size) is not int:
            raise ValueError(f"{name} is not a file in the folder, with its size")
    for name, (dtype, shape, shards) in manifest["tensors"].items():
        row = 0
        for offsets, sizes, file, start, length in shards:
            natural = all(type(n) is int and n >= 0 for n in (*offsets, *sizes, start, length))
            if not natural or start + length > manifest["files"][file][0]:
                raise ValueError(f"a shard of {name} is not inside its file")
            begin = [row, *[0] * len(shape[1:])][: len(shape)]
            if offsets != begin or sizes[1:] != shape[1:] or len(sizes) != len(shape):
                break
            row += sizes[0] if shape else 1
        if not shards or row != (shape[0] if shape else 1):
            raise ValueError(f"{name} is not sharded along its first dimension alone")
        kind = getattr(torch, dtype.removeprefix("torch."))
        outline[name] = torch.empty(shape, dtype=kind, device="meta")
        if outline[name].nbytes > sum(shard[4] for shard in shards):
            raise ValueError(f"the shards of {name} are smaller than the tensor")
    return outline


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
    """Read and verify a checkpoint. ValueError if it is damaged.

    If `read` is None, the tensors of a sharded checkpoint are on the device "meta".
    """
    if entry.name.endswith(".pt"):
        return dict(ckpt.load(folder, entry))
    path = Path(folder, entry.name)
    manifest, tensors = read_manifest(ckpt, path)
    for name, (size, digest) in manifest["files"].items():
        file = path / name
        if name == ".metadata":  # of an older version; it is not used, and `cp folder/*` omits it
            continue
        if not file.is_file() or file.stat().st_size != size or ckpt.sha256(file) != digest:
            raise ValueError(f"damaged: {name} does not have the size and digest in the manifest")
    if not read:
        return {**_build_state(manifest, tensors), "sharded_path": f"{path}"}
    values = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in tensors.items()}
    _read_values_(values, read, path, manifest, tensors)
    return _build_state(manifest, values)


def _read_values_(
    tensors: dict[str, Tensor], read: Read, path: Path, manifest: State, saved: dict[str, Tensor]
) -> None:
    """Read the values of `tensors`; of a DTensor, the part of this rank.

    manifest, saved: what `read_manifest` returned. ValueError if a shard is not as the manifest
    says, or if the model has NaN.
    """
    metadata = State()
    for name, (_, _, shards) in manifest["tensors"].items():
        chunks = [dcp.ChunkStorageMetadata(torch.Size(s[0]), torch.Size(s[1])) for s in shards]
        properties = TensorProperties(saved[name].dtype)
        metadata[name] = dcp.TensorStorageMetadata(properties, saved[name].shape, chunks)
    planner = dcp.DefaultLoadPlanner()
    planner.set_up_planner(State(tensors), dcp.Metadata(metadata))
    for item in planner.create_local_plan().items:
        name, place = item.storage_index.fqn, item.storage_index.index
        _, sizes, file, start, length = manifest["tensors"][name][2][place]
        with (path / file).open("rb") as opened:
            opened.seek(start)
            record = io.BytesIO(opened.read(length))
        try:
            value = read(record)
        except ValueError as error:
            raise ValueError(f"not a checkpoint: {file}: {error}") from None
        expected = saved[name].dtype, sizes
        if not isinstance(value, Tensor) or (value.dtype, [*value.shape]) != expected:
            raise ValueError(f"not a checkpoint: {file}: {name} is not as the manifest says")
        if name.startswith("model.") and value.isnan().any():
            raise ValueError(f"worthless: {name} contains NaN")
        part = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths))
        planner.resolve_tensor(item).copy_(value[part])
        del record, value  # before the next record is read, to save memory


def restore_(
    ckpt: ModuleType, read: Read, state: State, model: nn.Module, optimizers: Optimizers
) -> None:
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
    found: list[tuple[State, dict[str, Tensor]]] = []
    _on_all_ranks(None, lambda: found.append(read_manifest(ckpt, path)))
    manifest, saved = found[0]
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
    _on_all_ranks(None, partial(_read_values_, tensors, read, path, manifest, saved))
