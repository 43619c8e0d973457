"""Find members whose agents are silent, and since when.

A silent member has failed only when something else reports so too. The witnesses are the members that still report:
they wait for the silent one, they lost a peer, or they have made no step for longer than their steps take. Its node may
also report it, by not being ready, and the port of its agent, by refusing connections (`coordinator.probe`), which is
certain enough not to wait for the time-out. When every member is silent at once the fault is more likely on this side,
and only nodes and ports count.

A failure is never dated later than the silence begins; silence is measured by the operator's clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from trainium_contract.exit_codes import ExitCode
from trainium_contract.faults.causes import Cause
from trainium_contract.faults.classify import find_output_line, find_runtime_status
from trainium_contract.wire.messages import WorkerPhase
from trainium_operator.plan.diagnose.failed_member import FailedMember
from trainium_operator.plan.model.observed import HEARTBEAT_SECONDS, SILENCE_REPORTED_SECONDS

if TYPE_CHECKING:
    from trainium_contract.wire.messages import HeartbeatRequest, Member, ProcessFailure
    from trainium_operator.plan.view.context import PlanContext
    from trainium_operator.plan.view.workers import Worker


_STALL_STEPS = 3.0
_STALL_FRACTION = 0.75
"""A step may end up to a heartbeat after the loss; the rest of the time-out must pass without another."""
_SEEN_FRACTION = 0.5
"""Share of that time before which reports of witnesses do not count; agents report several times in the rest of it."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Reports of the members that are still seen, collected once per plan."""

    has_witnesses: bool
    """Whether there are any witnesses."""
    pending_ranks: frozenset[int]
    """Node ranks that the witnesses wait for."""
    has_lost_peer: bool
    stalled_at: float | None
    """When training counts as stalled without another step (Unix seconds); None while no step time is known."""
    stall_is_confirmed: bool = False
    """Whether a witness was seen well after the newest step. A member that was cut off with all others reports no step
    either."""

    def is_stalled(self, now: float) -> bool:
        """Return whether training stalls and a witness outside the silent members confirms it."""
        return self.stalled_at is not None and now >= self.stalled_at and self.stall_is_confirmed


def collect_evidence(context: PlanContext) -> Evidence:
    """Return the reports of the witnesses about steps and silence."""
    reporting = {member.pod_uid for member, worker in context.members if worker is not None and not worker.silent}
    heartbeats = [heartbeat for member, heartbeat in context.heartbeats if member.pod_uid in reporting]
    newest_step_at, stalled_at = _find_stall_times(context)
    newest_message_at = max(
        (context.observed.agents[uid].last_seen for uid in reporting if uid in context.observed.agents), default=0.0
    )
    return Evidence(
        has_witnesses=bool(heartbeats),
        pending_ranks=frozenset(rank for heartbeat in heartbeats for rank in heartbeat.waiting_for),
        has_lost_peer=any(_has_lost_peer(heartbeat) for heartbeat in heartbeats),
        stalled_at=stalled_at,
        stall_is_confirmed=stalled_at is not None
        and newest_message_at >= newest_step_at + _SEEN_FRACTION * (stalled_at - newest_step_at),
    )


def explain_silence(evidence: Evidence, member: Member, worker: Worker, now: float) -> str | None:
    """Return why a silent member is believed to be lost, as the end of a sentence; None while nothing reports it."""
    if worker.is_refusing:
        return "nobody listens on its agent's port any more"
    if worker.node_bad:
        return f"its node {worker.pod.node} is not ready"
    if not evidence.has_witnesses:
        return None
    if member.node_rank in evidence.pending_ranks:
        return "the other workers wait for it"
    if evidence.has_lost_peer:
        return "another worker lost its connection to a peer"
    if evidence.is_stalled(now):
        return "no worker has made a step since"
    return None


def _has_lost_peer(heartbeat: HeartbeatRequest) -> bool:
    return heartbeat.phase is not WorkerPhase.TRAINING and any(
        _has_waited_in_collective(failure)
        and failure.generation == heartbeat.generation
        and failure.attempt >= heartbeat.attempt - 1
        for failure in heartbeat.failures
    )


def _has_waited_in_collective(failure: ProcessFailure) -> bool:
    """Return whether, by its exit code or output, it waited in a collective for others that did not arrive."""
    sign = find_runtime_status(failure.runtime_status) or find_output_line(failure.output_line)
    return failure.exit_code == ExitCode.PEER_LOST or (sign is not None and sign.indirect)


def _find_stall_times(context: PlanContext) -> tuple[float, float | None]:
    """Return when the newest step was seen, and when training counts as stalled without another; None for never.

    Steps before the first one after a fault do not count, because they belong to the time before it. After the last
    step training never stalls.
    """
    if any(not report.training for report in context.reports) or context.job.status.list_open_interruptions():
        return 0.0, None
    agents = [context.observed.agents[member.pod_uid] for member, _ in context.heartbeats]
    reports = [
        (agent.progressed_at, agent.step_seconds)
        for agent in agents
        if agent.progressed_at is not None and agent.step_seconds is not None
    ]
    if not reports:
        return 0.0, None
    timeout = context.job.spec.recovery.heartbeat_timeout_seconds
    # All step together; through heartbeats one of their steps may appear twice as long to some.
    median_step_seconds = median(seconds for _, seconds in reports)
    newest_step_at = max(at for at, _ in reports)
    return newest_step_at, newest_step_at + max(_STALL_FRACTION * timeout, _STALL_STEPS * median_step_seconds)


def find_failure_time(context: PlanContext, worker: Worker | None) -> float:
    """Return when a silent or missing worker failed: when it was last seen, else when the others last made a step."""
    silent_since = context.now if worker is None else context.now - worker.silent_seconds
    if worker is not None and worker.agent is not None and worker.agent.last_seen >= context.observed.coordinator_since:
        return silent_since
    # All step together, so none has made a step since one was lost; after the last step none reports.
    if any(not report.training for report in context.reports):
        return silent_since
    return min(silent_since, find_last_step_time(context) or silent_since)


def find_last_step_time(context: PlanContext) -> float:
    """Return when the newest reported step ended (Unix seconds); 0 without one."""
    return max((report.updated for report in context.reports), default=0.0)


def detect_silent_agent(
    context: PlanContext, evidence: Evidence, member: Member, worker: Worker
) -> FailedMember | None:
    """Return the failure of a member that is silent or refuses connections, as something else confirms."""
    if not worker.silent and not worker.is_refusing:
        return None
    why = explain_silence(evidence, member, worker, context.now)
    if why is None:
        return None
    # A worker that refuses a connection has power: its agent has ended, but its machine runs.
    host_answers = worker.is_refusing and not worker.node_bad
    time_source = "the time of the failure is its last message"
    since = time_source if worker.agent is not None else "this operator has received no message from it"
    message = (
        f"no message from pod {worker.pod.name} on node {worker.pod.node} for {worker.silent_seconds:.1f} s, and "
        f"{why}; {since}"
    )
    return FailedMember(
        member=member,
        worker=worker,
        cause=Cause.POD_LOST if host_answers else Cause.NODE_LOST,
        failed_at=find_failure_time(context, worker),
        message=message,
        force_delete=not host_answers,
    )


def is_suspect(worker: Worker) -> bool:
    """Return whether it was not seen recently; the coordinator reports when others fall silent."""
    return worker.agent is None or not worker.silent_seconds < SILENCE_REPORTED_SECONDS < worker.timeout


def find_next_silence_check(context: PlanContext, evidence: Evidence, worker: Worker) -> float:
    """Return when silence could become a failure: at its deadline, then whenever training would count as stalled."""
    deadline = context.now - worker.silent_seconds + worker.timeout
    if worker.agent is None or not worker.silent:
        return max(deadline, context.now)
    stalled = evidence.stalled_at
    return stalled if stalled is not None and stalled > context.now else context.now + HEARTBEAT_SECONDS
