"""What a run of a row found, and the arithmetic of the table.

Invariants: a run without a sentence in `wrong` passed; a row passes when it has runs and all of them passed and
nothing is wrong with the row as a whole; percentiles are of the runs that have the figure (nearest rank), so a p95 is
always a value that was measured.
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


class Where(StrEnum):
    """What a row ran on."""

    REAL = "real processes"
    """The development cluster, the real operator, real training processes on CPU."""
    VIRTUAL = "virtual time"
    """The real operator's code against a fake API server, with agents that are played."""
    KUBELET = "genuine kubelet"
    """Real processes on a cluster with genuine kubelets."""
    NONE = "not run"


@dataclass(frozen=True, slots=True)
class FaultRun:
    """One run of one row; seconds from the moment of the fault."""

    run: int
    detect: float | None = None
    """Of a row that ends the job: to its verdict."""
    recover: float | None = None
    """To the end of the first new step."""
    steps_lost: int | None = None
    blame: bool | None = None
    """Whether cause, rung, pod and node are the expected ones; None where the row blames nobody and expects nothing."""
    wrong: tuple[str, ...] = ()
    """A sentence for each thing that was not as expected."""
    note: str = ""
    """What distinguishes this run, for instance which pod was hit."""


@dataclass(frozen=True, slots=True)
class RowResult:
    """All runs of one row."""

    name: str
    """Number and part."""
    where: Where
    seed: int
    outcomes: tuple[FaultRun, ...] = ()
    wrong: tuple[str, ...] = ()
    """What is wrong with the row as a whole, for instance a curve that differs."""
    skipped: str = ""
    """Why it did not run; empty when it did."""
    seconds: float = 0.0
    """How long the runs took together."""
    asked: int = 0
    """Runs that were asked for."""
    commits: tuple[str, ...] = ()
    """States of the code that the runs were made at."""

    @property
    def passed(self) -> bool:
        """Whether everything was as expected."""
        return bool(self.outcomes) and not self.wrong and not any(outcome.wrong for outcome in self.outcomes)

    @property
    def failures(self) -> int:
        """Runs in which something was not as expected."""
        return sum(bool(outcome.wrong) for outcome in self.outcomes)

    @property
    def blamed_right(self) -> tuple[int, int]:
        """Runs with the right blame, and runs that could be judged."""
        judged = [outcome.blame for outcome in self.outcomes if outcome.blame is not None]
        return sum(judged), len(judged)

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> RowResult:
        """Read what `save` wrote."""
        fields: dict[str, Any] = json.loads(path.read_text())
        outcomes = tuple(FaultRun(**{**one, "wrong": tuple(one["wrong"])}) for one in fields.pop("outcomes"))
        for name in ("wrong", "commits"):
            fields[name] = tuple(fields[name])
        return RowResult(**{**fields, "where": Where(fields["where"])}, outcomes=outcomes)


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, 95th percentile and greatest of some measurements."""

    p50: float
    p95: float
    most: float

    @staticmethod
    def of(values: Iterable[float | None]) -> Spread | None:
        """None when nothing was measured."""
        known = sorted(value for value in values if value is not None)
        if not known:
            return None
        return Spread(_percentile(known, 0.5), _percentile(known, 0.95), known[-1])


def _percentile(ordered: list[float], share: float) -> float:
    """Nearest rank: the smallest value that at least this share of the values does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass
class Findings:
    """Sentences about what was not as expected, gathered during a run."""

    wrong: list[str] = field(default_factory=list)

    def expect(self, truth: object, sentence: str) -> bool:
        """Note the sentence unless it is true; returns whether it is."""
        if not truth:
            self.wrong.append(sentence)
        return bool(truth)
