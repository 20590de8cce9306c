"""Checkpoints, text files and data at URLs, through fsspec: s3://, gs://, sftp://, file://, ...

    import ckpt                                  # the core module, whose functions are used here
    files = storage(ckpt)                        # the functions of ckpt, for URLs
    files.save("s3://bucket/out", state, step=400, loss=1.88, keep=3)
    found, rejected = files.newest("s3://bucket/out")

    paths = download("s3://bucket/data/*.txt")   # local copies

Needs fsspec and filelock, which torch requires, and the fsspec package of the file system, for
example s3fs. Credentials and the number of retries are settings of that package.

Errors of a file system become an OSError that names the URL. FileNotFoundError, IsADirectoryError,
ImportError and ValueError keep their type. A URL with a password is a ValueError, because URLs are
written to logs and checkpoints: set an environment variable such as FSSPEC_FTP_PASSWORD.
"""

import hashlib
import importlib
import os
import re
import socket
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import filelock
from fsspec.core import url_to_fs

# What changes with the content of a file, in the words of different file systems; the first counts.
CHANGES = "ETag etag generation sha Last-Modified Content-MD5 Digest mtime modify".split()
CHANGES += "modificationTime LastModified last_modified created".split()
Texts = dict[tuple[str, str], str]  # (folder, name) -> the text in memory


def storage(ckpt: ModuleType, write_sharded: bool = False) -> SimpleNamespace:
    """Return all public names of the module ckpt, with functions for URLs in place of local ones.

    The functions have the names and arguments of those in ckpt, whose docstrings describe them,
    and differ in these points. lock() returns None, because object stores have no locks. newest()
    raises OSError if the storage does not answer, because a checkpoint there may be sound.
    append_text() keeps the line in memory until the next save() uploads it, because an object store
    cannot append; each result of storage() has its own memory. Where the file system is not an
    object store, a process that is killed while it uploads a text leaves a part of that text. A
    process that is killed during a save or a load leaves a folder ddpkit-* in $TMPDIR or /tmp.
    ValueError for write_sharded: a sharded checkpoint needs a folder. ValueError of newest() and
    save() for ftp://, where fsspec can take an error of the server for an empty folder. download()
    allows it.
    """
    if write_sharded:
        raise ValueError("a sharded checkpoint needs a folder, not a URL")
    functions = {name: value for name, value in vars(ckpt).items() if not name.startswith("_")}
    texts: Texts = {}
    functions |= {
        "save": partial(_save, ckpt, texts),
        "load": partial(_load, ckpt),
        "newest": partial(_newest, ckpt),
        "list_checkpoints": partial(_list_checkpoints, ckpt),
        "prune": partial(_prune, ckpt),
        "set_aside": _set_aside,
        "make_folder": _make_folder,
        "lock": lambda url, timeout=0.0: None,
        "write_text": partial(_write_text, texts),
        "append_text": partial(_append_text, texts),
        "read_text": partial(_read_text, texts),
    }
    return SimpleNamespace(**functions)


# ------------------------------------------------------------------------------------ checkpoints


def _save(
    ckpt: ModuleType,
    texts: Texts,
    url: str,
    state: dict[str, Any],
    step: int,
    loss: float | None = None,
    keep: int | None = None,
) -> Any:
    """Write a checkpoint to a temporary local folder and upload it, after the texts."""
    with tempfile.TemporaryDirectory(prefix="ddpkit-") as local:
        entry = ckpt.save(local, state, step, loss)
        _make_folder(url)
        _upload_texts(texts, url)
        _upload(ckpt, f"{local}/{entry.name}", url, entry)
    try:
        for other in _list_checkpoints(ckpt, url):
            if other.step == step and other != entry:
                _remove(url, other.name)
        if keep is not None:
            _prune(ckpt, url, keep)
    except OSError as error:  # such as credentials that may only write
        warnings.warn(f"older checkpoints not deleted: {error}", stacklevel=2)
    return entry


def _upload(ckpt: ModuleType, file: str, url: str, entry: Any) -> None:
    """Upload the file of a checkpoint, unless it is there already and verifies.

    An upload that fails may leave a part of the file where the file system is not an object store.
    That part is deleted if possible; otherwise its digest does not match its name. It can be a part
    of a file that was good, so a good one is not written again.
    """
    with _file_system(url) as (fs, path):
        target = f"{path}/{entry.name}"
        if fs.exists(target):
            with suppress(ValueError):  # damaged
                _load(ckpt, url, entry)
                return
        try:
            fs.put_file(file, target)
        except BaseException:
            with suppress(Exception):  # there may be no file, or no connection
                fs.rm_file(target)
            raise


def _load(ckpt: ModuleType, url: str, entry: Any) -> dict[str, Any]:
    """Download a checkpoint to a temporary local folder, read and verify it."""
    with tempfile.TemporaryDirectory(prefix="ddpkit-") as local:
        if entry.name.endswith(".pt"):
            with _file_system(url) as (fs, path):
                fs.get_file(f"{path}/{entry.name}", f"{local}/{entry.name}")
        state: dict[str, Any] = ckpt.load(local, entry)  # refuses a sharded checkpoint
    return state


class _NoAnswer(Exception):
    """The storage does not answer. ckpt.newest() does not catch this, so it tries no older file."""


def _newest(
    ckpt: ModuleType,
    url: str,
    load: Callable[..., Any] | None = None,
    list_checkpoints: Callable[..., Any] | None = None,
) -> Any:
    def load_or_stop(url: str, entry: Any) -> Any:
        try:
            return (load or partial(_load, ckpt))(url, entry)
        except OSError as error:
            if type(error) is OSError:  # not FileNotFoundError: see _file_system
                raise _NoAnswer(error) from error
            raise

    try:
        listed = list_checkpoints or partial(_list_checkpoints, ckpt)
        return ckpt.newest(url, load_or_stop, listed)
    except _NoAnswer as error:
        raise error.args[0] from None


def _list_checkpoints(ckpt: ModuleType, url: str) -> Any:
    paths = []
    with suppress(FileNotFoundError), _file_system(url) as (fs, path):
        _refuse_ftp(fs)
        # Not exists(): for some file systems it is False if the server does not answer.
        paths = fs.ls(path, detail=False)
    return ckpt.parse_names(name.rstrip("/").rsplit("/", 1)[-1] for name in paths)


def _prune(ckpt: ModuleType, url: str, keep: int) -> None:
    for entry in ckpt.superseded(_list_checkpoints(ckpt, url), keep):
        _remove(url, entry.name)


def _remove(url: str, name: str) -> None:
    """Delete a file, or a folder if the name is that of a sharded checkpoint."""
    with suppress(FileNotFoundError), _file_system(url) as (fs, path):
        if name.endswith(".pt"):
            fs.rm_file(f"{path}/{name}")
        else:
            fs.rm(f"{path}/{name}", recursive=True)


def _set_aside(url: str, name: str) -> None:
    """Add ".damaged" to the name of a file. Object stores cannot rename a folder."""
    with _file_system(url) as (fs, path):
        fs.mv(f"{path}/{name}", f"{path}/{name}.damaged")


def _refuse_ftp(fs: Any) -> None:
    if fs.protocol == "ftp":
        raise ValueError("an ftp server cannot hold checkpoints; its errors look like no files")


def _make_folder(url: str) -> None:
    with _file_system(url) as (fs, path):
        _refuse_ftp(fs)
        fs.makedirs(path, exist_ok=True)


# -------------------------------------------------------------------------------------- text files


def _write_text(texts: Texts, url: str, name: str, text: str) -> None:
    texts[url, name] = text
    _upload_text(url, name, text)


def _append_text(texts: Texts, url: str, name: str, line: str) -> None:
    texts[url, name] = _read_text(texts, url, name) + line


def _read_text(texts: Texts, url: str, name: str) -> str:
    """Return the text in memory, which has the lines that are not uploaded yet, or download it."""
    if (url, name) in texts:
        return texts[url, name]
    with suppress(FileNotFoundError), _file_system(url) as (fs, path):
        return str(fs.cat_file(f"{path}/{name}").decode(errors="replace"))
    return ""


def _upload_text(url: str, name: str, text: str) -> None:
    with _file_system(url) as (fs, path):
        fs.pipe_file(f"{path}/{name}", text.encode())


def _upload_texts(texts: Texts, url: str) -> None:
    """Upload all texts of a folder. An OSError becomes a warning, so the checkpoint follows."""
    for (folder, name), text in list(texts.items()):
        if folder == url:
            try:
                _upload_text(url, name, text)
            except OSError as error:
                message = f"{name} not written, the next save tries again: {error}"
                warnings.warn(message, stacklevel=2)


# -------------------------------------------------------------------------------------------- data


def download(url: str) -> list[str]:
    """Return local copies of the files that a URL names, sorted by name. The URL may be a glob.

    Copies are in $XDG_CACHE_HOME/ddpkit (~/.cache/ddpkit), one for each version of each file: its
    size and, as far as the server sends them, its ETag or the time of its last change. Any number
    of processes may call this: on each node the first one downloads and the others wait.
    FileNotFoundError if no file matches, IsADirectoryError if a folder does. OSError if a file that
    is not at http:// or https:// changes meanwhile: large ones are read in parts.

    fsspec's own cache is not used: it downloads to the final name without a lock, so that another
    process can read half a file.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    with _file_system(url) as (fs, path):
        names = [path] if fs.exists(path) else sorted(fs.glob(path))
        if any(map(fs.isdir, names)):
            raise IsADirectoryError(f"{url}: is a folder; name its files, e.g. '{url}/*.txt'")
        if not names and "://" in path:  # exists() of http hides the server's error; this raises it
            with suppress(FileNotFoundError):
                fs.cat_file(path, end=1)
        # All versions first, from one listing: a download clears fsspec's cache of it.
        versions = [f"{fs.unstrip_protocol(name)} {_version(fs, name)}" for name in names]
        digests = [hashlib.sha256(version.encode()).hexdigest()[:32] for version in versions]
        folders = [os.path.join(cache, "ddpkit", digest) for digest in digests]
        copies = [_copy_once(fs, *pair) for pair in zip(names, folders)]
    if not copies:
        raise FileNotFoundError(f"{url}: no such file, and no file matches it")
    return copies


def _version(fs: Any, name: str) -> tuple[Any, Any]:
    """Return the size of a remote file, and what changes with its content.

    Not all of fs.info(): it can have the time of the last access, and the number of hard links.
    """
    info = fs.info(name)
    changes = next((info[key] for key in CHANGES if key in info), None)
    return info.get("size"), changes or fs.ukey(name)


def _copy_once(fs: Any, name: str, folder: str) -> str:
    """Return the local copy of a file; make it if no process has made it yet."""
    # The end of the name says what the file contains. In a URL of http, a query can follow the
    # path, or contain the name.
    path = urlsplit(name).path if "://" in name else name
    path = path if os.path.splitext(path)[1] else name
    copy = os.path.join(folder, os.path.basename(path)[-100:] or "data")
    part = f"{copy}.{socket.gethostname()}.part"  # some file systems lock per host only
    os.makedirs(folder, exist_ok=True)
    with filelock.FileLock(os.path.join(folder, ".lock")):
        try:
            if not os.path.exists(copy):
                _download_file(fs, name, part)
                os.replace(part, copy)
        finally:  # without the lock, this could delete the part of the next process
            with suppress(FileNotFoundError):
                os.unlink(part)
    return copy


def _download_file(fs: Any, name: str, copy: str) -> None:
    """Make a durable copy. OSError if its size is wrong, or if the file is changed meanwhile."""
    fs.invalidate_cache()
    before = _version(fs, name)
    fs.get_file(name, copy)
    fs.invalidate_cache()
    after, size = _version(fs, name), os.path.getsize(copy)
    if after[0] not in (size, None):
        raise OSError(f"{fs.unstrip_protocol(name)}: got {size} of {after[0]} bytes")
    if after != before and "://" not in name:  # http reads a file in one part
        raise OSError(f"{name}: was changed during the download; start again")
    with open(copy, "rb+") as file:
        os.fsync(file.fileno())


# ------------------------------------------------------------------------------------------ errors


def _has_password(url: str) -> bool:
    """Return whether a URL, or a part of a chained one (simplecache::ftp://...), has a password.

    What is between the first ":" and the last "@" is one, unless it begins with a port or belongs
    to the path. It can contain "/" and "#".
    """
    rests = (part.partition("://")[2] for part in url.split("::"))
    users = (rest.rpartition("@")[0] for rest in rests)
    return any(re.match(r"[^/?#]*:(?!\d*[/?#])", user) for user in users)


@contextmanager
def _file_system(url: str) -> Iterator[tuple[Any, str]]:
    """Give (fsspec file system, path) of a URL, and turn its errors into OSError.

    That error is of the class OSError itself, so that it can be told from FileNotFoundError. The
    packages of file systems have retried by then, as often as their own settings say.
    """
    if _has_password(url):
        raise ValueError(
            "a URL must not contain a password, because URLs are written to logs and checkpoints: "
            "set an environment variable, such as FSSPEC_FTP_PASSWORD for ftp"
        )
    fs = None
    try:
        fs, path = url_to_fs(url)
        if url.startswith(("http://", "https://")):
            # Limit the time without data. The default of aiohttp is a limit for the whole download.
            timeout = importlib.import_module("aiohttp").ClientTimeout(connect=60, sock_read=60)
            fs.client_kwargs = {"timeout": timeout, **fs.client_kwargs}
        fs.invalidate_cache()  # of listings
        yield fs, path.rstrip("/")
    except (FileNotFoundError, IsADirectoryError, ImportError, ValueError):
        raise
    except Exception as error:
        if fs is not None:  # The connection can be lost: connect again next time.
            type(fs).clear_instance_cache()
        text = f"{error}"
        if isinstance(error, OSError) and error.strerror:
            name = error.filename2 or error.filename  # the target of a copy
            text = ": ".join(map(str, filter(None, (name, error.strerror))))
        raise OSError(f"{url}: {text or type(error).__name__}") from error
