"""Pages that are tables: history, goodput, sizes, ranks, checkpoints, machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from trainium_client.render.page import Column, label_grid, render_heading, render_table, stack_items, style_word
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
    from collections.abc import Sequence

    from rich.console import RenderableType

    from trainium_client.views.machines import MachineView
    from trainium_client.views.sizes import ScalingRow, SizeRow
    from trainium_contract.pages.jobs_page import JobRow
    from trainium_contract.views.checkpoints import CheckpointRow
    from trainium_contract.views.goodput import CostView, GoodputView
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
    columns = (
        Column("NAMESPACE", 9), Column("NAME", 9), Column("PHASE", 9), Column("STEP", 8, right=True),
        Column("LOSS", 7, right=True), Column("NODES", 6, right=True), Column("GOODPUT", 5, right=True),
        Column("INTERRUPTED", 4, right=True),
    )  # fmt: skip
    cells = [
        (row.namespace, row.name, style_word(row.phase or "-"),
         row.progress, format_number(row.loss),
         f"{row.training} of {row.desired}", format_percent(row.goodput), str(row.restarts))
        for row in rows
    ]  # fmt: skip
    first = 0 if with_namespace else 1
    return render_table(columns[first:], [row[first:] for row in cells], width)


def render_history(entries: Sequence[InterruptionView], width: int) -> RenderableType:
    """Render the interruptions, oldest first, with the number that `why --entry` takes."""
    if not entries:
        return Text("nothing has interrupted this job")
    columns = (
        Column("#", 9, right=True), Column("TIME", 6), Column("CAUSE", 9), Column("RESPONSE", 8), Column("WORKER", 5),
        Column("NODE", 3), Column("SECONDS", 7, right=True), Column("LOST", 6, right=True),
        Column("SEEN", 2, fold=True),
    )  # fmt: skip
    rows = [
        (str(number), format_utc(entry.at)[5:], entry.cause, entry.response, entry.pod or "-", entry.node or "-",
         "-" if entry.stopped else "open" if entry.open else format_number(entry.recovered_seconds, 3),
         "-" if entry.steps_lost is None else str(entry.steps_lost),
         shorten(drop_noise(entry.message), _MAX_EVIDENCE_LENGTH))
        for number, entry in enumerate(entries, 1)
    ]  # fmt: skip
    return render_table(columns, rows, width)


def render_goodput(goodput: GoodputView, width: int) -> RenderableType:
    """Render the time spent by cause, stage and size."""
    if goodput.ratio is None:
        if goodput.wall_seconds:
            return Text("the goodput is not known: the program has reported no step")
        return Text("nothing is counted yet: no workers have started together")
    columns = (Column("SECONDS", 8, right=True), Column("OF LOST", 7, right=True), Column("", 1))
    lost = sum(goodput.lost_by_stage.values()) or 1.0
    stages = [
        (describe_loss(name), f"{seconds:.1f}", format_percent(seconds / lost), format_bar(seconds / lost, _BAR_WIDTH))
        for name, seconds in sorted(goodput.lost_by_stage.items(), key=lambda item: -item[1])
    ]
    by_size = (Column("NODES", 9, right=True), Column("STEPS", 8, right=True), Column("STEP TIME", 7, right=True))
    sizes = [
        (str(size_row.size), str(size_row.steps), format_duration(size_row.step_seconds)) for size_row in goodput.sizes
    ]
    after_training = ", ".join(f"{name} {format_duration(seconds)}" for name, seconds in goodput.stage_seconds.items())
    ledger: list[RenderableType] = [
        label_grid([
            ("Goodput", f"{format_percent(goodput.ratio)} of {format_duration(goodput.wall_seconds)} (strict)"),
            ("Uptime", format_percent(goodput.uptime_ratio)),
            ("Fleet", f"{format_percent(goodput.fleet_ratio)} of {goodput.node_seconds / 3600:.1f} node hours"),
            ("Cost", _format_cost(goodput.cost)),
            ("After steps", after_training),
        ]),
        render_heading("Where the time went"),
        _render_causes(goodput, width),
    ]  # fmt: skip
    if stages:
        ledger += [
            render_heading("What was lost, by stage"),
            render_table((Column("STAGE", 9), *columns), stages, width),
        ]
    if sizes:
        ledger += [render_heading("Steps by size"), render_table(by_size, sizes, width)]
    return stack_items(*ledger)


def _format_cost(cost: CostView | None) -> str:
    if cost is None:
        return ""
    remaining = "" if cost.to_end is None else f", {cost.to_end:,.2f} more until the last step at the present size"
    return f"{cost.so_far:,.2f} so far{remaining}"


def _render_causes(goodput: GoodputView, width: int) -> RenderableType:
    """Render the seconds by cause, with their cost if known."""
    wall, cost = goodput.wall_seconds or 1.0, goodput.cost
    seconds = {"productive": goodput.productive_seconds, **goodput.lost_seconds}
    columns = (Column("CAUSE", 9), Column("SECONDS", 8, right=True), Column("SHARE", 7, right=True), Column("", 1))
    rows = [
        (describe_loss(name), f"{value:.1f}", format_percent(value / wall), format_bar(value / wall, _BAR_WIDTH))
        for name, value in seconds.items()
    ]
    if cost is None:
        return render_table(columns, rows, width)
    amounts = (cost.productive, *(cost.lost[name] for name in goodput.lost_seconds), cost.idle)
    priced = [
        (*row[:3], f"{amount:,.2f}", row[3])
        for row, amount in zip([*rows, ("idle nodes", "", "", "")], amounts, strict=True)
    ]
    return render_table((*columns[:3], Column("COST", 8, right=True), columns[3]), priced, width)


def render_scaling(rows: Sequence[ScalingRow], width: int) -> RenderableType:
    """Render the speed by number of nodes, the smallest first."""
    if not rows:
        return Text("no step time was measured yet: the job has to train for some steps")
    columns = (
        Column("NODES", 9, right=True), Column("STEPS", 4, right=True), Column("STEP TIME", 7, right=True),
        Column("SAMPLES/S", 8, right=True), Column("SPEEDUP", 6, right=True), Column("EFFICIENCY", 8, right=True),
        Column("", 3),
    )  # fmt: skip
    cells = [
        (str(row.nodes), f"{row.steps:,}", format_duration(row.step_seconds), format_number(row.samples_per_second),
         "-" if row.speedup is None else f"x{row.speedup:.2f}", format_percent(row.efficiency), "now" * row.current)
        for row in rows
    ]  # fmt: skip
    if any(row.samples_per_second is None for row in rows):
        return stack_items(
            render_table(columns, cells, width), Text("Give program.batch, so that the samples of a step are known.")
        )
    return render_table(columns, cells, width)


def render_sizes(rows: Sequence[SizeRow], width: int) -> RenderableType:
    """Render the comparison of numbers of nodes, the largest first."""
    if not rows:
        return Text("no number of nodes between workers.minReplicas and maxReplicas is whole model-parallel groups")
    columns = (
        Column("NODES", 9, right=True), Column("TRAIN", 8, right=True), Column("PASSES", 6, right=True),
        Column("SAMPLES", 2, right=True), Column("SPEED", 7, right=True), Column("ROWS FILLED", 3, right=True),
        Column("STEP TIME", 4, right=True), Column("GRAPHS", 1), Column("", 5),
    )  # fmt: skip
    cells = [
        (str(row.min_nodes) if row.min_nodes == row.max_nodes else f"{row.min_nodes}-{row.max_nodes}", str(row.trains),
         str(row.micro_batches), f"{row.batch:,}", format_percent(row.speed), format_percent(row.fill_ratio),
         format_duration(row.step_seconds),
         {True: "ready", False: "none", None: "-"}[row.compiled],
         " ".join(["now"] * row.current + ["idle nodes"] * row.uses_idle_nodes))
        for row in rows
    ]  # fmt: skip
    size_table = render_table(columns, cells, width)
    idle = next((row for row in rows if row.idle_ranks), None)
    return size_table if idle is None else stack_items(size_table, Text(_explain_idle_ranks(idle)))


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
    columns: list[Column] = [
        Column("RANK", 9, right=True), Column("POD", 8), Column("NODE", 6), Column("STEP", 8, right=True),
        Column("TOOK", 5, right=True), Column("LAST STEP", 4, right=True), Column("PHASE", 3),
        Column("SLOWER", 3, right=True), Column("NOTE", 1, fold=True),
    ]  # fmt: skip
    shown = rows if limit is None else rows[:limit]
    cells = [
        (str(row.rank), row.pod, row.node, "-" if row.step is None else str(row.step),
         format_duration(row.step_seconds),
         format_age(row.seconds_since_step) or "-", row.phase or "-",
         "-" if row.slowdown is None else f"x{row.slowdown:.2f}", row.note)
        for row in shown
    ]  # fmt: skip
    if not any(row.note for row in shown):
        columns.pop()
    omitted = len(rows) - len(shown)
    return stack_items(render_table(columns, cells, width), Text(f"… and {omitted} more (--all)") if omitted else None)


def render_checkpoints(
    view: JobView, rows: Sequence[CheckpointRow] | None, note: str, *, now: float, width: int
) -> RenderableType:
    """Render the checkpoints that a resume could use, and those on storage if a worker can list them."""
    checkpoints = view.checkpoints
    summary = label_grid([
        ("Storage", "nothing committed yet" if checkpoints.durable_step is None
         else f"step {checkpoints.durable_step}, {format_age(checkpoints.durable_age_seconds)}"),
        ("Memory", "" if checkpoints.memory_step is None else f"step {checkpoints.memory_step}, on every member"),
        ("Notice", Text(checkpoints.notice, "yellow")),
    ])  # fmt: skip
    if rows is None:
        return stack_items(summary, Text(note, "dim") if note else None)
    columns = (Column("NAME", 9), Column("STATE", 8), Column("AGE", 5, right=True), Column("SIZE", 6, right=True),
               Column("RANKS", 3, right=True), Column("PROBLEM", 4, fold=True))  # fmt: skip
    cells = [
        (row.name, style_word(row.state, "red" if row.problem else "green"),
         "-" if row.created is None else format_duration(max(0.0, now - row.created)),
         format_bytes(row.bytes), row.world,
         row.problem)
        for row in rows
    ]  # fmt: skip
    return stack_items(
        summary, render_heading("On storage"), render_table(columns, cells, width), Text(note, "dim") if note else None
    )


def _format_node_name(machine: MachineView) -> str:
    if machine.renamed:
        return f"{machine.renamed} (was {machine.node})"
    return machine.node + (" (deleted)" if machine.present is False else "") or machine.key


def render_machines(machines: Sequence[MachineView], width: int, *, now: float) -> RenderableType:
    """Render the recorded machines with the reasons."""
    if not machines:
        return Text("no machine is recorded: no fault was attributed to one")
    columns = (Column("NODE", 9), Column("STATE", 8), Column("FOR", 7, right=True), Column("STRIKES", 6, right=True),
               Column("MACHINE", 2), Column("EVIDENCE", 5, fold=True))  # fmt: skip
    rows = [
        (_format_node_name(machine), style_word(machine.state),
         format_duration(max(0.0, machine.until - now)) if machine.until is not None else "-",
         str(len(machine.strikes)), machine.machine,
         "; ".join(f"{strike.cause} {format_utc(strike.at)[5:16]} by {strike.by}"
                   for strike in reversed(machine.strikes[-3:])))
        for machine in machines
    ]  # fmt: skip
    return render_table(columns, rows, width)
