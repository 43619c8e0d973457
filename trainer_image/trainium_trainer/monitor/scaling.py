"""Compare the throughput of a run at each of its numbers of nodes, from the lines of metrics.jsonl."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class SizeSpeed:
    """Speed at one number of nodes."""

    nodes: int
    steps: int
    """Measured steps."""
    step_seconds: float
    """Median."""
    samples_per_second: float
    tokens_per_second: float
    efficiency: float
    """Samples per second and node, relative to the smallest size."""


def measure_sizes(lines: Sequence[Mapping[str, Any]]) -> list[SizeSpeed]:
    """Return the throughput at each number of nodes, the smallest first.

    First steps after a start are left out, because they compile. Raises UserError if no step was measured.
    """
    groups = defaultdict(list)
    for before, line in zip(({}, *lines), lines, strict=False):
        starts = line.get("resumed") or line["step"] != before.get("step", -1) + 1
        if line.get("nodes") and line.get("seconds") and not starts:
            groups[line["nodes"]].append((line["seconds"], line["batch"], line["tokens"] - before["tokens"]))
    if not groups:
        raise UserError("no step after the first one of a start has its length and its number of nodes: train longer")
    sizes: list[SizeSpeed] = []
    for nodes, steps in sorted(groups.items()):
        speed = median(batch / seconds for seconds, batch, _ in steps)
        smallest = sizes[0].samples_per_second / sizes[0].nodes if sizes else speed / nodes
        sizes.append(
            SizeSpeed(
                nodes=nodes,
                steps=len(steps),
                step_seconds=median(seconds for seconds, _, _ in steps),
                samples_per_second=speed,
                tokens_per_second=median(tokens / seconds for seconds, _, tokens in steps),
                efficiency=speed / nodes / smallest,
            )
        )
    return sizes


def format_scaling(sizes: Sequence[SizeSpeed]) -> Iterator[str]:
    """Format a table for a terminal."""
    yield f"{'NODES':>5} {'STEPS':>8} {'MEDIAN STEP':>11} {'SAMPLES/S':>10} {'TOKENS/S':>12} {'EFFICIENCY':>10}"
    for size in sizes:
        yield (
            f"{size.nodes:>5} {size.steps:>8,} {size.step_seconds:>9.3f} s {size.samples_per_second:>10.4g} "
            f"{size.tokens_per_second:>12,.0f} {size.efficiency:>10.1%}"
        )
