"""Each extra works when it is copied alone, and imports no other file of this project.

Three extras belong to run.py: commands.py, compose.py and verify.py.
"""

import ast
import shutil
import subprocess
import sys
from functools import partial

import pytest
from conftest import ENVIRONMENT, ROOT, ahead

# What a user who copied one extra could run first. "ckpt" is copied too, where it is an argument.
USES = {
    "plot": """
        import sys
        run = plot.parse("a/b", '{"step": 1, "tokens": 9, "loss": 2.0}\\n{', "{}")
        assert plot.labels([run]) == ["b"] and plot.curve(run, "tokens", "loss") == ([9], [2.0])
        assert "torch" not in sys.modules
    """,
    "muon": """
        import torch
        matrix = torch.nn.Parameter(torch.eye(4))
        matrix.grad = 3 * torch.eye(4)
        muon.Muon([matrix], lr=0.1, weight_decay=0.0).step()
        assert 0 < matrix.diagonal().max() < 1 and matrix.count_nonzero() == 4
    """,
    "replicas": """
        import torch
        model = torch.nn.Linear(2, 2)
        replicas.verify_replicas(model, [torch.optim.SGD(model.parameters())])
        one, two = torch.zeros(2), torch.tensor([0.0, -0.0])
        assert replicas.fingerprint(iter([one])) != replicas.fingerprint(iter([two]))
    """,
    "batch_norm": """
        import torch
        model = batch_norm.synchronize_(torch.nn.Sequential(torch.nn.BatchNorm1d(2)), cuda=False)
        assert model(torch.tensor([[0.0, 1], [2, 1]])).round().tolist() == [[-1, 0], [1, 0]]
    """,
    "slow_ranks": """
        steps, loss_fn = slow_ranks.watch(range(3), max, print)
        assert [*steps] == [0, 1, 2] and loss_fn is max
    """,
    "describe": """
        import torch
        state = {"model": {"w": torch.ones(3)}, "optimizers": []}
        entry = type("Entry", (), {"name": "step-1"})
        assert describe.verify_all([entry], lambda _: state) == (state, ["step-1  verified, 0.0 MB"])
    """,
    "profiling": """
        assert list(profiling.traced(range(9), 2, "trace.json")) == list(range(9))
        assert "ProfilerStep#2" in open("trace.json").read()
    """,
    "plan": """
        import sys
        sizes = {"matrices": [12 * 8 * 8], "embeddings": [5 * 8] * 2}
        job = plan.Job("modern", 5, 1, 8, 16, sizes, "adamw", "float32", rows=2)
        assert plan.parameters(job) == 848 and plan.checkpoint(job) == 12 * 848 + 3 * 4
        assert "torch" not in sys.modules
    """,
    "board": """
        import glob, os
        os.mkdir("out")
        board.write_events('{"step": 1, "loss": 2.0}\\n', "out")
        (events,) = glob.glob("out/events*")
        assert b"loss" in open(events, "rb").read()
    """,
    "tokenizer": """
        model = '{"type": "WordLevel", "vocab": {"a": 3}, "unk_token": "a"}'
        text = '{"version": "1.0", "added_tokens": [], "model": ' + model + "}"
        assert tokenizer.size(text) == 4
        assert tokenizer.encode("a", "tokenizer", text).tolist() == [3]
        assert "".join(tokenizer.decode([3], "tokenizer", text)) == "a"
    """,
    "sharded": """
        import time, torch, torch.distributed as dist
        import ckpt
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = torch.nn.Linear(2, 3)
        files = sharded.storage(ckpt, write_sharded=True)
        files.check_shared_folder(".")
        files.save(".", files.snapshot(model, [], step=4), 4, None, 1)
        files.restore_(files.newest(".")[0].state, other := torch.nn.Linear(2, 3), [])
        state = sharded.storage(ckpt, write_sharded=False).newest(".")[0].state
        assert state["step"] == 4 and torch.equal(state["model"]["weight"], model.weight)
        assert torch.equal(other.weight, model.weight)
        dist.destroy_process_group()
        time.sleep(0.1)  # otherwise the process can abort: see ddp_setup.process_group
    """,
    "exchange": """
        import torch
        weights = {name: torch.ones(12, 4) for name in exchange.gpt2_names(layers=1).values()}
        torch.save({"model": weights, "model_args": {"n_head": 2}}, "ckpt.pt")
        found = exchange.read("ckpt.pt")
        sizes = dict(vocab=12, block_size=12, layers=1, heads=2, embd=4)
        assert found.config == {"arch": "gpt2", **sizes}
        assert torch.equal(found.weights["blocks.0.qkv.weight"], torch.ones(12, 4))
    """,
    "export": """
        import safetensors.torch, torch
        model = ({"arch": "any"}, {"kind": "ids", "chars": ""}, {"w": torch.ones(3)})
        export.write(model, "safetensors", "a", None, None)
        assert safetensors.torch.load_file("a")["w"].tolist() == [1, 1, 1]
    """,
}
OF_RUN = {"__init__", "commands", "compose", "verify"}
EXTRAS = sorted({path.stem for path in (ROOT / "extras").glob("*.py")} - OF_RUN)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return a function: name -> the process that used the extra in a folder with only its file."""

    def use(name: str) -> subprocess.CompletedProcess[str]:
        folder = tmp_path_factory.mktemp(name)
        shutil.copy(ROOT / "extras" / f"{name}.py", folder)
        if "import ckpt" in USES[name]:
            shutil.copy(ROOT / "ckpt.py", folder)
        lines = [
            f"import {name}",
            *(line.removeprefix(" " * 8) for line in USES[name].splitlines()),
        ]
        env = {key: value for key, value in ENVIRONMENT.items() if key != "PYTHONPATH"}
        command = [sys.executable, "-c", "\n".join(lines)]
        return subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=600
        )

    with ahead(**{name: partial(use, name) for name in USES}) as begun:
        yield lambda name: begun[name].result()


@pytest.mark.parametrize("name", USES)
def test_an_extra_that_is_copied_alone_works(alone, name):
    ended = alone(name)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("name", EXTRAS)
def test_an_extra_imports_no_other_file_of_this_project(name):
    ours = {*EXTRAS, "extras", *(path.stem for path in ROOT.glob("*.py"))}
    assert {"sharded", "ckpt", "run"} <= ours
    for node in ast.walk(ast.parse((ROOT / "extras" / f"{name}.py").read_text())):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = (
                [a.name for a in node.names] if isinstance(node, ast.Import) else [f"{node.module}"]
            )
            assert not ours & {module.split(".")[0] for module in modules}, ast.unparse(node)
