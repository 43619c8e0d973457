"""Compare the lines of each part of the repository with its limit in line_limits.toml (`make check`).

It counts the lines of tracked files below the folders of a part, including blanks and docstrings: of Python unless the
part has another `suffix`. A part has a `goal` if it is above its final limit.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]


def count_lines(folders: list[str], suffix: str) -> int:
    """Count the lines of all tracked files with the suffix below the folders."""
    patterns = [f"{folder}/*.{suffix}" for folder in folders]
    listed = subprocess.run(["git", "ls-files", "-z", *patterns], cwd=ROOT, check=True, capture_output=True, text=True)
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    return sum(file.read_bytes().count(b"\n") for file in files if file.is_file())


def main() -> int:
    """Print lines, limits and goals of all parts; return 1 if one is above its limit."""
    table = Table(title="Lines")
    for heading in ("part", "lines", "at most", "left", "goal"):
        table.add_column(heading, justify="left" if heading == "part" else "right")
    above = []
    for name, limit in tomllib.loads((ROOT / "line_limits.toml").read_text())["parts"].items():
        lines = count_lines(limit["folders"], limit.get("suffix", "py"))
        left = limit["at_most"] - lines
        table.add_row(
            name, f"{lines:,}", f"{limit['at_most']:,}", f"{left:,}", f"{limit.get('goal', limit['at_most']):,}"
        )
        if left < 0:
            above.append(f"{name} has {-left:,} lines too many: remove some, or raise its limit in line_limits.toml")
    Console().print(table)
    for sentence in above:
        sys.stderr.write(f"{sentence}\n")
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
