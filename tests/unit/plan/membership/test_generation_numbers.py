"""The number of a generation: never one that an agent has been in, and no faulty agent uses them all up."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from plan_builders import NOW, agent, facts_of, interruption, membership, newest, planned, running, with_status, without

from trainium_contract.status.interruptions import Rung
from trainium_contract.status.public import MembershipStatus
from trainium_operator.plan.membership.generation import next_generation, republish_membership

if TYPE_CHECKING:
    from trainium_operator.plan.model.observed import Observed


def job(*, recorded: int = 3, published: int = 3, known: int = 3, seen: int = 3) -> Observed:
    """The numbers in the ConfigMap, at the coordinator, in the status, and of an agent."""
    status = {"membership": MembershipStatus(generation=known, size=4)}
    agents = {at: agent(at, generation=seen if at == 3 else 0) for at in range(4)}
    here = running(4, status=status, published=published, agents=agents)
    return replace(here, membership=membership(0, 1, 2, 3, generation=recorded) if recorded else None)


@pytest.mark.parametrize(
    ("numbers", "following"),
    [
        ({}, 4),
        ({"published": 5}, 6),
        ({"seen": 7}, 8),
        ({"seen": 2}, 4),
        ({"known": 4}, 4),  # decided on before a crash, and seen by nobody
        ({"known": 4, "seen": 4}, 5),
        ({"recorded": 0, "published": 0, "known": 0, "seen": 0}, 1),
        ({"recorded": 0, "published": 0, "known": 0, "seen": 2}, 3),
        ({"seen": 1003}, 1004),
        ({"seen": 1004}, 4),  # nobody can be so far ahead
    ],
)
def test_the_next_number_is_beyond_all_that_anybody_has_seen(numbers: dict[str, int], following: int) -> None:
    assert next_generation(facts_of(job(**numbers))) == following


@pytest.mark.parametrize(("published", "again"), [(2, True), (3, False), (4, False)])
def test_a_coordinator_that_is_behind_the_record_gets_it_again(published: int, again: bool) -> None:
    seen = job(published=published)
    actions = republish_membership(facts_of(seen))
    assert [action.membership for action in actions] == ([seen.membership] if again else [])
    assert [action.replaces for action in actions] == ([3] if again else [])


def test_a_decision_is_dated_once() -> None:
    open_entry = interruption(Rung.REPLACE, ago=10, took=None, decided_at=None)
    seen = without(running(4, spares=1, status={"history": (open_entry,)}), 1)
    assert newest(planned(seen)).decided_at == NOW
    dated = open_entry.replaced(decided_at=NOW - 5)
    again = with_status(seen, seen.job.status.replaced(history=(dated,)))
    assert newest(planned(again)).decided_at == NOW - 5
