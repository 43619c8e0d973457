"""The addresses of the coordinator's names, also while the cluster's DNS is out.

Invariants: a name that does not resolve, or not soon, has the addresses that it had last (whoever answers there proves
by certificate that it is the coordinator); at most one look-up of a name is under way; none of them keeps the agent
from leaving.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainium_trainer.agent.settings import Endpoint

PATIENCE_SECONDS = 1.5
"""For a name whose addresses are known. A resolver gives a silent name server up after 10 s for each search domain."""


class Names:
    """What was looked up, in one event loop."""

    def __init__(self) -> None:
        self._known: dict[Endpoint, list[str]] = {}
        self._under_way: dict[Endpoint, asyncio.Future[list[str]]] = {}

    async def addresses(self, endpoint: Endpoint) -> list[str]:
        """In the resolver's order; none where the name has never resolved."""
        lookup = self._under_way.get(endpoint)
        if lookup is None:
            lookup = self._under_way[endpoint] = _lookup(endpoint)
        known = self._known.get(endpoint, [])
        done, _ = await asyncio.wait({lookup}, timeout=PATIENCE_SECONDS if known else None)
        if done:
            self._under_way.pop(endpoint, None)
            known = lookup.result() or known
            self._known[endpoint] = known
        return known


def _lookup(endpoint: Endpoint) -> asyncio.Future[list[str]]:
    """No addresses for a name that does not resolve. In a thread of its own: the event loop waits for its pool's."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[list[str]] = loop.create_future()

    def look() -> None:
        found: list[str] = []
        with contextlib.suppress(OSError, UnicodeError):  # no such name; no name at all
            entries = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
            found = [str(entry[4][0]) for entry in entries]
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(_tell, future, found)

    threading.Thread(target=look, name="coordinator-name", daemon=True).start()
    return future


def _tell(future: asyncio.Future[list[str]], found: list[str]) -> None:
    if not future.done():
        future.set_result(found)
