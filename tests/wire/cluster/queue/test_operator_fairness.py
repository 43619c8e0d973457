"""Jobs behind an admission webhook that fails or hangs delay no other job."""

import asyncio
from typing import Any

from tests.testing.api.fake_api_server import FakeApiServer, http_error
from tests.testing.api.objects import training_job
from tests.testing.suite.virtual_time import run_virtual
from tests.testing.virtual.fake_workers import Workers
from tests.testing.virtual.operator_process import OperatorProcess, until, wall_clock
from trainium_operator.cluster.api.resources import EVENTS, JOBS, PODS
from trainium_operator.cluster.api.transport import HttpResponse

HOOK_SECONDS = 10.0
"""Default time-out of the API server for a webhook."""


def delay_creations(process: OperatorProcess, seconds: float, *, should_refuse: bool) -> list[float]:
    """Delay creations of pods of jobs named `held-…`; return the list of their times."""
    request, creation_times = process.connection.request, list[float]()

    async def request_or_delay(method: str, path: str, *, body: Any, **rest: Any) -> HttpResponse:
        name = str(((body or {}).get("metadata") or {}).get("name", ""))
        if method == "POST" and path.endswith("/pods") and name.startswith("held-"):
            creation_times.append(asyncio.get_running_loop().time())
            await asyncio.sleep(seconds)
            if should_refuse:
                return http_error(500, "InternalError", "failed calling webhook: context deadline exceeded")
        return await request(method, path, body=body, **rest)

    process.connection.request = request_or_delay  # type: ignore[method-assign]
    return creation_times


async def recovery_seconds(
    held: int, *, replicas: int = 1, should_refuse: bool = True, afterwards: float = 0.0
) -> tuple[float, FakeApiServer, list[float]]:
    """Measure the recovery of a job after its worker was killed, beside this number of delayed jobs."""
    cluster = FakeApiServer(wall_clock)
    process, workers = OperatorProcess(cluster), Workers(cluster, nodes=130, total_steps=10**6)
    workers.operator = process
    running = asyncio.create_task(workers.run())
    cluster.add(JOBS, training_job("good"))
    await process.start()
    await until(lambda: workers.step_of("good") > 5, "it trains", 60)
    creation_times = delay_creations(process, HOOK_SECONDS, should_refuse=should_refuse)
    for number in range(held):
        cluster.add(JOBS, training_job(f"held-{number}", replicas=replicas))
    await asyncio.sleep(5.3)
    loop = asyncio.get_running_loop()
    started_at, step = loop.time(), workers.step_of("good")
    workers.kill_pod("good-w-1")
    await until(lambda: workers.step_of("good") > step + 2, "it trains again", 600)
    seconds = loop.time() - started_at
    await asyncio.sleep(afterwards)
    running.cancel()
    await process.kill()
    return seconds, cluster, creation_times


def test_jobs_behind_a_slow_webhook_do_not_delay_the_recovery_of_others() -> None:
    alone, _, _ = run_virtual(recovery_seconds(0))
    for should_refuse in (True, False):
        beside, _, _ = run_virtual(recovery_seconds(5, replicas=24, should_refuse=should_refuse))
        assert beside <= 1.5 * alone, should_refuse


def test_a_job_behind_a_failing_webhook_is_retried_with_growing_pauses() -> None:
    _, cluster, creation_times = run_virtual(recovery_seconds(1, afterwards=300))
    assert 3 <= len(creation_times) <= 30
    assert creation_times[-1] - creation_times[0] > 120
    notes = [raw["message"] for key, raw in cluster.objects.items() if key[0] == EVENTS.plural]
    assert any("failed calling webhook" in note for note in notes)
    assert not [name for name in cluster.names(PODS) if name.startswith("held-")]
