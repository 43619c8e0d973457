"""Bounded text for status, conditions and events, without secrets."""

from __future__ import annotations

from trainium_contract.redaction import without_secrets

SENTENCE_LIMIT = 1000
"""Longest sentence: status fields hold 1,024 characters, an event note must stay below that."""


def sentence(text: str, limit: int = SENTENCE_LIMIT) -> str:
    """The text on one line, cut in the middle when it is longer than `limit`: cause and advice stand at its ends."""
    line = without_secrets(" ".join(text.split()))
    if len(line) <= limit:
        return line
    tail = limit // 2
    return f"{line[: limit - tail - 5]} ... {line[-tail:]}"


def listed(names: tuple[str, ...], most: int = 3) -> str:
    """`a, b, c and 4 more`."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
