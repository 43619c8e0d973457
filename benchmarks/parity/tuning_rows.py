"""Define the comparisons of fine-tuning: settings, each with a reference run, and layouts.

The reference is `transformers.Trainer` with peft, or trl for pairs of answers. Each starts from a model that
`transformers` trained briefly, and trains on running text, examples or pairs of answers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.parity.rows import (
    FULL_RECOMPUTE,
    FULLY_SHARDED,
    HLAT,
    LLAMA31,
    SEQUENCE_PARALLEL,
    SHARDED_OPTIMIZER,
    Row,
    Settings,
)

ADAPTER_TOLERANCE = 1e-4
"""Allowed difference of a trained parameter."""
MERGED_TOLERANCE = 1e-5
"""Allowed difference of the logits of an adapter merged here and by peft."""
FAMILY_STEPS = 100

_RATE = {"optimizer.learningRate": 1e-3}
_EXAMPLES = {"data.format": "Instruction", "data.sequenceLength": 128}

FULL = Settings("Full", "all weights of the model, running text", base=HLAT)
LORA = Settings(
    "LoRA",
    "rank 8 and alpha 16 on q and v, running text",
    {"tuning": {"method": "LoRA", "lora": {"rank": 8, "alpha": 16.0}}, **_RATE},
    HLAT,
)
LORA_ALL = Settings(
    "LoRA everywhere",
    "rank 4 and alpha 32, rank-stabilized, on all projections of the layers; tied embedding; documents masked",
    {
        **LLAMA31.overrides,
        **_RATE,
        "tuning": {"method": "LoRA", "lora": {"rank": 4, "alpha": 32.0, "rankStabilized": True, "targets": ["*_proj"]}},
        "data.maskDocuments": True,
    },
    LLAMA31,
)
FULL_ANSWERS = Settings(
    "Full, answers", "all weights, examples one by one, loss on the answer", _EXAMPLES, HLAT, "instructions"
)
ANSWERS = Settings(
    "LoRA, answers",
    "rank 16 and alpha 32 on q and v, examples one by one, loss on the answer",
    {**_EXAMPLES, **_RATE, "tuning": {"method": "LoRA", "lora": {"rank": 16, "alpha": 32.0}}},
    HLAT,
    "instructions",
)
PACKED = Settings(
    "LoRA, packed",
    "as before, several examples in a sequence",
    {**ANSWERS.overrides, "data.examples.packing": True},
    HLAT,
    "instructions",
)
DORA = Settings(
    "DoRA",
    "rank 4 and alpha 8 on all projections with trained lengths; rank 8 on down, alpha 16 on q; running text",
    {
        **_RATE,
        "tuning": {
            "method": "LoRA",
            "lora": {
                "rank": 4,
                "alpha": 8.0,
                "dora": True,
                "rankPattern": {"down_proj": 8},
                "alphaPattern": {"q_proj": 16.0},
                "targets": ["*_proj"],
            },
        },
    },
    HLAT,
)
LABELS = Settings(
    "LoRA, labels",
    "classification: rank 8 and alpha 16 on all projections, the label's word is the answer",
    {
        "optimizer.learningRate": 1e-3,  # at five times this rate any rounding error grows tenfold every ten steps
        "data.format": "Classification",
        "data.sequenceLength": 128,
        "data.examples.classification.labels": ["class", "function"],
        "data.validation": {"fraction": 0.2, "everySteps": 1000, "samples": 128},
        "tuning": {"method": "LoRA", "lora": {"rank": 8, "alpha": 16.0, "targets": ["*_proj"]}},
    },
    HLAT,
    "questions",
)
_PAIRS = {"data.format": "Preference", "data.sequenceLength": 128}
_DPO = {"kind": "DPO", "beta": 0.1}
_ADAPTER = {"method": "LoRA", "lora": {"rank": 8, "alpha": 16.0, "targets": ["*_proj"]}}
DPO = Settings(
    "DPO",
    "all weights, beta 0.1, reference log-probabilities computed ahead",
    {**_PAIRS, "tuning.objective": _DPO},
    HLAT,
    "preferences",
)
DPO_LORA = Settings(
    "DPO, LoRA",
    "rank 8 and alpha 16 on all projections, beta 0.1, the base without the adapter as reference",
    {**_PAIRS, **_RATE, "tuning": {**_ADAPTER, "objective": _DPO}},
    HLAT,
    "preferences",
)
_MESSAGES = {**_PAIRS, "data.examples.chat.template": str(Path(__file__).with_name("chat.jinja"))}
DPO_MESSAGES = Settings(
    "DPO, messages",
    "all weights, pairs of messages that trl renders by the template and tokenizes",
    {**_MESSAGES, "tuning.objective": _DPO},
    HLAT,
    "conversations",
)
PREFERENCE_SETTINGS = (DPO, DPO_LORA, DPO_MESSAGES)

_SMALL = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10_000.0}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama with biases": (
        "biases everywhere, YaRN, a head for each query",
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}
        | {"rope_parameters": _YARN},
    ),
    "Mistral": ("a window of 24 positions", {"model_type": "mistral", "sliding_window": 24}),
    "Qwen2": ("tied", {"model_type": "qwen2", "tie_word_embeddings": True}),
    "Qwen3": ("heads of 32, tied", {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True}),
    "Granite": (
        "multipliers of Granite 3.3 2B, tied",
        {
            "model_type": "granite",
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.0625,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
            "tie_word_embeddings": True,
        },
    ),
    "OLMo 2": ("a head for each query", {"model_type": "olmo2", "num_key_value_heads": 4}),
    "OLMo 3": (
        "windows of 24 positions in three of four layers, YaRN in the fourth",
        {"model_type": "olmo3", "sliding_window": 24, "rope_scaling": _YARN | {"rope_theta": 500_000.0}},
    ),
    "Gemma 3": (
        "windows of 24 positions in five of six layers, heads of 32, tied",
        {"model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window": 24, "head_dim": 32}
        | {"tie_word_embeddings": True},
    ),
    "Ministral 3": (
        "YaRN and queries that grow from position 32 on",
        {"model_type": "ministral3", "head_dim": 32, "rope_parameters": _YARN | {"llama_4_scaling_beta": 0.1}},
    ),
    "SmolLM3": ("every fourth layer not rotated, tied", {"model_type": "smollm3", "tie_word_embeddings": True}),
}
_BASES = {name: Settings(f"{name} base", "", family=_SMALL | fields) for name, (_, fields) in _FAMILIES.items()}
_ALL_PROJECTIONS = {"tuning": {"method": "LoRA", "lora": {"rank": 4, "alpha": 8.0, "targets": ["*_proj"]}}, **_RATE}
FAMILIES_FULL = tuple(
    Settings(f"{name}, full", f"{description}; all weights, running text", base=_BASES[name], max_steps=FAMILY_STEPS)
    for name, (description, _) in _FAMILIES.items()
)
FAMILIES_LORA = tuple(
    Settings(
        f"{name}, LoRA",
        f"{description}; rank 4 and alpha 8 on all projections",
        _ALL_PROJECTIONS,
        _BASES[name],
        max_steps=FAMILY_STEPS,
    )
    for name, (description, _) in _FAMILIES.items()
)
TUNING_SETTINGS = (FULL, LORA, LORA_ALL, DORA, FULL_ANSWERS, ANSWERS, PACKED, LABELS)
FAMILY_SETTINGS = (*FAMILIES_FULL, *FAMILIES_LORA)

TUNING_ROWS = (
    Row(FULL),
    Row(FULL, data_parallel=2, overrides=(FULLY_SHARDED,)),
    Row(FULL, tensor_parallel=2, overrides=(SEQUENCE_PARALLEL,)),
    Row(FULL, pipeline_parallel=2, accumulation=4),
    Row(LORA),
    Row(LORA, accumulation=4),
    Row(LORA, data_parallel=2),
    Row(LORA, data_parallel=4),
    Row(LORA, data_parallel=2, overrides=(FULLY_SHARDED,)),
    Row(LORA, data_parallel=2, overrides=(SHARDED_OPTIMIZER,)),
    Row(LORA, tensor_parallel=2),
    Row(LORA, tensor_parallel=2, overrides=(SEQUENCE_PARALLEL,)),
    Row(LORA, pipeline_parallel=2, accumulation=4),
    Row(LORA, context_parallel=2),
    Row(LORA, data_parallel=2, tensor_parallel=2, overrides=(FULLY_SHARDED, SEQUENCE_PARALLEL)),
    Row(LORA_ALL),
    Row(LORA_ALL, data_parallel=2, overrides=(FULLY_SHARDED,)),
    Row(LORA_ALL, tensor_parallel=2, overrides=(SEQUENCE_PARALLEL,)),
    Row(LORA_ALL, pipeline_parallel=2, accumulation=4),
    Row(
        LORA_ALL, tensor_parallel=2, pipeline_parallel=2, accumulation=4, overrides=(SEQUENCE_PARALLEL, FULL_RECOMPUTE)
    ),
    Row(FULL_ANSWERS),
    Row(FULL_ANSWERS, data_parallel=2, tensor_parallel=2, overrides=(FULLY_SHARDED, SEQUENCE_PARALLEL)),
    Row(ANSWERS),
    Row(ANSWERS, data_parallel=4),
    Row(ANSWERS, tensor_parallel=2, overrides=(SEQUENCE_PARALLEL,)),
    Row(PACKED),
    Row(PACKED, data_parallel=2, overrides=(FULLY_SHARDED,)),
    Row(PACKED, tensor_parallel=2, overrides=(SEQUENCE_PARALLEL,)),
    Row(PACKED, pipeline_parallel=2, accumulation=4),
    Row(PACKED, context_parallel=2),
    Row(PACKED, context_parallel=4),
    Row(PACKED, tensor_parallel=2, context_parallel=2, overrides=(SEQUENCE_PARALLEL,)),
    Row(PACKED, data_parallel=2, context_parallel=2, overrides=(FULLY_SHARDED,)),
    Row(DORA),
    Row(DORA, data_parallel=2, overrides=(FULLY_SHARDED,)),
    Row(DORA, tensor_parallel=2, overrides=(SEQUENCE_PARALLEL,)),
    Row(DORA, pipeline_parallel=2, accumulation=4),
    Row(LABELS),
    Row(LABELS, data_parallel=2, tensor_parallel=2),
)
FAMILY_ROWS = tuple(
    row
    for settings in FAMILY_SETTINGS
    for row in (
        Row(settings),
        Row(settings, data_parallel=2, overrides=(FULLY_SHARDED,)),
        Row(settings, tensor_parallel=2, overrides=(SEQUENCE_PARALLEL,)),
        Row(settings, pipeline_parallel=2, accumulation=4),
    )
)
PREFERENCE_ROWS = tuple(
    Row(settings, data_parallel=data, tensor_parallel=tensor, overrides=overrides)
    for settings in (DPO, DPO_LORA)
    for data, tensor, overrides in ((1, 1, ()), (2, 1, ()), (1, 2, ()), (2, 1, (FULLY_SHARDED,)))
)
PREFERENCE_ROWS += (Row(DPO, pipeline_parallel=2, accumulation=4), Row(DPO_LORA, pipeline_parallel=2, accumulation=4))
PREFERENCE_ROWS += (Row(DPO_MESSAGES), Row(DPO_MESSAGES, data_parallel=2), Row(DPO_MESSAGES, tensor_parallel=2))
