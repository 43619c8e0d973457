"""Keeps a store equal to the objects of one kind in the API server: list, replace, watch.

Invariants: whatever happens to the connection, the store converges; nothing that was deleted while we did not look
stays (a list replaces the store's content); a stream that is silent for longer than the server's bookmarks is given up;
and the list is repeated every ten minutes or so, so that not even a lost event lasts.
Pages keep the memory of a large list small; a view is what is kept, never the object.
"""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import aclosing
from typing import TYPE_CHECKING, Generic, TypeVar

from trainium_operator.cluster.api.errors import ApiError, GoneError
from trainium_operator.cluster.cache.ownership import controlling_job, is_labelled
from trainium_operator.cluster.cache.store import Entry, Key, Store

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_operator.cluster.api.client import Api, Json
    from trainium_operator.cluster.api.resources import Resource
    from trainium_operator.plan.model.job_id import JobId

V = TypeVar("V")
logger = logging.getLogger(__name__)

WATCH_SECONDS = 240
"""The server ends a watch after this; with jitter, so that not all end at once."""
SILENCE_SECONDS = 90.0
"""Well above the minute between a server's bookmarks, which come late on a busy one."""
RELIST_SECONDS = 600.0
FIRST_BACKOFF = 0.2
LONGEST_BACKOFF = 15.0


class Lister(Generic[V]):
    """Fills a store from lists, and from single objects that others read; `Reflector` adds the watch."""

    def __init__(
        self,
        api: Api,
        resource: Resource,
        store: Store[V],
        parse: Callable[[Json], V],
        *,
        namespace: str = "",
        labels: str = "",
        of_jobs: bool = False,
    ) -> None:
        """`of_jobs`: only objects that a job controls are kept; others cost nothing, whatever their labels say."""
        self.synced = asyncio.Event()
        self.heard = 0.0
        """Loop time of the last sign of life from the server; 0 before the first."""
        self.listed = 0.0
        """Loop time at which the newest complete list was begun; 0 before the first."""
        self.resource = resource
        self.store = store
        self._api = api
        self._parse = parse
        self._namespace = namespace
        self._labels = labels
        self._of_jobs = of_jobs

    async def refresh(self) -> str:
        """Make the store equal to the server; returns the list's resource version. Raises ApiError."""
        entries: dict[Key, Entry[V]] = {}
        began = asyncio.get_running_loop().time()
        token = ""
        while True:
            page = await self._api.list_page(self.resource, self._namespace, labels=self._labels, continue_token=token)
            self.heard = asyncio.get_running_loop().time()
            for raw in page.get("items") or ():
                key = _key(raw)
                known = self.store.entry(key)
                # A version stands for one state of one object: nothing to read anew, and a take-over is waiting.
                same = known is not None and known.version == int(raw["metadata"]["resourceVersion"])
                entry = known if same else self._entry(raw)
                if entry is not None:
                    entries[key] = entry
            token = page["metadata"].get("continue", "")
            if not token:
                break
        version: str = page["metadata"]["resourceVersion"]
        self.store.replace(entries, int(version))
        self.listed = began
        self.synced.set()
        return version

    def observe(self, raw: Json, *, deleted: bool) -> None:
        """An object from a watch."""
        if deleted:
            self.store.remove(_key(raw), int(raw["metadata"]["resourceVersion"]))
            return
        if self.store.knows(_key(raw), int(raw["metadata"]["resourceVersion"])):
            return  # mostly what a write of our own brought already
        entry = self._entry(raw)
        if entry is not None:
            self.store.put(_key(raw), entry)
        elif self._of_jobs and self._job_of(raw) is None:
            self.store.remove(_key(raw), int(raw["metadata"]["resourceVersion"]))  # it was a job's, perhaps

    def write_through(self, raw: Json) -> None:
        """An object that a write of our own returned."""
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
        except (KeyError, TypeError, ValueError, AttributeError):
            # One object that we cannot read must not hide all the others.
            name = f"{metadata.get('namespace', '')}/{metadata['name']}"
            logger.exception("%s %s is not readable", self.resource.kind, name)
            return None
        return Entry(view, metadata["uid"], int(metadata["resourceVersion"]), owner)


class Reflector(Lister[V]):
    """One kind of object into one store; `run` never returns."""

    def __init__(
        self,
        api: Api,
        resource: Resource,
        store: Store[V],
        parse: Callable[[Json], V],
        *,
        namespace: str = "",
        labels: str = "",
        of_jobs: bool = False,
        relist_seconds: float = RELIST_SECONDS,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        super().__init__(api, resource, store, parse, namespace=namespace, labels=labels, of_jobs=of_jobs)
        self._relist_seconds = relist_seconds
        self._jitter = jitter
        self._version = ""

    async def run(self) -> None:
        """List and watch until cancelled."""
        failures = 0
        relist_at = 0.0
        while True:
            loop = asyncio.get_running_loop()
            try:
                if not self._version or loop.time() >= relist_at:
                    self._version = await self.refresh()
                    relist_at = loop.time() + self._relist_seconds * (0.8 + 0.4 * self._jitter())
                    failures = 0
                started = loop.time()
                if await self._watch(until=relist_at):
                    failures = 0
                elif loop.time() - started < 1.0:
                    failures += 1  # a server that closes every stream at once must not be hammered
            except GoneError:
                self._version = ""
            except ApiError as error:
                failures += 1
                if failures in (1, 10) or failures % 100 == 0:
                    logger.warning("%s: %s (%d in a row)", self.resource.plural, error, failures)
            if failures:
                ceiling = min(LONGEST_BACKOFF, FIRST_BACKOFF * 2.0 ** min(failures - 1, 16))
                await asyncio.sleep(ceiling * (0.5 + 0.5 * self._jitter()))

    async def _watch(self, *, until: float) -> bool:
        """One stream; whether it brought anything."""
        loop = asyncio.get_running_loop()
        seconds = min(WATCH_SECONDS * (1.0 + 0.25 * self._jitter()), max(1.0, until - loop.time()))
        brought = False
        events = self._api.watch(
            self.resource,
            self._namespace,
            labels=self._labels,
            resource_version=self._version,
            seconds=int(seconds),
            silence=SILENCE_SECONDS,
        )
        async with aclosing(events):
            async for event in events:
                self.heard = loop.time()
                brought = True
                raw = event["object"]
                if event["type"] != "BOOKMARK":
                    self.observe(raw, deleted=event["type"] == "DELETED")
                self._version = raw["metadata"]["resourceVersion"]
        self.heard = loop.time()  # an orderly end is a sign of life as well
        return brought


def _key(raw: Json) -> Key:
    metadata = raw["metadata"]
    return metadata.get("namespace", ""), metadata["name"]
