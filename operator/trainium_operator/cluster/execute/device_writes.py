"""What plans remove of claimed devices: templates that no pod refers to any more.

Invariant: only the job's own are removed, each with the incarnation that the plan saw.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from trainium_operator.cluster.api.errors import ConflictError, NotFoundError
from trainium_operator.cluster.api.resources import TEMPLATES

if TYPE_CHECKING:
    from trainium_operator.cluster.api.client import Api
    from trainium_operator.cluster.cache.dra import Dra
    from trainium_operator.plan.model.actions import DeleteTemplate
    from trainium_operator.plan.model.observed import JobView


async def drop_template(api: Api, dra: Dra, job: JobView, action: DeleteTemplate) -> None:
    """Delete a template; one that is gone, or another incarnation, counts as done."""
    with contextlib.suppress(NotFoundError, ConflictError):
        await api.delete(TEMPLATES, job.namespace, action.name, uid=action.uid)
    dra.templates.store.forget((job.namespace, action.name), action.uid)
