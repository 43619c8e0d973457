"""`trainer.model`: which Llama is trained, as a preset, as a Hugging Face configuration, or number by number."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from trainium_contract.base import ContractModel, derived

_PositiveInt = Annotated[int, Field(ge=1, le=2**31 - 1)]


class ModelPreset(StrEnum):
    """Named Llama shapes; `Tiny` and `Small` are for a laptop CPU, the others have their published numbers."""

    TINY = "Tiny"
    SMALL = "Small"
    LLAMA2_7B = "Llama2-7B"
    LLAMA2_13B = "Llama2-13B"
    LLAMA2_70B = "Llama2-70B"
    LLAMA3_8B = "Llama3-8B"
    LLAMA3_70B = "Llama3-70B"
    LLAMA31_8B = "Llama3.1-8B"
    LLAMA31_70B = "Llama3.1-70B"
    LLAMA32_1B = "Llama3.2-1B"


class RopeScalingKind(StrEnum):
    """Scaling of the rotary embedding to sequences longer than it was first made for."""

    UNSCALED = "Unscaled"
    """Not at all; switches off what the preset or the configuration file has."""
    LINEAR = "Linear"
    """All frequencies divided by `factor`."""
    LLAMA3 = "Llama3"
    """Low frequencies divided by `factor`, high ones kept, a smooth change between: Llama 3.1 and 3.2."""


class RopeScaling(ContractModel):
    """Scaling of the rotary embedding; the defaults are Llama 3.1's."""

    kind: RopeScalingKind = RopeScalingKind.LLAMA3
    """`Llama3`, `Linear`, or `Unscaled` to switch off what the preset or the file has."""
    factor: Annotated[float, Field(ge=1, le=1024)] = 8.0
    """By how much low frequencies are divided; a ratio."""
    low_frequency_factor: float = derived(1.0, gt=0, lt=1024)
    """Waves longer than originalMaxPositions over this are divided by the whole factor; a ratio, less than
    highFrequencyFactor, `Llama3` only. Omitted: 1, or a quarter of a highFrequencyFactor below 4."""
    high_frequency_factor: float = derived(4.0, gt=0, le=1024)
    """Waves shorter than originalMaxPositions over this are kept; a ratio, `Llama3` only. Omitted: 4, or four times a
    lowFrequencyFactor above 1."""
    original_max_positions: Annotated[int, Field(ge=1, le=2**31 - 1)] = 8192
    """Longest sequence before scaling, tokens; `Llama3` only."""

    @model_validator(mode="after")
    def _low_is_below_high(self) -> Self:
        self.fit_default("low_frequency_factor", min(1.0, self.high_frequency_factor / 4))
        self.fit_default("high_frequency_factor", min(1024.0, max(4.0, self.low_frequency_factor * 4)))
        if self.low_frequency_factor >= self.high_frequency_factor:
            msg = (
                f"model.ropeScaling.lowFrequencyFactor is {self.low_frequency_factor} but highFrequencyFactor is "
                f"{self.high_frequency_factor}: the low one must be the smaller; Llama 3.1 has 1 and 4"
            )
            raise ValueError(msg)
        return self


class ModelConfig(ContractModel):
    """A Llama model; a field given here overrides that of the preset or of the file."""

    preset: ModelPreset = ModelPreset.TINY
    """The shape to start from, unless `path` is given."""
    path: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """A Hugging Face `config.json` of a LlamaForCausalLM, or a folder that holds one, to start from in place of a
    preset. Only the shape is read; on a cluster it must be mounted in every worker."""
    weights: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """A Hugging Face folder (config.json and safetensors), mounted in every worker or s3://bucket/prefix, whose weights
    the run begins with; the shape is the folder's. A name on the hub is fetched ahead by `trainium-trainer
    fetch-model`. Omitted: weights are drawn from `seed`."""
    vocab_size: Annotated[int, Field(ge=16, le=1_000_000)] | None = None
    """Rows of the embedding, tokens; not smaller than the tokenizer's vocabulary, divisible by the tensor-parallel
    degree. Omitted: the tokenizer's size for CPU presets, the published size for the others."""
    hidden_size: _PositiveInt | None = None
    """Width of the residual stream, numbers per token; divisible by numAttentionHeads unless headDim is given."""
    intermediate_size: _PositiveInt | None = None
    """Width of the SwiGLU feed-forward, numbers per token; divisible by the tensor-parallel degree."""
    num_layers: _PositiveInt | None = None
    """Transformer blocks."""
    num_attention_heads: _PositiveInt | None = None
    """Query heads; divisible by numKeyValueHeads and by the tensor-parallel degree."""
    num_key_value_heads: _PositiveInt | None = None
    """Key/value heads (GQA); divisible by the tensor-parallel degree, or a divisor of it: then ranks share a head.
    Omitted: those of the preset or of the file, or numAttentionHeads where those do not divide it."""
    head_dim: Annotated[int, Field(ge=2, le=8192)] | None = None
    """Width of one attention head, an even number. Omitted: hiddenSize over numAttentionHeads, or the file's."""
    rope_theta: Annotated[float, Field(gt=0)] | None = None
    """Base of the rotary embedding: the longest wave is about 2 pi times it, positions."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary embedding; omitted: that of the preset or of the file."""
    max_positions: Annotated[int, Field(ge=8, le=2**31 - 1)] | None = None
    """Longest sequence that the model is meant for, tokens; data.sequenceLength must not be above it."""
    norm_eps: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Epsilon of RMSNorm, added to the mean square."""
    tie_embeddings: bool | None = None
    """Share the embedding with the output projection."""
    initial_std: Annotated[float, Field(gt=0, le=1)] | None = None
    """Standard deviation of the initial weights; projections that end a residual branch have it divided by the root of
    twice the number of layers. Omitted: 0.02, or the file's."""

    @model_validator(mode="after")
    def _one_start(self) -> Self:
        if self.path is not None and self.preset is not ModelPreset.TINY:
            msg = (
                f"model.preset is {self.preset} and model.path is {self.path}: both name a shape, leave one of them out"
            )
            raise ValueError(msg)
        if self.weights is not None and (self.path is not None or self.preset is not ModelPreset.TINY):
            other = "model.path" if self.path is not None else "model.preset"
            msg = f"model.weights is {self.weights} and {other} is given: both name a shape, leave {other} out"
            raise ValueError(msg)
        return self
