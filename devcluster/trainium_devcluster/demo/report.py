"""The result: `report.json`, and a picture of both loss curves."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_devcluster.story.curves import draw

if TYPE_CHECKING:
    from pathlib import Path

    from trainium_devcluster.story.curves import Curves


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Everything that the demo found out."""

    completed: bool
    curves: Curves
    every_sample_once: bool
    goodput: float
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The contents of report.json."""
        return {
            "completed": self.completed,
            **self.curves.to_json(),
            "everySampleSeenOnce": self.every_sample_once,
            "goodput": self.goodput,
            "seconds": round(self.seconds, 1),
        }


def write(result: DemoResult, folder: Path) -> None:
    """Write report.json and loss.png."""
    (folder / "report.json").write_text(json.dumps(result.to_json(), indent=1) + "\n")
    _picture(result.curves, folder / "loss.png")


def _picture(curves: Curves, path: Path) -> None:
    import matplotlib as mpl  # noqa: PLC0415 - slow to import, needed only here

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(9, 5.6), sharex=True, height_ratios=(3, 1), constrained_layout=True
    )
    draw(curves, top, bottom)
    top.set_title("Same loss curve, whatever fails")
    figure.savefig(path, dpi=120)
    plt.close(figure)
