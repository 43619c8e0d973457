"""Events about a job, the newest first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_contract.rfc3339 import parse_rfc3339
from trainium_contract.views.raw import read_integer, read_mapping, read_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class EventView:
    """One event, or a series of it."""

    at: float
    reason: str
    message: str
    warning: bool
    count: int


def build_event_views(raw: Sequence[Mapping[str, Any]], *, uid: str = "") -> tuple[EventView, ...]:
    """Return the events that the API server lists, newest first; with `uid` only those about that object."""
    events = [
        _read_event(raw_event)
        for raw_event in raw
        if not uid or read_text(read_mapping(raw_event, "involvedObject"), "uid") == uid
    ]
    return tuple(sorted(events, key=lambda event: event.at, reverse=True))


def _read_event(raw: Mapping[str, Any]) -> EventView:
    series = read_mapping(raw, "series")
    # The legacy time of the last occurrence has no fractions of a second, so the latest of them orders the events.
    stamps = (read_text(series, "lastObservedTime"), read_text(raw, "lastTimestamp"), read_text(raw, "eventTime"))
    created = parse_rfc3339(read_text(read_mapping(raw, "metadata"), "creationTimestamp"))
    at = max((at for stamp in stamps if (at := parse_rfc3339(stamp)) is not None), default=created or 0.0)
    count = read_integer(series, "count") or read_integer(raw, "count", 1)
    return EventView(
        at, read_text(raw, "reason"), read_text(raw, "message"), read_text(raw, "type") == "Warning", max(1, count)
    )
