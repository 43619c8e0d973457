"""Render the states of workers by time."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from trainium_contract.pages.formatting import plural
from trainium_contract.pages.svg import BAD, GOOD, OTHER, WAITS, timeline
from trainium_contract.views.timeline import WorkerState

if TYPE_CHECKING:
    from trainium_contract.views.timeline import Timeline

_SPARE, _MEMBER = 3, 7
_COLOURS = {
    WorkerState.TRAINED: GOOD,
    WorkerState.MEMBER: _MEMBER,
    WorkerState.SPARE: _SPARE,
    WorkerState.WAITED: WAITS,
    WorkerState.HERE: OTHER,
    WorkerState.LOST: BAD,
}
_NOT_RECORDED = (
    "Known are the workers that are there, who is a member since the generation in force began, and whom the history "
    "names; what else a worker was before, and workers that went without an interruption, are not recorded."
)


def worker_times_html(found: Timeline, begin: float, end: float) -> str:
    """Render one row for each worker with recorded changes between two moments; empty without any."""
    rows = [
        (row.name, [(each.since, each.until, _COLOURS[each.state], each.text) for each in row.segments])
        for row in found.rows
    ]
    drawn = timeline(begin, end, rows, "Workers by time")
    if not drawn:
        return ""
    seen = {each.state for row in found.rows for each in row.segments}
    keys = (
        f'<span class="key"><i class="c{_COLOURS[state]}"></i>{escape(state)}</span>'
        for state in WorkerState
        if state in seen
    )
    notes = "".join(f"<p class=soft>{escape(each)}</p>" for each in (_left_out(found), _NOT_RECORDED) if each)
    return f'<h2>Who was what when</h2>{drawn}<p class="legend">{"".join(keys)}</p>{notes}'


def _left_out(found: Timeline) -> str:
    parts = [
        f"{plural(found.quiet, 'member')} to which nothing happened that is recorded" if found.quiet else "",
        plural(found.left_out, "other worker") if found.left_out else "",
    ]
    text = " and ".join(filter(None, parts))
    return f"… and {text}." if text else ""
