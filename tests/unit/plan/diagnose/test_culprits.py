"""Root cause among several failed members: the blamed pod, the suspected node, and the replaced worker."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import NOW
from tests.unit.plan.plan_results import make_plan
from trainium_contract.faults.causes import USER_CAUSES, Budget, Cause
from trainium_contract.faults.classify import get_budget
from trainium_contract.status.conditions import Phase
from trainium_contract.status.interruptions import RecoveryResponse
from trainium_contract.wire.messages import KernelEvent, WorkerPhase
from trainium_operator.plan.model.observed import Observed

SRAM = "NEURON_HW_ERR=SRAM_UNCORRECTABLE_ERROR nd-id=0 nc-id=0 action=TERMINATE_INSTANCE"
EFA = "efa 0000:00:1d.0: Failed to process command: -110"


def kernel(line: str, *, ago: float = 3.0) -> tuple[KernelEvent, ...]:
    return (KernelEvent(sequence=0, line=line, at=NOW - ago),)


LOST_PEER, HUNG = ({"restarts": (build.restart_record(1, cause),)} for cause in (Cause.PEER_LOST, Cause.HANG))


def lost_peer_reports(code: int = 76, status: int | None = None, **changes: Any) -> dict[str, Any]:
    """Return the reports of a member that lost a peer."""
    return {"failures": (build.failure(code, runtime_status=status, **changes),), **LOST_PEER}


def after_first_attempt(*reports: dict[str, Any]) -> Observed:
    """Return four members in attempt 1 of generation 1, with their reports about attempt 0."""
    return build.running_job(
        4,
        agents={
            ordinal: build.agent(ordinal, WorkerPhase.LOADING, generation=1, attempt=1, **fields)
            for ordinal, fields in enumerate(reports)
        },
    )


NUMERICAL = {
    "failures": (build.failure(1, runtime_status=1003),),
    "restarts": (build.restart_record(1, Cause.NUMERICAL),),
}


@pytest.mark.parametrize(
    ("reports", "cause", "pod"),
    [
        pytest.param([lost_peer_reports(1, 1200)] * 4, Cause.PEER_LOST, "", id="a collective was stuck on all members"),
        pytest.param(
            [lost_peer_reports(), lost_peer_reports(1, 1200), NUMERICAL, lost_peer_reports()],
            Cause.NUMERICAL,
            "demo-w-2",
            id="one failed by itself",
        ),
        pytest.param(
            [
                lost_peer_reports(),
                lost_peer_reports(),
                {**lost_peer_reports(), "kernel": kernel(EFA)},
                lost_peer_reports(),
            ],
            Cause.NETWORK,
            "demo-w-2",
            id="one of the lost peers has a kernel fault",
        ),
        pytest.param(
            [lost_peer_reports(), {**LOST_PEER, "kernel": kernel(EFA)}, lost_peer_reports(), {}],
            Cause.NETWORK,
            "demo-w-1",
            id="one has a kernel fault and no failure",
        ),
        pytest.param(
            [{**lost_peer_reports(), "kernel": kernel(EFA, ago=900)}] * 4, Cause.PEER_LOST, "", id="old kernel lines"
        ),
        pytest.param(
            [lost_peer_reports(), lost_peer_reports(1, 5), lost_peer_reports(), lost_peer_reports(1, 1200)],
            Cause.ACCELERATOR_RUNTIME,
            "demo-w-1",
            id="only one timed out",
        ),
        pytest.param(
            [lost_peer_reports(1, 5), lost_peer_reports(1, 5), lost_peer_reports(), lost_peer_reports()],
            Cause.PEER_LOST,
            "",
            id="several timed out",
        ),
        pytest.param(
            [*[lost_peer_reports(step=20)] * 3, lost_peer_reports(step=19)],
            Cause.HANG,
            "demo-w-3",
            id="only one lagged behind",
        ),
        pytest.param([HUNG] * 4, Cause.HANG, "", id="all ranks hung alike"),
    ],
)
def test_only_a_member_that_differs_from_the_others_is_blamed(
    reports: list[dict[str, Any]], cause: Cause, pod: str
) -> None:
    result = make_plan(after_first_attempt(*reports))
    entry = result.newest_entry
    assert (entry.cause, entry.pod, entry.node) == (cause, pod, pod.replace("demo-w", "node"))
    assert ("no worker is blamed" in entry.message) is (pod == "")
    assert ("lagged behind" in entry.message) is (pod == "demo-w-3")
    assert result.status.avoided_nodes == ()


def test_comparisons_wait_until_every_member_has_reported() -> None:
    observed = after_first_attempt(lost_peer_reports(), lost_peer_reports(1, 5), lost_peer_reports())
    late = build.agent(3, WorkerPhase.LOADING, generation=1, attempt=0)
    assert make_plan(build.with_agents(observed, {3: late})).status.history == ()


def test_a_member_that_alone_times_out_twice_is_replaced() -> None:
    twice = (build.failure(1, runtime_status=5), build.failure(1, runtime_status=5, attempt=1, sequence=1))
    others = (build.failure(76), build.failure(76, attempt=1, sequence=1))
    agents = {
        ordinal: build.agent(
            ordinal, WorkerPhase.LOADING, generation=1, attempt=2, failures=twice if ordinal == 1 else others
        )
        for ordinal in range(4)
    }
    result = make_plan(build.running_job(4, spares=1, agents=agents))
    assert (result.newest_entry.cause, result.newest_entry.pod) == (Cause.ACCELERATOR_RUNTIME, "demo-w-1")
    assert result.published_members == ["demo-w-0", "demo-w-4", "demo-w-2", "demo-w-3"]
    assert result.status.failures[-1].node == "node-1"


def test_members_that_time_out_together_are_not_replaced() -> None:
    twice = (build.failure(1, runtime_status=5), build.failure(1, runtime_status=5, attempt=1, sequence=1))
    agents = build.agents(range(4), WorkerPhase.LOADING, generation=1, attempt=2, failures=twice)
    result = make_plan(build.running_job(4, spares=1, agents=agents))
    assert result.published_membership is None
    assert result.deleted_pods == {}


def test_an_agent_that_gave_up_over_lost_peers_is_not_replaced() -> None:
    agents = build.agents(range(4), WorkerPhase.FAILED, generation=1) | {2: build.failed_agent(2, 76)}
    result = make_plan(build.running_job(4, spares=1, agents=agents))
    assert result.published_members == [f"demo-w-{ordinal}" for ordinal in range(4)]
    assert result.newest_entry.cause is Cause.NETWORK
    assert result.deleted_pods == {}
    assert all(record.node == "" for record in result.status.failures)
    assert get_budget(result.newest_entry.cause) is Budget.INFRASTRUCTURE


def test_the_culprit_is_replaced_when_another_agent_gave_up_over_it() -> None:
    suspect = build.agent(1, WorkerPhase.FAILED, generation=1, failures=(build.failure(1, runtime_status=1206),))
    agents = build.agents(range(4), WorkerPhase.FAILED, generation=1)
    result = make_plan(build.running_job(4, spares=1, agents=agents | {1: suspect, 2: build.failed_agent(2, 76)}))
    assert result.published_members == ["demo-w-0", "demo-w-4", "demo-w-2", "demo-w-3"]
    assert result.newest_entry.cause is Cause.NETWORK
    assert result.status.failures[-1].node == "node-1"


def test_a_device_error_in_the_kernel_log_replaces_a_training_member() -> None:
    result = make_plan(build.running_job(4, spares=1, agents={1: build.training_agent(1, kernel=kernel(SRAM))}))
    assert result.published_members == ["demo-w-0", "demo-w-4", "demo-w-2", "demo-w-3"]
    entry = result.newest_entry
    assert (entry.cause, entry.response, entry.node) == (Cause.DEVICE, RecoveryResponse.SPARE, "node-1")
    assert result.status.failures[-1].node == "node-1"


def test_a_spare_whose_kernel_saw_a_device_error_is_not_used() -> None:
    observed = build.running_job(
        4, spares=1, agents={4: build.agent(4, kernel=kernel(SRAM)), 2: build.failed_agent(2, 80)}
    )
    result = make_plan(observed)
    assert result.published_membership is None
    assert "demo-w-4" in result.deleted_pods


def test_an_efa_line_alone_replaces_nobody() -> None:
    result = make_plan(build.running_job(4, spares=1, agents={1: build.training_agent(1, kernel=kernel(EFA))}))
    assert result.published_membership is None
    assert result.status.history == ()


@pytest.mark.parametrize(("action", "moved"), [("AvoidNode", True), ("ReplaceWorker", True), ("RestartInPlace", False)])
def test_a_rule_overrides_the_meaning_of_a_kernel_line(action: str, moved: bool) -> None:
    rules = [{"message": "NEURON_HW_ERR=SRAM", "cause": "DeviceRepairable", "action": action}]
    job_spec = build.spec(workers={"replicas": 4, "spares": 1}, recovery={"rules": rules})
    result = make_plan(
        build.running_job(4, spares=1, job_spec=job_spec, agents={1: build.training_agent(1, kernel=kernel(SRAM))})
    )
    assert (result.published_membership is not None) is moved
    if moved:
        assert result.newest_entry.cause is Cause.DEVICE_REPAIRABLE


# Any mixture of failures.

VICTIMS = st.sampled_from([(76, None), (1, 1200), (76, 5), (76, 1), (1, 1100)])
USERS = st.sampled_from([(1, 1003), (1, 2), (1, 1002), (1, 4), (64, None), (65, None), (66, None), (1, 1006)])
INFRA = st.sampled_from([(1, 1205), (1, 1202), (1, 1206), (1, 5), (1, 101), (80, None), (1, 1005), (81, None)])
AMBIGUOUS = st.sampled_from([(1, 5), (1, 1), (1, 1206)])


def failed_attempts(failures_by_attempt: list[dict[int, tuple[int, int | None]]], **changes: Any) -> Observed:
    """Return a generation whose attempts ended with these failures, by member."""
    agents = {}
    for ordinal in range(4):
        failures = tuple(
            build.failure(failed[ordinal][0], runtime_status=failed[ordinal][1], attempt=attempt, sequence=attempt)
            for attempt, failed in enumerate(failures_by_attempt)
            if ordinal in failed
        )[-8:]
        agents[ordinal] = build.agent(
            ordinal, WorkerPhase.LOADING, generation=1, attempt=len(failures_by_attempt), failures=failures
        )
    return build.running_job(4, spares=2, agents=agents, **changes)


def failures_by_attempt(kind: Any) -> Any:
    return st.lists(st.dictionaries(st.integers(0, 3), kind, min_size=1), min_size=1, max_size=6)


@given(
    failures_by_attempt(st.one_of(VICTIMS, AMBIGUOUS)).filter(
        lambda failures: all(len(failed) > 1 for failed in failures)
    )
)
def test_ambiguous_failures_of_several_members_suspect_no_node(failures: Any) -> None:
    twice = [
        {ordinal: signs for ordinal, signs in failed.items() if signs[0] == 1 and signs[1] in (1, 5, 1206)}
        for failed in failures
    ]
    result = make_plan(failed_attempts(failures))
    if not any(len(failed) == 1 for failed in twice):
        assert all(record.node == "" for record in result.status.failures)
        assert result.published_membership is None


@given(failures_by_attempt(VICTIMS))
def test_the_reporter_of_a_lost_peer_is_never_blamed(failures: Any) -> None:
    result = make_plan(failed_attempts(failures))
    assert all(entry.pod == "" for entry in result.status.history if entry.cause is not Cause.HANG)
    assert result.status.avoided_nodes == ()
    assert all(record.node == "" for record in result.status.failures)
    assert result.deleted_pods == {}


@given(failures_by_attempt(USERS))
def test_a_users_error_never_suspects_a_node(failures: Any) -> None:
    result = make_plan(failed_attempts(failures))
    assert all(record.node == "" for record in result.status.failures)
    assert result.status.avoided_nodes == ()
    assert {entry.cause for entry in result.status.history} <= USER_CAUSES | {Cause.PEER_LOST}


@given(failures_by_attempt(st.one_of(INFRA, VICTIMS)))
def test_infrastructure_failures_never_use_the_process_budget(failures: Any) -> None:
    recovery = {"budgets": {"process": {"maxFailures": 0}, "infrastructure": {"maxFailures": 100}}}
    job_spec = build.spec(workers={"replicas": 4, "spares": 2}, recovery=recovery)
    result = make_plan(failed_attempts(failures, job_spec=job_spec))
    causes = {record.cause for record in result.status.failures}
    if Cause.HANG not in causes:  # a lagging rank may be the fault of the program
        assert all(get_budget(cause) is not Budget.PROCESS for cause in causes)
        assert result.status.phase is not Phase.FAILED
