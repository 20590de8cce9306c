"""Start run.py in a fork of a Python that has imported torch: the same program, a second sooner.

    python warm.py SOCKET        serve on that Unix socket, until standard input ends

A client sends the program's arguments and environment as JSON, with the two handles that are to be its standard
output and error. It gets the process number in one message, and the exit code (as subprocess has it) in another.
"""

import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def serve(path: str) -> None:
    import click  # noqa: F401
    import numpy  # noqa: F401
    import torch._dynamo  # noqa: F401  which the first optimizer imports
    import torch.distributed.checkpoint.state_dict  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that answer
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{path}.bound")
        listener.listen()
        os.rename(f"{path}.bound", path)  # whoever finds it is heard
        while listener in select.select([listener, sys.stdin], [], [])[0]:
            client, _ = listener.accept()
            with client:
                if os.fork() == 0:
                    listener.close()
                    answer(client)


def answer(client: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, (out, err), _, _ = socket.recv_fds(client, 1 << 20, 2)
    pid = os.fork()
    if pid == 0:
        client.close()
        become(json.loads(message), out, err)
    os.close(out)
    os.close(err)
    client.send(b"%d" % pid)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    client.send(b"%d" % code)
    os._exit(0)


def become(request: dict[str, object], out: int, err: int) -> None:
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = ["run.py", *request["args"]]
    sys.path[0] = f"{ROOT}"
    runpy.run_path(f"{ROOT / 'run.py'}", run_name="__main__")  # ends the process


class Process:
    """What conftest.Program uses of subprocess.Popen, for a program that the server started."""

    def __init__(self, server: str, args: list[str], env: dict[str, str], out: int, err: int):
        self.returncode: int | None = None
        self.client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.client.connect(server)
        socket.send_fds(self.client, [json.dumps({"args": args, "env": env}).encode()], [out, err])
        self.pid = int(self.client.recv(64))

    def poll(self) -> int | None:
        return self._code(socket.MSG_DONTWAIT)

    def wait(self) -> int:
        return self._code(0)

    def _code(self, flags: int) -> int | None:
        if self.returncode is None:
            try:
                self.returncode = int(self.client.recv(64, flags))
                self.client.close()
            except BlockingIOError:
                return None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(path: str, env: dict[str, str]) -> subprocess.Popen:
    """Start the server; it ends with this process."""
    return subprocess.Popen([sys.executable, __file__, path], cwd=ROOT, env=env, stdin=subprocess.PIPE)


if __name__ == "__main__":
    serve(sys.argv[1])
