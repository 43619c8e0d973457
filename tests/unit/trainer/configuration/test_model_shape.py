"""Read presets and Hugging Face configurations, and refuse those of other models."""

import json
from pathlib import Path
from typing import Any

import pytest

from trainium_contract.models.families import PRESETS
from trainium_contract.models.parameters import count_parameters
from trainium_contract.models.shape import ModelShape
from trainium_contract.trainer.model import ModelConfig, ModelPreset
from trainium_trainer.configuration.model_shape import resolve_shape
from trainium_trainer.exits import UserError
from trainium_trainer.models.huggingface import to_config

# The published config.json of Llama-3.1-8B, as transformers 4 wrote it.
LLAMA31 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}


def write_config(folder: Path, **changes: Any) -> str:
    document = {name: value for name, value in (LLAMA31 | changes).items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(document))
    return str(folder)


def read_shape(path: str, **overrides: Any) -> Any:
    return resolve_shape(ModelConfig(path=path, **overrides), 100)


def test_every_preset_has_a_shape_and_the_default_is_small() -> None:
    assert set(PRESETS) == set(ModelPreset)
    for preset in ModelPreset:
        shape = resolve_shape(ModelConfig(preset=preset), 2048)
        has_other_width = preset == "Mistral-Nemo-12B" or shape.family in ("qwen3", "gemma3_text")
        assert has_other_width or shape.head_dim * shape.num_attention_heads == shape.hidden_size
    assert count_parameters(resolve_shape(ModelConfig(), 2048)) < 1_000_000


def test_the_preset_of_llama_3_1_is_its_published_file(tmp_path: Path) -> None:
    assert read_shape(write_config(tmp_path)) == PRESETS[ModelPreset.LLAMA31_8B]
    assert read_shape(str(tmp_path / "config.json")) == PRESETS[ModelPreset.LLAMA31_8B]


def test_the_new_spelling_of_the_rotary_settings_means_the_same(tmp_path: Path) -> None:
    parameters = {"rope_theta": 500000.0, **LLAMA31["rope_scaling"]}  # type: ignore[dict-item]
    path = write_config(tmp_path, rope_scaling="absent", rope_theta="absent", rope_parameters=parameters)
    assert read_shape(path) == PRESETS[ModelPreset.LLAMA31_8B]
    old = {name: value for name, value in LLAMA31["rope_scaling"].items() if name != "rope_type"}  # type: ignore[attr-defined]
    assert read_shape(write_config(tmp_path, rope_scaling=old | {"type": "llama3"})) == PRESETS[ModelPreset.LLAMA31_8B]


def test_absent_fields_have_the_defaults_of_llama_config(tmp_path: Path) -> None:
    absent = (
        "rope_scaling num_key_value_heads rms_norm_eps initializer_range tie_word_embeddings max_position_embeddings "
        "rope_theta architectures"
    )
    shape = read_shape(write_config(tmp_path, **dict.fromkeys(absent.split(), "absent")))
    assert (shape.num_key_value_heads, shape.head_dim, shape.rope_stretch, shape.rope_theta) == (32, 128, None, 10_000)
    assert (shape.norm_eps, shape.initial_std, shape.tie_embeddings, shape.max_positions) == (1e-6, 0.02, False, 2048)


def test_a_dropout_of_attention_is_ignored_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_shape(write_config(tmp_path, attention_dropout=0.1)) == PRESETS[ModelPreset.LLAMA31_8B]
    (warning,) = caplog.messages
    assert warning.endswith("attention_dropout 0.1 has no effect: attention is trained as it is evaluated, without it")


def test_yarn_allows_the_original_positions_times_its_factor(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    assert read_shape(write_config(tmp_path, max_position_embeddings=40_960)).longest_sequence == 40_960
    for positions in (32_768, 40_960, 131_072):
        shape = read_shape(write_config(tmp_path, rope_scaling=yarn, max_position_embeddings=positions))
        assert (shape.max_positions, shape.longest_sequence) == (positions, 131_072)


def test_heads_may_be_wider_than_the_residual_stream_divided_by_them(tmp_path: Path) -> None:
    shape = read_shape(write_config(tmp_path, head_dim=64))
    assert shape.head_dim == 64
    narrower = read_shape(write_config(tmp_path, head_dim=64), hidden_size=2048)
    assert narrower.head_dim == 64, "2048 / 32 is not used"
    assert read_shape(write_config(tmp_path, head_dim=64), hidden_size=2048, head_dim=128).head_dim == 128


def test_fields_of_the_configuration_override_the_file(tmp_path: Path) -> None:
    shape = read_shape(write_config(tmp_path), num_layers=2, initial_std=0.01, rope_scaling={"kind": "Unscaled"})
    assert (shape.num_layers, shape.initial_std, shape.rope_stretch) == (2, 0.01, None)
    linear = resolve_shape(ModelConfig(rope_scaling={"kind": "Linear", "factor": 4}), 100).rope_stretch  # type: ignore[arg-type]
    assert (linear.kind, linear.factor) == ("Linear", 4)


@pytest.mark.parametrize("preset", ModelPreset)
def test_a_shape_written_as_a_file_is_read_back(tmp_path: Path, preset: ModelPreset) -> None:
    shape = resolve_shape(ModelConfig(preset=preset), 100)
    assert ModelShape.from_json(json.loads(json.dumps(shape.to_json()))) == shape
    for absent in ("rope_parameters", "rope_scaling"):
        document = {name: value for name, value in to_config(shape).items() if name != absent}
        (tmp_path / "config.json").write_text(json.dumps(document))
        assert read_shape(str(tmp_path)) == shape


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"architectures": ["PhiForCausalLM"]},
            "PhiForCausalLM (model_type 'llama'), but the built-in trainer has only Gemma3ForCausalLM, ",
        ),
        ({"architectures": "absent", "model_type": "gpt2"}, "no architecture (model_type 'gpt2'), but the built"),
        ({"architectures": "absent", "model_type": "absent"}, "describes no architecture, but the built-in trainer"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide', which is not a whole number"),
        ({"vocab_size": "absent"}, "vocab_size is missing"),
        ({"vocab_size": 0}, "vocab_size is 0: use a number of at least 1"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', but this trainer has only 'silu'"),
        ({"sliding_window": 64}, "sliding_window is 64, but LlamaForCausalLM has no such field"),
        (
            {"architectures": "absent", "model_type": "mistral", "sliding_window": 0},
            "sliding_window is 0: use a number of at least 1",
        ),
        (
            {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"},
            "train yours with transformers in a program (spec.program, docs/program.md)",
        ),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
            | {"text_config": {"model_type": "gemma3_text"}},
            "only the language model can be trained: save it apart as Gemma3ForCausalLM, as docs/models.md shows",
        ),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2.0}},
            "rope_scaling has the type 'longrope', but this trainer",
        ),
        (
            {"rope_scaling": "absent", "rope_parameters": {"rope_type": "dynamic"}},
            "rope_parameters of type 'dynamic' lacks factor",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "lacks low_freq_factor, high_freq_factor, original_max_position_embeddings",
        ),
        (
            {"architectures": "absent", "model_type": "mistral", "attention_bias": True},
            "attention_bias is True, but MistralForCausalLM has no",
        ),
        (
            {"architectures": "absent", "model_type": "qwen3", "residual_multiplier": 0.5},
            "residual_multiplier is 0.5, but Qwen3ForCausalLM has",
        ),
        (
            {"architectures": "absent", "model_type": "qwen2", "no_rope_layers": [1, 0, 1, 1]},
            "but Qwen2ForCausalLM has no such",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fast": 1, "beta_slow": 2}},
            "rope_scaling.beta_slow 2.0 must be less than beta_fast 1.0",
        ),
        (
            {"architectures": "absent", "model_type": "olmo3", "layer_types": ["full_attention"]},
            "layer_types describes 1 layers, but num_hidden_",
        ),
        (
            {"rope_scaling": "absent", "rope_parameters": {"full_attention": {}, "sliding_attention": None}},
            "rope_parameters differ by layer, which LlamaForCausalLM has not",
        ),
        ({"num_attention_heads": 33}, "hidden_size 4096 is not divisible by num_attention_heads 33"),
        ({"num_key_value_heads": 5}, "model.numAttentionHeads is 32, which is not divisible by"),
    ],
)
def test_a_file_of_another_model_is_refused(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as refusal:
        read_shape(write_config(tmp_path, **changes))
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "sentence"), [("{", "not valid JSON"), ("[1]", "holds a list, not fields"), ("\xff", "not valid JSON")]
)
def test_a_file_that_holds_no_configuration_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=sentence):
        read_shape(str(tmp_path))
