"""Policy: members slower than the others are always told of, and handed over when that costs nothing but a spare.

A member's pace is its own work in a step, without the wait for its peers, so that those who wait for a slow one do not
look slow. It is held against the median member's. Invariants: nobody is evicted before it has been slow for
`persistSteps`, while an interruption is open, while nodes may not be acted on, or without a sound spare that is warm;
one at a time; a member counts as slow until it is clearly not (hysteresis); differences too small to matter count
never.
"""

from __future__ import annotations

from statistics import median_low
from typing import TYPE_CHECKING

from trainium_contract.exit_codes import Cause
from trainium_contract.job import Rung, StragglerStatus
from trainium_operator.plan.generation import is_settled
from trainium_operator.plan.history import last_step
from trainium_operator.plan.loss import Loss
from trainium_operator.plan.reasons import Reason
from trainium_operator.plan.troubles import is_second_choice

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainium_operator.plan.facts import Draft, Facts

_LISTED = 8
_FEWEST_STEPS = 3
_LEAST_EXCESS_SECONDS = 0.1
"""A member that loses less than this in a step is no straggler, whatever the ratio."""


def note_stragglers(facts: Facts, draft: Draft) -> None:
    """Bring the list in the status up to date, and tell of members that have been slow for long, once each."""
    if not _steady(facts):
        return
    spec, step = facts.job.spec.recovery.stragglers, last_step(facts)
    known = {entry.pod: entry for entry in draft.status.stragglers}
    paces = _paces(facts)
    found = []
    for pod, (node, ratio) in paces.items():
        entry = known.get(pod)
        if ratio < (spec.slowdown if entry is None else 1 + (spec.slowdown - 1) / 2):
            continue
        if entry is None:
            entry = StragglerStatus(pod=pod, node=node, since_step=step, slowdown=round(ratio, 2))
        elif step < entry.since_step:  # training went back
            entry = entry.model_copy(update={"since_step": step})
        if not entry.reported and step - entry.since_step >= spec.persist_steps:
            entry = entry.model_copy(update={"reported": True, "slowdown": round(ratio, 2)})
            draft.note(Reason.STRAGGLER_DETECTED, _sentence(entry, step), warning=True, pod=pod)
            draft.deadlines.append(facts.now)  # it is told first, and handed over by the next plan
        found.append(entry)
    for pod, entry in known.items():
        if entry.reported and pod in paces and all(each.pod != pod for each in found):
            draft.note(
                Reason.STRAGGLER_GONE, f"Pod {pod} on node {entry.node} keeps pace with the others again.", pod=pod
            )
    found.sort(key=lambda entry: (-entry.reported, -entry.slowdown, entry.pod))
    draft.update(stragglers=tuple(found[:_LISTED]))


def evicted(facts: Facts) -> list[Loss]:
    """The slowest of those who have been reported, when a spare takes over; it saves, and nothing is lost."""
    spec = facts.job.spec.recovery.stragglers
    slow = {entry.pod: entry for entry in facts.job.status.stragglers if entry.reported}
    if not slow or not spec.evict or facts.observed.fleet.frozen or not _steady(facts):
        return []
    if not any(not is_second_choice(facts, worker) for worker in facts.candidates):
        return []
    paces = {pod: ratio for pod, (_, ratio) in _paces(facts).items() if pod in slow and ratio >= spec.slowdown}
    if not paces:
        return []
    slowest = max(paces, key=lambda pod: paces[pod])
    member, worker = next(each for each in facts.members if each[0].pod_name == slowest)
    if worker is None or worker.silent or worker.node_bad or worker.pod.deleting:
        return []
    entry = slow[slowest].model_copy(update={"slowdown": round(paces[slowest], 2)})
    message = _sentence(entry, last_step(facts))
    return [Loss(member=member, worker=worker, cause=Cause.STRAGGLER, failed_at=facts.now, message=message, saves=True)]


def _steady(facts: Facts) -> bool:
    """All members train, and nothing is being recovered from or resized."""
    status = facts.job.status
    if facts.current is None or not is_settled(facts) or status.membership.generation != facts.current.generation:
        return False
    if len(facts.current.members) < status.desired:
        return False
    return not any(entry.recovered_seconds is None and entry.rung is not Rung.STOP for entry in status.history)


def _paces(facts: Facts) -> Mapping[str, tuple[str, float]]:
    """Pod -> (node, own work in units of the median member's); empty while too few tell."""
    own = {
        member.pod_name: (member.node_name, beat.timing.own_seconds)
        for member, beat in facts.beats
        if beat.timing is not None and beat.timing.steps >= _FEWEST_STEPS
    }
    if len(own) < 2 or len(own) < len(facts.beats):
        return {}
    usual = median_low([seconds for _, seconds in own.values()])
    if usual <= 0:
        return {}
    return {
        pod: (node, seconds / usual if seconds - usual >= _LEAST_EXCESS_SECONDS else 1.0)
        for pod, (node, seconds) in own.items()
    }


def _sentence(entry: StragglerStatus, step: int) -> str:
    return (
        f"Pod {entry.pod} on node {entry.node} needs {entry.slowdown:g} times as long for its own work in a step as "
        f"the median worker, for {step - entry.since_step} steps"
    )
