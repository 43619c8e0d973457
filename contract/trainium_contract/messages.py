"""Messages between the agents (one per worker pod) and the coordinator in the operator.

Every message carries `protocol`. A side writes `PROTOCOL` and reads `PROTOCOL` and `PREVIOUS_PROTOCOL`; readers ignore
unknown fields. Protocol 1 heartbeats had no `restarts` and no `waitingFor`; both default to empty, so reading them
needs no translation, and a coordinator answers in the protocol that it was asked in.
Times are Unix seconds of the sender's clock; nothing is decided by comparing clocks of two machines.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field

from trainium_contract.base import MessageModel, Name, Text
from trainium_contract.exit_codes import Cause

PROTOCOL = 2
PREVIOUS_PROTOCOL = 1
REGISTER_PATH = "/v1/register"
HEARTBEAT_PATH = "/v1/heartbeat"
MEMBERSHIP_PATH = "/v1/jobs/{namespace}/{job}/membership"
"""Long poll: query `after`, `podUid`, `timeoutSeconds`; 200 with a Membership, or 204."""


def _known(protocol: int) -> int:
    if protocol not in (PROTOCOL, PREVIOUS_PROTOCOL):
        msg = f"protocol {protocol} is not supported; this side speaks {PREVIOUS_PROTOCOL} and {PROTOCOL}"
        raise ValueError(msg)
    return protocol


Protocol = Annotated[int, AfterValidator(_known)]


class Transition(StrEnum):
    """How members of the older generation leave it."""

    IMMEDIATE = "Immediate"
    """Ranks are killed at once: one of them is lost anyway."""
    GRACEFUL = "Graceful"
    """Ranks agree on a step, snapshot and exit 75: nothing is lost."""


class Member(MessageModel):
    """One worker of a generation."""

    pod_uid: str
    pod_name: Name
    pod_ip: str
    node_name: Name
    node_rank: int = Field(ge=0)
    rendezvous_port: int = Field(ge=1, le=65535)
    """Port on `podIp` that this worker's agent reserved for the store, should it hold node rank 0."""


class Membership(MessageModel):
    """One generation: exactly these workers may rendezvous, write snapshots and commit checkpoints as it."""

    protocol: Protocol = PROTOCOL
    generation: int = Field(ge=1)
    transition: Transition
    cause: Cause
    """Why the generation began; `Resize` also stands for the first one."""
    members: tuple[Member, ...] = Field(min_length=1)
    """Ascending by node rank, which runs from 0 without gaps."""
    processes_per_node: int = Field(ge=1)

    def rank_of(self, pod_uid: str) -> int | None:
        """Node rank of a pod; None when it is not a member."""
        return next((member.node_rank for member in self.members if member.pod_uid == pod_uid), None)


class WorkerPhase(StrEnum):
    """What an agent is doing, from its own view."""

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
    """Gave up in place; `verdict` says why."""


class Progress(MessageModel):
    """Newest progress of the pod's first rank."""

    step: int = Field(ge=0)
    """Optimizer steps completed."""
    loss: float | None = None
    tokens_per_second: float | None = None
    """Over the whole job."""
    resume_step: int | None = None
    """Step that this generation's ranks last resumed from; absent until they have."""
    samples: int = Field(ge=0, default=0)
    memory_step: int = Field(ge=-1, default=-1)
    """Newest snapshot in this node's memory; -1 for none."""
    durable_step: int = Field(ge=-1, default=-1)
    """Newest committed durable checkpoint known to this rank; -1 for none."""
    updated: float = 0.0
    """When the step ended."""
    productive_seconds: float = 0.0
    """Seconds this generation's processes spent in steps that are in the history."""
    notice: Text = ""
    """Newest sentence of the trainer to a person, for instance that a damaged checkpoint was stepped over."""


class ProcessFailure(MessageModel):
    """One exit of a training process that was not asked for."""

    sequence: int = Field(ge=0)
    """Counts this agent's failures from 0, so that a reader takes each once."""
    generation: int
    attempt: int
    """Restart count within the generation when it happened."""
    rank: int
    exit_code: int
    """By the shell's convention (128 + signal)."""
    step: int = Field(ge=-1, default=-1)
    """Last step that the rank had completed; -1 when it had completed none."""
    message: Text = ""
    """Last lines of output or the error."""
    at: float


class RestartRecord(MessageModel):
    """One restart of the ranks in place, by the agent's own clock."""

    sequence: int = Field(ge=0)
    generation: int
    attempt: int
    """The attempt that the restart began."""
    cause: Cause
    failed_at: float
    """When the process ended, or when the peer's failure was heard of."""
    detected_at: float
    resumed_at: float | None = None
    """When the first new step ended: one that was not completed before the failure."""
    step_before: int = -1
    """Last step completed before the failure."""
    resume_step: int | None = None
    """Step that the ranks resumed from."""


class RegisterRequest(MessageModel):
    """An agent introduces itself; repeated after each lost connection (idempotent)."""

    protocol: Protocol = PROTOCOL
    namespace: Name
    job: Name
    pod_name: Name
    pod_uid: str
    pod_ip: str
    node_name: Name
    rendezvous_port: int = Field(ge=1, le=65535)
    agent_version: str = Field(max_length=64)


class RegisterResponse(MessageModel):
    """The coordinator's welcome."""

    protocol: Protocol = PROTOCOL
    heartbeat_seconds: float = 1.0
    membership: Membership | None = None
    """The current generation, whether or not the pod is in it."""


class HeartbeatRequest(MessageModel):
    """One per pod and heartbeat interval."""

    protocol: Protocol = PROTOCOL
    namespace: Name
    job: Name
    pod_name: Name
    pod_uid: str
    generation: int = Field(ge=0)
    """The generation that the agent belongs to; 0 before the first."""
    attempt: int = Field(ge=0, default=0)
    """Restarts in place within that generation."""
    phase: WorkerPhase
    progress: Progress | None = None
    failures: tuple[ProcessFailure, ...] = Field(max_length=8, default=())
    """The newest ones; `sequence` tells which are new."""
    verdict: ProcessFailure | None = None
    """The failure that made the agent give up in place."""
    restarts: tuple[RestartRecord, ...] = Field(max_length=8, default=())
    waiting_for: tuple[int, ...] = Field(max_length=64, default=())
    """Node ranks that have not joined the rendezvous yet (the first 64)."""
    ready: bool = False
    """Standby processes are warm."""


class HeartbeatResponse(MessageModel):
    """What an agent should know; membership itself comes by the long poll."""

    protocol: Protocol = PROTOCOL
    generation: int = Field(ge=0)
    """The current generation."""


class ErrorResponse(MessageModel):
    """Body of every answer that is not a success."""

    error: str
    """One sentence."""
    generation: int | None = None
    """The current generation, with 409."""
