"""Tests of extras/remote.py: checkpoints, text files and data at URLs.

The URLs are of three kinds: file://, memory:// and an S3 server on this machine, which can be told to be slow, to fail
and to break off (see s3_server.py).
"""

import functools
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from inspect import signature
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import ENVIRONMENT, ROOT, TINY, Program, run, same, same_training, wait_for
from s3_server import SECRET

import chardata
import ckpt

fsspec = pytest.importorskip("fsspec")
from extras import remote  # noqa: E402

pytest_plugins = ["s3_server"]
STATE = {"model": {"w": torch.arange(50_000.0)}}
FILES = remote.storage(ckpt)


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
def cache(tmp_path, monkeypatch):
    """The folder of downloaded files, which is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


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


def some_state(step=0):
    return {"model": {"w": torch.full((100,), float(step))}, "step": step}


def fetched(folder, to):
    to.mkdir()
    for name, content in listed(folder).items():
        (to / name).write_bytes(content)
    return to


def contents(paths):
    return [Path(path).read_bytes() for path in paths]


def said_secret(text):
    return [secret for secret in SECRET if secret in text]


# ------------------------------------------------------------------------------------ checkpoints


def test_storage_has_functions_with_the_names_and_arguments_of_ckpt():
    changed = {name for name in vars(FILES) if getattr(FILES, name) is not getattr(ckpt, name)}
    assert {"save", "newest", "lock", "append_text"} < changed and len(changed) == 12
    for name in changed:  # the first argument is `url` instead of `folder`
        ours, theirs = (list(signature(getattr(m, name)).parameters) for m in (FILES, ckpt))
        assert ours[1:] == theirs[1:], name
    with pytest.raises(ValueError, match="a sharded checkpoint needs a folder, not a URL"):
        remote.storage(ckpt, write_sharded=True)


def test_a_checkpoint_at_a_url_is_the_file_that_ckpt_writes(url, tmp_path):
    assert FILES.list_checkpoints(url) == [] and FILES.newest(url) == (None, {})
    FILES.make_folder(url)
    assert FILES.lock(url) is None
    local = ckpt.save(str(tmp_path / "local"), some_state(400), 400, 1.88118)
    assert FILES.save(url, some_state(400), 400, 1.88118, 2) == local
    assert listed(url) == {local.name: (tmp_path / "local" / local.name).read_bytes()}
    found, rejected = FILES.newest(url)
    assert found.entry == local and same(found.state, some_state(400)) and rejected == {}


def test_checkpoints_are_listed_in_the_order_of_steps_and_pruned(url):
    losses = {5: 2.0, 1_000: 1.0, 99_999_999: 3.0, 100_000_000: None}
    saved = [FILES.save(url, some_state(step), step, loss) for step, loss in losses.items()]
    others = "metrics.jsonl", f"{saved[0].name}.damaged", f"x{saved[0].name}"
    for name in others:
        put(url, name, b"")
    assert FILES.list_checkpoints(url) == saved and FILES.newest(url)[0].entry == saved[-1]
    FILES.prune(url, 1)  # keeps the last and the best
    assert FILES.list_checkpoints(url) == [saved[1], saved[3]] and {*others} < {*listed(url)}
    last = FILES.save(url, some_state(7), 100_000_000)  # replaces the one of this step
    assert FILES.list_checkpoints(url) == [saved[1], last]


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(url):
    old, new = (FILES.save(url, some_state(step), step) for step in (10, 20))
    raw = bytearray(listed(url)[new.name])
    raw[len(raw) // 2] ^= 1
    put(url, new.name, bytes(raw))
    found, rejected = FILES.newest(url)
    [(name, reason)] = rejected.items()
    assert found.entry == old and same(found.state, some_state(10))
    assert name == new.name and reason.startswith("damaged")
    model = torch.nn.ParameterDict({"w": torch.zeros(100)})
    with pytest.warns(UserWarning, match=f"{new.name}: damaged"):
        assert FILES.resume_(url, model, []) == (10, {"step": 10})
    assert torch.equal(model["w"], some_state(10)["model"]["w"])
    assert FILES.list_checkpoints(url) == [old] and f"{new.name}.damaged" in listed(url)


def test_an_error_of_the_local_disk_rejects_no_checkpoint(tmp_path, monkeypatch):
    url = f"file://{tmp_path}/out"
    FILES.save(url, some_state(10), 10)

    def fail(*args, **more):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(tempfile, "mkdtemp", fail)
    with pytest.raises(OSError, match="Too many open files"):
        FILES.newest(url)


def test_a_folder_with_the_name_of_a_checkpoint_is_rejected(url):
    old, new = (FILES.save(url, some_state(step), step) for step in (10, 20))
    remote._remove(url, new.name)
    put(url, f"{new.name}/file", b"x")
    found, rejected = FILES.newest(url)
    assert found.entry == old and [*rejected] == [new.name], rejected


def test_a_sharded_checkpoint_is_refused_and_no_older_one_is_used(url):
    FILES.save(url, some_state(10), 10)
    sharded = ckpt.make_entry(20, 1.5, "0123456789abcdef" * 2, ending="")
    put(url, f"{sharded.name}/manifest.json", b"{}")
    with pytest.raises(NotImplementedError, match=f"{sharded.name} is a sharded checkpoint"):
        FILES.newest(url)
    remote._remove(url, sharded.name)
    assert [entry.step for entry in FILES.list_checkpoints(url)] == [10]


def test_a_server_that_does_not_answer_is_not_taken_for_an_empty_folder():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(OSError, match="^http://127.0.0.1:.*: .*[Cc]onnect"):
        FILES.newest(f"http://127.0.0.1:{port}/out")
    with pytest.raises(ValueError, match="nowhere"):
        FILES.newest("nowhere://x/out")


@pytest.mark.parametrize("url", ["memory://runs/lr[6]", "memory://runs/*", "memory://runs/a?"])
def test_a_url_that_is_a_pattern_is_refused_for_checkpoints(url):
    """fsspec would rename and delete the files of other runs too."""
    calls = [FILES.list_checkpoints, FILES.make_folder, FILES.newest]
    calls += [functools.partial(call, name="x") for call in (FILES.set_aside, remote._remove)]
    for call in calls:
        with pytest.raises(ValueError, match="must not contain"):
            call(url)


def test_an_ftp_server_cannot_hold_checkpoints(monkeypatch):
    """fsspec makes an empty folder of some errors of the server, so a run would begin again."""
    monkeypatch.setattr("fsspec.implementations.ftp.FTP", Mock())
    with pytest.raises(ValueError, match="an ftp server cannot hold checkpoints"):
        FILES.newest("ftp://localhost/run")


# -------------------------------------------------------------------------------------- text files


def test_lines_are_uploaded_with_the_next_save(url):
    FILES.make_folder(url)
    remote.storage(ckpt).write_text(url, "a.txt", "ä\n")  # another process
    FILES.append_text(url, "a.txt", "b\n")
    put(url, "cut.txt", b"1")  # a process was killed while it wrote
    FILES.append_text(url, "cut.txt", "2\n")
    assert FILES.read_text(url, "cut.txt") == "1\n2\n"
    assert listed(url)["a.txt"] == "ä\n".encode() and FILES.read_text(url, "a.txt") == "ä\nb\n"
    FILES.save(url, STATE, 1)
    assert listed(url)["a.txt"] == "ä\nb\n".encode() and FILES.read_text(url, "b.txt") == ""


def test_a_line_that_is_appended_during_an_upload_is_in_the_next_one(monkeypatch):
    fs, url = fsspec.filesystem("memory"), "memory://out"
    FILES.write_text(url, "a.txt", "1\n")
    FILES.write_text(url, "b.txt", "1\n")
    upload = type(fs).pipe_file

    def append_during(self, path, value, **more):  # as training does while a save runs
        FILES.append_text(url, "b.txt", "2\n")
        monkeypatch.undo()
        upload(self, path, value, **more)

    monkeypatch.setattr(type(fs), "pipe_file", append_during)
    for step in (1, 2):
        FILES.save(url, STATE, step)
    assert listed(url)["b.txt"] == b"1\n2\n"
    fs.store.clear()


def test_a_text_that_cannot_be_uploaded_is_a_warning_and_the_checkpoint_is_there(s3, folder):
    FILES.write_text(folder, "metrics.jsonl", "1\n")
    FILES.append_text(folder, "metrics.jsonl", "2\n")
    s3.fail("500", method="PUT", path="metrics.jsonl")
    with pytest.warns(UserWarning, match=r"metrics\.jsonl not written, the next save tries again"):
        entry = FILES.save(folder, STATE, 1)
    s3.mend()
    assert FILES.newest(folder)[0].entry == entry
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        FILES.save(folder, STATE, 2)
    assert listed(folder)["metrics.jsonl"] == b"1\n2\n"


def test_a_url_with_a_password_is_refused_and_not_repeated():
    for user in ("me:doNotSayThis", ":doNotSayThis", "me@work.com:doNotSayThis"):
        for chain in ("", "simplecache::", "zip://a.txt::"):
            for call in (FILES.newest, FILES.make_folder, remote.download):
                with pytest.raises(ValueError, match="FSSPEC_FTP_PASSWORD") as caught:
                    call(f"{chain}ftp://{user}@127.0.0.1:1/x")
                assert "doNotSayThis" not in str(caught.value)


def test_an_at_sign_without_a_password_is_allowed(tmp_path, cache):
    (tmp_path / "a:b@c").write_text("x")
    assert contents(remote.download(f"file://{tmp_path}/a:b@c")) == [b"x"]
    for url in ("http://127.0.0.1:1/me@home", "http://127.0.0.1:1?mail=me@home"):  # 1 is a port
        with pytest.raises(OSError, match="[Cc]onnect"):
            remote.download(url)


# ------------------------------------------------------------------------- faults of the storage


@pytest.mark.parametrize("fault", ["500", "cut", "slow"])
@pytest.mark.parametrize("method", ["PUT", "GET", "HEAD"])
def test_what_fails_once_is_tried_again(s3, folder, fault, method):
    old = FILES.save(folder, STATE, 1)
    s3.fail(fault, times=1, method=method)
    new = FILES.save(folder, STATE, 2)
    found, rejected = FILES.newest(folder)
    remote.storage(ckpt).read_text(folder, "metrics.jsonl")  # a GET
    assert found.entry == new and rejected == {} and same(found.state, STATE)
    assert FILES.list_checkpoints(folder) == [old, new]
    assert s3.requests and s3.fault(method, "") == "", "the fault did not happen"


def test_an_upload_that_keeps_failing_is_an_error_and_leaves_nothing(s3, folder):
    old = FILES.save(folder, STATE, 1)
    s3.fail("cut", method="PUT")
    with pytest.raises(OSError, match=re.escape(folder)):
        FILES.save(folder, STATE, 2)
    tried = sum(method == "PUT" for method, _ in s3.requests)
    assert 2 <= tried <= 20  # 5 times by s3fs, 2 by botocore, 2 by aiohttp
    s3.mend()
    assert FILES.newest(folder)[0].entry == old and list(listed(folder)) == [old.name]


def test_a_download_that_keeps_breaking_off_is_an_error_and_no_older_one_is_used(s3, folder):
    new = [FILES.save(folder, STATE, step) for step in (1, 2)][-1]
    s3.fail("half", method="GET", path=new.name)
    with pytest.raises(OSError, match=re.escape(folder)):
        FILES.newest(folder)
    s3.fail("half", times=2, method="GET", path=new.name)
    assert FILES.newest(folder)[0].entry == new


def test_checkpoints_that_may_not_be_deleted_are_a_warning(url, monkeypatch):
    first = FILES.save(url, some_state(1), 1)

    def refuse(path):
        raise PermissionError(13, "Access Denied")

    with remote._file_system(url) as (fs, _):
        monkeypatch.setattr(fs, "rm_file", refuse)
    with pytest.warns(UserWarning, match=f"older checkpoints not deleted: {url}: Access Denied"):
        second = FILES.save(url, some_state(2), 2, keep=1)
    assert FILES.list_checkpoints(url) == [first, second]


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


def test_half_a_file_of_an_upload_that_failed_is_deleted(tmp_path, monkeypatch):
    folder = f"file://{tmp_path}/out"  # not an object store: the file exists before it is complete
    old = FILES.save(folder, STATE, 1)

    def half(self, here, there, **how):
        Path(there).write_bytes(Path(here).read_bytes()[:1000])
        raise OSError(28, "No space left on device", here, None, there)

    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.put_file", half)
    # The message names the target, not the local temporary file.
    with pytest.raises(OSError, match="/step-00000002-.*pt: No space left on device$") as error:
        FILES.save(folder, STATE, 2)
    assert "ddpkit-" not in f"{error.value}" and list(listed(folder)) == [old.name]


def test_an_upload_in_parts_that_breaks_off_is_not_there(trials, s3, folder):
    """The file has more than 100 MB, so s3fs uploads it in parts."""
    old, large = FILES.save(folder, STATE, 1), {"model": {"w": torch.zeros(30_000_000)}}

    def trial(number: int) -> None:
        method = ["PUT", "POST"][number // 2 % 2]
        s3.fail(["503", "cut"][number % 2], method=method, path="step-00000002-")
        with pytest.raises(OSError):
            FILES.save(folder, large, 2)
        assert [path for m, path in s3.requests if m == method and "step-00000002-" in path]
        s3.mend()
        assert list(listed(folder)) == [old.name]

    trials("an upload in parts breaks off", trial, 0, 4, at_once=1)


# -------------------------------------------------------------------------------------------- data


def test_data_at_a_url_are_read_like_files(url, cache):
    put(url, "x.txt", "grüß\r\n".encode())
    corpus = chardata.read(remote.download(f"{url}/x.txt"), "byte")
    assert corpus.tokens[0].tobytes() == "grüß\r\n".encode()


def test_a_glob_is_read_in_the_order_of_names_unless_it_is_the_name_of_a_file(url, cache):
    for name in ("c", "a", "b", "[a]"):
        put(url, f"{name}.txt", name.encode())
    assert contents(remote.download(f"{url}/?.txt")) == [b"a", b"b", b"c"]
    assert contents(remote.download(f"{url}/[a].txt")) == [b"[a]"]
    for name in ("nothing.txt", "nothing*.txt"):
        with pytest.raises(FileNotFoundError, match=re.escape(f"{url}/{name}")):
            remote.download(f"{url}/{name}")


def test_a_url_of_a_folder_is_refused_and_named(url, cache):
    put(url, "folder/x.txt", b"x")
    with pytest.raises(IsADirectoryError, match=re.escape(f"{url}/folder")):
        remote.download(f"{url}/folder")


def test_a_file_is_downloaded_once_and_again_when_it_was_replaced(url, cache):
    put(url, "train/text", b"old")
    put(url, "test/text", b"other")
    first, second = (remote.download(f"{url}/train/text") for _ in range(2))
    assert first == second and contents(first) == [b"old"]
    assert contents(remote.download(f"{url}/test/text")) == [b"other"]
    put(url, "train/text", b"newer")
    assert contents(remote.download(f"{url}/train/text")) == [b"newer"]


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


def test_a_page_with_links_is_downloaded_again_when_it_was_replaced(website, cache):
    folder, url = website
    page = b'<p>Some text. <a href="next.html">Next</a></p>'
    (folder / "x.html").write_bytes(page)
    first, second = (remote.download(f"{url}/x.html") for _ in range(2))
    assert first == second and contents(first) == [page]
    (folder / "x.html").write_bytes(page.upper())  # of the same size
    os.utime(folder / "x.html", (1e9, 1e9))
    assert contents(remote.download(f"{url}/x.html")) == [page.upper()]


def test_the_query_of_a_url_is_not_a_part_of_the_name(website, cache):
    folder, url = website
    np.arange(9, dtype=np.uint16).tofile(folder / "ids.bin")
    (copy,) = remote.download(f"{url}/ids.bin?download=true&{'signature' * 50}")
    assert copy.endswith("/ids.bin") and chardata.read([copy], "char").kind == "ids"
    (folder / "index.html").write_bytes(bytes(8))
    (copy,) = remote.download(f"{url}/?file=ids.bin")
    assert copy.endswith("ids.bin") and contents([copy]) == [bytes(8)]


@pytest.mark.parametrize("fault", ["half", "500"])
def test_data_that_keep_breaking_off_are_an_error_and_never_half_a_file(s3, folder, fault, cache):
    data = np.arange(60_000, dtype=np.uint16).tobytes()
    put(folder, "x.bin", data)
    s3.fail(fault, method="GET", path="x.bin")
    with pytest.raises(OSError):
        remote.download(f"{folder}/x.bin")
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
    assert (timeout.total, timeout.sock_read) == (None, 60)
    # The user's own settings are not lost.
    own = {"client_kwargs": {"trust_env": True, "timeout": aiohttp.ClientTimeout(sock_read=0.2)}}
    monkeypatch.setitem(fsspec.config.conf, "http", own)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x.txt"
        with pytest.raises(OSError, match=f"{url}: .*[Tt]imeout"):
            remote.download(url)


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
    dying, *ranks = asking(data, tmp_path, "hanging"), *(asking(data, tmp_path) for _ in range(3))
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
    ended = run(*more)
    assert ended.code == 0 and ended.err == "", ended
    out = fetched(folder, tmp_path / "fetched")
    assert same_training(out, undisturbed(1))
    assert len(list(out.glob("step-*.pt"))) in (2, 3)  # the last two, and the best
    assert json.loads((out / "config.json").read_text())["out"] == folder
    everything = b"".join(listed(folder).values()).decode("latin-1")
    assert not said_secret(everything + stopped.out + stopped.err + ended.out + ended.err)


def test_two_ranks_download_each_file_once(s3, folder, text):
    data, raw = folder.replace("/out", "/data"), text.read_bytes()
    for i, part in enumerate((raw[:2000], b"", raw[2000:])):
        put(data, f"{i}.txt", part)
    s3.requests.clear()
    ran = run(*TINY, "--data", f"{data}/*.txt", "--steps", 2, "--spawn", 2, "--out", folder)
    assert ran.code == 0 and ran.err == "", ran
    gets = "".join(path for method, path in s3.requests if method == "GET" and ".txt" in path)
    assert sorted(re.findall(r"\d\.txt", gets)) == ["0.txt", "1.txt", "2.txt"]  # once for both


def test_a_server_that_goes_away_ends_no_training_and_leaves_no_half_a_checkpoint(
    s3, folder, flags
):
    more = [*flags, "--save-every", 30, "--steps", 60, "--out", folder]
    with Program(*more) as program:
        program.read_lines(40)
        s3.fail("503")
        ran = program.finish()
    assert ran.code == 1 and "step 60/60" in ran.out and "Traceback" not in ran.err, ran
    *warned, error = ran.err.splitlines()
    assert error == "Error: the checkpoint of step 60 was not written"
    assert all(line.startswith("Warning: ") and folder in line for line in warned), ran
    assert "checkpoint not written" in ran.err and not said_secret(ran.err), ran
    again = run(*more)  # the server does not answer at the start
    assert again.code == 1 and again.err.count("\n") == 1 and folder in again.err, again
    s3.mend()
    kept = ("step-00000030-", "config.json", "metrics.jsonl")
    assert all(name.startswith(kept) for name in listed(folder))
    ended = run(*more)
    assert ended.code == 0 and ended.err == "", ended
