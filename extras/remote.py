"""Keep checkpoints and text files at URLs, and download data, with fsspec: s3://, gs://, ...

    import ckpt                                  # the core module, whose functions are used here
    files = storage(ckpt)                        # the functions of ckpt, for URLs
    step, more = files.resume_("s3://bucket/out", model, optimizers)     # on every rank
    files.save("s3://bucket/out", state, step=400, loss=1.88, keep=3)    # on rank 0

    paths = download("s3://bucket/data/*.txt")   # local copies

Needs fsspec and filelock, which torch requires, and the package of the file system, for example
s3fs. Credentials and the number of retries are settings of that package.

Errors of a file system become an OSError that names the URL: PermissionError or NoAnswer.
FileNotFoundError, IsADirectoryError, ImportError and ValueError keep their type. A URL that
contains a password is a ValueError.
"""

import hashlib
import importlib
import os
import re
import socket
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import filelock
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

# Keys of fs.info() whose value changes with the content of a file. The first that exists counts.
CHANGES = "ETag etag generation sha Last-Modified Content-MD5 Digest mtime modify".split()
CHANGES += "modificationTime LastModified last_modified created".split()
Texts = dict[tuple[str, str], str]  # (folder, name) -> the text in memory


def storage(ckpt: ModuleType, write_sharded: bool = False) -> SimpleNamespace:
    """Return all public names of the module ckpt, with functions for URLs in place of local ones.

    The functions have the arguments of those in ckpt, and differ in these points:
    - lock() returns None, and save() ignores `held`. Nothing keeps a second run out.
    - append_text() keeps the line in memory until the next save() uploads it, because an object
      store cannot append. Each result of storage() has its own memory.
    - If the storage is not an object store, a process that is killed while it uploads a text leaves
      a part of that text.
    - A process that is killed during a save or a load leaves a folder ddpkit-* in $TMPDIR or /tmp.
    - Checkpoints at ftp:// are a ValueError, because fsspec can take an error of the server for an
      empty folder.

    ValueError if write_sharded is true.
    """
    if write_sharded:
        raise ValueError("a sharded checkpoint needs a folder, not a URL")
    functions = {name: value for name, value in vars(ckpt).items() if not name.startswith("_")}
    texts: Texts = {}
    load, list_checkpoints = partial(_load, ckpt), partial(_list_checkpoints, ckpt)
    functions |= {
        "save": partial(_save, ckpt, texts),
        "load": load,
        "newest": lambda url, load=load, list_checkpoints=list_checkpoints: ckpt.newest(
            url, load, list_checkpoints
        ),
        "list_checkpoints": list_checkpoints,
        "prune": partial(_prune, ckpt),
        "set_aside": _set_aside,
        "make_folder": _make_folder,
        "lock": lambda url, timeout=0.0: None,
        "write_text": partial(_write_text, texts),
        "append_text": partial(_append_text, texts),
        "read_text": partial(_read_text, texts),
    }
    files = SimpleNamespace(**functions)
    files.resume_ = partial(ckpt.resume_, files=files)
    return files


# ------------------------------------------------------------------------------------ checkpoints


def _save(
    ckpt: ModuleType,
    texts: Texts,
    url: str,
    state: dict[str, Any],
    step: int,
    loss: float | None = None,
    keep: int | None = None,
    held: None = None,
) -> Any:
    """Write a checkpoint to a temporary local folder and upload it, after the texts."""
    with tempfile.TemporaryDirectory(prefix="ddpkit-") as local:
        entry = ckpt.save(local, state, step, loss)
        _make_folder(url)
        _upload_texts(texts, url)
        _upload(f"{local}/{entry.name}", url, entry.name)
    try:
        for other in _list_checkpoints(ckpt, url):
            if other.step == step and other != entry:
                _remove(url, other.name)
        if keep is not None:
            _prune(ckpt, url, keep)
    except OSError as error:  # such as credentials that may only write
        warnings.warn(f"older checkpoints not deleted: {error}", stacklevel=2)
    return entry


def _upload(file: str, url: str, name: str) -> None:
    """Upload the file of a checkpoint.

    If the storage is not an object store, an upload that fails leaves a part of the file, which is
    then deleted.
    """
    with _file_system(url) as (fs, path):
        try:
            fs.put_file(file, f"{path}/{name}")
        except BaseException:
            with suppress(Exception):
                fs.rm_file(f"{path}/{name}")
            raise


def _load(ckpt: ModuleType, url: str, entry: Any) -> dict[str, Any]:
    """Download, verify and read a checkpoint."""
    with tempfile.TemporaryDirectory(prefix="ddpkit-") as local:
        if entry.name.endswith(".pt"):
            with _file_system(url) as (fs, path):
                try:
                    fs.get_file(f"{path}/{entry.name}", f"{local}/{entry.name}")
                except (FileNotFoundError, IsADirectoryError) as error:
                    if fs.isdir(f"{path}/{entry.name}"):
                        raise ValueError("not a file") from error
                    raise
        return dict(ckpt.load(local, entry))  # refuses a sharded checkpoint


def _list_checkpoints(ckpt: ModuleType, url: str) -> Any:
    paths = []
    with suppress(FileNotFoundError), _file_system(url) as (fs, path):
        _check_place(fs, path)
        # Not exists(): for some file systems it is False if the server does not answer.
        paths = fs.ls(path, detail=False)
    return ckpt.parse_names(name.rstrip("/").rsplit("/", 1)[-1] for name in paths)


def _prune(ckpt: ModuleType, url: str, keep: int) -> None:
    for entry in ckpt.superseded(_list_checkpoints(ckpt, url), keep):
        _remove(url, entry.name)


def _remove(url: str, name: str) -> None:
    """Delete a checkpoint if it exists. A sharded one is a folder."""
    with suppress(FileNotFoundError), _file_system(url) as (fs, path):
        _check_place(fs, path)
        if name.endswith(".pt"):
            fs.rm_file(f"{path}/{name}")
        else:
            fs.rm(f"{path}/{name}", recursive=True)


def _set_aside(url: str, name: str) -> None:
    """Add ".damaged" to the name of a file."""
    with _file_system(url) as (fs, path):
        _check_place(fs, path)
        fs.mv(f"{path}/{name}", f"{path}/{name}.damaged")


def _check_place(fs: Any, path: str) -> None:
    """ValueError if checkpoints cannot be here."""
    if fs.protocol == "ftp":
        raise ValueError("an ftp server cannot hold checkpoints; its errors look like no files")
    # Other file systems would also rename and delete files that match.
    if not isinstance(fs, LocalFileSystem) and set(path) & set("*?["):
        raise ValueError(f"{path}: the URL of a folder for checkpoints must not contain *, ? or [")


def _make_folder(url: str) -> None:
    with _file_system(url) as (fs, path):
        _check_place(fs, path)
        fs.makedirs(path, exist_ok=True)


# -------------------------------------------------------------------------------------- text files


def _write_text(texts: Texts, url: str, name: str, text: str) -> None:
    texts[url, name] = text
    _upload_text(url, name, text)


def _append_text(texts: Texts, url: str, name: str, line: str) -> None:
    text = _read_text(texts, url, name)
    # A process that was killed can have left a part of a line.
    texts[url, name] = text + "\n" * (text[-1:] not in ("", "\n")) + line


def _read_text(texts: Texts, url: str, name: str) -> str:
    """Return the text in memory, with the lines that are not uploaded yet, or download it."""
    if (url, name) in texts:
        return texts[url, name]
    with suppress(FileNotFoundError), _file_system(url) as (fs, path):
        return str(fs.cat_file(f"{path}/{name}").decode(errors="replace"))
    return ""


def _upload_text(url: str, name: str, text: str) -> None:
    with _file_system(url) as (fs, path):
        fs.pipe_file(f"{path}/{name}", text.encode())


def _upload_texts(texts: Texts, url: str) -> None:
    """Upload all texts of a folder. An OSError is only a warning, so the checkpoint follows.

    This does not assign to `texts`, because another thread may append a line during an upload.
    """
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

    Copies are in $XDG_CACHE_HOME/ddpkit (~/.cache/ddpkit). A file is downloaded again if its size,
    ETag or time of change is new. Any number of processes may call this: on each node the first one
    downloads and the others wait. If a website sends no ETag and no time, a change that keeps the
    size is not noticed. Old copies are not deleted.

    FileNotFoundError if no file matches, IsADirectoryError if a folder does, except at http:// and
    https://. Files must not change during the download.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    with _file_system(url) as (fs, path):
        names = [path] if fs.exists(path) else sorted(fs.glob(path))
        # For http, isdir() is true for any text that has links.
        if any(fs.isdir(name) for name in names if "://" not in name):
            raise IsADirectoryError(f"{url}: is a folder; name its files, e.g. '{url}/*.txt'")
        if not names and "://" in path:  # exists() of http hides the server's error; this raises it
            with suppress(FileNotFoundError):
                fs.cat_file(path, end=1)
        versions = [f"{fs.unstrip_protocol(name)} {_version(fs, name)}" for name in names]
        digests = [hashlib.sha256(version.encode()).hexdigest()[:32] for version in versions]
        folders = [os.path.join(cache, "ddpkit", digest) for digest in digests]
        copies = [_copy_once(fs, *pair) for pair in zip(names, folders)]
    if not copies:
        raise FileNotFoundError(f"{url}: no such file, and no file matches it")
    return copies


def _version(fs: Any, name: str) -> tuple[Any, Any]:
    """Return the size of a remote file, and what changes with its content.

    Do not use all of fs.info(), because it can have the time of the last access.
    """
    info = fs.info(name)
    changes = next((info[key] for key in CHANGES if key in info), None)
    return info.get("size"), changes or fs.ukey(name)


def _copy_once(fs: Any, name: str, folder: str) -> str:
    """Return the local copy of a file; make it if no process has made it yet.

    fsspec's own cache is not used, because another process can read half a file there.
    """
    # Keep the ending, such as .bin. In a URL of http, a query can follow or contain the name.
    path = urlsplit(name).path if "://" in name else name
    path = path if os.path.splitext(path)[1] else name
    # Names of files can have 255 bytes, and a character up to 4.
    copy = os.path.join(folder, os.path.basename(path)[-40:] or "data")
    part = f"{copy}.{socket.gethostname()}.part"  # Some file systems lock per host only.
    os.makedirs(folder, exist_ok=True)
    with filelock.FileLock(os.path.join(folder, ".lock")):
        try:
            if not os.path.exists(copy):
                _download_file(fs, name, part)
                os.replace(part, copy)
        finally:  # Without the lock, this could delete the part of the next process.
            with suppress(FileNotFoundError):
                os.unlink(part)
    return copy


def _download_file(fs: Any, name: str, copy: str) -> None:
    """Make a durable copy. OSError if its size is wrong."""
    fs.get_file(name, copy)
    expected, size = fs.info(name).get("size"), os.path.getsize(copy)
    if expected not in (size, None):
        raise OSError(f"{fs.unstrip_protocol(name)}: got {size} of {expected} bytes")
    with open(copy, "rb+") as file:
        os.fsync(file.fileno())


# ------------------------------------------------------------------------------------------ errors


class NoAnswer(BlockingIOError):
    """The file system failed. As after any BlockingIOError, starting again can help."""


@contextmanager
def _file_system(url: str) -> Iterator[tuple[Any, str]]:
    """Yield (fsspec file system, path) of a URL, and turn its errors into NoAnswer.

    Some errors keep their type: see the beginning of this file.
    """
    if re.search("://[^/?#]*:[^/?#]*@", url):
        raise ValueError(
            "a URL must not contain a password, because URLs are written to logs and checkpoints: "
            "set an environment variable, such as FSSPEC_FTP_PASSWORD for ftp"
        )
    fs = None
    try:
        fs, path = url_to_fs(url)
        if url.startswith(("http://", "https://")):
            # Limit the time without data. aiohttp's default limits the whole download.
            timeout = importlib.import_module("aiohttp").ClientTimeout(connect=60, sock_read=60)
            fs.client_kwargs = {"timeout": timeout, **fs.client_kwargs}
        fs.invalidate_cache()  # of listings
        yield fs, path.rstrip("/")
    except (FileNotFoundError, IsADirectoryError, ImportError, ValueError):
        raise
    except Exception as error:
        if fs is not None:  # connect again next time
            type(fs).clear_instance_cache()
        text = f"{error}"
        if isinstance(error, OSError) and error.strerror:
            name = error.filename2 or error.filename  # the target of a copy
            text = ": ".join(map(str, filter(None, (name, error.strerror))))
        kind = PermissionError if isinstance(error, PermissionError) else NoAnswer
        raise kind(f"{url}: {text or type(error).__name__}") from error
