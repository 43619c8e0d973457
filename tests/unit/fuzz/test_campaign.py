"""`make fuzz` itself, by dice: it counts what it played, goes on where it stopped, keeps and repeats what it found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/fuzz/fuzz_campaign.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_run_counts_its_inputs_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    given = ("--targets", "spec", "--seed", "3", "--dice", "--round", "4", "--out", str(tmp_path))

    first = fuzz(*given, "--inputs", "4")
    assert first.returncode == 0, first.stderr
    second = fuzz(*given, "--inputs", "6")

    progress = json.loads((tmp_path / "seed-3/spec/progress.json").read_text())
    assert (progress["inputs"], progress["rounds"], progress["found"]) == (6, 2, {})
    assert "spec: 6 inputs in 2 rounds" in second.stdout


def test_a_case_of_a_file_is_played_again_and_an_unknown_target_is_told(tmp_path: Path) -> None:
    case = tmp_path / "cluster/findings/one.json"
    case.parent.mkdir(parents=True)
    case.write_text("{}")

    assert "every promise was kept" in fuzz("--again", str(case)).stdout
    assert "there is no target sideways; there are coordinator, cluster, spec" in fuzz("--targets", "sideways").stderr
