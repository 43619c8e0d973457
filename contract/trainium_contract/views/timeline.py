"""Build the states of workers over time from the pods, the membership and the history.

The past of every worker is not recorded: a thousand workers in a week would not fit a status. Known are the members
since the current generation started, the age of existing pods, and the worker, generation and ranks of each
interruption (older operators did not write ranks). The time between is `UNKNOWN`: the pod existed, but its activity is
not recorded.

Invariants: pure. Segments of a row ascend and do not overlap. At most `MAX_ROWS` rows, the most informative first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING

from trainium_contract.views.interruptions import format_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trainium_contract.views.interruptions import InterruptionView
    from trainium_contract.views.workers import Members, PodRow

MAX_ROWS = 40
MIN_ROWS = 12
"""Up to this many rows, members without recorded changes are shown too."""
_IN_PLACE = "InPlace"
_HEALTHY_STATES = frozenset({"Running", "Completed"})


class WorkerState(StrEnum):
    """State of a worker; people read the values."""

    TRAINED = "trains or trained, with known ranks"
    MEMBER = "trained, rank not recorded"
    SPARE = "no member: spare or reserve"
    PENDING = "pending"
    UNKNOWN = "present, activity not recorded"
    FAILED = "failed or lost"


_PRECEDENCE = (
    WorkerState.FAILED,
    WorkerState.PENDING,
    WorkerState.TRAINED,
    WorkerState.SPARE,
    WorkerState.MEMBER,
    WorkerState.UNKNOWN,
)
"""The order of precedence of two states at one time."""
_UNCHANGED = 4
"""Priority of a member without recorded changes."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One time of a worker, Unix seconds."""

    since: float
    until: float
    state: WorkerState
    text: str


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """The times of one worker."""

    name: str
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """The workers with recorded changes."""

    rows: tuple[WorkerRow, ...]
    quiet: int
    """Members without recorded changes that are left out."""
    left_out: int
    """Other rows that are left out."""


@dataclass(frozen=True, slots=True)
class _Worker:
    """Records about one worker."""

    name: str
    pod: PodRow | None
    entries: Sequence[InterruptionView]
    ranks: str | None
    """Ranks as a member of the current generation; None for a worker that is not a member now."""
    in_membership: bool
    """Whether the current generation names it."""

    @property
    def is_unhealthy(self) -> bool:
        """Return whether its pod exists and neither runs nor has completed."""
        return self.pod is not None and self.pod.state not in _HEALTHY_STATES

    def rank_priority(self, begin: float) -> int:
        """Rank its row; the lowest is the most informative."""
        if self.is_unhealthy:
            return 0
        if self.entries:
            return 1
        if self.pod is not None and not self.in_membership:
            return 2
        is_new = self.pod is not None and self.pod.created is not None and self.pod.created > begin + 600.0
        return 3 if is_new else _UNCHANGED


def build_timeline(
    entries: Sequence[InterruptionView],
    pods: Sequence[PodRow],
    members: Members | None,
    *,
    begin: float,
    end: float,
    first_step: float | None = None,
    job_ended: bool = False,
) -> Timeline:
    """Build the timeline between two times, Unix seconds."""
    builder = _RowBuilder(entries, members, begin, end, first_step)
    pods_by_name = {pod.name: pod for pod in pods}
    interruptions: dict[str, list[InterruptionView]] = {}
    for entry in entries:
        if entry.pod and entry.at is not None:
            interruptions.setdefault(entry.pod, []).append(entry)
    ranks_by_pod = {} if members is None else members.ranks_by_pod
    rows: list[tuple[int, float, WorkerRow]] = []
    for name in dict.fromkeys([*interruptions, *pods_by_name, *ranks_by_pod]):
        pod = pods_by_name.get(name)
        ranks = ranks_by_pod.get(name) if job_ended or pod is not None else None
        worker = _Worker(name, pod, interruptions.get(name, []), ranks, name in ranks_by_pod)
        newest = max((entry.at or 0.0 for entry in worker.entries), default=0.0)
        rows.append((worker.rank_priority(begin), -newest, builder.build(worker)))
    rows.sort(key=lambda priority_and_row: priority_and_row[:2])
    informative = sum(priority < _UNCHANGED for priority, _, _ in rows)
    shown_count = min(MAX_ROWS, max(informative, MIN_ROWS))
    quiet = sum(priority == _UNCHANGED for priority, _, _ in rows[shown_count:])
    left_out = max(0, len(rows) - shown_count) - quiet
    return Timeline(tuple(row for _, _, row in rows[:shown_count] if row.segments), quiet, left_out)


def _find_start_times(entries: Iterable[InterruptionView], begin: float) -> dict[int, float]:
    """Return when each generation started to train, as far as known; the first at `begin`."""
    start_times = {1: begin}
    for entry in entries:
        if entry.response != _IN_PLACE and entry.at is not None:
            start_times[entry.generation + 1] = entry.at + (entry.recovered_seconds or 0.0)
    return start_times


class _RowBuilder:
    """Builds the rows of a timeline; times in Unix seconds."""

    def __init__(
        self,
        entries: Sequence[InterruptionView],
        members: Members | None,
        begin: float,
        end: float,
        first_step: float | None,
    ) -> None:
        self._begin, self._end = begin, end
        self._starts = _find_start_times(entries, begin if first_step is None else max(begin, first_step))
        self._members = members
        self._current_since = (
            None if members is None else self._starts.get(members.generation, max(self._starts.values()))
        )

    def build(self, worker: _Worker) -> WorkerRow:
        """Return the row of a worker."""
        created = worker.pod.created if worker.pod is not None else None
        existed_before = created is None or any((entry.at or self._end) < created for entry in worker.entries)
        first = self._begin if created is None or existed_before else max(self._begin, created)
        segments: list[Segment] = []
        for entry in worker.entries:
            at = entry.at if entry.at is not None else self._begin
            unresolved_seconds = 0.0 if entry.stopped else self._end - at
            lost = entry.recovered_seconds if entry.recovered_seconds is not None else unresolved_seconds
            text = f"{worker.name} on {entry.node or 'no node'}: {entry.cause} -> {entry.response}"
            segments += [
                self._build_segment_until(entry, worker, max(self._starts.get(entry.generation, at), first), at),
                Segment(at, at + lost, WorkerState.FAILED, text),
            ]
        if worker.pod is not None or worker.ranks is not None:
            segments += self._build_current_segments(worker, max(first, created or first))
        return WorkerRow(worker.name, _merge_segments(segments, first, self._end, worker.pod))

    def _build_segment_until(self, entry: InterruptionView, worker: _Worker, since: float, at: float) -> Segment:
        """Return a member's segment until an interruption, with its present or recorded ranks."""
        if worker.ranks is not None and self._current_since is not None and since >= self._current_since:
            return Segment(since, at, WorkerState.TRAINED, f"{worker.name}: ranks {worker.ranks}")
        if entry.rank is None:
            text = f"{worker.name}: member of generation {entry.generation}, rank not recorded"
            return Segment(since, at, WorkerState.MEMBER, text)
        ranks = format_ranks(entry.rank, 1 if self._members is None else self._members.processes_per_node)
        text = f"{worker.name}: ranks {ranks} of generation {entry.generation}"
        return Segment(since, at, WorkerState.TRAINED, text)

    def _build_current_segments(self, worker: _Worker, first: float) -> list[Segment]:
        """Return the present segments of a worker that has existed since `first`."""
        pod, end = worker.pod, self._end
        location = f"{worker.name} on {(pod.node if pod is not None else '') or 'no node'}"
        if pod is not None and pod.state == "Pending":
            return [Segment(first, end, WorkerState.PENDING, f"{location}: pending")]
        current_since = None if self._current_since is None else max(first, self._current_since)
        segments = []
        if worker.ranks is not None and current_since is not None:
            segments = [Segment(current_since, end, WorkerState.TRAINED, f"{location}: ranks {worker.ranks}")]
        if pod is not None and worker.is_unhealthy:
            newest = max(first, end - (end - first) / 100)
            text = f"{location}: {pod.state}, since when is not recorded"
            segments.append(Segment(newest, end, WorkerState.FAILED, text))
        if not segments and pod is not None and pod.state == "Running" and current_since is not None:
            segments = [Segment(current_since, end, WorkerState.SPARE, f"{location}: no member")]
        return segments


def _merge_segments(segments: Sequence[Segment], first: float, end: float, pod: PodRow | None) -> tuple[Segment, ...]:
    """Sort segments and remove overlaps; `UNKNOWN` fills the time of a pod without another segment."""
    gaps = [] if pod is None else [Segment(first, end, WorkerState.UNKNOWN, f"{pod.name}: {WorkerState.UNKNOWN}")]
    by_precedence = sorted([*segments, *gaps], key=lambda segment: _PRECEDENCE.index(segment.state))
    cuts = sorted({min(max(at, first), end) for segment in by_precedence for at in (segment.since, segment.until)})
    merged: list[Segment] = []
    for since, until in pairwise(cuts):
        best = next((segment for segment in by_precedence if segment.since <= since and until <= segment.until), None)
        if best is None:
            continue
        if merged and merged[-1].until == since and (merged[-1].state, merged[-1].text) == (best.state, best.text):
            merged[-1] = replace(merged[-1], until=until)
        else:
            merged.append(replace(best, since=since, until=until))
    return tuple(merged)
