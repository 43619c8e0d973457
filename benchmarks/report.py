"""Add the JSON files of the benchmarks to benchmarks/results.json, and write docs/benchmarks.md from it.

`python -m benchmarks.report [JSON ...]`, by default out/bench/*.json. A size or a part that was not measured again
keeps its figures, with their date and machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness.figures import format_value

Json = dict[str, Any]
FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
RESULTS = FOLDER / "results.json"
TITLES = {"fleet": "A fleet", "coordinator": "The coordinator", "elastic_cost": "A step with elastic"}
SIZED_BY = {"coordinator": "agents", "elastic_cost": "parameters"}
TRAINING = "Training speed"
_COLUMNS = [
    "mode",
    "processes",
    "tokens/s",
    "transformers.Trainer",
    "ratio",
    "best steps",
    "compiled peer",
    "ratio of it",
    "memory",
]
_PAGE = """# Benchmarks

Written by `python -m benchmarks.report` from `benchmarks/results.json`, which has all figures with the lowest and the
highest value, the machine and the command of each; do not edit.

Seconds depend on the machine and its load; ratios depend on them much less. Figures that the machine determines are
therefore divided by the **floor** of the same run: the same pods, with the same preference for near nodes, created by
a plain client with 64 requests in flight (its restart: fail all, delete all, create all). Figures are medians, measured
on 2 cores; the fleets from {first} to {last}, on fake nodes. [Comparison](comparison.md) has figures of others
(`benchmarks/peers.json`), [measurements](measurements.md#what-a-job-costs-as-it-grows) the cost of a job as it grows.

`make bench` measures `A fleet`, `The coordinator`, `A step with elastic` and `Training speed` again. Each other part
was measured once, by commands that commit `02e7f559` has.

## Figures with a goal

| part | figure | goal | measured; goals that were missed are **bold** |
|---|---|---|---|
{goals}

## Training speed

Beside `transformers.Trainer`, on a CPU, 6 layers of width 384, samples of 256 tokens; goals: 1.1 x its tokens a
second, 1 x its memory.

| {columns} |
{rule}
{rows}

## Other figures

{headlines}
"""


def main() -> int:
    """Add the figures and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="JSON")
    options = parser.parse_args()
    files = options.files or sorted((ROOT / "out/bench").glob("*.json"))
    documents = {path.stem: json.loads(path.read_text()) for path in files if path.is_file()}
    reports = {document.get("benchmark", stem): document for stem, document in documents.items()}
    if not reports:
        print("There are no new figures (`make bench` measures some); the page is written from those that are there.")
    parts = add_reports(json.loads(RESULTS.read_text()), reports)
    RESULTS.write_text(json.dumps(parts, indent=1, ensure_ascii=False) + "\n")
    (ROOT / "docs/benchmarks.md").write_text(render_page(parts))
    return 0


def add_reports(parts: Json, reports: dict[str, Json]) -> Json:
    """Return the parts with the figures of new reports; what was not measured again stays."""
    parts = dict(parts)
    for name, title in TITLES.items():
        if name in reports:
            part = parts.get(title, {})
            sizes = part.get("sizes", {}) | _list_sizes(reports[name])
            ordered = sorted(sizes.items(), key=lambda item: int(item[0].split()[0].replace(",", "")))
            parts[title] = part | {"sizes": dict(ordered)}
    if "training_speed" in reports:
        parts[TRAINING] = _format_training_speed(reports["training_speed"])
    return parts


def _list_sizes(report: Json) -> Json:
    """Return the figures of a report by size."""
    machine, name = report["machine"], report["benchmark"]
    quick = ", quick mode" if report["quick"] else ""
    conditions = (
        f"{report['date']}, {machine['cores']} cores ({machine['processor']}), load {machine['load']:.1f}{quick}. "
        f"Command: `python -m benchmarks.run {name}{' --quick' if report['quick'] else ''}`."
    )
    sizes: Json = {}
    for row in report["figures"]:
        size = f"{row['nodes']:,} {SIZED_BY.get(name, 'nodes')}"
        figures = sizes.setdefault(size, {"conditions": conditions, "figures": {}})["figures"]
        unit = row["unit"]
        figure: Json = {"median": format_value(row["median"], unit)}
        if len(row["values"]) > 1:
            figure["spread"] = f"{format_value(min(row['values']), unit)} to {format_value(max(row['values']), unit)}"
        if row["goal"] is not None:
            figure |= {"goal": format_value(row["goal"], unit), "missed": not row["met"]}
        figures[row["name"]] = figure
    return sizes


def _format_training_speed(report: Json) -> Json:
    """Return the part on training speed: its conditions and a row for each mode."""
    machine, goals = report["machine"], report["goals"]
    software = report.get("software") or machine  # older reports have the versions there
    rows = []
    for row in report["rows"]:
        cells = [row["mode"], str(row["ranks"])]
        if "error" in row:
            cells.append(f"**failed**: {row['error']}")
        else:
            cells.append(f"{row['ours']['tokensPerSecond']:,.0f}")
        if "peer" in row:
            peer, compiled = row["peer"], row.get("compiledPeer")
            cells += [
                f"{peer['tokensPerSecond']:,.0f}",
                _format_ratio(peer["speedRatio"], peer["speedRatio"] >= goals["speed"]),
                f"{peer['bestRatio']:.2f} x",
                f"{compiled['tokensPerSecond']:,.0f}" if compiled else "",
                f"{compiled['speedRatio']:.2f} x" if compiled else "",
                _format_ratio(peer["memoryRatio"], peer["memoryRatio"] <= goals["memory"]),
            ]
        rows.append(cells + [""] * (len(_COLUMNS) - len(cells)))
    conditions = (
        f"{report['date']}, {report['device']}, {machine['cores']} cores ({machine['processor']}), load "
        f"{machine['load']:.1f}, {software['threads']} thread(s) for each process, torch {software['torch']}, "
        f"the median step of {report['settings']['rounds']} runs{', quick mode' if report['quick'] else ''}."
    )
    peers = {name: state.get("missing") or state for name, state in report["peers"].items()}
    return {"conditions": conditions, "peers": peers, "columns": _COLUMNS, "rows": rows}


def _format_ratio(ratio: float, met: bool) -> str:
    return f"{ratio:.2f} x{'' if met else ', **missed**'}"


def render_page(parts: Json) -> str:
    """Render the figures that have a goal, the table of training speed, and a line for each other part."""
    fleets = [part.get("sizes", {}) for title, part in parts.items() if title != TITLES["elastic_cost"]]
    dates = sorted(size["conditions"][:10] for sizes in fleets for size in sizes.values())
    goals = [row for title, part in parts.items() for row in _render_goals(title, part.get("sizes", {}))]
    training = parts.get(TRAINING, {"rows": []})
    return _PAGE.format(
        first=dates[0],
        last=dates[-1],
        goals="\n".join(goals),
        columns=" | ".join(_COLUMNS),
        rule="|---" * len(_COLUMNS) + "|",
        rows="\n".join(f"| {' | '.join(cells)} |" for cells in training["rows"]),
        headlines="\n".join(
            f"- **{title}.** {part['headline']}" for title, part in parts.items() if "headline" in part
        ),
    )


def _render_goals(title: str, sizes: Json) -> list[str]:
    """Return a line for each figure of a part that has a goal at some size."""
    named: dict[str, list[str]] = {}
    goals: dict[str, dict[str, None]] = {}
    for size, state in sizes.items():
        for name, figure in state["figures"].items():
            if "goal" in figure:
                median = f"**{figure['median']}**" if figure.get("missed") else figure["median"]
                named.setdefault(name, []).append(f"{size} {median}")
                goals.setdefault(name, {})[figure["goal"]] = None
    lines: list[str] = []
    for name, values in named.items():
        lines.append(f"| {'' if lines else title} | {name} | {', '.join(goals[name])} | {'; '.join(values)} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
