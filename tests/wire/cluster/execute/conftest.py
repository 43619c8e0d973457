import pytest

from tests.wire.cluster.execute.executor_harness import ExecutorHarness


@pytest.fixture
def harness() -> ExecutorHarness:
    return ExecutorHarness()
