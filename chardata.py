"""Read text or token files, and compute the windows that each rank trains on at each step.

    corpus = read(list_files("data/*.txt"), "char")
    train, val = split(corpus.tokens, 0.1)
    plan = BatchPlan(train, block_size=256, batch_size=16, seed=0, vocab=corpus.vocab)
    verify_unchanged(corpus)  # for mapped files; call it again before each save and at the end
    for micro_batches, count in steps(plan, rank=rank, world_size=world_size, start=0):
        # count: number of targets in the global batch; but 0 on a rank that has no window. Such a
        # rank gets a substitute micro-batch and must run it too, with the weight 0.
        weight = 1 / count if count else 0
        for x, y in micro_batches:  # this rank's part of a global batch; both (B, 256) int64
            (weight * loss_sum(model, x, y)).backward()
        ...  # sum the gradients over all ranks and update
        # DistributedDataParallel averages the gradients: there, use world_size * weight. With
        # accum > 1, use its no_sync() for all micro-batches of a step but the last.

The words of this file:

- A *token* is an unsigned integer, also called id. `Tokens` is a sequence of one-dimensional
  arrays of tokens, one array per data file. All functions treat the arrays as one long array of n
  tokens. A window can begin in one file and end in the next. Nothing is inserted between two files.
- A *window* is `block_size` inputs (one row of x) and as many targets (the same row of y). The
  target of an input is the token after it, so a window takes `block_size + 1` consecutive tokens.
- A *global batch* is the windows that all ranks together use in one optimizer step: `batch_size`
  windows, or fewer in the last step of an epoch.
- An *epoch* is one pass over the windows, each exactly once. The order and the positions of the
  windows are new in each epoch. Steps are counted from 0, and the count goes on from one epoch to
  the next.

This file needs only numpy and torch. It uses no process group: rank and world size are arguments,
and nothing is communicated. The global batch of a step is a pure function of the plan and the step
number. To resume a run, only the plan and the number of the next step are needed.
"""

import codecs
import glob
import hashlib
import math
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from pydoc_data.topics import topics  # the help texts of Python
from typing import NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

Tokens = Sequence[np.ndarray]  # each (n_i,), of any unsigned integer type
Stamp = tuple[str, int, int]  # name, size in bytes, last change in nanoseconds since 1970
Batch = tuple[torch.Tensor, torch.Tensor]  # inputs x and targets y, both (B, T) int64
MIB = 1 << 20


class Corpus(NamedTuple):
    """The data as tokens, with everything that is needed to turn token ids into text."""

    tokens: tuple[np.ndarray, ...]  # one array per file that is not empty
    vocab: int  # vocabulary size. If it was given to read() for token files, ids can be above it
    kind: str  # "char", "byte" or "ids" (ids from a token file, whose text is not known)
    chars: str  # kind "char": id i is the character chars[i]. Other kinds: ""
    digest: str  # digest(tokens, chars)
    stamps: tuple[Stamp, ...]  # of each file, for verify_unchanged(); kind "char": none


class BatchPlan(NamedTuple):
    """Which windows of which tokens make up each global batch.

    All ranks must have equal plans. A run that resumes must have the plan with which it began,
    because a step number means other windows under another plan.
    """

    tokens: Tokens
    block_size: int  # inputs per window; the T of the shapes (B, T)
    batch_size: int  # windows per global batch, that is over all ranks and micro-batches
    seed: int = 0  # selects the order of the windows
    vocab: int | None = None  # if given, steps and every_window check that ids are below it


# ------------------------------------------------------------------------------------------- files


def list_files(data: str) -> list[str]:
    """Return the names of the files that match a path or a glob pattern, sorted.

    The pattern can contain "**" for folders at any depth, for example "data/**/*.txt". If a file
    with exactly the name `data` exists, `data` is not a pattern. Raises FileNotFoundError if there
    is no such file. Raises OSError if one of the names is not a regular file but, for example,
    a folder or a pipe.
    """
    names = [data] if os.path.exists(data) else sorted(glob.glob(data, recursive=True))
    if not names:
        raise FileNotFoundError(f"{data}: no such file, and no file matches this pattern")
    for name in names:
        if not os.path.isfile(name):
            raise OSError(f"{name}: is not a regular file; for a folder, give '{name}/*.txt'")
    return names


def read(files: Sequence[str], kind: str, chars: str = "", vocab: int | None = None) -> Corpus:
    """Read local files as tokens. With an empty list of files, read default_text().

    Text files: with kind "char", each character becomes one id, and the ids are held in memory. The
    vocabulary is `chars` if given (for example that of a saved model), else the characters that
    occur, in code point order. With kind "byte", each byte is one id, and a file above 1 MiB is
    memory-mapped.

    Token files: .npy (one-dimensional, unsigned integers) and .bin (uint16, with or without the
    header of llm.c) contain ids. The result has kind "ids" whatever `kind` is. All .npy, and .bin
    above 1 MiB, are memory-mapped. A .bin of another type, without a header, cannot be recognised
    and is misread: write .npy instead. The vocabulary size is `vocab` if given. Else the whole
    files are read once to find the highest id, and the size is this id + 1, rounded up to a
    multiple of 64, because matrix products of such sizes are faster.

    A file without tokens is left out. Raises ValueError or OSError with the name of a file if all
    files are empty, if text and token files are mixed, if a text has another vocabulary size than
    `vocab`, if a file is damaged, or if with kind "char" it is not UTF-8 text or has a character
    that is not in `chars`. Raises ValueError if the files are text and `kind` is neither "char" nor
    "byte".
    """
    stamps = tuple(map(_stamp, files))  # before reading, so that a change meanwhile is noticed
    names = files or ["the default text"]
    arrays = [_read_file(name) for name in files] or [np.frombuffer(default_text().encode(), "u1")]
    tokens: Tokens = tuple(filter(len, arrays))
    if not tokens:
        raise ValueError(f"{names[0]}: is empty (number of data files: {len(names)})")
    token_files = [name for name in names if name.endswith((".bin", ".npy"))]
    if 0 < len(token_files) < len(names):
        raise ValueError(f"{names[0]}: text files and token files (.bin, .npy) cannot be mixed")
    if token_files:
        kind, chars = "ids", ""
        size = vocab or 64 * (max(int(array.max()) for array in tokens) // 64 + 1)
    elif kind == "byte":
        chars, size = "", 256
    elif kind == "char":
        tokens, chars = _read_characters(names, arrays, chars)
        size, stamps = len(chars), ()
    else:
        raise ValueError(f"kind {kind!r} is not char or byte")
    if vocab not in (None, size):
        raise ValueError(f"{names[0]}: is text with a vocabulary of {size}, not {vocab}")
    corpus = Corpus(tuple(tokens), size, kind, chars, digest(tokens, chars), stamps)
    for array in tokens:
        # From here on, windows are read from random places, so reading ahead would be wasted.
        if isinstance(array.base, mmap.mmap) and hasattr(mmap, "MADV_RANDOM"):  # not on Windows
            array.base.madvise(mmap.MADV_RANDOM)
    return corpus


def _read_characters(names: Sequence[str], raw: Tokens, chars: str) -> tuple[Tokens, str]:
    """Return the ids of texts, and the characters that they stand for."""
    texts, tokens = [], []
    try:
        for name, array in zip(names, raw):
            texts.append(array.tobytes().decode())
        chars = chars or characters(texts)
        for name, text in zip(names, texts):
            if text:
                tokens.append(encode(text, "char", chars))
    except ValueError as error:  # `name` is the file at which one of the loops stopped
        raise ValueError(f"{name}: {error} (kind 'byte' can read any file)") from None
    return tokens, chars


def _read_file(name: str) -> np.ndarray:
    """Read or map a file: (n,) of its own type for .npy, uint16 for .bin, otherwise uint8."""
    size, dtype, start = os.path.getsize(name), "u1", 0
    if name.endswith(".npy"):
        try:
            array: np.memmap = np.load(name, "r")
            if array.ndim != 1 or array.dtype.kind != "u" or size != array.offset + array.nbytes:
                raise ValueError(f"{array.shape} {array.dtype} in {size} bytes")
        except Exception as error:  # a damaged file can make numpy raise almost any exception
            raise ValueError(
                f"{name}: not one complete 1-d .npy of unsigned integers: {error}"
            ) from None
        return array
    if name.endswith(".bin"):
        dtype = "u2"
        # np.resize gives three numbers, even if the file has fewer than 12 bytes.
        magic, version, count = np.resize(np.fromfile(name, "i4", 3), 3).tolist()
        # llm.c's header is 256 int32: a magic number, the version, the number of tokens, then
        # zeros. GPT-2 has version 1. Llama 3 has version 7, with uint32 tokens, and is refused
        # below. A GPT-2 file without a header cannot begin with a magic number: its first uint16
        # would be 55432 or 55713, which are not ids of GPT-2. (With a larger vocabulary, it is
        # unlikely.)
        if magic in (20240520, 20240801):
            start = 1024
        else:  # No header: only an odd number of bytes is an error.
            version, count = 1, size // 2
        if version != 1 or size != start + 2 * count:
            raise ValueError(
                f"{name}: {size} bytes, header version {version}; must be "
                f"{start + 2 * count} bytes for {count} uint16 tokens, header version 1"
            )
    if size > MIB:
        return np.memmap(name, dtype, "r", start)
    # A mapped file stays open, and a process can open only about a thousand.
    return np.fromfile(name, dtype, offset=start)


def _stamp(name: str) -> Stamp:
    status = os.stat(name)
    return name, status.st_size, status.st_mtime_ns


def verify_unchanged(corpus: Corpus) -> None:
    """Raise OSError with the name of a file that changed or is gone since read().

    Files of kind "char" are not checked, because read() has copied them into memory. All others are
    checked, also small ones that it has copied.

    If a mapped file changes, training reads other tokens. Then all that was trained since the last
    call is in doubt. Call this at the start, before each save and at the end. A call takes about a
    microsecond per file. Nothing is communicated: if only some ranks see the change, only these
    raise the error, and the caller must end the others.

    This function cannot help if a file becomes shorter while it is in use: the operating system
    then kills a process that reads beyond the new end (SIGBUS).
    """
    for stamp in corpus.stamps:
        if _stamp(stamp[0]) != stamp:
            raise OSError(f"{stamp[0]}: was changed after training began to read it")


def default_text() -> str:
    """Return the help texts of Python, about 465 KB of English. They depend on Python's version."""
    return "\n".join(topics.values())


def digest(tokens: Tokens, chars: str = "") -> str:
    """Return a hash of the data, as 32 hex digits. A run that resumes can compare it with its own.

    The hash depends on `chars`, on the type and the length of each array, and on the content. (So
    the same tokens, divided into other files, have another hash.) To save time, only 16 blocks of
    an array are read, evenly spaced from its first byte to its last; a change between these blocks
    is not noticed. An array that is shorter than 16 blocks is read whole. A block is 1 MiB if all
    arrays together have at most 256 MiB; otherwise 16 MiB divided by the number of arrays, but at
    least 4 KiB and at most 1 MiB. So the blocks of up to 4,096 arrays have at most 256 MiB
    together.
    """
    block = MIB
    if sum(array.nbytes for array in tokens) > 256 * MIB:
        block = min(MIB, max(4096, 16 * MIB // len(tokens)))
    hashed = hashlib.blake2b(chars.encode(), digest_size=16)
    for array in tokens:
        hashed.update(f"{array.dtype} {len(array)}\n".encode())
        raw = array.view(np.uint8)
        pieces = [raw]
        if raw.size > 16 * block:
            starts = np.linspace(0, raw.size - block, 16).astype(np.int64)
            pieces = [raw[i : i + block] for i in starts]
        for piece in pieces:
            hashed.update(piece.data)
    return hashed.hexdigest()


# -------------------------------------------------------------------------------------- vocabulary


def characters(texts: Sequence[str]) -> str:
    """Return the characters that occur in `texts`, in code point order, each one once."""
    seen = np.zeros(0x110000, bool)
    for text in texts:
        for codes in _code_points(text):
            seen[codes] = True
    return "".join(map(chr, np.flatnonzero(seen)))


def _code_points(text: str) -> Iterator[np.ndarray]:
    # + 1: an empty text must give one (empty) array, because encode() concatenates them, and
    # np.concatenate needs at least one.
    for start in range(0, len(text) + 1, MIB):
        yield np.frombuffer(text[start : start + MIB].encode("utf-32-le"), np.uint32)


def encode(text: str, kind: str, chars: str) -> np.ndarray:
    """Return the token ids of a text, an array (n,).

    Kind "byte": the UTF-8 bytes, as uint8. Kind "char": the index of each character in `chars`, in
    the smallest unsigned type that fits. Kind "ids": the text is whole numbers with spaces between
    them, and these are the ids, as uint32. ValueError names a character that is not in `chars`, or
    a number that is not an id.
    """
    if kind == "byte":
        return np.frombuffer(text.encode(), np.uint8)
    if kind == "ids":
        numbers = list(map(int, text.split()))
        if wrong := [number for number in numbers if not 0 <= number < 2**32]:
            raise ValueError(f"{wrong[0]} is not a token id; ids are from 0 to {2**32 - 1}")
        return np.array(numbers, np.uint32)
    if unknown := set(characters([text])) - set(chars):
        at = min(map(text.index, unknown))
        raise ValueError(f"character {text[at]!r} at {at} is not among the {len(chars)} in chars")
    # There are 0x110000 Unicode code points. max: `chars` can be empty if the text is empty too.
    table = np.zeros(0x110000, np.min_scalar_type(max(0, len(chars) - 1)))
    table[list(map(ord, chars))] = range(len(chars))
    return np.concatenate([table[codes] for codes in _code_points(text)])


def decode(ids: Iterable[int], kind: str, chars: str) -> Iterator[str]:
    """Yield the text of token ids, each character when it is complete.

    One id of kind "byte" can be only a part of a character. The text of kind "ids" is the numbers,
    each with a space after it.
    """
    if kind == "byte":
        return codecs.iterdecode((bytes([i]) for i in ids), "utf-8", "replace")
    return (chars[i] if kind == "char" else f"{i} " for i in ids)


# ----------------------------------------------------------------------------------------- windows


def num_tokens(tokens: Tokens) -> int:
    """Return the number of tokens in all arrays together."""
    return sum(map(len, tokens))


def split(tokens: Tokens, val_fraction: float, max_val: int = 0) -> tuple[Tokens, Tokens]:
    """Return (training tokens, validation tokens), without a copy.

    Of n tokens, the last round(n * val_fraction) are for validation, and the others for training. A
    part without tokens is an empty tuple. max_val: return only the first max_val + 1 validation
    tokens, so that an evaluation predicts max_val of them; 0 means all.
    """
    n = num_tokens(tokens)
    cut = n - round(n * val_fraction)
    stop = min(n, cut + max_val + 1) if max_val else n
    return _slice(tokens, 0, cut), _slice(tokens, cut, stop)


def _slice(tokens: Tokens, start: int, stop: int) -> tuple[np.ndarray, ...]:
    """Return the tokens from position start to stop - 1, as views of the arrays that hold them."""
    begins = accumulate(map(len, tokens), initial=0)
    parts = [a[max(0, start - b) : max(0, stop - b)] for a, b in zip(tokens, begins)]
    return tuple(filter(len, parts))


def num_windows(n: int, block_size: int) -> int:
    """Return the number of windows in an epoch over n tokens: n // block_size - 1, but at least 1.

    The inputs of the windows lie end to end. If n >= 2 * block_size, one window is left out (the
    - 1). So there are at least block_size positions at which the first window can begin: see steps.
    Raises ValueError if n <= block_size.
    """
    if n <= block_size:
        raise ValueError(f"{n} tokens are too few for a window of {block_size} and its last target")
    return max(1, n // block_size - 1)


def steps_per_epoch(plan: BatchPlan) -> int:
    """Return the number of steps in an epoch. The last one can have fewer windows than the others.

    Raises ValueError as num_windows does.
    """
    return math.ceil(num_windows(num_tokens(plan.tokens), plan.block_size) / plan.batch_size)


def tokens_before(plan: BatchPlan, step: int) -> int:
    """Return how many targets all ranks together train on in the steps before `step`."""
    epochs, steps_in_epoch = divmod(step, steps_per_epoch(plan))
    windows = epochs * num_windows(num_tokens(plan.tokens), plan.block_size)
    return (windows + steps_in_epoch * plan.batch_size) * plan.block_size


def steps(
    plan: BatchPlan, *, rank: int = 0, world_size: int = 1, accum: int = 1, start: int = 0
) -> Iterator[tuple[list[Batch], int]]:
    """Yield (micro-batches of this rank, count) for step `start` and all later steps, without end.

    Each micro-batch is (x, y), both (B, T) int64 on the CPU, with T = plan.block_size. x and y
    overlap in memory: do not write into one of them, because the other would change too. They are
    not contiguous: flatten them with x.reshape(-1), because x.view(-1) fails if B > 1. `count` is
    the number of targets in the whole global batch, over all ranks: divide the sum of the losses by
    it. On a rank without a window it is 0 (see below).

    The ranks divide the windows of a global batch in order, as evenly as possible. A rank divides
    its windows into min(accum, number of its windows) micro-batches, as evenly as possible. So two
    ranks can have different numbers of micro-batches: synchronise gradients once per step, not once
    per micro-batch. Which windows are in the global batch of a step does not depend on `rank`,
    `world_size`, `accum` or `start`, so a run can resume with other values of these.

    If a global batch has fewer windows than there are ranks, some ranks have none. Such a rank gets
    one micro-batch with window i = 0 (see below), and the count 0. The rank must run forward and
    backward on this micro-batch too, because the other ranks wait for it in collective operations,
    and must multiply the loss by 0.

    The windows of one epoch, for n tokens and W = num_windows(n, T):

    - Window i (0 <= i < W) has the tokens at positions offset + i * T to offset + (i + 1) * T, both
      included: T + 1 tokens, of which neighbouring windows share one. The *offset* is a hash of
      (seed, epoch), modulo n - W * T. So the windows of each epoch begin at other positions, and a
      token is not always at the same position in its window.
    - The k-th window of the epoch (0 <= k < W) is window permute(k, W, key), where `key` is another
      hash of (seed, epoch). Step s of the epoch starts with k = s * batch_size.
    - Exactly n - 1 - W * T tokens are in no window of the epoch: those before position `offset`,
      and those after position offset + W * T. These are at most 2 * T - 2 tokens, and other ones in
      each epoch. The token at position offset is only an input, and the token at offset + W * T is
      only a target. Each token between these two is an input once and a target once.

    Raises ValueError, at next() and not at the call, if n <= T, or if a window of this rank has an
    id that is not below plan.vocab; other ranks do not notice that. The windows of several steps
    are read at once, so such an id can be found some steps before the step that would use it.
    """
    tokens, block_size, batch_size, seed, vocab = plan
    n = num_tokens(tokens)
    epoch_windows = num_windows(n, block_size)
    size = block_size + 1
    # A view has a row for each position where a window can begin. An array with fewer than `size`
    # tokens has no view, and its entry here is not used: _gather reads its tokens from `tokens`.
    views = [sliding_window_view(a, size) if a.size >= size else a for a in tokens]
    # Each call of numpy has a fixed cost. So this rank's windows of `ahead` steps are read at once,
    # about 2**18 tokens.
    ahead = max(1, 2**18 // (block_size * max(1, batch_size // world_size)))
    while True:
        epoch, first_step = divmod(start, steps_per_epoch(plan))
        # `group`, (G, 1): the steps that are read at once, counted from the start of the epoch. All
        # have batch_size windows. If no such step is left, it is only the last, smaller step.
        whole_steps_left = epoch_windows // batch_size - first_step
        group = first_step + np.arange(max(1, min(ahead, whole_steps_left)))[:, None]
        windows = min(batch_size, epoch_windows - first_step * batch_size)
        mine = np.arange(windows * rank // world_size, windows * (rank + 1) // world_size)
        order = permute(group * batch_size + mine, epoch_windows, _key(seed, epoch, "order"))
        if not mine.size:  # this rank has no window: read window i = 0, with the count 0
            order, windows = np.zeros_like(group), 0
        offset = _key(seed, epoch, "offset") % (n - epoch_windows * block_size)
        positions = offset + order * block_size
        rows = _to_tensor(_gather(tokens, views, positions, size), vocab)
        share = positions.shape[1]
        parts = min(accum, share)
        cuts = [share * i // parts for i in range(1, parts)]
        for step_rows in rows:
            batches = [(micro[:, :-1], micro[:, 1:]) for micro in step_rows.tensor_split(cuts)]
            yield batches, windows * block_size
        start += len(group)


def every_window(plan: BatchPlan, *, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
    """Yield this rank's batches of one pass over plan.tokens, in order, for an evaluation.

    Over all ranks, each token but the first is a target exactly once. No offset and no random order
    is used, so plan.seed has no effect.

    Each batch is (x, y), both (B, T) int64 on the CPU, where T = plan.block_size and B is at most
    plan.batch_size. (Here this is the limit for a batch of one rank, not for a global batch.) x and
    y overlap in memory, as in steps. So that the ranks have about the same work, the W = (n - 1) //
    T whole windows are divided into batches of equal size; only the last of these can be smaller. A
    rank has at most ceil(W / (plan.batch_size * world_size)) of them. If targets remain, one more
    batch follows: one window that is shorter than T. The ranks take the batches in turn. The
    numbers of batches of two ranks differ by at most one, and a rank can have none. So a collective
    for each batch can hang, unless ranks that have no batch left take part in it too.

    Fewer than two tokens give no batch. An id that is not below plan.vocab is a ValueError.
    """
    tokens, block_size, batch_size, _, vocab = plan
    targets = max(0, num_tokens(tokens) - 1)
    windows = targets // block_size
    whole = windows * block_size  # targets in whole windows
    # Batch k has the targets at positions edges[k] + 1 to edges[k + 1]. max, because there may be
    # no whole window.
    max_batches = max(1, math.ceil(windows / (batch_size * world_size)) * world_size)
    targets_per_batch = max(1, math.ceil(windows / max_batches) * block_size)
    edges = sorted({*range(0, whole, targets_per_batch), whole, targets})
    for begin, end in [*pairwise(edges)][rank::world_size]:
        row = _to_tensor(np.concatenate(_slice(tokens, begin, end + 1)), vocab)
        width = min(block_size, end - begin)
        yield row[:-1].view(-1, width), row[1:].view(-1, width)


def _gather(tokens: Tokens, views: Tokens, positions: np.ndarray, size: int) -> np.ndarray:
    """Copy the `size` tokens from each of the positions (...) on. Returns (..., size) uint64.

    `views` has sliding_window_view(array, size) in place of each array with at least `size` tokens.
    """
    begins = np.array([*accumulate(map(len, tokens), initial=0)])
    rows = np.empty((*positions.shape, size), np.uint64)
    # The numbers of the arrays that hold the first and the last token of each row
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
    """Return ids as an int64 tensor. Raises ValueError if one of them is not below `vocab`."""
    if vocab and ids.max() >= vocab:
        raise ValueError(f"the tokens have the id {ids.max()}; the vocabulary ends at {vocab - 1}")
    return torch.from_numpy(ids.astype(np.int64))


# ----------------------------------------------------------------------------------------- shuffle


def rank_indices(n: int, rank: int, world_size: int, epoch: int, seed: int) -> np.ndarray:
    """Return this rank's part of range(n) in random order, (k,) int64, for any kind of data set.

    n must be at least 1. Over all ranks, each index occurs exactly once, and k differs by at most
    one between ranks. The array can be the sampler of a torch DataLoader. For each epoch, call this
    with the new epoch number and make a new DataLoader.
    """
    return permute(np.arange(rank, n, world_size), n, _key(seed, epoch, "order"))


def permute(index: np.ndarray, n: int, key: int) -> np.ndarray:
    """Return the image of each index under a pseudo-random permutation of range(n).

    Each index must be below n, and n >= 1. The result has the same shape, int64. `key` (an int >=
    0) selects the permutation. The permutation is never stored, because each image is computed from
    its index alone. So time and memory depend on the number of indices and not on n.

    Method (a Feistel network): write the index as left * b + right, with left < a and right < b,
    where a * b >= n. Then change the two digits alternately, eight times in total: left becomes
    (left + hash of right) modulo a, then right becomes (right + hash of left) modulo b, and so on.
    Each change can be undone, because the other digit is still known. So all eight together are a
    bijection of range(a * b). If the result is n or more, apply them to the result again, until it
    is below n. This makes a bijection of range(n) ("cycle walking": Black and Rogaway, "Ciphers
    with Arbitrary Finite Domains", 2002). Few results need it, because a * b is only a little
    larger than n.
    """
    a = math.isqrt(n - 1) + 1
    b = (n - 1) // a + 1
    out = np.array(index, np.uint64)
    outside = np.ones_like(out, bool)
    while outside.any():
        left, right = divmod(out[outside], b)
        # Change the left digit, then swap the digits, so that the next round changes the other one.
        for i in range(8):
            # The inner % keeps the sum within 64 bits.
            left, right = right, (left + _hash(right, key + i) % a) % a
            a, b = b, a
        out[outside] = left * b + right
        outside = out >= n
    return out.astype(np.int64)


def _hash(x: np.ndarray, key: int) -> np.ndarray:
    """Hash each of x with a key to 64 bits: the finaliser of SplitMix64 (Steele et al., 2014)."""
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
