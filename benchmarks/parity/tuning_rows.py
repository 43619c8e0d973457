"""Define the comparisons of fine-tuning: settings, each with a reference run, and layouts.

The reference is `transformers.Trainer` with peft, or trl where answers are compared. Each begins with a model that
`transformers` trained for a while, and trains running text, examples or pairs of answers.
"""

from __future__ import annotations

from benchmarks.parity.rows import HLAT, LLAMA31, Row, Settings

ADAPTER_TOLERANCE = 1e-4
"""Allowed difference of two trained numbers."""
MERGED_TOLERANCE = 1e-5
"""Allowed difference of two logits of an adapter that is merged here and by peft."""

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
        "tuning": {
            "method": "LoRA",
            "lora": {"rank": 4, "alpha": 32.0, "rankStabilized": True, "targets": ["*_proj"]},
        },
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
LABELS = Settings(
    "LoRA, labels",
    "classification: rank 8 and alpha 16 on all projections, the label's word is the answer",
    {
        "optimizer.learningRate": 1e-3,  # at five times that any rounding grows tenfold every ten steps
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
_ORPO = {"kind": "ORPO", "beta": 0.1}
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
ORPO = Settings(
    "ORPO",
    "all weights, weight 0.1 of the odds ratio",
    {**_PAIRS, "data.examples.loss": "All", "tuning.objective": _ORPO},
    HLAT,
    "preferences",
)
ORPO_LORA = Settings(
    "ORPO, LoRA",
    "rank 8 and alpha 16 on all projections, weight 0.1 of the odds ratio",
    {**_PAIRS, **_RATE, "data.examples.loss": "All", "tuning": {**_ADAPTER, "objective": _ORPO}},
    HLAT,
    "preferences",
)
PREFERENCE_SETTINGS = (DPO, DPO_LORA, ORPO, ORPO_LORA)
TUNING_SETTINGS = (FULL, LORA, LORA_ALL, FULL_ANSWERS, ANSWERS, PACKED, LABELS)

_SHARDED = "dataParallel=FullySharded"
_ZERO = "dataParallel=ShardedOptimizer"
_SEQUENCE = "parallelism.sequence=true"
_FULL = "recompute=Full"

TUNING_ROWS = (
    Row(FULL),
    Row(FULL, data=2, overrides=(_SHARDED,)),
    Row(FULL, tensor=2, overrides=(_SEQUENCE,)),
    Row(FULL, pipeline=2, accumulation=4),
    Row(LORA),
    Row(LORA, accumulation=4),
    Row(LORA, data=2),
    Row(LORA, data=4),
    Row(LORA, data=2, overrides=(_SHARDED,)),
    Row(LORA, data=2, overrides=(_ZERO,)),
    Row(LORA, tensor=2),
    Row(LORA, tensor=2, overrides=(_SEQUENCE,)),
    Row(LORA, pipeline=2, accumulation=4),
    Row(LORA, data=2, tensor=2, overrides=(_SHARDED, _SEQUENCE)),
    Row(LORA_ALL),
    Row(LORA_ALL, data=2, overrides=(_SHARDED,)),
    Row(LORA_ALL, tensor=2, overrides=(_SEQUENCE,)),
    Row(LORA_ALL, pipeline=2, accumulation=4),
    Row(LORA_ALL, tensor=2, pipeline=2, accumulation=4, overrides=(_SEQUENCE, _FULL)),
    Row(FULL_ANSWERS),
    Row(FULL_ANSWERS, data=2, tensor=2, overrides=(_SHARDED, _SEQUENCE)),
    Row(ANSWERS),
    Row(ANSWERS, data=4),
    Row(ANSWERS, tensor=2, overrides=(_SEQUENCE,)),
    Row(PACKED),
    Row(PACKED, data=2, overrides=(_SHARDED,)),
    Row(PACKED, tensor=2, overrides=(_SEQUENCE,)),
    Row(PACKED, pipeline=2, accumulation=4),
    Row(LABELS),
    Row(LABELS, data=2, tensor=2),
)
PREFERENCE_ROWS = tuple(
    Row(settings, data=data, tensor=tensor, overrides=overrides)
    for settings in PREFERENCE_SETTINGS
    for data, tensor, overrides in ((1, 1, ()), (2, 1, ()), (1, 2, ()), (2, 1, (_SHARDED,)))
)
