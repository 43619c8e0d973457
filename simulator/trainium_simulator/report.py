"""Render a study as tables, picture and JSON."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rich.table import Table

from trainium_contract.status.ledger import OVERHEAD
from trainium_contract.views.interruptions import describe_loss
from trainium_simulator.errors import InputError
from trainium_simulator.interval import (
    USUAL_INTERVALS,
    IntervalLoss,
    compute_optimal_interval,
    estimate_loss,
    estimate_usual_losses,
    find_configured_interval,
)
from trainium_simulator.study import MONTH, Estimate, Result, compute_spare_gain
from trainium_simulator.virtual.failures import resolve_mix

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from rich.console import Console


_MAX_ROWS = 6
_MIN_SHARE = 0.00005
"""Smaller shares are left out of the tables."""


def print_report(
    console: Console, results: Sequence[Result], *, goal: float | None, price: float | None = None
) -> None:
    """Print all tables."""
    console.print(_build_goodput_table(results))
    tables = [
        _build_spares_table(results),
        _build_losses_table(results),
        _build_recoveries_table(results),
        _build_intervals_table(results),
    ]
    if price is not None:
        tables.insert(1, _build_costs_table(results, price))
    for table in tables:
        if table.row_count:
            console.print(table)
    for sentence in describe_goals(results, goal):
        console.print(sentence)


def describe_goals(results: Sequence[Result], goal: float | None) -> Iterator[str]:
    """Yield a sentence per result: whether it reaches the goal of strict goodput, else its largest loss."""
    for result in results if goal is not None else ():
        assert goal is not None
        text = f"{_format_case(result)}: {_format_percent(result.strict_goodput.mean)} of {_format_percent(goal)}"
        stage = result.largest_loss
        share = _format_percent(result.lost_by_stage.get(stage, 0.0))
        if result.strict_goodput.mean >= goal:
            yield f"{text}: reached."
        elif stage == OVERHEAD:
            yield f"{text}: missed; most is lost to {describe_loss(stage)}, {share}."
        else:
            yield f"{text}: missed; most is lost in {describe_loss(stage)}, {share}: shorten that first."


def _build_goodput_table(results: Sequence[Result]) -> Table:
    table = _create_table("Goodput", "case", "strict", "uptime", "work done", "fleet", "worst day", "at other sizes")
    for result in results:
        other_sizes = [
            f"{size}: {_format_percent(share)}"
            for size, share in result.share_by_size.items()
            if size != result.case.nodes and share >= _MIN_SHARE
        ]
        table.add_row(
            _format_case(result),
            _format_estimate(result.strict_goodput),
            _format_estimate(result.uptime),
            _format_estimate(result.work_done),
            _format_estimate(result.fleet_utilization),
            _format_percent(result.worst_day),
            ", ".join(other_sizes[:3]) or "-",
        )
    return table


def _build_spares_table(results: Sequence[Result]) -> Table:
    table = _create_table("What a spare buys, in node-hours a month", "case", "gained", "held", "worthwhile")
    for before, after in _pair_by_spares(results):
        gain, cost = compute_spare_gain(before, after)
        added, other_terms = after.case.spares - before.case.spares, _format_case(after).partition(", ")[2]
        spares = f"spare {after.case.spares}" if added == 1 else f"spares {before.case.spares + 1}..{after.case.spares}"
        table.add_row(f"{spares}, {other_terms}", f"{gain:,.1f}", f"{cost:,.0f}", "yes" if gain > cost else "no")
    return table


def _build_costs_table(results: Sequence[Result], price: float) -> Table:
    columns = ("case", "node-hours", "cost", "of it lost or idle", "for a month's work")
    table = _create_table(f"Cost of a month, at {price:,g} a node-hour", *columns)
    for result in results:
        costs = _build_cost_document(result, price)
        work_cost = "-" if costs["perMonthOfWork"] is None else f"{costs['perMonthOfWork']:,.0f}"
        amounts = (f"{costs[key]:,.0f}" for key in ("monthlyNodeHours", "perMonth", "lostOrIdle"))
        table.add_row(_format_case(result), *amounts, work_cost)
    return table


def _build_cost_document(result: Result, price: float) -> dict[str, Any]:
    """Return costs in the currency of `price`: of all nodes held for a month, and of the work of a full month."""
    cost = result.monthly_node_hours * price
    work_done = result.work_done.mean
    return {
        "pricePerNodeHour": price,
        "monthlyNodeHours": round(result.monthly_node_hours, 1),
        "perMonth": round(cost, 2),
        "lostOrIdle": round(cost * (1 - result.fleet_utilization.mean), 2),
        "perMonthOfWork": round(cost / work_done, 2) if work_done > 0 else None,
    }


def _pair_by_spares(results: Sequence[Result]) -> Iterator[tuple[Result, Result]]:
    """Yield pairs of results that differ only in their spares, the one with fewer spares first."""
    for after in results:
        smaller = [
            result
            for result in results
            if (result.case.rate, result.case.variation) == (after.case.rate, after.case.variation)
            and result.case.spares < after.case.spares
        ]
        if smaller:
            yield max(smaller, key=lambda result: result.case.spares), after


def _build_losses_table(results: Sequence[Result]) -> Table:
    table = _create_table("Where the time goes", "case", "by cause", "by stage")
    for result in results:
        table.add_row(_format_case(result), format_shares(result.lost_by_cause), format_shares(result.lost_by_stage))
    return table


def format_shares(shares: Mapping[str, float]) -> str:
    """Format shares of the time by cause or stage, the largest first as given."""
    text = [f"{describe_loss(name)} {_format_percent(share)}" for name, share in shares.items() if share >= _MIN_SHARE]
    return ", ".join(text[:_MAX_ROWS]) or "nothing"


def _build_recoveries_table(results: Sequence[Result]) -> Table:
    columns = ("case", "cause", "a day", "median", "95th percentile", "longest", "steps lost at most")
    table = _create_table("Recoveries, from the failure to the first new step", *columns)
    for result in results:
        for number, recovery in enumerate(result.recoveries[:_MAX_ROWS]):
            table.add_row(
                _format_case(result) if number == 0 else "",
                recovery.cause,
                f"{recovery.per_day:.2f}",
                f"{recovery.median_seconds:,.1f} s",
                f"{recovery.p95_seconds:,.1f} s",
                f"{recovery.longest_seconds:,.0f} s",
                str(recovery.max_steps_lost),
            )
    return table


def _build_intervals_table(results: Sequence[Result]) -> Table:
    usual_columns = [_format_duration(interval) for interval in USUAL_INTERVALS]
    columns = ("case", "rollbacks a month", "best", "configured", *usual_columns)
    table = _create_table("Loss by the interval of durable saves: their stall and the repeated steps", *columns)
    for result in results:
        stages, rollbacks = result.case.stages, result.rollbacks
        bound = "" if rollbacks.count else "≤ "
        losses = estimate_usual_losses(rollbacks, stages)
        by_interval = {loss.interval_seconds: f"{bound}{_format_percent(loss.total_share)}" for loss in losses}
        configured = find_configured_interval(result.case.spec, stages)
        configured_text = "-"
        if configured is not None:
            share = _format_percent(estimate_loss(configured, rollbacks, stages).total_share)
            configured_text = f"{_format_duration(configured)}: {bound}{share}"
        table.add_row(
            _format_case(result),
            f"{bound}{rollbacks.per_second * MONTH:,.2f}",
            f"{'≥ ' if bound else ''}{_format_duration(compute_optimal_interval(rollbacks, stages))}",
            configured_text,
            *(by_interval.get(interval, "-") for interval in USUAL_INTERVALS),
        )
    return table


def _format_duration(seconds: float) -> str:
    if math.isinf(seconds):
        return "none"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.0f} h"


def _create_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 or column.startswith(("by ", "cause")) else "right")
    return table


def _format_case(result: Result) -> str:
    case = result.case
    spares = f"{case.spares} spare" + ("" if case.spares == 1 else "s")
    rate = "the trace" if case.trace is not None else f"{case.rate:g} per 1,000 node-days"
    shared = f"{case.shared_nodes} shared" if case.shared_nodes else ""
    return ", ".join(part for part in (spares, rate, shared, case.variation) if part)


def _format_estimate(estimate: Estimate) -> str:
    margin = "" if math.isnan(estimate.margin) else f" ± {estimate.margin * 100:.3f}"
    return f"{estimate.mean * 100:.3f}{margin} %"


def _format_percent(share: float) -> str:
    return f"{share * 100:.3f} %"


def report_document(results: Sequence[Result], *, goal: float | None, price: float | None = None) -> dict[str, Any]:
    """Return the data of the tables for JSON: times in seconds, shares from 0 to 1."""
    gains = {id(after): compute_spare_gain(before, after) for before, after in _pair_by_spares(results)}
    documents = [_build_result_document(result, gains.get(id(result)), goal) for result in results]
    if price is not None:
        for document, result in zip(documents, results, strict=True):
            document["cost"] = _build_cost_document(result, price)
    return {"results": documents}


def _build_result_document(result: Result, gain: tuple[float, float] | None, goal: float | None) -> dict[str, Any]:
    case = result.case
    traced = case.trace is not None
    return {
        "nodes": case.nodes,
        "spares": case.spares,
        "sharedNodes": case.shared_nodes,
        "failuresPer1000NodeDays": None if traced else case.rate,
        "mix": None if traced else resolve_mix(case.rate, case.mix).value,
        "variation": case.variation or None,
        "days": case.days,
        "seeds": result.seeds,
        "ratio": _estimate_document(result.strict_goodput),
        "uptimeRatio": _estimate_document(result.uptime),
        "workDone": _estimate_document(result.work_done),
        "fleetRatio": _estimate_document(result.fleet_utilization),
        "worstDay": round(result.worst_day, 6),
        "lostByCause": {name: round(share, 7) for name, share in result.lost_by_cause.items()},
        "lostByStage": {name: round(share, 7) for name, share in result.lost_by_stage.items()},
        "sizes": {str(size): round(share, 7) for size, share in result.share_by_size.items()},
        "recoveries": [
            {
                "cause": recovery.cause,
                "perDay": round(recovery.per_day, 4),
                "medianSeconds": round(recovery.median_seconds, 3),
                "p95Seconds": round(recovery.p95_seconds, 3),
                "maxSeconds": round(recovery.longest_seconds, 3),
                "maxStepsLost": recovery.max_steps_lost,
            }
            for recovery in result.recoveries
        ],
        "durableInterval": _build_interval_document(result),
        "spareGain": None if gain is None else {"nodeHours": round(gain[0], 2), "heldNodeHours": round(gain[1], 2)},
        "goal": None if goal is None else {"ratio": goal, "reached": result.strict_goodput.mean >= goal},
        "largestLoss": result.largest_loss,
        "simulatedNodeHours": result.simulated_node_hours,
    }


def _build_interval_document(result: Result) -> dict[str, Any]:
    stages, rollbacks = result.case.stages, result.rollbacks
    configured = find_configured_interval(result.case.spec, stages)
    optimal = compute_optimal_interval(rollbacks, stages)
    return {
        "rollbacks": rollbacks.count,
        "maxRollbacksPerMonth" if not rollbacks.count else "rollbacksPerMonth": round(rollbacks.per_second * MONTH, 4),
        "bestSeconds": None if math.isinf(optimal) else round(optimal, 1),
        "configured": None
        if configured is None
        else _build_loss_document(estimate_loss(configured, rollbacks, stages)),
        "alternatives": [_build_loss_document(loss) for loss in estimate_usual_losses(rollbacks, stages)],
    }


def _build_loss_document(loss: IntervalLoss) -> dict[str, float]:
    return {
        "intervalSeconds": loss.interval_seconds,
        "stalled": round(loss.stall_share, 7),
        "repeated": round(loss.repeated_share, 7),
        "loss": round(loss.total_share, 7),
    }


def _estimate_document(estimate: Estimate) -> dict[str, float | None]:
    return {
        "mean": round(estimate.mean, 7),
        "margin95": None if math.isnan(estimate.margin) else round(estimate.margin, 7),
    }


def draw_picture(path: Path, results: Sequence[Result]) -> None:
    """Write the picture. Raises InputError if matplotlib is missing, or the file cannot be written."""
    try:
        import matplotlib as mpl  # noqa: PLC0415 - slow to import, needed only here
    except ImportError as error:
        raise InputError("--picture needs matplotlib: pip install 'trainium-operator[plot]'") from error

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415 - after the backend was chosen

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    groups = {(result.case.rate, result.case.variation): None for result in results}
    for number, group in enumerate(groups):
        group_results = [result for result in results if (result.case.rate, result.case.variation) == group]
        spares = [result.case.spares for result in group_results]
        margins = [
            0.0 if math.isnan(result.work_done.margin) else result.work_done.margin * 100 for result in group_results
        ]
        label = f"{group[0]:g} failures per 1,000 node-days" + (f", {group[1]}" if group[1] else "")
        work_done = [result.work_done.mean * 100 for result in group_results]
        left.errorbar(spares, work_done, yerr=margins, marker="o", capsize=3, color=f"C{number}", label=label)
    left.set(xlabel="spares", ylabel="work done, % of an undisturbed run", title="What each spare buys")
    left.xaxis.get_major_locator().set_params(integer=True)
    left.grid(visible=True, alpha=0.3)
    left.legend(fontsize=8)
    stages = list(dict.fromkeys(name for result in results for name in result.lost_by_stage))
    names = [f"{result.case.spares} / {result.case.rate:g}" for result in results]
    bottom = [0.0] * len(results)
    for number, stage in enumerate(stages):
        heights = [result.lost_by_stage.get(stage, 0.0) * 100 for result in results]
        right.bar(range(len(results)), heights, bottom=bottom, label=describe_loss(stage), color=f"C{number}")
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    right.set_xticks(range(len(results)), names, rotation=45, fontsize=8)
    right.set(xlabel="spares / failures per 1,000 node-days", ylabel="% of the time", title="Where the time goes")
    right.legend(fontsize=8)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise InputError(f"--picture {path} cannot be written: {error}") from error
    finally:
        plt.close(figure)
