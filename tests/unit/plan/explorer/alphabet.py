"""Events of the small model: one letter is one fault or wish, or the passing of time.

Each letter but time is followed by one second in which the world and the operator react; with `crash_after` the
operator dies after that many of the writes of its first reaction. Letters name workers by their role (a rank, the
spare), so that one letter means the same whatever went before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trainium_contract.faults.causes import Cause
from trainium_contract.spec.elasticity import IdleNodes
from trainium_operator.plan.model.observed import FleetView, NodeCondition, NodeReadiness, Taint

if TYPE_CHECKING:
    from collections.abc import Callable

    from plan_cluster import FakeCluster

CRASH_POINTS = (0, 1, 2, 3)


@dataclass(frozen=True)
class Blamed:
    """Number of faults of a history that may use each budget."""

    process: int = 0
    infrastructure: int = 0

    def __add__(self, other: Blamed) -> Blamed:
        return Blamed(self.process + other.process, self.infrastructure + other.infrastructure)


USER = Blamed(process=1)
HARDWARE = Blamed(infrastructure=1)
NOBODY = Blamed()


@dataclass(frozen=True)
class Letter:
    """One thing that can happen."""

    name: str
    do: Callable[[FakeCluster], bool]
    """Whether it could happen in this state; one that could not has changed nothing."""
    blamed: Blamed = NOBODY
    seconds: float = 1.0
    crash_after: int | None = None

    def apply(self, cluster: FakeCluster) -> bool:
        """Let it happen, and the world react; False when it makes no sense here."""
        if not self.do(cluster):
            return False
        if self.crash_after is not None:
            if not cluster.operator_up or cluster.pending_writes() <= self.crash_after:
                return False
            cluster.reconcile(crash_after=self.crash_after)
        cluster.run(self.seconds, tick=1.0 if self.seconds < 10 else 2.0)
        return True

    def dying(self, after: int) -> Letter:
        """The same, and the operator dies."""
        return replace(self, name=f"{self.name}; the operator dies after {after} writes", crash_after=after)


def member_node(cluster: FakeCluster, rank: int) -> str:
    """Node of the member with this rank, counted from the end when negative; empty when it has no pod."""
    members = cluster.members()
    return members[rank].view.node if -len(members) <= rank < len(members) else ""


def _member(rank: int, do: Callable[[FakeCluster, str], bool]) -> Callable[[FakeCluster], bool]:
    def apply(cluster: FakeCluster) -> bool:
        members = cluster.members()
        return bool(members) and -len(members) <= rank < len(members) and do(cluster, members[rank].view.name)

    return apply


def _node_of(rank: int, do: Callable[[FakeCluster, str], bool]) -> Callable[[FakeCluster], bool]:
    def apply(cluster: FakeCluster) -> bool:
        node = member_node(cluster, rank)
        return bool(node) and do(cluster, node)

    return apply


def spares(cluster: FakeCluster) -> list[str]:
    """Names of the pods outside the membership, oldest first."""
    members = {pod.view.name for pod in cluster.members()}
    outside = (pod.view for pod in cluster.pods.values() if pod.view.name not in members)
    return [view.name for view in sorted(outside, key=lambda view: view.ordinal)]


def _spare(do: Callable[[FakeCluster, str], bool]) -> Callable[[FakeCluster], bool]:
    def apply(cluster: FakeCluster) -> bool:
        names = spares(cluster)
        return bool(names) and do(cluster, names[0])

    return apply


def _spares_node(do: Callable[[FakeCluster, str], bool]) -> Callable[[FakeCluster], bool]:
    return _spare(lambda cluster, name: bool(node := cluster.pods[name].view.node) and do(cluster, node))


def _delete(grace: int | None) -> Callable[[FakeCluster, str], bool]:
    def apply(cluster: FakeCluster, name: str) -> bool:
        view = cluster.pods[name].view
        if view.deleting and grace is None:
            return False
        cluster._delete(name, view.uid, grace)
        return True

    return apply


def _a_node_that(
    is_so: Callable[[FakeCluster, str], bool], do: Callable[[FakeCluster, str], object]
) -> Callable[[FakeCluster], bool]:
    def apply(cluster: FakeCluster) -> bool:
        name = next((name for name in sorted(cluster.nodes) if is_so(cluster, name)), None)
        if name is not None:
            do(cluster, name)
        return name is not None

    return apply


def _down(cluster: FakeCluster, name: str) -> bool:
    return not cluster.nodes[name].up


def _mark(marks: Callable[[FakeCluster], dict[str, Any]]) -> Callable[[FakeCluster, str], bool]:
    return lambda cluster, node: cluster.mark_node(node, **marks(cluster))


def _marked(rank: int, marks: Callable[[FakeCluster], dict[str, Any]]) -> Callable[[FakeCluster], bool]:
    return _node_of(rank, _mark(marks))


def _device_fault(cluster: FakeCluster) -> dict[str, Any]:
    condition = NodeCondition("NeuronHealth", NodeReadiness.TRUE, "NeuronHasError_HBM_UNCORRECTABLE", since=cluster.now)
    return {"condition": condition}


def _spot_notice(_cluster: FakeCluster) -> dict[str, Any]:
    return {"taint": Taint("aws-node-termination-handler/spot-itn", "", "NoSchedule")}


def _ban(cluster: FakeCluster, node: str) -> bool:
    if node in cluster.fleet.quarantined:
        return False
    cluster.fleet = replace(cluster.fleet, quarantined=cluster.fleet.quarantined | {node})
    cluster.dirty = True
    return True


def _freeze(why: str) -> Callable[[FakeCluster], bool]:
    def apply(cluster: FakeCluster) -> bool:
        if cluster.fleet.frozen == why:
            return False
        cluster.fleet = replace(cluster.fleet, frozen=why)
        cluster.dirty = True
        return True

    return apply


def _scale(replicas: int) -> Callable[[FakeCluster], bool]:
    def apply(cluster: FakeCluster) -> bool:
        if cluster.spec.workers.replicas == replicas:
            return False
        cluster.change(replicas=replicas)
        return True

    return apply


def _suspend(value: bool) -> Callable[[FakeCluster], bool]:
    def apply(cluster: FakeCluster) -> bool:
        if cluster.spec.suspend is value:
            return False
        cluster.suspend(value)
        return True

    return apply


def _away(seconds: float) -> Callable[[FakeCluster], bool]:
    def apply(cluster: FakeCluster) -> bool:
        if cluster.operator_up:
            cluster.crash_operator(seconds)
            return True
        return False

    return apply


def _takes(cluster: FakeCluster) -> bool:
    return cluster.spec.elasticity.idle_nodes is IdleNodes.TAKE


def _somebody_comes(cluster: FakeCluster) -> bool:
    if not _takes(cluster) or cluster.others or cluster.wishes:
        return False
    cluster.wishes = 2
    return True


def _somebody_goes(cluster: FakeCluster) -> bool:
    if not cluster.others and not cluster.wishes and not cluster.gang_waits:
        return False
    cluster.others.clear()
    cluster.wishes = cluster.gang_waits = 0
    cluster.dirty = True
    return True


def _gang_waits(cluster: FakeCluster) -> bool:
    if not _takes(cluster) or cluster.gang_waits:
        return False
    cluster.gang_waits, cluster.dirty = 2, True
    return True


def _nothing(_cluster: FakeCluster) -> bool:
    return True


TIME = (
    Letter("5 s pass", _nothing, seconds=5.0),
    Letter("40 s pass", _nothing, seconds=40.0),
)
FAULTS = (
    Letter("a process of rank 1 crashes", lambda cluster: cluster.crash_process(1), USER),
    Letter("the agent of rank 0 reports a device fault", lambda cluster: cluster.give_up(0, 80), HARDWARE),
    Letter("the agent of the last rank gives up", lambda cluster: cluster.give_up(-1, 139), USER),
    Letter("the training program reports a user error", lambda cluster: cluster.give_up(0, 64)),
    Letter("the pod of rank 0 is killed", _member(0, lambda cluster, name: cluster.kill_pod(name)), HARDWARE),
    Letter("the spare's pod is killed", _spare(lambda cluster, name: cluster.kill_pod(name)), HARDWARE),
    Letter("the spare's preflight fails", _spare(lambda cluster, name: cluster.unfit(name)), HARDWARE),
    Letter("the pod of the last rank is deleted", _member(-1, _delete(None)), HARDWARE),
    Letter("the pod of rank 0 vanishes", _member(0, _delete(0)), HARDWARE),
    Letter("the node of the last rank is lost", _node_of(-1, lambda cluster, node: cluster.lose_node(node)), HARDWARE),
    Letter("the node of rank 0 is deleted", _node_of(0, lambda cluster, node: cluster.delete_node(node)), HARDWARE),
    Letter("the spare's node is lost", _spares_node(lambda cluster, node: cluster.lose_node(node)), HARDWARE),
    Letter("a lost node boots", _a_node_that(_down, lambda cluster, node: cluster.restore_node(node)), HARDWARE),
    Letter("a lost node was only frozen", _a_node_that(_down, lambda cluster, node: cluster.thaw_node(node))),
    Letter(
        "the network between rank 0 and the operator is cut",
        _node_of(0, lambda cluster, node: cluster.mute_node(node)),
        HARDWARE,
    ),
    Letter(
        "the network is mended",
        _a_node_that(
            lambda cluster, node: cluster.nodes[node].muted, lambda cluster, node: cluster.mute_node(node, muted=False)
        ),
    ),
)
MARKS = (
    Letter("the node of rank 0 reports a device fault", _marked(0, _device_fault), HARDWARE),
    Letter("the node of the last rank is about to go (spot)", _marked(-1, _spot_notice), HARDWARE),
    Letter(
        "the node of rank 0 is cordoned", _node_of(0, lambda cluster, node: cluster.mark_node(node, schedulable=False))
    ),
    Letter("the node of the last rank is being deleted", _marked(-1, lambda _: {"deleting": True}), HARDWARE),
    Letter("the spare's node reports a device fault", _spares_node(_mark(_device_fault)), HARDWARE),
    Letter("the fleet's memory bans the node of rank 0", _node_of(0, _ban)),
    Letter("too many nodes are bad: nothing may be done to nodes", _freeze("2 of 4 nodes are bad")),
    Letter("nodes may be acted on again", _freeze("")),
    Letter("a process of the last rank stands still", lambda cluster: cluster.crash_process(-1, 137, Cause.HANG), USER),
    Letter("the node of the last rank is slow", _node_of(-1, lambda cluster, node: cluster.slow_node(node)), HARDWARE),
)
WISHES = (
    Letter("the user scales down", _scale(1)),
    Letter("the user scales to the first size", _scale(2)),
    Letter("the user scales up", _scale(3)),
    Letter("the user suspends the job", _suspend(True)),
    Letter("the user resumes the job", _suspend(False)),
)
OTHERS = (
    Letter("pods of somebody else need two nodes", _somebody_comes),
    Letter("a gang of another job waits for two nodes", _gang_waits),
    Letter("nobody else needs nodes any more", _somebody_goes),
)
OPERATOR = (Letter("the operator is away for 15 s", _away(15.0)),)


def alphabet(crash_points: tuple[int, ...] = CRASH_POINTS) -> tuple[Letter, ...]:
    """All letters; those that make the operator write also with its death in the midst of the writes."""
    waiting = Letter("nothing new", _nothing)
    dying = (letter.dying(after) for letter in (*FAULTS, *MARKS, *WISHES, *OTHERS, waiting) for after in crash_points)
    return (*TIME, *FAULTS, *MARKS, *WISHES, *OTHERS, *OPERATOR, *dying)


def mend(cluster: FakeCluster) -> None:
    """Nothing is broken any more, and the user wants what was wanted first."""
    for name in cluster.first_nodes:
        cluster.clear_node(name)
    cluster.fleet, cluster.dirty = FleetView(), True
    cluster.others.clear()
    cluster.wishes = cluster.gang_waits = 0
    if cluster.spec.suspend:
        cluster.suspend(False)
    if cluster.spec.workers.replicas != 2:
        cluster.change(replicas=2)
