"""What one plan works with: the observation sorted into workers and members (`Facts`), and the answer so far (`Draft`).

Invariant: `Facts` never changes during a plan; policies read it and write to the one `Draft`, which does not outlive
the call of `plan`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainium_operator.plan.conditions import with_condition
from trainium_operator.plan.model import EventIntent, EventKind, EventType
from trainium_operator.plan.sentences import sentence
from trainium_operator.plan.troubles import is_unfit, troubles_of
from trainium_operator.plan.workers import Worker, workers_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainium_contract.job import ConditionType, TrainingJobStatus
    from trainium_contract.messages import HeartbeatRequest, Member, Membership
    from trainium_operator.plan.model import Action, JobView, Observed, PlanSettings
    from trainium_operator.plan.node_signals import NodeProblem
    from trainium_operator.plan.reasons import Reason
    from trainium_operator.plan.size import SizeDecision


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The observation, sorted."""

    observed: Observed
    settings: PlanSettings
    size: SizeDecision
    workers: Mapping[str, Worker]
    """By pod uid, ascending by ordinal."""
    current: Membership | None
    """The generation in force; None before the first and while the job is suspended."""
    members: tuple[tuple[Member, Worker | None], ...]
    """The members of the generation in force, by rank, each with its worker unless its pod is gone."""
    outsiders: tuple[Worker, ...]
    """Workers that are not in the generation in force, by ordinal."""
    beats: tuple[tuple[Member, HeartbeatRequest], ...]
    """The newest heartbeats of the members that are in the generation in force by their own account."""
    troubles: Mapping[str, NodeProblem]
    """The worst problem of the node of each worker, by pod uid; see `troubles`."""
    counts_from: tuple[float, ...] = ()
    """When problems of nodes that are too young to count will count (Unix seconds)."""

    @property
    def job(self) -> JobView:
        """The job."""
        return self.observed.job

    @property
    def now(self) -> float:
        """Unix seconds."""
        return self.observed.now

    @property
    def status_interval(self) -> float:
        """Shortest time in seconds between two status writes that only bring progress."""
        return self.settings.status_interval(self.job.status.desired)

    @property
    def member_uids(self) -> frozenset[str]:
        """Pod uids of the generation in force."""
        return frozenset(member.pod_uid for member, _ in self.members)

    @property
    def candidates(self) -> tuple[Worker, ...]:
        """Outsiders on good nodes that can join at once, by ordinal."""
        return tuple(worker for worker in self.outsiders if worker.warm and not is_unfit(self, worker))


def sort_facts(observed: Observed, settings: PlanSettings, size: SizeDecision) -> Facts:
    """Sort an observation. A membership of size 0 in the status means that the recorded one was given up."""
    current = observed.membership if observed.job.status.membership.size > 0 else None
    workers = workers_of(observed, settings)
    listed = current.members if current is not None else ()
    uids = {member.pod_uid for member in listed}
    troubles = troubles_of(observed, workers)
    return Facts(
        observed=observed,
        settings=settings,
        size=size,
        workers=workers,
        current=current,
        members=tuple((member, workers.get(member.pod_uid)) for member in listed),
        outsiders=tuple(worker for uid, worker in workers.items() if uid not in uids),
        beats=() if current is None else _beats(observed, current),
        troubles=troubles.by_pod,
        counts_from=troubles.counts_from,
    )


def _beats(observed: Observed, current: Membership) -> tuple[tuple[Member, HeartbeatRequest], ...]:
    found = []
    for member in current.members:
        agent = observed.agents.get(member.pod_uid)
        if agent is not None and agent.heartbeat is not None and agent.heartbeat.generation == current.generation:
            found.append((member, agent.heartbeat))
    return tuple(found)


@dataclass(slots=True)
class Draft:
    """The plan as it grows."""

    status: TrainingJobStatus
    now: float
    actions: list[Action] = field(default_factory=list)
    events: list[EventIntent] = field(default_factory=list)
    deadlines: list[float] = field(default_factory=list)
    """Unix seconds at which the job must be looked at again."""

    def update(self, **fields: Any) -> None:
        """Replace fields of the status."""
        self.status = self.status.model_copy(update=fields)

    def condition(self, kind: ConditionType, value: bool | None, reason: Reason, message: str) -> None:
        """Set one condition."""
        self.status = with_condition(self.status, kind, value=value, reason=reason, message=message, now=self.now)

    def note(self, reason: Reason, note: str, *, warning: bool = False, pod: str = "", node: str = "") -> None:
        """Ask for an event about the job and, if given, a pod or else a node."""
        self.events.append(
            EventIntent(
                type=EventType.WARNING if warning else EventType.NORMAL,
                reason=reason.value,
                note=sentence(note),
                related_kind=EventKind.POD if pod else EventKind.NODE if node else None,
                related_name=pod or node,
            )
        )
