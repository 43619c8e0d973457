"""PURE. The numbers of the presets that decide what a model takes, and those that a configuration means.

Invariant: one table; the trainer's shapes are made of it, so the operator counts the model that is trained.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trainium_contract.requirements.memory_estimate import ModelSizes
from trainium_contract.trainer.model import ModelPreset

if TYPE_CHECKING:
    from trainium_contract.trainer.model import ModelConfig

USUAL_VOCABULARY = 32_000
"""Tokens, where a preset leaves them to a tokenizer that nobody has read yet."""

_TINY = ModelSizes(
    hidden=96, intermediate=256, layers=3, heads=4, key_value_heads=2, head_width=24, vocabulary=0, tied=True
)
_LLAMA2_7B = ModelSizes(
    hidden=4096, intermediate=11_008, layers=32, heads=32, key_value_heads=32, head_width=128, vocabulary=32_000
)
_LLAMA3_8B = replace(_LLAMA2_7B, vocabulary=128_256, intermediate=14_336, key_value_heads=8)
_LLAMA3_70B = replace(_LLAMA3_8B, hidden=8192, intermediate=28_672, layers=80, heads=64)
PRESET_SIZES: dict[ModelPreset, ModelSizes] = {
    ModelPreset.TINY: _TINY,
    ModelPreset.SMALL: replace(
        _TINY, hidden=384, intermediate=1024, layers=6, heads=8, key_value_heads=4, head_width=48
    ),
    ModelPreset.LLAMA2_7B: _LLAMA2_7B,
    ModelPreset.LLAMA2_13B: replace(
        _LLAMA2_7B, hidden=5120, intermediate=13_824, layers=40, heads=40, key_value_heads=40
    ),
    ModelPreset.LLAMA2_70B: replace(_LLAMA3_70B, vocabulary=32_000),
    ModelPreset.LLAMA3_8B: _LLAMA3_8B,
    ModelPreset.LLAMA3_70B: _LLAMA3_70B,
    ModelPreset.LLAMA31_8B: _LLAMA3_8B,
    ModelPreset.LLAMA31_70B: _LLAMA3_70B,
    ModelPreset.LLAMA32_1B: replace(_LLAMA3_8B, hidden=2048, intermediate=8192, layers=16, head_width=64, tied=True),
}
"""Published shapes (the models' own `config.json`); a vocabulary of 0 stands for the tokenizer's."""


def sizes_of(model: ModelConfig) -> ModelSizes | None:
    """Return the numbers of a configured model; None where only a worker can read the file that has them."""
    if model.path is not None or model.weights is not None:
        return None
    base = PRESET_SIZES[model.preset]
    hidden, heads = model.hidden_size or base.hidden, model.num_attention_heads or base.heads
    given = model.hidden_size is not None or model.num_attention_heads is not None
    usual = base.key_value_heads if heads % base.key_value_heads == 0 else heads
    return ModelSizes(
        hidden=hidden,
        intermediate=model.intermediate_size or base.intermediate,
        layers=model.num_layers or base.layers,
        heads=heads,
        key_value_heads=model.num_key_value_heads or usual,
        head_width=model.head_dim or (max(1, hidden // heads) if given else base.head_width),
        vocabulary=model.vocab_size or base.vocabulary or USUAL_VOCABULARY,
        tied=base.tied if model.tie_embeddings is None else model.tie_embeddings,
    )
