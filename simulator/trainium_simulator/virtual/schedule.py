"""When what fails: drawn from the failure model by a seed, or read from a trace.

Invariants: the same seed gives the same faults; each node of the cluster has streams, so one more spare
leaves the faults of the others as they are, and what it buys is measured on the same bad luck.
"""

from __future__ import annotations

import csv
import itertools
import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_simulator.errors import InputError
from trainium_simulator.virtual.failures import OF_MACHINES, OF_THE_CLUSTER, SHARES, FaultClass, Mix, mix_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from trainium_simulator.virtual.failures import FailureModel

DAY = 86_400.0
_COLUMNS = ("seconds", "class", "node", "lasts")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Fault:
    """One thing that goes wrong."""

    at: float
    """Seconds since the job was created."""
    slot: int
    """Place in the cluster, from 0; whatever machine is there then is hit. -1 for operator and API server; of a resize
    the number of nodes that is asked for."""
    kind: FaultClass
    lasts: float = 0.0
    """Time until the fault is repaired: a reboot, a repair, an outage."""
    same_machine: bool = True
    """The same machine comes back, not another one."""
    mark: float = 0.0
    """It happens only on a machine whose hazard is above this share of the worst machine's; 0: in any case."""
    lemon: float = 1.0
    """The machine that comes is a lemon when this is below the share of lemons."""


def draw(
    seed: int,
    *,
    slots: int,
    days: float,
    rate: float,
    mix: Mix,
    model: FailureModel,
    shared: int = 0,
) -> tuple[Fault, ...]:
    """Return the faults of `slots` nodes in so many days, at `rate` interruptions per 1,000 node-days.

    The last `shared` of them are in use by others from time to time.
    """
    faults: list[Fault] = []
    for slot in range(slots):
        for kind, per_second, thinned in _hazards(rate, mix, model):
            dice = random.Random(f"{seed}/{slot}/{kind}")  # noqa: S311 - a simulation
            faults += _stream(dice, slot, kind, per_second, days * DAY, model, thinned=thinned)
    for slot in range(slots - shared, slots):
        faults += _use(random.Random(f"{seed}/{slot}/{FaultClass.TAKEN}"), slot, days * DAY, model)  # noqa: S311
    for kind, a_month in (
        (FaultClass.API_OUTAGE, model.outages_per_30_days),
        (FaultClass.OPERATOR_LOST, model.operator_losses_per_30_days),
    ):
        dice = random.Random(f"{seed}/{kind}")  # noqa: S311 - a simulation
        per_second = a_month / (30 * DAY) if rate > 0 else 0.0
        faults += _stream(dice, -1, kind, per_second, days * DAY, model, thinned=False)
    return tuple(sorted(faults))


def _use(dice: random.Random, slot: int, until: float, model: FailureModel) -> Iterator[Fault]:
    """Yield when others use a node, and for how long."""
    whole = model.idle_seconds + model.taken_seconds
    at = 0.0 if dice.random() < model.taken_seconds / whole else dice.expovariate(1 / model.idle_seconds)
    while at < until:
        lasts = dice.expovariate(1 / model.taken_seconds)
        yield Fault(at=at, slot=slot, kind=FaultClass.TAKEN, lasts=lasts)
        at += lasts + dice.expovariate(1 / model.idle_seconds)


def worst_hazard(model: FailureModel) -> float:
    """Return the hazard of the worst machine, in units of a healthy one."""
    return model.lemon_factor * model.infant_factor


def _hazards(rate: float, mix: Mix, model: FailureModel) -> Iterator[tuple[FaultClass, float, bool]]:
    """Yield each class with the rate of its candidates a second; of those of machines most are passed over (`mark`)."""
    per_second = rate / 1000 / DAY
    usual = 1.0 + model.lemon_share * (model.lemon_factor - 1.0)
    shares = {**SHARES[mix_of(rate, mix)], FaultClass.STRAGGLER: model.stragglers_per_interruption}
    for kind, share in shares.items():
        thinned = kind in OF_MACHINES
        yield kind, per_second * share * (worst_hazard(model) / usual if thinned else 1.0), thinned


def _stream(
    dice: random.Random,
    slot: int,
    kind: FaultClass,
    per_second: float,
    until: float,
    model: FailureModel,
    *,
    thinned: bool,
) -> Iterator[Fault]:
    at = dice.expovariate(per_second) if per_second > 0 else math.inf
    while at < until:
        mark = dice.random()
        reboot = dice.random() < model.reboot_share
        repair = model.repair_seconds * math.exp(model.repair_sigma * dice.gauss())
        lasts, same = _repair(kind, model, repair, reboot=reboot)
        yield Fault(
            at=at,
            slot=slot,
            kind=kind,
            lasts=lasts,
            same_machine=same,
            mark=mark if thinned else 0.0,
            lemon=dice.random(),
        )
        at += dice.expovariate(per_second)


def _repair(kind: FaultClass, model: FailureModel, repair: float, *, reboot: bool) -> tuple[float, bool]:
    """Return how long it lasts, and whether the same machine comes back."""
    if kind is FaultClass.DEVICE_ERROR or (kind is FaultClass.NODE_LOST and not reboot):
        return repair, False
    lasting = {
        FaultClass.NODE_LOST: model.reboot_seconds,
        FaultClass.MAINTENANCE: model.reboot_seconds,
        FaultClass.RACK: model.rack_seconds,
        FaultClass.STRAGGLER: model.straggler_seconds,
        FaultClass.API_OUTAGE: model.outage_seconds,
        FaultClass.TAKEN: model.taken_seconds,
        FaultClass.OPERATOR_LOST: model.operator_seconds,
        FaultClass.RESIZE: model.resize_seconds,
    }
    return lasting.get(kind, 0.0), True


def read_trace(path: Path, *, slots: int, model: FailureModel) -> tuple[Fault, ...]:
    """Return the faults of a CSV file with the columns seconds, class, node and optionally lasts. Raises InputError."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file, skipinitialspace=True)
            _check_columns(path, tuple(rows.fieldnames or ()))
            faults = tuple(_row(path, number, row, slots, model) for number, row in enumerate(rows, start=2))
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
    wanted = ", ".join(_COLUMNS[:3])
    if not set(_COLUMNS[:3]) <= set(found):
        raise InputError(f"{path}: its first line must name the columns {wanted} and may name lasts")
    unknown = set(found) - set(_COLUMNS)
    if unknown:
        raise InputError(f"{path}: unknown column {min(unknown)!r}; known are {', '.join(_COLUMNS)}")


def _row(path: Path, number: int, row: dict[str, str | None], slots: int, model: FailureModel) -> Fault:
    where = f"{path}, line {number}"
    name = (row.get("class") or "").strip()
    if name not in set(FaultClass):
        raise InputError(f"{where}: unknown class {name!r}; known are {', '.join(FaultClass)}")
    kind = FaultClass(name)
    at = _number(where, "seconds", row.get("seconds"))
    node = -1 if kind in OF_THE_CLUSTER else _number(where, "node", row.get("node"))
    if kind is FaultClass.RESIZE and not (node == int(node) and 1 <= node <= slots):
        raise InputError(f"{where}: the node of a Resize is a number of nodes from 1 to {slots}, not {node:g}")
    if kind not in (FaultClass.RESIZE, *OF_THE_CLUSTER) and (node != int(node) or node >= slots):
        raise InputError(f"{where}: node {node:g} is none of the {slots} nodes, 0 to {slots - 1} (spares included)")
    lasts, same = _repair(kind, model, model.repair_seconds, reboot=False)
    given = (row.get("lasts") or "").strip()
    if given:
        lasts = _number(where, "lasts", given)
    return Fault(at=at, slot=int(node), kind=kind, lasts=lasts, same_machine=same)


def _number(where: str, column: str, text: str | None) -> float:
    try:
        value = float((text or "").strip())
    except ValueError as error:
        raise InputError(f"{where}: {column} must be a number, not {(text or '').strip()!r}") from error
    if not math.isfinite(value) or value < 0:
        raise InputError(f"{where}: {column} must be 0 or more, not {text}")
    return value
