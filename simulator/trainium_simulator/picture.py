"""A picture of a study: what each spare buys, and where the time goes. matplotlib is imported when one is asked for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trainium_simulator.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from trainium_simulator.study import Result


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
