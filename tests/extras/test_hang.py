"""Tests of extras/hang.py: the report of which rank waits in which line. What the ranks do is in tests/ranks.py."""

import re
from pathlib import Path

import pytest
import ranks
from test_ddp_setup import DONE, forks, run

import ddp_setup


def line_of(code):
    """Return "FILE:LINE" of some code in ranks.py."""
    before, found, _ = Path(ranks.__file__).read_text().partition(code)
    assert found
    return f"ranks.py:{before.count(chr(10)) + 1}"


@pytest.mark.parametrize("launcher_serves", [True, False])
def test_a_rank_that_waits_for_another_prints_the_lines_of_all_and_ends(launcher_serves):
    """Of three ranks, the last one sleeps instead of waiting, and continues until a launcher ends it."""
    ended = run("use_hang_report", "sleep", size=3, serve=launcher_serves)
    waits, sleeps = (
        line_of("dist.barrier()  # here the others wait"),
        line_of("time.sleep(20)  # here"),
    )
    places = f"rank 0 at {waits}.*, rank 1 at {waits}.*, rank 2 at {sleeps}.*"
    text = "".join(text for _, text in ended)
    # The first to end can break the connection of the other.
    assert {code for code, _ in ended[:2]} <= {1, ddp_setup.LOST}
    assert re.fullmatch(f"Error: no progress for 3 s: {places}\n", text)


def test_a_warning_comes_early_once_per_wait_and_names_the_line_of_the_script():
    """Of three ranks, the last one works for longer than the others want to wait. Nothing ends."""
    ended = run("wait_slowly_with_hang_report", size=3)
    assert [code for code, _ in ended] == [0, 0, 0], ended
    script = line_of('found["deep"](5')
    waits = rf"ddp_setup\.py:\d+ < loop\.py:\d+ < loop\.py:\d+ < … < {script}"
    slow = line_of("time.sleep(4)  # here it is slow") + ".*"
    places = f"rank 0 at {waits}, rank 1 at {waits}, rank 2 at {slow}"
    line = rf"WARNING: no progress for 1 s \(the ranks end after 30 s\): {places}\n"
    assert re.fullmatch(f"(?:{line}){{2}}", "".join(text for _, text in ended)), ended


def test_a_rank_that_was_stopped_does_not_answer():
    with forks("use_hang_report", "stop") as (processes, ends):
        processes[0].join(60)
        processes[1].kill()
        code, text = ends()[0]
    assert code == 1 and text.endswith(", no answer from rank 1\n"), text


@pytest.mark.parametrize("how", ["compute", "wait together"])
def test_slow_work_is_not_a_hang(how):
    assert run("use_hang_report", how) == [DONE] * 2


@pytest.mark.parametrize("missing", ["recorder", "function"])
def test_one_rank_warns_at_the_start_if_torchs_recorder_cannot_be_read(missing):
    """The user can switch the recorder off, and a later version of torch can rename its private functions."""
    more = {"TORCH_FR_BUFFER_SIZE": "0"} if missing == "recorder" else {}
    ended = run("use_hang_report", f"no {missing}", **more)
    text = "".join(text for _, text in ended)
    reason = "TORCH_FR_BUFFER_SIZE" if more else "_dump_fr_trace_json"
    assert [code for code, _ in ended] == [0, 0]
    assert re.fullmatch(f"WARNING: hangs are not reported with torch .*{reason}.*\n", text), text
