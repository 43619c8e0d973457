"""The nodes that a job has or had, a square each: where its workers are, and where something befell it.

Invariant: a node is coloured by what is known of this job alone; what the operator holds against a machine is shown by
`kubectl trn nodes`.
"""

from __future__ import annotations

import re
from collections import Counter
from html import escape
from typing import TYPE_CHECKING

from trainium_contract.pages.formatting import plural
from trainium_contract.pages.svg import BAD, GOOD, OTHER, WAITS, squares

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainium_contract.views.interruptions import InterruptionView
    from trainium_contract.views.workers import PodRow

_KEY = (
    "green: a worker runs there; yellow: it does, and the job was interrupted there before; red: interrupted there, "
    "and no worker runs there now; grey: neither"
)
_COLOURS = {(True, False): GOOD, (True, True): WAITS, (False, True): BAD, (False, False): OTHER}
"""By whether a worker runs there, and whether the job was interrupted there."""
_NUMBER = re.compile(r"(\d{1,18})")


def node_map_html(
    pods: Sequence[PodRow], entries: Sequence[InterruptionView], ranks: Mapping[str, str], most: int
) -> str:
    """Render at most so many nodes, by name; nothing where no node is known. `ranks`: of members, by pod."""
    there: dict[str, list[PodRow]] = {}
    for pod in pods:
        if pod.node:
            there.setdefault(pod.node, []).append(pod)
    befell: dict[str, Counter[str]] = {}
    for entry in entries:
        if entry.node:
            befell.setdefault(entry.node, Counter())[entry.cause] += 1
    names = sorted({*there, *befell}, key=_natural)
    cells = [_cell(name, there.get(name, []), befell.get(name, Counter()), ranks) for name in names[:most]]
    if not cells:
        return ""
    more = f"; {len(names) - most} more are not shown" if len(names) > most else ""
    legend = f"{plural(len(names), 'node')} that the job has or had{more}; {_KEY}"
    return f"<h2>Nodes</h2>{squares(cells, 'Nodes of the job')}<p class=soft>{escape(legend)}</p>"


def _cell(node: str, pods: Sequence[PodRow], causes: Counter[str], ranks: Mapping[str, str]) -> tuple[int, str]:
    runs = any(pod.state == "Running" for pod in pods)
    colour = _COLOURS[runs, bool(causes)]
    workers = [
        f"{pod.name} {pod.state}" + (f", ranks {ranks[pod.name]}" if ranks.get(pod.name) else "") for pod in pods
    ]
    seen = ", ".join(f"{cause} {count}" for cause, count in causes.most_common())
    return colour, "; ".join([node, *workers, *([f"interrupted: {seen}"] if seen else [])])


def _natural(name: str) -> list[tuple[int, str]]:
    """node-2 before node-10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _NUMBER.split(name)]
