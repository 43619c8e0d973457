"""All benchmarks, one after the other: `make bench`, or `python benchmarks/run.py recovery` for one of them.

Each prints its table and writes `out/bench/<name>.json`. Figures move with the machine's load: quote ratios.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
NAMES = ("control_plane", "checkpoint_stall", "recovery")


def main() -> int:
    """Run the named benchmarks, by default all; the worst exit code."""
    out = Path("out/bench")
    out.mkdir(parents=True, exist_ok=True)
    worst = 0
    for name in sys.argv[1:] or NAMES:
        if name not in NAMES:
            print(f"There is no benchmark {name!r}; there are {', '.join(NAMES)}.", file=sys.stderr)
            return 64
        print(f"== {name}", flush=True)
        command = [sys.executable, str(FOLDER / f"{name}.py"), "--json", str(out / f"{name}.json")]
        worst = max(worst, subprocess.run(command, check=False).returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main())
