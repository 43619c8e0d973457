"""Kueue's objects, kept: what plans know of a job's quota.

Invariants: nothing here holds anybody up: without Kueue in the cluster nothing is read, and every other job is planned,
also while Workloads cannot be read; Workloads that are not known are not taken for none; only those that the job
controls are kept.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from trainium_contract.wire.worker_env import LABEL_JOB
from trainium_operator.cluster.api.errors import ApiError
from trainium_operator.cluster.api.resources import FLAVORS, PRIORITIES, WORKLOADS
from trainium_operator.cluster.cache.kueue_views import flavor_view, priority_view, workload_view
from trainium_operator.cluster.cache.namespaces import EVERYWHERE, Namespaces
from trainium_operator.cluster.cache.optional_api import OptionalApi
from trainium_operator.cluster.cache.reflector import Reflector
from trainium_operator.plan.model.observed import ApiState, JobView
from trainium_operator.plan.model.quota import Placement, QuotaView, WorkloadView

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_operator.cluster.api.client import Api

logger = logging.getLogger(__name__)

CATCH_UP_SECONDS = 5.0
"""Pause after a list of the Workloads that failed at a take-over."""


class Kueue:
    """The cached objects of Kueue; `run` fills them from the moment that the cluster serves it."""

    def __init__(
        self,
        api: Api,
        *,
        enabled: bool,
        namespaces: tuple[str, ...] = (),
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called when what every job may depend on has changed; no `namespaces`: of all.

        Where Workloads cannot be read the quota is unknown (`quota`); everything else is planned there as well.
        """
        self._on_change = on_change
        self._since = 0.0
        """Lists that are older (loop time) may miss what the last leader wrote."""
        self._behind = asyncio.Event()
        self._namespaces = Namespaces(namespaces or EVERYWHERE)
        self.workloads: Reflector[WorkloadView] = Reflector(
            api,
            WORKLOADS,
            workload_view,
            namespaces=self._namespaces,
            labels=LABEL_JOB,
            of_jobs=True,
        )
        self.flavors: Reflector[Placement] = Reflector(api, FLAVORS, flavor_view)
        self.priorities: Reflector[tuple[int, bool]] = Reflector(api, PRIORITIES, priority_view)
        self.offered = OptionalApi(enabled, self.workloads, self.flavors, self.priorities)
        self.flavors.store.listen(self._changed)
        self.priorities.store.listen(self._changed)
        self._namespaces.listen(self._changed)

    async def run(self) -> None:
        """Read from when it is served, until cancelled."""
        await self.offered.served()
        async with asyncio.TaskGroup() as group:
            await self.offered.read(group)
            self._on_change()
            while True:
                await self._behind.wait()
                self._behind.clear()
                await self._reread()

    def catch_up(self, since: float) -> None:
        """Go by no list of Workloads that is older than `since` (loop time), and have a younger one soon."""
        self._since = since
        self._behind.set()

    async def _reread(self) -> None:
        while True:
            try:
                await self.workloads.refresh(self._since)
            except ApiError as error:
                logger.warning("listing the Workloads that the last leader left: %s", error)
                await asyncio.sleep(CATCH_UP_SECONDS)
            else:
                self._on_change()
                return

    def quota(self, job: JobView) -> QuotaView | None:
        """Return what is known of a job's quota; None when Kueue cannot be asked, or the job has no part in it."""
        owned = self.workloads.store.owned_by(job.id).values()
        listed = self._namespaces.is_open(job.namespace) and self.workloads.is_listed_since(job.namespace, self._since)
        known = self.offered.state is ApiState.READY and listed  # an absent list is no empty list
        if not known or not (owned or job.spec.scheduling.queue_name):
            return None
        workloads = sorted(owned, key=lambda each: (each.part, each.name))
        named = {flavor for each in workloads for grant in each.grants for flavor in grant.flavors}
        found = ((name, self.flavors.store.get(("", name))) for name in named)
        return QuotaView(
            workloads=tuple(workloads),
            flavors={name: flavor for name, flavor in found if flavor is not None},
            priority=self._priority(job.spec.scheduling.priority_class_name),
        )

    def _priority(self, name: str) -> int | None:
        if name:
            found = self.priorities.store.get(("", name))
            return None if found is None else found[0]
        defaults = (entry.view for entry in self.priorities.store.snapshot().values())
        return next((value for value, default in defaults if default), 0)

    def _changed(self, *_of_what: object) -> None:
        if self.offered.state is ApiState.READY:
            self._on_change()
