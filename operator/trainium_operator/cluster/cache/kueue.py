"""Kueue's objects, kept: what plans know of a job's quota.

Invariants: nothing here holds anybody up: without Kueue in the cluster nothing is read, and every other job is planned;
only Workloads that the job controls are kept.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from trainium_contract.wire.worker_env import LABEL_JOB
from trainium_operator.cluster.api.resources import FLAVORS, PRIORITIES, WORKLOADS
from trainium_operator.cluster.cache.kueue_views import flavor_view, priority_view, workload_view
from trainium_operator.cluster.cache.namespaces import EVERYWHERE, Namespaces
from trainium_operator.cluster.cache.reflector import Reflector
from trainium_operator.cluster.cache.store import Store
from trainium_operator.plan.model.quota import KueueState, Placement, QuotaView, WorkloadView

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_operator.cluster.api.client import Api
    from trainium_operator.plan.model.observed import JobView


class Kueue:
    """What is kept of Kueue; `run` fills it from the moment that the cluster serves it."""

    def __init__(
        self,
        api: Api,
        *,
        enabled: bool,
        namespaces: tuple[str, ...] = (),
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called when what every job may depend on has changed; no `namespaces`: of all.

        What cannot be read in one of them closes none: its Workloads are as they were last seen.
        """
        self._enabled = enabled
        self._served = asyncio.Event()
        self._on_change = on_change
        self.workloads: Reflector[WorkloadView] = Reflector(
            api,
            WORKLOADS,
            Store(by_namespace=bool(namespaces)),
            workload_view,
            namespaces=Namespaces(namespaces or EVERYWHERE),
            labels=LABEL_JOB,
            of_jobs=True,
        )
        self.flavors: Reflector[Placement] = Reflector(api, FLAVORS, Store(), flavor_view)
        self.priorities: Reflector[tuple[int, bool]] = Reflector(api, PRIORITIES, Store(), priority_view)
        self.flavors.store.listen(self._changed)
        self.priorities.store.listen(self._changed)

    @property
    def state(self) -> KueueState:
        """Whether plans may go by it."""
        if not self._enabled:
            return KueueState.OFF
        if not self._served.is_set():
            return KueueState.ABSENT
        read = all(each.synced.is_set() for each in (self.workloads, self.flavors, self.priorities))
        return KueueState.READY if read else KueueState.READING

    def is_served(self, served: bool) -> None:
        """Discovery says whether the cluster has it."""
        if served and self._enabled:
            self._served.set()
        else:
            self._served.clear()

    async def run(self) -> None:
        """Read from when it is served, until cancelled."""
        await self._served.wait()
        async with asyncio.TaskGroup() as group:
            for reflector in (self.workloads, self.flavors, self.priorities):
                group.create_task(reflector.run())
            for reflector in (self.workloads, self.flavors, self.priorities):
                await reflector.synced.wait()
            self._on_change()

    async def catch_up(self, since: float) -> None:
        """Have a list of the Workloads that is younger than `since` (loop time). Raises ApiError."""
        if self._served.is_set():
            await self.workloads.refresh(since)

    def quota(self, job: JobView) -> QuotaView | None:
        """What is known of a job's quota; None when Kueue cannot be asked, or the job has no part in it."""
        owned = self.workloads.store.owned_by(job.id).values()
        if self.state is not KueueState.READY or not (owned or job.spec.scheduling.queue_name):
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
        if self.state is KueueState.READY:
            self._on_change()
