# ruff: noqa: INP001 - a script
"""Tells what `make coverage` has measured: a table of rooms, and the files and branches that are short of the goal.

Usage: python scripts/coverage/coverage_table.py FOLDER
FOLDER has ROOM.json for each measured room, as `coverage json` writes it. Ends with 1 when a room is short of the goal.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GOAL_PERCENT = 95.0
ROOMS = ("plan", "checkpoint", "agent")


@dataclass(frozen=True, slots=True)
class Counts:
    """Lines and branches of a room or a file, and how many of them were taken."""

    lines: int
    lines_taken: int
    branches: int
    branches_taken: int

    @classmethod
    def of(cls, summary: dict[str, Any]) -> Counts:
        """From coverage's words."""
        return cls(
            summary["num_statements"], summary["covered_lines"], summary["num_branches"], summary["covered_branches"]
        )

    @property
    def percent(self) -> float:
        """Of the branches; all of none is all."""
        return 100.0 * self.branches_taken / self.branches if self.branches else 100.0


def table(rooms: dict[str, dict[str, Any]]) -> str:
    """One row a room."""
    rows = ["| room | lines | branches | branches taken | % |", "|---|---|---|---|---|"]
    for room, report in rooms.items():
        counts = Counts.of(report["totals"])
        rows.append(
            f"| `{room}` | {counts.lines} | {counts.branches} | {counts.branches_taken} | {counts.percent:.1f} |"
        )
    return "\n".join(rows)


def short_files(report: dict[str, Any]) -> list[str]:
    """The files that are short of the goal, worst first, with the branches that no test takes: from line to line."""
    found = []
    for name, file in report["files"].items():
        counts = Counts.of(file["summary"])
        if counts.percent < GOAL_PERCENT or (not counts.branches and counts.lines_taken < counts.lines):
            missing = ", ".join(f"{start}-{'end' if end < 0 else end}" for start, end in file["missing_branches"])
            lines = "" if missing else f"lines {', '.join(map(str, file['missing_lines']))}"
            found.append((counts.percent, f"{counts.percent:5.1f} % {name}: {missing}{lines}"))
    return [line for _, line in sorted(found)]


def main() -> int:
    """Write both; 1 when a room is short of the goal."""
    folder = Path(sys.argv[1])
    rooms = {room: json.loads(file.read_text()) for room in ROOMS if (file := folder / f"{room}.json").exists()}
    for report in rooms.values():
        for line in short_files(report):
            sys.stdout.write(line + "\n")
    sys.stdout.write(table(rooms) + "\n")
    short = [room for room, report in rooms.items() if Counts.of(report["totals"]).percent < GOAL_PERCENT]
    if short:
        sys.stderr.write(f"coverage: short of {GOAL_PERCENT:g} % of the branches: {', '.join(short)}\n")
    return int(bool(short))


if __name__ == "__main__":
    sys.exit(main())
