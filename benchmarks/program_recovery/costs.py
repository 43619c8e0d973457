"""Keep what the faults of a run cost in a report."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class FaultCost:
    """Cost of a fault or a resize."""

    kind: str
    first_new_step_seconds: float | None
    """None if no new step came within the limit."""
    steps_recomputed: int
    node_deleted_after: float | None = None
    """Seconds after which the benchmark deleted the Node object."""


@dataclass(frozen=True, slots=True)
class RunCost:
    """Cost of all faults of a run."""

    title: str
    faults: tuple[FaultCost, ...]
    completed: bool
    steps: int
    samples_missing: int
    samples_repeated: int
    loss_difference: float
    """Largest relative difference from the undisturbed run of the script (`Ledger.compute_max_loss_difference`)."""
    loss_difference_before_resize: float
    """The same over the steps before the first one at another number of ranks."""
    uses: tuple[int, ...]
    """Number of uses of each sample in the undisturbed run; one number if all are equal."""
    load: float
    """Load of the machine at the end, over 5 minutes."""
    seconds: float
    """Duration of this run and the undisturbed one together."""
    date: str
    problem: str = ""
    """Why the run ended before its last fault; empty if it did not."""

    @classmethod
    def failed(cls, title: str, problem: str, seconds: float) -> RunCost:
        """Return the costs of a run without faults, because the training did not end by itself."""
        load, date = os.getloadavg()[1], time.strftime("%Y-%m-%d")
        return cls(title, (), False, 0, 0, 0, 0.0, 0.0, (), load, seconds, date, problem)


Runs = dict[str, RunCost]
"""Costs by the name of the launcher or program."""


def write_report(path: Path, runs: Runs) -> None:
    """Write the costs of runs as JSON."""
    report = {"benchmark": "program_recovery", "runs": {name: asdict(cost) for name, cost in runs.items()}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def read_report(path: Path) -> Runs:
    """Return the costs that `write_report` wrote; none if there is no report."""
    if not path.exists():
        return {}
    return {name: _read_run(run) for name, run in json.loads(path.read_text())["runs"].items()}


def _read_run(run: dict[str, Any]) -> RunCost:
    faults = tuple(FaultCost(**fault) for fault in run["faults"])
    return RunCost(**run | {"faults": faults, "uses": tuple(run["uses"])})
