"""`status`: a job on one screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from trainium_client.render.page import Column, bar, heading, labelled, listed, stacked, table, word
from trainium_contract.pages.formatting import ago, clock, count, duration, figure, plural, share, shortened, size
from trainium_contract.program_output import telling

if TYPE_CHECKING:
    from rich.console import RenderableType

    from trainium_contract.views.events import EventView
    from trainium_contract.views.interruptions import InterruptionView
    from trainium_contract.views.job import JobView

_EVENTS = 5
_NARROW = 60
_LONGEST = 300
"""Of an event, so that it fits a screen; the operator's own end with what to do within this."""


def status_page(view: JobView, *, now: float, width: int) -> RenderableType:
    """The screen."""
    # Alerts have rows of their own; each time that one comes again would push out what else happened.
    alerts = {each.kind for each in view.alerts}
    happened = tuple(each for each in view.events if each.reason not in alerts)
    return stacked(
        labelled(_rows(view, now, width)),
        *_events(happened[:_EVENTS], now, width),
        *_advice(view),
        *_not_shown(view),
    )


def status_line(view: JobView) -> str:
    """One line, for a log of changes."""
    parts = [view.phase or "no status"]
    parts += [view.stage] if view.stage not in {"", "Train"} else []
    parts += [(f"step {view.step}/{view.total_steps}" if view.total_steps else f"step {view.step}") + _step_age(view)]
    parts += [f"loss {figure(view.loss)}"] if view.loss is not None else []
    size = view.size or view.desired or view.requested
    parts += [f"{view.training}/{size} workers", plural(view.restarts, "interruption")]
    return ", ".join(parts)


def _rows(view: JobView, now: float, width: int) -> list[tuple[str, str | Text]]:
    checkpoints, goodput = view.checkpoints, view.goodput
    durable = "none on storage"
    if checkpoints.durable_step is not None:
        durable = f"step {checkpoints.durable_step} on storage, {ago(checkpoints.durable_age_seconds)}".rstrip(", ")
    memory = f"; step {checkpoints.memory_step} in memory" if checkpoints.memory_step is not None else ""
    return [
        ("Job", f"{view.namespace}/{view.name}, {view.model}, {duration(view.age_seconds)} old"),
        ("Phase", _phase(view)),
        ("Progress", _progress(view, width)),
        ("Speed", _speed(view)),
        ("Size", _size(view)),
        ("Workers", _workers(view)),
        ("Checkpoint", durable + memory if view.phase else ""),
        ("", Text("" if checkpoints.notice in view.advice else checkpoints.notice, "yellow")),
        ("Goodput", _goodput(view) if goodput.ratio is not None else ""),
        ("Interrupted", _interrupted(view)),
        ("Stopped" if view.last and view.last.stopped else "Last", _last(view.last, now) if view.last else ""),
        *(("Alert", Text(f"{each.kind}: {each.told}", "yellow")) for each in view.alerts),
        *(("Artifact", f"{a.kind} of step {a.step}: {a.path} ({size(a.bytes)})") for a in view.artifacts),
        *(("Evaluation", f"{f.name} {figure(f.before)} -> {figure(f.after)}") for f in view.evaluation),
    ]


def _phase(view: JobView) -> Text:
    said = word(view.phase or "not answered yet")
    if view.stage and view.stage != "Train":
        said.append(f", {view.stage} {share(view.stage_share)}")
    if view.phase == "Pending" and (wait := _wait(view)):
        said.append(f", {wait}")
    if view.stale:
        said.append(f"  (as of {ago(view.written_seconds_ago)})", "yellow")
    if view.outdated and view.phase:
        said.append("  (the operator has not answered the newest spec yet)", "yellow")
    return said


def _wait(view: JobView) -> str:
    """What a job that has not begun waits for, where nobody needs to do anything about it."""
    pods = next((each for each in view.conditions if each.type == "PodsReady"), None)
    if pods is None:
        return ""
    if pods.status == "True":
        return f"{pods.message} and get ready: imports, checks of their node"
    return pods.message.rstrip(" .") if pods.reason == "WaitingForWorkers" else ""


def _progress(view: JobView, width: int) -> str:
    if view.share is None:
        return f"step {view.step}{_step_age(view)}" if view.step else ""
    drawn = f"{bar(view.share, 24)}  " if width >= _NARROW else ""
    eta = f", {duration(view.eta_seconds)} left" if view.eta_seconds is not None else ""
    return f"{drawn}{100 * view.share:.1f} %  step {view.step}/{view.total_steps}{_step_age(view)}{eta}"


def _step_age(view: JobView) -> str:
    return f" ({ago(view.step_age_seconds)})" if view.step_is_old else ""


def _speed(view: JobView) -> str:
    parts = [f"loss {figure(view.loss, 5)}"] if view.loss is not None else []
    parts += [f"{count(view.tokens_per_second)} tokens/s"] if view.tokens_per_second else []
    parts += [f"{duration(view.step_seconds)} a step"] if view.step_seconds else []
    return ", ".join(parts)


def _size(view: JobView) -> str:
    if not view.phase:
        return f"{view.requested} asked for"
    parts = [f"{view.size} of {view.desired or view.requested} nodes"]
    if view.requested != view.desired and view.desired:
        parts.append(f"{view.requested} asked for")
    parts += [f"{view.data_parallel} data-parallel"] if view.data_parallel else []
    parts += [plural(view.spares, "spare")] if view.spares else []
    parts += [f"generation {view.generation}.{view.attempt}"] if view.generation else []
    return ", ".join(parts)


def _workers(view: JobView) -> str:
    if view.workers is None:
        return f"{view.training} train" if view.phase else ""
    members = ", ".join(f"{n} {state}" for state, n in sorted(view.workers.members.items()))
    others = ", ".join(f"{n} {state}" for state, n in sorted(view.workers.others.items()))
    said = f"{view.training} train" if view.size else ""
    said += f"{'; ' if said else ''}members: {members}" if members else ""
    said += f"{'; ' if said else ''}{'others' if view.size else 'pods'}: {others}" if others else ""
    unwell = [f"{row.name} {row.state}" + (f" on {row.node}" if row.node else "") for row in view.workers.not_well]
    return said + (f" ({', '.join(unwell[:3])}{', …' if len(unwell) > 3 else ''})" if unwell and not view.ended else "")


def _goodput(view: JobView) -> str:
    goodput = view.goodput
    worst = [f"{cause} {duration(seconds)}" for cause, seconds in goodput.lost_seconds.items() if seconds >= 0.5][:3]
    lost = f"; lost {duration(goodput.lost)}: {', '.join(worst)}" if worst else ""
    return f"{share(goodput.ratio)} of {duration(goodput.wall_seconds)}{lost}"


def _interrupted(view: JobView) -> str:
    if not view.phase:
        return ""
    causes = ", ".join(f"{cause} {int(n)}" for cause, n in sorted(view.restarts_by_cause.items()))
    times = "never" if not view.restarts else "once" if view.restarts == 1 else f"{view.restarts} times"
    return times + (f" ({causes})" if causes else "")


def _last(entry: InterruptionView, now: float) -> str:
    who = f" on {entry.pod or entry.node}" if entry.pod or entry.node else ""
    when = f", {ago(max(0.0, now - entry.at))}" if entry.at is not None else ""
    if entry.stopped:
        return f"{entry.cause}{who}{when}"
    lost = f", {plural(entry.steps_lost, 'step')} lost" if entry.steps_lost else ""
    took = "under way" if entry.open else f"{duration(entry.recovered_seconds)}{lost}"
    return f"{entry.cause}{who}{when}: {entry.answer} ({took})"


def _events(events: tuple[EventView, ...], now: float, width: int) -> list[RenderableType]:
    if not events:
        return []
    columns = (Column("AGE", 6, right=True), Column("REASON", 8), Column("MESSAGE", 9, fold=True))
    rows = [
        (duration(max(0.0, now - each.at)), Text(each.reason, "yellow" if each.warning else ""),
         shortened(telling(each.message), _LONGEST) + (f" (x{each.count})" if each.count > 1 else ""))
        for each in events
    ]  # fmt: skip
    return [heading("What happened last"), table(columns, rows, width)]


def _advice(view: JobView) -> list[RenderableType]:
    return [heading("What to do"), listed(view.advice)] if view.advice else []


def _not_shown(view: JobView) -> list[RenderableType]:
    return [heading("Not shown"), listed(view.not_shown, style="dim")] if view.not_shown else []


def moment(at: float | None) -> str:
    """A moment for a table."""
    return clock(at)[5:] or "-"
