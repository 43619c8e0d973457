"""Mistral and Ministral: Llama whose layers may see a window of the latest positions only.

Ministral has the window in some layers. Ministral 3 has none; its queries grow with the position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainium_contract.models.family import Family, parse_presets, read_window, write_window

if TYPE_CHECKING:
    from trainium_contract.models.family import Config

_DEFAULTS = {"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131_072}
_V01 = """
Mistral-7B-v0.1     32_000  4096  14_336  32  32  8  128      10_000   32_768  1e-5  -
"""
_V03 = """
Mistral-7B-v0.3     32_768  4096  14_336  32  32  8  128   1_000_000   32_768  1e-5  -
Mistral-Nemo-12B   131_072  5120  14_336  40  32  8  128   1_000_000  131_072  1e-5  -
"""


def _read_ministral3_traits(config: Config) -> dict[str, Any]:
    rope = config["rope_scaling"] or config["rope_parameters"] or {}
    return {"sliding_window": config["sliding_window"], "query_growth": rope.get("llama_4_scaling_beta")}


FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    defaults=_DEFAULTS,
    traits=lambda config: {"sliding_window": config["sliding_window"]},
    fields=lambda shape: {"sliding_window": shape.sliding_window},
    presets=parse_presets("mistral", _V01, sliding_window=4096) | parse_presets("mistral", _V03),
)
MINISTRAL = Family(
    model_type="ministral",
    architecture="MinistralForCausalLM",
    defaults=_DEFAULTS | {"layer_types": None},
    traits=lambda config: read_window(config, [True]),
    fields=write_window,
    presets={},
)
MINISTRAL3 = Family(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    defaults={
        "sliding_window": None,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    traits=_read_ministral3_traits,
    fields=lambda shape: {"sliding_window": shape.sliding_window},
    presets={},
)
