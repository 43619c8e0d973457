"""Who asks about a standstill, who answers, and what is concluded, among agents that share a store."""

from __future__ import annotations

import pytest
from shared_store import Shared

from trainium_agent.exits.restart_policy import GenerationState
from trainium_agent.hang import response
from trainium_agent.hang.detection import Finding, FindingKind, Stall
from trainium_agent.hang.response import Inquiry
from trainium_contract.wire.messages import TrainerPhase


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(response.time, "monotonic", lambda: now[0])
    return now


def still(rank: int, *, waiting: bool) -> Stall:
    return Stall(rank=rank, phase=TrainerPhase.STEP, step=9, seconds=60.0, limit=15.0, waiting=waiting)


def agents(shared: Shared, count: int = 2) -> list[Inquiry]:
    """The first agent's rank does not wait for its peers, all others do."""
    return [
        Inquiry(shared, at, count, lambda at=at: (still(at, waiting=at > 0),))  # type: ignore[arg-type]
        for at in range(count)
    ]


@pytest.mark.usefixtures("clock")
def test_all_answer_and_the_one_who_asked_concludes() -> None:
    shared = Shared()
    first, second = agents(shared)
    second.ask(0)
    assert second.open
    assert not first.open
    assert second.conclude(0) is None, "one answer is missing"
    first.answer(shared.state())
    first.answer(shared.state())  # one answer per inquiry
    finding = second.conclude(0)
    assert finding is not None
    assert [*finding.culprits] == [0]
    assert not second.open
    second.publish(0, finding)
    assert first.published(0) == finding


@pytest.mark.usefixtures("clock")
def test_a_finding_that_nobody_left_names_nobody() -> None:
    assert agents(Shared())[0].published(0) == Finding(FindingKind.COLLECTIVE)


@pytest.mark.usefixtures("clock")
def test_nobody_is_asked_in_an_attempt_that_is_over_or_in_a_generation_that_stopped() -> None:
    for shared in (Shared(attempt=1), Shared(stopped=64)):
        first = agents(shared)[0]
        first.ask(0)
        assert not first.open
        assert shared.values == {}
        assert first.conclude(0) is None


@pytest.mark.usefixtures("clock")
def test_an_inquiry_of_an_earlier_attempt_is_not_answered() -> None:
    shared = Shared()
    first, second = agents(shared)
    first.ask(0)
    second.answer(shared.change(lambda state: GenerationState(attempt=1, inquiry=state.inquiry, asked_in=0)))
    assert "0/standstill/1" not in shared.values


def test_who_hears_of_another_s_inquiry_does_not_ask_until_that_one_is_overdue(clock: list[float]) -> None:
    shared = Shared()
    first, second = agents(shared)
    first.ask(0)
    second.answer(shared.state())
    second.ask(0)
    assert not second.open
    clock[0] += 1000.0
    second.ask(0)
    assert second.open, "who asked is gone, it seems"
    first.answer(shared.state())
    assert not first.open, "the other took over"


def test_who_asks_does_not_ask_again_meanwhile_and_an_attempt_later_anew(clock: list[float]) -> None:
    shared = Shared()
    first = agents(shared)[0]
    first.ask(0)
    first.ask(0)
    assert shared.state().inquiry == 1
    first.forget()
    assert not first.open


def test_time_is_up_when_one_does_not_answer_and_what_it_said_before_does_not_count(clock: list[float]) -> None:
    shared = Shared()
    first, second, third = agents(shared, 3)
    third.ask(0)
    second.answer(shared.state())
    clock[0] += 1000.0
    finding = third.conclude(0)
    assert finding is not None
    clock[0] += 1000.0
    second.ask(0)  # what the third said belongs to the first inquiry
    first.answer(shared.state())
    clock[0] += 1000.0
    assert set(second._testimony(shared, 0)) == {0, 1}  # type: ignore[arg-type]
