"""Limit who may hold connections to one of the operator's servers, and how many.

A connection is anonymous until it presents a valid token; then it belongs to that token's holder (a pod, a user).

Guarantees:
- An anonymous connection lasts `ANONYMOUS_SECONDS` at most, whatever it sends and however slowly.
- At `MAX_ANONYMOUS` (or the server's limit) the address with the most loses its oldest. If no address has more than
  `FEW`, no more are accepted until one is closed.
- A holder has `MAX_PER_HOLDER` connections at most.
- After `MAX_FAILED` connections of an address ended without a valid token within `WINDOW_SECONDS`, its connections are
  closed at once until that time has passed.
- So a flood holds a bounded number of connections, and none of a known holder.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_operator.bounded_dict import BoundedDict

if TYPE_CHECKING:
    from collections.abc import Callable

ANONYMOUS_SECONDS = 15.0
"""Time limit; it does not run while the operator works on a request, for instance on a review of a token."""
MAX_ANONYMOUS = 1_024
FEW = 8
MAX_PER_HOLDER = 16
"""An agent has one stream; a browser opens six connections."""
MAX_FAILED = 512
WINDOW_SECONDS = 10.0
REMEMBERED = 4_096


@dataclass(eq=False, slots=True)
class ClientConnection:
    """One connection; `close` ends it at once."""

    source: str
    close: Callable[[], object]
    holder: str = ""
    timer: asyncio.TimerHandle | None = None


class ConnectionLimiter:
    """Counts all connections of one server, within one event loop."""

    def __init__(self, max_anonymous: int | None = None, *, max_failed: int | None = None) -> None:
        """Use `MAX_ANONYMOUS` and `MAX_FAILED` by default; `max_failed=0` disables that limit."""
        self._max_failed = MAX_FAILED if max_failed is None else max_failed
        self._max_anonymous = MAX_ANONYMOUS if max_anonymous is None else max_anonymous
        self._anonymous: dict[str, dict[ClientConnection, None]] = {}
        """Connections by address, the oldest first."""
        self._anonymous_count = 0
        self._by_holder: dict[str, dict[ClientConnection, None]] = {}
        self._failed: BoundedDict[str, tuple[float, int]] = BoundedDict(REMEMBERED)
        self._capacity = asyncio.Event()
        self._capacity.set()

    @property
    def anonymous(self) -> int:
        """Return the number of connections without a valid token so far."""
        return self._anonymous_count

    async def wait_for_capacity(self) -> None:
        """Wait until one more connection may be accepted."""
        await self._capacity.wait()

    def track(self, source: str, close: Callable[[], None]) -> ClientConnection | None:
        """Count an accepted connection from now on; None if it must be closed at once."""
        loop = asyncio.get_running_loop()
        since, failures = self._failed.get(source, (0.0, 0))
        if 0 < self._max_failed <= failures and loop.time() - since < WINDOW_SECONDS:
            return None
        client = ClientConnection(source, close)
        client.timer = loop.call_later(ANONYMOUS_SECONDS, self._expire, client)
        self._anonymous.setdefault(source, {})[client] = None
        self._anonymous_count += 1
        if self._anonymous_count >= self._max_anonymous:
            self._free_capacity()
        return client

    def request_started(self, client: ClientConnection) -> None:
        """Stop the time limit of an anonymous connection while the operator works on its request."""
        if client.timer is not None:
            client.timer.cancel()

    def request_finished(self, client: ClientConnection) -> None:
        """Restart the time limit of a connection that is still anonymous."""
        if client in self._anonymous.get(client.source, ()):
            client.timer = asyncio.get_running_loop().call_later(ANONYMOUS_SECONDS, self._expire, client)

    def assign_holder(self, client: ClientConnection, holder: str) -> None:
        """Assign the connection to the holder of its valid token."""
        if client.holder == holder:
            return
        if client.holder:
            self._drop(self._by_holder, client.holder, client)
        elif not self._remove_anonymous(client):
            return  # closed meanwhile
        client.holder = holder
        connections = self._by_holder.setdefault(holder, {})
        connections[client] = None
        if len(connections) > MAX_PER_HOLDER:
            oldest = next(iter(connections))
            self.release(oldest)
            oldest.close()

    def release(self, client: ClientConnection) -> None:
        """Stop counting a connection that is closed; may be called more than once."""
        if client.holder:
            self._drop(self._by_holder, client.holder, client)
        elif self._remove_anonymous(client):
            self._count_failure(client.source)

    def _expire(self, client: ClientConnection) -> None:
        self.release(client)
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
        self._anonymous_count -= 1
        self._capacity.set()
        if client.timer is not None:
            client.timer.cancel()
        return True

    def _count_failure(self, source: str) -> None:
        now = asyncio.get_running_loop().time()
        since, failures = self._failed.get(source, (now, 0))
        self._failed[source] = (since, failures + 1) if now - since < WINDOW_SECONDS else (now, 1)

    @staticmethod
    def _drop(groups: dict[str, dict[ClientConnection, None]], key: str, client: ClientConnection) -> None:
        connections = groups.get(key)
        if connections is not None:
            connections.pop(client, None)
            if not connections:
                del groups[key]
