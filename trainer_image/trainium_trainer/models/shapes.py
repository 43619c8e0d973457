"""Llama shapes: the presets, how a configuration overrides them, and which divisions must come out even.

Invariant: a `ModelShape` is complete and consistent; everything that a wrong one could break is refused here, in one
sentence, before a device or a process group is touched.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from trainium_contract.trainer import ModelConfig, ModelPreset
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from trainium_contract.trainer import TrainingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Every number that defines a Llama model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    rope_theta: float
    norm_eps: float
    tie_embeddings: bool

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def num_parameters(self) -> int:
        """Trainable numbers of the whole model."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_attention_heads + self.num_key_value_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return embeddings + self.num_layers * layer + self.hidden_size

    def to_json(self) -> dict[str, Any]:
        """Plain values, for digests and logs."""
        return asdict(self)


_TINY = ModelShape(
    vocab_size=0,
    hidden_size=96,
    intermediate_size=256,
    num_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    rope_theta=10_000.0,
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
    rope_theta=10_000.0,
    norm_eps=1e-5,
    tie_embeddings=False,
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
    ),
    ModelPreset.LLAMA2_7B: _LLAMA2_7B,
    ModelPreset.LLAMA3_8B: replace(
        _LLAMA2_7B,
        vocab_size=128_256,
        intermediate_size=14_336,
        num_key_value_heads=8,
        rope_theta=500_000.0,
    ),
}
"""Published shapes; a vocabulary of 0 stands for the tokenizer's."""


def resolve_shape(model: ModelConfig, tokenizer_vocabulary: int) -> ModelShape:
    """The preset with the configuration's overrides.

    Raises UserError when the vocabulary is smaller than the tokenizer's or a width cannot be divided into heads.
    """
    given = {name: value for name, value in model if name != "preset" and value is not None}
    shape = replace(PRESETS[model.preset], **given)
    if shape.vocab_size == 0:
        shape = replace(shape, vocab_size=tokenizer_vocabulary)
    if shape.vocab_size < tokenizer_vocabulary:
        raise UserError(
            f"model.vocabSize is {shape.vocab_size} but the tokenizer has {tokenizer_vocabulary} entries: "
            f"set model.vocabSize to at least {tokenizer_vocabulary}, or use a smaller tokenizer"
        )
    _divides("model.hiddenSize", shape.hidden_size, "model.numAttentionHeads", shape.num_attention_heads)
    _divides("model.numAttentionHeads", shape.num_attention_heads, "model.numKeyValueHeads", shape.num_key_value_heads)
    if shape.head_dim % 2:
        raise UserError(
            f"model.hiddenSize {shape.hidden_size} over model.numAttentionHeads {shape.num_attention_heads} makes "
            f"heads of width {shape.head_dim}, but the rotary embedding needs an even width: change one of them"
        )
    return shape


def check_parallelism(config: TrainingConfig, shape: ModelShape, world_size: int) -> None:
    """Raise UserError when the model, the sequence or the batch cannot be divided over `world_size` ranks."""
    tensor = config.parallelism.tensor
    for field, value in (
        ("model.numAttentionHeads", shape.num_attention_heads),
        ("model.numKeyValueHeads", shape.num_key_value_heads),
        ("model.intermediateSize", shape.intermediate_size),
        ("model.vocabSize", shape.vocab_size),
    ):
        _divides(field, value, "parallelism.tensor", tensor)
    if config.parallelism.sequence:
        _divides("data.sequenceLength", config.data.sequence_length, "parallelism.tensor", tensor)
    _divides("the number of ranks", world_size, "parallelism.tensor", tensor)
    dp_size = world_size // tensor
    if config.batch.global_size % (dp_size * config.batch.micro_size):
        raise UserError(
            f"batch.globalSize {config.batch.global_size} cannot be divided over {dp_size} data-parallel ranks x "
            f"batch.microSize {config.batch.micro_size}: use a multiple of {dp_size * config.batch.micro_size}, "
            "or another number of workers"
        )


def _divides(field: str, value: int, by: str, divisor: int) -> None:
    if value % divisor:
        raise UserError(
            f"{field} is {value}, which is not divisible by {by} {divisor}: use a multiple of {divisor} or change {by}"
        )
