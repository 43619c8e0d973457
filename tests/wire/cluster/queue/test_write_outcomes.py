"""The time limit of writes of a NetworkPolicy, and the record of refused ones."""

import asyncio

import pytest

from tests.testing.suite.timeouts import scaled
from tests.testing.suite.virtual_time import in_virtual_time
from trainium_contract.api_server.errors import ApiError, ConflictError, ForbiddenError, UnavailableError
from trainium_operator.cluster.queue.write_outcomes import MAX_PAUSE_SECONDS, SECONDS, WriteOutcomes

PLACE = "NetworkPolicy/llama-workers"


async def fail_with(error: ApiError) -> None:
    raise error


@in_virtual_time
async def test_a_write_behind_a_hanging_webhook_times_out() -> None:
    loop = asyncio.get_running_loop()
    writes = WriteOutcomes(loop.time)
    started_at = loop.time()
    await writes.write(PLACE, "a", asyncio.sleep(30))
    assert loop.time() - started_at == pytest.approx(SECONDS)
    refusal = writes.list_refusals("a").get(PLACE)
    assert refusal is not None
    assert "did not take the NetworkPolicy within 10 s" in refusal.sentence
    assert writes.list_refusals("b").get(PLACE) is None


@in_virtual_time
async def test_pauses_grow_to_a_maximum_and_end_with_a_success() -> None:
    writes = WriteOutcomes(lambda: 1000.0)
    pauses = []
    for _ in range(12):
        await writes.write(PLACE, "a", fail_with(ForbiddenError("no", status=403)))
        refusal = writes.list_refusals("a").get(PLACE)
        assert refusal is not None
        pauses.append(refusal.retry_at - 1000.0)
    assert pauses[:4] == [2.0, 4.0, 8.0, 16.0]
    assert pauses[-1] == MAX_PAUSE_SECONDS
    await writes.write(PLACE, "a", asyncio.sleep(0))
    assert writes.list_refusals("a").get(PLACE) is None


@pytest.mark.parametrize(
    "error", [ConflictError("another version", status=409), UnavailableError("away", status=503), UnavailableError("x")]
)
@in_virtual_time
async def test_a_conflict_or_outage_is_raised(error: ApiError) -> None:
    writes = WriteOutcomes(lambda: 0.0)
    with pytest.raises(type(error)):
        await writes.write(PLACE, "a", fail_with(error))
    assert writes.list_refusals("a").get(PLACE) is None


@in_virtual_time
async def test_a_timeout_of_the_caller_is_raised() -> None:
    writes = WriteOutcomes(lambda: 0.0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(scaled(1.0)):
            await writes.write(PLACE, "a", asyncio.sleep(30))
    assert writes.list_refusals("a").get(PLACE) is None
