"""All benchmarks, one after the other: `make bench`, or `python benchmarks/run.py fleet --quick` for one of them.

Each prints its table and writes `out/bench/<name>.json`. Figures move with the machine's load: quote ratios. Afterwards
`python benchmarks/report.py` writes docs/benchmarks.md from those files, and `check.py` holds them to their thresholds.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
OUT = Path("out/bench")
NAMES = (
    "control_plane",
    "checkpoint_stall",
    "checkpoint_bandwidth",
    "artifacts",
    "fleet",
    "jobset",
    "coordinator",
    "growth",
    "flood",
    "recovery",
    "first_step",
    "training_speed",
    "finetuning",
    "loader",
    "scale",
    "client",
    "pages",
)
SCALABLE = ("fleet", "jobset", "coordinator", "growth", "flood", "training_speed", "finetuning")
"""Those that know `--quick`."""


def main() -> int:
    """Run the named benchmarks, by default all; the worst exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(NAMES)}; by default all")
    parser.add_argument("--quick", action="store_true", help="small fleets and models, fewer rounds")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in NAMES]
    if unknown:
        print(f"There is no benchmark {unknown[0]!r}; there are {', '.join(NAMES)}.", file=sys.stderr)
        return 64
    OUT.mkdir(parents=True, exist_ok=True)
    worst = 0
    for name in options.names or NAMES:
        print(f"== {name}", flush=True)
        script = FOLDER / f"{name}.py"
        program = [str(script)] if script.is_file() else ["-m", f"{FOLDER.name}.{name}"]
        command = [sys.executable, *program, "--json", str(OUT / f"{name}.json")]
        if options.quick and name in SCALABLE:
            command.append("--quick")
        worst = max(worst, subprocess.run(command, check=False).returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main())
