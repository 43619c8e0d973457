"""Ranks and commands are forked from a process that has imported what they need."""

import pytest

from tests.testing.trainer.fork_server import fork_context


@pytest.fixture(scope="session", autouse=True)
def _preloaded_processes() -> None:
    fork_context()
