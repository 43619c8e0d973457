"""Budgets of failures: what counts, what waits longer after each failure, and the verdict of an exhausted budget."""

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import NOW
from tests.unit.plan.plan_results import make_plan
from trainium_contract.faults.causes import Budget, Cause
from trainium_contract.faults.classify import get_budget
from trainium_contract.spec.recovery import RecoverySpec
from trainium_contract.status.conditions import Phase
from trainium_contract.status.internal import FailureRecord
from trainium_contract.status.interruptions import Interruption, RecoveryResponse
from trainium_operator.plan.faults import failure_budgets
from trainium_operator.plan.model.observed import PodPhase


def recovery(**budgets: Any) -> RecoverySpec:
    return RecoverySpec.model_validate({"budgets": budgets})


def record(cause: Cause, *, ago: float = 0.0, node: str = "", pod: str = "p") -> FailureRecord:
    return FailureRecord(at=NOW - ago, cause=cause, pod=pod, node=node)


def test_an_uncounted_cause_is_recorded_with_a_budget_of_the_job() -> None:
    assert not failure_budgets.is_recorded(Cause.PREEMPTED, recovery())
    limits = recovery(byCause={"Preempted": {"maxFailures": 0}})
    assert failure_budgets.is_recorded(Cause.PREEMPTED, limits)
    assert failure_budgets.describe_exhausted_budget((record(Cause.PREEMPTED),), limits, NOW) is not None


def test_restarts_in_place_never_back_off() -> None:
    crashes = tuple(
        record(cause, ago=1) for cause in (Cause.CRASH, Cause.HANG, Cause.NETWORK, Cause.ACCELERATOR_RUNTIME) * 5
    )
    assert failure_budgets.find_backoff_end(crashes, NOW) == NOW
    assert (
        failure_budgets.find_backoff_end(
            tuple(record(Cause.POD_LOST, ago=5 * number) for number in reversed(range(6))), NOW
        )
        > NOW
    )


def test_a_pod_that_fails_at_every_start_waits_longer_each_time() -> None:
    records: tuple[FailureRecord, ...] = ()
    now, pauses = NOW, []
    for _ in range(22):  # each a second after its creation
        records = (*records, FailureRecord(at=now, cause=Cause.POD_LOST, pod="p", node=""))
        pauses.append(failure_budgets.find_backoff_end(records, now) - now)
        now += pauses[-1] + 1
    assert pauses[:15] == [0] * 15
    assert [pause for pause in pauses if pause] == [2, 2, 4, 8, 16, 32, 64]


def test_node_failures_never_delay_new_pods() -> None:
    nodes = tuple(record(Cause.NODE_LOST, ago=30 * number, node=f"node-{number}") for number in range(15))
    assert failure_budgets.find_backoff_end(nodes, NOW) == NOW


def test_the_32_nodes_that_failed_last_are_avoided_for_a_while() -> None:
    records = tuple(record(Cause.NODE_LOST, ago=100 - number, node=f"n{number}") for number in range(40))
    again = (*records, record(Cause.NODE_LOST, node="n20"))
    assert failure_budgets.list_avoided_nodes(again, NOW) == (
        *(f"n{number}" for number in range(8, 40) if number != 20),
        "n20",
    )
    assert failure_budgets.list_avoided_nodes(again, NOW + failure_budgets.AVOID_NODE_SECONDS - 62) == ("n39", "n20")


def test_an_exhausted_budget_names_causes_and_pods() -> None:
    records = (record(Cause.CRASH, pod="a"), record(Cause.CRASH, pod="a"), record(Cause.HANG, pod="b"))
    verdict = failure_budgets.describe_exhausted_budget(records, recovery(process={"maxFailures": 2}), NOW)
    assert verdict is not None
    assert "2 Crash, 1 Hang" in verdict
    assert "a (2x), b" in verdict


def test_a_budget_verdict_names_the_last_failure() -> None:
    crash = {
        "failures": (build.failure(137, rank=1, message="boom in line 7"),),
        "restarts": (build.restart_record(1),),
    }
    agents = build.training_agents(range(4), attempt=1)
    agents[1] = build.training_agent(1, attempt=1, **crash)
    job_spec = build.spec(recovery={"budgets": {"process": {"maxFailures": 0}}})
    result = make_plan(build.running_job(4, job_spec=job_spec, agents=agents))
    assert result.status.phase is Phase.FAILED
    for part in ("1 process failure", "budgets.process allows 0", "demo-w-1", "boom in line 7", "raise the budget"):
        assert part in result.status.verdict


def test_a_budget_verdict_on_memory_names_the_limit_to_raise() -> None:
    observed = build.running_job(4, job_spec=build.spec(recovery={"budgets": {"process": {"maxFailures": 0}}}))
    result = make_plan(build.with_status(observed, failures=(record(Cause.OUT_OF_MEMORY, ago=1),)))
    assert "resources.limits.memory in spec.workers.template" in result.status.verdict
    assert result.status.verdict.endswith("(kubectl trn retry).")


def test_a_budget_verdict_quotes_a_worker_that_never_joined() -> None:
    ended = build.pod(7, phase=PodPhase.FAILED, reason="Error", exit_code=1, message="the disk of node-7 is on fire")
    observed = build.running_job(4, job_spec=build.spec(recovery={"budgets": {"infrastructure": {"maxFailures": 0}}}))
    grown = Interruption(
        generation=0,
        time="",
        cause=Cause.RESIZE,
        response=RecoveryResponse.GROW,
        message="more workers joined",
        recovered_seconds=1.0,
    )
    status = observed.job.status.replaced(history=(grown,))
    observed = replace(observed, pods=(*observed.pods, ended), job=replace(observed.job, status=status))
    counted = make_plan(observed).status
    status = make_plan(build.with_status(observed, counted)).status
    assert status.phase is Phase.FAILED
    assert (status.history[-1].pod, status.history[-1].node) == ("demo-w-7", "node-7")
    assert "the disk of node-7 is on fire" in status.history[-1].message
    assert "more workers joined" not in status.verdict


def test_a_budget_larger_than_the_records_is_exhausted_by_all_of_them() -> None:
    limits = recovery(process={"maxFailures": 10 * failure_budgets.MAX_RECORDS})
    records = tuple(record(Cause.CRASH, ago=number / 100) for number in reversed(range(failure_budgets.MAX_RECORDS)))
    assert failure_budgets.describe_exhausted_budget(records[1:], limits, NOW) is None
    assert failure_budgets.describe_exhausted_budget(records, limits, NOW) is not None


causes = st.sampled_from([cause for cause in Cause if failure_budgets.is_recorded(cause, RecoverySpec())])


@given(st.lists(st.tuples(causes, st.floats(0, 10_000), st.sampled_from(["", "n1", "n2"])), max_size=40))
def test_failures_of_the_infrastructure_never_use_up_the_process_budget(given_: Any) -> None:
    limits = recovery(process={"maxFailures": 0, "windowSeconds": 86_400}, infrastructure={"maxFailures": 100_000})
    records = tuple(
        record(cause, ago=ago, node=node) for cause, ago, node in given_ if get_budget(cause) is not Budget.PROCESS
    )
    verdict = failure_budgets.describe_exhausted_budget(records, limits, NOW)
    assert verdict is None or len(records) >= failure_budgets.MAX_RECORDS


@given(st.lists(st.tuples(causes, st.floats(0, 5000)), max_size=60))
def test_a_budget_refills_as_its_window_moves(given_: Any) -> None:
    limits = recovery(process={"maxFailures": 3, "windowSeconds": 600}, infrastructure={"maxFailures": 3})
    records: tuple[FailureRecord, ...] = ()
    for cause, seconds in sorted(given_, key=lambda item: item[1]):
        records = failure_budgets.record_failure(
            records, FailureRecord(at=NOW + seconds, cause=cause, pod="p", node=""), limits
        )
    assert len(records) <= failure_budgets.MAX_RECORDS
    assert failure_budgets.describe_exhausted_budget(records, limits, NOW + 5000 + 3600) is None
