"""Stragglers: they are always reported, and replaced or left out only while the job is otherwise stable."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import NOW
from tests.unit.plan.plan_cluster import FakeCluster
from tests.unit.plan.plan_results import PlanResult, make_plan
from trainium_contract.faults.causes import Cause
from trainium_contract.status.conditions import Phase
from trainium_contract.status.interruptions import RecoveryResponse
from trainium_contract.status.public import StragglerStatus
from trainium_contract.wire.messages import StepTiming, Transition, WorkerPhase
from trainium_operator.plan.model.observed import FleetView
from trainium_operator.plan.model.reasons import Reason

SLOW = "demo-w-1"
RESIZE_OF_30_SECONDS = build.interruption(RecoveryResponse.REPLACE, ago=870, took=30.0, cause=Cause.POD_LOST)


def agent_with_step_time(ordinal: int, own: float, step: int = 200, wait: float | None = None) -> Any:
    timing = StepTiming(steps=20, step_seconds=2.0, own_seconds=own, cpu_wait=wait)
    return build.training_agent(ordinal, step=step, timing=timing)


def job_with_straggler(
    own: float = 1.5, *, step: int = 200, spares: int = 1, stragglers: tuple[Any, ...] = (), **changes: Any
) -> Any:
    """Return four members; a step takes the second one `own` seconds and the others one."""
    agents = {
        ordinal: agent_with_step_time(ordinal, own if ordinal == 1 else 1.0 + ordinal / 100, step)
        for ordinal in range(4)
    }
    agents |= changes.pop("agents", {})
    job_spec = build.spec(workers={"replicas": 4, "spares": spares}, recovery=changes.pop("recovery", {}))
    status = {"stragglers": stragglers, "progress": {"step": step}, **changes.pop("status", {})}
    return build.running_job(4, spares=spares, job_spec=job_spec, agents=agents, status=status, **changes)


def on_loaded_hosts(own: float, waits: tuple[float | None, ...], reported: bool = True) -> Any:
    agents = {
        ordinal: agent_with_step_time(ordinal, own if ordinal == 1 else 1.0, wait=wait)
        for ordinal, wait in enumerate(waits)
    }
    return job_with_straggler(agents=agents, step=200, stragglers=(straggler_record(reported=reported),))


@pytest.mark.parametrize(
    ("own", "waits", "evicted"),
    [
        (2.0, (0.3, 0.65, 0.3, 0.3), False),  # without its waits it keeps pace, and all wait: the host is loaded
        (2.0, (0.3, 0.3, 0.3, 0.3), True),  # it waits as the others do, and is slow besides
        (2.0, (0.01, 0.65, 0.02, 0.0), True),  # only its own node is loaded: another one is better
        (2.0, (0.3, None, 0.3, 0.3), True),  # without reported waits a member is a straggler
        (2.0, (0.3, 0.65, 0.3, None), True),  # neither does it when one of the others cannot report them
        (2.0, (None, None, None, None), True),
    ],
)
def test_a_straggler_on_hosts_that_are_all_loaded_is_not_replaced(
    own: float, waits: tuple[float | None, ...], evicted: bool
) -> None:
    assert (make_plan(on_loaded_hosts(own, waits)).published_membership is not None) is evicted
    notes = [event.note for event in make_plan(on_loaded_hosts(own, waits, reported=False)).events]
    assert any("waits for a processor, as the others do" in note for note in notes) is not evicted


def straggler_record(*, since: int = 100, reported: bool = False) -> StragglerStatus:
    return StragglerStatus(pod=SLOW, node="node-1", since_step=since, slowdown=1.5, reported=reported)


def event_reasons(result: PlanResult) -> list[str]:
    return [event.reason for event in result.events]


def test_a_new_straggler_is_recorded_and_not_reported() -> None:
    result = make_plan(job_with_straggler())
    assert [(straggler.pod, straggler.since_step, straggler.reported) for straggler in result.status.stragglers] == [
        (SLOW, 200, False)
    ]
    assert [straggler.slowdown for straggler in result.status.stragglers] == [1.47], (
        "1.5 s, and the median member 1.02 s"
    )
    assert Reason.STRAGGLER_DETECTED not in event_reasons(result)
    assert result.published_membership is None


def test_of_two_members_the_slower_one_is_a_straggler() -> None:
    agents = {0: agent_with_step_time(0, 1.0), 1: agent_with_step_time(1, 1.5)}
    result = make_plan(build.running_job(2, agents=agents, status={"progress": {"step": 200}}))
    assert [(straggler.pod, straggler.slowdown) for straggler in result.status.stragglers] == [(SLOW, 1.5)]


def test_a_persistent_straggler_is_reported_once() -> None:
    result = make_plan(job_with_straggler(step=150, spares=0, stragglers=(straggler_record(),)))
    assert event_reasons(result).count(Reason.STRAGGLER_DETECTED) == 1
    (straggler,) = result.status.stragglers
    assert straggler.reported
    again = make_plan(job_with_straggler(step=160, spares=0, stragglers=(straggler,)))
    assert Reason.STRAGGLER_DETECTED not in event_reasons(again)
    assert again.status.stragglers == (straggler,), "no status write while nothing changes"
    assert again.published_membership is None


def test_a_persistent_straggler_goes_gracefully_to_the_spare_and_uses_no_budget_of_the_user() -> None:
    result = make_plan(job_with_straggler(stragglers=(straggler_record(reported=True),)))
    assert result.published_members == ["demo-w-0", "demo-w-4", "demo-w-2", "demo-w-3"]
    assert result.published_membership.transition is Transition.GRACEFUL
    assert result.newest_entry.cause is Cause.STRAGGLER
    assert result.newest_entry.response is RecoveryResponse.SPARE
    assert "1.47 times as long" in result.newest_entry.message
    assert [(record.cause, record.node) for record in result.status.failures] == [(Cause.STRAGGLER, "node-1")]
    assert result.deleted_pods == {SLOW: None}


@pytest.mark.parametrize(
    "changes",
    [
        {"recovery": {"stragglers": {"evict": False}}},
        {"recovery": {"stragglers": {"slowdown": 2.0}}},
        {"spares": 0},
        {"fleet": FleetView(frozen="30 % of the nodes are bad at once")},
        {"agents": {4: build.agent(4, ready=False)}},
        {"agents": {0: build.agent(0, WorkerPhase.LOADING, generation=1)}},
        {
            "status": {
                "avoided_nodes": ("node-4",),
                "failures": ({"at": NOW - 9, "cause": "NodeLost", "node": "node-4"},),
            }
        },
        {"status": {"history": (build.interruption(RecoveryResponse.IN_PLACE, ago=5, took=None, decided_at=None),)}},
    ],
    ids=["not allowed", "limit raised", "no spare", "frozen", "cold spare", "not settled", "bad spare", "recovering"],
)
def test_a_straggler_is_kept_while_eviction_is_unsafe(changes: Any) -> None:
    result = make_plan(job_with_straggler(stragglers=(straggler_record(reported=True),), **changes))
    assert result.published_membership is None
    assert SLOW not in result.deleted_pods


def elastic_job(own: float, *, least: int = 1, batch: int = 24, steps: int = 10**6, **changes: Any) -> Any:
    """Return a job that may shrink and has no spare; a step takes as long as the slow member."""
    status = {
        "stragglers": (straggler_record(reported=True),),
        "progress": {"step": 200, "totalSteps": steps},
        **changes.pop("status", {}),
    }
    timed = {
        ordinal: build.training_agent(
            ordinal, step=200, timing=StepTiming(steps=20, step_seconds=own, own_seconds=own if ordinal == 1 else 1.0)
        )
        for ordinal in range(4)
    }
    job_spec = build.spec(
        workers={"replicas": 4, "minReplicas": least},
        trainer={"batch": {"globalSize": batch}, "steps": steps},
        recovery={"rescaleAfterSeconds": 600},
        **changes.pop("more", {}),
    )
    timed |= changes.pop("agents_more", {})
    return build.running_job(4, job_spec=job_spec, agents=timed, status=status, **changes)


@pytest.mark.parametrize(
    ("own", "batch", "left_out"),
    [
        (1.30, 24, False),  # three nodes have 8 passes for 6, 75 %: with it the job has 77 %
        (1.50, 24, True),  # with it 67 %
        (1.39, 24, False),  # a little faster is not worth it
        (1.30, 12, False),  # 4 passes for 3
        (1.30, 21, True),  # 7 passes for 6, 86 %
    ],
)
def test_without_a_spare_a_straggler_is_left_out_if_the_others_are_faster(
    own: float, batch: int, left_out: bool
) -> None:
    result = make_plan(elastic_job(own, batch=batch))
    assert (result.published_membership is not None) is left_out
    if left_out:
        assert result.published_members == ["demo-w-0", "demo-w-3", "demo-w-2"]
        assert result.published_membership.transition is Transition.GRACEFUL
        assert result.newest_entry.response is RecoveryResponse.SHRINK
        assert "the others are faster without it" in result.newest_entry.message
        assert result.deleted_pods == {SLOW: None}


@pytest.mark.parametrize(
    "changes",
    [
        {"least": 4},
        {"steps": 210, "status": {"progress": {"step": 200, "totalSteps": 210}, "history": (RESIZE_OF_30_SECONDS,)}},
        {"agents_more": {3: build.training_agent(3, step=200)}},
        {"more": {"precompile": {"enabled": True}}},
    ],
    ids=["floor", "few steps left", "one does not report", "no graphs"],
)
def test_a_straggler_is_kept_if_the_others_may_not_be_faster(changes: Any) -> None:
    assert make_plan(elastic_job(3.0, **changes)).published_membership is None


@pytest.mark.parametrize(("steps_left", "left_out"), [(35, False), (40, True)])
def test_a_straggler_is_left_out_if_the_remaining_steps_repay_two_resizes(steps_left: int, left_out: bool) -> None:
    total = 200 + steps_left
    status = {"progress": {"step": 200, "totalSteps": total}, "history": (RESIZE_OF_30_SECONDS,)}
    # A step takes 3 s with it and 1.33 s without: 36 steps save two changes of 30 s.
    assert (make_plan(elastic_job(3.0, steps=total, status=status)).published_membership is not None) is left_out


def test_straggler_detection_has_hysteresis() -> None:
    assert make_plan(job_with_straggler(own=1.15)).status.stragglers == ()
    between = make_plan(job_with_straggler(own=1.15, stragglers=(straggler_record(reported=True),)))
    assert [straggler.pod for straggler in between.status.stragglers] == [SLOW]
    assert between.published_membership is None, "in between it is not evicted"
    better = make_plan(job_with_straggler(own=1.05, stragglers=(straggler_record(reported=True),)))
    assert better.status.stragglers == ()
    assert event_reasons(better).count(Reason.STRAGGLER_RECOVERED) == 1


def test_tiny_differences_are_ignored() -> None:
    fast = {ordinal: agent_with_step_time(ordinal, 0.04 if ordinal == 1 else 0.01) for ordinal in range(4)}
    assert make_plan(job_with_straggler(agents=fast)).status.stragglers == ()


def test_a_missing_member_is_forgotten_and_repeated_steps_count_again() -> None:
    other = straggler_record(reported=True).model_copy(update={"pod": "demo-w-77"})
    assert SLOW in {straggler.pod for straggler in make_plan(job_with_straggler(stragglers=(other,))).status.stragglers}
    assert "demo-w-77" not in {
        straggler.pod for straggler in make_plan(job_with_straggler(stragglers=(other,))).status.stragglers
    }
    back = make_plan(job_with_straggler(step=90, stragglers=(straggler_record(since=100),)))
    assert back.status.stragglers[0].since_step == 90


def test_stragglers_are_unknown_while_a_member_does_not_report() -> None:
    silent = {3: build.training_agent(3, step=200)}
    assert make_plan(job_with_straggler(agents=silent)).status.stragglers == ()


def test_of_two_stragglers_the_slower_one_goes_first() -> None:
    agents = {1: agent_with_step_time(1, 1.5), 2: agent_with_step_time(2, 3.0)}
    second = straggler_record(reported=True).model_copy(update={"pod": "demo-w-2", "node": "node-2"})
    result = make_plan(job_with_straggler(agents=agents, stragglers=(straggler_record(reported=True), second)))
    assert result.deleted_pods == {"demo-w-2": None}


@given(st.lists(st.floats(0.2, 50), min_size=4, max_size=4))
def test_at_most_half_of_the_members_are_stragglers(own: list[float]) -> None:
    agents = {ordinal: agent_with_step_time(ordinal, seconds) for ordinal, seconds in enumerate(own)}
    result = make_plan(job_with_straggler(agents=agents))
    assert len(result.status.stragglers) <= 2
    fastest = min(range(4), key=lambda ordinal: own[ordinal])
    assert f"demo-w-{fastest}" not in {straggler.pod for straggler in result.status.stragglers}


def test_a_recorded_straggler_is_stable() -> None:
    observed = job_with_straggler(spares=0, stragglers=(straggler_record(reported=True),))
    first = make_plan(observed)
    again = make_plan(build.with_status(observed, first.status))
    assert again.status.stragglers == first.status.stragglers
    assert not [event for event in again.events if event.reason.startswith("Straggler")]


def start_job(nodes: int) -> FakeCluster:
    job_spec = build.spec(
        workers={"replicas": 4, "minReplicas": 1}, recovery={"rescaleAfterSeconds": 30}, trainer={"steps": 10**7}
    )
    cluster = FakeCluster(job_spec, nodes)
    cluster.run(60)
    assert cluster.status.membership.size == 4
    assert any(account.step_seconds for account in cluster.status.goodput.sizes)
    return cluster


def test_without_a_free_node_a_straggler_is_left_out_for_good() -> None:
    cluster = start_job(4)
    slow = cluster.node_of_rank(-1)
    cluster.slow_node(slow)
    cluster.run(120)
    assert cluster.status.membership.size == 3
    assert slow not in {pod.view.node for pod in cluster.members()}
    entry = cluster.newest_entry
    assert (entry.cause, entry.response) == (Cause.STRAGGLER, RecoveryResponse.SHRINK)

    cluster.run(1800)
    assert cluster.status.membership.size == 3
    assert len(cluster.status.history) == 1
    assert cluster.status.phase is Phase.RUNNING


def test_with_a_free_node_a_straggler_is_replaced() -> None:
    cluster = start_job(5)
    slow = cluster.node_of_rank(-1)
    cluster.slow_node(slow)
    cluster.run(300)
    assert cluster.status.membership.size == 4
    assert slow not in {pod.view.node for pod in cluster.members()}
