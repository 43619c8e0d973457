"""Encode the fleet's memory as a ConfigMap that a person can read and edit, with one entry of YAML per machine.

Invariants: an unreadable entry is left out with a warning and never stops the operator. Encoding what was decoded gives
the same text.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
from typing import TYPE_CHECKING, Any

import yaml
from yaml.composer import Composer

from trainium_contract.faults.causes import Cause
from trainium_contract.rfc3339 import format_rfc3339, parse_rfc3339
from trainium_operator.cluster.cache.parts import MAX_NAME_CHARACTERS
from trainium_operator.plan.fleet.memory import MAX_STRIKES, Machine, MachineState, Memory, Strike

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

ABOUT = "about"
ACCOUNTED = "accounted"
_ABOUT = (
    "Machines that faults were attributed to. Delete an entry to release its machine; write one with a machine and "
    "state: Permanent to keep workers away from it. See docs/node-health.md.\n"
)
_MAX_KEY_CHARACTERS = 200
_MAX_NODES = 10_000
"""Values and keys of one entry. A machine's entry has about thirty, and two for each job that it counted."""


def encode(memory: Memory) -> dict[str, str]:
    """Return `data` of the ConfigMap."""
    data = {ABOUT: _ABOUT}
    if memory.accounted:
        # Exact: rounded down, the next reader would count the newest failure of a job again.
        data[ACCOUNTED] = _dump(dict(sorted(memory.accounted.items())))
    for machine, entry in sorted(memory.machines.items()):
        key = re.sub(r"[^-._a-zA-Z0-9]+", ".", machine).strip(".")[:_MAX_KEY_CHARACTERS] or "unnamed"
        if key in data:
            key = f"{key[:_MAX_KEY_CHARACTERS]}-{hashlib.sha256(machine.encode()).hexdigest()[:8]}"
        data[key] = _dump(_read_fields(entry))
    return data


def decode(data: Mapping[str, Any]) -> Memory:
    """Return the memory in `data`; never raises."""
    machines: dict[str, Machine] = {}
    accounted: dict[str, float] = {}
    for key, text in data.items():
        if key == ABOUT:
            continue
        try:
            content = yaml.load(str(text), Loader=_PlainLoader)  # noqa: S506 - a SafeLoader
            if key == ACCOUNTED:
                accounted = {str(uid): _parse_finite(at) for uid, at in content.items()}
            else:
                entry = _parse_machine(key, content)
                machines[entry.machine] = entry
        except _UNREADABLE as error:
            logger.warning("entry %s of the fleet's memory cannot be read (%.200s); it is left out", key, error)
    return Memory(machines=machines, accounted=accounted)


class _PlainLoader(Composer, yaml.CSafeLoader):
    """A SafeLoader with the size limits of an entry, and without aliases, a few lines of which expand to gigabytes.

    Scanning is C code, five times as fast; composing is Python code, which can limit the depth.
    """

    def __init__(self, text: str) -> None:
        yaml.CSafeLoader.__init__(self, text)
        Composer.__init__(self)
        self._nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not read")
        self._nodes += 1
        if self._nodes > _MAX_NODES:
            raise yaml.YAMLError(f"it has more than {_MAX_NODES} values")
        return Composer.compose_node(self, parent, index)


_UNREADABLE = (
    yaml.YAMLError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    OverflowError,
    RecursionError,
)


def _parse_finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value} is not a time")
    return number


def _dump(fields: dict[str, Any]) -> str:
    text: str = yaml.safe_dump(fields, sort_keys=False, default_flow_style=False, width=1000)
    return text


def _read_fields(entry: Machine) -> dict[str, Any]:
    fields: dict[str, Any] = {"machine": entry.machine, "node": entry.node, "state": entry.state.value}
    if entry.suspected_by and entry.state is not MachineState.WATCHED:
        fields["for"] = f"namespace {entry.suspected_by}"  # for people only: it follows from the strikes
    if entry.until is not None:
        fields["until"] = format_rfc3339(entry.until)
    if entry.quarantines:
        fields["quarantines"] = entry.quarantines
    if entry.strikes:
        fields["strikes"] = [
            f"{format_rfc3339(strike.at)} {strike.cause.value} {strike.by}" for strike in entry.strikes
        ]
    if entry.judged:
        fields["judged"] = format_rfc3339(entry.judged)
    if entry.reported:
        fields["reported"] = True
    return fields


def _parse_machine(key: str, content: dict[str, Any]) -> Machine:
    state = MachineState(str(content.get("state", MachineState.WATCHED.value)))
    until = parse_rfc3339(content.get("until"))
    if state in (MachineState.QUARANTINED, MachineState.PROBATION) and until is None:
        raise ValueError(f"state {state.value} needs `until`, such as 2026-01-31T12:00:00Z")
    machine, node = str(content.get("machine") or key), str(content.get("node") or "")
    if max(len(machine), len(node)) > MAX_NAME_CHARACTERS:
        raise ValueError(f"no machine and no node has a name of more than {MAX_NAME_CHARACTERS} characters")
    return Machine(
        machine=machine,
        node=node,
        state=state,
        until=until,
        quarantines=max(0, int(content.get("quarantines", 0))),
        strikes=tuple(_parse_strike(str(line)) for line in list(content.get("strikes") or ())[-MAX_STRIKES:]),
        judged=parse_rfc3339(content.get("judged")) or 0.0,
        reported=content.get("reported") is True,
    )


def _parse_strike(line: str) -> Strike:
    at, cause, by = line.split(" ", 2)
    time = parse_rfc3339(at)
    if time is None:
        raise ValueError(f"{at} is not a time such as 2026-01-31T12:00:00Z")
    return Strike(time, Cause(cause), by)
