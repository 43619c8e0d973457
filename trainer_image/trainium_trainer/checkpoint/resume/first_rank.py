"""PURE. The decisions of the first rank at a start, from what all ranks report, and the part of each rank.

Reports travel up a tree to the first rank (`collectives.scatter_from_root`). Each rank gets back its part: the
snapshots to verify, what to send and to receive, or the end. So no rank receives the reports of all others, whose
number grows with the square of a job's size.

Guarantees:
- One decision is made in one place, and all ranks receive parts of it.
- Nothing is exchanged before every rank has verified its part.
- No rank is done before all have exchanged or loaded theirs.
- On damage all start again without the damaged part.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from trainium_contract.wire.checkpoint_manifest import folder_name, step_of
from trainium_trainer.checkpoint.errors import UnusableCheckpointError
from trainium_trainer.checkpoint.interfaces import Position
from trainium_trainer.checkpoint.resume.agreement import (
    BuddyCopy,
    Decision,
    Fresh,
    FromDurable,
    FromMemory,
    RankView,
    SnapshotInventory,
    choose_buddies,
    cleanup_ranks,
    decide,
)
from trainium_trainer.exits import TrainerError, UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trainium_trainer.checkpoint.memory.snapshot import Claim, ShardKey
    from trainium_trainer.checkpoint.root.survey import Committed, Survey
    from trainium_trainer.storage.errors import StorageError

SHARED_WARNINGS = 20
"""So many warnings go to every rank; the first has all of them."""


# ---- reports of ranks ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClaimReport:
    """The snapshots that a rank represents, after it has reported its place and its needs (its view)."""

    claims: frozenset[Claim] = frozenset()
    keeps: bool | None = None
    """Whether this rank's snapshots work; None on a rank that keeps none because a neighbour does."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankReport:
    """The outcome of a rank's part."""

    ok: bool = True
    lost: frozenset[Claim] = frozenset()
    """Snapshots that it could not read."""
    warnings: tuple[str, ...] = ()
    error: TrainerError | None = None
    damaged: tuple[tuple[str, str], ...] = ()
    """Folder and what is wrong."""


# ---- orders to ranks --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Check:
    """Open and verify these snapshots of the own store: of the own shard, and those that others will be sent."""

    claims: tuple[Claim, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """A transfer that a rank has part in."""

    round: int
    tag: int
    source: int
    target: int
    key: ShardKey


@dataclass(frozen=True, slots=True)
class Exchange:
    """Send and receive, in the order of the rounds."""

    moves: tuple[Move, ...]
    origin: Claim
    """The snapshot that the own shard stems from, wherever it comes from."""


@dataclass(frozen=True, slots=True)
class Load:
    """Fill the state from a committed checkpoint."""

    checkpoint: Committed


@dataclass(frozen=True, slots=True)
class Agreed:
    """The agreement that all ranks get at the end."""

    decision: Decision
    """Without transfers."""
    position: Position | None
    memory_is_safe: bool
    """Whether every shard has a rank that keeps snapshots."""
    durable_step: int
    """Newest good committed step, -1 for none."""
    milestone_tokens: int
    """Position of the newest milestone; 0 for none."""
    known_bad: frozenset[str]
    """Folders of checkpoints that were found damaged."""
    warnings: tuple[str, ...]
    guarded: bool
    """Whether a shard wants a copy on another node."""
    fenced: bool
    """The first rank has the fence of the durable root; else its first save that can claims it."""


@dataclass(frozen=True, slots=True)
class Done:
    """Every rank has its state, or its verified snapshot at hand."""

    agreed: Agreed
    cleans_up: bool
    """Whether this rank clears the leftovers of its store."""


Order = Check | Exchange | Load | Done


# ---- the first rank -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class ResumeLeader:
    """One start, as the first rank keeps it; empty on the others."""

    location: str
    """Location of the durable root, for sentences."""
    buddies: bool = True
    generation: int = 0
    """Generation of this start."""
    leftovers: tuple[str, ...] = ()
    warnings: dict[str, None] = field(default_factory=dict)
    wanted: tuple[BuddyCopy, ...] = ()
    """At the end: the copies that shards want."""
    views: Sequence[RankView] = ()
    _committed: dict[int, Committed] = field(default_factory=dict)
    _bad: dict[str, str] = field(default_factory=dict)
    _milestone_tokens: int = 0
    _problem: StorageError | None = None
    """Reason why the fence of the durable root is not ours, or why nothing is known of the root."""
    _surveyed: bool = False
    _kept: tuple[bool | None, ...] = ()
    _inventory: SnapshotInventory = field(default_factory=lambda: SnapshotInventory([], []))
    _decision: Decision = field(default_factory=Fresh)
    _exchanging: bool = False

    def record_problem(self, problem: StorageError) -> None:
        """Record that the durable root could not be read or acquired: nothing is known of it."""
        self._problem = problem

    def record_survey(self, found: Survey, problem: StorageError | None = None) -> None:
        """Record what is below the durable root, and why this start does not hold the fence, if it does not."""
        self._problem, self._surveyed = problem, True
        self._committed = {item.step: item for item in found.committed}
        self.leftovers = tuple(found.leftovers)
        self._milestone_tokens = max((item.manifest.tokens for item in found.milestones), default=0)
        self._record_damage(found.damaged.items(), (f"{problem}: it is not used" for problem in found.newer.values()))

    def collect(self, views: list[RankView]) -> list[tuple[RankView, ...]]:
        """To each rank, who shares its store. `views`: of all ranks, by rank, without claims."""
        self.views = views
        _refuse_other_meshes(views)
        together: dict[str, list[RankView]] = {}
        for view in views:
            together.setdefault(view.store, []).append(view)
        neighbours = {store: tuple(sharing) for store, sharing in together.items()}
        return [neighbours[view.store] for view in views]

    def decide(self, reports: list[ClaimReport]) -> list[Order]:
        """Return the first decision."""
        self._kept = tuple(report.keeps for report in reports)
        for report in reports:
            self._record_damage((), report.warnings)
        self._inventory = SnapshotInventory(self.views, [report.claims for report in reports])
        self._inventory.split(rank for rank, keeps in enumerate(self._kept) if keeps is False)
        return self._decide()

    def next_orders(self, reports: list[RankReport]) -> list[Order]:
        """Return the orders after each rank's part: the next part, or another decision when something was damaged."""
        for rank, each in enumerate(reports):
            if each.error is not None:
                raise each.error
            self._inventory.remove_claims(rank, each.lost)
            self._record_damage(each.damaged, each.warnings)
        fine = all(each.ok for each in reports)
        decision = self._decision
        if isinstance(decision, FromMemory):
            if not fine and self._exchanging:
                self._inventory.exclude(decision.moment)
                self.warnings["a snapshot arrived altered at a peer: an older state is used"] = None
            elif fine and decision.rounds and not self._exchanging:
                self._exchanging = True
                return self._exchange(decision)
        return self._done() if fine else self._decide()

    # ---- decisions --------------------------------------------------------------------------------------------------

    def _decide(self) -> list[Order]:
        self.views = self._inventory.views()
        self._exchanging = False
        decision = self._decision = decide(self.views, self._good_steps())
        self._need_storage(decision)
        if isinstance(decision, FromMemory):
            return [Check(claims) for claims in self._inventory.checks(decision)]
        if isinstance(decision, FromDurable):
            load = Load(self._committed[decision.step].for_readers())
            return [load for _ in self.views]
        self._refuse_damage()
        return self._done()

    def _exchange(self, decision: FromMemory) -> list[Order]:
        moves: list[list[Move]] = [[] for _ in self.views]
        for number, batch in enumerate(decision.rounds):
            for tag, each in enumerate(batch):
                move = Move(number, tag, each.source, each.target, each.key)
                for rank in {each.source, each.target}:
                    moves[rank].append(move)
        origins = self._inventory.origins(decision)
        return [Exchange(tuple(mine), origin) for mine, origin in zip(moves, origins, strict=True)]

    def _done(self) -> list[Order]:
        decision = self._decision
        broken = {view.store for view, keeps in zip(self.views, self._kept, strict=True) if keeps is False}
        if self.buddies and len(self.views) > 1:
            self.wanted = choose_buddies(self.views, {view.store for view in self.views} - broken)
        agreed = Agreed(
            decision=replace(decision, rounds=()) if isinstance(decision, FromMemory) else decision,
            position=self._position(decision),
            memory_is_safe=all(keeps is not False for keeps in self._kept),
            durable_step=max(self._good_steps(), default=-1),
            milestone_tokens=self._milestone_tokens,
            known_bad=frozenset(self._bad),
            warnings=for_all(self.warnings),
            guarded=bool(self.wanted),
            fenced=self._problem is None,
        )
        caring = cleanup_ranks(self.views)
        return [Done(agreed, view.rank in caring) for view in self.views]

    # ---- small parts ------------------------------------------------------------------------------------------------

    def _good_steps(self) -> list[int]:
        return [step for step in self._committed if folder_name(step) not in self._bad]

    def _position(self, decision: Decision) -> Position | None:
        if isinstance(decision, FromMemory):
            return decision.moment.position
        if isinstance(decision, Fresh):
            return None
        manifest = self._committed[decision.step].manifest
        return Position(step=manifest.step, samples=manifest.samples, tokens=manifest.tokens)

    def _need_storage(self, decision: Decision) -> None:
        """Raise what is wrong with the durable root, unless the run can go on without it for a while.

        It can where memory keeps what is trained. A root of which nothing is known may hold something newer than a
        snapshot of an earlier generation.
        """
        problem = self._problem
        if problem is None:
            return
        if isinstance(decision, FromMemory):
            can = self._surveyed or decision.moment.generation == self.generation
        else:
            can = isinstance(decision, FromDurable) and all(keeps is not False for keeps in self._kept)
        if not can:
            raise problem
        self.warnings[f"{problem}; training goes on, and saves as soon as the store takes it"] = None

    def _refuse_damage(self) -> None:
        bad = {name: text for name, text in self._bad.items() if step_of(name) is not None}
        if bad:
            problems = "; ".join(bad[name] for name in sorted(bad))
            raise UnusableCheckpointError(
                f"{self.location} holds checkpoints but none is whole ({problems}): restore one from a "
                "backup, or choose another checkpoint.path to start again from the beginning"
            )

    def _record_damage(self, damaged: Iterable[tuple[str, str]], warnings: Iterable[str]) -> None:
        for name, problem in damaged:
            self._bad[name] = problem
            what = f"checkpoint of step {step_of(name)}" if step_of(name) is not None else name
            self.warnings[f"{what} is damaged and not used: {problem}"] = None
        self.warnings.update(dict.fromkeys(warnings))


def for_all(warnings: Iterable[str]) -> tuple[str, ...]:
    """Return the warnings of some rank that every rank gets."""
    every = tuple(warnings)
    if len(every) <= SHARED_WARNINGS:
        return every
    return (*every[:SHARED_WARNINGS], f"{len(every) - SHARED_WARNINGS} more such warnings are in the output of rank 0")


def _refuse_other_meshes(views: Sequence[RankView]) -> None:
    """Raise UserError for a rank whose table of ranks has another form: it would look for shards that nobody has."""
    first = views[0].needs
    for view in views:
        if not view.needs.same_layout(first):
            raise UserError(
                f"rank {view.rank} has the mesh {_mesh(view.needs)} and rank 0 {_mesh(first)} (shards along tensor x "
                "data x pipeline): give all workers one configuration and one version of the image"
            )


def _mesh(key: ShardKey) -> str:
    return f"{key.tp_size} x {key.dp_size} x {key.pp_size}"


# ---- copies on other nodes ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplicaTask:
    """A guard that a rank has part in, as source or as target."""

    number: int
    guard: BuddyCopy
    layout: str
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity of one rank for its tasks."""

    numbers: frozenset[int]
    """The copies for which it has reserved files."""
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """The assignment of one rank."""

    numbers: frozenset[int]
    """Numbers of its copies that are kept."""
    keys: frozenset[ShardKey]
    """Shards of which its store has copies."""
    warnings: tuple[str, ...]


def tasks_of(
    wanted: Sequence[BuddyCopy], views: Sequence[RankView], sizes: Sequence[int]
) -> list[tuple[ReplicaTask, ...]]:
    """Return the tasks by rank, in the order of the copies. `sizes`: bytes of each rank's own shard."""
    found: list[list[ReplicaTask]] = [[] for _ in views]
    for number, guard in enumerate(wanted):
        task = ReplicaTask(number, guard, views[guard.source].layout, sizes[guard.source])
        for rank in (guard.source, guard.target):
            found[rank].append(task)
    return [tuple(tasks) for tasks in found]


def assignments_of(
    wanted: Sequence[BuddyCopy], views: Sequence[RankView], capacities: Sequence[Capacity]
) -> list[Assignment]:
    """Return the assignments by rank, once all have reported their capacity."""
    kept = frozenset(number for capacity in capacities for number in capacity.numbers)
    numbers: list[set[int]] = [set() for _ in views]
    copies: dict[str, set[ShardKey]] = {view.store: set() for view in views}
    for number in kept:
        guard = wanted[number]
        copies[views[guard.target].store].add(guard.key)
        numbers[guard.source].add(number)
        numbers[guard.target].add(number)
    keys = {store: frozenset(found) for store, found in copies.items()}
    warnings = for_all(warning for capacity in capacities for warning in capacity.warnings)
    return [Assignment(frozenset(numbers[rank]), keys[view.store], warnings) for rank, view in enumerate(views)]
