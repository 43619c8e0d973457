"""Two rounds of pairs find the nodes that hide, whatever their number, and blame no victim."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainium_agent.checks.pairing import (
    Group,
    PairingResult,
    WaveResults,
    disconnected,
    first_wave,
    is_due,
    next_wave,
    noted,
    slowest_link,
    unhealthy,
)
from trainium_agent.exits.restart_policy import GenerationState, judge
from trainium_contract.faults.causes import Cause


def hold(nodes: int, bad: set[int], *, slow: bool = False, links: tuple[Group, ...] = ()) -> list[WaveResults]:
    """All waves of a test in which exchanges fail (or are slow) exactly with a bad node or over a bad link."""
    held: list[WaveResults] = []
    while (wave := next_wave(nodes, held)) is not None:
        busy = [node for group in wave for node in group]
        assert len(busy) == len(set(busy)), "a node is in one exchange at a time"
        outcomes = {}
        for group in wave:
            fails = bool(bad & set(group)) or any(set(link) <= set(group) for link in links)
            for node in group:
                outcomes[node] = PairingResult(passed=slow or not fails, seconds=5.0 if fails else 0.01 + node / 1e4)
        held.append(WaveResults(wave, outcomes))
        assert len(held) < 20
    return held


@given(st.data())
def test_the_bad_nodes_are_found_and_no_other(data: st.DataObject) -> None:
    nodes = data.draw(st.integers(3, 40))
    bad = data.draw(st.sets(st.integers(0, nodes - 1), max_size=nodes))
    healthy_pair = any(not bad & set(group) for group in first_wave(nodes))
    held = hold(nodes, bad)
    found = disconnected(held)
    assert found <= bad, "nobody is blamed for another"
    if healthy_pair:
        assert found == bad
        if len(bad) * 8 <= nodes:
            assert len(held) <= 2, "two rounds"


@given(st.integers(3, 8), st.integers(0, 7))
def test_few_nodes_take_turns_when_no_pair_goes_well(nodes: int, one: int) -> None:
    bad = {one % nodes}
    assert disconnected(hold(nodes, bad)) == bad


def test_a_node_that_slows_its_peers_down_is_found_by_comparison() -> None:
    assert disconnected(hold(4, {2}, slow=True)) == {2}
    assert disconnected(hold(128, {2, 77}, slow=True)) == {2, 77}


def test_a_bad_link_between_two_nodes_is_put_down_to_neither() -> None:
    assert disconnected(hold(8, set(), links=((2, 3),))) == frozenset()


def measured(nodes: int, gigabits: dict[int, float], minimum: float) -> list[WaveResults]:
    """All waves of a test of bandwidth; that of an exchange is the lowest of its nodes."""
    held: list[WaveResults] = []
    while (wave := next_wave(nodes, held, minimum)) is not None:
        outcomes = {
            node: PairingResult(passed=True, seconds=0.1, gigabits=min(gigabits.get(each, 100.0) for each in group))
            for group in wave for node in group
        }  # fmt: skip
        held.append(WaveResults(wave, outcomes))
        assert len(held) < 20
    return held


@pytest.mark.parametrize("nodes", [3, 4, 9, 64])
def test_a_node_below_the_bandwidth_is_found_and_its_link_is_the_slowest(nodes: int) -> None:
    held = measured(nodes, {1: 3.0}, 10.0)
    assert disconnected(held, 10.0) == {1}
    slowest = slowest_link(held)
    assert slowest is not None
    assert 1 in slowest[0]
    assert slowest[1] == 3.0
    assert len(measured(nodes, {1: 3.0}, 0.0)) == 1, "without a bound the figures are recorded"
    assert disconnected(measured(nodes, {1: 3.0}, 0.0), 0.0) == frozenset()


def test_of_two_slow_nodes_neither_is_blamed_and_what_was_not_measured_is_no_link() -> None:
    held = measured(2, {1: 3.0}, 10.0)
    assert disconnected(held, 10.0) == frozenset()
    assert slowest_link(held) == ((0, 1), 3.0)
    assert slowest_link(hold(4, {2})) is None


def test_when_nobody_can_exchange_nobody_is_to_blame() -> None:
    assert disconnected(hold(3, {0, 1, 2})) == frozenset()
    assert disconnected(hold(64, set(range(64)))) == frozenset()


def test_a_node_that_reports_nothing_failed() -> None:
    first = WaveResults(
        ((0, 1), (2, 3)), {0: PairingResult(passed=True), 1: PairingResult(passed=True), 2: PairingResult(passed=True)}
    )
    assert next_wave(4, [first]) == ((0, 2), (1, 3))


def test_a_nodes_own_wrong_numbers_convict_it_at_once() -> None:
    wrong = {0: PairingResult(passed=True), 1: PairingResult(passed=True, healthy=False)}
    assert unhealthy([WaveResults(((0, 1),), wrong)]) == {1}


@given(st.integers(2, 200))
def test_everybody_has_a_partner_in_the_first_round(nodes: int) -> None:
    wave = first_wave(nodes)
    assert sorted(node for group in wave for node in group) == list(range(nodes))
    assert {len(group) for group in wave} <= {2, 3}


def test_an_outcome_survives_the_store() -> None:
    outcome = PairingResult(passed=False, seconds=1.5, healthy=False, detail="why")
    assert PairingResult.decode(outcome.encode()) == outcome


def test_the_test_is_due_after_two_failures_that_nobody_explained() -> None:
    state = GenerationState(best_step=10)
    once = noted(state, judge(76, 0, 12, state, 3).state)
    assert not is_due(once, 4)
    twice = noted(once, judge(76, 1, 14, once, 3).state)
    assert is_due(twice, 4)
    assert not is_due(twice, 2), "two nodes tell nothing"


def test_a_lost_peer_whose_culprit_becomes_known_is_explained() -> None:
    state = GenerationState(best_step=10)
    victim = noted(state, judge(76, 0, 12, state, 3).state)
    culprit = noted(victim, judge(137, 0, 12, victim, 3).state)
    assert (culprit.cause, culprit.unexplained) == (Cause.CRASH, 0)
    assert noted(culprit, judge(76, 0, 12, culprit, 3).state).unexplained == 0
    assert replace(victim, unexplained=1) == victim


@pytest.mark.parametrize("nodes", [3, 4, 5, 9, 128, 1000])
def test_one_bad_node_takes_two_rounds_at_any_size(nodes: int) -> None:
    held = hold(nodes, {nodes // 2})
    assert disconnected(held) == {nodes // 2}
    assert len(held) <= (2 if nodes > 5 or nodes == 4 else 4)
