"""Read what the ranks of a program recorded (`recorded_program.py`): steps, their samples and losses, by start.

A start is the moment at which the ranks of one attempt began, so the same step may have several computations. The
history of the model consists of the newest computation of each step.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trainium_devcluster.jobs.metrics import read_lines

if TYPE_CHECKING:
    from pathlib import Path


@dataclass
class Computation:
    """One computation of a step by all ranks."""

    samples: list[int] = field(default_factory=list)
    ranks: int = 0
    loss: float = 0.0
    """Mean over the ranks of the sums of their micro-batches."""
    ended_at: float = math.inf
    """Unix seconds at which the first rank ended the step."""
    misses_losses: bool = False
    """Whether a rank was killed before it recorded its loss."""
    rewards: tuple[float, ...] = ()
    """Rewards of the answers, if it is a step of reinforcement learning."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """The computations of each step by start, and how many ranks have ended."""

    computations: dict[tuple[int, float], Computation]
    """By (step, start)."""
    ended_ranks: int
    """Ranks that have recorded the end of the training."""

    @property
    def ended(self) -> bool:
        """Whether all ranks have recorded the end of the training."""
        return 0 < self.newest_ranks <= self.ended_ranks

    @property
    def newest_step(self) -> int:
        """The highest step that was completed; 0 before the first."""
        return max((step for step, _ in self.computations), default=0)

    @property
    def newest_ranks(self) -> int:
        """The number of ranks of the newest start that completed a step; 0 before the first."""
        newest = max(self.computations, key=lambda key: key[1], default=None)
        return 0 if newest is None else self.computations[newest].ranks

    def find_first_new_step(self, moment: float) -> float | None:
        """Return when a start after `moment` completed the first step beyond those of earlier ones, or None."""
        earlier = max((step for step, start in self.computations if start <= moment), default=0)
        later = [key for key in self.computations if key[1] > moment and key[0] > earlier]
        return min((self.computations[key].ended_at for key in later), default=None)

    def count_recomputed(self, moment: float) -> int:
        """Return how many steps of earlier starts were completed again by starts after `moment`."""
        earlier = {step for step, start in self.computations if start <= moment}
        return len(earlier & {step for step, start in self.computations if start > moment})

    def find_longest_pause(self, moment: float) -> float:
        """Return the longest time between two consecutive new steps that ended after `moment`, in seconds."""
        first_ends: dict[int, float] = {}
        for (step, _), item in self.computations.items():
            first_ends[step] = min(item.ended_at, first_ends.get(step, math.inf))
        ends = [first_ends[step] for step in sorted(first_ends)]
        return max((after - before for before, after in itertools.pairwise(ends) if after > moment), default=0.0)

    def list_history(self) -> dict[int, Computation]:
        """Return the newest completed computation of each step."""
        return {key[0]: self.computations[key] for key in sorted(self.computations)}

    def group_samples_by_step(self) -> dict[int, list[int]]:
        """Return the sorted samples of each step of the history."""
        return {step: sorted(item.samples) for step, item in self.list_history().items()}

    def count_uses(self) -> Counter[int]:
        """Return how often the history used each sample."""
        return Counter(sample for item in self.list_history().values() for sample in item.samples)

    def count_wrong_samples(self, reference: Ledger) -> tuple[int, int]:
        """Return how many uses of samples of another run are missing in the history, and how many are too many."""
        own, other = self.count_uses(), reference.count_uses()
        return (other - own).total(), (own - other).total()

    def find_first_step_after(self, moment: float) -> float | None:
        """Return when the first step after `moment` ended, of whichever start, or None."""
        times = (item.ended_at for item in self.computations.values())
        return min((ended for ended in times if ended > moment), default=None)

    def find_first_step_at_another_size(self, reference: Ledger) -> float:
        """Return the first step that had another number of ranks in the other run; infinity if none had."""
        own, other = self.list_history(), reference.list_history()
        return min(
            (step for step in own.keys() & other.keys() if own[step].ranks != other[step].ranks), default=math.inf
        )

    def compute_max_loss_difference(self, reference: Ledger, before: float = math.inf) -> float:
        """Return the largest difference of the losses of common steps below `before`, except incomplete ones.

        It is relative to the loss of the other run, or to the mean of that run's losses where that is larger: the loss
        of GRPO is close to 0 while its answers have equal rewards.
        """
        own, other = self.list_history(), reference.list_history()
        mean = sum(abs(item.loss) for item in other.values()) / max(1, len(other)) or 1.0
        steps = [step for step in own.keys() & other.keys() if step < before and not own[step].misses_losses]
        differences = (abs(own[step].loss - other[step].loss) / max(abs(other[step].loss), mean) for step in steps)
        return max(differences, default=0.0)


def read_ledger(folder: Path) -> Ledger:
    """Return the ledger of the run in `folder`; lines that are being written are left out."""
    computations: dict[tuple[int, float], Computation] = defaultdict(Computation)
    ended_ranks = 0
    unfinished: list[tuple[int | None, float, list[int]]] = []
    """For each rank: the last step that it ended, if any, its start, and the samples of the unfinished step."""
    for path in sorted(folder.glob("samples-*.jsonl")):
        ended_step: int | None = None
        start = 0.0
        started_samples: list[int] = []
        for record in read_lines(path):
            if record.get("trainingEnded"):
                ended_ranks += 1
            elif "started" in record:
                if record["start"] != start:
                    ended_step, start, started_samples = None, record["start"], []
                started_samples += record["started"]
            else:
                ended_step, start, started_samples = record["step"], record["start"], []
                item = computations[ended_step, start]
                item.samples += record["samples"]
                item.ranks = record["ranks"]
                item.loss += record["loss"] / item.ranks
                item.ended_at = min(record["time"], item.ended_at)
        unfinished.append((ended_step, start, started_samples))
    for ended_step, start, samples in unfinished:
        first = min((step for step, step_start in computations if step_start == start), default=0)
        key = (first if ended_step is None else ended_step + 1, start)
        if samples and key in computations:  # the other ranks ended the step, for which they had all gradients
            computations[key].samples += samples
            computations[key].misses_losses = True
    return Ledger(dict(computations), ended_ranks)
