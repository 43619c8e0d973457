"""Render `why`: an interruption, or why the job failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from trainium_client.render.page import heading, labelled, listed, stacked
from trainium_contract.pages.formatting import clock, duration, plural, shortened
from trainium_contract.program_output import drop_noise
from trainium_contract.views.interruptions import stage_words

if TYPE_CHECKING:
    from rich.console import RenderableType

    from trainium_client.views.interruption_report import InterruptionReport
    from trainium_contract.views.interruptions import InterruptionView


_LONGEST = 240
"""Characters of the evidence of an interruption, where the log's own lines follow; JSON has all of it."""


def interruption_page(report: InterruptionReport) -> RenderableType:
    """Render an interruption, from its first sign to the first new step."""
    entry = report.entry
    if entry is None:
        sentence = report.verdict or "nothing has interrupted this job"
        return stacked(Text(f"{report.namespace}/{report.name} is {report.phase or 'not answered yet'}: {sentence}"),
                       listed(report.advice))  # fmt: skip
    seconds = {name: value for name, value in entry.stages.items() if value}
    stages = ", ".join(f"{stage_words(name)} {duration(value)}" for name, value in seconds.items())
    steps = _steps(entry.step_before, entry.resume_step, entry.steps_lost)
    end = (
        ""
        if entry.stopped
        else "the recovery is under way"
        if entry.open
        else f"after {duration(entry.recovered_seconds)}"
    )
    joined = [f"{plural(entry.pods_replaced, 'pod')} joined"] if entry.pods_replaced else []
    return stacked(
        Text(_title(report), "bold"),
        labelled([
            ("When", f"{clock(entry.at)} UTC" + (f", known {duration(entry.detected_seconds)} later"
                                                   if entry.detected_seconds is not None else "")),
            ("Who", _who(entry)),
            ("Cause", entry.cause),
            ("Seen", _seen(report, entry)),
            ("Answer", ", ".join([entry.answer, *joined])),
            ("Trained on", "" if entry.stopped else end),
            ("Seconds", stages),
            ("Steps", steps),
        ]),
        *_log(report),
        *_advice(report),
    )  # fmt: skip


def _title(report: InterruptionReport) -> str:
    entry = report.entry
    assert entry is not None
    where = f"generation {entry.generation}.{entry.attempt}"
    if entry.stopped:
        return f"{report.namespace}/{report.name} stopped for good in {where}"
    return f"{report.namespace}/{report.name} was interrupted in {where} (entry {report.number} of {report.kept})"


def _seen(report: InterruptionReport, entry: InterruptionView) -> str:
    """Return what was seen; a verdict to its end, which is what to do."""
    if not report.log_lines:
        return entry.message
    return drop_noise(entry.message) if entry.stopped else shortened(drop_noise(entry.message), _LONGEST)


def _who(entry: InterruptionView) -> str:
    who = " on ".join(each for each in (entry.pod, entry.node) if each) or "no one worker"
    return who if entry.rank is None else f"{who}, whose first rank was {entry.rank}"


def _steps(before: int | None, resumed: int | None, lost: int | None) -> str:
    parts = [] if before is None else [f"{before} was the last one before"]
    parts += [] if resumed is None else [f"went on from {resumed}"]
    parts += [] if lost is None else [f"{lost} computed again"]
    return ", ".join(parts)


def _advice(report: InterruptionReport) -> list[RenderableType]:
    return [heading("What to do"), listed(report.advice)] if report.advice else []


def _log(report: InterruptionReport) -> list[RenderableType]:
    if not report.log_lines:
        return [heading("Log"), Text(report.log_note, "dim")] if report.log_note else []
    return [heading(f"Log of {report.log_pod} at that time"), listed(report.log_lines, mark="  ")]
