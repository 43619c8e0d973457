"""The training model's forward pass through a folder, against `transformers`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from trainium_trainer.evaluate.check_folder import check_folder, logits_of
from trainium_trainer.weights import BaseWeights

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.parametrize("tied", [False, True])
def test_the_training_model_computes_what_transformers_computes(
    write_model: Callable[..., Path], tmp_path: Path, tied: bool
) -> None:
    from transformers import LlamaForCausalLM

    folder = write_model(tmp_path / "model", tie_word_embeddings=tied)
    reference = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = reference(tokens).logits
    torch.testing.assert_close(logits_of(BaseWeights.open(str(folder)), tokens), expected, rtol=1e-5, atol=1e-5)


def test_a_tuned_model_differs_from_its_base_and_a_copy_does_not(
    write_model: Callable[..., Path], tmp_path: Path
) -> None:
    base, same = (str(write_model(tmp_path / name)) for name in ("base", "same"))
    other = str(write_model(tmp_path / "other", seed=1))
    assert check_folder(other, base).problem(other, base) is None
    problem = check_folder(same, base).problem(same, base)
    assert problem is not None
    assert "no trace" in problem


def test_values_that_are_not_finite_are_found(write_model: Callable[..., Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = write_model(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 3] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    found = check_folder(str(folder))
    assert found.difference is None
    problem = found.problem("the folder", None)
    assert problem is not None
    assert "not finite" in problem
