"""Run one node's part in one exchange of the pairwise test, in a separate process that can be ended.

It sums known numbers with the other node over the network a few times, then multiplies matrices whose product is known,
and writes its results to a file as JSON. For check Bandwidth it only measures the sums, through the collectives that
the job's ranks use.

Guarantees:
- A check that cannot run counts as passed, one that gives wrong numbers does not.
- The network's check passes only when it ran.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainium_contract.wire.check_tasks import PairingResult, PairTask
from trainium_trainer.network_interface import use_interface
from trainium_worker.progress_record import replace_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch.distributed import Store

_SIDE = 256
_VALUES = 1 << 20
_BANDWIDTH_VALUES = 1 << 22
_ROUNDS = 4
_NCCOM_SECONDS = 20.0


def main(argv: Sequence[str]) -> int:
    """Run the task; return 0 in any case, because the file has the result."""
    task = PairTask(**json.loads(argv[0]))
    try:
        seconds = exchange(task)
        detail = "the sums over the network were wrong" if seconds < 0 else ""
        gigabits = compute_bandwidth(task.size, seconds) if task.bandwidth and seconds > 0 else 0.0
        outcome = PairingResult(passed=seconds >= 0, seconds=max(seconds, 0.0), detail=detail, gigabits=gigabits)
    except Exception as error:  # noqa: BLE001 - whatever fails is the finding
        outcome = PairingResult(passed=False, detail=" ".join(str(error).split())[:300] or type(error).__name__)
    result = Path(task.result)
    replace_text(result, outcome.encode())  # the node's checks may be slow, and the other nodes wait
    if task.bandwidth:
        return 0
    healthy, why = check_computation()
    if not healthy:
        replace_text(result, replace(outcome, healthy=False, detail=why).encode())
    return 0


def has_exact_product(core: int, multiply: Callable[[Any, Any], Any] | None = None) -> bool:
    """Return whether a product of small whole numbers, which floats hold exactly, is exact on a core's device."""
    import torch  # noqa: PLC0415 - only this process needs it

    from trainium_trainer.backends.device import pick_device  # noqa: PLC0415

    device = pick_device(core)
    factor = torch.arange(_SIDE * _SIDE, dtype=torch.int64).reshape(_SIDE, _SIDE) % 7
    right = factor.T % 5
    product = (multiply or torch.matmul)(factor.float().to(device), right.float().to(device)).cpu()
    return bool(torch.equal(product.round().long(), factor @ right))


def check_computation() -> tuple[bool, str]:
    """Return whether a matrix product and the node's collectives are right, and the problem if they are not."""
    from trainium_trainer.backends.device import pick_device  # noqa: PLC0415 - as above

    try:
        if not has_exact_product(0):
            return False, f"a matrix product on {pick_device(0).type} is wrong"
    except Exception:  # noqa: BLE001 - a check that cannot run is no finding
        return True, ""
    return check_collectives()


def check_collectives() -> tuple[bool, str]:
    """Run the vendor's test of this node's collectives if it is installed; an unknown outcome passes."""
    program = shutil.which("nccom-test")
    if program is None:
        return True, ""
    report = Path(tempfile.gettempdir()) / f"nccom-{os.getpid()}.json"
    arguments = [program, "allr", "-r", "2", "-e", "1M", "--check", "--report-to-json-file", str(report)]
    try:
        done = subprocess.run(arguments, capture_output=True, timeout=_NCCOM_SECONDS, check=False)
        reported = json.loads(report.read_text(encoding="utf-8"))
        wrong = [row for row in reported["results"] if row.get("check") == "failed"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, subprocess.SubprocessError):
        return True, ""
    finally:
        report.unlink(missing_ok=True)
    if done.returncode and wrong:
        return False, "nccom-test: an all-reduce within the node gives wrong numbers"
    return True, ""


def exchange(task: PairTask) -> float:
    """Return the seconds of the sums; negative if they were wrong. Raises torch's errors if they do not end."""
    import torch  # noqa: PLC0415 - as above
    from torch.distributed import TCPStore  # noqa: PLC0415

    from trainium_trainer.backends.device import pick_device  # noqa: PLC0415 - as above

    use_interface(task.host)
    timeout = timedelta(seconds=task.seconds)
    store = TCPStore(task.host, task.port, None, False, timeout, wait_for_workers=False)
    if not task.bandwidth:
        return measure_sums(torch.device("cpu"), store, task.index, task.size, timeout, values=_VALUES)
    return measure_sums(pick_device(0), store, task.index, task.size, timeout, values=_BANDWIDTH_VALUES)


def measure_sums(
    device: torch.device, store: Store, index: int, size: int, timeout: timedelta, *, values: int = _BANDWIDTH_VALUES
) -> float:
    """Time a few all-reduces of known float32 numbers; return their seconds, negative if the sums were wrong."""
    import torch  # noqa: PLC0415 - as above
    from torch import distributed as dist  # noqa: PLC0415

    from trainium_trainer.backends.device import group_backend  # noqa: PLC0415 - as above

    dist.init_process_group(group_backend(device), store=store, rank=index, world_size=size, timeout=timeout)
    expected = (torch.arange(values, dtype=torch.float32) % 1024).to(device)
    right = expected * sum(range(1, size + 1))
    dist.all_reduce(expected.clone())  # the first all-reduce opens the connections, and a device compiles it
    began = time.perf_counter()
    wrong = False
    for _ in range(_ROUNDS):
        sums = expected * (index + 1)
        dist.all_reduce(sums)
        wrong = wrong or not torch.equal(sums, right)
    seconds = time.perf_counter() - began
    return -1.0 if wrong else seconds


def compute_bandwidth(size: int, seconds: float) -> float:
    """Return the Gbit/s that each of `size` processes sent in `measure_sums`, as in a ring: 2 (n - 1) / n of it."""
    return 32 * _BANDWIDTH_VALUES * _ROUNDS * 2 * (size - 1) / size / seconds / 1e9


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
