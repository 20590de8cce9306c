"""SLURM, the real one: a controller and two nodes on this machine, for as long as the tests take. It takes root."""

import functools
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import ENVIRONMENT, ROOT, TINY, Program, ahead, checkpoints, losses, metrics, run, same_training, wait_for

README = (ROOT / "README.md").read_text()
(SBATCH,) = re.findall(r"```bash\n(#!.*?)```", README, re.DOTALL)
(SRUN,) = re.findall(r"    (srun .* python run.py .*)", README)
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


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[Callable[..., subprocess.CompletedProcess]]:
    """slurm("sbatch", ...) runs a command of SLURM's. The nodes n0 and n1 know each other by name."""
    missing = [name for name in ("munged", "slurmctld", "slurmd", "srun", "unshare") if not shutil.which(name)]
    if os.geteuid() or missing:
        pytest.skip(f"{missing[0]} is missing: install slurm-wlm and munge" if missing else "SLURM's daemons take root")
    folder = tmp_path_factory.mktemp("slurm")
    with ExitStack() as held:
        free = [held.enter_context(socket.create_server(("", 0))) for _ in range(3)]
        ports = [listener.getsockname()[1] for listener in free]
    (folder / "slurm.conf").write_text(CONF.format(folder=folder, ports=ports))
    (folder / "hosts").write_text(f"127.0.0.1 localhost n0 n1 {socket.gethostname()}\n")
    (folder / "munge.key").touch(0o600)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    env = {"SLURM_CONF": f"{folder}/slurm.conf", "PATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}

    def command(*words: object, **how) -> subprocess.CompletedProcess:
        how = {"cwd": ROOT, "timeout": 200, "capture_output": True, "text": True, **how}
        return subprocess.run([*map(str, words)], env={**ENVIRONMENT, **env}, **how)

    own = ["--socket", "munge.sock", "--key-file", "munge.key", "--pid-file", "munge.pid", "--seed-file", "munge.seed"]
    own = [f"{folder}/{word}" if word.startswith("munge") else word for word in own]
    within = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts; exec "$@"', f"{folder}/hosts"]
    with ExitStack() as stack:
        daemon = partial(Program, env=env, seconds=1000)
        stack.enter_context(daemon("--force", "--foreground", *own, launcher=["munged"]))
        wait_for((folder / "munge.sock").exists, "munged")
        daemons = [["slurmctld", "-D"], ["slurmd", "-D", "-N", "n0"], ["slurmd", "-D", "-N", "n1"]]
        programs = [stack.enter_context(daemon(launcher=[*within, *words])) for words in daemons]
        try:
            wait_for(lambda: command("sinfo", "-h", "-o", "%T %D").stdout == "idle 2\n", "SLURM to start", 20)
            yield command
        finally:
            command("scancel", "--signal=KILL", "--full", "--user=root")
            command("scancel", "--user=root")
            wait_for(lambda: not command("squeue", "-h", "-t", "running,completing").stdout, "SLURM's jobs to end", 20)
            assert all(program.process.poll() is None for program in programs)


@pytest.fixture(scope="module")
def job(text: Path) -> list[object]:
    """AdamW, for which the losses do not depend on the number of ranks, and dropout, for which the weights would."""
    return [*TINY, "--optimizer", "adamw", "--data", text, "--log-every", 1, "--eval-every", 1000]


def adapted(text: str, job: list[object], out: Path, program: str = "run.py", tasks: int = 2) -> str:
    """A command of the README, for our flags and for as many tasks as we can have."""
    text = text.replace("run.py --out /shared/run", " ".join(map(str, [program, *job, "--out", out])))
    assert f"--out {out}" in text
    return text.replace(" --ntasks-per-node 8 --gpus-per-node 8", f" --ntasks {tasks}")


def batch(slurm: Callable[..., Any], script: str, log: Path, *flags: object) -> int:
    """Submit a script, and wait for its exit code. (sbatch --wait looks less and less often.)"""
    code = log.with_suffix(".code")
    code.unlink(missing_ok=True)
    submitted = slurm("sbatch", f"--output={log}", *flags, input=f"{script}\necho $? > {code}\n")
    assert submitted.returncode == 0, submitted
    return int(wait_for(lambda: code.exists() and code.read_text(), "the job to end", 150))


# --------------------------------------------------------------------------------------------------- the README's


@pytest.fixture(scope="module")
def done(slurm, job, tmp_path_factory) -> Iterator[Callable[[str], tuple[int, Path]]]:
    """done(launcher): (exit code, out folder)."""
    folder = tmp_path_factory.mktemp("runs")
    flags = [*job, "--steps", 30]
    script = adapted(SBATCH, flags, folder / "sbatch")
    with ahead(
        sbatch=lambda: batch(slurm, script, folder / "log"),
        srun=lambda: slurm(*adapted(SRUN, flags, folder / "srun", tasks=3).split()).returncode,
        alone=lambda: run(*flags, "--out", folder / "alone").code,
    ) as runs:
        yield lambda launcher: (runs[launcher].result(), folder / launcher)


@pytest.mark.parametrize("launcher, ranks", [("sbatch", 2), ("srun", 3)])
def test_two_nodes_have_the_losses_of_one_process(done, launcher, ranks):
    (code, out), (_, alone) = done(launcher), done("alone")
    assert code == 0, out.with_name("log").read_text()
    assert json.loads((out / "config.json").read_text())["ranks"] == ranks
    assert [step for step, _ in losses(out)] == [*range(1, 31)]
    assert [loss for _, loss in losses(out)] == pytest.approx([loss for _, loss in losses(alone)], rel=1e-4)


# ------------------------------------------------------------------------------------ asked to stop, it goes on later

SCRIPTS = {"torchrun": SBATCH, "srun": f"#!/bin/bash\n{SRUN}\n"}
FLAGS = ["--nodes=2", "--exclusive", "--requeue", "--open-mode=append"]


@pytest.fixture(scope="module")
def long(job) -> list[object]:
    return [*job, "--dropout", 0.1, "--epochs", 100, "--steps", 350]


@pytest.fixture(scope="module")
def undisturbed(slurm, long, tmp_path_factory) -> Callable[[str], Path]:
    @functools.cache
    def outcome(launcher: str) -> Path:
        folder = tmp_path_factory.mktemp("undisturbed")
        script = adapted(SCRIPTS[launcher], long, folder)
        assert batch(slurm, script, folder / "log", *FLAGS) == 0
        return folder

    return outcome


def slowly(launcher: str, flags: list[object], out: Path) -> str:
    """The script, with 350 steps that take a minute."""
    script = adapted(SCRIPTS[launcher], flags, out, "tests/sabotaged.py")
    return script.replace("\nsrun", "\nexport TEST_FAULT='backward pause all 1+'\nsrun")


def half_way(out: Path) -> bool:
    """Whether it was saved where it ended."""
    last = losses(out)[-1][0]
    return last < 350 and [int(path.name.split("-")[1]) for path in checkpoints(out)][-1] == last


@pytest.mark.torture
@pytest.mark.parametrize("launcher", SCRIPTS)
def test_requeued_it_saves_and_goes_on(slurm, long, undisturbed, launcher, trials, tmp_path):
    def trial(number: int) -> None:
        out, log = tmp_path / f"{number}", tmp_path / f"{number}.log"
        job = slurm("sbatch", *FLAGS, "--parsable", f"--output={log}", input=slowly(launcher, long, out)).stdout.strip()
        wait_for(lambda: (out / "metrics.jsonl").exists() and metrics(out), "a step")
        time.sleep(2 * random.Random(number).random())
        assert slurm("scontrol", "requeue", job).returncode == 0
        wait_for(lambda: slurm("squeue", "-h", "-o", "%T").stdout == "PENDING\n", "it to be stopped")
        assert half_way(out), log.read_text()
        slurm("scontrol", "update", f"JobId={job}", "StartTime=now")  # SLURM itself waits two minutes
        wait_for(lambda: not slurm("squeue", "-h").stdout, "it to end", 150)
        assert same_training(out, undisturbed(launcher)), log.read_text()

    trials(f"SLURM: scontrol requeue ({launcher})", trial, few=0, many=3, at_once=1)


@pytest.mark.torture
@pytest.mark.parametrize("launcher, signal", [("srun", "USR1"), ("torchrun", "TERM")])
def test_warned_of_its_time_limit_it_saves_and_goes_on(slurm, long, undisturbed, launcher, signal, trials, tmp_path):
    def trial(number: int) -> None:
        out, log = tmp_path / f"{number}", tmp_path / f"{number}.log"
        limit = ["--time=1", f"--signal={signal}@30"]  # SLURM gives it up to half a minute early
        code = batch(slurm, slowly(launcher, long, out), log, *FLAGS, *limit)
        assert code == {"srun": 3, "torchrun": 1}[launcher] and half_way(out), log.read_text()
        assert batch(slurm, adapted(SCRIPTS[launcher], long, out), log, *FLAGS) == 0, log.read_text()
        assert same_training(out, undisturbed(launcher)), log.read_text()

    trials(f"SLURM: --signal={signal}@30 before the time limit ({launcher})", trial, few=0, many=2, at_once=1)
