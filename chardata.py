"""Text or token files -> tokens -> the windows that one rank trains on at one step.

Needs numpy and torch, and knows nothing of torch.distributed: who is asking is an argument.

    corpus = read("shakespeare.txt", "char")
    train, val = split(corpus.shards, 0.1)
    for micro_batches, total in steps(train, 256, 16, rank=rank, world_size=world_size, start=step):
        ...                                  # micro_batches: [(x (B, T), y (B, T)), ...] int64

Tokens are a tuple of 1-D arrays, the shards, read as if they were one array end to end; files of bytes
and of tokens are memory-mapped and never read as a whole. Which windows a step sees is a pure function of
(seed, step), and which of those are mine of (rank, world_size) too: nothing to store, nothing to send.
"""

import fcntl
import glob
import hashlib
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

T = TypeVar("T")
Shards = Sequence[np.ndarray]  # each (n_i,), unsigned integers
Batch = tuple[torch.Tensor, torch.Tensor]  # x (B, T) int64 and y (B, T) int64, y one token later than x
LOOKED_THROUGH = 1 << 30  # bytes of token files that are read to find the highest id: what a start can wait for
LLM_C = (20240520, 1)  # magic and version of llm.c's .bin header; as uint16 it begins with 55432, no GPT-2 id


class Corpus(NamedTuple):
    """Tokens and what it takes to read them."""

    shards: tuple[np.ndarray, ...]  # memory-mapped where the file allows
    vocab: int  # every id is to be below this; of token files that is checked as they are read, see steps()
    kind: str  # "char", "byte", "text" or "ids", or what a tokenizer of the caller's made of "text"
    chars: str  # kind "char": id i stands for chars[i]; of a tokenizer what it is; otherwise ""
    digest: str  # of the length and the content, see digest()
    stamps: tuple[tuple[str, int, int], ...]  # of each mapped file: name, bytes, last change (ns since 1970)


# ------------------------------------------------------------------------------------------------ reading


def read(data: str | None, kind: str, chars: str = "", vocab: int | None = None) -> Corpus:
    """Map `data` (a path, a glob, an fsspec URL; None: a text that every Python carries) as tokens.

    kind "char" has one id for each character, of `chars` if given, else of those that occur, in code point
    order; kind "byte" is the files as they are, and so is "text", to be encoded by the caller. `.bin` (uint16, with
    llm.c's header or without) and `.npy` files hold ids already and are taken so under any kind. Their `vocab` is what
    is given: then nothing is read but what the digest takes, however large they are. Without it all is looked through
    for the highest id, up to 1 GiB.

    A file without tokens adds none; all of them without is an error. Raises ValueError or OSError with the file's
    name if they are not what they should be.
    """
    names = [] if data is None else local_files(data)
    stamps = tuple(_stamp(name) for name in names)
    loaded = [_map(name) for name in names]
    if data is None:
        names, loaded = ["the default text"], [np.frombuffer(default_text().encode(), np.uint8)]
    if not any(map(len, loaded)):
        raise ValueError(f"{data if len(names) > 1 else names[0]}: is empty")
    names, loaded = zip(*((name, shard) for name, shard in zip(names, loaded) if len(shard)))
    if any(map(_holds_ids, names)):
        if not all(map(_holds_ids, names)):
            raise ValueError(f"{data}: token files (.bin, .npy) and text in one data set; use one of them")
        vocab, told = vocab or _vocabulary(f"{data}", loaded), digest(loaded)
        return Corpus(_at_random(loaded), vocab, "ids", "", told, stamps)
    if vocab and kind != "text":
        raise ValueError(
            f"{data or names[0]}: is text, and a vocab, here {vocab}, is for token files (.bin, .npy) alone"
        )
    if kind in ("byte", "text"):
        told = digest(loaded)
        return Corpus(_at_random(loaded) if kind == "byte" else tuple(loaded), 256, kind, "", told, stamps)
    texts = [_decode(name, raw) for name, raw in zip(names, loaded)]
    chars = chars or characters(texts)
    shards = []
    for name, text in zip(names, texts):
        try:
            shards.append(encode(text, "char", chars))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return Corpus(tuple(shards), len(chars), "char", chars, digest(shards, chars), ())


def _at_random(shards: Shards) -> tuple[np.ndarray, ...]:
    """The same; windows are drawn from anywhere, so that what lies behind one is not worth reading with it."""
    for shard in shards:
        if isinstance(shard.base, mmap.mmap) and hasattr(mmap, "MADV_RANDOM"):
            shard.base.madvise(mmap.MADV_RANDOM)
    return tuple(shards)


def _holds_ids(name: str) -> bool:
    return name.endswith((".bin", ".npy"))


def _vocabulary(data: str, shards: Shards) -> int:
    """How many ids there are, by the highest; a multiple of 64, as a round number of rows multiplies faster."""
    size = sum(shard.nbytes for shard in shards)
    if size > LOOKED_THROUGH:
        raise ValueError(
            f"{data}: {size / 2**30:.1f} GiB of tokens are not looked through for the highest id; "
            "their vocab has to be given, a number above every id: 50304 for GPT-2's"
        )
    top = max(int(chunk.max()) for shard in shards for chunk in _chunks(shard))
    return -(-(top + 1) // 64) * 64


def default_text() -> str:
    """About 465 KB of English that comes with Python: its own help pages, else its library's source."""
    try:
        from pydoc_data.topics import topics

        return "\n".join(topics.values())
    except ImportError:
        sources = sorted(glob.glob(os.path.join(os.path.dirname(os.__file__), "*.py")))[:40]
        return "\n".join(open(source, encoding="utf-8").read() for source in sources)


def local_files(data: str) -> list[str]:
    """The files that `data` names, sorted; those of a URL as copies in the user's cache."""
    if "://" in data:
        try:
            names = _fetched(data)
        except (FileNotFoundError, IsADirectoryError, ImportError, ValueError):
            raise
        except Exception as error:  # each file system's package has its own
            raise OSError(f"{data}: {error}") from error
    else:
        names = [data] if os.path.exists(data) else sorted(glob.glob(data, recursive=True))
    if not names:
        raise FileNotFoundError(f"{data}: no such file, and no file matches it")
    for name in names:
        if os.path.isdir(name):
            raise IsADirectoryError(f"{name}: is a folder; name its files, for example '{name}/*.txt'")
    return names


def _fetched(url: str) -> list[str]:
    """Copies of the files that `url` names, made once for each version of each."""
    from fsspec.core import url_to_fs  # comes with torch; only needed, and only imported, for a URL

    fs, path = url_to_fs(url)
    cache = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "ddpkit")
    copies = []
    for name in [path] if fs.exists(path) else sorted(fs.glob(path)):
        if fs.isdir(name):
            raise IsADirectoryError(f"{url}: is a folder; name its files, for example '{url}/*.txt'")
        version = hashlib.sha256(f"{fs.unstrip_protocol(name)} {fs.ukey(name)}".encode()).hexdigest()[:32]
        copies.append(_copy(fs, name, os.path.join(cache, version)))
    return copies


def _copy(fs: Any, name: str, folder: str) -> str:
    """The copy of a remote file in `folder`, whole or not there. Who asks first makes it, and the others wait."""
    copy = os.path.join(folder, os.path.basename(name))
    part = f"{copy}.part"
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, ".lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # goes with its process: one that died is waited for by nobody
        except OSError as error:
            hint = f"{error.strerror}; XDG_CACHE_HOME can name a disk that has file locks"
            raise OSError(error.errno, hint, folder) from error
        if not os.path.exists(copy):
            fs.get_file(name, part)  # over what one that died has left
            there, size = os.path.getsize(part), fs.size(name)
            if size not in (there, None):
                raise OSError(f"{fs.unstrip_protocol(name)}: only {there} of {size} bytes came")
            with open(part, "rb") as file:
                os.fsync(file.fileno())
            os.replace(part, copy)
    return copy


def _map(name: str) -> np.ndarray:
    """One file, memory-mapped: (n,) of its own unsigned integers for .npy, uint16 for .bin, else uint8."""
    size = os.path.getsize(name)
    if name.endswith(".npy"):
        try:
            array = np.lib.format.open_memmap(name, mode="r")
        except Exception as error:  # whatever a file can make numpy raise
            raise ValueError(f"{name}: not a .npy file of numbers: {error}") from None
        if array.ndim != 1 or array.dtype.kind != "u":
            raise ValueError(f"{name}: shape {array.shape} of {array.dtype}; needs (n,) of unsigned integers")
        if size != array.offset + array.nbytes:
            raise ValueError(f"{name}: {size} bytes; its header tells of {array.offset + array.nbytes}")
        return array
    offset = _header(name, size) if name.endswith(".bin") else 0
    if name.endswith(".bin") and size % 2:
        raise ValueError(f"{name}: {size} bytes; a .bin of uint16 tokens has an even number")
    dtype = np.uint16 if name.endswith(".bin") else np.uint8
    return np.memmap(name, dtype, mode="r", offset=offset) if size > offset else np.empty(0, dtype)


def _header(name: str, size: int) -> int:
    """How many bytes of a .bin come before its tokens: llm.c begins one with 256 int32, the third how many follow."""
    head = np.fromfile(name, np.int32, 3)
    if len(head) < 3 or head[0] != LLM_C[0]:
        return 0
    if head[1] != LLM_C[1]:
        raise ValueError(f"{name}: has llm.c's header of version {head[1]}; needs version {LLM_C[1]}, of uint16 tokens")
    if size != 1024 + 2 * int(head[2]):
        raise ValueError(f"{name}: {size} bytes; its header tells of {1024 + 2 * int(head[2])}")
    return 1024


def _stamp(name: str) -> tuple[str, int, int]:
    status = os.stat(name)
    return name, status.st_size, status.st_mtime_ns


def unchanged(batches: Iterable[T], corpus: Corpus) -> Iterator[T]:
    """The same batches. OSError names a mapped file that was written to, cut, replaced or deleted meanwhile.

    What a map shows then is anybody's guess, and reading past the new end of a file that was cut kills the process
    (SIGBUS): so each file is looked at, for a microsecond, just before a batch is read. A file that is cut while it
    is being read, and not before, still has that effect; reads through the kernel would not, at a tenth of the rate.
    """
    _look_at(corpus.stamps)
    for batch in batches:
        yield batch
        _look_at(corpus.stamps)


def _look_at(stamps: Iterable[tuple[str, int, int]]) -> None:
    for stamp in stamps:
        try:
            same = _stamp(stamp[0]) == stamp
        except FileNotFoundError:
            same = False
        if not same:
            raise OSError(f"{stamp[0]}: changed, or is gone, while it was being trained on")


def _chunks(shard: np.ndarray, size: int = 1 << 22) -> Iterator[np.ndarray]:
    return (shard[i : i + size] for i in range(0, len(shard), size))


def _decode(name: str, raw: np.ndarray) -> str:
    try:
        return raw.tobytes().decode("utf-8")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise UnicodeError(
            f"{name}: not UTF-8 text (byte 0x{byte:02x} at {error.start}); read it as bytes instead"
        ) from None


def digest(shards: Shards, chars: str = "") -> str:
    """A fingerprint of the vocabulary and the tokens: all lengths, and the content up to 16 MiB a shard.

    Of a larger shard 16 MiB are read, in 16 stretches spread evenly from its first byte to its last, so
    that mapping a terabyte stays instant; of many that are more than 256 MiB together, less of each.
    """
    block, count = 1 << 20, 16
    if sum(shard.nbytes for shard in shards) > 1 << 28:
        block = min(block, max(1 << 12, (1 << 24) // len(shards)))
    hashed = hashlib.blake2b(chars.encode(), digest_size=16)
    for shard in shards:
        raw = shard.view(np.uint8)
        hashed.update(f"{shard.dtype} {len(shard)}\n".encode())
        if len(raw) <= block * count:
            hashed.update(raw.data)
        else:
            for start in np.linspace(0, len(raw) - block, count).astype(np.int64):
                hashed.update(raw[start : start + block].data)
    return hashed.hexdigest()


# --------------------------------------------------------------------------------------------- vocabulary


def characters(texts: Sequence[str]) -> str:
    """The characters that occur in `texts`, in code point order."""
    seen = np.zeros(0x110000, bool)
    for text in texts:
        for codes in _code_points(text):
            seen[codes] = True
    return "".join(map(chr, np.flatnonzero(seen)))


def _code_points(text: str, size: int = 1 << 22) -> Iterator[np.ndarray]:
    for i in range(0, len(text), size):
        yield np.frombuffer(text[i : i + size].encode("utf-32-le"), np.uint32)


def encode(text: str, kind: str, chars: str) -> np.ndarray:
    """text -> (n,) ids in the smallest unsigned type; of kind "ids" the text is numbers.

    ValueError names a character that is not in `chars`, or what is not a number.
    """
    if kind == "byte":
        return np.frombuffer(text.encode(), np.uint8)
    if kind == "ids":
        numbers = [int(number) for number in text.split()]
        if wrong := [number for number in numbers if not 0 <= number < 1 << 32]:
            raise ValueError(f"{wrong[0]} is not an id; ids are whole numbers from 0 to {(1 << 32) - 1}")
        return np.array(numbers, np.uint32)
    known, table = np.zeros(0x110000, bool), np.zeros(0x110000, np.min_scalar_type(max(0, len(chars) - 1)))
    points = [ord(c) for c in chars]
    known[points], table[points] = True, np.arange(len(chars))
    ids = np.empty(len(text), table.dtype)
    start = 0
    for codes in _code_points(text):
        if not known[codes].all():
            at = start + int(known[codes].argmin())
            raise ValueError(f"character {text[at]!r} at {at} is not among the {len(chars)} of the vocabulary")
        ids[start : start + len(codes)] = table[codes]
        start += len(codes)
    return ids


def decode(ids: Sequence[int], kind: str, chars: str) -> bytes:
    """ids -> UTF-8. Bytes, because one id of kind "byte" can be part of a character. Bare ids are numbers."""
    if kind == "byte":
        return bytes(ids)
    text = "".join(chars[i] for i in ids) if kind == "char" else "".join(f"{i} " for i in ids)
    return text.encode()


def count_characters(shards: Shards, kind: str) -> int:
    """How many characters the tokens after the first begin; 0 for bare ids. In UTF-8 each byte but 10xxxxxx does."""
    if kind == "byte":
        begun = sum(int(((chunk & 0xC0) != 0x80).sum()) for shard in shards for chunk in _chunks(shard))
        return begun - int((shards[0][0] & 0xC0) != 0x80)
    return length(shards) - 1 if kind == "char" else 0


# ---------------------------------------------------------------------------------------- windows, sharded


def split(shards: Shards, val_fraction: float) -> tuple[Shards, Shards]:
    """(training, validation) by position: the last `val_fraction` of the tokens is for validation."""
    ends = np.cumsum([len(shard) for shard in shards])
    cut = int(ends[-1]) - round(int(ends[-1]) * val_fraction)
    starts = ends - [len(shard) for shard in shards]
    before = tuple(s[: max(0, cut - a)] for s, a in zip(shards, starts) if a < cut)
    after = tuple(s[max(0, cut - a) :] for s, a, b in zip(shards, starts, ends) if b > cut)
    return before, after


def length(shards: Shards) -> int:
    """How many tokens there are in all."""
    return sum(len(shard) for shard in shards)


def windows(n: int, block_size: int) -> int:
    """How many windows of `block_size` an epoch over n tokens has. ValueError if there is not one.

    They lie end to end from an offset that every epoch draws anew (see steps), so that the model sees
    each token at every position; the room for the offset is the one window that the count leaves out.
    """
    if n <= block_size:
        raise ValueError(f"{n} tokens are too few for one window of {block_size} and the token after it")
    return max(1, n // block_size - 1)


def steps_per_epoch(n: int, block_size: int, batch_size: int) -> int:
    """How many steps an epoch has, the last one possibly short."""
    return math.ceil(windows(n, block_size) / batch_size)


def tokens_before(step: int, n: int, block_size: int, batch_size: int) -> int:
    """How many tokens the steps before `step` train on, n being those of an epoch's text."""
    epochs, steps_in = divmod(step, steps_per_epoch(n, block_size, batch_size))
    count = windows(n, block_size)
    return (epochs * count + steps_in * batch_size) * block_size


def steps(
    shards: Shards,
    block_size: int,
    batch_size: int,
    *,
    accum: int = 1,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 0,
    start: int = 0,
    vocab: int | None = None,
) -> Iterator[tuple[list[Batch], int]]:
    """From step `start` on and without end: (this rank's micro-batches, tokens in the global batch).

    A step's `batch_size` windows are dealt to the ranks, and a rank's to at most `accum` micro-batches, as
    evenly as they go. A rank that gets none (an epoch's last step can have fewer windows than there are
    ranks) is given some window with a total of 0: to be computed like any other and counted as nothing.
    ValueError names an id that is not below `vocab`, if given, and its file.
    """
    n, count = length(shards), windows(length(shards), block_size)
    per_epoch = math.ceil(count / batch_size)
    slack = n - 1 - count * block_size
    rows = max(1, batch_size // world_size)
    # steps gathered at once: numpy's calls cost microseconds. Few at first, as the first step waits for all of them
    ahead, most = 1, max(1, (1 << 18) // (rows * block_size))
    gather = _gatherer(shards, block_size + 1, vocab)
    while True:
        epoch, first = divmod(start, per_epoch)
        offset = _key(seed, epoch, "offset") % (slack + 1)
        group = range(first, min(first + ahead, per_epoch))
        sizes = [min(batch_size, count - s * batch_size) for s in group]
        shares = [_share(size, rank, world_size) for size in sizes]
        places = [np.arange(a, b) + s * batch_size for s, (a, b) in zip(group, shares)]
        order = permute(np.concatenate(places), count, _key(seed, epoch, "order"))
        tokens = torch.from_numpy(gather(offset + order * block_size))  # (rows of all the group, T + 1)
        for size, mine in zip(sizes, tokens.split([b - a for a, b in shares])):
            if len(mine):
                parts = min(accum, len(mine))
                cuts = [_share(len(mine), i, parts) for i in range(parts)]
                yield [_batch(mine[a:b]) for a, b in cuts], size * block_size
            else:
                yield [_batch(torch.from_numpy(gather(np.array([offset]))))], 0
        start, ahead = start + len(group), min(2 * ahead, most)


def every_window(
    shards: Shards, block_size: int, batch_size: int, *, rank: int = 0, world_size: int = 1, vocab: int | None = None
) -> Iterator[Batch]:
    """This rank's batches of a pass over all tokens but the first, each predicted exactly once, in order.

    A batch has at most `batch_size` windows, and as many fewer as make the ranks' shares equal, to a batch. The last
    window is as short as what is left. `vocab` is as in steps().
    """
    n = length(shards)
    count, tail = divmod(n - 1, block_size)
    gather = _gatherer(shards, block_size + 1, vocab)
    rounds = max(1, -(-count // (batch_size * world_size)))
    starts = range(0, count, max(1, -(-count // (rounds * world_size))))
    for first in starts[rank::world_size]:
        index = np.arange(first, min(first + starts.step, count))
        yield _batch(torch.from_numpy(gather(index * block_size)))
    if tail and rank == len(starts) % world_size:
        yield _batch(torch.from_numpy(_gatherer(shards, tail + 1, vocab)(np.array([n - 1 - tail]))))


def shard(n: int, rank: int, world_size: int, epoch: int, seed: int) -> np.ndarray:
    """(n / world_size,) int64: this rank's part of a shuffle of range(n); all ranks' are range(n) exactly.

    To be handed to a DataLoader as its sampler, a new one each epoch. Lengths differ by at most one.
    """
    return permute(np.arange(rank, n, world_size), n, _key(seed, epoch, "order"))


def permute(index: np.ndarray, n: int, key: int) -> np.ndarray:
    """(k,) ints in [0, n) -> (k,) int64: where a shuffle of range(n) that depends on `key` takes them.

    A Feistel network on Z_a x Z_b with a * b >= n, walked until it is back inside [0, n) (Black and Rogaway,
    "Ciphers with arbitrary finite domains", 2002): a bijection computed per index, in constant memory.
    """
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    out = np.array(index, np.uint64)
    todo: slice | np.ndarray = slice(None)
    while True:
        left: np.ndarray = out[todo] // np.uint64(b)
        right: np.ndarray = out[todo] % np.uint64(b)
        for i in range(4):
            left = (left + _scramble(right, key + 2 * i) % np.uint64(a)) % np.uint64(a)
            right = (right + _scramble(left, key + 2 * i + 1) % np.uint64(b)) % np.uint64(b)
        out[todo] = left * np.uint64(b) + right
        outside = np.flatnonzero(out >= n)
        if not len(outside):
            return out.astype(np.int64)
        todo = outside


def _scramble(x: np.ndarray, key: int) -> np.ndarray:
    """A hash of 64 bits: the finaliser of SplitMix64 (Steele, Lea, Flood, 2014) over x and the key."""
    z: np.ndarray = np.add(x, np.uint64(key * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF), dtype=np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))


def _key(seed: int, epoch: int, purpose: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed} {epoch} {purpose}".encode(), digest_size=8).digest(), "little")


def _share(n: int, part: int, parts: int) -> tuple[int, int]:
    """Where part `part` of n things dealt into `parts` begins and ends."""
    return n * part // parts, n * (part + 1) // parts


def _batch(rows: torch.Tensor) -> Batch:
    return rows[:, :-1], rows[:, 1:]


def _gatherer(shards: Shards, size: int, vocab: int | None = None) -> Callable[[np.ndarray], np.ndarray]:
    """A function (B,) starts -> (B, size) int64: that many tokens from each start, across shards if need be."""

    def below(rows: np.ndarray, k: int) -> np.ndarray:
        if vocab and rows.size and rows.max() >= vocab:
            name = getattr(shards[k], "filename", "the data")
            raise ValueError(f"{name}: has the id {rows.max()}, and the vocabulary ends at {vocab - 1}")
        return rows

    views = [sliding_window_view(shard, size) if len(shard) >= size else shard for shard in shards]
    if len(shards) == 1:
        return lambda starts: below(views[0][starts], 0).astype(np.int64)
    ends = np.cumsum([len(shard) for shard in shards])
    begins = ends - [len(shard) for shard in shards]

    def gather(starts: np.ndarray) -> np.ndarray:
        out = np.empty((len(starts), size), np.int64)
        inside = np.searchsorted(ends, starts, side="right")  # the shard that each row starts in
        whole = starts + size <= ends[inside]
        for k in np.unique(inside[whole]):
            rows = np.flatnonzero(whole & (inside == k))
            out[rows] = below(views[k][starts[rows] - begins[k]], k)
        for row in np.flatnonzero(~whole):
            place = starts[row] + np.arange(size)
            owner = np.searchsorted(ends, place, side="right")
            for k in np.unique(owner):
                out[row, owner == k] = below(shards[k][place[owner == k] - begins[k]], k)
        return out

    return gather
