"""Draw the nodes that a job has or had, one square each: where its workers are, and where it was interrupted.

Invariant: the colour of a node depends on this job only; `kubectl trn nodes` shows what the operator records about
machines.
"""

from __future__ import annotations

import re
from collections import Counter
from html import escape
from typing import TYPE_CHECKING

from trainium_contract.pages.formatting import pluralize
from trainium_contract.pages.svg import BAD, GOOD, OTHER, WAITING, Square, draw_squares

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainium_contract.views.interruptions import InterruptionView
    from trainium_contract.views.workers import PodRow

_KEY = (
    "green: a worker runs there; yellow: it does, and the job was interrupted there before; red: interrupted there, "
    "and no worker runs there now; grey: neither"
)
_COLOURS = {(True, False): GOOD, (True, True): WAITING, (False, True): BAD, (False, False): OTHER}
"""By whether a worker runs there, and whether the job was interrupted there."""
_NUMBER = re.compile(r"(\d{1,18})")


def render_node_map(
    pods: Sequence[PodRow], entries: Sequence[InterruptionView], ranks: Mapping[str, str], limit: int
) -> str:
    """Render up to `limit` nodes, sorted by name; empty if no node is known. `ranks` maps members' pods to ranks."""
    pods_by_node: dict[str, list[PodRow]] = {}
    for pod in pods:
        if pod.node:
            pods_by_node.setdefault(pod.node, []).append(pod)
    causes_by_node: dict[str, Counter[str]] = {}
    for entry in entries:
        if entry.node:
            causes_by_node.setdefault(entry.node, Counter())[entry.cause] += 1
    names = sorted({*pods_by_node, *causes_by_node}, key=_split_numbers)
    cells = [
        _build_node_square(name, pods_by_node.get(name, []), causes_by_node.get(name, Counter()), ranks)
        for name in names[:limit]
    ]
    if not cells:
        return ""
    more = f"; {len(names) - limit} more are not shown" if len(names) > limit else ""
    legend = f"{pluralize(len(names), 'node')} that the job has or had{more}; {_KEY}"
    return f"<h2>Nodes</h2>{draw_squares(cells, 'Nodes of the job')}<p class=soft>{escape(legend)}</p>"


def _build_node_square(node: str, pods: Sequence[PodRow], causes: Counter[str], ranks: Mapping[str, str]) -> Square:
    """Return the square of a node."""
    is_running = any(pod.state == "Running" for pod in pods)
    colour = _COLOURS[is_running, bool(causes)]
    workers = [
        f"{pod.name} {pod.state}" + (f", ranks {ranks[pod.name]}" if ranks.get(pod.name) else "") for pod in pods
    ]
    interruptions = ", ".join(f"{cause} {count}" for cause, count in causes.most_common())
    title = "; ".join([node, *workers, *([f"interrupted: {interruptions}"] if interruptions else [])])
    return Square(colour, title)


def _split_numbers(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts node-2 before node-10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _NUMBER.split(name)]
