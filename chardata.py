"""Read text or token files, and compute the windows that each rank trains on at each step.

    corpus = read(list_files("data/*.txt"), "char")
    train, val = split(corpus.tokens, 0.1)
    plan = BatchPlan(train, block_size=256, batch_size=16, seed=0)
    for micro_batches, count in steps(plan, rank=rank, world_size=world_size, start=0):
        # count: number of targets in the global batch, or 0 if this rank has no window
        for x, y in micro_batches:
            (loss_sum(model, x, y) * (1 / count if count else 0)).backward()
        ...  # sum the gradients over all ranks, and update

DistributedDataParallel averages the gradients: with it, multiply by world_size.

- A *window* is `block_size` inputs and as many targets. The target of an input is the next token.
- A *global batch* is the windows of all ranks in a step: `batch_size`, or fewer at an epoch's end.
- In an *epoch*, each window is used exactly once, in a new order. Each epoch begins its windows at
  a new offset. Steps are counted from 0 through all epochs.

This module does not communicate between ranks.
"""

import codecs
import glob
import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, pairwise
from pathlib import Path
from pydoc_data.topics import topics  # Python's help texts
from typing import NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

Batch = tuple[torch.Tensor, torch.Tensor]  # inputs, targets


class Corpus(NamedTuple):
    """The data as tokens, with the vocabulary."""

    tokens: np.ndarray  # (n,), of any unsigned integer type
    val_tokens: np.ndarray  # the tokens of the validation files
    vocab: int  # vocabulary size
    chars: str  # the text of id i is chars[i]; "" for bytes; for token files see `read`
    digest: str  # changes if the data changes: save it, and compare it when the run resumes


class BatchPlan(NamedTuple):
    """Which windows make up each global batch. It must be the same on all ranks and at a resume."""

    tokens: np.ndarray
    block_size: int  # inputs per window
    batch_size: int  # windows per global batch
    seed: int = 0  # determines the order and the offset of the windows


def list_files(data: str) -> list[str]:
    """Return the files that match a path or a glob pattern, sorted."""
    names = [data] if os.path.exists(data) else sorted(glob.glob(data, recursive=True))
    if not names:
        raise FileNotFoundError(f"{data!r}: no such file, and no file matches this pattern")
    return names


def read(
    files: Sequence[str],
    tokenizer: str,
    chars: str = "",
    vocab: int | None = None,
    val_files: Sequence[str] = (),
) -> Corpus:
    """Read local files as tokens. Without files, read the help texts of Python, about 465 KB.

    The tokenizer "char" gives one id per character of a UTF-8 text. The vocabulary is `chars` if
    given, else all that occur. "byte" gives one id per byte. Texts are joined with line breaks.

    Files .npy (1-d, unsigned integers) and .bin (uint16, without a header) contain ids, so
    `tokenizer` is not applied. It can be a tokenizer.json: its content becomes `chars`, to decode
    samples. A single file is memory-mapped; several are joined in memory. The vocabulary size is
    `vocab`, or the highest id + 1, rounded up to a multiple of 64. ValueError if an id is too high
    for `vocab`.
    """
    groups = files, val_files
    if any(name.endswith((".bin", ".npy")) for name in (*files, *val_files)):
        if tokenizer == "char":
            if chars:
                raise ValueError("a model of characters needs text, not token files")
        elif tokenizer != "byte":
            chars = chars or Path(tokenizer).read_text("utf-8")
        arrays = [_read_ids(group) for group in groups]
        highest = max(int(array.max(initial=0)) for array in arrays)
        size = vocab or 64 * (highest // 64 + 1)
        if highest >= size:
            raise ValueError(f"the data has the id {highest}, too high for --vocab {size}")
    else:
        texts = [b"\n".join(Path(name).read_bytes() for name in group) for group in groups]
        if not files:
            texts[0] = "\n".join(topics.values()).encode()
        if tokenizer == "byte":
            chars, arrays = "", [np.frombuffer(text, np.uint8) for text in texts]
        elif tokenizer == "char":
            decoded = [text.decode("utf-8-sig") for text in texts]
            chars = chars or "".join(sorted({*decoded[0], *decoded[1]}))
            arrays = [encode(text, tokenizer, chars) for text in decoded]
        else:
            raise ValueError(
                f"--tokenizer {tokenizer} needs token files (extras/prepare.py), not text"
            )
        size = len(chars) or 256
    if vocab not in (None, size):
        raise ValueError(f"the text has a vocabulary of {size}, not {vocab}")
    return Corpus(*arrays, size, chars, digest(arrays, chars if tokenizer == "char" else ""))  # type: ignore[call-arg, arg-type]


def _read_ids(names: Sequence[str]) -> np.ndarray:
    """Return the ids in .npy files (unsigned integers) and .bin files (uint16) as one array."""
    arrays = [np.empty(0, np.uint8)]
    for name in names:
        try:
            ids = np.load(name, "r") if name.endswith(".npy") else np.memmap(name, "<u2", "r")
            if (
                ids.ndim != 1
                or ids.dtype.kind != "u"
                or name[-4:] not in (".bin", ".npy")
                or bytes(ids[:2]) in (b"\x88\xd84\1", b"\xa1\xd94\1")  # headers of llm.c
            ):
                raise ValueError("must be .npy with unsigned integers (n,), or .bin without header")
        except (ValueError, EOFError) as error:
            raise ValueError(f"{name}: {error}") from None
        arrays.append(ids)
    return arrays[1] if len(arrays) == 2 else np.concatenate(arrays)


def digest(arrays: Sequence[np.ndarray], chars: str) -> str:
    """Return a hash of the data, as 32 hex digits. It takes about a second for a gigabyte."""
    hashed = hashlib.blake2b(chars.encode(), digest_size=16)
    for array in arrays:
        hashed.update(f"{array.dtype} {len(array)}\n".encode())
        hashed.update(np.ascontiguousarray(array))  # type: ignore[arg-type]
    return hashed.hexdigest()


def encode(text: str, tokenizer: str, chars: str) -> np.ndarray:
    """Return the token ids of a text, (n,). ValueError for a character that has none."""
    if tokenizer == "byte":
        return np.frombuffer(text.encode(), np.uint8)
    if unknown := set(text) - set(chars):
        raise ValueError(f"{min(unknown)!r} is not in the vocabulary of the training")
    table = np.zeros(0x110000, np.min_scalar_type(len(chars) - 1))  # id of each Unicode character
    table[[ord(char) for char in chars]] = range(len(chars))
    return table[np.frombuffer(text.encode("utf-32-le"), np.uint32)]


def decode(ids: Iterable[int], tokenizer: str, chars: str) -> Iterator[str]:
    """Yield the text of token ids, piece by piece."""
    if tokenizer == "byte":
        return codecs.iterdecode((bytes([i]) for i in ids), "utf-8", "replace")
    return (chars[i] for i in ids)


def split(tokens: np.ndarray, val_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Return (training tokens, validation tokens): the last part is for validation."""
    cut = len(tokens) - round(len(tokens) * val_fraction)
    return tokens[:cut], tokens[cut:]


def num_windows(plan: BatchPlan) -> int:
    """Return the number of windows in an epoch: n // block_size - 1 for n tokens, but at least 1.

    The - 1 leaves room for the offset of each epoch.
    """
    n, T = len(plan.tokens), plan.block_size
    if n <= T:
        raise ValueError(f"{n} tokens are too few: --block-size {T} needs {T + 1}")
    return max(1, n // T - 1)


def steps_per_epoch(plan: BatchPlan) -> int:
    """Return the number of steps in an epoch."""
    return math.ceil(num_windows(plan) / plan.batch_size)


def tokens_before(plan: BatchPlan, step: int) -> int:
    """Return how many targets all ranks together train on before `step`."""
    epochs, steps_in_epoch = divmod(step, steps_per_epoch(plan))
    return (epochs * num_windows(plan) + steps_in_epoch * plan.batch_size) * plan.block_size


def steps(
    plan: BatchPlan, *, rank: int = 0, world_size: int = 1, accum: int = 1, start: int = 0
) -> Iterator[tuple[list[Batch], int]]:
    """Yield (micro-batches of this rank, count) for step `start` and all later steps, without end.

    Each micro-batch is (x, y), both (B, T) int64 on the CPU, with T = plan.block_size. They are
    views of the same memory. `count` is the number of targets in the global batch.

    A rank divides its windows of a step into `accum` micro-batches, or fewer if it has fewer
    windows. The global batches do not depend on `world_size` and `accum`, so a run can resume with
    other values. A rank without a window gets the count 0 and a substitute micro-batch: it must
    run forward and backward on that, with the weight 0, because the other ranks wait for it.
    """
    _check_rank(rank, world_size)
    tokens, T, batch_size, seed = plan
    total, per_epoch = num_windows(plan), steps_per_epoch(plan)
    windows = sliding_window_view(tokens, T + 1)
    for step in count(start):
        epoch, step_in_epoch = divmod(step, per_epoch)
        first = step_in_epoch * batch_size
        size = min(batch_size, total - first)
        mine = range(first + size * rank // world_size, first + size * (rank + 1) // world_size)
        order = permute(np.array(mine or [first]), total, _key(seed, epoch, "order"))
        # With the largest offset, the last target of the epoch is the last token of the data.
        offset = _key(seed, epoch, "offset") % (len(tokens) - total * T)
        rows = torch.from_numpy(windows[offset + order * T].astype(np.int64))
        parts = rows.tensor_split(min(accum, len(rows)))
        yield [(part[:, :-1], part[:, 1:]) for part in parts], size * T if mine else 0


def every_window(plan: BatchPlan, *, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
    """Yield this rank's batches of one pass over plan.tokens, in order, for an evaluation.

    Over all ranks, each token but the first is a target exactly once. Each batch is (x, y) as in
    steps(), but the last batch of the pass can be one shorter window. B is at most plan.batch_size
    on each rank. Ranks can have different numbers of batches, and some can have none.
    """
    _check_rank(rank, world_size)
    tokens, T, batch_size, _ = plan
    targets = max(0, len(tokens) - 1)
    # The last rank has the fewest whole windows, because it also takes the targets after them.
    first, stop = (math.ceil(targets // T * r / world_size) * T for r in (rank, rank + 1))
    end = targets if rank == world_size - 1 else stop
    # Each batch lies between two edges.
    for begin, end in pairwise(sorted({*range(first, stop, batch_size * T), stop, end})):
        row = torch.from_numpy(tokens[begin : end + 1].astype(np.int64))
        width = min(T, end - begin)
        yield row[:-1].view(-1, width), row[1:].view(-1, width)


# ----------------------------------------------------------------------------------------- shuffle


class RankSampler(list[int]):
    """This rank's part of a random permutation of range(n): the sampler of a DataLoader.

    Call set_epoch before each epoch, for a new order.

    pad: without it, each index occurs once over all ranks, and the length differs by at most one
        between ranks. A plain loop with DistributedDataParallel then hangs at the end of the epoch,
        but group_batches of loop.py handles this. With pad=True, the length is the same on all
        ranks, because the first indices of the permutation are repeated, as in torch's
        DistributedSampler.
    """

    def __init__(
        self, n: int, rank: int, world_size: int, seed: int = 0, pad: bool = False
    ) -> None:
        _check_rank(rank, world_size)
        self.settings = n, rank, world_size, seed, pad
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Replace the indices by those of an epoch."""
        n, rank, world_size, seed, pad = self.settings
        stop = math.ceil(n / world_size) * world_size if pad else n
        mine = np.arange(rank, stop, world_size) % n
        self[:] = permute(mine, n, _key(seed, epoch, "order")).tolist()


def permute(index: np.ndarray, n: int, key: int) -> np.ndarray:
    """Return the elements at these indices of a pseudo-random permutation of range(n), int64.

    `key` selects the permutation. Time and memory do not depend on n.

    Method: a Feistel network of eight rounds on index = left * b + right is a bijection of
    range(a * b). It is repeated while the result is n or more ("cycle walking", Black and Rogaway,
    2002).
    """
    a = math.isqrt(n - 1) + 1
    b = (n - 1) // a + 1
    left, right = divmod(index.astype(np.uint64), b)
    for i in range(8):  # Each round changes one half, and exchanges the halves.
        # The inner % keeps the sum within 64 bits.
        left, right = right, (left + _hash(right, key + i) % a) % a
        a, b = b, a
    out = (left * b + right).astype(np.int64)
    outside = out >= n
    if outside.any():
        out[outside] = permute(out[outside], n, key)
    return out


def _hash(x: np.ndarray, key: int) -> np.ndarray:
    """Hash each of x with a key: the finaliser of SplitMix64 (Steele et al., 2014)."""
    z = x + (key * 0x9E3779B97F4A7C15) % (1 << 64)
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9
    z = (z ^ z >> 27) * 0x94D049BB133111EB
    return z ^ z >> 31


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not one of {world_size} ranks")


def _key(seed: int, epoch: int, purpose: str) -> int:
    hashed = hashlib.blake2b(f"{seed} {epoch} {purpose}".encode(), digest_size=8)
    return int.from_bytes(hashed.digest(), "little")
