"""PURE. What is tried: the layouts of the ranks, where they are killed, and what each layout promises."""

from __future__ import annotations

import random
from dataclasses import dataclass

from benchmarks.proof.strike import Point, Strike

from trainium_contract.trainer_parallelism import DataParallelMode

STEPS = 20
GLOBAL_BATCH = 12
SAVE_EVERY = 4
_SHARDED, _ZERO1 = DataParallelMode.FULLY_SHARDED, DataParallelMode.SHARDED_OPTIMIZER
_MODES = {DataParallelMode.REPLICATED: "", _SHARDED: " sharded", _ZERO1: " sharded optimizer"}


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

    @property
    def promise(self) -> str:
        """What may be lost at most."""
        return "1 step" if self.memory else "the steps since the newest commit"


FAMILIES = (
    Family("process", "a process is lost, all restart from memory", (Layout(2), Layout(2))),
    Family(
        "node", "a node is lost, its shard comes from its buddy", (Layout(3, mode=_SHARDED),) * 2, node_is_lost=True
    ),
    Family("wide", "a node of a model wider than a node is lost", (Layout(1, tp=2),) * 2, node_is_lost=True),
    Family(
        "resize",
        "each time a node is lost and the size changes",
        (Layout(4), Layout(2), Layout(3), Layout(4)),
        node_is_lost=True,
    ),
    Family(
        "reshard",
        "all memory is lost, storage is read at another data-parallel size",
        (Layout(4, mode=_SHARDED), Layout(2, mode=_ZERO1), Layout(3, mode=_SHARDED), Layout(4)),
        memory=False,
    ),
    Family(
        "retensor",
        "all memory is lost, storage is read at another tensor-parallel size",
        (Layout(1, tp=2), Layout(2), Layout(2, tp=2, mode=_SHARDED)),
        memory=False,
    ),
    Family(
        "nxd",
        "all is lost but the checkpoint, which goes through NxD's layout (tp 2, ZeRO-1 over 3) and back",
        (Layout(2), Layout(2)),
        memory=False,
        through_nxd=True,
    ),
)
"""As many as have no divisor in common with the points, so that consecutive seeds meet every pair once."""

_PASSES = {Point.STEP: (1, 9), Point.STAGING: (3, 24), Point.WRITING: (0, 2), Point.COMMIT: (0, 2), Point.LOAD: (0, 1)}
_PASSES_WITHOUT_MEMORY = {Point.STAGING: (0, 2)}


@dataclass(frozen=True, slots=True)
class Life:
    """One start of the ranks."""

    layout: Layout
    victim: int | None
    """The rank that is to be killed; None for a life that is to end by itself."""
    strike: Strike | None


@dataclass(frozen=True, slots=True)
class Trial:
    """One seeded run."""

    seed: int
    family: Family
    point: Point
    lives: tuple[Life, ...]


def trial(seed: int) -> Trial:
    """The trial of a seed; neighbouring seeds have different points and families."""
    dice = random.Random(seed)
    points = tuple(Point)
    point = points[seed % len(points)]
    family = FAMILIES[seed % len(FAMILIES)]
    lives: list[Life] = []
    for number, layout in enumerate(family.lives[:-1]):
        # A load is struck in the life after one that was killed in a step.
        lives.append(_struck(layout, Point.STEP if point is Point.LOAD else point, family, dice))
        if point is Point.LOAD and number == len(family.lives) - 2:
            lives.append(_struck(family.lives[-1], Point.LOAD, family, dice))
    lives.append(Life(family.lives[-1], None, None))
    return Trial(seed, family, point, tuple(lives))


def _struck(layout: Layout, point: Point, family: Family, dice: random.Random) -> Life:
    low, high = _PASSES[point] if family.memory else _PASSES_WITHOUT_MEMORY.get(point, _PASSES[point])
    victim = 0 if point is Point.COMMIT else dice.randrange(layout.ranks)
    strike = Strike(point, dice.randint(low, high), dice.random(), dice.randrange(1 << 30))
    return Life(layout, victim, strike)
