"""Tests of extras/hang.py: the report of which rank is in which line. What the ranks do is in tests/ranks.py."""

import re
from pathlib import Path

import pytest
import ranks
from test_ddp_setup import DONE, forks, run

import ddp_setup
from extras import hang


def line_of(code):
    """Return "FILE:LINE" of some code in ranks.py."""
    before, found, _ = Path(ranks.__file__).read_text().partition(code)
    assert found
    return f"ranks.py:{before.count(chr(10)) + 1}"


@pytest.mark.parametrize("how, timeout", [("sleep", 60), ("stop", 4)])
def test_one_rank_prints_once_in_which_line_each_rank_is(how, timeout):
    """Rank 0 sleeps or is stopped, and the others wait for it. A stopped rank cannot print."""
    with forks("report_hangs", how, timeout, size=3) as (processes, ends):
        if how == "stop":
            for process in processes[1:]:
                process.join(60)
            processes[0].kill()
        ended = ends()
    sleeps, waits = map(line_of, ("# here one sleeps", "# here the others wait"))
    place = r"rank {} for \d s at {} < ranks.py:\d+ < ranks.py:\d+"
    places = ", ".join(place.format(*pair) for pair in ((0, sleeps), (1, waits), (2, waits)))
    found = re.findall("^WARNING.*", "".join(text for _, text in ended), re.M)
    assert len(found) == 1 and re.fullmatch(f"WARNING: no progress: {places}", found[0]), ended
    assert how == "stop" or [code for code, _ in ended] == [0] * 3


def test_ranks_that_work_print_nothing():
    assert run("report_hangs", "work") == [DONE] * 2


def test_a_single_rank_needs_no_store():
    with hang.report(ddp_setup.World()):
        pass
