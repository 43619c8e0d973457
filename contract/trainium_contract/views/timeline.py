"""States of workers by time, as far as they are known: from the pods, the membership and the history.

Nobody records the past of every worker: a thousand of them in a week would not fit a status. What is known for certain
is who trains since the generation in force began, which pods are there since when, and whom each interruption names, in
which generation, with which ranks (an operator of before did not write these). What is between is `HERE`: the pod was
there, what it did is not recorded.
Invariants: pure; segments of a row ascend and do not overlap; at most `MOST_ROWS` rows, the most informative first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING

from trainium_contract.views.interruptions import ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from trainium_contract.views.interruptions import InterruptionView
    from trainium_contract.views.workers import Members, PodRow

MOST_ROWS = 40
FEW_ROWS = 12
"""Up to so many rows, members to which nothing happened are shown too."""
_IN_PLACE = "InPlace"
_WELL = frozenset({"Running", "Completed"})


class WorkerState(StrEnum):
    """State of a worker; people read the values."""

    TRAINED = "trains or trained, with known ranks"
    MEMBER = "trained, rank not recorded"
    SPARE = "no member: spare or reserve"
    WAITED = "pending"
    HERE = "there, what it did is not recorded"
    LOST = "failed or lost"


_PRECEDENCE = (
    WorkerState.LOST,
    WorkerState.WAITED,
    WorkerState.TRAINED,
    WorkerState.SPARE,
    WorkerState.MEMBER,
    WorkerState.HERE,
)
"""The first of two states of one moment is shown."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One time of a worker, Unix seconds."""

    since: float
    until: float
    state: WorkerState
    text: str


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker's times."""

    name: str
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """The workers with recorded changes."""

    rows: tuple[WorkerRow, ...]
    quiet: int
    """Members that are left out, to which nothing has happened that is recorded."""
    left_out: int
    """Others that are left out."""


def timeline_of(
    entries: Sequence[InterruptionView],
    pods: Sequence[PodRow],
    members: Members | None,
    ranks: Mapping[str, str],
    *,
    begin: float,
    end: float,
    first_step: float | None = None,
    over: bool = False,
) -> Timeline:
    """Build the timeline between two moments; `ranks`: those of each member; `over`: the job ended then."""
    starts = _starts(entries, begin if first_step is None else max(begin, first_step))
    here = {pod.name: pod for pod in pods}
    named: dict[str, list[InterruptionView]] = {}
    for each in entries:
        if each.pod and each.at is not None:
            named.setdefault(each.pod, []).append(each)
    rank_of = {} if members is None else {row.pod: ranks.get(row.pod, "") for row in members.rows}
    now_since = None if members is None else starts.get(members.generation, max(starts.values()))
    per = 1 if members is None else members.processes_per_node
    rows: list[tuple[int, float, WorkerRow]] = []
    for name in dict.fromkeys([*named, *here, *rank_of]):
        pod, known = here.get(name), named.get(name, [])
        now = rank_of.get(name) if now_since is not None and (over or pod is not None) else None
        made = _row(name, pod, known, now, now_since, starts, begin, end, members_known=members is not None, per=per)
        newest = max((each.at or 0.0 for each in known), default=0.0)
        rows.append((_weight(pod, known, name in rank_of, begin), -newest, made))
    rows.sort(key=lambda each: each[:2])
    informative = sum(weight < _QUIET for weight, _, _ in rows)
    shown = min(MOST_ROWS, max(informative, FEW_ROWS))
    quiet = sum(weight == _QUIET for weight, _, _ in rows[shown:])
    left_out = max(0, len(rows) - shown) - quiet
    return Timeline(tuple(row for _, _, row in rows[:shown] if row.segments), quiet, left_out)


_QUIET = 4


def _weight(pod: PodRow | None, known: Sequence[InterruptionView], member: bool, begin: float) -> int:
    """Rank a worker's row; the lowest is the most informative."""
    if pod is not None and pod.state not in _WELL:
        return 0
    if known:
        return 1
    if pod is not None and not member:
        return 2
    late = pod is not None and pod.created is not None and pod.created > begin + 600.0
    return 3 if late else _QUIET


def _starts(entries: Iterable[InterruptionView], begin: float) -> dict[int, float]:
    """Return when each generation started to train, where that is known; the first at `begin`."""
    found = {1: begin}
    for each in entries:
        if each.rung != _IN_PLACE and each.at is not None:
            found[each.generation + 1] = each.at + (each.recovered_seconds or 0.0)
    return found


def _row(
    name: str,
    pod: PodRow | None,
    known: Sequence[InterruptionView],
    rank: str | None,
    now_since: float | None,
    starts: Mapping[int, float],
    begin: float,
    end: float,
    *,
    members_known: bool,
    per: int,
) -> WorkerRow:
    created = pod.created if pod is not None else None
    first = begin if created is None or any((each.at or end) < created for each in known) else max(begin, created)
    parts: list[Segment] = []
    for each in known:
        at = each.at if each.at is not None else begin
        since = max(starts.get(each.generation, at), first)
        lost = each.recovered_seconds if each.recovered_seconds is not None else 0.0 if each.stopped else end - at
        parts += [
            _before(name, each, since, at, rank if now_since is not None and since >= now_since else None, per),
            Segment(
                at, at + lost, WorkerState.LOST, f"{name} on {each.node or 'no node'}: {each.cause} -> {each.rung}"
            ),
        ]
    if pod is not None or rank is not None:
        parts += _present(name, pod, rank, now_since, max(first, created or first), end, members_known=members_known)
    return WorkerRow(name, _joined(parts, first, end, pod))


def _before(name: str, each: InterruptionView, since: float, at: float, kept: str | None, per: int) -> Segment:
    """Return a member's segment until an interruption: with ranks that it still has, or recorded ones."""
    if kept is not None:
        return Segment(since, at, WorkerState.TRAINED, f"{name}: ranks {kept}")
    if each.rank is None:
        return Segment(
            since, at, WorkerState.MEMBER, f"{name}: member of generation {each.generation}, rank not recorded"
        )
    text = f"{name}: ranks {ranks_text(each.rank, per)} of generation {each.generation}"
    return Segment(since, at, WorkerState.TRAINED, text)


def _present(
    name: str,
    pod: PodRow | None,
    rank: str | None,
    now_since: float | None,
    first: float,
    end: float,
    *,
    members_known: bool,
) -> list[Segment]:
    """Return the present segments of a worker."""
    where = f"{name} on {(pod.node if pod is not None else '') or 'no node'}"
    if pod is not None and pod.state == "Pending":
        return [Segment(first, end, WorkerState.WAITED, f"{where}: pending")]
    found = []
    if rank is not None and now_since is not None:
        found = [Segment(max(first, now_since), end, WorkerState.TRAINED, f"{where}: ranks {rank}")]
    if pod is not None and pod.state not in _WELL:
        newest = max(first, end - (end - first) / 100)
        found.append(Segment(newest, end, WorkerState.LOST, f"{where}: {pod.state}, since when is not recorded"))
    if found:
        return found
    if members_known and pod is not None and pod.state == "Running" and now_since is not None:
        return [Segment(max(first, now_since), end, WorkerState.SPARE, f"{where}: no member")]
    return []


def _joined(parts: Sequence[Segment], first: float, end: float, pod: PodRow | None) -> tuple[Segment, ...]:
    """Sort segments and remove overlaps; `HERE` fills the time of a pod without any other segment."""
    ground = [] if pod is None else [Segment(first, end, WorkerState.HERE, f"{pod.name}: {WorkerState.HERE}")]
    known = sorted([*parts, *ground], key=lambda part: _PRECEDENCE.index(part.state))
    cuts = sorted({min(max(at, first), end) for part in known for at in (part.since, part.until)})
    found: list[Segment] = []
    for since, until in pairwise(cuts):
        best = next((part for part in known if part.since <= since and until <= part.until), None)
        if best is None:
            continue
        if found and found[-1].until == since and (found[-1].state, found[-1].text) == (best.state, best.text):
            found[-1] = replace(found[-1], until=until)
        else:
            found.append(replace(best, since=since, until=until))
    return tuple(found)
