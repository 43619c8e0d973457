"""What one gather up the tree of pairs costs, and what goes down it: the bytes that rank 0 and others handle.

The same bytes as `checkpoint.gathering` sends (`pack` of `pack`s, level by level), made by one process for all ranks.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from trainium_trainer.checkpoint.collectives import pack, part

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Climb:
    """One gather; bytes, without the 8 of each message's length."""

    first: int
    """Received by rank 0."""
    middle: int
    """Received and sent by the rank in the middle, the root of half the tree."""
    total: int
    """Of all ranks together."""
    messages: int
    """That rank 0 receives."""
    down: int
    """What rank 0 has at the end, packed: what a broadcast brings to every rank."""
    said: tuple[bytes, ...] = field(repr=False)
    """The same, not packed."""


def climb(said: list[bytes], shorter: Callable[[list[bytes]], list[bytes]] = list) -> Climb:
    """The bytes that travel when ranks say this; `said` is what each of them has pickled.

    `shorter`: what a rank makes of what it has heard before it passes it on.
    """
    size = len(said)
    groups = {rank: [each] for rank, each in enumerate(said)}
    received, sent = [0] * size, [0] * size
    messages, distance = 0, 1
    while distance < size:
        for rank in range(distance, size, 2 * distance):
            groups[rank] = shorter(groups[rank])
            data = len(pack(groups[rank]))
            sent[rank] += data
            received[rank - distance] += data
            messages += rank == distance
            groups[rank - distance] += groups.pop(rank)
        distance *= 2
    middle = size // 2
    return Climb(
        received[0], received[middle] + sent[middle], sum(sent), messages, len(pack(groups[0])), tuple(groups[0])
    )


@dataclass(frozen=True, slots=True)
class Descent:
    """Answers on their way down; bytes."""

    first: int
    """Sent by rank 0."""
    middle: int
    """Received and sent by the rank in the middle."""
    leaf: int
    """Received by a rank that passes nothing on, as every other one."""
    total: int


def descend(answers: list[Any]) -> Descent:
    """The bytes that travel when rank 0 answers each rank."""
    size = len(answers)
    received, sent = [0] * size, [0] * size
    distance = 1
    while distance < size:
        for rank in range(distance, size, 2 * distance):
            data = len(part("value", answers[rank : rank + distance]))
            received[rank] += data
            sent[rank - distance] += data
        distance *= 2
    middle = size // 2
    return Descent(sent[0], received[middle] + sent[middle], received[middle + 1 if size > 2 else -1], sum(sent))


class Rounds:
    """Rounds of talk of all ranks with the first one, as `deal` carries them; adds up what they cost."""

    def __init__(self) -> None:
        self.climbs: list[Climb] = []
        self.descents: list[Descent] = []
        self.said: list[list[bytes]] = []

    def deal(self, said: list[Any], decide: Callable[[list[Any]], list[T]], label: str) -> list[T]:
        """One round."""
        words = as_said(said, label)
        answers = decide(said)
        self.said.append(words)
        self.climbs.append(climb(words))
        self.descents.append(descend(answers))
        return answers

    @property
    def _ways(self) -> list[Climb | Descent]:
        return [*self.climbs, *self.descents]

    @property
    def first(self) -> int:
        """Received and sent by rank 0."""
        return sum(each.first for each in self._ways)

    @property
    def middle(self) -> int:
        """By the rank in the middle."""
        return sum(each.middle for each in self._ways)

    @property
    def leaf(self) -> int:
        """By most ranks, without the little that they say themselves."""
        return sum(each.leaf for each in self.descents)

    @property
    def total(self) -> int:
        """By all."""
        return sum(each.total for each in self._ways)


def as_said(values: list[Any], label: str) -> list[bytes]:
    """What ranks send when `settle` or `deal` asks them."""
    return [pickle.dumps((label, pickle.dumps(("value", value)))) for value in values]
