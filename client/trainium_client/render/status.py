"""Render `status`: a job on one screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from trainium_client.render.page import (
    Column,
    render_bullets,
    render_heading,
    render_labels,
    render_table,
    stack_items,
    style_word,
)
from trainium_contract.pages.facts import format_step, list_job_facts
from trainium_contract.pages.formatting import (
    format_age,
    format_bytes,
    format_duration,
    format_large_number,
    format_measurement,
    format_number,
    pluralize,
    shorten,
)
from trainium_contract.program_output import drop_noise, restore_lines

if TYPE_CHECKING:
    from rich.console import RenderableType

    from trainium_contract.pages.facts import Fact
    from trainium_contract.views.events import EventView
    from trainium_contract.views.interruptions import InterruptionView
    from trainium_contract.views.job_view import JobView, MilestoneView

_EVENT_COUNT = 5
_BAR_MIN_WIDTH = 60
_COMPARED = 200
"""Characters of an event that are compared with the verdict; events are cut."""
_TRACEBACK = " | Traceback (most recent call last)"
_MAX_EVENT_LENGTH = 300
"""Limit of an event, so that it fits a screen; the advice of the operator's events is within it."""


def render_status(view: JobView, *, now: float, width: int) -> RenderableType:
    """Render the screen."""
    # Alerts have separate rows; repeated ones would displace the other events.
    alerts = {alert.kind for alert in view.alerts}
    events = tuple(event for event in view.events if event.reason not in alerts and not _repeats_verdict(event, view))
    advice = (restore_lines(sentence) for sentence in view.advice if sentence != view.verdict)
    return stack_items(
        render_labels(_list_fact_rows(view, now, width)),
        *_render_events(events[:_EVENT_COUNT], now, width),
        *_render_section("What to do", tuple(advice)),
        *_render_section("Not shown", view.not_shown, style="dim"),
    )


def _repeats_verdict(event: EventView, view: JobView) -> bool:
    return bool(view.verdict) and event.message[:_COMPARED] == view.verdict[:_COMPARED]


def _render_section(title: str, lines: tuple[str, ...], style: str = "") -> list[RenderableType]:
    return [render_heading(title), render_bullets(lines, style=style)] if lines else []


def format_status_line(view: JobView) -> str:
    """Return one line, for a log of changes."""
    parts = [view.phase or "no status"]
    parts += [view.stage] if view.stage not in {"", "Train"} else []
    parts += [format_step(view)]
    parts += [f"loss {format_number(view.loss)}"] if view.loss is not None else []
    parts += [f"{view.training}/{view.size or view.desired or view.requested} workers"]
    return ", ".join([*parts, pluralize(view.restarts, "interruption")])


def _list_fact_rows(view: JobView, now: float, width: int) -> list[tuple[str, str | Text]]:
    phase, *facts = [fact for fact in list_job_facts(view, with_bar=width >= _BAR_MIN_WIDTH) if fact.label != "Alert"]
    return [
        ("Job", f"{view.namespace}/{view.name}, {view.model}, {format_duration(view.age_seconds)} old"),
        (phase.label, _format_fact(phase)),
        ("Verdict", restore_lines(view.verdict)),
        *((fact.label, _format_fact(fact)) for fact in facts),
        (
            "Stopped" if view.last and view.last.stopped else "Last",
            _format_interruption(view.last, now) if view.last else "",
        ),
        *(("Alert", _format_fact(alert)) for alert in list_job_facts(view) if alert.label == "Alert"),
        *(("Artifact", f"{a.kind} of step {a.step}: {a.path} ({format_bytes(a.bytes)})") for a in view.artifacts),
        *(
            ("Evaluation", f"{f.name} {format_number(f.before)} -> {format_measurement(f.after, f.standard_error)}")
            for f in view.evaluation
        ),
        *(("Milestone", _format_milestone(evaluation)) for evaluation in view.evaluations),
    ]


def _format_milestone(milestone: MilestoneView) -> str:
    figures = ", ".join(
        f"{item.name} {format_measurement(item.after, item.standard_error)}" for item in milestone.figures
    )
    figures = figures or milestone.message or "not measured yet"
    return f"step {milestone.step}, {format_large_number(milestone.tokens)} tokens: {figures}"


def _format_fact(fact: Fact) -> Text:
    first, comma, rest = fact.value.partition(",") if fact.label == "Phase" else ("", "", fact.value)
    text = style_word(first).append(comma + rest, "default") if fact.label == "Phase" else Text(rest)
    if fact.warning:
        text.append(("  " if fact.value else "") + fact.warning, "yellow")
    return text


def _format_interruption(entry: InterruptionView, now: float) -> str:
    worker = f" on {entry.pod or entry.node}" if entry.pod or entry.node else ""
    when = f", {format_age(max(0.0, now - entry.at))}" if entry.at is not None else ""
    if entry.stopped:
        return f"{entry.cause}{worker}{when}"
    lost = f", {pluralize(entry.steps_lost, 'step')} lost" if entry.steps_lost else ""
    outcome = "under way" if entry.open else f"{format_duration(entry.recovered_seconds)}{lost}"
    return f"{entry.cause}{worker}{when}: {entry.answer} ({outcome})"


def _render_events(events: tuple[EventView, ...], now: float, width: int) -> list[RenderableType]:
    if not events:
        return []
    columns: list[Column[EventView]] = [
        Column("AGE", lambda event: format_duration(max(0.0, now - event.at)), 6, right=True),
        Column("REASON", lambda event: Text(event.reason, "yellow" if event.warning else ""), 8),
        Column("MESSAGE", _format_message, 9, fold=True),
    ]
    return [render_heading("What happened last"), render_table(columns, events, width)]


def _format_message(event: EventView) -> str:
    """Return the message without the traceback, which `why` shows in lines."""
    message = shorten(drop_noise(event.message.partition(_TRACEBACK)[0]), _MAX_EVENT_LENGTH)
    return message + (f" (x{event.count})" if event.count > 1 else "")
