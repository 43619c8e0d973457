"""The TrainingJob resource: spec and status models, from which the CRD is generated (`definition/crd.py`).

The spec is what a user writes and is strict; the status is what the operator writes and is read leniently, so that an
older operator can read a newer status. Every list and string is bounded: the object must stay far below etcd's limit
and within the CEL cost budget. What a schema cannot state is a CEL rule of `definition`, with a sentence. The parts of
the spec are described in `spec/` and `trainer/`, the larger ones of the status in `status/`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from trainium_contract.base import ContractModel, StatusModel, Text
from trainium_contract.faults.causes import Cause
from trainium_contract.sizes import BatchShape, likely_first
from trainium_contract.spec.elasticity import ElasticitySpec, IdleNodesStatus
from trainium_contract.spec.health import HealthSpec
from trainium_contract.spec.managed_by import MAX_MANAGER
from trainium_contract.spec.precompile import MAX_COMPILED, CompiledStatus, PrecompileSizes, PrecompileSpec
from trainium_contract.spec.recovery import RecoverySpec
from trainium_contract.spec.scheduling import GangStatus, SchedulingSpec
from trainium_contract.spec.storage import JobCheckpointSpec
from trainium_contract.spec.workers import WorkersSpec
from trainium_contract.status.activity import ActivityStatus, DeadlineSeconds
from trainium_contract.status.failed_spec import FailedSpecStatus
from trainium_contract.status.ledger import GoodputStatus, StageSeconds
from trainium_contract.status.refusals import RefusalsStatus
from trainium_contract.status.results import MAX_ARTIFACTS, MAX_FIGURES, ArtifactReport, EvaluationFigure, StageName
from trainium_contract.trainer.checkpoint import CheckpointConfig
from trainium_contract.trainer.config import TrainerSpec, TrainingConfig
from trainium_contract.trainer.parallelism import ParallelismConfig
from trainium_contract.wire.worker_env import CHECKPOINT_MOUNT

MAX_NAME = 50
"""Longest job name: `<name>-w-<ordinal>` must be a host name of at most 63 characters."""


class CleanPodPolicy(StrEnum):
    """Which worker pods are deleted when the job has ended."""

    RUNNING = "Running"
    """Those that still run; the others stay for their logs."""
    ALL = "All"
    NONE = "None"


class TrainingJobSpec(ContractModel):
    """What the user wants."""

    suspend: bool = False
    """Save, release all nodes and wait; false resumes from the newest checkpoint."""
    image: Annotated[str, Field(max_length=1024)] | None = None
    """Trainer image; omitted: the one that the operator was installed with."""
    workers: WorkersSpec = WorkersSpec()
    """How many nodes, of which kind."""
    elasticity: ElasticitySpec = ElasticitySpec()
    """At which sizes the job may train."""
    parallelism: ParallelismConfig = ParallelismConfig()
    """Degrees of model parallelism."""
    trainer: TrainerSpec = TrainerSpec()
    """What to train; immutable while the job runs, except monitor."""
    checkpoint: JobCheckpointSpec = JobCheckpointSpec()
    """Where and how often the training state is saved."""
    precompile: PrecompileSpec = PrecompileSpec()
    """Compiling before the first start."""
    recovery: RecoverySpec = RecoverySpec()
    """How faults are detected and answered."""
    health: HealthSpec = HealthSpec()
    """What is checked before a worker joins, and how bad nodes are kept away from."""
    scheduling: SchedulingSpec = SchedulingSpec()
    """How the workers are brought onto nodes together."""
    clean_pod_policy: CleanPodPolicy = CleanPodPolicy.RUNNING
    """Which worker pods are deleted when the job has ended."""
    active_deadline_seconds: DeadlineSeconds | None = None
    """The job saves and ends as Failed when it has been active this long; a suspension begins the count anew. Omitted:
    no limit."""
    startup_deadline_seconds: DeadlineSeconds | None = None
    """The job ends as Failed when it has made no step this long after it was created or resumed. Omitted: no limit."""
    managed_by: Annotated[str, Field(max_length=MAX_MANAGER)] | None = None
    """Who controls the job; any value but trainium.dev/trainium-operator means that this operator does not touch it."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=31_536_000)] | None = None
    """Delete the TrainingJob this long after it ended; omitted: never."""

    def training_config(self) -> TrainingConfig:
        """The file that the trainer reads; checkpoints are below the mount point of the storage."""
        return TrainingConfig(
            **{name: getattr(self.trainer, name) for name in TrainerSpec.model_fields},
            parallelism=self.parallelism,
            checkpoint=CheckpointConfig(
                path=CHECKPOINT_MOUNT,
                take_over=self.checkpoint.storage.take_over,
                memory=self.checkpoint.memory,
                durable=self.checkpoint.durable,
                milestones=self.checkpoint.milestones,
            ),
        )

    def batch_shape(self) -> BatchShape:
        """The arithmetic that decides this job's legal sizes."""
        return self.training_config().batch_shape(self.workers.accelerator.cores(), self.elasticity.sizes)

    def sizes_to_compile(self) -> tuple[int, ...]:
        """Numbers of nodes that graphs are compiled for ahead, the one that it starts at first, then the likely ones.

        Empty when no size is legal.
        """
        if self.precompile.sizes is PrecompileSizes.ALL:
            return self._sizes_to_want()
        start = self._start(self.batch_shape())
        return (start,) if start else ()

    def sizes_for_spares(self) -> tuple[int, ...]:
        """Numbers of nodes that idle spares compile graphs for, those first that a job at its start may soon need."""
        enabled = self.precompile.enabled and self.precompile.sizes is PrecompileSizes.BACKGROUND
        return self._sizes_to_want()[1 : MAX_COMPILED + 1] if enabled and self.workers.spares else ()

    def _sizes_to_want(self) -> tuple[int, ...]:
        workers, shape = self.workers, self.batch_shape()
        start = self._start(shape)
        if not start:
            return ()
        sizes = shape.useful_sizes(workers.min_replicas or start, max(start, workers.max_replicas or start))
        return (start, *likely_first({*sizes} - {start}, start))

    def _start(self, shape: BatchShape) -> int:
        """The size that the job starts at; 0 for none."""
        return shape.best(self.workers.replicas, self.workers.min_replicas or 1)


class Phase(StrEnum):
    """Derived from the conditions, for display only."""

    PENDING = "Pending"
    STARTING = "Starting"
    RUNNING = "Running"
    RECOVERING = "Recovering"
    RESIZING = "Resizing"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    STOPPING = "Stopping"
    """Saves, and ends as Failed."""
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
    NODES_HEALTHY = "NodesHealthy"
    DISRUPTION_ALLOWED = "DisruptionAllowed"
    NETWORK_POLICY_APPLIED = "NetworkPolicyApplied"
    """Only of a job whose NetworkPolicy could not be written at some time."""
    ADMITTED = "Admitted"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILURE_TARGET = "FailureTarget"
    """It will fail, as soon as its workers have saved and left (as batch/v1 Job has it)."""
    FAILED = "Failed"
    READY = "Ready"
    """For tools: it trains, or has completed."""
    STALLED = "Stalled"
    """For tools: nothing changes until a person acts."""
    FINISHED = "Finished"
    """For tools: completed or failed."""


class ConditionStatus(StrEnum):
    """metav1 condition status."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(StatusModel):
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


class Interruption(StatusModel):
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
    decided_at: float | None = None
    """Unix seconds at which the next generation was decided on; absent for a restart in place."""
    stages: StageSeconds | None = None
    """What the ledger puts to it so far; less than recoveredSeconds where interruptions overlap."""
    rank: int | None = None
    """First rank of the worker that failed, in that generation; absent when none is known, or it had none."""


class MembershipStatus(StatusModel):
    """The current generation, without its ranks (those are in the ConfigMap `<job>-membership`)."""

    generation: int = 0
    """Number of the current generation; it only rises."""
    attempt: int = 0
    """Restarts in place within the generation that have been taken into account."""
    size: int = 0
    """Nodes in it."""
    data_parallel: int = 0
    """Data-parallel degree at this size."""
    passes: int = 0
    """Micro-batches of a step on each data-parallel rank."""
    batch: int = 0
    """Samples of a step over all ranks; the global batch, or near it (trainer.batch.tolerance)."""
    speed: float = 0.0
    """Speed at this size as a share of that at the desired one, by the samples of a pass."""
    reserve: int = 0
    """Warm workers beside the spares that this size leaves out: with them a step would take as many passes."""


class ProgressStatus(StatusModel):
    """How far training is."""

    step: int = 0
    """Newest finished optimizer step."""
    total_steps: int = 0
    """Steps of the whole run; 0 while epochs decide and the trainer has not read its data."""
    loss: float | None = None
    """Loss of that step."""
    tokens_per_second: float | None = None
    """Throughput of the whole job."""
    updated: Annotated[str, Field(max_length=32)] = ""
    """When this was reported, RFC 3339."""


class AlertStatus(StatusModel):
    """What the trainer's monitors have told."""

    kind: Annotated[str, Field(max_length=64)]
    """`LossSpike`, `LossAlarm` or `StepSkipped`."""
    step: int
    """The step that raised it."""
    message: Text = ""
    """What was seen, and what to do."""


def _is_none(step: int) -> bool:
    return step < 0


class CheckpointStatus(StatusModel):
    """Newest steps that a resume could use; in Python -1 for none, in the resource absent."""

    memory_step: Annotated[int, Field(exclude_if=_is_none)] = -1
    """Newest step that all members hold in memory; absent for none."""
    durable_step: Annotated[int, Field(exclude_if=_is_none)] = -1
    """Newest step that is committed to storage; absent for none."""
    durable_time: Annotated[str, Field(max_length=32)] = ""
    """When the operator learned of it."""
    notice: Text = ""
    """Newest warning about checkpoints, for instance that a damaged one was stepped over."""


MAX_COUNTED_CAUSES = 32
"""More than there are causes: a newer operator's are kept."""


class RestartsStatus(StatusModel):
    """Interruptions by faults since the job began, changes of the size left out; never reset."""

    total: int = 0
    """All interruptions: the sum of byCause."""
    by_cause: Annotated[dict[str, int], Field(max_length=MAX_COUNTED_CAUSES)] = {}
    """Interruptions by cause."""


class FailureRecord(StatusModel):
    """One counted failure, for the windowed budgets."""

    at: float
    """Unix seconds."""
    cause: Cause
    """Why it failed."""
    pod: Annotated[str, Field(max_length=253)] = ""
    """Pod that failed; a pod that never became a member is counted once by its name."""
    node: Annotated[str, Field(max_length=253)] = ""
    """Node that new workers keep away from because of it; empty when no node is suspected."""


class StragglerStatus(StatusModel):
    """A member that is slower than the others."""

    pod: Annotated[str, Field(max_length=253)]
    """Its pod."""
    node: Annotated[str, Field(max_length=253)]
    """Its node."""
    since_step: int
    """Step from which on it has been so."""
    slowdown: float
    """Its own work in a step, in units of the median member's, as it was when this was last written."""
    reported: bool = False
    """It has been so for `recovery.stragglers.persistSteps`."""


class TrainingJobStatus(StatusModel):
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
    """Size that the operator is working towards: of the requested nodes as many as save a pass, and idle ones."""
    idle_nodes: IdleNodesStatus = IdleNodesStatus()
    """Nodes beyond those that were asked for."""
    selector: Annotated[str, Field(max_length=512)] = ""
    """Label selector of the worker pods (scale subresource)."""
    membership: MembershipStatus = MembershipStatus()
    """The current generation of workers."""
    progress: ProgressStatus = ProgressStatus()
    """How far training is."""
    stage: StageName = ""
    """What the run does: `Train`, then `Export` and `Evaluate` where they are asked for; empty before it began."""
    stage_progress: float | None = None
    """Share of the stage that is over, 0 to 1; absent in Train, whose steps tell."""
    artifacts: Annotated[tuple[ArtifactReport, ...], Field(max_length=MAX_ARTIFACTS)] = ()
    """What the run left behind for others, the newest last; each is complete."""
    evaluation: Annotated[tuple[EvaluationFigure, ...], Field(max_length=MAX_FIGURES)] = ()
    """The result beside the model that the run began from, measured on examples that were held back."""
    alerts: Annotated[tuple[AlertStatus, ...], Field(max_length=8)] = ()
    """The newest alert of each kind."""
    checkpoint: CheckpointStatus = CheckpointStatus()
    """Newest steps that a resume could use."""
    restarts: RestartsStatus = RestartsStatus()
    """Interruptions since the job began; never reset."""
    compiled: CompiledStatus = CompiledStatus()
    """Sizes whose graphs are there; with `spec.precompile`."""
    goodput: GoodputStatus = GoodputStatus()
    """Where the time went since the workers first began together."""
    activity: ActivityStatus = ActivityStatus()
    """Since when the job has been active, for its deadlines."""
    gang: GangStatus = GangStatus()
    """How the workers are brought onto nodes together."""
    refusals: RefusalsStatus = RefusalsStatus()
    """Worker pods that ended before anybody was in them."""
    history: Annotated[tuple[Interruption, ...], Field(max_length=10)] = ()
    """The last interruptions, oldest first."""
    next_pod_ordinal: int = 0
    """Ordinal of the next pod; raised before the pod is created, so no name is ever used twice."""
    waiting_since: float | None = None
    """Unix seconds since when the membership is smaller than desired or a member is missing."""
    leaving_since: float | None = None
    """Unix seconds since when a member's node is known to be about to leave."""
    outdated_pods: int = 0
    """Workers that were made from an earlier pod template; they run on as they are."""
    avoided_nodes: Annotated[tuple[Annotated[str, Field(max_length=253)], ...], Field(max_length=32)] = ()
    """Nodes that new workers keep away from."""
    failures: Annotated[tuple[FailureRecord, ...], Field(max_length=128)] = ()
    """Counted failures within the largest budget window, oldest first."""
    stragglers: Annotated[tuple[StragglerStatus, ...], Field(max_length=8)] = ()
    """Members that are slower than the others, the slowest first."""
    start_time: Annotated[str, Field(max_length=32)] = ""
    """When the first step was completed, RFC 3339; empty before."""
    completion_time: Annotated[str, Field(max_length=32)] = ""
    """When the job completed or failed, RFC 3339; empty before."""
    verdict: Text = ""
    """Why the job failed and what to do; empty unless it did."""
    failed_spec: FailedSpecStatus | None = None
    """What it failed with, and what was changed since; absent unless it failed."""
