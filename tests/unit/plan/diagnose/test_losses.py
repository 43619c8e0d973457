"""Which members have failed: by their pods, their nodes, or their silence while others wait for them."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import NOW
from tests.unit.plan.plan_results import make_plan
from trainium_contract.faults.causes import Cause
from trainium_contract.status.conditions import Phase
from trainium_contract.status.interruptions import RecoveryResponse
from trainium_contract.wire.messages import Progress, Transition, WorkerPhase
from trainium_operator.plan.model.observed import AgentView, FleetView, NodeReadiness, Observed, PodPhase

LOST = build.pod(1).name


def joining_agent(ordinal: Any, **changes: Any) -> Any:
    return build.agent(ordinal, WorkerPhase.JOINING, generation=1, **changes)


def waiting_for_rank_1() -> Any:
    return {ordinal: joining_agent(ordinal, attempt=1, waiting_for=(1,)) for ordinal in (0, 2, 3)}


@pytest.mark.parametrize(
    ("changes", "cause", "grace"),
    [
        ({"phase": PodPhase.FAILED, "reason": "Error", "exit_code": 137, "finished": NOW - 1}, Cause.POD_LOST, None),
        (
            {"phase": PodPhase.FAILED, "reason": "OOMKilled", "exit_code": 137, "finished": NOW - 1},
            Cause.OUT_OF_MEMORY,
            None,
        ),
        ({"phase": PodPhase.FAILED, "reason": "Evicted"}, Cause.PREEMPTED, None),
        ({"phase": PodPhase.FAILED, "reason": "Error", "exit_code": 1, "disrupted": True}, Cause.PREEMPTED, None),
        ({"phase": PodPhase.FAILED, "reason": "NodeLost"}, Cause.NODE_LOST, None),
        ({"phase": PodPhase.FAILED, "reason": "Error", "exit_code": 80}, Cause.DEVICE, None),
    ],
)
def test_the_cause_of_an_ended_member_comes_from_its_pod(changes: Any, cause: Any, grace: Any) -> None:
    result = make_plan(build.with_pod(build.running_job(4), build.pod(1, **changes)))
    assert result.newest_entry.cause is cause
    assert result.newest_entry.pod == LOST
    assert result.deleted_pods == {LOST: grace}
    assert result.created_pods == ["demo-w-4"]
    assert result.published_membership is None
    assert result.status.phase is Phase.RECOVERING


def test_a_member_without_a_pod_is_lost() -> None:
    result = make_plan(build.without_pods(build.running_job(4), 1))
    assert result.newest_entry.cause is Cause.POD_LOST
    assert result.newest_entry.response is RecoveryResponse.REPLACE
    assert result.deleted_pods == {}


def test_the_pod_of_a_deleted_node_is_force_deleted() -> None:
    observed = build.running_job(4, agents={1: build.training_agent(1, silent=2.0)})
    result = make_plan(
        replace(observed, nodes={name: view for name, view in observed.nodes.items() if name != "node-1"})
    )
    assert result.newest_entry.cause is Cause.NODE_LOST
    assert result.deleted_pods == {LOST: 0}


@pytest.mark.parametrize("ordinal", [1, 4], ids=["member", "spare"])
def test_a_worker_with_a_recent_heartbeat_survives_a_missing_node_object(ordinal: int) -> None:
    observed = build.running_job(4, spares=1)
    result = make_plan(
        replace(observed, nodes={name: view for name, view in observed.nodes.items() if name != f"node-{ordinal}"})
    )
    assert result.deleted_pods == {}
    assert result.status.history == ()
    assert result.requeue_after == pytest.approx(1.5), "its silence will confirm it"


def test_only_silent_members_that_others_wait_for_are_lost() -> None:
    dark = build.training_agents((1, 2), silent=60)
    nodes = {f"node-{number}": build.node(f"node-{number}", NodeReadiness.UNKNOWN) for number in (1, 2)}
    observed = build.running_job(8, agents=dark)
    result = make_plan(replace(observed, nodes={**observed.nodes, **nodes}))
    assert result.deleted_pods == {}
    waiting = {ordinal: joining_agent(ordinal, attempt=1, waiting_for=(1, 2)) for ordinal in (0, 3, 4, 5, 6, 7)}
    observed = build.running_job(8, agents={**dark, **waiting})
    result = make_plan(replace(observed, nodes={**observed.nodes, **nodes}))
    assert result.deleted_pods == {"demo-w-1": 0, "demo-w-2": 0}


def test_a_frozen_fleet_keeps_a_silent_worker() -> None:
    observed = build.running_job(
        1, agents={0: build.training_agent(0, silent=60)}, nodes={"node-0": build.node("node-0", NodeReadiness.UNKNOWN)}
    )
    assert make_plan(observed).deleted_pods == {"demo-w-0": 0}
    result = make_plan(replace(observed, fleet=FleetView(frozen="130 of 130 nodes are bad")))
    assert result.deleted_pods == {}
    assert any(condition.reason == "ContactLost" for condition in result.status.conditions)
    assert [event.reason for event in result.events].count("ContactLost") == 1


def other_agents(progressed: float, step_seconds: float, *, silent: float = 0.5) -> dict[int, AgentView]:
    """Return the agents of the other members, which made their last step `progressed` seconds ago."""
    return build.training_agents((0, 2, 3), silent=silent, progressed_at=NOW - progressed, step_seconds=step_seconds)


CUT_OFF = other_agents(3.2, 0.5, silent=3.2)
"""All members lost the network at once: the others are silent for a moment less, and no step is made."""


@pytest.mark.parametrize(
    ("silent", "agents", "requeue_after"),
    [
        pytest.param(3.0, {}, 1.0, id="silence alone, until its deadline"),
        pytest.param(30, other_agents(0.5, 0.5), None, id="the others make steps"),
        pytest.param(5, other_agents(20, 10), 3.5, id="steps are long"),
        pytest.param(4.1, CUT_OFF, None, id="the others were cut off a moment later"),
    ],
)
def test_a_silent_member_is_kept_and_checked_again(
    silent: float, agents: dict[int, AgentView], requeue_after: float | None
) -> None:
    result = make_plan(build.running_job(4, agents={1: build.training_agent(1, silent=silent), **agents}))
    assert result.status.history == ()
    assert result.requeue_after is not None
    assert requeue_after in (None, pytest.approx(result.requeue_after))


@pytest.mark.parametrize(
    ("silent", "agents"),
    [
        pytest.param(4.5, other_agents(3.5, 0.5), id="no step for longer than steps take"),
        pytest.param(
            4.5,
            {**other_agents(3.5, 1.0), 3: build.training_agent(3, progressed_at=NOW - 3.5, step_seconds=2.0)},
            id="one agent saw a step twice as long",
        ),
        pytest.param(
            4.1,
            {**CUT_OFF, 2: build.training_agent(2, silent=0.5, progressed_at=NOW - 3.2, step_seconds=0.5)},
            id="one of the others was not cut off",
        ),
    ],
)
def test_a_silent_member_is_lost_when_the_others_stall(silent: float, agents: dict[int, AgentView]) -> None:
    result = make_plan(build.running_job(4, agents={1: build.training_agent(1, silent=silent), **agents}))
    assert result.newest_entry.cause is Cause.NODE_LOST


def test_a_silent_member_that_the_others_wait_for_is_lost_at_the_deadline() -> None:
    early = make_plan(build.running_job(4, agents={1: build.training_agent(1, silent=3.9), **waiting_for_rank_1()}))
    assert early.status.history == ()
    late = make_plan(build.running_job(4, agents={1: build.training_agent(1, silent=4.0), **waiting_for_rank_1()}))
    assert late.newest_entry.cause is Cause.NODE_LOST
    assert late.newest_entry.detected_seconds == pytest.approx(4.0)
    assert late.newest_entry.failed_at == pytest.approx(NOW - 4.0)
    assert "its last message" in late.newest_entry.message
    assert late.deleted_pods == {LOST: 0}
    assert len(late.status.history) == 1


@pytest.mark.parametrize("silence", [{"silent": 5}, {"silent": 2.1, "refused_at": NOW}], ids=["silent", "refused port"])
def test_a_silent_member_on_a_node_that_is_not_ready_is_a_lost_node(silence: dict[str, float]) -> None:
    observed = build.running_job(4, spares=1, agents={1: build.training_agent(1, **silence)})
    result = make_plan(build.with_node(observed, build.node("node-1", NodeReadiness.UNKNOWN)))
    assert result.newest_entry.cause is Cause.NODE_LOST
    assert result.deleted_pods == {LOST: 0}


def test_a_silent_member_with_a_refused_port_is_lost_before_the_timeout() -> None:
    result = make_plan(build.running_job(4, spares=1, agents={1: build.training_agent(1, silent=2.1, refused_at=NOW)}))
    assert result.newest_entry.cause is Cause.POD_LOST, "a machine that refuses has power"
    assert result.newest_entry.response is RecoveryResponse.SPARE
    assert result.newest_entry.detected_seconds == pytest.approx(2.1)
    assert "nobody listens" in result.newest_entry.message
    assert result.deleted_pods == {LOST: None}


def test_a_refused_port_is_evidence_even_when_all_are_silent() -> None:
    agents = {
        ordinal: build.training_agent(ordinal, silent=60, refused_at=NOW if ordinal == 1 else None)
        for ordinal in range(4)
    }
    result = make_plan(build.running_job(4, agents=agents))
    assert result.newest_entry.pod == LOST
    assert result.deleted_pods == {LOST: None}


def test_the_failure_of_a_member_without_a_pod_is_dated_to_its_last_heartbeat() -> None:
    observed = build.running_job(4, agents={1: build.training_agent(1, silent=3.5)})
    observed = build.without_pods(observed, 1, keep_agents=True)
    assert make_plan(observed).newest_entry.failed_at == pytest.approx(NOW - 3.5)
    assert make_plan(observed).newest_entry.detected_seconds == pytest.approx(3.5)


def test_silence_of_all_members_at_once_has_no_effect() -> None:
    result = make_plan(build.running_job(4, agents=build.training_agents(range(4), silent=60)))
    assert result.status.history == ()
    assert result.actions == ()


def build_reconnecting_job(*missing: int, since: float, **changes: Any) -> Any:
    """Return four members that wait for those which have not reconnected since the takeover."""
    observed = build.running_job(
        4,
        agents={
            ordinal: joining_agent(ordinal, attempt=1, waiting_for=missing, silent=0.1, **changes)
            for ordinal in range(4)
        },
    )
    agents = build.without_pods(observed, *missing).agents
    return replace(observed, agents=agents, published=0, coordinator_since=NOW - since)


@pytest.mark.parametrize(
    ("missing", "since", "lost"),
    [((1, 2), 5.0, False), ((1, 2), 13.9, False), ((1, 2), 14.0, True), ((1,), 3.9, False), ((1,), 4.0, True)],
)
def test_agents_get_time_to_reconnect_and_a_single_one_less(missing: tuple[int, ...], since: float, lost: bool) -> None:
    assert bool(make_plan(build_reconnecting_job(*missing, since=since)).status.history) is lost


def test_a_loss_before_the_operator_took_over_is_dated_to_the_last_step() -> None:
    progress = Progress(step=20, updated=NOW - 22)
    entry = make_plan(build_reconnecting_job(1, since=6, progress=progress)).newest_entry
    assert (entry.failed_at, entry.detected_seconds) == (pytest.approx(NOW - 22), pytest.approx(22))
    deleted = build.without_pods(build_reconnecting_job(1, since=1, progress=progress), 1, keep_agents=True)
    assert make_plan(deleted).newest_entry.failed_at == pytest.approx(NOW - 22)


def test_a_device_fault_moves_the_worker_to_another_node_and_uses_the_infrastructure_budget() -> None:
    result = make_plan(build.running_job(4, spares=1, agents={1: build.failed_agent(1, 80, rank=1)}))
    assert result.newest_entry.cause is Cause.DEVICE
    assert result.newest_entry.response is RecoveryResponse.SPARE
    assert [(record.cause, record.node) for record in result.status.failures] == [(Cause.DEVICE, "node-1")]
    assert result.deleted_pods == {LOST: None}


def test_only_the_member_that_failed_is_replaced_when_a_generation_gives_up() -> None:
    agents = build.agents((0, 2, 3), WorkerPhase.FAILED, generation=1)
    culprit = build.agent(1, WorkerPhase.FAILED, generation=1, verdict=build.failure(139, attempt=3, rank=1))
    status = {"progress": {"step": 20}}
    result = make_plan(build.running_job(4, spares=1, agents={1: culprit, **agents}, status=status))
    assert result.newest_entry.cause is Cause.CRASH
    assert result.deleted_pods == {LOST: None}
    assert result.published_members == ["demo-w-0", "demo-w-4", "demo-w-2", "demo-w-3"]


def test_a_generation_stopped_without_a_culprit_restarts_with_the_same_members() -> None:
    result = make_plan(build.running_job(4, agents=build.agents(range(4), WorkerPhase.FAILED, generation=1)))
    assert result.published_membership.generation == 2
    assert result.deleted_pods == {}


@pytest.mark.parametrize(("mark", "deleted"), [("deleting", {}), ("disrupted", {LOST: None})])
def test_a_deleted_or_evicted_member_is_replaced_gracefully_and_is_no_failure(mark: str, deleted: Any) -> None:
    result = make_plan(build.with_pod(build.running_job(4, spares=1), build.pod(1, **{mark: True})))
    assert result.newest_entry.cause is Cause.PREEMPTED
    assert result.published_membership.transition is Transition.GRACEFUL
    assert result.status.failures == ()
    assert result.deleted_pods == deleted


def test_a_deleted_pod_on_a_lost_node_is_force_deleted() -> None:
    observed = build.with_pod(
        build.running_job(4, spares=1, agents={1: build.training_agent(1, silent=9)}), build.pod(1, deleting=True)
    )
    observed = build.with_node(observed, build.node("node-1", NodeReadiness.UNKNOWN))
    result = make_plan(observed)
    assert result.published_membership.transition is Transition.IMMEDIATE
    assert result.deleted_pods == {LOST: 0}


def test_a_rack_that_is_lost_at_once_is_one_interruption() -> None:
    result = make_plan(build.without_pods(build.running_job(4), 1, 2))
    assert len(result.status.history) == 1
    assert "2 workers" in result.newest_entry.message
    assert result.status.restarts.total == 1
    assert len(result.status.failures) == 1


def test_a_loss_before_the_first_step_has_no_step() -> None:
    for step, before in ((0, -1), (1, 1)):
        agents = build.training_agents(range(4), step=step)
        assert make_plan(build.without_pods(build.running_job(4, agents=agents), 1)).newest_entry.step_before == before


def test_at_most_sixteen_simultaneous_failures_are_recorded() -> None:
    ended = tuple(build.pod(ordinal, phase=PodPhase.FAILED, reason="Error", exit_code=80) for ordinal in range(2, 24))
    result = make_plan(build.running_job(24, pods=(build.pod(0), build.pod(1), *ended)))
    assert result.newest_entry.cause is Cause.DEVICE
    assert "22 workers" in result.newest_entry.message
    assert len(result.status.failures) == len(result.status.avoided_nodes) == 16


def others_wait_for_rank_1(since: float, **changes: Any) -> Any:
    return {ordinal: joining_agent(ordinal, waiting_for=(1,), joining_since=since) for ordinal in (0, 2, 3)} | {
        1: joining_agent(1, **changes)
    }


def test_a_member_that_never_joins_is_lost_at_the_init_limit() -> None:
    limit = 600 + 60  # recovery.hang.initSeconds, and what the old processes may take to leave
    early = make_plan(build.running_job(4, spares=1, agents=others_wait_for_rank_1(NOW - limit + 2)))
    assert early.status.history == ()
    assert early.requeue_after is not None
    assert early.requeue_after <= 2
    late = make_plan(build.running_job(4, spares=1, agents=others_wait_for_rank_1(NOW - limit)))
    assert late.newest_entry.cause is Cause.HANG
    assert late.newest_entry.pod == LOST
    assert late.newest_entry.failed_at == NOW - limit, "since when they wait"
    assert late.deleted_pods == {LOST: None}
    assert "answers, but the others have waited 660 s for it to join them" in late.newest_entry.message


@pytest.mark.parametrize(
    ("agents", "recovery"),
    [
        pytest.param(others_wait_for_rank_1(NOW - 5000), {"hang": {"enabled": False}}, id="hang detection is disabled"),
        pytest.param({1: joining_agent(1, waiting_for=(1,), joining_since=NOW - 5000)}, {}, id="it waits for itself"),
    ],
)
def test_a_member_that_does_not_join_is_kept(agents: dict[int, AgentView], recovery: dict[str, Any]) -> None:
    job_spec = build.spec(workers={"replicas": 4}, recovery=recovery)
    assert make_plan(build.running_job(4, agents=agents, job_spec=job_spec)).status.history == ()


# --- an operator that starts after the loss ------------------------------------------------------------------------


def lost_before_the_start(*ordinals: int, **changes: Any) -> Observed:
    """Return a job whose members are lost with their nodes, as an operator finds it that has led for a second."""
    observed = build.running_job(4, spares=1)
    for ordinal in ordinals:
        dead = replace(build.node(f"node-{ordinal}", NodeReadiness.UNKNOWN), unready_since=NOW - 40)
        observed = build.with_node(build.with_pod(observed, build.pod(ordinal, **changes)), dead)
    lost = {f"uid-{ordinal}" for ordinal in ordinals}
    agents = {uid: agent for uid, agent in observed.agents.items() if uid not in lost}
    return replace(observed, agents=agents, published=0, coordinator_since=NOW - 1)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="its pod is bound to the node"),
        pytest.param({"deleting": True}, id="its pod is being deleted"),
        pytest.param({"disrupted": True, "disruption": "DeletionByTaintManager", "deleting": True}, id="it is evicted"),
    ],
)
def test_a_new_leader_replaces_at_once_a_member_whose_node_had_failed_before(changes: dict[str, Any]) -> None:
    result = make_plan(lost_before_the_start(1, **changes))
    entry = result.newest_entry
    assert (entry.cause, entry.node, entry.pod) == (Cause.NODE_LOST, "node-1", "demo-w-1")
    assert entry.failed_at is not None
    assert entry.failed_at <= NOW - 0.5, "the others made their last step then"
    assert result.status.failures[-1].node == "node-1"
    assert "demo-w-4" in result.published_members


def test_without_another_member_that_reports_a_new_leader_waits_for_agents() -> None:
    """After an outage of the API server no node is ready, and agents need a moment to find the operator."""
    result = make_plan(lost_before_the_start(0, 1, 2, 3))
    assert result.published_membership.generation == 1
    assert result.status.history == ()


def test_a_missing_pod_of_a_node_that_does_not_report_is_lost_with_the_node() -> None:
    observed = build.without_pods(lost_before_the_start(1), 1)
    entry = make_plan(observed).newest_entry
    assert (entry.cause, entry.node) == (Cause.NODE_LOST, "node-1")


def test_a_new_leader_starts_no_generation_before_a_member_that_is_left_has_reported() -> None:
    """After a restore from a backup, only such an agent knows the newest generation."""
    observed = build.without_pods(build.running_job(4, spares=1), 1)
    started = replace(observed, agents={}, published=0, coordinator_since=NOW - 1)
    assert make_plan(started).published_membership.generation == 1
    assert make_plan(replace(started, agents=observed.agents)).published_membership.generation == 2
