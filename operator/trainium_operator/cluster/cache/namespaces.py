"""Track which namespaces are listed completely. Only there jobs are planned.

Each kind of object is listed and watched in each served namespace by itself, or in all at once, under the name "". A
missing right, or a namespace that is deleted with its Role, makes one of them unreadable: its objects stay cached, but
no plan uses them. A missing list is not an empty list.

Guarantee: a namespace is synced while every kind in it is listed. The first refusal ends that until the refused kind
has been listed again; other namespaces are not affected.
"""

from __future__ import annotations

import logging
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

EVERYWHERE = ("",)
"""The one scope of a cluster whose namespaces are all served."""


class ListState(StrEnum):
    """The last result of listing one kind of object in one namespace."""

    UNKNOWN = "Unknown"
    """Not listed yet."""
    LISTED = "Listed"
    FORBIDDEN = "Forbidden"
    """The API server refuses to list or to watch it."""


class Namespaces:
    """The served namespaces and the kinds that are read in each."""

    def __init__(self, names: tuple[str, ...] = EVERYWHERE, *, clock: Callable[[], float] = lambda: 0.0) -> None:
        """`clock` returns the plans' time in Unix seconds."""
        self.names = names
        self._clock = clock
        self._states: dict[str, dict[str, ListState]] = {name: {} for name in names}
        self._synced_since: dict[str, float] = {}
        self._listeners: list[Callable[[str], None]] = []

    @property
    def is_cluster_wide(self) -> bool:
        """Return whether all namespaces are read at once."""
        return self.names == EVERYWHERE

    def add_kind(self, kind: str) -> None:
        """Add a kind that is read in each namespace: none is synced before it is listed."""
        for states in self._states.values():
            states[kind] = ListState.UNKNOWN

    def listen(self, listener: Callable[[str], None]) -> None:
        """Call `listener(namespace)` whenever one becomes synced; "" stands for all."""
        self._listeners.append(listener)

    def get_state(self, name: str) -> ListState:
        """Return what is known of a served namespace ("": of all, where they are read at once)."""
        states = self._states[name].values()
        if ListState.FORBIDDEN in states:
            return ListState.FORBIDDEN
        return ListState.UNKNOWN if ListState.UNKNOWN in states else ListState.LISTED

    def is_synced(self, namespace: str) -> bool:
        """Return whether everything that a plan reads in the namespace is known."""
        return self._find_scope(namespace) in self._synced_since

    def get_sync_time(self, namespace: str) -> float:
        """Return since when the namespace is synced (Unix seconds); 0 while it is not."""
        return self._synced_since.get(self._find_scope(namespace), 0.0)

    def count_by_state(self) -> dict[ListState, int]:
        """Return the number of served namespaces in each state."""
        seen = [self.get_state(name) for name in self.names]
        return {state: seen.count(state) for state in ListState}

    def record(self, kind: str, name: str, state: ListState, why: str = "") -> None:
        """Record that a list or a watch of one kind succeeded or was refused."""
        before = self.get_state(name)
        self._states[name][kind] = state
        after = self.get_state(name)
        if after is ListState.FORBIDDEN and before is not after and self._listeners:  # otherwise no plan depends on it
            logger.warning(
                "%s: %s cannot be read (%s); its jobs are left as they are until it can. Is the namespace gone, or the "
                "operator's RoleBinding in it?",
                self._get_reported_name(name),
                kind,
                why,
            )
        if after is not ListState.LISTED:
            self._synced_since.pop(name, None)
        elif name not in self._synced_since:
            self._synced_since[name] = self._clock()
            if before is ListState.FORBIDDEN:
                logger.info("%s can be read again", self._get_reported_name(name))
            for listener in self._listeners:
                listener(name)

    def _find_scope(self, namespace: str) -> str:
        return "" if self.is_cluster_wide else namespace

    def _get_reported_name(self, name: str) -> str:
        return f"namespace {name}" if name else "all namespaces"
