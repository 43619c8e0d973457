"""All cached objects of the cluster, and which of them a plan waits for."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from trainium_contract.wire.worker_env import LABEL_JOB, LABEL_ROLE, OTHER_ROLES, ROLE_WORKER
from trainium_operator.cluster.api import resources
from trainium_operator.cluster.cache import views
from trainium_operator.cluster.cache.dra import Dra
from trainium_operator.cluster.cache.kueue import Kueue
from trainium_operator.cluster.cache.namespaces import EVERYWHERE, Namespaces
from trainium_operator.cluster.cache.reflector import Lister, Reflector
from trainium_operator.plan.model import names

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainium_contract.api_server.responses import Json
    from trainium_operator.cluster.api.client import Api
    from trainium_operator.cluster.cache.views import ChildRecord, JobRecord
    from trainium_operator.plan.model.observed import JobView, NodeView, PodView, StrayPod
    from trainium_operator.settings import Settings


_OPTIONAL_KINDS = (resources.SERVICES.kind, resources.NETWORK_POLICIES.kind)
"""Kinds of children that no job waits for."""
Watching: TypeAlias = "Reflector[PodView] | Reflector[ChildRecord] | Reflector[NodeView] | Reflector[JobRecord]"


@dataclass(frozen=True, slots=True)
class Caches:
    """All cached objects of the cluster; `nodes` is None where they may not be read (a namespaced install)."""

    jobs: Lister[JobRecord]
    pods: Reflector[PodView]
    nodes: Reflector[NodeView] | None
    children: Mapping[str, Reflector[ChildRecord]]
    """Other objects that a job controls, by kind; NetworkPolicies only where the operator creates them."""
    kueue: Kueue
    """Jobs without a queue do not wait for it."""
    dra: Dra
    """Jobs that claim no devices do not wait for it."""
    namespaces: Namespaces
    """The namespaces that are served, and those in which all of the above except the nodes is known."""
    other_pods: Reflector[PodView]
    """Pods of roles, and those that measure the models of milestones; no other job waits for them."""

    @property
    def config_maps(self) -> Reflector[ChildRecord]:
        """ConfigMaps of jobs, with the records of their memberships."""
        return self.children[resources.CONFIG_MAPS.kind]

    def list_reflectors(self) -> tuple[Watching, ...]:
        """Return all that have a `run`; the jobs only where individual namespaces are served; else kopf does."""
        jobs = self.jobs if isinstance(self.jobs, Reflector) else None
        children = (reflector for kind, reflector in self.children.items() if kind not in _OPTIONAL_KINDS)
        watched = (self.pods, *children, self.nodes, jobs)
        return tuple(reflector for reflector in watched if reflector is not None)

    def list_optional_reflectors(self) -> tuple[Watching, ...]:
        """Return those that no job waits for."""
        return (self.other_pods, *(self.children[kind] for kind in _OPTIONAL_KINDS if kind in self.children))

    async def wait_until_synced(self) -> None:
        """Wait until each has been listed once."""
        await self.jobs.synced.wait()
        for reflector in self.list_reflectors():
            await reflector.synced.wait()

    async def catch_up(self, since: float, *, records_only: bool = False) -> None:
        """Refresh lists that are older than `since` (loop time), because watches may lag behind.

        The previous leader may have written more. `records_only`: only jobs and their memberships, which are few.
        Raises ApiError.
        """
        records = (self.jobs, self.config_maps)
        others = tuple(reflector for reflector in self.list_reflectors() if reflector not in records)
        await asyncio.gather(*(lister.refresh(since) for lister in (records if records_only else (*records, *others))))
        if not records_only:
            await self.other_pods.refresh(since)
            self.kueue.catch_up(since)

    def find_membership(self, job: JobView) -> ChildRecord | None:
        """Return the membership ConfigMap of this incarnation of the job."""
        key = (job.namespace, names.format_membership_name(job.name))
        return self.config_maps.store.list_owned_by(job.id).get(key)

    def apply_refused_status(self, job: JobView) -> JobView:
        """Return the job with the status that the API server has refused so far, if that is the newest."""
        record = self.find_membership(job)
        refused = record.refused_status if record is not None else None
        if refused is None or refused.refused_writes <= job.status.refused_writes:
            return job
        return replace(job, status=refused)


def make_caches(
    api: Api,
    settings: Settings,
    clock: Callable[[], float] = time.time,
    *,
    on_change: Callable[[], None] = lambda: None,
) -> Caches:
    """Create empty caches for these settings; `on_change` follows changes that concern all jobs."""
    served = settings.namespaces
    states = Namespaces(served or EVERYWHERE, clock=clock)

    def watch_pods(
        parse: Callable[[Json], PodView],
        labels: str,
        namespaces: Namespaces,
        find_stray: Callable[[Json], StrayPod | None] | None = None,
    ) -> Reflector[PodView]:
        return Reflector(
            api, resources.PODS, parse, namespaces=namespaces, labels=labels, of_jobs=True, find_stray=find_stray
        )

    def separate() -> Namespaces:
        """Return other states: a namespace in which an optional kind cannot be read is served like others."""
        return Namespaces(served or EVERYWHERE)

    def watch_children(resource: resources.Resource) -> Reflector[ChildRecord]:
        namespaces = separate() if resource.kind in _OPTIONAL_KINDS else states
        return Reflector(api, resource, views.parse_child, namespaces=namespaces, labels=LABEL_JOB, of_jobs=True)

    kinds = [resources.CONFIG_MAPS, resources.DISRUPTION_BUDGETS, resources.SERVICES]
    kinds += [resources.NETWORK_POLICIES] if settings.job_network_policy else []
    return Caches(
        jobs=(Reflector if served else Lister)(api, resources.JOBS, views.parse_job, namespaces=states),
        pods=watch_pods(views.parse_worker_pod, f"{LABEL_ROLE}={ROLE_WORKER}", states, views.find_stray),
        nodes=Reflector(api, resources.NODES, views.parse_node) if settings.watch_nodes else None,
        children={resource.kind: watch_children(resource) for resource in kinds},
        kueue=Kueue(api, enabled=settings.kueue, namespaces=served, on_change=on_change),
        dra=Dra(api, enabled=settings.dra, namespaces=served, on_change=on_change),
        namespaces=states,
        other_pods=watch_pods(views.parse_other_pod, OTHER_ROLES, separate()),
    )
