#!/usr/bin/env python3
"""Turn documents into train.npy and val.npy: token files for run.py.

python extras/prepare.py "texts/*.txt" --tokenizer tokenizer.json
python extras/prepare.py mine.jsonl --bpe 8192                     train a tokenizer first
python extras/prepare.py "fineweb/*.bin"                           join token files
python run.py --data data/train.npy --val-data data/val.npy --tokenizer data/tokenizer.json

A document is a text file; the field "text" of a line of a .jsonl or of a row of a .csv; or a row of
the column "text" of a .parquet or .arrow (these need pyarrow). Rename a field with another name.
After each document comes the end-of-text token of the tokenizer, or a line break if it has none.

A token file is a .npy, or a .bin of nanoGPT or llm.c. Several of them need memory in training; one
needs none, because it is mapped.

A tokenizer.json is of Hugging Face's package tokenizers, which this file needs. `encode` and
`decode` have the arguments of those in chardata.py.
"""

import csv
import glob
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import click
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TOKENS = (".bin", ".npy")
# Names of the token that ends a text, in GPT-2, Llama 3, Llama 2 and T5, Gemma, DeepSeek
ENDINGS = "<|endoftext|> <|end_of_text|> </s> <eos> <｜end▁of▁sentence｜>".split()
# Pieces of a text, to be encoded in parallel. They end before a space between two letters, or after
# a line. The pre-tokenizers of GPT-2, GPT-4 and Llama 3 split a text there too, so the ids are
# those of the whole text.
PIECES = re.compile(r"(?s).{65536,}?(?:[^\W\d_](?= [^\W\d_])|\S\n(?=\S))|.+")


def load(path: str, content: str = "") -> Tokenizer:
    """Return the tokenizer of a tokenizer.json, or of its content. UsageError if it is none."""
    try:
        tokenizer = Tokenizer.from_str(content) if content else Tokenizer.from_file(path)
    except Exception as error:  # The package has no errors of its own.
        raise click.UsageError(f"{path}: {error}") from error
    tokenizer.no_truncation()
    return tokenizer


def encode(text: str, tokenizer: str, chars: str = "") -> np.ndarray:
    """Return the token ids of a text, (n,). tokenizer, chars: a tokenizer.json, and its content."""
    return np.array(load(tokenizer, chars).encode(text, add_special_tokens=False).ids)


def decode(ids: Iterable[int], tokenizer: str, chars: str = "") -> Iterator[str]:
    """Yield the text of token ids, piece by piece."""
    loaded, stream = load(tokenizer, chars), decoders.DecodeStream()
    return (stream.step(loaded, i) or "" for i in ids)


def read_each(names: Sequence[str], read: Callable[[str], Iterator[Any]]) -> Iterator[Any]:
    """Yield what is in files. read: read_documents or read_ids."""
    for name in names:
        try:
            yield from read(name)
        except Exception as error:  # A damaged file can raise anything.
            raise click.UsageError(f"{name}: {type(error).__name__}: {error}") from error


def read_documents(name: str) -> Iterator[str]:
    """Yield the texts in a file."""
    if name.endswith((".parquet", ".arrow")):
        from pyarrow import ipc, memory_map, parquet

        file: Any = memory_map(name)
        arrow = name.endswith(".arrow")
        for part in ipc.open_stream(file) if arrow else parquet.ParquetFile(file).iter_batches():
            yield from part["text"].to_pylist()
        return
    csv.field_size_limit(1 << 30)
    with open(name, encoding="utf-8-sig", newline="") as file:
        if name.endswith(".jsonl"):
            yield from (json.loads(line)["text"] for line in file if line.strip())
        elif name.endswith(".csv"):
            yield from (row["text"] for row in csv.DictReader(file))
        else:
            yield file.read()


def read_ids(name: str) -> Iterator[np.ndarray]:
    """Yield the ids of a token file as one array, which is not read into memory."""
    if name.endswith(".npy"):
        ids = np.load(name, "r")
    else:
        magic = int(np.fromfile(name, "<u4", 1)[0])  # No file of nanoGPT with GPT-2's ids has it.
        kinds = {20240520: "<u2", 20240801: "<u4"}  # of llm.c: GPT-2, Llama 3
        ids = np.memmap(name, kinds.get(magic, "<u2"), "r", 1024 * (magic in kinds))
    if ids.dtype.kind != "u" or not name.endswith(TOKENS):
        raise ValueError("not a .npy or .bin of unsigned integers")
    yield ids


def train_bpe(names: Sequence[str], size: int) -> Tokenizer:
    """Return a new byte-level BPE tokenizer, like that of GPT-2, with `size` tokens."""
    tokenizer, level = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer, tokenizer.decoder = level, decoders.ByteLevel()
    alphabet = level.alphabet()  # all bytes, so that no text is unknown
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=ENDINGS[:1], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(read_each(names, read_documents), trainer)
    return tokenizer


def encode_files(names: Sequence[str], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yield the ids of documents."""
    end = next((name for name in ENDINGS if name in tokenizer.get_vocab()), "\n")
    pieces = (
        piece
        for text in read_each(names, read_documents)
        if text
        for piece in (*PIECES.findall(text), end)
    )
    while batch := [*islice(pieces, 64)]:
        encoded = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        yield np.concatenate([each.ids for each in encoded])


@click.command(context_settings={"show_default": True})
@click.argument("data", nargs=-1, required=True)
@click.option("--tokenizer", help="A tokenizer.json, for documents.")
@click.option(
    "--bpe", type=click.IntRange(257), help="Train a tokenizer with this number of tokens."
)
@click.option(
    "--val-fraction",
    type=click.FloatRange(0, 1),
    default=0.01,
    help="The last part, for val.npy.",
)
@click.option("--out", default="data", help="Folder to write to.")
def main(data: Sequence[str], tokenizer: str, bpe: int, val_fraction: float, out: str) -> None:
    """Turn documents or token files (.npy, .bin) into train.npy and val.npy.

    A document is a text file, or the field "text" of a line of .jsonl or a row of .csv, .parquet or
    .arrow. The disk must have room for the ids twice.
    """
    names = [name for each in data for name in sorted(glob.glob(each, recursive=True)) or [each]]
    os.makedirs(out, exist_ok=True)
    loaded = None
    if any(name.endswith(TOKENS) for name in names):
        chunks: Any = [*read_each(names, read_ids)]
        dtype = np.result_type(*chunks)
    elif tokenizer or bpe:
        loaded = load(tokenizer) if tokenizer else train_bpe(names, bpe)
        dtype = np.min_scalar_type(max(loaded.get_vocab().values()))
        chunks = encode_files(names, loaded)
    else:
        raise click.UsageError("documents need --tokenizer or --bpe")
    with tempfile.TemporaryFile(dir=out) as file:
        with click.progressbar(chunks, show_pos=True) as bar:
            for chunk in bar:
                file.write(chunk.astype(dtype))
        file.flush()
        if loaded:
            loaded.save(f"{out}/tokenizer.json")
        ids = np.memmap(file, dtype, "r")
        cut = round(len(ids) * (1 - val_fraction))
        for name, part in (("train", ids[:cut]), ("val", ids[cut:])):
            np.save(f"{out}/.{name}.npy", part)
            # A training that has mapped the old file keeps it.
            os.replace(f"{out}/.{name}.npy", f"{out}/{name}.npy")
            click.echo(f"wrote {out}/{name}.npy: {len(part):,} tokens")


if __name__ == "__main__":
    main()
