"""Keep the desired, reserve and spare worker pods and extras, and the configuration that they mount.

How creation survives a crash: the status raises `nextPodOrdinal` first, then the pods below it are created. Ordinals
whose creation was interrupted are skipped and never reused; a pod whose creation was not noticed is at worst one too
many, and is deleted.

Guarantees:
- The ConfigMap with the trainer's configuration exists before the pods that mount it, and is never stale; parts that
  a newer version wrote are left as they are.
- Members are never surplus.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainium_contract.faults.causes import Cause
from trainium_contract.faults.classify import budget_of, suspects_node
from trainium_contract.faults.responses import Response
from trainium_contract.wire.messages import WorkerPhase
from trainium_operator.plan.diagnose.failure_policy import START_ATTEMPTS, start_failures
from trainium_operator.plan.diagnose.losses import members_to_move
from trainium_operator.plan.faults import failure_budgets
from trainium_operator.plan.faults.ends import classify_pod_failure, died_by_itself, meaning_of_failure
from trainium_operator.plan.manifests.config_maps import config_map
from trainium_operator.plan.manifests.worker_pod import Avoided, is_outdated, template_hash, with_affinity, worker_pods
from trainium_operator.plan.model import names
from trainium_operator.plan.model.actions import ApplyObject, CreatePod, PolicyResult, event
from trainium_operator.plan.model.observed import PodPhase, PodView
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.pods.node_avoidance import forbidden_nodes, released_nodes
from trainium_operator.plan.pods.refused_pods import limit_batch, next_creation_at, record_start_failures, with_refusing
from trainium_operator.plan.view.facts import Facts, is_unfit, refuse_pods
from trainium_operator.plan.view.progress import is_settled
from trainium_operator.plan.view.workers import Worker, deletion, ended_last

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus
    from trainium_contract.status.internal import FailureRecord, InternalStatus
    from trainium_contract.status.public import PublicStatus
    from trainium_operator.plan.diagnose.loss import Loss
    from trainium_operator.plan.model.actions import Action, DeletePod, EventIntent

_NUMBER = re.compile(r"\d+")


def reconcile_configuration(facts: Facts, status: TrainingJobStatus) -> PolicyResult:
    """Apply the configuration where it is missing or stale."""
    if facts.now < facts.observed.creations_from:
        return PolicyResult(status=status, requeue_at=(facts.observed.creations_from,))
    if facts.size.shape is None:
        return PolicyResult(status=status)
    manifest = config_map(facts.job, facts.observed.ca_bundle)
    metadata = manifest["metadata"]
    wanted = metadata["annotations"][names.ANNOTATION_CONTENT_HASH]
    present = facts.observed.children.get(f"{manifest['kind']}/{metadata['name']}")
    if present == wanted or (present is not None and facts.job.unknown):
        return PolicyResult(status=status)
    return PolicyResult(status=status, actions=(ApplyObject(manifest),))


def reconcile_pods(facts: Facts, status: TrainingJobStatus, losses: tuple[Loss, ...]) -> PolicyResult:
    """Delete and create pods until they match what is wanted."""
    answer = _converged(facts, status, losses)
    deleted = (*facts.outsiders, *(loss.worker for loss in losses if loss.worker is not None))
    return replace(answer, actions=ended_last(answer.actions, deleted))


def _converged(facts: Facts, status: TrainingJobStatus, losses: tuple[Loss, ...]) -> PolicyResult:
    lost = {loss.member.pod_uid for loss in losses}
    deletions: list[DeletePod] = []
    for loss in losses:
        if loss.worker is not None and not loss.stays:
            deletions += deletion(loss.worker, force=loss.force)
    outsiders, answer = _sort_outsiders(facts, status)
    answer = PolicyResult(status=status, actions=tuple(deletions)).then(answer)
    status = answer.status.replaced(start_failures=record_start_failures(facts, answer.status))
    # Failures that this very plan has counted: their nodes must not get the replacements.
    avoid = failure_budgets.avoided_nodes(status.failures, facts.now, facts.settings.avoid_node_seconds)
    status = status.replaced(avoided_nodes=with_refusing(avoid, status, facts.now))
    # Members that a smaller generation leaves out still count: they become its spares, or surplus once it trains.
    staying = len(facts.member_uids - lost)
    moving = sum(member.pod_uid not in lost for member, _ in members_to_move(facts))
    beyond = _extras_of(facts, status)
    wanted = status.desired - status.idle_nodes.taken + _spares_of(facts) + moving
    extras = sum(worker.pod.extra for worker in outsiders) + sum(
        worker is not None and worker.pod.extra for member, worker in facts.members if member.pod_uid not in lost
    )
    # An extra more than is wanted stands for a worker that was asked for.
    others = staying + len(outsiders) - min(extras, beyond)
    missing, more = max(0, wanted - others), max(0, beyond - extras)
    if missing + more > 0:
        return answer.then(_create(facts, status, missing, more))
    surplus = _surplus(facts, status, outsiders, others - wanted)
    return answer.then(PolicyResult(status=status, actions=surplus))


def _is_left(facts: Facts, status: PublicStatus) -> bool:
    """Return whether the generation in force is about to be left."""
    return facts.current is not None and status.membership.generation > facts.current.generation


def _sort_outsiders(facts: Facts, status: TrainingJobStatus) -> tuple[list[Worker], PolicyResult]:
    """Return outsiders that count; the others are deleted, except the evidence of workers that do not start."""
    evidence = _kept_for_logs(facts)
    usable: list[Worker] = []
    deletions: list[DeletePod] = []
    events: list[EventIntent] = []
    wanted = template_hash(facts.job, facts.settings) if facts.outsiders else ""
    released = released_nodes(facts)
    for worker in facts.outsiders:
        if worker in evidence:
            continue
        outdated = (not facts.job.unknown and _outdated(worker, wanted)) or _cannot_be_scheduled(worker, released)
        if (
            worker.alive
            and not outdated
            and not any(each.is_misplaced(facts, status, worker) for each in facts.settings.features)
        ):
            if not is_unfit(facts, worker):
                usable.append(worker)
            elif _has_left(facts, status, worker):
                deletions += deletion(worker)
            continue
        failure = _failure_of(facts, status, worker)
        if failure is not None:
            if failure.node or not worker.pod.extra:  # a job does not end for want of what it need not have
                status = status.replaced(failures=_counted(facts, status, failure))
            events.append(
                event(Reason.WORKER_FAILED, failure.note, warning=True, pod=worker.pod.name, series=failure.series)
            )
            if failure_budgets.exhausted_budget(status.failures, facts.job.spec.recovery, facts.now) is not None:
                continue  # the next plan ends the job and names this pod, and its log states why
        deletions += deletion(worker, force=worker.node_bad and (worker.pod.deleting or worker.holds_node))
    return usable, PolicyResult(status=status, actions=tuple(deletions), events=tuple(events))


def _kept_for_logs(facts: Facts) -> tuple[Worker, ...]:
    """Return the newest workers that failed before any step, but none that keeps the next attempt from a node."""
    failed = start_failures(facts)[-START_ATTEMPTS:]
    if any(worker.pod.unschedulable_message for worker in facts.outsiders):
        return tuple(worker for worker in failed if not worker.holds_node)
    return failed


def _has_left(facts: Facts, status: PublicStatus, worker: Worker) -> bool:
    """Return whether an outsider on a bad node runs no process of a generation any more, or never did."""
    beat = worker.heartbeat
    idle = beat is None or beat.phase is WorkerPhase.STANDBY
    return idle or facts.current is None or (is_settled(facts) and not _is_left(facts, status))


def _outdated(worker: Worker, wanted: str) -> bool:
    """Return whether it never ran and has another template: a corrected image or selector must reach it."""
    pod = worker.pod
    return pod.phase is PodPhase.PENDING and worker.agent is None and is_outdated(pod.template_hash, wanted)


def _cannot_be_scheduled(worker: Worker, released: frozenset[str]) -> bool:
    """Return whether it finds no node, and excludes one that may be used again."""
    pod = worker.pod
    return pod.phase is PodPhase.PENDING and bool(pod.unschedulable_message) and bool(pod.avoided_nodes & released)


@dataclass(frozen=True, slots=True)
class _Failure:
    """Failure of a worker that never became a member; it counts once, by the pod's name."""

    cause: Cause
    pod: str
    node: str
    """The node to keep away from; empty when none is to blame."""
    note: str
    series: str = ""
    """Failures of one series are one event with a count. Numbers in a message (ordinals, times) make no series."""


def _failure_of(facts: Facts, memory: InternalStatus, worker: Worker) -> _Failure | None:
    failed = worker.pod.phase is PodPhase.FAILED
    if not (failed or worker.gave_up) or failure_budgets.has_record_of(memory, worker.pod.name):
        return None
    if failed and _was_asked_to_go(facts, worker):
        return None
    return _ended(facts, worker) if failed else _unfit(facts, worker)


def _was_asked_to_go(facts: Facts, worker: Worker) -> bool:
    """Return whether it ended because a user or a plan deleted it, not because of a broken device."""
    pod = worker.pod
    return pod.deleting and classify_pod_failure(pod, facts.job.spec.recovery.rules).cause is not Cause.DEVICE


def _counted(facts: Facts, memory: InternalStatus, failure: _Failure) -> tuple[FailureRecord, ...]:
    recovery = facts.job.spec.recovery
    return failure_budgets.record_failure(
        memory.failures, at=facts.now, cause=failure.cause, pod=failure.pod, node=failure.node, recovery=recovery
    )


def _ended(facts: Facts, worker: Worker) -> _Failure:
    pod = worker.pod
    found = classify_pod_failure(pod, facts.job.spec.recovery.rules).cause
    blamed = pod.node if died_by_itself(pod) else ""
    kind, message = _how(pod, found)
    return _Failure(
        cause=found if budget_of(found) is None else Cause.POD_LOST,
        pod=pod.name,
        node=blamed,
        note=f"Pod {pod.name} on node {pod.node} ended before it could join{kind}: {message}",
        series=f"{blamed}{kind} {pod.init_exit_code} {_NUMBER.sub('0', message)}",
    )


def _how(pod: PodView, cause: Cause) -> tuple[str, str]:
    """Return the cause with its exit code, and the message; that of an init container has its code."""
    if pod.init_exit_code is not None:
        return "", pod.message
    code = "" if pod.exit_code is None else f", exit code {pod.exit_code}"
    return f" ({cause.value}{code})", pod.message or pod.reason


def _unfit(facts: Facts, worker: Worker) -> _Failure | None:
    """Its preflight failed."""
    pod, beat = worker.pod, worker.heartbeat
    if beat is None or beat.verdict is None:
        return None
    meaning = meaning_of_failure(beat, beat.verdict, facts.job.spec.recovery.rules)
    blamed = suspects_node(meaning.cause) and meaning.response is not Response.REPLACE_WORKER
    return _Failure(
        cause=meaning.cause,
        pod=pod.name,
        node=pod.node if blamed else "",
        note=(
            f"Pod {pod.name} on node {pod.node} is unfit (exit code {beat.verdict.exit_code}): {beat.verdict.message}"
        ),
    )


def _create(facts: Facts, status: TrainingJobStatus, missing: int, extras: int) -> PolicyResult:
    """Return so many workers that were asked for, and so many beyond them."""
    if refuse_pods(facts) is not None:
        return PolicyResult(status=status)
    paused = max(failure_budgets.backoff_until(status.failures, facts.now), next_creation_at(status, facts.now))
    allowed = max(paused, facts.observed.creations_from)
    if facts.now < allowed:
        return PolicyResult(status=status, requeue_at=(allowed,))
    missing, requeue_at = limit_batch(facts, status, missing)
    if missing + extras == 0:
        return PolicyResult(status=status, requeue_at=requeue_at)
    highest = max((worker.pod.ordinal for worker in facts.workers.values()), default=-1)
    planned = status.next_pod_ordinal
    first = max(planned if planned <= names.LAST_ORDINAL else 0, highest + 1)
    ordinals = range(first, first + missing + extras)
    status = status.replaced(next_pod_ordinal=ordinals.stop)
    avoided = Avoided(required=forbidden_nodes(facts, status), preferred=status.avoided_nodes)
    manifests = worker_pods(facts.job, facts.settings, ordinals, avoided, extras=extras)
    for feature in facts.settings.features:
        manifests = feature.place_pods(facts, manifests)
    manifests = [{**pod, "spec": with_affinity(pod["spec"], facts.job, facts.settings)} for pod in manifests]
    actions: tuple[Action, ...] = ()
    for feature in facts.settings.features:
        applied, manifests = feature.group_pods(facts, status, manifests)
        actions += applied
    return PolicyResult(status=status, actions=(*actions, *map(CreatePod, manifests)))


def _spares_of(facts: Facts) -> int:
    """Return how many pods to keep beside the desired size."""
    wanted = facts.size.reserve + facts.job.spec.workers.spares
    return wanted if facts.grant is None else min(wanted, facts.grant.spares)


def _extras_of(facts: Facts, status: PublicStatus) -> int:
    """Return how many extras to keep beside what was asked for."""
    wanted = status.idle_nodes.wanted
    return wanted if facts.grant is None else max(0, min(wanted, facts.grant.workers - facts.size.desired))


def _surplus(facts: Facts, status: PublicStatus, outsiders: list[Worker], surplus: int) -> tuple[DeletePod, ...]:
    """Return those that never ran go at once.

    Others only when the generation in force trains, so that none still saves.
    """
    steady = facts.current is None or (is_settled(facts) and not _is_left(facts, status))
    at_size = facts.current is None or len(facts.current.members) == status.desired

    def order(worker: Worker) -> tuple[bool, bool, bool, int]:
        return not worker.pod.extra, not worker.never_ran, worker.warm, -worker.pod.ordinal

    victims = sorted(outsiders, key=order)
    going = (worker for worker in victims[:surplus] if worker.never_ran or (steady and at_size))
    return tuple(action for worker in going for action in deletion(worker))
