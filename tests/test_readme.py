"""What the README shows is run as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_linear_regression_gives_the_same_weights_on_one_process_and_two(tmp_path):
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    weights = []
    for launcher in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]):
        folder = tmp_path / f"{len(weights)}"
        folder.mkdir()
        (folder / "train.py").write_text(program)
        for module in ("chardata", "ckpt", "ddp_setup", "loop"):
            (folder / f"{module}.py").write_text((ROOT / f"{module}.py").read_text())
        done = subprocess.run(
            [sys.executable, *launcher, "train.py"], cwd=folder, timeout=120, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert [line.split()[0] for line in done.stdout.splitlines()] == ["0", "1", "2"]  # rank 0 alone speaks
        (last,) = folder.glob("out-regression/step-00000002-*.pt")
        weights.append(torch.load(last, weights_only=True)["model"])
    # the shuffles are dealt to the ranks row by row: the same rows make up each global batch, in another order
    for name in ("weight", "bias"):
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("flag", sorted(set(re.findall(r"(?<=[ `])--[a-z-]+", README))))
def test_each_flag_of_the_readme_exists(flag):
    # torchrun's
    others = {"--nproc-per-node", "--nnodes", "--max-restarts", "--rdzv-backend", "--rdzv-id", "--rdzv-endpoint"}
    others |= {"--logdir"}  # tensorboard's
    others |= {"--local-addr"}
    others |= {"--nodes", "--ntasks-per-node", "--gpus-per-node", "--cpu-bind"}  # srun's
    others |= {"--exclusive", "--time", "--signal", "--requeue", "--open-mode"}  # sbatch's
    assert flag in others or f'"{flag}' in (ROOT / "run.py").read_text() or flag == "--help"
