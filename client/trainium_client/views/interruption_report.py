"""Explain why training stopped: the last interruption, or the verdict, with the log lines about it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_client.views.log_lines import PodLogLine, parse_log_line
from trainium_contract.program_output import is_native_frame
from trainium_contract.views.interruptions import InterruptionView, read_interruptions
from trainium_contract.views.raw import mapping, parse_rfc3339, plain, text
from trainium_contract.views.status_reader import public_status

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST_LINES = 12
_BEFORE_SECONDS = 30.0
_AFTER_SECONDS = 2.0
_AROUND = 4
_ERRORS = re.compile(
    r"(?i)error|exception|traceback|fault|fail|killed|signal|exit|ended with|no progress|refus|cannot|lost|leav|nrt_"
    r"|out of mem|warn|^(?:\[[^\]]*\] )?  File \".*\", line \d"
)


@dataclass(frozen=True, slots=True)
class InterruptionReport:
    """One interruption; `entry` is None if nothing has interrupted the job."""

    name: str
    namespace: str
    phase: str
    verdict: str
    entry: InterruptionView | None
    number: int
    """Its number among those in the status, from 1, the oldest first."""
    kept: int
    log_pod: str
    log_lines: tuple[str, ...]
    log_note: str
    """Why there are no lines."""
    advice: tuple[str, ...]


def explain_interruption(
    job: Mapping[str, Any], *, which: int | None = None, log: str = "", log_note: str = "", advice: tuple[str, ...] = ()
) -> InterruptionReport:
    """Build the report of one entry of the history (from 1; the last when not given) with the log of its pod."""
    status, metadata = public_status(job), mapping(job, "metadata")
    entries = read_interruptions(status)
    chosen = len(entries) if which is None else which
    entry = entries[chosen - 1] if 0 < chosen <= len(entries) else None
    lines = select_log_lines(log, entry) if entry is not None else ()
    note = log_note
    if entry is not None and not lines and not note:
        note = "no one worker failed" if not entry.pod else f"the log of {entry.pod} has no lines of that time"
    return InterruptionReport(
        name=text(metadata, "name"),
        namespace=text(metadata, "namespace"),
        phase=status.text("phase"),
        verdict=status.text("verdict"),
        entry=entry,
        number=chosen if entry is not None else 0,
        kept=len(entries),
        log_pod=entry.pod if entry is not None else "",
        log_lines=lines,
        log_note=note,
        advice=advice,
    )


def select_log_lines(log: str, entry: InterruptionView) -> tuple[str, ...]:
    """Select the log lines about the interruption, from lines with time stamps: near its time, errors first."""
    if entry.at is None:
        return ()
    until = max(entry.at, entry.detected_at or entry.at) + _AFTER_SECONDS
    near: list[str] = []
    for line in log.splitlines():
        stamp, _, words = line.partition(" ")
        logged_at = parse_rfc3339(stamp)
        if logged_at is not None and entry.at - _BEFORE_SECONDS <= logged_at <= until and words.strip():
            near += _lines(parse_log_line(words))
    errors = [index for index, words in enumerate(near) if _ERRORS.search(words)]
    # The last lines of both kinds are nearest to the cause, and a few lines around them give the context.
    selected = set(errors[-MOST_LINES + _AROUND :]) | set(range(len(near))[-_AROUND:])
    return tuple(near[index] for index in sorted(selected))


def _lines(words: PodLogLine) -> list[str]:
    """Return the lines without frames of C++, which repeat the Python traceback."""
    both = zip(words.text.split("\n"), words.shown.split("\n"), strict=True)
    return [plain(shown)[:400] for text, shown in both if not is_native_frame(text)]
