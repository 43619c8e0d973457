"""Root cause among several failed members: the blamed pod, the suspected node, and the replaced worker."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plan.plan_builders import (
    NOW,
    agent,
    deleted,
    failure,
    newest,
    planned,
    published,
    ranks,
    restart,
    running,
    spec,
    training,
)
from trainium_contract.faults.causes import USER_CAUSES, Budget, Cause
from trainium_contract.faults.classify import get_budget
from trainium_contract.status.conditions import Phase
from trainium_contract.status.interruptions import Rung
from trainium_contract.wire.messages import KernelEvent, WorkerPhase

SRAM = "NEURON_HW_ERR=SRAM_UNCORRECTABLE_ERROR nd-id=0 nc-id=0 action=TERMINATE_INSTANCE"
EFA = "efa 0000:00:1d.0: Failed to process command: -110"


def kernel(line: str, *, ago: float = 3.0) -> tuple[KernelEvent, ...]:
    return (KernelEvent(sequence=0, line=line, at=NOW - ago),)


def victim(code: int = 76, status: int | None = None, **changes: Any) -> dict[str, Any]:
    return {
        "failures": (failure(code, runtime_status=status, **changes),),
        "restarts": (restart(1, Cause.PEER_LOST),),
    }


def after_attempt_0(of: dict[int, dict[str, Any]], **kept: Any) -> Any:
    """Return members in attempt 1 of generation 1, with their reports about attempt 0."""
    agents = {at: agent(at, WorkerPhase.LOADING, generation=1, attempt=1, **of.get(at, {})) for at in range(4)}
    return running(4, agents=agents, **kept)


def named(seen: Any) -> tuple[Cause, str]:
    result = planned(seen)
    assert result.status.avoided_nodes == ()
    return newest(result).cause, newest(result).pod


def test_a_collective_stuck_on_all_members_blames_nobody() -> None:
    entry = newest(planned(after_attempt_0({at: victim(1, 1200) for at in range(4)})))
    assert (entry.cause, entry.pod, entry.node) == (Cause.PEER_LOST, "", "")
    assert "no worker is blamed" in entry.message


def test_among_members_that_lost_a_peer_the_one_that_failed_is_blamed() -> None:
    own = {"failures": (failure(1, runtime_status=1003),), "restarts": (restart(1, Cause.NUMERICAL),)}
    assert named(after_attempt_0({0: victim(), 1: victim(1, 1200), 2: own, 3: victim()})) == (
        Cause.NUMERICAL,
        "demo-w-2",
    )


def test_among_lost_peers_the_one_with_a_kernel_fault_is_blamed() -> None:
    seen = after_attempt_0({0: victim(), 1: victim(), 2: {**victim(), "kernel": kernel(EFA)}, 3: victim()})
    assert named(seen) == (Cause.NETWORK, "demo-w-2")


def test_a_member_with_only_a_kernel_fault_is_blamed() -> None:
    seen = after_attempt_0(
        {0: victim(), 1: {"restarts": (restart(1, Cause.PEER_LOST),), "kernel": kernel(EFA)}, 2: victim()}
    )
    cause, pod = named(seen)
    assert (cause, pod) == (Cause.NETWORK, "demo-w-1")


def test_an_old_kernel_line_names_nobody() -> None:
    seen = after_attempt_0({at: {**victim(), "kernel": kernel(EFA, ago=900)} for at in range(4)})
    assert named(seen) == (Cause.PEER_LOST, "")


def test_the_only_one_that_timed_out_among_lost_peers_is_blamed() -> None:
    assert named(after_attempt_0({0: victim(), 1: victim(1, 5), 2: victim(), 3: victim(1, 1200)})) == (
        Cause.RUNTIME,
        "demo-w-1",
    )


def test_several_timeouts_blame_nobody() -> None:
    assert named(after_attempt_0({at: victim(1, 5) for at in (0, 1)} | {2: victim(), 3: victim()}))[1] == ""


def test_the_only_lagging_member_is_blamed() -> None:
    seen = after_attempt_0({at: victim(step=20 if at != 3 else 19) for at in range(4)})
    assert named(seen) == (Cause.HANG, "demo-w-3")
    assert "lagged behind" in newest(planned(seen)).message


def test_comparisons_wait_until_every_member_has_reported() -> None:
    seen = after_attempt_0({0: victim(), 1: victim(1, 5), 2: victim()})
    late = agent(3, WorkerPhase.LOADING, generation=1, attempt=0)
    result = planned(replace(seen, agents={**seen.agents, "uid-3": late}))
    assert result.status.history == ()


def test_a_hang_of_all_ranks_alike_blames_nobody() -> None:
    seen = after_attempt_0({at: {"restarts": (restart(1, Cause.HANG),)} for at in range(4)})
    assert named(seen) == (Cause.HANG, "")


def test_a_member_that_alone_times_out_twice_is_replaced() -> None:
    twice = (failure(1, runtime_status=5), failure(1, runtime_status=5, attempt=1, sequence=1))
    others = (failure(76), failure(76, attempt=1, sequence=1))
    agents = {
        at: agent(at, WorkerPhase.LOADING, generation=1, attempt=2, failures=twice if at == 1 else others)
        for at in range(4)
    }
    result = planned(running(4, spares=1, agents=agents))
    assert (newest(result).cause, newest(result).pod) == (Cause.RUNTIME, "demo-w-1")
    assert ranks(published(result)) == ["demo-w-0", "demo-w-4", "demo-w-2", "demo-w-3"]
    assert result.status.failures[-1].node == "node-1"


def test_members_that_time_out_together_are_not_replaced() -> None:
    twice = (failure(1, runtime_status=5), failure(1, runtime_status=5, attempt=1, sequence=1))
    agents = {at: agent(at, WorkerPhase.LOADING, generation=1, attempt=2, failures=twice) for at in range(4)}
    result = planned(running(4, spares=1, agents=agents))
    assert published(result) is None
    assert deleted(result) == {}


def gave_up(at: int, code: int, **changes: Any) -> Any:
    verdict = failure(code, **changes)
    return agent(at, WorkerPhase.FAILED, generation=1, attempt=0, verdict=verdict, failures=(verdict,))


def test_an_agent_that_gave_up_over_lost_peers_is_not_replaced() -> None:
    agents = {at: agent(at, WorkerPhase.FAILED, generation=1) for at in range(4)} | {2: gave_up(2, 76)}
    result = planned(running(4, spares=1, agents=agents))
    assert ranks(published(result)) == [f"demo-w-{at}" for at in range(4)]
    assert newest(result).cause is Cause.NETWORK
    assert deleted(result) == {}
    assert all(record.node == "" for record in result.status.failures)
    assert get_budget(newest(result).cause) is Budget.INFRASTRUCTURE


def test_the_culprit_is_replaced_when_another_agent_gave_up_over_it() -> None:
    suspect = agent(1, WorkerPhase.FAILED, generation=1, failures=(failure(1, runtime_status=1206),))
    agents = {at: agent(at, WorkerPhase.FAILED, generation=1) for at in range(4)}
    result = planned(running(4, spares=1, agents=agents | {1: suspect, 2: gave_up(2, 76)}))
    assert ranks(published(result)) == ["demo-w-0", "demo-w-4", "demo-w-2", "demo-w-3"]
    assert newest(result).cause is Cause.NETWORK
    assert result.status.failures[-1].node == "node-1"


def test_a_device_error_in_the_kernel_log_replaces_a_training_member() -> None:
    result = planned(running(4, spares=1, agents={1: training(1, kernel=kernel(SRAM))}))
    assert ranks(published(result)) == ["demo-w-0", "demo-w-4", "demo-w-2", "demo-w-3"]
    assert (newest(result).cause, newest(result).rung, newest(result).node) == (Cause.DEVICE, Rung.SPARE, "node-1")
    assert result.status.failures[-1].node == "node-1"


def test_a_spare_whose_kernel_saw_a_device_error_is_not_used() -> None:
    seen = running(4, spares=1, agents={4: agent(4, kernel=kernel(SRAM)), 2: gave_up(2, 80)})
    result = planned(seen)
    assert published(result) is None
    assert "demo-w-4" in deleted(result)


def test_an_efa_line_alone_replaces_nobody() -> None:
    result = planned(running(4, spares=1, agents={1: training(1, kernel=kernel(EFA))}))
    assert published(result) is None
    assert result.status.history == ()


@pytest.mark.parametrize(("action", "moved"), [("AvoidNode", True), ("ReplaceWorker", True), ("RestartInPlace", False)])
def test_a_rule_overrides_the_meaning_of_a_kernel_line(action: str, moved: bool) -> None:
    rules = [{"message": "NEURON_HW_ERR=SRAM", "cause": "DeviceRepairable", "action": action}]
    job_spec = spec(workers={"replicas": 4, "spares": 1}, recovery={"rules": rules})
    result = planned(running(4, spares=1, job_spec=job_spec, agents={1: training(1, kernel=kernel(SRAM))}))
    assert (published(result) is not None) is moved
    if moved:
        assert newest(result).cause is Cause.DEVICE_REPAIRABLE


# Any mixture of failures.

VICTIMS = st.sampled_from([(76, None), (1, 1200), (76, 5), (76, 1), (1, 1100)])
USERS = st.sampled_from([(1, 1003), (1, 2), (1, 1002), (1, 4), (64, None), (65, None), (66, None), (1, 1006)])
INFRA = st.sampled_from([(1, 1205), (1, 1202), (1, 1206), (1, 5), (1, 101), (80, None), (1, 1005), (81, None)])
AMBIGUOUS = st.sampled_from([(1, 5), (1, 1), (1, 1206)])


def attempts(of: list[dict[int, tuple[int, int | None]]], **kept: Any) -> Any:
    """Return a generation whose attempts ended with these failures, by member."""
    agents = {}
    for at in range(4):
        failures = tuple(
            failure(*[ended[at][0]], runtime_status=ended[at][1], attempt=number, sequence=number)
            for number, ended in enumerate(of)
            if at in ended
        )[-8:]
        agents[at] = agent(at, WorkerPhase.LOADING, generation=1, attempt=len(of), failures=failures)
    return running(4, spares=2, agents=agents, **kept)


def endings(kind: Any) -> Any:
    return st.lists(st.dictionaries(st.integers(0, 3), kind, min_size=1), min_size=1, max_size=6)


@given(endings(st.one_of(VICTIMS, AMBIGUOUS)).filter(lambda all_: all(len(ended) > 1 for ended in all_)))
def test_ambiguous_failures_of_several_members_suspect_no_node(of: Any) -> None:
    twice = [{at: signs for at, signs in ended.items() if signs[0] == 1 and signs[1] in (1, 5, 1206)} for ended in of]
    result = planned(attempts(of))
    if not any(len(ended) == 1 for ended in twice):
        assert all(record.node == "" for record in result.status.failures)
        assert published(result) is None


@given(endings(VICTIMS))
def test_the_reporter_of_a_lost_peer_is_never_blamed(of: Any) -> None:
    result = planned(attempts(of))
    assert all(entry.pod == "" for entry in result.status.history if entry.cause is not Cause.HANG)
    assert result.status.avoided_nodes == ()
    assert all(record.node == "" for record in result.status.failures)
    assert deleted(result) == {}


@given(endings(USERS))
def test_a_users_error_never_suspects_a_node(of: Any) -> None:
    result = planned(attempts(of))
    assert all(record.node == "" for record in result.status.failures)
    assert result.status.avoided_nodes == ()
    assert {entry.cause for entry in result.status.history} <= USER_CAUSES | {Cause.PEER_LOST}


@given(endings(st.one_of(INFRA, VICTIMS)))
def test_infrastructure_failures_never_use_the_process_budget(of: Any) -> None:
    recovery = {"budgets": {"process": {"maxFailures": 0}, "infrastructure": {"maxFailures": 100}}}
    job_spec = spec(workers={"replicas": 4, "spares": 2}, recovery=recovery)
    result = planned(attempts(of, job_spec=job_spec))
    causes = {record.cause for record in result.status.failures}
    if Cause.HANG not in causes:  # a lagging rank may be the fault of the program
        assert all(get_budget(cause) is not Budget.PROCESS for cause in causes)
        assert result.status.phase is not Phase.FAILED
