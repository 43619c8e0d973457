"""`trainer.model`: the model as a preset, a Hugging Face configuration, or single numbers."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field, model_validator

from trainium_contract.base import ContractModel, derived
from trainium_contract.models.families import PRESETS
from trainium_contract.models.shape import RopeScalingKind, RopeStretch, compute_yarn_attention_factor

if TYPE_CHECKING:
    from trainium_contract.models.shape import ModelShape

USUAL_VOCABULARY = 32_000
"""Tokens, if a preset leaves them to a tokenizer that has not been read yet."""
NOT_SHAPE = ("preset", "path", "weights", "rope_scaling")
"""Fields of ModelConfig without a field of ModelShape of the same name."""
_PositiveInt = Annotated[int, Field(ge=1, le=2**31 - 1)]


class ModelPreset(StrEnum):
    """Named shapes; `Tiny` and `Small` are for a laptop CPU, the others have their published numbers."""

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
    MISTRAL_7B_V01 = "Mistral-7B-v0.1"
    MISTRAL_7B_V03 = "Mistral-7B-v0.3"
    MISTRAL_NEMO_12B = "Mistral-Nemo-12B"
    QWEN25_05B = "Qwen2.5-0.5B"
    QWEN25_15B = "Qwen2.5-1.5B"
    QWEN25_3B = "Qwen2.5-3B"
    QWEN25_7B = "Qwen2.5-7B"
    QWEN25_14B = "Qwen2.5-14B"
    QWEN25_32B = "Qwen2.5-32B"
    QWEN25_72B = "Qwen2.5-72B"
    QWEN3_06B = "Qwen3-0.6B"
    QWEN3_17B = "Qwen3-1.7B"
    QWEN3_4B = "Qwen3-4B"
    QWEN3_8B = "Qwen3-8B"
    QWEN3_14B = "Qwen3-14B"
    QWEN3_32B = "Qwen3-32B"
    GRANITE33_2B = "Granite3.3-2B"
    GRANITE33_8B = "Granite3.3-8B"
    OLMO2_1B = "OLMo2-1B"
    OLMO2_7B = "OLMo2-7B"
    OLMO2_13B = "OLMo2-13B"
    OLMO2_32B = "OLMo2-32B"
    OLMO3_7B = "OLMo3-7B"
    OLMO3_32B = "OLMo3-32B"
    SMOLLM3_3B = "SmolLM3-3B"
    GEMMA3_270M = "Gemma3-270M"
    GEMMA3_1B = "Gemma3-1B"
    GEMMA3_4B = "Gemma3-4B"
    GEMMA3_12B = "Gemma3-12B"
    GEMMA3_27B = "Gemma3-27B"


_LLAMA_FACTOR = 8.0
"""Factor of Llama 3.1."""


class RopeScaling(ContractModel):
    """Scaling of the rotary embedding; the defaults are Llama 3.1's."""

    kind: RopeScalingKind = RopeScalingKind.LLAMA3
    """`Llama3`, `YaRN`, `Dynamic`, `Linear`, or `Unscaled` to switch off what the preset or the file has."""
    factor: Annotated[float, Field(ge=1, le=1024)] | None = None
    """Divisor of low frequencies, or with `Dynamic` the ratio of the longest sequences. Omitted: 8 with `Llama3`;
    `YaRN`, `Dynamic` and `Linear` need it."""
    low_frequency_factor: float = derived(1.0, gt=0, lt=1024)
    """Waves longer than originalMaxPositions over this are divided by the whole factor; a ratio, less than
    highFrequencyFactor, `Llama3` only. Omitted: 1, or a quarter of a highFrequencyFactor below 4."""
    high_frequency_factor: float = derived(4.0, gt=0, le=1024)
    """Waves shorter than originalMaxPositions over this are kept; a ratio, `Llama3` only. Omitted: 4, or four times a
    lowFrequencyFactor above 1."""
    original_max_positions: Annotated[int, Field(ge=1, le=2**31 - 1)] = 8192
    """Longest sequence before scaling, tokens; `Llama3` and `YaRN` only."""
    fast_turns: float = derived(32.0, gt=0, le=1024)
    """Pairs that turn more often in originalMaxPositions are kept; more than slowTurns, `YaRN` only. Omitted: 32."""
    slow_turns: float = derived(1.0, gt=0, lt=1024)
    """Pairs that turn less often are divided by the whole factor; `YaRN` only. Omitted: 1."""
    attention_factor: Annotated[float, Field(gt=0, le=16)] | None = None
    """Factor of the rotary embedding; a ratio, `YaRN` only. Omitted: 0.1 ln(factor) + 1."""

    @model_validator(mode="after")
    def _check_frequencies(self) -> Self:
        if self.factor is None and self.kind not in (RopeScalingKind.LLAMA3, RopeScalingKind.UNSCALED):
            raise ValueError(
                f"model.ropeScaling.factor is not given, but model.ropeScaling.kind is {self.kind}: give the ratio of "
                "the longest sequence to that before scaling"
            )
        self.set_if_omitted("low_frequency_factor", min(1.0, self.high_frequency_factor / 4))
        self.set_if_omitted("high_frequency_factor", min(1024.0, max(4.0, self.low_frequency_factor * 4)))
        if self.low_frequency_factor >= self.high_frequency_factor:
            msg = (
                f"model.ropeScaling.lowFrequencyFactor is {self.low_frequency_factor} but highFrequencyFactor is "
                f"{self.high_frequency_factor}: the low one must be the smaller; Llama 3.1 has 1 and 4"
            )
            raise ValueError(msg)
        self.set_if_omitted("fast_turns", min(1024.0, max(32.0, self.slow_turns * 2)))
        self.set_if_omitted("slow_turns", min(1.0, self.fast_turns / 2))
        if self.slow_turns >= self.fast_turns:
            msg = (
                f"model.ropeScaling.slowTurns is {self.slow_turns} but fastTurns is {self.fast_turns}: the slow one "
                "must be the smaller; YaRN has 1 and 32"
            )
            raise ValueError(msg)
        return self

    def stretch(self) -> RopeStretch | None:
        """Return the scaling as a shape has it; None for none."""
        factor = self.factor or _LLAMA_FACTOR
        match self.kind:
            case RopeScalingKind.UNSCALED:
                return None
            case RopeScalingKind.LINEAR | RopeScalingKind.DYNAMIC:
                return RopeStretch(kind=self.kind, factor=factor)
            case RopeScalingKind.YARN:
                return RopeStretch(
                    kind=self.kind,
                    factor=factor,
                    original_max_positions=self.original_max_positions,
                    fast_turns=self.fast_turns,
                    slow_turns=self.slow_turns,
                    attention_factor=self.attention_factor or compute_yarn_attention_factor(factor),
                )
            case RopeScalingKind.LLAMA3:
                return RopeStretch(
                    kind=self.kind,
                    factor=factor,
                    low_frequency_factor=self.low_frequency_factor,
                    high_frequency_factor=self.high_frequency_factor,
                    original_max_positions=self.original_max_positions,
                )


class ModelConfig(ContractModel):
    """A model; a field given here overrides that of the preset or of the file."""

    preset: ModelPreset = derived(ModelPreset.TINY)
    """The shape to start from. Omitted: Tiny, unless `path` or `weights` is given."""
    path: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """A Hugging Face `config.json` of a family in docs/models.md, or a folder with one, to start from in place of a
    preset. Only the shape is read; on a cluster it must be mounted in every worker."""
    weights: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """A Hugging Face folder (config.json and safetensors), mounted in every worker or s3://bucket/prefix, with the
    initial weights; the shape is the folder's. `trainium-trainer fetch-model` fetches a name on the hub ahead.
    Omitted: weights are drawn from `seed`."""
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
    Omitted: those of the preset or of the file, or numAttentionHeads if those do not divide it."""
    head_dim: Annotated[int, Field(ge=2, le=8192)] | None = None
    """Width of one attention head, an even number. Omitted: hiddenSize over numAttentionHeads, or the file's."""
    rope_theta: Annotated[float, Field(gt=0)] | None = None
    """Base of the rotary embedding: the longest wave is about 2 pi times it, positions."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary embedding; omitted: that of the preset or of the file."""
    max_positions: Annotated[int, Field(ge=8, le=2**31 - 1)] | None = None
    """Longest sequence that the model is designed for, tokens; data.sequenceLength must not be above it, or above the
    original positions times the factor of `YaRN` and `Dynamic`."""
    norm_eps: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Epsilon of RMSNorm, added to the mean square."""
    tie_embeddings: bool | None = None
    """Share the embedding with the output projection."""
    initial_std: Annotated[float, Field(gt=0, le=1)] | None = None
    """Standard deviation of the initial weights; projections that end a residual branch have it divided by the root of
    twice the number of layers. Omitted: 0.02, or the file's."""

    def overriding(self, base: ModelShape) -> ModelShape:
        """Return `base` with the numbers that are given here."""
        given = {name: value for name, value in self if name not in NOT_SHAPE and value is not None}
        shape = replace(base, **given)
        alone = self.num_attention_heads is not None and self.num_key_value_heads is None
        if alone and shape.num_attention_heads % shape.num_key_value_heads:
            shape = replace(shape, num_key_value_heads=shape.num_attention_heads)
        if self.head_dim is None and {"hidden_size", "num_attention_heads"} & given.keys():
            shape = replace(shape, head_dim=max(1, shape.hidden_size // shape.num_attention_heads))
        return shape if self.rope_scaling is None else replace(shape, rope_stretch=self.rope_scaling.stretch())

    def known_shape(self) -> ModelShape | None:
        """Return the shape of the model; None if only a worker can read the file that defines it."""
        if self.path is not None or self.weights is not None:
            return None
        shape = self.overriding(PRESETS[self.preset])
        return shape if shape.vocab_size else replace(shape, vocab_size=USUAL_VOCABULARY)
