"""Execute a plan: status first, then events, then the actions in order.

Guarantees:
- Every write may be repeated (deterministic names, preconditions), so a crash between any two of them is harmless.
- The answer to a write is put into the caches at once, so that the next plan does not ask for it again.
- After a failed write the rest of that plan is dropped, and the job is planned again. Ended pods are deleted even if
  nothing may be created, and failed ones are replaced even if they may not be deleted.
- Neighbouring applies, creations and deletions run in parallel, within the limits of `concurrency`. Creations start
  with one, and each success starts `CALLS_PER_SUCCESS` more, so that a used-up quota costs one refusal and not a
  thousand. Deletions behind creations are few at a time.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

from trainium_contract.api_server import errors
from trainium_contract.rfc3339 import format_rfc3339
from trainium_contract.wire.worker_env import LABEL_ROLE
from trainium_operator.cluster.api.client import add_labels
from trainium_operator.cluster.api.resources import (
    JOBS,
    PODS,
    TEMPLATES,
    WORKLOADS,
    find_resource,
)
from trainium_operator.cluster.cache.kueue_views import set_conditions
from trainium_operator.cluster.execute.concurrency import MAX_WRITES_PER_JOB, WriteSlots, run_all, run_with_slow_start
from trainium_operator.cluster.execute.deletion_limit import ForceDeleteLimiter, ForceDeleteLimitError
from trainium_operator.cluster.execute.events import EventRecorder, write_failed_event
from trainium_operator.cluster.execute.membership_writes import MembershipWrites
from trainium_operator.cluster.execute.merge_patch import replace_content
from trainium_operator.cluster.queue.write_outcomes import check_identity, format_refusal
from trainium_operator.plan.model.actions import (
    ApplyGroup,
    ApplyObject,
    ApplyOptional,
    ApplyWorkload,
    CreateOtherPod,
    CreatePod,
    DeleteJob,
    DeleteOtherPod,
    DeletePod,
    DeleteTemplate,
    DeleteWorkload,
    ManifestAction,
    PublishEndpoints,
    PublishMembership,
    SetQuotaConditions,
)
from trainium_operator.plan.model.names import format_role_object_name

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from trainium_contract.api_server.responses import Json
    from trainium_operator.cluster.api.client import Api
    from trainium_operator.cluster.api.resources import Resource
    from trainium_operator.cluster.cache.caches import Caches
    from trainium_operator.cluster.cache.reflector import Lister
    from trainium_operator.cluster.cache.store import IndexedCache
    from trainium_operator.cluster.execute.owner_check import OwnerCheck
    from trainium_operator.cluster.execute.status_writes import StatusWrites
    from trainium_operator.cluster.queue.refusal_backoff import RefusalBackoff
    from trainium_operator.cluster.queue.write_outcomes import WriteOutcomes
    from trainium_operator.coordinator.state import CoordinatorState
    from trainium_operator.plan.model.actions import Action, DeletionAction, Plan, PodDeletion
    from trainium_operator.plan.model.observed import JobView, PodView

MIN_REPORTED_PAUSE_SECONDS = 2.0
"""Pause in seconds from which refused creations show as an event."""
MAX_DELETIONS_DURING_START = 8
"""Concurrent deletions of ended pods behind creations, so that they do not delay the binding and start of new pods."""


class Executor:
    """Executes plans; one for each process.

    `execute` may run for several jobs at once, never twice for one.
    """

    def __init__(
        self,
        api: Api,
        caches: Caches,
        recorder: EventRecorder,
        publisher: CoordinatorState,
        refusal_backoff: RefusalBackoff,
        outcomes: WriteOutcomes,
        statuses: StatusWrites,
        owners: OwnerCheck,
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._statuses = statuses
        self._owners = owners
        self._force_deletions = ForceDeleteLimiter(clock)
        self._outcomes = outcomes
        self._refusal_backoff = refusal_backoff
        self._api = api
        self._caches = caches
        self._recorder = recorder
        self._publisher = publisher
        self._slots = WriteSlots()
        self._memberships = MembershipWrites(api, caches.config_maps, owners)

    async def execute(self, job: JobView, plan: Plan) -> None:
        """Execute the plan. Raises the ApiError of the first write that failed."""
        await self._statuses.write(job, plan.status)
        for event in plan.events:
            self._recorder.record(job.id, event)
        held: errors.ApiError | None = None
        refused: errors.ApiError | None = None
        started = False
        for kind, group in groupby(plan.actions, type):
            actions: Sequence[Any] = tuple(_add_job_labels(job, action) for action in group)
            if kind is DeletePod:
                try:
                    await self._delete_pods(job, actions, MAX_DELETIONS_DURING_START if started else MAX_WRITES_PER_JOB)
                except errors.ApiError as error:
                    if not isinstance(error, ForceDeleteLimitError) and not errors.is_refusal(error):
                        raise
                    held = error  # lost pods are replaced even if they may not be deleted
            elif kind is ApplyOptional:
                for action in actions:
                    await self._outcomes.write(_format_target(action), job.uid, self._apply(job, action.manifest))
            elif kind is PublishEndpoints:
                for action in actions:
                    self._publisher.publish_endpoints(job.id, action.endpoints)
            elif kind is CreateOtherPod:
                await self._create_other_pods(job, actions)
            elif kind is DeleteOtherPod:
                for action in actions:
                    place = f"{PODS.kind}/{action.name}"
                    await self._outcomes.write(place, job.uid, self._delete_pod(job, action, self._caches.other_pods))
            elif refused is not None:
                break
            elif kind is CreatePod:
                started = True
                try:
                    creations = run_with_slow_start(
                        partial(self._create_pod, job, action, self._caches.pods) for action in actions
                    )
                    await self._run_creations(job, (PODS.kind, creations))
                except errors.ApiError as error:
                    refused = error  # ended pods are deleted even if nothing may be created
            elif kind is ApplyObject:
                await self._run_creations(
                    job,
                    *(
                        (_format_target(pending_action), self._execute_action(job, pending_action))
                        for pending_action in actions
                    ),
                )
            else:
                for action in actions:
                    await self._run_creations(job, (_format_target(action), self._execute_action(job, action)))
        if refused is not None:
            raise refused
        if held is not None:
            raise held

    async def _run_creations(self, job: JobView, *works: tuple[str, Awaitable[None]]) -> None:
        """Run the creations in parallel; record refusals by place, so that not each event repeats them."""
        pauses: list[float] = []

        async def at(place: str, work: Awaitable[None]) -> None:
            try:
                await work
            except errors.ApiError as error:
                if errors.is_refusal(error):
                    refusal = format_refusal(job.name, place, str(error))
                    pauses.append(self._refusal_backoff.record_refusal(job.uid, place, refusal))
                raise
            self._refusal_backoff.record_success(job.uid, place)

        try:
            await run_all(at(place, work) for place, work in works)
        except errors.ApiError as error:
            if errors.is_refusal(error) and max(pauses) >= MIN_REPORTED_PAUSE_SECONDS:
                self._recorder.record(job.id, write_failed_event(str(error)))
            raise

    async def _execute_action(self, job: JobView, action: Action) -> None:
        if isinstance(action, PublishMembership):
            await self._publish(job, action)
        elif isinstance(action, ApplyObject):
            await self._apply(job, action.manifest)
        elif isinstance(action, ApplyGroup):
            manifest = action.manifest
            await self._api.apply(find_resource(manifest), job.namespace, manifest["metadata"]["name"], manifest)
        elif isinstance(action, ApplyWorkload):
            workloads = self._caches.kueue.workloads
            stored = await self._create_or_replace(job, WORKLOADS, action.manifest, workloads.store)
            check_identity(action.manifest, stored)
            workloads.write_through(stored)
        elif isinstance(action, SetQuotaConditions):
            await self._set_quota_conditions(job, action)
        elif isinstance(action, DeleteWorkload):
            await self._delete(job, self._caches.kueue.workloads, action)
        elif isinstance(action, DeleteTemplate):
            await self._delete(job, self._caches.dra.templates, action)
        elif isinstance(action, DeleteJob):
            await self._delete_job(job, action)

    async def _apply(self, job: JobView, manifest: Json) -> None:
        kind = manifest["kind"]
        lister: Lister[Any] = self._caches.dra.templates if kind == TEMPLATES.kind else self._caches.children[kind]
        before = lister.store.get((job.namespace, manifest["metadata"]["name"]))
        stored = await self._create_or_replace(job, lister.resource, manifest, lister.store)
        lister.write_through(stored)
        if kind != TEMPLATES.kind:  # named after its content
            self._outcomes.record_applied(job.uid, manifest, before, stored)

    async def _create_or_replace(
        self, job: JobView, resource: Resource, manifest: Json, store: IndexedCache[Any]
    ) -> Json:
        """Create an object, or replace the content of the job's existing one. Raises NotOursError."""
        name = manifest["metadata"]["name"]
        if store.get_entry((job.namespace, name)) is None:
            try:
                created = await self._api.create(resource, job.namespace, manifest)
            except errors.AlreadyExistsError:
                pass  # ours, from before this process, or another's
            else:
                await self._owners.check(job, resource, created)
                return created
        current = await self._get_live(resource, job.namespace, name)
        await self._owners.check(job, resource, current)
        metadata = {**manifest["metadata"], "resourceVersion": current["metadata"]["resourceVersion"]}
        patch = {**replace_content(current, manifest), "metadata": metadata}
        return await self._api.merge(resource, job.namespace, name, patch)

    async def _get_live(self, resource: Resource, namespace: str, name: str) -> Json:
        try:
            return await self._api.get(resource, namespace, name)
        except errors.NotFoundError as error:
            raise errors.ConflictError(f"{resource.kind} {name} was deleted meanwhile", status=409) from error

    async def _set_quota_conditions(self, job: JobView, action: SetQuotaConditions) -> None:
        """Write conditions of a Workload, and release its quota if the plan decides so. Raises ConflictError.

        A merge patch replaces the whole list and removes the admission, whichever manager wrote them. The resource
        version ensures that it overwrites nothing that the plan did not see.
        """
        workloads = self._caches.kueue.workloads
        try:
            current = await self._api.get(WORKLOADS, job.namespace, action.name)
        except errors.NotFoundError:
            workloads.store.forget((job.namespace, action.name), action.uid)
            return
        metadata = current["metadata"]
        if (metadata["uid"], metadata["resourceVersion"]) != (action.uid, action.version):
            workloads.observe(current, deleted=False)
            raise errors.ConflictError(f"Workload {action.name} has changed since it was looked at", status=409)
        old = (current.get("status") or {}).get("conditions") or ()
        status = {"conditions": set_conditions(old, action.conditions, format_rfc3339(self._clock()))}
        body = {
            "metadata": {"resourceVersion": action.version, "uid": action.uid},
            "status": {**status, "admission": None} if action.returns_quota else status,
        }
        raw = await self._api.merge(WORKLOADS, job.namespace, action.name, body, subresource="status")
        workloads.write_through(raw)

    async def _delete(self, job: JobView, lister: Lister[Any], action: DeletionAction) -> None:
        """Delete an object other than a worker; one that is gone, or another incarnation, counts as deleted."""
        try:
            raw = await self._api.delete(lister.resource, job.namespace, action.name, uid=action.uid)
        except (errors.NotFoundError, errors.ConflictError):
            raw = {}
        if raw.get("kind") == lister.resource.kind and "deletionTimestamp" in raw["metadata"]:
            lister.write_through(raw)
        else:
            lister.store.forget((job.namespace, action.name), action.uid)

    async def _delete_job(self, job: JobView, action: DeleteJob) -> None:
        """Delete the job as it was observed, not one that was created again or changed since."""
        try:
            await self._api.delete(
                JOBS, job.namespace, job.name, uid=action.uid, resource_version=action.resource_version
            )
        except errors.NotFoundError:
            pass
        except errors.ConflictError:
            await self._statuses.refresh(job)
            raise

    async def _publish(self, job: JobView, action: PublishMembership) -> None:
        """Compare and swap the record of the membership, then serve it; see PublishMembership."""
        await self._memberships.write(job, action)
        cached = self._caches.jobs.store.get_entry((job.namespace, job.name))
        if cached is not None and cached.uid == job.uid:  # otherwise the job was deleted meanwhile
            self._publisher.publish(job.id, action.membership)

    async def _create_other_pods(self, job: JobView, actions: Sequence[CreateOtherPod]) -> None:
        """Create the pods of each role; a refusal is recorded at the role, and stops only its others."""
        for role, group in groupby(actions, lambda action: action.manifest["metadata"]["labels"][LABEL_ROLE]):
            creations = run_with_slow_start(
                partial(self._create_pod, job, action, self._caches.other_pods) for action in group
            )
            await self._outcomes.write(f"{PODS.kind}/{format_role_object_name(job.name, role)}", job.uid, creations)

    async def _create_pod(self, job: JobView, action: ManifestAction, pods: Lister[PodView]) -> None:
        name = action.manifest["metadata"]["name"]
        async with self._slots.acquire(job.id):
            try:
                raw = await self._api.create(PODS, job.namespace, action.manifest)
            except errors.AlreadyExistsError:
                raw = await self._api.get(PODS, job.namespace, name)
                await self._owners.check(job, PODS, raw)
            try:
                check_identity(action.manifest, raw)
            except errors.ChangedError:
                await self._api.delete(PODS, job.namespace, name, uid=raw["metadata"]["uid"])
                raise
        pods.write_through(raw)

    async def _delete_pods(self, job: JobView, actions: Sequence[DeletePod], max_concurrency: int) -> None:
        turns = asyncio.Semaphore(max_concurrency)

        async def delete(action: DeletePod) -> None:
            place = f"{PODS.kind}/{action.name}"
            async with turns:
                try:
                    await self._delete_pod(job, action, self._caches.pods)
                except errors.ApiError as error:
                    if errors.is_refusal(error):
                        self._outcomes.record_refusal(place, job.uid, f"{action.name} is not deleted: {error}")
                    raise
            self._outcomes.clear_refusal(place, job.uid)

        await run_all(delete(action) for action in actions)

    async def _delete_pod(self, job: JobView, action: PodDeletion, pods: Lister[PodView]) -> None:
        if action.grace_seconds == 0:
            self._force_deletions.permit(action.uid, len(pods.store))
        async with self._slots.acquire(job.id):
            try:
                raw = await self._api.delete(
                    PODS, job.namespace, action.name, uid=action.uid, grace_seconds=action.grace_seconds
                )
            except errors.NotFoundError:
                raw = {}
            except errors.ConflictError:
                if await self._exists(job, action):
                    raise
                raw = {}
        # Without a resourceVersion it is the last state of a pod that another client removed at the same moment.
        if raw.get("kind") == PODS.kind and {"deletionTimestamp", "resourceVersion"} <= raw["metadata"].keys():
            pods.write_through(raw)
        else:
            pods.store.forget((job.namespace, action.name), action.uid)

    async def _exists(self, job: JobView, action: PodDeletion) -> bool:
        """Return whether the pod itself is still there, and not another incarnation of its name."""
        try:
            raw = await self._api.get(PODS, job.namespace, action.name)
        except errors.NotFoundError:
            return False
        return bool(raw["metadata"]["uid"] == action.uid)


def _add_job_labels(job: JobView, action: Action) -> Action:
    """Return the action with the job's own labels on the object that it writes."""
    if not job.labels or not isinstance(action, ManifestAction | PublishMembership):
        return action
    return cast("Action", replace(action, manifest=add_labels(action.manifest, job.labels)))


def _format_target(action: Action) -> str:
    """Return where the action writes: `Kind/name` of its object, else what it does."""
    manifest: Json | None = getattr(action, "manifest", None)
    return type(action).__name__ if manifest is None else f"{manifest['kind']}/{manifest['metadata']['name']}"
