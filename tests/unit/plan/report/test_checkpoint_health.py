"""Saves that do not end are noticed by the commits that do not come: a store that stands still says nothing itself."""

from dataclasses import replace
from typing import Any

from plan_builders import NOW, planned, running, training

from trainium_contract.spec.storage import JobCheckpointSpec
from trainium_contract.status.conditions import ConditionStatus, ConditionType
from trainium_contract.trainer.checkpoint import DurableTierConfig
from trainium_contract.wire.messages import Progress
from trainium_operator.plan.model.conditions import find_condition


def healthy(status: Any) -> tuple[str, str]:
    found = find_condition(status, ConditionType.CHECKPOINT_HEALTHY)
    return found.status.value, found.reason


def saving(**durable: Any) -> Any:
    seen = running(2)
    spec = seen.job.spec.model_copy(update={"checkpoint": JobCheckpointSpec(durable=DurableTierConfig(**durable))})
    seen = replace(seen, job=replace(seen.job, spec=spec))
    return replace(seen, job=replace(seen.job, status=planned(seen).status))


def later(seen: Any, seconds: float, **progress: Any) -> Any:
    now = NOW + seconds
    fields = {"step": 20, "durable_step": 10, "updated": now, **progress}
    agents = {f"uid-{at}": replace(training(at, progress=Progress(**fields)), heard=now) for at in range(2)}
    return replace(seen, now=now, agents=agents)


def test_saves_that_are_due_by_time_and_do_not_come_are_an_alarm_with_an_event() -> None:
    seen = saving(every_seconds=60)
    assert healthy(planned(later(seen, 170)).status)[0] == "True"
    result = planned(later(seen, 181))
    assert healthy(result.status) == ("False", "CheckpointOverdue")
    assert any(event.reason == "CheckpointOverdue" for event in result.events)


def test_it_looks_again_when_the_next_save_would_be_overdue() -> None:
    assert planned(later(saving(every_seconds=60), 100)).requeue_after <= 80.1


def test_saves_that_are_due_by_steps_and_do_not_come_are_an_alarm_but_not_within_seconds() -> None:
    seen = saving(every_seconds=None, every_steps=10)
    assert healthy(planned(later(seen, 5, step=45)).status)[0] == "True"
    assert healthy(planned(later(seen, 12, step=39)).status)[0] == "True"
    assert healthy(planned(later(seen, 12, step=40)).status) == ("False", "CheckpointOverdue")


def test_before_the_first_commit_nothing_is_known_and_once_that_is_said_it_stays() -> None:
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
    again = planned(replace(seen, job=replace(seen.job, status=known))).status
    assert healthy(again) == ("False", "NothingCommitted"), "an alarm ends with a commit"


def test_a_commit_ends_the_alarm_and_its_sentence_stays_while_it_lasts() -> None:
    seen = saving(every_seconds=None, every_steps=10)
    first = planned(later(seen, 12, step=40)).status
    seen = replace(seen, job=replace(seen.job, status=first))
    again = planned(later(seen, 20, step=60)).status
    assert find_condition(again, ConditionType.CHECKPOINT_HEALTHY) == find_condition(
        first, ConditionType.CHECKPOINT_HEALTHY
    )
    assert healthy(planned(later(seen, 30, step=90, durable_step=90)).status)[0] == "True"
