"""Transitions of the small models: a fault, a change by the user, or the passing of time.

After each transition except time, data plane and operator react for one second. With `crash_after` the operator crashes
after that many writes of its first plan. Transitions select workers by role (a rank, the spare), so that they apply
after any history.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

from tests.unit.plan.plan_cluster import FakeCluster
from trainium_contract.faults.causes import Cause
from trainium_contract.spec.elasticity import IdleNodes
from trainium_operator.plan.model.observed import FleetView, NodeCondition, NodeReadiness, Taint

CRASH_POINTS = (0, 1, 2, 3)


@dataclass(frozen=True)
class UsedBudgets:
    """Number of faults of a history that may count towards each budget."""

    process: int = 0
    infrastructure: int = 0

    def __add__(self, other: Self) -> Self:
        return replace(
            self, process=self.process + other.process, infrastructure=self.infrastructure + other.infrastructure
        )


USER = UsedBudgets(process=1)
HARDWARE = UsedBudgets(infrastructure=1)
NO_BUDGET = UsedBudgets()


@dataclass(frozen=True)
class Transition:
    """One event, with its effect on the cluster."""

    name: str
    do: Callable[[FakeCluster], bool]
    """Apply it; return False, without a change, if it cannot happen in this state."""
    used_budgets: UsedBudgets = NO_BUDGET
    seconds: float = 1.0
    crash_after: int | None = None

    def apply(self, cluster: FakeCluster) -> bool:
        """Apply it and let the cluster react; return False if it cannot happen in this state."""
        if not self.do(cluster):
            return False
        if self.crash_after is not None:
            if not cluster.operator_up or cluster.pending_writes() <= self.crash_after:
                return False
            cluster.reconcile(crash_after=self.crash_after)
        cluster.run(self.seconds, tick=1.0 if self.seconds < 10 else 2.0)
        return True

    def with_operator_death(self, after: int) -> Self:
        """Return the same transition after which the operator dies."""
        return replace(self, name=f"{self.name}; the operator dies after {after} writes", crash_after=after)


def member_node(cluster: FakeCluster, rank: int) -> str:
    """Return the node of the member with this rank (negative: from the end); empty without a pod."""
    members = cluster.members()
    return members[rank].view.node if -len(members) <= rank < len(members) else ""


def _on_pod_of_rank(rank: int, do: Callable[[FakeCluster, str], bool]) -> Callable[[FakeCluster], bool]:
    def apply(cluster: FakeCluster) -> bool:
        members = cluster.members()
        return bool(members) and -len(members) <= rank < len(members) and do(cluster, members[rank].view.name)

    return apply


def _on_node_of_rank(rank: int, do: Callable[[FakeCluster, str], bool]) -> Callable[[FakeCluster], bool]:
    def apply(cluster: FakeCluster) -> bool:
        node = member_node(cluster, rank)
        return bool(node) and do(cluster, node)

    return apply


def spares(cluster: FakeCluster) -> list[str]:
    """Return the pods outside the membership, oldest first."""
    members = {pod.view.name for pod in cluster.members()}
    outside = (pod.view for pod in cluster.pods.values() if pod.view.name not in members)
    return [view.name for view in sorted(outside, key=lambda view: view.ordinal)]


def _on_spare(do: Callable[[FakeCluster, str], bool]) -> Callable[[FakeCluster], bool]:
    def apply(cluster: FakeCluster) -> bool:
        names = spares(cluster)
        return bool(names) and do(cluster, names[0])

    return apply


def _on_node_of_spare(do: Callable[[FakeCluster, str], bool]) -> Callable[[FakeCluster], bool]:
    return _on_spare(lambda cluster, name: bool(node := cluster.pods[name].view.node) and do(cluster, node))


def _delete(grace: int | None) -> Callable[[FakeCluster, str], bool]:
    def apply(cluster: FakeCluster, name: str) -> bool:
        view = cluster.pods[name].view
        if view.deleting and grace is None:
            return False
        cluster._delete(name, view.uid, grace)
        return True

    return apply


def _on_first_node(
    matches: Callable[[FakeCluster, str], bool], do: Callable[[FakeCluster, str], object]
) -> Callable[[FakeCluster], bool]:
    def apply(cluster: FakeCluster) -> bool:
        name = next((name for name in sorted(cluster.nodes) if matches(cluster, name)), None)
        if name is not None:
            do(cluster, name)
        return name is not None

    return apply


def _is_down(cluster: FakeCluster, name: str) -> bool:
    return not cluster.nodes[name].up


def _mark(marks: Callable[[FakeCluster], dict[str, Any]]) -> Callable[[FakeCluster, str], bool]:
    return lambda cluster, node: cluster.mark_node(node, **marks(cluster))


def _mark_node_of_rank(rank: int, marks: Callable[[FakeCluster], dict[str, Any]]) -> Callable[[FakeCluster], bool]:
    return _on_node_of_rank(rank, _mark(marks))


def _device_fault(cluster: FakeCluster) -> dict[str, Any]:
    condition = NodeCondition("NeuronHealth", NodeReadiness.TRUE, "NeuronHasError_HBM_UNCORRECTABLE", since=cluster.now)
    return {"condition": condition}


def _spot_notice(_cluster: FakeCluster) -> dict[str, Any]:
    return {"taint": Taint("aws-node-termination-handler/spot-itn", "", "NoSchedule")}


def _unless(
    already: Callable[[FakeCluster], bool], do: Callable[[FakeCluster], object]
) -> Callable[[FakeCluster], bool]:
    def apply(cluster: FakeCluster) -> bool:
        if already(cluster):
            return False
        do(cluster)
        return True

    return apply


def _change_fleet(cluster: FakeCluster, **changes: Any) -> bool:
    before, cluster.fleet = cluster.fleet, replace(cluster.fleet, **changes)
    cluster.dirty |= cluster.fleet != before
    return cluster.fleet != before


def _quarantine(cluster: FakeCluster, node: str) -> bool:
    return _change_fleet(cluster, quarantined=cluster.fleet.quarantined | {node})


def _scale(replicas: int) -> Callable[[FakeCluster], bool]:
    return _unless(
        lambda cluster: cluster.spec.workers.replicas == replicas, lambda cluster: cluster.change(replicas=replicas)
    )


def _suspend(value: bool) -> Callable[[FakeCluster], bool]:
    return _unless(lambda cluster: cluster.spec.suspend is value, lambda cluster: cluster.suspend(value))


def _uses_idle_nodes(cluster: FakeCluster) -> bool:
    return cluster.spec.elasticity.idle_nodes is IdleNodes.TAKE


def _add_foreign_pods(cluster: FakeCluster) -> bool:
    if not _uses_idle_nodes(cluster) or cluster.foreign_nodes or cluster.foreign_pending_pods:
        return False
    cluster.foreign_pending_pods = 2
    return True


def _remove_foreign_pods(cluster: FakeCluster) -> bool:
    if not cluster.foreign_nodes and not cluster.foreign_pending_pods and not cluster.nodes_wanted_by_gangs:
        return False
    cluster.foreign_nodes.clear()
    cluster.foreign_pending_pods = cluster.nodes_wanted_by_gangs = 0
    cluster.dirty = True
    return True


def _add_waiting_gang(cluster: FakeCluster) -> bool:
    if not _uses_idle_nodes(cluster) or cluster.nodes_wanted_by_gangs:
        return False
    cluster.nodes_wanted_by_gangs, cluster.dirty = 2, True
    return True


def _do_nothing(_cluster: FakeCluster) -> bool:
    return True


TIME = (
    Transition("5 s pass", _do_nothing, seconds=5.0),
    Transition("40 s pass", _do_nothing, seconds=40.0),
)
FAULTS = (
    Transition("a process of rank 1 crashes", lambda cluster: cluster.crash_process(1), USER),
    Transition("the agent of rank 0 reports a device fault", lambda cluster: cluster.give_up(0, 80), HARDWARE),
    Transition("the agent of the last rank gives up", lambda cluster: cluster.give_up(-1, 139), USER),
    Transition("the training program reports a user error", lambda cluster: cluster.give_up(0, 64)),
    Transition(
        "the pod of rank 0 is killed", _on_pod_of_rank(0, lambda cluster, name: cluster.kill_pod(name)), HARDWARE
    ),
    Transition("the spare's pod is killed", _on_spare(lambda cluster, name: cluster.kill_pod(name)), HARDWARE),
    Transition("the spare's preflight fails", _on_spare(lambda cluster, name: cluster.fail_preflight(name)), HARDWARE),
    Transition("the pod of the last rank is deleted", _on_pod_of_rank(-1, _delete(None)), HARDWARE),
    Transition("the pod of rank 0 vanishes", _on_pod_of_rank(0, _delete(0)), HARDWARE),
    Transition(
        "the node of the last rank is lost",
        _on_node_of_rank(-1, lambda cluster, node: cluster.lose_node(node)),
        HARDWARE,
    ),
    Transition(
        "the node of rank 0 is deleted", _on_node_of_rank(0, lambda cluster, node: cluster.delete_node(node)), HARDWARE
    ),
    Transition("the spare's node is lost", _on_node_of_spare(lambda cluster, node: cluster.lose_node(node)), HARDWARE),
    Transition(
        "a lost node boots", _on_first_node(_is_down, lambda cluster, node: cluster.restore_node(node)), HARDWARE
    ),
    Transition(
        "a lost node was only frozen", _on_first_node(_is_down, lambda cluster, node: cluster.resume_node(node))
    ),
    Transition(
        "the network between rank 0 and the operator is cut",
        _on_node_of_rank(0, lambda cluster, node: cluster.partition_node(node)),
        HARDWARE,
    ),
    Transition(
        "the network is mended",
        _on_first_node(
            lambda cluster, node: cluster.nodes[node].partitioned,
            lambda cluster, node: cluster.partition_node(node, partitioned=False),
        ),
    ),
)
MARKS = (
    Transition("the node of rank 0 reports a device fault", _mark_node_of_rank(0, _device_fault), HARDWARE),
    Transition("the node of the last rank is about to go (spot)", _mark_node_of_rank(-1, _spot_notice), HARDWARE),
    Transition(
        "the node of rank 0 is cordoned",
        _on_node_of_rank(0, lambda cluster, node: cluster.mark_node(node, schedulable=False)),
    ),
    Transition(
        "the node of the last rank is being deleted", _mark_node_of_rank(-1, lambda _: {"deleting": True}), HARDWARE
    ),
    Transition("the spare's node reports a device fault", _on_node_of_spare(_mark(_device_fault)), HARDWARE),
    Transition("the fleet's memory bans the node of rank 0", _on_node_of_rank(0, _quarantine)),
    Transition(
        "too many nodes are bad: nothing may be done to nodes",
        lambda cluster: _change_fleet(cluster, frozen="2 of 4 nodes are bad"),
    ),
    Transition("nodes may be acted on again", lambda cluster: _change_fleet(cluster, frozen="")),
    Transition("a process of the last rank hangs", lambda cluster: cluster.crash_process(-1, 137, Cause.HANG), USER),
    Transition(
        "the node of the last rank is slow",
        _on_node_of_rank(-1, lambda cluster, node: cluster.slow_node(node)),
        HARDWARE,
    ),
)
USER_CHANGES = (
    Transition("the user scales down", _scale(1)),
    Transition("the user scales to the first size", _scale(2)),
    Transition("the user scales up", _scale(3)),
    Transition("the user suspends the job", _suspend(True)),
    Transition("the user resumes the job", _suspend(False)),
)
FOREIGN_PODS = (
    Transition("foreign pods need two nodes", _add_foreign_pods),
    Transition("a gang of another job waits for two nodes", _add_waiting_gang),
    Transition("nobody else needs nodes any more", _remove_foreign_pods),
)
OPERATOR = (
    Transition(
        "the operator is away for 15 s",
        _unless(lambda cluster: not cluster.operator_up, lambda cluster: cluster.crash_operator(15.0)),
    ),
)


def all_transitions(crash_points: tuple[int, ...] = CRASH_POINTS) -> tuple[Transition, ...]:
    """Return all transitions, and those with writes again with a crash of the operator between them."""
    waiting = Transition("nothing new", _do_nothing)
    deadly_transitions = (
        transition.with_operator_death(after)
        for transition in (*FAULTS, *MARKS, *USER_CHANGES, *FOREIGN_PODS, waiting)
        for after in crash_points
    )
    return (*TIME, *FAULTS, *MARKS, *USER_CHANGES, *FOREIGN_PODS, *OPERATOR, *deadly_transitions)


def repair(cluster: FakeCluster, replicas: int = 2) -> None:
    """Repair all nodes, resume the job and restore its size."""
    for name in cluster.first_nodes:
        cluster.clear_node(name)
    cluster.fleet, cluster.dirty = FleetView(), True
    cluster.foreign_nodes.clear()
    cluster.foreign_pending_pods = cluster.nodes_wanted_by_gangs = 0
    if cluster.spec.suspend:
        cluster.suspend(False)
    if cluster.spec.workers.replicas != replicas:
        cluster.change(replicas=replicas)
