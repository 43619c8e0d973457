"""Policy: a job that must rest saves, gives back all its nodes and waits; then its generation is over.

It rests while its user suspends it, and while its queue (Kueue) has not admitted it or takes the quota back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.status.conditions import ConditionType
from trainium_contract.status.start_failures import StartFailuresStatus
from trainium_operator.plan.faults.failure_budgets import avoided_nodes
from trainium_operator.plan.model.actions import Answer
from trainium_operator.plan.model.conditions import with_condition
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.model.text import counted
from trainium_operator.plan.pods.deletion import deletion

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus
    from trainium_operator.plan.model.conditions import AnyShown
    from trainium_operator.plan.view.facts import Facts


def release(facts: Facts, status: TrainingJobStatus) -> Answer:
    """Delete all pods; on SIGTERM the ranks save and leave."""
    membership = status.membership.replaced(size=0)
    avoided = avoided_nodes(status.failures, facts.now, facts.settings.avoid_node_seconds)  # without those that refused
    status = status.replaced(
        membership=membership, waiting_since=None, start_failures=StartFailuresStatus(), avoided_nodes=avoided
    )
    deletions = tuple(action for worker in facts.workers.values() for action in deletion(worker, force=worker.node_bad))
    return Answer(status=status, actions=deletions)


def suspend(facts: Facts, status: TrainingJobStatus) -> Answer:
    """Release everything, and say so."""
    released = release(facts, status)
    status, workers, kind = released.status, facts.workers.values(), ConditionType.SUSPENDED
    if workers:
        message = f"{counted(len(workers), 'worker')} {'saves and leaves' if len(workers) == 1 else 'save and leave'}"
        status = with_condition(status, kind, False, Reason.SUSPENDING, message, now=facts.now)
    else:
        status = with_condition(status, kind, True, Reason.SUSPENDED, "all nodes are released", now=facts.now)
    status = with_condition(status, ConditionType.RESIZING, False, Reason.SUSPENDED, "", now=facts.now)
    return released.having(status)


def stay_active(facts: Facts, status: AnyShown) -> AnyShown:
    """Say that the job is not suspended."""
    return with_condition(status, ConditionType.SUSPENDED, False, Reason.NOT_SUSPENDED, "", now=facts.now)
