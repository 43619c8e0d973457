"""A straggler that no spare replaces is left out, over a life: the job neither waits for it nor takes it back."""

from __future__ import annotations

from plan_builders import spec
from plan_cluster import FakeCluster

from trainium_contract.faults.causes import Cause
from trainium_contract.status.conditions import Phase
from trainium_contract.status.interruptions import Rung


def started(nodes: int) -> FakeCluster:
    made = spec(
        workers={"replicas": 4, "minReplicas": 1}, recovery={"rescaleAfterSeconds": 30}, trainer={"steps": 10**7}
    )
    cluster = FakeCluster(made, nodes)
    cluster.run(60)
    assert cluster.status.membership.size == 4
    assert any(each.step_seconds for each in cluster.status.goodput.sizes)
    return cluster


def test_where_no_other_node_is_free_it_trains_on_without_the_slow_one_and_does_not_flap() -> None:
    cluster = started(4)
    slow = cluster.members()[-1].view.node
    cluster.slow_node(slow)
    cluster.run(120)
    assert cluster.status.membership.size == 3
    assert slow not in {pod.view.node for pod in cluster.members()}
    entry = cluster.status.history[-1]
    assert (entry.cause, entry.rung) == (Cause.STRAGGLER, Rung.SHRINK)

    cluster.run(1800)
    assert cluster.status.membership.size == 3
    assert len(cluster.status.history) == 1
    assert cluster.status.phase is Phase.RUNNING


def test_where_another_node_is_free_it_is_back_at_its_size() -> None:
    cluster = started(5)
    slow = cluster.members()[-1].view.node
    cluster.slow_node(slow)
    cluster.run(300)
    assert cluster.status.membership.size == 4
    assert slow not in {pod.view.node for pod in cluster.members()}
