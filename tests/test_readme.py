"""What README.md shows and says is true."""

import re
import subprocess
import sys

import click
import pytest
from conftest import ENVIRONMENT, ROOT
from documents import (
    code_blocks,
    parse_command,
    quoted_messages,
    run_commands,
    section,
    table_rows,
    unknown_flags,
    unknown_messages,
)

import run

README = (ROOT / "README.md").read_text()
CORE = [ROOT / f"{name}.py" for name in "ddp_setup chardata loop ckpt gpt run".split()]
(SCRIPT,) = code_blocks(README, "python")


def test_readme_is_short():
    assert len(README.split()) <= 2500


def test_table_of_files_has_the_core():
    files = [
        cells[0].strip("`") for cells in table_rows(README) if cells[0].endswith((".py`", "/`"))
    ]
    assert sorted(files) == sorted([*(path.name for path in CORE), "extras/"])


def test_script_runs_beside_copies_of_its_modules(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    for name in re.findall(r"^import (ddp_setup|chardata|loop|ckpt)$", SCRIPT, re.MULTILINE):
        (tmp_path / f"{name}.py").write_text((ROOT / f"{name}.py").read_text())
    command = [sys.executable, "train.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=ENVIRONMENT, timeout=600, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["epoch 0", "epoch 1", "epoch 2"]
    assert float(lines[-1].split("accuracy ")[1]) > 0.8
    assert len([*tmp_path.glob("out-*/step-*.pt")]) == 3


def test_table_of_parts_explains_functions_of_the_script():
    section_text = section(README, "## Your training script, made distributed")
    parts = {
        part for cells in table_rows(section_text)[1:] for part in re.findall(r"`(\w+)`", cells[0])
    }
    assert len(parts) > 8
    assert not [part for part in parts if not re.search(rf"\b{part}\b", SCRIPT)]


@pytest.mark.parametrize("line", run_commands(README))
def test_command_is_accepted_by_the_program(line):
    if re.search(r"run.py (info|plot|export)\b", line) and not (ROOT / "extras").exists():
        pytest.skip("this command is in extras/")
    parse_command(line)


def test_there_are_commands():
    assert len(run_commands(README)) > 8


@pytest.mark.skipif(not (ROOT / "extras").exists(), reason="some of the flags are in extras/")
def test_flags_exist():
    assert not unknown_flags(README)


def test_exit_codes_are_those_of_the_program():
    codes = [int(cells[0]) for cells in table_rows(README) if cells[0].isdecimal()]
    assert codes == [run.DONE, run.FAILED, click.UsageError.exit_code, run.STOPPED, 130]


def test_messages_of_the_most_common_errors_exist():
    errors = section(README, "## The six most common errors")
    assert len(quoted_messages(errors)) == 6
    assert unknown_messages(errors, CORE) == []
