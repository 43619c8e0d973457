"""Describe the conditions of a measurement: its date, its commit and its machine."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_VERSIONS_PROGRAM = """
import importlib.metadata, json, sys
versions = {}
for name in sys.argv[1:]:
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(versions))
"""


def describe_machine() -> dict[str, Any]:
    """Return the number of processors, their model and the load of the last minute."""
    file = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.+)$", file.read_text() if file.exists() else "", re.MULTILINE)
    return {"cores": os.cpu_count(), "processor": model[1] if model else platform.machine(), "load": os.getloadavg()[0]}


def read_commit() -> str:
    """Return the commit of the working tree; empty outside of a repository."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip()


def read_versions(python: str, *packages: str) -> dict[str, str]:
    """Return the versions of those of the packages that an interpreter's environment has."""
    command = [python, "-c", _VERSIONS_PROGRAM, *packages]
    output = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    versions: dict[str, str] = json.loads(output)
    return versions


def describe_conditions(benchmark: str) -> dict[str, Any]:
    """Return the fields with which the results of a benchmark begin."""
    date = datetime.now(UTC).date().isoformat()
    return {"benchmark": benchmark, "date": date, "commit": read_commit(), "machine": describe_machine()}


def write_report(path: Path, benchmark: str, **fields: Any) -> dict[str, Any]:
    """Write the results of a benchmark with their conditions as JSON, and return them."""
    report = describe_conditions(benchmark) | fields
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    return report
