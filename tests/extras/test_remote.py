"""Tests of extras/remote.py: checkpoints, metrics and data at URLs.

The URLs are of three kinds: file://, memory:// and an S3 server on this machine, which can be told
to be slow, to fail and to break off (see s3_server.py).
"""

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ENVIRONMENT, ROOT, TINY, Program, losses, run, same, same_training, wait_for
from s3_server import SECRET

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


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The folder of downloaded files, which is empty; and no run has been here before."""
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/cache")
    monkeypatch.setattr(remote, "known", set())
    monkeypatch.setattr(remote, "texts", {})
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


def fetched(folder, to):
    to.mkdir()
    for name, content in listed(folder).items():
        (to / name).write_bytes(content)
    return to


def newest(url):
    return remote.newest(url, remote.list_checkpoints(url))


def contents(paths):
    return [Path(path).read_bytes() for path in paths]


# ------------------------------------------------------------------------------------ checkpoints


def test_checkpoints_at_a_url_are_the_files_that_ckpt_writes_and_are_pruned(url, tmp_path):
    assert remote.list_checkpoints(url) == [] and newest(url) == (None, {}, {})
    saved = {}
    for step, loss in ((5, 2.0), (1_000, 1.0), (99_999_999, 3.0), (100_000_000, 4.0)):
        saved[step] = ckpt.save(f"{tmp_path}/local", STATE, step, loss)
        assert remote.save(url, STATE, step, loss, keep=1) == saved[step]
    kept = [saved[1_000], saved[100_000_000]]  # the best and the last
    assert remote.list_checkpoints(url) == kept
    assert listed(url) == {e.name: (tmp_path / "local" / e.name).read_bytes() for e in kept}
    entry, state, rejected = newest(url)
    assert entry == kept[-1] and same(state, STATE) and rejected == {}


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(url):
    old, new = (remote.save(url, STATE, step) for step in (10, 20))
    raw = bytearray(listed(url)[new.name])
    raw[len(raw) // 2] ^= 1
    put(url, new.name, bytes(raw))
    entry, state, rejected = newest(url)
    assert entry == old and same(state, STATE) and "damaged" in rejected[new.name]
    remote.set_aside(url, new.name)
    assert remote.list_checkpoints(url) == [old] and f"{new.name}.damaged" in listed(url)


def test_a_server_that_does_not_answer_is_not_taken_for_an_empty_folder():
    """Otherwise a run would begin again, and overwrite the one that is there."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(OSError, match="[Cc]onnect"):
        newest(f"http://127.0.0.1:{port}/out")
    with pytest.raises(ValueError, match="nowhere"):
        newest("nowhere://x/out")


@pytest.mark.parametrize("user", ["me:doNotSayThis", ":doNotSayThis", "me@work.com:doNotSayThis"])
@pytest.mark.parametrize("chain", ["", "simplecache::"])
def test_a_url_with_a_password_is_refused_and_not_repeated(user, chain, tmp_path):
    """URLs are written to logs, metrics and checkpoints."""
    for call in (newest, remote.download):
        with pytest.raises(ValueError, match="FSSPEC_FTP_PASSWORD") as caught:
            call(f"{chain}ftp://{user}@127.0.0.1:1/x")
        assert "doNotSayThis" not in f"{caught.value}"
    put(f"file://{tmp_path}", "a:b@c", b"x")  # An at sign alone is allowed.
    assert contents(remote.download(f"file://{tmp_path}/a:b@c")) == [b"x"]


def test_lines_are_uploaded_with_the_next_save_and_when_the_lock_is_released(url):
    put(url, "a.txt", "ä\n".encode())  # of an earlier process
    lock = remote.lock(url)
    remote.append_text(url, "a.txt", "1\n")
    assert listed(url)["a.txt"] == "ä\n".encode()
    remote.save(url, STATE, 1)
    assert listed(url)["a.txt"] == "ä\n1\n".encode()
    remote.append_text(url, "a.txt", "2\n")
    del lock
    assert listed(url)["a.txt"] == "ä\n1\n2\n".encode()


def test_metrics_whose_reading_failed_are_not_replaced_and_a_new_folder_gets_its_own(
    url, monkeypatch
):
    remote.append_text(f"{url}2", "a.txt", "1\n")
    remote.save(f"{url}2", STATE, 1)
    put(url, "a.txt", b"old\n")
    with monkeypatch.context() as broken:
        broken.setattr(remote, "url_to_fs", lambda url: 1 / 0)
        with pytest.raises(OSError, match="ZeroDivisionError"):
            remote.append_text(url, "a.txt", "lost\n")
    remote.append_text(url, "a.txt", "new\n")
    remote.save(url, STATE, 2)
    assert listed(url)["a.txt"] == b"old\nnew\n" and listed(f"{url}2")["a.txt"] == b"1\n"


def test_a_second_run_at_a_url_is_noticed_and_harms_nothing(url, monkeypatch):
    remote.save(url, STATE, 1, keep=1)
    monkeypatch.setattr(remote, "known", set())  # as in another process that began before
    remote.append_text(url, "metrics.jsonl", "wrong\n")
    before = listed(url)
    with pytest.raises(OSError, match="another run has written step-00000001"):
        remote.save(url, STATE, 2, keep=1)
    assert listed(url) == before


# ------------------------------------------------------------------------- faults of the storage


@pytest.mark.parametrize("fault", ["500", "cut", "slow"])
@pytest.mark.parametrize("method", ["PUT", "GET"])
def test_what_fails_once_is_tried_again(s3, folder, fault, method):
    old = remote.save(folder, STATE, 1)
    s3.fail(fault, times=1, method=method)
    new = remote.save(folder, STATE, 2)
    entry, state, rejected = newest(folder)
    assert entry == new and rejected == {} and same(state, STATE)
    assert remote.list_checkpoints(folder) == [old, new]
    assert s3.requests and s3.fault(method, "") == "", "the fault did not happen"


def test_an_upload_that_keeps_failing_is_an_error_and_leaves_nothing(s3, folder):
    """Also one of more than 100 MB, which s3fs uploads in parts."""
    old, large = remote.save(folder, STATE, 1), {"model": {"w": torch.zeros(30_000_000)}}
    for fault, method, state in (
        ("cut", "PUT", STATE),
        ("503", "PUT", large),
        ("503", "POST", large),
    ):
        s3.fail(fault, method=method, path="step-00000002-")
        with pytest.raises(OSError):
            remote.save(folder, state, 2)
        assert [path for m, path in s3.requests if m == method and "step-00000002-" in path]
        s3.mend()
        assert newest(folder)[0] == old and [*listed(folder)] == [old.name]


def test_a_download_that_keeps_breaking_off_is_an_error_and_no_older_one_is_used(s3, folder):
    """It may be good."""
    new = [remote.save(folder, STATE, step) for step in (1, 2)][-1]
    s3.fail("half", method="GET", path=new.name)
    with pytest.raises(OSError):
        newest(folder)
    s3.fail("half", times=2, method="GET", path=new.name)
    assert newest(folder)[0] == new


def test_old_checkpoints_that_may_not_be_deleted_do_not_make_a_save_fail(url, monkeypatch):
    first = remote.save(url, STATE, 1)

    def refuse(path):
        raise PermissionError(13, "Access Denied")

    monkeypatch.setattr(fsspec.core.url_to_fs(url)[0], "rm_file", refuse)
    second = remote.save(url, STATE, 2, keep=1)
    assert remote.list_checkpoints(url) == [first, second]


# -------------------------------------------------------------------------------------------- data


def test_data_are_downloaded_in_the_order_of_names_and_again_when_they_were_replaced(url):
    for name in "cab":
        put(url, f"{name}.txt", name.encode())
    first, second = (remote.download(f"{url}/?.txt") for _ in range(2))
    assert first == second and contents(first) == [b"a", b"b", b"c"]
    put(url, "a.txt", b"newer")
    assert contents(remote.download(f"{url}/a.txt")) == [b"newer"]
    with pytest.raises(FileNotFoundError):
        remote.download(f"{url}/nothing.txt")


@pytest.mark.parametrize("fault", ["half", "500"])
def test_data_that_keep_breaking_off_are_an_error_and_never_half_a_file(s3, folder, fault, cache):
    data = bytes(range(256)) * 500
    put(folder, "x.bin", data)
    s3.fail(fault, method="GET", path="x.bin")
    with pytest.raises(OSError):
        remote.download(f"{folder}/x.bin")
    assert not [*cache.rglob("*x.bin")]
    s3.fail(fault, times=1, method="GET", path="x.bin")
    assert contents(remote.download(f"{folder}/x.bin")) == [data]


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


def test_processes_that_ask_at_once_download_once_and_one_that_was_killed_blocks_none(
    tmp_path, cache
):
    def ask(*hanging: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-c", ASK, data, tmp_path / "fetched", *hanging],
            env={**ENVIRONMENT, "XDG_CACHE_HOME": f"{cache}", "PYTHONPATH": f"{ROOT}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    parts = [b"first", b"second", b"third"]
    for i, part in enumerate(parts):
        put(f"file://{tmp_path}/data", f"{i}.bin", part)
    data = f"file://{tmp_path}/data/*.bin"
    dying, *ranks = ask("hanging"), ask(), ask()
    dying.stdin.write("\n")
    dying.stdin.flush()
    wait_for(lambda: [*cache.rglob("*.part")], "half a copy")
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
        program.process.send_signal(signal.SIGTERM)
        stopped = program.finish()
    assert stopped.code == 3 and stopped.err == "", stopped
    ended = run(*more, env={})
    assert ended.code == 0 and ended.err == "", ended
    out = fetched(folder, tmp_path / "fetched")
    assert same_training(out, undisturbed(1))
    assert len([*out.glob("step-*.pt")]) in (2, 3)  # the last two, and the best
    everything = b"".join(listed(folder).values()).decode("latin-1")
    for ran in (stopped, ended):
        everything += ran.out + ran.err
    assert not [secret for secret in SECRET if secret in everything]
    assert run("sample", "--out", f"{folder}/best", "--max-new-tokens", 5, env={}).code == 0


def test_two_ranks_download_data_once_and_after_a_divergence_the_metrics_are_there(
    s3, folder, text
):
    data, raw = folder.replace("/out", "/data"), text.read_bytes()
    for i, part in enumerate((raw[:2000], raw[2000:])):
        put(data, f"{i}.txt", part)
    s3.requests.clear()
    wild = ["--lr", 1e30, "--clip", 0, "--log-every", 1]
    ran = run(*TINY, "--data", f"{data}/*.txt", "--spawn", 2, "--out", folder, *wild)
    assert ran.code == 2 and "not finite" in ran.err, ran
    gets = "".join(path for method, path in s3.requests if method == "GET" and ".txt" in path)
    assert sorted(re.findall(r"\d\.txt", gets)) == ["0.txt", "1.txt"]
    lines = listed(folder)["metrics.jsonl"].decode().splitlines()
    assert "config" in lines[0] and '"step": 1' in lines[1]


def test_a_server_that_goes_away_ends_no_training_and_leaves_no_half_a_checkpoint(
    s3, folder, flags, tmp_path
):
    more = [*flags, "--save-every", 30, "--steps", 60, "--out", folder]
    with Program(*more) as program:
        program.read_lines(40)
        s3.fail("503")
        ran = program.finish()
    assert ran.code == 1 and "step 60/60" in ran.out and "Traceback" not in ran.err, ran
    assert all(line.startswith("Warning: checkpoint not written") for line in ran.err.splitlines())
    again = run(*more, env={})  # the server does not answer at the start
    assert again.code == 1 and again.err.count("\n") == 1, again
    s3.mend()
    assert {name[:14] for name in listed(folder)} == {"step-00000030-", "metrics.jsonl"}
    ended = run(*more, env={})
    assert ended.code == 0 and ended.err == "", ended
    assert [step for step, _ in losses(fetched(folder, tmp_path / "a"))][-30:] == [*range(31, 61)]
