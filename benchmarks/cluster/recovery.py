"""From a fault to the first new step, on a real control plane with real training processes.

Four workers and a spare share this machine's cores. Each fault is repeated; medians and spread are printed with their
ratio to the goal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from trainium_devcluster.cluster import Cluster, node_specs, system_node
from trainium_devcluster.demo.story import DemoStory
from trainium_devcluster.story.view import View

if TYPE_CHECKING:
    from trainium_devcluster.story.curves import Fault
    from trainium_devcluster.story.jobs import Run

ROOT = Path(__file__).parents[2]
GOALS = {"killed process": 3.0, "lost node": 8.0, "resize 4 to 3": 5.0, "resize 3 to 4": 5.0}
STEPS = 20_000


class LongStory(DemoStory):
    """The demo's job, made long enough for many faults."""

    def manifest(self, name: str) -> dict[str, object]:
        """The demo's job with more steps."""
        job = super().manifest(name)
        job["spec"]["trainer"]["steps"] = STEPS
        return job

    def settle(self, run: Run) -> None:
        """Wait until the spare is warm and ten more steps are done."""
        self.until(run, "a warm spare", lambda: run.watch.status.get("spares", 0) >= 1)
        self.until_step(run, run.log.newest + 10)


def ours(repeat: int, out: Path) -> list[Fault]:
    """Every fault, `repeat` times, in one job."""
    with (
        View(Console()) as view,
        Cluster.start(nodes=[*node_specs(5, cpu="4", memory="8Gi"), system_node()], write=view.say) as cluster,
    ):
        story = LongStory(cluster, view, ROOT, out)
        story.install()
        with story.run(story.manifest("bench")) as run:
            story.until_step(run, 5)
            for _ in range(repeat):
                story.settle(run)
                story.kill_process(run)
                story.settle(run)
                cluster.faults.start_node(story.lose_node(run))
                story.settle(run)
                story.resize(run, 3)
                story.settle(run)
                story.resize(run, 4)
        return story.faults


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trainium-bench-") as folder:
        faults = ours(options.repeat, Path(folder))
    table = Table(title="From the fault to the first new step")
    for heading in ("fault", "median", "fastest", "slowest", "goal", "of the goal", "steps lost", "pods replaced"):
        table.add_column(heading, justify="left" if heading == "fault" else "right")
    rows = {kind: [fault for fault in faults if fault.kind == kind] for kind in GOALS}
    for kind, found in rows.items():
        seconds = [_cost(fault) for fault in found]
        table.add_row(
            kind,
            *_spread(seconds),
            f"{GOALS[kind]:g} s",
            f"{statistics.median(seconds) / GOALS[kind]:.2f}",
            str(max(fault.steps_lost for fault in found)),
            str(max(fault.pods_replaced for fault in found)),
        )
    Console().print(table)
    result = {
        "goalSeconds": GOALS,
        "faults": {kind: [_row(fault) for fault in found] for kind, found in rows.items()},
    }
    options.json.write_text(json.dumps(result, indent=1) + "\n")


def _cost(fault: Fault) -> float:
    """Seconds without training: of a resize its pause, of a fault all until the first new step."""
    cost = fault.pause_seconds if fault.kind.startswith("resize") else fault.recovered_seconds
    assert cost is not None
    return cost


def _row(fault: Fault) -> dict[str, object]:
    return {
        "detectedSeconds": fault.detected_seconds,
        "recoveredSeconds": fault.recovered_seconds,
        "pauseSeconds": fault.pause_seconds,
        "stepsLost": fault.steps_lost,
        "podsReplaced": fault.pods_replaced,
    }


def _spread(seconds: list[float]) -> tuple[str, str, str]:
    return f"{statistics.median(seconds):.2f} s", f"{min(seconds):.2f} s", f"{max(seconds):.2f} s"


if __name__ == "__main__":
    main()
