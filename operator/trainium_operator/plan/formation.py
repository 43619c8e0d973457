"""Policy: the first generation, also after a suspension, begins when enough workers are registered and warm.

An elastic job that lacks some begins smaller after `rescaleAfterSeconds`. The other limit, `gangTimeoutSeconds`
(`gang`), runs only while the workers that hold nodes do not suffice for any legal size: there is nothing to begin with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.exit_codes import Cause
from trainium_contract.messages import Transition
from trainium_operator.plan.generation import NewGeneration
from trainium_operator.plan.ranks import first_order, member_of, surroundings_of

if TYPE_CHECKING:
    from trainium_operator.plan.facts import Draft, Facts


def form_first_generation(facts: Facts, draft: Draft) -> NewGeneration | None:
    """Form it at the desired size, or after `rescaleAfterSeconds` at the largest legal size that is there."""
    ready = facts.candidates
    size = draft.status.desired
    if draft.status.waiting_since is None:
        draft.update(waiting_since=facts.now)
    if len(ready) < size:
        size = _smaller(facts, draft, len(ready))
    if size == 0:
        return None
    ordered = first_order(ready, size, surroundings_of(facts))
    members = tuple(member_of(worker, rank) for rank, worker in enumerate(ordered))
    return NewGeneration(members=members, transition=Transition.IMMEDIATE, cause=Cause.RESIZE)


def _smaller(facts: Facts, draft: Draft, ready: int) -> int:
    deadline = (draft.status.waiting_since or facts.now) + facts.job.spec.recovery.rescale_after_seconds
    if facts.now < deadline:
        draft.deadlines.append(deadline)
        return 0
    return facts.size.legal_at_most(ready)
