"""A model in Hugging Face's form, against `transformers` itself: names, shapes, rotary scaling, logits."""

from __future__ import annotations

import json
import os
import stat
from typing import TYPE_CHECKING, Any

import pytest
import torch

from trainium_contract.trainer_model import ModelConfig
from trainium_trainer.exits import UserError
from trainium_trainer.export.huggingface import parameter_sizes, write_folder
from trainium_trainer.models.llama import Llama
from trainium_trainer.models.shapes import resolve_shape

if TYPE_CHECKING:
    from pathlib import Path

    from trainium_trainer.models.shapes import ModelShape

SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 72}


def model_of(**fields: Any) -> tuple[Llama, ModelShape]:
    shape = resolve_shape(ModelConfig.model_validate(SMALL | fields), 72)
    model = Llama(shape)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.empty(parameter.shape).uniform_(-0.4, 0.4, generator=generator))
    return model, shape


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tie_embeddings": False},
        {"head_dim": 16, "num_key_value_heads": 1},
        {"rope_scaling": {"kind": "Linear", "factor": 3.0}},
        # Short waves are kept, long ones slowed and those between mixed, all within these few positions.
        {"rope_scaling": {"original_max_positions": 64}, "rope_theta": 500.0},
    ],
    ids=["tied", "untied", "wide heads", "linear", "llama3"],
)
def test_transformers_computes_the_same_logits(tmp_path: Path, fields: dict[str, Any]) -> None:
    from transformers import LlamaForCausalLM

    model, shape = model_of(**fields)
    weights = dict(model.named_parameters())
    write_folder(tmp_path / "out", shape, weights.__getitem__)
    reference, report = LlamaForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype=torch.float32
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert sum(parameter.numel() for parameter in reference.parameters()) == shape.num_parameters
    tokens = torch.randint(0, 72, (2, 33), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), reference(tokens).logits, rtol=1e-4, atol=1e-5)


def test_large_models_are_written_in_parts_that_an_index_names(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model, shape = model_of(tie_embeddings=False)
    weights = dict(model.named_parameters())
    asked: list[str] = []

    def read(name: str) -> torch.Tensor:
        asked.append(name)
        return weights[name]

    write_folder(tmp_path / "out", shape, read, dtype=torch.bfloat16, largest=10_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == 2 * shape.num_parameters
    assert asked == list(parameter_sizes(shape))
    found: dict[str, torch.Tensor] = {}
    for name in files:
        found |= load_file(tmp_path / "out" / name)
    assert found.keys() == weights.keys()
    for name, value in found.items():
        assert torch.equal(value, weights[name].bfloat16())


def test_a_model_of_another_size_is_refused_and_leaves_no_complete_folder(tmp_path: Path) -> None:
    model, _ = model_of()
    _, other = model_of(intermediate_size=64)
    with pytest.raises(UserError, match=r"gate_proj\.weight has the size \[48, 32\], but the model's is \[64, 32\]"):
        write_folder(tmp_path / "out", other, dict(model.named_parameters()).__getitem__)
    assert not (tmp_path / "out" / "config.json").exists()


def test_nothing_that_exists_is_overwritten(tmp_path: Path) -> None:
    model, shape = model_of()
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty: name a folder that does not exist yet"):
        write_folder(tmp_path, shape, dict(model.named_parameters()).__getitem__)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_files_have_the_rights_that_the_umask_gives(tmp_path: Path) -> None:
    model, shape = model_of()
    before = os.umask(0o027)
    try:
        write_folder(tmp_path / "out", shape, dict(model.named_parameters()).__getitem__)
    finally:
        os.umask(before)
    rights = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
    assert rights == {"config.json": 0o640, "model.safetensors": 0o640}
