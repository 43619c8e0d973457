"""Trainer configuration: `spec.trainer` of a TrainingJob, and the complete file that the trainer reads.

`TrainerSpec` is what a user writes under `spec.trainer`. `TrainingConfig` adds the parts that a TrainingJob has beside
it (parallelism, checkpoint). The operator writes it to the worker's `trainer.yaml`, and a person may write it by hand
for `trainium-trainer train --config FILE`. Unknown keys are refused.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from trainium_contract.base import ContractModel, derived
from trainium_contract.effects import find_conflict, find_without_effect
from trainium_contract.sizes import BatchShape, SizeRule
from trainium_contract.trainer.addresses import is_address
from trainium_contract.trainer.artifacts import ArtifactKind, ArtifactsConfig
from trainium_contract.trainer.checkpoint import CheckpointConfig
from trainium_contract.trainer.data import MIN_VOCABULARY, DataConfig
from trainium_contract.trainer.effects import TRAINER_CONFLICTS, TRAINER_REQUIREMENTS
from trainium_contract.trainer.evaluate import EvaluateConfig
from trainium_contract.trainer.model import ModelConfig
from trainium_contract.trainer.monitor import MonitorConfig
from trainium_contract.trainer.neuron import NeuronConfig
from trainium_contract.trainer.optimizer import OptimizerConfig, ScheduleConfig
from trainium_contract.trainer.parallelism import (
    BackendChoice,
    DataParallelMode,
    DeviceChoice,
    ParallelismConfig,
    Precision,
    Recompute,
    TorchCompile,
)
from trainium_contract.trainer.tuning import TuningConfig, TuningMethod

PositiveInt = Annotated[int, Field(ge=1, le=2**31 - 1)]
Path = Annotated[str, Field(min_length=1, max_length=1024)]


class BatchConfig(ContractModel):
    """Batch sizes in samples; the global batch is the same at every job size, within `tolerance`."""

    global_size: int = derived(8, ge=1, le=2**31 - 1)
    """Samples of one optimizer step over all data-parallel ranks. Omitted: 8, or microSize if that is larger."""
    micro_size: PositiveInt = 1
    """Samples of one forward and backward pass of one data-parallel rank."""
    tolerance: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Share of globalSize by which the batch of a step may differ, so that every rank's passes are full: a step then
    takes the nearest number of samples that comes out even at the present size. `steps`, epochs and the schedule
    still count globalSize samples each, and a run ends with the same sample. 0: always globalSize."""

    @model_validator(mode="after")
    def _fit_defaults(self) -> Self:
        self.set_if_omitted("global_size", max(self.global_size, self.micro_size))
        return self


class TrainerSpec(ContractModel):
    """The training run: `spec.trainer` of a TrainingJob."""

    model: ModelConfig = ModelConfig()
    """The model."""
    tuning: TuningConfig = TuningConfig()
    """Trained part of the model."""
    data: DataConfig = DataConfig()
    """The text to train on."""
    batch: BatchConfig = BatchConfig()
    """Batch sizes, which determine the speed at each size of the job."""
    steps: int = derived(100, ge=1, le=2**31 - 1)
    """Optimizer steps of the whole run. Omitted: 100, or those of `epochs`."""
    epochs: Annotated[float, Field(ge=0, le=10_000)] = 0.0
    """Passes over the data, from which the steps follow: each sample is seen once in each, and the last step of an
    epoch is filled up with samples that do not count. 0: the run has `steps`."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and gradient clipping."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning-rate schedule."""
    backend: BackendChoice = BackendChoice.AUTO
    """Library that drives the devices: Auto selects the installed one."""
    device: DeviceChoice = DeviceChoice.AUTO
    """Device of the native backend: Auto selects the best available one."""
    precision: Precision = Precision.FLOAT32
    """Number formats of computation and state. A run may resume from a checkpoint of another format."""
    recompute: Recompute = Recompute.NONE
    """Part that the backward pass computes again to save memory."""
    torch_compile: TorchCompile = TorchCompile.NONE
    """Part that is compiled at its first use; results then differ from uncompiled ones by rounding."""
    data_parallel: DataParallelMode = DataParallelMode.REPLICATED
    """Whether each data-parallel rank holds all of the state or a shard of it."""
    non_finite_tolerance: Annotated[int, Field(ge=0, le=1000)] = 0
    """Consecutive steps with a non-finite loss or gradient that are skipped before the run stops with code 65."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Seed of the initial weights."""
    artifacts: ArtifactsConfig = ArtifactsConfig()
    """Artifacts that the run writes for others."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """Whether and how the result is measured at the end."""
    monitor: MonitorConfig = MonitorConfig()
    """Records of the run; may change while the job runs."""
    neuron: NeuronConfig = NeuronConfig()
    """Compiler and runtime of Neuron devices; without effect on others."""

    @model_validator(mode="after")
    def _refuse_without_effect(self) -> Self:
        if refusal := find_without_effect(self, TRAINER_REQUIREMENTS):
            raise ValueError(refusal)
        return self

    @model_validator(mode="after")
    def _fit_defaults(self) -> Self:
        """Fit omitted values to given ones, so that no default makes a file invalid."""
        if not self.epochs and self.schedule.warmup_ratio is None:
            self.__dict__["schedule"] = self.schedule.fitted(self.steps)
        data, vocabulary, positions = self.data, self.model.vocab_size, self.model.max_positions
        trains_tokenizer = data.tokenizer.path is None and self.model.weights is None
        if vocabulary is not None and trains_tokenizer and "vocab_size" not in data.tokenizer.model_fields_set:
            fitting = max(MIN_VOCABULARY, min(data.tokenizer.vocab_size, vocabulary))
            data = data.replaced(tokenizer=data.tokenizer.replaced(vocab_size=fitting))
        if positions is not None and "sequence_length" not in data.model_fields_set:
            data = data.replaced(sequence_length=min(data.sequence_length, positions))
        self.__dict__["data"] = data
        return self


class TrainingConfig(TrainerSpec):
    """The complete configuration that the trainer reads from one YAML file."""

    parallelism: ParallelismConfig = ParallelismConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        schedule = self.schedule
        if self.epochs or schedule.warmup_ratio is not None:
            return self  # the number of steps is known once the data have been read
        if schedule.warmup_steps > self.steps:
            msg = (
                f"schedule.warmupSteps is {schedule.warmup_steps} but steps is {self.steps}: "
                "the warm-up must end within the run; lower schedule.warmupSteps or raise steps"
            )
            raise ValueError(msg)
        if schedule.warmup_steps + (schedule.decay_steps or 0) > self.steps:
            msg = (
                f"schedule.warmupSteps {schedule.warmup_steps} and schedule.decaySteps {schedule.decay_steps} are "
                f"together more than the {self.steps} steps: lower one of them or raise steps"
            )
            raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        if refusal := find_conflict(self, TRAINER_CONFLICTS):
            raise ValueError(refusal)
        if self.artifacts.push is not None and is_address(self.artifacts.path or self.checkpoint.path):
            raise ValueError(
                "artifacts.push uploads a folder, but artifacts are written to an object store: set artifacts.path to "
                "a mounted folder"
            )
        kinds = self.artifacts.kinds
        begins = self.model.weights is not None or self.tuning.method is TuningMethod.LORA
        writes_model = begins if kinds is None else ArtifactKind.MODEL in kinds
        if self.evaluate.at_milestones and not writes_model:
            raise ValueError(
                "evaluate.atMilestones is true but the run writes no Model: set artifacts.kinds to [Model]"
            )
        return self

    @model_validator(mode="after")
    def _check_profiled_steps(self) -> Self:
        profile = self.monitor.profile
        if profile is not None and not self.epochs and profile.steps[1] > self.steps:
            raise ValueError(
                f"monitor.profile.steps ends with step {profile.steps[1]} but the run has {self.steps} steps: name "
                "steps of the run"
            )
        return self

    def batch_shape(self, cores_per_node: int, rule: SizeRule = SizeRule.ANY) -> BatchShape:
        """Return the arithmetic that decides legal sizes of this configuration."""
        return BatchShape(
            cores_per_node=cores_per_node,
            tensor=self.parallelism.tensor,
            pipeline=self.parallelism.pipeline,
            context=self.parallelism.context,
            global_batch_size=self.batch.global_size,
            micro_batch_size=self.batch.micro_size,
            rule=rule,
            tolerance=self.batch.tolerance,
        )
