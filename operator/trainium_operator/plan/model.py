"""What the plan sees (`Observed`) and what it asks for (`Plan`): plain frozen data between `plan` and its surroundings.

Who fills and who obeys must hold to these rules:

* `Observed` is built from stores that are in sync: a node that is not in `nodes` does not exist, a pod that is not in
  `pods` does not exist. Own writes are put into the stores at once.
* All times are Unix seconds of the operator's clock (`now`'s clock), also `AgentView.heard`; no other machine's clock
  is compared with it.
* The executor writes `Plan.status` first, when it differs from the observed one and with the observed
  `resource_version` as precondition, then the actions in order, then the events. When a write fails it stops, and the
  job is planned anew. A crash between any two writes is harmless: the next plan goes on from what it finds.
* Pods are created with their deterministic names; "already exists" counts as done. Pods are deleted with their uid as
  precondition; "not found" and "another uid" count as done.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainium_contract.job import TrainingJobSpec, TrainingJobStatus
    from trainium_contract.messages import HeartbeatRequest, Membership, RegisterRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """One TrainingJob."""

    namespace: str
    name: str
    uid: str
    generation: int
    """`metadata.generation`: counts changes of the spec."""
    deleting: bool
    spec: TrainingJobSpec
    status: TrainingJobStatus
    created: float
    resource_version: str = ""


class PodPhase(StrEnum):
    """`status.phase` of a pod."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """One worker pod of the job (selected by `names.selector_labels`), also while it is being deleted."""

    name: str
    uid: str
    ordinal: int
    """From its name (`names.ordinal_of`)."""
    phase: PodPhase
    ip: str = ""
    node: str = ""
    """Empty until it is scheduled."""
    ready: bool = False
    reason: str = ""
    """The most telling one: the pod's own (Evicted, NodeLost, ...), else the worker container's terminated or waiting
    reason (OOMKilled, Error, ImagePullBackOff, ...)."""
    message: str = ""
    """The message that belongs to it; for a terminated container its termination message."""
    exit_code: int | None = None
    """Of the worker container, once it has terminated."""
    deleting: bool = False
    disrupted: bool = False
    """The pod carries the condition DisruptionTarget: evicted, preempted or drained."""
    created: float = 0.0
    scheduled: bool = False
    unschedulable_message: str = ""
    """Message of the condition PodScheduled=False, reason Unschedulable."""
    finished: float | None = None
    """When the worker container terminated."""
    template_hash: str = ""
    """Value of the annotation `worker_env.ANNOTATION_TEMPLATE_HASH`."""


class NodeReadiness(StrEnum):
    """Status of a node's condition Ready; a missing condition is Unknown."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One node that exists; the mapping must hold every node that a pod of the job is bound to."""

    name: str
    ready: NodeReadiness = NodeReadiness.TRUE
    schedulable: bool = True
    """Not cordoned."""
    taints: tuple[str, ...] = ()
    """Keys of its taints."""
    unready_since: float | None = None
    """Last transition of Ready, when it is not True."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentView:
    """What the coordinator knows of one pod's agent."""

    registration: RegisterRequest
    heard: float
    """When its last message of any kind arrived."""
    first_heard: float
    heartbeat: HeartbeatRequest | None = None
    """The newest one."""
    progressed: float | None = None
    """When a heartbeat last brought a higher step than the one before it; None while none has."""
    step_seconds: float | None = None
    """Seconds per step as the last two such heartbeats show it: (time - previous) / (step - previous)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """The operator's own configuration, as far as plans depend on it."""

    image: str
    """Worker image of jobs that name none."""
    coordinator: str
    """`host:port` that workers reach the coordinator at."""
    status_interval_seconds: float = 15.0
    """Shortest time between two status writes that only bring progress."""
    heartbeat_seconds: float = 1.0
    reconnect_seconds: float = 10.0
    """How long agents may take to find a coordinator that has just started; silence counts only after it."""
    avoid_node_seconds: float = 3600.0
    """How long new workers keep away from a node that a failure was put down to."""
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    worker_user: int = 1000
    """uid, gid and fsGroup of worker processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Everything that one plan may depend on, besides `PlanSettings`."""

    job: JobView
    pods: tuple[PodView, ...]
    nodes: Mapping[str, NodeView]
    agents: Mapping[str, AgentView]
    """By pod uid: of every pod in `pods`, and of each member whose pod is gone, as far as this process heard of it."""
    membership: Membership | None
    """Read from the ConfigMap `names.membership_name`, key `names.MEMBERSHIP_KEY`; None when there is none."""
    published: int
    """Generation that the coordinator serves for this job now; 0 for none (for instance after a restart)."""
    children: Mapping[str, str]
    """`Kind/name` -> value of `names.ANNOTATION_CONTENT_HASH`, of each Service and ConfigMap that exists."""
    ca_bundle: str
    """PEM of the certificate authorities that agents must trust."""
    coordinator_since: float
    """When this operator process began to answer agents as the leader."""
    now: float


@dataclass(frozen=True, slots=True)
class ApplyObject:
    """Server-side apply of a complete manifest (Service or ConfigMap)."""

    manifest: dict[str, Any]


@dataclass(frozen=True, slots=True)
class PublishMembership:
    """Write the membership ConfigMap, then let the coordinator serve it.

    The write must be a compare-and-swap (create, or update with resourceVersion): it may only replace a ConfigMap that
    holds generation `replaces` (0: no ConfigMap) or the very same membership; anything else is a conflict, after which
    the job is planned anew. So one generation number never stands for two memberships.
    """

    membership: Membership
    manifest: dict[str, Any]
    """The complete ConfigMap."""
    replaces: int


@dataclass(frozen=True, slots=True)
class CreatePod:
    """Create one worker pod."""

    manifest: dict[str, Any]


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete one worker pod, with its uid as precondition."""

    name: str
    uid: str
    grace_seconds: int | None
    """None: the pod's own; 0: at once, without waiting for its node."""


Action = ApplyObject | PublishMembership | CreatePod | DeletePod


class EventType(StrEnum):
    """Type of a Kubernetes event."""

    NORMAL = "Normal"
    WARNING = "Warning"


class EventKind(StrEnum):
    """What an event is about besides the job."""

    POD = "Pod"
    NODE = "Node"


@dataclass(frozen=True, slots=True)
class EventIntent:
    """One event on the TrainingJob, to be emitted after the status write."""

    type: EventType
    reason: str
    """One of `reasons.Reason`."""
    note: str
    """At most 1,000 characters."""
    related_kind: EventKind | None = None
    related_name: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now."""

    status: TrainingJobStatus
    actions: tuple[Action, ...] = ()
    events: tuple[EventIntent, ...] = ()
    requeue_after: float | None = field(default=None)
    """Seconds after which the job must be planned again even when nothing changes; None: not by time."""
