"""How likely a model finds given answers: one forward pass for each batch, the true tokens before each one given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trainium_trainer.evaluate.answering.batching import batches
from trainium_trainer.evaluate.answering.generation import left_padded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainium_trainer.evaluate.answering.loading import LoadedModel

Pair = tuple["Sequence[int]", "Sequence[int]"]
"""Token ids of a prompt and of what follows it."""


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Of one answer."""

    log: float
    """Sum of the natural logarithms of its tokens' probabilities."""
    tokens: int


def likelihoods(
    model: LoadedModel, pairs: Sequence[Pair], *, batch_size: int, beat: Callable[[], None] = lambda: None
) -> list[Likelihood]:
    """Of each pair, how likely its second part follows its first; of an empty prompt the first token is not counted."""
    rows = [
        (list(prompt), list(answer)) if prompt else (list(answer[:1]), list(answer[1:])) for prompt, answer in pairs
    ]
    found = {number: Likelihood(0.0, 0) for number in range(len(rows))}
    counted = [number for number in found if rows[number][1]]
    lengths = [len(rows[number][0]) + len(rows[number][1]) for number in counted]
    for batch in batches(lengths, batch_size):
        beat()
        numbers = [counted[place] for place in batch]
        found |= zip(numbers, _of_batch(model, [rows[number] for number in numbers]), strict=True)
    return [found[number] for number in range(len(rows))]


@torch.no_grad()
def _of_batch(model: LoadedModel, rows: list[tuple[list[int], list[int]]]) -> list[Likelihood]:
    ids, mask = left_padded([prompt + answer for prompt, answer in rows], model.device)
    longest = max(len(answer) for _, answer in rows)
    logits = model.network(
        input_ids=ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
        logits_to_keep=longest + 1,  # nothing is needed of the long prompts before
        use_cache=False,
    ).logits
    found = []
    for row, (_, answer) in zip(logits, rows, strict=True):  # row by row: float32 of a large vocabulary is much
        truth = torch.tensor(answer, device=model.device)
        each = row[-len(answer) - 1 : -1].float().log_softmax(-1).gather(-1, truth[:, None])
        found.append(Likelihood(float(each.cpu().double().sum()), len(answer)))
    return found
