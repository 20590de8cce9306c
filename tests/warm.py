"""Start a program in a fork of a Python process that has imported torch, which saves a second per start.

    python warm.py SOCKET        serve on this Unix socket until standard input ends

A client sends the path of the program, the arguments and the environment as JSON, together with the two file
descriptors for standard output and standard error. It receives the process id in one message and the exit code in
another.
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
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def serve(path: str) -> None:
    """Import torch, then fork once for each client."""
    import click  # noqa: F401
    import numpy  # noqa: F401
    import torch._dynamo  # noqa: F401  the first optimizer imports it
    import torch.distributed.checkpoint.state_dict  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children that answer
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{path}.bound")
        listener.listen()
        os.rename(f"{path}.bound", path)  # a client that finds this name can connect
        while listener in select.select([listener, sys.stdin], [], [])[0]:
            client, _ = listener.accept()
            with client:
                if os.fork() == 0:
                    listener.close()
                    answer(client)


def answer(client: socket.socket) -> None:
    """Start a program for a client, wait for it, and send the exit code."""
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


def become(request: dict[str, Any], out: int, err: int) -> None:
    """Turn this process into the program that the client asks for."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    # Those of the server could take a pipe for a file, because they looked at another one.
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    folder, name = os.path.split(request["program"])
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = [name, *request["args"]]
    sys.orig_argv = [sys.executable, *sys.argv]
    sys.path[:1] = [folder, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    runpy.run_path(request["program"], run_name="__main__")
    sys.exit()  # After this or an exception, Python shuts down as in a process that was not forked.


class Process:
    """A program that the server has started in the program's folder, with the methods of subprocess.Popen that the
    tests use.
    """

    def __init__(
        self, server: str, program: Path, args: list[str], env: dict[str, str], out: int, err: int
    ):
        self.returncode: int | None = None
        self.client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.client.connect(server)
        request = {"program": str(program), "args": args, "env": env}
        socket.send_fds(self.client, [json.dumps(request).encode()], [out, err])
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
    """Start the server. It ends when this process ends."""
    return subprocess.Popen(
        [sys.executable, __file__, path], cwd=ROOT, env=env, stdin=subprocess.PIPE
    )


if __name__ == "__main__":
    serve(sys.argv[1])
