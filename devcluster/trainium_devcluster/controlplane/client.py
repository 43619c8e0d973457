"""Read and write objects of an API server by their paths, as parsed JSON."""

from __future__ import annotations

import contextlib
import http.client
import json
from typing import TYPE_CHECKING, Any, Self

from trainium_contract.api_server.connection import Connection
from trainium_contract.api_server.errors import NoClusterError
from trainium_devcluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from trainium_contract.api_server.kubeconfig import Access

Json = dict[str, Any]
MERGE_PATCH = "application/merge-patch+json"


class ControlPlaneError(ClusterError):
    """The API server refused or did not answer; `code` is the HTTP status, 0 without an answer."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class ApiClient:
    """A thread-safe client; every failure raises a ControlPlaneError with a sentence."""

    def __init__(self, access: Access, *, seconds: float = 10.0) -> None:
        self._connection = Connection(access, timeout=seconds, user_agent="trainium-devcluster")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close idle connections; the client may be used again."""
        self._connection.close()

    def get_text(self, path: str) -> str:
        """Return the body of a GET."""
        return self._request("GET", path)

    def get(self, path: str) -> Json:
        """Return an object or a list."""
        return _parse(self._request("GET", path))

    def find(self, path: str) -> Json | None:
        """Return an object, or None if it does not exist."""
        with _ignored(http.client.NOT_FOUND):
            return self.get(path)
        return None

    def create(self, path: str, document: Mapping[str, Any], *, exists_ok: bool = False) -> Json:
        """Create an object and return it as sent; with `exists_ok` an existing one remains unchanged."""
        with _ignored(http.client.CONFLICT if exists_ok else None):
            return _parse(self._request("POST", path, document))
        return dict(document)

    def patch(self, path: str, change: Mapping[str, Any]) -> Json:
        """Apply a merge patch."""
        return _parse(self._request("PATCH", path, change, MERGE_PATCH))

    def delete(self, path: str, options: Mapping[str, Any] | None = None, *, missing_ok: bool = True) -> None:
        """Delete an object, with fields of DeleteOptions."""
        with _ignored(http.client.NOT_FOUND if missing_ok else None):
            self._request("DELETE", path, options)

    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, content_type: str = "application/json"
    ) -> str:
        try:
            response = self._connection.request(
                method, path, body=body, content_type=content_type, accept="application/json, */*"
            )
        except NoClusterError as error:
            raise ControlPlaneError(f"{method} {path}: {error}.") from error
        text = response.body.decode("utf-8", "replace")
        if response.status >= http.client.BAD_REQUEST:
            raise ControlPlaneError(
                f"{method} {path}: the API server answers {response.status}: {_message(text)}", response.status
            )
        return text


@contextlib.contextmanager
def _ignored(code: int | None) -> Iterator[None]:
    """Suppress an error with this status."""
    try:
        yield
    except ControlPlaneError as error:
        if code is None or error.code != code:
            raise


def _parse(text: str) -> Json:
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
