"""PURE. Mistral and Ministral: Llama whose layers may see a window of the latest positions only.

Ministral has the window in some layers. Ministral 3 has none; its queries grow with the position.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainium_contract.models.family import Family, window_fields, window_traits
from trainium_contract.models.shape import ModelShape

if TYPE_CHECKING:
    from trainium_contract.models.family import Config

_DEFAULTS = {"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131_072}
_V01 = ModelShape(
    family="mistral",
    vocab_size=32_000,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    rope_theta=10_000.0,
    max_positions=32_768,
    norm_eps=1e-5,
    tie_embeddings=False,
    sliding_window=4096,
)
_V03 = replace(_V01, vocab_size=32_768, rope_theta=1_000_000.0, sliding_window=None)


def _ministral3_traits(config: Config) -> dict[str, Any]:
    rope = config["rope_scaling"] or config["rope_parameters"] or {}
    return {"sliding_window": config["sliding_window"], "query_growth": rope.get("llama_4_scaling_beta")}


FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    defaults=_DEFAULTS,
    traits=lambda config: {"sliding_window": config["sliding_window"]},
    fields=lambda shape: {"sliding_window": shape.sliding_window},
    presets={
        "Mistral-7B-v0.1": _V01,
        "Mistral-7B-v0.3": _V03,
        "Mistral-Nemo-12B": replace(_V03, vocab_size=131_072, hidden_size=5120, num_layers=40, max_positions=131_072),
    },
)
MINISTRAL = Family(
    model_type="ministral",
    architecture="MinistralForCausalLM",
    defaults=_DEFAULTS | {"layer_types": None},
    traits=lambda config: window_traits(config, [True]),
    fields=window_fields,
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
    traits=_ministral3_traits,
    fields=lambda shape: {"sliding_window": shape.sliding_window},
    presets={},
)
