"""Translate the environment variables of SLURM's srun into those of torchrun.

    from extras import slurm

    slurm.set_launch_env_()                        # before the process group starts
    with ddp_setup.process_group() as world:
        ...

Then `srun python train.py` works like torchrun: each task that srun starts is one rank. A script
that starts torchrun with srun, one per node, does not need this file.
"""

import os
import re
from collections.abc import MutableMapping

import torch


def set_launch_env_(env: MutableMapping[str, str] = os.environ) -> None:
    """Set RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in `env`.

    Each task calls this function for itself; the tasks do not communicate. It changes nothing if
    RANK is set already, if srun did not start this process, or if it started only this one, for
    example a shell. (The batch script of a job has variables of SLURM, but it is not a task of
    srun.) MASTER_ADDR and MASTER_PORT keep the values that the user has set.

    If srun shows each task only its own GPU (for example with --gpus-per-task), this GPU has the
    number 0 in each task. Then LOCAL_RANK is 0 and LOCAL_WORLD_SIZE is 1, as if the task were
    alone on its node, because programs take the GPU number LOCAL_RANK.

    Raises ValueError if a variable of srun is missing or cannot be understood, and on rank 0 if it
    does not run on the first host of SLURM's list, as can happen in heterogeneous jobs and with
    --distribution=arbitrary: then set MASTER_ADDR for all tasks. After an error, `env` is as it
    was.
    """
    if "RANK" in env or env.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return
    rank, size = whole_number(env, "SLURM_PROCID"), whole_number(env, "SLURM_STEP_NUM_TASKS")
    local_rank, local_size = whole_number(env, "SLURM_LOCALID"), tasks_on_node(env)
    if "SLURM_STEP_GPUS" in env and torch.cuda.device_count() == 1:
        local_rank, local_size = 0, 1
    address = env.get("MASTER_ADDR") or first_host(env)
    node = env.get("SLURMD_NODENAME") or address
    if rank == 0 and not env.get("MASTER_ADDR") and node != address:
        raise ValueError(
            f"rank 0 runs on {node}, but SLURM_STEP_NODELIST begins with {address}: set "
            f"MASTER_ADDR={node} for all tasks"
        )
    env.update(
        MASTER_ADDR=address,
        MASTER_PORT=env.get("MASTER_PORT") or f"{port(env)}",
        RANK=f"{rank}",
        LOCAL_RANK=f"{local_rank}",
        WORLD_SIZE=f"{size}",
        LOCAL_WORLD_SIZE=f"{local_size}",
    )


def text(env: MutableMapping[str, str], name: str) -> str:
    """Return the value of a variable; ValueError if the variable is missing or empty."""
    if not env.get(name):
        raise ValueError(f"{name} is not set, but SLURM_STEP_NUM_TASKS is: start with srun")
    return env[name]


def whole_number(env: MutableMapping[str, str], name: str) -> int:
    """Return the value of a variable as a number; ValueError if it is not a whole number from 0."""
    if not text(env, name).isdecimal():
        raise ValueError(f"{name}={env[name]!r} is not a whole number")
    return int(env[name])


def tasks_on_node(env: MutableMapping[str, str]) -> int:
    """Return how many tasks the step has on this node. SLURM writes "2(x3),1" for 2, 2, 2, 1."""
    node, counts = whole_number(env, "SLURM_NODEID"), text(env, "SLURM_STEP_TASKS_PER_NODE")
    tasks: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        tasks += [int(count)] * int(times or 1)
    if node >= len(tasks):
        raise ValueError(f"SLURM_NODEID={node} is not a node of SLURM_STEP_TASKS_PER_NODE={counts}")
    return tasks[node]


def first_host(env: MutableMapping[str, str]) -> str:
    """Return the first host of the step. SLURM writes "n[07-9]" for n07-n09."""
    # Cut at the first comma outside of brackets, then keep the first number in each bracket.
    first = re.sub(r",(?![^\[]*\]).*", "", text(env, "SLURM_STEP_NODELIST"))
    return re.sub(r"\[(\d*).*?\]", r"\1", first)


def port(env: MutableMapping[str, str]) -> int:
    """Return a port from 20000 to 29999 that all tasks compute alike, and each step differently.

    srun does not reserve a port for a program and cannot tell the tasks about one. So the port
    follows from the numbers of the job and the step. It is below the ports that Linux gives to
    clients. If another program uses it, set MASTER_PORT.
    """
    return (
        20000
        + (whole_number(env, "SLURM_JOB_ID") * 97 + whole_number(env, "SLURM_STEP_ID")) % 10000
    )
