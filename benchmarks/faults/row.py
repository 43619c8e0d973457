"""Define a row, and run it several times, in one job if possible.

Guarantees:
- Every random choice of a run comes from a generator that depends only on seed, row and run.
- A stuck run fails with the state of the job; the next run gets a new job.
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
from benchmarks.faults.target import NoProgressError
from tests.testing.cluster.access import CommandError
from tests.testing.suite.timeouts import NotInTimeError
from trainium_devcluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from benchmarks.faults.environment import FaultEnvironment

_LAST_STEPS = 100
"""A new job is started when fewer steps remain, because the next recovery might not fit."""
_MAX_FAILED_JOBS = 3
EXPECTED_ERRORS = (
    NoProgressError,
    NotInTimeError,
    CommandError,
    ClusterError,
    TimeoutError,
    subprocess.TimeoutExpired,
    OSError,
)


@dataclass
class RowRuns:
    """The requested runs of a row."""

    name: str
    seed: int
    runs: range
    deviations: list[str] = field(default_factory=list)
    """Deviations of the whole row."""

    def random(self, run: int) -> random.Random:
        """Return the random generator of a run."""
        return random.Random(f"{self.seed}/{self.name}/{run}")

    def add_errors(self, sentences: list[str]) -> None:
        """Add deviations of the row, each sentence once."""
        self.deviations += [sentence for sentence in sentences if sentence not in self.deviations]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the table."""

    number: int
    part: str = ""
    """A letter if a row has several variants."""
    fault: str
    injected: str
    expected: str
    checked: str
    """The check of the result, for the page."""
    run_once: Callable[[Run], FaultRun]
    require: Callable[[FaultEnvironment], object] | None = None
    """Function that raises RowSkippedError on a cluster on which the row cannot run."""
    within: Callable[[FaultEnvironment], AbstractContextManager[None]] | None = None
    """Context of the cluster during all runs; during each run if each has a separate job."""
    spares: int = 1
    spec: str = ""
    """Changes of the job's spec, as YAML."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment of the workers."""
    job_per_run: bool = False
    """Whether each run has a separate job, whose curve is not checked."""
    tolerance: float = 0.0
    """Largest relative difference of a loss from the reference curve."""
    batch: int = BATCH
    max_runs: int = 30
    """Maximum number of runs; below 30 if a run takes long."""
    kubelet: bool = True
    """Whether the row can also run on genuine kubelets."""

    @property
    def name(self) -> str:
        """Number and part."""
        return f"{self.number}{self.part}"

    def run(self, env: FaultEnvironment, session: RowRuns) -> Iterator[FaultRun]:
        """Run the row as often as the session requests."""
        if self.require is not None:
            self.require(env)
        within = self.within or (lambda _: nullcontext())
        if self.job_per_run:
            for run in session.runs:
                with within(env):
                    yield self._run_in_own_job(env, session, run)
            return
        with within(env):
            yield from self._run_in_one_job(env, session)

    def _job(self, env: FaultEnvironment) -> AbstractContextManager[Any]:
        change = f"workers: {{spares: {env.spares(self.spares)}}}"
        return env.job(f"row{self.name}", change, self.spec, environment=dict(self.variables))

    def _run_in_own_job(self, env: FaultEnvironment, session: RowRuns, run: int) -> FaultRun:
        try:
            env.release_nodes()
            with self._job(env) as target:
                try:
                    return self.run_once(Run(env, target, run, session.random(run)))
                except EXPECTED_ERRORS:
                    env.save_diagnostics(target, f"{session.name}-{run}")
                    raise
        except EXPECTED_ERRORS as error:
            return FaultRun(run=run, deviations=(str(error),))

    def _run_in_one_job(self, env: FaultEnvironment, session: RowRuns) -> Iterator[FaultRun]:
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
                except NoProgressError as error:
                    env.save_diagnostics(target, f"{session.name}-{waiting[0]}-before")
                    yield FaultRun(run=waiting.popleft(), deviations=(f"before the fault: {error}",))
                    continue
                while waiting and target.step() < STEPS - _LAST_STEPS:
                    run = waiting.popleft()
                    try:
                        target.clear_failures()
                        env.release_nodes()
                        result = self.run_once(Run(env, target, run, session.random(run)))
                    except EXPECTED_ERRORS as error:
                        env.save_diagnostics(target, f"{session.name}-{run}")
                        yield FaultRun(run=run, deviations=(str(error),))
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
