"""The memory of the device of this process.

Guarantees:
- The number is one that the machine reports, never a guess.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from trainium_contract.sizes import INSTANCES
from trainium_trainer.neuron_environment import LOGICAL_CORE, PRODUCT_NAME

if TYPE_CHECKING:
    from pathlib import Path

    import torch


def device_memory(device: torch.device, *, product_name: Path = PRODUCT_NAME) -> int | None:
    """Bytes of this process's device; None for a CPU and where nobody knows. `product_name`: file with the type."""
    if device.type == "cuda":
        import torch  # noqa: PLC0415 - `check` needs no device

        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type not in ("neuron", "xla"):
        return None
    try:
        instance = INSTANCES.get(product_name.read_text(encoding="utf-8").strip())
    except OSError:
        return None
    if instance is None or not instance.core_bytes:
        return None
    return instance.core_memory(1 if os.environ.get(LOGICAL_CORE) == "1" else None)
