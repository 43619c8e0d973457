"""Account for the time of a job, by the definitions of docs/goodput.md.

Wall time runs while a generation is in force. Productive time is the steps of the final history at the reference step
time (`step_time`). The time of an interruption, from the failure to the first new step less that step's reference time,
is lost to its cause and stages. Time before the first step is start-up; the rest is overhead. Time in the stages after
the last step (Export, Evaluate) is set aside, less the time that faults took of it.

Guarantees:
- Productive and lost seconds together are the wall time; overlapping interruptions lose their time once.
- The ends of an interruption's stages never decrease; an unknown one belongs to the stage before it.
- Everything follows from the status and the observation: another operator continues where the last one stopped, and a
  repeated plan adds nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.pages.formatting import format_percent
from trainium_contract.status.interruptions import Interruption, RecoveryResponse
from trainium_contract.status.ledger import DOWN_STAGES, OVERHEAD, STAGES, STARTUP, StageSeconds
from trainium_operator.plan.history.interruptions import get_identity
from trainium_operator.plan.report.step_time import (
    compute_productive_seconds,
    count_steps,
    find_reference_seconds,
    sample_step_time,
)
from trainium_operator.plan.view.progress import is_past_steps

if TYPE_CHECKING:
    from trainium_contract.job import GoodputStatus, TrainingJobStatus
    from trainium_operator.plan.view.context import PlanContext


def split_by_stage(context: PlanContext, entry: Interruption, start: float, end: float) -> StageSeconds:
    """Return the seconds of this interruption from `start` to `end` (Unix seconds), by stage."""
    seconds, at = {}, start
    for stage, ended in zip(STAGES, (*_list_stage_ends(context, entry, end), end), strict=True):
        until = min(max(at, ended), end)
        seconds[stage] = round(until - at, 3)
        at = until
    return StageSeconds(**seconds)


def _list_stage_ends(context: PlanContext, entry: Interruption, end: float) -> tuple[float, ...]:
    """Return when all stages but the last ended; `end` for one that has not, or whose end is unknown."""
    failed_at = entry.failed_at if entry.failed_at is not None else end
    detected = failed_at + (entry.detected_seconds or 0.0)
    decided = detected if entry.response is RecoveryResponse.IN_PLACE else entry.decided_at
    if decided is None:
        return detected, end, end, end, end
    started, loaded = _start_and_load_times(context, entry)
    compiled = end if _is_compiling(context) else loaded + (entry.stages.compile if entry.stages else 0.0)
    return detected, decided, started or loaded or end, loaded or end, compiled


def _is_compiling(context: PlanContext) -> bool:
    """Return whether a job that compiles ahead has made no step yet at a size that it has not compiled."""
    compiled_sizes = context.job.status.compiled.sizes or context.size.compiled_first
    return bool(context.job.spec.workload.compile_command) and len(context.members) not in compiled_sizes


def _start_and_load_times(context: PlanContext, entry: Interruption) -> tuple[float, float]:
    """Return when the slowest member's processes had started, and had loaded, in a later attempt.

    0 while not all have reported it. Once an interruption is over, each report counts, because the heartbeat that ended
    it was the first of several.
    """
    reports = [
        heartbeat.progress
        for _, heartbeat in context.heartbeats
        if heartbeat.progress is not None
        and (heartbeat.generation, heartbeat.attempt) > (entry.generation, entry.attempt)
    ]
    is_over = entry.recovered_seconds is not None
    if not is_over and len(reports) < len(context.members):
        return 0.0, 0.0
    return _find_latest_time([report.started for report in reports], over=is_over), _find_latest_time(
        [report.loaded for report in reports], over=is_over
    )


def _find_latest_time(times: list[float], *, over: bool) -> float:
    return max(times, default=0.0) if over or all(times) else 0.0


_MAX_STAGES = 8


def update_goodput(context: PlanContext, status: TrainingJobStatus) -> TrainingJobStatus:
    """Update the ledger; call when this plan's changes of the history are complete."""
    goodput = status.goodput
    held_nodes, is_running = _count_held_nodes(context), context.current is not None
    if not is_running and not held_nodes:
        return status.replaced(goodput=goodput.replaced(accounted_until=None, starting=True))
    since = goodput.accounted_until if goodput.accounted_until is not None else context.now
    passed_seconds = max(0.0, context.now - since)
    node_seconds = goodput.node_seconds + passed_seconds * held_nodes
    goodput = goodput.replaced(accounted_until=context.now, node_seconds=round(node_seconds, 3))
    if not is_running:
        goodput = _charge_wait_for_start(context, goodput.replaced(starting=True), passed_seconds)
        return status.replaced(goodput=_compute_totals(context, goodput, pending=0.0))
    old = context.job.status
    # A fault that is detected late began in the time set aside for a stage, which stays open until all is charged.
    aside_seconds = sum(goodput.stage_seconds.values()) if is_past_steps(old) else 0.0
    wall_seconds = round(goodput.wall_seconds + aside_seconds + passed_seconds, 3)
    goodput = goodput.replaced(wall_seconds=wall_seconds)
    is_interrupted, is_starting = bool(status.list_open_interruptions()), goodput.starting
    recent_stage_seconds = 0.0 if is_interrupted else _measure_recent_stage(context, passed_seconds)
    goodput = _charge_startup(context, goodput, 0.0 if is_interrupted else passed_seconds - recent_stage_seconds)
    lost_before = _sum_lost_seconds(goodput)
    goodput, history = _charge_interruptions(context, status.history, goodput, passed_seconds if is_starting else None)
    stage_seconds = aside_seconds + passed_seconds - (_sum_lost_seconds(goodput) - lost_before)
    was_interrupted = bool(old.list_open_interruptions())
    if is_starting or not is_past_steps(old) or was_interrupted:
        stage_seconds = min(stage_seconds, aside_seconds + recent_stage_seconds)
    goodput = _set_stage_seconds(
        goodput,
        old.stage if is_past_steps(old) else _find_current_stage(context),
        max(0.0, stage_seconds),
        aside_seconds,
        held_nodes,
    )
    is_undisturbed = not (is_interrupted or was_interrupted or is_starting or _find_current_stage(context))
    goodput = sample_step_time(context, goodput, clean=is_undisturbed)
    pending_seconds = _measure_current_step(context, goodput) if is_undisturbed else 0.0
    totals = _compute_totals(context, goodput, pending=pending_seconds)
    if is_undisturbed and (cause := _find_waiting_cause(context)):
        totals = _charge_waiting(context, totals, cause, old.goodput, pending=pending_seconds)
    return status.replaced(goodput=totals, history=history)


def _find_waiting_cause(context: PlanContext) -> str:
    """Return the key for time without steps now; empty if a feature waits for nothing."""
    return next(filter(None, (feature.find_waiting_cause(context) for feature in context.features)), "")


def _charge_wait_for_start(context: PlanContext, goodput: GoodputStatus, passed_seconds: float) -> GoodputStatus:
    """Charge the time in which enough warm workers wait for something else before they begin."""
    cause = _find_waiting_cause(context)
    if not cause or len(context.candidates) < context.job.status.desired or not context.candidates:
        return goodput
    wall_seconds = round(goodput.wall_seconds + passed_seconds, 3)
    return _add_waiting(goodput.replaced(wall_seconds=wall_seconds), cause, passed_seconds)


def _charge_waiting(
    context: PlanContext, goodput: GoodputStatus, cause: str, before: GoodputStatus, *, pending: float
) -> GoodputStatus:
    """Move the overhead that was added while a feature waited to its cause."""
    seconds = goodput.lost_seconds.get(OVERHEAD, 0.0) - before.lost_seconds.get(OVERHEAD, 0.0)
    return _compute_totals(context, _add_waiting(goodput, cause, seconds), pending=pending) if seconds > 0 else goodput


def _add_waiting(goodput: GoodputStatus, cause: str, seconds: float) -> GoodputStatus:
    lost_seconds, by_stage = dict(goodput.lost_seconds), dict(goodput.lost_by_stage)
    lost_seconds[cause] = by_stage[cause] = round(lost_seconds.get(cause, 0.0) + seconds, 3)
    return goodput.replaced(lost_seconds=_drop_zeros(lost_seconds), lost_by_stage=_drop_zeros(by_stage))


def _find_current_stage(context: PlanContext) -> str:
    """Return the stage after the last step that the ranks are in; empty for none."""
    progress = context.newest_progress
    return "" if progress is None or progress.training else progress.stage


def _measure_recent_stage(context: PlanContext, passed: float) -> float:
    """Return how much of the last `passed` seconds the ranks were in their present stage."""
    progress = context.newest_progress
    if progress is None or progress.training:
        return 0.0
    return min(passed, max(0.0, context.now - progress.stage_since)) if progress.stage_since else passed


def _set_stage_seconds(goodput: GoodputStatus, stage: str, seconds: float, before: float, held: int) -> GoodputStatus:
    """Subtract the stages' seconds, of which `before` are known, from the wall time.

    More go to `stage`, fewer from all.
    """
    stages = dict(goodput.stage_seconds)
    if seconds < before:
        stages = {name: passed * seconds / before for name, passed in stages.items()}
    elif stage in stages or len(stages) < _MAX_STAGES:
        stages[stage] = stages.get(stage, 0.0) + seconds - before
    else:
        seconds = before
    return goodput.replaced(
        stage_seconds=_drop_zeros({name: round(passed, 3) for name, passed in stages.items()}),
        wall_seconds=round(max(0.0, goodput.wall_seconds - seconds), 3),
        node_seconds=round(max(0.0, goodput.node_seconds - (seconds - before) * held), 3),
    )


def _count_held_nodes(context: PlanContext) -> int:
    """Return the nodes that this job's pods hold, spares included, and those in quarantine because of it."""
    held_nodes = {worker.pod.node for worker in context.workers.values() if worker.pod.node and worker.holds_node}
    return len(held_nodes | (context.observed.fleet.quarantined & set(context.job.status.avoided_nodes)))


def _charge_startup(context: PlanContext, goodput: GoodputStatus, passed: float) -> GoodputStatus:
    """Charge time to start-up until a new step is seen, without the time after the end of that step.

    A program without steps has started when all of its processes run. If steps follow later, as after a compilation,
    all time that was not lost until then was start-up.
    """
    starting, is_first = (
        goodput.starting,
        not any(account.steps for account in goodput.sizes) and not goodput.earlier_seconds,
    )
    goodput, steps, ended_at = count_steps(context, goodput)
    if not starting and is_first and steps and not context.job.spec.workload.reports_each_step:
        starting, passed = True, max(passed, goodput.wall_seconds - _sum_lost_seconds(goodput))
    if not starting:
        return goodput
    lost_seconds = goodput.lost_seconds.get(STARTUP, 0.0) + passed
    if steps and passed:
        seconds_after = min(passed, max(0.0, context.now - ended_at)) if ended_at else 0.0
        lost_seconds -= seconds_after + steps * _find_reference_step_seconds(context, goodput)
    return _set_loss(goodput, STARTUP, max(0.0, lost_seconds), StageSeconds(), startup=True).replaced(
        starting=not steps and not _find_current_stage(context) and context.steady_time is None
    )


def _charge_interruptions(
    context: PlanContext, history: tuple[Interruption, ...], goodput: GoodputStatus, starting: float | None
) -> tuple[GoodputStatus, tuple[Interruption, ...]]:
    """Charge the loss of each interruption so far; one that an earlier plan closed is settled.

    `starting`: seconds since the last account, if no step had been made by then.
    """
    status = context.job.status
    closed = [closed_entry for closed_entry in status.history if not closed_entry.is_open]
    settled = {get_identity(closed_entry) for closed_entry in closed if closed_entry.stages is not None}
    charged = list(history)
    covered_until = 0.0
    for index in sorted(range(len(history)), key=lambda index: history[index].failed_at or 0.0):
        entry = history[index]
        if entry.failed_at is None or entry.response is RecoveryResponse.STOP:
            continue
        ended_at = context.now if entry.is_open else entry.failed_at + (entry.recovered_seconds or 0.0)
        if get_identity(entry) not in settled:
            start = max(entry.failed_at, covered_until)
            stages = split_by_stage(
                context, entry, start, max(start, ended_at - _estimate_first_step_seconds(context, goodput, entry))
            )
            goodput, stages = _charge_interruption(goodput, entry, stages, starting)
            charged[index] = entry.replaced(stages=stages)
        covered_until = max(covered_until, ended_at)
    return goodput, tuple(charged)


def _estimate_first_step_seconds(context: PlanContext, goodput: GoodputStatus, entry: Interruption) -> float:
    """Return the reference time of the step that ended an interruption: it is productive; 0 without such a step."""
    if entry.is_open or context.job.spec.suspend or _find_current_stage(context):
        return 0.0
    return _find_reference_step_seconds(context, goodput)


def _charge_interruption(
    goodput: GoodputStatus, entry: Interruption, stages: StageSeconds, starting: float | None
) -> tuple[GoodputStatus, StageSeconds]:
    """Add the uncharged loss of an interruption; never more than the wall time allows."""
    charged = entry.stages or StageSeconds()
    added_seconds = stages.total - charged.total
    startup_seconds = goodput.lost_seconds.get(STARTUP, 0.0)
    if starting is not None and startup_seconds > 0 and added_seconds > starting:
        # Until it was known, its time counted as start-up.
        goodput = _set_loss(
            goodput, STARTUP, startup_seconds - (added_seconds - starting), StageSeconds(), startup=True
        )
    unlost_seconds = goodput.wall_seconds - _sum_lost_seconds(goodput)
    if added_seconds > unlost_seconds + 0.001 and stages.total > 0:
        fraction = max(0.0, unlost_seconds + charged.total) / stages.total
        stages = StageSeconds(**{name: round(getattr(stages, name) * fraction, 3) for name in STAGES})
        added_seconds = stages.total - charged.total
    delta = StageSeconds(**{name: getattr(stages, name) - getattr(charged, name) for name in STAGES})
    total = goodput.lost_seconds.get(entry.cause.value, 0.0) + added_seconds
    return _set_loss(goodput, entry.cause.value, total, delta), stages


def _set_loss(
    goodput: GoodputStatus, key: str, seconds: float, stages: StageSeconds, *, startup: bool = False
) -> GoodputStatus:
    lost_seconds, by_stage = dict(goodput.lost_seconds), dict(goodput.lost_by_stage)
    lost_seconds[key] = round(max(0.0, seconds), 3)
    if startup:
        by_stage[STARTUP] = lost_seconds[key]
    for name in STAGES:
        stage_seconds = getattr(stages, name)
        if stage_seconds:
            stage = name.capitalize()
            by_stage[stage] = round(max(0.0, by_stage.get(stage, 0.0) + stage_seconds), 3)
    return goodput.replaced(lost_seconds=_drop_zeros(lost_seconds), lost_by_stage=_drop_zeros(by_stage))


def _drop_zeros(seconds: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in seconds.items() if value > 0}


def _sum_lost_seconds(goodput: GoodputStatus) -> float:
    return sum(value for key, value in goodput.lost_seconds.items() if key != OVERHEAD)


def _find_reference_step_seconds(context: PlanContext, goodput: GoodputStatus) -> float:
    """Return the reference step time at the current size; 0 while there is none."""
    return find_reference_seconds(goodput, len(context.members), context.job.spec.batch_shape()) or 0.0


def _measure_current_step(context: PlanContext, goodput: GoodputStatus) -> float:
    """Return the seconds of the current step, at most the reference."""
    ended = goodput.window.at
    if goodput.starting or ended is None or _find_current_stage(context):
        return 0.0
    return min(max(0.0, context.now - ended), _find_reference_step_seconds(context, goodput))


def _compute_totals(context: PlanContext, goodput: GoodputStatus, *, pending: float) -> GoodputStatus:
    """Compute sums and ratios; `pending` seconds belong to the current step."""
    wall_seconds, lost_seconds = goodput.wall_seconds, _sum_lost_seconds(goodput)
    available = max(0.0, wall_seconds - lost_seconds)
    size = len(context.members)
    step_totals = compute_productive_seconds(goodput, context.job.spec.batch_shape())
    if step_totals is None:
        productive, node_productive = available, available * size
    else:
        seconds, node_seconds = step_totals
        productive = min(available, seconds + pending)
        total_seconds = seconds + pending
        node_productive = (node_seconds + pending * size) * (productive / total_seconds if total_seconds > 0 else 0.0)
    overhead = round(available - productive, 3)
    by_cause = {key: value for key, value in goodput.lost_seconds.items() if key != OVERHEAD}
    by_stage = {key: value for key, value in goodput.lost_by_stage.items() if key != OVERHEAD}
    is_known = step_totals is not None or context.job.spec.workload.reports_each_step
    down_seconds = sum(by_stage.get(stage, 0.0) for stage in DOWN_STAGES)
    ratio = _compute_ratio(productive, wall_seconds) if is_known else None
    return goodput.replaced(
        productive_seconds=round(productive, 3),
        lost_seconds=_drop_zeros({**by_cause, OVERHEAD: overhead}),
        lost_by_stage=_drop_zeros({**by_stage, OVERHEAD: overhead}),
        ratio=ratio,
        percent="" if ratio is None or not wall_seconds else format_percent(ratio),
        uptime_ratio=_compute_ratio(wall_seconds - down_seconds, wall_seconds),
        fleet_ratio=_compute_ratio(node_productive, goodput.node_seconds) if is_known else None,
    )


def _compute_ratio(part: float, total: float) -> float:
    return round(min(1.0, max(0.0, part / total)), 4) if total > 0 else 1.0
