"""Keep a store equal to the objects of one kind in the API server: list, replace, watch.

Guarantees:
- The store converges after any failure of the connection.
- An object that was deleted unseen does not stay, because a list replaces the store's content.
- A stream that is silent for longer than the interval of bookmarks is closed.
- The list is repeated about every ten minutes, so a lost event has no lasting effect.
- A server that is at an older version than before is an error (StateRestoredError), found before a broken watch
  continues: the server would send nothing until it has passed the version of that watch.
- Where individual namespaces are served, each is listed and watched separately into one store. A refusal of one (403)
  neither stops the others nor removes its objects (`namespaces`).

Lists are paged, and only views are kept, so a large list needs little memory.
"""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from trainium_contract.api_server.errors import (
    ApiError,
    ExpiredError,
    ForbiddenError,
    StateRestoredError,
    UnavailableError,
)
from trainium_operator.backoff import compute_backoff
from trainium_operator.bounded_dict import BoundedDict
from trainium_operator.cluster.cache.namespaces import ListState, Namespaces
from trainium_operator.cluster.cache.ownership import find_controlling_job, is_labelled
from trainium_operator.cluster.cache.store import Entry, IndexedCache, Key

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_contract.api_server.responses import Json
    from trainium_operator.cluster.api.client import Api
    from trainium_operator.cluster.api.resources import Resource
    from trainium_operator.plan.model.names import JobId
    from trainium_operator.plan.model.observed import StrayPod

V = TypeVar("V")
logger = logging.getLogger(__name__)

WATCH_SECONDS = 240
"""The server ends a watch after this; with jitter, so that not all end at once."""
SILENCE_SECONDS = 90.0
"""Well above the minute between bookmarks, which are late on a busy server."""
RELIST_SECONDS = 600.0
MAX_STRAYS = 1_000
UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""Errors that reading an object of another shape may raise."""
FIRST_BACKOFF = 0.2
MAX_BACKOFF_SECONDS = 15.0


@dataclass(slots=True)
class _Scope:
    """One list and watch, of one namespace or of all."""

    namespace: str
    known: bool = False
    """It has been listed, or refused where other namespaces are served too."""
    refused: bool = False
    """The last list was answered with 403."""
    last_seen: float = 0.0
    listed: float = 0.0
    version: str = ""
    """Resource version where the watch continues; empty before the first list and after a refusal."""
    newest: int = 0
    """Newest resource version that the server has sent."""
    broken: bool = False
    """The watch did not end in order."""
    stale: bool = False
    """A list was refused while the watch continued, so the watch is no longer trusted."""


class Lister(Generic[V]):
    """Fill a store from lists and from single reads; `Reflector` adds the watch."""

    def __init__(
        self,
        api: Api,
        resource: Resource,
        parse: Callable[[Json], V],
        *,
        namespaces: Namespaces | None = None,
        labels: str = "",
        of_jobs: bool = False,
        find_stray: Callable[[Json], StrayPod | None] | None = None,
        relist_seconds: float = RELIST_SECONDS,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`of_jobs`: keep only objects that a job controls; others cost nothing, whatever their labels.

        `find_stray` returns those of the others that are kept in `strays`.

        `namespaces` has the served namespaces and records their states; None means all.
        """
        self.synced = asyncio.Event()
        """Each namespace has been listed once, or is known to be unreadable."""
        self.resource = resource
        self._api = api
        self._parse = parse
        self._namespaces = namespaces or Namespaces()
        self._namespaces.add_kind(resource.plural)
        self.store: IndexedCache[V] = IndexedCache(by_namespace=not self._namespaces.is_cluster_wide)
        self._scopes = [_Scope(name) for name in self._namespaces.names]
        self._labels = labels
        self._of_jobs = of_jobs
        self.strays: dict[Key, StrayPod] = {}
        """Pods that no job counts as its own, at most `MAX_STRAYS`."""
        self.unwatched: BoundedDict[Key, str] = BoundedDict(MAX_STRAYS)
        """Objects that left the watch without a deletion, because they lost its label: the names of their jobs."""
        self._find_stray = find_stray
        self._stray_listeners: list[Callable[[Key], None]] = []
        self._relist_seconds = relist_seconds
        self._jitter = jitter

    @property
    def last_seen(self) -> float:
        """Loop time of the server's last response, for the namespace with the oldest; 0 before the first."""
        return min(scope.last_seen for scope in self._scopes)

    @property
    def answered(self) -> bool:
        """Each namespace has been listed or refused."""
        return all(scope.known or scope.refused for scope in self._scopes)

    def is_listed_since(self, namespace: str, since: float) -> bool:
        """Return whether the objects of this namespace have been listed at or after `since` (loop time)."""
        served = "" if self._namespaces.is_cluster_wide else namespace
        return any(scope.namespace == served and scope.listed and scope.listed >= since for scope in self._scopes)

    async def refresh(self, since: float | None = None) -> str:
        """Make the store equal to the server; return the last list's resource version. Raises ApiError.

        With `since` (loop time), only namespaces that were last listed before it. Where individual namespaces are
        served, a refused one is skipped: its objects are not used until it is listed.
        """
        version = ""
        for scope in self._scopes:
            if since is not None and scope.listed >= since:
                continue
            try:
                version = await self._list(scope)
            except ForbiddenError as error:
                if self._namespaces.is_cluster_wide:
                    raise
                scope.stale = True
                self._handle_refusal(scope, error)
        return version

    def _handle_refusal(self, scope: _Scope, error: ForbiddenError) -> None:
        scope.last_seen = asyncio.get_running_loop().time()
        scope.refused = True
        self._namespaces.record(self.resource.plural, scope.namespace, ListState.FORBIDDEN, str(error))
        if not self._namespaces.is_cluster_wide:
            self._mark_known(scope)

    def _mark_known(self, scope: _Scope) -> None:
        scope.known = True
        if all(listed_scope.known for listed_scope in self._scopes):
            self.synced.set()

    async def _list(self, scope: _Scope) -> str:
        entries: dict[Key, Entry[V]] = {}
        strays: set[Key] = set()
        began = asyncio.get_running_loop().time()
        token, newest = "", scope.newest
        while True:
            page = await self._api.list_page(self.resource, scope.namespace, labels=self._labels, continue_token=token)
            scope.last_seen = asyncio.get_running_loop().time()
            try:
                self._add_page(page, entries, strays)
                token = page["metadata"].get("continue", "")
                version = str(page["metadata"]["resourceVersion"])
                made_at = int(version)
            except UNREADABLE as error:
                raise UnavailableError(
                    f"a list of {self.resource.plural} that cannot be read: {error!r:.200}"
                ) from error
            if not token:
                break
        self._record_version(scope, made_at, newest)
        self.store.replace(entries, made_at, scope.namespace)
        for key, stray in list(self.strays.items()):
            is_listable = not self._labels.startswith(f"{stray.missing_label}=")
            if is_listable and key not in strays and scope.namespace in ("", key[0]):
                self.track_stray(key, None)
        scope.listed, scope.stale, scope.refused = began, False, False
        self._mark_known(scope)
        self._namespaces.record(self.resource.plural, scope.namespace, ListState.LISTED)
        return version

    def _record_version(self, scope: _Scope, version: int, before: int) -> None:
        """Record the version of the server, which has sent `before` earlier. Raises StateRestoredError."""
        if version < before:
            raise StateRestoredError(
                f"the API server has {self.resource.plural} of version {version} and had {before} before, as after a "
                "restore of etcd from a backup; the operator starts again"
            )
        scope.newest = max(scope.newest, version)

    async def _check_version(self, scope: _Scope) -> None:
        """Check that the server is not at an older version than before. Raises ApiError, StateRestoredError."""
        before = scope.newest
        page = await self._api.list_page(self.resource, scope.namespace, labels=self._labels, limit=1, attempts=1)
        self._record_version(scope, int(page["metadata"]["resourceVersion"]), before)
        scope.broken = False

    def listen_to_strays(self, listener: Callable[[Key], None]) -> None:
        """Call `listener(job)` when a stray pod of that name of a job appears or is gone."""
        self._stray_listeners.append(listener)

    def track_stray(self, key: Key, raw: Json | None) -> None:
        """Update whether the object is a stray pod; None: it is gone."""
        stored = self.strays.get(key)
        stray = None if raw is None or self._find_stray is None else self._find_stray(raw)
        if stray == stored or (stored is None and len(self.strays) >= MAX_STRAYS):
            return
        if stray is None:
            del self.strays[key]
        else:
            self.strays[key] = stray
        for previous in filter(None, (stored, stray)):
            for listener in self._stray_listeners:
                listener((key[0], previous.job))

    def _add_page(self, page: Json, entries: dict[Key, Entry[V]], strays: set[Key]) -> None:
        for raw in page.get("items") or ():
            key, version = _parse_key_and_version(raw)
            self.track_stray(key, raw)
            if key in self.strays:
                strays.add(key)
            stored = self.store.get_entry(key)
            # A version identifies one state of one object, so it need not be parsed again.
            same = stored is not None and stored.version == version
            entry = stored if same else self._parse_entry(raw)
            if entry is not None:
                entries[key] = entry

    def observe(self, raw: Json, *, deleted: bool) -> None:
        """Apply an object from a watch."""
        key, version = _parse_key_and_version(raw)
        self.track_stray(key, None if deleted else raw)
        if deleted:
            entry = self.store.get_entry(key)
            if self._find_stray and entry and entry.owner and "deletionTimestamp" not in raw["metadata"]:
                self.unwatched[key] = entry.owner.name
            self.store.remove(key, version)
            return
        if self.store.has_version(key, version):
            return  # mostly the result of a write of this process, which is stored already
        entry = self._parse_entry(raw)
        if entry is not None:
            self.store.put(key, entry)
        elif self._of_jobs and self._find_job(raw) is None:
            self.store.remove(key, version)  # the job may have controlled it before

    def write_through(self, raw: Json) -> None:
        """Apply an object that a write of this process returned."""
        key, version = _parse_key_and_version(raw)
        if self.store.is_outdated(key, version):
            return
        entry = self._parse_entry(raw)
        if entry is not None:
            self.store.write_through(key, entry)

    def _find_job(self, raw: Json) -> JobId | None:
        owner = find_controlling_job(raw) if self._of_jobs else None
        return owner if owner is not None and is_labelled(raw, owner) else None

    def _parse_entry(self, raw: Json) -> Entry[V] | None:
        metadata = raw["metadata"]
        owner = self._find_job(raw)
        if self._of_jobs and owner is None:
            return None
        try:
            view = self._parse(raw)
        except UNREADABLE:
            # One unreadable object must not hide all the others.
            name = f"{metadata.get('namespace', '')}/{metadata['name']}"
            logger.exception("%s %s is not readable", self.resource.kind, name)
            return None
        return Entry(view, metadata["uid"], int(metadata["resourceVersion"]), owner)


class Reflector(Lister[V]):
    """Keep one kind of object in one store; `run` never returns."""

    async def run(self) -> None:
        """List and watch until cancelled."""
        async with asyncio.TaskGroup() as group:
            for scope in self._scopes:
                group.create_task(self._list_and_watch(scope))

    async def _list_and_watch(self, scope: _Scope) -> None:
        failures, refusals = 0, 0
        relist_at = 0.0
        while True:
            loop = asyncio.get_running_loop()
            try:
                if not scope.version or scope.stale or loop.time() >= relist_at:
                    scope.version = await self._list(scope)
                    relist_at = loop.time() + self._relist_seconds * (0.8 + 0.4 * self._jitter())
                    failures = 0
                elif scope.broken:
                    await self._check_version(scope)
                scope.broken = False
                started = loop.time()
                if await self._watch(scope, until=relist_at):
                    failures = 0
                elif loop.time() - started < 1.0:
                    failures += 1  # a server that closes every stream at once is not called without a pause
                refusals = 0
            except ExpiredError:
                scope.version = ""
            except ForbiddenError as error:
                refusals += 1
                failures = refusals  # a list that succeeds before each refused watch does not shorten the pause
                scope.version = ""
                self._handle_refusal(scope, error)
            except ApiError as error:
                failures += 1
                scope.broken = True
                if failures in (1, 10) or failures % 100 == 0:
                    logger.warning("%s: %s (%d in a row)", self.resource.plural, error, failures)
            except UNREADABLE:
                # The event is invalid; the next list has the state.
                failures += 1
                scope.version = ""
                logger.exception("an event of %s cannot be read (%d in a row)", self.resource.plural, failures)
            if failures:
                ceiling = compute_backoff(FIRST_BACKOFF, MAX_BACKOFF_SECONDS, failures)
                await asyncio.sleep(ceiling * (0.5 + 0.5 * self._jitter()))

    async def _watch(self, scope: _Scope, *, until: float) -> bool:
        """Read one stream; return whether it had an event."""
        loop = asyncio.get_running_loop()
        seconds = min(WATCH_SECONDS * (1.0 + 0.25 * self._jitter()), max(1.0, until - loop.time()))
        received = False
        events = self._api.watch(
            self.resource,
            scope.namespace,
            labels=self._labels,
            resource_version=scope.version,
            seconds=int(seconds),
            silence=SILENCE_SECONDS,
        )
        async with aclosing(events):
            async for event in events:
                scope.last_seen = loop.time()
                received = True
                raw = event["object"]
                if event["type"] != "BOOKMARK":
                    self.observe(raw, deleted=event["type"] == "DELETED")
                scope.version = raw["metadata"]["resourceVersion"]
                scope.newest = max(scope.newest, int(scope.version))
                if scope.stale:
                    break
        scope.last_seen = loop.time()  # an orderly end also shows that the server is alive
        return received


def _parse_key_and_version(raw: Json) -> tuple[Key, int]:
    metadata = raw["metadata"]
    return (metadata.get("namespace", ""), metadata["name"]), int(metadata["resourceVersion"])
