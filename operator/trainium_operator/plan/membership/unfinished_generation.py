"""Policy: a generation that was decided on and never recorded is finished, even when its reason has gone.

The operator died between the two writes. If what led to the decision still holds, the other policies decide again,
under the same number. If it does not (a silent worker speaks again, the user changed the size back), nobody else
would: the status would name a generation that never comes, and its interruption would never end. So the members that
are there begin it, gracefully. Nothing is done before every one of them was heard: until then a loss may still be the
reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.faults.causes import Cause
from trainium_contract.wire.messages import Transition
from trainium_operator.plan.history.interruptions import open_membership_entry
from trainium_operator.plan.membership.generation import Decision, NewGeneration

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus
    from trainium_operator.plan.view.facts import Facts
    from trainium_operator.plan.view.workers import Worker


def finish_decided(facts: Facts, status: TrainingJobStatus) -> Decision:
    """The same members again, under the number that the status names, where one was left undone."""
    current = facts.current
    if current is None or status.membership.generation <= current.generation:
        return Decision(status=status)
    if not all(_works(worker) for _, worker in facts.members):
        return Decision(status=status)
    index = open_membership_entry(status, current.generation)
    cause = Cause.RESIZE if index is None else status.history[index].cause
    new = NewGeneration(members=current.members, transition=Transition.GRACEFUL, cause=cause)
    return Decision(status=status, new=new)


def _works(worker: Worker | None) -> bool:
    return worker is not None and worker.warm and not worker.finished
