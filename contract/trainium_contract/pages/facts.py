"""Describe a job in short lines for the plugin, pages and notebooks; a field of the status is shown by one line here.

`view.status` reads a field by its name in the resource; mypy checks the name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_contract.pages.formatting import (
    format_age,
    format_duration,
    format_large_number,
    format_number,
    format_percent,
    format_utc,
    pluralize,
)
from trainium_contract.views.interruptions import describe_loss

if TYPE_CHECKING:
    from trainium_contract.views.goodput import GoodputView
    from trainium_contract.views.job_view import JobView, RoleView

_BAR = 24
_HANG_DETECTION = {
    "Steps": "detected by steps that do not end",
    "Output": "detected by silence: no output, and neither processor nor device is used",
    "Off": "not detected: the program has printed nothing yet, or recovery.hang is disabled",
}
"""Sentence for each way to detect a hang of a program."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One line; a line without a value is left out."""

    label: str
    value: str
    warning: str = ""
    """Text after the value that deserves attention."""


def list_job_facts(view: JobView, *, ages: bool = True, with_bar: bool = False) -> tuple[Fact, ...]:
    """Describe the job's state; without `ages` by points in time.

    A live page then changes only when the job does.
    """
    checkpoints = view.checkpoints
    notice = "" if checkpoints.notice in view.advice else checkpoints.notice
    return (
        _build_phase_fact(view, ages=ages),
        Fact("Progress", _describe_progress(view, ages=ages, with_bar=with_bar)),
        Fact("Speed", _describe_speed(view)),
        Fact("Size", _describe_size(view)),
        Fact("Workers", _describe_workers(view)),
        *(Fact("Role", _describe_role(role), role.message) for role in view.roles if not view.ended),
        Fact("Hangs", _HANG_DETECTION.get(view.status.read_text("hangDetection"), "")),
        Fact("Checkpoint", _describe_checkpoint(view, ages=ages) if view.phase else ""),
        Fact("", "", notice),
        Fact("Goodput", format_goodput(view.goodput) if view.goodput.ratio is not None else ""),
        Fact("Interrupted", _describe_interruption(view)),
        *(Fact("Alert", "", f"{alert.kind}: {alert.text}") for alert in view.alerts),
    )


def format_step(view: JobView, *, ages: bool = True) -> str:
    """Return the newest step, with its age if no newer one was reported for long."""
    step = f"step {view.step}/{view.total_steps}" if view.total_steps else f"step {view.step}"
    if not view.step_is_old:
        return step
    return (
        f"{step} ({format_age(view.step_age_seconds)})"
        if ages
        else f"{step} (at {format_utc(view.step_reported_at)} UTC)"
    )


def format_bar(part: float, width: int) -> str:
    """Draw a share as a bar of this width."""
    full = round(max(0.0, min(1.0, part)) * width)
    return "━" * full + "╌" * (width - full)


def _build_phase_fact(view: JobView, *, ages: bool) -> Fact:
    parts = [view.phase or "no status yet"]
    if view.stage and view.stage != "Train":
        parts.append(f"{view.stage} {format_percent(view.stage_share)}")
    if view.phase == "Pending" and (wait := _describe_pending(view)):
        parts.append(wait)
    warnings = [f"(no news {_describe_age(view, ages=ages)})"] if view.stale else []
    if view.outdated and view.phase:
        warnings.append("(the operator has not answered the newest spec yet)")
    return Fact("Phase", ", ".join(parts), "  ".join(warnings))


def _describe_age(view: JobView, *, ages: bool) -> str:
    if ages or view.written_at is None:
        return f"for {view.written_seconds_ago or 0.0:.0f} s"
    return f"since {format_utc(view.written_at)} UTC"


def _describe_pending(view: JobView) -> str:
    """Return what a job that has not started waits for, if no action is required."""
    pods = next((condition for condition in view.conditions if condition.type == "PodsReady"), None)
    if pods is None:
        return ""
    if pods.status == "True":
        return f"{pods.message} and get ready: imports, checks of their node"
    return pods.message.rstrip(" .") if pods.reason == "WaitingForWorkers" else ""


def _describe_progress(view: JobView, *, ages: bool, with_bar: bool) -> str:
    if view.share is None:
        return format_step(view, ages=ages) if view.step else ""
    drawn = f"{format_bar(view.share, _BAR)}  " if with_bar else ""
    shows_eta = view.eta_seconds is not None and not view.stale
    remaining = f", {format_duration(view.eta_seconds)} left" if shows_eta else ""
    return f"{drawn}{100 * view.share:.1f} %  {format_step(view, ages=ages)}{remaining}"


def _describe_speed(view: JobView) -> str:
    parts = [f"loss {format_number(view.loss, 5)}"] if view.loss is not None else []
    parts += [f"{100 * view.reward_accuracy:.0f} % preferred"] if view.reward_accuracy is not None else []
    if not view.stale:
        parts += [f"{format_large_number(view.tokens_per_second)} tokens/s"] if view.tokens_per_second else []
        parts += [f"{format_number(view.samples_per_second, 3)} samples/s"] if view.samples_per_second else []
    parts += [f"{format_duration(view.step_seconds)} a step"] if view.step_seconds else []
    return ", ".join(parts)


def _describe_size(view: JobView) -> str:
    if not view.phase:
        return f"{view.requested} requested"
    parts = [f"{view.size} of {view.desired or view.requested} nodes"]
    if view.requested != view.desired and view.desired:
        parts.append(f"{view.requested} requested")
    parts += [f"{view.data_parallel} data-parallel"] if view.data_parallel and view.size else []
    parts += [pluralize(view.spares, "spare")] if view.spares else []
    parts += [f"generation {view.generation}.{view.attempt}"] if view.generation else []
    return ", ".join(parts)


def _describe_workers(view: JobView) -> str:
    if view.workers is None:
        return f"{view.training} train" if view.phase else ""
    parts = [f"{view.training} train"] if view.size else []
    for label, counts in (("members", view.workers.members), ("others" if view.size else "pods", view.workers.others)):
        parts += [f"{label}: {', '.join(f'{n} {state}' for state, n in sorted(counts.items()))}"] if counts else []
    unwell = [f"{row.name} {row.state}" + (f" on {row.node}" if row.node else "") for row in view.workers.unhealthy]
    more = f" ({', '.join(unwell[:3])}{', …' if len(unwell) > 3 else ''})" if unwell and not view.ended else ""
    return "; ".join(parts) + more


def _describe_role(role: RoleView) -> str:
    parts = [f"{role.name}: {role.ready} of {pluralize(role.replicas, 'pod')} ready"]
    parts += [f"training waits for {role.min_ready}"] if role.ready < role.min_ready and role.replicas else []
    parts += [f"{role.restarts} replaced"] if role.restarts else []
    return ", ".join(parts)


def _describe_checkpoint(view: JobView, *, ages: bool) -> str:
    durable, memory = view.checkpoints.durable_step, view.checkpoints.memory_step
    if not view.has_known_checkpoints:
        return "not known: spec.program.checkpoints is not given"
    age = f", {format_age(view.checkpoints.durable_age_seconds)}".rstrip(", ") if ages else ""
    kept = "none on storage" if durable is None else f"step {durable} on storage{age}"
    return kept + (f"; step {memory} in memory" if memory is not None else "")


def format_goodput(goodput: GoodputView) -> str:
    """Format as `88.1 % of 2m43s; lost 19s: Crash 12s`, with the causes that lost most."""
    if goodput.ratio is None:
        return "not known"
    worst = [
        f"{describe_loss(cause)} {format_duration(seconds)}"
        for cause, seconds in goodput.lost_seconds.items()
        if seconds >= 0.5
    ][:3]
    lost = f"; lost {format_duration(goodput.lost)}: {', '.join(worst)}" if worst else ""
    return f"{format_percent(goodput.ratio)} of {format_duration(goodput.wall_seconds)}{lost}"


def _describe_interruption(view: JobView) -> str:
    if not view.phase:
        return ""
    causes = ", ".join(f"{cause} {int(n)}" for cause, n in sorted(view.restarts_by_cause.items()))
    times = "never" if not view.restarts else "once" if view.restarts == 1 else f"{view.restarts} times"
    return times + (f" ({causes})" if causes else "")
