"""Format text for status, conditions and events: bounded, on one line, without secrets; and RFC 3339 times."""

from __future__ import annotations

from datetime import UTC, datetime

from trainium_contract.redaction import redact_secrets

SENTENCE_LIMIT = 1000
"""Longest sentence: status fields hold 1,024 characters, an event note must stay below that."""


def sentence(text: str, limit: int = SENTENCE_LIMIT) -> str:
    """Return the text on one line, cut in the middle when longer than `limit`: cause and advice are at its ends.

    Lines of a program's output stay apart, so that its last line is apart from those before.
    """
    lines = (" ".join(line.split()) for line in text.splitlines())
    line = redact_secrets(" | ".join(line for line in lines if line))
    if len(line) <= limit:
        return line
    tail = limit // 2
    return f"{line[: limit - tail - 5]} ... {line[-tail:]}"


def counted(number: int, thing: str) -> str:
    """Format a count as `1 pod`, `2 pods`."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def listed(names: tuple[str, ...], most: int = 3) -> str:
    """Format names as `a, b, c and 4 more`."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def rfc3339(seconds: float) -> str:
    """Return the time as `2026-01-31T12:00:00Z`, rounded down."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_rfc3339(text: str) -> float | None:
    """Return Unix seconds of such a text; None for an empty or foreign one."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None
