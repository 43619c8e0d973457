"""Draws that depend on a row's own seed: the same prompt gets the same answer in any batch, on CPU and GPU alike.

The largest of logits plus Gumbel noise is a draw from their softmax (Gumbel-max), so the library's greedy search draws.
Rounding differs with a batch's padding; it changes a draw only where two tokens are as good as equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import FloatTensor, LongTensor

    from trainium_contract.trainer.evaluate import GenerationConfig


class GumbelNoise(LogitsProcessor):
    """Adds noise to each row from a generator of its own."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: LongTensor, scores: FloatTensor) -> FloatTensor:  # noqa: ARG002 - the library's
        """[rows, vocabulary] logits to the same, with noise."""
        noise = torch.stack(
            [-torch.empty(scores.shape[1]).exponential_(generator=each).log() for each in self._generators]
        )
        return scores + noise.to(scores.device)  # type: ignore[return-value]


def processors(config: GenerationConfig, seeds: Sequence[int]) -> LogitsProcessorList:
    """What is done to the logits before the largest is taken; nothing at temperature 0."""
    found = LogitsProcessorList()
    if config.temperature == 0:
        return found
    if config.temperature != 1:
        found.append(TemperatureLogitsWarper(config.temperature))
    if config.top_k:
        found.append(TopKLogitsWarper(config.top_k))
    if config.top_p < 1:
        found.append(TopPLogitsWarper(config.top_p))
    found.append(GumbelNoise(seeds))
    return found
