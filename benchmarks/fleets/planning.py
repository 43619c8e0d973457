"""What a plan of a large job costs when every size is legal, beside one with the few sizes that come out even.

The same job of 1,000 nodes without spares loses nodes, trains on fewer and grows back in virtual time, once with
`elasticity.sizes: Any` and once with `Even`, by turns; each call of the operator's own `plan` is measured. Processor
time, not wall time: the answer must not depend on what else the machine does.

    python -m benchmarks.fleets.planning --json out/bench/planning.json
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

from benchmarks.fleetlab.figures import Report
from trainium_operator.plan.plan import plan
from trainium_operator.simulate.job import make_spec, read_job
from trainium_operator.simulate.stages import StageTimes
from trainium_operator.simulate.study import Case, simulate
from trainium_operator.simulate.virtual import operator
from trainium_operator.simulate.virtual.failures import FailureModel, FaultClass, Mix
from trainium_operator.simulate.virtual.schedule import Fault

if TYPE_CHECKING:
    from trainium_operator.plan.model.actions import Plan
    from trainium_operator.plan.model.observed import Observed, PlanSettings

JOB = Path(__file__).parents[1] / "simulate/job-1000.yaml"
NODES = 1000
RULES = ("Any", "Even")
HOUR = 3600.0
GOAL = 25.0
"""Milliseconds that the middle one of all plans may take."""
LOSSES = tuple(
    Fault(
        at=HOUR * (1 + number), kind=FaultClass.NODE_LOST, slot=17 * (number + 1), lasts=2.5 * HOUR, same_machine=True
    )
    for number in range(6)
)


def milliseconds(sizes: str) -> list[float]:
    """Processor time of each plan of half a day."""
    changes = {"elasticity.sizes": sizes, "workers.minReplicas": 1}
    spec = make_spec(JOB, read_job(JOB), nodes=NODES, spares=0, changes=changes)
    case = Case(
        spec=spec, stages=StageTimes(), model=FailureModel(), mix=Mix.AUTO, days=0.5, rate=0.0, trace=LOSSES
    )  # fmt: skip
    took: list[float] = []

    def timed(observed: Observed, settings: PlanSettings) -> Plan:
        began = time.process_time()
        result = plan(observed, settings)
        took.append((time.process_time() - began) * 1000)
        return result

    gc.collect()
    with patch.object(operator, "plan", timed):
        simulate(case, 0)
    return took


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    gc.set_threshold(100_000, 20, 20)  # as the operator does
    report = Report("planning", quick=False)
    milliseconds("Even")  # what is imported and remembered at the first call is no plan's
    for number in range(options.rounds):
        took = {rule: milliseconds(rule) for rule in (RULES if number % 2 else reversed(RULES))}
        for rule in RULES:
            report.add(
                f"a plan, median: {rule}",
                NODES,
                "ms",
                statistics.median(took[rule]),
                goal=GOAL if rule == "Any" else None,
            )
            report.add(f"a plan, slowest: {rule}", NODES, "ms", max(took[rule]))
        middle = [statistics.median(took[rule]) for rule in RULES]
        report.add("a plan with all sizes legal over one with the even ones", NODES, "x", middle[0] / middle[1])
    report.write(options.json)
    report.print()


if __name__ == "__main__":
    main()
