"""Measure the floor: the same pods, created and deleted by a plain client with 64 requests in flight."""

from __future__ import annotations

import asyncio
import copy
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.fleet.kube import PodWatch, delete
from trainium_devcluster.fleet.fake_nodes import timestamp
from trainium_devcluster.node.api.client import MERGE_PATCH

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from benchmarks.fleet.kube import Json
    from trainium_devcluster.node.api.client import Api

_IN_FLIGHT = 64
_PODS = "/api/v1/namespaces/default/pods"
_LABEL = "bench.trainium.dev/floor"


@dataclass(frozen=True, slots=True)
class Floor:
    """Seconds from the first request of a round."""

    created: float
    running: float
    restarted: float | None
    """Fail all, delete all and create all pods, until all run; None if not measured."""


async def measure_floor(kube: Api, manifests: Sequence[Json], *, restart: bool, seconds: float) -> Floor:
    """Measure one round and delete its pods."""
    async with PodWatch(kube, f"{_LABEL}=first") as first:
        began = time.monotonic()
        await _create(kube, manifests, "first")
        created, running = await first.until_running(len(manifests), seconds)
        restarted = None
        if restart:
            async with PodWatch(kube, f"{_LABEL}=second") as second:
                again = time.monotonic()
                await fail_pods(kube, [_in_wave(each, "first")["metadata"]["name"] for each in manifests])
                await _delete(kube, manifests, "first")
                await _create(kube, manifests, "second")
                restarted = (await second.until_running(len(manifests), seconds))[1] - again
                await _delete(kube, manifests, "second")
                await second.until(lambda: not second.pods, "the pods of the floor are deleted", seconds)
        else:
            await _delete(kube, manifests, "first")
        await first.until(lambda: not first.pods, "the pods of the floor are deleted", seconds)
    return Floor(created - began, running - began, restarted)


async def _in_flight(calls: Iterable[Callable[[], Awaitable[object]]]) -> None:
    """Run all calls, at most `_IN_FLIGHT` at a time."""
    waiting = iter(calls)

    async def work() -> None:
        for call in waiting:
            await call()

    async with asyncio.TaskGroup() as group:
        for _ in range(_IN_FLIGHT):
            group.create_task(work())


async def fail_pods(kube: Api, names: Iterable[str]) -> None:
    """Write the status that kubelets write after the agents of these pods were killed."""
    ended = {"exitCode": 137, "reason": "Error", "message": "killed", "finishedAt": timestamp()}
    worker = {"name": "worker", "image": "", "imageID": "", "ready": False, "restartCount": 0}
    status = {"phase": "Failed", "containerStatuses": [worker | {"state": {"terminated": ended}}]}
    await _in_flight(partial(kube.patch, f"{_PODS}/{name}/status", {"status": status}, MERGE_PATCH) for name in names)


async def _create(kube: Api, manifests: Sequence[Json], wave: str) -> None:
    await _in_flight(partial(kube.create, _PODS, _in_wave(each, wave)) for each in manifests)


async def _delete(kube: Api, manifests: Sequence[Json], wave: str) -> None:
    paths = [f"{_PODS}/{_in_wave(each, wave)['metadata']['name']}" for each in manifests]
    await _in_flight(partial(delete, kube, path) for path in paths)


def _in_wave(manifest: Json, wave: str) -> Json:
    """Return the pod with another name and label, without an owner."""
    metadata = manifest["metadata"]
    kept = {key: value for key, value in metadata.items() if key != "ownerReferences"}
    metadata = {**kept, "name": f"{metadata['name']}-{wave}", "labels": {_LABEL: wave}}
    return {**manifest, "metadata": metadata, "spec": _with_affinity_to(manifest["spec"], wave)}


def _with_affinity_to(spec: Json, wave: str) -> Json:
    """Return the spec with its pod affinity to this wave, so that the scheduler has the same work."""
    affinity = copy.deepcopy(spec.get("affinity") or {})
    for terms in (affinity.get("podAffinity") or {}).values():
        for each in terms:
            each.get("podAffinityTerm", each)["labelSelector"] = {"matchLabels": {_LABEL: wave}}
    return {**spec, "affinity": affinity}
