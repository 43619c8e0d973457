"""Run the server of MLflow with SQLite on loopback; tests can restart it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.testing.suite.timeouts import scaled, until


class MlflowServer:
    """A server at one address; its database and artifacts are in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = str(free.getsockname()[1])
        self.address = f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start the server and wait until it answers."""
        command = (
            # The pipe closes when this process ends; then the shell kills the process group of the server.
            "sh", "-c", '"$@" & cat; kill -KILL 0', "server",
            sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", self._port, "--workers", "1",
            "--backend-store-uri", f"sqlite:///{self._folder}/mlflow.db",
            "--artifacts-destination", str(self._folder / "artifacts"),
        )  # fmt: skip
        log = self._folder / "server.log"
        with log.open("a") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
            )
        until(self._answers, lambda: f"the server answers: {log.read_text()}", seconds=120, pause=0.2)

    def stop(self) -> None:
        """Kill the server."""
        if self._process is None or self._process.stdin is None:
            return
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdin.close()
        self._process = None

    def _answers(self) -> bool:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"{self.address}/health", timeout=scaled(5)) as answer,
        ):
            return bool(answer.status == 200)
        return False


@contextmanager
def run_mlflow_server(folder: Path) -> Iterator[MlflowServer]:
    """Run a server until the block ends."""
    server = MlflowServer(folder)
    try:
        server.start()
        yield server
    finally:
        server.stop()
