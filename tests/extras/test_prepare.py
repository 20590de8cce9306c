"""Tests of extras/prepare.py, and of run.py on what it writes."""

import csv
import json
import re
import subprocess
import sys
from itertools import chain

import numpy as np
import pytest
from conftest import ROOT, TINY, run
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt

tokenizers = pytest.importorskip("tokenizers")
from extras import prepare  # noqa: E402

README = (ROOT / "README.md").read_text()
GPT4 = (  # the pattern at which the tokenizers of GPT-4 and Llama 3 split text
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
END = "<|endoftext|>"


def prepared(folder, *args: object) -> tuple[np.ndarray, np.ndarray]:
    """Run the script, and return the arrays that it wrote."""
    command = [sys.executable, ROOT / "extras" / "prepare.py", *map(str, args), "--out", folder]
    subprocess.run(command, check=True, timeout=300)
    train, val = (np.load(folder / f"{name}.npy") for name in ("train", "val"))
    return train, val


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, tokenizers.Tokenizer]:
    """Return tokenizers that split text like those of GPT-2 and GPT-4."""
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text(README + "héllo 😀 漢字 wörld\n" * 9)
    pre = tokenizers.pre_tokenizers
    gpt2, gpt4 = (prepare.train_bpe([f"{path}"], 400) for _ in range(2))
    split = pre.Split(tokenizers.Regex(GPT4), "isolated")
    gpt4.pre_tokenizer = pre.Sequence([split, pre.ByteLevel(False, use_regex=False)])
    return {"GPT-2": gpt2, "GPT-4": gpt4}


@pytest.fixture
def file(trained, tmp_path):
    trained["GPT-2"].save(f"{tmp_path}/tokenizer.json")
    return tmp_path / "tokenizer.json"


ANY = st.text(st.sampled_from("ab é漢1²'s.,!-\n\r\t 😀_"), max_size=200)


@pytest.mark.parametrize("name", ["GPT-2", "GPT-4"])
@settings(max_examples=300, deadline=None, derandomize=True)
@given(text=ANY, length=st.integers(1, 20))
def test_the_pieces_of_a_text_have_the_tokens_of_the_whole_text(trained, name, text, length):
    """Otherwise a fine-tuned model sees tokens that it was not trained on."""
    pattern = prepare.PIECES.pattern.replace("65536", f"{length}")
    pieces = re.findall(pattern, text)
    parts = [trained[name].encode(piece).ids for piece in pieces]
    assert "".join(pieces) == text
    assert [*chain(*parts)] == trained[name].encode(text).ids


def write_documents(path, texts: list[str]) -> None:
    """Write texts in the format that the name says; a .txt has only the first one."""
    rows = [{"id": i, "text": text} for i, text in enumerate(texts)]
    if path.suffix == ".txt":
        path.write_text(texts[0], newline="")
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as opened:
            writer = csv.DictWriter(opened, ["id", "text"])
            writer.writeheader()
            writer.writerows(rows)
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        import pyarrow

        table = pyarrow.Table.from_pylist(rows)
        if path.suffix == ".parquet":
            parquet.write_table(table, path)
        else:  # as the package datasets writes it
            with pyarrow.OSFile(f"{path}", "wb") as sink:
                with pyarrow.ipc.new_stream(sink, table.schema) as writer:
                    writer.write_table(table)


@pytest.mark.parametrize("suffix", ["txt", "jsonl", "csv", "parquet", "arrow"])
def test_documents_of_each_format_are_divided_by_the_end_of_text(tmp_path, trained, file, suffix):
    """Otherwise the model learns that one document continues in the next."""
    texts = ["one\r\n\n two", '"é😀", \u2028 漢', README * 20]  # csv's limit is 131072
    write_documents(tmp_path / f"b.{suffix}", texts)
    write_documents(tmp_path / f"a.{suffix}", ["first"])
    found = prepared(tmp_path / "new", tmp_path / f"*.{suffix}", "--tokenizer", file)
    whole = f"first{END}" + END.join(texts[:1] if suffix == "txt" else texts) + END
    ids = trained["GPT-2"].encode(whole).ids
    assert np.concatenate(found).tolist() == ids and len(found[1]) == round(len(ids) * 0.01)
    assert found[0].dtype == np.uint16


def llm_c(ids: np.ndarray, magic: int) -> bytes:
    header = np.zeros(256, np.int32)
    header[:3] = magic, 1, len(ids)
    return header.tobytes() + ids.tobytes()


def test_shards_of_nanogpt_and_llm_c_are_joined(tmp_path):
    """chardata.py would join them in the memory of each rank, and take headers for tokens."""
    ids = np.arange(1000, dtype=np.uint16)
    ids.tofile(tmp_path / "1.bin")
    (tmp_path / "2.bin").write_bytes(llm_c(ids + 7, 20240520))
    np.save(tmp_path / "3.npy", ids[::2])
    shards = [tmp_path / "?.bin", tmp_path / "3.npy"]
    train, val = prepared(tmp_path / "a", *shards, "--val-fraction", 0.1)
    assert np.concatenate([train, val]).tolist() == [*ids, *(ids + 7), *ids[::2]]
    mapped, was = np.load(tmp_path / "a" / "train.npy", "r"), train.copy()
    prepared(tmp_path / "a", tmp_path / "3.npy")
    assert mapped.tolist() == was.tolist()  # as in a training that runs
    assert len(val) == 250 and train.dtype == np.uint16
    (tmp_path / "2.bin").write_bytes(llm_c(ids + np.uint32(100_000), 20240801))
    train, _ = prepared(tmp_path / "b", *shards, "--val-fraction", 0)
    assert train.dtype == np.uint32 and train[1000] == 100_000 and len(train) == 2500


def test_a_run_learns_documents_and_its_sample_is_text(tmp_path):
    """With a BPE of its own, from documents to a sample that ends at the end-of-text token."""
    write_documents(tmp_path / "mine.jsonl", 300 * ["the cat"])
    prepared(tmp_path / "new", tmp_path / "mine.jsonl", "--bpe", 270)
    path, data = tmp_path / "new" / "tokenizer.json", tmp_path / "new" / "train.npy"
    flags = ["--data", data, "--tokenizer", path, "--steps", 40, "--lr", 0.02, "--warmup", 0]
    ran = run(*TINY, *flags, "--out", tmp_path / "out", "--spawn", 2)
    assert ran.code == 0, ran
    greedy = ["--prompt", "the", "--temperature", 0, "--max-new-tokens", 20]
    ran = run("sample", "--out", tmp_path / "out", *greedy)
    assert ran.code == 0 and ran.out.startswith(f"the cat{END}the cat{END}"), ran
    path.write_text("{}")
    assert run("sample", "--out", tmp_path / "out", *greedy) == ran  # The checkpoint has a copy.
    entry = ckpt.list_checkpoints(f"{tmp_path}/out")[-1]
    older = ckpt.load(f"{tmp_path}/out", entry) | {"chars": ""}  # of version 0.5
    ckpt.save(f"{tmp_path}/out", older, entry.step)
    ran = run("sample", "--out", tmp_path / "out", *greedy)
    assert ran.code == 2 and ran.err.count("\n") == 1 and f"{path}" in ran.err, ran


def test_text_for_a_tokenizer_is_refused_in_one_line(tmp_path, file):
    (tmp_path / "a.txt").write_text(README)
    data = ["--data", tmp_path / "a.txt", "--tokenizer", file]
    ran = run(*TINY, *data, "--out", tmp_path / "out")
    assert ran.code == 2 and "needs token files (extras/prepare.py), not text" in ran.err, ran
    with pytest.raises(subprocess.CalledProcessError):
        prepared(tmp_path, tmp_path / "a.txt")  # neither --tokenizer nor --bpe


def test_what_cannot_be_read_is_named(tmp_path):
    """Read as ids, text and negative numbers would be other ids without a word."""
    (tmp_path / "a.csv").write_text("id,body\n1,hello\n")
    (tmp_path / "b.jsonl").write_text('{"text": "a"}\n\n{"text"')
    (tmp_path / "c.txt").write_bytes(b"\xff" * 99)
    (tmp_path / "d.txt").write_text("text")
    np.save(tmp_path / "e.npy", [1, -1])
    np.save(tmp_path / "g.npy", np.ones(9, np.uint8))
    for names, error in {
        "a.csv": "a.csv: KeyError: 'text'",
        "b.jsonl": "b.jsonl: .*Expecting",
        "c.txt": "c.txt: .*can't decode",
        "x.txt": "x.txt: .*No such file",
        "e.npy": "e.npy: .*unsigned",
        "g.npy d.txt": "d.txt: .*unsigned",
        "g.npy --val-fraction 2": "--val-fraction",
        "d.txt --tokenizer d.txt": "d.txt: expected",
    }.items():
        command = [sys.executable, ROOT / "extras" / "prepare.py", "--bpe", "300", *names.split()]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        *_, line = done.stderr.splitlines()
        assert done.returncode == 2 and re.search(f"^Error: .*{error}", line), done
    assert [*(tmp_path / "data").iterdir()] == []  # also no tokenizer without its tokens


def test_a_tokenizer_that_truncates_loses_no_text(trained, file):
    trained["GPT-2"].enable_truncation(5)
    trained["GPT-2"].save(f"{file}")
    trained["GPT-2"].no_truncation()
    assert prepare.encode(README, f"{file}").tolist() == trained["GPT-2"].encode(README).ids


@settings(max_examples=100, deadline=None, derandomize=True)
@given(text=st.text(st.sampled_from("ab é漢字😀\n"), min_size=1, max_size=20))
def test_decoding_ids_one_by_one_gives_the_text(trained, tmp_path_factory, text):
    """No piece has half a character, and text after an invalid id is decoded too."""
    path = f"{tmp_path_factory.getbasetemp()}/tokenizer.json"
    trained["GPT-2"].save(path)
    ids = prepare.encode(text, path).tolist()
    pieces = [*prepare.decode(ids, path)]
    assert "".join(pieces) == text and all("\ufffd" not in piece for piece in pieces)
    broken = [
        *prepare.encode("漢", path).tolist()[:1] * 9,
        *ids,
        *prepare.encode("x", path).tolist(),
    ]
    assert "".join(prepare.decode(broken, path)).endswith(f"{text}x")
