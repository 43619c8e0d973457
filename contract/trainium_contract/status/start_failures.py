"""Workers whose pods end before anybody is in them, as it must outlive a restart of the operator."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainium_contract.base import StatusModel

MAX_NODES = 32
MAX_MESSAGE = 512


class StartFailureNode(StatusModel):
    """A node on which worker pods ended before a container of them ran."""

    node: Annotated[str, Field(max_length=253)]
    """Its name."""
    times: int
    """Number of them."""
    at: float
    """Unix seconds of the newest."""
    ordinal: int
    """Ordinal of the newest pod that is counted."""


class StartFailuresStatus(StatusModel):
    """Pods that ended repeatedly before their agent registered: the pause before the next ones grows."""

    rounds: int = 0
    """Rounds in a row of pods of which one ended so; 0 once an agent of a later pod registered."""
    at: float | None = None
    """Unix seconds of the newest."""
    next_ordinal: int = 0
    """Ordinal from which on pods were made after it, or after the last batch that lives."""
    batch: int = 0
    """Pods that are made at once since then: 4, and four times as many after each batch that lives; 0 for all."""
    message: Annotated[str, Field(max_length=MAX_MESSAGE)] = ""
    """End of the newest one."""
    nodes: Annotated[tuple[StartFailureNode, ...], Field(max_length=MAX_NODES)] = ()
    """Nodes that refused; new workers keep away from those that did so twice, a quarter of the job's size at most."""
