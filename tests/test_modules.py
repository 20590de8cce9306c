"""Each of the five modules works when it is copied alone, and imports none of the others."""

import ast
import builtins
import shutil
import subprocess
import sys
from functools import partial

import pytest
from conftest import ENVIRONMENT, ROOT, ahead

# The first lines of a program that uses only this module.
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
        assert next(gpt.sample(model.eval(), torch.tensor([1]))) < 5
    """,
    "chardata": """
        corpus = chardata.read(chardata.list_files(__file__), "char")
        plan = chardata.BatchPlan(corpus.tokens, block_size=8, batch_size=4)
        micro_batches, total = next(chardata.steps(plan, accum=2))
        assert total == 32 and [tuple(x.shape) for x, y in micro_batches] == [(2, 8), (2, 8)]
    """,
    "loop": """
        model = nn.Linear(2, 1)
        loss_fn = lambda model, x: (model(x).square().sum(), len(x))
        steps = loop.group_batches([torch.ones(3, 2)] * 4, accum=2, count=len)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        reports = [report for step, report in loop.train_(model, [optimizer], steps, loss_fn)]
        assert [int(report.count) for report in reports] == [6, 6] and reports[1].loss < reports[0].loss
        mean = loop.evaluate(model, [torch.zeros(3, 2)], loss_fn)
        assert abs(mean - model.bias.item() ** 2) < 1e-6
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
    """Return a function: name -> the process that used the module in a folder with only its file."""

    def use(name: str) -> subprocess.CompletedProcess:
        folder = tmp_path_factory.mktemp(name)
        shutil.copy(ROOT / f"{name}.py", folder)
        lines = [line.removeprefix(" " * 8) for line in USES[name].splitlines()]
        program = "\n".join(["import torch", "from torch import nn", f"import {name}", *lines])
        (folder / "use.py").write_text(program)
        env = {key: value for key, value in ENVIRONMENT.items() if key != "PYTHONPATH"}
        command = [sys.executable, "use.py"]
        return subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=600
        )

    with ahead(**{name: partial(use, name) for name in USES}) as begun:
        yield lambda name: begun[name].result()


@MODULES
def test_a_module_that_is_copied_alone_works(alone, name):
    ended = alone(name)
    assert ended.returncode == 0, ended.stderr


def tree(name: str) -> ast.Module:
    return ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8"))


def imports(name: str) -> list[str]:
    """Return the dotted names of everything that a module imports."""
    found = []
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            found += [f"{'.' * node.level}{node.module}.{alias.name}" for alias in node.names]
    return found


@MODULES
def test_a_module_imports_only_the_standard_library_torch_and_numpy(name):
    packages = {imported.split(".")[0] for imported in imports(name)}
    assert packages and packages <= sys.stdlib_module_names | {"torch", "numpy"}


@pytest.mark.parametrize("name", ["gpt", "chardata"])
def test_model_and_data_do_not_use_torch_distributed(name):
    assert not [text for text in imports(name) if text.startswith("torch.distributed")]
    attributes = {node.attr for node in ast.walk(tree(name)) if isinstance(node, ast.Attribute)}
    assert attributes and "distributed" not in attributes


@MODULES
def test_classes_are_torch_modules_differentiable_functions_records_or_exceptions(name):
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base) for base in node.bases]
            record = bases == ["NamedTuple"] or "dataclass" in "".join(
                map(ast.unparse, node.decorator_list)
            )
            exception = len(bases) == 1 and issubclass(
                getattr(builtins, bases[0], object), Exception
            )
            torchs = bases in (["nn.Module"], ["torch.autograd.Function"], ["Sampler[int]"])
            assert record or exception or torchs, f"{node.name}({', '.join(bases)})"
