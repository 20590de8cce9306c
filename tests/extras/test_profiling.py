"""Tests of extras/profiling.py."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TINY, run

from extras import profiling

CORE = [f"{name}.py" for name in "ddp_setup gpt chardata loop ckpt run".split()]


def traced_steps(path: Path) -> set[str]:
    events = json.loads(path.read_text())["traceEvents"]
    return {event["name"] for event in events if event.get("name", "").startswith("ProfilerStep")}


@pytest.mark.parametrize("count", [1, 3])
def test_all_steps_are_yielded_and_the_trace_has_the_requested_ones(tmp_path, count):
    path = tmp_path / "trace.json"
    assert [*profiling.traced(range(20), count, f"{path}")] == [*range(20)]
    assert traced_steps(path) == {f"ProfilerStep#{i}" for i in range(1, count + 1)}


@pytest.mark.parametrize("steps", [0, 3, profiling.WARMUP])
def test_steps_that_end_before_the_trace_are_yielded(tmp_path, steps):
    assert [*profiling.traced(range(steps), 2, f"{tmp_path / 'trace.json'}")] == [*range(steps)]


def test_the_line_of_the_docstring_traces_a_training_of_the_program(text, tmp_path):
    """The line is added to a copy of run.py, where the docstring says."""
    for name in [*CORE, "extras"]:
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    line = re.search(r"training = extra.*", profiling.__doc__)[0]
    program = (tmp_path / "run.py").read_text()
    place = "        gc.freeze()"
    assert program.count(place) == 1
    (tmp_path / "run.py").write_text(program.replace(place, f"        {line}\n{place}"))
    flags = [*TINY, "--data", text, "--out", tmp_path / "out"]
    launcher = [sys.executable, "run.py"]
    ran = run(*flags, "--steps", 12, "--no-compile", launcher=launcher, root=tmp_path)
    assert ran.code == 0, ran
    assert traced_steps(tmp_path / "trace.json") == {f"ProfilerStep#{i}" for i in range(1, 6)}
