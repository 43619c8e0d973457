"""Print the current state of this pod's ranks, one JSON object a line: `python -m trainium_agent.show_ranks`.

`kubectl trn ranks` runs it. It reads the progress records of the newest generation; without ranks it prints nothing.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from trainium_contract.wire import worker_env
from trainium_worker.progress_record import read_progress

if TYPE_CHECKING:
    from trainium_worker.progress_record import ProgressRecord

_FILE = re.compile(r"g(\d+)-r(\d+)(\.output)?")
"""The record that a rank writes, and the record of the steps found in its output."""


def select_newest_records(*, found_in_output: bool) -> dict[int, tuple[ProgressRecord, Path]]:
    """Return the records of the newest generation by local rank, in order; of two records the one with the higher step.

    `found_in_output`: include the records that the agent wrote, which have the agent's pid.
    """
    folder = Path(os.environ.get(worker_env.ENV_MEMORY_DIRECTORY, worker_env.MEMORY_DIRECTORY)) / "progress"
    files = [
        (int(match[1]), int(match[2]), path) for path in folder.glob("g*") if (match := _FILE.fullmatch(path.name))
    ]
    newest = max((generation for generation, _, _ in files), default=0)
    records: dict[int, tuple[ProgressRecord, Path]] = {}
    for generation, local_rank, path in sorted(files):
        record = read_progress(path)
        if generation != newest or record is None or (path.suffix and not found_in_output):
            continue
        if local_rank not in records or record.step > records[local_rank][0].step:
            records[local_rank] = (record, path)
    return records


def main() -> None:
    """Print the records in the order of the local ranks."""
    for local_rank, (record, _) in select_newest_records(found_in_output=True).items():
        fields = {"localRank": local_rank, **asdict(record), "phase": record.phase.name}
        fields = {key: None if value != value else value for key, value in fields.items()}  # noqa: PLR0124 - NaN
        sys.stdout.write(json.dumps(fields) + "\n")


if __name__ == "__main__":
    main()
