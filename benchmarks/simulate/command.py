"""Runs `trainium-operator simulate` as a person does, and keeps its JSON below out/bench/simulate."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "out/bench/simulate"


def simulated(name: str, arguments: tuple[str, ...], *, again: bool = True) -> list[dict[str, Any]]:
    """The results of the command, one of each case; with `again` false those of an earlier run with these arguments.

    Raises subprocess.CalledProcessError where the command refuses what it is given.
    """
    file = KEPT / f"{name}.json"
    if again or not file.exists() or json.loads(file.read_text())["arguments"] != [*arguments]:
        print(f"{name}: trainium-operator simulate {' '.join(arguments)}", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "trainium_operator.main", "simulate", *arguments, "--output", "json"]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"arguments": arguments, **json.loads(done.stdout)}, indent=2) + "\n")
    results: list[dict[str, Any]] = json.loads(file.read_text())["results"]
    return results


def share(figure: dict[str, float | None]) -> str:
    """A share with half of its interval, in percent."""
    margin = figure["margin95"]
    mean = figure["mean"]
    assert mean is not None
    return f"{mean:.3%}".replace("%", " %") if margin is None else f"{mean * 100:.3f} ± {margin * 100:.3f} %"
