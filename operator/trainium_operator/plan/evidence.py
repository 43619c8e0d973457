"""Policy: when silence means loss. A silent member is lost only when something else says so too.

The witnesses are the members that still report: they wait for the silent one, they lost a peer, or they have made no
step for longer than their steps take. Its node may also say so, by not being ready. When every member is silent at
once, the fault is more likely on this side, and only the nodes are believed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.exit_codes import ExitCode
from trainium_contract.messages import WorkerPhase

if TYPE_CHECKING:
    from trainium_contract.messages import HeartbeatRequest, Member
    from trainium_operator.plan.facts import Facts
    from trainium_operator.plan.workers import Worker

_STALL_STEPS = 3.0
_STALL_FRACTION = 0.75
"""A step may have ended up to a heartbeat after the loss; the rest of the time-out must pass without another."""


def evidence_of_loss(facts: Facts, member: Member, worker: Worker) -> str | None:
    """Why a silent member is believed to be lost, as the end of a sentence; None while nothing says so."""
    if worker.node_bad:
        return f"its node {worker.pod.node} is not ready"
    witnesses = _witnesses(facts)
    if not witnesses:
        return None
    if any(member.node_rank in beat.waiting_for for beat in witnesses):
        return "the other workers wait for it"
    if any(_lost_a_peer(beat) for beat in witnesses):
        return "another worker lost its connection to a peer"
    if _stalled_since(facts) is not None and facts.now >= (stall_deadline(facts) or 0.0):
        return "no worker has made a step since"
    return None


def stall_deadline(facts: Facts) -> float | None:
    """When, without another step, training counts as stalled (Unix seconds); None while no step time is known."""
    since = _stalled_since(facts)
    if since is None:
        return None
    timeout = facts.job.spec.recovery.heartbeat_timeout_seconds
    return since + max(_STALL_FRACTION * timeout, _STALL_STEPS * _step_seconds(facts))


def _witnesses(facts: Facts) -> tuple[HeartbeatRequest, ...]:
    heard = {member.pod_uid for member, worker in facts.members if worker is not None and not worker.silent}
    return tuple(beat for member, beat in facts.beats if member.pod_uid in heard)


def _lost_a_peer(beat: HeartbeatRequest) -> bool:
    return beat.phase is not WorkerPhase.TRAINING and any(
        failure.exit_code == ExitCode.PEER_LOST
        and failure.generation == beat.generation
        and failure.attempt >= beat.attempt - 1
        for failure in beat.failures
    )


def _stalled_since(facts: Facts) -> float | None:
    """When a step was last reported; None while no time per step is known, and before the first step after a fault."""
    if any(entry.recovered_seconds is None for entry in facts.job.status.history):
        return None
    agents = [facts.observed.agents[member.pod_uid] for member, _ in facts.beats]
    known = [agent.progressed for agent in agents if agent.progressed is not None and agent.step_seconds is not None]
    return max(known, default=None)


def _step_seconds(facts: Facts) -> float:
    agents = [facts.observed.agents[member.pod_uid] for member, _ in facts.beats]
    return max((agent.step_seconds for agent in agents if agent.step_seconds is not None), default=0.0)
