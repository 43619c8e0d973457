"""Jobs for the operator's metrics, and the samples of what it exposes."""

from collections.abc import Iterator

from tests.testing.operator.job_views import job_spec, job_view
from trainium_contract.faults.causes import Cause
from trainium_contract.job import GoodputStatus, TrainingJobStatus
from trainium_contract.rfc3339 import format_rfc3339
from trainium_contract.status.conditions import Phase
from trainium_contract.status.interruptions import Interruption, RecoveryResponse, RestartsStatus
from trainium_contract.status.ledger import OVERHEAD, STARTUP, StageSeconds
from trainium_contract.status.public import CheckpointStatus, ProgressStatus
from trainium_operator.cluster.cache.namespaces import ListState
from trainium_operator.monitoring.metrics import Metrics
from trainium_operator.plan.fleet.memory import Machine, MachineState
from trainium_operator.plan.model.observed import JobView, NodeCondition, NodeReadiness, NodeView

NOW = 1_800_000_000.0


def named_job(uid: str, status: TrainingJobStatus | None = None) -> JobView:
    """Return the job `team/job-<uid>` with 4 workers and 2 spares."""
    spec = job_spec(workers={"spares": 2})
    return job_view(spec, status, namespace="team", name=f"job-{uid}", uid=uid, created=NOW)


def read_samples(metrics: Metrics) -> dict[str, float]:
    """Return every sample of the exposition by name and labels."""
    lines = [line for line in metrics.render().decode().splitlines() if not line.startswith("#")]
    samples = (line.rsplit(" ", 1) for line in lines)
    return {name.removeprefix("trainingjob_operator_"): float(value) for name, value in samples}


def busy_metrics() -> Metrics:
    """Return metrics of an operator with one job in each phase and every kind of event."""
    metrics = Metrics(lambda: NOW, named_jobs=20)
    for phase in Phase:
        for status in _statuses(phase):
            metrics.record_plan(named_job(phase.value), status)
    for code in (200, 401, 403):
        metrics.record_message("heartbeat", code)
    for code in (200, 401, 403, 429):
        metrics.record_read("/metrics", code)
    metrics.record_request("GET", 200, 0.01)
    metrics.set_served_namespaces({state.value: 1 for state in ListState})
    metrics.record_reconcile(0.1, "ConflictError")
    metrics.set_fleet([Machine(machine=state.value, node="a", state=state) for state in MachineState], frozen=True)
    metrics.set_nodes([NodeView(name="a", conditions=(NodeCondition(type="NeuronHealth", status=NodeReadiness.TRUE),))])
    return metrics


def _statuses(phase: Phase) -> Iterator[TrainingJobStatus]:
    seconds = dict.fromkeys([*(cause.value for cause in Cause), STARTUP, OVERHEAD], 1.0)
    ledger = GoodputStatus(wall_seconds=1.0, lost_seconds=seconds, lost_by_stage={STARTUP: 1.0})
    for response in RecoveryResponse:
        entry = Interruption(
            generation=1,
            time=format_rfc3339(NOW),
            cause=Cause.CRASH,
            response=response,
            failed_at=NOW - 5,
            detected_seconds=1.0,
            recovered_seconds=2.0,
            steps_lost=1,
            stages=StageSeconds(),
        )
        yield TrainingJobStatus(
            phase=phase,
            goodput=ledger,
            history=(entry,),
            progress=ProgressStatus(step=7, loss=4.0, tokens_per_second=9.0),
            restarts=RestartsStatus(total=1, by_cause={"Crash": 1}),
            checkpoint=CheckpointStatus(durable_step=5, durable_time=format_rfc3339(NOW)),
        )
