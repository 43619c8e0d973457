"""Kill points patch functions of the trainer by name, which no type checker sees: each name must exist."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
INSTALL_ALL = """
from benchmarks.proof.kill_points import Kill, Point, install_kill
for point in Point:
    for seed in range(40):
        install_kill(Kill(point, hits=99, fraction=0.5, seed=seed).to_text())
"""


@pytest.mark.parametrize("rank", ["0", "1"])
def test_all_kill_points_can_be_installed(rank: str) -> None:
    command = [sys.executable, "-c", INSTALL_ALL]
    result = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "RANK": rank}, capture_output=True, text=True, check=False
    )

    assert result.returncode == 0, result.stderr
