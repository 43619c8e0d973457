"""Render `status`: a job on one screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from trainium_client.render.page import Column, heading, labelled, listed, stacked, table, word
from trainium_contract.pages.facts import job_facts, step_text
from trainium_contract.pages.formatting import ago, count, duration, figure, measured, plural, shortened, size
from trainium_contract.program_output import drop_noise

if TYPE_CHECKING:
    from rich.console import RenderableType

    from trainium_contract.pages.facts import Fact
    from trainium_contract.views.events import EventView
    from trainium_contract.views.interruptions import InterruptionView
    from trainium_contract.views.job import JobView, MilestoneView

_EVENTS = 5
_NARROW = 60
_LONGEST = 300
"""Characters of an event, so that it fits a screen; the operator's own end with what to do within this."""


def status_page(view: JobView, *, now: float, width: int) -> RenderableType:
    """Render the screen."""
    # Alerts have separate rows; repeated ones would push out the other events.
    alerts = {each.kind for each in view.alerts}
    events = tuple(each for each in view.events if each.reason not in alerts)
    return stacked(
        labelled(_rows(view, now, width)),
        *_events(events[:_EVENTS], now, width),
        *_section("What to do", view.advice),
        *_section("Not shown", view.not_shown, style="dim"),
    )


def _section(title: str, lines: tuple[str, ...], style: str = "") -> list[RenderableType]:
    return [heading(title), listed(lines, style=style)] if lines else []


def status_line(view: JobView) -> str:
    """Return one line, for a log of changes."""
    parts = [view.phase or "no status"]
    parts += [view.stage] if view.stage not in {"", "Train"} else []
    parts += [step_text(view)]
    parts += [f"loss {figure(view.loss)}"] if view.loss is not None else []
    parts += [f"{view.training}/{view.size or view.desired or view.requested} workers"]
    return ", ".join([*parts, plural(view.restarts, "interruption")])


def _rows(view: JobView, now: float, width: int) -> list[tuple[str, str | Text]]:
    facts = job_facts(view, with_bar=width >= _NARROW)
    alerts = [each for each in facts if each.label == "Alert"]
    return [
        ("Job", f"{view.namespace}/{view.name}, {view.model}, {duration(view.age_seconds)} old"),
        *((each.label, _text(each)) for each in facts if each.label != "Alert"),
        ("Stopped" if view.last and view.last.stopped else "Last", _last(view.last, now) if view.last else ""),
        *((each.label, _text(each)) for each in alerts),
        *(("Artifact", f"{a.kind} of step {a.step}: {a.path} ({size(a.bytes)})") for a in view.artifacts),
        *(
            ("Evaluation", f"{f.name} {figure(f.before)} -> {measured(f.after, f.standard_error)}")
            for f in view.evaluation
        ),
        *(("Milestone", _milestone(each)) for each in view.evaluations),
    ]


def _milestone(one: MilestoneView) -> str:
    figures = ", ".join(f"{each.name} {measured(each.after, each.standard_error)}" for each in one.figures)
    return f"step {one.step}, {count(one.tokens)} tokens: {figures or one.message or 'not measured yet'}"


def _text(fact: Fact) -> Text:
    first, comma, rest = fact.value.partition(",") if fact.label == "Phase" else ("", "", fact.value)
    text = word(first).append(comma + rest, "default") if fact.label == "Phase" else Text(rest)
    if fact.warning:
        text.append(("  " if fact.value else "") + fact.warning, "yellow")
    return text


def _last(entry: InterruptionView, now: float) -> str:
    who = f" on {entry.pod or entry.node}" if entry.pod or entry.node else ""
    when = f", {ago(max(0.0, now - entry.at))}" if entry.at is not None else ""
    if entry.stopped:
        return f"{entry.cause}{who}{when}"
    lost = f", {plural(entry.steps_lost, 'step')} lost" if entry.steps_lost else ""
    took = "under way" if entry.open else f"{duration(entry.recovered_seconds)}{lost}"
    return f"{entry.cause}{who}{when}: {entry.answer} ({took})"


def _events(events: tuple[EventView, ...], now: float, width: int) -> list[RenderableType]:
    if not events:
        return []
    columns = (Column("AGE", 6, right=True), Column("REASON", 8), Column("MESSAGE", 9, fold=True))
    rows = [
        (duration(max(0.0, now - each.at)), Text(each.reason, "yellow" if each.warning else ""),
         shortened(drop_noise(each.message), _LONGEST) + (f" (x{each.count})" if each.count > 1 else ""))
        for each in events
    ]  # fmt: skip
    return [heading("What happened last"), table(columns, rows, width)]
