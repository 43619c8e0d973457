"""Policy: a generation that was decided on and never recorded is finished, even when its reason has gone.

The operator died between the two writes. If what led to the decision still holds, the other policies decide again,
under the same number. If it does not (a silent worker speaks again, the user changed the size back), nobody else
would: the status would name a generation that never comes, and its interruption would never end. So the members that
are there begin it, gracefully. Nothing is done before every one of them was heard: until then a loss may still be the
reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.exit_codes import Cause
from trainium_contract.messages import Transition
from trainium_operator.plan.generation import NewGeneration
from trainium_operator.plan.history import open_membership_entry

if TYPE_CHECKING:
    from trainium_operator.plan.facts import Draft, Facts
    from trainium_operator.plan.workers import Worker


def finish_decided(facts: Facts, draft: Draft) -> NewGeneration | None:
    """The same members again, under the number that the status names; None when nothing was left undone."""
    current = facts.current
    if current is None or draft.status.membership.generation <= current.generation:
        return None
    if not all(_works(worker) for _, worker in facts.members):
        return None
    index = open_membership_entry(draft.status, current.generation)
    cause = Cause.RESIZE if index is None else draft.status.history[index].cause
    return NewGeneration(members=current.members, transition=Transition.GRACEFUL, cause=cause)


def _works(worker: Worker | None) -> bool:
    return worker is not None and worker.warm and not worker.finished
