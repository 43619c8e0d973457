"""Resolve the shape of a model from a preset, a Hugging Face configuration or a base model.

Guarantees:
- A shape is consistent and can be divided over the ranks.
- An invalid shape is refused here, with one sentence, before a device or a process group is used.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainium_contract.models.families import PRESETS
from trainium_contract.trainer.model import NOT_SHAPE, ModelConfig
from trainium_contract.trainer.tuning import TuningMethod
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from trainium_contract.models.shape import ModelShape
    from trainium_contract.trainer.config import TrainingConfig
    from trainium_contract.trainer.tuning import TuningConfig


def resolve_shape(
    model: ModelConfig, tokenizer_vocabulary: int, *, tensor: int = 1, tuning: TuningConfig | None = None
) -> ModelShape:
    """Return the preset or the Hugging Face configuration with the overrides, for `tensor` tensor-parallel ranks.

    An initial adapter of `tuning` can change the vocabulary and untie the output projection. Raises UserError if the
    file is unusable, the vocabulary is smaller than the tokenizer's, or a width cannot be divided into heads.
    """
    if model.weights is not None:
        return _read_weights_shape(model, read_initial_shape(model.weights, tuning), tokenizer_vocabulary, tensor)
    if model.path is None:
        base = PRESETS[model.preset]
    else:
        from trainium_trainer.models.huggingface import read_shape  # noqa: PLC0415 - only who names a file

        base = read_shape(Path(model.path).expanduser())
    if model.head_dim is None and (model.hidden_size is not None or model.num_attention_heads is not None):
        hidden, heads = model.hidden_size or base.hidden_size, model.num_attention_heads or base.num_attention_heads
        _refuse_indivisible("model.hiddenSize", hidden, "model.numAttentionHeads", heads)
    shape = model.overriding(base)
    if shape.vocab_size == 0:
        shape = replace(shape, vocab_size=tokenizer_vocabulary)
    if shape.vocab_size < tokenizer_vocabulary:
        raise UserError(
            f"model.vocabSize is {shape.vocab_size} but the tokenizer has {tokenizer_vocabulary} entries: "
            f"set model.vocabSize to at least {tokenizer_vocabulary}, or use a smaller tokenizer"
        )
    _refuse_indivisible(
        "model.numAttentionHeads", shape.num_attention_heads, "model.numKeyValueHeads", shape.num_key_value_heads
    )
    if shape.head_dim % 2:
        raise UserError(
            f"model.hiddenSize {shape.hidden_size} over model.numAttentionHeads {shape.num_attention_heads} makes "
            f"heads of width {shape.head_dim}, but the rotary embedding needs an even width: change one of them, or "
            "set model.headDim"
            if model.head_dim is None
            else f"model.headDim is {shape.head_dim}, but the rotary embedding needs an even width: use an even number"
        )
    return shape


_CHANGEABLE = ("max_positions", "rope_theta", "norm_eps", "initial_std")
"""The fields that may differ from the initial model, because no weight's size depends on them."""
_PADDED_TO = 128


def read_initial_shape(location: str, tuning: TuningConfig | None) -> ModelShape:
    """Return the shape of the initial model with the initial adapter of `tuning`. Raises UserError, StorageError."""
    from trainium_trainer.weights.folder import open_shape  # noqa: PLC0415 - only who begins with a model

    base = open_shape(location)
    if tuning is None or tuning.method is not TuningMethod.LORA or tuning.lora.adapter is None:
        return base
    from trainium_trainer.weights.adapter import AdapterWeights  # noqa: PLC0415 - as above

    return AdapterWeights.open(tuning.lora.adapter, tied=base.tie_embeddings).compute_shape(base)


def _read_weights_shape(model: ModelConfig, base: ModelShape, tokenizer_vocabulary: int, tensor: int) -> ModelShape:
    """Return the shape of the initial model, its vocabulary grown to the tokenizer's and padded for the ranks.

    It is padded only if the ranks cannot divide it, and then also to a multiple of 128, so that it is the same at every
    usual degree.
    """
    overrides = {name: value for name, value in model if name not in NOT_SHAPE and value is not None}
    for name, value in overrides.items():
        if name not in _CHANGEABLE and getattr(base, name) != value:
            field = ModelConfig.model_fields[name].alias
            raise UserError(
                f"model.{field} is {value}, but the model at {model.weights} has {getattr(base, name)}: leave "
                f"model.{field} out"
            )
    stretch = base.rope_stretch if model.rope_scaling is None else model.rope_scaling.stretch()
    vocabulary_size = max(base.vocab_size, tokenizer_vocabulary)
    padded = vocabulary_size
    if vocabulary_size % tensor:
        unit = math.lcm(_PADDED_TO, tensor)
        padded = -(-vocabulary_size // unit) * unit
    return replace(base, **overrides, rope_stretch=stretch, vocab_size=padded, vocab_padding=padded - vocabulary_size)


def check_parallelism(config: TrainingConfig, shape: ModelShape, world_size: int) -> None:
    """Raise UserError if the model, the sequence or the batch cannot be divided over `world_size` ranks."""
    length = config.data.sequence_length
    if length > shape.longest_sequence:
        raise UserError(
            f"data.sequenceLength is {length} but the model is meant for at most {shape.longest_sequence} positions: "
            "lower it, or set model.maxPositions (and think of model.ropeScaling)"
        )
    tensor = config.parallelism.tensor
    for field, value in (
        ("model.numAttentionHeads", shape.num_attention_heads),
        ("model.intermediateSize", shape.intermediate_size),
        ("model.vocabSize", shape.vocab_size),
    ):
        _refuse_indivisible(field, value, "parallelism.tensor", tensor)
    heads = shape.num_key_value_heads
    if heads % tensor and tensor % heads:
        raise UserError(
            f"model.numKeyValueHeads is {heads}, which neither is divisible by parallelism.tensor {tensor} nor divides "
            "it: change one of them"
        )
    context = config.parallelism.context
    if context > 1:
        _refuse_indivisible(
            "data.sequenceLength", length, "2 x parallelism.context (two chunks on each rank)", 2 * context
        )
    if config.parallelism.sequence:
        by = "parallelism.tensor" if context == 1 else "parallelism.tensor x context"
        _refuse_indivisible("data.sequenceLength", length, by, tensor * context)
    if config.parallelism.pipeline > shape.num_layers:
        raise UserError(
            f"parallelism.pipeline {config.parallelism.pipeline} is more than the {shape.num_layers} layers of the "
            "model (model.numLayers): each stage needs one; lower it"
        )
    others = [name for name in ("pipeline", "context") if getattr(config.parallelism, name) > 1]
    _refuse_indivisible(
        "the number of ranks", world_size, " x ".join(["parallelism.tensor", *others]), config.parallelism.group
    )
    if config.batch.micro_size > config.batch.global_size:
        raise UserError(
            f"batch.microSize is {config.batch.micro_size} but batch.globalSize is {config.batch.global_size}: every "
            "pass of every rank would be partly empty; lower batch.microSize or raise batch.globalSize"
        )


def _refuse_indivisible(field: str, value: int, by: str, divisor: int) -> None:
    if value % divisor:
        raise UserError(
            f"{field} is {value}, which is not divisible by {by} {divisor}: use a multiple of {divisor} or change {by}"
        )
