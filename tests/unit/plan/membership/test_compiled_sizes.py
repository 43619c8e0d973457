"""Uncompiled sizes: a compiled one is used until compiling pays, or until a spare has compiled a better one."""

from typing import Any

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_cluster import FakeCluster, start_cluster
from trainium_contract.sizes import MAX_COMPILED
from trainium_contract.spec.precompile import CompiledSize
from trainium_contract.status.conditions import ConditionType
from trainium_contract.status.interruptions import RecoveryResponse
from trainium_contract.status.public import CompiledStatus
from trainium_operator.plan.model.conditions import is_true

RESCALE_AFTER_SECONDS = 30
COMPILE = 600.0


def start_job(sizes: str = "Background", **changes: Any) -> FakeCluster:
    """Start a job for which 8 nodes make one pass a step, 4 to 7 two, 3 three, 2 four."""
    job_spec = build.spec(
        workers={"replicas": 8, "minReplicas": 2},
        recovery={"rescaleAfterSeconds": RESCALE_AFTER_SECONDS},
        trainer={"steps": 10**7, "batch": {"globalSize": 8}},
        precompile={"enabled": True, "sizes": sizes},
        **changes,
    )
    return start_cluster(job_spec, 8)


def report_compiled(cluster: FakeCluster, *sizes: int) -> None:
    """Let all agents report these compiled sizes."""
    cluster.compiled = tuple(CompiledSize(nodes=size, seconds=COMPILE) for size in sizes)
    cluster.dirty = True  # a heartbeat with a new size wakes the operator


def test_the_status_lists_compiled_sizes_and_the_slowest_compilation() -> None:
    cluster = start_job()
    assert cluster.status.compiled == CompiledStatus(sizes=(8,))
    report_compiled(cluster, 4, 2)
    cluster.run(2)
    assert cluster.status.compiled == CompiledStatus(sizes=(8, 4, 2), seconds=COMPILE)
    cluster.suspend(True)
    cluster.run(20)
    assert is_true(cluster.status, ConditionType.SUSPENDED)
    assert cluster.status.compiled == CompiledStatus(), "the job may be given another image now"


def test_a_size_that_is_requested_later_is_compiled_only_after_its_first_step() -> None:
    cluster = start_job("Start")
    assert cluster.status.compiled.sizes == (8,)
    cluster.change(replicas=4)
    seen = set()
    for _ in range(40):
        cluster.run(1)
        seen.add((cluster.size, cluster.status.compiled.sizes))
    assert (4, (8,)) in seen, "its workers were created for 8 nodes"
    assert cluster.status.compiled.sizes == (8, 4)


def test_reported_compiled_sizes_must_be_legal() -> None:
    cluster = start_job(parallelism={"tensor": 2})
    report_compiled(cluster, 4, 3, 5)
    cluster.run(2)
    assert cluster.status.compiled.sizes == (8, 4), "three and five processes make no pairs"
    report_compiled(cluster, 10, 6)
    cluster.run(2)
    assert cluster.status.compiled.sizes == (8, 4, 6), "ten nodes are more than it may have"
    cluster.change(max_replicas=10)
    report_compiled(cluster, 10, 12)
    cluster.run(2)
    assert cluster.status.compiled.sizes == (8, 4, 6, 10)


def test_compiled_sizes_are_bounded() -> None:
    cluster = start_job()
    cluster.change(max_replicas=200)
    for first in (2, 62, 122):
        report_compiled(cluster, *range(first, first + 60))
        cluster.run(2)
    assert len(cluster.status.compiled.sizes) == MAX_COMPILED


def test_a_job_that_does_not_compile_ahead_takes_the_best_size() -> None:
    cluster = start_job()
    cluster.spec = cluster.spec.replaced(precompile=cluster.spec.precompile.replaced(enabled=False))
    cluster.dirty = True
    cluster.lose_node("node-7")
    cluster.run(RESCALE_AFTER_SECONDS + 20)
    assert (cluster.size, cluster.status.compiled.sizes) == (4, ())


def test_a_job_shrinks_to_a_compiled_size_and_grows_when_a_better_one_is_compiled() -> None:
    cluster = start_job()
    report_compiled(cluster, 3)
    cluster.run(2)
    cluster.lose_node("node-7")
    cluster.run(RESCALE_AFTER_SECONDS + 20)
    assert cluster.size == 3, "4 nodes would make two passes in place of three, after ten minutes"
    cluster.run(5 * RESCALE_AFTER_SECONDS)
    assert cluster.size == 3
    report_compiled(cluster, 3, 4)
    cluster.run(2 * RESCALE_AFTER_SECONDS)
    assert cluster.size == 4
    assert cluster.newest_entry.response is RecoveryResponse.GROW
    cluster.restore_node("node-7")
    cluster.run(6 * RESCALE_AFTER_SECONDS)
    assert cluster.size == 8
