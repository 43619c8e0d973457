"""Run all benchmarks, one after the other: `make bench`, or `python -m benchmarks.run fleet --quick` for one of them.

Each prints its table and writes `out/bench/<name>.json`. Figures depend on the machine's load, so quote ratios.
Afterwards `python -m benchmarks.report` writes docs/benchmarks.md from those files, and `check.py` compares them with
their thresholds.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

OUT = Path("out/bench")
MODULES = {
    "fleet": "benchmarks.fleet",
    "coordinator": "benchmarks.fleet.coordinator",
    "training_speed": "benchmarks.training_speed",
    "elastic_cost": "benchmarks.elastic_cost",
}


def main() -> int:
    """Run the named benchmarks, by default all; return the worst exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(MODULES)}; by default all")
    parser.add_argument("--quick", action="store_true", help="small fleets and models, fewer rounds")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in MODULES]
    if unknown:
        print(f"There is no benchmark {unknown[0]!r}; there are {', '.join(MODULES)}.", file=sys.stderr)
        return 64
    OUT.mkdir(parents=True, exist_ok=True)
    worst = 0
    for name in options.names or MODULES:
        print(f"== {name}", flush=True)
        command = [sys.executable, "-m", MODULES[name], "--json", str(OUT / f"{name}.json")]
        if options.quick:
            command.append("--quick")
        worst = max(worst, subprocess.run(command, check=False).returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main())
