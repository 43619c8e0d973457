"""Likelihoods of given answers, against transformers' own loss, in any batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from trainium_trainer.evaluate.answering.folder import open_candidate
from trainium_trainer.evaluate.answering.generation import likelihoods
from trainium_trainer.evaluate.answering.loading import ComputeDevice, load

if TYPE_CHECKING:
    from pathlib import Path

PAIRS = [([5, 6, 7], [8, 9]), ([4], [12, 3, 5, 7, 9, 11]), ([9] * 12, [2]), ([], [6, 7, 8]), ([3, 4], []), ([], [7])]


@pytest.mark.parametrize("batch_size", [1, 2, 6])
def test_the_likelihood_of_an_answer_is_that_of_its_tokens_after_the_true_ones(
    model_folder: Path, batch_size: int
) -> None:
    model = load(open_candidate(model_folder), device=ComputeDevice.CPU)
    found = likelihoods(model, PAIRS, batch_size=batch_size)
    for (prompt, answer), each in zip(PAIRS, found, strict=True):
        ids = torch.tensor([prompt + answer])
        first = max(1, len(prompt))
        assert each.tokens == max(0, ids.shape[1] - first)
        if not each.tokens:
            assert each.log == 0
            continue
        labels = ids.clone()
        labels[0, :first] = -100
        with torch.no_grad():
            loss = model.network(ids, labels=labels).loss
        assert each.log == pytest.approx(-float(loss) * each.tokens, rel=1e-5)
