"""Read why pods that have a node do not start, if only an event has the reason: a volume, a sandbox, a network.

Guarantees:
- Events are listed only for a job with a pod that has waited on its node for `SLOW_SECONDS`, for one of its pods, and
  at most every `PAUSE_SECONDS`.
- A warning older than `FRESH_SECONDS` is not shown, because the kubelet repeats warnings that still hold.
- Without the right to list events, or without an answer, plans continue without warnings.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainium_contract.api_server.errors import ApiError, NotFoundError
from trainium_contract.faults.causes import Cause
from trainium_contract.status.conditions import ConditionType
from trainium_contract.views.events import build_event_views
from trainium_contract.wire.log_line import format_log_text
from trainium_operator.bounded_dict import BoundedDict
from trainium_operator.cluster.api.resources import EVENTS, PODS
from trainium_operator.cluster.cache.parts import as_mappings
from trainium_operator.plan.model.conditions import find_condition
from trainium_operator.plan.model.observed import STARTING_REASONS, JobView, PodPhase, PodView
from trainium_operator.plan.model.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainium_contract.api_server.responses import Json
    from trainium_operator.cluster.api.client import Api
    from trainium_operator.cluster.cache.reflector import Reflector
    from trainium_operator.cluster.cache.store import Key

logger = logging.getLogger(__name__)

SLOW_SECONDS = 15.0
PAUSE_SECONDS = 30.0
FRESH_SECONDS = 180.0
TIMEOUT_SECONDS = 3.0
REMEMBERED = 1024
MAX_MESSAGE_CHARACTERS = 1024
VANISHED_SECONDS = 600.0
"""Time in which the pod of a member that vanished is read; until it is gone if the condition Reconciled names pods."""
MAX_VANISHED = 3


@dataclass(frozen=True, slots=True)
class _Warning:
    """The newest warning about a pod."""

    pod_uid: str
    reason: str = ""
    message: str = ""


class PodWarnings:
    """Warnings by job uid; times in Unix seconds of the clock."""

    def __init__(self, api: Api, pods: Reflector[PodView], clock: Callable[[], float]) -> None:
        self._api = api
        self._pods = pods
        self._clock = clock
        self._read: BoundedDict[str, tuple[float, _Warning]] = BoundedDict(REMEMBERED)
        self._read_again_at: BoundedDict[Key, float] = BoundedDict(REMEMBERED)
        """When a pod that left the watch is read again."""

    async def refresh(self, job: JobView) -> None:
        """Read the newest warning about the first pod of the job that starts slowly, and pods that left the watch."""
        now = self._clock()
        await self._find_strays(job, now)
        slow = [pod for pod in self._list_starting_pods(job) if now >= pod.created + SLOW_SECONDS]
        if not slow:
            self._read.pop(job.uid, None)
            return
        if job.uid in self._read and now < self._read[job.uid][0] + PAUSE_SECONDS:
            return
        pod = min(slow, key=lambda pod: pod.ordinal)
        self._read[job.uid] = (now, await self._read_warning(job.namespace, pod, now))

    async def _find_strays(self, job: JobView, now: float) -> None:
        """Read the pods of members that vanished: one whose role was removed is not watched any more."""
        reconciled = find_condition(job.status, ConditionType.RECONCILED)
        are_named = reconciled is not None and reconciled.reason == Reason.STRAY_PODS
        vanished = [
            entry.pod
            for entry in job.status.history
            if entry.cause is Cause.POD_LOST and (are_named or now < (entry.failed_at or 0.0) + VANISHED_SECONDS)
        ]
        jobs = {**self._pods.unwatched, **{key: stray.job for key, stray in self._pods.strays.items()}}
        pod_names = [key[1] for key, name in jobs.items() if (key[0], name) == (job.namespace, job.name)]
        for name in {*vanished[-MAX_VANISHED:], *pod_names} - {""}:
            key = (job.namespace, name)
            if self._pods.store.get_entry(key) is not None or now < self._read_again_at.get(key, 0.0):
                continue
            self._read_again_at[key] = now + PAUSE_SECONDS
            try:
                async with asyncio.timeout(TIMEOUT_SECONDS):
                    self._pods.track_stray(key, await self._api.get(PODS, *key, attempts=1))
                self._pods.unwatched.pop(key, None)
            except NotFoundError:
                self._read_again_at[key] = math.inf  # no later pod has its name
                self._pods.track_stray(key, None)
                self._pods.unwatched.pop(key, None)
            except (ApiError, TimeoutError) as error:
                logger.info("pod %s is not read: %s", name, error or "no answer")

    def get_refresh_delay(self, job: JobView) -> float | None:
        """Return the seconds until the next `refresh`; None if no pod is starting."""
        starting = self._list_starting_pods(job)
        if not starting:
            return None
        now = self._clock()
        if job.uid in self._read:
            return max(0.0, self._read[job.uid][0] + PAUSE_SECONDS - now)
        return max(0.0, min(pod.created for pod in starting) + SLOW_SECONDS - now)

    def add_warnings(self, job: JobView, pods: tuple[PodView, ...]) -> tuple[PodView, ...]:
        """Return the pods, with the warning as the reason of those that only show that they are starting."""
        _, warning = self._read.get(job.uid, (0.0, _Warning("")))
        if not warning.reason:
            return pods
        return tuple(
            replace(pod, reason=warning.reason, message=warning.message)
            if pod.uid == warning.pod_uid and _is_starting(pod)
            else pod
            for pod in pods
        )

    def _list_starting_pods(self, job: JobView) -> list[PodView]:
        return [pod for pod in self._pods.store.list_owned_by(job.id).values() if _is_starting(pod)]

    async def _read_warning(self, namespace: str, pod: PodView, now: float) -> _Warning:
        fields = f"involvedObject.uid={pod.uid},type=Warning"
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                page = await self._api.list_page(EVENTS, namespace, fields=fields)
        except (ApiError, TimeoutError) as error:
            logger.info("events of pod %s are not read: %s", pod.name, error or "no answer")
            return _Warning(pod.uid)
        return _find_newest_warning(pod, as_mappings(page.get("items")), now)


def _is_starting(pod: PodView) -> bool:
    """Return whether it has a node and shows no reason for its delay."""
    waits = pod.phase is PodPhase.PENDING and not pod.deleting and bool(pod.node)
    return waits and pod.reason in {"", *STARTING_REASONS} and not pod.init_container


def _find_newest_warning(pod: PodView, events: Sequence[Json], now: float) -> _Warning:
    """Return the newest warning since the pod got its node."""
    for event in build_event_views(events):
        if event.at > now - FRESH_SECONDS and event.reason != "FailedScheduling":
            message = format_log_text(event.message[:MAX_MESSAGE_CHARACTERS])
            return _Warning(pod.uid, event.reason[:64], message)
    return _Warning(pod.uid)
