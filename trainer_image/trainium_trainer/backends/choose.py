"""Choose the backend of a run from the configuration and the installed packages.

Guarantees:
- Only the library of the chosen backend is imported.
- The needs and limits of a backend are in its folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainium_contract.trainer.parallelism import BackendChoice, DeviceChoice
from trainium_trainer.backends.nxd import limits, requirements
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from trainium_trainer.backends.base import Backend
    from trainium_trainer.configuration.config import Settings
    from trainium_worker.pulse import Pulse


def choose_backend(choice: BackendChoice, device: DeviceChoice = DeviceChoice.AUTO) -> BackendChoice:
    """Return the kind of backend. Raises UserError.

    Auto selects Nxd if its packages are installed, TorchNeuron is not, and no other device is configured.
    """
    missing = requirements.find_missing_packages()
    if choice is BackendChoice.NXD and missing:
        raise UserError(requirements.explain_missing_packages(" and ".join(missing)))
    if choice is BackendChoice.AUTO:
        elsewhere = device in (DeviceChoice.CPU, DeviceChoice.CUDA)
        return BackendChoice.NATIVE if missing or elsewhere or _has_torch_neuron() else BackendChoice.NXD
    return choice


def refuse_unsupported(settings: Settings) -> None:
    """Raise UserError for a configuration that the configured backend does not support.

    It imports no library and uses no device, so `trainium-trainer check` refuses the same configurations as a run.
    """
    if settings.config.backend is BackendChoice.NXD:
        limits.check_model(settings.shape)
        limits.check_limits(settings.config, settings.dp_size)


def find_backend(settings: Settings, *, devices: Path = Path("/dev")) -> BackendChoice:
    """Return the backend of this run after checking its packages and its device. Raises UserError.

    `devices` is the folder of device files.
    """
    choice = choose_backend(settings.config.backend, settings.config.device)
    if choice is BackendChoice.NXD:
        requirements.check_node(settings, devices)
    else:
        from trainium_trainer.backends.device import pick_device  # noqa: PLC0415
        from trainium_trainer.backends.torch_compile import check_compiler  # noqa: PLC0415 - imports torch

        device = pick_device(settings.launch.local_rank, settings.config.device)
        check_compiler(settings.config.torch_compile, device.type)
        if settings.config.parallelism.pipeline > 1:
            from trainium_trainer.backends.pipeline import check_torch  # noqa: PLC0415 - slow to import

            check_torch()
    return choice


def create_backend(choice: BackendChoice, settings: Settings, pulse: Pulse | None = None) -> Backend:
    """Create the backend that `find_backend` returned and join its process group. Collective.

    Raises UserError if one of its packages cannot be imported.
    """
    if choice is BackendChoice.NXD:
        requirements.require_packages()
        from trainium_trainer.backends.nxd.backend import NxdBackend  # noqa: PLC0415 - only where its packages are

        return NxdBackend(settings, pulse)
    from trainium_trainer.backends.native import NativeBackend  # noqa: PLC0415 - only what is chosen is imported

    return NativeBackend(settings, pulse)


def _has_torch_neuron() -> bool:
    import torch  # noqa: PLC0415 - only a machine with both libraries asks

    return hasattr(torch, "neuron")
