"""Promise 8: bad input gets one line, before anything is written: what was wrong, and with which value."""

import hashlib
import importlib.util
import os
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import PYTHON, ROOT, TINY, Ran, ahead, checkpoints, run, state, torchrun

import ckpt


class Case(NamedTuple):
    args: list[Any]  # functions among them make their argument, in the case's own folder
    said: list[str]  # what the line has to name
    command: str | None = None  # instead of training
    env: dict[str, str] = {}
    out: Callable[["Place"], Path] | None = None  # makes the out folder; otherwise there is none yet


class Place(NamedTuple):
    folder: Path  # the case's own
    text: Path  # fit to train on
    trained: Path  # a finished run's out folder


# ------------------------------------------------------------------------------------------- what a case needs


def file(name: str, content: bytes) -> Callable[[Place], Path]:
    def make(place: Place) -> Path:
        (place.folder / name).write_bytes(content)
        return place.folder / name

    return make


def folder(place: Place) -> Path:
    (place.folder / "texts").mkdir()
    return place.folder / "texts"


def trained(place: Place) -> Path:
    return Path(shutil.copytree(place.trained, place.folder / "out"))


def of_another_shape(place: Place) -> Path:
    saved = state(place.trained)
    saved["model"]["head.weight"] = torch.zeros(18, 32)
    saved["step"] = 5
    ckpt.save(f"{place.folder / 'out'}", saved, 5)
    return place.folder / "out"


class Intruder:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.target}'",)


def with_code(write: Callable[[Any, Any], None], place: Place) -> Path:
    """A file that says whom it belongs to, has the digest that its name tells, and runs a command if unpickled."""
    out, intruder = place.folder / "out", Intruder()
    out.mkdir()
    intruder.target = place.folder / "the code has run"
    with open(out / "temporary", "w+b") as opened:
        write({"model": {"head.weight": intruder}, "step": 5}, opened)
        opened.seek(0)
        digest = hashlib.sha256(opened.read()).hexdigest()[:32]
    (out / "temporary").rename(out / f"step-00000005-{digest}.pt")
    return out


def all_damaged(place: Place) -> Path:
    out = trained(place)
    for path in checkpoints(out):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    return out


# --------------------------------------------------------------------------------------------------- the table

NO_GCS = pytest.mark.skipif(importlib.util.find_spec("gcsfs") is not None, reason="gcsfs is installed")

CASES = {
    "missing file": Case(["--data", "no/such.txt"], ["no/such.txt"]),
    "empty file": Case(["--data", file("empty.txt", b"")], ["empty.txt", "empty"]),
    "short file": Case(["--data", file("short.txt", b"only fifteen...")], ["short.txt", "16"]),
    "not utf-8": Case(["--data", file("latin.txt", b"caf\xe9 " * 999)], ["latin.txt", "0xe9 at 3", "UTF-8", "--tokens byte"]),
    "folder as data": Case(["--data", folder], ["/texts", "folder"]),
    "url without its package": Case(["--data", "gs://a/b.txt"], ["gcsfs", "pip install"]),
    "heads not dividing embd": Case(["--heads", 3], ["embd", "16", "heads", "3"]),
    "batch smaller than ranks": Case(["--batch-size", 1], ["--batch-size 1", "2 ranks"]),
    "min-lr above lr": Case(["--min-lr", 0.1], ["--min-lr 0.1", "--lr 0.003"]),
    "seed too large": Case(["--seed", 2**70], ["--seed"]),
    "unknown device": Case(["--device", "tpu"], ["'tpu'", "cpu"]),
    "no cuda here": Case(["--device", "cuda"], ["'cuda'", "cpu"]),
    "no cuda here, sample": Case(["--device", "cuda"], ["'cuda'", "cpu"], command="sample", out=trained),
    "no number": Case(["--lr", "fast"], ["--lr", "'fast'"]),
    "no number in the environment": Case([], ["--clip", "'much'"], env={"DDPKIT_CLIP": "much"}),
    "unknown flag": Case(["--batchsize", 8], ["--batchsize", "--batch-size"]),
    "unknown sub-command": Case(["smaple"], ["smaple"]),
    "unknown variable": Case([], ["DDPKIT_BATCHSIZE"], env={"DDPKIT_BATCHSIZE": "8"}),
    "half a launcher": Case([], ["LOCAL_RANK"], env={"RANK": "0"}),
    "no such config file": Case(["--config", "no/such.toml"], ["no/such.toml"]),
    "config that is no TOML": Case(["--config", file("a.toml", b"seed = ")], ["a.toml"]),
    "unknown key": Case(["--config", file("a.toml", b"batchsize = 8")], ["a.toml", "'batchsize'", "batch_size"]),
    "no number in the config": Case(["--config", file("a.toml", b'clip = "much"')], ["--clip", "'much'"]),
    "file for a folder": Case([], ["--out", "/out"], out=file("out", b"")),
    "checkpoint of another shape": Case([], ["step-00000005-", "head.weight", "(18, 32)"], out=of_another_shape),
    "checkpoint with code": Case([], ["step-00000005-", "--fresh"], out=partial(with_code, torch.save)),
    "pickle with code": Case([], ["step-00000005-", "--fresh"], out=partial(with_code, pickle.dump)),
    "all checkpoints damaged": Case([], ["step-00000002-", "damaged", "--fresh"], out=all_damaged),
    "sample of nothing": Case([], ["/out", "no checkpoint"], command="sample"),
    "unknown character": Case(["--prompt", "the Ü"], ["'Ü'", "18"], command="sample", out=trained),
}  # fmt: skip
MARKS = {"url without its package": [NO_GCS]}
ONE = [name for name in CASES if name != "batch smaller than ranks"]
SPAWN = ["batch smaller than ranks", "no cuda here", "file for a folder", "checkpoint of another shape"]
TORCHRUN = ["batch smaller than ranks"]
LAUNCHES = {"alone": (PYTHON, []), "spawn": (PYTHON, ["--spawn", 2]), "torchrun": (torchrun(2), [])}


class Outcome(NamedTuple):
    ran: Ran
    untouched: bool  # the out folder is as it was
    folder: Path


@pytest.fixture(scope="module")
def outcome(text, tmp_path_factory):
    """outcome(launch, name): what came of a case."""
    base = tmp_path_factory.mktemp("bad")
    done = run(*TINY, "--data", text, "--steps", 2, "--save-every", 1, "--out", base / "trained")
    assert done.code == 0, done

    def meet(launch: str, name: str) -> Outcome:
        case, place = CASES[name], Place(base / f"{launch}-{list(CASES).index(name)}", text, base / "trained")
        place.folder.mkdir()
        launcher, more = LAUNCHES[launch]
        out = case.out(place) if case.out else place.folder / "out"
        args = [arg(place) if callable(arg) else arg for arg in case.args]
        start = [case.command] if case.command else [*TINY, "--data", text, "--steps", 2]
        before = content(out)
        ran = run(*start, "--out", out, *more, *args, launcher=launcher, env=case.env)
        return Outcome(ran, content(out) == before, place.folder)

    def content(out: Path) -> Any:
        if out.is_dir():
            return {path.name: path.read_bytes() for path in out.iterdir()}
        return out.read_bytes() if out.exists() else None

    wanted = [("alone", name) for name in ONE] + [("spawn", name) for name in SPAWN]
    wanted += [("torchrun", name) for name in TORCHRUN]
    with ahead(**{f"{launch} {name}": partial(meet, launch, name) for launch, name in wanted}) as runs:
        yield lambda launch, name: runs[f"{launch} {name}"].result()


def check(outcome: Outcome, name: str) -> None:
    ran, untouched, folder = outcome
    assert "Traceback" not in ran.out + ran.err, ran.err
    assert ran.err.startswith("Error: ") and ran.err.count("\n") == 1, ran.err
    assert [said for said in CASES[name].said if said not in ran.err] == [], ran.err
    assert "weights_only" not in ran.err, ran.err  # torch tells users to read the file without it
    assert ran.code == 2 and ran.out == ""
    assert untouched
    assert not (folder / "the code has run").exists()


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in ONE])
def test_bad_input_is_one_line(outcome, name):
    check(outcome("alone", name), name)


@pytest.mark.parametrize("name", SPAWN)
def test_bad_input_is_one_line_from_all_ranks_together(outcome, name):
    check(outcome("spawn", name), name)


@pytest.mark.parametrize("name", TORCHRUN)
def test_bad_input_is_said_once_under_torchrun(outcome, name):
    ran, untouched, _ = outcome("torchrun", name)
    lines = [line for line in ran.err.splitlines() if line.startswith("Error")]
    assert len(lines) == 1 and all(said in lines[0] for said in CASES[name].said), ran.err
    assert f'File "{ROOT}/run.py' not in ran.err  # torchrun has a traceback of its own
    assert ran.code != 0 and untouched


def test_code_in_a_checkpoint_would_have_run_if_it_were_unpickled(tmp_path):
    """The two cases above can fail: the same file does run its code where it is trusted."""
    out = with_code(torch.save, Place(tmp_path, tmp_path, tmp_path))
    torch.load(checkpoints(out)[0], weights_only=False)
    assert (tmp_path / "the code has run").exists()


def test_what_click_says_in_several_lines_is_one_too():
    ran = run("export")
    assert ran.err == "Error: Missing option '--format'. Choose from: hf, safetensors, nanogpt, checkpoint\n"
    assert ran.code == 2 and ran.out == ""
