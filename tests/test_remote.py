"""Storage that is not a disk: runs on an S3 server, one that is slow, that fails, and that is gone. What of it ckpt and
chardata promise for any URL is in their own tests."""

import json
import re
from functools import partial

import numpy as np
import pytest
import torch
from conftest import SECRET, TINY, Program, losses, run, same, same_training

import chardata
import ckpt

fsspec = pytest.importorskip("fsspec")
STATE = {"model": {"w": torch.arange(50_000.0)}}


@pytest.fixture
def folder(s3, tmp_path):
    return f"s3://bucket{tmp_path}/out"


def listed(folder):
    """{name: content} of what a stranger sees there."""
    fs, path = fsspec.core.url_to_fs(folder)
    fs.invalidate_cache()
    return {name.rsplit("/", 1)[-1]: fs.cat_file(name) for name in (fs.find(path) if fs.exists(path) else [])}


def fetched(folder, to):
    to.mkdir()
    for name, content in listed(folder).items():
        (to / name).write_bytes(content)
    return to


def said_secret(text):
    return [secret for secret in SECRET if secret in text]


# ------------------------------------------------------------------------------------------------ whole runs


def test_a_run_goes_on_from_s3_with_nothing_local_and_says_no_credentials(s3, folder, flags, undisturbed, tmp_path):
    more = [*flags, "--save-every", 10, "--keep", 2, "--out", folder]
    with Program(*more) as program:
        program.read_lines(45)
        program.process.terminate()
        stopped = program.finish()
    assert stopped.code == 3 and stopped.err == "", stopped
    before = [name for name in listed(folder) if name.endswith(".pt")]
    ended = run(*more)
    assert ended.code == 0 and ended.err == "" and len(before) in (2, 3), ended
    assert f"are in {folder}" in ended.out
    out = fetched(folder, tmp_path / "fetched")
    assert same_training(out, undisturbed(1))
    assert len(list(out.glob("step-*.pt"))) in (2, 3)  # the last two, and the best
    config = json.loads((out / "config.json").read_text())
    assert config["out"] == folder and config["ranks"] == 1
    everything = b"".join(listed(folder).values()).decode("latin-1")
    assert not said_secret(everything + stopped.out + stopped.err + ended.out + ended.err)


def test_two_ranks_fetch_each_shard_once(s3, folder, text):
    fs, path = fsspec.core.url_to_fs(folder.replace("/out", "/data"))
    raw = text.read_bytes()
    for i, part in enumerate((raw[:2000], b"", raw[2000:])):
        fs.pipe_file(f"{path}/{i}.txt", part)
    s3.requests.clear()
    data = [*TINY, "--data", folder.replace("/out", "/data/*.txt")]
    ran = run(*data, "--steps", 2, "--spawn", 2, "--out", folder)
    assert ran.code == 0 and ran.err == "", ran
    gets = [path for method, path in s3.requests if method == "GET" and ".txt" in path]
    assert sorted(re.findall(r"\d\.txt", "".join(gets))) == ["0.txt", "1.txt", "2.txt"]  # once for both


def test_a_server_that_goes_away_ends_no_training_and_leaves_no_half_a_checkpoint(s3, folder, flags, tmp_path):
    more = [*flags, "--save-every", 30, "--steps", 60, "--out", folder]
    with Program(*more) as program:
        program.read_lines(40)
        s3.fail("503")
        ran = program.finish()
    assert ran.code == 1 and "step 60/60" in ran.out and "Traceback" not in ran.err, ran
    warnings = ran.err.splitlines()
    assert all(line.startswith("Warning: ") and folder in line for line in warnings), ran
    assert [line for line in warnings if "checkpoint not written" in line] and not said_secret(ran.err), ran
    s3.mend()
    assert all(name.startswith(("step-00000030-", "config.json", "metrics.jsonl")) for name in listed(folder))
    ended = run(*more)
    assert ended.code == 0 and ended.err == "", ended
    assert [step for step, _ in losses(fetched(folder, tmp_path / "fetched"))] == list(range(1, 61))


def test_a_server_that_does_not_answer_at_the_start_is_one_line(s3, folder, flags):
    s3.fail("503")
    ran = run(*flags, "--out", folder)
    assert ran.code == 2 and ran.err.count("\n") == 1 and folder in ran.err, ran
    assert not said_secret(ran.err)
    s3.mend()
    assert not listed(folder)


def test_a_password_in_a_url_is_not_shown(text, tmp_path):
    for flag in ("--out", "--data"):
        ran = run(*TINY, "--data", text, "--out", tmp_path / "out", flag, "ftp://me:doNotSayThis@127.0.0.1:1/x")
        assert ran.code == 2 and ran.err.count("\n") == 1 and "127.0.0.1" in ran.err, ran
        assert "doNotSayThis" not in ran.err + ran.out


# ------------------------------------------------------------------------------------------------ faults


@pytest.mark.parametrize("fault", ["500", "503", "cut", "slow"])
@pytest.mark.parametrize("method", ["PUT", "GET", "HEAD"])
def test_what_goes_wrong_once_is_tried_again(s3, folder, fault, method):
    old = ckpt.save(folder, STATE, 1)
    s3.fail(fault, times=1, method=method)
    new = ckpt.save(folder, STATE, 2)
    found, rejected = ckpt.newest(folder)
    assert found.entry == new and rejected == [] and same(found.state, STATE)
    assert ckpt.entries(folder) == [old, new]


def test_an_upload_that_keeps_failing_is_an_error_after_bounded_trials_and_leaves_nothing(s3, folder):
    old = ckpt.save(folder, STATE, 1)
    s3.fail("cut", method="PUT")
    with pytest.raises(OSError, match=re.escape(folder)):
        ckpt.save(folder, STATE, 2)
    assert 2 <= sum(method == "PUT" for method, _ in s3.requests) <= 20  # 5 times s3fs, 2 botocore, 2 aiohttp
    s3.mend()
    assert ckpt.newest(folder)[0].entry == old and list(listed(folder)) == [old.name]


def test_a_download_that_breaks_off_is_gone_on_with(s3, folder):
    entry = ckpt.save(folder, STATE, 1)
    s3.fail("half", times=2, method="GET", path=entry.name)
    assert same(ckpt.load(folder, entry), STATE)


def test_a_download_that_keeps_breaking_off_is_an_error_and_no_older_one_is_taken_instead(s3, folder):
    new = [ckpt.save(folder, STATE, step) for step in (1, 2)][-1]
    s3.fail("half", method="GET", path=new.name)
    with pytest.raises(OSError, match=re.escape(folder)):
        ckpt.newest(folder)
    s3.mend()
    assert ckpt.newest(folder)[0].entry == new


def test_half_a_file_left_by_an_upload_that_failed_is_taken_away(tmp_path, monkeypatch):
    """Where an upload has no end that makes it whole: it is taken away."""
    folder = f"file://{tmp_path}/out"
    old = ckpt.save(folder, STATE, 1)

    def half(self, here, there, **how):
        with open(there, "wb") as file:
            file.write(open(here, "rb").read()[:1000])
        raise ConnectionError("gone")

    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.put_file", half)
    with pytest.raises(OSError, match="gone"):
        ckpt.save(folder, STATE, 2)
    assert list(listed(folder)) == [old.name]


@pytest.mark.parametrize("fault", ["half", "500"])
def test_data_that_keep_breaking_off_are_an_error_and_never_half_a_file(s3, folder, fault, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/cache")
    tokens = np.arange(60_000, dtype=np.uint16)
    fs, path = fsspec.core.url_to_fs(folder)
    fs.pipe_file(f"{path}/x.bin", tokens.tobytes())
    read = partial(chardata.read, f"{folder}/x.bin", "char")
    s3.fail(fault, method="GET", path="x.bin")
    with pytest.raises(OSError):
        read()
    assert not [copy for copy in (tmp_path / "cache").rglob("x.bin")]
    s3.fail(fault, times=1, method="GET", path="x.bin")
    assert read().shards[0].tolist() == tokens.tolist()


def test_an_upload_in_parts_that_breaks_off_is_not_there(trials, s3, folder):
    """More than 100 MB, so that s3fs uploads it in parts."""
    old, large = ckpt.save(folder, STATE, 1), {"model": {"w": torch.zeros(30_000_000)}}

    def trial(number: int) -> None:
        s3.fail(["503", "cut"][number % 2], method=["PUT", "POST"][number // 2 % 2], path="step-00000002-")
        with pytest.raises(OSError):
            ckpt.save(folder, large, 2)
        s3.mend()
        assert list(listed(folder)) == [old.name]

    trials("an upload in parts breaks off", trial, 0, 4, at_once=1)
    new = ckpt.save(folder, large, 2)
    assert ckpt.newest(folder)[0].entry == new
