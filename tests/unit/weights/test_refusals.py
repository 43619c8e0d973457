"""Refuse an unreadable base when it is opened, in one sentence with the remedy."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.testing.trainer.base_models import save_base
from trainium_trainer.exits import StorageError, TrainerError, UserError
from trainium_trainer.weights.base import BaseWeights
from trainium_trainer.weights.folder import open_shape

INDEX = "model.safetensors.index.json"


def edit(file: Path, **fields: Any) -> None:
    document = json.loads(file.read_text())
    file.write_text(json.dumps(document | fields))


def refusal(location: str | Path) -> str:
    with pytest.raises(UserError) as caught:
        BaseWeights.open(str(location))
    sentence = str(caught.value)
    assert sentence.startswith(f"model.weights {location}: ")
    assert "\n" not in sentence
    return sentence


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """Save a base in several files."""
    save_base(tmp_path / "base", largest="20KB")
    return tmp_path / "base"


@pytest.fixture
def single_file_base(tmp_path: Path) -> Path:
    """Save a base in one file."""
    save_base(tmp_path / "base")
    return tmp_path / "base"


def change(folder: Path, alter: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    alter(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B", "gpt2"])
def test_a_name_of_the_hub_is_refused_with_the_command_that_fetches_it(name: str) -> None:
    assert f"`trainium-trainer fetch-model {name} --output DIR`" in refusal(name)


def test_a_missing_folder_and_a_file_are_refused_as_a_base(tmp_path: Path) -> None:
    assert "there is no such folder: correct the path" in refusal(tmp_path / "nothing")
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    assert "is a file: name the folder that holds it" in refusal(file)


def test_a_folder_without_a_configuration_is_refused(single_file_base: Path) -> None:
    (single_file_base / "config.json").unlink()
    assert "has no config.json: name a folder that holds one" in refusal(single_file_base)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"architectures": ["PhiForCausalLM"], "model_type": "phi"},
            r"describes PhiForCausalLM \(model_type 'phi'\), but the built-in trainer has only",
        ),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"is quantised \(gptq\).*use the model as it"),
    ],
    ids=["architecture", "quantized"],
)
def test_a_model_of_another_kind_is_refused_by_its_configuration(
    single_file_base: Path, fields: dict[str, Any], sentence: str
) -> None:
    edit(single_file_base / "config.json", **fields)
    assert re.search(sentence, refusal(single_file_base))
    with pytest.raises(UserError, match=sentence):
        open_shape(str(single_file_base))


def test_a_configuration_that_is_not_json_is_refused(single_file_base: Path) -> None:
    (single_file_base / "config.json").write_text('{"hidden')
    assert "config.json is not valid JSON: copy or fetch the file again" in refusal(single_file_base)


def test_pickles_are_refused_with_the_remedy(single_file_base: Path) -> None:
    (single_file_base / "model.safetensors").unlink()
    torch.save({"a": torch.ones(1)}, single_file_base / "pytorch_model.bin")
    sentence = refusal(single_file_base)
    assert "holds its weights as pickles only (pytorch_model.bin)" in sentence
    assert "save_pretrained(NEW, safe_serialization=True)" in sentence


def test_a_folder_without_weights_or_without_an_index_is_refused(parts: Path) -> None:
    (parts / INDEX).unlink()
    assert re.search(r"holds model-00001-of-\d+\.safetensors, .* and \d+ more but neither", refusal(parts))
    for file in parts.glob("*.safetensors"):
        file.unlink()
    assert "holds no weights: there is neither model.safetensors nor" in refusal(parts)


def test_a_missing_shard_is_named(parts: Path) -> None:
    (missing := sorted(parts.glob("*.safetensors"))[1]).unlink()
    assert f"{INDEX} names {missing.name}, which is not there: copy or fetch it" in refusal(parts)


def test_an_index_that_names_missing_files_is_refused(parts: Path) -> None:
    weight_map = json.loads((parts / INDEX).read_text())["weight_map"]
    edit(parts / INDEX, weight_map={name: f"x-{file}" for name, file in weight_map.items()})
    assert re.search(r"names x-model-0\S+, x-\S+, x-\S+ and \d+ more, which are not there", refusal(parts))


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": {"a": 1}}', "{"])
def test_an_invalid_index_is_refused(parts: Path, text: str) -> None:
    (parts / INDEX).write_text(text)
    assert f"{INDEX} " in refusal(parts)


@pytest.mark.parametrize("length", [0, 5, 100, -1000, -1])
def test_a_truncated_file_is_refused_wherever_it_ends(single_file_base: Path, length: int) -> None:
    file = single_file_base / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:length])
    assert re.search(
        r"model\.safetensors (ends within|is cut short).*copy or fetch the file again", refusal(single_file_base)
    )


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        (b"\xff" * 8, "does not begin as a safetensors file does"),
        ((4).to_bytes(8, "little") + b"{{{{", "has an invalid header"),
        ((2).to_bytes(8, "little") + b"[]", "has an invalid header"),
    ],
)
def test_a_file_that_is_no_safetensors_is_refused(single_file_base: Path, header: bytes, sentence: str) -> None:
    (single_file_base / "model.safetensors").write_bytes(header + bytes(100))
    assert f"model.safetensors {sentence}" in refusal(single_file_base)


def test_a_header_whose_sizes_and_bytes_disagree_is_refused(single_file_base: Path) -> None:
    file = single_file_base / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["model.norm.weight"]["shape"] = [33]
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    assert "gives model.norm.weight of size [33] in F32 128 bytes, not 132" in refusal(single_file_base)


def test_a_tensor_of_another_size_and_a_missing_one_are_named(single_file_base: Path) -> None:
    change(single_file_base, lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}))
    assert "model.norm.weight has the size [31], but config.json describes [32]" in refusal(single_file_base)
    change(single_file_base, lambda tensors: tensors.pop("model.norm.weight"))
    assert "the files lack model.norm.weight: copy or fetch the folder again" in refusal(single_file_base)


def test_weights_in_a_type_of_few_bits_are_refused(single_file_base: Path) -> None:
    change(single_file_base, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.float8_e4m3fn)}))
    assert "model.norm.weight is stored as F8_E4M3, but weights must be F64, F32, F16, BF16" in refusal(
        single_file_base
    )


def test_tensors_that_the_model_has_no_place_for_are_not_left_out_silently(single_file_base: Path) -> None:
    change(single_file_base, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}))
    assert "the files hold model.layers.0.self_attn.q_proj.bias, for which" in refusal(single_file_base)


def test_projections_that_are_stored_as_one_are_refused_with_the_way_to_divide_them(single_file_base: Path) -> None:
    def fuse(tensors: dict[str, torch.Tensor]) -> None:
        prefix = "model.layers.0.self_attn."
        parts = [tensors.pop(f"{prefix}{name}_proj.weight") for name in "qkv"]
        tensors[f"{prefix}qkv_proj.weight"] = torch.cat(parts)

    change(single_file_base, fuse)
    assert "qkv_proj is q_proj, k_proj and v_proj in one, which this model has apart: save" in refusal(single_file_base)


def test_a_file_truncated_after_it_was_opened_is_reported(single_file_base: Path) -> None:
    weights = BaseWeights.open(str(single_file_base))
    os.truncate(single_file_base / "model.safetensors", 5000)
    with pytest.raises(UserError, match=r"model\.safetensors ends too early: copy or fetch the file again"):
        weights.fill("model.norm.weight", (0,), torch.empty(32))


def test_an_empty_prefix_and_a_refused_request_are_reported_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.testing.trainer.s3_gateway import Fault, run_gateway

    with run_gateway(tmp_path, monkeypatch) as server:
        assert "there is nothing below this prefix: correct it" in refusal("s3://bucket/models/none")
        server.inject_fault(Fault(status=403, code="AccessDenied", times=100))
        with pytest.raises(
            TrainerError, match=r"model\.weights s3://bucket/base: cannot be read \(AccessDen"
        ) as caught:
            BaseWeights.open("s3://bucket/base")
        assert isinstance(caught.value, StorageError)
