"""Define what a queue grants a job."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainium_operator.plan.model.reasons import Reason


class AdmissionState(StrEnum):
    """State of a job in its queue."""

    UNKNOWN = "Unknown"
    """The queue cannot be read: running pods continue, and no pod starts."""
    WAITING = "Waiting"
    EVICTED = "Evicted"
    """The queue requests its quota back; remains after it was returned, until the next admission."""
    CONTRADICTION = "Contradiction"
    """The job was admitted to nodes that none of its pods can use."""
    ADMITTED = "Admitted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A queue's grant to the job."""

    state: AdmissionState
    reason: Reason | None = None
    """Reason of the condition Admitted while no pod may exist."""
    message: str = ""
    """Why no pod may exist, as a sentence."""
    workers: int = 0
    spares: int = 0
    other_pods: Mapping[str, int] = field(default_factory=dict)
    """Pods besides workers and spares, by pod set."""

    @property
    def releases_workers(self) -> bool:
        """Whether all pods must leave."""
        return self.state not in (AdmissionState.ADMITTED, AdmissionState.UNKNOWN)
