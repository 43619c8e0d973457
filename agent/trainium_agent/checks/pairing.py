"""Find a faulty or slow node by rounds of exchanges between pairs of nodes, as pure functions of their results.

The first round pairs all nodes. The nodes of failed pairs are suspects. The second round pairs each suspect with a node
whose exchange passed; a suspect that fails again is bad. Two rounds are enough for any number of nodes. With more
suspects than good nodes the second round takes several waves. If no pair passed, a few nodes exchange with each other
in all pairs.

Guarantees:
- A node that passed an exchange with any node is never found bad for its exchanges; if no node passed, none is.
- A fault of one pair only (the link between two nodes) is attributed to neither node.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainium_contract.faults.causes import Cause

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainium_agent.exits.restart_policy import GenerationState
    from trainium_contract.wire.check_tasks import PairingResult

UNEXPLAINED = 2
"""Number of collective failures without a known culprit that triggers the test."""
MIN_NODES = 3
"""With two nodes a failed exchange blames neither."""
_SLOW_FACTOR = 4.0
_SLOW_SECONDS = 0.5
_MAX_ROUND_ROBIN_NODES = 8

Group = tuple[int, ...]
"""Node ranks that exchange with each other; the first one hosts the store."""
Wave = tuple[Group, ...]
"""Disjoint groups, which exchange at the same time."""


@dataclass(frozen=True, slots=True)
class WaveResults:
    """One wave and the reports of its nodes; a node that reported nothing is missing."""

    wave: Wave
    outcomes: Mapping[int, PairingResult]


def should_test_pairs(state: GenerationState, nodes: int) -> bool:
    """Return whether the test should run before the next attempt."""
    return nodes >= MIN_NODES and state.unexplained_failures >= UNEXPLAINED


def count_unexplained(previous: GenerationState, current: GenerationState) -> GenerationState:
    """Return the state after a failure; a lost peer counts as unexplained until its culprit is known."""
    if current.attempt > previous.attempt and current.cause is Cause.PEER_LOST:
        return replace(current, unexplained_failures=current.unexplained_failures + 1)
    if (
        current.attempt == previous.attempt
        and previous.cause is Cause.PEER_LOST
        and current.cause is not Cause.PEER_LOST
    ):
        return replace(current, unexplained_failures=max(0, current.unexplained_failures - 1))
    return current


def plan_next_wave(nodes: int, results: Sequence[WaveResults], minimum: float | None = None) -> Wave | None:
    """Return the next wave of exchanges; None when the results allow a verdict.

    An exchange below `minimum` Gbit/s counts as failed; without a minimum, one that took much longer than the others
    does.
    """
    plan = _plan_waves(nodes, results, minimum)
    return plan[len(results)] if len(results) < len(plan) else None


def find_unhealthy_nodes(results: Sequence[WaveResults]) -> frozenset[int]:
    """Return the nodes whose own computation is wrong."""
    return frozenset(node for result in results for node, outcome in result.outcomes.items() if not outcome.healthy)


def find_disconnected_nodes(results: Sequence[WaveResults], minimum: float | None = None) -> frozenset[int]:
    """Return the nodes that could not exchange with any peer, although others could; see `plan_next_wave`."""
    typical = _compute_typical_seconds(results)
    exchanges: dict[int, int] = {}
    passed: set[int] = set()
    for result in results:
        for group in result.wave:
            group_passed = _group_passed(group, result.outcomes, typical, minimum)
            for node in group:
                exchanges[node] = exchanges.get(node, 0) + 1
                if group_passed:
                    passed.add(node)
    if not passed:
        return frozenset()
    return frozenset(node for node, count in exchanges.items() if count > 1 and node not in passed)


def find_slowest_link(results: Sequence[WaveResults]) -> tuple[Group, float] | None:
    """Return the group with the lowest bandwidth, and that bandwidth in Gbit/s; None if none was measured."""
    measured = [
        (min(result.outcomes[node].gigabits for node in group), group)
        for result in results
        for group in result.wave
        if all(node in result.outcomes and result.outcomes[node].gigabits > 0 for node in group)
    ]
    return min(measured)[::-1] if measured else None


def pair_neighbours(nodes: int) -> Wave:
    """Pair all nodes with their neighbours; with an odd number the last node joins the last pair."""
    groups = [tuple(range(start, min(start + 2, nodes))) for start in range(0, nodes, 2)]
    if len(groups) > 1 and len(groups[-1]) == 1:
        groups[-2:] = [groups[-2] + groups[-1]]
    return tuple(groups)


def _plan_waves(nodes: int, results: Sequence[WaveResults], minimum: float | None) -> list[Wave]:
    """Return all waves that the results so far determine."""
    first = pair_neighbours(nodes)
    if not results:
        return [first]
    typical = _compute_typical_seconds(results[:1])
    good = [node for group in first if _group_passed(group, results[0].outcomes, typical, minimum) for node in group]
    suspects = [node for node in range(nodes) if node not in good]
    if not suspects:
        return [first]
    if good:
        batches = [suspects[start : start + len(good)] for start in range(0, len(suspects), len(good))]
        return [first, *(tuple(zip(good, batch, strict=False)) for batch in batches)]
    return [first, *_round_robin(suspects)] if nodes <= _MAX_ROUND_ROBIN_NODES else [first]


def _round_robin(nodes: list[int]) -> list[Wave]:
    """Return waves that pair each node once with each other node (the circle method)."""
    circle: list[int | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    waves: list[Wave] = []
    for _ in range(len(circle) - 1):
        pairs = zip(circle[: len(circle) // 2], reversed(circle[len(circle) // 2 :]), strict=True)
        waves.append(tuple((left, right) for left, right in pairs if left is not None and right is not None))
        circle[1:] = [circle[-1], *circle[1:-1]]
    return waves


def _compute_typical_seconds(results: Sequence[WaveResults]) -> float | None:
    """Return the usual duration of an exchange that passed; None when there is nothing to compare."""
    lengths = sorted(
        max(result.outcomes[node].seconds for node in group)
        for result in results[:1]
        for group in result.wave
        if all(node in result.outcomes and result.outcomes[node].passed for node in group)
    )
    return lengths[(len(lengths) - 1) // 2] if len(lengths) > 1 else None


def _group_passed(
    group: Group, outcomes: Mapping[int, PairingResult], typical: float | None, minimum: float | None
) -> bool:
    if any(node not in outcomes or not outcomes[node].passed for node in group):
        return False
    if minimum is not None:
        return min(outcomes[node].gigabits for node in group) >= minimum
    longest = max(outcomes[node].seconds for node in group)
    return typical is None or longest <= max(_SLOW_SECONDS, _SLOW_FACTOR * typical)
