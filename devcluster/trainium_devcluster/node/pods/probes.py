"""Run the liveness, readiness and startup probes of a container.

Guarantees:
- Only thresholds decide about readiness and restarts.
- Liveness and readiness wait until a startup probe has succeeded.
- The results only go to callbacks.
"""

import asyncio
from collections.abc import Awaitable, Callable
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
    startup = container.get("startupProbe")
    if startup and not await _until_started(startup, check, callbacks):
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


async def _until_started(probe: Json, check: Check, callbacks: ProbeCallbacks) -> bool:
    failures = 0
    await asyncio.sleep(probe.get("initialDelaySeconds") or 0)
    while True:
        outcome = await _once(probe, check)
        if outcome.success:
            return True
        failures += 1
        callbacks.on_unhealthy(ProbeKind.STARTUP, outcome.message)
        if failures >= (probe.get("failureThreshold") or 3):
            callbacks.on_probe_failed(ProbeKind.STARTUP, probe)
            return False
        await asyncio.sleep(_period(probe))


async def _watch_readiness(probe: Json, check: Check, callbacks: ProbeCallbacks) -> None:
    ready, successes, failures = False, 0, 0
    await asyncio.sleep(probe.get("initialDelaySeconds") or 0)
    while True:
        outcome = await _once(probe, check)
        if outcome.success:
            successes, failures = successes + 1, 0
            if not ready and successes >= (probe.get("successThreshold") or 1):
                ready = True
                callbacks.on_ready_changed(True)
        else:
            successes, failures = 0, failures + 1
            callbacks.on_unhealthy(ProbeKind.READINESS, outcome.message)
            if ready and failures >= (probe.get("failureThreshold") or 3):
                ready = False
                callbacks.on_ready_changed(False)
        await asyncio.sleep(_period(probe))


async def _watch_liveness(probe: Json, check: Check, callbacks: ProbeCallbacks) -> None:
    failures = 0
    await asyncio.sleep(probe.get("initialDelaySeconds") or 0)
    while True:
        outcome = await _once(probe, check)
        failures = 0 if outcome.success else failures + 1
        if not outcome.success:
            callbacks.on_unhealthy(ProbeKind.LIVENESS, outcome.message)
            if failures >= (probe.get("failureThreshold") or 3):
                callbacks.on_probe_failed(ProbeKind.LIVENESS, probe)
                return
        await asyncio.sleep(_period(probe))


async def _once(probe: Json, check: Check) -> ProbeResult:
    return await check(probe, float(probe.get("timeoutSeconds") or 1))


def _period(probe: Json) -> float:
    return float(probe.get("periodSeconds") or 10)
