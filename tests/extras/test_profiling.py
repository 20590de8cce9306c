"""Tests of extras/profiling.py and of --profile."""

import json
from functools import partial
from pathlib import Path

import pytest
from conftest import TINY, Ran, ahead, run

from extras import profiling

RUNS = [
    *TINY,
    "--dropout",
    0,
    "--steps",
    40,
    "--log-every",
    1,
    "--eval-every",
    10,
    "--save-every",
    10,
]


@pytest.fixture(scope="module", autouse=True)
def done(text, tmp_path_factory):
    """Start runs in the background. Return a function: name -> (printed text, --out folder)."""
    folder = tmp_path_factory.mktemp("extras")
    runs = {
        "gpt2": ["--arch", "gpt2", "--profile", 2],
        "spawned": ["--spawn", 2, "--profile", 1, "--steps", 12],
    }

    def train(name: str) -> tuple[Ran, Path]:
        ran = run(*RUNS, "--data", text, "--out", folder / name, *runs[name])
        assert ran.code == 0, ran
        return ran, folder / name

    with ahead(**{name: partial(train, name) for name in runs}) as begun:
        yield lambda name: begun[name].result()


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


def test_a_trace_has_as_many_steps_as_the_flag_says(done):
    events = json.loads((done("gpt2")[1] / "trace.json").read_text())["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert {name for name in names if name.startswith("ProfilerStep")} == {
        "ProfilerStep#1",
        "ProfilerStep#2",
    }
    assert sum(name.startswith("Optimizer.step#AdamW") for name in names) == 2


def test_a_trace_of_more_steps_than_are_left_is_a_warning(text, tmp_path):
    ran = run(*RUNS, "--data", text, "--out", tmp_path, "--steps", 3, "--profile", 5)
    assert (
        ran.code == 0 and "Warning: a trace of 5 steps needs 11 steps, and there were 3" in ran.err
    ), ran


def test_only_rank_0_writes_a_trace(done):
    assert [path.name for path in done("spawned")[1].glob("trace*")] == ["trace.json"]
