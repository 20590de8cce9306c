"""Fixtures for tests with an S3 server: a test file gets them by `pytest_plugins = ["s3_server"]`.

PYTEST_DONT_REWRITE: there is no assert here.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import ENVIRONMENT

SECRET = (
    "AKIAdoNotSayThis",
    "wJalrXUtnFEMI/K7MDENG/doNotSayThis",
)  # key and secret; tests check that no output has them


class Storage:
    """An S3 server on the loopback interface that injects faults.

    fault(method, path) decides what happens to a request: "500" or "503" (this answer), "cut" (the connection is closed
    in the middle of the request), "half" (it is closed in the middle of the answer), "slow", or "" (no fault).
    """

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.application = DomainDispatcherApplication(create_backend_app)
        self.server = make_server("127.0.0.1", 0, self, threaded=True)
        self.server.daemon_threads, self.server.block_on_close = (
            True,
            False,
        )  # because clients keep their connections open
        self.url = f"http://127.0.0.1:{self.server.port}"
        self.requests: list[tuple[str, str]] = []
        self.mend()
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def mend(self) -> None:
        self.fault: Callable[[str, str], str] = lambda method, path: ""

    def fail(self, fault: str, times: int = 10**9, method: str = "", path: str = "") -> None:
        """Inject `fault` into the next `times` requests with this method and with `path` in their path."""
        left = iter(range(times))

        def choose(its_method: str, its_path: str) -> str:
            meant = its_method.startswith(method) and path in its_path
            return fault if meant and next(left, None) is not None else ""

        self.requests.clear()
        self.fault = choose

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterator[bytes]:
        request = environ["REQUEST_METHOD"], f"{environ['PATH_INFO']}?{environ['QUERY_STRING']}"
        self.requests.append(request)
        fault = self.fault(*request)
        if fault == "slow":
            time.sleep(0.3)
        if fault in ("500", "503"):
            code = {"500": "InternalError", "503": "SlowDown"}[fault]
            start_response(f"{fault} {code}", [("Content-Type", "application/xml")])
            text = f"<Error><Code>{code}</Code><Message>{code}, injected</Message></Error>"
            yield text.encode() if request[0] != "HEAD" else b""
        elif fault == "cut":
            environ["wsgi.input"].read(min(100, int(environ.get("CONTENT_LENGTH") or 0)))
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            start_response("200 OK", [])
        else:
            answer = b"".join(self.application(environ, start_response))
            yield answer[: len(answer) // 2] if fault == "half" else answer
            if fault == "half":
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Storage]:
    """Start an S3 server with a bucket named "bucket". This process and the programs that tests start use it for s3://."""
    for package in ("moto", "flask", "s3fs"):
        pytest.importorskip(package, reason="needs moto[server] and s3fs")
    import s3fs

    storage = Storage()
    settings = {
        "AWS_ENDPOINT_URL": storage.url,
        "AWS_ACCESS_KEY_ID": SECRET[0],
        "AWS_SECRET_ACCESS_KEY": SECRET[1],
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
            patch.setitem(ENVIRONMENT, name, value)
        patch.setenv("AWS_MAX_ATTEMPTS", "2")  # of botocore, for each of the 5 attempts of s3fs
        patch.setitem(ENVIRONMENT, "AWS_MAX_ATTEMPTS", "1")
        patch.setitem(ENVIRONMENT, "XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        s3fs.S3FileSystem().mkdir("bucket")
        yield storage
    storage.server.shutdown()


@pytest.fixture
def s3(s3_server: Storage) -> Iterator[Storage]:
    s3_server.mend()
    yield s3_server
    s3_server.mend()
