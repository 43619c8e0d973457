"""Hugging Face's `config.json` in and out; parameter names are the same on both sides and need no translation.

Reads what `transformers` of any age wrote: `rope_scaling` with `type` or `rope_type` and `rope_theta` beside it (to
4.x), or `rope_parameters` with both inside (from 5). Invariant: a configuration that would not be the same model here
is refused in one sentence.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainium_contract.trainer.model import RopeScalingKind
from trainium_trainer.exits import UserError
from trainium_trainer.models.shapes import ModelShape, RopeStretch
from trainium_trainer.validation_errors import explain

if TYPE_CHECKING:
    from pathlib import Path

CONFIG_NAME = "config.json"
_ARCHITECTURE = "LlamaForCausalLM"
_MODEL_TYPE = "llama"
_Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
_Positive = Annotated[float, Field(gt=0)]


class _Rope(BaseModel):
    """`rope_scaling` or `rope_parameters`."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    rope_type: str | None = None
    type: str | None = None
    rope_theta: _Positive | None = None
    factor: Annotated[float, Field(ge=1)] | None = None
    low_freq_factor: _Positive | None = None
    high_freq_factor: _Positive | None = None
    original_max_position_embeddings: _Count | None = None


class _Config(BaseModel):
    """The fields that define a Llama; the defaults are those of `LlamaConfig`."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    architectures: list[str] | None = None
    model_type: str | None = None
    vocab_size: _Count
    hidden_size: _Count
    intermediate_size: _Count
    num_hidden_layers: _Count
    num_attention_heads: _Count
    num_key_value_heads: _Count | None = None
    head_dim: _Count | None = None
    hidden_act: str = "silu"
    max_position_embeddings: _Count = 2048
    rms_norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    initializer_range: Annotated[float, Field(gt=0, le=1)] = 0.02
    tie_word_embeddings: bool = False
    rope_theta: _Positive | None = None
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: Annotated[float, Field(ge=0, le=1)] = 0.0
    partial_rotary_factor: _Positive = 1.0


def read_shape(path: Path) -> ModelShape:
    """Return the shape that a `config.json`, or a folder with one, describes. Raises UserError."""
    file = path / CONFIG_NAME if path.is_dir() else path
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"model.path {path}: there is no {CONFIG_NAME} that can be read ({error.strerror}): correct the path, "
            "or use model.preset"
        ) from error
    except ValueError as error:
        raise UserError(f"model.path {file}: not valid JSON ({error}): replace the file") from error
    return shape_of_document(document, f"model.path {file}")


def shape_of_document(document: Any, where: str) -> ModelShape:
    """Return the shape that the contents of a `config.json` describe; `where` begins the sentence of a refusal.

    Raises UserError.
    """
    if not isinstance(document, dict):
        raise UserError(f"{where}: holds a {type(document).__name__}, not fields: replace the file")
    _refuse_other_architectures(where, document)
    try:
        config = _Config.model_validate(document)
    except ValidationError as error:
        raise UserError(f"{where}: {explain(error, _Config)}") from error
    _refuse_other_arithmetic(where, config)
    return ModelShape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.head_dim or _head_dim(where, config),
        rope_theta=(config.rope_parameters and config.rope_parameters.rope_theta) or config.rope_theta or 10_000.0,
        rope_stretch=_stretch(where, config),
        max_positions=config.max_position_embeddings,
        norm_eps=config.rms_norm_eps,
        tie_embeddings=config.tie_word_embeddings,
        initial_std=config.initializer_range,
    )


def _refuse_other_architectures(where: str, document: dict[str, Any]) -> None:
    names, kind = document.get("architectures") or [], document.get("model_type")
    if (names and _ARCHITECTURE not in names) or (kind is not None and kind != _MODEL_TYPE) or not (names or kind):
        found = ", ".join(map(str, names)) or (f"model_type {kind!r}" if kind else "no architecture")
        raise UserError(
            f"{where}: describes {found}, but only {_ARCHITECTURE} can be trained: use the configuration of "
            "a Llama model"
        )


def _refuse_other_arithmetic(where: str, config: _Config) -> None:
    for field, value, wanted in (
        ("hidden_act", config.hidden_act, "silu"),
        ("attention_bias", config.attention_bias, False),
        ("mlp_bias", config.mlp_bias, False),
        ("attention_dropout", config.attention_dropout, 0.0),
        ("partial_rotary_factor", config.partial_rotary_factor, 1.0),
    ):
        if value != wanted:
            raise UserError(
                f"{where}: {field} is {value!r}, but this trainer has only {wanted!r}: change it or use another model"
            )


def _head_dim(where: str, config: _Config) -> int:
    if config.hidden_size % config.num_attention_heads:
        raise UserError(
            f"{where}: hidden_size {config.hidden_size} is not divisible by num_attention_heads "
            f"{config.num_attention_heads} and there is no head_dim: correct the file"
        )
    return config.hidden_size // config.num_attention_heads


def _stretch(where: str, config: _Config) -> RopeStretch | None:
    rope = config.rope_parameters or config.rope_scaling
    kind = (rope.rope_type or rope.type) if rope else None
    if rope is None or kind in (None, "default"):
        return None
    field = "rope_parameters" if config.rope_parameters else "rope_scaling"
    if kind not in ("linear", "llama3"):
        raise UserError(
            f"{where}: {field} has the type {kind!r}, but this trainer has only 'default', 'linear' and "
            "'llama3': use another model, or replace it by model.ropeScaling after removing it from the file"
        )
    needed = {"factor": rope.factor}
    if kind == "llama3":
        needed |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position_embeddings,
        }
    missing = [name for name, value in needed.items() if value is None]
    if missing:
        raise UserError(f"{where}: {field} of type {kind!r} lacks {', '.join(missing)}: correct the file")
    low, high = rope.low_freq_factor or 0.0, rope.high_freq_factor or 0.0
    if kind == "llama3" and low >= high:
        raise UserError(f"{where}: {field}.low_freq_factor {low} must be less than high_freq_factor {high}: correct it")
    assert rope.factor is not None
    if kind == "linear":
        return RopeStretch(kind=RopeScalingKind.LINEAR, factor=rope.factor)
    return RopeStretch(
        kind=RopeScalingKind.LLAMA3,
        factor=rope.factor,
        low_frequency_factor=low,
        high_frequency_factor=high,
        original_max_positions=rope.original_max_position_embeddings or 0,
    )


def to_config(shape: ModelShape) -> dict[str, Any]:
    """Return the contents of a `config.json` for a shape, readable by `transformers` 4 and 5."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if shape.rope_stretch is not None:
        rope = {"rope_type": str(shape.rope_stretch.kind).lower(), "factor": shape.rope_stretch.factor}
        if shape.rope_stretch.kind is RopeScalingKind.LLAMA3:
            rope |= {
                "low_freq_factor": shape.rope_stretch.low_frequency_factor,
                "high_freq_factor": shape.rope_stretch.high_frequency_factor,
                "original_max_position_embeddings": shape.rope_stretch.original_max_positions,
            }
    return {
        "architectures": [_ARCHITECTURE],
        "model_type": _MODEL_TYPE,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "initializer_range": shape.initial_std,
        "tie_word_embeddings": shape.tie_embeddings,
        "rope_theta": shape.rope_theta,
        "rope_scaling": rope if shape.rope_stretch else None,
        "rope_parameters": {"rope_theta": shape.rope_theta, **rope},
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
    }
