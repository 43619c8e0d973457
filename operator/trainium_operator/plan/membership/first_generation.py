"""Policy: the first generation, also after a suspension, begins when enough workers are registered and warm.

An elastic job that lacks some begins smaller after `rescaleAfterSeconds`. The other limit, `gangTimeoutSeconds`
(`gang_policy`), runs only while the workers that hold nodes do not suffice for any legal size: there is nothing to
begin with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.faults.causes import Cause
from trainium_contract.wire.messages import Transition
from trainium_operator.plan.membership.compiled_size import size_at_hand
from trainium_operator.plan.membership.generation import Decision, NewGeneration
from trainium_operator.plan.membership.patience import makes_do_at
from trainium_operator.plan.membership.ranks import first_order, member_of, surroundings_of

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus
    from trainium_operator.plan.view.facts import Facts


def form_first_generation(facts: Facts, status: TrainingJobStatus) -> Decision:
    """Form it at the desired size, or after `rescaleAfterSeconds` at the largest legal size that is there."""
    ready = facts.candidates
    size = status.desired
    if len(ready) < size:
        deadline = makes_do_at(facts, status)
        if facts.now < deadline:
            return Decision(status=status, looks=(deadline,))
        size = size_at_hand(facts, status, len(ready))
    if size == 0:
        return Decision(status=status)
    ordered = first_order(ready, size, surroundings_of(facts))
    members = tuple(member_of(worker, rank) for rank, worker in enumerate(ordered))
    new = NewGeneration(members=members, transition=Transition.IMMEDIATE, cause=Cause.RESIZE)
    return Decision(status=status, new=new)
