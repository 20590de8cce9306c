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
MODULES = ("ddp_setup", "chardata", "loop", "ckpt")
CORE = [ROOT / f"{name}.py" for name in "ddp_setup chardata loop ckpt gpt run".split()]
(DIFF,) = code_blocks(README, "diff")
# the two scripts that the diff shows
BEFORE, AFTER = (
    "".join(line[1:] or "\n" for line in DIFF.splitlines(True) if not line.startswith(other))
    for other in "+-"
)


def test_readme_is_short():
    assert len(README.split()) <= 1300


def test_table_of_files_has_the_core():
    files = [
        cells[0].strip("`")
        for cells in table_rows(section(README, "## The six files"))
        if cells[0].endswith((".py`", "/`"))
    ]
    assert sorted(files) == sorted([*(path.name for path in CORE), "extras/"])


def test_both_scripts_run_and_the_new_one_beside_copies_of_its_modules(tmp_path):
    modules = re.findall(r"^import (ddp_setup|chardata|loop|ckpt)$", AFTER, re.MULTILINE)
    assert modules == ["chardata", "ddp_setup"]
    for script in (BEFORE, AFTER):
        (tmp_path / "train.py").write_text(script)
        command = [sys.executable, "train.py"]
        done = subprocess.run(
            command, cwd=tmp_path, env=ENVIRONMENT, timeout=600, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert [line.split(":")[0] for line in lines] == ["epoch 0", "epoch 1", "epoch 2"]
        first, *_, last = (float(line.split("loss ")[1]) for line in lines)
        assert last < 0.7 * first
        for name in modules:
            (tmp_path / f"{name}.py").write_text((ROOT / f"{name}.py").read_text())


def test_functions_that_the_tables_name_exist():
    guide = (ROOT / "extras" / "tutorial" / "README.md").read_text()
    text = section(guide, "## In your script or in a guide")
    names = set(re.findall(rf"\b(?:{'|'.join(MODULES)})\.(?!py\b)\w+", text))
    assert len(names) > 10
    for file, _, functions, _ in table_rows(section(README, "## The six files"))[1:6]:
        names |= {f"{file.strip('`')[:-3]}.{name}" for name in re.findall(r"`(\w+)`", functions)}
    assert "gpt.build" in names
    for name in names:
        module, function = name.split(".")
        assert re.search(rf"^(def|class) {function}\b", (ROOT / f"{module}.py").read_text(), re.M)


@pytest.mark.parametrize("line", run_commands(README))
def test_command_is_accepted_by_the_program(line):
    parse_command(line)


def test_there_are_commands():
    assert len(run_commands(README)) > 5


def test_flags_exist():
    assert not unknown_flags(README)


def test_exit_codes_are_those_of_the_program():
    codes = [int(cells[0]) for cells in table_rows(README) if cells[0].isdecimal()]
    assert codes == [run.DONE, run.FAILED, click.UsageError.exit_code, run.STOPPED]


def test_messages_of_the_most_common_errors_exist():
    errors = section(README, "## Common errors")
    assert len(quoted_messages(errors)) > 4
    foreign = {"Timed out", "Connection closed by peer", "process … terminated with signal SIGKILL"}
    assert {*unknown_messages(errors, CORE)} == foreign  # of torch
