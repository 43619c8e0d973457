"""Limit who may hold a connection to one of the operator's servers, and how many.

A connection is anonymous until a valid token came over it; then it belongs to that token's holder (a pod, a user).

Guarantees:
- An anonymous connection lasts `ANONYMOUS_SECONDS` at most, whatever it sends and however slowly.
- At `MAX_ANONYMOUS` (or the server's limit) the address with most of them loses its oldest. Where no address has more
  than `FEW`, no more are accepted until one is closed.
- A holder has `MAX_PER_HOLDER` connections at most.
- An address of which `MAX_FAILED` connections ended without a valid token within `WINDOW_SECONDS` is closed at once
  until they are over.
- So a flood holds a bounded number of connections, and none of a known holder's.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_operator.newest import Newest

if TYPE_CHECKING:
    from collections.abc import Callable

ANONYMOUS_SECONDS = 15.0
"""While it waits for the operator, as for a review of its token, the clock does not run."""
MAX_ANONYMOUS = 1_024
FEW = 8
MAX_PER_HOLDER = 16
"""An agent has one stream; a browser has six connections."""
MAX_FAILED = 512
WINDOW_SECONDS = 10.0
REMEMBERED = 4_096


@dataclass(eq=False, slots=True)
class ClientConnection:
    """One connection; `close` ends it at once."""

    source: str
    close: Callable[[], object]
    holder: str = ""
    refusals: int = 0
    """Requests that were refused while it was anonymous."""
    timer: asyncio.TimerHandle | None = None


class ConnectionLimiter:
    """Counts all connections of one server, within one event loop."""

    def __init__(self, max_anonymous: int | None = None, *, max_failed: int | None = None) -> None:
        """Use `MAX_ANONYMOUS` and `MAX_FAILED` by default; `max_failed=0` means without that limit."""
        self._max_failed = MAX_FAILED if max_failed is None else max_failed
        self._max_anonymous = MAX_ANONYMOUS if max_anonymous is None else max_anonymous
        self._anonymous: dict[str, dict[ClientConnection, None]] = {}
        """By address, oldest first."""
        self._count = 0
        self._of_holder: dict[str, dict[ClientConnection, None]] = {}
        self._failed: Newest[str, tuple[float, int]] = Newest(REMEMBERED)
        self._capacity = asyncio.Event()
        self._capacity.set()

    @property
    def anonymous(self) -> int:
        """Connections over which no valid token came yet."""
        return self._count

    async def wait_for_capacity(self) -> None:
        """Wait until one more connection may be accepted."""
        await self._capacity.wait()

    def opened(self, source: str, close: Callable[[], None]) -> ClientConnection | None:
        """Track an accepted connection; None when it must be closed at once."""
        loop = asyncio.get_running_loop()
        since, times = self._failed.get(source, (0.0, 0))
        if 0 < self._max_failed <= times and loop.time() - since < WINDOW_SECONDS:
            return None
        client = ClientConnection(source, close)
        client.timer = loop.call_later(ANONYMOUS_SECONDS, self._expire, client)
        self._anonymous.setdefault(source, {})[client] = None
        self._count += 1
        if self._count >= self._max_anonymous:
            self._free_capacity()
        return client

    def request_started(self, client: ClientConnection) -> None:
        """Stop its clock: a whole request came over it, and the operator takes the time now."""
        if client.timer is not None:
            client.timer.cancel()

    def request_finished(self, client: ClientConnection) -> None:
        """Start its clock again."""
        if client in self._anonymous.get(client.source, ()):
            client.timer = asyncio.get_running_loop().call_later(ANONYMOUS_SECONDS, self._expire, client)

    def authenticated(self, client: ClientConnection, holder: str) -> None:
        """Assign the connection to the holder of the valid token that came over it."""
        if client.holder == holder:
            return
        if client.holder:
            self._drop(self._of_holder, client.holder, client)
        elif not self._remove_anonymous(client):
            return  # it was closed meanwhile
        client.holder = holder
        own = self._of_holder.setdefault(holder, {})
        own[client] = None
        if len(own) > MAX_PER_HOLDER:
            oldest = next(iter(own))
            self.closed(oldest)
            oldest.close()

    def closed(self, client: ClientConnection) -> None:
        """Release the connection; may be called more than once."""
        if client.holder:
            self._drop(self._of_holder, client.holder, client)
        elif self._remove_anonymous(client):
            self._count_failure(client.source)

    def _expire(self, client: ClientConnection) -> None:
        self.closed(client)
        client.close()

    def _free_capacity(self) -> None:
        busiest = max(self._anonymous, key=lambda source: len(self._anonymous[source]))
        if len(self._anonymous[busiest]) > FEW:
            self._expire(next(iter(self._anonymous[busiest])))
        else:
            self._capacity.clear()

    def _remove_anonymous(self, client: ClientConnection) -> bool:
        if client not in self._anonymous.get(client.source, ()):
            return False
        self._drop(self._anonymous, client.source, client)
        self._count -= 1
        self._capacity.set()
        if client.timer is not None:
            client.timer.cancel()
        return True

    def _count_failure(self, source: str) -> None:
        now = asyncio.get_running_loop().time()
        since, times = self._failed.get(source, (now, 0))
        self._failed[source] = (since, times + 1) if now - since < WINDOW_SECONDS else (now, 1)

    @staticmethod
    def _drop(among: dict[str, dict[ClientConnection, None]], key: str, client: ClientConnection) -> None:
        held = among.get(key)
        if held is not None:
            held.pop(client, None)
            if not held:
                del among[key]
