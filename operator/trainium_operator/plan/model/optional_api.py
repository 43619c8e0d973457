"""How it stands with an API that not every cluster serves: Kueue's, that of claimed devices."""

from __future__ import annotations

from enum import StrEnum


class ApiState(StrEnum):
    """Whether plans may go by it."""

    OFF = "Off"
    """The operator was not told to, so it has no rights to."""
    ABSENT = "Absent"
    """The cluster does not serve the version that is known here."""
    READING = "Reading"
    """Its objects are not read yet."""
    READY = "Ready"
