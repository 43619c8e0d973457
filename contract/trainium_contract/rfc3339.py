"""Times as Kubernetes writes them: RFC 3339 in UTC."""

from __future__ import annotations

from datetime import UTC, datetime


def format_rfc3339(seconds: float) -> str:
    """Return the Unix time as `2026-01-31T12:00:00Z`, rounded down."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def format_micro_time(seconds: float) -> str:
    """Return the Unix time with microseconds, as Leases and events have it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_rfc3339(stamp: object) -> float | None:
    """Return the Unix time of a stamp, or of a time that YAML has parsed; None for any other value."""
    try:
        time = stamp if isinstance(stamp, datetime) else datetime.fromisoformat(str(stamp))
    except ValueError:
        return None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
