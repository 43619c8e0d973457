"""Read why pods that have a node do not start, where only an event has the reason: a volume, a sandbox, a network.

Guarantees:
- Events are listed only for a job with a pod that has waited on its node for `SLOW_SECONDS`, for one pod of it, and not
  more often than every `PAUSE_SECONDS`.
- A warning older than `FRESH_SECONDS` is not shown: the kubelet repeats what still holds.
- Without the right to list events, or without an answer, plans go on as before.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainium_contract.wire.log_line import readable
from trainium_operator.cluster.api.errors import ApiError
from trainium_operator.cluster.api.resources import CORE_EVENTS
from trainium_operator.cluster.cache.parts import items_of, mapping_of, text_of
from trainium_operator.cluster.cache.views import seconds
from trainium_operator.newest import Newest
from trainium_operator.plan.model.observed import STARTING_REASONS, JobView, PodPhase, PodView

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from trainium_operator.cluster.api.client import Api, Json
    from trainium_operator.cluster.cache.reflector import Reflector

logger = logging.getLogger(__name__)

SLOW_SECONDS = 15.0
PAUSE_SECONDS = 30.0
FRESH_SECONDS = 180.0
TIMEOUT_SECONDS = 3.0
REMEMBERED = 1024
LONGEST_MESSAGE = 1024


@dataclass(frozen=True, slots=True)
class _Warning:
    """The newest warning about a pod."""

    pod_uid: str
    reason: str = ""
    message: str = ""


class PodWarnings:
    """Jobs by uid; times in Unix seconds of the clock."""

    def __init__(self, api: Api, pods: Reflector[PodView], clock: Callable[[], float]) -> None:
        self._api = api
        self._pods = pods
        self._clock = clock
        self._read: Newest[str, tuple[float, _Warning]] = Newest(REMEMBERED)

    async def refresh(self, job: JobView) -> None:
        """Read the newest warning about the first pod of the job that starts slowly."""
        now = self._clock()
        slow = [pod for pod in self._starting(job) if now >= pod.created + SLOW_SECONDS]
        if not slow:
            self._read.pop(job.uid, None)
            return
        if job.uid in self._read and now < self._read[job.uid][0] + PAUSE_SECONDS:
            return
        pod = min(slow, key=lambda pod: pod.ordinal)
        self._read[job.uid] = (now, await self._warning_about(job.namespace, pod, now))

    def next_in(self, job: JobView) -> float | None:
        """Return after how many seconds `refresh` should be called again; None when nothing starts."""
        starting = self._starting(job)
        if not starting:
            return None
        now = self._clock()
        if job.uid in self._read:
            return max(0.0, self._read[job.uid][0] + PAUSE_SECONDS - now)
        return max(0.0, min(pod.created for pod in starting) + SLOW_SECONDS - now)

    def applied_to(self, job: JobView, pods: tuple[PodView, ...]) -> tuple[PodView, ...]:
        """Return the pods with the warning in place of a reason that means only that they start."""
        _, warning = self._read.get(job.uid, (0.0, _Warning("")))
        if not warning.reason:
            return pods
        return tuple(
            replace(pod, reason=warning.reason, message=warning.message)
            if pod.uid == warning.pod_uid and _is_starting(pod)
            else pod
            for pod in pods
        )

    def _starting(self, job: JobView) -> list[PodView]:
        return [pod for pod in self._pods.store.owned_by(job.id).values() if _is_starting(pod)]

    async def _warning_about(self, namespace: str, pod: PodView, now: float) -> _Warning:
        fields = f"involvedObject.uid={pod.uid},type=Warning"
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                page = await self._api.list_page(CORE_EVENTS, namespace, fields=fields)
        except (ApiError, TimeoutError) as error:
            logger.info("events of pod %s are not read: %s", pod.name, error or "no answer")
            return _Warning(pod.uid)
        return _newest(pod, items_of(page.get("items")), now)


def _is_starting(pod: PodView) -> bool:
    """Return whether it has a node and shows no reason for its delay."""
    waits = pod.phase is PodPhase.PENDING and not pod.deleting and bool(pod.node)
    return waits and pod.reason in {"", *STARTING_REASONS} and not pod.init_container


def _newest(pod: PodView, events: Iterable[Json], now: float) -> _Warning:
    """Return the newest of them; those from before the pod had a node are about what is over."""
    found = [(at, event) for event in events if (at := _last_seen(event)) > now - FRESH_SECONDS]
    found = [(at, event) for at, event in found if event.get("reason") != "FailedScheduling"]
    if not found:
        return _Warning(pod.uid)
    event = max(found, key=lambda item: item[0])[1]
    message = readable(text_of(event.get("message"))[:LONGEST_MESSAGE])
    return _Warning(pod.uid, text_of(event.get("reason"))[:64], message)


def _last_seen(event: Json) -> float:
    stamps = (
        mapping_of(event.get("series")).get("lastObservedTime"),
        event.get("lastTimestamp"),
        event.get("eventTime"),
    )
    try:
        return max((seconds(each) or 0.0 for each in stamps if each), default=0.0)
    except (ValueError, TypeError, OverflowError):
        return 0.0
