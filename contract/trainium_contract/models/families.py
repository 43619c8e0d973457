"""The families of models that can be trained; a new one is a module of this package and a line here."""

from __future__ import annotations

from trainium_contract.models import gemma3, granite, llama, mistral, olmo, qwen2, qwen3, smollm3

_FAMILIES = (
    llama.FAMILY,
    mistral.FAMILY,
    mistral.MINISTRAL,
    mistral.MINISTRAL3,
    qwen2.FAMILY,
    qwen3.FAMILY,
    granite.FAMILY,
    olmo.OLMO2,
    olmo.OLMO3,
    smollm3.FAMILY,
    gemma3.FAMILY,
)
FAMILIES = {family.model_type: family for family in _FAMILIES}
"""By the `model_type` of their `config.json`."""
PRESETS = {name: shape for family in _FAMILIES for name, shape in family.presets.items()}
"""Published shapes by name; a vocabulary of 0 stands for the tokenizer's."""
