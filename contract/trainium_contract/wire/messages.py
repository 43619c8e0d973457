"""Define the messages between the agents (one per worker pod) and the coordinator in the operator.

They are sent over the agent's stream (`wire.stream`). Every message carries `protocol`, and a reader refuses any other
than `PROTOCOL`. Readers ignore unknown fields, and a field that is added within a protocol has a default. Times are
Unix seconds of the sender's clock; no decision compares clocks of two machines.

Everything is bounded: lists, texts and numbers, so that no agent can fill the coordinator's memory or cause a status
that the API server refuses. A loss that is not finite is omitted.
"""

from __future__ import annotations

from enum import StrEnum
from ipaddress import ip_address
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from trainium_contract.base import MessageModel, Name, Text
from trainium_contract.faults.causes import Cause
from trainium_contract.sizes import MAX_COMPILED, MAX_ROLES
from trainium_contract.spec.health import PreflightCheck
from trainium_contract.spec.precompile import CompiledSize
from trainium_contract.status.results import (
    MAX_ARTIFACTS,
    MAX_FIGURES,
    Alert,
    ArtifactReport,
    EvaluationFigure,
    Figure,
    RunStage,
    StageName,
    StepFigures,
)

PROTOCOL = 2


class WireMessage(MessageModel):
    """Base of messages, without documentation: each start of an agent builds them, and no page shows them."""

    model_config = ConfigDict(defer_build=True, use_attribute_docstrings=False)


def _check_protocol(protocol: int) -> int:
    if protocol != PROTOCOL:
        raise ValueError(f"protocol {protocol} is not supported; this version supports protocol {PROTOCOL}")
    return protocol


def _normalize_address(text: str) -> str:
    return str(ip_address(text))


def _replace_unknown_cause(value: Any) -> Any:
    """Map a cause of a newer operator to Resize: an agent only follows, so the cause does not matter to it."""
    # Only a string can be in the set; a list would raise an error that no reader expects.
    return value if not isinstance(value, str) or value in set(Cause) else Cause.RESIZE


Protocol = Annotated[int, AfterValidator(_check_protocol)]
Uid = Annotated[str, Field(min_length=1, max_length=128)]
Address = Annotated[str, Field(max_length=45), AfterValidator(_normalize_address)]
Seconds = Annotated[float, Field(ge=-1e11, le=1e11, allow_inf_nan=False)]
"""Unix seconds, or a duration."""
Endpoint = Annotated[str, Field(max_length=64)]
_MAX_SAFE_INTEGER = 2**53
_MAX_INT32 = 2**31 - 1
MAX_GENERATION = _MAX_INT32 - 1_000_000
"""No job reaches it; a larger number in a record or a status is refused, so that numbers remain."""
MAX_GENERATION_LEAD = 1_000
"""Largest lead of a reported generation that counts, so that a wrong report cannot use up all numbers."""
Count = Annotated[int, Field(ge=-1, le=_MAX_SAFE_INTEGER)]
"""A step or a number of items; -1 for none."""
Ordinal = Annotated[int, Field(ge=-1, le=_MAX_INT32)]
"""A generation, rank or similar; -1 for none."""
Generation = Annotated[int, Field(ge=1, le=_MAX_INT32)]
MAX_IMPORTED_MODULES = 2048
MAX_MODULE_NAME_LENGTH = 128
ModuleName = Annotated[
    str, Field(max_length=MAX_MODULE_NAME_LENGTH, pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$")
]
KnownCause = Annotated[Cause, BeforeValidator(_replace_unknown_cause)]
"""Why a generation began; `Resize` also stands for the first one."""


class Transition(StrEnum):
    """Way in which members leave the previous generation."""

    IMMEDIATE = "Immediate"
    """Ranks are killed at once, because one of them is lost."""
    GRACEFUL = "Graceful"
    """Ranks agree on a step, snapshot and exit 75: nothing is lost."""


class Member(WireMessage):
    """One worker of a generation."""

    pod_uid: Uid
    pod_name: Name
    pod_ip: Address
    node_name: Name
    node_rank: int = Field(ge=0, le=_MAX_INT32)
    rendezvous_port: int = Field(ge=1, le=65535)
    """Port on `podIp` that this worker's agent reserves for the store of node rank 0."""
    grace_seconds: Seconds | None = None
    """Time for its ranks to save, where the stored pod leaves them less than the environment of its agent gives."""


class Membership(WireMessage):
    """One generation: exactly these workers may rendezvous, write snapshots and commit checkpoints as it."""

    protocol: Protocol = PROTOCOL
    generation: Generation
    transition: Transition
    cause: KnownCause
    members: tuple[Member, ...] = Field(min_length=1)
    """Ascending by node rank, which runs from 0 without gaps."""
    processes_per_node: int = Field(ge=1)
    accumulation: int = Field(ge=0, le=_MAX_INT32, default=0)
    """Micro-batches of a step on each data-parallel rank, for a program with a declared batch; 0 for any other job."""
    requested_nodes: int = Field(ge=0, le=_MAX_INT32, default=0)
    """`workers.replicas`, by which a program knows its batch where none is declared; 0 if unknown."""

    def find_grace_seconds(self, pod_uid: str) -> float | None:
        """Return the grace of a pod's ranks where it is shorter than in the environment of its agent."""
        return next((member.grace_seconds for member in self.members if member.pod_uid == pod_uid), None)

    def find_node_rank(self, pod_uid: str) -> int | None:
        """Return the node rank of a pod; None when it is not a member."""
        return next((member.node_rank for member in self.members if member.pod_uid == pod_uid), None)


class RoleEndpoints(WireMessage):
    """The addresses of the ready pods of the job's roles, for its programs."""

    protocol: Protocol = PROTOCOL
    addresses: dict[Annotated[str, Field(max_length=63)], tuple[Endpoint, ...]] = Field(max_length=MAX_ROLES)
    """By role: `address:port` of each ready pod, oldest first."""
    is_waiting: bool = False
    """Whether fewer pods of a role are ready than training waits for, so that a stall is no hang."""


class ImportedModules(WireMessage):
    """Modules that the ranks of the job import after their start, which the standby of a new pod imports ahead.

    The first member sends those that its ranks have recorded; pods that are no members receive them.
    """

    protocol: Protocol = PROTOCOL
    modules: tuple[ModuleName, ...] = Field(max_length=MAX_IMPORTED_MODULES)
    """In the order of their import."""


class WorkerPhase(StrEnum):
    """Phase of an agent."""

    PREFLIGHT = "Preflight"
    STANDBY = "Standby"
    """Registered, warm, not a member."""
    JOINING = "Joining"
    """Waiting for the other members of the generation."""
    LOADING = "Loading"
    """Processes are starting, building the model or loading state."""
    TRAINING = "Training"
    YIELDED = "Yielded"
    """All ranks left with code 75; waiting for a newer generation."""
    FINISHED = "Finished"
    """All local ranks ended with code 0."""
    FAILED = "Failed"
    """Gave up in place; `verdict` has the reason."""


class AlertKind(StrEnum):
    """Alert of a trainer's monitors; the values are event reasons."""

    LOSS_SPIKE = "LossSpike"
    """The gradient norm has been above all earlier ones for long, and the loss does not fall."""
    LOSS_ALARM = "LossAlarm"
    """The loss is above its lowest level by more than noise explains."""
    STEP_SKIPPED = "StepSkipped"
    """Loss or gradient of a step was not finite, and the update was skipped."""


class HangDetection(StrEnum):
    """Sign by which the agent of a program detects a hang."""

    STEPS = "Steps"
    """The program reports steps, and no step ends for too long."""
    OUTPUT = "Output"
    """It reports none: no output, and neither processor time nor device use."""
    OFF = "Off"


class Progress(StepFigures, WireMessage):
    """Newest progress of the pod's first rank; for a program, of the rank with the highest step."""

    resume_step: Count | None = None
    """Step that this generation's ranks last resumed from; absent until they have."""
    samples: int = Field(ge=0, le=_MAX_SAFE_INTEGER, default=0)
    memory_step: int = Field(ge=-1, le=_MAX_SAFE_INTEGER, default=-1)
    """Newest snapshot in this node's memory; -1 for none."""
    durable_step: int = Field(ge=-1, le=_MAX_SAFE_INTEGER, default=-1)
    """Newest committed durable checkpoint known to this rank; -1 for none."""
    updated: Seconds = 0.0
    """When the step ended."""
    productive_seconds: Seconds = 0.0
    """Seconds this generation's processes spent in steps that are in the history."""
    started: Seconds = 0.0
    """When the processes of the present attempt had started; 0 before."""
    loaded: Seconds = 0.0
    """When they had loaded their state and started to train; 0 before."""
    notice: Text = ""
    """Newest sentence of the trainer for people, for instance that a damaged checkpoint was skipped."""
    alerts: tuple[Alert, ...] = Field(max_length=8, default=())
    """The newest one of each kind."""
    stage: StageName = RunStage.TRAIN.value
    """The RunStage that the ranks are in."""
    stage_progress: Figure = None
    """Share of the stage that is over, 0 to 1; absent in Train."""
    stage_since: Seconds = 0.0
    """When the ranks of the present attempt entered the stage; 0 in Train."""
    artifacts: tuple[ArtifactReport, ...] = Field(max_length=MAX_ARTIFACTS, default=())
    """The newest complete ones."""
    evaluation: tuple[EvaluationFigure, ...] = Field(max_length=MAX_FIGURES, default=())
    """The figures of the newest evaluation."""
    hang_detection: Annotated[str, Field(max_length=16)] = ""
    """The HangDetection in force, for a program; empty for the trainer, which always reports steps."""
    problem: Text = ""
    """Why a program's progress or checkpoints cannot be read, and what to change; empty if they can."""

    @property
    def training(self) -> bool:
        """Return whether the ranks make steps, or made the last one and have started no stage after it."""
        return self.stage == RunStage.TRAIN


class ProcessFailure(WireMessage):
    """One unrequested exit of a training process."""

    sequence: int = Field(ge=0, le=_MAX_SAFE_INTEGER)
    """Counts this agent's failures from 0, so that a reader processes each once."""
    generation: Ordinal
    attempt: Ordinal
    """Restart count within the generation when it happened."""
    rank: Ordinal
    exit_code: Ordinal
    """By the shell's convention (128 + signal)."""
    step: int = Field(ge=-1, le=_MAX_SAFE_INTEGER, default=-1)
    """Last step that the rank had completed; -1 for none."""
    message: Text = ""
    """Last lines of output or the error."""
    runtime_status: Ordinal | None = None
    """Status of the Neuron runtime (nrt_status.h) in the last output; absent if there is none."""
    output_line: Text = ""
    """Name of the output line (`faults.signs.OUTPUT_LINES`) with the reason of the end; empty for none."""
    newer_generation: Ordinal = 0
    """Generation of the run that owns its checkpoints already, which is why the process ended; 0 for none."""
    at: Seconds


class KernelEvent(WireMessage):
    """One kernel line that reports a device or host fault."""

    sequence: int = Field(ge=0, le=_MAX_SAFE_INTEGER)
    """Counts this agent's kernel events from 0, so that a reader processes each once."""
    line: Text
    at: Seconds


class TrainerPhase(StrEnum):
    """Phase of a training process; each has its own hang limit."""

    INIT = "Init"
    COMPILE = "Compile"
    """Also the first step after a start."""
    LOAD = "Load"
    STEP = "Step"
    SAVE = "Save"


class StuckRank(WireMessage):
    """One rank that has made no progress for longer than its phase allows."""

    rank: int = Field(ge=0, le=_MAX_INT32)
    phase: TrainerPhase
    step: int = Field(ge=-1, le=_MAX_SAFE_INTEGER)
    """Last step that it completed."""
    seconds: Seconds
    """Time without progress."""
    waiting: bool | None = None
    """Whether it waits for its peers in a collective, so that it is a victim; absent if unknown."""
    stack: Text = ""
    """Innermost frames, newest first."""


class StepTiming(WireMessage):
    """Step times of this node over the newest steps."""

    steps: int = Field(ge=0, le=_MAX_SAFE_INTEGER)
    """Number of steps that the figures cover."""
    step_seconds: Seconds
    """Median length of a step."""
    own_seconds: Seconds
    """Median of the slowest local rank's own work in a step: without the wait for its peers."""
    cpu_wait: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of the wanted processor time that this rank waited for, because others used the processors."""


class CheckResult(WireMessage):
    """Outcome of one preflight check."""

    check: PreflightCheck
    passed: bool
    seconds: Seconds
    detail: Text = ""
    """Evidence; for a check that did not pass, what is wrong."""


class RestartRecord(WireMessage):
    """One restart of the ranks, in place or in a newer generation, by the agent's own clock."""

    sequence: int = Field(ge=0, le=_MAX_SAFE_INTEGER)
    generation: Ordinal
    attempt: Ordinal
    """The attempt that the restart began; 0 if it began the generation."""
    cause: Cause
    failed_at: Seconds
    """When the process ended, or the peer's failure was reported; for attempt 0 the end of the last step."""
    detected_at: Seconds
    resumed_at: Seconds | None = None
    """When the first step that was not completed before the failure ended."""
    step_before: Count = -1
    """Last step completed before the failure."""
    resume_step: Count | None = None
    """Step that the ranks resumed from."""


class RegisterRequest(WireMessage):
    """An agent's registration; repeated after each lost connection (idempotent)."""

    protocol: Protocol = PROTOCOL
    namespace: Name
    job: Name
    pod_name: Name
    pod_uid: Uid
    pod_ip: Address
    node_name: Name
    rendezvous_port: int = Field(ge=1, le=65535)
    agent_version: str = Field(max_length=64)


class RegisterResponse(WireMessage):
    """The coordinator's answer to a registration."""

    protocol: Protocol = PROTOCOL
    heartbeat_seconds: Seconds = 1.0
    membership: Membership | None = None
    """The current generation, whether or not the pod is in it."""
    time: Seconds
    """Unix seconds of the coordinator's clock."""


class HeartbeatRequest(WireMessage):
    """One per pod and heartbeat interval."""

    protocol: Protocol = PROTOCOL
    namespace: Name
    job: Name
    pod_name: Name
    pod_uid: Uid
    generation: int = Field(ge=0, le=_MAX_INT32)
    """The generation that the agent belongs to; 0 before the first."""
    attempt: int = Field(ge=0, le=_MAX_INT32, default=0)
    """Restarts in place within that generation."""
    phase: WorkerPhase
    progress: Progress | None = None
    failures: tuple[ProcessFailure, ...] = Field(max_length=8, default=())
    """The newest ones; `sequence` identifies new ones."""
    verdict: ProcessFailure | None = None
    """The failure that made the agent give up in place."""
    restarts: tuple[RestartRecord, ...] = Field(max_length=8, default=())
    waiting_for: tuple[Ordinal, ...] = Field(max_length=64, default=())
    """Node ranks that have not joined the rendezvous yet (the first 64)."""
    ready: bool = False
    """Standby processes are warm."""
    kernel: tuple[KernelEvent, ...] = Field(max_length=8, default=())
    """The newest kernel lines that report a fault."""
    stuck: tuple[StuckRank, ...] = Field(max_length=8, default=())
    """Local ranks without progress."""
    timing: StepTiming | None = None
    """Step times; absent until enough steps were made."""
    checks: tuple[CheckResult, ...] = Field(max_length=16, default=())
    """Outcome of the preflight, of the pairwise test too once it ran."""
    compiled: tuple[CompiledSize, ...] = Field(max_length=MAX_COMPILED, default=())
    """Sizes for which this pod has compiled or fetched graphs as an idle spare."""
    killed_generation: Ordinal = 0
    """The newest generation whose ranks this agent killed, because they had not ended in the grace period; 0 for none.
    """


class HeartbeatResponse(WireMessage):
    """The coordinator's answer to a heartbeat; a membership is a separate frame."""

    protocol: Protocol = PROTOCOL
    generation: int = Field(ge=0, le=_MAX_INT32)
    """The current generation."""
    full_heartbeat_seconds: Seconds
    """Time for which KEEPALIVE replaces a heartbeat while only the step changes; see `wire.stream`."""
    time: Seconds
    """Unix seconds of the coordinator's clock."""
    job_failed: bool = False
    """Whether the job has failed, so an agent with a verdict ends its pod, whose log then stays."""


class ErrorResponse(WireMessage):
    """Why a request or a frame was refused."""

    error: str
    """One sentence."""
    generation: Ordinal | None = None
    """The current generation, with 409."""
    status: Ordinal | None = None
    """The HTTP status, for a refusal over the stream."""
