"""PURE. What a trial is: the layouts of the ranks, where they are killed, and what each layout promises."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.proof.strike import Point, Strike
from trainium_contract.trainer.parallelism import DataParallelMode

if TYPE_CHECKING:
    from collections.abc import Mapping

_MODES = {
    DataParallelMode.REPLICATED: "",
    DataParallelMode.FULLY_SHARDED: " sharded",
    DataParallelMode.SHARDED_OPTIMIZER: " sharded optimizer",
}
_IN_A_STEP = 0.5
_FIRST_RANK = 0.4
"""Besides its even share: the first rank does more than the others after the last step."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How one life of a run is cut up."""

    dp: int
    tp: int = 1
    mode: DataParallelMode = DataParallelMode.REPLICATED

    @property
    def ranks(self) -> int:
        """Processes."""
        return self.dp * self.tp

    @property
    def is_whole(self) -> bool:
        """Whether each rank holds the whole state."""
        return self.tp == 1 and not self.mode.is_sharded

    @property
    def name(self) -> str:
        """For people."""
        return f"dp {self.dp}" + (f" x tp {self.tp}" if self.tp > 1 else "") + _MODES[self.mode]


@dataclass(frozen=True, slots=True)
class Family:
    """Lives of a run, one after the other; each but the last is ended by a kill."""

    name: str
    what: str
    lives: tuple[Layout, ...]
    memory: bool = True
    """Whether there is a memory tier, each rank being a node of its own."""
    node_is_lost: bool = False
    """Whether the memory of the killed rank's node is lost, and another node takes its place."""
    through_nxd: bool = False
    """Whether the newest checkpoint is converted to NxD's layout and back, into a new root, between the lives."""
    milestones: bool = False
    """Whether weights are kept, and artifacts written of them, while training goes on."""

    @property
    def promise(self) -> str:
        """What may be lost at most."""
        return "1 step" if self.memory else "the steps since the newest commit"


@dataclass(frozen=True, slots=True)
class Life:
    """One start of the ranks."""

    layout: Layout
    victim: int | None
    """The rank that is to be killed; None for a life that is to end by itself."""
    strike: Strike | None

    @property
    def follows_training(self) -> bool:
        """Whether it is to be struck after the last step."""
        return self.strike is not None and self.strike.point.follows_training


@dataclass(frozen=True, slots=True)
class Trial:
    """One seeded run."""

    seed: int
    family: Family
    point: Point
    lives: tuple[Life, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Trials of one kind of run.

    The families are as many as have no divisor in common with the points: consecutive seeds meet every pair once.
    """

    name: str
    families: tuple[Family, ...]
    passes: Mapping[Point, tuple[int, int]]
    """The points, and how often a rank passes each unharmed: least and most."""
    passes_without_memory: Mapping[Point, tuple[int, int]] = field(default_factory=dict)
    """Where that differs without a memory tier."""
    steps: int
    global_batch: int
    save_every: int
    tunes: bool = False
    """Whether adapters of a given base are trained on examples, and artifacts and an evaluation follow."""

    @property
    def points(self) -> tuple[Point, ...]:
        """Where ranks are killed."""
        return tuple(self.passes)


def trial(seed: int, suite: Suite) -> Trial:
    """The trial of a seed; neighbouring seeds have different points and families."""
    dice = random.Random(seed)
    point = suite.points[seed % len(suite.points)]
    family = suite.families[seed % len(suite.families)]
    lives: list[Life] = []
    for number, layout in enumerate(family.lives[:-1]):
        last = number == len(family.lives) - 2
        here = point
        # A load is struck in the life after one that was killed in a step; of those that follow the last step the
        # first may have been.
        if point is Point.LOAD or (point.follows_training and not last and dice.random() < _IN_A_STEP):
            here = Point.STEP
        lives.append(_struck(layout, here, family, suite, dice))
        if point is Point.LOAD and last:
            lives.append(_struck(family.lives[-1], Point.LOAD, family, suite, dice))
    lives.append(Life(family.lives[-1], None, None))
    return Trial(seed, family, point, tuple(lives))


def _struck(layout: Layout, point: Point, family: Family, suite: Suite, dice: random.Random) -> Life:
    low, high = suite.passes[point]
    if not family.memory:
        low, high = suite.passes_without_memory.get(point, (low, high))
    victim = 0 if point is Point.COMMIT else dice.randrange(layout.ranks)
    if point.follows_training and dice.random() < _FIRST_RANK:
        victim = 0
    strike = Strike(point, dice.randint(low, high), dice.random(), dice.randrange(1 << 30))
    return Life(layout, victim, strike)
