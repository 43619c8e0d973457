"""A client of the Kubernetes API: raw JSON, typed errors, and every retry in one place.

Retried for a while, with jittered exponential back-off: 429 and 503 (after `Retry-After`), other 5xx, and connection
errors. POST is retried too, because every name that the operator creates is deterministic: the second attempt then
raises AlreadyExistsError, and callers check who owns the object. Other errors are raised at once (see `errors`).
Objects and status are written by server-side apply with one field manager.

Each attempt of a write first calls `may_write`, so an operator that has lost its Lease sends nothing more, not even a
retry of a write that it began as the leader.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING

from trainium_contract.api_server.errors import ApiError, ConnectionFailedError, FencedError, UnavailableError
from trainium_contract.api_server.responses import Json, parse_event, parse_object, parse_refusal
from trainium_contract.wire.worker_env import FIELD_MANAGER
from trainium_operator.backoff import compute_backoff

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

    from trainium_operator.cluster.api.resources import Resource
    from trainium_operator.cluster.api.transport import HttpResponse, Transport

REQUEST_SECONDS = 30.0
CALL_SECONDS = 15.0
"""No further attempt starts after this time; the caller then decides what to do."""
ATTEMPTS = 6
FIRST_BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 5.0
MAX_RETRY_AFTER_SECONDS = 30.0
PAGE = 50
"""Objects in a page. A pod is 12 kB of JSON and 45 kB parsed, and the process never returns the memory that a page
needs."""
JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"


def _ignore(_verb: str, _status: int, _seconds: float) -> None:
    return


class Api:
    """One API server; safe for concurrent use within one event loop."""

    def __init__(
        self,
        transport: Transport,
        *,
        on_request: Callable[[str, int, float], None] = _ignore,
        may_write: Callable[[], bool] = lambda: True,
        labels: Mapping[str, str] | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`on_request(verb, status, seconds)` receives every response; status 0 means none.

        `labels` are added to each namespaced object that is created or applied, unless it has another value.
        """
        self._labels = dict(labels or {})
        self._transport = transport
        self._on_request = on_request
        self._may_write = may_write
        self._jitter = jitter

    async def get(self, resource: Resource, namespace: str, name: str, *, attempts: int = ATTEMPTS) -> Json:
        """Get one object. Raises NotFoundError."""
        return await self._call("GET", resource.build_path(namespace, name), attempts=attempts)

    async def read(self, path: str) -> Json:
        """Read a document of the API server, for instance of its discovery. Raises NotFoundError."""
        return await self._call("GET", path)

    async def list_page(
        self,
        resource: Resource,
        namespace: str = "",
        *,
        labels: str = "",
        fields: str = "",
        continue_token: str = "",
        limit: int = PAGE,
        attempts: int = ATTEMPTS,
    ) -> Json:
        """List one page; `metadata.continue` identifies the next. Raises ExpiredError when the token is too old."""
        query = {"limit": str(limit)}
        if labels:
            query["labelSelector"] = labels
        if fields:
            query["fieldSelector"] = fields
        if continue_token:
            query["continue"] = continue_token
        return await self._call("GET", resource.build_path(namespace), query=query, attempts=attempts)

    async def create(self, resource: Resource, namespace: str, body: Json, *, attempts: int = ATTEMPTS) -> Json:
        """Create an object. Raises AlreadyExistsError."""
        query = {"fieldManager": FIELD_MANAGER}
        if resource.namespaced:
            body = add_labels(body, self._labels)
        return await self._call("POST", resource.build_path(namespace), query=query, body=body, attempts=attempts)

    async def replace(
        self, resource: Resource, namespace: str, name: str, body: Json, *, attempts: int = ATTEMPTS
    ) -> Json:
        """Replace an object, guarded by its `metadata.resourceVersion`. Raises ConflictError when that is old."""
        query = {"fieldManager": FIELD_MANAGER}
        return await self._call("PUT", resource.build_path(namespace, name), query=query, body=body, attempts=attempts)

    async def apply(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        body: Json,
        *,
        subresource: str = "",
        attempts: int = ATTEMPTS,
    ) -> Json:
        """Server-side apply as our field manager. `metadata.uid` or `resourceVersion` in the body are preconditions."""
        full = {"apiVersion": resource.api_version, "kind": resource.kind, **body}
        full["metadata"] = {**body.get("metadata", {}), "name": name}
        if resource.namespaced:
            full["metadata"]["namespace"] = namespace
        if not subresource:
            full = add_labels(full, self._labels)
        path = resource.build_path(namespace, name, subresource)
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        return await self._call("PATCH", path, query=query, body=full, content_type=APPLY_PATCH, attempts=attempts)

    async def merge(self, resource: Resource, namespace: str, name: str, body: Json, *, subresource: str = "") -> Json:
        """Send a merge patch. Raises NotFoundError."""
        path = resource.build_path(namespace, name, subresource)
        query = {"fieldManager": FIELD_MANAGER}
        return await self._call("PATCH", path, query=query, body=body, content_type=MERGE_PATCH)

    async def delete(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        *,
        uid: str = "",
        resource_version: str = "",
        grace_seconds: int | None = None,
    ) -> Json:
        """Delete in the background; with `uid`, only that incarnation, with `resource_version` only that version.

        Returns the object if it stays for its grace period, else a Status. Raises NotFoundError and ConflictError.
        """
        options: Json = {"propagationPolicy": "Background"}
        preconditions = {"uid": uid, "resourceVersion": resource_version}
        if any(preconditions.values()):
            options["preconditions"] = {key: value for key, value in preconditions.items() if value}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        return await self._call("DELETE", resource.build_path(namespace, name), body=options)

    async def watch(
        self,
        resource: Resource,
        namespace: str = "",
        *,
        labels: str = "",
        resource_version: str,
        seconds: int,
        silence: float,
    ) -> AsyncGenerator[Json]:
        """Yield events after `resource_version`, with bookmarks, for at most `seconds` (the server ends the stream).

        Raises ExpiredError when the version is too old, UnavailableError when the stream breaks or is silent for
        `silence` seconds.
        """
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(seconds),
        }
        if labels:
            query["labelSelector"] = labels
        path = resource.build_path(namespace)
        began = time.monotonic()
        try:
            async with self._transport.stream(path, query=query, silence=silence) as stream:
                self._on_request("WATCH", stream.status, time.monotonic() - began)
                if stream.status >= 400:
                    raise parse_refusal(f"watch {path}", stream.status, b"")
                async for line in stream.lines:
                    if line.strip():
                        yield parse_event(path, line)
        except ConnectionFailedError:
            self._on_request("WATCH", 0, time.monotonic() - began)
            raise

    async def _call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Json | None = None,
        content_type: str = JSON,
        attempts: int = ATTEMPTS,
    ) -> Json:
        clock = asyncio.get_running_loop().time
        latest = clock() + CALL_SECONDS
        for attempt in range(1, attempts + 1):
            ceiling = compute_backoff(FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS, attempt)
            pause = ceiling * (0.5 + 0.5 * self._jitter())
            if method != "GET" and not self._may_write():
                raise FencedError(f"{method} {path} was not sent: another operator may lead by now")
            error: ApiError
            began = time.monotonic()
            try:
                answer = await self._transport.request(
                    method, path, query=query or {}, body=body, content_type=content_type, timeout=REQUEST_SECONDS
                )
            except ConnectionFailedError as failed:
                self._on_request(method, 0, time.monotonic() - began)
                error = failed
            else:
                self._on_request(method, answer.status, time.monotonic() - began)
                if answer.status < 400:
                    return parse_object(path, answer.body) if answer.body else {}
                error = parse_refusal(f"{method} {path}", answer.status, answer.body)
                if not isinstance(error, UnavailableError):
                    raise error
                pause = max(pause, _parse_retry_after(answer))
            if attempt == attempts or clock() + pause >= latest:
                raise error
            await asyncio.sleep(pause)
        raise AssertionError("attempts is at least 1")


def add_labels(body: Json, labels: Mapping[str, str]) -> Json:
    """Return an object with these labels, except those that it has already."""
    if not labels:
        return body
    metadata = body.get("metadata", {})
    return {**body, "metadata": {**metadata, "labels": {**labels, **metadata.get("labels", {})}}}


def _parse_retry_after(answer: HttpResponse) -> float:
    try:
        return min(MAX_RETRY_AFTER_SECONDS, max(0.0, float(answer.headers.get("retry-after", "0"))))
    except ValueError:  # an HTTP date; the client's own back-off applies
        return 0.0
