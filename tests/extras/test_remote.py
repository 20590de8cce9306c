"""Tests of extras/remote.py: checkpoints, text files and data at URLs.

The URLs are of three kinds: file://, memory:// and an S3 server on this machine, which can be told to
be slow, to fail and to break off (see s3_server.py).
"""

import errno
import functools
import hashlib
import itertools
import json
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from inspect import signature
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import (
    ENVIRONMENT,
    ROOT,
    TINY,
    Program,
    losses,
    run,
    same,
    same_training,
    wait_for,
)
from s3_server import SECRET

import chardata
import ckpt

fsspec = pytest.importorskip("fsspec")
from extras import remote  # noqa: E402

pytest_plugins = ["s3_server"]
STATE = {"model": {"w": torch.arange(50_000.0)}}


@pytest.fixture
def folder(s3, tmp_path):
    """The URL of a folder on the S3 server."""
    return f"s3://bucket{tmp_path}/out"


@pytest.fixture(params=["file", "memory", "s3"])
def url(request, tmp_path):
    """The URL of a folder that does not exist yet, of each kind."""
    if request.param == "s3":
        request.getfixturevalue("s3")
    yield f"{request.param}://{'bucket' if request.param == 's3' else ''}{tmp_path}/out"
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def files():
    return remote.storage(ckpt)


def listed(folder):
    """Return {name: content} of a folder, without extras/remote.py."""
    fs, path = fsspec.core.url_to_fs(folder)
    fs.invalidate_cache()
    found = fs.find(path) if fs.exists(path) else []
    return {name.rsplit("/", 1)[-1]: fs.cat_file(name) for name in found}


def put(folder, name, data):
    """Write a file into a folder, without extras/remote.py."""
    fs, path = fsspec.core.url_to_fs(folder)
    fs.makedirs(f"{path}/{name}".rsplit("/", 1)[0], exist_ok=True)
    fs.pipe_file(f"{path}/{name}", data)


def put_named(folder, step, data):
    """Write a file whose name has the digest of its content, and return the name."""
    name = f"step-{step:08d}-{hashlib.sha256(data).hexdigest()[:32]}.pt"
    put(folder, name, data)
    return name


def some_state(step=0):
    return {"model": {"w": torch.full((100,), float(step))}, "step": step}


def fetched(folder, to):
    to.mkdir()
    for name, content in listed(folder).items():
        (to / name).write_bytes(content)
    return to


def said_secret(text):
    return [secret for secret in SECRET if secret in text]


# ------------------------------------------------------------------------------------ checkpoints


def test_storage_has_functions_with_the_names_and_arguments_of_ckpt(files, url):
    shared = vars(files).keys() - {"remove"}
    changed = {name for name in shared if getattr(files, name) is not getattr(ckpt, name)}
    assert {"save", "newest", "lock", "append_text"} < changed and len(changed) == 11
    for name in changed:  # the first argument is `url` instead of `folder`
        ours, theirs = (list(signature(getattr(m, name)).parameters) for m in (files, ckpt))
        assert ours[1:] == theirs[1:], name
    assert files.snapshot is ckpt.snapshot and files.restore_ is ckpt.restore_
    assert files.list_checkpoints(url) == [] and files.newest(url) == (None, {})
    files.make_folder(url)
    assert files.lock(url) is None
    entry = files.save(url, some_state(3), 3, 1.5, 2)
    assert files.list_checkpoints(url) == [entry] and entry.loss == 1.5 and entry.step == 3
    assert same(files.load(url, entry), some_state(3))
    assert same(files.newest(url)[0].state, some_state(3)) and files.newest(url)[1] == {}


def test_a_checkpoint_at_a_url_has_the_same_bytes_and_name_as_a_local_one(files, url, tmp_path):
    local = ckpt.save(str(tmp_path / "local"), some_state(400), 400, 1.88118)
    assert files.save(url, some_state(400), 400, 1.88118) == local
    assert listed(url) == {local.name: (tmp_path / "local" / local.name).read_bytes()}


def test_only_checkpoints_are_listed_and_in_the_order_of_steps(files, url):
    steps = [100_000_000, 99_999_999, 5, 1_000]
    for step in steps:
        files.save(url, some_state(step), step)
    good = files.list_checkpoints(url)[0].name
    for name in ("metrics.jsonl", f"{good}.damaged", f"x{good}", good[:-4] + ".pt"):
        put(url, name, b"")
    assert [entry.step for entry in files.list_checkpoints(url)] == sorted(steps)
    assert files.newest(url)[0].state["step"] == 100_000_000


def flipped(data, at):
    data = bytearray(data)
    data[at] ^= 1
    return bytes(data)


DAMAGES = {
    "cut to nothing": lambda data: b"",
    "cut by a byte": lambda data: data[:-1],
    "a byte too long": lambda data: data + b"\0",
    "middle byte": lambda data: flipped(data, len(data) // 2),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(files, url, damage):
    old, new = (files.save(url, some_state(step), step) for step in (10, 20))
    put(url, new.name, damage(listed(url)[new.name]))
    found, rejected = files.newest(url)
    [(name, reason)] = rejected.items()
    assert found.entry == old and same(found.state, some_state(10))
    assert name == new.name and reason.startswith("damaged")
    files.set_aside(url, new.name)
    assert files.list_checkpoints(url) == [old] and f"{new.name}.damaged" in listed(url)


def test_newest_raises_if_there_are_checkpoints_but_none_verifies(files, url):
    put_named(url, 10, b"not a checkpoint")
    bad = put_named(url, 20, b"nor is this")
    with pytest.raises(ValueError, match=f"{url}: no checkpoint can be used; {bad}: not a"):
        files.newest(url)


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_not_reported(files, url):
    new = [files.save(url, some_state(step), step) for step in (10, 20)][-1]

    def load(folder, entry):
        remote._remove(url, new.name)  # another process prunes
        return files.load(folder, entry)

    found, rejected = files.newest(url, load)
    assert found.entry.step == 10 and rejected == {}


def test_an_error_of_the_local_disk_rejects_no_checkpoint(files, url, monkeypatch):
    for step in (10, 20):
        files.save(url, some_state(step), step)
    make = tempfile.mkdtemp

    def fail_once(*args, **more):
        monkeypatch.setattr(tempfile, "mkdtemp", make)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(tempfile, "mkdtemp", fail_once)
    with pytest.raises(OSError, match="Too many open files"):
        files.newest(url)
    assert files.newest(url)[0].entry.step == 20


def test_nan_is_refused_and_nothing_is_uploaded(files, url):
    with pytest.raises(ValueError, match="w contains NaN"):
        files.save(url, {"model": {"w": torch.tensor([1.0, math.nan])}}, 1)
    assert listed(url) == {}


def test_a_sharded_checkpoint_is_refused_and_no_older_one_is_used(files, url):
    files.save(url, some_state(10), 10)
    sharded = ckpt.make_entry(20, 1.5, "0123456789abcdef" * 2, ending="")
    put(url, f"{sharded.name}/manifest.json", b"{}")
    assert files.list_checkpoints(url)[-1] == sharded
    with pytest.raises(NotImplementedError, match=f"{sharded.name} is a sharded checkpoint"):
        files.newest(url)
    remote._remove(url, sharded.name)
    assert [entry.step for entry in files.list_checkpoints(url)] == [10]


def test_prune_keeps_the_last_the_best_and_other_files(files, url):
    saved = [files.save(url, some_state(i), i, [2.0, 1.0, 3.0, None][i]) for i in range(4)]
    put(url, "metrics.jsonl", b"{}")
    files.prune(url, 1)
    assert files.list_checkpoints(url) == [saved[1], saved[3]] and "metrics.jsonl" in listed(url)


def test_a_checkpoint_of_the_same_step_is_replaced(files, url):
    for seed in (1, 2, 3):
        last = files.save(url, some_state(seed), 10, loss=None if seed == 2 else 1.5)
        assert files.list_checkpoints(url) == [last]


def test_removing_what_does_not_exist_is_no_error(files, url):
    entry = files.save(url, some_state(), 1)
    for _ in range(2):
        remote._remove(url, entry.name)
    assert listed(url) == {}


def test_a_server_that_does_not_answer_is_not_taken_for_an_empty_folder(files):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(OSError, match="^http://127.0.0.1:.*: .*[Cc]onnect"):
        files.newest(f"http://127.0.0.1:{port}/out")


def test_code_in_a_checkpoint_is_refused_and_not_run(files, url, tmp_path):
    class MakesAFolder:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "was run"),)

    torch.save({"model": {"w": MakesAFolder()}}, tmp_path / "bad")
    bad = put_named(url, 20, (tmp_path / "bad").read_bytes())
    with pytest.raises(ValueError, match=f"{bad}: not a checkpoint: "):
        files.newest(url)
    assert not (tmp_path / "was run").exists()


def test_a_folder_that_is_a_file_is_an_oserror(files, tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(OSError, match="out"):
        files.save(f"file://{tmp_path}/out", some_state(), 1)
    assert (tmp_path / "out").read_text() == "mine" and os.listdir(tmp_path) == ["out"]


def test_a_scheme_that_fsspec_does_not_know_is_one_clear_error(files):
    with pytest.raises(ValueError, match="nowhere"):
        files.newest("nowhere://x/out")


# -------------------------------------------------------------------------------------- text files


def test_lines_are_uploaded_with_the_next_save_or_write(files, url):
    files.make_folder(url)
    assert files.read_text(url, "a.txt") == ""
    files.write_text(url, "a.txt", "ä\n")
    files.append_text(url, "a.txt", "b\n")
    assert listed(url)["a.txt"] == "ä\n".encode() and files.read_text(url, "a.txt") == "ä\nb\n"
    files.save(url, STATE, 1)
    assert listed(url)["a.txt"] == "ä\nb\n".encode()
    files.append_text(url, "a.txt", "c\n")
    files.write_text(url, "other.txt", "other\n")
    assert listed(url)["a.txt"] == "ä\nb\n".encode() and listed(url)["other.txt"] == b"other\n"
    files.save(url, STATE, 2, None, 1)
    assert listed(url)["a.txt"] == "ä\nb\nc\n".encode()


def test_a_line_that_is_appended_during_an_upload_is_in_the_next_one(files, monkeypatch):
    fs, url = fsspec.filesystem("memory"), "memory://out"
    files.write_text(url, "a.txt", "1\n")
    files.write_text(url, "b.txt", "1\n")
    upload = type(fs).pipe_file

    def append_during(self, path, value, **more):  # as training does while a save runs
        files.append_text(url, "b.txt", "2\n")
        monkeypatch.undo()
        upload(self, path, value, **more)

    monkeypatch.setattr(type(fs), "pipe_file", append_during)
    for step in (1, 2):
        files.save(url, STATE, step)
    assert listed(url)["b.txt"] == b"1\n2\n"
    fs.store.clear()


def test_a_line_is_added_to_what_an_earlier_process_wrote(files, url):
    files.make_folder(url)
    remote.storage(ckpt).write_text(url, "a.txt", "old\n")
    assert files.read_text(url, "a.txt") == "old\n"
    files.append_text(url, "a.txt", "new\n")
    files.save(url, STATE, 1)
    assert listed(url)["a.txt"] == b"old\nnew\n"


def test_a_text_that_cannot_be_uploaded_is_a_warning_and_the_checkpoint_is_there(s3, folder, files):
    files.write_text(folder, "metrics.jsonl", "1\n")
    files.append_text(folder, "metrics.jsonl", "2\n")
    s3.fail("500", method="PUT", path="metrics.jsonl")
    with pytest.warns(UserWarning, match=r"metrics\.jsonl not written, the next save tries again"):
        entry = files.save(folder, STATE, 1)
    assert [path for method, path in s3.requests if method == "PUT" and "metrics" in path]
    s3.mend()
    assert files.newest(folder)[0].entry == entry
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        files.save(folder, STATE, 2)
    assert listed(folder)["metrics.jsonl"] == b"1\n2\n"


def test_a_url_with_a_password_is_refused_and_not_repeated(files):
    for call in (files.newest, files.make_folder, remote.download):
        for url in (
            "ftp://me:doNotSayThis@127.0.0.1:1/x",
            "ftp://me:doNot/SayThis@127.0.0.1:1/x",
            "ftp://me:doNotSayThis#@127.0.0.1:1/x",
            "ftp://:doNotSayThis@127.0.0.1:1/x",
            "ftp://me@work.com:doNotSayThis@127.0.0.1:1/x",
            "ftp://my name:doNotSayThis@127.0.0.1:1/x",
            "simplecache::ftp://me:doNotSayThis@127.0.0.1:1/x",
            "zip://a.txt::ftp://me:doNotSayThis@127.0.0.1:1/x",
        ):
            with pytest.raises(ValueError, match="FSSPEC_FTP_PASSWORD") as caught:
                call(url)
            assert not re.search("doNot|SayThis", str(caught.value))


def test_an_at_sign_without_a_password_is_allowed(tmp_path, cache):
    (tmp_path / "a:b@c").write_text("x")
    assert contents(remote.download(f"file://{tmp_path}/a:b@c")) == [b"x"]
    for url in (
        "http://127.0.0.1:1/me@home",  # 1 is a port
        "http://127.0.0.1:1?mail=me@home",
        "http://[::1]:1/me@home",
        "zip://a:b.txt::memory://bucket/me@home",
    ):
        assert not remote._has_password(url)


def test_a_password_comes_from_the_environment(tmp_path):
    """The program that is run here prints what fsspec's file system for ftp gets."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from fsspec.implementations import ftp\n"
        "ftp.FTPFileSystem.__init__ = lambda self, *a, **k: (print(a, k), sys.exit(0))\n"
        "import remote; remote.download('ftp://me@host/x')\n"
    )
    folder = str(Path(remote.__file__).parent)
    ran = subprocess.run(
        [sys.executable, "-c", code, folder],
        env={**os.environ, "FSSPEC_FTP_PASSWORD": "secret"},
        capture_output=True,
        text=True,
    )
    assert "'password': 'secret'" in ran.stdout and "'username': 'me'" in ran.stdout, ran


# ------------------------------------------------------------------------- faults of the storage


@pytest.mark.parametrize("fault", ["500", "503", "cut", "slow"])
@pytest.mark.parametrize("method", ["PUT", "GET", "HEAD"])
def test_what_fails_once_is_tried_again(s3, folder, files, fault, method):
    old = files.save(folder, STATE, 1)
    s3.fail(fault, times=1, method=method)
    new = files.save(folder, STATE, 2)
    found, rejected = files.newest(folder)
    assert found.entry == new and rejected == {} and same(found.state, STATE)
    assert files.list_checkpoints(folder) == [old, new]
    assert s3.requests and s3.fault(method, "") == "", "the fault did not happen"


def test_an_upload_that_keeps_failing_is_an_error_and_leaves_nothing(s3, folder, files):
    old = files.save(folder, STATE, 1)
    s3.fail("cut", method="PUT")
    with pytest.raises(OSError, match=re.escape(folder)):
        files.save(folder, STATE, 2)
    tried = sum(method == "PUT" for method, _ in s3.requests)
    assert 2 <= tried <= 20  # 5 times by s3fs, 2 by botocore, 2 by aiohttp
    s3.mend()
    assert files.newest(folder)[0].entry == old and list(listed(folder)) == [old.name]


def test_a_download_that_breaks_off_is_continued(s3, folder, files):
    entry = files.save(folder, STATE, 1)
    s3.fail("half", times=2, method="GET", path=entry.name)
    assert same(files.load(folder, entry), STATE)
    gets = [path for method, path in s3.requests if method == "GET" and entry.name in path]
    assert len(gets) >= 3


def test_a_download_that_keeps_breaking_off_is_an_error_and_no_older_one_is_used(s3, folder, files):
    new = [files.save(folder, STATE, step) for step in (1, 2)][-1]
    s3.fail("half", method="GET", path=new.name)
    with pytest.raises(OSError, match=re.escape(folder)):
        files.newest(folder)
    s3.mend()
    assert files.newest(folder)[0].entry == new


def test_checkpoints_that_may_not_be_deleted_are_a_warning(files, url, monkeypatch):
    first = files.save(url, some_state(1), 1)

    def refuse(path):
        raise PermissionError(13, "Access Denied")

    with remote._file_system(url) as (fs, _):
        monkeypatch.setattr(fs, "rm_file", refuse)
    with pytest.warns(UserWarning, match=f"older checkpoints not deleted: {url}: Access Denied"):
        second = files.save(url, some_state(2), 2, keep=1)
    assert files.list_checkpoints(url) == [first, second]


def test_after_an_error_a_new_connection_is_made(tmp_path):
    url = f"memory://{tmp_path}"
    with remote._file_system(url) as (before, _):
        pass
    with remote._file_system(url) as (same_one, _):
        assert same_one is before
    with pytest.raises(OSError, match="EOFError"), remote._file_system(url):
        raise EOFError
    with remote._file_system(url) as (after, _):
        assert after is not before


def test_an_ftp_server_cannot_hold_checkpoints(files, monkeypatch):
    """fsspec makes an empty folder of some errors of the server, so a run would begin again."""
    monkeypatch.setattr("fsspec.implementations.ftp.FTP", Mock())
    with pytest.raises(ValueError, match="an ftp server cannot hold checkpoints"):
        files.newest("ftp://localhost/run")
    with pytest.raises(ValueError, match="an ftp server cannot hold checkpoints"):
        files.save("ftp://localhost/run", STATE, 1)


def test_half_a_file_of_an_upload_that_failed_is_deleted(files, tmp_path, monkeypatch):
    folder = f"file://{tmp_path}/out"  # not an object store: the file exists before it is complete
    old = files.save(folder, STATE, 1)
    written = []

    def half(self, here, there, **how):
        Path(there).write_bytes(Path(here).read_bytes()[:1000])
        written.append(there)
        raise ConnectionError("gone")

    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.put_file", half)
    with pytest.raises(OSError, match="gone"):
        files.save(folder, STATE, 2)
    assert len(written) == 1 and list(listed(folder)) == [old.name]
    # The file of step 1 is complete. A second save of the same state does not touch it.
    assert files.save(folder, STATE, 1) == old and list(listed(folder)) == [old.name]
    path = Path(f"{tmp_path}/out/{old.name}")
    path.write_bytes(bytes(path.stat().st_size))  # damaged
    with pytest.raises(OSError, match="gone"):
        files.save(folder, STATE, 1)
    assert len(written) == 2


def test_an_error_of_a_copy_names_its_target(files, tmp_path, monkeypatch):
    def full(self, here, there, **how):
        raise OSError(errno.ENOSPC, "No space left on device", here, None, f"{tmp_path}/target")

    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.put_file", full)
    folder = f"file://{tmp_path}/out"
    with pytest.raises(OSError, match="/target: No space left on device$") as error:
        files.save(folder, STATE, 1)
    assert "ddpkit-" not in f"{error.value}"  # the local temporary file


def test_an_upload_in_parts_that_breaks_off_is_not_there(trials, s3, folder, files):
    """The file has more than 100 MB, so s3fs uploads it in parts."""
    old, large = files.save(folder, STATE, 1), {"model": {"w": torch.zeros(30_000_000)}}

    def trial(number: int) -> None:
        method = ["PUT", "POST"][number // 2 % 2]
        s3.fail(["503", "cut"][number % 2], method=method, path="step-00000002-")
        with pytest.raises(OSError):
            files.save(folder, large, 2)
        assert [path for m, path in s3.requests if m == method and "step-00000002-" in path]
        s3.mend()
        assert list(listed(folder)) == [old.name]

    trials("an upload in parts breaks off", trial, 0, 4, at_once=1)
    new = files.save(folder, large, 2)
    assert files.newest(folder)[0].entry == new


# -------------------------------------------------------------------------------------------- data


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of the cache, which is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def contents(paths):
    return [Path(path).read_bytes() for path in paths]


def test_data_at_a_url_are_read_like_files(url, cache):
    put(url, "x.txt", "grüß\r\n".encode())
    put(url, "ids.bin", np.array([1, 2, 3], np.uint16).tobytes())
    corpus = chardata.read(remote.download(f"{url}/x.txt"), "byte")
    assert corpus.tokens[0].tobytes() == "grüß\r\n".encode()
    corpus = chardata.read(remote.download(f"{url}/ids.bin"), "byte")
    assert corpus.kind == "ids" and corpus.tokens[0].tolist() == [1, 2, 3]


def test_a_glob_of_a_url_is_read_in_the_order_of_names(url, cache):
    for name in ("c.txt", "a.txt", "b.txt"):
        put(url, name, name.encode())
    assert contents(remote.download(f"{url}/*.txt")) == [b"a.txt", b"b.txt", b"c.txt"]


def test_a_url_that_looks_like_a_glob_but_is_a_file_is_that_file(url, cache):
    put(url, "[a].txt", b"brackets")
    put(url, "a.txt", b"plain")
    assert contents(remote.download(f"{url}/[a].txt")) == [b"brackets"]


def test_a_url_of_a_folder_is_refused_and_named(url, cache):
    put(url, "folder/x.txt", b"x")
    with pytest.raises(IsADirectoryError) as caught:
        remote.download(f"{url}/folder")
    assert f"{url}/folder" in str(caught.value)


@pytest.mark.parametrize("name", ["nothing.txt", "nothing*.txt"])
def test_a_url_of_no_file_is_an_error_that_names_it(url, cache, name):
    with pytest.raises(FileNotFoundError, match=re.escape(f"{url}/{name}")):
        remote.download(f"{url}/{name}")


def test_files_of_one_name_in_two_folders_are_two_files(url, cache):
    put(url, "train/text", b"for training")
    put(url, "test/text", b"for testing")
    names = ("train", "test", "train")
    paths = [remote.download(f"{url}/{name}/text")[0] for name in names]
    assert contents(paths) == [b"for training", b"for testing", b"for training"]


def test_a_file_is_downloaded_once_and_again_when_it_was_replaced(url, cache):
    put(url, "x", b"old")
    first, second = (remote.download(f"{url}/x") for _ in range(2))
    assert first == second and contents(first) == [b"old"]
    put(url, "x", b"newer")
    assert contents(remote.download(f"{url}/x")) == [b"newer"]


@pytest.fixture
def website(tmp_path):
    """Serve a folder over HTTP. Yields (folder, URL)."""
    (tmp_path / "site").mkdir()
    handler = functools.partial(SimpleHTTPRequestHandler, directory=f"{tmp_path}/site")
    handler.log_message = lambda *_: None
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield tmp_path / "site", f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_file_of_a_website_is_downloaded_again_when_it_was_replaced(website, cache):
    folder, url = website
    (folder / "x.txt").write_bytes(b"old")
    first, second = (remote.download(f"{url}/x.txt") for _ in range(2))
    assert first == second and contents(first) == [b"old"]
    (folder / "x.txt").write_bytes(b"new")  # of the same size
    os.utime(folder / "x.txt", (1e9, 1e9))
    assert contents(remote.download(f"{url}/x.txt")) == [b"new"]


def test_a_folder_of_a_website_is_an_error(website, cache):
    folder, url = website
    (folder / "books").mkdir()
    (folder / "books" / "x.txt").touch()
    with pytest.raises(IsADirectoryError, match="is a folder; name its files"):
        remote.download(f"{url}/books/")


def test_a_page_with_links_is_a_file(website, cache):
    folder, url = website
    page = b'<p>Some text. <a href="next.html">Next</a></p>'
    (folder / "book.html").write_bytes(page)
    assert contents(remote.download(f"{url}/book.html")) == [page]


def test_a_long_name_of_long_characters_can_be_copied(cache, tmp_path):
    name = "\u8a9e" * 83 + ".txt"  # 253 bytes, and 255 are possible
    (tmp_path / name).write_bytes(b"text")
    (copy,) = remote.download(f"file://{tmp_path}/{name}")
    assert contents([copy]) == [b"text"] and copy.endswith("\u8a9e.txt")


@pytest.mark.parametrize("url", ["memory://runs/lr[6]", "memory://runs/*", "memory://runs/a?"])
def test_a_url_that_is_a_pattern_is_refused_for_checkpoints(files, url):
    """fsspec would rename the files of other runs too."""
    calls = [files.list_checkpoints, files.make_folder, files.newest]
    calls += [functools.partial(call, name="x") for call in (files.set_aside, remote._remove)]
    for call in calls:
        with pytest.raises(ValueError, match="must not contain"):
            call(url)


def test_a_local_url_is_no_pattern(files, tmp_path):
    url, other = f"file://{tmp_path}/lr[6]", f"file://{tmp_path}/lr6"
    entries = [files.save(folder, some_state(1), 1) for folder in (other, url)]
    files.set_aside(url, entries[1].name)
    assert files.list_checkpoints(other) == [entries[0]] and not files.list_checkpoints(url)


def test_the_query_of_a_url_is_not_a_part_of_the_name(website, cache):
    folder, url = website
    np.arange(9, dtype=np.uint16).tofile(folder / "ids.bin")
    (copy,) = remote.download(f"{url}/ids.bin?download=true&{'signature' * 50}")
    assert copy.endswith("/ids.bin") and chardata.read([copy], "char").kind == "ids"
    (folder / "index.html").write_bytes(bytes(8))
    for query, end in (("?file=ids.bin", "ids.bin"), ("?id=3", "?id=3"), ("", "")):
        (copy,) = remote.download(f"{url}/{query}")
        assert copy.endswith(end) and contents([copy]) == [bytes(8)]


@pytest.mark.parametrize("fault", ["half", "500"])
def test_data_that_keep_breaking_off_are_an_error_and_never_half_a_file(s3, folder, fault, cache):
    data = np.arange(60_000, dtype=np.uint16).tobytes()
    put(folder, "x.bin", data)
    s3.fail(fault, method="GET", path="x.bin")
    with pytest.raises(OSError):
        remote.download(f"{folder}/x.bin")
    assert [path for method, path in s3.requests if method == "GET" and "x.bin" in path]
    assert not list(cache.rglob("x.bin*"))
    s3.fail(fault, times=1, method="GET", path="x.bin")
    assert contents(remote.download(f"{folder}/x.bin")) == [data]


def test_a_download_that_is_too_short_is_an_error(cache, tmp_path, monkeypatch):
    put(f"file://{tmp_path}/data", "x.bin", b"0123456789")
    short = lambda self, name, copy, **how: Path(copy).write_bytes(b"012")  # noqa: E731
    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.get_file", short)
    with pytest.raises(OSError, match="got 3 of 10 bytes"):
        remote.download(f"file://{tmp_path}/data/x.bin")
    assert not list(cache.rglob("x.bin*"))


def test_a_file_that_is_replaced_during_its_download_is_an_error_and_not_kept(
    url, cache, monkeypatch
):
    """Large files of S3 are read in parts, so the copy can be a mixture of both versions."""
    put(url, "text.txt", b"old")
    with remote._file_system(url) as (fs, _):
        get_file = fs.get_file

    def replace_too(name, copy, **how):
        get_file(name, copy, **how)
        time.sleep(0.02)  # the clock of some file systems
        put(url, "text.txt", b"new")

    monkeypatch.setattr(fs, "get_file", replace_too)
    with pytest.raises(OSError, match="text.txt: was changed during the download; start again"):
        remote.download(f"{url}/text.txt")
    assert not list(cache.rglob("text.txt*"))


def test_a_file_whose_attributes_change_during_its_download_has_not_changed(
    cache, tmp_path, monkeypatch
):
    url = f"file://{tmp_path}/data"
    put(url, "text.txt", b"text")
    with remote._file_system(url) as (fs, path):
        get_file = fs.get_file

    def link_too(name, copy, **how):
        get_file(name, copy, **how)
        os.link(f"{path}/text.txt", f"{path}/backup")

    monkeypatch.setattr(fs, "get_file", link_too)
    assert contents(remote.download(f"{url}/text.txt")) == [b"text"]


def test_the_time_of_the_last_access_is_not_a_part_of_the_version(cache, tmp_path, monkeypatch):
    """The file systems of sftp and smb call it "time", and a download changes it."""
    url = f"memory://{tmp_path}"
    put(url, "text.txt", b"text")
    with remote._file_system(url) as (fs, _):
        info, accessed = fs.info, itertools.count()
    monkeypatch.setattr(fs, "info", lambda path: {**info(path), "mtime": 7, "time": next(accessed)})
    first, second = (remote.download(f"{url}/text.txt") for _ in range(2))
    assert first == second and contents(first) == [b"text"]


def test_a_copy_that_is_there_costs_no_request_per_file(s3, folder, cache):
    for i in range(3):
        put(folder, f"{i}.txt", b"text")
    copies = remote.download(f"{folder}/*.txt")
    s3.requests.clear()
    assert remote.download(f"{folder}/*.txt") == copies
    assert s3.requests and not [path for _, path in s3.requests if re.search(r"\d\.txt", path)]


@pytest.mark.parametrize(
    "status, reason", [(404, "no such file, and no file matches it"), (403, "403, .*Forbidden")]
)
def test_a_website_that_refuses_a_file_is_not_taken_for_one_without_it(
    website, cache, monkeypatch, status, reason
):
    _, address = website

    def refuse(self):
        self.send_error(status)

    monkeypatch.setattr(SimpleHTTPRequestHandler, "do_GET", refuse)
    monkeypatch.setattr(SimpleHTTPRequestHandler, "do_HEAD", refuse)
    with pytest.raises(OSError, match=f"{address}/text.txt: {reason}") as error:
        remote.download(f"{address}/text.txt")
    assert (error.type is FileNotFoundError) == (status == 404)


def test_a_download_from_a_website_may_take_long_but_not_without_data(cache, monkeypatch):
    aiohttp = pytest.importorskip("aiohttp")
    with remote._file_system("https://127.0.0.1/x.txt") as (fs, _):
        timeout = fs.client_kwargs["timeout"]
    assert (timeout.total, timeout.connect, timeout.sock_read) == (None, 60, 60)
    # Of the user's own settings, none is lost.
    own = {"client_kwargs": {"trust_env": True, "timeout": aiohttp.ClientTimeout(sock_read=0.2)}}
    monkeypatch.setitem(fsspec.config.conf, "http", own)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x.txt"
        with remote._file_system(url) as (fs, _):
            assert fs.client_kwargs["trust_env"] is True
        with pytest.raises(OSError, match=f"{url}: .*[Tt]imeout"):
            remote.download(url)


def test_threads_that_ask_at_once_get_one_complete_copy(url, cache):
    data = os.urandom(3_000_000)
    put(url, "x.bin", data)
    paths = []
    ask = lambda: paths.extend(remote.download(f"{url}/x.bin"))  # noqa: E731
    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 6 and len(set(paths)) == 1 and contents(set(paths)) == [data]


ASK = """
import sys
from extras import remote
from fsspec.implementations.local import LocalFileSystem

original = LocalFileSystem.get_file
def get_file(self, name, copy, **how):
    with open(sys.argv[2], "a") as file:
        file.write("fetched\\n")
    if sys.argv[3:]:
        open(copy, "w").write("half of it")
        sys.stdin.read()
    original(self, name, copy, **how)
LocalFileSystem.get_file = get_file
sys.stdin.read(1)
print(remote.download(sys.argv[1]))
"""


def asking(data: str, folder: Path, *hanging: str) -> subprocess.Popen:
    """Start a process that downloads `data` when it can read a character."""
    return subprocess.Popen(
        [sys.executable, "-c", ASK, data, folder / "fetched", *hanging],
        env={**ENVIRONMENT, "XDG_CACHE_HOME": f"{folder}/cache", "PYTHONPATH": f"{ROOT}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_processes_that_ask_at_once_download_once_and_one_that_was_killed_blocks_none(
    tmp_path, cache
):
    parts = [b"first", b"second", b"third"]
    for i, part in enumerate(parts):
        put(f"file://{tmp_path}/data", f"{i}.bin", part)
    data = f"file://{tmp_path}/data/*.bin"
    dying, *ranks = asking(data, tmp_path, "hanging"), *(asking(data, tmp_path) for _ in range(4))
    dying.stdin.write("\n")
    dying.stdin.flush()
    wait_for(lambda: list(cache.rglob("*.part")), "half a copy")
    for rank in ranks:
        rank.stdin.write("\n")
        rank.stdin.flush()
    dying.kill()
    dying.communicate()
    answers = {rank.communicate(timeout=600)[0] for rank in ranks}
    assert answers == {f"{remote.download(data)}\n"}
    assert contents(remote.download(data)) == parts
    assert (tmp_path / "fetched").read_text().count("\n") == 1 + len(parts)
    assert not list(cache.rglob("*.part"))


# ------------------------------------------------------------------------------- the program


def test_a_run_goes_on_from_s3_with_nothing_local_and_says_no_credentials(
    s3, folder, flags, undisturbed, tmp_path
):
    more = [*flags, "--save-every", 10, "--keep", 2, "--out", folder]
    with Program(*more) as program:
        program.read_lines(45)
        program.process.terminate()
        stopped = program.finish()
    assert stopped.code == 3 and stopped.err == "", stopped
    before = [name for name in listed(folder) if name.endswith(".pt")]
    ended = run(*more)
    assert ended.code == 0 and ended.err == "" and len(before) in (2, 3), ended
    assert ended.out.endswith(f"--out {folder}\n")
    out = fetched(folder, tmp_path / "fetched")
    assert same_training(out, undisturbed(1))
    assert len(list(out.glob("step-*.pt"))) in (2, 3)  # the last two, and the best
    config = json.loads((out / "config.json").read_text())
    assert config["out"] == folder and config["ranks"] == 1
    everything = b"".join(listed(folder).values()).decode("latin-1")
    assert not said_secret(everything + stopped.out + stopped.err + ended.out + ended.err)


def test_two_ranks_download_each_file_once(s3, folder, text):
    fs, path = fsspec.core.url_to_fs(folder.replace("/out", "/data"))
    raw = text.read_bytes()
    for i, part in enumerate((raw[:2000], b"", raw[2000:])):
        fs.pipe_file(f"{path}/{i}.txt", part)
    s3.requests.clear()
    data = [*TINY, "--data", folder.replace("/out", "/data/*.txt")]
    ran = run(*data, "--steps", 2, "--spawn", 2, "--out", folder)
    assert ran.code == 0 and ran.err == "", ran
    gets = [path for method, path in s3.requests if method == "GET" and ".txt" in path]
    assert sorted(re.findall(r"\d\.txt", "".join(gets))) == [
        "0.txt",
        "1.txt",
        "2.txt",
    ]  # once for both


def test_a_server_that_goes_away_ends_no_training_and_leaves_no_half_a_checkpoint(
    s3, folder, flags, tmp_path
):
    more = [*flags, "--save-every", 30, "--steps", 60, "--out", folder]
    with Program(*more) as program:
        program.read_lines(40)
        s3.fail("503")
        ran = program.finish()
    assert ran.code == 1 and "step 60/60" in ran.out and "Traceback" not in ran.err, ran
    *warnings, error = ran.err.splitlines()
    assert error == "Error: the checkpoint of step 60 was not written"
    assert all(line.startswith("Warning: ") and folder in line for line in warnings), ran
    assert [line for line in warnings if "checkpoint not written" in line] and not said_secret(
        ran.err
    ), ran
    s3.mend()
    assert all(
        name.startswith(("step-00000030-", "config.json", "metrics.jsonl"))
        for name in listed(folder)
    )
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


def test_a_password_in_a_url_is_refused_and_not_shown(text, tmp_path):
    for flag in ("--out", "--data"):
        ran = run(
            *TINY,
            "--data",
            text,
            "--out",
            tmp_path / "out",
            flag,
            "ftp://me:doNotSayThis@127.0.0.1:1/x",
        )
        assert ran.code == 2 and ran.err.count("\n") == 1 and "FSSPEC_FTP" in ran.err, ran
        assert "doNotSayThis" not in ran.err + ran.out
