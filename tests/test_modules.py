"""Each of the five modules works when it is copied alone, and the six files of the core work without extras/."""

import ast
import builtins
import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, ROOT, TINY, ahead, contents, run, same_training

# The first lines of a program that uses only this module.
USES = {
    "ddp_setup": """
        with ddp_setup.process_group("cpu") as world, ddp_setup.stop_signals() as asked:
            model = ddp_setup.replicate(nn.Linear(2, 1).to(world.device), world)
            assert ddp_setup.gather(asked(), world) == [False]
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
        other = nn.Linear(2, 1)
        assert ckpt.resume_("out", other, []) == (7, {}) and torch.equal(model.weight, other.weight)
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
def test_classes_are_torch_modules_optimizers_samplers_records_or_exceptions(name):
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.ClassDef):
            (base,) = map(ast.unparse, node.bases)
            known = "NamedTuple nn.Module torch.optim.Optimizer list[int]".split()
            assert base in known or issubclass(getattr(builtins, base), Exception), node.name


@pytest.fixture(scope="module")
def core(tmp_path_factory) -> Path:
    """Copy the six files of the core, and return their folder."""
    folder = tmp_path_factory.mktemp("core")
    for name in [*USES, "run"]:
        shutil.copy(ROOT / f"{name}.py", folder)
    return folder


# Run several command lines, given as JSON, in one process.
PROGRAM = "import json, run, sys; print([run.main(args) for args in json.loads(sys.argv[1])])"


def run_all(core: Path, *lines: list[object]) -> tuple[list[int], str, list[str]]:
    """Run command lines in `core`. Return their exit codes, what they printed, and the lines of stderr."""
    text = json.dumps([[*map(str, line)] for line in lines])
    ran = run(launcher=[sys.executable, "-c", PROGRAM, text], root=core)
    *printed, codes = ran.out.splitlines(keepends=True)
    return json.loads(codes), "".join(printed), ran.err.splitlines()


def test_the_core_trains_resumes_samples_and_evaluates_without_extras(
    core, undisturbed, flags, tmp_path
):
    """The presence of a file never changes what a run computes."""
    lines = [
        [*flags, "--steps", 20, "--lr", 0.003, "--out", tmp_path / "short"],
        [*flags, "--out", tmp_path / "out"],
        ["sample", "--out", tmp_path / "out/best", "--prompt", "the ", "--max-new-tokens", 9],
        ["eval", "--out", tmp_path / "out"],
    ]
    codes, out, err = run_all(core, *lines)
    assert codes == [0] * 4 and err == [] and "\nthe " in out and "\nloss " in out, (out, err)
    assert same_training(tmp_path / "out", undisturbed(1))


NEED = {
    "--data s3://bucket/a.txt": "remote",
    "--out s3://bucket/run": "remote",
    "--init-from x": "convert",
    "--strategy fsdp": "fsdp",
    "--out {sharded}": "sharded",
    "sample --out {sharded}": "sharded",
    "eval --out s3://bucket/run": "remote",
}


def test_what_needs_an_extra_gives_one_line_and_exit_code_2_without_it(core, text, tmp_path):
    (tmp_path / "sharded" / "part-0").mkdir(parents=True)
    lines = []
    for case in NEED:
        words = case.format(sharded=tmp_path / "sharded").split()
        start = [*TINY, "--data", text, "--steps", 2, "--out", tmp_path / "new"]
        lines.append(words if words[0] in ("sample", "eval") else [*start, *words])
    before = contents(tmp_path)
    codes, out, err = run_all(core, *lines)
    assert codes == [2] * len(NEED) and out == "", (codes, out, err)
    for line, name in zip(err, NEED.values(), strict=True):
        assert line.startswith("Error: ") and "extras" in line, line
    assert contents(tmp_path) == before and not (tmp_path / "new").exists()
