"""Tests of ddp_setup.py: the launch environment, the process group under each launcher, failures, signals.

What the ranks do is in ranks.py.
"""

import ipaddress
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import call
import pytest
import ranks
import torch
import torch.distributed as dist
import warm
from conftest import (
    ENVIRONMENT,
    ROOT,
    ahead,
    free_port,
    launch_variables,
    run_on_ranks,
    wait_for,
    warm_server,
)
from torch import nn

import ddp_setup

START = {"cwd": ROOT / "tests", "env": {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}}
RANK = [sys.executable, "-m", "ranks"]
SPAWN = [*RANK, "spawn"]
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    *RANK[1:],
]
HANGING = (  # ranks that spawn() starts
    "in different lines",
    "rank 1 works",
    "rank 1 is stopped while rank 0 waits",
    "rank 1 is stopped while the group is made",
    "rank 1 does not join the second group",
    "only the later of two collectives is complete",
)
HEALTHY = (  # ranks without a launcher, which start sooner
    "nobody waits",
    "nobody waits, but the ends of collectives were written in the wrong order",
    "in a group of their own",
    "rank 0 has left",
    "rank 1 has left",
    "the program has destroyed the group",
    "in a second group with a longer timeout",
)
linux = pytest.mark.skipif(
    sys.platform != "linux", reason="needs /proc and PR_SET_PDEATHSIG of Linux"
)
# An error of the program that is like those of gloo when another rank is lost
LIKE_GLOO = "/data/igloo timed out: Connection reset by peer"

# ------------------------------------------------------------------------------- launch environment


ELASTIC = dict(
    RANK="5",
    LOCAL_RANK="1",
    WORLD_SIZE="8",
    LOCAL_WORLD_SIZE="4",
    MASTER_ADDR="a",
    MASTER_PORT="29400",
)


def test_launch_env_is_what_torchrun_sets():
    env = ddp_setup.read_launch_env(ELASTIC)
    assert env == ddp_setup.World(5, 1, 8, 4)


@pytest.mark.parametrize(
    "env",
    [
        {},
        {
            "SLURM_JOB_ID": "12",
            "SLURM_PROCID": "0",
            "SLURM_NTASKS": "2",
        },  # a job's batch script, not a task of srun
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    ],
)
def test_without_a_launcher_there_is_a_single_process(env):
    assert ddp_setup.read_launch_env(env) == ddp_setup.World(0, 0, 1, 1)


def test_several_tasks_of_srun_without_rank_are_refused():
    env = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}
    with pytest.raises(
        ValueError, match=r"^srun started 4 tasks, but RANK is not set: .*extras/slurm.py does$"
    ):
        ddp_setup.read_launch_env(env)
    assert (
        ddp_setup.read_launch_env({**env, **ELASTIC}).rank == 5
    )  # torchrun, or extras/slurm.py, came in between


@pytest.mark.parametrize("name", ELASTIC)
def test_a_missing_launch_variable_is_an_error_that_shows_it_empty(name):
    env = {key: value for key, value in ELASTIC.items() if key != name}
    with pytest.raises(
        ValueError, match=f"^launch variables are missing .*torchrun.*'{name}': ''"
    ) as caught:
        ddp_setup.read_launch_env(env)
    assert str(caught.value).count("''") == 1 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"RANK": "one"},
        {"WORLD_SIZE": "-2"},
        {"LOCAL_RANK": "0.5"},
        {"RANK": "8"},
        {"LOCAL_RANK": "4"},
        {"LOCAL_WORLD_SIZE": "9"},
        {"WORLD_SIZE": "0", "LOCAL_WORLD_SIZE": "0"},
        {"MASTER_PORT": "x"},
    ],
    ids=str,
)
def test_launch_variables_that_do_not_fit_are_an_error_that_shows_them(wrong):
    with pytest.raises(ValueError, match="do not fit") as caught:
        ddp_setup.read_launch_env({**ELASTIC, **wrong})
    for name, value in wrong.items():
        assert f"'{name}': '{value}'" in str(caught.value)


# --------------------------------------------------------------------------------------------- CPUs

QUOTAS = {  # content of the cgroup's files, CPUs that it allows
    "a quota": ({"cpu.max": "400000 100000\n"}, 4),
    "a fraction": ({"cpu.max": "250000 100000\n"}, 2),
    "less than one": ({"cpu.max": "50000 100000\n"}, 1),
    "no quota": ({"cpu.max": "max 100000\n"}, 64),
    "more than the machine has": ({"cpu.max": "9900000 100000\n"}, 64),
    "no cgroup": ({}, 64),
    "a file that says something else": ({"cpu.max": ""}, 64),
}


@pytest.mark.parametrize("case", QUOTAS)
def test_available_cpus_respects_the_quota_of_a_container(case, monkeypatch, tmp_path):
    files, expected = QUOTAS[case]
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*range(64)}, raising=False)
    assert ddp_setup.available_cpus(str(tmp_path)) == expected


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no CPU affinity")
def test_available_cpus_respects_the_affinity(tmp_path):
    before = os.sched_getaffinity(0)
    assert ddp_setup.available_cpus(str(tmp_path)) == len(before)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert ddp_setup.available_cpus(str(tmp_path)) == 1
    finally:
        os.sched_setaffinity(0, before)


# --------------------------------------------------------------------------------- a single process


@pytest.fixture
def alone(monkeypatch):
    """Without the variables of the launcher that may have started the tests."""
    for name in os.environ.keys() - ENVIRONMENT.keys():
        monkeypatch.delenv(name)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_a_single_process_uses_all_cpus_unless_the_user_has_set_the_number_of_threads(
    alone, monkeypatch
):
    for number, expected in ((None, ddp_setup.available_cpus()), ("3", 5)):
        torch.set_num_threads(5)
        if number:
            monkeypatch.setenv("OMP_NUM_THREADS", number)
        else:
            monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        with ddp_setup.process_group("cpu"):
            assert torch.get_num_threads() == expected


def test_the_ranks_of_a_machine_share_its_cpus_although_torchrun_has_set_one_thread(
    alone, monkeypatch
):
    monkeypatch.setattr(ddp_setup, "available_cpus", lambda: 12)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for local_size, threads in ((2, 6), (5, 2), (24, 1)):
        ddp_setup._select_device("cpu", ddp_setup.World(0, 0, 48, local_size))
        assert torch.get_num_threads() == threads


def test_a_single_process_has_no_process_group_and_uses_the_same_functions(alone):
    with ddp_setup.process_group("cpu") as world:
        assert world == ddp_setup.World(0, 0, 1, 1, torch.device("cpu"))
        assert not dist.is_initialized()
        assert ddp_setup.any_rank(True, world) and not ddp_setup.any_rank(False, world)
        assert ddp_setup.from_rank_zero(lambda: "made", world) == "made"
        assert ddp_setup.wait_together(lambda: "made", world) == "made"
        with pytest.raises(KeyError, match="key"):
            ddp_setup.wait_together(lambda: {}["key"], world)
        model = nn.Linear(2, 1)
        assert ddp_setup.replicate(model, world) is model


@pytest.mark.parametrize(
    "device",
    [
        "tpu",
        pytest.param(
            "cuda", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is available")
        ),
        pytest.param(
            "mps",
            marks=pytest.mark.skipif(torch.backends.mps.is_available(), reason="MPS is available"),
        ),
    ],
)
def test_a_device_that_is_not_available_is_an_error_that_lists_those_that_are(alone, device):
    with pytest.raises(ValueError, match=f"^device '{device}' is not available; available: .*cpu$"):
        with ddp_setup.process_group(device):
            pass


def test_a_new_replica_continues_bitwise_exactly_on_any_number_of_ranks():
    """From three ranks on, DistributedDataParallel alone rounds the first step of a replica differently."""
    run_on_ranks(ranks.train_in_two_parts_on_four_three_and_two_ranks, 4)


def test_a_program_may_destroy_the_group_itself():
    run_on_ranks(ranks.destroy_the_group_inside_the_block, 2)


def test_a_rank_that_was_forked_after_the_import_is_not_taken_for_an_orphan():
    run_on_ranks(ranks.fork_after_the_import, 1)


def test_a_worker_of_torchrun_ends_if_torchrun_was_killed_during_the_imports():
    run_on_ranks(ranks.end_with_a_parent_that_ended_during_the_import, 1)


def test_without_torchrun_a_process_continues_when_its_parent_has_ended():
    run_on_ranks(ranks.outlive_the_parent, 1)


def test_gloo_listens_on_loopback_only_on_a_single_machine_and_the_user_can_choose():
    run_on_ranks(ranks.listen_where_the_other_machines_connect, 2)


def test_ranks_that_cannot_connect_say_so_within_the_timeout():
    run_on_ranks(ranks.fail_to_connect, 2, f"{free_port()}", f"{free_port()}")


def test_an_address_where_something_listens_but_does_not_answer_is_an_error(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = f"{silent.getsockname()[1]}"
        address = dict(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        for name, value in address.items():
            monkeypatch.setenv(name, value)
        world = ddp_setup.World(1, 1, 2, 2)
        rank_1 = ddp_setup._in_thread(lambda: ddp_setup._connect_to_store(world, "here", 0.2))
        with pytest.raises(ConnectionError, match=r"ranks connected to here \(no answer\)"):
            rank_1.result(20)


def test_rank_0_gives_up_if_a_rank_from_before_a_restart_does_not_come_back(monkeypatch):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=0.1))
    store.queue_push("message of rank 1", "a word from before")
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(store, 0, 2)]))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "any")
    world = ddp_setup.World(0, 0, 2, 2)
    rank_0 = ddp_setup._in_thread(lambda: ddp_setup._connect_to_store(world, "here", 0.1))
    reason = r"\(wait timeout after 100ms, keys: /message of rank 1\)"
    with pytest.raises(ConnectionError, match=f"not all 2 ranks connected to here {reason}"):
        rank_0.result(20)


def test_each_start_of_the_ranks_has_a_new_id_although_the_store_keeps_old_messages():
    """In the second start, rank 0 finds an old word of rank 1 and the old id, and replies to both."""
    store, ids = dist.HashStore(), list[str]()
    store.set_timeout(timedelta(seconds=20))
    for start in range(2):
        world = ddp_setup.World(0, 0, 2, 2)
        rank_0 = ddp_setup._in_thread(partial(ddp_setup._agree_on_run_id, store, world))
        if start:
            for old in ("a word from before", ids[0]):
                store.queue_push("message of rank 1", old)
            wait_for(lambda: store.get(f"reply to {ids[0]}").decode() != ids[0], "a reply", 10)
        ids.append(ddp_setup._agree_on_run_id(store, ddp_setup.World(1, 1, 2, 2)))
        assert rank_0.result(20) == ids[start]
    assert ids[0] != ids[1]


def test_ranks_that_torchrun_has_started_again_meet_although_only_rank_0_had_tried_to_join_before():
    run_on_ranks(ranks.join_after_rank_0_had_tried_alone, 2)


def test_a_replica_may_have_complex_parameters_and_be_made_without_grad():
    run_on_ranks(ranks.replicate_complex_parameters_without_grad, 2)


def test_a_replica_may_have_sparse_embeddings():
    run_on_ranks(ranks.average_sparse_gradients, 2)


def test_a_replica_may_have_branches_that_are_not_used():
    run_on_ranks(ranks.average_gradients_of_branches_that_are_not_used, 2)


def test_without_a_device_the_best_one_is_used(alone):
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    with ddp_setup.process_group() as world:
        assert world.device.type == ("cuda" if cuda else "mps" if mps else "cpu")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="SyncBatchNorm needs one GPU per rank")
def test_sync_batch_norm_uses_the_statistics_of_all_ranks():
    assert call.spawn(ranks.compare_batch_norm_statistics, 2) == 0


# ------------------------------------------------------------------------------------- stop signals


def test_a_forked_child_can_be_terminated():
    run_on_ranks(ranks.terminate_a_forked_child, 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_stop_signal_is_noticed_and_its_handler_is_restored(number):
    assert number in ddp_setup.STOP_SIGNALS
    before = signal.getsignal(number)
    with pytest.raises(KeyError), ddp_setup.stop_signals() as stop_requested:
        assert not stop_requested()
        os.kill(os.getpid(), number)
        wait_for(stop_requested, "the signal", 10)
        raise KeyError  # as if an error had ended the block
    assert signal.getsignal(number) == before


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="this system has no terminals")
def test_only_rank_0_prints_the_notice_and_only_for_ctrl_c_in_a_terminal(monkeypatch):
    def interrupt(rank: str | None, number: int, *notice: str) -> None:
        monkeypatch.delenv("RANK", raising=False)
        if rank:
            monkeypatch.setenv("RANK", rank)
        with ddp_setup.stop_signals(*notice) as stop_requested:
            os.kill(os.getpid(), number)
            wait_for(stop_requested, "the signal", 10)

    def interrupt_forked_child() -> None:
        with ddp_setup.stop_signals("from a worker of a DataLoader"):
            if not (child := os.fork()):
                os.kill(os.getpid(), signal.SIGINT)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0

    controller, terminal = os.openpty()
    stderr, printed = os.dup(2), b""
    try:
        os.dup2(terminal, 2)
        interrupt("1", signal.SIGINT, "from rank 1")
        interrupt("0", signal.SIGTERM, "for SIGTERM")
        interrupt("0", signal.SIGINT)
        interrupt_forked_child()
        interrupt("0", signal.SIGINT, "rank 0")
        interrupt(None, signal.SIGINT, "alone")
        os.write(2, b"end")
        while not printed.endswith(b"end"):
            printed += os.read(controller, 1000)
    finally:
        os.dup2(stderr, 2)
        for file in (stderr, controller, terminal):
            os.close(file)
    assert printed.split(b"\r\n") == [b"", b"rank 0", b"", b"alone", b"end"]


def test_another_signal_with_a_python_handler_is_not_a_stop_signal():
    called = []
    before = signal.signal(signal.SIGUSR2, lambda *_: called.append(True))
    try:
        with ddp_setup.stop_signals() as stop_requested:
            os.kill(os.getpid(), signal.SIGUSR2)
            wait_for(lambda: called, "the handler", 10)
            assert not stop_requested()
    finally:
        signal.signal(signal.SIGUSR2, before)


INTERRUPTED = """
import os, signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # before torch starts threads, which inherit this
os.kill(os.getpid(), signal.SIGTERM)
import ddp_setup
with ddp_setup.stop_signals() as stop_requested:
    while not stop_requested():
        time.sleep(0.01)
    print("noticed", flush=True)
    time.sleep(300)
"""


def test_a_blocked_signal_is_not_lost_and_a_second_sigint_ends_the_process():
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, **START
    ) as process:
        try:
            assert process.stdout.readline() == b"noticed\n"
            process.send_signal(signal.SIGTERM)  # It is the second SIGTERM.
            process.send_signal(signal.SIGINT)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1)  # After the first SIGINT, the program has time to save.
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
        finally:
            process.kill()


ALONE = """
import ddp_setup
with ddp_setup.stop_signals():
    print("waits", flush=True)
    with ddp_setup.process_group("cpu"):
        pass
"""


def test_a_second_sigint_ends_a_rank_that_waits_for_the_others_to_start():
    variables = launch_variables(0, 2, free_port())
    start = {**START, "env": {**START["env"], **variables}, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", ALONE], **start) as process:

        def has_ended() -> bool:
            process.send_signal(signal.SIGINT)  # repeated, because two at once count as one
            return process.poll() is not None

        try:
            assert process.stdout.readline() == b"waits\n"
            wait_for(has_ended, "the rank to end", 20)
            assert process.wait() == 130
        finally:
            process.kill()


WITH_A_DATALOADER = """
import os, signal, ddp_setup
from torch.utils.data import DataLoader
# A forked worker would inherit the handlers of stop_signals.
more = {"multiprocessing_context": "spawn", "worker_init_fn": ddp_setup.detach_worker}
with ddp_setup.stop_signals() as stop_requested:
    rows = iter(DataLoader(range(9), num_workers=1, **more))
    read = [int(next(rows))]
    (worker,) = rows._workers
    os.killpg(0, signal.SIGTERM)  # as torchrun does
    os.kill(worker.pid, signal.SIGUSR1)  # as SLURM can
    read += map(int, rows)
    print(read, stop_requested(), worker.exitcode or 0)
"""


def test_a_detached_worker_of_a_dataloader_survives_stop_signals():
    command = [sys.executable, "-c", WITH_A_DATALOADER]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=600, start_new_session=True, **START
    )
    assert (ran.returncode, ran.stdout) == (0, f"{[*range(9)]} True 0\n"), ran


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_spawned_rank_ends_although_a_worker_still_runs(method):
    command = [*SPAWN, "end_with_a_daemon", method]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, **START)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", ""), ran


@pytest.mark.parametrize("size", [0, -1])
def test_spawn_refuses_to_start_no_process(size):
    with pytest.raises(ValueError, match=f"size is {size}; spawn needs at least 1 process"):
        ddp_setup.spawn(["true"], size)


def test_a_rank_cannot_spawn(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="a launcher has started this process"):
        ddp_setup.spawn(["true"], 2)


AT_A_PROMPT = """
import os, signal, subprocess, sys, threading, time
import ddp_setup
sys.ps1 = ">>> "  # as in an interactive Python and in a notebook
ranks = []
class Popen(subprocess.Popen):
    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        ranks.append(self)
subprocess.Popen = Popen
def interrupt_twice():
    while len(ranks) < 2:
        time.sleep(0.001)
    for _ in range(2):
        time.sleep(0.4)
        os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt_twice).start()
try:
    ddp_setup.spawn(["sh", "-c", "trap '' TERM; exec sleep 300"], 2)
except KeyboardInterrupt:
    print([rank.returncode for rank in ranks])
"""


def test_at_a_python_prompt_a_second_sigint_ends_the_ranks_but_not_the_process():
    command = [sys.executable, "-c", AT_A_PROMPT]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, **START)
    assert (ran.returncode, ran.stdout) == (0, f"{[-signal.SIGKILL.value] * 2}\n"), ran


INTERRUPTED_START = """
import os, signal, sys
import ddp_setup
sys.ps1 = ">>> "
class Sleep(os.PathLike):
    def __fspath__(self):  # Popen calls this before it starts a rank.
        os.kill(os.getpid(), signal.SIGINT)
        Sleep.__fspath__ = lambda self: "sleep"
        return "sleep"
print(ddp_setup.spawn([Sleep(), "300"], 2))
"""


def test_a_stop_signal_while_the_ranks_are_started_ends_all_of_them():
    command = [sys.executable, "-c", INTERRUPTED_START]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, **START)
    assert (ran.returncode, ran.stdout) == (0, f"{128 + signal.SIGTERM}\n"), ran


START_FAILS = """
import subprocess
import ddp_setup
ranks = []
class Popen(subprocess.Popen):
    def __init__(self, *args, **more):
        if ranks:
            raise OSError("no more processes")
        super().__init__(*args, **more)
        ranks.append(self)
subprocess.Popen = Popen
try:
    ddp_setup.spawn(["sleep", "300"], 2)
except OSError as error:
    print(error, ranks[0].returncode)
"""


def test_if_not_all_ranks_can_start_the_others_are_killed():
    command = [sys.executable, "-c", START_FAILS]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, **START)
    assert (ran.returncode, ran.stdout) == (0, "no more processes -9\n"), ran


# ------------------------------------------------------------------------------------ several ranks


class Ended(NamedTuple):
    folder: Path
    codes: list[int]  # of the launcher, or of each rank if there is no launcher
    errors: str  # what all ranks wrote to stderr

    def lines(self) -> list[str]:
        """What `main` and `spawn` printed, without the messages of torch's C++ code and of torchrun.

        Of the program lines of a rank, only the innermost is left.
        """
        begins = ("rank ", "spawn: ", "Error: ")
        printed = [line for line in self.errors.splitlines() if line.startswith(begins)]
        return [re.sub(r" < \S+:\d+", "", line) for line in printed]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """runs(name) waits for the end of one of the runs below. All start in the background."""
    # The threads below must not create these at the same time.
    tmp_path_factory.getbasetemp()
    server = warm_server()

    def launch(
        start: list[str], name: str, *args: str, writes: bool, envs: list[dict[str, str]]
    ) -> Ended:
        """Run ranks.py once with each environment, in forks of a process that has imported torch."""
        folder = tmp_path_factory.mktemp("run")
        command = [*start, name, *([str(folder)] if writes else []), *args]
        program, processes, pipes = Path(ranks.__file__), [], []
        for env in envs:
            ours, theirs = os.pipe()
            with open(theirs, "wb") as pipe:
                environment = {**START["env"], **env}
                processes.append(
                    warm.Process(
                        server, program, command, environment, pipe.fileno(), pipe.fileno()
                    )
                )
            pipes.append(open(ours, "rb"))
        errors = ""
        try:
            for pipe in pipes:
                with pipe:
                    # A rank that is left behind keeps stderr open, and then this call runs into its timeout.
                    read = subprocess.run(["cat"], stdin=pipe, stdout=subprocess.PIPE, timeout=600)
                errors += read.stdout.decode()
            return Ended(folder, [process.wait() for process in processes], errors)
        finally:
            for process in processes:
                process.kill()

    def spawned(name: str, *args: str, writes: bool = False):
        return partial(launch, ["spawn"], name, *args, writes=writes, envs=[{}])

    def without_launcher(name: str, *args: str, writes: bool = False) -> Ended:
        """Start two ranks by hand. Rank 0 serves the store, as under srun."""
        address = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{free_port()}")
        size = dict(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        envs = [dict(RANK=rank, LOCAL_RANK=rank, **size, **address) for rank in "01"]
        return launch([], name, *args, writes=writes, envs=envs)

    def by_torchrun() -> Ended:
        folder = tmp_path_factory.mktemp("run")
        command = [*TORCHRUN, "agree_and_fail", str(folder), "1", LIKE_GLOO]
        ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=600, **START)
        return Ended(folder, [ended.returncode], ended.stderr)

    # The runs of the second pool mostly sleep.
    with (
        ahead(
            spawn=spawned("agree_and_fail", "01", writes=True),
            torchrun=by_torchrun,
            no_launcher=partial(without_launcher, "agree_and_fail", "0", writes=True),
            killed=spawned("kill_rank_1_while_rank_0_computes"),
            never_ends=spawned("rank_1_never_ends"),
            second_ctrl_c=spawned("interrupt_rank_1_twice_while_rank_0_computes"),
            own_error=spawned("fail_on_rank_1_in_wait_together"),
            exit_7=spawned("exit_inside_the_block", "1", "7"),
            exit_0=spawned("exit_inside_the_block", "1", "0"),
            second_error=spawned("fail_in_the_second_group", "error"),
            second_killed=spawned("fail_in_the_second_group", "killed"),
            second_alone=partial(without_launcher, "fail_in_the_second_group", "error"),
            two_alone=partial(without_launcher, "two_groups_one_after_the_other"),
        ) as begun,
        ahead(
            6,
            longer=spawned("work_longer_than_the_timeout", writes=True),
            no_reply=partial(without_launcher, "fail_while_the_store_does_not_answer"),
            stopped=spawned("signal_to_rank_1", f"{signal.SIGSTOP:d}"),
            **{kind: spawned("wait_for_one_another", kind) for kind in HANGING},
            **{kind: partial(without_launcher, "wait_for_one_another", kind) for kind in HEALTHY},
            alone=partial(without_launcher, "wait_for_one_another", "rank 0 is elsewhere"),
            lost_store=partial(without_launcher, "wait_for_one_another", "the store is lost"),
        ) as waiting,
    ):
        yield lambda name: {**begun, **waiting}[name].result()


@pytest.mark.parametrize("launcher", ["spawn", "torchrun", "no_launcher"])
def test_ranks_agree_under_each_launcher(runs, launcher):
    folder = runs(launcher).folder
    weights = []
    for rank in (0, 1):
        seen = json.loads((folder / f"{rank}.json").read_text())
        *numbers, device, threads, timeout, made, text, flags, calls, weight = seen
        assert numbers == [rank, rank, 2, 2] and device == "cpu"
        assert threads == max(1, ddp_setup.available_cpus() // 2)  # The ranks share the CPUs.
        assert timeout == 2 * 60  # that of a collective
        assert made == {"by": 0}
        wrong = "invalid literal for int() with base 10: 'no number', FileNotFoundError"
        own = [
            "OSError(file, line 7) in wait_together",
            "BadRecord(file, line 7) in read_on_rank_1",
        ]
        number = ["ValueError(file, line 7)", "BadNumber(file, line 7)"]
        last = "invalid literal for int() with base 10: 'of rank 0'"
        # the errors of rank 0, 0, 1, 1, and 0 (where both fail)
        assert text == f"{wrong}, {own[rank]}, {number[rank]}, {last}"
        assert flags == [True, True, True, False]
        assert calls == ([] if rank else ["made", "failed"])
        weights.append(weight)
    torch.manual_seed(0)
    assert weights[0] == weights[1] == nn.Linear(2, 1).weight.flatten().tolist()  # those of rank 0


def test_when_both_ranks_fail_one_error_is_printed(runs):
    ended = runs("spawn")
    [line] = ended.lines()
    assert ended.codes == [1] and line in ["rank 0: the cause", "rank 1: the cause"]


def test_when_rank_1_fails_only_its_error_is_printed_even_if_it_is_like_that_of_a_lost_rank(runs):
    ended = runs("torchrun")
    assert ended.codes == [1] and ended.lines() == [f"rank 1: {LIKE_GLOO}"]


def test_an_error_in_wait_together_is_reported_by_its_own_rank_which_has_the_traceback(runs):
    ended = runs("own_error")
    assert ended.codes == [1] and ended.lines() == [
        "rank 1: invalid literal for int() with base 10: 'on rank 1'"
    ]


def test_when_rank_0_fails_and_its_store_is_gone_rank_1_can_only_name_rank_0(runs):
    ended = runs("no_launcher")
    assert ended.codes == [1, 1]
    cause, *consequence = sorted(ended.lines())
    assert cause == "rank 0: the cause"
    # If the process of rank 0 takes long to end, rank 1 still reaches the store and prints nothing.
    assert consequence in ([], ["rank 1: no answer from rank 0 (connection lost)"])


@linux
def test_an_error_is_reported_although_the_store_does_not_answer(runs):
    ended = runs("no_reply")
    assert (ended.codes, ended.lines()) == ([-signal.SIGKILL, 1], ["rank 1: the cause"])


BY_GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"
LATE = "[/pytorch/third_party/gloo/gloo/transport/tcp/buffer.cc:81] Timed out waiting 4000ms"


@pytest.mark.parametrize(
    "error, failed, expected",
    [
        (RuntimeError(BY_GLOO), "02", "no answer from rank 1 or 3 (connection lost)"),
        (RuntimeError(BY_GLOO), "012", "no answer from rank 3 (connection lost)"),
        (RuntimeError(LATE), "012", "no answer from rank 3 (timed out)"),
        (
            RuntimeError("Application timeout caused pair closure"),
            "012",
            "no answer from rank 3 (timed out)",
        ),
        (dist.DistBackendError("NCCL error"), "012", "no answer from rank 3 (connection lost)"),
        (RuntimeError(BY_GLOO), "0123", ""),  # All have failed, so no rank was lost.
        (dist.DistBackendError("wrong sizes"), "0123", ""),
        (RuntimeError(LIKE_GLOO), "0", None),
        (RuntimeError("no file /data/gloo/rows.pt"), "0", None),
        (NotImplementedError(BY_GLOO), "0", None),  # gloo raises a bare RuntimeError.
    ],
    ids=lambda value: None if isinstance(value, Exception) else f"{value}"[:28],
)
def test_an_error_of_a_lost_connection_is_replaced_by_one_that_names_the_lost_ranks(
    error, failed, expected, monkeypatch
):
    """Before that, the rank waits, so that the rank that failed first can report."""
    store, slept = dist.HashStore(), []
    monkeypatch.setattr(ddp_setup, "time", SimpleNamespace(sleep=slept.append))
    for rank in failed.replace("0", ""):
        store.set(f"failed {rank}", "")
    try:
        ddp_setup._choose_reporter(error, ddp_setup.World(0, 0, 4, 4), store)
        raised = None
    except ConnectionError as replacement:
        raised = f"{replacement}"
        assert replacement.__cause__ is error
    assert raised == (expected or None) and bool(slept) == (expected is not None)
    assert store.check(["failed 0"]) and store.add("reported", 0) == 1


@pytest.mark.parametrize("code", [None, 7])
def test_a_rank_whose_error_another_rank_reports_exits_with_the_code_of_its_own_error(code):
    store, error = dist.HashStore(), ValueError("a wrong flag")
    store.add("reported", 1)
    if code:
        error.exit_code = code
    with pytest.raises(SystemExit) as caught:
        ddp_setup._choose_reporter(error, ddp_setup.World(0, 0, 2, 2), store)
    assert caught.value.code == (code or 1)


def test_a_rank_that_does_not_answer_is_named_after_the_timeout(runs):
    ended = runs("stopped")
    line = line_of("if world.rank == 1:\n            os.kill(os.getpid(), int(number))", 2)
    assert ended.codes == [1] and ended.lines() == [
        f"Error: no progress for 8 s: rank 0 at {line}, no answer from rank 1"
    ]


def line_of(code: str, below: int = 0) -> str:
    """Return "FILE:LINE" of some code in ranks.py, or of a line below it."""
    text = Path(ranks.__file__).read_text()
    return f"{Path(ranks.__file__).name}:{text[: text.index(code)].count(chr(10)) + 1 + below}"


def test_ranks_that_wait_for_one_another_are_named_with_their_lines(runs):
    ended = runs("in different lines")
    waits, sleeps = (
        line_of("dist.barrier()  # here the others"),
        line_of("time.sleep(60)  # here is rank 1"),
    )
    assert ended.codes == [1] and ended.lines() == [
        f"Error: no progress for 4 s: rank 0 at {waits}, rank 1 at {sleeps}"
    ]
    calls = f"{line_of('code = globals()[name](*args)')} < {line_of('main(*sys.argv[1:])')}"
    assert f": rank 0 at {waits} < {calls}, rank 1 at {sleeps} < {calls}\n" in ended.errors


def test_a_rank_that_was_stopped_does_not_keep_the_others_waiting(runs):
    ended = runs("rank 1 is stopped while rank 0 waits")
    waits = line_of("dist.barrier()  # here the others")
    assert ended.codes == [1] and ended.lines() == [
        f"Error: no progress for 4 s: rank 0 at {waits}, no answer from rank 1"
    ]


@pytest.mark.parametrize(
    "run", ["rank 1 is stopped while the group is made", "rank 1 does not join the second group"]
)
def test_a_rank_that_is_missing_while_the_group_is_made_is_named(runs, run):
    ended = runs(run)
    waits = line_of("init(*args, **{**kwargs")
    assert ended.codes == [1] and ended.lines() == [
        f"Error: no progress for 4 s: rank 0 at {waits}, no answer from rank 1"
    ]


def test_a_rank_that_waits_for_the_earlier_of_two_collectives_is_stuck(runs):
    ended = runs("only the later of two collectives is complete")
    waits = line_of("earlier.wait()  # here rank 0 waits")
    assert ended.codes == [1] and ended.lines() == [
        f"Error: no progress for 4 s: rank 0 at {waits}, no answer from rank 1"
    ]


def test_a_rank_that_is_in_no_collective_ends_after_the_report_without_a_launcher(runs):
    ended = runs("alone")
    assert ended.codes == [1, 1] and len(ended.lines()) == 1


WATCH = """
import json, sys, threading
import torch
import torch.distributed as dist
import ddp_setup

# Imitates torch's record of a collective of NCCL that does not end. Only the CUDA build has NCCL.
group = {"last_enqueued_collective": 2, "last_completed_collective": 1}
c10d = torch._C._distributed_c10d
c10d._dump_nccl_trace_json = lambda *_: json.dumps({"pg_status": {"0": group}})
store, joined = dist.TCPStore("127.0.0.1", int(sys.argv[1])), threading.Event()
joined.set()
device = torch.device("cuda" if sys.argv[2] == "nccl" else "cpu")
world, main = ddp_setup.World(1, 1, 2, 2, device), threading.get_ident()
ddp_setup._watch_ranks(world, store, float(sys.argv[3]), main, joined, threading.Event())
"""


@pytest.mark.parametrize(
    "backend, reported, intervals", [("nccl", 0, 21), ("nccl", 1, 3), ("gloo", 1, 21)]
)
def test_with_nccl_a_rank_that_waits_ends_early_after_a_report(backend, reported, intervals):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    store.add("reported", reported)
    command = [sys.executable, "-c", WATCH, f"{store.port}", backend, "0.5"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100)
    error = "Error: no progress for 0.5 s: no answer from rank 0, rank 1 at a library\n"
    assert (ended.returncode, ended.stderr) == (1, "" if reported else error)
    assert store.add("counter", 0) == intervals


def test_with_nccl_a_rank_that_waits_ends_early_after_the_store_was_lost():
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True)]
    command = [sys.executable, "-c", WATCH, f"{stores[0].port}", "nccl", "20"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        wait_for(lambda: stores[0].add("counter", 0), "the first interval", 60)
        stores.clear()
        _, error = process.communicate(timeout=60)
    # Before this line are warnings of torch about the lost connection.
    found = re.search(r"^Error: no progress for (\d+) s: no answer from rank 0\n\Z", error, re.M)
    assert process.returncode == 1 and found and int(found[1]) < 20, error


def test_a_stuck_rank_ends_although_its_message_cannot_be_printed():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    # As in process_group, an exception in the thread would not end the process.
    call = "ddp_setup._watch_ranks("
    assert call in WATCH
    in_a_thread = WATCH.replace(call, f"ddp_setup._in_thread(lambda: {call}")
    in_a_thread += ")\nthreading.Event().wait(60)\nsys.exit(7)"
    command = [sys.executable, "-c", in_a_thread, f"{store.port}", "nccl", "0.5"]
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(command, stderr=writer, cwd=ROOT, timeout=100)
    os.close(writer)
    assert ended.returncode == 1 and store.add("reported", 0) == 1


def test_beside_nccl_a_rank_that_waits_in_a_group_of_gloo_is_noticed(tmp_path):
    run_on_ranks(ranks.wait_in_gloo_beside_nccl, 2, f"{tmp_path}")
    assert (tmp_path / "seen").read_text() == "[False, True]"


def test_pythons_import_system_does_not_count_as_the_program():
    code = compile("inspect(thread)", "<frozen importlib._bootstrap>", "eval")
    names = {"inspect": ddp_setup._program_lines, "thread": threading.get_ident()}
    lines, here = eval(code, names), sys._getframe().f_lineno
    assert lines.split(" < ")[0] == f"{Path(__file__).name}:{here}"


def test_the_innermost_three_lines_of_a_program_are_shown_and_without_any_a_library():
    def inspect(calls: int) -> str:
        if calls:
            return inspect(calls - 1)
        return ddp_setup._program_lines(threading.get_ident())

    assert re.fullmatch(r"(test_ddp_setup\.py:\d+( < )?){3}", inspect(5))
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert ddp_setup._program_lines(thread.ident) == "a library"
    finally:
        end.set()
        thread.join()


def test_a_rank_that_works_while_another_waits_for_it_is_named_with_a_line_of_its_work(runs):
    ended = runs("rank 1 works")
    waits, works = line_of("dist.barrier()  # here the others"), line_of("# here rank 1 works", -2)
    [line] = ended.lines()
    number = int(works.split(":")[1])
    assert ended.codes == [1] and line in [
        f"Error: no progress for 4 s: rank 0 at {waits}, rank 1 at {works.split(':')[0]}:{n}"
        for n in range(number, number + 3)
    ]


@pytest.mark.parametrize("run", HEALTHY)
def test_work_without_collectives_may_take_longer_than_the_timeout(runs, run):
    ended = runs(run)
    assert ({*ended.codes}, ended.lines()) == ({0}, [])


def test_when_the_store_is_lost_with_rank_0_a_rank_that_cannot_notice_it_ends_too(runs):
    ended = runs("lost_store")
    assert ended.codes == [-signal.SIGKILL, 1]
    assert ended.lines() == ["Error: no progress for 4 s: no answer from rank 0"]


def test_work_in_wait_together_and_from_rank_zero_may_take_longer_than_the_timeout(runs):
    ended = runs("longer")
    assert ended.lines() == [] and ended.codes == [0]
    rank_0, rank_1 = (json.loads((ended.folder / f"{rank}.json").read_text()) for rank in "01")
    assert rank_0["made"] == rank_1["made"] == 0  # Rank 0 made it, and both ranks have it.
    assert rank_0["own"] == "KeyError('key')" and rank_1["own"] == "slept"
    assert (
        rank_0["waited"] > 6.5
    )  # Its call fails at once, but the error comes when rank 1 has ended too.


def test_sys_exit_without_a_code_leaves_the_group_normally(runs):
    ended = runs("longer")
    assert ended.lines() == [] and ended.codes == [0]
    assert all(
        json.loads((ended.folder / f"{rank}.json").read_text())["left the group"] for rank in "01"
    )


def test_a_killed_rank_is_named_with_its_signal_and_the_other_rank_ends(runs):
    ended = runs("killed")
    assert ended.codes == [1] and ended.lines() == ["spawn: rank 1 was killed by SIGKILL"]


def test_a_rank_that_hangs_after_another_has_ended_is_killed_and_named(runs):
    ended = runs("never_ends")
    assert ended.codes == [1] and ended.lines() == [
        "spawn: rank 1 had not ended 3 s after another rank"
    ]


@pytest.mark.parametrize(
    "codes, reported, expected",
    [
        ([0, 0], False, 0),
        ([3, -15], False, "rank 0 ended with exit code 3"),
        ([-15, 3], False, "rank 0 was killed by SIGTERM"),
        ([3, 3], False, 3),
        ([0, 5, 3], False, "rank 1 ended with exit code 5"),
        ([0, 5, 3], True, 5),
        ([-9], False, "rank 0 was killed by SIGKILL"),
        ([-9, -9], False, "rank 0 was killed by SIGKILL"),
        ([-15, 1], True, 128 + 15),  # The rank that was killed ended first.
        ([0, 130], False, 130),
        ([0, -signal.SIGINT], False, 130),
        ([5, 130], False, "rank 0 ended with exit code 5"),
    ],
    ids=str,
)
def test_the_exit_codes_of_the_ranks_and_whether_one_has_reported_decide_the_result_of_spawn(
    codes, reported, expected
):
    ended, store = (
        [SimpleNamespace(poll=lambda code=code: code) for code in codes],
        dist.HashStore(),
    )
    if reported:
        store.add("0/group 0/reported", 1)
    try:
        result = ddp_setup._wait_for_ranks(ended, lambda: False, 60, store)
    except ChildProcessError as error:
        result = f"{error}"
    assert result == expected


@pytest.mark.parametrize("codes, stopped", [([-15, -15], 143), ([-15, 0], 143), ([0, -15], 143)])
def test_a_rank_that_ends_by_the_sigterm_of_spawn_is_no_error(codes, stopped):
    ended = [SimpleNamespace(poll=lambda code=code: code) for code in codes]
    assert ddp_setup._wait_for_ranks(ended, lambda: True, 60, dist.HashStore()) == stopped


@pytest.fixture
def wait_for_ranks(monkeypatch):
    """Return a function that calls _wait_for_ranks for ranks that end with a code after a time.

    It returns the result or the error, and the seconds until then, by a clock that costs no time.
    """
    now = [0.0]
    clock = SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds)
    )
    monkeypatch.setattr(ddp_setup, "time", clock)

    def wait(ranks, store, timeout=60.0, stopped=False):
        ranks = [
            SimpleNamespace(
                poll=lambda code=code, end=end: code if now[0] >= end else None,
                terminate=lambda: None,
            )
            for code, end in ranks
        ]
        try:
            result = ddp_setup._wait_for_ranks(ranks, lambda: stopped, timeout, store)
        except ChildProcessError as error:
            result = f"{error}"
        return result, round(now[0])

    return wait


@pytest.mark.parametrize("reporter", [None, 0, 1])
@pytest.mark.parametrize("timeout", [4.0, 60.0])
def test_a_rank_that_is_killed_before_it_has_printed_the_error_is_named(
    reporter, timeout, wait_for_ranks
):
    store = dist.HashStore()
    store.add("0/group 0/reported", 1)
    store.set(f"0/group 0/reporter {reporter}", "")
    killed = "rank 0 had not ended 4 s after another rank"
    result = wait_for_ranks([(0, 60), (5, 0)], store, timeout)
    assert result == (5 if reporter != 0 else killed, 4)


@pytest.mark.parametrize("timeout", [1.0, 4.0])
def test_a_rank_that_hangs_after_the_end_of_another_is_named(timeout, wait_for_ranks):
    killed = f"rank 1 had not ended {timeout:g} s after another rank"
    assert wait_for_ranks([(0, 0), (0, 60)], dist.HashStore(), timeout) == (killed, timeout)


def test_after_a_stop_signal_a_rank_may_save_for_longer_than_others(wait_for_ranks):
    assert wait_for_ranks([(3, 20), (3, 0)], dist.HashStore(), stopped=True) == (3, 20)


def test_a_failure_does_not_prolong_the_timeout(wait_for_ranks):
    result = wait_for_ranks([(0, 0), (5, 0.5), (0, 60)], dist.HashStore(), timeout=1.0)
    assert result == ("rank 2 had not ended 1 s after another rank", 1)


@pytest.mark.parametrize("code", [3, -signal.SIGTERM])
def test_a_rank_that_is_killed_after_a_stop_signal_is_named(code, wait_for_ranks):
    killed = "rank 1 had not ended 60 s after another rank", 60
    assert wait_for_ranks([(code, 0), (0, 100)], dist.HashStore(), stopped=True) == killed


def test_sys_exit_of_one_rank_with_a_code_is_named_once(runs):
    """By the parent process, unless the machine is so busy that rank 0 is first, after 1 s."""
    ended = runs("exit_7")
    assert (ended.codes, ended.lines()) in [
        ([1], ["spawn: rank 1 ended with exit code 7"]),
        ([7], ["rank 0: no answer from rank 1 (connection lost)"]),
    ]


def test_a_second_ctrl_c_to_one_rank_only_ends_all_without_a_message(runs):
    ended = runs("second_ctrl_c")
    assert (ended.codes, ended.lines()) == ([130], [])


def test_after_sys_exit_of_one_rank_without_a_code_the_rank_that_waits_names_it(runs):
    ended = runs("exit_0")
    assert ended.codes == [1] and ended.lines() == [
        "rank 0: no answer from rank 1 (connection lost)"
    ]


def test_without_a_launcher_a_rank_may_begin_its_next_group_before_rank_0_has_left_the_last(runs):
    ended = runs("two_alone")
    assert (ended.codes, ended.lines()) == ([0, 0], [])


@pytest.mark.parametrize(
    "run, line",
    [
        ("second_error", "rank 1: in the second group"),
        ("second_killed", "spawn: rank 1 was killed by SIGKILL"),
        ("second_alone", "rank 1: in the second group"),  # Rank 0 serves the store twice.
    ],
)
def test_an_error_in_a_second_group_is_reported_although_the_first_group_failed_too(
    runs, run, line
):
    ended = runs(run)
    assert {*ended.codes} == {1} and ended.lines() == [line]


def test_a_keyboard_interrupt_in_a_rank_is_not_a_success():
    assert call.spawn(ranks.raise_keyboard_interrupt, 1) == 130


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="has no fork")
def test_processes_that_a_spawned_rank_starts_inherit_the_handlers_of_stop_signals():
    assert call.spawn(ranks.interrupt_a_process_that_a_rank_has_started, 1) == 0


def test_an_exception_that_a_rank_does_not_catch_is_printed(capfd):
    assert call.spawn(ranks.raise_without_catching, 1) == 1
    assert "ValueError: nobody catches this" in capfd.readouterr().err


# ------------------------------------------------------------------------------- around a whole run


@contextmanager
def two_ranks(name: str, folder: Path, launcher: list[str] = SPAWN) -> Iterator[subprocess.Popen]:
    """Yield the parent process of two ranks that run `name`, when both are in their process group."""
    command = [*launcher, name, str(folder)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, **START) as parent:
        try:
            wait_for(
                lambda: {"0 is up", "1 is up"} <= {path.name for path in folder.iterdir()},
                "the ranks",
                60,
            )
            yield parent
        finally:
            parent.kill()


def family(pid: int) -> set[int]:
    """Return the ids of a process and of all its descendants that still run."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):  # It has ended meanwhile.
            continue
        if state not in "ZX":
            parents[int(stat.parent.name)] = int(parent)
    found = {pid} & parents.keys()
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def listening(pids: set[int]) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Return the addresses at which these processes wait for TCP connections."""
    sockets = {os.readlink(handle) for pid in pids for handle in Path(f"/proc/{pid}/fd").iterdir()}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in sockets:
                words = bytes.fromhex(
                    local.split(":")[0]
                )  # in groups of four bytes, each in reverse order
                address = ipaddress.ip_address(
                    b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                )
                found.append(getattr(address, "ipv4_mapped", None) or address)
    return found


@linux
def test_ranks_listen_only_on_loopback_and_stop_without_an_error_when_the_parent_gets_a_signal(
    tmp_path,
):
    with two_ranks("wait_for_stop", tmp_path) as parent:
        addresses = listening(family(parent.pid))
        assert len(addresses) >= 3  # that of the store, and one per rank
        assert all(address.is_loopback for address in addresses)
        parent.terminate()
        errors = parent.communicate(timeout=600)[1].decode()
        assert parent.returncode == 3 and Ended(tmp_path, [3], errors).lines() == [], errors
    assert {path.name for path in tmp_path.iterdir()} >= {"0 got the signal", "1 got the signal"}


@linux
@pytest.mark.parametrize(
    "launcher, name",
    [
        (SPAWN, "compute_without_end"),
        (SPAWN, "prepare_without_end"),
        ([*RANK, "spawn_in_a_shell"], "compute_without_end"),
        (TORCHRUN, "compute_without_end"),
    ],
    ids=["spawn", "spawn before process_group", "spawn with a shell", "torchrun"],
)
def test_when_the_parent_is_killed_no_rank_is_left(tmp_path, launcher, name):
    with two_ranks(name, tmp_path, launcher) as parent:
        everyone = family(parent.pid)
        assert len(everyone) >= 3
        parent.kill()
        parent.wait()
        wait_for(lambda: not any(family(pid) for pid in everyone), "the ranks to end", 5)


def test_a_process_whose_parent_has_ended_already_exits_at_once():
    program = f"import ddp_setup; ddp_setup._die_with_parent({os.getpid()} + 1); print('alive')"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, **START)
    assert (ran.returncode, ran.stdout) == (1, ""), ran
