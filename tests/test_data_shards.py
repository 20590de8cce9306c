"""Data that do not fit: token files in shards, of any length, at any place, more than memory or patience would take."""

import os
import signal
import subprocess
import sys
import tracemalloc
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ENVIRONMENT, ROOT, TINY, Program, losses, run, wait_for

import chardata

SHARDS = [700, 0, 1, 2000, 16, 17, 0, 1300, 5]  # tokens of each: windows of 16 lie in one, two and four of them
TOKENS = np.random.default_rng(0).integers(0, 500, sum(SHARDS), np.uint16)


def llm_c(tokens, magic=20240520, version=1, count=None):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    return header.tobytes() + np.asarray(tokens, "<u2").tobytes()


def write_shards(folder: Path, kind: str) -> str:
    """-> the glob that names them"""
    folder.mkdir(exist_ok=True)
    for i, tokens in enumerate(np.split(TOKENS, np.cumsum(SHARDS)[:-1])):
        if kind == "npy":
            np.save(folder / f"{i}.npy", tokens.astype([np.uint16, np.uint32, np.uint64, ">u2"][i % 4]))
        else:
            (folder / f"{i}.bin").write_bytes(llm_c(tokens) if kind == "llm.c" or i % 2 else tokens.tobytes())
    return f"{folder}/*.{'npy' if kind == 'npy' else 'bin'}"


# ------------------------------------------------------------------------------------------------ as one array


@pytest.mark.parametrize("kind", ["bin", "llm.c", "npy"])
def test_shards_of_unequal_lengths_and_empty_ones_train_as_one_file(kind, tmp_path):
    corpus = chardata.read(write_shards(tmp_path, kind), "char")
    assert [len(shard) for shard in corpus.shards] == [n for n in SHARDS if n]
    assert np.concatenate(corpus.shards).tolist() == TOKENS.tolist() and corpus.vocab == 512
    assert len(corpus.stamps) == len(SHARDS)  # an empty one may not grow unseen
    ours, whole = (chardata.steps(s, 16, 10, seed=3, accum=2) for s in (corpus.shards, (TOKENS,)))
    for (a, count), (b, same_count) in islice(zip(ours, whole), 60):
        assert count == same_count
        assert all(torch.equal(x, u) and torch.equal(y, v) for (x, y), (u, v) in zip(a, b, strict=True))


def test_the_program_trains_on_shards_as_on_one_file_and_goes_on_with_another_number_of_ranks(tmp_path):
    (tmp_path / "whole.bin").write_bytes(llm_c(TOKENS))
    flags = [*TINY, "--steps", 30, "--log-every", 1]
    whole = run(*flags, "--data", tmp_path / "whole.bin", "--out", tmp_path / "a")
    more = [*flags, "--data", write_shards(tmp_path / "shards", "npy"), "--out", tmp_path / "b"]
    ends = [whole, run(*more, "--steps", 10), run(*more, "--spawn", 2)]
    assert [end.code for end in ends] == [0, 0, 0], ends
    a, b = (np.array(losses(tmp_path / name)) for name in "ab")
    np.testing.assert_allclose(a, b, rtol=1e-3)


@pytest.mark.parametrize("empty", ["1.txt", "1.bin", "1.npy"])
def test_one_of_nothing_but_empty_files_is_an_error_and_one_among_others_adds_nothing(empty, tmp_path):
    def write(name, tokens):
        if name.endswith(".npy"):
            np.save(tmp_path / name, np.array(tokens, np.uint16))
        else:
            (tmp_path / name).write_bytes(bytes(tokens) if name.endswith(".txt") else np.array(tokens, "u2").tobytes())

    write(empty, [])
    with pytest.raises(ValueError, match=f"{empty}: is empty"):
        chardata.read(str(tmp_path / empty), "byte")
    write(f"2{empty[1:]}", [])
    with pytest.raises(ValueError, match=r"\*: is empty"):
        chardata.read(str(tmp_path / "*"), "char")
    write(f"0{empty[1:]}", [97, 98])
    alone, among = (chardata.read(str(tmp_path / name), "char") for name in (f"0{empty[1:]}", "*"))
    assert alone.digest == among.digest and alone.vocab == among.vocab and chardata.length(among.shards) == 2


@pytest.mark.parametrize("change", ["cut", "deleted"])
def test_a_shard_that_is_cut_or_deleted_while_training_is_named(change, tmp_path):
    data = write_shards(tmp_path / "shards", "llm.c")
    flags = [*TINY, "--data", data, "--steps", 200, "--log-every", 1, "--out", tmp_path / "out"]
    with Program(*flags) as program:
        program.read_lines(5)
        shard = tmp_path / "shards" / "7.bin"
        shard.unlink() if change == "deleted" else os.truncate(shard, 1500)
        ran = program.finish()
    if ran.code != -signal.SIGBUS:  # it was cut in the very microseconds of a read
        assert ran.code == 2 and ran.err.count("\n") == 1 and f"{shard}: changed, or is gone" in ran.err, ran


# ------------------------------------------------------------------------------------------------ llm.c's header


@pytest.mark.parametrize(
    "raw, message",
    [
        (llm_c([1, 2, 3], count=4), "1030 bytes; its header tells of 1032"),
        (llm_c([1, 2, 3], count=2), "1030 bytes; its header tells of 1028"),
        (llm_c([1, 2, 3], count=-1), "1030 bytes; its header tells of 1022"),
        (llm_c([1, 2, 3])[:-1], "1029 bytes; its header tells of 1030"),
        (llm_c([1, 2, 3])[:600], "600 bytes; its header tells of 1030"),
        (llm_c([1, 2, 3], version=7), "llm.c's header of version 7; needs version 1"),
        (llm_c([]), "is empty"),
    ],
)
def test_a_header_that_does_not_fit_its_file_is_an_error(raw, message, tmp_path):
    (tmp_path / "x.bin").write_bytes(raw)
    with pytest.raises(ValueError) as caught:
        chardata.read(str(tmp_path / "x.bin"), "char")
    assert str(tmp_path / "x.bin") in str(caught.value) and message in str(caught.value)


@pytest.mark.parametrize("size", [2, 4, 8, 10, 12, 2048])
def test_tokens_without_a_header_may_be_few(size, tmp_path):
    tokens = np.arange(size // 2, dtype="<u2")
    tokens.tofile(tmp_path / "x.bin")
    assert chardata.read(str(tmp_path / "x.bin"), "char").shards[0].tolist() == tokens.tolist()


# ------------------------------------------------------------------------------------------------ the vocabulary


def test_a_vocabulary_that_is_given_is_taken_and_the_tokens_are_not_read_through(tmp_path):
    data = str(tmp_path / "x.bin")
    with open(data, "wb") as file:
        file.truncate((1 << 30) + 2)  # sparse: it takes no room
    assert chardata.read(data, "char", vocab=50257).vocab == 50257
    with pytest.raises(ValueError, match="x.bin: 1.0 GiB of tokens .* vocab has to be given"):
        chardata.read(data, "char")


@pytest.mark.parametrize("dtype, top", [(np.uint16, 100), (np.uint64, 100), (np.uint64, 2**64 - 1)])
@pytest.mark.parametrize("shards", [1, 3])
def test_an_id_that_is_not_below_the_vocabulary_never_becomes_a_batch(dtype, top, shards, tmp_path):
    for i in range(shards):
        tokens = np.full(200, 99, dtype)
        tokens[77] = top if i == shards - 1 else 0
        np.save(tmp_path / f"{i}.npy", tokens)
    corpus = chardata.read(str(tmp_path / "*.npy"), "char", vocab=100)
    named = f"{shards - 1}.npy: has the id {top}, and the vocabulary ends at 99"
    for read in (chardata.steps, chardata.every_window):
        with pytest.raises(ValueError, match=named):
            list(islice(read(corpus.shards, 16, 4, vocab=100), 100))
        if top == 100:
            assert list(islice(read(corpus.shards, 16, 4, vocab=101), 100))


def test_a_rank_without_a_window_has_no_id_to_be_checked():
    assert next(chardata.steps((TOKENS[:40],), 16, 8, rank=1, world_size=3, vocab=500))[1] in (0, 16)


def test_the_program_says_which_id_is_too_high_and_keeps_the_vocabulary_that_it_was_given(tmp_path):
    data = write_shards(tmp_path / "shards", "bin")
    flags = [*TINY, "--data", data, "--steps", 3, "--out", tmp_path / "out"]
    low = run(*flags, "--vocab", 300)
    assert low.code == 2 and low.err.count("\n") == 1 and "the vocabulary ends at 299" in low.err, low
    assert run(*flags, "--vocab", 777, "--fresh").code == 0
    assert run(*flags, "--steps", 5).code == 0
    other = run(*flags, "--vocab", 512, "--steps", 7)
    assert other.code == 2 and "--vocab 512 contradicts" in other.err and "--vocab 777" in other.err, other
    (tmp_path / "high.bin").write_bytes(np.full(100, 777, np.uint16).tobytes())
    (tmp_path / "x.txt").write_text("text " * 100)
    for name, said in (("high.bin", "the vocabulary ends at 776"), ("x.txt", "is text")):
        ran = run("eval", "--data", tmp_path / name, "--out", tmp_path / "out")
        assert ran.code == 2 and ran.err.count("\n") == 1 and name in ran.err and said in ran.err, ran


def test_a_vocabulary_for_a_text_is_a_mistake(text, tmp_path):
    ran = run(*TINY, "--data", text, "--vocab", 100, "--out", tmp_path / "out")
    assert ran.code == 2 and ran.err.count("\n") == 1 and "is text" in ran.err and not (tmp_path / "out").exists(), ran


# ------------------------------------------------------------------------------------------------ how much it costs


def cost(n: int, shards: int) -> tuple[int, int]:
    """(calls of functions, Python's and numpy's; the most memory at any moment) of four batches of n tokens, none of
    which is anywhere: each shard is one token, repeated by a stride of 0."""
    ends = np.linspace(0, n, shards + 1).astype(np.int64)
    tokens = tuple(np.broadcast_to(np.uint16(k), size) for k, size in enumerate(np.diff(ends)))
    steps, calls = chardata.steps(tokens, 128, 16, seed=1, start=200), 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    tracemalloc.start()
    sys.setprofile(count)
    try:
        for _ in islice(steps, 4):
            pass
    finally:
        sys.setprofile(None)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return calls, peak


@pytest.mark.parametrize("shards", [1, 10])
def test_ten_to_the_eleven_windows_take_the_calls_and_the_memory_of_ten_to_the_five(shards):
    cost(128 * 10**5, shards)  # whatever is done once
    (few_calls, few_bytes), (calls, size) = (cost(128 * n, shards) for n in (10**5, 10**11))
    assert calls <= 1.1 * few_calls and size <= 1.1 * few_bytes, (few_calls, calls, few_bytes, size)


def test_a_thousand_large_shards_are_told_apart_by_little_of_each():
    shards = [np.zeros(1 << 22, np.uint8)] * 1000  # 4 GiB, were they different
    altered = shards[0].copy()
    altered[-1] = 1

    class Counted(np.ndarray):
        read = 0

        def __getitem__(self, where):
            Counted.read += where.stop - where.start
            return np.asarray(self)[where]

    whole = chardata.digest([shard.view(Counted) for shard in shards])
    assert 0 < Counted.read <= 1 << 28
    assert whole != chardata.digest([*shards[:-1], altered])


# ------------------------------------------------------------------------------------------------ one copy per node

ASK = """
import sys, chardata
from fsspec.implementations.local import LocalFileSystem

fetch = LocalFileSystem.get_file
def seen(self, name, copy, **how):  # which then goes on as ever
    with open(sys.argv[2], "a") as file:
        file.write("fetched\\n")
    if sys.argv[3:]:
        open(copy, "w").write("half of it")
        sys.stdin.read()
    fetch(self, name, copy, **how)
LocalFileSystem.get_file = seen
sys.stdin.read(1)
print(chardata.read(sys.argv[1], "char").digest)
"""


def asking(data: str, folder: Path, *hanging: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", ASK, data, folder / "fetched", *hanging],
        env={**ENVIRONMENT, "XDG_CACHE_HOME": f"{folder}/cache", "PYTHONPATH": f"{ROOT}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_ranks_that_ask_at_once_get_one_copy_and_one_that_died_is_in_nobodys_way(tmp_path, monkeypatch):
    data = write_shards(tmp_path / "shards", "bin").replace(f"{tmp_path}", f"file://{tmp_path}")
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/cache")
    dying, *ranks = asking(data, tmp_path, "hanging"), *(asking(data, tmp_path) for _ in range(4))
    dying.stdin.write("\n")
    dying.stdin.flush()
    wait_for(lambda: list((tmp_path / "cache").rglob("*.part")), "half a copy")
    for rank in ranks:
        rank.stdin.write("\n")
        rank.stdin.flush()
    dying.kill()
    dying.communicate()
    digests = {rank.communicate(timeout=60)[0] for rank in ranks}
    assert digests == {f"{chardata.read(data, 'char').digest}\n"}
    assert (tmp_path / "fetched").read_text().count("\n") == 1 + len(SHARDS)
    assert not list((tmp_path / "cache").rglob("*.part"))
