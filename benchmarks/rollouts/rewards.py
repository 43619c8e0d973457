"""Read the rewards that `grpo_rollout.py` logs, and compare runs by them.

Each line is one computation of a step. A start is the moment at which rank 0 began, so a step that is repeated after a
fault has a line of a later start. The last line of a step is the one that counts.
"""

from __future__ import annotations

import itertools
import json
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

WINDOW = 50
"""Steps of which a smoothed curve has the mean."""


@dataclass(frozen=True, slots=True)
class RewardLog:
    """All computations of the steps of a run, in their order."""

    records: tuple[dict[str, Any], ...]

    @property
    def newest(self) -> int:
        """The highest step so far; 0 before the first."""
        return max((record["step"] for record in self.records), default=0)

    def list_rewards(self) -> dict[int, list[float]]:
        """Return the rewards of the prompts of each step, as they count."""
        return {record["step"]: record["rewards"] for record in self.records}

    def compute_curve(self) -> dict[int, float]:
        """Return the mean reward of each step."""
        return {step: statistics.fmean(rewards) for step, rewards in sorted(self.list_rewards().items())}

    def count_recomputed(self, moment: float) -> int:
        """Return how many steps of earlier starts were completed again by starts after `moment`."""
        earlier = {record["step"] for record in self.records if record["start"] <= moment}
        return len(earlier & {record["step"] for record in self.records if record["start"] > moment})

    def has_restarted(self, moment: float) -> bool:
        """Return whether a start after `moment` completed a new step."""
        newest = max((record["step"] for record in self.records if record["start"] <= moment), default=0)
        return any(record["start"] > moment and record["step"] > newest for record in self.records)

    def find_longest_pause(self, moment: float) -> float:
        """Return the longest time between two consecutive new steps that ended after `moment`, in seconds."""
        times = [min(times) for _, times in sorted(self._group_times_by_step().items())]
        pairs = [(before, after) for before, after in itertools.pairwise(times) if after > moment]
        return max((after - before for before, after in pairs), default=0.0)

    def _group_times_by_step(self) -> dict[int, list[float]]:
        times: dict[int, list[float]] = {}
        for record in self.records:
            times.setdefault(record["step"], []).append(record["time"])
        return times

    def list_unequal_repetitions(self) -> list[int]:
        """Return the steps that were repeated by as many ranks and got other rewards."""
        computed: dict[tuple[int, int], list[list[float]]] = {}
        for record in self.records:
            computed.setdefault((record["step"], record["ranks"]), []).append(record["rewards"])
        return sorted({step for (step, _), rewards in computed.items() if any(each != rewards[0] for each in rewards)})


def read_rewards(folder: Path) -> RewardLog:
    """Return the log of the run in `folder`; a line that is being written is left out."""
    path = folder / "rewards.jsonl"
    records = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return RewardLog(tuple(records))


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
