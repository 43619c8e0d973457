"""Ranks and commands are forked from a process that has imported what they need."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.testing.trainer.fork_server import fork_context

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def _preloaded_processes() -> None:
    fork_context()
