"""What README.md and the documents in extras/ and tests/ say is true."""

import re

import pytest
from conftest import ROOT
from documents import (
    quoted_messages,
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
        file = path.parent / name
        assert file.stat().st_size < 100 * 1024, link
        titles = re.findall(r"^#+ (.*)$", file.read_text(), re.M) if anchor else [""]
        # The anchor of a title on GitHub, for titles of letters and spaces
        assert anchor in [title.lower().replace(" ", "-") for title in titles], link


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
