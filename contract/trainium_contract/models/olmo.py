"""PURE. OLMo 2 and OLMo 3: norms after the branches, and of all heads of queries and keys; OLMo 3 with windows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainium_contract.models.family import Family, bias_traits, window_fields, window_traits
from trainium_contract.models.shape import (
    ModelShape,
    NormPlacement,
    QueryKeyNorm,
    RopeScalingKind,
    RopeStretch,
    WindowedRope,
)

if TYPE_CHECKING:
    from trainium_contract.models.family import Config

_TRAITS = {"norm_placement": NormPlacement.OUTPUTS, "query_key_norm": QueryKeyNorm.ALL_HEADS}
_DEFAULTS = {"attention_bias": False, "rms_norm_eps": 1e-5}
_PATTERN = (True, True, True, False)
"""Which layers of OLMo 3 have a window."""
_OLMO2_7B = ModelShape(
    family="olmo2",
    vocab_size=100_352,
    hidden_size=4096,
    intermediate_size=11_008,
    num_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    head_dim=128,
    rope_theta=500_000.0,
    max_positions=4096,
    norm_eps=1e-6,
    tie_embeddings=False,
    norm_placement=NormPlacement.OUTPUTS,
    query_key_norm=QueryKeyNorm.ALL_HEADS,
)
_OLMO2_32B = replace(
    _OLMO2_7B,
    hidden_size=5120,
    intermediate_size=27_648,
    num_layers=64,
    num_attention_heads=40,
    num_key_value_heads=8,
)


def _olmo3(shape: ModelShape) -> ModelShape:
    """Return the OLMo 3 with the sizes of an OLMo 2."""
    return replace(
        shape,
        family="olmo3",
        vocab_size=100_278,
        max_positions=65_536,
        sliding_window=4096,
        windowed=_PATTERN,
        windowed_rope=WindowedRope(),
        rope_stretch=RopeStretch(
            kind=RopeScalingKind.YARN,
            factor=8.0,
            original_max_positions=8192,
            fast_turns=32.0,
            slow_turns=1.0,
            attention_factor=1.2079441541679836,
        ),
    )


def _olmo3_traits(config: Config) -> dict[str, Any]:
    layers = range(config["num_hidden_layers"])
    windows = window_traits(config, [_PATTERN[number % len(_PATTERN)] for number in layers])
    return _TRAITS | bias_traits(config) | windows


OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    defaults=_DEFAULTS,
    traits=lambda config: _TRAITS | bias_traits(config),
    fields=lambda shape: {"attention_bias": shape.attention_bias},
    presets={
        "OLMo2-1B": replace(
            _OLMO2_7B,
            hidden_size=2048,
            intermediate_size=8192,
            num_layers=16,
            num_attention_heads=16,
            num_key_value_heads=16,
        ),
        "OLMo2-7B": _OLMO2_7B,
        "OLMo2-13B": replace(
            _OLMO2_7B,
            hidden_size=5120,
            intermediate_size=13_824,
            num_layers=40,
            num_attention_heads=40,
            num_key_value_heads=40,
        ),
        "OLMo2-32B": _OLMO2_32B,
    },
)
OLMO3 = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    defaults=_DEFAULTS | {"sliding_window": 4096, "layer_types": None, "rope_theta": 500_000.0},
    traits=_olmo3_traits,
    has_windowed_rope=True,
    fields=lambda shape: {"attention_bias": shape.attention_bias} | window_fields(shape),
    presets={"OLMo3-7B": _olmo3(_OLMO2_7B), "OLMo3-32B": _olmo3(_OLMO2_32B)},
)
