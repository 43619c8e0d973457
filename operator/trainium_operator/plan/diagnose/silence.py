"""Policy: when silence means loss, and since when. A silent member is lost only when something else says so too.

The witnesses are the members that still report: they wait for the silent one, they lost a peer, or they have made no
step for longer than their steps take. Its node may also say so, by not being ready, and its agent's port, by refusing
connections (see `coordinator.probe`), which is certain enough not to wait for the time-out. When every member is silent
at once, the fault is more likely on this side, and only nodes and ports are believed. Of a member that this coordinator
never heard the failure itself may lie before the take-over, and then the others' last step tells when it was.
Invariants: silence is measured by the operator's clock; a failure is never dated later than the silence begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from trainium_contract.exit_codes import ExitCode
from trainium_contract.faults.classify import find_runtime_status
from trainium_contract.wire.messages import WorkerPhase

if TYPE_CHECKING:
    from trainium_contract.wire.messages import HeartbeatRequest, Member, ProcessFailure
    from trainium_operator.plan.view.facts import Facts
    from trainium_operator.plan.view.workers import Worker

_STALL_STEPS = 3.0
_STALL_FRACTION = 0.75
"""A step may have ended up to a heartbeat after the loss; the rest of the time-out must pass without another."""
_SEEN_FRACTION = 0.5
"""Of that time, before which no word of a witness says anything; agents speak several times in the rest of it."""


@dataclass(frozen=True, slots=True)
class Testimony:
    """What the members that still report say, taken once per plan."""

    witnesses: bool
    """Whether there are any."""
    awaited: frozenset[int]
    """Node ranks that they wait for."""
    lost_a_peer: bool
    stalls_at: float | None
    """When, without another step, training counts as stalled (Unix seconds); None while no step time is known."""
    seen_to_stall: bool = False
    """Whether a witness was heard well after the newest step. Who was cut off with all others tells of none either."""

    def stalled(self, now: float) -> bool:
        """Whether training stands still, as somebody says who would know."""
        return self.stalls_at is not None and now >= self.stalls_at and self.seen_to_stall


def take_testimony(facts: Facts) -> Testimony:
    """Hear the witnesses."""
    heard = {member.pod_uid for member, worker in facts.members if worker is not None and not worker.silent}
    beats = [beat for member, beat in facts.beats if member.pod_uid in heard]
    progressed, stalls_at = _stall(facts)
    newest = max((facts.observed.agents[uid].heard for uid in heard if uid in facts.observed.agents), default=0.0)
    return Testimony(
        witnesses=bool(beats),
        awaited=frozenset(rank for beat in beats for rank in beat.waiting_for),
        lost_a_peer=any(_lost_a_peer(beat) for beat in beats),
        stalls_at=stalls_at,
        seen_to_stall=stalls_at is not None and newest >= progressed + _SEEN_FRACTION * (stalls_at - progressed),
    )


def evidence_of_loss(testimony: Testimony, member: Member, worker: Worker, now: float) -> str | None:
    """Why a silent member is believed to be lost, as the end of a sentence; None while nothing says so."""
    if worker.refuses:
        return "nobody listens on its agent's port any more"
    if worker.node_bad:
        return f"its node {worker.pod.node} is not ready"
    if not testimony.witnesses:
        return None
    if member.node_rank in testimony.awaited:
        return "the other workers wait for it"
    if testimony.lost_a_peer:
        return "another worker lost its connection to a peer"
    if testimony.stalled(now):
        return "no worker has made a step since"
    return None


def _lost_a_peer(beat: HeartbeatRequest) -> bool:
    return beat.phase is not WorkerPhase.TRAINING and any(
        _stood_in_a_collective(failure)
        and failure.generation == beat.generation
        and failure.attempt >= beat.attempt - 1
        for failure in beat.failures
    )


def _stood_in_a_collective(failure: ProcessFailure) -> bool:
    """By its code, or by the runtime's word: it waited for others that did not come."""
    status = find_runtime_status(failure.runtime_status)
    return failure.exit_code == ExitCode.PEER_LOST or (status is not None and status.indirect)


def _stall(facts: Facts) -> tuple[float, float | None]:
    """When the newest step was seen, and when without another training counts as stalled; None for never.

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
    """When a worker that is silent or gone failed: when it was last heard, else when the others last made a step."""
    silent_since = facts.now if worker is None else facts.now - worker.silent_seconds
    if worker is not None and worker.agent is not None and worker.agent.heard >= facts.observed.coordinator_since:
        return silent_since
    # All step together, so nobody has made a step since one of them was lost; after the last step none tells.
    reports = [beat.progress for _, beat in facts.beats if beat.progress is not None]
    if any(not report.training for report in reports):
        return silent_since
    steps = [report.updated for report in reports if report.updated]
    return min(silent_since, max(steps)) if steps else silent_since
