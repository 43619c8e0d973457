"""Read and write objects of an API server by their paths, as parsed JSON."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Self

from trainium_contract.api_server.connection import Connection
from trainium_contract.api_server.errors import AlreadyExistsError, NotFoundError
from trainium_contract.api_server.responses import Json, parse_object, parse_refusal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainium_contract.api_server.kubeconfig import Access

MERGE_PATCH = "application/merge-patch+json"


class ApiClient:
    """A thread-safe client; every failure raises an ApiError."""

    def __init__(self, access: Access, *, user_agent: str, seconds: float = 10.0) -> None:
        self._connection = Connection(access, timeout=seconds, user_agent=user_agent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close idle connections; the client may be used again."""
        self._connection.close()

    def get_text(self, path: str) -> str:
        """Return the body of a GET."""
        return self._request("GET", path, accept="*/*").decode("utf-8", "replace")

    def get(self, path: str) -> Json:
        """Return an object or a list."""
        return parse_object(path, self._request("GET", path))

    def find(self, path: str) -> Json | None:
        """Return an object, or None if it does not exist."""
        with contextlib.suppress(NotFoundError):
            return self.get(path)
        return None

    def create(self, path: str, document: Mapping[str, Any], *, exists_ok: bool = False) -> Json:
        """Create an object; with `exists_ok` an existing one remains unchanged, and the document is returned."""
        try:
            return parse_object(path, self._request("POST", path, document))
        except AlreadyExistsError:
            if not exists_ok:
                raise
            return dict(document)

    def patch(self, path: str, change: Mapping[str, Any]) -> Json:
        """Apply a merge patch."""
        return parse_object(path, self._request("PATCH", path, change, content_type=MERGE_PATCH))

    def delete(self, path: str, options: Mapping[str, Any] | None = None, *, missing_ok: bool = True) -> None:
        """Delete an object, with fields of DeleteOptions."""
        try:
            self._request("DELETE", path, options)
        except NotFoundError:
            if not missing_ok:
                raise

    def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        content_type: str = "application/json",
        accept: str = "application/json",
    ) -> bytes:
        response = self._connection.request(method, path, body=body, content_type=content_type, accept=accept)
        if response.status >= 400:
            raise parse_refusal(f"{method} {path}", response.status, response.body)
        return response.body
