"""Define what a plan asks for (`Plan`) and what each policy returns (`PolicyResult`): a status, actions, events.

Plain frozen data. `plan.plan` alone joins the results of policies. A worker that executes a plan follows these rules:

* The executor writes `Plan.status` first, when it differs from the observed one and with the observed
  `resource_version` as precondition, then records the events, then runs the actions in order. When a write fails it
  stops, and the job is planned again. A crash between any two writes only delays: the next plan continues from what it
  finds.
* Pods are created with their deterministic names; "already exists" counts as done. Pods are deleted with their uid as
  precondition; "not found" and "another uid" count as done.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trainium_operator.plan.model.text import format_sentence

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus
    from trainium_contract.wire.messages import Membership, RoleEndpoints
    from trainium_operator.plan.model.quota import WorkloadConditionView
    from trainium_operator.plan.model.reasons import Reason


@dataclass(frozen=True, slots=True)
class ManifestAction:
    """An action that writes an object."""

    manifest: dict[str, Any]


class ApplyObject(ManifestAction):
    """Create or update an object (ConfigMap or ResourceClaimTemplate) that pods need."""


class ApplyGroup(ManifestAction):
    """Server-side apply of a gang's object, of which no copy is cached: each plan with new pods applies it before them.

    Its name follows from its content, so an existing object is the same.
    """


class ApplyOptional(ManifestAction):
    """Create or update a NetworkPolicy, PodDisruptionBudget or Service.

    Nothing waits for it; a refusal stops no other write.
    """


@dataclass(frozen=True, slots=True)
class PublishMembership:
    """Write the membership ConfigMap, then let the coordinator serve it.

    The write must be a compare-and-swap (create, or update with resourceVersion): it may only replace a ConfigMap that
    holds generation `replaces` (0: no ConfigMap) or the very same membership; anything else is a conflict, after which
    the job is planned again. So one generation number never stands for two memberships.
    """

    membership: Membership
    manifest: dict[str, Any]
    """The complete ConfigMap."""
    replaces: int


class CreatePod(ManifestAction):
    """Create one worker pod."""


class CreateOtherPod(ManifestAction):
    """Create a pod that is no worker: of a role, or of an evaluation.

    No worker waits for it, and a refusal stops no other write.
    """


@dataclass(frozen=True, slots=True)
class PublishEndpoints:
    """Let the coordinator serve the addresses of the roles' pods; nothing is written to the API server."""

    endpoints: RoleEndpoints


class ApplyWorkload(ManifestAction):
    """Create or update a Workload of Kueue; only while it holds no quota."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetQuotaConditions:
    """Write conditions of a Workload, and with `returns_quota` release its quota in the same write.

    Only of this incarnation and version (uid and resourceVersion are preconditions).
    """

    name: str
    uid: str
    version: str
    conditions: tuple[WorkloadConditionView, ...]
    returns_quota: bool = False


@dataclass(frozen=True, slots=True)
class DeletionAction:
    """Delete an object, with its uid as precondition."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class PodDeletion(DeletionAction):
    """Delete a pod."""

    grace_seconds: int | None = None
    """None: the pod's own; 0: at once, without the node's confirmation."""


class DeletePod(PodDeletion):
    """Delete one worker pod."""


class DeleteOtherPod(PodDeletion):
    """Delete a pod that is no worker."""


class DeleteWorkload(DeletionAction):
    """Delete a Workload, which frees its quota."""


class DeleteTemplate(DeletionAction):
    """Delete a ResourceClaimTemplate that no pod refers to."""


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Delete the TrainingJob itself, in the background; only this incarnation and version."""

    uid: str
    resource_version: str


QuotaAction = ApplyWorkload | SetQuotaConditions | DeleteWorkload
Action = (
    ApplyObject
    | ApplyGroup
    | ApplyOptional
    | PublishMembership
    | CreatePod
    | DeletePod
    | CreateOtherPod
    | DeleteOtherPod
    | PublishEndpoints
    | DeleteTemplate
    | DeleteJob
    | QuotaAction
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event on the TrainingJob."""

    reason: Reason
    note: str
    warning: bool = False
    pod: str = ""
    """The pod that it is about besides the job; without one, `node`."""
    node: str = ""
    series: str = ""
    """Events of one reason and series are one Event with a count; empty: those with the same note."""


def build_event(
    reason: Reason, note: str, *, warning: bool = False, pod: str = "", node: str = "", series: str = ""
) -> Event:
    """Build an event about the job and a pod or node; the note is cut to what an event may hold."""
    return Event(reason=reason, note=format_sentence(note), warning=warning, pod=pod, node=node, series=series)


@dataclass(frozen=True, slots=True)
class Plan:
    """Status, actions and events of one plan."""

    status: TrainingJobStatus
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    requeue_after: float | None = field(default=None)
    """Seconds after which the job must be planned again even if nothing changes; None for never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyResult:
    """A status, and the actions and events of one policy."""

    status: TrainingJobStatus
    actions: tuple[Action, ...] = ()
    """In order."""
    events: tuple[Event, ...] = ()
    requeue_at: tuple[float, ...] = ()
    """When the job must be planned again (Unix seconds)."""

    def combine(self, after: PolicyResult) -> PolicyResult:
        """Join this result with that of a policy which was called with its status."""
        return PolicyResult(
            status=after.status,
            actions=self.actions + after.actions,
            events=self.events + after.events,
            requeue_at=self.requeue_at + after.requeue_at,
        )

    def replace_status(self, status: TrainingJobStatus) -> PolicyResult:
        """Replace the status."""
        return replace(self, status=status)
