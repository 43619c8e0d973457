"""Real agent processes against a real TLS coordinator, all on loopback addresses of this test."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.wire.agent.agent_world import AgentJob, Factory


@pytest.fixture(scope="session")
def factory() -> Iterator[Factory]:
    from tests.wire.agent.agent_world import Factory

    made = Factory()
    yield made
    made.close()


@pytest.fixture
async def world(tmp_path: Path, factory: Factory) -> AsyncIterator[AgentJob]:
    from tests.wire.agent.agent_world import AgentJob

    made = AgentJob(tmp_path, factory)
    await made.server()
    yield made
    await made.close()
