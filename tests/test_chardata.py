"""Tests of chardata.py. Many use tokens that count up from 0, so that a token tells its position."""

import bz2
import gzip
import io
import lzma
import math
import os
import random
import re
import resource
import subprocess
import sys
from collections import Counter
from functools import partial
from itertools import accumulate, islice
from pathlib import Path

import numpy as np
import pytest
import torch

import chardata
from chardata import BatchPlan

WORLD_SIZES, ACCUMS = range(1, 6), range(1, 4)
TEXTS = {
    "ascii": "the quick brown fox",
    "one character": "aaaa",
    "emoji": "👩‍👩‍👧‍👦 and 🏳️‍🌈, 👍🏽",
    "combining": "e\u0301 is not \u00e9; n\u0303, Z\u0351\u036b\u0343",
    "CJK": "人人生而自由，𠮷野家、日本語。한국어",
    "newlines": "unix\nwindows\r\nmac\rnext\x85line\u2028paragraph\u2029form\x0cend",
    "control": "\x00\x01\x7f\ufeff\ufffe\U0010ffff",
}


def ramp(n, dtype=np.uint32):
    """Return the tokens 0, 1, ..., n - 1 in one array."""
    return (np.arange(n, dtype=dtype),)


def cut(array, lengths):
    return tuple(np.split(array, np.cumsum(lengths)[:-1]))


def read(path, kind, chars="", vocab=None):
    return chardata.read(chardata.list_files(str(path)), kind, chars, vocab)


def texts(corpus):
    """Return each array of a corpus of kind "char" or "byte" as a text."""
    return ["".join(chardata.decode(a.tolist(), corpus.kind, corpus.chars)) for a in corpus.tokens]


def steps(plan, count, **options):
    return list(islice(chardata.steps(plan, **options), count))


def chi_square_bound(df):
    """Return mean + 6 standard deviations of the chi-square distribution (exceeded once in 10^4)."""
    return df + 6 * math.sqrt(2 * df)


# ------------------------------------------------------------------------------------ permutation


def test_permute_is_a_bijection_for_every_n_to_2000():
    for n in range(1, 2001):
        assert np.array_equal(np.sort(chardata.permute(np.arange(n), n, key=n)), np.arange(n)), n


@pytest.mark.parametrize("n", [10**6, 2**31 + 11, 2**53 + 1, 2**62 - 57])
def test_permute_of_a_huge_range_stays_in_the_range_without_collisions(n):
    some = np.arange(50_000)
    index = np.concatenate([some, some * (n // 10**5) + 50_000, n - 1 - some])
    places = chardata.permute(index, n, key=3)
    assert places.dtype == np.int64 and len(np.unique(places)) == len(np.unique(index))
    assert n > places.max() > 0.99 * n > 0.01 * n > places.min() >= 0


def test_the_order_has_known_values_so_that_old_runs_resume_in_the_same_order():
    assert chardata.permute(np.arange(8), 1000, 0).tolist() == KNOWN_PLACES
    assert chardata.permute(np.arange(8), 1024, 5).tolist() == KNOWN_PLACES_OF_A_SQUARE
    huge = chardata.permute(np.array([[0, 1, 10**15]]), 10**15 + 37, 2**64 - 1)
    assert huge.tolist() == [KNOWN_HUGE_PLACES]
    n = np.arange(5).sum()  # NumPy would mix its int64 with uint64 to float64.
    assert chardata.rank_indices(n, 0, 1, epoch=3, seed=7).tolist() == KNOWN_INDICES


def test_permute_does_not_change_its_argument():
    index = np.arange(100, dtype=np.uint64)
    assert not np.array_equal(chardata.permute(index, 100, key=1), index)
    assert np.array_equal(index, np.arange(100))


def test_over_many_epochs_each_of_the_24_orders_of_four_comes_equally_often():
    epochs = 3000
    orders = (tuple(chardata.rank_indices(4, 0, 1, epoch, seed=1)) for epoch in range(epochs))
    counts, expected = Counter(orders), epochs / 24
    assert len(counts) == 24
    statistic = sum((count - expected) ** 2 / expected for count in counts.values())
    assert statistic < chi_square_bound(23)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("n", [1, 2, 3, 10, 101])
def test_the_indices_of_all_ranks_are_a_partition(n, world_size):
    parts = [chardata.rank_indices(n, r, world_size, epoch=2, seed=5) for r in range(world_size)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(n))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("n", [1, 2, 3, 10, 101])
def test_with_padding_all_ranks_have_equally_many_indices_and_repeat_the_first_ones(n, world_size):
    """Otherwise a plain loop over a DataLoader aborts when the first rank has no batch left."""
    parts = [
        chardata.rank_indices(n, r, world_size, epoch=2, seed=5, pad=True)
        for r in range(world_size)
    ]
    together = np.stack(parts, 1).ravel()  # np.stack refuses parts of different lengths
    assert len(together) < n + world_size
    order = chardata.rank_indices(n, 0, 1, epoch=2, seed=5)
    assert np.array_equal(together, np.resize(order, len(together)))


PLAN = BatchPlan(ramp(100), 4, 2)
WRONG_ARGUMENTS = {
    "rank 2 is not one of 2 ranks, which count from 0": {"rank": 2, "world_size": 2},
    "rank -1 is not one of 2 ranks": {"rank": -1, "world_size": 2},
    "rank 0 is not one of 0 ranks": {"world_size": 0},
    "batch_size is 0; must be at least 1": {"plan": PLAN._replace(batch_size=0)},
    "block_size is 0; must be at least 1": {"plan": PLAN._replace(block_size=0)},
    "accum is 0; must be at least 1": {"accum": 0},
    "n is 0; must be at least 1": {"n": 0},
}


def test_one_loader_with_persistent_workers_gives_the_rows_of_each_epoch():
    """The workers start once, in the first epoch. Each rank's loader knows its own length."""
    data = torch.utils.data.TensorDataset(torch.arange(11))
    for rank in range(2):
        sampler = chardata.RankSampler(11, rank, 2, seed=5)
        loader = torch.utils.data.DataLoader(
            data, batch_size=2, sampler=sampler, num_workers=1, persistent_workers=True
        )
        for epoch in (0, 3):
            sampler.set_epoch(epoch)
            rows = torch.cat([row for (row,) in loader]).tolist()
            assert rows == chardata.rank_indices(11, rank, 2, epoch, seed=5).tolist()
        assert (len(sampler), len(loader)) == (6 - rank, 3)
        assert len(chardata.RankSampler(11, rank, 2, pad=True)) == 6


@pytest.mark.parametrize("message", WRONG_ARGUMENTS)
def test_arguments_that_select_no_data_or_that_of_another_rank_are_refused(message):
    """Otherwise rank 2 of 2 would train on the windows of the next step, without an error."""
    how = WRONG_ARGUMENTS[message]
    plan, rank = {"plan": PLAN}, {"rank": 0, "world_size": 1}
    calls = [
        (chardata.steps, plan | rank | {"accum": 1}),
        (chardata.every_window, plan | rank),
        (chardata.steps_per_epoch, plan),
        (chardata.rank_indices, rank | {"n": 9, "epoch": 0, "seed": 0}),
    ]
    calls = [(function, right) for function, right in calls if how.keys() <= right.keys()]
    assert calls
    for function, right in calls:
        with pytest.raises(ValueError, match=message):
            next(function(**right | how))


class RandomNumbers(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor([torch.rand(()), np.random.rand(), random.random()])


@pytest.mark.parametrize("with_generator", [False, True])
def test_workers_of_all_ranks_draw_the_same_numbers_unless_they_get_the_documented_generator(
    with_generator,
):
    """rank_indices documents both. Otherwise all ranks augment their rows alike."""
    drawn = []
    for rank, epoch in [(0, 0), (1, 0), (0, 1), (0, 0)]:
        torch.manual_seed(5)
        seeded = torch.Generator().manual_seed(epoch * 2 + rank) if with_generator else None
        loader = torch.utils.data.DataLoader(RandomNumbers(), num_workers=2, generator=seeded)
        drawn.append(torch.cat([*loader]))
    first, other_rank, other_epoch, again = drawn
    assert torch.equal(first, again)
    assert (first == other_rank).any() == (first == other_epoch).any() == (not with_generator)


# ------------------------------------------------------------------------------------------ steps


def global_batches(n, block_size, batch_size, count, world_size=1, accum=1, seed=0, **options):
    """For each step, return the sorted first tokens of the windows of all ranks.

    What must hold for each rank alone is checked here.
    """
    plan = BatchPlan(ramp(n), block_size, batch_size, seed)
    options = {**options, "world_size": world_size, "accum": accum}
    ranks = [steps(plan, count, rank=rank, **options) for rank in range(world_size)]
    batches = []
    for of_ranks in zip(*ranks, strict=True):
        firsts, shares, totals = [], [], set()
        for micro_batches, total in of_ranks:
            for x, y in micro_batches:
                assert x.dtype == y.dtype == torch.int64
                assert x.shape == y.shape == (len(x), block_size)
                assert torch.equal(x, x[:, :1] + torch.arange(block_size))
                assert torch.equal(y, x + 1) and y.max() < n
            sizes = [len(x) for x, _ in micro_batches]
            if total:
                assert len(sizes) == min(accum, sum(sizes))
                assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
                firsts += [int(first) for x, _ in micro_batches for first in x[:, 0]]
                totals.add(total)
            else:
                assert sizes == [1]  # the window of a rank that has none
            shares.append(sum(sizes) if total else 0)
        assert max(shares) - min(shares) <= 1
        assert totals == {sum(shares) * block_size}
        batches.append(sorted(firsts))
    assert len(batches) == count
    return batches


@pytest.mark.parametrize("batch_size", [1, 4, 5, 6, 7, 24, 64])
def test_an_epoch_has_each_window_once_and_equal_batches_for_any_world_size_and_accum(batch_size):
    n, block_size, epochs = 103, 4, 2
    windows = chardata.num_windows(n, block_size)
    per_epoch = math.ceil(windows / batch_size)
    assert chardata.steps_per_epoch(BatchPlan(ramp(n), block_size, batch_size)) == per_epoch
    alone = global_batches(n, block_size, batch_size, epochs * per_epoch)
    for epoch in range(epochs):
        batches = alone[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert [len(batch) for batch in batches[:-1]] == [batch_size] * (per_epoch - 1)
        firsts = sorted(sum(batches, []))
        assert firsts == list(range(firsts[0], firsts[0] + windows * block_size, block_size))
    for world_size in WORLD_SIZES:
        for accum in ACCUMS:
            count = epochs * per_epoch
            assert global_batches(n, block_size, batch_size, count, world_size, accum) == alone


def test_an_epoch_that_is_too_long_to_read_at_once_has_each_window_once():
    n, block_size, batch_size = 400_001, 1000, 60  # 7 steps, of which 4 are read at once
    alone = global_batches(n, block_size, batch_size, 7)
    firsts = sum(alone, [])
    assert len(set(firsts)) == len(firsts) == chardata.num_windows(n, block_size) == 399
    assert global_batches(n, block_size, batch_size, 7, world_size=2, accum=2) == alone
    assert global_batches(n, block_size, batch_size, 4, start=3) == alone[3:]


@pytest.mark.parametrize("n, block_size", [(103, 4), (9, 8), (16, 8), (17, 8)])
def test_the_windows_of_an_epoch_are_contiguous_and_begin_at_every_possible_offset(n, block_size):
    """Otherwise some tokens would never be used."""
    count, offsets = chardata.num_windows(n, block_size), set()
    for ((x, y),), total in steps(BatchPlan(ramp(n), block_size, count), 200):
        offset = int(x.min())
        offsets.add(offset)
        assert sorted(y.flatten().tolist()) == [*range(offset + 1, offset + 1 + total)]
        assert total == count * block_size
    assert offsets == set(range(n - count * block_size))


def test_the_seed_decides_order_and_offset_and_is_0_by_default():
    a, same, other = (global_batches(1000, 7, 5, 40, seed=seed) for seed in (0, 0, 1))
    assert a == same != other and BatchPlan((), 1, 1).seed == 0


def test_steps_give_known_windows_so_that_old_runs_resume_with_the_same_data():
    some = steps(BatchPlan(ramp(1000), 16, 5, seed=7), 3, start=20)
    firsts = [[int(first) for x, _ in micro for first in x[:, 0]] for micro, _ in some]
    assert firsts == KNOWN_FIRSTS


@pytest.mark.parametrize("options", [{}, {"rank": 1, "world_size": 3, "accum": 2}])
def test_starting_at_a_step_equals_skipping_to_the_step(options):
    """Otherwise a resumed run would see other data."""
    plan = BatchPlan(ramp(103), 4, 5)
    whole = steps(plan, 20, **options)
    for start in range(15):
        assert f"{steps(plan, 5, start=start, **options)}" == f"{whole[start : start + 5]}"


@pytest.mark.parametrize("n, block_size, batch_size", [(103, 4, 6), (103, 4, 100), (50, 1, 7)])
def test_tokens_before_a_step_are_the_sum_of_the_counts_before(n, block_size, batch_size):
    plan = BatchPlan(ramp(n), block_size, batch_size)
    totals = [total for _, total in steps(plan, 30)]
    before = [chardata.tokens_before(plan, step) for step in range(31)]
    assert before == [0, *accumulate(totals)]


def test_too_few_tokens_for_a_window_is_an_error_that_names_both_numbers():
    assert chardata.num_windows(9, 8) == 1
    with pytest.raises(ValueError, match="8 tokens are too few: block size 8 needs 9"):
        next(chardata.steps(BatchPlan(ramp(8), 8, 1)))


# ----------------------------------------------------------------------------------- every window


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_window_has_each_token_but_the_first_once_as_a_target(world_size):
    block_size, batch_size = 4, 3
    for n in range(60):
        plan = BatchPlan(ramp(n), block_size, batch_size)
        ranks = [
            list(chardata.every_window(plan, rank=rank, world_size=world_size))
            for rank in range(world_size)
        ]
        batches = sum(ranks, [])
        for x, y in batches:
            assert x.dtype == y.dtype == torch.int64 and torch.equal(y, x + 1)
            assert len(x) <= batch_size and (x[:, 0] % block_size == 0).all()
            assert torch.equal(x, x[:, :1] + torch.arange(x.shape[1]))
        targets = sorted(token for _, y in batches for token in y.flatten().tolist())
        assert targets == list(range(1, n))
        assert max(map(len, ranks)) - min(map(len, ranks)) <= 1


# ----------------------------------------------------------------------- several arrays, and split

LENGTHS = [[103], [5, 1, 60, 2, 2, 33], [1] * 103, [3, 100], [100, 3], [50, 53]]


def assert_same_batches(a, b):
    pairs = list(zip(a, b, strict=True))
    assert pairs
    for (x, y), (u, v) in pairs:
        assert torch.equal(x, u) and torch.equal(y, v)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_several_arrays_are_read_as_one(lengths):
    whole = np.random.default_rng(0).integers(0, 2**16, 103).astype(np.uint16)
    ours, reference = BatchPlan(cut(whole, lengths), 8, 5), BatchPlan((whole,), 8, 5)
    for options in ({}, {"rank": 1, "world_size": 2, "accum": 2}):
        some, same = steps(ours, 12, **options), steps(reference, 12, **options)
        assert len(some) == 12
        for (a, total), (b, same_total) in zip(some, same, strict=True):
            assert total == same_total
            assert_same_batches(a, b)
    assert_same_batches(chardata.every_window(ours), chardata.every_window(reference))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(
    "fraction, max_val, cut_at, stop",
    [
        (0, 0, 103, 103),
        (0.3, 0, 72, 103),
        (0.3, 1, 72, 74),
        (0.3, 30, 72, 103),
        (0.3, 99, 72, 103),
        (1, 0, 0, 103),
    ],
)
def test_a_split_is_by_position_and_copies_nothing(lengths, fraction, max_val, cut_at, stop):
    arrays = cut(ramp(103)[0], lengths)
    before, after = chardata.split(arrays, fraction, max_val)
    assert [token for array in before for token in array] == list(range(cut_at))
    assert [token for array in after for token in array] == list(range(cut_at, stop))
    for array in (*before, *after):
        assert len(array) and any(np.shares_memory(array, a) for a in arrays)


# ------------------------------------------------------------------------------------ ids too high


@pytest.mark.parametrize("dtype, top", [("u2", 100), ("u8", 2**64 - 1)])
def test_an_id_that_is_not_below_the_vocabulary_never_becomes_a_batch(dtype, top):
    """On a GPU, it would be an assertion in a kernel, which names no token."""
    tokens = np.full(200, 99, dtype)
    tokens[77] = top
    plan = BatchPlan((np.zeros(50, "u1"), tokens), 16, 4, vocab=100)
    for batches in (chardata.steps, chardata.every_window):
        message = f"the tokens have the id {top}; the vocabulary ends at 99"
        with pytest.raises(ValueError, match=message):
            list(islice(batches(plan), 100))
        if top == 100:
            assert list(islice(batches(plan._replace(vocab=101)), 100))


# ------------------------------------------------------------------------------------- vocabulary


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_any_text_comes_back_byte_for_byte(text, tmp_path):
    (tmp_path / "text").write_bytes(text.encode())
    for kind, chars in [("char", "".join(sorted(set(text)))), ("byte", "")]:
        corpus = read(tmp_path / "text", kind)
        assert (corpus.kind, corpus.chars) == (kind, chars)
        assert corpus.vocab == (len(chars) or 256)
        assert list(chardata.decode(corpus.tokens[0].tolist(), kind, chars)) == list(text)
        assert np.array_equal(chardata.encode(text, kind, chars), corpus.tokens[0])
        # A later change of a text that is in memory does no harm.
        assert len(corpus.stamps) == (kind == "byte")


@pytest.mark.parametrize("count, bits", [(1, 8), (256, 8), (257, 16), (65536, 16), (65537, 32)])
def test_a_vocabulary_of_any_size_round_trips_in_the_smallest_type(count, bits):
    chars = "".join(chr(i if i < 0xD800 else i + 0x800) for i in range(count))  # no surrogates
    ids = chardata.encode(chars[::-1], "char", chars)
    assert ids.dtype == f"u{bits // 8}" and ids.tolist() == list(range(count))[::-1]


@pytest.mark.parametrize("length", [chardata.MIB - 2, 2 * chardata.MIB])
def test_a_text_that_is_encoded_in_several_pieces_is_encoded_whole(length):
    text = "ab" * (length // 2) + "é!"
    ids = chardata.encode(text, "char", "!Zabé")
    assert len(ids) == len(text) and ids[:2].tolist() == [2, 3] and ids[-3:].tolist() == [3, 4, 0]


def test_an_empty_text_has_no_ids():
    for kind in ("char", "byte", "ids"):
        assert chardata.encode("", kind, "abc").tolist() == []


def test_an_unknown_character_is_named_with_its_position():
    with pytest.raises(ValueError, match="character 'ß' at 3 is not in the vocabulary of 3"):
        chardata.encode("abcßaä", "char", "abc")


def test_decode_yields_a_character_as_soon_as_its_last_byte_is_there():
    read_so_far = []

    def ids():
        for byte in "aé€".encode() + b"\xe2" + b"b\xe2":
            read_so_far.append(byte)
            yield byte

    got = [(text, len(read_so_far)) for text in chardata.decode(ids(), "byte", "")]
    # The first 0xe2 is known to be wrong only when "b" follows, the second only at the end.
    assert got == [("a", 1), ("é", 3), ("€", 6), ("\ufffdb", 8), ("\ufffd", 9)]


def test_bare_ids_are_written_as_numbers():
    assert chardata.encode("0 17 4294967295", "ids", "").tolist() == [0, 17, 2**32 - 1]
    assert list(chardata.decode([5, 17], "ids", "")) == ["5 ", "17 "]
    for text in ("1 -1", "4294967296", "0 1.0", "the"):
        with pytest.raises(ValueError, match=f"'{text.split()[-1]}' is not a token id"):
            chardata.encode(text, "ids", "")


# ------------------------------------------------------------------------------------------ files


def is_mapped(array, path):
    """Return whether a change of the last byte of the file shows in the array."""
    with open(path, "r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    return array.view(np.uint8)[-1] == last ^ 1


@pytest.mark.parametrize("dtype", ["bin", "u1", "<u2", ">u2", "u8"])
def test_token_files_and_bytes_are_mapped(dtype, tmp_path):
    ids = np.array([3, 250, 0, 127], dtype="<u2" if dtype == "bin" else dtype).repeat(300_000)
    path = tmp_path / ("ids.bin" if dtype == "bin" else "ids.npy")
    ids.tofile(path) if dtype == "bin" else np.save(path, ids)
    corpus = read(path, "char")
    assert (corpus.kind, corpus.chars, corpus.tokens[0].dtype) == ("ids", "", ids.dtype)
    assert np.array_equal(corpus.tokens[0], ids)
    assert corpus.vocab == 256  # 251 ids, rounded up to a multiple of 64
    assert is_mapped(corpus.tokens[0], path)
    as_bytes = read(path.rename(tmp_path / "any"), "byte")
    assert (as_bytes.kind, as_bytes.vocab, as_bytes.chars) == ("byte", 256, "")
    assert is_mapped(as_bytes.tokens[0], tmp_path / "any")


def test_the_vocabulary_of_token_files_has_room_for_the_highest_id(tmp_path):
    for name, top in [("1", 63), ("2", 0), ("3", 64)]:
        np.save(tmp_path / f"{name}.npy", np.array([0, top], np.uint16))
    assert read(tmp_path / "[12].npy", "char").vocab == 64
    assert read(tmp_path / "*.npy", "char").vocab == 128


def test_a_given_vocabulary_size_is_taken_and_the_tokens_are_not_searched(tmp_path):
    path = tmp_path / "x.bin"
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # sparse: the file takes no room, but reading 1 TiB takes minutes
    assert read(path, "char", vocab=50257).vocab == 50257


def test_more_files_than_a_process_can_open_are_read(tmp_path):
    for i in range(200):
        (tmp_path / f"{i:03}.txt").write_text(f"{i:03}")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (150, limits[1]))
    try:
        corpus = read(tmp_path / "*.txt", "byte")
        for name in ("000.npy", "000"):  # a .npy is always mapped, and a text above 1 MiB
            np.save(tmp_path / "000.npy", np.zeros(2**20, np.uint8))
            os.replace(tmp_path / "000.npy", tmp_path / name)
            with pytest.raises(ValueError, match="files are too many to open; join them"):
                chardata.read([str(tmp_path / name)] * 200, "byte")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "".join(texts(corpus)).split() == [f"{i:03}" for i in range(200)]


def test_a_glob_is_read_in_the_order_of_names_and_into_folders(tmp_path):
    (tmp_path / "b").mkdir()
    for name in ("c.txt", "a.txt", "b/x.txt", "b.md", "[a].txt"):
        (tmp_path / name).write_text(name)
    names = chardata.list_files(str(tmp_path / "**" / "?.txt"))
    assert names == [str(tmp_path / name) for name in ("a.txt", "b/x.txt", "c.txt")]
    assert texts(chardata.read(names, "byte"))[::2] == ["a.txt", "b/x.txt", "c.txt"]
    looks_like_a_glob = str(tmp_path / "[a].txt")
    assert chardata.list_files(looks_like_a_glob) == [looks_like_a_glob]


def test_several_texts_share_one_vocabulary_and_a_given_one_is_kept(tmp_path):
    (tmp_path / "1").write_text("ab")
    (tmp_path / "2").write_text("bc")
    corpus = read(tmp_path / "?", "char")
    assert corpus.chars == "\nabc" and texts(corpus) == ["ab", "\n", "bc"]
    assert len({array.dtype for array in corpus.tokens}) == 1
    corpus = read(tmp_path / "1", "char", chars="zab")
    assert corpus.chars == "zab" and corpus.vocab == 3 and corpus.tokens[0].tolist() == [1, 2]


@pytest.mark.parametrize("kind", ["char", "byte"])
def test_a_line_break_divides_two_texts_of_which_the_first_ends_without_one(kind, tmp_path):
    """Otherwise the last word of a file and the first of the next would become one word."""
    for name, text in {"1": "one", "2": "two\n", "3": "", "4": "three", "5": ""}.items():
        (tmp_path / name).write_text(text)
    assert texts(read(tmp_path / "?", kind)) == ["one", "\n", "two\n", "three"]
    assert texts(read(tmp_path / "1", kind)) == ["one"]
    # A model that does not know line breaks reads the data as before.
    old = read(tmp_path / "[14]", "char", chars="".join(sorted("onethr")))
    assert texts(old) == ["one", "three"]


@pytest.mark.parametrize("kind", ["char", "byte"])
def test_a_byte_order_mark_at_the_start_of_a_text_is_no_token(kind, tmp_path):
    for name, text in {"1": "one\n", "2": "two\n" * 2**19, "3": ""}.items():
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
    corpus = read(tmp_path / "?", kind)
    assert texts(corpus) == ["one\n", "two\n" * 2**19]
    assert kind == "char" or is_mapped(corpus.tokens[1], tmp_path / "2")


@pytest.mark.parametrize("kind", ["char", "byte", "bin"])
def test_validation_files_share_the_vocabulary_and_are_apart_from_the_training_data(kind, tmp_path):
    names = [f"{tmp_path}/{i}.{'bin' if kind == 'bin' else 'txt'}" for i in range(4)]
    for i, name in enumerate(names):
        ids = np.array([i, 64 * i], np.uint16).tobytes()
        Path(name).write_bytes(ids if kind == "bin" else f"text {i}".encode())
    corpus = chardata.read(names[:2], kind, val_files=names[2:])
    both = chardata.read(names, kind)
    assert corpus[1:4] == both[1:4]  # vocabulary size, kind, characters
    lengths = [2, 2] if kind == "bin" else [6, 1, 6]  # with a line break between texts
    assert [*map(len, corpus.tokens)] == [*map(len, corpus.val_tokens)] == lengths
    assert corpus.stamps == both.stamps and not both.val_tokens
    others = [chardata.read(names[:k], kind, val_files=names[k:]) for k in (1, 2, 3)]
    assert len({both.digest, *(other.digest for other in others)}) == 4
    Path(names[3]).write_bytes(b"")
    with pytest.raises(ValueError, match="3.* is empty, and no other file has data"):
        chardata.read(names[:2], kind, val_files=names[3:])


def test_an_empty_list_of_files_means_the_default_text():
    corpus, as_bytes = (chardata.read([], kind) for kind in ("char", "byte"))
    assert chardata.num_tokens(corpus.tokens) == len(chardata.default_text()) > 400_000
    assert as_bytes.tokens[0].tobytes().decode() == chardata.default_text()


# Lengths of token files, so that windows of 16 tokens lie in one, two, and four files.
FILES = [700, 0, 1, 2000, 16, 17, 0, 1300, 5]
TOKENS = np.random.default_rng(0).integers(0, 500, sum(FILES), np.uint16)


def llm_c(tokens, magic=20240520, version=1, count=None):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    return header.tobytes() + np.asarray(tokens, "<u2").tobytes()


def write_files(folder: Path, kind: str) -> str:
    """Write TOKENS as files with the lengths FILES, and return the glob pattern of the files."""
    for i, tokens in enumerate(cut(TOKENS, FILES)):
        if kind == "npy":
            np.save(folder / f"{i}.npy", tokens.astype(["u2", "u4", "u8", ">u2"][i % 4]))
        else:
            with_header = kind == "llm.c" or i % 2
            (folder / f"{i}.bin").write_bytes(llm_c(tokens) if with_header else tokens.tobytes())
    return f"{folder}/*.{'npy' if kind == 'npy' else 'bin'}"


@pytest.mark.parametrize("kind", ["bin", "llm.c", "npy"])
def test_files_of_unequal_lengths_and_types_and_empty_files_are_read_as_one(kind, tmp_path):
    corpus = read(write_files(tmp_path, kind), "char")
    assert [len(array) for array in corpus.tokens] == [n for n in FILES if n]
    assert corpus.vocab == 512
    assert len(corpus.stamps) == len(FILES)  # a change of an empty file is noticed too
    ours, reference = (BatchPlan(t, 16, 10) for t in (corpus.tokens, (TOKENS,)))
    assert_same_batches(chardata.every_window(ours), chardata.every_window(reference))


def test_files_that_are_all_empty_are_an_error_and_one_among_others_is_left_out(tmp_path):
    for name, text in [("0.txt", "ab"), ("1.txt", ""), ("2.txt", "")]:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=r"1.txt: is empty, and no other file has data"):
        read(tmp_path / "[12].txt", "char")
    alone, among = read(tmp_path / "0.txt", "char"), read(tmp_path / "*", "char")
    assert alone.digest == among.digest and len(among.tokens) == 1


# ---------------------------------------------------------------------------------- changed files


def change(path, content, same_time=False):
    time = path.stat().st_mtime_ns
    path.write_bytes(content)
    if same_time:
        os.utime(path, ns=(time, time))


LARGE = b"ab" * 600_000  # above 1 MiB, so it is mapped
CHANGES = {
    "rewritten": partial(change, content=b"\0" * len(LARGE)),
    "longer, with the old time": partial(change, content=LARGE + b"x", same_time=True),
    "deleted": os.unlink,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("changed", ["0", "1", "2"])
def test_a_mapped_file_that_changed_is_named(changed, change, tmp_path):
    """Otherwise training would go on with other tokens."""
    for name in "012":
        (tmp_path / name).write_bytes(LARGE)
        os.utime(tmp_path / name, ns=(10**18, 10**18))
    corpus = read(tmp_path / "?", "byte")
    chardata.verify_unchanged(corpus)
    change(tmp_path / changed)
    with pytest.raises(OSError, match="was changed|No such file") as caught:
        chardata.verify_unchanged(corpus)
    assert str(tmp_path / changed) in str(caught.value)


# ----------------------------------------------------------------------------------------- errors


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


NOT_NPY = (
    "must be one complete 1-d array of unsigned integers, for example after .astype('uint32'): "
)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("empty.npy", b"", NOT_NPY),  # a .npy without tokens would have a header
        ("odd.bin", b"abc", "3 bytes, header version 1; must be 2 bytes for 1 uint16 tokens"),
        (
            "latin.txt",
            "café".encode("latin-1"),
            "byte 0xe9 in position 3: unexpected end of data; ",
        ),
        ("lat1n.txt", "café".encode("latin-1"), "iconv -f LATIN1 -t UTF-8 old.txt > new.txt"),
        ("uint32.bin", np.arange(65536, 65664, dtype="<u4").tobytes(), "uint32, .* .npy"),
        ("200k.bin", np.full(64, 200_000, "<u4").tobytes(), "uint32, .* .npy"),
        ("signed.npy", npy(np.arange(3, dtype=np.int32)), NOT_NPY + "(3,) int32"),
        ("two.npy", npy(np.ones((2, 3), np.uint8)), NOT_NPY + "(2, 3) uint8"),
        ("cut.npy", npy(np.arange(1000, dtype=np.uint16))[:-1], NOT_NPY),
        ("grown.npy", npy(np.arange(3, dtype=np.uint16)) + b"  ", "(3,) uint16 in 136 bytes"),
        ("other.txt", b"abcX", "character 'X' at 3 is not in the vocabulary of 3"),
        ("c4.bin", llm_c([1, 2, 3], count=4), "1030 bytes, header version 1; must be 1032"),
        ("c-1.bin", llm_c([1, 2, 3], count=-1), "1030 bytes, header version 1; must be 1022"),
        ("magic.bin", llm_c([1, 2, 3])[:4], "4 bytes, header version 20240520"),
        ("v7.bin", llm_c([1, 2, 3], version=7), "1030 bytes, header version 7; must be 1030"),
        ("llama.bin", llm_c([1, 2], 20240801, 7) + b"\0" * 4, "1032 bytes, header version 7"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value[:12] else "",
)
def test_a_file_that_is_damaged_or_of_another_kind_is_named(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read(tmp_path / name, "char", chars="abc")
    assert str(tmp_path / name) in str(caught.value)
    assert message in str(caught.value) or re.search(message, str(caught.value))


@pytest.mark.parametrize("kind", ["char", "byte"])
@pytest.mark.parametrize(
    "content, what",
    [
        ("text".encode("utf-16"), "UTF-16 .*iconv -f UTF-16 -t UTF-8 old.txt > new.txt"),
        (b"\xfe\xff" + "text".encode("utf-16-be"), "UTF-16 "),
        (gzip.compress(b"text"), "gzip .*unpack"),
        (bz2.compress(b"text"), "bzip2 .*unpack"),
        (lzma.compress(b"text"), "xz .*unpack"),
        (b"PK\x03\x04\x14", "zip .*unpack"),
        (b"\x28\xb5\x2f\xfd\x04", "zstd .*unpack"),
        (b"PAR1\x15", "Parquet .*column"),
        (b"%PDF-1.7\n", "PDF .*text"),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_a_file_that_is_not_text_is_refused_with_what_it_is(content, what, kind, tmp_path):
    """Otherwise a model would be trained on compressed bytes."""
    (tmp_path / "x.txt").write_bytes(content)
    with pytest.raises(ValueError, match=f"x.txt: is (a |an )?{what}"):
        read(tmp_path / "x.txt", kind)


def test_bytes_of_any_encoding_are_read_as_bytes(tmp_path):
    (tmp_path / "x.txt").write_bytes("café".encode("latin-1"))
    assert read(tmp_path / "x.txt", "byte").tokens[0].tobytes() == b"caf\xe9"


def test_token_files_that_uint16_cannot_hold_are_refused_and_others_are_not(tmp_path):
    """uint32 ids in a .bin would be trained on as twice as many wrong ids."""
    flags = np.array([0, 7] * 99, np.uint16)  # every second is 0, but before the others
    for ids in (flags, np.zeros(99, np.uint16), np.array([7, 0], np.uint16)):
        (tmp_path / "x.bin").write_bytes(ids.tobytes())
        assert read(tmp_path / "x.bin", "char", vocab=65536).tokens[0].tolist() == ids.tolist()
    with pytest.raises(ValueError, match=r"x.bin: .* needs uint32, .*\.npy"):
        read(tmp_path / "x.bin", "char", vocab=65537)


def test_token_files_and_text_files_together_are_refused(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"ab")
    (tmp_path / "b.txt").write_bytes(b"ab")
    with pytest.raises(ValueError, match=r"a.bin: text files and token files .* cannot be mixed"):
        read(tmp_path / "*", "char")


@pytest.mark.parametrize("kind, size", [("char", 3), ("byte", 256)])
def test_another_vocabulary_size_than_that_of_a_text_is_refused(kind, size, tmp_path):
    (tmp_path / "x.txt").write_text("abc")
    assert read(tmp_path / "x.txt", kind, vocab=size).vocab == size
    with pytest.raises(ValueError, match=f"x.txt: is text with a vocabulary of {size}, not 100"):
        read(tmp_path / "x.txt", kind, vocab=100)
    with pytest.raises(ValueError, match="^tokenizer 'word' is not char or byte$"):
        read(tmp_path / "x.txt", "word")


@pytest.mark.parametrize("data", ["missing.txt", "missing*"])
def test_a_missing_file_or_a_folder_is_named(data, tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape(f"{str(tmp_path / data)!r}: no such")):
        chardata.list_files(str(tmp_path / data))
    with pytest.raises(OSError, match=re.escape(f"for a folder, give '{tmp_path}/*.txt'")):
        chardata.list_files(str(tmp_path))


# ----------------------------------------------------------------------------------------- digest


def test_the_digest_notices_any_byte_any_length_any_type_and_where_arrays_end():
    tokens = np.arange(1000, dtype=np.uint16)
    others = [tokens, tokens[:-1], tokens[1:], tokens.astype(np.uint32), tokens.view(">u2")]
    for i in (0, 500, 999):
        others.append(tokens.copy())
        others[-1][i] ^= 256
    data_sets = [*([array] for array in others), cut(tokens, [500, 500])]
    assert len({chardata.digest(arrays) for arrays in data_sets}) == len(data_sets)
    assert chardata.digest([tokens.copy()]) == chardata.digest([tokens])


def test_the_digest_has_known_values_so_that_old_checkpoints_fit_their_data():
    assert chardata.digest([np.arange(1000, dtype=np.uint16)], "ab") == KNOWN_DIGESTS[0]
    large = np.arange(9 << 20, dtype=np.uint16)
    assert chardata.digest([large], whole=0) == KNOWN_DIGESTS[1] != chardata.digest([large])
    assert chardata.digest([large] * 20) == KNOWN_DIGESTS[2]  # more than 256 MiB together


def notices(arrays, at):
    """Return whether the digest notices a change of one byte of the first array."""
    before = chardata.digest(arrays)
    arrays[0][at] ^= 1
    after = chardata.digest(arrays)
    arrays[0][at] ^= 1
    return before != after


@pytest.mark.parametrize(
    "size, others, noticed, not_noticed",
    [
        (36 << 20, 0, (1 << 20) + 9, None),  # is read as a whole
        ((256 << 20) - 31, 31, 1 << 20, None),
        ((256 << 20) + 1, 0, (1 << 20) - 1, 1 << 20),  # 16 blocks of 1 MiB
        ((256 << 20) - 30, 31, (1 << 19) - 1, 1 << 19),  # more than 256 MiB together
        (257 << 20, 4199, 4095, 4096),  # a block has at least 4 KiB
    ],
)
def test_the_digest_reads_whole_blocks_of_a_large_array(size, others, noticed, not_noticed):
    arrays = [np.zeros(size, np.uint8), *[np.zeros(1, np.uint8)] * others]
    assert notices(arrays, noticed) and notices(arrays, -1)
    assert not_noticed is None or not notices(arrays, not_noticed)


# ------------------------------------------------------------------------------------------- cost


@pytest.mark.parametrize("count", [1, 10])
def test_ten_to_the_eleven_windows_take_no_memory(count):
    """Memory for each window would be hundreds of gigabytes. A token is repeated with a stride of 0."""
    tokens = [np.broadcast_to(np.uint16(k), 128 * 10**11 // count) for k in range(count)]
    assert len(steps(BatchPlan(tokens, 128, 16, seed=1), 4, start=10**15)) == 4


# ---------------------------------------------------------------------------------------- Windows


def test_the_module_imports_and_reads_without_what_only_unix_has(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(100, dtype=np.uint16))
    program = (
        "import mmap, sys\n"
        "sys.modules['fcntl'] = None\n"  # an import of fcntl raises ImportError, as on Windows
        "del mmap.MADV_RANDOM\n"
        "import chardata\n"
        f"corpus = chardata.read(chardata.list_files({str(tmp_path / 'x.npy')!r}), 'char')\n"
        "print(len(corpus.tokens[0]), corpus.vocab)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(chardata.__file__).parent,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (ended.returncode, ended.stdout) == (0, "100 128\n"), ended.stderr


# Results of the version that wrote the first checkpoints. They must never change.
KNOWN_PLACES = [568, 601, 767, 21, 906, 450, 5, 250]
KNOWN_HUGE_PLACES = [82406971009130, 924452393849106, 115348782091891]
KNOWN_PLACES_OF_A_SQUARE = [584, 624, 64, 367, 98, 826, 188, 668]
KNOWN_INDICES = [6, 5, 0, 7, 4, 3, 2, 8, 9, 1]
KNOWN_FIRSTS = [
    [432, 480, 256, 320, 928],
    [752, 640, 528, 32, 464],
    [592, 944, 544, 768, 224],
]
KNOWN_DIGESTS = [
    "5ffcad1d02b7b11289b9a9f901658610",
    "51588cef3e2e3ed90187e6d144e63384",
    "46714ba4a552c07b4bda9c3a8ca1e432",
]
