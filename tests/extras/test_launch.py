"""The scripts in extras/launch start what they say, with stand-ins for the programs of SLURM."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, ROOT
from documents import parse_command
from torch.distributed.run import get_args_parser

LAUNCH = ROOT / "extras" / "launch"
PRINT_WORDS = 'printf "%s\\n" "$(basename "$0")" "$@"'


def run_script(
    name: str, folder: Path, programs: dict[str, str], *words: str, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a script. programs: shell scripts that it finds in place of the real programs of these names."""
    for program, text in programs.items():
        (folder / program).write_text(f"#!/bin/bash\n{text}\n")
        (folder / program).chmod(0o755)
    env = {**ENVIRONMENT, "PATH": f"{folder}:{os.environ['PATH']}", **env}
    command = [LAUNCH / name, *words]
    return subprocess.run(command, cwd=folder, env=env, timeout=600, capture_output=True, text=True)


def torchrun_arguments(words: list[str]):
    """Parse the words after `torchrun` with torchrun's own parser, and the rest with run.py's."""
    arguments = get_args_parser().parse_args(words)
    assert arguments.training_script == "run.py"
    parse_command(shlex.join(["run.py", *arguments.training_script_args]))
    return arguments


@pytest.mark.parametrize("nodes", ["2", "1:2"])
def test_torchrun_nodes_starts_torchrun_with_the_flags(tmp_path, nodes):
    words, env = ["node7", "--out", "a folder", "--spawn"], {"LOCAL_ADDR": "10.0.0.1"}
    programs = {"torchrun": PRINT_WORDS}
    done = run_script("torchrun_nodes.sh", tmp_path, programs, *words, NODES=nodes, **env)
    name, *words = done.stdout.splitlines()
    arguments = torchrun_arguments(words)
    assert name == "torchrun" and arguments.nnodes == nodes and arguments.nproc_per_node == "8"
    assert arguments.rdzv_endpoint == "node7:29400" and arguments.local_addr == "10.0.0.1"
    assert arguments.training_script_args == ["--out", "a folder", "--spawn"]


def test_torchrun_nodes_without_a_host_says_what_is_missing(tmp_path):
    done = run_script("torchrun_nodes.sh", tmp_path, {})
    assert done.returncode != 0 and "HOST" in done.stderr


def test_slurm_torchrun_starts_one_agent_per_node(tmp_path):
    programs = {"srun": PRINT_WORDS, "scontrol": "printf 'n07\\nn08\\n'"}
    env = {"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_ID": "17"}
    words = run_script("slurm_torchrun.sh", tmp_path, programs, **env).stdout.splitlines()
    arguments = torchrun_arguments(words[words.index("torchrun") + 1 :])
    assert (arguments.nnodes, arguments.nproc_per_node) == ("2", "4")
    assert (arguments.rdzv_endpoint, arguments.rdzv_id) == ("n07:29400", "17")


SRUN = """
shift  # --cpu-bind=none
for rank in 0 1 2; do
  SLURM_PROCID=$rank SLURM_LOCALID=$((rank % 2)) SLURM_STEP_NUM_TASKS=4 \\
    SLURM_STEP_TASKS_PER_NODE="2(x2)" "$@"
done
"""


def test_slurm_srun_translates_the_variables_of_each_task(tmp_path):
    """Otherwise run.py refuses to start, or each task trains alone."""
    print_variables = (
        'echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT "$@"'
    )
    programs = {"srun": SRUN, "scontrol": "printf 'n07\\nn08\\n'", "python": print_variables}
    done = run_script("slurm_srun.sh", tmp_path, programs, SLURM_JOB_ID="1234567")
    end = "4 2 n07 24567 run.py --out /shared/run"
    assert done.stdout.splitlines() == [f"0 0 {end}", f"1 1 {end}", f"2 0 {end}"], done
    parse_command(end.partition("24567 ")[2])


@pytest.mark.parametrize(
    "codes, code, starts",
    [([1, 3, 137, 0, 1], 0, 4), ([2, 0], 2, 1), ([127, 0], 127, 1)],
    ids=["the training is done", "another start would not help", "there is no python"],
)
def test_restart_starts_a_run_again_until_it_ends(tmp_path, codes, code, starts):
    (tmp_path / "codes").write_text("".join(f"{code}\n" for code in codes))
    take_first = 'code=$(head -n 1 codes); sed -i 1d codes; echo "$@"; exit $code'
    programs = {"sleep": "", "python": take_first}
    done = run_script("restart.sh", tmp_path, programs, "--spawn", "2")
    lines = [line for line in done.stdout.splitlines() if line.startswith("run.py")]
    assert done.returncode == code and lines == ["run.py --spawn 2"] * starts, done


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
