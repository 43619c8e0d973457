"""Stages after the last step: artifacts and evaluation are reported, timed, and recovered like training."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.testing.suite.trials import trials
from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import NOW
from tests.unit.plan.plan_cluster import FakeCluster
from tests.unit.plan.plan_results import check_ledger, get_condition, make_plan, with_written_status
from trainium_contract.faults.causes import Cause
from trainium_contract.rfc3339 import format_rfc3339
from trainium_contract.status.conditions import Condition, ConditionStatus, ConditionType, Phase
from trainium_contract.status.interruptions import Interruption, RecoveryResponse
from trainium_contract.status.ledger import OVERHEAD, STARTUP
from trainium_contract.status.results import MAX_ARTIFACTS, ArtifactReport, EvaluationFigure
from trainium_contract.wire.messages import Progress, WorkerPhase
from trainium_operator.plan.model.conditions import find_condition
from trainium_operator.plan.model.observed import Observed

STEPS = 40
"""Twenty seconds."""


def cluster_with_stages(export: float = 60, **workers: Any) -> FakeCluster:
    cluster = FakeCluster(
        build.spec(workers={"replicas": 3, "spares": 1, "minReplicas": 2, **workers}, trainer={"steps": STEPS}), nodes=6
    )
    cluster.stages = (("Export", export), ("Evaluate", 40))
    return cluster


def run_until_stage(cluster: FakeCluster, stage: str) -> None:
    for _ in range(300):
        cluster.run(1)
        if cluster.status.stage == stage:
            return
    pytest.fail(f"{stage} never came: {cluster.status.stage}, {cluster.status.phase}")


def run_until_end(cluster: FakeCluster) -> None:
    for _ in range(1000):
        if cluster.status.phase is Phase.COMPLETED:
            return
        cluster.run(1)
    pytest.fail(f"it never ended: {cluster.status.stage}, {cluster.status.phase}")


def test_each_stage_shows_and_its_seconds_are_kept_apart_from_training() -> None:
    cluster = cluster_with_stages()
    run_until_stage(cluster, "Export")
    export_since = cluster.now
    assert cluster.status.progress.step == STEPS
    message = get_condition(cluster.status, ConditionType.RUNNING)
    assert message.message == "writing artifacts on 3 nodes"
    trained = cluster.status.goodput.wall_seconds
    cluster.run(40)
    assert cluster.status.stage_progress == pytest.approx(0.5, abs=0.3)
    assert (cluster.status.phase, cluster.status.history) == (Phase.RUNNING, ())
    run_until_stage(cluster, "Evaluate")
    assert [artifact.path for artifact in cluster.status.artifacts] == ["/out"]
    run_until_end(cluster)
    goodput = cluster.status.goodput
    assert sum(goodput.stage_seconds.values()) == pytest.approx(cluster.now - export_since, abs=3)
    assert goodput.stage_seconds["Export"] == pytest.approx(60, abs=3)
    assert goodput.stage_seconds["Evaluate"] == pytest.approx(40, abs=3)
    assert goodput.wall_seconds == pytest.approx(trained, abs=3)
    assert set(goodput.lost_seconds) <= {STARTUP, OVERHEAD}
    assert goodput.lost_seconds.get(OVERHEAD, 0.0) < 3
    check_ledger(goodput)


@pytest.mark.parametrize("stage", ["Export", "Evaluate"])
def test_a_crash_in_a_stage_recovers_when_the_stage_continues(stage: str) -> None:
    cluster = cluster_with_stages()
    run_until_stage(cluster, stage)
    cluster.run(20)
    assert cluster.crash_process(1)
    cluster.run(2)
    assert cluster.status.phase is Phase.RECOVERING
    cluster.run(10)
    (entry,) = cluster.status.history
    assert (entry.cause, entry.response, entry.steps_lost) == (Cause.CRASH, RecoveryResponse.IN_PLACE, 0)
    assert entry.recovered_seconds is not None
    assert entry.recovered_seconds <= 6
    assert (cluster.status.phase, cluster.status.stage) == (Phase.RUNNING, stage)
    run_until_end(cluster)
    goodput = cluster.status.goodput
    assert entry.stages is not None
    assert goodput.lost_seconds["Crash"] == pytest.approx(entry.recovered_seconds, abs=0.01)
    assert goodput.stage_seconds[stage] == pytest.approx(20 + dict(cluster.stages)[stage], abs=4)
    assert goodput.lost_seconds.get(OVERHEAD, 0.0) < 4
    check_ledger(goodput)


def test_a_node_that_is_lost_in_a_stage_is_replaced_and_the_stage_goes_on() -> None:
    cluster = cluster_with_stages()
    run_until_stage(cluster, "Export")
    cluster.run(20)
    lost = cluster.node_of_rank(1)
    cluster.lose_node(lost)
    cluster.run(90)
    (entry,) = cluster.status.history
    assert (entry.cause, entry.response, entry.node) == (Cause.NODE_LOST, RecoveryResponse.SPARE, lost)
    assert entry.recovered_seconds is not None
    assert entry.failed_at is not None
    assert entry.recovered_seconds < 90, "it is dated to its last heartbeat, not to the last step"
    run_until_end(cluster)
    check_ledger(cluster.status.goodput)


def test_a_loss_in_a_stage_during_an_operator_outage_is_not_dated_to_the_last_step() -> None:
    cluster = cluster_with_stages(export=300)
    run_until_stage(cluster, "Export")
    cluster.run(100)
    failed = cluster.now
    cluster.lose_node(cluster.node_of_rank(1))
    cluster.crash_operator(5)
    cluster.run(90)
    (entry,) = cluster.status.history
    assert entry.failed_at is not None
    assert entry.failed_at >= failed


def test_a_job_that_is_suspended_in_a_stage_goes_on_with_it() -> None:
    cluster = cluster_with_stages()
    run_until_stage(cluster, "Export")
    cluster.run(10)
    cluster.suspend(value=True)
    cluster.run(60)
    assert cluster.status.phase is Phase.SUSPENDED
    cluster.suspend(value=False)
    run_until_stage(cluster, "Evaluate")
    assert cluster.status.phase is Phase.RUNNING
    assert not cluster.status.goodput.starting
    run_until_end(cluster)
    check_ledger(cluster.status.goodput)
    assert cluster.status.goodput.stage_seconds["Export"] == pytest.approx(70, abs=5)


def test_a_silent_member_in_a_stage_is_not_lost() -> None:
    cluster = cluster_with_stages(export=200)
    run_until_stage(cluster, "Export")
    cluster.run(20)
    cluster.nodes[cluster.node_of_rank(1)].partitioned = True
    cluster.run(60)
    assert cluster.status.history == (), "no step shows that the others continue without it"
    cluster.nodes[cluster.node_of_rank(1)].partitioned = False
    run_until_end(cluster)
    assert cluster.status.history == ()


@given(
    st.lists(
        st.tuples(st.sampled_from(("crash", "pod", "node", "operator", "resize", "mute", "quiet")), st.integers(1, 40)),
        max_size=6,
    )
)
@settings(max_examples=trials(10))
def test_after_any_faults_in_stages_the_job_ends_and_the_ledger_adds_up(faults: list[tuple[str, int]]) -> None:
    cluster = cluster_with_stages()
    run_until_stage(cluster, "Export")
    for fault, seconds in faults:
        members = cluster.members()
        match fault:
            case "crash":
                cluster.crash_process(seconds)
            case "pod" if members:
                cluster.kill_pod(members[seconds % len(members)].view.name)
            case "node":
                cluster.lose_node(f"node-{seconds % 5}")
            case "operator":
                cluster.crash_operator(seconds)
            case "resize":
                cluster.change(replicas=(2, 3, 4)[seconds % 3])
            case "mute":
                node = cluster.nodes[f"node-{seconds % 5}"]
                node.partitioned = not node.partitioned
        before = cluster.status.goodput
        cluster.run(seconds)
        check_ledger(cluster.status.goodput)
        assert cluster.status.goodput.wall_seconds >= before.wall_seconds
        if cluster.status.phase is Phase.COMPLETED:
            break
    for name, node in cluster.nodes.items():
        node.partitioned = False
        cluster.restore_node(name)
    run_until_end(cluster)
    assert all(entry.recovered_seconds is not None for entry in cluster.status.history)


MODEL = ArtifactReport(kind="Model", path="/checkpoints/artifacts/model", step=100, bytes=13_476_839_424, digest="ab")
FIGURES = (
    EvaluationFigure(name="perplexity", before=12.345, after=5.1),
    EvaluationFigure(name="rougeL", after=0.375),
    EvaluationFigure(name="accuracy", before=0.5),
)


def with_progress(observed: Observed, *, now: float = NOW + 60, **fields: Any) -> Observed:
    """Return the observation later, with the progress of the first rank."""
    progress = Progress(**{"step": 100, "durable_step": 100, "updated": NOW, **fields})
    beats = {
        uid: replace(agent, last_seen=now - 0.5, heartbeat=agent.heartbeat.model_copy(update={"progress": progress}))
        if agent.heartbeat is not None and (uid == "uid-0" or "stage" in fields)
        else replace(agent, last_seen=now - 0.5)
        for uid, agent in observed.agents.items()
    }
    return replace(observed, now=now, agents=beats)


def test_an_artifact_is_reported_once_and_the_newest_stay_in_the_status() -> None:
    observed = with_progress(with_written_status(build.running_job(4)), artifacts=(MODEL,))
    result = make_plan(observed)
    assert result.event_notes("ArtifactWritten") == [
        "Model of step 100 is complete: /checkpoints/artifacts/model (13,476,839,424 bytes)."
    ]
    assert result.status.artifacts == (MODEL,)
    again = MODEL.model_copy(update={"digest": "cd"})
    later = make_plan(with_progress(with_written_status(observed), now=NOW + 120, artifacts=(again,)))
    assert later.event_notes("ArtifactWritten") == []
    assert later.status.artifacts == (again,), "written again after a fault"
    silent = make_plan(with_progress(with_written_status(observed), now=NOW + 120))
    assert silent.status.artifacts == (MODEL,), "another rank reports none"
    many = tuple(MODEL.model_copy(update={"step": step}) for step in range(200, 200 + MAX_ARTIFACTS))
    newest = make_plan(with_progress(with_written_status(observed), now=NOW + 120, artifacts=many))
    assert [artifact.step for artifact in newest.status.artifacts] == list(range(200, 200 + MAX_ARTIFACTS))


def test_an_evaluation_is_reported_once_with_the_figures_before() -> None:
    observed = with_progress(with_written_status(build.running_job(4)), evaluation=FIGURES, stage="Evaluate")
    result = make_plan(observed)
    assert result.event_notes("Evaluated") == [
        "The result was measured: perplexity 12.35 -> 5.1, rougeL 0.375, accuracy 0.5 -> none."
    ]
    assert result.status.evaluation == FIGURES
    assert (
        make_plan(with_progress(with_written_status(observed), now=NOW + 120, evaluation=FIGURES)).event_notes(
            "Evaluated"
        )
        == []
    )


def test_a_stage_is_written_at_once_and_its_progress_like_that_of_steps() -> None:
    observed = with_written_status(
        with_progress(build.running_job(4), stage="Export", stage_progress=0.1, stage_since=NOW + 50)
    )
    assert (observed.job.status.stage, observed.job.status.stage_progress) == ("Export", 0.1)
    moved = with_progress(observed, now=NOW + 62, stage="Export", stage_progress=0.4, stage_since=NOW + 50)
    result = make_plan(moved)
    assert result.status == observed.job.status, "not yet"
    assert result.requeue_after is not None
    assert make_plan(replace(moved, now=NOW + 90)).status.stage_progress == 0.4
    other = make_plan(with_progress(observed, now=NOW + 62, stage="Evaluate", stage_progress=0.0, stage_since=NOW + 61))
    assert other.status.stage == "Evaluate"


def test_a_stage_of_a_newer_trainer_shows_and_is_no_step() -> None:
    observed = with_written_status(
        with_progress(build.running_job(4), stage="Distil", stage_progress=7.0, stage_since=NOW + 50)
    )
    assert (observed.job.status.stage, observed.job.status.stage_progress) == ("Distil", 1.0)
    assert make_plan(with_progress(observed, now=NOW + 100, stage="Distil")).status.goodput.stage_seconds["Distil"] > 30


@pytest.mark.parametrize(
    ("trainer", "reported", "total"),
    [
        ({"steps": 100}, 0, 100),
        ({"steps": 100}, 77, 100),
        ({"epochs": 3}, 0, 0),
        ({"epochs": 3}, 375, 375),
        ({"steps": 100, "batch": {"tolerance": 0.1}}, 0, 100),
        ({"steps": 100, "batch": {"tolerance": 0.1}}, 103, 103),
    ],
)
def test_the_trainer_reports_total_steps_of_epochs_and_samples(
    trainer: dict[str, Any], reported: int, total: int
) -> None:
    observed = with_written_status(
        with_progress(build.running_job(4, job_spec=build.spec(trainer=trainer)), step=20, total_steps=reported)
    )
    assert observed.job.status.progress.total_steps == total
    later = make_plan(with_progress(observed, now=NOW + 120, step=21))
    assert later.status.progress.total_steps == total, "an attempt that has not read its data yet takes nothing back"


def test_the_total_of_a_program_stays_known_until_a_restarted_rank_reports_it_again() -> None:
    running = build.running_job(4, job_spec=build.program_spec())
    observed = with_written_status(with_progress(running, step=20, total_steps=40))
    later = make_plan(with_progress(observed, now=NOW + 120, step=21))
    assert (later.status.progress.step, later.status.progress.total_steps) == (21, 40)


def test_the_end_names_the_steps_that_were_made() -> None:
    observed = with_progress(
        build.running_job(2, job_spec=build.spec(workers={"replicas": 2}, trainer={"epochs": 3})),
        step=375,
        total_steps=375,
    )
    observed = build.with_heartbeats(observed, phase=WorkerPhase.FINISHED)
    complete = make_plan(observed).condition(ConditionType.COMPLETE)
    assert complete.message == "all 375 steps are done"


def test_no_save_is_overdue_after_the_last_step() -> None:
    job_spec = build.spec(
        checkpoint={"storage": {"hostPath": {"path": "/data"}}, "durable": {"everySeconds": 60}},
        recovery={"disruption": {"maxDurableAgeSeconds": 600}},
    )
    trained = Condition(
        type=ConditionType.RUNNING,
        status=ConditionStatus.TRUE,
        reason="Training",
        last_transition_time=format_rfc3339(NOW - 5000),
    )
    fields = {"start_time": format_rfc3339(NOW - 5000), "conditions": (trained,)}
    old = {"durable_step": 100, "durable_time": format_rfc3339(NOW - 4000)}
    observed = build.running_job(4, job_spec=job_spec, status={**fields, "checkpoint": old})

    def state(observed: Observed, kind: ConditionType) -> ConditionStatus | None:
        condition = find_condition(make_plan(observed).status, kind)
        return None if condition is None else condition.status

    for stage, fine in (("Train", ConditionStatus.FALSE), ("Export", ConditionStatus.TRUE)):
        reported = with_progress(observed, stage=stage)
        assert state(reported, ConditionType.CHECKPOINT_HEALTHY) is fine
        assert state(reported, ConditionType.DISRUPTION_ALLOWED) is fine


def open_interruption(response: RecoveryResponse, *, ago: float, step_before: int, generation: int = 1) -> Interruption:
    return Interruption(
        generation=generation,
        time=format_rfc3339(NOW - ago),
        cause=Cause.NODE_LOST,
        response=response,
        failed_at=NOW - ago,
        detected_seconds=0.0,
        step_before=step_before,
    )


def test_a_returning_member_in_a_stage_closes_the_interruption() -> None:
    entry = open_interruption(RecoveryResponse.REPLACE, ago=5, step_before=100)
    observed = build.with_status(
        with_progress(build.running_job(4), now=NOW, stage="Export", stage_since=NOW - 100), history=(entry,)
    )
    assert make_plan(observed).status.history[0].recovered_seconds == 5.0


def test_a_member_that_reports_again_in_training_is_recovered_with_the_next_step() -> None:
    entry = open_interruption(RecoveryResponse.REPLACE, ago=5, step_before=20)
    for step, recovered_seconds in ((20, None), (21, 5.0)):
        observed = build.running_job(4, agents=build.training_agents(range(4), step=step), status={"history": (entry,)})
        assert make_plan(observed).status.history[0].recovered_seconds == recovered_seconds


def test_another_generation_in_a_stage_ends_the_interruption_without_a_step() -> None:
    entry = open_interruption(RecoveryResponse.SPARE, ago=30, generation=0, step_before=100)

    def plan_recovery(**fields: Any) -> float | None:
        progress = Progress(step=100, resume_step=100, updated=NOW - 300, **fields)
        agents = build.training_agents(range(4), progress=progress)
        observed = build.running_job(4, agents=agents, status={"history": (entry,)})
        return make_plan(observed).status.history[0].recovered_seconds

    assert plan_recovery() is None
    assert plan_recovery(stage="Export", stage_since=NOW - 10) == 20.0
