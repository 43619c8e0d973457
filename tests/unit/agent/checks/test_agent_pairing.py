"""The pair test: two rounds of exchanges find the bad nodes of any number and blame no peer."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainium_agent.checks.pairing import (
    Group,
    WaveResults,
    count_unexplained,
    find_disconnected_nodes,
    find_slowest_link,
    find_unhealthy_nodes,
    pair_neighbours,
    plan_next_wave,
    should_test_pairs,
)
from trainium_agent.exits.restart_policy import GenerationState, decide_restart
from trainium_contract.faults.causes import Cause
from trainium_contract.wire.check_tasks import PairingResult


def run_waves(nodes: int, bad: set[int], *, slow: bool = False, links: tuple[Group, ...] = ()) -> list[WaveResults]:
    """Run all waves of a test in which exchanges with a bad node or over a bad link fail, or are slow."""
    results: list[WaveResults] = []
    while (wave := plan_next_wave(nodes, results)) is not None:
        busy = [node for group in wave for node in group]
        assert len(busy) == len(set(busy)), "a node is in one exchange at a time"
        outcomes = {}
        for group in wave:
            fails = bool(bad & set(group)) or any(set(link) <= set(group) for link in links)
            for node in group:
                outcomes[node] = PairingResult(passed=slow or not fails, seconds=5.0 if fails else 0.01 + node / 1e4)
        results.append(WaveResults(wave, outcomes))
        assert len(results) < 20
    return results


@given(st.data())
def test_exactly_the_bad_nodes_are_found(data: st.DataObject) -> None:
    nodes = data.draw(st.integers(3, 40) | st.sampled_from((128, 1000)))
    bad = data.draw(st.sets(st.integers(0, nodes - 1), max_size=nodes))
    healthy_pair = any(not bad & set(group) for group in pair_neighbours(nodes))
    results = run_waves(nodes, bad)
    blamed = find_disconnected_nodes(results)
    assert blamed <= bad, "no healthy node is blamed"
    if healthy_pair:
        assert blamed == bad
        if len(bad) * 8 <= nodes:
            assert len(results) <= 2, "two rounds"


@given(st.integers(3, 8), st.integers(0, 7))
def test_one_bad_node_of_a_few_is_found_in_four_rounds(nodes: int, number: int) -> None:
    bad = {number % nodes}
    results = run_waves(nodes, bad)
    assert find_disconnected_nodes(results) == bad
    assert len(results) <= 4


@pytest.mark.parametrize(
    ("results", "blamed"),
    [
        pytest.param(run_waves(4, {2}, slow=True), {2}, id="a node that slows its peers"),
        pytest.param(run_waves(128, {2, 77}, slow=True), {2, 77}, id="two nodes that slow their peers"),
        pytest.param(run_waves(8, set(), links=((2, 3),)), set(), id="neither node of a bad link"),
        pytest.param(run_waves(3, {0, 1, 2}), set(), id="no node when all exchanges of 3 fail"),
        pytest.param(run_waves(64, set(range(64))), set(), id="no node when all exchanges of 64 fail"),
    ],
)
def test_only_a_node_with_healthy_peers_is_blamed(results: list[WaveResults], blamed: set[int]) -> None:
    assert find_disconnected_nodes(results) == blamed


def run_bandwidth_waves(nodes: int, gigabits: dict[int, float], minimum: float) -> list[WaveResults]:
    """Run all waves of a bandwidth test; an exchange has the bandwidth of its slowest node."""
    results: list[WaveResults] = []
    while (wave := plan_next_wave(nodes, results, minimum)) is not None:
        outcomes = {
            node: PairingResult(passed=True, seconds=0.1, gigabits=min(gigabits.get(member, 100.0) for member in group))
            for group in wave
            for node in group
        }
        results.append(WaveResults(wave, outcomes))
        assert len(results) < 20
    return results


@pytest.mark.parametrize("nodes", [3, 4, 9, 64])
def test_a_node_below_the_bandwidth_is_found_and_its_link_is_the_slowest(nodes: int) -> None:
    results = run_bandwidth_waves(nodes, {1: 3.0}, 10.0)
    assert find_disconnected_nodes(results, 10.0) == {1}
    slowest = find_slowest_link(results)
    assert slowest is not None
    assert 1 in slowest[0]
    assert slowest[1] == 3.0
    assert len(run_bandwidth_waves(nodes, {1: 3.0}, 0.0)) == 1, "without a bound the figures are recorded"
    assert find_disconnected_nodes(run_bandwidth_waves(nodes, {1: 3.0}, 0.0), 0.0) == frozenset()


def test_neither_of_two_nodes_is_blamed_and_unmeasured_links_are_left_out() -> None:
    results = run_bandwidth_waves(2, {1: 3.0}, 10.0)
    assert find_disconnected_nodes(results, 10.0) == frozenset()
    assert find_slowest_link(results) == ((0, 1), 3.0)
    assert find_slowest_link(run_waves(4, {2})) is None


def test_a_node_that_reports_nothing_failed() -> None:
    first = WaveResults(
        ((0, 1), (2, 3)), {0: PairingResult(passed=True), 1: PairingResult(passed=True), 2: PairingResult(passed=True)}
    )
    assert plan_next_wave(4, [first]) == ((0, 2), (1, 3))


def test_a_node_with_wrong_numbers_is_unhealthy_after_one_exchange() -> None:
    wrong = {0: PairingResult(passed=True), 1: PairingResult(passed=True, healthy=False)}
    assert find_unhealthy_nodes([WaveResults(((0, 1),), wrong)]) == {1}


@given(st.integers(2, 200))
def test_every_node_has_a_partner_in_the_first_round(nodes: int) -> None:
    wave = pair_neighbours(nodes)
    assert sorted(node for group in wave for node in group) == list(range(nodes))
    assert {len(group) for group in wave} <= {2, 3}


def test_a_result_is_decoded_as_encoded() -> None:
    outcome = PairingResult(passed=False, seconds=1.5, healthy=False, detail="why")
    assert PairingResult.decode(outcome.encode()) == outcome


def test_the_pair_test_is_due_after_two_unexplained_failures() -> None:
    state = GenerationState(best_progress=10)
    once = count_unexplained(state, decide_restart(76, 0, 12, state, 3).state)
    assert not should_test_pairs(once, 4)
    twice = count_unexplained(once, decide_restart(76, 1, 14, once, 3).state)
    assert should_test_pairs(twice, 4)
    assert not should_test_pairs(twice, 2), "the bad one of two nodes cannot be identified"


def test_a_lost_peer_is_explained_by_a_later_crash() -> None:
    state = GenerationState(best_progress=10)
    victim = count_unexplained(state, decide_restart(76, 0, 12, state, 3).state)
    culprit = count_unexplained(victim, decide_restart(137, 0, 12, victim, 3).state)
    assert (culprit.cause, culprit.unexplained_failures) == (Cause.CRASH, 0)
    assert count_unexplained(culprit, decide_restart(76, 0, 12, culprit, 3).state).unexplained_failures == 0
    assert replace(victim, unexplained_failures=1) == victim
