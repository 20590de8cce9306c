"""Run a script as one or several ranks, in forks of a process that has imported torch: they start in a moment."""

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory

import torch.distributed as dist

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch._dynamo", "forks"])


def start(script: Path, folder: Path, ranks: int, args: list[str], env: dict) -> CompletedProcess:
    """Run a script in `folder`. The exit code is that of the first rank that has one, or 0."""
    # As torchrun does, serve the store in the parent, at a port that nobody else can take.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with TemporaryDirectory() as outputs:
        common = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1"}
        common |= {"MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True, **env}
        processes = []
        for rank in range(ranks):
            own = {"RANK": rank, "LOCAL_RANK": rank, **common}
            own = own if ranks > 1 else {"WORLD_SIZE": 1, **env}
            variables = {name: f"{value}" for name, value in own.items()}
            given = script, folder, outputs, args, variables
            processes.append(FORKS.Process(target=be_rank, args=given))
            processes[-1].start()
        for process in processes:
            process.join(120)
        hung = [process for process in processes if process.exitcode is None]
        for process in hung:
            process.kill()
        assert not hung, f"{script} hangs"
        texts = [Path(outputs, name).read_text() for name in ("1", "2")]
    codes = [process.exitcode for process in processes if process.exitcode]
    return CompletedProcess(script, [*codes, 0][0], *texts)


def be_rank(script: Path, folder: Path, outputs: str, args: list[str], env: dict) -> None:
    """Run the script as the main module."""
    os.setpgid(0, 0)  # so that a signal to the process group reaches only this rank
    for number in (1, 2):
        path = Path(outputs, f"{number}")
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which the fork server ignores
    os.chdir(folder)
    os.environ.update(env)
    sys.argv, sys.path[0] = [f"{script}", *args], f"{script.parent}"
    del sys.modules["__main__"]
    try:
        runpy.run_path(f"{script}", run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # which multiprocessing does not call
