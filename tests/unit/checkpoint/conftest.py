import multiprocessing
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from checkpoint_world import run_world


@pytest.fixture(scope="session", autouse=True)
def _preloaded_processes():
    """Ranks are forked from a server that has imported torch once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.tensor", "trainium_trainer.checkpoint.shards"])


@pytest.fixture
def world(tmp_path):
    """Runs `function(place, *arguments)` on several gloo ranks and returns their results, by rank."""

    def run(size, function, *arguments, tp=1, mode="Replicated", timeout=40.0):
        return run_world(tmp_path, size, function, arguments, tp=tp, mode=mode, timeout=timeout)

    return run
