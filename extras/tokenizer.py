"""Encode and decode text with a tokenizer.json of Hugging Face's package tokenizers.

    tokenizer_json = open("tokenizer.json").read()
    path = encode_files(["a.txt", "b.txt"], tokenizer_json, "cache")     # a .npy; made once
    ids = encode("The ", "tokenizer", tokenizer_json)
    for text in decode(ids, "tokenizer", tokenizer_json): print(text, end="")

A .jsonl has one document per line: an object whose field "text" is a string.

encode and decode have the arguments of those in chardata.py, and do not use `kind`. encode_files
cuts the text, so with some tokenizers its ids can differ from those of the whole text. Needs numpy,
filelock and tokenizers.
"""

import codecs
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock

try:
    from tokenizers import Tokenizer
except ImportError as error:
    raise ImportError("pip install tokenizers to use a tokenizer.json") from error

# Bytes of text in a piece, and the number of pieces that are encoded in parallel
PIECE, BATCH = 1 << 16, 32
LONG = 1 << 25  # bytes of text that take some seconds
# Names of the token that ends a text, in GPT-2, Llama 3, Llama 2 and T5, Gemma, DeepSeek
ENDINGS = "<|endoftext|> <|end_of_text|> </s> <eos> <\uff5cend\u2581of\u2581sentence\uff5c>".split()
CUTS = [re.compile(rf"(?s).*{place}") for place in (r"[^\W\d_](?= [^\W\d_])", r"\S\n(?=\S)")]


def load(tokenizer_json: str) -> Tokenizer:
    """Return the Tokenizer of the text of a tokenizer.json, without truncation and padding."""
    try:
        tokenizer = Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the package has no errors of its own
        raise ValueError(f"not a tokenizer.json of Hugging Face tokenizers: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def size(tokenizer_json: str) -> int:
    """Return the highest id plus 1."""
    return _size(load(tokenizer_json))


def _size(tokenizer: Tokenizer) -> int:
    return max(tokenizer.get_vocab().values(), default=0) + 1


def encode(text: str, kind: str, tokenizer_json: str) -> np.ndarray:
    """Return the ids of a text, (n,) uint32."""
    return np.array(_encode(load(tokenizer_json), [text])[0], np.uint32)


def end_of_text(tokenizer: Tokenizer) -> str:
    """Return the first of ENDINGS that is an added token of the tokenizer, or "" if none is."""
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    return next((name for name in ENDINGS if name in added), "")


def end_id(tokenizer_json: str) -> int | None:
    """Return the id of the token that end_of_text returns, or None if there is none."""
    tokenizer = load(tokenizer_json)
    return tokenizer.token_to_id(end_of_text(tokenizer))


def _encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of each text, computed in parallel."""
    try:
        found = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    except Exception as error:
        raise ValueError(f"the tokenizer cannot encode the text: {error}") from None
    return [encoding.ids for encoding in found]


# ----------------------------------------------------------------------------------------- files


def read_corpus(
    chardata: ModuleType,
    files: Sequence[str],
    path: str,
    tokenizer_json: str,
    vocab: int | None,
    val_files: Sequence[str] = (),
) -> Any:
    """Return a chardata.Corpus of kind "tokenizer". Text files are encoded; .bin and .npy hold ids.

    Each line of a .jsonl is a text: see encode_files.
    chardata: the module. files: [] means its default text. path: a tokenizer.json. tokenizer_json:
    the text of the one in a checkpoint, or "". If it is not "", it is used, and `path` may be "" or
    a file that is gone. ValueError if the file is another tokenizer. vocab: a number above every
    id. None means size() rounded up to a multiple of 64. val_files: become Corpus.val_tokens.
    """
    if os.path.isdir(path):
        name = os.path.join(path, "tokenizer.json")
        advice = f"; give {name}" if os.path.exists(name) else " without a tokenizer.json"
        raise ValueError(f"--tokenizer {path}: is a folder{advice}")
    exists = os.path.exists(path)
    if not exists and not tokenizer_json:
        raise FileNotFoundError(f"--tokenizer {path}: not char, byte, or an existing file")
    try:
        text = Path(path).read_text(encoding="utf-8") if exists else tokenizer_json
        needed = size(text)
    except ValueError as error:
        raise ValueError(
            f"--tokenizer {path}: not char, byte or a tokenizer.json: {error}"
        ) from None
    if tokenizer_json and not same_json(text, tokenizer_json):
        raise ValueError(
            f"--tokenizer {path}: is not the tokenizer of the checkpoint; leave it out, or "
            "name another --out"
        )
    tokenizer_json = tokenizer_json or text
    vocab = vocab or -(-needed // 64) * 64
    if needed > vocab:
        raise ValueError(f"{path}: has the id {needed - 1}; the vocabulary ends at {vocab - 1}")
    given = [*files, *val_files]
    if not any(file.endswith((".bin", ".npy")) for file in given):
        for file in given:
            chardata.text_start(file)  # raises ValueError if it is not text
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        cache = os.path.join(cache, "ddpkit")
        files = [encode_files(files, tokenizer_json, cache, default=chardata.default_text)]
        val_files = [encode_files(val_files, tokenizer_json, cache)] if val_files else []
    corpus = chardata.read(files, "byte", "", vocab, val_files)
    digest = chardata.digest(corpus.tokens, tokenizer_json)
    if corpus.val_tokens:
        digest = chardata.digest(corpus.val_tokens, digest)
    return corpus._replace(kind="tokenizer", chars=tokenizer_json, digest=digest)


def same_json(text: str, other: str) -> bool:
    """Return whether two texts are JSON of equal values."""
    with suppress(ValueError):
        return bool(json.loads(text) == json.loads(other))
    return False


def encode_files(
    files: Sequence[str], tokenizer_json: str, cache: str, default: Callable[[], str] = str
) -> str:
    """Return the path of a .npy with the ids of text files, one file after the other.

    A text is a file, or, in a .jsonl, the field "text" of a line. Empty texts are left out. After
    each text comes the end_of_text() of the tokenizer, if it has one; else a line break between
    texts that do not end with one. A byte order mark is left out.

    The .npy is in the folder `cache`, complete or absent. It is made again if the tokenizer or the
    path, size or time of a file changes. The first process that needs it makes it, and the others
    wait. Its dtype is uint16 if the ids fit, else uint32. default: makes the text if there are no
    files.

    The text is encoded in pieces of about 64 KiB that begin at a space between two letters. The
    pre-tokenizers of GPT-2, GPT-4 and Llama 3 split there, so the ids are those of the whole text.
    (That of Llama 2 adds a space at the beginning of each piece.) If there is no such place, a
    piece ends after a line or anywhere, where the ids can differ.

    UnicodeError if a byte is not UTF-8. ValueError if there is no text, if a line of a .jsonl is
    not an object with a string "text", or if the tokenizer cannot encode a text. OSError if the
    cache cannot be written.
    """
    made = "" if files else default()
    stats = [(os.path.abspath(file), os.stat(file)) for file in files]
    size = sum(s.st_size for _, s in stats) or len(made.encode())
    if not size:
        raise ValueError(f"{', '.join(files) or 'the text'}: is empty")
    # one after the other, because the number of open files is limited
    texts: Iterable[np.ndarray] = chain.from_iterable(
        _texts(file) for file, s in stats if s.st_size
    )
    if made:
        texts = [np.frombuffer(made.encode(), np.uint8)]
    # ctime, because tar can set any mtime
    version = [(file, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for file, s in stats]
    # Versions of this program: one did not write ends of texts and line breaks ("joined"), and one
    # encoded a .jsonl like a .txt.
    how = "joined" + ", lines" * any(file.endswith(".jsonl") for file in files)
    key = hashlib.sha256(f"{how}\n{version}\n{made}\n{tokenizer_json}".encode())
    path = os.path.join(cache, key.hexdigest()[:32], "tokens.npy")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with FileLock(os.path.join(os.path.dirname(path), ".lock")):
        if not os.path.exists(path):
            if size >= LONG:
                print(f"Encoding {size / 1e6:,.0f} MB of text; this is done once", file=sys.stderr)
            _make(path, load(tokenizer_json), texts)
    return path


def _make(path: str, tokenizer: Tokenizer, texts: Iterable[np.ndarray]) -> None:
    dtype = np.dtype(np.uint16 if _size(tokenizer) <= 1 << 16 else np.uint32)
    try:
        with open(f"{path}.part", "w+b") as file:
            _write(file, _ids(tokenizer, texts), dtype)
        os.replace(f"{path}.part", path)
    except BaseException:
        with suppress(OSError):
            os.unlink(f"{path}.part")
        raise


def _write(file: BinaryIO, ids: Iterable[Sequence[int]], dtype: np.dtype) -> None:
    """Write a durable .npy. Its header has the same length for every number of ids."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (0,)}
    np.lib.format.write_array_header_1_0(file, header)
    count = 0
    for some in ids:
        file.write(np.array(some, dtype).tobytes())
        count += len(some)
    if not count:
        raise ValueError("there is no text")
    file.seek(0)
    np.lib.format.write_array_header_1_0(file, {**header, "shape": (count,)})
    file.flush()
    os.fsync(file.fileno())


def _texts(path: str) -> Iterator[np.ndarray]:
    """Yield the texts of a file, each (n,) uint8 of UTF-8. A .jsonl is read line by line."""
    if not path.endswith(".jsonl"):
        yield np.memmap(path, np.uint8, "r")
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                text = json.loads(line.decode("utf-8-sig"))["text"].encode()
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                raise ValueError(
                    f'{path}: line {number} is not a JSON object with a string "text", in UTF-8: '
                    f"{line[:60]!r}"
                ) from None
            if text:
                yield np.frombuffer(text, np.uint8)


def _ids(tokenizer: Tokenizer, texts: Iterable[np.ndarray]) -> Iterator[list[int]]:
    """Yield the ids of each piece of the texts."""
    pieces = _pieces(tokenizer, texts)
    while batch := list(islice(pieces, BATCH)):
        yield from _encode(tokenizer, batch)


def _pieces(tokenizer: Tokenizer, texts: Iterable[np.ndarray]) -> Iterator[str]:
    """Yield the texts in pieces, with what encode_files() adds after and between them."""
    end, line_break, unfinished = end_of_text(tokenizer), "", False
    with suppress(ValueError):  # Some tokenizers have no line break.
        line_break = "\n" if not end and _encode(tokenizer, ["\n"]) else ""
    for text in texts:
        if unfinished and line_break:
            yield line_break
        yield from cut(text)
        if end:
            yield end
        unfinished = text[-1] != ord("\n")


def cut(text: np.ndarray) -> Iterator[str]:
    """Yield a text, (n,) uint8 of UTF-8, in pieces; encode_files() says where they end."""
    decoder, rest = codecs.getincrementaldecoder("utf-8-sig")(), ""
    for start in range(0, len(text), PIECE):
        last = start + PIECE >= len(text)
        held = len(decoder.getstate()[0])  # bytes of a character that began in the piece before
        try:
            rest += decoder.decode(text[start : start + PIECE].tobytes(), last)
        except UnicodeDecodeError as error:
            name, at = getattr(text, "filename", "the text"), start - held + error.start
            byte = error.object[error.start]
            raise UnicodeError(
                f"{name}: byte 0x{byte:02x} at {at} is not UTF-8 text; convert it: for example, "
                "iconv -f LATIN1 -t UTF-8 old.txt > new.txt"
            ) from None
        found = next((match for match in (place.match(rest) for place in CUTS) if match), None)
        end = len(rest) if last or not found else found.end()
        if end:
            yield rest[:end]
        rest = rest[end:]


# ---------------------------------------------------------------------------------------- decode


def decode(ids: Iterable[int], kind: str, tokenizer_json: str) -> Iterator[str]:
    """Yield the text of `ids` as they come; a character of several ids, when it is complete.

    Many tokenizers omit a space at the beginning of a text, so begin with the ids of the prompt.
    """
    tokenizer, before, held = load(tokenizer_json), list[int](), list[int]()

    def text() -> str:  # The text of an id can depend on the ids before it.
        known, longer = (
            tokenizer.decode(x, skip_special_tokens=False) for x in (before, before + held)
        )
        return str(longer[len(known) :])

    for i in ids:
        held.append(i)
        if not text().endswith("\ufffd") or len(held) > 16:  # 16: the character is invalid
            yield text()
            # not a part of `held`, because ByteFallback decodes neighbouring bytes together
            before, held = held, []
    yield text()


def num_bytes(ids: np.ndarray, kind: str, tokenizer_json: str) -> int:
    """Return the length of the text of token ids in UTF-8, in bytes."""
    return len(load(tokenizer_json).decode(ids.tolist(), skip_special_tokens=False).encode())
