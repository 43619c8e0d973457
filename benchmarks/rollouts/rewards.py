"""Read the rewards that `grpo_rollout.py` logs, and compare runs by them.

Each line is one computation of a step. A start is the moment at which rank 0 began, so a step that is repeated after a
fault has a line of a later start, which is the one that counts.
"""

from __future__ import annotations

import itertools
import statistics
from typing import TYPE_CHECKING

import torch

from trainium_devcluster.jobs.ledger import Computation, Ledger
from trainium_devcluster.jobs.metrics import read_lines

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

WINDOW = 50
"""Steps of which a smoothed curve has the mean."""


def read_rewards(folder: Path) -> Ledger:
    """Return the ledger of the run in `folder`; the loss of a step is not in it."""
    computations = {
        (record["step"], record["start"]): Computation(
            ranks=record["ranks"], ended_at=record["time"], rewards=tuple(record["rewards"])
        )
        for record in read_lines(folder / "rewards.jsonl")
    }
    return Ledger(computations, ended_ranks=0)


def compute_reward_curve(ledger: Ledger) -> dict[int, float]:
    """Return the mean reward of each step."""
    return {step: statistics.fmean(item.rewards) for step, item in ledger.list_history().items()}


def list_unequal_repetitions(ledger: Ledger) -> list[int]:
    """Return the steps that were repeated by as many ranks and got other rewards."""
    rewards: dict[tuple[int, int], set[tuple[float, ...]]] = {}
    for (step, _), item in ledger.computations.items():
        rewards.setdefault((step, item.ranks), set()).add(item.rewards)
    return sorted({step for (step, _), different in rewards.items() if len(different) > 1})


def count_updates(folder: Path, last_step: int) -> int:
    """Return how many updates the last policy had, by its optimizer's counter: each step counts once."""
    state = torch.load(folder / f"policy-{last_step}.pt", weights_only=True)["optimizer"]["state"]
    return int(state[0]["step"])


def smooth_curve(curve: Mapping[int, float]) -> list[float]:
    """Return the mean over each `WINDOW` consecutive steps."""
    values = [curve[step] for step in sorted(curve)]
    sums = [0.0, *itertools.accumulate(values)]
    return [(sums[end] - sums[end - WINDOW]) / WINDOW for end in range(WINDOW, len(sums))]


def compute_max_difference(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the largest absolute difference of two curves; infinite for curves of different lengths."""
    if len(first) != len(second):
        return float("inf")
    return max((abs(one - other) for one, other in zip(first, second, strict=True)), default=0.0)
