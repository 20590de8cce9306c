"""Save and load a checkpoint of which each rank writes and reads its own shard.

    shards = group("out", timeout=600)                     # every rank, once
    wait = save("out", model, optimizers, shards, step, loss, keep, ckpt, config=config)
    ...                                                    # training continues
    wait()                                                 # every rank

    problem = verify_shards(path, rank, size, ckpt.sha256)   # every rank, of any number of ranks
    if not problem:
        restore_(path, model, optimizers)
    state = load(path, read, ckpt.sha256)                  # one process: as ckpt.load

The checkpoint is a folder with the files of torch.distributed.checkpoint (DCP), one for each rank.
manifest.json lists the size and SHA-256 of each file, the place of each shard of each tensor, and
the rest of the state. The folder gets its name, which contains the digest of the manifest, when
everything in it is durable. DCP's own list, .metadata, is a pickle. It is there for other programs
that use DCP, and it is not read here.
"""

import hashlib
import io
import json
import os
import pickle
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

Optimizers = Sequence[torch.optim.Optimizer]
Sha256 = Callable[[str], str]  # ckpt.sha256: the path of a file -> 64 hexadecimal digits
MANIFEST = "manifest.json"
STORAGE_TIMEOUT = 3600.0  # seconds that the ranks wait at least for the slowest disk


# --------------------------------------------------------------------------------------------- save


def group(folder: str, timeout: float) -> dist.ProcessGroup:
    """Return the process group that `save` and `write` need. Every rank must call this.

    ValueError if the ranks do not all see the same `folder`, which must exist.
    timeout: seconds that the ranks wait for each other, and so for each other's disks.
    """
    check_shared_folder(folder)
    limit = timedelta(seconds=max(timeout, STORAGE_TIMEOUT))
    made: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=limit)
    return made


def check_shared_folder(folder: str) -> None:
    """ValueError if the ranks do not all see the same folder. Every rank must call this."""
    first = dist.get_rank() == 0
    with tempfile.NamedTemporaryFile(dir=folder) if first else nullcontext() as file:
        names: list[Any] = [os.path.basename(file.name) if file else ""]
        dist.broadcast_object_list(names)
        seen: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(seen, os.path.exists(os.path.join(folder, names[0])))
    if not all(seen):
        raise ValueError("a sharded checkpoint needs a folder that all ranks share")


def save(
    folder: str,
    model: nn.Module,
    optimizers: Optimizers,
    group: dist.ProcessGroup,
    step: int,
    loss: float | None,
    keep: int,
    ckpt: ModuleType,
    /,
    **more: Any,
) -> Callable[[], None]:
    """Start to write a checkpoint of the state and of `more`. Every rank must call this.

    Return a function that waits until `write` has ended in a thread, and raises its error. Every
    rank must call it before its next `save`. The model may change as soon as `save` returns.
    """
    state = snapshot(model, optimizers, **more)
    writing = ckpt.run_in_background(write, folder, state, step, loss, keep, group, ckpt)
    wait: Callable[[], None] = writing.result
    return wait


def snapshot(model: nn.Module, optimizers: Optimizers, **more: Any) -> dict[str, Any]:
    """Return, for `write`, a copy on the CPU of what this rank writes. Every rank must call this.

    That is its shards, and its part of the tensors that all ranks have. DCP would copy the former
    twice and, on each rank, all of the latter. more: values that JSON can represent.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = _state_tensors(model, optimizers)
    by_size = sorted(tensors.items(), key=lambda item: -item[1].nbytes)  # for about equal parts
    mine = (x for i, x in enumerate(by_size) if i % size == rank or isinstance(x[1], DTensor))
    copies = {name: tensor.to("cpu", copy=True) for name, tensor in mine}
    return {"tensors": copies, "manifest": {**_describe(model, optimizers), "state": more}}


def write(
    folder: str,
    state: dict[str, Any],
    step: int,
    loss: float | None,
    keep: int,
    group: dist.ProcessGroup,
    ckpt: ModuleType,
) -> None:
    """Write a snapshot as a checkpoint, then delete old ones with ckpt.prune.

    Every rank must call this. It can run in a thread during training, since nothing else uses the
    group. The checkpoint is complete and durable, or absent: if a rank fails, all delete what they
    wrote, and rank 0 raises OSError, or ValueError because the model contains NaN.
    ckpt: the module ckpt.py. Its `lock` deletes what a process that was killed has left.
    """
    temporary = os.path.join(folder, f".saving-{step}")  # ckpt.lock and ckpt.prune know the prefix

    def commit(manifest: str) -> None:
        ckpt.write_text(temporary, MANIFEST, manifest)
        digest = hashlib.sha256(manifest.encode()).hexdigest()[:32]
        os.rename(temporary, os.path.join(folder, ckpt.make_entry(step, loss, digest, "").name))
        ckpt.fsync_folder(folder)

    writer = _Writer(temporary, state["manifest"], commit, ckpt.sha256)
    try:
        dcp.save(state["tensors"], storage_writer=writer, process_group=group)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)  # each rank, in case they do not share it
        first = _first_error(error)
        if dist.get_rank() == 0 or not isinstance(first, (OSError, ValueError)):
            raise first from None
    else:
        if dist.get_rank() == 0:
            ckpt.prune(folder, keep)


def _first_error(error: BaseException) -> BaseException:
    """Return the error of the first rank that failed, of those that DCP collected."""
    if not isinstance(error, CheckpointException):
        return error
    rank, (cause, _) = min(error.failures.items())
    kind = next((kind for kind in (OSError, ValueError) if isinstance(cause, kind)), RuntimeError)
    return kind(f"rank {rank}: {getattr(cause, 'strerror', None) or cause}")


class _Writer(dcp.FileSystemWriter):
    """DCP's writer, which also computes digests and at the end commits the manifest."""

    def __init__(
        self,
        path: str,
        contents: dict[str, Any],
        commit: Callable[[str], None],
        sha256: Sha256,
    ):
        super().__init__(path, sync_files=True, per_thread_copy_ahead=0)
        self.contents, self.commit, self.sha256 = contents, commit, sha256

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the file of this rank. Add a result that holds its name, size and digest."""
        for item in plan.items:
            tensor = torch.as_tensor(planner.resolve_data(item))
            if item.index.fqn.startswith("model.") and tensor.isnan().any():
                raise ValueError(f"{item.index.fqn} contains NaN")  # `load` would refuse it
        try:
            results = super().write_data(plan, planner).wait()
        except RuntimeError as error:  # torch hides the OSError, for example of a full disk
            raise error.__context__ if isinstance(error.__context__, OSError) else error
        for file in {result.storage_data.relative_path for result in results}:
            path = os.path.join(self.path, file)
            file_result = WriteResult(MetadataIndex(file), os.path.getsize(path), self.sha256(path))
            results.append(file_result)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the manifest. DCP calls this on rank 0 after all ranks have written."""
        written = [result for of_rank in results for result in of_rank]
        of_files = [result for result in written if isinstance(result.storage_data, str)]
        super().finish(metadata, [[result for result in written if result not in of_files]])
        files = {r.index.fqn: (r.size_in_bytes, r.storage_data) for r in of_files}
        for file, (size, _) in files.items():
            path = os.path.join(self.path, file)
            if not os.path.exists(path) or os.path.getsize(path) != size:
                raise OSError(f"rank 0 does not see {file}; all ranks must share the folder")
        path = os.path.join(self.path, ".metadata")
        files[".metadata"] = os.path.getsize(path), self.sha256(path)
        manifest = {**self.contents, "files": files, "tensors": _tensor_table(metadata)}
        self.commit(json.dumps(manifest, default=float))


def _tensor_table(metadata: Metadata) -> dict[str, Any]:
    """Return DCP's list of tensors as JSON: {name: [dtype, shape, shards]}.

    Each shard is [its offsets in the tensor, its shape, file, offset in the file, length in bytes].
    """
    table = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        shards = []
        for chunk in sorted(tensor.chunks, key=lambda chunk: tuple(chunk.offsets)):
            at = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            place = [at.relative_path, at.offset, at.length]
            shards.append([[*chunk.offsets], [*chunk.sizes], *place])
        table[name] = [f"{tensor.properties.dtype}", [*tensor.size], shards]
        if not _covers([*tensor.size], shards, [shard[2] for shard in shards]):
            raise ValueError(f"{name} is not sharded along its first dimension alone")
    return table


# --------------------------------------------------------------------------------- names of tensors


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the bare model's parameters and buffers, not copied. A tied head has two names."""
    bare = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    state = bare.state_dict(keep_vars=True)
    return {name.replace("_orig_mod.", ""): value for name, value in state.items()}


def _first_names(model: nn.Module) -> dict[Tensor, str]:
    return {value: name for name, value in reversed(_named_tensors(model).items())}


def _state_tensors(model: nn.Module, optimizers: Optimizers) -> dict[str, Tensor]:
    """Return {"model.NAME": tensor, "optimizers.INDEX.NAME.MOMENT": tensor}, not copied."""
    names = _first_names(model)
    tensors = {f"model.{name}": value.detach() for value, name in names.items()}
    for i, optimizer in enumerate(optimizers):
        for parameter, moments in optimizer.state.items():
            prefix = f"optimizers.{i}.{names[parameter]}"
            tensors |= {f"{prefix}.{key}": value.detach() for key, value in moments.items()}
    return tensors


def _describe(model: nn.Module, optimizers: Optimizers) -> dict[str, Any]:
    """Return what the manifest holds beside tensors: equal names, and the optimizers' settings."""
    first = _first_names(model)
    names = {name: first[value] for name, value in _named_tensors(model).items()}
    groups = [
        [{**g, "params": [first[p] for p in g["params"]]} for g in o.param_groups]
        for o in optimizers
    ]
    return {"names": names, "optimizers": groups}


# --------------------------------------------------------------------------------------------- load


def read_manifest(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the manifest and the state of which it is, with tensors on the device "meta".

    ValueError if the manifest is damaged, or is not one that `save` could have written.
    """
    file = os.path.join(path, MANIFEST)
    if not os.path.isfile(file):  # opening a pipe could wait for ever
        raise ValueError(f"damaged: {MANIFEST} is missing or not a file")
    with open(file, "rb") as opened:
        text = opened.read()
    if not path.endswith(f"-{hashlib.sha256(text).hexdigest()[:32]}"):
        raise ValueError(f"damaged: {MANIFEST} does not have the digest in the name of the folder")
    try:
        manifest: dict[str, Any] = json.loads(text)
        files, table = manifest["files"], manifest["tensors"]
        valid = all(re.fullmatch(r"\w+\.distcp|\.metadata", name) for name in files)
        valid &= all([type(value) for value in file] == [int, str] for file in files.values())
        valid &= all(_covers(shape, shards, files) for _, shape, shards in table.values())
        empty = partial(torch.empty, device="meta")
        shapes = {name: empty(shape, dtype=_dtype(d)) for name, (d, shape, _) in table.items()}
        state = _build_state(manifest, shapes)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise ValueError(f"not a manifest: {error!r}") from error
    if not valid:
        raise ValueError("not a manifest: its files or its shards are wrong")
    return manifest, state


def outline(path: str) -> dict[str, Any]:
    """Return the state that `load` returns, but its tensors have shape and dtype and no numbers."""
    return read_manifest(path)[1]


def _covers(shape: list[int], shards: list[Any], files: Iterable[str]) -> bool:
    """Whether the shards contain the rows of a tensor of `shape` in order, each row once."""
    row = 0
    for offsets, sizes, file, start, length in shards:
        if offsets[:1] != [row][: len(shape)] or sizes[1:] != shape[1:]:
            return False
        if file not in files or min(start, length) < 0:
            return False
        row += sizes[0] if shape else 1
    return row == (shape[0] if shape else 1)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is not a dtype")
    return dtype


def _build_state(manifest: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return the state in the layout of ckpt.snapshot."""
    optimizers = [{"state": dict[str, Any](), "param_groups": g} for g in manifest["optimizers"]]
    for key, tensor in tensors.items():
        if not key.startswith("model."):
            _, i, rest = key.split(".", 2)
            name, moment = rest.rsplit(".", 1)
            optimizers[int(i)]["state"].setdefault(name, {})[moment] = tensor
    model = {name: tensors[f"model.{first}"] for name, first in manifest["names"].items()}
    used = [o if o["state"] else {} for o in optimizers]
    return {**manifest["state"], "model": model, "optimizers": used}


def _problems(path: str, files: Iterable[tuple[str, Any]], sha256: Sha256) -> Iterator[str]:
    """Yield a line for each of `files` (name, (size, digest)) that is not as the manifest says."""
    for name, (size, digest) in files:
        file = os.path.join(path, name)
        try:
            # isfile: to read a pipe could take for ever
            if not os.path.isfile(file) or os.path.getsize(file) != size or sha256(file) != digest:
                yield f"damaged: {name} does not have the size and digest in the manifest"
        except OSError as error:
            yield f"damaged: {name}: {error.strerror or error}"


def verify_shards(path: str, rank: int, size: int, sha256: Sha256) -> str:
    """Return what is wrong with a checkpoint, the same on each rank, or "".

    Every rank must call this, and reads its part of the files. sha256: that of ckpt.py.
    """
    try:
        files = [*read_manifest(path)[0]["files"].items()]
        problem = next(_problems(path, files[rank::size], sha256), "")
    except (ValueError, OSError) as error:
        problem = f"{error}"
    problems: list[Any] = [None] * size
    dist.all_gather_object(problems, problem)
    return next(filter(None, problems), "")


def load(path: str, read: Callable[[BinaryIO], Any], sha256: Sha256) -> dict[str, Any]:
    """Return the whole state on the CPU, as ckpt.load does. ValueError if it does not verify.

    read: returns what torch.save wrote to an open file. Use the one of extras/reader.py for
    checkpoints of other people. sha256: that of ckpt.py.
    """
    manifest, _ = read_manifest(path)
    for problem in _problems(path, manifest["files"].items(), sha256):
        raise ValueError(problem)
    tensors = {}
    for name, (dtype, _, shards) in manifest["tensors"].items():
        parts = [_read_shard(path, name, dtype, shard, read) for shard in shards]
        tensors[name] = torch.cat(parts) if len(parts) > 1 else parts[0]
    return _build_state(manifest, tensors)


def _read_shard(
    path: str, name: str, dtype: str, shard: Any, read: Callable[[BinaryIO], Any]
) -> Tensor:
    _, sizes, file, start, length = shard
    with open(os.path.join(path, file), "rb") as opened:
        opened.seek(start)
        record = io.BytesIO(opened.read(length))
    try:
        value = read(record)
    except (ValueError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"not a checkpoint: {file}: {error}") from None
    if not isinstance(value, Tensor) or [f"{value.dtype}", [*value.shape]] != [dtype, sizes]:
        raise ValueError(f"not a checkpoint: {file} does not contain {name} as the manifest says")
    if name.startswith("model.") and value.isnan().any():
        raise ValueError(f"worthless: {name} contains NaN")
    return value


def restore_(path: str, model: nn.Module, optimizers: Optimizers) -> None:
    """Load a checkpoint into the model and the optimizers. Call `verify_shards` before.

    Every rank must call this, and reads only what it needs. Any number of ranks with any strategy
    may have written the checkpoint. The optimizers keep their settings. ValueError if the
    checkpoint is not of this model and of as many optimizers.
    """
    manifest, _ = read_manifest(path)
    saved, count = manifest["tensors"], len(manifest["optimizers"])
    if count != len(optimizers):
        raise ValueError(f"{count} optimizers in the checkpoint, {len(optimizers)} here")
    _create_moments_(model, optimizers, {key.rsplit(".", 1)[0] for key in saved})
    ours = _state_tensors(model, optimizers)
    for key in [*ours, *saved]:
        a = f"{tuple(saved[key][1])} {saved[key][0]}" if key in saved else "missing"
        b = f"{tuple(ours[key].shape)} {ours[key].dtype}" if key in ours else "missing"
        if a != b:
            raise ValueError(f"{key} is {a} in the checkpoint, {b} here")
    try:
        dcp.load(dict[str, Any](ours), storage_reader=_Reader(path, saved))
    except CheckpointException as error:
        raise _first_error(error) from None


def _create_moments_(model: nn.Module, optimizers: Optimizers, saved: set[str]) -> None:
    """Create the moments of the parameters in `saved` ("optimizers.INDEX.NAME"), to be read."""
    names = _first_names(model)
    for i, optimizer in enumerate(optimizers):
        optimizer.zero_grad(set_to_none=True)
        optimizer.state.clear()
        get_optimizer_state_dict(model, optimizer)  # creates all moments, by a step of length 0
        for parameter in [*optimizer.state]:
            if f"optimizers.{i}.{names[parameter]}" not in saved:  # it never had a gradient
                del optimizer.state[parameter]


class _Reader(dcp.FileSystemReader):
    """DCP's reader, which takes the list of tensors from the manifest and not from a pickle."""

    def __init__(self, path: str, tensors: dict[str, Any]):
        super().__init__(path)
        self.tensors = tensors

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        table, places = {}, dict[MetadataIndex, Any]()
        for name, (dtype, shape, shards) in self.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(s[0]), torch.Size(s[1])) for s in shards]
            table[name] = TensorStorageMetadata(
                TensorProperties(_dtype(dtype)), torch.Size(shape), chunks
            )
            places |= {MetadataIndex(name, s[0]): _StorageInfo(*s[2:]) for s in shards}
        return Metadata(dict(table), storage_data=places)


# --------------------------------------------------------------------------- the functions of ckpt


def storage(
    ckpt: ModuleType, read: Callable[[BinaryIO], Any], write_sharded: bool
) -> SimpleNamespace:
    """Return the functions of ckpt.py for a folder that also has sharded checkpoints.

    With write_sharded, every rank must call this, snapshot and save_and_prune, and the latter
    writes shards. restore_ takes what newest returned on rank 0, and on the other ranks {}.
    If there are several ranks, load reads all files to verify them, but returns an outline.
    """
    functions = {name: value for name, value in vars(ckpt).items() if not name.startswith("_")}
    several = dist.is_initialized() and dist.get_world_size() > 1

    def load_any(folder: str, entry: Any) -> dict[str, Any]:
        path = os.path.join(folder, entry.name)
        if entry.name.endswith(".pt"):
            return dict(ckpt.load(folder, entry))
        if not several:
            return load(path, read, ckpt.sha256)
        manifest, state = read_manifest(path)
        for problem in _problems(path, manifest["files"].items(), ckpt.sha256):
            raise ValueError(problem)
        return {**state, "sharded_path": path}

    def restore_any_(state: dict[str, Any], model: nn.Module, optimizers: Optimizers) -> None:
        paths = [state.get("sharded_path")]
        if several:
            dist.broadcast_object_list(paths)
        if paths[0]:
            restore_(paths[0], model, optimizers)
        else:
            ckpt.restore_(state, model, optimizers)

    functions |= {"load": load_any, "newest": partial(ckpt.newest, load=load_any)}
    functions["restore_"] = restore_any_
    if write_sharded:
        limit = timedelta(seconds=STORAGE_TIMEOUT)
        shards = dist.new_group(backend="gloo", timeout=limit)
        functions |= {
            "check_shared_folder": check_shared_folder,
            "snapshot": snapshot,
            "save_and_prune": partial(write, group=shards, ckpt=ckpt),
        }
    return SimpleNamespace(**functions)
