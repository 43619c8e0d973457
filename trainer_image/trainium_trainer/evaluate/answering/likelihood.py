"""Compute the likelihood of given answers to prompts in batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trainium_trainer.evaluate.answering.generation import group_by_length, pad_left

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainium_trainer.evaluate.answering.loading import LoadedModel

Pair = tuple["Sequence[int]", "Sequence[int]"]
"""The token ids of a prompt and of its answer."""


@dataclass(frozen=True, slots=True)
class AnswerLikelihood:
    """The likelihood of one answer."""

    log_likelihood: float
    """The sum of the natural logarithms of its tokens' probabilities."""
    tokens: int


def compute_likelihoods(
    model: LoadedModel, pairs: Sequence[Pair], *, batch_size: int, heartbeat: Callable[[], None] = lambda: None
) -> list[AnswerLikelihood]:
    """Return the likelihood of each answer after its prompt; after an empty prompt the first token is not counted."""
    rows = [
        (list(prompt), list(answer)) if prompt else (list(answer[:1]), list(answer[1:])) for prompt, answer in pairs
    ]
    results = {number: AnswerLikelihood(0.0, 0) for number in range(len(rows))}
    counted = [number for number in results if rows[number][1]]
    lengths = [len(rows[number][0]) + len(rows[number][1]) for number in counted]
    for batch in group_by_length(lengths, batch_size):
        heartbeat()
        numbers = [counted[index] for index in batch]
        results |= zip(numbers, _compute_batch_likelihoods(model, [rows[number] for number in numbers]), strict=True)
    return [results[number] for number in range(len(rows))]


@torch.no_grad()
def _compute_batch_likelihoods(model: LoadedModel, rows: list[tuple[list[int], list[int]]]) -> list[AnswerLikelihood]:
    ids, mask = pad_left([prompt + answer for prompt, answer in rows], model.device)
    longest = max(len(answer) for _, answer in rows)
    logits = model.network(
        input_ids=ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
        logits_to_keep=longest + 1,  # logits of the prompt are not needed
        use_cache=False,
    ).logits
    results = []
    for row, (_, answer) in zip(logits, rows, strict=True):  # row by row, to limit memory
        truth = torch.tensor(answer, device=model.device)
        log_probs = row[-len(answer) - 1 : -1].float().log_softmax(-1).gather(-1, truth[:, None])
        results.append(AnswerLikelihood(float(log_probs.cpu().double().sum()), len(answer)))
    return results
