"""Cache device slices, claims, and the claim templates of jobs.

Invariants:
- Nothing is read before a job claims devices, nor where the cluster does not serve the API.
- No other job waits for these objects.
- Only templates that a job controls are kept.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from trainium_contract.wire.worker_env import LABEL_JOB
from trainium_operator.cluster.api.resources import CLAIMS, SLICES, TEMPLATES
from trainium_operator.cluster.cache.device_views import (
    ClaimView,
    SliceView,
    parse_claim,
    parse_claim_template,
    parse_slice,
)
from trainium_operator.cluster.cache.inventory import Inventory
from trainium_operator.cluster.cache.namespaces import EVERYWHERE, Namespaces
from trainium_operator.cluster.cache.optional_api import OptionalApi
from trainium_operator.cluster.cache.reflector import Reflector
from trainium_operator.plan.model.devices import DevicesView
from trainium_operator.plan.model.observed import ApiState, JobView, PodView

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_operator.cluster.api.client import Api


class Dra:
    """The cached objects of claimed devices; `run` fills them once a job claims some and the cluster serves the API."""

    def __init__(
        self,
        api: Api,
        *,
        enabled: bool,
        namespaces: tuple[str, ...] = (),
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called when everything has been read; without `namespaces`, those of all are read."""
        self._wanted = asyncio.Event()
        self._on_change = on_change
        self.templates: Reflector[str] = Reflector(
            api,
            TEMPLATES,
            parse_claim_template,
            namespaces=Namespaces(namespaces or EVERYWHERE),
            labels=LABEL_JOB,
            of_jobs=True,
        )
        self.claims: Reflector[ClaimView] = Reflector(
            api, CLAIMS, parse_claim, namespaces=Namespaces(namespaces or EVERYWHERE)
        )
        self.slices: Reflector[SliceView] = Reflector(api, SLICES, parse_slice)
        self.offered = OptionalApi(enabled, self.templates, self.claims, self.slices)
        self.inventory = Inventory(self.slices.store, self.claims.store)

    async def run(self) -> None:
        """Wait until the API is served and a job claims devices, then read until cancelled."""
        await self.offered.wait_until_served()
        await self._wanted.wait()
        async with asyncio.TaskGroup() as group:
            await self.offered.read(group)
            self._on_change()

    def find_devices(
        self, job: JobView, pods: tuple[PodView, ...], usable: Callable[[str], bool]
    ) -> DevicesView | None:
        """Return the devices of a job; None if it claims none or nothing is known.

        `usable(node)` returns whether a worker of the job could run on that node, devices aside.
        """
        accelerator = job.spec.workers.accelerator
        if accelerator.claim is not None:
            self._wanted.set()
        owned = self.templates.store.list_owned_by(job.id)
        if self.offered.state is not ApiState.READY or not (owned or accelerator.claim is not None):
            return None
        nodes = [name for name in self.inventory.list_nodes() if usable(name)]
        count = accelerator.count_claimed_devices()
        taints = ((pod.uid, self.inventory.find_taints(pod.uid)) for pod in pods)
        return DevicesView(
            templates={name: uid for (_, name), uid in owned.items()},
            taints={uid: pool_taints for uid, pool_taints in taints if pool_taints},
            free_nodes=tuple(name for name in nodes if self.inventory.count_free_on(name) >= max(1, count)),
            nodes=len(nodes),
        )
