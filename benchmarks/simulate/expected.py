"""What goodput a job may expect: the goals of the project, simulated with many seeds.

Run `python -m benchmarks.simulate.expected [--seeds 20] [--keep]`; it writes the table of docs/goodput.md. It takes ten
minutes on an idle core; with `--keep` what was simulated before with the same arguments is not simulated again.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from benchmarks.simulate.command import ROOT, share, simulated

PAGE = ROOT / "docs/goodput.md"
BEGIN, END = "<!-- expected: begin -->", "<!-- expected: end -->"
_HLAT = "manifests/examples/hlat-7b.yaml"
_THOUSAND = "benchmarks/simulate/job-1000.yaml"
_TRN1 = ("--stages", "benchmarks/simulate/stages-trn1.yaml")
_RATES = ("--failures-per-1000-node-days", "4,22")
_SHORT_DAYS = 1
_SHORT_SEEDS = 4


@dataclass(frozen=True, slots=True)
class Table:
    """Cases of one command."""

    name: str
    stages: str
    arguments: tuple[str, ...]


def tables(seeds: int) -> tuple[Table, ...]:
    """What is simulated. A larger job has more faults and dearer plans, so that of 1,000 nodes lives for fewer days."""
    month = ("--days", "30", "--seeds", str(seeds))
    few = ("--days", str(_SHORT_DAYS), "--seeds", str(min(seeds, _SHORT_SEEDS)))
    return (
        Table("machinery", "machinery", (_HLAT, "--spares", "0..4", *_RATES, *month)),
        Table("trn1", "trn1", (_HLAT, *_TRN1, "--spares", "2", *_RATES, *month)),
        Table("thousand", "machinery", (_THOUSAND, "--failures-per-1000-node-days", "22", *few)),
    )


def goal(result: dict[str, Any]) -> float | None:
    """Strict goodput that the project set itself; None where it set none."""
    often = result["failuresPer1000NodeDays"] > 10
    if result["nodes"] >= 1000:
        return 0.995 if often else None
    if result["spares"] != 2:
        return None
    return 0.997 if often else 0.999


def row(stages: str, result: dict[str, Any]) -> str:
    """One line of the table."""
    wanted = goal(result)
    lowest = result["strict"]["mean"] - (result["strict"]["margin95"] or 0.0)
    judged = ""
    if wanted is not None:
        reached = (
            "reached" if lowest >= wanted else "mean reaches it" if result["strict"]["mean"] >= wanted else "missed"
        )
        judged = f"{wanted * 100:.1f} %, {reached}"
    cells = [
        f"{result['nodes']:,} + {result['spares']}",
        f"{result['failuresPer1000NodeDays']:g}",
        stages,
        f"{result['days']:g} x {result['seeds']}",
        share(result["strict"]),
        share(result["uptime"]),
        share(result["work"]),
        f"{result['worstDay'] * 100:.2f} %",
        judged,
    ]
    return f"| {' | '.join(cells)} |"


def section(rows: list[str]) -> str:
    """The table, between its marks."""
    head = (
        "| nodes + spares | failures per 1,000 node-days | stages | days x seeds | strict | uptime | work done "
        "| worst day | goal for strict |\n|---|---|---|---|---|---|---|---|---|"
    )
    return "\n".join([BEGIN, "", head, *rows, "", END])


def placed(page: str, part: str) -> str:
    """The page with the part in place of the earlier one."""
    before, _, rest = page.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"{PAGE.name} lacks {BEGIN} or {END}")
    return before + part + after


def main() -> None:
    """Simulate and write."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.simulate.expected", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--keep", action="store_true", help="take what was simulated before with the same arguments")
    options = parser.parse_args()
    rows = [
        row(table.stages, result)
        for table in tables(options.seeds)
        for result in simulated(table.name, table.arguments, again=not options.keep)
    ]
    part = section(rows)
    PAGE.write_text(placed(PAGE.read_text(encoding="utf-8"), part), encoding="utf-8")
    print(part)


if __name__ == "__main__":
    main()
