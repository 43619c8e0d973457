"""The floor: the same pods without an operator, created and deleted by a plain client with 64 requests in flight."""

from __future__ import annotations

import asyncio
import copy
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.fleetlab.kube import PodWatch
from trainium_devcluster.fleet.fake_nodes import timestamp

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from benchmarks.fleetlab.kube import Json, Kube

IN_FLIGHT = 64
_PODS = "/api/v1/namespaces/default/pods"
LABEL = "bench.trainium.dev/floor"


@dataclass(frozen=True, slots=True)
class Floor:
    """Seconds of one round, from its first request."""

    created: float
    running: float
    restarted: float | None
    """All fail; delete all, create all again, until all run; absent when that was not measured."""


async def measure_floor(kube: Kube, manifests: Sequence[Json], *, restart: bool, seconds: float) -> Floor:
    """One round; leaves nothing behind."""
    async with PodWatch(kube, f"{LABEL}=first") as first:
        began = time.monotonic()
        await _create(kube, manifests, "first")
        created, running = await first.until_running(len(manifests), seconds)
        restarted = None
        if restart:
            async with PodWatch(kube, f"{LABEL}=second") as second:
                again = time.monotonic()
                await fail_pods(kube, [of_wave(each, "first")["metadata"]["name"] for each in manifests])
                await _delete(kube, manifests, "first")
                await _create(kube, manifests, "second")
                restarted = (await second.until_running(len(manifests), seconds))[1] - again
                await _delete(kube, manifests, "second")
                await second.until(lambda: not second.pods, seconds, "the floor's pods are gone")
        else:
            await _delete(kube, manifests, "first")
        await first.until(lambda: not first.pods, seconds, "the floor's pods are gone")
    return Floor(created - began, running - began, restarted)


async def in_flight(calls: Iterable[Callable[[], Awaitable[object]]], limit: int = IN_FLIGHT) -> None:
    """Run all calls, at most `limit` at a time."""
    waiting = iter(calls)

    async def work() -> None:
        for call in waiting:
            await call()

    async with asyncio.TaskGroup() as group:
        for _ in range(limit):
            group.create_task(work())


async def fail_pods(kube: Kube, names: Iterable[str]) -> None:
    """What kubelets write when the agents of these pods are killed."""
    ended = {"exitCode": 137, "reason": "Error", "message": "killed", "finishedAt": timestamp()}
    worker = {"name": "worker", "image": "", "imageID": "", "ready": False, "restartCount": 0}
    status = {"phase": "Failed", "containerStatuses": [worker | {"state": {"terminated": ended}}]}
    await in_flight(partial(kube.patch, f"{_PODS}/{name}/status", {"status": status}) for name in names)


async def _create(kube: Kube, manifests: Sequence[Json], wave: str) -> None:
    await in_flight(partial(kube.request, "POST", _PODS, of_wave(each, wave)) for each in manifests)


async def _delete(kube: Kube, manifests: Sequence[Json], wave: str) -> None:
    paths = [f"{_PODS}/{of_wave(each, wave)['metadata']['name']}" for each in manifests]
    await in_flight(partial(kube.delete, path) for path in paths)


def of_wave(manifest: Json, wave: str) -> Json:
    """The pod under a name and a label of its own, so that the operator takes it for nobody's."""
    metadata = manifest["metadata"]
    kept = {key: value for key, value in metadata.items() if key != "ownerReferences"}
    metadata = {**kept, "name": f"{metadata['name']}-{wave}", "labels": {LABEL: wave}}
    return {**manifest, "metadata": metadata, "spec": _drawn_together(manifest["spec"], wave)}


def _drawn_together(spec: Json, wave: str) -> Json:
    """The spec with its preferences for near pods meaning those of this wave: the scheduler's work is the same then."""
    affinity = copy.deepcopy(spec.get("affinity") or {})
    for terms in (affinity.get("podAffinity") or {}).values():
        for each in terms:
            each.get("podAffinityTerm", each)["labelSelector"] = {"matchLabels": {LABEL: wave}}
    return {**spec, "affinity": affinity}
