"""The five modules as things to be copied: each works alone, and none knows of another."""

import ast
import builtins
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import pytest
from conftest import ENVIRONMENT, ROOT, ahead

# what somebody who copied that one file would begin with
USES = {
    "ddp_setup": """
        with ddp_setup.stop_signals() as asked, ddp_setup.process_group("cpu") as world:
            model = ddp_setup.replicate(nn.Linear(2, 1).to(world.device), world)
            assert not ddp_setup.any_rank(asked(), world)
    """,
    "gpt": """
        model = gpt.build(gpt.Config(vocab=5, block_size=4, layers=1, heads=1, embd=4), seed=0)
        loss_sum, count = gpt.loss(model, (torch.zeros(2, 4).long(), torch.ones(2, 4).long()))
        assert count == 8 and loss_sum.requires_grad
        assert next(gpt.sample(model, torch.tensor([1]))) < 5
    """,
    "chardata": """
        corpus = chardata.read(__file__, "char")
        micro_batches, total = next(chardata.steps(corpus.shards, 8, 4, accum=2))
        assert total == 32 and [tuple(x.shape) for x, y in micro_batches] == [(2, 8), (2, 8)]
    """,
    "loop": """
        model = nn.Linear(2, 1)
        loss_fn = lambda model, x: (model(x).square().sum(), len(x))
        steps = loop.group([torch.ones(3, 2)] * 4, accum=2, count=len)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        reports = [report for step, report in loop.train_(model, [optimizer], steps, loss_fn)]
        assert [int(report.counted) for report in reports] == [6, 6] and reports[1].loss < reports[0].loss
        assert loop.evaluate(model, [torch.zeros(3, 2)], loss_fn)[1] == 3
    """,
    "ckpt": """
        model = nn.Linear(2, 1)
        ckpt.save("out", ckpt.snapshot(model, []), step=7)
        found, rejected = ckpt.newest("out")
        other = nn.Linear(2, 1)
        ckpt.restore_(found.state, other, [])
        assert found.entry.step == 7 and not rejected and torch.equal(model.weight, other.weight)
    """,
}
MODULES = pytest.mark.parametrize("name", USES)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What becomes of each module's use, where there is nothing but its file; they are begun in the background."""

    def use(name: str) -> subprocess.CompletedProcess:
        folder = tmp_path_factory.mktemp(name)
        shutil.copy(ROOT / f"{name}.py", folder)
        lines = [line.removeprefix(" " * 8) for line in USES[name].splitlines()]
        program = "\n".join(["import torch", "from torch import nn", f"import {name}", *lines])
        (folder / "use.py").write_text(program)
        env = {key: value for key, value in ENVIRONMENT.items() if key != "PYTHONPATH"}
        command = [sys.executable, "use.py"]
        return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=90)

    with ahead(**{name: partial(use, name) for name in USES}) as begun:
        yield lambda name: begun[name].result()


@MODULES
def test_a_module_copied_by_itself_into_an_empty_folder_works(alone, name):
    ended = alone(name)
    assert ended.returncode == 0, ended.stderr


def tree(name: str) -> ast.Module:
    return ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8"))


def imports(node: ast.AST, inside: bool = False) -> Iterator[tuple[str, bool]]:
    """(the dotted name, whether it is inside a function) of all that is imported."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, inside) for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        yield from ((f"{'.' * node.level}{node.module}.{alias.name}", inside) for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from imports(child, inside or isinstance(node, (ast.FunctionDef, ast.Lambda)))


@MODULES
def test_a_module_imports_the_standard_library_torch_and_numpy_alone(name):
    found = list(imports(tree(name)))
    assert found
    for imported, inside in found:
        package = imported.split(".")[0]
        assert package in sys.stdlib_module_names | {"torch", "numpy"} or (package == "fsspec" and inside), imported


@pytest.mark.parametrize("name", ["gpt", "chardata"])
def test_the_model_and_the_data_know_nothing_of_torch_distributed(name):
    assert not [imported for imported, _ in imports(tree(name)) if imported.startswith("torch.distributed")]
    assert "distributed" not in {node.attr for node in ast.walk(tree(name)) if isinstance(node, ast.Attribute)}


@MODULES
def test_classes_are_modules_of_torch_records_or_exceptions(name):
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base) for base in node.bases]
            record = bases == ["NamedTuple"] or "dataclass" in "".join(map(ast.unparse, node.decorator_list))
            exception = len(bases) == 1 and issubclass(getattr(builtins, bases[0], object), Exception)
            assert record or exception or bases == ["nn.Module"], f"{node.name}({', '.join(bases)})"
