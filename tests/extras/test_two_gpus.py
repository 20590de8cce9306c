"""The script tests/two_gpus.py works: here on two ranks on CPUs."""

import sys
from pathlib import Path

import two_gpus
from conftest import ROOT, run
from documents import table_rows


def test_all_checks_succeed_on_cpus_and_make_one_table():
    ran = run("--device", "cpu", launcher=[sys.executable, f"{ROOT}/tests/two_gpus.py"])
    assert (ran.code, ran.err) == (0, ""), ran
    title, *rows = table_rows(ran.out)
    assert title == ["check", "result", "time"]
    assert [cells[0] for cells in rows] == [*two_gpus.CHECKS] and "FAILED" not in ran.out
    assert ran.out.startswith("Python 3.") and "torch 2." in ran.out.splitlines()[0]


def test_a_check_that_fails_is_a_row_that_says_why(tmp_path):
    setting = two_gpus.Setting(Path(tmp_path), "cpu", [], [])
    for path, start in ((tmp_path / "a", 2.0), (tmp_path / "b", 2.1)):
        path.mkdir()
        lines = [f'{{"step": {step}, "loss": {start}}}' for step in range(20)]
        (path / "metrics.jsonl").write_text("\n".join(lines))
    line, good = two_gpus.row("x", lambda s: two_gpus.distance(s, "a", "b"), setting)
    assert not good and line.startswith("| x | FAILED: AssertionError('losses differ by 5.0e-02"), (
        line
    )


def test_without_two_gpus_there_is_one_line():
    script = [sys.executable, f"{ROOT}/tests/two_gpus.py"]
    ran = run(launcher=script)
    assert ran.code == 2 and "Error: needs two GPUs, here are 0\n" in ran.err, ran
