"""An UltraServer is one unit of size, placement, loss and spares."""

import random
from dataclasses import replace

import pytest

from tests.unit.plan.fake_data_plane import Node
from tests.unit.plan.plan_cluster import start_cluster
from tests.unit.plan.ultra_servers import UltraServerCluster, build_spec
from trainium_contract.accelerators import ULTRA_SERVER_NODE_LABEL
from trainium_contract.job import TrainingJobSpec
from trainium_contract.status.conditions import ConditionType, Phase
from trainium_contract.status.interruptions import RecoveryResponse
from trainium_contract.wire.messages import Transition
from trainium_contract.wire.worker_env import LABEL_UNIT
from trainium_operator.plan.model.conditions import find_condition
from trainium_operator.plan.model.observed import NodeCondition, NodeReadiness


def start(spec: TrainingJobSpec, servers: int, seconds: float = 20) -> UltraServerCluster:
    cluster = UltraServerCluster(spec, servers)
    cluster.run(seconds)
    assert cluster.status.phase is Phase.RUNNING
    return cluster


def is_steady(cluster: UltraServerCluster) -> bool:
    return cluster.status.phase is Phase.RUNNING and all(not entry.is_open for entry in cluster.status.history)


def test_the_ranks_of_an_ultra_server_are_neighbours_in_the_order_of_its_nodes() -> None:
    cluster = start(build_spec(8), servers=3)
    assert cluster.member_servers() == ["server0"] * 4 + ["server1"] * 4
    assert cluster.membership is not None
    views = [cluster.nodes[member.node_name].view for member in cluster.membership.members]
    numbers = [view.labels[ULTRA_SERVER_NODE_LABEL.format(4)] for view in views if view is not None]
    assert numbers == ["0", "1", "2", "3"] * 2


def test_the_pods_of_a_unit_have_one_label_that_no_other_job_uses() -> None:
    cluster = start(build_spec(8), servers=2)
    units = [pod.manifest["metadata"]["labels"][LABEL_UNIT] for pod in cluster.pods.values()]
    assert units == ["job-uid-0"] * 4 + ["job-uid-4"] * 4


def test_a_job_of_single_nodes_has_no_unit_in_its_pods() -> None:
    spec = build_spec(8)
    alone = spec.workers.accelerator.replaced(unit="Node", unit_nodes=None, unit_topology_key=None)
    cluster = start_cluster(spec.replaced(workers=spec.workers.replaced(accelerator=alone)), 8)
    assert not any(LABEL_UNIT in pod.manifest["metadata"]["labels"] for pod in cluster.pods.values())
    assert not any("ultraserver" in str(pod.manifest["spec"]) for pod in cluster.pods.values())


def test_a_spare_ultra_server_replaces_the_one_whose_node_failed() -> None:
    cluster = start(build_spec(8, spares=4), servers=4)
    before = cluster.member_names()
    cluster.lose_node(cluster.node_of_rank(5))
    cluster.run(100)
    assert is_steady(cluster)
    assert cluster.newest_entry.response is RecoveryResponse.SPARE
    assert cluster.newest_entry.pods_replaced == 4
    assert cluster.member_names()[:4] == before[:4]
    assert cluster.member_servers() == ["server0"] * 4 + ["server2"] * 4
    # The other nodes of the failed UltraServer hold no worker; a new spare is on the fourth.
    assert {cluster.server_of(pod.view.node) for pod in cluster.pods.values()} == {"server0", "server2", "server3"}
    assert (len(cluster.pods), cluster.status.spares) == (12, 4)


def test_a_spare_takes_over_while_the_deleted_pod_of_a_healthy_node_returns_as_part_of_the_next_spare() -> None:
    cluster = start(build_spec(8, spares=4), servers=3)
    cluster.delete_pod(cluster.member_names()[5])
    cluster.run(60)
    assert is_steady(cluster)
    assert cluster.member_servers() == ["server0"] * 4 + ["server2"] * 4
    assert (len(cluster.pods), cluster.status.spares) == (12, 4)
    assert {cluster.server_of(pod.view.node) for pod in cluster.pods.values()} == {"server0", "server1", "server2"}


def test_without_a_spare_a_deleted_pod_returns_to_its_ultra_server_and_the_others_keep_their_ranks() -> None:
    cluster = start(build_spec(8), servers=3)
    before = cluster.member_names()
    node = cluster.node_of_rank(6)
    cluster.delete_pod(before[6])
    cluster.run(60)
    assert is_steady(cluster)
    after = cluster.member_names()
    assert [name for rank, name in enumerate(after) if rank != 6] == [
        name for rank, name in enumerate(before) if rank != 6
    ]
    assert cluster.node_of_rank(6) == node
    assert cluster.newest_entry.pods_replaced == 1


def test_without_a_free_ultra_server_the_job_shrinks_by_one_and_grows_when_the_node_returns() -> None:
    cluster = start(build_spec(8, minReplicas=4), servers=2)
    lost = cluster.node_of_rank(1)
    cluster.lose_node(lost)
    cluster.run(120)
    assert is_steady(cluster)
    assert cluster.member_servers() == ["server1"] * 4
    labels = cluster.nodes[lost].view
    assert labels is not None
    del cluster.nodes[lost]
    cluster.nodes["node-new"] = Node("node-new", view=replace(labels, name="node-new"))
    cluster.dirty = True
    cluster.run(200)
    assert cluster.size == 8
    assert sorted(cluster.member_servers()) == ["server0"] * 4 + ["server1"] * 4


def test_a_node_with_a_bad_signal_moves_its_whole_ultra_server_after_all_ranks_saved() -> None:
    cluster = start(build_spec(8, spares=4), servers=4)
    name = cluster.node_of_rank(2)
    view = cluster.nodes[name].view
    assert view is not None
    bad = NodeCondition("KernelDeadlock", NodeReadiness.TRUE, "DockerHung", since=cluster.now - 60)
    cluster.nodes[name].view = replace(view, conditions=(bad,))
    cluster.dirty = True
    cluster.run(60)
    assert is_steady(cluster)
    assert cluster.member_servers() == ["server2"] * 4 + ["server1"] * 4
    assert cluster.membership is not None
    assert cluster.membership.transition is Transition.GRACEFUL
    assert "server0" not in {cluster.server_of(pod.view.node) for pod in cluster.pods.values()}


def test_a_later_size_is_rounded_down_to_whole_ultra_servers() -> None:
    cluster = start(build_spec(12), servers=3)
    cluster.change(replicas=11)
    cluster.run(30)
    assert (cluster.size, cluster.status.desired) == (8, 8)
    legal = find_condition(cluster.status, ConditionType.SIZE_LEGAL)
    assert legal is not None
    assert "8 is the largest legal size" in legal.message
    cluster.change(replicas=12)
    cluster.run(60)
    assert sorted(cluster.member_servers()) == ["server0"] * 4 + ["server1"] * 4 + ["server2"] * 4


def test_an_ultra_server_with_a_cordoned_node_gets_no_unit_that_cannot_be_whole() -> None:
    cluster = UltraServerCluster(build_spec(4), servers=2)
    cordoned = cluster.nodes_of("server0")[0]
    view = cluster.nodes[cordoned].view
    assert view is not None
    cluster.nodes[cordoned].view = replace(view, schedulable=False)
    cluster.run(60)
    assert cluster.status.phase is Phase.RUNNING
    assert cluster.member_servers() == ["server1"] * 4
    assert len(cluster.pods) == 4


@pytest.mark.parametrize("seed", range(4))
def test_after_any_faults_whole_ultra_servers_train(seed: int) -> None:
    choose = random.Random(seed)
    spares = choose.choice((0, 4))
    cluster = start(build_spec(8, minReplicas=4, spares=spares), servers=3 + spares // 4)
    for _ in range(8):
        fault = choose.choice(("pod", "node", "crash", "operator", "scale"))
        members = cluster.member_names()
        if fault == "pod":
            cluster.delete_pod(choose.choice(members))
        elif fault == "node" and sum(not node.up for node in cluster.nodes.values()) < 2:
            cluster.lose_node(choose.choice(sorted(cluster.nodes)))
        elif fault == "crash":
            cluster.crash_process(choose.randrange(8))
        elif fault == "operator":
            cluster.crash_operator()
        elif fault == "scale":
            cluster.change(replicas=choose.choice((4, 6, 8)))
        cluster.run(choose.choice((3, 15, 50)))
    cluster.change(replicas=8)
    for name in cluster.nodes:
        cluster.resume_node(name)
    cluster.run(400, tick=2.0)
    assert is_steady(cluster)
    assert (cluster.size, cluster.status.spares, len(cluster.pods)) == (8, spares, 8 + spares)
