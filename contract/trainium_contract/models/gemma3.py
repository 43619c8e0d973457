"""PURE. Gemma 3 for text: norms at both ends of each branch, windows in five of six layers, a scaled embedding."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainium_contract.models.family import Family, bias_traits, window_fields, window_traits
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
_1B = ModelShape(
    family="gemma3_text",
    vocab_size=262_144,
    hidden_size=1152,
    intermediate_size=6912,
    num_layers=26,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=256,
    rope_theta=1_000_000.0,
    max_positions=32_768,
    norm_eps=1e-6,
    tie_embeddings=True,
    sliding_window=512,
    windowed=(True, True, True, True, True, False),
    windowed_rope=WindowedRope(theta=_WINDOWED_THETA),
    attention_multiplier=256**-0.5,
    **_TRAITS,
)
_4B = replace(
    _1B,
    vocab_size=262_208,
    hidden_size=2560,
    intermediate_size=10_240,
    num_layers=34,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_positions=131_072,
    sliding_window=1024,
    rope_stretch=RopeStretch(kind=RopeScalingKind.LINEAR, factor=8.0),
)


def _traits(config: Config) -> dict[str, Any]:
    pattern = config["sliding_window_pattern"]
    windows = window_traits(config, [bool((n + 1) % pattern) for n in range(config["num_hidden_layers"])])
    multiplier = config["query_pre_attn_scalar"] ** -0.5
    return _TRAITS | bias_traits(config) | windows | {"attention_multiplier": multiplier}


def _fields(shape: ModelShape) -> dict[str, Any]:
    windowed = shape.windowed_rope or WindowedRope()
    scalar = shape.head_dim if shape.attention_multiplier is None else round(shape.attention_multiplier**-2)
    return {
        "attention_bias": shape.attention_bias,
        "query_pre_attn_scalar": scalar,
        "rope_local_base_freq": windowed.theta or shape.rope_theta,
    } | window_fields(shape)


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
    traits=_traits,
    fixed={
        "hidden_activation": Activation.GELU_TANH.value,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": None,
    },
    has_windowed_rope=True,
    fields=_fields,
    presets={
        "Gemma3-270M": replace(_1B, hidden_size=640, intermediate_size=2048, num_layers=18),
        "Gemma3-1B": _1B,
        "Gemma3-4B": _4B,
        "Gemma3-12B": replace(
            _4B,
            hidden_size=3840,
            intermediate_size=15_360,
            num_layers=48,
            num_attention_heads=16,
            num_key_value_heads=8,
        ),
        "Gemma3-27B": replace(
            _4B,
            hidden_size=5376,
            intermediate_size=21_504,
            num_layers=62,
            num_attention_heads=32,
            num_key_value_heads=16,
            head_dim=128,
            attention_multiplier=168**-0.5,
        ),
    },
)
