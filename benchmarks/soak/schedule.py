"""Draw the schedule of a soak: kinds, slots and times of faults, from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

NODES = 4
SPARES = 1
SLOTS = NODES + SPARES
RACK_NODES = 2
PASS_SECONDS = 0.25
"""Length of a micro-batch: a step takes 0.5 s on 4 nodes, 0.75 s on 3 (uneven), 1 s on 2."""
QUIET_SECONDS = 60.0
"""Time without faults at the start and at the end."""
CLUSTER_GAP_SECONDS = 30.0
"""Time between two faults of the whole cluster."""
CLUSTER_FAULTS_PER_HOUR = 4.5
NOTICE_SECONDS = 15.0
STRAGGLER_FACTOR = 1.5

SPEC: dict[str, Any] = {
    "workers": {"replicas": NODES, "minReplicas": 2, "spares": SPARES, "accelerator": {"device": "cpu"}},
    "trainer": {
        "model": {"preset": "Tiny"},
        "data": {"sequenceLength": 32, "tokenizer": {"vocabSize": 512}, "cacheDirectory": "/cache"},
        "batch": {"globalSize": 8, "microSize": 1},
        "steps": 1_000_000,
        "schedule": {"warmupSteps": 20},
        "monitor": {"tensorboard": False, "recordSamples": True},
    },
    "checkpoint": {"durable": {"everySteps": 40, "everySeconds": 86_400, "keepLast": 3}},
    "health": {"quarantine": {"enabled": False}},
    "recovery": {
        "rescaleAfterSeconds": 10,
        "gracePeriodSeconds": 20,
        "hang": {"stepFloorSeconds": 3},
        "stragglers": {"persistSteps": 20},
        "budgets": {"process": {"maxFailures": 100_000}, "infrastructure": {"maxFailures": 100_000}},
    },
}
"""The job; quarantine is off, because at this rate every machine would be in it."""


class Kind(StrEnum):
    """Kind of a fault."""

    KILLED_RANK = "KilledRank"
    STOPPED_RANK = "StoppedRank"
    DEVICE_ERROR = "DeviceError"
    NODE_LOST = "NodeLost"
    RACK_LOST = "RackLost"
    MAINTENANCE = "Maintenance"
    """The node fails after a notice."""
    STRAGGLER = "Straggler"
    API_SERVER_DOWN = "ApiServerDown"
    OPERATOR_KILLED = "OperatorKilled"
    RESIZE = "Resize"


SECONDS = {
    Kind.DEVICE_ERROR: 45.0,
    Kind.NODE_LOST: 45.0,
    Kind.RACK_LOST: 45.0,
    Kind.MAINTENANCE: 45.0,
    Kind.STRAGGLER: 60.0,
    Kind.API_SERVER_DOWN: 20.0,
    Kind.OPERATOR_KILLED: 8.0,
    Kind.RESIZE: 45.0,
}
"""Duration of a fault, or time until the node is repaired."""
OF_THE_CLUSTER = (Kind.API_SERVER_DOWN, Kind.OPERATOR_KILLED, Kind.RESIZE)
OF_A_SLOT = tuple(kind for kind in Kind if kind not in OF_THE_CLUSTER)


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """A fault of a slot (a place for a node), or of the whole cluster."""

    at: float
    """Seconds since the start of the schedule."""
    kind: Kind
    slot: int
    """-1 for the whole cluster; the size of a resize."""
    same_machine: bool = True
    """Whether the repair keeps the machine."""

    @property
    def seconds(self) -> float:
        """Duration, or time until the node is repaired."""
        return SECONDS.get(self.kind, 0.0)


def draw(seed: int, minutes: float, faults_per_hour: float) -> tuple[Fault, ...]:
    """Draw the faults of so many minutes; the same arguments give the same schedule."""
    end = minutes * 60 - QUIET_SECONDS
    faults: list[Fault] = []
    for kind in Kind:
        rng = random.Random(f"{seed}/{kind}")
        per_hour = CLUSTER_FAULTS_PER_HOUR if kind in OF_THE_CLUSTER else faults_per_hour / len(OF_A_SLOT)
        at = QUIET_SECONDS + rng.expovariate(per_hour / 3600)
        while at <= end:
            slot = rng.randrange(SLOTS) if kind in OF_A_SLOT else -1
            slot = rng.choice((NODES - 2, NODES - 1)) if kind is Kind.RESIZE else slot
            faults.append(Fault(at, kind, slot, rng.random() < 0.5))
            at += rng.expovariate(per_hour / 3600)
    return tuple(_without_overlaps(sorted(faults)))


def _without_overlaps(faults: list[Fault]) -> list[Fault]:
    """Remove faults of the whole cluster that start before the one before is over."""
    kept, free = [], 0.0
    for fault in faults:
        if fault.kind in OF_THE_CLUSTER:
            if fault.at < free:
                continue
            free = fault.at + fault.seconds + CLUSTER_GAP_SECONDS
        kept.append(fault)
    return kept
