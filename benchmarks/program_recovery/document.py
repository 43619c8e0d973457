"""Write the table of all programs into docs/program-runs.md (`python -m benchmarks.program_recovery.document`).

The figures are in `programs.json`, where `record` puts the runs of a report; other programs keep theirs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.program_recovery.costs import read_report, write_report
from benchmarks.program_recovery.programs import FAULTS, PROGRAMS
from scripts.markdown_table import render_table

if TYPE_CHECKING:
    from benchmarks.program_recovery.costs import FaultCost, RunCost, Runs

RESULTS = Path(__file__).with_name("programs.json")
PAGE = Path(__file__).parents[2] / "docs/program-runs.md"
_BLOCK = re.compile(r"(?<=<!-- table of programs\.json -->\n)(.*?)(?=<!-- end of the table -->)", re.DOTALL)


def record(runs: Runs) -> None:
    """Add the runs of a report to the results, in the order of the programs, and write the table into the page."""
    merged = read_report(RESULTS) | runs
    write_report(RESULTS, {name: merged[name] for name in PROGRAMS if name in merged})
    PAGE.write_text(update_page(PAGE.read_text(), read_report(RESULTS)))


def update_page(page: str, runs: Runs) -> str:
    """Return the page with the table of the runs. Raises ValueError without its marks."""
    if not _BLOCK.search(page):
        raise ValueError(f"{PAGE} has no marks of the table of {RESULTS.name}")
    return _BLOCK.sub(lambda _: f"\n{_render(runs)}\n", page)


def _render(runs: Runs) -> str:
    if not runs:
        return "No run is recorded yet.\n"
    headings = ("program", *FAULTS, "samples lost, repeated", "curve, same size", "curve, all")
    dates = sorted({run.date for run in runs.values()})
    steps, loads = sorted(run.steps for run in runs.values()), sorted(run.load for run in runs.values())
    minutes = sum(run.seconds for run in runs.values()) / 60
    conditions = (
        " to ".join(sorted({dates[0], dates[-1]})),
        f"runs of {steps[0]} to {steps[-1]} steps" if steps[0] < steps[-1] else f"runs of {steps[0]} steps",
        f"load {loads[0]:.0f} to {loads[-1]:.0f} on two processors",
        f"{minutes:.0f} min",
    )
    missing = [program.title for name, program in PROGRAMS.items() if name not in runs]
    lines = [
        render_table(headings, [_format_row(run) for run in runs.values()]),
        "",
        f"{', '.join(conditions)}.",
        *([f"Not run yet: {'; '.join(missing)}."] if missing else []),
        *(
            f"Not to the end: {run.title}, {run.problem.partition('. ')[0].rstrip('.')}."
            for run in runs.values()
            if run.problem
        ),
    ]
    return "\n".join(lines) + "\n"


def _format_row(run: RunCost) -> tuple[str, ...]:
    costs = {fault.kind: _format_cell(fault) for fault in run.faults}
    if not run.completed:
        return (run.title, *(costs.get(kind, "not run") for kind in FAULTS), "not completed", "", "")
    return (
        run.title,
        *(costs.get(kind, "not run") for kind in FAULTS),
        f"{run.samples_missing}, {run.samples_repeated}",
        _format_difference(run.loss_difference_before_resize),
        _format_difference(run.loss_difference),
    )


def _format_cell(fault: FaultCost) -> str:
    """Return seconds to the first new step, and steps computed again; the operator's end interrupts nothing."""
    if fault.first_new_step_seconds is None:
        return "never"
    if fault.kind == "killed operator" and not fault.steps_recomputed:
        return "none"
    return f"{fault.first_new_step_seconds:.1f} s, {fault.steps_recomputed}"


def _format_difference(value: float) -> str:
    return f"{value:.0e}" if value else "equal"


if __name__ == "__main__":
    record({})
