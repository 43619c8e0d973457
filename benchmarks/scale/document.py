"""docs/scale.md: the budget, the growth of each cost, and simulated figures beside real ones."""

from __future__ import annotations

from typing import Any

from benchmarks.scale.book import CONSTANT, LINEAR, Figure
from benchmarks.scale.starting import TALK

Json = dict[str, Any]

_HEAD = """# Scale

Written by `python -m benchmarks.scale --document docs/scale.md`; do not edit.

What a job costs beside its training as it grows, for [`hlat-7b`](../manifests/examples/hlat-7b.yaml) (tensor parallel
8, nodes of 32 ranks) and [`hlat-70b`](../manifests/examples/hlat-70b.yaml) (tensor parallel 32, nodes of 64). No
machine here takes 4,096 ranks, so these are simulated; the simulation is held against real worlds
[below](#real-worlds).

- **Real**: every message and its packing, tables, manifest and commit on a real folder, the decisions, one rank's
  state and its copy; the agents of up to 128 nodes are processes with the rendezvous of a pod, around a real store.
- **Simulated**: the other ranks of a gather (one process says what each would say), the bytes of tensors.
- **Not counted**: network and storage hardware, TLS (see [the coordinator](benchmarks.md#the-coordinator)), devices,
  and DNS, which torch's store asks for the name of each who connects.
- Seconds are processor time of one core; of agents and of the commit they are the clock's, and all agents share this
  machine's cores. Peak memory is what the process grew by meanwhile.
- Agents wait for turns ([decision 0087](decisions/0087-turns.md)), so their messages do not depend on how long a
  restart takes, but for two a second. They are counted between agents and store; the seconds are without the counter.
  Of 16,384 ranks no agents were started: 512 processes of theirs do not fit.
- Each agent gets the whole membership, made once for all: its key in the store follows from all uids, 21 of 38 bytes a
  node. So the answers are quadratic in nodes: 0.6 MiB at 128, 36 MiB at 1,000.

"Growth" is the exponent fitted between the sizes from 64 ranks on; above linear it is **bold**.
"""


def shown(value: float | None, unit: str) -> str:
    """A value for a table."""
    if value is None:
        return ""
    if unit == "count":
        return f"{value:,.0f}"
    word = unit.partition(" ")[0]
    if word == "s" and value < 1:
        return f"{value * 1000:,.1f} ms"
    if word == "MiB" and value < 0.1:
        return f"{value * 1024:,.2f} KiB"
    return f"{value:,.2f} {word}" if value < 100 else f"{value:,.0f} {word}"


def page(raw: Json, worlds: list[Json], beside: Json | None = None) -> str:
    """The whole page. `beside`: the figures of the same on another torch."""
    figures = [Figure.from_json(each) for each in raw["figures"]]
    machine = raw["machine"]
    made = f"Made on {raw['date']}, {machine['cores']} cores, load {machine['load']:.1f}, torch {machine['torch']}."
    parts = [_HEAD + "\n" + made, _budget(figures), _growth(figures)]
    sections = dict.fromkeys(figure.section for figure in figures)
    parts += [_section(name, [figure for figure in figures if figure.section == name]) for name in sections]
    if beside is not None:
        others = [Figure.from_json(each) for each in beside["figures"]]
        parts.append(_beside(figures, machine["torch"], others, beside["machine"]["torch"]))
    parts.append(_worlds(sorted(worlds, key=lambda world: (world["ranks"], world["sharded"]))))
    return "\n\n".join(parts) + "\n"


def _title(each: Figure) -> str:
    return f"{each.name}, peak memory" if each.unit == "MiB peak" else each.name


def _find(figures: list[Figure], section: str, name: str, where: str, unit: str) -> float | None:
    for each in figures:
        if each.section == section and (each.name, each.where, each.unit) == (name, where, unit):
            return each.values.get(4096)
    return None


def _budget(figures: list[Figure]) -> str:
    lines = ["## The budget at 4,096 ranks", "", "| | what counts | found | budget |", "|---|---|---|---|"]

    def row(what: str, of: str, found: float | None, unit: str, most: float) -> None:
        if found is None:
            return
        met = "" if found <= most else ", **missed**"
        lines.append(f"| {what} | {of} | {shown(found, unit)} | {shown(most, unit)}{met} |")

    for model in ("hlat-7b", "hlat-70b"):
        save, agree = f"Save and resume ({model})", f"Agreement: where to resume ({model})"
        row(
            f"{model}: a save on rank 0's training thread", "2 % of a step of 10 s",
            _find(figures, save, "save: on the training thread", "rank 0", "s"), "s", 0.2,
        )  # fmt: skip
        row(
            f"{model}: last byte to commit", "gathering is not in it",
            _find(figures, save, "commit: after the last byte", "rank 0", "s"), "s", 60.0,
        )  # fmt: skip
        restart = _find(
            figures, "Restart in place (agents' store)", "a process dies: until all may start ranks", "the job", "s"
        )
        decide = _find(figures, agree, "read what was said, decide, answer", "rank 0", "s")
        if restart is not None and decide is not None:
            row(f"{model}: restart from memory", "agents, agreement; not the copy", restart + decide, "s", 15.0)
            survey = _find(figures, save, "resume: survey of one checkpoint", "rank 0", "s") or 0.0
            read = _find(figures, save, "resume at 31/32 of the size: control work", "a middle rank", "s") or 0.0
            found = restart + decide + 5 * survey + read
            row(f"{model}: restart from storage", "the same, five checkpoints surveyed, index", found, "s", 60.0)
        for of, section, name, where in (
            ("agreement, rank 0", agree, TALK, "rank 0"),
            ("agreement, a middle rank", agree, TALK, "a middle rank"),
            ("plan", save, "plan: gathered", "rank 0"),
            ("each save", save, "commit: gathered", "rank 0"),
            ("each save, a middle rank", save, "commit: received and sent", "a middle rank"),
        ):
            row(f"{model}: gathers", of, _find(figures, section, name, where, "MiB"), "MiB", 1.0)
    row(
        "a killed process, until all ranks may start", "128 agents on this machine's cores",
        _find(figures, "Restart in place (agents' store)", "a process dies: until all may start ranks", "the job", "s"),
        "s", 2.0,
    )  # fmt: skip
    return "\n".join(lines)


def _growth(figures: list[Figure]) -> str:
    """Names what grows faster than it should."""
    everywhere = ("the job", "the store", "the coordinator", "storage")
    lines = ["## What grows", ""]
    fast = [each for each in figures if each.exponent is not None and each.exponent > LINEAR]
    path = [
        each
        for each in figures
        if each.where not in everywhere and each.exponent is not None and CONSTANT < each.exponent <= LINEAR
    ]
    lines.append("Faster than the number of ranks:" if fast else "Nothing grows faster than the number of ranks.")
    lines += ["", *(_line(each) for each in fast), ""] if fast else [""]
    lines.append("Not constant or logarithmic on one rank's or agent's path, though at most linear:")
    lines += ["", *(_line(each) for each in path)]
    return "\n".join(lines)


def _line(each: Figure) -> str:
    largest = max(each.values)
    value = shown(each.values[largest], each.unit)
    return f"- {each.section}: {_title(each)} ({each.where}), {each.law}; {value} at {largest:,}."


def _section(name: str, figures: list[Figure]) -> str:
    sizes = sorted({ranks for figure in figures for ranks in figure.values})
    lines = [f"## {name}", "", "| figure | of | " + " | ".join(f"{ranks:,}" for ranks in sizes) + " | growth |"]
    lines.append("|---" * (3 + len(sizes)) + "|")
    for each in figures:
        values = " | ".join(shown(each.values.get(ranks), each.unit) for ranks in sizes)
        lines.append(f"| {_title(each)} | {each.where} | {values} | {each.law} |")
    return "\n".join(lines)


def _beside(figures: list[Figure], torch: str, others: list[Figure], other_torch: str) -> str:
    """Seconds and memory of what uses torch, on two versions of it."""
    lines = [
        f"## torch {other_torch}",
        "",
        "trn1's images have torch 2.9, whose own planner compares all pairs of pieces; plans of ours do not ask it",
        "([decision 0074](decisions/0074-saves-are-not-planned-together.md)). At 4,096 ranks:",
        "",
        f"| figure | of | torch {torch} | torch {other_torch} |",
        "|---|---|---|---|",
    ]
    for each in figures:
        if each.section.startswith("Save") and each.unit in ("s", "MiB peak"):
            values = [_find(of, each.section, each.name, each.where, each.unit) for of in (figures, others)]
            if None not in values:
                what = each.section.partition("(")[2].rstrip(")")
                lines.append(
                    f"| {what}: {_title(each)} | {each.where} | {' | '.join(shown(v, each.unit) for v in values)} |"
                )
    return "\n".join(lines)


def _worlds(worlds: list[Json]) -> str:
    lines = [
        "## Real worlds",
        "",
        "`python -m benchmarks.scale.world RANKS`: so many training processes of a tiny model on this machine, forked",
        "from one warm parent, in nodes of 8, around a store as agents serve it. They train and save; the same again",
        "with the last rank killed after a step, resumed, and resized to half. Simulated figures are those of the same",
        "world; descriptors are those that a rank opens beside its standard streams and log, memory is what it shares",
        "with no other, the last column the requests of a start at the store.",
        "",
        "| ranks | mode | curve after the kill | resumed | resized | within 20 % | most off | memory | asked |",
        "|---" * 9 + "|",
    ]
    for world in worlds:
        rows = world["rows"]
        worst = max(rows, key=lambda row: row["off"])
        within = f"{sum(row['met'] for row in rows)} of {len(rows)}"
        lines.append(
            f"| {world['ranks']} | {'FullySharded' if world['sharded'] else 'Replicated'} | "
            f"{'the same, bit for bit' if world['same_curve'] else '**another**'} | {world['resumed']} | "
            f"to {world['resized_to']}, {'went on' if world['resize_kept'] else '**failed**'} | {within} | "
            f"{worst['off']:.0%} ({worst['name']}) | {world['private']:.0f} MiB | {world['store_requests']:,} |"
        )
    if worlds:
        largest = worlds[-1]
        lines += ["", f"The world of {largest['ranks']}:", "", "| figure | simulated | real |", "|---|---|---|"]
        lines += [f"| {row['name']} | {row['simulated']:,.0f} | {row['real']:,.0f} |" for row in largest["rows"]]
    return "\n".join(lines)
