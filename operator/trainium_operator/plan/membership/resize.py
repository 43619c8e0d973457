"""Policy: bring the membership to the desired size while nothing is lost: gracefully, so that no step is lost.

On shrinking extras leave, then the highest ranks. On growing, spares join first and are refilled afterwards. A job that
had to shrink grows back when it has rested and all workers are there, and to a partial size only after a longer wait;
in any case only for what is worth a restart (`growth_gain`). What the user asks for is done at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.faults.causes import Cause
from trainium_contract.status.conditions import ConditionType
from trainium_contract.status.interruptions import Rung
from trainium_contract.wire.messages import Transition
from trainium_operator.plan.history.interruptions import open_interruption, open_membership_entry
from trainium_operator.plan.membership.compiled_size import compile_seconds, pays_at, size_at_hand
from trainium_operator.plan.membership.generation import Decision, NewGeneration
from trainium_operator.plan.membership.growth_gain import is_worth_growing
from trainium_operator.plan.membership.patience import makes_do_at
from trainium_operator.plan.membership.ranks import assign_ranks, surroundings_of
from trainium_operator.plan.membership.resting import grows_again_at
from trainium_operator.plan.model.conditions import is_true, with_condition
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.model.sentences import counted
from trainium_operator.plan.view.extras import joining, staying
from trainium_operator.plan.view.facts import newcomers_of, sound_newcomers
from trainium_operator.plan.view.progress import is_settled

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus
    from trainium_contract.status.public import PublicStatus
    from trainium_operator.plan.model.conditions import AnyShown
    from trainium_operator.plan.view.facts import Facts


def note_request(facts: Facts, status: AnyShown, desired: int) -> AnyShown:
    """Remember that the user changed the size; until it is reached, a change of size is theirs."""
    if facts.current is None or status.desired == 0 or status.desired - status.idle_nodes.taken == desired:
        return status
    message = f"from {len(facts.current.members)} to {counted(desired, 'node')}"
    return with_condition(status, ConditionType.RESIZING, True, Reason.SIZE_REQUESTED, message, now=facts.now)


def resize(facts: Facts, status: TrainingJobStatus) -> Decision:
    """The next generation at another size; none when it fits, or not yet."""
    assert facts.current is not None
    present, desired = len(facts.current.members), status.desired
    if any(worker is not None and worker.finished for _, worker in facts.members):
        return Decision(status=status)
    if present == desired:
        return Decision(status=status)
    asked = is_true(status, ConditionType.RESIZING)
    newcomers = newcomers_of(facts) if asked else sound_newcomers(facts)
    size, looks = (desired, ()) if present > desired else _grown(facts, status, present, len(newcomers))
    if size == present:
        return Decision(status=status, looks=looks)
    survivors = staying(facts, facts.current.members, size)
    joined = joining(facts, survivors, newcomers, size, desired - status.idle_nodes.taken)
    members = assign_ranks(survivors, joined, size, surroundings_of(facts))
    new = NewGeneration(members=members, transition=Transition.GRACEFUL, cause=Cause.RESIZE)
    return Decision(status=_with_entry(facts, status, size), new=new, looks=looks)


def _grown(facts: Facts, status: TrainingJobStatus, present: int, newcomers: int) -> tuple[int, tuple[float, ...]]:
    """The size to grow to now, `present` when not yet; and when to look again (Unix seconds)."""
    if newcomers == 0 or not is_settled(facts):
        return present, ()
    resting = 0.0 if is_true(status, ConditionType.RESIZING) else grows_again_at(facts, status)
    if facts.now < resting:
        return present, (resting,)
    asked = is_true(status, ConditionType.RESIZING)
    size = _target(facts, status, present, min(status.desired, present + newcomers), asked=asked)
    price = compile_seconds(facts, status, size)
    if size <= present or not (asked or is_worth_growing(facts, status, present, size, beside=price)):
        return present, ()
    paying = facts.now if asked else pays_at(facts, status, size, _last_change(status))
    if facts.now < paying:
        return present, (paying,)
    if size == status.desired:
        return size, ()
    deadline = makes_do_at(facts, status)
    return (present, (deadline,)) if facts.now < deadline else (size, ())


def _target(facts: Facts, status: PublicStatus, present: int, nodes: int, *, asked: bool) -> int:
    """The size to grow to with so many nodes: what was asked for, else one that has its graphs if that is growth."""
    size = nodes if nodes == status.desired else facts.size.legal_at_most(nodes)
    if asked or not compile_seconds(facts, status, size):
        return size
    at_hand = size_at_hand(facts, status, nodes)
    return at_hand if at_hand > present else size


def _last_change(status: PublicStatus) -> float:
    """When the size in force was taken (Unix seconds), as far as the history goes back."""
    changes = (Rung.SHRINK, Rung.GROW, Rung.RESIZE)
    taken = [entry.decided_at for entry in status.history if entry.rung in changes and entry.decided_at is not None]
    return max(taken, default=0.0)


def _with_entry(facts: Facts, status: TrainingJobStatus, size: int) -> TrainingJobStatus:
    """The status with the entry of this change of size, unless the generation in force is being left already."""
    assert facts.current is not None
    present = len(facts.current.members)
    if open_membership_entry(status, facts.current.generation) is not None:
        return status
    if status.membership.generation != facts.current.generation:
        return status
    requested = is_true(status, ConditionType.RESIZING)
    return open_interruption(
        facts,
        status,
        cause=Cause.RESIZE if requested else Cause.CAPACITY,
        rung=Rung.RESIZE if requested or size < present else Rung.GROW,
        failed_at=facts.now,
        attempt=status.membership.attempt,
        message=f"from {present} to {counted(size, 'node')}{_why(facts, status, size - present)}",
    )


def _why(facts: Facts, status: PublicStatus, more: int) -> str:
    if facts.grant is not None and status.desired < facts.size.desired:
        return f": the queue grants {status.desired} of {facts.size.desired}"
    taken = status.idle_nodes.taken
    if more > 0 and taken:
        return f": {taken} that were idle, beyond the {status.desired - taken} asked for"
    if more < 0 and facts.observed.wanted_elsewhere:
        return f": {-more} that were idle are given back, other jobs wait for {facts.observed.wanted_elsewhere}"
    return ""
