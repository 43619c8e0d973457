"""Render `why`: an interruption, or why the job failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from trainium_client.render.page import render_bullets, render_heading, render_labels, stack_items
from trainium_contract.pages.formatting import format_duration, format_utc, pluralize, shorten
from trainium_contract.program_output import drop_noise, restore_lines
from trainium_contract.views.interruptions import describe_loss

if TYPE_CHECKING:
    from rich.console import RenderableType

    from trainium_client.views.interruption_report import InterruptionReport
    from trainium_contract.views.interruptions import InterruptionView


_MAX_EVIDENCE_LENGTH = 240
"""Limit of the evidence if log lines follow; JSON has all of it."""


def render_interruption(report: InterruptionReport) -> RenderableType:
    """Render an interruption, from its first sign to the first new step."""
    entry = report.entry
    if entry is None:
        sentence = restore_lines(report.verdict) or "nothing has interrupted this job"
        state = f"{report.namespace}/{report.name} is {report.phase or 'without a status'}: {sentence}"
        return stack_items(Text(state), render_bullets(map(restore_lines, report.advice)))
    seconds = {name: value for name, value in entry.stages.items() if value}
    stages = ", ".join(f"{describe_loss(name)} {format_duration(value)}" for name, value in seconds.items())
    steps = _format_steps(entry.step_before, entry.resume_step, entry.steps_lost)
    end = (
        ""
        if entry.stopped
        else "the recovery is under way"
        if entry.open
        else f"after {format_duration(entry.recovered_seconds)}"
    )
    if end.startswith("after") and entry.step_before is None and entry.resume_step is None:
        end += ", when its processes ran again: no step is known"
    joined = [f"{pluralize(entry.pods_replaced, 'pod')} joined"] if entry.pods_replaced else []
    detected = ""
    if entry.detected_seconds is not None:
        detected = f", detected {format_duration(entry.detected_seconds)} later"
    facts = [
        ("When", f"{format_utc(entry.at)} UTC{detected}"),
        ("Worker", _format_worker(entry)),
        ("Cause", entry.cause),
        ("Seen", _format_evidence(report, entry)),
        ("Response", ", ".join([entry.answer, *joined])),
        ("Recovered", "" if entry.stopped else end),
        ("Seconds", stages),
        ("Steps", steps),
    ]
    title = Text(_format_title(report), "bold")
    return stack_items(title, render_labels(facts), *_log_section(report), *_render_advice(report))


def _format_title(report: InterruptionReport) -> str:
    entry = report.entry
    assert entry is not None
    attempt = f"generation {entry.generation}.{entry.attempt}"
    if entry.stopped:
        return f"{report.namespace}/{report.name} failed permanently in {attempt}"
    return (
        f"{report.namespace}/{report.name} was interrupted in {attempt} (entry {report.number} of {report.entry_count})"
    )


def _format_evidence(report: InterruptionReport, entry: InterruptionView) -> str:
    """Return the evidence in the lines of the output; shortened if its log follows, unless it is a verdict."""
    message = drop_noise(entry.message) if report.log_lines else entry.message
    if report.log_lines and not entry.stopped:
        message = shorten(message, _MAX_EVIDENCE_LENGTH)
    return restore_lines(message)


def _format_worker(entry: InterruptionView) -> str:
    worker = " on ".join(name for name in (entry.pod, entry.node) if name) or "no single worker"
    return worker if entry.rank is None else f"{worker}, whose first rank was {entry.rank}"


def _format_steps(before: int | None, resumed: int | None, lost: int | None) -> str:
    parts = [] if before is None else [f"{before} was the last one before"]
    parts += [] if resumed is None else [f"resumed from {resumed}"]
    parts += [] if lost is None else [f"{lost} computed again"]
    return ", ".join(parts)


def _render_advice(report: InterruptionReport) -> list[RenderableType]:
    return [render_heading("What to do"), render_bullets(map(restore_lines, report.advice))] if report.advice else []


def _log_section(report: InterruptionReport) -> list[RenderableType]:
    if not report.log_lines:
        return [render_heading("Log"), Text(report.log_note, "dim")] if report.log_note else []
    return [render_heading(f"Log of {report.log_pod} at that time"), render_bullets(report.log_lines, mark="  ")]
