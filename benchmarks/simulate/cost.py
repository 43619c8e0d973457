"""What a million node-hours cost to simulate, in processor time of one core; goal: a minute.

    python -m benchmarks.simulate.cost      # about 326 days of hlat-7b on 128 nodes with 2 spares, at 4 and at 22

Processor time, not wall time: the answer must not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path

from trainium_operator.simulate.job import make_spec, read_job
from trainium_operator.simulate.stages import StageTimes
from trainium_operator.simulate.study import Case, simulate
from trainium_operator.simulate.virtual.failures import FailureModel, Mix

HERE = Path(__file__).parent
JOB = HERE.parents[1] / "manifests/examples/hlat-7b.yaml"
RESULTS = HERE / "cost.json"
NODES, SPARES, DAYS = 128, 2, 30.0
MILLION = 1_000_000
GOAL_SECONDS = 60.0


def cost(rate: float, seeds: int) -> dict[str, float]:
    """Simulate months, one a seed; what they took, by the node-hours of the nodes that train."""
    spec = make_spec(JOB, read_job(JOB), nodes=NODES, spares=SPARES, changes={})
    case = Case(spec=spec, stages=StageTimes(), model=FailureModel(), mix=Mix.AUTO, days=DAYS, rate=rate)
    began = time.process_time()
    plans = sum(simulate(case, seed).plans for seed in range(seeds))
    seconds = time.process_time() - began
    hours = seeds * DAYS * 24 * NODES
    return {
        "rate": rate,
        "nodeHours": hours,
        "plans": plans,
        "seconds": round(seconds, 1),
        "secondsAMillion": round(seconds * MILLION / hours, 1),
        "millisecondsAPlan": round(1000 * seconds / plans, 2),
        "goalSecondsAMillion": GOAL_SECONDS,
    }


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=11, help="months of each rate; 11 are a million node-hours")
    options = parser.parse_args()
    gc.set_threshold(100_000, 20, 20)  # as the command does
    found = [cost(rate, options.seeds) for rate in (4.0, 22.0)]
    text = json.dumps(found, indent=1) + "\n"
    RESULTS.write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
