"""Read adapters of peft, and refuse adapters that would compute something else here."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.testing.trainer.base_models import save_base
from trainium_contract.trainer.tuning import TuningConfig
from trainium_trainer.exits import UserError
from trainium_trainer.tuning.trainable import select_trainable
from trainium_trainer.weights.adapter import AdapterWeights
from trainium_trainer.weights.base import BaseWeights
from trainium_trainer.weights.folder import open_shape

# Warnings of transformers and peft about each other.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`"),
]
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def save_adapter(folder: Path, *, base: dict[str, Any] | None = None, **fields: Any) -> Any:
    """Save an adapter of random numbers with peft, beside its base."""
    from peft import LoraConfig, get_peft_model

    settings = {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | fields
    model = get_peft_model(save_base(folder / "base", **base or {}), LoraConfig(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
    model.save_pretrained(folder / "adapter")
    return model


def lora_tuning(**lora: Any) -> TuningConfig:
    settings = {"rank": 4, "alpha": 12, "targets": ["q_proj", "v_proj"]} | lora
    trainable = settings.pop("trainable", None)
    return TuningConfig.model_validate({"method": "LoRA", "lora": settings, "trainable": trainable})


def edit_config(folder: Path, **fields: Any) -> None:
    file = folder / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def refusal(folder: Path, name: str = "adapter") -> str:
    with pytest.raises(UserError) as caught:
        AdapterWeights.open(str(folder / name))
    sentence = str(caught.value)
    assert sentence.startswith(f"tuning.lora.adapter {folder / name}: ")
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["down_proj"], ["lm_head", "k_proj"]], ids=str)
@pytest.mark.parametrize("stabilized", [False, True])
@pytest.mark.filterwarnings("ignore:.*embedding.*")
def test_adapters_of_peft_are_read_under_the_names_of_parameters(
    tmp_path: Path, targets: list[str], *, stabilized: bool
) -> None:
    model = save_adapter(tmp_path, target_modules=targets, use_rslora=stabilized, base={"tie_word_embeddings": False})
    adapter = AdapterWeights.open(str(tmp_path / "adapter"))
    assert (adapter.lora.rank, adapter.lora.alpha, adapter.lora.rank_stabilized) == (4, 12, stabilized)
    shape = open_shape(str(tmp_path / "base"))
    settings = lora_tuning(targets=targets, rankStabilized=stabilized)
    trainable = select_trainable(shape, settings)
    # peft also saves the unchanged weight below an adapter of the output projection.
    assert set(adapter.names) == set(trainable.sizes) | ({"lm_head.weight"} if "lm_head" in targets else set())
    adapter.check(settings, shape, BaseWeights.open(str(tmp_path / "base")))
    saved = {name.replace(".default", ""): value for name, value in model.named_parameters() if "lora_" in name}
    assert saved.keys() == {f"base_model.model.{name}" for name in trainable.sizes}
    for name, size in trainable.sizes.items():
        assert tuple(adapter.find_size(name)) == size
        assert torch.equal(adapter.read(name), saved[f"base_model.model.{name}"])
        corner = torch.empty(2, 3)
        adapter.fill(name, (1, 1), corner)
        assert torch.equal(corner, saved[f"base_model.model.{name}"][1:3, 1:4])
    layer = model.get_submodule(f"base_model.model.{trainable.adapters[0]}")
    assert settings.lora.find_scale(trainable.adapters[0]) == layer.scaling["default"]


def test_ranks_alphas_and_lengths_of_single_targets_are_read_as_peft_saves_them(tmp_path: Path) -> None:
    model = save_adapter(
        tmp_path,
        target_modules=["q_proj", "v_proj", "down_proj"],
        rank_pattern={"down_proj": 2, "layers.1.self_attn.q_proj": 8},
        alpha_pattern={r".*v_proj": 5},
        use_dora=True,
    )
    adapter = AdapterWeights.open(str(tmp_path / "adapter"))
    patterns = {"*down_proj": 2, "model.layers.1.self_attn.q_proj": 8}
    options = {"targets": ["q_proj", "v_proj", "down_proj"], "dora": True, "alphaPattern": {"v_proj": 5.0}}
    settings = lora_tuning(**options, rankPattern=patterns)
    shape = open_shape(str(tmp_path / "base"))
    sizes = select_trainable(shape, settings).sizes
    assert set(adapter.names) == set(sizes)
    for name, size in sizes.items():
        assert tuple(adapter.find_size(name)) == size
        saved = model.get_parameter("base_model.model." + name.replace(".weight", ".default.weight"))
        assert torch.equal(adapter.read(name), saved)
    for module in adapter.targets:
        layer = model.get_submodule(f"base_model.model.{module}")
        assert settings.lora.find_scale(module) == layer.scaling["default"]
    adapter.check(settings, shape)
    for other, sentence in (
        (
            lora_tuning(**options),
            r"was made with rank 2 on model\.layers\.0\.mlp\.down_proj, but tuning\.lora gives it 4",
        ),
        (lora_tuning(**options | {"alphaPattern": {}}, rankPattern=patterns), "was made with alpha 5.0 on"),
        (lora_tuning(**options | {"dora": False}, rankPattern=patterns), "was made with dora true"),
    ):
        with pytest.raises(UserError, match=sentence):
            adapter.check(other, shape)


def test_lengths_that_the_configuration_does_not_name_are_refused(tmp_path: Path) -> None:
    save_adapter(tmp_path, use_dora=True)
    edit_config(tmp_path / "adapter", use_dora=False)
    assert "has no use_dora: set it to true there" in refusal(tmp_path)
    save_adapter(tmp_path)
    edit_config(tmp_path / "adapter", use_dora=True)
    assert "lora_magnitude_vector.weight: copy or fetch the folder again" in refusal(tmp_path)


def test_modules_that_peft_saves_whole_are_read_under_their_names(tmp_path: Path) -> None:
    save_adapter(tmp_path, modules_to_save=["lm_head", "embed_tokens"], base={"tie_word_embeddings": False})
    adapter = AdapterWeights.open(str(tmp_path / "adapter"))
    assert set(adapter.replaced_parameters) == {"lm_head.weight", "model.embed_tokens.weight"}
    base = load_file(tmp_path / "base" / "model.safetensors")
    assert torch.equal(adapter.read("lm_head.weight"), base["lm_head.weight"])
    shape = open_shape(str(tmp_path / "base"))
    weights = BaseWeights.open(str(tmp_path / "base"))
    adapter.check(lora_tuning(), shape, weights)  # the values of the base
    file = tmp_path / "adapter" / TENSORS
    save_file({name: 2 * value for name, value in load_file(file).items()}, file)
    with pytest.raises(UserError, match=r"would not be used: add lm_head, model\.embed_tokens to tuning\.trainable"):
        AdapterWeights.open(str(tmp_path / "adapter")).check(lora_tuning(), shape, weights)
    adapter.check(lora_tuning(trainable=["lm_head", "embed_tokens"]), shape)


def test_the_digest_follows_the_values(tmp_path: Path) -> None:
    save_adapter(tmp_path)
    first = AdapterWeights.open(str(tmp_path / "adapter")).digest
    assert first == AdapterWeights.open(str(tmp_path / "adapter")).digest
    tensors = load_file(tmp_path / "adapter" / TENSORS)
    next(iter(tensors.values()))[0, 0] += 1
    save_file(tensors, tmp_path / "adapter" / TENSORS)
    assert AdapterWeights.open(str(tmp_path / "adapter")).digest != first


MERGE_ADVICE = "merge it into its base with peft (merge_and_unload)"
PLAIN_LORA_ADVICE = "train a plain LoRA adapter instead, because peft cannot merge this kind either"


@pytest.mark.parametrize(
    ("fields", "sentence", "advice"),
    [
        ({"bias": "lora_only"}, "trains biases", MERGE_ADVICE),
        ({"lora_bias": True}, "sets lora_bias, which plain LoRA does not have", MERGE_ADVICE),
        ({"init_lora_weights": "pissa_niter_4"}, "was initialized with pissa_niter_4", MERGE_ADVICE),
        ({"init_lora_weights": "lora_ga"}, "was initialized with lora_ga", MERGE_ADVICE),
        ({"init_lora_weights": "of-a-later-version"}, "was initialized with of-a-later-version", MERGE_ADVICE),
        ({"layer_replication": [[0, 2], [1, 2]]}, "repeats layers of its base", PLAIN_LORA_ADVICE),
        ({"alora_invocation_tokens": [50, 51]}, "is an activated LoRA", PLAIN_LORA_ADVICE),
        ({"use_qalora": True, "qalora_group_size": 4}, "sets use_qalora, which plain LoRA does not have", MERGE_ADVICE),
        ({"use_bdlora": {"nblocks": 2}}, "sets use_bdlora, which plain LoRA does not have", MERGE_ADVICE),
        ({"kasa_config": {"beta": 1}}, "sets kasa_config, which plain LoRA does not have", MERGE_ADVICE),
        ({"of_a_later_version": {"scale": 2}}, "sets of_a_later_version, which plain LoRA does not have", MERGE_ADVICE),
    ],
    ids=str,
)
def test_adapters_that_compute_otherwise_are_refused(
    tmp_path: Path, fields: dict[str, Any], sentence: str, advice: str
) -> None:
    save_adapter(tmp_path)
    edit_config(tmp_path / "adapter", **fields)
    message = refusal(tmp_path)
    assert sentence in message
    assert advice in message


def test_every_default_of_peft_and_every_field_that_changes_no_number_is_accepted(tmp_path: Path) -> None:
    from peft import LoraConfig

    save_adapter(tmp_path)
    folder = tmp_path / "adapter"
    saved = json.loads((folder / CONFIG).read_text())
    edit_config(folder, **{name: value for name, value in LoraConfig().to_dict().items() if name not in saved})
    edit_config(
        folder, eva_config={"rho": 2.0}, loftq_config={"x": 1}, qalora_group_size=8, peft_version="9", later=None
    )
    for initial in (True, False, None, "gaussian", "eva", "orthogonal", "mica"):
        edit_config(folder, init_lora_weights=initial)
        AdapterWeights.open(str(folder)).check_base(open_shape(str(tmp_path / "base")))


def test_other_kinds_that_peft_saves_are_refused(tmp_path: Path) -> None:
    from peft import IA3Config, get_peft_model

    for name, fields, sentence in (
        ("alora", {"alora_invocation_tokens": [3, 4]}, "is an activated LoRA"),
        ("tokens", {"trainable_token_indices": [1, 2]}, "trains single rows of the embedding"),
        ("embedding", {"target_modules": ["embed_tokens"]}, "is no part of a plain LoRA adapter of linear layers"),
    ):
        save_adapter(tmp_path / name, **fields)
        assert sentence in refusal(tmp_path / name)
    config = IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[])
    get_peft_model(save_base(tmp_path / "ia3" / "base"), config).save_pretrained(tmp_path / "ia3" / "adapter")
    assert "is of peft's type IA3, but only LORA is supported" in refusal(tmp_path / "ia3")


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": "all-linear"},
        {"target_modules": r".*\.1\.self_attn\.[qk]_proj"},
        {"target_modules": ["q_proj", "mlp.up_proj"], "exclude_modules": ["layers.0.mlp.up_proj"]},
        {"target_modules": ["model.layers.1.self_attn.o_proj"]},
        {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
        {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": 0},
        {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "norm"]},
    ],
    ids=str,
)
def test_a_file_that_lacks_what_its_configuration_names_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    save_adapter(tmp_path, base={"tie_word_embeddings": False}, **fields)
    shape = open_shape(str(tmp_path / "base"))
    AdapterWeights.open(str(tmp_path / "adapter")).check_base(shape)  # complete, as saved by peft
    tensors = load_file(tmp_path / "adapter" / TENSORS)
    for module in {name.replace("lora_A", "lora_B") for name in tensors}:
        remaining = {name: value for name, value in tensors.items() if name.replace("lora_A", "lora_B") != module}
        if remaining:
            save_file(remaining, tmp_path / "adapter" / TENSORS)
            with pytest.raises(UserError, match=r"adapter_config.json names \S+, of which .* holds nothing: copy or"):
                AdapterWeights.open(str(tmp_path / "adapter")).check_base(shape)


def test_a_folder_that_is_no_adapter_is_refused(tmp_path: Path) -> None:
    save_adapter(tmp_path)
    assert "has no adapter_config.json: name the folder of an adapter" in refusal(tmp_path, "base")
    tensors = load_file(tmp_path / "adapter" / TENSORS)
    (tmp_path / "adapter" / TENSORS).unlink()
    assert f"has no {TENSORS}" in refusal(tmp_path)
    torch.save(tensors, tmp_path / "adapter" / "adapter_model.bin")
    assert "holds its matrices as a pickle (adapter_model.bin)" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (
            lambda tensors: tensors.pop(next(name for name in tensors if "lora_B" in name)),
            r"holds \S+lora_A\.weight without \S+lora_B",
        ),
        (
            lambda tensors: tensors.update({"x.lora_A.weight": torch.ones(4, 2)}),
            r"holds x.lora_A.weight, but peft's names begin with base_model\.model\.",
        ),
        (
            lambda tensors: tensors.update({next(name for name in tensors if "lora_A" in name): torch.ones(5, 32)}),
            r"has the size \[5, 32\], but adapter_config.json has rank 4",
        ),
        (dict.clear, "holds nothing: copy or fetch"),
    ],
    ids=["half a pair", "strange name", "other rank", "nothing"],
)
def test_matrices_that_do_not_belong_together_are_refused(
    tmp_path: Path, damage: Callable[[dict[str, torch.Tensor]], object], sentence: str
) -> None:
    save_adapter(tmp_path)
    tensors = load_file(tmp_path / "adapter" / TENSORS)
    damage(tensors)
    save_file(tensors, tmp_path / "adapter" / TENSORS)
    assert re.search(sentence, refusal(tmp_path))


def test_a_truncated_adapter_is_refused(tmp_path: Path) -> None:
    save_adapter(tmp_path)
    file = tmp_path / "adapter" / TENSORS
    file.write_bytes(file.read_bytes()[:-1])
    assert f"{TENSORS} is cut short" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"rank": 8}, "was made with rank 4, but tuning.lora.rank is 8: set it to 4"),
        ({"alpha": 8}, "was made with alpha 12.0, but tuning.lora.alpha is 8.0: set it to 12.0"),
        ({"rankStabilized": True}, "was made with rankStabilized false, but tuning.lora.rankStabilized is true"),
        ({"targets": ["q_proj", "v_proj", "k_proj"]}, "names model.layers.0.self_attn.k_proj, model.layers.1"),
        ({"targets": ["q_proj"]}, r"stands beside model.layers.0.self_attn.v_proj"),
    ],
    ids=["rank", "alpha", "scale", "more targets", "fewer targets"],
)
def test_an_adapter_that_the_configuration_does_not_describe_is_refused(
    tmp_path: Path, settings: dict[str, Any], sentence: str
) -> None:
    save_adapter(tmp_path)
    adapter = AdapterWeights.open(str(tmp_path / "adapter"))
    with pytest.raises(UserError, match=re.escape(sentence)):
        adapter.check(lora_tuning(**settings), open_shape(str(tmp_path / "base")))


def test_an_adapter_of_another_base_is_refused_by_size_and_by_digest(tmp_path: Path) -> None:
    save_adapter(tmp_path)
    save_base(tmp_path / "wide", hidden_size=64)
    save_base(tmp_path / "short", num_hidden_layers=1)
    adapter = AdapterWeights.open(str(tmp_path / "adapter"))
    for name, sentence in (
        ("wide", r"has the size \[4, 32\], but .* it would be \[4, 64\]"),
        ("short", "has no place"),
    ):
        with pytest.raises(UserError, match=f"{sentence}.*use the base that it was made with"):
            adapter.check_base(open_shape(str(tmp_path / name)))
    base, other = BaseWeights.open(str(tmp_path / "base")), BaseWeights.open(str(tmp_path / "short"))
    tensors = load_file(tmp_path / "adapter" / TENSORS)
    save_file(tensors, tmp_path / "adapter" / TENSORS, metadata={"format": "pt", "base_digest": base.digest})
    edit_config(tmp_path / "adapter", base_model_name_or_path=base.location)
    adapter = AdapterWeights.open(str(tmp_path / "adapter"))
    adapter.check_base(base.shape, base)
    with pytest.raises(UserError, match=rf"was trained on another base than this one: use the base .*{base.location}"):
        adapter.check_base(other.shape, other)
    edit_config(tmp_path / "adapter", base_model_name_or_path=other.location)
    with pytest.raises(UserError, match="names this base, so one of the two folders has changed since: copy or fetch"):
        AdapterWeights.open(str(tmp_path / "adapter")).check_base(other.shape, other)
