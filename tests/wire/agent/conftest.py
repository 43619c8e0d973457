"""Real agent processes against a real TLS coordinator, all on loopback addresses of this test."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from agent_world import Factory, World

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def factory() -> Iterator[Factory]:
    from agent_world import Factory

    made = Factory()
    yield made
    made.close()


@pytest.fixture
async def world(tmp_path: Path, factory: Factory) -> AsyncIterator[World]:
    from agent_world import World

    made = World(tmp_path, factory)
    await made.server()
    yield made
    await made.close()
