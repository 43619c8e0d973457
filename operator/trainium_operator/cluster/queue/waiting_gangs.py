"""Track which jobs wait for nodes as whole gangs. A scheduler preempts no extra for a gang, so extras must yield.

For a single pod the scheduler itself preempts an extra. The record is updated by changes only, so a query costs nothing
while no gang waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_operator.cluster.cache.reflector import Lister, Reflector
    from trainium_operator.cluster.cache.store import Entry, Key
    from trainium_operator.cluster.cache.views import JobRecord
    from trainium_operator.plan.model.observed import JobView, PodView


class WaitingGangs:
    """Pods of gangs that no node was found for, by job."""

    def __init__(self, jobs: Lister[JobRecord], pods: Reflector[PodView], *, wake: Callable[[Key], None]) -> None:
        """`wake(key)` enqueues a job that holds extras when the waiting gangs change."""
        self._jobs = jobs
        self._waiting: dict[Key, set[Key]] = {}
        """Job -> its waiting pods."""
        self._wake = wake
        pods.store.listen(self._handle_pod_change)

    def count_wanted_nodes(self, job: JobView) -> int:
        """Return the number of this job's kind of nodes for which gangs of other jobs wait."""
        wanted = 0
        for key, pods in self._waiting.items():
            record = self._jobs.store.get(key)
            other = record.view if record is not None else None
            if other is None or other.uid == job.uid:
                continue
            if other.spec.workers.accelerator == job.spec.workers.accelerator:
                wanted += len(pods)
        return wanted

    def _handle_pod_change(self, key: Key, old: Entry[PodView] | None, new: Entry[PodView] | None) -> None:
        entry = new or old
        if entry is None or entry.owner is None:
            return
        job = (entry.owner.namespace, entry.owner.name)
        waits = new is not None and _waits(new.view)
        waited = key in self._waiting.get(job, ())
        if waits is waited:
            return
        if waits:
            self._waiting.setdefault(job, set()).add(key)
        else:
            self._waiting[job].discard(key)
            if not self._waiting[job]:
                del self._waiting[job]
        for other, record in self._jobs.store.snapshot().items():
            view = record.view.view
            if other != job and view is not None and view.status.idle_nodes.wanted:
                self._wake(other)


def _waits(pod: PodView) -> bool:
    return bool(pod.gang and pod.unschedulable_message) and not pod.node and not pod.deleting and not pod.extra
