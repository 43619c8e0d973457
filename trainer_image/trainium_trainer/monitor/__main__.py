"""Print the current state of this pod's ranks, one JSON object a line: `python -m trainium_trainer.monitor`.

For `kubectl exec POD -- python -m trainium_trainer.monitor`. Reads the progress records of the newest generation; a pod
without ranks prints nothing.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path

from trainium_contract.wire import worker_env
from trainium_worker import read_progress

_FILE = re.compile(r"g(\d+)-r(\d+)")


def main() -> None:
    """Print the records in the order of the local ranks."""
    folder = Path(os.environ.get(worker_env.ENV_MEMORY_DIRECTORY, worker_env.MEMORY_DIRECTORY)) / "progress"
    named = [
        (int(match[1]), int(match[2]), path) for path in folder.glob("g*") if (match := _FILE.fullmatch(path.name))
    ]
    newest = max((generation for generation, _, _ in named), default=0)
    for generation, local_rank, path in sorted(named):
        record = read_progress(path)
        if generation == newest and record is not None:
            shown = {"localRank": local_rank, **asdict(record), "phase": record.phase.name}
            shown = {key: None if value != value else value for key, value in shown.items()}  # noqa: PLR0124 - NaN
            sys.stdout.write(json.dumps(shown) + "\n")


if __name__ == "__main__":
    main()
