"""The decisions of rank 0 at a start, from the reports of all ranks, and the orders to each rank. Pure.

Reports travel up a tree to rank 0 (`collectives.scatter_from_root`). Each rank gets its order back: the
snapshots to verify, the transfers, or the end. So no rank but the first receives the reports of all ranks; in total
they would grow with the square of a job's size.

Guarantees:
- Rank 0 makes one decision, and all ranks receive parts of it.
- Nothing is exchanged before every rank has verified its part.
- No rank is done before all have exchanged or loaded theirs.
- On damage all ranks start again without the damaged part.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from trainium_contract.wire.checkpoint_manifest import folder_name, parse_step
from trainium_trainer.checkpoint.errors import UnusableCheckpointError
from trainium_trainer.checkpoint.interfaces import Position
from trainium_trainer.checkpoint.memory.layout import describe_mesh
from trainium_trainer.checkpoint.resume.agreement import (
    Decision,
    FreshStart,
    RankView,
    ResumeFromDurable,
    ResumeFromMemory,
    SnapshotInventory,
    Transfer,
    choose_buddies,
    decide,
    find_cleanup_ranks,
)
from trainium_trainer.exits import TrainerError, UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trainium_trainer.checkpoint.root.survey import CommittedCheckpoint, Survey
    from trainium_trainer.storage.errors import StorageError
    from trainium_worker.snapshots.files import Part

SHARED_WARNINGS = 20
"""The number of warnings that every rank gets; rank 0 has all of them."""


# ---- reports of ranks -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SnapshotReport:
    """The snapshots that a rank represents, reported after its view."""

    records: frozenset[Part] = frozenset()
    can_write: bool | None = None
    """Whether this rank can write snapshots; None on a rank whose neighbour writes them."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankReport:
    """The outcome of a rank's order."""

    ok: bool = True
    unreadable: frozenset[Part] = frozenset()
    """The snapshots that the rank could not read."""
    warnings: tuple[str, ...] = ()
    error: TrainerError | None = None
    damaged: tuple[tuple[str, str], ...] = ()
    """The damaged checkpoint folder and the problem."""


# ---- orders to ranks ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verify:
    """Open and verify these snapshots of the rank's store: that of its shard, and those that it sends to others."""

    records: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Exchange:
    """Send and receive snapshots in the order of the rounds."""

    rounds: Sequence[Sequence[Transfer]]
    """The transfers of each round in which the rank takes part."""
    origin: Part
    """The snapshot from which the rank's shard originates."""


@dataclass(frozen=True, slots=True)
class Load:
    """Fill the state from a committed checkpoint."""

    checkpoint: CommittedCheckpoint


@dataclass(frozen=True, slots=True)
class Agreement:
    """The result that all ranks get at the end."""

    decision: Decision
    """The decision without its transfers."""
    position: Position | None
    memory_is_safe: bool
    """Whether every shard has a rank that writes snapshots."""
    durable_step: int
    """The newest valid committed step, -1 for none."""
    milestone_tokens: int
    """The position, in tokens, of the newest milestone; 0 for none."""
    known_bad: frozenset[str]
    """The folders of damaged checkpoints."""
    warnings: tuple[str, ...]
    needs_buddies: bool
    """Whether a shard needs a copy on another node."""
    holds_fence: bool
    """Whether rank 0 has claimed the fence of the durable root; else its first save that can claims it."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Every rank has its state or its verified snapshot."""

    agreed: Agreement
    cleans_up: bool
    """Whether this rank removes the leftovers of its store."""


Order = Verify | Exchange | Load | Finish


# ---- rank 0 ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class ResumeLeader:
    """The state of one start on rank 0; empty on the other ranks."""

    location: str
    """The location of the durable root, for messages."""
    buddies: bool = True
    generation: int = 0
    """The generation of this start."""
    leftovers: tuple[str, ...] = ()
    warnings: dict[str, None] = field(default_factory=dict)
    buddy_copies: tuple[Transfer, ...] = ()
    """The copies that shards need; set at the end."""
    views: Sequence[RankView] = ()
    _committed: dict[int, CommittedCheckpoint] = field(default_factory=dict)
    _bad: dict[str, str] = field(default_factory=dict)
    _milestone_tokens: int = 0
    _problem: StorageError | None = None
    """The reason why this start does not hold the fence of the durable root, or could not read the root."""
    _surveyed: bool = False
    _can_write: tuple[bool | None, ...] = ()
    _inventory: SnapshotInventory = field(default_factory=lambda: SnapshotInventory([], []))
    _decision: Decision = field(default_factory=FreshStart)
    _exchanging: bool = False

    def record_problem(self, problem: StorageError) -> None:
        """Record that the durable root could not be read or acquired."""
        self._problem = problem

    def record_survey(self, survey: Survey, problem: StorageError | None = None) -> None:
        """Record the survey of the durable root, and why this start does not hold the fence, if it does not."""
        self._problem, self._surveyed = problem, True
        self._committed = {item.step: item for item in survey.committed}
        self.leftovers = tuple(survey.leftovers)
        self._milestone_tokens = max((item.manifest.tokens for item in survey.milestones), default=0)
        self._record_damage(
            survey.damaged.items(), (f"{problem}: it is not used" for problem in survey.other_versions.values())
        )

    def collect(self, views: list[RankView]) -> list[tuple[RankView, ...]]:
        """Return for each rank the ranks that share its store; `views` are by rank and without records."""
        self.views = views
        _refuse_other_meshes(views)
        together: dict[str, list[RankView]] = {}
        for view in views:
            together.setdefault(view.store, []).append(view)
        neighbours = {store: tuple(sharing) for store, sharing in together.items()}
        return [neighbours[view.store] for view in views]

    def decide(self, reports: list[SnapshotReport]) -> list[Order]:
        """Return the first decision."""
        self._can_write = tuple(report.can_write for report in reports)
        for report in reports:
            self._record_damage((), report.warnings)
        self._inventory = SnapshotInventory(self.views, [report.records for report in reports])
        self._inventory.split(rank for rank, can_write in enumerate(self._can_write) if can_write is False)
        return self._decide()

    def decide_orders(self, reports: list[RankReport]) -> list[Order]:
        """Return the orders after the reports of all ranks: the next ones, or those of a new decision after damage."""
        for rank, report in enumerate(reports):
            if report.error is not None:
                raise report.error
            self._inventory.remove_records(rank, report.unreadable)
            self._record_damage(report.damaged, report.warnings)
        all_ok = all(report.ok for report in reports)
        decision = self._decision
        if isinstance(decision, ResumeFromMemory):
            if not all_ok and self._exchanging:
                self._inventory.exclude(decision.version)
                self.warnings["a snapshot arrived altered at a peer: an older state is used"] = None
            elif all_ok and decision.rounds and not self._exchanging:
                self._exchanging = True
                return self._exchange(decision)
        return self._finish() if all_ok else self._decide()

    # ---- decisions --------------------------------------------------------------------------------------------------

    def _decide(self) -> list[Order]:
        self.views = self._inventory.summarize_by_rank()
        self._exchanging = False
        decision = self._decision = decide(self.views, self._list_good_steps())
        self._require_storage(decision)
        if isinstance(decision, ResumeFromMemory):
            return [Verify(records) for records in self._inventory.list_checks(decision)]
        if isinstance(decision, ResumeFromDurable):
            load = Load(self._committed[decision.step].drop_shards())
            return [load for _ in self.views]
        self._refuse_damage()
        return self._finish()

    def _exchange(self, decision: ResumeFromMemory) -> list[Order]:
        rounds_by_rank: list[list[list[Transfer]]] = [[[] for _ in decision.rounds] for _ in self.views]
        for number, transfers in enumerate(decision.rounds):
            for transfer in transfers:
                for rank in (transfer.source, transfer.target):
                    rounds_by_rank[rank][number].append(transfer)
        origins = self._inventory.find_origins(decision)
        return [Exchange(rounds, origin) for rounds, origin in zip(rounds_by_rank, origins, strict=True)]

    def _finish(self) -> list[Order]:
        decision = self._decision
        broken = {view.store for view, can_write in zip(self.views, self._can_write, strict=True) if can_write is False}
        if self.buddies and len(self.views) > 1:
            self.buddy_copies = choose_buddies(self.views, {view.store for view in self.views} - broken)
        agreed = Agreement(
            decision=replace(decision, rounds=()) if isinstance(decision, ResumeFromMemory) else decision,
            position=self._read_position(decision),
            memory_is_safe=False not in self._can_write,
            durable_step=max(self._list_good_steps(), default=-1),
            milestone_tokens=self._milestone_tokens,
            known_bad=frozenset(self._bad),
            warnings=limit_warnings(self.warnings),
            needs_buddies=bool(self.buddy_copies),
            holds_fence=self._problem is None,
        )
        cleaning = find_cleanup_ranks(self.views)
        return [Finish(agreed, view.rank in cleaning) for view in self.views]

    # ---- small parts ------------------------------------------------------------------------------------------------

    def _list_good_steps(self) -> list[int]:
        return [step for step in self._committed if folder_name(step) not in self._bad]

    def _read_position(self, decision: Decision) -> Position | None:
        if isinstance(decision, ResumeFromMemory):
            return Position.decode(decision.version.step, decision.version.details)
        if isinstance(decision, FreshStart):
            return None
        manifest = self._committed[decision.step].manifest
        return Position(step=manifest.step, samples=manifest.samples, tokens=manifest.tokens)

    def _require_storage(self, decision: Decision) -> None:
        """Raise the problem of the durable root, unless the run can continue without it for a while.

        It can continue if snapshots in memory keep the progress. A root that could not be read may hold a checkpoint
        newer than a snapshot of an earlier generation.
        """
        problem = self._problem
        if problem is None:
            return
        if isinstance(decision, ResumeFromMemory):
            can = self._surveyed or decision.version.generation == self.generation
        else:
            can = isinstance(decision, ResumeFromDurable) and False not in self._can_write
        if not can:
            raise problem
        self.warnings[f"{problem}; training continues, and saves as soon as the store takes it"] = None

    def _refuse_damage(self) -> None:
        bad = {name: text for name, text in self._bad.items() if parse_step(name) is not None}
        if bad:
            problems = "; ".join(bad[name] for name in sorted(bad))
            raise UnusableCheckpointError(
                f"{self.location} holds checkpoints but none is whole ({problems}): restore one from a "
                "backup, or choose another checkpoint.path to start again from the beginning"
            )

    def _record_damage(self, damaged: Iterable[tuple[str, str]], warnings: Iterable[str]) -> None:
        for name, problem in damaged:
            self._bad[name] = problem
            what = f"checkpoint of step {parse_step(name)}" if parse_step(name) is not None else name
            self.warnings[f"{what} is damaged and not used: {problem}"] = None
        self.warnings.update(dict.fromkeys(warnings))


def limit_warnings(warnings: Iterable[str]) -> tuple[str, ...]:
    """Return the warnings of rank 0 that every rank gets."""
    all_warnings = tuple(warnings)
    if len(all_warnings) <= SHARED_WARNINGS:
        return all_warnings
    return (
        *all_warnings[:SHARED_WARNINGS],
        f"{len(all_warnings) - SHARED_WARNINGS} more such warnings are in the output of rank 0",
    )


def _refuse_other_meshes(views: Sequence[RankView]) -> None:
    """Raise UserError for a rank with another mesh, because it would look for shards that no rank has."""
    meshes = [describe_mesh(view.needs) for view in views]
    for view, mesh in zip(views, meshes, strict=True):
        if mesh != meshes[0]:
            raise UserError(
                f"rank {view.rank} has the mesh {mesh} and rank 0 {meshes[0]} (shards along tensor x data x pipeline): "
                "give all workers one configuration and one version of the image"
            )


# ---- copies on other nodes ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplicaTask:
    """A copy in which a rank takes part, as source or as target."""

    number: int
    copy: Transfer
    layout: str
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class ReplicaCapacity:
    """The capacity of one rank for its tasks."""

    numbers: frozenset[int]
    """The indices of the copies for which the rank has reserved files."""
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReplicaAssignment:
    """The assignment of one rank."""

    numbers: frozenset[int]
    """The indices of the rank's copies that are kept."""
    keys: frozenset[str]
    """The shards of which the rank's store has copies."""
    warnings: tuple[str, ...]


def plan_replicas(
    wanted: Sequence[Transfer], views: Sequence[RankView], sizes: Sequence[int]
) -> list[tuple[ReplicaTask, ...]]:
    """Return the tasks by rank, in the order of the copies. `sizes`: bytes of each rank's own shard."""
    tasks_by_rank: list[list[ReplicaTask]] = [[] for _ in views]
    for number, copy in enumerate(wanted):
        task = ReplicaTask(number, copy, views[copy.source].layout, sizes[copy.source])
        for rank in (copy.source, copy.target):
            tasks_by_rank[rank].append(task)
    return [tuple(tasks) for tasks in tasks_by_rank]


def assign_replicas(
    wanted: Sequence[Transfer], views: Sequence[RankView], capacities: Sequence[ReplicaCapacity]
) -> list[ReplicaAssignment]:
    """Return the assignments by rank, once all have reported their capacity."""
    assigned = frozenset(number for capacity in capacities for number in capacity.numbers)
    numbers: list[set[int]] = [set() for _ in views]
    copies: dict[str, set[str]] = {view.store: set() for view in views}
    for number in assigned:
        copy = wanted[number]
        copies[views[copy.target].store].add(copy.key)
        numbers[copy.source].add(number)
        numbers[copy.target].add(number)
    keys = {store: frozenset(shards) for store, shards in copies.items()}
    warnings = limit_warnings(warning for capacity in capacities for warning in capacity.warnings)
    return [ReplicaAssignment(frozenset(numbers[rank]), keys[view.store], warnings) for rank, view in enumerate(views)]
