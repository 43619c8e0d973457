"""Small simulated jobs."""

from typing import Any

from tests.testing.operator.job_views import job_spec
from trainium_contract.job import TrainingJobSpec
from trainium_contract.status.interruptions import Interruption
from trainium_simulator.stages import StageTimes
from trainium_simulator.virtual.failures import FailureModel, FaultClass, Mix
from trainium_simulator.virtual.result import SimulationResult
from trainium_simulator.virtual.schedule import Fault
from trainium_simulator.virtual.simulation import Simulation, SimulationSettings

HOUR = 3600.0
DAY = 24 * HOUR


def spec(nodes: int = 4, spares: int = 1, **changes: Any) -> TrainingJobSpec:
    """Return a CPU job whose sizes are legal down to 1 with a batch of 24."""
    workers = {"replicas": nodes, "spares": spares, **changes.pop("workers", {})}
    return job_spec(workers=workers, trainer={"steps": 10_000_000, **changes.pop("trainer", {})}, **changes)


def fault(at: float, kind: FaultClass, slot: int = 0, **changes: Any) -> Fault:
    return Fault(at=at, kind=kind, slot=slot, **{"duration": HOUR, "same_machine": False, **changes})


def build_simulation(job: TrainingJobSpec | None = None, *, days: float = 1.0, **stages: float) -> Simulation:
    setting = SimulationSettings(spec=job or spec(), stages=StageTimes(**stages), model=FailureModel(), days=days)
    return Simulation(setting)


def simulate(
    *faults: Fault, job: TrainingJobSpec | None = None, days: float = 1.0, **stages: float
) -> SimulationResult:
    return build_simulation(job, days=days, **stages).run(faults)


def only_interruption(outcome: SimulationResult) -> Interruption:
    """Return the only recovery of a run."""
    assert len(outcome.interruptions) == 1, outcome.interruptions
    return outcome.interruptions[0]


__all__ = ["DAY", "HOUR", "FaultClass", "Mix", "build_simulation", "fault", "only_interruption", "simulate", "spec"]
