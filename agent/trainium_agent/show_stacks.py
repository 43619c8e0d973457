"""`python -m trainium_agent.show_stacks`: what the ranks of this pod execute now, one JSON object a line.

For `kubectl trn stacks`. Asks each rank of the newest generation by its signal, as the agent does for a hang; training
goes on. A pod without ranks prints nothing.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

from trainium_agent.linux import stacks
from trainium_contract.wire import worker_env
from trainium_worker import read_progress

_FILE = re.compile(r"g(\d+)-r(\d+)")


def main() -> None:
    """Print the stacks in the order of the local ranks."""
    folder = Path(os.environ.get(worker_env.ENV_MEMORY_DIRECTORY, worker_env.MEMORY_DIRECTORY)) / "progress"
    named = [
        (int(match[1]), int(match[2]), path) for path in folder.glob("g*") if (match := _FILE.fullmatch(path.name))
    ]
    newest = max((generation for generation, _, _ in named), default=0)
    found = {
        local_rank: (record, path)
        for generation, local_rank, path in sorted(named)
        if generation == newest and (record := read_progress(path)) is not None
    }
    answers = stacks.ask({rank: (record.pid, path) for rank, (record, path) in found.items()})
    for rank, (record, _) in found.items():
        answer = answers[rank]
        shown = {
            "localRank": rank,
            "pid": record.pid,
            "phase": record.phase.name,
            "step": record.step,
            "stack": answer.text,
            "whyNot": answer.why_not,
            "kernelPlace": answer.kernel_place,
        }
        sys.stdout.write(json.dumps(shown) + "\n")


if __name__ == "__main__":
    main()
