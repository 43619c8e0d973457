"""Asking for the deletion of a worker pod."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_operator.plan.model.actions import DeletePod

if TYPE_CHECKING:
    from trainium_operator.plan.view.workers import Worker


def deletion(worker: Worker, *, force: bool = False) -> tuple[DeletePod, ...]:
    """The deletion of a pod, once; by force again when its node cannot confirm an earlier one."""
    if force:
        return (DeletePod(worker.pod.name, worker.pod.uid, 0),)
    return () if worker.pod.deleting else (DeletePod(worker.pod.name, worker.pod.uid, None),)
