"""The XLA device behind four verbs: launch the graph, do something after it, fetch to the host, and is it there at all.

On XLA an operation only records; `sync` compiles and launches what was recorded since the last one.

Guarantees:
- Numbers leave the device in `fetch` and in what `after_sync` was given, nowhere else, so nothing breaks a graph in
  two.
- With NXD_CPU_MODE=1 (NxD on plain CPU tensors) everything happens at once and these verbs are trivial.
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
        """Whether graphs run on NeuronCores, with their kernels."""
        return self.is_lazy and os.environ.get("PJRT_DEVICE") == "NEURON"

    def sync(self) -> None:
        """Launch what was recorded; then run what `after_sync` was given."""
        if self.is_lazy:
            torch_xla.sync()

    def after_sync(self, closure: Callable[[Tensor], None], value: Tensor) -> None:
        """Call `closure` with `value` once the graph that computes it was launched (a step closure)."""
        if self.is_lazy:
            xm.add_step_closure(closure, args=(value,))
        else:
            closure(value)

    def fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors on the host, in one transfer; without a device between, they share the tensors' memory."""
        if not self.is_lazy:
            return [tensor.detach() for tensor in tensors]
        xla: Any = torch_xla._XLAC  # noqa: SLF001 - torch_xla has no public name for a transfer of many tensors
        xla._xla_sync_multi(list(tensors), devices=[], wait=True, sync_xla_data=False)  # noqa: SLF001
        found: list[Tensor] = xla._xla_get_cpu_tensors(list(tensors))  # noqa: SLF001
        return found
