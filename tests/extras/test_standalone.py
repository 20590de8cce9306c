"""Each extra works when it is copied alone, or with ckpt.py where it says so."""

import shutil
import subprocess
import sys
from textwrap import dedent

import pytest
from conftest import ENVIRONMENT, ROOT

# What a user who copied one extra could run first, and the package that this needs
USES = {
    "plot": """
        import json, sys
        lines = [{"config": {"lr": 1}, "ranks": 2}]
        lines += [{"step": 1, "tokens": 9, "loss": 2.0, "tokens_per_s": 3, "lr": 1}]
        open("metrics.jsonl", "w").write("\\n".join(map(json.dumps, lines)))
        plot.draw([plot.read(".")]).savefig("a.svg")
        assert "torch" not in sys.modules
    """,
    "prepare": """
        import sys
        open("a.txt", "w").write("the cat " * 99)
        prepare.main(["a.txt", "--bpe", "260"], standalone_mode=False)
        ids = prepare.encode("the", "data/tokenizer.json").tolist()
        assert "".join(prepare.decode(ids, "data/tokenizer.json")) == "the"
        assert "torch" not in sys.modules
    """,
    "convert": """
        import torch
        weights = {name: torch.ones(12, 4) for name in convert.gpt2_names(layers=1).values()}
        torch.save({"model": weights, "model_args": {"n_layer": 1, "n_head": 2}}, "ckpt.pt")
        assert convert.start_state("ckpt.pt", {})["config"]["vocab"] == 12
    """,
    "fsdp": """
        import torch
        model = fsdp.shard_(torch.nn.Linear(2, 2), torch.device("cpu"), [], "fsdp")
        assert [*fsdp.pad_steps([([1], 2)], max)[0]] == [([(1, False)], 2)]
    """,
    "remote": """
        import ckpt
        assert remote.save("memory://a", {"model": {}}, 4).step == 4
        assert remote.newest("memory://a", remote.list_checkpoints("memory://a"))[0].step == 4
    """,
    "sharded": """
        import ckpt, torch
        model, other = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
        sharded.save(".", sharded.snapshot(model, [], note=1), 4)
        sharded.restore_(sharded.newest(".", ckpt.list_checkpoints("."))[1], other, [])
        assert torch.equal(other.weight, model.weight)
    """,
    "hang": "assert hang.report",
    "cuda_graph": "assert cuda_graph.graph_",
}
PACKAGES = {"plot": "matplotlib", "prepare": "tokenizers", "remote": "fsspec"}


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "extras").glob("[!_]*.py")))
def test_an_extra_that_is_copied_works(name, tmp_path):
    pytest.importorskip(PACKAGES.get(name, "torch"))
    shutil.copy(ROOT / "extras" / f"{name}.py", tmp_path)
    if "import ckpt" in USES[name]:
        shutil.copy(ROOT / "ckpt.py", tmp_path)
    command = [sys.executable, "-c", f"import {name}\n{dedent(USES[name])}"]
    env = {key: value for key, value in ENVIRONMENT.items() if key != "PYTHONPATH"}
    how = dict(capture_output=True, text=True, timeout=300)
    ended = subprocess.run(command, cwd=tmp_path, env=env, **how)
    assert ended.returncode == 0, ended.stderr
