"""Reports of a pod to the coordinator: phase, progress, restarts, failures, verdict."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.agent.pod_environment import ended_rank
from trainium_agent.coordinator.report import PodReport
from trainium_agent.ranks.output import OutputTail
from trainium_agent.ranks.processes import RankProcess
from trainium_contract.faults.causes import Cause
from trainium_contract.status.results import FIGURES, ArtifactReport, EvaluationFigure, RunStage
from trainium_contract.wire.messages import MAX_GENERATION, HangDetection, WorkerPhase
from trainium_trainer.monitor.progress import ProgressWriter
from trainium_worker.progress_record import ProgressPhase, ProgressReading

SETTINGS = SimpleNamespace(namespace="team", job="job", pod_name="job-w-0", pod_uid="uid", rules_path=None)


SHOWN = {*FIGURES} - {"loss", "tokens_per_second"}


class FakeWorkload:
    """A workload with one rank, whose progress record the test sets."""

    hang_detection = None
    problem = ""
    durable_step = -1

    def __init__(self) -> None:
        self.progress: Any = None

    def read(self, path: Path) -> ProgressReading | None:
        return None if self.progress is None else ProgressReading(self.progress, None)

    def read_newest(self, files: list[Path]) -> tuple[SimpleNamespace, Path] | None:
        return None if self.progress is None else (self.progress, files[0])

    def set_progress(
        self,
        step: int,
        *,
        attempt: int = 0,
        resume: int = 0,
        phase: str = "TRAINING",
        stage: RunStage = RunStage.TRAIN,
        stage_progress: float = 0.0,
    ) -> None:
        self.progress = SimpleNamespace(
            generation=1,
            attempt=attempt,
            phase=ProgressPhase[phase],
            step=step,
            resume_step=resume,
            figures={"loss": math.nan, "tokens_per_second": math.inf, **dict.fromkeys(SHOWN, 12.5)},
            samples=step * 8,
            memory_step=step,
            durable_step=-1,
            updated=1000.0 + step,
            productive_seconds=1.0,
            total_steps=100,
            stage=stage,
            stage_progress=stage_progress,
            stage_since=0.0 if stage is RunStage.TRAIN else 2000.0 + attempt,
            newer_generation=0,
        )


@pytest.fixture
def ranks() -> FakeWorkload:
    return FakeWorkload()


@pytest.fixture
def report(ranks: FakeWorkload, tmp_path: Path) -> PodReport:
    report = PodReport(SETTINGS, ranks, lambda: None)
    report.start_generation(1, WorkerPhase.JOINING)
    report.progress_files = [tmp_path / "g1-r0"]
    report.set_phase(WorkerPhase.LOADING, attempt=0)
    return report


def test_a_pod_is_training_once_its_first_rank_is(report: PodReport, ranks: FakeWorkload) -> None:
    ranks.set_progress(0, phase="LOADING")
    assert report.build_heartbeat().phase is WorkerPhase.LOADING
    ranks.set_progress(0)
    assert report.build_heartbeat().phase is WorkerPhase.TRAINING


def test_infinite_and_nan_figures_are_left_out(report: PodReport, ranks: FakeWorkload) -> None:
    ranks.set_progress(3)
    progress = report.build_heartbeat().progress
    assert (progress.step, progress.loss, progress.tokens_per_second) == (3, None, None)
    assert {getattr(progress, name) for name in SHOWN} == {12.5}, "figures of the record by name"


def test_a_restart_has_resumed_with_the_first_new_step(report: PodReport, ranks: FakeWorkload) -> None:
    ranks.set_progress(10)
    report.build_heartbeat()
    report.record_restart(1, 1, Cause.CRASH, 999.0)
    assert report.build_heartbeat().restarts[0].resumed_at is None
    assert report.recovering
    report.set_phase(WorkerPhase.LOADING, attempt=1)
    ranks.set_progress(9, attempt=1, resume=8)
    assert report.build_heartbeat().restarts[0].resumed_at is None
    assert report.build_heartbeat().restarts[0].resume_step == 8
    ranks.set_progress(11, attempt=1, resume=8)
    restart = report.build_heartbeat().restarts[0]
    assert (restart.step_before, restart.resume_step, restart.resumed_at) == (10, 8, 1011.0)
    assert not report.recovering


def test_a_restart_after_the_last_step_has_resumed_in_its_stage(report: PodReport, ranks: FakeWorkload) -> None:
    ranks.set_progress(100, stage=RunStage.EXPORT, stage_progress=0.5)
    report.build_heartbeat()
    report.record_restart(1, 1, Cause.CRASH, 1999.0)
    report.set_phase(WorkerPhase.LOADING, attempt=1)
    ranks.set_progress(98, attempt=1, resume=98)
    assert report.build_heartbeat().restarts[0].resumed_at is None, "two steps are done again"
    ranks.set_progress(100, attempt=1, resume=98)
    assert report.build_heartbeat().restarts[0].resumed_at is None, "no step is new, and the stage has not started"
    assert report.recovering
    ranks.set_progress(100, attempt=1, resume=98, stage=RunStage.EXPORT)
    restart = report.build_heartbeat().restarts[0]
    assert (restart.step_before, restart.resume_step, restart.resumed_at) == (100, 98, 2001.0)
    assert not report.recovering


def test_reached_progress_rises_through_the_stages_and_never_falls(report: PodReport, ranks: FakeWorkload) -> None:
    assert report.best_progress == -1
    seen = []
    for step, stage, stage_progress in (
        (99, RunStage.TRAIN, 0.0),
        (100, RunStage.TRAIN, 0.0),
        (100, RunStage.EXPORT, 0.0),
        (100, RunStage.EXPORT, 0.5),
        (100, RunStage.EVALUATE, 0.0),
        (100, RunStage.EXPORT, 0.25),
        (100, RunStage.EVALUATE, 0.75),
    ):
        ranks.set_progress(step, stage=stage, stage_progress=stage_progress)
        report.observe()
        seen.append(report.best_progress)
    assert seen == [99, 100, 101, 101.5, 102, 102, 102.75]
    assert report._best_step == 100


def test_stage_total_and_results_are_reported(report: PodReport, ranks: FakeWorkload) -> None:
    ranks.set_progress(3)
    progress = report.build_heartbeat().progress
    assert (progress.total_steps, progress.stage, progress.stage_progress) == (100, "Train", None)
    assert progress.training
    assert (progress.artifacts, progress.evaluation) == ((), ())
    artifact = ArtifactReport(kind="Model", path="/out", step=100, bytes=7, digest="ab")
    figures = (EvaluationFigure(name="accuracy", before=0.5, after=0.75),)
    writer = ProgressWriter(report.progress_files[0])
    writer.record_artifact(artifact)
    writer.record_evaluation(figures)
    ranks.set_progress(100, stage=RunStage.EVALUATE, stage_progress=0.5)
    progress = report.build_heartbeat().progress
    assert (progress.stage, progress.stage_progress, progress.stage_since) == ("Evaluate", 0.5, 2000.0)
    assert (progress.artifacts, progress.evaluation, progress.training) == ((artifact,), figures, False)
    writer.close()


def test_a_new_generation_keeps_only_the_step(report: PodReport, ranks: FakeWorkload) -> None:
    ranks.set_progress(10, resume=4)
    assert report.build_heartbeat().progress.resume_step == 4
    report.start_generation(2, WorkerPhase.JOINING)
    progress = report.build_heartbeat().progress
    assert (progress.step, progress.resume_step, progress.productive_seconds) == (10, None, 0.0)


def test_a_record_of_an_earlier_attempt_is_ignored(report: PodReport, ranks: FakeWorkload) -> None:
    ranks.set_progress(10)
    report.build_heartbeat()
    report.record_restart(1, 1, Cause.CRASH, 999.0)
    report.set_phase(WorkerPhase.LOADING, attempt=1)
    assert report.build_heartbeat().phase is WorkerPhase.LOADING
    assert report.build_heartbeat().progress.step == 10


def test_failures_are_numbered_and_the_newest_eight_are_sent(report: PodReport) -> None:
    for _ in range(10):
        report.record_failure(1, ended_rank(1))
    assert [failure.sequence for failure in report.build_heartbeat().failures] == list(range(2, 10))


@pytest.mark.parametrize(("claimed", "sent"), [(5, 5), (MAX_GENERATION + 1, 0), (2**62, 0), (-5, 0)])
def test_the_generation_that_owns_the_checkpoints_is_sent_with_the_failure_of_its_rank(
    report: PodReport, ranks: FakeWorkload, claimed: int, sent: int
) -> None:
    ranks.set_progress(10)
    ranks.progress.newer_generation = claimed
    report.record_failure(1, ended_rank(76))
    assert report.build_heartbeat().failures[0].newer_generation == sent


def test_a_verdict_is_the_newest_failure_with_its_last_lines(report: PodReport) -> None:
    report.record_failure(1, ended_rank(64, output="first\nno such file\n"))
    report.set_verdict()
    beat = report.build_heartbeat()
    assert beat.phase is WorkerPhase.FAILED
    assert (beat.verdict.exit_code, beat.verdict.rank) == (64, 3)
    assert beat.verdict.message == "no such file\nfirst"


def test_a_failure_is_reported_once_its_output_is_complete(report: PodReport) -> None:
    process = RankProcess(0, 3, 0, 12345, OutputTail("[rank 3] "))
    process.record_exit(1)
    report.record_failure(1, process)
    assert not report.build_heartbeat().failures
    process.output.feed(b"the reason")
    process.output.close()
    assert report.build_heartbeat().failures[0].message.endswith("the reason")


def test_a_newer_generation_clears_the_verdict(report: PodReport) -> None:
    report.record_failure(1, ended_rank(64))
    report.set_verdict()
    report.start_generation(2, WorkerPhase.JOINING)
    beat = report.build_heartbeat()
    assert beat.verdict is None
    assert beat.failures


def test_a_program_has_loaded_when_its_first_step_ends(
    report: PodReport, ranks: FakeWorkload, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.hang_detection = HangDetection.STEPS
    times = iter((1000.0, 1030.0, 1040.0, 1050.0))
    for step, updated, loaded in ((-1, 0.0, 1000.0), (-1, 0.0, 1000.0), (31, 1035.0, 1035.0), (40, 1049.0, 1035.0)):
        now = next(times)
        monkeypatch.setattr("time.time", lambda now=now: now)
        ranks.set_progress(step)
        ranks.progress.updated = updated
        progress = report.build_heartbeat().progress
        assert (progress.started, progress.loaded) == (1000.0, loaded)


def test_a_program_that_reports_that_it_compiles_has_loaded_before(
    report: PodReport, ranks: FakeWorkload, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.hang_detection = HangDetection.STEPS
    times = iter((1000.0, 1010.0, 1040.0))
    for stage, step, loaded in (("Load", -1, 1000.0), ("Compile", -1, 1007.0), ("Train", 31, 1007.0)):
        now = next(times)
        monkeypatch.setattr("time.time", lambda now=now: now)
        ranks.set_progress(step)
        ranks.progress.stage, ranks.progress.stage_since, ranks.progress.updated = stage, now - 3, now
        progress = report.build_heartbeat().progress
        assert (progress.started, progress.loaded) == (1000.0, loaded)


def test_a_restart_has_its_own_times_of_start_and_load(report: PodReport, ranks: FakeWorkload) -> None:
    ranks.set_progress(5)
    first = report.build_heartbeat().progress
    assert 0 < first.started <= first.loaded
    report.record_restart(1, 1, Cause.CRASH, 1000.0)
    waiting = report.build_heartbeat().progress
    assert waiting is not None
    assert (waiting.started, waiting.loaded) == (0.0, 0.0)
    ranks.set_progress(5, attempt=1, phase="LOADING")
    loading = report.build_heartbeat().progress
    assert loading is not None
    assert loading.started >= first.loaded
    assert loading.loaded == 0.0


def test_the_newest_alert_of_each_kind_is_reported(report: PodReport, ranks: FakeWorkload) -> None:
    ranks.set_progress(3)
    assert report.build_heartbeat().progress.alerts == ()
    writer = ProgressWriter(report.progress_files[0])
    for step in (1, 2):
        writer.write_alert("LossSpike", step, "s" * 5000)
    writer.write_alert("LossAlarm", 3, "It diverges.")
    alerts = report.build_heartbeat().progress.alerts
    assert [(alert.kind, alert.step, len(alert.message)) for alert in alerts] == [
        ("LossSpike", 2, 1024),
        ("LossAlarm", 3, 12),
    ]
    writer.close()


def test_a_late_restart_of_an_old_generation_leaves_the_new_one_unchanged(report: PodReport) -> None:
    report.start_generation(2, WorkerPhase.JOINING)
    report.record_restart(1, 3, Cause.PEER_LOST, 900.0)
    report.set_phase(WorkerPhase.LOADING, generation=1, attempt=3)
    reported = report.build_heartbeat()
    assert (reported.generation, reported.attempt, reported.phase) == (2, 0, WorkerPhase.JOINING)
    assert [(restart.generation, restart.attempt) for restart in reported.restarts] == [(1, 3)], "the ledger has it"
    report.set_phase(WorkerPhase.LOADING, generation=2, attempt=1)
    assert (report.build_heartbeat().attempt, report.phase) == (1, WorkerPhase.LOADING)


def test_a_late_verdict_of_an_old_generation_is_not_one_of_the_new(report: PodReport) -> None:
    process = ended_rank(64, output="config.yaml: no such file\n")
    report.record_failure(1, process)
    report.start_generation(2, WorkerPhase.JOINING)
    report.set_verdict(process)
    reported = report.build_heartbeat()
    assert (reported.phase, reported.verdict) == (WorkerPhase.JOINING, None)
    assert [failure.exit_code for failure in reported.failures] == [64]


def test_a_new_generation_waits_for_no_peers_of_the_old_one(report: PodReport) -> None:
    report.set_phase(WorkerPhase.JOINING)
    report.set_waiting_for((0, 4))
    report.start_generation(2, WorkerPhase.JOINING)
    assert report.build_heartbeat().waiting_for == ()


def test_the_start_of_a_newer_generation_has_the_last_step_that_no_heartbeat_reported(
    report: PodReport, ranks: FakeWorkload
) -> None:
    ranks.set_progress(28)
    report.build_heartbeat()
    ranks.set_progress(35)
    report.start_generation(2, WorkerPhase.JOINING)
    ranks.set_progress(41)  # the ranks end later than the report of the newer generation begins
    report.start_generation(2, WorkerPhase.JOINING)
    report.record_generation_start(Cause.NODE_LOST)

    record = report.build_heartbeat().restarts[-1]
    assert (record.generation, record.attempt, record.step_before, record.failed_at) == (2, 0, 41, 1041.0)
    assert record.resumed_at is None


def test_a_restart_in_place_has_the_last_step_that_no_heartbeat_reported(
    report: PodReport, ranks: FakeWorkload
) -> None:
    ranks.set_progress(10)
    report.build_heartbeat()
    ranks.set_progress(17)
    report.record_restart(1, 1, Cause.CRASH, 999.0)
    assert report.build_heartbeat().restarts[0].step_before == 17


def test_a_pod_that_has_never_trained_records_no_start(report: PodReport) -> None:
    report.start_generation(2, WorkerPhase.JOINING)
    report.record_generation_start(Cause.NODE_LOST)
    assert report.build_heartbeat().restarts == ()
