"""Read machines with failures from the operator's memory (docs/node-health.md), with the evidence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from trainium_contract.rfc3339 import parse_rfc3339
from trainium_contract.views.raw import read_mapping, strip_control_characters

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_OTHER_ENTRIES = frozenset({"about", "accounted"})


@dataclass(frozen=True, slots=True)
class StrikeView:
    """A failure that counts against a machine."""

    at: float | None
    cause: str
    by: str
    """The job, or the node's own report."""


@dataclass(frozen=True, slots=True)
class MachineView:
    """A machine in the operator's memory."""

    key: str
    """Entry of the ConfigMap."""
    machine: str
    node: str
    state: str
    until: float | None
    quarantines: int
    strikes: tuple[StrikeView, ...]
    """Oldest first."""
    present: bool | None = None
    """Whether a node of that name, or of that machine, exists; None if nodes cannot be listed."""
    renamed: str = ""
    """Current node name of the machine, if it returned under another one."""


def parse_machines(config_map: Mapping[str, Any], nodes: Mapping[str, str] | None) -> tuple[MachineView, ...]:
    """Return the machines, those that workers avoid first; unreadable entries are shown by their key.

    `nodes` has the machine (`spec.providerID`) of each node by its name, empty if unknown.
    """
    data = read_mapping(config_map, "data")
    machines = [_read_machine(str(key), value, nodes) for key, value in data.items() if key not in _OTHER_ENTRIES]
    order = ("Permanent", "Quarantined", "Probation", "Watched")
    positions = {state: position for position, state in enumerate(order)}
    return tuple(sorted(machines, key=lambda item: (positions.get(item.state, len(order)), item.node, item.key)))


def find_machine(machines: Sequence[MachineView], name: str) -> MachineView | None:
    """Find a machine by its current or former node name, its name or its key."""
    exact = (machine for machine in machines if name in {machine.renamed or machine.node, machine.machine, machine.key})
    return next(exact, None) or next((machine for machine in machines if name == machine.node), None)


def _read_machine(key: str, value: Any, nodes: Mapping[str, str] | None) -> MachineView:
    try:
        entry = yaml.safe_load(value) if isinstance(value, str) else None
    except (yaml.YAMLError, ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict):
        return MachineView(strip_control_characters(key), strip_control_characters(key), "", "Unreadable", None, 0, ())
    node = strip_control_characters(str(entry.get("node") or ""))
    strikes = entry.get("strikes")
    machine = strip_control_characters(str(entry.get("machine") or key))
    node_by_machine = {} if nodes is None else {provider_id: name for name, provider_id in nodes.items() if provider_id}
    present_node = node_by_machine.get(
        machine, node if nodes is not None and not nodes.get(node) and node in nodes else ""
    )
    return MachineView(
        key=key,
        machine=machine,
        node=node,
        state=strip_control_characters(str(entry.get("state") or "Watched")),
        until=parse_rfc3339(entry.get("until")),
        quarantines=entry["quarantines"] if isinstance(entry.get("quarantines"), int) else 0,
        strikes=tuple(_read_strike(strip_control_characters(str(line))) for line in strikes)
        if isinstance(strikes, list)
        else (),
        present=None if nodes is None or not node else bool(present_node),
        renamed=present_node if present_node != node else "",
    )


def _read_strike(line: str) -> StrikeView:
    time, _, rest = line.partition(" ")
    cause, _, by = rest.partition(" ")
    return StrikeView(parse_rfc3339(time), cause, by)
