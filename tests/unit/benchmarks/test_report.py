"""The page of benchmarks keeps figures not measured again; each benchmark has a module; ranks that fail."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks.harness.ranks import RunFailedError, wait_for_ranks
from benchmarks.report import RESULTS, ROOT, add_reports, render_page
from benchmarks.run import MODULES

FIGURE = {"name": "created", "unit": "s", "values": [1.5], "goal": 1.0, "met": False, "median": 1.5}


def _build_fleet_report(date: str, *sizes: int) -> dict[str, object]:
    return {
        "benchmark": "fleet",
        "quick": False,
        "date": date,
        "machine": {"cores": 2, "processor": "x", "load": 1.0},
        "figures": [{**FIGURE, "nodes": size} for size in sizes],
    }


def test_a_size_that_was_not_measured_again_keeps_its_figures_and_their_date() -> None:
    parts = add_reports({}, {"fleet": _build_fleet_report("2026-01-01", 128, 5000)})
    for day in ("2026-02-02", "2026-03-03"):
        parts = add_reports(parts, {"fleet": _build_fleet_report(day, 1000, 128)})
    sizes = parts["A fleet"]["sizes"]
    assert list(sizes) == ["128 nodes", "1,000 nodes", "5,000 nodes"]
    assert [size["conditions"][:10] for size in sizes.values()] == ["2026-03-03", "2026-03-03", "2026-01-01"]
    assert sizes["5,000 nodes"]["figures"] == {"created": {"median": "1.50 s", "goal": "1.00 s", "missed": True}}


def test_the_page_has_figures_with_a_goal_and_a_line_for_each_other_part() -> None:
    parts = add_reports({"Data": {"headline": "fast"}}, {"fleet": _build_fleet_report("2026-01-01", 128, 5000)})
    page = render_page(parts)
    assert "| A fleet | created | 1.00 s | 128 nodes **1.50 s**; 5,000 nodes **1.50 s** |" in page
    assert page.endswith("- **Data.** fast\n")


def test_the_page_is_written_from_the_results() -> None:
    parts = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8") == render_page(parts), (
        "python -m benchmarks.report"
    )


@pytest.mark.parametrize("name", MODULES)
def test_the_module_of_each_benchmark_exists(name: str) -> None:
    assert importlib.util.find_spec(MODULES[name]) is not None


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


def test_training_speed_marks_missed_goals_and_names_which_peer_is_missing() -> None:
    ours = {"tokensPerSecond": 1000.0}
    report = {
        "benchmark": "training_speed",
        "date": "2026-11-21",
        "quick": False,
        "device": "cpu",
        "machine": {"processor": "x86_64", "cores": 2, "load": 0.1},
        "software": {"threads": "1", "torch": "2.13.0"},
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
    part = add_reports({}, {"training_speed": report})["Training speed"]
    assert part["peers"]["torchtitan"] == "torchtitan not installed for python"
    assert [" | ".join(row) for row in part["rows"]] == [
        "plain | 1 | 1,000 | 980 | 1.02 x, **missed** | 1.10 x | 800 | 1.25 x | 0.80 x",
        "half | 2 | 1,000 |  |  |  |  |  | ",
        "sharded | 2 | **failed**: rank 0 ended with 1 |  |  |  |  |  | ",
    ]
