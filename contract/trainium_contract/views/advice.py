"""What a person should do now, most urgent first; empty when the answer is: nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainium_contract.views.job import ChangeView, ConditionView, JobView

_MOST_CHANGES = 6
_WAITING = {"Unschedulable", "WorkerNotStarting", "NameTaken"}


def advise(view: JobView) -> tuple[str, ...]:
    """Sentences, each with what to do."""
    if view.managed_by:
        return (f"{view.managed_by} controls this job (spec.managedBy), and the operator leaves it alone: look there.",)
    if not view.phase:
        return (
            (
                "No operator has answered this job yet. If that lasts for more than a minute it does not run: "
                "kubectl get pods -A -l app.kubernetes.io/name=trainium-operator"
            ),
        )
    if view.phase == "Failed":
        return (
            f"{view.verdict or 'The job failed; it gave no verdict.'}",
            f"What led to it: kubectl trn why {view.name}",
            run_again(view),
        )
    found = list(_troubles(view))
    if view.phase == "Suspended":
        found.append(f"It waits for you: kubectl trn resume {view.name}")
    return tuple(found)


def run_again(view: JobView) -> str:
    """How a failed job gets another run: as it is, or corrected; and whether it was corrected already."""
    saved = view.checkpoints.durable_step
    start = "from the beginning, no checkpoint is on storage" if saved is None else f"from step {saved}"
    file = f"kubectl trn retry {view.name} -f FILE"
    if view.changes:
        return (
            f"Changed since it failed: {_changed(view.changes)}. That counts when it runs again, {start}: "
            f"kubectl trn retry {view.name}. To change more: correct its file, {file}"
        )
    same = "" if view.changes is None else "Nothing in it has changed since it failed. "
    return (
        f"{same}Run it again as it is, {start}: kubectl trn retry {view.name}. To change the job itself: "
        f"correct its file, {file}"
    )


def _changed(changes: tuple[ChangeView, ...]) -> str:
    told = [f"{each.field} ({_from_to(each)})" if _from_to(each) else each.field for each in changes[:_MOST_CHANGES]]
    more = len(changes) - len(told)
    return ", ".join(told) + (f" and {more} more" if more else "")


def _from_to(change: ChangeView) -> str:
    """What it was and is, where both may be told: a digest alone says nothing to a person."""
    was, now = (value.partition("#")[0] if value.startswith("#") else value for value in (change.was, change.now))
    if not was and not now:
        return ""
    return f"was {was or 'not set'}, is {now or 'not set'}"


def _troubles(view: JobView) -> list[str]:
    found: list[str] = []
    conditions = {each.type: each for each in view.conditions}
    target = conditions.get("FailureTarget")
    if view.phase == "Stopping" and target is not None:
        found.append(f"{target.message} Its workers save and leave, then it fails.")
    if view.stale and view.written_seconds_ago is not None:
        found.append(
            f"What is shown is {view.written_seconds_ago:.0f} s old: the operator does not write. Look at it: "
            "kubectl get pods -A -l app.kubernetes.io/name=trainium-operator (training goes on without it)"
        )
    pods = conditions.get("PodsReady")
    if not view.ended and pods is not None and pods.status == "False" and pods.reason in _WAITING:
        found.append(pods.message)
    admitted = conditions.get("Admitted")
    if not view.ended and admitted is not None and admitted.status == "False" and view.phase == "Pending":
        found.append(admitted.message)
    for kind in ("SizeLegal", "CheckpointHealthy", "NodesHealthy"):
        if kind in conditions and conditions[kind].status == "False":
            # What the store itself answered says more than that nothing was committed in time.
            notice = view.checkpoints.notice if kind == "CheckpointHealthy" else ""
            found.append(notice or _told(conditions[kind]))
    resizing = conditions.get("Resizing")
    if not view.ended and resizing is not None and resizing.reason == "CapacityMissing":
        found.append(f"It grows back by itself; to stop waiting: kubectl trn scale {view.name} {view.size}")
    return [sentence for sentence in found if sentence]


def _told(condition: ConditionView) -> str:
    return condition.message or f"{condition.type} is {condition.status}: {condition.reason}"
