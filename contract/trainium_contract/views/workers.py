"""Build the workers of a job: the existing pods, and the placement of ranks."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_contract.views.interruptions import format_ranks
from trainium_contract.views.raw import (
    read_integer,
    read_mapping,
    read_number,
    read_objects,
    read_text,
    strip_control_characters,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainium_contract.status.public import PublicStatus
    from trainium_contract.views.status_reader import StatusReader

_FIELD_BY_COLUMN = {"Name": "name", "Status": "state", "Restarts": "restarts", "Node": "node", "Age": "age"}
_AGE, _PART_OF_AGE = re.compile(r"(?:\d{1,6}[ydhms]){1,3}"), re.compile(r"(\d+)([ydhms])")
_UNITS = {"y": 31_536_000.0, "d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0}
_NO_NODE = "<none>"
"""In the API server's table, the node of a pod without one."""


@dataclass(frozen=True, slots=True)
class PodRow:
    """One worker pod."""

    name: str
    state: str
    """Status as kubectl shows it: Running, Pending, Error, CrashLoopBackOff, Terminating."""
    node: str
    """Empty while it has none."""
    created: float | None = None
    """Unix seconds, as precisely as known; a table of kubectl has ages."""


@dataclass(frozen=True, slots=True)
class MemberRow:
    """One member of the current generation."""

    rank: int
    """Node rank."""
    pod: str
    node: str


@dataclass(frozen=True, slots=True)
class Members:
    """The members of a generation."""

    generation: int
    processes_per_node: int
    rows: tuple[MemberRow, ...]

    def find_by_rank(self, rank: int) -> MemberRow | None:
        """Return the worker of a rank; None if there is no such rank."""
        node_rank = rank // self.processes_per_node
        return self.rows[node_rank] if rank >= 0 and node_rank < len(self.rows) else None

    @property
    def ranks_by_pod(self) -> dict[str, str]:
        """Return the ranks of each pod as text."""
        count = self.processes_per_node
        return {row.pod: format_ranks(row.rank * count, count) for row in self.rows}

    @property
    def rank_count(self) -> int:
        """Return the number of ranks."""
        return len(self.rows) * self.processes_per_node


@dataclass(frozen=True, slots=True)
class WorkersView:
    """Pods by role."""

    members: dict[str, int]
    """Members by the state of their pod."""
    others: dict[str, int]
    """Pods that are not members (spares, newcomers, ended ones) by state."""
    unhealthy: tuple[PodRow, ...]
    """Pods that are neither running nor completed; at most ten."""


@dataclass(frozen=True, slots=True)
class RankRow:
    """Activity of one rank."""

    rank: int
    pod: str
    node: str
    step: int | None = None
    phase: str = ""
    step_seconds: float | None = None
    seconds_since_step: float | None = None
    slowdown: float | None = None
    """Load of its worker, if the operator reports it: its own work in a step relative to the median member's."""
    note: str = ""
    """Why nothing is known about it."""


def build_members(record: Mapping[str, Any]) -> Members:
    """Return the members in a record of the membership."""
    rows = [
        MemberRow(read_integer(member, "nodeRank"), read_text(member, "podName"), read_text(member, "nodeName"))
        for member in read_objects(record, "members")
    ]
    rows.sort(key=lambda row: row.rank)
    return Members(read_integer(record, "generation"), max(1, read_integer(record, "processesPerNode", 1)), tuple(rows))


def parse_pod_table(table: Mapping[str, Any], now: float | None = None) -> tuple[PodRow, ...]:
    """Return the pods of the server's table; with `now`, also their creation times."""
    columns = [
        _FIELD_BY_COLUMN.get(read_text(column, "name"), "") for column in read_objects(table, "columnDefinitions")
    ]
    rows = []
    for table_row in read_objects(table, "rows"):
        values = table_row.get("cells")
        cells = dict(zip(columns, values, strict=False)) if isinstance(values, list) else {}
        name, state, node, age = (
            strip_control_characters(str(cells.get(key) or "")) for key in ("name", "state", "node", "age")
        )
        seconds = _parse_age(age) if now is not None else None
        created = now - seconds if now is not None and seconds is not None else None
        rows.append(PodRow(name, state, "" if node == _NO_NODE else node, created))
    return tuple(rows)


def _parse_age(age: str) -> float | None:
    """Parse an age such as `3m34s`, as the server writes it; None for any other text."""
    if not _AGE.fullmatch(age):
        return None
    return math.fsum(float(count) * _UNITS[unit] for count, unit in _PART_OF_AGE.findall(age))


def count_workers(rows: Sequence[PodRow], members: Members | None) -> WorkersView:
    """Count pods by state and role; without a membership all count as others."""
    names = {row.pod for row in members.rows} if members else set()
    member_counts, other_counts = dict[str, int](), dict[str, int]()
    for row in rows:
        counts = member_counts if row.name in names else other_counts
        counts[row.state] = counts.get(row.state, 0) + 1
    missing = len(names - {row.name for row in rows})
    if missing and rows:
        member_counts["missing"] = missing
    unwell = tuple(row for row in rows if row.state not in {"Running", "Completed"})
    return WorkersView(member_counts, other_counts, unwell[:10])


def build_rank_rows(
    members: Members,
    records_by_pod: Mapping[str, Sequence[Mapping[str, Any]] | str],
    status: StatusReader[PublicStatus],
    now: float,
) -> tuple[RankRow, ...]:
    """Return all ranks, the slowest first.

    `records_by_pod` has the records of each pod's monitor, or why there are none.
    """
    slow = {
        straggler.read_text("pod"): straggler.read_number("slowdown") for straggler in status.read_parts("stragglers")
    }
    rows = []
    for member in members.rows:
        records_or_reason = records_by_pod.get(member.pod, "")
        records = (
            {}
            if isinstance(records_or_reason, str)
            else {read_integer(record, "localRank"): record for record in records_or_reason}
        )
        note = records_or_reason if isinstance(records_or_reason, str) else ""
        for local in range(members.processes_per_node):
            rank = member.rank * members.processes_per_node + local
            rows.append(_build_rank_row(rank, member, records.get(local), slow.get(member.pod), note, now))
    return tuple(sorted(rows, key=_build_slowness_key))


def _build_rank_row(
    rank: int, member: MemberRow, record: Mapping[str, Any] | None, slowdown: float | None, note: str, now: float
) -> RankRow:
    if record is None:
        return RankRow(rank, member.pod, member.node, slowdown=slowdown, note=note)
    updated, step = read_number(record, "updated"), read_integer(record, "step", -1)
    return RankRow(
        rank=rank,
        pod=member.pod,
        node=member.node,
        step=None if step < 0 else step,
        phase=read_text(record, "phase").capitalize(),
        step_seconds=read_number(record, "step_seconds"),
        seconds_since_step=max(0.0, now - updated) if updated else None,
        slowdown=slowdown,
    )


def _build_slowness_key(row: RankRow) -> tuple[float, float, float, int]:
    """Return a sort key: ranks that lag, then the operator's stragglers, then the longest steps."""
    step = -1.0 if row.note else float("inf") if row.step is None else float(row.step)
    return (step, -(row.slowdown or 0.0), -(row.step_seconds or 0.0), row.rank)


def read_name(raw: Mapping[str, Any]) -> str:
    """Return the name of an object."""
    return read_text(read_mapping(raw, "metadata"), "name")
