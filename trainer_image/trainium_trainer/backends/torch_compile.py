"""Compile layers with torch.compile; all layers of a model share one program.

Guarantees:
- Modules stay in place, so the names of parameters and the hooks of recompute, FSDP and tensor parallelism stay.
- A missing compiler is reported before a device is used.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from trainium_contract.trainer.parallelism import TorchCompile
from trainium_trainer.exits import UserError
from trainium_trainer.models.stages import list_present_layers

if TYPE_CHECKING:
    from trainium_trainer.models.llama import Llama

_NEURON = "neuron"
_log = logging.getLogger("trainium.compiled")


def check_compiler(mode: TorchCompile, device_type: str) -> None:
    """Raise UserError if layers are compiled for a CPU without a C++ compiler."""
    if mode is TorchCompile.NONE or device_type != "cpu":
        return
    from torch._inductor import cpp_builder, exc  # noqa: PLC0415 - slow to import

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        raise UserError(
            "torchCompile is Layers, but no C++ compiler is here, which Inductor needs for a CPU: install g++ in the "
            "image, name another with the variable CXX, or set torchCompile to None"
        ) from None


def compile_layers(model: Llama, mode: TorchCompile, device_type: str, *, adapters: bool = False) -> None:
    """Compile every layer of a model or a stage at its first call; call this before FSDP is applied.

    Layers with adapters are not compiled on a CPU: Inductor's programs for their narrow matrices are a third slower.
    """
    if mode is TorchCompile.NONE:
        return
    if adapters and device_type == "cpu":
        _log.warning("torchCompile is ignored: on a CPU, layers with LoRA adapters are slower when they are compiled")
        return
    # TorchNeuron compiles with its backend and needs fixed shapes; the shapes here are always fixed.
    backend = _NEURON if device_type == _NEURON else "inductor"
    for layer in list_present_layers(model):
        layer.compile(backend=backend, dynamic=False, fullgraph=True)
