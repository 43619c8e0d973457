"""Write a job's status; while the API server refuses it, keep it in the ConfigMap `NAME-membership` instead.

A refusal may come from a policy or a webhook of others that matches `trainingjobs/*`, or from the size of the status.

Guarantees:
- A status is stored in one of the two places before anything that follows from it is executed.
- A kept status counts more refused writes than each one that was sent before, so it stays the newest even if the API
  server executes an earlier write late. It is removed once the job has a status that counts as many.
- One attempt takes `SECONDS` at most, and pauses between attempts grow up to a minute.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from trainium_contract.api_server import errors
from trainium_contract.status.internal import pack_internal
from trainium_contract.wire.recorded_membership import REFUSAL_KEY, STATUS_KEY
from trainium_operator.cluster.api.client import add_labels
from trainium_operator.cluster.api.resources import CONFIG_MAPS, JOBS
from trainium_operator.cluster.execute.events import EventRecorder, write_failed_event
from trainium_operator.cluster.execute.merge_patch import replace_content
from trainium_operator.cluster.execute.undeclared_fields import UndeclaredFields
from trainium_operator.cluster.queue.refusal_backoff import RefusalBackoff
from trainium_operator.plan.manifests.owned_object import build_owned_object
from trainium_operator.plan.model import names

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_contract.api_server.responses import Json
    from trainium_contract.job import TrainingJobStatus
    from trainium_operator.cluster.api.client import Api
    from trainium_operator.cluster.cache.caches import Caches
    from trainium_operator.cluster.execute.owner_check import OwnerCheck
    from trainium_operator.plan.model.observed import JobView

SECONDS = 3.0
_PLACE = JOBS.kind


class StatusWrites:
    """Writes statuses; times in Unix seconds of the clock."""

    def __init__(
        self,
        api: Api,
        caches: Caches,
        recorder: EventRecorder,
        owners: OwnerCheck,
        clock: Callable[[], float],
        on_refused: Callable[[], None],
    ) -> None:
        self._api = api
        self._caches = caches
        self._recorder = recorder
        self._owners = owners
        self._clock = clock
        self._on_refused = on_refused
        self._undeclared = UndeclaredFields(clock)
        self._backoff = RefusalBackoff(clock)

    async def write(self, job: JobView, status: TrainingJobStatus) -> None:
        """Store the status of a job, whose own is the one that the API server has.

        Raises ApiError if it is in neither place.
        """
        record = self._caches.find_membership(job)
        kept = record.refused_status if record is not None else None
        refusal = await self._send(job, status) if status != job.status else ""
        if not refusal:
            if kept is not None:
                await self._keep(job, {STATUS_KEY: None, REFUSAL_KEY: None})
        elif status != kept:
            newer = status.replaced(refused_writes=status.refused_writes + 1)
            await self._keep(job, {STATUS_KEY: json.dumps(newer.to_wire()), REFUSAL_KEY: refusal})

    def get_retry_delay(self, job: JobView) -> float | None:
        """Return when the job's refused status may be sent again; None if none was refused."""
        retry_at = self._backoff.get_blocked_until(job.uid)
        return max(0.0, retry_at - self._clock()) if retry_at else None

    async def refresh(self, job: JobView) -> None:
        """Read the job again, because the cached copy is old and the next plan must not work from it."""
        try:
            self._caches.jobs.observe(await self._api.get(JOBS, job.namespace, job.name), deleted=False)
        except errors.NotFoundError:
            self._caches.jobs.store.forget((job.namespace, job.name), job.uid)

    async def _send(self, job: JobView, status: TrainingJobStatus) -> str:
        """Write the status; return why it is refused, or empty."""
        if self._clock() < self._backoff.get_blocked_until(job.uid):
            return self._backoff.find_refusal(job.uid)
        try:
            async with asyncio.timeout(SECONDS) as budget:
                raw = await self._apply(job, pack_internal(status))
        except (errors.ConflictError, errors.NotFoundError):
            await self.refresh(job)
            raise
        except TimeoutError:
            if not budget.expired():
                raise
            outcome, refusal = "not answered", f"no answer within {SECONDS:.0f} s"
        except errors.ApiError as error:
            if not errors.is_refusal(error):
                raise
            outcome, refusal = "refused", str(error)
        else:
            self._caches.jobs.write_through(raw)
            self._backoff.record_success(job.uid, _PLACE)
            return ""
        self._on_refused()
        self._backoff.record_refusal(job.uid, _PLACE, refusal)
        text = (
            f"The status of this job is {outcome}: it is kept in ConfigMap {names.format_membership_name(job.name)}, "
            f"and the operator acts on it. Exempt trainingjobs/status from what refuses or delays it: {refusal}"
        )
        self._recorder.record(job.id, write_failed_event(text))
        return refusal

    async def _apply(self, job: JobView, status: Json) -> Json:
        """Apply the status without undeclared fields; a refusal may name only some of them."""
        version = {"resourceVersion": job.resource_version}
        while True:
            body = {"metadata": version, "status": self._undeclared.drop_from(status)}
            try:
                return await self._api.apply(JOBS, job.namespace, job.name, body, subresource="status", attempts=1)
            except errors.UndeclaredFieldError as error:
                if not self._undeclared.learn(error):
                    raise

    async def _keep(self, job: JobView, data: dict[str, str | None]) -> None:
        """Merge the data into the ConfigMap of the membership, which the first refusal may precede."""
        name = names.format_membership_name(job.name)
        manifest = add_labels(build_owned_object(job, "v1", CONFIG_MAPS.kind, name, {}, "membership"), job.labels)
        try:
            current = await self._api.get(CONFIG_MAPS, job.namespace, name)
        except errors.NotFoundError:
            raw = await self._api.create(
                CONFIG_MAPS,
                job.namespace,
                {**manifest, "data": {key: text for key, text in data.items() if text is not None}},
            )
        else:
            patch: Json = {"metadata": {}, "data": data}
            if await self._owners.check(job, CONFIG_MAPS, current):
                kept = {key: text for key, text in data.items() if text is not None}
                patch = {**replace_content(current, {"data": kept}), "metadata": manifest["metadata"]}
            metadata = {**patch["metadata"], "resourceVersion": current["metadata"]["resourceVersion"]}
            raw = await self._api.merge(CONFIG_MAPS, job.namespace, name, {**patch, "metadata": metadata})
        self._caches.config_maps.write_through(raw)
