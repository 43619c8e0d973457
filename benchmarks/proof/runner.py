"""Run trials with real ranks and compare them with an undisturbed run."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import time
from typing import TYPE_CHECKING, Self

import yaml

from benchmarks.harness.ranks import THREAD_VARIABLES, build_rank_environment
from benchmarks.proof import artifact_checks
from benchmarks.proof.checks import (
    AttemptResult,
    Reference,
    TrialResult,
    check_milestones,
    check_reported,
    check_result,
    check_steps_lost,
)
from benchmarks.proof.forked_rank import run_rank
from benchmarks.proof.inputs import Inputs
from benchmarks.proof.kill_points import ARTIFACTS, VARIABLE
from benchmarks.proof.suites import Attempt, Layout
from trainium_devcluster.ports import reserve_port
from trainium_trainer.checkpoint.root.survey import survey
from trainium_trainer.storage.posix import PosixStorage
from trainium_worker.progress_record import read_progress

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.proof.suites import Scenario, Suite, Trial

_ATTEMPT_SECONDS = 1200.0
_KILLED = -signal.SIGKILL
_TOLERATED_NODE_FAILURES = 2
"""Number of failed nodes, before copies are recreated, from which a shard and its copy may be lost."""
_GRACE_SECONDS = 60.0
"""Time of the other ranks to end after one has failed."""
_MODULES = (
    "benchmarks.proof.forked_rank",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "trainium_trainer.backends.native",
    "trainium_trainer.backends.sharded_store",
    "trainium_trainer.checkpoint.manager",
    "trainium_trainer.data.dataset",
    "trainium_trainer.loop.train",
)
"""Modules that the server imports from which ranks are forked."""
_TUNING_MODULES = (
    "trainium_trainer.loop.after_training",
    "trainium_trainer.evaluate.stage",
    "transformers.models.llama.modeling_llama",
)
"""Modules that it also imports for fine-tuning."""


class Runner:
    """Runs trials in a folder, with a fork server; a context manager."""

    def __init__(self, folder: Path, suite: Suite) -> None:
        self._folder = folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self._suite = suite
        self._inputs = Inputs(folder, suite)
        self._references: dict[Layout, Reference] = {}

    def __enter__(self) -> Self:
        os.environ.update(THREAD_VARIABLES)  # the server inherits them at its start, before its imports
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*_MODULES, *(_TUNING_MODULES if self._suite.tuning else ())])
        return self

    def __exit__(self, *_: object) -> None:
        if not list(self._folder.glob("trial-*")):  # failed trials keep their folder
            shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, trial: Trial) -> TrialResult:
        """Run a trial and check it."""
        folder = self._folder / f"trial-{trial.seed}"
        folder.mkdir()
        result = TrialResult(trial.seed, trial.scenario.name)
        nodes = [folder / f"node-{number}" for number in range(max(attempt.layout.ranks for attempt in trial.attempts))]
        previous: AttemptResult | None = None
        point, lost_nodes = "", 0
        complete_files: dict[Path, int] = {}
        for number, attempt in enumerate(trial.attempts):
            codes = self._run_attempt(folder, trial.scenario, attempt, nodes, number)
            attempt_result = self._read_attempt(
                folder, attempt, number, killed=attempt.rank is not None and codes[attempt.rank] == _KILLED
            )
            result.attempts.append(attempt_result)
            if previous is not None:
                in_memory = trial.scenario.memory and (
                    lost_nodes < _TOLERATED_NODE_FAILURES or trial.attempts[0].layout.holds_whole_state
                )
                allowed = 1 if in_memory else previous.completed - max(previous.committed, 0)
                # While artifacts of a milestone are written, steps continue.
                after_last_step = result.attempts[-2].killed and trial.attempts[number - 1].follows_training
                if after_last_step and not trial.scenario.milestones:
                    allowed = 0
                check_steps_lost(previous, attempt_result, point, result, allowed=allowed)
            if attempt_result.resumed >= 0:
                lost_nodes = 0
            self._check_codes(folder, attempt, number, codes, result)
            if self._suite.tuning:
                self._check_artifacts(folder, complete_files, result)
            if attempt_result.killed:
                point = attempt_result.point
                if trial.scenario.node_lost and attempt.rank is not None:
                    shutil.rmtree(nodes[attempt.rank], ignore_errors=True)
                    nodes[attempt.rank] = folder / f"node-{attempt.rank}-after-{number}"
                    lost_nodes += 1
                elif trial.scenario.through_nxd and attempt_result.committed >= 0:
                    self._convert(folder, number, result)
            # If a rank was killed while it loaded, the step before that counts.
            previous = attempt_result if attempt_result.completed >= 0 or previous is None else previous
        self._check_end(folder, trial, result)
        if not result.deviations:
            shutil.rmtree(folder)
        return result

    def _check_codes(
        self, folder: Path, attempt: Attempt, number: int, codes: list[int | None], result: TrialResult
    ) -> None:
        """Check that an attempt without a kill succeeds; in others, count ranks that wait for the killed one."""
        if not result.attempts[-1].killed:
            if codes != [0] * attempt.layout.ranks:
                result.deviations.append(
                    f"attempt {number} ended with {codes}: {self._read_last_log_lines(folder, number)}"
                )
        else:
            result.waited += codes.count(None)

    def _check_artifacts(self, folder: Path, complete_files: dict[Path, int], result: TrialResult) -> None:
        """Check that no incomplete artifact looks complete, and no complete file was written again."""
        for step in sorted((folder / "run" / ARTIFACTS).glob("step-*")):
            if deviations := artifact_checks.find_incomplete(step):
                result.deviations += [f"{step.name}: {deviation}" for deviation in deviations]
                continue
            current = artifact_checks.find_complete_files(step)
            rewritten = [
                str(path)
                for path, modified_at in complete_files.items()
                if path.is_relative_to(step) and current.get(path) != modified_at
            ]
            if rewritten:
                result.deviations.append(f"complete and yet written again: {rewritten}")
            complete_files.update(current)

    def _check_end(self, folder: Path, trial: Trial, result: TrialResult) -> None:
        layouts = find_layouts_with_steps(trial, result)
        exact = len(layouts) == 1
        layout = next(iter(layouts)) if exact else Layout(1)
        check_result(folder / "run", result, self.run_reference(layout), self._suite, exact=exact)
        if self._suite.tuning:
            progress = folder / f"progress-{len(trial.attempts) - 1}-0"
            check_reported(folder / "run", progress, result, self._suite)
            check_milestones(folder / "run", result)

    def _run_attempt(
        self, folder: Path, scenario: Scenario, attempt: Attempt, nodes: list[Path], number: int
    ) -> list[int | None]:
        layout = attempt.layout
        config = self._inputs.create_config(scenario, layout, folder / "run")
        file = folder / f"trainer-{number}.yaml"
        file.write_text(yaml.safe_dump(config))
        port = reserve_port()
        ranks: list[tuple[dict[str, str], str]] = []
        for rank in range(layout.ranks):
            environment = build_rank_environment(rank, layout.ranks, port) | {
                "TRAINIUM_GENERATION": str(number + 1),
                "TRAINIUM_PROGRESS_FILE": str(folder / f"progress-{number}-{rank}"),
                "TRAINIUM_MEMORY_DIR": str(nodes[rank]),
                VARIABLE: attempt.kill.to_text() if attempt.kill is not None and rank == attempt.rank else "",
            }
            ranks.append((environment, str(folder / f"log-{number}-{rank}")))
        return self._run_ranks(ranks, ["train", "--config", str(file)])

    def _read_attempt(self, folder: Path, attempt: Attempt, number: int, *, killed: bool) -> AttemptResult:
        records = [read_progress(folder / f"progress-{number}-{rank}") for rank in range(attempt.layout.ranks)]
        reported = [record for record in records if record is not None]
        committed = survey(PosixStorage(folder / "run")).committed
        return AttemptResult(
            layout=attempt.layout.name,
            point=attempt.kill.point.value if attempt.kill is not None else "",
            killed=killed,
            completed=max((record.step for record in reported), default=-1),
            resumed=max((record.resume_step for record in reported), default=-1),
            committed=committed[0].step if committed else -1,
        )

    def _convert(self, folder: Path, number: int, result: TrialResult) -> None:
        """Convert the newest checkpoint to NxD's layout and back, into a new root with its metrics and records."""
        root, old, nxd_checkpoint = folder / "run", folder / f"run-{number}", folder / f"tag-{number}"
        root.rename(old)
        config = ["--config", str(folder / f"trainer-{number}.yaml")]
        for argv in (
            ["convert", "to-nxd", str(old), str(nxd_checkpoint), "--tensor", "2", "--zero1", "3", *config],
            ["convert", "from-nxd", str(nxd_checkpoint), str(root), *config],
        ):
            codes = self._run_ranks([({}, str(folder / f"log-{number}-convert"))], argv)
            if codes != [0]:
                result.deviations.append(
                    f"{' '.join(argv[:2])} ended with {codes}: {self._read_last_log_lines(folder, number)}"
                )
        root.mkdir(exist_ok=True)
        for path in (old / "metrics.jsonl", *old.glob("samples-*.jsonl")):
            shutil.copy(path, root)

    def run_reference(self, layout: Layout) -> Reference:
        """Return the result of an undisturbed run."""
        if layout not in self._references:
            folder = self._folder / f"reference-{len(self._references)}"
            folder.mkdir()
            nodes = [folder / f"node-{number}" for number in range(layout.ranks)]
            codes = self._run_attempt(folder, self._suite.scenarios[0], Attempt(layout, None, None), nodes, 0)
            if codes != [0] * layout.ranks:
                raise RuntimeError(
                    f"the undisturbed run at {layout.name} ended with {codes}: {self._read_last_log_lines(folder, 0)}"
                )
            self._references[layout] = Reference.read(folder / "run", self._suite)
        return self._references[layout]

    def _run_ranks(self, ranks: list[tuple[dict[str, str], str]], argv: list[str]) -> list[int | None]:
        """Run a command in ranks with these environments and logs; return their exit codes.

        Once a rank has failed, the others have a minute to end. None stands for a rank that had to be killed.
        """
        processes = [
            self._context.Process(target=run_rank, args=(environment, log, argv)) for environment, log in ranks
        ]
        for process in processes:
            process.start()
        deadline, failed = time.monotonic() + _ATTEMPT_SECONDS, False
        while running := [process for process in processes if process.exitcode is None]:
            if not failed and any(process.exitcode for process in processes):
                deadline, failed = min(deadline, time.monotonic() + _GRACE_SECONDS), True
            if time.monotonic() > deadline:
                break
            multiprocessing.connection.wait([process.sentinel for process in running], timeout=1.0)
        killed = [process for process in processes if process.exitcode is None]
        for process in killed:
            process.kill()
            process.join()
        return [None if process in killed else process.exitcode for process in processes]

    @staticmethod
    def _read_last_log_lines(folder: Path, number: int) -> str:
        lines = [path.read_text().splitlines()[-1:] for path in sorted(folder.glob(f"log-{number}-*"))]
        return " | ".join(line for tail in lines for line in tail)


def find_layouts_with_steps(trial: Trial, result: TrialResult) -> set[Layout]:
    """Return the layouts in which steps of the history may have been made."""
    layouts = set()
    for number, (attempt, attempt_result) in enumerate(zip(trial.attempts, result.attempts, strict=True)):
        later = [other.resumed for other in result.attempts[number + 1 :] if other.resumed >= 0]
        if attempt_result.resumed >= 0 and max([attempt_result.completed, *later[:1]]) > attempt_result.resumed:
            layouts.add(attempt.layout)
    return layouts
