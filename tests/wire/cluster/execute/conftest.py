import pytest

from tests.wire.cluster.execute.execution_world import World


@pytest.fixture
def world() -> World:
    return World()
