"""What the README shows is run as it stands there, and what it says is compared with what is."""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
import torch
from conftest import ENVIRONMENT, ROOT, ahead
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

import gpt
import run as program

README = (ROOT / "README.md").read_text()
MODULES = ("ddp_setup", "chardata", "loop", "ckpt", "gpt")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def section(title: str) -> str:
    """The README from a title to the next of its kind."""
    marks = title.split()[0]
    return re.split(rf"^{marks} ", README.split(f"\n{title}\n")[1], flags=re.MULTILINE)[0]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def patched(script: str, diff: str) -> str:
    """The script with a unified diff applied: each hunk has to fit in one place, and nowhere else."""
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE)[1:]:
        lines = [line or " " for line in hunk.splitlines()]
        old, new = ("".join(f"{line[1:]}\n" for line in lines if line[0] != not_in) for not_in in "+-")
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    return script


# ----------------------------------------------------------------- your training script, made distributed

HEART = section("## Your training script, made distributed")
(FIRST,) = blocks(HEART, "python")
STEPS = [FIRST]
for diff in blocks(HEART, "diff"):
    STEPS.append(patched(STEPS[-1], diff))
# the first script in the order that the others shuffle to
SAME_ORDER = FIRST.replace("shuffle=True", "sampler=chardata.shard(len(train), 0, 1, epoch, 0)").replace(
    "import torch\n", "import chardata\nimport torch\n", 1
)
# the last one, asked to stop while it computes its 40th step, in the middle of the second epoch
STOPPED = """
import itertools, os, signal, loop
updates, update = itertools.count(1), loop._update_
def interrupted(*what):
    if next(updates) == 40:
        os.kill(os.getpid(), signal.SIGTERM)
    return update(*what)
loop._update_ = interrupted
"""


class Trained(NamedTuple):
    said: list[str]  # the lines of its output
    weights: dict[str, torch.Tensor]


def train(folder: Path, script: str, launcher: list[str]) -> Trained:
    """Run a script in a folder that has the modules it imports and no other."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(script)
    for name in MODULES:
        if re.search(rf"^import.* {name}\b", script, re.MULTILINE):
            (folder / f"{name}.py").write_text((ROOT / f"{name}.py").read_text())
    done = subprocess.run(
        [*launcher, "train.py"], cwd=folder, env=ENVIRONMENT, timeout=120, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    saved = [*folder.glob("model.pt"), *sorted(folder.glob("out/step-*.pt"))]
    found = torch.load(saved[-1], weights_only=True)
    return Trained(done.stdout.splitlines(), found.get("model", found))


def interrupted_and_resumed(folder: Path) -> list[Trained]:
    """One process is stopped; two go on."""
    return [train(folder, STOPPED + STEPS[4], [sys.executable]), train(folder, STEPS[4], TORCHRUN)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What becomes of each script: ("first", 1), ("order", 1), (step, ranks), begun in the background."""
    root = tmp_path_factory.mktemp("heart")
    runs: dict[str, Any] = {"resumed": partial(interrupted_and_resumed, root / "resumed")}
    for ranks, launcher in ((2, TORCHRUN), (1, [sys.executable])):
        for number, script in enumerate(STEPS):
            if number or ranks == 1:
                runs[f"{number} {ranks}"] = partial(train, root / f"{number}-{ranks}", script, launcher)
    runs["order"] = partial(train, root / "order", SAME_ORDER, [sys.executable])
    with ahead(**runs) as begun:
        yield lambda name: begun[name].result()


def test_four_steps_make_the_script_distributed_in_no_more_than_sixteen_lines():
    assert len(STEPS) == 5 and len(STEPS[4].splitlines()) - len(FIRST.splitlines()) <= 16
    for number, module in enumerate(("ddp_setup", "chardata", "loop", "ckpt"), 1):
        assert module in STEPS[number] and module not in STEPS[number - 1]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_each_step_gives_the_weights_of_the_script_on_one_process(trained, number, ranks):
    script, ran = trained("0 1" if number == 1 else "order"), trained(f"{number} {ranks}")
    torch.testing.assert_close(ran.weights, script.weights, rtol=1e-4, atol=1e-5)
    if (number, ranks) == (2, 2):  # there the loss is that of rank 0's rows
        script, ran = ([re.sub("loss [0-9.]*", "", line) for line in one.said] for one in (script, ran))
    else:
        script, ran = script.said, ran.said
    assert ran == script and len(ran) == 3  # rank 0 alone speaks


def test_the_script_stopped_on_one_process_goes_on_on_two_as_if_it_had_not_been(trained):
    stopped, resumed = trained("resumed")
    whole = trained("4 1")
    assert len(stopped.said) == 1 and stopped.said + resumed.said == whole.said
    torch.testing.assert_close(resumed.weights, whole.weights, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------- what it says of the files


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def rows(table: str) -> Iterator[list[str]]:
    """The cells of a section's table rows, without the heads."""
    for line in re.findall(r"^\|(.*)\|$", table, re.MULTILINE):
        if not re.fullmatch(r"[-|]*", line):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)]


@pytest.mark.parametrize("module", MODULES)
def test_the_table_of_a_module_has_its_public_functions_and_classes_and_nothing_else(module):
    told = [name for name, *_ in rows(section(f"### `{module}.py`"))][1:]
    here = tree(ROOT / f"{module}.py").body
    public = {f"`{node.name}`" for node in here if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert sorted(told) == sorted(name for name in public if not name.startswith("`_"))


def templates(node: ast.AST) -> Iterator[str]:
    """The texts of a source, with … for what is filled in; what is put together piece by piece is in pieces."""
    for child in ast.walk(node):
        if isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.value
        if isinstance(child, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in child.values)


def test_the_messages_of_the_troubleshooting_exist():
    texts = "\n".join(text for name in (*MODULES, "run") for text in templates(tree(ROOT / f"{name}.py")))
    symptoms = "\n".join(cells[0] for cells in rows(section("## When something is wrong")))
    told = [span for span in re.findall(r"`(.*?)`", symptoms) if " " in span]
    assert len(told) > 12
    assert not [message for message in told if message.strip("…") not in texts]


def test_the_variables_of_torch_exist():
    headers = Path(torch.__file__).parent.glob("include/torch/csrc/distributed/c10d/*.h*")
    known = "".join(header.read_text() for header in headers)
    known += inspect.getsource(torch.nn.parallel.distributed) + inspect.getsource(dynamic_rendezvous)
    told = set(re.findall(r"`((?:TORCH|NCCL)_[A-Z_]+)", README))
    assert len(told) > 6 and not [name for name in told if not re.search(rf"\b{name}\b", known)]


def test_the_exit_codes_are_those_of_the_program():
    codes = [cells[0] for cells in rows(README) if re.fullmatch(r"\d", cells[0])]
    assert codes == [f"{code}" for code in (program.DONE, program.FAILED, click.UsageError.exit_code, program.STOPPED)]


@pytest.mark.parametrize("path", re.findall(r"\]\((?!http)(.*?)\)", README))
def test_what_the_readme_links_to_is_there_and_small(path):
    assert (ROOT / path).stat().st_size < 100 * 1024


def kept_per_token(arch: str, dtype: torch.dtype, recompute: bool, width: int = 256, length: int = 520) -> float:
    """Bytes that one layer's forward pass keeps for the backward pass, in units of the width: of 2 layers less of 1."""
    sizes = []
    for layers in (1, 2):
        model = gpt.build(gpt.Config(8, length, layers, 4, width, 0.0, arch), 0, recompute)
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
        copies = 0 if recompute or dtype == torch.float32 else 2 * 12 * layers * width**2  # of weights, by autocast
        sizes.append(sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) - copies)
    return (sizes[1] - sizes[0]) / length / width


def test_a_layer_keeps_as_much_of_each_token_as_the_table_says():
    told = {cells[0].split()[1].strip("`"): cells[1:] for cells in rows(README) if "C, and one layer" in cells[-1]}
    assert {*told} == {"gpt2", "modern"}
    for arch, cells in told.items():
        for cell, how in zip(cells, ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True))):
            assert kept_per_token(arch, *how) == pytest.approx(int(cell.split()[0]), abs=0.5), (arch, how)


# --------------------------------------------------------------------------------------- what it would start


def test_the_manifest_is_one_that_kubernetes_takes_with_commands_that_torchrun_and_the_program_take():
    validator = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    import yaml
    from torch.distributed.run import get_args_parser

    (manifest,) = blocks(README, "yaml")
    service, job = yaml.safe_load_all(manifest)
    for part in (service, job):
        validator.validate(part, validator.latest_version(), strict=True)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    launcher, *words = container["command"]
    args = get_args_parser().parse_args(words)
    names = {service["metadata"]["name"], job["metadata"]["name"], pod["subdomain"]}
    names |= {*service["spec"]["selector"].values()}
    assert launcher == "torchrun" and args.training_script == "run.py"
    assert args.nnodes == f"{job['spec']['completions']}" == f"{job['spec']['parallelism']}"
    assert args.nproc_per_node == f"{container['resources']['limits']['nvidia.com/gpu']}"
    assert {args.rdzv_endpoint} == {f"{name}-0.{name}:29400" for name in names}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    context = click.Context(program.cli)
    _, left, _ = program.cli.make_parser(context).parse_args(args.training_script_args)
    assert not left


@pytest.mark.parametrize("flag", sorted(set(re.findall(r"(?<=[ `])--[a-z-]+", README))))
def test_each_flag_of_the_readme_exists(flag):
    # torchrun's
    others = {"--nproc-per-node", "--nnodes", "--max-restarts", "--rdzv-backend", "--rdzv-id", "--rdzv-endpoint"}
    others |= {"--local-addr", "--standalone", "--shutdown-timeout"}
    others |= {"--logdir"}  # tensorboard's
    others |= {"--nodes", "--ntasks-per-node", "--gpus-per-node", "--cpu-bind"}  # srun's
    others |= {"--exclusive", "--time", "--signal", "--requeue", "--open-mode"}  # sbatch's
    assert flag in others or f'"{flag}' in (ROOT / "run.py").read_text() or flag in ("--help", "--version")
