"""Policy: a suspended job saves, gives back all its nodes and waits; its generation is over when the status says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.job import ConditionType
from trainium_operator.plan.pods import delete
from trainium_operator.plan.reasons import Reason

if TYPE_CHECKING:
    from trainium_operator.plan.facts import Draft, Facts


def suspend(facts: Facts, draft: Draft) -> None:
    """Delete all pods; on SIGTERM the ranks save and leave."""
    draft.update(membership=draft.status.membership.model_copy(update={"size": 0}), waiting_since=None)
    for worker in facts.workers.values():
        delete(draft, worker, force=worker.node_bad)
    if facts.workers:
        draft.condition(
            ConditionType.SUSPENDED, False, Reason.SUSPENDING, f"{len(facts.workers)} workers save and leave"
        )
    else:
        draft.condition(ConditionType.SUSPENDED, True, Reason.SUSPENDED, "all nodes are released")
    draft.condition(ConditionType.RESIZING, False, Reason.SUSPENDED, "")


def stay_active(draft: Draft) -> None:
    """Say that the job is not suspended."""
    draft.condition(ConditionType.SUSPENDED, False, Reason.NOT_SUSPENDED, "")
