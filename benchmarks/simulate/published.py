"""Published runs beside this operator in the simulator; writes a table into docs/goodput.md.

    python -m benchmarks.simulate.published                     # simulate all, keep the figures, write the table
    python -m benchmarks.simulate.published --runs HLAT --days 30 --seeds 20   # some runs, for longer
    python -m benchmarks.simulate.published --full --seeds 20   # as many days as were published; hours for 2,048 nodes
    python -m benchmarks.simulate.published --document-only     # write the table again from the kept figures

A simulation takes time with the square of the nodes, so by default the large ones have fewer days, as the table says.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.simulate.runs import RUNS, Run
from trainium_operator.simulate.study import Case, Estimate, simulate
from trainium_operator.simulate.virtual.failures import FailureModel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainium_operator.simulate.virtual.outcome import SimulationResult

HERE = Path(__file__).parent
STAGES = HERE / "stages-trn1.yaml"
RESULTS = HERE / "published.json"
DOCUMENT = HERE.parents[1] / "docs" / "goodput.md"
BEGIN, END = "<!-- published: begin, written by python -m benchmarks.simulate.published -->", "<!-- published: end -->"
NODE_DAYS = 2000.0
"""Of one seed by default: 2,048 nodes for a day, 64 for all of its days."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the simulations of one run gave; shares, and half of their 95 % intervals over the seeds."""

    name: str
    days: float
    seeds: int
    interruptions: float
    """A day."""
    strict: tuple[float, float]
    uptime: tuple[float, float]
    work: tuple[float, float]
    median: float | None
    """Seconds from a failure to the first new step."""
    longest: float | None
    seconds: float
    """That the simulations took."""


def find(run: Run, *, days: float, seeds: int) -> Found:
    """Simulate a run."""
    case = Case(spec=run.job(), stages=run.times(STAGES), model=FailureModel(), mix=run.mix, days=days, rate=run.rate)
    began = time.monotonic()
    outcomes = [simulate(case, seed) for seed in range(seeds)]
    times = sorted(each.seconds for outcome in outcomes for each in outcome.recoveries if each.seconds is not None)
    return Found(
        name=run.name,
        days=days,
        seeds=seeds,
        interruptions=len(times) / (days * seeds),
        strict=_estimate(outcomes, "strict"),
        uptime=_estimate(outcomes, "uptime"),
        work=_estimate(outcomes, "work"),
        median=times[len(times) // 2] if times else None,
        longest=times[-1] if times else None,
        seconds=round(time.monotonic() - began, 1),
    )


def _estimate(outcomes: list[SimulationResult], figure: str) -> tuple[float, float]:
    estimate = Estimate.of([getattr(outcome, figure) for outcome in outcomes])
    return estimate.mean, estimate.margin


def default_days(run: Run) -> float:
    """Fewer than published where that would take long."""
    return min(run.days, max(1.0, round(NODE_DAYS / run.nodes)))


def lines(found: dict[str, Found]) -> Iterator[str]:
    """The table and what stands behind it."""
    yield "| run | published | strict | uptime | work done | recovery, median / longest | days x seeds |"
    yield "|---|---|---|---|---|---|---|"
    for run in RUNS:
        each = found.get(run.name)
        if each is None:
            continue
        recovery = "" if each.median is None else f"{each.median:.0f} s / {each.longest:.0f} s"
        shares = " | ".join(_share(pair) for pair in (each.strict, each.uptime, each.work))
        days = f"{each.days:g} x {each.seeds}{'' if each.days == run.days else f' of {run.days:g}'}"
        yield f"| {run.name} | {run.published} ({run.source}) | {shares} | {recovery} | {days} |"
    yield ""
    for run in RUNS:
        if run.name in found:
            yield (
                f"- {run.name}: {run.rate:.1f} interruptions per 1,000 node-days ({run.mix}), {run.spares} spares. "
                f"Assumed: {run.assumed}."
            )


def _share(pair: tuple[float, float]) -> str:
    mean, margin = pair
    return f"{mean:.2%}" if math.isnan(margin) else f"{mean * 100:.2f} ± {margin * 100:.2f} %"


def write(found: dict[str, Found], path: Path = DOCUMENT) -> None:
    """Put the table between its markers. Raises ValueError where they are not."""
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} must have the lines {BEGIN!r} and {END!r}")
    path.write_text("\n".join((before + BEGIN, "", *lines(found), "", END + after)), encoding="utf-8")


def load() -> dict[str, Found]:
    """The kept figures."""
    if not RESULTS.exists():
        return {}
    kept = json.loads(RESULTS.read_text(encoding="utf-8"))
    pairs = ("strict", "uptime", "work")
    return {one["name"]: Found(**{**one, **{key: tuple(one[key]) for key in pairs}}) for one in kept}


def main() -> None:
    """Simulate and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate.published", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="simulations of each run")
    parser.add_argument("--full", action="store_true", help="as many days as were published")
    parser.add_argument("--days", type=float, help="days of each simulation, at most those of the publication")
    parser.add_argument("--runs", default="", help="names of runs, or parts of them, separated by commas")
    parser.add_argument("--document-only", action="store_true", help="write the table from the kept figures")
    options = parser.parse_args()
    gc.set_threshold(100_000, 20, 20)  # plans make many short-lived objects and no circles
    found = load()
    wanted = [part for part in options.runs.split(",") if part]
    for run in () if options.document_only else RUNS:
        if wanted and not any(part in run.name for part in wanted):
            continue
        days = run.days if options.full else min(run.days, options.days or default_days(run))
        each = find(run, days=days, seeds=options.seeds)
        print(f"{each.name}: strict {_share(each.strict)}, {each.seconds:.0f} s", flush=True)
        found[run.name] = each
        kept = [asdict(found[one.name]) for one in RUNS if one.name in found]
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    write(found)


if __name__ == "__main__":
    main()
