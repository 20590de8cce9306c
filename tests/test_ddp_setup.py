"""Tests of ddp_setup.py: the launch environment, the process group under each launcher, failures, signals.

What the ranks do is in ranks.py.
"""

import ipaddress
import multiprocessing
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import ranks
import torch
import torch.distributed as dist
from conftest import ENVIRONMENT, ROOT, free_port, launch_variables, wait_for
from torch import nn

import ddp_setup

START = {"cwd": ROOT / "tests", "env": {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}}
TORCHRUN = [sys.executable, *"-m torch.distributed.run --standalone --nproc-per-node 2".split()]
# Processes of this kind have imported torch when they start.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "torch._dynamo"])  # the first optimizer imports it
LOST = ddp_setup.LOST, ""  # exit code and stderr of a rank that has only lost the others
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and prctl of Linux")

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
        {"WORLD_SIZE": "1"},
        {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "23456"},
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
    assert "one process per machine, LOCAL_RANK=0 and LOCAL_WORLD_SIZE=1" in str(caught.value)


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
        {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
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


def test_without_a_device_the_best_one_is_used(alone):
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    with ddp_setup.process_group() as world:
        assert world.device.type == ("cuda" if cuda else "mps" if mps else "cpu")


# ------------------------------------------------------------------------------------ several ranks


@contextmanager
def forks(name, *args, size=2, serve=True, port=None, **variables):
    """Start ranks.NAME on `size` ranks. Yield the processes, and a function that returns their ends.

    serve: this process serves the store of the ranks, as torchrun does. Otherwise rank 0 does it.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = port or (store.port if serve else free_port())
    variables["TORCHELASTIC_USE_AGENT_STORE"] = f"{serve}"
    processes = []
    with TemporaryDirectory() as folder:

        def ends():
            """Return (exit code, stderr) of each rank, without the messages of torch's C++ code."""
            for process in processes:
                process.join(100)
            texts = [Path(folder, f"{rank}").read_text() for rank in range(size)]
            begins = re.compile("^(?:Error|WARNING|Traceback).*\n", re.M)
            found = ["".join(begins.findall(text)) for text in texts]
            return [(process.exitcode, text) for process, text in zip(processes, found)]

        try:
            for rank in range(size):
                more = {**launch_variables(rank, size, port), **variables}
                if name == "spawn":  # This process is no rank: it starts them.
                    more = {}
                arguments = f"{folder}/{rank}", more, name, *args
                processes.append(FORKS.Process(target=ranks.run, args=arguments))
                processes[-1].start()
            yield processes, ends
        finally:
            for process in processes:
                process.kill()
                process.join()


def run(name, *args, **how):
    """Run ranks.NAME on several ranks to its end, and return (exit code, stderr) of each rank."""
    with forks(name, *args, **how) as (_, ends):
        return ends()


DONE = (0, "")


def test_all_ranks_get_the_same_results_errors_flags_and_weights():
    assert run("agree") == [DONE] * 2


def test_a_new_replica_continues_bitwise_exactly_on_any_number_of_ranks():
    """From three ranks on, DistributedDataParallel alone rounds the first step of a replica differently."""
    assert run("train_in_two_parts_on_four_three_and_two_ranks", size=4) == [DONE] * 4


@pytest.mark.parametrize(
    "name",
    [
        "replicate_complex_parameters_without_grad",
        "average_sparse_gradients",
        "average_gradients_of_branches_that_are_not_used",
    ],
)
def test_a_replica_can_have_unusual_parameters(name):
    assert run(name) == [DONE] * 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="SyncBatchNorm needs one GPU per rank")
def test_sync_batch_norm_uses_the_statistics_of_all_ranks():
    assert ddp_setup.spawn(ranks.compare_batch_norm_statistics, 2) == 0


def test_no_rank_leaves_the_group_before_all_have_joined_and_each_group_is_a_new_one():
    assert run("join_and_leave") == [DONE] * 2


def test_work_in_from_rank_zero_can_take_longer_than_the_timeout_and_does_not_lose_a_stop_signal(
    tmp_path,
):
    with forks("work_longer_than_the_timeout", f"{tmp_path}") as (processes, ends):
        ready(tmp_path)
        for process in processes:
            process.terminate()
        assert ends() == [(3, "")] * 2


@pytest.mark.parametrize("launcher_serves", [True, False])
def test_gloo_listens_on_loopback_only_on_a_single_machine_and_the_user_can_choose(launcher_serves):
    loopback = "lo" if sys.platform == "linux" else None
    assert run("listen", loopback, serve=launcher_serves) == [DONE] * 2
    if launcher_serves and loopback:  # gloo takes a list of interfaces.
        assert run("listen", "lo,lo", GLOO_SOCKET_IFNAME="lo,lo") == [DONE] * 2
        # as if each rank were on a machine of its own
        assert run("listen", None, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1") == [DONE] * 2


SPAWNED_BY_TORCH = """
import torch, ddp_setup
def train(rank):
    with ddp_setup.process_group("cpu") as world:
        print(world.size)
if __name__ == "__main__":
    torch.multiprocessing.spawn(train, nprocs=2)
"""


def test_children_of_multiprocessing_without_launch_variables_do_not_train_alone(tmp_path):
    """Otherwise there are two worlds of one rank each, and exit code 0."""
    (tmp_path / "script.py").write_text(SPAWNED_BY_TORCH)
    for more, code in (({}, 1), ({"WORLD_SIZE": "1"}, 0)):
        start = {**START, "env": START["env"] | more}
        ran = subprocess.run(
            [sys.executable, tmp_path / "script.py"], capture_output=True, text=True, **start
        )
        assert (ran.returncode, ran.stdout) == (code, "" if code else "1\n1\n"), ran
        line = r"ValueError: multiprocessing started .* ddp_setup.spawn, .* set WORLD_SIZE=1\n"
        assert not code or re.search(line, ran.stderr), ran


# ----------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("case", ["nothing listens", "no answer", "rank 0 waits", "rank 1 waits"])
def test_ranks_that_cannot_connect_say_so_in_one_line(case):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1] if case == "no answer" else None
        rank = "0" if case == "rank 0 waits" else "1"
        serve = case == "rank 1 waits"  # The store is there, but rank 0 is not.
        more = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        [(code, text)] = run("join", 1, size=1, serve=serve, port=port, **more)
    line = rf"Error: rank {rank}: not all 2 ranks connected to 127\.0\.0\.1:\d+ \(.+\)\n"
    assert code == 1 and re.fullmatch(line, text), text


def catches(pid, number):
    """Return whether a process has a handler for a signal."""
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1]
    return int(caught, 16) >> (number - 1) & 1


@linux
@pytest.mark.parametrize("number", sorted(ddp_setup.STOP_SIGNALS))
def test_a_stop_signal_ends_a_rank_that_waits_for_others_to_join(tmp_path, number):
    """There, Python's handlers do not run, and the timeout can be ten minutes."""
    with forks("wait_for_others", f"{tmp_path}", size=1, WORLD_SIZE="2") as ([process], ends):
        ready(tmp_path, 1)
        wait_for(lambda: not catches(process.pid, number), "the join")
        os.kill(process.pid, number)
        assert ends() == [(-number, "")]


FAILURES = {  # what the last rank does -> its end, and that of the others
    "raise": ((1, "Error: invalid literal for int() with base 10: 'the cause'\n"), LOST),
    "raise an error like gloo's": ((1, "Error: no file /gloo/rows.pt\n"), LOST),
    "kill": ((-signal.SIGKILL, ""), LOST),
    "exit 3": ((3, ""), LOST),
    "exit 0": ((0, ""), LOST),
}


@pytest.mark.parametrize("how", FAILURES)
def test_if_a_rank_fails_the_others_end_and_only_its_own_error_is_printed(how):
    failed, lost = FAILURES[how]
    assert run("fail", how, size=3) == [lost, lost, failed]


def test_ranks_that_wait_in_vain_say_so_after_the_timeout():
    with forks("fail", "stop", 4, size=3) as (processes, ends):
        for process in processes[:2]:
            process.join(60)
        processes[2].kill()
        line = "Error: rank {}: waited 4 s in vain for another rank\n"
        # The first to end breaks its connection to the other, which prints nothing then.
        zero, one, _ = ends()
        assert (
            (1, line.format(0)) == zero
            and one in (LOST, (1, line.format(1)))
            or ((1, line.format(1)) == one and zero == LOST)
        )


def test_an_error_that_all_ranks_raise_together_is_printed_by_rank_0_only():
    text = "Error: wrapped: invalid literal for int() with base 10: 'on rank 1'\n"
    assert run("fail_together") == [(2, text), (2, "")]


def test_a_device_that_is_not_there_is_reported_by_one_rank_of_each_machine():
    [(code, text), other] = run("choose_a_device_that_is_not_there")
    assert (code, other) == (1, (1, "")) and text.count("device 'tpu' is not available") == 1


def test_torchrun_can_start_the_ranks_again_and_lost_ranks_print_one_line(tmp_path):
    command = [*TORCHRUN, "--max-restarts", "2", "-m", "ranks", "fail_in_two_starts", f"{tmp_path}"]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=300, **START)
    assert ended.returncode == 0, ended
    assert {path.name for path in tmp_path.iterdir()} == {"rank 0 in start 2", "rank 1 in start 2"}
    errors = re.findall("^Error.*", ended.stderr, re.M)
    # torchrun often ends rank 0 before it can print its line.
    assert len(errors) <= 1 and all("rank 0: lost the connection" in line for line in errors)


# -------------------------------------------------------------------------------------------- spawn


def test_spawn_returns_0_and_the_ranks_have_the_signal_mask_of_the_caller(capfd):
    blocked = {signal.SIGUSR1}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        assert ddp_setup.spawn(ranks.end_with_a_daemon, 2, sorted(blocked)) == 0
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "how, expected",
    [
        ("exit 3", 3),
        ("Ctrl-C", 130),
        ("kill", "rank 1 was killed by SIGKILL"),
        ("exit 0", "rank 0 lost the connection to the other ranks"),
        ("raise", "ValueError: invalid literal for int() with base 10: 'the cause'"),
    ],
)
def test_spawn_names_the_rank_that_failed_first_or_returns_its_exit_code(how, expected, capfd):
    try:
        result = ddp_setup.spawn(ranks.fail, 2, how)
    except ChildProcessError as error:
        result = f"{error}"
    except torch.multiprocessing.ProcessRaisedException as error:
        result = f"{error}".splitlines()[-1]
    assert result == expected and capfd.readouterr().err == ""


@pytest.mark.parametrize("size", [0, -1])
def test_spawn_refuses_to_start_no_process(size):
    with pytest.raises(ValueError, match=f"size is {size}; spawn needs at least 1 process"):
        ddp_setup.spawn(print, size)


def test_a_rank_cannot_spawn(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="a launcher has started this process"):
        ddp_setup.spawn(print, 2)
    monkeypatch.setenv("WORLD_SIZE", "1")  # as in a PyTorchJob with one worker
    assert ddp_setup.spawn(ranks.join_and_leave, 2) == 0


@pytest.mark.parametrize("where", ["-c", "-"])  # as in a notebook; from stdin
def test_a_function_that_new_processes_cannot_import_gives_one_line_that_says_what_to_do(where):
    program = "import ddp_setup\ndef f(): pass\ntry: ddp_setup.spawn(f, 2)\nexcept ValueError as e: print(e)"
    command = [sys.executable, where, *([program] if where == "-c" else [])]
    ran = subprocess.run(
        command, input=program, capture_output=True, text=True, timeout=60, **START
    )
    assert ran.stdout.endswith("write it into a .py file, and import it from there\n"), ran
    assert ran.stdout.count("\n") == 1 and ran.stderr == ""


def ready(folder, size=2):
    """Wait until all ranks are up, and return their process ids."""
    wait_for(lambda: len([*folder.glob("*.up")]) == size, "the ranks", 100)
    return [int(path.read_text()) for path in sorted(folder.glob("*.up"))]


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def listening(pids):
    """Return the addresses at which these processes wait for TCP connections."""
    sockets = {os.readlink(handle) for pid in pids for handle in Path(f"/proc/{pid}/fd").iterdir()}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in sockets:
                # The address is in groups of four bytes, each in reverse order.
                words = bytes.fromhex(local.split(":")[0])
                groups = [words[i : i + 4][::-1] for i in range(0, len(words), 4)]
                address = ipaddress.ip_address(b"".join(groups))
                yield getattr(address, "ipv4_mapped", None) or address


@contextmanager
def spawning(name, folder):
    """Start a process that starts two ranks. Yield it, the function that returns its end, and the ranks' ids."""
    with forks("spawn", name, f"{folder}", size=1) as ([parent], ends):
        yield parent, ends, ready(folder)


@linux
def test_after_a_stop_signal_to_the_parent_all_ranks_stop_and_until_then_listen_on_loopback_only(
    tmp_path,
):
    with spawning("wait_for_stop", tmp_path) as (parent, ends, pids):
        addresses = [*listening([parent.pid, *pids])]
        assert len(addresses) >= 3  # that of the store, and one per rank
        assert all(address.is_loopback for address in addresses)
        parent.terminate()
        assert ends() == [(3, "")]


@linux
@pytest.mark.parametrize("name", ["wait_for_stop", "prepare_without_end"])
def test_when_the_parent_is_killed_no_rank_is_left(tmp_path, name):
    with spawning(name, tmp_path) as (parent, _, pids):
        parent.kill()
        wait_for(lambda: not any(map(runs, pids)), "the ranks to end", 5)


@linux
def test_a_second_ctrl_c_ends_the_parent_and_the_ranks(tmp_path):
    with spawning("never_stop", tmp_path) as (parent, ends, pids):
        for _ in range(2):
            time.sleep(0.3)
            os.kill(parent.pid, signal.SIGINT)
        assert ends() == [(130, "")]
        wait_for(lambda: not any(map(runs, pids)), "the ranks to end", 5)


def test_a_rank_that_does_not_stop_after_a_stop_signal_is_killed_and_named(tmp_path):
    with spawning("never_stop", tmp_path) as (parent, ends, _):
        parent.terminate()
        assert ends() == [(1, "Error: rank 1 did not end after a stop signal, and was killed\n")]


def test_a_rank_that_a_stop_signal_ends_is_no_error(tmp_path):
    with spawning("prepare_without_end", tmp_path) as (parent, ends, _):
        parent.terminate()
        assert ends() == [(128 + signal.SIGTERM, "")]


@linux
def test_when_torchrun_is_killed_no_rank_is_left(tmp_path):
    command = [*TORCHRUN, "-m", "ranks", "wait_for_stop", f"{tmp_path}"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, **START) as torchrun:
        try:
            pids = ready(tmp_path)
        finally:
            torchrun.kill()
        wait_for(lambda: not any(map(runs, pids)), "the ranks to end", 5)


ORPHAN = """
import builtins, os, signal
parent, import_ = os.getpid(), builtins.__import__
if os.fork():
    signal.pause()

def import_and_kill_the_parent(name, *args, **more):
    if name == "torch" and os.getppid() == parent:
        os.kill(parent, signal.SIGKILL)
        while os.getppid() == parent:
            pass
    return import_(name, *args, **more)

builtins.__import__ = import_and_kill_the_parent
import ddp_setup
print("imported", flush=True)
with ddp_setup.process_group("cpu"):
    print("continues")
"""


@linux
@pytest.mark.parametrize("launcher", ["torchrun", "none"])
def test_only_a_worker_of_torchrun_ends_if_its_parent_has_ended_during_the_imports(launcher):
    more = {"TORCHELASTIC_RUN_ID": "a run"} if launcher == "torchrun" else {}
    start = {**START, "env": START["env"] | more}
    ran = subprocess.run([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True, **start)
    assert ran.stdout == "imported\n" + ("" if more else "continues\n")


@linux
def test_a_worker_that_was_forked_after_the_import_is_not_taken_for_an_orphan(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run")
    monkeypatch.setenv("WORLD_SIZE", "1")
    worker = multiprocessing.get_context("fork").Process(target=ranks.main, args=("join", 1))
    worker.start()
    worker.join(60)
    assert worker.exitcode == 0


# ------------------------------------------------------------------------------------- stop signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_stop_signal_is_noticed_and_its_handler_is_restored(number):
    assert number in ddp_setup.STOP_SIGNALS
    before = signal.getsignal(number)
    with pytest.raises(KeyError), ddp_setup.stop_signals() as stop_requested:
        assert not stop_requested()
        os.kill(os.getpid(), number)
        wait_for(stop_requested, "the signal", 10)
        raise KeyError  # as if an error had ended the block
    assert signal.getsignal(number) == before


def test_sighup_stays_ignored_where_nohup_has_ignored_it():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ddp_setup.stop_signals() as stop_requested:
            signal.raise_signal(signal.SIGHUP)
            assert not stop_requested()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="this system has no terminals")
def test_only_rank_0_prints_the_notice_and_only_for_ctrl_c_in_a_terminal(monkeypatch):
    def interrupt(rank: str, number: int, notice: str) -> None:
        monkeypatch.setenv("RANK", rank)
        with ddp_setup.stop_signals(notice) as stop_requested:
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
        interrupt("0", signal.SIGINT, "")
        interrupt_forked_child()
        interrupt("0", signal.SIGINT, "rank 0")
        os.write(controller, b"\x13")  # Ctrl-S; then a write would wait for ever
        wait_for(lambda: not select.select([], [terminal], [], 0)[1], "Ctrl-S")
        interrupt("0", signal.SIGINT, "a stopped terminal")
        os.write(controller, b"\x11")  # Ctrl-Q
        os.write(2, b"end")
        while not printed.endswith(b"end"):
            printed += os.read(controller, 1000)
    finally:
        os.dup2(stderr, 2)
        for file in (stderr, controller, terminal):
            os.close(file)
    assert printed.split(b"\r\n") == [b"", b"rank 0", b"end"]


def test_at_a_python_prompt_a_second_sigint_raises_keyboard_interrupt(monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(KeyboardInterrupt), ddp_setup.stop_signals() as stop_requested:
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(stop_requested, "the signal", 10)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)


def test_a_forked_child_can_be_terminated_and_its_signals_are_not_those_of_the_parent():
    """multiprocessing ends its children with SIGTERM, and then waits for them without a limit."""
    with ddp_setup.stop_signals() as stop_requested:
        reading, writing = os.pipe()
        if not (pid := os.fork()):
            os.write(writing, b"1")  # Python loses signals that arrive during a fork.
            for _ in range(20):
                time.sleep(1)
            os._exit(0)
        os.read(reading, 1)
        os.kill(pid, signal.SIGINT)  # A child, such as a DataLoader's worker, survives Ctrl-C.
        os.kill(pid, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGTERM
        assert not stop_requested()


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
    for number in (signal.SIGUSR1, signal.SIGHUP):  # as SLURM can
        os.kill(worker.pid, number)
    read += map(int, rows)
    print(read, stop_requested(), worker.exitcode or 0)
"""


def test_a_detached_worker_of_a_dataloader_survives_stop_signals():
    command = [sys.executable, "-c", WITH_A_DATALOADER]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=600, start_new_session=True, **START
    )
    assert (ran.returncode, ran.stdout) == (0, f"{[*range(9)]} True 0\n"), ran
