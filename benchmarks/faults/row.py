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
from benchmarks.faults.record import RunResult
from benchmarks.faults.recovery import Run
from benchmarks.faults.target import NoProgressError
from tests.testing.cluster.access import CommandError
from tests.testing.suite.timeouts import NotInTimeError
from trainium_devcluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from benchmarks.faults.environment import FaultEnvironment

_MIN_REMAINING_STEPS = 100
"""If fewer steps remain, a new job is started, because the job might complete during the next recovery."""
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
class RequestedRuns:
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
    """The description of the check of the result, for the page."""
    run_once: Callable[[Run], RunResult]
    require: Callable[[FaultEnvironment], object] | None = None
    """Function that raises RowSkippedError on a cluster on which the row cannot run."""
    context: Callable[[FaultEnvironment], AbstractContextManager[None]] | None = None
    """State of the cluster during all runs, or during each run if each has a separate job."""
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

    def run(self, env: FaultEnvironment, requested: RequestedRuns) -> Iterator[RunResult]:
        """Run the row as often as requested."""
        if self.require is not None:
            self.require(env)
        context = self.context or (lambda _: nullcontext())
        if self.job_per_run:
            for run in requested.runs:
                with context(env):
                    yield self._run_in_separate_job(env, requested, run)
            return
        with context(env):
            yield from self._run_in_one_job(env, requested)

    def _job(self, env: FaultEnvironment) -> AbstractContextManager[Any]:
        change = f"workers: {{spares: {env.spares(self.spares)}}}"
        return env.job(f"row{self.name}", change, self.spec, environment=dict(self.variables))

    def _run_in_separate_job(self, env: FaultEnvironment, requested: RequestedRuns, run: int) -> RunResult:
        try:
            env.clear_quarantine()
            with self._job(env) as target:
                try:
                    return self.run_once(Run(env, target, run, requested.random(run)))
                except EXPECTED_ERRORS:
                    env.save_diagnostics(target, f"{requested.name}-{run}")
                    raise
        except EXPECTED_ERRORS as error:
            return RunResult(run=run, deviations=(str(error),))

    def _run_in_one_job(self, env: FaultEnvironment, requested: RequestedRuns) -> Iterator[RunResult]:
        pending = deque(requested.runs)
        jobs_without_success = 0
        while pending:
            if jobs_without_success >= _MAX_FAILED_JOBS:
                requested.add_errors(
                    [f"{len(pending)} runs are missing: {jobs_without_success} consecutive jobs failed"]
                )
                return
            jobs_without_success += 1
            env.clear_quarantine()
            with self._job(env) as target:
                try:
                    target.wait_until_stable(3, seconds=180)
                except NoProgressError as error:
                    env.save_diagnostics(target, f"{requested.name}-{pending[0]}-before")
                    yield RunResult(run=pending.popleft(), deviations=(f"before the fault: {error}",))
                    continue
                while pending and target.newest_step() < STEPS - _MIN_REMAINING_STEPS:
                    run = pending.popleft()
                    try:
                        target.clear_failures()
                        env.clear_quarantine()
                        result = self.run_once(Run(env, target, run, requested.random(run)))
                    except EXPECTED_ERRORS as error:
                        env.save_diagnostics(target, f"{requested.name}-{run}")
                        yield RunResult(run=run, deviations=(str(error),))
                        break
                    yield result
                    jobs_without_success = 0
                    try:
                        target.clear_commands()
                        if pending:
                            target.wait_until_stable()
                    except EXPECTED_ERRORS as error:
                        env.save_diagnostics(target, f"{requested.name}-{run}-after")
                        requested.add_errors([f"after run {run}: {error}"])
                        break
                requested.add_errors(env.check_curve(target, env.size, self.tolerance, self.batch))
