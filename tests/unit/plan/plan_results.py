"""Plans of built observations, and what a test reads in them: pods, memberships, conditions, interruptions."""

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
from trainium_operator.plan.model.observed import Observed
from trainium_operator.plan.plan import plan

A = TypeVar("A", bound=Action)


def make_plan(observed: Observed) -> Plan:
    return plan(observed, SETTINGS)


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
        assert 0.0 <= ratio <= 1.0
    assert goodput.ratio <= goodput.uptime_ratio + 1e-4, "productive time is uptime"
    assert len(goodput.sizes) <= MAX_SIZES
    assert len(goodput.window.samples) < WINDOW_SAMPLES


def published_membership(result: Plan) -> messages.Membership | None:
    """Return the membership that a plan publishes."""
    publications = actions_of_type(result, PublishMembership)
    assert len(publications) <= 1
    return publications[0].membership if publications else None


def member_names(membership: messages.Membership | None) -> list[str]:
    """Return the pods of the members, by rank."""
    assert membership is not None
    return [member.pod_name for member in membership.members]


def published_members(result: Plan) -> list[str]:
    """Return the pods of the members that a plan publishes, by rank."""
    return member_names(published_membership(result))


def actions_of_type(result: Plan, kind: type[A]) -> list[A]:
    return [action for action in result.actions if isinstance(action, kind)]


def created_manifests(result: Plan) -> list[dict[str, Any]]:
    """Return the manifests of the pods that a plan creates."""
    return [action.manifest for action in actions_of_type(result, CreatePod)]


def created_pods(result: Plan) -> list[str]:
    return [manifest["metadata"]["name"] for manifest in created_manifests(result)]


def deleted_pods(result: Plan) -> dict[str, int | None]:
    """Return the grace seconds of the pods that a plan deletes, by name."""
    return {action.name: action.grace_seconds for action in actions_of_type(result, DeletePod)}


def action_kinds(result: Plan) -> list[str]:
    return [type(action).__name__ for action in result.actions]


def event_notes(result: Plan, reason: str) -> list[str]:
    """Return the notes of the events with this reason."""
    return [event.note for event in result.events if event.reason == reason]


def newest_entry(result: Plan) -> Interruption:
    """Return the newest interruption of the history."""
    return result.status.history[-1]
