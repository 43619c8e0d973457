"""Ranks by network distance, and pod affinity."""

import random
import time
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import NOW, SETTINGS
from tests.unit.plan.plan_results import make_plan
from trainium_contract.job import TrainingJobStatus
from trainium_operator.plan.membership.ranks import (
    RankPlacement,
    assign_ranks,
    find_network_path,
    order_first_ranks,
    sort_nearest_first,
)
from trainium_operator.plan.model.names import LAYERS
from trainium_operator.plan.model.observed import NodeView, Observed
from trainium_operator.plan.view.workers import build_workers


def labelled_node(name: str, *layers: str, zone: str = "") -> NodeView:
    labels = {**dict(zip(LAYERS, layers, strict=False)), "kubernetes.io/hostname": name}
    return NodeView(name=name, labels=labels | ({"topology.kubernetes.io/zone": zone} if zone else {}))


def build_racks(count: int, per_rack: int, *, shuffle: int = 0) -> dict[str, NodeView]:
    """Return nodes in racks below two spines, in an order that depends on `shuffle`."""
    order = list(range(count))
    random.Random(shuffle).shuffle(order)
    places = {node: place // per_rack for place, node in enumerate(order)}
    return {
        f"node-{number}": labelled_node(f"node-{number}", f"s{places[number] % 2}", "a", f"r{places[number]}")
        for number in range(count)
    }


def warm_workers(observed: Observed) -> Any:
    return tuple(build_workers(observed).values())


def starting_job(count: int, nodes: dict[str, NodeView], **workers: Any) -> Observed:
    view = build.job(build.spec(workers={"replicas": 4, **workers}), TrainingJobStatus(next_pod_ordinal=count))
    pods = tuple(build.pod(ordinal) for ordinal in range(count))
    return build.observation(view, pods, build.agents(range(count)), nodes=nodes)


@given(st.integers(0, 1000))
def test_the_ranks_of_a_domain_are_contiguous_at_every_layer(shuffle: int) -> None:
    nodes = build_racks(24, 4, shuffle=shuffle)
    ordered = order_first_ranks(warm_workers(starting_job(24, nodes)), 24, RankPlacement(nodes))
    places = [find_network_path(worker.pod.node, nodes[worker.pod.node]) for worker in ordered]
    for depth in range(1, 4):
        domains = [domain for domain, _ in groupby(places, key=lambda place, depth=depth: place[:depth])]
        assert len(domains) == len(set(domains)), f"a domain of layer {depth} is split"


def test_the_worker_outside_of_the_largest_domain_is_the_spare() -> None:
    nodes = {
        "node-0": labelled_node("node-0", "s", "a", "r1"),
        **{f"node-{number}": labelled_node(f"node-{number}", "s", "a", "r2") for number in range(1, 5)},
    }
    result = make_plan(starting_job(5, nodes, spares=1))
    assert result.published_members == ["demo-w-1", "demo-w-2", "demo-w-3", "demo-w-4"]


def test_without_labels_the_oldest_workers_start_in_the_order_of_their_nodes() -> None:
    nodes = {f"node-{number}": NodeView(name=f"node-{number}") for number in range(5)}
    assert make_plan(starting_job(5, nodes, spares=1)).published_members == [
        f"demo-w-{ordinal}" for ordinal in range(4)
    ]


def test_the_newcomer_nearest_to_the_lost_rank_s_neighbours_takes_it() -> None:
    nodes = {
        **{f"node-{number}": labelled_node(f"node-{number}", "s", "a", f"r{number // 2}") for number in range(4)},
        "node-4": labelled_node("node-4", "s", "a", "r0"),
        "node-5": labelled_node("node-5", "s", "a", "r1"),
    }
    observed = build.running_job(4, spares=2, nodes=nodes)
    observed = build.without_pods(observed, 3, keep_agents=True)
    assert make_plan(observed).published_members == ["demo-w-0", "demo-w-1", "demo-w-2", "demo-w-5"]


def test_newcomers_are_placed_near_both_neighbour_ranks() -> None:
    nodes = {
        f"node-{number}": labelled_node(f"node-{number}", "s", "a", rack)
        for number, rack in enumerate(("x", "y", "y", "x"))
    }
    members = build.membership(9, 0, 1).members[1:]  # ranks 1 and 2 stay, in racks x and y
    newcomers = [worker for worker in warm_workers(starting_job(4, nodes)) if worker.pod.ordinal in (2, 3)]
    first, *_ = assign_ranks(members, newcomers, 3, RankPlacement(nodes))
    assert first.pod_name == "demo-w-3"


def test_a_near_newcomer_on_a_suspected_node_is_taken_only_when_no_other_is_left() -> None:
    nodes = {
        **{f"node-{number}": labelled_node(f"node-{number}", "s", "a", "r0") for number in range(5)},
        "node-5": labelled_node("node-5", "s", "a", "r9"),
    }
    workers = warm_workers(starting_job(6, nodes))[4:]
    members = build.membership(0, 1, 2, 3).members[:3]
    suspected = RankPlacement(nodes, frozenset({"uid-4"}))
    assert assign_ranks(members, workers, 4, RankPlacement(nodes))[3].pod_uid == "uid-4"
    assert assign_ranks(members, workers, 4, suspected)[3].pod_uid == "uid-5"
    assert [member.pod_uid for member in assign_ranks(members, workers, 5, suspected)[3:]] == ["uid-5", "uid-4"]


@given(st.sets(st.integers(0, 11), max_size=6), st.integers(0, 50))
def test_survivors_keep_their_ranks(lost: set[int], shuffle: int) -> None:
    nodes = build_racks(20, 4, shuffle=shuffle)
    before = build.membership(*range(12)).members
    survivors = [member for member in before if member.node_rank not in lost]
    after = assign_ranks(survivors, warm_workers(starting_job(20, nodes))[12:], 12, RankPlacement(nodes))
    assert [member.node_rank for member in after] == list(range(12))
    assert {(member.pod_uid, member.node_rank) for member in survivors} <= {
        (member.pod_uid, member.node_rank) for member in after
    }
    assert len({member.pod_uid for member in after}) == 12


def test_ordering_five_thousand_nodes_is_fast() -> None:
    nodes = build_racks(5000, 16)
    workers = warm_workers(starting_job(5000, nodes))
    around = RankPlacement(nodes)
    began = time.process_time()
    order_first_ranks(workers, 4990, around)
    members = build.membership(*range(2500)).members
    assign_ranks(members, workers[2500:], 5000, around)
    assert time.process_time() - began < 5.0, "a quadratic search would take minutes"


def pod_affinity(topology: str, layers: frozenset[str] = frozenset(LAYERS[:3]), **changes: Any) -> Any:
    view = build.job(build.spec(scheduling={"topology": topology}, **changes))
    result = make_plan(build.observation(view), replace(SETTINGS, topology_layers=layers))
    return result.created_manifests[0]["spec"].get("affinity", {}).get("podAffinity")


def test_pods_prefer_near_domains() -> None:
    terms = pod_affinity("Preferred")["preferredDuringSchedulingIgnoredDuringExecution"]
    assert [term["podAffinityTerm"]["topologyKey"] for term in terms] == list(LAYERS[:3])
    assert [term["weight"] for term in terms] == sorted(term["weight"] for term in terms)
    selector = {"trainium.dev/job-name": "demo", "trainium.dev/role": "worker"}
    assert terms[0]["podAffinityTerm"]["labelSelector"] == {"matchLabels": selector}


def test_required_topology_is_one_domain_of_the_widest_layer() -> None:
    terms = pod_affinity("Required")
    required = terms["requiredDuringSchedulingIgnoredDuringExecution"]
    assert [term["topologyKey"] for term in required] == [LAYERS[0]]
    preferred = terms["preferredDuringSchedulingIgnoredDuringExecution"]
    assert [term["podAffinityTerm"]["topologyKey"] for term in preferred] == list(LAYERS[1:3])


@pytest.mark.parametrize(("topology", "layers"), [("Ignored", frozenset(LAYERS)), ("Preferred", frozenset())])
def test_without_labels_or_preference_there_is_no_affinity(topology: str, layers: frozenset[str]) -> None:
    assert pod_affinity(topology, layers) is None


def test_the_user_s_own_affinity_stays() -> None:
    own = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "podAffinityTerm": {"topologyKey": "x"}}]}
    workers = {"template": {"spec": {"affinity": {"podAffinity": own}}}}
    terms = pod_affinity("Preferred", frozenset(LAYERS[:1]), workers=workers)
    keys = [term["podAffinityTerm"]["topologyKey"] for term in terms["preferredDuringSchedulingIgnoredDuringExecution"]]
    assert keys == ["x", LAYERS[0]]


def test_the_priority_class_reaches_the_pods() -> None:
    view = build.job(build.spec(scheduling={"priorityClassName": "research"}), created=NOW)
    manifest, *_ = make_plan(build.observation(view)).created_manifests
    assert manifest["spec"]["priorityClassName"] == "research"


def test_nodes_without_labels_are_not_near() -> None:
    nodes = {
        "node-0": labelled_node("node-0"),
        "node-1": labelled_node("node-1"),
        "node-2": labelled_node("node-2", zone="a"),
    }
    assert [worker.pod.node for worker in sort_nearest_first(warm_workers(starting_job(3, nodes)), nodes)] == [
        "node-0",
        "node-1",
        "node-2",
    ]
