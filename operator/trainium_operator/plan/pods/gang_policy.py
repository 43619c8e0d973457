"""Policy: all workers start or none. Until the first step of a run nobody should hold nodes that do not suffice.

Where the cluster serves a gang API, the pods that a job starts with are one group of it; a running job's newcomers are
not: those they join hold their nodes already, and a group's least number could hold a single newcomer back for ever.
With a queue nothing of this begins before Kueue has admitted the job (`quota/`).

In any case a time-out is the net below: workers that hold nodes, but too few for any legal size, give them back after
`gangTimeoutSeconds`, and new ones are made after a pause that grows and differs from job to job, so that two jobs that
hold one half each do not meet again. An elastic job whose workers suffice for a smaller size never gives them back: it
begins at that size after `rescaleAfterSeconds` (`first_generation`), so the two limits never compete. Spares do not
count.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

from trainium_contract.spec.scheduling import Gang
from trainium_contract.status.conditions import ConditionType
from trainium_operator.plan.manifests.affinity import with_affinity
from trainium_operator.plan.manifests.gang_groups import group_object, mark
from trainium_operator.plan.model.actions import Answer, ApplyGroup, CreatePod, event
from trainium_operator.plan.model.conditions import with_condition
from trainium_operator.plan.model.observed import GangApi, PodPhase
from trainium_operator.plan.model.optional_api import ApiState
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.model.text import rfc3339
from trainium_operator.plan.pods.deletion import deletion
from trainium_operator.plan.pods.device_claims import cannot_claim
from trainium_operator.plan.view.facts import creation_refused
from trainium_operator.plan.view.grant import Stand
from trainium_operator.plan.view.quota_sizes import needed_workers

if TYPE_CHECKING:
    from typing import Any

    from trainium_contract.job import TrainingJobStatus
    from trainium_contract.status.internal import GangStatus
    from trainium_contract.status.public import PublicStatus
    from trainium_operator.plan.view.facts import Facts
    from trainium_operator.plan.view.workers import Worker

_FIRST_PAUSE_SECONDS = 30.0
_LONGEST_PAUSE_SECONDS = 600.0
_BY_SPEC = {
    Gang.NATIVE: (GangApi.SCHEDULING_GROUP, GangApi.WORKLOAD_REF),
    Gang.COSCHEDULING: (GangApi.COSCHEDULING,),
    Gang.AUTO: (GangApi.SCHEDULING_GROUP, GangApi.WORKLOAD_REF, GangApi.COSCHEDULING),
    Gang.NONE: (),
}


def gang_api(facts: Facts) -> GangApi:
    """Who sees to it that all workers of this job start together."""
    served = facts.settings.gang_apis
    return next((api for api in _BY_SPEC[facts.job.spec.scheduling.gang] if api in served), GangApi.NONE)


def least_pods(facts: Facts) -> int:
    """The smallest size that the job may begin at; spares are not part of it. 0 when there is none."""
    return needed_workers(facts.size)


def withhold_pods(facts: Facts, status: TrainingJobStatus) -> tuple[bool, Answer]:
    """Whether no pod may be made now; gives back what a partial gang has held for too long."""
    gang = status.gang
    if facts.grant is not None and facts.grant.stand is not Stand.ADMITTED:
        return True, Answer(status=status)
    if status.membership.size > 0:
        gang = gang.replaced(holding_since=None, releases=0, retry_at=None)
        return False, Answer(status=status.replaced(gang=gang))
    if gang.retry_at is not None and facts.now < gang.retry_at:
        return True, _give_back(facts, status, gang.retry_at)
    if not _is_partial(facts):
        return False, Answer(status=status.replaced(gang=gang.replaced(holding_since=None)))
    since = facts.now if gang.holding_since is None else gang.holding_since
    deadline = since + facts.job.spec.scheduling.gang_timeout_seconds
    if facts.now < deadline:
        return False, Answer(status=status.replaced(gang=gang.replaced(holding_since=since)), looks=(deadline,))
    times = gang.releases + 1
    retry_at = facts.now + pause_seconds(facts.job.uid, times)
    gang = gang.replaced(holding_since=None, releases=times, retry_at=retry_at)
    given = _give_back(facts, status.replaced(gang=gang), retry_at)
    return True, replace(given, notes=(event(Reason.GANG_TIMED_OUT, _timed_out(facts, gang), warning=True),))


def pause_seconds(uid: str, times: int) -> float:
    """How long a job waits after it gave its nodes back for the n-th time; spread by its uid, the same each time."""
    spread = int(hashlib.sha256(f"{uid}/{times}".encode()).hexdigest()[:8], 16) / 0xFFFFFFFF
    return min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0 ** min(times - 1, 16)) * (0.5 + spread)


def create_pods(facts: Facts, status: TrainingJobStatus, manifests: list[dict[str, Any]]) -> Answer:
    """Ask for these pods, near each other and marked for their gang, and for the gang's object before them."""
    api = gang_api(facts)
    near = [{**pod, "spec": with_affinity(pod["spec"], facts.job, facts.settings)} for pod in manifests]
    group = _group(facts) if status.membership.size == 0 else None
    if group is None:
        return Answer(status=status, actions=tuple(map(CreatePod, near)))
    marked = (mark(pod, api, group["metadata"]["name"]) for pod in near)
    return Answer(status=status, actions=(ApplyGroup(group), *map(CreatePod, marked)))


def waits_as_gang(facts: Facts, status: PublicStatus) -> bool:
    """Whether no pod that is made now gets a node before all of its group are there."""
    return status.membership.size == 0 and _group(facts) is not None


def is_misplaced(facts: Facts, status: PublicStatus, worker: Worker) -> bool:
    """Whether a pod without a node waits in a group that can no longer bring it onto one."""
    pod = worker.pod
    if not pod.gang or pod.node or pod.phase is not PodPhase.PENDING or worker.agent is not None:
        return False
    group = _group(facts) if status.membership.size == 0 else None
    return group is None or pod.gang != group["metadata"]["name"]


def note_admission(facts: Facts, status: TrainingJobStatus) -> TrainingJobStatus:
    """Say whether the workers have their nodes, and who decides it. Never how many: that changes with each pod."""
    admitted, reason, message = _admission(facts, status)
    return with_condition(status, ConditionType.ADMITTED, admitted, reason, message, now=facts.now)


def _admission(facts: Facts, status: TrainingJobStatus) -> tuple[bool, Reason, str]:
    gang, grant = status.gang, facts.grant
    if grant is not None and not facts.job.spec.suspend and grant.releases:
        reason = Reason.EVICTED if grant.stand is Stand.EVICTED else Reason.WAITING_FOR_QUEUE
        leaving = f"; {len(facts.workers)} workers save and leave" if facts.workers else ""
        return False, reason, f"{grant.message}{leaving}"
    bound = len(_bound(facts))
    if status.membership.size > 0 or (not facts.job.spec.suspend and 0 < status.desired <= bound):
        return True, Reason.ADMITTED, "the workers have their nodes"
    if facts.job.spec.suspend:
        return False, Reason.SUSPENDED, ""
    if (missing := creation_refused(facts) or cannot_claim(facts)) is not None:
        return False, *missing
    if gang.retry_at is not None and facts.now < gang.retry_at:
        return False, Reason.GANG_TIMED_OUT, _timed_out(facts, gang)
    if grant is not None and grant.stand is Stand.UNKNOWN:
        absent = facts.settings.kueue in (ApiState.OFF, ApiState.ABSENT)
        return False, Reason.GANG_API_MISSING if absent else Reason.WAITING_FOR_QUEUE, grant.message
    return False, Reason.WAITING_FOR_GANG, _waiting(facts, gang_api(facts))


def _waiting(facts: Facts, api: GangApi) -> str:
    wanted = facts.job.spec.scheduling.gang
    limit = facts.job.spec.scheduling.gang_timeout_seconds
    how = "" if api is GangApi.NONE else f" (they wait as a gang, {api.value})"
    if wanted in (Gang.NATIVE, Gang.COSCHEDULING) and api is GangApi.NONE:
        how = f" (this cluster does not serve the gang API that was asked for, {wanted.value})"
    return f"not all workers have a node{how}; if after {limit} s too few have one to begin, they give them back"


def _timed_out(facts: Facts, gang: GangStatus) -> str:
    limit = facts.job.spec.scheduling.gang_timeout_seconds
    return (
        f"Too few workers for any size that the job may begin at held nodes for {limit} s; they were given back "
        f"({gang.releases} times since it last trained). The next attempt begins at {rfc3339(gang.retry_at or 0.0)}. "
        "Free or add nodes, lower spec.workers.minReplicas, or raise spec.scheduling.gangTimeoutSeconds."
    )


def _group(facts: Facts) -> dict[str, Any] | None:
    api, least = gang_api(facts), least_pods(facts)
    version = facts.settings.gang_apis.get(api, "")
    return group_object(facts.job, api, version, least) if version and least > 1 else None


def _bound(facts: Facts) -> list[Worker]:
    return [worker for worker in facts.workers.values() if worker.alive and worker.pod.node]


def _is_partial(facts: Facts) -> bool:
    """Some workers hold nodes, and they are too few to begin with."""
    bound = len(_bound(facts))
    return 0 < bound < least_pods(facts)


def _give_back(facts: Facts, status: TrainingJobStatus, retry_at: float) -> Answer:
    """Delete every worker that holds a node or could; the wait for missing ones begins anew with the next attempt."""
    workers = (worker for worker in facts.workers.values() if worker.holds_node)
    deletions = tuple(action for worker in workers for action in deletion(worker, force=worker.node_bad))
    return Answer(status=status.replaced(waiting_since=None), actions=deletions, looks=(retry_at,))
