"""OLMo 2 and OLMo 3: norms after the branches, and of all heads of queries and keys; OLMo 3 with windows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainium_contract.models.family import Family, parse_presets, read_bias, read_window, write_window
from trainium_contract.models.shape import (
    NormPlacement,
    QueryKeyNorm,
    RopeScalingKind,
    RopeStretch,
    WindowedRope,
)

if TYPE_CHECKING:
    from trainium_contract.models.family import Config

_TRAITS: dict[str, Any] = {"norm_placement": NormPlacement.OUTPUTS, "query_key_norm": QueryKeyNorm.ALL_HEADS}
_DEFAULTS = {"attention_bias": False, "rms_norm_eps": 1e-5}
_PATTERN = (True, True, True, False)
"""Which layers of OLMo 3 have a window."""
_PRESETS2 = """
OLMo2-1B           100_352  2048    8192  16  16  16  128  500_000    4096  1e-6  -
OLMo2-7B           100_352  4096  11_008  32  32  32  128  500_000    4096  1e-6  -
OLMo2-13B          100_352  5120  13_824  40  40  40  128  500_000    4096  1e-6  -
OLMo2-32B          100_352  5120  27_648  64  40   8  128  500_000    4096  1e-6  -
"""
_PRESETS3 = """
OLMo3-7B           100_278  4096  11_008  32  32  32  128  500_000  65_536  1e-6  -
OLMo3-32B          100_278  5120  27_648  64  40   8  128  500_000  65_536  1e-6  -
"""
_STRETCH = RopeStretch(
    kind=RopeScalingKind.YARN,
    factor=8.0,
    original_max_positions=8192,
    fast_turns=32.0,
    slow_turns=1.0,
    attention_factor=1.2079441541679836,
)
_WINDOWS: dict[str, Any] = {
    "sliding_window": 4096,
    "windowed": _PATTERN,
    "windowed_rope": WindowedRope(),
    "rope_stretch": _STRETCH,
}


def _read_olmo3_traits(config: Config) -> dict[str, Any]:
    layers = range(config["num_hidden_layers"])
    windows = read_window(config, [_PATTERN[number % len(_PATTERN)] for number in layers])
    return _TRAITS | read_bias(config) | windows


OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    defaults=_DEFAULTS,
    traits=lambda config: _TRAITS | read_bias(config),
    fields=lambda shape: {"attention_bias": shape.attention_bias},
    presets=parse_presets("olmo2", _PRESETS2, **_TRAITS),
)
OLMO3 = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    defaults=_DEFAULTS | {"sliding_window": 4096, "layer_types": None, "rope_theta": 500_000.0},
    traits=_read_olmo3_traits,
    has_windowed_rope=True,
    fields=lambda shape: {"attention_bias": shape.attention_bias} | write_window(shape),
    presets=parse_presets("olmo3", _PRESETS3, **_TRAITS, **_WINDOWS),
)
