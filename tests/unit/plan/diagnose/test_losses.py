from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan.plan_builders import (
    NOW,
    agent,
    created,
    deleted,
    failure,
    newest,
    node,
    planned,
    pod,
    published,
    running,
    spec,
    training,
    with_pod,
    without,
)
from trainium_contract.faults.causes import Cause
from trainium_contract.status.conditions import Phase
from trainium_contract.status.interruptions import Rung
from trainium_contract.wire.messages import Progress, Transition, WorkerPhase
from trainium_operator.plan.model.observed import AgentView, FleetView, NodeReadiness, PodPhase

LOST = pod(1).name


def joining(at: Any, **changes: Any) -> Any:
    return agent(at, WorkerPhase.JOINING, generation=1, **changes)


def waiting_for_rank_1() -> Any:
    return {at: joining(at, attempt=1, waiting_for=(1,)) for at in (0, 2, 3)}


@pytest.mark.parametrize(
    ("changes", "cause", "grace"),
    [
        ({"phase": PodPhase.FAILED, "reason": "Error", "exit_code": 137, "finished": NOW - 1}, Cause.POD_LOST, None),
        ({"phase": PodPhase.FAILED, "reason": "OOMKilled", "exit_code": 137, "finished": NOW - 1}, Cause.MEMORY, None),
        ({"phase": PodPhase.FAILED, "reason": "Evicted"}, Cause.PREEMPTED, None),
        ({"phase": PodPhase.FAILED, "reason": "Error", "exit_code": 1, "disrupted": True}, Cause.PREEMPTED, None),
        ({"phase": PodPhase.FAILED, "reason": "NodeLost"}, Cause.NODE_LOST, None),
        ({"phase": PodPhase.FAILED, "reason": "Error", "exit_code": 80}, Cause.DEVICE, None),
    ],
)
def test_the_cause_of_an_ended_member_comes_from_its_pod(changes: Any, cause: Any, grace: Any) -> None:
    result = planned(with_pod(running(4), pod(1, **changes)))
    assert newest(result).cause is cause
    assert newest(result).pod == LOST
    assert deleted(result) == {LOST: grace}
    assert created(result) == ["demo-w-4"]
    assert published(result) is None
    assert result.status.phase is Phase.RECOVERING


def test_a_member_without_a_pod_is_lost() -> None:
    result = planned(without(running(4), 1))
    assert newest(result).cause is Cause.POD_LOST
    assert newest(result).rung is Rung.REPLACE
    assert deleted(result) == {}


def test_the_pod_of_a_deleted_node_is_force_deleted() -> None:
    seen = running(4, agents={1: training(1, silent=2.0)})
    result = planned(replace(seen, nodes={name: view for name, view in seen.nodes.items() if name != "node-1"}))
    assert newest(result).cause is Cause.NODE_LOST
    assert deleted(result) == {LOST: 0}


@pytest.mark.parametrize("at", [1, 4], ids=["member", "spare"])
def test_a_worker_with_a_recent_heartbeat_survives_a_missing_node_object(at: int) -> None:
    seen = running(4, spares=1)
    result = planned(replace(seen, nodes={name: view for name, view in seen.nodes.items() if name != f"node-{at}"}))
    assert deleted(result) == {}
    assert result.status.history == ()
    assert result.requeue_after == pytest.approx(1.5), "its silence will confirm it"


def test_only_silent_members_that_others_wait_for_are_lost() -> None:
    dark = {at: training(at, silent=60) for at in (1, 2)}
    nodes = {f"node-{at}": node(f"node-{at}", NodeReadiness.UNKNOWN) for at in (1, 2)}
    seen = running(8, agents=dark)
    result = planned(replace(seen, nodes={**seen.nodes, **nodes}))
    assert deleted(result) == {}
    waiting = {at: joining(at, attempt=1, waiting_for=(1, 2)) for at in (0, 3, 4, 5, 6, 7)}
    seen = running(8, agents={**dark, **waiting})
    result = planned(replace(seen, nodes={**seen.nodes, **nodes}))
    assert deleted(result) == {"demo-w-1": 0, "demo-w-2": 0}


def test_a_frozen_fleet_keeps_a_silent_worker() -> None:
    seen = running(1, agents={0: training(0, silent=60)}, nodes={"node-0": node("node-0", NodeReadiness.UNKNOWN)})
    assert deleted(planned(seen)) == {"demo-w-0": 0}
    result = planned(replace(seen, fleet=FleetView(frozen="130 of 130 nodes are bad")))
    assert deleted(result) == {}
    assert any(each.reason == "ContactLost" for each in result.status.conditions)
    assert [each.reason for each in result.events].count("ContactLost") == 1


def others(progressed: float, step_seconds: float, *, silent: float = 0.5) -> dict[int, AgentView]:
    """Return the agents of the other members, which made their last step `progressed` seconds ago."""
    return {at: training(at, silent=silent, progressed=NOW - progressed, step_seconds=step_seconds) for at in (0, 2, 3)}


CUT_OFF = others(3.2, 0.5, silent=3.2)
"""All members lost the network at once: the others are silent for a moment less, and no step is made."""


@pytest.mark.parametrize(
    ("silent", "agents", "requeue_after"),
    [
        pytest.param(3.0, {}, 1.0, id="silence alone, until its deadline"),
        pytest.param(30, others(0.5, 0.5), None, id="the others make steps"),
        pytest.param(5, others(20, 10), 3.5, id="steps are long"),
        pytest.param(4.1, CUT_OFF, None, id="the others were cut off a moment later"),
    ],
)
def test_a_silent_member_is_kept_and_checked_again(
    silent: float, agents: dict[int, AgentView], requeue_after: float | None
) -> None:
    result = planned(running(4, agents={1: training(1, silent=silent), **agents}))
    assert result.status.history == ()
    assert result.requeue_after is not None
    assert requeue_after in (None, pytest.approx(result.requeue_after))


@pytest.mark.parametrize(
    ("silent", "agents"),
    [
        pytest.param(4.5, others(3.5, 0.5), id="no step for longer than steps take"),
        pytest.param(
            4.5,
            {**others(3.5, 1.0), 3: training(3, progressed=NOW - 3.5, step_seconds=2.0)},
            id="one agent saw a step twice as long",
        ),
        pytest.param(
            4.1,
            {**CUT_OFF, 2: training(2, silent=0.5, progressed=NOW - 3.2, step_seconds=0.5)},
            id="one of the others was not cut off",
        ),
    ],
)
def test_a_silent_member_is_lost_when_the_others_stall(silent: float, agents: dict[int, AgentView]) -> None:
    result = planned(running(4, agents={1: training(1, silent=silent), **agents}))
    assert newest(result).cause is Cause.NODE_LOST


def test_a_silent_member_that_the_others_wait_for_is_lost_at_the_deadline() -> None:
    early = planned(running(4, agents={1: training(1, silent=3.9), **waiting_for_rank_1()}))
    assert early.status.history == ()
    late = planned(running(4, agents={1: training(1, silent=4.0), **waiting_for_rank_1()}))
    assert newest(late).cause is Cause.NODE_LOST
    assert newest(late).detected_seconds == pytest.approx(4.0)
    assert newest(late).failed_at == pytest.approx(NOW - 4.0)
    assert "its last message" in newest(late).message
    assert deleted(late) == {LOST: 0}
    assert len(late.status.history) == 1


def test_a_silent_member_on_a_node_that_is_not_ready_is_lost() -> None:
    seen = running(4, agents={1: training(1, silent=5)})
    result = planned(replace(seen, nodes={**seen.nodes, "node-1": node("node-1", NodeReadiness.UNKNOWN)}))
    assert newest(result).cause is Cause.NODE_LOST
    assert deleted(result) == {LOST: 0}


def test_a_silent_member_with_a_refused_port_is_lost_before_the_timeout() -> None:
    result = planned(running(4, spares=1, agents={1: training(1, silent=2.1, refused=NOW)}))
    assert newest(result).cause is Cause.POD_LOST, "a machine that refuses has power"
    assert newest(result).rung is Rung.SPARE
    assert newest(result).detected_seconds == pytest.approx(2.1)
    assert "nobody listens" in newest(result).message
    assert deleted(result) == {LOST: None}


def test_a_refused_port_is_evidence_even_when_all_are_silent() -> None:
    agents = {at: training(at, silent=60, refused=NOW if at == 1 else None) for at in range(4)}
    result = planned(running(4, agents=agents))
    assert newest(result).pod == LOST
    assert deleted(result) == {LOST: None}


def test_a_refused_port_on_a_not_ready_node_is_a_lost_node() -> None:
    seen = running(4, spares=1, agents={1: training(1, silent=2.1, refused=NOW)})
    result = planned(replace(seen, nodes={**seen.nodes, "node-1": node("node-1", NodeReadiness.UNKNOWN)}))
    assert newest(result).cause is Cause.NODE_LOST
    assert deleted(result) == {LOST: 0}


def test_the_failure_of_a_member_without_a_pod_is_dated_to_its_last_heartbeat() -> None:
    seen = running(4, agents={1: training(1, silent=3.5)})
    seen = replace(seen, pods=tuple(each for each in seen.pods if each.uid != "uid-1"))
    assert newest(planned(seen)).failed_at == pytest.approx(NOW - 3.5)
    assert newest(planned(seen)).detected_seconds == pytest.approx(3.5)


def test_a_reporting_member_on_a_not_ready_node_is_kept() -> None:
    seen = running(4)
    result = planned(replace(seen, nodes={**seen.nodes, "node-1": node("node-1", NodeReadiness.FALSE)}))
    assert result.status.history == ()


def test_silence_of_all_members_at_once_has_no_effect() -> None:
    result = planned(running(4, agents={at: training(at, silent=60) for at in range(4)}))
    assert result.status.history == ()
    assert result.actions == ()


def not_reconnected(*missing: int, since: float, **changes: Any) -> Any:
    """Return four members that wait for those which have not reconnected since the takeover."""
    seen = running(
        4, agents={at: joining(at, attempt=1, waiting_for=missing, silent=0.1, **changes) for at in range(4)}
    )
    known_agents = {uid: known for uid, known in seen.agents.items() if uid not in {f"uid-{at}" for at in missing}}
    return replace(seen, agents=known_agents, published=0, coordinator_since=NOW - since)


@pytest.mark.parametrize(
    ("missing", "since", "lost"),
    [((1, 2), 5.0, False), ((1, 2), 13.9, False), ((1, 2), 14.0, True), ((1,), 3.9, False), ((1,), 4.0, True)],
)
def test_agents_get_time_to_reconnect_and_a_single_one_less(missing: tuple[int, ...], since: float, lost: bool) -> None:
    assert bool(planned(not_reconnected(*missing, since=since)).status.history) is lost


def test_a_loss_before_the_operator_took_over_is_dated_to_the_last_step() -> None:
    entry = newest(planned(not_reconnected(1, since=6, progress=Progress(step=20, updated=NOW - 22))))
    assert entry.failed_at == pytest.approx(NOW - 22)
    assert entry.detected_seconds == pytest.approx(22)


def test_a_pod_that_vanished_before_the_operator_took_over_is_dated_to_the_last_step() -> None:
    seen = not_reconnected(1, since=1, progress=Progress(step=20, updated=NOW - 22))
    seen = replace(seen, pods=tuple(each for each in seen.pods if each.uid != "uid-1"))
    assert newest(planned(seen)).failed_at == pytest.approx(NOW - 22)


def test_a_device_fault_moves_the_worker_to_another_node_and_uses_the_infrastructure_budget() -> None:
    failed = agent(1, WorkerPhase.FAILED, generation=1, verdict=failure(80, rank=1), failures=(failure(80, rank=1),))
    result = planned(running(4, spares=1, agents={1: failed}))
    assert newest(result).cause is Cause.DEVICE
    assert newest(result).rung is Rung.SPARE
    assert [(record.cause, record.node) for record in result.status.failures] == [(Cause.DEVICE, "node-1")]
    assert deleted(result) == {LOST: None}


def test_only_the_member_that_failed_is_replaced_when_a_generation_gives_up() -> None:
    agents = {at: agent(at, WorkerPhase.FAILED, generation=1) for at in (0, 2, 3)}
    culprit = agent(1, WorkerPhase.FAILED, generation=1, verdict=failure(139, attempt=3, rank=1))
    status = {"progress": {"step": 20}}
    result = planned(running(4, spares=1, agents={1: culprit, **agents}, status=status))
    assert newest(result).cause is Cause.CRASH
    assert deleted(result) == {LOST: None}
    assert [member.pod_name for member in published(result).members] == ["demo-w-0", "demo-w-4", "demo-w-2", "demo-w-3"]


def test_a_generation_stopped_without_a_culprit_restarts_with_the_same_members() -> None:
    result = planned(running(4, agents={at: agent(at, WorkerPhase.FAILED, generation=1) for at in range(4)}))
    assert published(result).generation == 2
    assert deleted(result) == {}


def test_a_deleted_member_is_replaced_gracefully_and_is_no_failure() -> None:
    result = planned(with_pod(running(4, spares=1), pod(1, deleting=True)))
    assert newest(result).cause is Cause.PREEMPTED
    assert published(result).transition is Transition.GRACEFUL
    assert result.status.failures == ()
    assert deleted(result) == {}


def test_a_deleted_pod_on_a_lost_node_is_force_deleted() -> None:
    seen = with_pod(running(4, spares=1, agents={1: training(1, silent=9)}), pod(1, deleting=True))
    seen = replace(seen, nodes={**seen.nodes, "node-1": node("node-1", NodeReadiness.UNKNOWN)})
    result = planned(seen)
    assert published(result).transition is Transition.IMMEDIATE
    assert deleted(result) == {LOST: 0}


def test_a_rack_that_is_lost_at_once_is_one_interruption() -> None:
    result = planned(without(running(4), 1, 2))
    assert len(result.status.history) == 1
    assert "2 workers" in newest(result).message
    assert result.status.restarts.total == 1
    assert len(result.status.failures) == 1


def test_a_loss_before_the_first_step_has_no_step() -> None:
    for step, before in ((0, -1), (1, 1)):
        agents = {at: training(at, step=step) for at in range(4)}
        assert newest(planned(without(running(4, agents=agents), 1))).step_before == before


def test_at_most_sixteen_simultaneous_failures_are_recorded() -> None:
    ended = tuple(pod(at, phase=PodPhase.FAILED, reason="Error", exit_code=80) for at in range(2, 24))
    result = planned(running(24, pods=(pod(0), pod(1), *ended)))
    assert newest(result).cause is Cause.DEVICE
    assert "22 workers" in newest(result).message
    assert len(result.status.failures) == len(result.status.avoided_nodes) == 16


def others_wait_for_rank_1(since: float, **changes: Any) -> Any:
    return {at: joining(at, waiting_for=(1,), joining_since=since) for at in (0, 2, 3)} | {1: joining(1, **changes)}


def test_a_member_that_never_joins_is_lost_at_the_init_limit() -> None:
    limit = 600 + 60  # recovery.hang.initSeconds, and what the old processes may take to leave
    early = planned(running(4, spares=1, agents=others_wait_for_rank_1(NOW - limit + 2)))
    assert early.status.history == ()
    assert early.requeue_after is not None
    assert early.requeue_after <= 2
    late = planned(running(4, spares=1, agents=others_wait_for_rank_1(NOW - limit)))
    assert newest(late).cause is Cause.HANG
    assert newest(late).pod == LOST
    assert newest(late).failed_at == NOW - limit, "since when they wait"
    assert deleted(late) == {LOST: None}
    assert "answers, but the others have waited 660 s for it to join them" in newest(late).message


def test_disabled_hang_detection_ignores_waiting_members() -> None:
    job_spec = spec(workers={"replicas": 4}, recovery={"hang": {"enabled": False}})
    seen = running(4, agents=others_wait_for_rank_1(NOW - 5000), job_spec=job_spec)
    assert planned(seen).status.history == ()


def test_a_member_that_waits_for_itself_is_kept() -> None:
    agents = {1: joining(1, waiting_for=(1,), joining_since=NOW - 5000)}
    assert planned(running(4, agents=agents)).status.history == ()
