"""Define the TrainingJob resource: spec and status models, from which the CRD is generated (`definition/crd.py`).

The spec is what a user writes and is strict. The status is what the operator writes and is read leniently, so that an
older operator can read a newer status. Every list and string is bounded: the object must stay far below etcd's limit
and within the CEL cost budget. A CEL rule of `definition` checks, with a sentence, what a schema cannot state. The
parts of the spec are described in `spec/` and `trainer/`.

The status combines a public part and the operator's internal state, both in `status/`; on the wire their fields are
side by side.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, Self

from pydantic import Field, model_validator

from trainium_contract.base import ContractModel, IdentityKey
from trainium_contract.effects import Requirement, Switch, expand_requirements, find_without_effect
from trainium_contract.requirements.worker_requests import find_smallest_fitting_size
from trainium_contract.sizes import MAX_COMPILED, MAX_ROLES, BatchShape, order_by_likelihood
from trainium_contract.spec.elasticity import ElasticitySpec
from trainium_contract.spec.health import HealthSpec
from trainium_contract.spec.managed_by import MAX_MANAGER
from trainium_contract.spec.precompile import PrecompileSizes, PrecompileSpec
from trainium_contract.spec.program import ProgramSpec
from trainium_contract.spec.recovery import RecoverySpec
from trainium_contract.spec.roles import ROLES_NEED_PROGRAM, RoleSpec
from trainium_contract.spec.scheduling import SchedulingSpec
from trainium_contract.spec.storage import JobCheckpointSpec
from trainium_contract.spec.workers import WorkersSpec
from trainium_contract.status.activity import DeadlineSeconds
from trainium_contract.status.internal import InternalGoodput, InternalIdleNodes, InternalStatus
from trainium_contract.status.ledger import PublicGoodput
from trainium_contract.status.public import PublicIdleNodes, PublicStatus
from trainium_contract.trainer.config import TrainerSpec, TrainingConfig
from trainium_contract.trainer.parallelism import ParallelismConfig
from trainium_contract.workload import Workload, describe_program, describe_trainer

MAX_NAME = 50
"""Longest job name: `<name>-w-<ordinal>` must be a host name of at most 63 characters."""

_EVALUATES = (Switch("trainer.evaluate.enabled", on=(True,)), Switch("trainer.evaluate.atMilestones", on=(True,)))
JOB_REQUIREMENTS: tuple[Requirement, ...] = (
    *expand_requirements("trainer.evaluate.{samples,tasks}", *_EVALUATES),
    *expand_requirements("trainer.evaluate.before", _EVALUATES[0]),
    *expand_requirements("trainer.evaluate.generation.{maxNewTokens,temperature,stop,batchSize}", *_EVALUATES),
    *expand_requirements(
        "trainer.evaluate.generation.{topP,topK}", Switch("trainer.evaluate.generation.temperature", off=(0.0,))
    ),
    *expand_requirements("trainer.artifacts.atMilestones", Switch("checkpoint.milestones.everyTokens", off=(None,))),
    *expand_requirements("precompile.sizes", Switch("precompile.enabled", on=(True,))),
    *expand_requirements(
        "recovery.hang.{initSeconds,compileSeconds,loadSeconds,saveSeconds,stepFloorSeconds,stepFactor}",
        Switch("recovery.hang.enabled", on=(True,)),
    ),
    *expand_requirements("health.preflight.timeoutSeconds", Switch("health.preflight.checks", off=((),))),
    *expand_requirements("health.quarantine.debounceSeconds", Switch("health.quarantine.enabled", on=(True,))),
    *expand_requirements(
        "checkpoint.durable.{keepLast,failureTolerance,saveTimeoutSeconds}", Switch("program", on=(None,))
    ),
)
"""Which fields of a job have an effect only with certain values of others, beside those of the trainer."""


class CleanPodPolicy(StrEnum):
    """Which worker pods are deleted when the job has ended."""

    RUNNING = "Running"
    """Pods that still run; the others stay for their logs."""
    ALL = "All"
    NONE = "None"


class TrainingJobSpec(ContractModel):
    """Desired state of the job."""

    suspend: bool = False
    """Save, release all nodes and wait; false resumes from the newest checkpoint."""
    image: Annotated[str, Field(max_length=1024)] | None = None
    """Trainer image; omitted: the one that the operator was installed with."""
    workers: WorkersSpec = WorkersSpec()
    """Number and kind of the nodes."""
    elasticity: ElasticitySpec = ElasticitySpec()
    """At which sizes the job may train."""
    parallelism: ParallelismConfig = ParallelismConfig()
    """Degrees of model parallelism."""
    trainer: TrainerSpec | None = None
    """The built-in trainer's task; immutable while the job runs, except monitor. Give trainer or program."""
    program: ProgramSpec | None = None
    """Any other training program, in place of trainer; immutable while the job runs."""
    roles: Annotated[tuple[RoleSpec, ...], Field(max_length=MAX_ROLES)] = ()
    """Pods beside the workers that serve the program, for instance servers that generate or judge answers."""
    checkpoint: JobCheckpointSpec = JobCheckpointSpec()
    """Where and how often the training state is saved."""
    precompile: PrecompileSpec = PrecompileSpec()
    """Compiling before the first start."""
    recovery: RecoverySpec = RecoverySpec()
    """Detection of faults, and the responses to them."""
    health: HealthSpec = HealthSpec()
    """Checks before a worker joins, and avoidance of bad nodes."""
    scheduling: SchedulingSpec = SchedulingSpec()
    """Gang scheduling of the workers."""
    clean_pod_policy: CleanPodPolicy = CleanPodPolicy.RUNNING
    """Which worker pods are deleted when the job has ended."""
    active_deadline_seconds: DeadlineSeconds | None = None
    """The job saves and ends as Failed when it has been active this long; a suspension restarts the count. Omitted:
    no limit."""
    startup_deadline_seconds: DeadlineSeconds | None = None
    """The job ends as Failed when it has made no step this long after it was created or resumed. Omitted: no limit."""
    managed_by: Annotated[str, Field(max_length=MAX_MANAGER)] | None = None
    """Controller of the job; with any value but trainium.dev/trainium-operator this operator does not touch it."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=31_536_000)] | None = None
    """Delete the TrainingJob this long after it ended; omitted: never."""

    @model_validator(mode="after")
    def _check_one_kind(self) -> Self:
        if refusal := find_without_effect(self, JOB_REQUIREMENTS):
            raise ValueError(refusal)
        given = [kind for kind in (self.trainer, self.program) if kind is not None]
        if len(given) > 1:
            raise ValueError("trainer and program are both given: leave one of them out")
        names = [role.name for role in self.roles]
        if duplicate := next((name for name in names if names.count(name) > 1), ""):
            raise ValueError(f"two roles have the name {duplicate}: rename one")
        if not given:
            # The definition refuses a job without both; tests and simulations use the defaults.
            self.set_if_omitted("trainer", TrainerSpec())
        if self.roles and not self.workload.reads_endpoints:
            raise ValueError(ROLES_NEED_PROGRAM)
        return self

    @property
    def workload(self) -> Workload:
        """Return what the job runs."""
        return _select_workload(IdentityKey(self))

    def training_config(self) -> TrainingConfig:
        """Return the trainer's configuration file. Raises ValueError for a program."""
        config = self.workload.configure()
        if config is None:
            raise ValueError("spec.program runs without the trainer's configuration")
        return config

    def batch_shape(self) -> BatchShape:
        """Return the arithmetic of this job's legal sizes. Raises ValueError if the spec contradicts itself."""
        shape, unit_nodes = self.workload.batch_shape(), self.workers.accelerator.count_nodes_per_unit()
        return shape if unit_nodes == 1 else replace(shape, unit_nodes=unit_nodes)

    def min_size(self, largest: int) -> int:
        """Return the fewest nodes that the job may shrink to from `largest`, which fits; a rigid job never shrinks."""
        least, accelerator = self.workers.min_replicas, self.workers.accelerator
        if least is None or least >= largest or self.workload.has_fixed_size:
            return largest
        return find_smallest_fitting_size(self.workload.configure(), accelerator, self.batch_shape(), least, largest)

    def sizes_to_compile(self) -> tuple[int, ...]:
        """Return the sizes whose graphs are compiled ahead: the initial size, then the likely ones.

        Empty if no size is legal.
        """
        if self.workload.compiles_every_size:
            return self.useful_sizes()
        start = self._start(self.batch_shape())
        return (start,) if start else ()

    def sizes_for_spares(self) -> tuple[int, ...]:
        """Return the sizes that idle spares compile graphs for; those that a job may soon need come first."""
        enabled = self.precompile.enabled and self.precompile.sizes is PrecompileSizes.BACKGROUND
        return self.useful_sizes()[1 : MAX_COMPILED + 1] if enabled and self.workers.spares else ()

    def useful_sizes(self) -> tuple[int, ...]:
        """Return the sizes at which the job may run: the initial size, then the likely ones; empty for none."""
        workers, shape = self.workers, self.batch_shape()
        start = self._start(shape)
        if not start:
            return ()
        sizes = shape.useful_sizes(self.min_size(start), max(start, workers.max_replicas or start))
        return (start, *order_by_likelihood({*sizes} - {start}, start))

    def _start(self, shape: BatchShape) -> int:
        """Return the size that the job starts at; 0 for none."""
        return shape.best(self.workers.replicas, self.workers.min_replicas or 1)


@lru_cache(maxsize=16)  # a plan needs it often; few, since specs may be large
def _select_workload(key: IdentityKey[TrainingJobSpec]) -> Workload:
    spec, cores = key.value, key.value.workers.accelerator.cores()
    if spec.program is not None:
        return describe_program(spec.program, cores=cores, parallelism=spec.parallelism, checkpoint=spec.checkpoint)
    return describe_trainer(
        spec.trainer or TrainerSpec(),
        image=spec.image,
        cores=cores,
        parallelism=spec.parallelism,
        checkpoint=spec.checkpoint,
        precompile=spec.precompile,
        sizes=spec.elasticity.sizes,
    )


class GoodputStatus(InternalGoodput, PublicGoodput):
    """Where the time went since the first generation of workers, and the state for further accounting."""


class IdleNodesStatus(InternalIdleNodes, PublicIdleNodes):
    """Nodes beyond the requested ones, and when they are requested again."""


class TrainingJobStatus(InternalStatus, PublicStatus):
    """Observed state of the job, and the operator's state across restarts."""

    idle_nodes: IdleNodesStatus = IdleNodesStatus()
    """Nodes beyond the requested ones."""
    goodput: GoodputStatus = GoodputStatus()
    """Where the time went since the first generation of workers."""
