"""The speed benchmark: ranks that fail, and what the page has of peers."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from benchmarks.ranks import RunFailedError, wait_for
from benchmarks.report import page

if TYPE_CHECKING:
    from pathlib import Path


def spawn(program: str) -> int:
    return os.posix_spawn(sys.executable, [sys.executable, "-S", "-c", program], os.environ)


def test_a_rank_that_fails_ends_the_others_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "rank-1.log").write_text("Loading\nValueError: no such shape\n")
    pids = {spawn("import time; time.sleep(600)"): 0, spawn("raise SystemExit(3)"): 1}
    with pytest.raises(RunFailedError, match="rank 1 ended with 3: Loading / ValueError: no such shape"):
        wait_for(pids, tmp_path)
    for pid in pids:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def test_the_page_marks_missed_goals_and_names_which_peer_is_missing() -> None:
    ours = {"tokensPerSecond": 1000.0}
    report = {
        "benchmark": "training_speed",
        "date": "2026-11-21",
        "quick": False,
        "device": "cpu",
        "machine": {"processor": "x86_64", "cores": 2, "load": 0.1, "threads": "1", "torch": "2.13.0"},
        "settings": {"model": {"numLayers": 2, "hiddenSize": 64}, "length": 64, "rounds": 3},
        "goals": {"speed": 1.1, "memory": 1.0},
        "peers": {
            "transformers.Trainer": {"transformers": "5.0"},
            "torchtitan": {"missing": "torchtitan not installed for python"},
        },
        "rows": [
            {
                "mode": "plain",
                "ranks": 1,
                "ours": ours,
                "peer": {"tokensPerSecond": 980.0, "speedRatio": 1.02, "bestRatio": 1.1, "memoryRatio": 0.8},
                "compiledPeer": {"tokensPerSecond": 800.0, "speedRatio": 1.25, "bestRatio": 1.1, "memoryRatio": 0.8},
            },
            {"mode": "half", "ranks": 2, "ours": ours},
            {"mode": "sharded", "ranks": 2, "error": "rank 0 ended with 1"},
        ],
    }
    text = page({"training_speed": report})
    assert "- torchtitan: not measured: torchtitan not installed for python." in text
    assert "| plain | 1 | 1,000 | 980 | 1.02 x, **missed** | 1.10 x | 800 | 1.25 x | 0.80 x |" in text
    assert "| half | 2 | 1,000 | | | | | | |" in text
    assert "| sharded | 2 | **failed**: rank 0 ended with 1 | | | | | | |" in text
