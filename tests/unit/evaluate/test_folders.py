"""Open folders of models and adapters: refuse incomplete ones, and compute as peft and transformers do."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainium_contract.accelerators import Device
from trainium_contract.trainer.evaluate import GenerationConfig
from trainium_trainer.evaluate.answering.folder import ComputeType, open_model_files
from trainium_trainer.evaluate.answering.generation import generate
from trainium_trainer.evaluate.answering.loading import load
from trainium_trainer.evaluate.check_folder import compute_logits
from trainium_trainer.evaluate.memory import count_readers, read_available_bytes
from trainium_trainer.exits import UserError
from trainium_trainer.weights.base import BaseWeights

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft and transformers


@pytest.fixture
def model_copy(model_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(model_folder, tmp_path / "copy")


@pytest.fixture
def adapter(model_folder: Path, tmp_path: Path) -> Path:
    return write_adapter(model_folder, tmp_path / "adapter")


def write_adapter(model: Path, folder: Path, **fields: Any) -> Path:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    config = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], **fields)
    network = get_peft_model(LlamaForCausalLM.from_pretrained(model), config)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    network.save_pretrained(folder)
    return folder


def test_an_adapter_beside_its_base_gives_the_answers_of_the_merged_model(
    model_folder: Path, adapter: Path, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    base = load(open_model_files(model_folder), device=Device.CPU)
    with_adapter = load(open_model_files(model_folder, adapter), device=Device.CPU)
    merged = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(model_folder), adapter).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    shutil.copyfile(model_folder / "tokenizer.json", tmp_path / "merged" / "tokenizer.json")
    reference = load(open_model_files(tmp_path / "merged"), device=Device.CPU)
    prompts = [base.folder.encode("gradient loss"), base.folder.encode("a")]
    config = GenerationConfig(max_new_tokens=12)
    assert generate(with_adapter, prompts, config) == generate(reference, prompts, config)
    assert generate(with_adapter, prompts, config) != generate(base, prompts, config)


def test_an_adapter_of_another_base_is_refused(write_model: Callable[..., Path], adapter: Path, tmp_path: Path) -> None:
    wide = write_model(tmp_path / "wide", hidden_size=64)
    with pytest.raises(UserError, match=r"width 32, but in .*wide it has 64: it is of another base"):
        load(open_model_files(wide, adapter), device=Device.CPU)
    short = write_model(tmp_path / "short", num_hidden_layers=1)
    with pytest.raises(UserError, match=r"model\.layers\.1\.self_attn\.[qv]_proj, which .*short does not have"):
        load(open_model_files(short, adapter), device=Device.CPU)


def test_an_adapter_whose_file_names_another_base_is_refused(
    write_model: Callable[..., Path], adapter: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    bases = [write_model(tmp_path / f"base-{seed}", seed=seed) for seed in (1, 2)]
    file = adapter / "adapter_model.safetensors"
    save_file(load_file(file), file, metadata={"base_digest": BaseWeights.open(str(bases[0])).digest})
    load(open_model_files(bases[0], adapter), device=Device.CPU)
    with pytest.raises(UserError, match=r"was made for another base than .*base-2"):
        load(open_model_files(bases[1], adapter), device=Device.CPU)


def test_an_adapter_in_place_of_a_model_is_refused(adapter: Path) -> None:
    with pytest.raises(UserError, match="is an adapter, not a model: give its model with --base"):
        open_model_files(adapter)


def test_an_adapter_of_another_kind_is_refused(model_folder: Path, adapter: Path) -> None:
    document = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(document | {"peft_type": "IA3"}))
    with pytest.raises(UserError, match="peft_type is 'IA3', but only LORA"):
        open_model_files(model_folder, adapter)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("tokenizer.json", None, "there is no tokenizer.json: copy the one"),
        ("tokenizer.json", "{}", "cannot be read as a tokenizer"),
        ("config.json", None, r"config\.json: cannot be read \(No such file"),
        ("config.json", "{", "not valid JSON"),
        ("config.json", "[]", "holds a list, not fields"),
        ("model.safetensors", None, "there is no safetensors file: save the model again"),
    ],
)
def test_an_incomplete_folder_is_refused(model_copy: Path, name: str, content: str | None, sentence: str) -> None:
    if content is None:
        (model_copy / name).unlink()
    else:
        (model_copy / name).write_text(content)
    with pytest.raises(UserError, match=sentence) as caught:
        open_model_files(model_copy)
    assert str(model_copy) in str(caught.value)


def test_pickled_weights_are_refused_with_the_remedy(model_copy: Path) -> None:
    (model_copy / "model.safetensors").rename(model_copy / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pickled weights.*save_pretrained"):
        open_model_files(model_copy)


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such folder"):
        open_model_files(tmp_path / "nothing")


def test_a_missing_weight_is_refused(model_copy: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(model_copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, model_copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"1 weights are missing .*layers\.1\.mlp\.up_proj"):
        load(open_model_files(model_copy), device=Device.CPU)


def test_a_truncated_file_is_refused_in_one_sentence(model_copy: Path) -> None:
    data = (model_copy / "model.safetensors").read_bytes()
    (model_copy / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(UserError, match="transformers cannot load the model"):
        load(open_model_files(model_copy), device=Device.CPU)


@pytest.mark.parametrize("tied", [False, True])
def test_the_training_model_computes_the_logits_of_transformers(
    write_model: Callable[..., Path], tmp_path: Path, tied: bool
) -> None:
    from transformers import LlamaForCausalLM

    folder = write_model(tmp_path / "model", tie_word_embeddings=tied)
    reference = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = reference(tokens).logits
    torch.testing.assert_close(compute_logits(BaseWeights.open(str(folder)), tokens), expected, rtol=1e-5, atol=1e-5)


def test_a_model_computes_in_the_requested_type(model_folder: Path) -> None:
    half = load(open_model_files(model_folder), device=Device.CPU, precision=ComputeType.BFLOAT16)
    assert half.network.dtype is torch.bfloat16


def test_the_bos_token_that_a_tokenizer_adds_occurs_once(model_copy: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    tokenizer = Tokenizer.from_file(str(model_copy / "tokenizer.json"))
    end = "<|endoftext|>"
    tokenizer.post_processor = TemplateProcessing(
        single=f"{end} $A", special_tokens=[(end, tokenizer.token_to_id(end))]
    )
    tokenizer.save(str(model_copy / "tokenizer.json"))
    (model_copy / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": end}}))
    model_files = open_model_files(model_copy)
    assert model_files.encode("step") == model_files.encode(f"{end}step")
    assert model_files.encode("step")[0] == tokenizer.token_to_id(end)


def test_the_number_of_reading_processes_fits_the_memory(tmp_path: Path) -> None:
    assert count_readers(1000, 4000) == 3
    assert count_readers(1000, 10) == 1
    assert count_readers(1000, None) == 1
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    assert read_available_bytes(tmp_path / "meminfo", tmp_path) == 5_120_000
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert read_available_bytes(tmp_path / "meminfo", tmp_path) == 2_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert read_available_bytes(tmp_path / "meminfo", tmp_path) == 5_120_000
    assert read_available_bytes(tmp_path / "nothing", tmp_path / "nothing") is None
