"""An API server in memory, behind the operator's Transport: enough of the real one's semantics to test against.

Has: versions, uids, optimistic locking, list paging and label selectors, watches with bookmarks and 410, status
subresource, server-side apply that removes what its manager no longer applies, uid preconditions, graceful deletion of
pods, garbage collection by owner, TokenReview, SubjectAccessReview. Has faults: failing requests, dropped and stalled
streams, compaction.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tests.testing.api.json_objects import apply_merge_patch, copy_json, leaf_paths, merge, remove_path
from tests.testing.api.token_issuer import ISSUER
from trainium_contract.api_server.errors import ConnectionFailedError
from trainium_operator.cluster.api.resources import ALL, CLAIMING, QUEUEING, Resource
from trainium_operator.cluster.api.transport import HttpResponse, ResponseStream

Json = dict[str, Any]
POD_GROUPS = Resource("scheduling.k8s.io", "v1alpha2", "podgroups", "PodGroup")
Fault = Callable[[str, str], HttpResponse | Exception | None]


@dataclass(frozen=True)
class Write:
    method: str
    path: str
    body: Any
    status: int


@dataclass
class _Watch:
    resource: Resource
    namespace: str
    labels: str
    queue: asyncio.Queue[Json | None] = field(default_factory=asyncio.Queue)
    stalled: bool = False


async def _iterate_once(body: bytes) -> AsyncIterator[bytes]:
    yield body


def http_error(status: int, reason: str, message: str = "", **headers: str) -> HttpResponse:
    body = {"kind": "Status", "status": "Failure", "reason": reason, "message": message or reason, "code": status}
    return HttpResponse(
        status, {key.replace("_", "-"): value for key, value in headers.items()}, json.dumps(body).encode()
    )


class FakeApiServer:
    """The server, and a Transport that connects to it."""

    def __init__(self, clock: Callable[[], float] = lambda: 1.6e9) -> None:
        system = {"metadata": {"name": "kube-system", "uid": "cluster-1", "resourceVersion": "0"}}
        self.objects: dict[tuple[str, str, str], Json] = {("namespaces", "", "kube-system"): system}
        self.writes: list[Write] = []
        self.requests: list[tuple[str, str]] = []
        self.faults: list[Fault] = []
        self.after_write: Callable[[Write], None] = lambda _: None
        self.tokens: dict[str, Json] = {}
        """The user of each valid token of a reader; tokens of pods are the issuer's."""
        self.issuer = ISSUER
        self.mutate: Callable[[Resource, Json], None] = lambda _resource, _raw: None
        """A mutating admission policy for creations and merge patches."""
        self.may: Callable[[Json], bool] = lambda _spec: False
        """The authorizer, by the spec of a SubjectAccessReview."""
        self._clock = clock
        self.graceful_pods = False
        self.served: dict[str, tuple[str, ...]] = {}
        """Further API versions (`group/version`) and the kinds that they serve."""
        self.down = False
        self._version = itertools.count(1)
        self.version = 0
        self._uids = itertools.count(1)
        self._history: list[tuple[int, str, str, Json]] = []
        self._compacted = 0
        self._watches: list[_Watch] = []
        self._applied: dict[tuple[str, str, str, str], set[tuple[str, ...]]] = {}
        self.undeclared: set[str] = set()
        """Fields, as `status.gang.group`, that the definition lacks: an apply that names one is refused."""

    @property
    def now(self) -> str:
        return datetime.fromtimestamp(self._clock(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    # Changes from outside

    def add(self, resource: Resource, raw: Json) -> Json:
        """Add an object as another client would."""
        raw = copy_json(raw)
        raw.setdefault("metadata", {}).setdefault("uid", f"uid-{next(self._uids)}")
        raw["metadata"].setdefault("creationTimestamp", self.now)
        if resource.namespaced:
            raw["metadata"].setdefault("namespace", "default")
        raw.setdefault("apiVersion", resource.api_version)
        raw.setdefault("kind", resource.kind)
        return self._store("ADDED", resource, raw)

    def change(self, resource: Resource, namespace: str, name: str, change: Callable[[Json], None]) -> Json:
        raw = copy_json(self.objects[resource.plural, namespace, name])
        change(raw)
        return self._store("MODIFIED", resource, raw)

    def remove(self, resource: Resource, namespace: str, name: str) -> None:
        raw = self.objects.pop((resource.plural, namespace, name))
        self.version = next(self._version)
        raw["metadata"]["resourceVersion"] = str(self.version)
        self._notify("DELETED", resource, raw)
        for key, child in list(self.objects.items()):
            if any(owner["uid"] == raw["metadata"]["uid"] for owner in child["metadata"].get("ownerReferences") or ()):
                self.remove(_find_resource(key[0]), key[1], key[2])

    def get(self, resource: Resource, namespace: str, name: str) -> Json:
        return self.objects[resource.plural, namespace, name]

    def names(self, resource: Resource, namespace: str = "default") -> list[str]:
        return sorted(name for plural, space, name in self.objects if (plural, space) == (resource.plural, namespace))

    def compact(self) -> None:
        """Forget all history: watches from before get 410."""
        self._compacted = self.version
        self._history.clear()

    def restore(self, objects: dict[tuple[str, str, str], Json], version: int) -> None:
        """Return to an earlier state and version, as after a restore of etcd from a backup."""
        self.objects, self.version, self._version = dict(objects), version, itertools.count(version + 1)
        self._history.clear()

    def drop_streams(self) -> None:
        for watch in self._watches:
            watch.queue.put_nowait(None)

    def stall_streams(self) -> None:
        """Keep open streams open, without any further event."""
        for watch in self._watches:
            watch.stalled = True

    def send_bookmarks(self) -> None:
        for watch in self._watches:
            if not watch.stalled:
                metadata = {"resourceVersion": str(self.version)}
                bookmark = {"kind": watch.resource.kind, "metadata": metadata}
                watch.queue.put_nowait({"type": "BOOKMARK", "object": bookmark})

    def repeat_events(self, resource: Resource, count: int) -> None:
        """Send the last events again over open streams, in their old order: duplicates, and old states."""
        past = [(kind, raw) for _, plural, kind, raw in self._history if plural == resource.plural][-count:]
        for watch in self._watches:
            if watch.resource is resource:
                for kind, raw in past:
                    self._send_event(watch, kind, raw)

    def open_streams(self, resource: Resource) -> int:
        return sum(watch.resource is resource for watch in self._watches)

    # Transport

    async def request(
        self, method: str, path: str, *, query: Mapping[str, str], body: Any, content_type: str, timeout: float
    ) -> HttpResponse:
        await asyncio.sleep(0)
        self.requests.append((method, path))
        if self.down:
            raise ConnectionFailedError("connection refused")
        for fault in self.faults:
            outcome = fault(method, path)
            if isinstance(outcome, Exception):
                raise outcome
            if outcome is not None:
                return outcome
        if path == "/apis" or (path.startswith("/apis/") and path.count("/") == 3):
            return self._discovery(path)
        if path in (documents := self.issuer.documents()):
            return _respond(documents[path])
        resource, namespace, name, subresource = _parse_path(path)
        response = self._dispatch(
            method, resource, namespace, name, subresource, dict(query), copy_json(body), content_type
        )
        if method != "GET":
            write = Write(method, path, copy_json(body), response.status)
            self.writes.append(write)
            self.after_write(write)
        return response

    @asynccontextmanager
    async def stream(self, path: str, *, query: Mapping[str, str], silence: float) -> AsyncIterator[ResponseStream]:
        await asyncio.sleep(0)
        self.requests.append(("WATCH", path))
        if self.down:
            raise ConnectionFailedError("connection refused")
        outcomes = [fault("WATCH", path) for fault in self.faults]
        refused = next((outcome for outcome in outcomes if isinstance(outcome, HttpResponse)), None)
        if refused is not None and refused.status == 403:
            yield ResponseStream(403, _iterate_once(refused.body))
            return
        resource, namespace, _, _ = _parse_path(path)
        watch = _Watch(resource, namespace, query.get("labelSelector", ""))
        since = int(query["resourceVersion"])
        if since < self._compacted:
            watch.queue.put_nowait({"type": "ERROR", "object": {"code": 410, "reason": "Expired", "message": "old"}})
        for version, plural, kind, raw in self._history:
            if version > since and plural == resource.plural:
                self._send_event(watch, kind, raw)
        self._watches.append(watch)
        loop = asyncio.get_running_loop()
        try:
            yield ResponseStream(200, self._event_lines(watch, silence, loop.time() + float(query["timeoutSeconds"])))
        finally:
            self._watches.remove(watch)

    async def _event_lines(self, watch: _Watch, silence: float, until: float) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout(min(silence, max(0.0, until - loop.time()))):
                    event = await watch.queue.get()
            except TimeoutError:
                if loop.time() >= until and not watch.stalled:
                    return
                raise ConnectionFailedError("no response") from None
            if event is None:
                return
            yield json.dumps(event).encode() + b"\n"

    # Handlers of requests

    def _dispatch(
        self,
        method: str,
        resource: Resource,
        namespace: str,
        name: str,
        subresource: str,
        query: dict[str, str],
        body: Any,
        content_type: str,
    ) -> HttpResponse:
        if resource.plural == "tokenreviews":
            return _respond(self._review(body))
        if resource.plural == "subjectaccessreviews":
            return _respond({**body, "status": {"allowed": self.may(body["spec"])}})
        if method == "POST":
            return self._create(resource, namespace, body)
        if method == "GET" and not name:
            return self._list(resource, namespace, query)
        key = (resource.plural, namespace, name)
        current = self.objects.get(key)
        if method == "PATCH" and content_type.startswith("application/apply-patch"):
            return self._apply(resource, key, current, subresource, query["fieldManager"], body)
        if current is None:
            return http_error(404, "NotFound", f"{resource.plural} {name} not found")
        if method == "GET":
            return _respond(current)
        if method == "DELETE":
            return self._delete(resource, current, body or {})
        expected = body.get("metadata", {}).get("resourceVersion")
        if expected is not None and expected != current["metadata"]["resourceVersion"]:
            return http_error(409, "Conflict", "the object has been modified")
        if method == "PUT":
            body["metadata"] = {**body["metadata"], "uid": current["metadata"]["uid"]}
            return _respond(self._store("MODIFIED", resource, body))
        result = apply_merge_patch(copy_json(current), body)
        self.mutate(resource, result)
        return _respond(current if result == current else self._store("MODIFIED", resource, result))

    def _discovery(self, path: str) -> HttpResponse:
        if path == "/apis":
            groups: dict[str, list[Json]] = {}
            for name in self.served:
                group, _, version = name.partition("/")
                groups.setdefault(group, []).append({"groupVersion": name, "version": version})
            return _respond({"groups": [{"name": name, "versions": versions} for name, versions in groups.items()]})
        kinds = self.served.get(path.removeprefix("/apis/"))
        if kinds is None:
            return http_error(404, "NotFound", "the server could not find the requested resource")
        verbs = ["create", "get", "list", "patch"]
        return _respond({"resources": [{"name": f"{kind.lower()}s", "kind": kind, "verbs": verbs} for kind in kinds]})

    def _create(self, resource: Resource, namespace: str, body: Json) -> HttpResponse:
        name = body["metadata"]["name"]
        if (resource.plural, namespace, name) in self.objects:
            return http_error(409, "AlreadyExists", f"{resource.plural} {name!r} already exists")
        body["metadata"].update(namespace=namespace, uid=f"uid-{next(self._uids)}", creationTimestamp=self.now)
        body.update(apiVersion=resource.api_version, kind=resource.kind)
        self.mutate(resource, body)
        if resource.plural == "pods":
            body["status"] = {"phase": "Pending"}
        return _respond(self._store("ADDED", resource, body))

    def _list(self, resource: Resource, namespace: str, query: dict[str, str]) -> HttpResponse:
        matching = [
            raw
            for (plural, space, _), raw in sorted(self.objects.items())
            if plural == resource.plural and namespace in ("", space) and _matches(raw, query.get("labelSelector", ""))
        ]
        start = int(query.get("continue", "0"))
        limit = int(query.get("limit", "500"))
        metadata: Json = {"resourceVersion": str(self.version)}
        if start + limit < len(matching):
            metadata["continue"] = str(start + limit)
        return _respond({"metadata": metadata, "items": matching[start : start + limit]})

    def _apply(
        self,
        resource: Resource,
        key: tuple[str, str, str],
        current: Json | None,
        subresource: str,
        manager: str,
        body: Json,
    ) -> HttpResponse:
        expected = body["metadata"].pop("resourceVersion", None)
        if current is None:
            if subresource or expected:
                return http_error(404, "NotFound", f"{key[2]} not found")
            created = self._create(resource, key[1], body)
            self._applied[(*key, manager)] = leaf_paths(body)
            return created
        if expected is not None and expected != current["metadata"]["resourceVersion"]:
            return http_error(409, "Conflict", "the object has been modified")
        applied = (
            {"status": body.get("status", {})}
            if subresource == "status"
            else {part: value for part, value in body.items() if part != "status"}
        )
        undeclared = sorted(
            ".".join(path)
            for path in leaf_paths(applied)
            if self.undeclared & {".".join(path[:end]) for end in range(len(path) + 1)}
        )
        if undeclared:
            errors = "".join(f"\n  .{path}: field not declared in schema" for path in undeclared)
            return http_error(500, "InternalError", f"failed to create typed patch object: errors:{errors}")
        owned = self._applied.get((*key, manager + subresource), set())
        result = copy_json(current)
        for path in owned - leaf_paths(applied):
            remove_path(result, path)
        result = merge(result, applied)
        result["metadata"] = {**current["metadata"], **{k: v for k, v in result["metadata"].items() if k != "uid"}}
        self._applied[(*key, manager + subresource)] = leaf_paths(applied)
        if result == current:
            return _respond(current)
        return _respond(self._store("MODIFIED", resource, result))

    def _delete(self, resource: Resource, current: Json, options: Json) -> HttpResponse:
        uid = (options.get("preconditions") or {}).get("uid")
        metadata = current["metadata"]
        if uid is not None and uid != metadata["uid"]:
            return http_error(409, "Conflict", "the UID in the precondition does not match")
        if resource.plural == "pods" and self.graceful_pods and options.get("gracePeriodSeconds") != 0:
            raw = copy_json(current)
            raw["metadata"].setdefault("deletionTimestamp", self.now)
            return _respond(self._store("MODIFIED", resource, raw))
        self.remove(resource, metadata.get("namespace", ""), metadata["name"])
        return _respond({"kind": "Status", "status": "Success"})

    def _review(self, body: Json) -> Json:
        user = self.tokens.get(body["spec"]["token"])
        if user is None:
            return {**body, "status": {"authenticated": False, "error": "unknown token"}}
        return {**body, "status": {"authenticated": True, "audiences": body["spec"].get("audiences", []), "user": user}}

    def _store(self, kind: str, resource: Resource, raw: Json) -> Json:
        self.version = next(self._version)
        raw = copy_json(raw)
        raw["metadata"]["resourceVersion"] = str(self.version)
        key = (resource.plural, raw["metadata"].get("namespace", ""), raw["metadata"]["name"])
        old = self.objects.get(key)
        if old is not None and resource.plural == "trainingjobs" and old.get("spec") != raw.get("spec"):
            raw["metadata"]["generation"] = old["metadata"].get("generation", 1) + 1
        self.objects[key] = raw
        self._notify(kind, resource, raw)
        for watch in self._watches:
            # An object that leaves a watch by its labels is deleted for it, in its last state there.
            if old is not None and watch.resource is resource and not _matches(raw, watch.labels):
                last = {**old, "metadata": {**old["metadata"], "resourceVersion": str(self.version)}}
                self._send_event(watch, "DELETED", last)
        stored: Json = copy_json(raw)
        return stored

    def _notify(self, kind: str, resource: Resource, raw: Json) -> None:
        raw = copy_json(raw)  # events are only read
        self._history.append((self.version, resource.plural, kind, raw))
        for watch in self._watches:
            if watch.resource is resource:
                self._send_event(watch, kind, raw)

    def _send_event(self, watch: _Watch, kind: str, raw: Json) -> None:
        namespace = raw["metadata"].get("namespace", "")
        if not watch.stalled and watch.namespace in ("", namespace) and _matches(raw, watch.labels):
            watch.queue.put_nowait({"type": kind, "object": raw})


def _respond(body: Json) -> HttpResponse:
    return HttpResponse(200, {}, json.dumps(body).encode())


def _find_resource(plural: str) -> Resource:
    return next(resource for resource in (*ALL, *QUEUEING, *CLAIMING, POD_GROUPS) if resource.plural == plural)


def _parse_path(path: str) -> tuple[Resource, str, str, str]:
    parts = path.strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:]
    namespace = ""
    if parts[0] == "namespaces" and len(parts) > 2:
        namespace, parts = parts[1], parts[2:]
    padded = [*parts, "", ""]
    return _find_resource(padded[0]), namespace, padded[1], padded[2]


def _matches(raw: Json, selector: str) -> bool:
    labels = raw["metadata"].get("labels") or {}
    for term in filter(None, selector.split(",")):
        key, unequal, excluded = term.partition("!=")
        if unequal:
            if labels.get(key) == excluded:
                return False
            continue
        key, _, value = term.partition("=")
        if key not in labels or (value and labels[key] != value):
            return False
    return True
