"""The page of benchmarks keeps figures that were not measured again; ranks of a benchmark that fail."""

import os
import sys
from pathlib import Path

import pytest

from benchmarks.ranks import RunFailedError, wait_for_ranks
from benchmarks.report import render_page

FIGURE = {"name": "created", "unit": "s", "values": [1.5], "goal": None, "met": None, "median": 1.5}


def _build_fleet_report(date: str, *sizes: int) -> dict[str, object]:
    return {
        "benchmark": "fleet",
        "quick": False,
        "date": date,
        "machine": {"cores": 2, "processor": "x", "load": 1.0},
        "figures": [{**FIGURE, "nodes": size} for size in sizes],
    }


def test_a_size_that_was_not_measured_again_keeps_its_figures_and_their_date() -> None:
    first = render_page({"fleet": _build_fleet_report("2026-01-01", 128, 5000)})
    second = render_page({"fleet": _build_fleet_report("2026-02-02", 128)}, first)
    head, small, large = second.partition("## A fleet")[2].split("### ")
    assert "2026-02-02" in head
    assert "2026-01-01" not in head
    assert small.startswith("128 nodes")
    assert large.startswith("5,000 nodes")
    assert "2026-01-01" in large
    assert "| created | 1.50 s |" in large


def test_a_kept_size_keeps_its_date() -> None:
    text = render_page({"fleet": _build_fleet_report("2026-01-01", 128, 5000)})
    for day in ("2026-02-02", "2026-03-03"):
        text = render_page({"fleet": _build_fleet_report(day, 128)}, text)
    large = text.partition("### 5,000 nodes")[2]
    assert large.count("Command:") == 1
    assert "2026-01-01" in large


def test_a_size_that_was_measured_again_replaces_its_figures() -> None:
    text = render_page(
        {"fleet": _build_fleet_report("2026-02-02", 5000)},
        render_page({"fleet": _build_fleet_report("2026-01-01", 128, 5000)}),
    )
    assert text.count("### 5,000 nodes") == 1
    assert "2026-01-01" not in text.partition("### 5,000 nodes")[2].partition("###")[0]


def test_a_part_that_was_not_measured_again_keeps_its_text_and_place() -> None:
    previous = "# Benchmarks\n\nold head\n\n## A fleet\n\nold\n\n## Data\n\nolder\n"
    text = render_page({"fleet": _build_fleet_report("2026-02-02", 128)}, previous)
    assert "old head" not in text
    assert text.endswith("## Data\n\nolder\n")
    assert text.index("### 128 nodes") < text.index("## Data")


def spawn(program: str) -> int:
    return os.posix_spawn(sys.executable, [sys.executable, "-S", "-c", program], os.environ)


def test_a_rank_that_fails_ends_the_others_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "rank-1.log").write_text("Loading\nValueError: no such shape\n")
    pids = {spawn("import time; time.sleep(600)"): 0, spawn("raise SystemExit(3)"): 1}
    with pytest.raises(RunFailedError, match="rank 1 ended with 3: Loading / ValueError: no such shape"):
        wait_for_ranks(pids, tmp_path)
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
    text = render_page({"training_speed": report})
    assert "- torchtitan: not measured: torchtitan not installed for python." in text
    assert "| plain | 1 | 1,000 | 980 | 1.02 x, **missed** | 1.10 x | 800 | 1.25 x | 0.80 x |" in text
    assert "| half | 2 | 1,000 | | | | | | |" in text
    assert "| sharded | 2 | **failed**: rank 0 ended with 1 | | | | | | |" in text
