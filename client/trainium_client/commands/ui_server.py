"""The local server of `ui`: pages for the browser of the user who started it.

Invariants: it listens on the loopback interface only and answers only GET. Every path starts with a secret of this
process, so no other user of the machine and no other site in the browser can read from it. The address in the browser's
command line, which others could see, works once.
"""

from __future__ import annotations

import hmac
import secrets
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from trainium_contract.api_server.errors import ClientError, ForbiddenError, NotFoundError
from trainium_contract.pages.live import HEADERS

if TYPE_CHECKING:
    from trainium_client.commands.pages import LocalPages

HOST = "127.0.0.1"
REQUEST_SECONDS = 30.0
_CODES = ((ForbiddenError, HTTPStatus.FORBIDDEN), (NotFoundError, HTTPStatus.NOT_FOUND))


class UiServer(ThreadingHTTPServer):
    """Serves pages below a secret; `url` opens them, `one_time_url` too, but only the first time."""

    daemon_threads = True

    def __init__(self, pages: LocalPages, secret: str, start: str, port: int = 0) -> None:
        """`start`: the path that `url` opens, below the secret. Raises ClientError if the port is in use."""
        self.pages = pages
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise ClientError(
                f"cannot listen on port {port}: {error.strerror or error}; choose another --port"
            ) from error
        self.secret = secret
        self.start = f"/{secret}{start}"
        self._ticket = secrets.token_urlsafe(24)
        self._lock = threading.Lock()
        self.hosts = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}

    @property
    def url(self) -> str:
        """Return the address for the user."""
        return f"http://{HOST}:{self.server_port}{self.start}"

    @property
    def one_time_url(self) -> str:
        """Return the address for the command line of a browser."""
        return f"http://{HOST}:{self.server_port}/{self._ticket}"

    def redeem_ticket(self, path: str) -> bool:
        """Return whether this is the one-time address, which is then used up."""
        with self._lock:
            is_valid = bool(self._ticket) and hmac.compare_digest(path.encode(), f"/{self._ticket}".encode())
            if is_valid:
                self._ticket = ""
            return is_valid

    def server_close(self) -> None:
        """Stop listening, and close the connections to the API server."""
        super().server_close()
        self.pages.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report a failed handler; ignore a browser that disconnects."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: UiServer
    protocol_version = "HTTP/1.1"
    server_version = "kubectl-trn"
    sys_version = ""
    timeout = REQUEST_SECONDS

    def do_GET(self) -> None:
        """Respond with a page, or with a sentence."""
        path = urlsplit(self.path).path
        if self.headers.get("Host", "") not in self.server.hosts:
            self._respond(HTTPStatus.FORBIDDEN, "this server accepts only requests to its own address\n")
        elif self.server.redeem_ticket(path):
            self._respond(HTTPStatus.SEE_OTHER, "", Location=self.server.start)
        else:
            self._serve_page(path)

    def _serve_page(self, path: str) -> None:
        first, *rest = [unquote(part) for part in path.split("/")[1:]]
        if not hmac.compare_digest(first.encode(), self.server.secret.encode()) or len(rest) > 2:
            self._respond(HTTPStatus.NOT_FOUND, "no such page: use the address that kubectl trn ui has printed\n")
            return
        namespace, name = (*rest, "", "")[:2]
        pages = self.server.pages
        try:
            text = pages.render_job(namespace, name) if name else pages.render_jobs(namespace)
        except ClientError as error:
            code = next((code for kind, code in _CODES if isinstance(error, kind)), HTTPStatus.BAD_GATEWAY)
            self._respond(code, f"{error}\n")
        else:
            self._respond(HTTPStatus.OK, text, **{"Content-Type": "text/html; charset=utf-8"})

    def _respond(self, code: HTTPStatus, text: str, **headers: str) -> None:
        body = text.encode()
        self.send_response(code)
        all_headers = {
            "Content-Type": "text/plain; charset=utf-8",
            **HEADERS,
            **headers,
            "Content-Length": str(len(body)),
        }
        for name, value in all_headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the signature of the base class
        """Log nothing, because the address is a secret."""
