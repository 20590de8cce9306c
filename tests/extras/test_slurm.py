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
    ahead,
    checkpoints,
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
LAUNCH_NAMES = {
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
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
    slurm_extra.set_launch_env_(env)
    assert {name: value for name, value in env.items() if name not in LAUNCH_NAMES}.items() <= {
        **TASK,
        **changes,
    }.items()
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
    [
        ("2(x3),1", 0, 2),
        ("2(x3),1", 2, 2),
        ("2(x3),1", 3, 1),
        ("4", 0, 4),
        ("1,3(x2)", 1, 3),
        ("16(x10)", 9, 16),
    ],
)
def test_the_number_of_tasks_on_this_node_is_read_from_slurms_notation(counts, node, local_size):
    changes = {"SLURM_STEP_NUM_TASKS": "160", "SLURM_STEP_TASKS_PER_NODE": counts}
    assert translated(**changes, SLURM_NODEID=f"{node}").local_world_size == local_size


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node[01-03,07]", "node01"),
        ("node[3,5]", "node3"),
        ("node07", "node07"),
        ("a,b", "a"),
        ("gpu-a[10-12],cpu[1-2]", "gpu-a10"),
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


def test_the_address_and_the_port_of_the_user_are_kept():
    assert translated(MASTER_ADDR="b", MASTER_PORT="1234")[4:6] == ("b", 1234)


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
        {
            "SLURM_JOB_ID": "12",
            "SLURM_PROCID": "0",
            "SLURM_NTASKS": "2",
        },  # the batch script of a job
        {**TASK, "RANK": "7"},  # torchrun, started by srun
        {**TASK, "SLURM_STEP_NUM_TASKS": "1"},  # a shell: run.py --spawn must work in it
    ],
)
def test_a_process_that_is_no_task_or_has_a_rank_already_is_left_alone(env):
    before = dict(env)
    slurm_extra.set_launch_env_(env)
    assert env == before


@pytest.mark.parametrize("name", [name for name in TASK if name != "SLURM_STEP_NUM_TASKS"])
def test_a_missing_variable_of_srun_is_an_error_that_names_it(name):
    with pytest.raises(ValueError, match=f"^{name} is not set"):
        translated(**{name: ""})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
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
    missing = [
        name
        for name in ("munged", "slurmctld", "slurmd", "srun", "unshare")
        if not shutil.which(name)
    ]
    if os.geteuid() or missing:
        pytest.skip(
            f"{missing[0]} is missing: install slurm-wlm and munge"
            if missing
            else "SLURM's daemons need root"
        )
    folder = tmp_path_factory.mktemp("slurm")
    with ExitStack() as held:
        free = [held.enter_context(socket.create_server(("", 0))) for _ in range(3)]
        ports = [listener.getsockname()[1] for listener in free]
    (folder / "slurm.conf").write_text(CONF.format(folder=folder, ports=ports))
    (folder / "hosts").write_text(f"127.0.0.1 localhost n0 n1 {socket.gethostname()}\n")
    (folder / "munge.key").touch(0o600)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    env = {
        "SLURM_CONF": f"{folder}/slurm.conf",
        "PATH": path,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }

    def command(*words: object, **how) -> subprocess.CompletedProcess:
        how = {"cwd": ROOT, "timeout": 200, "capture_output": True, "text": True, **how}
        return subprocess.run([*map(str, words)], env={**ENVIRONMENT, **env}, **how)

    own = [
        "--socket",
        "munge.sock",
        "--key-file",
        "munge.key",
        "--pid-file",
        "munge.pid",
        "--seed-file",
        "munge.seed",
    ]
    own = [f"{folder}/{word}" if word.startswith("munge") else word for word in own]
    within = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        'mount --bind "$0" /etc/hosts; exec "$@"',
        f"{folder}/hosts",
    ]
    with ExitStack() as stack:
        daemon = partial(Program, env=env, seconds=1000)
        stack.enter_context(daemon("--force", "--foreground", *own, launcher=["munged"]))
        wait_for((folder / "munge.sock").exists, "munged")
        daemons = [["slurmctld", "-D"], ["slurmd", "-D", "-N", "n0"], ["slurmd", "-D", "-N", "n1"]]
        programs = [stack.enter_context(daemon(launcher=[*within, *words])) for words in daemons]
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


@pytest.fixture(scope="module")
def done(slurm, job, tmp_path_factory) -> Iterator[Callable[[str], tuple[int, Path]]]:
    """Run the same training under each launcher. done(launcher) returns its (exit code, output folder)."""
    folder = tmp_path_factory.mktemp("runs")
    flags = [*job, "--steps", 30]
    runs = {"alone": lambda: run(*flags, "--out", folder / "alone").code}
    for name, tasks in (("torchrun", 2), ("srun", 3)):
        script = adapt(SCRIPTS[name], flags, folder / name, tasks=tasks)
        runs[name] = partial(batch, slurm, script, folder / f"{name}.log")
    with ahead(**runs) as begun:
        yield lambda launcher: (begun[launcher].result(), folder / launcher)


@pytest.mark.parametrize("launcher, ranks", [("torchrun", 2), ("srun", 3)])
def test_two_nodes_have_the_losses_of_one_process(done, launcher, ranks):
    (code, out), (_, alone) = done(launcher), done("alone")
    assert code == 0, out.with_suffix(".log").read_text()
    assert json.loads((out / "config.json").read_text())["ranks"] == ranks
    assert [step for step, _ in losses(out)] == [*range(1, 31)]
    assert [loss for _, loss in losses(out)] == pytest.approx(
        [loss for _, loss in losses(alone)], rel=1e-4
    )


# --- a job that SLURM stops continues later ---

FLAGS = ["--nodes=2", "--exclusive", "--requeue", "--open-mode=append"]


@pytest.fixture(scope="module")
def long(job) -> list[object]:
    return [*job, "--dropout", 0.1, "--epochs", 100, "--steps", 350]


@pytest.fixture(scope="module")
def uninterrupted(slurm, long, tmp_path_factory) -> Callable[[str], Path]:
    @functools.cache
    def outcome(launcher: str) -> Path:
        folder = tmp_path_factory.mktemp("uninterrupted")
        script = adapt(SCRIPTS[launcher], long, folder)
        assert batch(slurm, script, folder / "log", *FLAGS) == 0
        return folder

    return outcome


def slow_script(launcher: str, flags: list[object], out: Path) -> str:
    """Return the script with a fault that makes its 350 steps take a minute."""
    script = adapt(SCRIPTS[launcher], flags, out, "tests/faults/sabotaged.py")
    return script.replace("\nsrun", "\nexport TEST_FAULT='backward pause all 1+'\nsrun")


def saved_half_way(out: Path) -> bool:
    """Return whether the run ended before its last step, with a checkpoint of the step where it ended."""
    last = losses(out)[-1][0]
    return last < 350 and [int(path.name.split("-")[1]) for path in checkpoints(out)][-1] == last


@pytest.mark.torture
@pytest.mark.parametrize("launcher", SCRIPTS)
def test_a_requeued_job_saves_and_continues(slurm, long, uninterrupted, launcher, trials, tmp_path):
    def trial(number: int) -> None:
        out, log = tmp_path / f"{number}", tmp_path / f"{number}.log"
        job = slurm(
            "sbatch",
            *FLAGS,
            "--parsable",
            f"--output={log}",
            input=slow_script(launcher, long, out),
        ).stdout.strip()
        wait_for(lambda: (out / "metrics.jsonl").exists() and metrics(out), "a step")
        time.sleep(2 * random.Random(number).random())
        assert slurm("scontrol", "requeue", job).returncode == 0
        wait_for(
            lambda: slurm("squeue", "-h", "-o", "%T").stdout == "PENDING\n", "the job to be stopped"
        )
        assert saved_half_way(out), log.read_text()
        slurm(
            "scontrol", "update", f"JobId={job}", "StartTime=now"
        )  # SLURM itself would wait two minutes
        wait_for(lambda: not slurm("squeue", "-h").stdout, "the job to end", 150)
        assert same_training(out, uninterrupted(launcher)), log.read_text()

    trials(f"SLURM: scontrol requeue ({launcher})", trial, few=0, many=3, at_once=1)


@pytest.mark.torture
@pytest.mark.parametrize("launcher, signal", [("srun", "USR1"), ("torchrun", "TERM")])
def test_a_job_that_is_warned_of_its_time_limit_saves_and_continues(
    slurm, long, uninterrupted, launcher, signal, trials, tmp_path
):
    def trial(number: int) -> None:
        out, log = tmp_path / f"{number}", tmp_path / f"{number}.log"
        limit = ["--time=1", f"--signal={signal}@30"]  # SLURM sends it up to half a minute early
        code = batch(slurm, slow_script(launcher, long, out), log, *FLAGS, *limit)
        assert code == {"srun": 3, "torchrun": 1}[launcher] and saved_half_way(out), log.read_text()
        assert batch(slurm, adapt(SCRIPTS[launcher], long, out), log, *FLAGS) == 0, log.read_text()
        assert same_training(out, uninterrupted(launcher)), log.read_text()

    trials(
        f"SLURM: --signal={signal}@30 before the time limit ({launcher})",
        trial,
        few=0,
        many=2,
        at_once=1,
    )
