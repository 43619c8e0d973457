"""Read the suites of the proof from suites.yaml, and draw trials: layouts of ranks and points of kills."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

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
    """A kind of run, from which trials are drawn (suites.yaml)."""

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

    introduction: str
    """Start of its section of the page, with the heading."""
    notes: str
    """End of its section."""

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


def _read_suites(file: Path) -> dict[str, Suite]:
    suites = {}
    for name, entry in yaml.safe_load(file.read_text()).items():
        scenarios = entry.pop("scenarios")
        for scenario in scenarios:
            scenario["attempts"] = tuple(_read_layout(**layout) for layout in scenario["attempts"])
        for field_name in ("kill_point_hits", "kill_point_hits_without_memory"):
            entry[field_name] = {Point(point): tuple(hits) for point, hits in entry[field_name].items()}
        suites[name] = Suite(name=name, scenarios=tuple(Scenario(**scenario) for scenario in scenarios), **entry)
    return suites


def _read_layout(dp: int, tp: int = 1, mode: str = DataParallelMode.REPLICATED) -> Layout:
    return Layout(dp, tp, DataParallelMode(mode))


SUITES = _read_suites(Path(__file__).with_name("suites.yaml"))
"""Suites by name, in the order of the page."""
PRETRAINING = SUITES["pretraining"]
