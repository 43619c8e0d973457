"""What is played: the job, the failure model of a bad month in an hour, and the schedule drawn from them.

Invariants: the same seed and length give the same schedule; simulator and soak read it alike, so whatever it names must
be playable on the development cluster. Of the whole cluster (API server, operator, size) one thing happens at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_contract.job import TrainingJobSpec
from trainium_simulator.virtual.failures import OF_THE_CLUSTER, FailureModel, FaultClass, Mix
from trainium_simulator.virtual.schedule import DAY, Fault, draw

if TYPE_CHECKING:
    from collections.abc import Iterable

NODES = 4
SPARES = 1
PLACES = NODES + SPARES
BATCH = 8
PASS_SECONDS = 0.25
"""Of a micro-batch: 0.5 s a step on 4 nodes, 0.75 s on 3 (uneven), 1 s on 2."""
CALM_SECONDS = 60.0
"""Without a fault at the beginning, and at the end."""
STEPS = 1_000_000
CLUSTER_GAP_SECONDS = 30.0
"""Between two faults of the whole cluster, from the end of one to the next."""

MODEL = FailureModel(
    lemon_share=0.0,
    lemon_factor=1.0,
    infant_factor=1.0,
    stragglers_per_interruption=1 / 6,
    straggler_factor=1.5,
    straggler_seconds=60.0,
    outage_seconds=20.0,
    outages_per_30_days=30 * 24 * 4.5,
    operator_seconds=8.0,
    operator_losses_per_30_days=30 * 24 * 4.5,
    resize_seconds=45.0,
    resizes_per_30_days=30 * 24 * 4.5,
    rack_nodes=2,
    rack_seconds=45.0,
    reboot_seconds=45.0,
    reboot_share=0.5,
    repair_seconds=45.0,
    repair_sigma=0.2,
    notice_seconds=15.0,
    person_seconds=30.0,
)
"""Repairs of a minute, and faults of the whole cluster nine times in two hours each; nodes are sound and old."""

SPEC: dict[str, Any] = {
    "workers": {"replicas": NODES, "minReplicas": 2, "spares": SPARES, "accelerator": {"device": "cpu"}},
    "trainer": {
        "model": {"preset": "Tiny"},
        "data": {"sequenceLength": 32, "tokenizer": {"vocabSize": 512}, "cacheDirectory": "/cache"},
        "batch": {"globalSize": BATCH, "microSize": 1},
        "steps": STEPS,
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
        "budgets": {
            "process": {"maxFailures": 100_000},
            "infrastructure": {"maxFailures": 100_000},
        },
    },
}
"""The job; quarantine is off, for at this rate every machine would be in it for the rest of the day."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """One soak."""

    seed: int
    minutes: float
    faults_per_hour: float
    faults: tuple[Fault, ...]
    """By time, in seconds since the job was created."""

    @property
    def seconds(self) -> float:
        """Length."""
        return self.minutes * 60.0

    @property
    def half(self) -> float:
        """What is learned from is before, what is judged after."""
        return self.seconds / 2


def spec() -> TrainingJobSpec:
    """The job as the simulator takes it."""
    return TrainingJobSpec.model_validate(SPEC)


def course(seed: int, minutes: float, faults_per_hour: float) -> Course:
    """The schedule of a soak."""
    rate = faults_per_hour * 24 / PLACES * 1000
    days = minutes * 60 / DAY
    drawn = draw(seed, slots=PLACES, days=days, rate=rate, mix=Mix.EVEN, model=MODEL, sizes=(NODES - 2, NODES - 1))
    inside = [each for each in drawn if CALM_SECONDS <= each.at <= minutes * 60 - CALM_SECONDS]
    return Course(seed=seed, minutes=minutes, faults_per_hour=faults_per_hour, faults=tuple(_apart(inside)))


def _apart(faults: Iterable[Fault]) -> Iterable[Fault]:
    """Without those of the whole cluster that begin before another one is over."""
    free = 0.0
    for fault in faults:
        if fault.kind in OF_THE_CLUSTER or fault.kind is FaultClass.RESIZE:
            if fault.at < free:
                continue
            free = fault.at + fault.lasts + CLUSTER_GAP_SECONDS
        yield fault
