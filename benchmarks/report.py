"""docs/benchmarks.md from the JSON files of the benchmarks and the measured figures of peers: one command, no hand.

`python -m benchmarks.report [--out FILE] [JSON ...]`, by default out/bench/*.json. A benchmark that was not run again
keeps its part of the page; the tables of the operator say when and on what they were made.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.fleetlab.figures import shown
from benchmarks.report_parts import PARTS, Json

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
PEERS = ("JobSet", "JobSet in-place", "PyTorchJob")
TITLES = {
    "fleet": "A fleet",
    "jobset": "Beside JobSet, in one run",
    "coordinator": "The coordinator",
    "growth": "The coordinator alone, as fleets grow",
    "flood": "A flood",
    "planning": "A plan when every size is legal",
    "fairness": "One job among a hundred",
    "named_jobs": "Metrics by job",
    "masked": "A masked micro-batch",
}
SIZED_BY = {
    "coordinator": "agents",
    "growth": "agents",
    "flood": "workers",
    "masked": "ranks",
    "fairness": "workers",
    "named_jobs": "jobs",
}
NOTES = {
    "jobset": (
        "A job, a JobSet (v0.12.0, one Job, restart all on failure) and a bare client start and restart the same pods "
        "(4 kB, of a worker) on one warm control plane, in an order mixed anew for each round; ratios are taken within "
        "a round. No pod that a restart makes has an agent. The controller manager, which makes its pods, may make "
        "200 requests a second, ten times its default."
    ),
    "masked": (
        "Where the global batch does not come out even, the last micro-batch of some ranks is empty: same shapes, same "
        "collectives. A step should last by its passes, full or not; two ranks of a small model on the CPU."
    ),
    "fairness": (
        "100 jobs of 1 to 64 workers on fake nodes; a webhook refuses the pods of five of them for ever and keeps "
        "every write of the operator waiting for 200 ms. A worker's pod of one job fails: first while the job is alone "
        "in the cluster, then beside the others; in figures of all jobs the column counts jobs."
    ),
    "named_jobs": (
        "Jobs of 1 to 16 workers on fake nodes train, with their agents; one operator after the other leads them, with "
        "metrics of all jobs (`--named-jobs`) and without by turns. Processor time of a minute in which Prometheus "
        "scrapes four times, taken after each has come to rest. Two windows of the same operator differ as much: "
        "writing 305 kB of figures of 100 jobs alone takes 27 ms of a processor, 0.11 s of such a minute."
    ),
    "planning": (
        "A job of 1,000 nodes without spares loses six of them in half a day, trains on fewer and grows back, in "
        "virtual time; each call of the operator's own plan is measured in processor time. Even: only sizes at which "
        "the global batch comes out even."
    ),
    "growth": (
        "Server, state, tokens and TLS of the coordinator in a process of their own, without a cluster; nothing is "
        "planned. 5,000 agents are 20 jobs, 10,000 are 40. The priority of what is measured is raised."
    ),
    "flood": (
        "128 workers on fake nodes, mended in quiet and under attack by turns: 10,000 bad tokens a second are offered, "
        "2,000 TLS connections say nothing, 200 send slowly, from 64 addresses. One core is the operator's; the "
        "attackers have what agents and control plane leave of the other, so that is the limit of what they reach."
    ),
}
_COMMAND = "Command: `python -m benchmarks.run"


def main() -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="JSON")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/benchmarks.md")
    options = parser.parse_args()
    files = options.files or sorted((ROOT / "out/bench").glob("*.json"))
    documents = {path.stem: json.loads(path.read_text()) for path in files if path.is_file()}
    found = {document.get("benchmark", stem): document for stem, document in documents.items()}
    if not found:
        print("There are no figures; run `make bench` first.", file=sys.stderr)
        return 1
    former = options.out.read_text() if options.out.exists() else ""
    options.out.write_text(page(found, former))
    return 0


def page(found: dict[str, Json], former: str = "") -> str:
    """The whole page; what was not measured again keeps its part of the former one."""
    peers = json.loads((FOLDER / "peers.json").read_text())
    parts = {part.partition("\n")[0]: f"## {part.rstrip()}\n" for part in former.split("\n## ")[1:]}
    parts |= {
        title: _with_former(_figures(title, found[name], peers), parts.get(title, ""))
        for name, title in TITLES.items()
        if name in found
    }
    parts |= {title: write(found[name]) for title, (name, write) in PARTS.items() if name in found}
    known = [title for title in (*TITLES.values(), *PARTS) if title in parts]
    return "\n".join([_head(peers), *(parts[title] for title in known)]).rstrip() + "\n"


def _with_former(part: str, former: str) -> str:
    """A part and the sizes of the former one that were not measured again, each with when it was."""
    head, *fresh = part.split("\n### ")
    former_head, *kept = former.split("\n### ")
    when = next((line for line in former_head.splitlines() if _COMMAND in line), "")
    sizes = dict(text.split("\n", 1) for text in fresh)
    for size, rows in (text.split("\n", 1) for text in kept):
        sizes.setdefault(size, rows if _COMMAND in rows else f"\n{when}\n{rows}")
    ordered = sorted(sizes.items(), key=lambda item: int(item[0].split()[0].replace(",", "")))
    return "\n\n".join([head.rstrip(), *(f"### {size}\n{rows.rstrip()}" for size, rows in ordered)]) + "\n"


def _head(peers: Json) -> str:
    versions = "\n".join(f"- {name}: {text}." for name, text in peers["versions"].items())
    return f"""# Benchmarks

Written by `python -m benchmarks.report` from the files of `make bench`; do not edit.

Seconds move with a machine and with what else it does; ratios do not, or much less. So what the machine decides is
divided by the **floor** of the same run: the same pods, with the same preference for near nodes, created by a plain
client with 64 requests in flight (its restart: fail all, delete all, create all). Each figure is the median, with the
lowest and the highest value; **missed** goals are marked.

Peers: {peers["source"]}, {peers["date"]}, {peers["machine"]}.
Their ratios are to the floor of their own runs.

{versions}

What a rank costs among many is on a page of its own, [scale](scale.md).
"""


def _figures(title: str, report: Json, peers: Json) -> str:
    rows = report["figures"]
    sizes = sorted({row["nodes"] for row in rows})
    others = {(row["name"], row["nodes"]): row for row in peers["figures"]}
    machine = report["machine"]
    quick = ", quick mode" if report["quick"] else ""
    lines = [f"## {title}", ""]
    lines.append(
        f"{report['date']}, {machine['cores']} cores ({machine['processor']}), load {machine['load']:.1f}{quick}. "
        f"{_COMMAND} {report['benchmark']}{' --quick' if report['quick'] else ''}`."
    )
    if report["benchmark"] in NOTES:
        lines += ["", NOTES[report["benchmark"]]]
    for size in sizes:
        here = [row for row in rows if row["nodes"] == size]
        compared = [peer for peer in PEERS if any(peer in others.get((row["name"], size), {}) for row in here)]
        lines += ["", f"### {size:,} {SIZED_BY.get(report['benchmark'], 'nodes')}", ""]
        lines.append("| figure | median | lowest to highest | goal | " + " | ".join(["", *compared]).strip(" |") + " |")
        if not compared:
            lines[-1] = "| figure | median | lowest to highest | goal |"
        lines.append("|---" * (4 + len(compared)) + "|")
        lines += [_row(row, others.get((row["name"], size), {}), compared) for row in here]
    return "\n".join(lines) + "\n"


def _row(row: Json, peer: Json, compared: list[str]) -> str:
    unit = row["unit"]
    spread = (
        "" if len(row["values"]) == 1 else f"{shown(min(row['values']), unit)} to {shown(max(row['values']), unit)}"
    )
    goal = "" if row["goal"] is None else f"{shown(row['goal'], unit)}{'' if row['met'] else ', **missed**'}"
    name = f"{row['name']} ({row['note']})" if row.get("note") else row["name"]
    cells = [name, shown(row["median"], unit), spread, goal, *(peer.get(name, "") for name in compared)]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
