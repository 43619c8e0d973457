from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


from tests.testing.trainer.fork_server import fork_context


@pytest.fixture(scope="session", autouse=True)
def _preloaded_processes() -> None:
    """Ranks are forked from a server that has imported torch once."""
    fork_context()
