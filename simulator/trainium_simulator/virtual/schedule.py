"""Draw the faults of a simulation from the failure model by a seed, or read them from a trace.

Guarantees:
- The same seed gives the same faults.
- Each node has separate random streams: another spare changes no fault of the other nodes.
"""

from __future__ import annotations

import csv
import itertools
import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_simulator.errors import InputError
from trainium_simulator.virtual.failures import CLUSTER_FAULTS, MACHINE_FAULTS, SHARES, FaultClass, Mix, resolve_mix

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from trainium_simulator.virtual.failures import FailureModel

DAY = 86_400.0
_COLUMNS = ("seconds", "class", "node", "duration")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Fault:
    """A fault."""

    at: float
    """Seconds since the job was created."""
    slot: int
    """Slot of the cluster, from 0; -1 for a fault that concerns no particular node."""
    kind: FaultClass
    duration: float = 0.0
    """Seconds until the fault ends: a reboot, a repair, an outage."""
    same_machine: bool = True
    """Whether the same machine returns."""
    hazard_threshold: float = 0.0
    """The fault occurs only if the machine's hazard is at least this share of the worst machine's; 0: always."""
    lemon_draw: float = 1.0
    """The new machine is a lemon if this is below the share of lemons."""
    replicas: int = 0
    """Number of nodes that a Resize requests; 0 for other faults."""


def draw_faults(
    seed: int,
    *,
    slots: int,
    days: float,
    rate: float,
    mix: Mix,
    model: FailureModel,
    shared_nodes: int = 0,
) -> tuple[Fault, ...]:
    """Return the faults of `slots` nodes during the simulated days, at `rate` interruptions per 1,000 node-days.

    The last `shared_nodes` nodes are used by others from time to time.
    """
    faults: list[Fault] = []
    for slot in range(slots):
        for kind, per_second, thinned in _list_candidate_rates(rate, mix, model):
            rng = random.Random(f"{seed}/{slot}/{kind}")  # noqa: S311 - a simulation
            faults += _draw_stream(rng, slot, kind, per_second, days * DAY, model, thinned=thinned)
    for slot in range(slots - shared_nodes, slots):
        faults += _draw_occupations(random.Random(f"{seed}/{slot}/{FaultClass.OCCUPIED}"), slot, days * DAY, model)  # noqa: S311
    for kind, per_30_days in (
        (FaultClass.API_OUTAGE, model.outages_per_30_days),
        (FaultClass.OPERATOR_LOST, model.operator_losses_per_30_days),
    ):
        rng = random.Random(f"{seed}/{kind}")  # noqa: S311 - a simulation
        per_second = per_30_days / (30 * DAY) if rate > 0 else 0.0
        faults += _draw_stream(rng, -1, kind, per_second, days * DAY, model, thinned=False)
    return tuple(sorted(faults))


def _draw_occupations(rng: random.Random, slot: int, until: float, model: FailureModel) -> Iterator[Fault]:
    """Yield the periods in which others use a node, up to `until` seconds."""
    cycle_seconds = model.idle_seconds + model.occupied_seconds
    at = 0.0 if rng.random() < model.occupied_seconds / cycle_seconds else rng.expovariate(1 / model.idle_seconds)
    while at < until:
        duration = rng.expovariate(1 / model.occupied_seconds)
        yield Fault(at=at, slot=slot, kind=FaultClass.OCCUPIED, duration=duration)
        at += duration + rng.expovariate(1 / model.idle_seconds)


def compute_worst_hazard(model: FailureModel) -> float:
    """Return the failure rate of a new lemon as a multiple of that of a healthy machine."""
    return model.lemon_factor * model.infant_factor


def _list_candidate_rates(rate: float, mix: Mix, model: FailureModel) -> Iterator[tuple[FaultClass, float, bool]]:
    """Yield each class, its candidates per second, and whether candidates are thinned by the hazard of the machine."""
    per_second = rate / 1000 / DAY
    mean_hazard = 1.0 + model.lemon_share * (model.lemon_factor - 1.0)
    shares = {**SHARES[resolve_mix(rate, mix)], FaultClass.STRAGGLER: model.stragglers_per_interruption}
    for kind, share in shares.items():
        thinned = kind in MACHINE_FAULTS
        yield kind, per_second * share * (compute_worst_hazard(model) / mean_hazard if thinned else 1.0), thinned


def _draw_stream(
    rng: random.Random,
    slot: int,
    kind: FaultClass,
    per_second: float,
    until: float,
    model: FailureModel,
    *,
    thinned: bool,
) -> Iterator[Fault]:
    at = rng.expovariate(per_second) if per_second > 0 else math.inf
    while at < until:
        threshold = rng.random()
        reboot = rng.random() < model.reboot_share
        repair = model.repair_seconds * math.exp(model.repair_sigma * rng.gauss())
        duration, same_machine = _repair_duration(kind, model, repair, reboot=reboot)
        yield Fault(
            at=at,
            slot=slot,
            kind=kind,
            duration=duration,
            same_machine=same_machine,
            hazard_threshold=threshold if thinned else 0.0,
            lemon_draw=rng.random(),
        )
        at += rng.expovariate(per_second)


def _repair_duration(kind: FaultClass, model: FailureModel, repair: float, *, reboot: bool) -> tuple[float, bool]:
    """Return the seconds until a fault is repaired, and whether the same machine returns."""
    if kind is FaultClass.DEVICE_ERROR or (kind is FaultClass.NODE_LOST and not reboot):
        return repair, False
    durations = {
        FaultClass.NODE_LOST: model.reboot_seconds,
        FaultClass.MAINTENANCE: model.reboot_seconds,
        FaultClass.RACK: model.rack_seconds,
        FaultClass.STRAGGLER: model.straggler_seconds,
        FaultClass.API_OUTAGE: model.outage_seconds,
        FaultClass.OCCUPIED: model.occupied_seconds,
        FaultClass.OPERATOR_LOST: model.operator_seconds,
        FaultClass.RESIZE: model.resize_seconds,
    }
    return durations.get(kind, 0.0), True


def read_trace(path: Path, *, slots: int, model: FailureModel) -> tuple[Fault, ...]:
    """Return the faults of a CSV file of columns seconds, class, node and, optional, duration. Raises InputError."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file, skipinitialspace=True)
            _check_columns(path, tuple(rows.fieldnames or ()))
            faults = tuple(_parse_row(path, number, row, slots, model) for number, row in enumerate(rows, start=2))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} is not a CSV file: {error}") from error
    for number, (before, after) in enumerate(itertools.pairwise(faults), start=3):
        if after.at < before.at:
            raise InputError(
                f"{path}, line {number}: second {after.at:g} comes after second {before.at:g}; sort the trace by time"
            )
    return faults


def _check_columns(path: Path, found: tuple[str, ...]) -> None:
    required = ", ".join(_COLUMNS[:3])
    if not set(_COLUMNS[:3]) <= set(found):
        raise InputError(f"{path}: its first line must name the columns {required} and may name duration")
    unknown = set(found) - set(_COLUMNS)
    if unknown:
        raise InputError(f"{path}: unknown column {min(unknown)!r}; known are {', '.join(_COLUMNS)}")


def _parse_row(path: Path, number: int, row: dict[str, str | None], slots: int, model: FailureModel) -> Fault:
    location = f"{path}, line {number}"
    name = (row.get("class") or "").strip()
    if name not in set(FaultClass):
        raise InputError(f"{location}: unknown class {name!r}; known are {', '.join(FaultClass)}")
    kind = FaultClass(name)
    at = _parse_number(location, "seconds", row.get("seconds"))
    node = -1.0 if kind in CLUSTER_FAULTS else _parse_number(location, "node", row.get("node"))
    slot, replicas = (-1, int(node)) if kind is FaultClass.RESIZE else (int(node), 0)
    if kind is FaultClass.RESIZE and not (node == replicas and 1 <= node <= slots):
        raise InputError(f"{location}: the node of a Resize is a number of nodes from 1 to {slots}, not {node:g}")
    if kind not in (FaultClass.RESIZE, *CLUSTER_FAULTS) and (node != slot or node >= slots):
        raise InputError(f"{location}: node {node:g} is none of the {slots} nodes, 0 to {slots - 1} (spares included)")
    duration, same_machine = _repair_duration(kind, model, model.repair_seconds, reboot=False)
    duration_text = (row.get("duration") or "").strip()
    if duration_text:
        duration = _parse_number(location, "duration", duration_text)
    return Fault(at=at, slot=slot, kind=kind, duration=duration, same_machine=same_machine, replicas=replicas)


def _parse_number(location: str, column: str, text: str | None) -> float:
    try:
        value = float((text or "").strip())
    except ValueError as error:
        raise InputError(f"{location}: {column} must be a number, not {(text or '').strip()!r}") from error
    if not math.isfinite(value) or value < 0:
        raise InputError(f"{location}: {column} must be 0 or more, not {text}")
    return value
