"""Tests of extras/slurm.py: the translation of srun's variables, and the launch scripts under a real SLURM.

The real SLURM is a controller and two nodes on this machine while the tests run. It needs root.
"""

import functools
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import (
    ENVIRONMENT,
    ROOT,
    TINY,
    Program,
    checkpoints,
    free_port,
    losses,
    metrics,
    run,
    same_training,
    wait_for,
)

import ddp_setup
from extras import slurm as slurm_extra

LAUNCH = ROOT / "extras" / "launch"
SCRIPTS = {name: (LAUNCH / f"slurm_{name}.sh").read_text() for name in ("torchrun", "srun")}
CONF = """
ClusterName=test
SlurmctldHost=localhost
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SelectType=select/cons_tres
KillWait=20
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,sched_min_interval=0
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldPort={ports[0]}
NodeName=n0 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=all Nodes=n0,n1 Default=yes
"""

# --- translating the variables of srun ---

TASK = {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "3",
}


class Launch(NamedTuple):
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int


def translated(**changes: str) -> Launch:
    """Return what ddp_setup and torch read after the translation. An empty value removes a variable."""
    env = {name: value for name, value in {**TASK, **changes}.items() if value}
    before = dict(env)
    slurm_extra.set_launch_env_(env)
    assert before.items() <= env.items()
    world = ddp_setup.read_launch_env(env)
    return Launch(*world[:4], env["MASTER_ADDR"], int(env["MASTER_PORT"]))


def test_a_task_of_srun_becomes_a_rank():
    changes = {
        "SLURM_STEP_NUM_TASKS": "5",
        "SLURM_STEP_TASKS_PER_NODE": "2,3",
        "SLURM_STEP_NODELIST": "n[4,8]",
    }
    found = translated(**changes, SLURM_PROCID="3", SLURM_LOCALID="1", SLURM_NODEID="1")
    assert found == (3, 1, 5, 3, "n4", 20000 + 12 * 97 + 3)


@pytest.mark.parametrize(
    ("counts", "node", "local_size"),
    [("2(x3),1", 0, 2), ("2(x3),1", 3, 1), ("1,3(x2)", 1, 3), ("16(x10)", 9, 16)],
)
def test_the_number_of_tasks_on_this_node_is_read_from_slurms_notation(counts, node, local_size):
    changes = {"SLURM_STEP_NUM_TASKS": "160", "SLURM_STEP_TASKS_PER_NODE": counts}
    assert translated(**changes, SLURM_NODEID=f"{node}").local_world_size == local_size


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node[01-03,07]", "node01"),
        ("node[3,5]", "node3"),
        ("a,b", "a"),
        ("login,node[1-2]", "login"),
        ("n[1-2]-ib", "n1-ib"),
        ("rack[1-2]n[3-4],login", "rack1n3"),
        ("r1-[3,5]n2", "r1-3n2"),
        ("n1.cluster.org,n2.cluster.org", "n1.cluster.org"),
    ],
)
def test_the_store_is_on_the_first_node_of_the_step(nodes, first):
    assert translated(SLURM_STEP_NODELIST=nodes).master_addr == first


def test_if_rank_0_does_not_run_on_the_first_host_it_asks_for_master_addr():
    hosts = dict(SLURM_STEP_NODELIST="n[1-2]", SLURMD_NODENAME="n2")
    with pytest.raises(ValueError, match="runs on n2, .* begins with n1: set MASTER_ADDR=n2"):
        translated(**hosts, SLURM_PROCID="0")
    assert translated(**hosts, SLURM_PROCID="0", MASTER_ADDR="n2").master_addr == "n2"
    assert translated(**hosts, SLURM_PROCID="1").master_addr == "n1"
    assert translated(**hosts | {"SLURMD_NODENAME": "n1"}, SLURM_PROCID="0").master_addr == "n1"


def test_two_steps_of_a_job_have_different_ports_outside_the_ranges_of_the_system():
    ports = {translated(SLURM_STEP_ID=f"{step}").master_port for step in range(10)}
    assert len(ports) == 10 and all(1024 < port < 32768 for port in ports)
    assert translated(MASTER_ADDR="b", MASTER_PORT="1234")[4:6] == ("b", 1234)  # of the user


def test_a_task_that_sees_only_its_own_gpu_has_local_rank_0(monkeypatch):
    task = dict(SLURM_PROCID="1", SLURM_LOCALID="1")
    for gpus, local in ((1, (0, 1)), (2, (1, 2))):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        found = translated(**task, SLURM_STEP_GPUS="0,1")
        assert (found.rank, found.world_size) == (1, 2)
        assert (found.local_rank, found.local_world_size) == local
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert translated(**task).local_rank == 1  # not a GPU that srun chose for this task


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"},  # a job's batch script
        {**TASK, "RANK": "7"},  # torchrun, started by srun
        {**TASK, "SLURM_STEP_NUM_TASKS": "1"},  # a shell: run.py --spawn must work in it
    ],
)
def test_a_process_that_is_no_task_or_has_a_rank_already_is_left_alone(env):
    before = dict(env)
    slurm_extra.set_launch_env_(env)
    assert env == before


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        *[({name: ""}, f"^{name} is not set") for name in TASK if "NUM_TASKS" not in name],
        ({"SLURM_LOCALID": "x"}, "SLURM_LOCALID='x'"),
        ({"SLURM_NODEID": "1"}, "SLURM_NODEID=1 .*=2"),
        ({"SLURM_STEP_TASKS_PER_NODE": "?"}, r"SLURM_STEP_TASKS_PER_NODE=\?"),
        ({"SLURM_PROCID": "2"}, "'RANK': '2'.*'WORLD_SIZE': '2'"),  # from ddp_setup
        ({"MASTER_PORT": "x"}, "'MASTER_PORT': 'x'"),  # from ddp_setup
    ],
)
def test_variables_that_cannot_be_understood_are_an_error_that_names_them(changes, named):
    with pytest.raises(ValueError, match=named):
        translated(**changes)


def test_an_error_leaves_the_environment_as_it_was():
    env = {**TASK, "SLURM_STEP_ID": "x"}
    before = dict(env)
    with pytest.raises(ValueError, match="SLURM_STEP_ID='x'"):
        slurm_extra.set_launch_env_(env)
    assert env == before


# --- a real SLURM ---


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[Callable[..., subprocess.CompletedProcess]]:
    """Start SLURM. slurm("sbatch", ...) runs one of its commands. The nodes n0 and n1 can find each other by name."""
    programs = "munged slurmctld slurmd srun unshare".split()
    if os.geteuid() or not all(map(shutil.which, programs)):
        pytest.skip("needs root, slurm-wlm and munge")
    folder = tmp_path_factory.mktemp("slurm")
    ports = [free_port() for _ in range(3)]
    (folder / "slurm.conf").write_text(CONF.format(folder=folder, ports=ports))
    (folder / "hosts").write_text(f"127.0.0.1 localhost n0 n1 {socket.gethostname()}\n")
    (folder / "munge.key").touch(0o600)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    env = {
        "SLURM_CONF": f"{folder}/slurm.conf",
        "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }

    def command(*words: object, **how) -> subprocess.CompletedProcess:
        how = {"cwd": ROOT, "timeout": 200, "capture_output": True, "text": True, **how}
        return subprocess.run([*map(str, words)], env={**ENVIRONMENT, **env}, **how)

    own = "--socket {0}.sock --key-file {0}.key --pid-file {0}.pid --seed-file {0}.seed"
    own = own.format(folder / "munge").split()
    mount = ["sh", "-c", f'mount --bind {folder}/hosts /etc/hosts; exec "$@"', "sh"]
    with ExitStack() as stack:
        daemon = partial(Program, env=env, seconds=1000)
        stack.enter_context(daemon("--force", "--foreground", *own, launcher=["munged"]))
        wait_for((folder / "munge.sock").exists, "munged")
        daemons = [["slurmctld", "-D"], ["slurmd", "-D", "-N", "n0"], ["slurmd", "-D", "-N", "n1"]]
        programs = [
            stack.enter_context(daemon(launcher=["unshare", "--mount", *mount, *words]))
            for words in daemons
        ]
        try:
            wait_for(
                lambda: command("sinfo", "-h", "-o", "%T %D").stdout == "idle 2\n",
                "SLURM to start",
                20,
            )
            yield command
        finally:
            command("scancel", "--signal=KILL", "--full", "--user=root")
            command("scancel", "--user=root")
            wait_for(
                lambda: not command("squeue", "-h", "-t", "running,completing").stdout,
                "SLURM's jobs to end",
                20,
            )
            assert all(program.process.poll() is None for program in programs)


@pytest.fixture(scope="module")
def job(text: Path) -> list[object]:
    """Return flags with AdamW: with it, the losses do not depend on the number of ranks."""
    return [*TINY, "--optimizer", "adamw", "--data", text, "--log-every", 1, "--eval-every", 1000]


def adapt(text: str, job: list[object], out: Path, program: str = "run.py", tasks: int = 2) -> str:
    """Return a script of extras/launch with the test's flags and a number of tasks that two CPU nodes can run."""
    text = text.replace(
        "run.py --out /shared/run", " ".join(map(str, [program, *job, "--out", out]))
    )
    assert f"--out {out}" in text
    return text.replace(" --ntasks-per-node=8 --gpus-per-node=8", f" --ntasks={tasks}")


def batch(slurm: Callable[..., Any], script: str, log: Path, *flags: object) -> int:
    """Submit a script and return its exit code. (sbatch --wait would poll at growing intervals.)"""
    code = log.with_suffix(".code")
    code.unlink(missing_ok=True)
    submitted = slurm("sbatch", f"--output={log}", *flags, input=f"{script}\necho $? > {code}\n")
    assert submitted.returncode == 0, submitted
    return int(wait_for(lambda: code.exists() and code.read_text(), "the job to end", 150))


# --- the launch scripts ---


@pytest.mark.parametrize("launcher, ranks", [("torchrun", 2), ("srun", 3)])
def test_two_nodes_have_the_losses_of_one_process(slurm, job, tmp_path, launcher, ranks):
    flags, alone, out = [*job, "--steps", 30], tmp_path / "alone", tmp_path / launcher
    assert run(*flags, "--out", alone).code == 0
    script = adapt(SCRIPTS[launcher], flags, out, tasks=ranks)
    assert batch(slurm, script, tmp_path / "log") == 0, (tmp_path / "log").read_text()
    assert json.loads((out / "config.json").read_text())["ranks"] == ranks
    assert dict(losses(out)) == pytest.approx(dict(losses(alone)), rel=1e-4)


# --- a job that SLURM stops continues later ---

FLAGS = ["--nodes=2", "--exclusive", "--requeue", "--open-mode=append"]


@pytest.fixture(scope="module")
def long(job) -> list[object]:
    return [*job, "--dropout", 0.1, "--epochs", 100, "--steps", 500]


@pytest.fixture(scope="module")
def uninterrupted(slurm, long, tmp_path_factory) -> Callable[[str], Path]:
    @functools.cache
    def outcome(launcher: str) -> Path:
        folder = tmp_path_factory.mktemp("uninterrupted")
        script = adapt(SCRIPTS[launcher], long, folder)
        assert batch(slurm, script, folder / "log", *FLAGS) == 0
        return folder

    return outcome


@pytest.mark.torture
@pytest.mark.parametrize(
    "launcher, how",
    [("srun", "requeue"), ("torchrun", "requeue"), ("srun", "USR1"), ("torchrun", "TERM")],
)
def test_a_job_that_is_requeued_or_warned_of_its_time_limit_saves_and_continues(
    slurm, long, uninterrupted, launcher, how, trials, tmp_path
):
    def saved_half_way(out: Path) -> bool:
        """Return whether the run ended before its last step, with a checkpoint of the step where it ended."""
        last = losses(out)[-1][0]
        return last < 500 and checkpoints(out)[-1].name.startswith(f"step-{last:08}")

    def trial(number: int) -> None:
        out, log = tmp_path / f"{number}", tmp_path / f"{number}.log"
        script = adapt(SCRIPTS[launcher], long, out)
        # A fault that makes the 500 steps take 75 s
        slow = adapt(SCRIPTS[launcher], long, out, "tests/faults/sabotaged.py")
        slow = slow.replace("\nsrun", "\nexport TEST_FAULT='backward pause all 1+'\nsrun")
        if how == "requeue":
            submit = "sbatch", *FLAGS, "--parsable", f"--output={log}"
            job = slurm(*submit, input=slow).stdout.strip()
            wait_for(lambda: (out / "metrics.jsonl").exists() and metrics(out), "a step")
            time.sleep(2 * random.Random(number).random())
            assert slurm("scontrol", "requeue", job).returncode == 0
            stopped = lambda: slurm("squeue", "-h", "-o", "%T").stdout == "PENDING\n"  # noqa: E731
            wait_for(stopped, "the job to be stopped")
            assert saved_half_way(out), log.read_text()
            # SLURM itself would wait two minutes.
            slurm("scontrol", "update", f"JobId={job}", "StartTime=now")
            wait_for(lambda: not slurm("squeue", "-h").stdout, "the job to end", 150)
        else:
            limit = ["--time=2", f"--signal={how}@60"]  # sent up to half a minute early
            code = batch(slurm, slow, log, *FLAGS, *limit)
            assert code == {"srun": 3, "torchrun": 1}[launcher], log.read_text()
            assert saved_half_way(out), log.read_text()
            assert batch(slurm, script, log, *FLAGS) == 0, log.read_text()
        assert same_training(out, uninterrupted(launcher)), log.read_text()

    trials(f"SLURM: {how} ({launcher})", trial, few=0, many=3, at_once=1)
