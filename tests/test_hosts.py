"""Past one machine: hosts that are network namespaces, with a switch between them. It takes root and iproute2.

What two ranks have between them here is a real interface: its bytes are counted, it is made slow, and it is cut.
"""

import functools
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
from conftest import Program, Ran, ahead, losses, run, state, wait_for

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
STEPS, TIMEOUT = 30, 8


@contextmanager
def network(count: int, shape: str = "") -> Iterator[list[str]]:
    """The names of `count` hosts. Number n has one interface, eth0, at 10.0.0.n+1; `shape` is tc's word on what it
    sends. The switch is a namespace too, so that nothing of this machine's own network is touched."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("network namespaces take root" if os.geteuid() else "ip and tc are missing: install iproute2")
    mark = uuid.uuid4().hex[:8]
    switch, hosts = f"{mark}-switch", [f"{mark}-{n}" for n in range(count)]
    with ExitStack() as stack:
        for name in (switch, *hosts):
            command(f"ip netns add {name}")
            stack.callback(command, f"ip netns delete {name}")
            command(f"ip -n {name} link set lo up")
        command(f"ip -n {switch} link add bridge type bridge")
        command(f"ip -n {switch} link set bridge up")
        for n, host in enumerate(hosts):
            command(f"ip -n {host} link add eth0 type veth peer name port{n} netns {switch}")
            command(f"ip -n {switch} link set port{n} up master bridge")
            command(f"ip -n {host} addr add 10.0.0.{n + 1}/24 dev eth0")
            command(f"ip -n {host} link set eth0 up")
            if shape:
                command(f"tc -n {host} qdisc add dev eth0 root {shape}")
        yield hosts


def command(words: str) -> str:
    done = subprocess.run(words.split(), capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this machine does not let us have a network: {words}: {done.stderr.strip()}")
    return done.stdout


def cut(host: str) -> None:
    """Nobody hears of it: what is sent from now on is lost, as with a cable that is pulled out."""
    command(f"ip -n {host.split('-')[0]}-switch link set port{host.split('-')[1]} down")


def mend(host: str) -> None:
    command(f"ip -n {host.split('-')[0]}-switch link set port{host.split('-')[1]} up")


def sent(host: str) -> int:
    """Bytes that have left it."""
    return json.loads(command(f"ip -n {host} -j -s link show dev eth0"))[0]["stats64"]["tx"]["bytes"]


def on(host: str, *command: str) -> list[str]:
    """A launcher there, on a core of its own where there are enough."""
    core = int(host.split("-")[1]) % (os.cpu_count() or 1)
    return ["ip", "netns", "exec", host, "taskset", "-c", f"{core}", *command]


def rank(hosts: list[str], n: int, *flags: object) -> Program:
    """run.py on host n, told by variables, as srun would, where it is among the others."""
    env = {"RANK": f"{n}", "WORLD_SIZE": f"{len(hosts)}", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    env |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400", "GLOO_SOCKET_IFNAME": "eth0"}
    return Program(*flags, launcher=on(hosts[n], sys.executable, "run.py"), env=env)


def agent(hosts: list[str], n: int, *flags: object, nodes: str = "2", program: str = "run.py", **env: str) -> Program:
    """torchrun on host n. The first serves the rendezvous; a host that is lost is missed after 3 s."""
    conf = f"is_host={str(n == 0).lower()},last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
    place = f"--nnodes {nodes} --nproc-per-node 1 --max-restarts {0 if nodes == '2' else 3} --local-addr 10.0.0.{n + 1}"
    place += f" --rdzv-backend c10d --rdzv-id 1 --rdzv-endpoint 10.0.0.1:29400 --rdzv-conf {conf}"
    env |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    return Program(*flags, launcher=on(hosts[n], *TORCHRUN, *place.split(), program), env=env, seconds=150)


def everywhere(start: Callable[..., Program], hosts: list[str], *flags: object) -> list[Ran]:
    """Start it on every host, and wait for all."""
    with ExitStack() as stack, ThreadPoolExecutor(len(hosts)) as pool:
        programs = [stack.enter_context(start(hosts, n, *flags)) for n in range(len(hosts))]
        return list(pool.map(Program.finish, programs))


# ------------------------------------------------------------------------------------------- what is computed and sent


@pytest.fixture(scope="module")
def job(text: Path) -> list[object]:
    """STEPS steps of AdamW, for which the losses do not depend on the number of ranks. (Its gradients are large beside
    what else is sent.)"""
    model = "--layers 2 --heads 2 --embd 64 --block-size 16 --batch-size 8 --dtype float32".split()
    rest = "--optimizer adamw --lr 0.003 --log-every 1 --eval-every 1000 --save-every 1000".split()
    return [*model, *rest, "--data", text, "--steps", STEPS]


@pytest.fixture(scope="module")
def endless(job) -> list[object]:
    return [*job, "--steps", 10**6, "--epochs", 10**6, "--no-compile"]


@pytest.fixture(scope="module")
def outcomes(job, endless, tmp_path_factory) -> Iterator[Callable[[str], tuple[Path, int]]]:
    """outcomes(which): (the out folder, the bytes that the second host sent) of runs on two hosts."""
    folder = tmp_path_factory.mktemp("hosts")

    def outcome(name: str, start: Callable[..., Program], *flags: object, shape: str = "") -> tuple[Path, int]:
        with network(2, shape) as hosts:
            ran = everywhere(start, hosts, *job, *flags, "--timeout", 60, "--out", folder / name)
            assert [r.code for r in ran] == [0, 0], ran
            return folder / name, sent(hosts[1])

    slow = "tbf rate 100mbit burst 64kb latency 200ms"
    with (
        ahead(cut=partial(cut_off, rank, 0.1, *endless, "--out", folder / "cut")) as waiting,
        ahead(
            fast=partial(outcome, "fast", agent),
            parts=partial(outcome, "parts", rank, "--accum", 4, shape=slow),
            bf16=partial(outcome, "bf16", rank, "--compress", "bf16", shape=slow),
        ) as runs,
    ):
        yield lambda name: {**runs, **waiting}[name].result()


@pytest.fixture(scope="module")
def alone(job, tmp_path_factory) -> list[tuple[int, float]]:
    """The losses of one process."""
    out = tmp_path_factory.mktemp("alone")
    assert run(*job, "--out", out).code == 0
    return losses(out)


def close(curve: list[tuple[int, float]], other: list[tuple[int, float]], tolerance: float) -> bool:
    """Whether both have the same steps, and at each the same loss, up to a relative tolerance."""
    same_steps = [step for step, _ in curve] == [step for step, _ in other]
    return same_steps and all(math.isclose(a, b, rel_tol=tolerance) for (_, a), (_, b) in zip(curve, other))


def gradients(out: Path) -> int:
    """Bytes of one float32 gradient."""
    return sum(4 * tensor.numel() for tensor in state(out)["model"].values())


def test_two_hosts_have_the_losses_of_one_process(outcomes, alone):
    out, _ = outcomes("fast")  # under torchrun
    assert close(losses(out), alone, 1e-4)


def test_a_step_sends_the_gradient_once_however_many_parts_it_is_computed_in(outcomes, alone):
    for name in ("fast", "parts"):
        out, count = outcomes(name)
        assert close(losses(out), alone, 1e-4)
        # of two ranks each sends half of its own, and half of the sum; packets have headers and answers
        assert 1 < count / (STEPS * gradients(out)) < 1.1, name


def test_compressed_gradients_are_half_the_bytes_and_about_the_same_losses(outcomes, alone):
    out, count = outcomes("bf16")
    assert 0.5 < count / (STEPS * gradients(out)) < 0.55
    assert close(losses(out), alone, 0.01) and losses(out) != alone


# ---------------------------------------------------------------------------------------------- a link, a host is lost


def said(ran: Ran) -> list[str]:
    """The program's own last words."""
    return [line for line in ran.err.splitlines() if line.startswith("Error")]


def cut_off(start: Callable[..., Program], after: float, *flags: object) -> None:
    """Cut the link between two hosts so many seconds after step 20; every rank has to end, in time and with a word."""
    with network(2) as hosts, ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        programs = [stack.enter_context(start(hosts, n, *flags, "--timeout", TIMEOUT)) for n in (0, 1)]
        programs[0].read_to("step 20")
        ending = [pool.submit(program.finish) for program in programs]
        time.sleep(after)
        cut(hosts[1])
        wait_for(lambda: not any(p.family("\0RANK=") for p in programs), "every rank to end", TIMEOUT + 10)
        if start is agent:  # the second's waits for the rendezvous until the system gives the link up
            programs[1].process.kill()
        ran = [ended.result() for ended in ending]
    assert [said(r) for r in ran] == [[f"Error: no answer from rank {n} (timed out after 8 s)"] for n in (1, 0)], ran
    assert [r.code for r in ran] == [1, -9 if start is agent else 1], ran


def test_a_link_cut_in_mid_step_ends_every_rank(outcomes):
    outcomes("cut")


@pytest.mark.torture
@pytest.mark.parametrize("start", [rank, agent])
def test_a_link_cut_at_any_moment_ends_every_rank(start, endless, trials, tmp_path):
    def trial(number: int) -> None:
        cut_off(start, random.Random(number).random(), *endless, "--out", tmp_path / f"{number}")

    trials(f"a link cut in mid-step ({start.__name__})", trial, few=0, many=10)


@pytest.mark.torture
def test_hosts_are_lost_and_taken_in_again(job, trials, tmp_path):
    """Of three, one or two that do not serve the rendezvous: the cable goes first, so that nobody hears of it."""

    @functools.cache
    def undisturbed() -> list[tuple[int, float]]:
        assert run(*job, "--steps", 60, "--out", tmp_path / "undisturbed").code == 0
        return losses(tmp_path / "undisturbed")

    def trial(number: int) -> None:
        chance, out = random.Random(number), tmp_path / f"{number}"
        flags = [*job, "--steps", 60, "--save-every", 4, "--timeout", TIMEOUT, "--out", out]
        how = {"nodes": "1:3", "program": "tests/sabotaged.py", "TEST_FAULT": "backward pause all 1+"}
        how["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # or whoever comes back is not taken in (pytorch issue 135712)

        def now(name: str, key: str) -> int:
            with suppress(FileNotFoundError):
                return int(([0] + re.findall(rf'"{key}": (\d+)', (out / name).read_text()))[-1])
            return 0

        def reached(step: int) -> None:
            wait_for(lambda: now("metrics.jsonl", "step") >= step, f"step {step}")

        def of(ranks: int) -> None:
            wait_for(lambda: now("config.json", "ranks") == ranks, f"{ranks} ranks")

        with network(3) as hosts, ExitStack() as stack, ThreadPoolExecutor(5) as pool:
            programs: dict[int, Program] = {}
            ending = {}

            def begin(n: int) -> None:
                programs[n] = stack.enter_context(agent(hosts, n, *flags, **how))
                ending[n] = pool.submit(programs[n].finish)

            for n in range(3):
                begin(n)
            of(3)
            reached(chance.randint(5, 12))
            lost = [[1], [2], [1, 2]][number % 3]
            for n in lost:
                cut(hosts[n])
                programs[n].kill()
            of(3 - len(lost))
            reached(now("metrics.jsonl", "step") + chance.randint(1, 8))
            for n in lost:
                mend(hosts[n])
                begin(n)
            of(3)
            ran = [ending[n].result() for n in range(3)]
        assert [r.code for r in ran] == [0, 0, 0], ran
        assert close(losses(out), undisturbed(), 1e-4), ran

    trials("torchrun on three hosts: one or two lost and back", trial, few=0, many=6, at_once=1)
