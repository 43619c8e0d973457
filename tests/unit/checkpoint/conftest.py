from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from checkpoint_world import run_world

from tests.testing.trainer.fork_server import fork_context

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(scope="session", autouse=True)
def _preloaded_processes() -> None:
    """Ranks are forked from a server that has imported torch once."""
    fork_context()


@pytest.fixture
def world(tmp_path: Path) -> Callable[..., list[Any]]:
    """Runs `function(place, *arguments)` on several gloo ranks and returns their results, by rank."""

    def run(
        size: int,
        function: Callable[..., Any],
        *arguments: Any,
        tp: int = 1,
        mode: str = "Replicated",
        timeout: float = 40.0,
        killed: int = 0,
    ) -> list[Any]:
        return run_world(tmp_path, size, function, arguments, tp=tp, mode=mode, timeout=timeout, killed=killed)

    return run
