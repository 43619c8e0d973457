"""Trainer configuration: `spec.trainer` of a TrainingJob, and the complete file that the trainer reads.

`TrainerSpec` is what a user writes under `spec.trainer`. `TrainingConfig` adds the parts that a TrainingJob holds
beside it (parallelism, checkpoint); the operator writes it to the worker's `trainer.yaml`, and a person may write it by
hand for `trainium-trainer train --config FILE`. Unknown keys are refused.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from trainium_contract.base import ContractModel
from trainium_contract.sizes import BatchShape

PositiveInt = Annotated[int, Field(ge=1, le=2**31 - 1)]
Path = Annotated[str, Field(min_length=1, max_length=1024)]


class ModelPreset(StrEnum):
    """Named Llama shapes; `Tiny` and `Small` are for a laptop CPU."""

    TINY = "Tiny"
    SMALL = "Small"
    LLAMA2_7B = "Llama2-7B"
    LLAMA3_8B = "Llama3-8B"


class ModelConfig(ContractModel):
    """A Llama model; a field given here overrides the preset's."""

    preset: ModelPreset = ModelPreset.TINY
    """The shape to start from."""
    vocab_size: Annotated[int, Field(ge=16, le=1_000_000)] | None = None
    """Rows of the embedding; must not be smaller than the tokenizer's vocabulary. Omitted: the tokenizer's size for CPU
    presets, the published size for the others."""
    hidden_size: PositiveInt | None = None
    """Width of the residual stream; divisible by numAttentionHeads."""
    intermediate_size: PositiveInt | None = None
    """Width of the SwiGLU feed-forward."""
    num_layers: PositiveInt | None = None
    """Transformer blocks."""
    num_attention_heads: PositiveInt | None = None
    """Query heads; divisible by numKeyValueHeads and by the tensor-parallel degree."""
    num_key_value_heads: PositiveInt | None = None
    """Key/value heads (GQA)."""
    rope_theta: Annotated[float, Field(gt=0)] | None = None
    """Base of the rotary embedding."""
    norm_eps: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Epsilon of RMSNorm."""
    tie_embeddings: bool | None = None
    """Share the embedding with the output projection."""


class TokenizerConfig(ContractModel):
    """Where token ids come from."""

    path: Path | None = None
    """A `tokenizer.json` or a folder that holds one; omitted: a byte-level BPE is trained on the data and cached."""
    vocab_size: Annotated[int, Field(ge=300, le=200_000)] = 2048
    """Vocabulary of the trained BPE; a tokenizer given by `path` has its own."""


class DataConfig(ContractModel):
    """The text to train on, as one ordered stream of samples addressed by global position."""

    source: Path = "python-docs"
    """`python-docs` (the documentation that ships with Python), a local .txt, .jsonl, .arrow or .parquet file (or a
    folder of such files), or the name of a Hugging Face data set."""
    text_field: Annotated[str, Field(min_length=1, max_length=128)] = "text"
    """Column or key that holds the text in .jsonl, Arrow, Parquet and data sets."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """Where token ids come from."""
    sequence_length: Annotated[int, Field(ge=8, le=1_048_576)] = 128
    """Tokens of one sample."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Seed of the per-epoch shuffle."""
    cache_directory: Path | None = None
    """Where tokenizer and tokenised text are cached; omitted: the user's cache folder, on a worker the node's."""


class BatchConfig(ContractModel):
    """Batch sizes in samples; the global batch is the same at every job size."""

    global_size: PositiveInt = 8
    """Samples of one optimizer step over all data-parallel ranks."""
    micro_size: PositiveInt = 1
    """Samples of one forward and backward pass of one data-parallel rank."""


class OptimizerConfig(ContractModel):
    """AdamW and gradient clipping."""

    learning_rate: Annotated[float, Field(gt=0, le=1)] = 3e-4
    """Peak learning rate."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the second moment."""
    eps: Annotated[float, Field(gt=0, lt=1)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Decoupled decay on all parameters, as HLAT has it."""
    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    """Bound of the global gradient norm."""


class ScheduleConfig(ContractModel):
    """Cosine schedule with linear warm-up."""

    warmup_steps: Annotated[int, Field(ge=0)] = 10
    """Steps of linear warm-up from 0."""
    final_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate at the last step, as a fraction of the peak."""


class Precision(StrEnum):
    """Number format of compute."""

    FLOAT32 = "Float32"
    BFLOAT16 = "BFloat16"


class DataParallelMode(StrEnum):
    """How the data-parallel ranks hold the state."""

    REPLICATED = "Replicated"
    """Every rank holds all of it; gradients are all-reduced. A lost node's state survives on every other."""
    FULLY_SHARDED = "FullySharded"
    """FSDP2: parameters, gradients and optimizer state are sharded over the data-parallel ranks."""


class MonitorConfig(ContractModel):
    """What is recorded while training."""

    tensorboard: bool = True
    """Write TensorBoard scalars beside metrics.jsonl."""
    record_samples: bool = False
    """Write which samples every step was trained on, each data-parallel rank its own samples-<rank>.jsonl."""


class TrainerSpec(ContractModel):
    """What to train: `spec.trainer` of a TrainingJob."""

    model: ModelConfig = ModelConfig()
    """The Llama model."""
    data: DataConfig = DataConfig()
    """The text to train on."""
    batch: BatchConfig = BatchConfig()
    """Batch sizes, from which the legal sizes of the job follow."""
    steps: PositiveInt = 100
    """Optimizer steps of the whole run."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and gradient clipping."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning-rate schedule."""
    precision: Precision = Precision.FLOAT32
    """Number format of compute."""
    data_parallel: DataParallelMode = DataParallelMode.REPLICATED
    """Whether the data-parallel ranks hold all of the state or a shard of it."""
    non_finite_tolerance: Annotated[int, Field(ge=0, le=1000)] = 0
    """Consecutive steps with a non-finite loss or gradient that are skipped before the run stops with code 65."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Seed of the initial weights."""
    monitor: MonitorConfig = MonitorConfig()
    """What is recorded; may change while the job runs."""


class ParallelismConfig(ContractModel):
    """Degrees of model parallelism; the data-parallel degree follows from the size."""

    tensor: Annotated[int, Field(ge=1, le=128)] = 1
    """Tensor-parallel degree."""
    pipeline: Annotated[int, Field(ge=1, le=1)] = 1
    """Pipeline-parallel degree; this version supports 1."""
    sequence: bool = False
    """Sequence parallelism within the tensor-parallel group."""


class MemoryTier(ContractModel):
    """Snapshots in the node's memory; they survive a training process."""

    every_steps: Annotated[int, Field(ge=0, le=100_000)] = 1
    """Optimizer steps between snapshots; 0 switches the tier off."""


class DurableTier(ContractModel):
    """Sharded checkpoints on storage; they survive everything."""

    every_seconds: Annotated[int, Field(ge=1, le=86_400)] | None = 300
    """Longest time between two saves."""
    every_steps: PositiveInt | None = None
    """Most optimizer steps between two saves."""
    keep_last: Annotated[int, Field(ge=1, le=1000)] = 3
    """Committed checkpoints that are kept; the last good one is never deleted."""


class CheckpointConfig(ContractModel):
    """Where and how often the training state is saved."""

    path: Path = "checkpoints"
    """Root folder of durable checkpoints, metrics and TensorBoard files."""
    memory: MemoryTier = MemoryTier()
    durable: DurableTier = DurableTier()


class TrainingConfig(TrainerSpec):
    """The complete configuration that the trainer reads from one YAML file."""

    parallelism: ParallelismConfig = ParallelismConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="after")
    def _warmup_fits(self) -> Self:
        if self.schedule.warmup_steps > self.steps:
            msg = (
                f"schedule.warmupSteps is {self.schedule.warmup_steps} but steps is {self.steps}: "
                "the warm-up must end within the run; lower schedule.warmupSteps or raise steps"
            )
            raise ValueError(msg)
        return self

    def batch_shape(self, cores_per_node: int) -> BatchShape:
        """The arithmetic that decides legal sizes of this configuration."""
        return BatchShape(
            cores_per_node=cores_per_node,
            tensor=self.parallelism.tensor,
            pipeline=self.parallelism.pipeline,
            global_batch_size=self.batch.global_size,
            micro_batch_size=self.batch.micro_size,
        )
