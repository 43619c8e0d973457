"""Define the suites of the proof, and draw trials: layouts of the ranks and the points at which they are killed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from benchmarks.proof.kill_points import Kill, Point
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
"""Additional share of kills of the first rank, which does more than the others after the last step."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of the ranks of an attempt."""

    dp: int
    tp: int = 1
    mode: DataParallelMode = DataParallelMode.REPLICATED

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.dp * self.tp

    @property
    def is_whole(self) -> bool:
        """Whether each rank holds the whole state."""
        return self.tp == 1 and not self.mode.is_sharded

    @property
    def name(self) -> str:
        """Name of the layout in tables."""
        return f"dp {self.dp}" + (f" x tp {self.tp}" if self.tp > 1 else "") + _MODES[self.mode]


@dataclass(frozen=True, slots=True)
class Family:
    """Layouts of the attempts of a run; each attempt but the last ends with a kill."""

    name: str
    what: str
    attempts: tuple[Layout, ...]
    memory: bool = True
    """Whether there is a memory tier, with each rank as a separate node."""
    node_is_lost: bool = False
    """Whether the memory of the killed rank's node is lost and another node replaces it."""
    through_nxd: bool = False
    """Whether the newest checkpoint is converted to NxD's layout and back, into a new root, between the attempts."""
    milestones: bool = False
    """Whether milestones are kept, with artifacts, while training continues."""

    @property
    def allowed_loss(self) -> str:
        """Maximum loss of a kill."""
        return "1 step" if self.memory else "the steps since the newest commit"


@dataclass(frozen=True, slots=True)
class Attempt:
    """A start of the ranks."""

    layout: Layout
    rank: int | None
    """The rank to kill; None for an attempt that ends by itself."""
    kill: Kill | None

    @property
    def follows_training(self) -> bool:
        """Whether the kill is after the last step."""
        return self.kill is not None and self.kill.point.follows_training


@dataclass(frozen=True, slots=True)
class Trial:
    """A run that is drawn from a seed."""

    seed: int
    family: Family
    point: Point
    attempts: tuple[Attempt, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A kind of run, and the trials that are drawn for it.

    The families are as many as have no divisor in common with the points: consecutive seeds meet every pair once.
    """

    name: str
    families: tuple[Family, ...]
    passes: Mapping[Point, tuple[int, int]]
    """The points, with the minimum and maximum number of passes before a kill."""
    passes_without_memory: Mapping[Point, tuple[int, int]] = field(default_factory=dict)
    """The same without a memory tier, where it differs."""
    steps: int
    global_batch: int
    save_every: int
    tunes: bool = False
    """Whether adapters of a base are trained on examples, followed by artifacts and an evaluation."""
    prefers: bool = False
    """Whether all weights of a base are trained on pairs of answers by DPO."""

    @property
    def points(self) -> tuple[Point, ...]:
        """Points at which ranks are killed."""
        return tuple(self.passes)


def trial(seed: int, suite: Suite) -> Trial:
    """Draw the trial of a seed; neighboring seeds have different points and families."""
    rng = random.Random(seed)
    point = suite.points[seed % len(suite.points)]
    family = suite.families[seed % len(suite.families)]
    attempts: list[Attempt] = []
    for number, layout in enumerate(family.attempts[:-1]):
        last = number == len(family.attempts) - 2
        here = point
        # A load is killed in the attempt after one that was killed in a step; of those that follow the last step the
        # first may have been.
        if point is Point.LOAD or (point.follows_training and not last and rng.random() < _IN_A_STEP):
            here = Point.STEP
        attempts.append(_killed(layout, here, family, suite, rng))
        if point is Point.LOAD and last:
            attempts.append(_killed(family.attempts[-1], Point.LOAD, family, suite, rng))
    attempts.append(Attempt(family.attempts[-1], None, None))
    return Trial(seed, family, point, tuple(attempts))


def _killed(layout: Layout, point: Point, family: Family, suite: Suite, rng: random.Random) -> Attempt:
    low, high = suite.passes[point]
    if not family.memory:
        low, high = suite.passes_without_memory.get(point, (low, high))
    rank = 0 if point is Point.COMMIT else rng.randrange(layout.ranks)
    if point.follows_training and rng.random() < _FIRST_RANK:
        rank = 0
    kill = Kill(point, rng.randint(low, high), rng.random(), rng.randrange(1 << 30))
    return Attempt(layout, rank, kill)


_SHARDED, _ZERO1 = DataParallelMode.FULLY_SHARDED, DataParallelMode.SHARDED_OPTIMIZER
_PRETRAINING = (
    Family("process", "a process is killed, all restart from memory", (Layout(2), Layout(2))),
    Family("node", "a node fails, its shard comes from its buddy", (Layout(3, mode=_SHARDED),) * 2, node_is_lost=True),
    Family("wide", "a node of a model wider than a node fails", (Layout(1, tp=2),) * 2, node_is_lost=True),
    Family(
        "resize",
        "each time a node fails and the size changes",
        (Layout(4), Layout(2), Layout(3), Layout(4)),
        node_is_lost=True,
    ),
    Family(
        "reshard",
        "all memory is lost, the checkpoint is read at another data-parallel size",
        (Layout(4, mode=_SHARDED), Layout(2, mode=_ZERO1), Layout(3, mode=_SHARDED), Layout(4)),
        memory=False,
    ),
    Family(
        "retensor",
        "all memory is lost, the checkpoint is read at another tensor-parallel size",
        (Layout(1, tp=2), Layout(2), Layout(2, tp=2, mode=_SHARDED)),
        memory=False,
    ),
    Family(
        "nxd",
        "all memory is lost, the checkpoint is converted to NxD's layout (tp 2, ZeRO-1 over 3) and back",
        (Layout(2), Layout(2)),
        memory=False,
        through_nxd=True,
    ),
)
_LIVES_AT_UNEVEN_SIZES = {
    "process": (Layout(3), Layout(3)),
    "node": (Layout(4, mode=_SHARDED),) * 2,
    "wide": (Layout(2, tp=2),) * 2,
    "idle": (Layout(6, mode=_ZERO1),) * 2,
    "resize": (Layout(4), Layout(3), Layout(2), Layout(4)),
    "reshard": (Layout(4, mode=_SHARDED), Layout(3, mode=_ZERO1), Layout(2, mode=_SHARDED), Layout(6)),
    "retensor": (Layout(2, tp=2), Layout(3), Layout(2, tp=2, mode=_SHARDED)),
}
_KINDS = {family.name: family for family in _PRETRAINING} | {
    "idle": Family("idle", "a process is killed, one rank has no sample at all", ())
}
_UNEVEN = tuple(replace(_KINDS[name], attempts=attempts) for name, attempts in _LIVES_AT_UNEVEN_SIZES.items())
_TUNING = (
    Family("process", "a process is killed, all restart from memory", (Layout(2), Layout(2))),
    Family("node", "a node fails, its shard comes from its buddy", (Layout(3, mode=_SHARDED),) * 2, node_is_lost=True),
    Family("wide", "a node of a model wider than a node fails", (Layout(1, tp=2),) * 2, node_is_lost=True),
    Family(
        "resize", "each time a node fails and the size changes", (Layout(4), Layout(2), Layout(3)), node_is_lost=True
    ),
    Family(
        "storage",
        "all memory is lost, the checkpoint is read at the same size; artifacts at milestones",
        (Layout(2),) * 3,
        memory=False,
        milestones=True,
    ),
    Family(
        "reshard",
        "all memory is lost, the checkpoint is read at another size",
        (Layout(4, mode=_SHARDED), Layout(1, tp=2), Layout(3, mode=_ZERO1)),
        memory=False,
    ),
)

PRETRAINING = Suite(
    name="pretraining",
    families=_PRETRAINING,
    passes={
        Point.STEP: (1, 9),
        Point.STAGING: (3, 24),
        Point.WRITING: (0, 2),
        Point.COMMIT: (0, 2),
        Point.LOAD: (0, 1),
    },
    passes_without_memory={Point.STAGING: (0, 2)},
    steps=20,
    global_batch=12,
    save_every=4,
)
UNEVEN = replace(PRETRAINING, name="uneven", families=_UNEVEN, global_batch=5)
"""Five samples, one for each rank and pass: no size divides them, and one of six ranks has no sample."""
PREFERENCES = replace(
    PRETRAINING, name="preferences", families=tuple(each for each in _PRETRAINING if not each.through_nxd), prefers=True
)
TUNING = Suite(
    name="tuning",
    families=_TUNING,
    passes={
        Point.STEP: (1, 6),
        Point.STAGING: (1, 12),
        Point.WRITING: (0, 2),
        Point.COMMIT: (0, 2),
        Point.LOAD: (0, 1),
        Point.EXPORT: (0, 0),  # they count by themselves: each place in them is passed another number of times
        Point.EVALUATE: (0, 0),
    },
    passes_without_memory={Point.STEP: (3, 7), Point.STAGING: (0, 2)},
    steps=15,
    global_batch=12,
    save_every=4,
    tunes=True,
)
