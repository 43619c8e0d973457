"""Run the node's checks in one process: a matrix product on its device, and sums over loopback with its siblings.

It is a separate process, so that a check that hangs or crashes can be ended. It writes its results to a file as JSON:
for each check true or false, or null with a reason when it could not run.

Guarantees:
- A false result means that computed numbers are wrong.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainium_contract.wire.check_tasks import NodeTask
from trainium_trainer.checks.pair_test import compute_bandwidth, has_exact_product, measure_sums
from trainium_trainer.network_interface import ENV_INTERFACE, LOOPBACK
from trainium_worker.progress_record import replace_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_VALUES = 1 << 14


def main(argv: Sequence[str]) -> int:
    """Run the task; return 0 in any case, because the file has the result."""
    task = NodeTask(**json.loads(argv[0]))
    outcome: dict[str, Any] = {}
    if task.matmul:
        _run_check(outcome, "matmul", lambda: has_exact_product(task.index))
        replace_text(task.result, json.dumps(outcome))
    if task.loopback and task.size > 1:
        _run_check(outcome, "loopback", lambda: has_correct_sums(task))
        replace_text(task.result, json.dumps(outcome))
        if task.bandwidth:
            _run_check(outcome, "bandwidth", lambda: measure_node_bandwidth(task))
            replace_text(task.result, json.dumps(outcome))
    return 0


def _run_check(outcome: dict[str, Any], name: str, check: Callable[[], bool | float | None]) -> None:
    try:
        outcome[name] = check()
    except Exception as error:  # noqa: BLE001 - a check that cannot run is no finding
        outcome[name] = None
        outcome[f"{name}-reason"] = " ".join(f"{type(error).__name__}: {error}".split())[:200]


def has_correct_sums(task: NodeTask) -> bool:
    """Return whether all-reduces among the node's processes over loopback give the known sums."""
    import torch  # noqa: PLC0415 - only this process needs it
    from torch import distributed as dist  # noqa: PLC0415

    os.environ[ENV_INTERFACE] = LOOPBACK
    store = dist.FileStore(str(Path(task.folder) / "store"), task.size)
    timeout = timedelta(seconds=task.seconds)
    return measure_sums(torch.device("cpu"), store, task.index, task.size, timeout, values=_VALUES) >= 0


def measure_node_bandwidth(task: NodeTask) -> float | None:
    """Return the Gbit/s of an all-reduce between the node's processes; None if the sums were wrong."""
    from torch import distributed as dist  # noqa: PLC0415 - as above

    from trainium_trainer.backends.device import pick_device  # noqa: PLC0415

    dist.destroy_process_group()
    store = dist.FileStore(str(Path(task.folder) / "bandwidth"), task.size)
    seconds = measure_sums(pick_device(task.index), store, task.index, task.size, timedelta(seconds=task.seconds))
    return compute_bandwidth(task.size, seconds) if seconds > 0 else None
