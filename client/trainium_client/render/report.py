"""A job as one self-contained page: no script, no file and no address from outside, everything escaped."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from trainium_client.render.svg import COLOURS, loss_chart, share_bar, timeline
from trainium_client.render.words import clock, count, duration, figure, plural, share, size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trainium_client.views.checkpoints import CheckpointRow
    from trainium_client.views.curve import CurvePoint
    from trainium_client.views.interruptions import InterruptionView
    from trainium_client.views.job import JobView
    from trainium_client.views.workers import Members

_STYLE = """
:root{color-scheme:light dark;--ink:#1c2126;--soft:#5f6b76;--line:#d8dde2;--page:#fff;--card:#f6f7f9}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ec;--soft:#9aa5af;--line:#363d44;--page:#15181b;--card:#1d2226}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:62rem;margin:2rem auto}
body{padding:0 1rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2.2rem 0 .6rem}p.soft,td.soft,.legend{color:var(--soft)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1.2rem}dl{background:var(--card);padding:1rem}
dt{font-weight:600}dd{margin:0;overflow-wrap:anywhere}.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.88rem}th,td{text-align:left;padding:.3rem .6rem;vertical-align:top}
th,td{border-bottom:1px solid var(--line)}td{overflow-wrap:anywhere}th,td.short{white-space:nowrap}
.bad{border-left:4px solid #c2453d;padding:.6rem 1rem;background:var(--card);overflow-wrap:anywhere}
svg{width:100%;height:auto;display:block}svg text{font-size:12px;fill:var(--soft)}.grid{stroke:var(--line)}
.curve{fill:none;stroke:#3f77c4;stroke-width:1.6}.spread{fill:#3f77c4;opacity:.18}.validation{fill:#d08a1d}
.mark{stroke:#c2453d;stroke-width:1.5;stroke-dasharray:4 3}
.key{display:inline-block;margin-right:1.2rem}.key i{display:inline-block;width:.8em;height:.8em;margin-right:.4em}
"""
_SHORT = 20
"""Characters of a cell that is not broken: a time, a state."""


@dataclass(frozen=True, slots=True)
class Report:
    """What the page is made of."""

    view: JobView
    entries: tuple[InterruptionView, ...]
    members: Members | None
    checkpoints: tuple[CheckpointRow, ...] | None
    curve: tuple[CurvePoint, ...]
    notes: tuple[str, ...]
    """What could not be had, and why."""


def report_html(report: Report, now: float) -> str:
    """The page."""
    view = report.view
    title = escape(f"{view.namespace}/{view.name}")
    body = "".join([
        f"<h1>{title}</h1><p class=soft>{escape(view.model)} · as of {clock(now)} UTC</p>",
        _advice(view),
        _facts(view),
        _curve(report),
        _time(report),
        _history(report, now),
        _workers(report),
        _checkpoints(report, now),
        _results(view),
        _events(view, now),
        _notes(report),
    ])  # fmt: skip
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        f'<!doctype html><html lang=en><head><meta charset=utf-8><meta http-equiv="Content-Security-Policy" '
        f'content="{policy}"><meta name=viewport content="width=device-width"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body>{body}</body></html>\n"
    )


def facts_html(view: JobView) -> str:
    """The facts alone, for a notebook."""
    return f"<h3>{escape(view.namespace)}/{escape(view.name)}</h3>{_advice(view)}{_facts(view)}"


def _advice(view: JobView) -> str:
    return "".join(f"<p class=bad>{escape(each)}</p>" for each in view.advice)


def _facts(view: JobView) -> str:
    checkpoint = view.checkpoints.durable_step
    steps = f"step {view.step}" + (f" of {view.total_steps} ({share(view.share)})" if view.total_steps else "")
    facts = [
        ("Phase", view.phase or "not answered yet"),
        ("Progress", steps + (f", {duration(view.eta_seconds)} left" if view.eta_seconds is not None else "")),
        ("Loss", figure(view.loss, 5)),
        ("Speed", f"{count(view.tokens_per_second)} tokens/s" if view.tokens_per_second else ""),
        ("Size", f"{view.size} of {view.desired or view.requested} nodes, {plural(view.spares, 'spare')}"),
        ("Checkpoint", "none on storage" if checkpoint is None else f"step {checkpoint} on storage"),
        ("Goodput", f"{share(view.goodput.ratio)} of {duration(view.goodput.wall_seconds)}"),
        ("Interrupted", plural(view.restarts, "time")),
        *((each.kind, each.told) for each in view.alerts),
    ]
    return f"<dl>{''.join(f'<dt>{escape(k)}</dt><dd>{escape(v)}</dd>' for k, v in facts if v)}</dl>"


def _curve(report: Report) -> str:
    marks = [(each.step_before, f"{each.cause} -> {each.rung}, after step {each.step_before}")
             for each in report.entries if each.step_before is not None]  # fmt: skip
    drawn = loss_chart(report.curve, marks)
    keys = ["by step"]
    keys += ["dashed: interruptions"] if marks else []
    keys += ["dots: validation"] if any(each.validation is not None for each in report.curve) else []
    if any(each.highest > each.lowest for each in report.curve):
        keys.append("the band: lowest and highest of the steps that a point stands for")
    return f"<h2>Loss</h2>{drawn}<p class=soft>{'; '.join(keys)}</p>" if drawn else ""


def _time(report: Report) -> str:
    goodput = report.view.goodput
    if goodput.ratio is None:
        return ""
    parts = [("productive", goodput.productive_seconds), *goodput.lost_seconds.items()]
    stages = sorted(goodput.lost_by_stage.items(), key=lambda item: -item[1])
    lost = f"<h2>What was lost, by stage</h2>{share_bar(stages, COLOURS[1:])}" if goodput.lost else ""
    return f"<h2>Where the time went</h2>{share_bar(parts)}{lost}"


def _history(report: Report, now: float) -> str:
    if not report.entries:
        return "<h2>Interruptions</h2><p class=soft>Nothing has interrupted this job.</p>"
    spans = [
        (f"{each.cause}", each.at, each.at + (each.recovered_seconds or (0.0 if each.stopped else now - each.at)),
         f"{clock(each.at)}: {each.cause} -> {each.rung} {each.pod}")
        for each in report.entries if each.at is not None
    ]  # fmt: skip
    begin = min((since for _, since, _, _ in spans), default=now)
    end = max((until for _, _, until, _ in spans), default=now)
    margin = max(30.0, (end - begin) * 0.05)
    rows = [
        (clock(each.at), each.cause, each.rung, each.pod, each.node,
         "-" if each.stopped else "open" if each.open else duration(each.recovered_seconds),
         "-" if each.steps_lost is None else str(each.steps_lost), each.message)
        for each in report.entries
    ]  # fmt: skip
    head = ("Time (UTC)", "Cause", "Answer", "Worker", "Node", "Took", "Steps lost", "Seen")
    drawn = timeline(begin - margin, end + margin, spans)
    return f"<h2>Interruptions</h2>{drawn}{_table(head, rows)}"


def _workers(report: Report) -> str:
    if report.members is None or not report.members.rows:
        return ""
    per = report.members.processes_per_node
    rows = [(f"{row.rank * per}" + (f"-{row.rank * per + per - 1}" if per > 1 else ""), row.pod, row.node)
            for row in report.members.rows]  # fmt: skip
    verb = "trained last" if report.view.ended else "trains"
    title = f"Who {verb} (generation {report.members.generation})"
    return f"<h2>{title}</h2>{_table(('Ranks', 'Worker', 'Node'), rows)}"


def _checkpoints(report: Report, now: float) -> str:
    if not report.checkpoints:
        return ""
    rows = [
        (each.name, each.state, "-" if each.created is None else f"{duration(max(0.0, now - each.created))} ago",
         size(each.bytes), each.world, each.problem)
        for each in report.checkpoints
    ]  # fmt: skip
    return f"<h2>Checkpoints on storage</h2>{_table(('Name', 'State', 'Written', 'Size', 'Ranks', 'Problem'), rows)}"


def _results(view: JobView) -> str:
    artifacts = [(each.kind, str(each.step), each.path, size(each.bytes), each.digest) for each in view.artifacts]
    figures = [(each.name, figure(each.before), figure(each.after)) for each in view.evaluation]
    shown = ""
    if artifacts:
        shown += f"<h2>Artifacts</h2>{_table(('Kind', 'Step', 'Path', 'Size', 'Digest'), artifacts)}"
    if figures:
        shown += f"<h2>Evaluation</h2>{_table(('Measure', 'Before', 'After'), figures)}"
    return shown


def _events(view: JobView, now: float) -> str:
    rows = [(duration(max(0.0, now - each.at)), each.reason, each.message) for each in view.events]
    return f"<h2>Events</h2>{_table(('Age', 'Reason', 'Message'), rows)}" if rows else ""


def _notes(report: Report) -> str:
    notes = (*report.view.not_shown, *report.notes)
    return f"<h2>Not shown</h2><ul>{''.join(f'<li>{escape(each)}</li>' for each in notes)}</ul>" if notes else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    titles = "".join(f"<th>{escape(each)}</th>" for each in head)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<div class=scroll><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>"


def _cell(text: str) -> str:
    return f"<td{' class=short' if len(text) <= _SHORT else ''}>{escape(text)}</td>"
