"""Report members that are slower than the others, and replace one when a spare is free or training is faster so.

The pace of a member is its own work in a step, without the wait for its peers, compared with the median member's. All
ranks wait for the slowest at each step, so without it a step takes as much less as its own work exceeds that of the
next slowest, at the best size for one node less.

Guarantees:
- No member is replaced before it has been slow for `persistSteps`, for a load that all members bear, while an
  interruption is open or while nodes may not be acted on; one at a time.
- A member counts as slow until it is clearly not (hysteresis); differences too small to matter never count.
- Fewer nodes must be clearly faster by what the ranks measure, and repay the change in the steps that are left.
"""

from __future__ import annotations

from statistics import median_low
from typing import TYPE_CHECKING

from trainium_contract.faults.causes import Cause
from trainium_contract.status.public import StragglerStatus
from trainium_operator.plan.diagnose.loss import Loss
from trainium_operator.plan.model.actions import EventIntent, PolicyResult, event
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.view.facts import Facts, is_second_choice
from trainium_operator.plan.view.progress import is_settled, last_step, resize_cost_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainium_contract.job import TrainingJobStatus
    from trainium_contract.spec.recovery import StragglerSpec


_LISTED = 8
_FEWEST_STEPS = 3
_LEAST_EXCESS_SECONDS = 0.1
"""A member that loses less than this in a step is no straggler, whatever the ratio."""
_LOADED_SHARE = 0.2
"""Share of its processor time that the median of the others must wait for, to call the hosts loaded."""


def find_stragglers(facts: Facts, status: TrainingJobStatus) -> PolicyResult:
    """Update the list, and report members that have been slow for long, once each."""
    if not _steady(facts):
        return PolicyResult(status=status)
    spec, step = facts.job.spec.recovery.stragglers, last_step(facts)
    known = {entry.pod: entry for entry in status.stragglers}
    paces = _paces(facts)
    found: list[StragglerStatus] = []
    events: list[EventIntent] = []
    requeue_at: list[float] = []
    for pod, (node, ratio) in paces.items():
        entry = known.get(pod)
        if ratio < (spec.slowdown if entry is None else 1 + (spec.slowdown - 1) / 2):
            continue
        if entry is None:
            entry = StragglerStatus(pod=pod, node=node, since_step=step, slowdown=round(ratio, 2))
        elif step < entry.since_step:  # training went back
            entry = entry.replaced(since_step=step)
        if not entry.reported and step - entry.since_step >= spec.persist_steps:
            entry = entry.replaced(reported=True, slowdown=round(ratio, 2))
            text = _sentence(entry, step) + _why_it_stays(facts, pod, spec)
            events.append(event(Reason.STRAGGLER_DETECTED, text, warning=True, pod=pod))
            requeue_at.append(facts.now)  # it is reported first, and handed over by the next plan
        found.append(entry)
    for pod, entry in known.items():
        if entry.reported and pod in paces and all(each.pod != pod for each in found):
            text = f"Pod {pod} on node {entry.node} keeps pace with the others again."
            events.append(event(Reason.STRAGGLER_RECOVERED, text, pod=pod))
    found.sort(key=lambda entry: (-entry.reported, -entry.slowdown, entry.pod))
    status = status.replaced(stragglers=tuple(found[:_LISTED]))
    return PolicyResult(status=status, events=tuple(events), requeue_at=tuple(requeue_at))


def slowest_to_hand_over(facts: Facts) -> list[Loss]:
    """Return the slowest reported member, when a spare takes over or training is faster without it."""
    spec = facts.job.spec.recovery.stragglers
    slow = {entry.pod: entry for entry in facts.job.status.stragglers if entry.reported}
    if not slow or not spec.evict or facts.observed.fleet.frozen or not _steady(facts):
        return []
    paces = {pod: ratio for pod, (_, ratio) in _paces(facts).items() if pod in slow and ratio >= spec.slowdown}
    if not paces:
        return []
    slowest = max(paces, key=lambda pod: paces[pod])
    if _bears_what_all_bear(facts, slowest, spec.slowdown):
        return []
    member, worker = next(each for each in facts.members if each[0].pod_name == slowest)
    if worker is None or worker.silent or worker.node_bad or worker.pod.deleting:
        return []
    entry = slow[slowest].replaced(slowdown=round(paces[slowest], 2))
    message = _sentence(entry, last_step(facts))
    replaced = any(not is_second_choice(facts, each) for each in facts.candidates)
    if not replaced and not faster_without_one(facts):
        return []
    return [
        Loss(
            member=member,
            worker=worker,
            cause=Cause.STRAGGLER,
            failed_at=facts.now,
            message=message if replaced else f"{message}; the others are faster without it",
            saves=True,
            missed=replaced,
        )
    ]


def _steady(facts: Facts) -> bool:
    """Return all members train, and nothing is being recovered from or resized."""
    status = facts.job.status
    if facts.current is None or not is_settled(facts) or status.membership.generation != facts.current.generation:
        return False
    if len(facts.current.members) < status.desired:
        return False
    return not any(entry.is_open for entry in status.history)


def _paces(facts: Facts) -> Mapping[str, tuple[str, float]]:
    """Pod -> (node, own work in units of the median member's); empty while too few report."""
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


def _bears_what_all_bear(facts: Facts, pod: str, slowdown: float) -> bool:
    """Return whether it is slow only because processors are scarce where all members run, so another node is no better.

    Without the waits for a processor it would keep pace, and the others wait for theirs too.
    """
    timings = {member.pod_name: beat.timing for member, beat in facts.beats if beat.timing is not None}
    waits = {name: timing.cpu_wait for name, timing in timings.items() if timing.cpu_wait is not None}
    others = [share for name, share in waits.items() if name != pod]
    if pod not in waits or len(others) < len(timings) - 1 or median_low(others) < _LOADED_SHARE:
        return False
    worked = {name: timings[name].own_seconds * (1.0 - share) for name, share in waits.items()}
    usual = median_low(worked.values())
    return worked[pod] < slowdown * usual or worked[pod] - usual < _LEAST_EXCESS_SECONDS


def _why_it_stays(facts: Facts, pod: str, spec: StragglerSpec) -> str:
    if not _bears_what_all_bear(facts, pod, spec.slowdown):
        return ""
    return "; it waits for a processor, as the others do, so it is not replaced: look at what else runs on these nodes"


def _sentence(entry: StragglerStatus, step: int) -> str:
    return (
        f"Pod {entry.pod} on node {entry.node} needs {entry.slowdown:g} times as long for its own work in a step as "
        f"the median worker, for {step - entry.since_step} steps"
    )


_CLEARLY = 1.05
"""So many times as fast it must be without it."""


def faster_without_one(facts: Facts) -> bool:
    """Return whether the job is faster on fewer nodes than on all of them with the slowest one."""
    status, present = facts.job.status, len(facts.members)
    size = facts.size.legal_at_most(present - 1)
    speed = facts.size.speed(size, present)
    timings = [beat.timing for _, beat in facts.beats if beat.timing is not None]
    if not speed or len(timings) < max(2, present) or not _has_graphs(facts, size):
        return False
    second, slowest = sorted(timing.own_seconds for timing in timings)[-2:]
    step = max(timing.step_seconds for timing in timings)
    without = max(0.0, step - (slowest - second)) / speed
    if without * _CLEARLY > step:
        return False
    price, total = resize_cost_seconds(status), status.progress.total_steps
    if price is None or not total:
        return True
    return max(0, total - status.progress.step) * (step - without) > 2 * price


def _has_graphs(facts: Facts, size: int) -> bool:
    known = (*facts.size.compiled_first, *facts.job.status.compiled.sizes)
    return not facts.job.spec.precompile.enabled or size in known
