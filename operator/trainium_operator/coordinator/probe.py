"""Tells the plan of members that fall silent, and asks their ports: a refused connection says that an agent is gone.

Every agent keeps its rendezvous port open for the life of its pod. So a refusal (the host answers, nobody listens) is
evidence, while a time-out says nothing. A refusal could also come from a firewall between this process and the workers;
therefore it counts only for an agent whose port answered this process before.

Invariants: a connection is opened and closed, nothing is sent; it goes to the address that the API server gives the
pod and to no other that an agent may name; each agent is asked once when it is new and then only while it is silent;
nothing is asked unless this process leads; new silence is told every half second, however many ports are being asked;
the ports of one job never take all slots.
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
    from trainium_operator.plan.model.names import JobId

logger = logging.getLogger(__name__)
_INTERVAL_SECONDS = 0.5
_CONNECT_SECONDS = 1.0
_AT_ONCE = 64
_OF_ONE_JOB_AT_ONCE = 16


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
        self._slots_of: dict[JobId, asyncio.Semaphore] = {}
        self._being_asked: set[tuple[JobId, str]] = set()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as asking:
            while True:
                await asyncio.sleep(_INTERVAL_SECONDS)
                if self._is_serving():
                    self._tell_silence()
                    self._ask_doubtful(asking)

    async def look(self) -> None:
        """Tell who has fallen silent, and ask everybody who is new or silent, once, until all have answered or not."""
        self._tell_silence()
        async with asyncio.TaskGroup() as asking:
            self._ask_doubtful(asking)

    def _tell_silence(self) -> None:
        for namespace, job in self._state.newly_silent():
            self._notify(namespace, job, True)

    def _ask_doubtful(self, asking: asyncio.TaskGroup) -> None:
        """Begin to ask those who are not being asked already."""
        busy = {job_id for job_id, _ in self._being_asked}
        self._slots_of = {job_id: slots for job_id, slots in self._slots_of.items() if job_id in busy}
        for doubt in self._state.doubts():
            if (doubt.job_id, doubt.pod_uid) not in self._being_asked:
                self._being_asked.add((doubt.job_id, doubt.pod_uid))
                asking.create_task(self._ask_in_turn(doubt))

    async def _ask_in_turn(self, doubt: Doubt) -> None:
        of_job = self._slots_of.setdefault(doubt.job_id, asyncio.Semaphore(_OF_ONE_JOB_AT_ONCE))
        try:
            async with of_job, self._slots:  # in this order: who waits for its job holds no common slot
                await self._ask(doubt)
        finally:
            self._being_asked.discard((doubt.job_id, doubt.pod_uid))

    async def _ask(self, doubt: Doubt) -> None:
        host = self._address_of(doubt)
        if not _same(host, doubt.host):
            self._state.port_unanswered(doubt)
            return
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                await self._connect(host, doubt.port)
        except ConnectionRefusedError:
            if self._state.port_refused(doubt):
                logger.info(
                    "the port of silent pod %s refuses connections: its agent is gone",
                    doubt.pod,
                    extra={"namespace": doubt.namespace, "job": doubt.job, "pod": doubt.pod},
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
