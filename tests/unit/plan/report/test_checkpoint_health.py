"""Checkpoint health: missing commits reveal a stalled store, which reports no error."""

from dataclasses import replace
from typing import Any

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import NOW
from tests.unit.plan.plan_results import get_condition, make_plan, with_written_status
from trainium_contract.faults.causes import Cause
from trainium_contract.spec.storage import JobCheckpointSpec
from trainium_contract.status.conditions import ConditionStatus, ConditionType
from trainium_contract.status.interruptions import RecoveryResponse
from trainium_contract.trainer.checkpoint import DurableTierConfig
from trainium_contract.wire.messages import Progress, WorkerPhase
from trainium_operator.plan.model.conditions import find_condition, is_true


def health_condition(status: Any) -> tuple[str, str]:
    condition = find_condition(status, ConditionType.CHECKPOINT_HEALTHY)
    return condition.status.value, condition.reason


def job_with_checkpoints(**durable: Any) -> Any:
    observed = build.running_job(2)
    spec = observed.job.spec.model_copy(update={"checkpoint": JobCheckpointSpec(durable=DurableTierConfig(**durable))})
    observed = build.with_job(observed, spec=spec)
    return with_written_status(observed)


def observe_later(observed: Any, seconds: float, **progress: Any) -> Any:
    now = NOW + seconds
    fields = {"step": 20, "durable_step": 10, "updated": now, **progress}
    agents = {
        f"uid-{ordinal}": replace(build.training_agent(ordinal, progress=Progress(**fields)), last_seen=now)
        for ordinal in range(2)
    }
    return replace(observed, now=now, agents=agents)


def test_saves_overdue_by_time_raise_the_condition_and_an_event() -> None:
    observed = job_with_checkpoints(every_seconds=60)
    assert health_condition(make_plan(observe_later(observed, 170)).status)[0] == "True"
    result = make_plan(observe_later(observed, 181))
    assert health_condition(result.status) == ("False", "CheckpointOverdue")
    assert any(event.reason == "CheckpointOverdue" for event in result.events)


def test_the_job_is_requeued_when_the_next_save_would_be_overdue() -> None:
    assert make_plan(observe_later(job_with_checkpoints(every_seconds=60), 100)).requeue_after <= 80.1


def test_saves_overdue_by_steps_raise_the_condition_after_seconds() -> None:
    observed = job_with_checkpoints(every_seconds=None, every_steps=10)
    assert health_condition(make_plan(observe_later(observed, 5, step=45)).status)[0] == "True"
    assert health_condition(make_plan(observe_later(observed, 12, step=39)).status)[0] == "True"
    assert health_condition(make_plan(observe_later(observed, 12, step=40)).status) == ("False", "CheckpointOverdue")


def test_checkpoint_health_is_unknown_before_the_first_commit() -> None:
    progress = Progress(step=20, durable_step=-1, updated=NOW)
    observed = build.running_job(2, agents=build.training_agents(range(2), progress=progress))
    status = make_plan(observed).status
    assert health_condition(status) == ("Unknown", "NothingCommitted")
    alarmed = status.model_copy(
        update={
            "conditions": tuple(
                condition.model_copy(update={"status": ConditionStatus.FALSE})
                if condition.type is ConditionType.CHECKPOINT_HEALTHY
                else condition
                for condition in status.conditions
            )
        }
    )
    again = make_plan(build.with_status(observed, alarmed)).status
    assert health_condition(again) == ("False", "NothingCommitted"), "an alarm ends with a commit"


def test_a_commit_clears_the_condition_and_its_message_is_stable() -> None:
    observed = job_with_checkpoints(every_seconds=None, every_steps=10)
    first = make_plan(observe_later(observed, 12, step=40)).status
    observed = build.with_status(observed, first)
    again = make_plan(observe_later(observed, 20, step=60)).status
    assert find_condition(again, ConditionType.CHECKPOINT_HEALTHY) == find_condition(
        first, ConditionType.CHECKPOINT_HEALTHY
    )
    assert health_condition(make_plan(observe_later(observed, 30, step=90, durable_step=90)).status)[0] == "True"


def test_only_a_commit_clears_an_overdue_checkpoint() -> None:
    observed = job_with_checkpoints(every_seconds=60)
    observed = build.with_status(observed, make_plan(observe_later(observed, 181)).status)
    joining = build.by_pod_uid(build.agents(range(2), WorkerPhase.JOINING, generation=1, silent=-182))
    entry = build.interruption(RecoveryResponse.IN_PLACE, ago=-182, took=None, failed_at=NOW + 181)
    status = observed.job.status.replaced(history=(entry,))
    restarting = replace(observed, now=NOW + 182, agents=joining, job=replace(observed.job, status=status))
    during = make_plan(restarting).status
    assert not is_true(during, ConditionType.RUNNING)
    assert health_condition(during) == ("False", "CheckpointOverdue")
    observed = build.with_status(observed, during)
    after = make_plan(observe_later(observed, 190, step=25)).status
    assert is_true(after, ConditionType.RUNNING)
    assert health_condition(after) == ("False", "CheckpointOverdue")
    observed = build.with_status(observed, after)
    assert health_condition(make_plan(observe_later(observed, 200, step=30, durable_step=30)).status) == (
        "True",
        "Committed",
    )


def test_storage_errors_stay_unhealthy_until_a_commit() -> None:
    observed = job_with_checkpoints(every_seconds=60)
    text = "/data: Permission denied"
    entry = build.interruption(
        RecoveryResponse.IN_PLACE,
        ago=0,
        took=None,
        failed_at=NOW + 1,
        cause=Cause.STORAGE,
        message=text,
        step_before=1000,
    )
    status = make_plan(build.with_status(observed, history=(entry,))).status
    assert health_condition(status) == ("False", "StorageUnavailable")
    status = status.replaced(history=(entry.replaced(recovered_seconds=3.0),))
    observed = build.with_status(observed, status)
    again = make_plan(observe_later(observed, 20, step=25)).status
    assert health_condition(again) == ("False", "StorageUnavailable")
    observed = build.with_status(observed, again)
    overdue = make_plan(observe_later(observed, 400, step=90)).status
    assert health_condition(overdue) == ("False", "CheckpointOverdue")
    condition = get_condition(overdue, ConditionType.CHECKPOINT_HEALTHY)
    assert "Permission denied" in condition.message
    assert "too slow" not in condition.message


def test_the_condition_quotes_the_error_of_the_ranks() -> None:
    error = "checkpoint storage /data: [Errno 28] No space left on device; training continues, and saves as soon as"
    result = make_plan(observe_later(job_with_checkpoints(every_seconds=60), 181, notice=error))
    condition = result.condition(ConditionType.CHECKPOINT_HEALTHY)
    assert "No space left on device" in condition.message
