"""Train a model of each family with one curve and result in every layout, and export it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.testing.trainer.base_models import save_family
from tests.testing.trainer.layouts import PP, SHARDED, SP, TP, TWO_PASSES
from tests.unit.trainer.conftest import Launcher, ReferenceRuns

WINDOW = {"sliding_window": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": WINDOW,
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, **WINDOW},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "granite": {
        "attention_bias": True,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.5,
        "logits_scaling": 4.0,
    },
    "olmo2": {"attention_bias": True},
    "olmo3": {"layer_types": ["sliding_attention", "full_attention"], **WINDOW},
    "smollm3": {"no_rope_layers": [1, 0], "mlp_bias": True},
    "ministral": {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 8, **WINDOW},
    "ministral3": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "gemma3_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "head_dim": 16,
        "tie_word_embeddings": True,
        **WINDOW,
    },
}
FULL = "tuning={method: Full}"
FLOAT32 = "artifacts.precision=Float32"
STEPS = "steps=4"
LORA = "tuning={method: LoRA, lora: {rank: 4, alpha: 8, targets: ['*_proj']}}"
TUNINGS = {"full": FULL, "LoRA": LORA}
LAYOUTS = {
    "tp2": (2, [TP, SP, TWO_PASSES]),
    "tp4": (4, ["parallelism.tensor=4", TWO_PASSES]),
    "pp2": (2, [PP]),
    "sharded": (2, [SHARDED, "recompute=Full"]),
}
COMMON_LAYOUTS = {
    "llama": "tp2",
    "mistral": "sharded",
    "qwen2": "tp4",
    "qwen3": "tp2",
    "granite": "pp2",
    "olmo2": "tp2",
    "olmo3": "tp2",
    "smollm3": "pp2",
    "ministral": "sharded",
    "ministral3": "tp2",
    "gemma3_text": "tp2",
}
"""The layout of each family in the short tests."""
ADAPTED_FAMILIES = frozenset({"llama", "granite", "gemma3_text"})
"""Families whose adapters are in the short tests: with biases, with multipliers, and with more norms."""


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Callable[[str], Path]:
    """Return a function that saves a model of a family once, with the tokenizer of the text."""
    root = tmp_path_factory.mktemp("families")

    def folder(family: str) -> Path:
        if not (root / family).exists():
            fields = {"vocab_size": 320, "intermediate_size": 64, "tie_word_embeddings": False} | FAMILIES[family]
            save_family(root / family, family, **fields)
            shutil.copy(base / "tokenizer.json", root / family)
        return root / family

    return folder


@pytest.mark.parametrize(
    ("tuning", "family", "layout"),
    [
        pytest.param(
            TUNINGS[tuning],
            family,
            layout,
            id=f"{tuning}-{family}-{layout}",
            marks=()
            if layout == COMMON_LAYOUTS[family] and (tuning == "full" or family in ADAPTED_FAMILIES)
            else pytest.mark.long,
        )
        for tuning in TUNINGS
        for family in FAMILIES
        for layout in LAYOUTS
    ],
)
def test_the_curve_of_a_family_is_the_same_in_every_layout(
    launch: Launcher,
    reference_run: ReferenceRuns,
    folders: Callable[[str], Path],
    family: str,
    layout: str,
    tuning: str,
) -> None:
    settings = [f"model.weights={folders(family)}", tuning, FLOAT32, STEPS]
    reference = reference_run(1, settings)
    ranks, overrides = LAYOUTS[layout]
    job = launch(ranks, "other", [*settings, *overrides]).finish()
    job.assert_same_curve(reference)
    torch.testing.assert_close(job.weights(), reference.weights(), rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft uses an old name of transformers
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_artifacts_of_a_family_are_the_same_model_in_transformers_and_peft(
    reference_run: ReferenceRuns, folders: Callable[[str], Path], family: str, tmp_path: Path
) -> None:
    job = reference_run(1, [f"model.weights={folders(family)}", LORA, FLOAT32, STEPS])
    (adapter,) = (path.parent for path in job.folder.rglob("adapter_config.json"))
    (model,) = (path.parent for path in job.folder.rglob("config.json"))
    tokens = torch.arange(60).reshape(2, 30) * 5 % 320
    merged = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(folders(family), dtype=torch.float32)
    untrained = base(tokens).logits
    merged_by_peft = peft.PeftModel.from_pretrained(base, str(adapter)).merge_and_unload()
    expected = merged_by_peft(tokens).logits
    assert (untrained - expected).abs().max() > 1e-3, "the adapter has an effect"
    assert (merged(tokens).logits - expected).abs().max() <= 2e-5 * max(1.0, float(expected.std()))
