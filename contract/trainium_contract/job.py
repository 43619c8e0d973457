"""The TrainingJob resource: spec and status models, from which the CRD is generated (`crd.py`).

The spec is what a user writes and is strict; the status is what the operator writes and is read leniently, so that an
older operator can read a newer status. Every list and string is bounded: the object must stay far below etcd's limit
and within the CEL cost budget. Rules that a schema cannot state are CEL rules in `crd.py`, with a sentence each.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from trainium_contract.base import ContractModel, MessageModel, Text
from trainium_contract.exit_codes import Cause
from trainium_contract.sizes import INSTANCES, BatchShape, Instance
from trainium_contract.trainer import (
    CheckpointConfig,
    DurableTier,
    MemoryTier,
    ParallelismConfig,
    TrainerSpec,
    TrainingConfig,
)
from trainium_contract.worker_env import CHECKPOINT_MOUNT

MAX_NODES = 10_000
MAX_NAME = 50
"""Longest job name: `<name>-w-<ordinal>` must be a host name of at most 63 characters."""

NodeCount = Annotated[int, Field(ge=1, le=MAX_NODES)]
Quantity = Annotated[str, Field(min_length=1, max_length=32)]


class Device(StrEnum):
    """What a worker computes on."""

    NEURON = "neuron"
    CUDA = "cuda"
    CPU = "cpu"


class AcceleratorSpec(ContractModel):
    """What one node offers: a known EC2 instance type, or a device with an explicit number of cores."""

    instance_type: Annotated[str, Field(max_length=63)] | None = None
    """EC2 instance type, for instance trn1.32xlarge; sets devices, cores, EFA interfaces and the node selector."""
    device: Device = Device.NEURON
    """`cpu` runs anywhere; `cuda` asks for nvidia.com/gpu."""
    cores_per_node: Annotated[int, Field(ge=1, le=256)] | None = None
    """Training processes per node; omitted: the instance type's cores, else 1."""
    resources: Annotated[dict[Annotated[str, Field(max_length=317)], Quantity], Field(max_length=16)] = {}
    """Extended resources per worker in place of the instance type's, for instance {aws.amazon.com/neuron: "16"}."""

    def instance(self) -> Instance | None:
        """The known instance type's figures; None when none is named or it is unknown."""
        return INSTANCES.get(self.instance_type or "")

    def cores(self) -> int:
        """Training processes per node."""
        known = self.instance()
        return self.cores_per_node or (known.cores if known else 1)


class WorkersSpec(ContractModel):
    """How many nodes, of which kind, and what their pods look like."""

    replicas: NodeCount = 1
    """Nodes to train on; the scale subresource. A later size that is not legal is floored to a legal one, and status
    says so."""
    min_replicas: NodeCount | None = None
    """Elastic floor: the job may shrink to it while capacity is missing. Omitted: rigid, it waits instead."""
    max_replicas: NodeCount | None = None
    """Elastic ceiling for `kubectl scale` and autoscalers. Omitted: no bound of its own."""
    spares: Annotated[int, Field(ge=0, le=64)] = 0
    """Warm workers outside the membership, that replace a lost one without waiting for a pod."""
    accelerator: AcceleratorSpec = AcceleratorSpec()
    """What one node offers."""
    template: dict[str, Any] = {}
    """Partial PodTemplateSpec, merged over the operator's own (containers and volumes by name)."""


class HostPathStorage(ContractModel):
    """A folder on every node: one machine, or a shared mount such as FSx at the same path."""

    path: Annotated[str, Field(pattern=r"^/", max_length=1024)]
    """Absolute path. A kubelet creates a missing one for root: make it writable for the workers' user (1000)."""


class ClaimStorage(ContractModel):
    """A PersistentVolumeClaim that all workers can mount read-write."""

    claim_name: Annotated[str, Field(min_length=1, max_length=253)]
    """Name of the claim, in the job's namespace."""


class StorageSpec(ContractModel):
    """Where durable checkpoints live; exactly one kind. Omitted: a folder in the pod, lost with it (for trials)."""

    host_path: HostPathStorage | None = None
    """A folder on every node."""
    persistent_volume_claim: ClaimStorage | None = None
    """A claim, for instance FSx for Lustre."""
    sub_path: Annotated[str, Field(max_length=512, pattern=r"^[^/].*$")] | None = None
    """Folder below the volume's root; omitted: the job's namespace and name."""


class JobCheckpointSpec(ContractModel):
    """Checkpoint storage and tiers."""

    storage: StorageSpec = StorageSpec()
    """Where durable checkpoints live. Omitted: a folder in the pod, lost with it (for trials)."""
    memory: MemoryTier = MemoryTier()
    """Snapshots in the node's memory."""
    durable: DurableTier = DurableTier()
    """Sharded checkpoints on the storage."""


class BudgetSpec(ContractModel):
    """Failures allowed within a sliding window before the job stops with a verdict."""

    max_failures: Annotated[int, Field(ge=0, le=100_000)]
    """More than this many within the window stop the job."""
    window_seconds: Annotated[int, Field(ge=1, le=31_536_000)] = 3600
    """Length of the window."""


class BudgetsSpec(ContractModel):
    """Budgets by who is to blame; infrastructure faults never use the process budget."""

    process: BudgetSpec = BudgetSpec(max_failures=10)
    """Crashes of training processes with no known infrastructure cause."""
    infrastructure: BudgetSpec = BudgetSpec(max_failures=100, window_seconds=86_400)
    """Lost pods and nodes, device faults."""


class RecoverySpec(ContractModel):
    """How faults are detected and answered."""

    heartbeat_timeout_seconds: Annotated[float, Field(ge=1, le=600)] = 4.0
    """A member that is silent this long, while the others cannot go on, is lost."""
    max_in_place_restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    """Restarts of the processes in place without a new step in between, before the pod is replaced."""
    rescale_after_seconds: Annotated[int, Field(ge=0, le=86_400)] = 120
    """How long to wait for a missing worker before shrinking to a legal size, and between two growths."""
    graceful_seconds: Annotated[int, Field(ge=1, le=3600)] = 60
    """How long ranks may take to save and leave on a resize, a suspension or a deletion."""
    budgets: BudgetsSpec = BudgetsSpec()
    """Failures allowed before the job stops with a verdict."""


class TrainingJobSpec(ContractModel):
    """What the user wants."""

    suspend: bool = False
    """Save, release all nodes and wait; false resumes from the newest checkpoint."""
    image: Annotated[str, Field(max_length=1024)] | None = None
    """Trainer image; omitted: the one that the operator was installed with."""
    workers: WorkersSpec = WorkersSpec()
    """How many nodes, of which kind."""
    parallelism: ParallelismConfig = ParallelismConfig()
    """Degrees of model parallelism."""
    trainer: TrainerSpec = TrainerSpec()
    """What to train; immutable while the job runs, except monitor."""
    checkpoint: JobCheckpointSpec = JobCheckpointSpec()
    """Where and how often the training state is saved."""
    recovery: RecoverySpec = RecoverySpec()
    """How faults are detected and answered."""

    def training_config(self) -> TrainingConfig:
        """The file that the trainer reads; checkpoints are below the mount point of the storage."""
        return TrainingConfig(
            **{name: getattr(self.trainer, name) for name in TrainerSpec.model_fields},
            parallelism=self.parallelism,
            checkpoint=CheckpointConfig(
                path=CHECKPOINT_MOUNT, memory=self.checkpoint.memory, durable=self.checkpoint.durable
            ),
        )

    def batch_shape(self) -> BatchShape:
        """The arithmetic that decides this job's legal sizes."""
        return self.training_config().batch_shape(self.workers.accelerator.cores())


class Phase(StrEnum):
    """Derived from the conditions, for display only."""

    PENDING = "Pending"
    STARTING = "Starting"
    RUNNING = "Running"
    RECOVERING = "Recovering"
    RESIZING = "Resizing"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    COMPLETED = "Completed"
    FAILED = "Failed"


class ConditionType(StrEnum):
    """Conditions of a TrainingJob; Complete and Failed are terminal and exclude each other."""

    PODS_READY = "PodsReady"
    RUNNING = "Running"
    RECOVERING = "Recovering"
    RESIZING = "Resizing"
    SIZE_LEGAL = "SizeLegal"
    CHECKPOINT_HEALTHY = "CheckpointHealthy"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"


class ConditionStatus(StrEnum):
    """metav1 condition status."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(MessageModel):
    """A metav1.Condition."""

    type: ConditionType
    """What it is about."""
    status: ConditionStatus
    """True, False or Unknown."""
    reason: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    """Why, as one CamelCase word."""
    message: Annotated[str, Field(max_length=4096)] = ""
    """Why, as a sentence."""
    observed_generation: int = 0
    """metadata.generation that it was set for."""
    last_transition_time: Annotated[str, Field(max_length=32)]
    """RFC 3339, UTC, whole seconds."""


class Rung(StrEnum):
    """Which step of the recovery ladder answered an interruption."""

    IN_PLACE = "InPlace"
    """Processes restarted, pods kept."""
    SPARE = "Spare"
    """A warm spare took the lost worker's rank."""
    REPLACE = "Replace"
    """A new pod took it."""
    SHRINK = "Shrink"
    GROW = "Grow"
    RESIZE = "Resize"
    """The user changed the size."""
    STOP = "Stop"
    """Ended with a verdict."""


class Interruption(MessageModel):
    """One interruption of training and its answer; times in seconds by the operator's or the agent's clock."""

    generation: int
    """Generation that was interrupted."""
    attempt: int = 0
    """Attempt within it that the interruption ended."""
    time: Annotated[str, Field(max_length=32)]
    """When it was detected, RFC 3339."""
    cause: Cause
    """Why training stopped."""
    rung: Rung
    """How it was answered."""
    node: Annotated[str, Field(max_length=253)] = ""
    """Node of the worker that failed; empty when none is known."""
    pod: Annotated[str, Field(max_length=253)] = ""
    """Worker that failed; empty when none is known."""
    message: Text = ""
    """What was seen."""
    detected_seconds: float | None = None
    """From the failure to its detection."""
    recovered_seconds: float | None = None
    """From the failure to the first new step; absent while the recovery is under way."""
    step_before: int = -1
    """Last step completed before it."""
    resume_step: int | None = None
    """Step that training went on from."""
    steps_lost: int | None = None
    """Steps that were computed again."""
    pods_replaced: int = 0
    """Pods that were created for the recovery."""
    failed_at: float | None = None
    """Unix seconds of the failure, as well as it is known."""


class MembershipStatus(MessageModel):
    """The current generation, without its ranks (those are in the ConfigMap `<job>-membership`)."""

    generation: int = 0
    """Number of the current generation; it only rises."""
    attempt: int = 0
    """Restarts in place within the generation that have been taken into account."""
    size: int = 0
    """Nodes in it."""
    data_parallel: int = 0
    """Data-parallel degree at this size."""


class ProgressStatus(MessageModel):
    """How far training is."""

    step: int = 0
    """Newest finished optimizer step."""
    total_steps: int = 0
    """Steps of the whole run."""
    loss: float | None = None
    """Loss of that step."""
    tokens_per_second: float | None = None
    """Throughput of the whole job."""
    updated: Annotated[str, Field(max_length=32)] = ""
    """When this was reported, RFC 3339."""


class CheckpointStatus(MessageModel):
    """Newest steps that a resume could use; -1 for none."""

    memory_step: int = -1
    """Newest step that all members hold in memory."""
    durable_step: int = -1
    """Newest step that is committed to storage."""
    durable_time: Annotated[str, Field(max_length=32)] = ""
    """When the operator learned of it."""
    notice: Text = ""
    """Newest warning about checkpoints, for instance that a damaged one was stepped over."""


class RestartsStatus(MessageModel):
    """Interruptions by faults since the job began, changes of the size left out; never reset."""

    total: int = 0
    """All interruptions."""
    by_cause: Annotated[dict[str, int], Field(max_length=32)] = {}
    """Interruptions by cause."""


class GoodputStatus(MessageModel):
    """Productive time over wall time since the first step (definitions: docs/goodput.md)."""

    ratio: float = 0.0
    """Productive over wall time, 0 to 1."""
    productive_seconds: float = 0.0
    """Time in steps that were kept."""
    wall_seconds: float = 0.0
    """Time since the first step."""
    lost_seconds: Annotated[dict[str, float], Field(max_length=32)] = {}
    """By cause."""
    accounted_until: float | None = None
    """Unix seconds up to which wallSeconds counts; absent while the job has no workers to count."""


class FailureRecord(MessageModel):
    """One counted failure, for the windowed budgets."""

    at: float
    """Unix seconds."""
    cause: Cause
    """Why it failed."""
    pod: Annotated[str, Field(max_length=253)] = ""
    """Pod that failed; a pod that never became a member is counted once by its name."""
    node: Annotated[str, Field(max_length=253)] = ""
    """Node that new workers keep away from because of it; empty when no node is suspected."""


class TrainingJobStatus(MessageModel):
    """What the operator observed and decided; also its memory across restarts."""

    observed_generation: int = 0
    """metadata.generation that this status answers."""
    phase: Phase = Phase.PENDING
    """One word for display; the conditions are the truth."""
    conditions: Annotated[tuple[Condition, ...], Field(max_length=16)] = ()
    """What is true of the job now; Complete and Failed are terminal."""
    replicas: int = 0
    """Worker pods in the membership (scale subresource)."""
    ready_replicas: int = 0
    """Members that are training."""
    spares: int = 0
    """Warm workers outside the membership."""
    desired: int = 0
    """Size that the operator is working towards: the requested one floored to a legal one."""
    selector: Annotated[str, Field(max_length=512)] = ""
    """Label selector of the worker pods (scale subresource)."""
    membership: MembershipStatus = MembershipStatus()
    """The current generation of workers."""
    progress: ProgressStatus = ProgressStatus()
    """How far training is."""
    checkpoint: CheckpointStatus = CheckpointStatus()
    """Newest steps that a resume could use."""
    restarts: RestartsStatus = RestartsStatus()
    """Interruptions since the job began; never reset."""
    goodput: GoodputStatus = GoodputStatus()
    """Productive time over wall time since the first step."""
    history: Annotated[tuple[Interruption, ...], Field(max_length=10)] = ()
    """The last interruptions, oldest first."""
    next_pod_ordinal: int = 0
    """Ordinal of the next pod; raised before the pod is created, so no name is ever used twice."""
    waiting_since: float | None = None
    """Unix seconds since when the membership is smaller than desired or a member is missing."""
    avoided_nodes: Annotated[tuple[Annotated[str, Field(max_length=253)], ...], Field(max_length=32)] = ()
    """Nodes that new workers keep away from."""
    failures: Annotated[tuple[FailureRecord, ...], Field(max_length=128)] = ()
    """Counted failures within the largest budget window, oldest first."""
    start_time: Annotated[str, Field(max_length=32)] = ""
    """When the first step was completed, RFC 3339; empty before."""
    completion_time: Annotated[str, Field(max_length=32)] = ""
    """When the job completed or failed, RFC 3339; empty before."""
    verdict: Text = ""
    """Why the job failed and what to do; empty unless it did."""
