"""extras/tutorial/notebook.ipynb trains on two processes, and does the rest of what it says."""

import copy
import json
import shutil

import pytest
import torch
from conftest import ENVIRONMENT, ROOT

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
for package in ("ipykernel", "matplotlib"):
    pytest.importorskip(package)

# After the line that prints the metrics come lines that interrupt the kernel and all
# processes that it started, as the button of a notebook does, at the fifth of 2,700 steps.
METRICS_LINE = '"loss": float(report.loss)}), file=metrics)\n'
INTERRUPT = """            if step == 5 and world.rank == 0:
                import signal
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


@pytest.fixture
def notebook():
    return nbformat.read(ROOT / "extras" / "tutorial" / "notebook.ipynb", as_version=4)


def execute(notebook, folder) -> dict:
    """Run all cells in `folder`, and return them by id. The text of a cell includes its error."""
    resources = {"metadata": {"path": str(folder)}}
    client = nbclient.NotebookClient(notebook, timeout=600, resources=resources, allow_errors=True)
    client.execute(env=ENVIRONMENT)
    for cell in notebook.cells:
        outputs = cell.get("outputs", [])
        cell.text = "".join(o.get("text", "") + o.get("evalue", "") for o in outputs)
        cell.error = "".join(o.get("ename", "") for o in outputs)
    return {cell.id: cell for cell in notebook.cells}


def losses(folder) -> list[float]:
    lines = (folder / "out-notebook" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_it_trains_on_two_ranks_and_uses_the_result(notebook, folder):
    one = copy.deepcopy(next(cell for cell in notebook.cells if cell.id == "launch"))
    one.id = "one"
    one.source = (
        "import shutil\nshutil.move('out-notebook', 'two')\nos.mkdir('out-notebook')\ntrain.main()"
    )
    notebook.cells.append(one)
    cells = execute(notebook, folder)
    assert {name: cell.error for name, cell in cells.items() if cell.error} == {}
    lines = cells["launch"].text.splitlines()
    assert sorted(lines[:2]) == ["rank 0 of 2 on cpu", "rank 1 of 2 on cpu"]
    assert lines[2].startswith("step 20: loss ") and lines[-1] == "done after step 81"
    (figure,) = cells["plot"].outputs
    assert figure.output_type == "display_data" and len(figure.data["image/png"]) > 5000
    assert float(cells["use"].text.split(": ")[1]) > 0.8
    # One process computes the same, so both ranks took part.
    assert "train.main()" in cells["about-launch"].source
    assert "rank 0 of 1 on cpu" in cells["one"].text and len(losses(folder)) == 81
    weights = [torch.load(folder / name / "model.pt") for name in ("two", "out-notebook")]
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)


def test_an_interrupt_saves_and_stops(notebook, folder):
    (script,) = (cell for cell in notebook.cells if cell.id == "script")
    assert script.source.count(METRICS_LINE) == script.source.count("range(3)") == 1
    script.source = script.source.replace(METRICS_LINE, METRICS_LINE + INTERRUPT)
    script.source = script.source.replace("range(3)", "range(100)")
    cells = execute(notebook, folder)
    steps = len(losses(folder))
    assert 5 <= steps < 2700 and f"stopped after step {steps}" in cells["launch"].text
    assert not cells["launch"].error and "accuracy" in cells["use"].text  # so model.pt was saved


def test_a_changed_script_is_used_by_the_cells_after_it(notebook, folder):
    again = [copy.deepcopy(c) for c in notebook.cells if c.id in ("script", "launch", "use")]
    again[0].source = again[0].source.replace("64", "32")
    for cell in again:
        cell.id += "-again"
    notebook.cells += again
    cells = execute(notebook, folder)
    assert "accuracy" in cells["use"].text and "accuracy" in cells["use-again"].text
    weights = torch.load(folder / "out-notebook" / "model.pt")
    assert weights["0.weight"].shape == (32, 20)


def test_it_is_stored_without_results(notebook):
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert all(cell.metadata == {} for cell in notebook.cells)
