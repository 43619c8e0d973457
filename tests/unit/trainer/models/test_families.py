"""Compute models of each family, and compare with `transformers` on the same random weights."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.testing.trainer.base_models import SPECIAL_TOKENS, save_family
from trainium_contract.models.families import FAMILIES, PRESETS
from trainium_contract.models.parameters import HEAD, count_parameters, parameter_sizes
from trainium_contract.trainer.model import ModelPreset
from trainium_trainer.models.huggingface import parse_shape, to_config
from trainium_trainer.models.llama import Llama
from trainium_trainer.weights.base import BaseWeights

LENGTH = 24
TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10_000.0}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "logits_scaling": 4.0,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama with biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama, a head for each query": {"model_type": "llama", "num_key_value_heads": 4, "tie_word_embeddings": True},
    "llama, linear": {"model_type": "llama", "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    "llama, dynamic": {
        "model_type": "llama",
        "max_position_embeddings": 16,
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0},
    },
    "llama, dynamic, short": {"model_type": "llama", "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}},
    "llama, llama3": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "llama, yarn": {"model_type": "llama", "rope_parameters": YARN},
    "llama, rope_scaling beside rope_parameters": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "factor": 2.0},
        "rope_scaling": YARN,
    },
    "llama, yarn of other limits": {
        "model_type": "llama",
        "rope_parameters": YARN
        | {"beta_fast": 8.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.3}
        | {"truncate": False},
    },
    "mistral": {"model_type": "mistral", "sliding_window": 8},
    "mistral without window": {"model_type": "mistral", "sliding_window": None, "head_dim": 12},
    "mistral, a window beyond the sequence": {"model_type": "mistral", "sliding_window": 4096},
    "qwen2": {"model_type": "qwen2"},
    "qwen2, tied, windows above": {
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3, biases, windows": {
        "model_type": "qwen3",
        "head_dim": 8,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 2,
    },
    "granite": {"model_type": "granite", "tie_word_embeddings": True, **GRANITE},
    "granite with biases": {"model_type": "granite", "attention_bias": True, "mlp_bias": True, **GRANITE},
    "olmo2": {"model_type": "olmo2"},
    "olmo2 with biases": {"model_type": "olmo2", "attention_bias": True, "num_key_value_heads": 4},
    "olmo3": {"model_type": "olmo3", "sliding_window": 6},
    "olmo3, yarn": {"model_type": "olmo3", "sliding_window": 6, "rope_scaling": YARN | {"rope_theta": 500_000.0}},
    "olmo3, rope_parameters that name no layers": {"model_type": "olmo3", "sliding_window": 6, "rope_parameters": YARN},
    "olmo3, rope_theta": {"model_type": "olmo3", "sliding_window": 6, "rope_theta": 777.0},
    "olmo3, another base and a scaling in layers with a window": {
        "model_type": "olmo3",
        "sliding_window": 6,
        "rope_parameters": {"full_attention": YARN, "sliding_attention": YARN | {"rope_theta": 777.0}},
    },
    "olmo3, rope_parameters of layers without a window": {
        "model_type": "olmo3",
        "sliding_window": 6,
        "rope_parameters": {"full_attention": YARN},
    },
    "smollm3": {"model_type": "smollm3", "tie_word_embeddings": True},
    "smollm3, windows": {
        "model_type": "smollm3",
        "no_rope_layers": [1, 0, 1, 0],
        "use_sliding_window": True,
        "sliding_window": 7,
    },
    "ministral": {"model_type": "ministral", "sliding_window": 8, "head_dim": 8},
    "ministral, a window in every second layer": {
        "model_type": "ministral",
        "sliding_window": 5,
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "ministral3": {
        "model_type": "ministral3",
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
    },
    "ministral3, a window": {
        "model_type": "ministral3",
        "sliding_window": 6,
        "rope_parameters": YARN
        | {"original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.2},
    },
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 6, "head_dim": 16, "tie_word_embeddings": True},
    "gemma3, untied, biases, a window in every second layer": {
        "model_type": "gemma3_text",
        "sliding_window": 5,
        "head_dim": 8,
        "attention_bias": True,
        "query_pre_attn_scalar": 168,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma3, a scaling in layers without a window": {
        "model_type": "gemma3_text",
        "sliding_window": 6,
        "head_dim": 8,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gemma3, as version 4 wrote it": {
        "model_type": "gemma3_text",
        "sliding_window": 6,
        "head_dim": 8,
        "sliding_window_pattern": 2,
        "rope_theta": 777.0,
        "rope_local_base_freq": 333.0,
    },
    "qwen3, yarn beyond its positions": {
        "model_type": "qwen3",
        "head_dim": 16,
        "max_position_embeddings": 10,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
        "rope_theta": 1_000_000.0,
    },
}


def save_case(folder: Path, case: str) -> Path:
    """Save a model whose `config.json` has the rotary embedding as the case writes it, not as transformers saves it."""
    save_family(folder, **TINY | copy.deepcopy(CASES[case]))
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    given = {name: value for name, value in CASES[case].items() if name.startswith("rope_")}
    (folder / "config.json").write_text(json.dumps(config | given))
    return folder


def load_network(folder: Path) -> Llama:
    weights = BaseWeights.open(str(folder))
    model = Llama(weights.shape)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            weights.fill(name, (0,) * parameter.dim(), parameter)
    return model


def draw_tokens() -> torch.Tensor:
    return torch.randint(0, TINY["vocab_size"], (2, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    folder = save_case(tmp_path / "base", case)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = load_network(folder)
    expected = reference(draw_tokens()).logits
    assert (model(draw_tokens()) - expected).abs().max() <= 1e-5 * max(1.0, float(expected.std()))
    positions = torch.arange(LENGTH).repeat(2, 1)
    positions[:, 10:] -= 10
    packed = torch.cat([model(draw_tokens()[:, :10]), model(draw_tokens()[:, 10:])], dim=1)
    if "dynamic" not in case:  # its table depends on the length of the sequence
        together = model(draw_tokens(), positions=positions)
        assert (together - packed).abs().max() <= 1e-5 * max(1.0, float(expected.std())), "documents are masked"


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_an_exported_model_gives_the_same_logits_in_transformers(case: str, tmp_path: Path) -> None:
    folder = save_case(tmp_path / "base", case)
    model = load_network(folder)
    written = tmp_path / "written"
    written.mkdir()
    (written / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (written / "config.json").write_text(json.dumps(SPECIAL_TOKENS | to_config(model.shape)))
    reference = AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32)
    expected = reference(draw_tokens()).logits
    assert type(reference).__name__ == FAMILIES[model.shape.family].architecture
    assert (model(draw_tokens()) - expected).abs().max() <= 1e-5 * max(1.0, float(expected.std()))
    assert parse_shape(to_config(model.shape), "x") == model.shape


@pytest.mark.parametrize("preset", PRESETS)
def test_the_list_of_parameters_is_that_of_the_network(preset: str) -> None:
    shape = PRESETS[preset]
    with torch.device("meta"):
        built = {name: tuple(parameter.shape) for name, parameter in Llama(shape).named_parameters()}
    assert list(parameter_sizes(shape).items()) == list(built.items())
    assert (HEAD in built) != shape.tie_embeddings


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        (ModelPreset.LLAMA2_7B, 6_738_415_616),
        (ModelPreset.LLAMA2_13B, 13_015_864_320),
        (ModelPreset.LLAMA2_70B, 68_976_648_192),
        (ModelPreset.LLAMA3_8B, 8_030_261_248),
        (ModelPreset.LLAMA3_70B, 70_553_706_496),
        (ModelPreset.LLAMA31_8B, 8_030_261_248),
        (ModelPreset.LLAMA31_70B, 70_553_706_496),
        (ModelPreset.LLAMA32_1B, 1_235_814_400),
        ("Mistral-7B-v0.1", 7_241_732_096),
        ("Mistral-7B-v0.3", 7_248_023_552),
        ("Mistral-Nemo-12B", 12_247_782_400),
        ("Qwen2.5-0.5B", 494_032_768),
        ("Qwen2.5-1.5B", 1_543_714_304),
        ("Qwen2.5-3B", 3_085_938_688),
        ("Qwen2.5-7B", 7_615_616_512),
        ("Qwen2.5-14B", 14_770_033_664),
        ("Qwen2.5-32B", 32_763_876_352),
        ("Qwen2.5-72B", 72_706_203_648),
        ("Qwen3-0.6B", 596_049_920),
        ("Qwen3-1.7B", 1_720_574_976),
        ("Qwen3-4B", 4_022_468_096),
        ("Qwen3-8B", 8_190_735_360),
        ("Qwen3-14B", 14_768_307_200),
        ("Qwen3-32B", 32_762_123_264),
        ("Granite3.3-2B", 2_533_539_840),
        ("Granite3.3-8B", 8_170_864_640),
        ("OLMo2-1B", 1_484_916_736),
        ("OLMo2-7B", 7_298_617_344),
        ("OLMo2-13B", 13_716_198_400),
        ("OLMo2-32B", 32_234_279_936),
        ("OLMo3-7B", 7_298_011_136),
        ("OLMo3-32B", 32_233_522_176),
        ("SmolLM3-3B", 3_075_098_624),
        ("Gemma3-270M", 268_098_176),
        ("Gemma3-1B", 999_885_952),
        ("Gemma3-4B", 3_880_263_168),
        ("Gemma3-12B", 11_766_034_176),
        ("Gemma3-27B", 27_009_346_304),
    ],
)
def test_a_published_shape_has_the_published_size(preset: str, parameters: int) -> None:
    assert count_parameters(PRESETS[preset]) == parameters


@pytest.mark.parametrize("name", FAMILIES)
def test_fields_of_other_families_that_change_nothing_are_accepted(name: str) -> None:
    without = {
        "attention_bias": False,
        "sliding_window": None,
        "use_sliding_window": False,
        "layer_types": None,
        "residual_multiplier": 1.0,
    }
    neutral = {field: value for field, value in without.items() if field not in FAMILIES[name].defaults}
    assert parse_shape(TINY | {"model_type": name} | neutral, "x").family == name
