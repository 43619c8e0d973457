"""What the agent is told about a generation that it is in, and how such a generation ends."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class Order(IntEnum):
    """How the agent is told to leave a generation; a higher one overrides a lower one."""

    NONE = 0
    GRACEFUL = 1
    """A newer generation; let the ranks save first."""
    TERMINATE = 2
    """The pod is ending; let the ranks save first."""
    IMMEDIATE = 3
    """A newer generation; kill the ranks."""


class GenerationEnd(StrEnum):
    """How a generation ended on this pod."""

    FINISHED = "Finished"
    """Every rank of every member ended with code 0."""
    LEFT = "Left"
    """As ordered; no rank is alive."""
