"""Find a faulty or slow node by rounds of exchanges between pairs of nodes, as pure functions of their results.

First all nodes are paired. The nodes of failed pairs are suspects; each of them is paired again with a node whose
exchange passed, and one that fails again is bad. Two rounds are enough for any number of nodes; with more suspects than
good nodes the second takes several waves, and where no pair passed a few nodes are paired with each other in turn.

Guarantees:
- A node that passed an exchange with any node is never found bad for its exchanges; where none passed, none is.
- A fault of one pair only (a link between them) is attributed to neither.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from trainium_contract.faults.causes import Cause

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainium_agent.exits.restart_policy import GenerationState

UNEXPLAINED = 2
"""Collective failures without a culprit that call for the test."""
FEWEST_NODES = 3
"""With two nodes a failed exchange blames neither."""
_SLOW_FACTOR = 4.0
_SLOW_SECONDS = 0.5
_MOST_IN_TURN = 8

Group = tuple[int, ...]
"""Node ranks that exchange with each other; the first one leads."""
Wave = tuple[Group, ...]
"""Groups without a node in common, which work at the same time."""


@dataclass(frozen=True, slots=True)
class PairingResult:
    """The result of one node in one exchange."""

    passed: bool
    """The exchange went through and its numbers were right."""
    seconds: float = 0.0
    healthy: bool = True
    """The node's own computation was right."""
    detail: str = ""
    gigabits: float = 0.0
    """Bandwidth of the exchange, Gbit/s: what a node sends in a ring, over the time; 0 where it is not known."""

    def encode(self) -> str:
        """Return the value as text."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> PairingResult:
        """Decode the text of the same generation's agents."""
        return PairingResult(**json.loads(text))


@dataclass(frozen=True, slots=True)
class WaveResults:
    """One wave and what its nodes reported; a node that reported nothing is missing."""

    wave: Wave
    outcomes: Mapping[int, PairingResult]


def is_due(state: GenerationState, nodes: int) -> bool:
    """Return whether the attempt that is about to begin should be preceded by the test."""
    return nodes >= FEWEST_NODES and state.unexplained >= UNEXPLAINED


def noted(before: GenerationState, after: GenerationState) -> GenerationState:
    """Return the state after a failure, with a lost peer counted as unexplained until its culprit is known."""
    if after.attempt > before.attempt and after.cause is Cause.PEER_LOST:
        return replace(after, unexplained=after.unexplained + 1)
    if after.attempt == before.attempt and before.cause is Cause.PEER_LOST and after.cause is not Cause.PEER_LOST:
        return replace(after, unexplained=max(0, after.unexplained - 1))
    return after


def next_wave(nodes: int, held: Sequence[WaveResults], minimum: float | None = None) -> Wave | None:
    """Return the exchanges to hold next; None when the verdict can be read.

    `minimum`: an exchange below this bandwidth (Gbit/s) failed; None: one that took much longer than others did.
    """
    plan = _plan(nodes, held, minimum)
    return plan[len(held)] if len(held) < len(plan) else None


def unhealthy(held: Sequence[WaveResults]) -> frozenset[int]:
    """Nodes that compute wrong numbers by themselves."""
    return frozenset(node for each in held for node, outcome in each.outcomes.items() if not outcome.healthy)


def disconnected(held: Sequence[WaveResults], minimum: float | None = None) -> frozenset[int]:
    """Nodes that could not exchange with anybody, although others could; `minimum` as in `next_wave`."""
    typical = _typical(held)
    tried: dict[int, int] = {}
    passed: set[int] = set()
    for each in held:
        for group in each.wave:
            well = _went_well(group, each.outcomes, typical, minimum)
            for node in group:
                tried[node] = tried.get(node, 0) + 1
                if well:
                    passed.add(node)
    if not passed:
        return frozenset()
    return frozenset(node for node, times in tried.items() if times > 1 and node not in passed)


def slowest_link(held: Sequence[WaveResults]) -> tuple[Group, float] | None:
    """Return the group with the lowest bandwidth, in Gbit/s; None where none was measured."""
    measured = [
        (min(each.outcomes[node].gigabits for node in group), group)
        for each in held
        for group in each.wave
        if all(node in each.outcomes and each.outcomes[node].gigabits > 0 for node in group)
    ]
    return min(measured)[::-1] if measured else None


def first_wave(nodes: int) -> Wave:
    """Pair all nodes with neighbours; an odd one joins the last pair."""
    groups = [tuple(range(start, min(start + 2, nodes))) for start in range(0, nodes, 2)]
    if len(groups) > 1 and len(groups[-1]) == 1:
        groups[-2:] = [groups[-2] + groups[-1]]
    return tuple(groups)


def _plan(nodes: int, held: Sequence[WaveResults], minimum: float | None) -> list[Wave]:
    """Return all waves as far as they are known by now."""
    first = first_wave(nodes)
    if not held:
        return [first]
    typical = _typical(held[:1])
    good = [node for group in first if _went_well(group, held[0].outcomes, typical, minimum) for node in group]
    suspects = [node for node in range(nodes) if node not in good]
    if not suspects:
        return [first]
    if good:
        batches = [suspects[start : start + len(good)] for start in range(0, len(suspects), len(good))]
        return [first, *(tuple(zip(good, batch, strict=False)) for batch in batches)]
    return [first, *_in_turn(suspects)] if nodes <= _MOST_IN_TURN else [first]


def _in_turn(nodes: list[int]) -> list[Wave]:
    """Everybody with everybody, once (the circle method)."""
    circle: list[int | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    waves: list[Wave] = []
    for _ in range(len(circle) - 1):
        pairs = zip(circle[: len(circle) // 2], reversed(circle[len(circle) // 2 :]), strict=True)
        waves.append(tuple((left, right) for left, right in pairs if left is not None and right is not None))
        circle[1:] = [circle[-1], *circle[1:-1]]
    return waves


def _typical(held: Sequence[WaveResults]) -> float | None:
    """Return the usual length of an exchange that went through; None when there is nothing to compare."""
    lengths = sorted(
        max(each.outcomes[node].seconds for node in group)
        for each in held[:1]
        for group in each.wave
        if all(node in each.outcomes and each.outcomes[node].passed for node in group)
    )
    return lengths[(len(lengths) - 1) // 2] if len(lengths) > 1 else None


def _went_well(
    group: Group, outcomes: Mapping[int, PairingResult], typical: float | None, minimum: float | None
) -> bool:
    if any(node not in outcomes or not outcomes[node].passed for node in group):
        return False
    if minimum is not None:
        return min(outcomes[node].gigabits for node in group) >= minimum
    longest = max(outcomes[node].seconds for node in group)
    return typical is None or longest <= max(_SLOW_SECONDS, _SLOW_FACTOR * typical)
