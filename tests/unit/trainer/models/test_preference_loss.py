"""Compare DPO with the formula of the paper, for each pair in double precision."""

import math

import pytest
import torch
from torch import Tensor

from trainium_contract.trainer.tuning import ObjectiveConfig
from trainium_trainer.models.loss import IGNORED_LABEL, compute_token_losses
from trainium_trainer.models.preference_loss import PairLoss, compute_preference_loss

PAIRS, LENGTH, VOCABULARY = 4, 9, 11


def pairs_with_references() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return logits, labels, first answer positions and references; the last pair is padding."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(2 * PAIRS, LENGTH, VOCABULARY, generator=generator)
    labels = torch.full((2 * PAIRS, LENGTH), IGNORED_LABEL)
    answers = torch.zeros(2 * PAIRS, dtype=torch.int64)
    for row in range(2 * PAIRS - 2):
        end, answers[row] = 4 + row % 5, 1 + row // 2
        labels[row, :end] = torch.randint(0, VOCABULARY, (end,), generator=generator)
    references = -20 * torch.rand(2 * PAIRS, generator=generator)
    return logits, labels, answers, references


def log_probs(logits: Tensor, labels: Tensor, first: int) -> list[float]:
    """Return the log-probabilities of the tokens from position `first` on."""
    table = torch.log_softmax(logits.double(), -1)
    return [
        float(table[position, int(label)]) for position, label in enumerate(labels) if position >= first and label >= 0
    ]


def compute_dpo(
    objective: ObjectiveConfig, rows: list[list[float]], references: list[float]
) -> tuple[float, list[float]]:
    """Compute equation 7 of arXiv 2305.18290, with the label noise of conservative DPO."""
    rewards = [objective.beta * (sum(row) - reference) for row, reference in zip(rows, references, strict=True)]
    preferred = 1 / (1 + math.exp(rewards[1] - rewards[0]))
    noise = objective.label_smoothing
    return -(1 - noise) * math.log(preferred) - noise * math.log(1 - preferred), rewards


OBJECTIVES = [ObjectiveConfig(beta=0.1), ObjectiveConfig(beta=0.3, label_smoothing=0.2)]


def compute_loss(objective: ObjectiveConfig, logits: Tensor, rows: slice = slice(None)) -> PairLoss:
    _, labels, answers, references = pairs_with_references()
    losses = compute_token_losses(logits[rows], labels[rows])
    return compute_preference_loss(objective, losses, labels[rows], answers=answers[rows], references=references[rows])


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: f"{objective.kind}-{objective.label_smoothing}")
def test_loss_and_rewards_are_those_of_the_paper(objective: ObjectiveConfig) -> None:
    logits, labels, answers, references = pairs_with_references()
    total, sums = 0.0, [0.0, 0.0, 0.0]
    for pair in range(PAIRS - 1):
        both = (2 * pair, 2 * pair + 1)
        rows = [log_probs(logits[row], labels[row], int(answers[row])) for row in both]
        loss, rewards = compute_dpo(objective, rows, [float(references[row]) for row in both])
        total += loss
        for index, value in enumerate((*rewards, float(rewards[0] > rewards[1]))):
            sums[index] += value
    result = compute_loss(objective, logits)
    assert float(result.loss) == pytest.approx(total, rel=1e-5)
    assert result.rewards.tolist() == pytest.approx(sums, rel=1e-4)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: f"{objective.kind}-{objective.label_smoothing}")
def test_the_loss_of_a_batch_is_the_sum_over_pairs_and_padding_has_no_gradient(
    objective: ObjectiveConfig,
) -> None:
    logits = pairs_with_references()[0].requires_grad_()
    batch = compute_loss(objective, logits)
    parts = [compute_loss(objective, logits, slice(start, start + 2)) for start in range(0, 2 * PAIRS, 2)]
    assert batch.loss.item() == pytest.approx(sum(part.loss.item() for part in parts), rel=1e-6)
    batch.loss.backward()
    assert logits.grad.isfinite().all()
    assert not logits.grad[-2:].any()
    assert logits.grad[:-2].any()


def test_the_gradient_is_that_of_finite_differences() -> None:
    logits, labels, answers, references = pairs_with_references()
    exact_logits = logits.double().requires_grad_()
    for objective in OBJECTIVES:

        def loss(logits: Tensor, objective: ObjectiveConfig = objective) -> Tensor:
            table = -torch.log_softmax(logits, -1)
            losses = table.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1) * (labels >= 0)
            return compute_preference_loss(
                objective, losses, labels, answers=answers, references=references.double()
            ).loss

        assert torch.autograd.gradcheck(loss, (exact_logits,))
