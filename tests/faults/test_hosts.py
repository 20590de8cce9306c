"""Several hosts, which are network namespaces with a switch between them. Needs root and iproute2.

Between two ranks is then a real network interface: its bytes are counted, it is made slow, and it
is cut.
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
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
from conftest import Program, Ran, ahead, losses, run, state, wait_for

FOLDER = Path(__file__).parent
STEPS, TIMEOUT = 30, 8
SLOW = "tbf rate 100mbit burst 64kb latency 200ms"  # for tc


# ------------------------------------------------------------------------------------- the network


@contextmanager
def network(count: int, shape: str = "") -> Iterator[list[str]]:
    """Make `count` hosts and yield their names.

    Host n has one interface, eth0, with the address 10.0.0.n+1. shape: what tc does with the
    packets that a host sends. The switch is a namespace too, so this machine's own network is not
    changed.
    """
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
    """Run a command and return its output. A failure is an error of the test, not a skip."""
    done = subprocess.run(words.split(), capture_output=True, text=True)
    assert done.returncode == 0, f"{words}: {done.stderr.strip()}"
    return done.stdout


@pytest.fixture(scope="module", autouse=True)
def networks_are_possible() -> None:
    """Skip the module if this machine cannot make a network. This is the only reason to skip."""
    if os.geteuid():
        pytest.skip("network namespaces need root")
    if not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("ip and tc are missing: install iproute2")
    try:
        with network(2, SLOW):
            pass
    except AssertionError as error:
        pytest.skip(f"this machine does not permit network namespaces: {error}")


def set_link(host: str, state: str) -> None:
    """Set the link of a host "down" or "up". If it is down, packets are lost, as with a cut cable."""
    mark, n = host.split("-")
    command(f"ip -n {mark}-switch link set port{n} {state}")


def bytes_sent(host: str) -> int:
    """Return how many bytes have left a host."""
    report = command(f"ip -n {host} -j -s link show dev eth0")
    return int(json.loads(report)[0]["stats64"]["tx"]["bytes"])


# -------------------------------------------------------------------------- programs on the hosts


def on(host: str, *command: str) -> list[str]:
    """Return a launcher that runs on a host, with a CPU of its own if there are enough."""
    cpu = int(host.split("-")[1]) % (os.cpu_count() or 1)
    return ["ip", "netns", "exec", host, "taskset", "-c", f"{cpu}", *command]


def rank(hosts: list[str], n: int, *flags: object) -> Program:
    """Start run.py on host n with the launch variables of one rank per host."""
    env = {"RANK": f"{n}", "WORLD_SIZE": f"{len(hosts)}", "LOCAL_RANK": "0"}
    env |= {"LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    env |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400"}
    return Program(*flags, launcher=on(hosts[n], sys.executable, "run.py"), env=env)


def agent(
    hosts: list[str], n: int, *flags: object, nodes: str = "2", program: str = "run.py", **env: str
) -> Program:
    """Start torchrun on host n. Host 0 serves the rendezvous. A lost host is noticed after 3 s."""
    conf = f"is_host={str(n == 0).lower()},last_call_timeout=1,keep_alive_interval=1"
    conf += ",keep_alive_max_attempt=3"
    restarts = 0 if nodes == "2" else 3
    options = (
        f"-m torch.distributed.run --nnodes {nodes} --nproc-per-node 1 --max-restarts {restarts}"
    )
    options += f" --local-addr 10.0.0.{n + 1} --rdzv-backend c10d --rdzv-id 1"
    options += f" --rdzv-endpoint 10.0.0.1:29400 --rdzv-conf {conf}"
    env |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    launcher = on(hosts[n], sys.executable, *options.split(), program)
    return Program(*flags, launcher=launcher, env=env, seconds=150)


def newest_number(path: Path, key: str) -> int:
    """Return the last whole number with this key in a JSON file; 0 if there is none."""
    text = path.read_text() if path.exists() else ""
    return int(([0] + re.findall(rf'"{key}": (\d+)', text))[-1])


def run_on_all(start: Callable[..., Program], hosts: list[str], *flags: object) -> list[Ran]:
    """Start a program on every host and wait for all."""
    with ExitStack() as stack, ThreadPoolExecutor(len(hosts)) as pool:
        programs = [stack.enter_context(start(hosts, n, *flags)) for n in range(len(hosts))]
        return list(pool.map(Program.finish, programs))


# -------------------------------------------------------------------- what is computed and what is sent


@pytest.fixture(scope="module")
def job(text: Path) -> list[object]:
    """Return the flags of STEPS steps.

    The optimizer is AdamW, because its losses do not depend on the number of ranks. The gradients
    are large in comparison with everything else that is sent.
    """
    model = "--layers 2 --heads 2 --embd 64 --block-size 16 --batch-size 8 --dtype float32".split()
    rest = "--optimizer adamw --lr 0.003 --log-every 1 --eval-every 1000 --save-every 1000".split()
    return [*model, *rest, "--data", text, "--steps", STEPS]


@pytest.fixture(scope="module")
def endless(job) -> list[object]:
    return [*job, "--steps", 10**6, "--epochs", 10**6, "--no-compile"]


@pytest.fixture(scope="module")
def outcomes(
    networks_are_possible, job, endless, tmp_path_factory
) -> Iterator[Callable[[str], tuple[Path, int]]]:
    """outcomes(which): the --out folder of a run on two hosts, and the bytes that host 1 sent."""
    folder = tmp_path_factory.mktemp("hosts")

    def outcome(
        name: str, start: Callable[..., Program], *flags: object, shape: str = ""
    ) -> tuple[Path, int]:
        with network(2, shape) as hosts:
            out = folder / name
            ran = run_on_all(start, hosts, *job, *flags, "--timeout", 60, "--out", out)
            assert [r.code for r in ran] == [0, 0], ran
            return out, bytes_sent(hosts[1])

    with (
        ahead(cut=partial(cut_link, rank, 0.1, *endless, "--out", folder / "cut")) as waiting,
        ahead(
            torchrun=partial(outcome, "torchrun", agent),
            accum=partial(outcome, "accum", rank, "--accum", 4, shape=SLOW),
        ) as runs,
    ):
        yield lambda name: {**runs, **waiting}[name].result()


@pytest.fixture(scope="module")
def alone(job, tmp_path_factory) -> list[tuple[int, float]]:
    """Return the losses of one process."""
    out = tmp_path_factory.mktemp("alone")
    assert run(*job, "--out", out).code == 0
    return losses(out)


def assert_close(
    curve: list[tuple[int, float]], other: list[tuple[int, float]], tolerance: float
) -> None:
    """Both curves have the same steps, at least one, and the same losses up to a relative error."""
    assert curve and [step for step, _ in curve] == [step for step, _ in other]
    for (step, a), (_, b) in zip(curve, other):
        assert math.isclose(a, b, rel_tol=tolerance), (step, a, b)


def gradient_bytes(out: Path) -> int:
    """Return the size of the gradient in float32."""
    return sum(4 * tensor.numel() for tensor in state(out)["model"].values())


def test_two_hosts_under_torchrun_have_the_losses_of_one_process(outcomes, alone):
    out, _ = outcomes("torchrun")
    assert_close(losses(out), alone, 1e-4)


def test_a_step_sends_the_gradient_once_for_any_number_of_micro_batches(outcomes, alone):
    for name in ("torchrun", "accum"):
        out, count = outcomes(name)
        assert_close(losses(out), alone, 1e-4)
        # Of two ranks each sends half of its gradient and half of the sum. Packets have headers.
        assert 1 < count / (STEPS * gradient_bytes(out)) < 1.1, name


# ------------------------------------------------------------------------ a link or a host is lost


def error_lines(ran: Ran) -> list[str]:
    """Return the error lines of the program, without torchrun's report."""
    return [line for line in ran.err.splitlines() if line.startswith("Error")]


def cut_link(start: Callable[..., Program], delay: float, *flags: object) -> None:
    """Cut the link between two hosts `delay` seconds after step 20.

    Every rank must end in time, with one line.
    """
    with network(2) as hosts, ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        flags = (*flags, "--timeout", TIMEOUT)
        programs = [stack.enter_context(start(hosts, n, *flags)) for n in (0, 1)]
        programs[0].read_to("step 20")
        ends = [pool.submit(program.finish) for program in programs]
        time.sleep(delay)
        assert all(program.family("\0RANK=") for program in programs)
        set_link(hosts[1], "down")
        all_ended = lambda: not any(p.family("\0RANK=") for p in programs)  # noqa: E731
        wait_for(all_ended, "every rank to end", TIMEOUT + 60)
        if start is agent:  # that of host 1 waits for the rendezvous until the system gives up
            programs[1].process.kill()
        ran = [end.result() for end in ends]
    for n in (0, 1):
        waited = f"Error: rank {n}: waited {TIMEOUT} s in vain for another rank"
        assert error_lines(ran[n]) == [waited], ran
    assert [r.code for r in ran] == [1, -9 if start is agent else 1], ran


def test_a_cut_link_ends_every_rank(outcomes):
    outcomes("cut")


@pytest.mark.torture
@pytest.mark.parametrize("start", [rank, agent])
def test_a_link_that_is_cut_at_any_moment_ends_every_rank(start, endless, trials, tmp_path):
    def trial(number: int) -> None:
        delay = random.Random(number).random()
        cut_link(start, delay, *endless, "--out", tmp_path / f"{number}")

    trials(f"a link cut in mid-step ({start.__name__})", trial, few=0, many=10)


@pytest.mark.torture
def test_lost_hosts_come_back_and_the_losses_stay_the_same(job, trials, tmp_path):
    """Of three hosts, one or two that do not serve the rendezvous are lost. The cable is cut first,
    so that no other host receives a message about it."""
    job = [*job, "--steps", 60]

    @functools.cache
    def undisturbed_losses() -> list[tuple[int, float]]:
        assert run(*job, "--out", tmp_path / "undisturbed").code == 0
        return losses(tmp_path / "undisturbed")

    def trial(number: int) -> None:
        chance, out = random.Random(number), tmp_path / f"{number}"
        flags = [*job, "--save-every", 4, "--timeout", TIMEOUT, "--out", out]
        how = {"nodes": "1:3", "program": f"{FOLDER}/sabotaged.py"}
        how["TEST_FAULT"] = "backward pause all 1+"
        # Otherwise a host that comes back is not taken in again (PyTorch issue 135712).
        how["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"

        def wait_for_step(step: int) -> None:
            wait_for(lambda: newest_number(out / "metrics.jsonl", "step") >= step, f"step {step}")

        def wait_for_ranks(count: int) -> None:
            wait_for(lambda: newest_number(out / "config.json", "ranks") == count, f"{count} ranks")

        with network(3) as hosts, ExitStack() as stack, ThreadPoolExecutor(5) as pool:
            programs: dict[int, Program] = {}
            ends = {}

            def begin(n: int) -> None:
                programs[n] = stack.enter_context(agent(hosts, n, *flags, **how))
                ends[n] = pool.submit(programs[n].finish)

            for n in range(3):
                begin(n)
            wait_for_ranks(3)
            wait_for_step(chance.randint(5, 12))
            lost = [[1], [2], [1, 2]][number % 3]
            for n in lost:
                set_link(hosts[n], "down")
                programs[n].kill()
            wait_for_ranks(3 - len(lost))
            reached = newest_number(out / "metrics.jsonl", "step")
            wait_for_step(reached + chance.randint(1, 8))
            for n in lost:
                set_link(hosts[n], "up")
                begin(n)
            wait_for_ranks(3)
            ran = [ends[n].result() for n in range(3)]
        assert [r.code for r in ran] == [0, 0, 0], ran
        assert_close(losses(out), undisturbed_losses(), 1e-4)

    name = "torchrun on three hosts: one or two lost and back"
    trials(name, trial, few=0, many=6, at_once=1)
