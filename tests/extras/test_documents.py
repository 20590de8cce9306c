"""What README.md and the documents in extras/ and tests/ say is true."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, ROOT
from documents import (
    quoted_messages,
    section,
    table_rows,
    unknown_flags,
    unknown_messages,
)

DOCUMENTS = [
    ROOT / name
    for name in (
        "README.md",
        "extras/README.md",
        "extras/troubleshooting.md",
        "extras/tutorial/README.md",
        "extras/tutorial/recipes.md",
        "tests/README.md",
    )
]
EXTRAS = (ROOT / "extras" / "README.md").read_text()
TROUBLESHOOTING = (ROOT / "extras" / "troubleshooting.md").read_text()
LAUNCH = [*(ROOT / "extras" / "launch").iterdir()]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_that_are_small(path):
    for link in re.findall(r"\]\((?!http)(.*?)\)", path.read_text()):
        name, _, anchor = link.partition("#")
        file = path.parent / name if name else path
        assert file.stat().st_size < 100 * 1024, link
        titles = re.findall(r"^#+ (.*)$", file.read_text(), re.M) if anchor else [""]
        # The anchors of titles on GitHub
        anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
        assert anchor in anchors, link


@pytest.mark.parametrize(
    "path", [*DOCUMENTS, *LAUNCH], ids=lambda path: str(path.relative_to(ROOT))
)
def test_flags_exist(path):
    assert not unknown_flags(path.read_text())


def test_every_extra_is_in_the_table():
    named = {cells[0].strip("`") for cells in table_rows(EXTRAS) if cells[0].endswith(".py`")}
    there = {path.name for path in (ROOT / "extras").glob("*.py")} - {"__init__.py"}
    assert named == there


def test_messages_of_the_troubleshooting_exist():
    sources = [*ROOT.glob("*.py"), *ROOT.glob("extras/*.py")]
    assert len(quoted_messages(TROUBLESHOOTING)) > 15
    foreign = {"process … terminated with signal SIGKILL"}  # of torch
    assert {*unknown_messages(TROUBLESHOOTING, sources)} == foreign


def test_the_commands_for_ones_own_text_run(tmp_path):
    """One after the other, as a shell reads them, with a tiny model that learns for a few steps."""
    for name in ("run.py", "extras"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "books").mkdir()
    for name in ("books/1.txt", "books/2.txt", "a.txt", "b.txt", "other.txt"):
        (tmp_path / name).write_text("The cat sat on the mat. " * 99)
    lines = section((ROOT / "README.md").read_text(), "## Your own text").splitlines()
    commands = [line.split("#")[0].split("&&")[-1] for line in lines if line.startswith("    ")]
    assert len(commands) > 6
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for steps, command in enumerate(commands, 2):
        if not re.search(" sample | eval |plot.py", command):
            command += f" --layers 1 --heads 2 --embd 16 --block-size 16 --steps {steps}"
        done = subprocess.run(
            command,
            shell=True,
            cwd=tmp_path,
            env={**ENVIRONMENT, "PATH": path},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, (command, done)
    assert (tmp_path / "loss.png").stat().st_size > 10_000
