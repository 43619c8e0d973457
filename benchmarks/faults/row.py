"""Read the rows of the table from rows.yaml, and run a row several times, in one job if possible.

Guarantees:
- Every random choice of a run comes from a generator that depends only on seed, row and run.
- A stuck run fails with the state of the job; the next run gets a new job.
"""

from __future__ import annotations

import random
import re
import subprocess
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from benchmarks.faults.environment import BATCH, STEPS, FaultEnvironment
from benchmarks.faults.injections import CONTEXTS, INJECTIONS
from benchmarks.faults.record import RunResult
from benchmarks.faults.recovery import ExpectedRecovery, Run
from tests.testing.cluster.access import CommandError
from tests.testing.suite.timeouts import NotInTimeError
from trainium_devcluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from benchmarks.faults.target import TargetJob

_MIN_REMAINING_STEPS = 100
"""If fewer steps remain, a new job is started, because the job might complete during the next recovery."""
_MAX_FAILED_JOBS = 3
_START_SECONDS = 180.0
EXPECTED_ERRORS = (NotInTimeError, CommandError, ClusterError, TimeoutError, subprocess.TimeoutExpired, OSError)


@dataclass
class RequestedRuns:
    """The requested runs of a row."""

    name: str
    seed: int
    runs: range
    deviations: list[str] = field(default_factory=list)
    """Deviations of the whole row."""

    def create_random(self, run: int) -> random.Random:
        """Return the random generator of a run."""
        return random.Random(f"{self.seed}/{self.name}/{run}")

    def add_errors(self, sentences: list[str]) -> None:
        """Add deviations of the row, each sentence once."""
        self.deviations += [sentence for sentence in sentences if sentence not in self.deviations]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the table."""

    row: str
    """Its number, and a letter if it has several variants."""
    fault: str
    injected: str
    expected: str
    checked: str
    """The description of the check of the result, for the page."""
    inject: str
    """Function of `injections` that injects the fault, and measures or checks what follows."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Its arguments; `with` in the file."""
    recovery: ExpectedRecovery = field(default_factory=ExpectedRecovery)
    require: str = ""
    """Requirement of `FaultEnvironment` on the cluster; empty for none."""
    context: str = ""
    """Function of `injections` for the state of the cluster during all runs, or each if each has a separate job."""
    spares: int = 1
    spec: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the job's spec."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment of the workers."""
    job_per_run: bool = False
    """Whether each run has a separate job, whose curve is not checked."""
    starts_training: bool = True
    """Whether a run begins when the job trains."""
    tolerance: float = 0.0
    """Largest relative difference of a loss from the reference curve."""
    batch: int = BATCH
    runs: int = 30
    """Maximum number of runs; below 30 if a run takes long."""
    kubelet: bool = True
    """Whether the row can also run on genuine kubelets."""

    @property
    def number(self) -> int:
        """The number without the letter."""
        return int(re.sub(r"\D", "", self.row))

    @property
    def file_stem(self) -> str:
        """Start of the names of its results."""
        return f"{self.number:02d}{self.row.lstrip('0123456789')}"

    def run(self, env: FaultEnvironment, requested: RequestedRuns) -> Iterator[RunResult]:
        """Run the row as often as requested."""
        if self.require:
            env.require(self.require)
        context = CONTEXTS[self.context] if self.context else (lambda _: nullcontext())
        if self.job_per_run:
            for run in requested.runs:
                with context(env):
                    yield self._run_in_separate_job(env, requested, run)
            return
        with context(env):
            yield from self._run_in_one_job(env, requested)

    def _run_job(self, env: FaultEnvironment) -> AbstractContextManager[TargetJob]:
        spares = {"workers": {"spares": env.count_spares(self.spares)}}
        return env.run_job(f"row{self.row}", spares, self.spec, environment=dict(self.variables))

    def _run_once(self, env: FaultEnvironment, target: TargetJob, requested: RequestedRuns, number: int) -> RunResult:
        run = Run(env, target, requested.create_random(number), self.recovery, RunResult(number))
        INJECTIONS[self.inject](run, **self.arguments)
        return run.result

    def _run_in_separate_job(self, env: FaultEnvironment, requested: RequestedRuns, run: int) -> RunResult:
        try:
            env.clear_quarantine()
            with self._run_job(env) as target:
                try:
                    if self.starts_training:
                        target.wait_until_stable(3, _START_SECONDS)
                    return self._run_once(env, target, requested, run)
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
            with self._run_job(env) as target:
                try:
                    target.wait_until_stable(3, _START_SECONDS)
                except EXPECTED_ERRORS as error:
                    env.save_diagnostics(target, f"{requested.name}-{pending[0]}-before")
                    yield RunResult(run=pending.popleft(), deviations=(f"before the fault: {error}",))
                    continue
                while pending and target.read_newest_step() < STEPS - _MIN_REMAINING_STEPS:
                    run = pending.popleft()
                    try:
                        target.clear_failures()
                        env.clear_quarantine()
                        result = self._run_once(env, target, requested, run)
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


def read_rows(file: Path) -> tuple[Row, ...]:
    """Read the rows of a file, in the order of their numbers."""
    rows = []
    for entry in yaml.safe_load(file.read_text())["rows"]:
        recovery = ExpectedRecovery(**entry.pop("recovery", {}))
        rows.append(Row(row=str(entry.pop("row")), arguments=entry.pop("with", {}), recovery=recovery, **entry))
    return tuple(sorted(rows, key=lambda row: row.file_stem))


ROWS = read_rows(Path(__file__).with_name("rows.yaml"))
