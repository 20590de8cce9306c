"""extras/tutorial/notebook.ipynb trains on two processes, and does the rest of what it says."""

import copy
import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ENVIRONMENT, ROOT

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
for package in ("ipykernel", "matplotlib"):
    pytest.importorskip(package)

NOTEBOOK = ROOT / "extras" / "tutorial" / "notebook.ipynb"
# Before this line of the script come lines that interrupt the kernel and all processes that it
# started, as the button of a notebook does, at the fifth step. The training has 100 epochs.
STOP_LINE = "            if report.stop:\n"
INTERRUPT = """            if step == 5 and world.rank == 0:
                import signal, time
                os.killpg(os.getpgid(os.getppid()), signal.SIGINT)
"""
INTERRUPT_AGAIN = """                time.sleep(1)
                os.killpg(os.getpgid(os.getppid()), signal.SIGINT)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder for the notebook, two folders below a copy of the modules."""
    for name in ("ddp_setup", "chardata", "loop"):
        shutil.copy(ROOT / f"{name}.py", tmp_path)
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"):  # nothing goes to ~
        monkeypatch.setenv(name, str(tmp_path / name))
        monkeypatch.setitem(ENVIRONMENT, name, str(tmp_path / name))
    monkeypatch.delitem(ENVIRONMENT, "MPLBACKEND", raising=False)  # the kernel chooses inline
    (tmp_path / "extras" / "tutorial").mkdir(parents=True)
    return tmp_path / "extras" / "tutorial"


def execute(notebook, folder, allow_errors: bool = False) -> None:
    """Run all cells in `folder`. Without allow_errors, an exception in a cell is raised here."""
    resources = {"metadata": {"path": str(folder)}}
    client = nbclient.NotebookClient(
        notebook, timeout=600, resources=resources, allow_errors=allow_errors
    )
    client.execute(env=ENVIRONMENT)


def read():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    return notebook, {cell.id: cell for cell in notebook.cells}


def text(cell) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def losses(folder) -> list[float]:
    lines = (folder / "out-notebook" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records]


def errors(notebook) -> dict[str, str]:
    """Return {id: error} of the cells that raised one."""
    return {
        cell.id: f"{output.ename}: {output.evalue}"
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.output_type == "error"
    }


def interrupt_(cells, lines: str) -> None:
    """Make the training longer, and let it execute these lines in each step."""
    script = cells["script"].source
    assert script.count(STOP_LINE) == script.count("range(3)") == 1
    cells["script"].source = script.replace(STOP_LINE, lines + STOP_LINE).replace(
        "range(3)", "range(100)"
    )


def test_the_notebook_trains_on_two_ranks_and_uses_the_result(folder):
    notebook, cells = read()
    execute(notebook, folder)
    assert [
        name for name, cell in cells.items() if cell.cell_type == "code" and "Error" in text(cell)
    ] == []
    lines = text(cells["launch"]).splitlines()
    assert sorted(lines[:2]) == ["rank 0 of 2 on cpu", "rank 1 of 2 on cpu"]
    assert lines[2].startswith("step 20: loss ") and lines[-1] == "done after step 81"
    found = losses(folder)
    assert len(found) == 81 and sum(found[-10:]) < 0.5 * sum(found[:10])
    (figure,) = cells["plot"].outputs
    assert figure.output_type == "display_data" and len(figure.data["image/png"]) > 5000
    assert float(text(cells["use"]).split(": ")[1]) > 0.8
    # The script alone, on one process, computes the same: so both ranks took part.
    weights = torch.load(folder / "out-notebook" / "model.pt", weights_only=True)
    single = subprocess.run(
        [sys.executable, "out-notebook/train.py"],
        cwd=folder,
        env={**ENVIRONMENT, "PYTHONPATH": str(folder / ".." / "..")},
        timeout=600,
        capture_output=True,
        text=True,
    )
    assert single.returncode == 0 and "rank 0 of 1 on cpu" in single.stdout, single
    assert losses(folder) == pytest.approx(found, rel=1e-4)
    alone = torch.load(folder / "out-notebook" / "model.pt", weights_only=True)
    torch.testing.assert_close(weights, alone, rtol=1e-4, atol=1e-5)


def test_torchrun_trains_too(folder):
    notebook, cells = read()
    (cells["launch"].source,) = re.findall(r"`(!.*torch.*)`", cells["about-launch"].source)
    execute(notebook, folder)
    ranks = re.findall("rank . of 2 on cpu", text(cells["launch"]))
    assert sorted(ranks) == ["rank 0 of 2 on cpu", "rank 1 of 2 on cpu"]
    assert len(losses(folder)) == 81 and "accuracy" in text(cells["use"])


def test_one_process_trains_in_the_notebook(folder):
    notebook, cells = read()
    (cells["launch"].source,) = re.findall(r"`(%run .*)`", cells["about-launch"].source)
    execute(notebook, folder)
    assert "rank 0 of 1 on cpu" in text(cells["launch"])
    assert len(losses(folder)) == 81 and "accuracy" in text(cells["use"])


def test_an_interrupt_saves_and_stops_and_the_cell_says_so(folder):
    notebook, cells = read()
    interrupt_(cells, INTERRUPT)
    execute(notebook, folder, allow_errors=True)
    assert errors(notebook) == {"launch": "AssertionError: the training was interrupted"}
    steps = len(losses(folder))
    assert 5 <= steps < 2700 and f"stopped after step {steps}" in text(cells["launch"])
    assert "accuracy" in text(cells["use"])  # so model.pt was saved


def test_a_second_interrupt_ends_the_ranks_but_not_the_kernel(folder):
    notebook, cells = read()
    interrupt_(cells, INTERRUPT + INTERRUPT_AGAIN)
    execute(notebook, folder, allow_errors=True)
    found = errors(notebook)
    assert found.keys() == {"launch", "use"} and found["launch"].startswith("KeyboardInterrupt")
    assert found["use"].startswith("FileNotFoundError")  # The ranks ended before they could save.


def test_a_changed_script_is_used_by_the_cells_after_it(folder):
    notebook, cells = read()
    again = [copy.deepcopy(cells[name]) for name in ("script", "launch", "use")]
    again[0].source = again[0].source.replace("64", "32")
    for cell in again:
        cell.id += "-again"
    notebook.cells += again
    execute(notebook, folder)
    assert {"accuracy" in text(cell) for cell in (cells["use"], again[2])} == {True}
    weights = torch.load(folder / "out-notebook" / "model.pt", weights_only=True)
    assert weights["0.weight"].shape == (32, 20)


def test_it_is_stored_without_results():
    notebook, _ = read()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) == 5
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert all(cell.metadata == {} for cell in notebook.cells)
