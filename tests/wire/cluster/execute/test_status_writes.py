"""A status that the API server refuses is kept beside the membership until it is accepted."""

import asyncio
from typing import Any

import pytest

from tests.testing.api.fake_api_server import http_error
from tests.testing.suite.virtual_time import run_virtual
from tests.wire.cluster.execute.executor_harness import ExecutorHarness, replace_status
from trainium_contract.api_server.errors import ForbiddenError, UnavailableError
from trainium_contract.wire.recorded_membership import REFUSAL_KEY, parse_refused_status
from trainium_operator.cluster.api.resources import CONFIG_MAPS, JOBS, PODS
from trainium_operator.cluster.cache.membership_record import read_membership
from trainium_operator.plan.model.actions import Plan

LONGEST_PAUSE = 60.0
REFUSALS = {
    "a policy": http_error(403, "Forbidden", "a TrainingJob needs the label cost-center"),
    "a policy with its own code": http_error(422, "Invalid", "a TrainingJob needs the label cost-center"),
    "a webhook that fails": http_error(500, "InternalError", "failed calling webhook"),
    "a webhook that does not answer": http_error(504, "Timeout", "context deadline exceeded"),
    "a status that is too large": http_error(413, "RequestEntityTooLarge", "limit is 3145728"),
}


def refuse_status(harness: ExecutorHarness, answer: Any) -> None:
    harness.cluster.faults.append(lambda _method, path: answer if path.endswith("/status") else None)


def record(harness: ExecutorHarness) -> dict[str, Any]:
    return harness.cluster.get(CONFIG_MAPS, "default", "j-membership")


def newest_desired(harness: ExecutorHarness) -> int:
    """Return `status.desired` as another process reads it."""
    return int((parse_refused_status(record(harness)) or {}).get("desired", -1))


async def execute(harness: ExecutorHarness, *actions: Any, **changes: Any) -> None:
    """Execute a plan that follows from the newest status, as the reconciler does."""
    job = harness.caches.apply_refused_status(harness.job)
    await harness.executor.execute(harness.job, Plan(status=replace_status(job, **changes), actions=actions))


@pytest.mark.parametrize("answer", REFUSALS.values(), ids=REFUSALS)
def test_a_refused_status_is_kept_and_the_plan_is_executed(answer: Any) -> None:
    harness = ExecutorHarness()
    refuse_status(harness, answer)

    run_virtual(execute(harness, *harness.pod_creations(1), desired=2))

    assert newest_desired(harness) == 2
    assert harness.pod_uids().keys() == {"j-w-0"}


def test_a_refusal_is_reported_with_its_reason_and_a_way_out() -> None:
    harness = ExecutorHarness()
    refuse_status(harness, REFUSALS["a policy"])

    async def scenario() -> None:
        writing = asyncio.create_task(harness.recorder.run())
        await execute(harness, desired=2)
        await harness.recorder.flush(1.0)
        writing.cancel()

    run_virtual(scenario())

    note = harness.events()[0]["message"]
    assert note.startswith("The status of this job is refused: it is kept in ConfigMap j-membership")
    assert "Exempt trainingjobs/status" in note
    assert "a TrainingJob needs the label cost-center" in note
    assert "cost-center" in record(harness)["data"][REFUSAL_KEY]


def test_a_status_write_that_hangs_delays_a_plan_once() -> None:
    harness = ExecutorHarness()
    request = harness.cluster.request

    async def hang(method: str, path: str, **more: Any) -> Any:
        if path.endswith("/status"):
            await asyncio.sleep(30.0)
        return await request(method, path, **more)

    harness.cluster.request = hang  # type: ignore[method-assign]

    async def scenario() -> list[float]:
        clock, seconds = asyncio.get_running_loop().time, []
        writing = asyncio.create_task(harness.recorder.run())
        for desired in (2, 3):
            began = clock()
            await execute(harness, desired=desired)
            seconds.append(clock() - began)
        await harness.recorder.flush(1.0)
        writing.cancel()
        return seconds

    first, second = run_virtual(scenario())

    assert first < 5.0
    assert second < 0.1, "during the pause only the ConfigMap is written"
    assert newest_desired(harness) == 3
    assert harness.events()[0]["message"].startswith("The status of this job is not answered")


def test_a_kept_status_leaves_the_membership_and_the_reverse() -> None:
    harness = ExecutorHarness()
    refuse_status(harness, REFUSALS["a policy"])

    run_virtual(execute(harness, harness.publish_action(1, 0), desired=2))
    run_virtual(execute(harness, harness.publish_action(2, 1), desired=3))

    recorded = read_membership(record(harness))
    assert recorded is not None
    assert recorded.generation == 2
    assert newest_desired(harness) == 3


def test_an_accepted_status_removes_the_kept_one() -> None:
    harness = ExecutorHarness()
    refuse_status(harness, REFUSALS["a policy"])
    run_virtual(execute(harness, harness.publish_action(1, 0), desired=2))
    harness.cluster.faults.clear()
    harness.now += LONGEST_PAUSE

    run_virtual(execute(harness))

    assert harness.cluster.get(JOBS, "default", "j")["status"]["desired"] == 2
    assert parse_refused_status(record(harness)) is None
    assert read_membership(record(harness)) is not None


def test_an_earlier_write_that_is_executed_late_does_not_replace_a_kept_status() -> None:
    harness = ExecutorHarness()
    refuse_status(harness, REFUSALS["a webhook that does not answer"])
    run_virtual(execute(harness, desired=2))
    late = replace_status(harness.job, desired=2)
    run_virtual(execute(harness, desired=3))

    harness.cluster.change(JOBS, "default", "j", lambda raw: raw.update(status=late.to_wire()))
    run_virtual(harness.caches.jobs.refresh())

    assert harness.caches.apply_refused_status(harness.job).status.desired == 3


def test_a_status_that_can_be_stored_nowhere_stops_the_plan() -> None:
    harness = ExecutorHarness()
    refuse_status(harness, REFUSALS["a policy"])
    harness.refuse_creations("/configmaps", "exceeded quota")

    with pytest.raises(ForbiddenError, match="exceeded quota"):
        run_virtual(execute(harness, *harness.pod_creations(1), desired=2))

    assert not harness.pod_uids()


def test_an_api_server_that_is_away_refuses_nothing() -> None:
    harness = ExecutorHarness()
    refuse_status(harness, http_error(503, "ServiceUnavailable"))

    with pytest.raises(UnavailableError):
        run_virtual(execute(harness, desired=2))

    assert not harness.cluster.names(CONFIG_MAPS)
    assert not harness.cluster.names(PODS)
