"""Define the suites of the proof, and draw trials: layouts of ranks and points of kills."""

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
_STEP_KILL_PROBABILITY = 0.5
_FIRST_RANK_PROBABILITY = 0.4
"""Probability that the first rank is chosen; it has more work than the others after the last step."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of the ranks of an attempt."""

    dp: int
    tp: int = 1
    mode: DataParallelMode = DataParallelMode.REPLICATED

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.dp * self.tp

    @property
    def holds_whole_state(self) -> bool:
        """Whether each rank holds the whole state."""
        return self.tp == 1 and not self.mode.is_sharded

    @property
    def name(self) -> str:
        """Name of the layout in tables."""
        return f"dp {self.dp}" + (f" x tp {self.tp}" if self.tp > 1 else "") + _MODES[self.mode]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Layouts of the attempts of a run; each attempt but the last ends with a kill."""

    name: str
    description: str
    attempts: tuple[Layout, ...]
    memory: bool = True
    """Whether there is a memory tier, with each rank as a separate node."""
    node_lost: bool = False
    """Whether the memory of the killed rank's node is lost and another node replaces it."""
    through_nxd: bool = False
    """Whether the newest checkpoint is converted to NxD's layout and back, into a new root, between the attempts."""
    milestones: bool = False
    """Whether milestones are kept, with artifacts, while training continues."""

    @property
    def allowed_loss(self) -> str:
        """Describe the largest number of steps that a kill may lose."""
        return "1 step" if self.memory else "the steps since the newest commit"


@dataclass(frozen=True, slots=True)
class Attempt:
    """A start of the ranks."""

    layout: Layout
    rank: int | None
    """The rank to kill; None for an attempt without a kill."""
    kill: Kill | None

    @property
    def follows_training(self) -> bool:
        """Whether the kill is after the last step."""
        return self.kill is not None and self.kill.point.follows_training


@dataclass(frozen=True, slots=True)
class Trial:
    """A run drawn from a seed."""

    seed: int
    scenario: Scenario
    point: Point
    attempts: tuple[Attempt, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A kind of run, from which trials are drawn.

    The numbers of scenarios and points have no common divisor, so consecutive seeds cover every pair once.
    """

    name: str
    scenarios: tuple[Scenario, ...]
    kill_point_hits: Mapping[Point, tuple[int, int]]
    """The points, with the minimum and maximum number of hits before a kill."""
    kill_point_hits_without_memory: Mapping[Point, tuple[int, int]] = field(default_factory=dict)
    """The same without a memory tier, if it differs."""
    steps: int
    global_batch: int
    save_every: int
    tuning: bool = False
    """Whether adapters of a base are trained on examples, followed by artifacts and an evaluation."""
    preferences: bool = False
    """Whether all weights of a base are trained on pairs of answers by DPO."""

    @property
    def points(self) -> tuple[Point, ...]:
        """Points at which ranks are killed."""
        return tuple(self.kill_point_hits)


def draw_trial(seed: int, suite: Suite) -> Trial:
    """Draw the trial of a seed; consecutive seeds have different points and scenarios."""
    rng = random.Random(seed)
    point = suite.points[seed % len(suite.points)]
    scenario = suite.scenarios[seed % len(suite.scenarios)]
    attempts: list[Attempt] = []
    for number, layout in enumerate(scenario.attempts[:-1]):
        is_last = number == len(scenario.attempts) - 2
        kill_point = point
        # A kill in a load follows an attempt that was killed in a step. Before a kill after the last step the first
        # attempt may have been killed in a step too.
        if point is Point.LOAD or (point.follows_training and not is_last and rng.random() < _STEP_KILL_PROBABILITY):
            kill_point = Point.STEP
        attempts.append(_draw_attempt(layout, kill_point, scenario, suite, rng))
        if point is Point.LOAD and is_last:
            attempts.append(_draw_attempt(scenario.attempts[-1], Point.LOAD, scenario, suite, rng))
    attempts.append(Attempt(scenario.attempts[-1], None, None))
    return Trial(seed, scenario, point, tuple(attempts))


def _draw_attempt(layout: Layout, point: Point, scenario: Scenario, suite: Suite, rng: random.Random) -> Attempt:
    low, high = suite.kill_point_hits[point]
    if not scenario.memory:
        low, high = suite.kill_point_hits_without_memory.get(point, (low, high))
    rank = 0 if point is Point.COMMIT else rng.randrange(layout.ranks)
    if point.follows_training and rng.random() < _FIRST_RANK_PROBABILITY:
        rank = 0
    kill = Kill(point, rng.randint(low, high), rng.random(), rng.randrange(1 << 30))
    return Attempt(layout, rank, kill)


_SHARDED, _ZERO1 = DataParallelMode.FULLY_SHARDED, DataParallelMode.SHARDED_OPTIMIZER
_PRETRAINING = (
    Scenario("process", "a process is killed, all restart from memory", (Layout(2), Layout(2))),
    Scenario("node", "a node fails, its shard comes from its buddy", (Layout(3, mode=_SHARDED),) * 2, node_lost=True),
    Scenario("wide", "a node of a model wider than a node fails", (Layout(1, tp=2),) * 2, node_lost=True),
    Scenario(
        "resize",
        "each time a node fails and the size changes",
        (Layout(4), Layout(2), Layout(3), Layout(4)),
        node_lost=True,
    ),
    Scenario(
        "reshard",
        "all memory is lost, the checkpoint is read at another data-parallel size",
        (Layout(4, mode=_SHARDED), Layout(2, mode=_ZERO1), Layout(3, mode=_SHARDED), Layout(4)),
        memory=False,
    ),
    Scenario(
        "retensor",
        "all memory is lost, the checkpoint is read at another tensor-parallel size",
        (Layout(1, tp=2), Layout(2), Layout(2, tp=2, mode=_SHARDED)),
        memory=False,
    ),
    Scenario(
        "nxd",
        "all memory is lost, the checkpoint is converted to NxD's layout (tp 2, ZeRO-1 over 3) and back",
        (Layout(2), Layout(2)),
        memory=False,
        through_nxd=True,
    ),
)
_UNEVEN_LAYOUTS = {
    "process": (Layout(3), Layout(3)),
    "node": (Layout(4, mode=_SHARDED),) * 2,
    "wide": (Layout(2, tp=2),) * 2,
    "idle": (Layout(6, mode=_ZERO1),) * 2,
    "resize": (Layout(4), Layout(3), Layout(2), Layout(4)),
    "reshard": (Layout(4, mode=_SHARDED), Layout(3, mode=_ZERO1), Layout(2, mode=_SHARDED), Layout(6)),
    "retensor": (Layout(2, tp=2), Layout(3), Layout(2, tp=2, mode=_SHARDED)),
}
_SCENARIO_BY_NAME = {scenario.name: scenario for scenario in _PRETRAINING} | {
    "idle": Scenario("idle", "a process is killed, one rank has no sample at all", ())
}
_UNEVEN = tuple(replace(_SCENARIO_BY_NAME[name], attempts=attempts) for name, attempts in _UNEVEN_LAYOUTS.items())
_TUNING = (
    Scenario("process", "a process is killed, all restart from memory", (Layout(2), Layout(2))),
    Scenario("node", "a node fails, its shard comes from its buddy", (Layout(3, mode=_SHARDED),) * 2, node_lost=True),
    Scenario("wide", "a node of a model wider than a node fails", (Layout(1, tp=2),) * 2, node_lost=True),
    Scenario(
        "resize", "each time a node fails and the size changes", (Layout(4), Layout(2), Layout(3)), node_lost=True
    ),
    Scenario(
        "storage",
        "all memory is lost, the checkpoint is read at the same size; artifacts at milestones",
        (Layout(2),) * 3,
        memory=False,
        milestones=True,
    ),
    Scenario(
        "reshard",
        "all memory is lost, the checkpoint is read at another size",
        (Layout(4, mode=_SHARDED), Layout(1, tp=2), Layout(3, mode=_ZERO1)),
        memory=False,
    ),
)

PRETRAINING = Suite(
    name="pretraining",
    scenarios=_PRETRAINING,
    kill_point_hits={
        Point.STEP: (1, 9),
        Point.STAGING: (3, 24),
        Point.WRITING: (0, 2),
        Point.COMMIT: (0, 2),
        Point.LOAD: (0, 1),
    },
    kill_point_hits_without_memory={Point.STAGING: (0, 2)},
    steps=20,
    global_batch=12,
    save_every=4,
)
UNEVEN = replace(PRETRAINING, name="uneven", scenarios=_UNEVEN, global_batch=5)
"""Five samples, one for each rank and pass: no size divides them, and one of six ranks has no sample."""
PREFERENCES = replace(
    PRETRAINING,
    name="preferences",
    scenarios=tuple(scenario for scenario in _PRETRAINING if not scenario.through_nxd),
    preferences=True,
)
TUNING = Suite(
    name="tuning",
    scenarios=_TUNING,
    kill_point_hits={
        Point.STEP: (1, 6),
        Point.STAGING: (1, 12),
        Point.WRITING: (0, 2),
        Point.COMMIT: (0, 2),
        Point.LOAD: (0, 1),
        Point.EXPORT: (0, 0),  # these points count hits themselves, because each of their places has another number
        Point.EVALUATE: (0, 0),
    },
    kill_point_hits_without_memory={Point.STEP: (3, 7), Point.STAGING: (0, 2)},
    steps=15,
    global_batch=12,
    save_every=4,
    tuning=True,
)
