"""What README.md and the documents in extras/ and tests/ say is true."""

import re

import pytest
import torch
from conftest import ROOT
from documents import (
    quoted_messages,
    table_rows,
    unknown_flags,
    unknown_messages,
)

import gpt

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
    assert not unknown_messages(TROUBLESHOOTING, sources)


def kept_per_token(arch: str, dtype: torch.dtype, recompute: bool, layers: int) -> float:
    """Return how many bytes a forward pass keeps for the backward pass, per token and width."""
    width, length = 256, 520
    config = gpt.Config(8, length, layers, 4, width, 0.0, arch)
    model = gpt.build(config, 0)
    model.checkpoint_activations = recompute
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}
    x = torch.zeros(1, length, dtype=torch.long)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            model(x, x)
    # autocast keeps a bfloat16 copy of each matrix: 12 width^2 numbers of 2 bytes per layer
    copies = 0 if recompute or dtype == torch.float32 else 2 * 12 * layers * width**2
    size = sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) - copies
    return size / length / width


@pytest.mark.parametrize("arch", ["gpt2", "modern"])
def test_a_layer_keeps_as_many_bytes_per_token_as_the_table_says(arch):
    (cells,) = [cells for cells in table_rows(EXTRAS) if cells[0] == f"`--arch {arch}`"]
    settings = (torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)
    for cell, setting in zip(cells[1:], settings, strict=True):
        layer = kept_per_token(arch, *setting, 2) - kept_per_token(arch, *setting, 1)
        assert layer == pytest.approx(int(cell.split()[0]), abs=0.5), setting
