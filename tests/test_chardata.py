"""chardata against brute force: with tokens that count up from 0, a token says where it came from."""

import io
import math
import sys
from collections import Counter
from functools import partial
from itertools import accumulate, islice

import numpy as np
import pytest
import torch

import chardata

WORLDS, ACCUMS = range(1, 6), range(1, 4)
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
    return (np.arange(n, dtype=dtype),)


def chi_square_bound(df):
    """Mean and six standard deviations of the chi-square distribution: passed by chance once in 10^4 or less."""
    return df + 6 * math.sqrt(2 * df)


# ------------------------------------------------------------------------------------------- the permutation


def test_permute_is_a_bijection_for_every_n_to_2000():
    for n in range(1, 2001):
        images = chardata.permute(np.arange(n), n, key=n)
        assert np.array_equal(np.sort(images), np.arange(n)), n


@pytest.mark.parametrize("n", [1_000_000, 1_000_003, 1024**2, 1023 * 1024 + 1])
def test_permute_is_a_bijection_for_a_million(n):
    counts = np.bincount(chardata.permute(np.arange(n), n, key=7), minlength=n)
    assert len(counts) == n and (counts == 1).all()


@pytest.mark.parametrize("n", [2**31 + 11, 10**10, 2**40 - 1, 10**15 + 37, 2**53 + 1, 2**62 - 57])
def test_permute_of_a_huge_range_stays_inside_it_and_apart(n):
    rng = np.random.default_rng(n)
    index = np.unique(np.concatenate([rng.integers(0, n, 50_000), np.arange(50_000), n - 1 - np.arange(50_000)]))
    images = chardata.permute(index, n, key=3)
    assert images.dtype == np.int64 and images.min() >= 0 and images.max() < n
    assert len(np.unique(images)) == len(index)
    assert images.max() > 0.99 * n > 0.01 * n > images.min()


def test_permute_is_the_same_for_an_index_alone_and_among_others():
    n, index = 12345, np.array([12344, 0, 17, 17, 5000])
    together = chardata.permute(index, n, key=1)
    assert [int(chardata.permute(np.array([i]), n, key=1)[0]) for i in index] == together.tolist()


def test_permute_leaves_its_argument_alone():
    index = np.arange(100, dtype=np.uint64)
    chardata.permute(index, 100, key=1)
    assert np.array_equal(index, np.arange(100))


@pytest.mark.parametrize("n", [2, 3, 5, 10])
def test_over_many_epochs_each_place_goes_equally_often_to_each(n):
    epochs, counts = 2000, np.zeros((n, n))
    for epoch in range(epochs):
        counts[np.arange(n), chardata.shard(n, 0, 1, epoch, seed=0)] += 1
    expected = epochs / n
    # rows and columns both have fixed sums, hence the factor and the (n - 1)^2 degrees of freedom
    statistic = (n - 1) / n * ((counts - expected) ** 2 / expected).sum()
    assert statistic < chi_square_bound((n - 1) ** 2)


def test_over_many_epochs_each_of_the_24_orders_of_four_comes_equally_often():
    epochs = 3000
    counts = Counter(tuple(chardata.shard(4, 0, 1, epoch, seed=1)) for epoch in range(epochs))
    expected = epochs / 24
    assert len(counts) == 24
    assert sum((count - expected) ** 2 / expected for count in counts.values()) < chi_square_bound(23)


def test_one_shuffle_takes_neighbours_to_unrelated_places():
    n, buckets = 100_003, 64
    images = chardata.permute(np.arange(n), n, key=12)
    counts = np.bincount((np.diff(images) % n) * buckets // n, minlength=buckets)
    expected = (n - 1) / buckets
    assert ((counts - expected) ** 2 / expected).sum() < chi_square_bound(buckets - 1)


def test_two_keys_have_no_more_in_common_than_chance():
    shuffles = [chardata.permute(np.arange(1000), 1000, key) for key in (0, 1, 2, 3, 2**64 - 1)]
    for i, a in enumerate(shuffles):
        for b in shuffles[:i]:
            assert (a == b).sum() < 10  # Poisson of mean 1: more once in 10^7


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("n", [1, 2, 3, 10, 101])
def test_the_shards_of_all_ranks_are_a_partition(n, world):
    parts = [chardata.shard(n, rank, world, epoch=2, seed=5) for rank in range(world)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(n))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_shard_is_a_sampler_for_a_data_loader_and_new_each_epoch():
    shards = [chardata.shard(50, 1, 3, epoch, seed) for epoch, seed in [(0, 0), (0, 0), (1, 0), (0, 1)]]
    assert np.array_equal(shards[0], shards[1])
    assert not np.array_equal(shards[0], shards[2]) and not np.array_equal(shards[0], shards[3])
    loader = torch.utils.data.DataLoader(range(50), batch_size=4, sampler=shards[0])
    assert torch.cat(list(loader)).tolist() == shards[0].tolist()


# ------------------------------------------------------------------------------------------------- the steps


def steps(shards, block_size, batch_size, count, **who):
    return list(islice(chardata.steps(shards, block_size, batch_size, **who), count))


def global_batches(n, block_size, batch_size, count, world=1, accum=1, **which):
    """For each step the first tokens of all ranks' windows, sorted; what must hold of each rank is checked here."""
    ranks = [
        steps(ramp(n), block_size, batch_size, count, rank=rank, world_size=world, accum=accum, **which)
        for rank in range(world)
    ]
    batches = []
    for of_ranks in zip(*ranks):
        firsts, shares, totals = [], [], set()
        for micro_batches, total in of_ranks:
            for x, y in micro_batches:
                assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape == (len(x), block_size)
                assert torch.equal(x, x[:, :1] + torch.arange(block_size)) and torch.equal(y, x + 1)
                assert y.max() < n
            sizes = [len(x) for x, _ in micro_batches]
            if total:
                assert 1 <= len(sizes) <= accum and min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
                firsts += [int(first) for x, _ in micro_batches for first in x[:, 0]]
                totals.add(total)
            else:
                assert sizes == [1]  # a stand-in
            shares.append(sum(sizes) if total else 0)
        assert max(shares) - min(shares) <= 1
        assert totals == {sum(shares) * block_size}
        batches.append(sorted(firsts))
    return batches


@pytest.mark.parametrize("batch_size", [1, 4, 5, 6, 7, 24, 64])
def test_an_epoch_is_every_window_once_and_the_same_batches_for_any_world_and_accum(batch_size):
    n, block_size, epochs = 103, 4, 2
    windows = chardata.windows(n, block_size)
    per_epoch = math.ceil(windows / batch_size)
    assert chardata.steps_per_epoch(n, block_size, batch_size) == per_epoch
    alone = global_batches(n, block_size, batch_size, epochs * per_epoch)
    for epoch in range(epochs):
        batches = alone[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert [len(batch) for batch in batches[:-1]] == [batch_size] * (per_epoch - 1)
        firsts = sorted(sum(batches, []))
        assert firsts == list(range(firsts[0], firsts[0] + windows * block_size, block_size))
    for world in WORLDS:
        for accum in ACCUMS:
            assert global_batches(n, block_size, batch_size, epochs * per_epoch, world, accum) == alone


def test_an_epoch_too_long_to_gather_at_once_is_every_window_once():
    n, block_size, batch_size = 400_001, 1000, 60  # 7 steps, of which 4 are gathered at once
    alone = global_batches(n, block_size, batch_size, 7)
    assert len(set(sum(alone, []))) == len(sum(alone, [])) == chardata.windows(n, block_size) == 399
    assert global_batches(n, block_size, batch_size, 7, world=2, accum=2) == alone
    assert global_batches(n, block_size, batch_size, 4, start=3) == alone[3:]


@pytest.mark.parametrize("n", [5, 6, 7, 8, 9, 11, 12, 13])
def test_a_text_of_hardly_a_window_or_two_is_enough(n):
    firsts = sum(global_batches(n, 4, 3, 50), [])
    assert min(firsts) == 0 and max(firsts) == n - 5  # the first token and the last are both seen


def test_more_ranks_than_windows_get_stand_ins_that_count_nothing():
    totals = [steps(ramp(20), 4, 8, 1, rank=rank, world_size=6)[0][1] for rank in range(6)]
    assert sorted(totals) == [0, 0, 16, 16, 16, 16]  # 4 windows of 4


def test_every_epoch_has_another_order_and_another_offset():
    n, block_size = 103, 4
    windows = chardata.windows(n, block_size)
    firsts = [int(b[0][0][0][0, 0]) for b in steps(ramp(n), block_size, 1, 100 * windows)]
    offsets, orders = [], []
    for epoch in range(100):
        mine = firsts[epoch * windows : (epoch + 1) * windows]
        offsets.append(min(mine))
        orders.append(tuple((first - min(mine)) // block_size for first in mine))
    assert len(set(orders)) == 100
    assert set(offsets) == set(range(n - windows * block_size))  # 7 of them, and none stays away by chance


def test_the_seed_decides_order_and_offset():
    a, b, c = (global_batches(1000, 7, 5, 40, seed=seed) for seed in (0, 0, 1))
    assert a == b != c


@pytest.mark.parametrize("who", [{}, {"rank": 1, "world_size": 3, "accum": 2}])
def test_starting_at_a_step_is_the_same_as_skipping_to_it(who):
    def flat(some):
        return [([(x.tolist(), y.tolist()) for x, y in micro_batches], total) for micro_batches, total in some]

    n, block_size, batch_size = 103, 4, 5
    whole = flat(steps(ramp(n), block_size, batch_size, 20, **who))
    for start in range(15):
        assert flat(steps(ramp(n), block_size, batch_size, 5, start=start, **who)) == whole[start : start + 5]


def test_a_start_in_the_far_future_costs_nothing():
    ((micro_batches, total),) = steps(ramp(103), 4, 5, 1, start=10**15)
    assert total == 20 and len(micro_batches) == 1


@pytest.mark.parametrize("n, block_size, batch_size", [(103, 4, 5), (103, 4, 6), (103, 4, 100), (9, 8, 2), (50, 1, 7)])
def test_tokens_before_a_step_are_the_sum_of_the_totals_before_it(n, block_size, batch_size):
    totals = [total for _, total in steps(ramp(n), block_size, batch_size, 30)]
    before = [chardata.tokens_before(step, n, block_size, batch_size) for step in range(31)]
    assert before == [0, *accumulate(totals)]


def test_too_few_tokens_for_a_window_is_an_error_with_both_numbers():
    assert chardata.windows(9, 8) == 1
    for call in (lambda: chardata.windows(8, 8), lambda: next(chardata.steps(ramp(8), 8, 1))):
        with pytest.raises(ValueError, match="8 tokens are too few for one window of 8"):
            call()


# ---------------------------------------------------------------------------------------------- every window


@pytest.mark.parametrize("world", WORLDS)
def test_every_window_predicts_each_token_but_the_first_once(world):
    block_size, batch_size = 4, 3
    for n in range(1, 60):
        ranks = [
            list(chardata.every_window(ramp(n), block_size, batch_size, rank=rank, world_size=world))
            for rank in range(world)
        ]
        batches = sum(ranks, [])
        for x, y in batches:
            assert x.dtype == y.dtype == torch.int64 and torch.equal(y, x + 1)
            assert len(x) <= batch_size and (x[:, 0] % block_size == 0).all()
            assert torch.equal(x, x[:, :1] + torch.arange(x.shape[1]))
        assert sorted(token for _, y in batches for token in y.flatten().tolist()) == list(range(1, n))
        assert max(map(len, ranks)) - min(map(len, ranks)) <= 1


def test_every_window_goes_in_order_and_ends_with_the_short_one():
    shapes = [tuple(x.shape) for x, _ in chardata.every_window(ramp(36), 4, 3)]
    assert shapes == [(3, 4), (3, 4), (2, 4), (1, 3)]
    assert torch.cat([y.flatten() for _, y in chardata.every_window(ramp(36), 4, 3)]).tolist() == list(range(1, 36))


# ---------------------------------------------------------------------------------------- shards, and splits

LENGTHS = [[103], [5, 1, 60, 2, 2, 33], [1] * 103, [3, 100], [100, 3], [50, 53]]


def cut(array, lengths):
    return tuple(np.split(array, np.cumsum(lengths)[:-1]))


@pytest.mark.parametrize("lengths", LENGTHS)
def test_several_shards_read_as_one_array(lengths):
    whole = np.random.default_rng(0).integers(0, 2**16, 103).astype(np.uint16)
    shards = cut(whole, lengths)
    for who in ({}, {"rank": 1, "world_size": 2, "accum": 2}):
        for (ours, _), (theirs, _) in zip(steps(shards, 8, 5, 12, **who), steps((whole,), 8, 5, 12, **who)):
            assert all(torch.equal(a, b) for x, y in zip(ours, theirs) for a, b in zip(x, y))
    ours, theirs = chardata.every_window(shards, 8, 5), chardata.every_window((whole,), 8, 5)
    for x, y in zip(ours, theirs, strict=True):
        assert torch.equal(x[0], y[0]) and torch.equal(x[1], y[1])


def test_shards_cut_anywhere_read_as_one_array():
    whole = list(chardata.every_window(ramp(103), 8, 5))
    for at in range(1, 103):
        halves = chardata.every_window(cut(ramp(103)[0], [at, 103 - at]), 8, 5)
        assert all(torch.equal(x, a) and torch.equal(y, b) for (x, y), (a, b) in zip(halves, whole, strict=True)), at


def test_shards_of_different_types_read_as_one_array():
    shards = (np.arange(20, dtype=np.uint8), np.arange(20, 50, dtype=np.uint32), np.arange(50, 103, dtype=">u2"))
    mixed, plain = chardata.every_window(shards, 8, 5), chardata.every_window(ramp(103), 8, 5)
    assert all(torch.equal(x, y) for (x, _), (y, _) in zip(mixed, plain, strict=True))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("fraction", [0, 0.001, 0.1, 0.5, 53 / 103, 0.97, 1])
def test_a_split_is_by_position_and_loses_nothing(lengths, fraction):
    before, after = chardata.split(cut(np.arange(103, dtype=np.uint32), lengths), fraction)
    assert [token for shard in (*before, *after) for token in shard] == list(range(103))
    assert chardata.length(after) == round(103 * fraction)
    assert all(len(shard) for shard in (*before, *after))


# ------------------------------------------------------------------------------------------------ vocabulary


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_any_text_comes_back_from_its_characters_byte_for_byte(text, tmp_path):
    path = tmp_path / "text"
    path.write_bytes(text.encode())
    corpus = chardata.read(str(path), "char")
    assert corpus.kind == "char" and corpus.chars == "".join(sorted(set(text))) and corpus.vocab == len(set(text))
    assert [corpus.chars[i] for i in corpus.shards[0]] == list(text)
    assert chardata.decode(corpus.shards[0].tolist(), "char", corpus.chars) == text.encode()
    assert np.array_equal(chardata.encode(text, "char", corpus.chars), corpus.shards[0])


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_any_text_comes_back_from_its_bytes(text):
    ids = chardata.encode(text, "byte", "")
    assert ids.dtype == np.uint8 and chardata.decode(ids.tolist(), "byte", "") == text.encode()


@pytest.mark.parametrize("count", [1, 2, 254, 255, 256, 257, 65535, 65536, 65537])
def test_a_vocabulary_of_any_size_round_trips(count):
    chars = "".join(chr(i if i < 0xD800 else i + 0x800) for i in range(count))  # not the surrogates
    ids = chardata.encode(chars[::-1], "char", chars)
    assert ids.dtype.kind == "u" and ids.tolist() == list(range(count))[::-1]
    if count < 65536:
        with pytest.raises(ValueError, match=f"at 1 is not among the {count} "):
            chardata.encode(chars[0] + "\U0010ffff", "char", chars)


def test_a_text_longer_than_what_is_encoded_at_once_is_encoded_whole():
    text = "ab" * (1 << 21) + "é!"
    assert chardata.characters(["", text, "Z"]) == "!Zabé"
    ids = chardata.encode(text, "char", "!Zabé")
    assert len(ids) == len(text) and ids[:2].tolist() == [2, 3] and ids[-3:].tolist() == [3, 4, 0]


def test_an_unknown_character_is_named_with_its_place():
    with pytest.raises(ValueError, match="character 'ß' at 3 is not among the 3 of the vocabulary"):
        chardata.encode("abcß", "char", "abc")


def test_bare_ids_are_written_as_numbers():
    assert chardata.encode("5 17", "ids", "").tolist() == [5, 17]
    assert chardata.decode([5, 17], "ids", "") == b"5 17 "
    with pytest.raises(ValueError, match="'a'"):
        chardata.encode("5 a", "ids", "")


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_predicted_characters_are_counted_in_bytes_and_in_characters_alike(text):
    chars = chardata.characters([text])
    half = len(text) // 2
    for kind in ("byte", "char"):
        parts = [part for part in (text[:half], text[half:]) if part]
        shards = tuple(chardata.encode(part, kind, chars) for part in parts)
        assert chardata.count_characters(shards, kind) == len(text) - 1  # nothing predicts the first
    assert chardata.count_characters(ramp(5), "ids") == 0


# ----------------------------------------------------------------------------------------------------- files


def is_mapped(array, path):
    """Whether a change of the file's last byte shows in the array."""
    with open(path, "r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    return array.view(np.uint8)[-1] == last ^ 1


def test_bytes_are_the_file_mapped_and_not_copied(tmp_path):
    path, raw = tmp_path / "any", bytes(range(256)) * 3 + b"\xff\n"
    path.write_bytes(raw)
    corpus = chardata.read(str(path), "byte")
    assert (corpus.kind, corpus.vocab, corpus.chars) == ("byte", 256, "")
    assert corpus.shards[0].tobytes() == raw
    assert is_mapped(corpus.shards[0], path)


@pytest.mark.parametrize("kind", ["char", "byte"])
@pytest.mark.parametrize("dtype", ["bin", "u1", "<u2", ">u2", "u4", "u8"])
def test_token_files_are_mapped_as_they_are_under_either_kind(dtype, kind, tmp_path):
    ids = np.array([3, 250, 0, 127], dtype="<u2" if dtype == "bin" else dtype)
    path = tmp_path / ("ids.bin" if dtype == "bin" else "ids.npy")
    ids.tofile(path) if dtype == "bin" else np.save(path, ids)
    corpus = chardata.read(str(path), kind)
    assert corpus.kind == "ids" and corpus.chars == "" and corpus.shards[0].dtype == ids.dtype
    assert corpus.shards[0].tolist() == ids.tolist()
    assert corpus.vocab == 256  # 251 ids, rounded up to a multiple of 64
    assert is_mapped(corpus.shards[0], path)


@pytest.mark.parametrize("top, vocab", [(0, 64), (63, 64), (64, 128), (50256, 50304)])
def test_the_vocabulary_of_token_files_has_room_for_the_highest_id_of_all(top, vocab, tmp_path):
    np.save(tmp_path / "1.npy", np.array([0, top], np.uint16))
    np.save(tmp_path / "2.npy", np.array([0], np.uint8))
    assert chardata.read(str(tmp_path / "*.npy"), "char").vocab == vocab


def test_a_glob_is_read_in_the_order_of_names_and_into_folders(tmp_path):
    (tmp_path / "b").mkdir()
    for name in ("c.txt", "a.txt", "b/x.txt", "b.md"):
        (tmp_path / name).write_text(name)
    texts = [shard.tobytes().decode() for shard in chardata.read(str(tmp_path / "**" / "*.txt"), "byte").shards]
    assert texts == ["a.txt", "b/x.txt", "c.txt"]


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path):
    (tmp_path / "[a].txt").write_text("brackets")
    (tmp_path / "a.txt").write_text("plain")
    assert chardata.read(str(tmp_path / "[a].txt"), "byte").shards[0].tobytes() == b"brackets"


def test_several_texts_share_one_vocabulary(tmp_path):
    (tmp_path / "1").write_text("ab")
    (tmp_path / "2").write_text("bc")
    corpus = chardata.read(str(tmp_path / "?"), "char")
    assert corpus.chars == "abc" and [shard.tolist() for shard in corpus.shards] == [[0, 1], [1, 2]]


def test_a_given_vocabulary_is_kept(tmp_path):
    (tmp_path / "x").write_text("ba")
    corpus = chardata.read(str(tmp_path / "x"), "char", chars="zab")
    assert corpus.chars == "zab" and corpus.vocab == 3 and corpus.shards[0].tolist() == [2, 1]


def test_the_default_text_is_large_and_the_same_each_time():
    first, second = (chardata.read(None, "char") for _ in range(2))
    assert first.digest == second.digest and chardata.length(first.shards) == len(chardata.default_text()) > 400_000


def test_without_the_help_pages_the_default_text_is_the_source_of_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)  # what a stripped Python has
    assert len(chardata.default_text()) > 100_000 and "import" in chardata.default_text()


# ------------------------------------------------------------------------------------------------------ URLs


@pytest.fixture(params=["file", "memory", "s3"])
def remote(request, tmp_path, monkeypatch):
    """(an fsspec URL of an empty folder, a function that writes a file into it); the cache is empty too."""
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if request.param == "s3":
        request.getfixturevalue("s3")
    url = f"{request.param}://{'bucket' if request.param == 's3' else ''}{tmp_path}/remote"
    fs, path = fsspec.core.url_to_fs(url)

    def write(name, content):
        fs.makedirs(f"{path}/{name}".rsplit("/", 1)[0], exist_ok=True)
        fs.pipe_file(f"{path}/{name}", content)

    return url, write


def test_a_url_is_read_like_a_file(remote):
    url, write = remote
    write("x.txt", "grüß\r\n".encode())
    write("ids.bin", np.array([1, 2, 3], np.uint16).tobytes())
    corpus = chardata.read(f"{url}/x.txt", "char")
    assert chardata.decode(corpus.shards[0].tolist(), "char", corpus.chars) == "grüß\r\n".encode()
    assert chardata.read(f"{url}/ids.bin", "char").shards[0].tolist() == [1, 2, 3]


def test_a_glob_of_a_url_is_read_in_the_order_of_names(remote):
    url, write = remote
    for name in ("c.txt", "a.txt", "b.txt"):
        write(name, name.encode())
    assert [shard.tobytes() for shard in chardata.read(f"{url}/*.txt", "byte").shards] == [b"a.txt", b"b.txt", b"c.txt"]


def test_a_url_that_looks_like_a_glob_is_that_file(remote):
    url, write = remote
    write("[a].txt", b"brackets")
    write("a.txt", b"plain")
    assert chardata.read(f"{url}/[a].txt", "byte").shards[0].tobytes() == b"brackets"


def test_a_url_of_a_folder_is_refused_and_named(remote):
    url, write = remote
    write("folder/x.txt", b"x")
    with pytest.raises(IsADirectoryError) as caught:
        chardata.read(f"{url}/folder", "byte")
    assert f"{url}/folder" in str(caught.value)


def test_a_url_of_no_file_is_an_error_that_names_it(remote):
    with pytest.raises(FileNotFoundError, match="nothing.txt"):
        chardata.read(f"{remote[0]}/nothing.txt", "char")


def test_a_url_that_matches_no_file_is_an_error_that_names_it(remote):
    with pytest.raises(FileNotFoundError, match=r"nothing\*.txt"):
        chardata.read(f"{remote[0]}/nothing*.txt", "char")


def test_files_of_one_name_in_two_remote_folders_are_two_files(remote):
    url, write = remote
    write("train/text", b"for training")
    write("test/text", b"for testing")
    texts = [chardata.read(f"{url}/{folder}/text", "byte").shards[0].tobytes() for folder in ("train", "test", "train")]
    assert texts == [b"for training", b"for testing", b"for training"]


def test_a_remote_file_is_fetched_once_and_again_when_it_was_replaced(remote):
    url, write = remote
    write("x", b"old")
    first, second = (chardata.local_files(f"{url}/x") for _ in range(2))
    assert first == second
    write("x", b"newer")
    assert chardata.read(f"{url}/x", "byte").shards[0].tobytes() == b"newer"


# ---------------------------------------------------------------------------------------------------- errors


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npz():
    file = io.BytesIO()
    np.savez(file, a=np.arange(3))
    return file.getvalue()


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("empty.txt", b"", "is empty"),
        ("empty.bin", b"", "is empty"),
        ("empty.npy", b"", "not a .npy file of numbers: "),  # it would have a header
        ("odd.bin", b"abc", "3 bytes; a .bin of uint16 tokens has an even number"),
        ("latin.txt", "café".encode("latin-1"), "not UTF-8 text (byte 0xe9 at 3); read it as bytes instead"),
        ("signed.npy", npy(np.arange(3, dtype=np.int32)), "shape (3,) of int32; needs (n,) of unsigned integers"),
        ("float.npy", npy(np.ones(3)), "shape (3,) of float64; needs (n,) of unsigned integers"),
        ("two.npy", npy(np.ones((2, 3), np.uint8)), "shape (2, 3) of uint8; needs (n,) of unsigned integers"),
        ("scalar.npy", npy(np.uint8(3)), "shape () of uint8; needs (n,) of unsigned integers"),
        ("none.npy", npy(np.zeros(0, np.uint8)), "is empty"),
        ("text.npy", b"hello, world", "not a .npy file of numbers: "),
        ("cut.npy", npy(np.arange(1000, dtype=np.uint16))[:-1], "not a .npy file of numbers: "),
        ("header.npy", npy(np.arange(1000, dtype=np.uint16))[:20], "not a .npy file of numbers: "),
        ("objects.npy", npy(np.array([{}, 1], object)), "not a .npy file of numbers: "),
        ("archive.npy", npz(), "not a .npy file of numbers: "),
        ("other.txt", b"abcX", "character 'X' at 3 is not among the 3 of the vocabulary"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value[:12] else "",
)
def test_a_file_that_is_not_what_it_should_be_is_named(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as caught:
        chardata.read(str(tmp_path / name), "char", chars="abc")
    assert str(tmp_path / name) in str(caught.value) and message in str(caught.value)


def test_tokens_and_text_in_one_data_set_are_refused(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"ab")
    (tmp_path / "b.txt").write_bytes(b"ab")
    with pytest.raises(ValueError, match=r"\*: token files \(.bin, .npy\) and text in one data set"):
        chardata.read(str(tmp_path / "*"), "char")


@pytest.mark.parametrize("data", ["missing.txt", "missing*", "nowhere/x"])
def test_a_missing_file_is_named(data, tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        chardata.read(str(tmp_path / data), "char")
    assert str(tmp_path / data) in str(caught.value)


def test_a_folder_is_refused_with_what_to_write_instead(tmp_path):
    with pytest.raises(IsADirectoryError) as caught:
        chardata.read(str(tmp_path), "char")
    assert f"'{tmp_path}/*.txt'" in str(caught.value)


# ---------------------------------------------------------------------------------------------------- digest


def test_the_digest_notices_any_byte_any_length_any_type_and_where_shards_end():
    tokens = np.arange(1000, dtype=np.uint16)
    same = [tokens, tokens.copy(), np.array(tokens.tolist(), np.uint16)]
    others = [tokens[:-1], tokens[1:], np.append(tokens, tokens[:1])]
    others += [tokens.astype(np.uint32), tokens.view(np.uint8), tokens.view(">u2")]
    for i in (0, 500, 999):
        changed = tokens.copy()
        changed[i] ^= 256
        others.append(changed)
    assert len({chardata.digest([shard]) for shard in same}) == 1
    data_sets = [*([shard] for shard in others), [tokens], cut(tokens, [500, 500])]
    assert len({chardata.digest(shards) for shards in data_sets}) == len(data_sets)


def test_the_digest_of_a_large_file_notices_its_length_and_its_first_and_last_bytes():
    def digest(size, *ones):
        shard = np.zeros(size, np.uint8)
        shard[list(ones)] = 1
        return chardata.digest([shard])

    size = 20 << 20
    digests = [digest(size), digest(size + 1), digest(size, 0), digest(size, -1), digest(size, (1 << 20) - 1)]
    assert len(set(digests)) == 5 and digest(size) == digests[0]


def test_the_digest_of_a_text_notices_other_characters(tmp_path):
    for name, text in [("a", "abcab"), ("b", "xyzxy")]:
        (tmp_path / name).write_text(text)
    a, b = (chardata.read(str(tmp_path / name), "char") for name in "ab")
    assert a.digest != b.digest


@pytest.mark.parametrize("text", ["1 -1", "4294967296"])
def test_a_number_that_is_no_id_is_a_value_error(text):
    with pytest.raises(ValueError, match=f"{text.split()[-1]} is not an id"):
        chardata.encode(text, "ids", "")


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("batch_size", [4, 512])
def test_an_evaluation_is_dealt_to_the_ranks_in_equal_shares_of_batches_that_are_not_too_large(world_size, batch_size):
    share = partial(chardata.every_window, [np.zeros(62 * 16 + 1, np.uint8)], 16, batch_size, world_size=world_size)
    rows = [[len(x) for x, _ in share(rank=rank)] for rank in range(world_size)]
    assert sum(map(sum, rows)) == 62 and max(map(max, rows)) <= batch_size
    assert max(map(sum, rows)) <= -(-62 // world_size) + max(map(len, rows))  # each batch is rounded up
    assert max(map(len, rows)) == -(-62 // (batch_size * world_size)) <= min(map(len, rows)) + 1
