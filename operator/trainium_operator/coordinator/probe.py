"""Report members that stop sending heartbeats, and probe their ports: an agent that refuses a connection has ended.

Every agent keeps its rendezvous port open for the lifetime of its pod. So a refusal (the host answers, no process
listens) is evidence, while a time-out is not. A firewall between this process and the workers could refuse too, so a
refusal counts only for an agent whose port has accepted a connection of this process before.

Guarantees:
- A connection is opened and closed without data. Its target is the address of the pod in the API server, never one that
  an agent names.
- Each agent is probed once when it is new and then only while it is silent, and only while this process leads.
- Silence is reported every half second, however many probes run. The probes of one job never take all slots.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from ipaddress import ip_address
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trainium_operator.coordinator.state import CoordinatorState, ProbeTarget
    from trainium_operator.plan.model.names import JobId

logger = logging.getLogger(__name__)
_INTERVAL_SECONDS = 0.5
_CONNECT_SECONDS = 1.0
_MAX_PROBES = 64
_MAX_PROBES_PER_JOB = 16


class Prober:
    """Reports silence and probes ports."""

    def __init__(
        self,
        state: CoordinatorState,
        *,
        is_serving: Callable[[], bool],
        notify: Callable[[str, str, bool], None],
        find_address: Callable[[ProbeTarget], str],
        connect: Callable[[str, int], Awaitable[None]] | None = None,
    ) -> None:
        """`find_address(target)` returns the pod's address, empty while it is not known.

        `connect(host, port)` returns, or raises ConnectionRefusedError or another OSError; tests replace it.
        """
        self._state = state
        self._is_serving = is_serving
        self._notify = notify
        self._find_address = find_address
        self._connect = connect or _connect_and_close
        self._slots = asyncio.Semaphore(_MAX_PROBES)
        self._slots_of: dict[JobId, asyncio.Semaphore] = {}
        self._pending: set[tuple[JobId, str]] = set()

    async def run(self) -> None:
        """Report and probe until cancelled."""
        async with asyncio.TaskGroup() as probes:
            while True:
                await asyncio.sleep(_INTERVAL_SECONDS)
                if self._is_serving():
                    self._report_silence()
                    self._probe_all(probes)

    def _report_silence(self) -> None:
        for namespace, job in self._state.find_newly_silent():
            self._notify(namespace, job, True)

    def _probe_all(self, probes: asyncio.TaskGroup) -> None:
        """Start the probes that are not running yet."""
        busy = {job_id for job_id, _ in self._pending}
        self._slots_of = {job_id: slots for job_id, slots in self._slots_of.items() if job_id in busy}
        for target in self._state.list_probe_targets():
            if (target.job_id, target.pod_uid) not in self._pending:
                self._pending.add((target.job_id, target.pod_uid))
                probes.create_task(self._probe_with_limits(target))

    async def _probe_with_limits(self, target: ProbeTarget) -> None:
        of_job = self._slots_of.setdefault(target.job_id, asyncio.Semaphore(_MAX_PROBES_PER_JOB))
        try:
            async with of_job, self._slots:  # in this order: a probe that waits for its job holds no common slot
                await self._probe_port(target)
        finally:
            self._pending.discard((target.job_id, target.pod_uid))

    async def _probe_port(self, target: ProbeTarget) -> None:
        host = self._find_address(target)
        if not _is_same_address(host, target.host):
            self._state.record_port_unknown(target)
            return
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                await self._connect(host, target.port)
        except ConnectionRefusedError:
            if self._state.record_port_refused(target):
                logger.info(
                    "the port of silent pod %s refuses connections: its agent has ended",
                    target.pod,
                    extra={"namespace": target.namespace, "job": target.job, "pod": target.pod},
                )
                self._notify(target.namespace, target.job, True)
        except (OSError, TimeoutError):
            self._state.record_port_unknown(target)
        else:
            self._state.record_port_open(target)


def _is_same_address(address: str, named: str) -> bool:
    try:
        return ip_address(address) == ip_address(named)
    except ValueError:
        return False


async def _connect_and_close(host: str, port: int) -> None:
    _, writer = await asyncio.open_connection(host, port)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
