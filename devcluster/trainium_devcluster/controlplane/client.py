"""A small HTTPS client of the Kubernetes API, with nothing but the standard library.

Invariants: the server is always verified; one connection at a time, opened again after any error, and after a while in
which the server may have closed it, as a write is never repeated; every failure is an ApiError with a sentence.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
import time
from typing import TYPE_CHECKING, Any, Self

from trainium_devcluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType


class ControlPlaneError(ClusterError):
    """The API server refused or did not answer; `code` is the HTTP status, 0 when there was none."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


IDLE_SECONDS = 30.0
"""Below the time after which an API server closes a connection that is not used (90 s)."""


class ApiClient:
    """Reads and writes API objects as parsed JSON."""

    def __init__(
        self, *, host: str, port: int, authority: Path, certificate: Path, key: Path, timeout: float = 10.0
    ) -> None:
        self._host = host
        self._port = port
        self._timeout = timeout
        self._context = ssl.create_default_context(cafile=str(authority))
        self._context.load_cert_chain(certificate, key)
        self._connection: http.client.HTTPSConnection | None = None
        self._used = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the client may be used again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def get_text(self, path: str) -> str:
        """Return the body of a GET."""
        return self._request("GET", path, None, "")

    def get(self, path: str) -> dict[str, Any]:
        """Return an object or a list."""
        return self._parsed(self.get_text(path))

    def create(self, path: str, document: Mapping[str, Any], *, exists_ok: bool = False) -> dict[str, Any]:
        """Create an object; with `exists_ok` an existing one stays as it is; returns the object as sent."""
        try:
            return self._parsed(self._request("POST", path, json.dumps(document), "application/json"))
        except ControlPlaneError as error:
            if exists_ok and error.code == http.client.CONFLICT:
                return dict(document)
            raise

    def patch(self, path: str, document: Mapping[str, Any]) -> dict[str, Any]:
        """Merge a change into an object (JSON merge patch)."""
        return self._parsed(self._request("PATCH", path, json.dumps(document), "application/merge-patch+json"))

    def delete(self, path: str, *, missing_ok: bool = True) -> None:
        """Delete an object."""
        try:
            self._request("DELETE", path, None, "")
        except ControlPlaneError as error:
            if not (missing_ok and error.code == http.client.NOT_FOUND):
                raise

    def _request(self, method: str, path: str, body: str | None, content_type: str) -> str:
        headers = {"Accept": "application/json, */*"}
        if content_type:
            headers["Content-Type"] = content_type
        if time.monotonic() - self._used > IDLE_SECONDS:
            self.close()
        reused = self._connection is not None
        try:
            status, text = self._exchange(method, path, body, headers)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            # A kept connection that the server closed meanwhile is no error of the server; a write is not repeated.
            if not (reused and method == "GET"):
                raise ControlPlaneError(
                    f"{method} {path}: the API server at port {self._port} does not answer: {error}."
                ) from error
            try:
                status, text = self._exchange(method, path, body, headers)
            except (OSError, http.client.HTTPException) as again:
                self.close()
                raise ControlPlaneError(
                    f"{method} {path}: the API server at port {self._port} does not answer: {again}."
                ) from again
        if status >= http.client.BAD_REQUEST:
            raise ControlPlaneError(f"{method} {path}: the API server answers {status}: {_message(text)}", status)
        return text

    def _exchange(self, method: str, path: str, body: str | None, headers: Mapping[str, str]) -> tuple[int, str]:
        if self._connection is None:
            self._connection = http.client.HTTPSConnection(
                self._host, self._port, timeout=self._timeout, context=self._context
            )
        self._connection.request(method, path, body, dict(headers))
        response = self._connection.getresponse()
        text = response.read().decode("utf-8", "replace")
        self._used = time.monotonic()
        return response.status, text

    @staticmethod
    def _parsed(text: str) -> dict[str, Any]:
        try:
            document = json.loads(text)
        except ValueError as error:
            raise ControlPlaneError(f"The API server answered something that is not JSON: {text[:200]!r}.") from error
        if not isinstance(document, dict):
            raise ControlPlaneError(f"The API server answered something that is no object: {text[:200]!r}.")
        return document


def _message(text: str) -> str:
    with contextlib.suppress(ValueError):
        document = json.loads(text)
        if isinstance(document, dict) and isinstance(document.get("message"), str):
            return str(document["message"])
    return text.strip()[:300] or "no reason given"
