"""Any sequence of faults, user changes and operator crashes keeps the invariants and ends in training or a verdict."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.testing.suite.trials import trials
from tests.unit.plan import plan_builders as build
from tests.unit.plan.explorer.oracles import check_step, describe, has_converged
from tests.unit.plan.explorer.transitions import repair
from tests.unit.plan.plan_builders import NOW
from tests.unit.plan.plan_cluster import FakeCluster
from tests.unit.plan.plan_results import check_ledger
from trainium_contract.faults.causes import Cause
from trainium_contract.status.conditions import Phase
from trainium_operator.plan.model.observed import FleetView, NodeCondition, NodeReadiness, PodPhase, Taint

NODES = 6
BOUND_SECONDS = 420
MARKS: list[dict[str, Any]] = [
    {"condition": NodeCondition("NeuronHealth", NodeReadiness.TRUE, "NeuronHasError_HBM")},
    {"condition": NodeCondition("NetworkingReady", NodeReadiness.FALSE, "IPAMDNotReady", since=NOW)},
    {"condition": NodeCondition("", NodeReadiness.UNKNOWN, "\x00" * 300, since=1e300)},
    {"schedulable": False},
    {"deleting": True},
]
RANKS, NUMBERS, PODS = st.integers(0, 5), st.integers(0, 2), st.integers(0, 9)
NODE = st.builds("node-{}".format, st.integers(0, NODES - 1))
NOTICES = [
    Taint(key, "", "NoSchedule")
    for key in ("aws-node-termination-handler/spot-itn", "karpenter.sh/disrupted", "node.kubernetes.io/out-of-service")
]
ENDS = [(PodPhase.FAILED, 75), (PodPhase.SUCCEEDED, 0), (PodPhase.RUNNING, 0)]
"""Phase and exit code of a pod that was asked to end; with a sidecar it runs on."""


def event(do: Callable[..., object], **arguments: st.SearchStrategy[Any]) -> Any:
    """Return the rule that something happens in the cluster, and that time may pass afterwards."""

    def happens(machine: "AnyHistory", pause: int, **values: Any) -> None:
        do(machine.cluster, **values)
        machine.cluster.run(pause)

    happens.__name__ = do.__name__
    return rule(pause=st.sampled_from([0, 0, 1, 5]), **arguments)(happens)


def on_pod(do: Callable[..., object], **arguments: st.SearchStrategy[Any]) -> Any:
    """Return the rule that something happens to any pod."""

    def happens(cluster: FakeCluster, pick: int, **values: Any) -> None:
        if cluster.pods:
            do(cluster, sorted(cluster.pods)[pick % len(cluster.pods)], **values)

    happens.__name__ = do.__name__
    return event(happens, pick=PODS, **arguments)


def ask_pods_to_end(cluster: FakeCluster, first: int, count: int, end: tuple[PodPhase, int]) -> None:
    for name in sorted(cluster.pods)[first : first + count]:
        cluster.kill_pod(name, *end)


def delete_pod(cluster: FakeCluster, name: str, grace: int | None) -> None:
    cluster._delete(name, cluster.pods[name].view.uid, grace)


def mark_node(cluster: FakeCluster, name: str, mark: dict[str, Any]) -> None:
    cluster.mark_node(name, **mark)


def ban_node_or_freeze_fleet(cluster: FakeCluster, name: str, frozen: str) -> None:
    banned = cluster.fleet.quarantined ^ {name}
    cluster.fleet, cluster.dirty = FleetView(quarantined=frozenset(sorted(banned)[:2]), frozen=frozen), True


def scale(cluster: FakeCluster, replicas: int) -> None:
    if replicas >= (cluster.spec.workers.min_replicas or 0):
        cluster.change(replicas=replicas)


class AnyHistory(RuleBasedStateMachine):
    """A job of 4 workers and a spare that may shrink to 2, on 6 nodes."""

    @initialize(spares=NUMBERS, elastic=st.booleans())
    def begin(self, spares: int, elastic: bool) -> None:
        workers = {"replicas": 4, "spares": spares, **({"minReplicas": 2} if elastic else {})}
        recovery = {"rescaleAfterSeconds": 30, "budgets": {"process": {"maxFailures": 50}}}
        self.cluster = FakeCluster(build.spec(workers=workers, recovery=recovery, trainer={"steps": 10**6}), NODES)
        self.cluster.run(12)
        self.ranks: dict[str, int] = {}
        self.seen_generation = 0
        self.last_status = self.cluster.status

    crash = event(FakeCluster.crash_process, rank=RANKS, code=st.sampled_from([1, 137, 139]))
    hang = event(FakeCluster.crash_process, rank=RANKS, code=st.just(137), cause=st.just(Cause.HANG))
    verdict = event(FakeCluster.give_up, rank=RANKS, code=st.sampled_from([139, 80]))
    preflight = on_pod(FakeCluster.fail_preflight, code=st.sampled_from([80, 1]))
    kill = on_pod(FakeCluster.kill_pod)
    ends = event(ask_pods_to_end, first=RANKS, count=st.integers(1, 6), end=st.sampled_from(ENDS))
    deletion = on_pod(delete_pod, grace=st.sampled_from([None, 0]))
    device_taint = on_pod(
        FakeCluster.taint_device, effect=st.sampled_from(["None", "NoSchedule", "NoExecute"]), evicts=st.booleans()
    )
    loss = event(FakeCluster.lose_node, name=NODE)
    boot = event(FakeCluster.restore_node, name=NODE)
    thaw = event(FakeCluster.resume_node, name=NODE)
    partition = event(FakeCluster.partition_node, name=NODE, partitioned=st.booleans())
    scale_in = event(FakeCluster.delete_node, name=NODE)
    slowness = event(FakeCluster.slow_node, name=NODE)
    mark = event(mark_node, name=NODE, mark=st.sampled_from(MARKS))
    notice = event(FakeCluster.mark_node, name=NODE, taint=st.sampled_from(NOTICES))
    withdrawal = event(FakeCluster.clear_node, name=NODE)
    ban = event(ban_node_or_freeze_fleet, name=NODE, frozen=st.sampled_from(["", "2 of 6 nodes are bad"]))
    scaling = event(scale, replicas=st.integers(2, 6))
    spares = event(FakeCluster.change, spares=NUMBERS)
    elasticity = event(FakeCluster.change, min_replicas=st.sampled_from([None, 2]))
    template = event(FakeCluster.change, template=st.builds(lambda number: {"spec": {"priority": number}}, NUMBERS))
    operator_crash = event(FakeCluster.reconcile, crash_after=st.integers(0, 6))
    operator_outage = event(FakeCluster.crash_operator, seconds=st.sampled_from([3.0, 20.0]))
    time = event(FakeCluster.run, seconds=st.sampled_from([1, 2, 5, 12]))

    @rule()
    def the_user_suspends_or_resumes(self) -> None:
        self.cluster.suspend(not self.cluster.spec.suspend)
        self.ranks = {}  # a suspension ends the generation: pods that it did not delete get new ranks

    @invariant()
    def survivors_keep_their_ranks_at_the_same_size(self) -> None:
        membership = self.cluster.membership if hasattr(self, "cluster") else None
        if membership is None or membership.generation == self.seen_generation:
            return
        ranks = {member.pod_uid: member.node_rank for member in membership.members}
        if len(ranks) == len(self.ranks):
            moved = {uid for uid, rank in ranks.items() if self.ranks.get(uid, rank) != rank}
            assert not moved
        self.ranks, self.seen_generation = ranks, membership.generation

    @invariant()
    def the_status_is_bounded_and_the_ledger_adds_up(self) -> None:
        if not hasattr(self, "cluster"):
            return
        status, before = self.cluster.status, self.last_status
        check_step(before, self.cluster)
        assert status.phase is not Phase.COMPLETED, "its last step is far"
        assert len(status.model_dump_json()) < 100_000
        check_ledger(status.goodput)
        assert status.goodput.wall_seconds >= before.goodput.wall_seconds
        assert status.goodput.counted_step <= self.cluster.best_step
        assert sum(account.steps for account in status.goodput.sizes) <= self.cluster.best_step
        self.last_status = status

    def teardown(self) -> None:
        """Repair everything and assert that the job trains at its size, or has a verdict, within a bound."""
        if not hasattr(self, "cluster"):
            return
        cluster = self.cluster
        repair(cluster, replicas=4)
        cluster.run(25)
        waited = 25
        while waited < BOUND_SECONDS and not has_converged(cluster):
            cluster.run(10)
            waited += 10
        assert has_converged(cluster), describe(cluster)
        cluster.settle()
        result = cluster.reconcile()
        assert result is not None
        assert result.actions == ()


TestAnyHistory = pytest.mark.timeout(300)(AnyHistory.TestCase)
TestAnyHistory.settings = settings(
    max_examples=trials(20),
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
