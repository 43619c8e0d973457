"""Gemma 3 for text: norms at both ends of each branch, windows in five of six layers, a scaled embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainium_contract.models.family import Family, parse_presets, read_bias, read_window, write_window
from trainium_contract.models.shape import (
    Activation,
    ModelShape,
    NormPlacement,
    QueryKeyNorm,
    RopeScalingKind,
    RopeStretch,
    WindowedRope,
)

if TYPE_CHECKING:
    from trainium_contract.models.family import Config

_WINDOWED_THETA = 10_000.0
_TRAITS: dict[str, Any] = {
    "norm_placement": NormPlacement.BOTH,
    "has_centered_norms": True,
    "activation": Activation.GELU_TANH,
    "query_key_norm": QueryKeyNorm.EACH_HEAD,
    "has_scaled_embedding": True,
}
_SMALL = """
Gemma3-270M        262_144   640    2048  18   4   1  256  1_000_000   32_768  1e-6  tied
Gemma3-1B          262_144  1152    6912  26   4   1  256  1_000_000   32_768  1e-6  tied
"""
_LARGE = """
Gemma3-4B          262_208  2560  10_240  34   8   4  256  1_000_000  131_072  1e-6  tied
Gemma3-12B         262_208  3840  15_360  48  16   8  256  1_000_000  131_072  1e-6  tied
"""
_LARGEST = """
Gemma3-27B         262_208  5376  21_504  62  32  16  128  1_000_000  131_072  1e-6  tied
"""
_WINDOWS: dict[str, Any] = {
    "windowed": (True, True, True, True, True, False),
    "windowed_rope": WindowedRope(theta=_WINDOWED_THETA),
}
_STRETCH = RopeStretch(kind=RopeScalingKind.LINEAR, factor=8.0)


def _parse(table: str, window: int, scalar: int, stretch: RopeStretch | None = None) -> dict[str, ModelShape]:
    """Return presets with this window and `query_pre_attn_scalar`."""
    sizes = {"sliding_window": window, "attention_multiplier": scalar**-0.5, "rope_stretch": stretch}
    return parse_presets("gemma3_text", table, **sizes, **_WINDOWS, **_TRAITS)


def _read_traits(config: Config) -> dict[str, Any]:
    pattern = config["sliding_window_pattern"]
    windows = read_window(config, [bool((n + 1) % pattern) for n in range(config["num_hidden_layers"])])
    multiplier = config["query_pre_attn_scalar"] ** -0.5
    return _TRAITS | read_bias(config) | windows | {"attention_multiplier": multiplier}


def _write_fields(shape: ModelShape) -> dict[str, Any]:
    windowed = shape.windowed_rope or WindowedRope()
    scalar = shape.head_dim if shape.attention_multiplier is None else round(shape.attention_multiplier**-2)
    return {
        "attention_bias": shape.attention_bias,
        "query_pre_attn_scalar": scalar,
        "rope_local_base_freq": windowed.theta or shape.rope_theta,
    } | write_window(shape)


FAMILY = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    defaults={
        "attention_bias": False,
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": _WINDOWED_THETA,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "layer_types": None,
    },
    traits=_read_traits,
    fixed={
        "hidden_activation": Activation.GELU_TANH.value,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": None,
    },
    has_windowed_rope=True,
    fields=_write_fields,
    presets=_parse(_SMALL, 512, 256) | _parse(_LARGE, 1024, 256, _STRETCH) | _parse(_LARGEST, 1024, 168, _STRETCH),
)
