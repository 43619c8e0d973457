"""The XLA device: launch the graph, run closures after it, fetch to the host.

On XLA an operation is only recorded; `sync` compiles and launches the operations since the last one.

Guarantees:
- Values leave the device only in `fetch` and in closures of `call_after_sync`, so that no graph is broken in two.
- With NXD_CPU_MODE=1 (NxD on plain CPU tensors) operations run at once and these methods are trivial.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch_xla
import torch_xla.core.xla_model as xm
from neuronx_distributed.utils import cpu_mode, get_device

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import Tensor


class XlaDevice:
    """The device of this process."""

    def __init__(self) -> None:
        self.device: torch.device = get_device()
        self.is_lazy = not cpu_mode()

    @property
    def is_neuron(self) -> bool:
        """Whether graphs run on NeuronCores with their kernels."""
        return self.is_lazy and os.environ.get("PJRT_DEVICE") == "NEURON"

    def sync(self) -> None:
        """Launch the recorded operations, then run the closures of `call_after_sync`."""
        if self.is_lazy:
            torch_xla.sync()

    def call_after_sync(self, closure: Callable[[Tensor], None], value: Tensor) -> None:
        """Call `closure` with `value` once the graph that computes it was launched (a step closure)."""
        if self.is_lazy:
            xm.add_step_closure(closure, args=(value,))
        else:
            closure(value)

    def fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors on the host, in one transfer; on the CPU they share the tensors' memory."""
        if not self.is_lazy:
            return [tensor.detach() for tensor in tensors]
        xla: Any = torch_xla._XLAC  # noqa: SLF001 - torch_xla has no public name for a transfer of many tensors
        xla._xla_sync_multi(list(tensors), devices=[], wait=True, sync_xla_data=False)  # noqa: SLF001
        copies: list[Tensor] = xla._xla_get_cpu_tensors(list(tensors))  # noqa: SLF001
        return copies
