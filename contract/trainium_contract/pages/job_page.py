"""Render a job as one self-contained page: no external file or address, everything escaped.

As a file it runs nothing. Live it is the same page with a script that updates its sections (`live.py`). So it shows
points in time instead of ages, and a section changes only when the job does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from trainium_contract.pages.facts import list_job_facts
from trainium_contract.pages.formatting import (
    format_bytes,
    format_duration,
    format_large_number,
    format_measurement,
    format_number,
    format_utc,
    pluralize,
    shorten,
)
from trainium_contract.pages.html import render_document, render_section, render_table
from trainium_contract.pages.live import LIVE_SCRIPT
from trainium_contract.pages.node_map import render_node_map
from trainium_contract.pages.svg import (
    BAD,
    COLOURS,
    GOOD,
    OTHER,
    WAITING,
    Span,
    Square,
    draw_line_chart,
    draw_loss_chart,
    draw_share_bar,
    draw_squares,
    draw_timeline,
    find_runs,
)
from trainium_contract.program_output import drop_noise, restore_lines
from trainium_contract.views.interruptions import describe_loss
from trainium_contract.views.timeline import WorkerState, build_timeline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainium_contract.views.checkpoints import CheckpointRow
    from trainium_contract.views.curve import CurvePoint
    from trainium_contract.views.interruptions import InterruptionView
    from trainium_contract.views.job_view import JobView
    from trainium_contract.views.timeline import Timeline
    from trainium_contract.views.workers import Members, PodRow

MAX_ROWS = 2_000
"""Maximum number of workers and squares on a page; the rest is counted."""
MAX_EVENTS = 100
_MAX_MESSAGE_CHARACTERS = 240
"""Maximum number of characters of an interruption; `kubectl trn why` shows longer ones."""
_TIME_STEPS = 200
"""Number of steps into which `_find_time_range` divides a job's time to round its end."""
_SMALL_CHARTS = (
    ("Learning rate", "learning_rate"),
    ("Gradient norm", "grad_norm"),
    ("Tokens per second", "tokens_per_second"),
)
"""Figures of the steps beside the loss, and their fields in a `CurvePoint`."""
_SMALL_HEIGHT = 140
_SPARE, _MEMBER = 3, 7
_STATE_COLOURS = {
    WorkerState.TRAINED: GOOD,
    WorkerState.MEMBER: _MEMBER,
    WorkerState.SPARE: _SPARE,
    WorkerState.PENDING: WAITING,
    WorkerState.UNKNOWN: OTHER,
    WorkerState.FAILED: BAD,
}
_NOT_RECORDED = (
    "Shown are the present workers, the members since the current generation began, and the workers in the history. "
    "Earlier states, and workers that left without an interruption, are not recorded."
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
    """Objects that could not be read, with the reasons."""
    pods: tuple[PodRow, ...] = ()
    curve_note: str = ""
    """Extent of the curve, if it is not complete."""

    @property
    def ranks_by_pod(self) -> dict[str, str]:
        """Return the ranks of each member's pod as text; empty if the members are not known."""
        return {} if self.members is None else self.members.ranks_by_pod


def report_html(report: JobReport, now: float) -> str:
    """Render the page as a file."""
    return render_document(_format_title(report.view), f"<main>{_render_sections(report, now)}</main>")


def render_live_job(report: JobReport, now: float, *, jobs: str = "") -> str:
    """Render the page for a server that sends `live.HEADERS`; `jobs` is the path of the list of jobs."""
    back = f'<p><a href="{escape(jobs)}">all jobs</a></p>' if jobs else ""
    body = f"{back}<p class=bad id=quiet hidden></p><main>{_render_sections(report, now)}</main>"
    return render_document(_format_title(report.view), body, script=LIVE_SCRIPT)


def _format_title(view: JobView) -> str:
    return f"{view.namespace}/{view.name}"


def _render_sections(report: JobReport, now: float) -> str:
    view = report.view
    sections = (
        render_section("job", f"<h1>{escape(_format_title(view))}</h1><p class=soft>{escape(view.model)}</p>"),
        render_section("as-of", f"<p class=soft>as of {format_utc(now)} UTC</p>"),
        render_section("advice", render_advice(view)),
        render_section("facts", render_facts(view) + _render_log_commands(view)),
        render_section("curve", _render_curve(report)),
        render_section("time", _render_goodput(report)),
        render_section("history", _render_history(report, now)),
        render_section("times", _render_timeline_section(report, now)),
        render_section("workers", _render_workers(report)),
        render_section("nodes", render_node_map(report.pods, report.entries, report.ranks_by_pod, MAX_ROWS)),
        render_section("checkpoints", _render_checkpoints(report)),
        render_section("results", _render_results(view)),
        render_section("events", _render_events(view)),
        render_section("notes", _render_notes(report)),
    )
    return "".join(sections)


def render_advice(view: JobView) -> str:
    """Render the advice; empty if there is none."""
    return "".join(f"<p class=bad>{escape(restore_lines(item))}</p>" for item in view.advice)


def render_facts(view: JobView) -> str:
    """Render the job's state in a few lines."""
    rows = [
        (fact.label, " ".join(filter(None, (fact.value, fact.warning)))) for fact in list_job_facts(view, ages=False)
    ]
    return f"<dl>{''.join(f'<dt>{escape(label)}</dt><dd>{escape(value)}</dd>' for label, value in rows if value)}</dl>"


def _render_curve(report: JobReport) -> str:
    marks = [
        (entry.step_before, f"{entry.cause} -> {entry.response}, after step {entry.step_before}")
        for entry in report.entries
        if entry.step_before is not None
    ]
    legend = ["by step"]
    legend += ["dashed: interruptions"] if marks else []
    legend += ["dots: validation"] if any(point.validation is not None for point in report.curve) else []
    if any(point.highest > point.lowest for point in report.curve):
        legend.append("the band: lowest and highest of the steps that a point stands for")
    legend += [report.curve_note] if report.curve_note else []
    if len(find_runs([point.step for point in report.curve])) > 1:
        legend.append("interrupted where steps are missing")
    chart = draw_loss_chart(report.curve, marks)
    loss = f"<h2>Loss</h2>{chart}<p class=soft>{escape('; '.join(legend))}</p>" if chart else ""
    return loss + "".join(_render_small_chart(label, report.curve, field, marks) for label, field in _SMALL_CHARTS)


def _render_small_chart(label: str, curve: Sequence[CurvePoint], field: str, marks: Sequence[tuple[int, str]]) -> str:
    """Render another figure of the steps; empty if fewer than two have it."""
    points = [(point.step, value) for point in curve if (value := getattr(point, field)) is not None]
    if len(points) < 2:
        return ""
    return f"<h3>{label}</h3>{draw_line_chart(points, marks, label, height=_SMALL_HEIGHT)}"


def _render_log_commands(view: JobView) -> str:
    """Render the commands that show the log of a rank and the reason of the last interruption."""
    job = escape(f"{view.name} -n {view.namespace}")
    return f"<p class=soft>Logs: <code>kubectl trn logs {job}</code>, <code>kubectl trn why {job}</code></p>"


def _render_goodput(report: JobReport) -> str:
    goodput = report.view.goodput
    if goodput.ratio is None:
        return ""
    causes = [(describe_loss(name), seconds) for name, seconds in goodput.lost_seconds.items()]
    parts = [("productive", goodput.productive_seconds), *causes]
    by_stage = sorted(goodput.lost_by_stage.items(), key=lambda item: -item[1])
    stages = [(describe_loss(name), seconds) for name, seconds in by_stage]
    lost = f"<h2>What was lost, by stage</h2>{draw_share_bar(stages, first=1)}" if goodput.lost else ""
    return f"<h2>Where the time went</h2>{draw_share_bar(parts)}{lost}"


def _render_history(report: JobReport, now: float) -> str:
    if not report.entries:
        return "<h2>Interruptions</h2><p class=soft>Nothing has interrupted this job.</p>"
    spans: dict[str, list[Span]] = {}
    for entry in report.entries:
        if entry.at is not None:
            until = entry.at + (entry.recovered_seconds or (0.0 if entry.stopped else now - entry.at))
            title = f"{format_utc(entry.at)}: {entry.cause} -> {entry.response} {entry.pod}"
            colour = 1 + list({**spans, entry.cause: ()}).index(entry.cause) % (len(COLOURS) - 1)
            spans.setdefault(entry.cause, []).append(Span(entry.at, until, colour, title))
    rows = [
        (
            format_utc(entry.at),
            entry.cause,
            entry.response,
            entry.pod,
            entry.node,
            "-" if entry.stopped else "open" if entry.open else format_duration(entry.recovered_seconds),
            "-" if entry.steps_lost is None else str(entry.steps_lost),
            shorten(drop_noise(entry.message), _MAX_MESSAGE_CHARACTERS),
        )
        for entry in report.entries
    ]
    head = ("Time (UTC)", "Cause", "Response", "Worker", "Node", "Took", "Steps lost", "Seen")
    times = [time for row in spans.values() for span in row for time in (span.since, span.until)] or [now]
    margin = max(30.0, (max(times) - min(times)) * 0.05)
    drawn = draw_timeline(min(times) - margin, max(times) + margin, tuple(spans.items()), "Interruptions by time")
    return f"<h2>Interruptions</h2>{drawn}{render_table(head, rows)}"


def _find_time_range(report: JobReport, now: float) -> tuple[float, float]:
    """Return the creation time, and the end or the rounded present: a live page must not change at each request."""
    view = report.view
    times = [entry.at for entry in report.entries if entry.at is not None]
    created = now if view.age_seconds is None else now - view.age_seconds
    begin, end = min([float(round(created)), *times]), max([now if view.ended_at is None else view.ended_at, *times])
    step = max(10.0, (end - begin) / _TIME_STEPS)
    return begin, end if view.ended_at is not None else begin + math.ceil((end - begin) / step) * step


def _render_timeline_section(report: JobReport, now: float) -> str:
    begin, end = _find_time_range(report, now)
    workers = build_timeline(
        report.entries,
        report.pods,
        report.members,
        begin=begin,
        end=end,
        first_step=report.view.started_at,
        job_ended=report.view.ended,
    )
    return _render_timeline(workers, begin, end)


def _render_timeline(workers: Timeline, begin: float, end: float) -> str:
    """Render one row for each worker with recorded changes between two times; empty without any."""
    rows = [
        (row.name, [Span(part.since, part.until, _STATE_COLOURS[part.state], part.text) for part in row.segments])
        for row in workers.rows
    ]
    drawn = draw_timeline(begin, end, rows, "Workers by time")
    if not drawn:
        return ""
    states = {segment.state for row in workers.rows for segment in row.segments}
    keys = (
        f'<span class="key"><i class="c{_STATE_COLOURS[state]}"></i>{escape(state)}</span>'
        for state in WorkerState
        if state in states
    )
    notes = "".join(f"<p class=soft>{escape(note)}</p>" for note in (_describe_omitted(workers), _NOT_RECORDED) if note)
    return f'<h2>States of the workers</h2>{drawn}<p class="legend">{"".join(keys)}</p>{notes}'


def _describe_omitted(workers: Timeline) -> str:
    parts = [
        f"{pluralize(workers.quiet, 'member')} to which nothing happened that is recorded" if workers.quiet else "",
        pluralize(workers.left_out, "other worker") if workers.left_out else "",
    ]
    text = " and ".join(filter(None, parts))
    return f"… and {text}." if text else ""


def _render_workers(report: JobReport) -> str:
    members, ranks = report.members, report.ranks_by_pod
    has_members = members is not None
    cells = [_build_pod_square(pod, ranks.get(pod.name, "") if has_members else None) for pod in report.pods[:MAX_ROWS]]
    drawn = draw_squares(cells, "Workers by state")
    legend = "; ".join(filter(None, (_count_by_role(report.view), _KEY)))
    shown = f"<h2>Workers</h2>{drawn}<p class=soft>{escape(legend)}</p>" if drawn else ""
    if members is not None and members.rows:
        rows = [(ranks[row.pod], row.pod, row.node) for row in members.rows[:MAX_ROWS]]
        verb = "trained last" if report.view.ended else "trains"
        title = f"Who {verb} (generation {members.generation})"
        omitted = len(members.rows) - len(rows)
        more = f"<p class=soft>… and {omitted} more</p>" if omitted else ""
        shown += f"<h2>{title}</h2>{render_table(('Ranks', 'Worker', 'Node'), rows)}{more}"
    return shown


def _build_pod_square(pod: PodRow, ranks: str | None) -> Square:
    """Return the square of a pod; `ranks` is empty for a pod that is not a member, None if that is not known."""
    well = pod.state in {"Running", "Completed"}
    colour = WAITING if pod.state == "Pending" else BAD if not well else OTHER if ranks == "" else GOOD
    member = "" if ranks is None else f", ranks {ranks}" if ranks else ", no member"
    return Square(colour, f"{pod.name} on {pod.node or 'no node'}: {pod.state}{member}")


def _count_by_role(view: JobView) -> str:
    if view.workers is None:
        return ""
    parts = [("members", view.workers.members), ("others", view.workers.others)]
    return "; ".join(
        f"{name}: {', '.join(f'{number} {state}' for state, number in counts.items())}"
        for name, counts in parts
        if counts
    )


def _render_checkpoints(report: JobReport) -> str:
    if not report.checkpoints:
        return ""
    rows = [
        (row.name, row.state, format_utc(row.created) or "-", format_bytes(row.bytes), row.world, row.problem)
        for row in report.checkpoints
    ]
    table = render_table(("Name", "State", "Written (UTC)", "Size", "Ranks", "Problem"), rows)
    return f"<h2>Checkpoints on storage</h2>{table}"


def _render_results(view: JobView) -> str:
    artifacts = [
        (item.kind, str(item.step), item.path, format_bytes(item.bytes), item.digest) for item in view.artifacts
    ]
    figures = [
        (item.name, format_number(item.before), format_measurement(item.after, item.standard_error))
        for item in view.evaluation
    ]
    shown = ""
    if artifacts:
        shown += f"<h2>Artifacts</h2>{render_table(('Kind', 'Step', 'Path', 'Size', 'Digest'), artifacts)}"
    if figures:
        shown += f"<h2>Evaluation</h2>{render_table(('Measure', 'Before', 'After'), figures)}"
    milestones = [
        (
            str(milestone.step),
            format_large_number(milestone.tokens),
            measure.name,
            format_measurement(measure.after, measure.standard_error),
        )
        for milestone in view.evaluations
        for measure in milestone.figures
    ]
    if milestones:
        shown += f"<h2>Milestones</h2>{render_table(('Step', 'Tokens', 'Measure', 'Value'), milestones)}"
    return shown


def _render_events(view: JobView) -> str:
    rows = [(format_utc(event.at), event.reason, event.message) for event in view.events[:MAX_EVENTS]]
    return f"<h2>Events</h2>{render_table(('Time (UTC)', 'Reason', 'Message'), rows)}" if rows else ""


def _render_notes(report: JobReport) -> str:
    notes = (*report.view.not_shown, *report.notes)
    return f"<h2>Not shown</h2><ul>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>" if notes else ""
