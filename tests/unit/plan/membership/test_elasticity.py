"""Spares, shrinking and growing in the fake cluster, without flapping."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import NOW, SETTINGS
from tests.unit.plan.plan_cluster import FakeCluster, start_cluster
from tests.unit.plan.plan_results import get_condition, make_plan
from trainium_contract.faults.causes import Cause
from trainium_contract.status.conditions import ConditionType, Phase
from trainium_contract.status.internal import FailureRecord
from trainium_contract.status.interruptions import RecoveryResponse
from trainium_operator.plan.model.conditions import is_true

RESCALE_AFTER_SECONDS = 30


def start_job(
    *,
    nodes: int = 6,
    spares: int = 0,
    replicas: int = 4,
    sizes: str = "Any",
    batch: int = 24,
    tolerance: float = 0.0,
    **workers: Any,
) -> FakeCluster:
    job_spec = build.spec(
        workers={"replicas": replicas, "spares": spares, **workers},
        recovery={"rescaleAfterSeconds": RESCALE_AFTER_SECONDS},
        trainer={"steps": 10**7, "batch": {"globalSize": batch, "tolerance": tolerance}},
        elasticity={"sizes": sizes},
    )
    return start_cluster(job_spec, nodes)


def generation(cluster: FakeCluster) -> int:
    assert cluster.membership is not None
    return cluster.membership.generation


# --- spares


def test_a_spare_is_refilled_in_the_background_while_the_others_train() -> None:
    cluster = start_job(spares=1)
    cluster.kill_pod(cluster.member_names()[1])
    while generation(cluster) == 1 or cluster.status.ready_replicas < 4:
        cluster.run(1)
    after, step = generation(cluster), cluster.best_step
    cluster.run(10)
    assert cluster.best_step == step + 20, "no step was missed while the new spare was made"
    assert (generation(cluster), cluster.status.spares) == (after, 1)


def test_a_spare_that_dies_on_its_activation_is_replaced_by_the_next_one() -> None:
    cluster = start_job(spares=2)
    first, second = sorted(set(cluster.pods) - set(cluster.member_names()))
    cluster.kill_pod(cluster.member_names()[1])
    cluster.reconcile()
    assert cluster.member_names()[1] == first
    cluster.kill_pod(first)
    cluster.dirty = True
    cluster.run(10)
    assert cluster.member_names()[1] == second
    assert cluster.status.phase is Phase.RUNNING
    assert generation(cluster) == 3
    assert all(entry.recovered_seconds is not None for entry in cluster.status.history)


def test_an_elastic_job_shrinks_when_its_only_spare_is_lost_too() -> None:
    cluster = start_job(nodes=5, spares=1, minReplicas=2)
    (spare,) = set(cluster.pods) - set(cluster.member_names())
    lost, other = cluster.node_of_rank(1), cluster.pods[spare].view.node
    cluster.lose_node(lost)
    cluster.run(6)
    assert spare in cluster.member_names()
    cluster.lose_node(other)
    cluster.run(60)
    assert cluster.size == 3
    assert cluster.status.phase is Phase.RUNNING
    assert cluster.responses()[-1] is RecoveryResponse.SHRINK


def test_a_failure_in_the_middle_of_a_recovery_restarts_the_recovery_once() -> None:
    cluster = start_job(spares=2)
    cluster.kill_pod(cluster.member_names()[1])
    cluster.reconcile()
    cluster.kill_pod(cluster.member_names()[2])
    cluster.dirty = True
    cluster.run(12)
    assert cluster.status.phase is Phase.RUNNING
    assert generation(cluster) == 3
    assert cluster.status.restarts.total == 2
    assert len(cluster.status.history) == 2


def test_a_spare_on_a_suspected_node_is_used_last() -> None:
    observed = build.running_job(4, spares=2, status={"avoided_nodes": ("node-4",)})
    record = FailureRecord(at=NOW - 60, cause=Cause.DEVICE, node="node-4", pod="demo-w-9")
    failures = (*observed.job.status.failures, record)
    observed = build.with_status(observed, failures=failures)
    lost = build.without_pods(observed, 1, keep_agents=True)
    result = make_plan(replace(lost, agents={uid: a for uid, a in lost.agents.items() if uid != "uid-1"}))
    publication = next(action for action in result.actions if hasattr(action, "membership"))
    assert [member.pod_name for member in publication.membership.members][1] == "demo-w-5"


# --- shrinking and growing


def test_an_even_sizes_job_shrinks_to_an_even_size() -> None:
    cluster = start_job(nodes=6, replicas=6, minReplicas=2, sizes="Even")
    cluster.lose_node("node-5")
    cluster.run(RESCALE_AFTER_SECONDS + 20)
    assert cluster.size == 4, "24 samples do not go into 5 equal parts"
    shape = cluster.spec.batch_shape()
    for nodes in (6, 4, 2):
        samples = shape.data_parallel(nodes) * shape.micro_batches(nodes) * shape.micro_batch_size
        assert samples == shape.global_batch_size
    assert cluster.status.membership.data_parallel == 4


@pytest.mark.parametrize(
    ("nodes", "batch", "tolerance", "expected"),
    [
        pytest.param(
            4,
            8,
            0.0,
            [((4, 2, 1.0, 0), 8), ((3, 3, 0.667, 0), 8), ((2, 4, 0.5, 0), 8), ((4, 2, 1.0, 0), 8)],
            id="uneven sizes keep the batch",
        ),
        pytest.param(
            8,
            16,
            0.125,
            [
                ((8, 2, 1.0, 0), 16),
                ((7, 2, 0.875, 0), 14),
                ((6, 3, 0.75, 0), 18),
                ((5, 3, 0.625, 0), 15),
                ((8, 2, 1.0, 0), 16),
            ],
            id="with a tolerance a near batch comes out even",
        ),
    ],
)
def test_a_job_without_a_spare_continues_at_each_smaller_size_and_grows_back(
    nodes: int, batch: int, tolerance: float, expected: list[Any]
) -> None:
    cluster = start_job(nodes=nodes, replicas=nodes, minReplicas=2, batch=batch, tolerance=tolerance)
    reported = [(size_figures(cluster), cluster.status.membership.batch)]
    lost = [f"node-{nodes - number}" for number in range(1, len(expected) - 1)]
    for node in lost:
        cluster.lose_node(node)
        cluster.run(RESCALE_AFTER_SECONDS + 30)
        reported.append((size_figures(cluster), cluster.status.membership.batch))
        assert cluster.status.phase is Phase.RUNNING
    for node in lost:
        cluster.restore_node(node)
    cluster.run(6 * RESCALE_AFTER_SECONDS)
    reported.append((size_figures(cluster), cluster.status.membership.batch))
    assert reported == expected
    responses = cluster.responses()
    assert responses[: len(lost)] == [RecoveryResponse.SHRINK] * len(lost)
    assert set(responses[len(lost) :]) == {RecoveryResponse.GROW}


def size_figures(cluster: FakeCluster) -> tuple[int, int, float, int]:
    membership = cluster.status.membership
    return membership.size, membership.passes, membership.speed, membership.reserve


def test_nodes_in_reserve_replace_the_next_loss_at_once() -> None:
    cluster = start_job(nodes=8, replicas=8, minReplicas=2, batch=8)
    assert size_figures(cluster) == (8, 1, 1.0, 0)
    cluster.lose_node("node-7")
    cluster.run(RESCALE_AFTER_SECONDS + 30)
    assert size_figures(cluster) == (4, 2, 0.5, 3), "7, 6 and 5 nodes make two passes as well"
    assert len(cluster.pods) >= 7
    before = cluster.status.membership.generation
    cluster.lose_node(cluster.node_of_rank(1))
    cluster.run(RESCALE_AFTER_SECONDS - 10)
    assert cluster.status.membership.generation == before + 1
    assert size_figures(cluster) == (4, 2, 0.5, 2)
    assert cluster.responses()[-1] is RecoveryResponse.SPARE
    generation_before = generation(cluster)
    cluster.run(6 * RESCALE_AFTER_SECONDS)
    assert generation(cluster) == generation_before, "what would save no pass does not change the membership"


def test_nodes_that_save_no_pass_are_in_reserve() -> None:
    cluster = start_job(nodes=8, replicas=7, spares=1, batch=8)
    assert size_figures(cluster) == (4, 2, 1.0, 3)
    assert (len(cluster.pods), cluster.status.spares) == (8, 4)
    cluster.change(replicas=8)
    cluster.run(20)
    assert size_figures(cluster)[:3] == (8, 1, 1.0)


def test_intermittent_capacity_does_not_flap_the_job() -> None:
    cluster = start_job(nodes=4, minReplicas=2)
    before = generation(cluster)
    for _ in range(30):  # an hour in which a node is there for a minute and gone for a minute
        cluster.lose_node("node-3")
        cluster.run(60, tick=2.0)
        cluster.restore_node("node-3")
        cluster.run(60, tick=2.0)
    assert generation(cluster) - before <= 24, "without a rest it would be sixty"
    cluster.run(9 * RESCALE_AFTER_SECONDS)
    assert cluster.size == 4


def test_a_requested_size_is_clamped_to_the_bounds() -> None:
    cluster = start_job(minReplicas=2, maxReplicas=4)
    cluster.change(replicas=6)
    cluster.run(20)
    assert cluster.size == 4
    legal = get_condition(cluster.status, ConditionType.SIZE_LEGAL)
    assert "maxReplicas" in legal.message
    assert not is_true(cluster.status, ConditionType.RESIZING)


# --- templates


def template_changed(cluster: FakeCluster) -> None:
    cluster.change(template={"spec": {"priority": 7}})


def test_a_changed_template_only_counts_outdated_pods() -> None:
    cluster = start_job(spares=1)
    pods, before = set(cluster.pods), generation(cluster)
    template_changed(cluster)
    (note,) = plan_now(cluster).event_notes("TemplateChanged")
    assert "5 of 5 workers" in note
    cluster.run(20)
    assert (set(cluster.pods), generation(cluster)) == (pods, before)
    assert cluster.status.outdated_pods == 5
    assert plan_now(cluster).event_notes("TemplateChanged") == []


def plan_now(cluster: FakeCluster) -> Any:
    return make_plan(cluster.observe(), SETTINGS)


def test_later_pods_have_the_new_template() -> None:
    cluster = start_job(spares=1)
    template_changed(cluster)
    cluster.run(3)
    cluster.kill_pod(cluster.member_names()[1])
    result = plan_now(cluster)
    assert result.created_pods == ["demo-w-5"]
    assert result.created_manifests[0]["spec"]["priority"] == 7
    cluster.dirty = True
    cluster.run(20)
    assert cluster.status.outdated_pods == 4
    cluster.suspend(True)
    cluster.run(10)
    cluster.suspend(False)
    cluster.run(20)
    assert cluster.status.outdated_pods == 0
