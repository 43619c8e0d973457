from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainium_agent.coordinator.report import PodReport
from trainium_agent.exits.diagnosis import describe_exit
from trainium_agent.ranks.output import Tail
from trainium_agent.ranks.processes import RankProcess
from trainium_contract.faults.causes import Cause
from trainium_contract.status.results import ArtifactReport, EvaluationFigure, RunStage
from trainium_contract.wire.messages import WorkerPhase
from trainium_trainer.monitor.progress import ProgressWriter
from trainium_worker import ProgressPhase

SETTINGS = SimpleNamespace(namespace="team", job="job", pod_name="job-w-0", pod_uid="uid", rules_path=None)


class Ranks:
    """The progress record of one rank, as the test sets it, of a workload that adds nothing."""

    hang_detection = None
    problem = ""
    durable_step = -1

    def __init__(self) -> None:
        self.now: SimpleNamespace | None = None

    def read(self, path: Path) -> tuple[SimpleNamespace, None] | None:
        return None if self.now is None else (self.now, None)

    def newest(self, files: list[Path]) -> tuple[SimpleNamespace, Path] | None:
        return None if self.now is None else (self.now, files[0])

    def at(
        self,
        step: int,
        *,
        attempt: int = 0,
        generation: int = 1,
        resume: int = 0,
        phase: str = "TRAINING",
        stage: RunStage = RunStage.TRAIN,
        done: float = 0.0,
    ) -> None:
        self.now = SimpleNamespace(
            generation=generation,
            attempt=attempt,
            phase=ProgressPhase[phase],
            step=step,
            resume_step=resume,
            loss=math.nan,
            tokens_per_second=math.inf,
            samples_per_second=12.5,
            reward_margin=0.25,
            reward_accuracy=math.nan,
            samples=step * 8,
            memory_step=step,
            durable_step=-1,
            updated=1000.0 + step,
            productive_seconds=1.0,
            total_steps=100,
            stage=stage,
            stage_progress=done,
            stage_since=0.0 if stage is RunStage.TRAIN else 2000.0 + attempt,
        )


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


@pytest.fixture
def report(ranks: Ranks) -> PodReport:
    made = PodReport(SETTINGS, ranks, lambda: None)
    made.enter_generation(1, WorkerPhase.JOINING)
    made.follow([Path("g1-r0")])
    made.enter(WorkerPhase.LOADING, attempt=0)
    return made


def ended(code: int, attempt: int = 0, output: bytes = b"") -> RankProcess:
    process = RankProcess(0, 3, attempt, 12345, Tail("[rank 3] "))
    process.output.feed(output)
    process.output.close()
    process.ended(code)
    return process


def test_a_pod_trains_once_its_first_rank_reports_it(report: PodReport, ranks: Ranks) -> None:
    ranks.at(0, phase="LOADING")
    assert report.heartbeat().phase is WorkerPhase.LOADING
    ranks.at(0)
    assert report.heartbeat().phase is WorkerPhase.TRAINING


def test_numbers_that_json_cannot_carry_are_left_out(report: PodReport, ranks: Ranks) -> None:
    ranks.at(3)
    progress = report.heartbeat().progress
    assert (progress.step, progress.loss, progress.tokens_per_second) == (3, None, None)
    assert progress.samples_per_second == 12.5


def test_a_restart_is_resumed_by_a_step_that_is_new(report: PodReport, ranks: Ranks) -> None:
    ranks.at(10)
    report.heartbeat()
    report.restarting(1, 1, Cause.CRASH, 999.0)
    assert report.heartbeat().restarts[0].resumed_at is None
    assert report.recovering
    report.enter(WorkerPhase.LOADING, attempt=1)
    ranks.at(9, attempt=1, resume=8)
    assert report.heartbeat().restarts[0].resumed_at is None
    assert report.heartbeat().restarts[0].resume_step == 8
    ranks.at(11, attempt=1, resume=8)
    restart = report.heartbeat().restarts[0]
    assert (restart.step_before, restart.resume_step, restart.resumed_at) == (10, 8, 1011.0)
    assert not report.recovering


def test_a_restart_after_the_last_step_is_resumed_when_the_ranks_are_past_it_again(
    report: PodReport, ranks: Ranks
) -> None:
    ranks.at(100, stage=RunStage.EXPORT, done=0.5)
    report.heartbeat()
    report.restarting(1, 1, Cause.CRASH, 1999.0)
    report.enter(WorkerPhase.LOADING, attempt=1)
    ranks.at(98, attempt=1, resume=98)
    assert report.heartbeat().restarts[0].resumed_at is None, "two steps are done again"
    ranks.at(100, attempt=1, resume=98)
    assert report.heartbeat().restarts[0].resumed_at is None, "no step is new, and the stage has not begun"
    assert report.recovering
    ranks.at(100, attempt=1, resume=98, stage=RunStage.EXPORT)
    restart = report.heartbeat().restarts[0]
    assert (restart.step_before, restart.resume_step, restart.resumed_at) == (100, 98, 2001.0)
    assert not report.recovering


def test_how_far_a_run_has_come_rises_through_its_stages_and_never_falls(report: PodReport, ranks: Ranks) -> None:
    assert report.reached == -1
    seen = []
    for step, stage, done in (
        (99, RunStage.TRAIN, 0.0),
        (100, RunStage.TRAIN, 0.0),
        (100, RunStage.EXPORT, 0.0),
        (100, RunStage.EXPORT, 0.5),
        (100, RunStage.EVALUATE, 0.0),
        (100, RunStage.EXPORT, 0.25),
        (100, RunStage.EVALUATE, 0.75),
    ):
        ranks.at(step, stage=stage, done=done)
        report.observe()
        seen.append(report.reached)
    assert seen == [99, 100, 101, 101.5, 102, 102, 102.75]
    assert report.best_step == 100


def test_stage_total_and_results_are_passed_on(ranks: Ranks, tmp_path: Path) -> None:
    report = PodReport(SETTINGS, ranks, lambda: None)
    report.enter_generation(1, WorkerPhase.TRAINING)
    report.follow([tmp_path / "g1-r0"])
    ranks.at(3)
    progress = report.heartbeat().progress
    assert (progress.total_steps, progress.stage, progress.stage_progress, progress.training) == (
        100,
        "Train",
        None,
        True,
    )
    assert (progress.artifacts, progress.evaluation) == ((), ())
    artifact = ArtifactReport(kind="Model", path="/out", step=100, bytes=7, digest="ab")
    figures = (EvaluationFigure(name="accuracy", before=0.5, after=0.75),)
    writer = ProgressWriter(tmp_path / "g1-r0")
    writer.artifact(artifact)
    writer.evaluation(figures)
    ranks.at(100, stage=RunStage.EVALUATE, done=0.5)
    progress = report.heartbeat().progress
    assert (progress.stage, progress.stage_progress, progress.stage_since) == ("Evaluate", 0.5, 2000.0)
    assert (progress.artifacts, progress.evaluation, progress.training) == ((artifact,), figures, False)
    writer.close()


def test_a_new_generation_keeps_the_step_but_not_what_belongs_to_the_old_one(report: PodReport, ranks: Ranks) -> None:
    ranks.at(10, resume=4)
    assert report.heartbeat().progress.resume_step == 4
    report.enter_generation(2, WorkerPhase.JOINING)
    progress = report.heartbeat().progress
    assert (progress.step, progress.resume_step, progress.productive_seconds) == (10, None, 0.0)


def test_a_record_of_an_earlier_attempt_is_not_progress(report: PodReport, ranks: Ranks) -> None:
    ranks.at(10)
    report.heartbeat()
    report.restarting(1, 1, Cause.CRASH, 999.0)
    report.enter(WorkerPhase.LOADING, attempt=1)
    assert report.heartbeat().phase is WorkerPhase.LOADING
    assert report.heartbeat().progress.step == 10


def test_failures_are_numbered_and_the_newest_eight_are_sent(report: PodReport) -> None:
    for _ in range(10):
        report.failed(1, ended(1))
    assert [failure.sequence for failure in report.heartbeat().failures] == list(range(2, 10))


def test_a_verdict_is_the_newest_failure_with_its_last_lines(report: PodReport) -> None:
    report.failed(1, ended(64, output=b"first\nno such file\n"))
    report.give_up()
    beat = report.heartbeat()
    assert beat.phase is WorkerPhase.FAILED
    assert (beat.verdict.exit_code, beat.verdict.rank) == (64, 3)
    assert beat.verdict.message == "no such file\nfirst"


def test_a_failure_is_held_back_until_its_last_lines_have_arrived(report: PodReport) -> None:
    process = RankProcess(0, 3, 0, 12345, Tail("[rank 3] "))
    process.ended(1)
    report.failed(1, process)
    assert not report.heartbeat().failures
    process.output.feed(b"the reason")
    process.output.close()
    assert report.heartbeat().failures[0].message.endswith("the reason")


def test_a_newer_generation_clears_the_verdict(report: PodReport) -> None:
    report.failed(1, ended(64))
    report.give_up()
    report.enter_generation(2, WorkerPhase.JOINING)
    beat = report.heartbeat()
    assert beat.verdict is None
    assert beat.failures


def test_messages_stay_within_the_bound_of_the_contract() -> None:
    text = describe_exit(ended(137, output=b"x" * 5000))
    assert len(text) <= 1024
    assert text.startswith("killed by signal 9\n")
    assert describe_exit(ended(64, output=b"no such file")) == "no such file"
    assert describe_exit(ended(66)) == "out of host or device memory"


def test_output_is_prefixed_line_by_line_and_its_end_is_kept() -> None:
    tail = Tail("[rank 3] ")
    assert tail.feed(b"one\ntw") == b"[rank 3] one\n"
    assert tail.feed(b"o\n\n") == b"[rank 3] two\n[rank 3] \n"
    assert tail.feed(b"rest") == b""
    assert tail.close() == b"[rank 3] rest\n"
    assert tail.text(100) == "one\ntwo\nrest"
    for number in range(100):
        tail.feed(f"{number}\n".encode())
    assert tail.text(1000).split("\n") == [str(number) for number in range(40, 100)]


def test_a_restart_reports_again_when_its_processes_were_up_and_had_loaded(report: PodReport, ranks: Ranks) -> None:
    ranks.at(5)
    first = report.heartbeat().progress
    assert first is not None
    assert 0 < first.started <= first.loaded
    report.restarting(1, 1, Cause.CRASH, 1000.0)
    waiting = report.heartbeat().progress
    assert waiting is not None
    assert (waiting.started, waiting.loaded) == (0.0, 0.0)
    ranks.at(5, attempt=1, phase="LOADING")
    loading = report.heartbeat().progress
    assert loading is not None
    assert loading.started >= first.loaded
    assert loading.loaded == 0.0


def test_alerts_of_the_first_rank_are_passed_on_one_of_each_kind(ranks: Ranks, tmp_path: Path) -> None:
    report = PodReport(SETTINGS, ranks, lambda: None)
    report.enter_generation(1, WorkerPhase.TRAINING)
    report.follow([tmp_path / "g1-r0"])
    ranks.at(3)
    assert report.heartbeat().progress.alerts == ()
    writer = ProgressWriter(tmp_path / "g1-r0")
    for step in (1, 2):
        writer.alert("LossSpike", step, "s" * 5000)
    writer.alert("LossAlarm", 3, "It diverges.")
    found = report.heartbeat().progress.alerts
    assert [(alert.kind, alert.step, len(alert.message)) for alert in found] == [
        ("LossSpike", 2, 1024),
        ("LossAlarm", 3, 12),
    ]
    writer.close()


def test_a_restart_of_a_generation_that_is_over_reports_nothing_of_the_next_one(report: PodReport) -> None:
    report.enter_generation(2, WorkerPhase.JOINING)
    report.restarting(1, 3, Cause.PEER_LOST, 900.0)
    report.enter(WorkerPhase.LOADING, generation=1, attempt=3)
    reported = report.heartbeat()
    assert (reported.generation, reported.attempt, reported.phase) == (2, 0, WorkerPhase.JOINING)
    assert [(each.generation, each.attempt) for each in reported.restarts] == [(1, 3)], "the ledger has it all the same"
    report.enter(WorkerPhase.LOADING, generation=2, attempt=1)
    assert (report.heartbeat().attempt, report.phase) == (1, WorkerPhase.LOADING)


def test_a_verdict_of_a_generation_that_is_over_is_none_of_the_one_that_has_come(report: PodReport) -> None:
    process = ended(64, output=b"config.yaml: no such file\n")
    report.failed(1, process)
    report.enter_generation(2, WorkerPhase.JOINING)
    report.give_up(process)
    reported = report.heartbeat()
    assert (reported.phase, reported.verdict) == (WorkerPhase.JOINING, None)
    assert [each.exit_code for each in reported.failures] == [64]


def test_whom_an_old_generation_lacked_the_new_one_need_not_lack(report: PodReport) -> None:
    report.enter(WorkerPhase.JOINING)
    report.wait_for((0, 4))
    report.enter_generation(2, WorkerPhase.JOINING)
    assert report.heartbeat().waiting_for == ()
