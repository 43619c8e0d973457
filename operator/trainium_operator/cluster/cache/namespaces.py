"""Which namespaces are seen as a whole. Only there jobs are planned.

Each kind of object is listed and watched in each served namespace by itself, or in all at once, under the name "". A
right that is missing, or a namespace that is gone with the Role in it, makes one of them unreadable: what was known of
it stays, and says nothing any more. An absent list is no empty list.
Invariants: a namespace is open while every kind in it is listed; it closes with the first refusal, and opens again only
when what was refused has been listed anew; no other namespace notices.
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


class Sight(StrEnum):
    """What is known of one kind of object in one namespace."""

    UNKNOWN = "Unknown"
    """Not listed yet."""
    LISTED = "Listed"
    FORBIDDEN = "Forbidden"
    """The API server refuses to list or to watch it."""


class Namespaces:
    """The served namespaces and the kinds that are read in each."""

    def __init__(self, names: tuple[str, ...] = EVERYWHERE, *, clock: Callable[[], float] = lambda: 0.0) -> None:
        """`clock` is that of plans, in Unix seconds."""
        self.names = names
        self._clock = clock
        self._sights: dict[str, dict[str, Sight]] = {name: {} for name in names}
        self._open_since: dict[str, float] = {}
        self._listeners: list[Callable[[str], None]] = []

    @property
    def single(self) -> bool:
        """Whether all namespaces are read at once."""
        return self.names == EVERYWHERE

    def expect(self, kind: str) -> None:
        """This kind is read in each namespace: none is open before it is listed."""
        for sights in self._sights.values():
            sights[kind] = Sight.UNKNOWN

    def listen(self, listener: Callable[[str], None]) -> None:
        """Call `listener(namespace)` whenever one opens; "" stands for all."""
        self._listeners.append(listener)

    def sight(self, name: str) -> Sight:
        """What is known of a served namespace ("": of all, where they are read at once)."""
        sights = self._sights[name].values()
        if Sight.FORBIDDEN in sights:
            return Sight.FORBIDDEN
        return Sight.UNKNOWN if Sight.UNKNOWN in sights else Sight.LISTED

    def is_open(self, namespace: str) -> bool:
        """Whether everything that a plan reads there is known."""
        return self._scope(namespace) in self._open_since

    def open_since(self, namespace: str) -> float:
        """Since when (Unix seconds); 0 while it is not."""
        return self._open_since.get(self._scope(namespace), 0.0)

    def counts(self) -> dict[Sight, int]:
        """How many served namespaces are in which state."""
        seen = [self.sight(name) for name in self.names]
        return {sight: seen.count(sight) for sight in Sight}

    def saw(self, kind: str, name: str, sight: Sight, why: str = "") -> None:
        """A list or a watch of one kind succeeded or was refused."""
        before = self.sight(name)
        self._sights[name][kind] = sight
        after = self.sight(name)
        if after is Sight.FORBIDDEN and before is not after and self._listeners:  # else nobody plans by it
            logger.warning(
                "%s: %s cannot be read (%s); its jobs are left as they are until it can. Is the namespace gone, or the "
                "operator's RoleBinding in it?",
                self._told(name),
                kind,
                why,
            )
        if after is not Sight.LISTED:
            self._open_since.pop(name, None)
        elif name not in self._open_since:
            self._open_since[name] = self._clock()
            if before is Sight.FORBIDDEN:
                logger.info("%s can be read again", self._told(name))
            for listener in self._listeners:
                listener(name)

    def _scope(self, namespace: str) -> str:
        return "" if self.single else namespace

    def _told(self, name: str) -> str:
        return f"namespace {name}" if name else "all namespaces"
