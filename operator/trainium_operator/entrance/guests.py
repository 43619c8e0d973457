"""Who may hold a connection to one of the operator's servers, and how many.

A connection belongs to a stranger until a valid token came over it, and to that token's holder (a pod, a user) after
that.
Invariants: a stranger stays `STRANGER_SECONDS` at most, whatever it sends and however slowly; at `MOST_STRANGERS` (or
what the server sets) the address with most of them loses its oldest, and where nobody has more than `FEW` no more are
let in until one has gone; a holder has at most `MOST_OF_HOLDER`; an address of which `MOST_IN_VAIN` connections came to
nothing within `WINDOW_SECONDS` is closed at once until they are over. So what a flood holds is bounded, and a known
holder's own connections are not part of it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

STRANGER_SECONDS = 15.0
"""Of its own time: while it waits for us, as for a review of its token, the clock stands."""
MOST_STRANGERS = 1_024
FEW = 8
MOST_OF_HOLDER = 16
"""An agent has one stream, of an older version two connections; a browser has six."""
MOST_IN_VAIN = 512
WINDOW_SECONDS = 10.0
REMEMBERED = 4_096


@dataclass(eq=False, slots=True)
class Guest:
    """One connection; `close` ends it at once."""

    source: str
    close: Callable[[], None]
    holder: str = ""
    refusals: int = 0
    """Requests that were refused while it was a stranger's."""
    timer: asyncio.TimerHandle | None = None


class Guests:
    """All connections of one server; within one event loop."""

    def __init__(self, most_strangers: int | None = None, *, most_in_vain: int | None = None) -> None:
        """`MOST_STRANGERS` and `MOST_IN_VAIN` unless told otherwise; `most_in_vain=0`: without that limit."""
        self._most_in_vain = MOST_IN_VAIN if most_in_vain is None else most_in_vain
        self._most_strangers = MOST_STRANGERS if most_strangers is None else most_strangers
        self._strangers: dict[str, dict[Guest, None]] = {}
        """By address, oldest first."""
        self._count = 0
        self._of_holder: dict[str, dict[Guest, None]] = {}
        self._in_vain: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._room = asyncio.Event()
        self._room.set()

    @property
    def strangers(self) -> int:
        """Connections over which no valid token came yet."""
        return self._count

    async def room(self) -> None:
        """Wait until one more connection may be accepted."""
        await self._room.wait()

    def came(self, source: str, close: Callable[[], None]) -> Guest | None:
        """A connection was accepted; None when it must be closed at once."""
        loop = asyncio.get_running_loop()
        since, times = self._in_vain.get(source, (0.0, 0))
        if 0 < self._most_in_vain <= times and loop.time() - since < WINDOW_SECONDS:
            return None
        guest = Guest(source, close)
        guest.timer = loop.call_later(STRANGER_SECONDS, self._expire, guest)
        self._strangers.setdefault(source, {})[guest] = None
        self._count += 1
        if self._count >= self._most_strangers:
            self._make_room()
        return guest

    def asked(self, guest: Guest) -> None:
        """A whole request came over it: what takes time now is our own doing."""
        if guest.timer is not None:
            guest.timer.cancel()

    def answered(self, guest: Guest) -> None:
        """It is its turn again."""
        if guest in self._strangers.get(guest.source, ()):
            guest.timer = asyncio.get_running_loop().call_later(STRANGER_SECONDS, self._expire, guest)

    def proved(self, guest: Guest, holder: str) -> None:
        """A valid token of this holder came over the connection."""
        if guest.holder == holder:
            return
        if guest.holder:
            self._drop(self._of_holder, guest.holder, guest)
        elif not self._forget_stranger(guest):
            return  # it was closed meanwhile
        guest.holder = holder
        own = self._of_holder.setdefault(holder, {})
        own[guest] = None
        if len(own) > MOST_OF_HOLDER:
            oldest = next(iter(own))
            self.left(oldest)
            oldest.close()

    def left(self, guest: Guest) -> None:
        """The connection is closed; may be told more than once."""
        if guest.holder:
            self._drop(self._of_holder, guest.holder, guest)
        elif self._forget_stranger(guest):
            self._note_vain(guest.source)

    def _expire(self, guest: Guest) -> None:
        self.left(guest)
        guest.close()

    def _make_room(self) -> None:
        busiest = max(self._strangers, key=lambda source: len(self._strangers[source]))
        if len(self._strangers[busiest]) > FEW:
            self._expire(next(iter(self._strangers[busiest])))
        else:
            self._room.clear()

    def _forget_stranger(self, guest: Guest) -> bool:
        if guest not in self._strangers.get(guest.source, ()):
            return False
        self._drop(self._strangers, guest.source, guest)
        self._count -= 1
        self._room.set()
        if guest.timer is not None:
            guest.timer.cancel()
        return True

    def _note_vain(self, source: str) -> None:
        now = asyncio.get_running_loop().time()
        since, times = self._in_vain.pop(source, (now, 0))
        self._in_vain[source] = (since, times + 1) if now - since < WINDOW_SECONDS else (now, 1)
        while len(self._in_vain) > REMEMBERED:
            self._in_vain.popitem(last=False)

    @staticmethod
    def _drop(among: dict[str, dict[Guest, None]], key: str, guest: Guest) -> None:
        held = among.get(key)
        if held is not None:
            held.pop(guest, None)
            if not held:
                del among[key]
