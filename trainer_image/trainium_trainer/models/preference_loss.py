"""The loss on pairs of a preferred and a rejected answer: DPO (arXiv 2305.18290).

Guarantees:
- A loss is a sum over pairs, so it does not depend on the division of pairs over micro-batches and ranks.
- Under tensor parallelism every rank of the group gets the same values.
- Padding adds neither loss nor gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name everybody uses

from trainium_trainer.models.loss import IGNORED_LABEL

if TYPE_CHECKING:
    from trainium_contract.trainer.tuning import ObjectiveConfig


@dataclass(frozen=True, slots=True)
class PairLoss:
    """The loss of a micro-batch, and the recorded values of its pairs."""

    loss: Tensor
    """The sum over the pairs, a float32 scalar."""
    rewards: Tensor
    """[3] float32 without gradient: sums of the rewards of preferred and of rejected answers, and the number of pairs
    whose preferred answer has the greater reward.
    """


def compute_answer_log_probs(losses: Tensor, labels: Tensor, answers: Tensor) -> Tensor:
    """Return the log-probability of each row's answer, [rows] float32.

    `losses` are those of each token, [rows, sequence]; `answers` [rows] are the first positions of the answers.
    """
    return -(losses * _answer_mask(labels, answers)).sum(-1)


def compute_preference_loss(
    objective: ObjectiveConfig, losses: Tensor, labels: Tensor, *, answers: Tensor, references: Tensor
) -> PairLoss:
    """Return the loss of rows 2k (preferred answers) and 2k + 1 (rejected answers).

    `losses` are those of each token, [rows, sequence]; `answers` [rows] the first positions of the answers;
    `references` [rows] their log-probabilities by the reference model.
    """
    of_answers = _answer_mask(labels, answers)
    log_probs = -(losses * of_answers).sum(-1)
    counted = of_answers.any(-1)[0::2]
    losses_of_pairs, rewards = _compute_dpo(objective, log_probs - references)
    chosen, rejected = rewards.detach().view(-1, 2).unbind(-1)
    sums = torch.stack((chosen, rejected, (chosen > rejected).float()))
    return PairLoss(torch.where(counted, losses_of_pairs, 0.0).sum(), torch.where(counted, sums, 0.0).sum(-1))


def _compute_dpo(objective: ObjectiveConfig, ratios: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of each pair, and the implicit reward of each answer.

    Label smoothing is that of conservative DPO (Mitchell, A note on DPO with noisy preferences, 2023).
    """
    rewards = objective.beta * ratios
    margins = rewards[0::2] - rewards[1::2]
    swapped = objective.label_smoothing
    return -(1 - swapped) * F.logsigmoid(margins) - swapped * F.logsigmoid(-margins), rewards


def _answer_mask(labels: Tensor, answers: Tensor) -> Tensor:
    """Return a mask of the labels of answers, [rows, sequence]."""
    positions = torch.arange(labels.shape[1], device=labels.device)
    return (labels != IGNORED_LABEL) & (positions >= answers.unsqueeze(-1))
