"""A job as one self-contained page: no file and no address from outside, everything escaped.

As a file it runs nothing. Live it is the same page, with a script that keeps its sections up to date (`live.py`); so
what it shows are moments and not ages, and a section changes only when something has happened.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from trainium_contract.pages.facts import job_facts
from trainium_contract.pages.formatting import clock, count, duration, figure, measured, plural, shortened, size
from trainium_contract.pages.html import document, section, table
from trainium_contract.pages.live import LIVE_SCRIPT
from trainium_contract.pages.node_map import node_map_html
from trainium_contract.pages.svg import BAD, COLOURS, GOOD, OTHER, WAITS, loss_chart, share_bar, squares, timeline
from trainium_contract.program_output import drop_noise
from trainium_contract.views.interruptions import ranks_text, stage_words
from trainium_contract.views.timeline import WorkerState, timeline_of

if TYPE_CHECKING:
    from trainium_contract.views.checkpoints import CheckpointRow
    from trainium_contract.views.curve import CurvePoint
    from trainium_contract.views.interruptions import InterruptionView
    from trainium_contract.views.job import JobView
    from trainium_contract.views.timeline import Timeline
    from trainium_contract.views.workers import Members, PodRow

MOST_ROWS = 2_000
"""Workers and squares on a page; beyond it a count."""
MOST_EVENTS = 100
_LONGEST = 240
"""Characters of an interruption: what a worker printed at length is for `kubectl trn why`."""
_MOMENTS = 200
"""Into so many the time of a job is divided where its pictures end now."""
_SPARE, _MEMBER = 3, 7
_STATE_COLOURS = {
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
_KEY = "green: runs (members, where that is known); grey: runs, no member; yellow: pending; red: anything else"


@dataclass(frozen=True, slots=True)
class JobReport:
    """Contents of a page."""

    view: JobView
    entries: tuple[InterruptionView, ...]
    members: Members | None
    checkpoints: tuple[CheckpointRow, ...] | None
    curve: tuple[CurvePoint, ...]
    notes: tuple[str, ...]
    """Reports of what could not be read, with the reason."""
    pods: tuple[PodRow, ...] = ()
    curve_note: str = ""
    """Extent of the curve, where it is not the whole one."""


def report_html(report: JobReport, now: float) -> str:
    """Render the page as a file."""
    return document(_title(report.view), f"<main>{_sections(report, now)}</main>")


def live_job_html(report: JobReport, now: float, *, jobs: str = "") -> str:
    """Render the page for a server that sends `live.HEADERS`; `jobs` is the path of the list of jobs."""
    back = f'<p><a href="{escape(jobs)}">all jobs</a></p>' if jobs else ""
    body = f"{back}<p class=bad id=quiet hidden></p><main>{_sections(report, now)}</main>"
    return document(_title(report.view), body, script=LIVE_SCRIPT)


def _title(view: JobView) -> str:
    return f"{view.namespace}/{view.name}"


def _sections(report: JobReport, now: float) -> str:
    view = report.view
    return "".join([
        section("job", f"<h1>{escape(_title(view))}</h1><p class=soft>{escape(view.model)}</p>"),
        section("as-of", f"<p class=soft>as of {clock(now)} UTC</p>"),
        section("advice", advice_html(view)),
        section("facts", facts_html(view)),
        section("curve", _curve(report)),
        section("time", _time(report)),
        section("history", _history(report, now)),
        section("times", _times(report, now)),
        section("workers", _workers(report)),
        section("nodes", node_map_html(report.pods, report.entries, _ranks_of(report), MOST_ROWS)),
        section("checkpoints", _checkpoints(report)),
        section("results", _results(view)),
        section("events", _events(view)),
        section("notes", _notes(report)),
    ])  # fmt: skip


def advice_html(view: JobView) -> str:
    """Render what to do; empty for nothing."""
    return "".join(f"<p class=bad>{escape(each)}</p>" for each in view.advice)


def facts_html(view: JobView) -> str:
    """Render how the job is, in a few lines."""
    rows = [(each.label, " ".join(filter(None, (each.value, each.warning)))) for each in job_facts(view, ages=False)]
    return f"<dl>{''.join(f'<dt>{escape(label)}</dt><dd>{escape(value)}</dd>' for label, value in rows if value)}</dl>"


def _curve(report: JobReport) -> str:
    marks = [(each.step_before, f"{each.cause} -> {each.rung}, after step {each.step_before}")
             for each in report.entries if each.step_before is not None]  # fmt: skip
    drawn = loss_chart(report.curve, marks)
    keys = ["by step"]
    keys += ["dashed: interruptions"] if marks else []
    keys += ["dots: validation"] if any(each.validation is not None for each in report.curve) else []
    if any(each.highest > each.lowest for each in report.curve):
        keys.append("the band: lowest and highest of the steps that a point stands for")
    keys += [report.curve_note] if report.curve_note else []
    return f"<h2>Loss</h2><div class=scroll>{drawn}</div><p class=soft>{escape('; '.join(keys))}</p>" if drawn else ""


def _time(report: JobReport) -> str:
    goodput = report.view.goodput
    if goodput.ratio is None:
        return ""
    parts = [("productive", goodput.productive_seconds), *goodput.lost_seconds.items()]
    by_stage = sorted(goodput.lost_by_stage.items(), key=lambda item: -item[1])
    stages = [(stage_words(name), seconds) for name, seconds in by_stage]
    lost = f"<h2>What was lost, by stage</h2>{share_bar(stages, first=1)}" if goodput.lost else ""
    return f"<h2>Where the time went</h2>{share_bar(parts)}{lost}"


def _history(report: JobReport, now: float) -> str:
    if not report.entries:
        return "<h2>Interruptions</h2><p class=soft>Nothing has interrupted this job.</p>"
    spans: dict[str, list[tuple[float, float, int, str]]] = {}
    for each in report.entries:
        if each.at is not None:
            until = each.at + (each.recovered_seconds or (0.0 if each.stopped else now - each.at))
            title = f"{clock(each.at)}: {each.cause} -> {each.rung} {each.pod}"
            colour = 1 + list({**spans, each.cause: ()}).index(each.cause) % (len(COLOURS) - 1)
            spans.setdefault(each.cause, []).append((each.at, until, colour, title))
    rows = [
        (clock(each.at), each.cause, each.rung, each.pod, each.node,
         "-" if each.stopped else "open" if each.open else duration(each.recovered_seconds),
         "-" if each.steps_lost is None else str(each.steps_lost), shortened(drop_noise(each.message), _LONGEST))
        for each in report.entries
    ]  # fmt: skip
    head = ("Time (UTC)", "Cause", "Answer", "Worker", "Node", "Took", "Steps lost", "Seen")
    moments = [at for each in spans.values() for since, until, _, _ in each for at in (since, until)] or [now]
    margin = max(30.0, (max(moments) - min(moments)) * 0.05)
    drawn = timeline(min(moments) - margin, max(moments) + margin, tuple(spans.items()), "Interruptions by time")
    return f"<h2>Interruptions</h2>{drawn}{table(head, rows)}"


def _life(report: JobReport, now: float) -> tuple[float, float]:
    """Return when the job was created, and its end or about now: a live page must not change at each request."""
    view = report.view
    times = [each.at for each in report.entries if each.at is not None]
    created = now if view.age_seconds is None else now - view.age_seconds
    begin, end = min([float(round(created)), *times]), max([now if view.ended_at is None else view.ended_at, *times])
    grain = max(10.0, (end - begin) / _MOMENTS)
    return begin, end if view.ended_at is not None else begin + math.ceil((end - begin) / grain) * grain


def _times(report: JobReport, now: float) -> str:
    begin, end = _life(report, now)
    found = timeline_of(
        report.entries,
        report.pods,
        report.members,
        _ranks_of(report),
        begin=begin,
        end=end,
        first_step=report.view.started_at,
        over=report.view.ended,
    )
    return _worker_times(found, begin, end)


def _worker_times(found: Timeline, begin: float, end: float) -> str:
    """Render one row for each worker with recorded changes between two moments; empty without any."""
    rows = [
        (row.name, [(each.since, each.until, _STATE_COLOURS[each.state], each.text) for each in row.segments])
        for row in found.rows
    ]
    drawn = timeline(begin, end, rows, "Workers by time")
    if not drawn:
        return ""
    seen = {each.state for row in found.rows for each in row.segments}
    keys = (
        f'<span class="key"><i class="c{_STATE_COLOURS[state]}"></i>{escape(state)}</span>'
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


def _ranks_of(report: JobReport) -> dict[str, str]:
    members = report.members
    if members is None:
        return {}
    per = members.processes_per_node
    return {row.pod: ranks_text(row.rank * per, per) for row in members.rows}


def _workers(report: JobReport) -> str:
    members, ranks = report.members, _ranks_of(report)
    known = members is not None
    cells = [_square(each, ranks.get(each.name, "") if known else None) for each in report.pods[:MOST_ROWS]]
    drawn = squares(cells, "Workers by state")
    legend = "; ".join(filter(None, (_counted(report.view), _KEY)))
    shown = f"<h2>Workers</h2>{drawn}<p class=soft>{escape(legend)}</p>" if drawn else ""
    if members is not None and members.rows:
        rows = [(ranks[row.pod], row.pod, row.node) for row in members.rows[:MOST_ROWS]]
        verb = "trained last" if report.view.ended else "trains"
        title = f"Who {verb} (generation {members.generation})"
        left = len(members.rows) - len(rows)
        more = f"<p class=soft>… and {left} more</p>" if left else ""
        shown += f"<h2>{title}</h2>{table(('Ranks', 'Worker', 'Node'), rows)}{more}"
    return shown


def _square(pod: PodRow, ranks: str | None) -> tuple[int, str]:
    """`ranks`: empty for a pod that is no member, None where it is not known who is."""
    well = pod.state in {"Running", "Completed"}
    colour = WAITS if pod.state == "Pending" else BAD if not well else OTHER if ranks == "" else GOOD
    member = "" if ranks is None else f", ranks {ranks}" if ranks else ", no member"
    return colour, f"{pod.name} on {pod.node or 'no node'}: {pod.state}{member}"


def _counted(view: JobView) -> str:
    if view.workers is None:
        return ""
    parts = [("members", view.workers.members), ("others", view.workers.others)]
    return "; ".join(f"{name}: {', '.join(f'{number} {state}' for state, number in counts.items())}"
                     for name, counts in parts if counts)  # fmt: skip


def _checkpoints(report: JobReport) -> str:
    if not report.checkpoints:
        return ""
    rows = [
        (each.name, each.state, clock(each.created) or "-", size(each.bytes), each.world, each.problem)
        for each in report.checkpoints
    ]  # fmt: skip
    return (
        f"<h2>Checkpoints on storage</h2>{table(('Name', 'State', 'Written (UTC)', 'Size', 'Ranks', 'Problem'), rows)}"
    )


def _results(view: JobView) -> str:
    artifacts = [(each.kind, str(each.step), each.path, size(each.bytes), each.digest) for each in view.artifacts]
    figures = [(each.name, figure(each.before), measured(each.after, each.standard_error)) for each in view.evaluation]
    shown = ""
    if artifacts:
        shown += f"<h2>Artifacts</h2>{table(('Kind', 'Step', 'Path', 'Size', 'Digest'), artifacts)}"
    if figures:
        shown += f"<h2>Evaluation</h2>{table(('Measure', 'Before', 'After'), figures)}"
    milestones = [
        (str(each.step), count(each.tokens), one.name, measured(one.after, one.standard_error))
        for each in view.evaluations
        for one in each.figures
    ]
    if milestones:
        shown += f"<h2>Milestones</h2>{table(('Step', 'Tokens', 'Measure', 'Value'), milestones)}"
    return shown


def _events(view: JobView) -> str:
    rows = [(clock(each.at), each.reason, each.message) for each in view.events[:MOST_EVENTS]]
    return f"<h2>Events</h2>{table(('Time (UTC)', 'Reason', 'Message'), rows)}" if rows else ""


def _notes(report: JobReport) -> str:
    notes = (*report.view.not_shown, *report.notes)
    return f"<h2>Not shown</h2><ul>{''.join(f'<li>{escape(each)}</li>' for each in notes)}</ul>" if notes else ""
