"""The small models: few workers, so that every history is tried, but enough for losses, spares and smaller sizes."""

from collections.abc import Callable, Mapping
from typing import Any

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_cluster import FakeCluster
from trainium_contract.spec.elasticity import IdleNodes
from trainium_contract.spec.precompile import CompiledSize, PrecompileSpec

NODES = 4
_WARM_SECONDS = 12


def _model(
    nodes: int = NODES,
    batch: int = 24,
    deadlines: Mapping[str, int] | None = None,
    name: str = "demo",
    **workers: Any,
) -> FakeCluster:
    recovery = {"rescaleAfterSeconds": 30, "budgets": {"process": {"maxFailures": 50}}}
    trainer = {"steps": 10**6, "batch": {"globalSize": batch}}
    job_spec = build.spec(workers={"replicas": 2, **workers}, recovery=recovery, trainer=trainer, **(deadlines or {}))
    return FakeCluster(job_spec, nodes, name)


def trains(**model: Any) -> FakeCluster:
    """Return a job that trains."""
    cluster = _model(**model)
    cluster.run(_WARM_SECONDS)
    return cluster


def uses_idle_nodes() -> FakeCluster:
    """Return a job of two that has taken two idle nodes."""
    job_spec = _model(replicas=2, minReplicas=1, maxReplicas=4).spec
    cluster = FakeCluster(job_spec.replaced(elasticity=job_spec.elasticity.replaced(idle_nodes=IdleNodes.TAKE)), NODES)
    cluster.run(_WARM_SECONDS)
    return cluster


def build_compiling_cluster(*sizes: int) -> FakeCluster:
    """Return a job of four that compiles ahead and trains; its workers report that these sizes are compiled."""
    job_spec = _model(batch=8, replicas=4, minReplicas=1).spec
    cluster = FakeCluster(job_spec.replaced(precompile=PrecompileSpec(enabled=True)), NODES)
    cluster.compiled = tuple(CompiledSize(nodes=size, seconds=600.0) for size in sizes)
    cluster.run(_WARM_SECONDS)
    return cluster


MODELS: Mapping[str, tuple[Callable[[], FakeCluster], ...]] = {
    "spare": (lambda: trains(spares=1, minReplicas=1), lambda: _model(spares=1, minReplicas=1)),
    "rigid": (trains, _model),
    # After the loss of a node three are left. Two train as fast as three, so the third is in reserve.
    "reserve": (lambda: trains(batch=4, replicas=4, minReplicas=1),),
    # After the loss of a node two train, because only their size is compiled, although three would be faster.
    "compiled": (lambda: build_compiling_cluster(2),),
    # Two workers more than requested train, and leave first.
    "idle": (uses_idle_nodes,),
    # The deadline passes during the reaction to a transition: while training, and at a start with too few nodes.
    "deadline": (
        lambda: trains(spares=1, deadlines={"activeDeadlineSeconds": _WARM_SECONDS + 2}),
        lambda: _model(nodes=1, deadlines={"startupDeadlineSeconds": 3}),
    ),
}
"""Start states of histories by model: a job that trains, and one that was just created."""
