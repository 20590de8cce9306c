"""Promise 6: a rank or a machine is lost. All processes end, and the cause is printed once.

Hosts are network namespaces, with a cable between them.
"""

import random
import re
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from conftest import PYTHON, run, signalled, torchrun
from signalled import is_same, run_ranks

pytestmark = pytest.mark.torture
TIMEOUT = 4  # seconds: --timeout of the runs in which a rank hangs
PLACES = ["0 main 300", "1 main 1", "2 main 2000", "4 main 9000"]  # start, step, save, evaluation


def random_place(chance: random.Random) -> str:
    if chance.random() < 0.3:
        return f"0 main {int(10 ** chance.uniform(0, 4))}"
    return f"{chance.randint(1, 8)} main {chance.randint(1, 9000)}"


def count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text, re.M))


@pytest.fixture
def short(flags) -> list[object]:
    """Return the flags of a run with evaluations and saves in its first steps."""
    return [*flags, "--eval-every", 5, "--save-every", 2]


WHAT = {"raise": "raises", "9": "is killed", "19": "hangs"}


@pytest.mark.parametrize("what", WHAT, ids=WHAT.get)
def test_a_rank_that_is_lost_ends_the_others(what, short, trials, tmp_path):
    """Whichever rank fails, wherever it is: the others must not wait for ever, nor repeat the error."""

    def trial(number: int) -> None:
        chance, size = random.Random(number), 2 + number % 2
        rank, out = chance.randrange(size), tmp_path / f"{number}"
        fault, hangs = f"{rank} {random_place(chance)} {what} self", what == "19"
        args = [*short, *(["--timeout", TIMEOUT] if hangs else []), "--out", out]
        ended = run_ranks(args, size, fault, rank if hangs else -1)
        about = fault, size, ended
        own = ended.codes.pop(rank)
        assert {*ended.codes} == {1} and own == (1 if what == "raise" else -9), about
        # Rank 0 serves the store. Each rank that has lost it may say so.
        lost = count("^Error: lost the store|^Timeout", ended.text)
        assert lost <= (size - 1 if rank == 0 else size - 2), about
        has_cause = what == "raise" or rank
        assert count("^Traceback", ended.text) == bool(has_cause) and (has_cause or lost), about
        assert ("RuntimeError: the cause" in ended.text) == (what == "raise"), about
        assert not has_cause or "/run.py" in ended.text, about
        assert "terminate called" not in ended.text, about

    trials(f"a rank {WHAT[what]}", trial, 4, 100)


LAUNCHED = [(PYTHON, 2, "9"), (PYTHON, 2, "19"), (torchrun(2), 0, "9"), (torchrun(2), 0, "19")]


@pytest.mark.parametrize("launcher, spawn, what", LAUNCHED)
def test_a_launcher_ends_all_ranks_when_one_is_lost(launcher, spawn, what, short, trials, tmp_path):
    """Rank 0 is lost, but the store is in the launcher. Program.finish() checks that no process is left."""

    def trial(number: int) -> None:
        chance, more = random.Random(number), ["--spawn", spawn] if spawn else []
        fault = f"{number % 2} {random_place(chance)} {what} self"
        args = [*short, *more, "--timeout", TIMEOUT, "--out", tmp_path / f"{number}"]
        ran = run(*args, **signalled(launcher, fault, tmp_path / "place"), seconds=200)
        assert ran.code == 1, ran
        if what == "19":  # the other rank has waited
            assert ran.err.count('run.py", line') >= 1, ran
            assert count(r"^(\[rank\d\]: )?RuntimeError: ", ran.err) == 1, ran
        elif spawn:
            assert ran.err.count("terminated with signal SIGKILL") == 1, ran
            assert "Traceback" not in ran.err, ran
        else:
            assert re.search(r"exitcode\s*: -9", ran.err), ran

    name = "torchrun" if launcher != PYTHON else "--spawn"
    trials(f"a rank of {name} {WHAT[what]}", trial, 1, 10)


# ------------------------------------------------------------------------------------------- hosts


def ip(words: str) -> None:
    done = subprocess.run(["ip", *words.split()], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {words}: {done.stderr.strip()}"


@contextmanager
def two_hosts() -> Iterator[list[str]]:
    """Make two hosts, 10.0.0.1 and 10.0.0.2, and yield their names."""
    if not shutil.which("ip"):
        pytest.skip("ip is missing: install iproute2")
    hosts = [f"{uuid.uuid4().hex[:8]}-{n}" for n in (1, 2)]
    if problem := subprocess.run(["ip", "netns", "add", hosts[0]], capture_output=True).stderr:
        pytest.skip(f"this machine does not permit network namespaces: {problem}")
    try:
        ip(f"netns add {hosts[1]}")
        ip(f"-n {hosts[0]} link add eth0 type veth peer name eth0 netns {hosts[1]}")
        for n, host in enumerate(hosts, 1):
            ip(f"-n {host} addr add 10.0.0.{n}/24 dev eth0")
            ip(f"-n {host} link set eth0 up")
            ip(f"-n {host} link set lo up")
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "delete", host], stderr=subprocess.DEVNULL)


def test_two_hosts_have_the_weights_of_two_ranks_on_one_host(flags, whole, tmp_path):
    """Without it, a rank could use its local rank or an address of its host where it must not."""
    whole(2)
    with two_hosts() as hosts:
        ended = run_ranks([*flags, "--out", tmp_path / "out"], 2, hosts=hosts)
    assert ended.codes == [0, 0] and is_same(tmp_path / "out", whole(2)), ended


def test_a_cable_that_is_pulled_ends_the_ranks_of_both_hosts(short, trials, tmp_path):
    """No rank gets a message about it: each must give up after --timeout."""

    def trial(number: int) -> None:
        with two_hosts() as hosts:
            cut = f"ip -n {hosts[1]} link set eth0 down"
            fault = (
                f"{number % 2} {random_place(random.Random(number))} {cut.replace(' ', '_')} self"
            )
            args = [*short, "--timeout", TIMEOUT, "--out", tmp_path / f"{number}"]
            ended = run_ranks(args, 2, fault, hosts=hosts)
        assert ended.codes == [1, 1] and "/run.py" in ended.text, (fault, ended)

    trials("a cable is pulled", trial, 1, 20)
