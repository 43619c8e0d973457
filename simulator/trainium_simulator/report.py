"""Render a study as tables, picture and JSON."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rich.table import Table

from trainium_contract.views.interruptions import stage_words
from trainium_simulator.errors import InputError
from trainium_simulator.interval import USUAL_INTERVALS, IntervalLoss, best_interval, loss, losses, present_interval
from trainium_simulator.study import MONTH, Estimate, Result, gain_of_spares
from trainium_simulator.virtual.failures import mix_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from rich.console import Console


_ROWS = 6
_LEAST = 0.00005
"""Shares below are left out of the tables."""


def show(console: Console, results: Sequence[Result], *, goal: float | None, price: float | None = None) -> None:
    """Print all tables."""
    console.print(_goodput(results))
    costs = () if price is None else (_costs(results, price),)
    for table in (_spares(results), *costs, _losses(results), _recoveries(results), _intervals(results)):
        if table.row_count:
            console.print(table)
    for sentence in goal_sentences(results, goal):
        console.print(sentence)


def goal_sentences(results: Sequence[Result], goal: float | None) -> Iterator[str]:
    """Return whether a goal of strict goodput is reached, and what to shorten where it is not."""
    for result in results if goal is not None else ():
        assert goal is not None
        reached = result.strict.mean >= goal
        text = f"{_name(result)}: {_percent(result.strict.mean)} of {_percent(goal)}"
        if reached:
            yield f"{text}: reached."
        elif result.stage_to_shorten:
            stage = result.stage_to_shorten
            share = _percent(result.by_stage[stage])
            yield f"{text}: missed; most is lost in {stage_words(stage)}, {share}: shorten that first."
        else:
            yield f"{text}: missed, by overhead in the steps."


def _goodput(results: Sequence[Result]) -> Table:
    table = _table("Goodput", "case", "strict", "uptime", "work done", "fleet", "worst day", "at other sizes")
    for result in results:
        smaller = [
            f"{size}: {_percent(share)}"
            for size, share in result.sizes.items()
            if size != result.case.nodes and share >= _LEAST
        ]
        table.add_row(
            _name(result),
            _estimate(result.strict),
            _estimate(result.uptime),
            _estimate(result.work),
            _estimate(result.fleet),
            _percent(result.worst_day),
            ", ".join(smaller[:3]) or "-",
        )
    return table


def _spares(results: Sequence[Result]) -> Table:
    table = _table("What a spare buys, in node-hours a month", "case", "brings", "holds", "pays")
    for before, after in _pairs(results):
        gain, cost = gain_of_spares(before, after)
        more, rest = after.case.spares - before.case.spares, _name(after).partition(", ")[2]
        spares = f"spare {after.case.spares}" if more == 1 else f"spares {before.case.spares + 1}..{after.case.spares}"
        table.add_row(f"{spares}, {rest}", f"{gain:,.1f}", f"{cost:,.0f}", "yes" if gain > cost else "no")
    return table


def _costs(results: Sequence[Result], price: float) -> Table:
    columns = ("case", "node-hours", "cost", "of it lost or idle", "for a month's work")
    table = _table(f"Cost of a month, at {price:,g} a node-hour", *columns)
    for result in results:
        cost = _cost(result, price)
        work = "-" if cost["forAMonthsWork"] is None else f"{cost['forAMonthsWork']:,.0f}"
        table.add_row(
            _name(result), f"{cost['nodeHours']:,.0f}", f"{cost['aMonth']:,.0f}", f"{cost['lostOrIdle']:,.0f}", work
        )
    return table


def _cost(result: Result, price: float) -> dict[str, Any]:
    """Return the cost of a month: of all node time that the job holds, and of the work of an undisturbed month."""
    cost = result.held_node_hours * price
    work = result.work.mean
    return {
        "pricePerNodeHour": price,
        "nodeHours": round(result.held_node_hours, 1),
        "aMonth": round(cost, 2),
        "lostOrIdle": round(cost * (1 - result.fleet.mean), 2),
        "forAMonthsWork": round(cost / work, 2) if work > 0 else None,
    }


def _pairs(results: Sequence[Result]) -> Iterator[tuple[Result, Result]]:
    """Results that differ in their spares alone, each with the next larger."""
    for after in results:
        others = [
            each
            for each in results
            if (each.case.rate, each.case.variation) == (after.case.rate, after.case.variation)
            and each.case.spares < after.case.spares
        ]
        if others:
            yield max(others, key=lambda each: each.case.spares), after


def _losses(results: Sequence[Result]) -> Table:
    table = _table("Where the time goes", "case", "by cause", "by stage")
    for result in results:
        table.add_row(_name(result), _parts(result.by_cause), _parts(result.by_stage))
    return table


def _parts(shares: Mapping[str, float]) -> str:
    text = [f"{name} {_percent(share)}" for name, share in shares.items() if share >= _LEAST]
    return ", ".join(text[:_ROWS]) or "nothing"


def _recoveries(results: Sequence[Result]) -> Table:
    columns = ("case", "cause", "a day", "median", "95th percentile", "longest", "steps lost at most")
    table = _table("Recoveries, from the failure to the first new step", *columns)
    for result in results:
        for number, each in enumerate(result.recoveries[:_ROWS]):
            table.add_row(
                _name(result) if number == 0 else "",
                each.cause,
                f"{each.per_day:.2f}",
                f"{each.median:,.1f} s",
                f"{each.slow:,.1f} s",
                f"{each.longest:,.0f} s",
                str(each.steps_lost),
            )
    return table


def _intervals(results: Sequence[Result]) -> Table:
    usual = [_duration(each) for each in USUAL_INTERVALS]
    columns = ("case", "rollbacks a month", "best", "present", *usual)
    table = _table("Loss by the interval of durable saves: their stall and the steps made again", *columns)
    for result in results:
        stages, rollbacks = result.case.stages, result.rollbacks
        most = "" if rollbacks.seen else "≤ "
        by_interval = {each.seconds: f"{most}{_percent(each.total)}" for each in losses(rollbacks, stages)}
        present = present_interval(result.case.spec, stages)
        text = "-"
        if present is not None:
            text = f"{_duration(present)}: {most}{_percent(loss(present, rollbacks, stages).total)}"
        table.add_row(
            _name(result),
            f"{most}{rollbacks.per_second * MONTH:,.2f}",
            f"{'≥ ' if most else ''}{_duration(best_interval(rollbacks, stages))}",
            text,
            *(by_interval.get(each, "-") for each in USUAL_INTERVALS),
        )
    return table


def _duration(seconds: float) -> str:
    if math.isinf(seconds):
        return "none"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.0f} h"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 or column.startswith(("by ", "cause")) else "right")
    return table


def _name(result: Result) -> str:
    case = result.case
    spares = f"{case.spares} spare" + ("" if case.spares == 1 else "s")
    rate = "the trace" if case.trace is not None else f"{case.rate:g} a 1,000 node-days"
    shared = f"{case.shared} shared" if case.shared else ""
    return ", ".join(part for part in (spares, rate, shared, case.variation) if part)


def _estimate(value: Estimate) -> str:
    margin = "" if math.isnan(value.margin) else f" ± {value.margin * 100:.3f}"
    return f"{value.mean * 100:.3f}{margin} %"


def _percent(share: float) -> str:
    return f"{share * 100:.3f} %"


def document(results: Sequence[Result], *, goal: float | None, price: float | None = None) -> dict[str, Any]:
    """Return the same as JSON; times in seconds, shares of 1."""
    gains = {id(after): gain_of_spares(before, after) for before, after in _pairs(results)}
    documents = [_result(each, gains.get(id(each)), goal) for each in results]
    if price is not None:
        documents = [each | {"cost": _cost(result, price)} for each, result in zip(documents, results, strict=True)]
    return {"results": documents}


def _result(result: Result, gain: tuple[float, float] | None, goal: float | None) -> dict[str, Any]:
    case = result.case
    traced = case.trace is not None
    return {
        "nodes": case.nodes,
        "spares": case.spares,
        "sharedNodes": case.shared,
        "failuresPer1000NodeDays": None if traced else case.rate,
        "mix": None if traced else mix_of(case.rate, case.mix).value,
        "variation": case.variation or None,
        "days": case.days,
        "seeds": result.seeds,
        "strict": _interval(result.strict),
        "uptime": _interval(result.uptime),
        "work": _interval(result.work),
        "fleet": _interval(result.fleet),
        "worstDay": round(result.worst_day, 6),
        "lostByCause": {name: round(share, 7) for name, share in result.by_cause.items()},
        "lostByStage": {name: round(share, 7) for name, share in result.by_stage.items()},
        "sizes": {str(size): round(share, 7) for size, share in result.sizes.items()},
        "recoveries": [
            {
                "cause": each.cause,
                "aDay": round(each.per_day, 4),
                "medianSeconds": round(each.median, 3),
                "p95Seconds": round(each.slow, 3),
                "longestSeconds": round(each.longest, 3),
                "stepsLostAtMost": each.steps_lost,
            }
            for each in result.recoveries
        ],
        "durableInterval": _interval_document(result),
        "sparesBring": None if gain is None else {"nodeHours": round(gain[0], 2), "holdNodeHours": round(gain[1], 2)},
        "goal": None if goal is None else {"strict": goal, "reached": result.strict.mean >= goal},
        "stageToShorten": result.stage_to_shorten or None,
        "nodeHours": result.node_hours,
    }


def _interval_document(result: Result) -> dict[str, Any]:
    stages, rollbacks = result.case.stages, result.rollbacks
    present = present_interval(result.case.spec, stages)
    best = best_interval(rollbacks, stages)
    return {
        "rollbacks": rollbacks.seen,
        "rollbacksAMonthAtMost" if not rollbacks.seen else "rollbacksAMonth": round(rollbacks.per_second * MONTH, 4),
        "bestSeconds": None if math.isinf(best) else round(best, 1),
        "present": None if present is None else _interval_loss(loss(present, rollbacks, stages)),
        "usual": [_interval_loss(each) for each in losses(rollbacks, stages)],
    }


def _interval_loss(each: IntervalLoss) -> dict[str, float]:
    return {
        "everySeconds": each.seconds,
        "stall": round(each.stall, 7),
        "madeAgain": round(each.repeated, 7),
        "loss": round(each.total, 7),
    }


def _interval(value: Estimate) -> dict[str, float | None]:
    return {
        "mean": round(value.mean, 7),
        "margin95": None if math.isnan(value.margin) else round(value.margin, 7),
    }


def draw_picture(path: Path, results: Sequence[Result]) -> None:
    """Write the picture. Raises InputError when matplotlib is not there, or the file cannot be written."""
    try:
        import matplotlib as mpl  # noqa: PLC0415 - slow to import, needed only here
    except ImportError as error:
        raise InputError("--picture needs matplotlib: pip install 'trainium-operator[plot]'") from error

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415 - after the backend was chosen

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    groups = {(each.case.rate, each.case.variation): None for each in results}
    for number, group in enumerate(groups):
        chosen = [each for each in results if (each.case.rate, each.case.variation) == group]
        spares = [each.case.spares for each in chosen]
        margins = [0.0 if math.isnan(each.work.margin) else each.work.margin * 100 for each in chosen]
        label = f"{group[0]:g} failures per 1,000 node-days" + (f", {group[1]}" if group[1] else "")
        left.errorbar(
            spares, [each.work.mean * 100 for each in chosen], yerr=margins, marker="o", capsize=3, color=f"C{number}",
            label=label,
        )  # fmt: skip
    left.set(xlabel="spares", ylabel="work done, % of an undisturbed run", title="What each spare buys")
    left.xaxis.get_major_locator().set_params(integer=True)
    left.grid(visible=True, alpha=0.3)
    left.legend(fontsize=8)
    stages = list(dict.fromkeys(name for each in results for name in each.by_stage))
    names = [f"{each.case.spares} / {each.case.rate:g}" for each in results]
    bottom = [0.0] * len(results)
    for number, stage in enumerate(stages):
        heights = [each.by_stage.get(stage, 0.0) * 100 for each in results]
        right.bar(range(len(results)), heights, bottom=bottom, label=stage, color=f"C{number}")
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
