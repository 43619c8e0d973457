import pytest

from tests.testing.trainer.fork_server import fork_context


@pytest.fixture(scope="session", autouse=True)
def _preloaded_processes() -> None:
    """Fork ranks from a server that has imported torch once."""
    fork_context()
