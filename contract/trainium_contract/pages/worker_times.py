"""The part of a page that tells who was what when."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from trainium_contract.pages.formatting import plural
from trainium_contract.pages.svg import BAD, GOOD, OTHER, WAITS, timeline
from trainium_contract.views.timeline import Was

if TYPE_CHECKING:
    from trainium_contract.views.timeline import Timeline

_SPARE, _MEMBER = 3, 7
_COLOURS = {
    Was.TRAINED: GOOD,
    Was.MEMBER: _MEMBER,
    Was.SPARE: _SPARE,
    Was.WAITED: WAITS,
    Was.HERE: OTHER,
    Was.LOST: BAD,
}
_NOT_RECORDED = (
    "Known are the workers that are there, who is a member since the generation in force began, and whom the history "
    "names; what else a worker was before, and workers that went without an interruption, are not recorded."
)


def worker_times_html(found: Timeline, begin: float, end: float) -> str:
    """One row for each worker that has something to tell, between two moments; nothing where there is none."""
    rows = [
        (row.name, [(each.since, each.until, _COLOURS[each.was], each.told) for each in row.segments])
        for row in found.rows
    ]
    drawn = timeline(begin, end, rows, "Workers by time")
    if not drawn:
        return ""
    seen = {each.was for row in found.rows for each in row.segments}
    keys = (f'<span class="key"><i class="c{_COLOURS[was]}"></i>{escape(was)}</span>' for was in Was if was in seen)
    said = "".join(f"<p class=soft>{escape(each)}</p>" for each in (_left_out(found), _NOT_RECORDED) if each)
    return f'<h2>Who was what when</h2>{drawn}<p class="legend">{"".join(keys)}</p>{said}'


def _left_out(found: Timeline) -> str:
    parts = [
        f"{plural(found.quiet, 'member')} to which nothing happened that is recorded" if found.quiet else "",
        plural(found.left_out, "other worker") if found.left_out else "",
    ]
    told = " and ".join(filter(None, parts))
    return f"… and {told}." if told else ""
