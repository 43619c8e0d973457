"""Which backend drives this run, from the configuration and from what is installed.

Invariants: no backend's library is imported before it is chosen, and only the chosen one is; a missing package is one
sentence that names it and says where it comes from.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trainium_contract.trainer.parallelism import BackendChoice, DeviceChoice
from trainium_trainer.configuration.backend_limits import check_nxd, check_nxd_node
from trainium_trainer.exits import UserError
from trainium_trainer.neuron_environment import DEVICE_FILES

if TYPE_CHECKING:
    from trainium_trainer.backends.base import Backend
    from trainium_trainer.configuration.config import Settings
    from trainium_trainer.monitor.pulse import Pulse

NXD_PACKAGES = ("torch_xla", "neuronx_distributed")
"""Without these the nxd backend cannot be imported."""
_NEURON = "NEURON"


def choose(choice: BackendChoice, device: DeviceChoice = DeviceChoice.AUTO) -> BackendChoice:
    """Native or Nxd; Auto takes Nxd where its packages are, TorchNeuron is not, and no other device is asked for.

    Raises UserError.
    """
    missing = [name for name in NXD_PACKAGES if not _is_installed(name)]
    if choice is BackendChoice.NXD and missing:
        raise UserError(_nxd_cannot_be_imported(" and ".join(missing)))
    if choice is BackendChoice.AUTO:
        elsewhere = device in (DeviceChoice.CPU, DeviceChoice.CUDA)
        return BackendChoice.NATIVE if missing or elsewhere or _has_torch_neuron() else BackendChoice.NXD
    return choice


def require_nxd() -> None:
    """Import what the nxd backend needs; UserError that names what is missing and where it comes from."""
    try:
        for name in NXD_PACKAGES:
            importlib.import_module(name)
    except ImportError as error:
        raise UserError(_nxd_cannot_be_imported(error.name or str(error))) from error


def _nxd_cannot_be_imported(what: str) -> str:
    return (
        f"backend is Nxd, but {what} cannot be imported: use the image pytorch-training-neuronx of Neuron SDK 2.30, or "
        "install torch-neuronx 2.9 and neuronx-distributed (https://awsdocs-neuron.readthedocs-hosted.com, setup for "
        "PyTorch), or set backend to Native"
    )


def find_backend(settings: Settings, *, devices: Path = Path("/dev")) -> BackendChoice:
    """The backend of this run, once it is sure that its packages and its device are there. Raises UserError.

    `devices` is the folder of device files.
    """
    choice = choose(settings.config.backend, settings.config.device)
    if choice is BackendChoice.NXD:
        _check_for_nxd(settings, devices)
    else:
        from trainium_trainer.backends.compiled import check_compiler  # noqa: PLC0415 - imports torch
        from trainium_trainer.backends.device import pick_device  # noqa: PLC0415

        device = pick_device(settings.launch.local_rank, settings.config.device)
        check_compiler(settings.config.torch_compile, device.type)
        if settings.config.parallelism.pipeline > 1:
            from trainium_trainer.backends.pipeline import check_torch  # noqa: PLC0415 - slow to import

            check_torch()
    return choice


def _check_for_nxd(settings: Settings, devices: Path) -> None:
    launch = settings.launch
    check_nxd(settings.config, settings.dp_size)
    check_nxd_node(settings.config, launch.local_world_size)
    on_cpu = os.environ.get("NXD_CPU_MODE", "0") != "0"
    if launch.alone and on_cpu:
        raise UserError("NXD_CPU_MODE is set, with which NxD makes no graphs to compile: unset it")
    computes_elsewhere = launch.alone or on_cpu or os.environ.get("PJRT_DEVICE", _NEURON) != _NEURON
    if not computes_elsewhere and not any(devices.glob(DEVICE_FILES)):
        raise UserError(
            "backend is Nxd, but this node has no Neuron device: give the worker aws.amazon.com/neuron devices, or set "
            "backend to Native"
        )


def make_backend(choice: BackendChoice, settings: Settings, pulse: Pulse | None = None) -> Backend:
    """The backend that `find_backend` has found, with its process group joined. Collective."""
    if choice is BackendChoice.NXD:
        module = importlib.import_module("trainium_trainer.backends.nxd")
        backend: Backend = module.NxdBackend(settings, pulse)
        return backend
    from trainium_trainer.backends.native import NativeBackend  # noqa: PLC0415 - only what is chosen is imported

    return NativeBackend(settings, pulse)


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # in sys.modules without a spec, as some packages put themselves there
        return name in sys.modules


def _has_torch_neuron() -> bool:
    import torch  # noqa: PLC0415 - only a machine with both libraries asks

    return hasattr(torch, "neuron")
