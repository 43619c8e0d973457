"""Explain why training stopped: the last interruption, or the verdict, with the log lines about it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_client.views.log_lines import PodLogLine, parse_log_line
from trainium_contract.program_output import is_native_frame, restore_lines, strip_margin
from trainium_contract.rfc3339 import parse_rfc3339
from trainium_contract.views.interruptions import InterruptionView, read_interruptions
from trainium_contract.views.raw import read_mapping, read_text, strip_control_characters
from trainium_contract.views.status_reader import read_public_status

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

MAX_LINES = 12
_BEFORE_SECONDS = 30.0
_AFTER_SECONDS = 2.0
_CONTEXT_LINES = 4
_ERRORS = re.compile(
    r"(?i)error|exception|traceback|fault|fail|killed|signal|exit|ended with|no progress|refus|cannot|lost|leav|nrt_"
    r"|out of mem|warn|^(?:\[[^\]]*\] )?  File \".*\", line \d"
)


@dataclass(frozen=True, slots=True)
class InterruptionReport:
    """An interruption; `entry` is None if nothing has interrupted the job."""

    name: str
    namespace: str
    phase: str
    verdict: str
    entry: InterruptionView | None
    number: int
    """Number of the entry in the status, from 1, the oldest first."""
    entry_count: int
    """Number of entries in the status."""
    log_pod: str
    log_lines: tuple[str, ...]
    log_note: str
    """Reason why no lines are shown."""
    advice: tuple[str, ...]


def explain_interruption(
    job: Mapping[str, Any],
    *,
    number: int | None = None,
    log: str = "",
    log_note: str = "",
    advice: tuple[str, ...] = (),
) -> InterruptionReport:
    """Build the report of one entry of the history (from 1; by default the last) with the log of its pod."""
    status, metadata = read_public_status(job), read_mapping(job, "metadata")
    entries = read_interruptions(status)
    number = len(entries) if number is None else number
    entry = entries[number - 1] if 0 < number <= len(entries) else None
    lines = select_log_lines(log, entry) if entry is not None else ()
    if entry is not None and not lines and not log_note:
        log_note = "no single worker failed" if not entry.pod else f"the log of {entry.pod} has no lines of that time"
    return InterruptionReport(
        name=read_text(metadata, "name"),
        namespace=read_text(metadata, "namespace"),
        phase=status.read_text("phase"),
        verdict=status.read_text("verdict"),
        entry=entry,
        number=number if entry is not None else 0,
        entry_count=len(entries),
        log_pod=entry.pod if entry is not None else "",
        log_lines=lines,
        log_note=log_note,
        advice=advice,
    )


def select_log_lines(log: str, entry: InterruptionView) -> tuple[str, ...]:
    """Select lines of a log with time stamps that are near the interruption, in log order; errors are preferred.

    Lines of a verdict, which is shown whole, are left out.
    """
    if entry.at is None:
        return ()
    shown_lines = restore_lines(entry.message).splitlines() if entry.stopped else []
    verdict_lines = {strip_margin(line).strip() for line in shown_lines}
    until = max(entry.at, entry.detected_at or entry.at) + _AFTER_SECONDS
    near: list[str] = []
    for line in log.splitlines():
        stamp, _, content = line.partition(" ")
        logged_at = parse_rfc3339(stamp)
        if logged_at is not None and entry.at - _BEFORE_SECONDS <= logged_at <= until and content.strip():
            near += _select_parts(parse_log_line(content), verdict_lines)
    errors = [index for index, text in enumerate(near) if _ERRORS.search(text)]
    # The last lines of both kinds are nearest to the cause, and a few lines around them give the context.
    selected = set(errors[-MAX_LINES + _CONTEXT_LINES :]) | set(range(len(near))[-_CONTEXT_LINES:])
    return tuple(near[index] for index in sorted(selected))


def _select_parts(line: PodLogLine, known: Collection[str]) -> list[str]:
    """Return the lines without frames of C++, which repeat the Python traceback, and without known lines."""
    return [
        strip_control_characters(shown)[:400]
        for text, shown in zip(line.text.split("\n"), line.shown.split("\n"), strict=True)
        if not is_native_frame(text) and strip_margin(text).strip() not in known
    ]
