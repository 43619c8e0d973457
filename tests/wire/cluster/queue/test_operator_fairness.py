"""Jobs behind a webhook that fails or hangs: nobody else waits for them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tests.testing.api.fake_kubernetes import FakeCluster, refuse
from tests.testing.suite.virtual_time import run_virtual
from tests.testing.virtual.fake_workers import Workers
from tests.testing.virtual.operator_process import OperatorProcess, training_job, until, wall_clock
from trainium_operator.cluster.api.resources import EVENTS, JOBS, PODS

if TYPE_CHECKING:
    from trainium_operator.cluster.api.transport import HttpResponse

HOOK_SECONDS = 10.0
"""Default time-out of the API server for a webhook."""


def behind_a_webhook(process: OperatorProcess, seconds: float, *, refuses: bool) -> list[float]:
    """Writes about objects of jobs named `held-…` take so long; the times of the pods' creations that were tried."""
    request, tried = process.connection.request, list[float]()

    async def held(method: str, path: str, *, body: Any, **rest: Any) -> HttpResponse:
        name = str(((body or {}).get("metadata") or {}).get("name", ""))
        if method == "POST" and path.endswith("/pods") and name.startswith("held-"):
            tried.append(asyncio.get_running_loop().time())
            await asyncio.sleep(seconds)
            if refuses:
                return refuse(500, "InternalError", "failed calling webhook: context deadline exceeded")
        return await request(method, path, body=body, **rest)

    process.connection.request = held  # type: ignore[method-assign]
    return tried


async def recovery_seconds(
    held: int, *, replicas: int = 1, refuses: bool = True, afterwards: float = 0.0
) -> tuple[float, FakeCluster, list[float]]:
    """Measure how long a job takes to train again after its worker was killed, beside so many jobs that are held."""
    cluster = FakeCluster(wall_clock)
    process, workers = OperatorProcess(cluster), Workers(cluster, nodes=130, total_steps=10**6)
    workers.operator = process
    running = asyncio.create_task(workers.run())
    cluster.add(JOBS, training_job("good"))
    await process.start()
    await until(lambda: workers.step_of("good") > 5, 60, "it trains")
    tried = behind_a_webhook(process, HOOK_SECONDS, refuses=refuses)
    for number in range(held):
        cluster.add(JOBS, training_job(f"held-{number}", replicas=replicas))
    await asyncio.sleep(5.3)
    loop = asyncio.get_running_loop()
    began, step = loop.time(), workers.step_of("good")
    workers.kill_pod("good-w-1")
    await until(lambda: workers.step_of("good") > step + 2, 600, "it trains again")
    seconds = loop.time() - began
    await asyncio.sleep(afterwards)
    running.cancel()
    await process.kill()
    return seconds, cluster, tried


def test_a_fault_is_answered_as_fast_beside_five_jobs_that_are_held_as_alone() -> None:
    alone, _, _ = run_virtual(recovery_seconds(0))
    for refuses in (True, False):
        beside, _, _ = run_virtual(recovery_seconds(5, replicas=24, refuses=refuses))
        assert beside <= 1.5 * alone, refuses


def test_a_held_job_is_retried_with_growing_pauses_and_its_status_gives_the_reason() -> None:
    _, cluster, tried = run_virtual(recovery_seconds(1, afterwards=300))
    assert 3 <= len(tried) <= 30
    assert tried[-1] - tried[0] > 120
    notes = [raw["note"] for key, raw in cluster.objects.items() if key[0] == EVENTS.plural]
    assert any("failed calling webhook" in note for note in notes)
    assert not [name for name in cluster.names(PODS) if name.startswith("held-")]
