"""Policy: keep desired + spares worker pods alive; remove what is lost, hopeless, outdated or too many.

How creation survives a crash: the status raises `nextPodOrdinal` first, then the pods below it are created. Ordinals
whose creation was cut short are skipped, never used again; a pod whose creation was not noticed is at worst one too
many, and goes. Members are never surplus.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.exit_codes import Cause, Response
from trainium_contract.messages import WorkerPhase
from trainium_operator.plan import names
from trainium_operator.plan.budgets import avoided_nodes, backoff_until, has_record_of, record_failure
from trainium_operator.plan.causes import budget_of, died_by_itself, meaning_of_failure, meaning_of_pod, suspects_node
from trainium_operator.plan.gang import create_pods, is_misplaced
from trainium_operator.plan.generation import is_settled
from trainium_operator.plan.model import DeletePod, PodPhase
from trainium_operator.plan.node_health import forbidden_nodes, members_to_move, released_nodes
from trainium_operator.plan.reasons import Reason
from trainium_operator.plan.troubles import is_unfit
from trainium_operator.plan.verdicts import START_ATTEMPTS, start_failures
from trainium_operator.plan.worker_pod import Avoided, template_hash, worker_pods

if TYPE_CHECKING:
    from trainium_operator.plan.facts import Draft, Facts
    from trainium_operator.plan.losses import Loss
    from trainium_operator.plan.workers import Worker


def converge_pods(facts: Facts, draft: Draft, losses: tuple[Loss, ...]) -> None:
    """Ask for the deletions and creations that bring the pods to what is wanted."""
    lost = {loss.member.pod_uid for loss in losses}
    for loss in losses:
        if loss.worker is not None and not loss.stays:
            delete(draft, loss.worker, force=loss.force)
    outsiders = _usable_outsiders(facts, draft)
    # Failures that this very plan has counted: their nodes must not get the replacements.
    avoid = avoided_nodes(draft.status.failures, facts.now, facts.settings.avoid_node_seconds)
    draft.update(avoided_nodes=avoid)
    # Members that a smaller generation leaves out still count: they become its spares, or surplus once it trains.
    staying = len(facts.member_uids - lost)
    moving = sum(member.pod_uid not in lost for member, _ in members_to_move(facts))
    wanted = draft.status.desired + facts.job.spec.workers.spares + moving
    missing = wanted - staying - len(outsiders)
    if missing > 0:
        _create(facts, draft, missing)
    elif missing < 0:
        _remove_surplus(facts, draft, outsiders, -missing)


def delete(draft: Draft, worker: Worker, *, force: bool = False) -> None:
    """Ask for the deletion of a pod, once; by force again when its node cannot confirm an earlier one."""
    if force:
        draft.actions.append(DeletePod(worker.pod.name, worker.pod.uid, 0))
    elif not worker.pod.deleting:
        draft.actions.append(DeletePod(worker.pod.name, worker.pod.uid, None))


def _is_left(facts: Facts, draft: Draft) -> bool:
    """Whether the generation in force is about to be left."""
    return facts.current is not None and draft.status.membership.generation > facts.current.generation


def _usable_outsiders(facts: Facts, draft: Draft) -> list[Worker]:
    """Outsiders that count; the others are deleted, except the evidence of workers that do not start."""
    evidence = start_failures(facts)[-START_ATTEMPTS:]
    usable: list[Worker] = []
    wanted = template_hash(facts.job, facts.settings) if facts.outsiders else ""
    released = released_nodes(facts)
    for worker in facts.outsiders:
        if worker in evidence:
            continue
        outdated = _outdated(worker, wanted) or _waits_in_vain(worker, released)
        if worker.alive and not outdated and not is_misplaced(facts, draft, worker):
            if not is_unfit(facts, worker):
                usable.append(worker)
            elif _has_left(facts, draft, worker):
                delete(draft, worker)
            continue
        if worker.pod.phase is PodPhase.FAILED:
            _count(facts, draft, worker)
        elif worker.gave_up:
            _count_unfit(facts, draft, worker)
        delete(draft, worker, force=worker.node_bad and (worker.pod.deleting or not worker.ended))
    return usable


def _has_left(facts: Facts, draft: Draft, worker: Worker) -> bool:
    """Whether an outsider on a bad node runs no process of a generation any more, or never did."""
    beat = worker.heartbeat
    idle = beat is None or beat.phase is WorkerPhase.STANDBY
    return idle or facts.current is None or (is_settled(facts) and not _is_left(facts, draft))


def _outdated(worker: Worker, wanted: str) -> bool:
    """It never ran and was made from another template: a corrected image or node selector must reach it."""
    pod = worker.pod
    return pod.phase is PodPhase.PENDING and worker.agent is None and pod.template_hash not in ("", wanted)


def _waits_in_vain(worker: Worker, released: frozenset[str]) -> bool:
    """It finds no node, and was told to keep away from one that may be used again."""
    pod = worker.pod
    return pod.phase is PodPhase.PENDING and bool(pod.unschedulable_message) and bool(pod.kept_from & released)


def _count(facts: Facts, draft: Draft, worker: Worker) -> None:
    """Count the failure of a worker that never became a member, once by its name."""
    if has_record_of(draft.status, worker.pod.name):
        return
    meaning = meaning_of_pod(worker.pod, facts.job.spec.recovery.rules)
    found = meaning.cause
    cause = found if budget_of(found) is None else Cause.POD_LOST
    draft.update(
        failures=record_failure(
            draft.status.failures,
            at=facts.now,
            cause=cause,
            pod=worker.pod.name,
            node=worker.pod.node if died_by_itself(worker.pod) else "",
            recovery=facts.job.spec.recovery,
        )
    )
    draft.note(
        Reason.WORKER_FAILED,
        f"Pod {worker.pod.name} on node {worker.pod.node} ended before it could join "
        f"({found.value}, exit code {worker.pod.exit_code}): {worker.pod.message or worker.pod.reason}",
        warning=True,
        pod=worker.pod.name,
    )


def _count_unfit(facts: Facts, draft: Draft, worker: Worker) -> None:
    """Count a worker whose preflight failed, once by its name, and keep away from its node if that is to blame."""
    assert worker.heartbeat is not None
    beat = worker.heartbeat
    failure = beat.verdict
    if failure is None or has_record_of(draft.status, worker.pod.name):
        return
    meaning = meaning_of_failure(beat, failure, facts.job.spec.recovery.rules)
    cause = meaning.cause
    node = worker.pod.node if suspects_node(cause) and meaning.response is not Response.REPLACE_WORKER else ""
    draft.update(
        failures=record_failure(
            draft.status.failures,
            at=facts.now,
            cause=cause,
            pod=worker.pod.name,
            node=node,
            recovery=facts.job.spec.recovery,
        )
    )
    draft.note(
        Reason.WORKER_FAILED,
        f"Pod {worker.pod.name} on node {worker.pod.node} is unfit (exit code {failure.exit_code}): {failure.message}",
        warning=True,
        pod=worker.pod.name,
    )


def _create(facts: Facts, draft: Draft, missing: int) -> None:
    allowed = max(backoff_until(draft.status.failures, facts.now), facts.observed.creations_from)
    if facts.now < allowed:
        draft.deadlines.append(allowed)
        return
    highest = max((worker.pod.ordinal for worker in facts.workers.values()), default=-1)
    planned = draft.status.next_pod_ordinal
    first = max(planned if planned <= names.LAST_ORDINAL else 0, highest + 1)
    draft.update(next_pod_ordinal=first + missing)
    ordinals = range(first, first + missing)
    avoided = Avoided(required=forbidden_nodes(facts, draft), preferred=draft.status.avoided_nodes)
    create_pods(facts, draft, worker_pods(facts.job, facts.settings, ordinals, avoided))


def _remove_surplus(facts: Facts, draft: Draft, outsiders: list[Worker], surplus: int) -> None:
    """Those that never ran go at once; others only when the generation in force trains, so that none still saves."""
    steady = facts.current is None or (is_settled(facts) and not _is_left(facts, draft))
    at_size = facts.current is None or len(facts.current.members) == draft.status.desired
    victims = sorted(outsiders, key=lambda worker: (not worker.never_ran, worker.warm, -worker.pod.ordinal))
    for worker in victims[:surplus]:
        if worker.never_ran or (steady and at_size):
            delete(draft, worker)
