"""Describe what a job runs: `spec.program` states it, and this file renders the preset `spec.trainer` to the same.

Only this file and the rules that refuse a bad job know which of the two a job has (a test counts the branches). Others
read the fields of the description.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trainium_contract.sizes import BatchShape, SizeRule
from trainium_contract.spec.precompile import PrecompileSizes
from trainium_contract.spec.program import ProgramPrecompileSizes, ProgramResize
from trainium_contract.trainer.checkpoint import CheckpointConfig
from trainium_contract.trainer.config import TrainerSpec, TrainingConfig
from trainium_contract.wire.worker_env import (
    AGENT_INTERPRETER,
    CACHE_DIRECTORY,
    CHECKPOINT_MOUNT,
    COMPILED_FOLDER,
    CONFIG_PATH,
    ENV_COMPILE_CACHE,
    ENV_PROGRAM,
    ENV_SHARED_COMPILE_CACHE,
)

if TYPE_CHECKING:
    from trainium_contract.spec.precompile import PrecompileSpec
    from trainium_contract.spec.program import ProgramSpec
    from trainium_contract.spec.storage import JobCheckpointSpec
    from trainium_contract.trainer.parallelism import ParallelismConfig

_COMPILER_FOLDERS = ("NEURON_COMPILE_CACHE_URL", "TORCHINDUCTOR_CACHE_DIR")
"""Variables that name the folder of a compiler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The processes that a job runs, and what is known of them."""

    image: str | None
    """Image of the training container; None for the one that the operator was installed with."""
    has_agent: bool = False
    """Whether the image contains the agent; otherwise an init container adds it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the container besides those of every worker."""
    neuron_environment: Mapping[str, str] = field(default_factory=dict)
    """Variables on Neuron devices only."""
    processes_per_node: int
    """Processes that the agent starts on each node."""
    has_fixed_size: bool = False
    """Whether the job runs at one number of nodes only."""
    batch_shape: Callable[[], BatchShape]
    """Returns the arithmetic of legal sizes. Raises ValueError if the spec contradicts itself."""
    reads_accumulation: bool = False
    """Whether it takes the micro-batches of a step from the membership."""
    configure: Callable[[], TrainingConfig | None] = lambda: None
    """Returns the configuration file that it reads, if any. Raises ValueError if the spec contradicts itself."""
    reads_configuration: bool = False
    """Whether it reads a configuration file of the trainer."""
    reads_endpoints: bool = False
    """Whether it reads the addresses of the job's roles."""
    reports_each_step: bool = False
    """Whether every rank reports each step. Otherwise only some ranks may report steps, or none."""
    fixed_steps: int = 0
    """Steps of the whole run; 0 if it reports them."""
    estimated_steps: int = 0
    """Steps of the whole run while it has reported none."""
    explains_exits: bool = False
    """Whether its exit codes distinguish an error of the user from a fault of the node."""
    saves_on_schedule: bool = False
    """Whether it saves at the intervals of `spec.checkpoint`."""
    checkpoint_folder: str
    """Folder of its checkpoints in the container; empty if it is not known."""
    keeps_checkpoints: bool
    """Whether its checkpoints outlive the pods."""
    evaluates_milestones: bool = False
    """Whether the operator measures the models of its milestones."""
    compile_command: tuple[str, ...] = ()
    """Start of the command that compiles ahead for given sizes, before a worker joins; empty for none."""
    compiles_every_size: bool = False
    """Whether it compiles for every useful size, not only for the initial one."""
    divides_state: bool = False
    """Whether the state of a lost node exists on no other one, without copies."""
    skips_nonfinite_steps: bool = False
    """Whether a step without finite numbers does not end it."""


def describe_trainer(
    trainer: TrainerSpec,
    *,
    image: str | None,
    cores: int,
    parallelism: ParallelismConfig,
    checkpoint: JobCheckpointSpec,
    precompile: PrecompileSpec,
    sizes: SizeRule,
) -> Workload:
    """Render the built-in trainer; `cores` are those of a node."""
    neuron = trainer.neuron
    configure = functools.cache(functools.partial(_build_configuration, trainer, parallelism, checkpoint))
    # A killed compilation leaves a failed entry behind; a cache on shared storage becomes corrupt. If the job sets
    # otherwise, the trainer sets its own, and refuses a variable that contradicts it.
    neuron_environment = {
        **({"NEURON_CC_FLAGS": "--retry_failed_compilation"} if neuron.retry_failed_compilation else {}),
        **({"NEURON_COMPILE_CACHE_URL": f"{CACHE_DIRECTORY}/neuron"} if neuron.cache_directory is None else {}),
    }
    return Workload(
        image=image,
        has_agent=True,
        neuron_environment=neuron_environment,
        processes_per_node=cores,
        batch_shape=lambda: configure().batch_shape(cores, sizes),
        configure=configure,
        reads_configuration=True,
        reports_each_step=True,
        fixed_steps=0 if trainer.epochs or trainer.batch.tolerance else trainer.steps,
        estimated_steps=0 if trainer.epochs else trainer.steps,
        explains_exits=True,
        saves_on_schedule=True,
        checkpoint_folder=CHECKPOINT_MOUNT,
        keeps_checkpoints=checkpoint.storage.is_persistent,
        evaluates_milestones=trainer.evaluate.at_milestones,
        compile_command=("trainium-trainer", "precompile", "--config", CONFIG_PATH) if precompile.enabled else (),
        compiles_every_size=precompile.sizes is PrecompileSizes.ALL,
        divides_state=trainer.data_parallel.is_sharded,
        skips_nonfinite_steps=trainer.non_finite_tolerance > 0,
    )


def describe_program(
    program: ProgramSpec, *, cores: int, parallelism: ParallelismConfig, checkpoint: JobCheckpointSpec
) -> Workload:
    """Describe another training program; `cores` are those of a node."""
    batch, precompile = program.batch, program.precompile
    processes = program.processes_per_node or cores
    # A kubelet replaces $(NAME) in a value, and $$ stands for a dollar sign.
    environment = {ENV_PROGRAM: json.dumps(program.to_wire()).replace("$", "$$")}
    if precompile is not None:
        environment |= dict.fromkeys((ENV_COMPILE_CACHE, *_COMPILER_FOLDERS), f"{CACHE_DIRECTORY}/graphs")
        if checkpoint.storage.is_mounted:
            environment[ENV_SHARED_COMPILE_CACHE] = f"{CHECKPOINT_MOUNT}/{COMPILED_FOLDER}"
    return Workload(
        reads_endpoints=True,
        image=program.image,
        environment=environment,
        processes_per_node=processes,
        has_fixed_size=program.resize is ProgramResize.NEVER,
        batch_shape=lambda: BatchShape(
            cores_per_node=max(processes, cores),  # one process may use all cores
            tensor=parallelism.tensor,
            pipeline=parallelism.pipeline,
            context=parallelism.context,
            global_batch_size=batch.global_size if batch else 0,
            micro_batch_size=batch.micro_size if batch else 1,
            rule=SizeRule.EVEN,
        ),
        reads_accumulation=batch is not None,
        checkpoint_folder=program.checkpoints.path if program.checkpoints else "",
        keeps_checkpoints=program.checkpoints is not None,
        compile_command=(*AGENT_INTERPRETER, "-m", "trainium_agent.precompile") if precompile is not None else (),
        compiles_every_size=precompile is not None and precompile.sizes is ProgramPrecompileSizes.AUTO,
    )


def _build_configuration(
    trainer: TrainerSpec, parallelism: ParallelismConfig, checkpoint: JobCheckpointSpec
) -> TrainingConfig:
    """Return the trainer's configuration file, with checkpoints below the mount point of the storage."""
    return TrainingConfig(
        **{name: getattr(trainer, name) for name in TrainerSpec.model_fields if name in trainer.model_fields_set},
        parallelism=parallelism,
        checkpoint=CheckpointConfig(
            path=CHECKPOINT_MOUNT,
            take_over=checkpoint.storage.take_over,
            memory=checkpoint.memory,
            durable=checkpoint.durable,
            milestones=checkpoint.milestones,
        ),
    )
