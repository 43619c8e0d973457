"""Policy: pods of a job with a queue take the places that Kueue admitted: so many workers, so many spares.

A place is of a pod set, and gives its pod that set's flavor. Workers' places are filled first; a replacement that is
made before the pod it replaces has left is for a moment one beyond them, and takes the flavor of the workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_operator.plan.manifests.placement import placed
from trainium_operator.plan.model.quota import SPARES, WORKERS

if TYPE_CHECKING:
    from typing import Any

    from trainium_contract.status.public import PublicStatus
    from trainium_operator.plan.view.facts import Facts


def spares_of(facts: Facts) -> int:
    """Pods to keep beside the desired size."""
    wanted = facts.size.reserve + facts.job.spec.workers.spares
    return wanted if facts.grant is None else min(wanted, facts.grant.spares)


def extras_of(facts: Facts, status: PublicStatus) -> int:
    """Extras to keep beside what was asked for."""
    wanted = status.idle_nodes.wanted
    return wanted if facts.grant is None else max(0, min(wanted, facts.grant.workers - facts.size.desired))


def in_places(facts: Facts, manifests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The new pods, each for a place that is free."""
    grant = facts.grant
    if grant is None:
        return manifests
    alive = [worker.pod.pod_set for worker in facts.workers.values() if worker.alive]
    spares = max(0, grant.spares - alive.count(SPARES))
    workers = max(0, grant.workers - (len(alive) - alive.count(SPARES)))
    sets = [WORKERS if at < workers or at >= workers + spares else SPARES for at in range(len(manifests))]
    return [
        placed(pod, grant.placement(name), pod_set=name, workload=grant.workload)
        for pod, name in zip(manifests, sets, strict=True)
    ]
