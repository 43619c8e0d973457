"""Define the hooks of an optional feature, and what a queue grants a job.

Kueue, claimed devices, gang scheduling, network policies and idle nodes are optional. Each is one folder of
`plan.features` and one line of `features.registry`; nothing outside the folder asks whether it is there.

Guarantees:
- A plan calls the hooks of the features that its job uses, and of no other.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from trainium_operator.plan.model.actions import Action, PolicyResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from trainium_contract.job import TrainingJobStatus
    from trainium_contract.status.public import PublicStatus
    from trainium_operator.plan.diagnose.loss import Loss
    from trainium_operator.plan.faults.node_signals import NodeProblem
    from trainium_operator.plan.model.observed import JobView, Observed, PlanSettings
    from trainium_operator.plan.model.reasons import Reason
    from trainium_operator.plan.view.facts import Facts
    from trainium_operator.plan.view.workers import Worker

Json = dict[str, Any]


class AdmissionState(StrEnum):
    """State of a job in its queue."""

    UNKNOWN = "Unknown"
    """The queue cannot be read: running pods continue, and no pod starts."""
    WAITING = "Waiting"
    EVICTED = "Evicted"
    """The queue requests its quota back; remains after it was returned, until the next admission."""
    CONTRADICTION = "Contradiction"
    """The job was admitted to nodes that none of its pods can use."""
    ADMITTED = "Admitted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A queue's grant to the job."""

    state: AdmissionState
    reason: Reason | None = None
    """Reason of the condition Admitted while no pod may exist."""
    message: str = ""
    """Why no pod may exist, as a sentence."""
    workers: int = 0
    spares: int = 0

    @property
    def releases_workers(self) -> bool:
        """Whether all pods must leave."""
        return self.state not in (AdmissionState.ADMITTED, AdmissionState.UNKNOWN)


def _unchanged(_facts: Facts, status: TrainingJobStatus) -> PolicyResult:
    return PolicyResult(status=status)


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """Hooks of one optional feature; a hook that is not set changes nothing."""

    name: str
    is_used: Callable[[Observed, PlanSettings], bool]
    """Return whether the job uses the feature, or has an object of it to remove."""
    admit: Callable[[Observed, PlanSettings], Grant | None] = lambda _observed, _settings: None
    """Return the queue's grant; None for a job without a queue."""
    pod_fields: Callable[[JobView], tuple[Json, Json]] = lambda _job: ({}, {})
    """Return fields of each pod's spec, and of the resources of the worker container."""
    node_problems: Callable[[Observed, Worker], Iterable[NodeProblem]] = lambda _observed, _worker: ()
    """Return problems of the devices of a worker."""
    reconcile_before_pods: Callable[[Facts, TrainingJobStatus], PolicyResult] = _unchanged
    resize: Callable[[Facts, TrainingJobStatus, tuple[Loss, ...]], PolicyResult] = lambda _facts, status, _losses: (
        PolicyResult(status=status)
    )
    """Return the status with the size to work towards."""
    find_creation_blocker: Callable[[Facts], tuple[Reason, str] | None] = lambda _facts: None
    """Return why no pod can be created now; None if pods can."""
    describe_capacity: Callable[[Facts], str] = lambda _facts: ""
    """Return a sentence for pods that cannot be scheduled."""
    place_pods: Callable[[Facts, list[Json]], list[Json]] = lambda _facts, manifests: manifests
    group_pods: Callable[[Facts, PublicStatus, list[Json]], tuple[tuple[Action, ...], list[Json]]] = (
        lambda _facts, _status, manifests: ((), manifests)
    )
    """Return the objects to apply before new pods, and the pods as members of their group."""
    creates_as_a_whole: Callable[[Facts, PublicStatus], bool] = lambda _facts, _status: False
    """Return whether a new pod gets no node before all of its group exist."""
    is_misplaced: Callable[[Facts, PublicStatus, Worker], bool] = lambda _facts, _status, _worker: False
    """Return whether a pod waits in a group that can no longer get it onto a node."""
    describe_wait: Callable[[Facts], str] = lambda _facts: ""
    """Return how workers wait for their nodes, as the rest of a sentence."""
    reconcile: Callable[[Facts, TrainingJobStatus], PolicyResult] = _unchanged
    """Called after the pods."""
    finish: Callable[[Facts, TrainingJobStatus], PolicyResult] = _unchanged
    """Called for a job that has ended."""
    finalize: Callable[[Facts, TrainingJobStatus], PolicyResult] = _unchanged
    """Called last in each plan, also in that of a job that has ended."""
