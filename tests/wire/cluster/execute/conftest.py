from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from execution_world import World


@pytest.fixture
def world() -> World:
    return World()
