"""Tests of extras/tokenizer.py and of --tokenizer FILE.json."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import ENVIRONMENT, ROOT, TINY, run, same_training, state
from documents import code_blocks, section
from hypothesis import given, settings
from hypothesis import strategies as st

tokenizers = pytest.importorskip("tokenizers")
import chardata  # noqa: E402
from extras import tokenizer  # noqa: E402

README = (ROOT / "README.md").read_text()
GPT4 = (  # the pattern at which the tokenizers of GPT-4 and Llama 3 split text
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def trained(pattern: str = "", size: int = 400) -> str:
    """Return the tokenizer.json of a byte-level BPE, with GPT-2's or another pattern."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    pre, alphabet = tokenizers.pre_tokenizers, tokenizers.pre_tokenizers.ByteLevel.alphabet()
    level = pre.ByteLevel(add_prefix_space=False, use_regex=not pattern)
    split = pre.Split(tokenizers.Regex(pattern), "isolated")
    made.pre_tokenizer = pre.Sequence([split, level]) if pattern else level
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([README, "héllo 😀 漢字 wörld\n" * 9], trainer)
    return made.to_str()


GPT2 = trained()
WORDS = {"GPT-2": GPT2, "GPT-4": trained(GPT4)}


def ids(text: str, words: str = GPT2) -> list[int]:
    """Return the ids of a whole text, as the package computes them."""
    return tokenizers.Tokenizer.from_str(words).encode(text, add_special_tokens=False).ids


def raw(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


def encoded(cache, texts: list[str | bytes], words: str = GPT2, suffix: str = "txt") -> np.ndarray:
    """Return the ids of texts that are first written to files."""
    files = [cache.parent.parent / f"{i}.{suffix}" for i in range(len(texts))]
    for file, text in zip(files, texts):
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return np.load(tokenizer.encode_files([*map(str, files)], words, f"{cache}"))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path / 'cache'}")
    monkeypatch.setitem(ENVIRONMENT, "XDG_CACHE_HOME", f"{tmp_path / 'cache'}")
    return tmp_path / "cache" / "ddpkit"


# ----------------------------------------------------------------------------------------- encoding

ANY = st.text(st.sampled_from("ab é漢1²'s.,!-\n\r\t 😀_"), max_size=30)


@pytest.mark.parametrize("name", WORDS)
@settings(max_examples=300, deadline=None, derandomize=True)
@given(left=ANY, right=ANY)
def test_a_text_cut_before_a_space_between_letters_has_the_same_tokens(name, left, right):
    left, right = f"{left}x", f" y{right}"
    assert ids(left, WORDS[name]) + ids(right, WORDS[name]) == ids(left + right, WORDS[name])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=ANY.map(lambda text: 5 * text), piece=st.integers(1, 40))
def test_the_pieces_are_the_text(text, piece):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "PIECE", piece)
        assert "".join(tokenizer.cut(raw(text))) == text


@pytest.mark.parametrize("name", WORDS)
def test_a_text_in_many_pieces_has_the_ids_of_the_whole_text(monkeypatch, cache, name):
    monkeypatch.setattr(tokenizer, "PIECE", 2000)  # each has a space between two letters
    found, words = encoded(cache, [README, "", "and more"], WORDS[name]), WORDS[name]
    assert len([*tokenizer.cut(raw(README))]) > 5
    assert found.dtype == np.uint16
    assert found.tolist() == ids(README, words) + ids("and more", words)


ENDINGS = [
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
]


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_end_of_text_token_follows_each_file(cache, ending):
    """Otherwise the model learns that one document continues in the next."""
    made = tokenizers.Tokenizer.from_str(GPT2)
    made.add_tokens(["plain"])
    made.add_special_tokens(["<|im_end|>", ending])
    words = made.to_str()
    end = [made.token_to_id(ending)]
    expected = ids("one", words) + end + ids("two\n", words) + end
    assert encoded(cache, ["one", "", "two\n"], words).tolist() == expected
    assert tokenizer.end_of_text(made) == ending
    assert tokenizer.end_of_text(tokenizers.Tokenizer.from_str(GPT2)) == ""


def test_a_sample_ends_at_the_end_of_text_token(cache, tmp_path):
    made = tokenizers.Tokenizer.from_str(GPT2)
    made.add_special_tokens(["<|endoftext|>"])
    path = tmp_path / "tokenizer.json"
    path.write_text(made.to_str())
    for name in range(300):
        (tmp_path / f"{name}.txt").write_text("the cat")
    out, data = tmp_path / "out", ["--data", tmp_path / "*.txt", "--tokenizer", path]
    ran = run(*TINY, *data, "--out", out, "--steps", 40, "--lr", 0.02, "--warmup", 0)
    assert ran.code == 0, ran
    ran = run("sample", "--out", out, "--prompt", "the", "--temperature", 0, "--num-samples", 2)
    assert ran.out == f"the cat\n{'-' * 20}\nthe cat\n", ran


def test_without_an_end_of_text_token_a_line_break_divides_two_texts(cache):
    expected = ids("one") + ids("\n") + ids("two\n") + ids("three")
    assert encoded(cache, ["one", "two\n", "", "three", ""]).tolist() == expected
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "[UNK]"}
    words = json.dumps({"version": "1.0", "added_tokens": [], "model": model})
    assert encoded(cache, ["a", "b"], words).tolist() == [0, 1]  # it has no line break


DOCUMENTS = ["one", "", "two\n", '\u2028"é😀\u0000', "x" * 200 + " y" * 50]


@pytest.mark.parametrize("ending", ["", "<|endoftext|>"])
def test_each_line_of_a_jsonl_is_a_document(monkeypatch, cache, ending):
    """It has the same ids as a text file of its own, so an end-of-text token follows it."""
    monkeypatch.setattr(tokenizer, "PIECE", 60)
    words = tokenizers.Tokenizer.from_str(GPT2)
    words.add_special_tokens([ending] if ending else [])
    lines = [json.dumps({"id": 3, "text": text, "more": {}}) for text in DOCUMENTS]
    lines[0] = f"\ufeff{lines[0]}"
    lines[3] = json.dumps({"text": DOCUMENTS[3]}, ensure_ascii=False)
    whole = "\r\n".join(lines)
    # the last file has no line break at its end
    found = encoded(cache, [f"{whole}\n", "", whole], words.to_str(), "jsonl")
    texts = encoded(cache, 2 * DOCUMENTS, words.to_str())
    assert found.tolist() == texts.tolist() and len(found) > 100


def test_json_in_a_file_of_another_name_stays_text(cache):
    line = json.dumps({"text": "a"})
    assert encoded(cache, [line], suffix="jsonl").tolist() == ids("a")
    assert encoded(cache, [line], suffix="txt").tolist() == ids(line)


LINES = {
    "a text": b"hello",
    "a list": b'["text"]',
    "no text": b'{"content": "a"}',
    "text is a list": b'{"text": ["a"]}',
    "an empty line": b"",
    "cut": b'{"text": "a',
    "half a character": b'{"text": "\\ud83d"}',
    "not UTF-8": b'{"text": "caf\xe9"}',
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("kind", LINES)
def test_a_line_of_a_jsonl_without_a_text_is_an_error_with_its_number(cache, kind):
    lines = [b'{"text": "good"}'] * 70 + [LINES[kind], b'{"text": "good"}']
    with pytest.raises(ValueError, match=r'0\.jsonl: line 71 is not .*"text"') as caught:
        encoded(cache, [b"\n".join(lines)], suffix="jsonl")
    assert "\n" not in f"{caught.value}" and len(f"{caught.value}") < 500
    assert not [*cache.glob("*/tokens*")]


def test_a_jsonl_without_text_is_an_error(cache):
    with pytest.raises(ValueError, match="no text"):
        encoded(cache, [b'{"text": ""}\n'], suffix="jsonl")


def test_the_readme_trains_a_tokenizer_for_a_run_on_json_lines(cache, tmp_path):
    """The lines of extras/README.md, with a run on a .jsonl of which a sample ends at its token."""
    (tmp_path / "mine.txt").write_text(README)
    (tmp_path / "mine.jsonl").write_text(300 * '{"text": "the cat"}\n')
    text = section((ROOT / "extras" / "README.md").read_text(), "## Tokenizers")
    (code,) = code_blocks(text, "python")
    code = code.replace("vocab_size=8192", "vocab_size=400")
    (train,) = re.findall(r"^tokenizer.train\(.*", code, re.M)
    (other,) = re.findall(r"^`(tokenizer.train_from_iterator.*)`\.$", text, re.M)
    for lines in ("import json\n" + code.replace(train, other), code):
        subprocess.run([sys.executable, "-c", lines], cwd=tmp_path, check=True)
    data = ["--data", tmp_path / "mine.jsonl", "--tokenizer", tmp_path / "tokenizer.json"]
    flags = [*data, "--out", tmp_path / "out", "--steps", 40, "--lr", 0.02, "--warmup", 0]
    assert run(*TINY, *flags, "--spawn", 2).code == 0
    ran = run("sample", "--out", tmp_path / "out", "--prompt", "the", "--temperature", 0)
    assert ran.out == "the cat\n", ran


def test_a_byte_order_mark_at_the_start_of_a_text_is_no_token(cache):
    assert encoded(cache, ["\ufeffone\n", "two"]).tolist() == ids("one\n") + ids("two")


def test_more_files_than_a_process_can_open_are_encoded(cache):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (150, limits[1]))
    try:
        assert encoded(cache, ["a\n"] * 200).tolist() == ids("a\n") * 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_text_that_cannot_be_encoded_is_an_error_with_its_place(monkeypatch, cache):
    monkeypatch.setattr(tokenizer, "PIECE", 7)
    with pytest.raises(UnicodeError, match=r"0\.txt: byte 0xe9 at 13 is not UTF-8.*iconv"):
        encoded(cache, ["é123456789é".encode() + b"\xe9 abc"])
    assert not [*cache.glob("*/tokens*")]
    with pytest.raises(ValueError, match=r"0\.txt: is empty"):
        encoded(cache, [""])


def test_files_are_encoded_once_whoever_asks_and_again_if_they_change(monkeypatch, cache, tmp_path):
    encode, begun = tokenizer._ids, []
    monkeypatch.setattr(tokenizer, "_ids", lambda *args: begun.append(1) or encode(*args))
    file = tmp_path / "a.txt"
    file.write_text(README)

    def ask(words: str = GPT2) -> str:
        return tokenizer.encode_files([f"{file}"], words, f"{cache}")

    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask) for _ in range(4)]
        assert len({future.result() for future in asked}) == len(begun) == 1
    ask(WORDS["GPT-4"])
    file.write_text(f"{README}b")
    assert np.load(ask()).tolist() == ids(f"{README}b")
    status = file.stat()
    time.sleep(0.02)  # longer than a tick of the clock of a file system
    file.write_text(f"{README}c")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))  # as tar does; the size is equal
    assert np.load(ask()).tolist() == ids(f"{README}c")
    assert len(begun) == len([*cache.glob("*/tokens.npy")]) == 4


def test_no_files_mean_the_default_text():
    corpus = tokenizer.read_corpus(chardata, [], "none", GPT2, None)
    assert corpus.tokens[0].tolist() == ids(chardata.default_text())
    assert (corpus.kind, corpus.vocab, corpus.chars) == ("tokenizer", 448, GPT2)  # of 400, by 64


def test_ids_that_do_not_fit_into_two_bytes_have_four(cache):
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 70000}, "unk_token": "a"}
    words = json.dumps({"version": "1.0", "added_tokens": [], "model": model})
    assert tokenizer.size(words) == 70001
    found = encoded(cache, ["b"], words)
    assert found.dtype == np.uint32 and found.tolist() == [70000]


def test_the_truncation_and_padding_of_a_tokenizer_are_switched_off():
    made = tokenizers.Tokenizer.from_str(GPT2)
    made.enable_truncation(5)
    made.enable_padding(length=9)
    assert tokenizer.encode(README[:99], "tokenizer", made.to_str()).tolist() == ids(README[:99])


# ----------------------------------------------------------------------------------------- decoding


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=st.text(st.sampled_from("ab é漢字😀\n"), min_size=1, max_size=20))
def test_decoding_ids_one_by_one_gives_the_text(text):
    pieces = [*tokenizer.decode(ids(text), "tokenizer", GPT2)]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_characters_of_several_byte_tokens_are_decoded_one_by_one():
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    model = tokenizers.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True)
    made, decoders = tokenizers.Tokenizer(model), tokenizers.decoders
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    text = "\ufffd😀漢é\ufffdx\ufffd\ufffd" * 9
    found = made.encode(text).ids
    assert len(found) == len(text.encode())
    assert "".join(tokenizer.decode(found, "tokenizer", made.to_str())) == text


def test_text_after_invalid_characters_is_decoded():
    broken = [*ids("漢")[:1] * 9, *ids("and then")]
    assert "".join(tokenizer.decode(broken, "tokenizer", GPT2)).endswith("then")


# -------------------------------------------------------------------------------------- the program


@pytest.fixture
def made(tmp_path):
    """Return (the flags of a run, its tokenizer.json, its text)."""
    path, text = tmp_path / "tokenizer.json", tmp_path / "text.txt"
    path.write_text(GPT2)
    text.write_text(README + "héllo 😀 漢字 wörld\n" * 9)
    flags = [*TINY, *"--arch gpt2 --dropout 0.1 --log-every 1 --steps 6 --save-every 3".split()]
    return [*flags, "--data", text, "--tokenizer", path], path, text


def mistaken(ran, *said):
    assert ran.code == 2 and ran.err.startswith("Error: ") and ran.err.count("\n") == 1, ran
    assert [str(part) for part in said if str(part) not in ran.err] == [], ran.err


def test_a_run_with_a_tokenizer_continues_without_the_file(made, cache, tmp_path):
    flags, path, text = made
    out = tmp_path / "out"
    ran = run(*flags, "--out", out, "--spawn", 2)
    assert ran.code == 0 and ran.err == "", ran
    assert state(out)["vocabulary"] == {"vocab": 448, "kind": "tokenizer", "chars": GPT2}
    (tokens,) = cache.glob("*/tokens.npy")
    assert np.load(tokens).tolist() == ids(text.read_text())

    path.write_text(trained(size=300))
    more = [*flags, "--out", out, "--steps", 9]
    mistaken(run(*more), f"--tokenizer {path}", "not the tokenizer of", "another --out")
    path.write_text(json.dumps(json.loads(GPT2), indent=7))  # the same, written otherwise
    assert run(*flags, "--out", out, "--steps", 7).code == 0
    path.unlink()
    shutil.rmtree(cache)
    again = run("--out", out, "--steps", 8)
    assert again.code == 0 and state(out)["step"] == 8, again

    greedy = ["--max-new-tokens", 5, "--temperature", 0]
    ran = run("sample", "--out", out, "--prompt", "The héllo 😀", *greedy)
    assert ran.code == 0 and ran.out.startswith("The héllo 😀"), ran
    ran = run("eval", "--out", out, "--data", text)
    count = len(ids(text.read_text())) - 1
    assert f"over {count:,} tokens" in ran.out, ran
    per_token, per_byte = re.findall(r"([\d.]+) bits per", ran.out)
    size = len(text.read_bytes()) - len(
        "".join(tokenizer.decode(ids(text.read_text())[:1], "", GPT2))
    )
    assert float(per_byte) == pytest.approx(float(per_token) * count / size, rel=1e-3)


def test_an_exported_model_has_the_tokenizer_and_training_starts_from_it(made, tmp_path):
    flags, path, text = made
    assert run(*flags, "--out", tmp_path / "out").code == 0
    ran = run("export", tmp_path / "out", "--format", "hf", "-o", tmp_path / "hf")
    assert ran.code == 0 and ran.err == "", ran
    begin = ["--init-from", tmp_path / "hf", "--data", text, "--steps", 2, "--log-every", 1]
    for name, more in {"its own": [], "the same": ["--tokenizer", path]}.items():
        assert run(*begin, *more, "--out", tmp_path / name).code == 0
        assert state(tmp_path / name)["vocabulary"]["vocab"] == 448
    assert same_training(tmp_path / "its own", tmp_path / "the same")
    path.write_text(trained(size=449))
    other = ["--tokenizer", path, "--out", tmp_path / "c"]
    mistaken(run(*begin, *other), path, "not the tokenizer of")
    (tmp_path / "hf" / "tokenizer.json").unlink()  # of the tokens, only their number is known
    mistaken(run(*begin, *other), "id 448", "ends at 447")


def test_validation_data_of_its_own_is_encoded_too(made, tmp_path):
    flags, path, text = made
    val, out = tmp_path / "val.txt", tmp_path / "out"
    val.write_text("and more of it")
    ran = run(*flags, "--val-data", val, "--out", out, "--spawn", 2)
    assert ran.code == 0 and run("--out", out, "--steps", 7).code == 0, ran
    expected = f"over {len(ids(val.read_text())) - 1:,} tokens"
    assert expected in ran.out and expected in run("eval", "--out", out).out
    val.write_text("and other of it")
    mistaken(run("--out", out, "--steps", 8), "has a run with other data: ", "--val-data")


def test_ids_that_another_program_made_give_the_same_training(made, tmp_path):
    flags, path, text = made
    np.save(tmp_path / "ids.npy", np.array(ids(text.read_text()), np.uint16))
    theirs = [tmp_path / "ids.npy" if flag == text else flag for flag in flags]
    ran = run(*theirs, "--out", tmp_path / "a")
    assert ran.code == 0 and run(*flags, "--out", tmp_path / "b").code == 0, ran
    assert same_training(tmp_path / "a", tmp_path / "b")


def test_data_that_cannot_be_encoded_are_an_error_of_one_line(made, tmp_path):
    other, latin = tmp_path / "other.json", tmp_path / "latin.txt"
    folder, zipped = tmp_path / "folder", tmp_path / "x.gz"
    folder.mkdir(), zipped.write_bytes(b"\x1f\x8b\x08")
    other.write_text('{"a": 1}')
    latin.write_bytes(b"caf\xe9 " * 99)
    (tmp_path / "tokenizers.py").write_text("raise ImportError")
    for more, said, env in (
        (["--tokenizer", latin], ["latin.txt: not char, byte or a tokenizer.json"], {}),
        (
            ["--tokenizer", "no/such.json"],
            ["no/such.json: not char, byte, or an existing file"],
            {},
        ),
        (["--tokenizer", other], ["not a tokenizer.json"], {}),
        (["--data", latin], ["latin.txt", "0xe9 at 3", "UTF-8"], {}),
        (["--data", zipped], ["x.gz: is a gzip file"], {}),
        (["--tokenizer", tmp_path], [f"is a folder; give {tmp_path}/tokenizer.json"], {}),
        (["--tokenizer", folder], ["is a folder without a tokenizer.json"], {}),
        (["--vocab", 300], ["id 399", "ends at 299"], {}),
        ([], ["pip install tokenizers"], {"env": {"PYTHONPATH": f"{tmp_path}"}}),
    ):
        mistaken(run(*made[0], *more, "--out", tmp_path / "out", **env), *said)
    assert not (tmp_path / "out").exists()
