"""Policy: workers that were made from an earlier pod template run on; status and an event say how many there are.

Invariant: nothing that runs is restarted because the job's template, or the operator's own part of it, has changed; new
pods are made from the newest template, and those that never ran are replaced where the job or the operator's settings
changed (`pods.replicas`). A newer operator with another idea of a pod is no change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_operator.plan.manifests.worker_pod import is_outdated, template_hash
from trainium_operator.plan.model.actions import Answer, event
from trainium_operator.plan.model.reasons import Reason

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus
    from trainium_operator.plan.model.actions import EventIntent
    from trainium_operator.plan.view.facts import Facts


def note_drift(facts: Facts, status: TrainingJobStatus) -> Answer:
    """Count them; told when there are some for the first time since there were none."""
    running = [worker for worker in facts.workers.values() if not worker.ended and worker.pod.template_hash]
    wanted = template_hash(facts.job, facts.settings) if running else ""
    outdated = sum(is_outdated(worker.pod.template_hash, wanted) for worker in running)
    notes: tuple[EventIntent, ...] = ()
    if outdated and not status.outdated_pods:
        note = (
            f"{outdated} of {len(running)} workers were made from an earlier pod template and run on as they are; pods "
            "made from now on have the new one. To bring all up to date suspend the job and resume it."
        )
        notes = (event(Reason.TEMPLATE_CHANGED, note),)
    return Answer(status=status.replaced(outdated_pods=outdated), notes=notes)
