"""Ready, Stalled and Finished summarize phase and conditions, for tools that know neither."""

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import NOW
from tests.unit.plan.plan_results import make_plan
from trainium_contract.job import TrainingJobStatus
from trainium_contract.status.conditions import ConditionStatus, ConditionType, Phase
from trainium_contract.status.public import CheckpointStatus
from trainium_operator.plan.model.conditions import find_condition, set_condition
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.report.summary import set_standard_conditions


def summary(status: TrainingJobStatus) -> dict[str, tuple[str, str]]:
    kinds = (ConditionType.READY, ConditionType.STALLED, ConditionType.FINISHED)
    conditions = [find_condition(status, kind) for kind in kinds]
    return {
        condition.type.value: (condition.status.value, condition.reason)
        for condition in conditions
        if condition is not None
    }


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase not in (Phase.COMPLETED, Phase.FAILED)])
def test_a_job_is_ready_only_while_it_trains(phase: Phase) -> None:
    conditions = summary(set_standard_conditions(TrainingJobStatus(phase=phase), NOW))

    assert (conditions["Ready"][0] == "True") is (phase is Phase.RUNNING)
    assert conditions["Stalled"] == ("False", "Progressing")
    assert conditions["Finished"] == ("False", "Progressing")


@pytest.mark.parametrize(
    ("kind", "ready", "stalled"), [(ConditionType.COMPLETE, "True", "False"), (ConditionType.FAILED, "False", "True")]
)
def test_complete_and_failed_are_finished(kind: ConditionType, ready: str, stalled: str) -> None:
    reason = Reason.COMPLETED if kind is ConditionType.COMPLETE else Reason.USER_ERROR
    status = set_condition(TrainingJobStatus(), kind, True, reason, "why", now=NOW)

    conditions = summary(set_standard_conditions(status, NOW))

    assert conditions == {"Ready": (ready, reason), "Stalled": (stalled, reason), "Finished": ("True", reason)}


def test_stalled_means_that_only_a_person_can_fix_it() -> None:
    def with_admission(reason: Reason) -> TrainingJobStatus:
        return set_condition(TrainingJobStatus(), ConditionType.ADMITTED, False, reason, "why", now=NOW)

    for reason in (Reason.GANG_API_MISSING, Reason.DEVICE_API_MISSING):
        assert summary(set_standard_conditions(with_admission(reason), NOW))["Stalled"] == ("True", reason)
    for reason in (Reason.WAITING_FOR_GANG, Reason.WAITING_FOR_DEVICES):
        assert summary(set_standard_conditions(with_admission(reason), NOW))["Stalled"] == ("False", "Progressing")


def test_the_first_status_of_a_job_shows_that_it_is_not_ready() -> None:
    result = make_plan(build.observation(build.job()))

    ready = result.condition(ConditionType.READY)
    assert ready.status is ConditionStatus.FALSE


def test_standard_conditions_of_a_training_job_are_stable() -> None:
    observed = build.running_job(2, agents=build.training_agents(range(2)))
    first = make_plan(observed)

    assert summary(first.status)["Ready"] == ("True", "Training")
    assert set_standard_conditions(first.status, NOW + 100) == first.status


def test_a_missing_checkpoint_has_no_step_in_the_resource() -> None:
    wire = CheckpointStatus(notice="x").to_wire()

    assert "durableStep" not in wire
    assert "memoryStep" not in wire
    assert CheckpointStatus.model_validate(wire).durable_step == -1
    assert CheckpointStatus.model_validate({"durableStep": -1}).durable_step == -1
    assert CheckpointStatus(durable_step=0).to_wire()["durableStep"] == 0
