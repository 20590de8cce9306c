"""The scripts in extras/launch start what they say. (tests/faults runs the SLURM scripts under SLURM.)"""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, ROOT
from documents import parse_command
from torch.distributed.run import get_args_parser

LAUNCH = ROOT / "extras" / "launch"
SCRIPTS = sorted(LAUNCH.glob("*.sh"))


def make_program(folder: Path, name: str, text: str) -> None:
    """Write a shell script that is found in place of the real program `name`."""
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


def run_script(
    script: Path, folder: Path, *words: str, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a script with the programs in `folder` before all others."""
    environment = {**ENVIRONMENT, "PATH": f"{folder}:{os.environ['PATH']}", **env}
    return subprocess.run(
        ["bash", script, *words],
        cwd=folder,
        env=environment,
        timeout=600,
        capture_output=True,
        text=True,
    )


def torchrun_arguments(words: list[str]):
    """Parse the words after `torchrun` with torchrun's own parser, and the rest with run.py's."""
    arguments = get_args_parser().parse_args(words)
    assert arguments.training_script == "run.py"
    parse_command(shlex.join(["run.py", *arguments.training_script_args]))
    return arguments


def test_there_are_scripts_and_all_can_be_executed():
    assert len(SCRIPTS) == 4
    assert all(os.access(script, os.X_OK) for script in SCRIPTS)


# --- several machines, SLURM ---

PRINT_WORDS = 'printf "%s\\n" "$(basename "$0")" "$@"'


@pytest.mark.parametrize("nodes", ["2", "1:2"])
def test_torchrun_nodes_starts_torchrun_with_the_flags(tmp_path, nodes):
    make_program(tmp_path, "torchrun", PRINT_WORDS)
    script = LAUNCH / "torchrun_nodes.sh"
    env = {"NODES": nodes, "LOCAL_ADDR": "10.0.0.1"}
    done = run_script(script, tmp_path, "node7", "--out", "a folder", "--spawn", **env)
    name, *words = done.stdout.splitlines()
    arguments = torchrun_arguments(words)
    assert name == "torchrun" and arguments.nnodes == nodes and arguments.nproc_per_node == "8"
    assert arguments.rdzv_endpoint == "node7:29400" and arguments.local_addr == "10.0.0.1"
    assert arguments.training_script_args == ["--out", "a folder", "--spawn"]


def test_torchrun_nodes_without_a_host_says_what_is_missing(tmp_path):
    done = run_script(LAUNCH / "torchrun_nodes.sh", tmp_path)
    assert done.returncode != 0 and "HOST" in done.stderr


def test_slurm_torchrun_starts_one_agent_per_node(tmp_path):
    make_program(tmp_path, "srun", PRINT_WORDS)
    make_program(tmp_path, "scontrol", "printf 'n07\\nn08\\n'")
    env = {"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_ID": "17"}
    done = run_script(LAUNCH / "slurm_torchrun.sh", tmp_path, **env)
    words = done.stdout.splitlines()
    arguments = torchrun_arguments(words[words.index("torchrun") + 1 :])
    assert (arguments.nnodes, arguments.nproc_per_node) == ("2", "4")
    assert (arguments.rdzv_endpoint, arguments.rdzv_id) == ("n07:29400", "17")


def test_slurm_srun_starts_the_program_on_each_task(tmp_path):
    make_program(tmp_path, "srun", PRINT_WORDS)
    words = run_script(LAUNCH / "slurm_srun.sh", tmp_path).stdout.splitlines()
    assert words[words.index("python") + 1] == "run.py"
    parse_command(shlex.join(words[words.index("python") :]))


# --- the restart loop ---


def restarted(folder: Path, codes: list[int], *flags: str) -> tuple[int, list[str]]:
    """Run restart.sh with a python that ends with `codes` in turn; return its exit code and python's words."""
    (folder / "codes").write_text("".join(f"{code}\n" for code in codes))
    make_program(folder, "sleep", "")
    take_first = 'code=$(head -n 1 codes); sed -i 1d codes; echo "$@" >> starts; exit $code'
    make_program(folder, "python", take_first)
    done = run_script(LAUNCH / "restart.sh", folder, *flags)
    return done.returncode, (folder / "starts").read_text().splitlines()


def test_restart_ends_when_the_training_is_done(tmp_path):
    code, starts = restarted(tmp_path, [1, 3, 137, 0, 1], "--spawn", "2")
    assert code == 0 and starts == ["run.py --spawn 2"] * 4


def test_restart_ends_at_a_mistake_in_the_flags(tmp_path):
    assert restarted(tmp_path, [2, 0], "--nonsense") == (2, ["run.py --nonsense"])


# --- Kubernetes ---


def test_kubernetes_manifest_has_the_right_schema_and_commands():
    validator = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    import yaml

    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    for part in (service, job):
        validator.validate(part, validator.latest_version(), strict=True)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    launcher, *words = container["command"]
    arguments = torchrun_arguments(words)
    names = {service["metadata"]["name"], job["metadata"]["name"], pod["subdomain"]}
    names |= {*service["spec"]["selector"].values()}
    assert launcher == "torchrun"
    assert arguments.nnodes == f"{job['spec']['completions']}" == f"{job['spec']['parallelism']}"
    assert arguments.nproc_per_node == f"{container['resources']['limits']['nvidia.com/gpu']}"
    assert {arguments.rdzv_endpoint} == {f"{name}-0.{name}:29400" for name in names}
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
