"""Layers as compiled programs: torch.compile, one program for all layers of a model.

Guarantees:
- Modules stay in place, so names of parameters and what recompute, FSDP and tensor parallelism hook into layers stay.
- A missing compiler is reported before a device is touched.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from trainium_contract.trainer.parallelism import TorchCompile
from trainium_trainer.exits import UserError
from trainium_trainer.models.stages import present_layers

if TYPE_CHECKING:
    from trainium_trainer.models.llama import Llama

_NEURON = "neuron"
_log = logging.getLogger("trainium.compiled")


def check_compiler(mode: TorchCompile, device_type: str) -> None:
    """Raise UserError where layers are to be compiled for a CPU and no C++ compiler is there."""
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
    """Have every layer of a model or a stage compiled when it is first called; to be called before FSDP is applied.

    Layers with adapters stay uncompiled on a CPU: Inductor's programs for their narrow matrices train a third slower.
    """
    if mode is TorchCompile.NONE:
        return
    if adapters and device_type == "cpu":
        _log.warning("torchCompile is ignored: on a CPU, layers with LoRA adapters are slower when they are compiled")
        return
    # TorchNeuron compiles with a separate backend and takes fixed shapes only; ours are fixed in any case.
    backend = _NEURON if device_type == _NEURON else "inductor"
    for layer in present_layers(model):
        layer.compile(backend=backend, dynamic=False, fullgraph=True)
