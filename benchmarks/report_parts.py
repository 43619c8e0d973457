"""The parts of the page of figures that have a shape of their own; each is written from its benchmark's JSON."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

Json = dict[str, Any]


def _recovery(report: Json) -> str:
    lines = ["## Real training processes", "", "Four workers and a spare on the development cluster (`recovery`).", ""]
    lines += [
        "| fault | to the first new step, median | slowest | goal | steps lost | pods replaced |",
        "|---" * 6 + "|",
    ]
    for kind, rows in report["faults"].items():
        costs = [row["pauseSeconds"] if kind.startswith("resize") else row["recoveredSeconds"] for row in rows]
        goal, lost = report["goalSeconds"][kind], max(row["stepsLost"] for row in rows)
        pods, median = max(row["podsReplaced"] for row in rows), statistics.median(costs)
        met = "" if median <= goal else ", **missed**"
        lines.append(f"| {kind} | {median:.2f} s | {max(costs):.2f} s | {goal:g} s{met} | {lost} | {pods} |")
    return "\n".join(lines) + "\n"


def _first_step(report: Json) -> str:
    size = report["parameters"] / 1e6
    lines = [
        "## The start of a job",
        "",
        "From `kubectl apply` to the end of the first step, two workers on the development cluster, a model of",
        f"{size:.0f} million parameters, in turns (`first_step`). Fine-tunes read their base, pretraining draws it.",
        "",
        "| job | median | fastest to slowest | of pretraining |",
        "|---|---|---|---|",
    ]
    floor = statistics.median(report["seconds"]["pretraining"])
    for kind, seconds in report["seconds"].items():
        median = statistics.median(seconds)
        lines.append(
            f"| {kind} | {median:.2f} s | {min(seconds):.2f} s to {max(seconds):.2f} s | {median / floor:.2f} x |"
        )
    return "\n".join(lines) + "\n"


def _control_plane(report: Json) -> str:
    lines = ["## The development cluster", "", "From nothing to ready (`control_plane`).", ""]
    lines += ["| nodes | median | fastest to slowest | goal |", "|---|---|---|---|"]
    for nodes, seconds in report["seconds"].items():
        spread = f"{min(seconds):.2f} s to {max(seconds):.2f} s"
        lines.append(f"| {nodes} | {statistics.median(seconds):.2f} s | {spread} | {report['goalSeconds']:g} s |")
    return "\n".join(lines) + "\n"


def _checkpoints(report: Json) -> str:
    lines = [
        "## Checkpoints beside training",
        "",
        f"{report['ranks']} ranks on CPU, state of {report['stateMiB']} MiB (`checkpoint_stall`): a snapshot in memory",
        "each step, and durable saves back to back. Goal: at most 2 % of a step, at any speed of the store.",
        "",
        "| mode | step, median | 90th percentile | over no checkpoints |",
        "|---|---|---|---|",
    ]
    for each in (report, *([report["long"]] if "long" in report else [])):
        base = each["modes"]["off"]["medianStepMs"]
        for mode, row in each["modes"].items():
            ratio = f"{row['medianStepMs'] / base:.2f} x"
            lines.append(f"| {mode} | {row['medianStepMs']:.1f} ms | {row['p90StepMs']:.1f} ms | {ratio} |")
    return "\n".join(lines) + "\n"


def _bandwidth(report: Json) -> str:
    lines = [
        "## Bandwidth of checkpoints",
        "",
        f"A fully sharded state of {report['stateMiB']:,} MiB on {report['ranks']} ranks, against plain copies of as",
        f"many bytes in the same run; medians of {report['rounds']} rounds, load {report['loadAverage']}",
        "(`checkpoint_bandwidth`). Loading verifies every byte that it reads.",
        "",
        "| | checkpoint | plain copy | ratio | goal |",
        "|---" * 5 + "|",
    ]
    for row in report["figures"]:
        met = "" if row["ratio"] >= report["goalRatio"] else ", **missed**"
        lines.append(
            f"| {row['name']} | {row['checkpointMiBs']:,.0f} MiB/s | {row['copyMiBs']:,.0f} MiB/s | "
            f"{row['ratio']:.2f} x | {report['goalRatio']} x{met} |"
        )
    return "\n".join(lines) + "\n"


def _artifacts(report: Json) -> str:
    lines = [
        "## Base models and artifacts",
        "",
        f"A base of {report['baseMiB']:,} MiB in bfloat16: one process loads it, consolidates a checkpoint of its size",
        "to a Hugging Face folder, and merges an adapter beside every projection into it, against reading its files",
        f"into memory and copying them in the same run; medians of {report['rounds']} rounds, load",
        f"{report['loadAverage']} (`artifacts`). Memory is in units of the largest tensor in float32,",
        f"{report['largestTensorMiB']} MiB.",
        "",
        "| | own | plain | ratio | goal | memory | goal |",
        "|---" * 7 + "|",
    ]
    for row in report["figures"]:
        met = "" if row["ratio"] >= report["goalRatio"] else ", **missed**"
        # Whoever loads all of a model holds all of it: only what is beyond that counts, and is measured by a test.
        memory = "| - | - |"
        if row["name"] != "load":
            fits = "" if row["tensors"] <= report["goalTensors"] else ", **missed**"
            memory = f"| {row['tensors']:.2f} tensors | {report['goalTensors']:g}{fits} |"
        lines.append(
            f"| {row['name']} | {row['ownMiBs']:,.0f} MiB/s | {row['plainMiBs']:,.0f} MiB/s ({row['against']}) | "
            f"{row['ratio']:.2f} x | {report['goalRatio']} x{met} {memory}"
        )
    return "\n".join(lines) + "\n"


def _training_speed(report: Json) -> str:
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
        versions = ", ".join(f"{part} {text}" for part, text in state.items() if part not in {"missing", "unable"})
        reason = state.get("missing") or state.get("unable")
        said = [text for text in (versions, f"not measured: {reason}" if reason else "") if text]
        lines.append(f"- {name}: {'; '.join(said)}.")
    lines += [
        "",
        "| mode | processes | tokens/s | transformers.Trainer | ratio | best steps | peak memory of a process, ratio |",
        "|---" * 7 + "|",
    ]
    for row in report["rows"]:
        start = f"| {row['mode']} | {row['ranks']} |"
        if "error" in row:
            lines.append(f"{start} **failed**: {row['error']} | | | | |")
        elif "peer" not in row:
            lines.append(f"{start} {row['ours']['tokensPerSecond']:,.0f} | | | | |")
        else:
            speed = _judged(row["speedRatio"], row["speedRatio"] >= goals["speed"])
            memory = _judged(row["memoryRatio"], row["memoryRatio"] <= goals["memory"])
            lines.append(
                f"{start} {row['ours']['tokensPerSecond']:,.0f} | {row['peer']['tokensPerSecond']:,.0f} | {speed} | "
                f"{row['bestRatio']:.2f} x | {memory} |"
            )
    lines += ["", "From start to the end of the first step, median:", ""]
    lines += ["| processes | cold | from the standby process | transformers.Trainer, cold |", "|---" * 4 + "|"]
    for row in report["start"]:
        cells = [f"{row[name]['seconds']:.2f} s" if name in row else "" for name in ("cold", "standby", "peer")]
        lines.append(f"| {row['ranks']} | {row['error'] if 'error' in row else ' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _finetuning(report: Json) -> str:
    machine, settings, goals = report["machine"], report["settings"], report["goals"]
    model, peer = settings["model"], report["peer"]
    versions = ", ".join(f"{part} {text}" for part, text in peer.items() if part != "missing")
    conditions = (
        f"{report['date']}, {machine['cores']} cores ({machine['processor']}), load {machine['load']:.1f}, "
        f"{machine['threads']} thread(s); {model['num_hidden_layers']} layers of width {model['hidden_size']}, "
        f"{settings['samples']} samples of {settings['length']} tokens a step, float32, beside "
        f"{versions} and peft{', **quick mode: the figures mean nothing**' if report['quick'] else ''}. Samples per "
        f"second of processor time; medians of {settings['rounds']} rounds, lowest to highest ratio in brackets. "
        f"Goals: LoRA at least {goals['overFull']:g} x full fine-tuning and {goals['overPeer']:g} x peft, at most "
        f"{goals['memory']:g} x its memory, files of a checkpoint at most {goals['checkpoint']:g} x adapters and "
        "moments. Command: `python -m benchmarks.finetuning`."
    )
    lines = [
        "## Fine-tuning",
        "",
        conditions,
        "",
        "| trained | here | over full | transformers.Trainer | ratio | it over its full | memory, ratio | checkpoint |",
        "|---" * 8 + "|",
    ]
    for row in report["rows"]:
        cells = [row["trained"], f"{row['ours']:.3f}", "", "", "", "", "", ""]
        if "overFull" in row:
            cells[2] = _judged_range(row["overFull"], row["overFullByRound"], goals["overFull"])
            weight = _judged(row["checkpointRatio"], row["checkpointRatio"] <= goals["checkpoint"])
            cells[7] = f"{row['checkpointBytes'] / 2**20:.1f} MiB, {weight}"
        if "peer" in row:
            cells[3] = f"{row['peer']:.3f}"
            cells[4] = _judged_range(row["overPeer"], row["overPeerByRound"], goals["overPeer"])
            cells[5] = f"{row['peerOverItsFull']:.2f} x" if "overFull" in row else ""
            cells[6] = _judged(row["memoryRatio"], row["memoryRatio"] <= goals["memory"])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _judged_range(ratio: float, rounds: list[float], goal: float) -> str:
    return f"{ratio:.2f} x ({min(rounds):.2f} to {max(rounds):.2f}){'' if ratio >= goal else ', **missed**'}"


def _judged(ratio: float, met: bool) -> str:
    return f"{ratio:.2f} x{'' if met else ', **missed**'}"


def _loader(report: Json) -> str:
    need, goal = report["nodeTokensPerSecond"], report["goalRatio"]
    lines = [
        "## Data",
        "",
        f"Tokens per second of processor time of one core; a trn1.32xlarge eats {need:,} (`loader`).",
        "",
    ]
    lines += [f"| what | median | lowest to highest | over a node's need (goal {goal:g} x) |", "|---" * 4 + "|"]
    for title, row in report["figures"].items():
        speeds = row["tokensPerCoreSecond"]
        missed = "" if row["ratio"] >= goal else ", **missed**"
        spread = f"{min(speeds):,.0f} to {max(speeds):,.0f}"
        lines.append(f"| {title} | {statistics.median(speeds):,.0f} | {spread} | {row['ratio']:.1f} x{missed} |")
    return "\n".join(lines) + "\n"


def _client(report: Json) -> str:
    goal = report["goalSeconds"]
    about = (
        "A command beside `kubectl trn --help`, on a job that an API server on loopback serves (`client`). Goal: "
        f"`status` on 1,000 workers within {goal:g} s. {report['machine']}."
    )
    lines = [
        "## kubectl trn",
        "",
        about,
        "",
        "| workers | command | processor s | to the floor | wall s, lowest to highest |",
        "|---" * 5 + "|",
    ]
    for row in report["rows"]:
        low, high = row["wallSecondsRange"]
        missed = ", **missed**" if row["command"].startswith("status") and row["wallSeconds"] > goal else ""
        wall = f"{row['wallSeconds']:.2f} ({low:.2f} to {high:.2f}){missed}"
        ratio = f"{row['ratioToFloor']:.2f} x"
        lines.append(f"| {row['workers']} | `{row['command']}` | {row['cpuSeconds']:.2f} | {ratio} | {wall} |")
    return "\n".join(lines) + "\n"


def _pages(report: Json) -> str:
    goal = report["goalSeconds"]
    about = (
        "In chromium, beside an empty page with the same headers, served on loopback: 2,000,000 steps, ten "
        "interruptions, a hundred events in a week (`pages`)."
    )
    lines = [
        "## The page of a job",
        "",
        f"{about} Goal: 1,000 workers loaded within {goal:g} s. {report['machine']}.",
        "",
        "| workers | KiB | sent | made, processor s | painted s | loaded s, lowest to highest |",
        "|---" * 6 + "|",
    ]
    for row in report["rows"]:
        low, high = row["loadRange"]
        missed = ", **missed**" if row["loadSeconds"] > goal else ""
        loaded = f"{row['loadSeconds']:.2f} ({low:.2f} to {high:.2f}){missed}"
        sizes = f"{row['bytes'] / 1024:.0f} | {row['packedBytes'] / 1024:.1f} KiB"
        made, name = f"{row['makeCpuSeconds']:.3f}", row["page"].removeprefix("/")
        lines.append(f"| {name} | {sizes} | {made} | {row['paintSeconds']:.2f} | {loaded} |")
    return "\n".join(lines) + "\n"


PARTS: dict[str, tuple[str, Callable[[Json], str]]] = {
    "Real training processes": ("recovery", _recovery),
    "The start of a job": ("first_step", _first_step),
    "The development cluster": ("control_plane", _control_plane),
    "Checkpoints beside training": ("checkpoint_stall", _checkpoints),
    "Bandwidth of checkpoints": ("checkpoint_bandwidth", _bandwidth),
    "Base models and artifacts": ("artifacts", _artifacts),
    "Training speed": ("training_speed", _training_speed),
    "Fine-tuning": ("finetuning", _finetuning),
    "Data": ("loader", _loader),
    "kubectl trn": ("client", _client),
    "The page of a job": ("pages", _pages),
}
"""Heading of a part -> the benchmark and what writes it, in the order of the page."""
