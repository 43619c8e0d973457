"""In-memory copies of objects: a reflector writes them, every other part reads them.

Guarantees:
- An older version of an object never replaces a newer one.
- `replace` removes what a list no longer has, except objects that were written through after that list was made. It
  adds nothing that was seen to be deleted while that list was on its way.
- Listeners are notified once, synchronously, of each change that another process made.
- Where each namespace is listed and watched by itself, each has separate versions: the progress of one watch means
  nothing for another.

Kubernetes compares resource versions as integers, and so does this module. Not for use from other threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainium_operator.plan.model.names import JobId

V = TypeVar("V")
Key = tuple[str, str]
"""(namespace, name); the namespace is empty for cluster-scoped objects."""


@dataclass(frozen=True, slots=True)
class Entry(Generic[V]):
    """One object: its view, uid and version."""

    view: V
    uid: str
    version: int
    owner: JobId | None = None
    """The job that controls it; None for kinds that no job controls."""


class IndexedCache(Generic[V]):
    """Objects of one kind by key, with one secondary index."""

    def __init__(self, *, by_namespace: bool = False) -> None:
        """`by_namespace`: each list and watch covers one namespace, not all."""
        self._by_namespace = by_namespace
        self._entries: dict[Key, Entry[V]] = {}
        self._owned: dict[JobId, dict[Key, Entry[V]]] = {}
        self._listeners: list[Callable[[Key, Entry[V] | None, Entry[V] | None], None]] = []
        self._seen: dict[str, int] = {}
        """Newest version that each watch has seen."""
        self._deleted: dict[Key, int] = {}
        """Versions up to which objects are known to be deleted, until a newer list confirms it."""

    def __len__(self) -> int:
        return len(self._entries)

    def listen(self, listener: Callable[[Key, Entry[V] | None, Entry[V] | None], None]) -> None:
        """Call `listener(key, old, new)` on every change; None stands for absent."""
        self._listeners.append(listener)

    def get(self, key: Key) -> V | None:
        """Return the view of an object."""
        entry = self._entries.get(key)
        return entry.view if entry else None

    def get_entry(self, key: Key) -> Entry[V] | None:
        """Return the view with its uid and version."""
        return self._entries.get(key)

    def snapshot(self) -> dict[Key, Entry[V]]:
        """Return all current entries."""
        return dict(self._entries)

    def list_owned_by(self, job: JobId) -> dict[Key, V]:
        """Return views of the objects that this incarnation of a job controls."""
        return {key: entry.view for key, entry in self._owned.get(job, {}).items()}

    def has_version(self, key: Key, version: int) -> bool:
        """Return whether the store already has this version of an object; the version counts as seen."""
        old = self._entries.get(key)
        if old is None or old.version < version:
            return False
        self._record_scope(key, version)
        return True

    def is_outdated(self, key: Key, version: int) -> bool:
        """Return whether the watch has passed this version, so that the response to a write is outdated."""
        return version <= self._seen.get(self._find_scope(key), 0)

    def put(self, key: Key, entry: Entry[V]) -> bool:
        """Store an object from the watch; return False if a newer version is stored."""
        self._record_scope(key, entry.version)
        return self._put(key, entry)

    def write_through(self, key: Key, entry: Entry[V]) -> bool:
        """Store an object from the response to a write, unless the watch has passed that version."""
        return not self.is_outdated(key, entry.version) and self._put(key, entry, notify=False)

    def remove(self, key: Key, version: int) -> None:
        """Remove an object that the watch reported as deleted, at `version`."""
        self._record_scope(key, version)
        self._deleted[key] = max(version, self._deleted.get(key, 0))
        old = self._entries.get(key)
        if old is not None and old.version <= version:
            self._drop(key, old)

    def forget(self, key: Key, uid: str) -> None:
        """Remove an incarnation that no longer exists (404)."""
        old = self._entries.get(key)
        if old is not None and old.uid == uid:
            self._deleted[key] = max(old.version, self._deleted.get(key, 0))
            self._drop(key, old)

    def replace(self, entries: Mapping[Key, Entry[V]], version: int, namespace: str = "") -> None:
        """Make the store equal to a list made at `version`: also notifies of objects that vanished unseen.

        `namespace`: that of the list, where each is listed by itself; other namespaces are not changed.
        """
        scope = self._find_scope((namespace, ""))
        self._record_scope((namespace, ""), version)
        deleted = self._deleted
        self._deleted = {key: at for key, at in deleted.items() if self._find_scope(key) != scope or at >= version}
        for key, old in list(self._entries.items()):
            if self._find_scope(key) == scope and key not in entries and old.version <= version:
                self._deleted[key] = version
                self._drop(key, old)
        for key, entry in entries.items():
            if entry.version > deleted.get(key, -1):
                self._put(key, entry)

    def _find_scope(self, key: Key) -> str:
        return key[0] if self._by_namespace else ""

    def _record_scope(self, key: Key, version: int) -> None:
        scope = self._find_scope(key)
        self._seen[scope] = max(self._seen.get(scope, 0), version)

    def _put(self, key: Key, entry: Entry[V], *, notify: bool = True) -> bool:
        old = self._entries.get(key)
        if old is not None and old.version >= entry.version:
            return False
        if old is not None:
            self._disown(key, old)
        self._entries[key] = entry
        if entry.owner is not None:
            self._owned.setdefault(entry.owner, {})[key] = entry
        if notify:
            self._notify_listeners(key, old, entry)
        return True

    def _drop(self, key: Key, old: Entry[V]) -> None:
        del self._entries[key]
        self._disown(key, old)
        self._notify_listeners(key, old, None)

    def _disown(self, key: Key, old: Entry[V]) -> None:
        if old.owner is None:
            return
        children = self._owned[old.owner]
        del children[key]
        if not children:
            del self._owned[old.owner]

    def _notify_listeners(self, key: Key, old: Entry[V] | None, new: Entry[V] | None) -> None:
        for listener in self._listeners:
            listener(key, old, new)
