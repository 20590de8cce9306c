"""--tokens tokenizer.json: text to the tokens of a tokenizer made elsewhere, and back."""

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import ENVIRONMENT, ROOT, TINY, checkpoints, run, same_training, state
from hypothesis import given, settings
from hypothesis import strategies as st

tokenizers = pytest.importorskip("tokenizers")
from extras import exchange, tokenizer  # noqa: E402

README = (ROOT / "README.md").read_text()
GPT4 = (  # the pattern that GPT-4's tokenizer, and Llama 3's, split text with
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def trained(pattern: str = "", size: int = 400) -> str:
    """The tokenizer.json of a byte-level BPE, with GPT-2's pre-tokenizer if no other pattern is given."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern)
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, level]) if pattern else level
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([README, "héllo 😀 漢字 wörld\n" * 9], trainer)
    return made.to_str()


WORDS = {"GPT-2": trained(), "GPT-4": trained(GPT4)}


def ids(text: str, words: str) -> list[int]:
    """As the package has them, of the text in one."""
    return tokenizers.Tokenizer.from_str(words).encode(text, add_special_tokens=False).ids


def raw(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path / 'cache'}")
    monkeypatch.setitem(ENVIRONMENT, "XDG_CACHE_HOME", f"{tmp_path / 'cache'}")
    return tmp_path / "cache" / "ddpkit"


# ------------------------------------------------------------------------------------------------------ encoding

ANY = st.text(st.sampled_from("ab é漢1²'s.,!-\n\r\t 😀_"), max_size=30)


@pytest.mark.parametrize("name", WORDS)
@settings(max_examples=300, deadline=None)
@given(left=ANY, right=ANY)
def test_a_text_cut_before_a_space_between_letters_has_the_same_tokens(name, left, right):
    left, right = f"{left}x", f" y{right}"
    assert ids(left, WORDS[name]) + ids(right, WORDS[name]) == ids(left + right, WORDS[name])


@settings(max_examples=200, deadline=None)
@given(text=ANY.map(lambda text: 5 * text), piece=st.integers(1, 40))
def test_the_pieces_are_the_text(text, piece):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "PIECE", piece)
        assert "".join(tokenizer.cut(raw(text))) == text


@pytest.mark.parametrize("name", WORDS)
def test_a_text_in_many_pieces_has_the_tokens_of_the_text_in_one(monkeypatch, name):
    monkeypatch.setattr(tokenizer, "PIECE", 2000)  # of prose: each has a space between two letters
    found = np.load(tokenizer.encoded([raw(README), raw("and more")], "", WORDS[name]))
    assert len([*tokenizer.cut(raw(README))]) > 10
    assert found.dtype == np.uint16 and found.tolist() == ids(README, WORDS[name]) + ids("and more", WORDS[name])


def test_what_is_not_utf8_is_said_with_its_place(monkeypatch, cache):
    monkeypatch.setattr(tokenizer, "PIECE", 7)
    with pytest.raises(UnicodeError, match="0xe9 at 13"):
        tokenizer.encoded([np.frombuffer("é123456789é".encode() + b"\xe9 abc", np.uint8)], "", WORDS["GPT-2"])
    assert not [*cache.glob("*/tokens*")]


def test_a_text_is_encoded_once_however_many_ask(monkeypatch, cache):
    encode, begun = tokenizer._tokens, []
    monkeypatch.setattr(tokenizer, "_tokens", lambda *args: begun.append(1) or encode(*args))
    with ThreadPoolExecutor(4) as pool:
        ask = [pool.submit(tokenizer.encoded, [raw(README)], "a", WORDS["GPT-2"]) for _ in range(4)]
        assert len({future.result() for future in ask}) == len(begun) == 1
    tokenizer.encoded([raw(README + "b")], "b", WORDS["GPT-2"])
    tokenizer.encoded([raw(README)], "a", WORDS["GPT-4"])
    assert len(begun) == len([*cache.glob("*/tokens.npy")]) == 3


def test_tokens_that_do_not_fit_two_bytes_have_four():
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 70000}, "unk_token": "a"}
    words = json.dumps({"version": "1.0", "added_tokens": [], "model": model})
    assert tokenizer.size(words) == 70001
    found = np.load(tokenizer.encoded([raw("b")], "", words))
    assert found.dtype == np.uint32 and found.tolist() == [70000]


def test_a_tokenizer_that_cuts_its_texts_off_does_not_here():
    made = tokenizers.Tokenizer.from_str(WORDS["GPT-2"])
    made.enable_truncation(5)
    made.enable_padding(length=9)
    assert tokenizer.encode(README[:99], made.to_str()).tolist() == ids(README[:99], WORDS["GPT-2"])


# ------------------------------------------------------------------------------------------------------ decoding

CHARACTERS = st.text(st.sampled_from("ab é漢字😀\n"), min_size=1, max_size=20)


@settings(max_examples=200, deadline=None)
@given(prompt=CHARACTERS, text=CHARACTERS)
def test_what_comes_token_by_token_is_the_text(prompt, text):
    before, after = (tokenizer.encode(part, WORDS["GPT-2"]).tolist() for part in (prompt, text))
    pieces = [*tokenizer.decoded(before, after, WORDS["GPT-2"])]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_of_broken_characters_the_rest_is_still_told():
    broken = [*ids("漢", WORDS["GPT-2"])[:1] * 9, *ids("and then", WORDS["GPT-2"])]
    assert "".join(tokenizer.decoded([], broken, WORDS["GPT-2"])).endswith("then")


@settings(max_examples=100, deadline=None)
@given(text=CHARACTERS, piece=st.integers(1, 9), shards=st.integers(1, 3))
def test_characters_are_counted_across_pieces_and_shards(text, piece, shards):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "PIECE", piece)
        found = np.array(ids(f"a\n{text}", WORDS["GPT-2"]), np.uint16)
        assert (
            tokenizer.count_characters(np.array_split(found, shards), WORDS["GPT-2"]) == len(text) + 1
        )  # all but the a


# --------------------------------------------------------------------------------------------------- the program


@pytest.fixture
def made(tmp_path):
    """(the flags of a run, its tokenizer.json, its text)."""
    path, text = tmp_path / "tokenizer.json", tmp_path / "text.txt"
    path.write_text(WORDS["GPT-2"])
    text.write_text(README + "héllo 😀 漢字 wörld\n" * 9)
    flags = [*TINY, "--arch", "gpt2", "--dropout", 0.1, "--log-every", 1, "--steps", 6, "--save-every", 3]
    return [*flags, "--data", text, "--tokens", path], path, text


def mistaken(ran, *said):
    assert ran.code == 2 and ran.err.startswith("Error: ") and ran.err.count("\n") == 1, ran
    assert [str(part) for part in said if str(part) not in ran.err] == [], ran.err


def test_a_run_on_a_tokenizers_tokens_goes_on_without_its_file(made, cache, tmp_path):
    flags, path, text = made
    out = tmp_path / "out"
    ran = run(*flags, "--out", out, "--spawn", 2)
    assert ran.code == 0 and ran.err == "", ran
    saved, (tokens,) = state(out), cache.glob("*/tokens.npy")
    assert saved["vocabulary"] == {"vocab": 448, "kind": "tokenizer", "chars": WORDS["GPT-2"]}  # of 400, by 64
    assert np.load(tokens).tolist() == ids(text.read_text(), WORDS["GPT-2"])

    path.write_text(json.dumps(json.loads(trained(size=300))))
    mistaken(run(*flags, "--out", out, "--steps", 9), f"--tokens {path}", "not the tokenizer of", "--fresh")
    mistaken(run(*flags, "--out", out, "--steps", 9, "--tokens", "char"), "--tokens char contradicts")
    path.write_text(json.dumps(json.loads(WORDS["GPT-2"]), indent=7))  # the same, written otherwise
    assert run(*flags, "--out", out, "--steps", 7).code == 0
    path.unlink()
    shutil.rmtree(cache)
    again = run("--out", out, "--steps", 8)
    assert again.code == 0 and state(out)["step"] == 8, again

    greedy = run("sample", "--out", out, "--prompt", "The héllo 😀", "--tokens", 5, "--temperature", 0)
    assert greedy.code == 0 and greedy.out.startswith("The héllo 😀"), greedy
    told = run("eval", "--out", out, "--data", text)
    pattern = r"loss ([\d.]+) .* ([\d.]+) bits per character over (\d+) tokens"
    nats, bits, count = map(float, re.findall(pattern, told.out.replace(",", ""))[0])
    tokens = ids(text.read_text(), WORDS["GPT-2"])
    characters = len(text.read_text()) - 1  # the first token is "#"
    assert count == len(tokens) - 1 and bits == pytest.approx(nats * count / characters / np.log(2), rel=1e-3)
    assert "448 tokens of kind tokenizer" in run("info", out).out


def test_what_is_exported_has_the_tokenizer_and_is_begun_with_again(made, tmp_path):
    transformers = pytest.importorskip("transformers")
    flags, path, text = made
    assert run(*flags, "--out", tmp_path / "out").code == 0
    ran = run("export", tmp_path / "out", "--format", "hf", "-o", tmp_path / "hf")
    assert ran.code == 0 and ran.err == "", ran
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    some = "The héllo 😀 漢字\n\n  x = 1\n"
    assert theirs(some)["input_ids"] == ids(some, WORDS["GPT-2"]) and theirs.decode(ids(some, WORDS["GPT-2"])) == some
    found = exchange.read(f"{tmp_path / 'hf'}").vocabulary
    assert found["kind"] == "tokenizer" and json.loads(found["chars"]) == json.loads(WORDS["GPT-2"])

    begin = ["--init-from", tmp_path / "hf", "--data", text, "--steps", 2, "--log-every", 1, "--dtype", "float32"]
    for name, more in {"its own": [], "the same": ["--tokens", path]}.items():
        assert run(*begin, *more, "--out", tmp_path / name).code == 0
        assert state(tmp_path / name)["vocabulary"]["vocab"] == 448
    assert same_training(tmp_path / "its own", tmp_path / "the same")
    path.write_text(trained(size=449))
    mistaken(run(*begin, "--tokens", path, "--out", tmp_path / "c"), path, "not the tokenizer of")

    (tmp_path / "hf" / "tokenizer.json").unlink()  # a GPT-2 that says nothing of its tokens: of 448 it has to be
    mistaken(run(*begin, "--tokens", path, "--out", tmp_path / "c"), "id 448", "ends at 447")
    path.write_text(WORDS["GPT-2"])
    assert run(*begin, "--tokens", path, "--out", tmp_path / "c").code == 0
    assert not [*(tmp_path / "c").glob("*.damaged")] and len(checkpoints(tmp_path / "c")) == 1


def test_ids_that_were_made_elsewhere_are_told_as_text(made, tmp_path):
    flags, path, text = made
    np.save(tmp_path / "ids.npy", np.array(ids(text.read_text(), WORDS["GPT-2"]), np.uint16))
    ran = run(*flags, "--out", tmp_path / "a", "--data", tmp_path / "ids.npy")
    assert ran.code == 0 and run(*flags, "--out", tmp_path / "b").code == 0, ran
    assert same_training(tmp_path / "a", tmp_path / "b")


WRONG = {
    "no tokenizer": (["--tokens", "setup.cfg"], ["--tokens setup.cfg: is not char, byte or"]),
    "no such file": (["--tokens", "no/such.json"], ["--tokens no/such.json", "No such file"]),
    "other JSON": (["--tokens", "other.json"], ["not a tokenizer.json"]),
    "not text": (["--data", "latin.txt"], ["latin.txt: not UTF-8", "0xe9 at 3", "--tokens byte"]),
    "too few ids": (["--vocab", 300], ["id 399", "ends at 299"]),
    "no package": ([], ["pip install tokenizers"]),
}


def test_what_cannot_be_tokens_is_one_line(made, tmp_path):
    (tmp_path / "other.json").write_text('{"a": 1}')
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 99)
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "tokenizers.py").write_text("raise ImportError")
    for name, (more, said) in WRONG.items():
        more = [tmp_path / part if (tmp_path / f"{part}").exists() else part for part in more]
        env = {"PYTHONPATH": f"{tmp_path / 'without'}"} if name == "no package" else {}
        mistaken(run(*made[0], *more, "--out", tmp_path / "out", env=env), *said)
    assert not (tmp_path / "out").exists()
