"""Export models as Hugging Face folders, and compare with `transformers`."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.testing.trainer.base_models import save_base, write_run
from trainium_contract.models.parameters import count_parameters, parameter_sizes
from trainium_contract.models.shape import ModelShape
from trainium_contract.trainer.artifacts import ArtifactKind, ArtifactPrecision
from trainium_contract.trainer.model import ModelConfig
from trainium_trainer import cli
from trainium_trainer.artifacts.export import export
from trainium_trainer.configuration.model_shape import resolve_shape
from trainium_trainer.exits import UserError
from trainium_trainer.models.llama import Llama
from trainium_trainer.weights.base import BaseWeights

SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 72}
FLOAT32 = ArtifactPrecision.FLOAT32


def create_model(**fields: Any) -> tuple[Llama, ModelShape]:
    shape = resolve_shape(ModelConfig.model_validate(SMALL | fields), 72)
    model = Llama(shape)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.empty(parameter.shape).uniform_(-0.4, 0.4, generator=generator))
    return model, shape


def write_model_run(folder: Path, **fields: Any) -> tuple[Llama, ModelShape]:
    """Write a run's checkpoint below `folder/run`."""
    model, shape = create_model(**fields)
    write_run(folder / "run", shape, dict(model.named_parameters()))
    return model, shape


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tie_embeddings": False},
        {"head_dim": 16, "num_key_value_heads": 1},
        {"rope_scaling": {"kind": "Linear", "factor": 3.0}},
        # These few positions cover all three bands of wavelengths.
        {"rope_scaling": {"original_max_positions": 64}, "rope_theta": 500.0},
    ],
    ids=["tied", "untied", "wide heads", "linear", "llama3"],
)
def test_transformers_computes_the_same_logits(tmp_path: Path, fields: dict[str, Any]) -> None:
    from transformers import LlamaForCausalLM

    model, shape = write_model_run(tmp_path, **fields)
    assert export(str(tmp_path / "run"), tmp_path / "out", precision=FLOAT32) == 7
    reference, report = LlamaForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype=torch.float32
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert sum(parameter.numel() for parameter in reference.parameters()) == count_parameters(shape)
    tokens = torch.randint(0, 72, (2, 33), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), reference(tokens).logits, rtol=1e-4, atol=1e-5)


def test_large_models_are_written_in_parts_that_an_index_names(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model, shape = write_model_run(tmp_path, tie_embeddings=False)
    weights = dict(model.named_parameters())
    export(str(tmp_path / "run"), tmp_path / "out", max_file_bytes=10_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == 2 * count_parameters(shape)
    assert index["weight_map"].keys() == parameter_sizes(shape).keys()
    tensors: dict[str, torch.Tensor] = {}
    for name in files:
        tensors |= load_file(tmp_path / "out" / name)
    assert tensors.keys() == weights.keys()
    for name, value in tensors.items():
        assert torch.equal(value, weights[name].bfloat16())


def test_rows_of_padding_are_left_out(tmp_path: Path) -> None:
    from dataclasses import replace

    model, shape = create_model(tie_embeddings=False)
    write_run(tmp_path / "run", replace(shape, vocab_padding=5), dict(model.named_parameters()))
    export(str(tmp_path / "run"), tmp_path / "out", precision=FLOAT32)
    written = BaseWeights.open(str(tmp_path / "out"))
    assert written.shape == replace(shape, vocab_size=67)
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        rows = torch.empty(67, 32)
        written.fill(name, (0, 0), rows)
        assert torch.equal(rows, dict(model.named_parameters())[name][:67])


def test_a_model_of_another_size_is_refused_and_leaves_no_complete_folder(tmp_path: Path) -> None:
    model, _ = create_model()
    _, other = create_model(intermediate_size=64)
    write_run(tmp_path / "run", other, dict(model.named_parameters()))
    with pytest.raises(UserError, match=r"gate_proj\.weight has the size \[48, 32\], but the model's is \[64, 32\]"):
        export(str(tmp_path / "run"), tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    write_model_run(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty: name a folder that does not exist yet"):
        export(str(tmp_path / "run"), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]


def test_a_complete_export_is_not_repeated(tmp_path: Path) -> None:
    write_model_run(tmp_path)
    export(str(tmp_path / "run"), tmp_path / "out")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    export(str(tmp_path / "run"), tmp_path / "out")
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
    with pytest.raises(UserError, match="is not empty"):
        export(str(tmp_path / "run"), tmp_path / "out", precision=FLOAT32)


def test_files_have_the_permissions_of_the_umask(tmp_path: Path) -> None:
    write_model_run(tmp_path)
    before = os.umask(0o027)
    try:
        export(str(tmp_path / "run"), tmp_path / "out")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
    assert modes == dict.fromkeys(["README.md", "artifact.json", "config.json", "model.safetensors"], 0o640)


def test_a_run_that_trained_a_part_of_a_model_needs_its_base(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", tie_word_embeddings=False)
    save_base(tmp_path / "other", tie_word_embeddings=False, seed=3)
    opened = BaseWeights.open(str(tmp_path / "base"))
    tuned = {"lm_head.weight": torch.randn(72, 32), "model.norm.weight": torch.randn(32)}
    settings = {"weights": opened.digest, "tuning": {"method": "Full", "trainable": ["lm_head", "model.norm"]}}
    write_run(tmp_path / "run", opened.shape, tuned, settings=settings)
    root = str(tmp_path / "run")
    with pytest.raises(UserError, match="hold only what was trained: name the model that the run began with"):
        export(root, tmp_path / "out")
    with pytest.raises(UserError, match=r"is not the model that the run in .* began with: name that one"):
        export(root, tmp_path / "out", base=str(tmp_path / "other"))
    assert not (tmp_path / "out").exists()
    export(root, tmp_path / "out", base=str(tmp_path / "base"), precision=FLOAT32)
    written = BaseWeights.open(str(tmp_path / "out"))
    for name, value in (dict(base.named_parameters()) | tuned).items():
        target = torch.empty(value.shape)
        written.fill(name, (0,) * value.dim(), target)
        assert torch.equal(target, value)


def test_a_run_without_an_adapter_has_none_to_export(tmp_path: Path) -> None:
    write_model_run(tmp_path)
    with pytest.raises(UserError, match="the run trained no adapter: leave out --adapter"):
        export(str(tmp_path / "run"), tmp_path / "out", kind=ArtifactKind.ADAPTER)


def test_the_command_reports_its_result_or_the_reason_of_its_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model_run(tmp_path)
    assert cli.run(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "float16"]) == 0
    assert capsys.readouterr().out == f"exported step 7 to {tmp_path / 'out'}\n"
    assert BaseWeights.open(str(tmp_path / "out")).find_dtype("model.norm.weight") == torch.float16
    assert cli.run(["export", str(tmp_path / "run"), str(tmp_path / "out2"), "--step", "3"]) == 64
    assert "there is no committed checkpoint of step 3" in capsys.readouterr().err
