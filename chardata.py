"""Read text or token files, and compute the windows that each rank trains on at each step.

    corpus = read(list_files("data/*.txt"), "char")
    train, val = split(corpus.tokens, 0.1)
    plan = BatchPlan(train, block_size=256, batch_size=16, seed=0, vocab=corpus.vocab)
    for micro_batches, count in steps(plan, rank=rank, world_size=world_size, start=0):
        # count: number of targets in the global batch, or 0 if this rank has no window
        weight = 1 / count if count else 0
        for x, y in micro_batches:
            (weight * loss_sum(model, x, y)).backward()  # loss_sum: your function
        ...  # sum the gradients over all ranks and update; at the end: verify_unchanged(corpus)

DistributedDataParallel averages the gradients: with it, use world_size * weight.

- A *window* is `block_size` inputs and as many targets. The target of an input is the token after
  it. A window can continue from one file into the next.
- A *global batch* is the windows of all ranks in one optimizer step: `batch_size` windows, or fewer
  at the end of an epoch.
- An *epoch* is one pass over the data. In each epoch, the windows begin at a new offset, and each
  is used exactly once, in a new order. Steps are counted from 0 through all epochs.

This module does not communicate between ranks.
"""

import codecs
import errno
import glob
import hashlib
import math
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from pydoc_data.topics import topics  # Python's help texts, for default_text
from typing import NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch.utils.data import Sampler

Tokens = Sequence[np.ndarray]  # token ids: each (n_i,), of any unsigned integer type
Stamp = tuple[str, int, int]  # name, bytes, nanoseconds of the last change
Batch = tuple[torch.Tensor, torch.Tensor]  # inputs, targets
MIB = 1 << 20
NOT_UTF_8 = "a text must be UTF-8: for example, iconv -f LATIN1 -t UTF-8 old.txt > new.txt"
UTF_16 = "UTF-16 text; convert it: iconv -f UTF-16 -t UTF-8 old.txt > new.txt"
NOT_TEXT = {  # the first bytes of a file -> what it is, and what to do
    b"\xff\xfe": UTF_16,
    b"\xfe\xff": UTF_16,
    b"\x1f\x8b": "a gzip file, not text; unpack it with gunzip",
    b"PK\x03\x04": "a zip file (or .docx, .epub), not text; unpack it, or save its text as .txt",
    b"BZh": "a bzip2 file, not text; unpack it with bunzip2",
    b"\xfd7zXZ\0": "an xz file, not text; unpack it with unxz",
    b"\x28\xb5\x2f\xfd": "a zstd file, not text; unpack it with unzstd",
    b"PAR1": "a Parquet file, not text; write its text column to a .txt file",
    b"%PDF-": "a PDF file, not text; write its text to a .txt file, for example with pdftotext",
}


class Corpus(NamedTuple):
    """The data as tokens, with the vocabulary."""

    # one array per file that is not empty, and a line break between two texts without one
    tokens: tuple[np.ndarray, ...]
    vocab: int  # vocabulary size
    kind: str  # "char", "byte" or "ids"
    chars: str  # for kind "char": id i is chars[i]
    digest: str  # digest(tokens, chars); with val_tokens, digest(val_tokens, this digest)
    stamps: tuple[Stamp, ...]  # for verify_unchanged()
    val_tokens: tuple[np.ndarray, ...] = ()  # like `tokens`, of the validation files


class BatchPlan(NamedTuple):
    """Which windows make up each global batch.

    All ranks must use the same plan, and so must a resumed run. Nothing checks this.
    """

    tokens: Tokens
    block_size: int  # inputs per window
    batch_size: int  # windows per global batch
    seed: int = 0  # determines the order and the offset of the windows
    vocab: int | None = None  # if given, all ids must be below it


# ------------------------------------------------------------------------------------------- files


def list_files(data: str) -> list[str]:
    """Return the names of the files that match a path or a glob pattern, sorted.

    Raises FileNotFoundError if no file matches, and OSError if a folder matches.
    """
    names = [data] if os.path.exists(data) else sorted(glob.glob(data, recursive=True))
    if not names:
        raise FileNotFoundError(f"{data!r}: no such file, and no file matches this pattern")
    for name in names:
        if not os.path.isfile(name):
            raise OSError(f"{name}: is not a regular file; for a folder, give '{name}/*.txt'")
    return names


def read(
    files: Sequence[str],
    tokenizer: str,
    chars: str = "",
    vocab: int | None = None,
    val_files: Sequence[str] = (),
) -> Corpus:
    """Read local files as tokens. With an empty list of files, read default_text().

    The tokenizer "char" gives one id per character of a UTF-8 text. The vocabulary is `chars` if
    given, else the characters that occur, sorted. "byte" gives one id per byte. A byte order mark
    at the beginning of a text is left out. Between two texts there is a line break if the first
    does not end with one, unless it is not in the given `chars`.

    Files .npy (one-dimensional, unsigned integers) and .bin (uint16, with or without the header of
    llm.c) contain tokens, so `tokenizer` is ignored. A .bin of another integer type can be misread:
    write .npy instead. The vocabulary size is `vocab` if given, else the highest id + 1, rounded up
    to a multiple of 64. Only steps() and every_window() check the ids, against BatchPlan.vocab.

    val_files: become Corpus.val_tokens. They share the vocabulary. Without them, see split().

    Large files and all .npy files stay memory-mapped, except texts with the tokenizer "char".
    Raises ValueError or OSError if a file is damaged or is not what its name says, if a text has a
    character that is not in `chars`, or if `vocab` does not fit the files.
    """
    # before reading, to notice a change meanwhile
    stamps = tuple(map(_stamp, [*files, *val_files]))
    names = [*(files or ["the default text"]), *val_files]
    try:
        arrays = [_read_file(name, vocab) for name in [*files, *val_files]]
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        raise ValueError(
            f"{len(names)} files are too many to open; join them, or raise `ulimit -n`"
        ) from None
    if not files:
        arrays.insert(0, np.frombuffer(default_text().encode(), "u1"))
    token_files = [name for name in names if name.endswith((".bin", ".npy"))]
    if 0 < len(token_files) < len(names):
        raise ValueError(f"{names[0]}: text files and token files (.bin, .npy) cannot be mixed")
    kind, line_break = tokenizer, ord("\n")
    if token_files:
        kind, chars, line_break = "ids", "", -1
        size = vocab or 64 * (max(int(a.max(initial=0)) for a in arrays) // 64 + 1)
    elif kind == "byte":
        chars, size = "", 256
    elif kind == "char":
        arrays, chars = _read_characters(names, arrays, chars)
        size, stamps = len(chars), ()  # A later change of the files does no harm.
        line_break = chars.find("\n")
    else:
        raise ValueError(f"tokenizer {tokenizer!r} is not char or byte")
    train = len(files) or 1
    tokens = _join(names[:train], arrays[:train], line_break)
    val_tokens = _join(names[train:], arrays[train:], line_break)
    if vocab not in (None, size):
        raise ValueError(
            f"{names[0]}: is text with a vocabulary of {size}, not {vocab}; text of another "
            "vocabulary needs its tokenizer, or give its token files (.bin, .npy)"
        )
    hashed = digest(tokens, chars)
    if val_tokens:
        hashed = digest(val_tokens, hashed)
    for array in arrays:
        if isinstance(array.base, mmap.mmap) and hasattr(mmap, "MADV_RANDOM"):  # not on Windows
            array.base.madvise(mmap.MADV_RANDOM)  # From now on, reading ahead would be useless.
    return Corpus(tokens, size, kind, chars, hashed, stamps, val_tokens)


def _read_characters(names: Sequence[str], raw: Tokens, chars: str) -> tuple[list[np.ndarray], str]:
    """Return the ids of texts, and their vocabulary."""
    texts, tokens = [], []
    try:
        for name, array in zip(names, raw):
            texts.append(array.tobytes().decode())
        # Several texts are joined with line breaks.
        line_break = "\n" * (sum(map(bool, texts)) > 1)
        chars = chars or "".join(sorted(set[str]().union(line_break, *texts)))
        for name, text in zip(names, texts):
            tokens.append(encode(text, "char", chars))
    except ValueError as error:  # `name` is the file at which a loop stopped
        advice = f"; {NOT_UTF_8}" * isinstance(error, UnicodeError)
        raise ValueError(f"{name}: {error}{advice}") from None
    return tokens, chars


def _join(names: Sequence[str], arrays: Tokens, line_break: int) -> tuple[np.ndarray, ...]:
    """Return the arrays that are not empty, with line breaks between them where they are missing.

    line_break: its id; -1 means that there is none.
    """
    joined: list[np.ndarray] = []
    for array in filter(len, arrays):
        if joined and joined[-1][-1] != line_break >= 0:
            # an array of its own, because a mapped file cannot become longer
            joined.append(np.array([line_break], array.dtype))
        joined.append(array)
    if names and not joined:
        raise ValueError(f"{names[0]}: is empty, and no other file has data")
    return tuple(joined)


def text_start(name: str) -> int:
    """Return where the text of a file begins: at byte 3 after a byte order mark, else at 0.

    Raises ValueError if the file begins like one of another format, such as gzip.
    """
    with open(name, "rb") as file:
        head = file.read(16)
    for magic, what in NOT_TEXT.items():
        if head.startswith(magic):
            raise ValueError(f"{name}: is {what}")
    return 3 * head.startswith(codecs.BOM_UTF8)


def _read_file(name: str, vocab: int | None) -> np.ndarray:
    """Read or map a file, as its own dtype (.npy), as uint16 (.bin), or as uint8."""
    size, dtype = os.path.getsize(name), "u1"
    if name.endswith(".npy"):
        try:
            array: np.memmap = np.load(name, "r")
            if array.ndim != 1 or array.dtype.kind != "u" or size != array.offset + array.nbytes:
                raise ValueError(f"{array.shape} {array.dtype} in {size} bytes")
        except OSError:  # The file may be good.
            raise
        except Exception as error:  # a damaged file can cause almost any exception
            raise ValueError(
                f"{name}: must be one complete 1-d array of unsigned integers, for example after "
                f".astype('uint32'): {error}"
            ) from None
        return array
    if name.endswith(".bin"):
        dtype = "u2"
        # np.resize, because the file can have fewer than 12 bytes.
        magic, version, count = np.resize(np.fromfile(name, "i4", 3), 3).tolist()
        # llm.c's header is 256 int32: a magic number, the version, the number of tokens, zeros. The
        # second magic number is for Llama 3, whose tokens are uint32. Its version is not 1, so such
        # a file is refused.
        if magic in (20240520, 20240801):
            start = 1024
        else:  # no header
            start, version, count = 0, 1, size // 2
        # uint32 ids look like pairs of uint16, of which the second is small. (A file of less than
        # 64 uint16 can look so by chance.)
        low, high = np.resize(np.fromfile(name, "<u2", 8192, offset=start), (4096, 2)).T
        if (vocab or 0) > 1 << 16 or count >= 64 and high.max() < 4 <= low.max():
            raise ValueError(f"{name}: has or needs uint32, but a .bin holds uint16; write a .npy")
        if version != 1 or size != start + 2 * count:
            raise ValueError(
                f"{name}: {size} bytes, header version {version}; must be "
                f"{start + 2 * count} bytes for {count} uint16 tokens, header version 1 or none"
            )
    else:
        start = text_start(name)
    if size > MIB:
        return np.memmap(name, dtype, "r", start)
    # Small files are not mapped, because a mapped file stays open, and the number of open files is
    # limited. (A .npy file is always mapped.)
    return np.fromfile(name, dtype, offset=start)


def _stamp(name: str) -> Stamp:
    status = os.stat(name)
    return name, status.st_size, status.st_mtime_ns


def verify_unchanged(corpus: Corpus) -> None:
    """Raise OSError if the size or modification time of a file has changed since read().

    Call this at the end, or now and then, because if the content of a mapped file changes, this
    process reads other tokens without an error. (A mapped file that was deleted or replaced keeps
    its content here.) It may be raised on some ranks only. Texts of kind "char" are not checked. If
    a mapped file becomes shorter, the operating system can kill the process.
    """
    for stamp in corpus.stamps:
        if _stamp(stamp[0]) != stamp:
            raise OSError(f"{stamp[0]}: was changed after training began to read it")


def default_text() -> str:
    """Return the help texts of Python, about 465 KB. They depend on Python's version."""
    return "\n".join(topics.values())


def digest(tokens: Tokens, chars: str = "", whole: int = 256 * MIB) -> str:
    """Return a hash of the data, as 32 hex digits. Save it, and compare it when the run resumes.

    The hash includes the type and the length of each array, but no file names. Up to `whole` bytes
    in total, all are hashed. Of more, at most 16 blocks of 1 MiB of each array are hashed, and a
    change between them is not noticed. With more than 16 arrays and more than 256 MiB in total,
    blocks are smaller, but at least 4 KiB. Version 0.3 and older had whole=0.
    """
    total, block = sum(array.nbytes for array in tokens), MIB
    if total > 256 * MIB:
        block = min(MIB, max(4096, 16 * MIB // len(tokens)))
    hashed = hashlib.blake2b(chars.encode(), digest_size=16)
    for array in tokens:
        hashed.update(f"{array.dtype} {len(array)}\n".encode())
        raw = array.view(np.uint8)
        if total > whole and raw.size > 16 * block:
            starts = np.linspace(0, raw.size - block, 16).astype(np.int64)
            raw = np.concatenate([raw[i : i + block] for i in starts])
        hashed.update(raw.data)
    return hashed.hexdigest()


# -------------------------------------------------------------------------------------- vocabulary


def encode(text: str, kind: str, chars: str) -> np.ndarray:
    """Return the token ids of a text, (n,).

    Kind "byte" gives the UTF-8 bytes, as uint8. Kind "char" gives indices into `chars`, in the
    smallest unsigned type that fits. Kind "ids" expects ids with spaces between them, and gives
    uint32. Raises ValueError for an unknown character or a word that is not an id.
    """
    if kind == "byte":
        return np.frombuffer(text.encode(), np.uint8)
    if kind == "ids":
        words = text.split()
        if wrong := [word for word in words if not word.isdecimal() or int(word) >= 2**32]:
            raise ValueError(f"{wrong[0]!r} is not a token id; ids are from 0 to {2**32 - 1}")
        return np.array(words, np.uint32)
    if unknown := set(text) - set(chars):
        at = min(map(text.index, unknown))
        raise ValueError(f"character {text[at]!r} at {at} is not in the vocabulary of {len(chars)}")
    # max, because `chars` can be empty.
    table = np.zeros(0x110000, np.min_scalar_type(max(0, len(chars) - 1)))
    table[list(map(ord, chars))] = range(len(chars))
    # In blocks, to save memory. The + 1 gives an empty text one block, for np.concatenate.
    blocks = (text[i : i + MIB].encode("utf-32-le") for i in range(0, len(text) + 1, MIB))
    return np.concatenate([table[np.frombuffer(block, np.uint32)] for block in blocks])


def decode(ids: Iterable[int], kind: str, chars: str) -> Iterator[str]:
    """Yield the text of token ids, piece by piece.

    Kind "ids" gives the numbers, each with a space after it.
    """
    if kind == "byte":
        return codecs.iterdecode((bytes([i]) for i in ids), "utf-8", "replace")
    return (chars[i] if kind == "char" else f"{i} " for i in ids)


def num_bytes(ids: np.ndarray, kind: str, chars: str) -> int:
    """Return the length of the text of token ids in UTF-8, in bytes. 0 for kind "ids": unknown."""
    if kind == "char":
        lengths = np.array([len(char.encode()) for char in chars], np.uint8)
        return int(lengths[ids].sum(dtype=np.int64))
    return len(ids) if kind == "byte" else 0


# ----------------------------------------------------------------------------------------- windows


def num_tokens(tokens: Tokens) -> int:
    """Return the number of tokens in all arrays."""
    return sum(map(len, tokens))


def split(tokens: Tokens, val_fraction: float, max_val: int = 0) -> tuple[Tokens, Tokens]:
    """Return (training tokens, validation tokens), without a copy.

    Of n tokens, the last round(n * val_fraction) are for validation. If max_val > 0, at most the
    first max_val + 1 of these are returned, which have max_val targets.
    """
    n = num_tokens(tokens)
    cut = n - round(n * val_fraction)
    stop = cut + max_val + 1 if max_val else n
    return _slice(tokens, 0, cut), _slice(tokens, cut, stop)


def _slice(tokens: Tokens, start: int, stop: int) -> tuple[np.ndarray, ...]:
    """Return the tokens from start to stop - 1, without a copy."""
    begins = accumulate(map(len, tokens), initial=0)
    parts = [a[max(0, start - b) : max(0, stop - b)] for a, b in zip(tokens, begins)]
    return tuple(filter(len, parts))


def num_windows(n: int, block_size: int) -> int:
    """Return the number of windows in an epoch over n tokens: n // block_size - 1, but at least 1.

    The - 1 leaves room for the offset of each epoch. Raises ValueError if n <= block_size.
    """
    _check(block_size=block_size)
    if n <= block_size:
        raise ValueError(f"{n} tokens are too few: block size {block_size} needs {block_size + 1}")
    return max(1, n // block_size - 1)


def steps_per_epoch(plan: BatchPlan) -> int:
    """Return the number of steps in an epoch."""
    _check(batch_size=plan.batch_size)
    return math.ceil(num_windows(num_tokens(plan.tokens), plan.block_size) / plan.batch_size)


def tokens_before(plan: BatchPlan, step: int) -> int:
    """Return how many targets all ranks together train on before `step`."""
    epochs, steps_in_epoch = divmod(step, steps_per_epoch(plan))
    windows = epochs * num_windows(num_tokens(plan.tokens), plan.block_size)
    return (windows + steps_in_epoch * plan.batch_size) * plan.block_size


def steps(
    plan: BatchPlan, *, rank: int = 0, world_size: int = 1, accum: int = 1, start: int = 0
) -> Iterator[tuple[list[Batch], int]]:
    """Yield (micro-batches of this rank, count) for step `start` and all later steps, without end.

    Each micro-batch is (x, y), both (B, T) int64 on the CPU, with T = plan.block_size. x and y are
    views of the same memory, and not contiguous: do not write into them, and use reshape(), not
    view(). `count` is the number of targets in the global batch.

    A rank divides its windows of a step into `accum` micro-batches, or fewer if it has fewer
    windows. So ranks can have different numbers of micro-batches: with DistributedDataParallel, use
    no_sync() for all but the last. The global batches do not depend on `world_size` and `accum`, so
    a run can resume with other values.

    In an epoch, the windows begin at an offset, and are used in random order. Both depend on
    (seed, epoch). At most 2 * T - 2 tokens, at the ends of the data, are in no window of the epoch.

    A rank without a window gets the count 0 and a substitute micro-batch. It must run forward and
    backward on that, with the weight 0, because the other ranks wait for it.

    Raises ValueError if an argument is out of its range, if the data has no more than T tokens, or
    if this rank reads an id that is not below plan.vocab. Several steps are read at once, so the id
    can belong to a later step. Other ranks do not notice such an id, and the caller must end them.
    """
    _check(rank, world_size, accum=accum)
    tokens, block_size, batch_size, seed, vocab = plan
    n = num_tokens(tokens)
    epoch_windows = num_windows(n, block_size)
    size = block_size + 1
    # Arrays that are too short for a window stay, unused, so that views[k] is that of tokens[k].
    views = [sliding_window_view(a, size) if a.size >= size else a for a in tokens]
    # For speed, read about 2**18 tokens of this rank at once.
    at_once = max(1, 2**18 // (block_size * max(1, batch_size // world_size)))
    while True:
        epoch, first_step = divmod(start, steps_per_epoch(plan))
        # `group`, (G, 1): the steps of the epoch that are read at once. max, because a last step
        # with fewer windows is a group of its own.
        whole_steps_left = epoch_windows // batch_size - first_step
        group = first_step + np.arange(max(1, min(at_once, whole_steps_left)))[:, None]
        windows = min(batch_size, epoch_windows - first_step * batch_size)  # in each step
        mine = np.arange(windows * rank // world_size, windows * (rank + 1) // world_size)
        # numbers, (G, W): for each step, which windows of the epoch this rank uses
        numbers = permute(group * batch_size + mine, epoch_windows, _key(seed, epoch, "order"))
        count = windows * block_size
        if not mine.size:  # The substitute is window 0.
            numbers, count = np.zeros_like(group), 0
        # With the largest offset, the last target of the epoch is the last token of the data.
        offset = _key(seed, epoch, "offset") % (n - epoch_windows * block_size)
        rows = _gather(tokens, views, offset + numbers * block_size, size)
        for step_rows in _to_tensor(rows, vocab):
            parts = step_rows.tensor_split(min(accum, len(step_rows)))
            yield [(part[:, :-1], part[:, 1:]) for part in parts], count
        start += len(group)


def every_window(plan: BatchPlan, *, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
    """Yield this rank's batches of one pass over plan.tokens, in order, for an evaluation.

    Over all ranks, each token but the first is a target exactly once. Each batch is (x, y) as in
    steps(), but the last batch of the pass can be one shorter window. B is at most plan.batch_size
    on each rank, not in total. Raises ValueError as steps() does, but short data is no error.

    Ranks can have different numbers of batches, and some can have none. So a collective for each
    batch can hang.
    """
    tokens, block_size, batch_size, _, vocab = plan
    _check(rank, world_size, block_size=block_size, batch_size=batch_size)
    targets = max(0, num_tokens(tokens) - 1)
    windows = targets // block_size
    # ceil gives the last rank the fewest whole windows, because it also takes the targets after
    # them.
    first, stop = (math.ceil(windows * r / world_size) * block_size for r in (rank, rank + 1))
    end = targets if rank == world_size - 1 else stop
    # Each batch lies between two edges. It is a set, because stop can be equal to first or end.
    edges = sorted({*range(first, stop, batch_size * block_size), stop, end})
    for begin, end in pairwise(edges):
        row = _to_tensor(np.concatenate(_slice(tokens, begin, end + 1)), vocab)
        width = min(block_size, end - begin)
        yield row[:-1].view(-1, width), row[1:].view(-1, width)


def _gather(tokens: Tokens, views: Tokens, positions: np.ndarray, size: int) -> np.ndarray:
    """For each position, return the `size` tokens that begin there.

    positions: any shape (...). Returns (..., size) uint64.
    """
    begins = np.array([*accumulate(map(len, tokens), initial=0)])
    rows = np.empty((*positions.shape, size), np.uint64)
    # For each row: which array has its first token, and which has its last.
    first, last = np.searchsorted(begins, [positions, positions + size - 1], "right") - 1
    place = positions - begins[first]
    for k in np.unique(first[first == last]):  # rows that lie in one array
        inside = (first == k) & (last == k)
        rows[inside] = views[k][place[inside]]
    for at in zip(*np.nonzero(first != last)):  # rows that lie in several arrays
        rows[at] = np.concatenate(
            _slice(tokens[first[at] : last[at] + 1], place[at], place[at] + size)
        )
    return rows


def _to_tensor(ids: np.ndarray, vocab: int | None) -> torch.Tensor:
    """Return an int64 tensor. Raises ValueError for an id not below `vocab`."""
    if vocab and ids.max() >= vocab:
        raise ValueError(f"the tokens have the id {ids.max()}; the vocabulary ends at {vocab - 1}")
    return torch.from_numpy(ids.astype(np.int64))


# ----------------------------------------------------------------------------------------- shuffle


def rank_indices(
    n: int, rank: int, world_size: int, epoch: int, seed: int, pad: bool = False
) -> np.ndarray:
    """Return this rank's part of a random permutation of range(n), (k,) int64.

    Use it for data other than Tokens, such as the rows of a torch Dataset. The array can be the
    sampler of a DataLoader that is made for each epoch; for one that is made once, see RankSampler.
    Raises ValueError if n < 1 or if rank is not one of world_size ranks.

    pad: without it, each index occurs exactly once over all ranks, and k differs by at most one
        between ranks. So ranks can have different numbers of batches: a plain loop over a
        DataLoader, with DistributedDataParallel, then hangs or aborts at the end of the epoch.
        group_batches of loop.py handles this. With pad=True, k is the same on all ranks, because
        the first indices of the permutation are repeated, as in torch's DistributedSampler. Do not
        pad an evaluation: its result would count these rows twice.

    After torch.manual_seed with the same seed, the workers of a DataLoader have the same random
    numbers (of torch, numpy and random) on all ranks, and so the same augmentations. Other numbers
    for each rank and epoch: DataLoader(..., generator=torch.Generator().manual_seed(epoch *
    world_size + rank)). This has no effect with num_workers=0.
    """
    _check(rank, world_size, n=n)
    stop = math.ceil(n / world_size) * world_size if pad else n
    return permute(np.arange(rank, stop, world_size) % n, n, _key(seed, epoch, "order"))


class RankSampler(Sampler[int]):
    """The rows of rank_indices, as the sampler of a DataLoader that is made once.

    Call set_epoch before each epoch. The workers of the DataLoader can stay alive between epochs
    (persistent_workers=True). In contrast to torch's DistributedSampler, it repeats no rows unless
    `pad` is true, and a global batch has the same rows on any number of ranks. (Elsewhere,
    DistributedSampler(data, world_size, rank) works too.)
    """

    def __init__(
        self, n: int, rank: int, world_size: int, seed: int = 0, pad: bool = False
    ) -> None:
        self.indices = partial(rank_indices, n, rank, world_size, seed=seed, pad=pad)
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Select the shuffle of an epoch."""
        self.order = self.indices(epoch=epoch)

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order.tolist())


def _check(rank: int = 0, world_size: int = 1, **sizes: int) -> None:
    """Raise ValueError if the rank is not one of the ranks, or if a size is below 1."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not one of {world_size} ranks, which count from 0")
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; must be at least 1")


def permute(index: np.ndarray, n: int, key: int) -> np.ndarray:
    """Return the elements at these indices of a pseudo-random permutation of range(n).

    Each index must be below n. The result has the same shape, int64. `key` selects the permutation.
    Time and memory do not depend on n.

    Method: a Feistel network of eight rounds on index = left * b + right is a bijection of
    range(a * b). It is repeated while the result is n or more ("cycle walking", Black and Rogaway,
    2002).
    """
    n = int(n)  # NumPy would mix its int64 and uint64 to float64.
    a = math.isqrt(n - 1) + 1
    b = (n - 1) // a + 1
    out = np.array(index, np.uint64)
    outside = np.ones_like(out, bool)
    while outside.any():
        left, right = divmod(out[outside], b)
        # Eight rounds. Each changes one half, and then exchanges the halves.
        for i in range(8):
            # The inner % keeps the sum within 64 bits.
            left, right = right, (left + _hash(right, key + i) % a) % a
            a, b = b, a
        out[outside] = left * b + right
        outside = out >= n
    return out.astype(np.int64)


def _hash(x: np.ndarray, key: int) -> np.ndarray:
    """Hash each of x with a key: the finaliser of SplitMix64 (Steele et al., 2014)."""
    z: np.ndarray = x + (key * 0x9E3779B97F4A7C15) % (1 << 64)
    z ^= z >> 30
    z *= 0xBF58476D1CE4E5B9
    z ^= z >> 27
    z *= 0x94D049BB133111EB
    z ^= z >> 31
    return z


def _key(seed: int, epoch: int, purpose: str) -> int:
    hashed = hashlib.blake2b(f"{seed} {epoch} {purpose}".encode(), digest_size=8)
    return int.from_bytes(hashed.digest(), "little")
