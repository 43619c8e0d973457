"""Checkpoint health: missing commits reveal a stalled store, which reports no error."""

from dataclasses import replace
from typing import Any

from tests.unit.plan.plan_builders import (
    NOW,
    agent,
    condition_of,
    interruption,
    planned,
    running,
    training,
    with_status,
)
from trainium_contract.faults.causes import Cause
from trainium_contract.spec.storage import JobCheckpointSpec
from trainium_contract.status.conditions import ConditionStatus, ConditionType
from trainium_contract.status.interruptions import Rung
from trainium_contract.trainer.checkpoint import DurableTierConfig
from trainium_contract.wire.messages import Progress, WorkerPhase
from trainium_operator.plan.model.conditions import find_condition, is_true


def healthy(status: Any) -> tuple[str, str]:
    condition = find_condition(status, ConditionType.CHECKPOINT_HEALTHY)
    return condition.status.value, condition.reason


def saving(**durable: Any) -> Any:
    seen = running(2)
    spec = seen.job.spec.model_copy(update={"checkpoint": JobCheckpointSpec(durable=DurableTierConfig(**durable))})
    seen = replace(seen, job=replace(seen.job, spec=spec))
    return with_status(seen, planned(seen).status)


def later(seen: Any, seconds: float, **progress: Any) -> Any:
    now = NOW + seconds
    fields = {"step": 20, "durable_step": 10, "updated": now, **progress}
    agents = {f"uid-{at}": replace(training(at, progress=Progress(**fields)), last_seen=now) for at in range(2)}
    return replace(seen, now=now, agents=agents)


def test_saves_overdue_by_time_raise_the_condition_and_an_event() -> None:
    seen = saving(every_seconds=60)
    assert healthy(planned(later(seen, 170)).status)[0] == "True"
    result = planned(later(seen, 181))
    assert healthy(result.status) == ("False", "CheckpointOverdue")
    assert any(event.reason == "CheckpointOverdue" for event in result.events)


def test_the_job_is_requeued_when_the_next_save_would_be_overdue() -> None:
    assert planned(later(saving(every_seconds=60), 100)).requeue_after <= 80.1


def test_saves_overdue_by_steps_raise_the_condition_after_seconds() -> None:
    seen = saving(every_seconds=None, every_steps=10)
    assert healthy(planned(later(seen, 5, step=45)).status)[0] == "True"
    assert healthy(planned(later(seen, 12, step=39)).status)[0] == "True"
    assert healthy(planned(later(seen, 12, step=40)).status) == ("False", "CheckpointOverdue")


def test_checkpoint_health_is_unknown_before_the_first_commit() -> None:
    progress = Progress(step=20, durable_step=-1, updated=NOW)
    seen = running(2, agents={at: training(at, progress=progress) for at in range(2)})
    status = planned(seen).status
    assert healthy(status) == ("Unknown", "NothingCommitted")
    known = status.model_copy(
        update={
            "conditions": tuple(
                each.model_copy(update={"status": ConditionStatus.FALSE})
                if each.type is ConditionType.CHECKPOINT_HEALTHY
                else each
                for each in status.conditions
            )
        }
    )
    again = planned(with_status(seen, known)).status
    assert healthy(again) == ("False", "NothingCommitted"), "an alarm ends with a commit"


def test_a_commit_clears_the_condition_and_its_message_is_stable() -> None:
    seen = saving(every_seconds=None, every_steps=10)
    first = planned(later(seen, 12, step=40)).status
    seen = with_status(seen, first)
    again = planned(later(seen, 20, step=60)).status
    assert find_condition(again, ConditionType.CHECKPOINT_HEALTHY) == find_condition(
        first, ConditionType.CHECKPOINT_HEALTHY
    )
    assert healthy(planned(later(seen, 30, step=90, durable_step=90)).status)[0] == "True"


def test_only_a_commit_clears_an_overdue_checkpoint() -> None:
    seen = saving(every_seconds=60)
    seen = with_status(seen, planned(later(seen, 181)).status)
    joining = {f"uid-{at}": agent(at, WorkerPhase.JOINING, generation=1, silent=-182) for at in range(2)}
    entry = interruption(Rung.IN_PLACE, ago=-182, took=None, failed_at=NOW + 181)
    status = seen.job.status.replaced(history=(entry,))
    restarting = replace(seen, now=NOW + 182, agents=joining, job=replace(seen.job, status=status))
    during = planned(restarting).status
    assert not is_true(during, ConditionType.RUNNING)
    assert healthy(during) == ("False", "CheckpointOverdue")
    seen = with_status(seen, during)
    after = planned(later(seen, 190, step=25)).status
    assert is_true(after, ConditionType.RUNNING)
    assert healthy(after) == ("False", "CheckpointOverdue")
    seen = with_status(seen, after)
    assert healthy(planned(later(seen, 200, step=30, durable_step=30)).status) == ("True", "Committed")


def test_storage_errors_stay_unhealthy_until_a_commit() -> None:
    seen = saving(every_seconds=60)
    text = "/data: Permission denied"
    entry = interruption(
        Rung.IN_PLACE, ago=0, took=None, failed_at=NOW + 1, cause=Cause.STORAGE, message=text, step_before=1000
    )
    status = planned(with_status(seen, seen.job.status.replaced(history=(entry,)))).status
    assert healthy(status) == ("False", "StorageUnavailable")
    status = status.replaced(history=(entry.replaced(recovered_seconds=3.0),))
    seen = with_status(seen, status)
    again = planned(later(seen, 20, step=25)).status
    assert healthy(again) == ("False", "StorageUnavailable")
    seen = with_status(seen, again)
    overdue = planned(later(seen, 400, step=90)).status
    assert healthy(overdue) == ("False", "CheckpointOverdue")
    condition = condition_of(overdue, ConditionType.CHECKPOINT_HEALTHY)
    assert "Permission denied" in condition.message
    assert "too slow" not in condition.message


def test_the_condition_quotes_the_error_of_the_ranks() -> None:
    error = "checkpoint storage /data: [Errno 28] No space left on device; training goes on, and saves as soon as"
    result = planned(later(saving(every_seconds=60), 181, notice=error))
    condition = condition_of(result.status, ConditionType.CHECKPOINT_HEALTHY)
    assert "No space left on device" in condition.message
