"""Metrics: each transition counts once, sums equal the ledgers, and the number of series is bounded."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from tests.testing.operator.metric_builders import NOW, named_job, read_samples
from tests.testing.operator.wire_messages import heartbeat
from trainium_contract.faults.causes import Cause
from trainium_contract.job import GoodputStatus, TrainingJobStatus
from trainium_contract.rfc3339 import format_rfc3339
from trainium_contract.spec.health import PreflightCheck
from trainium_contract.status.conditions import Phase
from trainium_contract.status.internal import GangStatus
from trainium_contract.status.interruptions import Interruption, RecoveryResponse
from trainium_contract.status.ledger import OVERHEAD, STARTUP, StageSeconds
from trainium_contract.status.public import CheckpointStatus, MembershipStatus
from trainium_contract.wire.messages import CheckResult, StuckRank, TrainerPhase
from trainium_operator.monitoring.metrics import Metrics
from trainium_operator.plan.fleet.memory import Machine, MachineState
from trainium_operator.plan.model.observed import NodeCondition, NodeReadiness, NodeView, Taint

MOST_SERIES = 1_500
"""Limit for one operator: about as many as one node exporter has."""


def interruption(
    cause: Cause = Cause.CRASH, response: RecoveryResponse = RecoveryResponse.IN_PLACE, **fields: Any
) -> Interruption:
    return Interruption(
        generation=1, time=format_rfc3339(NOW), cause=cause, response=response, failed_at=NOW - 5, **fields
    )


def test_a_recovery_is_counted_once_at_its_end() -> None:
    metrics = Metrics()
    open_status = TrainingJobStatus(history=(interruption(detected_seconds=1.0),))
    stages = StageSeconds(detect=1.0, restart=2.0, load=1.0, replay=0.5)
    over = TrainingJobStatus(
        history=(interruption(detected_seconds=1.0, recovered_seconds=5.0, steps_lost=2, stages=stages),)
    )
    metrics.record_plan(named_job("a"), open_status)
    for _ in range(3):  # the same plan again, also by another operator: the status is the memory
        metrics.record_plan(named_job("a", open_status), open_status)
    metrics.record_plan(named_job("a", open_status), over)
    metrics.record_plan(named_job("a", over), over)
    samples = read_samples(metrics)
    assert samples['interruptions_total{cause="Crash"}'] == 1
    assert samples['restarts_total{cause="Crash",response="InPlace"}'] == 1
    assert samples['recovery_seconds_sum{response="InPlace"}'] == 5
    assert samples['recovery_steps_sum{response="InPlace"}'] == 2
    assert samples["lost_steps_total"] == 2
    assert samples['recovery_stage_seconds_sum{stage="Restart"}'] == 2
    assert samples['recovery_stage_seconds_count{stage="Replay"}'] == 1


def test_the_lowest_goodput_and_the_sums_of_the_ledgers_are_shown() -> None:
    metrics = Metrics(lambda: NOW)
    for uid, ratio in (("a", 0.9), ("b", 0.7)):
        ledger = GoodputStatus(
            ratio=ratio,
            uptime_ratio=ratio + 0.05,
            fleet_ratio=ratio / 2,
            wall_seconds=100.0,
            productive_seconds=100 * ratio,
            lost_seconds={"Crash": 100 - 100 * ratio},
            lost_by_stage={"Load": 100 - 100 * ratio},
            node_seconds=500.0,
            stage_seconds={"Export": 30.0},
        )
        checkpoint = CheckpointStatus(durable_step=1, durable_time=format_rfc3339(NOW - 100 * ratio))
        metrics.record_plan(
            named_job(uid), TrainingJobStatus(phase=Phase.RUNNING, goodput=ledger, checkpoint=checkpoint)
        )
    samples = read_samples(metrics)
    assert samples['goodput_ratio{measure="strict"}'] == 0.7
    assert samples['goodput_ratio{measure="uptime"}'] == 0.75
    assert samples['goodput_ratio{measure="fleet"}'] == 0.35
    assert samples["wall_seconds"] == 200
    assert samples["productive_seconds"] + samples['lost_seconds{cause="Crash"}'] == pytest.approx(200)
    assert samples['lost_stage_seconds{stage="Load"}'] == pytest.approx(40)
    assert samples['stage_seconds{stage="Export"}'] == pytest.approx(60)
    assert samples["checkpoint_durable_age_seconds"] == pytest.approx(90, abs=1)
    assert samples['jobs{phase="Running"}'] == 2
    assert samples['workers{state="spare_wanted"}'] == 4
    metrics.forget("b")
    metrics.forget("a")
    samples = read_samples(metrics)
    assert (samples['jobs{phase="Running"}'], samples["wall_seconds"], samples['goodput_ratio{measure="strict"}']) == (
        0,
        0,
        1,
    )
    assert samples['lost_seconds{cause="Crash"}'] == 0


def test_sizes_pods_and_gangs_are_counted_by_their_changes() -> None:
    metrics = Metrics()
    small = TrainingJobStatus(membership=MembershipStatus(generation=1, size=2), next_pod_ordinal=2)
    large = TrainingJobStatus(
        membership=MembershipStatus(generation=2, size=4), next_pod_ordinal=5, gang=GangStatus(releases=1)
    )
    metrics.record_plan(named_job("a"), small)
    metrics.record_plan(named_job("a", small), large)
    metrics.record_plan(named_job("a", large), small)
    samples = read_samples(metrics)
    assert samples['resizes_total{direction="grow"}'] == 1
    assert samples['resizes_total{direction="shrink"}'] == 1
    assert samples["worker_pods_total"] == 5
    assert samples["gangs_released_total"] == 1


def test_the_number_of_time_series_does_not_grow_with_jobs_pods_or_nodes() -> None:
    def series(jobs: int) -> int:
        metrics = Metrics()
        for number in range(jobs):
            causes = list(itertools.product(Cause, RecoveryResponse))
            for start in range(0, len(causes), 10):
                history = tuple(
                    interruption(
                        cause,
                        response,
                        attempt=start + at,
                        pod=f"job-{number}-w-{at}",
                        node=f"node-{number}-{at}",
                        detected_seconds=1.0,
                        recovered_seconds=2.0,
                        stages=StageSeconds(),
                    )
                    for at, (cause, response) in enumerate(causes[start : start + 10])
                )
                lost = dict.fromkeys([*(cause.value for cause in Cause), STARTUP, OVERHEAD], 1.0)
                ledger = GoodputStatus(lost_seconds=lost, wall_seconds=1.0, lost_by_stage={STARTUP: 1.0})
                status = TrainingJobStatus(history=history, goodput=ledger, phase=list(Phase)[number % len(Phase)])
                metrics.record_plan(replace(named_job(str(number)), name=f"job-{number}"), status)
        for code in (0, 200, 201, 404, 409, 422, 429, 500, 503):
            for verb in ("GET", "POST", "PUT", "PATCH", "DELETE", "WATCH"):
                metrics.record_request(verb, code, 0.01)
        for error in ("Defect", "ConflictError", "UnavailableError", "ForbiddenError"):
            metrics.record_reconcile(0.1, error)
        for kind in ("register", "heartbeat", "membership", "/etc/passwd", "anything"):
            metrics.record_message(kind, 200)
        text = metrics.render().decode()
        assert not any(f'{label}="' in text for label in ("pod", "node", "rank", "job", "name", "namespace"))
        return len(read_samples(metrics))

    assert series(9) == series(18) < MOST_SERIES


def test_machines_are_counted_by_state_and_empty_states_read_zero() -> None:
    metrics = Metrics()
    bad = Machine(machine="i-1", node="a", state=MachineState.QUARANTINED, until=NOW)
    watched = Machine(machine="i-2", node="b")
    metrics.set_fleet([bad, watched, replace(watched, machine="i-3")], frozen=True)
    text = metrics.render().decode()
    assert 'trainingjob_operator_machines{state="Quarantined"} 1.0' in text
    assert 'trainingjob_operator_machines{state="Watched"} 2.0' in text
    assert "trainingjob_operator_node_actions_frozen 1.0" in text
    metrics.set_fleet([], frozen=False)
    text = metrics.render().decode()
    assert 'trainingjob_operator_machines{state="Quarantined"} 0.0' in text
    assert "trainingjob_operator_node_actions_frozen 0.0" in text


def test_preflight_checks_and_hangs_are_counted_once() -> None:
    metrics = Metrics()
    passed = CheckResult(check=PreflightCheck.MATMUL, passed=True, seconds=0.2)
    failed = CheckResult(check=PreflightCheck.DISK, passed=False, seconds=0.05, detail="full")
    still = StuckRank(rank=3, phase=TrainerPhase.SAVE, step=7, seconds=120.0)
    heartbeats = [heartbeat(), heartbeat(checks=(passed,)), heartbeat(checks=(passed, failed), stuck=(still,))]
    for before, now in itertools.pairwise([*heartbeats, heartbeats[-1]]):
        metrics.record_heartbeat_change(before, now)
    samples = read_samples(metrics)
    assert samples['preflight_seconds_count{check="Matmul"}'] == 1
    assert samples['preflight_seconds_sum{check="Disk"}'] == 0.05
    assert samples['preflight_failed_total{check="Disk"}'] == 1
    assert 'preflight_failed_total{check="Matmul"}' not in samples
    assert samples['hangs_total{phase="Save"}'] == 1
    assert samples['hangs_total{phase="Step"}'] == 0
    metrics.record_heartbeat_change(heartbeats[-1], heartbeat())
    metrics.record_heartbeat_change(heartbeat(), heartbeats[-1])
    assert read_samples(metrics)['hangs_total{phase="Save"}'] == 2, "it hangs again"


def test_node_problems_are_counted_by_source_and_reset_to_zero() -> None:
    metrics = Metrics()
    bad = NodeCondition(type="NeuronHealth", status=NodeReadiness.TRUE, reason="DeviceLost")
    leaving = Taint(key="karpenter.sh/disrupted", effect="NoSchedule")
    metrics.set_nodes(
        [NodeView(name="a", conditions=(bad,)), NodeView(name="b", taints=(leaving,)), NodeView(name="c")]
    )
    samples = {key: value for key, value in read_samples(metrics).items() if key.startswith("node_problems")}
    assert set(samples.values()) == {1.0}
    assert {key.split('source="')[1].split('"')[0] for key in samples} == {"condition", "taint"}
    metrics.set_nodes([])
    assert {value for key, value in read_samples(metrics).items() if key.startswith("node_problems")} == {0.0}
