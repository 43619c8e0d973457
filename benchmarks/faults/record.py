"""Record the results of runs and rows, and summarize them.

Guarantees:
- A run passes if `deviations` is empty. A row passes if it has runs, all of them passed, and its `deviations` is empty.
- Percentiles (nearest rank) are of the runs that have the figure, so each of them is a measured value.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


class ClusterKind(StrEnum):
    """The kinds of clusters."""

    REAL = "real processes"
    """The development cluster, the real operator, real training processes on CPU."""
    KUBELET = "genuine kubelet"
    """Real processes on a cluster with genuine kubelets."""


@dataclass(frozen=True, slots=True)
class FaultRun:
    """Result of a run; seconds since the fault."""

    run: int
    detect: float | None = None
    """Seconds until the fault is detected, or until the verdict of a row that ends the job."""
    recover: float | None = None
    """Seconds until the end of the first new step."""
    steps_lost: int | None = None
    blame: bool | None = None
    """Whether cause, rung, pod and node are as expected; None if nothing is expected."""
    deviations: tuple[str, ...] = ()
    """A sentence for each deviation."""
    note: str = ""
    """A detail of this run, for instance the pod."""


@dataclass(frozen=True, slots=True)
class RowResult:
    """Results of all runs of a row."""

    name: str
    """Number and part."""
    where: ClusterKind
    seed: int
    outcomes: tuple[FaultRun, ...] = ()
    deviations: tuple[str, ...] = ()
    """Deviations of the whole row, for instance of the loss curve."""
    skipped: str = ""
    """Reason why the row did not run; empty if it did."""
    seconds: float = 0.0
    """Duration of all runs."""
    requested: int = 0
    """Number of requested runs."""
    commits: tuple[str, ...] = ()
    """Commits of the runs."""

    @property
    def passed(self) -> bool:
        """Whether all runs were as expected."""
        return bool(self.outcomes) and not self.deviations and not any(outcome.deviations for outcome in self.outcomes)

    @property
    def failures(self) -> int:
        """Number of runs with a deviation."""
        return sum(bool(outcome.deviations) for outcome in self.outcomes)

    @property
    def blamed_correctly(self) -> tuple[int, int]:
        """Number of runs with the expected blame, and of runs that expect one."""
        judged = [outcome.blame for outcome in self.outcomes if outcome.blame is not None]
        return sum(judged), len(judged)

    def save(self, path: Path) -> None:
        """Write the result as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> RowResult:
        """Read the file of `save`."""
        fields: dict[str, Any] = json.loads(path.read_text())
        outcomes = tuple(FaultRun(**{**one, "deviations": tuple(one["deviations"])}) for one in fields.pop("outcomes"))
        for name in ("deviations", "commits"):
            fields[name] = tuple(fields[name])
        return RowResult(**{**fields, "where": ClusterKind(fields["where"])}, outcomes=outcomes)


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, 95th percentile and maximum of measurements."""

    p50: float
    p95: float
    maximum: float

    @staticmethod
    def of(values: Iterable[float | None]) -> Spread | None:
        """Summarize values; None without any."""
        known = sorted(value for value in values if value is not None)
        if not known:
            return None
        return Spread(_percentile(known, 0.5), _percentile(known, 0.95), known[-1])


def _percentile(ordered: list[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass
class Findings:
    """Collects the deviations of a run."""

    deviations: list[str] = field(default_factory=list)

    def expect(self, condition: object, sentence: str) -> bool:
        """Add the sentence unless the condition is true; return whether it is."""
        if not condition:
            self.deviations.append(sentence)
        return bool(condition)
