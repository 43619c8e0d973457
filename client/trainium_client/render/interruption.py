"""`why`: an interruption or the verdict as a story."""

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
"""Of what was seen at an interruption, where the log's own lines follow; JSON has all of it."""


def interruption_page(story: InterruptionReport) -> RenderableType:
    """Render an interruption, from its first sign to the first new step."""
    entry = story.entry
    if entry is None:
        said = story.verdict or "nothing has interrupted this job"
        return stacked(Text(f"{story.namespace}/{story.name} is {story.phase or 'not answered yet'}: {said}"),
                       listed(story.advice))  # fmt: skip
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
        Text(_title(story), "bold"),
        labelled([
            ("When", f"{clock(entry.at)} UTC" + (f", known {duration(entry.detected_seconds)} later"
                                                   if entry.detected_seconds is not None else "")),
            ("Who", _who(entry)),
            ("Cause", entry.cause),
            ("Seen", _seen(story, entry)),
            ("Answer", ", ".join([entry.answer, *joined])),
            ("Trained on", "" if entry.stopped else end),
            ("Seconds", stages),
            ("Steps", steps),
        ]),
        *_log(story),
        *_advice(story),
    )  # fmt: skip


def _title(story: InterruptionReport) -> str:
    entry = story.entry
    assert entry is not None
    where = f"generation {entry.generation}.{entry.attempt}"
    if entry.stopped:
        return f"{story.namespace}/{story.name} stopped for good in {where}"
    return f"{story.namespace}/{story.name} was interrupted in {where} (entry {story.number} of {story.kept})"


def _seen(story: InterruptionReport, entry: InterruptionView) -> str:
    """Return what was seen; a verdict to its end, which is what to do."""
    if not story.log_lines:
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


def _advice(story: InterruptionReport) -> list[RenderableType]:
    return [heading("What to do"), listed(story.advice)] if story.advice else []


def _log(story: InterruptionReport) -> list[RenderableType]:
    if not story.log_lines:
        return [heading("Log"), Text(story.log_note, "dim")] if story.log_note else []
    return [heading(f"Log of {story.log_pod} at that time"), listed(story.log_lines, mark="  ")]
