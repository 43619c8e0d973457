"""Plans of built observations, and what a test reads in them: pods, memberships, conditions, interruptions."""

from dataclasses import dataclass, fields
from typing import Any, TypeVar

import pytest

from tests.unit.plan.plan_builders import SETTINGS, with_status
from trainium_contract.job import GoodputStatus
from trainium_contract.status.conditions import Condition, ConditionType
from trainium_contract.status.internal import WINDOW_SAMPLES
from trainium_contract.status.interruptions import Interruption
from trainium_contract.status.ledger import MAX_SIZES
from trainium_contract.status.public import PublicStatus
from trainium_contract.wire import messages
from trainium_operator.plan.model.actions import Action, CreatePod, DeletePod, Plan, PublishMembership
from trainium_operator.plan.model.conditions import find_condition
from trainium_operator.plan.model.observed import Observed, PlanSettings
from trainium_operator.plan.plan import plan

A = TypeVar("A", bound=Action)


@dataclass(frozen=True, slots=True)
class PlanResult(Plan):
    """A plan with what tests read in it."""

    @property
    def published_membership(self) -> messages.Membership | None:
        publications = self.actions_of_type(PublishMembership)
        assert len(publications) <= 1
        return publications[0].membership if publications else None

    @property
    def published_members(self) -> list[str]:
        """Return the pods of the published members, by rank."""
        return member_names(self.published_membership)

    @property
    def created_manifests(self) -> list[dict[str, Any]]:
        return [action.manifest for action in self.actions_of_type(CreatePod)]

    @property
    def created_pods(self) -> list[str]:
        return [manifest["metadata"]["name"] for manifest in self.created_manifests]

    @property
    def deleted_pods(self) -> dict[str, int | None]:
        """Return the grace seconds of deleted pods by name."""
        return {action.name: action.grace_seconds for action in self.actions_of_type(DeletePod)}

    @property
    def action_kinds(self) -> list[str]:
        return [type(action).__name__ for action in self.actions]

    @property
    def newest_entry(self) -> Interruption:
        """Return the newest interruption of the history."""
        return self.status.history[-1]

    def actions_of_type(self, kind: type[A]) -> list[A]:
        return [action for action in self.actions if isinstance(action, kind)]

    def only_action(self, kind: type[A]) -> A:
        (action,) = self.actions_of_type(kind)
        return action

    def event_notes(self, reason: str) -> list[str]:
        return [event.note for event in self.events if event.reason == reason]

    def condition(self, kind: ConditionType) -> Condition:
        return get_condition(self.status, kind)


def make_plan(observed: Observed, settings: PlanSettings = SETTINGS) -> PlanResult:
    result = plan(observed, settings)
    return PlanResult(**{field.name: getattr(result, field.name) for field in fields(result)})


def with_written_status(observed: Observed) -> Observed:
    """Return the observation after the status of its plan was written."""
    return with_status(observed, make_plan(observed).status)


def get_condition(status: PublicStatus, kind: ConditionType) -> Condition:
    condition = find_condition(status, kind)
    assert condition is not None
    return condition


def check_ledger(goodput: GoodputStatus) -> None:
    """Assert the invariants of any ledger."""
    lost = sum(goodput.lost_seconds.values())
    assert goodput.productive_seconds + lost == pytest.approx(goodput.wall_seconds, abs=0.01)
    assert sum(goodput.lost_by_stage.values()) == pytest.approx(lost, abs=0.01)
    seconds = (goodput.lost_seconds, goodput.lost_by_stage, goodput.stage_seconds)
    assert all(value >= 0.0 for table in seconds for value in table.values())
    for ratio in (goodput.ratio, goodput.uptime_ratio, goodput.fleet_ratio):
        assert ratio is None or 0.0 <= ratio <= 1.0
    assert (goodput.ratio or 0.0) <= goodput.uptime_ratio + 1e-4, "productive time is uptime"
    assert len(goodput.sizes) <= MAX_SIZES
    assert len(goodput.window.samples) < WINDOW_SAMPLES


def member_names(membership: messages.Membership | None) -> list[str]:
    """Return the pods of the members, by rank."""
    assert membership is not None
    return [member.pod_name for member in membership.members]
