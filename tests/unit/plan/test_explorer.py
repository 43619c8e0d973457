"""Every history of the small models up to a length has no violation, and each mutation is found by a short history.

Deeper: `make explore ARGS="--depth 3"`.
"""

from typing import Any

import pytest

from tests.unit.plan.explorer.models import MODELS, trains
from tests.unit.plan.explorer.search import Explorer, Report
from tests.unit.plan.explorer.transitions import FAULTS, MARKS, TIME, USER_CHANGES, Transition, all_transitions
from trainium_contract.faults import classify
from trainium_contract.faults.causes import Cause
from trainium_operator.plan.history import in_place_restarts
from trainium_operator.plan.membership import decisions, generation
from trainium_operator.plan.membership.generation import Decision
from trainium_operator.plan.model.observed import FleetView
from trainium_operator.plan.view.size import SizeDecision


def explore(model: str, transitions: tuple[Transition, ...], depth: int, *, first_only: bool = False) -> Report:
    starts = MODELS[model][:1] if first_only else MODELS[model]
    return Explorer(transitions).run([make() for make in starts], depth)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model", "crash_points", "first_only", "states"),
    [
        pytest.param("spare", (1,), True, 1000, id="spare", marks=pytest.mark.long),
        pytest.param("rigid", (1,), True, 600, id="rigid", marks=pytest.mark.long),
        pytest.param("reserve", (), True, 400, id="reserve", marks=pytest.mark.long),
        pytest.param("deadline", (), False, 80, id="deadline", marks=pytest.mark.long),
    ],
)
def test_every_history_of_two_transitions_satisfies_the_oracles(
    model: str, crash_points: tuple[int, ...], first_only: bool, states: int
) -> None:
    report = explore(model, all_transitions(crash_points), 2, first_only=first_only)
    assert report.violation is None, str(report.violation)
    assert report.depth == 2
    assert report.states > states


@pytest.mark.timeout(120)
@pytest.mark.parametrize("model", MODELS)
def test_a_crash_after_each_write_of_any_transition_satisfies_the_oracles(model: str) -> None:
    report = explore(model, all_transitions(), 1)
    assert report.violation is None, str(report.violation)


def test_a_frozen_fleet_loses_no_member_to_any_node_condition() -> None:
    """While the circuit breaker is open, only workers that have certainly failed are replaced."""
    start = trains(spares=1, minReplicas=1)
    start.fleet = FleetView(frozen="2 of 4 nodes are bad")
    members = [pod.view.name for pod in start.members()]
    marks = tuple(
        transition
        for transition in MARKS
        if "fault" in transition.name or "slow" in transition.name or "bans" in transition.name
    )
    explorer = Explorer(
        (*marks, *TIME),
        must_hold=lambda cluster: _assert_same_members(members, [pod.view.name for pod in cluster.members()]),
        ends_well=False,
    )
    report = explorer.run([start], 3)
    assert report.violation is None, str(report.violation)
    assert report.states > 10


def _assert_same_members(before: list[str], now: list[str]) -> None:
    assert now == before, "a member was replaced although nodes may not be acted on"


# --- the explorer itself: it finds each mutation of a policy, with a shortest history


def find_mutation(depth: int, transitions: tuple[Transition, ...]) -> Report:
    report = explore("spare", transitions, depth, first_only=True)
    assert report.violation is not None, "the mutation was not found"
    return report


def test_a_generation_number_that_is_used_twice_is_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        generation, "compute_next_generation", lambda context: max(1, context.job.status.membership.generation)
    )
    violation = find_mutation(2, (*FAULTS, *TIME)).violation
    assert violation is not None
    assert len(violation.history) == 1
    assert str(violation).count("\n") <= 2


def test_a_restart_counted_repeatedly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    record_restarts = in_place_restarts.record_restarts

    def record_without_attempt(context: Any, status: Any, *, failed_uids: Any) -> Any:
        result = record_restarts(context, status, failed_uids=failed_uids)
        return result.replace_status(result.status.replaced(membership=status.membership))

    monkeypatch.setattr(in_place_restarts, "record_restarts", record_without_attempt)
    violation = find_mutation(1, FAULTS).violation
    assert violation is not None
    assert violation.history[0] == "a process of rank 1 crashes"


def test_a_lost_pod_blamed_on_the_program_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classify, "classify_failed_pod", lambda **_pod: Cause.CRASH)
    violation = find_mutation(1, FAULTS).violation
    assert violation is not None
    assert "process budget" in violation.sentence
    assert violation.history == ("the pod of rank 0 is killed",)


def test_a_rigid_job_that_shrinks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SizeDecision, "find_legal_size", lambda _self, nodes: nodes)
    start = trains(nodes=2)  # none is left for a replacement
    lost = [transition for transition in FAULTS if transition.name == "the node of the last rank is lost"]
    violation = Explorer((*lost, *TIME)).run([start], 3).violation
    assert violation is not None
    assert "fewer than it may have" in violation.sentence
    assert violation.history == ("the node of the last rank is lost", "40 s pass")


def test_an_unfinished_decision_is_found_by_the_liveness_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "finish_decided_generation", lambda _context, status: Decision(status=status))
    lost = [transition for transition in FAULTS if transition.name == "the spare's node is lost"]
    up = [transition.with_operator_death(1) for transition in USER_CHANGES if transition.name == "the user scales up"]
    violation = find_mutation(2, (*lost, *up)).violation
    assert violation is not None
    assert "the job has not converged" in violation.sentence
    assert violation.history == ("the spare's node is lost", "the user scales up; the operator dies after 1 writes")
