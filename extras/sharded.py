"""A checkpoint that each rank writes and reads its own share of: nowhere does the whole state meet.

    wait = save("out/.saving-400", name, model, optimizers, group, step=400)    # on every rank; it holds a copy
    ...                                                                         # training goes on
    wait()                                                                      # OSError on rank 0: there is none

    if not damage(path, rank, size): restore_(path, model, optimizers)          # on every rank of any number
    state = load(path)                                                          # whole, in one process

It is a folder with the files of torch.distributed.checkpoint (DCP), which plans, writes and shares out, and with
manifest.json: the size and digest of each file, where each part of each tensor lies, and what else there is to know.
The folder gets its name, with the digest of the manifest, once all of it is durable: it is whole, or it is not one.
DCP's own list, .metadata, is a pickle. It is there for others, who open the folder with DCP, and never read here.
"""

import hashlib
import io
import json
import math
import os
import pickle
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import combinations
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

MANIFEST = "manifest.json"


def plain(file: BinaryIO) -> Any:
    """What torch.save wrote, if that is tensors and plain values alone; nothing in it is run."""
    return torch.load(file, map_location="cpu", weights_only=True)


# ------------------------------------------------------------------------------------------------------- write


def group(timeout: float) -> dist.ProcessGroup:
    """A group of all ranks, for `save`; all have to call it. timeout: seconds that they wait there for one another, and
    so for each other's disks."""
    made: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    return made


def in_common(folder: str) -> bool:
    """Whether all ranks see one and the same `folder`; all have to call it, and rank 0 can write there."""
    name: list[Any] = [None]
    if dist.get_rank() == 0:
        handle, name[0] = tempfile.mkstemp(prefix=".saving-", dir=folder)
        os.close(handle)
    dist.broadcast_object_list(name)
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, os.path.exists(os.path.join(folder, os.path.basename(name[0]))))
    if dist.get_rank() == 0:
        os.unlink(name[0])
    return all(seen)


def save(
    temporary: str,
    name: Callable[[str], str],
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    group: dist.ProcessGroup,
    **more: Any,
) -> Callable[[], None]:
    """Begin to write the state, and `more` (what JSON holds), on all ranks; -> what each of them has to wait with.

    temporary: a folder that is not there, or was left by a save that broke off, beside where the checkpoint will be.
    name: from the digest of the manifest to the checkpoint's name.
    group: of all ranks, for CPU tensors, and for nothing else: a thread uses it while the training uses the other.

    A save has to be waited for before the next is begun. Waiting raises on rank 0 the OSError that any rank had, for a
    full disk or weights that are NaN: then what was written is removed. Training may go on at once: each rank has a copy of
    its share on its CPU.
    """
    writer = _Writer(temporary, name, {**_small(model, optimizers), "state": more})
    saving = dcp.async_save(_tensors(model, optimizers), storage_writer=writer, process_group=group)
    return lambda: _wait(saving, temporary)


def _wait(saving: Any, temporary: str) -> None:
    try:
        saving.result()
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)  # by each, as it may not be one folder after all
        error = _cause(error)
        if dist.get_rank() == 0 or not isinstance(error, OSError):
            raise error from None


def _cause(error: BaseException) -> BaseException:
    """What the first rank to fail had, of that which DCP collects from all."""
    if not isinstance(error, CheckpointException):
        return error
    rank, (cause, _) = min(error.failures.items())
    if isinstance(cause, OSError):
        return OSError(f"rank {rank}: {cause.strerror or cause}")
    return cause if isinstance(cause, ValueError) else RuntimeError(f"rank {rank}: {cause!r}")


class _Writer(dcp.FileSystemWriter):
    """DCP's, with a digest of each file from who wrote it, and at the end, on rank 0, the step that makes it count."""

    def __init__(self, temporary: str, name: Callable[[str], str], told: dict[str, Any]):
        super().__init__(temporary, per_thread_copy_ahead=0)  # it is a copy already
        self.name, self.told = name, told

    def stage(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        # DCP's own would copy everything twice, also what another rank writes
        loads, kept = [0] * dist.get_world_size(), {}
        for key, value in sorted(state_dict.items(), key=lambda item: -item[1].nbytes):
            least = loads.index(min(loads))
            if not isinstance(value, DTensor):  # each rank has all of it, and one writes it
                loads[least] += value.nbytes
            if isinstance(value, DTensor) or least == dist.get_rank():
                kept[key] = value.to("cpu", copy=True)
        return kept

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # and make no folder yet

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:  # on rank 0, before any begins to write
        shutil.rmtree(self.path, ignore_errors=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        os.makedirs(self.path, exist_ok=True)
        for item in plan.items:  # better known now than when it is needed
            if item.index.fqn.startswith("model.") and torch.as_tensor(planner.resolve_data(item)).isnan().any():
                raise OSError(f"{item.index.fqn} has numbers that are not (NaN)")
        try:
            results = super().write_data(plan, planner).wait()
        except RuntimeError as error:  # torch's writer, on its way out, hides what stopped it: a full disk
            raise error.__context__ if isinstance(error.__context__, OSError) else error
        for file in {result.storage_data.relative_path for result in results}:
            size, digest = _digest(os.path.join(self.path, file))
            results.append(WriteResult(MetadataIndex(file), size, digest))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:  # on rank 0, after all have written
        flat = [result for those in results for result in those]
        super().finish(metadata, [[result for result in flat if not isinstance(result.storage_data, str)]])
        files = {r.index.fqn: (r.size_in_bytes, r.storage_data) for r in flat if isinstance(r.storage_data, str)}
        for file, (size, _) in files.items():
            path = os.path.join(self.path, file)
            if not os.path.exists(path) or os.path.getsize(path) != size:
                raise OSError(f"rank 0 does not see {file} as it was written; all ranks have to share the folder")
        files[".metadata"] = _digest(os.path.join(self.path, ".metadata"))
        text = json.dumps({**self.told, "files": files, "tensors": _table(metadata)}, default=float).encode()
        _commit(f"{self.path}", text, self.name(hashlib.sha256(text).hexdigest()[:32]))


def _table(metadata: Metadata) -> dict[str, Any]:
    """DCP's list of tensors as JSON: {key: [dtype, shape, [[offsets, sizes, file, where in it, bytes], ...]]}."""
    table = {}
    for key, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        chunks = []
        for chunk in tensor.chunks:
            at = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
            chunks.append([[*chunk.offsets], [*chunk.sizes], at.relative_path, at.offset, at.length])
        table[key] = [f"{tensor.properties.dtype}", [*tensor.size], chunks]
    return table


def _commit(temporary: str, manifest: bytes, name: str) -> None:
    with open(os.path.join(temporary, MANIFEST), "wb") as file:
        file.write(manifest)
        file.flush()
        os.fsync(file.fileno())
    _fsync_folder(temporary)
    parent = os.path.dirname(os.path.abspath(temporary))
    os.rename(temporary, os.path.join(parent, name))
    _fsync_folder(parent)


def _fsync_folder(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _opened(path: str) -> BinaryIO:
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError("not a file")  # a pipe or a device might never end
    return open(path, "rb")


def _digest(path: str) -> tuple[int, str]:
    """(size, SHA-256) of a file."""
    hashed, size = hashlib.sha256(), 0
    with _opened(path) as file:
        while block := file.read(1 << 22):
            hashed.update(block)
            size += len(block)
    return size, hashed.hexdigest()


# ------------------------------------------------------------------------------------------- a model's tensors


def _values(model: nn.Module) -> dict[str, Tensor]:
    """The bare model's parameters and buffers, themselves, by their names; a tied head is there under two."""
    bare = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    return {name.replace("_orig_mod.", ""): value for name, value in bare.state_dict(keep_vars=True).items()}


def _first_names(model: nn.Module) -> dict[Tensor, str]:
    return {value: name for name, value in reversed(_values(model).items())}


def _tensors(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """What training changes, in place: "model.NAME", and "optimizers.0.NAME.MOMENT"."""
    names = _first_names(model)
    found = {f"model.{name}": value.detach() for value, name in names.items()}
    for i, optimizer in enumerate(optimizers):
        for parameter, moments in optimizer.state.items():
            found |= {f"optimizers.{i}.{names[parameter]}.{key}": value.detach() for key, value in moments.items()}
    return found


def _small(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """What there is to know besides: which names are one tensor's, and the optimizers' settings."""
    names = _first_names(model)
    groups = [[{**g, "params": [names[p] for p in g["params"]]} for g in o.param_groups] for o in optimizers]
    return {"names": {name: names[value] for name, value in _values(model).items()}, "optimizers": groups}


# -------------------------------------------------------------------------------------------------------- read


def manifest(path: str) -> dict[str, Any]:
    """What the manifest of a checkpoint tells. ValueError if it is not what its name says, or does not make sense."""
    with _opened(os.path.join(path, MANIFEST)) as file:
        text = file.read()
    if not path.endswith(f"-{hashlib.sha256(text).hexdigest()[:32]}"):
        raise ValueError("damaged: the manifest does not have the digest that the name tells")
    try:
        told: dict[str, Any] = json.loads(text)
        sound = all(re.fullmatch(r"\w+\.distcp|\.metadata", file) for file in told["files"])
        sound &= all([type(value) for value in file] == [int, str] for file in told["files"].values())
        sound &= all(_fits(tensor, told["files"]) for tensor in told["tensors"].values())
        _outlined(told)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:  # torch's, of shapes
        raise ValueError(f"not a manifest: {error!r}") from error
    if not sound:
        raise ValueError("not a manifest: its tensors are not in its files")
    return told


def _fits(tensor: Any, files: dict[str, Any]) -> bool:
    """Whether a tensor's parts make up all of it, and are no larger than what there is of them in the files."""
    dtype, shape, chunks = tensor
    itemsize, boxes = _dtype(dtype).itemsize, list[tuple[slice, ...]]()
    if len(chunks) > len(files):  # DCP has a part for each rank, and a file
        return False
    for offsets, sizes, file, start, length in chunks:
        numbers = [*shape, *offsets, *sizes, start, length]
        inside = len(offsets) == len(sizes) == len(shape) and all(o + n <= s for o, n, s in zip(offsets, sizes, shape))
        if not (inside and all(type(n) is int and n >= 0 for n in numbers) and start + length <= files[file][0]):
            return False
        if math.prod(sizes) * itemsize > length:
            return False
        boxes += [_box(offsets, sizes)] * (math.prod(sizes) > 0)
    volume = sum(math.prod(side.stop - side.start for side in box) for box in boxes)
    return volume == math.prod(shape) and all(_apart(*pair) for pair in combinations(boxes, 2))


def _apart(a: tuple[slice, ...], b: tuple[slice, ...]) -> bool:
    return any(x.stop <= y.start or y.stop <= x.start for x, y in zip(a, b))


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is no type of numbers")
    return dtype


def outline(path: str) -> dict[str, Any]:
    """The state as `load` has it, with tensors that have shape and type, and no numbers (on the device "meta")."""
    return _outlined(manifest(path))


def _outlined(told: dict[str, Any]) -> dict[str, Any]:
    return _nested(told, {k: torch.empty(v[1], dtype=_dtype(v[0]), device="meta") for k, v in told["tensors"].items()})


def _nested(told: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """A plain state: {"model": {name: tensor}, "optimizers": [{"state": ..., "param_groups": ...}], ...}"""
    optimizers = [{"state": dict[str, Any](), "param_groups": groups} for groups in told["optimizers"]]
    for key, tensor in tensors.items():
        if not key.startswith("model."):
            _, i, rest = key.split(".", 2)
            name, moment = rest.rsplit(".", 1)
            optimizers[int(i)]["state"].setdefault(name, {})[moment] = tensor
    model = {name: tensors[f"model.{first}"] for name, first in told["names"].items()}
    return {**told["state"], "model": model, "optimizers": [o if o["state"] else {} for o in optimizers]}


def _damaged(path: str, files: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """What is wrong with each of `files` that is not what the manifest says."""
    for file, (size, digest) in files:
        try:
            if _digest(os.path.join(path, file)) != (size, digest):
                yield f"damaged: {file} does not have the digest that the manifest tells"
        except OSError as error:
            yield f"damaged: {file}: {error.strerror or error}"


def damage(path: str, rank: int, size: int) -> str:
    """What is wrong with a checkpoint, the same on all ranks, or "": each of them reads its share of the files."""
    try:
        wrong = next(_damaged(path, [*manifest(path)["files"].items()][rank::size]), "")
    except (ValueError, OSError) as error:
        wrong = f"{error}"
    everyones: list[Any] = [None] * size
    dist.all_gather_object(everyones, wrong)
    return next(filter(None, everyones), "")


def load(path: str, read: Callable[[BinaryIO], Any] = plain) -> dict[str, Any]:
    """All of it, tensors on the CPU, as if one file had been written. ValueError if it does not verify.

    read: what reads a record of torch.save's.
    """
    told = manifest(path)
    for wrong in _damaged(path, told["files"].items()):
        raise ValueError(wrong)
    tensors = {}
    for key, (dtype, shape, chunks) in told["tensors"].items():
        tensors[key] = torch.empty(shape, dtype=_dtype(dtype))
        for chunk in chunks:
            tensors[key][_box(*chunk[:2])] = _record(path, told, key, chunk, read)
    return _nested(told, tensors)


def _box(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes))


def _record(path: str, told: dict[str, Any], key: str, chunk: Any, read: Callable[[BinaryIO], Any]) -> Tensor:
    """One part of a tensor."""
    _, sizes, file, start, length = chunk
    with _opened(os.path.join(path, file)) as opened:
        opened.seek(start)
        try:
            tensor = read(io.BytesIO(opened.read(length)))
        except (ValueError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise ValueError(f"not a checkpoint: {file}: {error}") from None
    if not (isinstance(tensor, Tensor) and [f"{tensor.dtype}", [*tensor.shape]] == [told["tensors"][key][0], sizes]):
        raise ValueError(f"not a checkpoint: {file} does not have {key} where the manifest says")
    if key.startswith("model.") and tensor.isnan().any():
        raise ValueError(f"worthless: {key} has numbers that are not (NaN)")
    return tensor


def restore_(
    path: str,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    read: Callable[[BinaryIO], Any] = plain,
) -> None:
    """Put a checkpoint back, each rank its share, whatever strategy and number of ranks wrote it. Every rank calls it.

    The optimizers keep the settings that they were built with and get their moments back. ValueError if it is not one
    of this model and so many optimizers. Whether its files are sound is for `damage` to say, before.
    """
    told = manifest(path)
    if len(told["optimizers"]) != len(optimizers):
        raise ValueError(f"{len(told['optimizers'])} optimizers in the checkpoint, {len(optimizers)} here")
    names, saved = _first_names(model), {key.rsplit(".", 1)[0] for key in told["tensors"]}
    for i, optimizer in enumerate(optimizers):
        optimizer.zero_grad(set_to_none=True)
        optimizer.state.clear()
        get_optimizer_state_dict(model, optimizer)  # makes it take a step, of no length, and so have moments
        for parameter in [*optimizer.state]:  # a parameter that never had a gradient has none
            if f"optimizers.{i}.{names[parameter]}" not in saved:
                del optimizer.state[parameter]
    ours = _tensors(model, optimizers)
    for key in [*ours, *told["tensors"]]:
        a = told["tensors"].get(key, [None])[:2]
        b = [f"{ours[key].dtype}", [*ours[key].shape]] if key in ours else [None]
        if a != b:
            raise ValueError(f"{key} is {_said(a)} in the checkpoint, {_said(b)} here")
    try:
        dcp.load(dict[str, Any](ours), storage_reader=_Reader(path, told, read))
    except CheckpointException as error:
        raise _cause(error) from None


def _said(tensor: list[Any]) -> str:
    return f"{tuple(tensor[1])} {tensor[0]}" if tensor[0] else "missing"


class _Reader(dcp.FileSystemReader):
    """DCP's, but what it takes from a pickle there comes from the manifest, and records are read by `read`."""

    def __init__(self, path: str, told: dict[str, Any], read: Callable[[BinaryIO], Any]):
        super().__init__(path)
        self.told, self.read = told, read

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        tensors, places = {}, dict[MetadataIndex, Any]()
        for key, (dtype, shape, chunks) in self.told["tensors"].items():
            boxes = [ChunkStorageMetadata(torch.Size(chunk[0]), torch.Size(chunk[1])) for chunk in chunks]
            tensors[key] = TensorStorageMetadata(TensorProperties(_dtype(dtype)), torch.Size(shape), boxes)
            places |= {MetadataIndex(key, chunk[0]): chunk for chunk in chunks}
        return Metadata(dict(tensors), storage_data=places)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            at = item.storage_index
            record = _record(f"{self.path}", self.told, at.fqn, self.storage_data[at], self.read)
            target = planner.resolve_tensor(item).detach()
            target.copy_(record[_box(item.storage_offsets, item.lengths)])
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done
