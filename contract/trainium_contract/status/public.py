"""The public part of a job's status, for people and tools; `internal.py` has the operator's own part.

Client, pages and views are typed against this part (`views/status_reader.py`). The operator also reads much of it back.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainium_contract.base import MessageModel, StatusModel, Text
from trainium_contract.sizes import MAX_COMPILED, MAX_ROLES
from trainium_contract.status.conditions import Condition, Phase
from trainium_contract.status.failed_spec import FailedSpecStatus
from trainium_contract.status.interruptions import Interruption, RestartsStatus
from trainium_contract.status.ledger import PublicGoodput
from trainium_contract.status.results import (
    MAX_ARTIFACTS,
    MAX_EVALUATIONS,
    MAX_FIGURES,
    Alert,
    ArtifactReport,
    EvaluationFigure,
    MilestoneEvaluation,
    StageName,
    StepFigures,
)


class PublicIdleNodes(StatusModel):
    """Nodes beyond the requested ones; with `elasticity.idleNodes: Take`."""

    taken: Annotated[int, Field(ge=0)] = 0
    """Desired nodes beyond the requested ones."""
    wanted: Annotated[int, Field(ge=0)] = 0
    """Workers of the lowest priority that exist, or are requested, beyond the requested ones."""


class CompiledStatus(MessageModel):
    """Compiled graphs, since the job last started with new pods only."""

    sizes: Annotated[tuple[int, ...], Field(max_length=MAX_COMPILED)] = ()
    """Numbers of nodes with compiled graphs, the newest last; further ones are not recorded."""
    seconds: float | None = None
    """The longest that one of them took to compile; absent until one was compiled in the background."""


class MembershipStatus(StatusModel):
    """The current generation, without its ranks (those are in the ConfigMap `<job>-membership`)."""

    generation: int = 0
    """Number of the current generation; it only increases."""
    attempt: int = 0
    """Restarts in place within the generation that have been recorded."""
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
    """Warm workers besides the spares that this size leaves out: with them a step would have as many passes."""


class ProgressStatus(StepFigures):
    """Progress of training."""

    updated: Annotated[str, Field(max_length=32)] = ""
    """When this was reported, RFC 3339."""


def _is_unset_step(step: int) -> bool:
    return step < 0


class CheckpointStatus(StatusModel):
    """Newest steps that a resume could use; in Python -1 for none, in the resource absent."""

    memory_step: Annotated[int, Field(exclude_if=_is_unset_step)] = -1
    """Newest step that all members hold in memory; absent for none."""
    durable_step: Annotated[int, Field(exclude_if=_is_unset_step)] = -1
    """Newest step that is committed to storage; absent for none."""
    durable_time: Annotated[str, Field(max_length=32)] = ""
    """When the operator learned of it."""
    notice: Text = ""
    """Newest warning about checkpoints, for instance that a damaged one was skipped."""


class StragglerStatus(StatusModel):
    """A member that is slower than the others."""

    pod: Annotated[str, Field(max_length=253)]
    """Its pod."""
    node: Annotated[str, Field(max_length=253)]
    """Its node."""
    since_step: int
    """Step since which it has been slow."""
    slowdown: float
    """Its own work in a step relative to the median member's, at the last write."""
    reported: bool = False
    """Whether it has been slow for `recovery.stragglers.persistSteps`."""


class RoleStatus(StatusModel):
    """Pods of one of `spec.roles`."""

    name: Annotated[str, Field(max_length=63)]
    """Name of the role."""
    replicas: int = 0
    """Pods that the operator works towards."""
    ready_replicas: int = 0
    """Pods that are ready: the addresses that workers get."""
    min_ready: int = 0
    """Ready pods that training waits for."""
    restarts: int = 0
    """Pods that ended, or whose nodes failed, and that were replaced."""
    message: Text = ""
    """Why fewer pods than requested are ready; empty otherwise."""
    since: Annotated[str, Field(max_length=32)] = ""
    """Since when fewer pods than requested are ready, RFC 3339; empty otherwise."""


class PublicStatus(StatusModel):
    """Public status of a job: its state, progress and results."""

    observed_generation: int = 0
    """metadata.generation that this status answers."""
    phase: Phase = Phase.PENDING
    """One word for display; the conditions are the truth."""
    conditions: Annotated[tuple[Condition, ...], Field(max_length=20)] = ()
    """Conditions of the job now; Complete and Failed are terminal."""
    replicas: int = 0
    """Worker pods in the membership (scale subresource)."""
    ready_replicas: int = 0
    """Members that are training."""
    spares: int = 0
    """Warm workers outside the membership."""
    desired: int = 0
    """Size that the operator works towards: as many of the requested nodes as save a pass, and idle ones."""
    idle_nodes: PublicIdleNodes = PublicIdleNodes()
    """Nodes beyond the requested ones."""
    selector: Annotated[str, Field(max_length=512)] = ""
    """Label selector of the worker pods (scale subresource)."""
    roles: Annotated[tuple[RoleStatus, ...], Field(max_length=MAX_ROLES)] = ()
    """Pods of the roles, in the order of the spec."""
    membership: MembershipStatus = MembershipStatus()
    """The current generation of workers."""
    progress: ProgressStatus = ProgressStatus()
    """Progress of training."""
    hang_detection: Annotated[str, Field(max_length=16)] = ""
    """Sign by which a hang of a program is detected: `Steps`, `Output` or `Off`; the trainer always reports steps."""
    stage: StageName = ""
    """Activity of the run: `Train`, then `Export` and `Evaluate` if requested; empty before it started."""
    stage_progress: float | None = None
    """Share of the stage that is over, 0 to 1; absent in Train, which has steps."""
    artifacts: Annotated[tuple[ArtifactReport, ...], Field(max_length=MAX_ARTIFACTS)] = ()
    """Artifacts of the run, the newest last; each is complete."""
    evaluation: Annotated[tuple[EvaluationFigure, ...], Field(max_length=MAX_FIGURES)] = ()
    """The result compared with the initial model, measured on held-out examples."""
    evaluations: Annotated[tuple[MilestoneEvaluation, ...], Field(max_length=MAX_EVALUATIONS)] = ()
    """Figures of the newest milestones, oldest first; with trainer.evaluate.atMilestones."""
    alerts: Annotated[tuple[Alert, ...], Field(max_length=8)] = ()
    """The newest alert of each kind."""
    checkpoint: CheckpointStatus = CheckpointStatus()
    """Newest steps that a resume could use."""
    restarts: RestartsStatus = RestartsStatus()
    """Interruptions since the job began; never reset."""
    compiled: CompiledStatus = CompiledStatus()
    """Sizes whose graphs are there; with `spec.precompile`."""
    goodput: PublicGoodput = PublicGoodput()
    """Where the time went since the first generation of workers."""
    history: Annotated[tuple[Interruption, ...], Field(max_length=10)] = ()
    """The last interruptions, oldest first."""
    refused_writes: Annotated[int, Field(ge=0)] = 0
    """Number of versions of this status that the API server refused; the operator kept them beside the membership."""
    outdated_pods: int = 0
    """Workers with an earlier pod template; they continue unchanged."""
    avoided_nodes: Annotated[tuple[Annotated[str, Field(max_length=253)], ...], Field(max_length=32)] = ()
    """Nodes that new workers avoid."""
    stragglers: Annotated[tuple[StragglerStatus, ...], Field(max_length=8)] = ()
    """Members that are slower than the others, the slowest first."""
    start_time: Annotated[str, Field(max_length=32)] = ""
    """When the first step was completed, RFC 3339; empty before. Of a program without steps: when it had run for a
    minute."""
    completion_time: Annotated[str, Field(max_length=32)] = ""
    """When the job completed or failed, RFC 3339; empty before."""
    verdict: Text = ""
    """Why the job failed and what to do; empty otherwise."""
    failed_spec: FailedSpecStatus | None = None
    """Spec that failed, and what was changed since; absent unless it failed."""

    def list_open_interruptions(self) -> list[Interruption]:
        """Return the interruptions whose recovery is in progress, oldest first."""
        return [entry for entry in self.history if entry.is_open]
