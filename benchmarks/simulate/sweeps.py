"""Which settings serve a job best: each field tried by itself, on the stages that are expected on trn1.

Run `python -m benchmarks.simulate.sweeps [FIELD] [--seeds 10] [--keep]`; it prints a table for each field.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from benchmarks.simulate.command import share, simulated

_JOB = "manifests/examples/hlat-7b.yaml"
_COMMON = ("--stages", "benchmarks/simulate/stages-trn1.yaml", "--failures-per-1000-node-days", "22", "--days", "30")


@dataclass(frozen=True, slots=True)
class Sweep:
    """Values of one field."""

    field: str
    values: tuple[str, ...]
    default: str
    spares: str = "0,2"


SWEEPS = (
    Sweep("recovery.rescaleAfterSeconds", ("0", "30", "60", "120", "300", "600", "1200", "3600"), "120"),
    Sweep("workers.minReplicas", ("43", "64", "86", "128"), "1"),
    Sweep("recovery.hang.stepFloorSeconds", ("5", "15", "60"), "15"),
    Sweep("recovery.stragglers.persistSteps", ("10", "50", "200", "1000"), "50"),
    Sweep("recovery.heartbeatTimeoutSeconds", ("2", "4", "10", "40"), "4"),
    Sweep("checkpoint.memory.buddies", ("1", "0"), "1"),
    Sweep("checkpoint.memory.everySteps", ("1", "10", "0"), "1"),
    Sweep("checkpoint.durable.everySteps", ("100", "300", "1000", "3000"), "everySeconds 300"),
    Sweep("trainer.batch.tolerance", ("0", "0.01"), "0"),
)


def arguments(sweep: Sweep, seeds: int) -> tuple[str, ...]:
    """Of the command."""
    vary = ("--vary", f"{sweep.field}={','.join(sweep.values)}")
    return (_JOB, *_COMMON, "--spares", sweep.spares, "--seeds", str(seeds), *vary)


def table(sweep: Sweep, seeds: int, *, again: bool) -> str:
    """For people."""
    lines = [
        f"`{sweep.field}`, default {sweep.default}:",
        "",
        "| value | spares | strict | work done | worst day |",
        "|---|---|---|---|---|",
    ]
    for result in simulated(f"sweep-{sweep.field}", arguments(sweep, seeds), again=again):
        value = str(result["variation"]).partition("=")[2]
        figures = f"{share(result['strict'])} | {share(result['work'])} | {result['worstDay'] * 100:.2f} %"
        lines.append(f"| {value} | {result['spares']} | {figures} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="benchmarks.simulate.sweeps", description=__doc__)
    parser.add_argument("field", nargs="?", choices=[sweep.field for sweep in SWEEPS], help="default: all")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--keep", action="store_true", help="take what was simulated before with the same arguments")
    options = parser.parse_args()
    for sweep in SWEEPS:
        if options.field in (None, sweep.field):
            print(table(sweep, options.seeds, again=not options.keep), flush=True)


if __name__ == "__main__":
    main()
