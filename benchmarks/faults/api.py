"""Access the API of any cluster as JSON over one `kubectl proxy`, so that polling ten times a second costs little.

Guarantees:
- A request returns the parsed answer, or raises `ApiError` with the message of the server.
- The client survives a restart of the API server.
- Each thread has its own connection.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import threading
from typing import TYPE_CHECKING, Any, Self

from tests.testing.suite import patience

if TYPE_CHECKING:
    from tests.testing.cluster.sites import Site

Json = dict[str, Any]
_TIMEOUT = 20.0


class ApiError(RuntimeError):
    """The API server refused a request or did not answer; `code` is the HTTP status, 0 without one."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class Api:
    """Read and write objects as parsed JSON."""

    def __init__(self, site: Site) -> None:
        self._process = subprocess.Popen(
            ["kubectl", "proxy", "--port=0"], env=os.environ | site.variables, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        address = line.rpartition(" ")[2].strip()
        if ":" not in address:
            raise ApiError(f"kubectl proxy did not start: {line.strip() or 'no output'}")
        self._port = int(address.rpartition(":")[2])
        self._local = threading.local()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def get(self, path: str) -> Json:
        """Return an object or a list."""
        return self._call("GET", path)

    def find(self, path: str) -> Json | None:
        """Return an object, or None if it does not exist."""
        try:
            return self.get(path)
        except ApiError as error:
            if error.code == http.client.NOT_FOUND:
                return None
            raise

    def patch(self, path: str, change: Json) -> Json:
        """Apply a merge patch."""
        return self._call("PATCH", path, change, "application/merge-patch+json")

    def create(self, path: str, body: Json) -> Json:
        """Create an object."""
        return self._call("POST", path, body)

    def delete(self, path: str, options: Json | None = None) -> None:
        """Delete an object, if it exists."""
        try:
            self._call("DELETE", path, options)
        except ApiError as error:
            if error.code != http.client.NOT_FOUND:
                raise

    def _call(self, method: str, path: str, body: Json | None = None, kind: str = "application/json") -> Json:
        headers = {"Accept": "application/json"} | ({"Content-Type": kind} if body is not None else {})
        text = None if body is None else json.dumps(body)
        for attempt in (1, 2):
            connection = getattr(self._local, "connection", None)
            if connection is None:
                connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=patience.patient(_TIMEOUT))
                self._local.connection = connection
            try:
                connection.request(method, path, text, headers)
                response = connection.getresponse()
                answer = response.read()
                break
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                self._local.connection = None
                if attempt == 2 or method not in ("GET", "DELETE"):
                    raise ApiError(f"{method} {path}: no answer ({error})") from error
        return _parsed(method, path, response.status, answer)


def _parsed(method: str, path: str, status: int, answer: bytes) -> Json:
    try:
        document: Json = json.loads(answer)
    except ValueError:
        document = {"message": answer.decode(errors="replace").strip()[:300]}
    if status >= http.client.BAD_REQUEST:
        raise ApiError(f"{method} {path}: {status} {document.get('message', '')}", status)
    return document
