"""Check that the packages and devices of backend Nxd are present.

Guarantees:
- `find_missing_packages` looks names up and imports nothing.
- The error for a missing package names the package and its source.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import TYPE_CHECKING

from trainium_trainer.backends.nxd.limits import check_limits, check_model, check_node_size
from trainium_trainer.exits import UserError
from trainium_trainer.neuron_environment import DEVICE_FILES

if TYPE_CHECKING:
    from pathlib import Path

    from trainium_trainer.configuration.config import Settings

PACKAGES = ("torch_xla", "neuronx_distributed")
"""The packages that the backend imports."""
_NEURON = "NEURON"


def find_missing_packages() -> list[str]:
    """Return the packages that are not installed."""
    return [name for name in PACKAGES if not _is_installed(name)]


def require_packages() -> None:
    """Import the packages of the backend. Raises UserError that names missing ones and their source."""
    try:
        for name in PACKAGES:
            importlib.import_module(name)
    except ImportError as error:
        raise UserError(explain_missing_packages(error.name or str(error))) from error


def explain_missing_packages(what: str) -> str:
    """Return the error for missing packages."""
    return (
        f"backend is Nxd, but {what} cannot be imported: use the image pytorch-training-neuronx of Neuron SDK 2.30, or "
        "install torch-neuronx 2.9 and neuronx-distributed (https://awsdocs-neuron.readthedocs-hosted.com, setup for "
        "PyTorch), or set backend to Native"
    )


def check_node(settings: Settings, devices: Path) -> None:
    """Raise UserError if the backend does not support this run or node; `devices` is the folder of device files."""
    launch = settings.launch
    check_model(settings.shape)
    check_limits(settings.config, settings.dp_size)
    check_node_size(settings.config, launch.local_world_size)
    on_cpu = os.environ.get("NXD_CPU_MODE", "0") != "0"
    if launch.is_dry_run and on_cpu:
        raise UserError("NXD_CPU_MODE is set, with which NxD makes no graphs to compile: unset it")
    computes_elsewhere = launch.is_dry_run or on_cpu or os.environ.get("PJRT_DEVICE", _NEURON) != _NEURON
    if not computes_elsewhere and not any(devices.glob(DEVICE_FILES)):
        raise UserError(
            "backend is Nxd, but this node has no Neuron device: give the worker aws.amazon.com/neuron devices, or set "
            "backend to Native"
        )


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # some packages put themselves into sys.modules without a spec
        return name in sys.modules
