"""How long `trainium-devcluster up` takes with its programs cached, over the floor: etcd and the API server alone.

The floor is what the same run needs until the bare API server answers; goal: ready within 5 s on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from trainium_devcluster.cluster import Cluster, node_specs

GOAL_SECONDS = 5.0


def measure(nodes: int) -> float:
    """Seconds from nothing to a ready control plane and `nodes` ready nodes."""
    started = time.perf_counter()
    with Cluster.start(nodes=node_specs(nodes)):
        return time.perf_counter() - started


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    measure(0)  # the first start also reads the programs from the disk
    results = {nodes: [measure(nodes) for _ in range(options.repeat)] for nodes in (0, 5)}
    floor = statistics.median(results[0])
    table = Table(title="Development cluster, from nothing to ready")
    for heading in ("nodes", "median", "fastest", "slowest", "over the bare control plane", f"goal {GOAL_SECONDS:g} s"):
        table.add_column(heading, justify="right")
    for nodes, seconds in results.items():
        median = statistics.median(seconds)
        met = "met" if median <= GOAL_SECONDS else "missed"
        table.add_row(
            str(nodes),
            f"{median:.2f} s",
            f"{min(seconds):.2f} s",
            f"{max(seconds):.2f} s",
            f"{median / floor:.2f}",
            met,
        )
    Console().print(table)
    options.json.write_text(json.dumps({"goalSeconds": GOAL_SECONDS, "seconds": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
