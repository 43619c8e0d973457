"""Record worker pods that end before their agent registers; the record must survive a restart of the operator."""

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
    """Consecutive batches with a pod that ended before its agent registered; 0 once one of a later pod did."""
    at: float | None = None
    """Unix seconds of the newest failure."""
    next_ordinal: int = 0
    """First ordinal of the pods that were created after it, or after the last batch that lives."""
    batch: int = 0
    """Pods that are created at once since then: 4, and four times as many after each batch that lives; 0 for all."""
    message: Annotated[str, Field(max_length=MAX_MESSAGE)] = ""
    """Message about the newest such end."""
    nodes: Annotated[tuple[StartFailureNode, ...], Field(max_length=MAX_NODES)] = ()
    """Nodes that refused; new workers avoid those that did so twice, at most a quarter of the job's size."""
