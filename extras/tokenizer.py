"""Text <-> the tokens of a tokenizer.json, as Hugging Face's tokenizers write it.

    words = open("tokenizer.json").read()                       # what all of these take
    ids = np.load(encoded(texts, "v1", words), mmap_mode="r")   # texts: arrays of UTF-8; done once, then in the cache
    ids = encode("The ", words)
    for text in decoded(ids, more_ids, words): print(text, end="")

Needs numpy and tokenizers.
"""

import codecs
import fcntl
import hashlib
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, BinaryIO

import numpy as np

PIECE, BATCH = 1 << 16, 32  # bytes that are encoded as one, and how many of these side by side
LONG = 1 << 25  # bytes of text that take some seconds
CUTS = [re.compile(rf"(?s).*{place}") for place in (r"[^\W\d_](?= [^\W\d_])", r"\S\n(?=\S)")]


def load(words: str) -> Any:
    """The tokenizers.Tokenizer of a tokenizer.json's text, which cuts nothing off and adds nothing."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ImportError("pip install tokenizers to use a tokenizer.json") from None
    try:
        tokenizer = Tokenizer.from_str(words)
    except Exception as error:  # it has no other
        raise ValueError(f"not a tokenizer.json of Hugging Face's: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def size(words: str) -> int:
    """A number above every id."""
    return _size(load(words))


def _size(tokenizer: Any) -> int:
    return max(tokenizer.get_vocab().values(), default=0) + 1


def encode(text: str, words: str) -> np.ndarray:
    """text -> (n,) uint32 ids."""
    return np.array(_encode(load(words), [text])[0], np.uint32)


def _encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """The ids of each, computed side by side."""
    try:
        return [found.ids for found in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    except Exception as error:  # as where it has no token for something, not even for the unknown
        raise ValueError(f"the tokenizer cannot encode the text: {error}") from None


# ------------------------------------------------------------------------------------------------------- files


def encoded(texts: Sequence[np.ndarray], version: str, words: str) -> str:
    """A .npy file with the tokens of `texts`, one after the other, each (n,) uint8 of UTF-8, memory-mapped or not.

    It is in ~/.cache/ddpkit (or XDG_CACHE_HOME) under the digest of the tokenizer and of `version`, which has to be another
    if the texts are. Who asks for it first makes it, with all cores and in memory that does not depend on the texts;
    the others wait. It is whole or not there. uint16 if the ids fit, else uint32.

    The texts are encoded in pieces of about 64 KiB that begin at a space between two letters. The pre-tokenizers of
    GPT-2, GPT-4 and Llama 3 split there: the tokens are those of each text in one. Where a text has no such place
    a piece ends after a line, or else anywhere, and what is cut there may have other tokens.

    UnicodeError tells where a text is not UTF-8, ValueError what cannot be encoded, OSError what cannot be written.
    """
    cache = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "ddpkit")
    folder = os.path.join(cache, hashlib.sha256(f"{version}\n{words}".encode()).hexdigest()[:32])
    path = os.path.join(folder, "tokens.npy")
    try:
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, ".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # goes with its process: one that died is waited for by nobody
            if not os.path.exists(path):
                _make(path, load(words), texts)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}; XDG_CACHE_HOME can name another disk", folder) from error
    return path


def _make(path: str, tokenizer: Any, texts: Sequence[np.ndarray]) -> None:
    dtype = np.dtype(np.uint16 if _size(tokenizer) <= 1 << 16 else np.uint32)
    try:
        with open(f"{path}.part", "w+b") as file:
            _write(file, _tokens(tokenizer, texts), dtype)
        os.replace(f"{path}.part", path)
    except BaseException:
        with suppress(OSError):
            os.unlink(f"{path}.part")
        raise


def _write(file: BinaryIO, tokens: Iterable[Sequence[int]], dtype: np.dtype) -> None:
    """A .npy of them all, on the disk. Its header has the same length however many they are."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (0,)}
    np.lib.format.write_array_header_1_0(file, header)
    count = 0
    for ids in tokens:
        file.write(np.array(ids, dtype).tobytes())
        count += len(ids)
    file.seek(0)
    np.lib.format.write_array_header_1_0(file, {**header, "shape": (count,)})
    file.flush()
    os.fsync(file.fileno())


def _tokens(tokenizer: Any, texts: Sequence[np.ndarray]) -> Iterator[list[int]]:
    """The ids of all texts, piece by piece. One line on stderr says so if it takes long, in a terminal how far it is."""
    pieces, total, done = (piece for text in texts for piece in cut(text)), sum(map(len, texts)), 0
    start = told = time.monotonic()
    if total >= LONG:
        print(f"Encoding {total / 1e6:,.0f} MB of text; the tokens are kept for the next time", file=sys.stderr)
    while batch := list(islice(pieces, BATCH)):
        yield from _encode(tokenizer, batch)
        done += sum(len(piece.encode()) for piece in batch)
        now = time.monotonic()
        if total >= LONG and sys.stderr.isatty() and (now - told > 1 or done == total):
            told = now
            print(
                f"\r{done / total:4.0%}, {done / (now - start) / 1e6:.1f} MB/s ",
                file=sys.stderr,
                end="\n" * (done == total),
            )
            sys.stderr.flush()


def cut(text: np.ndarray) -> Iterator[str]:
    """(n,) uint8 of UTF-8 -> the same text in pieces; see encoded()."""
    decoder, rest = codecs.getincrementaldecoder("utf-8")(), ""
    for start in range(0, len(text), PIECE):
        end = start + PIECE >= len(text)
        held = len(decoder.getstate()[0])
        try:
            rest += decoder.decode(text[start : start + PIECE].tobytes(), end)
        except UnicodeDecodeError as error:
            at = start - held + error.start
            name, byte = getattr(text, "filename", "the text"), error.object[error.start]
            raise UnicodeError(
                f"{name}: not UTF-8 text (byte 0x{byte:02x} at {at}); read it as bytes instead"
            ) from None
        found = next((match for match in (place.match(rest) for place in CUTS) if match), None)
        here = len(rest) if end or not found else found.end()
        if here:
            yield rest[:here]
        rest = rest[here:]


# -------------------------------------------------------------------------------------------------------- text


def decoded(prompt: Sequence[int], ids: Iterable[int], words: str) -> Iterator[str]:
    """The text of `ids`, as they come after `prompt`; of a character that is in several tokens, once it is whole."""
    tokenizer, before, held = load(words), [*prompt][-8:], list[int]()

    def text() -> str:  # what a token begins with depends on whether there is one before it
        known, all_ = (tokenizer.decode(ids, skip_special_tokens=False) for ids in (before, before + held))
        return str(all_[len(known) :])

    for i in ids:
        held.append(i)
        if not text().endswith("\ufffd") or len(held) > 16:  # broken ones end too
            yield text()
            before, held = held, []
    yield text()


def count_characters(shards: Iterable[np.ndarray], words: str) -> int:
    """How many characters the text of all tokens but the first has; a tokenizer that leaves out a space where its text
    begins does so once in 65,536 tokens."""
    tokenizer, count, first, ids = load(words), 0, 1, list[int]()

    def text(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    for shard in shards:
        for start in range(first, len(shard), PIECE):
            ids += shard[start : start + PIECE].tolist()
            # the last character may go on in the next tokens
            end = next((n for n in range(len(ids), len(ids) - 4, -1) if not text(ids[:n]).endswith("\ufffd")), len(ids))
            count, ids = count + len(text(ids[:end])), ids[end:]
        first = 0
    return count + len(text(ids))
