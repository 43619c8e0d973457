"""Which failures end a job for good, and the verdict that names what failed, where and what to do."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import NOW
from tests.unit.plan.plan_results import make_plan
from trainium_contract.faults.causes import Cause
from trainium_contract.job import TrainingJobStatus
from trainium_contract.status.conditions import ConditionType, Phase
from trainium_contract.status.internal import FailureRecord
from trainium_contract.status.interruptions import RecoveryResponse
from trainium_contract.wire.messages import WorkerPhase
from trainium_contract.wire.nonfinite_origin import format_nonfinite_ranks
from trainium_operator.plan.model.conditions import find_condition
from trainium_operator.plan.model.observed import PodPhase


@pytest.mark.parametrize(
    ("code", "reason", "advice"),
    [
        (64, "UserError", "Correct the configuration"),
        (65, "NumericalError", "Lower the learning rate"),
        (66, "OutOfMemory", "microSize"),
    ],
)
def test_a_verdict_names_cause_output_pod_node_and_what_to_do(code: Any, reason: Any, advice: Any) -> None:
    result = make_plan(build.running_job(4, agents={1: build.failed_agent(1, code, rank=1)}))
    assert result.status.phase is Phase.FAILED
    assert find_condition(result.status, ConditionType.FAILED).reason == reason
    for part in ("boom", "demo-w-1", "node-1", f"exit code {code}", advice):
        assert part in result.status.verdict
    assert result.newest_entry.response is RecoveryResponse.STOP
    assert result.status.avoided_nodes == ()
    assert result.status.failures == ()
    assert (reason, True) in {(event.reason, event.warning) for event in result.events}
    assert len(result.status.history) == 1
    assert set(result.deleted_pods) == {f"demo-w-{ordinal}" for ordinal in (0, 2, 3)}, (
        "the one that it names ends by itself"
    )


@pytest.mark.parametrize("reporting", [(0, 1, 2, 3), (0, 1), (1,)])
@pytest.mark.parametrize("origins", [(2,), (2, 3)])
def test_nonfinite_numbers_are_attributed_to_the_pod_of_their_rank(
    reporting: tuple[int, ...], origins: tuple[int, ...]
) -> None:
    message = f"step 7: loss is nan, gradient norm is nan{format_nonfinite_ranks(origins, 4)}, 1 such in a row"

    agents = {rank: build.failed_agent(rank, 65, rank=rank, message=message, at=NOW - 3 + rank) for rank in reporting}
    result = make_plan(build.running_job(4, agents=agents))
    assert find_condition(result.status, ConditionType.FAILED).reason == "NumericalError"
    assert "rank 2 of pod demo-w-2 on node node-2" in result.status.verdict
    assert result.newest_entry.pod == "demo-w-2"


def test_a_rank_that_does_not_exist_names_no_pod() -> None:
    result = make_plan(
        build.running_job(
            4, agents={1: build.failed_agent(1, 65, rank=1, message="loss is nan (not finite on rank 99 alone)")}
        )
    )
    assert "of pod demo-w-1" in result.status.verdict


def test_a_long_verdict_keeps_cause_and_advice() -> None:
    result = make_plan(build.running_job(4, agents={1: build.failed_agent(1, 64, rank=1, message="x" * 1024)}))
    assert len(result.status.verdict) <= 1024
    assert "Configuration or user error" in result.status.verdict
    assert result.status.verdict.endswith("(kubectl trn retry).")


def test_a_repeated_crash_before_the_first_step_is_a_user_error() -> None:
    agents = build.agents(range(4), WorkerPhase.FAILED, generation=1)
    result = make_plan(build.running_job(4, agents={**agents, 1: build.failed_agent(1, 1, rank=1, step=-1, attempt=1)}))
    assert result.status.phase is Phase.FAILED
    assert "before its first step" in result.status.verdict
    assert result.status.avoided_nodes == ()


@pytest.mark.parametrize("code", [1, 64])
def test_a_verdict_starts_with_the_error_of_the_program(code: int) -> None:
    agents = build.agents(range(4), WorkerPhase.FAILED, generation=1)
    output = "config.Missing: no key\nTraceback (most recent call last):\n  File a.py"
    crashed = build.failed_agent(1, code, rank=1, step=-1, attempt=1, message=output)
    verdict = make_plan(build.running_job(4, agents={**agents, 1: crashed})).status.verdict
    *lines, circumstances = verdict.split(" | ")
    assert lines == output.split("\n")
    assert f": rank 1 of pod demo-w-1 on node node-1, exit code {code}. Correct the configuration" in circumstances
    assert circumstances[0].isupper()


def test_processes_killed_before_the_first_step_are_no_verdict() -> None:
    agents = build.agents(range(4), WorkerPhase.FAILED, generation=1)
    killed = build.failed_agent(1, 137, rank=1, step=-1, attempt=3)
    result = make_plan(build.running_job(4, spares=1, agents={**agents, 1: killed}))
    assert result.status.phase is not Phase.FAILED
    assert result.newest_entry.cause is Cause.CRASH


def test_a_crash_while_loading_is_no_verdict_after_the_first_step() -> None:
    agents = build.agents(range(4), WorkerPhase.FAILED, generation=1)
    status = {"progress": {"step": 40}}
    result = make_plan(
        build.running_job(
            4, spares=1, agents={**agents, 1: build.failed_agent(1, 1, rank=1, step=-1, attempt=1)}, status=status
        )
    )
    assert result.status.phase is Phase.RECOVERING
    assert result.newest_entry.cause is Cause.CRASH


def test_a_stopping_exit_code_before_joining_is_a_verdict() -> None:
    observed = build.with_pod(
        build.running_job(4, spares=1), build.pod(4, phase=PodPhase.FAILED, exit_code=64, message="no such file")
    )
    assert "no such file" in make_plan(observed).status.verdict


def test_a_stopping_exit_code_of_a_deleted_pod_is_no_verdict() -> None:
    going = build.pod(4, phase=PodPhase.FAILED, exit_code=64, message="no such file", deleting=True)
    assert make_plan(build.with_pod(build.running_job(4, spares=1), going)).status.phase is Phase.RUNNING


def job_with_failed_pods(*ordinals: Any, **changes: Any) -> Any:
    fields = {"phase": PodPhase.FAILED, "exit_code": 1, "reason": "Error", "message": "ImportError: x", **changes}
    status = TrainingJobStatus(desired=4, next_pod_ordinal=4)
    pods = tuple(build.pod(ordinal, **(fields if ordinal in ordinals else {})) for ordinal in range(4))
    agents = {ordinal: build.agent(ordinal) for ordinal in range(4) if ordinal not in ordinals}
    return build.observation(build.job(status=status), pods, agents)


def test_one_worker_that_does_not_start_is_retried_and_kept() -> None:
    result = make_plan(job_with_failed_pods(1))
    assert result.status.phase is Phase.PENDING
    assert result.created_pods == ["demo-w-4"]
    assert result.deleted_pods == {}
    condition = find_condition(result.status, ConditionType.PODS_READY)
    assert condition.reason == "WorkerNotStarting"
    assert "ImportError: x" in condition.message


def test_two_workers_that_do_not_start_are_a_verdict() -> None:
    result = make_plan(job_with_failed_pods(1, 2))
    assert result.status.phase is Phase.FAILED
    assert "ImportError: x" in result.status.verdict
    assert set(result.deleted_pods) == {"demo-w-0", "demo-w-3"}


@pytest.mark.parametrize(
    "changes",
    [
        {"reason": "Evicted", "exit_code": None},
        {"reason": "UnexpectedAdmissionError", "exit_code": None},
        {"disrupted": True},
        {"reason": "Error", "exit_code": 137},
        {"reason": "ContainerStatusUnknown", "exit_code": 255},
    ],
)
def test_workers_ended_by_the_cluster_are_never_a_verdict(changes: Any) -> None:
    result = make_plan(job_with_failed_pods(1, 2, **changes))
    assert result.status.phase is Phase.PENDING
    assert set(result.deleted_pods) == {"demo-w-1", "demo-w-2"}
    assert result.created_pods == ["demo-w-4", "demo-w-5"]
    assert len(result.status.failures) == 2
    assert result.status.avoided_nodes == ()


def test_a_failed_spare_of_a_training_job_is_counted_once_and_replaced_elsewhere() -> None:
    observed = build.with_pod(
        build.running_job(4, spares=1), build.pod(4, phase=PodPhase.FAILED, exit_code=1, reason="Error")
    )
    result = make_plan(observed)
    assert result.deleted_pods == {"demo-w-4": None}
    assert [(record.pod, record.node) for record in result.status.failures] == [("demo-w-4", "node-4")]
    again = make_plan(build.with_status(observed, result.status))
    assert len(again.status.failures) == 1


def test_new_pods_back_off_when_workers_keep_failing() -> None:
    observed = build.running_job(4)
    records = tuple(
        FailureRecord(at=NOW - 21 + 5 * number, cause=Cause.POD_LOST, pod=f"demo-w-{90 + number}")
        for number in range(5)
    )
    observed = build.with_status(observed, failures=records)
    result = make_plan(build.without_pods(observed, 1))
    assert result.created_pods == []
    assert 0 < result.requeue_after <= 8


def with_unfit_spare(observed: Any, code: int) -> Any:
    unfit = build.agent(4, WorkerPhase.FAILED, ready=False, verdict=build.failure(code, generation=0, step=-1))
    return replace(
        observed, pods=(*observed.pods, build.pod(4, node="node-3")), agents={**observed.agents, "uid-4": unfit}
    )


def test_a_configuration_that_a_spare_cannot_read_stops_the_job() -> None:
    result = make_plan(with_unfit_spare(build.running_job(4), 64))
    assert result.status.phase is Phase.FAILED
    assert "demo-w-4" in result.status.verdict


def test_a_spare_that_has_not_given_up_stops_nothing() -> None:
    observed = with_unfit_spare(build.running_job(4), 64)
    tries = build.agent(4, verdict=build.failure(64, generation=0, step=-1))
    assert make_plan(build.with_agents(observed, {4: tries})).status.phase is Phase.RUNNING


def test_a_spare_without_its_devices_is_counted_once_and_its_node_avoided() -> None:
    result = make_plan(with_unfit_spare(build.running_job(4), 80))
    assert result.status.phase is not Phase.FAILED
    assert set(result.deleted_pods) == {"demo-w-4"}
    assert [(record.pod, record.node) for record in result.status.failures] == [("demo-w-4", "node-3")]
    again = replace(build.running_job(4), job=replace(build.running_job(4).job, status=result.status))
    assert len(make_plan(with_unfit_spare(again, 80)).status.failures) == 1
