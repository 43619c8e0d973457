"""Write, merge and read adapters, and compare each with peft."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.testing.trainer.base_models import save_base, save_tuned
from trainium_contract.trainer.artifacts import ArtifactKind, ArtifactPrecision
from trainium_trainer import cli
from trainium_trainer.artifacts.export import export, merge
from trainium_trainer.artifacts.peft_format import shorten_names
from trainium_trainer.exits import UserError
from trainium_trainer.weights.adapter import AdapterWeights

pytestmark = [
    # Warnings of transformers and peft about each other.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`"),
    pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied"),
]
FLOAT32 = ArtifactPrecision.FLOAT32
UNTIED = {"tie_word_embeddings": False}
TOKENS = torch.randint(0, 72, (2, 17), generator=torch.Generator().manual_seed(3))


def logits(model: Any, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(tokens).logits


def load(folder: Path) -> Any:
    from transformers import LlamaForCausalLM

    model, report = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lora": {"targets": ["*_proj"], "rankStabilized": True, "alpha": 3.5}},
        {"base": UNTIED, "lora": {"targets": ["lm_head", "model.layers.1.mlp.*"]}},
        {"base": UNTIED, "trainable": ["lm_head", "embed_tokens", "model.layers.1.input_layernorm"]},
        {"base": {"tie_word_embeddings": True}, "trainable": ["embed_tokens"]},
        {"base": {"dtype": torch.bfloat16}},
        {"lora": {"targets": ["*_proj"], "dora": True}},
        {
            "lora": {
                "targets": ["*_proj"],
                "rankPattern": {"model.layers.?.mlp.*": 2, "q_proj": 8},
                "alphaPattern": {"model.layers.1.self_attn.k_proj": 3.5},
            }
        },
        {"lora": {"targets": ["q_proj", "down_proj"], "dora": True, "rankPattern": {"down_proj": 2}}},
        {"base": {"attention_bias": True, "mlp_bias": True}, "lora": {"targets": ["*_proj"], "dora": True}},
        {"base": {"attention_bias": True}, "trainable": ["model.layers.0.self_attn.k_proj"]},
    ],
    ids=[
        "plain",
        "all, stabilised",
        "head and one layer",
        "whole weights too",
        "tied embedding too",
        "half base",
        "DoRA",
        "ranks and alphas",
        "DoRA with ranks",
        "DoRA beside biases",
        "a whole module with its bias",
    ],
)
def test_peft_loads_our_adapter_and_merges_it_to_our_model(tmp_path: Path, options: dict[str, Any]) -> None:
    from peft import PeftModel

    run = save_tuned(tmp_path, **options)
    base = str(tmp_path / "base")
    export(run.root, tmp_path / "adapter", base=base, kind=ArtifactKind.ADAPTER)
    export(run.root, tmp_path / "model", base=base, precision=FLOAT32)
    with_peft = PeftModel.from_pretrained(load(tmp_path / "base"), str(tmp_path / "adapter"))
    expected, merged = logits(with_peft), logits(load(tmp_path / "model"))
    scale = float(expected.abs().max())
    assert float((merged - expected).abs().max()) < 1e-5 * scale
    assert float((merged - logits(with_peft.merge_and_unload())).abs().max()) < 1e-5 * scale
    assert float((merged - logits(load(tmp_path / "base"))).abs().max()) > 0.05 * scale


def test_the_adapter_file_has_the_trained_weights_in_float32(tmp_path: Path) -> None:
    run = save_tuned(tmp_path, lora={"dropout": 0.1})
    export(run.root, tmp_path / "adapter", base=str(tmp_path / "base"), kind=ArtifactKind.ADAPTER)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert tensors.keys() == {f"base_model.model.{name}" for name in run.trained}
    for name, value in run.trained.items():
        assert torch.equal(tensors[f"base_model.model.{name}"], value)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert list(config) == sorted(config)
    expected = {
        "r": 4,
        "lora_alpha": 12,
        "lora_dropout": 0.1,
        "target_modules": ["q_proj", "v_proj"],
        "peft_type": "LORA",
    }
    assert expected.items() <= config.items()
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    reopened = AdapterWeights.open(str(tmp_path / "adapter"))
    assert reopened.base_digest == run.weights.digest
    reopened.check(run.config.tuning, run.shape, run.weights)


def test_peft_knows_every_field_of_the_configuration(tmp_path: Path) -> None:
    from peft import LoraConfig

    run = save_tuned(tmp_path)
    export(run.root, tmp_path / "adapter", base=str(tmp_path / "base"), kind=ArtifactKind.ADAPTER)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config.keys() <= LoraConfig().to_dict().keys()


@pytest.mark.parametrize("lora", [{}, {"dora": True, "rankPattern": {"up_proj": 2}}], ids=["plain", "DoRA"])
def test_merging_an_adapter_of_peft_gives_the_model_of_peft(tmp_path: Path, lora: dict[str, Any]) -> None:
    from peft import PeftModel

    run = save_tuned(tmp_path, lora={"targets": ["*_proj"]} | lora, base=UNTIED, trainable=["model.norm"])
    export(run.root, tmp_path / "exported", base=str(tmp_path / "base"), kind=ArtifactKind.ADAPTER)
    with_peft = PeftModel.from_pretrained(load(tmp_path / "base"), str(tmp_path / "exported"))
    with_peft.save_pretrained(tmp_path / "by-peft")
    merge(str(tmp_path / "base"), str(tmp_path / "by-peft"), tmp_path / "merged", precision=FLOAT32)
    merge(str(tmp_path / "base"), str(tmp_path / "exported"), tmp_path / "merged-exported", precision=FLOAT32)
    expected = logits(with_peft.merge_and_unload())
    torch.testing.assert_close(logits(load(tmp_path / "merged")), expected, rtol=1e-5, atol=1e-5)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("merged", "merged-exported")]
    assert files[0] == files[1]


ADAPTERS_OF_PEFT: list[dict[str, Any]] = [
    {"target_modules": ["q_proj", "lm_head"]},
    {"target_modules": ["q_proj", "lm_head"], "use_dora": True},
    {"modules_to_save": ["embed_tokens", "lm_head"]},
    {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
    {"modules_to_save": ["embed_tokens"]},
    {"modules_to_save": ["lm_head"]},
    {"modules_to_save": ["embed_tokens"], "target_modules": ["q_proj", "lm_head"]},
    {},
]


@pytest.mark.filterwarnings("ignore::UserWarning")  # about tied weights, and about saved embeddings
@pytest.mark.parametrize("fields", ADAPTERS_OF_PEFT, ids=str)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("added", [0, 3])
def test_an_adapter_of_peft_with_embeddings_is_merged_as_it_was_trained(
    tmp_path: Path, fields: dict[str, Any], added: int, *, tied: bool
) -> None:
    from peft import LoraConfig, get_peft_model

    save_base(tmp_path / "base", tie_word_embeddings=tied)
    model = load(tmp_path / "base")  # peft compares its vocabulary with that of the folder
    if added:
        model.resize_token_embeddings(72 + added)
    settings = {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj"]} | fields
    with_peft = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for parameter in with_peft.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    with_peft.save_pretrained(tmp_path / "adapter")
    merge(str(tmp_path / "base"), str(tmp_path / "adapter"), tmp_path / "merged", precision=FLOAT32)
    stored = load_file(tmp_path / "adapter/adapter_model.safetensors")
    # Beside an adapter of the output projection, peft does not store the rows of new tokens in the embedding.
    inputs = torch.arange(72 + added if "base_model.model.model.embed_tokens.weight" in stored else 72)[None]
    torch.testing.assert_close(
        logits(load(tmp_path / "merged"), inputs), logits(with_peft, inputs), rtol=1e-4, atol=1e-4
    )


def test_merging_into_a_file_of_half_precision_rounds_once(tmp_path: Path) -> None:
    run = save_tuned(tmp_path, base={"dtype": torch.bfloat16})
    export(run.root, tmp_path / "model", base=str(tmp_path / "base"), precision=ArtifactPrecision.BFLOAT16)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    for name, before in run.base.named_parameters():
        if name.endswith("q_proj.weight"):
            module = name.removesuffix(".weight")
            lora_a, lora_b = (run.trained[f"{module}.lora_{side}.weight"] for side in "AB")
            exact = before.detach().double() + 3.0 * (lora_b.double() @ lora_a.double())
            assert torch.equal(tensors[name], exact.bfloat16())
        elif not name.endswith("v_proj.weight"):
            assert torch.equal(tensors[name], before.detach())


def test_grown_rows_are_kept_and_rows_of_padding_left_out(tmp_path: Path) -> None:
    from peft import PeftModel

    run = save_tuned(tmp_path, base=UNTIED, vocabulary=75, padding=5, trainable=["lm_head", "embed_tokens"])
    base = str(tmp_path / "base")
    export(run.root, tmp_path / "model", base=base, precision=FLOAT32)
    export(run.root, tmp_path / "adapter", base=base, kind=ArtifactKind.ADAPTER)
    model = load(tmp_path / "model")
    assert model.config.vocab_size == 75
    assert torch.equal(model.lm_head.weight, run.trained["lm_head.weight"][:75])
    grown = load(tmp_path / "base")
    grown.resize_token_embeddings(75, mean_resizing=False)
    with_peft = PeftModel.from_pretrained(grown, str(tmp_path / "adapter"))
    tokens = torch.cat([TOKENS, torch.tensor([[72], [74]])], dim=1)
    torch.testing.assert_close(logits(model, tokens), logits(with_peft, tokens), rtol=1e-4, atol=1e-4)
    assert "base.resize_token_embeddings(base.config.vocab_size + 3)" in (tmp_path / "adapter/README.md").read_text()


def test_an_adapter_is_not_merged_into_a_model_that_does_not_fit(tmp_path: Path) -> None:
    run = save_tuned(tmp_path)
    export(run.root, tmp_path / "adapter", base=str(tmp_path / "base"), kind=ArtifactKind.ADAPTER)
    save_base(tmp_path / "sibling", seed=9)
    save_base(tmp_path / "quantised")
    document = json.loads((tmp_path / "quantised/config.json").read_text())
    document["quantization_config"] = {"quant_method": "bitsandbytes"}
    (tmp_path / "quantised/config.json").write_text(json.dumps(document))
    for name, sentence in (
        ("sibling", "was trained on another base than this one"),
        ("quantised", r"is quantised \(bitsandbytes\).*can neither be trained nor merged into"),
        ("adapter", "has no config.json"),
    ):
        with pytest.raises(UserError, match=sentence):
            merge(str(tmp_path / name), str(tmp_path / "adapter"), tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_the_commands_merge_and_export_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = save_tuned(tmp_path)
    base, adapter, out = (str(tmp_path / name) for name in ("base", "adapter", "out"))
    assert cli.run(["export", run.root, adapter, "--base", base, "--adapter"]) == 0
    assert cli.run(["merge", "--base", base, "--adapter", adapter, out, "--dtype", "float32"]) == 0
    assert capsys.readouterr().out == f"exported step 7 to {adapter}\nmerged {adapter} into {base}: {out}\n"
    export(run.root, tmp_path / "model", base=base, precision=FLOAT32)
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "model/model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("modules", "names"),
    [
        (["a.0.q", "a.1.q"], ["q"]),
        (["a.0.q", "a.1.q", "a.0.v"], ["a.0.q", "a.0.v", "a.1.q"]),
        (["a.0.v", "a.1.v", "head"], ["head", "v"]),
    ],
)
def test_targets_are_short_where_short_names_are_unambiguous(modules: list[str], names: list[str]) -> None:
    assert shorten_names(modules, ["a.0.q", "a.1.q", "a.0.v", "a.1.v", "head"]) == names
