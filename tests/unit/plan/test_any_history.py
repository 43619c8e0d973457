"""Any sequence of faults, user changes and operator crashes keeps the invariants and ends in training or a verdict."""

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.testing.suite.trials import trials
from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import NOW
from tests.unit.plan.plan_cluster import FakeCluster
from tests.unit.plan.plan_results import check_ledger
from trainium_contract.faults.causes import Cause
from trainium_contract.faults.classify import classify_exit_code
from trainium_contract.status.conditions import Phase
from trainium_operator.plan.model.conditions import is_terminal
from trainium_operator.plan.model.observed import FleetView, NodeCondition, NodeReadiness, PodPhase, Taint

NODES = 6
BOUND_SECONDS = 420
MARKS: dict[str, dict[str, Any]] = {
    "device": {"condition": NodeCondition("NeuronHealth", NodeReadiness.TRUE, "NeuronHasError_HBM")},
    "network": {"condition": NodeCondition("NetworkingReady", NodeReadiness.FALSE, "IPAMDNotReady", since=NOW)},
    "malformed": {"condition": NodeCondition("", NodeReadiness.UNKNOWN, "\x00" * 300, since=1e300)},
    "spot": {"taint": Taint("aws-node-termination-handler/spot-itn")},
    "cordon": {"schedulable": False},
    "deletion": {"deleting": True},
}
RANKS = st.integers(0, 5)
SPOT = "aws-node-termination-handler/spot-itn"
KARPENTER = "karpenter.sh/disrupted"
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
ENDS = [(PodPhase.FAILED, 75), (PodPhase.SUCCEEDED, 0), (PodPhase.RUNNING, 0)]
"""Phase and exit code of a pod that was asked to end; with a sidecar it runs on."""


class AnyHistory(RuleBasedStateMachine):
    """A job of 4 workers and a spare that may shrink to 2, on 6 nodes."""

    @initialize(spares=st.integers(0, 2), elastic=st.booleans())
    def begin(self, spares: int, elastic: bool) -> None:
        workers = {"replicas": 4, "spares": spares, **({"minReplicas": 2} if elastic else {})}
        recovery = {"rescaleAfterSeconds": 30, "budgets": {"process": {"maxFailures": 50}}}
        self.cluster = FakeCluster(build.spec(workers=workers, recovery=recovery, trainer={"steps": 10**6}), NODES)
        self.cluster.run(12)
        self.ranks: dict[str, int] = {}
        self.seen_generation = 0
        self.wall_seconds = 0.0

    @rule(rank=RANKS, code=st.sampled_from([1, 137, 139]))
    def a_process_crashes(self, rank: int, code: int) -> None:
        self.cluster.crash_process(rank, code)

    @rule(rank=RANKS, code=st.sampled_from([139, 80]))
    def an_agent_gives_up(self, rank: int, code: int) -> None:
        assert classify_exit_code(code)
        self.cluster.give_up(rank, code)

    @rule(pick=st.integers(0, 9))
    def a_pod_is_killed(self, pick: int) -> None:
        if self.cluster.pods:
            self.cluster.kill_pod(sorted(self.cluster.pods)[pick % len(self.cluster.pods)])

    @rule(first=st.integers(0, 5), count=st.integers(1, 6), end=st.sampled_from(ENDS))
    def pods_are_asked_to_end(self, first: int, count: int, end: tuple[PodPhase, int]) -> None:
        for name in sorted(self.cluster.pods)[first : first + count]:
            self.cluster.kill_pod(name, *end)

    @rule(pick=st.integers(0, 9), grace=st.sampled_from([None, 0]))
    def a_pod_is_deleted(self, pick: int, grace: int | None) -> None:
        if self.cluster.pods:
            pod = self.cluster.pods[sorted(self.cluster.pods)[pick % len(self.cluster.pods)]]
            self.cluster._delete(pod.view.name, pod.view.uid, grace)

    @rule(pick=st.integers(0, 9), effect=st.sampled_from(["None", "NoSchedule", "NoExecute"]), evicts=st.booleans())
    def a_device_is_tainted(self, pick: int, effect: str, evicts: bool) -> None:
        if self.cluster.pods:
            name = sorted(self.cluster.pods)[pick % len(self.cluster.pods)]
            self.cluster.taint_device(name, effect, evicts=evicts)

    @rule(number=st.integers(0, NODES - 1))
    def a_node_is_lost(self, number: int) -> None:
        self.cluster.lose_node(f"node-{number}")

    @rule(number=st.integers(0, NODES - 1))
    def a_node_comes_back(self, number: int) -> None:
        self.cluster.restore_node(f"node-{number}")

    @rule(number=st.integers(0, NODES - 1))
    def a_lost_node_was_only_frozen(self, number: int) -> None:
        self.cluster.resume_node(f"node-{number}")

    @rule(number=st.integers(0, NODES - 1), partitioned=st.booleans())
    def the_network_to_a_nodes_agents_is_cut_or_mended(self, number: int, partitioned: bool) -> None:
        self.cluster.partition_node(f"node-{number}", partitioned=partitioned)

    @rule(number=st.integers(0, NODES - 1))
    def a_node_is_deleted(self, number: int) -> None:
        self.cluster.delete_node(f"node-{number}")

    @rule(number=st.integers(0, NODES - 1), mark=st.sampled_from(sorted(MARKS)))
    def something_is_written_on_a_node(self, number: int, mark: str) -> None:
        self.cluster.mark_node(f"node-{number}", **MARKS[mark])

    @rule(number=st.integers(0, NODES - 1))
    def a_node_gets_slow(self, number: int) -> None:
        self.cluster.slow_node(f"node-{number}")

    @rule(number=st.integers(0, NODES - 1), frozen=st.booleans())
    def the_fleet_bans_a_node_or_may_not_be_acted_on(self, number: int, frozen: bool) -> None:
        banned = self.cluster.fleet.quarantined ^ {f"node-{number}"}
        why = "2 of 6 nodes are bad" if frozen else ""
        self.cluster.fleet = FleetView(quarantined=frozenset(sorted(banned)[:2]), frozen=why)
        self.cluster.dirty = True

    @rule(rank=RANKS)
    def a_process_stalls(self, rank: int) -> None:
        self.cluster.crash_process(rank, 137, Cause.HANG)

    @rule(pick=st.integers(0, 9), code=st.sampled_from([80, 1]))
    def a_preflight_fails(self, pick: int, code: int) -> None:
        if self.cluster.pods:
            self.cluster.fail_preflight(sorted(self.cluster.pods)[pick % len(self.cluster.pods)], code)

    @rule(replicas=st.sampled_from([2, 3, 4, 5, 6]))
    def the_user_scales(self, replicas: int) -> None:
        low = self.cluster.spec.workers.min_replicas or 0
        if replicas >= low:
            self.cluster.change(replicas=replicas)

    @rule(number=st.integers(0, NODES - 1), key=st.sampled_from([SPOT, KARPENTER, OUT_OF_SERVICE]))
    def a_node_gives_notice(self, number: int, key: str) -> None:
        self.cluster.mark_node(f"node-{number}", taint=Taint(key, "", "NoSchedule"))

    @rule(number=st.integers(0, NODES - 1))
    def a_notice_is_withdrawn(self, number: int) -> None:
        self.cluster.clear_node(f"node-{number}")

    @rule(spares=st.integers(0, 2))
    def the_user_wants_another_number_of_spares(self, spares: int) -> None:
        self.cluster.change(spares=spares)

    @rule(elastic=st.booleans())
    def the_user_makes_the_job_elastic_or_rigid(self, elastic: bool) -> None:
        self.cluster.change(min_replicas=2 if elastic else None)

    @rule(priority=st.integers(0, 2))
    def the_user_changes_the_template(self, priority: int) -> None:
        self.cluster.change(template={"spec": {"priority": priority}})

    @rule()
    def the_user_suspends_or_resumes(self) -> None:
        self.cluster.suspend(not self.cluster.spec.suspend)
        self.ranks = {}  # a suspension ends the generation: pods that it did not delete get new ranks

    @rule(writes=st.integers(0, 6))
    def the_operator_dies_in_the_middle_of_its_writes(self, writes: int) -> None:
        self.cluster.reconcile(crash_after=writes)

    @rule(seconds=st.sampled_from([3.0, 20.0]))
    def the_operator_is_away(self, seconds: float) -> None:
        self.cluster.crash_operator(seconds)

    @rule(seconds=st.sampled_from([1, 2, 5, 12]))
    def time_passes(self, seconds: int) -> None:
        self.cluster.run(seconds)

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
    def a_job_whose_last_step_is_far_is_not_complete(self) -> None:
        assert not hasattr(self, "cluster") or self.cluster.status.phase is not Phase.COMPLETED

    @invariant()
    def the_status_is_bounded_and_the_ledger_adds_up(self) -> None:
        if not hasattr(self, "cluster"):
            return
        status = self.cluster.status
        assert len(status.model_dump_json()) < 100_000
        assert status.restarts.total == sum(status.restarts.by_cause.values())
        check_ledger(status.goodput)
        assert status.goodput.wall_seconds >= self.wall_seconds
        assert status.goodput.counted_step <= self.cluster.best_step
        assert sum(account.steps for account in status.goodput.sizes) <= self.cluster.best_step
        self.wall_seconds = status.goodput.wall_seconds

    def teardown(self) -> None:
        """Repair everything and assert that the job trains at its size, or has a verdict, within a bound."""
        if not hasattr(self, "cluster"):
            return
        cluster = self.cluster
        for node in cluster.first_nodes:
            cluster.clear_node(node)
        cluster.fleet = FleetView()
        if cluster.spec.suspend:
            cluster.suspend(False)
        cluster.change(replicas=4)
        cluster.run(25)
        waited = 25
        while waited < BOUND_SECONDS and not self._has_converged():
            cluster.run(10)
            waited += 10
        assert self._has_converged(), cluster.status
        cluster.settle()
        result = cluster.reconcile()
        assert result is not None
        assert result.actions == ()
        if not is_terminal(cluster.status):
            assert cluster.status.waiting_since is None

    def _has_converged(self) -> bool:
        status = self.cluster.status
        if is_terminal(status):
            return True
        wanted = status.desired + self.cluster.spec.workers.spares
        trains = status.phase is Phase.RUNNING and status.replicas == status.desired
        recovered = all(entry.recovered_seconds is not None for entry in status.history)
        return trains and recovered and len(self.cluster.pods) == wanted


TestAnyHistory = pytest.mark.timeout(300)(AnyHistory.TestCase)
TestAnyHistory.settings = settings(
    max_examples=trials(20),
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
