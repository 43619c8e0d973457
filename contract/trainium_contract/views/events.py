"""Events about a job, the newest first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_contract.views.raw import mapping, seconds_of, text, whole

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


def event_views(raw: Sequence[Mapping[str, Any]], *, uid: str = "") -> tuple[EventView, ...]:
    """Return the events that the API server lists, newest first; with `uid` only those about that object."""
    found = [_event(each) for each in raw if not uid or text(mapping(each, "involvedObject"), "uid") == uid]
    return tuple(sorted(found, key=lambda event: event.at, reverse=True))


def _event(raw: Mapping[str, Any]) -> EventView:
    series = mapping(raw, "series")
    stamps = (
        text(series, "lastObservedTime"),
        text(raw, "lastTimestamp"),
        text(raw, "eventTime"),
        text(mapping(raw, "metadata"), "creationTimestamp"),
    )
    at = next((at for stamp in stamps if (at := seconds_of(stamp)) is not None), 0.0)
    count = whole(series, "count") or whole(raw, "count", 1)
    return EventView(at, text(raw, "reason"), text(raw, "message"), text(raw, "type") == "Warning", max(1, count))
