"""A real S3 server (versitygw) over a folder, on loopback; `s3_server.py` is the double for what must go wrong.

with serving(tmp_path, monkeypatch) as server:      # has the bucket "bucket"; clients find it by the environment
    ...
    assert server.objects("bucket")["key"] == b"..."
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Self

from trainium_devcluster.binaries import S3_PROGRAMS, Program, ensure_binaries

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest

ACCESS_KEY = "AKIDLOOPBACKTEST0000"
SECRET_KEY = "loopback/secret/that/must/never/be/logged"
_START_SECONDS = 60.0
_ATTEMPTS = 5


@contextlib.contextmanager
def serving(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Gateway]:
    """Run a server with the bucket `bucket`, which this process and those that it starts find by their environment."""
    with S3Gateway(folder) as server:
        server.make_bucket("bucket")
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield server


class S3Gateway:
    """The server; a context manager."""

    def __init__(self, folder: Path) -> None:
        """Keep buckets below `folder`, which may be shared with other files."""
        self._folder = folder / f"s3-{secrets.token_hex(4)}"
        self._buckets, self._metadata = self._folder / "buckets", self._folder / "metadata"
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def __enter__(self) -> Self:
        for path in (self._buckets, self._metadata):
            path.mkdir(parents=True)
        program = ensure_binaries(programs=S3_PROGRAMS).path(Program.VERSITYGW)
        for _ in range(_ATTEMPTS):
            if self._start(program):
                return self
        raise RuntimeError((self._folder / "log").read_text())

    def __exit__(self, *_: object) -> None:
        self._stop()

    def environment(self) -> dict[str, str]:
        """Return the variables by which a client finds the server and its credentials."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        }

    def make_bucket(self, name: str) -> None:
        """Create an empty bucket."""
        (self._buckets / name).mkdir()

    def objects(self, bucket: str) -> dict[str, bytes]:
        """Return the objects of a bucket by key."""
        root = self._buckets / bucket
        found = {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}
        return {key: path.read_bytes() for key, path in found.items() if not key.startswith(".sgwtmp")}

    def put(self, bucket: str, key: str, data: bytes) -> None:
        """Store an object without a request."""
        path = self._buckets / bucket / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def _start(self, program: Path) -> bool:
        """Start at a free port; False when another process has taken it meanwhile."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address: tuple[str, int] = probe.getsockname()
        self.url = f"http://{address[0]}:{address[1]}"
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
