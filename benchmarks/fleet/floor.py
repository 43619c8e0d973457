"""Measure the floor: the same pods, created and deleted by a plain client with 64 requests in flight."""

from __future__ import annotations

import asyncio
import copy
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.fleet.kube import PodWatch, delete
from trainium_devcluster.fleet.fake_nodes import format_now
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
    """Durations from the first request of a round."""

    creation_seconds: float
    running_seconds: float
    restart_seconds: float | None
    """Duration of failing, deleting and creating all pods, until all run; None if not measured."""


async def measure_floor(kube: Api, manifests: Sequence[Json], *, restart: bool, seconds: float) -> Floor:
    """Measure one round and delete its pods."""
    async with PodWatch(kube, f"{_LABEL}=first") as first:
        started_at = time.monotonic()
        await _create(kube, manifests, "first")
        created, running = await first.wait_until_running(len(manifests), seconds)
        restart_seconds = None
        if restart:
            async with PodWatch(kube, f"{_LABEL}=second") as second:
                restarted_at = time.monotonic()
                await fail_pods(
                    kube, [_rename_for_wave(manifest, "first")["metadata"]["name"] for manifest in manifests]
                )
                await _delete(kube, manifests, "first")
                await _create(kube, manifests, "second")
                restart_seconds = (await second.wait_until_running(len(manifests), seconds))[1] - restarted_at
                await _delete(kube, manifests, "second")
                await second.wait_until(lambda: not second.pods, "the pods of the floor are deleted", seconds)
        else:
            await _delete(kube, manifests, "first")
        await first.wait_until(lambda: not first.pods, "the pods of the floor are deleted", seconds)
    return Floor(created - started_at, running - started_at, restart_seconds)


async def _run_concurrently(calls: Iterable[Callable[[], Awaitable[object]]]) -> None:
    """Run all calls, at most `_IN_FLIGHT` at a time."""
    pending = iter(calls)

    async def work() -> None:
        for call in pending:
            await call()

    async with asyncio.TaskGroup() as group:
        for _ in range(_IN_FLIGHT):
            group.create_task(work())


async def fail_pods(kube: Api, names: Iterable[str]) -> None:
    """Write the status that kubelets write after the agents of these pods were killed."""
    terminated = {"exitCode": 137, "reason": "Error", "message": "killed", "finishedAt": format_now()}
    worker = {"name": "worker", "image": "", "imageID": "", "ready": False, "restartCount": 0}
    status = {"phase": "Failed", "containerStatuses": [worker | {"state": {"terminated": terminated}}]}
    await _run_concurrently(
        partial(kube.patch, f"{_PODS}/{name}/status", {"status": status}, MERGE_PATCH) for name in names
    )


async def _create(kube: Api, manifests: Sequence[Json], wave: str) -> None:
    await _run_concurrently(partial(kube.create, _PODS, _rename_for_wave(manifest, wave)) for manifest in manifests)


async def _delete(kube: Api, manifests: Sequence[Json], wave: str) -> None:
    paths = [f"{_PODS}/{_rename_for_wave(manifest, wave)['metadata']['name']}" for manifest in manifests]
    await _run_concurrently(partial(delete, kube, path) for path in paths)


def _rename_for_wave(manifest: Json, wave: str) -> Json:
    """Return the pod with another name and label, without an owner."""
    metadata = manifest["metadata"]
    fields = {key: value for key, value in metadata.items() if key != "ownerReferences"}
    metadata = {**fields, "name": f"{metadata['name']}-{wave}", "labels": {_LABEL: wave}}
    return {**manifest, "metadata": metadata, "spec": _set_affinity(manifest["spec"], wave)}


def _set_affinity(spec: Json, wave: str) -> Json:
    """Return the spec with its pod affinity to this wave, so that the scheduler has the same work."""
    affinity = copy.deepcopy(spec.get("affinity") or {})
    for terms in (affinity.get("podAffinity") or {}).values():
        for term in terms:
            term.get("podAffinityTerm", term)["labelSelector"] = {"matchLabels": {_LABEL: wave}}
    return {**spec, "affinity": affinity}
