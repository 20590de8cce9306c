"""Tests of extras/profiling.py."""

import json
from pathlib import Path

import pytest

from extras import profiling


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
