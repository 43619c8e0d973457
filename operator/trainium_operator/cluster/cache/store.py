"""In-memory copies of objects, kept by a reflector, read by everybody.

Invariants: an older version of an object never replaces a newer one; `replace` removes what a list no longer has,
except objects that were written through after that list was made, and brings back nothing that was seen to go while
that list was on its way; every change that somebody else made is told once,
synchronously, to the listeners (a write of our own is known to its writer). Kubernetes compares resource
versions as integers, and so do we. Where each namespace is listed and watched by itself, each has versions of its own:
how far one watch has come says nothing of another. Not for use from other threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainium_operator.plan.model.names import JobId

V = TypeVar("V")
Key = tuple[str, str]
"""Namespace and name; the namespace is empty for objects without one."""


@dataclass(frozen=True, slots=True)
class Entry(Generic[V]):
    """One object: its view, and what identifies the incarnation and its version."""

    view: V
    uid: str
    version: int
    owner: JobId | None = None
    """The job that controls it; None for kinds that belong to no job."""


class IndexedCache(Generic[V]):
    """Objects of one kind by key, with one secondary index."""

    def __init__(self, *, by_namespace: bool = False) -> None:
        """`by_namespace`: lists and watches are of one namespace each, not of all."""
        self._by_namespace = by_namespace
        self._entries: dict[Key, Entry[V]] = {}
        self._owned: dict[JobId, dict[Key, Entry[V]]] = {}
        self._listeners: list[Callable[[Key, Entry[V] | None, Entry[V] | None], None]] = []
        self._seen: dict[str, int] = {}
        """How far each watch has come."""
        self._gone: dict[Key, int] = {}
        """Versions up to which objects are known to be gone, until a younger list says so too."""

    def __len__(self) -> int:
        return len(self._entries)

    def listen(self, listener: Callable[[Key, Entry[V] | None, Entry[V] | None], None]) -> None:
        """Call `listener(key, old, new)` on every change; None stands for absent."""
        self._listeners.append(listener)

    def get(self, key: Key) -> V | None:
        """The view of an object."""
        entry = self._entries.get(key)
        return entry.view if entry else None

    def entry(self, key: Key) -> Entry[V] | None:
        """The view with its uid and version."""
        return self._entries.get(key)

    def snapshot(self) -> dict[Key, Entry[V]]:
        """All entries at this moment."""
        return dict(self._entries)

    def owned_by(self, job: JobId) -> dict[Key, V]:
        """Views of the objects that this incarnation of a job controls."""
        return {key: entry.view for key, entry in self._owned.get(job, {}).items()}

    def knows(self, key: Key, version: int) -> bool:
        """Whether the watch brings nothing new with this version of an object; it counts as seen then."""
        old = self._entries.get(key)
        if old is None or old.version < version:
            return False
        self._saw(key, version)
        return True

    def has_passed(self, key: Key, version: int) -> bool:
        """Whether the watch has brought this version or a younger one, of whatever object: a write's answer is late."""
        return version <= self._seen.get(self._scope(key), 0)

    def put(self, key: Key, entry: Entry[V]) -> bool:
        """Take an object from the watch; False when we know a newer version."""
        self._saw(key, entry.version)
        return self._put(key, entry)

    def write_through(self, key: Key, entry: Entry[V]) -> bool:
        """Take an object from the answer to our own write, unless the watch has passed that version already."""
        return not self.has_passed(key, entry.version) and self._put(key, entry, tell=False)

    def remove(self, key: Key, version: int) -> None:
        """The watch said that the object was deleted, at `version`."""
        self._saw(key, version)
        self._gone[key] = max(version, self._gone.get(key, 0))
        old = self._entries.get(key)
        if old is not None and old.version <= version:
            self._drop(key, old)

    def forget(self, key: Key, uid: str) -> None:
        """The API server said that this incarnation no longer exists (404)."""
        old = self._entries.get(key)
        if old is not None and old.uid == uid:
            self._gone[key] = max(old.version, self._gone.get(key, 0))
            self._drop(key, old)

    def replace(self, entries: Mapping[Key, Entry[V]], version: int, namespace: str = "") -> None:
        """Make the store equal to a list made at `version`: also tells what vanished unseen.

        `namespace`: what the list is of, where each is listed by itself; of others it says nothing.
        """
        scope = self._scope((namespace, ""))
        self._saw((namespace, ""), version)
        gone = self._gone
        self._gone = {key: at for key, at in gone.items() if self._scope(key) != scope or at >= version}
        for key, old in list(self._entries.items()):
            if self._scope(key) == scope and key not in entries and old.version <= version:
                self._gone[key] = version
                self._drop(key, old)
        for key, entry in entries.items():
            if entry.version > gone.get(key, -1):
                self._put(key, entry)

    def _scope(self, key: Key) -> str:
        return key[0] if self._by_namespace else ""

    def _saw(self, key: Key, version: int) -> None:
        scope = self._scope(key)
        self._seen[scope] = max(self._seen.get(scope, 0), version)

    def _put(self, key: Key, entry: Entry[V], *, tell: bool = True) -> bool:
        old = self._entries.get(key)
        if old is not None and old.version >= entry.version:
            return False
        if old is not None:
            self._disown(key, old)
        self._entries[key] = entry
        if entry.owner is not None:
            self._owned.setdefault(entry.owner, {})[key] = entry
        if tell:
            self._tell(key, old, entry)
        return True

    def _drop(self, key: Key, old: Entry[V]) -> None:
        del self._entries[key]
        self._disown(key, old)
        self._tell(key, old, None)

    def _disown(self, key: Key, old: Entry[V]) -> None:
        if old.owner is None:
            return
        children = self._owned[old.owner]
        del children[key]
        if not children:
            del self._owned[old.owner]

    def _tell(self, key: Key, old: Entry[V] | None, new: Entry[V] | None) -> None:
        for listener in self._listeners:
            listener(key, old, new)
