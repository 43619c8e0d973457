"""Define a row, and run it several times in a job that lives as long as it can.

Guarantees:
- Every random choice of a run comes from a generator that depends on seed, row and run alone.
- A run that gets stuck fails with the state of the job and costs that job, but no later run.
"""

from __future__ import annotations

import random
import subprocess
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.faults.environment import BATCH, STEPS
from benchmarks.faults.record import FaultRun
from benchmarks.faults.recovery import Run
from benchmarks.faults.target import StuckError
from tests.testing.cluster.access import CommandError
from tests.testing.suite.timeouts import NotInTimeError
from trainium_devcluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from benchmarks.faults.environment import FaultEnvironment

_LAST_STEPS = 100
"""A new job is started when so few steps remain that the next recovery might not fit."""
_MAX_FAILED_JOBS = 3
EXPECTED_ERRORS = (
    StuckError,
    NotInTimeError,
    CommandError,
    ClusterError,
    TimeoutError,
    subprocess.TimeoutExpired,
    OSError,
)


@dataclass
class Session:
    """The requested runs of a row."""

    name: str
    seed: int
    runs: range
    wrong: list[str] = field(default_factory=list)
    """Deviations of the row as a whole."""

    def random(self, run: int) -> random.Random:
        """Return the random generator of a run."""
        return random.Random(f"{self.seed}/{self.name}/{run}")

    def add_errors(self, sentences: list[str]) -> None:
        """Add deviations of the row, each sentence once."""
        self.wrong += [sentence for sentence in sentences if sentence not in self.wrong]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the table."""

    number: int
    part: str = ""
    """A letter where a row has several variants."""
    fault: str
    injected: str
    expected: str
    judged: str
    """Check of the result."""
    run_once: Callable[[Run], FaultRun]
    require: Callable[[FaultEnvironment], object] | None = None
    """Raises RowSkippedError on a cluster on which the row cannot run."""
    within: Callable[[FaultEnvironment], AbstractContextManager[None]] | None = None
    """State of the cluster during all runs; of a row whose runs have a job each, during each run."""
    spares: int = 1
    spec: str = ""
    """Difference of the job's spec, as YAML."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment of the workers."""
    own_job: bool = False
    """Whether each run has a separate job, whose curve is not checked."""
    tolerance: float = 0.0
    """Largest relative difference of a loss from the reference curve."""
    batch: int = BATCH
    max_runs: int = 30
    """Runs at most; fewer than 30 where one of them takes long."""
    kubelet: bool = True
    """Whether the row can also run on genuine kubelets."""

    @property
    def name(self) -> str:
        """Number and part."""
        return f"{self.number}{self.part}"

    def run(self, env: FaultEnvironment, session: Session) -> Iterator[FaultRun]:
        """Run the row as often as the session asks."""
        if self.require is not None:
            self.require(env)
        within = self.within or (lambda _: nullcontext())
        if self.own_job:
            for run in session.runs:
                with within(env):
                    yield self._run_in_own_job(env, session, run)
            return
        with within(env):
            yield from self._run_in_one_job(env, session)

    def _job(self, env: FaultEnvironment) -> AbstractContextManager[Any]:
        change = f"workers: {{spares: {env.spares(self.spares)}}}"
        return env.job(f"row{self.name}", change, self.spec, environment=dict(self.variables))

    def _run_in_own_job(self, env: FaultEnvironment, session: Session, run: int) -> FaultRun:
        try:
            env.release_nodes()
            with self._job(env) as target:
                try:
                    return self.run_once(Run(env, target, run, session.random(run)))
                except EXPECTED_ERRORS:
                    env.save_diagnostics(target, f"{session.name}-{run}")
                    raise
        except EXPECTED_ERRORS as error:
            return FaultRun(run=run, wrong=(str(error),))

    def _run_in_one_job(self, env: FaultEnvironment, session: Session) -> Iterator[FaultRun]:
        waiting = deque(session.runs)
        failed_jobs = 0
        while waiting:
            if failed_jobs >= _MAX_FAILED_JOBS:
                session.add_errors([f"{len(waiting)} runs are missing: {failed_jobs} jobs in a row failed"])
                return
            failed_jobs += 1
            env.release_nodes()
            with self._job(env) as target:
                try:
                    target.until_stable(3, seconds=180)
                except StuckError as error:
                    env.save_diagnostics(target, f"{session.name}-{waiting[0]}-before")
                    yield FaultRun(run=waiting.popleft(), wrong=(f"before the fault: {error}",))
                    continue
                while waiting and target.step() < STEPS - _LAST_STEPS:
                    run = waiting.popleft()
                    try:
                        target.clear_failures()
                        env.release_nodes()
                        result = self.run_once(Run(env, target, run, session.random(run)))
                    except EXPECTED_ERRORS as error:
                        env.save_diagnostics(target, f"{session.name}-{run}")
                        yield FaultRun(run=run, wrong=(str(error),))
                        break
                    yield result
                    failed_jobs = 0
                    try:
                        target.clear_commands()
                        if waiting:
                            target.until_stable()
                    except EXPECTED_ERRORS as error:
                        env.save_diagnostics(target, f"{session.name}-{run}-after")
                        session.add_errors([f"after run {run}: {error}"])
                        break
                session.add_errors(env.check_curve(target, env.size, self.tolerance, self.batch))
