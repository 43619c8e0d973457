"""Print the stacks of this pod's ranks, one JSON object a line: `python -m trainium_agent.show_stacks`.

`kubectl trn stacks` runs it. It signals each rank of the newest generation, as the agent does for a hang; training
continues. A pod without ranks prints nothing.
"""

from __future__ import annotations

import json
import sys

from trainium_agent.linux import stacks
from trainium_agent.show_ranks import select_newest_records


def main() -> None:
    """Print the stacks in the order of the local ranks."""
    records = select_newest_records(found_in_output=False)
    answers = stacks.request_stacks({rank: (record.pid, path) for rank, (record, path) in records.items()})
    for rank, (record, _) in records.items():
        answer = answers[rank]
        fields = {
            "localRank": rank,
            "pid": record.pid,
            "phase": record.phase.name,
            "step": record.step,
            "stack": answer.text,
            "error": answer.problem,
            "kernelPlace": answer.kernel_location,
        }
        sys.stdout.write(json.dumps(fields) + "\n")


if __name__ == "__main__":
    main()
