"""Policy: bring the membership to the desired size while nothing is lost: gracefully, so that no step is lost.

On shrinking the highest ranks leave. On growing, spares join first and are refilled afterwards. A job that had to
shrink grows back when it has rested and all workers are there, and to a partial size only after a longer wait. What the
user asks for is done at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.exit_codes import Cause
from trainium_contract.job import ConditionType, Rung
from trainium_contract.messages import Transition
from trainium_operator.plan.conditions import is_true
from trainium_operator.plan.generation import NewGeneration, is_settled, newcomers_of
from trainium_operator.plan.history import open_interruption, open_membership_entry
from trainium_operator.plan.ranks import assign_ranks, surroundings_of
from trainium_operator.plan.reasons import Reason

if TYPE_CHECKING:
    from trainium_operator.plan.facts import Draft, Facts

_FLAPPING_SECONDS = 3600.0
_LONGEST_REST = 8.0


def note_request(facts: Facts, draft: Draft, desired: int) -> None:
    """Remember that the user changed the size; until it is reached, a change of size is theirs."""
    if facts.current is not None and draft.status.desired not in (0, desired):
        message = f"from {len(facts.current.members)} to {desired} nodes"
        draft.condition(ConditionType.RESIZING, True, Reason.SIZE_REQUESTED, message)


def resize(facts: Facts, draft: Draft) -> NewGeneration | None:
    """The next generation at another size; None when it fits, or not yet."""
    assert facts.current is not None
    present, desired = len(facts.current.members), draft.status.desired
    if any(worker is not None and worker.finished for _, worker in facts.members):
        return None
    if present == desired:
        draft.update(waiting_since=None)
        return None
    if draft.status.waiting_since is None:
        draft.update(waiting_since=facts.now)
    newcomers = newcomers_of(facts)
    size = desired if present > desired else _grown(facts, draft, present, len(newcomers))
    if size == present:
        return None
    _note(facts, draft, size)
    members = assign_ranks(facts.current.members, newcomers, size, surroundings_of(facts))
    return NewGeneration(members=members, transition=Transition.GRACEFUL, cause=Cause.RESIZE)


def _grown(facts: Facts, draft: Draft, present: int, newcomers: int) -> int:
    """The size to grow to now; `present` when not yet."""
    if newcomers == 0 or not is_settled(facts):
        return present
    resting = 0.0 if is_true(draft.status, ConditionType.RESIZING) else grows_again_at(facts, draft)
    if facts.now < resting:
        draft.deadlines.append(resting)
        return present
    if present + newcomers >= draft.status.desired:
        return draft.status.desired
    partial = facts.size.legal_at_most(present + newcomers)
    if partial <= present:
        return present
    deadline = (draft.status.waiting_since or facts.now) + facts.job.spec.recovery.rescale_after_seconds
    if facts.now < deadline:
        draft.deadlines.append(deadline)
        return present
    return partial


def grows_again_at(facts: Facts, draft: Draft) -> float:
    """Until when growth that nobody asked for rests (Unix seconds): capacity that comes and goes must not flap the job.

    `rescaleAfterSeconds` after the last recovery or shrink, doubled for each further shrink in the last hour, up to
    eightfold.
    """
    faults = [entry for entry in draft.status.history if entry.rung not in (Rung.RESIZE, Rung.GROW, Rung.STOP)]
    ends = [(entry.failed_at or 0.0) + (entry.recovered_seconds or 0.0) for entry in faults]
    shrinks = sum(
        entry.rung is Rung.SHRINK and end > facts.now - _FLAPPING_SECONDS
        for entry, end in zip(faults, ends, strict=True)
    )
    factor = min(_LONGEST_REST, 2.0 ** max(0, shrinks - 1))
    return max(ends, default=0.0) + facts.job.spec.recovery.rescale_after_seconds * factor


def _note(facts: Facts, draft: Draft, size: int) -> None:
    assert facts.current is not None
    present = len(facts.current.members)
    if open_membership_entry(draft.status, facts.current.generation) is not None:
        return
    if draft.status.membership.generation != facts.current.generation:
        return
    requested = size < present or is_true(draft.status, ConditionType.RESIZING)
    open_interruption(
        facts,
        draft,
        cause=Cause.RESIZE if requested else Cause.CAPACITY,
        rung=Rung.RESIZE if requested else Rung.GROW,
        failed_at=facts.now,
        attempt=draft.status.membership.attempt,
        message=f"from {present} to {size} nodes",
    )
