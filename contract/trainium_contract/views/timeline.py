"""Build the states of workers over time from the pods, the membership and the history.

The past of every worker is not recorded: a thousand workers in a week would not fit a status. Known are the members
since the current generation started, the age of existing pods, and the worker, generation and ranks of each
interruption (older operators did not write ranks). The time between is `UNKNOWN`: the pod existed, but its activity is
not recorded.

Invariants: pure. Segments of a row ascend and do not overlap. At most `MOST_ROWS` rows, the most informative first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING

from trainium_contract.views.interruptions import format_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from trainium_contract.views.interruptions import InterruptionView
    from trainium_contract.views.workers import Members, PodRow

MOST_ROWS = 40
FEW_ROWS = 12
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


def build_timeline(
    entries: Sequence[InterruptionView],
    pods: Sequence[PodRow],
    members: Members | None,
    ranks: Mapping[str, str],
    *,
    begin: float,
    end: float,
    first_step: float | None = None,
    job_ended: bool = False,
) -> Timeline:
    """Build the timeline between two times; `ranks` maps each member to its ranks."""
    starts = _find_start_times(entries, begin if first_step is None else max(begin, first_step))
    pods_by_name = {pod.name: pod for pod in pods}
    interruptions: dict[str, list[InterruptionView]] = {}
    for entry in entries:
        if entry.pod and entry.at is not None:
            interruptions.setdefault(entry.pod, []).append(entry)
    ranks_by_pod = {} if members is None else {row.pod: ranks.get(row.pod, "") for row in members.rows}
    generation_started_at = None if members is None else starts.get(members.generation, max(starts.values()))
    processes_per_node = 1 if members is None else members.processes_per_node
    rows: list[tuple[int, float, WorkerRow]] = []
    for name in dict.fromkeys([*interruptions, *pods_by_name, *ranks_by_pod]):
        pod, pod_entries = pods_by_name.get(name), interruptions.get(name, [])
        is_member = generation_started_at is not None and (job_ended or pod is not None)
        row = _build_row(
            name,
            pod,
            pod_entries,
            ranks_by_pod.get(name) if is_member else None,
            generation_started_at,
            starts,
            begin,
            end,
            members_known=members is not None,
            per=processes_per_node,
        )
        newest = max((entry.at or 0.0 for entry in pod_entries), default=0.0)
        rows.append((_priority(pod, pod_entries, name in ranks_by_pod, begin), -newest, row))
    rows.sort(key=lambda priority_and_row: priority_and_row[:2])
    informative = sum(priority < _UNCHANGED for priority, _, _ in rows)
    shown_count = min(MOST_ROWS, max(informative, FEW_ROWS))
    quiet = sum(priority == _UNCHANGED for priority, _, _ in rows[shown_count:])
    left_out = max(0, len(rows) - shown_count) - quiet
    return Timeline(tuple(row for _, _, row in rows[:shown_count] if row.segments), quiet, left_out)


_UNCHANGED = 4
"""Priority of a member without recorded changes."""


def _priority(pod: PodRow | None, entries: Sequence[InterruptionView], member: bool, begin: float) -> int:
    """Rank a worker's row; the lowest is the most informative."""
    if pod is not None and pod.state not in _HEALTHY_STATES:
        return 0
    if entries:
        return 1
    if pod is not None and not member:
        return 2
    late = pod is not None and pod.created is not None and pod.created > begin + 600.0
    return 3 if late else _UNCHANGED


def _find_start_times(entries: Iterable[InterruptionView], begin: float) -> dict[int, float]:
    """Return when each generation started to train, as far as known; the first at `begin`."""
    start_times = {1: begin}
    for entry in entries:
        if entry.rung != _IN_PLACE and entry.at is not None:
            start_times[entry.generation + 1] = entry.at + (entry.recovered_seconds or 0.0)
    return start_times


def _build_row(
    name: str,
    pod: PodRow | None,
    entries: Sequence[InterruptionView],
    ranks: str | None,
    current_since: float | None,
    starts: Mapping[int, float],
    begin: float,
    end: float,
    *,
    members_known: bool,
    per: int,
) -> WorkerRow:
    created = pod.created if pod is not None else None
    existed_before = created is None or any((entry.at or end) < created for entry in entries)
    first = begin if created is None or existed_before else max(begin, created)
    segments: list[Segment] = []
    for entry in entries:
        at = entry.at if entry.at is not None else begin
        since = max(starts.get(entry.generation, at), first)
        unresolved_seconds = 0.0 if entry.stopped else end - at
        lost = entry.recovered_seconds if entry.recovered_seconds is not None else unresolved_seconds
        text = f"{name} on {entry.node or 'no node'}: {entry.cause} -> {entry.rung}"
        current_ranks = ranks if current_since is not None and since >= current_since else None
        segments += [
            _segment_until_interruption(name, entry, since, at, current_ranks, per),
            Segment(at, at + lost, WorkerState.FAILED, text),
        ]
    if pod is not None or ranks is not None:
        segments += _current_segments(
            name, pod, ranks, current_since, max(first, created or first), end, members_known=members_known
        )
    return WorkerRow(name, _merge_segments(segments, first, end, pod))


def _segment_until_interruption(
    name: str, entry: InterruptionView, since: float, at: float, current_ranks: str | None, per: int
) -> Segment:
    """Return a member's segment until an interruption, with its present or recorded ranks."""
    if current_ranks is not None:
        return Segment(since, at, WorkerState.TRAINED, f"{name}: ranks {current_ranks}")
    if entry.rank is None:
        text = f"{name}: member of generation {entry.generation}, rank not recorded"
        return Segment(since, at, WorkerState.MEMBER, text)
    text = f"{name}: ranks {format_ranks(entry.rank, per)} of generation {entry.generation}"
    return Segment(since, at, WorkerState.TRAINED, text)


def _current_segments(
    name: str,
    pod: PodRow | None,
    ranks: str | None,
    current_since: float | None,
    first: float,
    end: float,
    *,
    members_known: bool,
) -> list[Segment]:
    """Return the present segments of a worker."""
    where = f"{name} on {(pod.node if pod is not None else '') or 'no node'}"
    if pod is not None and pod.state == "Pending":
        return [Segment(first, end, WorkerState.PENDING, f"{where}: pending")]
    segments = []
    if ranks is not None and current_since is not None:
        segments = [Segment(max(first, current_since), end, WorkerState.TRAINED, f"{where}: ranks {ranks}")]
    if pod is not None and pod.state not in _HEALTHY_STATES:
        newest = max(first, end - (end - first) / 100)
        segments.append(Segment(newest, end, WorkerState.FAILED, f"{where}: {pod.state}, since when is not recorded"))
    if segments:
        return segments
    if members_known and pod is not None and pod.state == "Running" and current_since is not None:
        return [Segment(max(first, current_since), end, WorkerState.SPARE, f"{where}: no member")]
    return []


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
