"""The simulator against real processes: rows of docs/fault-table.md played in virtual time, with its job and step time.

Run `python -m benchmarks.simulate.calibrate`; it writes the table of docs/goodput.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainium_contract.job import TrainingJobSpec
from trainium_operator.simulate.stages import StageTimes
from trainium_operator.simulate.virtual.failures import FailureModel, FaultClass
from trainium_operator.simulate.virtual.schedule import Fault
from trainium_operator.simulate.virtual.world import Setting, World

TABLE = Path(__file__).parents[2] / "docs" / "fault-table.md"
PACE_SECONDS = 0.15
"""Length of a step in the fault table."""
ALLOWED = 0.2
"""Of the measured median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the fault table, and the fault that stands for it."""

    number: str
    kind: FaultClass
    changes: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Seconds from the failure to the first new step."""

    number: str
    fault: str
    measured: float
    simulated: float

    @property
    def off(self) -> float:
        """Share of the measured one."""
        return self.simulated / self.measured - 1


ROWS = (
    Row(number="1", kind=FaultClass.PROCESS_CRASH, changes={}),
    Row(number="2", kind=FaultClass.HANG, changes={}),
    Row(number="5", kind=FaultClass.NODE_LOST, changes={}),
    Row(number="6", kind=FaultClass.DEVICE_ERROR, changes={}),
    Row(
        number="17",
        kind=FaultClass.NODE_LOST,
        changes={"workers": {"spares": 0, "minReplicas": 1}, "recovery": {"rescaleAfterSeconds": 3}},
    ),
    Row(number="18", kind=FaultClass.MAINTENANCE, changes={}),
)


def compare() -> list[Compared]:
    """Each row, measured and simulated."""
    measured = _measured(TABLE.read_text(encoding="utf-8"))
    return [
        Compared(
            number=row.number, fault=measured[row.number][0], measured=measured[row.number][1], simulated=_play(row)
        )
        for row in ROWS
    ]


def _measured(text: str) -> dict[str, tuple[str, float]]:
    """Fault and median time to the first new step, by number, of the rows with real processes."""
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if len(cells) > 5 and cells[2] == "real processes" and cells[5]:
            rows[cells[0]] = (cells[1], float(cells[5].split("/")[0]))
    return rows


def _play(row: Row) -> float:
    recovery = {"hang": {"stepFloorSeconds": 3}, **row.changes.get("recovery", {})}
    spec = TrainingJobSpec.model_validate(
        {
            "workers": {
                "replicas": 3,
                "spares": 1,
                "accelerator": {"device": "cpu"},
                **row.changes.get("workers", {}),
            },
            "trainer": {"batch": {"globalSize": 12}},
            "recovery": recovery,
        }
    )
    stages = StageTimes(step_seconds=PACE_SECONDS)
    world = World(Setting(spec=spec, stages=stages, model=FailureModel(), days=0.05))
    outcome = world.live([Fault(at=1800.0, slot=0, kind=row.kind, lasts=1800.0)])
    seconds = outcome.recoveries[0].seconds
    assert seconds is not None
    return seconds


def main() -> None:
    """Print the table."""
    print("| row | fault | measured, median | simulated | |\n|---|---|---|---|---|")
    for each in compare():
        print(f"| {each.number} | {each.fault} | {each.measured:.2f} s | {each.simulated:.2f} s | {each.off:+.0%} |")


if __name__ == "__main__":
    main()
