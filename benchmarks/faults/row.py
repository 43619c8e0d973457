"""What a row is, and how the runs of a row are played one after the other in a long-lived job.

Invariants: everything that a run chooses by chance comes from `Session.random(run)`, so a seed gives the same choices
in any order of rows; a run that gets stuck fails with the job's state, costs its job and never the rows after it.
"""

from __future__ import annotations

import random
import subprocess
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.faults.api import ApiError
from benchmarks.faults.patient import StuckError
from benchmarks.faults.record import FaultRun, Where
from benchmarks.faults.stage import BATCH, STEPS
from tests.testing.cluster.access import CommandError
from tests.testing.suite.patience import NotInTimeError
from trainium_devcluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.faults.patient import Patient
    from benchmarks.faults.stage import Stage

_LAST_STEPS = 100
"""A job is left for a new one when so few steps remain that the next recovery might not fit."""
_GIVE_UP_AFTER = 3
"""Jobs in a row that came to nothing."""
EXPECTED_ERRORS = (
    StuckError,
    NotInTimeError,
    CommandError,
    ApiError,
    ClusterError,
    TimeoutError,
    subprocess.TimeoutExpired,
    OSError,
)


@dataclass
class Session:
    """The runs that are asked of one row."""

    name: str
    seed: int
    runs: range
    wrong: list[str] = field(default_factory=list)
    """What is wrong with the row as a whole."""

    def random(self, run: int) -> random.Random:
        """The dice of one run."""
        return random.Random(f"{self.seed}/{self.name}/{run}")

    def blame(self, sentences: list[str]) -> None:
        """Note what is wrong with the row, each sentence once."""
        self.wrong += [sentence for sentence in sentences if sentence not in self.wrong]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the table."""

    number: int
    part: str = ""
    """A letter where a row is played in more than one way."""
    fault: str
    injected: str
    """What is done, exactly."""
    expected: str
    judged: str
    """By what the run is judged."""
    play: Callable[[Stage, Session], Iterator[FaultRun]]
    where: Where = Where.REAL
    most: int = 30
    """Runs at most; fewer than 30 where one of them takes long."""
    kubelet: bool = False
    """Whether a kubelet decides in it, so that it is also run on genuine ones."""

    @property
    def name(self) -> str:
        """Number and part."""
        return f"{self.number}{self.part}"


def in_one_job(
    stage: Stage,
    session: Session,
    name: str,
    change: str,
    one: Callable[[Patient, int, random.Random], FaultRun],
    *,
    tolerance: float = 0.0,
    steps: int = 2,
    batch: int = BATCH,
    environment: dict[str, str] | None = None,
) -> Iterator[FaultRun]:
    """Play each run in the same job, as long as it lasts; then hold its curve against the undisturbed one."""
    waiting = deque(session.runs)
    barren = 0
    while waiting:
        if barren >= _GIVE_UP_AFTER:
            session.blame([f"{len(waiting)} runs were not played after {barren} jobs in a row came to nothing"])
            return
        barren += 1
        stage.forget_nodes()
        with stage.job(name, change, environment=environment) as patient:
            try:
                patient.settle(3, seconds=180)
            except StuckError as error:
                stage.keep_evidence(patient, f"{session.name}-{waiting[0]}-before")
                yield FaultRun(run=waiting.popleft(), wrong=(f"before the fault: {error}",))
                continue
            while waiting and patient.step() < STEPS - _LAST_STEPS:
                run = waiting.popleft()
                try:
                    patient.forget_failures()
                    stage.forget_nodes()
                    outcome = one(patient, run, session.random(run))
                except EXPECTED_ERRORS as error:
                    stage.keep_evidence(patient, f"{session.name}-{run}")
                    yield FaultRun(run=run, wrong=(str(error),))
                    break
                yield outcome
                barren = 0
                try:
                    patient.withdraw_orders()
                    if waiting:
                        patient.settle(steps)
                except EXPECTED_ERRORS as error:
                    stage.keep_evidence(patient, f"{session.name}-{run}-after")
                    session.blame([f"after run {run}: {error}"])
                    break
            session.blame(stage.check_curve(patient, stage.size, tolerance, batch))
