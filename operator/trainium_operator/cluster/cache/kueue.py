"""Cache Kueue's objects, from which plans learn a job's quota.

Invariants:
- Without Kueue in the cluster nothing is read.
- Jobs without a queue are planned while Workloads cannot be read.
- Unknown Workloads are not treated as absent.
- Only Workloads that a job controls are kept.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from trainium_contract.api_server.errors import ApiError
from trainium_contract.wire.worker_env import LABEL_JOB
from trainium_operator.cluster.api.resources import FLAVORS, PRIORITIES, WORKLOADS
from trainium_operator.cluster.cache.kueue_views import parse_flavor, parse_priority_class, parse_workload
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
"""Pause after a failed list of the Workloads when this process takes over."""


class Kueue:
    """The cached objects of Kueue; `run` fills them once the cluster serves them."""

    def __init__(
        self,
        api: Api,
        *,
        enabled: bool,
        namespaces: tuple[str, ...] = (),
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called when something that every job may depend on has changed.

        Without `namespaces`, those of all are read. Where Workloads cannot be read only the quota is unknown (`quota`).
        """
        self._on_change = on_change
        self._since = 0.0
        """Lists that are older (loop time) may miss writes of the previous leader."""
        self._behind = asyncio.Event()
        self._namespaces = Namespaces(namespaces or EVERYWHERE)
        self.workloads: Reflector[WorkloadView] = Reflector(
            api,
            WORKLOADS,
            parse_workload,
            namespaces=self._namespaces,
            labels=LABEL_JOB,
            of_jobs=True,
        )
        self.flavors: Reflector[Placement] = Reflector(api, FLAVORS, parse_flavor)
        self.priorities: Reflector[tuple[int, bool]] = Reflector(api, PRIORITIES, parse_priority_class)
        self.offered = OptionalApi(enabled, self.workloads, self.flavors, self.priorities)
        self.flavors.store.listen(self._handle_change)
        self.priorities.store.listen(self._handle_change)
        self._namespaces.listen(self._handle_change)

    async def run(self) -> None:
        """Wait until the API is served, then read until cancelled."""
        await self.offered.wait_until_served()
        async with asyncio.TaskGroup() as group:
            await self.offered.read(group)
            self._on_change()
            while True:
                await self._behind.wait()
                self._behind.clear()
                await self._reread()

    def catch_up(self, since: float) -> None:
        """Ignore lists of Workloads that are older than `since` (loop time), and request a newer one."""
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

    def find_quota(self, job: JobView) -> QuotaView | None:
        """Return a job's quota; None when Kueue is not available or the job has no queue."""
        owned = self.workloads.store.list_owned_by(job.id).values()
        is_synced = self._namespaces.is_synced(job.namespace)
        is_listed = is_synced and self.workloads.is_listed_since(job.namespace, self._since)
        is_complete = self.offered.state is ApiState.READY and is_listed  # a missing list is not an empty list
        if not is_complete or not (owned or job.spec.scheduling.queue_name):
            return None
        workloads = sorted(owned, key=lambda workload: (workload.part, workload.name))
        named = {flavor for workload in workloads for grant in workload.grants for flavor in grant.flavors}
        flavors = ((name, self.flavors.store.get(("", name))) for name in named)
        return QuotaView(
            workloads=tuple(workloads),
            flavors={name: flavor for name, flavor in flavors if flavor is not None},
            priority=self._find_priority(job.spec.scheduling.priority_class_name),
        )

    def _find_priority(self, name: str) -> int | None:
        if name:
            priority_entry = self.priorities.store.get(("", name))
            return None if priority_entry is None else priority_entry[0]
        defaults = (entry.view for entry in self.priorities.store.snapshot().values())
        return next((value for value, default in defaults if default), 0)

    def _handle_change(self, *_of_what: object) -> None:
        if self.offered.state is ApiState.READY:
            self._on_change()
