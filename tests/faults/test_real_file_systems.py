"""Promise 5 on real file systems: the power is cut at any moment of a series of saves.

ext4 and xfs have an ioctl that stops a mounted file system as a power cut does: from then on, not
even what is in its log reaches the disk. A child process saves checkpoints and stops the file
system at one of its calls of fsync, rename and unlink. Then the file system is mounted again, and
the next run continues from what is on the disk. This needs root, for the mount of an image file.
"""

import fcntl
import os
import random
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import same

import ckpt

pytestmark = pytest.mark.torture
SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN: _IOR('X', 125, __u32)
NO_LOG_FLUSH = 2
SYSTEMS = ("ext4", "xfs", "btrfs")
CALLS = ("fsync", "replace", "unlink")
STEPS = 4  # saves in a series; with keep=2, the last ones also delete


def make_state(step: int) -> dict[str, Any]:
    """Return a state of 80 kB whose numbers are those of the step."""
    weights = torch.arange(20_000, dtype=torch.float32) + step
    return {"model": {"w": weights}, "optimizers": [], "step": step}


def shut_down(folder: Path) -> None:
    """Stop the file system of the folder as a power cut does."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.ioctl(handle, SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
    finally:
        os.close(handle)


def save_until_cut(folder: Path, done: int, cut_at: int, before: bool, with_fsync: bool) -> None:
    """Save the steps of a series; before or after call number `cut_at`, cut the power and exit.

    done: a file descriptor to which each step is written when its save has returned.
    """
    calls = 0

    def counted(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == cut_at and before:
            shut_down(folder)
            os._exit(0)
        result = call(*args, **kwargs) if with_fsync or call is not fsync else None
        if calls == cut_at:
            shut_down(folder)
            os._exit(0)
        return result

    fsync = os.fsync
    for name in CALLS:
        setattr(os, name, partial(counted, getattr(os, name)))
    for step in range(1, STEPS + 1):
        ckpt.write_text(f"{folder}", "config.json", f"{step} " * 1000)
        ckpt.save(f"{folder}", make_state(step), step, keep=2)
        os.write(done, bytes([step]))
    shut_down(folder)
    os._exit(0)


@pytest.fixture(params=SYSTEMS)
def mounted(request, tmp_path) -> Iterator[tuple[Path, Callable[[], None]]]:
    """Yield (folder of a new file system, function that mounts it again after a cut)."""
    mkfs = shutil.which(f"mkfs.{request.param}")
    if mkfs is None or os.geteuid() != 0:
        pytest.skip(f"{request.param}: needs root and mkfs.{request.param}")
    image, folder = tmp_path / "image", tmp_path / "mounted"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(400 << 20)  # sparse; mkfs.xfs refuses less than 300 MB

    def run(*command: object) -> None:
        ran = subprocess.run([f"{part}" for part in command], capture_output=True, text=True)
        if ran.returncode:
            raise OSError(f"{request.param}: {command[0]}: {ran.stderr.strip()}")

    def mount() -> None:
        run("mount", "-o", "loop", image, folder)

    def mount_again() -> None:
        run("umount", folder)
        mount()

    try:
        run(mkfs, "-q", image)
        mount()
    except OSError as error:
        pytest.skip(f"{error}")
    try:
        probe = folder / "probe"
        probe.mkdir()
        try:
            shut_down(probe)
        except OSError as error:
            pytest.skip(f"{request.param}: this kernel cannot shut it down: {error}")
        mount_again()
        yield folder, mount_again
    finally:
        run("umount", folder)


def cut_once(mounted, number: int, with_fsync: bool = True) -> None:
    """Cut the power at a place that `number` decides, and check what is on the disk."""
    root, mount_again = mounted
    chance, out = random.Random(number), root / f"{number}"
    cut_at, before = chance.randrange(1, 36), chance.random() < 0.5
    os.mkdir(out)
    os.sync()
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save_until_cut(out, writable, cut_at, before, with_fsync)
        finally:
            os._exit(1)
    os.close(writable)
    with open(readable, "rb") as pipe:
        saved = max([0, *pipe.read()])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    mount_again()

    found, rejected = ckpt.newest(f"{out}")
    assert rejected == {}, "a checkpoint is neither complete nor absent"
    newest = found.entry.step if found else 0
    assert newest in (saved, saved + 1), f"the save of step {saved} is lost, found {newest}"
    for entry in ckpt.list_checkpoints(f"{out}"):
        assert same(ckpt.load(f"{out}", entry)["model"], make_state(entry.step)["model"])
    text = ckpt.read_text(f"{out}", "config.json")
    assert text in [f"{step} " * 1000 for step in (saved, saved + 1)] or (text, saved) == ("", 0)

    lock = ckpt.lock(f"{out}")
    ckpt.save(f"{out}", make_state(newest + 1), newest + 1, keep=1)
    assert [entry.step for entry in ckpt.list_checkpoints(f"{out}")] == [newest + 1]
    names = {path.name for path in out.iterdir()} - {".lock", "config.json"}
    assert len(names) == 1, f"something is left over: {names}"
    del lock


def test_a_save_survives_a_power_cut_or_is_absent(mounted, trials, request):
    system = request.node.callspec.params["mounted"]
    trials(f"power cut on {system}", partial(cut_once, mounted), 12, 500, at_once=1)


def test_without_fsync_the_check_fails(mounted):
    """The file system itself does not make files durable in time, so the check above can fail."""
    lost = 0
    for number in range(8):
        try:
            cut_once(mounted, number, with_fsync=False)
        except (AssertionError, ValueError):
            lost += 1
    assert lost > 0
