"""Policy: since when an agent is silent, also where this coordinator has only just begun and never heard it.

Agents need a while to find a coordinator that took over, so silence counts only after it. That while ends early once
nearly all members have called: what they could do, the missing one could too. The failure itself may lie before the
take-over, and then the others' last step tells when it was.
Invariants: silence is measured by the operator's clock; a failure is never dated later than the silence begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainium_operator.plan.facts import Facts
    from trainium_operator.plan.model import Observed, PlanSettings
    from trainium_operator.plan.workers import Worker

_MISSING_FRACTION = 0.1
"""Of the members that may still be missing, but always one, when the others' calls end the waiting."""


def audible_since(observed: Observed, settings: PlanSettings) -> float:
    """When an agent that was not heard yet should have been (Unix seconds)."""
    latest = observed.coordinator_since + settings.reconnect_seconds
    if observed.membership is None:
        return latest
    members = observed.membership.members
    known = (observed.agents.get(member.pod_uid) for member in members)
    called = [max(agent.first_heard, observed.coordinator_since) for agent in known if agent is not None]
    if not called or len(members) - len(called) > max(1.0, _MISSING_FRACTION * len(members)):
        return latest
    return min(latest, max(called))


def failed_since(facts: Facts, worker: Worker | None) -> float:
    """When a worker that is silent or gone failed: when it was last heard, else when the others last made a step."""
    silent_since = facts.now if worker is None else facts.now - worker.silent_seconds
    if worker is not None and worker.agent is not None and worker.agent.heard >= facts.observed.coordinator_since:
        return silent_since
    # All step together, so nobody has made a step since one of them was lost.
    steps = [beat.progress.updated for _, beat in facts.beats if beat.progress is not None and beat.progress.updated]
    return min(silent_since, max(steps)) if steps else silent_since
