"""Metrics of single jobs: bounded in number, equal to the statuses, removed with the job."""

from typing import Any

from tests.testing.operator.metric_builders import NOW, named_job, read_samples
from trainium_contract.job import GoodputStatus, TrainingJobStatus
from trainium_contract.rfc3339 import format_rfc3339
from trainium_contract.status.conditions import Condition, ConditionStatus, ConditionType, Phase
from trainium_contract.status.interruptions import RestartsStatus
from trainium_contract.status.public import CheckpointStatus, ProgressStatus, RoleStatus
from trainium_contract.status.results import EvaluationFigure, MilestoneEvaluation
from trainium_operator.monitoring.metrics import Metrics


def status(**fields: Any) -> TrainingJobStatus:
    ledger = GoodputStatus(wall_seconds=100.0, productive_seconds=90.0, ratio=0.9, lost_seconds={"Crash": 10.0})
    fields_by_default = {
        "phase": Phase.RUNNING,
        "goodput": ledger,
        "progress": ProgressStatus(step=70, loss=4.25, tokens_per_second=1000.0, samples_per_second=2.5),
        "restarts": RestartsStatus(total=3, by_cause={"Crash": 2, "made up": 1}),
        "checkpoint": CheckpointStatus(durable_step=60, durable_time=format_rfc3339(NOW - 30)),
        "roles": (RoleStatus(name="rollout", replicas=4, ready_replicas=1, min_ready=2, restarts=3),),
        "evaluations": (
            MilestoneEvaluation(step=20, path="/m/20", figures=(EvaluationFigure(name="mmlu acc", after=0.25),)),
            MilestoneEvaluation(step=40, path="/m/40", figures=(EvaluationFigure(name="mmlu acc", after=0.3125),)),
            MilestoneEvaluation(step=60, path="/m/60"),
        ),
    }
    return TrainingJobStatus(**fields_by_default | fields)


def read_named_samples(metrics: Metrics) -> dict[str, float]:
    return {key: value for key, value in read_samples(metrics).items() if "job_name=" in key}


def test_no_job_has_named_metrics_by_default() -> None:
    metrics = Metrics()
    metrics.record_plan(named_job("a"), status())
    assert not read_named_samples(metrics)
    assert "jobs_left_out" not in read_samples(metrics)


def test_the_metrics_of_a_job_equal_its_status() -> None:
    metrics = Metrics(lambda: NOW, named_jobs=5)
    metrics.record_plan(named_job("a"), status())
    name = 'job_name="job-a",job_namespace="team"'
    samples = read_named_samples(metrics)
    assert samples[f'job_phase{{{name},phase="Running"}}'] == 1
    assert samples[f"job_step{{{name}}}"] == 70
    assert samples[f"job_loss{{{name}}}"] == 4.25
    assert samples[f"job_tokens_per_second{{{name}}}"] == 1000
    assert samples[f"job_samples_per_second{{{name}}}"] == 2.5
    assert samples[f'job_goodput_ratio{{{name},measure="strict"}}'] == 0.9
    assert samples[f'job_lost_seconds{{cause="Crash",{name}}}'] == 10
    assert samples[f'job_interruptions_total{{cause="Crash",{name}}}'] == 2
    assert samples[f"job_checkpoint_durable_age_seconds{{{name}}}"] == 30
    assert samples[f"job_stalled{{{name}}}"] == 0
    assert samples[f"job_checkpoint_healthy{{{name}}}"] == 1
    assert samples[f'job_workers{{{name},state="spare_wanted"}}'] == 2
    assert samples[f'job_evaluation{{figure="mmlu acc",{name}}}'] == 0.3125
    assert samples[f'job_role_pods{{{name},role="rollout",state="ready"}}'] == 1
    assert samples[f'job_role_restarts_total{{{name},role="rollout"}}'] == 3
    assert not [key for key in samples if "made up" in key], "only causes that we know become series"


def test_stalled_and_checkpoint_conditions_are_exported() -> None:
    values = (
        (ConditionType.STALLED, ConditionStatus.TRUE, "NameTaken"),
        (ConditionType.CHECKPOINT_HEALTHY, ConditionStatus.FALSE, "StorageUnavailable"),
    )
    conditions = tuple(
        Condition(type=kind, status=value, reason=reason, last_transition_time=format_rfc3339(NOW))
        for kind, value, reason in values
    )
    metrics = Metrics(named_jobs=5)
    metrics.record_plan(named_job("a"), status(conditions=conditions))
    name = 'job_name="job-a",job_namespace="team"'
    assert read_named_samples(metrics)[f"job_stalled{{{name}}}"] == 1
    assert read_named_samples(metrics)[f"job_checkpoint_healthy{{{name}}}"] == 0


def test_named_series_are_limited_and_prefer_running_jobs() -> None:
    metrics = Metrics(named_jobs=2)
    for number in range(40):
        phase = Phase.RUNNING if number in (7, 31) else Phase.COMPLETED
        metrics.record_plan(named_job(f"{number:02}"), status(phase=phase))
    shown = {key.split('job_name="')[1].split('"')[0] for key in read_named_samples(metrics)}
    assert shown == {"job-07", "job-31"}
    assert read_samples(metrics)["jobs_left_out"] == 38
    assert len(read_named_samples(metrics)) <= 2 * 25


def test_a_deleted_job_leaves_no_series() -> None:
    metrics = Metrics(named_jobs=2)
    metrics.record_plan(named_job("a"), status())
    metrics.forget("a")
    assert not read_named_samples(metrics)
