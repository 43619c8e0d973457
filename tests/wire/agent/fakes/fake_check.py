"""A node whose product of matrices is wrong on its last core."""

import json
from pathlib import Path


def main(argv: list[str]) -> int:
    task = json.loads(argv[0])
    is_correct = task["index"] + 1 < task["size"]
    (Path(task["folder"]) / f"{task['index']}.json").write_text(json.dumps({"matmul": is_correct}))
    return 0
