"""Compare measured figures with thresholds (`make bench-check`); the nightly workflow runs it.

For each figure thresholds.json has the mean and spread of its runs, the machine, and the limit: the mean plus three
spreads, at least a quarter above the mean, and at least the goal if it is met. `python -m benchmarks.check --record`
writes it from the files in out/bench.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness.figures import format_value

FOLDER = Path(__file__).parent
THRESHOLDS = FOLDER / "thresholds.json"
FIGURES = FOLDER.parent / "out/bench"
BENCHMARKS = ("fleet", "coordinator")
MACHINE_INDEPENDENT_UNITS = ("x", "count", "/min", "MiB")
"""Units of figures that do not depend on the machine; others have a threshold only if they have a goal."""
Json = dict[str, Any]


def main() -> int:
    """Check figures, or record thresholds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="record the figures in out/bench as thresholds")
    parser.add_argument("--folder", type=Path, default=FIGURES)
    parser.add_argument("--thresholds", type=Path, default=THRESHOLDS)
    options = parser.parse_args()
    reports = [
        json.loads(path.read_text()) for name in BENCHMARKS if (path := options.folder / f"{name}.json").is_file()
    ]
    if not reports:
        print(f"There are no figures in {options.folder}; run benchmarks/run.py fleet coordinator.", file=sys.stderr)
        return 64
    if options.record:
        document = {"thresholds": [threshold for report in reports for threshold in compute_thresholds(report)]}
        options.thresholds.write_text(json.dumps(document, indent=1) + "\n")
        return 0
    return compare_with_thresholds(json.loads(options.thresholds.read_text())["thresholds"], reports)


def compute_thresholds(report: Json) -> list[Json]:
    """Return a threshold for each figure that can have one."""
    thresholds = []
    for figure in report["figures"]:
        if figure["name"].startswith("floor") or (
            figure["unit"] not in MACHINE_INDEPENDENT_UNITS and figure["goal"] is None
        ):
            continue
        values = figure["values"]
        mean, spread = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
        margin = max(3 * spread, 0.25 * mean, 1.0 if figure["unit"] == "count" and mean > 0 else 0.0)
        limit = max(mean + margin, figure["goal"] or 0.0)
        machine = f"{report['machine']['cores']} cores {report['machine']['processor']}"
        thresholds.append(
            {
                "benchmark": report["benchmark"],
                "name": figure["name"],
                "nodes": figure["nodes"],
                "unit": figure["unit"],
                "mean": round(mean, 4),
                "spread": round(spread, 4),
                "limit": round(limit, 4),
                "provenance": f"{report['date']}, {len(values)} values, {machine}",
            }
        )
    return thresholds


def compare_with_thresholds(thresholds: list[Json], reports: list[Json]) -> int:
    """Print the comparison; return 1 if a figure is above its limit, or missing at a measured size."""
    measured = {
        (report["benchmark"], figure["name"], figure["nodes"]): figure
        for report in reports
        for figure in report["figures"]
    }
    sizes = {(benchmark, nodes) for benchmark, _, nodes in measured}
    table = Table(title="Figures and their thresholds")
    for heading in ("benchmark", "figure", "nodes", "measured", "mean", "limit", ""):
        table.add_column(heading, justify="left" if heading in ("benchmark", "figure", "") else "right")
    failures = 0
    for threshold in thresholds:
        unit, key = threshold["unit"], (threshold["benchmark"], threshold["name"], threshold["nodes"])
        if (threshold["benchmark"], threshold["nodes"]) not in sizes:
            continue
        figure = measured.get(key)
        verdict = "missing" if figure is None else "ok" if figure["median"] <= threshold["limit"] else "REGRESSION"
        failures += verdict != "ok"
        median = "" if figure is None else format_value(figure["median"], unit)
        cells = (median, format_value(threshold["mean"], unit), format_value(threshold["limit"], unit), verdict)
        table.add_row(threshold["benchmark"], threshold["name"], str(threshold["nodes"]), *cells)
    Console(width=150).print(table)
    if failures:
        print(f"{failures} figures are worse than their thresholds.", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
