"""Pages that are tables: history, goodput, sizes, ranks, checkpoints, machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from trainium_client.render.page import Column, render_heading, render_labels, render_table, stack_items, style_word
from trainium_contract.pages.facts import format_bar
from trainium_contract.pages.formatting import (
    format_age,
    format_bytes,
    format_duration,
    format_number,
    format_percent,
    format_utc,
    shorten,
)
from trainium_contract.program_output import drop_noise
from trainium_contract.views.interruptions import describe_loss

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

    from trainium_client.views.machines import MachineView
    from trainium_client.views.sizes import ScalingRow, SizeRow
    from trainium_contract.pages.jobs_page import JobRow
    from trainium_contract.views.checkpoints import CheckpointRow
    from trainium_contract.views.goodput import CostView, GoodputView, SizeView
    from trainium_contract.views.interruptions import InterruptionView
    from trainium_contract.views.job_view import JobView
    from trainium_contract.views.workers import RankRow

_BAR_WIDTH = 20
_MAX_EVIDENCE_LENGTH = 160
"""Limit of the evidence; `why --entry` shows all of it."""


def render_jobs(rows: Sequence[JobRow], width: int, *, where: str, with_namespace: bool) -> RenderableType:
    """Render the list of jobs."""
    if not rows:
        return Text(f"{where} has no TrainingJobs" + ("" if with_namespace else "; -A lists those of all namespaces"))
    columns: list[Column[JobRow]] = [
        Column("NAMESPACE", lambda row: row.namespace, 9),
        Column("NAME", lambda row: row.name, 9),
        Column("PHASE", lambda row: style_word(row.phase or "-"), 9),
        Column("STEP", lambda row: row.progress, 8, right=True),
        Column("LOSS", lambda row: format_number(row.loss), 7, right=True),
        Column("NODES", lambda row: f"{row.training} of {row.desired}", 6, right=True),
        Column("GOODPUT", lambda row: format_percent(row.goodput), 5, right=True),
        Column("INTERRUPTED", lambda row: str(row.restarts), 4, right=True),
    ]
    return render_table(columns if with_namespace else columns[1:], rows, width)


def render_history(entries: Sequence[InterruptionView], width: int) -> RenderableType:
    """Render the interruptions, oldest first, with the number that `why --entry` takes."""
    if not entries:
        return Text("nothing has interrupted this job")
    columns: list[Column[tuple[int, InterruptionView]]] = [
        Column("#", lambda row: str(row[0]), 9, right=True),
        Column("TIME", lambda row: format_utc(row[1].at)[5:], 6),
        Column("CAUSE", lambda row: row[1].cause, 9),
        Column("RESPONSE", lambda row: row[1].response, 8),
        Column("WORKER", lambda row: row[1].pod or "-", 5),
        Column("NODE", lambda row: row[1].node or "-", 3),
        Column("SECONDS", lambda row: _format_recovery(row[1]), 7, right=True),
        Column("LOST", lambda row: _format_optional(row[1].steps_lost), 6, right=True),
        Column("SEEN", lambda row: shorten(drop_noise(row[1].message), _MAX_EVIDENCE_LENGTH), 2, fold=True),
    ]
    return render_table(columns, enumerate(entries, 1), width)


def _format_recovery(entry: InterruptionView) -> str:
    if entry.stopped:
        return "-"
    return "open" if entry.open else format_number(entry.recovered_seconds, 3)


def _format_optional(value: int | None) -> str:
    return "-" if value is None else str(value)


def render_goodput(goodput: GoodputView, width: int) -> RenderableType:
    """Render the time spent by cause, stage and size."""
    if goodput.ratio is None:
        if goodput.wall_seconds:
            return Text("the goodput is not known: the program has reported no step")
        return Text("nothing is counted yet: no workers have started together")
    after_training = ", ".join(f"{name} {format_duration(seconds)}" for name, seconds in goodput.stage_seconds.items())
    figures = [
        ("Goodput", f"{format_percent(goodput.ratio)} of {format_duration(goodput.wall_seconds)} (strict)"),
        ("Uptime", format_percent(goodput.uptime_ratio)),
        ("Fleet", f"{format_percent(goodput.fleet_ratio)} of {goodput.node_seconds / 3600:.1f} node hours"),
        ("Cost", _format_cost(goodput.cost)),
        ("After steps", after_training),
    ]
    ledger = [render_labels(figures), render_heading("Where the time went"), _render_causes(goodput, width)]
    if goodput.lost_by_stage:
        ledger += [render_heading("What was lost, by stage"), _render_stages(goodput, width)]
    if goodput.sizes:
        columns: list[Column[SizeView]] = [
            Column("NODES", lambda row: str(row.size), 9, right=True),
            Column("STEPS", lambda row: str(row.steps), 8, right=True),
            Column("STEP TIME", lambda row: format_duration(row.step_seconds), 7, right=True),
        ]
        ledger += [render_heading("Steps by size"), render_table(columns, goodput.sizes, width)]
    return stack_items(*ledger)


def _render_stages(goodput: GoodputView, width: int) -> RenderableType:
    """Render the lost seconds by stage, the longest first."""
    lost = sum(goodput.lost_by_stage.values()) or 1.0
    columns: list[Column[tuple[str, float]]] = [
        Column("STAGE", lambda row: describe_loss(row[0]), 9),
        Column("SECONDS", lambda row: f"{row[1]:.1f}", 8, right=True),
        Column("OF LOST", lambda row: format_percent(row[1] / lost), 7, right=True),
        Column("", lambda row: format_bar(row[1] / lost, _BAR_WIDTH), 1),
    ]
    stages = sorted(goodput.lost_by_stage.items(), key=lambda item: -item[1])
    return render_table(columns, stages, width)


def _format_cost(cost: CostView | None) -> str:
    if cost is None:
        return ""
    remaining = "" if cost.to_end is None else f", {cost.to_end:,.2f} more until the last step at the present size"
    return f"{cost.so_far:,.2f} so far{remaining}"


def _render_causes(goodput: GoodputView, width: int) -> RenderableType:
    """Render the seconds by cause, with their cost if known."""
    wall, cost = goodput.wall_seconds or 1.0, goodput.cost
    seconds = {"productive": goodput.productive_seconds, **goodput.lost_seconds}
    amounts: Mapping[str, float] = {} if cost is None else {"productive": cost.productive, **cost.lost}
    columns: list[Column[tuple[str, float | None, float | None]]] = [
        Column("CAUSE", lambda row: describe_loss(row[0]), 9),
        Column("SECONDS", lambda row: "" if row[1] is None else f"{row[1]:.1f}", 8, right=True),
        Column("SHARE", lambda row: "" if row[1] is None else format_percent(row[1] / wall), 7, right=True),
        Column("COST", lambda row: "" if row[2] is None else f"{row[2]:,.2f}", 8, right=True),
        Column("", lambda row: "" if row[1] is None else format_bar(row[1] / wall, _BAR_WIDTH), 1),
    ]
    rows: list[tuple[str, float | None, float | None]] = [
        (name, value, amounts.get(name)) for name, value in seconds.items()
    ]
    if cost is None:
        return render_table([*columns[:3], columns[4]], rows, width)
    return render_table(columns, [*rows, ("idle nodes", None, cost.idle)], width)


def render_scaling(rows: Sequence[ScalingRow], width: int) -> RenderableType:
    """Render the speed by number of nodes, the smallest first."""
    if not rows:
        return Text("no step time was measured yet: the job has to train for some steps")
    columns: list[Column[ScalingRow]] = [
        Column("NODES", lambda row: str(row.nodes), 9, right=True),
        Column("STEPS", lambda row: f"{row.steps:,}", 4, right=True),
        Column("STEP TIME", lambda row: format_duration(row.step_seconds), 7, right=True),
        Column("SAMPLES/S", lambda row: format_number(row.samples_per_second), 8, right=True),
        Column("SPEEDUP", lambda row: _format_factor(row.speedup), 6, right=True),
        Column("EFFICIENCY", lambda row: format_percent(row.efficiency), 8, right=True),
        Column("", lambda row: "now" * row.current, 3),
    ]
    speeds = render_table(columns, rows, width)
    if any(row.samples_per_second is None for row in rows):
        return stack_items(speeds, Text("Give program.batch, so that the samples of a step are known."))
    return speeds


def _format_factor(factor: float | None) -> str:
    return "-" if factor is None else f"x{factor:.2f}"


def render_sizes(rows: Sequence[SizeRow], width: int) -> RenderableType:
    """Render the comparison of numbers of nodes, the largest first."""
    if not rows:
        return Text("no number of nodes between workers.minReplicas and maxReplicas is whole model-parallel groups")
    columns: list[Column[SizeRow]] = [
        Column("NODES", _format_node_range, 9, right=True),
        Column("TRAIN", lambda row: str(row.trains), 8, right=True),
        Column("PASSES", lambda row: str(row.micro_batches), 6, right=True),
        Column("SAMPLES", lambda row: f"{row.batch:,}", 2, right=True),
        Column("SPEED", lambda row: format_percent(row.speed), 7, right=True),
        Column("ROWS FILLED", lambda row: format_percent(row.fill_ratio), 3, right=True),
        Column("STEP TIME", lambda row: format_duration(row.step_seconds), 4, right=True),
        Column("GRAPHS", lambda row: {True: "ready", False: "none", None: "-"}[row.compiled], 1),
        Column("", lambda row: " ".join(["now"] * row.current + ["idle nodes"] * row.uses_idle_nodes), 5),
    ]
    size_table = render_table(columns, rows, width)
    idle = next((row for row in rows if row.idle_ranks), None)
    return size_table if idle is None else stack_items(size_table, Text(_explain_idle_ranks(idle)))


def _format_node_range(row: SizeRow) -> str:
    return str(row.min_nodes) if row.min_nodes == row.max_nodes else f"{row.min_nodes}-{row.max_nodes}"


def _explain_idle_ranks(row: SizeRow) -> str:
    """Return why a size is slower than its nodes allow; the largest such size is the worst."""
    return (
        f"At {row.trains} nodes the batch of {row.batch:,} samples is smaller than the data-parallel degree "
        f"({row.data_parallel:,}): {row.idle_ranks:,} of its ranks never have work, and the job has "
        f"{format_percent(row.batch / row.data_parallel)} of the speed that these nodes could give. Raise "
        "trainer.batch.globalSize or take fewer cores."
    )


def render_ranks(rows: Sequence[RankRow], width: int, *, limit: int | None) -> RenderableType:
    """Render the ranks, the slowest first."""
    shown = rows if limit is None else rows[:limit]
    columns: list[Column[RankRow]] = [
        Column("RANK", lambda row: str(row.rank), 9, right=True),
        Column("POD", lambda row: row.pod, 8),
        Column("NODE", lambda row: row.node, 6),
        Column("STEP", lambda row: _format_optional(row.step), 8, right=True),
        Column("TOOK", lambda row: format_duration(row.step_seconds), 5, right=True),
        Column("LAST STEP", lambda row: format_age(row.seconds_since_step) or "-", 4, right=True),
        Column("PHASE", lambda row: row.phase or "-", 3),
        Column("SLOWER", lambda row: _format_factor(row.slowdown), 3, right=True),
    ]
    if any(row.note for row in shown):
        columns.append(Column("NOTE", lambda row: row.note, 1, fold=True))
    omitted = len(rows) - len(shown)
    return stack_items(render_table(columns, shown, width), Text(f"… and {omitted} more (--all)") if omitted else None)


def render_checkpoints(
    view: JobView, rows: Sequence[CheckpointRow] | None, note: str, *, now: float, width: int
) -> RenderableType:
    """Render the checkpoints that a resume could use, and those on storage if a worker can list them."""
    checkpoints = view.checkpoints
    durable, memory = "nothing committed yet", ""
    if checkpoints.durable_step is not None:
        durable = f"step {checkpoints.durable_step}, {format_age(checkpoints.durable_age_seconds)}"
    if checkpoints.memory_step is not None:
        memory = f"step {checkpoints.memory_step}, on every member"
    summary = render_labels([("Storage", durable), ("Memory", memory), ("Notice", Text(checkpoints.notice, "yellow"))])
    explanation = Text(note, "dim") if note else None
    if rows is None:
        return stack_items(summary, explanation)
    columns: list[Column[CheckpointRow]] = [
        Column("NAME", lambda row: row.name, 9),
        Column("STATE", lambda row: style_word(row.state, "red" if row.problem else "green"), 8),
        Column("AGE", lambda row: _format_seconds(None if row.created is None else now - row.created), 5, right=True),
        Column("SIZE", lambda row: format_bytes(row.bytes), 6, right=True),
        Column("RANKS", lambda row: row.world, 3, right=True),
        Column("PROBLEM", lambda row: row.problem, 4, fold=True),
    ]
    return stack_items(summary, render_heading("On storage"), render_table(columns, rows, width), explanation)


def _format_seconds(seconds: float | None) -> str:
    """Format a time of which a clock that differs may make a negative one."""
    return "-" if seconds is None else format_duration(max(0.0, seconds))


def render_machines(machines: Sequence[MachineView], width: int, *, now: float) -> RenderableType:
    """Render the recorded machines with the reasons."""
    if not machines:
        return Text("no machine is recorded: no fault was attributed to one")
    columns: list[Column[MachineView]] = [
        Column("NODE", _format_node_name, 9),
        Column("STATE", lambda row: style_word(row.state), 8),
        Column("FOR", lambda row: _format_seconds(None if row.until is None else row.until - now), 7, right=True),
        Column("STRIKES", lambda row: str(len(row.strikes)), 6, right=True),
        Column("MACHINE", lambda row: row.machine, 2),
        Column("EVIDENCE", _format_strikes, 5, fold=True),
    ]
    return render_table(columns, machines, width)


def _format_node_name(machine: MachineView) -> str:
    if machine.renamed:
        return f"{machine.renamed} (was {machine.node})"
    return machine.node + (" (deleted)" if machine.present is False else "") or machine.key


def _format_strikes(machine: MachineView) -> str:
    """Return the three newest strikes, the newest first."""
    newest = reversed(machine.strikes[-3:])
    return "; ".join(f"{strike.cause} {format_utc(strike.at)[5:16]} by {strike.by}" for strike in newest)
