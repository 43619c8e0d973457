"""Llama shapes: the presets, and how a configuration overrides a preset or a Hugging Face configuration.

Invariant: a `ModelShape` is complete and consistent; everything that a wrong one could break is refused here, in one
sentence, before a device or a process group is touched.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainium_contract.trainer.model import ModelConfig, ModelPreset, RopeScalingKind
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from trainium_contract.trainer.config import TrainingConfig
    from trainium_contract.trainer.model import RopeScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeStretch:
    """Scaling of the rotary embedding; what `kind` does not use is left at 0."""

    kind: RopeScalingKind
    factor: float
    low_frequency_factor: float = 0.0
    high_frequency_factor: float = 0.0
    original_max_positions: int = 0


INITIAL_VERSION = 2
"""How a fresh start draws its weights: `models.initial`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Every number that defines a Llama model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    """Width of one attention head."""
    rope_theta: float
    rope_stretch: RopeStretch | None = None
    max_positions: int
    """Longest sequence that the model is meant for."""
    norm_eps: float
    tie_embeddings: bool
    initial_std: float = 0.02
    vocab_padding: int = 0
    """Rows at the end of the vocabulary that no token has, so that tensor-parallel ranks hold equal parts."""

    @property
    def num_parameters(self) -> int:
        """Trainable numbers of the whole model."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_attention_heads + self.num_key_value_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return embeddings + self.num_layers * layer + self.hidden_size

    def to_json(self) -> dict[str, Any]:
        """Plain values, for digests, logs and checkpoints."""
        values = asdict(self)
        if not self.vocab_padding:
            del values["vocab_padding"]  # digests of older checkpoints know nothing of it
        return values

    @staticmethod
    def from_json(values: dict[str, Any]) -> ModelShape:
        """The reverse of `to_json`, after JSON or not. Raises TypeError or ValueError for anything else."""
        if not isinstance(values, dict):
            raise TypeError(f"{values!r} is not a model's shape")
        stretch = values.get("rope_stretch")
        if stretch is not None:
            stretch = RopeStretch(**stretch | {"kind": RopeScalingKind(stretch["kind"])})
        return ModelShape(**values | {"rope_stretch": stretch})


_TINY = ModelShape(
    vocab_size=0,
    hidden_size=96,
    intermediate_size=256,
    num_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=24,
    rope_theta=10_000.0,
    max_positions=8192,
    norm_eps=1e-5,
    tie_embeddings=True,
)
_LLAMA2_7B = ModelShape(
    vocab_size=32_000,
    hidden_size=4096,
    intermediate_size=11_008,
    num_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    head_dim=128,
    rope_theta=10_000.0,
    max_positions=4096,
    norm_eps=1e-5,
    tie_embeddings=False,
)
_LLAMA3_8B = replace(
    _LLAMA2_7B,
    vocab_size=128_256,
    intermediate_size=14_336,
    num_key_value_heads=8,
    rope_theta=500_000.0,
    max_positions=8192,
)
_LLAMA3_70B = replace(
    _LLAMA3_8B, hidden_size=8192, intermediate_size=28_672, num_layers=80, num_attention_heads=64, num_key_value_heads=8
)
_LLAMA31_STRETCH = RopeStretch(
    kind=RopeScalingKind.LLAMA3,
    factor=8.0,
    low_frequency_factor=1.0,
    high_frequency_factor=4.0,
    original_max_positions=8192,
)
PRESETS: dict[ModelPreset, ModelShape] = {
    ModelPreset.TINY: _TINY,
    ModelPreset.SMALL: replace(
        _TINY,
        hidden_size=384,
        intermediate_size=1024,
        num_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=48,
    ),
    ModelPreset.LLAMA2_7B: _LLAMA2_7B,
    ModelPreset.LLAMA2_13B: replace(
        _LLAMA2_7B,
        hidden_size=5120,
        intermediate_size=13_824,
        num_layers=40,
        num_attention_heads=40,
        num_key_value_heads=40,
    ),
    ModelPreset.LLAMA2_70B: replace(_LLAMA3_70B, vocab_size=32_000, rope_theta=10_000.0, max_positions=4096),
    ModelPreset.LLAMA3_8B: _LLAMA3_8B,
    ModelPreset.LLAMA3_70B: _LLAMA3_70B,
    ModelPreset.LLAMA31_8B: replace(_LLAMA3_8B, max_positions=131_072, rope_stretch=_LLAMA31_STRETCH),
    ModelPreset.LLAMA31_70B: replace(_LLAMA3_70B, max_positions=131_072, rope_stretch=_LLAMA31_STRETCH),
    ModelPreset.LLAMA32_1B: replace(
        _LLAMA3_8B,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        head_dim=64,
        tie_embeddings=True,
        max_positions=131_072,
        rope_stretch=replace(_LLAMA31_STRETCH, factor=32.0),
    ),
}
"""Published shapes (the models' own `config.json`); a vocabulary of 0 stands for the tokenizer's."""


def resolve_shape(model: ModelConfig, tokenizer_vocabulary: int, *, tensor: int = 1) -> ModelShape:
    """The preset or the Hugging Face configuration with the overrides, for `tensor` tensor-parallel ranks.

    Raises UserError when the file cannot be used, when the vocabulary is smaller than the tokenizer's, or when a width
    cannot be divided into heads.
    """
    if model.weights is not None:
        return _shape_of_weights(model, model.weights, tokenizer_vocabulary, tensor)
    if model.path is None:
        base = PRESETS[model.preset]
    else:
        from trainium_trainer.models.huggingface import read_shape  # noqa: PLC0415 - only who names a file

        base = read_shape(Path(model.path).expanduser())
    given = {name: value for name, value in model if name not in _NOT_SHAPE and value is not None}
    shape = replace(base, **given)
    if model.head_dim is None and {"hidden_size", "num_attention_heads"} & given.keys():
        _divides("model.hiddenSize", shape.hidden_size, "model.numAttentionHeads", shape.num_attention_heads)
        shape = replace(shape, head_dim=shape.hidden_size // shape.num_attention_heads)
    if model.rope_scaling is not None:
        shape = replace(shape, rope_stretch=stretch_of(model.rope_scaling))
    if shape.vocab_size == 0:
        shape = replace(shape, vocab_size=tokenizer_vocabulary)
    if shape.vocab_size < tokenizer_vocabulary:
        raise UserError(
            f"model.vocabSize is {shape.vocab_size} but the tokenizer has {tokenizer_vocabulary} entries: "
            f"set model.vocabSize to at least {tokenizer_vocabulary}, or use a smaller tokenizer"
        )
    _divides("model.numAttentionHeads", shape.num_attention_heads, "model.numKeyValueHeads", shape.num_key_value_heads)
    if shape.head_dim % 2:
        raise UserError(
            f"model.hiddenSize {shape.hidden_size} over model.numAttentionHeads {shape.num_attention_heads} makes "
            f"heads of width {shape.head_dim}, but the rotary embedding needs an even width: change one of them, or "
            "set model.headDim"
            if model.head_dim is None
            else f"model.headDim is {shape.head_dim}, but the rotary embedding needs an even width: use an even number"
        )
    return shape


_NOT_SHAPE = ("preset", "path", "weights", "rope_scaling")
_CHANGEABLE = ("max_positions", "rope_theta", "norm_eps", "initial_std")
"""What may differ from the model that a run begins with: no weight has its size from it."""
_PADDED_TO = 128


def _shape_of_weights(model: ModelConfig, location: str, tokenizer_vocabulary: int, tensor: int) -> ModelShape:
    """The shape of the model to begin with, its vocabulary grown to the tokenizer's and padded for the ranks.

    It is padded only where the ranks cannot share it as it is, and then to a multiple of 128 too, so that it is the
    same at every usual degree.
    """
    from trainium_trainer.weights import shape_of  # noqa: PLC0415 - only who begins with a model

    base = shape_of(location)
    given = {name: value for name, value in model if name not in _NOT_SHAPE and value is not None}
    for name, value in given.items():
        if name not in _CHANGEABLE and getattr(base, name) != value:
            field = ModelConfig.model_fields[name].alias
            raise UserError(
                f"model.{field} is {value}, but the model at {location} has {getattr(base, name)}: leave model.{field} "
                "out"
            )
    stretch = base.rope_stretch if model.rope_scaling is None else stretch_of(model.rope_scaling)
    known = max(base.vocab_size, tokenizer_vocabulary)
    padded = known
    if known % tensor:
        unit = math.lcm(_PADDED_TO, tensor)
        padded = -(-known // unit) * unit
    return replace(base, **given, rope_stretch=stretch, vocab_size=padded, vocab_padding=padded - known)


def stretch_of(scaling: RopeScaling) -> RopeStretch | None:
    """The core's form of a configured scaling; None for none."""
    match scaling.kind:
        case RopeScalingKind.UNSCALED:
            return None
        case RopeScalingKind.LINEAR:
            return RopeStretch(kind=scaling.kind, factor=scaling.factor)
        case RopeScalingKind.LLAMA3:
            return RopeStretch(
                kind=scaling.kind,
                factor=scaling.factor,
                low_frequency_factor=scaling.low_frequency_factor,
                high_frequency_factor=scaling.high_frequency_factor,
                original_max_positions=scaling.original_max_positions,
            )


def check_parallelism(config: TrainingConfig, shape: ModelShape, world_size: int) -> None:
    """Raise UserError when the model, the sequence or the batch cannot be divided over `world_size` ranks."""
    length = config.data.sequence_length
    if length > shape.max_positions:
        raise UserError(
            f"data.sequenceLength is {length} but the model is meant for at most {shape.max_positions} positions: "
            "lower it, or set model.maxPositions (and think of model.ropeScaling)"
        )
    tensor = config.parallelism.tensor
    for field, value in (
        ("model.numAttentionHeads", shape.num_attention_heads),
        ("model.intermediateSize", shape.intermediate_size),
        ("model.vocabSize", shape.vocab_size),
    ):
        _divides(field, value, "parallelism.tensor", tensor)
    heads = shape.num_key_value_heads
    if heads % tensor and tensor % heads:
        raise UserError(
            f"model.numKeyValueHeads is {heads}, which neither is divisible by parallelism.tensor {tensor} nor divides "
            "it: change one of them"
        )
    if config.parallelism.sequence:
        _divides("data.sequenceLength", length, "parallelism.tensor", tensor)
    stages = config.parallelism.pipeline * config.parallelism.stages_per_rank
    if stages > shape.num_layers:
        raise UserError(
            f"parallelism.pipeline {config.parallelism.pipeline} x parallelism.stagesPerRank "
            f"{config.parallelism.stages_per_rank} is more than the {shape.num_layers} layers of the model "
            "(model.numLayers): each stage needs one; lower them"
        )
    if config.parallelism.pipeline == 1 and config.parallelism.stages_per_rank > 1:
        raise UserError(
            f"parallelism.stagesPerRank is {config.parallelism.stages_per_rank} but parallelism.pipeline is 1: only a "
            "pipeline has stages; raise parallelism.pipeline or leave parallelism.stagesPerRank out"
        )
    group = tensor * config.parallelism.pipeline
    by = "parallelism.tensor" if group == tensor else "parallelism.tensor x pipeline"
    _divides("the number of ranks", world_size, by, group)
    if config.batch.micro_size > config.batch.global_size:
        raise UserError(
            f"batch.microSize is {config.batch.micro_size} but batch.globalSize is {config.batch.global_size}: every "
            "pass of every rank would be partly empty; lower batch.microSize or raise batch.globalSize"
        )


def _divides(field: str, value: int, by: str, divisor: int) -> None:
    if value % divisor:
        raise UserError(
            f"{field} is {value}, which is not divisible by {by} {divisor}: use a multiple of {divisor} or change {by}"
        )
