"""Write objects of optional APIs: a job's Workloads of Kueue, and the templates by which devices are claimed.

Guarantee: only the job's objects are written, each with the incarnation that the plan saw, and conditions with the
version.
"""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from trainium_operator.cluster.api.errors import ConflictError, NotFoundError
from trainium_operator.cluster.api.resources import TEMPLATES, WORKLOADS
from trainium_operator.cluster.cache.kueue_views import with_conditions

if TYPE_CHECKING:
    from trainium_operator.cluster.api.client import Api
    from trainium_operator.cluster.cache.dra import Dra
    from trainium_operator.cluster.cache.kueue import Kueue
    from trainium_operator.plan.model.actions import DeleteTemplate, DeleteWorkload, SetQuotaConditions
    from trainium_operator.plan.model.observed import JobView


async def write_quota_conditions(api: Api, kueue: Kueue, job: JobView, action: SetQuotaConditions) -> None:
    """Write conditions of a Workload, and release its quota if the plan decides so. Raises ConflictError.

    A merge patch replaces the whole list and removes the admission, whichever manager wrote them; the version keeps it
    from overwriting anything that the plan did not see.
    """
    try:
        current = await api.get(WORKLOADS, job.namespace, action.name)
    except NotFoundError:
        kueue.workloads.store.forget((job.namespace, action.name), action.uid)
        return
    metadata = current["metadata"]
    if (metadata["uid"], metadata["resourceVersion"]) != (action.uid, action.version):
        kueue.workloads.observe(current, deleted=False)
        raise ConflictError(f"Workload {action.name} has changed since it was looked at", status=409)
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    old = (current.get("status") or {}).get("conditions") or ()
    status = {"conditions": with_conditions(old, action.conditions, now)}
    body = {
        "metadata": {"resourceVersion": action.version, "uid": action.uid},
        "status": {**status, "admission": None} if action.returns else status,
    }
    kueue.workloads.write_through(await api.merge(WORKLOADS, job.namespace, action.name, body, subresource="status"))


async def drop_quota(api: Api, kueue: Kueue, job: JobView, action: DeleteWorkload) -> None:
    """Delete a Workload; one that is gone, or another incarnation, counts as done."""
    try:
        raw = await api.delete(WORKLOADS, job.namespace, action.name, uid=action.uid)
    except (NotFoundError, ConflictError):
        raw = {}
    if raw.get("kind") == WORKLOADS.kind and "deletionTimestamp" in raw["metadata"]:
        kueue.workloads.write_through(raw)
    else:
        kueue.workloads.store.forget((job.namespace, action.name), action.uid)


async def drop_template(api: Api, dra: Dra, job: JobView, action: DeleteTemplate) -> None:
    """Delete a template; one that is gone, or another incarnation, counts as done."""
    with contextlib.suppress(NotFoundError, ConflictError):
        await api.delete(TEMPLATES, job.namespace, action.name, uid=action.uid)
    dra.templates.store.forget((job.namespace, action.name), action.uid)
