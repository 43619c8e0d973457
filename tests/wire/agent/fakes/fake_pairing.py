"""Exchanges between nodes with faults: `pair-fault-<pod>` in $FAKE_CONTROL holds drop, slow, wrong or miscompute.

Or `throttle GIGABITS [HOST]`: what this node sends in all exchanges, or in those that HOST leads, has that bandwidth.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from trainium_trainer.checks import pair_test

_BANDWIDTH_VALUES = 1 << 20
"""A quarter of what real nodes exchange: five nodes of a test share two processors."""


def main(argv: list[str]) -> int:
    fault = Path(os.environ["FAKE_CONTROL"]) / f"pair-fault-{os.environ['TRAINIUM_POD_NAME']}"
    kind = fault.read_text() if fault.exists() else ""
    pair_test._BANDWIDTH_VALUES = _BANDWIDTH_VALUES
    if kind == "drop":
        time.sleep(3600)
    if kind == "miscompute":
        pair_test.check_computation = lambda: (False, "a matrix product on cpu is wrong")
    if kind.startswith("throttle"):
        gigabits, *hosts = kind.split()[1:]
        if json.loads(argv[0])["host"] in hosts or not hosts:
            throttle(float(gigabits))
    if kind in ("slow", "wrong"):
        from torch import distributed as dist

        original = dist.all_reduce

        def all_reduce_with_fault(tensor: torch.Tensor, *args: Any, **options: Any) -> object:
            if kind == "slow":
                time.sleep(1.5)
            else:
                tensor += 1
            return original(tensor, *args, **options)

        dist.all_reduce = all_reduce_with_fault
    return pair_test.main(argv)


def throttle(gigabits: float) -> None:
    """Make each all-reduce between two nodes take as long as a link of this bandwidth does."""
    from torch import distributed as dist

    original = dist.all_reduce

    def all_reduce_throttled(tensor: torch.Tensor, *args: Any, **options: Any) -> object:
        started_at = time.monotonic()
        result = original(tensor, *args, **options)
        time.sleep(max(0.0, 8 * tensor.nbytes / (gigabits * 1e9) - (time.monotonic() - started_at)))
        return result

    dist.all_reduce = all_reduce_throttled
