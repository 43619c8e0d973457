"""The pairwise test with faults: `pair-fault-<pod>` in $FAKE_CONTROL holds drop, slow, wrong or miscompute."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainium_trainer.checks import pair_test

if TYPE_CHECKING:
    import torch


def main(argv: list[str]) -> int:
    fault = Path(os.environ["FAKE_CONTROL"]) / f"pair-fault-{os.environ['TRAINIUM_POD_NAME']}"
    kind = fault.read_text() if fault.exists() else ""
    if kind == "drop":
        time.sleep(3600)
    if kind == "miscompute":
        pair_test.computes_right = lambda: (False, "a matrix product on cpu is wrong")
    if kind in ("slow", "wrong"):
        from torch import distributed as dist

        genuine = dist.all_reduce

        def faulty(tensor: torch.Tensor, *args: Any, **options: Any) -> object:
            if kind == "slow":
                time.sleep(1.5)
            else:
                tensor += 1
            return genuine(tensor, *args, **options)

        dist.all_reduce = faulty
    return pair_test.main(argv)
