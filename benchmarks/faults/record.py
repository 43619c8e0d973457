"""Record the results of runs and rows, and summarize them.

Guarantees:
- A run passes if `deviations` is empty. A row passes if it has runs, all of them passed, and its `deviations` is empty.
- Percentiles (nearest rank) are of the runs that have the figure, so each of them is a measured value.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


class ClusterKind(StrEnum):
    """Clusters on which rows run; the values are those of the page."""

    DEVCLUSTER = "real processes"
    """The development cluster, whose nodes are processes."""
    KUBELETS = "genuine kubelet"
    """A cluster with genuine kubelets."""


@dataclass(slots=True)
class RunResult:
    """Result of a run, which collects what was measured and found."""

    run: int
    detection_seconds: float | None = None
    """Seconds from the fault to its detection, or to the verdict of a row that ends the job."""
    recovery_seconds: float | None = None
    """Seconds from the fault to the end of the first new step."""
    steps_lost: int | None = None
    blame_correct: bool | None = None
    """Whether cause, response, pod and node are as expected; None if nothing is expected."""
    deviations: tuple[str, ...] = ()
    """A sentence for each deviation."""
    note: str = ""
    """A detail of this run, for instance the pod."""


@dataclass(frozen=True, slots=True)
class RowResult:
    """Results of all runs of a row."""

    name: str
    """Number and part."""
    cluster: ClusterKind
    seed: int
    runs: tuple[RunResult, ...] = ()
    deviations: tuple[str, ...] = ()
    """Deviations of the whole row, for instance of the loss curve."""
    skipped: str = ""
    """Reason why the row did not run; empty if it did."""
    duration_seconds: float = 0.0
    """Duration of all runs."""
    requested_runs: int = 0
    """Number of requested runs."""
    commits: tuple[str, ...] = ()
    """Commits of the runs."""

    @property
    def passed(self) -> bool:
        """Whether there are runs and neither they nor the row have deviations."""
        return bool(self.runs) and not self.all_deviations

    @property
    def failed_runs(self) -> int:
        """Number of runs with a deviation."""
        return sum(bool(run.deviations) for run in self.runs)

    @property
    def blame_counts(self) -> tuple[int, int]:
        """Number of runs with the expected blame, and of runs that expect one."""
        correct = [run.blame_correct for run in self.runs if run.blame_correct is not None]
        return sum(correct), len(correct)

    @property
    def all_deviations(self) -> list[str]:
        """Deviations of the row and of its runs."""
        return [*self.deviations, *(sentence for run in self.runs for sentence in run.deviations)]

    def save(self, path: Path) -> None:
        """Write the result as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> RowResult:
        """Read the file of `save`."""
        fields: dict[str, Any] = json.loads(path.read_text())
        runs = tuple(RunResult(**{**run, "deviations": tuple(run["deviations"])}) for run in fields.pop("runs"))
        for name in ("deviations", "commits"):
            fields[name] = tuple(fields[name])
        return RowResult(**{**fields, "cluster": ClusterKind(fields["cluster"])}, runs=runs)


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, 95th percentile and maximum of measurements."""

    p50: float
    p95: float
    maximum: float

    @staticmethod
    def summarize(values: Iterable[float | None]) -> Spread | None:
        """Summarize the values that are not None; return None if there are none."""
        ordered = sorted(value for value in values if value is not None)
        if not ordered:
            return None
        return Spread(_compute_percentile(ordered, 0.5), _compute_percentile(ordered, 0.95), ordered[-1])


def _compute_percentile(ordered: list[float], fraction: float) -> float:
    """Return the smallest value that at least this fraction of the values does not exceed."""
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]
