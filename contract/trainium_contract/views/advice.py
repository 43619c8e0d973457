"""Advise the reader of a job: what its state needs from a person, and how to run a failed job again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainium_contract.views.job_view import ChangeView, ConditionView, JobView

_MAX_CHANGES = 6
_WAITING = {"Unschedulable", "WorkerNotStarting", "NameTaken", "CreationRefused"}


def advise(view: JobView) -> tuple[str, ...]:
    """Return sentences, each with an action for the reader."""
    if view.managed_by:
        return (f"{view.managed_by} controls this job (spec.managedBy), and the operator leaves it alone: look there.",)
    if not view.phase:
        return (
            (
                "No operator has answered this job yet. If that lasts for more than a minute, it does not run, or does "
                f"not watch namespace {view.namespace} (its setting watchNamespaces): "
                "kubectl get pods -A -l app.kubernetes.io/name=trainium-operator"
            ),
        )
    if view.phase == "Failed":
        return (
            f"{view.verdict or 'The job failed; it gave no verdict.'}",
            f"What led to it: kubectl trn why {view.name}",
            advise_retry(view),
        )
    if view.phase == "Terminating":
        return tuple(
            {_describe_condition(condition): None for condition in view.conditions if condition.reason == "Terminating"}
        )
    advice = list(_list_problems(view))
    if view.phase == "Suspended":
        advice.append(f"It waits for you: kubectl trn resume {view.name}")
    return tuple(advice)


def advise_retry(view: JobView) -> str:
    """Explain how to run a failed job again, unchanged or corrected, and what was already changed."""
    saved = view.checkpoints.durable_step
    start = "from the beginning (storage has no checkpoint)" if saved is None else f"from step {saved}"
    if not view.has_known_checkpoints:
        start = "from where its program begins (spec.program.checkpoints is not given)"
    file = f"kubectl trn retry {view.name} -f FILE"
    if view.changes:
        return (
            f"Changed since the failure: {_format_changes(view.changes)}. The change applies at the next run. To run "
            f"it again {start}: kubectl trn retry {view.name}. To change more, correct its file: {file}"
        )
    same = "" if view.changes is None else "Nothing has changed since the failure. "
    return f"{same}To run it again {start}: kubectl trn retry {view.name}. To change the job, correct its file: {file}"


def _format_changes(changes: tuple[ChangeView, ...]) -> str:
    shown = [
        f"{change.field} ({_format_change(change)})" if _format_change(change) else change.field
        for change in changes[:_MAX_CHANGES]
    ]
    more = len(changes) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _format_change(change: ChangeView) -> str:
    """Describe the change of a field; a digest alone is meaningless to a person."""
    was, now = (value.partition("#")[0] if value.startswith("#") else value for value in (change.was, change.now))
    if not was and not now:
        return ""
    return f"was {was or 'not set'}, is {now or 'not set'}"


def _list_problems(view: JobView) -> list[str]:
    problems: list[str] = []
    conditions = {condition.type: condition for condition in view.conditions}
    target = conditions.get("FailureTarget")
    if view.phase == "Stopping" and target is not None:
        problems.append(f"{target.message} Its workers save and leave, then it fails.")
    if view.stale and view.written_seconds_ago is not None:
        problems.append(
            "The operator does not write: what is shown is old, and the job may have stopped. Check that it runs, "
            f"and that its setting watchNamespaces includes {view.namespace}: "
            "kubectl get pods -A -l app.kubernetes.io/name=trainium-operator (healthy workers train on without it)"
        )
    pods = conditions.get("PodsReady")
    if not view.ended and pods is not None and pods.status == "False" and pods.reason in _WAITING:
        problems.append(pods.message)
    admitted = conditions.get("Admitted")
    if not view.ended and admitted is not None and admitted.status == "False" and view.phase == "Pending":
        # One refusal is the reason of both conditions.
        problems += [] if any(admitted.message in problem for problem in problems) else [admitted.message]
    for kind in (
        "SizeLegal",
        "ProgressReported",
        "CheckpointHealthy",
        "NodesHealthy",
        "RolesReady",
        "Reconciled",
        "NetworkPolicyApplied",
    ):
        is_held = kind == "RolesReady" and conditions.get(kind) and not conditions[kind].message
        if kind in conditions and conditions[kind].status == "False" and not is_held:
            # The store's own error is more specific than "nothing was committed in time".
            notice = view.checkpoints.notice if kind == "CheckpointHealthy" else ""
            problems.append(notice or _describe_condition(conditions[kind]))
    resizing = conditions.get("Resizing")
    if not view.ended and resizing is not None and resizing.reason == "CapacityMissing":
        problems.append(f"It grows back by itself; to stop waiting: kubectl trn scale {view.name} {view.size}")
    if not problems and view.is_waiting_stale and view.written_seconds_ago is not None:
        problems.append(
            f"Its status has not changed for {view.written_seconds_ago:.0f} s. If it should have, check that the "
            f"operator runs, and that its setting watchNamespaces includes {view.namespace}: "
            "kubectl get pods -A -l app.kubernetes.io/name=trainium-operator"
        )
    return [sentence for sentence in problems if sentence]


def _describe_condition(condition: ConditionView) -> str:
    return condition.message or f"{condition.type} is {condition.status}: {condition.reason}"
