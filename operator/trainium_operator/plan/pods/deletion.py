"""Asking for the deletion of a worker pod, and when among the other writes of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_operator.plan.model.actions import DeletePod

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trainium_operator.plan.model.actions import Action
    from trainium_operator.plan.view.workers import Worker


def deletion(worker: Worker, *, force: bool = False) -> tuple[DeletePod, ...]:
    """The deletion of a pod, once; by force again when its node cannot confirm an earlier one."""
    if force:
        return (DeletePod(worker.pod.name, worker.pod.uid, 0),)
    return () if worker.pod.deleting else (DeletePod(worker.pod.name, worker.pod.uid, None),)


def ended_last(actions: tuple[Action, ...], workers: Iterable[Worker]) -> tuple[Action, ...]:
    """The same actions, the deletions of pods that have ended behind all others.

    Such a pod holds no device, so nothing waits for its deletion: where a whole gang has failed, new pods come first.
    """
    ended = {worker.pod.uid for worker in workers if not worker.holds_node}
    return tuple(sorted(actions, key=lambda each: isinstance(each, DeletePod) and each.uid in ended))
