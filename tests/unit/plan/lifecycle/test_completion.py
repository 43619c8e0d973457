"""The end of a job: kept pods, its TTL, and changes that do not restart it."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import NOW
from tests.unit.plan.plan_cluster import FakeCluster
from tests.unit.plan.plan_results import make_plan
from trainium_contract.job import TrainingJobStatus
from trainium_contract.rfc3339 import format_rfc3339
from trainium_contract.status.conditions import Condition, ConditionStatus, ConditionType, Phase
from trainium_contract.wire.messages import WorkerPhase
from trainium_operator.plan.model.actions import DeleteJob
from trainium_operator.plan.model.conditions import is_terminal
from trainium_operator.plan.model.observed import NodeReadiness, PodPhase


def ended_job(kind: ConditionType = ConditionType.COMPLETE, *, ago: float = 100, **job_spec: Any) -> Any:
    """Return a job that ended `ago` seconds ago: pods 0 and 1 have ended, 2 is ending, 3 is a running spare."""
    condition = Condition(
        type=kind, status=ConditionStatus.TRUE, reason="Completed", last_transition_time=format_rfc3339(NOW - ago)
    )
    phase = Phase.COMPLETED if kind is ConditionType.COMPLETE else Phase.FAILED
    observed = build.running_job(3, spares=1, job_spec=build.spec(workers={"replicas": 3, "spares": 1}, **job_spec))
    status = observed.job.status.replaced(
        conditions=(condition,),
        phase=phase,
        completion_time=format_rfc3339(NOW - ago),
        observed_generation=observed.job.generation,
    )
    pods = (
        build.finished_pod(0),
        build.finished_pod(1),
        build.pod(2),
        build.pod(3),
    )
    agents = {"uid-2": build.agent(2, WorkerPhase.FINISHED, generation=1), "uid-3": build.agent(3)}
    job = replace(observed.job, status=status, resource_version="77")
    return replace(observed, pods=pods, agents=agents, job=job)


@pytest.mark.parametrize(
    ("policy", "kind", "expected"),
    [
        ("Running", ConditionType.COMPLETE, {3}),
        ("All", ConditionType.COMPLETE, {0, 1, 3}),
        ("None", ConditionType.COMPLETE, set()),
        ("Running", ConditionType.FAILED, {2, 3}),
        ("All", ConditionType.FAILED, {0, 1, 2, 3}),
        ("None", ConditionType.FAILED, set()),
    ],
)
def test_clean_pod_policy_selects_the_deleted_pods(policy: str, kind: ConditionType, expected: set[int]) -> None:
    result = make_plan(ended_job(kind, cleanPodPolicy=policy))
    assert set(result.deleted_pods) == {f"demo-w-{ordinal}" for ordinal in expected}


def failed_job(*, codes: dict[int, int], **job_spec: Any) -> Any:
    """Return six workers, of which those in `codes` failed with a verdict and the others followed."""
    failed = {
        ordinal: build.failed_agent(ordinal, code, rank=ordinal, step=-1, message="no such file", at=NOW - 1)
        for ordinal, code in codes.items()
    }
    agents = build.agents(range(6), WorkerPhase.FAILED, generation=1) | failed
    return build.running_job(6, job_spec=build.spec(workers={"replicas": 6}, **job_spec), agents=agents)


def observe_later(observed: Any, status: TrainingJobStatus, seconds: float, **changes: Any) -> Any:
    return replace(observed, job=replace(observed.job, status=status), now=NOW + seconds, **changes)


@pytest.mark.parametrize("code", [64, 1])
def test_three_failed_pods_are_kept_for_their_logs(code: int) -> None:
    observed = failed_job(codes=dict.fromkeys((1, 2, 3, 4), code))
    first = make_plan(observed)
    assert first.status.phase is Phase.FAILED
    blamed = first.status.history[-1].pod
    kept = {f"demo-w-{ordinal}" for ordinal in range(6)} - set(first.deleted_pods)
    assert len(kept) == 3
    assert blamed in kept <= {f"demo-w-{ordinal}" for ordinal in (1, 2, 3, 4)}
    kept_pods = tuple(replace(pod, phase=PodPhase.FAILED, exit_code=code) for pod in observed.pods if pod.name in kept)
    second = make_plan(observe_later(observed, first.status, 5, pods=kept_pods))
    assert not second.deleted_pods
    assert second.requeue_after is None, "ended pods stay until the job is deleted or runs again"


def test_pods_without_a_verdict_or_that_end_late_are_deleted() -> None:
    observed = failed_job(codes={1: 64})
    first = make_plan(observed)
    assert first.requeue_after is not None
    assert set(first.deleted_pods) == {f"demo-w-{ordinal}" for ordinal in (0, 2, 3, 4, 5)}
    rest = tuple(pod for pod in observed.pods if pod.name == "demo-w-1")
    again = make_plan(observe_later(observed, first.status, 14, pods=rest))
    assert (set(again.deleted_pods), again.requeue_after is not None) == (set(), True)
    over = make_plan(observe_later(observed, first.status, 16, pods=rest))
    assert (set(over.deleted_pods), over.requeue_after) == ({"demo-w-1"}, None)


@pytest.mark.parametrize("why", ["all go", "its node is bad", "the clock was set back"])
def test_the_failed_pod_is_deleted_too_when_it_is_not_kept_for_its_logs(why: str) -> None:
    observed = failed_job(codes={1: 64}, **({"cleanPodPolicy": "All"} if why == "all go" else {}))
    if why == "its node is bad":
        nodes = dict(observed.nodes)
        nodes["node-1"] = replace(nodes["node-1"], ready=NodeReadiness.UNKNOWN, unready_since=NOW - 300)
        observed = replace(observed, nodes=nodes)
    status = make_plan(failed_job(codes={1: 64})).status
    if why == "the clock was set back":
        status = status.replaced(completion_time=format_rfc3339(NOW + 10**6))
    assert set(make_plan(observe_later(observed, status, 1)).deleted_pods) == {
        f"demo-w-{ordinal}" for ordinal in range(6)
    }


KEEP_PODS = {"cleanPodPolicy": "None"}


@pytest.mark.parametrize(
    ("ago", "fields", "is_deleted", "requeue_after"),
    [
        pytest.param(10**7, {}, False, None, id="a job without a TTL stays"),
        pytest.param(100, {"ttlSecondsAfterFinished": 100, **KEEP_PODS}, True, None, id="its time has come"),
        pytest.param(40, {"ttlSecondsAfterFinished": 100, **KEEP_PODS}, False, 60, id="before that it is requeued"),
        pytest.param(500, {"ttlSecondsAfterFinished": 60}, True, None, id="a TTL set later counts from the end"),
    ],
)
def test_an_ended_job_is_deleted_after_its_ttl(
    ago: float, fields: dict[str, Any], is_deleted: bool, requeue_after: float | None
) -> None:
    result = make_plan(ended_job(ago=ago, **fields))
    assert result.actions_of_type(DeleteJob) == ([DeleteJob("job-uid", "77")] if is_deleted else [])
    assert result.requeue_after == (None if requeue_after is None else pytest.approx(requeue_after, abs=1))


def test_a_ttl_of_zero_deletes_the_job_after_its_end_is_written() -> None:
    members = build.agents(range(2), WorkerPhase.FINISHED, generation=1)
    observed = build.running_job(
        2, job_spec=build.spec(workers={"replicas": 2}, ttlSecondsAfterFinished=0), agents=members
    )
    first = make_plan(observed)
    assert first.status.phase is Phase.COMPLETED
    assert first.actions_of_type(DeleteJob) == []
    assert first.requeue_after is not None
    second = make_plan(build.with_job(observed, status=first.status, resource_version="9"))
    assert second.actions == (DeleteJob("job-uid", "9"),)


def test_a_missing_or_future_completion_time_never_deletes_early_nor_waits_forever() -> None:
    observed = ended_job(ttlSecondsAfterFinished=100, cleanPodPolicy="None")
    for text, seconds in (("", 100), ("yesterday", 100), (format_rfc3339(NOW + 10**6), 100)):
        result = make_plan(build.with_status(observed, completion_time=text))
        assert result.actions_of_type(DeleteJob) == []
        assert result.requeue_after == pytest.approx(seconds, abs=1)


@pytest.mark.parametrize("kind", [ConditionType.COMPLETE, ConditionType.FAILED])
@pytest.mark.parametrize(
    "wish", [{"suspend": True}, {"suspend": False}, {"workers": {"replicas": 8}}, {"trainer": {"steps": 10**6}}]
)
def test_no_change_of_the_spec_restarts_an_ended_job(kind: ConditionType, wish: Any) -> None:
    observed = ended_job(kind)
    changed = replace(observed, job=replace(observed.job, spec=build.spec(**wish), generation=5), pods=())
    result = make_plan(changed)
    assert result.actions == ()
    assert is_terminal(result.status)


def test_a_change_of_a_failed_job_suggests_retry_once() -> None:
    observed = ended_job(ConditionType.FAILED, cleanPodPolicy="None")
    changed = build.with_job(observed, generation=observed.job.generation + 1)
    first = make_plan(changed)
    assert [event.reason for event in first.events] == ["SpecChanged"]
    assert "kubectl trn retry demo" in first.events[0].note
    assert first.status.observed_generation == changed.job.generation
    assert is_terminal(first.status)
    second = make_plan(build.with_status(changed, first.status))
    assert (second.events, second.status) == ((), first.status)


def test_a_failed_job_lists_fields_that_differ_from_the_failed_spec() -> None:
    failed = make_plan(failed_job(codes={0: 64}))
    record = failed.status.failed_spec
    assert record is not None
    assert record.changes == ()
    assert (failed.status.history[-1].pod, failed.status.history[-1].rank) == ("demo-w-0", 0)
    observed = failed_job(codes={0: 64})

    def find_changes(generation: int, unknown: tuple[str, ...] = (), **wish: Any) -> Any:
        job = replace(
            observed.job,
            spec=observed.job.spec.replaced(**wish),
            generation=generation,
            status=failed.status,
            unknown=unknown,
        )
        failed_spec = make_plan(replace(observed, job=job)).status.failed_spec
        assert failed_spec is not None
        return failed_spec.changes

    [change] = find_changes(7, suspend=True)
    assert (change.field, change.was, change.now) == ("suspend", "false", "true")
    assert find_changes(8) == ()
    assert find_changes(9, ("spec.newer",), suspend=True) is None, "what differs besides is not known here"


def test_a_change_of_a_completed_job_is_observed_without_effect() -> None:
    observed = ended_job(ConditionType.COMPLETE, cleanPodPolicy="None")
    changed = make_plan(build.with_job(observed, generation=observed.job.generation + 1))
    assert changed.events == ()
    assert changed.status.observed_generation == observed.job.generation + 1


def test_deleted_children_do_not_restart_an_ended_job() -> None:
    observed = ended_job()
    result = make_plan(replace(observed, pods=(), agents={}, membership=None, children={}, published=0))
    assert (result.actions, result.events, result.requeue_after) == ((), (), None)
    assert result.status == observed.job.status


def test_a_job_being_deleted_gets_no_actions() -> None:
    for moment in (
        build.running_job(4),
        build.running_job(4, pods=()),
        failed_job(codes={1: 64}),
        ended_job(),
        ended_job(ttlSecondsAfterFinished=0),
    ):
        result = make_plan(build.with_job(moment, deleting=True))
        assert result.actions == ()
        assert result.events == ()
        ended_before = is_terminal(moment.job.status)
        assert result.status.phase is (moment.job.status.phase if ended_before else Phase.TERMINATING)


def test_a_job_held_by_a_finalizer_names_it_in_its_status() -> None:
    held = replace(build.running_job(2).job, deleting=True, finalizers=("example.com/backup", "foregroundDeletion"))
    for pods, ready, left in ((build.running_job(2).pods, 2, "2 pods of it are left"), ((), 0, "")):
        status = make_plan(replace(build.running_job(2), pods=pods, job=held)).status
        assert (status.phase, status.ready_replicas) == (Phase.TERMINATING, ready)
        conditions = {condition.type: condition for condition in status.conditions}
        condition = conditions[ConditionType.RUNNING]
        assert (condition.status, condition.reason) == (ConditionStatus.FALSE, "Terminating")
        assert "finalizer example.com/backup" in condition.message
        assert "foregroundDeletion" in condition.message
        assert left in condition.message
        assert conditions[ConditionType.READY].reason == "Terminating"
        again = make_plan(replace(build.running_job(2), pods=pods, job=replace(held, status=status))).status
        assert again == status


def job_with_sidecars(codes: dict[int, int | None], **job_spec: Any) -> Any:
    """Return workers with a running sidecar, whose worker containers have ended where they have a code."""
    observed = build.running_job(len(codes), job_spec=build.spec(workers={"replicas": len(codes)}, **job_spec))
    pods = tuple(
        replace(build.finished_pod(ordinal), phase=PodPhase.RUNNING)
        if code == 0
        else build.pod(ordinal, exit_code=code, reason="" if code is None else "Error")
        for ordinal, code in codes.items()
    )
    return replace(observed, pods=pods)


@pytest.mark.parametrize("policy", ["Running", "All"])
def test_a_completed_job_frees_the_nodes_on_which_sidecars_run_on(policy: str) -> None:
    observed = job_with_sidecars({0: 0, 1: 0}, cleanPodPolicy=policy)
    result = make_plan(observed)
    assert result.status.phase is Phase.COMPLETED
    assert set(result.deleted_pods) == {"demo-w-0", "demo-w-1"}


def test_a_failed_pod_with_a_running_sidecar_is_kept() -> None:
    result = make_plan(job_with_sidecars({0: None, 1: 64, 2: 64}))
    assert result.status.phase is Phase.FAILED
    assert result.status.history[-1].pod == "demo-w-1"
    assert set(result.deleted_pods) == {"demo-w-0", "demo-w-2"}
    expected = make_plan(job_with_sidecars({0: None, 1: 64, 2: 64}, cleanPodPolicy="All"))
    assert set(expected.deleted_pods) == {"demo-w-0", "demo-w-1", "demo-w-2"}


def test_an_ended_worker_container_is_a_loss_despite_a_running_sidecar() -> None:
    result = make_plan(job_with_sidecars({0: None, 1: None, 2: 1}))
    assert [entry.pod for entry in result.status.history] == ["demo-w-2"]
    assert set(result.deleted_pods) == {"demo-w-2"}


def test_the_pod_that_exhausts_a_budget_is_kept_until_the_job_has_failed() -> None:
    members = build.agents(range(2))
    budgets = {"budgets": {"infrastructure": {"maxFailures": 0}, "process": {"maxFailures": 0}}}
    observed = build.running_job(2, job_spec=build.spec(workers={"replicas": 2}, recovery=budgets), agents=members)
    failed = build.pod(5, phase=PodPhase.FAILED, reason="CreateContainerError", node="node-5")
    observed = replace(observed, pods=(*observed.pods, failed))
    first = make_plan(observed)
    assert "demo-w-5" not in first.deleted_pods
    second = make_plan(build.with_status(observed, first.status))
    assert (second.status.phase, second.status.history[-1].pod) == (Phase.FAILED, "demo-w-5")
    assert "demo-w-5" not in second.deleted_pods


def recovering_clusters() -> list[tuple[str, Any]]:
    """Return a cluster in the middle of each kind of recovery, by name."""

    def cluster(spares: int = 0, nodes: int = 6, **workers: Any) -> FakeCluster:
        new_cluster = FakeCluster(build.spec(workers={"spares": spares, **workers}, trainer={"steps": 10**6}), nodes)
        new_cluster.run(15)
        return new_cluster

    starting = FakeCluster(build.spec(trainer={"steps": 10**6}), 6)
    starting.run(1)
    in_place = cluster()
    in_place.crash_process(1)
    with_spare = cluster(spares=1)
    with_spare.kill_pod(with_spare.members()[1].view.name)
    replacing = cluster()
    replacing.kill_pod(replacing.members()[1].view.name)
    replacing.run(1)
    shrinking = cluster(nodes=4, minReplicas=2)
    shrinking.lose_node("node-3")
    shrinking.run(60)
    resizing = cluster()
    resizing.change(replicas=3)
    suspending = cluster()
    suspending.suspend(True)
    suspending.run(1)
    return [
        ("starting", starting),
        ("in place", in_place),
        ("spare", with_spare),
        ("replace", replacing),
        ("shrink", shrinking),
        ("resize", resizing),
        ("suspend", suspending),
    ]


def test_a_spec_change_during_any_recovery_converges_to_the_latest_spec() -> None:
    for name, cluster in recovering_clusters():
        cluster.suspend(False)
        cluster.change(replicas=2, min_replicas=1, spares=0)
        cluster.run(3)
        cluster.change(replicas=3, spares=1)
        for node in list(cluster.nodes):
            cluster.clear_node(node)
        cluster.run(150)
        status = cluster.status
        assert status.phase is Phase.RUNNING, name
        assert (status.replicas, status.spares, len(cluster.pods)) == (3, 1, 4), name
        assert all(entry.recovered_seconds is not None for entry in status.history), name


def test_a_suspension_during_any_recovery_releases_all_pods_and_resumes() -> None:
    for name, cluster in recovering_clusters():
        cluster.suspend(True)
        for node in list(cluster.nodes):
            cluster.clear_node(node)
        cluster.run(12)
        assert cluster.status.phase is Phase.SUSPENDED, name
        assert cluster.pods == {}, name
        total = cluster.status.restarts.total
        cluster.suspend(False)
        cluster.run(40)
        assert cluster.status.phase is Phase.RUNNING, name
        assert cluster.status.restarts.total == total, f"{name}: a suspension is no failure"
