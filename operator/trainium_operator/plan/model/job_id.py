"""Which TrainingJob: the only key under which pods, records and agents are kept.

Invariant: a uid alone says nothing. Whoever may create an object in some namespace writes its ownerReferences and can
copy any uid into them; the namespace is the one part that the API server vouches for. So there is no look-up by uid.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class JobId:
    """One incarnation of a TrainingJob. Raises ValueError when a part is missing."""

    namespace: str
    name: str
    uid: str

    def __post_init__(self) -> None:
        if not (self.namespace and self.name and self.uid):
            raise ValueError(f"a job is known by namespace, name and uid, not by {self}")
