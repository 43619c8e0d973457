"""Workers whose pods end before anybody is in them, as it must outlive a restart of the operator."""

from __future__ import annotations

from trainium_contract.base import StatusModel


class RefusalsStatus(StatusModel):
    """Pods that ended before their agent was heard, time after time: the pause before the next ones grows."""

    rounds: int = 0
    """How often in a row pods were made and one of them ended so; 0 once an agent of those made since was heard."""
    at: float | None = None
    """Unix seconds of the newest."""
    next_ordinal: int = 0
    """Ordinal from which on pods were made after it."""
