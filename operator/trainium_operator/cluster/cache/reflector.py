"""Keeps a store equal to the objects of one kind in the API server: list, replace, watch.

Invariants: whatever happens to the connection, the store converges; nothing that was deleted while we did not look
stays (a list replaces the store's content); a stream that is silent for longer than the server's bookmarks is given up;
and the list is repeated every ten minutes or so, so that not even a lost event lasts.
Pages keep the memory of a large list small; a view is what is kept, never the object.
Where single namespaces are served each is listed and watched by itself, into one store: a refusal of one (403) neither
stops the others nor empties what is known of it (`namespaces`).
"""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from trainium_operator.cluster.api.errors import ApiError, ExpiredError, ForbiddenError, UnavailableError
from trainium_operator.cluster.cache.namespaces import ListState, Namespaces
from trainium_operator.cluster.cache.ownership import controlling_job, is_labelled
from trainium_operator.cluster.cache.store import Entry, IndexedCache, Key

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_operator.cluster.api.client import Api, Json
    from trainium_operator.cluster.api.resources import Resource
    from trainium_operator.plan.model.names import JobId

V = TypeVar("V")
logger = logging.getLogger(__name__)

WATCH_SECONDS = 240
"""The server ends a watch after this; with jitter, so that not all end at once."""
SILENCE_SECONDS = 90.0
"""Well above the minute between a server's bookmarks, which come late on a busy one."""
RELIST_SECONDS = 600.0
UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""Errors that reading an object of another shape may raise."""
FIRST_BACKOFF = 0.2
LONGEST_BACKOFF = 15.0


@dataclass(slots=True)
class _Scope:
    """One list and watch: of one namespace, or of all."""

    namespace: str
    known: bool = False
    """It has been listed, or refused where others are served too."""
    refused: bool = False
    """A list was answered with 403, the last time."""
    last_seen: float = 0.0
    listed: float = 0.0
    version: str = ""
    """Where the watch goes on; empty before the first list and after a refusal."""
    stale: bool = False
    """A list was refused beside the watch, which can no longer be trusted."""


class Lister(Generic[V]):
    """Fills a store from lists, and from single objects that others read; `Reflector` adds the watch."""

    def __init__(
        self,
        api: Api,
        resource: Resource,
        parse: Callable[[Json], V],
        *,
        namespaces: Namespaces | None = None,
        labels: str = "",
        of_jobs: bool = False,
        relist_seconds: float = RELIST_SECONDS,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`of_jobs`: only objects that a job controls are kept; others cost nothing, whatever their labels.

        `namespaces` has the served ones and records their states; None means all.
        """
        self.synced = asyncio.Event()
        """Each namespace has been listed once, or is known to be out of reach."""
        self.resource = resource
        self._api = api
        self._parse = parse
        self._namespaces = namespaces or Namespaces()
        self._namespaces.expect(resource.plural)
        self.store: IndexedCache[V] = IndexedCache(by_namespace=not self._namespaces.single)
        self._scopes = [_Scope(name) for name in self._namespaces.names]
        self._labels = labels
        self._of_jobs = of_jobs
        self._relist_seconds = relist_seconds
        self._jitter = jitter

    @property
    def last_seen(self) -> float:
        """Loop time of the last answer of the server, of the namespace with the oldest; 0 before the first."""
        return min(scope.last_seen for scope in self._scopes)

    @property
    def answered(self) -> bool:
        """Each namespace has been listed or refused."""
        return all(scope.known or scope.refused for scope in self._scopes)

    def is_listed_since(self, namespace: str, since: float) -> bool:
        """Return whether the objects of this namespace have been listed at or after `since` (loop time)."""
        served = "" if self._namespaces.single else namespace
        return any(scope.namespace == served and scope.listed and scope.listed >= since for scope in self._scopes)

    async def refresh(self, since: float | None = None) -> str:
        """Make the store equal to the server; returns the last list's resource version. Raises ApiError.

        With `since` (loop time) only what was last listed before it. Where single namespaces are served a refused one
        is passed over: nothing that is known of it counts until it is listed.
        """
        version = ""
        for scope in self._scopes:
            if since is not None and scope.listed >= since:
                continue
            try:
                version = await self._list(scope)
            except ForbiddenError as error:
                if self._namespaces.single:
                    raise
                scope.stale = True
                self._refused(scope, error)
        return version

    def _refused(self, scope: _Scope, error: ForbiddenError) -> None:
        scope.last_seen = asyncio.get_running_loop().time()
        scope.refused = True
        self._namespaces.record(self.resource.plural, scope.namespace, ListState.FORBIDDEN, str(error))
        if not self._namespaces.single:
            self._know(scope)

    def _know(self, scope: _Scope) -> None:
        scope.known = True
        if all(each.known for each in self._scopes):
            self.synced.set()

    async def _list(self, scope: _Scope) -> str:
        entries: dict[Key, Entry[V]] = {}
        began = asyncio.get_running_loop().time()
        token = ""
        while True:
            page = await self._api.list_page(self.resource, scope.namespace, labels=self._labels, continue_token=token)
            scope.last_seen = asyncio.get_running_loop().time()
            try:
                self._add_page(page, entries)
                token = page["metadata"].get("continue", "")
                version = str(page["metadata"]["resourceVersion"])
                made_at = int(version)
            except UNREADABLE as error:
                raise UnavailableError(
                    f"a list of {self.resource.plural} that cannot be read: {error!r:.200}"
                ) from error
            if not token:
                break
        self.store.replace(entries, made_at, scope.namespace)
        scope.listed, scope.stale, scope.refused = began, False, False
        self._know(scope)
        self._namespaces.record(self.resource.plural, scope.namespace, ListState.LISTED)
        return version

    def _add_page(self, page: Json, entries: dict[Key, Entry[V]]) -> None:
        """Add the entries of a page of a list."""
        for raw in page.get("items") or ():
            key = _key(raw)
            known = self.store.entry(key)
            # A version identifies one state of one object, so it need not be parsed again.
            same = known is not None and known.version == int(raw["metadata"]["resourceVersion"])
            entry = known if same else self._entry(raw)
            if entry is not None:
                entries[key] = entry

    def observe(self, raw: Json, *, deleted: bool) -> None:
        """Apply an object from a watch."""
        if deleted:
            self.store.remove(_key(raw), int(raw["metadata"]["resourceVersion"]))
            return
        if self.store.knows(_key(raw), int(raw["metadata"]["resourceVersion"])):
            return  # mostly what a write of this process has stored already
        entry = self._entry(raw)
        if entry is not None:
            self.store.put(_key(raw), entry)
        elif self._of_jobs and self._job_of(raw) is None:
            self.store.remove(_key(raw), int(raw["metadata"]["resourceVersion"]))  # it was a job's, perhaps

    def write_through(self, raw: Json) -> None:
        """Apply an object that a write of this process returned."""
        if self.store.has_passed(_key(raw), int(raw["metadata"]["resourceVersion"])):
            return
        entry = self._entry(raw)
        if entry is not None:
            self.store.write_through(_key(raw), entry)

    def _job_of(self, raw: Json) -> JobId | None:
        owner = controlling_job(raw) if self._of_jobs else None
        return owner if owner is not None and is_labelled(raw, owner) else None

    def _entry(self, raw: Json) -> Entry[V] | None:
        metadata = raw["metadata"]
        owner = self._job_of(raw)
        if self._of_jobs and owner is None:
            return None
        try:
            view = self._parse(raw)
        except UNREADABLE:
            # One object that we cannot read must not hide all the others.
            name = f"{metadata.get('namespace', '')}/{metadata['name']}"
            logger.exception("%s %s is not readable", self.resource.kind, name)
            return None
        return Entry(view, metadata["uid"], int(metadata["resourceVersion"]), owner)


class Reflector(Lister[V]):
    """One kind of object into one store; `run` never returns."""

    async def run(self) -> None:
        """List and watch until cancelled."""
        async with asyncio.TaskGroup() as group:
            for scope in self._scopes:
                group.create_task(self._keep(scope))

    async def _keep(self, scope: _Scope) -> None:
        failures, creation_backoff = 0, 0
        relist_at = 0.0
        while True:
            loop = asyncio.get_running_loop()
            try:
                if not scope.version or scope.stale or loop.time() >= relist_at:
                    scope.version = await self._list(scope)
                    relist_at = loop.time() + self._relist_seconds * (0.8 + 0.4 * self._jitter())
                    failures = 0
                started = loop.time()
                if await self._watch(scope, until=relist_at):
                    failures = 0
                elif loop.time() - started < 1.0:
                    failures += 1  # a server that closes every stream at once must not be hammered
                creation_backoff = 0
            except ExpiredError:
                scope.version = ""
            except ForbiddenError as error:
                creation_backoff += 1
                failures = creation_backoff  # a list that succeeds before each refused watch does not shorten the pause
                scope.version = ""
                self._refused(scope, error)
            except ApiError as error:
                failures += 1
                if failures in (1, 10) or failures % 100 == 0:
                    logger.warning("%s: %s (%d in a row)", self.resource.plural, error, failures)
            except UNREADABLE:
                # Not a valid event: the next list has the state.
                failures += 1
                scope.version = ""
                logger.exception("an event of %s cannot be read (%d in a row)", self.resource.plural, failures)
            if failures:
                ceiling = min(LONGEST_BACKOFF, FIRST_BACKOFF * 2.0 ** min(failures - 1, 16))
                await asyncio.sleep(ceiling * (0.5 + 0.5 * self._jitter()))

    async def _watch(self, scope: _Scope, *, until: float) -> bool:
        """Run one stream; return whether it had an event."""
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
                if scope.stale:
                    break
        scope.last_seen = loop.time()  # an orderly end shows that the server is alive as well
        return received


def _key(raw: Json) -> Key:
    metadata = raw["metadata"]
    return metadata.get("namespace", ""), metadata["name"]
