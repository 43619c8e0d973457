"""Define the input of a plan (`Observed`) and the operator's configuration (`PlanSettings`): plain frozen data.

Rules for callers that build it:
- It is built from stores that are in sync: a node that is not in `nodes` does not exist, a pod that is not in `pods`
  does not exist. The operator's own writes are in the stores at once.
- All times are Unix seconds of the operator's clock (`now`'s clock), also `AgentView.last_seen`; no other machine's
  clock is compared with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from trainium_contract.wire.log_line import LogFormat
from trainium_contract.wire.worker_env import ROLE_EVALUATION
from trainium_operator.plan.model.names import ANNOTATION_CONTENT_HASH, JobId
from trainium_operator.plan.model.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainium_contract.job import TrainingJobSpec, TrainingJobStatus
    from trainium_contract.wire.messages import HeartbeatRequest, Membership, RegisterRequest, RoleEndpoints
    from trainium_operator.plan.model.devices import DevicesView
    from trainium_operator.plan.model.quota import QuotaView


MAX_BAD_SHARE = 0.2
"""Share of a fleet, or of a job's workers, that may be bad at once."""


def compute_max_bad_nodes(size: int) -> int:
    """Return how many of `size` may be bad or in quarantine at once; at least one."""
    return max(1, int(size * MAX_BAD_SHARE))


class ApiState(StrEnum):
    """State of an optional API."""

    OFF = "Off"
    """The operator is not configured to use it, so it has no rights."""
    ABSENT = "Absent"
    """The cluster does not serve a known version."""
    READING = "Reading"
    """Its objects have not been read yet."""
    READY = "Ready"


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
    finalizers: tuple[str, ...] = ()
    """Finalizers that a job waits for while it is being deleted."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the job that its objects get too (`names.is_inherited_label`)."""
    unknown: tuple[str, ...] = ()
    """Places in the spec from a newer version that this one left out; running pods are not changed to match."""

    @property
    def id(self) -> JobId:
        """Key of its objects and agents."""
        return JobId(self.namespace, self.name, self.uid)


class PodPhase(StrEnum):
    """`status.phase` of a pod."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"


STARTING_REASONS = frozenset({"ContainerCreating", "PodInitializing"})
"""Reasons of a waiting container without a problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """One worker pod of the job (selected by `names.build_selector_labels`), also while it is being deleted."""

    name: str
    uid: str
    ordinal: int
    """From its name (`names.parse_ordinal`)."""
    phase: PodPhase
    ip: str = ""
    node: str = ""
    """Empty until it is scheduled."""
    ready: bool = False
    reason: str = ""
    """The most specific reason: the pod's own (Evicted, NodeLost, ...), else the worker container's terminated or
    waiting reason (OOMKilled, Error, ImagePullBackOff, ...)."""
    message: str = ""
    """The message of that reason; for a terminated container its termination message."""
    exit_code: int | None = None
    """Exit code of the worker container, once it has terminated."""
    deleting: bool = False
    deletion_deadline: float | None = None
    """When its grace period ends or ended, once it is being deleted (Unix seconds)."""
    finalizers: tuple[str, ...] = ()
    disrupted: bool = False
    """The pod carries the condition DisruptionTarget: evicted, preempted or drained."""
    disruption: str = ""
    """Reason of that condition."""
    created: float = 0.0
    scheduled: bool = False
    scheduler: str = ""
    """`spec.schedulerName`."""
    unschedulable_message: str = ""
    """Message of the condition PodScheduled=False, reason Unschedulable."""
    finished: float | None = None
    """When the worker container terminated."""
    template_hash: str = ""
    """Value of the annotation `worker_env.ANNOTATION_TEMPLATE_HASH`."""
    avoided_nodes: frozenset[str] = frozenset()
    """Host names of the nodes that it must not be placed on (`worker_env.ANNOTATION_AVOIDED_NODES`)."""
    image: str = ""
    """Value of the annotation `worker_env.ANNOTATION_IMAGE`: the requested image, even if admission changed it."""
    init_container: str = ""
    """Init container that runs now, or that failed the pod."""
    init_since: float | None = None
    """When it started, while it runs."""
    init_exit_code: int | None = None
    """Exit code of the init container that failed the pod."""
    gang: str = ""
    """Value of the annotation `names.ANNOTATION_GROUP`: the group that it was created for."""
    pod_set: str = ""
    """Pod set of Kueue that it was created for; empty without a queue."""
    extra: bool = False
    """Whether it has the label `worker_env.LABEL_EXTRA`: it is beyond the requested ones, on an idle node."""
    unit: str = ""
    """Value of the label `worker_env.LABEL_UNIT`; empty where each node is a unit."""
    claim_template: str = ""
    """ResourceClaimTemplate of its devices; empty without a claim."""
    evaluates: str = ""
    """Value of the annotation `names.ANNOTATION_EVALUATES`; empty for a worker."""
    role: str = ""
    """Its role of `spec.roles`, or `worker_env.ROLE_EVALUATION`; empty for a worker."""
    device_health: tuple[str, str] | None = None
    """Health of the worst claimed device, and its name with its message."""
    last_report: HeartbeatRequest | None = None
    """The last heartbeat of an agent that ended by itself, from the termination message."""
    grace_seconds: int | None = None
    """Its terminationGracePeriodSeconds as stored, which admission may have changed."""
    limits: tuple[tuple[str, str], ...] = ()
    """Limits of the worker container for CPU, memory and ephemeral storage, as stored."""

    @property
    def location(self) -> str:
        """Return its name, with its node once it has one."""
        return f"{self.name} on node {self.node}" if self.node else self.name


@dataclass(frozen=True, slots=True)
class StrayPod:
    """A running pod that has the name of a worker but is none: it was orphaned, or its labels were removed."""

    job: str
    """Name of the job that it was created for."""
    name: str
    uid: str
    node: str
    missing_label: str
    """The label by which it would be found; empty if no job controls it."""


class NodeReadiness(StrEnum):
    """Status of a node's condition Ready; a missing condition is Unknown."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


@dataclass(frozen=True, slots=True)
class NodeCondition:
    """One condition of a node besides Ready, as in the API server (polarity differs by type)."""

    type: str
    status: NodeReadiness
    reason: str = ""
    message: str = ""
    since: float | None = None
    """Last transition; None when it is missing or malformed."""


@dataclass(frozen=True, slots=True)
class Taint:
    """One taint of a node."""

    key: str
    value: str = ""
    effect: str = "NoSchedule"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One existing node; the mapping must have every node that a pod of the job is bound to."""

    name: str
    ready: NodeReadiness = NodeReadiness.TRUE
    schedulable: bool = True
    """Whether it is not cordoned."""
    taints: tuple[Taint, ...] = ()
    unready_since: float | None = None
    """Last transition of Ready if it is not True."""
    conditions: tuple[NodeCondition, ...] = ()
    """All conditions except Ready."""
    deleting: bool = False
    """Whether it has a deletion timestamp."""
    provider_id: str = ""
    """`spec.providerID`: identifies the machine, whatever the node's name; empty if unknown."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that plans read (`names.is_label_read`): instance type, topology, HyperPod health."""
    capacity: Mapping[str, int] = field(default_factory=dict)
    """Allocatable extended resources (`aws.amazon.com/neuron`, `vpc.amazonaws.com/efa`), without malformed ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentView:
    """One pod's agent, as the coordinator knows it."""

    registration: RegisterRequest | None
    """None if this process knows the agent only by the last report in its pod's status."""
    last_seen: float
    """When its last message of any kind was received."""
    first_seen: float
    heartbeat: HeartbeatRequest | None = None
    """The newest one."""
    progressed_at: float | None = None
    """When a heartbeat last reported a higher step than the previous one; None before that."""
    step_seconds: float | None = None
    """Seconds per step from the last two such heartbeats of an attempt: (time - previous) / (step - previous)."""
    joining_since: float | None = None
    """When it was first seen to wait for others in its present generation and attempt; None while it does not wait."""
    refused_at: float | None = None
    """When its port, which had accepted before, refused a connection while it was silent; None since it was seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """Nodes as known across jobs (`plan/fleet` decides, one job's plan reads)."""

    quarantined: frozenset[str] = frozenset()
    """Names of nodes that take no new worker."""
    frozen: str = ""
    """Why no node may be acted on now: too many are bad at once; empty otherwise."""
    suspected: tuple[tuple[str, frozenset[str]], ...] = ()
    """By namespace: further nodes that only jobs of that namespace reported, so only its workers avoid them."""

    def select_for_namespace(self, namespace: str) -> FleetView:
        """Return the part that applies to a job of this namespace."""
        suspected = next((nodes for name, nodes in self.suspected if name == namespace), frozenset[str]())
        return replace(self, quarantined=self.quarantined | suspected, suspected=())


class GangApi(StrEnum):
    """Gang scheduling that the cluster serves, discovered at start-up."""

    NONE = "None"
    WORKLOAD_REF = "WorkloadRef"
    """scheduling.k8s.io with `pod.spec.workloadRef` (Kubernetes 1.35)."""
    SCHEDULING_GROUP = "SchedulingGroup"
    """scheduling.k8s.io with `pod.spec.schedulingGroup` (Kubernetes 1.36 and later)."""
    COSCHEDULING = "Coscheduling"
    """scheduling.x-k8s.io PodGroup."""


HEARTBEAT_SECONDS = 1.0
"""Interval of the heartbeats of agents."""
SILENCE_REPORTED_SECONDS = 2.0
"""Two heartbeats. The coordinator reports silent members, so a member that was seen within this time is not checked."""

_EVERY_INTERVAL_WORKERS = 256
"""Jobs of up to this many workers write their status every `status_interval_seconds`; their plan takes about 10 ms."""
_MAX_INTERVAL_FACTOR = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIngress:
    """Peers that may open connections to a job's workers, besides each other."""

    operator_namespace: str
    operator_labels: Mapping[str, str]
    """Labels of the operator's own pods."""
    rules: tuple[Mapping[str, Any], ...] = ()
    """Further ingress rules, as in a NetworkPolicy."""


@dataclass(frozen=True, slots=True)
class WriteRefusal:
    """Why an object is not as requested: its write was refused, or another client changes it."""

    sentence: str
    name_in_use: bool
    """Whether another owner's object has its name."""
    retry_at: float
    """When it may be written again (Unix seconds)."""
    requested: str = ""
    """Digest of the request that is stored other than requested; empty if the write was refused."""

    @property
    def reason(self) -> Reason:
        """Reason of the condition that reports it."""
        if self.name_in_use:
            return Reason.NAME_TAKEN
        return Reason.OBJECT_CHANGED if self.requested else Reason.WRITE_FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """The part of the operator's configuration that plans depend on."""

    image: str
    """Worker image of jobs that name none."""
    coordinator: str
    """`host:port` of the coordinator for workers."""
    agent_image: str = "trainium-agent:latest"
    """Image of the agent, which is copied into the pods of programs."""
    status_interval_seconds: float = 15.0
    """Shortest time between two status writes that only report progress."""
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    worker_user: int | None = 1000
    """uid, gid and fsGroup of worker processes; None if the platform assigns them."""
    worker_template: Mapping[str, Any] = field(default_factory=dict)
    """Pod template for the workers of every job, which the job's own overrides; never modified."""
    gang_apis: Mapping[GangApi, str] = field(default_factory=dict)
    """Gang APIs that the cluster serves, each with its `apiVersion`."""
    cluster: str = ""
    """uid of the namespace kube-system; empty while it is not known, or not readable."""
    topology_layers: frozenset[str] = frozenset()
    """Labels of network layers that nodes of the cluster carry."""
    kueue: ApiState = ApiState.OFF
    """Whether the operator works with Kueue."""
    extra_priority_class: str = ""
    """PriorityClass of workers on idle nodes, below that of any other pod; without one idle nodes are not used."""
    dra: ApiState = ApiState.OFF
    """Whether jobs may claim their devices."""
    worker_ingress: WorkerIngress | None = None
    """Rules of the NetworkPolicy of each job; None: no policy is created."""
    pod_fields: tuple[Callable[[JobView], tuple[dict[str, Any], dict[str, Any]]], ...] = ()
    """Functions of optional features: fields of each pod's spec, and of the resources of the worker container."""
    worker_log_format: LogFormat = LogFormat.TEXT
    """Log format of agents and training processes."""

    def compute_status_interval(self, workers: int) -> float:
        """Return the interval for this number of workers, because a large job takes longer to plan and to step."""
        return self.status_interval_seconds * min(_MAX_INTERVAL_FACTOR, max(1.0, workers / _EVERY_INTERVAL_WORKERS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """All inputs of one plan, besides `PlanSettings`."""

    job: JobView
    pods: tuple[PodView, ...]
    nodes: Mapping[str, NodeView]
    agents: Mapping[str, AgentView]
    """By pod uid: of every pod in `pods`, and of each member whose pod is gone, as far as this process has seen
    them."""
    membership: Membership | None
    """Read from the ConfigMap `names.format_membership_name`; None if there is none."""
    published: int
    """Generation that the coordinator serves for this job now; 0 for none, as after a restart."""
    children: Mapping[str, str]
    """`Kind/name` -> digest of the request that led to it, of each ConfigMap, budget, NetworkPolicy and Service."""
    ca_bundle: str
    """PEM of the certificate authorities that agents must trust."""
    coordinator_since: float
    """When this operator process started to answer agents as the leader."""
    now: float
    create_after: float = 0.0
    """Nothing may be created before this time, because the API server refused the last creation (Unix seconds)."""
    creation_refusal: str = ""
    """Why the API server refused the last creation; empty after a success."""
    name_conflicts: Mapping[str, str] = field(default_factory=dict)
    """Other owners' objects with a name that the job needs: `Kind/name` -> a sentence."""
    policies_listed: bool = False
    """Whether the NetworkPolicies were read, or may not be read: then one that is not in `children` is missing."""
    refusals: Mapping[str, WriteRefusal] = field(default_factory=dict)
    """`Kind/name` -> why an object is not as requested: optional ones, and those that others change."""
    other_pods: tuple[PodView, ...] | None = None
    """Pods that are no workers, of roles and of an evaluation, by role and ordinal; None while it is not known which
    exist."""
    endpoints: RoleEndpoints | None = None
    """The addresses of the roles' pods that the coordinator serves for this job now; None for none, as after a
    restart."""
    strays: tuple[StrayPod, ...] = ()
    """Pods with names of this job's workers that are none."""
    fleet: FleetView = FleetView()
    quota: QuotaView | None = None
    """The job's quota in Kueue; None if it cannot be read."""
    nodes_wanted_by_gangs: int = 0
    """Nodes of this job's kind that whole gangs of other jobs wait for; no scheduler preempts an extra for a gang."""
    devices: DevicesView | None = None
    """Claimed devices; None for a job without any, and if they cannot be read."""
    status_written: float = 0.0
    """When this process last wrote the job's status; 0 when it has not."""

    @property
    def evaluation_pod(self) -> PodView | None:
        """The pod that measures a milestone's model; its ordinal has no meaning."""
        return next((pod for pod in self.other_pods or () if pod.role == ROLE_EVALUATION), None)

    @property
    def role_pods(self) -> tuple[PodView, ...]:
        """Pods of the roles, by role and ordinal."""
        return tuple(pod for pod in self.other_pods or () if pod.role != ROLE_EVALUATION)

    def find_next_write(self, manifest: Mapping[str, Any]) -> float | None:
        """Return when a child must be written (Unix seconds, `now` for at once); None if it is as requested."""
        place = f"{manifest['kind']}/{manifest['metadata']['name']}"
        digest, refusal = manifest["metadata"]["annotations"][ANNOTATION_CONTENT_HASH], self.refusals.get(place)
        is_changed = refusal is not None and refusal.requested == digest
        if self.children.get(place) == digest and not is_changed:
            return None
        if refusal is None or (refusal.requested and not is_changed):
            return self.now
        return max(self.now, refusal.retry_at)
