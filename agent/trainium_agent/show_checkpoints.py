"""Print the complete checkpoints of this pod's program as a JSON list: `python -m trainium_agent.show_checkpoints`.

`kubectl trn checkpoints` runs it. The newest is first.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from trainium_agent.workload.program_checkpoints import MAX_ENTRIES, find_committed
from trainium_contract.spec.program import ProgramSpec
from trainium_contract.wire import worker_env

_SHOWN = 100


def describe(root: Path, step: int, marker: Path) -> dict[str, Any]:
    """Return a checkpoint as the command of the client shows it: the part of the path below the root is its name."""
    folder = root / marker.relative_to(root).parts[0]
    files = [folder] if folder.is_file() else [*islice(folder.rglob("*"), MAX_ENTRIES)]
    size = 0
    for path in files:
        with contextlib.suppress(OSError):
            size += path.stat().st_size if path.is_file() else 0
    created = marker.stat().st_mtime
    return {"folder": folder.name, "state": "committed", "step": step, "size": size, "created": created}


def main() -> None:
    """Print the list."""
    checkpoints = ProgramSpec.model_validate_json(os.environ[worker_env.ENV_PROGRAM]).checkpoints
    newest = sorted(find_committed(checkpoints), reverse=True)[:_SHOWN] if checkpoints else []
    rows = [describe(Path(checkpoints.path), step, path) for step, path in newest] if checkpoints else []
    sys.stdout.write(json.dumps(rows) + "\n")


if __name__ == "__main__":
    main()
