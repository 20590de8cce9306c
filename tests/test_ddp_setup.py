"""ddp_setup.py under each launcher, and against everything that can happen to a rank.

The functions of the first part are what the ranks do; `python -m test_ddp_setup NAME ARGUMENTS` is one."""

import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import ENVIRONMENT, ROOT, ahead, wait_for
from torch import nn

import ddp_setup

HERE = {"cwd": ROOT / "tests", "env": {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}}
RANK = [sys.executable, "-m", "test_ddp_setup"]
SPAWN = [*RANK, "spawn"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *RANK[1:]]
SRUN = {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "3",
}

# ------------------------------------------------------------------------------------------ what ranks do


def main(name: str, *args: str) -> None:
    """As run.py's: an error is printed, with the rank."""
    try:
        code = globals()[name](*args)
    except Exception as error:
        rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "none"
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
        code = 1
    sys.exit(code)


def spawn(name: str, *args: str) -> int:
    return ddp_setup.spawn(main, 2, name, *args)


def agree_and_fail(folder: str, culprits: str, error: str = "the cause") -> None:
    """Write down what each rank hears from the others; then some of them fail, while the others wait for them."""
    calls = []
    with ddp_setup.process_group("cpu", timeout=60) as world:
        told = ddp_setup.from_rank_zero(lambda: calls.append("told") or {"by": world.rank}, world)
        try:
            ddp_setup.from_rank_zero(lambda: calls.append("failed") or int("no number"), world)
        except ValueError as wrong:
            heard = str(wrong)
        flags = [ddp_setup.any_rank(flag, world) for flag in (world.rank == 1, world.rank == 0, True, False)]
        mine = [*world[:4], str(world.device), told, heard, flags, calls]
        Path(folder, f"{world.rank}.json").write_text(json.dumps(mine))
        dist.barrier()
        if str(world.rank) in culprits:
            raise RuntimeError(error)
        dist.barrier()


def send_myself(number: str) -> None:
    """Rank 1 has a signal sent to it; rank 0 waits for it."""
    with ddp_setup.process_group("cpu", timeout=8) as world:
        dist.barrier()
        if world.rank == 1:
            os.kill(os.getpid(), int(number))
        dist.barrier()


def killed_beside_one_that_computes() -> None:
    with ddp_setup.process_group("cpu") as world:
        dist.barrier()
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(30)
        raise RuntimeError("still here")


def compute_without_end(folder: str) -> None:
    with ddp_setup.process_group("cpu") as world:
        Path(folder, f"{world.rank} is up").touch()
        time.sleep(60)


def wait_to_be_stopped(folder: str) -> int:
    with ddp_setup.stop_signals() as asked, ddp_setup.process_group("cpu") as world:
        dist.barrier()
        Path(folder, f"{world.rank} is up").touch()
        while not ddp_setup.any_rank(asked(), world):
            time.sleep(0.02)
        Path(folder, f"{world.rank} was {'asked' if asked() else 'told'}").touch()
    return 3


def say_nothing_of_it() -> None:
    raise ValueError("not caught by the function")


# --------------------------------------------------------------------------------------------------- place


ELASTIC = dict(RANK="5", LOCAL_RANK="1", WORLD_SIZE="8", LOCAL_WORLD_SIZE="4", MASTER_ADDR="a", MASTER_PORT="29400")


def test_place_is_what_torchrun_says():
    assert ddp_setup.place(ELASTIC) == ddp_setup.Place(5, 1, 8, 4, "a", 29400, served=False)
    assert ddp_setup.place({**ELASTIC, "TORCHELASTIC_USE_AGENT_STORE": "True"}).served


@pytest.mark.parametrize(
    ("counts", "node", "local_size"),
    [("2(x3),1", 0, 2), ("2(x3),1", 2, 2), ("2(x3),1", 3, 1), ("4", 0, 4), ("1,3(x2)", 1, 3), ("16(x10)", 9, 16)],
)
def test_place_reads_the_number_of_tasks_on_this_node_as_slurm_writes_it(counts, node, local_size):
    env = {**SRUN, "SLURM_STEP_NUM_TASKS": "160", "SLURM_STEP_TASKS_PER_NODE": counts, "SLURM_NODEID": str(node)}
    assert ddp_setup.place(env).local_size == local_size


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node[01-03,07]", "node01"),
        ("node[3,5]", "node3"),
        ("node07", "node07"),
        ("a,b", "a"),
        ("gpu-a[10-12],cpu[1-2]", "gpu-a10"),
        ("login,node[1-2]", "login"),
        ("n1.cluster.org,n2.cluster.org", "n1.cluster.org"),
    ],
)
def test_the_ranks_of_srun_meet_at_the_first_node_of_the_step(nodes, first):
    assert ddp_setup.place({**SRUN, "SLURM_STEP_NODELIST": nodes}).address == first


def test_two_steps_of_a_job_meet_at_different_ports_above_the_systems_and_below_the_passing_ones():
    ports = {ddp_setup.place({**SRUN, "SLURM_STEP_ID": str(step)}).port for step in range(10)}
    assert len(ports) == 10 and all(1024 < port < 32768 for port in ports)
    assert ddp_setup.place({**SRUN, "MASTER_ADDR": "b", "MASTER_PORT": "1234"})[4:6] == ("b", 1234)


def test_a_batch_script_of_slurm_is_no_rank():
    assert ddp_setup.place({"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}) == ddp_setup.Place()


@pytest.mark.parametrize(
    ("env", "name"),
    [(ELASTIC, name) for name in ELASTIC] + [(SRUN, name) for name in SRUN if name != "SLURM_STEP_NUM_TASKS"],
)
def test_half_a_launchers_variables_are_an_error_that_names_the_one_missing(env, name):
    with pytest.raises(ValueError, match=rf"^{name} is not set"):
        ddp_setup.place({key: value for key, value in env.items() if key != name})


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({**ELASTIC, "RANK": "one"}, "RANK='one'"),
        ({**ELASTIC, "WORLD_SIZE": "-2"}, "WORLD_SIZE='-2'"),
        ({**ELASTIC, "LOCAL_RANK": "0.5"}, "LOCAL_RANK='0.5'"),
        ({**ELASTIC, "RANK": "8"}, "rank=8.* size=8"),
        ({**ELASTIC, "LOCAL_RANK": "4"}, "local_rank=4.* local_size=4"),
        ({**ELASTIC, "LOCAL_WORLD_SIZE": "9"}, " size=8.* local_size=9"),
        ({**ELASTIC, "WORLD_SIZE": "0", "LOCAL_WORLD_SIZE": "0"}, " size=0"),
        ({**SRUN, "SLURM_PROCID": "2"}, "rank=2.* size=2"),
        ({**SRUN, "SLURM_LOCALID": "x"}, "SLURM_LOCALID='x'"),
        ({**SRUN, "SLURM_NODEID": "1"}, "SLURM_NODEID=1 .*=2"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "?"}, r"SLURM_STEP_TASKS_PER_NODE=\?"),
        ({**SRUN, "MASTER_PORT": "x"}, "MASTER_PORT='x'"),
    ],
)
def test_numbers_that_are_none_or_do_not_fit_are_an_error_that_names_them(env, named):
    with pytest.raises(ValueError, match=named):
        ddp_setup.place(env)


# ------------------------------------------------------------------------------------------- one process


@pytest.fixture
def alone(monkeypatch):
    """As plain python, whatever started the tests."""
    for name in os.environ.keys() - ENVIRONMENT.keys():
        monkeypatch.delenv(name)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


FAULTS = """
import resource, torch, ddp_setup
taken = []
with ddp_setup.process_group("cpu"):
    for _ in range(20):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(3 << 22)  # 48 MiB, which are 12288 pages
        taken.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sorted(taken)[10])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc")
def test_what_is_freed_on_a_cpu_is_not_asked_of_the_system_again():
    ran = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, **HERE)
    assert ran.returncode == 0 and int(ran.stdout) < 100, ran


def test_plain_python_has_no_group_and_needs_none(alone):
    with ddp_setup.process_group("cpu") as world:
        assert world == ddp_setup.World(0, 0, 1, 1, torch.device("cpu"))
        assert not dist.is_initialized()
        assert ddp_setup.any_rank(True, world) and not ddp_setup.any_rank(False, world)
        assert ddp_setup.from_rank_zero(lambda: "made", world) == "made"
        model = nn.Linear(2, 1)
        assert ddp_setup.replicate(model, world) is model


@pytest.mark.parametrize(
    "device",
    [
        "tpu",
        pytest.param("cuda", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA can be had here")),
        pytest.param("mps", marks=pytest.mark.skipif(torch.backends.mps.is_available(), reason="MPS can be had here")),
    ],
)
def test_a_device_that_cannot_be_had_is_an_error_that_says_what_can(alone, device):
    with pytest.raises(ValueError, match=f"'{device}' cannot be had here; there is .*cpu"):
        with ddp_setup.process_group(device):
            pass


def cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


def test_replicate_converts_batch_norm_when_asked_and_keeps_all_names():
    world = ddp_setup.World(0, 0, 1, 1, torch.device("cpu"))
    converted = ddp_setup.replicate(cnn(), world, sync_batchnorm=True)
    assert type(converted[1]) is type(converted[2][1]) is nn.SyncBatchNorm
    assert converted.state_dict().keys() == cnn().state_dict().keys()
    assert type(ddp_setup.replicate(cnn(), world)[1]) is nn.BatchNorm2d


def same_statistics() -> None:
    with ddp_setup.process_group("cuda") as world:
        model = ddp_setup.replicate(nn.BatchNorm1d(1).to(world.device), world, sync_batchnorm=True)
        model(torch.full((4, 1), float(world.rank), device=world.device)).sum().backward()
        # momentum 0.1; the batch of both ranks has mean 1 / 2
        torch.testing.assert_close(model.module.running_mean.item(), 0.05)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="SyncBatchNorm runs on GPUs alone, one for each rank")
def test_synchronised_batch_norm_takes_the_statistics_of_all_ranks():
    assert ddp_setup.spawn(same_statistics, 2) == 0


# ------------------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize("number", ddp_setup.STOP_SIGNALS)
def test_a_stop_signal_is_heard_and_its_handler_is_put_back(number):
    before = signal.getsignal(number)
    with ddp_setup.stop_signals() as asked:
        assert not asked()
        os.kill(os.getpid(), number)
        wait_for(asked, "the signal", 10)
    assert signal.getsignal(number) == before


LONG_CALL = """
import hashlib, os, signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # first, as torch starts threads, which take this over
os.kill(os.getpid(), signal.SIGTERM)
import ddp_setup
with ddp_setup.stop_signals() as asked:
    while not asked():
        time.sleep(0.01)
    print("heard", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # the main thread is in C, where no Python handler is run
"""


def test_a_blocked_signal_is_kept_and_a_second_sigint_ends_the_process_even_in_a_long_call():
    with subprocess.Popen([sys.executable, "-c", LONG_CALL], stdout=subprocess.PIPE, **HERE) as process:
        try:
            assert process.stdout.readline() == b"heard\n"
            process.send_signal(signal.SIGINT)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1)  # the first one leaves it time to save
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
        finally:
            process.kill()


def test_a_spawn_that_cannot_start_leaves_signals_as_they_were():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        with pytest.raises(Exception, match="pickle"):
            ddp_setup.spawn(lambda: None, 1)
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --------------------------------------------------------------------------------------------- launchers


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What becomes of ranks under each launcher, by name: (the folder they wrote to, exit code, stderr). They are
    begun in the background."""

    def start(folder: Path, *command: str) -> tuple[Path, int, str]:
        # a rank left over keeps the pipe open, and this waits for it
        ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=90, **HERE)
        return folder, ended.returncode, ended.stderr

    def under_srun(folder: Path, *command: str) -> tuple[Path, int, str]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        ranks = []
        for rank in "01":
            env = {**HERE["env"], **SRUN, "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "MASTER_PORT": f"{port}"}
            ranks.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=HERE["cwd"], env=env))
        errors = [rank.communicate(timeout=90)[1] for rank in ranks]
        return folder, max(rank.returncode for rank in ranks), "".join(errors)

    def agree(how, launcher: list[str], culprits: str):
        folder = tmp_path_factory.mktemp("agree")
        return partial(how, folder, *launcher, "agree_and_fail", str(folder), culprits)

    with ahead(
        stands_still=partial(start, None, *SPAWN, "send_myself", f"{signal.SIGSTOP:d}"),
        spawn=agree(start, SPAWN, "01"),
        torchrun=agree(start, TORCHRUN, "1"),
        srun=agree(under_srun, RANK, "0"),
    ) as begun:
        yield lambda name: begun[name].result()


@pytest.mark.parametrize("launcher", ["spawn", "torchrun", "srun"])
def test_ranks_agree_whoever_started_them(runs, launcher):
    folder, *_ = runs(launcher)
    for rank in (0, 1):
        *numbers, device, told, heard, flags, calls = json.loads((folder / f"{rank}.json").read_text())
        assert numbers == [rank, rank, 2, 2] and device == "cpu"
        assert told == {"by": 0} and heard == "invalid literal for int() with base 10: 'no number'"
        assert flags == [True, True, True, False]
        assert calls == ([] if rank else ["told", "failed"])


def printed(errors: str) -> list[str]:
    """What `main` printed, without what torch's C++ and torchrun have to say."""
    return [line for line in errors.splitlines() if line.startswith("rank ")]


@pytest.mark.parametrize(("launcher", "culprits"), [("spawn", "01"), ("torchrun", "1")])
def test_when_some_ranks_fail_all_end_and_one_error_is_printed_once(runs, launcher, culprits):
    _, code, errors = runs(launcher)
    [line] = printed(errors)
    assert code != 0 and line in [f"rank {culprit}: the cause" for culprit in culprits]


def test_under_srun_the_store_ends_with_rank_0_and_the_others_can_only_name_it(runs):
    _, code, errors = runs("srun")
    cause, *consequence = sorted(printed(errors))
    assert code != 0 and cause == "rank 0: the cause"
    assert all(line.startswith("rank 1: no answer from rank 0 (") for line in consequence)


def test_a_rank_that_stands_still_is_named_once_the_timeout_is_over(runs):
    _, code, errors = runs("stands_still")
    [line] = printed(errors)
    assert code == 1 and line.startswith("rank 0: no answer from rank 1 (")


# ------------------------------------------------------------------------------------------------ failures


def test_an_error_of_a_rank_that_speaks_of_a_timeout_is_that_ranks_own(tmp_path, capfd):
    assert spawn("agree_and_fail", str(tmp_path), "1", "DataLoader timed out after 5 seconds") == 1  # torch's words
    assert printed(capfd.readouterr().err) == ["rank 1: DataLoader timed out after 5 seconds"]


def test_a_killed_rank_is_named_with_its_signal_and_takes_the_others_with_it(capfd):
    with pytest.raises(ChildProcessError, match="^rank 1 was killed by SIGKILL$"):
        spawn("killed_beside_one_that_computes")
    assert printed(capfd.readouterr().err) == []


def test_an_exception_that_the_function_does_not_catch_is_told(capfd):
    assert ddp_setup.spawn(say_nothing_of_it, 1) == 1
    assert "not caught by the function" in capfd.readouterr().err


# ------------------------------------------------------------------------------------- around a whole run


@contextmanager
def up(name: str, folder: Path) -> Iterator[subprocess.Popen]:
    """The parent of two ranks that do what `name` says, once they are in their group."""
    with subprocess.Popen([*SPAWN, name, str(folder)], **HERE) as parent:
        try:
            wait_for(lambda: {"0 is up", "1 is up"} <= {path.name for path in folder.iterdir()}, "the ranks", 60)
            yield parent
        finally:
            parent.kill()


def family(pid: int) -> set[int]:
    """A process and all that descend from it and have not ended."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):  # gone
            continue
        if state not in "ZX":
            parents[int(stat.parent.name)] = int(parent)
    found = {pid} & parents.keys()
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def listening(pids: set[int]) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The addresses at which these processes wait for connections."""
    theirs = {os.readlink(handle) for pid in pids for handle in Path(f"/proc/{pid}/fd").iterdir()}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in theirs:
                words = bytes.fromhex(local.split(":")[0])  # in groups of four bytes, each the wrong way round
                address = ipaddress.ip_address(b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4)))
                found.append(getattr(address, "ipv4_mapped", None) or address)
    return found


linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: /proc, and the death of a parent told")


@linux
def test_ranks_listen_on_loopback_alone_and_a_stop_signal_to_the_parent_reaches_all(tmp_path):
    with up("wait_to_be_stopped", tmp_path) as parent:
        addresses = listening(family(parent.pid))
        assert len(addresses) >= 3  # the store's, and one of each rank
        assert all(address.is_loopback for address in addresses)
        parent.terminate()
        assert parent.wait(30) == 3
    assert {path.name for path in tmp_path.iterdir()} >= {"0 was asked", "1 was asked"}


@linux
def test_a_killed_parent_leaves_no_child(tmp_path):
    with up("compute_without_end", tmp_path) as parent:
        everyone = family(parent.pid)
        assert len(everyone) >= 3
        parent.kill()
        parent.wait()
        wait_for(lambda: not any(family(pid) for pid in everyone), "the children to end", 5)


if __name__ == "__main__":
    main(*sys.argv[1:])
