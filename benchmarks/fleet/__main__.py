"""Measure how fast and how cheaply a job starts and recovers on 128 to 5,000 fake nodes of a real control plane.

Figures that depend on the machine are divided by the floor of the same run: the same pods, created and deleted by a
plain client with 64 requests in flight. The controller manager may send 200 requests a second and the scheduler 500, as
in the measurements of the peers. Agents are simulated: the real protocol over real TLS with real tokens, in one
process.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from benchmarks.fleet.plan import MeasurementPlan
from benchmarks.fleet.scenario import run_fleet
from benchmarks.harness.figures import Report, create_parser

SIZES = (128, 1000, 5000)
QUICK_SIZES = (128, 1000)


def main() -> None:
    """Measure, print and write the figures."""
    parser = create_parser("fleet", __doc__)
    parser.add_argument("--nodes", type=int, nargs="+", help="other numbers of nodes")
    options = parser.parse_args()
    report = Report("fleet", options.quick)
    for nodes in options.nodes or (QUICK_SIZES if options.quick else SIZES):
        with tempfile.TemporaryDirectory(prefix="trainium-bench-") as folder:
            asyncio.run(run_fleet(MeasurementPlan.for_size(nodes, quick=options.quick), report, Path(folder)))
        report.write(options.json)
    report.print()


if __name__ == "__main__":
    main()
