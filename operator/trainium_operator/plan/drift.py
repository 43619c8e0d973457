"""Policy: workers that were made from an earlier pod template run on; status and an event say how many there are.

Invariant: nothing that runs is restarted because the job's template, or the operator's own part of it, has changed; new
pods are made from the newest template, and those that never ran are replaced (`pods`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_operator.plan.reasons import Reason
from trainium_operator.plan.worker_pod import template_hash

if TYPE_CHECKING:
    from trainium_operator.plan.facts import Draft, Facts


def note_drift(facts: Facts, draft: Draft) -> None:
    """Count them; told when there are some for the first time since there were none."""
    running = [worker for worker in facts.workers.values() if not worker.ended and worker.pod.template_hash]
    wanted = template_hash(facts.job, facts.settings) if running else ""
    outdated = sum(worker.pod.template_hash != wanted for worker in running)
    if outdated and not draft.status.outdated_pods:
        draft.note(
            Reason.TEMPLATE_CHANGED,
            f"{outdated} of {len(running)} workers were made from an earlier pod template and run on as they are; pods "
            "made from now on have the new one. To bring all up to date suspend the job and resume it.",
        )
    draft.update(outdated_pods=outdated)
