"""What a policy answers. Policies are asked one after the other, each with the status as the one before it left it.

Invariant: a value, never changed; `plan.plan` alone joins answers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus
    from trainium_operator.plan.model.actions import Action, EventIntent


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A status, and what is asked for besides."""

    status: TrainingJobStatus
    actions: tuple[Action, ...] = ()
    """In order."""
    notes: tuple[EventIntent, ...] = ()
    looks: tuple[float, ...] = ()
    """When the job must be looked at again (Unix seconds)."""

    def then(self, after: Answer) -> Answer:
        """This answer and the one of a policy that was asked with its status."""
        return Answer(
            status=after.status,
            actions=self.actions + after.actions,
            notes=self.notes + after.notes,
            looks=self.looks + after.looks,
        )

    def having(self, status: TrainingJobStatus) -> Answer:
        """This answer with another status."""
        return replace(self, status=status)
