"""Find the members that failed, why and since when, and when to look again.

A silent member has failed only when something else reports so too. The witnesses are the members that still report:
they wait for the silent one, they lost a peer, or they have made no step for longer than their steps take. Its node may
also report it, by not being ready, and the port of its agent, by refusing connections (`coordinator.probe`), which is
certain enough not to wait for the time-out. When every member is silent at once the fault is more likely on this side,
and only nodes and ports count.

A member that answers but does not join its generation counts as hung after the limit of a start. A member on a bad node
hands its rank over while it still answers, as soon as another worker is warm. Members on nodes that are about to leave
train on until another worker can replace them, the wait for capacity is over, or the notice nearly is.

Guarantees:
- A failure is derived from what is there, so it survives a restart of the operator.
- A worker that restarts its processes in place has not failed; no node is blamed for a user's error.
- A failure is never dated later than the silence begins; silence is measured by the operator's clock.
- Only members that have joined accuse one that has not, by the time since the operator first saw them wait.
- While the fleet is frozen (`FleetView.frozen`) no problem of a node counts for more than a preference.
- While a member has failed or the generation does not train, no notice is acted on before its last moment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from trainium_contract.exit_codes import ExitCode
from trainium_contract.faults.causes import Cause
from trainium_contract.faults.classify import find_output_line, find_runtime_status, severity
from trainium_contract.faults.node_polarity import Severity
from trainium_contract.faults.responses import Response
from trainium_contract.status.conditions import Phase
from trainium_contract.wire.messages import HeartbeatRequest, Member, ProcessFailure, WorkerPhase
from trainium_operator.plan.diagnose.loss import Loss
from trainium_operator.plan.diagnose.process_failures import accused, given_up_with, reported
from trainium_operator.plan.diagnose.stragglers import slowest_to_hand_over
from trainium_operator.plan.faults.ends import cause_of_leaving, classify_pod_failure
from trainium_operator.plan.model.actions import EventIntent, event
from trainium_operator.plan.model.observed import SILENCE_REPORTED_SECONDS, PodPhase
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.model.text import listed
from trainium_operator.plan.view.facts import Facts, list_joiners
from trainium_operator.plan.view.progress import is_settled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainium_operator.plan.faults.node_signals import NodeProblem
    from trainium_operator.plan.view.workers import Worker


_STALL_STEPS = 3.0
_STALL_FRACTION = 0.75
"""A step may have ended up to a heartbeat after the loss; the rest of the time-out must pass without another."""
_SEEN_FRACTION = 0.5
"""Share of that time before which no report of a witness counts; agents report several times in the rest of it."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Reports of the members that still report, collected once per plan."""

    witnesses: bool
    """Whether there are any."""
    waited_for: frozenset[int]
    """Node ranks that they wait for."""
    lost_a_peer: bool
    stalls_at: float | None
    """When, without another step, training counts as stalled (Unix seconds); None while no step time is known."""
    seen_to_stall: bool = False
    """Whether a witness was seen well after the newest step. Who was cut off with all others reports of none either."""

    def stalled(self, now: float) -> bool:
        """Return whether training stalls and a witness outside the silent members confirms it."""
        return self.stalls_at is not None and now >= self.stalls_at and self.seen_to_stall


def collect_evidence(facts: Facts) -> Evidence:
    """Return what the witnesses report of steps and silence."""
    reporting = {member.pod_uid for member, worker in facts.members if worker is not None and not worker.silent}
    beats = [beat for member, beat in facts.beats if member.pod_uid in reporting]
    progressed, stalls_at = _stall(facts)
    newest = max(
        (facts.observed.agents[uid].last_seen for uid in reporting if uid in facts.observed.agents), default=0.0
    )
    return Evidence(
        witnesses=bool(beats),
        waited_for=frozenset(rank for beat in beats for rank in beat.waiting_for),
        lost_a_peer=any(_lost_a_peer(beat) for beat in beats),
        stalls_at=stalls_at,
        seen_to_stall=stalls_at is not None and newest >= progressed + _SEEN_FRACTION * (stalls_at - progressed),
    )


def explain_silence(evidence: Evidence, member: Member, worker: Worker, now: float) -> str | None:
    """Return why a silent member is believed to be lost, as the end of a sentence; None while nothing reports it."""
    if worker.refuses:
        return "nobody listens on its agent's port any more"
    if worker.node_bad:
        return f"its node {worker.pod.node} is not ready"
    if not evidence.witnesses:
        return None
    if member.node_rank in evidence.waited_for:
        return "the other workers wait for it"
    if evidence.lost_a_peer:
        return "another worker lost its connection to a peer"
    if evidence.stalled(now):
        return "no worker has made a step since"
    return None


def _lost_a_peer(beat: HeartbeatRequest) -> bool:
    return beat.phase is not WorkerPhase.TRAINING and any(
        _waited_in_collective(failure) and failure.generation == beat.generation and failure.attempt >= beat.attempt - 1
        for failure in beat.failures
    )


def _waited_in_collective(failure: ProcessFailure) -> bool:
    """Return whether, by its code or output, it waited for others that did not come."""
    sign = find_runtime_status(failure.runtime_status) or find_output_line(failure.output_line)
    return failure.exit_code == ExitCode.PEER_LOST or (sign is not None and sign.indirect)


def _stall(facts: Facts) -> tuple[float, float | None]:
    """Return when the newest step was seen, and when without another training counts as stalled; None for never.

    Steps before the first one after a fault do not count: they belong to what went before. After the last: never.
    """
    if any(beat.progress is not None and not beat.progress.training for _, beat in facts.beats):
        return 0.0, None
    if any(entry.recovered_seconds is None for entry in facts.job.status.history):
        return 0.0, None
    agents = [facts.observed.agents[member.pod_uid] for member, _ in facts.beats]
    known = [
        (agent.progressed, agent.step_seconds)
        for agent in agents
        if agent.progressed is not None and agent.step_seconds is not None
    ]
    if not known:
        return 0.0, None
    timeout = facts.job.spec.recovery.heartbeat_timeout_seconds
    # All step together; seen through heartbeats a step of theirs may look twice as long to some.
    typical = median(seconds for _, seconds in known)
    progressed = max(at for at, _ in known)
    return progressed, progressed + max(_STALL_FRACTION * timeout, _STALL_STEPS * typical)


def failed_since(facts: Facts, worker: Worker | None) -> float:
    """Return when a worker that is silent or gone failed.

    When it was last seen, else when the others last made a step.
    """
    silent_since = facts.now if worker is None else facts.now - worker.silent_seconds
    if worker is not None and worker.agent is not None and worker.agent.last_seen >= facts.observed.coordinator_since:
        return silent_since
    # All step together, so nobody has made a step since one of them was lost; after the last step none reports.
    reports = [beat.progress for _, beat in facts.beats if beat.progress is not None]
    if any(not report.training for report in reports):
        return silent_since
    steps = [report.updated for report in reports if report.updated]
    return min(silent_since, max(steps)) if steps else silent_since


def not_joined(facts: Facts, member: Member, worker: Worker, join_by: float | None) -> Loss | None:
    """Return a member that the others have waited for too long: it had to join by `join_by`, see `join_deadlines`."""
    if join_by is None or facts.now < join_by:
        return None
    seconds = facts.now - join_by + _limit(facts)
    return Loss(
        member=member,
        worker=worker,
        cause=Cause.HANG,
        failed_at=facts.now - seconds,
        message=(
            f"pod {worker.pod.name} on node {worker.pod.node} answers, but the others have waited {seconds:.0f} s "
            "for it to join them"
        ),
    )


def join_deadlines(facts: Facts) -> dict[int, float]:
    """Return when each member that others wait for will count as hung unless it joins: Unix seconds by rank."""
    if not facts.job.spec.recovery.hang.enabled:
        return {}
    limit = _limit(facts)
    deadlines: dict[int, float] = {}
    for other, beat in facts.beats:
        since = facts.observed.agents[other.pod_uid].joining_since
        if since is None or beat.phase is not WorkerPhase.JOINING:
            continue
        for rank in beat.waiting_for:
            if rank != other.node_rank:
                deadlines[rank] = min(since + limit, deadlines.get(rank, math.inf))
    return deadlines


def _limit(facts: Facts) -> float:
    recovery = facts.job.spec.recovery
    return recovery.hang.init_seconds + recovery.grace_period_seconds


def unhealthy(facts: Facts, evidence: Evidence, member: Member, worker: Worker) -> Loss | None:
    """Return a member whose node is broken for good; it saves if it can, and nothing waits for a replacement."""
    problem = facts.node_problems.get(worker.pod.uid)
    if problem is None or problem.severity is not Severity.FATAL:
        return None
    return _loss(facts, member, worker, problem, saves=_trains(facts, evidence, worker))


def hand_overs(facts: Facts, evidence: Evidence, found: list[Loss]) -> list[Loss]:
    """Add the members on bad nodes whose ranks free candidates can take over.

    A member on a broken node that is handed over this way keeps its pod until its rank is elsewhere.
    """
    lost = {loss.member.pod_uid: loss for loss in found}
    fatal = [loss for loss in found if _is_fatal(facts, loss)]
    free = len(facts.candidates) - len(found)
    if free >= 0:
        found = [replace(loss, stays=loss.saves) if loss in fatal else loss for loss in found]
    for member, worker in members_to_move(facts):
        if free <= 0:
            break
        if member.pod_uid not in lost and not worker.silent and not worker.node_bad:
            saves = is_settled(facts) and _trains(facts, evidence, worker)
            problem = facts.node_problems[worker.pod.uid]
            found.append(replace(_loss(facts, member, worker, problem, saves=saves), stays=saves))
            free -= 1
    return found


def members_to_move(facts: Facts) -> Iterator[tuple[Member, Worker]]:
    """Yield members that train on until a worker that replaces them is ready, by rank."""
    for member, worker in facts.members:
        problem = facts.node_problems.get(member.pod_uid)
        if worker is not None and problem is not None and problem.severity is Severity.DRAIN and worker.alive:
            yield member, worker


def _loss(facts: Facts, member: Member, worker: Worker, problem: NodeProblem, *, saves: bool) -> Loss:
    message = f"node {worker.pod.node} of pod {worker.pod.name} is bad: {problem}"
    if problem.message:
        message += f": {problem.message}"
    began = problem.since if problem.severity is Severity.FATAL else None  # the others train on until now
    return Loss(
        member=member,
        worker=worker,
        cause=problem.cause,
        failed_at=began if began is not None and worker.pod.created <= began <= facts.now else facts.now,
        message=message,
        force=worker.node_bad,
        saves=saves,
    )


def _is_fatal(facts: Facts, loss: Loss) -> bool:
    problem = facts.node_problems.get(loss.member.pod_uid)
    return loss.worker is not None and loss.saves and problem is not None and problem.severity is Severity.FATAL


def _trains(facts: Facts, evidence: Evidence, worker: Worker) -> bool:
    """Return whether it answers and makes steps, so that it can save before it leaves."""
    beat = worker.heartbeat
    if beat is None or worker.silent or worker.node_bad or beat.phase is not WorkerPhase.TRAINING:
        return False
    return not evidence.stalled(facts.now)


def find_losses(facts: Facts) -> tuple[tuple[Loss, ...], tuple[float, ...]]:
    """Return the failed members, most severe cause first, and when to requeue for suspects (Unix seconds)."""
    found: list[Loss] = []
    requeue_at: list[float] = []
    evidence = collect_evidence(facts)
    waited_for = join_deadlines(facts)
    # It recovers from nothing, so only a new report can change anything.
    status = facts.job.status
    at_rest = status.phase is Phase.RUNNING and all(entry.recovered_seconds is not None for entry in status.history)
    if at_rest:
        requeue_at.append(facts.now + facts.status_interval)
    for member, worker in facts.members:
        join_by = waited_for.get(member.node_rank)
        loss = _loss_of(facts, evidence, member, worker, join_by)
        if loss is not None:
            found.append(loss)
        elif worker is not None and not worker.finished:
            if not at_rest or _is_suspect(worker):
                requeue_at.append(_next_check(facts, evidence, worker))
            if join_by is not None:
                requeue_at.append(join_by)
    found = hand_overs(facts, evidence, found or accused(facts)) or slowest_to_hand_over(facts)
    if found and len(found) < len(facts.members):
        found += _finished_companions(facts, {loss.member.pod_uid for loss in found})
    return tuple(sorted(found, key=lambda loss: (severity(loss.cause), loss.member.node_rank))), tuple(requeue_at)


def _loss_of(
    facts: Facts, evidence: Evidence, member: Member, worker: Worker | None, join_by: float | None
) -> Loss | None:
    if worker is None:
        agent = facts.observed.agents.get(member.pod_uid)
        since = agent.last_seen if agent is not None else failed_since(facts, None)
        message = f"pod {member.pod_name} on node {member.node_name} no longer exists"
        return Loss(member=member, worker=None, cause=Cause.POD_LOST, failed_at=since, message=message)
    if worker.finished:
        return None
    return (
        _ended(facts, member, worker)
        or _without_node(facts, member, worker)
        or reported(facts, member, worker)
        or _leaving(facts, member, worker)
        or unhealthy(facts, evidence, member, worker)
        or _silent(facts, evidence, member, worker)
        or not_joined(facts, member, worker, join_by)
    )


def _ended(facts: Facts, member: Member, worker: Worker) -> Loss | None:
    pod = worker.pod
    if pod.phase not in (PodPhase.FAILED, PodPhase.SUCCEEDED):
        return None
    given_up = given_up_with(facts, worker)
    meaning = given_up[1] if given_up else classify_pod_failure(pod, facts.job.spec.recovery.rules)
    asked = pod.deleting and given_up is None and meaning.cause is not Cause.DEVICE
    blames = meaning.response is Response.REPLACE_NODE if given_up is None and not asked else None
    code = "" if pod.exit_code is None else f"exit code {pod.exit_code}"
    why = ", ".join(part for part in (pod.reason, code, pod.message) if part)
    return Loss(
        member=member,
        worker=worker,
        cause=cause_of_leaving(pod) if asked else meaning.cause,
        blames_node=blames,
        failed_at=pod.finished or facts.now,
        message=f"pod {pod.name} on node {pod.node} ended ({why or 'no reason given'})",
        force=worker.node_bad,
    )


def _without_node(facts: Facts, member: Member, worker: Worker) -> Loss | None:
    if not worker.node_deleted:
        return None
    state = "no longer exists" if worker.node is None else "was declared out of service"
    message = f"node {worker.pod.node} of pod {worker.pod.name} {state}"
    failed_at = failed_since(facts, worker)
    return Loss(member=member, worker=worker, cause=Cause.NODE_LOST, failed_at=failed_at, message=message, force=True)


def _leaving(facts: Facts, member: Member, worker: Worker) -> Loss | None:
    if not worker.pod.deleting and not worker.pod.disrupted:
        return None
    cause, problem = cause_of_leaving(worker.pod), facts.node_problems.get(worker.pod.uid)
    seen = f": {problem}" if problem is not None and problem.cause is cause else ""
    return Loss(
        member=member,
        worker=worker,
        cause=cause,
        failed_at=facts.now if worker.answers else failed_since(facts, worker),
        message=f"pod {worker.pod.name} on node {worker.pod.node} is being deleted or evicted{seen}",
        force=worker.node_bad,
        saves=worker.answers,
    )


def _silent(facts: Facts, evidence: Evidence, member: Member, worker: Worker) -> Loss | None:
    if not worker.silent and not worker.refuses:
        return None
    why = explain_silence(evidence, member, worker, facts.now)
    if why is None:
        return None
    # A worker that refuses a connection has power: the agent is gone, its machine is not.
    host_answers = worker.refuses and not worker.node_bad
    reporting = "the time of the failure is its last message"
    since = reporting if worker.agent is not None else "this operator has received no message from it"
    message = (
        f"no message from pod {worker.pod.name} on node {worker.pod.node} for {worker.silent_seconds:.1f} s, and "
        f"{why}; {since}"
    )
    return Loss(
        member=member,
        worker=worker,
        cause=Cause.POD_LOST if host_answers else Cause.NODE_LOST,
        failed_at=failed_since(facts, worker),
        message=message,
        force=not host_answers,
    )


def _finished_companions(facts: Facts, lost: set[str]) -> list[Loss]:
    """Return workers that finished before a peer was lost.

    Their processes are gone, so the next generation replaces them.
    """
    return [
        Loss(
            member=member,
            worker=worker,
            cause=Cause.FINISHED,
            failed_at=facts.now,
            message=f"pod {member.pod_name} had finished already",
        )
        for member, worker in facts.members
        if worker is not None and worker.finished and member.pod_uid not in lost
    ]


def _is_suspect(worker: Worker) -> bool:
    """Return whether it was not seen recently; the coordinator reports when others fall silent."""
    return worker.agent is None or not worker.silent_seconds < SILENCE_REPORTED_SECONDS < worker.timeout


def _next_check(facts: Facts, evidence: Evidence, worker: Worker) -> float:
    """Return when silence could become a loss: at its deadline, then whenever training would count as stalled."""
    deadline = facts.now - worker.silent_seconds + worker.timeout
    if worker.agent is None or not worker.silent:
        return max(deadline, facts.now)
    stalled = evidence.stalls_at
    return stalled if stalled is not None and stalled > facts.now else facts.now + facts.settings.heartbeat_seconds


_KNOWN_SECONDS = {"aws-node-termination-handler/spot-itn": 120.0}
"""Taint -> time between the notice and the end of the node; others end when the last pod has been evicted."""
_EXIT_MARGIN_SECONDS = 10.0
"""Between the end of the ranks' grace and the end of the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Problems of the members of the generation in force."""

    losses: tuple[Loss, ...]
    """Those that cannot go on or leave now, the most severe cause first."""
    requeue_at: tuple[float, ...]
    """When to look again (Unix seconds)."""
    leaving_since: float | None = None
    """Since when a notice is that a member's node will leave (Unix seconds); None for none."""
    events: tuple[EventIntent, ...] = ()


def diagnose(facts: Facts) -> Diagnosis:
    """Return the failed members, those that leave now, and when the others must."""
    losses, requeue_at = find_losses(facts)
    lost = {loss.member.pod_uid for loss in losses}
    leaving = [each for each in _leaving_members(facts) if each[0].pod_uid not in lost]
    if not leaving:
        return Diagnosis(losses=losses, requeue_at=requeue_at)
    known = facts.job.status.leaving_since
    since = facts.now if known is None else known
    taints = [taint.key for _, worker in leaving if worker.node is not None for taint in worker.node.taints]
    soonest = min((_KNOWN_SECONDS.get(key, math.inf) for key in taints), default=math.inf)
    last_call = since + max(0.0, soonest - facts.job.spec.recovery.grace_period_seconds - _EXIT_MARGIN_SECONDS)
    # Who has more than was asked for gives the node up at once.
    beyond = len(facts.members) - len(leaving) >= facts.job.status.desired - facts.job.status.idle_nodes.taken
    shrink_at = min(since + (0.0 if beyond else facts.job.spec.recovery.rescale_after_seconds), last_call)
    departures: tuple[Loss, ...] = ()
    if any(worker is not None and worker.finished for _, worker in facts.members):
        pass  # the run ends; nobody takes a rank any more
    elif not losses and is_settled(facts) and facts.now >= shrink_at and _is_enough(facts, len(leaving)):
        departures = tuple(_departure(facts, *each, stays=True) for each in leaving)
    elif facts.now >= last_call:
        departures = tuple(_departure(facts, *each, stays=False) for each in leaving)
    return Diagnosis(
        losses=losses + departures,
        requeue_at=(*requeue_at, *(at for at in (shrink_at, last_call) if facts.now < at < math.inf)),
        leaving_since=since,
        events=(_notice_event(facts, leaving),) if known is None else (),
    )


def _leaving_members(facts: Facts) -> list[tuple[Member, Worker]]:
    """Return members whose nodes are not bad, but on their way out."""
    return [
        (member, worker)
        for member, worker in members_to_move(facts)
        if facts.node_problems[member.pod_uid].cause is Cause.PREEMPTED and not worker.finished
    ]


def _notice_event(facts: Facts, leaving: list[tuple[Member, Worker]]) -> EventIntent:
    """Return the event of the first notice."""
    member = leaving[0][0]
    names = listed(tuple(each.pod_name for each, _ in leaving))
    return event(
        Reason.INTERRUPTION_NOTICE,
        f"Node {member.node_name} is about to leave: {facts.node_problems[member.pod_uid]}; {names} trains on until "
        "another worker can take the rank.",
        warning=True,
        node=member.node_name,
    )


def _is_enough(facts: Facts, leaving: int) -> bool:
    """Return whether those who stay, and the newcomers, are enough for a legal size."""
    return facts.size.legal_at_most(len(facts.members) - leaving + len(list_joiners(facts))) > 0


def _departure(facts: Facts, member: Member, worker: Worker, *, stays: bool) -> Loss:
    problem = facts.node_problems[member.pod_uid]
    return Loss(
        member=member,
        worker=worker,
        cause=Cause.PREEMPTED,
        failed_at=facts.now,
        message=f"node {worker.pod.node} of pod {worker.pod.name} is about to leave: {problem}",
        saves=worker.answers,
        stays=stays,
    )
