"""Read and write Hugging Face's `config.json`; the names of parameters are Hugging Face's.

Reads files of any version of `transformers`, as version 5: `rope_scaling` with `type` or `rope_type` and `rope_theta`
beside it (to 4.x), or `rope_parameters` with both inside (from 5). What differs between families is in
`trainium_contract.models.families`.

Guarantees:
- A configuration that would give a different model here is refused with a reason.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from trainium_contract.models.families import FAMILIES
from trainium_contract.models.family import FULL, SLIDING
from trainium_contract.models.shape import (
    ModelShape,
    RopeScalingKind,
    RopeStretch,
    WindowedRope,
    compute_yarn_attention_factor,
)
from trainium_trainer.exits import UserError
from trainium_trainer.validation_errors import validate

if TYPE_CHECKING:
    from pathlib import Path

    from trainium_contract.models.family import Family

_log = logging.getLogger("trainium.train")
CONFIG_NAME = "config.json"
_DEFAULT_THETA = 10_000.0
_Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
_Positive = Annotated[float, Field(gt=0)]


class _Rope(BaseModel):
    """The fields of `rope_scaling` or `rope_parameters`."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    rope_type: str | None = None
    type: str | None = None
    rope_theta: _Positive | None = None
    factor: Annotated[float, Field(ge=1)] | None = None
    low_freq_factor: _Positive | None = None
    high_freq_factor: _Positive | None = None
    original_max_position_embeddings: _Count | None = None
    beta_fast: _Positive | None = None
    beta_slow: _Positive | None = None
    attention_factor: _Positive | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    llama_4_scaling_beta: float | None = None

    @property
    def kind(self) -> str:
        """The type of the scaling, by either name."""
        return self.rope_type or self.type or "default"


class _Config(BaseModel):
    """The fields that define a model of any family; a family may have other defaults."""

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
    max_position_embeddings: _Count = 2048
    rms_norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    initializer_range: Annotated[float, Field(gt=0, le=1)] = 0.02
    tie_word_embeddings: bool = False
    rope_theta: _Positive | None = None
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    windowed_rope_parameters: _Rope | None = None
    """Those of the layers with a window, if the family has them apart."""
    attention_dropout: Annotated[float, Field(ge=0, le=1)] = 0.0
    # Fields that only some families have:
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: _Count | None = None
    use_sliding_window: bool = True
    max_window_layers: Annotated[int, Field(ge=0)] = 0
    sliding_window_pattern: _Count = 6
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None
    rope_local_base_freq: _Positive | None = None
    query_pre_attn_scalar: _Count = 256
    no_rope_layers: list[Literal[0, 1]] | None = None
    no_rope_layer_interval: _Count = 4
    embedding_multiplier: _Positive = 1.0
    attention_multiplier: _Positive = 1.0
    residual_multiplier: _Positive = 1.0
    logits_scaling: _Positive = 1.0


_WITHOUT_EFFECT: dict[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "layer_types": FULL,
    "rope_local_base_freq": None,
    "query_pre_attn_scalar": None,
    "no_rope_layers": 1,
    "embedding_multiplier": 1.0,
    "attention_multiplier": None,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
"""Fields that only some families have, with the neutral value; for lists, the neutral value of each element."""


def read_shape(path: Path) -> ModelShape:
    """Return the shape that a `config.json`, or a folder with one, describes. Raises UserError."""
    file = path / CONFIG_NAME if path.is_dir() else path
    try:
        document = json.loads(file.read_bytes())
    except OSError as error:
        raise UserError(
            f"model.path {path}: there is no {CONFIG_NAME} that can be read ({error.strerror}): correct the path, "
            "or use model.preset"
        ) from error
    except ValueError as error:
        raise UserError(f"model.path {file}: not valid JSON ({error}): replace the file") from error
    return parse_shape(document, f"model.path {file}")


def parse_shape(document: Any, where: str) -> ModelShape:
    """Return the shape that the contents of a `config.json` describe; `where` begins an error. Raises UserError."""
    if not isinstance(document, dict):
        raise UserError(f"{where}: holds a {type(document).__name__}, not fields: replace the file")
    family = _find_family(where, document)
    _refuse_foreign_fields(where, document, family)
    fields = dict(family.defaults) | _separate_ropes(where, document, family)
    config = validate(_Config, fields, f"{where}: ")
    _refuse_other_arithmetic(where, document, family)
    _refuse_short_lists(where, config)
    if config.attention_dropout:
        _log.warning(
            "%s: attention_dropout %s has no effect: attention is trained as it is evaluated, without it",
            where,
            config.attention_dropout,
        )
    rope = config.rope_scaling or config.rope_parameters or _Rope()
    theta = rope.rope_theta or config.rope_theta or _DEFAULT_THETA
    traits = family.traits(config.model_dump())
    if (windowed := config.windowed_rope_parameters) is not None:
        # transformers takes `rope_theta` beside the parameters for the layers without a window only.
        other = windowed.rope_theta or config.rope_local_base_freq or family.defaults.get("rope_theta", _DEFAULT_THETA)
        stretch = _stretch(where, f"rope_parameters.{SLIDING}", windowed, config)
        traits["windowed_rope"] = WindowedRope(theta=None if other == theta else other, stretch=stretch)
    return ModelShape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.head_dim or _find_head_dim(where, config),
        rope_theta=theta,
        rope_stretch=_stretch(where, "rope_scaling" if config.rope_scaling else "rope_parameters", rope, config),
        max_positions=config.max_position_embeddings,
        norm_eps=config.rms_norm_eps,
        tie_embeddings=config.tie_word_embeddings,
        initial_std=config.initializer_range,
        family=family.model_type,
        **traits,
    )


def _find_family(where: str, document: dict[str, Any]) -> Family:
    names, kind = document.get("architectures") or [], document.get("model_type")
    for family in FAMILIES.values():
        if kind is None and family.architecture in names:
            return family
        # transformers goes by model_type; another class of the family, as LlamaModel, has the same layers.
        stem = family.architecture.removesuffix("ForCausalLM")
        if kind == family.model_type and (not names or any(str(name).startswith(stem) for name in names)):
            return family
    described = ", ".join(map(str, names)) or "no architecture"
    described += f" (model_type {kind!r})" if kind else ""
    text = document.get("text_config")
    if isinstance(text, dict) and text.get("model_type") in FAMILIES:
        architecture = FAMILIES[text["model_type"]].architecture
        raise UserError(
            f"{where}: describes {described}, of which only the language model can be trained: save it apart as "
            f"{architecture}, as docs/models.md shows, or train the whole model in a program (spec.program)"
        )
    architectures = ", ".join(sorted(family.architecture for family in FAMILIES.values()))
    raise UserError(
        f"{where}: describes {described}, but the built-in trainer has only {architectures}: use a model of one of "
        "them, or train yours with transformers in a program (spec.program, docs/program.md)"
    )


def _refuse_foreign_fields(where: str, document: dict[str, Any], family: Family) -> None:
    """Raise UserError for a field of another family that would change what this one computes."""
    for name, neutral in _WITHOUT_EFFECT.items():
        value = document.get(name)
        if name in family.defaults or value is None:
            continue
        if any(item != neutral for item in (value if isinstance(value, list) else [value])):
            raise UserError(
                f"{where}: {name} is {value!r}, but {family.architecture} has no such field: correct architectures and "
                f"model_type, or remove {name}"
            )


def _refuse_other_arithmetic(where: str, document: dict[str, Any], family: Family) -> None:
    for field, wanted in {**family.fixed, "partial_rotary_factor": 1.0}.items():
        value = document.get(field) or wanted
        if value != wanted:
            raise UserError(
                f"{where}: {field} is {value!r}, but this trainer has only {wanted!r}: change it or use another model"
            )


def _refuse_short_lists(where: str, config: _Config) -> None:
    for field, kinds in (("layer_types", config.layer_types), ("no_rope_layers", config.no_rope_layers)):
        if kinds is not None and len(kinds) < config.num_hidden_layers:
            raise UserError(
                f"{where}: {field} describes {len(kinds)} layers, but num_hidden_layers is {config.num_hidden_layers}: "
                "correct one of them"
            )


def _find_head_dim(where: str, config: _Config) -> int:
    if config.hidden_size % config.num_attention_heads:
        raise UserError(
            f"{where}: hidden_size {config.hidden_size} is not divisible by num_attention_heads "
            f"{config.num_attention_heads} and there is no head_dim: correct the file"
        )
    return config.hidden_size // config.num_attention_heads


def _separate_ropes(where: str, document: dict[str, Any], family: Family) -> dict[str, Any]:
    """Return the fields with the rotary embeddings apart: of layers without and with a window, if the family has both.

    Raises UserError if `rope_parameters` differ by layer in a family without.
    """
    scaling = document.get("rope_scaling") or None
    ropes = document.get("rope_parameters") or family.defaults.get("rope_parameters") or {}
    by_layer = isinstance(ropes, dict) and (FULL in ropes or SLIDING in ropes)
    if not family.has_windowed_rope:
        if by_layer:
            raise UserError(
                f"{where}: rope_parameters differ by layer, which {family.architecture} has not: correct it"
            )
        return document | {"rope_scaling": scaling, "rope_parameters": ropes or None}
    if ropes and not by_layer:
        _log.warning("%s: rope_parameters have no effect without %s and %s, as in transformers", where, FULL, SLIDING)
        ropes = {}
    full = ropes.get(FULL) or {}
    if isinstance(full, dict) and isinstance(scaling, dict):
        full, scaling = full | scaling, None
    return document | {
        "rope_scaling": scaling,
        "rope_parameters": full,
        "windowed_rope_parameters": ropes.get(SLIDING) or {},
    }


def _stretch(where: str, field: str, rope: _Rope, config: _Config) -> RopeStretch | None:
    """Return the scaling that a field describes; None if there is none. Raises UserError."""
    kinds = {"linear": RopeScalingKind.LINEAR, "llama3": RopeScalingKind.LLAMA3}
    kinds |= {"dynamic": RopeScalingKind.DYNAMIC, "yarn": RopeScalingKind.YARN}
    if rope.kind == "default":
        return None
    if rope.kind not in kinds:
        raise UserError(
            f"{where}: {field} has the type {rope.kind!r}, but this trainer has only 'default', "
            f"{', '.join(map(repr, kinds))}: use another model, or replace it by model.ropeScaling after removing it "
            "from the file"
        )
    needed = {"factor": rope.factor}
    if rope.kind == "llama3":
        needed |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position_embeddings,
        }
    missing = [name for name, value in needed.items() if value is None]
    if missing:
        raise UserError(f"{where}: {field} of type {rope.kind!r} lacks {', '.join(missing)}: correct the file")
    assert rope.factor is not None
    original = rope.original_max_position_embeddings or config.max_position_embeddings
    match kinds[rope.kind]:
        case RopeScalingKind.LLAMA3:
            low, high = rope.low_freq_factor or 0.0, rope.high_freq_factor or 0.0
            _refuse_unordered(where, f"{field}.low_freq_factor", low, "high_freq_factor", high)
            return RopeStretch(
                kind=RopeScalingKind.LLAMA3,
                factor=rope.factor,
                low_frequency_factor=low,
                high_frequency_factor=high,
                original_max_positions=original,
            )
        case RopeScalingKind.YARN:
            fast, slow = rope.beta_fast or 32.0, rope.beta_slow or 1.0
            _refuse_unordered(where, f"{field}.beta_slow", slow, "beta_fast", fast)
            return RopeStretch(
                kind=RopeScalingKind.YARN,
                factor=rope.factor,
                original_max_positions=original,
                fast_turns=fast,
                slow_turns=slow,
                attention_factor=rope.attention_factor or _compute_attention_factor(rope),
                whole_pairs=rope.truncate,
            )
        case kind:
            return RopeStretch(kind=kind, factor=rope.factor)


def _compute_attention_factor(rope: _Rope) -> float:
    assert rope.factor is not None
    if rope.mscale and rope.mscale_all_dim:
        return compute_yarn_attention_factor(rope.factor, rope.mscale) / compute_yarn_attention_factor(
            rope.factor, rope.mscale_all_dim
        )
    return compute_yarn_attention_factor(rope.factor)


def _refuse_unordered(where: str, field: str, less: float, other: str, more: float) -> None:
    if less >= more:
        raise UserError(f"{where}: {field} {less} must be less than {other} {more}: correct it")


def to_config(shape: ModelShape) -> dict[str, Any]:
    """Return the contents of a `config.json` for a shape, readable by `transformers` 4 and 5."""
    family, rope = FAMILIES[shape.family], _to_rope(shape.rope_stretch)
    if shape.query_growth is not None:
        rope["llama_4_scaling_beta"] = shape.query_growth
    parameters: dict[str, Any] = {"rope_theta": shape.rope_theta, **rope}
    if (windowed := shape.windowed_rope) is not None:
        other = {"rope_theta": windowed.theta or shape.rope_theta, **_to_rope(windowed.stretch)}
        parameters = {FULL: parameters, SLIDING: other}
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "initializer_range": shape.initial_std,
        "tie_word_embeddings": shape.tie_embeddings,
        "rope_theta": shape.rope_theta,
        "rope_scaling": rope if shape.rope_stretch else None,
        "rope_parameters": parameters,
        **family.fixed,
        **family.fields(shape),
        "attention_dropout": 0.0,
    }


def _to_rope(stretch: RopeStretch | None) -> dict[str, Any]:
    """Convert a scaling to the fields of `rope_parameters`."""
    if stretch is None:
        return {"rope_type": "default"}
    rope = {"rope_type": str(stretch.kind).lower(), "factor": stretch.factor}
    match stretch.kind:
        case RopeScalingKind.LLAMA3:
            rope |= {
                "low_freq_factor": stretch.low_frequency_factor,
                "high_freq_factor": stretch.high_frequency_factor,
                "original_max_position_embeddings": stretch.original_max_positions,
            }
        case RopeScalingKind.YARN:
            rope |= {
                "original_max_position_embeddings": stretch.original_max_positions,
                "beta_fast": stretch.fast_turns,
                "beta_slow": stretch.slow_turns,
                "attention_factor": stretch.attention_factor,
                "truncate": stretch.whole_pairs,
            }
    return rope
