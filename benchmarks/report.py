"""Write docs/benchmarks.md from the JSON files of the benchmarks and the measured figures of peers.

`python -m benchmarks.report [--out FILE] [JSON ...]`, by default out/bench/*.json. A part of the page whose benchmark
was not run again is kept, with its date and machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.fleet.figures import format_value

Json = dict[str, Any]
FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
PEERS = ("JobSet", "JobSet in-place", "PyTorchJob")
TITLES = {"fleet": "A fleet", "coordinator": "The coordinator"}
SIZED_BY = {"coordinator": "agents"}
TRAINING = "Training speed"
_COMMAND = "Command: `python -m benchmarks.run"


def main() -> int:
    """Read the figures and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="JSON")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/benchmarks.md")
    options = parser.parse_args()
    files = options.files or sorted((ROOT / "out/bench").glob("*.json"))
    documents = {path.stem: json.loads(path.read_text()) for path in files if path.is_file()}
    reports = {document.get("benchmark", stem): document for stem, document in documents.items()}
    if not reports:
        print("There are no figures; run `make bench` first.", file=sys.stderr)
        return 1
    previous = options.out.read_text() if options.out.exists() else ""
    options.out.write_text(render_page(reports, previous))
    return 0


def render_page(reports: dict[str, Json], previous: str = "") -> str:
    """Render the page; a section that was not measured again keeps its text."""
    peers = json.loads((FOLDER / "peers.json").read_text())
    sections = {text.partition("\n")[0]: f"## {text.rstrip()}\n" for text in previous.split("\n## ")[1:]}
    sections |= {
        title: _merge_with_previous(_render_figures(title, reports[name], peers), sections.get(title, ""))
        for name, title in TITLES.items()
        if name in reports
    }
    if "training_speed" in reports:
        sections[TRAINING] = _render_training_speed(reports["training_speed"])
    return "\n".join([_render_introduction(peers), *sections.values()]).rstrip() + "\n"


def _merge_with_previous(section: str, previous: str) -> str:
    """Add the sizes that were not measured again to a section, each with its date."""
    head, *measured = section.split("\n### ")
    previous_head, *previous_sizes = previous.split("\n### ")
    previous_command = next((line for line in previous_head.splitlines() if _COMMAND in line), "")
    sizes = dict(text.split("\n", 1) for text in measured)
    for size, rows in (text.split("\n", 1) for text in previous_sizes):
        sizes.setdefault(size, rows if _COMMAND in rows else f"\n{previous_command}\n{rows}")
    ordered = sorted(sizes.items(), key=lambda item: int(item[0].split()[0].replace(",", "")))
    return "\n\n".join([head.rstrip(), *(f"### {size}\n{rows.rstrip()}" for size, rows in ordered)]) + "\n"


def _render_introduction(peers: Json) -> str:
    versions = "\n".join(f"- {name}: {text}." for name, text in peers["versions"].items())
    return f"""# Benchmarks

Written by `python -m benchmarks.report` from the files of `make bench`; do not edit.

Seconds depend on the machine and its load; ratios depend on them much less. Figures that the machine determines are
therefore divided by the **floor** of the same run: the same pods, with the same preference for near nodes, created by a
plain client with 64 requests in flight (its restart: fail all, delete all, create all). Each figure is the median, with
the lowest and the highest value; **missed** goals are marked.

Peers: {peers["source"]}, {peers["date"]}, {peers["machine"]}.
Their ratios use the floor of the runs in which they were measured.

{versions}

To measure `A fleet`, `The coordinator` and `Training speed` again, run `make bench`. Each other part was measured once:
check out commit `02e7f559` and run `make bench ARGS=NAME`, with NAME from the end of its command or from parentheses.
[Scale](scale.md) shows what a job costs as it grows.
"""


def _render_figures(title: str, report: Json, peers: Json) -> str:
    rows = report["figures"]
    sizes = sorted({row["nodes"] for row in rows})
    peer_rows = {(row["name"], row["nodes"]): row for row in peers["figures"]}
    machine = report["machine"]
    quick = ", quick mode" if report["quick"] else ""
    lines = [f"## {title}", ""]
    lines.append(
        f"{report['date']}, {machine['cores']} cores ({machine['processor']}), load {machine['load']:.1f}{quick}. "
        f"{_COMMAND} {report['benchmark']}{' --quick' if report['quick'] else ''}`."
    )
    for size in sizes:
        size_rows = [row for row in rows if row["nodes"] == size]
        compared = [peer for peer in PEERS if any(peer in peer_rows.get((row["name"], size), {}) for row in size_rows)]
        lines += ["", f"### {size:,} {SIZED_BY.get(report['benchmark'], 'nodes')}", ""]
        lines.append("| figure | median | lowest to highest | goal | " + " | ".join(["", *compared]).strip(" |") + " |")
        if not compared:
            lines[-1] = "| figure | median | lowest to highest | goal |"
        lines.append("|---" * (4 + len(compared)) + "|")
        lines += [_render_row(row, peer_rows.get((row["name"], size), {}), compared) for row in size_rows]
    return "\n".join(lines) + "\n"


def _render_row(row: Json, peer: Json, compared: list[str]) -> str:
    unit = row["unit"]
    lowest, highest = format_value(min(row["values"]), unit), format_value(max(row["values"]), unit)
    spread = "" if len(row["values"]) == 1 else f"{lowest} to {highest}"
    goal = "" if row["goal"] is None else f"{format_value(row['goal'], unit)}{'' if row['met'] else ', **missed**'}"
    cells = [row["name"], format_value(row["median"], unit), spread, goal, *(peer.get(name, "") for name in compared)]
    return "| " + " | ".join(cells) + " |"


def _render_training_speed(report: Json) -> str:
    machine, settings, goals = report["machine"], report["settings"], report["goals"]
    model = settings["model"]
    conditions = (
        f"{report['date']}, {report['device']}, {machine['cores']} cores ({machine['processor']}), load "
        f"{machine['load']:.1f}, {machine['threads']} thread(s) for each process, torch {machine['torch']}; "
        f"{model['numLayers']} layers of width {model['hiddenSize']}, samples of {settings['length']} tokens"
        f"{', **quick mode: the figures mean nothing**' if report['quick'] else ''}. The median step of "
        f"{settings['rounds']} runs; goal: {goals['speed']:g} x the peer's tokens per second, {goals['memory']:g} x "
        "its memory. Command: `python -m benchmarks.training_speed`."
    )
    lines = ["## Training speed", "", conditions, ""]
    for name, state in report["peers"].items():
        versions = ", ".join(f"{part} {text}" for part, text in state.items() if part != "missing")
        reason = state.get("missing")
        details = [text for text in (versions, f"not measured: {reason}" if reason else "") if text]
        lines.append(f"- {name}: {'; '.join(details)}.")
    lines += [
        "",
        "| mode | processes | tokens/s | transformers.Trainer | ratio | best steps | compiled peer | ratio | memory |",
        "|---" * 9 + "|",
    ]
    for row in report["rows"]:
        start = f"| {row['mode']} | {row['ranks']} |"
        if "error" in row:
            lines.append(f"{start} **failed**: {row['error']} |" + " |" * 6)
        elif "peer" not in row:
            lines.append(f"{start} {row['ours']['tokensPerSecond']:,.0f} |" + " |" * 6)
        else:
            peer, compiled = row["peer"], row.get("compiledPeer")
            cells = [
                f"{row['ours']['tokensPerSecond']:,.0f}",
                f"{peer['tokensPerSecond']:,.0f}",
                _format_ratio(peer["speedRatio"], peer["speedRatio"] >= goals["speed"]),
                f"{peer['bestRatio']:.2f} x",
                f"{compiled['tokensPerSecond']:,.0f}" if compiled else "",
                f"{compiled['speedRatio']:.2f} x" if compiled else "",
                _format_ratio(peer["memoryRatio"], peer["memoryRatio"] <= goals["memory"]),
            ]
            lines.append(f"{start} {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _format_ratio(ratio: float, met: bool) -> str:
    return f"{ratio:.2f} x{'' if met else ', **missed**'}"


if __name__ == "__main__":
    sys.exit(main())
