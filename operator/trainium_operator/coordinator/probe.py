"""Tells the plan of members that fall silent, and asks their ports: a refused connection says that an agent is gone.

Every agent keeps its rendezvous port open for the life of its pod. So a refusal (the host answers, nobody listens) is
evidence, while a time-out says nothing. A refusal could also come from a firewall between this process and the workers;
therefore it counts only for an agent whose port answered this process before.

Invariants: a connection is opened and closed, nothing is sent; it goes to the address that the API server gives the
pod and to no other that an agent may name; each agent is asked once when it is new and then only while it is silent;
nothing is asked unless this process leads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from ipaddress import ip_address
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trainium_operator.coordinator.state import CoordinatorState, Doubt

logger = logging.getLogger(__name__)
_INTERVAL_SECONDS = 0.5
_CONNECT_SECONDS = 1.0
_AT_ONCE = 50


class Prober:
    """`run` it beside the coordinator."""

    def __init__(
        self,
        state: CoordinatorState,
        *,
        is_serving: Callable[[], bool],
        notify: Callable[[str, str, bool], None],
        address_of: Callable[[Doubt], str],
        connect: Callable[[str, int], Awaitable[None]] | None = None,
    ) -> None:
        """`address_of(doubt)` is the pod's address, empty while it is not known.

        `connect(host, port)` returns, or raises ConnectionRefusedError or another OSError (tests give their own).
        """
        self._state = state
        self._is_serving = is_serving
        self._notify = notify
        self._address_of = address_of
        self._connect = connect or _touch
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL_SECONDS)
            if self._is_serving():
                await self.look()

    async def look(self) -> None:
        """Tell who has fallen silent, and ask everybody who is new or silent, once."""
        for namespace, job in self._state.newly_silent():
            self._notify(namespace, job, True)
        await asyncio.gather(*(self._ask(doubt) for doubt in self._state.doubts()))

    async def _ask(self, doubt: Doubt) -> None:
        host = self._address_of(doubt)
        if not _same(host, doubt.host):
            self._state.port_unanswered(doubt)
            return
        async with self._slots:
            try:
                async with asyncio.timeout(_CONNECT_SECONDS):
                    await self._connect(host, doubt.port)
            except ConnectionRefusedError:
                if self._state.port_refused(doubt):
                    logger.info(
                        "the port of silent pod %s refuses connections: its agent is gone",
                        doubt.pod,
                        extra={"namespace": doubt.namespace, "job": doubt.job},
                    )
                    self._notify(doubt.namespace, doubt.job, True)
            except (OSError, TimeoutError):
                self._state.port_unanswered(doubt)
            else:
                self._state.port_answered(doubt)


def _same(address: str, named: str) -> bool:
    try:
        return ip_address(address) == ip_address(named)
    except ValueError:
        return False


async def _touch(host: str, port: int) -> None:
    _, writer = await asyncio.open_connection(host, port)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
