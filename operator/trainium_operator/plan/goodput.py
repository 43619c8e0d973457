"""The ledger: where the time of a job went, by the definitions of docs/goodput.md.

Wall time runs while a generation is in force. Productive are the steps of the final history at the reference step time
(`reference`). The time of an interruption, from the failure to the first new step less that step's reference time, is
lost to its cause and stages; time before the first step is start-up; what is left over is overhead. Invariants:
productive and lost seconds together are the wall time; overlapping interruptions lose their time once; all follows from
the status and the observation: another operator goes on where the last one stopped, a repeated plan adds nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.job import Interruption, Rung
from trainium_contract.ledger import OVERHEAD, STARTUP, GoodputStatus, StageSeconds
from trainium_operator.plan.history import replace_entry
from trainium_operator.plan.reference import count_steps, productive, reference_seconds, sample_step_time
from trainium_operator.plan.stages import STAGES, split

if TYPE_CHECKING:
    from trainium_operator.plan.facts import Draft, Facts

_DOWN = ("Detect", "Decide", "Restart", "Load", STARTUP)
"""Stages in which nothing trains; steps that are computed again, and slow ones, count as up."""


def account(facts: Facts, draft: Draft) -> None:
    """Bring the ledger up to now; call when the history is as this plan leaves it."""
    goodput = _adopted(draft.status.goodput, len(facts.members), facts.job.status.progress.step)
    held, running = _held_nodes(facts), facts.current is not None
    if not running and not held:
        draft.update(goodput=goodput.model_copy(update={"accounted_until": None, "starting": True}))
        return
    since = goodput.accounted_until if goodput.accounted_until is not None else facts.now
    passed = max(0.0, facts.now - since)
    nodes = goodput.node_seconds + passed * held
    fields = {"accounted_until": facts.now, "node_seconds": round(nodes, 3)}
    if not running:
        draft.update(goodput=_totalled(facts, goodput.model_copy(update={**fields, "starting": True}), pending=0.0))
        return
    wall = round(goodput.wall_seconds + passed, 3)
    goodput = goodput.model_copy(update={**fields, "wall_seconds": wall})
    interrupted, starting = _any_open(draft.status.history), goodput.starting
    goodput = _charge_startup(facts, goodput, 0.0 if interrupted else passed)
    goodput = _charge_interruptions(facts, draft, goodput, passed if starting else None)
    undisturbed = not interrupted and not starting and not _any_open(facts.job.status.history)
    goodput = sample_step_time(facts, goodput, clean=undisturbed)
    draft.update(goodput=_totalled(facts, goodput, pending=_step_in_hand(facts, goodput) if undisturbed else 0.0))


def _adopted(goodput: GoodputStatus, size: int, step: int) -> GoodputStatus:
    """A ledger that was kept without counting steps goes on from its productive seconds."""
    if goodput.wall_seconds == 0 or goodput.node_seconds > 0:
        return goodput
    kept = goodput.productive_seconds
    past = {"earlier_seconds": kept, "earlier_node_seconds": kept * size, "starting": False, "counted_step": step}
    return goodput.model_copy(update={**past, "node_seconds": goodput.wall_seconds * max(1, size)})


def _held_nodes(facts: Facts) -> int:
    """Nodes that this job's pods hold, spares included, and those that are quarantined for what it saw there."""
    held = {worker.pod.node for worker in facts.workers.values() if worker.pod.node and not worker.ended}
    return len(held | (facts.observed.fleet.quarantined & set(facts.job.status.avoided_nodes)))


def _any_open(history: tuple[Interruption, ...]) -> bool:
    return any(_is_open(entry) for entry in history)


def _is_open(entry: Interruption) -> bool:
    return entry.recovered_seconds is None and entry.rung is not Rung.STOP


def _charge_startup(facts: Facts, goodput: GoodputStatus, passed: float) -> GoodputStatus:
    """Time counts as start-up until a new step is seen; what came after the end of that step does not."""
    starting = goodput.starting
    goodput, steps, ended = count_steps(facts, goodput)
    if not starting:
        return goodput
    lost = goodput.lost_seconds.get(STARTUP, 0.0) + passed
    if steps and passed:
        after = min(passed, max(0.0, facts.now - ended)) if ended else 0.0
        lost -= after + steps * (reference_seconds(goodput, len(facts.members)) or 0.0)
    return _set_loss(goodput, STARTUP, max(0.0, lost), StageSeconds(), startup=True).model_copy(
        update={"starting": not steps}
    )


def _charge_interruptions(facts: Facts, draft: Draft, goodput: GoodputStatus, starting: float | None) -> GoodputStatus:
    """Bring what each interruption lost up to now; one that was closed by an earlier plan is settled.

    `starting`: seconds since the last account, when no step had been made by then.
    """
    status = facts.job.status
    adopted = status.goodput.node_seconds == 0
    closed = [each for each in status.history if not _is_open(each)]
    settled = {_identity(each) for each in closed if adopted or each.stages is not None}
    order = sorted(range(len(draft.status.history)), key=lambda index: draft.status.history[index].failed_at or 0.0)
    covered = 0.0
    for index in order:
        entry = draft.status.history[index]
        if entry.failed_at is None or entry.rung is Rung.STOP:
            continue
        ended = facts.now if _is_open(entry) else entry.failed_at + (entry.recovered_seconds or 0.0)
        if _identity(entry) not in settled:
            start = max(entry.failed_at, covered)
            stages = split(facts, entry, start, max(start, ended - _first_step(facts, goodput, entry)))
            goodput, stages = _charge(goodput, entry, stages, starting)
            if stages != entry.stages:
                replace_entry(draft, index, entry.model_copy(update={"stages": stages}))
        covered = max(covered, ended)
    return goodput


def _first_step(facts: Facts, goodput: GoodputStatus, entry: Interruption) -> float:
    """Reference time of the step that ended an interruption: it is productive. A suspension ends one without a step."""
    if _is_open(entry) or facts.job.spec.suspend:
        return 0.0
    return reference_seconds(goodput, len(facts.members)) or 0.0


def _charge(
    goodput: GoodputStatus, entry: Interruption, stages: StageSeconds, starting: float | None
) -> tuple[GoodputStatus, StageSeconds]:
    """Add what an interruption lost more than was charged before; never more than there is wall time for."""
    before = entry.stages or StageSeconds()
    more = stages.total - before.total
    startup = goodput.lost_seconds.get(STARTUP, 0.0)
    if starting is not None and startup > 0 and more > starting:
        # Until it was known, its time was taken for start-up.
        goodput = _set_loss(goodput, STARTUP, startup - (more - starting), StageSeconds(), startup=True)
    room = goodput.wall_seconds - _lost(goodput)
    if more > room + 0.001:
        share = max(0.0, room + before.total) / stages.total
        stages = StageSeconds(**{name: round(getattr(stages, name) * share, 3) for name in STAGES})
        more = stages.total - before.total
    delta = StageSeconds(**{name: getattr(stages, name) - getattr(before, name) for name in STAGES})
    total = goodput.lost_seconds.get(entry.cause.value, 0.0) + more
    return _set_loss(goodput, entry.cause.value, total, delta), stages


def _set_loss(
    goodput: GoodputStatus, key: str, seconds: float, stages: StageSeconds, *, startup: bool = False
) -> GoodputStatus:
    lost, by_stage = dict(goodput.lost_seconds), dict(goodput.lost_by_stage)
    lost[key] = round(max(0.0, seconds), 3)
    if startup:
        by_stage[STARTUP] = lost[key]
    for name in STAGES:
        more = getattr(stages, name)
        if more:
            stage = name.capitalize()
            by_stage[stage] = round(max(0.0, by_stage.get(stage, 0.0) + more), 3)
    return goodput.model_copy(update={"lost_seconds": _present(lost), "lost_by_stage": _present(by_stage)})


def _present(seconds: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in seconds.items() if value > 0}


def _lost(goodput: GoodputStatus) -> float:
    return sum(value for key, value in goodput.lost_seconds.items() if key != OVERHEAD)


def _step_in_hand(facts: Facts, goodput: GoodputStatus) -> float:
    """The step that is being made counts for as long as it has lasted, up to the reference."""
    ended = goodput.window.at
    if goodput.starting or ended is None:
        return 0.0
    return min(max(0.0, facts.now - ended), reference_seconds(goodput, len(facts.members)) or 0.0)


def _totalled(facts: Facts, goodput: GoodputStatus, *, pending: float) -> GoodputStatus:
    """The sums and ratios that follow; `pending` seconds belong to the step that is being made."""
    wall, lost = goodput.wall_seconds, _lost(goodput)
    available = max(0.0, wall - lost)
    size = len(facts.members)
    counted = productive(goodput)
    if counted is None:
        useful, node_useful = available, available * size
    else:
        seconds, node_seconds = counted
        useful = min(available, seconds + pending)
        whole = seconds + pending
        node_useful = (node_seconds + pending * size) * (useful / whole if whole > 0 else 0.0)
    overhead = round(available - useful, 3)
    by_cause = {key: value for key, value in goodput.lost_seconds.items() if key != OVERHEAD}
    by_stage = {key: value for key, value in goodput.lost_by_stage.items() if key != OVERHEAD}
    down = sum(by_stage.get(stage, 0.0) for stage in _DOWN)
    return goodput.model_copy(
        update={
            "productive_seconds": round(useful, 3),
            "lost_seconds": _present({**by_cause, OVERHEAD: overhead}),
            "lost_by_stage": _present({**by_stage, OVERHEAD: overhead}),
            "ratio": _ratio(useful, wall),
            "uptime_ratio": _ratio(wall - down, wall),
            "fleet_ratio": _ratio(node_useful, goodput.node_seconds),
        }
    )


def _ratio(part: float, whole: float) -> float:
    return round(min(1.0, max(0.0, part / whole)), 4) if whole > 0 else 1.0


def _identity(entry: Interruption) -> tuple[int, int, str, str, bool]:
    return (entry.generation, entry.attempt, entry.time, entry.pod, entry.rung is Rung.IN_PLACE)
