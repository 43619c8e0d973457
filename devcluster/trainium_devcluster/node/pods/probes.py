"""Run the liveness, readiness and startup probes of a container.

Guarantees:
- Only thresholds decide about readiness and restarts.
- Liveness and readiness wait until a startup probe has succeeded.
- The results only go to callbacks.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

from trainium_devcluster.node.api.objects import Json
from trainium_devcluster.node.pods.probe_actions import ProbeResult


class ProbeKind(StrEnum):
    """The three probes."""

    STARTUP = "startup"
    LIVENESS = "liveness"
    READINESS = "readiness"


@dataclass(frozen=True, slots=True)
class ProbeCallbacks:
    """Callbacks for the results of probes.

    The first two change the status, `on_unhealthy` reports each failure, `on_probe_failed` requests a restart.
    """

    on_startup_succeeded: Callable[[], None]
    on_ready_changed: Callable[[bool], None]
    on_unhealthy: Callable[[ProbeKind, str], None]
    on_probe_failed: Callable[[ProbeKind, Json], None]


Check = Callable[[Json, float], Awaitable[ProbeResult]]


async def run_probes(container: Json, check: Check, callbacks: ProbeCallbacks) -> None:
    """Run the probes of `container` until cancelled, which happens when its process ends."""
    if startup := container.get("startupProbe"):
        async for in_a_row in _run_probe(ProbeKind.STARTUP, startup, check, callbacks):
            if in_a_row > 0:
                break
            if _has_failed(startup, in_a_row):
                callbacks.on_probe_failed(ProbeKind.STARTUP, startup)
                return
    callbacks.on_startup_succeeded()
    readiness, liveness = container.get("readinessProbe"), container.get("livenessProbe")
    if not readiness:
        callbacks.on_ready_changed(True)
    async with asyncio.TaskGroup() as group:
        if readiness:
            group.create_task(_watch_readiness(readiness, check, callbacks))
        if liveness:
            group.create_task(_watch_liveness(liveness, check, callbacks))


async def _watch_readiness(probe: Json, check: Check, callbacks: ProbeCallbacks) -> None:
    ready = False
    async for in_a_row in _run_probe(ProbeKind.READINESS, probe, check, callbacks):
        if _has_failed(probe, in_a_row) if ready else in_a_row >= (probe.get("successThreshold") or 1):
            ready = not ready
            callbacks.on_ready_changed(ready)


async def _watch_liveness(probe: Json, check: Check, callbacks: ProbeCallbacks) -> None:
    async for in_a_row in _run_probe(ProbeKind.LIVENESS, probe, check, callbacks):
        if _has_failed(probe, in_a_row):
            callbacks.on_probe_failed(ProbeKind.LIVENESS, probe)
            return


async def _run_probe(kind: ProbeKind, probe: Json, check: Check, callbacks: ProbeCallbacks) -> AsyncIterator[int]:
    """Check once per period; yield how many checks in a row succeeded, or as a negative number how many failed."""
    in_a_row = 0
    await asyncio.sleep(probe.get("initialDelaySeconds") or 0)
    while True:
        outcome = await check(probe, float(probe.get("timeoutSeconds") or 1))
        if outcome.success:
            in_a_row = max(in_a_row, 0) + 1
        else:
            in_a_row = min(in_a_row, 0) - 1
            callbacks.on_unhealthy(kind, outcome.message)
        yield in_a_row
        await asyncio.sleep(float(probe.get("periodSeconds") or 10))


def _has_failed(probe: Json, in_a_row: int) -> bool:
    return -in_a_row >= (probe.get("failureThreshold") or 3)
