"""What a job of many ranks costs: simulated sizes, and beside them real worlds on this machine.

    python -m benchmarks.scale [--sizes 8,64,512,4096] [--real 8,32] [--document docs/scale.md] [--json FILE]
                               [--beside FILE]

`--real` starts that many training processes (`benchmarks/scale/world.py`); worlds that were run before are kept in
out/bench/scale-world-*.json and stay on the page. `--beside` is the JSON of a run on another torch, for instance on
the one of trn1's images: `scripts/nxd_environment.sh` makes an environment with it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.scale import document, restarting, saving, starting
from benchmarks.scale.book import Book
from benchmarks.scale.models import MODELS
from trainium_contract.needs import descriptors

ROOT = Path(__file__).parents[2]
SIZES = (8, 64, 512, 4096)
FILES = "Open files"


def simulate(book: Book, sizes: list[int]) -> None:
    """All figures of all sizes."""
    for ranks in sizes:  # before anything has threads or much memory: the agents are forked from here
        print(f"agents of {ranks:,} ranks", flush=True)
        restarting.measure_agents(book, ranks)
    for ranks in sizes:
        restarting.measure_coordinator(book, ranks)
        nodes = max(1, ranks // restarting.ON_A_NODE)
        for where, count in (
            ("rank 0", descriptors.needed_by_first_rank(ranks)),
            ("a middle rank", descriptors.needed_by_most_ranks(ranks)),
            ("the first agent", descriptors.needed_by_first_agent(ranks, nodes)),
        ):
            book.add(FILES, "limit that is asked for", where, "count", ranks, count)
        for model in MODELS:
            if ranks % model.tensor == 0:
                began = time.monotonic()
                starting.measure(book, model, ranks)
                saving.measure(book, model, ranks)
                print(f"{model.name} on {ranks:,} ranks: {time.monotonic() - began:.0f} s", flush=True)


def real(sizes: list[int], folder: Path) -> None:
    """Real worlds, each in a process of its own; stops where one does not fit."""
    for ranks in sizes:
        print(f"a real world of {ranks} ranks", flush=True)
        path = folder / f"scale-world-{ranks}.json"
        command = [sys.executable, "-m", "benchmarks.scale.world", str(ranks), "--json", str(path)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
        if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 2:
            break


def show(book: Book) -> None:
    """The table."""
    table = Table(title="scale")
    sizes = sorted({ranks for figure in book.figures for ranks in figure.values})
    for heading in ("figure", "where", *(f"{ranks:,}" for ranks in sizes), "growth", "budget"):
        table.add_column(heading)
    for each in book.figures:
        values = [document.shown(each.values.get(ranks), each.unit) for ranks in sizes]
        budget = {None: "", True: "kept", False: "missed"}[each.met]
        table.add_row(each.name, each.where, *values, each.law.strip("*"), budget)
    Console(width=170).print(table)


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="simulated numbers of ranks; empty for none")
    parser.add_argument("--real", default="", help="numbers of ranks to start as processes")
    parser.add_argument("--json", type=Path, default=ROOT / "out/bench/scale.json")
    parser.add_argument("--document", type=Path, help="write the page here")
    parser.add_argument("--beside", type=Path, help="JSON of the same on another torch, for the page")
    options = parser.parse_args()
    options.json.parent.mkdir(parents=True, exist_ok=True)
    if options.sizes:
        book = Book()
        simulate(book, [int(size) for size in options.sizes.split(",")])
        show(book)
        raw: dict[str, Any] = {
            "benchmark": "scale",
            "date": datetime.now(UTC).date().isoformat(),
            "machine": {
                "cores": os.cpu_count(),
                "load": os.getloadavg()[0],
                "processor": platform.machine(),
                "torch": version("torch").partition("+")[0],
            },
            "figures": [figure.to_json() for figure in book.figures],
        }
        options.json.write_text(json.dumps(raw, indent=1) + "\n")
    if options.real:
        real([int(size) for size in options.real.split(",")], options.json.parent)
    if options.document:
        worlds = [json.loads(path.read_text()) for path in options.json.parent.glob("scale-world-*.json")]
        beside = json.loads(options.beside.read_text()) if options.beside else None
        options.document.write_text(document.page(json.loads(options.json.read_text()), worlds, beside))
    return 0


if __name__ == "__main__":
    sys.exit(main())
