"""The small models: few enough workers to try everything, enough to have a rank to lose, a spare and a smaller size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plan_builders import spec
from plan_cluster import FakeCluster

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

NODES = 4
_WARM_SECONDS = 12


def _model(nodes: int = NODES, **workers: Any) -> FakeCluster:
    recovery = {"rescaleAfterSeconds": 30, "budgets": {"process": {"maxFailures": 50}}}
    made = spec(workers={"replicas": 2, **workers}, recovery=recovery, trainer={"steps": 10**6})
    return FakeCluster(made, nodes)


def trains(nodes: int = NODES, **workers: Any) -> FakeCluster:
    """A job that trains."""
    cluster = _model(nodes, **workers)
    cluster.run(_WARM_SECONDS)
    return cluster


MODELS: Mapping[str, tuple[Callable[[], FakeCluster], ...]] = {
    "spare": (lambda: trains(spares=1, minReplicas=1), lambda: _model(spares=1, minReplicas=1)),
    "rigid": (trains, _model),
}
"""By name: the states from which histories begin, one that trains and one that has just been created."""
