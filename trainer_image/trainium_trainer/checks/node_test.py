"""Run the node's checks in one process: a matrix product on its device, and sums with its siblings on loopback.

It is a separate process, so that a check that hangs or crashes can be ended. It leaves its results in a file as JSON:
for each check true or false, or null with a reason when it could not run. Invariant: false means that numbers were
computed and are wrong.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainium_agent.checks.node_checks import NodeTask
from trainium_agent.linux.network_interface import ENV_INTERFACE, LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_SIDE = 192
_VALUES = 1 << 14


def main(argv: Sequence[str]) -> int:
    """Run the task; return 0 in any case, because the file has the result."""
    task = NodeTask(**json.loads(argv[0]))
    outcome: dict[str, Any] = {}
    if task.matmul:
        _take(outcome, "matmul", lambda: product_is_right(task.index))
        _leave(task, outcome)
    if task.loopback and task.size > 1:
        _take(outcome, "loopback", lambda: sums_are_right(task))
        _leave(task, outcome)
        if task.bandwidth:
            _take(outcome, "bandwidth", lambda: bandwidth_on_node(task))
            _leave(task, outcome)
    return 0


def _take(outcome: dict[str, Any], name: str, check: Callable[[], bool | float | None]) -> None:
    try:
        outcome[name] = check()
    except Exception as error:  # noqa: BLE001 - a check that cannot run is no finding
        outcome[name] = None
        outcome[f"{name}-reason"] = " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _leave(task: NodeTask, outcome: dict[str, Any]) -> None:
    draft = task.result.with_suffix(".draft")
    draft.write_text(json.dumps(outcome), encoding="utf-8")
    draft.replace(task.result)


def product_is_right(core: int, multiply: Callable[[Any, Any], Any] | None = None) -> bool:
    """Return whether a product of small whole numbers, which floats hold exactly, is exact on this core's device."""
    import torch  # noqa: PLC0415 - only this process needs it

    from trainium_trainer.backends.device import pick_device  # noqa: PLC0415

    device = pick_device(core)
    left = torch.arange(_SIDE * _SIDE, dtype=torch.int64).reshape(_SIDE, _SIDE) % 7
    right = left.T % 5
    product = (multiply or torch.matmul)(left.float().to(device), right.float().to(device)).cpu()
    return bool(torch.equal(product.round().long(), left @ right))


def sums_are_right(task: NodeTask) -> bool:
    """Return whether an all-reduce among the node's processes over loopback gives the known sums."""
    import torch  # noqa: PLC0415 - as above
    from torch import distributed as dist  # noqa: PLC0415

    os.environ[ENV_INTERFACE] = LOOPBACK
    store = dist.FileStore(str(Path(task.folder) / "store"), task.size)  # type: ignore[attr-defined]
    timeout = timedelta(seconds=task.seconds)
    dist.init_process_group("gloo", store=store, rank=task.index, world_size=task.size, timeout=timeout)
    values = torch.arange(_VALUES, dtype=torch.float32) % 1024
    sums = values * (task.index + 1)
    dist.all_reduce(sums)
    return bool(torch.equal(sums, values * sum(range(1, task.size + 1))))


def bandwidth_on_node(task: NodeTask) -> float | None:
    """Return the Gbit/s of an all-reduce among the node's processes; None when the sums were wrong."""
    from torch import distributed as dist  # noqa: PLC0415 - as above

    from trainium_trainer.backends.device import pick_device  # noqa: PLC0415
    from trainium_trainer.checks.pair_test import bandwidth, time_sums  # noqa: PLC0415

    dist.destroy_process_group()
    store = dist.FileStore(str(Path(task.folder) / "bandwidth"), task.size)  # type: ignore[attr-defined]
    seconds = time_sums(pick_device(task.index), store, task.index, task.size, timedelta(seconds=task.seconds))
    return bandwidth(task.size, seconds) if seconds > 0 else None
