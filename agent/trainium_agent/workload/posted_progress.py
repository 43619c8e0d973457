"""Serve the endpoint to which transformers posts the progress of a script that reports nothing.

`KubeflowCallback` of transformers 5.2 and newer (integrations/integration_utils.py) posts JSON from rank 0, at most
every 5 s, to the address in KUBEFLOW_TRAINER_SERVER_URL, with the token of a file. Each Trainer has this callback where
the variable is set.

Guarantees:
- Only loopback is served. A request without the token, of another start, or longer than `_BODY_BYTES` has no effect.
- A request that is not complete after `_REQUEST_SECONDS` ends.
"""

from __future__ import annotations

import hmac
import os
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field, ValidationError

from trainium_contract.status.results import FIGURES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ENV_URL = "KUBEFLOW_TRAINER_SERVER_URL"
_ENV_TOKEN_FILE = "KUBEFLOW_TRAINER_SERVER_TOKEN"  # noqa: S105 - a name
_BODY_BYTES = 65_536
_REQUEST_SECONDS = 5
_MAX_STEP = 10**15


class _Metric(BaseModel):
    name: str
    value: str


class _Status(BaseModel):
    metrics: list[_Metric] = Field(default=[], max_length=1000)


class _Request(BaseModel):
    """The body of a request; other fields of it are derived from these."""

    status: _Status = Field(alias="trainerStatus")


@dataclass(frozen=True, slots=True)
class PostedProgress:
    """The progress that one request reports."""

    at: float
    """Monotonic seconds when it arrived."""
    step: int
    """0 before the first one."""
    total_steps: int
    """0 if unknown."""
    figures: dict[str, float]
    """Figures of the progress record."""


def parse_request(body: bytes, at: float) -> PostedProgress:
    """Return the progress in the body of a request. Raises ValueError."""
    metrics = {metric.name: metric.value for metric in _Request.model_validate_json(body).status.metrics}

    def parse_count(name: str) -> int:
        count = int(metrics.get(name, "0"))
        if not 0 <= count <= _MAX_STEP:
            raise ValueError(f"{name} is {count}")
        return count

    figures = {name: float(metrics[name]) for name in FIGURES if name in metrics}
    return PostedProgress(at, parse_count("current_step"), parse_count("total_steps"), figures)


class PostedProgressServer:
    """An HTTP server on loopback; it calls back in a thread of each request."""

    def __init__(self, directory: Path) -> None:
        """`directory`: for the file of the token. Raises OSError."""
        self._token = secrets.token_urlsafe(24)
        self._token_file = directory / "posted-progress-token"
        directory.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            self._token_file.unlink()
        descriptor = os.open(self._token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(self._token)
        self._receivers: dict[str, Callable[[PostedProgress], None]] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._create_handler())
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="posted-progress", daemon=True).start()

    def add_receiver(self, start: str, receive: Callable[[PostedProgress], None]) -> dict[str, str]:
        """Have `receive` called for the requests of a start, and for no other; return the environment of its rank."""
        path = f"/{start}"
        self._receivers = {path: receive}
        return {
            ENV_URL: f"http://127.0.0.1:{self._server.server_port}{path}",
            _ENV_TOKEN_FILE: os.fspath(self._token_file),
        }

    def _handle(self, path: str, token: str, body: bytes) -> int:
        """Return the status code of a request."""
        if not hmac.compare_digest(token.encode(errors="replace"), f"Bearer {self._token}".encode()):
            return 401
        receive = self._receivers.get(path)
        if receive is None:
            return 404
        try:
            receive(parse_request(body, time.monotonic()))
        except (ValidationError, ValueError):
            return 400
        return 200

    def _create_handler(self) -> type[BaseHTTPRequestHandler]:
        handle = self._handle

        class Handler(BaseHTTPRequestHandler):
            timeout = _REQUEST_SECONDS

            def do_POST(self) -> None:
                length = self.headers.get("Content-Length", "")
                if not length.isdecimal() or int(length) > _BODY_BYTES:
                    self.send_error(413)
                    return
                code = handle(self.path, self.headers.get("Authorization", ""), self.rfile.read(int(length)))
                self.send_response(code)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base class
                """Log nothing: a program's output is the job's log."""

        return Handler
