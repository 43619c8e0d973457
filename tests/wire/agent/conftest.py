"""Real agent processes against a real TLS coordinator, all on loopback addresses of this test."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.wire.agent.agent_job import AgentFactory, AgentJob


@pytest.fixture(scope="session")
def factory() -> Iterator[AgentFactory]:
    factory = AgentFactory()
    yield factory
    factory.close()


@pytest.fixture
async def job(tmp_path: Path, factory: AgentFactory) -> AsyncIterator[AgentJob]:
    job = AgentJob(tmp_path, factory)
    await job.add_coordinator()
    yield job
    await job.close()
