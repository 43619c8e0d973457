"""What a soak found, as it is kept with the code: enough to learn, simulate and write the document again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.soak.course import MODEL

if TYPE_CHECKING:
    from pathlib import Path

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakResult:
    """One soak."""

    seed: int
    minutes: float
    faults_per_hour: float
    commit: str
    zero: float
    """Unix seconds of the job's creation."""
    moments: dict[str, float]
    """Seconds since then at which the ledger was read: begin, half, end."""
    ledgers: dict[str, Json]
    """The ledger at each of them."""
    history: list[Json]
    played: list[Json]
    silences: dict[str, list[list[float]]]
    """By class (ApiOutage, OperatorLost): when each was over or struck, and for how long no step was told then."""
    pods: list[list[float]]
    """When each pod was put on a node, and how long it took until it was ready."""
    returns: list[list[float]]
    """When each machine was started again, and how long it took until its node was Ready."""
    steps: int
    worst_difference: float
    """Of a loss, relative, against the undisturbed run."""
    wrong: list[str] = field(default_factory=list)
    """Sentences about curve, samples, leaks and faults that could not be played."""
    growth: list[Json] = field(default_factory=list)
    before: Json = field(default_factory=dict)
    """Processes by role before the job, and after it."""
    after: Json = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: Path) -> SoakResult:
        """Read what `save` wrote."""
        return SoakResult(**json.loads(path.read_text(encoding="utf-8")))

    def median_of(self, times: list[list[float]], otherwise: float) -> float:
        """Of what began in the first half, seconds each; `otherwise` where nothing did."""
        known = [seconds for at, seconds in times if at < self.moments["half"]]
        return median(known) if known else otherwise

    def joining(self) -> list[list[float]]:
        """When a person asked for more nodes again, and how long it took until the job left to grow.

        A pod is ready long before its worker has warmed up, so this is not told by pods.
        """
        grown = [entry["failedAt"] - self.zero for entry in self.history if entry["cause"] == "Resize"]
        found = []
        for fault in self.played:
            if fault["kind"] == "Resize":
                asked = fault["at"] + MODEL.resize_seconds
                later = [at for at in grown if at > asked]
                if later:
                    found.append([asked, min(later) - asked])
        return found

    def first_half(self) -> Json:
        """The job as `--learn-from` takes it: its ledger at half time, and the whole history until then."""
        half = self.zero + self.moments["half"]
        entries = [entry for entry in self.history if (entry.get("failedAt") or half) < half]
        return {"kind": "TrainingJob", "status": {"goodput": self.ledgers["half"], "history": entries}}
