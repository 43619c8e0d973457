"""The extent of the measurements at one cluster size."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementPlan:
    """Extent of the measurements at one cluster size."""

    nodes: int
    starts: int
    """Number of rounds, each of floor and job."""
    faults: int
    """Number of injections of each fault."""
    restarts: bool
    """Whether gang restart and scaling are measured."""
    steady_seconds: float
    agents: bool = True
    """Whether agents and faults are simulated; one process cannot send heartbeats for 5,000 agents."""

    @classmethod
    def for_size(cls, nodes: int, *, quick: bool) -> MeasurementPlan:
        """Return a plan that two cores can run."""
        if nodes <= 256:
            return cls(
                nodes=nodes,
                starts=3 if quick else 7,
                faults=2 if quick else 5,
                restarts=True,
                steady_seconds=15 if quick else 60,
            )
        if nodes <= 1500:
            return cls(
                nodes=nodes,
                starts=1 if quick else 3,
                faults=1 if quick else 2,
                restarts=True,
                steady_seconds=10 if quick else 30,
            )
        return cls(nodes=nodes, starts=1, faults=0, restarts=False, steady_seconds=0, agents=False)

    @property
    def timeout(self) -> float:
        """Seconds that the slowest operation may take."""
        return 120.0 + self.nodes / 5
