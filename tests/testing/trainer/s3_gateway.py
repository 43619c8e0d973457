"""Run a real S3 server (versitygw) over a folder on loopback, behind a proxy that injects faults.

    with run_gateway(tmp_path, monkeypatch) as server:  # has the bucket "bucket"; clients use the environment
        server.inject_fault(Fault(status=503, times=2, method="PUT"))
        ...
        assert server.objects("bucket")["key"] == b"..."

The first remaining fault that fits a request acts on it. `requests` lists all requests.
"""

import contextlib
import http.client
import os
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tests.testing.suite.loopback_http import LoopbackServer
from trainium_devcluster.binaries import S3_PROGRAMS, Program, ensure_binaries

ACCESS_KEY = "AKIDLOOPBACKTEST0000"
SECRET_KEY = "loopback/secret/that/must/never/be/logged"
_START_SECONDS = 60.0
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Request:
    """One request, as received."""

    method: str
    bucket: str
    key: str
    query: dict[str, str]
    length: int


@dataclass(slots=True)
class Fault:
    """A fault of the next `times` requests that fit."""

    status: int | None = None
    """Answer with this status instead of serving."""
    code: str = "InternalError"
    """S3's error code that goes with the status."""
    stall: threading.Event | None = None
    """Do not answer before this is set, and then close the connection; a client that gives up sees a timeout."""
    after: bool = False
    """Serve the request first: its effect remains, and the client receives the fault."""
    cut: int | None = None
    """Close the connection after this many bytes of the answer's body."""
    method: str | None = None
    fits: Callable[[Request], bool] = lambda _: True
    times: float = 1

    def applies_to(self, request: Request) -> bool:
        """Return whether the fault acts on this request, and count it."""
        if self.times <= 0 or (self.method is not None and self.method != request.method) or not self.fits(request):
            return False
        self.times -= 1
        return True


class S3Gateway:
    """The server; a context manager."""

    def __init__(self, folder: Path) -> None:
        """Keep buckets below `folder`, which may be shared with other files."""
        self._folder = folder / f"s3-{secrets.token_hex(4)}"
        self._buckets, self._metadata = self._folder / "buckets", self._folder / "metadata"
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ("", 0)
        """Host and port of the server behind the proxy."""
        self.requests: list[Request] = []
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._proxy = LoopbackServer(type("Handler", (_Proxy,), {"s3": self}))
        self._running = self._proxy.running()

    def __enter__(self) -> Self:
        for path in (self._buckets, self._metadata):
            path.mkdir(parents=True)
        program = ensure_binaries(programs=S3_PROGRAMS).find_path(Program.VERSITYGW)
        for _ in range(_ATTEMPTS):
            if self._start(program):
                self._running.__enter__()
                return self
        raise RuntimeError((self._folder / "log").read_text())

    def __exit__(self, *_: object) -> None:
        for fault in self._faults:
            if fault.stall is not None:
                fault.stall.set()
        self._running.__exit__(None, None, None)
        self._stop()

    def environment(self) -> dict[str, str]:
        """Return the variables by which a client finds the server and its credentials."""
        return {
            "AWS_ENDPOINT_URL": self._proxy.url,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        }

    def create_bucket(self, name: str) -> None:
        """Create an empty bucket."""
        (self._buckets / name).mkdir()

    def objects(self, bucket: str) -> dict[str, bytes]:
        """Return the objects of a bucket by key."""
        root = self._buckets / bucket
        paths = {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}
        return {key: path.read_bytes() for key, path in paths.items() if not key.startswith(".sgwtmp")}

    def uploads(self, bucket: str) -> list[str]:
        """Return the multipart uploads that were neither completed nor aborted."""
        return [path.name for path in (self._buckets / bucket / ".sgwtmp/multipart").glob("*/*")]

    def put(self, bucket: str, key: str, data: bytes, modified: float | None = None) -> None:
        """Store an object without a request, as if written at `modified`, Unix seconds."""
        path = self._buckets / bucket / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        if modified is not None:
            os.utime(path, (modified, modified))

    def inject_fault(self, fault: Fault) -> Fault:
        """Inject a fault from now on."""
        with self._lock:
            self._faults.append(fault)
        return fault

    def record(self, request: Request) -> Fault | None:
        """Record a request; return the fault that acts on it."""
        with self._lock:
            self.requests.append(request)
            return next((fault for fault in self._faults if fault.applies_to(request)), None)

    def _start(self, program: Path) -> bool:
        """Start at a free port; return False if another process has taken the port."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address: tuple[str, int] = probe.getsockname()
        self.address = address
        command = [str(program), "--port", f"{address[0]}:{address[1]}", "--keep-alive", "--quiet", "posix"]
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--sidecar", str(self._metadata), str(self._buckets)],
                env=os.environ | {"ROOT_ACCESS_KEY_ID": ACCESS_KEY, "ROOT_SECRET_ACCESS_KEY": SECRET_KEY},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + _START_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(address, 1.0):
                return True
            time.sleep(0.02)
        self._stop()
        return False

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def run_gateway(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Gateway]:
    """Run a server with the bucket `bucket`, and set the environment of this process to use it."""
    with S3Gateway(folder) as server:
        server.create_bucket("bucket")
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield server


class _Proxy(BaseHTTPRequestHandler):
    """One connection; it forwards requests unchanged, with their signatures, unless a fault acts on them."""

    s3: S3Gateway
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # head and body in one packet avoid a delayed acknowledgement

    def log_message(self, *args: Any) -> None:
        """Log nothing."""

    def _handle(self) -> None:
        parts = urlsplit(self.path)
        _, bucket, *rest = unquote(parts.path).split("/", 2)
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.s3.record(Request(self.command, bucket, rest[0] if rest else "", query, len(body))) or Fault()
        if fault.stall is not None:
            fault.stall.wait()
            self.close_connection = True
            return
        if fault.status is None:
            self._answer(*self._forward(body), cut=fault.cut)
            return
        if fault.after:
            self._forward(body)
        text = f"<Error><Code>{fault.code}</Code><Message>{fault.code} (from the test)</Message></Error>"
        self._answer(fault.status, {"Content-Type": "application/xml"}, text.encode())

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle  # noqa: N815 - the names that the library calls

    def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        with contextlib.closing(http.client.HTTPConnection(*self.s3.address)) as server:
            server.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("expect", "connection"):
                    server.putheader(name, value)
            server.endheaders(body)
            answer = server.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()

    def _answer(self, status: int, headers: dict[str, str], data: bytes, cut: int | None = None) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:cut])
        if cut is not None:
            self.close_connection = True
