"""Jobs behind an admission webhook that fails or hangs delay no other job."""

import asyncio
from typing import Any

from tests.testing.api.fake_kubernetes import FakeCluster, http_error
from tests.testing.suite.virtual_time import run_virtual
from tests.testing.virtual.fake_workers import Workers
from tests.testing.virtual.operator_process import OperatorProcess, training_job, until, wall_clock
from trainium_operator.cluster.api.resources import EVENTS, JOBS, PODS
from trainium_operator.cluster.api.transport import HttpResponse

HOOK_SECONDS = 10.0
"""Default time-out of the API server for a webhook."""


def behind_a_webhook(process: OperatorProcess, seconds: float, *, refuses: bool) -> list[float]:
    """Delay creations of pods of jobs named `held-…`; return the list of their times."""
    request, tried = process.connection.request, list[float]()

    async def held(method: str, path: str, *, body: Any, **rest: Any) -> HttpResponse:
        name = str(((body or {}).get("metadata") or {}).get("name", ""))
        if method == "POST" and path.endswith("/pods") and name.startswith("held-"):
            tried.append(asyncio.get_running_loop().time())
            await asyncio.sleep(seconds)
            if refuses:
                return http_error(500, "InternalError", "failed calling webhook: context deadline exceeded")
        return await request(method, path, body=body, **rest)

    process.connection.request = held  # type: ignore[method-assign]
    return tried


async def recovery_seconds(
    held: int, *, replicas: int = 1, refuses: bool = True, afterwards: float = 0.0
) -> tuple[float, FakeCluster, list[float]]:
    """Measure the recovery of a job after its worker was killed, beside this number of delayed jobs."""
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
    started_at, step = loop.time(), workers.step_of("good")
    workers.kill_pod("good-w-1")
    await until(lambda: workers.step_of("good") > step + 2, 600, "it trains again")
    seconds = loop.time() - started_at
    await asyncio.sleep(afterwards)
    running.cancel()
    await process.kill()
    return seconds, cluster, tried


def test_jobs_behind_a_slow_webhook_do_not_delay_the_recovery_of_others() -> None:
    alone, _, _ = run_virtual(recovery_seconds(0))
    for refuses in (True, False):
        beside, _, _ = run_virtual(recovery_seconds(5, replicas=24, refuses=refuses))
        assert beside <= 1.5 * alone, refuses


def test_a_job_behind_a_failing_webhook_is_retried_with_growing_pauses() -> None:
    _, cluster, tried = run_virtual(recovery_seconds(1, afterwards=300))
    assert 3 <= len(tried) <= 30
    assert tried[-1] - tried[0] > 120
    notes = [raw["note"] for key, raw in cluster.objects.items() if key[0] == EVENTS.plural]
    assert any("failed calling webhook" in note for note in notes)
    assert not [name for name in cluster.names(PODS) if name.startswith("held-")]
